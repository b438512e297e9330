"""How much the sections compute: the least sizes that are enough, what a budget makes smaller, and
what the page says of it. The functions of the library are stand-ins that note their arguments."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.modules import copy_of
from tests.report.test_by_hand import effects
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.interventions import causal, surrogates
from tl_geometry.report import basis as basis_section
from tl_geometry.report import flow as flow_section
from tl_geometry.report import heads as heads_section
from tl_geometry.report import measures as measures_section
from tl_geometry.report import weights as weights_section
from tl_geometry.report.analysis import at_even_distances
from tl_geometry.report.budget import Budget
from tl_geometry.report.section import Draft


class Noted(Draft):
    """A section whose figures and tables are stand-ins."""

    def __init__(self) -> None:
        super().__init__("title")
        self.drawn: list[str] = []
        self.tabled: list[str] = []

    def draw(self, figure: Any, key: str = "", **said: str) -> None:
        self.drawn.append(key)

    def table(self, name: str, table: Any, about: str = "", columns: Any = None) -> None:
        self.tabled.append(name)

    def find(self, finding: Any) -> None:
        self.findings.append(finding)

    def lines(self) -> list[str]:
        """The paragraphs and cards."""
        return [b if isinstance(b, str) else b.line() for b in self.blocks]


class Allows(Budget):
    """A budget that allows ``count`` windows, of at most ``longest`` tokens."""

    def __init__(self, count: int = 10**6, longest: int = 10**6) -> None:
        super().__init__("quick")
        self.count, self.longest = count, longest
        self.asked: list[str] = []

    def windows(self, part: str, length: int, most: int, least: int = 1) -> int:
        assert len(self.asked) < 50, "asks without end"
        self.asked.append(part)
        count = min(most, self.count) if length <= self.longest else 0
        return count if count >= least else 0


def stub(
    *, count: int = 40, length: int = 16, budget: Allows | None = None, **view: Any
) -> SimpleNamespace:
    """An analysis of windows whose tokens are their numbers."""
    ids = torch.arange(count)[:, None].expand(-1, length).clone()
    windows = TokenWindows(tokens=ids, has_bos=False)
    shape: dict[str, Any] = {"position": "standard", "causal": True, "head_trained": True}
    return SimpleNamespace(
        model="model",
        view=SimpleNamespace(**(shape | {"n_layers": 2, "n_heads": 4, "d_model": 8} | view)),
        windows=windows,
        basis=SimpleNamespace(contexts=count, window=(1, length), states=(0, 1, 2)),
        budget=budget or Allows(),
        embedded=False,
        seed=5,
        pick=lambda n: at_even_distances(windows, n),
    )


def test_eight_positions_are_enough_for_measures_and_weights() -> None:
    measures, weights = copy_of(measures_section), copy_of(weights_section)
    measures._position = measures._context = lambda draft, analysis: draft.say("measured")
    for name in ("token_readout", "token_paths", "views", "_surrogates"):
        setattr(weights, name, Mock())
    weights.token_paths.return_value.tokens = torch.zeros(1, 7)
    weights._geometry = lambda draft, analysis: draft.say("measured")
    what = "weights in the geometry of the basis: left out, because"
    for width, states, measured, weighed in (
        (8, (0, 1, 2), ["measured", "measured"], "measured"),
        (
            7,
            (0, 1, 2),
            ["measures: left out, because 7 positions are fewer than 8."],
            f"{what} 7 positions are fewer than 8.",
        ),
        (8, (0, 2), ["measured", "measured"], f"{what} the basis does not hold every state."),
    ):
        of = stub(states=[0, 1, 2])
        of.basis = SimpleNamespace(window=(1, 1 + width), states=states)
        draft = Noted()
        measures.section(draft, of)
        assert draft.lines() == measured
        draft = Noted()
        weights.section(draft, of)
        assert draft.lines()[0] == weighed
        assert draft.drawn == ["coverage", "sphere"]
        assert draft.tabled == ["readout_ov", "paths"]


def test_deep_models_have_every_third_path() -> None:
    weights = copy_of(weights_section)
    for name in ("token_readout", "token_paths", "views", "_surrogates", "_geometry"):
        setattr(weights, name, Mock())
    weights.token_paths.return_value.tokens = torch.zeros(1, 7)
    for n_layers, positions in ((12, None), (13, [0, 3, 6])):
        weights.section(Noted(), stub(n_layers=n_layers, states=[0, 1, 2]))
        shown = weights.views.sphere_paths.call_args.kwargs["positions"]
        assert (shown if shown is None else list(shown)) == positions
    assert weights.token_paths.call_args.args[1].shape == (1, 16)


WHAT = "surrogates of W_QK in the live model"
OFFSETS = "surrogates of W_QK at every offset"


@pytest.mark.parametrize(
    ("position", "windows", "length", "budget", "wanted"),
    [
        ("standard", 40, 64, Allows(), (16, 64)),
        ("standard", 4, 64, Allows(), (4, 64)),
        ("standard", 40, 64, Allows(10), (10, 64)),
        ("standard", 40, 64, Allows(9), WHAT),
        ("standard", 40, 64, Allows(longest=32), WHAT),
        ("rotary", 40, 64, Allows(), (16, 64)),
        ("rotary", 40, 64, Allows(longest=32), (16, 32)),
        ("rotary", 40, 64, Allows(10, longest=16), (10, 16)),
        ("rotary", 40, 40, Allows(longest=16), (16, 16)),
        ("rotary", 40, 40, Allows(longest=15), OFFSETS),
        ("rotary", 40, 12, Allows(), (16, 12)),
    ],
)
def test_windows_for_surrogates_are_halved_only_where_each_offset_has_a_product(
    position: str,
    windows: int,
    length: int,
    budget: Allows,
    wanted: tuple[int, int] | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, effect = copy_of(weights_section), Mock()
    monkeypatch.setattr(surrogates, "surrogate_effect", effect)
    effect.return_value.heads = ["a", "b", "c"]
    module.views = Mock()
    module.Cells = lambda name, table: lambda row, column: f"{name}:{row}:{column}"
    draft, of = Noted(), stub(count=windows, length=length, budget=budget, position=position)
    module._surrogates(draft, of)
    if isinstance(wanted, str):
        assert draft.lines() == [
            f"{wanted}: left out, because even 10 windows are more than --budget quick allows."
        ]
        return
    count, shorter = wanted
    assert effect.call_args.args[1].equal(of.pick(count).tokens[:, :shorter])
    reduced = wanted != (min(16, windows), length)
    smaller = ", to keep the budget" if reduced else ""
    assert (
        f"those of {count} windows of {shorter} tokens of this corpus{smaller}." in draft.blocks[0]
    )
    assert (draft.drawn, draft.tabled) == (["surrogates"], ["surrogates"])
    assert set(budget.asked) == {OFFSETS if position == "rotary" else WHAT}


def test_edits_take_a_decoder_with_a_trained_head() -> None:
    heads, weights = copy_of(heads_section), copy_of(weights_section)
    why = "left out, because it takes a decoder with a trained output head."
    for is_causal, trained in ((True, False), (False, True)):
        of, draft = stub(causal=is_causal, head_trained=trained), Noted()
        weights._surrogates(draft, of)
        heads._dominant(draft, of, "table")
        assert draft.lines() == [f"{WHAT}: {why}", f"the model with dominant terms only: {why}"]


@pytest.mark.parametrize(
    ("windows", "allowed", "count"), [(40, 10**6, 40), (40, 36, 36), (40, 0, 32), (32, 0, 32)]
)
def test_a_sweep_has_the_windows_that_its_labels_need(
    windows: int, allowed: int, count: int
) -> None:
    module = copy_of(heads_section)
    for position, detail in (
        ("standard", ("intervals", "nulls")),
        ("rotary", ("intervals", "nulls", "planes")),
        ("shortformer", ("intervals",)),
    ):
        module.sweep_heads = Mock()
        budget = Mock()
        budget.windows.side_effect = lambda part, length, most: min(most, allowed)
        of, draft = stub(count=windows, budget=budget, position=position), Noted()
        assert module._sweep(draft, of) is module.sweep_heads.return_value
        _, chosen, _ = module.sweep_heads.call_args.args
        assert chosen.tokens.equal(of.pick(count).tokens)
        options = {"detail": detail, "progress": False, "seed": 5}
        assert module.sweep_heads.call_args.kwargs == options
        said = [f"{count} windows in place of {windows}, to keep the budget."]
        assert draft.lines() == (said if count < windows else [])
        assert budget.windows.call_args.args[:2] == ("the sweep over all heads", 16)


def test_a_sweep_of_fewer_windows_is_a_card() -> None:
    module, draft = copy_of(heads_section), Noted()
    module.sweep_heads = Mock()
    assert module._sweep(draft, stub(count=31)) is None
    assert draft.lines() == [
        "the sweep over all heads: left out, because a label needs an interval, and 31 windows are "
        "fewer than the 32 of one."
    ]
    module.sweep_heads.assert_not_called()


@pytest.mark.parametrize(
    ("windows", "allowed", "count", "draws", "smaller"),
    [
        (40, 99, 16, 9, ""),
        (12, 99, 12, 9, ""),
        (40, 12, 12, 3, " (12 windows and 3 draws, to keep the budget)"),
        (40, 0, 10, 3, " (10 windows and 3 draws, to keep the budget)"),
    ],
)
def test_a_model_with_dominant_terms_only(
    windows: int,
    allowed: int,
    count: int,
    draws: int,
    smaller: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four losses, on how many windows, and a remark where dominance is not shown."""
    module, edit = copy_of(heads_section), Mock()
    monkeypatch.setattr(causal, "dominant_only", edit)
    module.effect_bars = Mock()
    names = ("clean", "dominant term", "dominant group", "random term", "bias", "uniform attention")
    budget = Mock()
    budget.windows.side_effect = lambda part, length, most: min(most, allowed)
    for better in (0.4, 0.0):
        effect = effects(better=better)
        edit.return_value = effect.__class__(**{**vars(effect), "conditions": names})
        of, draft = stub(count=windows, budget=budget), Noted()
        module._dominant(draft, of, "table")
        assert edit.call_args.args[1].tokens.equal(of.pick(count).tokens)
        options = {"table": "table", "draws": draws, "progress": False, "seed": 5}
        assert edit.call_args.kwargs == options
        assert (draft.drawn, draft.tabled) == (["dominance"], ["dominant_only"])
        asked = ("the model with dominant terms only", 16, min(16, windows))
        assert budget.windows.call_args.args == asked
        said, *remark = draft.section().text
        assert f"On {count} windows of this corpus its loss goes from" in said
        assert said.endswith(f"{smaller}. Edits act in the live model.")
        assert bool(remark) == (better == 0.0)
        assert [found.clear for found in draft.findings] == [better == 0.4]
        losses = effect.losses.mean(1).tolist()
        shown = [float(x) for x in re.findall(r"\d\.\d+", said)]
        assert shown == pytest.approx([losses[i] for i in (0, 1, 3, 5)], abs=0.01)


