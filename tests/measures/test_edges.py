"""Defaults, ends of ranges and whole sentences of the measures: values that are known by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.refusals import refused
from tl_geometry import decompose_activations
from tl_geometry.base.linalg import dct_matrix
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures import contextual, differences, positional, rank
from tl_geometry.measures.comparison import compare_bases
from tl_geometry.measures.context_report import contextual_report
from tl_geometry.measures.position_report import positional_report
from tl_geometry.measures.state_measures import StateMeasures


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def basis_of(h: Tensor, **options: Any) -> PositionContext:
    return decompose_activations(h, moments_dtype=torch.float64, **options)


# ---- formulas


@pytest.mark.parametrize(
    ("d_model", "pairs", "avg", "largest"),
    [
        (1, 1, 1, 1),
        (1, 9, 1, 1),
        (2, 1, 2 / math.pi, 0),
        (2, 4, 2 / math.pi, math.cos(math.pi / 8)),  # |cos| of an angle that is uniform
        (3, 1, 0.5, 0),
        (3, 10, 0.5, 0.9),  # |cos| itself is uniform
    ],
)
def test_cosines_of_random_directions_in_few_dimensions(
    d_model: int, pairs: int, avg: float, largest: float
) -> None:
    """Of a line, a plane and space, where they are elementary; by default of one pair."""
    found = contextual.cosine_baseline(d_model, pairs)
    assert found == pytest.approx((avg, d_model**-0.5, largest), abs=1e-7)
    assert contextual.cosine_baseline(d_model) == contextual.cosine_baseline(d_model, 1)


def test_cosines_without_a_pair_are_unknown_and_counted() -> None:
    """Zero rows leave no pair; every other one counts, in each block of a batch."""
    pos = torch.tensor([[[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]])
    ctx = torch.tensor([[[0.0, -2.0], [-3.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 0.0], [0, 1.0]]])
    found = contextual.incoherence(pos, ctx)
    assert found.pairs.tolist() == [2, 0]
    values = (found.max, found.avg, found.rms, found.signed)
    assert [float(v[0]) for v in values] == pytest.approx([1, 0.5, 0.5**0.5, -0.5])
    assert all(bool(v[1].isnan()) for v in values)
    single = contextual.incoherence(pos[0, :1], ctx[0, 1:2])
    assert [float(v) for v in single] == [1, 1, 1, -1, 1]


def test_similarity_by_default_leaves_self_pairs_and_signs_out() -> None:
    """Two opposite contexts of one document: alike without their signs, opposite with them; with
    self-pairs as published."""
    ctx = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0]])
    labels = torch.tensor([0, 0, 1])
    plain = contextual.cluster_similarity(ctx, labels)
    assert (float(plain.intra), float(plain.inter)) == (1, 0)
    assert plain.table.nan_to_num(nan=9).tolist() == [[1, 0], [0, 9]]
    signed = contextual.cluster_similarity(ctx, labels, signed=True)
    assert float(signed.intra) == -1
    reference = contextual.cluster_similarity(ctx, labels, preset="reference", signed=True)
    assert float(reference.intra) == pytest.approx((4 * 0 + 1) / 5)


@pytest.mark.parametrize(("number", "low"), [(9, True), (10, False)])
def test_a_share_of_cosines_is_by_default_of_ten(number: int, low: bool) -> None:
    """The signs of the tenth cosine (number 9) are mostly in, those of the eleventh are not."""
    signs = dct_matrix(16)[number].sign().unsqueeze(1)
    assert (float(positional.low_frequency_share(signs)) > 0.5) is low


def test_differences_and_shares_are_by_default_first_and_unsquared() -> None:
    """The first differences; the singular values themselves."""
    pos = gaussian(0, 7, 3)
    assert float(differences.smoothness(pos)) == float(differences.smoothness(pos, 1))
    s = torch.tensor([3.0, 2.0, 1.0])
    assert float(positional.explained_ratio(s, 2)) == pytest.approx(5 / 6)
    assert float(positional.explained_ratio(s, 2, power=2)) == pytest.approx(13 / 14)
    assert float(differences.smoothness(pos, 0)) == pytest.approx(1)
    assert refused(lambda: differences.smoothness(pos, -1)) == (
        "m: expected 0 or more differences, got -1."
    )


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_differences_of_any_order_are_those_of_the_reflected_rows(m: int) -> None:
    """By loops over the periodic rows, also of more differences than rows."""
    pos, rows = gaussian(3, 3, 2), []
    reflected = [*pos, *reversed(pos)]
    for t in range(6):
        total = torch.zeros(2, dtype=torch.float64)
        for j in range(m + 1):
            total = total + (-1) ** j * math.comb(m, j) * reflected[(t - j) % 6]
        rows.append(3**m * float(total.norm()))
    expected = (max(rows) / float(pos.norm(dim=1).max())) ** 2
    assert float(differences.smoothness(pos, m)) == pytest.approx(expected)


def test_pseudo_noise_by_hand() -> None:
    """The three strategies for two leading values, and what each needs."""
    s = torch.tensor([9.0, 8.0, 3.0, 2.0, 1.0, 0.5], dtype=torch.float64)
    c = 2 ** (2 / 3) - 1
    first = 3 + 1 / c * (3 - 1)
    second = 3 + (1 - 0.5 ** (2 / 3)) / c * (3 - 1)
    assert rank.pseudo_noise(s, 2).tolist() == pytest.approx([first, second, 3, 2, 1, 0.5])
    assert rank.pseudo_noise(s, 2, "w").tolist() == [3, 3, 3, 2, 1, 0.5]
    assert rank.pseudo_noise(s, 2, "0").tolist() == [0, 0, 3, 2, 1, 0.5]
    side = "(the smaller side of the matrix)"
    assert refused(lambda: rank.pseudo_noise(s, 3)) == (
        f"k: expected k >= 1 and 2k + 1 < 6 {side}, got 3. Use k=2."
    )
    assert rank.pseudo_noise(s, 5, "w").tolist() == [0.5] * 6
    assert refused(lambda: rank.pseudo_noise(s, 6, "w")) == (
        f"k: expected k >= 1 and k < 6 {side}, got 6. Use k=2."
    )
    assert refused(lambda: rank.pseudo_noise(s[:3], 0)) == (
        f"k: expected k >= 1 and 2k + 1 < 3 {side}, got 0. Use k=1."
    )
    assert (
        refused(lambda: rank.pseudo_noise(s, 2, "x"))
        == "strategy: expected one of 'i', 'w', '0', got 'x'."
    )


def test_a_fracture_next_to_a_zero_row_is_none() -> None:
    """Steps to zero rows are left out of the largest and of the median."""
    angles = torch.tensor([0.0, 0.1, 0.2, 0.0, 0.3, 0.4, 1.0, 1.1])
    curve = torch.stack([angles.cos(), angles.sin()], 1).double()
    curve[3] = 0
    steps = [1 - math.cos(x) for x in (0.1, 0.1, 0.1, 0.6, 0.1)]
    found = positional.fracture_score(curve)
    assert int(found.argmax) == 5
    assert float(found.score) == pytest.approx(max(steps) / sorted(steps)[2])
    one = positional.fracture_score(curve[:1])
    assert bool(one.score.isnan())
    assert int(one.argmax) == 0
    zero = positional.fracture_score(torch.zeros(4, 2))
    assert bool(zero.score.isnan())


# ---- reports


@pytest.mark.parametrize(("directions", "expected"), [(20, 20), (21, 1)])
def test_bases_are_compared_with_a_bound_of_twenty(directions: int, expected: int) -> None:
    """Twenty equal directions are all found; of twenty-one the last counts as noise, so that none
    is, and one direction is compared."""
    noise = 1e-4 * gaussian(0, 50, 50)
    left = dct_matrix(50)[1 : 1 + directions].T  # columns that sum to zero
    right = torch.linalg.qr(gaussian(1, 50, directions)).Q
    basis = basis_of((100 * left @ right.T + noise).expand(2, 50, 50), groups=2)
    assert compare_bases(basis, basis).rank == (expected,)


def test_comparisons_are_refused_in_whole_sentences() -> None:
    """Windows, kinds of states, ranks and states that do not fit."""
    a, b = (basis_of(gaussian(i, 4, 6, n)) for i, n in enumerate((5, 5)))
    short = basis_of(gaussian(2, 4, 3, 5))
    use = "Use decompose(..., window=) for both."
    assert refused(lambda: compare_bases(a, short)) == (
        f"windows: expected equal lengths, 6 positions, got 3. {use}"
    )
    for bad in (0, 6):
        assert refused(lambda n=bad: compare_bases(a, b, rank=n)) == (
            f"rank: expected 1 to 5 directions, got {bad}."
        )
    assert compare_bases(a, b, rank=5).rank == (5,)
    assert refused(lambda: compare_bases(a, b, states=[])) == (
        "states: expected states of both bases ((0,) and (0,)), got none. Use pairs of states."
    )


def test_measures_that_a_report_lacks_are_named() -> None:
    """A report made by hand has no blocks and no draws."""
    one = {"rank": torch.ones(2), "winding": torch.zeros(2)}
    fields: dict[str, Any] = {"states": (0, 4), "values": one, "errors": {"rank": torch.ones(2)}}
    fields |= {"nulls": {("rank", "noise"): torch.zeros(2)}, "spreads": {}, "curve": {}}
    report = StateMeasures(provenance=Provenance(), curve_contexts=(), **fields)
    assert (report.blocks, report.draws) == (0, 0)
    assert report.columns() == ("state", "rank", "rank_se", "rank_noise", "winding")
    assert report.rows() == [(0, 1, 1, 0, 0), (4, 1, 1, 0, 0)]
    assert refused(lambda: report["turns"]) == (
        "measure: expected one of rank, winding, got 'turns'."
    )


def test_a_report_without_second_moments_has_no_relative_norm() -> None:
    """By default k is 20; ten cosines are shown; what is not kept is said."""
    h = gaussian(4, 16, 46, 45) + 3 * gaussian(5, 46, 45)
    basis = basis_of(h, second_moments=False, keep_ctx=False, keep=0)
    report = positional_report(basis, jackknife=False, nulls=False)
    assert report.k == 20
    assert report.fourier.shape == (1, 10, 10)
    assert bool(report["relative_norm"].isnan() & report["relative_norm_reference"].isnan())
    assert "no second moments: no relative norm" in report.provenance.flags
    assert report.errors == {}
    assert report.nulls == {}
    assert report.curve_contexts == ()
    assert report.blocks == 0
    assert report.draws == 8
    for name in ("k", "frequencies", "draws"):
        bad: dict[str, Any] = {name: 0}
        assert refused(lambda options=bad: positional_report(basis, **options)) == (
            f"{name}: expected at least 1, got 0."
        )


def test_the_error_of_the_raw_norm_by_hand() -> None:
    """Without each of eight groups, the numerator and the denominator along the leading direction,
    which keeps its variance within positions."""
    h = gaussian(11, 16, 5, 4) + 2 * gaussian(12, 5, 4) + 3 * gaussian(13, 4)
    report = positional_report(basis_of(h, groups=8), nulls=False)
    flat, mean = h.reshape(-1, 4), h.mean((0, 1))
    raw = flat.T @ flat / 16
    v = torch.linalg.eigh(raw)[1][:, -1]
    within = ((h - h.mean(0)) @ v).square().sum() / 16
    whole = float(torch.linalg.svdvals(h.mean(0) - mean)[0] / torch.linalg.eigvalsh(raw)[-1].sqrt())
    assert float(report["relative_norm_reference"]) == pytest.approx(whole)
    without = []
    for group in range(8):
        rest = torch.cat([h[: 2 * group], h[2 * group + 2 :]])
        centre = rest.mean((0, 1))
        pos = rest.mean(0) - centre
        size = within + (pos @ v).square().sum() + 5 * (centre @ v).square()
        without.append(float(torch.linalg.svdvals(pos)[0] / size.sqrt()))
    spread = sum((x - sum(without) / 8) ** 2 for x in without)
    error = float(report.errors["relative_norm_reference"])
    assert error == pytest.approx(math.sqrt(7 / 8 * spread))


def test_a_window_too_short_for_a_rank_has_none() -> None:
    """Four positions allow k = 1, three none: rank, threshold and shares are unknown."""
    for positions, known in ((4, True), (3, False)):
        basis = basis_of(gaussian(6, 8, positions, 9) + 3 * gaussian(7, positions, 9))
        report = positional_report(basis, jackknife=False, nulls=False)
        assert report.k == (positions - 2) // 2
        for name in ("rank", "threshold", "explained", "explained_energy"):
            assert bool(report[name].isfinite()) is known, (positions, name)
        flag = f"rank bound k={report.k} of 20 (short window)"
        assert flag in report.provenance.flags


def test_contextual_reports_are_refused_in_whole_sentences() -> None:
    """A basis without context vectors, of one context, and numbers below one."""
    h = gaussian(8, 12, 5, 6)
    basis = basis_of(h)
    assert refused(lambda: contextual_report(basis_of(h, keep_ctx=False))) == (
        "basis: expected context vectors, got a basis without. Use decompose(..., keep_ctx=True)."
    )
    assert refused(lambda: contextual_report(basis, draws=0)) == (
        "draws: expected at least 1, got 0."
    )
    assert refused(lambda: contextual_report(basis, rank=0)) == (
        "rank: expected at least 1 direction, got 0."
    )
    assert "contextual_report: expected a basis of at least 2 contexts" in refused(
        lambda: contextual_report(basis_of(h[:1]))
    )


def test_a_contextual_report_compares_by_default_ten_directions() -> None:
    """Of twelve positions and dimensions, with documents in the full space and norm N."""
    h = gaussian(9, 40, 13, 12) + gaussian(10, 13, 12)
    basis, labels = basis_of(h), torch.arange(40) % 2
    options: dict[str, Any] = {"jackknife": False, "nulls": False}
    plain = contextual_report(basis, labels, **options)
    ten = contextual_report(basis, labels, rank=10, norm="N", space="full", ridge=None, **options)
    eleven = contextual_report(basis, labels, rank=11, **options)
    for name in plain.values:
        assert torch.equal(plain[name], ten[name]), name
    assert float(plain["overlap"]) != float(eleven["overlap"])
    assert plain.names == ()
    assert plain.similarity is not None
    assert plain.similarity.shape == (1, 2, 2)
    assert plain.blocks == 0
    assert plain.errors == {}


@pytest.mark.parametrize(("contexts", "given"), [(31, False), (32, True)])
def test_errors_of_contexts_are_given_from_32_on(contexts: int, given: bool) -> None:
    """Below, they are unknown, which a flag says."""
    h = gaussian(14, contexts, 5, 6) + gaussian(15, 5, 6)
    report = contextual_report(basis_of(h), nulls=False, rank=2)
    assert all(bool(error.isfinite()) is given for error in report.errors.values())
    assert ("fewer than 32 contexts: no errors" in report.provenance.flags) is not given
    assert report.curve_contexts == (round(contexts / 8), round(contexts / 4), 16, contexts)


@pytest.mark.parametrize(("contexts", "given"), [(9, False), (10, True)])
def test_errors_of_positions_are_given_from_ten_contexts_on(contexts: int, given: bool) -> None:
    """Below, they are unknown, which a flag says."""
    h = gaussian(16, contexts, 5, 6) + 3 * gaussian(17, 5, 6)
    report = positional_report(basis_of(h, groups=4), nulls=False)
    assert bool(report.errors["stable_rank"].isfinite()) is given
    assert ("fewer than 10 contexts: no errors" in report.provenance.flags) is not given
