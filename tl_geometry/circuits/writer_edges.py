"""Which writer each head reads, on its query, key and value side: exact shares on data, what the
weights alone suggest, and two nulls.

On the query and key side shares are those of :mod:`tl_geometry.circuits.writer_sweep`. On the value
side the output of a head (without its constant write) is linear in the writers,
``o[i] = sum_j p_ij sum_a v_a[j] W_O``, and the share of writer a is ``sum o_a . o / sum o^2``.

Nulls, each as a share beside the writer's own:

- *other*: what the writer wrote in another context at the same position. What depends on position
  alone is the same in both contexts, and so its own null: the cosine between the two shows it.
- *random*: the writer turned by a random orthogonal map R, the same at all tokens. The map keeps
  norms and angles of what it wrote and forgets the direction. With ``M = sum_i w_a[i] g[i]^T``, g
  what the head reads of the stream, the numerator is ``tr(R M)``. Its square has the mean
  ``|M|^2 / d_model`` over all R, and ``(u^T M v)^2 / d_model`` has the same mean over standard
  normal u and v. The null is the root of the mean over ``draws`` pairs (u, v): nothing is turned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.circuits.head_readers import Reader, numerators, random_numerators
from tl_geometry.circuits.writer_sweep import SHARES, score_cotangents, stream_writers
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.parameters import upcast
from tl_geometry.models.reader import as_view
from tl_geometry.models.writers import GRAINS, Written, writer_names
from tl_geometry.scores.families import BIAS

HEAD_SIDES = ("query", "key", "value")
"""Sides of a head that read writers."""
WRITERS = ("all", "heads")
"""Which writers edges start from."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Composition(Result):
    """Edges from writers to heads: one row for each reader, side and writer.

    On the query and key side ``cs`` and ``gs`` are covariance and gain share of the writer in the
    head's scores; on the value side ``cs`` is its share in the head's output. They sum to one over
    the parts of a side; ``"bias"`` is the reader's own constants. ``other_cs`` and ``other_gs`` are
    the shares of what the writer wrote in another context at the same position, ``cosine`` is the
    cosine of the two over all kept positions. ``random_cs`` and ``random_gs`` are the root mean
    square share of the randomly turned writer. ``weights`` is the composition score of the weights
    alone for pairs of heads, ``|W_OV W_QK| / (|W_OV| |W_QK|)`` and the like (Elhage et al. 2021;
    canonical weights, norms and rotation left out). NaN where there is no such number, as for
    ``gs`` on the value side; zero for writers that come after the reader. ``wrote`` and
    ``writer_heads`` are block and head of each part, -1 for none. ``queries`` are the positions
    chosen as queries; it is empty where all count.
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    wrote: tuple[int, ...]
    writer_heads: tuple[int, ...]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
    weights: Float[Tensor, "head side part"]
    other_cs: Float[Tensor, "head side part"]
    other_gs: Float[Tensor, "head side part"]
    random_cs: Float[Tensor, "head side part"]
    random_gs: Float[Tensor, "head side part"]
    cosine: Float[Tensor, " part"]
    drop: int
    draws: int
    queries: tuple[int, ...] = ()
    version: ClassVar[int] = 1

    def columns(self) -> Sequence[str]:
        numbers = (
            "cs",
            "gs",
            "weights",
            "other_cs",
            "other_gs",
            "cosine",
            "random_cs",
            "random_gs",
        )
        return ("layer", "head", "side", "writer", *numbers)

    def rows(self) -> Sequence[Sequence[object]]:
        """Readers in order, the strongest writers first; only writers that the head reads."""
        table: list[Sequence[object]] = []
        for h, (layer, head) in enumerate(self.heads):
            for s, side in enumerate(HEAD_SIDES):
                order = self.cs[h, s].abs().nan_to_num().argsort(descending=True, stable=True)
                for p in order.tolist():
                    if self.wrote[p] >= layer:
                        continue
                    shares = [self.cs, self.gs, self.weights, self.other_cs, self.other_gs]
                    values = [float(x[h, s, p]) for x in shares] + [float(self.cosine[p])]
                    values += [float(x[h, s, p]) for x in (self.random_cs, self.random_gs)]
                    table.append((layer, head, side, self.parts[p], *values))
        return table

    def edges(
        self, *, side: str | None = None, share: str = "cs", writers: str = "all", n: int = 20
    ) -> list[tuple[str, str, str, float]]:
        """The ``n`` strongest edges (writer, reader, side, share) by absolute share;
        ``writers="heads"`` leaves embeddings, MLPs and constants out."""
        heads_only = checks.choice(writers, WRITERS, "writers") == "heads"
        values = getattr(self, checks.choice(share, SHARES, "share"))
        sides = HEAD_SIDES if side is None else (checks.choice(side, HEAD_SIDES, "side"),)
        strongest = [
            (self.parts[p], f"L{layer}H{head}", s, float(values[h, HEAD_SIDES.index(s), p]))
            for h, (layer, head) in enumerate(self.heads)
            for s in sides
            for p in range(1, len(self.parts))
            if self.wrote[p] < layer and (not heads_only or self.writer_heads[p] >= 0)
        ]
        strongest = [edge for edge in strongest if not math.isnan(edge[3])]
        return sorted(strongest, key=lambda edge: -abs(edge[3]))[:n]

    def place(self, name: str) -> tuple[int, int]:
        """Block and head of a writer or reader, -1 for none."""
        readers = {f"L{layer}H{head}": (layer, head) for layer, head in self.heads}
        if name in readers:
            return readers[name]
        part = self.parts.index(checks.choice(name, self.parts, "name"))
        return self.wrote[part], self.writer_heads[part]

    def to_json(
        self, layout: str = "neuronpedia", *, share: str = "cs", writers: str = "all", n: int = 100
    ) -> dict[str, Any]:
        """The ``n`` strongest edges in the JSON that Neuronpedia's and circuit-tracer's pages read;
        see :mod:`tl_geometry.circuits.composition_files`."""
        from tl_geometry.circuits.composition_files import neuronpedia

        checks.choice(layout, ("neuronpedia",), "layout")
        return neuronpedia(self, share=share, writers=writers, n=n)

    def to_networkx(self, *, share: str = "cs", writers: str = "all", n: int = 100) -> Any:
        """The ``n`` strongest edges as a ``networkx.MultiDiGraph``, which
        ``networkx.write_graphml`` writes as GraphML."""
        from tl_geometry.circuits.composition_files import networkx_graph

        return networkx_graph(self, share=share, writers=writers, n=n)


def composition(
    model: ModelLike,
    tokens: TokensLike,
    *,
    heads: Sequence[Head] | Head | None = None,
    layers: Sequence[int] | int | None = None,
    parts: str = "writers",
    draws: int = 32,
    drop: int | None = None,
    queries: Sequence[int | str] | int | str | None = None,
    memory_budget: int = 2**31,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Composition:
    """Which writers each of ``heads`` reads on its query, key and value side, with exact shares on
    data, the weight-only composition score, and two nulls.

    Args:
        tokens: as :func:`tl_geometry.sweep_heads` takes them, at least two prompts.
        heads, layers: readers, all by default.
        parts: ``"writers"`` or ``"blocks"``.
        draws: pairs of random directions of the random null.
        drop: positions left out, as queries on all sides and as keys of scores (values of all
            positions count); by default a BOS token.
        queries: positions to count as queries, in place of all: numbers (-1 is the last) or names
            of :func:`tl_geometry.corpus.aligned_prompts`.

    Raises ``ReconstructionError`` where the writers do not sum to the stream, ``BudgetError`` where
    one context does not fit, ``GeometryError`` where no batch has two prompts, of which one is the
    null of the other.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> edges = tlg.composition(model, windows, heads="L1H0", progress=False)
    >>> edges.cs.sum(-1).round(decimals=3).tolist()
    [[1.0, 1.0, 1.0]]
    """
    view = as_view(model)
    checks.choice(parts, GRAINS, "parts")
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    layers_read = sorted({layer for layer, _ in chosen})
    by_layer = {l: [head for layer, head in chosen if layer == l] for l in layers_read}
    source = TokenSource.of(view, tokens, prepend_bos=prepend_bos)
    generator = torch.Generator().manual_seed(seed)
    write, read = torch.randn(2, draws, view.d_model, generator=generator).to(view.device)
    at_queries = _queries(queries, tokens, source.length)
    value_factor = cache(partial(_value_factor, view))  # each writer has many readers
    # an eighth of the budget holds what was written as vectors, half of it a batch
    keep, last = memory_budget // 8, max(by_layer)
    sums = {
        l: _CompositionSums(
            view, l, readers, parts, (write, read), at_queries, value_factor, keep, l == last
        )
        for l, readers in by_layer.items()
    }

    def on_layer(layer: LayerView, written: Written, start: int) -> None:
        sums[layer.layer].add(layer, written, start)

    def verified(layer: LayerView, written: Written, start: int) -> None:
        """Nothing to do: layer and writers have been compared with the model by now."""

    start, provenance = stream_writers(
        view,
        source,
        list(by_layer),
        (verified, on_layer),
        drop=drop,
        memory_budget=memory_budget // 2,
        batch_size=batch_size,
        progress=progress,
        seed=seed,
    )
    has_null = all(s.null_batches for s in sums.values())
    got = f"{provenance.contexts}, one at a time"
    require(has_null, "tokens", expected="batches of at least 2 prompts", got=got)
    width = max(s.width for s in sums.values())
    names = writer_names(view, last, parts)
    numbers = {
        name: torch.cat([s.wide(value, width) for s in sums.values() for value in [s.share(name)]])
        for name in ("cs", "gs", "weights", "other_cs", "other_gs", "random_cs", "random_gs")
    }
    order = [(l, h) for l, readers in by_layer.items() for h in readers]
    pick = torch.tensor([order.index(head) for head in chosen])
    return Composition(
        provenance=provenance,
        heads=chosen,
        parts=(BIAS, *(w.name for w in names)),
        wrote=(-1, *(w.layer for w in names)),
        writer_heads=(-1, *(w.head for w in names)),
        cosine=sums[last].cosine(),
        drop=start,
        draws=draws,
        queries=at_queries or (),
        **{name: value[pick] for name, value in numbers.items()},
    )


def _queries(
    queries: Sequence[int | str] | int | str | None, tokens: TokensLike, length: int
) -> tuple[int, ...] | None:
    """Chosen queries as positions."""
    if queries is None:
        return None
    names = tokens.positions if isinstance(tokens, TokenWindows) else {}
    # windows look up numbers and names; of their tokens only the length counts
    rows = TokenWindows(tokens=torch.zeros(1, length).int(), has_bos=False, positions=names)
    given = [queries] if isinstance(queries, int | str) else queries
    return checks.indices([rows.position(q) for q in given], length, "queries")


class _CompositionSums:
    """Sums in progress of the readers of one layer: numerators of the shares on data (``by_data``)
    and of both nulls, denominators, and products of what a writer wrote in two contexts."""

    def __init__(
        self,
        view: ModelView,
        layer: int,
        heads: Sequence[int],
        grain: str,
        directions: tuple[Float[Tensor, "sample d_model"], Float[Tensor, "sample d_model"]],
        queries: Sequence[int] | None,
        value_factor: Callable[[int], Float[Tensor, "head d_head d_head"]],
        keep: int,
        last: bool,
    ) -> None:
        self.view, self.layer, self.heads, self.grain = view, layer, list(heads), grain
        self.directions, self.queries = directions, queries
        self.value_factor, self.keep, self.last = value_factor, keep, last
        self.null_batches = 0  # of at least two contexts, so that one can stand in for another
        self.width = 1 + len(writer_names(view, layer, grain))
        shape = len(SHARES), len(HEAD_SIDES), len(heads), self.width
        wide = torch.float64
        self.by_data, self.other = (torch.zeros(shape, dtype=wide) for _ in range(2))
        self.random = torch.zeros(len(directions[0]), *shape, dtype=wide)
        self.total, self.other_total = (torch.zeros(shape[:-1], dtype=wide) for _ in range(2))
        self.products = torch.zeros(2, self.width, dtype=wide)
        self.composed: Tensor | None = None

    def add(self, layer: LayerView, written: Written, drop: int) -> None:
        """Take in one batch."""
        queries = self.queries
        early, expected = [q for q in queries or () if q < drop], f"queries from {drop} on"
        require(not early, "queries", expected=expected, got=early, instead="drop=0")
        cotangents = score_cotangents(layer, drop, self.heads, queries)
        value, energy = _value_cotangents(layer, self.view, drop, self.heads, queries)
        several = len(layer.h) > 1
        sides = (("q", cotangents.query), ("k", cotangents.key), ("v", value))
        readers = [
            Reader.of(layer, which, side_cotangents, self.heads, queries if which == "q" else None)
            for which, side_cotangents in sides
        ]
        by_side = numerators(readers, written, self.grain, others=several, keep=self.keep)
        by_chance = random_numerators(readers, written, self.grain, self.directions)
        for s, reader in enumerate(readers):
            samples, random = by_side[s].cpu(), by_chance[s].cpu()
            on_values = HEAD_SIDES[s] == "value"
            n = slice(samples.shape[1])  # the value side has no gain
            # the share in a head's output leaves its constant write out
            constant = reader.constant.cpu().unsqueeze(-1) * (not on_values)
            self.by_data[n, s] += torch.cat([constant, samples[0]], -1)
            # part 0 is the reader's constants, of which there is no null
            self.random[:, n, s, :, 1:] += random
            total = energy.unsqueeze(0) if on_values else cotangents.total
            self.total[n, s] += total.cpu()
            if several:
                self.other[n, s, :, 1:] += samples[-1]
                self.other_total[n, s] += total.cpu()
        self.null_batches += several
        if several and self.last:  # the last layer has the cosines of all writers
            self.products[:, 1:] += _products(written, drop, self.grain).cpu()
        if self.composed is None and self.grain == "writers":
            self.composed = self._weights_alone(layer, written, readers)

    def _weights_alone(
        self, layer: LayerView, written: Written, readers: Sequence[Reader]
    ) -> Float[Tensor, "head side part"]:
        """Composition scores of the weights alone (Elhage et al. 2021): the Frobenius norm of the
        product of two heads' matrices over the product of their norms.

        Where a product begins or ends with a matrix A, any R with ``|R X| = |A X|`` for all X can
        stand for it: no matrix ``[d_model d_model]`` is formed. With R of :func:`_value_factor` a
        writer and a reader's side make ``P = (R W_O^writer) M^reader``, and what the reader has on
        its other side gives the norm ``|P R_other^T| = sqrt(<P^T P, G>)``,
        ``G = R_other^T R_other``."""
        shape = len(self.heads), len(HEAD_SIDES), self.width
        out = torch.full(shape, torch.nan, dtype=torch.float64)
        # pairs in the model's dtype: sums of squares do not cancel
        q, k, v = (reader.matrix for reader in readers)
        W_O = self.view.weights(layer.layer).W_O[self.heads].to(q)
        W_O = remove_mean(W_O, layer.norm.norm_type)
        gram_q = einsum(q, q, "d h e, d h f -> h e f")
        gram_o = einsum(W_O, W_O, "h e d, h f d -> h e f")
        # no heads share queries: R can join them, which is one product less
        R_k = torch.linalg.qr(rearrange(k, "d h e -> h d e"), mode="r")[1]
        query_key = einsum(q, R_k, "d h e, h f e -> d h f")
        # heads that share keys and values share P
        share = self.view.n_heads // self.view._layers.key_heads(layer.layer)
        shared = torch.tensor([head // share for head in self.heads])
        groups = shared.unique(return_inverse=True)[1].tolist()
        firsts = [groups.index(group) for group in range(max(groups) + 1)]
        query_key_norm = torch.linalg.vector_norm(query_key, dim=(0, 2))
        value_norm = einsum(v, gram_o, v, "d h e, h e f, d h f -> h").sqrt()
        reads = torch.stack([query_key_norm, query_key_norm, value_norm])
        names = [w.name for w in written.names()]
        for writers in written.heads:
            W = self.value_factor(writers.layer).to(q) @ remove_mean(
                writers.W.to(q), layer.norm.norm_type
            )
            size = torch.linalg.vector_norm(W, dim=(1, 2))
            rows = W.flatten(0, 1)
            on_query = (rows @ query_key.flatten(1)).view(*W.shape[:2], *query_key.shape[1:])
            norms = [torch.linalg.vector_norm(on_query, dim=(1, 3))]
            for side, gram in ((k, gram_q), (v, gram_o)):
                P = rearrange(
                    rows @ side[:, firsts].flatten(1),
                    "(w f) (r e) -> w r f e",
                    w=len(W),
                    f=W.shape[1],
                    r=len(firsts),
                )
                squared = ((P.mT @ P)[:, groups] * gram).sum((-2, -1))
                norms.append(squared.clamp(min=0).sqrt())  # rounding may leave less than 0
            sizes = einsum(reads, size, "s r, w -> r s w")
            scores = rearrange(norms, "s w r -> r s w") / torch.where(sizes > 0, sizes, torch.nan)
            first = names.index(f"L{writers.layer}H0") + 1
            out[:, :, first : first + len(W)] = scores.cpu()
        return out

    def share(self, name: str) -> Float[Tensor, "head side part"]:
        """One of the numbers of :class:`Composition`."""
        if name == "weights":
            empty = torch.full_like(self.by_data[0].transpose(0, 1), torch.nan)
            return empty if self.composed is None else self.composed
        null, _, share = name.rpartition("_")
        n = SHARES.index(share)
        total = (self.other_total if null == "other" else self.total)[n].unsqueeze(-1)
        total = torch.where(total > 0, total, torch.nan)
        if null == "random":
            mean_square = self.random[:, n].square().mean(0) / self.view.d_model
            values = mean_square.sqrt() / total
        else:
            values = (self.other if null == "other" else self.by_data)[n] / total
        if null:
            values[..., 0] = torch.nan  # the reader's constants have no writer
        return values.transpose(0, 1)

    def wide(self, values: Tensor, width: int) -> Float[Tensor, "head side part"]:
        """As wide as the last layer's, zeros for writers that come later."""
        return torch.nn.functional.pad(values, (0, width - values.shape[-1]))

    def cosine(self) -> Float[Tensor, " part"]:
        """Cosine of what each writer wrote in two contexts at the same positions."""
        size = torch.where(self.products[1] > 0, self.products[1], torch.nan)
        return self.products[0] / size


