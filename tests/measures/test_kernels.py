"""Laws of the kernel factorisation: exact identity, the explicit bound, vanishing gap, noise tails,
attention itself."""

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
from tl_geometry.measures import kernels
from tl_geometry.models.norms import remove_mean

cases = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10_000)


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def unit(seed: int, *shape: int) -> Tensor:
    return normalize_rows(gaussian(seed, *shape))[0]


@cases
@given(seeds, st.integers(1, 6))
def test_kernel_of_sums_is_the_product_of_four_kernels(seed: int, d_model: int) -> None:
    c, t, c2, t2 = (gaussian(seed + i, 3, d_model) for i in range(4))
    W = gaussian(seed + 9, d_model, d_model) / 3
    whole = kernels.log_kernel(c + t, c2 + t2, W)
    product = torch.stack(
        [kernels.log_kernel(a, b, W).exp() for a in (c, t) for b in (c2, t2)]
    ).prod(0)
    assert torch.allclose(whole.exp(), product, rtol=1e-9)
    assert np.allclose(whole[1, 2], (c + t)[1].numpy() @ W.numpy() @ (c2 + t2)[2].numpy())


@cases
@given(seeds, st.integers(1, 6), st.booleans())
def test_kernel_attention_is_attention(seed: int, positions: int, causal: bool) -> None:
    x, v = gaussian(seed, 2, positions, 5), gaussian(seed + 1, 2, positions, 3)
    W_Q, W_K = gaussian(seed + 2, 5, 4), gaussian(seed + 3, 5, 4)
    ours = kernels.kernel_attention(x, v, W_Q @ W_K.T / 2, causal=causal)
    expected = torch.nn.functional.scaled_dot_product_attention(
        x @ W_Q, x @ W_K, v, is_causal=causal
    )
    assert torch.allclose(ours, expected)
    assert kernels.kernel_attention(1e3 * x, v, W_Q @ W_K.T).isfinite().all()  # scores of millions
    swapped = kernels.kernel_attention(
        x, v, (W_Q @ W_K.T / 2).T, causal=causal
    )  # key first, as printed
    assert positions == 1 or not torch.allclose(ours, swapped)


def planted(
    seed: int, incoherent: bool, s: int = 3, d: int = 8
) -> tuple[tuple[Tensor, Tensor], dict[tuple[int, int], kernels.SparseWeight]]:
    bases = (unit(seed, 5, d), unit(seed + 1, 4, d))
    if incoherent:
        half = torch.arange(d) < d // 2
        bases = (normalize_rows(bases[0] * half)[0], normalize_rows(bases[1] * ~half)[0])
    return bases, {
        p: kernels.random_sparse_weight(bases[p[0]], bases[p[1]], s, seed=seed + i)
        for i, p in enumerate(kernels.PARTS)
    }


