"""What do the weights alone say about single tokens (Molina 2023)? :func:`noun_probe`: what heads
do to single nouns. :func:`bias_readout`: which tokens their biases prefer.
:func:`embedding_distance_table`: how near the embedding lies to the norm's sphere.

No text is run: a token's embedding goes straight through a block's norm, so positions, earlier
blocks and MLPs are absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.tables import Table
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, remove_mean
from tl_geometry.models.parameters import HeadWeights
from tl_geometry.models.reader import as_view
from tl_geometry.models.write_spec import writing_of
from tl_geometry.weights.readout import extremes
from tl_geometry.weights.vocabulary import embeddings, normalized_rows, output_rows, said

SOURCE = ("molina2023",)
CHANCE = "every vector has a nearest token, so that a readable list alone proves little"
EPS = 1e-5
"""Epsilon of the norm in the published table of distances."""


def noun_probe(
    model: ModelLike,
    nouns: Sequence[str] | str | None = None,
    *,
    layers: Iterable[int] | int | None = None,
    k: int = 3,
    biases: bool = True,
) -> Table:
    """QK and OV circuits on single nouns, from the weights alone (Molina 2023, section 4.3).

    With ``x = norm(E[noun])``, ``keys`` are the k tokens t with the largest
    ``(x W_Q + b_Q) . (norm(E[t]) W_K)``, ``values`` the largest logits of
    ``final_norm(E[noun] + u + b_O)`` with ``u = (x W_V + b_V) W_O``, best first, and ``norm`` is
    ``|u|``; the row of head ``"all"`` has the u of all heads together.

    Args:
        model: a TransformerLens model.
        nouns: encoded without a leading space and kept if they are one token (a flag names the
            others); by default a list of common English nouns.
        layers: by default the first, middle and last block.
        k: tokens for each noun.
        biases: ``False`` leaves b_Q out of the keys, as published (b_K never matters: it shifts the
            scores of all keys alike).

    Lengths ``|u|`` are those of centred vectors in LayerNorm models, however W_O was loaded. Where
    loading folded the value biases into b_O, the u of single heads lack them.

    Raises ``UnsupportedModelError`` for models that normalise queries and keys, or what attention
    writes (neither formula then holds), and for models without a trained output head.

    >>> import tl_geometry as tlg
    >>> table = tlg.weights.noun_probe(tlg.zoo.embedded(), ["file", "list"], layers=0)
    >>> table.column("noun", head="all")
    ['file', 'list']
    """
    view = as_view(model)
    view.require_output("noun_probe")
    last = view.n_layers - 1
    # a set: in a shallow model first, middle and last may coincide
    layers = sorted({0, last // 2, last}) if layers is None else layers
    chosen = checks.indices(layers, view.n_layers, "layers")
    _require_plain_heads(view, chosen, "noun_probe")
    if nouns is None:
        nouns = files("tl_geometry.weights").joinpath("nouns.txt").read_text("utf-8").split()
    encoded = {noun: view.encode(noun) for noun in ([nouns] if isinstance(nouns, str) else nouns)}
    single = {noun: ids[0] for noun, ids in encoded.items() if len(ids) == 1}
    expected, got = "at least one noun of a single token", f"{len(encoded)} of several tokens"
    require(single, "nouns", expected=expected, got=got, instead="nouns=[...]")
    rows, ids = embeddings(view), torch.tensor(list(single.values()))
    cells: list[tuple[Any, ...]] = []
    for layer in chosen:
        keys, values, norms = _probed(view, layer, rows, ids, k, biases)
        for i, noun in enumerate(single):
            # the last row of a noun is that of all heads, which have no keys together
            names, k_ids, v_ids = [*range(len(keys)), "all"], keys[:, i], values[:, i]
            texts = ([*said(view, k_ids), ""], said(view, v_ids), norms[:, i].tolist())
            columns = (names, *texts, [*_listed(k_ids), ""], _listed(v_ids))
            cells += [(layer, h, noun, *row) for h, *row in zip(*columns, strict=True)]
    skipped = ", ".join(noun for noun in encoded if noun not in single)
    flags = (f"several tokens, left out: {skipped}",) if skipped else ()
    preset = "exact" if biases else "paper"
    return Table(
        provenance=view.provenance(sources=SOURCE, preset=preset, flags=flags),
        names=("layer", "head", "noun", "keys", "values", "norm", "key_ids", "value_ids"),
        cells=tuple(cells),
        chance=CHANCE,
    )


def _listed(ids: Tensor) -> list[str]:
    """Rows of token ids, as some tokens have no text of their own."""
    return [" ".join(map(str, row)) for row in ids.tolist()]


def _require_plain_heads(view: ModelView, layers: Iterable[int], what: str) -> None:
    """Refuse layers whose scores are not bilinear in the normalised stream, or whose heads do not
    write straight into it."""
    blocks = writing_of(view).blocks
    for layer in layers:
        norms = {
            "QK-norm": view.layer_facts(layer).qk,
            "a norm after attention": blocks[layer].after_attention,
        }
        obstacles = [name for name, norm in norms.items() if norm is not None]
        expected = "heads without QK-norm and without a norm after attention"
        got = f"{' and '.join(obstacles)} in layer {layer} of {view.name}"
        require(not obstacles, what, expected=expected, got=got, error=UnsupportedModelError)


def _probed(
    view: ModelView, layer: int, rows: Tensor, ids: Tensor, k: int, biases: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of keys ``[head noun k]``, and of promoted tokens and the lengths of what is written, of
    every head and of all together."""
    w, norm = view.weights(layer).to(rows), view.attention_norm(layer)
    reads = normalized_rows(rows, norm, affine=True)
    x = reads[ids]
    q = einsum(x, w.W_Q, "row d_model, head d_model e -> head row e")
    q = q + w.b_Q[:, None] if biases else q
    wanted = einsum(q, w.W_K, "head row e, head d_model e -> head row d_model")
    v = einsum(x, w.W_V, "row d_model, head d_model e -> head row e") + w.b_V[:, None]
    u = remove_mean(einsum(v, w.W_O, "head row e, head e d_model -> head row d_model"), view.norm)
    u = torch.cat([u, reduce(u, "head row d_model -> 1 row d_model", "sum")])
    # logits of the states before the final norm: a last coordinate of 1 adds the bias
    y = normalized_rows(rows[ids] + w.b_O + u, view.final_norm(), affine=True)
    unembedding = rearrange(view.unembed().to(rows), "d_model d_vocab -> d_vocab d_model")
    bias = rearrange(view.unembed_bias().to(rows), "d_vocab -> d_vocab 1")
    y = torch.cat([y, torch.ones_like(y[..., :1])], -1)
    keys = extremes(wanted, reads, k).ids
    promoted = extremes(y, torch.cat([unembedding, bias], 1), k).ids
    return keys[..., 0, :], promoted[..., 0, :], torch.linalg.vector_norm(u, dim=-1)


