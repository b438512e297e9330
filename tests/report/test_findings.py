"""Every number of a finding is that of the table that it came from, and a finding whose interval
includes its null says so; with faults planted in the module."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from scipy import stats

import tl_geometry as tlg
from tests.modules import copy_of
from tests.report.test_by_hand import effects
from tests.tiny import tiny, tokens
from tl_geometry import (
    contextual_report,
    decompose,
    decompose_activations,
    positional_report,
    sweep_heads,
    weight_geometry,
)
from tl_geometry.base.results import Provenance, Result
from tl_geometry.flow.skipping import SkipMap
from tl_geometry.flow.truncation import TruncationCurve
from tl_geometry.report import findings, page
from tl_geometry.report.origin import plain
from tl_geometry.scores import head_types
from tl_geometry.scores.sweep_table import SweepTable

Row = dict[str, Any]
SKIPS = {
    "flow": (2.0, 0.1),
    "ridge": (1.5, 0.2),
    "mean": (6.0, 0.3),
}
"""KL and its error of the one block of :func:`skips`."""
ORDER = 21
"""Seed of an order that is smoother than most."""


def rows(table: Result) -> list[Row]:
    """The table as a reader of its CSV has it."""
    return [dict(zip(table.columns(), row, strict=True)) for row in table.rows()]


def written(text: str) -> list[float]:
    """Every number of a text but those in names of heads."""
    text = re.sub(r"L\d+H\d+|W_[A-Z]+", "", plain(text)).replace("−", "-").replace(",", "")
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?", text)]


def same(text: str, *wanted: float) -> None:
    """The numbers of a text, in order, to the three digits that are written."""
    assert written(text) == pytest.approx(list(wanted), rel=0.0051, abs=1e-9), text


@functools.cache
def basis(effect: float = 1.0) -> Any:
    """States with an effect of position and context, or (0) none: noise alone."""
    g = torch.Generator().manual_seed(3)
    h = torch.randn(4, 64, 32, 12, generator=g).double()
    t = torch.linspace(0, 3, 32)
    curve = torch.stack([torch.cos(t * (k + 1)) for k in range(12)], -1)[None, None]
    size = torch.tensor([1.0, 3.0, 2.0, 0.5])[:, None, None, None]
    h = h + effect * (size * curve + size.flip(0) * torch.randn(4, 64, 1, 12, generator=g))
    return decompose_activations(h)


@functools.cache
def in_one_order() -> Any:
    """The effect of position with positions in one random order, the same in all windows: smoother
    than the mean of random orders."""
    order = torch.randperm(32, generator=torch.Generator().manual_seed(ORDER))
    samples = basis().samples
    assert samples is not None
    return decompose_activations(samples.transpose(0, 1)[:, :, order].double())


@functools.cache
def null_basis() -> Any:
    """The basis that stands for spliced windows."""
    g = torch.Generator().manual_seed(5)
    return decompose_activations(torch.randn(4, 64, 32, 12, generator=g).double())


@functools.cache
def sweep() -> SweepTable:
    model, ids = tiny("bridge", "gpt2"), tokens(batch=32, length=16, seed=2)
    fitted, detail = decompose(model, ids, progress=False), ("intervals", "nulls")
    return sweep_heads(model, ids, fitted, detail=detail, progress=False)


@functools.cache
def geometry() -> Any:
    model, ids = tiny("bridge", "gpt2"), tokens(batch=32, length=16, seed=2)
    return weight_geometry(model, decompose(model, ids, progress=False), rank=3)


def skips(forgotten: float = 6.0, forgotten_error: float | None = None) -> SkipMap:
    """Two blocks: the first costs what SKIPS says, the second twice as much; ``forgotten`` is the
    cost of a forgotten state, with its standard error."""
    values = {}
    for name, (kl, error) in SKIPS.items():
        if name == "mean":
            kl, error = forgotten, error if forgotten_error is None else forgotten_error
        shown = {"kl": kl, "kl_se": error, "loss_increase": 0.7 * kl, "top1": 0.5, "top5": 0.5}
        for metric, value in shown.items():
            table = torch.full((3, 3), torch.nan, dtype=torch.float64)
            table[0, 1], table[1, 2] = value, 2 * value
            values[name, metric] = table
    return SkipMap(
        values=values,
        loss=3.0,
        map_types=("flow", "ridge", "mean"),
        train=40,
        test=20,
        provenance=Provenance(),
    )


def curve(last: float = 0.2, middle: float = 0.5) -> TruncationCurve:
    """KL at 2, 4, 8 directions; a tenth of the baseline is 0.7."""
    kl = torch.tensor([4.0, middle, last], dtype=torch.float64)
    return TruncationCurve(
        K=(2, 4, 8),
        kl=kl,
        kl_se=kl / 50,
        kl_reverse=kl,
        top1=kl / 8,
        top5=kl,
        baseline_mean=7.0,
        baseline_median=6.5,
        where="every",
        positions="pilot",
        held_out=True,
        fitted=48,
        claimed=True,
        provenance=Provenance(contexts=30),
    )


def reach(error: float, samples: int) -> float:
    return float(stats.t.ppf(0.975, samples - 1)) * error


def check_states(module: Any) -> None:
    """Findings from the analysis of variance and from the measures of states."""
    table = basis().anova(null=null_basis())
    found = module.position_share(table)
    row = max(rows(table), key=lambda r: r["pos_corrected"])
    share = 100 * row["pos_corrected"]
    assert found.clear
    same(found.value, share)
    same(found.said, share, row["state"])
    ends = [100 * row[f"pos_corrected_{end}"] for end in ("low", "high")]
    same(found.beside, 95, *ends, 0, 100 * row["pos"], 4, row["pos_reliability"])
    found = module.context_share(table)
    row = max(rows(table), key=lambda r: r["ctx_corrected"] - r["ctx_null_corrected"])
    assert found.clear
    same(found.said, 100 * row["ctx_corrected"], row["state"])
    ends = [100 * row[f"ctx_corrected_{end}"] for end in ("low", "high")]
    chance = [100 * row[f"ctx_null_corrected{end}"] for end in ("", "_low", "_high")]
    same(found.beside, 95, *ends, chance[0], 95, *chance[1:], 4)

    report = positional_report(basis())
    found = module.smooth(report)
    nulls = [n for m, n in report.nulls if m == "low_frequency"]
    of = lambda r: [r[f"low_frequency_{n}"] for n in nulls]
    row = max(rows(report), key=lambda r: r["low_frequency"] - max(of(r)))
    value, wide = row["low_frequency"], reach(row["low_frequency_se"], 8)
    same(found.value, 100 * value)
    assert f"state {row['state']}" in found.said
    ends = [100 * (value - wide), 100 * (value + wide)]
    same(found.beside, 95, *ends, *(100 * n for n in of(row)), row["split_half"])

    report = contextual_report(basis(), rank=3)
    found = module.incoherence(report)
    kinds = [n for m, n in report.nulls if m == "incoherence_avg"]
    near = lambda r: [r[f"incoherence_avg_{n}"] for n in kinds]
    row = max(rows(report), key=lambda r: min(abs(r["incoherence_avg"] - n) for n in near(r)))
    value, wide = row["incoherence_avg"], reach(row["incoherence_avg_se"], 8)
    same(found.said, row["state"], value)
    same(found.beside, 95, value - wide, value + wide, *near(row), row["split_half"])


def check_heads(module: Any) -> None:
    """Findings from a sweep, from edits and from weights."""
    table = sweep()
    found = module.driver(table, groups=8)
    bounds = table.group_intervals
    assert bounds is not None
    at = max(range(len(table.heads)), key=lambda i: rows(table)[i]["cs_position_corrected"])
    row = rows(table)[at]
    ends = [100 * float(b[at, table.groups.index("position")]) for b in (bounds.low, bounds.high)]
    assert ends == [100 * row[f"cs_position_corrected_{end}"] for end in ("low", "high")]
    counts = [[r["dominant_group"] for r in rows(table)].count(g) for g in ("position", "content")]
    assert f"L{row['layer']}H{row['head']}" in found.said
    same(found.said, 100 * row["cs_position_corrected"])
    destroyed = 100 * row["cs_position_null"]
    same(found.beside, 95, *ends, destroyed, len(table.heads), *counts)

    found = module.driver(table, groups=8, rotary=True)
    at = lambda r, g: r[f"cs_{g}_corrected"]
    shares = [(at(r, g), g, r) for r in rows(table) for g in ("position", "content")]
    value, group, row = max(shares, key=lambda item: item[0])
    same(found.value, 100 * value)
    others = [at(row, g) for g in table.groups if g != group]
    null = row["cs_position_null"] if group == "position" else max(others)
    assert written(found.beside)[3] == pytest.approx(100 * null, rel=0.0051)
    shares = torch.zeros_like(table.cs)
    for term, share in (("cvec-cvec", 0.6), ("pos-pos", 0.3), ("pos-cvec", 0.1)):
        shares[:, table.terms.index(term)] = share
    assert table.resampled is not None
    kept = shares.unsqueeze(1).expand_as(table.resampled.cs)
    resampled = dataclasses.replace(table.resampled, cs=kept, gs=kept)
    numerators, gains = (shares * x[:, None] for x in (table.sums.total, table.sums.gain_total))
    sums = dataclasses.replace(table.sums, numerators=numerators, gains=gains)
    changed = dataclasses.replace(table, sums=sums, resampled=resampled)
    found = module.driver(changed, groups=8, rotary=True)
    assert "30.0% for position" in plain(found.beside)

    for name in ("induction", "previous"):
        found = module.head_type(table, name)
        row = max(rows(table), key=lambda r: r[name])
        value, wide = row[name], reach(row[f"{name}_se"], 12)
        assert f"L{row['layer']}H{row['head']}" in found.said
        same(found.said, 100 * value)
        uniform = 100 * row[f"{name}_uniform"]
        ends = [100 * (value - wide), 100 * (value + wide)]
        same(found.beside, 95, *ends, uniform, len(table.heads))

    effect = effects(better=0.4)
    found, held = module.dominance(effect), {r["condition"]: r for r in rows(effect)}
    row = held["dominant term"]
    assert found.clear
    same(found.said, row["loss_change"])
    ends = [row["loss_low"], row["loss_high"]]
    saved = [row["saved"], 95, row["saved_low"], row["saved_high"]]
    same(found.beside, 95, *ends, held["random term"]["loss_change"], *saved, 5, 12)

    found = module.lift(geometry())
    reliable = [r for r in rows(geometry()) if r["reliability"] >= 0.5]
    row = max(reliable or rows(geometry()), key=lambda r: r["excess"])
    same(found.value, row["excess"])
    assert f"L{row['layer']}H{row['head']}" in found.said
    same(found.said, row["k"], 100 * row["concentration"], row["excess"])
    chance = [100 * row["noise_null"], 100 * row["noise_high"]]
    same(found.beside, *chance, row["p"], len(geometry().heads), row["reliability"])


def check_flow(module: Any) -> None:
    """Findings from skipped blocks and truncated states."""
    found = module.skipped(skips())
    row = min(
        (r for r in rows(skips()) if r["map_type"] != "mean" and r["skipped"] == 1),
        key=lambda r: r["kl"],
    )
    mean = next(r for r in rows(skips()) if (r["map_type"], r["from_layer"]) == ("mean", 0))
    assert found.clear
    assert row["map_type"] in found.said
    same(found.said, row["from_layer"], row["kl"])
    wide = reach(row["kl_se"], 20)
    same(found.beside, 95, row["kl"] - wide, row["kl"] + wide, 20, mean["kl"], 4)
    unknown = dataclasses.replace(skips(), map_types=("linear", "identity"))
    assert module.skipped(unknown) is None, "what a map must beat was not measured"
    found = module.truncated(curve())
    row = rows(curve())[1]
    assert found.clear
    same(found.said, row["K"], row["kl"])
    wide = reach(row["kl_se"], 30)
    same(found.beside, 95, row["kl"] - wide, row["kl"] + wide, row["baseline_mean"])


def check_words(module: Any) -> None:
    """What is on its null is worded as no evidence, whatever its size; what is beyond it is not."""
    nothing = basis(0.0).anova(null=null_basis())
    on_null = [
        module.position_share(nothing),
        module.context_share(nothing),
        module.smooth(positional_report(basis(0.0))),
        module.dominance(effects(better=0.0)),
        module.skipped(skips(forgotten=1.6)),
        module.skipped(skips(forgotten_error=3.0)),  # the null is not known well enough
        module.truncated(curve(last=3.0)),
        module.truncated(curve(last=0.0, middle=3.0)),  # all directions carry everything
        module.smooth(positional_report(in_one_order())),
    ]
    for found in on_null:
        assert not found.clear, found
        assert found.said.startswith("No evidence"), found
    table = basis().anova(null=null_basis())
    beyond = [
        module.position_share(table),
        module.context_share(table),
        module.smooth(positional_report(basis())),
        module.dominance(effects(better=0.4)),
        module.skipped(skips()),
        module.truncated(curve()),
    ]
    for found in beyond:
        assert found.clear, found
        assert not found.said.startswith("No evidence"), found


def test_the_share_of_the_untrained_control_stands_beside_that_of_position() -> None:
    table, control = basis().anova(null=null_basis()), basis(0.0).anova()
    alone = findings.position_share(table)
    both = findings.position_share(table, control=control)
    assert alone is not None
    assert both is not None
    assert "untrained" not in alone.beside
    at = table.states.index(int(re.findall(r"state (\d+)", both.said)[0]))
    assert "anova_untrained.csv" in both.beside
    share = 100 * rows(control)[at]["pos_corrected"]
    said = re.findall(r"([^;]*) in the untrained control", plain(both.beside))
    same(said[0], share)


def test_the_numbers_of_findings_are_those_of_their_tables() -> None:
    check_states(copy_of(findings))
    check_heads(copy_of(findings))
    check_flow(copy_of(findings))


def test_what_is_on_its_null_is_no_evidence() -> None:
    check_words(copy_of(findings))


def test_the_largest_of_many_on_their_null_is_rarely_evidence() -> None:
    """Size of the rule at nominal 5%, eight groups each: the best of 30 heads without an effect;
    the twin widens by normal quantiles, as if the groups were many."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 30, 8, generator=g).double()
    mean, error = x.mean(-1), x.std(-1) / 8**0.5
    at = (mean / error).abs().argmax(1, keepdim=True)
    values, errors = (y.gather(1, at).squeeze(1).tolist() for y in (mean, error))
    ends = [(v, v - reach(e, 8), v + reach(e, 8)) for v, e in zip(values, errors, strict=True)]

    def size(samples: int) -> float:
        said = [findings.excludes(*v, 0.0, samples=samples, among=30) for v in ends]
        return sum(said) / len(said)

    assert 0.02 < size(8) < 0.07
    assert size(10**6) > 0.15


