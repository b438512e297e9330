"""The sphere of a norm layer: against torch's norms, invariances, triangle inequality, degenerate
inputs."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import GeometryError
from tl_geometry.models.norms import remove_mean
from tl_geometry.sphere import projection

pytestmark = pytest.mark.once

SEEDS = st.integers(0, 10_000)
NORM_TYPES = st.sampled_from(["LN", "RMS"])
fast = settings(deadline=None, max_examples=20)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@given(SEEDS, NORM_TYPES, st.sampled_from([0.0, 1e-5, 0.3]))
@fast
def test_points_and_surfaces(seed: int, norm_type: str, eps: float) -> None:
    x, gain, bias = (
        3 * normal(5, 8, seed=seed) + 2,
        normal(8, seed=seed + 1),
        normal(8, seed=seed + 2),
    )
    g = projection.norm_geometry(x, gain, bias, eps, norm_type)
    module = torch.nn.functional.layer_norm if norm_type == "LN" else torch.nn.functional.rms_norm
    close(g.z, module(x, (8,), eps=eps), 1e-9)
    close(g.y, gain * g.z + bias)
    assert float(g.ellipsoid_residual.max()) < 1e-9
    close(g.deficit, 8**0.5 - g.radius)
    assert bool((g.radius <= 8**0.5 + 1e-12).all())
    if norm_type == "LN":
        assert float(g.hyperplane_residual.max()) < 1e-9
        off = projection.norm_geometry(x, gain, bias, eps, "RMS").z
        assert (
            float(off.sum(-1).abs().max()) > 0.1
        )  # the same states without the centring are not in the hyperplane
    else:
        assert bool(g.hyperplane_residual.isnan().all())
    assert not bool(g.degenerate.any())


@given(SEEDS, st.floats(0.1, 50), st.floats(-20, 20))
@fast
def test_layernorm_forgets_scale_and_shift_and_its_cosines_are_correlations(
    seed: int, a: float, b: float
) -> None:
    x = normal(6, 9, seed=seed)
    z = projection.norm_geometry(x, eps=0.0).z
    close(z, projection.norm_geometry(a * x + b, eps=0.0).z, 1e-8)
    close(
        linalg.normalize_rows(z)[0] @ linalg.normalize_rows(z)[0].mT,
        torch.from_numpy(np.corrcoef(x.numpy())),
        1e-9,
    )


def test_the_deficit_of_a_long_vector_survives_rounding() -> None:
    g = projection.norm_geometry(1e6 * normal(1, 100), eps=1e-5, norm_type="RMS")
    length = float(torch.linalg.vector_norm(1e6 * normal(1, 100)))
    assert float(g.deficit) == pytest.approx(10 * 100 * 1e-5 / (2 * length**2), rel=1e-6)


def test_constant_vectors_zero_gains_and_zero_vectors() -> None:
    gain = torch.tensor([0.0, 1.0, 2.0, 0.0]).double()
    g = projection.norm_geometry(
        torch.tensor([[0.1, 0.1, 0.1, 0.1], [1, 2, 3, 5], [0, 0, 0, 0]]).double(), gain, eps=0.0
    )
    assert g.degenerate.tolist() == [True, False, True]
    assert g.radius.tolist() == pytest.approx([0, 2, 0])
    assert float(g.ellipsoid_residual.max()) < 1e-12
    p = projection.path_geometry(torch.zeros(3, 4))
    assert math.isnan(float(p.tortuosity))
    still = projection.path_geometry(torch.tensor([[1.0, 2, 4], [2, 4, 8]]), norm_type="RMS")
    assert float(still.net) == pytest.approx(0, abs=1e-7)
    u = projection.update_split(torch.zeros(4), torch.ones(4))
    assert all(math.isnan(float(v)) for v in u)


@given(SEEDS, NORM_TYPES)
@fast
def test_paths(seed: int, norm_type: str) -> None:
    points = normal(3, 6, 7, seed=seed)
    p = projection.path_geometry(points, norm_type)
    assert bool((p.tortuosity >= 1 - 1e-12).all())
    close(p.length, p.steps.sum(-1))
    scaled = points * (1 + torch.arange(6).double())[:, None] + (2.0 if norm_type == "LN" else 0.0)
    close(projection.path_geometry(scaled, norm_type).steps, p.steps, 1e-9)
    c = remove_mean(points, norm_type)
    cosine = torch.nn.functional.cosine_similarity(c[:, :-1], c[:, 1:], dim=-1)
    close(p.steps.cos(), cosine)
    if norm_type == "RMS":
        close(
            projection.path_geometry(points @ torch.linalg.qr(normal(7, 7)).Q, norm_type).steps,
            p.steps,
            1e-9,
        )


@given(SEEDS, NORM_TYPES)
@fast
def test_updates_split_by_pythagoras_and_only_the_tangential_part_turns(
    seed: int, norm_type: str
) -> None:
    h, u = normal(5, 8, seed=seed), normal(5, 8, seed=seed + 1)
    s = projection.update_split(h, u, norm_type)
    close(s.radial.square() + s.tangential.square(), remove_mean(u, norm_type).square().sum(-1))
    length = torch.linalg.vector_norm(remove_mean(h, norm_type), dim=-1)
    close(s.turn, torch.atan2(s.tangential, length + s.radial))
    along = projection.update_split(h, 0.5 * h, norm_type)
    assert float(along.turn.max()) < 1e-7
    assert float(along.tangential.max()) < 1e-12


@given(SEEDS, NORM_TYPES, st.integers(1, 40))
@fast
def test_rank_and_angle_of_a_token_equal_brute_force(seed: int, norm_type: str, chunk: int) -> None:
    points, vocabulary = normal(2, 4, 6, seed=seed), normal(30, 6, seed=seed + 1)
    target = torch.randint(0, 30, (2, 4), generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "VOCABULARY_CHUNK", chunk)
        a = projection.token_approach(points, vocabulary, target, norm_type)
    cosine = torch.nn.functional.cosine_similarity(
        remove_mean(points, norm_type)[:, :, None], remove_mean(vocabulary, norm_type), dim=-1
    )
    own = cosine.gather(-1, target[..., None])
    close(a.angle.cos(), own[..., 0])
    assert a.rank.tolist() == ((cosine > own).sum(-1) + 1).tolist()
    assert (
        projection.token_approach(vocabulary, vocabulary, torch.arange(30), norm_type).rank.tolist()
        == [1] * 30
    )


def test_a_zero_state_has_no_rank_and_targets_are_checked() -> None:
    a = projection.token_approach(torch.zeros(2, 3), torch.eye(3), torch.tensor([0, 1]))
    assert a.rank.tolist() == [0, 0]
    assert bool(a.angle.isnan().all())
    with pytest.raises(GeometryError, match="target: expected token ids from 0 to 2, got 1 to 3"):
        projection.token_approach(torch.ones(2, 3), torch.eye(3), torch.tensor([1, 3]))


@pytest.mark.parametrize("rows", [10, 60])
def test_principal_axes(rows: int) -> None:
    x = normal(rows, 8) * torch.arange(1, 9).double()
    p = projection.principal_projection(x, 3)
    close(p.axes.mT @ p.axes, torch.eye(3).double())
    close(p(x).var(0), torch.linalg.eigvalsh(x.mT.cov()).flip(-1)[:3])
    assert bool((p.axes.gather(0, p.axes.abs().argmax(0, keepdim=True)) > 0).all())
    close(p.share, p(x).var(0) / x.var(0).sum())
    close(p(x), projection.principal_projection(x.flip(0), 3)(x), 1e-8)
    assert bool(projection.principal_projection(torch.ones(4, 3), 1).share.isnan().all())
    with pytest.raises(GeometryError, match="k: expected 1 to 8 axes, got 9"):
        projection.principal_projection(x[:10], 9)


def test_umap_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    text = r"umap: expected the optional package umap-learn, got not installed\. Use pip install"
    with pytest.raises(GeometryError, match=text + ' "tl-geo'):
        projection.umap_coordinates(normal(5, 4), normal(5, 4))

    class Fake:
        def __init__(self, **settings: object) -> None:
            assert settings == {
                "n_neighbors": 15,
                "min_dist": 0.1,
                "n_components": 3,
                "random_state": 7,
            }

        def fit(self, rows: np.ndarray) -> None:
            self.rows = len(rows)

        def transform(self, points: np.ndarray) -> np.ndarray:
            return points[:, :3] + self.rows

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Fake))
    points = normal(2, 5, 4)
    close(projection.umap_coordinates(normal(6, 4), points, seed=7), points[..., :3] + 6)


def test_errors() -> None:
    with pytest.raises(GeometryError, match="norm_type: expected one of 'LN', 'RMS', got 'BN'"):
        projection.norm_geometry(torch.ones(2, 3), norm_type="BN")
    with pytest.raises(GeometryError, match="eps: expected a number of at least 0"):
        projection.norm_geometry(torch.ones(2, 3), eps=-1.0)
    with pytest.raises(GeometryError, match="points: expected at least two states"):
        projection.path_geometry(torch.ones(1, 3))
