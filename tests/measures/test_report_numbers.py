"""The numbers of the reports by numpy: every measure of a window, nulls by their laws, documents of
few contexts, what is left out and what is said about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.linalg
import torch
from screenot.ScreeNOT import adaptiveHardThresholding
from torch import Tensor

from tests.measures.test_reports import basis_of, gaussian
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition import resampling
from tl_geometry.measures import contextual
from tl_geometry.measures.comparison import compare_bases
from tl_geometry.measures.context_report import contextual_report
from tl_geometry.measures.position_report import positional_report
from tl_geometry.measures.state_measures import StateMeasures

pytestmark = pytest.mark.once

CONTEXTS, POSITIONS, D = 32, 20, 12
FIRST = 2
"""Where the window starts."""


def states(contexts: int = CONTEXTS, *, seed: int = 0, count: int = 2) -> Tensor:
    """States ``[state context position d_model]`` with a curve of three directions."""
    t = torch.linspace(0, 2 * math.pi, POSITIONS + FIRST, dtype=torch.float64)
    curve = torch.stack([t.cos(), t.sin(), 0.4 * (2 * t).cos()], 1) @ gaussian(50, 3, D)
    return curve + 0.7 * gaussian(seed, count, contexts, POSITIONS + FIRST, D) + gaussian(51, D)


def by_numpy(P: np.ndarray, k: int, strategy: str, frequencies: int) -> dict[str, float]:
    """Measures of a basis that depend on it alone."""
    s, axes = np.linalg.svd(P)[1:]
    _, threshold, rank = adaptiveHardThresholding(P, k, strategy=strategy)
    unit = P / np.linalg.norm(P, axis=1, keepdims=True)
    F = np.asarray(scipy.fft.dctn(unit @ unit.T, norm="ortho"))
    reflected, largest = np.concatenate([P, P[::-1]]), (P**2).sum(1).max()
    first = len(P) * (reflected - np.roll(reflected, 1, 0))
    second = len(P) * (first - np.roll(first, 1, 0))
    steps = 1 - (unit[:-1] * unit[1:]).sum(1)
    x, y = (P @ axes[:2].T).T
    turns = np.diff(np.unwrap(np.arctan2(y, x))[[0, -1]]) / (2 * math.pi)
    return {
        "rank": rank,
        "threshold": threshold,
        "stable_rank": (s**2).sum() / s[0] ** 2,
        "explained": s[:rank].sum() / s.sum(),
        "explained_energy": (s[:rank] ** 2).sum() / (s**2).sum(),
        "low_frequency": F.diagonal()[:frequencies].sum() / len(P),
        "off_diagonal": 1 - (F.diagonal() ** 2).sum() / (F**2).sum(),
        "smoothness": (first**2).sum(1).max() / largest,
        "smoothness_2": (second**2).sum(1).max() / largest,
        "fracture": steps.max() / np.median(steps),
        "fracture_at": FIRST + steps.argmax(),
        "roughness": (np.diff(P, axis=0) ** 2).sum() / (P**2).sum(),
        "winding": abs(turns[0]),
    }


def test_every_positional_measure_of_a_window_by_numpy() -> None:
    h = states()
    basis = basis_of(h, window=(FIRST, POSITIONS + FIRST))
    found = positional_report(basis, k=3, strategy="w", frequencies=2, nulls=False)
    for i in range(2):
        P = (h[i, :, FIRST:].mean(0) - h[i, :, FIRST:].mean((0, 1))).numpy()
        expected = by_numpy(P, 3, "w", 2)
        for name, value in expected.items():
            value_here = abs(float(found[name][i])) if name == "winding" else float(found[name][i])
            assert value_here == pytest.approx(value, rel=1e-4), name
        assert set(found.values) == {*expected, *RELATIVE, "split_half"}
        assert 0 < expected["rank"] < D
        assert expected["winding"] > 0.8
        gram = P @ P.T / np.outer(*2 * [np.linalg.norm(P, axis=1)])
        spectrum = np.asarray(scipy.fft.dctn(gram, norm="ortho"))
        assert np.allclose(found.fourier[i], spectrum[:2, :2])
    assert (found.k, found.blocks, found.draws, found.nulls) == (3, 4, 8, {})
    assert found.provenance.window is not None
    assert found.provenance.window[0] == FIRST


RELATIVE = ("relative_norm", "relative_norm_reference")
DRAWS = 40


@pytest.fixture(scope="module")
def with_nulls() -> Any:
    return positional_report(basis_of(states()), draws=DRAWS, seed=3, k=4, jackknife=False)


def test_nulls_of_position_have_the_energy_and_the_roughness_of_random_rows(
    with_nulls: Any,
) -> None:
    """Rows in random order, and Gaussian rows, have roughness 2 in expectation; the leading
    singular value of the latter is that of a Gaussian matrix of the energy of the basis."""
    h, g = states(), np.random.default_rng(0)
    for null in ("shuffled", "isotropic"):
        error = with_nulls.spreads["roughness", null] / DRAWS**0.5
        assert ((with_nulls.nulls["roughness", null] - 2).abs() < 4 * error).all()
        assert (error < 0.1).all()
    rows = g.normal(size=(400, POSITIONS + FIRST, D))
    rows -= rows.mean(1, keepdims=True)
    top = np.linalg.norm(rows, 2, axis=(1, 2)) / np.linalg.norm(rows, axis=(1, 2))
    for i in range(2):
        M = h[i] - h[i].mean((0, 1))
        size = float(torch.linalg.matrix_norm(M.flatten(0, 1), 2)) / CONTEXTS**0.5
        expected = float(torch.linalg.vector_norm(M.mean(0))) * top.mean() / size
        found = float(with_nulls.nulls["relative_norm", "isotropic"][i])
        assert found == pytest.approx(expected, rel=0.03)


def test_the_noise_of_position_is_the_mean_over_half_as_many_draws(with_nulls: Any) -> None:
    basis = basis_of(states())
    two = positional_report(basis, draws=2, seed=3, jackknife=False)
    for i in range(2):
        noise = resampling.window_means(basis, i, resampling.noise_weights(basis, DRAWS // 2, 3))
        P = (noise - noise.mean(1, keepdim=True)).numpy()
        rough = (np.diff(P, axis=1) ** 2).sum((1, 2)) / (P**2).sum((1, 2))
        assert float(with_nulls.nulls["roughness", "noise"][i]) == pytest.approx(rough.mean())
        assert float(two.nulls["roughness", "noise"][i]) == pytest.approx(rough[0])
        top = np.linalg.norm(P, 2, axis=(1, 2)) ** 2
        stable = ((P**2).sum((1, 2)) / top).mean()
        assert float(with_nulls.nulls["stable_rank", "noise"][i]) == pytest.approx(stable)
    assert with_nulls.draws == DRAWS


def test_which_nulls_and_spreads_a_positional_report_has(with_nulls: Any) -> None:
    """No null of what means nothing on average; no spread of noise, which the errors show; none at
    all where a basis has one dimension or one position."""
    ordered = {"low_frequency", "off_diagonal", "smoothness", "smoothness_2", "fracture"}
    ordered |= {"roughness"}
    spectral = {"rank", "threshold", "stable_rank", "explained", "explained_energy", *RELATIVE}
    names = {
        null: {n for n, of in with_nulls.nulls if of == null}
        for null in ("shuffled", "noise", "isotropic")
    }
    both = ordered | spectral
    assert names == {"shuffled": ordered, "noise": both, "isotropic": both}
    assert with_nulls.spreads.keys() == {key for key in with_nulls.nulls if key[1] != "noise"}
    columns = with_nulls.columns()
    assert {"roughness_shuffled", "roughness_shuffled_sd", "rank_noise"} <= set(columns)
    assert "rank_noise_sd" not in columns
    h = states()
    counts = [
        len(positional_report(basis_of(part), jackknife=False).nulls)
        for part in (h[..., :1], h[:, :, :1], h[..., :2], h[:, :, :2])
    ]
    assert [n > 0 for n in counts] == [False, False, True, True]


@pytest.mark.parametrize("report", [positional_report, contextual_report])
def test_a_report_has_eight_draws_of_seed_0(report: Callable[..., StateMeasures]) -> None:
    """Whatever else draws random numbers."""
    basis = basis_of(states(count=1))
    made = []
    for number, options in enumerate(({}, {"draws": 8, "seed": 0}, {"seed": 1})):
        torch.manual_seed(number)
        made.append(report(basis, jackknife=False, **options))
    plain, same, other = made
    assert plain.draws == 8
    assert all(torch.equal(value, same.nulls[key]) for key, value in plain.nulls.items())
    drawn = [key for key, value in plain.nulls.items() if not torch.equal(value, other.nulls[key])]
    assert {null for _, null in drawn} == {null for _, null in plain.nulls} - {"random"}


@pytest.mark.parametrize("report", [positional_report, contextual_report])
def test_one_draw_has_no_spread(report: Callable[..., StateMeasures]) -> None:
    """And warns of nothing."""
    found = report(basis_of(states(count=1)), jackknife=False, draws=1)
    assert found.nulls
    assert not found.spreads


# --- Context --------------------------------------------------------------------------------------
# ------------------


def test_nulls_of_shuffled_documents_do_not_depend_on_other_random_numbers() -> None:
    basis, labels = basis_of(states(count=1)), torch.arange(CONTEXTS) % 2
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(contextual_report(basis, labels, jackknife=False, draws=2))
    assert {null for _, null in found[0].nulls} == {"random", "flipped", "exchanged", "shuffled"}
    assert all(torch.equal(value, found[1].nulls[key]) for key, value in found[0].nulls.items())
    compact = [key for key in found[0].nulls if "compactness" in key[0]]
    assert len(compact) == 2
    assert all(bool(found[0].spreads[key] > 0) for key in compact)


def test_flipped_signs_turn_a_shared_line_or_leave_it() -> None:
    """Two coordinates that are always equal: flipped, pos and ctx are parallel or orthogonal."""
    line = torch.ones(2, dtype=torch.float64)
    h = (gaussian(1, 1, CONTEXTS, 1, 1) + gaussian(2, 1, 1, POSITIONS, 1)) * line
    found = contextual_report(basis_of(h), jackknife=False, draws=16)
    assert float(found["incoherence_avg"]) == pytest.approx(1)
    for name in ("max", "avg"):
        kept = 16 * float(found.nulls[f"incoherence_{name}", "flipped"])
        assert kept == pytest.approx(round(kept), abs=1e-6)
        assert 0 < round(kept) < 16
        spread = np.std([1.0] * round(kept) + [0.0] * (16 - round(kept)), ddof=1)
        assert float(found.spreads[f"incoherence_{name}", "flipped"]) == pytest.approx(spread)
    by_chance = contextual.cosine_baseline(2, CONTEXTS * POSITIONS)
    assert [
        float(found.nulls[f"incoherence_{name}", "random"]) for name in ("max", "avg", "rms")
    ] == pytest.approx([by_chance.max, by_chance.avg, by_chance.rms])


@pytest.mark.parametrize("samples", [9, 10])
def test_windows_are_exchanged_where_10_are_kept(samples: int) -> None:
    found = contextual_report(basis_of(states(), keep=samples), jackknife=False)
    names = {measure for measure, null in found.nulls if null == "exchanged"}
    assert names == ({"incoherence_avg", "incoherence_rms"} if samples == 10 else set())


def test_two_documents_are_compared_and_one_is_not() -> None:
    """A plain report has no remarks."""
    basis = basis_of(states())
    two, one = (
        contextual_report(basis, ["a"] * n + ["b"] * (CONTEXTS - n), rank=3) for n in (16, CONTEXTS)
    )
    assert two.names == ("a", "b")
    assert two.similarity is not None
    assert two.similarity.shape == (2, 2, 2)
    assert "intra" not in one.values
    assert (one.names, one.similarity) == ((), None)
    bare = contextual_report(basis_of(states(), second_moments=False), rank=3)
    for found in (two, one, bare):
        assert found.provenance.flags == basis.flags() == ()
        assert found.errors["overlap"].isfinite().all(), "from 32 contexts on"
    without = contextual_report(basis, [0] * 16 + [1] * 16, nulls=False)
    assert not without.nulls
    assert not without.spreads


def brute_compactness(x: np.ndarray, labels: np.ndarray, ridge: float) -> float:
    within, between, d = 0, 0, x.shape[1]
    for k in np.unique(labels):
        part = x[labels == k]
        within = within + (part - part.mean(0)).T @ (part - part.mean(0)) / len(x)
        offset = part.mean(0) - x.mean(0)
        between = between + len(part) * np.outer(offset, offset) / len(x)
    within = within + ridge * np.trace(within) / d * np.eye(d)
    return float(np.trace(between @ np.linalg.inv(within)))


def test_compactness_of_documents_of_one_context_with_its_options() -> None:
    h = states(count=1)
    labels = np.r_[[0], [1], [2] * (CONTEXTS - 2)]
    points = h[0].flatten(0, 1).numpy()
    rows = labels.repeat(POSITIONS + FIRST)
    scale = (len(points) - 3) / 2
    cases: list[tuple[dict[str, Any], float, float]] = [
        ({}, 1.0, 0.0),
        ({"norm": "dof"}, scale, 0.0),
        ({"ridge": 0.3}, 1.0, 0.3),
    ]
    for options, factor, ridge in cases:
        found = contextual_report(
            basis_of(h), torch.from_numpy(labels), jackknife=False, nulls=False, **options
        )
        expected = factor * brute_compactness(points, rows, ridge)
        assert float(found["compactness_raw"]) == pytest.approx(expected, rel=1e-6)


def test_compactness_needs_as_many_points_as_coordinates() -> None:
    """N - K of them; principal components may be one alone."""
    for contexts, enough in ((D + 2, True), (D + 1, False)):
        x = gaussian(7, 1, contexts, 1, D)
        labels = [0, 1] + [1] * (contexts - 2)
        found = contextual_report(basis_of(x), labels, jackknife=False, nulls=False)
        assert bool(found["compactness_raw"].isfinite().all()) == enough
        plane = contextual_report(
            basis_of(x), labels, jackknife=False, nulls=False, space=("pca", 1)
        )
        assert bool(plane["compactness_raw"].isfinite().all())
        ridged = contextual_report(basis_of(x), labels, jackknife=False, nulls=False, ridge=0.1)
        assert bool(ridged["compactness_raw"].isfinite().all())


def test_overlap_of_one_direction_is_the_squared_cosine() -> None:
    h = states()
    found = contextual_report(basis_of(h), rank=1, jackknife=False)
    for i in range(2):
        M = (h[i] - h[i].mean((0, 1))).numpy()
        pos, ctx = (np.linalg.svd(x)[2][0] for x in (M.mean(0), M.mean(1)))
        assert float(found["overlap"][i]) == pytest.approx((pos @ ctx) ** 2)
    assert found.nulls["overlap", "random"].tolist() == [1 / D] * 2


def test_similarities_of_up_to_1024_contexts_are_whole() -> None:
    for contexts, flags in ((1024, ()), (1025, ("similarities from 1024 contexts",))):
        h = gaussian(5, 1, contexts, 3, 4)
        labels = torch.arange(contexts) % 2
        found = contextual_report(basis_of(h), labels, rank=1, jackknife=False, nulls=False)
        assert found.provenance.flags == flags


# --- Comparison -----------------------------------------------------------------------------------
# ------------------


def test_floors_are_those_of_the_noisier_basis_and_the_table_says_what_is_compared() -> None:
    """Halves are every other block of eight contexts."""
    h = [states(64, seed=seed) for seed in (1, 2)]
    h[1] = h[1] + 2 * gaussian(9, *h[1].shape)
    found = compare_bases(*map(basis_of, h), rank=2, states=[1, (0, 1)])
    even = torch.arange(64) // 8 % 2 == 0
    floors: dict[str, list[Any]] = {"overlap": [], "procrustes": [], "difference": []}
    for x in (h[0][1], h[1][1]):
        halves = [x[part].mean(0) for part in (even, ~even)]
        A, B = ((half - half.mean(0)).numpy() for half in halves)
        spans = [np.linalg.svd(P)[2][:2].T for P in (A, B)]
        floors["overlap"].append((np.cos(scipy.linalg.subspace_angles(*spans)) ** 2).mean())
        size = np.linalg.norm(A) * np.linalg.norm(B)
        floors["procrustes"].append(np.linalg.norm(A.T @ B, "nuc") / size)
        floors["difference"].append(np.linalg.norm(A - B) / size**0.5)
    assert float(found.overlap_floor[0]) == pytest.approx(min(floors["overlap"]))
    assert float(found.procrustes_floor[0]) == pytest.approx(min(floors["procrustes"]))
    assert float(found.difference_floor[0]) == pytest.approx(max(floors["difference"]))
    means = [x[1].mean((0, 1)) for x in h]
    assert float(found.mean_cosine[0]) == pytest.approx(
        float(torch.cosine_similarity(means[0], means[1], 0))
    )
    table = found.to_dataframe()
    assert table[["state_a", "state_b", "rank"]].to_numpy().tolist() == [[1, 1, 2], [0, 1, 2]]
    assert table["overlap_random"].tolist() == [2 / D] * 2


def test_states_of_both_bases_are_compared_along_one_direction_at_least() -> None:
    a, b = (basis_of(states(count=n), states=range(n)) for n in (3, 2))
    assert compare_bases(a, b, rank=1).pairs == ((0, 0), (1, 1))
    noise = [basis_of(gaussian(seed, 1, 64, POSITIONS, d)) for seed, d in ((1, D), (2, D), (3, 3))]
    assert compare_bases(*noise[:2]).rank == (1,)
    assert compare_bases(noise[2], noise[2]).rank == (1,), "too small for an estimate"


def test_a_basis_without_position_is_like_no_other() -> None:
    some, none = basis_of(states()), basis_of(torch.ones(2, CONTEXTS, POSITIONS + FIRST, D))
    with pytest.raises(GeometryError, match=r"rank: expected 1 to .* directions, got 0"):
        compare_bases(some, some, rank=0)
    for pair in ((some, none), (none, some)):
        found = compare_bases(*pair, rank=1)
        assert found.procrustes.tolist() == [0, 0]
        assert found.difference.isnan().all()
    small = basis_of(1e-6 * states())
    itself = compare_bases(small, small, rank=1)
    assert itself.procrustes.tolist() == pytest.approx([1, 1])
    assert itself.difference.tolist() == pytest.approx([0, 0], abs=1e-6)
