"""What do all static figures share? The object that every figure returns, the colours of the
library, and small helpers that draw axes, maps, paths and legends."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tl_geometry.base import html
from tl_geometry.base.errors import require
from tl_geometry.base.files import as_path, write_bytes
from tl_geometry.base.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:
    Axes = Figure = Any  # matplotlib is loaded by the first figure

POSITIVE, NEGATIVE = "#b2182b", "#2166ac"
"""One colour for each sign, the ends of the diverging map."""
DIVERGING, ORDERED = "RdBu_r", "viridis"
"""Maps of signed values, and of an order, such as that of states."""
PARTS = {"position": "#0f7f6e", "content": "#6b3fa0", "token": "#cc79a7", "mixed": "#c7861b"}
PARTS |= {"constants": "#8a9099", "pos": "#0f7f6e", "ctx": "#6b3fa0", "resid": "#c3c8ce"}
"""One colour for each part and group of terms in every figure and page."""
INK, NULL, CONTROL = "#1b1f24", "#5f6670", "#c3c8ce"
"""Colours of text, of every null (dashed), and of controls."""
LINES = ("#0f7f6e", "#6b3fa0", "#c7861b", "#cc79a7", "#4a5560", "#7fb7ad", "#a98bc9")
"""Colours of lines that are no part, in their order."""
WIDTH = 7.2
"""Inches across a figure that fills a page of text: 720 pixels in :meth:`View.html`."""
NARROWEST = 480
"""Pixels to which a wider figure shrinks in a narrow window, where the reader moves it sideways."""
HEAVY = 150_000
"""Bytes of an SVG above which the HTML holds a PNG instead, which then weighs less."""
LONGEST = 80
"""Most characters of a label or title."""
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "pdf.fonttype": 42,  # fonts embedded as TrueType
    "font.size": 9,
    "axes.prop_cycle": f"cycler('color', {list(LINES)})",
    "axes.edgecolor": "#8a9099",
    "axes.linewidth": 0.6,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "xtick.color": NULL,
    "ytick.color": NULL,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
"""matplotlib's settings for every figure."""
DARK = (
    "<style>@media(prefers-color-scheme:dark)"
    "{.tlg-figure img{filter:invert(.92) hue-rotate(180deg)}}</style>"
)
"""On a dark page a figure is inverted, and its hues turned back: red stays red."""
HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width='
    'device-width"><style>:root{color-scheme:light dark;font:15px/1.45 system-ui,sans-serif}'
    "body{max-width:48em;margin:1em auto;padding:0 1em}</style>"
)
"""How the page of a saved figure begins, in the letters of the other pages."""


