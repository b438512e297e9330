"""The geometry of the norm's sphere, written out in numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.modules import copy_of
from tl_geometry.sphere import projection


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def test_the_sphere_by_hand() -> None:
    check_sphere(copy_of(projection))
