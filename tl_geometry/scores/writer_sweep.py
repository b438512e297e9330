"""Which writers drive each head's scores? :func:`sweep_writers` gives the share of every writer on
the query and on the key side, for all heads in one streamed pass; ``sweep_heads(...,
parts="writers")`` calls it.

With parts ``h = sum_a w_a`` of a layer's input and all scales frozen, a head's scores are
``S_ij = sum_ab q_a[i] . k_b[j]``. The key-side share of writer b sums over everything on the query
side,

    cs_b = sum_ij S~_ij (q[i] . k_b[j]) / sum S~^2 = sum_j k_b[j] . G[j] / sum S~^2,
    G[j] = sum_i S~_ij q[i],

with S~ the row-centred scores. The query side is alike. With attention minus uniform, ``p - u``, in
place of S~ these are gain shares. So no term is needed, and no writer is projected
(:mod:`tl_geometry.scores.head_readers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base import checks
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.results import Result
from tl_geometry.corpus.passes import batches, cuts
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.batches import batch_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.writers import Written, run_written, writer_names
from tl_geometry.scores.head_readers import HEAD_SIDES, Reads, WriterSums, first_kept
from tl_geometry.scores.terms import ALIBI, BIAS


@dataclass(frozen=True, eq=False, kw_only=True)
class WriterShares(Guarded, Result):
    """Shares of writers in what heads read: what a sweep and a composition have in common.
    ``wrote`` is the block that each part belongs to, -1 before the first."""

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    wrote: tuple[int, ...]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
    drop: int
    table_axes = ("head", "side", "part")

    def table_mask(self) -> Tensor:
        """One row for each head, side and writer that the head reads."""
        layers = torch.tensor([layer for layer, _ in self.heads])
        return (torch.tensor(self.wrote) < layers[:, None, None]).expand(self.cs.shape)

    def rows(self) -> Sequence[Sequence[object]]:
        """Readers and sides in order, the largest covariance shares first."""
        sides: Any = groupby(super().rows(), lambda row: row[:3])
        return [row for _, side in sides for row in sorted(side, key=lambda row: -abs(row[4]))]


@dataclass(frozen=True, eq=False, kw_only=True)
class WriterSweep(WriterShares):
    """Shares of every writer in every head's scores, on the query and on the key side.

    ``cs`` (covariance shares, of ``total``, the sum of squared row-centred scores) and ``gs`` (gain
    shares: the parts in where attention goes) sum to one over the parts of a side. ``parts`` are
    ``"bias"`` (constants of the reader's norm and projection), the writers, and ``"alibi"`` where
    there is one; ``wrote`` is the block that each belongs to, -1 before the first. A head reads
    earlier blocks only; the rest of its row is zero. The first ``drop`` queries and keys were left
    out; ``dropped_mass`` is the attention paid to them. A uniform head has NaN.
    """

    total: Float[Tensor, " head"]
    dropped_mass: Float[Tensor, " head"]
    sides: ClassVar = HEAD_SIDES[:2]
    table_values = ("cs", "gs", "dropped_mass")


def sweep_writers(
    view: ModelView,
    tokens: TokensLike,
    *,
    grain: str = "writers",
    layers: Sequence[int] | int | None = None,
    drop: int | None = None,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> WriterSweep:
    """Shares of every writer in every head, behind ``sweep_heads(..., parts="writers")``; ``drop``
    defaults to 1 where every context begins with BOS, else 0. One context of every batch is checked
    with the model, and its writers with the stream."""
    chosen = checks.indices(layers, view.n_layers, "layers")
    source = as_tokens(view, tokens, prepend_bos=prepend_bos)
    start = first_kept(source, drop)
    sums: dict[int, WriterSums] = {}
    mass = {l: torch.zeros(view.n_heads, dtype=torch.float64) for l in chosen}

    def on_layer(layer: LayerView, written: Written) -> None:
        l, contexts = layer.layer, layer.h.new_zeros(len(layer.h), dtype=torch.int64)
        reads = Reads.of(layer, start, range(view.n_heads))
        batch = WriterSums.of(reads, written, grain, contexts).to("cpu")
        sums[l] = sums[l] + batch if l in sums else batch
        assert layer.pattern is not None  # a pass by writers has it
        paid = layer.pattern[:, :, start:, :start].sum((0, 2, 3), dtype=torch.float64)
        mass[l] += paid.cpu() / (source.length - start)

    cut = cuts(len(source), batch_of(batch_size, source.length, view.device))
    for batch in batches(view, source, cut, progress=progress, seed=seed):
        run_written(view, batch.tokens, chosen, on_layer, sample=batch.row)
    writers = writer_names(view, max(chosen), grain)
    alibi, each = any(bool(sums[l].alibi.any()) for l in chosen), []
    for l in chosen:
        shares, of_bias = sums[l].shares, sums[l].alibi[:, None, :, None].expand(-1, 2, -1, -1)
        wide = pad(shares, (0, 1 + len(writers) - shares.shape[-1]))
        biased = sums[l].divided(of_bias, sums[l].total.sum(2))
        each.append(torch.cat([wide, biased], -1) if alibi else wide)
    cs, gs = torch.cat(each, 2).transpose(1, 2)
    return WriterSweep(
        provenance=view.provenance(source, window=(start, source.length), seed=seed),
        heads=tuple((layer, head) for layer in chosen for head in range(view.n_heads)),
        parts=(BIAS, *(w.name for w in writers), *((ALIBI,) if alibi else ())),
        wrote=(-1, *(w.layer for w in writers), *((-1,) if alibi else ())),
        cs=cs,
        gs=gs,
        total=torch.cat([sums[l].total[0, 0].sum(0) for l in chosen]),
        drop=start,
        dropped_mass=torch.cat(list(mass.values())) / len(source),
    )
