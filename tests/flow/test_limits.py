"""Both sides of every limit of the flow's mathematics, its defaults, and its tables at uneven
layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from tl_geometry import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.flow.alignment import (
    align_directions,
    fit_aligned_bases,
    inverse_values,
    top_directions,
)
from tl_geometry.flow.ensemble import Trajectories, split_rows, too_few
from tl_geometry.flow.ensemble_shape import bundle, entropy_rank, outliers
from tl_geometry.flow.noise import (
    LAWS,
    anderson_darling,
    fit_noise_law,
    isotropy_tests,
    layer_anomalies,
    normality_p,
)
from tl_geometry.flow.reports import compare_ensembles, flow_report
from tl_geometry.flow.residuals import (
    PENALTIES,
    fit_map,
    flow_map,
    residual_maps,
    residual_statistics,
    score_map,
)
from tl_geometry.flow.separation import separability

UNEVEN = (1, 2, 4, 7, 8, 11)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ensemble(n: int = 40, states: tuple[int, ...] = UNEVEN, seed: int = 0) -> Trajectories:
    """Of random walks whose steps grow."""
    steps = draw(n, len(states), 5, seed=seed) * torch.linspace(1, 2, 5)
    X = (steps * torch.linspace(1, 3, len(states))[:, None]).cumsum(1) + 1
    return Trajectories(X=X, states=states, position=-1, provenance=Provenance())


# ---- bases


def test_directions_below_a_ten_billionth_of_the_largest_are_dropped() -> None:
    found = inverse_values(torch.tensor([2.0, 3e-10, 1e-10, 0.0]).double())
    assert found.tolist() == [0.5, pytest.approx(1 / 3e-10), 0, 0]


def test_a_cosine_of_zero_is_no_reversal() -> None:
    U = torch.stack([torch.eye(3), torch.eye(3).roll(1, 0)])
    assert bool((align_directions(U, "sign")[1] == 1).all())


def test_top_directions_are_from_one_to_all() -> None:
    bases = fit_aligned_bases(draw(9, 2, 4))
    assert [top_directions(bases, 1, K).shape[1] for K in (1, 4)] == [1, 4]
    with pytest.raises(GeometryError, match="K: expected 1 to 4 directions, got 0"):
        top_directions(bases, 1, 0)


# ---- parts of an ensemble


@pytest.mark.parametrize(
    ("n", "labels", "share", "first"),
    [
        (10, None, 0.3, 3),
        (10, None, 0.01, 1),
        (10, None, 0.99, 9),
        (2, None, 0.5, 1),
        (12, [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3, 0.5, 6),
        (12, [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3, 0.01, 3),
        (12, [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3, 0.99, 9),
        (12, [0] * 6 + [1] * 6, 0.3, 6),
        (10, [7] * 10, 0.3, 3),
    ],
)
def test_parts_have_their_share(n: int, labels: Any, share: float, first: int) -> None:
    given = None if labels is None else torch.tensor(labels)
    a, b = split_rows(n, given, share, 0)
    assert (len(a), len(b)) == (first, n - first)
    if given is not None and len(given.unique()) > 1:
        assert not set(given[a].tolist()) & set(given[b].tolist())


@pytest.mark.parametrize(("n", "share"), [(5, 0.0), (5, 1.0), (1, 0.5)])
def test_no_part_may_be_empty(n: int, share: float) -> None:
    with pytest.raises(GeometryError, match="a share between 0 and 1 of at least 2"):
        split_rows(n, None, share, 0)


def test_an_ensemble_is_halved_with_seed_zero_unless_told_otherwise() -> None:
    whole = ensemble()
    parts = [part.X for part in whole.split()]
    assert [len(part) for part in parts] == [20, 20]
    assert torch.equal(parts[0], whole.split(0.5, seed=0)[0].X)
    assert not torch.equal(parts[0], whole.split(seed=1)[0].X)


def test_as_many_trajectories_as_dimensions_are_enough() -> None:
    assert too_few(576, 576, "maps") == ()
    assert too_few(575, 576, "maps") == (
        "maps fitted on 575 trajectories, fewer than the 576 dimensions",
    )


# ---- bundles


def kept_by_hand(before: Tensor, after: Tensor, k: int) -> float:
    def near(rows: Tensor) -> np.ndarray:
        distance = torch.cdist(rows, rows).fill_diagonal_(torch.inf).numpy()
        chosen = np.argpartition(distance, k, axis=1)[:, :k]
        mask = np.zeros(distance.shape, bool)
        np.put_along_axis(mask, chosen, True, axis=1)
        return mask

    return float((near(before) & near(after)).sum(1).mean() / k)


def test_neighbours_of_many_trajectories_are_looked_for_among_all() -> None:
    """Distances are taken from 1,024 rows at a time."""
    X = draw(1300, 1, 3).repeat(1, 3, 1) + 0.2 * draw(1300, 3, 3, seed=1)
    found = bundle(X)
    wanted = [kept_by_hand(X[:, s], X[:, s + 1], 10) for s in range(2)]
    assert found.neighbours.tolist() == pytest.approx(wanted)
    assert found.neighbours_chance == 10 / 1299


def test_a_bundle_has_three_trajectories_and_two_states_at_least() -> None:
    assert bundle(draw(3, 2, 4)).neighbours_chance == 1 / 2
    assert bundle(draw(6, 2, 4)).neighbours_chance == 4 / 5, "no more neighbours than N - 2"
    for shape, text in (((2, 3, 4), "three trajectories"), ((5, 1, 4), "two states")):
        with pytest.raises(GeometryError, match=f"at least {text}"):
            bundle(draw(*shape))


@pytest.mark.parametrize(("away", "found"), [(9.5, ()), (10.5, (0,)), (-10.5, (0,)), (19.0, (0,))])
def test_outliers_are_ten_robust_deviations_away(away: float, found: tuple[int, ...]) -> None:
    norms = np.concatenate([[0], np.linspace(95, 105, 100)])
    deviation = np.abs(norms[1:] - 100)
    norms[0] = 100 + away * 1.4826 * np.median(np.append(deviation, 99.0))
    assert outliers(torch.from_numpy(norms).view(-1, 1, 1)) == found


# ---- laws of the noise


def test_three_pairs_are_enough_for_a_law_and_a_constant_has_no_r2() -> None:
    t = torch.tensor([1.0, 2, 4]).double()
    found = fit_noise_law((0.4 * t - 1).expand(3, 3), times=t)
    assert (found.pairs, found.rate, found.log_alpha) == (3, pytest.approx(0.4), pytest.approx(-1))
    flat = fit_noise_law(torch.zeros(4, 4))
    assert (flat.rate, flat.alpha, flat.aic) == (0, 1, -math.inf)
    assert math.isnan(flat.r2)
    with pytest.raises(GeometryError, match="at least 3 with a finite variance, got 1"):
        fit_noise_law(torch.zeros(2, 2))


def test_isotropy_by_hand() -> None:
    """John's statistic in the form of Ledoit & Wolf: ``tr (C / mean variance - I)^2 / d``, with one
    degree of freedom lost to the mean."""
    x = draw(9, 4, seed=3) * torch.tensor([1.0, 1.3, 0.8, 1.1]).double()
    found, C = isotropy_tests(x), np.cov(x.numpy().T)
    variances, values = C.diagonal(), np.linalg.eigvalsh(C)
    assert found.variance_cv == pytest.approx(variances.std(ddof=1) / variances.mean())
    assert found.participation == pytest.approx(values.sum() ** 2 / (4 * (values**2).sum()))
    gap = C / variances.mean() - np.eye(4)
    z = (8 * np.trace(gap @ gap) / 4 - 4 - 1) / 2
    assert found.sphericity_p == pytest.approx(scipy.stats.norm.sf(z))
    assert found.variance_cv_chance == pytest.approx(0.5)
    assert found.correlation_chance == pytest.approx(0.265962, abs=1e-6)
    assert found.participation_chance == pytest.approx(8 / 13)


def test_isotropy_needs_eight_trajectories_and_two_coordinates_that_vary() -> None:
    assert isotropy_tests(draw(8, 2)).degenerate == 0
    constant = draw(8, 3)
    constant[:, 1] = 2
    assert isotropy_tests(constant).degenerate == 1
    for wrong, text in (
        (draw(7, 2), "at least 8 trajectories of 2 coordinates"),
        (draw(8, 1), "at least 8 trajectories of 2 coordinates"),
        (constant[:, :2], "at least 2 coordinates with variance"),
    ):
        with pytest.raises(GeometryError, match=text):
            isotropy_tests(wrong)


def test_normality_of_a_far_outlier_and_of_what_is_far_from_normal() -> None:
    """A tail beyond the smallest float has a logarithm all the same: the sum is the textbook's."""
    x = draw(2000, 1)
    x[7] = 1e5
    z = np.sort((x.numpy()[:, 0] - x.numpy().mean()) / x.numpy().std(ddof=1))
    assert z[-1] > 39
    i = np.arange(1, 2001)
    tails = scipy.stats.norm.logcdf(z) + scipy.stats.norm.logsf(z[::-1])
    assert float(anderson_darling(x)) == pytest.approx(-2000 - ((2 * i - 1) / 2000 * tails).sum())
    assert normality_p(x).tolist() == [0]