def test_only_the_end_that_faces_the_null_counts() -> None:
    """An interval that is short on one side, with the null on either side of it."""
    for value, short, long, null in ((0.5, 0.45, 0.9, 0.3), (0.5, 0.55, 0.1, 0.7)):
        facing, away = sorted((short, long)), sorted((2 * value - short, 2 * value - long))
        assert findings.excludes(value, facing[0], facing[1], null, samples=8)
        assert not findings.excludes(value, away[0], away[1], null, samples=8)


def test_the_draws_of_a_null_widen_by_one_more_draw_and_by_their_own_mean() -> None:
    """The distance to the null's mean of n draws has variance s^2 (1 + 1 / n)."""
    one_more = float(stats.t.ppf(0.975, 1)) * 1.5**0.5  # two draws
    least = (0.3**2 - 0.1**2) ** 0.5 / one_more  # the spread at which 0.5 +- 0.1 reaches 0.2
    said = [
        findings.excludes(0.5, 0.4, 0.6, 0.2, samples=8, spread=factor * least, draws=2)
        for factor in (0.95, 1.05)
    ]
    assert said == [True, False]


def test_findings_are_widened_for_all_that_they_were_chosen_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def watched(*bounds: float, among: int = 1, **other: Any) -> bool:
        seen.append(among)
        return plain_rule(*bounds, among=among, **other)

    plain_rule = findings.excludes
    monkeypatch.setattr(findings, "excludes", watched)
    heads, states = len(sweep().heads), len(basis().states)
    table, maps = basis().anova(null=null_basis()), skips()
    for found, among in (
        (lambda: findings.position_share(table), states),
        (lambda: findings.context_share(table), states),
        (lambda: findings.smooth(positional_report(basis())), states),
        (lambda: findings.incoherence(contextual_report(basis(), rank=3)), states),
        (lambda: findings.driver(sweep(), groups=8), heads),
        (lambda: findings.driver(sweep(), groups=8, rotary=True), 2 * heads),
        (lambda: findings.head_type(sweep(), "previous"), heads),
        (lambda: findings.skipped(maps), 4),
        (lambda: findings.truncated(curve()), 3),
    ):
        seen.clear()
        found()
        assert set(seen) == {among}


