"""W = V L V^T + D from factors: brute force, planted answers, optimality, exact nulls, invariances,
degenerate input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import HeadWeights
from tl_geometry.weights import bilinear
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.low_rank_diagonal import fit_low_rank_diagonal

pytestmark = pytest.mark.once

SEEDS = st.integers(0, 10_000)
fast = settings(deadline=None, max_examples=20)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(size: int, k: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, k, seed=seed)).Q


def random_factors(*, heads: int = 3, size: int = 12, width: int = 4, seed: int = 0) -> Factors:
    return Factors(
        normal(heads, size, width, seed=seed), normal(heads, size, width, seed=seed + 1) + 0.3
    )


def dense(factors: Factors) -> Tensor:
    return factors.left @ factors.right.mT


def without_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def from_dense(matrix: Tensor) -> Factors:
    return Factors(
        matrix, torch.eye(matrix.shape[-1], dtype=matrix.dtype).expand_as(matrix).contiguous()
    )


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@given(SEEDS)
@fast
def test_quantities_of_the_factors_equal_those_of_the_product(seed: int) -> None:
    f = random_factors(seed=seed)
    W = dense(f)
    close(f.diagonal, W.diagonal(dim1=-2, dim2=-1))
    close(f.energy, W.square().sum((-2, -1)))
    close(f.off_diagonal_energy, without_diagonal(W).square().sum((-2, -1)))
    close(f.trace_of_square, torch.stack([torch.trace(w @ w) for w in W]))


@given(SEEDS, st.integers(1, 5))
@fast
def test_structure_equals_the_dense_rotation(seed: int, k: int) -> None:
    f, V, U = random_factors(seed=seed), basis(12, 5, seed), basis(12, 6, seed + 1)
    eye = torch.eye(12, dtype=torch.float64)
    q_left, q_right = bilinear.complete(V, eye), bilinear.complete(U, eye)
    close(q_left.mT @ q_left, eye)
    close(q_left[:, :5], V)
    W_o = without_diagonal(dense(f))
    rotated = q_left.mT @ W_o @ q_right
    s = bilinear.structure(f, V, U, k=k)
    close(s.block, rotated[:, :5, :6])
    close(s.mean, rotated.mean((-2, -1)))
    close(s.std, torch.from_numpy(rotated.numpy().std((-2, -1))))
    close(s.threshold, math.sqrt(2 * math.log(144)) * s.std)
    close(s.highest, rotated[:, :5, :6].amax((-2, -1)))
    close(s.lowest, rotated[:, :5, :6].amin((-2, -1)))
    above = rotated.abs() > s.threshold[:, None, None]
    assert s.above_threshold.tolist() == above[:, :k, :k].sum((-2, -1)).tolist()
    close(s.concentration, rotated[:, :k, :k].square().sum((-2, -1)) / W_o.square().sum((-2, -1)))


@given(SEEDS)
@fast
def test_concentration_does_not_depend_on_axes_nor_sizes_of_entries_on_signs(seed: int) -> None:
    f, V = random_factors(seed=seed), basis(12, 4, seed)
    turned = bilinear.structure(f, V @ basis(4, 4, seed + 7), k=4)
    flipped = bilinear.structure(f, V * torch.tensor([1.0, -1, -1, 1]).double(), k=4)
    plain = bilinear.structure(f, V, k=4)
    close(turned.concentration, plain.concentration)
    # the mean over all entries, and with it the threshold, depends on signs; the energy does not
    above = flipped.block.abs() > plain.threshold[:, None, None]
    assert above.sum((-2, -1)).tolist() == plain.above_threshold.tolist()
    close(flipped.std.square() + flipped.mean.square(), plain.std.square() + plain.mean.square())
    close(flipped.block.abs(), plain.block.abs())


def test_layers_batch() -> None:
    per_layer = [random_factors(seed=10 * l) for l in range(2)]
    both = Factors(
        torch.stack([f.left for f in per_layer]), torch.stack([f.right for f in per_layer])
    )
    V = torch.stack([basis(12, 3, seed=l) for l in range(2)])
    batched, fit = (
        bilinear.structure(both, V, k=2),
        fit_low_rank_diagonal(both, V),
    )
    for l, f in enumerate(per_layer):
        for a, b in zip(batched, bilinear.structure(f, V[l], k=2), strict=True):
            close(a[l], b)
        for a, b in zip(fit, fit_low_rank_diagonal(f, V[l]), strict=True):
            close(a[l], b)


@given(SEEDS, st.booleans())
@fast
def test_fit_equals_brute_force_least_squares(seed: int, two_sided: bool) -> None:
    size, k = 9, 2
    f, V = random_factors(size=size, seed=seed), basis(size, k, seed)
    U = basis(size, 3, seed + 3) if two_sided else V
    fit = fit_low_rank_diagonal(f, V, U if two_sided else None)
    columns = [np.outer(V[:, a], U[:, b]).ravel() for a in range(k) for b in range(U.shape[1])]
    columns += [np.diag(np.eye(size)[i]).ravel() for i in range(size)]
    # the diagonal is the less determined the nearer a coordinate axis comes to the subspaces
    tolerance = 1e-12 / float(1 - (V.square().sum(-1) * U.square().sum(-1)).sqrt().max()) + 1e-11
    for h, W in enumerate(dense(f).numpy()):
        solution, *_ = np.linalg.lstsq(np.stack(columns, 1), W.ravel(), rcond=None)
        n = k * U.shape[1]
        close(fit.L[h].flatten(), torch.from_numpy(solution[:n]), tolerance)
        close(fit.delta[h], torch.from_numpy(solution[n:]), tolerance)
        residual = W - V.numpy() @ fit.L[h].numpy() @ U.numpy().T - np.diag(fit.delta[h].numpy())
        assert np.abs(np.diag(residual)).max() < tolerance
        assert np.abs(V.numpy().T @ residual @ U.numpy()).max() < tolerance
        assert float(fit.r2_joint[h]) == pytest.approx(
            1 - (residual**2).sum() / (W**2).sum(), abs=1e-10
        )
    assert bool((fit.r2_joint >= fit.r2_diagonal - 1e-12).all())
    assert bool((fit.r2_joint >= fit.r2_low_rank - 1e-12).all())


@pytest.mark.parametrize("k", [3, 7])  # 3^2 < d: the small system; 7^2 > d: the large one
def test_planted_low_rank_plus_diagonal_is_recovered(k: int) -> None:
    size = 40
    V, L, d = basis(size, k), normal(4, k, k, seed=1), normal(4, size, seed=2)
    fit = fit_low_rank_diagonal(from_dense(V @ L @ V.mT + torch.diag_embed(d)), V)
    close(fit.L, L, 1e-8)
    close(fit.delta, d, 1e-8)
    close(fit.r2_joint, torch.ones(4).double(), 1e-12)
    assert not bool(fit.singular)


def test_planted_noise_is_what_remains() -> None:
    size, k, noise = 200, 5, 0.05
    V, L = basis(size, k), 4 * normal(8, k, k, seed=1)
    signal, error = (
        V @ L @ V.mT + torch.diag_embed(normal(8, size, seed=2)),
        noise * normal(8, size, size, seed=3),
    )
    fit = fit_low_rank_diagonal(from_dense(signal + error), V)
    free = size + k**2
    expected = 1 - (size**2 - free) * noise**2 / (signal + error).square().sum((-2, -1))
    close(fit.r2_joint, expected, 4e-3)


@given(SEEDS)
@fast
def test_more_directions_never_explain_less(seed: int) -> None:
    f, V = random_factors(seed=seed), basis(12, 8, seed)
    r2 = torch.stack([fit_low_rank_diagonal(f, V[:, :k]).r2_joint for k in range(1, 9)])
    assert bool((r2.diff(dim=0) > -1e-10).all())
    assert bool((r2 <= 1 + 1e-12).all())


def test_a_coordinate_axis_inside_the_subspace_gives_the_minimum_norm_fit_and_a_flag() -> None:
    V = torch.zeros(9, 2, dtype=torch.float64)
    V[4, 0] = 1
    V[[0, 1], 1] = 0.5**0.5
    f = random_factors(size=9)
    fit = fit_low_rank_diagonal(f, V)
    assert bool(fit.singular)
    close(fit.delta[:, 4], torch.zeros(3).double())  # the axis' diagonal cell is L's to explain
    residual = (
        without_diagonal(dense(f)) + torch.diag_embed(f.diagonal - fit.delta) - V @ fit.L @ V.mT
    )
    close(residual.diagonal(dim1=-2, dim2=-1), torch.zeros(3, 9).double())
    close(V.mT @ residual @ V, torch.zeros(3, 2, 2).double())
    assert not bool(fit_low_rank_diagonal(f, basis(9, 2)).singular)


def test_symmetric_share() -> None:
    V = basis(20, 3)
    skew = torch.tensor([[0.0, 1, 2], [-1, 0, 3], [-2, -3, 0]]).double()
    both = torch.stack([skew, skew + skew.mT + torch.eye(3), skew + 2 * torch.eye(3)])
    fit = fit_low_rank_diagonal(from_dense(V @ both @ V.mT), V)
    close(fit.symmetric, torch.tensor([0, 1, 12 / 40]).double(), 1e-8)


def test_the_uniform_null_is_exact() -> None:
    f = Factors(normal(2, 7, 3), normal(2, 7, 3, seed=1))
    f = Factors(
        torch.cat([f.left, torch.eye(7).double().expand(2, 7, 7)], -1),
        torch.cat([f.right, torch.eye(7).double().expand(2, 7, 7)], -1),
    )
    draws = torch.linalg.qr(normal(40_000, 7, 2, seed=2)).Q
    for off_diagonal, W in [(True, without_diagonal(dense(f))), (False, dense(f))]:
        shares = (draws.mT.unsqueeze(1) @ W @ draws.unsqueeze(1)).square().sum(
            (-2, -1)
        ) / W.square().sum((-2, -1))
        error = 5 * shares.std(0) / len(draws) ** 0.5
        null = bilinear.haar_null(f, 2, off_diagonal=off_diagonal)
        assert bool(((shares.mean(0) - null).abs() < error).all())
        if not off_diagonal:
            assert not bool(
                (((2 / 7) ** 2 - shares.mean(0)).abs() < error).any()
            )  # (k/d)^2 is not it
    close(bilinear.haar_null(f, 7), torch.ones(2).double())
    close(bilinear.haar_null(f, 2, one_basis=False), torch.full((2,), 4 / 49, dtype=torch.float64))


def test_the_centred_null_is_that_of_subspaces_whose_vectors_sum_to_zero() -> None:
    centring = torch.eye(7).double() - 1 / 7
    f = from_dense(centring @ (normal(2, 7, 7, seed=4) + 2 * torch.eye(7).double()) @ centring)
    pair = normal(2, 40_000, 7, 2, seed=5)
    left, right = torch.linalg.qr(pair - pair.mean(2, keepdim=True)).Q
    for off_diagonal, W in [(True, without_diagonal(dense(f))), (False, dense(f))]:
        for one_basis, other in ((True, left), (False, right)):
            blocks = left.mT.unsqueeze(1) @ W @ other.unsqueeze(1)
            shares = blocks.square().sum((-2, -1)) / W.square().sum((-2, -1))
            error = 5 * shares.std(0) / len(left) ** 0.5
            options = {"off_diagonal": off_diagonal, "one_basis": one_basis}
            null = bilinear.haar_null(f, 2, centered=True, **options)
            assert bool(((shares.mean(0) - null).abs() < error).all())
            plain = bilinear.haar_null(f, 2, **options)
            assert not bool(((shares.mean(0) - plain).abs() < error).any())


def test_matrices_without_an_off_diagonal_part_or_at_all() -> None:
    zero = Factors(torch.zeros(1, 8, 2).double(), torch.zeros(1, 8, 2).double())
    V = basis(8, 2)
    s, fit = bilinear.structure(zero, V, k=2), fit_low_rank_diagonal(zero, V)
    assert bool(
        s.concentration.isnan().all()
        and fit.r2_joint.isnan().all()
        and bilinear.haar_null(zero, 2).isnan().all()
    )
    assert int(s.above_threshold) == 0
    only = from_dense(torch.diag(torch.arange(1.0, 9)).double()[None])
    assert bool(bilinear.structure(only, V, k=2).concentration.isnan().all())
    assert float(fit_low_rank_diagonal(only, V).r2_diagonal) == pytest.approx(1)


def test_leading_directions_stop_at_the_numerical_rank() -> None:
    rows = normal(30, 3) @ normal(3, 10, seed=1)
    V, values, rank = bilinear.leading_directions(rows, 6)
    assert (rank, tuple(V.shape), len(values)) == (3, (10, 6), 10)
    close(V[:, :3].mT @ V[:, :3], torch.eye(3).double())
    assert not bool(V[:, 3:].any())
    close(rows @ V @ V.mT, rows)
    wide = bilinear.leading_directions(normal(4, 10), 6)[0]
    assert wide.shape == (10, 6)
    f = random_factors(size=10)
    close(
        bilinear.structure(f, V, k=6).concentration,
        bilinear.structure(f, V[:, :3], k=3).concentration,
    )
    close(
        fit_low_rank_diagonal(f, V).r2_joint,
        fit_low_rank_diagonal(f, V[:, :3]).r2_joint,
    )
    _, _, zero_rank = bilinear.leading_directions(torch.zeros(4, 10).double(), 2)
    assert zero_rank == 0
    centred = bilinear.leading_directions(normal(30, 10) + 5, 10, centered=True)
    assert centred[2] == 9
    assert float(centred[0].sum(0).abs().max()) < 1e-10


def layer(seed: int = 0, *, heads: int = 2, size: int = 10, width: int = 4) -> HeadWeights:
    w = normal(4, heads, size, width, seed=seed)
    b = normal(3, heads, width, seed=seed + 1)
    return HeadWeights(
        W_Q=w[0],
        W_K=w[1],
        W_V=w[2],
        W_O=w[3].mT.contiguous(),
        b_Q=b[0],
        b_K=b[1],
        b_V=b[2],
        b_O=normal(size),
    )


@pytest.mark.parametrize("matrix", ["QK", "OV"])
@pytest.mark.parametrize("norm_kind", ["LN", "RMS", None])
def test_folding_before_or_after_gives_the_same_matrix(matrix: str, norm_kind: str | None) -> None:
    w, gain = layer(), 1 + normal(10, seed=4)
    norm = NormWeights(norm_type=norm_kind, gain=gain, bias=normal(10), eps=1e-5)
    folded = HeadWeights(
        **{n: gain[:, None] * getattr(w, n) for n in ("W_Q", "W_K", "W_V")},
        **{n: getattr(w, n) for n in ("W_O", "b_Q", "b_K", "b_V", "b_O")},
    )
    unit = NormWeights(
        norm_type=norm_kind, gain=torch.ones(10).double(), bias=torch.zeros(10).double(), eps=1e-5
    )
    W = dense(bilinear.fold(w, norm, matrix))
    close(W, dense(bilinear.fold(folded, unit, matrix)))
    assert float(W.sum(-2).abs().max() < 1e-10) == float(norm_kind == "LN")
    assert not torch.allclose(W, dense(bilinear.fold(w, norm, matrix, raw=True)))
    expected = w.W_Q @ w.W_K.mT / 2 if matrix == "QK" else w.W_V @ w.W_O
    close(dense(bilinear.fold(w, norm, matrix, raw=True)), expected)


def test_structure_does_not_depend_on_the_gauge_of_the_factors() -> None:
    f, V, M = random_factors(), basis(12, 4), normal(4, 4, seed=9)
    other = Factors(f.left @ M, f.right @ torch.linalg.inv(M).mT)
    for a, b in zip(bilinear.structure(f, V, k=4), bilinear.structure(other, V, k=4), strict=True):
        close(a, b, 1e-8)


def test_errors_name_what_was_expected() -> None:
    with pytest.raises(GeometryError, match="k: expected 1 to 4 columns, got 5"):
        bilinear.structure(random_factors(), basis(12, 4), k=5)
