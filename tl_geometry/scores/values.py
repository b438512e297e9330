"""What does each source part (position, context, a writer) make a head write into the stream? The
public function ``split_values``.

With the pattern and the norm scale s frozen, the mixed value of a head is linear in the parts p_a
of its layer's input,

    z[i] = sum_j pattern[i, j] v[j],   v = sum_a ((p_a A / s) gain) W_V + ((norm bias) W_V + b_V),
    output = z W_O,

where A is the centring of LayerNorm (the identity for RMSNorm). The ``z_a`` of all parts sum to the
model's own ``hook_z`` (checked). With a normalised basis the parts are those of the normed input
and no norm scale is frozen, ``v = sum_a (p_a gain) W_V + constants``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.results import Provenance, Result
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import (
    Check,
    ReconstructionReport,
    judge_rounding,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.writers import Written
from tl_geometry.scores.families import Family, UserParts
from tl_geometry.scores.splitter import Asked


@dataclass(frozen=True, eq=False, kw_only=True)
class ValueSplit(Guarded, Result):
    """Outputs of some heads as sums over source parts.

    ``z[i]`` is the mixed value of each head before W_O, from ``parts[i]``; :meth:`output` is its
    write into the stream (without b_O, which belongs to the layer, and before the norm of models
    with a norm after attention).
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    z: Float[Tensor, "part batch position head d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    checks: tuple[Check, ...] = ()
    str_tokens: tuple[str, ...] = ()
    table_axes, table_values = ("head", "part"), ("share", "norm")

    def output(self, part: str | None = None) -> Float[Tensor, "batch position head d_model"]:
        """What each head writes into the stream from one source part (``None``: from all of them,
        the head's whole output)."""
        z, W_O = (vars(self)[name] for name in ("z", "W_O"))
        at = None if part is None else self.parts.index(checks.choice(part, self.parts, "part"))
        z = z.sum(0) if at is None else z[at]
        return einsum(z, W_O, "batch position head e, head e d -> batch position head d")

    @property
    def reconstruction(self) -> ReconstructionReport:
        """The worst reconstruction error of values and of z over the layers, with its bound."""
        return ReconstructionReport.of(self.checks)

    @property
    def share(self) -> Float[Tensor, "head part"]:
        """Covariance share of each part in the head's output, ``sum out_a . out / sum out^2`` over
        all positions."""
        outputs = torch.stack([self.output(p) for p in self.parts]).double()
        total = outputs.sum(0)
        energy = total.square().sum((0, 1, 3))
        return ((outputs * total).sum((1, 2, 4)) / torch.where(energy > 0, energy, torch.nan)).mT

    @property
    def norm(self) -> Float[Tensor, "head part"]:
        """Root mean square, over prompts and positions, of the norm of what each part writes."""
        squares = [self.output(p).double().square().sum(-1).mean((0, 1)) for p in self.parts]
        return torch.stack(squares, -1).sqrt()


def split_values(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext | None = None,
    *,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[checks.Head] | checks.Head | None = None,
    parts: Sequence[str] | UserParts = ("pos", "cvec"),
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> ValueSplit:
    """Split the outputs of heads (the OV circuit on these tokens) exactly by source part, with the
    pattern and the norm scale frozen; arguments as :func:`split_scores`.

    Raises ``ReconstructionError`` where the parts do not sum to the model's ``hook_z``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> tlg.split_values(model, windows[:2], basis, heads="L1H0").reconstruction.adds_up
    True
    """
    asked = Asked.of(model, tokens, basis, parts, layers, heads, prepend_bos)
    found = asked.split(cache, partial(_of_layer, asked.view, asked.family))
    # the sums of values are over all positions, whatever the basis leaves out
    return replace(found, provenance=found.provenance.flagged(window=(0, asked.prompts.length)))


def _of_layer(
    view: ModelView,
    family: Family,
    layer: LayerView,
    heads: list[int],
    written: Written | None,
) -> ValueSplit:
    """The split of the chosen heads of one layer. The sums over parts of values and of z are
    compared with the model's ``v`` and ``z``."""
    assert layer.pattern is not None  # layers that are verified have all three
    assert layer.v is not None
    assert layer.z is not None
    values, pattern = family.project(layer, "v", heads, written), layer.pattern[:, heads]
    z = einsum(pattern, values, "b h i j, part b j h e -> part b i h e")
    size = einsum(pattern, values.abs().sum(0), "b h i j, b j h e -> b i h e")
    compared: list[Check] = []
    for name, summed, own, bound in (
        ("v", values.sum(0), layer.v, values.abs().sum(0)),
        ("z", z.sum(0), layer.z, size),
    ):
        error, most = float((summed - own[:, :, heads]).abs().max()), float(bound.max())
        compared.append((layer.layer, name, error, reconstruction_bound(layer.roundoff, most)))
    what = f"values of layer {layer.layer}"
    require_reconstruction(compared, what)
    # rounding is judged against the z of a typical token: the median over tokens of its largest |z|
    largest = layer.z[:, :, heads].abs().amax(-1)
    typical = rearrange(largest, "b i h -> h (b i)").median(dim=1).values
    scales = (float(layer.v.abs().max()), float(size.max()))
    flags = judge_rounding(layer.roundoff, scales, typical, what, "z of a token reaches")
    return ValueSplit(
        provenance=Provenance(flags=flags),
        heads=tuple((layer.layer, head) for head in heads),
        parts=family.part_names,
        z=z.cpu(),
        W_O=view.weights(layer.layer).W_O[heads].to(layer.h).cpu(),
        checks=tuple(compared),
    )