def test_a_value_is_beyond_its_nulls_where_it_is_beyond_each() -> None:
    report = positional_report(basis())
    name = "low_frequency"
    below, *others = (n for m, n in report.nulls if m == name)
    none = dict.fromkeys(report.spreads, torch.zeros(len(report.states)).double())
    for far, clear in ((0.4, False), (-1e-6, False), (-0.4, True)):
        nulls = {(name, null): report[name] + far for null in others}
        nulls |= {(name, below): report[name] - 0.3}
        found = findings.smooth(dataclasses.replace(report, nulls=nulls, spreads=none))
        assert found is not None
        assert found.clear is clear


WIDE = 48
"""Coordinates: in a narrow stream two directions are often alike by chance."""


def states() -> torch.Tensor:
    """Position on a smooth curve, and contexts that differ along its strongest direction."""
    g = torch.Generator().manual_seed(3)
    t = torch.linspace(0, 3, 16)
    curve = torch.stack([torch.cos(t * (k + 1)) / (k + 1) for k in range(WIDE)], -1).double()
    spread = torch.linalg.qr(torch.randn(WIDE, WIDE, generator=g).double()).Q  # all coordinates
    curve = (curve - curve.mean(0)) @ spread
    along = torch.linalg.svd(curve).Vh[0]
    noise = torch.randn(2, 64, 16, WIDE, generator=g).double()
    contexts = torch.randn(2, 64, 1, 1, generator=g).double()
    return noise + 2 * curve + 2 * contexts * along


