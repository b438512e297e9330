"""Do a few massive tokens, with norms far above all others, dominate every sum of squares? A
sentence, a figure and a table, which :mod:`tl_geometry.report.basis` adds to its section."""

from __future__ import annotations

import torch

from tl_geometry.base import html
from tl_geometry.decomposition.largest import LargestTokens
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.variance import spans
from tl_geometry.render import basis as views
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft

LISTED = 12
"""Most tokens that are marked in the figure."""


def add(draft: Draft, analysis: Analysis, anova: Cells | None) -> None:
    """Add the sentence, the figure of the state where the largest tokens hold most, and the table.
    ``anova`` are the cells of the analysis of variance, ``None`` if there are none."""
    basis = analysis.basis
    table = basis.largest_tokens()
    row = int(torch.nan_to_num(table.top_share, nan=-1.0).argmax())
    share = f"{float(table.top_share[row]):.1%}"
    if anova is not None:
        share = anova(row, "top_share", percent=True)
    draft.say(sentence(basis, table, row, share))
    if basis.sample_states is not None:
        norms = torch.linalg.vector_norm(basis.sample_states[:, row, slice(*basis.window)], dim=-1)
        figure = views.token_norms(
            norms,
            basis.window,
            largest(table, row)[:LISTED],
            state=table.states[row],
            title=title(basis, table, row, share),
            provenance=table.provenance,
        )
        draft.draw(figure, "massive")
    draft.table("massive_tokens", table, "The tokens of largest norm in each state")


def largest(table: LargestTokens, row: int) -> list[tuple[int, float, str]]:
    """Position, norm and text of the largest tokens of a state, the largest norm first."""
    texts = [f"token {token}" for token in table.token[row].tolist()]
    if table.str_tokens:
        texts = [html.token_text(text) for text in table.str_tokens[row]]
    return list(zip(table.position[row].tolist(), table.norm[row].tolist(), texts, strict=True))


def title(basis: PositionContext, table: LargestTokens, row: int, share: str) -> str:
    """What the figure shows, in a sentence."""
    state = table.states[row]
    sinks = basis.sinks(state)
    if sinks.remark:
        few = f"{sinks.tokens} of {sinks.of:,} tokens"
        return f"{few} hold {share} of the sum of squares of state {state}"
    return (
        f"No massive tokens: the largest 0.1% of {table.tokens:,} tokens hold {share} of the sum "
        f"of squares of state {state}"
    )


def sentence(basis: PositionContext, table: LargestTokens, row: int, share: str) -> str:
    """Which states a few tokens dominate, which tokens these are, and what follows from it."""
    # a state has a remark if a few tokens hold more than a quarter of its sum of squares
    states = [state for state in table.states if basis.sinks(state).remark]
    if not states:
        return f"{title(basis, table, row, share)}, more than of any other state."
    cell = Cells("massive_tokens", table, rounded=True)
    first_row = [cells[0] for cells in table.rows()].index(table.states[row])
    places: dict[tuple[int, str], str] = {}
    for i, (position, norm, text) in enumerate(largest(table, row)):
        # three times the usual norm: every state has largest tokens, massive or not
        if norm > 3 * float(table.rms[row]):
            short_text = text if len(text) <= 16 else f"{text[:15]}…"
            token_place = f"{short_text!r} at position {cell(first_row + i, 'position')}"
            # one token at one position is named once, however many windows hold it
            places.setdefault((position, short_text), token_place)
    return (
        f"{title(basis, table, row, share)} ({', '.join(list(places.values())[:3])}; norm "
        f"{cell(first_row, 'norm')} where the root mean square is {cell(first_row, 'rms')}, "
        f"coordinate {cell(first_row, 'coordinate')}). Shares, spectra and measures of "
        f"{len(states)} of "
        f"{len(table.states)} states ({spans(states)}) describe these tokens more than the others; "
        "a normalised basis weighs all tokens alike."
    )
