"""How recomputed numbers are judged: bounds on both sides of each threshold, and the words of
every refusal."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import tiny, tokens
from tl_geometry.base.errors import ReconstructionError
from tl_geometry.models import view
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.reconstruction import (
    ReconstructionReport,
    head_spreads,
    judge_rounding,
    pattern_error,
    pattern_roundoff,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.verify import (
    measured_inputs,
    measured_scores,
    report_of,
    some_queries,
    worst_of,
)
from tl_geometry.models.write_spec import _tolerance

EXACT, SINGLE, HALF, BRAIN = 2**-53, 2**-24, 2**-11, 2**-8
NAN = math.nan


# ---- bounds and reports


@pytest.mark.parametrize(
    ("roundoff", "bound"),
    [(EXACT, 1e-12), (SINGLE, 32 * SINGLE), (HALF, 4 * HALF), (BRAIN, 4 * BRAIN)],
)
def test_the_bound_of_each_dtype(roundoff: float, bound: float) -> None:
    """1e-12 in float64, 32 units in float32, 4 in half precision, times the size."""
    assert reconstruction_bound(roundoff, 1.0) == bound
    assert reconstruction_bound(roundoff, 3.0) == pytest.approx(3 * bound)


@pytest.mark.parametrize("roundoff", [EXACT, SINGLE, HALF])
def test_writes_may_be_off_by_eight_bounds_of_the_stream(roundoff: float) -> None:
    """Eight bounds of its largest number, whatever its sign, and 1e-5."""
    h = torch.tensor([[1.0, -5.0]])
    expected = 8 * reconstruction_bound(roundoff, 5.0) + 1e-5
    assert _tolerance(roundoff, h) == pytest.approx(expected)


def report(**checks: tuple[float, float]) -> ReconstructionReport:
    return ReconstructionReport(checks=checks, scale=1.0)


@pytest.mark.parametrize(
    ("checks", "adds_up", "nearest", "worst"),
    [
        ({}, True, None, 0.0),
        ({"q": (1.0, 1.0)}, True, "q", 1.0),
        ({"q": (1.0, 4.0), "k": (1.0, 2.0)}, True, "k", 0.5),
        ({"q": (3.0, 2.0), "k": (9.0, 10.0)}, False, "q", 1.5),
        ({"q": (0.0, 0.0)}, True, "q", 0.0),
        ({"q": (0.0, 0.0), "k": (1.0, 2.0)}, True, "k", 0.5),
        ({"q": (1e-9, 0.0), "k": (1.0, 2.0)}, False, "q", 1.0),
        ({"q": (NAN, 1.0)}, False, "q", NAN),
    ],
)
def test_the_worst_check_is_the_one_nearest_to_its_bound(
    checks: dict[str, tuple[float, float]], adds_up: bool, nearest: str | None, worst: float
) -> None:
    """By the fraction of the bound; an error at the bound is allowed, NaN is not."""
    found = report(**checks)
    assert found.adds_up is adds_up
    assert (found.nearest and found.nearest[0]) == nearest
    assert found.worst == pytest.approx(worst, nan_ok=True)


def test_of_several_layers_the_worst_check_of_each_kind_is_kept() -> None:
    """Compared as fractions of their bounds, not by the errors themselves."""
    checks = [(0, "q", 1.0, 2.0), (1, "q", 2.0, 10.0), (2, "q", 6.0, 8.0), (0, "k", 1.0, 9.0)]
    found = ReconstructionReport.of(checks, 7.0)
    assert (found.checks, found.scale) == ({"q": (6.0, 8.0), "k": (1.0, 9.0)}, 7.0)
    assert ReconstructionReport.of([]).scale == 0


def test_every_comparison_above_its_bound_is_named() -> None:
    """Those within their bounds are not; NaN is above."""
    fine = [(0, "q", 1.0, 1.0)]
    require_reconstruction(fine, "layer 0")
    with pytest.raises(ReconstructionError) as error:
        require_reconstruction([*fine, (0, "k", 1.234, 1.0), (0, "scores", NAN, 2.0)], "layer 0")
    assert str(error.value) == (
        "layer 0: expected parts that add up to the model's own numbers, got k off by 1.2 "
        "(at most 1), scores off by nan (at most 2). Use check_model(model)."
    )


# ---- patterns

SCORES = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 0.0], [3.0, 1.0, 2.0]])
ALLOWED = torch.ones(3, 3).tril().bool()


def pattern(scores: Tensor = SCORES) -> Tensor:
    return torch.where(ALLOWED, scores, -torch.inf).softmax(-1)


def test_the_error_of_a_pattern_is_that_of_its_scores() -> None:
    """A score that is off by 0.3 in a row of three is off by 0.2 from the row's mean."""
    assert float(pattern_error(SCORES, pattern(), ALLOWED, SINGLE)) < 1e-6
    other = SCORES.clone()
    other[2, 1] += 0.3
    assert float(pattern_error(other, pattern(), ALLOWED, SINGLE)) == pytest.approx(0.2, abs=1e-5)