@cases
@given(seeds, st.integers(1, 6))
def test_gap_is_within_the_explicit_bound_and_equals_the_mismatched_terms(
    seed: int, s: int
) -> None:
    bases, weights = planted(seed, incoherent=False, s=s)
    shrink = (
        2 * torch.rand(2, 5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        - 1
    )
    queries, keys = (
        (bases[0] * shrink[0], bases[1][:1].repeat(5, 1)),
        (bases[0], bases[1][[0, 1, 2, 3, 3]] * shrink[1]),
    )
    gap = kernels.factorisation_gap(queries, keys, weights, bases)
    assert (gap.r.abs() <= gap.bound + 1e-12).all()
    assert gap.bound <= 4 * s * (2 * gap.incoh + gap.incoh**2) + 1e-12
    assert gap.incoh == pytest.approx(max(abs(float(u @ v)) for u in bases[0] for v in bases[1]))
    mismatched = sum(
        kernels.log_kernel(queries[a], keys[b], w.matrix)
        for a in (0, 1)
        for b in (0, 1)
        for p, w in weights.items()
        if p != (a, b)
    )
    assert torch.allclose(gap.r, torch.as_tensor(mismatched), atol=1e-12)
    for w in weights.values():
        rebuilt = sum(
            float(a) * torch.outer(u, v)
            for a, u, v in zip(w.coefficients, w.left, w.right, strict=True)
        )
        assert torch.allclose(w.matrix, torch.as_tensor(rebuilt))
        assert torch.linalg.matrix_rank(w.matrix) <= s


def test_gap_vanishes_for_orthogonal_bases_and_only_there() -> None:
    for incoherent in (True, False):
        bases, weights = planted(3, incoherent)
        parts = (bases[0][:4], bases[1])
        gap = kernels.factorisation_gap(parts, parts, weights, bases)
        assert (float(gap.r.abs().max()) < 1e-15) == incoherent
        assert (gap.bound < 1e-15) == incoherent


def test_bases_are_checked() -> None:
    bases, weights = planted(0, incoherent=False)
    parts = (bases[0][:4], bases[1])
    with pytest.raises(GeometryError, match=r"rows of norm at most 1, got norm 2.*normalize_rows"):
        kernels.factorisation_gap((2 * parts[0], parts[1]), parts, weights, bases)
    with pytest.raises(GeometryError, match="at least one row"):
        kernels.random_sparse_weight(bases[0][:0], bases[1], 2)
    with pytest.raises(GeometryError, match="one for each of"):
        kernels.factorisation_gap(parts, parts, {(0, 0): weights[(0, 0)]}, bases)
    with pytest.raises(GeometryError, match="1 or more terms"):
        kernels.random_sparse_weight(*bases, 0)
    with pytest.raises(GeometryError, match="only zero rows"):
        kernels.empirical_gap(torch.zeros(3, 4), torch.ones(3, 4), {(0, 0): torch.eye(4)})
    with pytest.raises(GeometryError, match="some of"):
        kernels.empirical_gap(torch.ones(3, 4), torch.ones(3, 4), {(0, 2): torch.eye(4)})


@pytest.mark.parametrize("noise", ["gaussian", "sign"])
def test_noise_terms_have_subgaussian_tails(noise: str) -> None:
    q, k = unit(0, 1, 24)[0], unit(1, 1, 24)[0]
    found = kernels.noise_tail(q, k, samples=4000, noise=noise)
    assert (found.share <= found.bound).all()
    assert float(found.draws.var()) == pytest.approx(1 / 24, rel=0.1)
    assert abs(float(found.draws.mean())) < 4 / math.sqrt(24 * 4000)
    louder = (3 * found.draws).abs().unsqueeze(0) > found.levels.unsqueeze(1)
    assert (
        louder.double().mean(1) > found.bound
    ).any()  # noise three times as strong breaks the bound
    with pytest.raises(GeometryError, match="noise"):
        kernels.noise_tail(q, k, noise="uniform")


def test_empirical_gap_equals_a_loop_and_sees_low_rank_plus_diagonal() -> None:
    pos, cvec = gaussian(0, 6, 5), gaussian(1, 7, 5)
    weights = {(1, 1): gaussian(2, 5, 5), (0, 0): torch.diag(gaussian(3, 5))}
    found = kernels.empirical_gap(pos, cvec, weights, pairs=20_000)
    c, t = (normalize_rows(x)[0].numpy() for x in (cvec, pos))
    W, L, D = sum(weights.values()).numpy(), weights[(1, 1)].numpy(), weights[(0, 0)].numpy()  # type: ignore[union-attr]
    gaps, scores = [], []
    for i in np.ndindex(7, 6, 7, 6):
        q, k = (c[i[0]], t[i[1]]), (c[i[2]], t[i[3]])
        scores.append((q[0] + q[1]) @ W @ (k[0] + k[1]))
        gaps.append(scores[-1] - q[1] @ L @ k[1] - q[0] @ D @ k[0])
    assert found.r_rms == pytest.approx(np.sqrt(np.mean(np.square(gaps))), rel=0.03)
    assert found.score_rms == pytest.approx(np.sqrt(np.mean(np.square(scores))), rel=0.03)
    assert found.r_max <= max(np.abs(gaps)) + 1e-12
    assert found.incoh_max == pytest.approx(np.abs(c @ t.T).max())
    assert found.incoh_avg == pytest.approx(np.abs(c @ t.T).mean())
    basis = torch.linalg.qr(gaussian(4, 8, 8)).Q
    split = {(1, 1): basis[:, :3] @ gaussian(5, 3, 3) @ basis[:, :3].T}
    apart = kernels.empirical_gap(
        gaussian(6, 9, 3) @ basis[:, :3].T, gaussian(7, 9, 5) @ basis[:, 3:].T, split
    )
    assert apart.relative < 1e-12 < found.relative
    assert math.isnan(kernels.empirical_gap(pos, cvec, {(0, 0): torch.zeros(5, 5)}).relative)


@cases
@given(seeds, st.integers(1, 3))
def test_structured_gaps_equal_the_dense_ones_of_each_head(seed: int, rank: int) -> None:
    pos, cvec = gaussian(seed, 6, 5), gaussian(seed + 1, 7, 5)
    V, L, delta = (
        torch.linalg.qr(gaussian(seed + 2, 5, rank)).Q,
        gaussian(seed + 3, 4, rank, rank),
        gaussian(seed + 4, 4, 5),
    )
    found = kernels.structured_gaps(pos, cvec, V, L, delta, pairs=50, seed=seed)
    for h in range(4):
        dense = kernels.empirical_gap(
            pos, cvec, {(1, 1): V @ L[h] @ V.T, (0, 0): torch.diag(delta[h])}, pairs=50, seed=seed
        )
        assert float(found.r_rms[h]) == pytest.approx(dense.r_rms)
        assert float(found.r_max[h]) == pytest.approx(dense.r_max)
        assert float(found.score_rms[h]) == pytest.approx(dense.score_rms)


def test_kernel_gaps_of_a_model_are_those_of_its_fitted_weights() -> None:
    from tl_geometry import decompose, zoo
    from tl_geometry.measures.factorisation import kernel_gaps
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
    parts = {(1, 1): V @ fit.L[2] @ V.T, (0, 0): torch.diag(fit.delta[2])}
    dense = kernels.empirical_gap(pos, cvec, parts, pairs=200)
    assert found.heads[2] == (1, 2)
    assert float(found.relative[2]) == pytest.approx(dense.relative, rel=1e-6)
    assert float(found.incoherence_max[2]) == pytest.approx(dense.incoh_max)
    assert bilinear.leading_directions(basis.pos[1], 3, centered=True)[0].shape == V.shape
    assert list(found.to_dataframe().columns[:3]) == ["layer", "head", "relative"]
    with pytest.raises(GeometryError, match="sampled contexts"):
        kernel_gaps(model, decompose(model, tokens, keep=0, progress=False))
