"""Laws of the context measures: bounds, brute force, planted clusters with analytic answers, the
compactness inequality."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.measures import contextual

pytestmark = pytest.mark.once

cases = settings(deadline=None, max_examples=20)
seeds = st.integers(0, 10_000)


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cluster_compactness(points: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Compactness of labelled points: that of contexts of one position without a positional
    part."""
    member = torch.nn.functional.one_hot(labels.unique(return_inverse=True)[1]).double()
    x = points.double() - points.double().mean(-2, keepdim=True)
    counts = member.sum(0).long()
    means = member.T @ x / counts[:, None]
    none = torch.zeros_like(x[..., :1, :])
    found = contextual.compactness_from_moments(x.mT @ x, none, means, counts, **options)
    return found.raw


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# --- Incoherence ----------------------------------------------------------------------------------
# ------------------


@cases
@given(seeds, st.integers(1, 6), st.integers(1, 6), st.integers(1, 5))
def test_incoherence_equals_all_pairs_and_keeps_its_order(
    seed: int, positions: int, contexts: int, d_model: int
) -> None:
    pos, ctx = gaussian(seed, 2, positions, d_model), gaussian(seed + 1, 2, contexts, d_model)
    found = contextual.incoherence(pos, ctx)
    for state in range(2):
        all_pairs = np.array([cosine(p.numpy(), c.numpy()) for p in pos[state] for c in ctx[state]])
        expected = [
            np.abs(all_pairs).max(),
            np.abs(all_pairs).mean(),
            np.sqrt((all_pairs**2).mean()),
            all_pairs.mean(),
        ]
        assert np.allclose([float(x[state]) for x in found[:4]], expected)
    assert (found.signed.abs() <= found.avg + 1e-12).all()
    assert (found.avg <= found.rms + 1e-12).all()
    assert (found.rms <= found.max + 1e-12).all()
    assert (found.max <= 1 + 1e-12).all()
    unit = [torch.nn.functional.normalize(x[0], dim=-1) for x in (pos, ctx)]
    rms = math.sqrt(
        float(((unit[0].T @ unit[0]) * (unit[1].T @ unit[1])).sum()) / (positions * contexts)
    )
    assert float(found.rms[0]) == pytest.approx(rms)
    swapped = contextual.incoherence(3 * ctx, -pos)
    assert torch.allclose(swapped.avg, found.avg)
    assert torch.allclose(swapped.signed, -found.signed)


def test_incoherence_of_many_contexts_is_summed_in_blocks() -> None:
    pos, ctx = gaussian(0, 3, 4), gaussian(1, contextual.BLOCK + 5, 4)
    halves = [contextual.incoherence(pos, c) for c in ctx.split(700)]
    whole = contextual.incoherence(pos, ctx)
    assert float(whole.max) == max(float(h.max) for h in halves)
    assert float(whole.avg * whole.pairs) == pytest.approx(
        sum(float(h.avg * h.pairs) for h in halves)
    )


def test_incoherence_baseline_is_what_random_directions_give() -> None:
    d, positions, contexts = 48, 100, 200
    found = contextual.incoherence(gaussian(0, 20, positions, d), gaussian(1, 20, contexts, d))
    base = contextual.cosine_baseline(d, positions * contexts)
    assert float(found.avg.mean()) == pytest.approx(base.avg, rel=0.01)
    assert float(found.rms.mean()) == pytest.approx(base.rms, rel=0.01)
    assert float(found.max.mean()) == pytest.approx(base.max, rel=0.05)
    assert base.avg == pytest.approx(math.sqrt(2 / (math.pi * d)), rel=0.01)
    aligned = contextual.incoherence(gaussian(0, positions, d) + 2, gaussian(1, contexts, d) + 2)
    assert (
        float(aligned.avg) > 3 * base.avg
    )  # the baseline is not met by directions that share a mean
    assert contextual.cosine_baseline(1, 5).max == 1


def test_zero_rows_are_left_out_of_the_means() -> None:
    pos, ctx = gaussian(0, 4, 3), gaussian(1, 5, 3)
    pos[1], ctx[0] = 0, 0
    found, kept = contextual.incoherence(pos, ctx), contextual.incoherence(pos[[0, 2, 3]], ctx[1:])
    assert torch.allclose(torch.stack(found[:4]), torch.stack(kept[:4]))
    assert int(found.pairs) == 12
    assert contextual.incoherence(torch.zeros(2, 3), torch.ones(2, 3)).avg.isnan()


