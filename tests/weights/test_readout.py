"""Token readout: factor SVDs equal dense ones, running top-k equals sorting, the sign rule,
degenerate values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.linalg import SVD
from tl_geometry.weights import readout

pytestmark = pytest.mark.once

SEEDS = st.integers(0, 10_000)
fast = settings(deadline=None, max_examples=20)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def conditioned(rows: int, rank: int, condition: float, seed: int) -> Tensor:
    s = linalg.svd(normal(rows, rank, seed=seed))
    return (
        s.U
        @ torch.diag(
            torch.logspace(0, -torch.log10(torch.tensor(condition)), rank, dtype=torch.float64)
        )
        @ s.V.mT
    )


@given(SEEDS, st.sampled_from([1.0, 1e2, 1e5, 1e12]))
@fast
def test_the_svd_of_a_product_from_its_factors_equals_the_dense_one(
    seed: int, condition: float
) -> None:
    left = torch.stack([conditioned(15, 4, condition, seed), normal(15, 4, seed=seed + 1)])
    right = normal(2, 20, 4, seed=seed + 2)
    found, dense = (
        linalg.product_svd(left, right),
        torch.linalg.svd(left @ right.mT, full_matrices=False),
    )
    assert float((found.S - dense.S[:, :4]).abs().max() / dense.S.max()) < 1e-12
    close(found.U @ torch.diag_embed(found.S) @ found.V.mT, left @ right.mT)
    eye = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    close(found.U.mT @ found.U, eye, 1e-9)
    close(found.V.mT @ found.V, eye, 1e-9)
    pivots = found.V.gather(-2, found.V.abs().argmax(-2, keepdim=True))
    assert bool((pivots > 0).all())


def test_zero_heads_and_single_precision_have_singular_values_too() -> None:
    left = torch.cat([torch.zeros(1, 9, 3).double(), normal(1, 9, 3)])
    found = linalg.product_svd(left, normal(2, 9, 3, seed=1))
    close(found.S[0], torch.zeros(3).double())
    close(found.U.mT @ found.U, torch.eye(3).double().expand(2, 3, 3), 1e-9)
    close(
        linalg.product_svd(left.float(), normal(2, 9, 3, seed=1).float()).S.double(), found.S, 1e-5
    )
    close(linalg.product_svd(normal(9, 3), torch.zeros(9, 3).double()).S, torch.zeros(3).double())


@given(SEEDS)
@fast
def test_singular_values_do_not_depend_on_the_gauge(seed: int) -> None:
    a, b, m = (
        normal(12, 3, seed=seed),
        normal(12, 3, seed=seed + 1),
        normal(3, 3, seed=seed + 2) + 3 * torch.eye(3).double(),
    )
    one, other = linalg.product_svd(a, b), linalg.product_svd(a @ m, b @ torch.linalg.inv(m).mT)
    close(one.S, other.S, 1e-8)
    close(readout.coverage(one.S), readout.coverage(other.S), 1e-8)


@given(SEEDS, st.integers(1, 9), st.integers(1, 12))
@fast
def test_running_extremes_equal_a_full_sort(seed: int, k: int, chunk: int) -> None:
    vectors, tokens = normal(2, 3, 5, seed=seed), normal(31, 5, seed=seed + 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readout, "VOCABULARY_CHUNK", chunk)
        patch.setattr(readout, "VECTOR_CHUNK", 4)
        e = readout.extremes(vectors, tokens, k)
    scores = vectors @ tokens.mT
    close(e.top_scores, scores.sort(descending=True).values[..., :k])
    close(e.bottom_scores, scores.sort().values[..., :k])
    close(scores.gather(-1, e.top_ids), e.top_scores)
    close(scores.gather(-1, e.bottom_ids), e.bottom_scores)


def test_equal_scores_come_in_the_order_of_their_ids() -> None:
    tokens = torch.tensor([[1.0], [2.0], [1.0], [2.0], [1.0]])
    assert readout.extremes(torch.ones(1), tokens, 5).top_ids.tolist() == [1, 3, 0, 2, 4]
    assert readout.extremes(torch.ones(1), tokens, 5).bottom_ids.tolist() == [0, 2, 4, 1, 3]


@given(SEEDS)
@fast
def test_the_sign_rule_and_that_it_keeps_the_product(seed: int) -> None:
    svd = linalg.product_svd(normal(2, 10, 3, seed=seed), normal(2, 10, 3, seed=seed + 1))
    left, right = normal(40, 10, seed=seed + 2), normal(40, 10, seed=seed + 3)
    read = readout.read_tokens(svd, left, right, features=3, k=2)
    flipped = (right @ svd.V).amax(-2) < (-right @ svd.V).amax(-2)
    sign = torch.where(flipped, -1.0, 1.0).to(svd.U)[..., None, :]
    for found, tokens, vectors in zip(read, (left, right), (svd.U, svd.V), strict=True):
        scores = tokens @ (sign * vectors)
        close(found.top_scores[..., 0], scores.amax(-2))
        close(found.bottom_scores[..., 0], scores.amin(-2))
    assert bool((read[1].top_scores[..., 0] >= -read[1].bottom_scores[..., 0]).all())
    other = readout.read_tokens(SVD(-svd.U, svd.S, -svd.V), left, right, features=3, k=2)
    for a, b in zip(read[0] + read[1], other[0] + other[1], strict=True):
        close(a, b)


def test_coverage_and_the_number_of_directions_needed() -> None:
    s = torch.tensor(
        [[5.0, 3.0, 1.9, 0.1], [1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
        dtype=torch.float64,
    )
    close(readout.coverage(s)[0], torch.tensor([0.5, 0.8, 0.99, 1.0], dtype=torch.float64))
    assert readout.features_needed(s, 0.75).tolist() == [2, 4, 1, 0]
    assert int(readout.features_needed(torch.tensor([0.9, 0.095, 0.004, 0.001]))) == 2  # of 99%
    assert readout.near_degenerate(s).tolist() == [
        [False] * 4,
        [True] * 4,
        [False, True, True, True],
        [True] * 4,
    ]
    assert readout.near_degenerate(
        torch.tensor([1 + 5e-7, 1.0, 0.5], dtype=torch.float64)
    ).tolist() == [True, True, False]
    assert not readout.near_degenerate(torch.tensor([1 + 1.5e-6, 1.0, 0.5]).double()).any()


def test_errors() -> None:
    with pytest.raises(GeometryError, match="k: expected 1 to 4 tokens, got 9"):
        readout.extremes(torch.ones(3), torch.ones(4, 3), 9)
    svd = linalg.product_svd(normal(6, 2), normal(6, 2, seed=1))
    with pytest.raises(GeometryError, match="features: expected 1 to 2, got 3"):
        readout.read_tokens(svd, normal(8, 6), normal(8, 6), features=3)
