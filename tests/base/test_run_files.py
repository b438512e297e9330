"""Which files of a folder may be written, by the record, the hashes and the headers in it: each
rule of :mod:`tl_geometry.base.run_files` alone, without a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.refusals import refused
from tl_geometry.base import run_files
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.files import write_atomically
from tl_geometry.base.run_files import FORCE, OwnFiles

OURS: dict[str, Any] = {"written_by": "tl-geometry", "files": {}, "manifest": {}}


def recorded(folder: Path, record: object) -> Path:
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def safetensors(path: Path, schema: str) -> Path:
    write_atomically(path, {"x": torch.ones(2)}, {"schema": json.dumps(schema)})
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def listed(folder: Path, **texts: str) -> dict[str, list[str]]:
    """Files with these texts, and the list that a record has of them."""
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name: [run_files.file_hash(folder / name)] for name in texts}


# ---- headers and records


def test_a_hash_is_that_of_all_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is read in several pieces has the hash of its whole text."""
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    at_once = run_files.file_hash(path)
    assert at_once == "84d89877f0d4041efb6bf91a16f0248f"  # sha256sum, the first 32 digits
    monkeypatch.setattr(run_files, "PIECE", 4)
    assert run_files.file_hash(path) == at_once


HEADER = json.dumps({"__metadata__": {"schema": json.dumps("s/1")}}).encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ""),
        (b"text", ""),
        (b"\xff" * 8 + HEADER, ""),  # a length beyond the file
        ((2).to_bytes(8, "little") + b"{}", ""),
        ((2).to_bytes(8, "little") + b"[]", ""),
        (len(HEADER).to_bytes(8, "little") + HEADER, "s/1"),
        (len(HEADER).to_bytes(8, "little") + HEADER + b"1234", "s/1"),
        (len(HEADER).to_bytes(8, "big") + HEADER, ""),
    ],
)
def test_a_schema_is_read_from_the_header_alone(tmp_path: Path, data: bytes, expected: str) -> None:
    """The schema of a header of its length, and nothing from any other file or folder."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert run_files.schema(path) == expected
    assert run_files.schema(tmp_path) == ""


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ([], "one of another program"),
        ({}, "one of another program"),
        ({"written_by": "else"}, "one of another program"),
        (OURS | {"files": []}, "one whose 'files' are no lists of hashes"),
        (OURS | {"files": {"a": "0"}}, "one whose 'files' are no lists of hashes"),
        (OURS | {"files": {"a": [0]}}, "one whose 'files' are no lists of hashes"),
        (
            OURS | {"files": {"a": ["0"], "b": ["0", None]}},
            "one whose 'files' are no lists of hashes",
        ),
        (OURS | {"manifest": []}, "one whose 'manifest' is no table of sections"),
        (OURS | {"manifest": {"a": {}, "b": 1}}, "one whose 'manifest' is no table of sections"),
    ],
)
def test_a_foreign_record_is_refused_and_counts_as_none_with_force(
    tmp_path: Path, record: object, problem: str
) -> None:
    """By default it is refused in one sentence; with ``force`` it is as if it were not there."""
    recorded(tmp_path, record)
    with pytest.raises(GeometryError) as error:
        run_files.read_record(tmp_path)
    expected = "expected the record of a run of tl-geometry"
    path = tmp_path / "run.json"
    assert str(error.value) == f"{path}: {expected}, got {problem}. Use {FORCE}."
    assert run_files.read_record(tmp_path, force=True) == {}


def test_own_records_are_read_and_written_whole(tmp_path: Path) -> None:
    """A record without lists, one with them, none at all, and one that is no JSON."""
    assert run_files.read_record(tmp_path) == {}
    for record in ({"written_by": "tl-geometry"}, OURS | {"files": {"a": ["0", "1"]}}):
        run_files.write_record(tmp_path, record)
        assert run_files.read_record(tmp_path) == record
    run_files.write_record(tmp_path, OURS | {"path": Path("a"), "name": "\ud800"})
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert text.endswith('  "path": "a",\n  "name": "\\ud800"\n}\n')
    assert names_in(tmp_path) == ["run.json"]
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(GeometryError, match=r"got one that is no JSON \(JSONDecodeError\)\. Use"):
        run_files.read_record(tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "run.json").mkdir()
    with pytest.raises(GeometryError, match=r"got one that is no JSON \(\w+Error\)\. Use"):
        run_files.read_record(tmp_path)


def test_a_record_that_cannot_be_written_leaves_no_part(tmp_path: Path) -> None:
    """A folder in the place of the record: an error, and nothing beside it."""
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match=r"run\.json"):
        run_files.write_record(tmp_path, OURS)
    assert names_in(tmp_path) == ["run.json"]


# ---- the files of a folder


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("a.csv", True),
        ("tables/a.csv", True),
        ("", False),
        (".", False),
        ("run.json", False),
        ("tables/run.json", False),
        ("a\0b", False),
        ("../a.csv", False),
        ("tables/../a.csv", False),
        ("link/a.csv", False),
        ("/a.csv", False),
    ],
)
def test_listed_names_stay_in_the_folder(tmp_path: Path, name: str, inside: bool) -> None:
    """Names of a record that lead out of the folder, by whatever way, are not followed."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    assert list(OwnFiles(folder, {name: ["0"]}).hashes) == ([name] if inside else [])
    absolute = str(folder / "a.csv")
    assert OwnFiles(folder, {absolute: ["0"]}).hashes == {}


