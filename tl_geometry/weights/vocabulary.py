"""Which vector stands for a token at the input of a head (:func:`embeddings`) and at the output
(:func:`output_rows`), and what are the factors of a layer's heads (:func:`factors_of`)? All
functions of weights that take a model start here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.errors import require
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, remove_mean
from tl_geometry.weights import bilinear
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.readout import VOCABULARY_CHUNK

ROWS = 256
"""Unit vectors of the stream projected at a time, and tokens in one window of the vocabulary:
bounds the memory of one pass."""
PROBE = 16
"""Positions, at least, of the forward pass from which a layer's maps are taken; larger offsets take
more."""


def token_texts(view: ModelView, ids: Iterable[int]) -> dict[int, str]:
    """Readable text of each token id (spaces and control characters made visible)."""
    unique = sorted(set(ids))
    return {i: html.token_text(text) for i, text in zip(unique, view.decode(unique), strict=True)}


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
            states = torch.cat(
                [_state_zero(view, token_ids[None])[0] for token_ids in ids.split(width)]
            )
            rows = states[: len(rows)]
    return remove_mean(rows, view.norm if centered else None)


def _state_zero(view: ModelView, tokens: Tensor) -> Tensor:
    first_hook = view.state_hooks[0]
    return view.activations(tokens, [first_hook])[first_hook].float()


def normalized_rows(
    rows: Float[Tensor, "d_vocab d_model"], norm: NormWeights, *, affine: bool
) -> Float[Tensor, "d_vocab d_model"]:
    """Rows through a norm, with or without its gain and bias, float32, in chunks."""
    if norm.norm_type is None:
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
    head = None if raw else view.output_head()
    if head is None:
        rows = rearrange(view.unembed().float(), "d_model d_vocab -> d_vocab d_model")
    else:
        rows = head.directions().float()
    if raw:
        return rows
    return rows - reduce(rows, "d_vocab d_model -> 1 d_model", "mean")


def _maps_are_weights(seen: LayerView, plain: Factors) -> bool:
    """Whether the layer's maps at position 0 equal the plain weights, tried on random vectors."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(3, 1, 1, plain.left.shape[-2], generator=generator).to(seen.h)
    stream_parts = probe.expand(-1, 1, seen.h.shape[1], -1)
    # the plain query factor includes the attention scale, the layer's map does not
    for linear, factor in ((seen.q_map, plain.left / seen.scale), (seen.k_map, plain.right)):
        mapped = linear(stream_parts)[:, 0, 0].double()
        expected = einsum(
            probe[:, 0, 0].double(),
            factor.to(mapped.device),
            "row d_model, head d_model e -> row head e",
        )
        # float32 maps round at about 1e-6; a rotation or another gain makes a far larger difference
        if float((mapped - expected).abs().max()) > 1e-4 * float(expected.abs().max()):
            return False
    return True


def _projected_coordinates(
    seen: LayerView, size: int, offsets: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Query and key factors ``[head d_model d_head]`` as the layer's maps of the unit vectors of
    the stream: queries averaged over the positions ``offsets``, keys at position 0."""
    eye = torch.eye(size, dtype=seen.h.dtype, device=seen.h.device)
    queries, keys = [], []
    for unit_vectors in eye.split(ROWS):
        stream_parts = rearrange(unit_vectors, "row d_model -> row 1 1 d_model").expand(
            -1, 1, seen.h.shape[1], -1
        )
        queries.append(seen.q_map(stream_parts)[:, 0, list(offsets)].double().mean(1))
        keys.append(seen.k_map(stream_parts)[:, 0, 0].double())
    pattern = "d_model head d_head -> head d_model d_head"
    sides = [rearrange(torch.cat(side), pattern).contiguous() for side in (queries, keys)]
    return sides[0], sides[1]


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
    takes_offsets = view.position == "rotary" and matrix == "QK"
    valid = offsets == (0,) or (takes_offsets and len(offsets) > 0 and min(offsets) >= 0)
    expected = "offsets of at least 0, for W_QK of a rotary model; (0,) otherwise"
    got = f"{offsets} for W_{matrix} with {view.position} positions"
    require(valid, "offsets", expected=expected, got=got)
    require(not (raw and offsets != (0,)), "offsets", expected="(0,) with raw=True", got=offsets)
    if matrix == "OV":
        center = view.norm == "LN"
        for layer in layers:
            w, norm = view.weights(layer), view.attention_norm(layer)
            yield layer, bilinear.fold(w, norm, "OV", raw=raw, center_output=center)
        return
    layer_views: dict[int, LayerView] = {}
    if not raw:  # one pass over arbitrary tokens, in which every layer's scores are verified
        # the largest offset needs a query that many positions behind the key
        positions = min(max(*offsets, PROBE - 1) + 1, view.n_ctx)
        # arbitrary tokens: maps and attention scale do not depend on the text
        tokens = (7 * torch.arange(1, positions + 1))[None] % view.d_vocab
        view.run_layers(
            tokens, layers, lambda of_layer: layer_views.update({of_layer.layer: of_layer})
        )
    for layer in layers:
        norm, w = view.attention_norm(layer), view.weights(layer)
        scale = layer_views[layer].scale if layer in layer_views else None
        plain_factors = bilinear.fold(w, norm, "QK", raw=raw, scale=scale)
        if scale is None or (
            offsets == (0,) and _maps_are_weights(layer_views[layer], plain_factors)
        ):
            yield layer, plain_factors
        else:
            left, right = _projected_coordinates(layer_views[layer], view.d_model, offsets)
            yield layer, Factors(left * scale, right)


def decode_table(view: ModelView, ids: Any) -> tuple[tuple[str, ...], ...]:
    """Token texts of a 2-D tensor of ids."""
    texts = token_texts(view, ids.flatten().tolist())
    return tuple(tuple(texts[i] for i in row) for row in ids.tolist())
