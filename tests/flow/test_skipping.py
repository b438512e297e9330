"""Skipped layers and truncation on other chunks than were fitted on; fewer chunks than
dimensions."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.flow.test_trajectories import deep, ensemble
from tests.lib.models import HAS_HOOKED, tiny, tokens
from tl_geometry import GeometryError, UnsupportedModelError
from tl_geometry.flow.ensemble import shared_rows, split_rows, states_at, trajectories
from tl_geometry.flow.reports import compare_ensembles, flow_report
from tl_geometry.flow.residuals import (
    PENALTIES,
    MapsFrom,
    fit_map,
    score_map,
)
from tl_geometry.flow.separation import true_against_extrapolated
from tl_geometry.flow.skipping import SkipMap, skip_map
from tl_geometry.flow.truncation import truncation_kl
from tl_geometry.models import kv_cache, next_token
from tl_geometry.models.next_token import log_probabilities, pilot_runs
from tl_geometry.models.reader import as_view

MODELS = [
    ("bridge", a) for a in ("gpt2", "llama", "bloom", "gemma2", "mistral", "gpt-neo", "neox", "opt")
]
MODELS += [("hooked", a) for a in ("gpt2", "llama", "mistral")] if HAS_HOOKED else []


def same(a: SkipMap, b: SkipMap, tolerance: float = 2e-4) -> None:
    assert a.values.keys() == b.values.keys()
    for name, table in a.values.items():
        torch.testing.assert_close(
            table, b.values[name], rtol=tolerance, atol=tolerance, equal_nan=True, msg=str(name)
        )


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Every pass runs all tokens."""
    monkeypatch.setattr(next_token, "behind", lambda view, tokens: None)
    return monkeypatch


# the earlier tokens are run once