def bias_readout(
    model: ModelLike,
    *,
    layers: Iterable[int] | int | None = None,
    heads: Iterable[checks.Head] | checks.Head | None = None,
    k: int = 5,
) -> Table:
    """Logit lens of biases: what those of each head prefer, in tokens (Molina 2023, section 4.2).

    A head's score is ``x W_QK y + x . (W_Q b_K) + y . (W_K b_Q) + b_Q . b_K`` (divided by the
    attention scale), for a query x and a key y. ``key`` reads ``W_K b_Q``: tokens attended to
    whatever the query. ``query`` reads ``W_Q b_K``, which softmax ignores without rotary positions.
    ``value`` reads ``b_V W_O``, added whatever is attended to. Biases and matrices are canonical
    (gain and bias of the norm folded in), so that query and key do not depend on how the model was
    loaded; ``value`` may: weight processing can have moved b_V into b_O.

    Returns a row per head and bias: the ``length`` of the direction, and the ``k`` tokens at each
    end of it (``top``, ``bottom``; none for a bias of zeros).
    Raises ``UnsupportedModelError`` for models that normalise queries and keys, or what attention
    writes: no bias is then a direction.

    >>> import tl_geometry as tlg
    >>> tlg.weights.bias_readout(tlg.zoo.embedded(), heads="L1H0", k=3).column("bias")
    ['query', 'key', 'value']
    """
    view = as_view(model)
    pairs = sorted(checks.heads(heads, view.n_layers, view.n_heads, layers))
    read_layers = sorted({l for l, _ in pairs})
    _require_plain_heads(view, read_layers, "bias_readout")
    rows = embeddings(view)
    writes = output_rows(view)
    cells: list[tuple[Any, ...]] = []
    for layer in read_layers:
        chosen = [h for l, h in pairs if l == layer]
        w, norm = view.weights(layer).to(rows), view.attention_norm(layer)
        reads = normalized_rows(rows, norm, affine=False)
        targets = {"query": reads, "key": reads, "value": writes}
        for (name, tokens), vectors in zip(targets.items(), _bias_vectors(w, norm), strict=True):
            lengths = torch.linalg.vector_norm(vectors[chosen], dim=-1).tolist()
            found = extremes(vectors[chosen], tokens, k).ids
            for h, length, ends in zip(chosen, lengths, found, strict=True):
                shown = (*said(view, ends), *_listed(ends)) if length else ("",) * 4
                cells.append((layer, h, name, length, *shown))
    untrained = "output head not trained: values are read in the embedding"
    return Table(
        provenance=view.provenance(sources=SOURCE, flags=() if view.head_trained else (untrained,)),
        names=("layer", "head", "bias", "length", "top", "bottom", "top_ids", "bottom_ids"),
        cells=tuple(sorted(cells, key=lambda row: row[:2])),  # by head, its biases in their order
        chance=CHANCE,
    )


