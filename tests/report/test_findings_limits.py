"""Findings at the limits of their rules, with the digits that their sentences show."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.report.test_by_hand import effects
from tests.report.test_findings import basis, curve, geometry, null_basis, skips, states, sweep
from tl_geometry import contextual_report, decompose_activations, positional_report
from tl_geometry.report import findings
from tl_geometry.report.findings import Finding
from tl_geometry.report.origin import MARKED, plain
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.weights.heads import WeightGeometry


def held(finding: Finding | None) -> Finding:
    assert finding is not None
    return finding


def tight(values: torch.Tensor) -> torch.Tensor:
    """Intervals of almost no width."""
    return torch.stack([values[:, 0], values[:, 0] - 1e-8, values[:, 0] + 1e-8], 1)


def exact(report: Any) -> Any:
    """A table of states without errors of its measures, and nulls without spread."""
    errors = {name: torch.full_like(values, 1e-9) for name, values in report.errors.items()}
    spreads = {name: torch.zeros_like(values) for name, values in report.spreads.items()}
    return dataclasses.replace(report, errors=errors, spreads=spreads)


def reliable(report: Any, reliability: float) -> Any:
    same = torch.full_like(report["split_half"], reliability)
    return dataclasses.replace(report, values={**report.values, "split_half": same})


def aligned() -> Any:
    return contextual_report(decompose_activations(states()), rank=3)


def test_numbers_of_findings_have_three_digits_however_small_their_error() -> None:
    table = basis().anova(null=null_basis())
    table = dataclasses.replace(
        table, intervals={name: tight(values) for name, values in table.intervals.items()}
    )
    errors = {name: torch.full_like(x, 1e-9) for name, x in sweep().type_errors.items()}
    heads = dataclasses.replace(sweep(), type_errors=errors)
    sure = torch.full((3,), 1e-9, dtype=torch.float64)
    found = [
        findings.position_share(table, control=table),
        findings.context_share(table),
        findings.head_type(heads, "induction"),
        findings.smooth(exact(positional_report(basis()))),
        findings.incoherence(exact(aligned())),
        findings.skipped(skips()),
        findings.truncated(dataclasses.replace(curve(middle=0.123456), kl_se=sure)),
        findings.dominance(effects(better=0.4)),
        findings.lift(geometry()),
    ]
    for finding in map(held, found):
        texts = [number for _, number in MARKED.findall(finding.said + finding.beside)]
        assert texts
        for text in texts:
            digits = re.sub(r"\D", "", text.partition("e")[0]).lstrip("0")
            assert len(digits) <= 3, (finding.said, text)


def test_half_a_reliability_is_enough() -> None:
    """And the state that has it is compared with those that have more."""
    table = basis().anova(null=null_basis())
    half = torch.full_like(table.pos_reliability, 0.5)
    row = int(torch.tensor([share[0] for share in table.intervals["pos"].tolist()]).argmax())
    for others in (0.5, 0.9):
        reliability = half + (others - 0.5) * (torch.arange(len(half)) != row)
        found = held(
            findings.position_share(dataclasses.replace(table, pos_reliability=reliability))
        )
        assert found.clear
        assert "too low" not in found.beside
        assert f"state {table.states[row]}, more than of any other." in found.said
    for report, measured in (
        (positional_report(basis()), findings.smooth),
        (aligned(), findings.incoherence),
    ):
        for reliability, clear in ((0.5, True), (0.49, False)):
            found = held(measured(reliable(report, reliability)))
            assert found.clear is clear
            assert ("too low" in found.beside) is not clear


@pytest.mark.parametrize(
    ("p", "reliability", "clear"),
    [(0.05, 0.5, True), (0.051, 0.9, False), (0.07, 0.5, False), (0.01, 0.49, False)],
)
def test_weights_read_position_at_five_percent(p: float, reliability: float, clear: bool) -> None:
    table = Mock(spec=WeightGeometry, heads=((0, 0), (0, 1), (1, 0), (1, 1)))
    table.excess = torch.tensor([2.0, torch.inf, torch.nan, 3.0])
    table.p, table.reliability = (
        torch.full((4,), p, dtype=torch.float64),
        torch.full((4,), reliability),
    )
    table.columns.return_value = ["excess"]
    table.rows.return_value = [[value] for value in table.excess.tolist()]
    found = held(findings.lift(table))
    assert found.clear is clear
    assert found.value.endswith("×")
    assert plain(found.value) == "3×"
    assert "L1H1" in found.said
    table.p = torch.full((4,), torch.nan)
    assert findings.lift(table) is None


def test_a_head_below_uniform_attention_is_no_head_of_its_type() -> None:
    for score, clear in ((0.0, False), (0.1, False), (0.2, True)):
        none = {name: torch.full_like(x, score) for name, x in sweep().types.items()}
        errors = {name: torch.full_like(x, 1e-3) for name, x in sweep().type_errors.items()}
        baselines = dict.fromkeys(sweep().baselines, 0.1)
        changed = {"types": none, "type_errors": errors, "baselines": baselines}
        for name, words in (("induction", "induction"), ("previous", "previous-token")):
            found = findings.head_type(dataclasses.replace(sweep(), **changed), name)
            assert found.clear is clear
            article = "an" if name == "induction" else "a"
            start = "The strongest" if clear else f"No evidence of {article}"
            assert found.said.startswith(f"{start} {words} head")
            assert f"{100 * score:.0f}%" in plain(found.value).replace(".0", "")


GROUPS = ("position", "content", "mixed")


def heads_table(
    shares: list[list[float]], by_cs: list[str], by_gs: list[str], **changed: Any
) -> Mock:
    """A sweep of heads with these shares of position, content and both, each within 0.01, and the
    groups that come first by covariance and by gain; the share of position is 0.1 by chance."""
    value = torch.tensor(shares)
    bounds = SimpleNamespace(value=value, low=value - 0.01, high=value + 0.01)
    ends = {"": bounds.value, "_low": bounds.low, "_high": bounds.high}
    cells = {
        f"cs_{name}_corrected{end}": x[:, i]
        for end, x in ends.items()
        for i, name in enumerate(GROUPS)
    }
    cells["cs_position_null"] = torch.full((len(shares),), 0.1)
    table = {
        "groups": GROUPS,
        "group_intervals": bounds,
        "by_group": SimpleNamespace(by_cs=by_cs, by_gs=by_gs, labels=by_cs),
        "details": {"cs_position_null": cells["cs_position_null"]},
        "heads": tuple((0, i) for i in range(len(shares))),
        "columns": lambda: list(cells),
        "rows": lambda: torch.stack(list(cells.values()), 1).tolist(),
    }
    return Mock(spec=SweepTable, **(table | changed))


def driver(table: Mock, *, rotary: bool = False) -> Finding | None:
    return findings.driver(table, groups=8, rotary=rotary)


SHARES = [[0.9, 0.05, 0.05], [0.6, 0.3, 0.1], [0.3, 0.51, 0.19]]


def test_a_head_is_driven_by_what_comes_first_by_covariance_and_by_gain() -> None:
    by_gs = ["content", "position", "content"]
    found = held(driver(heads_table(SHARES, ["position", "position", "content"], by_gs)))
    assert found.clear
    assert plain(found.said) == "Position drives L0H1: 60.0% of the covariance of its scores."
    chance = "10.0% with position destroyed; of 3 heads position drives 2 and content drives 1"
    assert plain(found.beside) == f"95% interval 59.0% to 61.0%; {chance}"
    found = held(driver(heads_table(SHARES, ["position"] * 3, ["mixed"] * 3)))
    assert not found.clear
    shown = "it makes up 90.0% of the scores of L0H0, its largest share in any head."
    assert plain(found.said) == f"No evidence that position drives a head: {shown}"


def test_without_rotation_position_is_asked_for_alone_and_beyond_its_null() -> None:
    for share, clear in ((0.2, True), (0.105, False)):
        found = held(driver(heads_table([[share, 0.7, 0.1]], ["position"], ["position"])))
        assert found.clear is clear
        assert f"{100 * share:.1f}%" in plain(found.said)


def test_in_a_rotary_model_content_may_drive_a_head() -> None:
    by_group = ["mixed", "mixed", "content"]
    found = held(driver(heads_table(SHARES, by_group, by_group), rotary=True))
    assert found.clear
    assert plain(found.said) == "Content drives L0H2: 51.0% of the covariance of its scores."
    assert "30.0% for position" in plain(found.beside)
    near = [[0.495, 0.5, 0.005]]
    assert not held(driver(heads_table(near, ["content"], ["content"]), rotary=True)).clear
    found = held(driver(heads_table(SHARES, ["position"] * 3, ["position"] * 3), rotary=True))
    assert plain(found.said).startswith("Relative position drives L0H0: 90.0%")


def test_a_head_without_an_interval_or_a_null_is_no_finding() -> None:
    first = ["position"] * 3
    table = heads_table(SHARES, first, first)
    table.group_intervals.low[0] = torch.nan
    assert "L0H1" in held(driver(table)).said
    table.group_intervals.low[:] = torch.nan
    assert driver(table) is None
    for changed in ({"group_intervals": None}, {"groups": ("mixed",)}, {"details": {}}):
        assert driver(heads_table(SHARES, first, first, **changed)) is None


def test_one_more_draw_of_random_directions_differs_as_those_of_other_nulls() -> None:
    """Their mean is exact, so that no spread of theirs is in the table."""
    report = exact(reliable(aligned(), 0.9))
    name = "incoherence_avg"
    value = report[name]
    apart = torch.full_like(value, 0.1)
    nulls = {(name, "random"): value - 1, (name, "flipped"): value - 30}
    for spread, clear in ((0.1, True), (1.0, False)):
        spreads = {(name, "flipped"): spread * torch.ones_like(value)}
        changed = dataclasses.replace(report, nulls=nulls, spreads=spreads)
        assert held(findings.incoherence(changed)).clear is clear
    for null in ("random", "noise"):
        alone = dataclasses.replace(report, nulls={(name, null): value - apart}, spreads={})
        assert held(findings.incoherence(alone)).clear
    far = {(name, "random"): value - 1}
    others = {("overlap", "flipped"): 9 * torch.ones_like(value)}
    assert held(findings.incoherence(dataclasses.replace(report, nulls=far, spreads=others))).clear
    for missing in ({"errors": {}}, {"nulls": {}}):
        assert findings.incoherence(dataclasses.replace(report, **missing)) is None
    errors = {measure: torch.full_like(x, torch.nan) for measure, x in report.errors.items()}
    assert findings.incoherence(dataclasses.replace(report, errors=errors)) is None


def test_alignment_is_told_as_more_or_less_than_chance() -> None:
    report = exact(reliable(aligned(), 0.9))
    name = "incoherence_avg"
    for low, high, words in (
        (-0.2, -0.1, "are more aligned than chance"),
        (0.1, 0.2, "are less aligned than chance"),
        (-0.1, 0.1, "No evidence"),
    ):
        nulls = {(name, "random"): report[name] + low, (name, "flipped"): report[name] + high}
        changed = dataclasses.replace(report, nulls=nulls, spreads={})
        assert words in held(findings.incoherence(changed)).said


def test_ten_held_out_chunks_are_enough_for_skipped_blocks() -> None:
    found = held(findings.skipped(dataclasses.replace(skips(), test=10)))
    assert "over 10 held-out chunks" in found.beside
    assert "ridge for block 0" in found.said or "(ridge)" in found.said
    assert findings.skipped(dataclasses.replace(skips(), test=9)) is None
    assert not held(findings.skipped(skips(forgotten=0.1))).clear


def without(*map_types: str) -> Any:
    """The skips of :func:`skips` without numbers of some maps, and with a cheap skip of both
    blocks, which is no single block."""
    values = {}
    for (name, metric), x in skips().values.items():
        values[name, metric] = torch.full_like(x, torch.nan) if name in map_types else x.clone()
        values[name, metric][0, 2] = 0.01
    return dataclasses.replace(skips(), values=values)


def test_the_best_single_block_and_map_that_were_measured() -> None:
    found = held(findings.skipped(without()))
    assert plain(found.value) == "1.50"
    found = held(findings.skipped(without("ridge")))
    assert plain(found.value) == "2"
    assert "(rotation and stretch)" in found.said
    assert "the smallest of 2 maps and blocks" in found.beside
    assert findings.skipped(without("ridge", "flow")) is None


def test_at_most_half_of_the_directions_are_few() -> None:
    found = held(findings.truncated(curve()))
    assert found.clear
    assert plain(found.value) == "4"
    wide = dataclasses.replace(curve(), K=(2, 5, 8), kl=torch.tensor([0.1, 0.1, 0.1]).double())
    assert plain(held(findings.truncated(wide)).value) == "2"
    late = held(findings.truncated(curve(middle=3.0)))
    assert not late.clear
    assert "with 4 of 8 it still moves by 3 nats" in plain(late.said)
    never = held(findings.truncated(curve(middle=3.0, last=2.0)))
    assert "with 4 of 8 it still moves by 3 nats" in plain(never.said)
    assert findings.truncated(dataclasses.replace(curve(), K=(5, 6, 8))) is None
    assert findings.truncated(dataclasses.replace(curve(), claimed=False)) is None
    unknown = dataclasses.replace(curve().provenance, contexts=None)
    assert findings.truncated(dataclasses.replace(curve(), provenance=unknown)) is None
    for middle, clear in ((0.66, True), (0.69, False)):
        noisy = dataclasses.replace(curve(middle=middle), kl_se=torch.full((3,), 0.01).double())
        assert held(findings.truncated(noisy)).clear is clear


def test_one_draw_of_a_random_term_is_said() -> None:
    effect = effects(better=0.4)
    one = dataclasses.replace(effect, drawn=effect.drawn[:1])
    found = held(findings.dominance(one))
    assert "over windows and 1 draw, which gives no interval" in found.beside
    assert not found.clear
    few = {name: getattr(effect, name)[:, :9] for name in ("losses", "induction_losses", "kls")}
    assert findings.dominance(dataclasses.replace(effect, **few)) is None