@cases
@given(seeds, st.integers(1, 4))
def test_subspace_overlap_against_scipy(seed: int, r: int) -> None:
    import scipy.linalg

    pos, ctx = gaussian(seed, 7, 9), gaussian(seed + 1, 6, 9)
    found = contextual.subspace_overlap(pos, ctx, r)
    spans = [np.linalg.svd(x.numpy())[2][:r].T for x in (pos, ctx)]
    expected = np.sort(scipy.linalg.subspace_angles(*spans))
    assert float(found) == pytest.approx(float(np.mean(np.cos(expected) ** 2)))
    assert float(contextual.subspace_overlap(pos, pos, r)) == pytest.approx(1)


def test_subspace_overlap_of_random_subspaces_is_the_baseline() -> None:
    found = contextual.subspace_overlap(gaussian(0, 200, 12, 40), gaussian(1, 200, 12, 40), 3)
    assert float(found.mean()) == pytest.approx(3 / 40, rel=0.05)


def test_subspace_overlap_of_missing_directions_is_nan() -> None:
    """Centred rows have one direction less than there are rows; each of a batch is judged alone."""
    pos, ctx = gaussian(0, 2, 4, 9), gaussian(1, 2, 8, 9)
    pos[0] -= pos[0].mean(0)
    found = contextual.subspace_overlap(pos, ctx, 4)
    assert found.isnan().tolist() == [True, False]
    assert contextual.subspace_overlap(pos, ctx, 3).isfinite().all()


# --- Clusters -------------------------------------------------------------------------------------
# ------------------


@cases
@given(
    seeds, st.lists(st.integers(0, 3), min_size=3, max_size=10).filter(lambda z: len(set(z)) > 1)
)
def test_cluster_similarity_against_loops(seed: int, labels: list[int]) -> None:
    ctx, z = gaussian(seed, len(labels), 4), torch.tensor(labels)
    rows = ctx.numpy()
    pairs = {
        (i, j): cosine(rows[i], rows[j]) for i, j in itertools.product(range(len(labels)), repeat=2)
    }
    same = [abs(v) for (i, j), v in pairs.items() if labels[i] == labels[j]]
    off = [abs(v) for (i, j), v in pairs.items() if labels[i] == labels[j] and i != j]
    different = [abs(v) for (i, j), v in pairs.items() if labels[i] != labels[j]]
    reference = contextual.cluster_similarity(ctx, z, preset="reference")
    exact = contextual.cluster_similarity(ctx, z)
    assert float(reference.intra) == pytest.approx(np.mean(same))
    assert float(exact.inter) == pytest.approx(np.mean(different)) == float(reference.inter)
    assert float(exact.intra) == pytest.approx(np.mean(off)) if off else exact.intra.isnan()
    signed = contextual.cluster_similarity(ctx, z, signed=True)
    assert float(signed.inter) == pytest.approx(
        np.mean([v for (i, j), v in pairs.items() if labels[i] != labels[j]])
    )
    alone = [i for i, k in enumerate(sorted(set(labels))) if labels.count(k) < 2]
    assert exact.table.diagonal()[alone].isnan().all()
    assert (exact.table.nan_to_num(0) <= 1 + 1e-12).all()


def test_labels_are_those_that_occur_however_large() -> None:
    ctx, small = gaussian(0, 40, 30), torch.arange(4).repeat_interleave(10)
    large = torch.tensor([0, 7, 300_000, 2**40])[small]
    for signed in (False, True):
        found, known = (
            contextual.cluster_similarity(ctx, z, signed=signed) for z in (large, small)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, known, strict=True))


def test_published_similarity_counts_self_pairs_and_ours_does_not() -> None:
    ctx, z = gaussian(0, 40, 300), torch.arange(4).repeat_interleave(10)
    exact, reference = (
        contextual.cluster_similarity(ctx, z, preset=p) for p in ("exact", "reference")
    )
    assert float(reference.intra) == pytest.approx((9 * float(exact.intra) + 1) / 10)
    assert float(exact.intra) == pytest.approx(
        contextual.cosine_baseline(300).avg, rel=0.1
    )  # no clusters here: chance alone
    assert reference.intra > 2 * reference.inter  # and yet the published form shows some