def _bias_vectors(w: HeadWeights, norm: NormWeights) -> Float[Tensor, "3 head d_model"]:
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
    return remove_mean(torch.stack([query, key, value]), norm.norm_type)


def embedding_distance_table(model: ModelLike) -> Table:
    """How far embedding rows E are from ``norm(E)`` without gain and bias: mean and standard
    deviation over tokens (Molina 2023, section 3).

    Four matrices are compared with ``norm(E_t)``, a row each: E, E without its mean over the
    vocabulary, E scaled by ``sqrt(d) / mean |E_t|``, and both. For each, the L2 distance and one
    minus the cosine. Scaling does not change a cosine, so the cosines agree in pairs; it removes
    most of the L2 distance only if embeddings already lie near a sphere. Distances are in units of
    the embedding.

    Normalised rows have length sqrt(d). So ``l2_mean`` of the original is near
    ``identity = |sqrt(d) - mean_norm|``, ``mean_norm`` the mean of ``|E_t|``, wherever cosines are
    near 1, whatever was learned.

    Raises ``GeometryError`` for an embedding of zeros.

    >>> import tl_geometry as tlg
    >>> tlg.weights.embedding_distance_table(tlg.zoo.embedded()).column("matrix")
    ['original', 'centred', 'scaled', 'centred, scaled']
    """
    view = as_view(model)
    rows = embeddings(view, centered=False).double()
    norm_type = "RMS" if view.norm == "RMS" else "LN"
    one = torch.ones(view.d_model)
    target = NormWeights(norm_type=norm_type, gain=one, bias=0 * one, eps=EPS).normalize(rows)
    mean_norm = float(torch.linalg.vector_norm(rows, dim=-1).mean())
    require(mean_norm > 0, "embeddings", expected="rows that are not all zero", got="zeros")
    scale, identity = view.d_model**0.5 / mean_norm, abs(view.d_model**0.5 - mean_norm)
    centred = rows - reduce(rows, "d_vocab d_model -> 1 d_model", "mean")
    matrices = {"original": rows, "centred": centred}
    matrices |= {"scaled": scale * rows, "centred, scaled": scale * centred}
    found: list[dict[str, Any]] = []
    for name, matrix in matrices.items():
        l2 = torch.linalg.vector_norm(matrix - target, dim=-1)
        cosine = 1 - torch.cosine_similarity(matrix, target, dim=-1)
        row: dict[str, Any] = {"matrix": name}
        for distance, values in {"l2": l2, "cosine_distance": cosine}.items():
            row |= {f"{distance}_mean": float(values.mean()), f"{distance}_sd": float(values.std())}
        found.append({**row, "mean_norm": mean_norm, "identity": identity})
    chance = "l2_mean of the original is near identity wherever cosines are near 1"
    return Table.of(found, view.provenance(sources=SOURCE), chance=chance)
