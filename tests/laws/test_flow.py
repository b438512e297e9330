"""Laws of ``tl_geometry.flow``: aligned bases, maps between states and their residuals, noise,
sampling, and edits of the live model's last token, beside plain runs of the model."""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import scipy.spatial
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lib.data import normal
from tests.lib.models import HAS_HOOKED, bridge_of, hf_model, tiny, tokens
from tests.lib.reference.flow import divergence
from tl_geometry import GeometryError, flow
from tl_geometry.base.results import Provenance
from tl_geometry.base.tables import Table
from tl_geometry.flow import ensemble, maps, noise, pilots, separation
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.models.reader import as_view

pytestmark = pytest.mark.once

LAWS = settings(deadline=None, max_examples=20)
QUIET: dict[str, Any] = {"progress": False}
CLASSES = [("bridge", a) for a in ("gpt2", "llama", "bloom", "gemma2", "mistral", "neox", "opt")]
CLASSES += [("hooked", a) for a in ("gpt2", "llama", "mistral")] if HAS_HOOKED else []


def of_pairs(values: Tensor, name: str = "log_variance") -> Table:
    """A table of a value ``[start end]`` for each pair of states, numbered from 1."""
    pairs = torch.triu_indices(values.shape[0], values.shape[1], 1).T.tolist()
    cells = tuple((i + 1, j + 1, float(values[i, j])) for i, j in pairs)
    return Table(names=("start", "end", name), cells=cells, provenance=Provenance())


@cache
def model() -> Any:
    """A tiny GPT-2 of four blocks."""
    return bridge_of(hf_model("gpt2", n_layer=4))


@cache
def paths(n: int = 80, seed: int = 1) -> Trajectories:
    """Trajectories of the last token but one of chunks, from the embedding on."""
    return flow.trajectories(model(), tokens(n, 9, seed), states=range(5), **QUIET)


@LAWS
@given(st.integers(5, 60), st.integers(2, 6), st.integers(0, 10**6))
def test_residual_statistics_against_scipy(n: int, d: int, seed: int) -> None:
    x = normal(n, d, seed=seed) ** 3 + 1
    found = maps.residual_statistics(torch.cat([x, torch.full((n, 1), 0.1)], dim=1))
    a = x.numpy()
    variance, kurtosis = a.var(0, ddof=1), scipy.stats.kurtosis(a, axis=0, bias=False)
    expected = {
        "mean_over_sd": np.abs(a.mean(0) / np.sqrt(variance)).mean(),
        "log_variance": np.log(variance).mean(),
        "abs_kurtosis": np.abs(kurtosis).mean(),
    }
    assert found == pytest.approx(expected, rel=1e-6)
    nothing = maps.residual_statistics(torch.full((9, 2), 0.1))
    assert all(math.isnan(value) for value in nothing.values())
    assert maps.score_map(x.mean(0).expand_as(x), x)["r2"] == pytest.approx(0)


@LAWS
@given(
    st.sampled_from(noise.LAWS),
    st.floats(0.05, 5),
    st.floats(-0.6, 0.6).filter(lambda rate: abs(rate) > 0.02),
)
def test_noise_laws_recover_their_parameters(law: str, alpha: float, rate: float) -> None:
    t = torch.arange(1.0, 9).double()
    truth = noise.NoiseLaw(law, alpha, rate, math.log(alpha), 1.0, 0.0, 0)
    values = truth.variance(t[:, None].expand(8, 8), t.expand(8, 8)).log()
    values[2, 5] = math.nan  # a pair that is not known does not count
    found = flow.fit_noise_law(of_pairs(values), law=law)
    assert found.pairs == 27
    assert found.rate == pytest.approx(rate, abs=1e-5)
    assert found.alpha == pytest.approx(alpha, rel=1e-4)
    assert found.r2 == pytest.approx(1)
    falls = (-alpha, rate) if law == "increment" else (0.0, 0.0)
    flows = (alpha, rate) if rate > 0 else falls
    assert found.flow == pytest.approx(flows, rel=1e-4)


