"""Edits of a live model do exactly what they say in every class, leave no trace, and find the
causes planted in a hand-built model."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.induction import attention_only, corpus, induction_model, prompts, rotary_previous_token
from tests.interventions.bases import basis_of
from tests.lib.models import HAS_HOOKED, tiny, tokens
from tl_geometry import decompose, interventions
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions.causal import NEARLY, dominant_only, necessity_sufficiency
from tl_geometry.interventions.head_edits import derangement
from tl_geometry.interventions.stream import project_stream, subspace_of
from tl_geometry.interventions.terms import (
    RunningScores,
    edits_for,
    keep_term,
    mean_term,
    per_head,
    remove_term,
    running_parts,
    shrinking,
    swapping,
    terms_of,
)
from tl_geometry.models import view
from tl_geometry.models.live_edits import edited_scores
from tl_geometry.scores.head_types import head_type_scores
from tl_geometry.scores.split import ScoreSplit, split_scores
from tl_geometry.scores.sweep import sweep_heads
from tl_geometry.scores.terms import term_names

ARCHITECTURES = (
    "gpt2",
    "llama",
    "bloom",
    "neox",
    "qwen3",
    "gemma2",
    "gpt-oss",
    "olmo2",
    "opt",
    "gptj",
    "gpt-neo",
    "bert",
)
HOOKED = ("gpt2", "llama", "bloom", "gpt-neo") if HAS_HOOKED else ()
PROMPTS = tokens(batch=3, length=14, seed=4)
NINE = term_names(("bias", "pos", "cvec"))
MIXED = ("pos-cvec", "cvec-cvec")


@cache
def split_of(architecture: str) -> ScoreSplit:
    return split_scores(tiny("bridge", architecture), PROMPTS, basis_of("bridge", architecture))


def logits(model: Any, ids: Tensor = PROMPTS) -> Tensor:
    with torch.no_grad():
        return model(ids, return_type="logits").clone()


def hooks_of(model: Any) -> int:
    return sum(len(p.fwd_hooks) + len(p._forward_hooks) for p in model.hook_dict.values())


@pytest.mark.parametrize(
    ("model_class", "architecture"),
    [*(("bridge", a) for a in ARCHITECTURES), *(("hooked", a) for a in HOOKED)],
)
def test_a_large_edit_changes_the_logits_and_leaves_no_trace(
    model_class: str, architecture: str
) -> None:
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    before, hooks = logits(model), hooks_of(model)
    with remove_term(model, basis, ["content", "mixed"]):
        edited = logits(model)
    assert (edited - before).abs().max() > 0.05 * before.abs().max()
    with remove_term(model, basis, ()):
        unedited = logits(model)
    assert torch.equal(unedited, before), "an edit of nothing changes nothing"
    assert torch.equal(logits(model), before)
    assert hooks_of(model) == hooks


def changed_z(architecture: str, context: Any, layer: int = 1) -> tuple[Tensor, Tensor]:
    """(z after the edit, v) of a layer ``[batch position head d_head]``, as the model goes on with
    it."""
    model = tiny("bridge", architecture)
    with context:
        _, cached = model.run_with_cache(PROMPTS)
    z, v = cached[f"blocks.{layer}.attn.hook_z"], cached[f"blocks.{layer}.attn.hook_v"]
    v = v.unflatten(-1, (-1, 8)) if v.dim() == 3 else v
    return z.reshape(*v.shape[:2], -1, v.shape[-1]), v.repeat_interleave(4 // v.shape[2], 2)


def pattern_of(split: ScoreSplit, scores: Tensor) -> Tensor:
    """The model's softmax of scores of layer 1, written out."""
    cap, sinks = (
        split.softcap[4:, None, None],
        split.sinks[4:, None, None].expand(*scores.shape[:-1], 1),
    )
    capped = scores if torch.isinf(cap).all() else cap * torch.tanh(scores / cap)
    return torch.cat([capped.masked_fill(~split.allowed[4:], -torch.inf), sinks], -1).softmax(-1)[
        ..., :-1
    ]


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2", "gpt-oss", "bloom", "bert"])
def test_edits_are_what_they_say(architecture: str) -> None:
    """z of the edited layer against the pattern computed from the terms of a split of the unedited
    model."""
    model, basis, split = (
        tiny("bridge", architecture),
        basis_of("bridge", architecture),
        split_of(architecture),
    )
    heads = [(1, h) for h in range(4)]
    total, terms = split.total()[:, 4:], {k: v[:, 4:] for k, v in split.terms.items()}
    mixed, content = terms["pos", "cvec"] + terms["cvec", "pos"], terms["cvec", "cvec"]
    bias = sum((v for k, v in terms.items() if "bias" in k), torch.zeros_like(total))
    expected = {
        "remove": (remove_term(model, basis, ["pos-cvec", ("cvec", "pos")], heads), total - mixed),
        "keep": (keep_term(model, basis, "content", heads), bias + content),
        "bias": (keep_term(model, basis, (), heads), bias),
        "mean": (mean_term(model, basis, "cvec-cvec", heads), total - content + content.mean(0)),
    }
    z, v = changed_z(architecture, remove_term(model, basis, (), heads))
    plain = torch.einsum("bhij,bjhe->bihe", split.pattern()[:, 4:], v)
    assert torch.allclose(z, plain, atol=2e-4 * float(v.abs().max())), "nothing"
    for name, (context, scores) in expected.items():
        z, v = changed_z(architecture, context)
        assert not torch.allclose(z, plain, atol=1e-2), "the unedited z is another"
        right = torch.einsum("bhij,bjhe->bihe", pattern_of(split, scores), v)
        assert torch.allclose(z, right, atol=2e-4 * float(v.abs().max())), name


