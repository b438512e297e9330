"""Files that are not ours are neither overwritten nor deleted: a folder of results, the file of a
basis, tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.cli.test_arguments import run
from tests.reports import model_directory, report
from tl_geometry import papers
from tl_geometry.base import run_files
from tl_geometry.base.errors import GeometryError
from tl_geometry.report import folder as report_folder
from tl_geometry.report.contents import SECTIONS, TABLES, report_files

SMALL: dict[str, Any] = {"sections": ("overview", "measures")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_directory(tmp_path_factory.mktemp("models") / "small", "gpt2")


@pytest.fixture
def made(directory: Path, tmp_path: Path) -> Path:
    """A folder with a report of two sections."""
    report(directory, tmp_path / "made", **SMALL)
    return tmp_path / "made"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def basis_file(path: Path) -> Path:
    return tlg.decompose_activations(torch.randn(4, 6, 3)).save(path)


@pytest.mark.parametrize(
    "name",
    [
        *("heads.csv", "report.html", "run.json", "basis.safetensors", "checkpoint.safetensors"),
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


def test_a_list_that_leaves_the_folder_is_not_followed(directory: Path, tmp_path: Path) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    out.mkdir()
    outside.mkdir()
    (out / "link").symlink_to(outside)
    (out / "inside.csv").write_text("ours")
    places = [outside / "a.txt", outside / "b.txt", tmp_path / "c.txt"]
    for place in places:
        place.write_text("ours")
    hashes = [run_files.file_hash(out / "inside.csv")]
    names = ["inside.csv", "../c.txt", "link/a.txt", str(outside / "b.txt"), "", "x\0y"]
    record = {"written_by": "tl-geometry", "files": dict.fromkeys(names, hashes)}
    (out / "run.json").write_text(json.dumps(record))
    report(directory, out, **SMALL)
    assert all(place.read_text() == "ours" for place in places)
    assert not (out / "inside.csv").exists()  # the twin: a listed file of ours goes


def test_a_fresh_run_deletes_what_was_listed_and_keeps_what_was_changed(
    directory: Path, made: Path
) -> None:
    assert set(json.loads((made / "run.json").read_text())["files"]) == {
        *report_files(("overview",)),
        *report_files(("measures",)),
    }
    (made / "positional.csv").write_text("edited")
    (made / "sections" / "mine.json").write_text("mine")
    with pytest.raises(GeometryError, match=r"with positional\.csv"):
        report(directory, made, **SMALL)
    again = report(directory, made, sections=("overview",))
    assert again["kept"] == ["positional.csv"]
    assert (made / "positional.csv").read_text() == "edited"
    assert (made / "sections" / "mine.json").read_text() == "mine"
    assert not (made / "positional.safetensors").exists()
    assert not (made / "sections" / "measures.json").exists()


def test_a_table_whose_name_is_taken_while_a_run_works_is_a_card(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = report_folder.Folder.add

    def taken(self: Any, name: str, *rest: Any, **options: Any) -> None:
        (tmp_path / "positional.csv").write_text("mine")
        add(self, name, *rest, **options)

    monkeypatch.setattr(report_folder.Folder, "add", taken)
    summary = report(directory, tmp_path, sections=("measures",))
    assert (tmp_path / "positional.csv").read_text() == "mine"
    cards = {card["what"]: card["why"] for card in summary["manifest"]["measures"]["cards"]}
    assert cards["positional.csv"] == "files of these names are not of this run"
    assert summary["tables"]["positional"]["rows"]
    assert (tmp_path / "contextual.csv").read_text().startswith("state,")


def test_a_run_killed_between_record_and_file_is_gone_on_with(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    replace = Path.replace

    def stop(self: Path, target: Path) -> Path:
        if stopping and Path(target).name == stopping[0]:
            raise Killed
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stop)
    out = tmp_path / "out"
    for name in ("report.html", "overview.csv", "overview.json"):
        stopping = [name]
        with pytest.raises(Killed):
            report(directory, out, sections=("overview",), seed=len(name))
        assert not list(out.rglob("*.part*"))
    stopping.clear()
    assert report(directory, out, sections=("overview",))["finished"]


def test_the_tables_of_every_section_are_declared() -> None:
    modules = Path(report_folder.__file__).parent.glob("*.py")
    text = "\n".join(module.read_text() for module in modules)
    written = set(re.findall(r'(?:draft\.table\(|TableBlock\(name=)\s*"(\w+)"', text))
    assert written == {table for tables in TABLES.values() for table in tables}
    assert set(TABLES) == set(SECTIONS)


def test_the_checkpoint_of_fit_is_never_a_finished_basis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    basis_file(tmp_path / "basis.checkpoint.safetensors")
    before = contents(tmp_path)
    assert run(["fit"], monkeypatch) == 2
    said = capsys.readouterr().err
    assert "basis.checkpoint.safetensors: expected a checkpoint of fit, or no file" in said
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


@pytest.mark.parametrize("command", [["readout"], ["reproduce", "song-zhong"]])
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


def test_an_experiment_overwrites_only_its_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "scale": "smoke",
        "changes": ["steps=1"],
        "out": tmp_path,
        "progress": False,
    }
    (tmp_path / "findings.csv").write_text("mine")
    with pytest.raises(GeometryError, match=r"with findings\.csv"):
        papers.experiment("addition", **options)
    assert contents(tmp_path) == {"findings.csv": b"mine"}
    papers.experiment("addition", force=True, **options)
    papers.experiment("addition", **options)
    assert not list(tmp_path.rglob("*.part*"))
    (tmp_path / "findings.csv").write_text("mine")
    with pytest.raises(GeometryError, match=r"with findings\.csv"):
        papers.experiment("addition", **options)


@pytest.mark.parametrize(
    "name", ["run.json", "training.safetensors", "step-000000.safetensors", ""]
)
def test_a_training_run_overwrites_only_its_own(name: str, tmp_path: Path) -> None:
    path = tmp_path / "carry-0" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    said = "a file in its place" if name == "" else name
    options: dict[str, Any] = {"scale": "smoke", "changes": ["steps=1"], "progress": False}
    with pytest.raises(GeometryError, match=re.escape(said)):
        papers.experiment("addition", out=tmp_path, **options)
    assert path.read_text() == "mine"


def test_a_lock_whose_file_goes_away_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder ends between two looks at the path: the first look still sees the file."""
    path, taken = tmp_path / ".lock", list[int]()

    def flock(handle: int, operation: int) -> None:
        if not taken:
            path.unlink()
        taken.append(handle)

    monkeypatch.setattr(Path, "exists", lambda path: True)
    monkeypatch.setattr("fcntl.flock", flock)
    with run_files.lock(path):
        assert len(taken) == 2
        assert path.is_file()


def test_a_lock_is_of_one_process_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / ".lock"
    path.write_text("12345\n")  # left behind by a process that is gone
    with run_files.lock(path):
        with pytest.raises(GeometryError, match="a place that no other run is writing to"):
            run_files.lock(path).__enter__()
        assert path.exists()
    assert not path.exists()
    with run_files.lock(path):
        pass
