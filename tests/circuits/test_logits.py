"""One logit is the sum of what is said to have written it, and what is said about a source and a
score is what splits and interventions say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.lib.models import ARCHITECTURES, hf_model, loadable, tiny, tokens
from tl_geometry.base.errors import (
    BudgetError,
    GeometryError,
    ReconstructionError,
    UnsupportedModelError,
)
from tl_geometry.circuits.logits import Direct, LogitExplanation, explain_logit
from tl_geometry.models import from_hf, view
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.values import trained_head

PROMPT = tokens(batch=1, length=14, seed=7)
ENCODERS = ("bert", "roberta")


def explained(model: Any, **options: Any) -> LogitExplanation:
    return explain_logit(model, PROMPT, 11, [5, 9], **options)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in ENCODERS])
def test_contributions_sum_to_the_logit(architecture: str) -> None:
    first: LogitExplanation | None = None
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        head = view(model).output_head()
        if head is None:
            with pytest.raises(UnsupportedModelError, match="norm and a linear map"):
                explained(model)
            continue
        found = explained(model)
        assert found.error < 1e-6
        logits = view(model).logits(PROMPT)[0, 11].double()
        if head.softcap is None:
            assert found.logit == pytest.approx(float(logits[5] - logits[9]), rel=1e-6)
        else:
            raw = head.softcap * torch.atanh(logits / head.softcap)
            assert found.logit == pytest.approx(float(raw[5] - raw[9]), rel=1e-4)
        assert not bool(found.heads[:, :, 12:].any())
        first = first or found
        assert float((found.heads - first.heads).abs().max()) < 2e-5 * first.size


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2", "bloom", "gpt-oss"])
def test_pairs_say_what_the_splits_say(architecture: str) -> None:
    model = tiny("bridge", architecture)
    found = explained(model, top=5)
    assert len(found.pairs) == 5
    for p, (layer, head, source) in enumerate(found.pairs):
        own = float(found.heads[layer, head, source])
        assert float(found.pair_values[p].sum()) == pytest.approx(own, abs=1e-5 * found.size)
        split = split_scores(model, PROMPT, None, heads=[(layer, head)], parts="writers")
        row = split.total()[0, 0, 11]
        seen = split.allowed[0, 11]
        score = float(row[source] - row[seen].mean())
        assert float(found.pair_scores[p]) == pytest.approx(score, abs=1e-4)
        pattern = float(split.pattern()[0, 0, 11, source])
        assert float(found.pair_patterns[p]) == pytest.approx(pattern, abs=1e-5)
    a, b, value = found.terms(0)[0]
    i, j = (found.parts.index(x) for x in (a, b))
    assert (
        value
        == float(found.pair_terms[0, i, j])
        == float(found.pair_terms[0].flatten()[found.pair_terms[0].abs().argmax()])
    )


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_logit_that_is_not_the_readout_of_the_last_state_is_refused(architecture: str) -> None:
    """Also behind a soft cap (Gemma 2), where the model shows no logit before the cap."""
    model = tiny("bridge", architecture)
    with (
        model.hooks(fwd_hooks=[("unembed.hook_in", lambda x, hook: 1.01 * x)]),
        pytest.raises(ReconstructionError, match="contributions that sum to it"),
    ):
        explained(model)


def test_with_a_basis_sources_are_position_and_content() -> None:
    model = tiny("bridge", "gpt2")
    basis = tlg.decompose(model, tokens(24, 14, seed=2), progress=False)
    found = explained(model, basis=basis)
    assert found.parts == ("bias", "pos", "cvec")
    assert found.error < 1e-6
    plain = explained(model)
    assert torch.allclose(plain.heads, found.heads)
    assert float(found.pair_values[0].sum()) == pytest.approx(
        float(found.heads[found.pairs[0]]), rel=1e-4
    )
    assert torch.allclose(found.pair_scores, plain.pair_scores, atol=1e-4)


def test_the_value_bias_belongs_to_no_source() -> None:
    """It is written whatever the source is. In the last layer it moves only the scale of the final
    norm, so that the values of all parts keep their ratios."""
    # a model of its own, because its bias is changed
    model = from_hf(hf_model("gpt2"), None, name="changed")
    last = view(model).n_layers - 1
    values = {}
    attention = model.original_model.transformer.h[last].attn
    before = attention.c_attn.bias.detach().clone()
    for size in (0.0, 0.5):
        with torch.no_grad():  # the last third of the bias is that of the values
            attention.c_attn.bias[2 * len(before) // 3 :] = before[2 * len(before) // 3 :] + size
        found = explained(model, top=30)
        values[size] = {
            pair: row
            for pair, row in zip(found.pairs, found.pair_values, strict=True)
            if pair[0] == last
        }
    both = values[0.0].keys() & values[0.5].keys()
    assert len(both) >= 5
    one, other = (torch.stack([values[size][pair] for pair in sorted(both)]) for size in (0.0, 0.5))
    scale = float((one * other).sum() / one.square().sum())
    assert abs(scale - 1) > 1e-3  # the bias is seen by the final norm
    assert torch.allclose(other, scale * one, atol=1e-5 * float(one.abs().max()))


def test_removing_a_writer_from_the_last_state_moves_the_logit_by_its_contribution() -> None:
    """With the final norm's scale frozen: an MLP's hook is scaled, the scale kept by hand."""
    model = tiny("bridge", "llama", dtype=torch.float64)
    found = explained(model)
    cache = model.run_with_cache(PROMPT)[1]
    head = view(model).output_head()
    assert head is not None
    h = cache["blocks.1.hook_resid_post"].double()
    scale = head.norm.scale(h)[0, 11]
    mlp = cache["blocks.1.hook_mlp_out"][0, 11].double()
    W = head.W_U[:, 5].double() - head.W_U[:, 9].double()
    change = float((mlp / scale * head.norm.gain.double()) @ W)
    assert dict(zip(found.other_names, found.others.tolist(), strict=True))[
        "mlp1"
    ] == pytest.approx(change)


def test_what_has_no_linear_head_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="tiny-bert"):
        explained(tiny("bridge", "bert"))
    model = tiny("bridge", "gpt2")
    with pytest.raises(GeometryError, match="one prompt"):
        explain_logit(model, tokens(2, 8), 3, 5)
    with pytest.raises(GeometryError, match="position"):
        explain_logit(model, PROMPT, 14, 5)
    with pytest.raises(GeometryError, match="target"):
        explain_logit(model, PROMPT, 3, [1, 2, 3])
    with pytest.raises(GeometryError, match="token_ids"):
        explain_logit(model, PROMPT, 3, 1000)


def test_rows_are_sorted_and_name_their_tokens() -> None:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 24, n=1)
    found = explain_logit(model, windows, 22, int(windows.tokens[0, 23]))
    sizes = [abs(float(str(row[5]))) for row in found.rows()]
    assert sizes == sorted(sizes, reverse=True)
    assert found.target_tokens[0] == found.str_tokens[23]


def test_pairs_are_the_largest_contributions_and_rows_have_them_all() -> None:
    found = explained(tiny("bridge", "gpt2"))
    sizes = found.heads.abs().flatten().sort(descending=True).values
    assert [abs(float(found.heads[pair])) for pair in found.pairs] == sizes[:16].tolist()
    every = explained(tiny("bridge", "gpt2"), top=1000)
    assert sorted(every.pairs) == [(l, h, j) for l in range(2) for h in range(4) for j in range(14)]
    expected: list[tuple[Any, ...]] = [
        (name, None, None, None, None, value, None, None)
        for name, value in zip(found.other_names, found.others.tolist(), strict=True)
    ]
    for p, (layer, head, source) in enumerate(found.pairs):
        value = float(found.heads[layer, head, source])
        where = (f"L{layer}H{head}", layer, head, source, f"<{int(PROMPT[0, source])}>")
        expected.append((*where, value, float(found.pair_patterns[p]), float(found.pair_scores[p])))
    assert found.rows() == sorted(expected, key=lambda row: -abs(row[5]))
    size = float(found.heads.abs().sum() + found.others.abs().sum())
    total = float(found.heads.sum() + found.others.sum())
    assert (found.size, found.total) == (pytest.approx(size), pytest.approx(total))
    assert found.error == pytest.approx(abs(total - found.logit) / size)
    names = found.parts
    terms = [
        (names[i], names[j], value)
        for i, row in enumerate(found.pair_terms[3].tolist())
        for j, value in enumerate(row)
    ]
    assert found.terms(3) == sorted(terms, key=lambda term: -abs(term[2]))


def test_the_budget_is_what_heads_take_and_mlps_write() -> None:
    model = tiny("bridge", "llama")
    seen = view(model)
    direct = Direct(seen, trained_head(seen), torch.tensor([[5, 9]]), 11, 14)
    direct.run(PROMPT)
    needed = sum(taken.nbytes for taken in direct.paid_values) + 2 * 14 * 32 * 8
    assert explained(model, memory_budget=needed).error < 1e-6
    with pytest.raises(BudgetError, match=f"got {needed:,} bytes for all heads and MLPs"):
        explained(model, memory_budget=needed - 1)
