"""Signals, locks, closed pipes and folders that may not be written to: one line, the right exit
code, and nothing half written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.cli.test_arguments import run
from tests.reports import model_directory
from tl_geometry import cli, papers
from tl_geometry.base import files
from tl_geometry.decomposition import stream_pass
from tl_geometry.zoo import trainer
from tl_geometry.zoo.inputs import Inputs

ROOT = Path(cli.__file__).parents[2]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("models") / "small", "gpt2")


def fit(directory: Path, *words: str) -> list[str]:
    sizes = ["--length", "16", "--contexts", "12", "--batch-size", "2", "--quiet"]
    return ["fit", str(directory), "--corpus", str(directory / "text.txt"), *sizes, *words]


def shell(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "tl_geometry", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        call, text=True, check=False, timeout=60, env=environment, stderr=subprocess.PIPE, **options
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_run_stopped_while_loading_promises_nothing(
    number: signal.Signals,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = lambda *_, **__: os.kill(os.getpid(), number)
    monkeypatch.setattr(Inputs, "load", stop)
    # shells start what runs in their background with interrupts ignored
    shell_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert run(["check"], monkeypatch) == code
    finally:
        signal.signal(signal.SIGINT, shell_handler)
    said = "tl-geometry: stopped; nothing was kept [check]\n"
    assert capsys.readouterr().err == said
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("place", ["between batches", "in the checkpoint"])
def test_a_stopped_fit_says_where_it_goes_on_and_does(
    place: str,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(fit(directory, "--out", "whole.safetensors"), monkeypatch) == 0
    calls = 0
    module, name = (
        (stream_pass, "forward_states") if place == "between batches" else (files, "save_file")
    )
    original = getattr(module, name)

    def stop(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        value = original(*given, **options)
        if calls == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(stream_pass, "SAVE_SHARE", 1e9)  # a checkpoint after each batch
        patch.setattr(module, name, stop)
        assert run(fit(directory, "--out", "x.safetensors"), monkeypatch) == 143
    said = capsys.readouterr().err
    assert "anything finished is kept in x.checkpoint.safetensors, --resume goes on" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "whole.safetensors",
        "x.checkpoint.safetensors",
    ]
    assert run(fit(directory, "--out", "x.safetensors"), monkeypatch) == 2
    assert "Use --resume to go on with it, or --force to begin again" in capsys.readouterr().err
    assert run(fit(directory, "--out", "x.safetensors", "--resume"), monkeypatch) == 0
    whole, resumed = (
        tlg.PositionContext.load(tmp_path / f"{n}.safetensors") for n in ("whole", "x")
    )
    assert torch.equal(whole.pos, resumed.pos)
    assert not (tmp_path / "x.checkpoint.safetensors").exists()


def test_a_stopped_experiment_goes_on_with_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["experiment", "addition", "--scale", "smoke", "--set", "steps=4", "--quiet"]
    words += ["--out", str(tmp_path / "out")]
    written = trainer.write_atomically

    def stop(path: Path, *rest: Any) -> None:
        written(path, *rest)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "write_atomically", stop)
        assert run(words, monkeypatch) == 143
    said = capsys.readouterr().err
    assert f"kept in {tmp_path / 'out'}, the same command goes on from it" in said
    assert not list(tmp_path.rglob("*.part*"))
    assert [p.name for p in tmp_path.rglob("training.safetensors")] == ["training.safetensors"]


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a lock."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom tl_geometry.base.run_files import lock\n"
        f"with lock(Path({str(path)!r})):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("command", ["fit", "heads", "experiment"])
def test_two_runs_do_not_write_to_one_place(
    command: str,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / (".x.safetensors.lock" if command == "fit" else ".tl-geometry.lock")
    words = {
        "fit": fit(directory, "--out", "x.safetensors"),
        "heads": ["heads", "--out", "."],
        "experiment": ["experiment", "addition", "--scale", "smoke", "--out", "."],
    }[command]
    with holder(path) as process:
        assert run(words, monkeypatch) == 2
        said = capsys.readouterr().err
        assert f"where process {process.pid} is at work. Use another --out, or wait" in said
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.exists()  # killed: its lock file is left behind, and blocks nobody
    if command == "fit":
        assert run(words, monkeypatch) == 0
        assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_closed_pipe_is_quiet() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = shell("--help", stdout=writing)
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert shell("--help", stdout=subprocess.PIPE).stdout.count("\n") > 10  # the twin


def test_an_unknown_name_is_refused_without_transformer_lens() -> None:
    code = (
        "import sys\nfrom tl_geometry import cli\nsys.argv = ['x', 'heads', 'nomodel']\n"
        "try:\n    cli.main()\nexcept SystemExit as e:\n    print(e.code)\n"
        "print('torch' in sys.modules, 'transformer_lens' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.split() == ["2", "False", "False"]
    assert "got 'nomodel', which is not among its" in done.stderr
    assert "Use 'olmoe'" in done.stderr


def test_a_read_only_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if os.geteuid() == 0:  # root writes everywhere but here
        place = Path("/proc/self")
    else:
        place = tmp_path / "locked"
        place.mkdir()
        place.chmod(0o500)
    for words in (["heads", "--out", str(place)], ["fit", "--out", str(place / "x.safetensors")]):
        assert run(words, monkeypatch) == 2
        assert "a folder that can be written to" in capsys.readouterr().err


def test_the_names_are_those_of_transformer_lens() -> None:
    from transformer_lens.supported_models import MODEL_ALIASES, OFFICIAL_MODEL_NAMES

    from tl_geometry.models.names import listed_names

    official, known = listed_names()
    assert official == OFFICIAL_MODEL_NAMES
    assert set(known) == {*official, *(a for more in MODEL_ALIASES.values() for a in more)}


def test_seeds_that_no_generator_takes_are_refused_by_functions_too(tmp_path: Path) -> None:
    for seed in (-1, 2**32, 2**64):
        with pytest.raises(tlg.GeometryError, match="--seeds: expected 0 or more, at most"):
            papers.experiment("addition", scale="smoke", seeds=[seed], out=tmp_path / "x")
