"""Every number of a sentence of the report is that of its table, and the nulls are nulls, with
faults planted in the modules."""

from __future__ import annotations

import dataclasses
import re
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.modules import copy_of
from tests.tiny import tiny, tokens
from tl_geometry import decompose, decompose_activations, sweep_heads
from tl_geometry.base.results import Provenance, Result
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.interventions.causal import Dominance
from tl_geometry.render.figure import View, canvas
from tl_geometry.report import basis as basis_section
from tl_geometry.report import findings, massive
from tl_geometry.report import flow as flow_section
from tl_geometry.report import heads as heads_section
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.origin import Cells, plain
from tl_geometry.report.section import Draft, FigureBlock


def check_nulls(module: Any) -> None:
    """Gibberish is the null's tokens, untrained the null's model."""
    seen: list[Any] = []
    module.gibberish = lambda model, n, length, prepend_bos, seed: ("noise", n, length, prepend_bos)
    module.trajectories = lambda model, ids, progress: (model, ids)

    def compared(ensembles: Any) -> Result:
        seen.append(ensembles)
        return Result(provenance=Provenance())

    module.compare_ensembles = compared

    @contextmanager
    def untrained(model: Any, seed: int) -> Any:
        yield f"untrained {model}"

    module.reinitialized = untrained
    for bos_id, has_bos in ((None, False), (None, True), (7, False), (7, True)):
        analysis = SimpleNamespace(view=SimpleNamespace(bos_id=bos_id), model="model", seed=0)
        chunks = TokenWindows(tokens=torch.zeros(3, 5, dtype=torch.int64), has_bos=has_bos)
        module._nulls(Draft("flow"), analysis, chunks, "own")
        assert seen.pop() == {
            "text": "own",
            "gibberish": ("model", ("noise", 3, 5, bos_id == 7 and has_bos)),
            "untrained": ("untrained model", chunks),
        }


def check_maps(module: Any) -> None:
    """The maps are fitted with the seed of the report."""
    module.flow_report = module.views = Mock()
    module._maps(Mock(), SimpleNamespace(seed=5), "own")
    module.flow_report.assert_called_once_with("own", seed=5)


def check_outputs(module: Any) -> None:
    """Outputs are read where there are next tokens to predict, and are a card elsewhere."""
    module._truncated = lambda draft, *given: draft.say("truncated")
    module._skips = lambda draft, *given: draft.say("skipped")
    chunks = TokenWindows(tokens=torch.zeros(3, 5, dtype=torch.int64), has_bos=False)
    for causal, head_trained in ((True, True), (True, False), (False, True), (False, False)):
        draft = Draft("flow")
        view = SimpleNamespace(causal=causal, head_trained=head_trained)
        module._outputs(draft, SimpleNamespace(view=view), chunks)
        both = causal and head_trained
        assert draft.section().text == (["truncated", "skipped"] if both else [])
        left_out = [card.status for card in draft.section().cards]
        assert left_out == ([] if both else ["left out"])


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+\.\d+", text.replace("−", "-"))]


