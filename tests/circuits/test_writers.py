"""Shares by writers: the terms sum to the scores, the sweep gives the marginals of the split, raw
and folded loadings agree, and the numbers are those worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.dense import dense_shares
from tests.lib.models import (
    ARCHITECTURES,
    HAS_HOOKED,
    loadable,
    tiny,
    tiny_hooked,
    tokens,
)
from tl_geometry.base.errors import BudgetError, GeometryError
from tl_geometry.base.rows import row_center
from tl_geometry.circuits.writer_sweep import sweep_writers
from tl_geometry.models import view
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.sweep import sweep_heads
from tl_geometry.scores.values import split_values

PROMPTS = tokens(batch=3, length=14, seed=7)


def sweep_of(model: Any, **options: Any) -> tlg.circuits.WriterSweep:
    return sweep_heads(model, PROMPTS, parts="writers", progress=False, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_terms_sum_and_the_sweep_gives_their_marginals(architecture: str) -> None:
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        split = split_scores(model, PROMPTS, None, layers=1, parts="writers")
        assert split.reconstruction.adds_up
        found = split.shares().marginals()
        sweep = sweep_of(model, layers=1)
        assert sweep.parts == found.parts
        for mine, theirs in ((sweep.cs, found.cs), (sweep.gs, found.gs)):
            assert float((mine - theirs).abs().max()) < 2e-4, (kind, processed)
            assert float((mine.sum(-1) - 1).abs().max()) < 1e-3
        assert float(sweep.cs.abs().max()) > 0.1


@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "gptj", "neox", "opt"])
def test_the_sweep_is_exact_in_float64_and_the_same_for_all_loadings(architecture: str) -> None:
    found: list[Tensor] = []
    for kind, processed in loadable(architecture):
        if processed and architecture == "gptj" and kind == "bridge":
            continue  # its folded biases stay float32
        model = tiny(kind, architecture, processed, torch.float64)
        for parts in ("writers", "blocks"):
            sweep = sweep_heads(model, PROMPTS, parts=parts, progress=False)  # pyright: ignore
            split = split_scores(model, PROMPTS, None, parts=parts)  # all layers at once
            marginals = split.shares().marginals()
            assert float((sweep.cs - marginals.cs).abs().max()) < 1e-9
            assert float((sweep.gs - marginals.gs).abs().max()) < 1e-9
            if parts == "writers":
                found.append(sweep.cs)
    assert all(float((one - found[0]).abs().max()) < 1e-6 for one in found)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt2"])
def test_raw_and_folded_weights_give_the_same_writers(architecture: str) -> None:
    found = [sweep_of(tiny(*way)) for way in _ways(architecture)]
    assert len(found) >= 2
    for one in found:
        assert one.parts == found[0].parts
        assert float((one.cs - found[0].cs).abs().max()) < 5e-5


def _ways(architecture: str) -> list[tuple[str, str, bool]]:
    return [(kind, architecture, processed) for kind, processed in loadable(architecture)]


def test_dropped_positions_are_those_of_the_split() -> None:
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    basis = tlg.decompose(model, tokens(24, 14, seed=2), window=(3, 14), progress=False)
    sweep = sweep_heads(model, PROMPTS, basis, parts="writers", progress=False)
    split = split_scores(model, PROMPTS, basis, parts="writers").shares()
    assert sweep.drop == 3
    assert float((sweep.cs - split.marginals().cs).abs().max()) < 1e-9
    assert float((sweep.cs - sweep_of(model).cs).abs().max()) > 0.01


def test_batches_do_not_matter() -> None:
    model = tiny("bridge", "llama")
    one, each = sweep_of(model), sweep_of(model, batch_size=1)
    assert torch.allclose(one.cs, each.cs, atol=1e-5)
    assert one.provenance.token_hash == each.provenance.token_hash


def test_values_by_writers_sum_to_the_heads() -> None:
    for architecture in ("gpt2", "llama"):
        values = split_values(tiny("bridge", architecture), PROMPTS, None, parts="writers")
        assert values.reconstruction.adds_up
        blocks = split_values(tiny("bridge", architecture), PROMPTS, None, parts="blocks")
        heads = [values.parts.index(f"L0H{h}") for h in range(4)]
        together = values.z[heads].sum(0)
        assert torch.allclose(together, blocks.z[blocks.parts.index("attn0")], atol=1e-4)
        assert float(together.abs().max()) > 0.1


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@torch.no_grad()
def test_a_two_layer_attention_only_model_by_hand() -> None:
    """The composition of ARENA's induction circuit exercise, on random weights with biases."""
    model = tiny_hooked(attn_only=True, normalization_type=None, dtype=torch.float64)
    cache = model.run_with_cache(PROMPTS)[1]
    W = {name: getattr(model.blocks[1].attn, name) for name in ("W_Q", "W_K", "b_Q", "b_K")}
    first = model.blocks[0].attn
    z = cache["z", 0] - first.b_V
    parts = {"embed": cache["embed"], "pos_embed": cache["pos_embed"]}
    constants = first.b_O + torch.einsum("he,hed->d", first.b_V, first.W_O)
    parts["constants"] = constants.expand_as(cache["embed"])
    for head in range(4):
        parts[f"L0H{head}"] = z[:, :, head] @ first.W_O[head]
    split = split_scores(model, PROMPTS, None, heads="L1H2", parts="writers")
    allowed = torch.ones(14, 14).tril().bool()
    every: list[Tensor] = []
    for a in split.parts:
        for b in split.parts:
            q = W["b_Q"][2] if a == "bias" else parts[a] @ W["W_Q"][2]
            k = W["b_K"][2] if b == "bias" else parts[b] @ W["W_K"][2]
            q, k = (x.expand(3, 14, 8) for x in (q, k))
            term = q @ k.mT / math.sqrt(8)
            assert float((split.terms[a, b][:, 0] - term).abs().max()) < 1e-5, (a, b)
            every.append(term)
    total = torch.stack(every).sum(0)
    assert torch.allclose(
        row_center(total, allowed), row_center(split.total()[:, 0], allowed), atol=1e-4
    )
    expected = dense_shares(torch.stack(every)[:, :, None], allowed).cs[0]
    expected = expected.view(len(split.parts), -1)
    sweep = sweep_of(model)
    row = sweep.heads.index((1, 2))
    for side, axis in enumerate((1, 0)):
        assert float((sweep.cs[row, side] - expected.sum(axis)).abs().max()) < 1e-5


