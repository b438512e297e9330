"""The command line: four commands whose files hold what the functions give, and mistakes that are
one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import tl_geometry as tlg
from tests.lib.models import VOCAB, hf_model, tokenizer
from tests.tables.refusals.commands import exit_code
from tl_geometry.cli import app, inputs

PROMPT = "def f(width, height):\n    return"
OTHER = "def f(height, width):\n    return"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a text of its words, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("models") / "small"
    hf_model("llama", max_position_embeddings=1024).save_pretrained(path)
    tokenizer().save_pretrained(path)
    ids = torch.randint(4, VOCAB, (2200,), generator=torch.Generator().manual_seed(0)).tolist()
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in ids))
    return path


def run(*words: object, code: int = 0) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_mistakes_are_found_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    lines = (
        "fit --corpus full/mine.txt --corpus full/mine.txt, trace a b --answer c --dtype int8, "
        "trace a --answer c --basis absent, trace a --answer c --keep nan, check --device toaster, "
        "trace a --answer c --out ~/full, trace a --answer c --keep 2, trace a --answer c --mlp x, "
        "report --corpus absent.txt, report --sections bodies, trace a b c --answer d, fit --help, "
        "fit --out basis.npz, report --dtype int8, report --out full, fit --dtype int8, nonsense, "
        "report --seed -1, fit --shard 3/2, fit --seed -1, report full, --help, fit --contexts 0, "
        "report --contexts 63, fit --length 1, fit --batch-size 0, fit --shard 0/2"
    )
    wrong = [line.split() for line in lines.split(", ")]
    code = f"""
import sys
sys.path.insert(0, {str(Path(tlg.__file__).parents[1])!r})
from tl_geometry import cli
for words in {wrong!r}:
    sys.argv = ["tl-geometry", *words]
    try:
        cli.main()
    except SystemExit as ended:
        assert ended.code == (0 if "--help" in words else 2), words
    assert "torch" not in sys.modules and "rich" not in sys.modules, words
