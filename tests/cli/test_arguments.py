"""What a user mistypes is one line on standard error and exit code 2, before torch is imported;
stopped is 130."""

from __future__ import annotations

import errno
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tl_geometry import cli, papers
from tl_geometry.base.errors import GeometryError
from tl_geometry.cli import arguments, ending
from tl_geometry.cli.options import EXAMPLES
from tl_geometry.corpus import text_files
from tl_geometry.decomposition import processes
from tl_geometry.report import build
from tl_geometry.zoo.inputs import Inputs

WRONG: list[tuple[list[str], str]] = [
    (["fit", "--contexts", "-5"], "--contexts: expected 1 or more, got -5"),
    (["fit", "--contexts", "0"], "--contexts: expected 1 or more, got 0"),
    (["fit", "--length", "0"], "--length: expected 2 or more, got 0"),
    (["fit", "--length", "1"], "--length: expected 2 or more, got 1"),
    (["fit", "--batch-size", "0"], "--batch-size: expected 1 or more, got 0"),
    (["fit", "--seed", "-1"], "--seed: expected 0 or more, at most 4294967295, got -1"),
    (["fit", "--seed", str(2**64)], "--seed: expected 0 or more, at most 4294967295"),
    (["fit", "--out", "basis.npz"], "--out: expected a name ending in .safetensors, got basis.npz"),
    (["fit", "--out", "."], "--out: expected a file to write, got the folder ."),
    (
        ["fit", "--corpus", "ids.npy", "--corpus", "text.txt"],
        "--corpus: expected one existing .npy file",
    ),
    (
        ["fit", "--corpus", "ids.npy", "--length", "8"],
        "--length, --bos: expected none with a token file",
    ),
    (["report", "--contexts", "-1"], "--contexts: expected 1 or more"),
    (["report", "--seed", "-1"], "--seed: expected 0 or more"),
    (["report", "--length", "-2"], "--length: expected 2 or more"),
    (["report", "--corpus", "nope.txt"], "--corpus: expected existing text files, got nope.txt"),
    (["report", "--corpus", "folder"], "--corpus: expected existing text files, got folder"),
    (
        ["report", "--corpus", "latin.txt"],
        "--corpus: expected text in utf-8, got latin.txt, where byte 3 (0xe9) is none. Use "
        "--encoding",
    ),
    (
        ["report", "--corpus", "empty.txt"],
        "--corpus: expected files with text in them, got empty.txt empty",
    ),
    (["report", "--corpus", "zeros.txt"], "--corpus: expected text files, got zeros.txt"),
    (
        ["report", "--corpus", "ids.npy"],
        "--corpus: expected text files, got ids.npy. Use tl-geometry fit",
    ),
    (
        ["report", "--corpus", "text.txt", "--corpus", "text.txt"],
        "--corpus: expected each file once, got text.txt twice",
    ),
    (
        ["report", "--corpus", "text.txt", "--corpus", "./folder/../text.txt"],
        "--corpus: expected each file once",
    ),
    (
        ["report", "--corpus", "text.txt", "--encoding", "klingon"],
        "--encoding: expected an encoding that Python knows",
    ),
    (["report", "--out", "text.txt"], "--out: expected a folder, got the file text.txt"),
    (["report", "--out", "text.txt/deeper"], "--out: expected a folder, got the file text.txt"),
    (["report", "--out", "/proc/none/there"], "--out: expected a folder that can be written to"),
    (
        ["report", "--out", "experiment"],
        "--out: expected a folder of its own, got experiment with results of nanogpt",
    ),
    (
        ["report", "--budget", "soon"],
        "--budget: expected one of 'quick', 'default', 'full', got 'soon'",
    ),
    (["report", "--budget", "10m"], "--budget: expected one of 'quick', 'default', 'full'"),
    (["heads", "--seed", str(2**32)], "--seed: expected 0 or more, at most 4294967295"),
    (["experiment", "addition", "--seeds", str(2**64)], "--seeds: expected 0 or more, at most"),
    (["fit", "--out", f"{'x' * 300}.safetensors"], "--out: expected a name of at most 180 bytes"),
    (["report", "--out", "x" * 300], "--out: expected a name of at most 180 bytes"),
    (["readout", "--out", "x" * 300], "--out: expected a name of at most 180 bytes"),
    (
        ["report", "--sections", "heads,tails"],
        "--sections: expected some of overview, basis, heads, measures, weights, flow, got tails",
    ),
    (["report", "--sections", ","], "--sections: expected some of"),
    (["report", "--dtype", "float8"], "--dtype: expected one of 'float32'"),
    (["report", "--class", "sheep"], "--class: expected one of 'bridge', 'hooked'"),
    (["report", "--device", "tpu"], "--device: expected cpu, cuda, cuda:1 or mps, got 'tpu'"),
    (
        ["report", "folder"],
        "model: expected a Hugging Face directory with config.json, or a name that "
        "TransformerLens knows, got folder",
    ),
    (["report", "./absent"], "got no directory ./absent"),
    (["report", "text.txt"], "got a file text.txt"),
    (["report", ""], "model: expected a name, a directory, or nothing for the embedded model"),
    (["heads", "--sections", "flow"], "No such option: --sections"),
    (["weights", "--seed", "-1"], "--seed: expected 0 or more"),
    (["trajectories", "--budget", "x"], "--budget: expected one of 'quick', 'default', 'full'"),
    (["check", "folder"], "model: expected a Hugging Face directory"),
    (["check", "--dtype", "int8"], "--dtype: expected one of"),
    (["readout", "--layer", "-1"], "--layer: expected 0 or more"),
    (["readout", "--head", "-1"], "--head: expected 0 or more"),
    (["readout", "--weights", "VO"], "--weights: expected one of 'QK', 'OV', got 'VO'"),
    (["readout", "--k", "0"], "--k: expected 1 or more"),
    (["readout", "--out", "text.txt/x.csv"], "--out: expected a folder, got the file text.txt"),
    (["trace", "a b"], "Missing option '--target'"),
    (["trace", "gpt2", "a", "b", "--target", "c"], "PROMPT: expected a prompt, or a model and a"),
    (["trace", "", "--target", "c"], "PROMPT: expected a text, got none"),
    (["trace", "folder", "a", "--target", "c"], "model: expected a Hugging Face directory"),
    (["trace", "a", "--target", "c", "--keep", "0"], "--keep: expected a share above 0, at most 1"),
    (["trace", "a", "--target", "c", "--keep", "nan"], "--keep: expected a share above 0"),
    (["trace", "a", "--target", "c", "--mlp", "melted"], "--mlp: expected one of 'frozen', 'leaf'"),
    (["trace", "a", "--target", "c", "--basis", "text.txt"], "--basis: expected a file of tl-geom"),
    (["trace", "a", "--target", "c", "--basis", "absent"], "--basis: expected a file of tl-geomet"),
    (["trace", "a", "--target", "c", "--dtype", "float8"], "--dtype: expected one of 'float32'"),
    (
        ["trace", "a", "--target", "c", "--out", "experiment"],
        "--out: expected a folder of its own, got experiment with results of nanogpt",
    ),
    (
        ["reproduce", "nothing"],
        "work: expected one of 'song-zhong', 'lines-of-thought', 'traveling-words', got 'nothing'",
    ),
    (["reproduce", "song-zhong", "--corpus", "nope.txt"], "--corpus: expected existing text files"),
    (["reproduce", "song-zhong", "--topics", "nope.txt"], "--topics: expected existing text files"),
    (
        ["reproduce", "lines-of-thought", "--topics", "text.txt"],
        "--topics: expected none with lines-of-thought",
    ),
    (["reproduce", "song-zhong", "--contexts", "0"], "--contexts: expected 2 or more"),
    (["reproduce", "song-zhong", "--model", "folder"], "model: expected a Hugging Face directory"),
    (
        ["experiment", "cooking"],
        "experiment: expected one of 'randomisation', 'addition', 'nanogpt', got 'cooking'",
    ),
    (
        ["experiment", "addition", "--scale", "huge"],
        "--scale: expected one of 'smoke', 'cpu', 'paper', got 'huge'",
    ),
    (["experiment", "addition", "--seeds", "-1"], "--seeds: expected 0 or more"),
    (
        ["experiment", "nanogpt", "--text", "nope.txt"],
        "--text: expected existing text files, got nope.txt",
    ),
    (
        ["experiment", "nanogpt", "--text", "latin.txt"],
        "--text: expected text in utf-8, got latin.txt",
    ),
    (
        ["experiment", "addition", "--out", "experiment"],
        "--out: expected a folder of its own, got experiment with results of nanogpt",
    ),
    (["nonsense"], "No such command 'nonsense'"),
    (["report", "--lenght", "8"], "No such option: --lenght"),
    (["report", "--length", "eight"], "Invalid value for '--length'"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files of every wrong kind, and to be in it."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text.txt").write_text("some text\n" * 20)
    (tmp_path / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 20)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "zeros.txt").write_bytes(b"a\0b")
    (tmp_path / "ids.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "run.json").write_text(
        '{"written_by": "tl-geometry", "experiment": "nanogpt"}'
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "argv", ["tl-geometry", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[" ".join(a) for a, _ in WRONG])
def test_a_wrong_argument_is_one_line_and_exit_2(
    arguments: list[str],
    text: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(arguments, monkeypatch) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1
    assert err.startswith("tl-geometry: ")
    assert text in err
    assert out == ""
    assert not (place / "tl-geometry-report").exists() or not any(
        (place / "tl-geometry-report").iterdir()
    )


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"]])
def test_help_loads_neither_rich_nor_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom tl_geometry import cli\n"
        f"sys.argv = ['tl-geometry', *{arguments!r}]\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "loaded = lambda: [m for m in ('rich', 'torch') if m in sys.modules]\n"
        "print(loaded(), file=sys.stderr)\n"
        "import rich, torch\nprint(loaded(), file=sys.stderr)"  # the twin
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--help" in done.stdout
    assert done.stderr.splitlines()[-2:] == ["[]", "['rich', 'torch']"]


def test_arguments_are_checked_before_torch_is_imported(place: Path) -> None:
    code = (
        "import sys\nfrom tl_geometry import cli\n"
        f"for arguments in {[a for a, _ in WRONG]!r}:\n"
        "    sys.argv = ['tl-geometry', *arguments]\n"
        "    try:\n        cli.main()\n"
        "    except SystemExit as e:\n        assert e.code == 2, arguments\n"
        "    assert 'torch' not in sys.modules, arguments\n"
        "import tl_geometry\ntl_geometry.Provenance\nprint('torch' in sys.modules)"
    )
    root = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "True"  # the detector detects


def test_every_option_says_what_it_is() -> None:
    import typer.main

    group: Any = typer.main.get_command(cli.app)
    silent = [
        f"{name} {p.name}"
        for name, command in group.commands.items()
        for p in command.params
        if not p.help and p.name != "help"
    ]
    assert not silent
    assert {
        "report",
        "heads",
        "weights",
        "trajectories",
        "fit",
        "check",
        "readout",
        "trace",
        "reproduce",
        "experiment",
    } == set(group.commands)


def test_every_command_has_an_example_that_parses() -> None:
    import typer.main

    group: Any = typer.main.get_command(cli.app)
    assert set(EXAMPLES) == set(group.commands)
    for name, command in group.commands.items():
        program, said, *words = shlex.split(EXAMPLES[name])
        assert (program, said) == ("tl-geometry", name)
        command.make_context(name, list(words))
        assert EXAMPLES[name] in command.epilog
    with pytest.raises(ending.USAGE):
        group.commands["check"].make_context("check", ["--planted"])


def test_the_version_and_being_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tl_geometry

    assert run(["--version"], monkeypatch) == 0
    assert capsys.readouterr().out == f"tl-geometry {tl_geometry.__version__}\n"

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Inputs, "load", stop)
    assert run(["check"], monkeypatch) == 130
    said = "tl-geometry: stopped; nothing was kept [check]\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "basis.safetensors"),
            "No space left on device: basis.safetensors",
        ),
        (OSError(errno.EACCES, "Permission denied", "x"), "Permission denied: x"),
        (
            type("SafetensorError", (Exception,), {})(
                "I/O error: No space left on device (os error 28)"
            ),
            "I/O error",
        ),
    ],
)
def test_a_full_disk_is_one_line(
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Inputs, "load", fail)
    assert run(["check"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert text in said
    assert len(said.splitlines()) == 1


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "of ours", "x")

    monkeypatch.setattr(Inputs, "load", fail)
    monkeypatch.setattr(sys, "argv", ["tl-geometry", "check"])
    with pytest.raises(FileNotFoundError):
        cli.main()


@pytest.mark.parametrize(
    ("failed", "code"), [({"heads": "ZeroDivisionError: planted"}, 1), ({}, 0)]
)
def test_a_section_that_failed_is_exit_1(
    failed: dict[str, str],
    code: int,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(build, "build", lambda *_, **__: {"sections": ["A"], "failed": failed})
    assert run(["report", "--out", "made"], monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == "made/report.html: A\n"
    assert err.count("\n") == len(failed)
    assert ("heads: ZeroDivisionError: planted" in err) == bool(failed)


def test_files_with_one_name_are_told_apart(tmp_path: Path) -> None:
    for name in ("a/x.txt", "b/x.txt", "b/c/x.txt", "y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    paths = [tmp_path / "a/x.txt", tmp_path / "b/x.txt"]
    assert text_files.read_texts(paths) == (["a/x.txt", "b/x.txt"], ["a/x.txt", "b/x.txt"])
    assert text_files.text_names([tmp_path / "y.txt", tmp_path / "a/x.txt"]) == ["y.txt", "x.txt"]


def test_other_encodings_and_names(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("\xe9t\xe9\r\n".encode("latin-1"))
    assert text_files.read_texts([path], "latin-1")[0] == ["\xe9t\xe9\n"]
    path.write_bytes("\ufeff\xe9t\xe9".encode())
    assert text_files.read_texts([path])[0] == ["\xe9t\xe9"]
    path.write_bytes("\xe9t\xe9".encode("utf-16"))
    assert text_files.read_texts([path], "utf-16")[0] == ["\xe9t\xe9"]
    with pytest.raises(
        GeometryError, match=r"expected text files, got latin.txt. Use .* --encoding utf-16"
    ):
        text_files.read_texts([path])
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9$x$.txt"))
    odd.write_text("text")
    assert text_files.read_texts([odd])[1] == ["caf\\xe9$x$.txt"]
    path.write_bytes(b"\xe9t\xe9")
    with pytest.raises(GeometryError, match="byte 0"):
        text_files.read_texts([path])


def test_torchrun_without_its_environment_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        GeometryError,
        match="WORLD_SIZE=2: expected the environment that torchrun makes, got no RANK, "
        "MASTER_ADDR",
    ):
        processes.launched("cpu").__enter__()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(GeometryError, match="a number of processes"):
        processes.launched("cpu").__enter__()


def test_an_experiment_keeps_to_its_folder(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "scale": "smoke",
        "changes": ["steps=1"],
        "out": tmp_path / "made",
        "progress": False,
    }
    papers.experiment("addition", **options)
    before = (tmp_path / "made" / "run.json").read_text()
    with pytest.raises(GeometryError, match="with results of addition"):
        papers.experiment("nanogpt", **options)
    assert (tmp_path / "made" / "run.json").read_text() == before


def test_the_page_of_an_experiment_names_its_texts(tmp_path: Path) -> None:
    for name in ("roses.txt", "thorns <b>.txt"):
        (tmp_path / name).write_text("a rose is a rose is a rose. " * 200)
    papers.experiment(
        "nanogpt",
        scale="smoke",
        changes=["steps=1"],
        texts=[tmp_path / "roses.txt", tmp_path / "thorns <b>.txt"],
        out=tmp_path / "made",
        progress=False,
    )
    page = (tmp_path / "made" / "report.html").read_text()
    assert "data: roses.txt, thorns &lt;b&gt;.txt." in page


def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(GeometryError, match="can be written to"):
            arguments.folder(tmp_path / "new")
        tmp_path.chmod(stat.S_IRWXU)
    arguments.folder(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
