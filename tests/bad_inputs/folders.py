"""Files and folders that are not ours, signals and locks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.bad_inputs.cases import TEXT, Call, Command, World, fit
from tl_geometry import papers
from tl_geometry.base import run_files
from tl_geometry.report import build

MINE = b"mine, and nothing to do with this library"
OVER = "--force to overwrite"


def headed(schema: str) -> bytes:
    """A safetensors file without tensors whose header names a schema."""
    header = json.dumps({"__metadata__": {"schema": json.dumps(schema)}}).encode()
    return len(header).to_bytes(8, "little") + header


SNOW = "\u96ea" * 100 + ".safetensors"
BASIS, CHECKPOINT = headed("tl_geometry/PositionContext/1"), headed("tl_geometry/checkpoint/1")
RECORDS = {
    "no JSON": b"{",
    "a list": b"[]",
    "no text": b"\xff\xfe\x00",
    "another program's": b'{"manifest": {"x": {"files": ["mine.txt"]}}}',
    "nested without end": b"[" * 50_000,
    "of names without hashes": b'{"written_by": "tl-geometry", "files": ["mine.txt"]}',
    "with a hash that is none": b'{"written_by": "tl-geometry", "files": {"mine.txt": 3}}',
    "with half a manifest": b'{"written_by": "tl-geometry", "manifest": {"heads": null}}',
}
EXPERIMENT = b'{"written_by": "tl-geometry", "experiment": "nanogpt"}'


def heads(*words: str) -> tuple[str, ...]:
    return ("heads", "--out", ".", "--quiet", *words)


def kept(world: World, name: str, folder: Path, call: Any) -> Any:
    """The error of a call, after making sure that a file of the user is as it was."""
    path = world.path(name, MINE)
    try:
        return call(folder)
    finally:
        assert path.read_bytes() == MINE


def held(world: World, call: Any) -> Any:
    """A call while another run writes to the folder."""
    with run_files.lock(world.folder / run_files.LOCK):
        return call(world.folder)


def report(folder: Path) -> Any:
    return build.build(build.Request(contexts=12, length=8), folder, progress=False)


def experiment(folder: Path) -> Any:
    return papers.experiment("addition", scale="smoke", out=folder, progress=False)


CALLS: list[Call] = [
    *(
        Call(f"a report over a user's {name}", lambda w, n=name: kept(w, n, w.folder, report), OVER)
        for name in ("run.json", "report.html", "heads.csv", "basis.safetensors", "paths.csv")
    ),
    *(
        Call(
            f"an experiment over a user's {name}",
            lambda w, n=name: kept(w, n, w.folder, experiment),
            OVER,
        )
        for name in ("run.json", "report.html", "findings.csv")
    ),
    Call("two reports in one folder", lambda w: held(w, report), "no other run is writing"),
    Call("two experiments in one folder", lambda w: held(w, experiment), "no other run is writing"),
    Call("a report with a budget in minutes", lambda w: build.Request(budget="10m"), "'quick'"),
    Call("a report with a seed of 65 bits", lambda w: build.Request(seed=2**64), "4294967295"),
    Call("a report with a seed of 32 bits", lambda w: build.Request(seed=2**32 - 1)),
]
COMMANDS: list[Command] = [
    *(
        Command(f"heads over a user's {name}", heads(), f"{name}.*{OVER}", ((name, MINE),))
        for name in (
            *("heads.csv", "heads.safetensors", "report.html", "basis.safetensors"),
            *("overview.csv", "dominant_only.csv", "checkpoint.safetensors"),
        )
    ),
    *(
        Command(f"heads over a run.json {what}", heads(), OVER, (("run.json", record),))
        for what, record in RECORDS.items()
    ),
    Command("heads over a basis of fit", heads(), OVER, (("basis.safetensors", BASIS),)),
    Command(
        "heads over a checkpoint of somebody",
        heads("--resume"),
        OVER,
        (("checkpoint.safetensors", CHECKPOINT),),
    ),
    Command("heads in an experiment", heads(), "results of nanogpt", (("run.json", EXPERIMENT),)),
    Command(
        "an experiment in another's folder",
        ("experiment", "addition", "--out", "."),
        "results of nanogpt",
        (("run.json", EXPERIMENT),),
    ),
    Command(
        "an experiment over a user's page",
        ("experiment", "addition", "--out", "."),
        OVER,
        (("report.html", MINE),),
    ),
    Command("fit over a file of the user", fit(), OVER, (*TEXT, ("basis.safetensors", MINE))),
    Command(
        "fit over a table",
        fit("--out", "heads.safetensors"),
        "holds SweepTable",
        (*TEXT, ("heads.safetensors", headed("tl_geometry/SweepTable/9"))),
    ),
    Command(
        "fit where a basis has the checkpoint's name",
        fit(),
        "a checkpoint of fit, or no file",
        (*TEXT, ("basis.checkpoint.safetensors", BASIS)),
    ),
    Command(
        "fit where a text has the checkpoint's name",
        fit("--resume"),
        "a checkpoint of fit, or no file",
        (*TEXT, ("basis.checkpoint.safetensors", MINE)),
    ),
    Command(
        "fit after a stopped one",
        fit(),
        "--resume to go on with it, or --force",
        (*TEXT, ("basis.checkpoint.safetensors", CHECKPOINT)),
    ),
    Command("a readout over a file", ("readout", "--out", "x.csv"), OVER, (("x.csv", MINE),)),
    Command(
        "a table over a file",
        ("reproduce", "song-zhong", "--out", "x.csv"),
        OVER,
        (("x.csv", MINE),),
    ),
    Command("a basis of 300 letters", fit("--out", f"{'x' * 300}.safetensors"), "180 bytes", TEXT),
    Command("a basis of 100 signs", fit("--out", SNOW), "180", TEXT),
    Command("a folder of 300 letters", ("report", "--out", "x" * 300), "180 bytes"),
    Command("a corpus of 300 letters", ("fit", "--corpus", "x" * 300), "too long|corpus"),
    Command("a seed of 65 bits", fit("--seed", str(2**64)), "at most 4294967295", TEXT),
    Command("a seed of 33 bits", ("report", "--seed", str(2**32)), "at most 4294967295"),
    Command("a budget of minutes", ("report", "--budget", "10m"), "quick"),
    Command("a model that is not listed", ("heads", "nomodel"), "Use 'olmoe'"),
]
