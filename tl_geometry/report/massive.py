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
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft

ABOUT = "The tokens of largest norm in each state"
LISTED = 12
"""Tokens marked in the picture."""


def add(draft: Draft, analysis: Analysis, anova: Cells | None) -> None:
    """The sentence, the picture of the state where the largest tokens hold most, and the table;
    ``anova`` are the cells of the analysis of variance, where there is one."""
    basis = analysis.basis
    try:
        table = basis.largest_tokens()
    except GeometryError as error:  # a basis of an earlier version
        draft.leave_out("massive tokens", str(error))
        return
    row = int(torch.nan_to_num(table.top_share, nan=-1.0).argmax())
    held = f"{float(table.top_share[row]):.1%}"
    held = held if anova is None else anova(row, "top_share", percent=True)
    draft.say(sentence(basis, table, row, held))
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
            title=title(basis, table, row, held),
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


def title(basis: PositionContext, table: LargestTokens, row: int, share: str) -> str:
    """What the picture shows, in a sentence."""
    held, state = basis.sinks(table.states[row]), table.states[row]
    if held is not None and held.remark:
        return (
            f"{held.tokens} of {held.of:,} tokens hold {share} of the sum of squares of state "
            f"{state}"
        )
    return (
        f"No few tokens dominate: the largest 0.1% of {table.tokens:,} tokens hold {share} of "
        f"state {state}"
    )


def sentence(basis: PositionContext, table: LargestTokens, row: int, share: str) -> str:
    """Which states are dominated by a few tokens, by which, and what follows."""
    bad = [s for s in table.states if (held := basis.sinks(s)) is not None and held.remark]
    if not bad:
        return f"{title(basis, table, row, share)}, more than of any other state."
    usual, cell = float(table.median[row]), Cells("massive_tokens", table, rounded=True)
    first = [r[0] for r in table.rows()].index(table.states[row])
    named: dict[tuple[int, str], str] = {}
    for i, (at, norm, text) in enumerate(largest(table, row)):
        if norm > 3 * usual:
            short = text if len(text) <= 16 else f"{text[:15]}…"
            named.setdefault((at, short), f"{short!r} at position {cell(first + i, 'position')}")
    places = ", ".join(list(named.values())[:3])
    return (
        f"{title(basis, table, row, share)} ({places}; norm {cell(first, 'norm')} where the median "
        f"token has {cell(first, 'median')}, coordinate {cell(first, 'coordinate')}). Shares, "
        "spectra and measures of {len(bad)} "
        f"of {len(table.states)} states "
        f"({spans(bad)}) describe these tokens more than the others; a normalised basis weighs "
        "all tokens alike."
    )