def test_a_planted_induction_head_reads_the_previous_token_head() -> None:
    """The embedded model's induction head finds keys that its previous-token head wrote."""
    model = tlg.zoo.embedded()
    prompts = tlg.scores.repeated_random_tokens(12, 3, 16, low=3, high=view(model).d_vocab, seed=0)
    sweep = sweep_heads(model, prompts, parts="writers", layers=1, progress=False)
    names = [name for name, _ in sweep.top("L1H0", 3)]
    assert "L0H0" in names
    assert sweep.of("L1H0", "L0H0") == dict(sweep.top("L1H0", 3))["L0H0"]


def test_shares_are_looked_up_sorted_and_tabulated_by_name() -> None:
    """By loops over heads, sides and parts; of the shares those of gain on the key side unless
    others are asked for."""
    sweep = sweep_of(tiny("bridge", "bloom"))
    assert sweep.parts[-1] == "alibi"
    table = [
        (*head, side, part, *(float(x[h, s, p]) for x in (sweep.cs, sweep.gs)), mass)
        for h, (head, mass) in enumerate(zip(sweep.heads, sweep.dropped_mass.tolist(), strict=True))
        for s, side in enumerate(("query", "key"))
        for p, (part, wrote) in enumerate(zip(sweep.parts, sweep.wrote, strict=True))
        if wrote < head[0]
    ]
    assert list(sweep.columns()) == ["layer", "head", "side", "part", "cs", "gs", "dropped_mass"]
    assert sweep.rows() == table
    assert {row[3] for row in table if row[0] == 0} == {"bias", "embed", "constants", "alibi"}
    row = sweep.heads.index((1, 2))
    for s, side in enumerate(("query", "key")):
        for share, values in (("cs", sweep.cs[row, s]), ("gs", sweep.gs[row, s])):
            named = zip(sweep.parts, values.tolist(), strict=True)
            expected = sorted(named, key=lambda pair: -pair[1])
            assert list(sweep.top("L1H2", 20, side=side, share=share)) == expected
            for part, value in expected:
                assert sweep.of((1, 2), part, side=side, share=share) == value
    assert sweep.top("L1H2") == sweep.top("L1H2", 5, side="key", share="gs")
    assert sweep.of("L1H2", "embed") == sweep.of("L1H2", "embed", side="key", share="gs")


def test_two_positions_are_left_after_those_that_are_dropped() -> None:
    seen = view(tiny("bridge", "gpt2"))
    assert sweep_writers(seen, PROMPTS, drop=12, progress=False).drop == 12
    text = r"tokens: expected more than 14 positions \(13 left out\), got 14"
    with pytest.raises(GeometryError, match=text):
        sweep_writers(seen, PROMPTS, drop=13, progress=False)


@pytest.mark.parametrize("parts", ["writers", "blocks"])
def test_a_cache_of_other_prompts_is_refused(parts: str) -> None:
    model = tiny("bridge", "gpt2")
    cache = model.run_with_cache(PROMPTS)[1]
    assert split_scores(model, PROMPTS, parts=parts, cache=cache).reconstruction.adds_up
    for prompts in (PROMPTS[:2], PROMPTS[:, :9]):
        with pytest.raises(GeometryError, match=r"activations of tokens \(., .*\), got \(3, 14\)"):
            split_scores(model, prompts, parts=parts, cache=cache)
    flat = model.run_with_cache(PROMPTS[:1], remove_batch_dim=True)[1]
    with pytest.raises(GeometryError, match=r"got \(14,\).*remove_batch_dim=False"):
        split_scores(model, PROMPTS[:1], parts=parts, cache=flat, layers=1)


@pytest.mark.slow
def test_what_makes_no_sense_is_refused() -> None:
    model = tiny("bridge", "gpt2")
    with pytest.raises(GeometryError, match="writers"):
        sweep_heads(model, PROMPTS, parts="heads", progress=False)  # pyright: ignore
    with pytest.raises(GeometryError, match="intervals"):
        sweep_of(model, intervals=True)
    with pytest.raises(GeometryError, match="basis"):
        sweep_heads(model, PROMPTS, None, progress=False)  # pyright: ignore
    with pytest.raises(BudgetError):
        split_scores(model, PROMPTS, None, parts="writers", memory_budget=1000)
    with pytest.raises(GeometryError, match="L0H"):
        sweep_of(model).of("L1H0", "L0H9")
    with pytest.raises(GeometryError, match="that the result has"):
        sweep_of(model, layers=[1]).of("L0H1", "embed")
