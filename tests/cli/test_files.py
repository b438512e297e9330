"""Files that are not ours are neither overwritten nor deleted: a folder of results, the file of a
basis, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.cli.test_arguments import run
from tests.reports import model_directory, report
from tl_geometry.base.errors import GeometryError

pytestmark = pytest.mark.once

SMALL: dict[str, Any] = {"sections": ("overview", "measures")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("models") / "small", "gpt2")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def basis_file(path: Path) -> Path:
    return tlg.decompose_activations(torch.randn(4, 6, 3)).save(path)


@pytest.mark.parametrize(
    "name",
    [
        *("heads.csv", "report.html", "run.json", "basis.safetensors"),
        "sections",
    ],
)
def test_files_of_the_user_are_refused_before_anything_is_loaded(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / name).write_text("mine, and nothing to do with reports")
    before = contents(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert run(["heads", "--out", "."], monkeypatch) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "Use another --out, or --force to overwrite." in said
    assert contents(tmp_path) == before


def test_a_folder_with_other_files_is_written_to(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert report(directory, tmp_path, **SMALL)["finished"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_force_overwrites_and_deletes_nothing_else(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "positional.csv").write_text("mine")
    (tmp_path / "heads.csv").write_text("mine")
    with pytest.raises(GeometryError, match=r"got .* with positional\.csv\. Use another --out"):
        report(directory, tmp_path, **SMALL)
    report(directory, tmp_path, force=True, **SMALL)
    assert (tmp_path / "positional.csv").read_text().startswith("state,")
    assert (tmp_path / "heads.csv").read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no JSON"),
        ("[]", "another program"),
        ('{"manifest": {"x": {"files": ["../mine.txt", "mine.txt"]}}}', "another program"),
        ('{"written_by": "tl-geometry", "files": ["mine.txt"]}', "no lists of hashes"),
        ('{"written_by": "tl-geometry", "files": {"mine.txt": "x"}}', "no lists of hashes"),
        ('{"written_by": "tl-geometry", "manifest": {"x": 3}}', "no table of sections"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_record_that_is_not_ours_is_refused(
    text: str, said: str, directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "mine.txt").write_text("mine")
    before = contents(tmp_path)
    for resume in (False, True):
        with pytest.raises(GeometryError, match=f"the record of a run of tl-geometry.*{said}"):
            report(directory, tmp_path, resume=resume, **SMALL)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("foreign", [True, False])
def test_fit_overwrites_a_basis_and_nothing_else(
    foreign: bool,
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "basis.safetensors"
    path.write_bytes(b"\x40" + bytes(200)) if foreign else basis_file(path)
    before = path.read_bytes()
    words = ["fit", str(directory), "--corpus", str(directory / "text.txt")]
    words += ["--length", "16", "--contexts", "4", "--quiet"]
    if foreign:
        assert run(words, monkeypatch) == 2
        assert "got basis.safetensors, which is there already" in capsys.readouterr().err
        assert path.read_bytes() == before
    assert run([*words, *(["--force"] if foreign else [])], monkeypatch) == 0
    assert tlg.PositionContext.load(path).contexts == 4
    assert [p.name for p in tmp_path.iterdir()] == ["basis.safetensors"]


@pytest.mark.parametrize("command", [["readout"]])
def test_a_table_is_not_written_over_a_file(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "x.csv").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert run([*command, "--out", "x.csv"], monkeypatch) == 2
    assert "--out: expected a new file, got x.csv, which is there" in capsys.readouterr().err
    assert (tmp_path / "x.csv").read_text() == "mine"