def test_chosen_heads_only() -> None:
    for chosen in ([(1, 2)], "L1H2"):
        z, _ = changed_z(
            "gpt2",
            remove_term(tiny("bridge", "gpt2"), basis_of("bridge", "gpt2"), "content", chosen),
        )
        plain, _ = changed_z(
            "gpt2", remove_term(tiny("bridge", "gpt2"), basis_of("bridge", "gpt2"), (), chosen)
        )
        moved = (z - plain).abs().amax((0, 1, 3))
        assert moved[2] > 1e-3
        assert moved[[0, 1, 3]].max() == 0


def test_the_model_is_restored_after_an_exception_and_edits_survive_run_with_hooks() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge", "gpt2")
    before, hooks = logits(model), hooks_of(model)
    with pytest.raises(RuntimeError, match="stop"), remove_term(model, basis, "content"):
        raise RuntimeError("stop")
    assert hooks_of(model) == hooks
    with remove_term(model, basis, "content"):
        edited = logits(model)
        again = model.run_with_hooks(
            PROMPTS, fwd_hooks=[("blocks.0.hook_resid_pre", lambda h, hook: h)]
        )
        assert torch.equal(logits(model), edited)
    assert torch.allclose(again, edited)
    assert torch.equal(logits(model), before)


def test_edits_of_different_heads_nest_and_of_one_head_are_refused() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge", "gpt2")
    with remove_term(model, basis, "content", ["L0H0", "L0H1"]):
        both = logits(model)
    with remove_term(model, basis, "content", "L0H0"), remove_term(model, basis, "content", "L0H1"):
        nested = logits(model)
    assert torch.allclose(nested, both, atol=1e-5)
    with (
        pytest.raises(
            GeometryError,
            match=r"heads: expected heads that no open edit changes, got L0H0, edited already\. "
            r"Use one edit",
        ),
        remove_term(model, basis, "content", "L0H0"),
        remove_term(model, basis, "content", "L0H0"),
    ):
        logits(model)


def test_a_padding_mask_is_refused_and_not_edited_wrongly() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge", "gpt2")
    mask = torch.ones_like(PROMPTS)
    mask[0, :4] = 0
    with (
        pytest.raises(GeometryError, match=r"expected no padding.* got zeros in attention_mask"),
        remove_term(model, basis, "content"),
    ):
        model(PROMPTS, attention_mask=mask)


