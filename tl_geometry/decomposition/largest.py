"""Which tokens have the largest norms in a state, and how much of its sum of squares do they hold?
Attention sinks and other massive tokens, found by every pass of ``decompose`` and read through
``PositionContext.sinks`` and ``.largest_tokens``.

A few tokens of enormous norm (an attention sink, and in real models a second one) can hold most of
``sum |h|^2``, so that shares, spectra and reliabilities describe them and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.results import Result

KEPT = 32
"""Tokens of largest norm that are kept for each state."""
ONE_IN = 1000
"""Of a corpus the largest 0.1% are looked at: at least one token, at most those that are kept."""
SINK_SHARE = 0.25
"""Share of the sum of squares in these tokens above which a remark is made."""
CONCENTRATED = 10
"""For a remark that share must also be this many times their share of the tokens: with few tokens
the largest one holds a quarter without being unusual."""
Places = dict[str, Tensor]
"""``norm``, ``context``, ``position`` and ``coordinate`` (of the largest entry) of tokens, each
``[state kept]``, the largest norm first; places that are not filled have norm -1."""


def no_places(states: int, device: torch.device | str = "cpu") -> Places:
    """No tokens yet."""
    names = ("norm", "context", "position", "coordinate")
    empty = {name: torch.full((states, KEPT), -1, device=device) for name in names}
    return empty | {"norm": empty["norm"].double()}


def take_in(
    places: Places,
    row: int,
    h: Float[Tensor, "batch position d_model"],
    norms: Float[Tensor, "batch position"],
    window: tuple[int, int],
    first: int,
) -> None:
    """Take in the window of a batch of one state (``row``), in place; ``first`` is the number of
    its first context. Batches come in order: of equal norms the earlier token stays."""
    start, end = window
    inside = norms[:, start:end]
    # stable, because a norm may occur many times (the same first token in every context)
    order = inside.reshape(-1).argsort(descending=True, stable=True)[:KEPT]
    context, position = order // (end - start), order % (end - start)
    new = {"norm": inside[context, position], "context": context + first}
    new["position"] = position + start
    new["coordinate"] = h.to(norms.device)[context, position + start].abs().argmax(-1)
    both = {name: torch.cat([values[row], new[name]]) for name, values in places.items()}
    best = both["norm"].argsort(descending=True, stable=True)[:KEPT]
    for name, values in places.items():
        values[row] = both[name][best]


def top(parts: Sequence[Places], starts: Sequence[int] | None = None) -> Places:
    """The largest tokens of all parts; ``starts`` are the numbers that the first context of each
    part has in the whole corpus."""
    first = starts or [0] * len(parts)
    moved = [p | {"context": p["context"] + start} for p, start in zip(parts, first)]
    both = {name: torch.cat([part[name] for part in moved], 1) for name in parts[0]}
    # one number that orders by context and position; a stable sort by norm keeps that order
    order = (both["context"] * 2**32 + both["position"]).argsort(dim=1, stable=True)
    by_norm = both["norm"].gather(1, order).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, by_norm)[:, :KEPT]
    return {name: values.gather(1, order) for name, values in both.items()}


class Sinks(NamedTuple):
    """How much of the raw sum of squares the largest 0.1% of the tokens of one state (at least one,
    at most 32) hold.

    ``tokens`` of ``of`` tokens hold ``share``; ``positions`` are theirs, the most frequent first.
    ``remark`` is the sentence that tables show where they hold more than :data:`SINK_SHARE` (and
    :data:`CONCENTRATED` times their share of the tokens), else empty.
    """

    tokens: int
    of: int
    share: float
    positions: tuple[int, ...]
    remark: str


def sinks_of(
    places: Places, row: int, tokens: int, total: float, texts: Mapping[str, str]
) -> Sinks:
    """The sinks of one state of so many ``tokens`` with the sum of squares ``total``; ``texts`` are
    tokens as text, by id."""
    count = min(KEPT, max(1, tokens // ONE_IN))
    squares = float(places["norm"][row, :count].square().sum())
    share = squares / total if total > 0 else torch.nan
    positions = [p for p, _ in Counter(places["position"][row, :count].tolist()).most_common()]
    shown = [f"position{'s' * (len(positions) > 1)} {', '.join(map(str, positions[:3]))}"]
    if "token" in places:
        ids = [t for t, _ in Counter(places["token"][row, :count].tolist()).most_common(3)]
        shown.append(", ".join(repr(texts.get(str(t), f"<{t}>")) for t in ids))
    where = ", ".join(shown)
    sentence = f"{count} of {tokens} tokens hold {share:.0%} of the sum of squares ({where})"
    remark = sentence if share > max(SINK_SHARE, CONCENTRATED * count / tokens) else ""
    return Sinks(count, tokens, share, tuple(positions), remark)


@dataclass(frozen=True, eq=False, kw_only=True)
class LargestTokens(Result):
    """The tokens of largest norm inside the window, a row per state and token, descending within
    each state.

    ``share`` is the token's part of the state's raw sum of squares, ``rms`` the root mean square of
    the norms of all ``tokens``, ``coordinate`` the index of the largest entry, ``token`` an id (-1
    where ids are not known). ``top_share`` is what the largest 0.1% hold together.
    """

    states: tuple[int, ...]
    tokens: int
    norm: Float[Tensor, "state kept"]
    context: Int[Tensor, "state kept"]
    position: Int[Tensor, "state kept"]
    token: Int[Tensor, "state kept"]
    coordinate: Int[Tensor, "state kept"]
    share: Float[Tensor, "state kept"]
    rms: Float[Tensor, " state"]
    top_share: Float[Tensor, " state"]
    str_tokens: tuple[tuple[str, ...], ...] = ()

    def columns(self) -> Sequence[str]:
        where = ["context", "position", "token", "text", "coordinate"]
        return ["state", "norm", "rms", "share", *where]

    def rows(self) -> Sequence[Sequence[object]]:
        table: list[list[Any]] = []
        for i, state in enumerate(self.states):
            for k in range(self.norm.shape[1]):
                text = self.str_tokens[i][k] if self.str_tokens else None
                place = [int(v[i, k]) for v in (self.context, self.position, self.token)]
                numbers = [float(self.norm[i, k]), float(self.rms[i]), float(self.share[i, k])]
                table.append([state, *numbers, *place, text, int(self.coordinate[i, k])])
        return table
