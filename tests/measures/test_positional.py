"""Laws of the positional measures: bounds, invariances, identities, planted answers, oracles,
degenerate cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from screenot.ScreeNOT import adaptiveHardThresholding
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import GeometryError
from tl_geometry.measures import differences as diff
from tl_geometry.measures import positional
from tl_geometry.measures import rank as ranks

pytestmark = pytest.mark.once

cases = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10_000)


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def centred(seed: int, *shape: int) -> Tensor:
    rows = gaussian(seed, *shape)
    return rows - rows.mean(-2, keepdim=True)


def orthogonal(seed: int, size: int) -> Tensor:
    return torch.linalg.qr(gaussian(seed, size, size)).Q


def smooth_curve(positions: int, d_model: int, frequencies: int, seed: int) -> Tensor:
    """Cosines 1..frequencies along random directions, with amplitudes falling as 1 / frequency."""
    weight = 1 / torch.arange(1, frequencies + 1, dtype=torch.float64)
    return (
        linalg.dct_matrix(positions)[1 : frequencies + 1].T
        * weight
        @ gaussian(seed, frequencies, d_model)
    )


def estimate(matrix: Tensor, strategy: str) -> ranks.RankEstimate:
    """ScreeNOT of a matrix."""
    s = torch.linalg.svdvals(matrix)
    return ranks.screenot(s, (len(matrix), matrix.shape[1]), k=8, strategy=strategy)


# --- ScreeNOT -------------------------------------------------------------------------------------
# ------------------


@cases
@given(seeds, st.integers(24, 40), st.integers(24, 60), st.sampled_from(["i", "w", "0"]))
def test_screenot_equals_the_authors_package(
    seed: int, rows: int, columns: int, strategy: str
) -> None:
    Y = (
        gaussian(seed, rows, columns) / columns**0.5
        + 2 * gaussian(seed + 1, rows, 3) @ gaussian(seed + 2, 3, columns) / columns
    )
    _, threshold, rank = adaptiveHardThresholding(Y.numpy(), 8, strategy=strategy)
    ours = estimate(Y, strategy)
    assert abs(float(ours.threshold) - threshold) < 2e-5
    assert int(ours.rank) == rank


@cases
@given(seeds, st.sampled_from([1e-150, 1e-9, 1e9, 1e120]), st.sampled_from(["i", "w", "0"]))
def test_screenot_is_invariant_to_scale_rotation_and_transposition(
    seed: int, scale: float, strategy: str
) -> None:
    Y = gaussian(seed, 40, 60) + 3 * gaussian(seed + 1, 40, 2) @ gaussian(seed + 2, 2, 60)
    base = estimate(Y, strategy)
    for other in (Y.T, orthogonal(seed, 40) @ Y, Y @ orthogonal(seed, 60)):
        assert int(estimate(other, strategy).rank) == int(base.rank)
        assert float(estimate(other, strategy).threshold) == pytest.approx(
            float(base.threshold), rel=1e-9
        )
    assert int(estimate(scale * Y, strategy).rank) == int(base.rank)
    assert float(estimate(scale * Y, strategy).threshold) == pytest.approx(
        scale * float(base.threshold), rel=1e-9
    )


def test_the_authors_package_is_not_scale_free_and_ours_is() -> None:
    Y = (
        gaussian(0, 60, 80) / 80**0.5 + 3 * torch.eye(60, 80) * (torch.arange(60) < 3)[:, None]
    ).numpy()
    _, tiny, _ = adaptiveHardThresholding(1e-6 * Y, 8)
    _, normal, _ = adaptiveHardThresholding(Y, 8)
    assert abs(tiny / 1e-6 - normal) > 0.1
    ours = estimate(torch.from_numpy(1e-6 * Y), "i")
    assert float(ours.threshold) / 1e-6 == pytest.approx(normal, abs=2e-5)


def test_threshold_of_white_noise_is_the_theoretical_one() -> None:
    """The asymptotic threshold of Gavish & Donoho 2014 for variance 1/n, at 400 x 400, within 2
    %."""
    s = torch.linalg.svdvals(torch.stack([gaussian(i, 400, 400) / 20 for i in range(3)]))
    beta = 1.0
    theory = math.sqrt(2 * (beta + 1) + 8 * beta / (beta + 1 + math.sqrt(beta**2 + 14 * beta + 1)))
    found = ranks.screenot(s, (400, 400), k=20)
    assert theory == pytest.approx(2.3094, abs=1e-4)
    assert ((found.threshold / theory - 1).abs() < 0.02).all()
    assert (found.rank == 0).all()


@pytest.mark.parametrize("strategy", ["i", "w", "0"])
def test_planted_rank_is_recovered_in_95_of_100_seeds(strategy: str) -> None:
    noise = gaussian(1, 100, 80, 100) / 10
    signal = torch.diag_embed(torch.tensor([5.0, 4.5, 4.0, 3.5], dtype=torch.float64))
    left, right = (
        torch.linalg.qr(gaussian(2, 100, 80, 4)).Q,
        torch.linalg.qr(gaussian(3, 100, 100, 4)).Q,
    )
    found = ranks.screenot(
        torch.linalg.svdvals(noise + left @ signal @ right.mT), (80, 100), k=8, strategy=strategy
    )
    assert int((found.rank == 4).sum()) >= 95
    weak = ranks.screenot(
        torch.linalg.svdvals(noise + left @ (signal / 5) @ right.mT),
        (80, 100),
        k=8,
        strategy=strategy,
    )
    assert int((weak.rank == 4).sum()) < 95  # below the noise the same rank is not seen


def test_screenot_batch_equals_one_by_one_and_degenerate_input_is_defined() -> None:
    s = torch.linalg.svdvals(gaussian(0, 3, 50, 30))
    whole = ranks.screenot(s, (50, 30), k=5)
    assert whole.threshold.tolist() == [
        float(ranks.screenot(x, (50, 30), k=5).threshold) for x in s
    ]
    zero = ranks.screenot(torch.zeros(2, 30), (30, 50), k=5)
    assert zero.rank.tolist() == [0, 0]
    exact = ranks.screenot(torch.tensor([3.0, 2.0] + [0.0] * 28), (30, 30), k=5)
    assert int(exact.rank) == 2


@pytest.mark.parametrize(
    ("k", "strategy", "text"),
    [(15, "i", "2k + 1 < 30"), (30, "w", "k < 30"), (0, "i", "k >= 1"), (3, "x", "one of 'i'")],
)
def test_screenot_refuses_a_k_that_is_too_large(k: int, strategy: str, text: str) -> None:
    with pytest.raises(GeometryError, match=text.replace("+", r"\+")):
        ranks.screenot(torch.ones(30), (30, 40), k=k, strategy=strategy)
    with pytest.raises(GeometryError, match="30 of a matrix"):
        ranks.screenot(torch.ones(29), (30, 40), k=2)


@given(st.integers(4, 2000), st.integers(1, 40))
def test_usable_k_is_always_accepted(p: int, k: int) -> None:
    used = ranks.usable_k(k, p)
    assert 1 <= used <= k
    assert 2 * used + 1 < p


# --- Singular values
# ------------------------------------------------------------------------------------------------


@cases
@given(seeds, st.integers(2, 12), st.integers(1, 12), st.integers(0, 12))
def test_stable_rank_and_explained_ratio_bounds(
    seed: int, positions: int, d_model: int, r: int
) -> None:
    P = centred(seed, 3, positions, d_model)
    s = torch.linalg.svdvals(P)
    stable = linalg.stable_rank(s)
    limit = torch.linalg.matrix_rank(P)
    assert ((stable >= 1 - 1e-12) & (stable <= limit + 1e-9)).all()
    assert (limit <= min(positions - 1, d_model)).all()
    for power in (1, 2):
        ratio = positional.explained_ratio(s, r, power=power)
        assert ((ratio >= 0) & (ratio <= 1 + 1e-12)).all()
        assert (positional.explained_ratio(s, r + 1, power=power) >= ratio - 1e-12).all()
    by_state = positional.explained_ratio(s, torch.tensor([0, 1, 99]))
    assert torch.allclose(
        by_state,
        torch.stack([torch.zeros(()).double(), s[1, 0] / s[1].sum(), torch.ones(()).double()]),
    )


def test_zero_basis_has_defined_values() -> None:
    zero = torch.zeros(6, 4, dtype=torch.float64)
    s = torch.zeros(4, dtype=torch.float64)
    assert linalg.stable_rank(s).isnan()
    for value in (
        positional.explained_ratio(s, 2),
        positional.low_frequency_share(zero),
        positional.roughness(zero),
        positional.fracture_score(zero).score,
        diff.smoothness(zero),
        positional.winding_number(zero[:, :2]),
        positional.off_diagonal_share(zero[:4]),
    ):
        assert value.isnan()
    assert not positional.normalized_gram(zero).any()
    assert float(positional.relative_norm(s, torch.eye(4).double(), 3)) == 0
    assert positional.relative_norm(s, torch.zeros(4, 4).double(), 3).isnan()


def random_states(
    seed: int, contexts: int = 6, positions: int = 5, d_model: int = 4, offset: float = 3.0
) -> Tensor:
    return (
        gaussian(seed, contexts, positions, d_model)
        + 2 * gaussian(seed + 1, positions, d_model)
        + offset * gaussian(seed + 2, d_model)
    )


@cases
@given(seeds, st.integers(1, 7), st.integers(2, 7), st.integers(1, 5))
def test_relative_norm_equals_the_brute_force_and_keeps_its_bounds(
    seed: int, contexts: int, positions: int, d_model: int
) -> None:
    h = random_states(seed, contexts, positions, d_model)
    M = h - h.mean((0, 1))
    P = M.mean(0)
    S = torch.einsum("cti,ctj->ij", M, M)
    s = torch.linalg.svdvals(P)
    tiled = np.tile(P.numpy(), (contexts, 1))
    paper = np.linalg.norm(tiled, 2) / np.linalg.norm(M.reshape(-1, d_model).numpy(), 2)
    reference = np.linalg.norm(tiled, 2) / np.linalg.norm(h.reshape(-1, d_model).numpy(), 2)
    ours = float(positional.relative_norm(s, S, contexts))
    raw = float(positional.relative_norm(s, torch.einsum("cti,ctj->ij", h, h), contexts))
    assert ours == pytest.approx(paper, rel=1e-9)
    assert raw == pytest.approx(reference, rel=1e-9)
    assert raw <= ours + 1e-12 <= 1 + 1e-9
    Q = orthogonal(seed, d_model)
    rotated = positional.relative_norm(torch.linalg.svdvals(7 * P @ Q), 49 * Q.T @ S @ Q, contexts)
    assert float(rotated) == pytest.approx(ours, rel=1e-9)


def test_published_relative_norm_depends_on_the_mean_and_the_exact_one_does_not() -> None:
    """The erratum: the published denominator holds the mean of the stream, so that moving the
    stream changes the number."""
    values = {}
    for offset in (0.0, 50.0):
        h = random_states(3, offset=offset)
        M = h - h.mean((0, 1))
        s, S = torch.linalg.svdvals(M.mean(0)), torch.einsum("cti,ctj->ij", M, M)
        raw = positional.relative_norm(s, torch.einsum("cti,ctj->ij", h, h), 6)
        values[offset] = (float(positional.relative_norm(s, S, 6)), float(raw))
    assert values[0.0][0] == pytest.approx(values[50.0][0], rel=1e-9)
    assert values[50.0][1] < values[0.0][1] / 5
    purely = torch.eye(4).double() - 0.25
    assert float(
        positional.relative_norm(torch.linalg.svdvals(purely), 6 * purely.T @ purely, 6)
    ) == pytest.approx(1)


# --- Gram and Fourier
# -----------------------------------------------------------------------------------------------


@cases
@given(seeds, st.integers(2, 20), st.integers(1, 6))
def test_normalized_gram_and_fourier_laws(seed: int, positions: int, d_model: int) -> None:
    P = centred(seed, positions, d_model)
    G = positional.normalized_gram(P)
    assert torch.allclose(G, G.T)
    assert torch.allclose(G.diagonal(), torch.ones(positions).double())
    assert (G.abs() <= 1 + 1e-12).all()
    assert torch.linalg.eigvalsh(G)[0] > -1e-9
    assert torch.linalg.matrix_rank(G, hermitian=True) <= d_model
    F = positional.fourier(G)
    assert np.allclose(F, np.asarray(scipy.fft.dctn(G.numpy(), type=2, norm="ortho")), atol=1e-9)
    assert np.allclose(np.asarray(scipy.fft.idctn(F.numpy(), type=2, norm="ortho")), G, atol=1e-9)
    assert float(F.trace()) == pytest.approx(positions)
    assert torch.linalg.eigvalsh((F + F.T) / 2)[0] > -1e-9
    rotated = positional.normalized_gram(P @ orthogonal(seed, d_model))
    assert torch.allclose(positional.fourier(rotated), F, atol=1e-9)
    share = float(positional.low_frequency_share(P, frequencies=5))
    assert share == pytest.approx(float(F.diagonal()[:5].sum()) / positions)


def test_low_frequency_curve_is_recovered_and_noise_is_not() -> None:
    curve = smooth_curve(128, 16, 4, seed=0)
    shares = positional.low_frequency_share(
        torch.stack([curve, curve[torch.randperm(128, generator=torch.Generator().manual_seed(1))]])
    )
    assert shares[0] > 0.95
    assert abs(float(shares[1]) - 10 / 128) < 0.1
    diagonal = positional.fourier(
        torch.linalg.qr(curve).Q[:, :4] @ torch.linalg.qr(curve).Q[:, :4].T
    )
    assert float(positional.off_diagonal_share(diagonal)) < 1e-9


# --- Differences
# -----------------------------------------------------------------------------------------


def stencil(G: np.ndarray, m: int) -> np.ndarray:
    """The two-dimensional definition of Delta^(m,m) on the reflected Gram matrix, iterated."""
    T = len(G)
    extended = np.block([[G, G[:, ::-1]], [G[::-1], G[::-1, ::-1]]])
    for _ in range(m):
        extended = T**2 * (
            extended
            - np.roll(extended, 1, 0)
            - np.roll(extended, 1, 1)
            + np.roll(extended, (1, 1), (0, 1))
        )
    return extended


@cases
@given(seeds, st.integers(2, 9), st.integers(1, 5), st.integers(1, 3))
def test_factored_differences_equal_the_stencil(
    seed: int, positions: int, d_model: int, m: int
) -> None:
    P = centred(seed, positions, d_model)
    expected = stencil((P @ P.T).numpy(), m)
    largest = float(np.abs(expected).max())
    assert float(diff.smoothness(P, m)) * float((P @ P.T).abs().max()) == pytest.approx(
        largest, rel=1e-8
    )
    assert float(diff.smoothness(P, 0)) == 1


# --- Shape of the curve
# ---------------------------------------------------------------------------------------------


@cases
@given(seeds, st.integers(3, 20), st.integers(2, 6))
def test_curve_measures_are_bounded_and_rotation_invariant(
    seed: int, positions: int, d_model: int
) -> None:
    P = centred(seed, 2, positions, d_model)
    Q = 3 * orthogonal(seed, d_model)
    rough = positional.roughness(P)
    assert ((rough >= 0) & (rough <= 4)).all()
    assert torch.allclose(positional.roughness(P @ Q), rough)
    assert torch.allclose(diff.smoothness(P @ Q, 2), diff.smoothness(P, 2))
    cosine = torch.nn.functional.cosine_similarity(P[:, :-1], P[:, 1:], dim=-1)
    assert torch.allclose(positional.adjacent_step(P), 1 - cosine)
    step = 1 - cosine.numpy()
    assert np.allclose(positional.fracture_score(P).score, step.max(-1) / np.median(step, -1))
    assert positional.fracture_score(P).argmax.tolist() == step.argmax(-1).tolist()


def test_fracture_is_found_where_it_was_planted() -> None:
    curve = smooth_curve(64, 32, 3, seed=4)
    broken = torch.cat([curve[:40], curve[40:] @ orthogonal(0, 32)])
    whole, cut = positional.fracture_score(curve), positional.fracture_score(broken)
    assert int(cut.argmax) == 39
    assert cut.score > 20 * whole.score
    assert positional.roughness(broken) > positional.roughness(curve)
    single = positional.fracture_score(torch.ones(1, 3))
    assert single.score.isnan()
    with_zero = curve.clone()
    with_zero[10] = 0
    assert positional.adjacent_step(with_zero).isnan().nonzero().flatten().tolist() == [9, 10]
    assert positional.fracture_score(with_zero).score.isfinite()


@pytest.mark.parametrize("turns", [-2.5, 0.25, 1.0, 3.75])
def test_winding_number_counts_turns(turns: float) -> None:
    angle = torch.linspace(0, turns * 2 * math.pi, 101, dtype=torch.float64)
    curve = (
        torch.stack([angle.cos(), angle.sin()], dim=-1)
        * torch.linspace(1, 3, 101, dtype=torch.float64)[:, None]
    )
    assert float(positional.winding_number(curve)) == pytest.approx(turns)