def test_a_file_is_free_where_nothing_of_the_user_is(tmp_path: Path) -> None:
    """Unchanged files, absent ones and folders are told from changed files, links and files that
    stand where a folder should be; ``force`` frees all but the last."""
    hashes = listed(tmp_path, kept="1", changed="2", gone="3", linked="4")
    files = OwnFiles(tmp_path, hashes)
    (tmp_path / "changed").write_text("other")
    (tmp_path / "gone").unlink()
    (tmp_path / "linked").rename(tmp_path / "target")
    (tmp_path / "linked").symlink_to("target")
    (tmp_path / "broken").symlink_to("nothing")
    (tmp_path / "users").write_text("5")
    (tmp_path / "folder").mkdir()
    names = ("kept", "changed", "gone", "linked", "users", "broken", "folder", "new")
    assert [n for n in names if files.unchanged(n)] == ["kept"]
    assert [n for n in names if files.free(n)] == ["kept", "gone", "new"]
    assert files.changed() == ["changed", "linked"]
    assert files.free("tables/a")
    assert files.free("folder/a")
    assert not files.free("users/a")
    assert not files.free("broken/a")
    forced = OwnFiles(tmp_path, hashes, force=True)
    assert all(map(forced.free, names))
    assert not forced.free("users/a")
    files.clear()
    assert not (tmp_path / "kept").exists()
    assert files.hashes == {}
    assert names_in(tmp_path) == sorted(
        ["changed", "target", "linked", "broken", "users", "folder"]
    )


def test_a_written_file_is_listed_before_it_is_there(tmp_path: Path) -> None:
    """The record is written between the file aside and its place, with the last hash and the new
    one, and nothing is left aside, with an error or without."""
    files, seen = OwnFiles(tmp_path, {}), []

    def writing(text: str) -> Callable[[Path], object]:
        return lambda path: path.write_text(text)

    def record() -> None:
        at = tmp_path / "tables" / "a.csv"
        seen.append(at.read_text() if at.exists() else None)

    for text in ("1", "2", "3"):
        files.write("tables/a.csv", writing(text), record)
        assert (tmp_path / "tables" / "a.csv").read_text() == text
        assert files.unchanged("tables/a.csv")
    assert seen == [None, "1", "2"]
    assert len(files.hashes["tables/a.csv"]) == 2
    (tmp_path / "tables" / "a.csv").write_text("2")  # the hash before counts too
    assert files.unchanged("tables/a.csv")
    (tmp_path / "tables" / "a.csv").write_text("1")
    assert not files.unchanged("tables/a.csv")

    def failing() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        files.write("tables/a.csv", writing("4"), failing)
    assert (tmp_path / "tables" / "a.csv").read_text() == "1"
    assert names_in(tmp_path / "tables") == ["a.csv"]


def test_a_file_is_written_aside_under_a_name_of_its_kind(tmp_path: Path) -> None:
    """Savers go by the ending of a name, which the file aside keeps."""
    names: list[str] = []

    def save(path: Path) -> None:
        names.append(path.name)
        path.write_text("")

    OwnFiles(tmp_path, {}).write("a.png", save, lambda: None)
    assert names == [f".a.{os.getpid()}.part.png"]


# ---- folders, files and checkpoints of a command


def test_a_folder_belongs_to_one_owner(tmp_path: Path) -> None:
    """By default results of another owner are refused, with their name; ``force`` takes the folder
    and forgets the record; the owner itself gets the record."""
    record = OURS | {"experiment": "first"}
    recorded(tmp_path, record)
    expected = f"--out: expected a folder of its own, got {tmp_path} with results of first."
    for owner in ("second", "report"):
        assert refused(lambda owner=owner: run_files.check_folder(tmp_path, owner, [])) == (
            f"{expected} Use {FORCE}."
        )
        assert run_files.check_folder(tmp_path, owner, [], force=True) == {}
    assert run_files.check_folder(tmp_path, "first", []) == record
    assert run_files.check_folder(tmp_path, "first", [], force=True) == record
    recorded(tmp_path, OURS)
    assert run_files.check_folder(tmp_path, "report", []) == OURS
    assert "with results of report" in refused(
        lambda: run_files.check_folder(tmp_path, "first", [])
    )