# ---- layers that deviate


def test_five_states_are_enough_to_call_one_anomalous() -> None:
    values = draw(5, 5).masked_fill(~torch.ones(5, 5).triu(1).bool(), math.nan)
    found = layer_anomalies(values)
    assert found.z.isfinite().tolist() == [False, True, True, True, True]
    assert bool(layer_anomalies(values[:4, :4]).z.isnan().all())


def test_excess_is_what_the_other_layers_do_not_predict() -> None:
    """An exact law in the layers given, but for one layer: no other layer has an excess. The
    robust z-scores of noisy values by numpy."""
    t = torch.tensor([*UNEVEN, 12, 15, 17]).double()
    gap = (t - t[:, None]).clamp(min=1e-9)
    values = 0.7 + 0.3 * t + 0.5 * gap.log()
    values[:, 4] += 2
    values = values.masked_fill(~torch.ones(9, 9).triu(1).bool(), math.nan)
    wanted = [0, 0, 0, 2, 0, 0, 0, 0]
    found = layer_anomalies(values, times=t).excess
    assert found[1:].tolist() == pytest.approx(wanted, abs=1e-6)
    assert layer_anomalies(values).excess[1:].tolist() != pytest.approx(wanted, abs=0.1)
    noisy = layer_anomalies(values + draw(9, 9), times=t)
    excess = noisy.excess[1:].numpy()
    away = excess - np.median(excess)
    assert noisy.z[1:].tolist() == pytest.approx((away / (1.4826 * np.median(abs(away)))).tolist())


