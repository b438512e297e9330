"""Head types: the published input, scores against brute force and against TransformerLens's head
detector, baselines, bounds."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.rows import causal_mask
from tl_geometry.models.model_view import ModelView
from tl_geometry.scores.head_types import (
    HEAD_TYPES,
    detection_patterns,
    head_type_scores,
    measure_types,
    period_for,
    repeated_random_tokens,
    token_range,
    token_ranges,
)

PUBLISHED = [6775, 4171, 8806, 7365, 8316, 2564, 7432, 3625]


def random_pattern(batch: int, heads: int, length: int) -> torch.Tensor:
    scores = torch.randn(batch, heads, length, length, dtype=torch.float64).masked_fill(
        ~torch.ones(length, length).bool().tril(), -torch.inf
    )
    return scores.softmax(-1)


def brute_force(pattern: np.ndarray, tokens: list[int], name: str, width: int = 3) -> float:
    """One head, one row of tokens, straight from the definitions."""
    n, values = len(tokens), []
    for i in range(n):
        came_before = tokens[i] in tokens[:i]
        if name == "previous" and i >= 1:
            values.append(pattern[i, i - 1])
        if name == "neighbourhood" and i >= 1:
            values.append(sum(pattern[i, j] for j in range(i) if 1 <= i - j <= width))
        if name == "same":
            values.append(sum(pattern[i, j] for j in range(i + 1) if tokens[j] == tokens[i]))
        if name == "duplicate" and came_before:
            values.append(sum(pattern[i, j] for j in range(i) if tokens[j] == tokens[i]))
        if name == "induction" and came_before:
            values.append(sum(pattern[i, j] for j in range(1, i + 1) if tokens[j - 1] == tokens[i]))
    return float(np.mean(values))


def test_the_published_sequence() -> None:
    tokens = repeated_random_tokens()
    assert tokens.tolist() == [PUBLISHED * 3]
    torch.manual_seed(1234)
    assert torch.randint(1000, 10000, (8,)).tolist() == PUBLISHED


@given(
    period=st.integers(1, 12),
    copies=st.integers(1, 4),
    batch=st.integers(1, 5),
    seed=st.integers(0, 100),
    wide=st.booleans(),
)
def test_generated_tokens_repeat_and_are_distinct(
    period: int, copies: int, batch: int, seed: int, wide: bool
) -> None:
    tokens = repeated_random_tokens(
        period, copies, batch, low=5, high=5000 if wide else 5 + period, seed=seed, bos_id=0
    )
    assert tokens.shape == (batch, 1 + period * copies)
    assert (tokens[:, 0] == 0).all()
    copies_of = tokens[:, 1:].view(batch, copies, period)
    assert torch.equal(copies_of, copies_of[:, :1].expand_as(copies_of))
    assert all(len(set(row)) == period for row in copies_of[:, 0].tolist())
    assert torch.equal(
        tokens,
        repeated_random_tokens(
            period, copies, batch, low=5, high=5000 if wide else 5 + period, seed=seed, bos_id=0
        ),
    )


@pytest.mark.parametrize("name", HEAD_TYPES)
def test_scores_equal_brute_force_over_queries(name: str) -> None:
    tokens = repeated_random_tokens(5, 3, 2, low=0, high=50)
    pattern = random_pattern(2, 3, 15)
    ours = head_type_scores(pattern, tokens).scores[name]
    expected = [
        [brute_force(pattern[b, h].numpy(), tokens[b].tolist(), name) for b in range(2)]
        for h in range(3)
    ]
    assert torch.allclose(ours, torch.tensor(expected, dtype=torch.float64).mean(1), atol=1e-12)


@pytest.mark.parametrize("name", HEAD_TYPES)
def test_baseline_is_the_score_of_uniform_attention(name: str) -> None:
    tokens = repeated_random_tokens(6, 2)
    uniform = torch.ones(12, 12, dtype=torch.float64).tril() / torch.arange(1, 13).unsqueeze(1)
    found = head_type_scores(uniform[None, None], tokens)
    assert found.scores[name].item() == pytest.approx(found.baselines[name])
    assert found.baselines[name] == pytest.approx(
        brute_force(uniform.numpy(), tokens[0].tolist(), name)
    )


@pytest.mark.parametrize("name", ["previous", "duplicate", "induction"])
def test_a_perfect_head_scores_one(name: str) -> None:
    tokens = repeated_random_tokens(6, 2)
    keys = detection_patterns(tokens)[name][0].double()
    seen = keys.sum(-1, keepdim=True)
    pattern = torch.where(seen > 0, keys / seen.clamp(min=1), torch.eye(12, dtype=torch.float64))
    found = head_type_scores(pattern[None, None], tokens)
    assert found.scores[name].item() == pytest.approx(1)


def test_types_without_a_query_are_nan() -> None:
    found = head_type_scores(random_pattern(1, 2, 6), repeated_random_tokens(6, 1))
    assert torch.isnan(found.scores["induction"]).all()
    assert not torch.isnan(found.scores["previous"]).any()
    assert found.queries["duplicate"] == 0


def test_agrees_with_the_head_detector_of_transformerlens() -> None:
    from transformer_lens.head_detector import detect_head

    tokens = repeated_random_tokens(7, 3, bos_id=11)
    pattern = random_pattern(1, 4, 22).view(2, 2, 22, 22)  # two layers of two heads
    model = SimpleNamespace(
        cfg=SimpleNamespace(n_layers=2, n_heads=2, n_ctx=64, device="cpu", dtype=torch.float64),
        to_tokens=lambda _: tokens,
        run_with_cache=lambda *_, **__: (
            None,
            {("pattern", layer, "attn"): pattern[layer] for layer in range(2)},
        ),
    )
    keys_of = detection_patterns(tokens)
    for name in ("previous", "duplicate", "induction"):
        theirs = detect_head(model, "", f"{name}_{'token_' if name != 'induction' else ''}head")  # pyright: ignore[reportArgumentType]
        ours = (pattern * keys_of[name]).sum((-2, -1)) / pattern.sum((-2, -1))
        assert torch.allclose(ours, theirs.double(), atol=1e-6), name


def test_errors_say_what_to_do() -> None:
    with pytest.raises(
        GeometryError,
        match=r"low, high: expected at least 8 ids, got 3 from 0 to 2\. Use a wider range\.",
    ):
        repeated_random_tokens(low=0, high=3)
    with pytest.raises(GeometryError, match=r"expected at least 1 ids, got 0 from 3 to 2"):
        repeated_random_tokens(low=3, high=3, distinct=False)
    with pytest.raises(
        GeometryError, match=r"pattern: expected \[... batch head query key\] for tokens \(1, 24\)"
    ):
        head_type_scores(random_pattern(1, 1, 23), repeated_random_tokens())


def test_ranges_fit_the_model() -> None:
    assert token_range(50257, [50256]) == (1000, 10000)
    assert token_range(2048, [0]) == (1, 2048)
    assert token_range(40, [None, 39]) == (0, 40)
    assert period_for(16, 50) == 8
    assert period_for(17, 50, bos=True) == 8


def test_ranges_go_from_common_to_rare_ids() -> None:
    ranges = token_ranges(49152, [0])
    assert len(ranges) == 12
    assert ranges[0][0] == 1000
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert 0.97 * 49152 < ranges[-1][1] < 0.99 * 49152
    assert token_ranges(2048, [0]) == [(1, 2048)]


def copies_common_tokens(slope: float) -> Mock:
    """A model of one head that copies, the less the rarer (higher) a token's id is."""
    view = Mock(spec=ModelView)
    view.d_vocab, view.n_ctx, view.bos_id, view.causal = 50_000, 64, None, True
    view.pattern_hooks, view.device = {0: "pattern"}, torch.device("cpu")

    def run(tokens: torch.Tensor, hooks: dict[str, Any]) -> None:
        strength = 0.8 - slope * tokens.double() / 50_000
        where = detection_patterns(tokens)["induction"].double()
        hooks["pattern"]((where * strength[:, :, None])[:, None])

    view.run = run
    return view


