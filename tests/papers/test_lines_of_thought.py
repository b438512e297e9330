"""Lines of Thought: the ranges that agree with the published numbers, how each model is run, and
the rows of each measure with stand-ins for the measures themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.modules import copy_of
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.papers import lines_of_thought

AGREEING = """
gpt2-medium  0.54   0.74   alpha
gpt2-medium  0.16   0.20   lambda
Llama-2-7b  -5.7   -5.1    ln alpha
Llama-2-7b   0.25   0.29   lambda
gpt2-medium  128    384    K with 90% of the KL gone
gpt2-medium  4.5    5.5    KL at K = 1
gpt2-medium  0.4    0.8    KL at K = 256
gpt2-medium  2.2    2.8    top-5 overlap at K = 256
gpt2-medium  0.48   0.53   SVM accuracy, tau = 1
gpt2-medium  0.55   0.65   SVM accuracy, tau = 10
gpt2-medium  0.98   1.02   perceptron accuracy against gibberish, lowest layer
gpt2-medium -0.1    0.4    mean |kurtosis|
gpt2-medium  0.8    1.7    mean |kurtosis|, untrained
"""
"""The numbers of ours that agree, from the lowest to the highest."""


def test_which_numbers_agree_with_the_published_ones() -> None:
    lines = [line.split(maxsplit=3) for line in AGREEING.strip().splitlines()]
    assert len(lines) == len(lines_of_thought.PUBLISHED)
    for model, low, high, quantity in lines:
        ends = float(low), float(high)
        tried = [ends[0] - 1e-6, ends[0] + 1e-6, ends[1] - 1e-6, ends[1] + 1e-6]
        rows = lines_of_thought._beside_published(model, [(quantity, v, "") for v in tried])
        assert [r[5] for r in rows] == ["differs", "agrees", "agrees", "differs"], quantity


def test_the_end_of_a_range_agrees() -> None:
    whole = lines_of_thought.Published("q", "m", 2.0, 3.0, "", 0.5)
    assert [lines_of_thought._verdict(whole, v) for v in (1.5, 3.5)] == ["agrees"] * 2


class Paths:
    """Stands in for trajectories: how many chunks, of which model, and before or after the norm."""

    def __init__(self, view: Any, chunks: Any, normed: bool = False) -> None:
        self.view, self.chunks, self.normed = view, chunks, normed
        self.provenance = Provenance(flags=("after the norm",) if normed else ())

    def after_norm(self) -> Paths:
        return Paths(self.view, self.chunks, normed=True)

    def residuals(self) -> Any:
        kurtosis = [math.nan, 2.0, 4.0] if self.view[0] == "new" else [9.0]
        return SimpleNamespace(abs_kurtosis=torch.tensor(kurtosis))


@pytest.fixture
def module() -> Any:
    """A copy of the module, for stand-ins."""
    return copy_of(lines_of_thought)


@pytest.fixture
def protocol() -> Any:
    """The module with stand-ins for all that runs a model; ``protocol.asked`` holds their calls."""
    copy: Any = copy_of(lines_of_thought)
    copy.asked = []
    copy.as_view = lambda model: model

    def pseudo_sentences(view: Any, text: str, length: int, *, prepend_bos: bool) -> TokenWindows:
        copy.asked.append(("chunks", length, prepend_bos))
        return TokenWindows(tokens=torch.arange(4000).unsqueeze(1), has_bos=prepend_bos)

    def trajectories(view: Any, chunks: Any, *, post_norm: bool = False, progress: bool) -> Paths:
        copy.asked.append(("paths", view[0], len(chunks), post_norm, progress))
        return Paths(view, chunks)

    @contextmanager
    def reinitialized(view: Any, *, seed: int) -> Iterator[Any]:
        copy.asked.append(("new weights", seed))
        yield ("new",)

    copy.pseudo_sentences, copy.trajectories = pseudo_sentences, trajectories
    copy.reinitialized = reinitialized
    copy._law = lambda paths: [("law", 1.0, f"normed {paths.normed}")]
    copy._truncation = lambda view, paths, K, progress: [
        (
            "truncation",
            float(len(paths.chunks)),
            f"normed {paths.normed}, {sorted({1, 256} & {*K})}",
        )
    ]
    copy._separability = lambda paths, seed: [("separability", seed, f"normed {paths.normed}")]
    copy._perceptron = lambda view, *options: ("perceptron", 0.0, f"{options}")
    return copy


class View(tuple[str, ...]):
    """Stands in for a view of a model."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return self[0]


