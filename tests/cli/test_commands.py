"""Commands as a user gives them: options that reach the results."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tl_geometry as tlg
from tests.reports import model_directory
from tl_geometry import zoo
from tl_geometry.base.errors import GeometryError
from tl_geometry.cli import app
from tl_geometry.report.inputs import Inputs


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "code.txt"
    path.write_text(
        "".join(f"def f{i}(x):\n    return x * {i} + y[{i % 7}]\n\n" for i in range(60))
    )
    return path


def test_windows_have_at_least_two_tokens_and_at_most_those_of_the_model(text: Path) -> None:
    view = tlg.view(zoo.embedded())
    for length in (2, view.n_ctx):
        inputs = Inputs(corpus=(text,), contexts=3, length=length)
        assert inputs.windows(view, inputs.texts()).tokens.shape == (3, length)
    with pytest.raises(GeometryError, match=f"--length: expected 2 to {view.n_ctx} tokens"):
        Inputs(corpus=(text,), length=view.n_ctx + 1).tokens(view)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a tokenizer and a text of its words, as a Hugging Face directory."""
    return model_directory(tmp_path_factory.mktemp("models") / "small", "gpt2")


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_planes_are_written_where_heads_are_rotated(architecture: str, tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "small", architecture)
    sizes = ["--corpus", str(folder / "text.txt"), "--contexts", "32", "--length", "16"]
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["heads", str(folder), *sizes, "--out", str(out), "--quiet", "--planes"]
    )
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text()
    there = {path.stem for path in out.glob("*.csv")}
    assert {"bands", "planes"} & there == (
        {"bands", "planes"} if architecture == "llama" else set()
    )
    if architecture == "gpt2":
        assert "rotary planes: left out, because the model has no rotary embedding" in page
        return
    assert "A rotary embedding turns pairs of coordinates" in page
    rows = (out / "planes.csv").read_text().splitlines()
    assert rows[0] == "layer,head,plane,wavelength,band,term,cs,gs"
    assert len(rows) == 1 + 2 * 4 * 4 * 9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "title", "tables"),
    [
        ("heads", "What drives each head", {"heads"}),
        (
            "weights",
            "Weights and the sphere",
            {"weights_qk", "weights_ov", "readout_ov", "paths", "surrogates"},
        ),
        (
            "trajectories",
            "Trajectories as a flow",
            {"flow", "flow_nulls", "skipped_layers", "truncation"},
        ),
    ],
)
def test_commands_write_their_sections_with_the_options_given(
    command: str, title: str, tables: set[str], directory: Path, tmp_path: Path
) -> None:
    options = [
        "--corpus",
        str(directory / "text.txt"),
        "--contexts",
        "64",
        "--length",
        "16",
        "--out",
        str(tmp_path),
        "--quiet",
        "--json",
    ]
    done = CliRunner().invoke(
        app, [command, str(directory), *options, "--processed", "--dtype", "float64", "--seed", "3"]
    )
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["sections"] == ["What was analysed", title]
    expected = {
        "model": "small",
        "processed": True,
        "dtype": "float64",
        "seed": 3,
        "contexts": 64,
        "has_bos": True,
    }
    assert {k: run["provenance"][k] for k in expected} == expected
    assert {p.stem for p in tmp_path.glob("*.csv")} == {"overview", *tables}
    assert title in (tmp_path / "report.html").read_text()


def test_check_and_readout_of_a_directory(directory: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(directory), "--processed", "--dtype", "float64"])
    assert done.exit_code == 0, done.output
    assert "processed, float64, cpu" in done.output
    assert "verified, state l+1 is the output of block l" in done.output
    options = [
        "--layer",
        "1",
        "--head",
        "2",
        "--weights",
        "QK",
        "--k",
        "3",
        "--processed",
        "--out",
        str(tmp_path / "read.csv"),
    ]
    done = CliRunner().invoke(app, ["readout", str(directory), *options])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "read.csv").read_text().splitlines()))
    assert rows
    assert f"{len(rows)} rows" in done.output
    assert {(row["layer"], row["head"]) for row in rows} == {("1", "2")}
    assert len(rows[0]["queries"].split()) == 3


def test_commands_and_options_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"_TL_GEOMETRY_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    for typed, wanted in (("re", {"report", "readout"}), ("fi", {"fit"})):
        environment = {**words, "COMP_WORDS": f"tl-geometry {typed}"}
        done = CliRunner().invoke(app, [], prog_name="tl-geometry", env=environment)
        assert set(done.output.split()) == wanted
