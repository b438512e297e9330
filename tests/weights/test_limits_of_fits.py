"""Limits of the fits to weights: coordinate axes in a subspace, tiny matrices, matrices without an
off-diagonal part; factors in every coordinate system by numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tl_geometry.models.layer_view import HeadWeights
from tl_geometry.models.norms import NormWeights
from tl_geometry.weights import bilinear, subspaces
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.low_rank_diagonal import fit_low_rank_diagonal, solve_diagonal


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis(size: int, k: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, k, seed=seed)).Q


def with_axis(size: int, missing: float) -> Tensor:
    """Two directions: coordinate 4 but for a share ``missing`` of its square, and another one."""
    V = torch.zeros(size, 2, dtype=torch.float64)
    V[4, 0], V[5, 0] = math.sqrt(1 - missing), math.sqrt(missing)
    V[[0, 1], 1] = 0.5**0.5
    return V


@pytest.mark.parametrize(
    ("missing", "singular"),
    [(0.0, True), (0.35e-10, True), (0.75e-10, False), (1e-7, False), (1e-5, False), (0.1, False)],
)
def test_a_diagonal_is_not_determined_where_an_eigenvalue_is_rounding(
    missing: float, singular: bool
) -> None:
    """The eigenvalue of an axis whose share ``missing`` lies outside is about twice that share; the
    limit is 1e-10. Every way of solving gives the same where it can."""
    V, target = with_axis(9, missing), normal(9, 2)
    found, is_singular = solve_diagonal(V, V.clone(), target)
    assert bool(is_singular) == singular
    P = (V @ V.mT).numpy()
    matrix = np.eye(9) - P * P
    expected = np.linalg.pinv(matrix, rcond=1e-10, hermitian=True) @ target.numpy()
    close = 1e-4 if missing < 1e-6 else 1e-8
    assert np.allclose(found.numpy(), expected, rtol=close, atol=close)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_layers_with_and_without_an_axis_are_solved_together(k: int) -> None:
    """Only the layer with the axis is singular; each has what it has alone. With two directions of
    nine the smaller system would do for the other layer."""
    plain = basis(9, k)
    axis = torch.linalg.qr(torch.cat([with_axis(9, 0.0), normal(9, k - 2, seed=1)], 1)).Q
    W = normal(2, 3, 9, 9, seed=2)
    eye = torch.eye(9).double().expand(2, 3, 9, 9)
    both = fit_low_rank_diagonal(Factors(W, eye.contiguous()), torch.stack([axis, plain]))
    assert both.singular.tolist() == [True, False]
    for i, V in enumerate((axis, plain)):
        alone = fit_low_rank_diagonal(Factors(W[i], eye[i].contiguous()), V)
        assert bool(alone.singular) == (i == 0)
        torch.testing.assert_close(both.delta[i], alone.delta)
        torch.testing.assert_close(both.L[i], alone.L)
        torch.testing.assert_close(both.r2_joint[i], alone.r2_joint)


def test_shares_of_a_small_matrix_are_those_of_a_large_one() -> None:
    """Energies far below one are energies all the same; a matrix of zeros has no share."""
    V, W = basis(9, 2), normal(2, 9, 9, seed=3)
    eye = torch.eye(9).double().expand(2, 9, 9).contiguous()
    large, small = (fit_low_rank_diagonal(Factors(size * W, eye), V) for size in (1.0, 1e-6))
    nothing = fit_low_rank_diagonal(Factors(0 * W, eye), V)
    for name in ("r2_low_rank", "r2_diagonal", "r2_joint", "symmetric"):
        torch.testing.assert_close(getattr(small, name), getattr(large, name))
        assert getattr(nothing, name).isnan().all()
    s_large, s_small = (
        bilinear.structure(Factors(size * W, eye), V, k=2).concentration for size in (1.0, 1e-6)
    )
    torch.testing.assert_close(s_small, s_large)
    null_large, null_small = (bilinear.haar_null(Factors(size * W, eye), 2) for size in (1, 1e-6))
    torch.testing.assert_close(null_small, null_large)


def test_a_diagonal_matrix_has_no_concentration_anywhere() -> None:
    """What is left of it off the diagonal is rounding, in a subspace and in those of the nulls."""
    diagonal, turn = torch.diag_embed(normal(3, 9).exp()), basis(9, 9, seed=8)
    factors = Factors(diagonal @ turn, turn.expand(3, 9, 9).contiguous())
    assert not factors.off_diagonal_energy.any()
    V, draws = basis(9, 3), subspaces.Draws(*(torch.linalg.qr(normal(2, 4, 9, 3)).Q))
    assert bilinear.structure(factors, V, k=3).concentration.isnan().all()
    assert bilinear.haar_null(factors, 3).isnan().all()
    left = subspaces.Subspace(V, 3, draws)
    for found in subspaces.drawn_concentration(factors, left, None, 3):
        assert found.shape == (4, 3)
        assert found.isnan().all()


@pytest.mark.parametrize("k", [1, 3])
def test_concentrations_of_drawn_subspaces_by_loops(k: int) -> None:
    """The first ``k`` directions of each draw, on one side or on both."""
    W = normal(2, 9, 9, seed=4)
    factors = Factors(W, torch.eye(9).double().expand(2, 9, 9).contiguous())
    left, right = (
        subspaces.Subspace(
            basis(9, 3), 3, subspaces.Draws(*(torch.linalg.qr(normal(2, 4, 9, 3, seed=s)).Q))
        )
        for s in (5, 6)
    )
    W_o = W - torch.diag_embed(W.diagonal(dim1=-2, dim2=-1))
    for other in (None, right):
        found = subspaces.drawn_concentration(factors, left, other, k)
        for kind in range(2):
            for i, h in itertools.product(range(4), range(2)):
                V, U = left.draws[kind][i], (other or left).draws[kind][i]
                block = V[:, :k].mT @ W_o[h] @ U[:, :k]
                share = block.square().sum() / W_o[h].square().sum()
                assert float(found[kind][i, h]) == pytest.approx(float(share))


def test_p_values_count_draws_as_high_and_the_data() -> None:
    """A tie counts against the head; a head without a value has no p-value."""
    values = torch.tensor([2.0, 1.0, math.nan], dtype=torch.float64)
    draws = torch.ones(3, 3, dtype=torch.float64)
    draws[0, 0] = 2.0  # as high as the data, so as large a ratio
    found = subspaces.familywise_p(values, draws)
    assert found[:2].tolist() == [0.5, 1.0]
    assert math.isnan(float(found[2]))
    assert subspaces.familywise_p(values, draws[:0]).isnan().all()
    assert subspaces.DRAWS == 19


@pytest.mark.parametrize("matrix", ["QK", "OV"])
@pytest.mark.parametrize("norm_type", ["LN", "RMS", None])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("center_output", [None, False, True])
def test_factors_of_heads_by_numpy(
    matrix: str, norm_type: str | None, raw: bool, center_output: bool | None
) -> None:
    """Gain and centring where the norm has them; the scale of the scores; nothing is written to the
    weights."""
    shapes = {"W_Q": (2, 6, 3), "W_K": (2, 6, 3), "W_V": (2, 6, 3), "W_O": (2, 3, 6)}
    shapes |= {"b_Q": (2, 3), "b_K": (2, 3), "b_V": (2, 3), "b_O": (6,)}
    tensors = {name: normal(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    w = HeadWeights(**tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    gain = normal(6, seed=20)
    norm = NormWeights(norm_type=norm_type, gain=gain, bias=normal(6, seed=21), eps=1e-5)
    for scale in (None, 0.25):
        options: dict[str, Any] = {"raw": raw, "center_output": center_output, "scale": scale}
        found = bilinear.fold(w, norm, matrix, **options)
        W = {name: before[f"W_{name}"].numpy() for name in "QKVO"}
        if not raw:
            W |= {name: gain.numpy()[:, None] * W[name] for name in "QKV"}
            if norm_type == "LN":
                W |= {name: W[name] - W[name].mean(1, keepdims=True) for name in "QKV"}
            if norm_type == "LN" if center_output is None else center_output:
                W["O"] = W["O"] - W["O"].mean(-1, keepdims=True)
        products = found.left.numpy() @ found.right.mT.numpy()
        if matrix == "OV":
            assert np.allclose(products, W["V"] @ W["O"])
        else:
            size = 3**-0.5 if scale is None else scale
            assert np.allclose(products, size * W["Q"] @ W["K"].transpose(0, 2, 1))
    assert all(torch.equal(tensors[name], value) for name, value in before.items())


def test_leading_directions_of_rows_about_their_own_means() -> None:
    """Centred rows have no direction along the vector of ones; the numerical rank drops by one."""
    rows = normal(12, 5) + 3
    plain, values, rank = bilinear.leading_directions(rows, 5)
    assert (rank, len(values)) == (5, 5)
    assert float(plain.sum(0).abs().max()) > 0.5
    centred, values, rank = bilinear.leading_directions(rows, 5, centered=True)
    assert (rank, len(values)) == (4, 5)
    assert float(centred.sum(0).abs().max()) < 1e-10
    assert not centred[:, 4].any()
    expected = np.linalg.svd((rows - rows.mean(1, keepdim=True)).numpy(), compute_uv=False)
    assert np.allclose(values, expected, atol=1e-12)
    peaks = centred[:, :4].gather(0, centred[:, :4].abs().argmax(0, keepdim=True))
    assert bool((peaks > 0).all())