def without_position(h: torch.Tensor) -> torch.Tensor:
    """Each window rolled by an offset of its own."""
    g = torch.Generator().manual_seed(1)
    offsets = torch.randint(16, (h.shape[1],), generator=g).tolist()
    return torch.stack([x.roll(o, 1) for x, o in zip(h.unbind(1), offsets, strict=True)], 1)


def without_context(h: torch.Tensor, seed: int = 1) -> torch.Tensor:
    """Each position from other windows: nothing is common to a whole window."""
    g = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(h.shape[1], generator=g) for _ in range(16)]
    return torch.stack([x[:, o] for x, o in zip(h.unbind(2), orders, strict=True)], 2)


def without_alignment(h: torch.Tensor) -> torch.Tensor:
    """What contexts differ by, turned at random; position stays where it is."""
    g = torch.Generator().manual_seed(2)
    turn = torch.linalg.qr(torch.randn(WIDE, WIDE, generator=g).double())
    middle = h.mean(1, keepdim=True)
    return middle + (h - middle) @ turn.Q


DESTROYED: dict[str, tuple[Any, Any]] = {
    "position_share": (lambda b: b.anova(), without_position),
    "context_share": (
        lambda b: b.anova(null=decompose_activations(without_context(states(), 9))),
        without_context,
    ),
    "smooth": (positional_report, without_position),
    "incoherence": (lambda b: contextual_report(b, rank=3), without_alignment),
}