@pytest.mark.parametrize(
    ("roundoff", "dtype"),
    [
        (HALF, torch.float16),
        (BRAIN, torch.bfloat16),
        (SINGLE, torch.float32),
        (EXACT, torch.float32),
    ],
)
@pytest.mark.parametrize(("times", "seen"), [(2e3, True), (0.5e3, False)])
def test_probabilities_near_the_smallest_number_of_a_dtype_are_not_compared(
    roundoff: float, dtype: torch.dtype, times: float, seen: bool
) -> None:
    """Above a thousand times the smallest normal number a wrong score shows, below it does not."""
    p = times * torch.finfo(dtype).smallest_normal
    row = torch.tensor([[1 - p, p]], dtype=torch.float64)
    cells = torch.ones(1, 2, dtype=torch.bool)
    scores = torch.tensor([[0.0, math.log(p) + 0.5]], dtype=torch.float64)
    error = float(pattern_error(scores, row, cells, roundoff))
    assert error == pytest.approx(0.25 if seen else 0.0, abs=0.1)


def test_weight_where_none_may_be_and_none_where_it_must_be() -> None:
    """Both are errors beyond any bound."""
    leaking = pattern()
    leaking[0, 2] = 0.1
    assert float(pattern_error(SCORES, leaking, ALLOWED, SINGLE)) == math.inf
    hidden = pattern()
    hidden[2, 1] = 0.0
    assert float(pattern_error(SCORES, hidden, ALLOWED, SINGLE)) == math.inf
    low = SCORES.clone()
    low[2, 1] = -200.0  # negligible, so that its probability may be zero
    assert float(pattern_error(low, pattern(low), ALLOWED, SINGLE)) < 1e-5


def test_a_float64_pattern_that_float32_holds_is_judged_as_float32() -> None:
    """Only exactly representable patterns of a float64 model; others keep their roundoff."""
    fits, finer = torch.tensor([0.25, 0.75]).double(), torch.tensor([1.0]).double() / 3
    cases = [(fits, EXACT, SINGLE), (finer, EXACT, EXACT), (fits.float(), HALF, HALF)]
    cases += [(fits, HALF, HALF)]
    for value, roundoff, expected in cases:
        assert pattern_roundoff(value, roundoff) == expected
    assert pattern_roundoff(None, EXACT) == EXACT


# ---- rounding beside what scores spread over


def test_a_head_spreads_as_its_median_row() -> None:
    """The largest less the smallest allowed score."""
    scores = torch.tensor([[9.0, 0, 0, 0], [0, 4, 9, 9], [1, 2, 3, 9], [0, 1, 2, 1e6]])
    allowed = torch.ones(4, 4).tril().bool()
    both = torch.stack([scores, 2 * scores])[None]
    assert head_spreads(both, allowed).tolist() == [4.0, 8.0]
    alone = torch.eye(4).bool()
    assert head_spreads(both, alone).tolist() == [0.0, 0.0]


BOUND = 32 * SINGLE


