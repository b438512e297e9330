"""How do attention scores depend on relative position, the offset i - j of query and key? Public
function of a split (:func:`offset_profile`) and of a model
(:func:`relative_kernel`); the report's section on rotary planes calls the first.

- **Kernel.** On a normalised basis the (bias, bias) term of a rotary model without QK-norm is
  exactly a function of the offset. With q and k the projected mean and constants before rotation,
  and R_D the rotation by D positions, it is ``kappa(D) = sum_m kappa_m(D)``, where plane m gives
  ``kappa_m(D) = scale <R_D q, k> = c_m cos(theta_m D) + s_m sin(theta_m D)``.
- **Profile** of any term or plane: its mean over the cells at each offset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.base.intervals import paired_interval
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.attention import rotate
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.models.rotary import RotaryPlanes
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.score_split import ScoreSplit
from tl_geometry.scores.splitter import is_relative

TOTAL = "all terms"
"""Name of the sum of all terms in a profile."""
Offsets = Float[Tensor, " offset"] | Int[Tensor, " offset"]
"""Offsets i - j in tokens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RelativeKernel(Result):
    """The part of some heads' scores that is a function of the offset D = i - j alone, plane by
    plane, ``cosine_m cos(theta_m D) + sine_m sin(theta_m D)``: what :func:`relative_kernel`
    returns.

    In units of the score (before any soft cap). A plane is largest at offset ``peak`` (tokens, less
    than a wavelength), where it is ``amplitude``; a plane that is not rotated is a constant.
    """

    heads: tuple[tuple[int, int], ...]
    head_planes: HeadPlanes
    cosine: Float[Tensor, "head plane"]
    sine: Float[Tensor, "head plane"]
    table_axes = ("head", "plane")
    table_values = ("wavelength", "amplitude", "peak", "cosine", "sine")

    @property
    def theta(self) -> Float[Tensor, "head plane"]:
        """Frequencies of the planes, in radians per token."""
        return self.head_planes.theta

    @property
    def wavelength(self) -> Float[Tensor, "head plane"]:
        """Tokens per turn of each plane."""
        return self.head_planes.wavelength

    @property
    def amplitude(self) -> Float[Tensor, "head plane"]:
        """Largest value of each plane over all offsets."""
        size = torch.hypot(self.cosine, self.sine)
        return torch.where(self.theta == 0, self.cosine, size)

    @property
    def peak(self) -> Float[Tensor, "head plane"]:
        """The offset in tokens at which each plane is largest; NaN for what is not rotated."""
        # a negative frequency mirrors the phase
        phase = torch.remainder(torch.atan2(self.sine, self.cosine) * self.theta.sign(), math.tau)
        return phase / torch.where(self.theta == 0, torch.nan, self.theta.abs())

    def by_plane(self, offsets: Offsets | None = None) -> Float[Tensor, "head plane offset"]:
        """The kernel of each plane at ``offsets``, by default 0 to
        ``head_planes.length - 1``."""
        distances = torch.arange(self.head_planes.length) if offsets is None else offsets
        # planes that a head lacks are NaN: as zeros they add nothing
        angle = torch.nan_to_num(self.theta).unsqueeze(-1) * distances.double()
        cosine, sine = (torch.nan_to_num(x).unsqueeze(-1) for x in (self.cosine, self.sine))
        return cosine * angle.cos() + sine * angle.sin()

    def total(self, offsets: Offsets | None = None) -> Float[Tensor, "head offset"]:
        """The kernel itself: the sum over planes."""
        return self.by_plane(offsets).sum(1)

    def table_mask(self) -> Tensor:
        return ~self.theta.isnan()


def relative_kernel(
    model: ModelLike,
    basis: PositionContext,
    *,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[Head] | Head | None = None,
) -> RelativeKernel:
    """The relative-position kernel of heads of a rotary model: what they would score at each offset
    if every token were the mean.

    With the mean of a normalised basis, ``q = (mean gain) W_Q + (norm bias) W_Q + b_Q`` (k alike):
    ``kappa(D) = scale <R_D q, k>``, exactly the (bias, bias) term of
    ``split_scores(model, tokens, basis)`` at every cell with ``i - j = D``.

    Args:
        basis: from ``decompose(model, tokens, normalize=True)``.
        layers, heads: which heads, all by default.

    The rotation is that of a prompt as long as the basis has seen.

    Raises ``GeometryError`` for a basis of the states themselves, ``UnsupportedModelError`` for
    models without rotation and for QK-norm, whose scale varies by token:
    ``offset_profile(split, "bias-bias")`` has the mean at each offset there.
    """
    view = as_view(model)
    require_basis(basis)
    basis.check_model(view)
    expected = "a normalised basis"
    got, instead = "one of the states themselves", "decompose(model, tokens, normalize=True)"
    require(basis.provenance.normalized, "basis", expected=expected, got=got, instead=instead)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    size = basis.length
    kernels: dict[int, tuple[RotaryPlanes, Tensor]] = {}

    def on_layer(layer: LayerView) -> None:
        kernels[layer.layer] = _kernel_of(layer.normalized(), basis)

    # any tokens do: of the pass only the rotation and the constants are used
    ids = torch.arange(size).remainder(view.d_vocab).unsqueeze(0)
    view.run_layers(ids, sorted({layer for layer, _ in chosen}), on_layer, verify=False)
    planes = HeadPlanes.of([kernels[layer][0] for layer, _ in chosen], size)
    waves = torch.full((2, *planes.theta.shape), torch.nan, dtype=torch.float64)
    for row, (layer, head) in enumerate(chosen):
        coefficients = kernels[layer][1][:, head]
        waves[:, row, : coefficients.shape[1]] = coefficients
    return RelativeKernel(
        provenance=view.provenance(
            corpus=basis.provenance.corpus,
            contexts=basis.provenance.contexts,
            window=basis.window,
            has_bos=basis.provenance.has_bos,
            normalized=True,
            flags=basis.remarks(view),
        ),
        heads=chosen,
        head_planes=planes,
        cosine=waves[0],
        sine=waves[1],
    )


