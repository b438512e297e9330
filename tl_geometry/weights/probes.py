"""What do the weights alone say about single tokens (Molina 2023)? :func:`noun_probe`: what heads
do to single nouns. :func:`bias_readout`: which tokens their biases prefer.
:func:`embedding_distance_table`: how near the embedding lies to the norm's sphere.

No text is run: a token's embedding goes straight through a block's norm, so positions, earlier
blocks and MLPs are absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.results import Result
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, remove_mean
from tl_geometry.models.parameters import HeadWeights
from tl_geometry.models.reader import as_view
from tl_geometry.models.write_spec import writing_of
from tl_geometry.weights import readout
from tl_geometry.weights.vocabulary import (
    embeddings,
    normalized_rows,
    output_rows,
    token_texts,
)

SOURCE = ("molina2023",)


def common_nouns() -> tuple[str, ...]:
    """A list of common English nouns, the default of :func:`noun_probe`.

    >>> len(common_nouns()) > 100, "river" in common_nouns()
    (True, True)
    """
    return tuple(
        files("tl_geometry.weights").joinpath("nouns.txt").read_text(encoding="utf-8").split()
    )


class _Output(NamedTuple):
    """The output head: the final norm, and unembedding rows with the bias as a last coordinate."""

    norm: NormWeights
    rows: Float[Tensor, "d_vocab column"]

    @staticmethod
    def of(view: ModelView, what: str) -> _Output:
        expected = "a model with a trained output head"
        got = f"{view.name}, whose head was newly initialised"
        instead, error = "measures of states and weights", UnsupportedModelError
        require(view.head_trained, what, expected=expected, got=got, instead=instead, error=error)
        norm = view.final_norm()
        unembedding = rearrange(
            view.unembed().detach().float(), "d_model d_vocab -> d_vocab d_model"
        )
        norm = _plain_norm(view, None, 0.0) if norm is None else norm
        bias = rearrange(view.unembed_bias().to(unembedding), "d_vocab -> d_vocab 1")
        return _Output(norm, torch.cat([unembedding, bias], dim=1))

    def top(self, states: Float[Tensor, "*batch d_model"], k: int) -> Int[Tensor, "*batch column"]:
        """Ids of the k largest logits for each state."""
        flat = rearrange(states, "... d_model -> (...) d_model").float()
        y = normalized_rows(flat, self.norm, affine=True)
        # a last coordinate of 1 adds the bias to every dot product
        extremes = readout.extremes(torch.cat([y, torch.ones_like(y[:, :1])], dim=1), self.rows, k)
        return extremes.top_ids.reshape(*states.shape[:-1], k)


def _plain_norm(view: ModelView, norm_type: str | None, eps: float) -> NormWeights:
    """A norm without gain and bias; ``None`` stands for no norm."""
    gain, bias = torch.ones(view.d_model), torch.zeros(view.d_model)
    return NormWeights(norm_type=norm_type, gain=gain, bias=bias, eps=eps)


@dataclass(frozen=True, eq=False, kw_only=True)
class NounProbe(Result):
    """For every layer, head and noun: the tokens whose keys match its query best, and the tokens
    that its value promotes.

    ``key_ids`` and ``value_ids [layer head noun k]`` hold token ids, best first; ``sum_*`` are
    those of all heads of the layer together. ``norms`` are lengths of the written vectors,
    ``skipped`` the nouns of several tokens, ``texts`` the text of every id shown.
    """

    nouns: tuple[str, ...]
    skipped: tuple[str, ...]
    layers: tuple[int, ...]
    key_ids: Int[Tensor, "layer head row column"]
    value_ids: Int[Tensor, "layer head row column"]
    sum_ids: Int[Tensor, "layer row column"]
    norms: Float[Tensor, "layer head row"]
    sum_norms: Float[Tensor, "layer row"]
    texts: tuple[tuple[int, str], ...]

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "noun", "keys", "values", "norm")

    def rows(self) -> Sequence[Sequence[object]]:
        text = dict(self.texts)
        table_rows: list[list[object]] = []
        for i, layer in enumerate(self.layers):
            for noun_row, noun in enumerate(self.nouns):
                for head in range(self.key_ids.shape[1]):
                    key_and_value_texts = (
                        " ".join(text[t] for t in ids[i, head, noun_row].tolist())
                        for ids in (self.key_ids, self.value_ids)
                    )
                    norm = self.norms[i, head, noun_row].item()
                    table_rows.append([layer, head, noun, *key_and_value_texts, norm])
                promoted = " ".join(text[t] for t in self.sum_ids[i, noun_row].tolist())
                table_rows.append(
                    [layer, "all", noun, "", promoted, self.sum_norms[i, noun_row].item()]
                )
        return table_rows


def noun_probe(
    model: ModelLike,
    nouns: Sequence[str] | str | None = None,
    *,
    layers: Iterable[int] | int | None = None,
    k: int = 3,
    biases: bool = True,
) -> NounProbe:
    """What each head does with single nouns (Molina 2023, section 4.3), from the weights alone.

    With ``x = norm(E[noun])``, keys are the tokens t with the largest
    ``(x W_Q + b_Q) . (norm(E[t]) W_K)``, values the largest logits of
    ``final_norm(E[noun] + u + b_O)`` with ``u = (x W_V + b_V) W_O``. Nouns are encoded without a
    leading space and kept if they are one token; ``k`` tokens are given for each. ``biases=False``
    leaves b_Q out of the keys, as published (b_K never matters: it shifts the scores of all keys
    alike). ``layers`` are by default the first, middle and last block. Lengths ``|u|`` are those of
    centred vectors in LayerNorm models, however W_O was loaded. Where loading folded the value
    biases into b_O, the u of single heads lack them.

    Raises ``UnsupportedModelError`` for models that normalise queries and keys, or what attention
    writes (neither formula then holds), and for models without a trained output head.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.weights.noun_probe(model, ["file", "list"], layers=0).nouns
    ('file', 'list')
    """
    view = as_view(model)
    output = _Output.of(view, "noun_probe")
    last_layer = view.n_layers - 1
    # a set: in a shallow model first, middle and last may coincide
    requested_layers = sorted({0, last_layer // 2, last_layer}) if layers is None else layers
    chosen = checks.indices(requested_layers, view.n_layers, "layers")
    _require_plain_heads(view, chosen, "noun_probe")
    nouns = common_nouns() if nouns is None else nouns
    requested = (nouns,) if isinstance(nouns, str) else tuple(nouns)
    encoded = {noun: view.encode(noun) for noun in requested}
    single = tuple(n for n in requested if len(encoded[n]) == 1)
    expected = "at least one noun of a single token"
    got = f"{len(requested)} nouns, none of a single token"
    require(len(single) > 0, "nouns", expected=expected, got=got, instead="nouns=[...]")
    ids = torch.tensor([encoded[n][0] for n in single])
    rows = embeddings(view)
    per_layer = [_probe_layer(view, layer, rows, ids, output, k, biases) for layer in chosen]
    keys, values, sums, norms, sum_norms = (
        torch.stack(layer_parts).cpu() for layer_parts in zip(*per_layer, strict=True)
    )
    shown_ids = {int(t) for ids in (keys, values, sums) for t in ids.unique()}
    return NounProbe(
        provenance=view.provenance(sources=SOURCE, preset="exact" if biases else "paper"),
        nouns=single,
        skipped=tuple(n for n in requested if n not in single),
        layers=chosen,
        key_ids=keys,
        value_ids=values,
        sum_ids=sums,
        norms=norms,
        sum_norms=sum_norms,
        texts=tuple(token_texts(view, shown_ids).items()),
    )


def _require_plain_heads(view: ModelView, layers: Iterable[int], what: str) -> None:
    """Refuse layers whose scores are not bilinear in the normalised stream, or whose heads do not
    write straight into it."""
    blocks = writing_of(view).blocks
    for layer in layers:
        spec = view.layer_facts(layer)
        qk_norm = f"QK-norm ({view.describe_layer(layer)['QK-norm']})"
        obstacle = "a norm after attention" if spec.qk is None else qk_norm
        plain = spec.qk is None and blocks[layer].after_attention is None
        expected = "heads without QK-norm and without a norm after attention"
        instead, error = "weight_geometry or token_readout", UnsupportedModelError
        got = f"{obstacle} in layer {layer} of {view.name}"
        require(plain, what, expected=expected, got=got, instead=instead, error=error)


def _probe_layer(
    view: ModelView, layer: int, rows: Tensor, ids: Tensor, output: _Output, k: int, biases: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ids of keys, values and summed values of one layer, and the lengths that are written."""
    w, norm = _in_float32(view.weights(layer)), view.attention_norm(layer)
    reads = normalized_rows(rows, norm, affine=True)
    x = reads[ids]
    q = einsum(x, w.W_Q, "row d_model, head d_model e -> head row e")
    q = q + w.b_Q[:, None] if biases else q
    key_directions = einsum(q, w.W_K, "head row e, head d_model e -> head row d_model")
    keys = readout.extremes(key_directions, reads, k).top_ids
    v = einsum(x, w.W_V, "row d_model, head d_model e -> head row e") + w.b_V[:, None]
    u = remove_mean(einsum(v, w.W_O, "head row e, head e d_model -> head row d_model"), view.norm)
    start = rows[ids] + w.b_O
    summed = reduce(u, "head row d_model -> row d_model", "sum")
    lengths = torch.linalg.vector_norm(u, dim=-1), torch.linalg.vector_norm(summed, dim=-1)
    return keys, output.top(start + u, k), output.top(start + summed, k), *lengths