def judged(parts: float, spreads: list[float], roundoff: float = SINGLE, own: float = 1.0) -> Any:
    return judge_rounding(roundoff, (own, parts / BOUND), torch.tensor(spreads), "layer 1")


def test_rounding_is_remarked_above_one_percent_and_refused_above_all() -> None:
    """On both sides of both thresholds, of the median head."""
    assert judged(0.099, [10.0]) == ()
    assert judged(0.101, [10.0]) == (
        "layer 1: rounding may reach 0.1, scores of a row spread over 10",
    )
    assert judged(9.9, [1.0, 10.0, 10.0]) == (
        "layer 1: rounding may reach 9.9, scores of a row spread over 10",
    )
    with pytest.raises(ReconstructionError) as error:
        judged(11.0, [10.0, 10.0, 100.0])
    assert str(error.value) == (
        "layer 1: expected rounding below what scores of a row spread over (10), got parts so "
        "large that it may reach 11. Use model.double(), or decompose(..., normalize=True)."
    )


def test_heads_that_do_not_spread_are_left_out_and_half_precision_is_judged_in_float32() -> None:
    """A spread within the rounding of the scores themselves says nothing."""
    assert judged(11.0, [0.5], own=1.0 / BOUND) == ()
    assert len(judged(0.5, [0.5, 10.0, 10.0], own=1.0 / BOUND)) == 1
    (said,) = judge_rounding(HALF, (1.0, 1000.0), torch.tensor([1.0]), "x", "logits spread over")
    assert said == f"x: rounding may reach {4 * HALF * 1000:.2g}, logits spread over 1"


# ---- what is measured of a layer


def layer_of(architecture: str, layer: int = 1) -> LayerView:
    found: list[LayerView] = []
    view(tiny("bridge", architecture)).run_layers(tokens(), [layer], found.append)
    return found[0]


@pytest.mark.parametrize(
    ("length", "count", "queries"),
    [
        (10, None, range(10)),
        (10, 4, [0, 3, 6, 9]),
        (10, 3, [1, 5, 9]),
        (10, 10, range(10)),
        (10, 99, range(10)),
        (10, 1, [9]),
        (1, 5, [0]),
    ],
)
def test_some_queries_are_evenly_spaced_and_hold_the_last(
    length: int, count: int | None, queries: Any
) -> None:
    """At most as many as were asked for, the last query among them."""
    assert list(range(length))[some_queries(length, count)] == list(queries)


@pytest.mark.parametrize("architecture", ["mpt", "gpt-oss"])
def test_the_size_of_scores_is_the_largest_product_of_absolute_values(architecture: str) -> None:
    """Parts, constants and bias with absolute values, on allowed cells of some queries."""
    layer = layer_of(architecture)
    for queries in (slice(None), slice(1, None, 5)):
        q, q0 = layer.q[:, queries], layer.q_constant[:, queries]
        k, k0 = layer.k, layer.k_constant
        size = torch.einsum("bihe,bjhe->bhij", (q - q0).abs() + q0.abs(), (k - k0).abs() + k0.abs())
        size = size * layer.scale
        if layer.bias is not None:
            size = size + layer.bias[:, queries].abs()
        size = torch.where(layer.allowed[queries], size, 0)
        found = measured_scores(layer, queries)
        assert float(found["scale"]) == pytest.approx(float(size.max()), rel=1e-5)


@pytest.mark.parametrize("name", ["scores", "pattern", "pattern sum"])
def test_errors_of_the_queries_that_are_looked_at(name: str) -> None:
    """A fault planted at one query is measured there, and at no other."""
    layer = layer_of("gpt2")
    assert layer.scores is not None
    assert layer.pattern is not None
    scores, weights = layer.scores.clone(), layer.pattern.clone()
    scores[1, 2, 7, 3] += 0.5
    weights[1, 2, 7, 3] *= 1.5
    planted = dataclasses.replace(layer, scores=scores, pattern=weights)
    at, beside = (float(measured_scores(planted, s)[name]) for s in (slice(7, 8), slice(8, 9)))
    clean = float(measured_scores(layer)[name])
    assert at > 100 * max(clean, 1e-7)
    assert beside <= clean
    expected = {"scores": 0.5, "pattern sum": float(weights[1, 2, 7, 3]) / 3}
    assert at == pytest.approx(expected.get(name, at), rel=1e-3)
    assert measured_scores(dataclasses.replace(layer, pattern=None, scores=None)).keys() == {
        "scale"
    }


