"""Laws of the rank-3 mathematics of ensembles: aligned bases, alignment, bundles, maps between
states, noise laws, isotropy."""

from __future__ import annotations

import itertools
import math
from functools import partial

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tl_geometry import GeometryError
from tl_geometry.flow.alignment import (
    ALIGNMENTS,
    AlignedBases,
    align_directions,
    check_ensemble,
    common_basis,
    fit_aligned_bases,
    top_directions,
)
from tl_geometry.flow.ensemble_shape import (
    bundle,
    entropy_rank,
    outliers,
)
from tl_geometry.flow.noise import (
    _least_absolute,
    anderson_darling,
    familywise_threshold,
    fit_noise_law,
    isotropy_tests,
    layer_anomalies,
    normality_p,
)
from tl_geometry.flow.residuals import (
    MAPS,
    fit_map,
    flow_map,
    residual_maps,
    residual_statistics,
    score_map,
)

pytestmark = pytest.mark.once

LAWS = settings(deadline=None, max_examples=20)
SIZES = st.tuples(st.integers(3, 14), st.integers(2, 4), st.integers(2, 7), st.integers(0, 10**6))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(states: int, d: int, seed: int) -> Tensor:
    return torch.linalg.qr(noise(states, d, d, seed=seed)).Q


# aligned bases and alignment


@LAWS
@given(SIZES, st.sampled_from(ALIGNMENTS), st.booleans())
def test_frames_reconstruct_second_moments_and_stay_orthonormal(size, align, centered):
    n, states, d, seed = size
    X = noise(n, states, d, seed=seed) + 1
    f = fit_aligned_bases(X, align=align, centered=centered)
    for t in range(states):
        rows = X[:, t] - (X[:, t].mean(0) if centered else 0)
        assert torch.allclose(f.U[t] * f.S[t] ** 2 @ f.U[t].mT, rows.mT @ rows, atol=1e-9)
        assert torch.allclose(
            f.U[t].mT @ f.U[t], torch.eye(f.rank, dtype=torch.float64), atol=1e-10
        )
        assert sorted(f.order[t].tolist()) == list(range(f.rank))
        reference = np.linalg.svd(rows.numpy(), compute_uv=False)
        assert np.allclose(
            f.S[t].sort(descending=True).values, reference, atol=1e-9
        )  # permuted with the vectors, never changed


@LAWS
@given(SIZES)
def test_alignment_laws(size):
    n, states, d, seed = size
    X = noise(n, states, d, seed=seed)
    plain = fit_aligned_bases(X, align="none")

    def total(f: AlignedBases) -> float:
        return float((f.U[:-1] * f.U[1:]).sum(1).sum())

    found = {
        method: fit_aligned_bases(X, align=method) for method in ("greedy", "sign", "hungarian")
    }
    for method, f in found.items():
        assert bool(((f.U[:-1] * f.U[1:]).sum(1) >= 0).all())
        assert torch.equal(f.U[0], plain.U[0])
        order, sign = align_directions(f.U, method)  # idempotent
        if (
            method != "greedy"
        ):  # greedy may reorder an aligned frame only where it would have chosen so
            assert torch.equal(order, torch.arange(f.rank).expand(states, -1))
        assert bool((sign == 1).all())
    # later aligned bases follow the earlier choice: only one step compares like with like
    if states == 2:
        assert (
            total(found["hungarian"]) >= max(total(found["greedy"]), total(found["sign"])) - 1e-12
        )


@LAWS
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_hungarian_is_the_best_permutation_by_brute_force(d, seed):
    U = orthogonal(2, d, seed)
    cosines = (U[0].mT @ U[1]).abs()
    order, _ = align_directions(U, "hungarian")
    best = max(
        sum(float(cosines[i, p[i]]) for i in range(d)) for p in itertools.permutations(range(d))
    )
    assert math.isclose(float(cosines.gather(1, order[1][:, None]).sum()), best, rel_tol=1e-12)


