"""What do all static figures share? The object that every static view returns, the settings and
colours of the library, and small helpers that draw axes, legends and ticks. The modules of this
package and the figures of :mod:`tl_geometry.papers` call them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import fail, require
from tl_geometry.base.files import as_path, write_bytes
from tl_geometry.base.printable import unicode_escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
"""Colour maps that colour-blind readers can read, in print too. The diverging map is red where a
value is positive."""
POSITIVE, NEGATIVE = "#b2182b", "#2166ac"
"""One colour for each sign, for lines and bars. Both are taken from the diverging map."""
BLUE, VERMILION, GREEN = "#0072b2", "#d55e00", "#009e73"
PINK, AMBER, GREY = "#cc79a7", "#e69f00", "#999999"
"""Colours of lines and points that colour-blind readers can tell apart (Okabe-Ito)."""
PARTS = {
    "pos": BLUE,
    "ctx": VERMILION,
    "resid": GREY,
    "bias": PINK,
    "cvec": AMBER,
    "mean": GREEN,
}
"""One colour for each part in every figure."""
WIDTH = 7.2
"""Inches across a figure that fills a page of text: 720 pixels in :meth:`View.html`."""
HEAVY = 150_000
"""Bytes of an SVG above which the HTML holds a PNG instead, which then weighs less."""
LONGEST = 80
"""Most characters of a label or title."""
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "font.size": 9,
    "axes.prop_cycle": f"cycler('color', {[BLUE, VERMILION, GREEN, AMBER, PINK, GREY, 'k']})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
}
"""matplotlib's settings for every figure. Text stays text in SVG ("none"), and PDF embeds its fonts
as TrueType (42)."""


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

    def bytes(self, form: str) -> bytes:
        """The image as ``"png"``, ``"svg"`` or ``"pdf"`` (fonts embedded)."""
        import matplotlib

        buffer = io.BytesIO()
        # no date and a fixed salt of ids: the same figure gives the same bytes
        stamp: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form, {})
        with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": "tl_geometry"}):
            # 150 dots an inch, shown at 100 pixels an inch: sharp on dense screens too
            self.figure.savefig(buffer, format=form, dpi=150, metadata=stamp)
        return buffer.getvalue()

    def html(self) -> str:
        """The figure as an HTML fragment: under its title and caption, its source folded below."""
        form, data = "svg+xml", self.bytes("svg")
        if len(data) > HEAVY:
            form, data = "png", self.bytes("png")
        # 100 pixels an inch; the image shrinks in a narrower window
        wide = f"max-width:min(100%,{100 * self.figure.get_size_inches()[0]:.0f}px)"
        source = f"data:image/{form};base64,{base64.b64encode(data).decode()}"
        attributes = f'src="{source}" style="{wide};background:white"'
        # the report's dark style inverts all images of figures but those of this class
        css_class = ' class="kept"' if self._sequential() else ""
        image = f'<img alt="{html.escape(self.title)}"{css_class} {attributes}>'
        how = html.escape(" ".join(filter(None, (self.caption, self.null))))
        # the space separates title and caption where no style sheet gives the title its own line
        head = f'<b>{html.escape(self.title)}</b> <span class="how">{how}</span>'
        top = f'<figcaption style="margin:0 0 .5em">{head}</figcaption>'
        body = f'<div class="plot" style="overflow-x:auto">{image}</div>'
        foot = folded(self.source)
        return f'<figure style="margin-left:0;margin-right:0">{top}{body}{foot}</figure>'

    def _sequential(self) -> bool:
        """Whether the figure has a sequential colour map, which a reader would misread if it were
        inverted. Dark pages invert all other figures."""
        drawn = (d for a in self.figure.axes for d in (*a.images, *a.collections))
        return any(d.get_array() is not None and d.get_cmap().name == SEQUENTIAL for d in drawn)

    def save(self, path: str | Path) -> Path:
        """Write to ``x.html``, ``x.png``, ``x.svg`` or ``x.pdf`` and return the path."""
        path = as_path(path)
        form = path.suffix.lower().removeprefix(".")
        if form not in ("html", "png", "svg", "pdf"):
            fail("path", expected="a name ending in .html, .png, .svg or .pdf", got=str(path))
        head = f'<!doctype html><meta charset="utf-8"><title>{html.escape(self.title)}</title>'
        page = f"{head}{self.html()}"
        write_bytes(path, page.encode() if form == "html" else self.bytes(form))
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {
            "text/html": self.html(),
            "image/png": base64.b64encode(self.bytes("png")).decode(),
            "text/plain": repr(self),
        }

    def __repr__(self) -> str:
        width, height = (int(v * 100) for v in self.figure.get_size_inches())
        return f"{self.title} ({width} x {height} px): {self.caption}"


def folded(source: str) -> str:
    """What a figure was computed from, as a line that a click unfolds.

    >>> folded("")
    ''
    """
    if not source:
        return ""
    return f"<details><summary>How this was made</summary>{html.escape(source)}</details>"


def canvas(
    columns: int = 1, rows: int = 1, *, size: tuple[float, float] = (3.2, 2.6), **options: Any
) -> tuple[Figure, list[Axes]]:
    """A new figure with a grid of axes, and the axes row by row; outside pyplot's global state."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, **options)
        return figure, list(grid.flat)


def one_axes(
    ax: Axes | None, size: tuple[float, float] = (WIDTH, 2.8), **options: Any
) -> tuple[Figure, Any]:
    """The user's axes and their figure, or a new figure with one axes."""
    if ax is not None:
        return ax.figure, ax  # type: ignore[return-value]
    figure, axes = canvas(size=size, **options)
    return figure, axes[0]