import tl_geometry
tl_geometry.Result
print("torch" in sys.modules)
"""
    options: dict[str, Any] = {"cwd": tmp_path, "env": os.environ | {"HOME": str(tmp_path)}}
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("True")  # the detector detects
    assert done.stderr.count("tl-geometry: ") == len(wrong) - 2


def test_shards_join_to_the_basis_that_the_function_gives(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = directory / "text.txt"
    words = ["fit", directory, "--corpus", text, "--length", 16, "--quiet", "--full"]
    paths = [tmp_path / f"{i}.safetensors" for i in (1, 2, 3)]
    for i, path in enumerate(paths, 1):
        assert exit_code([*words, "--shard", f"{i}/3", "--out", path], monkeypatch) == 0
        said = capsys.readouterr()
        assert said.out.startswith(f"{path}: PositionContext(")
        assert said.err == ""
    parts = [tlg.PositionContext.load(path) for path in paths]
    joined, model = tlg.PositionContext.merge(parts), tlg.load(directory)
    whole = tlg.decompose(model, tlg.windows(model, text, 16), progress=False)
    assert max(part.contexts for part in parts) < joined.contexts == whole.contexts
    assert len(inputs.windows_of(tlg.view(model), [text], 16, None, most=9999)) == whole.contexts
    assert torch.allclose(joined.mean, whole.mean, rtol=1e-6, atol=1e-8)
    assert torch.allclose(joined.pos, whole.pos, rtol=1e-6, atol=1e-7)
    # a file that is there stays, but with --force
    before, again = paths[0].read_bytes(), [*words[:4], "--contexts", 2, "--no-bos", "--seed", 3]
    again += ["--out", paths[0]]
    assert exit_code(again, monkeypatch) == 2
    assert paths[0].read_bytes() == before
    capsys.readouterr()
    assert exit_code([*again, "--force"], monkeypatch) == 0
    assert capsys.readouterr().err, "a bar"
    cut: dict[str, Any] = {"n": 2, "prepend_bos": False, "seed": 3}
    less = tlg.PositionContext.load(paths[0])
    some = tlg.decompose(model, tlg.windows(model, text, 512, **cut), progress=False)
    assert torch.allclose(less.mean, some.mean, rtol=1e-6, atol=1e-8)
    assert (less.has_second_moments, parts[0].has_second_moments) == (False, True)


def test_trace_writes_the_graph_of_the_function(directory: Path, tmp_path: Path) -> None:
    assert run("--version") == f"tl-geometry {tlg.__version__}\n"
    out = tmp_path / "graph"
    options = ("--answer", " w", "--other", " h", "--keep", 0.6)
    said = run("trace", PROMPT, *options, "--out", out)
    model = tlg.zoo.embedded()
    graph = tlg.trace_logit(model, PROMPT, " w", other=" h", keep=0.6)
    assert {path.name for path in out.iterdir()} == {
        *("graph.html", "graph.json", "graph-metadata.json"),
        *("nodes.csv", "edges.csv", "tokens.csv"),
    }
    nodes, edges = pd.read_csv(out / "nodes.csv"), pd.read_csv(out / "edges.csv")
    assert nodes["value"].to_numpy() == pytest.approx(graph.nodes["value"].to_numpy(), abs=1e-4)
    assert (list(nodes), len(edges)) == (list(graph.nodes), len(graph.edges))
    parts = pd.read_csv(out / "tokens.csv")["value"].tolist()
    assert sum(parts) == pytest.approx(graph.value, abs=1e-4)
    assert json.loads((out / "graph.json").read_text())["nodes"]
    assert re.fullmatch(rf".*graph\.html: T = .*, {len(nodes)} nodes, {len(edges)} edges\n", said)
    # of another model, which is named first
    run("trace", directory, "w5 w6 w7", "--answer", "w9", "--out", tmp_path / "named")
    named = tlg.trace_logit(tlg.load(directory), "w5 w6 w7", "w9")
    parts = pd.read_csv(tmp_path / "named" / "tokens.csv")["value"].to_numpy()
    assert parts == pytest.approx(named.tokens().df["value"].to_numpy(), abs=1e-4)
    # between two prompts, and over what is there if asked
    run("trace", PROMPT, *options, "--counterfactual", OTHER, "--out", tmp_path / "two")
    two = tlg.trace_logit(model, PROMPT, " w", other=" h", keep=0.6, counterfactual=OTHER)
    written = pd.read_csv(tmp_path / "two" / "nodes.csv")["value"].to_numpy()
    assert written == pytest.approx(two.nodes["value"].to_numpy(), abs=1e-4)
    run("trace", PROMPT, *options, "--out", out, "--force")
    # a carriage return within a token ends no row
    text = "x = 1\r\ny = x"
    run("trace", text, "--answer", " w", "--processed", "--out", tmp_path / "lines")
    written = pd.read_csv(tmp_path / "lines" / "tokens.csv", keep_default_na=False)
    found = tlg.trace_logit(tlg.zoo.embedded(processed=True), text, " w").tokens().df
    assert written["token"].tolist() == found["token"].tolist()
    assert any("\r" in token for token in found["token"])
    assert written["value"].to_numpy() == pytest.approx(found["value"].to_numpy(), abs=1e-4)


@pytest.mark.slow
def test_report_takes_its_options(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("report", directory, "--corpus", directory / "text.txt", "--contexts", 64)
    words += ("--length", 16, "--sections", "weights, overview", "--seed", 3, "--quick")
    words += ("--dtype", "float64", "--processed", "--no-bos", "--out", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    assert exit_code(words, monkeypatch) == 2
    words += ("--force",)
    said = run(*words)
    assert re.match(r"Loading[\s\S]*Weights and the sphere: about[\s\S]*report\.html\n$", said)
    facts = dict(pd.read_csv(tmp_path / "out" / "overview.csv").to_numpy().tolist())
    assert "processed" in facts["model"]
    assert "float64" in facts["weights"]
    assert facts["corpus"].startswith("text.txt: 64 windows of 16 tokens")
    assert (facts["seed"], facts["first token"]) == ("3", "text (no BOS)")
    assert {path.stem for path in (tmp_path / "out").glob("*.csv")} == {
        *("weights_qk", "readout_ov", "paths", "overview")
    }
    # of a table that is damaged the rest is read, and the exit code says so
    (tmp_path / "out" / "paths.csv").write_text("")
    assert exit_code(words, monkeypatch) == 1
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out' / 'report.html'}\n"
    assert "could not be computed: " in printed.err
    record = json.loads((tmp_path / "out" / "report.json").read_text())
    assert record["command"] == ["tl-geometry", *map(str, words)]
    assert len(record["failed"]) == 1
    # a folder of a report is none of a trace
    trace = ["trace", PROMPT, "--answer", " w", "--out", tmp_path / "out"]
    assert exit_code(trace, monkeypatch) == 2


def test_narrow_models_take_one_thread_and_a_keyboard_stops(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    try:
        for chosen, threads in (("2", 2), (None, 1)):
            torch.set_num_threads(2)
            given = {"OMP_NUM_THREADS": None, "MKL_NUM_THREADS": chosen}
            assert CliRunner().invoke(app, ["check", str(directory)], env=given).exit_code == 0
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inputs, "load_model", stop)
    assert exit_code(["check"], monkeypatch) == 130
