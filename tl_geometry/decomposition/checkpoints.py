"""How does a stopped pass over a corpus go on where it was? Checkpoint files hold the basis of the
finished contexts and the settings of the run. Called by the loop of ``decompose``
(:mod:`tl_geometry.decomposition.stream_pass`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tl_geometry.base.errors import require
from tl_geometry.base.files import read_file, write_atomically
from tl_geometry.base.records import decode, encode
from tl_geometry.base.results import hash_tokens
from tl_geometry.decomposition.accumulator import Accumulation
from tl_geometry.decomposition.position_context import PositionContext

CHECKPOINT = "tl_geometry/checkpoint/1"
"""File format identifier."""
SAME = ("model", "fingerprint", "corpus", "dtype", "hooks", "normalized")
"""Fields of the provenance that a resumed run must have in common with the run before."""


def settings(work: Accumulation, done: int) -> dict[str, Any]:
    """What a checkpoint of the first ``done`` contexts must have in common with the run that
    resumes it, as JSON values."""
    fields = {name: getattr(work.provenance, name) for name in SAME}
    sizes = {"length": work.length, "window": work.moments.window, "contexts": work.contexts}
    # only borders before ``done`` are in the sums; later ones follow labels that may still change
    if work.contexts is not None:
        sizes["groups"] = len(work.borders) + 1
        sizes["groups begin at"] = [b for b in work.borders.tolist() if b < done]
    # through JSON, so that tuples and dtypes compare equal to what a file gives back
    return json.loads(json.dumps(vars(work.plan) | fields | sizes, default=str))


def label_hash(work: Accumulation, contexts: int) -> str:
    """Identifies the labels of the first contexts; empty where there are none."""
    return "" if work.labels is None else hash_tokens(work.labels[:contexts].unsqueeze(0))


def read(path: str | Path) -> tuple[dict[str, Any], PositionContext]:
    """The run that wrote a checkpoint (``settings`` and ``labels``), and its basis so far."""
    header, tensors = read_file(path, CHECKPOINT)
    classes = {"PositionContext": PositionContext}
    return header["run"], decode(header["basis"], tensors, classes)


def save(work: Accumulation, path: Path) -> None:
    """Write a checkpoint. The file holds the previous one until the new one is complete."""
    tensors = {}
    basis = encode(work.finish(None, (), final=False), "basis", tensors)
    run = {"settings": settings(work, work.done), "labels": label_hash(work, work.done)}
    header = {"schema": CHECKPOINT, "run": run, "basis": basis}
    write_atomically(path, tensors, {name: json.dumps(value) for name, value in header.items()})


def resume(work: Accumulation, path: Path) -> None:
    """Continue from a checkpoint: fill ``work`` with its sums. Raises, and leaves the file as it
    is, where it belongs to another run."""
    run, basis = read(path)
    done, saved = basis.contexts, run["settings"]
    current = settings(work, done)
    differing = [name for name in current if current[name] != saved.get(name)]
    shown = ", ".join(f"{n}={saved.get(n)!r} (now {current[n]!r})" for n in differing)
    what, instead = f"checkpoint {path}", "another checkpoint= path"
    expected, got = "the run that wrote it", f"another: {shown}"
    require(not differing, what, expected=expected, got=got, instead=instead)
    same_labels = run["labels"] == label_hash(work, done)
    expected = f"the labels of the first {done} contexts that it was made with"
    require(same_labels, what, expected=expected, got="others", instead=instead)
    device = work.moments.sums.device
    # set the borders for so many contexts first: the saved sums are in these groups already
    work.make_room(done)
    work.moments, work.largest = basis.moments.to(device), basis.largest.to(device)
    if basis.reservoir is not None:
        sample_tensors = work.reservoir.tensors()
        for name, values in basis.reservoir.tensors().items():
            # the file holds filled rows only; the free rows behind them stay as they are
            sample_tensors[name][: len(values)] = values
    work.keep_ctx, work.done = basis.context_means is not None, done
    work.means = [] if basis.context_means is None else [basis.context_means]
    work.provenance, work.has_bos = basis.provenance, basis.provenance.has_bos
    work.token_hash = basis.provenance.token_hash or ""
    work.hashes = [] if basis.token_hashes is None else [basis.token_hashes]
