"""How do matrices of scores fit into a page of few megabytes? By block maxima, quantisation,
packing of the allowed cells, and deflate. A panel is the matrix of one head and one term. The page
of a split (:mod:`tl_geometry.render.split_view`) calls these functions, and ``assets/split.js``
unpacks."""

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
"""Most cells across a panel that holds float16. Larger panels hold int8, half the bytes."""
LEVELS = (127, 90, 63, 45, 31)
"""Steps from zero to the largest value of an int8 panel, finest first. The page takes the first
number that fits its size; each is about 0.7 of the one before."""


def block_maxima(
    values: Float[Tensor, "head query key"], allowed: Bool[Tensor, "head query key"], block: int
) -> Float[Tensor, "head ..."]:
    """The allowed value with the largest absolute value in each block of ``block x block`` cells,
    with its sign. NaN if the block has an allowed NaN, or no allowed cell.

    >>> x = torch.tensor([[[1.0, 0.0, 9.0], [-3.0, 2.0, 9.0], [0.5, 0.0, -4.0]]])
    >>> block_maxima(x, torch.ones(1, 3, 3).tril().bool(), 2)
    tensor([[[-3.0000,     nan],
             [ 0.5000, -4.0000]]])
    """
    # sizes decide: NaN wins as inf, and a cell that is not allowed loses as -1
    finite = torch.nan_to_num(values.abs(), nan=torch.inf, posinf=torch.inf)
    sizes = _blocks(torch.where(allowed, finite, -1.0), block, -1.0)
    best = sizes.max(-1, keepdim=True)
    largest = _blocks(values, block).gather(-1, best.indices)[..., 0]
    return torch.where(best.values[..., 0] >= 0, largest, torch.nan)


def _blocks(cells: Tensor, block: int, outside: float = 0.0) -> Tensor:
    """The cells of each block in the last axis. Blocks at the edge are filled up with
    ``outside``."""
    pad = (0, -cells.shape[-1] % block, 0, -cells.shape[-2] % block)
    padded = torch.nn.functional.pad(cells, pad, value=outside)
    return rearrange(padded, "... (q a) (k b) -> ... q k (a b)", a=block, b=block)


def any_allowed(allowed: Bool[Tensor, "head query key"], block: int) -> Bool[Tensor, "head ..."]:
    """Which blocks have an allowed cell."""
    return _blocks(allowed, block).any(-1)


class Payload(NamedTuple):
    """Panels as the page reads them. ``half_step`` is the largest rounding error, in units of a
    panel's largest value; ``exact`` says that values are float16."""

    fields: dict[str, Any]
    half_step: float
    exact: bool


def pack(
    values: Float[Tensor, "head term query key"],
    allowed: Bool[Tensor, "head query key"],
    levels: int,
) -> Payload:
    """Quantise the allowed cells of each panel relative to its largest absolute value, and compress
    them.

    Panels of up to :data:`EXACT` cells across hold ``value / largest`` as float16. Larger ones are
    int8, with ``levels`` steps from zero to the largest value and -128 for NaN. Each distinct mask
    of allowed cells is stored once; a panel holds the cells that the mask of its head allows, row
    by row.
    """
    panels = values.double().cpu()
    masks, which = torch.unique(allowed.cpu().flatten(1), dim=0, return_inverse=True)
    finite = torch.where(torch.isfinite(panels) & allowed.cpu()[:, None], panels, 0.0)
    largest = finite.abs().flatten(2).amax(-1)
    # a panel of zeros stays zero
    unit = panels / torch.where(largest > 0, largest, 1.0)[..., None, None]
    unit = torch.where(torch.isfinite(unit), unit, torch.nan)
    exact = panels.shape[-1] <= EXACT
    if exact:
        coded = unit.numpy().astype(np.float16)
    else:
        coded = torch.nan_to_num((unit * levels).round(), nan=-128.0).to(torch.int8).numpy()
    by_head = [
        head[:, mask].reshape(-1) for head, mask in zip(coded, allowed.cpu().numpy(), strict=True)
    ]
    cells = np.concatenate(by_head)
    fields = {
        "size": panels.shape[-1],
        "levels": None if exact else levels,
        "largest": largest.tolist(),
        "masks": compressed(np.packbits(masks.numpy(), axis=1, bitorder="little").tobytes()),
        "mask": which.tolist(),
        "cells": compressed(cells.tobytes()),
    }
    # float16 has steps of 2**-11 between 0.5 and 1, where the largest values of a panel lie
    return Payload(fields, 2.0**-12 if exact else 0.5 / levels, exact)


def compressed(raw: bytes) -> str:
    """Bytes as base64 of their zlib form, which browsers inflate without a library."""
    return base64.b64encode(zlib.compress(raw, 9)).decode()