@pytest.mark.parametrize("name", DESTROYED)
def test_a_finding_goes_with_what_it_claims(name: str) -> None:
    """Real and destroyed data through the same code: the claim is made, and it is gone."""
    measure, destroy = DESTROYED[name]
    real, gone = (
        getattr(findings, name)(measure(decompose_activations(h)))
        for h in (states(), destroy(states()))
    )
    assert real.clear, real
    assert not gone.clear, gone
    assert gone.said.startswith("No evidence")


@pytest.mark.parametrize("name", ["induction", "previous"])
def test_a_head_type_goes_with_the_order_of_its_keys(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = tlg.view(tlg.zoo.embedded())
    scored, g = head_types.Detection.scores, torch.Generator().manual_seed(3)

    def shuffled(detection: head_types.Detection, pattern: torch.Tensor) -> head_types.HeadTypes:
        rows = [torch.randperm(i + 1, generator=g) for i in range(pattern.shape[-1])]
        keys = torch.stack([torch.cat([r, torch.arange(len(r), len(rows))]) for r in rows])
        return scored(detection, pattern.gather(-1, keys.expand_as(pattern)))

    def finding() -> findings.Finding | None:
        found = head_types.measure_types(view, range(view.n_layers))
        heads = tuple((l, h) for l in range(view.n_layers) for h in range(view.n_heads))
        columns = [name, f"{name}_se", f"{name}_uniform"]
        ends = zip(found.scores[name].tolist(), found.errors[name].tolist(), strict=True)
        cells = [[value, error, found.baselines[name]] for value, error in ends]
        table = Mock(spec=SweepTable, heads=heads, baselines=found.baselines)
        table.types, table.type_errors = found.scores, found.errors
        table.columns.return_value, table.rows.return_value = columns, cells
        return findings.head_type(table, name)

    real = finding()
    monkeypatch.setattr(head_types.Detection, "scores", shuffled)
    gone = finding()
    assert real is not None
    assert gone is not None
    assert real.clear
    assert not gone.clear


def clear(found: findings.Finding | None) -> bool:
    assert found is not None
    return found.clear


def test_no_finding_about_position_where_it_is_unreliable() -> None:
    """The same numbers with a reliability of 0.4."""
    table = basis().anova(null=null_basis())
    low = torch.full_like(table.pos_reliability, 0.4)
    assert not clear(findings.position_share(dataclasses.replace(table, pos_reliability=low)))
    one = table.pos_reliability.clone()
    one[0] = 0.4  # of a state that is not compared then
    for reliability, others in ((table.pos_reliability, "any other."), (one, "any other that has")):
        found = findings.position_share(dataclasses.replace(table, pos_reliability=reliability))
        assert clear(found)
        assert found is not None
        assert f"more than of {others}" in found.said
    report = positional_report(basis())
    report = dataclasses.replace(report, values={**report.values, "split_half": low})
    assert not clear(findings.smooth(report))
    aligned = contextual_report(decompose_activations(states()), rank=3)
    assert clear(findings.incoherence(aligned))
    values = {**aligned.values, "split_half": low[:2]}
    assert not clear(findings.incoherence(dataclasses.replace(aligned, values=values)))


def test_five_are_chosen_by_their_evidence_and_none_is_lost() -> None:
    def finding(i: int, clear: bool) -> findings.Finding:
        said = f"finding {i}"
        return findings.Finding(value=str(i), said=said, beside="", figure="f", clear=clear)

    found = [("a", finding(i, clear=i != 0)) for i in range(4)]
    found += [("b", finding(4, clear=False)), ("c", finding(5, clear=True))]
    head, rest = page.chosen(found)
    assert [f.value for f in head] == ["1", "2", "5", "4", "3"]
    assert [f.value for f in rest] == ["0"]
    assert page.chosen(found[:2]) == ([found[1][1], found[0][1]], [])
    assert page.chosen([]) == ([], [])


def test_what_a_table_does_not_know_is_no_finding() -> None:
    few = decompose_activations(torch.randn(3, 6, 8, 4, generator=torch.Generator().manual_seed(0)))
    assert findings.position_share(few.anova()) is None  # no interval below 10 contexts
    assert findings.context_share(few.anova()) is None
    assert findings.smooth(positional_report(few, jackknife=False)) is None