def test_trajectories_take_two_blocks_and_32_chunks_of_at_most_50_tokens() -> None:
    module = copy_of(flow_section)
    what = "trajectories: left out, because"
    for n_layers, count, length, d_model, budget, wanted in (
        (1, 40, 16, 8, Allows(), [f"{what} a model of 1 block has no path to follow."]),
        (2, 31, 16, 8, Allows(), [f"{what} 31 windows are fewer than 32."]),
        (
            2,
            40,
            16,
            8,
            Allows(31),
            [f"{what} even 32 windows are more than --budget quick allows."],
        ),
        (2, 32, 16, 16, Allows(), []),
        (2, 32, 64, 17, Allows(), ["Half of 32 chunks are fewer than the 17 dimensions of a"]),
        (2, 40, 64, 16, Allows(33), ["33 chunks in place of 40, to keep the budget."]),
    ):
        draft, seen = Noted(), []
        module._followed = lambda draft, analysis, chunks, seen=seen: seen.append(chunks)
        of = stub(count=count, length=length, n_layers=n_layers, d_model=d_model, budget=budget)
        of.windows = dataclasses.replace(of.windows, str_tokens=("a",) * length)
        of.pick = lambda n, of=of: at_even_distances(of.windows, n)
        module.section(draft, of)
        lines = draft.lines()
        assert len(lines) == len(wanted)
        assert all(line.startswith(start) for line, start in zip(lines, wanted, strict=True))
        if what in " ".join(wanted):
            assert not seen
            continue
        chosen = of.pick(min(count, budget.count)).tokens
        assert seen[0].tokens.equal(chosen[:, :50])
        assert seen[0].str_tokens == ()