def _kernel_of(
    layer: LayerView, basis: PositionContext
) -> tuple[RotaryPlanes, Float[Tensor, "row head plane"]]:
    """The planes of a layer, and the coefficients of its heads' kernels: row 0 the cosines', row 1
    the sines'."""
    turn, what = layer.turn, f"layer {layer.layer}"
    if turn is None:
        got = "scores without rotation"
        fail(what, expected="a rotary model", got=got, error=UnsupportedModelError)
    expected, got = "scores without a scale that varies by token", "QK-norm"
    options: dict[str, Any] = {"instead": 'offset_profile(split_scores(...), "bias-bias")'}
    options["error"] = UnsupportedModelError
    require(is_relative(layer), what, expected=expected, got=got, **options)
    planes = layer.planes()
    mean = basis.mean[basis.index(layer.layer)].to(layer.h).expand_as(layer.h[:1])
    # at position 0 nothing is turned yet
    q = (layer.q_map(mean) + layer.q_constant[:1])[0, :1].double()
    k = (layer.k_map(mean) + layer.k_constant[:1])[0, :1].double()
    zero_cosine = torch.zeros(1, turn.cos.shape[-1]).to(q)
    # <R_D q, k> = cos(theta D) <q, k> + sin(theta D) <J q, k> in a plane, J the quarter turn
    quarter = rotate(q, zero_cosine, torch.ones_like(zero_cosine), turn.pairing)
    products = torch.stack([q * k, quarter * k])[:, 0] * layer.scale
    by_plane = products.new_zeros(*products.shape[:2], len(planes.theta))
    summed = by_plane.index_add_(-1, planes.plane.to(by_plane.device), products).cpu()
    # coordinates that are not rotated have no quarter turn: their plane is a constant
    summed[1, :, planes.theta == 0] = 0
    return planes, summed


@dataclass(frozen=True, eq=False, kw_only=True)
class OffsetProfile(Result):
    """Mean of a term at each offset i - j from ``first`` on, with ``low`` and ``high`` the bounds
    of its 95% interval over prompts: what :func:`offset_profile` returns. The basis is taken
    as given, so the interval does not cover its sampling error.

    In units of the score before any soft cap; NaN where no cell has the offset. ``cells`` counts
    the cells of one prompt. Bounds are NaN for fewer than 10 prompts.
    """

    heads: tuple[tuple[int, int], ...]
    term: str
    first: int
    mean: Float[Tensor, "head offset"]
    low: Float[Tensor, "head offset"]
    high: Float[Tensor, "head offset"]
    cells: Int[Tensor, "head offset"]
    table_axes, table_values = ("head", "offset"), ("mean", "low", "high", "cells")

    @property
    def offsets(self) -> Int[Tensor, " offset"]:
        """The offsets i - j in tokens."""
        return torch.arange(self.mean.shape[1]) + self.first

    @property
    def peak(self) -> Int[Tensor, " head"]:
        """The offset of each head's largest mean."""
        top = torch.where(torch.isnan(self.mean), -torch.inf, self.mean).argmax(-1)
        return self.offsets[top]

    def axis_labels(self, axis: str) -> Mapping[str, Sequence[object]]:
        return {axis: self.offsets.tolist()} if axis == "offset" else super().axis_labels(axis)


def offset_profile(
    split: ScoreSplit,
    term: tuple[str, str] | str | None = None,
    *,
    drop: int | None = None,
) -> OffsetProfile:
    """Mean of a term of a split (all terms together for ``None``) at each offset, over the allowed
    cells without the first ``drop`` queries and keys, and a t interval over prompts.

    ``mean_D = mean over prompts of (mean over cells with i - j = D)``. For (bias, bias) on a
    normalised basis of a rotary model without QK-norm it is the kernel, the same in every prompt,
    so that its interval has no width.
    """
    start = (split.provenance.window or (0, 0))[0] if drop is None else drop
    length = split.k.shape[2]
    require(0 <= start < length, "drop", expected=f"0 to {length - 1}", got=start)
    matrix = split.summed() if term is None else split.terms[term]
    term_matrix, allowed = matrix[..., start:, start:].double(), split.allowed[:, start:, start:]
    batch, heads, length, _ = term_matrix.shape
    # i - j + length - 1, so that the most negative offset has index 0
    index = torch.arange(length).unsqueeze(1) - torch.arange(length) + length - 1
    index = index.flatten().to(term_matrix.device)
    size = 2 * length - 1
    cells = allowed.new_zeros(heads, size, dtype=torch.int64)
    cells.index_add_(1, index, allowed.flatten(1).long())
    sums = term_matrix.new_zeros(batch, heads, size)
    sums.index_add_(2, index, torch.where(allowed, term_matrix, 0).flatten(2))
    means = sums / torch.where(cells > 0, cells, torch.nan)
    mean, low, high, _ = paired_interval(means)
    # the first offset that any head's mask allows (argmax returns the first maximum)
    first = int((cells > 0).any(0).int().argmax())
    mean, low, high, cells = (x[:, first:].cpu() for x in (mean, low, high, cells))
    name = TOTAL if term is None else split.label("-".join(split.terms.pair(term)))
    return OffsetProfile(
        provenance=split.provenance,
        heads=split.heads,
        term=name,
        first=first - (length - 1),
        mean=mean,
        low=low,
        high=high,
        cells=cells,
    )
