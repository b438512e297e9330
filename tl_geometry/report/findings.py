"""What a report found: sentences with a number, its interval and its null, made from the tables
alone.

Each function answers one question from one table: it takes the head, state or layer where the
number is largest, and words the answer by whether the interval excludes the null. The interval is
widened by Bonferroni's rule for the choice among so many, with Student's quantiles, because most
rest on few groups of contexts. Where it does not, the sentence says "no evidence that". ``None``
where a table has no answer (no interval, no such score).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_geometry.base.checks import head_name
from tl_geometry.base.intervals import t_quantile
from tl_geometry.decomposition.variance import LOW_RELIABILITY, Anova
from tl_geometry.flow.skipping import SkipMap
from tl_geometry.flow.truncation import TruncationCurve
from tl_geometry.interventions.effects import Effects
from tl_geometry.measures.context_report import ContextualReport
from tl_geometry.measures.position_report import PositionalReport
from tl_geometry.report.tables import number
from tl_geometry.scores.head_types import SEQUENCES
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.weights.heads import WeightGeometry

SHOWN, EACH = 5, 2
"""Findings at the head of a report, and the most of one section while others have some."""
TYPES = {
    "induction": "the token that followed last time",
    "previous": "the token before",
}
"""Types of heads, and where they look on repeated random tokens."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One sentence: ``value`` its number, ``said`` the sentence, ``beside`` the interval and the
    null, ``figure`` the id of the figure that shows it, ``table`` the table that it came from;
    ``clear`` where the null is excluded."""

    value: str
    said: str
    beside: str
    figure: str
    table: str
    clear: bool


def percent(value: float) -> str:
    """A share with three digits.

    >>> percent(0.931), percent(0.00784), percent(1.0), percent(-0.5)
    ('93.1%', '0.784%', '100%', '−50.0%')
    """
    return f"{number(100 * value)}%"


def excludes(
    value: float, low: float, high: float, null: float, *, samples: int, among: int = 1
) -> bool:
    """Whether Student's 95% interval of ``samples`` samples (or groups of a jackknife) excludes a
    null, widened for a choice among so many.

    >>> bounds = 0.5, 0.3, 0.7, 0.2
    >>> excludes(*bounds, samples=8), excludes(*bounds, samples=8, among=100)
    (True, False)
    """
    freedom = torch.tensor(samples - 1.0)
    wider = float(t_quantile(freedom, 1 - 0.05 / among) / t_quantile(freedom))
    reach = value - low if null < value else high - value
    return bool(math.isfinite(low + high + null)) and abs(value - null) > wider * reach


def position_share(table: Anova, *, control: Anova | None = None) -> Finding | None:
    """Whether position is in the residual stream; beside it the share of the untrained control."""
    if "pos" not in table.intervals:
        return None
    shares, lows, highs = table.intervals["pos"].unbind(1)
    at = _largest(_trusted(shares, table.pos_reliability))
    value, state, trust = float(shares[at]), table.states[at], float(table.pos_reliability[at])
    low, high = float(lows[at]), float(highs[at])
    noise = float(table.shares["pos"][at]) - value
    clear = trust >= LOW_RELIABILITY
    clear &= excludes(value, low, high, 0.0, samples=table.blocks, among=len(table.states))
    shown = percent(value)
    return Finding(
        value=shown,
        said=f"Position makes up {shown} of the variance of state {state}, more than of any other."
        if clear
        else "No evidence that the residual stream depends on position by itself: at most "
        f"{shown} of the variance of a state (state {state}).",
        beside=f"{_interval(low, high)}; 0 without an effect, after {percent(noise)} of sampling "
        f"noise was taken off{_untrained(control, state)}; the largest of {len(table.states)} "
        f"states; {_trust(trust)}",
        figure="figure-variance",
        table="anova",
        clear=clear,
    )


def _untrained(control: Anova | None, state: int) -> str:
    """The share of position in a state of the untrained control, where there is one."""
    if control is None:
        return ""
    shares = control.intervals["pos"][:, 0] if control.intervals else control.pos_debiased
    share = float(shares[control.states.index(state)])
    return f"; {percent(share)} in the untrained control"


def context_share(table: Anova) -> Finding | None:
    """Whether a whole window shares more than spliced ones do."""
    if "ctx_null" not in table.intervals:
        return None
    (shares, lows, highs), null = table.intervals["ctx"].T, table.intervals["ctx_null"]
    if not bool((lows + null[:, 1]).isfinite().any()):
        return None
    at = _largest(shares - null[:, 0])
    value, low, high, state = float(shares[at]), float(lows[at]), float(highs[at]), table.states[at]
    spliced, ends = float(null[at, 0]), null[at, 1:].tolist()
    reach = math.hypot(value - low, ends[1] - spliced)  # both are estimates
    clear = value > spliced and excludes(
        *(value, value - reach, value + reach, spliced),
        samples=table.blocks,
        among=len(table.states),
    )
    shown = percent(value)
    return Finding(
        value=shown,
        said=f"{shown} of the variance of state {state} is common to a whole window: context that "
        "lasts."
        if clear
        else "No evidence that context lasts longer than a piece of text: a whole window has "
        f"{shown} of the variance of state {state} in common.",
        beside=f"{_interval(low, high)}; {percent(spliced)} in windows spliced from random places "
        f"({_interval(*ends)}); the largest excess of {len(table.states)} states",
        figure="figure-variance",
        table="anova",
        clear=clear,
    )


def driver(table: SweepTable, *, groups: int, rotary: bool = False) -> Finding | None:
    """Whether position drives a head (in a rotary model: position or content).

    The null of position is its share with position destroyed, that of content the share of the
    next group.
    """
    found = table.group_intervals
    names = [g for g in ("position", "content") if g in table.groups]
    if found is None or not names:
        return None
    tried = names if rotary else names[:1]
    columns = [table.groups.index(name) for name in tried]
    known = torch.where(found.low.isfinite(), table.group_cs, torch.nan)[:, columns]
    if not bool(known.isfinite().any()):
        return None
    # a head whose covariance and gain name different groups is no evidence: the others go first
    firsts = zip(table.by_group.by_cs, table.by_group.by_gs, strict=True)
    same = torch.tensor([[cs == gs == name for name in tried] for cs, gs in firsts])
    agreeing = torch.where(same.to(known.device), known, torch.nan)
    chosen = agreeing if bool(agreeing.isfinite().any()) else known
    at, which = divmod(_largest(chosen.flatten()), len(columns))
    group, column = tried[which], columns[which]
    value, low, high = (float(x[at, column]) for x in (table.group_cs, found.low, found.high))
    null, beside = _destroyed(table, at) if group == "position" else _rival(table, at, column)
    if null is None:
        return None
    among = known.numel()
    clear = excludes(value, low, high, null, samples=groups, among=among)
    clear = clear and bool(same[at, which])
    head, shown = head_name(table.heads[at]), percent(value)
    labels = table.by_group.labels
    word = "relative position" if rotary and group == "position" else group
    counts = " and ".join(f"{labels.count(g)} by {g}" for g in names)
    return Finding(
        value=shown,
        said=f"{word.capitalize()} drives {head}: {shown} of the covariance of its scores."
        if clear
        else f"No evidence that {word} drives a head: it makes up {shown} of the scores of "
        f"{head}, the most of all.",
        beside=f"{_interval(low, high)}; {beside}; of {len(table.heads)} heads {counts} in all",
        figure="figure-shares",
        table="heads",
        clear=clear,
    )


def _destroyed(table: SweepTable, at: int) -> tuple[float | None, str]:
    """The share of position where what the groups of the basis have in common cancels."""
    null = table.details.get("cs_position_null")
    if null is None:
        return None, ""
    return float(null[at]), f"{percent(float(null[at]))} with position destroyed"


def _rival(table: SweepTable, at: int, column: int) -> tuple[float, str]:
    """The largest share of another group."""
    others = table.group_cs[at].clone()
    others[column] = -torch.inf
    second = int(others.argmax())
    return float(others[second]), f"{percent(float(others[second]))} for {table.groups[second]}"


def head_type(table: SweepTable, name: str) -> Finding | None:
    """Whether there is a head of this type."""
    if name not in table.types or name not in table.type_errors:
        return None
    at = _largest(table.types[name])
    value, null = float(table.types[name][at]), table.baselines[name]
    low, high = _around(value, float(table.type_errors[name][at]), SEQUENCES)
    among = len(table.heads)
    clear = value > null and excludes(value, low, high, null, samples=SEQUENCES, among=among)
    words = "an induction" if name == "induction" else "a previous-token"
    head, shown = head_name(table.heads[at]), percent(value)
    looks = f"puts {shown} of its attention on {TYPES[name]}"
    return Finding(
        value=shown,
        said=f"The strongest {words.split()[1]} head, {head}, {looks}."
        if clear
        else f"No evidence of {words} head: the best, {head}, {looks}.",
        beside=f"{_interval(low, high)} on repeated random tokens; {percent(null)} with uniform "
        f"attention; the largest of {len(table.heads)} heads",
        figure="figure-types",
        table="heads",
        clear=clear,
    )


def dominance(effect: Effects) -> Finding | None:
    """Whether dominant terms carry the model better than random ones."""
    kept, other = effect.change("dominant term"), effect.change("random term")
    gap = effect.change("random term", against="dominant term")
    if not bool(kept.low.isfinite()):
        return None
    shown, null = number(float(kept.value)), number(float(other.value))
    clear = bool(gap.low > 0)
    return Finding(
        value=shown,
        said=f"Keeping only each head's dominant term costs {shown} nats per token."
        if clear
        else "No evidence that dominant terms carry the model better than random ones: keeping "
        f"only each head's dominant term costs {shown} nats per token.",
        beside=f"{_interval(float(kept.low), float(kept.high), number)}; a random term costs "
        f"{null}; edits in the live model, {effect.losses.shape[1]} windows",
        figure="figure-dominance",
        table="dominant_only",
        clear=clear,
    )


def smooth(report: PositionalReport) -> Finding | None:
    """Whether positions lie on a smooth curve."""
    name = "low_frequency"
    nulls = {null: values for (m, null), values in report.nulls.items() if m == name}
    if name not in report.errors or not nulls:
        return None
    highest = torch.stack(list(nulls.values())).amax(0)
    at = _largest(_trusted(report[name] - highest, report["split_half"]))
    value, null = float(report[name][at]), float(highest[at])
    low, high = _around(value, float(report.errors[name][at]), report.blocks)
    if not math.isfinite(low):
        return None
    among, trust = len(report.states), float(report["split_half"][at])
    clear = value > null and trust >= LOW_RELIABILITY
    clear &= excludes(value, low, high, null, samples=report.blocks, among=among)
    state, shown = report.states[at], percent(value)
    held = f"the lowest frequencies hold {shown} of the energy of its cosines"
    said = [f"{percent(float(v[at]))} for {_NULLS.get(n, n)}" for n, v in nulls.items()]
    return Finding(
        value=shown,
        said=f"The positions of state {state} lie on a smooth curve: {held}."
        if clear
        else f"No evidence that positions lie on a smooth curve: in state {state} {held}.",
        beside=f"{_interval(low, high)}; {', '.join(said)}; {_trust(trust)}",
        figure="figure-position",
        table="positional",
        clear=clear,
    )


_NULLS = {
    "shuffled": "positions in random order",
    "noise": "sampling noise alone",
    "isotropic": "isotropic noise",
    "random": "random directions",
    "flipped": "coordinates with flipped signs",
}


def incoherence(report: ContextualReport) -> Finding | None:
    """Whether position and context are more, or less, aligned than chance."""
    name = "incoherence_avg"
    nulls = {null: values for (m, null), values in report.nulls.items() if m == name}
    if name not in report.errors or not nulls:
        return None
    both = torch.stack(list(nulls.values()))
    at = _largest(_trusted((report[name] - both).abs().amin(0), report["split_half"]))
    value = float(report[name][at])
    low, high = _around(value, float(report.errors[name][at]), report.blocks)
    if not math.isfinite(low):
        return None
    known = both[:, at].tolist()
    among, trust = len(report.states), float(report["split_half"][at])
    above, below = (all(s * (value - n) > 0 for n in known) for s in (1, -1))
    clear = (above or below) and trust >= LOW_RELIABILITY
    clear &= all(excludes(value, low, high, n, samples=report.blocks, among=among) for n in known)
    state, shown = report.states[at], number(value)
    said = [f"{number(float(v[at]))} for {_NULLS.get(n, n)}" for n, v in nulls.items()]
    mean = f"their mean |cos| in state {state} is {shown}"
    return Finding(
        value=shown,
        said=f"Positional and context vectors are {'more' if above else 'less'} aligned than "
        f"chance: {mean}."
        if clear
        else f"No evidence that positional and context vectors are aligned otherwise than by "
        f"chance: {mean}.",
        beside=f"{_interval(low, high, number)}; {', '.join(said)}; {_trust(trust)}",
        figure="figure-incoherence",
        table="contextual",
        clear=clear,
    )


def lift(geometry: WeightGeometry) -> Finding | None:
    """Whether a head's W_QK reads the positional directions."""
    if not bool(geometry.p.isfinite().any()):
        return None
    reliable = geometry.reliability >= LOW_RELIABILITY
    at = _largest(_trusted(geometry.excess, geometry.reliability))
    value, p = float(geometry.excess[at]), float(geometry.p[at])
    clear = bool(reliable[at]) and p <= 0.05
    layer, _ = pair = geometry.heads[at]
    k = geometry.k[geometry.layers.index(layer)]
    shown, trust = number(value), float(geometry.reliability[at])
    null, most = (percent(float(x[at])) for x in (geometry.noise_null, geometry.noise_high))
    held = (
        f"the {k} leading positional directions hold {percent(float(geometry.concentration[at]))}"
    )
    held += f" of W_QK of {head_name(pair)}, {shown} times what they hold with positions destroyed"
    return Finding(
        value=f"{shown}×",
        said=f"W_QK reads position: {held}."
        if clear
        else f"No evidence that W_QK reads position: {held}.",
        beside=f"{null} on average and {most} at most in differences of random halves of the "
        f"corpus, where position cancels; p = {number(p)} among {len(geometry.heads)} heads; "
        f"{_trust(trust)}",
        figure="figure-lift",
        table="weights_qk",
        clear=clear,
    )


