"""What drives each head: shares of position, content and both; head types; and whether the dominant
terms carry the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tl_geometry.base.checks import head_name
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.decomposition.layer_intervals import BLOCK
from tl_geometry.render import sweeps as views
from tl_geometry.render.head_view import heads
from tl_geometry.render.split_view import split
from tl_geometry.render.weights import effect_bars
from tl_geometry.report import findings, planes
from tl_geometry.report.analysis import TITLES, Analysis
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft, Section
from tl_geometry.scores.split import ScoreSplit, split_scores
from tl_geometry.scores.sweep import SweepTable, sweep_heads

if TYPE_CHECKING:
    from tl_geometry.interventions.causal import Dominance

COLUMNS = (
    *("layer", "head", "dominant_group", "group_by_cs", "group_share", "group_by_gs"),
    *("group_gain", "dropped_mass"),
    *("previous", "induction", "duplicate", "cs_position_corrected", "cs_content_corrected"),
    *("cs_mixed_corrected", "cs_position_null", "p_position", "p_position_bh"),
)
"""Columns of the sweep that stand on the page; all are in its file."""
PROMPTS, PERIOD, KEPT, DRAWS, FEWEST_DRAWS = 64, 20, 16, 9, 3
"""Windows of the sweep, tokens that the example repeats, windows and control draws of the causal
question (fewer say nothing of what another draw would cost)."""
SWEEP, EDIT, REPEATS = 2.5, 5.0, 3
"""Forward passes that a sweep and an edited forward pass cost, and windows that repeated tokens are
worth (all measured)."""
CELLS = {"intervals": 75.0}
"""What a sweep's details cost besides, for each head, query and key, in units of ``Costs.svd``
(measured); the null of position is made of the sums of the intervals."""


def _sweep_cost(analysis: Analysis) -> float:
    view, length = analysis.view, analysis.windows.tokens.shape[1]
    cells = view.n_layers * view.n_heads * length**2
    extra = sum(CELLS.get(name, 0.0) for name in _details(analysis))
    return SWEEP * analysis.costs.token * length + extra * analysis.costs.svd * cells


def _edit_cost(analysis: Analysis) -> float:
    return EDIT * analysis.costs.output * analysis.windows.tokens.shape[1]


def section(analysis: Analysis) -> Section:
    """The sweep over all heads, and the causal question."""
    draft = Draft(TITLES["heads"])
    draft.say(
        "Attention scores before the softmax are split exactly, with the norm scale of the actual "
        "forward pass frozen: score = sum over pairs of parts "
        "{bias, pos, cvec} of query and key. Shares are covariances with the whole score over "
        "allowed keys; they add up to one and can be negative. "
        "'position' gathers the terms without a context part, 'content' is cvec-cvec, 'mixed' the "
        "rest. Gain shares count a cell by the attention "
        "paid to it: the additive part of a term in where attention goes. A head without a clear "
        "winner is 'unclear': a label needs the same group first by covariance (more than half of "
        "the score) and by gain, each with a margin of 0.1 over the second whose 95% interval "
        "excludes zero (groups of contexts left out of the sweep and of the basis). The table "
        "names the first by each."
    )
    table = _sweep(draft, analysis)
    if table is None:
        return draft.section()
    with draft.part("maps of shares and head types"):
        draft.draw(views.head_shares(table), "shares", null=_null_of_position(table))
        draft.say(
            "A cell that gets no attention counts for little. Weighed by where attention goes, the "
            "same terms have these shares:"
        )
        draft.draw(views.head_shares(table, share="gs"), "gain")
        if table.types:
            _types(draft, table)
        draft.draw(
            heads(
                table,
                "induction" if "induction" in table.types else None,
                title="Every number of every head",
            ),
            "heads",
        )
        draft.table("heads", table, "Shares, types and labels of every head", COLUMNS)
    blocks = len(table.resampled_sizes[0]) if table.resampled_sizes else 0
    draft.find(findings.driver(table, groups=blocks, rotary=_rotary(analysis)))
    for name in findings.TYPES:
        draft.find(findings.head_type(table, name))
    if _rotary(analysis):
        with draft.part("rotary planes"):
            planes.add(draft, analysis, table)
    elif analysis.planes:
        draft.leave_out("rotary planes", "the model has no rotary embedding")
    with draft.part("the example on repeated text"):
        _example(draft, analysis, table)
    with draft.part("the model with dominant terms only"):
        _dominant(draft, analysis, table)
    return draft.section()


def _rotary(analysis: Analysis) -> bool:
    return analysis.view.position == "rotary"


def _sweep(draft: Draft, analysis: Analysis) -> SweepTable | None:
    most, each = min(PROMPTS, len(analysis.windows)), _sweep_cost(analysis)
    known, needed = analysis.basis.contexts, FEWEST_GROUPS * BLOCK
    if known < needed:
        why = f"a label needs an interval, and {known} windows are fewer than the {needed} of one"
        draft.leave_out("the sweep over all heads", why)
        return None
    count = max(FEWEST, analysis.work.take(each, most, share=0.55))  # whatever the budget
    analysis.clock.say(f"a sweep over all heads of {count} windows")
    table = None
    with draft.part("the sweep over all heads"):
        table = sweep_heads(
            analysis.model,
            analysis.pick(count),
            analysis.basis,
            detail=_details(analysis),
            progress=False,
            seed=analysis.seed,
        )
        if count < most:
            draft.say(f"{count} windows in place of {most}, to keep the budget.")
    return table


def _null_of_position(table: SweepTable) -> str:
    """What the map of shares has for chance, where there is a null."""
    null = table.details.get("cs_position_null")
    if null is None or not bool(null.isfinite().any()):
        return ""
    row = int(null.nan_to_num(-1.0).argmax())
    most = Cells("heads", table, rounded=True)(row, "cs_position_null")
    return f"With position destroyed, position has at most {most}."


def _types(draft: Draft, table: SweepTable) -> None:
    """Which heads have a type, and what their label rests on."""
    known, cell = [k for k in ("previous", "induction") if k in table.types], Cells("heads", table)
    for name, words in zip(known, ("previous-token", "induction")):
        draft.enumerate(
            f"On repeated random tokens these are the strongest {words} heads (uniform attention "
            f"would score {cell(0, f'{name}_uniform')}):",
            _named(table, table.top(name, 3), name),
        )
    draft.draw(views.head_types(table), "types")


def _details(analysis: Analysis) -> tuple[str, ...]:
    """Intervals; the null of position where position is in the stream; planes where they rotate."""
    added = analysis.view.position == "shortformer"
    planes = ("planes",) if _rotary(analysis) else ()
    return ("intervals", *(() if added else ("nulls",)), *planes)


def _named(table: SweepTable, top: SweepTable, name: str) -> list[str]:
    """Heads with their score, and with what their label on this corpus rests on."""
    best, found, cell = top.by_group, [], Cells("heads", table)
    end = "" if table.group_intervals is None else "_corrected"
    for i, pair in enumerate(top.heads):
        row = table.heads.index(pair)
        held = (
            ""
            if top.dropped_mass is None
            else f", {cell(row, 'dropped_mass', percent=True)} of its attention on what is left out"
        )
        group = top.groups[int(torch.nan_to_num(top.group_cs[i], nan=-1.0).argmax())]
        shares = (
            f"{group} {cell(row, f'cs_{group}{end}')}{_evidence(table, row, group)} of the score "
            f"and {cell(row, f'gs_{group}{end}')} of the gain"
            + (f", flagged: {best.flags[i]}" if best.flags[i] else "")
        )
        found.append(
            f"{head_name(pair)} {cell(row, name)} ({best.labels[i]} on this corpus: {shares}{held})"
        )
    return found


def _evidence(table: SweepTable, row: int, group: str) -> str:
    """The interval of a group's share and, for position, the null share, as far as known."""
    found, cell = table.group_intervals, Cells("heads", table, rounded=True)
    known = found is not None and bool(found.low[row].isfinite().all())
    said = [cell.interval(row, f"cs_{group}_corrected")] if known else []
    if group == "position" and "cs_position_null" in table.details:
        said.append(f"{cell(row, 'cs_position_null')} with position destroyed")
    return f" ({', '.join(said)})" if said else ""


