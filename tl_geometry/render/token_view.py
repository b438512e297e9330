"""Which tokens of a prompt did a number come from? The page of a text, with every token in the
colour of what it contributes. The gallery, the guide and a notebook show it."""

from __future__ import annotations

import pandas as pd

from tl_geometry.base.html import signed
from tl_geometry.base.results import Result
from tl_geometry.render import figure as draw
from tl_geometry.render import parts
from tl_geometry.render.page import Page


def token_attribution(table: Result | pd.DataFrame, *, title: str = "") -> Page:
    """The text of a prompt. The colour of each token is its value: red for the logit, blue against
    it. Values above a twentieth of the largest stand below their token.

    Args:
        table: from ``trace_logit(...).tokens()``, or any table with ``token`` and ``value``; rows
            of position -1 (constants) stand in the caption.
        title: title of the page.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=1)
    >>> graph = tlg.trace_logit(model, windows, int(windows.tokens[0, 15]), position=14)
    >>> token_attribution(graph.tokens()).title
    'What each token contributes to the logit'
    """
    rows = draw.frame(table, "token", "value")
    placed = rows if "position" not in rows else rows[rows["position"] >= 0]
    rest, total = rows["value"].sum() - placed["value"].sum(), rows["value"].sum()
    constants = f" and the constants ({signed(rest, '+.3g')})" if len(placed) < len(rows) else ""
    return Page(
        title=title or "What each token contributes to the logit",
        caption="Each token has the colour of its value, red for the logit and blue against it. "
        f"The tokens{constants} sum to {signed(total, '.4g')}.",
        parts=[parts.tokens("", placed["token"].tolist(), placed["value"].tolist())],
        begin={},
        height=220 + 26 * (sum(map(len, placed["token"].astype(str))) // 80),
        source=draw.source_of(table),
        null="The parts add up to the logit exactly: they have no null.",
    )
