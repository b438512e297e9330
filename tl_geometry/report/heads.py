"""Section: what drives each head? Shares of position, content and both; head types; the frequencies
that carry the scores of a rotary model. Called by :mod:`tl_geometry.report.analysis`."""

from __future__ import annotations

import dataclasses

import torch

from tl_geometry.base.checks import head_name
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.render import sweeps as views
from tl_geometry.render.head_view import heads
from tl_geometry.render.rotary import bands_page, head_planes
from tl_geometry.render.split_view import split
from tl_geometry.report import findings
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft
from tl_geometry.scores.labels import UNCLEAR
from tl_geometry.scores.planes import NEAR, BandTable
from tl_geometry.scores.relative import offset_profile
from tl_geometry.scores.resampling import FEWEST_WINDOWS
from tl_geometry.scores.score_split import ScoreSplit
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.sweep import sweep_heads
from tl_geometry.scores.sweep_table import SweepTable

COLUMNS = (
    *("layer", "head", "dominant_group", "group_by_cs", "group_share", "group_by_gs"),
    *("group_gain", "dropped_mass"),
    *("previous", "induction", "duplicate", "cs_position_corrected", "cs_content_corrected"),
    *("cs_token_corrected", "cs_mixed_corrected"),
    *("cs_position_null", "p_position", "p_position_bh"),
)
"""Columns of the sweep that are shown on the page; its file holds all columns."""
PROMPTS, PERIOD = 64, 20
"""Most windows of the sweep (PROMPTS); most tokens that the example repeats (PERIOD)."""
WORDS = {"previous": "previous-token", "induction": "induction"}
"""Type of a head -> its name in sentences."""
PROFILED = 16
"""Most windows for the offset profile of a rotary model."""


def section(draft: Draft, analysis: Analysis) -> None:
    """The sweep over all heads."""
    draft.say(
        "Attention scores before the softmax are split exactly, with the norm scale of the actual "
        "forward pass frozen: score = sum over pairs of parts {bias, pos, cvec} of query and key. "
        "Shares are covariances with the whole score over allowed keys; they add up to one and can "
        "be negative. 'position' gathers the terms without a context part, 'content' is cvec-cvec, "
        "'token' is context beside a constant (what a token attracts or seeks, whatever the rest), "
        "'mixed' context beside position. Gain shares weight a cell by the attention paid to it; "
        "they say "
        "how much each term adds to where attention goes. A head is labelled by a group that comes "
        "first twice: by covariance, with more than half of the score, and by gain. Each time it "
        "has a margin of 0.1 over the second, whose 95% interval (groups of windows left out of "
        "the sweep, and of its basis, which is made from other windows) excludes zero. Other heads "
        "are 'unclear'; the table still names the first by each."
    )
    rotary, table = analysis.view.position == "rotary", None
    with draft.part("the sweep over all heads"):
        table = _sweep(draft, analysis)
    if table is None:
        return
    with draft.part("maps of shares and head types"):
        _maps(draft, table)
    # jackknife groups of the sweep
    blocks = min(map(len, table.sizes), default=0)
    draft.find(findings.driver(table, groups=blocks, rotary=rotary))
    for name in findings.TYPES:
        draft.find(findings.head_type(table, name))
    if rotary:
        with draft.part("rotary planes"):
            _planes(draft, analysis, table)
    elif analysis.planes:
        draft.leave_out("rotary planes", "the model has no rotary embedding")
    with draft.part("the example on repeated text"):
        _example(draft, analysis, table)