def _value_cotangents(
    layer: LayerView,
    view: ModelView,
    drop: int,
    heads: Sequence[int],
    queries: Sequence[int] | None,
) -> tuple[Float[Tensor, "1 batch key head d_head"], Float[Tensor, " head"]]:
    """Cotangents of the values (times a part of them they give ``sum o_a . o``), and
    ``sum o . o``."""
    weights, norm = view.weights(layer.layer), layer.norm
    require(layer.pattern is not None and layer.z is not None, "layer", expected="z", got="none")
    assert layer.pattern is not None
    assert layer.z is not None
    rows = slice(drop, None) if queries is None else list(queries)
    pattern = layer.pattern[:, heads][:, :, rows].to(layer.h)
    W_O = remove_mean(weights.W_O[heads].to(layer.h), norm.norm_type)
    # attention to all keys together: below 1 with a sink
    constant_z = layer.v_constant[:, rows][:, :, heads] * pattern.sum(-1).mT.unsqueeze(-1)
    z = layer.z[:, rows][:, :, heads] - constant_z
    out = einsum(z, W_O, W_O, "b i h e, h e d, h f d -> b i h f")
    energy = (z.double() * out.double()).sum((0, 1, 3))
    return einsum(pattern, out, "b h i j, b i h e -> b j h e").unsqueeze(0), energy