def test_errors_of_a_model_hold_the_choice_of_tokens() -> None:
    """The score is the mean over the vocabulary, and its error is that over ranges of ids: large
    where a head copies common tokens only (the twin copies all alike)."""
    found = measure_types(copies_common_tokens(0.4), [0])
    score, error = (float(x["induction"]) for x in (found.scores, found.errors))
    assert score == pytest.approx(0.8 - 0.4 * 0.5, abs=0.01)
    assert error == pytest.approx(0.4 * (1 / 12) ** 0.5 / 12**0.5, rel=0.15)
    alike = measure_types(copies_common_tokens(0.0), [0])
    assert float(alike.errors["induction"]) < 1e-6


def test_errors_are_those_of_the_rows_and_of_a_ratio_where_rows_differ() -> None:
    """The delta method against the spread over fresh sets of rows, which it must predict."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 6, (600, 9), generator=g)  # rows differ in how much repeats
    scores = torch.randn(600, 2, 9, 9, generator=g).masked_fill(~causal_mask(9), -torch.inf)
    pattern = scores.softmax(-1)
    found = [head_type_scores(pattern[i : i + 20], tokens[i : i + 20]) for i in range(0, 600, 20)]
    for name in ("previous", "duplicate", "induction"):
        spread = torch.stack([f.scores[name] for f in found]).std(0)
        errors = torch.stack([f.errors[name] for f in found]).mean(0)
        assert torch.allclose(errors, spread, rtol=0.35), name
    rows = pattern[:20].diagonal(-1, -2, -1).mean(-1)  # equal numbers of queries: plain
    assert torch.allclose(found[0].errors["previous"], (rows.std(0) / 20**0.5).double())
    assert head_type_scores(pattern[:9], tokens[:9]).errors["previous"].isnan().all()
    assert head_type_scores(pattern[:10], tokens[:10]).errors["previous"].isfinite().all()