@pytest.mark.parametrize(
    ("name", "model", "chunks", "normed"),
    [
        ("openai-community/gpt2-medium", "gpt2-medium", 3000, False),
        ("meta-llama/Llama-2-7b-hf", "Llama-2-7b", 993, True),
        ("mistralai/Mistral-7B-v0.1", "Mistral-7B", 1000, True),
        ("meta-llama/llama-3.2-1b", "Llama-3.2-1B", 1000, True),
        ("meta-llama/Llama-3.2-3B", "Llama-3.2-3B", 1000, True),
        ("another", "another", 4000, False),
    ],
)
def test_each_model_is_run_as_published(
    protocol: Any, name: str, model: str, chunks: int, normed: bool
) -> None:
    found = protocol.sarfati(View((name,)), "text")
    assert protocol.asked == [
        ("chunks", 50, False),
        ("paths", name, chunks, normed, True),
        ("new weights", 0),
        ("paths", "new", chunks, False, True),
    ]
    assert [row[0] for row in found.rows()] == [
        *("law", "truncation", "mean |kurtosis|, untrained", "separability", "perceptron")
    ]
    assert [row[3] for row in found.rows()] == [1.0, chunks, 3.0, 0, 0.0]
    assert [row[7] for row in found.rows()] == [
        *(f"normed {normed}", "normed False, [1, 256]", "same configuration, new weights"),
        *(f"normed {normed}", f"{('text', None, False, normed, 0, True)}"),
    ]
    assert (found.model, found.provenance.preset, found.provenance.seed) == (model, "paper", 0)
    removed = ("7 of the 7 outlying chunks of the paper left out",) * (chunks == 993)
    assert found.provenance.flags == ("after the norm",) * normed + removed


def test_what_a_user_asks_for_reaches_every_measure(protocol: Any) -> None:
    view = View(("gpt2-medium",))
    options: dict[str, Any] = {"prepend_bos": True, "seed": 3, "progress": False, "length": 9}
    found = protocol.sarfati(view, "text", published_as="Llama-2-7b", n=70, **options)
    assert protocol.asked == [
        ("chunks", 9, True),
        ("paths", "gpt2-medium", 69, True, False),
        ("new weights", 3),
        ("paths", "new", 69, False, False),
    ]
    assert [row[7] for row in found.rows()][-1] == f"{('text', 70, True, True, 3, False)}"
    assert (found.model, found.provenance.seed) == ("Llama-2-7b", 3)
    few = protocol.sarfati(view, "text", n=32, separate=False)
    assert [row[0] for row in few.rows()][-1] == "mean |kurtosis|, untrained"
    with pytest.raises(GeometryError, match="at least 32 chunks, got 31"):
        protocol.sarfati(view, "text", n=31)
    for n in (0, -5):
        with pytest.raises(GeometryError, match=f"n: expected at least 1 chunk, got {n}"):
            protocol.sarfati(view, "text", n=n)


def test_the_seven_chunks_that_the_paper_removes(module: Any) -> None:
    def removed(chunks: int) -> list[int]:
        windows = TokenWindows(tokens=torch.arange(1, chunks + 1).unsqueeze(1), has_bos=False)
        kept = module._without_outliers(windows, "Llama-2-7b")[0].tokens[:, 0]
        return sorted(set(range(1, chunks + 1)) - set(kept.tolist()))

    assert removed(1000) == [66, 223, 277, 330, 435, 538, 669]
    assert (removed(66), removed(65)) == ([66], [])


@pytest.mark.parametrize(("asymptotic", "preferred"), [(1, "asymptotic"), (3, "increment")])
def test_rows_of_the_noise_law(module: Any, asymptotic: float, preferred: str) -> None:
    laws = {
        "asymptotic": SimpleNamespace(alpha=0.5, log_alpha=-0.7, rate=0.2, r2=0.91234),
        "increment": SimpleNamespace(alpha=9.0, log_alpha=9.0, rate=0.3456, r2=0.1),
    }
    laws["asymptotic"].aic, laws["increment"].aic = asymptotic, 2
    module.fit_noise_law = lambda variance, *, law, times: laws[law] if times == "t" else None
    maps = SimpleNamespace(log_variance=0, abs_kurtosis=torch.tensor([1.0, math.nan, 4.0]))
    assert module._law(SimpleNamespace(residuals=lambda: maps, times="t")) == [
        ("alpha", 0.5, f"R^2 0.912; AIC prefers the {preferred} law"),
        ("ln alpha", -0.7, "natural logarithm"),
        ("lambda", 0.2, "increment law: 0.346"),
        ("mean |kurtosis|", 2.5, "over all pairs of layers"),
    ]