def test_isotropy_accepts_isotropic_noise_and_sees_each_violation() -> None:
    x = normal(300, 20, seed=1)
    round_ = noise.isotropy_tests(x)
    assert round_["correlation"] / round_["correlation_chance"] == pytest.approx(1, abs=0.1)
    assert round_["participation"] / round_["participation_chance"] == pytest.approx(1, abs=0.03)
    assert round_["gaussian_rejected"] == round_["degenerate"] == 0
    C = np.corrcoef(x.numpy().T)
    assert round_["correlation"] == pytest.approx(np.abs(C[~np.eye(20, dtype=bool)]).mean())
    found = noise.isotropy_tests(torch.cat([3 * x[:, :1], x[:, 1:]], dim=1))
    assert found["variance_cv"] > 3 * found["variance_cv_chance"]
    found = noise.isotropy_tests(x + 2 * x[:, :1])
    assert found["correlation"] > 3 * found["correlation_chance"]
    assert noise.isotropy_tests(x**3)["gaussian_rejected"] == 1
    # a coordinate that varies by rounding alone is left out
    x[:, 3] = 0.1
    x[::2, 3] = torch.nextafter(x[0, 3], torch.ones(()).double())
    assert noise.isotropy_tests(x)["degenerate"] == 1
    assert noise.isotropy_tests(x[:8, :2])["degenerate"] == 0
    for few in (x[:7], x[:, :1]):
        with pytest.raises(GeometryError, match="residuals"):
            noise.isotropy_tests(few)


def test_p_values_of_normality_are_uniform_and_those_of_the_textbook() -> None:
    p = noise.normality_p(normal(60, 2000, seed=3)).numpy()
    for level in (0.01, 0.05, 0.2, 0.5):
        assert abs((p < level).mean() - level) < 4 * math.sqrt(level * (1 - level) / 2000) + 0.005
    assert bool((noise.normality_p(torch.ones(9, 2)) == 1).all())
    x = np.sort(normal(50, seed=1).numpy() ** 3)
    w, i = (x - x.mean()) / x.std(ddof=1), np.arange(1, 51)
    logs = scipy.stats.norm.logcdf(w) + scipy.stats.norm.logsf(w)[::-1]
    a = (-50 - np.sum((2 * i - 1) / 50 * logs)) * (1 + 0.75 / 50 + 2.25 / 50**2)
    expected = math.exp(1.2937 - 5.709 * a + 0.0186 * a**2)
    assert a > 0.6
    assert float(noise.normality_p(torch.from_numpy(x)[:, None])) == pytest.approx(expected)


def test_the_planted_layer_is_the_only_anomaly() -> None:
    t = torch.arange(1, 13).double()
    values = 0.2 * t + 0.5 * (t - t[:, None]).clamp(min=1).log() + 0.02 * normal(12, 12, seed=4)
    quiet = flow.layer_anomalies(of_pairs(values), ["log_variance"])
    assert not any(quiet.column("flagged")[2:])
    values[:, 11] += 2
    found = flow.layer_anomalies(of_pairs(values), ["log_variance"])
    assert 12 in found.column("state", flagged=True)
    assert np.nanargmax(found.column("excess")) == 11
    assert math.isnan(found.column("z", state=1)[0])  # no pair ends there
    excess = np.array(found.column("excess")[1:])
    z = (excess - np.median(excess)) / scipy.stats.median_abs_deviation(excess)
    assert found.column("z")[1:] == pytest.approx(z * scipy.stats.norm.ppf(0.75), rel=1e-4)
    few = flow.layer_anomalies(of_pairs(values[:3, :3]), ["log_variance"])
    assert all(math.isnan(z) for z in few.column("z"))
    flat = 7 * torch.eye(9).double()[5].expand(9, 9)
    alone = flow.layer_anomalies(of_pairs(flat), ["log_variance"])
    assert alone.column("z")[1:] == [math.inf if b == 5 else 0 for b in range(1, 9)]


def langevin(alpha: float = 0.3, rate: float = 0.4) -> tuple[flow.LangevinModel, Tensor]:
    X = normal(40, 4, 3) * torch.tensor([1.0, 1.5, 1.2, 2.0])[:, None]
    about = Provenance()
    paths = Trajectories(X=X, states=(1, 2, 3, 4), position=-1, provenance=about)
    return flow.LangevinModel.fit(paths, noise=(alpha, rate)), X