def test_bad_requests_are_refused_by_name() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge", "gpt2")
    with pytest.raises(
        GeometryError, match=r"term: expected one of 'bias-bias', .*'mixed', got 'posn'"
    ):
        remove_term(model, basis, "posn")
    with (
        pytest.raises(GeometryError, match=r"head 'L0H9': expected an index from 0 to 3, got 9"),
        remove_term(model, basis, "content", "L0H9"),
    ):
        pass
    with (
        pytest.raises(
            GeometryError, match=r"mean_term: expected a batch of at least 2 prompts, got 1"
        ),
        mean_term(model, basis, "content"),
    ):
        logits(model, PROMPTS[:1])
    with (
        pytest.raises(
            GeometryError,
            match=r"tokens: expected at most 18 positions, as the basis has seen, got 30",
        ),
        remove_term(model, basis, "content"),
    ):
        logits(model, tokens(2, 30))
    with (
        pytest.raises(GeometryError, match=r"basis: expected the model it was computed from"),
        remove_term(tiny("bridge", "llama"), basis, "content"),
    ):
        pass
    assert hooks_of(model) == 0
    untrained = dataclasses.replace(view(model), head_trained=False)
    with pytest.raises(
        UnsupportedModelError,
        match=r"necessity_sufficiency: expected a model with a trained output head",
    ):
        necessity_sufficiency(untrained, PROMPTS, basis, "L0H0", "content")
    with pytest.raises(
        UnsupportedModelError, match=r"dominant_only: expected a causal language model"
    ):
        dominant_only(tiny("bridge", "bert"), PROMPTS, basis_of("bridge", "bert"))


def test_term_names() -> None:
    assert terms_of("content") == ("cvec-cvec",)
    assert terms_of(("pos", "cvec")) == ("pos-cvec",)
    assert terms_of(["mixed", "pos-cvec"]) == ("bias-cvec", "pos-cvec", "cvec-bias", "cvec-pos")
    assert terms_of("position") == ("bias-bias", "bias-pos", "pos-bias", "pos-pos", "alibi-alibi")
    for n in range(2, 9):
        assert not (derangement(n, n) == torch.arange(n)).any()
        assert sorted(derangement(n, n).tolist()) == list(range(n))


# ---- the stream


@pytest.mark.parametrize("model_class", ["bridge", "hooked"] if HAS_HOOKED else ["bridge"])
@pytest.mark.parametrize("subspace", ["pos", "ctx"])
def test_projections_of_the_stream(model_class: str, subspace: str) -> None:
    model, basis = tiny(model_class, "gpt2"), basis_of(model_class, "gpt2")
    before = logits(model)
    for state in (0, 1, 2):
        plain, found = {}, {}
        view(model).run(
            PROMPTS, {view(model).state_hooks[state]: lambda h, plain=plain: plain.update(h=h)}
        )
        for keep in (False, True):
            with project_stream(model, basis, state, subspace, keep=keep, rank=3):
                edited = logits(model)
                view(model).run(
                    PROMPTS,
                    {view(model).state_hooks[state]: lambda h, found=found: found.update(h=h)},
                )
            V, mean = subspace_of(basis, state, subspace, 3), basis.mean[basis.index(state)]
            inside = (plain["h"].double() - mean) @ V @ V.T
            assert torch.allclose(
                found["h"].double(),
                mean + inside if keep else plain["h"].double() - inside,
                atol=1e-4,
            )
            assert (edited - before).abs().max() > 0.01 * before.abs().max()
    assert torch.equal(logits(model), before)


def test_a_projection_comes_before_what_a_term_edit_records() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge", "gpt2")
    with remove_term(model, basis, "content", "L1H0"), project_stream(model, basis, 1, "pos"):
        inner = logits(model)
    with project_stream(model, basis, 1, "pos"), remove_term(model, basis, "content", "L1H0"):
        outer = logits(model)
    assert torch.allclose(inner, outer, atol=1e-5)