def test_alignment_recovers_a_planted_permutation_with_its_singular_values():
    U = orthogonal(1, 5, 3)[0]
    Y = torch.linalg.qr(noise(40, 5, seed=4)).Q
    S1, S2 = torch.tensor([9.0, 7, 5, 3, 1]).double(), torch.tensor([5.0, 4, 6, 2, 3]).double()
    order = S2.argsort(descending=True)
    X = torch.stack(
        [(Y * S1) @ U.mT, (Y * S2) @ (U * torch.tensor([1.0, -1, 1, -1, 1]).double()).mT], dim=1
    )
    plain = fit_aligned_bases(X, align="none").U
    for method in ("greedy", "hungarian"):
        f = fit_aligned_bases(X, align=method)
        assert align_directions(plain, method)[0][1].tolist() == order.argsort().tolist()
        assert torch.allclose(f.S[1], S2, atol=1e-10)
        assert torch.allclose(f.U[1], f.U[0], atol=1e-8)
    assert not torch.allclose(fit_aligned_bases(X, align="sign").S[1], S2)


def test_greedy_takes_the_later_column_on_a_tie():
    U = torch.eye(2).repeat(2, 1, 1)
    U[1] = torch.tensor([[1.0, 1.0], [1.0, -1.0]]) / 2**0.5
    assert align_directions(U, "greedy")[0][1].tolist() == [1, 0]


def test_overlap_is_the_cosine_of_right_singular_vectors():
    X = noise(9, 3, 4, seed=1)
    f = fit_aligned_bases(X, align="hungarian")
    V = torch.stack([X[:, t] @ f.U[t] / f.S[t] for t in range(3)])
    assert torch.allclose(f.overlap[0, 2], (V[0] * V[2]).sum(0), atol=1e-10)
    assert torch.allclose(f.overlap[1, 1], torch.ones(4).double(), atol=1e-10)


def test_top_directions_ignore_alignment():
    X = noise(30, 4, 6, seed=2)
    f, plain = fit_aligned_bases(X, align="hungarian"), fit_aligned_bases(X, align="none")
    P = top_directions(f, 2, 3)
    Q = top_directions(plain, 2, 3)
    assert torch.allclose(P @ P.mT, Q @ Q.mT, atol=1e-10)
    with pytest.raises(GeometryError, match=r"1 to 6 directions, got 7. Use more trajectories"):
        top_directions(f, 2, 7)


def test_common_basis_holds_everything_when_it_can_and_says_what_it_misses():
    X = noise(3, 1, 8, seed=5).expand(3, 4, 8) * torch.arange(1.0, 5).double().view(1, 4, 1)
    basis, outside = common_basis(X)
    assert basis.shape == (8, 3)
    assert float(outside.max()) < 1e-12
    basis, outside = common_basis(noise(3, 4, 8, seed=6))
    assert torch.allclose(basis.mT @ basis, torch.eye(3).double(), atol=1e-12)
    assert float(outside.min()) > 0.01


@pytest.mark.parametrize(
    "bad", [torch.zeros(3, 4), torch.zeros(0, 2, 3), torch.zeros(2, 2, 2, dtype=torch.int64)]
)
def test_ensembles_of_the_wrong_shape_are_refused(bad):
    with pytest.raises(
        GeometryError,
        match=r"trajectories: expected a floating tensor \[trajectory state d_model\]",
    ):
        check_ensemble(bad)


def test_a_nan_names_its_state():
    X = noise(4, 3, 5)
    X[1, 2, 0] = math.nan
    with pytest.raises(GeometryError, match="state row 2: expected finite numbers, got 1 NaN"):
        fit_aligned_bases(X)


# angles, spectra, bundles, outliers


@LAWS
@given(st.floats(0.3, 2.0), st.integers(5, 40))
def test_entropy_rank_of_a_power_law(power, rank):
    S = (torch.arange(1, rank + 1).double() ** -power)[None]
    p = (S[0] ** 2 / (S[0] ** 2).sum()).numpy()
    assert math.isclose(float(entropy_rank(S)), math.exp(scipy.stats.entropy(p)), rel_tol=1e-9)


