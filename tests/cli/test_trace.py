"""``tl-geometry trace``: the graph that the function gives, in files that hold its numbers, and no
file that is not ours is touched."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tl_geometry as tlg
from tests.reports import model_directory
from tl_geometry.circuits import LogitGraph
from tl_geometry.cli import app, trace_folder

PROMPT = "def f(width, height):\n    return"


def run(*words: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["trace", *words])
    assert (done.exit_code if done.exception is None else 1) == code, done.output
    return done


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as handle:
        return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LogitGraph, str]:
    """The folder of the embedded model, the graph of the function, and what was printed."""
    out = tmp_path_factory.mktemp("trace") / "graph"
    done = run(PROMPT, "--target", " w", "--against", " h", "--keep", "0.6", "--out", str(out))
    model = tlg.zoo.embedded()
    graph = tlg.trace_logit(model, PROMPT, " w", against=" h", keep=0.6, prepend_bos=True)
    return out, graph, done.output


def test_the_files_hold_the_graph_of_the_function(made: tuple[Path, LogitGraph, str]) -> None:
    out, graph, said = made
    names = {p.name for p in out.iterdir()}
    assert names == {*trace_folder.FILES, "run.json"}
    loaded = LogitGraph.load(out / trace_folder.RESULT)
    assert loaded.names == graph.names
    assert torch.allclose(loaded.weights, graph.weights, rtol=1e-4, atol=1e-6)
    tokens = table(out / trace_folder.TOKENS)
    assert sum(float(row["value"]) for row in tokens) == pytest.approx(graph.value, abs=1e-4)
    assert [row["token"] for row in tokens][:-1] == list(graph.str_tokens)
    nodes = table(out / trace_folder.NODES)
    assert len(nodes) == len(graph.names)
    written = {(row["writer"], int(row["position"])): float(row["value"]) for row in nodes}
    for name, position, value in zip(graph.names, graph.positions, graph.values, strict=True):
        assert written[name, int(position)] == pytest.approx(float(value), rel=1e-3, abs=1e-5)
    file = json.loads((out / trace_folder.GRAPH).read_text("utf-8"))
    logit = next(n for n in file["nodes"] if n["is_target_logit"])
    into = [link["weight"] for link in file["links"] if link["target"] == logit["node_id"]]
    assert sum(into) == pytest.approx(graph.value, abs=1e-4)
    listed = json.loads((out / trace_folder.METADATA).read_text("utf-8"))
    assert listed == {"graphs": [file["metadata"]]}
    assert f"{len(graph.names)} of the graph" in (out / trace_folder.PAGE).read_text("utf-8")
    assert f"T = {graph.value:.4f}, {len(graph.names)} nodes" in said


def test_the_record_says_how_to_repeat_it(made: tuple[Path, LogitGraph, str]) -> None:
    out, graph, _ = made
    record = json.loads((out / "run.json").read_text("utf-8"))
    assert record["command"][0] == "tl-geometry"
    assert record["settings"] == {
        "prompt": PROMPT,
        "target": " w",
        "against": " h",
        "position": -1,
        "keep": 0.6,
        "mlp": "frozen",
        "basis": None,
    }
    assert record["provenance"]["fingerprint"] == graph.provenance.fingerprint
    assert set(record["files"]) == set(trace_folder.FILES)
    assert "torch" in record["versions"]


def test_our_files_are_overwritten_and_no_others(tmp_path: Path) -> None:
    words = (PROMPT, "--target", " w", "--out", str(tmp_path), "--keep", "0.3")
    (tmp_path / "notes.txt").write_text("mine")
    run(*words)
    first = (tmp_path / trace_folder.NODES).read_bytes()
    run(*words, "--position", "3")
    assert (tmp_path / trace_folder.NODES).read_bytes() != first
    (tmp_path / trace_folder.NODES).write_text("mine")
    done = run(*words, code=1)
    assert f"with {trace_folder.NODES}" in str(done.exception)
    assert (tmp_path / trace_folder.NODES).read_text() == "mine"
    run(*words, "--force")
    assert (tmp_path / trace_folder.NODES).read_text() != "mine"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_model_and_its_basis(tmp_path: Path) -> None:
    """A directory, its bases' parts as leaves, MLPs as leaves, JSON on the output."""
    place = model_directory(tmp_path / "small", "llama")
    basis = tmp_path / "basis.safetensors"
    text = str(place / "text.txt")
    options = ["--corpus", text, "--contexts", "12", "--length", "16", "--out", str(basis)]
    done = CliRunner().invoke(app, ["fit", str(place), *options, "--quiet"])
    assert done.exit_code == 0, done.output
    words = (str(place), "w4 w5 w6 w7 w8", "--target", "w9", "--out", str(tmp_path / "out"))
    done = run(*words, "--basis", str(basis), "--mlp", "leaf", "--keep", "1", "--json")
    record = json.loads(done.output.splitlines()[-1])
    assert record["settings"]["basis"] == str(basis)
    graph = LogitGraph.load(tmp_path / "out" / trace_folder.RESULT)
    assert graph.leaf_names == ("mean", "pos", "cvec")
    assert graph.mlp == "leaf"
    assert record["value"] == graph.value
    assert {"mean", "pos", "cvec"} <= set(table(tmp_path / "out" / trace_folder.TOKENS)[0])
