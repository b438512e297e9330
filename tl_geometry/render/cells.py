"""How do matrices of scores fit into a page of few megabytes? By block maxima, quantisation,
packing of the allowed cells, and deflate. A panel is the matrix of one head and one term. The page
of a split (:mod:`tl_geometry.render.split_view`) calls these functions, and ``assets/split.js``
unpacks."""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

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
    sizes = torch.where(allowed, finite, -1.0)
    # ceil_mode keeps the smaller blocks at the edge
    best, places = F.max_pool2d(sizes, block, ceil_mode=True, return_indices=True)
    largest = values.flatten(1).gather(1, places.flatten(1)).view_as(places)
    return torch.where(best >= 0, largest, torch.nan)


def any_allowed(allowed: Bool[Tensor, "head query key"], block: int) -> Bool[Tensor, "head ..."]:
    """Which blocks have an allowed cell."""
    return F.max_pool2d(allowed.float(), block, ceil_mode=True) > 0


def pack(
    values: Float[Tensor, "head term query key"],
    allowed: Bool[Tensor, "head query key"],
    levels: int,
) -> dict[str, Any]:
    """Quantise the allowed cells of each panel relative to its largest absolute value, and compress
    them. Returns the panels as the page reads them.

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
    return {
        "size": panels.shape[-1],
        "levels": None if exact else levels,
        "largest": largest.tolist(),
        "masks": compressed(np.packbits(masks.numpy(), axis=1, bitorder="little").tobytes()),
        "mask": which.tolist(),
        "cells": compressed(cells.tobytes()),
    }


def compressed(raw: bytes) -> str:
    """Bytes as base64 of their zlib form, which browsers inflate without a library."""
    return base64.b64encode(zlib.compress(raw, 9)).decode()
