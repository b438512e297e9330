"""Checkpoints: the basis of what is finished, and which run it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tl_geometry.base.errors import require
from tl_geometry.base.files import write_atomically
from tl_geometry.base.results import hash_tokens
from tl_geometry.decomposition import files
from tl_geometry.decomposition.accumulator import Accumulation
from tl_geometry.decomposition.largest import Largest
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.position_context import PositionContext

CHECKPOINT = "tl_geometry/checkpoint/3"
"""File format identifier."""
SAME = ("model", "fingerprint", "corpus", "dtype", "hooks", "normalized")
"""Fields of the provenance that a resumed run must share."""


def settings(work: Accumulation, done: int) -> dict[str, Any]:
    """What a checkpoint of the first ``done`` contexts must share with the run that resumes it."""
    plan = vars(work.plan)
    fields = {name: getattr(work.provenance, name) for name in SAME}
    counts = work.moments.label_counts
    sizes = {"length": work.length, "window": work.moments.window, "contexts": work.contexts}
    sizes["labels"] = 0 if counts is None else len(counts)
    if work.borders is not None:  # those of documents may lie elsewhere behind ``done``
        sizes["groups"] = len(work.borders) + 1
        sizes["groups begin at"] = [b for b in work.borders if b < done]
    return json.loads(json.dumps(plan | fields | sizes, default=str))


def label_hash(work: Accumulation, contexts: int) -> str:
    """Identifies the labels of the first contexts; empty where there are none."""
    return "" if work.labels is None else hash_tokens(work.labels[:contexts].unsqueeze(0))


def read(path: str | Path) -> tuple[dict[str, Any], PositionContext]:
    """The run that wrote a checkpoint (``done``, ``settings``, ...), and its basis so far."""
    header, tensors = files.read(path, CHECKPOINT, more="run")
    return header["run"], PositionContext(**files.fields_of(header, tensors))


def save(work: Accumulation, path: Path) -> None:
    """Write a checkpoint: the file holds the last whole one at every moment."""
    basis = work.finish(None, (), final=False)
    run = {
        "settings": settings(work, work.done),
        "label_hash": label_hash(work, work.done),
        "done": work.done,
        "token_hash": work.token_hash,
        "has_bos": work.has_bos,
        "keep_ctx": work.keep_ctx,
    }
    header = basis.header() | {"schema": CHECKPOINT, "run": run}
    write_atomically(path, basis.tensors(), {k: json.dumps(v) for k, v in header.items()})


def resume(work: Accumulation, path: Path) -> None:
    """Take up a checkpoint, or raise and leave it as it is."""
    run, basis = read(path)
    mine, theirs = settings(work, run["done"]), run["settings"]
    differing = [k for k in mine if mine[k] != theirs.get(k)]
    shown = ", ".join(f"{k}={theirs.get(k)!r} (now {mine[k]!r})" for k in differing)
    what, instead = f"checkpoint {path}", "another checkpoint= path"
    expected, got = "the run that wrote it", f"another: {shown}"
    require(not differing, what, expected=expected, got=got, instead=instead)
    same = run["label_hash"] == label_hash(work, run["done"])
    expected = f"the labels of the first {run['done']} contexts that it was made with"
    require(same, what, expected=expected, got="others", instead=instead)
    device = work.moments.sums.device
    work.make_room(run["done"])
    sums = basis.moments.tensors()
    work.moments = Moments.of(basis.window, sums, work.plan.moments_dtype, device)
    work.reservoir = basis.reservoir or work.reservoir
    work.means = [] if basis.context_means is None else [basis.context_means]
    work.keep_ctx, work.done = run["keep_ctx"], run["done"]
    work.token_hash, work.has_bos = run["token_hash"], run["has_bos"]
    work.provenance = basis.provenance
    work.hashes = [] if basis.token_hashes is None else [basis.token_hashes]
    if basis.largest is not None:
        tops = {name: values.to(device) for name, values in basis.largest.tensors().items()}
        work.largest = Largest(**tops)