# ---- reports


def test_reports_count_in_the_layers_of_the_states() -> None:
    """Laws, anomalies and the stochastic flow of states that are not consecutive."""
    whole, t = ensemble(), torch.tensor(UNEVEN).double()
    found, train = flow_report(whole), whole.split(0.5, seed=0)[0]
    flow = partial(flow_map, fit_aligned_bases(train.X))
    maps = residual_maps(train.X, flow)
    for name in LAWS:
        assert found.law(name) == fit_noise_law(maps.log_variance, law=name, times=t)
        assert found.law(name) != fit_noise_law(maps.log_variance, law=name)
    for name in ("log_variance", "mean_over_sd", "relative_error"):
        want = layer_anomalies(getattr(maps, name), times=t)
        torch.testing.assert_close(
            found.anomalies[name], torch.stack([want.excess, want.z]), equal_nan=True
        )
    model, law = whole.langevin(), fit_noise_law(whole.residuals().log_variance, times=t)
    assert model.times.tolist() == list(UNEVEN)
    assert (model.alpha, model.rate) == (law.alpha, law.rate)
    assert model.provenance.dtype == "float64"
    frame = found.to_dataframe().set_index(["start", "end"])
    assert [tuple(pair) for pair in frame.index[:2]] == [(1, 2), (1, 4)]
    for row, states in enumerate(((1, 2), (1, 4), (1, 7), (1, 8), (1, 11)), start=1):
        assert frame.loc[states, "r2_in"] == float(found.in_sample["r2"][0, row])
        assert frame.loc[states, "cosine_out"] == float(found.held_out["cosine"][0, row])
        assert frame.loc[states, "error_ridge"] == float(found.baselines["ridge"][0, row])
        assert frame.loc[states, "participation"] == float(found.isotropy["participation"][0, row])