def test_samples_have_the_moments_and_seeds_decide() -> None:
    fitted, X = langevin()
    x = X[:1, 0]
    drawn = fitted.simulate(x, [2.0, 4.0], samples=20_000, seed=1)
    assert drawn.shape == (20_000, 1, 2, 3)
    for at, t in enumerate((2.0, 4.0)):
        mean, C = fitted.moments(x[0], torch.zeros(3, 3).double(), 1.0, t)
        rows = drawn[:, 0, at]
        assert bool(((rows.mean(0) - mean).abs() < 5 * (C.diagonal() / 20_000).sqrt()).all())
        assert torch.allclose(rows.mT.cov(), C, rtol=0.1, atol=0.02)
    assert torch.equal(fitted.simulate(x, [2.0], seed=3), fitted.simulate(x, [2.0], seed=3))
    assert not torch.equal(fitted.simulate(x, [2.0], seed=3), fitted.simulate(x, [2.0], seed=4))
    still, _ = langevin(alpha=0.0, rate=0.0)
    assert torch.allclose(still.simulate(x, [1.0])[0, 0, 0], x[0])
    for wrong in ([5.0], [3.0, 2.0], [1.5], []):
        with pytest.raises(GeometryError, match="times"):
            fitted.simulate(x, wrong)


def test_halves_share_no_chunk_and_no_document() -> None:
    ids = tokens(20, 10, 3)
    labels = torch.arange(28) % 5
    twice: Any = flow.trajectories(model(), torch.cat([ids, ids[:8]]), **QUIET)
    documents: Any = flow.trajectories(model(), tokens(28, 10, 4), labels=labels, **QUIET)
    for seed in range(4):
        train, test = twice.split(seed=seed)
        assert len(train) + len(test) == 28
        assert not bool(ensemble.shared_rows(test.tokens, train.tokens).any())
        # the twin: without tokens nobody can know
        plain: Any = dataclasses.replace(twice, tokens=None, labels=torch.arange(28))
        halves = [set(half.labels.tolist()) for half in plain.split(seed=seed)]
        assert any((i in halves[0]) != (i + 20 in halves[0]) for i in range(8))
        train, test = documents.split(seed=seed)
        assert not set(train.labels.tolist()) & set(test.labels.tolist())
    with pytest.raises(GeometryError, match="chunks that differ"):
        flow.trajectories(model(), ids[:1].repeat(5, 1), **QUIET).split()


def test_held_out_numbers_are_those_of_the_map_of_one_part_on_the_other() -> None:
    report = flow.flow_report(paths(), map_types="linear")
    train, test = paths().split()
    assert {*report.column("train"), *report.column("test")} == {len(train), len(test)}
    pairs = list(zip(report.column("start"), report.column("end"), strict=True))
    assert pairs == list(itertools.combinations(range(5), 2))
    for at in (0, 5):
        i, j = pairs[at]
        before, true = test.X[:, i].double(), test.X[:, j].double()
        off = true - flow.flow_map(flow.fit_aligned_bases(train.X), i, j)(before)
        error = float(off.norm() / true.norm())
        assert report.column("relative_error_out")[at] == pytest.approx(error)
        linear = maps.MapsFrom(train.X[:, i]).to(train.X[:, j], "linear")(before)
        expected = float((true - linear).norm() / true.norm())
        assert report.column("error_linear")[at] == pytest.approx(expected, rel=1e-6)
    in_sample = train.residuals()
    assert report.column("r2_in") == pytest.approx(in_sample.column("r2"))
    assert flow.flow_report(paths(), seed=2).column("r2_in") != report.column("r2_in")
    assert {"error_ridge", "error_identity"} < set(report.names), "always beside"
    assert flow.fit_noise_law(report) == flow.fit_noise_law(in_sample)
    few = flow.flow_report(paths().pick(torch.arange(24)))
    assert any("fewer than the" in flag for flag in few.provenance.flags)


def test_directions_that_a_state_lacks_choose_nothing() -> None:
    X = torch.randn(12, 3, 16, dtype=torch.float64)
    X[6:, 0] = X[:6, 0]  # two trajectories of each token
    for _ in range(4):
        shuffled = flow.fit_aligned_bases(X[torch.randperm(12)])
        moved = [flow.flow_map(b, 1, 2)(X[:, 1]) for b in (flow.fit_aligned_bases(X), shuffled)]
        torch.testing.assert_close(*moved)
    sizes = torch.tensor([[3.0, 0.0, 0.0], [3.0, 2.0, 0.0], [3.0, 2.0, 4.0]])
    growing, kept = flow.fit_aligned_bases(torch.eye(3)[:, None] * sizes), torch.eye(3)[:2].double()
    torch.testing.assert_close(flow.flow_map(growing, 1, 2)(kept), kept)


