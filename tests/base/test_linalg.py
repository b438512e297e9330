"""Linear algebra by other routes: numpy, scipy, and matrices whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import GeometryError

pytestmark = pytest.mark.once


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def orthogonal(size: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, size, seed=seed))[0]


def rotation(*angles: float, ones: int = 0, seed: int = 0) -> Tensor:
    """Plane rotations and coordinates that stay, in a random basis."""
    planes = [np.array([[math.cos(t), -math.sin(t)], [math.sin(t), math.cos(t)]]) for t in angles]
    blocks = torch.from_numpy(scipy.linalg.block_diag(*planes, np.eye(ones)))
    basis = orthogonal(len(blocks), seed)
    return basis @ blocks @ basis.mT


@pytest.mark.parametrize(
    ("angles", "ones"),
    [((0.4, -2.0), 0), ((1e-7, 3.0), 1), ((math.pi,), 2), ((math.pi, math.pi, 0.3), 1), ((), 3)],
)
def test_logarithms_of_rotations_lead_back(angles: tuple[float, ...], ones: int) -> None:
    turned = rotation(*angles, ones=ones, seed=len(angles))
    log = linalg.rotation_log(turned)
    assert torch.allclose(log, -log.mT, atol=1e-12)
    assert torch.allclose(torch.linalg.matrix_exp(log), turned, atol=1e-10)
    found = sorted(np.abs(np.linalg.eigvals(log.numpy()).imag))
    expected = [0.0] * ones + sorted(abs(t) for t in angles for _ in range(2))
    assert found == pytest.approx(expected, abs=1e-9)
    assert linalg.rotation_log(turned.float()).dtype == torch.float32


def test_what_is_no_rotation_has_no_logarithm() -> None:
    turned = rotation(0.7, ones=1)
    with pytest.raises(GeometryError, match=r"an orthogonal matrix, got orthogonality error 1\."):
        linalg.rotation_log(turned * (1 + 5e-6))
    linalg.rotation_log(turned * (1 + 2e-7))
    mirrored = turned * torch.tensor([1.0, 1.0, -1.0])
    with pytest.raises(GeometryError, match=r"determinant \+1, got -1"):
        linalg.rotation_log(mirrored)


@pytest.mark.parametrize(("first", "second"), [(3, 5), (5, 3), (3, 3)])
def test_principal_angles_are_those_that_were_planted(first: int, second: int) -> None:
    """Three planes of known angles, one of them tiny, and bases of the spans in any order."""
    Q, theta = orthogonal(9), torch.tensor([3e-9, 0.7, 1.5], dtype=torch.float64)
    a, b = Q[:, :3], Q[:, :3] * theta.cos() + Q[:, 3:6] * theta.sin()
    a, b = torch.cat([a, Q[:, 6 : 3 + first]], 1), torch.cat([b, Q[:, 6 : 3 + second]], 1)
    if first == second == 3:
        assert torch.equal(linalg.principal_angles(a, a) < 1e-12, torch.ones(3).bool())
    a, b = a @ orthogonal(first, 1), b @ orthogonal(second, 2)
    found = linalg.principal_angles(a, b)
    assert found.tolist() == pytest.approx(theta.tolist(), rel=1e-6)


@pytest.mark.parametrize("shape", [(40, 3), (3, 40), (2, 40, 3), (2, 3, 40)])
def test_the_numerical_rank_is_that_of_numpy(shape: tuple[int, ...]) -> None:
    """Also just above and just below the threshold, which goes by the longer side."""
    eps = torch.finfo(torch.float64).eps
    for factor, rank in ((0.9, 2), (1.1, 3)):
        s = torch.tensor([2.0, 1.0, factor * 40 * eps * 2.0], dtype=torch.float64)
        assert linalg.numerical_rank(s, shape).item() == rank
    X = normal(*shape, seed=1)
    values = torch.linalg.svdvals(X)
    assert linalg.numerical_rank(values, shape).tolist() == np.linalg.matrix_rank(X).tolist()


def test_signs_follow_the_largest_coordinate_of_the_right_vectors() -> None:
    matrix = normal(2, 7, 5)
    for found in (
        linalg.svd(matrix),
        linalg.product_svd(matrix, torch.eye(5).double().expand(2, 5, 5)),
    ):
        U, S, V = found
        assert torch.allclose(U * S.unsqueeze(-2) @ V.mT, matrix, atol=1e-12)
        peak = V.gather(-2, V.abs().argmax(-2, keepdim=True))
        assert bool((peak > 0).all())
        flipped = linalg.svd(-matrix)
        assert torch.allclose(flipped.V, V, atol=1e-10)
        assert torch.allclose(flipped.U, -U, atol=1e-10)


def test_rows_of_any_size_are_normed() -> None:
    rows = [[3.0, -4.0], [3e200, -4e200], [3e-200, -4e-200], [0.0, 0.0], [0.0, 5e-324]]
    unit, zero = linalg.normalize_rows(torch.tensor(rows, dtype=torch.float64))
    expected = [[0.6, -0.8]] * 3 + [[0.0, 0.0], [0.0, 1.0]]
    assert torch.allclose(unit, torch.tensor(expected).double())
    assert zero.tolist() == [False, False, False, True, False]


def test_angles_are_right_near_zero_and_near_pi() -> None:
    for theta in (1e-9, 0.3, 2.0, math.pi - 1e-9, math.pi):
        a = torch.tensor([2.0, 0.0], dtype=torch.float64)
        b = 5 * torch.tensor([math.cos(theta), math.sin(theta)], dtype=torch.float64)
        assert float(linalg.angle(a, b)) == pytest.approx(theta, rel=1e-12, abs=1e-15)
    for pair in ((a, 0 * b), (0 * a, b)):
        assert bool(linalg.angle(*pair).isnan())


def test_a_gram_matrix_has_the_singular_values_of_its_factor() -> None:
    X = normal(2, 9, 5)
    X[..., 4] = X[..., 3]  # one of them is zero, and rounds to either side
    for gram in (X.mT @ X, X @ X.mT):
        found = linalg.gram_spectrum(gram)
        assert bool(found.isfinite().all())
        assert torch.allclose(found[:, :5], torch.linalg.svdvals(X), atol=1e-6)


def test_a_transposed_map_gives_the_same_products() -> None:
    M, x, y = normal(4, 4), normal(4, seed=1), normal(4, seed=2)
    with torch.no_grad():
        back = linalg.transposed(lambda v: M @ v, y)
    assert float(back @ x) == pytest.approx(float(y @ (M @ x)))


@pytest.mark.parametrize(("error", "fits"), [(0.9e-6, True), (1.5e-6, False)])
def test_a_rotation_is_orthogonal_to_a_millionth(error: float, fits: bool) -> None:
    """Columns whose squares sum to one but for this error."""
    turned = rotation(0.7, ones=1) * math.sqrt(1 + error)
    if fits:
        linalg.rotation_log(turned)
        return
    with pytest.raises(GeometryError) as refusal:
        linalg.rotation_log(turned)
    expected = "rotation: expected an orthogonal matrix, got orthogonality error 1.5e-06."
    assert str(refusal.value) == expected


def test_a_mirror_is_refused_with_what_to_do() -> None:
    """In a whole sentence."""
    with pytest.raises(GeometryError) as refusal:
        linalg.rotation_log(torch.diag(torch.tensor([1.0, -1.0])))
    expected = "rotation: expected determinant +1, got -1."
    assert str(refusal.value) == f"{expected} Use the last column with its sign flipped."


@pytest.mark.parametrize("sine", [1.5e-12, -1.5e-12, 0.9e-12])
def test_planes_of_tiny_angles_are_planes_down_to_rounding(sine: float) -> None:
    """Below the threshold of 1e-12 an angle counts as none."""
    log = linalg.rotation_log(torch.tensor([[1.0, -sine], [sine, 1.0]], dtype=torch.float64))
    assert float(log[1, 0]) == pytest.approx(sine if abs(sine) > 1e-12 else 0.0, rel=1e-6)


def test_half_turns_are_paired_in_order() -> None:
    """Four eigenvalues -1 are two planes turned by pi, about whatever lies between."""
    log = linalg.rotation_log(torch.diag(torch.tensor([-1.0, 1.0, -1.0, -1.0, -1.0])))
    planes = {(2, 0), (4, 3)}
    for i in range(5):
        for j in range(i):
            size = abs(float(log[i, j]))
            assert size == pytest.approx(math.pi if (i, j) in planes else 0, abs=1e-6)
    assert torch.equal(log, -log.mT)
    assert linalg.rotation_log(torch.zeros(0, 0)).shape == (0, 0)


@pytest.mark.parametrize(("rows", "columns", "rank"), [(7, 5, 3), (5, 7, 3), (4, 4, 6)])
def test_the_svd_of_a_product_is_that_of_the_matrix(rows: int, columns: int, rank: int) -> None:
    """Through its factors, of a batch, wide or narrow."""
    left, right = normal(2, rows, rank), normal(2, columns, rank, seed=1)
    found, size = linalg.product_svd(left, right), min(rows, columns, rank)
    assert torch.allclose(found.U * found.S.unsqueeze(-2) @ found.V.mT, left @ right.mT)
    expected = torch.linalg.svdvals(left @ right.mT)[:, :size]
    assert torch.allclose(found.S[:, :size], expected)
    peak = found.V.gather(-2, found.V.abs().argmax(-2, keepdim=True))
    assert bool((peak > 0).all())


def test_stable_ranks_cosines_and_roundoffs_by_hand() -> None:
    """Sums of squares over the largest; the orthonormal cosines; half of the machine epsilon."""
    assert float(linalg.stable_rank(torch.tensor([2.0, 2.0, 1.0]))) == 2.25
    assert bool(linalg.stable_rank(torch.zeros(3)).isnan())
    for j in range(5):
        for t in range(5):
            scale = math.sqrt((1 if j == 0 else 2) / 5)
            expected = scale * math.cos(math.pi * j * (t + 0.5) / 5)
            assert float(linalg.dct_matrix(5)[j, t]) == pytest.approx(expected, abs=1e-15)
    assert linalg.dct_matrix(2).dtype == torch.float64
    assert linalg.dct_matrix(2, torch.float32).dtype == torch.float32
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    assert [linalg.unit_roundoff(d) for d in dtypes] == [2**-53, 2**-24, 2**-11, 2**-8]
