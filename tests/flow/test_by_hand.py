"""Numbers of the flow against other routes (numpy, scipy, formulas written out)."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from torch import Tensor

from tests.modules import copy_of
from tl_geometry.base.results import Provenance
from tl_geometry.flow import (
    langevin,
    noise,
    replacing,
    residuals,
    separation,
    simulation,
    truncation,
)
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.flow.geodesic import GeodesicPath


def draw(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def check_law(module: Any) -> None:
    """Parameters planted in both laws, the numbers of a noisy fit by numpy, and pairs left out."""
    n = 7
    t = np.arange(1, n + 1.0)
    start, end = np.triu_indices(n, 1)
    for law, shape in (
        ("asymptotic", 0.21 * t[end]),
        ("increment", 0.21 * t[end] + np.log1p(-np.exp(-0.21 * (t[end] - t[start])))),
    ):
        values = torch.full((n, n), math.nan).double()
        values[start, end] = torch.from_numpy(math.log(0.7) + shape)
        found = module.fit_noise_law(values, law=law)
        assert found.alpha == pytest.approx(0.7, rel=1e-5)
        assert found.rate == pytest.approx(0.21, rel=1e-5)
        variance = found.variance(torch.tensor(2.0), torch.tensor(5.0))
        at = [i for i in range(len(start)) if (t[start[i]], t[end[i]]) == (2.0, 5.0)]
        assert float(variance.log()) == pytest.approx(math.log(0.7) + shape[at[0]], rel=1e-4)
        values[0] = math.nan  # pairs that are not known
        values[:, -2:] = math.nan
        kept = module.fit_noise_law(values, law=law)
        assert kept.rate == pytest.approx(0.21, rel=1e-4)
        assert kept.pairs == 6
    values = torch.full((n, n), math.nan).double()
    y = 0.3 * t[end] + 0.2 * np.random.default_rng(0).standard_normal(len(end))
    values[start, end] = torch.from_numpy(y)
    found = module.fit_noise_law(values)
    slope, intercept = np.polyfit(t[end], y, 1)
    left = ((y - slope * t[end] - intercept) ** 2).sum()
    assert (found.rate, found.log_alpha) == pytest.approx((slope, intercept))
    assert found.r2 == pytest.approx(1 - left / ((y - y.mean()) ** 2).sum())
    assert found.aic == pytest.approx(len(y) * math.log(left / len(y)) + 2 * 3)


def check_isotropy(module: Any) -> None:
    """Chance levels against simulated Gaussian noise, and what a planted direction does."""
    n, d = 120, 10
    found = [module.isotropy_tests(draw(n, d, seed=s)) for s in range(60)]
    mean = lambda name: sum(getattr(f, name) for f in found) / len(found)
    for name in ("variance_cv", "correlation", "participation"):
        assert mean(name) == pytest.approx(mean(f"{name}_chance"), rel=0.05), name
    assert sum(f.sphericity_p < 0.05 for f in found) < 12
    x = draw(9, 4)
    correlations = np.abs(np.corrcoef(x.numpy().T))[np.triu_indices(4, 1)]
    assert module.isotropy_tests(x).correlation == pytest.approx(correlations.mean())
    x = draw(n, d, seed=1)
    x[:, 0] *= 2
    assert module.isotropy_tests(x).sphericity_p < 1e-3
    x = draw(400, 40, seed=2)
    x[:, :2] = x[:, :2].sign() + 0.1 * x[:, :2]
    p = np.array([float(v) for v in noise.normality_p(x)])
    tests = module.isotropy_tests(x)
    assert tests.gaussian_rejected_raw == pytest.approx((p < 0.05).mean())
    order = np.sort(p) * len(p) / np.arange(1, len(p) + 1)
    q = np.minimum.accumulate(order[::-1])[::-1]
    assert tests.gaussian_rejected == pytest.approx((q < 0.05).mean())
    assert tests.gaussian_rejected < tests.gaussian_rejected_raw


def check_normality(module: Any) -> None:
    """The critical values of D'Agostino & Stephens 1986 (Table 4.7), continuity of the pieces, and
    the correction for small samples."""
    n = 20
    own = module.anderson_darling

    def p_of(a: list[float]) -> list[float]:
        values = torch.tensor(a).double() / (1 + 0.75 / n + 2.25 / n**2)
        module.anderson_darling = lambda columns: values
        try:
            return module.normality_p(torch.zeros(n, len(a))).tolist()
        finally:
            module.anderson_darling = own

    table = {0.631: 0.10, 0.752: 0.05, 0.873: 0.025, 1.035: 0.01, 1.159: 0.005}
    for found, level in zip(p_of(list(table)), table.values(), strict=True):
        assert found == pytest.approx(level, rel=0.06)
    for edge in (0.2, 0.34, 0.6):
        below, above = p_of([edge - 1e-6, edge + 1e-6])
        assert below == pytest.approx(above, abs=0.012)
    falling = p_of([0.1 + 0.02 * i for i in range(60)])
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > 0.98
    x = draw(30, 4, seed=5)
    z = np.sort((x.numpy() - x.numpy().mean(0)) / x.numpy().std(0, ddof=1), axis=0)
    i = np.arange(1, 31)[:, None]
    a = -30 - ((2 * i - 1) / 30 * (stats.norm.logcdf(z) + stats.norm.logsf(z[::-1]))).sum(0)
    assert np.allclose(module.anderson_darling(x).numpy(), a)


def test_the_noise_law_by_hand() -> None:
    check_law(copy_of(noise))
    check_isotropy(copy_of(noise))
    check_normality(copy_of(noise))


def check_residuals(module: Any) -> None:
    """Every average by numpy and scipy, and maps whose answer is known."""
    x = draw(40, 6, seed=3) * torch.linspace(0.5, 3, 6) + torch.linspace(-1, 2, 6)
    a = x.numpy()
    found, kurtosis = module.residual_statistics(x), stats.kurtosis(a, bias=False)
    variance = a.var(0, ddof=1)
    assert found.mean_over_sd == pytest.approx((np.abs(a.mean(0)) / np.sqrt(variance)).mean())
    assert found.log_variance == pytest.approx(np.log(variance).mean())
    assert found.abs_kurtosis == pytest.approx(np.abs(kurtosis).mean())
    assert found.mean_over_variance == pytest.approx(np.abs(a.mean(0) / variance).mean())
    assert found.log10_mean_variance == pytest.approx(np.log10(variance.mean()))
    assert found.mean_abs_kurtosis_minus_3 == pytest.approx(np.abs(kurtosis + 3).mean() - 3)
    X = torch.stack([x, 2 * x + 1, x**2], dim=1)
    maps = module.residual_maps(X, lambda s, e: module.fit_map(X[:, s], X[:, e], "identity"))
    errors = maps.relative_error
    size = lambda v: float(v.square().sum().sqrt())
    assert float(errors[0, 2]) == pytest.approx(size(x**2 - x) / size(x**2))
    assert bool(errors[1, 0].isnan())
    mixed = lambda s, e: module.fit_map(X[:, s], X[:, e], ("", "linear", "ridge")[e])
    far = size(x**2 - mixed(0, 2)(x)) / size(x**2)
    assert float(module.residual_maps(X, mixed).relative_error[0, 2]) == pytest.approx(far)
    for name, moved in (
        ("shift", x + (x + 1).mean(0)),
        ("mean", (2 * x + 1).mean(0).expand_as(x)),
        ("linear", x @ torch.from_numpy(np.linalg.lstsq(a, 2 * a + 1, rcond=None)[0])),
        ("scaled", x * float((x * (2 * x + 1)).sum() / (x * x).sum())),
    ):
        assert torch.allclose(module.fit_map(X[:, 0], X[:, 1], name)(x), moved), name


def test_residuals_by_hand() -> None:
    check_residuals(copy_of(residuals))


def check_held_out(module: Any) -> None:
    """Errors over other trajectories, by the maps themselves: few trajectories and many, maps that
    leave much, hardly anything (where energies cancel), and nothing."""
    A, g = draw(12, 12, seed=2) / 3, draw(100, 12, seed=4)
    h = [g + 2, 1.3 * g @ A + draw(100, 12, seed=5) + 1, 1.2 * g @ A]
    X = torch.stack([*h, h[2] + 1e-3 * draw(100, 12, seed=6), 3 * h[2], 3 * h[2] + 1], dim=1)
    for some in (10, 40):
        train, test = X[:some], X[some:]
        found = module.held_out_errors(train, test, residuals.MAPS)
        for name, errors in found.items():
            want = residuals.residual_maps(
                test, lambda s, e, n=name, t=train: residuals.fit_map(t[:, s], t[:, e], n)
            ).relative_error
            assert torch.allclose(errors, want, rtol=1e-9, atol=1e-13, equal_nan=True), name


def test_held_out_errors_by_hand() -> None:
    check_held_out(copy_of(residuals))


def check_paths(module: Any) -> None:
    """Variances of simulated paths against the integral of the equation, by both methods."""
    states, rank, n = 3, 2, 12_000
    U = torch.eye(rank).double().repeat(states, 1, 1)
    times = torch.arange(1.0, states + 1).double()
    flow = module.FlowNoise(0.8, 0.3)
    for S in (torch.ones(states, rank), torch.tensor([[1.0, 2.0], [1.3, 1.5], [2.0, 1.0]])):
        path = GeodesicPath(U, S.double(), times)
        x = torch.ones(n, rank).double()
        begin, end = 1.0, 2.5

        def rate(u: float, i: int, path: Any = path) -> float:
            return 0.8 * 0.3 * math.exp(0.3 * u) / float(path.sigma(u)[i]) ** 2

        gained = [quad(rate, begin, end, args=(i,))[0] for i in range(rank)]
        assert flow.variance(path, begin, end).tolist() == pytest.approx(gained, rel=1e-5)
        assert flow.amplitude(2.0) ** 2 == pytest.approx(0.8 * 0.3 * math.exp(0.6))
        sigma = path.sigma(end)
        wanted = [float(sigma[i]) ** 2 * gained[i] for i in range(rank)]
        growth = (sigma / path.sigma(begin)).tolist()
        arguments = (path, flow, x, begin, [1.5, end], torch.Generator().manual_seed(0))
        runs = {
            "exact": module.exact_paths(*arguments)[-1],
            "euler": module.stepped_paths(*arguments, dt=0.05, stretch_share=1.0)[-1],
        }
        for name, found in runs.items():
            assert found.mean(0).tolist() == pytest.approx(growth, rel=0.04, abs=0.04), name
            assert found.var(0).tolist() == pytest.approx(wanted, rel=0.08), name


def check_langevin(module: Any) -> None:
    """A planted equation has the covariance and drift of the formulas."""
    states = 5
    U = torch.eye(3).double().repeat(states, 1, 1)
    grown = torch.linspace(0, 1, states).unsqueeze(1) * torch.tensor([0.2, 0.9, 0.5])
    S = torch.tensor([1.0, 1.4, 0.8]) * grown.exp()
    made = module.LangevinModel(
        subspace=torch.eye(3).double(),
        U=U,
        S=S.double(),
        times=torch.arange(1.0, states + 1).double(),
        outside=torch.zeros(states).double(),
        alpha=0.5,
        rate=0.35,
        trajectories=8000,
    )
    gain = made.S[3].square() * made.noise_integral(2.0, 4.0)
    assert torch.allclose(made.noise_covariance(2.0, 4.0), torch.diag(gain))
    half = dataclasses.replace(made, preset="reference").stretch_rate(1.5)
    assert torch.allclose(2 * half, made.stretch_rate(1.5))


def test_the_stochastic_equation_by_hand() -> None:
    check_paths(copy_of(simulation))
    check_langevin(copy_of(langevin))


# ---- separation


class Recorder:
    """In the place of a classifier: keeps what it was fitted on and asked, says class 1."""

    seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]]

    def __init__(self, **options: Any) -> None:
        self.fitted: Any = None

    def fit(self, x: np.ndarray, y: np.ndarray) -> None:
        self.fitted = (x, y)

    def predict(self, x: np.ndarray) -> np.ndarray:
        Recorder.seen.append((*self.fitted, x))
        return np.ones(len(x))


def check_separation(module: Any) -> None:
    """What the classifier is given: standardised on the training side alone, pairs together, true
    labels in the first column; maps of one half applied to the other."""
    sklearn = pytest.importorskip("sklearn.svm", reason="needs the ml extra")
    a = draw(20, 2, seed=1) + torch.tensor([100.0, 0.0])
    b = a + torch.tensor([0.0, 50.0])
    own = sklearn.LinearSVC
    sklearn.LinearSVC = Recorder
    Recorder.seen = []
    try:
        found = module.separability(a, b, paired=True, repeats=4, seed=3)
    finally:
        sklearn.LinearSVC = own
    assert len(Recorder.seen) == 8
    for x, _, z in Recorder.seen:
        assert np.allclose(x.mean(0), 0, atol=1e-9)
        assert np.allclose(x.std(0), 1, atol=1e-9)
        assert len(x) == 28
        assert len(z) == 12
        side = np.round(z[:, 0], 9)
        assert all((side == v).sum() == 2 for v in side), "a pair stays on one side"
    assert found.accuracy == pytest.approx(0.5), "the tested pairs hold one of each class"
    assert found.test == 12
    for x, y, _ in Recorder.seen[::2]:
        assert ((x[:, 1] < 0) == (y == 1)).all(), "true labels when not shuffled"
    X = draw(30, 3, 4, seed=5)
    ensemble = Trajectories(X=X, states=(0, 1, 2), position=-1, provenance=Provenance())
    train, test = (half.X for half in ensemble.split(seed=0))
    parts: list[Any] = []
    was, module.separability = (
        module.separability,
        lambda p, q, **o: parts.append((p, q, o)) or module.Accuracy(0.5, 0.4, 0.6, 0.5, 3),
    )
    try:
        module.true_against_extrapolated(ensemble, start=0, map_type="linear")
    finally:
        module.separability = was
    for end, (true, moved, options) in zip((1, 2), parts, strict=True):
        fitted = np.linalg.lstsq(train[:, 0].numpy(), train[:, end].numpy(), rcond=None)[0]
        assert torch.allclose(true, test[:, end])
        assert np.allclose(moved.numpy(), test[:, 0].numpy() @ fitted)
        assert options["paired"]


def test_separation_by_hand() -> None:
    check_separation(copy_of(separation))


# ---- truncation


def check_truncation(module: Any) -> None:
    """The projection about a centre, the numbers of a curve from given divergences, and the
    smallest K after which the curve stays low."""
    h, center = draw(3, 5, 4, seed=1), draw(4, seed=2)
    U = torch.linalg.qr(draw(4, 4, seed=3)).Q
    keep = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]).double()
    for positions in ("pilot", "all"):
        found = module._project(U, center, keep, positions)(h)
        assert found.shape == h.shape
        for i, k in enumerate((2, 1, 3)):
            P = U[:, :k] @ U[:, :k].T
            moved = (h[i] - center) @ P + center
            wanted = moved if positions == "all" else torch.cat([h[i, :-1], moved[-1:]])
            assert torch.allclose(found[i], wanted)
    fields = {n: torch.zeros(5).double() for n in ("kl_se", "kl_reverse", "top1", "top5")}
    curve = module.TruncationCurve(
        K=(1, 2, 4, 8, 16),
        kl=torch.tensor([1.0, 0.05, 0.3, 0.02, 0.0]).double(),
        **fields,
        baseline_mean=1.0,
        baseline_median=0.1,
        where="every",
        positions="pilot",
        held_out=True,
        fitted=100,
        claimed=True,
        provenance=Provenance(),
    )
    assert curve.needed() == 8, "from which on it stays low, not the first crossing"
    assert curve.needed(baseline="median") == 16
    assert curve.needed(0.5) == 2


def test_truncation_by_hand() -> None:
    check_truncation(copy_of(truncation))


# ---- skipped layers


def check_skipping(module: Any) -> None:
    """Means, standard error and agreements of given divergences, in the cell of their pair."""
    view = SimpleNamespace(n_layers=2)
    pairs = [(0, 1), (1, 2), (0, 2)]
    jobs = [((0, 1), "ridge"), ((1, 2), "mean")]
    work = module.SkipCosts(view, jobs, pairs, 8, None)
    own = draw(7, 1, 30, seed=1).log_softmax(-1)
    changed = draw(7, 1, 30, seed=2).log_softmax(-1)
    increase = draw(7, 1, seed=3)
    for part in (slice(0, 3), slice(3, 7)):
        for job in jobs:
            work._record(job, changed[part], own[part], increase[part])
    work.loss = [torch.tensor([1.0, 2.0])]
    values, loss = work.finish(("ridge", "mean"))
    kl = (own.exp() * (own - changed)).sum(-1)[:, 0]
    shared = [
        len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) / 5
        for a, b in zip(own[:, 0], changed[:, 0], strict=True)
    ]
    wanted = {
        "kl": float(kl.mean()),
        "kl_se": float(kl.std()) / math.sqrt(7),
        "top1": float((own.argmax(-1) == changed.argmax(-1)).double().mean()),
        "top5": sum(shared) / 7,
        "loss_increase": float(increase.mean()),
    }
    for metric, value in wanted.items():
        table = values["ridge", metric]
        assert table.shape == (3, 3)
        assert float(table[0, 1]) == pytest.approx(value), metric
        assert int(torch.isfinite(table).sum()) == 1
        same = values["mean", metric]
        assert same[1, 2] == same[0, 2] == pytest.approx(value), "the mean is the same from 0"
    assert loss == 1.5


def test_skipping_by_hand() -> None:
    check_skipping(copy_of(replacing))
