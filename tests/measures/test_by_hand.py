"""Theorem 2 with its constants written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.modules import copy_of
from tl_geometry.measures import kernels
from tl_geometry.sphere import projection


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_kernels(module: Any) -> None:
    g = torch.nn.functional.normalize
    context, position = g(draw(3, 5, seed=1), dim=1), g(draw(4, 5, seed=2), dim=1)
    parts = (context, position)
    weights = {
        (a, b): module.random_sparse_weight(parts[a], parts[b], 3, seed=10 * a + b)
        for a, b in module.PARTS
    }
    coefficients = torch.cat([w.coefficients for w in weights.values()])
    assert bool((coefficients < 0).any()), "coefficients are drawn from [-1, 1]"
    for (a, _), w in weights.items():
        rebuilt = sum(
            float(c) * np.outer(u.numpy(), v.numpy())
            for c, u, v in zip(w.coefficients, w.left, w.right, strict=True)
        )
        assert np.allclose(w.matrix, rebuilt)
        cosine = (g(w.left, dim=1) @ parts[a].T).abs().amax(1)
        assert torch.allclose(cosine, torch.ones(3).double()), "atoms are rows"
    queries, keys = (context[[0, 1]], position[[2, 3]]), (context[[2, 0]], position[[0, 1]])
    found = module.factorisation_gap(queries, keys, weights, parts)
    c = float(np.abs(context.numpy() @ position.numpy().T).max())
    assert found.incoh == pytest.approx(c)
    assert found.bound == pytest.approx(float(coefficients.abs().sum()) * (2 * c + c * c))
    W = torch.stack([w.matrix for w in weights.values()]).sum(0).numpy()
    lhs = (queries[0] + queries[1]).numpy() @ W @ (keys[0] + keys[1]).numpy().T
    own = sum(
        queries[a].numpy() @ w.matrix.numpy() @ keys[b].numpy().T for (a, b), w in weights.items()
    )
    assert np.allclose(found.r, lhs - own)
    tail = module.noise_tail(g(draw(9, seed=3), dim=0), g(draw(9, seed=4), dim=0), samples=3000)
    assert float(tail.draws.var()) == pytest.approx(1 / 9, rel=0.15)
    assert torch.allclose(tail.bound, 2 * torch.exp(-9 * tail.levels**2 / 2))
    assert torch.allclose(
        tail.share, (tail.draws.abs()[None] > tail.levels[:, None]).double().mean(1)
    )
    matrices = {k: w.matrix for k, w in weights.items()}
    gap = module.empirical_gap(position, context, matrices, pairs=500, seed=5)
    q, k = module.draw_pairs(module.unit_bases(position, context), 500, 5)
    score = np.einsum("pi,ij,pj->p", (q[0] + q[1]).numpy(), W, (k[0] + k[1]).numpy())
    mine = sum(
        np.einsum("pi,ij,pj->p", q[a].numpy(), m.numpy(), k[b].numpy())
        for (a, b), m in matrices.items()
    )
    assert gap.r_rms == pytest.approx(np.sqrt(((score - mine) ** 2).mean()))
    assert gap.r_max == pytest.approx(np.abs(score - mine).max())
    assert gap.score_rms == pytest.approx(np.sqrt((score**2).mean()))
    assert gap.relative == pytest.approx(gap.r_rms / gap.score_rms)
    assert gap.incoh_avg == pytest.approx(np.abs(context.numpy() @ position.numpy().T).mean())
    x, v, M = draw(4, 5, seed=6), draw(4, 2, seed=7), draw(5, 5, seed=8)
    for causal in (True, False):
        e = np.exp(x.numpy() @ M.numpy() @ x.numpy().T)
        e = np.tril(e) if causal else e
        wanted = e @ v.numpy() / e.sum(1, keepdims=True)
        assert np.allclose(module.kernel_attention(x, v, M, causal=causal), wanted)


def check_sphere(module: Any) -> None:
    x, gain, bias = draw(6, 5, seed=1), draw(5, seed=2), draw(5, seed=3)
    a = x.numpy()
    c = a - a.mean(1, keepdims=True)
    scale = np.sqrt((c**2).mean(1, keepdims=True) + 0.3)
    found = module.norm_geometry(x, gain, bias, eps=0.3)
    assert np.allclose(found.z, c / scale)
    assert np.allclose(found.y, c / scale * gain.numpy() + bias.numpy())
    radius = np.linalg.norm(c / scale, axis=1)
    assert np.allclose(found.radius, radius)
    assert np.allclose(found.deficit, math.sqrt(5) - radius)
    assert float(found.ellipsoid_residual.abs().max()) < 1e-9
    off = module.norm_geometry(x, gain, bias, eps=0.3, norm_type="RMS")
    assert bool(off.hyperplane_residual.isnan().all())
    turn = lambda u, v: math.acos(u @ v / np.linalg.norm(u) / np.linalg.norm(v))
    path = module.path_geometry(x)
    steps = [turn(c[i], c[i + 1]) for i in range(5)]
    assert path.steps.tolist() == pytest.approx(steps)
    assert float(path.length) == pytest.approx(sum(steps))
    assert float(path.net) == pytest.approx(turn(c[0], c[-1]))
    assert float(path.tortuosity) == pytest.approx(sum(steps) / turn(c[0], c[-1]))
    state, update = x[0], x[1]
    h, u = c[0], c[1]
    split, unit = module.update_split(state, update), h / np.linalg.norm(h)
    assert float(split.radial) == pytest.approx(u @ unit)
    assert float(split.tangential) == pytest.approx(np.linalg.norm(u - (u @ unit) * unit))
    assert float(split.turn) == pytest.approx(turn(h, h + u))
    vocabulary = draw(20, 5, seed=4)
    module.VOCABULARY_CHUNK = 8
    v = vocabulary.numpy() - vocabulary.numpy().mean(1, keepdims=True)
    angles = np.array([turn(h, row) for row in v])
    for target in (3, 17):
        near = module.token_approach(state, vocabulary, torch.tensor(target))
        assert float(near.angle) == pytest.approx(angles[target])
        assert int(near.rank) == 1 + (angles < angles[target]).sum()
    rows = draw(30, 4, seed=5) * torch.tensor([3.0, 1.0, 2.0, 0.5])
    p = module.principal_projection(rows, 2)
    variance = np.linalg.svd(rows.numpy() - rows.numpy().mean(0), compute_uv=False) ** 2
    assert p.share.tolist() == pytest.approx((variance[:2] / variance.sum()).tolist())
    assert np.allclose(p(rows).mean(0), 0, atol=1e-9)


def test_kernels_by_hand() -> None:
    check_kernels(copy_of(kernels))


def test_the_sphere_by_hand() -> None:
    check_sphere(copy_of(projection))
