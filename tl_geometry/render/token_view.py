"""Which tokens of a prompt did a logit come from? The text of the prompt, with every token in the
colour of what it contributes. The gallery, the guide and a notebook draw it.

The table of :meth:`~tl_geometry.circuits.LogitGraph.tokens` is drawn as running text, so that a
reader sees each token in its context.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tl_geometry.base import html
from tl_geometry.base.errors import require
from tl_geometry.circuits.logit_graph import TokenTable
from tl_geometry.render.figure import DIVERGING, WIDTH, View, canvas, drawable

LINE = 76
"""Characters of a line: as many as fit beside the colour bar in nine points. Text is drawn in eight
points, so that boxes are a little wider than their text."""
BAR = 1.0
"""Inches that the colour bar takes, whatever the width of the text."""
NARROWEST = 20
"""Fewest characters of a line."""
MARKED = 0.05
"""Tokens whose value is above this share of the largest have it written below them. More numbers
would overlap and say little."""
DARK = 0.6
"""Share of the colour scale above which the background is so dark that text is white."""


class PlacedToken(NamedTuple):
    """The text of a token and where it begins: characters from the left, lines from the top."""

    text: str
    x: int
    line: int


def lay_out(tokens: Sequence[str], width: int = LINE) -> list[PlacedToken]:
    r"""Place tokens as running text in lines of ``width`` characters. A token that ends with a line
    break ends its line.

    >>> [(token.x, token.line) for token in lay_out(["ab", " cd\n", "e"], 4)]
    [(0, 0), (0, 1), (0, 2)]
    """
    x = line = 0
    placed: list[PlacedToken] = []
    for token in tokens:
        text = drawable(html.plain(token.replace("\n", "↵")), width)
        if x + len(text) > width:
            x, line = 0, line + 1
        placed.append(PlacedToken(text, x, line))
        x += len(text)
        if token.endswith("\n"):
            x, line = 0, line + 1
    return placed


def token_attribution(table: TokenTable, *, width: int = LINE) -> View:
    """The text of a prompt. The colour of each token is what its embedding contributes to the logit
    along value paths (red for it, blue against it). Larger values stand below as numbers.

    Args:
        table: from ``trace_logit(...).tokens()``.
        width: characters of a line; 38 or fewer can be read on a phone.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=1)
    >>> graph = tlg.trace_logit(model, windows, int(windows.tokens[0, 15]), position=14)
    >>> tlg.render.token_attribution(graph.tokens()).title
    'What each token contributes to the logit'
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    enough = f"at least {NARROWEST} characters"
    require(width >= NARROWEST, "width", expected=enough, got=width)
    values = table.value[:-1].tolist()  # the last row is that of the constants
    placed = lay_out(table.tokens[:-1], width)
    # a text without contributions still needs a colour scale
    limit = max(map(abs, values)) or 1.0
    lines = placed[-1].line + 1
    across = BAR + (WIDTH - BAR) * width / LINE
    figure, (axis,) = canvas(size=(across, 0.9 + 0.42 * lines))
    scale = ScalarMappable(Normalize(-limit, limit), DIVERGING)
    font = {"family": "monospace", "va": "center", "clip_on": False}
    number = {"ha": "center", "fontsize": 6.5, **font}
    for value, token in zip(values, placed, strict=True):
        box = (token.x, token.line - 0.3), len(token.text), 0.6
        axis.add_patch(Rectangle(*box, facecolor=scale.to_rgba(value), edgecolor="#ddd", lw=0.4))
        colour = "white" if abs(value) > DARK * limit else "black"
        middle = token.x + len(token.text) / 2
        axis.text(middle, token.line, token.text, ha="center", fontsize=8, color=colour, **font)
        if abs(value) > MARKED * limit:
            axis.text(middle, token.line + 0.43, html.signed(value, "+.2f"), **number)
    axis.set(xlim=(0, width), ylim=(lines - 0.3, -0.5))
    axis.axis("off")
    figure.colorbar(scale, ax=axis, label="logit", shrink=0.9, aspect=12)
    constants, total = float(table.value[-1]), float(table.value.sum())
    return View(
        figure,
        title="What each token contributes to the logit",
        caption=f"Each token has the colour of its value, red for the logit and blue against it; "
        f"values above {MARKED:.0%} of the largest stand below. The tokens and the constants "
        f"({html.signed(constants, '+.3g')}) sum to {html.signed(total, '.4g')}.",
        null="All parts and the constants add up to the logit exactly: they have no null.",
        source=table.provenance.line(),
    )