def _example(draft: Draft, analysis: Analysis, table: SweepTable) -> None:
    what = "the example on repeated text"
    if not analysis.view.causal:
        draft.leave_out(what, "an encoder has no previous-token or induction heads to show")
        return
    example = repeated(analysis, table)
    if example is None:
        draft.leave_out(what, "windows of fewer than 9 tokens hold no piece of text written twice")
        return
    shown = [head_name(pair) for pair in example.heads]
    title = (
        f"The strongest previous-token and induction heads, {' and '.join(shown)}, on repeated text"
    )
    draft.say(
        f"One prompt in full: a piece of text, written twice. For {shown[0]} (previous token) and "
        f"{shown[-1]} (induction) every cell can be read, and a click on a "
        "token colours its sources in the text by any group of terms. Rows are centred, which the "
        "softmax does not see."
    )
    draft.draw(split(example, centered=True, title=title), "example")


def repeated(analysis: Analysis, table: SweepTable) -> ScoreSplit | None:
    """The split of the strongest previous-token and induction heads on a piece of the first window
    written twice."""
    window, start = analysis.windows.tokens[0], int(bool(analysis.windows.has_bos))
    period = min(PERIOD, (analysis.basis.pos_seen.shape[1] - start) // 2, len(window) - start)
    if period < 4:
        return None
    prompt = torch.cat(
        [window[:start], window[start : start + period], window[start : start + period]]
    )
    chosen = dict.fromkeys(
        table.top(name, 1).heads[0] for name in ("previous", "induction") if name in table.types
    )
    if not chosen:
        return None
    return split_scores(analysis.model, prompt, analysis.basis, heads=list(chosen))


def _dominant(draft: Draft, analysis: Analysis, table: SweepTable) -> None:
    what = "the model with dominant terms only"
    if not (analysis.view.head_trained and analysis.view.causal):
        draft.leave_out(what, "it takes a decoder with a trained output head")
        return
    from tl_geometry.interventions.causal import dominant_only

    # fewer draws, then fewer windows; REPEATS: repeated tokens go through every condition too
    draws, each = DRAWS, _edit_cost(analysis)
    while draws > FEWEST_DRAWS and (5 + draws) * each * (KEPT + REPEATS) > analysis.work.left:
        draws -= 1
    most = min(KEPT, len(analysis.windows))
    count = analysis.work.take((5 + draws) * each, most + REPEATS) - REPEATS
    count = max(FEWEST, count)  # an interval, whatever the budget
    analysis.clock.say(f"{what}, {count} windows")
    effect = dominant_only(
        analysis.model,
        analysis.pick(count),
        analysis.basis,
        table=table,
        draws=draws,
        progress=False,
        seed=analysis.seed,
    )
    cell = Cells("dominant_only", effect)
    rows = [str(row[0]) for row in effect.rows()]
    loss = {name: cell(i, "loss") for i, name in enumerate(rows)}
    smaller = (
        f" ({count} windows and {draws} draws, to keep the budget)"
        if (count, draws) != (most, DRAWS)
        else ""
    )
    draft.say(
        "If every head kept only its dominant term, how much of the model would survive? On "
        f"{count} windows of this corpus its loss goes from {loss['clean']} to "
        f"{loss['dominant term']} nats per token; with a random term in place of the dominant one "
        f"it is {loss['random term']}, with uniform attention {loss['uniform attention']}{smaller}."
        " Edits act in the live model."
    )
    draft.say(_dominance(effect, cell))
    draft.draw(effect_bars(effect), "dominance")
    draft.table("dominant_only", effect, "Loss with only some of the terms")
    draft.find(findings.dominance(effect))


def _dominance(effect: Dominance, cell: Cells) -> str:
    """Whether dominant terms carry the model better than random ones."""
    row = effect.conditions.index("dominant term")
    value, *ends = (cell(row, f"saved{end}") for end in ("", "_low", "_high"))
    of = f"95% interval {' to '.join(ends)} over windows and draws of random terms"
    if bool(effect.saved().low > 0):
        return f"The dominant terms save {value} nats per token over random ones ({of})."
    few = bool(effect.saved().low.isnan())
    why = (
        f"fewer than {FEWEST} windows, or a single draw, give no interval"
        if few
        else f"random ones cost {value} nats more, {of}"
    )
    return (
        "The dominant terms are not shown to be better than a random term of each head "
        f"({why}): dominance describes single heads and is no summary of this model."
    )
