"""Laws of the stochastic flow: closed form, exact paths, planted ensembles, determinants, and where
the equation disagrees with the laws printed beside it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from torch import Tensor

from tl_geometry import GeometryError
from tl_geometry.flow.alignment import fit_aligned_bases, proper_rotations
from tl_geometry.flow.langevin import LangevinModel
from tl_geometry.flow.residuals import flow_map

pytestmark = pytest.mark.once

LAWS = settings(deadline=None, max_examples=20)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(
    d: int,
    states: int,
    *,
    alpha: float = 0.5,
    rate: float = 0.2,
    stretch: float = 0.3,
    turn: float = 0.3,
    vary: float = 0.2,
    seed: int = 0,
):
    """A model with known rotations and stretches."""
    U = [torch.linalg.qr(noise(d, d, seed=seed)).Q]
    for k in range(1, states):
        a = noise(d, d, seed=seed + k)
        U.append(U[-1] @ torch.linalg.matrix_exp(turn * (a - a.mT) / (2 * d) ** 0.5))
    gap = torch.linspace(1.5, 0.0, d).double().exp()
    S = torch.stack(
        [gap * torch.exp(stretch * k * (1 + vary * noise(d, seed=99))) for k in range(states)]
    )
    times = torch.arange(1, states + 1).double()
    return LangevinModel(
        subspace=torch.eye(d).double(),
        U=torch.stack(U),
        S=S,
        times=times,
        outside=torch.zeros(states).double(),
        alpha=alpha,
        rate=rate,
        trajectories=100,
    )


def moments(
    model: LangevinModel, mean: Tensor, covariance: Tensor, s: float, t: float
) -> tuple[Tensor, Tensor]:
    """Mean and covariance at ``t`` of what has these at ``s``."""
    phi = model.transition(s, t)
    return phi @ mean, phi @ covariance @ phi.mT + model.noise_covariance(s, t)


SMALL = st.fixed_dictionaries(
    {
        "d": st.integers(2, 6),
        "states": st.integers(2, 5),
        "alpha": st.floats(0.1, 2),
        "rate": st.floats(0.05, 0.6),
        "seed": st.integers(0, 10**5),
    }
)


@LAWS
@given(SMALL, st.floats(0, 1))
def test_rotations_are_orthogonal_and_continuous(chosen, where):
    model = planted(**chosen)
    first, last = float(model.times[0]), float(model.times[-1])
    t = first + where * (last - first)
    R = model.rotation(t)
    assert torch.allclose(R.mT @ R, torch.eye(len(R)).double(), atol=1e-10)
    for k, time in enumerate(model.times):
        assert torch.allclose(model.rotation(float(time)), model.U[k], atol=1e-12)
        for side in (-1e-7, 1e-7):
            if first <= float(time) + side <= last:
                assert torch.allclose(model.rotation(float(time) + side), model.U[k], atol=1e-5)
                assert torch.allclose(model.sigma(float(time) + side), model.S[k], rtol=1e-5)
    assert bool((model.sigma(t) > 0).all())


@LAWS
@given(SMALL)
def test_moments_solve_the_fokker_planck_equations(chosen):
    model = planted(**chosen)
    d = model.S.shape[1]
    mean, root = noise(d, seed=1), noise(d, d, seed=2)
    covariance = root @ root.mT

    def rates(t: float, y: np.ndarray) -> np.ndarray:
        m, C = y[:d], y[d:].reshape(d, d)
        A = model.drift(t).numpy()
        return np.concatenate(
            [A @ m, (A @ C + C @ A.T + model.noise.amplitude(t) ** 2 * np.eye(d)).ravel()]
        )

    y, s = np.concatenate([mean.numpy(), covariance.numpy().ravel()]), float(model.times[0])
    for k in range(
        min(2, len(model.times) - 1)
    ):  # interval by interval: the drift jumps at the states
        a, b = float(model.times[k]), float(model.times[k + 1])
        y = solve_ivp(rates, (a, b - 1e-12), y, rtol=1e-9, atol=1e-11).y[:, -1]
        m, C = moments(model, mean, covariance, s, b)
        assert np.abs(m.numpy() - y[:d]).max() <= 1e-5 * max(1, np.abs(y[:d]).max())
        assert np.abs(C.numpy().ravel() - y[d:]).max() <= 1e-5 * np.abs(y[d:]).max()


def test_the_density_of_the_moments_solves_the_fokker_planck_equation_in_the_plane():
    model = planted(2, 3)
    m0, C0, t, h = torch.tensor([0.5, -0.2]).double(), torch.eye(2).double(), 1.6, 1e-3

    def density(time: float, x: Tensor) -> Tensor:
        m, C = moments(model, m0, C0, 1.0, time)
        z = x - m
        return torch.exp(-0.5 * (z @ torch.linalg.inv(C) * z).sum(-1)) / (
            2 * math.pi * torch.det(C).sqrt()
        )

    x = noise(20, 2, seed=3)
    A, D, e = model.drift(t), model.noise.amplitude(t) ** 2, torch.eye(2).double() * h
    left = (density(t + h, x) - density(t - h, x)) / (2 * h)
    flux, spread = torch.zeros(20).double(), torch.zeros(20).double()
    for i in range(2):
        ahead, behind = density(t, x + e[i]), density(t, x - e[i])
        flux += (((x + e[i]) @ A.mT)[:, i] * ahead - ((x - e[i]) @ A.mT)[:, i] * behind) / (2 * h)
        spread += (ahead - 2 * density(t, x) + behind) / h**2
    assert torch.allclose(left, -flux + D / 2 * spread, atol=1e-5)
    assert float(left.abs().max()) > 1e-3


@LAWS
@given(SMALL)
def test_transitions_compose_and_noise_adds_up(chosen):
    model = planted(**chosen)
    s, u, t = float(model.times[0]), float(model.times[0]) + 0.4, float(model.times[-1])
    assert torch.allclose(
        model.transition(u, t) @ model.transition(s, u), model.transition(s, t), atol=1e-9
    )
    inner, phi = model.noise_covariance(s, u), model.transition(u, t)
    whole = phi @ inner @ phi.mT + model.noise_covariance(u, t)
    assert torch.allclose(whole, model.noise_covariance(s, t), rtol=1e-6, atol=1e-9)


def test_the_noise_integral_has_its_closed_form_without_stretching():
    model = planted(3, 4, stretch=0.0)
    expected = 0.5 * (math.exp(0.2 * 3.5) - math.exp(0.2 * 1.25)) / model.S[0].square()
    assert torch.allclose(model.noise_integral(1.25, 3.5), expected, rtol=1e-12)
    C = model.noise_covariance(
        1.25, 3.5
    )  # then the increment law holds exactly, in every direction
    assert torch.allclose(
        C, 0.5 * (math.exp(0.7) - math.exp(0.25)) * torch.eye(3).double(), atol=1e-12
    )


@pytest.mark.parametrize("method", ["exact", "euler"])
def test_simulated_moments_approach_the_closed_form(method):
    model = planted(3, 3, alpha=2.0, rate=0.4)
    x = torch.tensor([[1.0, -2.0, 0.5]]).double()
    dt = None if method == "exact" else 0.02
    found = model.simulate(x, [1.7, 3.0], method=method, samples=40000, dt=dt, seed=3)
    assert found.shape == (40000, 1, 2, 3)
    for i, t in enumerate((1.7, 3.0)):
        mean, C = moments(model, x[0], torch.zeros(3, 3).double(), 1.0, t)
        rows = found[:, 0, i]
        assert float((rows.mean(0) - mean).abs().max()) < 5 * float(
            C.diagonal().max().sqrt()
        ) / 200 + 0.02 * float(mean.abs().max())
        assert float((rows.mT.cov() - C).abs().max() / C.abs().max()) < 0.06


def test_exact_steps_through_more_times_have_the_same_law_and_seeds_decide():
    model = planted(2, 4)
    x = noise(1, 2)
    a = model.simulate(x, [4.0], samples=30000, seed=1)[:, 0, 0]
    b = model.simulate(x, [2.0, 2.5, 4.0], samples=30000, seed=2)[:, 0, -1]
    assert float((a.mT.cov() - b.mT.cov()).abs().max() / a.mT.cov().abs().max()) < 0.06
    assert torch.equal(model.simulate(x, [2.0], seed=5), model.simulate(x, [2.0], seed=5))
    assert not torch.equal(model.simulate(x, [2.0], seed=5), model.simulate(x, [2.0], seed=6))
    assert model.simulate(x, [2.0], dtype=torch.float32).dtype == torch.float32


def uneven(alpha: float = 1.0, rate: float = 0.3) -> LangevinModel:
    """States at layers 1, 2 and 3.5."""
    times = torch.tensor([1.0, 2.0, 3.5]).double()
    return dataclasses.replace(planted(3, 3, alpha=alpha, rate=rate), times=times)


@pytest.mark.parametrize("seed", [0, 7])
def test_exact_paths_are_the_increments_written_out(seed: int) -> None:
    """Of the co-moving coordinates; at the start itself nothing is drawn."""
    model, x, now = uneven(), noise(4, 3, seed=1), 1.0
    draws = torch.Generator().manual_seed(seed)
    found = model.simulate(x, [1.0, 1.7, 3.5], seed=seed)
    assert torch.equal(found, model.simulate(x, [1.0, 1.7, 3.5])) == (seed == 0)
    assert torch.allclose(found[0, :, 0], x)
    y = x @ (model.rotation(1.0) / model.sigma(1.0))
    for i, t in ((1, 1.7), (2, 3.5)):
        gaussian = torch.randn(4, 3, generator=draws, dtype=torch.float64)
        y, now = y + gaussian * model.noise_integral(now, t).sqrt(), t
        right = (y * model.sigma(t)) @ model.rotation(t).mT
        assert torch.allclose(found[0, :, i], right, rtol=1e-10)


# fitting


def test_the_equations_own_noise_disagrees_with_both_published_laws_where_it_stretches() -> None:
    stretched, plain = planted(5, 4, stretch=0.4), planted(5, 4, stretch=0.0)
    asymptotic = 0.5 * math.exp(0.2 * 4)
    increment = asymptotic - 0.5 * math.exp(0.2 * 1)
    noise = plain.noise_covariance(1.0, 4.0)
    assert torch.allclose(noise, increment * torch.eye(5).double(), atol=1e-9)
    assert float(noise.diagonal().log().mean()) - math.log(asymptotic) < -0.5
    values = torch.linalg.eigvalsh(stretched.noise_covariance(1.0, 4.0))
    assert float(values.max() / values.min()) > 1.2
    variances = stretched.noise_covariance(1.0, 4.0).diagonal()
    assert float(variances.log().mean()) - math.log(increment) > 0.5


def test_exact_flow_without_noise_is_the_linear_extrapolation():
    X = noise(30, 4, 5, seed=2) @ torch.diag(torch.tensor([5.0, 4, 3, 2, 1]).double()) + 0.5
    aligned, _ = proper_rotations(fit_aligned_bases(X))
    model = LangevinModel.fit(X, noise=(0.0, 0.0))
    expected = flow_map(aligned, 1, 3)(X[:, 1])
    assert torch.allclose(model.simulate(X[:, 1], [4.0], start=2.0)[0, :, 0], expected, atol=1e-9)
    assert torch.allclose(expected.mT @ expected, X[:, 3].mT @ X[:, 3], atol=1e-8)


@LAWS
@given(st.integers(2, 5), st.integers(2, 6), st.integers(0, 10**6))
def test_reflections_become_rotations_without_touching_alignment_or_moments(d, states, seed):
    X = noise(d + 4, states, d, seed=seed)
    before = fit_aligned_bases(X, align="none")  # half of all steps are reflections
    after, flips = proper_rotations(before)
    for k in range(states - 1):
        assert float(torch.det(after.U[k].mT @ after.U[k + 1])) > 0
    assert torch.equal(
        (after.U * before.U).sum(1).abs().round(decimals=6), torch.ones(states, d).double()
    )
    assert torch.allclose(after.overlap.abs(), before.overlap.abs())
    signs = torch.det(before.U[:-1].mT @ before.U[1:]) < 0
    assert flips == int(signs.sum())
    changed = (after.U * before.U).sum(1).sign().diff(dim=0).abs().sum(1) / 2
    assert torch.equal(changed > 0, signs)


def test_fewer_trajectories_than_coordinates_live_in_a_common_basis():
    X = (
        noise(6, 1, 12, seed=1)
        @ torch.diag(torch.linspace(3, 1, 12).double())
        * torch.linspace(1, 2, 4).double().view(1, 4, 1)
    )
    X = X + 0.01 * noise(6, 4, 12, seed=2)
    model = LangevinModel.fit(X, noise=(0.1, 0.2))
    assert model.subspace.shape == (12, 6)
    assert float(model.outside.max()) < 0.01
    R = model.rotation(2.3)
    assert torch.allclose(R.mT @ R, torch.eye(6).double(), atol=1e-10)
    inside = X[:, 0] @ model.subspace @ model.subspace.mT
    assert torch.allclose(model.simulate(X[:, 0], [1.0])[0, :, 0], inside, atol=1e-10)


def test_a_state_without_energy_in_a_direction_is_clamped_and_flagged():
    X = noise(20, 3, 4, seed=4)
    X[:, 1, 3] = 0
    model = LangevinModel.fit(X, noise=(0.1, 0.1))
    assert model.clamped == 1
    assert model.provenance.flags == ("1 stretches clamped",)
    assert bool(torch.isfinite(model.simulate(X[:, 0], [3.0])).all())


def test_fits_take_layers_from_one_and_raise_what_has_no_logarithm() -> None:
    """With as many trajectories as coordinates nothing is projected; a state of zeros and a
    direction below 1e-10 of the largest keep a positive stretch."""
    X = noise(6, 3, 6, seed=11)
    model = LangevinModel.fit(X, noise=(0.5, 0.2))
    assert model.times.tolist() == [1, 2, 3]
    assert torch.equal(model.subspace, torch.eye(6).double())
    assert (model.alpha, model.rate, model.trajectories, model.clamped) == (0.5, 0.2, 6, 0)
    made = model.provenance
    assert (made.sources, made.dtype, made.contexts) == (("sarfati2025",), "float64", 6)
    assert model.flips == proper_rotations(fit_aligned_bases(X))[1] == 1
    late = LangevinModel.fit(X, noise=(0.0, 0.0), times=torch.tensor([2.0, 5, 7]), provenance=made)
    assert late.times.tolist() == [2, 5, 7]
    still = X.clone()
    still[:, 1] = 0
    assert LangevinModel.fit(still, noise=(0.0, 0.0)).clamped == 6
    few = LangevinModel.fit(still[:2], noise=(0.0, 0.0))
    assert few.outside.tolist()[1] == 0
    assert bool(few.simulate(still[:2, 0], [3.0]).isfinite().all())
    for share, clamped in ((1.5e-10, 0), (0.5e-10, 1)):
        Y = torch.diag(torch.tensor([2.0, 1.0, 2 * share]).double())
        model = LangevinModel.fit(torch.stack([Y, Y], 1), noise=(0.0, 0.0))
        assert model.clamped == 2 * clamped
        smallest = model.S.min(1).values
        assert torch.allclose(smallest, torch.full((2,), 2 * max(share, 1e-10)).double(), rtol=0.02)


def test_models_survive_a_file(tmp_path):
    model = planted(3, 3)
    again = LangevinModel.load(model.save(tmp_path / "flow.safetensors"))
    assert torch.equal(again.transition(1.0, 2.7), model.transition(1.0, 2.7))
    assert again.alpha == model.alpha


def test_errors_name_what_was_expected():
    model = planted(3, 3)
    with pytest.raises(GeometryError, match=r"time: expected 1 to 3 \(layers\), got 3.5"):
        model.rotation(3.5)
    with pytest.raises(GeometryError, match="times: expected start <= end, got 3 and 2"):
        model.transition(3.0, 2.0)
    with pytest.raises(
        GeometryError, match=r"times: expected increasing times from 1, got \[2.0, 1.5\]"
    ):
        model.simulate(noise(1, 3), [2.0, 1.5])
    with pytest.raises(GeometryError, match=r"noise: expected alpha . lambda >= 0"):
        dataclasses.replace(model, rate=-0.1)
    with pytest.raises(GeometryError, match="method: expected one of 'exact', 'euler', got 'rk4'"):
        model.simulate(noise(1, 3), [2.0], method="rk4")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"S": torch.eye(3).double()}, "singular values: expected positive numbers, got zeros"),
        ({"times": torch.tensor([1.0, 2, 2]).double()}, "times: expected increasing layers"),
        ({"preset": "published"}, "preset: expected one of 'exact', 'reference'"),
    ],
)
def test_models_refuse_zeros_layers_out_of_order_and_negative_noise(
    fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(GeometryError, match=text):
        dataclasses.replace(planted(3, 3), **fields)
    with pytest.raises(GeometryError, match="LangevinModel: expected at least two states, got 1"):
        LangevinModel.fit(noise(5, 1, 3), noise=(0.0, 0.0))
    assert len(LangevinModel.fit(noise(5, 2, 3), noise=(0.0, 0.0)).S) == 2


@pytest.mark.parametrize(
    ("columns", "times", "options", "text"),
    [
        (2, [2.0], {}, r"start states: expected \[trajectory 3\]"),
        (3, [], {}, "expected increasing times from 1"),
        (3, [1.0, 1.0], {}, "expected increasing times from 1"),
        (3, [1.5], {"start": 2.0}, "expected increasing times from 2"),
        (3, [2.0], {"samples": 0}, "samples and dt: expected positive numbers, got 0 and None"),
        (3, [2.0], {"method": "euler", "dt": 0.0}, "expected positive numbers, got 1 and 0.0"),
        (3, [2.0], {"dt": 0.5}, "dt: expected none with method="),
        (3, [3.5], {"method": "euler"}, r"time: expected 1 to 3 \(layers\), got 3.5"),
        (3, [1.0], {"start": 0.5, "method": "euler"}, r"expected 1 to 3 \(layers\), got 0.5"),
    ],
)
def test_simulations_refuse_times_and_steps_out_of_range(
    columns: int, times: list[float], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(GeometryError, match=text):
        planted(3, 3).simulate(noise(2, columns), times, **options)


def test_a_path_is_known_between_its_ends_alone() -> None:
    """But for rounding, 1e-9 of the last layer; no time from a state to itself is no change."""
    model = planted(3, 3)
    for end in (1 - 1e-8, 3 + 1e-8):
        for ask in (model.sigma, model.stretch_rate, model.rotation, model.drift):
            with pytest.raises(GeometryError, match=r"time: expected 1 to 3 \(layers\)"):
                ask(end)
    for near, k, share in ((1 - 2e-9, 0, 0.0), (3 + 2e-9, 1, 1.0)):
        interval, passed = model.path.locate(near)
        assert (interval, passed) == (k, pytest.approx(share, abs=1e-8))
    for k, time in enumerate((1.0, 2.0, 3.0)):
        assert torch.equal(model.rotation(time), model.U[k])
        assert torch.allclose(model.transition(time, time), torch.eye(3).double())
        assert not bool(model.noise_integral(time, time).any())
    with pytest.raises(GeometryError, match="times: expected start <= end"):
        model.noise_integral(2.0, 1.5)
    path = uneven().path
    assert path.locate(2.6) == (1, pytest.approx(0.4))
    half, whole = path.U[1].mT @ path.rotation(2.75), path.U[1].mT @ path.U[2]
    assert torch.allclose(half @ half, whole)
    assert not torch.allclose(half, whole, atol=1e-2)
