"""Laws of effects (SPEC O.5, P.8): what edits do to a metric, prompt by prompt, with intervals and
p by hand; controls are what they are called; planted causes are found."""

from __future__ import annotations

import itertools
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import bridge_of, hf_model, tiny, tokens
from tl_geometry import interventions, zoo
from tl_geometry.corpus import repeated_random_tokens

QUIET: dict[str, Any] = {"progress": False}
CONTROLS = ("shrink", "terms", "heads")
IDS, OTHER = tokens(12, 9, seed=7), tokens(12, 9, seed=8)
ANSWERS = [(5 + i, 40 - i) for i in range(12)]
HEADS = [f"L{layer}H{head}" for layer in range(2) for head in range(4)]


@cache
def model() -> Any:
    return tiny("bridge", "llama", text=True)


@cache
def basis() -> Any:
    return tlg.decompose(model(), tokens(16, 12, seed=2), **QUIET)


RIGHT, WRONG = zip(*ANSWERS)
PAIRS: dict[str, Any] = {"counterfactual": OTHER}


def logits(edit: Any = None, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        if edit is None:
            return model()(ids, return_type="logits").double()
        with edit:
            return model()(ids, return_type="logits").double()


def losses(out: Tensor, ids: Tensor = IDS) -> Tensor:
    log_p = out[:, :-1].float().log_softmax(-1)
    return -log_p.gather(-1, ids[:, 1:, None])[..., 0].mean(1).double()


def differences(out: Tensor) -> Tensor:
    rows = torch.arange(len(out))
    right, wrong = torch.tensor(ANSWERS).unbind(1)
    return out[rows, -1, right[: len(out)]] - out[rows, -1, wrong[: len(out)]]


def some_edits() -> dict[str, Any]:
    return {
        "content": interventions.term(model(), basis(), "content", "L1H2"),
        "planes": interventions.planes(model(), [0], "L0H1"),
        "edge": interventions.edge(model(), IDS, "L0H3", "L1H0"),
        "patch": interventions.heads(
            model(), ["mlp0"], by="counterfactual", reference=IDS, counterfactual=OTHER
        ),
        "path": interventions.path(model(), "L0H1", ["mlp1"], by="prompt"),
        "surrogate": interventions.surrogate(model(), basis(), "L1H1", part="low_rank", rank=3),
        "two": interventions.heads(model(), "L0H0", by="zero")
        + interventions.term(model(), basis(), "position", "L1H3"),
    }


@pytest.mark.parametrize("metric", ["loss", "difference", "own"])
def test_a_metric_under_edits_is_that_of_passes_inside_them(metric: str) -> None:
    """Each edit alone, all together in shared passes, and a few prompts at a time."""

    def norms(out: Tensor) -> Tensor:
        return out.norm(dim=(1, 2))

    by_hand = {"loss": losses, "difference": differences, "own": norms}[metric]
    asked: Any = {"own": norms}.get(metric, metric)
    edits = some_edits()
    more: dict[str, Any] = {"answer": RIGHT, "other": WRONG} if metric == "difference" else {}
    more |= PAIRS
    together = tlg.interventions.effects(model(), IDS, edits, metric=asked, **more)
    assert together.edits == tuple(edits)
    assert torch.allclose(together.clean, by_hand(logits()).double(), atol=1e-5)
    for row, (name, edit) in enumerate(edits.items()):
        wanted = by_hand(logits(edit)).double()
        assert torch.allclose(together.edited[row], wanted, atol=2e-5), name
        assert float((wanted - together.clean).abs().max()) > 1e-4, name
        alone = interventions.effects(model(), IDS, {name: edit}, metric=asked, **more)
        assert torch.allclose(alone.edited[0], together.edited[row], atol=1e-5)
    few = {name: edits[name] for name in ("content", "edge", "patch")}
    small = interventions.effects(model(), IDS, few, metric=asked, batch_size=5, **more)
    whole = torch.stack([together.edited[list(edits).index(name)] for name in few])
    assert torch.allclose(small.edited, whole, atol=1e-5)


def test_prompts_of_two_lengths_are_measured_as_each_alone(tmp_path: Any) -> None:
    """With their counterfactuals and answers, each at its own position of a name."""
    ids, others = ([of[0, :7], of[1], of[2, :7]] for of in (IDS, OTHER))
    at = {"end": [3, 8, 6]}
    asked = tlg.corpus.prompts(
        model(), ids, counterfactuals=others, answers=ANSWERS[:3], positions=at
    )
    options: dict[str, Any] = {"metric": "difference", "control": "heads", "draws": 2}

    def edits(place: Any) -> Any:
        """One at all positions, and two at ``place``."""
        each = interventions.each(model(), (0, 0), by="counterfactual")
        patch = interventions.heads(model(), "resid1", by="counterfactual", positions=place)
        to = ["L1H0<k>", "output"]
        path = interventions.path(model(), "L0H1", to, by="zero", positions=place)
        return {**each, "patch": patch, "path": path}

    found = interventions.effects(model(), asked, edits("end"), position="end", **options)
    assert float(found.changes.abs().amin()) > 1e-5
    assert (found.provenance.corpus, found.provenance.contexts) == ("pairs of prompts", 3)
    assert tlg.load(found.save(tmp_path / "found")).controls.keys() == found.controls.keys() != {}
    for i, (row, other) in enumerate(zip(ids, others, strict=True)):
        options |= {"counterfactual": other, "answer": ANSWERS[i], "position": at["end"][i]}
        alone = interventions.effects(model(), iter([row]), edits(at["end"][i]), **options)
        assert torch.allclose(found.edited[:, i], alone.edited[:, 0], atol=1e-5)
        draws = (of.controls["L0H0", "random heads"] for of in (found, alone))
        assert torch.allclose(next(draws)[:, i], next(draws)[:, 0], atol=1e-5)
    # copies are told apart by no state: with one counterfactual alone
    interventions.effects(model(), IDS[[0, 0]], edits(0), counterfactual=OTHER[[1, 1]])
    with pytest.raises(tlg.GeometryError, match="counterfactuals"):
        interventions.effects(model(), IDS[[0, 0]], edits(0), counterfactual=OTHER[:2])


def test_intervals_and_p_by_hand() -> None:
    edits = interventions.each(model(), ["L0H1", "L1H2"], by="zero")
    found = interventions.effects(model(), IDS[:10], edits)
    for row, name in enumerate(edits):
        d = (found.edited[row] - found.clean).numpy()
        low, high = stats.t.interval(0.95, 9, d.mean(), stats.sem(d))
        assert np.allclose([float(x) for x in found.change(name)[:3]], [d.mean(), low, high])
        # all sign flips of ten prompts, of which the test draws some
        flips = np.array(list(itertools.product((-1, 1), repeat=10))) @ d
        exact = np.mean(np.abs(flips) >= abs(d.sum()) - 1e-12)
        assert abs(found.p(name) - exact) < 0.02
        shown = found.df.set_index("edit").loc[name]
        assert shown.change_low == pytest.approx(low)
        assert shown.p == found.p(name)
    table = found.df
    assert list(table) == ["edit", "change", "change_low", "change_high", "p"]
    assert table.change.abs().is_monotonic_decreasing


def test_the_excess_over_controls_by_hand() -> None:
    edits = {"none": interventions.heads(model(), "L1H2", by="zero")}
    found = interventions.effects(model(), IDS, edits, control="heads", draws=5, seed=3)
    draws = found.controls["none", "random heads"]
    assert draws.shape == (5, 12)
    gaps = (found.edited[0] - draws.mean(0)).numpy()
    prompts_half = stats.t.ppf(0.975, 11) * stats.sem(gaps)
    spread = draws.mean(1).numpy().std(ddof=1) * np.sqrt(1 + 1 / 5)
    half = np.hypot(prompts_half, stats.t.ppf(0.975, 4) * spread)
    value, low, high, _ = map(float, found.excess("none", "random heads"))
    assert np.allclose([value, low, high], [gaps.mean(), gaps.mean() - half, gaps.mean() + half])
    row = found.df.iloc[0]
    assert row.control_change == pytest.approx(float((draws - found.clean).mean()))
    assert row.change - row.control_change == pytest.approx(row.excess)
    assert (row.excess_low, row.excess_high) == pytest.approx((low, high))
    assert row.p == found.p("none", "random heads") != found.p("none")


def test_controls_are_what_they_are_called() -> None:
    edits = {"content": interventions.term(model(), basis(), "content", "L1H2")}
    found = interventions.effects(model(), IDS, edits, control=["shrink", "terms"])
    shrink = interventions.term(model(), basis(), "content", "L1H2", how="shrink")
    names = ["bias-bias", "bias-pos", "bias-cvec", "pos-bias", "pos-pos", "pos-cvec"]
    names += ["cvec-bias", "cvec-pos"]
    assert found.controls_of("content") == ["shrink", *(f"remove {name}" for name in names)]
    others = {name: interventions.term(model(), basis(), name, "L1H2") for name in names}
    by_hand = interventions.effects(model(), IDS, {"shrink": shrink, **others})
    wanted = torch.stack([found.controls["content", c][0] for c in found.controls_of("content")])
    assert torch.allclose(by_hand.edited, wanted, atol=1e-6)
    kept = {"kept": interventions.term(model(), basis(), "content", "L1H2", how="keep")}
    beside = interventions.effects(model(), IDS, kept, control="terms").controls_of("kept")
    assert beside == ["keep pos-pos", "keep pos-cvec", "keep cvec-pos"]


def test_random_controls_are_drawn_by_seed_and_shared() -> None:
    edits = interventions.each(model(), ["L0H1", "L1H2"], by="zero")
    run = partial(interventions.effects, model(), IDS, edits, control="heads", draws=4)
    a, b, c = run(seed=0), run(seed=0), run(seed=1)
    key = ("L0H1", "random heads")
    assert torch.equal(a.controls[key], b.controls[key])
    assert not torch.equal(a.controls[key], c.controls[key])
    assert torch.equal(a.controls[key], a.controls["L1H2", "random heads"])
    each = interventions.each(model(), [h for h in HEADS if h not in edits], by="zero")
    others = interventions.effects(model(), IDS, each).edited
    for draw in a.controls[key]:  # one of the heads that no row has
        assert float((others - draw).abs().amax(1).min()) < 1e-6
    every = interventions.each(model(), by="zero")
    with pytest.raises(tlg.GeometryError, match="control"):
        interventions.effects(model(), IDS, every, control="heads")
    planes = {"plane": interventions.planes(model(), [1], "L0H1")}
    drawn = interventions.effects(model(), IDS, planes, control="planes", draws=3, seed=5)
    same = {str(s): interventions.planes(model(), [1], "L0H1", draw=s) for s in (5, 6, 7)}
    wanted = interventions.effects(model(), IDS, same).edited
    assert torch.allclose(drawn.controls["plane", "random planes"], wanted, atol=1e-6)
    pairs = tlg.corpus.prompts(model(), IDS, counterfactuals=OTHER)  # which no removal reads
    edge = lambda writer: interventions.edge(model(), pairs, writer, "L1H0")
    found = interventions.effects(model(), IDS, {"": edge("L0H1")}, control="writers", draws=3)
    rest = ("embed", "L0H0", "L0H2", "L0H3", "mlp0")
    others = interventions.effects(model(), IDS, {name: edge(name) for name in rest}).edited
    for draw in found.controls["", "random writers"]:  # one that comes before, and is no part
        assert float((others - draw).abs().amax(1).min()) < 1e-6


def test_a_planted_head_is_found_and_its_path() -> None:
    """One head alone writes, nearly the same everywhere; it reaches the output through the last MLP
    and by itself, since the heads of the last block write nothing."""
    hf = hf_model("gpt2")
    with torch.no_grad():
        hf.transformer.h[0].attn.c_attn.bias[64 + 8 : 64 + 16] += 6.0  # the values of head 1
        for layer, block in enumerate(hf.transformer.h):
            mute = torch.ones(32, dtype=torch.bool)
            mute[8 : 16 if layer == 0 else 8] = False
            block.attn.c_proj.weight[mute] = 0
        hf.transformer.h[0].mlp.c_proj.weight.zero_()
    planted = bridge_of(hf)
    options: dict[str, Any] = {"metric": "difference", "answer": 7, "other": 33}
    run = partial(interventions.effects, planted, IDS, **options)
    found = run(interventions.each(planted, by="zero"))
    assert found.df.edit[0] == "L0H1"
    assert found.p("L0H1") < 0.01
    rest = [row for row, name in enumerate(found.edits) if name != "L0H1"]
    assert float(found.changes[rest].abs().max()) < 1e-5
    names = ("mlp0", "L1H2<v>", "mlp1", "output")
    through = run({to: interventions.path(planted, "L0H1", to, by="zero") for to in names})
    moved = dict(zip(names, through.changes.abs().amax(1).tolist()))
    assert max(moved["mlp0"], moved["L1H2<v>"]) < 1e-5
    assert min(moved["mlp1"], moved["output"]) > 1e-2
    one = {"L0H1": interventions.heads(planted, "L0H1", by="zero")}
    beside = run(one, control="heads", draws=6)
    assert beside.beyond("L0H1") is True
    assert "more than its controls" in beside.sentence("L0H1")
    other = {"L1H1": interventions.heads(planted, "L1H1", by="zero")}
    assert run(other, control="heads", draws=6).beyond("L1H1") is False


@pytest.mark.slow
@pytest.mark.parametrize("which", ["embedded", pytest.param("smollm2", marks=pytest.mark.smollm2)])
def test_the_strongest_induction_head_needs_content(which: str) -> None:
    """The rule of :func:`tl_geometry.effects`. The twin: a head of position does not need it."""
    model = getattr(zoo, which)()
    basis = tlg.decompose(model, zoo.default_windows(model, 66, n=64), **QUIET)
    bos_id = model.tokenizer.bos_token_id
    random = repeated_random_tokens(16, 4, 12, low=100, high=1900, bos_id=bos_id)
    table = tlg.sweep_heads(model, random, basis, **QUIET)
    for kind, needed in (("induction", True), ("previous", False)):
        (head,) = table.top(kind, 1).heads
        edit = {"removing content": interventions.term(model, basis, "content", head)}
        found = tlg.effects(model, random, edit, control=CONTROLS, draws=4, **QUIET)
        assert found.beyond("removing content") is needed, found
        assert ("more than its controls" in found.sentence("removing content")) == needed
