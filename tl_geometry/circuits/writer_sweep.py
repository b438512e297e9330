"""Which writers drive each head's scores: shares of every writer on the query and the key side, for
all heads in one streamed pass.

With parts ``h = sum_a w_a`` of a layer's input and all scales frozen, a head's scores are
``S_ij = sum_ab q_a[i] . k_b[j]``. The key-side share of writer b sums over everything on the query
side,

    cs_b = sum_ij S~_ij (q[i] . k_b[j]) / sum S~^2 = sum_j k_b[j] . G[j] / sum S~^2,
    G[j] = sum_i S~_ij q[i],

and the query side is alike; with ``p - u`` in place of S~ these are gain shares
(:mod:`tl_geometry.scores.sums`). So no term is needed, and no writer is projected:

1. G is formed once for each head and turned back through rotation, QK-norm and frozen scale;
2. embeddings and MLPs are compared with G taken back to the stream, ``w . (W_K G)``;
3. a head writes ``z W_O``: ``sum_j z[j] G[j]^T`` is one small matrix for each pair of heads, and
   its product with the composite ``W_O^writer W_K^reader`` (Elhage et al. 2021) the numerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import ReconstructionError, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.results import Provenance, Result
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.writers import CONSTANTS, Writer, Written, run_written, writer_names
from tl_geometry.scores.blockwise import block_scores
from tl_geometry.scores.corpus_pass import CorpusPass, rows_per_batch
from tl_geometry.scores.families import BIAS
from tl_geometry.scores.sums import dropped_mass
from tl_geometry.scores.terms import ALIBI

SIDES = ("query", "key")
"""Sides of a score that a writer can be read on."""
WEIGHTS = ("cs", "gs")
"""What a cell counts by: the row-centred score, and how attention differs from uniform."""
WORKING_SET = 2**27
"""Bytes of one step over vectors of the stream."""


class Pulled(NamedTuple):
    """Cotangents of some heads of a layer: what a part of the query (or key) is multiplied by to
    give its numerators, one for each of :data:`WEIGHTS`; and the totals."""

    query: Float[Tensor, "weight batch query head d_head"]
    key: Float[Tensor, "weight batch key head d_head"]
    alibi: Float[Tensor, "weight head"]
    total: Float[Tensor, "weight head"]
    floor: Float[Tensor, " head"]


def pulled(
    layer: LayerView,
    drop: int,
    heads: Sequence[int] | None = None,
    queries: Sequence[int] | None = None,
) -> Pulled:
    """``G_q[i] = scale sum_j W_ij k[j]`` and ``G_k[j] = scale sum_i W_ij q[i]`` with W the
    row-centred scores, and attention minus uniform; zero at the first ``drop`` positions.

    With ``queries`` only these are summed over, and ``query`` holds them alone.
    """
    pick = list(range(layer.q.shape[2]) if heads is None else heads)
    at_queries = slice(drop, None) if queries is None else list(queries)
    q, k = (
        rearrange(x[:, at][:, :, pick], "b i h e -> b h i e")
        for x, at in ((layer.q, at_queries), (layer.k, slice(drop, None)))
    )
    mask = layer.allowed[at_queries, drop:].unsqueeze(0)
    query, shift = q * layer.scale, k.mean(2, keepdim=True)
    key = (k - shift).contiguous()
    bias = None if layer.bias is None else layer.bias[pick][None, :, at_queries, drop:].to(q)
    out_q, out_k = (x.new_zeros(len(WEIGHTS), *x.shape) for x in (q, k))
    alibi, total = (
        torch.zeros(len(WEIGHTS), len(pick), dtype=torch.float64, device=q.device) for _ in range(2)
    )
    options = {"key_shift": shift, "bias": bias, "softcap": layer.softcap}
    for block, centred, block_bias, moved in block_scores(query, key, mask, **options):
        at, seen = slice(block.start, block.stop), slice(block.end)
        assert moved is not None
        for n, weight in enumerate((centred, moved)):
            out_q[n][:, :, at] = weight @ key[:, :, seen] * layer.scale
            out_k[n][:, :, seen] += weight.mT @ query[:, :, at]
            total[n] += (weight * centred).sum((0, 2, 3), dtype=torch.float64)
            if block_bias is not None:
                alibi[n] += (block_bias * weight).sum((0, 2, 3), dtype=torch.float64)
    # as in share_sums: what rounding alone could leave
    sizes = [torch.linalg.vector_norm(x, dim=(-2, -1)).double() for x in (query, key)]
    floor = (32 * unit_roundoff(q.dtype) * sizes[0] * sizes[1]).square().sum(0)
    query, key = (
        torch.nn.functional.pad(rearrange(x, "n b h i e -> n b i h e"), (0, 0, 0, 0, before, 0))
        for x, before in ((out_q, drop if queries is None else 0), (out_k, drop))
    )
    return Pulled(query, key, alibi, total, floor)


@dataclass(frozen=True, eq=False)
class Reader:
    """One side of some heads of a layer as a linear function of the stream: ``matrix`` is centring,
    gain and projection, ``pulled`` what their products are multiplied by (turned back through
    rotation, QK-norm and frozen scale), ``constant`` numerators of the layer's own constants;
    ``positions`` are those that it reads (``None``: all)."""

    matrix: Float[Tensor, "d_model head d_head"]
    pulled: Float[Tensor, "weight batch position head d_head"]
    constant: Float[Tensor, "weight head"]
    positions: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        layer: LayerView,
        which: str,
        weight: Float[Tensor, "weight batch position head d_head"],
        heads: Sequence[int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> Reader:
        """The ``"q"``, ``"k"`` or ``"v"`` side; ``weight`` is for the chosen heads and
        positions."""
        length, count = layer.q.shape[1:3]
        pick = list(range(count) if heads is None else heads)
        at = list(range(length) if positions is None else positions)
        frozen, constant = (getattr(layer, f"{which}_{name}") for name in ("scale", "constant"))
        constants = einsum(weight, constant[:, at][:, :, pick], "n b i h e, b i h e -> n h")
        everywhere = weight.new_zeros(*weight.shape[:2], length, count, weight.shape[-1])
        here = torch.tensor(at)[:, None], torch.tensor(pick)
        everywhere[:, :, *here] = weight
        back = _adjoint(layer, which, everywhere)[:, :, *here] * frozen[:, *here].unsqueeze(-1)
        eye = torch.eye(layer.h.shape[-1], dtype=layer.h.dtype, device=layer.h.device)
        matrix = layer.projected(eye, which)[:, pick]
        return cls(matrix, back, constants.double(), None if positions is None else tuple(at))

    def numerators(
        self,
        written: Written,
        grain: str = "writers",
        *,
        shift: int = 0,
        turns: Sequence[Float[Tensor, "d_model d_model"] | None] = (None,),
    ) -> Float[Tensor, "sample weight head part"]:
        """``sum_i w_a[i] . (matrix pulled[i])`` of each writer, for each of ``turns``, orthogonal
        maps of what it wrote. ``shift`` takes what it wrote in another context of the batch."""
        matrices = [self.matrix if t is None else (t @ self.matrix.flatten(1)) for t in turns]
        matrix = torch.stack([m.reshape(self.matrix.shape) for m in matrices])
        if self._few_tokens(len(turns)):
            return self._by_token(written, grain, shift, matrix)
        by_turn = self._vectors(written, shift, turns)
        flat = rearrange(self.pulled, "n b i h e -> (b i) (n h e)")
        size = self.pulled.shape[0], *self.matrix.shape[1:]
        for heads in written.heads:
            z = self._read((heads.z * heads.scale[..., None, None]), shift)
            small = rearrange(z, "b i h e -> (b i) (h e)").mT @ flat
            small = small.view(*heads.W.shape[:2], *size)
            for each_turn, turned_matrix in zip(by_turn, matrix, strict=True):
                pair = einsum(heads.W, turned_matrix, "w f d, d h e -> w f h e")
                each = einsum(small, pair, "w f n h e, w f h e -> n h w")
                if grain == "writers":
                    each_turn |= {f"L{heads.layer}H{h}": x for h, x in enumerate(each.unbind(-1))}
                else:
                    each_turn[f"attn{heads.layer}"] = each.sum(-1)
        names = [w.name for w in written.names(grain)]
        return torch.stack([torch.stack([of[n].double() for n in names], -1) for of in by_turn])

    def _read(self, x: Float[Tensor, "batch position ..."], shift: int) -> Tensor:
        """What was written at the positions that are read, in the context ``shift`` before."""
        at = slice(None) if self.positions is None else list(self.positions)
        return x.roll(shift, 0)[:, at]

    def _few_tokens(self, turns: int) -> bool:
        """Whether writes as vectors, token by token, take fewer products than all pairs of
        heads, and fit the working set."""
        n, batch, length, heads, width = self.pulled.shape
        d_model, tokens, columns = len(self.matrix), batch * length, turns * n * heads
        by_token = tokens * d_model * (width + columns)
        by_pair = width * heads * width * (turns * d_model + n * tokens)
        return by_token < by_pair and tokens * d_model * columns * 4 <= WORKING_SET

    def _by_token(
        self,
        written: Written,
        grain: str,
        shift: int,
        matrix: Float[Tensor, "sample d_model head d_head"],
    ) -> Float[Tensor, "sample weight head part"]:
        """The numerators from every write as a vector of the stream."""
        n, heads = self.pulled.shape[0], self.pulled.shape[3]
        back = einsum(self.pulled, matrix, "n b i h e, t d h e -> t b i d n h")
        back = rearrange(back, "t b i d n h -> (b i d) (t n h)")
        writes: dict[str, Tensor] = {**written.dense, CONSTANTS: written.constants}
        dense = torch.stack([self._read(x, shift).flatten() for x in writes.values()])
        out = dict(zip(writes, dense @ back, strict=True))
        for heads_of in written.heads:
            z = self._read(heads_of.z * heads_of.scale[..., None, None], shift)
            each = einsum(z, heads_of.W, "b i w f, w f d -> w b i d").flatten(1) @ back
            if grain == "writers":
                out |= {f"L{heads_of.layer}H{h}": x for h, x in enumerate(each)}
            else:
                out[f"attn{heads_of.layer}"] = each.sum(0)
        ordered = torch.stack([out[w.name] for w in written.names(grain)], -1)
        return ordered.unflatten(0, (-1, n, heads)).double()

    def _vectors(
        self, written: Written, shift: int, turns: Sequence[Tensor | None]
    ) -> list[dict[str, Float[Tensor, "weight head"]]]:
        """Numerators of what is held as vectors of the stream, for each turn."""
        held = {**written.dense, CONSTANTS: written.constants}
        n, batch, length, heads, _ = self.pulled.shape
        out = self.pulled.new_zeros(len(turns), len(held), n * heads, dtype=torch.float64)
        each = length * len(self.matrix) * (n * heads + 2 * len(held)) * out.element_size() // 2
        for rows in torch.arange(batch).split(max(1, WORKING_SET // each)):
            values = torch.stack([self._read(x, shift)[rows] for x in held.values()])
            back = einsum(self.pulled[:, rows], self.matrix, "n b i h e, d h e -> n h b i d")
            back = back.flatten(2).flatten(0, 1).mT
            for turn, total in zip(turns, out, strict=True):
                turned = values if turn is None else values @ turn
                total += (turned.flatten(1) @ back).double()
        return [dict(zip(held, of.view(-1, n, heads), strict=True)) for of in out]


def _adjoint(layer: LayerView, which: str, weight: Tensor) -> Tensor:
    """The transpose of QK-norm's linear part and the rotation, which leave heads and positions
    apart."""
    # autograd of a linear map gives its transpose, at zero as anywhere
    with torch.enable_grad():
        start = torch.zeros_like(weight, requires_grad=True)
        return torch.autograd.grad(layer.turned(start, which), start, weight)[0]


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
        at = self.heads.index(_head(head, self.heads))
        values = getattr(self, checks.choice(share, WEIGHTS, "share"))
        side_at = SIDES.index(checks.choice(side, SIDES, "side"))
        return float(values[at, side_at, self.parts.index(checks.choice(part, self.parts, "part"))])

    def top(
        self, head: checks.Head, n: int = 5, *, side: str = "key", share: str = "gs"
    ) -> tuple[tuple[str, float], ...]:
        """The ``n`` writers with the largest share in a head, largest first."""
        at = self.heads.index(_head(head, self.heads))
        side_at = SIDES.index(checks.choice(side, SIDES, "side"))
        values = getattr(self, checks.choice(share, WEIGHTS, "share"))[at, side_at]
        best = values.sort(descending=True, stable=True)
        return tuple(
            (self.parts[i], v)
            for i, v in zip(best.indices[:n].tolist(), best.values[:n].tolist(), strict=True)
        )

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "side", "part", "cs", "gs", "dropped_mass")

    def rows(self) -> Sequence[Sequence[object]]:
        """One row for each head, side and writer that the head reads."""
        cs, gs, mass = self.cs.tolist(), self.gs.tolist(), self.dropped_mass.tolist()
        return [
            (layer, head, side, part, cs[h][s][p], gs[h][s][p], mass[h])
            for h, (layer, head) in enumerate(self.heads)
            for s, side in enumerate(SIDES)
            for p, part in enumerate(self.parts)
            if self.wrote[p] < layer
        ]


def _head(head: checks.Head, heads: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """(layer, head) of a head that may be given by name."""
    layers, each = (max(at[i] for at in heads) + 1 for i in (0, 1))
    return checks.heads(head, layers, each, None)[0]


class _Sums:
    """Sums in progress of one layer: numerators of all writers' shares, and what divides them."""

    def __init__(self, parts: int, heads: int) -> None:
        self.shares = torch.zeros(len(WEIGHTS), len(SIDES), heads, parts, dtype=torch.float64)
        self.total = torch.zeros(len(WEIGHTS), heads, dtype=torch.float64)
        self.floor, self.mass = (torch.zeros(heads, dtype=torch.float64) for _ in range(2))
        self.alibi = torch.zeros(len(WEIGHTS), heads, dtype=torch.float64)

    def add(self, layer: LayerView, written: Written, drop: int, grain: str) -> None:
        """Take in one batch."""
        cotangents = pulled(layer, drop)
        for at, (which, weight) in enumerate((("q", cotangents.query), ("k", cotangents.key))):
            reader = Reader.of(layer, which, weight)
            by_writer = reader.numerators(written, grain)[0]
            self.shares[:, at] += torch.cat([reader.constant.unsqueeze(-1), by_writer], -1).cpu()
        self.total += cotangents.total.cpu()
        self.floor += cotangents.floor.cpu()
        self.alibi += cotangents.alibi.cpu()
        if layer.pattern is not None:
            self.mass += dropped_mass(layer.pattern, drop).sum(0).double().cpu()

    def check(self, layer: LayerView) -> None:
        """Raise unless the parts of each side sum to the head's own total."""
        for at, side in enumerate(SIDES):
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
    names = {l: writer_names(view, l, grain) for l in chosen}
    sums = {l: _Sums(1 + len(names[l]), view.n_heads) for l in chosen}

    def on_layer(layer: LayerView, written: Written, start: int) -> None:
        sums[layer.layer].add(layer, written, start, grain)

    def verified(layer: LayerView, written: Written, start: int) -> None:
        first = _Sums(1 + len(names[layer.layer]), view.n_heads)
        first.add(layer, written, start, grain)
        first.check(layer)

    start, provenance = stream_writers(
        view,
        TokenSource.of(view, tokens, prepend_bos=prepend_bos),
        chosen,
        (verified, on_layer),
        drop=drop,
        memory_budget=memory_budget,
        batch_size=batch_size,
        progress=progress,
        seed=seed,
    )
    return _table(view, chosen, names, sums, start, provenance)


