"""What several processes do with one accumulation: add up their sums, go on from one checkpoint."""

from __future__ import annotations

import dataclasses
import json

import torch

from tl_geometry.decomposition.accumulator import Accumulation
from tl_geometry.decomposition.largest import gathered
from tl_geometry.decomposition.processes import Processes

KNOWN = ("done", "token_hash", "has_bos", "keep_ctx")
"""What every process knows of the contexts behind it."""


def combine(work: Accumulation, processes: Processes) -> None:
    """Add up what the processes have taken in: afterwards every one of them holds the whole."""
    work.settle()
    for name, tensor in work.moments.tensors().items():
        if name != "shift":
            processes.total(tensor)
    if work.keep_ctx and work.means:
        work.means = [torch.cat(work.means, dim=1)]
        processes.total(work.means[0])
    if work.reservoir.states is not None:
        processes.total(work.reservoir.states)
    if processes.size > 1:
        work.largest = gathered(work.largest, processes.rank, processes.size, processes.total)


def clear(work: Accumulation) -> None:
    """Forget the sums, which another process holds; what is known about the contexts stays."""
    for name, tensor in work.moments.tensors().items():
        if name != "shift":
            tensor.zero_()
    work.largest.clear()
    if work.keep_ctx:
        work.means = [work.nothing(work.done)]
    if work.reservoir.states is not None:
        work.reservoir.states.zero_()


def share_shift(work: Accumulation, processes: Processes) -> None:
    """Centre the second moments of all processes on the first one's shift."""
    if work.moments.shift is not None and processes.size > 1:
        processes.share(work.moments.shift)
        work.moments.fixed = set(range(len(work.plan.states)))


def share(work: Accumulation, processes: Processes) -> None:
    """Let every process go on from where the first one is (it alone reads the checkpoint); the sums
    stay with the first."""
    if processes.size == 1:
        return
    sample = work.reservoir
    mine = {name: getattr(work, name) for name in KNOWN} | {
        "flags": work.provenance.flags,
        "priorities": sample.priorities.tolist(),
        "contexts": sample.contexts.tolist(),
    }
    theirs = json.loads(processes.share_text(json.dumps(mine)))
    if not theirs["done"]:
        return
    share_shift(work, processes)
    work.make_room(theirs["done"] - work.done)
    follows = processes.rank > 0
    hashes = torch.zeros(theirs["done"], dtype=torch.int64)
    hashes = hashes if follows else torch.cat(work.hashes)
    processes.share(hashes)
    work.hashes = [hashes]
    slots = list(range(len(theirs["priorities"])))
    tokens = torch.zeros(len(slots), work.length, dtype=torch.int64)
    if follows:
        for name in KNOWN:
            setattr(work, name, theirs[name])
        work.provenance = dataclasses.replace(work.provenance, flags=tuple(theirs["flags"]))
        sample.priorities = torch.tensor(theirs["priorities"], dtype=torch.float64)
        sample.contexts = torch.tensor(theirs["contexts"], dtype=torch.int64)
        shape = (len(work.plan.states), work.length, work.d_model)
        sample.room([(slot, slot) for slot in slots], shape, tokens)
        if sample.states is not None:
            sample.states.zero_()
        work.means = [work.nothing(work.done)] if work.keep_ctx else []
    elif sample.tokens is not None:
        tokens.copy_(sample.tokens[: len(slots)])
    processes.share(tokens)
    if sample.tokens is not None:
        sample.tokens[: len(slots)] = tokens