def test_shapes_of_bundles_by_numpy() -> None:
    ensembles = {f"{n}": flow.trajectories(model(), tokens(n, 9, n), **QUIET) for n in (60, 30)}
    found = flow.compare_ensembles(ensembles, k=4).df.set_index("ensemble")
    for name, followed in ensembles.items():
        X, row, n = followed.X.double().numpy(), found.loc[name], len(followed)
        steps = np.diff(X, axis=1)
        sizes = np.linalg.norm(steps, axis=2)
        straight = np.linalg.norm(X[:, -1] - X[:, 0], axis=1) / sizes.sum(1)
        assert row.straightness == pytest.approx(straight.mean())
        off = ~np.eye(n, dtype=bool)
        unit = steps / sizes[..., None]
        cosines = np.einsum("isd,jsd->sij", unit, unit)[:, off].mean(1)
        assert row.parallel == pytest.approx(cosines.mean())
        nearest = []
        for state in X.transpose(1, 0, 2):
            apart = scipy.spatial.distance.cdist(state, state) + 1e9 * np.eye(n)
            nearest.append([set(order[:4]) for order in apart.argsort(1)])
        pairs = itertools.pairwise(nearest)
        kept = [len(a & b) / 4 for before, after in pairs for a, b in zip(before, after)]
        assert row.neighbours == pytest.approx(np.mean(kept))
        assert row.neighbours_chance == pytest.approx(4 / (n - 1))
        energy = np.linalg.svd(X.transpose(1, 0, 2), compute_uv=False) ** 2
        share = energy / energy.sum(1, keepdims=True)
        spread = np.exp(scipy.stats.entropy(share, axis=1)).mean()
        assert row.entropy_rank == pytest.approx(spread, rel=1e-6)
        residuals = followed.residuals()
        for measure in ("relative_error", "abs_kurtosis", "mean_over_sd"):
            assert row[measure] == pytest.approx(np.mean(residuals.column(measure)))
        for law in noise.LAWS:
            fitted = flow.fit_noise_law(residuals, law=law)
            assert (row[f"{law}_rate"], row[f"{law}_r2"]) == pytest.approx((fitted.rate, fitted.r2))


def test_what_is_unusual_about_costs_is_said() -> None:
    few, seen = paths().pick(torch.arange(24)), tokens(80, 9, 1)[:4]
    for rows, of, held, claimed in (
        (tokens(4, 9, 7), paths(), True, True),
        (seen, paths(), False, True),
        (tokens(4, 9, 7), few, True, False),
    ):
        curve = flow.truncation_kl(model(), rows, of, K=(3,), **QUIET)
        assert (curve.column("held_out"), curve.column("claimed")) == ([held], [claimed])
        rows = torch.cat([torch.cat([rows[:2], tokens(3, 9, 2)]), torch.zeros(5, 1).long()], 1)
        skips = flow.skip_costs(model(), rows, of, pairs=[(0, 1)], **QUIET)
        assert skips.column("test")[0] == (5 if held else 3)
        said = " ".join((*curve.provenance.flags, *skips.provenance.flags))
        assert ("same chunks" in said, "2 of 5 test chunks" in said) == (not held, not held)
        assert ("24 trajectories, fewer than the 32" in said) == (not claimed)
        assert ("no K is claimed" in said) == (not claimed)
        assert "near chance" in said  # a random model knows nothing
    X = normal(40, 3, 4)
    X[:, 1, 0] = 0
    flat = Trajectories(X=X, states=(0, 1, 2), position=-1, provenance=Provenance())
    assert "dropped: 1 from state 1" in " ".join(flow.flow_report(flat).provenance.flags)


def test_classifiers_separate_what_is_separable_and_only_that() -> None:
    pytest.importorskip("sklearn", reason="needs the ml extra")
    a, b = normal(150, 5, seed=1), normal(150, 5, seed=2)
    for classifier in ("svm", "perceptron"):
        same = flow.separability(a, b, classifier=classifier)
        apart = flow.separability(a, b + 3, classifier=classifier)
        assert abs(same.accuracy - 0.5) < 0.1
        assert apart.accuracy > 0.95
        assert abs(apart.shuffled - 0.5) < 0.1
        assert same.low <= same.accuracy <= same.high
    # identical copies: who saw the twin of a test row with the other label does worse than chance
    wide = normal(60, 200, seed=3)
    assert abs(flow.separability(wide, wide.clone(), paired=True).accuracy - 0.5) < 0.1
    assert flow.separability(wide, wide.clone()).accuracy < 0.4
    values = torch.tensor([0.52, 0.6, 0.55, 0.49, 0.58]).double()
    spread = math.sqrt(np.var(values.numpy(), ddof=1) * (1 / 5 + 3 / 7))
    reach = separation.resampled_t_reach(values, 0.3)
    assert reach == pytest.approx(scipy.stats.t.ppf(0.975, 4) * spread)
    assert math.isnan(separation.resampled_t_reach(torch.ones(5), 0.3))