def test_a_flow_whose_noise_falls_has_none() -> None:
    whole = ensemble()
    X = whole.X * torch.exp(-torch.tensor(UNEVEN).double())[:, None]
    model = Trajectories(X=X, states=UNEVEN, position=-1, provenance=Provenance()).langevin()
    assert (model.alpha, model.rate) == (0, 0)
    assert "not above 0: no noise" in model.provenance.flags[0]


@pytest.mark.parametrize(
    ("states", "law", "anomaly"), [(2, False, False), (3, True, False), (4, True, False), (5, 1, 1)]
)
def test_reports_say_what_few_states_cannot_show(states: int, law: bool, anomaly: bool) -> None:
    found = flow_report(ensemble(states=UNEVEN[:states]))
    flags = found.provenance.flags
    assert ("too few states for a noise law" in flags) != law
    assert ("too few states to call one anomalous" in flags) != anomaly
    assert list(found.laws) == (list(LAWS) if law else [])
    if not law:
        with pytest.raises(GeometryError, match=r"law: expected one of .* Use more states"):
            found.law()


def test_reports_need_sixteen_trajectories_and_count_outliers() -> None:
    few = ensemble(16)
    assert flow_report(few).outliers == ()
    assert not any("outliers" in flag for flag in flow_report(few).provenance.flags)
    few.X[5] *= 1000
    assert flow_report(few).outliers == (5,)
    assert "1 norm outliers kept" in flow_report(few).provenance.flags
    with pytest.raises(GeometryError, match="expected at least 16, got 15"):
        flow_report(ensemble(15))
    with pytest.raises(GeometryError, match="at least two states"):
        flow_report(ensemble(20, states=(3,)))


def test_a_comparison_has_the_numbers_of_each_ensemble() -> None:
    given = {"walk": ensemble(), "short": ensemble(30, states=(1, 2), seed=1)}
    frame = compare_ensembles(given, k=4).to_dataframe().set_index("ensemble")
    for name, whole in given.items():
        flow = partial(flow_map, fit_aligned_bases(whole.X))
        shape, maps = bundle(whole.X, k=4), residual_maps(whole.X, flow)
        S = torch.linalg.svdvals(whole.X.transpose(0, 1))
        want = {
            "trajectories": len(whole),
            "straightness": float(shape.straightness.mean()),
            "parallel": float(shape.parallel.mean()),
            "neighbours": float(shape.neighbours.mean()),
            "neighbours_chance": 4 / (len(whole) - 1),
            "entropy_rank": float(entropy_rank(S).mean()),
            "relative_error": float(maps.relative_error.nanmean()),
            "abs_kurtosis": float(maps.abs_kurtosis.nanmean()),
            "mean_over_sd": float(maps.mean_over_sd.nanmean()),
        }
        times = torch.tensor(whole.states).double()
        for law in LAWS:
            fit = fit_noise_law(maps.log_variance, law=law, times=times) if name == "walk" else None
            want |= {f"{law}_rate": fit.rate if fit else math.nan}
            want |= {f"{law}_r2": fit.r2 if fit else math.nan}
        assert list(frame.columns) == list(want)
        assert frame.loc[name].tolist() == pytest.approx(list(want.values()), nan_ok=True)
    by_default = compare_ensembles(given).statistics["neighbours_chance"]
    assert by_default.tolist() == pytest.approx([10 / 39, 10 / 29])
    with pytest.raises(GeometryError, match="ensembles: expected at least one"):
        compare_ensembles({})


# ---- maps


