"""How the processes of one run share an accumulation: they add up their sums, and all go on from
the checkpoint that the first one read."""

from __future__ import annotations

import dataclasses
import json

import torch

from tl_geometry.decomposition.accumulator import Accumulation
from tl_geometry.decomposition.largest import Largest, gathered
from tl_geometry.decomposition.processes import Processes

KNOWN = ("done", "token_hash", "has_bos", "keep_ctx")
"""What every process must know of the contexts that are done, whichever process took them in."""


def combine(work: Accumulation, processes: Processes) -> None:
    """Add up what the processes have taken in: afterwards every one of them holds the whole."""
    work.settle()
    for name, tensor in work.moments.tensors().items():
        if name != "shift":  # no sum: one for all processes (share_shift)
            processes.total(tensor)
    if work.keep_ctx and work.means:
        work.means = [torch.cat(work.means, dim=1)]
        processes.total(work.means[0])
    if processes.size > 1:
        # rows that another process took in are zero here
        processes.total(work.reservoir.filled().states)
        work.largest = gathered(work.largest, processes.rank, processes.size, processes.total)
    work.reservoir.sort()  # in all processes alike: only the first one finishes a checkpoint


def clear(work: Accumulation) -> None:
    """Forget the sums, which another process holds; what is known about the contexts stays."""
    for name, tensor in work.moments.tensors().items():
        if name != "shift":
            tensor.zero_()
    work.largest = Largest.empty(len(work.plan.states), work.moments.sums.device)
    if work.keep_ctx:
        work.means = [work.nothing(work.done)]
    work.reservoir.filled().states.zero_()


def share_shift(work: Accumulation, processes: Processes) -> None:
    """Centre the second moments of all processes on the first one's shift."""
    if work.moments.shift is not None and processes.size > 1:
        processes.share(work.moments.shift)
        work.moments.fixed.update(range(len(work.plan.states)))


def share(work: Accumulation, processes: Processes) -> None:
    """Let every process go on from where the first one is (it alone reads the checkpoint); the sums
    stay with the first."""
    if processes.size == 1:
        return
    agreed = {name: getattr(work, name) for name in KNOWN} | {"flags": work.provenance.flags}
    first = json.loads(processes.share_text(json.dumps(agreed)))
    # there was no checkpoint: all begin alike
    if not first["done"]:
        return
    share_shift(work, processes)
    work.make_room(first["done"] - work.done)
    hashes = torch.cat(work.hashes) if work.hashes else torch.zeros(first["done"]).long()
    processes.share(hashes)
    work.hashes = [hashes]
    for name, values in work.reservoir.tensors().items():
        if name != "states":
            processes.share(values)
    if processes.rank > 0:
        for name in KNOWN:
            setattr(work, name, first[name])
        work.provenance = dataclasses.replace(work.provenance, flags=tuple(first["flags"]))
        work.reservoir.filled().states.zero_()
        work.means = [work.nothing(work.done)] if work.keep_ctx else []
