"""How do many tensors reach the CPU in one copy? Every copy waits until the device has done all
that was asked of it, however small the copy is. Sums, checks of layers and sweeps read their
numbers through these functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LARGE = 2**20
"""Bytes above which a tensor is copied alone: packing would need its memory a second time, and its
copy takes longer than the wait that packing saves."""


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, detached. Those of one device are packed there and come in one copy,
    except those of more than :data:`LARGE` bytes.

    >>> [x.tolist() for x in on_cpu([torch.tensor([1.5]), torch.tensor(True)])]
    [[1.5], True]
    """
    out = [x.detach() for x in tensors]
    # widest numbers first, so that each tensor begins at a multiple of its own width
    order = sorted(range(len(out)), key=lambda i: -out[i].element_size())
    for device in dict.fromkeys(x.device for x in out if x.device.type != "cpu"):
        here = [i for i in order if out[i].device == device and 0 < out[i].nbytes <= LARGE]
        if not here:
            continue
        packed = torch.cat([out[i].contiguous().view(-1).view(torch.uint8) for i in here]).cpu()
        for i, part in zip(here, packed.split([out[i].nbytes for i in here]), strict=True):
            # a clone, so that no result shares memory with another
            out[i] = part.view(out[i].dtype).view(out[i].shape).clone()
    return [x.cpu() for x in out]
