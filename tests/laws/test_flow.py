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
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, bridge_of, hf_model, tiny, tokens
from tl_geometry import GeometryError, flow
from tl_geometry.base.results import Provenance
from tl_geometry.base.tables import Table
from tl_geometry.flow import ensemble, maps, noise, pilots, separation
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.models.reader import as_view

pytestmark = pytest.mark.once

LAWS = settings(deadline=None, max_examples=20)
SIZES = st.tuples(st.integers(3, 14), st.integers(2, 4), st.integers(2, 7), st.integers(0, 10**6))
QUIET: dict[str, Any] = {"progress": False}
CLASSES = [("bridge", a) for a in ("gpt2", "llama", "bloom", "gemma2", "mistral", "neox", "opt")]
CLASSES += [("hooked", a) for a in ("gpt2", "llama", "mistral")] if HAS_HOOKED else []


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(states: int, d: int, seed: int) -> Tensor:
    return torch.linalg.qr(normal(states, d, d, seed=seed)).Q


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


# ---- bases and their alignment


@LAWS
@given(SIZES)
def test_hungarian_has_the_larger_sum_and_aligning_again_changes_nothing(
    size: tuple[int, ...],
) -> None:
    _, states, d, seed = size
    U = orthogonal(states, d, seed)
    total = {}
    for method in maps.ALIGNMENTS:
        order, sign = maps.align_directions(U, method)
        assert all(sorted(row) == list(range(d)) for row in order.tolist())
        aligned = U.gather(2, order[:, None].expand_as(U)) * sign[:, None]
        cosines = torch.einsum("tdi,tdi->ti", aligned[:-1], aligned[1:])
        assert bool((cosines >= -1e-12).all())
        total[method] = float(cosines[0].sum())
        again, flips = maps.align_directions(aligned, method)
        if method == "hungarian":
            assert torch.equal(again, torch.arange(d).repeat(states, 1))
            assert bool((flips == 1).all())
    assert total["hungarian"] >= total["greedy"] - 1e-12


def test_alignment_recovers_a_planted_permutation_with_its_singular_values() -> None:
    U, S = orthogonal(1, 5, 3)[0], torch.tensor([5.0, 4, 3, 2, 1]).double()
    V = torch.linalg.qr(normal(20, 5, seed=4)).Q
    order = [3, 0, 4, 1, 2]
    X = torch.stack([V * S @ U.mT, V[:, order] * S @ U[:, order].mT], dim=1)
    found = flow.fit_aligned_bases(X)
    assert torch.allclose(found.U[0], found.U[1], atol=1e-9)
    assert torch.allclose(found.S[1], S[torch.tensor(order).argsort()], atol=1e-9)
    # the strongest direction is first, whatever the alignment
    top = maps.top_directions(found, 1, 1)[:, 0]
    assert abs(float(top @ U[:, order[0]])) == pytest.approx(1)
    # a tie goes to the later column
    tied = torch.stack([torch.eye(2), torch.tensor([[1.0, 1], [1, -1]]) / 2**0.5]).double()
    assert maps.align_directions(tied)[0][1].tolist() == [1, 0]


# ---- maps between states


@LAWS
@given(SIZES, st.sampled_from(maps.ALIGNMENTS))
def test_the_flow_matches_second_moments_and_drops_directions_without_energy(
    size: tuple[int, ...], align: str
) -> None:
    n, states, d, seed = size
    X = normal(n, states, d, seed=seed)
    aligned, last = flow.fit_aligned_bases(X, align=align), X[:, -1]
    moved = flow.flow_map(aligned, 0, states - 1)(X[:, 0])
    assert torch.allclose(moved.mT @ moved, last.mT @ last, atol=1e-8)
    if min(n, d) == d:  # right vectors from the left ones
        V = [X[:, t] @ aligned.U[t] / aligned.S[t] for t in (0, -1)]
        residual = (2 * aligned.S[-1] ** 2 * (1 - (V[0] * V[1]).sum(0))).sum()
        found = float((last - moved).square().sum())
        assert found == pytest.approx(float(residual), rel=1e-6, abs=1e-8)
    X[:, 0, 0] = 0
    moved = flow.flow_map(flow.fit_aligned_bases(X), 0, 1)(X[:, 0])
    assert bool(torch.isfinite(moved).all())
    assert torch.linalg.matrix_rank(moved) == min(n, d - 1)


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


