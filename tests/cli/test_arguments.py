"""What a user mistypes is exit code 2 before torch is imported, and every option says what it
is."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tl_geometry import cli
from tl_geometry.cli import ending
from tl_geometry.cli.options import EXAMPLES

pytestmark = pytest.mark.once

WRONG = (
    ["fit", "--contexts", "-5"],
    ["fit", "--out", "basis.npz"],
    ["fit", "--corpus", "ids.npy", "--length", "8"],
    ["report", "--corpus", "latin.txt"],
    ["report", "--corpus", "text.txt", "--corpus", "./folder/../text.txt"],
    ["report", "--out", "experiment"],
    ["report", "folder"],
    ["check", "--dtype", "int8"],
    ["readout", "--k", "0"],
    ["trace", "a", "--target", "c", "--keep", "nan"],
    ["nonsense"],
)


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


@pytest.mark.slow
def test_arguments_are_checked_before_torch_is_imported(place: Path) -> None:
    code = (
        "import sys\nfrom tl_geometry import cli\n"
        f"for arguments in {WRONG!r}:\n"
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