def test_bundle_tells_parallel_lines_from_random_walks():
    steps, n, d = 12, 80, 30
    line = noise(n, 1, d, seed=1) * 5 + torch.arange(steps).double().view(1, -1, 1) * noise(
        1, 1, d, seed=2
    )
    walk = noise(n, steps, d, seed=3).cumsum(1)
    a, b = bundle(line), bundle(walk)
    assert torch.allclose(a.straightness, torch.ones(n).double())
    assert torch.allclose(a.parallel, torch.ones(steps - 1).double())
    assert torch.allclose(a.neighbours, torch.ones(steps - 1).double())
    assert 0.2 < float(b.straightness.mean()) < 0.45
    assert float(b.parallel.abs().max()) < 0.02
    assert float(b.neighbours[0]) < 0.6


def test_bundle_statistics_by_brute_force_and_chance_level():
    X = noise(40, 2, 50, seed=4)
    found = bundle(X, k=5)
    step = (X[:, 1] - X[:, 0]).numpy()
    unit = step / np.linalg.norm(step, axis=1, keepdims=True)
    cosines = unit @ unit.T
    assert math.isclose(
        float(found.parallel[0]), cosines[~np.eye(40, dtype=bool)].mean(), abs_tol=1e-12
    )

    def near(rows: np.ndarray) -> list[set[int]]:
        distance = ((rows[:, None] - rows[None]) ** 2).sum(-1)
        np.fill_diagonal(distance, np.inf)
        return [set(r) for r in distance.argsort(1)[:, :5]]

    shared = [len(a & b) / 5 for a, b in zip(near(X[:, 0].numpy()), near(X[:, 1].numpy()))]
    assert math.isclose(float(found.neighbours[0]), float(np.mean(shared)), abs_tol=1e-12)
    assert found.neighbours_chance == 5 / 39  # one's own place is no candidate
    assert abs(float(found.neighbours[0]) - found.neighbours_chance) < 0.1


def test_trajectories_that_stand_still_are_counted():
    X = noise(6, 1, 4).expand(6, 3, 4).clone()
    X[0, 1] += 1
    found = bundle(X, k=2)
    assert found.degenerate == 10
    assert math.isnan(float(found.straightness[1]))
    assert float(found.straightness[0]) == 0


def test_outliers_are_reported_also_where_norms_are_constant():
    X = noise(200, 3, 8, seed=7)
    X[17, 2] *= 60
    assert outliers(X) == (17,)
    assert outliers(X, factor=1e6) == ()
    flat = torch.ones(5, 1, 2)
    flat[4] = 1.5
    assert outliers(flat) == (4,)


# maps from state to state


@LAWS
@given(
    SIZES,
    st.sampled_from(["greedy", "sign", "hungarian", "none"]),
    st.sampled_from(["U", "V"]),
    st.booleans(),
)
def test_the_flow_matches_second_moments_exactly(size, align, signs, centered):
    n, states, d, seed = size
    X = noise(n, states, d, seed=seed)
    f = fit_aligned_bases(X, align=align, centered=centered)
    moved = flow_map(f, 0, states - 1, signs=signs)(X[:, 0]) - f.center[-1]
    true = X[:, -1] - f.center[-1]
    keep = f.S[0] > 1e-6 * f.S[0].max()
    if bool(keep.all()):
        assert torch.allclose(moved.mT @ moved, true.mT @ true, atol=1e-7)
        overlap = f.overlap[0, -1].abs() if signs == "V" else f.overlap[0, -1]
        energy = 2 * (f.S[-1] ** 2 * (1 - overlap)).sum()
        assert math.isclose(
            float((moved - true).square().sum()), float(energy), rel_tol=1e-6, abs_tol=1e-7
        )


def test_second_moments_do_not_match_when_singular_values_are_not_permuted_with_their_vectors():
    X = noise(30, 2, 5, seed=8) * torch.tensor([5.0, 4, 3, 2, 1]).double()
    X[:, 1] = X[:, 1].flip(-1)
    f = fit_aligned_bases(X, align="greedy")
    assert f.order[1].tolist() != list(range(5))
    true = X[:, 1].mT @ X[:, 1]
    right = flow_map(f, 0, 1)(X[:, 0])
    assert torch.allclose(right.mT @ right, true, atol=1e-9)
    published = (X[:, 0] @ f.U[0] * (f.S[1].sort(descending=True).values / f.S[0])) @ f.U[1].mT
    assert not torch.allclose(published.mT @ published, true, rtol=0.05)


