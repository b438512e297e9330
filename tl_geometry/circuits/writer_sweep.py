"""Which writers drive each head's scores? :func:`sweep_writers` gives the share of every writer on
the query and on the key side, for all heads in one streamed pass.

With parts ``h = sum_a w_a`` of a layer's input and all scales frozen, a head's scores are
``S_ij = sum_ab q_a[i] . k_b[j]``. The key-side share of writer b sums over everything on the query
side,

    cs_b = sum_ij S~_ij (q[i] . k_b[j]) / sum S~^2 = sum_j k_b[j] . G[j] / sum S~^2,
    G[j] = sum_i S~_ij q[i],

with S~ the row-centred scores. The query side is alike. With attention minus uniform, ``p - u``, in
place of S~ these are gain shares. So no term is needed, and no writer is projected
(:mod:`tl_geometry.circuits.head_readers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base import checks
from tl_geometry.base.errors import ReconstructionError, choice, require
from tl_geometry.base.results import Provenance, Result
from tl_geometry.base.sums import Sums
from tl_geometry.circuits.head_readers import HEAD_SIDES, SHARES, numerators, score_reads
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.models.batches import batch_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.writers import Written, run_written, writer_names
from tl_geometry.scores.corpus_pass import CorpusPass
from tl_geometry.scores.terms import ALIBI, BIAS

SCORE_SIDES = HEAD_SIDES[:2]
"""Sides of a score that a writer can be read on."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WriterSweep(Result):
    """Shares of every writer in every head's scores, on the query and on the key side.

    ``cs`` (covariance shares, of ``total``, the sum of squared row-centred scores) and ``gs`` (gain
    shares: the parts in where attention goes) sum to one over the parts of a side. ``parts`` are
    ``"bias"`` (constants of the reader's norm and projection), the writers, and ``"alibi"`` where
    there is one; ``wrote`` is the block that each belongs to, -1 before the first. A head reads
    earlier blocks only; the rest of its row is zero. The first ``drop`` queries and keys were left
    out; ``dropped_mass`` is the attention paid to them. A uniform head has NaN.
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    wrote: tuple[int, ...]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
    total: Float[Tensor, " head"]
    drop: int
    dropped_mass: Float[Tensor, " head"]
    sides: ClassVar = SCORE_SIDES
    table_axes, table_values = ("head", "side", "part"), ("cs", "gs", "dropped_mass")

    def top(
        self, head: checks.Head, n: int = 5, *, side: str = "key", share: str = "gs"
    ) -> tuple[tuple[str, float], ...]:
        """The ``n`` writers with the largest share in a head, given as (layer, head) or by name,
        largest first."""
        row, column = checks.head_rows(head, self.heads)[0], choice(side, SCORE_SIDES, "side")
        shares = getattr(self, choice(share, SHARES, "share"))[row, SCORE_SIDES.index(column)]
        best = shares.sort(descending=True, stable=True)
        named = [self.parts[i] for i in best.indices[:n].tolist()]
        return tuple(zip(named, best.values[:n].tolist(), strict=True))

    def table_mask(self) -> Tensor:
        """One row for each head, side and writer that the head reads."""
        layers = torch.tensor([layer for layer, _ in self.heads])
        return (torch.tensor(self.wrote) < layers[:, None, None]).expand(self.cs.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Sums(Sums):
    """Sums of one layer: numerators of all writers' shares (part 0: the layer's constants), what
    divides them, and the attention paid to dropped keys."""

    shares: Float[Tensor, "weight side head part"]
    total: Float[Tensor, "weight head"]
    alibi: Float[Tensor, "weight head"]
    floor: Float[Tensor, " head"]
    mass: Float[Tensor, " head"]

    @classmethod
    def of(cls, layer: LayerView, written: Written, drop: int, grain: str) -> _Sums:
        """The sums of one batch, on the layer's device."""
        sides, alibi, floor = score_reads(layer, drop)
        assert layer.pattern is not None  # a pass by writers has it
        paid = layer.pattern[:, :, drop:, :drop].sum((0, 2, 3), dtype=torch.float64)
        return cls(
            shares=numerators(sides, written, grain)[0].sum(2),
            total=sides[0].total.sum(1),
            alibi=alibi,
            floor=floor,
            mass=paid / (layer.pattern.shape[2] - drop),
        )

    def check(self, layer: LayerView) -> None:
        """Raise unless the parts of each side sum to the head's own total."""
        error = (self.shares.sum(-1) + (self.alibi - self.total).unsqueeze(1)).abs()
        size = self.shares.abs().sum(-1) + self.total.abs().unsqueeze(1)
        # 1024 units (6e-5 in float32): the numerators come out of three products in a row, with
        # sums over d_model and all positions; a writer that is missing leaves out far more. A head
        # without scores to explain holds rounding alone, which its floor bounds
        bound = 2**10 * layer.roundoff * size + 32 * self.floor.sqrt()
        require(
            bool((error <= bound).all()),  # NaN is refused too
            f"shares of layer {layer.layer}",
            expected="writers' numerators that sum to those of the scores",
            got=f"a sum that is off by {float(error.max()):.3g}",
            instead="check_model(model)",
            error=ReconstructionError,
        )


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
    defaults to 1 where every context begins with BOS, else 0."""
    chosen = checks.indices(layers, view.n_layers, "layers")
    source = as_tokens(view, tokens, prepend_bos=prepend_bos)
    start = first_kept(source, drop)
    sums: dict[int, _Sums] = {}

    def on_layer(layer: LayerView, written: Written) -> None:
        l, batch = layer.layer, _Sums.of(layer, written, start, grain)
        sums[l] = sums[l] + batch if l in sums else batch

    def verify(layer: LayerView, written: Written) -> None:
        _Sums.of(layer, written, start, grain).to("cpu").check(layer)

    rows = batch_of(batch_size, source.length, view.device)
    stream = CorpusPass(view, source, rows, progress=progress, seed=seed)
    for batch in stream:
        # the sums are checked in the first batch, one context of every batch with the model
        sample = stream.sample(verify if stream.first else None)
        run_written(view, batch, chosen, on_layer, verify=False, **sample)
    settled = {l: sums[l].to("cpu") for l in chosen}
    return _table(view, grain, settled, start, stream.provenance(start))


def first_kept(source: TokenWindows, drop: int | None) -> int:
    """The first position that counts: ``drop``, by default that after a BOS token."""
    start = int(source.has_bos) if drop is None else drop
    expected = f"0 to {source.length - 2}, to leave two of {source.length} positions"
    require(0 <= start < source.length - 1, "drop", expected=expected, got=start)
    return start


def _table(
    view: ModelView, grain: str, sums: dict[int, _Sums], drop: int, provenance: Provenance
) -> WriterSweep:
    """The finished table, as wide as its last layer."""
    writers = writer_names(view, max(sums), grain)
    alibi = any(bool(of.alibi.any()) for of in sums.values())
    by_layer = []
    for of in sums.values():
        shares = pad(of.shares, (0, 1 + len(writers) - of.shares.shape[-1]))
        biased = of.alibi[:, None, :, None].expand(-1, len(SCORE_SIDES), -1, -1)
        shares = torch.cat([shares, biased], -1) if alibi else shares
        total = torch.where(of.total[0] <= of.floor, torch.nan, of.total)
        by_layer.append(shares / total[:, None, :, None])
    cs, gs = rearrange(torch.cat(by_layer, 2), "weight side head part -> weight head side part")
    return WriterSweep(
        provenance=provenance,
        heads=tuple((layer, head) for layer in sums for head in range(view.n_heads)),
        parts=(BIAS, *(w.name for w in writers), *((ALIBI,) if alibi else ())),
        wrote=(-1, *(w.layer for w in writers), *((-1,) if alibi else ())),
        cs=cs,
        gs=gs,
        total=torch.cat([of.total[0] for of in sums.values()]),
        drop=drop,
        dropped_mass=torch.cat([of.mass for of in sums.values()]) / (provenance.contexts or 1),
    )
