"""Every option reaches the function that the command calls, and what is not given has the value
that the help names; the functions themselves do not run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tl_geometry as tlg
from tests.cli.test_arguments import run
from tl_geometry.base import run_files
from tl_geometry.base.results import Provenance, Result
from tl_geometry.circuits import trace as tracing
from tl_geometry.cli import arguments, trace_folder
from tl_geometry.decomposition import from_model, processes
from tl_geometry.models import reader
from tl_geometry.papers import experiments, reproduction
from tl_geometry.report import build
from tl_geometry.weights import heads as weight_heads
from tl_geometry.zoo.inputs import Inputs

Seen = list[tuple[tuple[Any, ...], dict[str, Any]]]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder, with inputs that load nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Inputs, "load", lambda inputs, **_: inputs)
    monkeypatch.setattr(Inputs, "tokens", lambda inputs, model: torch.zeros(1, 4).long())


def seen_by(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, result: Callable[[], Any]
) -> Seen:
    """What a function is given from now on; it gives ``result()``."""
    seen: Seen = []

    def called(*given: Any, **options: Any) -> Any:
        seen.append((given, options))
        return result()

    monkeypatch.setattr(module, name, called)
    return seen


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Two(Result):
    """A table of two rows."""

    def columns(self) -> list[str]:
        return ["a", "b"]

    def rows(self) -> list[list[object]]:
        return [[1, 2], [3, 4]]


def table() -> Result:
    return Two(provenance=Provenance())


def basis() -> tlg.PositionContext:
    return tlg.decompose_activations(torch.randn(2, 4, 6, 3))


def checkpoint(path: Path) -> bytes:
    """A file that looks like the checkpoint of a stopped run."""
    metadata = {"schema": json.dumps("tl_geometry/checkpoint/1")}
    save_file({"x": torch.zeros(1)}, path, metadata=metadata)
    return path.read_bytes()


def test_fit_begins_again_only_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, there = Path("basis.checkpoint.safetensors"), list[bool]()
    monkeypatch.setattr(
        from_model,
        "decompose",
        lambda *_, checkpoint, **__: there.append(checkpoint.exists()) or basis(),
    )
    before = checkpoint(place)
    assert run(["fit"], monkeypatch) == 2
    assert "Use --resume to go on with it, or --force" in capsys.readouterr().err
    assert place.read_bytes() == before
    assert there == []
    for word, kept in (("--resume", True), ("--force", False)):
        checkpoint(place)
        assert run(["fit", word], monkeypatch) == 0
        assert there.pop() == kept
        assert not place.exists(), "a finished run needs none"
    assert run(["fit"], monkeypatch) == 0
    assert there == [False], "over the finished basis of an earlier run"


def test_fit_gives_its_options_to_the_function_and_says_what_it_wrote(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = seen_by(monkeypatch, from_model, "decompose", basis)
    assert run(["fit"], monkeypatch) == 0
    assert capsys.readouterr().out.startswith("basis.safetensors: ")
    words = ["--batch-size", "1", "--seed", "3", "--quiet", "--json", "--out", "deep/x.safetensors"]
    assert run(["fit", *words], monkeypatch) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["file"] == "deep/x.safetensors"
    assert said["model"] == tlg.PositionContext.load("deep/x.safetensors").provenance.model
    usual, changed = (options for _, options in seen)
    assert {k: usual[k] for k in ("batch_size", "seed", "progress", "group")} == {
        "batch_size": None,
        "seed": 0,
        "progress": True,
        "group": None,
    }
    assert (changed["batch_size"], changed["seed"], changed["progress"]) == (1, 3, False)
    assert changed["checkpoint"] == Path("deep/x.checkpoint.safetensors")


def test_only_the_first_process_of_a_fit_holds_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_model, "decompose", lambda *_, **__: basis())
    with run_files.lock(Path(".basis.safetensors.lock")):
        for rank, code in (("0", 2), ("1", 0)):
            monkeypatch.setenv("RANK", rank)
            assert run(["fit", "--quiet"], monkeypatch) == code


def test_a_later_process_of_a_fit_takes_its_device_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(processes, "launched", lambda _: nullcontext(("group", "cuda:1", False)))
    loaded: list[Any] = []
    monkeypatch.setattr(Inputs, "load", lambda _, **options: loaded.append(options))
    seen = seen_by(monkeypatch, from_model, "decompose", basis)
    place = Path("basis.checkpoint.safetensors")
    before = checkpoint(place)
    assert run(["fit", "--force"], monkeypatch) == 0
    assert loaded == [{"device": "cuda:1"}]
    assert seen[0][1]["group"] == "group"
    assert capsys.readouterr().out == ""
    assert place.read_bytes() == before
    assert [path.name for path in Path().iterdir()] == [place.name]


def test_a_report_gives_its_options_to_the_function(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"sections": ["A", "B"], "failed": {}}
    seen = seen_by(monkeypatch, build, "build", lambda: made)
    assert run(["report"], monkeypatch) == 0
    assert capsys.readouterr().out == "tl-geometry-report/report.html: A, B\n"
    (request, out), options = seen.pop()
    assert out == Path("tl-geometry-report")
    command = ["tl-geometry", "report"]
    assert options == {"resume": False, "force": False, "progress": True, "command": command}
    assert request.sections == request.names
    assert len(request.sections) == 6
    assert not request.planes
    words = ["report", "--resume", "--force", "--quiet", "--json", "--planes", "--out", "x"]
    assert run([*words, "--sections", " heads , flow,"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out) == made
    (request, out), options = seen.pop()
    assert (out, request.sections, request.planes) == (Path("x"), ("heads", "flow"), True)
    assert (options["resume"], options["force"], options["progress"]) == (True, True, False)
    for command, sections in (
        ("heads", ("overview", "heads")),
        ("weights", ("overview", "weights")),
        ("trajectories", ("overview", "flow")),
    ):
        assert run([command, "--out", command], monkeypatch) == 0
        assert seen.pop()[0][0].sections == sections
    assert run(["weights", "--planes"], monkeypatch) == 2, "planes are of heads"


def test_readout_is_of_the_first_head_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = seen_by(monkeypatch, weight_heads, "token_readout", table)
    assert run(["readout"], monkeypatch) == 0
    assert "3" in capsys.readouterr().out
    assert seen.pop()[1] == {"matrix": "OV", "heads": [(0, 0)], "k": 5}
    words = ["--layer", "2", "--head", "3", "--weights", "QK", "--k", "1", "--out", "a/x.csv"]
    assert run(["readout", *words], monkeypatch) == 0
    assert capsys.readouterr().out == "a/x.csv: 2 rows\n"
    assert seen.pop()[1] == {"matrix": "QK", "heads": [(2, 3)], "k": 1}
    assert Path("a/x.csv").read_text().splitlines() == ["a,b", "1,2", "3,4"]
    assert run(["readout", "--out", "a/x.csv"], monkeypatch) == 2
    assert run(["readout", "--out", "a/x.csv", "--force"], monkeypatch) == 0


@pytest.mark.parametrize("bos_id", [None, 7])
def test_trace_gives_its_options_to_the_function(
    bos_id: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    views: list[Inputs] = []

    def view(inputs: Inputs) -> Any:
        views.append(inputs)
        return SimpleNamespace(bos_id=bos_id)

    monkeypatch.setattr(reader, "as_view", view)
    traced = SimpleNamespace(value=-1.5)
    seen = seen_by(monkeypatch, tracing, "trace_logit", lambda: traced)
    record = {"nodes": 3, "edges": 4}
    saved = seen_by(monkeypatch, trace_folder, "save_graph", lambda: record)
    assert run(["trace", "a b", "--target", " c"], monkeypatch) == 0
    said = "tl-geometry-trace/graph.html: T = -1.5000, 3 nodes, 4 edges\n"
    assert capsys.readouterr().out == said
    (_, prompt, target), options = seen.pop()
    assert (prompt, target) == ("a b", " c")
    usual = {"against": None, "position": -1, "keep": 0.8, "mlp": "frozen", "basis": None}
    assert options == {**usual, "prepend_bos": bos_id is not None}
    assert views.pop().model is None
    assert saved.pop()[1]["settings"] == {**usual, "prompt": "a b", "target": " c"}
    basis().save("basis.safetensors")
    words = ["--against", "d", "--position", "2", "--keep", "1", "--mlp", "leaf", "--json"]
    words += ["--basis", "basis.safetensors", "--no-bos", "--out", "x", "--force"]
    assert run(["trace", "minilm", "a b", "--target", " c", *words], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out) == {"folder": "x", **record}
    options = seen.pop()[1]
    assert options.pop("basis").contexts == 4
    changed = {"against": "d", "position": 2, "keep": 1.0, "mlp": "leaf"}
    assert options == {**changed, "prepend_bos": False}
    assert views.pop().model == "minilm"
    assert saved.pop()[1]["force"]


def test_reproduce_and_experiment_give_their_options_to_the_functions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.txt").write_text("a text")
    seen = seen_by(monkeypatch, reproduction, "reproduce", table)
    assert run(["reproduce", "song-zhong"], monkeypatch) == 0
    given, options = seen.pop()
    assert given == ("song-zhong",)
    nothing = dict.fromkeys(("model", "corpus", "topics", "row", "contexts"))
    assert options == {**nothing, "encoding": "utf-8", "progress": True}
    words = ["--model", "minilm", "--corpus", "a.txt", "--topics", "a.txt", "--row", "GPT-2 OWT"]
    words += ["--contexts", "2", "--encoding", "ascii", "--quiet", "--out", "x.csv"]
    assert run(["reproduce", "song-zhong", *words], monkeypatch) == 0
    assert seen.pop()[1] == {
        "model": "minilm",
        "corpus": (Path("a.txt"),),
        "topics": [Path("a.txt")],
        "row": "GPT-2 OWT",
        "contexts": 2,
        "encoding": "ascii",
        "progress": False,
    }
    assert Path("x.csv").is_file()
    capsys.readouterr()
    seen = seen_by(monkeypatch, experiments, "experiment", table)
    assert run(["experiment", "addition"], monkeypatch) == 0
    assert capsys.readouterr().out.endswith("tl-geometry-experiment/report.html\n")
    (name,), options = seen.pop()
    assert name == "addition"
    assert options.pop("command") == ["tl-geometry", "experiment", "addition"]
    usual = {"scale": "cpu", "out": Path("tl-geometry-experiment"), "seeds": [0], "texts": None}
    rest = {"encoding": "utf-8", "changes": None, "device": "cpu", "progress": True, "force": False}
    assert options == usual | rest
    words = ["--scale", "smoke", "--seeds", "1", "--seeds", "2", "--text", "a.txt", "--quiet"]
    words += ["--set", "steps=4", "--set", "context=9", "--force", "--out", "x"]
    assert run(["experiment", "nanogpt", *words], monkeypatch) == 0
    (name,), options = seen.pop()
    assert name == "nanogpt"
    assert (options["seeds"], options["texts"]) == ([1, 2], [Path("a.txt")])
    assert options["changes"] == ["steps=4", "context=9"]
    assert (options["scale"], options["out"]) == ("smoke", Path("x"))
    assert (options["progress"], options["force"]) == (False, True)


def test_names_of_180_bytes_may_be_written_and_folders_of_255_entered(tmp_path: Path) -> None:
    """In UTF-8, where an é has two."""
    for name, fits in (("a" * 180, True), ("a" * 181, False), ("é" * 90, True), ("é" * 91, False)):
        if fits:
            arguments.folder(tmp_path / name)
            assert (tmp_path / name).is_dir()
        else:
            with pytest.raises(tlg.GeometryError, match="a name of at most 180 bytes"):
                arguments.folder(tmp_path / name)
    arguments.file(tmp_path / ("b" * 255) / "c" / "x.csv")
    arguments.file(tmp_path / ("b" * 255) / "x.csv")
    with pytest.raises(tlg.GeometryError, match="a name of at most 180 bytes"):
        arguments.file(tmp_path / ("b" * 256) / "c" / "x.csv")
    with pytest.raises(tlg.GeometryError, match="a name of at most 180 bytes"):
        arguments.file(tmp_path / "x\0y.csv")


def test_errors_of_file_systems_alone_are_told_in_one_line() -> None:
    wrapped: Any = type("SafetensorError", (Exception,), {})
    other: Any = type("OtherError", (Exception,), {})
    full = "I/O error: No space left on device (os error 28)"
    assert arguments.file_trouble(wrapped(full)) == full
    assert arguments.file_trouble(wrapped("header too large")) is None
    assert arguments.file_trouble(other(full)) is None
    assert arguments.file_trouble(OSError(28, "No space left on device")) == (
        "No space left on device: a file"
    )
    assert arguments.file_trouble(OSError(2, "No such file", "x")) is None