def _trusted(values: Tensor, reliability: Tensor) -> Tensor:
    """Values where position is reliable, the others NaN; all of them where it is nowhere."""
    known = reliability >= LOW_RELIABILITY
    return torch.where(known, values, torch.nan) if bool(known.any()) else values


def _trust(reliability: float) -> str:
    """The reliability of positional vectors, in words."""
    low = "" if reliability >= LOW_RELIABILITY else ", too low for a statement about position"
    return f"reliability of position {number(reliability)} between halves of the corpus{low}"


def skipped(skips: SkipMap) -> Finding | None:
    """Whether a block can be replaced by a map."""
    if "mean" not in skips.map_types or skips.test < 10:
        return None
    place = skips.places[0]
    found = [
        (float(skips.table(name, "kl", place=place)[a, b]), name, a, b)
        for name in skips.map_types
        for a, b in skips.pairs()
        if name != "mean" and b == a + 1
    ]
    found = [f for f in found if math.isfinite(f[0])]
    if not found:
        return None
    value, name, a, b = min(found)
    error = float(skips.table(name, "kl_se", place=place)[a, b])
    null = float(skips.table("mean", "kl", place=place)[a, b])
    low, high = _around(value, error, skips.test)
    among = len(found)
    clear = value < null and excludes(value, low, high, null, samples=skips.test, among=among)
    shown = number(value)
    change = f"moves the next-token distribution by {shown} nats (KL)"
    map_name = {"flow": "rotation and stretch", "identity": "nothing at all"}.get(name, name)
    return Finding(
        value=shown,
        said=f"Block {a} is the easiest to do without: a map in its place ({map_name}) {change}."
        if clear
        else f"No evidence that a block can be replaced by a map: the best, {map_name} for block "
        f"{a}, {change}.",
        beside=f"{_interval(low, high, number)} over {skips.test} held-out chunks; {number(null)} "
        f"where the state is forgotten; the smallest of {len(found)} maps and blocks",
        figure="figure-skips",
        table="skipped_layers",
        clear=clear,
    )