@LAWS
@given(SIZES)
def test_v_signs_minimise_the_residual_over_all_signs(size):
    n, _, d, seed = size
    d = min(d, 4)
    X = noise(n, 2, d, seed=seed)
    f = fit_aligned_bases(X)
    best = float((X[:, 1] - flow_map(f, 0, 1, signs="V")(X[:, 0])).square().sum())
    for sign in itertools.product([-1.0, 1.0], repeat=f.rank):
        flipped = f.flipped(torch.stack([torch.ones(f.rank).double(), torch.tensor(sign).double()]))
        assert best <= float((X[:, 1] - flow_map(flipped, 0, 1)(X[:, 0])).square().sum()) + 1e-8


def test_directions_without_energy_are_dropped_and_counted():
    X = noise(20, 2, 4, seed=1)
    X[:, 0, 3] = 0
    found = flow_map(fit_aligned_bases(X), 0, 1)
    assert found.dropped == 1
    assert bool(torch.isfinite(found(X[:, 0])).all())


@LAWS
@given(st.integers(8, 30), st.integers(2, 6), st.integers(0, 10**6))
def test_maps_are_the_least_squares_solutions_of_their_kind(n, d, seed):
    x, y = noise(n, d, seed=seed), noise(n, d, seed=seed + 1) + 2
    expected = x.numpy() @ np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0]
    assert np.allclose(fit_map(x, y, "linear")(x), expected, atol=1e-8)
    assert np.allclose(fit_map(x, y, "shift")(x), (x + (y - x).mean(0)).numpy())
    assert np.allclose(fit_map(x, y, "mean")(x), y.mean(0).expand(n, -1).numpy())
    assert np.allclose(fit_map(x, y, "identity")(x), x.numpy())
    c = float((x * y).sum() / (x * x).sum())
    assert np.allclose(fit_map(x, y, "scaled")(x), c * x.numpy())
    errors = {
        map_type: score_map(fit_map(x, y, map_type)(x), y).relative_error for map_type in MAPS
    }
    assert errors["linear"] <= min(errors[k] for k in ("scaled", "identity", "flow")) + 1e-9


def test_the_mean_of_each_coordinate_explains_nothing():
    """R^2 is about the mean of each coordinate: that mean explains nothing, however far the
    coordinates' means are from one another."""
    y = noise(30, 4, seed=1) + torch.tensor([0.0, 5.0, -20.0, 100.0])
    assert score_map(y.mean(0).expand(30, -1), y).r2 == pytest.approx(0, abs=1e-12)
    assert score_map(y, y).r2 == 1


def test_ridge_is_the_best_affine_map_for_much_data_and_shrinks_for_little():
    W, b = noise(5, 5, seed=3), noise(5, seed=4)
    x = noise(400, 5, seed=5)
    y = x @ W + b
    assert torch.allclose(fit_map(x, y, "ridge")(x), y, atol=1e-3)
    few, many = noise(14, 12, seed=6), noise(300, 12, seed=7)
    A = noise(12, 12, seed=8) * 0.1
    target = few @ A + noise(14, 12, seed=9)
    truth = many @ A + noise(300, 12, seed=10)
    held = {
        k: score_map(fit_map(few, target, k)(many), truth).relative_error
        for k in ("ridge", "linear")
    }
    assert held["ridge"] < held["linear"]


@pytest.mark.parametrize(("n", "d"), [(20, 40), (20, 19), (20, 20)])
def test_ridge_shrinks_noise_where_a_map_can_fit_it_exactly(n: int, d: int) -> None:
    """With n - 1 directions for n trajectories the criterion is 0 / 0 at small penalties, and
    rounding must not decide it."""
    fits = [fit_map(noise(n, d, seed=s), noise(n, d, seed=s + 50), "ridge") for s in range(12)]
    assert min(fit.penalty for fit in fits) > 0.1