def test_planted_clusters_have_their_analytic_similarity() -> None:
    """Unit centres with noise of variance s^2 per coordinate: E cos within a cluster is close to 1
    / (1 + d s^2)."""
    d, s, n = 64, 0.05, 200
    centres = torch.eye(d, dtype=torch.float64)[:3]
    z = torch.arange(3).repeat_interleave(n)
    ctx = centres[z] + s * gaussian(0, 3 * n, d)
    found = contextual.cluster_similarity(ctx, z, signed=True)
    assert float(found.intra) == pytest.approx(1 / (1 + d * s**2), rel=0.01)
    assert abs(float(found.inter)) < 0.01
    shuffled = contextual.cluster_similarity(
        ctx, z[torch.randperm(len(z), generator=torch.Generator().manual_seed(0))], signed=True
    )
    assert abs(float(shuffled.intra - shuffled.inter)) < 0.02


def test_cluster_arguments_are_checked() -> None:
    ctx = gaussian(0, 6, 3)
    with pytest.raises(GeometryError, match="space"):
        cluster_compactness(ctx, torch.tensor([0, 0, 0, 1, 1, 1]), space="half")


# --- Compactness ----------------------------------------------------------------------------------
# ------------------


def brute_compactness(x: np.ndarray, labels: np.ndarray) -> float:
    within, between, mean = np.zeros((x.shape[1],) * 2), np.zeros((x.shape[1],) * 2), x.mean(0)
    for k in np.unique(labels):
        part = x[labels == k]
        within += (part - part.mean(0)).T @ (part - part.mean(0)) / len(x)
        between += len(part) * np.outer(part.mean(0) - mean, part.mean(0) - mean) / len(x)
    return float(np.trace(between @ np.linalg.inv(within)))


@cases
@given(seeds, st.integers(2, 4), st.integers(1, 4))
def test_compactness_is_the_trace_ratio_and_affine_invariant(
    seed: int, clusters: int, d_model: int
) -> None:
    z = torch.arange(clusters).repeat_interleave(8)[1:]  # unequal sizes
    x = gaussian(seed, len(z), d_model) + gaussian(seed + 1, clusters, d_model)[z]
    value = float(cluster_compactness(x, z))
    assert value == pytest.approx(brute_compactness(x.numpy(), z.numpy()), rel=1e-8)
    A = gaussian(seed + 2, d_model, d_model) + 3 * torch.eye(d_model)
    assert float(cluster_compactness(x @ A + 1e3 * gaussian(seed, d_model), z)) == pytest.approx(
        value, rel=1e-5
    )
    n, k = len(z), clusters
    assert float(cluster_compactness(x, z, norm="dof")) == pytest.approx(value * (n - k) / (k - 1))
    whole = ("pca", d_model)
    assert float(cluster_compactness(x, z, space=whole)) == pytest.approx(value, rel=1e-8)
    batched = cluster_compactness(torch.stack([x, 2 * x]), z)
    assert torch.allclose(batched, torch.tensor([value, value], dtype=torch.float64))
    assert float(cluster_compactness(x, z + 1)) == pytest.approx(
        value
    )  # a label that nobody has changes nothing


def test_compactness_of_equal_means_is_zero_and_of_gaussians_analytic() -> None:
    x = gaussian(0, 20, 3)
    assert float(
        cluster_compactness(torch.cat([x, x]), torch.arange(2).repeat_interleave(20))
    ) == pytest.approx(0, abs=1e-20)
    z = torch.arange(2).repeat_interleave(5000)
    points = gaussian(1, 10_000, 3) + 4.0 * z[:, None]
    assert float(cluster_compactness(points, z)) == pytest.approx(
        3 * 4.0, rel=0.05
    )  # (delta / 2)^2 per axis


def test_singular_clusters_are_refused_and_ridge_is_explicit() -> None:
    z = torch.arange(2).repeat_interleave(3)
    x = gaussian(0, 6, 10)
    with pytest.raises(GeometryError, match=r'N - K = 4.*space=\("pca", k\) or ridge='):
        cluster_compactness(x, z)
    assert cluster_compactness(x, z, space=("pca", 2)) > 0
    dependent = gaussian(1, 60, 3)
    dependent = torch.cat([dependent, dependent.sum(1, keepdim=True)], dim=1)
    labels = torch.arange(2).repeat_interleave(30)
    with pytest.raises(GeometryError, match="dependent points"):
        cluster_compactness(dependent, labels)
    weak, strong = (cluster_compactness(dependent, labels, ridge=r) for r in (1e-3, 1.0))
    assert 0 < strong < weak