def panels(
    ax: Axes | None,
    count: int,
    what: str,
    *,
    columns: int | None = None,
    size: tuple[float, float],
    **options: Any,
) -> tuple[Figure, list[Axes]]:
    """A panel for each of ``count`` things, in rows of ``columns`` (one row by default). The user's
    axes take a single panel: several are refused, so that none is silently left out."""
    expected = f"one {what} when drawing into ax"
    require(ax is None or count == 1, "ax", expected=expected, got=f"{count} {what}s")
    if ax is not None:
        return ax.figure, [ax]  # type: ignore[return-value]
    columns = columns or count
    figure, axes = canvas(columns, -(-count // columns), size=size, **options)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def draw_matrix(axis: Axes, values: Tensor, low: float, high: float, **options: Any) -> Any:
    """A matrix as an image, one cell per value; the diverging map where ``low`` is negative."""
    scale = {"cmap": DIVERGING if low < 0 else SEQUENTIAL, "vmin": low, "vmax": high}
    return axis.imshow(values.numpy(), **{**scale, "interpolation": "nearest", **options})


def draw_path(axis: Any, points: Tensor, numbers: Sequence[int], size: float) -> Any:
    """A path through points of two or three dimensions: a thin line, and points coloured by their
    numbers."""
    axis.plot(*points.T, color="#8888", lw=0.7, zorder=1)
    # axes of three dimensions order by depth themselves, but would fade the colours of far points
    depth = {"depthshade": False} if points.shape[1] == 3 else {"zorder": 2}
    return axis.scatter(*points.T, c=numbers, cmap=SEQUENTIAL, s=size, **depth)


def draw_paths_3d(
    axis: Any, paths: Tensor, states: Sequence[int], names: Sequence[str], *, size: float
) -> None:
    """Paths ``[path state 3]`` on axes of three dimensions with these names, coloured by state."""
    points = [draw_path(axis, path, states, size) for path in paths]
    axis.set(xlabel=names[0], ylabel=names[1], zlabel=names[2])
    axis.locator_params(nbins=4)
    # any path can stand for the colour bar: all have the same states; the pad clears the z labels
    bar = {"label": "state", "shrink": 0.6, "pad": 0.15, "ticks": whole_ticks(states)}
    axis.figure.colorbar(points[-1], ax=axis, **bar)


def legend_beside(axis: Axes, **options: Any) -> None:
    """A legend to the right of the axes, where it covers nothing."""
    where: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axis.legend(**{"fontsize": 8, "frameon": False, **where, **options})


def legend_outside(
    figure: Figure, axes: Sequence[Axes], where: str = "upper left", *, ax: Axes | None = None
) -> None:
    """One legend for all panels at an edge of the figure, where it covers none of them. In the
    user's axes ``ax`` the legend stands inside."""
    if ax is not None:
        ax.legend(fontsize=7, frameon=False)
        return
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            # panels repeat their labels: the first handle of each stands for all
            handles.setdefault(label, handle)
    place = {"loc": f"outside {where}", "ncols": len(handles)}
    figure.legend([*handles.values()], [*handles], fontsize=8, frameon=False, **place)


def no_ticks(axis: Axes) -> None:
    """Remove the ticks of axes whose units mean nothing to a reader, such as directions."""
    axis.set(xticks=[], yticks=[])


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


def head_names(heads: Sequence[tuple[int, int]]) -> str:
    """Names of a few heads, or how many there are.

    >>> head_names([(0, 1), (2, 3)]), head_names([(0, h) for h in range(5)])
    ('L0H1, L2H3', '5 heads')
    """
    return ", ".join(map(head_name, heads)) if len(heads) <= 4 else f"{len(heads)} heads"


def whole_ticks(values: Sequence[int], most: int = 12) -> list[int]:
    """Ticks for states or layers: the multiples of the smallest step (1, 2, 5, 10, ...) that leaves
    at most ``most`` of them.

    >>> whole_ticks(range(31))
    [0, 5, 10, 15, 20, 25, 30]
    """
    step = next((s for s in (1, 2, 5, 10, 20, 50) if (values[-1] - values[0]) / s < most), 100)
    return [v for v in values if v % step == 0]


def shades(figure: Figure, axis: Axes, values: Sequence[int], label: str) -> Any:
    """Draw a colour bar in place of a legend of many values. Returns the function that gives the
    colour of a value."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    # a single value still needs a scale of some length
    ends = Normalize(values[0], max(values[-1], values[0] + 1))
    scale = ScalarMappable(ends, matplotlib.colormaps[SEQUENTIAL])
    figure.colorbar(scale, ax=axis, label=label, shrink=0.8, ticks=whole_ticks(values, 8))
    return scale.to_rgba


def drawable(text: str, longest: int = LONGEST) -> str:
    r"""Text that a label can hold: cut at ``longest`` characters, ``$`` escaped (it would begin a
    formula), characters that its default font lacks as ``\uXXXX`` or ``\UXXXXXXXX``.

    >>> print(drawable("a$b\U0001f9e0"))
    a\$b\U0001f9e0
    """
    from matplotlib import font_manager

    text = text if len(text) <= longest else f"{text[: longest - 1]}…"
    font = font_manager.get_font(font_manager.findfont("DejaVu Sans"))
    written = "".join(c if font.get_char_index(ord(c)) else unicode_escape(c) for c in text)
    return written.replace("$", r"\$")