def test_the_followed_token_is_named() -> None:
    module = copy_of(flow_section)
    module.views = Mock()
    for position, causal_, words in ((-1, True, "the last"), (0, False, "the first")):
        module.trajectories = Mock(return_value=SimpleNamespace(position=position))
        of, draft = stub(causal=causal_), Noted()
        ensemble = module._followed(draft, of, of.windows)
        assert ensemble is module.trajectories.return_value
        assert module.trajectories.call_args.kwargs == {"progress": False, "post_norm": causal_}
        start = (
            f"One token of each of 40 chunks of 16 tokens is followed through the blocks ({words})"
        )
        assert draft.lines()[0].startswith(start)
        assert draft.drawn == ["bundle"]


@pytest.mark.parametrize(
    ("chunks", "allowed", "fitted", "tested"),
    [(96, 99, 48, 48), (41, 99, 20, 21), (41, 12, 20, 12), (41, 8, 20, 8), (41, 7, 20, 0)],
)
def test_states_are_truncated_on_chunks_of_their_own(
    chunks: int, allowed: int, fitted: int, tested: int
) -> None:
    module, draft = copy_of(flow_section), Noted()
    module.trajectories, module.truncation_kl = Mock(), Mock()
    module.views = module.findings = Mock()
    of = stub(count=chunks, budget=Allows(allowed))
    module._truncated(draft, of, of.windows)
    if not tested:
        why = "even 8 windows are more than --budget quick allows"
        assert draft.lines() == [f"truncated states: left out, because {why}."]
        return
    given, (model, held_out, ensemble) = (
        f.call_args.args for f in (module.trajectories, module.truncation_kl)
    )
    assert given[1].tokens[:, 0].tolist() == list(range(fitted))
    assert held_out.tokens[:, 0].tolist() == list(range(fitted, fitted + tested))
    assert (model, ensemble) == ("model", module.trajectories.return_value)
    assert (draft.drawn, draft.tabled) == (["truncation"], ["truncation"])
    assert draft.findings == [module.findings.truncated.return_value]
    for function in (module.trajectories, module.truncation_kl):
        assert function.call_args.kwargs == {"progress": False}


