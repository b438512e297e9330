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
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, remove_mean
from tl_geometry.weights import bilinear
from tl_geometry.weights.bilinear import Factors

ROWS = 256
"""Unit vectors of the stream, or tokens of the vocabulary, in one pass: bounds its memory."""
VOCABULARY_CHUNK = 8192
"""Tokens read at a time: bounds the memory of float64 rows and of scores."""
PROBE = 16
"""Positions of the forward pass from which a layer's maps are taken."""


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
            windows = torch.arange(len(rows)).split(min(ROWS, view.n_ctx))
            rows = torch.cat([_state_zero(view, window[None])[0] for window in windows])
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


def output_rows(view: ModelView) -> Float[Tensor, "d_vocab d_model"]:
    """One row per token. Its dot product with a written direction is that token's logit, up to the
    final norm's scale.

    This is the unembedding with the final norm's gain folded in, centred over d_model (LayerNorm)
    and over the vocabulary (a shift of all logits, to which softmax is invariant): the same however
    the model was loaded. Where the output head is not trained, the embedding takes its place.
    """
    if not view.head_trained:
        return embeddings(view)
    head = view.output_head()
    rows = view.unembed().mT.float() if head is None else head.directions().float()
    return rows - reduce(rows, "d_vocab d_model -> 1 d_model", "mean")


def _mapped(seen: LayerView, rows: Float[Tensor, "row d_model"]) -> Factors:
    """Queries (times the attention scale) and keys ``[head row d_head]`` that a layer makes of rows
    of the stream at position 0."""
    parts = rearrange(rows.to(seen.h), "row d_model -> row 1 1 d_model")
    parts = parts.expand(-1, 1, seen.h.shape[1], -1)
    q, k = (seen.mapped(parts, which)[:, 0, 0].double() for which in "qk")
    pairs = (rearrange(x, "row head e -> head row e").contiguous() for x in (q * seen.scale, k))
    return Factors(*pairs)


def factors_of(
    view: ModelView, layers: Sequence[int], matrix: str
) -> Iterable[tuple[int, Factors]]:
    """Yields (layer, factors of all its heads) for W_QK or W_OV, one layer at a time; W_QK includes
    the model's own attention scale.

    Weights are those that the model applies to the normalised stream, checked on random vectors
    against the verified view of the layer; in a rotary model those of equal positions. QK-norm
    enters through its gain, without its frozen scale.
    """
    seen: dict[int, LayerView] = {}
    if matrix == "QK":
        # one pass over arbitrary tokens, as maps and scale do not depend on the text, in which
        # every layer's scores are verified
        tokens = (7 * torch.arange(1, min(PROBE, view.n_ctx) + 1))[None] % view.d_vocab
        view.run_layers(tokens, layers, lambda of_layer: seen.update({of_layer.layer: of_layer}))
    probe = torch.randn(3, view.d_model, generator=torch.Generator().manual_seed(0)).double()
    for layer in layers:
        w, norm, of_layer = view.weights(layer), view.attention_norm(layer), seen.get(layer)
        scale = None if of_layer is None else of_layer.scale
        factors = bilinear.fold(w, norm, matrix, scale=scale, written=view.norm)
        if of_layer is not None and not _alike(_mapped(of_layer, probe), factors, probe):
            parts = [_mapped(of_layer, rows) for rows in torch.eye(view.d_model).split(ROWS)]
            left, right = (torch.cat([getattr(f, x) for f in parts], 1) for x in ("left", "right"))
            factors = Factors(left, right)
        yield layer, factors


def _alike(mapped: Factors, plain: Factors, probe: Tensor) -> bool:
    """Whether the layer's maps of random vectors are those of the plain weights."""
    for found, factor in ((mapped.left, plain.left), (mapped.right, plain.right)):
        expected = probe.to(factor) @ factor
        error = float((found.to(expected) - expected).abs().max())
        # float32 maps round at about 1e-6; a rotation or another gain makes a far larger difference
        if not error <= 1e-4 * float(expected.abs().max()):
            return False
    return True
