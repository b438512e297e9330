"""The four parts that pages are made of, as the data that ``assets/`` draws: linked heat maps, bars
of what a cell is made of, a text with coloured tokens, and a graph. A click in one part changes
the others."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from tl_geometry.base import html
from tl_geometry.render.figure import PARTS

Part = dict[str, Any]
LISTED = 12
"""Most edges of one type into or out of a node that a page lists."""


def deflated(raw: bytes) -> str:
    """Bytes as base64 of their zlib form, which browsers inflate without a library."""
    return base64.b64encode(zlib.compress(raw, 9)).decode()


def maps(values: Float[np.ndarray, "row map i j"], **said: Any) -> Part:
    """Heat maps, stored as float16 relative to the largest value of each (NaN: no cell).

    ``names`` of the maps, ``rows`` (heads, of which one is chosen), ``axes`` and ``labels`` of i
    and j, ``limits`` (full colour) of each map, ``colours`` beside the names;
    ``together`` shows all maps of the chosen row side by side, else one chosen map.
    """
    units = np.nan_to_num(abs(values)).max((2, 3))
    units = np.where(units > 0, units, 1.0)  # a map of zeros stays zero
    signed = (np.nan_to_num(values) < 0).any((0, 2, 3))
    packed = deflated((values / units[..., None, None]).astype(np.float16).tobytes())
    stored = {"shape": values.shape, "packed": packed, "units": units, "signed": signed}
    return {"kind": "maps", **stored, **said}


def bars(title: str, maps: Sequence[int], **said: Any) -> Part:
    """What the chosen cell of the maps is made of: a bar for each of ``maps``, the share of each of
    ``groups`` (pairs of a name and a map), other maps as ``numbers``, and ``words`` (pairs of a
    name and a grid of texts)."""
    empty: Part = {"groups": (), "numbers": (), "words": ()}
    return {"kind": "bars", "title": title, "maps": list(maps), "colours": PARTS, **empty, **said}


def tokens(title: str, texts: Sequence[str], values: Sequence[float] = (), mark: int = -1) -> Part:
    """A text whose tokens have the colour of their values, or (without values) of the chosen map at
    the chosen query. The token at ``mark`` is framed."""
    return {
        "kind": "tokens",
        "title": title,
        "texts": [html.token_text(text) for text in texts],
        "breaks": ["\n" in text or "\u010a" in text for text in texts],  # Ċ: GPT-2's line end
        "values": list(values) or None,
        "limit": max(map(abs, values), default=0.0) or 1.0,
        "mark": mark,
    }


def arcs(nodes: pd.DataFrame, edges: pd.DataFrame, **said: Any) -> Part:
    """A graph: nodes by position (along x) and row (upwards), edges by the places of their ends.
    ``texts`` of the tokens; ``exact``: query and key edges are part of the sum."""
    columns = ("name", "kind", "head", "position", "row", "value", "moved")
    return {
        "kind": "arcs",
        "nodes": {name: nodes[name].tolist() for name in columns},
        "edges": {name: edges[name].tolist() for name in ("source", "target", "type", "value")},
        "listed": LISTED,
        **said,
    }