def log_probs(ids: Tensor, hooks: list[Any]) -> Tensor:
    with torch.no_grad():
        return model().run_with_hooks(ids, fwd_hooks=hooks)[:, -1].double().log_softmax(-1)


def test_the_baseline_is_that_of_consecutive_chunks_and_all_directions_change_nothing() -> None:
    ids, d = tokens(4, 9, 7), paths().X.shape[-1]
    curve, own = flow.truncation_kl(model(), ids, paths(), K=(3, d), **QUIET), log_probs(ids, [])
    apart = [float(divergence(own[i + 1], own[i])) for i in range(3)]
    assert curve.column("baseline_mean")[0] == pytest.approx(np.mean(apart), rel=1e-5)
    assert curve.column("baseline_median")[0] == pytest.approx(np.median(apart), rel=1e-5)
    assert curve.column("kl", K=d)[0] < 1e-9
    assert curve.column("top5", K=d) == [5.0]
    assert flow.directions_needed(curve, 1e-6) == d
    assert flow.directions_needed(curve, 1e9) == 3
    assert flow.directions_needed(curve.top(1), 1e-9) is None


PAIRS = [(1, 3), (2, 4), (0, 1)]
KINDS = ("flow", "linear", "shift", "identity", "mean")


def test_skipping_is_what_replacing_the_state_by_hand_gives() -> None:
    test = tokens(5, 10, 2)
    found = flow.skip_costs(model(), test, paths(), pairs=PAIRS, map_types=KINDS, **QUIET)
    ids, target = test[:, :-1], test[:, -1:]
    _, clean = model().run_with_cache(ids)
    points = [f"blocks.{s}.hook_resid_pre" for s in range(4)] + ["blocks.3.hook_resid_post"]
    own, X = log_probs(ids, []), paths().X
    for (a, b), kind in itertools.product(PAIRS, KINDS):
        if kind == "flow":
            layer_map = flow.flow_map(paths().aligned_bases, a, b)
        else:
            layer_map = maps.MapsFrom(X[:, a]).to(X[:, b], kind)

        def put(h: Tensor, hook: Any, m: Any = layer_map, a: int = a) -> Tensor:
            return torch.cat([h[:, :-1], m(clean[points[a]][:, -1:]).to(h)], dim=1)

        changed = log_probs(ids, [(points[b], put)])
        of = {"map_type": kind, "from_layer": a, "to_layer": b}
        expected = float(divergence(own, changed).mean())
        assert found.column("kl", **of)[0] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        more = float((own - changed).gather(-1, target).mean())
        assert found.column("loss_increase", **of)[0] == pytest.approx(more, rel=1e-3, abs=1e-5)
        top1 = float((own.argmax(-1) == changed.argmax(-1)).double().mean())
        assert found.column("top1", **of) == [pytest.approx(top1)]
    loss = float(-own.gather(-1, target).mean())
    assert found.column("own_loss")[0] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(("model_class", "architecture"), CLASSES)
def test_kept_keys_give_the_numbers_of_whole_passes(
    model_class: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, ids = as_view(tiny(model_class, architecture)), tokens(5, 12)
    fitted = flow.trajectories(view, tokens(40, 11, 2), states=range(3), **QUIET)
    name, late = pilots._fastest(view, ids[:1])
    assert name
    assert late == (architecture != "bloom")
    fast = flow.skip_costs(view, ids, fitted, pairs="all", **QUIET)
    curve = flow.truncation_kl(view, ids[:, :-1], fitted, batch_size=2, **QUIET)
    monkeypatch.setattr(pilots, "_fastest", lambda view, chunk: ("", False))
    slow = flow.skip_costs(view, ids, fitted, pairs="all", **QUIET)
    whole = flow.truncation_kl(view, ids[:, :-1], fitted, **QUIET)
    for a, b in ((fast, slow), (curve, whole)):
        numbers = [t.df.select_dtypes("number").to_numpy() for t in (a, b)]
        np.testing.assert_allclose(*numbers, rtol=2e-4, atol=2e-4)
