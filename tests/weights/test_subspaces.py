"""The null of a positional subspace: position destroyed, the claim goes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import tiny
from tl_geometry.report import findings
from tl_geometry.weights import bilinear, subspaces, vocabulary
from tl_geometry.weights.heads import WeightGeometry, weight_geometry

CONTEXTS, POSITIONS, D = 32, 24, 32


def read_directions(k: int = 3) -> Tensor:
    """Where W_QK of L0H1 of the tiny model is largest on both sides, ``[d_model k]``."""
    view = tlg.view(tiny("bridge", "gpt2"))
    ((_, factors),) = vocabulary.factors_of(view, [0], "QK")
    W = factors.left[1] @ factors.right[1].mT
    values, vectors = torch.linalg.eigh((W + W.mT) / 2)
    return vectors[:, values.abs().argsort(descending=True)[:k]]


def states(seed: int, *, position: float = 0.0, shared: float = 0.0) -> Tensor:
    """Slowly varying states (AR 0.9 along the window); position moves them along what L0H1 reads,
    and (``shared``) they vary most along it, wherever they stand."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, CONTEXTS, POSITIONS, D, generator=g).double()
    for t in range(1, POSITIONS):
        noise[:, :, t] = 0.9 * noise[:, :, t - 1] + 0.19**0.5 * noise[:, :, t]
    V = read_directions()
    curve = torch.randn(POSITIONS, 3, generator=torch.Generator().manual_seed(1)).double()
    return noise + shared * (noise @ V) @ V.T + position * curve @ V.T


def geometry(h: Tensor) -> WeightGeometry:
    return weight_geometry(tiny("bridge", "gpt2"), tlg.decompose_activations(h), rank=3)


def rolled(h: Tensor, seed: int) -> Tensor:
    """Each window shifted cyclically by an offset of its own: no position, all else as it was."""
    offsets = torch.randint(
        h.shape[2], (h.shape[1],), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([x.roll(int(o), 1) for x, o in zip(h.unbind(1), offsets, strict=True)], 1)


def test_states_that_vary_where_a_head_reads_are_no_evidence_of_position() -> None:
    """Without any position the leading directions of averages are those in which states vary most:
    random combinations of states hold less of W_QK, shifted groups as much."""
    found = findings.lift(geometry(states(0, shared=3.0)))
    assert found is not None
    assert not found.clear
    assert found.said.startswith("No evidence")


def test_position_along_what_a_head_reads_is_found_and_goes_with_position() -> None:
    h = states(1, position=1.5)
    real, gone = geometry(h), geometry(rolled(h, 2))
    row = real.head("L0H1")
    assert float(real.p[row]) == 1 / 20
    assert float(real.concentration[row]) > float(real.noise_high[row])
    found, destroyed = findings.lift(real), findings.lift(gone)
    assert found is not None
    assert destroyed is not None
    assert found.clear
    assert "L0H1" in found.said
    assert not destroyed.clear
    assert float(gone.p[row]) > 0.05


def test_no_position_is_claimed_where_its_reliability_is_low() -> None:
    """Even with the smallest p-value: half of the corpus does not find what the other half does."""
    real = geometry(states(1, position=1.5))
    low = torch.full_like(real.reliability, 0.4)
    found = findings.lift(dataclasses.replace(real, reliability=low))
    assert found is not None
    assert not found.clear
    assert "reliab" in found.beside


@pytest.mark.slow
def test_the_p_value_is_uniform_without_position() -> None:
    """Size at nominal 5% over states that vary most where L0H1 reads; the twin has random subspaces
    alone for its null, and is nearly always refused."""
    view, hits, twin = tlg.view(tiny("bridge", "gpt2")), 0, 0
    ((_, factors),) = vocabulary.factors_of(view, [0], "QK")
    for seed in range(60):
        basis = tlg.decompose_activations(states(100 + seed, shared=3.0)[0])
        found = subspaces.Subspaces(basis, width=3, k=3, centered=True, seed=seed).at(0)
        drawn = subspaces.drawn_concentration(factors, found, None, 3)
        value = bilinear.structure(factors, found.directions, k=3).concentration
        noise, random = (float(subspaces.familywise_p(value, x).min()) for x in drawn)
        hits, twin = hits + (noise <= 0.05), twin + (random <= 0.05)
    assert hits / 60 < 0.15
    assert twin / 60 > 0.8


@pytest.mark.parametrize("centered", [True, False])
def test_random_subspaces_lie_where_positional_ones_can(centered: bool) -> None:
    basis = tlg.decompose_activations(states(3)[0])
    found = subspaces.Subspaces(basis, width=3, k=3, centered=centered).at(0)
    assert bool((found.draws.random.sum(1).abs() < 1e-12).all()) == centered


def test_what_all_contexts_share_at_a_position_cancels_in_the_null() -> None:
    """A strong curve is in none of the draws; shifted groups would keep its directions."""
    h = states(3, position=10.0)[0]
    found = subspaces.Subspaces(tlg.decompose_activations(h), width=3, k=3, centered=False).at(0)
    noise = subspaces.Subspaces(
        tlg.decompose_activations(states(3)[0]), width=3, k=3, centered=False
    ).at(0)
    overlap = (found.directions.mT @ found.draws.noise).square().sum((1, 2)) / 3
    assert float(overlap.max()) < 0.6
    torch.testing.assert_close(found.draws.noise.abs(), noise.draws.noise.abs(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("contexts", "groups", "given"), [(10, 8, True), (9, 8, False), (20, 3, False)]
)
def test_few_contexts_or_groups_have_no_null(contexts: int, groups: int, given: bool) -> None:
    basis = tlg.decompose_activations(states(4)[:, :contexts], groups=groups)
    found = weight_geometry(tiny("bridge", "gpt2"), basis, rank=3)
    assert bool(found.p.isfinite().all()) == given
    assert any("no null of position" in f for f in found.provenance.flags) != given