def _products(written: Written, drop: int, grain: str) -> Float[Tensor, "2 part"]:
    """``sum w . w'`` and ``sum w . w`` of each writer, w' of the context before in the batch."""
    products: dict[str, Tensor] = {}
    positions = slice(drop, None)
    for name, x in {**written.dense, "constants": written.constants}.items():
        x = x[:, positions].double()
        products[name] = torch.stack([(x * x.roll(1, 0)).sum(), x.square().sum()])
    for heads in written.heads:
        z = (heads.z * heads.scale[..., None, None])[:, positions]
        if grain == "blocks":
            x = einsum(z, heads.W, "b i h e, h e d -> b i d").double()
            products[f"attn{heads.layer}"] = torch.stack([(x * x.roll(1, 0)).sum(), (x * x).sum()])
            continue
        gram = einsum(heads.W, heads.W, "h e d, h f d -> h e f")
        through = einsum(z, gram, "b i h e, h e f -> b i h f").double()
        pair = torch.stack([(through * y).sum((0, 1, 3)) for y in (z.roll(1, 0), z)])
        products |= {f"L{heads.layer}H{h}": x for h, x in enumerate(pair.unbind(-1))}
    return torch.stack([products[w.name] for w in written.names(grain)], -1)


def _value_factor(view: ModelView, layer: int) -> Float[Tensor, "head d_head d_head"]:
    """R of a QR factorisation of W_V ``[d_model d_head]`` of each head, the gain and the centring
    of the norm in it: ``|R X| = |W_V X|`` for every X, and W_V need not have full rank."""
    norm, W_V = view.attention_norm(layer), view.weights(layer).W_V
    on_stream = norm.centre(W_V.mT * norm.gain.to(W_V))
    return torch.linalg.qr(upcast(on_stream).mT, mode="r")[1]
