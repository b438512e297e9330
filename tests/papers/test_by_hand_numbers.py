"""Rows beside published numbers: verdicts at the edge of the tolerance, accuracies from the right
column, outliers left out, the protocol said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.modules import copy_of
from tests.tiny import tiny
from tl_geometry import papers, zoo
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.papers import lines_of_thought
from tl_geometry.weights import bias_readout, noun_probe, token_readout


def columns(accuracy: float) -> Any:
    """A table of accuracies for three layers: accuracy, low, high, shuffled, test rows."""
    rows = [[accuracy + 0.1 * i, 0.1, 0.99, 0.42, 7.0] for i in (2, 0, 1)]
    return SimpleNamespace(accuracy=torch.tensor(rows), names=("a",) * 3)


def check_rows(module: Any) -> None:
    quantities = ("alpha", "lambda", "KL at K = 256", "ln alpha")
    ours = zip(quantities, (0.7399, 0.2001, 0.81, -0.4), "abcd", strict=True)
    rows = {row[0]: row for row in module._beside_published("gpt2-medium", ours)}
    assert [rows[q][5] for q in quantities] == [
        "agrees",
        "differs",
        "differs",
        "not published",
    ]
    assert rows["lambda"][1:5] == (0.18, 0.18, 0.2001, 0.02)
    assert rows["KL at K = 256"][6:] == (
        "authors' reply to reviewers (0.5); a reviewer reads 0.7",
        "c",
    )
    edge = module.Published("q", "m", 1.0, 2.0, "", 0.25)
    verdicts = [module._verdict(edge, v) for v in (0.74, 0.76, 2.24, 2.26, float("nan"))]
    assert verdicts == ["differs", "agrees", "agrees", "differs", "not measured"]
    chunks = TokenWindows(tokens=torch.arange(300).unsqueeze(1), has_bos=False)
    kept, flags = module._without_outliers(chunks, "Llama-2-7b")
    assert sorted(set(range(300)) - set(kept.tokens[:, 0].tolist())) == [65, 222, 276]
    assert flags == ["3 of the 7 outlying chunks of the paper left out"]
    assert module._without_outliers(chunks, "gpt2-medium") == (chunks, [])


def check_accuracies(module: Any) -> None:
    own = SimpleNamespace(states=(1, 2, 3, 4), post_norm=None, provenance=Provenance())
    asked: list[Any] = []
    module.true_against_extrapolated = lambda e, start, seed: asked.append(start) or columns(0.5)
    rows = dict(row[:2] for row in module._separability(own, 0))
    assert rows == {"SVM accuracy, tau = 1": pytest.approx(0.7)}
    assert asked == [2]
    seen: list[Any] = []
    module.pseudo_sentences = lambda view, text, length, prepend_bos: list(range(50))
    module.gibberish = lambda view, n, length, prepend_bos, seed: ("noise", n, length)
    module.trajectories = lambda view, tokens, post_norm, progress: ("path", tokens)
    module.ensembles_apart = lambda a, b, seed: seen.append((a, b)) or columns(0.6)
    name, value, note = module._perceptron("view", "text", None, False, False, 0, False)
    assert value == pytest.approx(0.6), "the lowest layer"
    assert note == "50 trajectories of 10 tokens, held out; published protocol: 14,000"
    assert seen == [(("path", list(range(50))), ("path", ("noise", 50, 10)))]
    assert name == "perceptron accuracy against gibberish, lowest layer"
    module.pseudo_sentences = lambda *a, **o: range(20_000)
    assert module._perceptron("view", "text", None, False, False, 0, False)[2] == (
        "14000 trajectories of 10 tokens, held out"
    )


def test_the_published_rows_by_hand() -> None:
    check_rows(copy_of(lines_of_thought))
    check_accuracies(copy_of(lines_of_thought))


def test_traveling_words_are_the_readouts_themselves() -> None:
    model = zoo.embedded()
    found = papers.molina(model, nouns=["file", "list"], k=2)
    rows = {(r[0], r[1], r[2], r[3]): r for r in found.rows()}
    layer, head, name, length, top, bottom = bias_readout(model, k=2).rows()[4]
    mine = rows["bias", layer, str(head), f"{name} bias"]
    assert mine[4:7] == (top, bottom, length)
    for matrix, ends in (("QK", ("queries", "keys")), ("OV", ("reads", "writes"))):
        table = token_readout(model, matrix=matrix, features=1, k=2)
        row = dict(zip(table.columns(), table.rows()[3], strict=True))
        at = (f"head {matrix}", row["layer"], str(row["head"]), f"direction {row['feature']}")
        assert rows[at][4:7] == (row[ends[0]], row[ends[1]], row["value"])
    probe = noun_probe(model, ["file", "list"], k=2, biases=False).rows()[1]
    assert rows["noun", probe[0], str(probe[1]), probe[2]][4:7] == tuple(probe[3:])
    assert all("needs GPT-2's weights" in str(r[-1]) for r in found.rows())
    assert found.provenance.preset == "paper"


def test_traveling_words_say_what_a_model_has_not() -> None:
    found = papers.molina(tiny("bridge", "qwen3"), nouns=["a"], k=2)
    refused = {str(r[0]): str(r[-1]) for r in found.rows() if r[1] == -1}
    assert set(refused) == {"bias", "noun"}
    assert all(v.startswith("refused: ") and "QK-norm" in v for v in refused.values())