def test_with_few_trajectories_the_linear_map_is_perfect_in_sample_and_not_held_out():
    train, test = noise(8, 2, 20, seed=0), noise(8, 2, 20, seed=1)
    linear = fit_map(train[:, 0], train[:, 1], "linear")
    inside, outside = (
        score_map(linear(part[:, 0]), part[:, 1]).relative_error for part in (train, test)
    )
    assert inside < 1e-9
    assert outside > 0.5


def test_a_planted_rotation_and_stretch_is_extrapolated_exactly():
    U = orthogonal(2, 6, 2)
    Y = torch.linalg.qr(noise(50, 6, seed=3)).Q
    S = torch.tensor([[6.0, 5, 4, 3, 2, 1], [9.0, 7, 5, 3, 2, 1.5]]).double()
    X = torch.stack([(Y * S[t]) @ U[t].mT for t in range(2)], dim=1)
    f = fit_aligned_bases(X, align="none")
    assert score_map(flow_map(f, 0, 1, signs="V")(X[:, 0]), X[:, 1]).relative_error < 1e-9


@LAWS
@given(st.integers(5, 60), st.integers(1, 5), st.integers(0, 10**6))
def test_residual_statistics_against_scipy(n, d, seed):
    r = noise(n, d, seed=seed).exp() + 0.3
    found = residual_statistics(r)
    a = r.numpy()
    m, v, k = a.mean(0), a.var(0, ddof=1), scipy.stats.kurtosis(a, bias=False)
    assert math.isclose(found.mean_over_sd, np.mean(np.abs(m) / np.sqrt(v)), rel_tol=1e-9)
    assert math.isclose(found.log_variance, np.mean(np.log(v)), rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(found.abs_kurtosis, np.mean(np.abs(k)), rel_tol=1e-7)
    assert math.isclose(found.mean_over_variance, np.mean(np.abs(m / v)), rel_tol=1e-9)
    assert math.isclose(found.log10_mean_variance, np.log10(v.mean()), rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(
        found.mean_abs_kurtosis_minus_3, np.mean(np.abs(k + 3)) - 3, rel_tol=1e-7, abs_tol=1e-7
    )


def test_published_averages_differ_from_the_text_where_it_matters():
    r = noise(400, 6, seed=1) * torch.tensor([0.1, 0.2, 1, 2, 5, 9]).double() + 1
    s = residual_statistics(r)
    assert s.mean_over_variance > 3 * s.mean_over_sd
    assert abs(s.log10_mean_variance * math.log(10) - s.log_variance) > 1
    flat = torch.rand(4000, 6, generator=torch.Generator().manual_seed(0))  # kurtosis 1.8 < 3
    assert (
        residual_statistics(flat).mean_abs_kurtosis_minus_3
        < 0
        < residual_statistics(flat).abs_kurtosis
    )


def test_constant_coordinates_are_left_out_and_counted():
    r = noise(20, 3)
    for constant in (4.0, 0.0):  # 0 has no roundings
        r[:, 1] = constant
        assert residual_statistics(r).degenerate == 1
    assert math.isclose(
        residual_statistics(r).log_variance,
        residual_statistics(r[:, [0, 2]]).log_variance,
        rel_tol=1e-12,
    )
    assert math.isnan(residual_statistics(torch.ones(6, 2)).log_variance)


def test_residual_maps_cover_every_pair_once():
    X = noise(30, 4, 5, seed=2)
    seen: list[tuple[int, int]] = []
    maps = residual_maps(
        X, partial(flow_map, fit_aligned_bases(X)), collect=lambda s, t, r: seen.append((s, t))
    )
    assert seen == [(s, t) for s in range(4) for t in range(s + 1, 4)]
    assert bool(torch.isfinite(maps.log_variance).eq(torch.ones(4, 4).triu(1).bool()).all())


# noise law


@pytest.mark.parametrize("law", ["asymptotic", "increment"])
@LAWS
@given(alpha=st.floats(0.05, 3.0), rate=st.floats(0.05, 0.5), seed=st.integers(0, 1000))
def test_noise_law_recovers_its_parameters(law, alpha, rate, seed):
    states = 8
    t = torch.arange(1, states + 1).double()
    v = alpha * torch.exp(rate * t)[None].expand(states, -1)
    if law == "increment":
        v = v * (1 - torch.exp(-rate * (t[None] - t[:, None]))).abs()
    values = v.clamp(min=1e-300).log() + 0.01 * noise(states, states, seed=seed)
    values[~torch.ones(states, states).triu(1).bool()] = math.nan
    found = fit_noise_law(values, law=law)
    assert math.isclose(found.alpha, alpha, rel_tol=0.06)
    assert math.isclose(found.rate, rate, rel_tol=0.05)
    assert found.pairs == 28
    other = fit_noise_law(values, law="increment" if law == "asymptotic" else "asymptotic")
    assert found.aic < other.aic
    start, end = torch.tensor([2.0]), torch.tensor([5.0])
    assert math.isclose(float(found.variance(start, end)), float(v[1, 4]), rel_tol=0.1)


def test_noise_of_one_strength_keeps_its_variance():
    """lambda is zero, or as good as zero; alpha |lambda| is the variance per layer."""
    t = torch.arange(1, 9).double()
    law = fit_noise_law((0.5 * (t[None] - t[:, None])).log(), law="increment")
    assert abs(law.rate) < 1e-6
    assert math.isclose(law.alpha * abs(law.rate), 0.5, rel_tol=1e-6)
    still = law._replace(rate=0.0)
    assert math.isclose(
        float(still.variance(t[:1], t[2:3]) / still.variance(t[:1], t[1:2])), 2, rel_tol=1e-9
    )


def test_unknown_pairs_do_not_count():
    t = torch.arange(1, 9).double()
    values = (0.2 * t).expand(8, 8).clone()
    values[:, 7] += 9
    values[0] -= 5
    assert fit_noise_law(values).rate > 0.5
    values[:, 7] = torch.nan
    values[0] = torch.nan
    clean = fit_noise_law(values)
    assert math.isclose(clean.rate, 0.2, rel_tol=1e-9)
    assert clean.pairs == 15
    values[2:] = torch.nan
    values[1, :-2] = torch.nan
    with pytest.raises(
        GeometryError,
        match=r"expected at least 3 with a finite variance, got 1\. Use more states",
    ):
        fit_noise_law(values)


def test_unknown_laws_are_listed():
    with pytest.raises(
        GeometryError, match="law: expected one of 'asymptotic', 'increment', got 'cubic'"
    ):
        fit_noise_law(torch.zeros(4, 4), law="cubic")


# isotropy and Gaussianity


def test_isotropy_tests_accept_isotropic_noise_also_when_coordinates_outnumber_trajectories():
    p = [isotropy_tests(noise(40, 80, seed=s)).sphericity_p for s in range(40)]
    assert 0.2 < float(np.mean(p)) < 0.8
    assert sum(v < 0.05 for v in p) <= 6
    found = isotropy_tests(noise(300, 20, seed=1))
    assert abs(found.correlation / found.correlation_chance - 1) < 0.1
    assert abs(found.participation / found.participation_chance - 1) < 0.03
    assert found.variance_cv < 2 * found.variance_cv_chance
    assert found.gaussian_rejected == 0


def test_a_coordinate_that_varies_by_rounding_alone_is_left_out():
    x = noise(300, 20, seed=1)
    x[:, 3] = 0.1
    x[::2, 3] = torch.nextafter(x[0, 3], torch.ones(()).double())
    assert float(x.var(0)[3]) > 0
    found = isotropy_tests(x)
    assert found.degenerate == residual_statistics(x).degenerate == 1
    assert found.sphericity_p > 0.01
    assert isotropy_tests(noise(300, 20, seed=1)).degenerate == 0


@pytest.mark.parametrize("spoil", ["stretch", "correlate", "tails"])
def test_isotropy_tests_see_each_violation(spoil):
    x = noise(300, 20, seed=2)
    if spoil == "stretch":
        x[:, 0] *= 3
        found = isotropy_tests(x)
        assert found.variance_cv > 3 * found.variance_cv_chance
        assert found.sphericity_p < 1e-3
    elif spoil == "correlate":
        found = isotropy_tests(x + 2 * x[:, :1])
        assert found.correlation > 3 * found.correlation_chance
        assert found.sphericity_p < 1e-3
    else:
        found = isotropy_tests(x**3)
        assert found.gaussian_rejected == 1


@LAWS
@given(st.integers(8, 80), st.integers(0, 10**6))
def test_anderson_darling_by_the_textbook_sum(n, seed):
    x = np.sort(noise(n, seed=seed).numpy())
    w = (x - x.mean()) / x.std(ddof=1)
    logcdf, logsf = scipy.stats.norm.logcdf(w), scipy.stats.norm.logsf(w)
    i = np.arange(1, n + 1)
    expected = -n - np.sum((2 * i - 1.0) / n * (logcdf + logsf[::-1]))
    assert math.isclose(
        float(anderson_darling(torch.from_numpy(x)[:, None])), expected, rel_tol=1e-9
    )


def test_normality_p_values_are_uniform_under_the_null():
    p = normality_p(noise(60, 2000, seed=3)).numpy()
    for level in (0.01, 0.05, 0.2, 0.5):
        assert abs((p < level).mean() - level) < 4 * math.sqrt(level * (1 - level) / 2000) + 0.005
    assert bool((normality_p(torch.ones(9, 2)) == 1).all())


# anomalies


def test_least_absolute_deviations_pass_by_the_outliers():
    x = torch.stack([torch.ones(9), torch.arange(9.0)], dim=1).double()
    y = x @ torch.tensor([2.0, -0.5]).double()
    y[[1, 4, 8]] += torch.tensor([50.0, -3.0, 7.0]).double()
    assert _least_absolute(x, y).tolist() == pytest.approx([2.0, -0.5])
    assert torch.linalg.lstsq(x, y).solution.tolist() != pytest.approx([2.0, -0.5], abs=1)


def test_the_planted_layer_is_the_only_anomaly():
    t = torch.arange(1, 13).double()
    values = (
        0.2 * t[None]
        + 0.5 * (t[None] - t[:, None]).clamp(min=1).log()
        + 0.02 * noise(12, 12, seed=4)
    )
    values[~torch.ones(12, 12).triu(1).bool()] = math.nan
    assert not bool(layer_anomalies(values).flagged[2:].any())
    values[:, 11] += 2
    found = layer_anomalies(values)
    assert int(found.excess[1:].argmax()) == 10
    assert bool(found.flagged[11])
    assert math.isnan(float(found.z[0]))
    assert bool(torch.isnan(layer_anomalies(values[:3, :3]).z).all())  # too few layers to say


def test_one_layer_that_deviates_where_all_others_agree_is_infinitely_far():
    values = torch.zeros(9, 9).double()
    values[:, 5] = 7
    values[~torch.ones(9, 9).triu(1).bool()] = math.nan
    found = layer_anomalies(values)
    assert found.z[1:].tolist() == [math.inf if b == 5 else 0 for b in range(1, 9)]
    assert found.flagged.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("states", [5, 11, 23])
def test_one_null_run_in_twenty_flags_any_layer(states: int):
    """Another generator draws the deviations; the fixed limit of 3.5 of before fails the bound."""
    z = np.random.default_rng(1).standard_normal((20_000, states))
    away = np.abs(z - np.median(z, axis=1, keepdims=True))
    largest = (away / (1.4826 * np.median(away, axis=1, keepdims=True))).max(1)
    limit = familywise_threshold(states)
    assert 0.045 < (largest > limit).mean() < 0.055
    assert (largest > 3.5).mean() > 0.07


def test_anomalies_use_the_familywise_limit_of_the_layers_known():
    t, g = torch.arange(1, 13).double(), torch.Generator().manual_seed(3)
    flagged = fixed = 0
    for _ in range(60):
        values = 0.2 * t + torch.randn(12, generator=g).double() + 0 * t[:, None]
        values[~torch.ones(12, 12).triu(1).bool()] = math.nan
        found = layer_anomalies(values)
        assert torch.equal(found.flagged, found.z.abs().nan_to_num() > familywise_threshold(11))
        flagged += bool(found.flagged.any())
        fixed += bool((found.z.abs() > 3.5).any())
    assert flagged < fixed
    assert flagged <= 7
