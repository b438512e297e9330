"""``split_scores``: attention scores as an exact sum over pairs of parts of the residual stream.

1. One forward pass gives each layer's input h and its frozen scales. With a normalised basis what
   is split is ``x = norm(h)`` without gain and bias: no norm scale is frozen.
2. h is split into additive parts: the mean and the constants of norm and projection (``bias``),
   ``pos``, ``cvec``, or the caller's own.
3. Each part is projected by itself to queries and keys, linearly because the scales are frozen. No
   part is computed as the remainder of the others, so that the sum in step 4 is a real check.
4. ``X_ab[i, j] = scale q_a[i] . k_b[j]`` are the terms. With ALiBi they sum to the model's scores
   before any soft cap. Two checks prove it: parts sum to the layer's queries and keys, and the
   scores and patterns of these are the model's own. What does not add up is refused.

This is Song & Zhong 2023, Eq. 7, made exact; ``tl_geometry.papers`` has it as printed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_geometry.base.checks import Head
from tl_geometry.base.errors import BudgetError, UnsupportedModelError, require
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.writers import Written
from tl_geometry.scores.families import Family, UserParts
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.score_split import ScoreSplit
from tl_geometry.scores.splitter import Asked, compare_parts, is_relative
from tl_geometry.scores.terms import bias_label


def split_scores(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext | None = None,
    *,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[Head] | Head | None = None,
    parts: Sequence[str] | UserParts = ("pos", "cvec"),
    memory_budget: int = 2**31,
    prepend_bos: bool | None = None,
    cache: Any = None,
) -> ScoreSplit:
    """Split attention scores (the QK circuit on these tokens) exactly into terms of position and
    context, or of any additive parts of the stream.

    ``q_a = ((p_a A / s) gain) W_Q`` for each part ``p_a`` of a layer's input, then rotated. A is
    the centring of LayerNorm (the identity for RMSNorm); the norm's scale s (and QK-norm's) is
    frozen at its value for the whole input. ``X_ab = scale q_a . k_b``; the constant
    ``(norm bias) W_Q + b_Q`` joins ``bias``.

    Args:
        tokens: prompts of equal length: a string or strings (with ``prepend_bos``), ids
            ``[position]`` or ``[batch position]``.
        basis: from :func:`tl_geometry.decompose` of the same model; not needed with the
            caller's own ``parts`` and with writers. Shares of writers then leave out a BOS token.
        layers, heads: which heads, ``(layer, head)`` or ``"L5H1"``; all of ``layers`` by default.
        parts: what the stream is split into, one of

            - ``("pos", "cvec")`` or ``("pos", "ctx", "resid")``, with ``bias`` holding mean and
              constants;
            - a mapping from names to tensors ``[batch position d_model]`` (or
              ``[layer batch position d_model]``, one for each block) that sum
              to the stream;
            - ``"writers"`` (each embedding, head and MLP that wrote the input) or ``"blocks"``
              (attention and MLP of a block as wholes), with ``"constants"`` for what is written
              whatever the tokens (:mod:`tl_geometry.models.writers`).
        memory_budget: bytes of queries and keys by part, 2 GiB by default.
        cache: a TransformerLens ``ActivationCache`` of these tokens, in place of running the model.

    Frozen scales make terms attributions, not interventions: pos-pos of a token still depends on
    its norm here. With a basis of ``decompose(..., normalize=True)`` the parts are those
    of the normed input, ``q_a = (p_a gain) W_Q``, and nothing of the norm is frozen (a QK-norm's
    scale still is): the same scores, other terms. Then (bias, bias) of a rotary model without
    QK-norm is exactly a function of the offset i - j, and is shown as "relative position"; on a raw
    basis it is the "mean-mean" term.

    One layer is held at a time; of the result only queries and keys are kept, and terms are made
    when they are asked for.

    Raises ``ReconstructionError`` where the terms do not sum to the model's scores; ``BudgetError``
    where queries and keys would exceed ``memory_budget``; ``GeometryError`` for a basis of another
    model, positions beyond the basis, and parts that do not sum.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    >>> split.reconstruction.adds_up, split.terms["pos", "cvec"].shape
    (True, torch.Size([2, 1, 16, 16]))
    """
    asked = Asked.of(model, tokens, basis, parts, layers, heads, prepend_bos)
    view, family = asked.view, asked.family
    # of few heads the parts before projection, [part batch position d_model], are larger
    width = max(view.d_head * len(asked.heads), view.d_model)
    size = 2 * len(family.part_names) * asked.prompts.tokens.numel() * width
    size *= max(4, view.dtype.itemsize)  # half precision is computed in float32
    expected = f"at most memory_budget={memory_budget:,} bytes"
    got, instead = f"{size:,} bytes for {len(asked.heads)} heads", "heads=, or sweep_heads for all"
    fits, error = size <= memory_budget, BudgetError
    require(fits, "split", expected=expected, got=got, instead=instead, error=error)
    return asked.split(cache, partial(split_layer, family))


def split_layer(
    family: Family, layer: LayerView, heads: list[int], written: Written | None
) -> ScoreSplit:
    """The split of some heads of one layer; refused where the terms do not add up to the model's
    scores. Its provenance has flags alone."""
    q, k = (family.project(layer, which, heads, written) for which in "qk")
    q = q * layer.scale
    compared, scale, flags = compare_parts(layer, q, k, heads)
    if layer.softcap is not None:
        flags = ("scores before the soft cap", *flags)
    cap = torch.inf if layer.softcap is None else layer.softcap
    sinks = q.new_full((len(heads),), -torch.inf) if layer.sinks is None else layer.sinks[heads]
    rotary = layer.turn is not None and family.mean_in_bias
    bias = None if layer.bias is None else layer.bias[heads]
    return ScoreSplit(
        provenance=Provenance(flags=flags),
        heads=tuple((layer.layer, head) for head in heads),
        parts=family.part_names,
        q=q.cpu(),
        k=k.cpu(),
        bias=None if bias is None else bias.cpu(),
        key_range=_ranges(layer.allowed).expand(len(heads), -1, -1).cpu(),
        softcap=torch.full((len(heads),), cap, dtype=q.dtype),
        sinks=sinks.to(q).cpu(),
        head_planes=HeadPlanes.of([layer.planes()] * len(heads), q.shape[2]),
        checks=tuple(compared),
        scale=scale,
        bias_label=bias_label(rotary=rotary, relative=is_relative(layer)),
    )


def _ranges(mask: Bool[Tensor, "query key"]) -> Int[Tensor, "query side"]:
    """The first key that each query sees, and the one after the last; a mask with a gap is refused.
    Causal masks and sliding windows have none."""
    seen, first = mask.sum(-1), mask.int().argmax(-1)
    keys = torch.arange(mask.shape[-1], device=mask.device)
    last = (mask * (keys + 1)).amax(-1)
    whole = bool((last - first)[seen > 0].eq(seen[seen > 0]).all())
    expected, got = "queries that see consecutive keys", "a mask with gaps"
    require(whole, "mask", expected=expected, got=got, error=UnsupportedModelError)
    return torch.stack([first, first + seen], -1)