def _in_float32(w: HeadWeights) -> HeadWeights:
    """The same weights in float32."""
    return HeadWeights(**{name: value.detach().float() for name, value in vars(w).items()})


@dataclass(frozen=True, eq=False, kw_only=True)
class BiasReadout(Result):
    """Tokens with the largest and smallest scores on each head's three bias directions, in the
    order query, key, value (see :func:`bias_readout`), and the ``lengths`` of the directions."""

    heads: tuple[tuple[int, int], ...]
    lengths: Float[Tensor, "head 3"]
    top_ids: Int[Tensor, "head 3 column"]
    bottom_ids: Int[Tensor, "head 3 column"]
    texts: tuple[tuple[int, str], ...]

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "bias", "length", "top", "bottom")

    def rows(self) -> Sequence[Sequence[object]]:
        text = dict(self.texts)
        table_rows: list[list[object]] = []
        for i, (layer, head) in enumerate(self.heads):
            for bias_row, name in enumerate(("query", "key", "value")):
                ends = (
                    " ".join(text[t] for t in ids[i, bias_row].tolist())
                    for ids in (self.top_ids, self.bottom_ids)
                )
                table_rows.append([layer, head, name, self.lengths[i, bias_row].item(), *ends])
        return table_rows


def bias_readout(
    model: ModelLike,
    *,
    layers: Iterable[int] | int | None = None,
    heads: Iterable[Head] | Head | None = None,
    k: int = 5,
) -> BiasReadout:
    """What the biases of each head prefer, in tokens (Molina 2023, section 4.2).

    A head's score is ``x W_QK y + x . (W_Q b_K) + y . (W_K b_Q) + b_Q . b_K`` (divided by the
    attention scale), for a query x and a key y. ``key`` reads ``W_K b_Q``: tokens attended to
    whatever the query. ``query`` reads ``W_Q b_K``, which softmax ignores without rotary positions.
    ``value`` reads ``b_V W_O``, added whatever is attended to. Biases and matrices are canonical
    (gain and bias of the norm folded in), so that query and key do not depend on how the model was
    loaded; ``value`` may: weight processing can have moved b_V into b_O. ``k`` tokens are given at
    each end.

    Raises ``UnsupportedModelError`` for models that normalise queries and keys, or what attention
    writes: no bias is then a direction.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.weights.bias_readout(model, heads="L1H0", k=3).top_ids.shape  # head, bias, token
    torch.Size([1, 3, 3])
    """
    view = as_view(model)
    pairs = tuple(sorted(checks.heads(heads, view.n_layers, view.n_heads, layers)))
    _require_plain_heads(view, sorted({l for l, _ in pairs}), "bias_readout")
    rows = embeddings(view)
    head = view.output_head() if view.head_trained else None
    writes = output_rows(view, raw=True) if head is None else head.directions().float()
    per_layer: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer in sorted({l for l, _ in pairs}):
        chosen = [h for l, h in pairs if l == layer]
        w, norm = _in_float32(view.weights(layer)), view.attention_norm(layer)
        reads = normalized_rows(rows, norm, affine=False)
        vectors = _bias_vectors(w, norm)[chosen]
        read_extremes = readout.extremes(vectors[:, :2], reads, k)
        # the mean row shifts the logits of all tokens alike, to which softmax is invariant
        write_extremes = readout.extremes(vectors[:, 2:], writes - writes.mean(0), k)
        top = torch.cat([read_extremes.top_ids, write_extremes.top_ids], dim=1)
        bottom = torch.cat([read_extremes.bottom_ids, write_extremes.bottom_ids], dim=1)
        per_layer.append((torch.linalg.vector_norm(vectors, dim=-1), top, bottom))
    lengths, top, bottom = (
        torch.cat(layer_parts).cpu() for layer_parts in zip(*per_layer, strict=True)
    )
    shown_ids = {int(t) for ids in (top, bottom) for t in ids.unique()}
    untrained = "output head not trained: values are read in the embedding"
    flags = [] if view.head_trained else [untrained]
    return BiasReadout(
        provenance=view.provenance(sources=SOURCE, flags=tuple(flags)),
        heads=pairs,
        lengths=lengths,
        top_ids=top,
        bottom_ids=bottom,
        texts=tuple(token_texts(view, shown_ids).items()),
    )