@pytest.mark.parametrize(
    ("n_layers", "chunks", "allowed", "count", "pairs", "shown"),
    [
        (12, 96, 99, 96, "all", "(all pairs of states)"),
        (13, 96, 50, 50, None, "(skips of 1, 4 of 13 blocks)"),
        (12, 40, 32, 32, "all", "(all pairs of states)"),
        (12, 40, 31, 0, None, ""),
        (12, 20, 20, 20, "all", "(all pairs of states)"),
    ],
)
def test_blocks_are_skipped_in_every_pair_of_states_of_a_shallow_model(
    n_layers: int, chunks: int, allowed: int, count: int, pairs: str | None, shown: str
) -> None:
    module, draft = copy_of(flow_section), Noted()
    module.skip_map = Mock()
    module.skip_map.return_value.pairs.return_value = [(3, 7), (3, 4), (5, 6)]
    module.Cells = lambda name, table: lambda row, column: f"{name}:{row}:{column}"
    module.views = module.findings = Mock()
    of = stub(count=chunks, n_layers=n_layers, budget=Allows(allowed))
    module._skips(draft, of, of.windows)
    if not count:
        why = "even 32 windows are more than --budget quick allows"
        assert draft.lines() == [f"skipped layers: left out, because {why}."]
        return
    call = module.skip_map.call_args
    assert call.args[1].tokens.equal(of.pick(count).tokens)
    maps = ("flow", "ridge", "identity", "mean")
    options = {"pairs": pairs, "map_types": maps, "progress": False, "seed": 5}
    assert call.kwargs == options
    assert (draft.drawn, draft.tabled) == (["skips"], ["skipped_layers"])
    assert draft.findings == [module.findings.skipped.return_value]
    assert shown in draft.lines()[0]
    assert "skipped_layers:0:own_loss" in draft.lines()[0]


@pytest.mark.parametrize(
    ("windows", "allowed", "count", "embedded", "of_control"),
    [
        (40, 99, 40, False, 0),
        (40, 16, 16, True, 16),
        (40, 30, 30, True, 30),
        (40, 15, 0, True, 16),
        (12, 12, 12, False, 0),
    ],
)
def test_the_null_and_the_control_beside_the_basis(
    windows: int, allowed: int, count: int, embedded: bool, of_control: int
) -> None:
    module, draft = copy_of(basis_section), Noted()
    module.spliced = lambda analysis, n: f"null of {n}"
    module.untrained = lambda analysis, n: f"control of {n}"
    of = stub(count=windows, budget=Allows(allowed))
    of.embedded = embedded
    null, control = module._beside(draft, of)
    assert null == (f"null of {count}" if count else None)
    assert control == (f"control of {of_control}" if embedded else None)
    what = "the null of spliced windows"
    left_out = f"{what}: left out, because even 16 windows are more than --budget quick allows."
    fewer = f"The null has {count} windows in place of {windows}, to keep the budget."
    assert draft.lines() == ([left_out] if not count else [fewer] if count < windows else [])


def test_the_untrained_control_is_loaded_as_the_model_was() -> None:
    module = copy_of(basis_section)
    for class_name, loaded in (("HookedTransformer", "hooked"), ("TransformerBridge", "bridge")):
        module.Inputs, module.decompose = Mock(), Mock()
        of = stub(class_name=class_name, processed=True, dtype=torch.float64, device="cpu")
        module.untrained(of, 7)
        options = {"model_class": loaded, "processed": True, "dtype": "float64"}
        module.Inputs.assert_called_once_with(**options)
        load = module.Inputs.return_value.load
        load.assert_called_once_with(device="cpu", trained=False)
        model, chosen = module.decompose.call_args.args
        assert model is load.return_value
        assert chosen.tokens.equal(of.pick(7).tokens)
        assert module.decompose.call_args.kwargs["seed"] == 5
        assert module.decompose.call_args.kwargs["progress"] is False