@pytest.mark.parametrize(("model_class", "architecture"), MODELS)
def test_the_last_token_behind_kept_keys_gives_the_models_own_output(
    model_class: str, architecture: str
) -> None:
    view, ids = as_view(tiny(model_class, architecture)), tokens(3, 12)
    own = log_probabilities(view, ids, {})
    runs = pilot_runs(view, ids, own, 8)
    assert runs.kept is not None
    assert runs.positions == 1
    for copies in (1, 3):
        found = runs.log_probabilities(copies, {})
        torch.testing.assert_close(found, own.repeat(copies, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_skips_of_the_embedded_model_are_those_of_whole_passes_chunk_by_chunk(
    slow: pytest.MonkeyPatch,
) -> None:
    model = tlg.zoo.embedded()
    rows = tlg.zoo.default_windows(model, 16, n=24)
    whole = skip_map(model, rows, map_types=("flow", "mean"), batch_size=4, progress=False)
    slow.undo()
    same(whole, skip_map(model, rows, map_types=("flow", "mean"), progress=False))
    assert whole.pairs() == [(a, b) for a in range(4) for b in range(a + 1, 5) if b - a != 3]
    assert not any("near chance" in flag for flag in whole.provenance.flags), "it is trained"


def test_other_peoples_hooks_act_on_whole_passes() -> None:
    """A hook that shifts an earlier position would not be seen by the last token alone."""
    model, ids = deep(), tokens(24, 8)

    def shift(h: Tensor, hook: Any) -> Tensor:
        h = h.clone()
        h[:, 2] += 3.0
        return h

    plain = skip_map(model, ids, pairs=[(2, 3)], map_types="identity", progress=False)
    model.add_hook("blocks.1.hook_resid_pre", shift)
    try:
        view = as_view(model)
        runs = pilot_runs(view, ids, log_probabilities(view, ids, {}), 8)
        edited = skip_map(model, ids, pairs=[(2, 3)], map_types="identity", progress=False)
    finally:
        model.reset_hooks()
    assert runs.kept is None
    assert float(edited.table("identity")[2, 3]) != float(plain.table("identity")[2, 3])


def test_encoders_have_no_pilot_and_their_outputs_are_refused() -> None:
    view = as_view(tiny("bridge", "bert"))
    assert kv_cache.behind(view, tokens(2, 8)) is None
    with pytest.raises(
        UnsupportedModelError,
        match="skip_map: expected a causal language model, got tiny-bert, an encoder",
    ):
        skip_map(view, tokens(24, 8))


# which skips, in what order


# other chunks than were fitted on


def test_chunks_that_were_fitted_on_are_left_out_or_refused() -> None:
    fit, other = tokens(30, 8, 1), tokens(10, 8, 2)
    with pytest.raises(
        GeometryError,
        match="test: expected chunks that maps are not fitted on, "
        "got 30 of 30 that also stand in tokens",
    ):
        skip_map(deep(), fit, test=fit)
    clean = skip_map(deep(), fit, test=other, map_types="linear", progress=False)
    assert not any("left out" in flag for flag in clean.provenance.flags)
    twice = skip_map(deep(), fit, test=other, map_types=["linear"] * 2, progress=False)
    same(twice, clean)
    assert str(twice.rows()) == str(clean.rows())
    mixed = skip_map(
        deep(), fit, test=torch.cat([fit[3:5], other]), map_types="linear", progress=False
    )
    assert "2 of 12 test chunks left out: maps are fitted on them" in mixed.provenance.flags
    assert mixed.test == clean.test == 10
    same(mixed, clean)
    assert mixed.provenance.token_hash == clean.provenance.token_hash
    with pytest.raises(
        GeometryError,
        match="test: expected chunks of 8 tokens, as those that maps are fitted on, "
        "got chunks of 7",
    ):
        skip_map(deep(), fit, test=other[:, :7])


def test_a_repeated_chunk_is_in_one_half_only() -> None:
    ids = tokens(20, 10, 3)
    twice = trajectories(deep(), torch.cat([ids, ids[:8]]), progress=False)
    for seed in range(4):
        train, test = twice.split(seed=seed)
        assert train.tokens is not None
        assert test.tokens is not None
        assert len(train) + len(test) == 28
        assert not bool(shared_rows(test.tokens, train.tokens).any())
    plain = dataclasses.replace(twice, tokens=None)  # the twin: without tokens nobody can know
    rows = torch.cat([ids, ids[:8]])
    halves = [split_rows(len(plain), None, 0.5, seed) for seed in range(4)]
    assert any(bool(shared_rows(rows[b], rows[a]).any()) for a, b in halves)
    with pytest.raises(
        GeometryError,
        match="split: expected chunks that differ, to hold some out, got 5 that repeat each other",
    ):
        trajectories(deep(), ids[:1].repeat(5, 1), progress=False).split()
    with pytest.raises(GeometryError, match="expected chunks that differ"):
        skip_map(deep(), ids[:1].repeat(5, 1))


# fewer chunks than dimensions


def test_fewer_trajectories_than_dimensions_are_flagged_everywhere_and_enough_are_not() -> None:
    few = ensemble().pick(torch.arange(24))  # 12 to fit on, 16 dimensions
    said = "maps fitted on 12 trajectories, fewer than the 16 dimensions"
    for kinds in ((), "linear"):
        found = flow_report(few, map_types=kinds)
        assert said in found.provenance.flags
        assert {"ridge", "identity"} <= set(found.baselines)
    assert said in true_against_extrapolated(few, start=3, repeats=2).provenance.flags
    assert (
        said
        not in true_against_extrapolated(
            few, start=3, map_type="identity", repeats=2
        ).provenance.flags
    )
    assert any(
        "fewer than" in flag
        for flag in compare_ensembles({"a": few.pick(torch.arange(10))}).provenance.flags
    )
    ids = tokens(24, 8)
    assert (
        "maps fitted on 12 trajectories, fewer than the 16 dimensions"
        in skip_map(deep(), ids, progress=False).provenance.flags
    )
    moved = skip_map(deep(), ids, map_types="shift", progress=False)  # fits a vector alone
    assert not any("fewer than" in flag for flag in moved.provenance.flags)
    enough = [
        flow_report(ensemble()),
        compare_ensembles({"a": ensemble()}),
        true_against_extrapolated(ensemble(), start=3, repeats=2),
    ]
    enough += [
        skip_map(deep(), tokens(40, 8), progress=False),
        skip_map(deep(), ids, map_types=("identity", "mean"), progress=False),
    ]
    enough += [truncation_kl(deep(), tokens(5, 10, 9), ensemble(), K=(16,), progress=False)]
    assert not any("fewer than" in flag for found in enough for flag in found.provenance.flags)


def test_the_identity_and_ridge_separate_as_maps_of_their_own() -> None:
    train, test = ensemble().split()
    assert len(train) == len(test) == 30
    tables = {
        k: true_against_extrapolated(ensemble(), start=3, map_type=k, repeats=3)
        for k in ("flow", "ridge", "identity")
    }
    assert all(t.names == ("3->4",) for t in tables.values())
    assert len({float(t.accuracy[0, 0]) for t in tables.values()}) > 1
    with pytest.raises(GeometryError, match="map_type: expected one of 'flow'"):
        true_against_extrapolated(ensemble(), start=3, map_type="straight")


@pytest.mark.parametrize(("n", "d"), [(30, 60), (200, 20)])
def test_ridge_chooses_a_penalty_that_is_nearly_the_best_on_other_data(n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(n)
    A = torch.randn(d, d, generator=generator, dtype=torch.float64) / d**0.5

    def draw(rows: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(rows, d, generator=generator, dtype=torch.float64) * torch.logspace(
            0, -2, d, dtype=torch.float64
        )
        return x, x @ A + 0.3 * torch.randn(rows, d, generator=generator, dtype=torch.float64)

    (x, y), (x2, y2) = draw(n), draw(400)
    found = fit_map(x, y, "ridge")
    assert float(PENALTIES[0]) < found.penalty < float(PENALTIES[-1])
    S = torch.linalg.svdvals(x - x.mean(0))[0] ** 2

    def error(share: float) -> float:
        gram = (x - x.mean(0)).mT @ (x - x.mean(0)) + share * S * torch.eye(d, dtype=torch.float64)
        B = torch.linalg.solve(gram, (x - x.mean(0)).mT @ (y - y.mean(0)))
        return score_map(y.mean(0) + (x2 - x.mean(0)) @ B, y2).relative_error

    own = score_map(found(x2), y2).relative_error
    assert own == pytest.approx(error(found.penalty), rel=1e-6)
    assert own < 1.05 * min(error(float(p)) for p in PENALTIES)
    assert own < (0.9 if n < d else 1.0) * error(
        float(PENALTIES[0])
    )  # the choice matters: hardly any penalty is worse
    assert fit_map(x, y, "linear").penalty == 0


def test_maps_from_one_start_are_those_of_each_pair() -> None:
    X = ensemble().X.double()
    maps = MapsFrom(X[:, 1])
    for map_type in ("flow", "linear", "ridge", "scaled", "shift", "identity", "mean"):
        for end in (2, 4):
            alone = fit_map(X[:, 1], X[:, end], map_type)(X[:, 1])
            torch.testing.assert_close(maps.to(X[:, end], map_type)(X[:, 1]), alone)
    single = fit_map(X[:, 1], X[:, 2], "ridge").single()
    assert single.left is not None
    assert single.left.dtype == torch.float32


def test_few_skips_of_a_deep_model_are_drawn_as_lines() -> None:
    from tl_geometry.render.flow import skip_figure

    found = skip_map(deep(9), tokens(30, 8), map_types=("flow", "mean"), progress=False)
    lines = skip_figure(found)
    assert [axis.get_title() for axis in lines.figure.axes] == [
        "1 block skipped",
        "2 blocks skipped",
        "4 blocks skipped",
    ]
    drawn = {
        line.get_label(): torch.as_tensor(line.get_ydata())
        for line in lines.figure.axes[1].get_lines()
    }
    assert list(drawn) == ["flow", "mean", "ridge", "identity"]
    assert float(drawn["ridge"][3]) == float(found.table("ridge", "loss_increase")[3, 5])
    whole = skip_figure(
        skip_map(deep(9), tokens(30, 8), map_types="identity", pairs="all", progress=False)
    )
    assert whole.figure.axes[0].get_images()


# what is kept of a pass


def test_states_of_a_float64_model_are_fitted_as_they_are() -> None:
    view = as_view(copy.deepcopy(tiny("bridge", "gpt2")).double())
    ids = tokens(5, 9)
    X = states_at(view, ids, -1, [0, 1])
    states = view.activations(ids, view.state_hooks[:2])
    assert X.dtype == torch.float64
    assert torch.equal(X, torch.stack([h[:, -1] for h in states.values()], 1))
