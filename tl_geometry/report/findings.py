"""What did a report find? Sentences, each with a number, its interval and its null, all from the
tables of the report. Sections call these functions, and the page opens with their answers.

Each function answers one question from one table:

1. It takes the head, state or layer where the number is largest, or furthest from its null.
2. It asks whether the interval there excludes the null. The interval has Student's quantiles,
   because most intervals rest on few groups of contexts, and is widened by Bonferroni's rule,
   because one of many was chosen.
3. If it does not, the sentence says "no evidence that".

The answer is ``None`` if the table does not hold what it needs (no interval, no such score).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_geometry.base.checks import head_name
from tl_geometry.base.intervals import t_quantile
from tl_geometry.base.tables import Table
from tl_geometry.decomposition.variance import LOW_RELIABILITY, Anova
from tl_geometry.flow.skipping import SkipMap
from tl_geometry.flow.truncation import TruncationCurve
from tl_geometry.report.origin import Cells, around
from tl_geometry.scores.head_types import SEQUENCES
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.weights import WeightGeometry

TYPES = {"induction": "the token that followed last time", "previous": "the token before"}
"""Type of a head -> where it looks on repeated random tokens."""
NULLS = {
    "shuffled": "positions in random order",
    "noise": "sampling noise alone",
    "isotropic": "isotropic noise",
    "random": "random directions",
    "flipped": "coordinates with flipped signs",
    "exchanged": "windows whose positions were exchanged (no context)",
}
"""Null of the measures of a state -> its name in sentences."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding. ``said`` is the sentence, ``value`` its number, ``beside`` the interval and the
    null, ``figure`` the id of the figure that shows it. ``clear`` says that the null is excluded.
    Numbers name the cells that they are read from (:mod:`tl_geometry.report.origin`)."""

    value: str
    said: str
    beside: str
    figure: str
    clear: bool


def excludes(
    value: float,
    low: float,
    high: float,
    null: float,
    *,
    samples: int,
    among: int = 1,
    spread: float = 0.0,
    draws: int = 0,
) -> bool:
    """Whether the interval of a value excludes a null.

    ``low`` to ``high`` is Student's 95% interval of ``samples`` samples or jackknife groups. It is
    widened twice:

    - because the value was chosen as the largest ``among`` so many;
    - if ``null`` is the mean of ``draws`` with standard deviation ``spread``, by how far one more
      draw may lie from this mean.

    >>> bounds = 0.5, 0.3, 0.7, 0.2
    >>> excludes(*bounds, samples=8), excludes(*bounds, samples=8, among=100)
    (True, False)
    >>> excludes(*bounds, samples=8, spread=0.1, draws=8)
    False
    """
    # Bonferroni's rule: each candidate gets its share of the 5%
    level = 1 - 0.05 / among
    freedom = torch.tensor(samples - 1.0)
    wider = float(t_quantile(freedom, level) / t_quantile(freedom))
    # only the side of the interval that faces the null counts
    reach = wider * (value - low if null < value else high - value)
    if spread > 0:
        # prediction interval of one more draw: sqrt(1 + 1/n) for the error of the mean of n draws
        one_more = float(t_quantile(torch.tensor(draws - 1.0), level)) * spread
        reach = math.hypot(reach, one_more * (1 + 1 / draws) ** 0.5)
    return bool(math.isfinite(low + high + null)) and abs(value - null) > reach


def position_share(table: Anova, *, control: Anova | None = None) -> Finding | None:
    """Whether the residual stream depends on position; the share of the untrained control stands
    beside it."""
    if "pos" not in table.intervals:
        return None
    shares, lows, highs = table.intervals["pos"].unbind(1)
    row = _largest(_where_reliable(shares, table.pos_reliability))
    state, count, trust = table.states[row], len(table.states), float(table.pos_reliability[row])
    bounds = float(shares[row]), float(lows[row]), float(highs[row]), 0.0
    clear = trust >= LOW_RELIABILITY and excludes(*bounds, samples=table.blocks, among=count)
    cell = Cells("anova", table, rounded=True)
    shown = cell(row, "pos_corrected", percent=True)
    untrained = ""
    if control is not None:
        column = "pos_corrected" if control.intervals else "pos_debiased"
        share = Cells("anova_untrained", control, rounded=True)
        control_row = control.states.index(state)
        untrained = f"; {share(control_row, column, percent=True)} in the untrained control"
    every = bool((table.pos_reliability >= LOW_RELIABILITY).all())
    others = "any other" if every else "any other that has a reliable position"
    return Finding(
        value=shown,
        said=f"Position makes up {shown} of the variance of state {state}, more than of {others}."
        if clear
        else "No evidence that the residual stream depends on position alone: it makes up at most "
        f"{shown} of the variance of a state (state {state}).",
        beside=f"{cell.interval(row, 'pos_corrected', percent=True)}; 0% is expected by chance "
        f"({cell(row, 'pos', percent=True)} before the correction for sampling noise){untrained}; "
        f"the largest of {count} states; "
        f"{_reliability_in_words(cell(row, 'pos_reliability'), trust)}",
        figure="figure-variance",
        clear=clear,
    )


def context_share(table: Anova) -> Finding | None:
    """Whether real windows have more context in common than spliced windows."""
    if "ctx_null" not in table.intervals:
        return None
    (shares, lows, _), null = table.intervals["ctx"].T, table.intervals["ctx_null"]
    if not bool((lows + null[:, 1]).isfinite().any()):
        return None
    row = _largest(shares - null[:, 0])
    value, low, state = float(shares[row]), float(lows[row]), table.states[row]
    spliced, lowest = float(null[row, 0]), float(null[row, 1])
    # the null is an estimate too: the half-widths of both intervals add in quadrature
    reach = math.hypot(value - low, spliced - lowest)
    bounds = value, value - reach, value + reach, spliced
    beyond = excludes(*bounds, samples=table.blocks, among=len(table.states))
    clear = value > spliced and beyond
    cell = Cells("anova", table, rounded=True)
    shown = cell(row, "ctx_corrected", percent=True)
    return Finding(
        value=shown,
        said=f"{shown} of the variance of state {state} is common to a whole window: context that "
        "lasts."
        if clear
        else "No evidence that context lasts longer than a piece of text: a whole window has "
        f"{shown} of the variance of state {state} in common.",
        beside=f"{cell.interval(row, 'ctx_corrected', percent=True)}; "
        f"{cell(row, 'ctx_null_corrected', percent=True)} in windows spliced from random places "
        f"({cell.interval(row, 'ctx_null_corrected', percent=True)}); the largest excess of "
        f"{len(table.states)} states",
        figure="figure-variance",
        clear=clear,
    )


def driver(table: SweepTable, *, groups: int, rotary: bool = False) -> Finding | None:
    """Whether position drives a head; in a rotary model, whether position or content does.

    The null of position is its share with position destroyed. The null of content is the largest
    share of another group. ``groups`` is the number of jackknife groups.
    """
    shares = table.interval()
    names = [g for g in ("position", "content") if g in table.groups]
    if shares is None or not names:
        return None
    candidates = names if rotary else names[:1]
    columns = [table.groups.index(name) for name in candidates]
    estimates = torch.where(shares.low.isfinite(), shares.value, torch.nan)[:, columns]
    if not bool(estimates.isfinite().any()):
        return None
    # prefer heads where covariance and gain rank the same group first: others are no evidence
    leading_groups = zip(table.by_group.by_cs, table.by_group.by_gs, strict=True)
    agrees = torch.tensor([[cs == gs == name for name in candidates] for cs, gs in leading_groups])
    agreeing = torch.where(agrees.to(estimates.device), estimates, torch.nan)
    ranked = agreeing if bool(agreeing.isfinite().any()) else estimates
    row, candidate_index = divmod(_largest(ranked.flatten()), len(columns))
    group, column = candidates[candidate_index], columns[candidate_index]
    cell = Cells("heads", table, rounded=True)
    value, low, high = (
        float(bound[row, column]) for bound in (shares.value, shares.low, shares.high)
    )
    if group == "content":
        # the null of content is the largest share of another group
        others = shares.value[row].index_fill(0, torch.tensor([column]), -torch.inf)
        rival = table.groups[int(others.argmax())]
        null, null_column, null_words = float(others.max()), f"cs_{rival}_corrected", f"for {rival}"
    elif "cs_position_null" in table.nulls:
        null_column, null_words = "cs_position_null", "with position destroyed"
        null = float(table.nulls[null_column][row])
    else:
        return None
    clear = excludes(value, low, high, null, samples=groups, among=estimates.numel())
    # as for a label, the group must be first by covariance and by gain
    clear &= bool(agrees[row, candidate_index])
    head, shown = head_name(table.heads[row]), cell(row, f"cs_{group}_corrected", percent=True)
    group_name = "relative position" if rotary and group == "position" else group
    counts = " and ".join(f"{g} drives {table.by_group.labels.count(g)}" for g in names)
    return Finding(
        value=shown,
        said=f"{group_name.capitalize()} drives {head}: {shown} of the covariance of its scores."
        if clear
        else f"No evidence that {group_name} drives a head: it makes up {shown} of the scores of "
        f"{head}, its largest share in any head.",
        beside=f"{cell.interval(row, f'cs_{group}_corrected', percent=True)}; "
        f"{cell(row, null_column, percent=True)} {null_words}; of {len(table.heads)} heads "
        f"{counts}",
        figure="figure-shares",
        clear=clear,
    )


def head_type(table: SweepTable, name: str) -> Finding:
    """Whether there is a head of this type (a key of :data:`TYPES`)."""
    row, among = _largest(table.types[name]), len(table.heads)
    value, null = float(table.types[name][row]), table.baselines[name]
    bounds = around(value, float(table.type_errors[name][row]), SEQUENCES)
    beyond = excludes(value, *bounds, null, samples=SEQUENCES, among=among)
    clear = value > null and beyond
    words = "an induction" if name == "induction" else "a previous-token"
    cell = Cells("heads", table, rounded=True)
    head, shown = head_name(table.heads[row]), cell(row, name, percent=True)
    looks = f"puts {shown} of its attention on {TYPES[name]}"
    return Finding(
        value=shown,
        said=f"The strongest {words.split()[1]} head, {head}, {looks}."
        if clear
        else f"No evidence of {words} head: the best, {head}, {looks}.",
        beside=f"{cell.interval(row, name, percent=True, samples=SEQUENCES)} on repeated random "
        f"tokens; {cell(row, f'{name}_uniform', percent=True)} with uniform attention; the largest "
        f"of {among} heads",
        figure="figure-types",
        clear=clear,
    )


def smooth(report: Table) -> Finding | None:
    """Whether positions lie on a smooth curve."""
    name = "low_frequency"
    furthest = _furthest(report, name, lambda values, nulls: values - nulls.amax(0))
    if furthest is None:
        return None
    row, beyond, nulls = furthest
    clear = beyond and float(str(report.column(name)[row])) > max(nulls.values())
    cell, state = Cells("positional", report, rounded=True), report.column("state")[row]
    shown = cell(row, name, percent=True)
    held = f"the lowest frequencies hold {shown} of the energy of its unit positional vectors"
    return Finding(
        value=shown,
        said=f"The positions of state {state} lie on a smooth curve: {held}."
        if clear
        else f"No evidence that positions lie on a smooth curve: in state {state} {held}.",
        beside=_beside_nulls(report, cell, name, row, nulls, percent=True),
        figure="figure-position",
        clear=clear,
    )


def incoherence(report: Table) -> Finding | None:
    """Whether position and context are more or less aligned than by chance."""
    name = "incoherence_avg"
    furthest = _furthest(report, name, lambda values, nulls: (values - nulls).abs().amin(0))
    if furthest is None:
        return None
    row, beyond, nulls = furthest
    value = float(str(report.column(name)[row]))
    above = value > max(nulls.values())
    clear = beyond and (above or value < min(nulls.values()))
    cell = Cells("contextual", report, rounded=True)
    shown = cell(row, name)
    mean = f"their mean |cos| in state {report.column('state')[row]} is {shown}"
    return Finding(
        value=shown,
        said=f"Positional and context vectors are {'more' if above else 'less'} aligned than "
        f"chance: {mean}."
        if clear
        else "No evidence that positional and context vectors are more or less aligned than "
        f"chance: {mean}.",
        beside=_beside_nulls(report, cell, name, row, nulls),
        figure="figure-incoherence",
        clear=clear,
    )


def _furthest(
    report: Table, name: str, gap: Callable[[Tensor, Tensor], Tensor]
) -> tuple[int, bool, dict[str, float]] | None:
    """The state where a measure is furthest from its nulls, by ``gap(values, nulls)``; whether it
    excludes all of them there, with position reliable; and the means of the nulls there. ``None``
    if the table has no error or no null."""
    columns = {n: torch.tensor(report.column(n)).double() for n in report.names}
    means = {null: columns[f"{name}_{null}"] for null in NULLS if f"{name}_{null}" in columns}
    if f"{name}_se" not in columns or not means:
        return None
    distance = gap(columns[name], torch.stack(list(means.values())))
    row = _largest(_where_reliable(distance, columns["split_half"]))
    value, error = float(columns[name][row]), float(columns[f"{name}_se"][row])
    if not math.isfinite(error):
        return None
    nulls = {null: float(values[row]) for null, values in means.items()}
    sds = {null: columns.get(f"{name}_{null}_sd") for null in means}
    spreads = {null: float(sd[row]) for null, sd in sds.items() if sd is not None}
    blocks, draws = (int(columns[n][0]) for n in ("blocks", "draws"))
    # the mean of random directions is exact and has no spread, but one draw would differ from it,
    # by the largest spread of the others; that of "noise" is in the error already
    spreads.setdefault("random", max(spreads.values(), default=0.0))
    beyond = all(
        excludes(
            *(value, *around(value, error, blocks), mean),
            samples=blocks,
            among=len(distance),
            spread=spreads.get(null, 0.0),
            draws=draws,
        )
        for null, mean in nulls.items()
    )
    return row, beyond and float(columns["split_half"][row]) >= LOW_RELIABILITY, nulls


def _beside_nulls(
    report: Table,
    cell: Cells,
    name: str,
    row: int,
    nulls: dict[str, float],
    *,
    percent: bool = False,
) -> str:
    """The interval of a measure in one state, its nulls, and the reliability of position, in
    words."""
    interval = cell.interval(
        row, name, percent=percent, samples=int(str(report.column("blocks")[row]))
    )
    chance = [f"{cell(row, f'{name}_{null}', percent=percent)} for {NULLS[null]}" for null in nulls]
    trust = _reliability_in_words(
        cell(row, "split_half"), float(str(report.column("split_half")[row]))
    )
    return f"{interval}; {', '.join(chance)}; {trust}"


def lift(geometry: WeightGeometry) -> Finding | None:
    """Whether a head's W_QK reads the positional directions."""
    if not bool(geometry["p"].isfinite().any()):
        return None
    row = _largest(_where_reliable(geometry["excess"], geometry["reliability"]))
    trust = float(geometry["reliability"][row])
    clear = trust >= LOW_RELIABILITY and float(geometry["p"][row]) <= 0.05
    cell, head = Cells("weights_qk", geometry, rounded=True), head_name(geometry.heads[row])
    shown = cell(row, "excess")
    held = (
        f"the {cell(row, 'k')} leading positional directions hold "
        f"{cell(row, 'concentration', percent=True)} of W_QK of {head}, {shown} times what as many "
        "directions hold with positions destroyed"
    )
    return Finding(
        value=f"{shown}×",
        said=f"W_QK reads position: {held}."
        if clear
        else f"No evidence that W_QK reads position: {held}.",
        beside=f"{cell(row, 'noise_null', percent=True)} on average and "
        f"{cell(row, 'noise_high', percent=True)} at most in differences of random halves of the "
        f"corpus, where position cancels; p = {cell(row, 'p')} among {len(geometry.heads)} heads; "
        f"{_reliability_in_words(cell(row, 'reliability'), trust)}",
        figure="figure-lift",
        clear=clear,
    )


