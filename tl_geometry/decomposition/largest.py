"""Which tokens have the largest norms in a state, and how much of its sum of squares do they hold?
Attention sinks and other massive tokens, found by every pass of ``decompose`` and read through
``PositionContext.sinks`` and ``.largest_tokens``.

A few tokens of enormous norm (an attention sink, and in real models a second one) can hold most of
``sum |h|^2``, so that shares, spectra and reliabilities describe them and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

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
    its first context."""
    start, end = window
    inside = norms[:, start:end].reshape(-1)
    # stable, because a norm may occur many times (the same first token in every context)
    order = inside.argsort(descending=True, stable=True)[:KEPT]
    context, position = order // (end - start), order % (end - start) + start
    new = {"norm": inside[order], "context": context + first, "position": position}
    new["coordinate"] = h.to(norms.device)[context, position].abs().argmax(-1)
    both = top([{n: v[row : row + 1] for n, v in places.items()}, {n: new[n][None] for n in new}])
    for name, values in places.items():
        values[row] = both[name][0]


def top(parts: Sequence[Places]) -> Places:
    """The largest tokens of all parts, of equal norms those of earlier contexts and positions."""
    both = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}
    # one number that orders by context and position; a stable sort by norm keeps that order
    order = (both["context"] * 2**32 + both["position"]).argsort(dim=1, stable=True)
    by_norm = both["norm"].gather(1, order).argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, by_norm)[:, :KEPT]
    return {name: values.gather(1, order) for name, values in both.items()}


class Sinks(NamedTuple):
    """The ``share`` of the raw sum of squares that the largest 0.1% of the tokens of one state (at
    least one, at most 32) hold, and the sentence that tables show where it is more than
    :data:`SINK_SHARE` (and :data:`CONCENTRATED` times their share of the tokens), else empty."""

    share: float
    remark: str


def sinks_of(
    places: Places, row: int, tokens: int, total: float, texts: Mapping[str, str]
) -> Sinks:
    """The sinks of one state of so many ``tokens`` with the sum of squares ``total``; ``texts`` are
    tokens as text, by id."""
    count = min(KEPT, max(1, tokens // ONE_IN))
    largest = {name: values[row, :count] for name, values in places.items()}
    share = float(largest["norm"].square().sum()) / total if total > 0 else torch.nan
    if not share > max(SINK_SHARE, CONCENTRATED * count / tokens):
        return Sinks(share, "")
    positions = [str(p) for p, _ in Counter(largest["position"].tolist()).most_common()]
    where = f"position{'s' * (len(positions) > 1)} {', '.join(positions[:3])}"
    if "token" in largest:
        ids = [t for t, _ in Counter(largest["token"].tolist()).most_common(3)]
        where += "".join(f", {texts.get(str(t), f'<{t}>')!r}" for t in ids)
    held = f"{count} of {tokens} tokens hold {share:.0%} of the sum of squares"
    return Sinks(share, f"{held} ({where})")
