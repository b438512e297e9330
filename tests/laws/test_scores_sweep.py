"""Laws of the sweep over heads (SPEC C, N, O): it equals splits; intervals are those of sweeps that
are run again, nulls hold their size; heads that training made are found. That it equals a decoder
written out in float64, whatever the batches, is in the table of subjects."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import tl_geometry as tlg
from tests.lib.models import bridge_of, hf_model, tiny, tokens
from tests.lib.reference.moments import jackknife
from tl_geometry import PositionContext

QUIET: dict[str, Any] = {"progress": False}
SEEN, FRESH = tokens(40, 12, seed=2), tokens(40, 12, seed=12)
SHARES = ("cs", "gs")


@cache
def basis_of(kind: str, normed: bool = False) -> Any:
    return tlg.decompose(tiny("bridge", kind), SEEN, normalize=normed, **QUIET)


@cache
def sweep_of(kind: str, normed: bool = False, **options: Any) -> Any:
    return tlg.sweep_heads(tiny("bridge", kind), FRESH, basis_of(kind, normed), **QUIET, **options)


@pytest.mark.parametrize(("kind", "normed"), [("bloom", True), ("gpt-oss", True), ("bert", False)])
def test_a_sweep_equals_its_splits(kind: str, normed: bool) -> None:
    """Every share, the attention left out, every plane, the labels."""
    model, fitted, ids = tiny("bridge", kind), basis_of(kind, normed), FRESH[:6]
    swept = tlg.sweep_heads(model, ids, fitted, planes=True, **QUIET)
    split = tlg.split_scores(model, ids, fitted)
    shares = split.shares()
    assert swept.heads == shares.heads
    assert swept.bias_label == shares.bias_label
    for name in (*SHARES, "total", "gain_total", "dropped_mass"):
        a, b = getattr(swept, name), getattr(shares, name)
        assert float((a - b).abs().max()) <= 1e-5 * float(b.abs().max()), name
    assert swept.dominant_by("group").labels == shares.dominant_by("group").labels
    assert float(swept.dropped_mass.min()) > 1e-3
    ours, theirs = swept.planes().to_dataframe(), split.planes().to_dataframe()
    assert ours[["layer", "head", "plane", "term"]].equals(
        theirs[["layer", "head", "plane", "term"]]
    )
    for name in SHARES:
        assert ours[name].to_numpy() == pytest.approx(theirs[name].to_numpy(), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "normed"),
    # without constants; with ALiBi and constants; with constants that a QK-norm scales
    [("llama", False), ("bloom", True), ("stablelm", False)],
)
def test_intervals_are_those_of_sweeps_run_again(kind: str, normed: bool) -> None:
    """Bases without each group are merged from shards, windows without each block are swept."""
    model = tiny("bridge", kind)
    sweep = lambda ids, fitted: tlg.sweep_heads(model, ids, fitted, **QUIET)
    table = sweep_of(kind, normed, intervals=True)
    # 8 groups of 5 contexts are left out in pairs, so that at least 8 contexts are, windows by 8
    shards = [tlg.decompose(model, part, normalize=normed, **QUIET) for part in SEEN.split(10)]
    without = [PositionContext.merge([s for s in shards if s is not left]) for left in shards]
    of_basis = [sweep(FRESH, fitted) for fitted in without]
    blocks = FRESH.split(8)
    of_windows = [
        sweep(torch.cat([b for b in blocks if b is not left]), basis_of(kind, normed))
        for left in blocks
    ]
    for share in SHARES:
        for by in ("term", "group"):
            runs = of_basis, of_windows
            left_out = [[t.share(share, by).numpy() for t in source] for source in runs]
            sources = [(left_out[0], [10] * 4), (left_out[1], [8] * 5)]
            expected = jackknife(table.share(share, by).numpy(), sources)
            found = table.interval(share, by)
            for ours, theirs in zip(found[:3], expected):
                scale = np.abs(expected[2] - expected[1]).max()
                assert np.abs(ours.numpy() - theirs).max() < 1e-3 * scale
            assert float(found.value.sum(-1).sub(1).abs().max()) < 1e-5
    assert sweep_of(kind, normed).interval() is None


def test_the_null_of_position() -> None:
    """Learned positions that matter are seen by every draw; p is adjusted for the heads."""
    found = sweep_of("gpt2", intervals=True)
    p, position = found.nulls["p_position"], found.share("cs")[:, 0]
    strong = position > 0.2
    assert bool(strong.any())
    assert bool((p[strong] <= 2 / 2000).all())
    adjusted = stats.false_discovery_control(p.numpy())
    assert found.nulls["p_position_bh"].numpy() == pytest.approx(adjusted)
    null, highest = found.nulls["cs_position_null"], found.nulls["cs_position_null_95"]
    assert bool((null < highest).all())
    assert bool((position[strong] > highest[strong]).all())
    again = tlg.sweep_heads(
        tiny("bridge", "gpt2"), FRESH, basis_of("gpt2"), intervals=True, **QUIET
    )
    other = tlg.sweep_heads(
        tiny("bridge", "gpt2"), FRESH, basis_of("gpt2"), intervals=True, seed=1, **QUIET
    )
    assert torch.equal(again.nulls["cs_position_null"], null)
    assert not torch.equal(other.nulls["cs_position_null"], null)


def test_without_position_p_values_are_spread_evenly() -> None:
    """The first block of a model whose positional embedding is zero: over bases of other random
    tokens few p-values are small, and about half are above a half."""
    hf = hf_model("gpt2")
    with torch.no_grad():
        hf.transformer.wpe.weight.zero_()
    model, found = bridge_of(hf), []
    for seed in range(8):
        fitted = tlg.decompose(model, tokens(40, 12, seed=100 + seed), **QUIET)
        ids = tokens(32, 12, seed=200 + seed)
        table = tlg.sweep_heads(model, ids, fitted, layers=0, intervals=True, **QUIET)
        found.append(table.nulls["p_position"])
    p = torch.cat(found)
    assert float((p <= 0.05).double().mean()) < 0.2
    assert 0.2 < float((p > 0.5).double().mean()) < 0.8


def test_the_heads_of_the_embedded_model_are_found() -> None:
    """Of a model that was trained on text: position drives previous-token heads, content induction
    heads."""
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 64, n=48)
    basis = tlg.decompose(model, windows[:32], **QUIET)
    table = tlg.sweep_heads(model, windows[32:], basis, **QUIET)
    assert table.top("previous", 2).dominant_by("group").labels == ("position",) * 2
    assert table.top("induction", 3).dominant_by("group").labels == ("content",) * 3
    assert (table.types["previous"] < 0.2).sum() == 14