def truncated(curve: TruncationCurve) -> Finding | None:
    """How many directions the output needs."""
    if not curve.claimed or curve.provenance.contexts is None:
        return None
    needed = curve.needed()
    at = len(curve.K) - 1 if needed is None else curve.K.index(needed)
    value, null = float(curve.kl[at]), curve.baseline_mean
    n = curve.provenance.contexts
    low, high = _around(value, float(curve.kl_se[at]), n)
    past = excludes(value, low, high, 0.1 * null, samples=n, among=len(curve.K))
    clear = needed is not None and past
    shown = number(value)
    return Finding(
        value=str(curve.K[at]),
        said=f"{curve.K[at]} directions carry the output: the distribution moves by {shown} nats."
        if clear
        else f"No evidence that few directions carry the output: with {curve.K[at]} it still moves "
        f"by {shown} nats.",
        beside=f"{_interval(low, high, number)}; {number(null)} between consecutive chunks, of "
        "which a tenth is allowed",
        figure="figure-truncation",
        table="truncation",
        clear=clear,
    )


def chosen(found: Iterable[tuple[str, Finding]]) -> tuple[list[Finding], list[Finding]]:
    """The findings of a page's head and the others, from ``(section, finding)`` in reading order:
    those that exclude their null first, at most :data:`EACH` of a section while others have
    some."""
    ranked = sorted(found, key=lambda item: not item[1].clear)
    head: list[tuple[str, Finding]] = []
    for most in (EACH, SHOWN):
        for section, finding in ranked:
            held = sum(s == section for s, _ in head)
            if len(head) < SHOWN and held < most and (section, finding) not in head:
                head.append((section, finding))
    rest = [finding for section, finding in ranked if (section, finding) not in head]
    return [finding for _, finding in head], rest


def _largest(values: Tensor) -> int:
    return int(torch.nan_to_num(values, nan=-torch.inf, posinf=-torch.inf).argmax())


def _around(value: float, error: float, samples: int) -> tuple[float, float]:
    """The 95% interval of a mean of so many samples."""
    reach = float(t_quantile(torch.tensor(samples - 1.0))) * error
    return value - reach, value + reach


def _interval(low: float, high: float, shown: Callable[[float], str] = percent) -> str:
    return f"95% interval {shown(low)} to {shown(high)}"


__all__ = [
    "Finding",
    "chosen",
    "context_share",
    "dominance",
    "driver",
    "excludes",
    "head_type",
    "incoherence",
    "lift",
    "percent",
    "position_share",
    "skipped",
    "smooth",
    "truncated",
]
