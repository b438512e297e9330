"""How do attention scores depend on relative position, the offset i - j of query and key? Public
functions of a split (:func:`offset_profile`, :func:`offset_share`) and of a model
(:func:`relative_kernel`); the report's section on rotary planes calls the first.

- **Kernel.** On a normalised basis the (bias, bias) term of a rotary model without QK-norm is
  exactly a function of the offset. With q and k the projected mean and constants before rotation,
  and R_D the rotation by D positions, it is ``kappa(D) = sum_m kappa_m(D)``, where plane m gives
  ``kappa_m(D) = scale <R_D q, k> = c_m cos(theta_m D) + s_m sin(theta_m D)``.
- **Profile** of any term or plane: its mean over the cells at each offset.
- **Share** of the scores that a function of the offset explains, in prompts that it was not fitted
  on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.base.intervals import paired_interval
from tl_geometry.base.results import Result
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.groups import BLOCK
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.attention_spec import rotate
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.models.rotary import RotaryPlanes, rotary_planes
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.shapes import OffsetSums, offset_sums
from tl_geometry.scores.split import ScoreSplit
from tl_geometry.scores.splitter import is_relative

TOTAL = "all terms"
"""Name of the sum of all terms in a profile."""


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

    def by_plane(
        self, offsets: Int[Tensor, " offset"] | None = None
    ) -> Float[Tensor, "head plane offset"]:
        """The kernel of each plane at ``offsets``, by default 0 to
        ``head_planes.length - 1``."""
        distances = torch.arange(self.head_planes.length) if offsets is None else offsets
        # planes that a head lacks are NaN: as zeros they add nothing
        angle = torch.nan_to_num(self.theta).unsqueeze(-1) * distances.double()
        cosine, sine = (torch.nan_to_num(x).unsqueeze(-1) for x in (self.cosine, self.sine))
        return cosine * angle.cos() + sine * angle.sin()

    def total(self, offsets: Int[Tensor, " offset"] | None = None) -> Float[Tensor, "head offset"]:
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
    length: int | None = None,
) -> RelativeKernel:
    """The relative-position kernel of heads of a rotary model: what they would score at each offset
    if every token were the mean.

    With the mean of a normalised basis, ``q = (mean gain) W_Q + (norm bias) W_Q + b_Q`` (k alike):
    ``kappa(D) = scale <R_D q, k>``, exactly the (bias, bias) term of
    ``split_scores(model, tokens, basis)`` at every cell with ``i - j = D``.

    Args:
        basis: from ``decompose(model, tokens, normalize=True)``.
        layers, heads: which heads, all by default.
        length: positions of the forward pass whose rotation is used (some scaled rotary bases
            depend on it), by default the positions that the basis has seen.

    Raises ``GeometryError`` for a basis of the states themselves and for models without rotation,
    ``UnsupportedModelError`` for QK-norm, whose scale varies by token:
    ``offset_profile(split, "bias-bias")`` has the mean at each offset there.
    """
    view = as_view(model)
    require_basis(basis)
    basis.check_model(view)
    expected = "a normalised basis"
    got, instead = "one of the states themselves", "decompose(model, tokens, normalize=True)"
    require(basis.provenance.normalized, "basis", expected=expected, got=got, instead=instead)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    size = basis.length if length is None else length
    fits = 2 <= size <= view.n_ctx
    require(fits, "length", expected=f"2 to {view.n_ctx} positions", got=size)
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
        fail(what, expected="a rotary model", got="scores without rotation")
    require(
        bool(is_relative(layer)),
        what,
        expected="scores without a scale that varies by token",
        got="QK-norm",
        instead='offset_profile(split_scores(...), "bias-bias")',
        error=UnsupportedModelError,
    )
    planes = rotary_planes(layer)
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
    of its ``level`` interval over prompts: what :func:`offset_profile` returns. The basis is taken
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
    level: float = 0.95
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


def _term_and_mask(
    split: ScoreSplit, term: tuple[str, str] | str | None, drop: int | None
) -> tuple[Float[Tensor, "batch head query key"], Bool[Tensor, "head query key"]]:
    """A term, or all of them together, as a matrix (finite everywhere), and the mask, both without
    the dropped positions."""
    start = (split.provenance.window or (0, 0))[0] if drop is None else drop
    length = split.allowed.shape[-1]
    require(0 <= start < length, "drop", expected=f"0 to {length - 1}", got=start)
    matrix = split.sum_of_terms() if term is None else split[term]
    return matrix[..., start:, start:], split.allowed[:, start:, start:]


def offset_profile(
    split: ScoreSplit,
    term: tuple[str, str] | str | None = None,
    *,
    drop: int | None = None,
    level: float = 0.95,
) -> OffsetProfile:
    """Mean of a term of a split (all terms together for ``None``) at each offset, over the allowed
    cells without the first ``drop`` queries and keys, and a t interval over prompts.

    ``mean_D = mean over prompts of (mean over cells with i - j = D)``. For (bias, bias) on a
    normalised basis of a rotary model without QK-norm it is the kernel, the same in every prompt,
    so that its interval has no width.
    """
    require(0 < level < 1, "level", expected="between 0 and 1", got=level)
    term_matrix, allowed = _term_and_mask(split, term, drop)
    term_matrix = term_matrix.double()
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
    mean, low, high, _ = paired_interval(means, level=level)
    # the first offset that any head's mask allows (argmax returns the first maximum)
    first = int((cells > 0).any(0).int().argmax())
    mean, low, high, cells = (x[:, first:].cpu() for x in (mean, low, high, cells))
    name = TOTAL if term is None else term if isinstance(term, str) else "-".join(term)
    return OffsetProfile(
        provenance=split.provenance,
        heads=split.heads,
        term=name,
        first=first - (length - 1),
        mean=mean,
        low=low,
        high=high,
        cells=cells,
        level=level,
    )


def offset_share(
    split: ScoreSplit,
    term: tuple[str, str] | str | None = None,
    *,
    groups: int | None = None,
    drop: int | None = None,
) -> Float[Tensor, " head"]:
    """Share of the row-centred scores (or of one term) that row-centred indicators of the offset
    explain, cross-validated.

    Prompts are cut into ``groups`` contiguous groups g. The profile ``beta_(-g)`` is fitted on all
    other groups by least squares, with S~ the row-centred scores and D~ the row-centred indicators,
    and ``share = 1 - sum_g |S~_g - D~ beta_(-g)|^2 / sum_g |S~_g|^2``. It is at most one, and
    negative where the profile of other prompts predicts worse than none.

    Its null value is zero: without a profile common to all prompts, 5 to 8% of shares are above it.
    Prompts of one text belong in one group, which by default holds 8 prompts
    (:func:`prompt_groups`). If each text has a profile of its own, 10% of shares are above zero
    with 8 texts and 13% with 2 to 4. With fewer than 16 prompts the share holds for their texts
    only.
    """
    batch = split.q.shape[1]
    groups = prompt_groups(batch) if groups is None else groups
    require(2 <= groups <= batch, "groups", expected=f"2 to {batch}, the prompts", got=groups)
    term_matrix, allowed = _term_and_mask(split, term, drop)
    shares = torch.full((len(split.heads),), torch.nan, dtype=torch.float64)
    for layer in dict.fromkeys(layer for layer, _ in split.heads):
        heads_of_layer = [i for i, (head_layer, _) in enumerate(split.heads) if head_layer == layer]
        # heads of one layer have the same mask
        inside = allowed[heads_of_layer[0]]
        centred = row_center(term_matrix[:, heads_of_layer].double(), inside)
        shares[heads_of_layer] = cross_validated(
            [offset_sums(part, inside) for part in centred.tensor_split(groups)]
        ).cpu()
    return shares


def prompt_groups(prompts: int) -> int:
    """Groups of :func:`offset_share`: 8, or as many as hold 8 prompts each, at least 2.

    Consecutive prompts are often of one text. In simulations where each run of eight prompts shared
    a profile and all prompts together had none, eight groups of 2 prompts gave a share above zero
    in 81% of repeats, eight groups of 4 in 40%.

    >>> prompt_groups(12), prompt_groups(40), prompt_groups(200)
    (2, 5, 8)
    """
    return max(2, min(8, prompts // BLOCK))


def cross_validated(groups: Sequence[OffsetSums]) -> Float[Tensor, " head"]:
    """The share of :func:`offset_share` from the sums of each group of prompts."""
    pooled = reduce(OffsetSums.__add__, groups)
    used = pooled.counts > 0
    explained = torch.zeros_like(pooled.energy)
    for group in groups:
        gram = (pooled.gram - group.gram)[used][:, used]
        # the dummies sum to a row constant, so the Gram matrix is singular: eigenvalues below 1e-10
        # of the largest are rounding
        inverse = torch.linalg.pinv(gram, hermitian=True, rtol=1e-10)
        beta = (pooled.sums - group.sums)[:, used] @ inverse
        fitted = einsum(beta, group.gram[used][:, used], beta, "head d, d e, head e -> head")
        # |S~|^2 - |S~ - D~ beta|^2 of the group, from its sums
        explained += 2 * (beta * group.sums[:, used]).sum(-1) - fitted
    return explained / torch.where(pooled.energy > 0, pooled.energy, torch.nan)