def test_files_in_the_way_are_named_up_to_eight(tmp_path: Path) -> None:
    """Own files are not in the way; of those of the user eight are named, and dots say that there
    are more."""
    hashes = listed(tmp_path, own="1")
    recorded(tmp_path, OURS | {"files": hashes})
    names = [f"n{i}" for i in range(9)]
    listed(tmp_path, **dict.fromkeys(names, ""))
    expected = "--out: expected a folder without files of these names that others wrote or changed"
    for count, dots in ((8, ""), (9, " ...")):
        shown = f"{tmp_path} with {', '.join(names[:8])}{dots}"
        assert refused(
            lambda c=count: run_files.check_folder(tmp_path, "report", ["own", *names[:c]])
        ) == (f"{expected}, got {shown}. Use {FORCE}.")
    run_files.check_folder(tmp_path, "report", ["own", "absent"])
    run_files.check_folder(tmp_path, "report", names, force=True)


@pytest.mark.parametrize(
    ("schema", "recorded_too", "fits"),
    [
        ("tl_geometry/checkpoint/1", True, True),
        ("tl_geometry/checkpoint/1", False, False),
        ("tl_geometry/PositionContext/1", True, False),
        (None, False, True),
    ],
)
def test_a_checkpoint_in_a_folder_needs_a_record_and_its_header(
    tmp_path: Path, schema: str | None, recorded_too: bool, fits: bool
) -> None:
    """Without either it is the user's, unless ``force`` is given."""
    if recorded_too:
        recorded(tmp_path, OURS)
    if schema is not None:
        safetensors(tmp_path / "checkpoint.safetensors", schema)
    if fits:
        run_files.check_folder(tmp_path, "report", [])
    else:
        text = refused(lambda: run_files.check_folder(tmp_path, "report", []))
        assert f"got {tmp_path} with checkpoint.safetensors. Use" in text
    run_files.check_folder(tmp_path, "report", [], force=True)


def test_a_file_is_overwritten_by_a_result_of_its_class_only(tmp_path: Path) -> None:
    """The message names the class that the file holds; a table without a header overwrites
    nothing."""
    path = tmp_path / "a.safetensors"
    for kind in ("", "Anova"):
        run_files.check_file(path, kind)
    safetensors(path, "tl_geometry/Anova/1")
    run_files.check_file(path, "Anova")
    there = f"got {path}, which is there already"
    assert refused(lambda: run_files.check_file(path, "PositionContext")) == (
        "--out: expected a new file, or one that holds a PositionContext of tl_geometry, "
        f"{there} and holds Anova. Use {FORCE}."
    )
    assert refused(lambda: run_files.check_file(path)) == (
        f"--out: expected a new file, {there}. Use {FORCE}."
    )
    path.write_text("text")
    assert f"{there} and holds something else. Use" in refused(
        lambda: run_files.check_file(path, "Anova")
    )
    for kind in ("", "Anova"):
        run_files.check_file(path, kind, force=True)
    path.unlink()
    path.symlink_to("nothing")
    assert there in refused(lambda: run_files.check_file(path))


def test_a_checkpoint_is_gone_on_with_only_where_that_is_asked(tmp_path: Path) -> None:
    """No file, another file and a stopped run's checkpoint, with and without ``resume``."""
    path = tmp_path / "c.safetensors"
    for resume in (True, False):
        run_files.check_checkpoint(path, resume=resume, force=False)
    safetensors(path, "tl_geometry/checkpoint/1")
    run_files.check_checkpoint(path, resume=True, force=False)
    assert refused(lambda: run_files.check_checkpoint(path, resume=False, force=False)) == (
        f"--out: expected no stopped run in the way, got its checkpoint {path}. "
        "Use --resume to go on with it, or --force to begin again."
    )
    run_files.check_checkpoint(path, resume=False, force=True)
    path.write_text("text")
    expected = f"{path}: expected a checkpoint of fit, or no file, got another file. Use {FORCE}."
    for resume in (True, False):
        with pytest.raises(GeometryError) as error:
            run_files.check_checkpoint(path, resume=resume, force=False)
        assert str(error.value) == expected
        run_files.check_checkpoint(path, resume=resume, force=True)
