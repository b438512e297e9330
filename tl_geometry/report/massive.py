"""Massive tokens: a few tokens whose norm dwarfs the others', and with it every sum of squares; a
sentence and a picture."""

from __future__ import annotations

import torch

from tl_geometry.base import html
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition.largest import LargestTokens
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.variance import spans
from tl_geometry.render import basis as views
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.section import Draft

ABOUT = "The tokens of largest norm in each state"
LISTED = 12
"""Tokens marked in the picture."""


def add(draft: Draft, analysis: Analysis) -> None:
    """The sentence, the picture of the state where the largest tokens hold most, and the table."""
    basis = analysis.basis
    try:
        table = basis.largest_tokens()
    except GeometryError as error:  # a basis of an earlier version
        draft.leave_out("massive tokens", str(error))
        return
    row = int(torch.nan_to_num(table.top_share, nan=-1.0).argmax())
    draft.say(sentence(basis, table, row))
    if basis.samples is None or len(basis.samples) == 0:
        draft.table("massive_tokens", table, ABOUT)
        return
    norms = torch.linalg.vector_norm(basis.samples[:, row, slice(*basis.window)], dim=-1)
    draft.draw(
        views.token_norms(
            norms,
            basis.window,
            largest(table, row)[:LISTED],
            state=table.states[row],
            title=title(basis, table, row),
            provenance=table.provenance,
        ),
        "massive",
    )
    draft.table("massive_tokens", table, ABOUT)


def texts(table: LargestTokens, row: int) -> list[str]:
    """The largest tokens of a state as a reader sees them."""
    if not table.str_tokens:
        return [f"token {t}" for t in table.token[row].tolist()]
    return [html.token_text(t) for t in table.str_tokens[row]]


def largest(table: LargestTokens, row: int) -> list[tuple[int, float, str]]:
    """Position, norm and text of the largest tokens of a state, descending."""
    places, sizes = table.position[row].tolist(), table.norm[row].tolist()
    return list(zip(places, sizes, texts(table, row), strict=True))


def title(basis: PositionContext, table: LargestTokens, row: int) -> str:
    """What the picture shows, in a sentence."""
    held, state = basis.sinks(table.states[row]), table.states[row]
    if held is not None and held.remark:
        return (
            f"{held.tokens} of {held.of:,} tokens hold {held.share:.0%} of the sum of squares of "
            f"state {state}"
        )
    return (
        f"No few tokens dominate: the largest 0.1% of {table.tokens:,} hold "
        f"{float(table.top_share[row]):.1%} of state {state}"
    )


def sentence(basis: PositionContext, table: LargestTokens, row: int) -> str:
    """Which states are dominated by a few tokens, by which, and what follows."""
    bad = [s for s in table.states if (held := basis.sinks(s)) is not None and held.remark]
    if not bad:
        return f"{title(basis, table, row)}, more than of any other state."
    usual = float(table.median[row])
    named: dict[tuple[int, str], None] = {}
    for at, norm, text in largest(table, row):
        if norm > 3 * usual:
            named[at, text if len(text) <= 16 else f"{text[:15]}…"] = None
    places = ", ".join(f"{text!r} at position {at}" for at, text in list(named)[:3])
    return (
        f"{title(basis, table, row)} ({places}; norm {float(table.norm[row, 0]):,.0f} where the "
        f"median token has {usual:,.0f}, "
        f"coordinate {int(table.coordinate[row, 0])}). Shares, spectra and measures of {len(bad)} "
        f"of {len(table.states)} states "
        f"({spans(bad)}) describe these tokens more than the others; a normalised basis weighs "
        "all tokens alike."
    )
