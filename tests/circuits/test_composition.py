"""Composition on data: the shares of each side sum to one and are those of the split, the nulls are
what they say, and the weight-only score is TransformerLens's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import HAS_HOOKED, loadable, tiny, tiny_hooked, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.writer_edges import SIDES, Composition, composition
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.values import split_values

PROMPTS = tokens(batch=4, length=14, seed=7)


def found(model: Any, **options: Any) -> Composition:
    return composition(model, PROMPTS, progress=False, **options)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2", "neox", "bert", "gpt-oss"])
def test_shares_sum_to_one_and_are_those_of_the_split(architecture: str) -> None:
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        table = found(model, heads=["L1H2", "L1H0"])
        assert table.heads == ((1, 2), (1, 0))
        assert float((table.cs.sum(-1) - 1).abs().max()) < 1e-3
        shares = split_scores(model, PROMPTS, None, heads=table.heads, parts="writers").shares()
        marginals = shares.marginals()
        assert float((table.cs[:, :2] - marginals.cs).abs().max()) < 2e-4
        assert float((table.gs[:, :2] - marginals.gs).abs().max()) < 2e-4
        assert bool(table.gs[:, 2].isnan().all())


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_value_side_is_the_covariance_of_the_output(architecture: str) -> None:
    model = tiny("bridge", architecture)
    table = found(model, layers=1)
    values = split_values(model, PROMPTS, None, layers=1, parts="writers")
    W_O = values.W_O if architecture == "llama" else values.W_O - values.W_O.mean(-1, keepdim=True)
    out = torch.einsum("pbihe,hed->pbihd", values.z, W_O)[1:]  # without the constants
    total = out.sum(0)
    expected = (out * total).sum((1, 2, 4)) / total.square().sum((0, 1, 3))
    assert float((table.cs[:, 2, 1:] - expected.mT).abs().max()) < 1e-4


def test_another_context_is_another_context() -> None:
    """The null from other prompts is what a split of swapped writers would give, and a writer of
    position is its own null."""
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    table = found(model, heads="L1H1")
    place = table.parts.index("pos_embed")
    assert float(table.cosine[place]) == pytest.approx(1.0)
    assert torch.allclose(table.other_cs[0, :, place], table.cs[0, :, place])
    head = table.parts.index("L0H2")
    assert float(table.cosine[head]) < 0.9
    split = split_scores(model, PROMPTS, None, heads="L1H1", parts="writers")
    scale = model.run_with_cache(PROMPTS)[1]["blocks.1.ln1.hook_scale"].unsqueeze(-1)
    k = (split.k[head] * scale).roll(1, 0) / scale  # the reader's norm stays as it is
    allowed = split.allowed[0]
    term = torch.einsum("bihe,bjhe->bhij", split.q.sum(0), k)[:, 0]
    total = split.total()[:, 0].masked_fill(~allowed, 0)
    centred = (total - total.sum(-1, keepdim=True) / allowed.sum(-1)[:, None]) * allowed
    expected = (term * centred).sum() / centred.square().sum()
    assert float(table.other_cs[0, 1, head]) == pytest.approx(float(expected), rel=1e-9)
    assert float(table.other_cs[0, 1, head]) != pytest.approx(float(table.cs[0, 1, head]))


def test_a_random_direction_has_no_share_but_the_spread_of_chance() -> None:
    model = tiny("bridge", "llama")
    table = found(model, layers=1, draws=8)
    constants = table.parts.index("constants")  # Llama has none
    assert not bool(table.random_cs[..., constants].any())
    rest = [i for i in range(1, len(table.parts)) if i != constants]
    random = table.random_cs[:, :2, rest]
    assert bool((random > 0).all())
    assert float(random.mean()) < float(table.cs[:, :2, rest].abs().mean())
    again = found(model, layers=1, draws=8)
    assert torch.equal(table.random_cs[..., 1:], again.random_cs[..., 1:])
    other = found(model, layers=1, draws=8, seed=1)
    assert not torch.equal(table.random_cs[..., 1:], other.random_cs[..., 1:])


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@torch.no_grad()
def test_weight_only_scores_are_those_of_transformerlens() -> None:
    model = tiny_hooked(attn_only=True, normalization_type=None)
    table = found(model, layers=1)
    first = table.parts.index("L0H0")
    for side, letter in zip(SIDES, "QKV", strict=True):
        theirs: Tensor = model.all_composition_scores(letter)[0, :, 1, :]  # writer, reader
        mine = table.weights[:, SIDES.index(side), first : first + 4].mT
        assert torch.allclose(mine.float(), theirs, atol=1e-4), side


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_weight_only_scores_are_the_same_for_raw_and_folded(architecture: str) -> None:
    tables = [found(tiny(*_way(way, architecture)), layers=1) for way in loadable(architecture)]
    for table in tables[1:]:
        known = ~tables[0].weights.isnan()
        assert torch.equal(known, ~table.weights.isnan())
        assert torch.allclose(table.weights[known], tables[0].weights[known], atol=1e-5)


def _way(way: tuple[str, bool], architecture: str) -> tuple[str, str, bool]:
    return way[0], architecture, way[1]


def test_edges_and_rows() -> None:
    table = found(tlg.zoo.embedded(), heads=["L1H0", "L2H1"])
    edges = table.edges(n=5)
    assert [abs(e[3]) for e in edges] == sorted((abs(e[3]) for e in edges), reverse=True)
    assert all(writer[:1] == "L" for writer, *_ in table.edges(side="key", heads_only=True))
    assert not any(row[0] == 1 and row[3] == "L1H0" for row in table.rows())
    assert any(row[0] == 2 and row[3] == "L1H0" for row in table.rows())
    blocks = found(tlg.zoo.embedded(), heads="L2H1", parts="blocks")
    assert "attn1" in blocks.parts
    assert float((blocks.cs.sum(-1) - 1).abs().max()) < 1e-3


def test_one_prompt_has_no_null() -> None:
    with pytest.raises(GeometryError, match="at least 2 prompts"):
        composition(tiny("bridge", "gpt2"), PROMPTS[:1], progress=False)
    with pytest.raises(GeometryError, match="at least 2 prompts"):
        found(tiny("bridge", "gpt2"), batch_size=1)