@dataclass(eq=False, repr=False)
class View:
    """A drawn figure. It shows itself in a notebook; ``save`` writes HTML, PNG, SVG or PDF by the
    suffix; ``figure`` is the matplotlib figure.

    The HTML is one self-contained image with its caption: no script, no network. ``title`` states
    the finding or the question, ``caption`` says how to read the figure, ``null`` what chance gives
    (or why no null is drawn), ``source`` what it was computed from.
    """

    figure: Figure
    _: KW_ONLY
    title: str
    caption: str = ""
    source: str = ""
    null: str = ""

    def _bytes(self, form: str) -> bytes:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.BytesIO()
        # no date and a fixed salt of ids: the same figure gives the same bytes
        stamp: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
        canvas, dpi = self.figure.canvas, self.figure.dpi
        with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": "tl_geometry"}):
            # 150 dots an inch, shown at 100 pixels an inch: sharp on dense screens too
            if form != "svg":
                self.figure.savefig(buffer, format=form, dpi=150, metadata=stamp)
            else:  # one drawing, where savefig lays the figure out in a drawing of its own
                self.figure.dpi = 150
                FigureCanvasSVG(self.figure).print_svg(buffer, metadata=stamp)
        self.figure.set_canvas(canvas)
        self.figure.dpi = dpi
        return buffer.getvalue()

    def png(self) -> bytes:
        """The image, 150 dots an inch."""
        return self._bytes("png")

    def svg(self) -> bytes:
        """The image, text as text."""
        return self._bytes("svg")

    def html(self) -> str:
        """The figure as an HTML fragment: title, caption, image, and its source folded below."""
        form, data = "svg+xml", self.svg()
        if len(data) > HEAVY:
            form, data = "png", self.png()
        # 100 pixels an inch; the image shrinks in a narrower window, while its text can be read
        width = f"width:{100 * self.figure.get_size_inches()[0]:.0f}px"
        style = f"{width};max-width:max(100%,{NARROWEST}px);background:white"
        url = f"data:image/{form};base64,{base64.b64encode(data).decode()}"
        title, how = html.escape(self.title), html.escape(f"{self.caption} {self.null}".strip())
        head = f'<figcaption><b>{title}</b> <span class="how">{how}</span></figcaption>'
        body = f'<div style="overflow-x:auto"><img alt="{title}" style="{style}" src="{url}"></div>'
        made = f"<summary>How this was made</summary>{html.escape(self.source)}"
        inside = f"{DARK}{head}{body}<details>{made}</details>"
        return f'<figure class="tlg-figure" style="margin:0 0 1em">{inside}</figure>'

    def save(self, path: str | Path) -> Path:
        """Write to ``x.html``, ``x.png``, ``x.svg`` or ``x.pdf`` and return the path."""
        path = as_path(path)
        form = path.suffix.lower().removeprefix(".")
        expected = "a name ending in .html, .png, .svg or .pdf"
        require(form in ("html", "png", "svg", "pdf"), "path", expected=expected, got=str(path))
        head = f"{HEAD}<title>{html.escape(self.title)}</title>"
        write_bytes(path, (head + self.html()).encode() if form == "html" else self._bytes(form))
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        png = base64.b64encode(self.png()).decode()
        return {"text/html": self.html(), "image/png": png, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"{self.title}: {self.caption}"


def view(figure: Figure, result: Any, title: str, caption: str, null: str) -> View:
    """The view of a result, with its provenance."""
    return View(figure, title=title, caption=caption, null=null, source=source_of(result))


def source_of(result: Any) -> str:
    """The provenance of a result in one line; nothing for a DataFrame of one's own."""
    return result.provenance.line() if isinstance(result, Result) else ""


def require_result(result: Any, kind: type[Any], what: str, instead: str) -> None:
    """Refuse what is not of the class that a view draws."""
    expected, got = f"a {kind.__name__}", type(result).__name__
    require(isinstance(result, kind), what, expected=expected, got=got, instead=instead)


def frame(result: Any, *columns: str) -> pd.DataFrame:
    """The table of a result, or a DataFrame itself; refused without these columns."""
    table = result.to_dataframe() if isinstance(result, Result) else result
    missing = [name for name in columns if name not in getattr(table, "columns", ())]
    got = f"{type(result).__name__} without {', '.join(missing)}"
    require(not missing, "table", expected=f"columns {', '.join(columns)}", got=got)
    return table


def panels(
    ax: Axes | None,
    count: int = 1,
    *,
    columns: int = 0,
    size: tuple[float, float] = (WIDTH, 2.8),
    **options: Any,
) -> tuple[Figure, list[Any]]:
    """A figure, outside pyplot's global state, and its axes for ``count`` panels of ``size`` inches
    in rows of ``columns`` (one row by default). The user's axes take a single panel: several are
    refused, so that none is silently left out."""
    one = ax is None or count == 1
    require(one, "ax", expected="a single panel when drawing into ax", got=f"{count} panels")
    if ax is not None:
        return ax.figure, [ax]  # type: ignore[return-value]
    import matplotlib
    from matplotlib.figure import Figure

    columns = columns or count
    rows = -(-count // columns)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def image(axis: Axes, values: Any, limit: float) -> Any:
    """A matrix as an image, one cell per value, from blue at ``-limit`` to red."""
    return axis.imshow(values, DIVERGING, vmin=-limit, vmax=limit, interpolation="nearest")


def path(axis: Any, points: Any, numbers: Sequence[int], size: float) -> Any:
    """A path through points of two or three dimensions: a thin line, and points coloured by their
    numbers."""
    axis.plot(*points.T, color="#8888", lw=0.7, zorder=1)
    # axes of three dimensions order by depth themselves, but would fade the colours of far points
    depth = {"depthshade": False} if points.shape[1] == 3 else {"zorder": 2}
    return axis.scatter(*points.T, c=numbers, cmap=ORDERED, s=size, **depth)


def legend(figure: Figure, axes: Sequence[Axes], *, ax: Axes | None = None) -> None:
    """One legend for all panels above them, where it covers nothing; inside the user's ``ax``."""
    if ax is not None:
        ax.legend()
        return
    drawn = [axis.get_legend_handles_labels() for axis in axes]
    # panels repeat their labels: the last handle of each stands for all
    handles = {label: h for pair in drawn for h, label in zip(*pair, strict=True)}
    # an inch holds about 11 characters, and an entry has the width of 6 beside its label
    entry = 6 + max(map(len, handles), default=0)
    columns = min(4, max(1, int(11 * figure.get_figwidth() / entry)))
    figure.legend(handles.values(), handles, loc="outside upper left", ncols=columns)


def shades(figure: Figure, axis: Axes, values: Sequence[int], label: str) -> Any:
    """The function that gives each of ordered values (states, layers) its colour, with the bar that
    says which is which."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    # a single value still needs a scale of some length
    ends = Normalize(values[0], max(values[-1], values[0] + 1))
    scale = ScalarMappable(ends, matplotlib.colormaps[ORDERED])
    figure.colorbar(scale, ax=axis, label=label, shrink=0.8, ticks=whole_ticks(values, 8))
    return scale.to_rgba


def some(values: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the values, evenly spaced. The first is always among them, and the last
    where ``most`` is two or more.

    >>> some(range(31), 7), some(range(31), 1)
    ([0, 5, 10, 15, 20, 25, 30], [0])
    """
    last = len(values) - 1
    if last < most:
        return list(values)
    return [values[round(i * last / max(most - 1, 1))] for i in range(most)]


def whole_ticks(values: Sequence[int], most: int = 12) -> list[int]:
    """Ticks for states or layers: the multiples of the smallest step (1, 2, 5, 10, ...) that leaves
    at most ``most`` of them.

    >>> whole_ticks(range(31))
    [0, 5, 10, 15, 20, 25, 30]
    """
    step = next((s for s in (1, 2, 5, 10, 20, 50) if (values[-1] - values[0]) / s < most), 100)
    ticks = [v for v in values if v % step == 0]
    return ticks if len(ticks) > 1 else some(values, most)


def drawable(text: str, longest: int = LONGEST) -> str:
    r"""Text as matplotlib draws it: cut to ``longest`` characters, ``$`` escaped (it would begin a
    formula), characters that its default font lacks as ``\uXXXX`` or ``\UXXXXXXXX``.

    >>> print(drawable("a$b\U0001f9e0"))
    a\$b\U0001f9e0
    """
    from matplotlib import font_manager

    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    written = "".join(c if font.get_char_index(ord(c)) else html.unicode_escape(c) for c in text)
    return written.replace("$", r"\$")