def _where_reliable(values: Tensor, reliability: Tensor) -> Tensor:
    """The values with NaN where position is not reliable; all values if it is reliable nowhere."""
    reliable = reliability >= LOW_RELIABILITY
    return torch.where(reliable, values, torch.nan) if bool(reliable.any()) else values


def _reliability_in_words(shown: str, reliability: float) -> str:
    """The reliability of positional vectors, in words."""
    low = "" if reliability >= LOW_RELIABILITY else ", too low for a statement about position"
    return f"reliability of position {shown} between halves of the corpus{low}"


def skipped(skips: SkipMap) -> Finding | None:
    """Whether a block can be replaced by a map."""
    # as for all intervals, at least 10 samples
    if "mean" not in skips.map_types or skips.test < 10:
        return None
    # single blocks alone: a is the first skipped block, and state b comes right after it
    costs = [
        (float(skips.table(map_type, "kl")[a, b]), map_type, a, b)
        for map_type in skips.map_types
        for a, b in skips.pairs()
        if map_type != "mean" and b == a + 1
    ]
    costs = [cost for cost in costs if math.isfinite(cost[0])]
    if not costs:
        return None
    value, map_type, a, b = min(costs)
    null = float(skips.table("mean", "kl")[a, b])
    # the state that is forgotten is measured on the same chunks, and with an error too; as if the
    # two errors were independent, since chunks that move both alike would only make it smaller
    errors = [float(skips.table(name, "kl_se")[a, b]) for name in (map_type, "mean")]
    bounds = around(value, math.hypot(*errors), skips.test)
    beyond = excludes(value, *bounds, null, samples=skips.test, among=len(costs))
    clear = value < null and beyond
    keys = [tuple(cells[:3]) for cells in skips.rows()]
    row, mean_row = (keys.index((m, a, b)) for m in (map_type, "mean"))
    cell = Cells("skipped_layers", skips, rounded=True)
    shown = cell(row, "kl")
    change = f"moves the next-token distribution by {shown} nats (KL)"
    map_name = {"flow": "rotation and stretch", "identity": "the identity"}.get(map_type, map_type)
    return Finding(
        value=shown,
        said=f"Block {a} is the easiest to do without: a map in its place ({map_name}) {change}."
        if clear
        else f"No evidence that a block can be replaced by a map: the best, {map_name} for block "
        f"{a}, {change}.",
        beside=f"{cell.interval(row, 'kl', samples=skips.test)} over {skips.test} held-out chunks; "
        f"{cell(mean_row, 'kl')} where the state is forgotten; the smallest of {len(costs)} maps "
        "and blocks",
        figure="figure-skips",
        clear=clear,
    )