def test_the_worst_of_several_measurements() -> None:
    """The largest of each number, NaN where one is; single only where all of it is."""
    first = {"q": torch.tensor(1.0), "k": torch.tensor(2.0), "single": torch.tensor(True)}
    second = {"q": torch.tensor(3.0), "k": torch.tensor(NAN), "single": torch.tensor(False)}
    found = worst_of([first, second])
    assert (float(found["q"]), bool(found["single"])) == (3.0, False)
    assert math.isnan(float(found["k"]))
    assert bool(worst_of([first, first])["single"])


NUMBERS = {
    "scale": 5.0,
    "q": 0.1,
    "k": 0.2,
    "q read": 2.0,
    "k read": 3.0,
    "q entering": 7.0,
    "k entering": 8.0,
    "scores": 0.3,
    "pattern": 0.4,
    "pattern sum": 0.5,
}


def test_each_check_has_the_bound_of_its_size() -> None:
    """Queries and keys by what they read, scores and pattern by scores, sums by one."""
    layer = dataclasses.replace(layer_of("gpt2"), roundoff=SINGLE)
    found = report_of(layer, NUMBERS)
    bounds = {"q": 2.0, "k": 3.0, "pattern": 5.0, "pattern sum": 1.0, "scores": 5.0}
    assert dict(found.checks) == {n: (NUMBERS[n], BOUND * size) for n, size in bounds.items()}
    assert (found.scale, dict(found.sizes)) == (5.0, {"q": 7.0, "k": 8.0})
    small = report_of(layer, {"scale": 0.1, "pattern": 0.4})
    assert dict(small.checks) == {"pattern": (0.4, BOUND)}


def test_a_sinks_share_and_single_patterns_have_their_own_bounds() -> None:
    """Sums with a sink round as the scores do; a float32 pattern in a float64 model as float32."""
    sunk = dataclasses.replace(layer_of("gpt-oss"), roundoff=SINGLE)
    assert report_of(sunk, NUMBERS).checks["pattern sum"][1] == BOUND * 5.0
    assert report_of(sunk, NUMBERS | {"scale": 0.1}).checks["pattern sum"][1] == BOUND
    exact = dataclasses.replace(layer_of("gpt2"), roundoff=EXACT)
    for single, unit in ((1.0, BOUND), (0.0, 1e-12)):
        checks = report_of(exact, NUMBERS | {"single": single}).checks
        assert checks["pattern"][1] == pytest.approx(5 * unit)
        assert checks["pattern sum"][1] == pytest.approx(unit)
        assert checks["scores"][1] == 5e-12


def test_inputs_are_compared_at_the_positions_that_were_asked_for() -> None:
    """A query that is off shows at its position alone; keys without a hook are not compared."""
    seen = view(tiny("bridge", "gpt2"))
    layer = layer_of("gpt2")
    spec = seen._layers.spec_with_weights(1, layer.h)
    raw = {w: spec.raw(layer.h, w) for w in "qk"}
    hook = raw["q"].clone()
    hook[1, 4, 2, 0] += 0.25
    hooked = {"q": hook, "k": None, "v": None}
    at = measured_inputs(spec, layer, raw, hooked, slice(4, 5))
    assert float(at["q"]) == pytest.approx(0.25, abs=1e-5)
    assert set(at) == {"q", "q read", "q entering", "k entering"}
    assert float(measured_inputs(spec, layer, raw, hooked, slice(5, None))["q"]) == 0
    sizes = spec.sizes(layer.h[:, 4:5], "q")
    assert float(at["q read"]) == float(at["q entering"]) == float(sizes.max())
