"""How do several processes decompose one corpus together? :class:`Processes` adds up, shares and
compares what the processes of a ``torch.distributed`` group have; it also stands for a process
alone. ``decompose`` uses it, and the command line joins a ``torchrun`` group by :func:`launched`.

Every process sees the same tokens in the same order and computes its own share of the batches. Sums
are added up over the group when they are needed. They do not depend on which process computed what,
so any number of processes gives the same numbers, to rounding.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.errors import GeometryError, require

PIECE = 2**25
"""Numbers exchanged at a time: a float64 buffer of 256 MiB at most."""


class Processes:
    """A process group, or (``None``) this process alone; :attr:`rank` of :attr:`size`.

    >>> alone = Processes(None)
    >>> alone.rank, alone.size, alone.takes(3)
    (0, 1, True)
    """

    def __init__(self, group: Any) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if group is None:
            return
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        instead = "torch.distributed.init_process_group()"
        require(ready, "group", expected="an initialised process group", got=group, instead=instead)
        self.rank = torch.distributed.get_rank(group)
        self.size = torch.distributed.get_world_size(group)
        require(
            self.rank >= 0,
            "group",
            expected="a group that this process belongs to",
            got="one without this process",
        )
        self.device = torch.device("cpu")
        if torch.distributed.get_backend(group) == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())

    def takes(self, batch: int) -> bool:
        """Whether this process computes batch number ``batch``: batches go to the processes in
        turn."""
        return batch % self.size == self.rank

    def total(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor, in place, by its sum over the processes."""
        if self.size > 1:
            self._exchange(
                tensor, lambda part: torch.distributed.all_reduce(part, group=self.group)
            )

    def share(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor, in place, by that of the first process."""
        if self.size > 1:
            first = torch.distributed.get_global_rank(self.group, 0)
            self._exchange(
                tensor, lambda part: torch.distributed.broadcast(part, src=first, group=self.group)
            )

    def _exchange(self, tensor: Tensor, exchange: Any) -> None:
        for part in tensor.view(-1).split(PIECE):
            buffer = part.to(self.device)
            exchange(buffer)
            # if the tensor is on the group's device, `to` copied nothing and the part has changed
            if buffer.data_ptr() != part.data_ptr():
                part.copy_(buffer)

    def share_text(self, text: str) -> str:
        """The text of the first process, in every process."""
        # the length first, because the other processes need a buffer of that size
        size = torch.tensor([len(text.encode())])
        self.share(size)
        data = torch.zeros(int(size), dtype=torch.uint8)
        # frombuffer refuses an empty buffer
        if self.rank == 0 and text:
            data.copy_(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
        self.share(data)
        return bytes(data.tolist()).decode()

    def agree(self, text: str, what: str) -> None:
        """Raise in every process unless all of them have the same text."""
        if self.size == 1:
            return
        differing = torch.tensor([int(self.share_text(text) != text)])
        self.total(differing)
        got = f"another in {int(differing)} of {self.size}"
        require(not differing, what, expected="the same in every process", got=got)

    def first(self, action: Callable[[], None]) -> None:
        """Do something in the first process only; its ``GeometryError`` is raised in all of
        them."""
        self.each(lambda: action() if self.rank == 0 else None)

    def each(self, action: Callable[[], None]) -> None:
        """Do something in every process; a ``GeometryError`` of any is raised in all of them."""
        text = ""
        try:
            action()
        except GeometryError as error:
            if self.size == 1:
                raise
            text = str(error)
        # processes that failed take part too, or the others would wait for them forever
        failed = torch.tensor([int(bool(text))])
        self.total(failed)
        if failed:
            shared = self.share_text(text)
            raise GeometryError(text or shared or f"refused in {int(failed)} of {self.size}")


@contextmanager
def launched(device: str) -> Iterator[tuple[Any, str, bool]]:
    """Join the group of a program that ``torchrun`` started, NCCL on GPUs (``"cuda"`` becomes this
    process's own), gloo elsewhere. Gives the group (``None`` for a process alone), the device, and
    whether this process is the one that writes and speaks."""
    size = os.environ.get("WORLD_SIZE", "1")
    valid, expected = size.isdecimal() and int(size) >= 1, "a number of processes"
    require(valid, "WORLD_SIZE", expected=expected, got=repr(size), instead="torchrun")
    if int(size) == 1:
        yield None, device, True
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    expected, got = "the environment that torchrun makes", f"no {', '.join(missing)}"
    instead = "torchrun, or unset WORLD_SIZE for one process"
    require(not missing, f"WORLD_SIZE={size}", expected=expected, got=got, instead=instead)
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield torch.distributed.group.WORLD, device, torch.distributed.get_rank() == 0
    finally:
        torch.distributed.destroy_process_group()