def truncated(curve: TruncationCurve) -> Finding | None:
    """Whether at most half of the directions carry the output. A larger number would be no finding:
    nearly all directions suffice, however they are chosen."""
    small_grid_rows = [i for i, k in enumerate(curve.K) if 2 * k <= curve.K[-1]]
    chunks = curve.provenance.contexts
    if not (small_grid_rows and curve.claimed) or chunks is None:
        return None
    needed = curve.needed()
    # the K that is needed; if it is above half, or there is none, the largest K up to half
    row = min(small_grid_rows[-1], len(curve.K) if needed is None else curve.K.index(needed))
    value = float(curve.kl[row])
    bounds = around(value, float(curve.kl_se[row]), chunks)
    allowed = 0.1 * curve.baseline_mean
    clear = excludes(value, *bounds, allowed, samples=chunks, among=len(curve.K))
    # no finding if the K that is needed is above half
    clear &= needed == curve.K[row]
    cell = Cells("truncation", curve, rounded=True)
    K, shown = cell(row, "K"), cell(row, "kl")
    return Finding(
        value=K,
        said=f"{K} directions carry the output: the distribution moves by {shown} nats."
        if clear
        else f"No evidence that few directions carry the output: with {K} of {curve.K[-1]} it "
        f"still moves by {shown} nats.",
        beside=f"{cell.interval(row, 'kl', samples=chunks)}; {cell(row, 'baseline_mean')} between "
        "consecutive chunks, of which a tenth is allowed",
        figure="figure-truncation",
        clear=clear,
    )


def _largest(values: Tensor) -> int:
    """The index of the largest finite value."""
    return int(torch.nan_to_num(values, nan=-torch.inf, posinf=-torch.inf).argmax())