def test_subspaces_hold_what_they_say() -> None:
    basis = basis_of("bridge", "gpt2")
    V = subspace_of(basis, 1, "pos")
    rows = basis.pos[1]
    assert torch.allclose(V.T @ V, torch.eye(V.shape[1], dtype=V.dtype), atol=1e-10)
    assert (rows @ V).square().sum() >= 0.99 * rows.square().sum()
    assert (rows @ V[:, :-1]).square().sum() < 0.99 * rows.square().sum()
    with pytest.raises(
        GeometryError, match=r"rank: expected 1 to \d+, the rank of pos at state 1, got 40"
    ):
        subspace_of(basis, 1, "pos", 40)
    with pytest.raises(GeometryError, match=r"subspace: expected one of 'pos', 'ctx', got 'cvec'"):
        subspace_of(basis, 1, "cvec")
    with pytest.raises(
        GeometryError,
        match=r"subspace='ctx': expected a basis with context vectors, got one without",
    ):
        subspace_of(dataclasses.replace(basis, context_means=None), 1, "ctx")


# ---- a model whose every cause is known


MODELS = ["bridge", *(["hooked", "attention-only"] if HAS_HOOKED else [])]


def hand_built(name: str) -> Any:
    return attention_only() if name == "attention-only" else induction_model(name)


@cache
def hand_built_basis(name: str) -> PositionContext:
    return decompose(hand_built(name), corpus(), progress=False)


@pytest.mark.parametrize("name", MODELS)
def test_the_hand_built_model_has_the_two_heads(name: str) -> None:
    model, ids = view(hand_built(name)), prompts(6)
    found: dict[int, Tensor] = {}
    model.run(
        ids,
        {f"blocks.{i}.attn.hook_pattern": lambda p, i=i: found.update({i: p}) for i in range(2)},
    )
    previous, copying = (head_type_scores(found[i], ids).scores for i in range(2))
    assert previous["previous"][0].item() == pytest.approx(1, abs=1e-3)
    assert copying["induction"][0].item() == pytest.approx(1, abs=1e-3)
    assert copying["previous"][0].item() < 0.2
    table = sweep_heads(model, corpus(16, seed=5), hand_built_basis(name), progress=False)
    assert table.dominant == ("pos-pos", *["uniform"] * 3, "cvec-cvec", *["uniform"] * 3)
    assert table.group_cs[0, 0].item() == pytest.approx(1, abs=1e-6), "only the position is read"
    assert table.cs[0, 4].item() > 0.99
    assert table.cs[4, 8].item() > 0.9


@pytest.mark.parametrize("name", MODELS)
def test_necessity_and_sufficiency_are_as_they_must_be(name: str) -> None:
    model, basis, ids = hand_built(name), hand_built_basis(name), prompts(12, seed=3)
    options: dict[str, Any] = {"draws": 2, "progress": False}
    copying = necessity_sufficiency(model, ids, basis, "L1H0", "cvec-cvec", **options)
    assert copying.necessity["induction_loss"] > 3
    assert copying.sufficiency["induction_loss"] > 0.9
    assert copying.removal_p("clean", "induction_loss") < 0.01
    assert copying.change("remove", "induction_loss").low > 3
    assert copying.change("swap", "induction_loss").low > 1, "matches of another prompt mislead"
    assert copying.swap_cosine < NEARLY
    assert copying.shrunk == pytest.approx(1, abs=0.1)
    for other in ("remove pos-pos", "remove bias-cvec"):
        assert copying.change(other, "induction_loss").value.abs() < 0.1
        assert copying.removal_p(other, "induction_loss") < 0.01
    previous = necessity_sufficiency(model, ids, basis, "L0H0", "position", **options)
    assert previous.necessity["induction_loss"] > 3
    assert previous.sufficiency["induction_loss"] == pytest.approx(1, abs=1e-3)
    assert previous.swap_cosine > 0.99
    assert previous.change("swap", "induction_loss").value.abs() < 1e-3
    assert any("its swap is no control" in flag for flag in previous.provenance.flags)
    assert not any("its swap is no control" in flag for flag in copying.provenance.flags)
    # swapped with the same position nothing changes: against that swap, as against clean, removal
    # costs; against itself there is nothing to test
    assert previous.removal_p("swap", "induction_loss") < 0.01
    assert math.isnan(previous.removal_p("remove", "induction_loss"))  # nothing differs
    nothing = necessity_sufficiency(model, ids, basis, "L0H0", "content", **options)
    assert nothing.necessity["loss"] == pytest.approx(0, abs=1e-4)
    assert nothing.sufficiency["loss"] == pytest.approx(0, abs=1e-4)
    shown = [row[0] for row in copying.rows()]
    assert shown[:6] == ["clean", "bias terms only", "keep", "remove", "swap", "shrink"]
    assert shown[6:] == [f"remove {t}" for t in NINE if t != "cvec-cvec"]
    assert copying.of("clean")["kl"] == 0
    assert copying.of("remove")["kl"] > 1