def truncated(module: Any, K: tuple[int, ...], kl: list[float], **changed: Any) -> Any:
    """Rows of the truncation of 300 directions with these losses, and the K that were asked for."""
    seen: list[Any] = []
    claimed = changed.pop("claimed", True)

    def truncation_kl(view: Any, tokens: Any, paths: Any, *, K: Any, progress: bool) -> Any:
        seen.append((K, progress))
        top5 = torch.arange(len(kl)) / 4
        curve = {"K": K, "kl": torch.tensor(kl), "top5": top5, "claimed": claimed, "fitted": 300}
        return SimpleNamespace(**curve, needed=lambda: 64)

    module.truncation_kl = truncation_kl
    rank = {"none": 300, "greedy": 299}
    bases = lambda align="greedy": SimpleNamespace(rank=rank[align])
    view = {"head_trained": True, "causal": True, "d_model": 1024} | changed
    paths = SimpleNamespace(tokens=view.pop("tokens", 0), aligned_bases=bases)
    return module._truncation(SimpleNamespace(**view), paths, K, False), seen


def test_rows_of_the_truncation(module: Any) -> None:
    rows, seen = truncated(module, (1, 128, 256, 300, 301), [5.0, 1.0, 0.5, 0.25])
    assert seen == [((1, 128, 256, 300), False)], "as many directions as there are, and no more"
    criterion = "by the text's other criterion, 10% of the baseline: 64"
    assert rows == [
        ("K with 90% of the KL gone", 256.0, criterion),
        ("KL at K = 1", 5.0, "in-sample directions"),
        ("KL at K = 256", 0.5, "in-sample directions"),
        ("top-5 overlap at K = 256", 0.5, "in-sample directions"),
    ]


def test_what_a_truncation_cannot_say(module: Any) -> None:
    rows, _ = truncated(module, (1, 2), [5.0, 0.1], claimed=False)
    assert rows[0][2] == "not claimed: 300 chunks are fewer than 1024 dimensions"
    assert math.isnan(rows[0][1])
    assert [row[0] for row in rows[1:]] == ["KL at K = 1"]
    rows, _ = truncated(module, (2, 4), [5.0, 0.7])
    assert math.isnan(rows[0][1]), "a tenth of the loss is never reached"
    assert len(rows) == 1
    for lacking in ({"head_trained": False}, {"causal": False}, {"tokens": None}):
        assert truncated(module, (1,), [5.0], **lacking) == ([], [])


@pytest.mark.parametrize(
    ("states", "layers", "start", "taus"),
    [(25, 13, 11, [1, 10]), (12, 10, 5, [1, 10]), (11, 9, 4, [1]), (2, 1, 0, [1]), (1, 0, 0, [])],
)
def test_rows_of_the_separability(
    module: Any, states: int, layers: int, start: int, taus: list[int]
) -> None:
    seen: list[Any] = []

    def separation(paths: Any, *, start: int, seed: int) -> Any:
        seen.append((start, seed))
        accuracy = torch.stack([torch.arange(1, layers + 1), torch.zeros(layers)], -1)
        return SimpleNamespace(accuracy=accuracy, names=("",) * layers)

    module.true_against_extrapolated = separation
    rows = module._separability(SimpleNamespace(states=tuple(range(states))), 4)
    assert seen == [(start, 4)]
    note = f"held out, from state {start}"
    assert rows == [(f"SVM accuracy, tau = {tau}", float(tau), note) for tau in taus]


@pytest.mark.parametrize("normed", [False, True])
def test_the_perceptron_is_asked_for_text_against_gibberish(module: Any, normed: bool) -> None:
    seen: list[Any] = []
    module.pseudo_sentences = lambda view, text, length, prepend_bos: range(14_001)
    module.gibberish = lambda view, n, length, prepend_bos, seed: (n, length, prepend_bos, seed)
    module.trajectories = lambda view, tokens, post_norm, progress: SimpleNamespace(
        given=(tokens, post_norm, progress), after_norm=lambda: SimpleNamespace(given="after")
    )

    def apart(text: Any, random: Any, *, seed: int) -> Any:
        seen.append((text.given, random.given, seed))
        return SimpleNamespace(accuracy=torch.tensor([[0.75, 0.0], [0.5, 0.0], [1.0, 0.0]]))

    module.ensembles_apart = apart
    row = module._perceptron("view", "text", None, True, normed, 6, True)
    note = "14000 trajectories of 10 tokens, held out"
    assert row == ("perceptron accuracy against gibberish, lowest layer", 0.5, note)
    before = (range(14_000), False, True), ((14_000, 10, True, 6), False, True)
    assert seen == [(*(("after", "after") if normed else before), 6)]
    fewer = module._perceptron("view", "text", 7, True, normed, 6, True)
    assert fewer[2] == "7 trajectories of 10 tokens, held out; published protocol: 14,000"
