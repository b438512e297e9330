"""Findings word for word, on made-up tables: which head, state or map is told of, and in which
words. Numbers are the names of their cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.modules import copy_of
from tests.report.test_section_texts import Names
from tl_geometry.report import findings as findings_module

NAN = float("nan")


class Cells(Names):
    """Names of cells, and of intervals with their options."""

    def interval(self, row: int, column: str, **options: Any) -> str:
        said = "".join(f" {name}={value}" for name, value in options.items())
        return f"<interval {self.name} {row} {column}{said}>"


@pytest.fixture
def findings() -> Any:
    """The module with names of cells in place of numbers."""
    module: Any = copy_of(findings_module)
    module.Cells = Cells
    return module


def told(finding: Any) -> tuple[str, str, str, str, bool]:
    return finding.value, finding.said, finding.beside, finding.figure, finding.clear


def intervals(*values: float, width: float = 0.001) -> torch.Tensor:
    """Values with the low and high ends of their intervals."""
    x = torch.tensor(values, dtype=torch.float64)
    return torch.stack([x, x - width, x + width], 1)


@pytest.mark.parametrize(
    ("shares", "reliability", "row", "clear"),
    [
        ((0.1, 0.3, 0.2), (0.9, 0.5, 0.9), 1, True),
        ((0.1, 0.3, 0.2), (0.9, 0.4, 0.9), 2, True),
        ((0.1, 0.3, 0.2), (0.1, 0.2, 0.3), 1, False),
        ((0.0, 0.0001, float("inf")), (0.9, 0.9, 0.9), 1, False),
    ],
)
def test_the_share_of_position(
    findings: Any, shares: Any, reliability: Any, row: int, clear: bool
) -> None:
    """Of the state with the largest share among those with a reliable position."""
    table = SimpleNamespace(
        intervals={"pos": intervals(*shares)},
        pos_reliability=torch.tensor(reliability),
        states=(0, 4, 9),
        blocks=8,
    )
    state, shown = table.states[row], f"<anovar {row} pos_corrected%>"
    every = min(reliability) >= 0.5
    others = "any other" if every else "any other that has a reliable position"
    said = (
        f"Position makes up {shown} of the variance of state {state}, more than of {others}."
        if clear
        else "No evidence that the residual stream depends on position alone: it makes up at most "
        f"{shown} of the variance of a state (state {state})."
    )
    low = "" if reliability[row] >= 0.5 else ", too low for a statement about position"
    beside = (
        f"<interval anova {row} pos_corrected percent=True>; 0% is expected by chance "
        f"(<anovar {row} pos%> before the correction for sampling noise){{}}; the largest of 3 "
        f"states; reliability of position <anovar {row} pos_reliability> between halves of the "
        f"corpus{low}"
    )
    figure = "figure-variance"
    assert told(findings.position_share(table)) == (shown, said, beside.format(""), figure, clear)
    for given, column in (({"pos": 1}, "pos_corrected"), ({}, "pos_debiased")):
        control = SimpleNamespace(intervals=given, states=(*range(5), 9))
        place = control.states.index(state)
        beside_it = f"; <anova_untrainedr {place} {column}%> in the untrained control"
        found = findings.position_share(table, control=control)
        assert found.beside == beside.format(beside_it)
    assert findings.position_share(SimpleNamespace(intervals={})) is None


@pytest.mark.parametrize(
    ("shares", "null", "row", "clear"),
    [
        ((0.3, 0.5, 0.4), (0.1, 0.4, 0.3), 0, True),
        ((0.3, 0.5, 0.4), (0.3, 0.5, 0.4), 0, False),
        ((0.3, 0.5, 0.4), (0.4, 0.9, 0.45), 2, False),
    ],
)
def test_the_share_of_context(findings: Any, shares: Any, null: Any, row: int, clear: bool) -> None:
    """Of the state with the largest excess over spliced windows."""
    table = SimpleNamespace(
        intervals={"ctx": intervals(*shares), "ctx_null": intervals(*null)},
        states=(0, 4, 9),
        blocks=8,
    )
    state, shown = table.states[row], f"<anovar {row} ctx_corrected%>"
    said = (
        f"{shown} of the variance of state {state} is common to a whole window: context that lasts."
        if clear
        else "No evidence that context lasts longer than a piece of text: a whole window has "
        f"{shown} of the variance of state {state} in common."
    )
    beside = (
        f"<interval anova {row} ctx_corrected percent=True>; <anovar {row} ctx_null_corrected%> in "
        f"windows spliced from random places (<interval anova {row} ctx_null_corrected "
        "percent=True>); the largest excess of 3 states"
    )
    assert told(findings.context_share(table)) == (shown, said, beside, "figure-variance", clear)
    unknown = {"ctx": intervals(*shares, width=NAN), "ctx_null": intervals(*null)}
    assert findings.context_share(SimpleNamespace(intervals=unknown)) is None
    assert findings.context_share(SimpleNamespace(intervals={"ctx": 1})) is None


def sweep(first: tuple[str, str, str]) -> Any:
    """Three heads: shares of position, content and mixed; which group is first by each."""
    values = torch.tensor([[0.1, 0.8, 0.1], [0.6, 0.1, 0.3], [0.7, 0.2, 0.1]]).double()
    return SimpleNamespace(
        heads=[(0, 1), (2, 0), (2, 3)],
        groups=("position", "content", "mixed"),
        group_intervals=SimpleNamespace(value=values, low=values - 0.01, high=values + 0.01),
        by_group=SimpleNamespace(
            by_cs=first, by_gs=first, labels=("content", "position", "position")
        ),
        details={"cs_position_null": torch.tensor([0.0, 0.59, 0.1]).double()},
    )


@pytest.mark.parametrize(
    ("first", "rotary", "row", "group", "clear"),
    [
        (("content", "position", "position"), False, 2, "position", True),
        (("content", "position", "mixed"), False, 1, "position", False),
        (("content", "mixed", "mixed"), False, 2, "position", False),
        (("content", "position", "position"), True, 0, "content", True),
        (("mixed", "position", "position"), True, 2, "position", True),
    ],
)
def test_what_drives_a_head(
    findings: Any, first: Any, rotary: bool, row: int, group: str, clear: bool
) -> None:
    """The largest share among heads whose group is first by covariance and by gain; beside it the
    null of position, or the largest share of another group."""
    table = sweep(first)
    name = ("L0H1", "L2H0", "L2H3")[row]
    shown = f"<headsr {row} cs_{group}_corrected%>"
    called = "relative position" if rotary and group == "position" else group
    said = (
        f"{called.capitalize()} drives {name}: {shown} of the covariance of its scores."
        if clear
        else f"No evidence that {called} drives a head: it makes up {shown} of the scores of "
        f"{name}, its largest share in any head."
    )
    null = (
        f"<headsr {row} cs_position_null%> with position destroyed"
        if group == "position"
        else f"<headsr {row} cs_position_corrected%> for position"
    )
    beside = (
        f"<interval heads {row} cs_{group}_corrected percent=True>; {null}; of 3 heads position "
        "drives 2 and content drives 1"
    )
    found = findings.driver(table, groups=8, rotary=rotary)
    assert told(found) == (shown, said, beside, "figure-shares", clear)


@pytest.mark.parametrize("name", ["induction", "previous"])
@pytest.mark.parametrize(("null", "clear"), [(0.1, True), (0.5, False), (0.9, False)])
def test_a_type_of_head(findings: Any, name: str, null: float, clear: bool) -> None:
    """The head with the largest score, against uniform attention."""
    scores = torch.tensor([0.2, 0.5, NAN]).double()
    table = SimpleNamespace(
        heads=[(0, 1), (2, 0), (2, 3)],
        types={name: scores},
        type_errors={name: torch.full_like(scores, 0.001)},
        baselines={name: null},
    )
    shown = f"<headsr 1 {name}%>"
    where = {"induction": "the token that followed last time", "previous": "the token before"}[name]
    words = {"induction": ("induction", "an induction"), "previous": ("previous-token",) * 2}[name]
    looks = f"puts {shown} of its attention on {where}"
    kind = words[1] if name == "induction" else "a previous-token"
    said = (
        f"The strongest {words[0]} head, L2H0, {looks}."
        if clear
        else f"No evidence of {kind} head: the best, L2H0, {looks}."
    )
    beside = (
        f"<interval heads 1 {name} percent=True samples=12> on repeated random tokens; "
        f"<headsr 1 {name}_uniform%> with uniform attention; the largest of 3 heads"
    )
    assert told(findings.head_type(table, name)) == (shown, said, beside, "figure-types", clear)


@pytest.mark.parametrize(
    ("draws", "words"), [(1, "1 draw, which gives no interval"), (5, "5 draws")]
)
@pytest.mark.parametrize(("low", "clear"), [(0.01, True), (0.0, False), (-1.0, False)])
def test_dominant_terms(findings: Any, draws: int, words: str, low: float, clear: bool) -> None:
    """What keeping them costs, beside a random term."""
    effect = SimpleNamespace(
        change=lambda name: SimpleNamespace(low=torch.tensor(0.1)),
        saved=lambda: SimpleNamespace(low=torch.tensor(low)),
        conditions=("clean", "random term", "dominant term"),
        drawn=[0.0] * draws,
        losses=torch.zeros(3, 12),
    )
    shown = "<dominant_onlyr 2 loss_change>"
    costs = f"only each head's dominant term costs {shown} nats per token."
    said = (
        f"Keeping {costs}"
        if clear
        else "No evidence that dominant terms carry the model better than random ones: keeping "
        f"{costs}"
    )
    beside = (
        "<interval dominant_only 2 loss>; a random term costs <dominant_onlyr 1 loss_change>, "
        "<dominant_onlyr 2 saved> more (<interval dominant_only 2 saved> over windows and "
        f"{words}); edits in the live model, 12 windows"
    )
    assert told(findings.dominance(effect)) == (shown, said, beside, "figure-dominance", clear)


def states(name: str, values: list[float], nulls: dict[str, list[float]], trust: float) -> Any:
    """A measure of three states with its nulls, whose errors are small."""
    tensor = lambda x: torch.tensor(x, dtype=torch.float64)
    columns = {name: tensor(values), "split_half": tensor([trust] * 3)}
    report = SimpleNamespace(
        errors={name: tensor([1e-6] * 3)},
        nulls={(name, null): tensor(x) for null, x in nulls.items()} | {("rank", "noise"): 0},
        spreads={},
        blocks=8,
        draws=8,
        states=(0, 4, 9),
    )

    class Report:
        def __getitem__(self, column: str) -> torch.Tensor:
            return columns[column]

        def __getattr__(self, column: str) -> Any:
            return getattr(report, column)

    return Report()


@pytest.mark.parametrize(
    ("values", "trust", "row", "clear"),
    [
        ([0.5, 0.9, 0.4], 0.5, 1, True),
        ([0.5, 0.9, 0.4], 0.4, 1, False),
        ([0.05, 0.1, 0.15], 0.9, 2, False),
    ],
)
def test_a_smooth_curve(
    findings: Any, values: list[float], trust: float, row: int, clear: bool
) -> None:
    """Of the state that is furthest above its nulls, with all of them beside it."""
    nulls = {"shuffled": [0.2] * 3, "noise": [0.1] * 3, "isotropic": [0.15] * 3}
    report, state = states("low_frequency", values, nulls, trust), (0, 4, 9)[row]
    shown = f"<positionalr {row} low_frequency%>"
    held = f"the lowest frequencies hold {shown} of the energy of its unit positional vectors"
    said = (
        f"The positions of state {state} lie on a smooth curve: {held}."
        if clear
        else f"No evidence that positions lie on a smooth curve: in state {state} {held}."
    )
    low = "" if trust >= 0.5 else ", too low for a statement about position"
    beside = (
        f"<interval positional {row} low_frequency percent=True samples=8>; "
        f"<positionalr {row} low_frequency_shuffled%> for positions in random order, "
        f"<positionalr {row} low_frequency_noise%> for sampling noise alone, "
        f"<positionalr {row} low_frequency_isotropic%> for isotropic noise; "
        f"reliability of position <positionalr {row} split_half> between halves of the corpus{low}"
    )
    assert told(findings.smooth(report)) == (shown, said, beside, "figure-position", clear)


@pytest.mark.parametrize(
    ("values", "row", "words"),
    [
        ([0.3, 0.9, 0.4], 1, "Positional and context vectors are more aligned than chance"),
        ([0.3, 0.25, 0.01], 2, "Positional and context vectors are less aligned than chance"),
        ([0.3, 0.25, 0.28], 1, ""),
    ],
)
def test_alignment_of_position_and_context(
    findings: Any, values: list[float], row: int, words: str
) -> None:
    """Of the state that is furthest from the nearest of its nulls; between them it is no
    finding."""
    nulls = {"random": [0.2] * 3, "flipped": [0.3] * 3, "exchanged": [0.3] * 3}
    report, state = states("incoherence_avg", values, nulls, 0.9), (0, 4, 9)[row]
    shown = f"<contextualr {row} incoherence_avg>"
    unclear = "No evidence that positional and context vectors are more or less aligned than chance"
    said = f"{words or unclear}: their mean |cos| in state {state} is {shown}."
    beside = (
        f"<interval contextual {row} incoherence_avg percent=False samples=8>; "
        f"<contextualr {row} incoherence_avg_random> for random directions, "
        f"<contextualr {row} incoherence_avg_flipped> for coordinates with flipped signs, "
        f"<contextualr {row} incoherence_avg_exchanged> for windows whose positions were exchanged "
        f"(no context); reliability of position <contextualr {row} split_half> between halves of "
        "the corpus"
    )
    found = told(findings.incoherence(report))
    assert found == (shown, said, beside, "figure-incoherence", bool(words))


@pytest.mark.parametrize(
    ("excess", "reliability", "p", "row", "clear"),
    [
        ([2.0, 5.0, 3.0], [0.9, 0.5, 0.9], [1.0, 0.05, 1.0], 1, True),
        ([2.0, 5.0, 3.0], [0.9, 0.4, 0.9], [1.0, 1.0, 0.01], 2, True),
        ([2.0, 5.0, 3.0], [0.1, 0.4, 0.2], [0.0, 0.0, 0.0], 1, False),
        ([2.0, NAN, 3.0], [0.9, 0.9, 0.9], [0.0, NAN, 0.06], 2, False),
    ],
)
def test_weights_that_read_position(
    findings: Any,
    excess: list[float],
    reliability: list[float],
    p: list[float],
    row: int,
    clear: bool,
) -> None:
    """The head with the largest excess among those with a reliable position."""
    geometry = SimpleNamespace(
        excess=torch.tensor(excess),
        reliability=torch.tensor(reliability),
        p=torch.tensor(p, dtype=torch.float64),
        heads=[(0, 1), (2, 0), (2, 3)],
    )
    cell = lambda column: f"<weights_qkr {row} {column}>"
    held = (
        f"the {cell('k')} leading positional directions hold {cell('concentration%')} of W_QK of "
        f"{('L0H1', 'L2H0', 'L2H3')[row]}, {cell('excess')} times what as many directions hold "
        "with positions destroyed."
    )
    start = "W_QK reads position" if clear else "No evidence that W_QK reads position"
    low = "" if reliability[row] >= 0.5 else ", too low for a statement about position"
    beside = (
        f"{cell('noise_null%')} on average and {cell('noise_high%')} at most in differences of "
        f"random halves of the corpus, where position cancels; p = {cell('p')} among 3 heads; "
        f"reliability of position {cell('reliability')} between halves of the corpus{low}"
    )
    wanted = (f"{cell('excess')}\u00d7", f"{start}: {held}", beside, "figure-lift", clear)
    assert told(findings.lift(geometry)) == wanted
    geometry.p = torch.full((3,), NAN)
    assert findings.lift(geometry) is None


@pytest.mark.parametrize(
    ("kl", "place", "words", "clear"),
    [
        ({("flow", 1): 0.1}, ("flow", 1, 2), "rotation and stretch", True),
        ({("identity", 0): 0.2, ("ridge", 1): 0.3}, ("identity", 0, 1), "the identity", True),
        ({("ridge", 1): 0.3, ("flow", 0): NAN}, ("ridge", 1, 2), "ridge", True),
        ({("ridge", 1): 5.0}, ("ridge", 1, 2), "ridge", False),
        ({("ridge", 1): 9.0}, ("ridge", 1, 2), "ridge", False),
    ],
)
def test_a_block_that_can_be_skipped(
    findings: Any, kl: Any, place: tuple[str, int, int], words: str, clear: bool
) -> None:
    """The cheapest map for a single block, against forgetting the state."""
    maps, pairs = ("flow", "identity", "ridge", "mean"), [(0, 1), (0, 2), (1, 2)]

    def table(name: str, column: str) -> torch.Tensor:
        values = torch.full((3, 3), 50.0 if column == "kl" else 1e-6).double()
        if column == "kl":
            values[0, 2] = 0.001  # two blocks at once do not count
            values[0, 1], values[1, 2] = (kl.get((name, a), 20.0) for a in (0, 1))
            if name == "mean":
                values[0, 1] = values[1, 2] = 5.0
        return values

    rows = [(name, a, b, 0.0) for name in maps for a, b in pairs]
    skips = SimpleNamespace(
        map_types=maps, test=10, pairs=lambda: pairs, table=table, rows=lambda: rows
    )
    row, mean_row = rows.index((*place, 0.0)), rows.index(("mean", *place[1:], 0.0))
    block, shown = place[1], f"<skipped_layersr {row} kl>"
    change = f"moves the next-token distribution by {shown} nats (KL)."
    said = (
        f"Block {block} is the easiest to do without: a map in its place ({words}) {change}"
        if clear
        else f"No evidence that a block can be replaced by a map: the best, {words} for block "
        f"{block}, {change}"
    )
    finite = 6 - sum(value != value for value in kl.values())
    beside = (
        f"<interval skipped_layers {row} kl samples=10> over 10 held-out chunks; "
        f"<skipped_layersr {mean_row} kl> where the state is forgotten; the smallest of {finite} "
        "maps and blocks"
    )
    assert told(findings.skipped(skips)) == (shown, said, beside, "figure-skips", clear)


@pytest.mark.parametrize(
    ("kl", "needed", "row", "clear"),
    [
        ([0.1, 0.05, 0.01], 2, 0, True),
        ([4.0, 0.5, 0.01], 4, 1, True),
        ([4.0, 3.0, 0.01], 8, 1, False),
        ([4.0, 3.0, 2.0], None, 1, False),
    ],
)
def test_few_directions_that_carry_the_output(
    findings: Any, kl: list[float], needed: int | None, row: int, clear: bool
) -> None:
    """The number that is needed, or the largest up to half where that is more."""
    curve = SimpleNamespace(
        K=(2, 4, 8),
        kl=torch.tensor(kl).double(),
        kl_se=torch.full((3,), 1e-6).double(),
        baseline_mean=7.0,
        claimed=True,
        provenance=SimpleNamespace(contexts=30),
        needed=lambda: needed,
    )
    K, shown = f"<truncationr {row} K>", f"<truncationr {row} kl>"
    said = (
        f"{K} directions carry the output: the distribution moves by {shown} nats."
        if clear
        else f"No evidence that few directions carry the output: with {K} of 8 it still moves by "
        f"{shown} nats."
    )
    beside = (
        f"<interval truncation {row} kl samples=30>; <truncationr {row} baseline_mean> between "
        "consecutive chunks, of which a tenth is allowed"
    )
    assert told(findings.truncated(curve)) == (K, said, beside, "figure-truncation", clear)