def test_a_bias_term_has_no_sufficiency_and_the_table_says_so() -> None:
    """It is kept with the bias terms anyway: the placebo of before gave NaN without a word."""
    model = rotary_previous_token()
    basis = decompose(model, tokens(24, 24, seed=2), progress=False)
    found = necessity_sufficiency(
        model, tokens(9, 24, seed=3), basis, "L0H0", "bias-bias", draws=1, progress=False
    )
    assert all(math.isnan(v) for v in found.sufficiency.values())
    assert "no sufficiency: the term is one of the bias terms" in found.provenance.flags
    assert "fewer than 10 prompts: no intervals of the loss" in found.provenance.flags
    assert found.change("remove").low.isnan()
    assert found.change("remove", "induction_loss").low.isfinite(), "twelve repeated sequences"
    assert found.of("keep") == pytest.approx(found.of("bias terms only"))


def test_effects_are_those_of_each_prompt_run_alone() -> None:
    """Another route: each prompt through the edited model by itself, cross entropy by torch."""
    model, basis, ids = induction_model("bridge"), hand_built_basis("bridge"), prompts(11, seed=3)
    found = necessity_sufficiency(model, ids, basis, "L1H0", "cvec-cvec", draws=1, progress=False)

    def loss(x: Tensor, one: Tensor) -> float:
        return float(torch.nn.functional.cross_entropy(x[0, :-1].double(), one[0, 1:]))

    clean, removed, diverged = [], [], []
    for one in ids.split(1):
        own = logits(model, one)
        with remove_term(model, basis, "cvec-cvec", "L1H0"):
            cut = logits(model, one)
        clean.append(loss(own, one))
        removed.append(loss(cut, one))
        p, q = (x[0, :-1].double().log_softmax(-1) for x in (own, cut))
        diverged.append(float((p.exp() * (p - q)).sum(-1).mean()))
    at = found.conditions.index("remove")
    assert found.losses[0].tolist() == pytest.approx(clean, rel=1e-4)
    assert found.losses[at].tolist() == pytest.approx(removed, rel=1e-4)
    assert found.kls[at].tolist() == pytest.approx(diverged, rel=1e-3, abs=1e-6)
    difference = torch.tensor(removed) - torch.tensor(clean)
    low, high = stats.ttest_1samp(difference.numpy(), 0).confidence_interval(0.95)
    interval = found.change("remove")
    assert (float(interval.low), float(interval.high)) == pytest.approx((low, high), rel=1e-3)
    row = dict(zip(found.columns(), found.rows()[at], strict=True))
    assert row["loss_low"] == pytest.approx(float(interval.low))
    assert row["loss_change"] == pytest.approx(float(difference.mean()), rel=1e-3)
    assert math.isnan(float(str(row["loss_remove_p"]))), "the removal against itself"


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_controls_are_the_scores_that_they_say(architecture: str) -> None:
    model, basis, split = (
        tiny("bridge", architecture),
        basis_of("bridge", architecture),
        split_of(architecture),
    )
    seen: list[Tensor] = []

    def check(layer: Any) -> None:
        at = slice(4 * layer.layer, 4 * layer.layer + 4)
        whole = sum(split.terms.values(), torch.zeros(()))[:, at]
        term = sum((split.terms[t][:, at] for t in MIXED), torch.zeros(()))
        run = RunningScores(layer, (0, 1, 2, 3), whole, running_parts(layer, basis, range(4)))
        order = derangement(3, 7)
        swapped = swapping(MIXED, 7)(run)
        assert torch.allclose(swapped, whole - term + term[order], atol=1e-3)
        shrunk = shrinking(MIXED, 1, seen.append)(run)
        for c, h in ((0, 0), (2, 3)):
            S, X = (
                row_center(x[c, h, 1:, 1:].double(), layer.allowed[1:, 1:]) for x in (whole, term)
            )
            share = float((S * X).sum() / (S * S).sum())
            assert float(seen[-1][c, h]) == pytest.approx(share, rel=1e-3, abs=1e-5)
            assert torch.allclose(shrunk[c, h], (1 - share) * whole[c, h], atol=1e-3)

    view(model).run_layers(PROMPTS, (0, 1), check)


