"""The command line: four commands whose files hold what the functions give, and mistakes that are
one line and exit code 2."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import typer.main
from typer.testing import CliRunner

import tl_geometry as tlg
from tests.lib.models import VOCAB, hf_model, tokenizer
from tl_geometry import cli
from tl_geometry.cli import app, inputs

PROMPT = "def f(width, height):\n    return"
OTHER = "def f(height, width):\n    return"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a text of its words, as a Hugging Face directory."""
    path = tmp_path_factory.mktemp("models") / "small"
    hf_model("llama").save_pretrained(path)
    tokenizer().save_pretrained(path)
    ids = torch.randint(4, VOCAB, (1100,), generator=torch.Generator().manual_seed(0)).tolist()
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in ids))
    return path


def run(*words: object, code: int = 0) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def ended(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a whole command line."""
    monkeypatch.setattr(sys, "argv", ["tl-geometry", *words])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return int(stopped.value.code or 0)


def test_there_are_four_commands_each_with_help_and_an_example_that_parses() -> None:
    group: Any = typer.main.get_command(app)
    assert set(group.commands) == {"report", "trace", "fit", "check"}
    assert run("--version") == f"tl-geometry {tlg.__version__}\n"
    for name, command in group.commands.items():
        assert not [p.name for p in command.params if not p.help and p.name != "help"]
        on = {p.name for p in command.params if isinstance(p.default, int) and p.default}
        assert on <= {"position"}  # -1, the last
        program, said, *words = shlex.split(command.epilog.removeprefix("For example: "))
        assert (program, said) == ("tl-geometry", name)
        command.make_context(name, list(words))
    with pytest.raises(cli.USAGE):
        group.commands["check"].make_context("check", ["--planted"])


def test_mistakes_are_found_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    lines = (
        "fit --corpus full/mine.txt --corpus full/mine.txt, trace a b --answer c --dtype int8, "
        "trace a --answer c --basis absent, trace a --answer c --keep nan, check --device toaster, "
        "trace a --answer c --out full, trace a --answer c --keep 2, trace a --answer c --mlp no, "
        "report --corpus absent.txt, report --sections bodies, trace a b c --answer d, fit --help, "
        "fit --out basis.npz, report --dtype int8, report --out full, fit --dtype int8, nonsense, "
        "report --seed -1, fit --shard 3/2, fit --seed -1, report full, --help"
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
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("True")  # the detector detects
    assert done.stderr.count("tl-geometry: ") == len(wrong) - 2


def test_shards_join_to_the_basis_that_the_function_gives(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = directory / "text.txt"
    words = ["fit", str(directory), "--corpus", str(text), "--length", "16", "--quiet", "--full"]
    paths = [tmp_path / f"{i}.safetensors" for i in (1, 2, 3)]
    for i, path in enumerate(paths, 1):
        assert ended([*words, "--shard", f"{i}/3", "--out", str(path)], monkeypatch) == 0
    parts = [tlg.PositionContext.load(path) for path in paths]
    joined, model = tlg.PositionContext.merge(parts), tlg.load(directory)
    whole = tlg.decompose(model, tlg.windows(model, text, 16), progress=False)
    assert max(part.contexts for part in parts) < joined.contexts == whole.contexts
    assert len(inputs.windows_of(tlg.view(model), [text], 16, None, most=9999)) == whole.contexts
    assert torch.allclose(joined.mean, whole.mean, rtol=1e-6, atol=1e-8)
    assert torch.allclose(joined.pos, whole.pos, rtol=1e-6, atol=1e-7)
    # a file that is there stays, but with --force
    before, again = paths[0].read_bytes(), [*words, "--contexts", "8", "--out", str(paths[0])]
    assert ended(again, monkeypatch) == 2
    assert paths[0].read_bytes() == before
    assert ended([*again, "--force"], monkeypatch) == 0
    assert tlg.PositionContext.load(paths[0]).contexts == 8


def test_trace_writes_the_graph_of_the_function(tmp_path: Path) -> None:
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
    assert re.search(rf"graph\.html: T = .*, {len(nodes)} nodes, {len(edges)} edges", said)
    # between two prompts, and over what is there if asked
    run("trace", PROMPT, *options, "--counterfactual", OTHER, "--out", tmp_path / "two")
    two = tlg.trace_logit(model, PROMPT, " w", other=" h", keep=0.6, counterfactual=OTHER)
    written = pd.read_csv(tmp_path / "two" / "nodes.csv")["value"].to_numpy()
    assert written == pytest.approx(two.nodes["value"].to_numpy(), abs=1e-4)
    run("trace", PROMPT, *options, "--out", out, "--force")
    # a carriage return within a token ends no row
    text = "x = 1\r\ny = x"
    run("trace", text, "--answer", " w", "--out", tmp_path / "lines")
    written = pd.read_csv(tmp_path / "lines" / "tokens.csv", keep_default_na=False)["token"]
    found = tlg.trace_logit(model, text, " w").tokens().df["token"]
    assert written.tolist() == found.tolist()
    assert any("\r" in token for token in found)


@pytest.mark.slow
def test_report_takes_its_options(directory: Path, tmp_path: Path) -> None:
    words = ("report", directory, "--corpus", directory / "text.txt", "--contexts", 40)
    words += ("--length", 16, "--sections", "weights, overview", "--seed", 3, "--quick")
    said = run(*words, "--dtype", "float64", "--processed", "--no-bos", "--out", tmp_path / "out")
    assert re.match(r"Loading[\s\S]*Weights and the sphere: about[\s\S]*report\.html\n$", said)
    facts = dict(pd.read_csv(tmp_path / "out" / "overview.csv").to_numpy().tolist())
    assert "processed" in facts["model"]
    assert "float64" in facts["weights"]
    assert facts["corpus"].startswith("text.txt: 40 windows of 16 tokens")
    assert (facts["seed"], facts["first token"]) == ("3", "text (no BOS)")
    assert {path.stem for path in (tmp_path / "out").glob("*.csv")} == {
        *("weights_qk", "readout_ov", "paths", "overview")
    }