def _sweep(draft: Draft, analysis: Analysis) -> SweepTable | None:
    what, length = "the sweep over all heads", analysis.windows.tokens.shape[1]
    windows, needed = len(analysis.windows), 2 * FEWEST_WINDOWS
    if windows < needed:
        why = f"a label needs an interval, and {windows} windows are fewer than the {needed} of one"
        draft.leave_out(what, why)
        return None
    max_windows = min(PROMPTS, windows // 3)
    # labels need an interval, so this many windows are taken whatever the budget
    count = max(FEWEST_WINDOWS, analysis.budget.windows(what, length, max_windows))
    # intervals are of windows that the basis has not seen: the last ones are swept
    blocks, fitted = range(analysis.view.n_layers), analysis.windows[:-count]
    if len(fitted) < 2 * FEWEST_WINDOWS:
        # documents make groups of any size: of so few windows they would be too small
        fitted = dataclasses.replace(fitted, labels=None, label_names=())
    basis = decompose(
        analysis.view,
        fitted,
        states=blocks,
        second_moments=False,
        keep_ctx=False,
        keep=0,
        seed=analysis.seed,
        progress=False,
    )
    table = sweep_heads(
        analysis.model,
        analysis.windows[-count:],
        basis,
        intervals=True,
        planes=analysis.view.position == "rotary",
        progress=False,
        seed=analysis.seed,
    )
    if count < max_windows:
        draft.say(f"{count} windows in place of {max_windows}, to keep the budget.")
    return table


def _maps(draft: Draft, table: SweepTable) -> None:
    """Add maps of the shares, the strongest heads of each type, and every number of every head."""
    cell, null, null_sentence = Cells("heads", table), table.nulls.get("cs_position_null"), ""
    if null is not None and bool(null.isfinite().any()):
        row = int(null.nan_to_num(-1.0).argmax())
        largest_share = Cells("heads", table, rounded=True)(row, "cs_position_null")
        null_sentence = (
            f"With position destroyed, the share of position is at most {largest_share}."
        )
    draft.draw(views.head_shares(table), "shares", null=null_sentence)
    draft.say(
        "A cell that gets no attention counts for little. Weighted by where attention goes, the "
        "same terms have these shares:"
    )
    draft.draw(views.head_shares(table, share="gs"), "gain")
    for name, words in WORDS.items():
        draft.say(
            f"On repeated random tokens these are the strongest {words} heads (uniform "
            f"attention would score {cell(0, f'{name}_uniform')}):"
        )
        for line in _named(table, table.top(name, 3), name):
            draft.say(line)
    draft.draw(views.head_types(table), "types")
    draft.draw(heads(table, "induction", title="Every number of every head"), "heads")
    draft.table("heads", table, "Shares, types and labels of every head", COLUMNS)


def _named(table: SweepTable, top: SweepTable, name: str) -> list[str]:
    """A line for each head: its score of type ``name``, and what its label on this corpus rests
    on."""
    cell, lines = Cells("heads", table), []
    # intervals belong to the corrected shares, so these are quoted where there are intervals
    suffix = "_corrected" if table.samples else ""
    for i, pair in enumerate(top.heads):
        row, flag = table.heads.index(pair), top.by_group.flags[i]
        group = top.groups[int(torch.nan_to_num(top.group_cs[i], nan=-1.0).argmax())]
        remarks = [
            f"{top.by_group.labels[i]} on this corpus: {group} {cell(row, f'cs_{group}{suffix}')}"
            f"{_evidence(table, row, group)} of the score and "
            f"{cell(row, f'gs_{group}{suffix}')} of the gain"
        ]
        remarks += [f"flagged: {flag}"] if flag else []
        mass = cell(row, "dropped_mass", percent=True)
        remarks.append(f"{mass} of its attention on what is left out")
        lines.append(f"{head_name(pair)} {cell(row, name)} ({', '.join(remarks)})")
    return lines


def _evidence(table: SweepTable, row: int, group: str) -> str:
    """The interval of the share of a group, if there is one, and the null of position."""
    shares, cell = table.interval(), Cells("heads", table, rounded=True)
    evidence = []
    if shares is not None and bool(shares.low[row].isfinite().all()):
        evidence.append(cell.interval(row, f"cs_{group}_corrected"))
    if group == "position" and "cs_position_null" in table.nulls:
        evidence.append(f"{cell(row, 'cs_position_null')} with position destroyed")
    return f" ({', '.join(evidence)})" if evidence else ""


def _planes(draft: Draft, analysis: Analysis, table: SweepTable) -> None:
    """Add the shares of bands of wavelengths in sentences, figures and tables. With ``--planes`` a
    table has the shares of every plane too."""
    planes = table.planes()
    bands = planes.by_band()
    draft.say(
        "A rotary embedding turns pairs of coordinates, planes, by an angle that grows with the "
        "position, each at its own frequency: a plane of wavelength L sees the offset of two "
        f"tokens modulo L. Of {len(table.heads)} heads, {_counts_in_words(bands)}. Near planes "
        f"have wavelengths of up to {NEAR} tokens. Far ones are longer than the {planes.length} "
        "tokens of a window, and hardly see the offset at all."
    )
    for name, words in WORDS.items():
        head = table.top(name, 1).heads[0]
        shares = _shares(bands, table.heads.index(head))
        draft.say(f"The strongest {words} head, {head_name(head)}: {shares}.")
    chosen, profile = _strongest(table), None
    length, max_windows = analysis.windows.tokens.shape[1], min(PROFILED, len(analysis.windows))
    count = analysis.budget.windows("rotary planes", length, max_windows, 2)
    if count:
        windows = analysis.pick(count)
        scores = split_scores(analysis.model, windows, analysis.basis, heads=chosen)
        profile = offset_profile(scores)
    draft.draw(head_planes(planes, profile, heads=chosen), "planes")
    draft.draw(bands_page(planes, profile), "bands")
    draft.table("head_bands", bands, "Shares of bands of wavelengths in every head")
    if analysis.planes:
        draft.table("planes", planes, "Shares of every rotary plane in every head")


def _counts_in_words(bands: BandTable) -> str:
    """How many heads each band dominates."""
    words = {band: f"{band} planes lead" for band in bands.bands}
    words[UNCLEAR] = "no band leads clearly by covariance and by gain"
    counts = {band: bands.dominant.count(band) for band in words}
    return ", ".join(f"{words[band]} in {count}" for band, count in counts.items() if count)


def _shares(bands: BandTable, head: int) -> str:
    """The shares of the bands in one head."""
    cell, values = Cells("head_bands", bands, rounded=True), bands.cs[head].nan_to_num().tolist()
    # "pass" is shown only for partial rotation, which leaves some coordinates unrotated
    listed = [b for b, v in zip(bands.bands, values, strict=True) if b != "pass" or v]
    return ", ".join(f"{band} {cell(head, f'cs_{band}')}" for band in listed)


def _example(draft: Draft, analysis: Analysis, table: SweepTable) -> None:
    what = "the example on repeated text"
    if not analysis.view.causal:
        draft.leave_out(what, "an encoder has no previous-token or induction heads to show")
        return
    example = repeated(analysis, table)
    if example is None:
        draft.leave_out(what, "windows of fewer than 9 tokens hold no piece of text written twice")
        return
    names = [head_name(pair) for pair in example.heads]
    title = "The strongest previous-token and induction heads"
    draft.say(
        f"One prompt in full: a piece of text, written twice. For {names[0]} (previous token) and "
        f"{names[-1]} (induction) every cell can be read, and a click on a token colours its "
        "sources in the text by any group of terms. Rows are centred, which the softmax does not "
        "see."
    )
    figure = split(
        example, centered=True, title=f"{title}, {' and '.join(names)}, on repeated text"
    )
    draft.draw(figure, "example")


def repeated(analysis: Analysis, table: SweepTable) -> ScoreSplit | None:
    """The split of the strongest previous-token and induction heads on a prompt that holds a piece
    of the first window twice. ``None`` if the piece would be too short."""
    window, start = analysis.windows.tokens[0], int(bool(analysis.windows.has_bos))
    period = min(PERIOD, (analysis.basis.pos_seen.shape[1] - start) // 2, len(window) - start)
    if period < 4:
        return None
    piece = window[start : start + period]
    # a BOS stands once, at the front: only the piece is repeated
    prompt = torch.cat([window[:start], piece, piece])
    return split_scores(analysis.model, prompt, analysis.basis, heads=_strongest(table))


def _strongest(table: SweepTable) -> list[tuple[int, int]]:
    """The strongest head of each type in :data:`WORDS`; one if it is the same."""
    return list(dict.fromkeys(table.top(name, 1).heads[0] for name in WORDS))
