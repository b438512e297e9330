"""The gap between a head's scores and the product of a position kernel and a content kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.linalg import normalize_rows
from tl_geometry.measures.factorisation import kernel_gaps, structured_gaps
from tl_geometry.models.norms import remove_mean

cases = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10_000)


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dense_gaps(
    pos: Tensor, cvec: Tensor, low_rank: Tensor, diagonal: Tensor, pairs: int, seed: int = 0
) -> dict[str, float]:
    """The gap of ``W = low_rank + diagonal``, a pair at a time from dense matrices."""
    generator = torch.Generator().manual_seed(seed)
    bases = [normalize_rows(rows)[0] for rows in (cvec, pos)]
    (q_context, q_position), (k_context, k_position) = (
        [rows[torch.randint(len(rows), (pairs,), generator=generator)] for rows in bases]
        for _ in range(2)
    )
    scores, gaps = [], []
    for i in range(pairs):
        q, k = q_context[i] + q_position[i], k_context[i] + k_position[i]
        scores.append(float(q @ (low_rank + diagonal) @ k))
        own = q_position[i] @ low_rank @ k_position[i] + q_context[i] @ diagonal @ k_context[i]
        gaps.append(scores[-1] - float(own))
    size = lambda values: math.sqrt(np.mean(np.square(values)))
    return {"r_rms": size(gaps), "r_max": max(np.abs(gaps)), "score_rms": size(scores)}


def test_the_gap_is_zero_between_orthogonal_bases_and_nan_without_scores() -> None:
    basis = torch.linalg.qr(gaussian(4, 8, 8)).Q
    pos, cvec = gaussian(6, 9, 3) @ basis[:, :3].T, gaussian(7, 9, 5) @ basis[:, 3:].T
    V, L, none = basis[:, :3], gaussian(5, 1, 3, 3), torch.zeros(1, 8).double()
    assert float(structured_gaps(pos, cvec, V, L, none).relative) < 1e-12
    assert float(structured_gaps(pos, cvec + 0.1, V, L, none).relative) > 1e-3
    assert structured_gaps(pos, cvec, V, 0 * L, none).relative.isnan().all()
    with pytest.raises(GeometryError, match="only zero rows"):
        structured_gaps(0 * pos, cvec, V, L, none)


@cases
@given(seeds, st.integers(1, 3))
def test_structured_gaps_equal_the_dense_ones_of_each_head(seed: int, rank: int) -> None:
    pos, cvec = gaussian(seed, 6, 5), gaussian(seed + 1, 7, 5)
    V, L, delta = (
        torch.linalg.qr(gaussian(seed + 2, 5, rank)).Q,
        gaussian(seed + 3, 4, rank, rank),
        gaussian(seed + 4, 4, 5),
    )
    found = structured_gaps(pos, cvec, V, L, delta, pairs=50, seed=seed)
    for h in range(4):
        dense = dense_gaps(pos, cvec, V @ L[h] @ V.T, torch.diag(delta[h]), 50, seed)
        for name, value in dense.items():
            assert float(getattr(found, name)[h]) == pytest.approx(value), name


def test_kernel_gaps_of_a_model_are_those_of_its_fitted_weights() -> None:
    from tl_geometry import decompose, zoo
    from tl_geometry.weights import bilinear
    from tl_geometry.weights.heads import weight_geometry

    model = zoo.embedded()
    tokens = torch.randint(0, 500, (8, 24), generator=torch.Generator().manual_seed(0))
    basis = decompose(model, tokens, progress=False)
    found = kernel_gaps(model, basis, layers=1, rank=3, pairs=200)
    fit = weight_geometry(model, basis, layers=1, rank=3, draws=0)
    pos = remove_mean(basis.pos[1], "LN")
    assert basis.samples is not None
    cvec = remove_mean(
        (basis.samples[:, 1, 1:].double() - basis.mean[1] - basis.pos[1]).flatten(0, 1), "LN"
    )
    V = torch.linalg.svd(pos).Vh[:3].T
    V = V * torch.where(V.gather(0, V.abs().argmax(0, keepdim=True)) < 0, -1.0, 1.0)
    dense = dense_gaps(pos, cvec, V @ fit.L[2] @ V.T, torch.diag(fit.delta[2]), pairs=200)
    assert found.heads[2] == (1, 2)
    assert float(found.relative[2]) == pytest.approx(dense["r_rms"] / dense["score_rms"], rel=1e-6)
    cosines = normalize_rows(cvec)[0] @ normalize_rows(pos)[0].T
    assert float(found.incoherence_max[2]) == pytest.approx(float(cosines.abs().max()))
    assert bilinear.leading_directions(basis.pos[1], 3, centered=True)[0].shape == V.shape
    assert list(found.to_dataframe().columns[:3]) == ["layer", "head", "relative"]
    with pytest.raises(GeometryError, match="sampled contexts"):
        kernel_gaps(model, decompose(model, tokens, keep=0, progress=False))
