"""Which writers drive each head's scores? :func:`sweep_writers` gives the share of every writer on
the query and on the key side, for all heads in one streamed pass.

With parts ``h = sum_a w_a`` of a layer's input and all scales frozen, a head's scores are
``S_ij = sum_ab q_a[i] . k_b[j]``. The key-side share of writer b sums over everything on the query
side,

    cs_b = sum_ij S~_ij (q[i] . k_b[j]) / sum S~^2 = sum_j k_b[j] . G[j] / sum S~^2,
    G[j] = sum_i S~_ij q[i],

with S~ the row-centred scores. The query side is alike. With attention minus uniform, ``p - u``, in
place of S~ these are gain shares (:mod:`tl_geometry.scores.sums`). So no term is needed, and no
writer is projected: G is formed once for each head, taken back through rotation, QK-norm and frozen
scale, and multiplied with what was written (:mod:`tl_geometry.circuits.head_readers`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import ReconstructionError, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.results import Provenance, Result
from tl_geometry.base.sums import Sums
from tl_geometry.circuits.head_readers import Reader, numerators
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.writers import Writer, Written, run_written, writer_names
from tl_geometry.scores.corpus_pass import CorpusPass, rows_per_batch
from tl_geometry.scores.sums import block_scores
from tl_geometry.scores.terms import ALIBI, BIAS

SCORE_SIDES = ("query", "key")
"""Sides of a score that a writer can be read on."""
SHARES = ("cs", "gs")
"""Covariance and gain share, the axis ``weight``: a cell counts by the row-centred score, or by
attention minus uniform."""


class Cotangents(NamedTuple):
    """Cotangents of queries and keys of some heads of a layer: a part of the query (or key) times
    these is its numerator, one for each of :data:`SHARES`. ``alibi`` are the numerators of ALiBi,
    ``total`` the denominators of each context, ``floor`` what rounding alone could leave of
    them."""

    query: Float[Tensor, "weight batch query head d_head"]
    key: Float[Tensor, "weight batch key head d_head"]
    alibi: Float[Tensor, "weight head"]
    total: Float[Tensor, "weight batch head"]
    floor: Float[Tensor, " head"]


def score_cotangents(
    layer: LayerView,
    drop: int,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Cotangents:
    """``G_q[i] = scale sum_j W_ij k[j]`` and ``G_k[j] = scale sum_i W_ij q[i]`` with W the
    row-centred scores, and attention minus uniform; zero at the first ``drop`` positions.

    With ``queries`` only these are summed over, and ``query`` holds them alone.
    """
    # slices where all are meant: a list is copied to the device
    pick = slice(None) if heads is None else list(heads)
    at_queries = slice(drop, None) if queries is None else list(queries)
    q, k = (
        rearrange(x[:, at][:, :, pick], "b i h e -> b h i e")
        for x, at in ((layer.q, at_queries), (layer.k, slice(drop, None)))
    )
    mask = layer.allowed[at_queries, drop:]
    # rows of W sum to zero: without what all keys share sums are the same, and round less
    query, shift = q * layer.scale, k.mean(2, keepdim=True)
    key = (k - shift).contiguous()
    bias = None if layer.bias is None else layer.bias[pick][:, at_queries, drop:].to(q)
    out_q, out_k = (x.new_zeros(len(SHARES), *x.shape) for x in (q, k))
    shape, in_double = (len(SHARES), *q.shape[:2]), {"dtype": torch.float64, "device": q.device}
    alibi, total = torch.zeros(shape[0], shape[2], **in_double), torch.zeros(shape, **in_double)
    options = {"key_shift": shift, "bias": bias, "softcap": layer.softcap}
    for block, centred, block_bias, above_uniform in block_scores(query, key, mask, **options):
        at, seen = block.rows, slice(block.end)
        for n, weight in enumerate((centred, above_uniform)):
            out_q[n][:, :, at] = weight @ key[:, :, seen] * layer.scale
            out_k[n][:, :, seen] += weight.mT @ query[:, :, at]
            total[n] += (weight * centred).sum((2, 3), dtype=torch.float64)
            if block_bias is not None:
                alibi[n] += (block_bias * weight).sum((0, 2, 3), dtype=torch.float64)
    # as in share_sums: what rounding alone could leave
    sizes = [torch.linalg.vector_norm(x, dim=(-2, -1)).double() for x in (query, key)]
    floor = (32 * unit_roundoff(q.dtype) * sizes[0] * sizes[1]).square().sum(0)
    query, key = (
        torch.nn.functional.pad(rearrange(x, "n b h i e -> n b i h e"), (0, 0, 0, 0, before, 0))
        for x, before in ((out_q, drop if queries is None else 0), (out_k, drop))
    )
    return Cotangents(query, key, alibi, total, floor)


@dataclass(frozen=True, eq=False, kw_only=True)
class WriterSweep(Result):
    """Shares of every writer in every head's scores, on the query and on the key side.

    ``cs = numerators / total`` and ``gs = gains / gain_total`` sum to one over the parts of a side.
    ``parts`` are ``"bias"`` (constants of the reader's norm and projection), the writers, and
    ``"alibi"`` where there is one; ``wrote`` is the block that each belongs to, -1 before the
    first. A head reads earlier blocks only; the rest of its row is zero. The first ``drop`` queries
    and keys were left out; ``dropped_mass`` is the attention paid to them. A uniform head has NaN.
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    wrote: tuple[int, ...]
    numerators: Float[Tensor, "head side part"]
    gains: Float[Tensor, "head side part"]
    total: Float[Tensor, " head"]
    gain_total: Float[Tensor, " head"]
    floor: Float[Tensor, " head"]
    drop: int
    dropped_mass: Float[Tensor, " head"]
    sides: ClassVar = SCORE_SIDES
    table_axes, table_values = ("head", "side", "part"), ("cs", "gs", "dropped_mass")

    @property
    def cs(self) -> Float[Tensor, "head side part"]:
        """Covariance shares."""
        return self.numerators / self._total(self.total)

    @property
    def gs(self) -> Float[Tensor, "head side part"]:
        """Gain shares: the parts in where attention goes."""
        return self.gains / self._total(self.gain_total)

    def _total(self, total: Tensor) -> Tensor:
        return torch.where(self.total <= self.floor, torch.nan, total)[:, None, None]

    def of(self, head: checks.Head, part: str, *, side: str = "key", share: str = "gs") -> float:
        """One share of one writer in one head."""
        shares = self._of_head(head, side, share)
        return float(shares[self.parts.index(checks.choice(part, self.parts, "part"))])

    def top(
        self, head: checks.Head, n: int = 5, *, side: str = "key", share: str = "gs"
    ) -> tuple[tuple[str, float], ...]:
        """The ``n`` writers with the largest share in a head, largest first."""
        best = self._of_head(head, side, share).sort(descending=True, stable=True)
        shares = zip(best.indices[:n].tolist(), best.values[:n].tolist(), strict=True)
        return tuple((self.parts[i], value) for i, value in shares)

    def _of_head(self, head: checks.Head, side: str, share: str) -> Float[Tensor, " part"]:
        """Shares of all parts on one side of a head, given as (layer, head) or by name."""
        row = checks.head_rows(head, self.heads)[0]
        values = getattr(self, checks.choice(share, SHARES, "share"))
        return values[row, SCORE_SIDES.index(checks.choice(side, SCORE_SIDES, "side"))]

    def table_mask(self) -> Tensor:
        """One row for each head, side and writer that the head reads."""
        layers = torch.tensor([layer for layer, _ in self.heads])
        return (torch.tensor(self.wrote) < layers[:, None, None]).expand(self.numerators.shape)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Sums(Sums):
    """Sums of one layer: numerators of all writers' shares, and what divides them."""

    shares: Float[Tensor, "weight side head part"]
    total: Float[Tensor, "weight head"]
    floor: Float[Tensor, " head"]
    alibi: Float[Tensor, "weight head"]
    mass: Float[Tensor, " head"]

    @classmethod
    def of(cls, layer: LayerView, written: Written, drop: int, grain: str) -> _Sums:
        """The sums of one batch, on the layer's device."""
        cotangents = score_cotangents(layer, drop)
        sides = (("q", cotangents.query), ("k", cotangents.key))
        readers = [Reader.of(layer, which, side_cotangents) for which, side_cotangents in sides]
        shares = [
            torch.cat([reader.constant.sum(1).unsqueeze(-1), by_writer[0, 0]], -1).double()
            for reader, by_writer in zip(readers, numerators(readers, written, grain), strict=True)
        ]
        assert layer.pattern is not None  # these prompts do not run in blocks of rows
        paid = layer.pattern[:, :, drop:, :drop].sum((0, 2, 3), dtype=torch.float64)
        return cls(
            shares=torch.stack(shares, 1),
            total=cotangents.total.sum(1),
            floor=cotangents.floor,
            alibi=cotangents.alibi,
            mass=paid / (layer.pattern.shape[2] - drop),
        )

    def check(self, layer: LayerView) -> None:
        """Raise unless the parts of each side sum to the head's own total."""
        for at, side in enumerate(SCORE_SIDES):
            error = (self.shares[:, at].sum(-1) + self.alibi - self.total).abs()
            size = self.shares[:, at].abs().sum(-1) + self.total.abs()
            # 1024 units (6e-5 in float32): the numerators come out of three products in a row, with
            # sums over d_model and all positions; a writer that is missing leaves out far more.
            # A head without scores to explain holds rounding alone, which its floor bounds.
            bound = 2**10 * layer.roundoff * size + 32 * self.floor.sqrt()
            require(
                bool((error <= bound).all()),  # NaN is refused too
                f"{side} side of layer {layer.layer}",
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
    memory_budget: int = 2**31,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> WriterSweep:
    """Shares of every writer in every head, behind ``sweep_heads(..., parts="writers")``; ``drop``
    defaults to 1 where every context begins with BOS, else 0."""
    chosen = checks.indices(layers, view.n_layers, "layers")
    sums: dict[int, _Sums] = {}

    def on_layer(start: int, layer: LayerView, written: Written) -> None:
        l, batch = layer.layer, _Sums.of(layer, written, start, grain)
        sums[l] = sums[l] + batch if l in sums else batch

    def verified(start: int, layer: LayerView, written: Written) -> None:
        _Sums.of(layer, written, start, grain).to("cpu").check(layer)

    start, provenance = stream_writers(
        view,
        as_tokens(view, tokens, prepend_bos=prepend_bos),
        chosen,
        on_layer,
        on_sample=verified,
        drop=drop,
        memory_budget=memory_budget,
        batch_size=batch_size,
        progress=progress,
        seed=seed,
    )
    settled = {l: of_layer.to("cpu") for l, of_layer in sums.items()}
    last = writer_names(view, max(chosen), grain)
    return _table(view, chosen, last, settled, start, provenance)


OnStart = Callable[[int, LayerView, Written], None]
"""Receives how many positions are left out, a layer, and the writers of its input."""


def stream_writers(
    view: ModelView,
    source: TokenWindows,
    layers: Sequence[int],
    on_layer: OnStart,
    *,
    on_sample: OnStart | None = None,
    drop: int | None,
    memory_budget: int,
    batch_size: int | None,
    progress: bool,
    seed: int,
) -> tuple[int, Provenance]:
    """Call ``on_layer`` for each layer of each batch, and before it ``on_sample`` for one context
    of the first batch. One context of every batch is compared with the model in any case. Returns
    how many positions are left out, and what was read."""
    bytes_per_context = _bytes_per_context(view, source.length)
    rows = rows_per_batch(view, source.length, bytes_per_context, memory_budget, batch_size)
    stream = CorpusPass(view, source, rows, progress=progress, seed=seed)
    start = drop
    for batch in stream:
        start = int(stream.begins_with_bos) if start is None else start
        expected, fits = f"more than {start + 1} positions", start + 1 < source.length
        require(fits, "tokens", expected=f"{expected} ({start} left out)", got=source.length)
        verify = partial(on_sample, start) if on_sample and stream.first else None
        take, sample = partial(on_layer, start), stream.sample(verify)
        run_written(view, batch, layers, take, verify=False, **sample)
    start = start or 0
    return start, stream.provenance(start)


def _bytes_per_context(view: ModelView, length: int) -> int:
    """What one context holds in a forward pass: scores, and everything that was written."""
    width = view.n_heads * view.d_head
    held = view.n_layers * (width + view.d_model) + 16 * width + 8 * view.d_model
    return max(4, view.dtype.itemsize) * length * (4 * view.n_heads * length + held)


def _table(
    view: ModelView,
    layers: Sequence[int],
    last: tuple[Writer, ...],
    sums: dict[int, _Sums],
    drop: int,
    provenance: Provenance,
) -> WriterSweep:
    """The finished table, as wide as its last layer, whose writers are ``last``."""
    alibi = any(bool((sums[l].alibi != 0).any()) for l in layers)
    width = 1 + len(last) + alibi

    def wide(of: _Sums) -> Float[Tensor, "weight head side part"]:
        out = of.shares.new_zeros(*of.shares.shape[:-1], width)
        out[..., : of.shares.shape[-1]] = of.shares
        if alibi:
            out[..., -1] = of.alibi.unsqueeze(1)
        return rearrange(out, "weight side head part -> weight head side part")

    shares = torch.cat([wide(sums[l]) for l in layers], 1)
    total = torch.cat([sums[l].total for l in layers], 1)
    return WriterSweep(
        provenance=provenance,
        heads=tuple((layer, head) for layer in layers for head in range(view.n_heads)),
        parts=(BIAS, *(w.name for w in last), *((ALIBI,) if alibi else ())),
        wrote=(-1, *(w.layer for w in last), *((-1,) if alibi else ())),
        numerators=shares[0],
        gains=shares[1],
        total=total[0],
        gain_total=total[1],
        floor=torch.cat([sums[l].floor for l in layers]),
        drop=drop,
        dropped_mass=torch.cat([sums[l].mass for l in layers]) / (provenance.contexts or 1),
    )