@pytest.mark.parametrize(("n", "d"), [(9, 4), (12, 20), (30, 6)])
def test_the_ridge_penalty_is_that_of_generalised_cross_validation(n: int, d: int) -> None:
    """By the hat matrix of each penalty: ``n |y - H y|^2 / (n - 1 - tr H)^2``, both centred."""
    for seed in range(8):
        x = draw(n, d, seed=seed)
        y = x @ draw(d, d, seed=seed + 50) / 2 + 2 * draw(n, d, seed=seed + 90) + 1
        a, b = x - x.mean(0), y - y.mean(0)
        scale = torch.linalg.matrix_norm(a, 2) ** 2
        scores = []
        for share in PENALTIES[20:]:
            H = a @ torch.linalg.solve(a.mT @ a + share * scale * torch.eye(d).double(), a.mT)
            freedom = n - 1 - H.trace()
            scores.append(float(n * (b - H @ b).square().sum() / freedom**2))
        found = fit_map(x, y, "ridge").penalty
        assert found == float(PENALTIES[20 + int(np.argmin(scores))]), seed


def test_the_flow_of_two_states_is_that_of_their_bases_with_signs_alone_aligned() -> None:
    for seed in range(4):
        x, y = draw(20, 5, seed=seed), draw(20, 5, seed=seed + 10)
        bases = fit_aligned_bases(torch.stack([x, y], 1), align="sign")
        assert torch.allclose(fit_map(x, y, "flow")(x), flow_map(bases, 0, 1)(x))


def test_maps_from_one_start_read_their_own_coordinates() -> None:
    """Identity and linear map have the same centre, and other coordinates."""
    X = draw(20, 3, 4)

    def mixed(start: int, end: int) -> Any:
        return fit_map(X[:, start], X[:, end], ("", "identity", "linear")[end])

    errors = residual_maps(X, mixed).relative_error
    for end in (1, 2):
        alone = score_map(mixed(0, end)(X[:, 0]), X[:, end]).relative_error
        assert float(errors[0, end]) == pytest.approx(alone)


def test_scores_of_short_constant_and_absent_states() -> None:
    y = draw(6, 3)
    assert score_map(1e-12 * y, 1e-12 * y).cosine == pytest.approx(1)
    assert score_map(1e-12 * y, 1e-12 * draw(6, 3, seed=1)).cosine == pytest.approx(
        score_map(y, draw(6, 3, seed=1)).cosine
    )
    assert math.isnan(score_map(y, torch.ones(6, 3).double()).r2)
    still = torch.zeros(6, 3).double()
    assert not bool(fit_map(still, y, "scaled")(y).any())


def test_a_residual_has_four_trajectories_at_least() -> None:
    r = draw(4, 3) + 1
    kurtosis = scipy.stats.kurtosis(r.numpy(), bias=False)
    assert residual_statistics(r).abs_kurtosis == pytest.approx(np.abs(kurtosis).mean())
    with pytest.raises(GeometryError, match=r"at least 4 trajectories, got 3\. Use more chunks"):
        residual_statistics(r[:3])


# ---- separation


def test_a_constant_coordinate_separates_nothing() -> None:
    pytest.importorskip("sklearn", reason="needs the ml extra")
    a, b = draw(30, 3), draw(30, 3, seed=1) + 0.5
    wide = [torch.cat([x, torch.full((30, 1), 7.0).double()], 1) for x in (a, b)]
    assert separability(*wide) == separability(a, b)


def test_accuracies_have_ten_splits_and_three_tenths_of_each_class_by_default() -> None:
    pytest.importorskip("sklearn", reason="needs the ml extra")
    a, b = draw(10, 3), draw(13, 3, seed=1) + 0.5
    found = separability(a, b)
    explicit: dict[str, Any] = {"paired": False, "classifier": "svm", "test_share": 0.3}
    assert found == separability(a, b, repeats=10, seed=0, **explicit)
    assert found != separability(a, b, seed=1)
    assert found.test == 3 + 4
    assert separability(a, b, test_share=0.01, repeats=2).test == 1 + 1
    for wrong in ({"a": a[:9]}, {"b": b[:9]}, {"repeats": 1}):
        with pytest.raises(GeometryError, match="rows: expected at least 10 each"):
            separability(**{"a": a, "b": b, **wrong})
    with pytest.raises(GeometryError, match="equally many with paired=True, got 10 and 13"):
        separability(a, b, paired=True)