def test_a_ridge_is_the_same_for_every_coordinate() -> None:
    """``ridge tr(S_W) / d`` on the diagonal, not a share of each coordinate's own variance, which
    the determinant of coordinates with outliers would hide."""
    labels = torch.arange(3).repeat_interleave(20)
    x = gaussian(3, 60, 4) * torch.tensor([0.1, 1.0, 5.0, 20.0]).double() + labels[:, None]
    means = torch.stack([x[labels == k].mean(0) for k in range(3)])
    within = torch.stack([x[labels == k] - means[k] for k in range(3)]).flatten(0, 1)
    S_W = within.mT @ within / 60
    S_B = (means - x.mean(0)).mT @ (means - x.mean(0)) / 3
    ridged = S_W + 0.5 * S_W.trace() / 4 * torch.eye(4).double()
    expected = (S_B @ torch.linalg.inv(ridged)).trace()
    value = cluster_compactness(x, labels, ridge=0.5)
    assert float(value) == pytest.approx(float(expected), rel=1e-8)


@cases
@given(seeds, st.integers(1, 4))
def test_cvec_is_never_less_compact_than_raw(seed: int, d_model: int) -> None:
    h = (
        gaussian(seed, 9, 6, d_model)
        + 2 * gaussian(seed + 1, 6, d_model)
        + gaussian(seed + 2, 9, 1, d_model)
        + 5
    )
    z = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2])
    mean = h.mean((0, 1))
    P = h.mean(0) - mean
    rows = z.repeat_interleave(6)
    raw = cluster_compactness(h.reshape(-1, d_model), rows)
    cvec = cluster_compactness((h - mean - P).reshape(-1, d_model), rows)
    assert cvec >= raw - 1e-12
    means = torch.stack([h[z == k].mean((0, 1)) - mean for k in range(3)])
    S = torch.einsum("cti,ctj->ij", h - mean, h - mean)
    streamed = contextual.compactness_from_moments(S, P, means, torch.bincount(z))
    assert float(streamed.raw) == pytest.approx(float(raw), rel=1e-8)
    assert float(streamed.cvec) == pytest.approx(float(cvec), rel=1e-8)
    flat = contextual.compactness_from_moments(S, torch.zeros_like(P), means, torch.bincount(z))
    assert float(flat.cvec) == float(flat.raw)


def test_states_behind_a_layer_norm_are_refused_in_the_full_space() -> None:
    """LayerNorm outputs lie on a hyperplane: with float32 moments the dependence is only seen at
    their accuracy."""
    h = torch.nn.functional.layer_norm(gaussian(0, 8, 6, 5), (5,)).float().double()
    z, mean = torch.arange(2).repeat_interleave(4), h.mean((0, 1))
    means = torch.stack([h[z == k].mean((0, 1)) - mean for k in range(2)])
    S = torch.einsum("cti,ctj->ij", h - mean, h - mean)
    arguments = (S, h.mean(0) - mean, means, torch.bincount(z))
    with pytest.raises(GeometryError, match="dependent points"):
        contextual.compactness_from_moments(*arguments, accuracy=1e-6)
    assert contextual.compactness_from_moments(*arguments, space=("pca", 3)).raw > 0


def test_overlap_by_shared_outlier_coordinates_is_no_more_than_its_flipped_null() -> None:
    """Independent pos and ctx that share four large coordinates overlap far above random
    directions; the null that keeps the coordinates' sizes says that nothing is shared. A planted
    common direction across coordinates stays above both."""
    from tl_geometry import contextual_report, decompose_activations

    g = torch.Generator().manual_seed(0)
    size = torch.ones(64)
    size[:4] = 30.0
    pos, ctx = torch.randn(40, 64, generator=g) * size, torch.randn(60, 64, generator=g) * size
    shared = torch.randn(10, 64, generator=g) * 8

    def report(p: torch.Tensor, c: torch.Tensor) -> tuple[float, float, float]:
        h = p + c.unsqueeze(1) + 0.1 * torch.randn(60, 40, 64, generator=g)
        found = contextual_report(decompose_activations(h), jackknife=False)
        nulls = [float(found.nulls["overlap", n]) for n in ("random", "flipped")]
        return float(found["overlap"]), nulls[0], nulls[1]

    overlap, random, flipped = report(pos, ctx)
    assert overlap > 2.5 * random
    assert flipped == pytest.approx(overlap, abs=0.08)
    common = [torch.randn(n, 10, generator=g) @ shared for n in (40, 60)]
    overlap, _, flipped = report(pos + common[0], ctx + common[1])
    assert overlap > flipped + 0.15
