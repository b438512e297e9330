"""How do the processes of one run share an accumulation? They add up their sums, and all go on from
the checkpoint that the first one read. Called by the loop of ``decompose``
(:mod:`tl_geometry.decomposition.stream_pass`)."""

from __future__ import annotations

import dataclasses
import json

import torch

from tl_geometry.decomposition.accumulator import Accumulation
from tl_geometry.decomposition.largest import Largest, gathered
from tl_geometry.decomposition.processes import Processes

KNOWN = ("done", "token_hash", "has_bos", "keep_ctx")
"""Attributes of an accumulation that must be the same in every process, whichever of them took the
contexts in."""


def combine(work: Accumulation, processes: Processes) -> None:
    """Add up what the processes have taken in: afterwards each of them holds the sums of all."""
    work.settle()
    for name, tensor in work.moments.tensors().items():
        if name != "shift":  # the same in all processes (share_shift), so it is not added
            processes.total(tensor)
    if work.keep_ctx and work.means:
        work.means = [torch.cat(work.means, dim=1)]
        processes.total(work.means[0])
    if processes.size > 1:
        # rows that another process took in are zero here
        processes.total(work.reservoir.filled().states)
        work.largest = gathered(work.largest, processes.rank, processes.size, processes.total)
    # in all processes, so that rows match in the next sum; else only the first one would sort, when
    # it writes a checkpoint
    work.reservoir.sort()


def clear(work: Accumulation) -> None:
    """Set the sums to zero, because the first process holds them now and the next :func:`combine`
    adds them up. The number of contexts, their hashes and which are sampled stay."""
    for name, tensor in work.moments.tensors().items():
        if name != "shift":
            tensor.zero_()
    work.largest = Largest.empty(len(work.plan.states), work.moments.sums.device)
    if work.keep_ctx:
        work.means = [work.nothing(work.done)]
    work.reservoir.filled().states.zero_()


def share_shift(work: Accumulation, processes: Processes) -> None:
    """Give all processes the first one's shift, so that their second moments can be added."""
    if work.moments.shift is not None and processes.size > 1:
        processes.share(work.moments.shift)
        work.moments.fixed.update(range(len(work.plan.states)))


def share(work: Accumulation, processes: Processes) -> None:
    """Let every process go on from where the first one is, which alone read the checkpoint. The
    sums stay with the first; the others get what they must know, and zeros."""
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
