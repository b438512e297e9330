"""Which vector stands for a token at the input of a head (:func:`embeddings`) and at the output
(:func:`output_rows`), and what are the factors of a layer's heads (:func:`factors_of`)? All
functions of weights that take a model start here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from einops import rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.errors import require
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, remove_mean
from tl_geometry.weights import bilinear
from tl_geometry.weights.bilinear import Factors

ROWS = 256
"""Unit vectors of the stream projected at a time, and tokens in one window of the vocabulary:
bounds the memory of one pass."""
VOCABULARY_CHUNK = 8192
"""Tokens read at a time: bounds the memory of float64 rows and of scores."""
PROBE = 16
"""Positions, at least, of the forward pass from which a layer's maps are taken; larger offsets take
more."""


def said(view: ModelView, ids: Int[Tensor, "row k"]) -> list[str]:
    """Rows of token ids as text, with spaces and control characters made visible."""
    return [" ".join(map(html.token_text, view.decode(row))) for row in ids.tolist()]


def embeddings(view: ModelView, *, centered: bool = True) -> Float[Tensor, "d_vocab d_model"]:
    """What each token adds to state 0, without a positional vector, in float32.

    In models with learned positions these are the embedding rows. In rotary and ALiBi models state
    0 depends on the token alone, so it is state 0 itself, which includes an embedding norm (BLOOM)
    or an embedding scale (Gemma). BERT's norm after the sum is left out. Where a LayerNorm follows,
    ``centered`` removes each row's mean over d_model, as that norm will and as some ways of loading
    a model already did.
    """
    rows = view.embed().float()
    if view.position in ("rotary", "alibi"):
        # four tokens show whether state 0 is the plain embedding
        first_states = _state_zero(view, torch.arange(min(4, len(rows)))[None])[0]
        if not torch.equal(first_states, rows[: len(first_states)].to(first_states)):
            # windows of one length: the last is filled with the first tokens, which are cut off
            width = min(ROWS, view.n_ctx)
            ids = torch.arange(-(-len(rows) // width) * width) % len(rows)
            windows = [_state_zero(view, window[None])[0] for window in ids.split(width)]
            rows = torch.cat(windows)[: len(rows)]
    return remove_mean(rows, view.norm if centered else None)


def _state_zero(view: ModelView, tokens: Tensor) -> Tensor:
    first_hook = view.state_hooks[0]
    return view.activations(tokens, [first_hook])[first_hook].float()


def normalized_rows(
    rows: Float[Tensor, "*batch d_model"], norm: NormWeights | None, *, affine: bool
) -> Float[Tensor, "*batch d_model"]:
    """Rows through a norm (none for ``None``), with or without its gain and bias, float32, in
    chunks."""
    if norm is None or norm.norm_type is None:
        return rows
    normalize = norm.apply if affine else norm.normalize
    return torch.cat([normalize(p.double()).float() for p in rows.split(VOCABULARY_CHUNK)])


def output_rows(view: ModelView, *, raw: bool = False) -> Float[Tensor, "d_vocab d_model"]:
    """One row per token. Its dot product with a written direction is that token's logit, up to the
    final norm's scale.

    Canonical: the unembedding with the final norm's gain folded in, centred over d_model
    (LayerNorm) and over the vocabulary (a shift of all logits, to which softmax is invariant): the
    same however the model was loaded. ``raw``: the plain rows of the unembedding. Where the output
    head is not trained, the embedding takes its place.
    """
    if not view.head_trained:
        return embeddings(view)
    plain = rearrange(view.unembed().float(), "d_model d_vocab -> d_vocab d_model")
    if raw:
        return plain
    head = view.output_head()
    rows = plain if head is None else head.directions().float()
    return rows - reduce(rows, "d_vocab d_model -> 1 d_model", "mean")


def _mapped(seen: LayerView, rows: Float[Tensor, "row d_model"], offsets: Sequence[int]) -> Factors:
    """Queries (times the attention scale) and keys ``[head row d_head]`` that a layer makes of rows
    of the stream: queries averaged over the positions ``offsets``, keys at position 0."""
    parts = rearrange(rows.to(seen.h), "row d_model -> row 1 1 d_model")
    parts = parts.expand(-1, 1, seen.h.shape[1], -1)
    q = seen.q_map(parts)[:, 0, list(offsets)].double().mean(1) * seen.scale
    k = seen.k_map(parts)[:, 0, 0].double()
    return Factors(*(rearrange(x, "row head e -> head row e").contiguous() for x in (q, k)))


def factors_of(
    view: ModelView,
    layers: Sequence[int],
    matrix: str,
    *,
    raw: bool = False,
    offsets: tuple[int, ...] = (0,),
) -> Iterable[tuple[int, Factors]]:
    """Yields (layer, factors of all its heads) for W_QK or W_OV, one layer at a time; W_QK includes
    the model's own attention scale.

    Canonical weights are those that the model applies to the normalised stream, checked on random
    vectors against the verified view of the layer. With rotary positions the left factor is
    averaged over the rotations of all ``offsets`` (query minus key position); QK-norm enters
    through its gain, without its frozen scale. ``raw`` is that of
    :func:`tl_geometry.weights.bilinear.fold`.
    """
    takes_offsets = view.position == "rotary" and matrix == "QK" and not raw
    valid = offsets == (0,) or (takes_offsets and len(offsets) > 0 and min(offsets) >= 0)
    expected = "offsets of at least 0, for W_QK of a rotary model; (0,) otherwise or with raw=True"
    got = f"{offsets} for W_{matrix} with {view.position} positions"
    require(valid, "offsets", expected=expected, got=got)
    seen: dict[int, LayerView] = {}
    if matrix == "QK" and not raw:
        # one pass over arbitrary tokens, as maps and scale do not depend on the text, in which
        # every layer's scores are verified; the largest offset needs a query so far behind the key
        positions = min(max(*offsets, PROBE - 1) + 1, view.n_ctx)
        tokens = (7 * torch.arange(1, positions + 1))[None] % view.d_vocab
        view.run_layers(tokens, layers, lambda of_layer: seen.update({of_layer.layer: of_layer}))
    probe = torch.randn(3, view.d_model, generator=torch.Generator().manual_seed(0)).double()
    for layer in layers:
        w, norm, of_layer = view.weights(layer), view.attention_norm(layer), seen.get(layer)
        scale, centred = None if of_layer is None else of_layer.scale, view.norm == "LN"
        plain = bilinear.fold(w, norm, matrix, scale=scale, raw=raw, center_output=centred)
        if of_layer is None or _alike(_mapped(of_layer, probe, offsets), plain, probe):
            yield layer, plain
            continue
        eye = torch.eye(view.d_model)
        parts = [_mapped(of_layer, unit_vectors, offsets) for unit_vectors in eye.split(ROWS)]
        left, right = (
            torch.cat(x, 1) for x in zip(*((f.left, f.right) for f in parts), strict=True)
        )
        yield layer, Factors(left, right)


def _alike(mapped: Factors, plain: Factors, probe: Tensor) -> bool:
    """Whether the layer's maps of random vectors are those of the plain weights."""
    pairs = ((mapped.left, plain.left), (mapped.right, plain.right))
    expected = [probe.to(factor) @ factor for _, factor in pairs]
    # float32 maps round at about 1e-6; a rotation or another gain makes a far larger difference
    return all(
        float((found.to(x) - x).abs().max()) <= 1e-4 * float(x.abs().max())
        for (found, _), x in zip(pairs, expected, strict=True)
    )