# ---- noise


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
    few = flow.layer_anomalies(of_pairs(values[:3, :3]), ["log_variance"])
    assert all(math.isnan(z) for z in few.column("z"))
    flat = 7 * torch.eye(9).double()[5].expand(9, 9)
    alone = flow.layer_anomalies(of_pairs(flat), ["log_variance"])
    assert alone.column("z")[1:] == [math.inf if b == 5 else 0 for b in range(1, 9)]


# ---- sampling


def langevin(alpha: float = 0.3, rate: float = 0.4) -> tuple[flow.LangevinModel, Tensor]:
    X = normal(40, 4, 3) * torch.tensor([1.0, 1.5, 1.2, 2.0])[:, None]
    about = Provenance()
    paths = Trajectories(X=X, states=(1, 2, 3, 4), position=-1, provenance=about)
    return flow.LangevinModel.fit(paths, noise=(alpha, rate)), X


def test_moments_compose_and_add_up() -> None:
    fitted, X = langevin()
    Phi = fitted.transition(2.0, 4.0) @ fitted.transition(1.0, 2.0)
    assert torch.allclose(Phi, fitted.transition(1.0, 4.0))
    mean, C = normal(3, seed=1), torch.eye(3).double()
    once = fitted.moments(mean, C, 1.0, 4.0)
    twice = fitted.moments(*fitted.moments(mean, C, 1.0, 3.0), 3.0, 4.0)
    assert all(torch.allclose(a, b) for a, b in zip(once, twice, strict=True))
    # without noise: rotation and stretch of Eq. 1
    moved = fitted.transition(1.0, 3.0) @ X[:, 0].mT
    assert torch.allclose(moved.mT, flow.flow_map(flow.fit_aligned_bases(X), 0, 2)(X[:, 0]))


def test_noise_without_stretching_is_the_increment_law_and_with_it_is_not() -> None:
    U = torch.eye(3).double().repeat(3, 1, 1)
    steady = flow.LangevinModel(
        U=U, S=torch.ones(3, 3).double(), times=torch.arange(1, 4).double(), alpha=0.5, rate=0.3
    )
    expected = 0.5 * (math.exp(0.9) - math.exp(0.3))
    none = torch.zeros(3).double(), torch.zeros(3, 3).double()
    _, covariance = steady.moments(*none, 1.0, 3.0)
    assert torch.allclose(covariance, expected * torch.eye(3).double(), rtol=1e-9)
    S = torch.tensor([1.0, 2.0, 4.0]).double()[:, None] ** torch.arange(3.0)
    moving = dataclasses.replace(steady, S=S)
    spread = moving.moments(*none, 1.0, 3.0)[1].diagonal()
    assert spread[0] == pytest.approx(expected)
    assert spread[2] > 2 * spread[0]  # not isotropic


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
    still, _ = langevin(alpha=0.0)
    assert torch.allclose(still.simulate(x, [1.0])[0, 0, 0], x[0])
    for wrong in ([5.0], [3.0, 2.0], [1.5]):
        with pytest.raises(GeometryError, match="times"):
            fitted.simulate(x, wrong)


# ---- ensembles


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_state_after_the_norm_is_the_last_hidden_state(architecture: str) -> None:
    ids = tokens(7, 9)
    decoder = tiny("bridge", architecture)
    found = flow.trajectories(decoder, ids, **QUIET)
    with torch.no_grad():
        hidden = hf_model(architecture)(ids, output_hidden_states=True).hidden_states
    normed = found.after_norm(decoder)
    assert torch.allclose(normed.X[:, -1], hidden[-1][:, -1], atol=1e-4)
    assert not torch.allclose(found.X[:, -1], hidden[-1][:, -1], atol=1e-1)
    bare = flow.trajectories(decoder, ids, states=[0, 1], **QUIET)
    for wrong, of in ((normed, decoder), (found, model()), (bare, decoder)):
        with pytest.raises(GeometryError, match="after_norm: expected the last state before"):
            wrong.after_norm(of)


def test_an_encoder_is_followed_at_its_first_token() -> None:
    bert = tiny("bridge", "bert")
    found = flow.trajectories(bert, tokens(6, 9), **QUIET)
    assert found.position == 0
    assert "first token followed" in found.provenance.flags
    with pytest.raises(tlg.UnsupportedModelError, match="truncation_kl: expected a causal"):
        flow.truncation_kl(bert, tokens(6, 9), found)


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


# ---- the report


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
    assert {"error_ridge", "error_identity"} < set(report.names), "always beside"
    assert flow.fit_noise_law(report) == flow.fit_noise_law(in_sample)
    few = flow.flow_report(paths().pick(torch.arange(24)))
    assert any("fewer than the" in flag for flag in few.provenance.flags)


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


