"""Which tokens have the largest norms in a state, and how much of its sum of squares do they hold?
Attention sinks and other massive tokens, found by every pass of ``decompose`` and read through
``PositionContext.sinks`` and ``.largest_tokens``.

A few tokens of enormous norm (an attention sink, and in real models a second one) can hold most of
``sum |h|^2``, so that shares, spectra and reliabilities describe them and nothing else. A pass
keeps the norms and places of the :data:`KEPT` largest tokens of each state, and a histogram of the
logarithms of all squared norms. Both merge exactly over batches, groups, processes, shards and
files.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.results import Result
from tl_geometry.base.sums import Sums

KEPT = 32
"""Tokens of largest norm that are kept for each state."""
ONE_IN = 1000
"""The largest 0.1% are one token in a thousand, but at least one."""
SINK_SHARE = 0.25
"""Share of the sum of squares in the largest 0.1% of tokens above which a remark is made."""
CONCENTRATED = 10
"""For a remark that share must also be this many times their share of the tokens: with few tokens
the largest one holds a quarter without being unusual."""
PER_OCTAVE, OCTAVES = 8, 256
"""Bins of the histogram: eighths of a power of two, of squared norms from 2^-128 to 2^128 (the ends
take what lies beyond)."""


def log_histogram(squares: Float[Tensor, "*token"]) -> Float[Tensor, "2 bin"]:
    """Number of tokens, and their sum of squares, by the logarithm of their squared norm: adds up
    over any partition of the tokens.

    >>> counts, sums = log_histogram(torch.tensor([1.0, 1.05, 64.0], dtype=torch.float64))
    >>> counts[counts > 0].tolist(), [round(s, 2) for s in sums[sums > 0].tolist()]
    ([2.0, 1.0], [2.05, 64.0])
    """
    flat = squares.reshape(-1).double()
    # zeros (logarithm -inf) go to the first bin, infinities to the last; NaN only has to give an
    # index, because the accumulation refuses it
    bins = (flat.log2() * PER_OCTAVE).floor().nan_to_num(nan=0.0, neginf=-1e9, posinf=1e9)
    bins = (bins + PER_OCTAVE * OCTAVES // 2).clamp(0, PER_OCTAVE * OCTAVES - 1).long()
    histogram = torch.zeros(2, PER_OCTAVE * OCTAVES, dtype=torch.float64, device=flat.device)
    # scatter_add_, because index_add_ takes twenty times as long on a CPU
    histogram[0].scatter_add_(0, bins, torch.ones_like(flat))
    histogram[1].scatter_add_(0, bins, flat)
    return histogram


def top_share(
    histogram: Float[Tensor, "*state 2 bin"], largest: Float[Tensor, "*state kept"]
) -> Float[Tensor, "*state"]:
    """Share of the sum of squares in the largest 0.1% of the tokens (at least one); NaN without
    tokens or where all are zero.

    ``largest`` are the largest norms, descending. If 0.1% are no more tokens than these, the share
    is exact. Otherwise it comes from the histogram, whose bins are exact but for the one that the
    0.1% cut in two: of that one the mean is taken.
    """
    # from the largest norms down
    counts, sums = (x.flip(-1) for x in histogram.unbind(-2))
    n_largest = tokens_in(counts.sum(-1))
    total = sums.sum(-1)
    n_larger = counts.cumsum(-1) - counts
    fraction = ((n_largest.unsqueeze(-1) - n_larger) / counts.clamp(min=1)).clamp(0, 1)
    binned = (fraction * sums).sum(-1)
    listed = torch.arange(largest.shape[-1], device=largest.device) < n_largest.unsqueeze(-1)
    exact = torch.where(listed, largest.square(), 0.0).sum(-1)
    largest_squares = torch.where(n_largest <= largest.shape[-1], exact, binned)
    return torch.where(total > 0, largest_squares / total, torch.nan)


def tokens_in(tokens: Float[Tensor, "*state"]) -> Float[Tensor, "*state"]:
    """Number of tokens in the largest 0.1% of ``tokens``: at least one."""
    return (tokens / ONE_IN).floor().clamp(min=1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Largest(Sums):
    """The :data:`KEPT` tokens of largest norm of each state, descending (ties: the earlier first).
    Places that are not filled have context -1. Merge with :meth:`merge`, not with ``+``.

    ``context`` and ``position`` say where the token is, ``token`` is its id (-1 where ids are not
    known), ``coordinate`` the index of the largest absolute entry of its state.
    """

    norm: Float[Tensor, "state kept"]
    context: Int[Tensor, "state kept"]
    position: Int[Tensor, "state kept"]
    token: Int[Tensor, "state kept"]
    coordinate: Int[Tensor, "state kept"]

    @classmethod
    def empty(cls, states: int, device: torch.device | str = "cpu") -> Largest:
        """No tokens yet."""
        nothing = {
            f.name: torch.full((states, KEPT), -1, device=device) for f in dataclasses.fields(cls)
        }
        return cls(**(nothing | {"norm": nothing["norm"].double()}))

    def add(
        self,
        row: int,
        h: Float[Tensor, "batch position d_model"],
        norms: Float[Tensor, "batch position"],
        contexts: Int[Tensor, " batch"],
        start: int,
        tokens: Int[Tensor, "batch position"] | None,
    ) -> None:
        """Take in the window of one batch of one state, in place; ``row`` is the row of the state,
        ``start`` the absolute position of the window's first position, ``tokens`` its ids.

        Nothing here waits for a GPU. The sort is stable because a norm may occur many times (the
        same first token in every context), and which of these are kept must not depend on how the
        corpus is cut into batches.
        """
        flat_index = norms.reshape(-1).argsort(descending=True, stable=True)[:KEPT]
        context_row, window_position = flat_index // norms.shape[1], flat_index % norms.shape[1]
        batch = {
            "norm": norms[context_row, window_position],
            "context": contexts.to(flat_index)[context_row],
            "position": window_position + start,
            "token": torch.full_like(flat_index, -1)
            if tokens is None
            else tokens.to(flat_index)[context_row, window_position],
            "coordinate": h[context_row, window_position].abs().argmax(-1),
        }
        before = self.select(slice(row, row + 1), "state")
        with_batch = before.mapped(
            lambda name, v: torch.cat([v, batch[name].to(v).unsqueeze(0)], 1)
        )
        after = with_batch.top().tensors()
        for name, values in self.tensors().items():
            values[row] = after[name][0]

    def top(self) -> Largest:
        """The :data:`KEPT` largest by norm, descending; equal ones by context and position."""
        order_key = self.context * 2**32 + self.position  # one number that orders by both
        by_place = order_key.argsort(dim=1, stable=True)
        # a stable sort by norm leaves equal norms in the order of their places
        by_norm = self.norm.gather(1, by_place).argsort(dim=1, descending=True, stable=True)
        order = by_place.gather(1, by_norm)[:, :KEPT]
        return self.mapped(lambda _, values: values.gather(1, order))

    @staticmethod
    def merge(parts: Sequence[Largest], starts: Sequence[int] | None = None) -> Largest:
        """The largest of all parts; ``starts`` are the numbers that the first context of each part
        has in the merged corpus."""
        numbered = [
            dataclasses.replace(p, context=torch.where(p.context < 0, -1, p.context + start))
            for p, start in zip(parts, starts or [0] * len(parts), strict=True)
        ]
        return Largest.cat(numbered, "kept").top()


class Sinks(NamedTuple):
    """How much of the raw sum of squares the largest 0.1% of the tokens of one state (at least one)
    hold.

    ``tokens`` of ``of`` tokens hold ``share``; ``positions`` and ``ids`` are theirs, the most
    frequent first. ``remark`` is the sentence that tables show where they hold more than
    :data:`SINK_SHARE` (and :data:`CONCENTRATED` times their share of the tokens), else empty.
    """

    tokens: int
    of: int
    share: float
    positions: tuple[int, ...]
    ids: tuple[int, ...]
    remark: str


def sinks_of(
    histogram: Float[Tensor, "2 bin"], largest: Largest, row: int, texts: Sequence[str] = ()
) -> Sinks:
    """The sinks of one state (``row``); ``texts`` are its :data:`KEPT` largest tokens as text."""
    n_tokens = int(histogram[0].sum())
    tokens = int(tokens_in(histogram[0].sum())) if n_tokens else 0
    share = float(top_share(histogram, largest.norm[row]))
    shown = min(tokens, int((largest.context[row] >= 0).sum()))
    positions = [p for p, _ in Counter(largest.position[row, :shown].tolist()).most_common()]
    ids = [t for t, _ in Counter(largest.token[row, :shown].tolist()).most_common() if t >= 0]
    text_of = {int(t): text for t, text in zip(largest.token[row].tolist(), texts, strict=False)}
    where = _first_few("position", [str(p) for p in positions])
    what = (
        _first_few("token", [repr(text_of[t]) if t in text_of else str(t) for t in ids])
        if ids
        else ""
    )
    examples = ", ".join(filter(None, (where, what)))
    sentence = f"{tokens} of {n_tokens} tokens hold {share:.0%} of the sum of squares ({examples})"
    remark = (
        sentence if n_tokens and share > max(SINK_SHARE, CONCENTRATED * tokens / n_tokens) else ""
    )
    return Sinks(tokens, n_tokens, share, tuple(positions), tuple(ids), remark)


def _first_few(word: str, values: Sequence[str], limit: int = 3) -> str:
    shown = ", ".join(values[:limit]) + (", ..." if len(values) > limit else "")
    return f"{word}{'s' if len(values) > 1 else ''} {shown}"


@dataclass(frozen=True, eq=False, kw_only=True)
class LargestTokens(Result):
    """The tokens of largest norm inside the window, a row per state and token, descending within
    each state.

    ``share`` is the token's part of the state's raw sum of squares, ``median`` the state's median
    norm (from the histogram, to 5%), ``coordinate`` the index of the largest entry. ``top_share``
    is what the largest 0.1% of all ``tokens`` hold together.
    """

    states: tuple[int, ...]
    tokens: int
    norm: Float[Tensor, "state kept"]
    context: Int[Tensor, "state kept"]
    position: Int[Tensor, "state kept"]
    token: Int[Tensor, "state kept"]
    coordinate: Int[Tensor, "state kept"]
    share: Float[Tensor, "state kept"]
    median: Float[Tensor, " state"]
    top_share: Float[Tensor, " state"]
    str_tokens: tuple[tuple[str, ...], ...] = ()

    def columns(self) -> Sequence[str]:
        where = ["context", "position", "token", "text", "coordinate"]
        return ["state", "norm", "median", "share", *where]

    def rows(self) -> Sequence[Sequence[object]]:
        table_rows: list[list[Any]] = []
        for i, state in enumerate(self.states):
            for k in range(self.norm.shape[1]):
                if int(self.context[i, k]) < 0:
                    continue
                text = self.str_tokens[i][k] if self.str_tokens else None
                place = [int(v[i, k]) for v in (self.context, self.position, self.token)]
                numbers = [float(self.norm[i, k]), float(self.median[i]), float(self.share[i, k])]
                table_rows.append([state, *numbers, *place, text, int(self.coordinate[i, k])])
        return table_rows


def median_norm(histogram: Float[Tensor, "*state 2 bin"]) -> Float[Tensor, "*state"]:
    """Median norm, as the root mean square of the bin that holds it."""
    counts, sums = histogram.unbind(-2)
    # the first bin at which half of the tokens are counted (argmax returns the first maximum)
    middle = (counts.cumsum(-1) >= counts.sum(-1, keepdim=True) / 2).long().argmax(-1, keepdim=True)
    return (sums.gather(-1, middle) / counts.gather(-1, middle).clamp(min=1)).sqrt().squeeze(-1)


def gathered(largest: Largest, rank: int, size: int, total: Callable[[Tensor], None]) -> Largest:
    """The largest of all processes. ``total`` replaces a tensor by its sum over the processes,
    ``rank`` is this process of ``size``."""

    def side_by_side(_: str, values: Tensor) -> Tensor:
        """The values of all processes: each fills in its own rows of zeros, and the sum has all."""
        all_rows = values.new_zeros(size, *values.shape)
        all_rows[rank] = values
        total(all_rows)
        return all_rows.transpose(0, 1).flatten(1)

    return largest.mapped(side_by_side).top()


def merged_texts(
    largest: Largest, parts: Sequence[Largest], texts: Sequence[Sequence[Sequence[str]]]
) -> tuple[tuple[str, ...], ...]:
    """Texts of the merged largest tokens, looked up by id in the texts of the parts; empty where a
    part has none."""
    if not all(texts):
        return ()
    ids = [t for part in parts for t in part.token.flatten().tolist()]
    names = dict(zip(ids, (text for rows in texts for row in rows for text in row), strict=True))
    return tuple(tuple(names[t] for t in row) for row in largest.token.tolist())