def check_anova(module: Any) -> None:
    """The sentence on the middle state, by the table and by the states themselves."""
    g = torch.Generator().manual_seed(3)
    h = torch.randn(3, 16, 6, 5, generator=g).double() + torch.randn(3, 1, 6, 5, generator=g)
    h = h + 0.7 * torch.randn(3, 16, 1, 5, generator=g)
    basis, null = decompose_activations(h), decompose_activations(h.flip(1).roll(1, 2) ** 3)
    module._beside = lambda draft, analysis: (null, None)
    module.massive = SimpleNamespace(add=lambda draft, analysis, anova: None)
    stand_in = View(canvas()[0], title="A stand-in")
    module.views = SimpleNamespace(
        variance_shares=lambda table, control: stand_in,
        spirals=lambda basis, control: stand_in,
        norms=lambda basis: stand_in,
        gram=lambda basis, state: stand_in,
    )
    draft = Draft("basis")
    module.section(draft, SimpleNamespace(basis=basis))
    section = draft.section()
    said = next(t for t in section.text if t.startswith("At state 1:"))
    table = basis.anova()
    x = h[1] - h[1].mean((0, 1))
    whole = float(x.square().sum())
    pos = 16 * float(x.mean(0).square().sum()) / whole
    ctx = 6 * float(x.mean(1).square().sum()) / whole
    debiased, reliability = float(table.intervals["pos"][1, 0]), float(table.pos_reliability[1])
    wanted = [100 * pos, 100 * debiased, reliability, 100 * ctx, 100 * (1 - pos - ctx)]
    assert numbers(said) == pytest.approx(wanted, abs=0.051)
    words = [said.index(w) for w in ("% position", "reliability", "% context", "% residual")]
    assert words == sorted(words)
    spliced = next(t for t in section.text if "spliced" in t)
    shares = [100 * float(null.anova().shares["ctx"][1]), float(table.ctx_agreement[1])]
    assert numbers(spliced) == pytest.approx(shares, abs=0.051)
    assert section.tables["anova"].rows()[1][:2] == table.rows()[1][:2]


def check_massive(module: Any) -> None:
    """The figure and the table of the state in which the largest tokens hold most."""
    h = torch.rand(3, 16, 6, 5, generator=torch.Generator().manual_seed(0)) + 1
    h[1, 4, 2] *= 1000
    draft = Draft("basis")
    module.add(draft, SimpleNamespace(basis=decompose_activations(h)), None)
    section = draft.section()
    (figure,) = (block for block in section.blocks if isinstance(block, FigureBlock))
    assert figure.key == "figure-massive"
    assert "of the sum of squares of state 1" in figure.text
    assert list(section.tables) == ["massive_tokens"]


def effects(*, better: float, apart: float = 0.01) -> Dominance:
    """Losses of twelve prompts; random terms cost ``better`` more than the dominant ones, their
    draws ``apart`` from each other."""
    g = torch.Generator().manual_seed(1)
    clean = 3 + torch.rand(12, generator=g).double()
    dominant = clean + 0.5 + 0.05 * torch.rand(12, generator=g).double()
    random = dominant + better + 0.02 * (torch.arange(12) % 2 - 0.5)
    rows = torch.stack([clean, dominant, dominant + 1, random, random + 2, random + 3])
    drawn = random.mean() + apart * torch.linspace(-1, 1, 5).double()
    return Dominance(
        conditions=("clean", "dominant term", "dominant group", "random term", "bias", "uniform"),
        drawn=drawn,
        losses=rows,
        induction_losses=rows,
        kls=rows - rows[0],
        provenance=Provenance(),
    )


def check_dominance(module: Any) -> None:
    """The finding on dominance."""

    def finding(effect: Dominance) -> Any:
        return module.dominance(effect)

    assert finding(effects(better=0.4)).clear
    assert "0.400 more" in plain(finding(effects(better=0.4)).beside)
    same = effects(better=0.01)
    gap = same.saved()
    bounds = [float(gap.value), float(gap.low), float(gap.high)]
    assert numbers(plain(finding(same).beside))[-3:] == pytest.approx(bounds, abs=0.006)
    assert not finding(same).clear
    assert not finding(effects(better=-0.3)).clear
    assert not finding(effects(better=0.4, apart=0.3)).clear, "one draw may be as good"