# ---- the live model, its last token edited


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def log_probs(ids: Tensor, hooks: list[Any]) -> Tensor:
    with torch.no_grad():
        return model().run_with_hooks(ids, fwd_hooks=hooks)[:, -1].double().log_softmax(-1)


def test_the_baseline_is_that_of_consecutive_chunks_and_all_directions_change_nothing() -> None:
    ids, d = tokens(4, 9, 7), paths().X.shape[-1]
    curve, own = flow.truncation_kl(model(), ids, paths(), K=(3, d), **QUIET), log_probs(ids, [])
    apart = [float(kl(own[i + 1], own[i])) for i in range(3)]
    assert curve.column("baseline_mean")[0] == pytest.approx(np.mean(apart), rel=1e-5)
    assert curve.column("baseline_median")[0] == pytest.approx(np.median(apart), rel=1e-5)
    assert curve.column("kl", K=d)[0] < 1e-9
    assert curve.column("top5", K=d) == [5.0]
    assert flow.directions_needed(curve, 1e-6) == d
    assert flow.directions_needed(curve, 1e9) == 3
    assert flow.directions_needed(curve.top(1), 1e-9) is None


def test_directions_of_few_or_the_same_chunks_claim_nothing() -> None:
    few, ids = paths().pick(torch.arange(6)), tokens(80, 9, 1)[:6]
    inside = flow.truncation_kl(model(), ids, few, K=(6,), **QUIET)
    assert inside.column("kl")[0] < 1e-7, "in the span of their own directions"
    assert inside.column("held_out") == inside.column("claimed") == [False]
    assert flow.directions_needed(inside) is None
    flags = inside.provenance.flags
    assert any("same chunks" in flag for flag in flags)
    assert any("no K is claimed" in flag for flag in flags)
    outside = flow.truncation_kl(model(), tokens(6, 9, 6), few, K=(6,), **QUIET)
    assert outside.column("kl")[0] > 1e-3
    assert outside.column("held_out") == [True]


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
        expected = float(kl(own, changed).mean())
        assert found.column("kl", **of)[0] == pytest.approx(expected, rel=1e-3, abs=1e-6)
        more = float((own - changed).gather(-1, target).mean())
        assert found.column("loss_increase", **of)[0] == pytest.approx(more, rel=1e-3, abs=1e-5)
        top1 = float((own.argmax(-1) == changed.argmax(-1)).double().mean())
        assert found.column("top1", **of) == [pytest.approx(top1)]
    loss = float(-own.gather(-1, target).mean())
    assert found.column("own_loss")[0] == pytest.approx(loss, rel=1e-5)


def test_chunks_that_maps_were_fitted_on_are_left_out_or_refused() -> None:
    other = torch.cat([tokens(10, 9, 2), torch.full((10, 1), 3)], dim=1)
    fitted = torch.cat([tokens(80, 9, 1)[:3], torch.full((3, 1), 3)], dim=1)
    options: dict[str, Any] = {"map_types": "mean", "pairs": [(0, 2)], **QUIET}
    clean = flow.skip_costs(model(), other, paths(), **options)
    mixed = flow.skip_costs(model(), torch.cat([fitted, other]), paths(), **options)
    assert mixed.df.equals(clean.df)
    assert any("3 of 13 test chunks left out" in flag for flag in mixed.provenance.flags)
    assert not any("left out" in flag for flag in clean.provenance.flags)
    with pytest.raises(GeometryError, match="maps are not fitted on"):
        flow.skip_costs(model(), fitted, paths(), **options)
    every = flow.skip_costs(model(), other, paths(), map_types="mean", **QUIET)
    steps = [every.column(n, map_type="mean") for n in ("from_layer", "skipped")]
    assert {*zip(*steps, strict=True)} == {(a, n) for n in (1, 2, 4) for a in range(5 - n)}


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


def test_other_peoples_hooks_act_on_whole_passes() -> None:
    """A hook that shifts an earlier position would not be seen by the last token alone."""

    def shift(h: Tensor, hook: Any) -> Tensor:
        h = h.clone()
        h[:, 2] += 3.0
        return h

    options: dict[str, Any] = {"pairs": [(2, 3)], "map_types": "identity", **QUIET}
    plain = flow.skip_costs(model(), tokens(6, 10, 2), paths(), **options)
    model().add_hook("blocks.1.hook_resid_pre", shift)
    try:
        assert pilots._fastest(as_view(model()), tokens(1, 9)) == ("", False)
        edited = flow.skip_costs(model(), tokens(6, 10, 2), paths(), **options)
    finally:
        model().reset_hooks()
    assert edited.column("kl") != plain.column("kl")