def test_the_clean_loss_is_the_models() -> None:
    model, ids = induction_model("bridge"), prompts(8, seed=3)
    effects = dominant_only(model, ids, hand_built_basis("bridge"), draws=2, progress=False)
    log_p = logits(model, ids).log_softmax(-1)[:, :-1]
    own = -log_p.gather(-1, ids[:, 1:, None]).mean()
    assert effects.of("clean")["loss"] == pytest.approx(float(own), rel=1e-5)


def test_dominant_terms_alone_carry_the_hand_built_model() -> None:
    effects = dominant_only(
        induction_model("bridge"),
        prompts(8, seed=3),
        hand_built_basis("bridge"),
        draws=3,
        progress=False,
    )
    assert effects.survival("dominant term", measure="induction_loss") > 0.95
    assert effects.survival("random term", measure="induction_loss") < 0.6
    assert effects.survival("clean") == pytest.approx(1)
    assert effects.survival("bias terms only") == pytest.approx(0)
    assert effects.conditions[-1] == "uniform attention"


def test_a_uniform_head_keeps_no_term_at_random_either() -> None:
    """Terms of a uniform head may cancel: one of them alone would not be uniform."""
    model, basis, ids = induction_model("bridge"), hand_built_basis("bridge"), prompts(4, seed=3)
    table = sweep_heads(model, ids, basis, progress=False)
    floor = torch.full_like(table.sums.floor, torch.inf)
    flat = dataclasses.replace(table, sums=dataclasses.replace(table.sums, floor=floor))
    assert flat.cs.isnan().all()
    effects = dominant_only(model, ids, basis, table=flat, draws=2, progress=False)
    dominant = effects.losses[effects.row("dominant term")]
    assert torch.equal(effects.losses[effects.row("random term")], dominant)


def test_dominant_only_refuses_the_table_of_another_model() -> None:
    model, basis, ids = induction_model("bridge"), hand_built_basis("bridge"), prompts(4, seed=3)
    table = sweep_heads(model, ids, basis, progress=False)
    foreign = dataclasses.replace(
        table, provenance=dataclasses.replace(table.provenance, model="other", fingerprint="0" * 16)
    )
    with pytest.raises(
        GeometryError,
        match=r"table: expected a sweep of .* \(\w{16}\), got a sweep of other \(0{16}\)",
    ):
        dominant_only(model, ids, basis, table=foreign, progress=False)