def check_heads(module: Any) -> None:
    """The sentences on labels."""
    model, ids = tiny("bridge", "gpt2"), tokens(batch=32, length=16, seed=2)
    basis, detail = decompose(model, ids, progress=False), ("intervals", "nulls")
    table = sweep_heads(model, ids, basis, detail=detail, progress=False)
    intervals = table.group_intervals
    assert intervals is not None
    for i, said in enumerate(module._named(table, table, "induction")):
        layer, head = table.heads[i]
        group = int(table.group_cs[i].argmax())
        mean = table.details["cs_position_null"] if group == 0 else None
        gain = table.group_gain_intervals
        assert gain is not None
        wanted = [
            float(table.types["induction"][i]),
            float(intervals.value[i, group]),
            float(intervals.low[i, group]),
            float(intervals.high[i, group]),
            *([] if mean is None else [float(mean[i])]),
            float(gain.value[i, group]),
        ]
        said = plain(said)
        assert said.startswith(f"L{layer}H{head} ")
        assert f"({table.by_group.labels[i]} on this corpus: {table.groups[group]} " in said
        shown = numbers(said.partition("% of its")[0].rpartition(",")[0])
        assert shown == pytest.approx(wanted, abs=0.0051)
        assert table.dropped_mass is not None
        mass = re.search(r"([\d.]+)% of its attention", said)
        assert mass is not None
        assert float(mass[1]) == pytest.approx(100 * float(table.dropped_mass[i]), rel=0.01)


def test_trajectories_and_massive_tokens_by_hand() -> None:
    for check in (check_nulls, check_maps, check_outputs):
        check(copy_of(flow_section))
    check_massive(copy_of(massive))


def test_sentences_by_hand() -> None:
    check_anova(copy_of(basis_section))
    check_dominance(copy_of(findings))
    check_heads(copy_of(heads_section))


def planted(*norms: tuple[int, int, float]) -> torch.Tensor:
    """States of three layers, 20 windows and 30 positions; in the second all tokens have norm two,
    save those given by window, position and norm over it."""
    h = torch.randn(3, 20, 30, 8, generator=torch.Generator().manual_seed(0)).double()
    h[1] *= 2 / torch.linalg.vector_norm(h[1], dim=-1, keepdim=True)
    for window, position, norm in norms:
        h[1, window, position] *= norm
    return h


def test_massive_tokens_are_those_above_three_medians_each_named_once() -> None:
    h = planted((4, 2, 100), (5, 2, 50), (6, 7, 3.5), (7, 8, 2.9))
    basis = decompose_activations(h)
    table = basis.largest_tokens()
    texts = ("a" * 16, "a" * 16, "b" * 17, "c", *["d"] * (len(table.token[1]) - 4))
    named = dataclasses.replace(table, str_tokens=(texts, texts, texts))
    assert massive.largest(named, 1)[2] == (7, pytest.approx(7.0), "b" * 17)
    coordinate = int(h[1, 4, 2].abs().argmax())
    places = f"'{'a' * 16}' at position 2, '{'b' * 15}…' at position 7"
    assert plain(massive.sentence(basis, named, 1, "98%")) == (
        f"1 of 600 tokens hold 98% of the sum of squares of state 1 ({places}; norm 200 where the "
        f"median token has 2, coordinate {coordinate}). Shares, spectra and measures of 1 of 3 "
        "states (1) describe these tokens more than the others; a normalised basis weighs all "
        "tokens alike."
    )


@pytest.mark.parametrize("norms", [[(4, 2, 100.0)], []])
def test_the_share_of_the_largest_tokens_is_that_of_their_table(norms: list[Any]) -> None:
    h = planted(*norms)
    basis = decompose_activations(h)
    squares = h.square().sum(-1).flatten(1)
    shares = squares.amax(1) / squares.sum(1)
    row = int(shares.argmax())
    few = "1 of 600 tokens" if norms else "No massive tokens: the largest 0.1% of 600 tokens"
    start = f"{few} hold {100 * float(shares[row]):.3g}% of the sum of squares of state {row}"
    for cells in (Cells("anova", basis.anova(), rounded=True), None):
        draft = Draft("basis")
        massive.add(draft, Mock(spec=Analysis, basis=basis), cells)
        (said,) = draft.section().text
        if cells is None:
            start = f"{few} hold {float(shares[row]):.1%} of the sum of squares of state {row}"
        assert said.startswith(start)
        assert said.endswith("all tokens alike." if norms else "more than of any other state.")