def _bias_vectors(w: HeadWeights, norm: NormWeights) -> Float[Tensor, "head 3 d_model"]:
    """``W_Q b_K``, ``W_K b_Q``, ``b_V W_O`` per head, with gain and bias of the norm folded in."""
    gain, shift = norm.gain.to(w.W_Q), norm.bias.to(w.W_Q)
    b_Q, b_K, b_V = (
        # the norm's bias passes through the matrix and adds to the head's own
        b + einsum(shift, m, "d_model, head d_model e -> head e")
        for b, m in ((w.b_Q, w.W_Q), (w.b_K, w.W_K), (w.b_V, w.W_V))
    )
    query = gain * einsum(w.W_Q, b_K, "head d_model e, head e -> head d_model")
    key = gain * einsum(w.W_K, b_Q, "head d_model e, head e -> head d_model")
    value = einsum(b_V, w.W_O, "head e, head e d_model -> head d_model")
    return remove_mean(torch.stack([query, key, value], dim=1), norm.norm_type)


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingDistances(Result):
    """Distances between the rows of four matrices and the normalised embedding rows (see
    :func:`embedding_distance_table`).

    ``mean_norm`` is the mean length of embedding rows and ``identity`` is ``sqrt(d) - mean_norm``:
    normalised rows have length sqrt(d), so ``l2_mean`` of the original matrix must be near it
    wherever cosines are near 1.
    """

    matrices: tuple[str, ...]
    l2_mean: Float[Tensor, " row"]
    l2_sd: Float[Tensor, " row"]
    cosine_mean: Float[Tensor, " row"]
    cosine_sd: Float[Tensor, " row"]
    mean_norm: float
    identity: float

    table_axes = ("row",)

    def axis_labels(self, axis: str) -> Mapping[str, Sequence[object]]:
        """The matrix of each row."""
        return {"matrix": self.matrices}

    def table_numbers(self) -> Mapping[str, tuple[Tensor, tuple[str, ...]]]:
        """Means and standard deviations over tokens."""
        values = {
            "l2_mean": self.l2_mean,
            "l2_sd": self.l2_sd,
            "cosine_distance_mean": self.cosine_mean,
            "cosine_distance_sd": self.cosine_sd,
        }
        return {name: (value, ("row",)) for name, value in values.items()}