def test_a_rotary_previous_token_head_is_position() -> None:
    model = rotary_previous_token()
    basis = decompose(model, tokens(24, 24, seed=2), progress=False)
    table = sweep_heads(
        model, tokens(8, 24, seed=3), basis, detail=("toeplitz", "offsets"), progress=False
    )
    assert table.types["previous"][0].item() > 0.99
    assert table.by_group.labels[0] == "position"
    assert table.dominant[0] == "bias-bias"
    assert table.group_cs[0, 0].item() == pytest.approx(1, abs=1e-4)
    assert table.details["toeplitz_position"][0].item() == pytest.approx(1, abs=1e-6)
    offsets = table.details["offsets_position"][0]
    assert int(offsets.nan_to_num(-torch.inf).argmax()) - (len(offsets) // 2) == 1
    assert all(label != "position" for label in table.by_group.labels[1:4])


# ---- the embedded model


@pytest.mark.slow
def test_the_ten_most_extreme_predictions_hold_in_the_embedded_model() -> None:
    from tl_geometry import zoo

    try:
        model = zoo.embedded()
    except FileNotFoundError:
        pytest.skip("the embedded model is not built")
    rows = zoo.default_windows(model, 48, n=24).tokens
    basis, few, seen = decompose(model, rows, progress=False), rows[:3], view(model)
    table = sweep_heads(model, few, basis, detail="ablation", progress=False)
    effects = [
        (float(v), name.removeprefix("tv_"), h)
        for name, t in table.details.items()
        if name.startswith("tv_")
        for h, v in zip(table.heads, t)
    ]
    for predicted, term, head in sorted(effects, reverse=True)[:10]:
        split = split_scores(model, few, basis, heads=[head])
        changed = (
            split.total()
            - split.terms[terms_of(term)[0].partition("-")[0], terms_of(term)[0].partition("-")[2]]
        )
        pattern = changed.softmax(-1)
        found: dict[str, Tensor] = {}
        names = {name: f"blocks.{head[0]}.attn.hook_{name}" for name in "vz"}
        with remove_term(model, basis, term, head):
            seen.run(
                few,
                {
                    hook: lambda x, name=name, found=found: found.update({name: x})
                    for name, hook in names.items()
                },
            )
        mixed = torch.einsum("bij,bje->bie", pattern[:, 0], found["v"][:, :, head[1]])
        assert (found["z"][:, :, head[1]] - mixed).abs().max() < 1e-5 * max(
            1.0, float(found["v"].abs().max())
        ), (term, head)
        tv = (pattern - split.pattern()).abs().sum(-1)[..., 1:].mean() / 2
        assert predicted == pytest.approx(float(tv), abs=1e-5)


def test_public_names() -> None:
    assert all(hasattr(interventions, name) for name in interventions.__all__)


@pytest.mark.parametrize("architecture", ["bloom", "gpt-oss"])
def test_an_edit_of_one_head_takes_its_own_bias_and_sink(architecture: str) -> None:
    """ALiBi slopes and sinks differ between heads: those of head 2 are not those of the first
    head."""
    model, basis, split = (
        tiny("bridge", architecture),
        basis_of("bridge", architecture),
        split_of(architecture),
    )
    position = sum(
        (v for (a, b), v in split.terms.items() if "cvec" not in (a, b)), torch.zeros(())
    )
    choice = per_head({(1, 2): ("alibi-alibi", "cvec-cvec")})
    kept = sum(
        (
            v
            for (a, b), v in split.terms.items()
            if a == b == "cvec" or a == "alibi" or "bias" in (a, b)
        ),
        torch.zeros(()),
    )
    seen = view(model)
    edits = {
        "remove": (remove_term(model, basis, "position", [(1, 2)]), split.total() - position),
        "per head": (edited_scores(seen, edits_for(seen, basis, [(1, 2)], choice)), kept),
    }
    for name, (context, scores) in edits.items():
        z, v = changed_z(architecture, context)
        right = torch.einsum("bhij,bjhe->bihe", pattern_of(split, scores[:, 4:]), v)
        assert torch.allclose(z[:, :, 2], right[:, :, 2], atol=2e-4 * float(v.abs().max())), name
