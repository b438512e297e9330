"""Which writers does each head read on its query, key and value side?
:func:`tl_geometry.composition` gives exact shares on data, what the weights alone suggest, two
nulls, and intervals over prompts.

On the query and key side shares are those of :mod:`tl_geometry.circuits.writer_sweep`. On the value
side the output of a head (without its constant write) is linear in the writers,
``o[i] = sum_j p_ij sum_a v_a[j] W_O``, and the share of writer a is ``sum o_a . o / sum o^2``.

Nulls and intervals are in :mod:`tl_geometry.circuits.composition_sums`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.circuits.composition_sums import (
    GROUPS,
    HEAD_SIDES,
    NULLS,
    CompositionSums,
    value_factor_of,
)
from tl_geometry.circuits.writer_sweep import SHARES, stream_writers
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.groups import group_borders
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.models.writers import GRAINS, Written, writer_names
from tl_geometry.scores.terms import BIAS

WRITERS = ("all", "heads")
"""Which writers edges start from."""
NUMBERS = (
    *("cs", "cs_low", "cs_high", "gs", "gs_low", "gs_high", "weights"),
    *("other_cs", "other_gs", "random_cs", "random_gs", "cosine"),
)
"""Columns of the table; all but the cosine are numbers of one reader, side and writer."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Composition(Result):
    """Edges from writers to heads: one row for each reader, side and writer.

    On the query and key side ``cs`` and ``gs`` are covariance and gain share of the writer in the
    head's scores; on the value side ``cs`` is its share in the head's output. They sum to one over
    the parts of a side; ``"bias"`` is the reader's own constants. ``other_cs`` and ``other_gs`` are
    the shares of what the writer wrote in another context at the same position, ``cosine`` is the
    cosine of the two over all kept positions. ``random_cs`` and ``random_gs`` are the root mean
    square share of the randomly turned writer. ``cs_low`` to ``cs_high``, and those of ``gs``, are
    95% intervals over prompts (NaN for fewer than 10). ``weights`` is the composition score of the
    weights alone for pairs of heads, ``|W_OV W_QK| / (|W_OV| |W_QK|)`` and the like (Elhage et al.
    2021; canonical weights, norms and rotation left out). NaN where there is no such number, as for
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
    cs_low: Float[Tensor, "head side part"]
    cs_high: Float[Tensor, "head side part"]
    gs_low: Float[Tensor, "head side part"]
    gs_high: Float[Tensor, "head side part"]
    cosine: Float[Tensor, " part"]
    drop: int
    draws: int
    queries: tuple[int, ...] = ()

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "side", "writer", *NUMBERS)

    def rows(self) -> Sequence[Sequence[object]]:
        """Readers in order, the strongest writers first; only writers that the head reads."""
        table: list[Sequence[object]] = []
        for h, (layer, head) in enumerate(self.heads):
            for s, side in enumerate(HEAD_SIDES):
                order = self.cs[h, s].abs().nan_to_num().argsort(descending=True, stable=True)
                for p in order.tolist():
                    if self.wrote[p] >= layer:
                        continue
                    values = [float(getattr(self, name)[h, s, p]) for name in NUMBERS[:-1]]
                    cosine = float(self.cosine[p])
                    table.append((layer, head, side, self.parts[p], *values, cosine))
        return table

    def edges(
        self, *, side: str | None = None, share: str = "cs", writers: str = "all", n: int = 20
    ) -> list[tuple[str, str, str, float]]:
        """The ``n`` strongest edges (writer, reader, side, share) by absolute share;
        ``writers="heads"`` leaves embeddings, MLPs and constants out."""
        heads_only = checks.choice(writers, WRITERS, "writers") == "heads"
        values = getattr(self, checks.choice(share, SHARES, "share"))
        sides = HEAD_SIDES if side is None else (checks.choice(side, HEAD_SIDES, "side"),)
        readers = [checks.head_name(head) for head in self.heads]
        strongest = [
            (self.parts[p], readers[h], s, float(values[h, HEAD_SIDES.index(s), p]))
            for h, (layer, _) in enumerate(self.heads)
            for s in sides
            for p in range(1, len(self.parts))
            if self.wrote[p] < layer and (not heads_only or self.writer_heads[p] >= 0)
        ]
        strongest = [edge for edge in strongest if not math.isnan(edge[3])]
        return sorted(strongest, key=lambda edge: -abs(edge[3]))[:n]

    def place(self, name: str) -> tuple[int, int]:
        """Block and head of a writer or reader, -1 for none."""
        readers = {checks.head_name(head): head for head in self.heads}
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
            of :func:`tl_geometry.corpus.prompts`.

    Intervals are over prompts: a jackknife leaves eight groups of neighbouring prompts out in turn
    (blocks of at least 8 prompts where there are four, as neighbours in a text resemble each
    other). There are none for tokens whose number is not known beforehand, such as an iterable.

    Raises ``ReconstructionError`` where the writers do not sum to the stream, ``BudgetError`` where
    one context does not fit, ``GeometryError`` where no batch has two prompts: each is the null of
    the other.

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
    source = as_tokens(view, tokens, prepend_bos=prepend_bos)
    generator = torch.Generator().manual_seed(seed)
    write, read = torch.randn(2, draws, view.d_model, generator=generator).to(view.device)
    at_queries = _queries(queries, tokens, source.length)
    factor_of = cache(partial(value_factor_of, view))  # each writer has many readers
    # an eighth of the budget holds what was written as vectors, half of it a batch
    keep, last = memory_budget // 8, max(by_layer)
    # of an iterable, whose length is not known, all prompts are one group: there is no interval
    borders = group_borders(len(source), GROUPS)[0]
    sums = {
        l: CompositionSums(
            view, l, readers, parts, (write, read), at_queries, factor_of, keep, l == last, borders
        )
        for l, readers in by_layer.items()
    }

    def on_layer(start: int, layer: LayerView, written: Written) -> None:
        sums[layer.layer].add(layer, written, start)

    start, provenance = stream_writers(
        view,
        source,
        list(by_layer),
        on_layer,
        drop=drop,
        memory_budget=memory_budget // 2,
        batch_size=batch_size,
        progress=progress,
        seed=seed,
    )
    has_null = all(s.null_batches for s in sums.values())
    got = f"{provenance.contexts}, one at a time"
    require(has_null, "tokens", expected="batches of at least 2 prompts", got=got)
    names = writer_names(view, last, parts)
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
        **{name: values[pick] for name, values in _numbers(list(sums.values())).items()},
    )


def _numbers(sums: Sequence[CompositionSums]) -> dict[str, Float[Tensor, "head side part"]]:
    """Shares of all readers with their nulls and bounds, and the scores of the weights alone."""
    width = max(of_layer.width for of_layer in sums)

    def joined(by_layer: Iterable[Tensor]) -> Float[Tensor, "head side part"]:
        """All layers as wide as the last, with zeros for writers that come later."""
        return torch.cat([pad(values, (0, width - values.shape[-1])) for values in by_layer])

    numbers = {"weights": joined(s.weights() for s in sums)}
    for share in SHARES:
        numbers[share] = joined(s.share(share) for s in sums)
        numbers |= {f"{null}_{share}": joined(s.share(share, null) for s in sums) for null in NULLS}
        lows, highs = zip(*(s.bounds(share) for s in sums), strict=True)
        numbers |= {f"{share}_low": joined(lows), f"{share}_high": joined(highs)}
    return numbers


def _queries(
    queries: Sequence[int | str] | int | str | None, tokens: TokensLike, length: int
) -> tuple[int, ...] | None:
    """Chosen queries as positions."""
    if queries is None:
        return None
    names = tokens.positions if isinstance(tokens, TokenWindows) else {}
    # one empty window, for its look-up of numbers and names: a corpus may be no windows
    rows = TokenWindows(tokens=torch.zeros(1, length).int(), has_bos=False, positions=names)
    given = [queries] if isinstance(queries, int | str) else queries
    return checks.indices([rows.position(q) for q in given], length, "queries")
