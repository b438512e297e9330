"""Matrices of scores in few bytes, for the page of a split: block maxima, quantisation, packing of
the allowed cells, deflate."""

from __future__ import annotations

import base64
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

EXACT = 64
"""Up to so many tokens values are float16, beyond that int8."""
LEVELS = (127, 90, 63, 45, 31)
"""Steps from zero to the largest value of a plane, in int8: the first that fits the size."""


def block_maxima(
    values: Float[Tensor, "head query key"], allowed: Bool[Tensor, "head query key"], block: int
) -> Float[Tensor, "head ..."]:
    """Of each ``block x block`` cells the allowed one that is largest in absolute value, with its
    sign; NaN if one is, or none is allowed.

    >>> x = torch.tensor([[[1.0, 0.0, 9.0], [-3.0, 2.0, 9.0], [0.5, 0.0, -4.0]]])
    >>> block_maxima(x, torch.ones(1, 3, 3).tril().bool(), 2)
    tensor([[[-3.0000,     nan],
             [ 0.5000, -4.0000]]])
    """
    finite = torch.nan_to_num(values.abs(), nan=torch.inf, posinf=torch.inf)
    sizes = _blocks(torch.where(allowed, finite, -1.0), block, -1.0)
    best = sizes.max(-1, keepdim=True)
    largest = _blocks(values, block).gather(-1, best.indices)[..., 0]
    return torch.where(best.values[..., 0] >= 0, largest, torch.nan)


def _blocks(cells: Tensor, block: int, outside: float = 0.0) -> Tensor:
    """The cells of each block, in the last axis; what is beyond the edge is ``outside``."""
    pad = (0, -cells.shape[-1] % block, 0, -cells.shape[-2] % block)
    padded = torch.nn.functional.pad(cells, pad, value=outside)
    return rearrange(padded, "... (q a) (k b) -> ... q k (a b)", a=block, b=block)


def any_allowed(allowed: Bool[Tensor, "head query key"], block: int) -> Bool[Tensor, "head ..."]:
    """Blocks with an allowed cell."""
    return _blocks(allowed, block).any(-1)


class Payload(NamedTuple):
    """Planes as the page reads them, and how far what it reads may be from what was given (times
    the largest value of the plane)."""

    fields: dict[str, Any]
    half_step: float
    exact: bool


def pack(
    values: Float[Tensor, "head term query key"],
    allowed: Bool[Tensor, "head query key"],
    levels: int,
) -> Payload:
    """Quantise the allowed cells of each plane by its own largest absolute value and compress them.

    ``levels`` steps from zero to that value in int8, -128 for NaN; float16 of ``value / largest``
    up to :data:`EXACT` tokens. The mask of each head is kept once (heads that share one share it),
    planes hold its cells row by row.
    """
    planes = values.double().cpu()
    masks, which = torch.unique(allowed.cpu().flatten(1), dim=0, return_inverse=True)
    known = torch.where(torch.isfinite(planes) & allowed.cpu()[:, None], planes, 0.0)
    largest = known.abs().flatten(2).amax(-1)
    unit = planes / torch.where(largest > 0, largest, 1.0)[..., None, None]
    unit = torch.where(torch.isfinite(unit), unit, torch.nan)
    exact = planes.shape[-1] <= EXACT
    if exact:
        coded = unit.numpy().astype(np.float16)
    else:
        coded = torch.nan_to_num((unit * levels).round(), nan=-128.0).to(torch.int8).numpy()
    kept = [
        head[:, mask].reshape(-1) for head, mask in zip(coded, allowed.cpu().numpy(), strict=True)
    ]
    cells = np.concatenate(kept)
    fields = {
        "size": planes.shape[-1],
        "levels": None if exact else levels,
        "largest": largest.tolist(),
        "masks": compressed(np.packbits(masks.numpy(), axis=1, bitorder="little").tobytes()),
        "mask": which.tolist(),
        "cells": compressed(cells.tobytes()),
    }
    return Payload(fields, 2.0**-12 if exact else 0.5 / levels, exact)


def compressed(raw: bytes) -> str:
    """Bytes as base64 of their deflate (zlib) form, which browsers read by themselves."""
    return base64.b64encode(zlib.compress(raw, 9)).decode()
