"""What does each source part (position, context, a writer) make a head write into the stream? The
public function ``split_values``; circuits and interventions take :func:`target_ids` and
:func:`trained_head` from here.

With the pattern and the norm scale s frozen, the mixed value of a head is linear in the parts p_a
of its layer's input,

    z[i] = sum_j pattern[i, j] v[j],   v = sum_a ((p_a A / s) gain) W_V + ((norm bias) W_V + b_V),
    output = z W_O,

where A is the centring of LayerNorm (the identity for RMSNorm). The ``z_a`` of all parts sum to the
model's own ``hook_z`` (checked). With a normalised basis the parts are those of the normed input
and no norm scale is frozen, ``v = sum_a (p_a gain) W_V + constants``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.base.results import Result
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import OutputHead
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import (
    Check,
    ReconstructionReport,
    judge_rounding,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.writers import Written
from tl_geometry.scores.families import UserParts, family_of
from tl_geometry.scores.splitter import (
    check_basis,
    each_layer,
    part_names,
    project,
    provenance_of,
    reading,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ValueSplit(Result):
    """Outputs of some heads as sums over source parts.

    ``z[part]`` is the mixed value of each head before W_O; :meth:`output` is its write into the
    stream (without b_O, which belongs to the layer, and before the norm of models with a norm after
    attention).
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
        z = self.z.sum(0) if part is None else self.z[self._row(part)]
        return einsum(z, self.W_O, "batch position head e, head e d -> batch position head d")

    def _row(self, part: str) -> int:
        return self.parts.index(checks.choice(part, self.parts, "part"))

    @property
    def reconstruction(self) -> ReconstructionReport:
        """The worst reconstruction error of values and of z over the layers, with its bound."""
        return ReconstructionReport.of(self.checks)

    @property
    def share(self) -> Float[Tensor, "head part"]:
        """Covariance share of each part in the head's output, ``sum out_a . out / sum out^2``."""
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
    heads: Sequence[Head] | Head | None = None,
    parts: Sequence[str] | UserParts = ("pos", "cvec"),
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> ValueSplit:
    """Split the outputs of heads exactly by source part, with the pattern and the norm scale
    frozen; arguments as :func:`split_scores`.

    Raises ``ReconstructionError`` where the parts do not sum to the model's ``hook_z``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> tlg.split_values(model, windows[:2], basis, heads="L1H0").reconstruction.adds_up
    True
    """
    view = as_view(model)
    prompts = as_tokens(view, tokens, prepend_bos=prepend_bos)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    layers_of = sorted({layer for layer, _ in chosen})
    family = family_of(view, parts, basis, layers_of)
    check_basis(view, prompts, basis)
    order: list[tuple[int, int]] = []
    z: list[Tensor] = []
    W_O: list[Tensor] = []
    compared: list[Check] = []
    flags: list[str] = []

    def on_layer(layer: LayerView, written: Written | None) -> None:
        here = [head for l, head in chosen if l == layer.layer]
        order.extend((layer.layer, head) for head in here)
        layer = reading(family, layer)
        values = project(family, layer, "v", written)[..., here, :]
        z.append(_mixed(layer, values, here, compared, flags).cpu())
        W_O.append(view.weights(layer.layer).W_O[here].to(layer.h).cpu())

    writers = family.grain is not None
    each_layer(view, prompts, cache, layers_of, on_layer, writers=writers)
    pick = torch.tensor([order.index(head) for head in chosen])
    return ValueSplit(
        provenance=provenance_of(view, prompts, basis, flags, normalized=family.normalized),
        heads=chosen,
        parts=part_names(family),
        z=torch.cat(z, dim=3)[..., pick, :],
        W_O=torch.cat(W_O)[pick],
        checks=tuple(compared),
        str_tokens=prompts.str_tokens,
    )


def target_ids(view: ModelView, given: Iterable[Any] | int | str) -> tuple[int, ...]:
    """Ids of one or several tokens, each given as an id or as the text of a single token."""
    token_ids: list[Any] = []
    for value in [given] if isinstance(given, int | str) else given:
        ids = view.encode(value) if isinstance(value, str) else [value]
        got = f"{value!r}, which is {len(ids)} tokens"
        require(len(ids) == 1, "token_ids", expected="ids, or texts of one token each", got=got)
        token_ids += ids
    require(len(token_ids) > 0, "token_ids", expected="at least one token", got="none")
    return tuple(checks.index(i, view.d_vocab, "token_ids") for i in token_ids)


def _mixed(
    layer: LayerView, values: Tensor, heads: list[int], checks: list[Check], flags: list[str]
) -> Float[Tensor, "part batch position head d_head"]:
    """``z`` of each part for the chosen heads. The sums over parts of ``values`` and of z are
    compared with the model's ``v`` and ``z``; results are added to ``checks`` and ``flags``."""
    if layer.pattern is None or layer.v is None or layer.z is None:
        expected = "hooks of pattern, values and z"
        fail(f"layer {layer.layer}", expected=expected, got="none", error=UnsupportedModelError)
    z = einsum(layer.pattern[:, heads], values, "b h i j, part b j h e -> part b i h e")
    size = einsum(layer.pattern[:, heads], values.abs().sum(0), "b h i j, b j h e -> b i h e")
    roundoff = layer.roundoff
    for name, summed, model, unit, bound in (
        ("v", values.sum(0), layer.v, layer.roundoff, values.abs().sum(0)),
        ("z", z.sum(0), layer.z, roundoff, size),
    ):
        error = float((summed - model[:, :, heads]).abs().max())
        checks.append((layer.layer, name, error, reconstruction_bound(unit, float(bound.max()))))
    require_reconstruction(checks, f"values of layer {layer.layer}")
    # rounding is judged against the z of a typical token: the median over tokens of its largest |z|
    largest = layer.z[:, :, heads].abs().amax(-1)
    typical = rearrange(largest, "b i h -> h (b i)").median(dim=1).values
    scales, what = (float(layer.v.abs().max()), float(size.max())), f"values of layer {layer.layer}"
    flags += judge_rounding(layer.roundoff, scales, typical, what, "z of a token reaches")
    return z


def trained_head(view: ModelView, *, instead: str) -> OutputHead:
    """The output head of a model whose logits are a norm and a trained linear map of the last
    state; refuses other models. ``instead`` is what the error recommends."""
    what = f"logits of {view.name}"
    if not view.head_trained:
        expected, got = "a trained output head", "one that was newly initialised"
        fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    head = view.output_head()
    if head is None:
        expected = "a norm and a linear map from the last state"
        got = f"the output head of {view.class_name}"
        fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    return head
