"""Text that is partly random: streams, windows and halves, the runs of the two experiments on text,
and what their figures draw. Readouts of GPT-2 with the published settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex
from torch import Tensor

import tl_geometry as tlg
from tests.modules import copy_of
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.papers import characters, figures, random_tokens, traveling_words
from tl_geometry.papers.formats import FORMATS, randomise
from tl_geometry.papers.setup import Training


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """No figure stays open."""
    yield
    plt.close("all")


SETUP: Any = random_tokens.SETUPS["smoke"].changed({"context": "8", "characters": "7"})


# --- text


def stream_module(asked: list[Any]) -> Any:
    """The module with a tokenizer of one id per character, and short texts of the library."""
    module: Any = copy_of(random_tokens)

    class Tokenizer:
        def __call__(self, text: str, **options: Any) -> Any:
            asked.append(options)
            return {"input_ids": [ord(c) for c in text]}

        def __len__(self) -> int:
            return 200

    module._tokenizer = lambda name: asked.append(name) or Tokenizer()
    documents = SimpleNamespace(texts=("xy", "z"))
    module.corpus = SimpleNamespace(
        training_texts=lambda: ["abc", "defgh", "i"], held_out_documents=lambda: documents
    )
    return module


def text(ids: Tensor) -> str:
    """The text of ids."""
    return "".join(map(chr, ids.tolist()))


def test_the_last_tenth_of_a_text_is_held_out() -> None:
    """Only the first characters are read; without a text, the library has held-out modules."""
    asked: list[Any] = []
    module, setup = stream_module(asked), SETUP.changed({"tokenizer": "named"})
    stream, held_out, size, label = module.token_stream(setup, None, "mine")
    assert (text(stream), text(held_out)) == ("abcdefg", "xyz")
    assert (size, label) == (200, "standard-library modules")
    assert asked[0] == "named"
    assert asked[1:] == [{"add_special_tokens": False, "verbose": False}] * 4
    setup = SETUP.changed({"characters": "19"})
    stream, held_out, size, label = module.token_stream(setup, ["0123456789", "abcdefghij"], "mine")
    assert (text(stream), text(held_out)) == ("0123456789abcdefg", "hi")
    assert (size, label) == (200, "mine")


@pytest.mark.parametrize(
    ("characters_read", "wanted"),
    [(2, ["ab"]), (3, ["abc"]), (4, ["abc", "d"]), (5, ["abc", "de"]), (9, ["abc", "de"])],
)
def test_the_first_texts_have_so_many_characters(characters_read: int, wanted: list[str]) -> None:
    """The last one is cut, and none is empty."""
    assert list(random_tokens._first_texts(["abc", "de"], characters_read)) == wanted


def test_a_tokenizer_that_cannot_be_loaded_is_said_so(tmp_path: Any) -> None:
    """In one line, with what to do."""
    with pytest.raises(GeometryError) as refused:
        random_tokens._tokenizer(str(tmp_path / "none"))
    said = str(refused.value)
    assert said.startswith(f"tokenizer: expected one that can be loaded, got '{tmp_path}/none' (")
    advice = "Use --set tokenizer=DIRECTORY, or --set tokenizer= for the embedded one."
    assert said.endswith(advice)
    assert "\n" not in said


def test_windows_of_a_text_are_drawn_by_their_seed() -> None:
    """Training windows start anywhere, the last place included; held-out ones do not overlap."""
    stream = torch.arange(50, 63)
    for seed in (0, 5):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(13 - 4 + 1, (30,), generator=generator).tolist()
        drawn = random_tokens.text_windows(stream, 4, 30, seed)
        assert drawn.tolist() == [stream[s : s + 4].tolist() for s in starts]
        order = torch.randperm(3, generator=torch.Generator().manual_seed(seed)).tolist()
        apart = random_tokens.held_out_windows(stream, 4, 2, seed)
        assert apart.tolist() == [stream[4 * i : 4 * i + 4].tolist() for i in order[:2]]
    assert len(random_tokens.held_out_windows(stream, 4, 9, 0)) == 3
    assert random_tokens.text_windows(stream, 12, 50, 0)[:, 0].unique().tolist() == [50, 51]
    assert len(random_tokens.held_out_windows(stream[:8], 4, 2, 0)) == 2
    for function, ids, message in (
        (random_tokens.text_windows, stream[:4], "text: expected more than 4 tokens, got 4."),
        (random_tokens.held_out_windows, stream[:7], "text: expected 8 held-out tokens, got 7."),
    ):
        with pytest.raises(GeometryError) as short:
            function(ids, 4, 2, 0)
        assert str(short.value) == f"{message} Use a longer text."


def test_halves_are_without_the_row_between_them() -> None:
    """Each half less its own mean, by numpy."""
    pos = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(0)).double()
    found = random_tokens.halves(pos, 6, 2)
    for name, rows in (("first", slice(0, 5)), ("second", slice(6, 12))):
        for state in range(2):
            x = pos[state, rows].numpy()
            x = x - x.mean(0)
            unit = x / np.linalg.norm(x, axis=1, keepdims=True)
            turns = 1 - (unit[1:] * unit[:-1]).sum(1)
            n = np.arange(len(x))
            cosines = np.stack([np.ones(len(x)), np.cos(np.pi * (2 * n + 1) / (2 * len(x)))])
            cosines /= np.linalg.norm(cosines, axis=1, keepdims=True)
            wanted = {
                "fracture": turns.max() / np.median(turns),
                "roughness": (np.diff(x, axis=0) ** 2).sum() / (x**2).sum(),
                "low_frequency": ((cosines @ unit) ** 2).sum() / len(x),
            }
            values = {m: float(found[f"{m}_{name}"][state]) for m in wanted}
            assert values == pytest.approx(wanted)
    assert len(found) == 6


def test_every_model_is_measured_on_the_same_tokens_of_each_format() -> None:
    """The second half is random from the middle of the context on; the basis begins at position
    1."""
    module, windows = copy_of(random_tokens), torch.arange(60, 84).view(3, 8)
    module.bridge_of = lambda model, name: (model, name)
    module.basis_of = lambda bridge, tokens, corpus: (bridge, tokens.tolist(), corpus)
    found = module._bases(SETUP, "model", windows, "full", 50)
    assert found == {
        form: (
            ("model", "trained on full"),
            randomise(windows, form, 50, half=4, seed=1).tolist(),
            form,
        )
        for form in FORMATS
    }
    module.halves = lambda pos, half, frequencies: {"half": torch.tensor([half, frequencies])}
    module.state_measures = lambda basis, frequencies: [{"state": 0}, {"state": frequencies}]
    basis = SimpleNamespace(pos="pos", window=(1, 8))
    rows = module._measures(SETUP, {"partial": basis, "baseline": basis}, "full")
    assert rows == [
        {"trained": "full", "measured": form, "state": state, "half": value}
        for form in ("partial", "baseline")
        for state, value in ((0, 3.0), (3, 3.0))
    ]


def test_training_text_follows_seed_format_and_step() -> None:
    """One token longer than a context; no two runs share a batch."""
    module: Any = copy_of(random_tokens)
    module.run_training = lambda *given, **options: (given, options)
    module._bases = lambda *given: given
    module._measures = lambda setup, bases, trained: [{"bases": bases, "trained": trained}]
    stream = torch.arange(100, 140)
    for i, trained in enumerate(FORMATS):
        options = {"device": "meta", "progress": False}
        given, passed = module._train(SETUP, stream, 50, "windows", trained, 4, options)
        assert passed == {"name": f"{trained}-4", "seed": 4, **options}
        assert given[:2] == (SETUP, 50)
        seed = (4 * 3 + i) * 10_000_019 + 7
        drawn = random_tokens.text_windows(stream, 9, SETUP.batch, seed)
        rows = randomise(drawn, trained, 50, half=4, seed=seed)
        inputs, targets = given[2](7)
        assert inputs.equal(rows[:, :-1])
        assert targets.equal(rows[:, 1:])
        bases = (SETUP, "model", "windows", trained, 50)
        assert given[3](7, "model") == [{"bases": bases, "trained": trained}]


def test_three_models_are_trained_for_each_seed() -> None:
    """Rows carry seed and mean loss of the last 50 steps; bases are those of the first seed."""
    module: Any = copy_of(random_tokens)
    asked: list[Any] = []
    module.token_stream = lambda setup, texts, name: ("stream", "held out", 50, f"{name} {texts}")
    module.held_out_windows = lambda ids, length, n, seed: (ids, length, n, seed)

    def train(*given: Any) -> Training:
        asked.append(given)
        return Training(given[4], [9.0] * 9 + [1.0] * 25 + [2.0] * 25, [{"step": 0}, {"step": 1}])

    module._train = train
    module._bases = lambda setup, model, windows, trained, size: {
        f"{model} {windows[3]}": SimpleNamespace(pos=torch.ones(1, 2, 3).double())
    }
    module._outcome = lambda *given: given
    setup = module.SETUPS["smoke"]
    options = {"out": "folder", "device": "meta", "progress": False}
    found = module.randomisation("smoke", ["t"], name="mine", seeds=[4, 2], **options)
    runs = [(trained, seed) for seed in (4, 2) for trained in FORMATS]
    assert asked == [
        (setup, "stream", 50, ("held out", 24, 32, seed), trained, seed, options)
        for trained, seed in runs
    ]
    rows = [{"seed": seed, "step": s, "training_loss": 1.5} for _, seed in runs for s in (0, 1)]
    assert (found[0], found[1], *found[3:]) == (setup, rows, (4, 2), "mine ['t']")
    assert list(found[2]) == [(trained, f"{trained} 4") for trained in FORMATS]
    assert {x.dtype for x in found[2].values()} == {torch.float32}
    asked.clear()
    found = module.randomisation("smoke")
    assert [call[5:] for call in asked] == [
        (0, {"out": None, "device": "cpu", "progress": True})
    ] * 3
    assert found[4] == "the user's text None"


@pytest.mark.parametrize(("shown", "drawn"), [("2,9", True), ("0", True), ("3,9", False)])
def test_at_least_one_state_can_be_drawn(shown: str, drawn: bool) -> None:
    """A model of two blocks has the states 0 to 2."""
    module: Any = copy_of(random_tokens)
    module.token_stream = lambda *given: ("", "", 0, "")
    module.held_out_windows = lambda *given: None
    module._train = lambda *given: Training(None, [1.0], [])
    module._bases = lambda *given: {}
    module._outcome = lambda *given: "an outcome"
    setup = module.SETUPS["smoke"].changed({"shown": shown})
    if drawn:
        assert module.randomisation(setup) == "an outcome"
        return
    with pytest.raises(GeometryError) as refused:
        module.randomisation(setup)
    assert str(refused.value) == "shown: expected a state of 0 to 2, got (3, 9)."


def test_characters_are_trained_for_each_seed() -> None:
    """Of 60 modules where no text is given; windows of each seed, figures of the first."""
    module: Any = copy_of(characters)
    asked: list[Any] = []
    documents = SimpleNamespace(texts=("ba!", "b"))
    module.corpus = SimpleNamespace(
        training_texts=lambda: ["ab"] * 70, held_out_documents=lambda: documents
    )
    module.held_out_windows = lambda ids, length, n, seed: (len(ids), length, n, seed)

    def train(*given: Any) -> Training:
        asked.append(given)
        return Training(f"model {given[4]}", [], [{"step": 0}])

    module._train = train
    module.bridge_of = lambda model, name: (model, name)
    module.basis_of = lambda *given: given
    module.spirals = lambda basis: ("spirals", basis)
    module.views = SimpleNamespace(state_cosines=lambda basis: ("cosines", basis))
    module._outcome = lambda *given: given
    options = {"out": "folder", "device": "meta", "progress": False}
    found = module.nanogpt("smoke", seeds=[4, 2], **options)
    setup, cut = module.SETUPS["smoke"], int(0.9 * (60 * 3 - 1))
    assert [(call[0], len(call[1]), *call[2:]) for call in asked] == [
        (
            *(setup, cut, 3),
            {"own text": (179 - cut, 24, 32, seed), "other text": (4, 24, 32, seed)},
            *(seed, options),
        )
        for seed in (4, 2)
    ]
    basis = (("model 4", "NanoGPT"), (179 - cut, 24, 32, 4), "own text")
    figures_drawn = {"spirals": ("spirals", basis), "cosines": ("cosines", basis)}
    rows = [{"seed": seed, "step": 0} for seed in (4, 2)]
    assert found == (setup, rows, figures_drawn, (4, 2), "standard-library modules")
    assert module.nanogpt("smoke", ["ab"], other=["a"], name="mine")[4] == "mine"
    assert asked[-1][5] == {"out": None, "device": "cpu", "progress": True}


# --- figures


def test_a_grid_of_bases_by_training_and_inference_format() -> None:
    """A row per training format and a column per inference format, each named once, with crosses
    from the random half on."""
    forms, g = ("text", "noise"), torch.Generator().manual_seed(0)
    bases = {(a, b): torch.randn(3, 7, 4, generator=g) for a in forms for b in forms}
    view = figures.format_planes(bases, 2, half=5, start=1, source="a source")
    assert (view.title, view.source) == (
        "Positional bases by training and inference format, state 2",
        "a source",
    )
    assert view.caption == (
        "Each panel shows the two leading directions of pos at state 2 to its own scale; crosses "
        "are positions from 5 on."
    )
    assert view.null == (
        "No null is drawn: formats that a model was not trained on are the comparison."
    )
    panels: list[Any] = view.figure.axes[:4]
    assert [axis.get_title() for axis in panels] == [
        "measured on text",
        "measured on noise",
        "",
        "",
    ]
    assert [axis.get_ylabel() for axis in panels] == ["trained on text", "", "trained on noise", ""]
    assert all(len(axis.get_xticks()) == len(axis.get_yticks()) == 0 for axis in panels)
    assert view.figure.axes[4].get_ylabel() == "position"
    order = [(a, b) for a in forms for b in forms]
    for axis, key in zip(panels, order, strict=True):
        x = bases[key][2].numpy()
        left, sizes, _ = np.linalg.svd(x, full_matrices=False)
        wanted = np.abs(left[:, :2] * sizes[:2])
        dots, crosses = axis.collections
        drawn = np.concatenate([dots.get_offsets(), crosses.get_offsets()])
        assert np.allclose(np.abs(drawn), wanted, atol=1e-5)
        assert np.allclose(np.abs(axis.lines[0].get_xydata()), wanted, atol=1e-5)
        assert (dots.get_array().tolist(), crosses.get_array().tolist()) == (
            [1, 2, 3, 4],
            [5, 6, 7],
        )
        assert (dots.norm.vmin, dots.norm.vmax, crosses.norm.vmax) == (1, 7, 7)


def test_curves_over_training() -> None:
    """A panel per measure, at most four in a row, a line per seed and a colour per group."""
    rows = [
        {"seed": seed, "step": step, "task": task, "a_b": step + seed, "c": len(task)}
        for task in ("sums", "words")
        for seed in (0, 3)
        for step in (0, 10)
    ]
    measures = ("a_b", "c", "a_b", "c", "c")
    view = figures.training_curves(rows, measures, by="task", caption="said", source="a source")
    assert (view.title, view.caption, view.source) == ("Geometry over training", "said", "a source")
    assert view.null == "Lines of one colour differ by their seed alone: that spread is chance."
    axes: list[Any] = [axis for axis in view.figure.axes if axis.lines]
    assert [axis.get_title() for axis in axes] == ["a b", "c", "a b", "c", "c"]
    assert {axis.get_xlabel() for axis in axes} == {"steps"}
    tops = [round(axis.get_position().y0, 3) for axis in axes]
    assert len(set(tops[:4])) == 1
    assert tops[4] < tops[0]
    lines = axes[0].lines
    assert [line.get_xydata().tolist() for line in lines] == [
        [[0, seed], [10, 10 + seed]] for _ in range(2) for seed in (0, 3)
    ]
    assert [line.get_label() for line in lines] == ["sums", "sums", "words", "words"]
    first, second = (to_hex(c) for c in figures.COLOURS[:2])
    assert [to_hex(line.get_color()) for line in lines] == [first] * 2 + [second] * 2
    (legend,) = [*view.figure.legends, *(a.get_legend() for a in axes if a.get_legend())]
    assert [item.get_text() for item in legend.get_texts()] == ["sums", "words"]


@pytest.mark.parametrize("labelled", [False, True])
def test_cosines_of_positions(labelled: bool) -> None:
    """A panel per state, all from -1 to 1, with the labels of the window."""
    basis = tlg.decompose_activations(
        torch.randn(2, 12, 6, 8, generator=torch.Generator().manual_seed(0)), window=(1, 6)
    )
    labels = list("abcdef") if labelled else []
    view = figures.state_cosines(basis, labels=labels, title="The title")
    named = "; the tokens of one context name them" if labelled else ""
    assert (view.title, view.source) == ("The title", basis.provenance.line())
    assert view.caption == f"Each cell is the cosine of two positions{named}."
    assert view.null == "No null is drawn: the measures of position have theirs."
    panels: list[Any] = view.figure.axes[:2]
    assert [axis.get_title() for axis in panels] == ["state 0", "state 1"]
    for axis, pos in zip(panels, basis.pos, strict=True):
        (image,) = axis.images
        assert image.get_clim() == (-1, 1)
        cosines = torch.nn.functional.cosine_similarity(pos[:, None], pos[None], dim=-1)
        assert np.allclose(np.asarray(image.get_array()), cosines.numpy())
        for ticks in (axis.get_xticklabels(), axis.get_yticklabels()):
            texts = [tick.get_text() for tick in ticks]
            assert (texts == list("bcdef")) is labelled
    assert figures.state_cosines(basis).title == "Cosines of position"


# --- readouts of GPT-2


@pytest.mark.parametrize(
    ("name", "shape", "published"),
    [
        ("gpt2", (12, 12), True),
        ("openai-community/gpt2", (12, 12), True),
        ("gpt2", (12, 11), False),
        ("gpt2", (11, 12), False),
        ("gpt2-medium", (12, 12), False),
    ],
)
def test_readouts_have_the_published_settings(
    name: str, shape: tuple[int, int], published: bool
) -> None:
    """Five tokens of one direction; blocks 0, 5 and 11 of GPT-2 for the nouns, without biases."""
    module: Any = copy_of(traveling_words)
    asked: list[Any] = []
    view = SimpleNamespace(name=name, n_layers=shape[0], n_heads=shape[1])
    view.provenance = lambda **given: Provenance(corpus=f"{given}")
    module.as_view = lambda model: view

    def noting(readout: str) -> Any:
        def read(*given: Any, **options: Any) -> Any:
            asked.append((readout, given, options))
            raise GeometryError("not\n  here")

        return read

    for readout in ("bias_readout", "token_readout", "noun_probe"):
        setattr(module, readout, noting(readout))
    found = module.molina("model")
    layers = (0, 5, 11) if published else None
    assert asked == [
        ("bias_readout", (view,), {"k": 5}),
        ("token_readout", (view,), {"matrix": "QK", "features": 1, "k": 5}),
        ("token_readout", (view,), {"matrix": "OV", "features": 1, "k": 5}),
        ("noun_probe", (view, None), {"layers": layers, "k": 5, "biases": False}),
    ]
    rows = [(row[0], row[1], row[2:6], math.isnan(row[6]), row[7]) for row in found.rows()]
    assert rows == [
        (readout, -1, ("",) * 4, True, "refused: not here")
        for readout in ("bias", "head QK", "head OV", "noun")
    ]
    assert found.provenance.corpus == "{'sources': ('molina2023',), 'preset': 'paper'}"
    row = {"layer": 3, "head": 2, "bias": "K", "top": "a", "bottom": "b", "length": 1.5}
    table = SimpleNamespace(rows=lambda: [tuple(row.values())], columns=lambda: tuple(row))
    module.bias_readout = lambda view, k: table
    first = module.molina("model", nouns=["n"], features=3, k=2).rows()[0]
    verdict = "published settings; the sources print no values"
    other = "needs GPT-2's weights: the published examples are its own"
    assert first == ("bias", 3, "2", "K bias", "a", "b", 1.5, verdict if published else other)
    assert asked[-2][2] == {"matrix": "OV", "features": 3, "k": 2}
    assert asked[-1][1:] == ((view, ["n"]), {"layers": layers, "k": 2, "biases": False})