OnStart = Callable[[LayerView, Written, int], None]
"""Receives a layer, the writers of its input, and how many positions are left out."""


def stream_writers(
    view: ModelView,
    source: TokenSource,
    layers: Sequence[int],
    calls: tuple[OnStart, OnStart],
    *,
    drop: int | None,
    memory_budget: int,
    batch_size: int | None,
    progress: bool,
    seed: int,
) -> tuple[int, Provenance]:
    """Call the second of ``calls`` for each layer of each batch, the first for one context of the
    first; one context of every batch is verified. Returns how many positions are left out and what
    was read."""
    bytes_per_context = _bytes_per_context(view, source.length)
    rows = rows_per_batch(view, source.length, bytes_per_context, memory_budget, batch_size)
    stream = CorpusPass(view, source, rows, progress=progress, seed=seed)
    start = drop
    for batch in stream:
        start = int(stream.begins_with_bos) if start is None else start
        expected, fits = f"more than {start + 1} positions", start + 1 < source.length
        require(fits, "tokens", expected=f"{expected} ({start} left out)", got=source.length)
        first, every = (partial(_called, call, start) for call in calls)
        sample = stream.sample(first if stream.first else None)
        run_written(view, batch, layers, every, verify=False, **sample)
    start = start or 0
    return start, stream.provenance(start)


def _called(call: OnStart, start: int, layer: LayerView, written: Written) -> None:
    call(layer, written, start)


def _bytes_per_context(view: ModelView, length: int) -> int:
    """What one context holds in a forward pass: scores, and everything that was written."""
    width = view.n_heads * view.d_head
    held = view.n_layers * (width + view.d_model) + 16 * width + 8 * view.d_model
    return max(4, view.dtype.itemsize) * length * (4 * view.n_heads * length + held)


def _table(
    view: ModelView,
    layers: Sequence[int],
    names: dict[int, tuple[Writer, ...]],
    sums: dict[int, _Sums],
    drop: int,
    provenance: Provenance,
) -> WriterSweep:
    """The finished table, as wide as its last layer."""
    last = names[max(layers)]
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