def embedding_distance_table(model: ModelLike) -> EmbeddingDistances:
    """How far embedding rows E are from ``norm(E)`` without gain and bias: mean and standard
    deviation over tokens (Molina 2023, section 3).

    Four matrices are compared with ``norm(E_t)``: E, E without its mean over the vocabulary, E
    scaled by ``sqrt(d) / mean |E_t|``, and both. For each, the L2 distance and one minus the
    cosine. Scaling does not change a cosine, so the cosines agree in pairs; it removes most of the
    L2 distance only if embeddings already lie near a sphere. Distances are in units of the
    embedding.

    Raises ``GeometryError`` for an embedding of zeros.

    >>> import tl_geometry as tlg
    >>> table = tlg.weights.embedding_distance_table(tlg.zoo.embedded())
    >>> table.matrices
    ('original', 'centred', 'scaled', 'centred, scaled')
    >>> bool(torch.isclose(table.cosine_mean[0], table.cosine_mean[2]))
    True
    """
    view = as_view(model)
    rows = embeddings(view, centered=False).double()
    # eps 1e-5 as in the published table
    target = _plain_norm(view, "RMS" if view.norm == "RMS" else "LN", 1e-5).normalize(rows)
    mean_norm = torch.linalg.vector_norm(rows, dim=-1).mean()
    require(bool(mean_norm > 0), "embeddings", expected="rows that are not all zero", got="zeros")
    scale = view.d_model**0.5 / mean_norm
    centered = rows - reduce(rows, "d_vocab d_model -> 1 d_model", "mean")
    matrices = {
        "original": rows,
        "centred": centered,
        "scaled": scale * rows,
        "centred, scaled": scale * centered,
    }
    l2 = torch.stack([torch.linalg.vector_norm(m - target, dim=-1) for m in matrices.values()])
    cosine = torch.stack(
        [1 - torch.cosine_similarity(m, target, dim=-1) for m in matrices.values()]
    )
    return EmbeddingDistances(
        provenance=view.provenance(sources=SOURCE),
        matrices=tuple(matrices),
        l2_mean=l2.mean(-1).cpu(),
        l2_sd=l2.std(-1).cpu(),
        cosine_mean=cosine.mean(-1).cpu(),
        cosine_sd=cosine.std(-1).cpu(),
        mean_norm=float(mean_norm),
        identity=float(view.d_model**0.5 - mean_norm),
    )
