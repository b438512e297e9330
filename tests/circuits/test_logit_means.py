"""Contributions over prompts are those of each prompt alone; positions go by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tl_geometry as tlg
from tests.tiny import loadable, tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits import LogitMeans, explain_logits, logit_means

PROMPTS = tokens(batch=12, length=9, seed=11)
TARGETS = [(3 + i, 20 - i) for i in range(12)]


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2"])
def test_contributions_are_those_of_each_prompt_alone(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(loadable(architecture)[0][0], architecture)
    monkeypatch.setattr(logit_means, "AT_ONCE", 5)
    means = explain_logits(model, PROMPTS, TARGETS, position=-2)
    sources = torch.zeros_like(means.sources)
    for row, target in enumerate(TARGETS):
        one = tlg.explain_logit(model, PROMPTS[row : row + 1], 7, target)
        bound = 1e-5 * one.size
        assert float(means.logits[row]) == pytest.approx(one.logit, abs=bound)
        found = dict(zip(means.writers, means.values[:, row].tolist(), strict=True))
        for name, value in zip(one.other_names, one.others.tolist(), strict=True):
            assert found[name] == pytest.approx(value, abs=bound), name
        for layer, heads in enumerate(one.heads.sum(-1).tolist()):
            for head, value in enumerate(heads):
                assert found[f"L{layer}H{head}"] == pytest.approx(value, abs=bound)
        sources += one.heads / 12
    assert torch.allclose(means.sources, sources, atol=1e-4)
    assert float(sources.abs().max()) > 0.01


def test_the_table_has_means_and_intervals(tmp_path: Path) -> None:
    model = tiny("bridge", "gpt2")
    means = explain_logits(model, PROMPTS, TARGETS)
    loaded = LogitMeans.load(means.save(tmp_path / "means.safetensors"))
    assert list(loaded.columns()) == ["writer", "contribution", "low", "high"]
    sizes = [abs(float(row[1])) for row in loaded.rows()]  # type: ignore[arg-type]
    assert sizes == sorted(sizes, reverse=True)
    name, value, low, high = loaded.rows()[0]
    numbers = means.values[means.writers.index(str(name))]
    reach = 2.2009852 * float(numbers.std()) / 12**0.5  # t with 11 degrees of freedom
    assert (value, low, high) == pytest.approx(
        (float(numbers.mean()), float(numbers.mean()) - reach, float(numbers.mean()) + reach)
    )


def test_positions_have_names_in_everything_that_reads_a_logit() -> None:
    model = tlg.zoo.embedded()
    rows = [{"f": "get", "x": "y"}, {"f": "set", "x": "z"}]
    prompts = tlg.corpus.aligned_prompts(model, "def {f}({x}): return {x}", rows, prepend_bos=True)
    at = prompts.position("x")
    assert at not in (prompts.position("end"), prompts.position("x2"))
    named = explain_logits(model, prompts, [5, 6], position="x")
    assert named.position == at
    assert named.positions["x"] == at
    assert named.values.equal(explain_logits(model, prompts.tokens, [5, 6], position=at).values)
    assert not named.values.equal(explain_logits(model, prompts, [5, 6]).values)
    assert tlg.explain_logit(model, prompts[:1], "x", 5).position == at
    assert tlg.trace_logit(model, prompts[:1], 5, position="x").position == at
    knockouts = {"targets": [(5, 6), (5, 6)], "heads": "L0H0", "controls": 0, "progress": False}
    first, second = (
        tlg.interventions.head_knockouts(model, of, position=where, **knockouts)  # type: ignore[arg-type]
        for of, where in ((prompts, "x"), (prompts.tokens, at))
    )
    assert first.effects.equal(second.effects)


def test_targets_that_do_not_fit_are_refused() -> None:
    model = tiny("bridge", "gpt2")
    for targets in ([5] * 11, [5] * 11 + [(5, 6)], [(5, 6, 7)] * 12):
        with pytest.raises(GeometryError, match="a token for each of 12 prompts"):
            explain_logits(model, PROMPTS, targets)
    with pytest.raises(GeometryError, match="an index from 0 to 8"):
        explain_logits(model, PROMPTS, TARGETS, position=9)
