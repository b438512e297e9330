"""What an experiment returns and writes: the text and the page of findings, the tables with what
they were computed from, and what each figure is drawn from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.modules import copy_of
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.papers import arithmetic, characters, random_tokens
from tl_geometry.papers.figures import training_curves
from tl_geometry.papers.outcome import Claim, Outcome, table_of
from tl_geometry.papers.random_tokens import FormatBases
from tl_geometry.papers.setup import Setup
from tl_geometry.report.tables import TableBlock

SETUP = Setup(
    scale="smoke", layers=3, heads=4, d_model=5, context=6, batch=7, steps=8, warmup=1, dropout=0.5
)


def outcome() -> Outcome:
    made = Provenance(corpus="a corpus")
    rows = [{"seed": 0, "step": s, "task": "sums", "rank": s} for s in (0, 10)]
    return Outcome(
        name="addition",
        title="Sums <b>",
        setup=SETUP,
        seeds=(3, 1),
        corpus="a corpus",
        findings=(
            Claim(statement="one", expected="more", found="2", holds=True),
            Claim(statement="two", expected="less", found="3", holds=False),
            Claim(statement="three", expected="any", found="4"),
        ),
        tables={
            "curves": table_of(rows, made),
            "bases": FormatBases(pos={("a", "b"): torch.ones(1, 2, 3)}, half=1, provenance=made),
        },
        figures={"growth": training_curves(rows, ["rank"], by="task", caption="")},
        notes=("A note.",),
    )


def test_the_findings_as_text() -> None:
    assert outcome().text().splitlines() == [
        "Sums <b>, smoke scale, seeds 3, 1",
        "  [yes] one: 2 (expected: more)",
        "  [ NO] two: 3 (expected: less)",
        "  [  -] three: 4 (expected: any)",
    ]


def test_the_sections_of_a_page() -> None:
    whole = outcome()
    claims, rest = whole.sections()
    assert (claims.title, rest.title) == ("Claims", "Figures and tables")
    assert claims.blocks[:2] == (
        "Scale smoke: 3 blocks, 4 heads, d_model 5, context 6, 8 steps of 7 rows; seeds 3, 1; "
        "data: a corpus.",
        "A note.",
    )
    table: Any = claims.tables["findings"]
    assert table.columns() == ("claim", "expected", "found", "holds")
    assert table.rows() == (
        ("one", "more", "2", "yes"),
        ("two", "less", "3", "no"),
        ("three", "any", "4", "not judged"),
    )
    assert table.provenance == Provenance(corpus="a corpus")
    figure, curves, bases = rest.blocks
    assert figure is whole.figures["growth"]
    assert isinstance(curves, TableBlock)
    assert isinstance(bases, TableBlock)
    assert rest.tables == whole.tables


def test_what_is_written(tmp_path: Path) -> None:
    whole, out = outcome(), tmp_path / "new" / "folder"
    assert whole.save(out, command=("tl-geometry", "x")) == out / "report.html"
    record = json.loads((out / "run.json").read_text())
    plain = {"curves.csv", "curves.safetensors", "findings.csv", "findings.safetensors"}
    names = plain | {"bases.safetensors", "growth.png", "report.html"}
    assert {path.name for path in out.iterdir()} == names | {"run.json"}
    assert set(record["files"]) == names
    assert record["command"] == ["tl-geometry", "x"]
    assert (record["experiment"], record["seeds"], record["corpus"]) == (
        *("addition", [3, 1], "a corpus"),
    )
    assert record["findings"][1] == {
        "statement": "two",
        "expected": "less",
        "found": "3",
        "holds": False,
    }
    sizes = {"layers": 3, "heads": 4, "d_model": 5, "context": 6, "batch": 7, "steps": 8}
    published = {"learning_rate": 5e-5, "final_learning_rate": 5e-6, "weight_decay": 0.1}
    published |= {"betas": [0.9, 0.99], "clip": 1.0, "bias": False}
    ours = {"measurements": 10, "contexts": 512, "frequencies": 10}
    own = {"scale": "smoke", "warmup": 1, "dropout": 0.5}
    assert record["setup"] == sizes | published | ours | own
    assert "Sums &lt;b&gt;" in (out / "report.html").read_text("utf-8")
    assert "arXiv:2310.04861" in (out / "report.html").read_text("utf-8")
    whole.save(out)
    assert json.loads((out / "run.json").read_text())["command"] == []
    (out / "growth.png").write_bytes(b"mine")
    with pytest.raises(GeometryError, match=r"growth\.png"):
        whole.save(out)
    whole.save(out, force=True)
    assert (out / "growth.png").read_bytes() != b"mine"


# --- the outcomes of the experiments, with figures that say what they were asked to draw


def drawing(module: Any) -> Any:
    """A copy of the module of an experiment, whose figures are what they are drawn from."""
    copy: Any = copy_of(module)
    copy.Outcome = SimpleNamespace
    copy.views = SimpleNamespace(
        format_planes=lambda pos, state, **options: ("planes", pos, state, options),
        training_curves=lambda rows, measures, **options: ("curves", rows, measures, options),
        state_cosines=lambda basis, **options: ("cosines", basis, options),
    )
    return copy


def made_of(
    found: Any, name: str, setup: Setup, seeds: tuple[int, ...], corpus: str
) -> dict[str, str]:
    """The provenance of each table of an outcome as text, whose own facts are as given."""
    assert (found.name, found.seeds, found.corpus) == (name, seeds, corpus)
    assert found.setup is setup
    assert found.notes
    provenance = {n: table.provenance for n, table in found.tables.items()}
    assert {p.seed for p in provenance.values()} == {seeds[0]}
    return {n: p.line() for n, p in provenance.items()}


def test_the_outcome_of_randomisation() -> None:
    module, setup = drawing(random_tokens), random_tokens.SETUPS["smoke"]
    setup = setup.changed({"shown": "0,2,3", "steps": "5"})
    module.findings = lambda final, setup: (final.rows(), setup.steps)
    names = "seed", "step", "trained", "measured", "state"
    rows: list[dict[str, Any]] = [
        dict(zip(names, (seed, step, trained, measured, state), strict=True))
        for seed in (4, 2)
        for step in (0, 5)
        for trained in ("baseline", "full")
        for measured in ("baseline", "full")
        for state in range(3)
    ]
    pos = {("full", "full"): torch.ones(3, 23, 32)}
    found = module._outcome(setup, rows, pos, (4, 2), "roses")
    line = "roses, window (1, 24), float32"
    lines = made_of(found, "randomisation", setup, (4, 2), "roses")
    assert lines == dict.fromkeys(("final", "curves", "bases"), line)
    last = tuple(tuple(row.values()) for row in rows if row["step"] == 5)
    assert found.findings == (last, 5)
    assert found.tables["final"].rows() == last
    assert found.tables["curves"].rows() == tuple(tuple(row.values()) for row in rows)
    assert (found.tables["bases"].pos, found.tables["bases"].half) == (pos, 12)
    options = {"half": 12, "start": 1, "source": line}
    curves = found.figures.pop("curves")
    assert found.figures == {
        "planes_state_0": ("planes", pos, 0, options),
        "planes_state_2": ("planes", pos, 2, options),
    }
    own = [row for row in rows if row["trained"] == row["measured"] and row["state"] == 2]
    measures = "low_frequency", "low_frequency_first", "low_frequency_second", "jump"
    assert curves[1:3] == (own, measures)
    assert curves[3] == {
        "by": "trained",
        "caption": "Each line is a seed: a model on its own format, at state 2.",
        "source": line,
    }


def test_the_outcome_of_nanogpt() -> None:
    module = drawing(characters)
    setup = characters.SETUPS["smoke"].changed({"steps": "5"})
    module._findings = lambda summary, rows, seeds: [(len(summary), len(rows), seeds)]
    texts = "own text", "other text"
    rows: list[dict[str, Any]] = [
        {"seed": seed, "step": step, "measured": text, "state": state, "loss": 2.0}
        | dict.fromkeys(("rank", "relative_norm", "relative_norm_reference"), number)
        for seed in (4, 2)
        for step in (0, 5)
        for text in texts
        for state in range(3)
        for number in [100.0 * step + 10 * seed + (text == texts[1])]
    ]
    found = module._outcome(setup, rows, {"spirals": "a figure"}, (4, 2), "roses")
    line = "roses, window (1, 24), float32"
    lines = made_of(found, "nanogpt", setup, (4, 2), "roses")
    assert lines == dict.fromkeys(("summary", "curves"), line)
    measures = "rank", "relative_norm_reference", "relative_norm"
    summary = found.tables["summary"]
    keys = ("measured", "seed", "measure", "mean", "sd")
    assert list(zip(*(summary.column(key) for key in keys), strict=True)) == [
        (text, seed, measure, 500.0 + 10 * seed + (text == texts[1]), 0.0)
        for text in texts
        for seed in (4, 2)
        for measure in measures
    ]
    assert found.findings == ((12, len(rows), (4, 2)),)
    assert found.tables["curves"].rows() == tuple(tuple(row.values()) for row in rows)
    assert found.figures["spirals"] == "a figure"
    drawn = [row for row in rows if row["state"] == 1]
    assert found.figures["curves"] == (
        "curves",
        drawn,
        ("loss", "rank", "relative_norm", "low_frequency"),
        {"by": "measured", "caption": "Each line is a seed, at state 1.", "source": line},
    )


def test_the_outcome_of_addition() -> None:
    module, setup = drawing(arithmetic), arithmetic.SETUPS["smoke"]
    states = [{"state": 1, "step": step} for step in (0, 30)]
    heads = [{"head": 1, "step": step} for step in (0, 30)]
    module.by_step = lambda states, heads, length: [{"from": (len(states), len(heads), length)}]
    module.prediction = lambda steps: [{"predicted": steps[0]["from"]}]
    module.findings = lambda setup, steps, predicted: [(steps, predicted)]
    module._figures = lambda *given: given
    found = module._outcome(setup, states, heads, {"carry": "model"}, (4, 2))
    line = "additions, window (1, 14), float32"
    lines = made_of(found, "addition", setup, (4, 2), "generated additions")
    assert lines == dict.fromkeys(("curves", "prediction", "states", "heads"), line)
    rows = {name: table.rows() for name, table in found.tables.items()}
    assert rows == {
        "curves": (((2, 2, 4),),),
        "prediction": (((2, 2, 4),),),
        "states": ((1, 0), (1, 30)),
        "heads": ((1, 30),),
    }
    assert found.findings == (([{"from": (2, 2, 4)}], [{"predicted": (2, 2, 4)}]),)
    assert found.figures == (setup, [{"from": (2, 2, 4)}], {"carry": "model"}, line)


def test_the_figures_of_addition() -> None:
    module, setup = drawing(arithmetic), arithmetic.SETUPS["smoke"]
    seen: dict[str, list[Any]] = {"tokens": [], "scored": [], "heads": []}
    module.bridge_of = lambda model, name: (model, name)

    def basis_of(bridge: Any, tokens: Tensor, corpus: str) -> Any:
        seen["tokens"].append(tokens)
        return (bridge, corpus)

    def split_scores(bridge: Any, tokens: Tensor, basis: Any) -> Any:
        seen["scored"].append(tokens)
        nan = float("nan")
        shares = torch.tensor([[nan, nan], [0.9, 0.1], [0.3, 0.7], [0.6, 0.4]])
        summary = SimpleNamespace(cs=shares, terms=("cvec-pos", "pos-pos"))
        return SimpleNamespace(heads=[(0, 0), (0, 1), (1, 0), (1, 1)], shares=lambda: summary)

    def split(found: Any, heads: Any, **options: Any) -> Any:
        seen["heads"].append((heads, options))
        return SimpleNamespace(image=lambda: "an image")

    module.basis_of, module.split_scores = basis_of, split_scores
    module.split_view = SimpleNamespace(split=split)
    steps = [{"step": 0}]
    figures = module._figures(setup, steps, {"carry": "model"}, "source")
    assert list(figures) == ["scores", "geometry", "head_carry", "cosines_carry"]
    scores = ("exact_in", "digits_in", "exact_out", "digits_out")
    geometry = (
        *("fracture", "fracture_digits", "roughness", "pos_pos_fracture", "wpe_fracture"),
        *("wpe_roughness", "low_frequency", "wpe_low_frequency"),
    )
    for name, measures in (("scores", scores), ("geometry", geometry)):
        assert figures[name][1:3] == (steps, measures)
        assert (figures[name][3]["by"], figures[name][3]["source"]) == ("task", "source")
    assert figures["scores"][3]["caption"] == (
        "Numbers of 3 to 4 digits are in, of 1 to 2 out; exact counts whole answers, digits single "
        "ones."
    )
    assert figures["geometry"][3]["caption"].startswith("Measured on lines of 4 digits, means over")
    (tokens,), (scored,) = seen["tokens"], seen["scored"]
    assert tokens.shape == (32, 14), "no newline"
    assert torch.equal(scored, tokens[:1])
    labels = ["\n+0123456789="[i] for i in tokens[0].tolist()]
    assert (labels[4], labels[9]) == ("+", "=")
    (heads, options) = seen["heads"][0]
    assert heads == [(1, 0)], "the largest share of pos-pos; a head without shares is none"
    assert (options["tokens"], options["centered"]) == (labels, True)
    assert options["panels"] == ("pos-pos", "pos-cvec", "cvec-pos", "cvec-cvec")
    assert figures["head_carry"] == "an image"
    basis = (("model", "carry"), "carry")
    cosines = {"labels": labels, "title": "Cosines of position, carry"}
    assert figures["cosines_carry"] == ("cosines", basis, cosines)
    lines = arithmetic.aligned_tokens("carry", 32, 4, seed=7)
    assert torch.equal(tokens, lines), "the lines that are measured"
