"""The page of a split: the signed terms of the attention scores of some heads, their total and the
pattern, as linked panels on one symmetric scale. README, the guide, notebooks and the report show
it.

1. The input is some heads of one context of a :class:`~tl_geometry.scores.ScoreSplit`. Terms
   are taken one by one, or summed to four groups.
2. For more than :data:`CELLS` tokens a panel shows block maxima. Values are quantised
   (:mod:`tl_geometry.render.cells`), more coarsely where the page would be too large.
3. The page (``assets/split.js``) draws them; matplotlib draws the image from the same numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from decimal import ROUND_UP, Context
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.checks import Head, head_name
from tl_geometry.base.errors import fail, require
from tl_geometry.base.rows import ROW_CELLS, row_center
from tl_geometry.render import cells
from tl_geometry.render.figure import (
    DIVERGING,
    SEQUENTIAL,
    View,
    drawable,
    head_names,
    no_ticks,
    one_axes,
)
from tl_geometry.render.page import PageView, caption_height, text_data, text_lines
from tl_geometry.scores.score_split import ScoreSplit
from tl_geometry.scores.terms import GROUPS, group_of, key_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Term = tuple[str, str]
NULL = "Terms are exact: they have no null."
CELLS = 256
"""Most cells across a panel. For more tokens a cell is a block of tokens."""
SIZES = (2_000_000, 4_000_000)
"""Most bytes of a page with up to four panels, and of a page with more."""
LEAST = 708
"""Smallest width of the page in pixels, which fits into a page of text."""
ROWS, LABELLED = 12, 24
"""Most heads that the image shows, and most token labels on each side of a panel."""
BEYOND = ("#ffb000", "#00b4a0")
"""Colours of values above and below the colour scale, as in ``assets/page.js``."""


def split(
    split: ScoreSplit,
    heads: Sequence[Head] | Head | None = None,
    *,
    context: int = 0,
    panels: str | Sequence[str] | None = None,
    tokens: Sequence[str] | None = None,
    centered: bool = False,
    title: str | None = None,
) -> PageView:
    """The signed terms of one or several heads, their total and the pattern, as linked panels on
    one symmetric scale.

    - Move over a cell to read its query token, its key token, and every panel there.
    - Click a query, or a token of the text, to colour its sources in the text by any panel.
    - Choose the head, and the end of the colour scale, above the panels.
    - A line of code gives the numbers of the cell from ``split``. Its button (or the key c) copies
      it; a click on a cell keeps it.

    Args:
        split: from :func:`tl_geometry.split_scores`.
        heads: some of its heads, ``(layer, head)`` or ``"L5H1"``; all by default.
        context: which prompt.
        tokens: texts of its tokens; a split brings those of its first prompt.
        panels: ``"groups"``: ``position``, ``content``, ``token`` (content and a constant) and
            ``mixed`` (content and position), which sum to the total; ``"terms"``: all nine or
            sixteen; or names of groups and terms. Groups by default, terms if the parts are your
            own.
        centered: subtract from each row of each panel its mean over the allowed keys, which does
            not change the softmax.
        title: title of the page, by default with the names of the heads.

    One colour scale serves all panels and heads. It ends at the largest value, or at twice the 99th
    percentile if that is less; values beyond it are marked. The pattern has a scale of its own,
    from 0 to 1. Panels of more than 256 tokens show block maxima (of the absolute value, with its
    sign). A page of up to four panels has at most 2 MB, any other 4 MB. To keep that, values get
    coarser steps, and then blocks become larger.

    A number on the page is within half a quantisation step of the split. Values are float16 up to
    64 tokens, else int8 relative to the largest value of their panel. The caption gives the
    rounding error, the reconstruction error, and how many cells are beyond the scale or not a
    number (hatched).

    Raises ``GeometryError`` for heads, contexts and panels that the split does not have, and for
    more heads than the page has room for.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> basis = tlg.decompose(model, tlg.zoo.default_windows(model, 16, n=8), progress=False)
    >>> text = "for i in range(3):"
    >>> scores = tlg.split_scores(model, text, basis, heads="L1H0", prepend_bos=True)
    >>> view = split(scores)  # shown in a notebook; view.save("split.html") writes a page
    >>> view.title, "reconstruction error" in view.caption
    ('Split of the scores of L1H0', True)
    """
    if not isinstance(split, ScoreSplit):
        instead = "split_scores(model, tokens, basis)"
        fail("split", expected="a ScoreSplit", got=type(split).__name__, instead=instead)
    rows = checks.head_rows(heads, split.heads, "split_scores(..., heads=...)")
    shown = _narrow(split, rows, checks.index(context, split.q.shape[1], "context"))
    chosen = panels_of(shown, panels)
    texts = _texts(split, tokens, context)
    most = SIZES[len(chosen) > 4]
    lookup = {"code": panel_code(chosen, centered), "context": context, "rows": rows}
    name = title or f"Split of the scores of {head_names(shown.heads)}"
    for block in _blocks(len(texts)):
        grids = draw_panels(shown, chosen, block, centered)
        # float16 panels have no steps to choose, so they are packed once
        for levels in cells.LEVELS if grids.values.shape[-1] > cells.EXACT else cells.LEVELS[:1]:
            packed = cells.pack(grids.values, grids.allowed, levels)
            size = len(packed["cells"])
            if size > 1.6 * most:  # the coarsest steps save only a third: larger blocks are needed
                break
            if size <= most:
                page = _page(shown, chosen, grids, packed, texts, centered, name, lookup)
                if len(page.html()) <= most:
                    return page
    got = f"{len(rows)} heads x {len(chosen) + 2} panels"
    return fail("split", expected=f"what a page of {most} bytes holds", got=got, instead="heads=")


def _blocks(tokens: int) -> Iterator[int]:
    """Block sizes to try, the finest first; the others leave at least 8 blocks across."""
    block = -(-tokens // CELLS)
    yield block
    while tokens / (block := 2 * block) >= 8:
        yield block


def panels_of(split: ScoreSplit, panels: str | Sequence[str] | None) -> dict[str, list[Term]]:
    """The name of each panel, and the terms that it sums."""
    terms = {f"{a}-{b}": [(a, b)] for a, b in split.terms}
    groups = groups_of(list(split.terms))
    if panels is None:
        return groups or terms
    if panels == "groups" and not groups:
        got = "'groups' of parts of your own"
        fail("panels", expected="'terms', or names of terms", got=got)
    if panels in ("groups", "terms"):
        return groups if panels == "groups" else terms
    members = {**groups, **terms}
    wanted = [key_of(p) for p in ([panels] if isinstance(panels, str) else panels)]
    unknown = [p for p in wanted if p not in members]
    expected = f"'groups', 'terms' or some of {', '.join(members)}"
    require(wanted and not unknown, "panels", expected=expected, got=unknown or "none")
    return {p: members[p] for p in wanted}


def groups_of(terms: Sequence[Term]) -> dict[str, list[Term]]:
    """The terms of each of the four groups that has any; no groups if the parts are the user's own.

    >>> groups_of([("pos", "pos"), ("pos", "cvec"), ("alibi", "alibi")])
    {'position': [('pos', 'pos'), ('alibi', 'alibi')], 'mixed': [('pos', 'cvec')]}
    >>> groups_of([("mlp0", "embed")])
    {}
    """
    names = [group_of(f"{a}-{b}") for a, b in terms]
    if not all(names):
        return {}
    groups = {
        group: [term for term, name in zip(terms, names, strict=True) if name == group]
        for group in GROUPS
    }
    return {name: members for name, members in groups.items() if members}


def panel_code(panels: dict[str, list[Term]], centered: bool) -> list[str]:
    """Code that gives each panel, the total and the pattern from ``split``, all
    ``[batch head query key]``.

    >>> panel_code({"pos-cvec": [("pos", "cvec")]}, False)
    ["split.terms['pos', 'cvec']", 'split.total()', 'split.pattern()']
    """
    scores = [
        f"split.terms[{terms[0][0]!a}, {terms[0][1]!a}]"
        if len(terms) == 1
        else f"sum(split.terms[term] for term in {terms!a})"
        for terms in panels.values()
    ]
    scores.append("split.total()")
    if centered:
        scores = [f"split.centered({x})" for x in scores]
    return [*scores, "split.pattern()"]


class PanelValues(NamedTuple):
    """Values of the panels, then of the total and the pattern, one for each block of tokens."""

    values: Float[Tensor, "head term query key"]
    allowed: Bool[Tensor, "head query key"]
    block: int


def draw_panels(
    split: ScoreSplit, panels: dict[str, list[Term]], block: int = 1, centered: bool = False
) -> PanelValues:
    """The panels of the first context, then the total and the pattern, as block maxima, for all
    heads of the split. They are computed a few rows at a time, so that memory grows with the length
    of the prompt and not with its square."""
    length = split.q.shape[2]
    zero = torch.zeros(())
    # rows of a step: whole blocks, at most ROW_CELLS cells where that is possible
    step = block * max(1, ROW_CELLS // (len(split.heads) * length * block))

    def reduced(queries: slice) -> tuple[Tensor, Tensor]:
        allowed = split.allowed_rows(queries)
        shown = [
            sum((split.term(a, b, queries)[0] for a, b in some), zero) for some in panels.values()
        ]
        shown.append(split.total(queries)[0])
        if centered:
            shown = [row_center(x, allowed) for x in shown]
        shown.append(split.pattern(queries)[0])
        maxima = torch.stack([cells.block_maxima(x, allowed, block) for x in shown], 1)
        return maxima.double().cpu(), cells.any_allowed(allowed, block).cpu()

    rows = [reduced(slice(start, start + step)) for start in range(0, length, step)]
    values, seen = (torch.cat(column, -2) for column in zip(*rows, strict=True))
    return PanelValues(values, seen, block)


def _narrow(split: ScoreSplit, rows: list[int], context: int) -> ScoreSplit:
    """The split of some heads and one context, so that terms are computed for these alone."""
    at = slice(context, context + 1)
    return dataclasses.replace(
        split,
        heads=tuple(split.heads[i] for i in rows),
        q=split.q[:, at, :, rows],
        k=split.k[:, at, :, rows],
        bias=None if split.bias is None else split.bias[rows],
        key_range=split.key_range[rows],
        softcap=split.softcap[rows],
        sinks=split.sinks[rows],
        head_planes=split.head_planes.select(torch.tensor(rows)),
    )


def _texts(split: ScoreSplit, tokens: Sequence[str] | None, context: int) -> list[str]:
    length = split.q.shape[2]
    if tokens is None:
        str_tokens = split.str_tokens if context == 0 else ()
        tokens = str_tokens or [str(i) for i in range(length)]
    expected, instead = f"{length} texts", "tokens=model.to_str_tokens(...)"
    require(len(tokens) == length, "tokens", expected=expected, got=len(tokens), instead=instead)
    return [str(t) for t in tokens]


def _page(
    split: ScoreSplit,
    panels: dict[str, list[Term]],
    grids: PanelValues,
    packed: dict[str, Any],
    texts: list[str],
    centered: bool,
    title: str,
    lookup: dict[str, Any],
) -> PageView:
    names = [*(split.label(name) for name in panels), "total", "pattern"]
    top, high = _limit(grids)
    caption = _caption(split, panels, grids, packed, len(texts), top, centered)
    rows, columns, places = _layout(split, panels)
    size = grids.values.shape[-1]
    # pixels across a panel, larger where there are few; from 3 pixels on a cell is a whole number
    cell = (184 if max(rows, columns - 1) <= 3 else 150) / size
    cell = math.floor(cell) if cell >= 3 else max(1.0, cell)
    width = math.ceil(96 + columns * (cell * size + 16) + 12)
    grid = math.ceil(rows * (cell * size + 22) + 76)
    text = text_data(texts)
    data = {
        "heads": [head_name(h) for h in split.heads],
        "planes": names,
        "places": places,
        **text,
        "block": grids.block,
        "cell": cell,
        "canvas": [width, grid],
        "limit": top,
        "high": high,
        "query": (len(texts) - 1) // grids.block,
        **packed,
        **lookup,
    }
    across = max(width, LEAST)
    # lines of readings (112 pixels and a gap of 6 each, page.css), lines of buttons, and pixels of
    # the text, which scrolls above 180; 24 is the padding of the page
    readings = math.ceil(len(names) / max(1, (across - 24) // 118))
    buttons = math.ceil((150 + sum(8 * len(n) + 38 for n in names)) / across)
    lines = min(180, 24 * text_lines(text, across, padding=3, font=12))
    return PageView(
        "split",
        data,
        title=title,
        caption=caption,
        width=across + 24,
        height=188 + grid + 34 * (readings + buttons) + lines + caption_height(caption),
        image=functools.partial(_image, split, names, places, grids, texts, top, title, caption),
        null=NULL,
        source=split.provenance.line(),
    )


def _allowed(grids: PanelValues, values: Tensor) -> Tensor:
    """The values of some panels at the allowed keys, as one vector."""
    return values[grids.allowed[:, None].expand_as(values)]


def _limit(grids: PanelValues) -> tuple[float, float]:
    """The value of full colour, and the largest absolute value, over all panels but the
    pattern."""
    shown = _allowed(grids, grids.values[:, :-1])
    sizes = shown[torch.isfinite(shown)].abs()
    high = float(sizes.max()) if len(sizes) else 0.0
    percentile = max(1, math.ceil(0.99 * len(sizes)))
    # a few large cells would make all others pale; torch.quantile refuses so many values
    usual = 2 * float(sizes.kthvalue(percentile).values) if len(sizes) else 0.0
    return (min(high, usual) if usual > 0 else high) or 1.0, high or 1.0


def _layout(
    split: ScoreSplit, panels: dict[str, list[Term]]
) -> tuple[int, int, list[tuple[int, int]]]:
    """Rows and columns of the grid, and the row and column of each panel. Of a full set of terms,
    rows are the query part and columns the key part; total and pattern stand at the right."""
    names, side = list(panels), len(split.parts)
    every_term = names == [f"{a}-{b}" for a, b in split.terms]
    # other choices of panels: four in a square, else up to three in a row
    if not every_term:
        side = 2 if len(names) == 4 else min(3, len(names))
    places = [divmod(i, side) for i in range(len(names))]
    if every_term and len(names) > side * side:
        places[-1] = (2, side)  # ALiBi, below total and pattern
    rows = max(2, 1 + max(r for r, _ in places))
    return rows, side + 1, [*places, (0, side), (1, side)]


def _caption(
    split: ScoreSplit,
    panels: dict[str, list[Term]],
    grids: PanelValues,
    packed: dict[str, Any],
    tokens: int,
    top: float,
    centered: bool,
) -> str:
    shown, scores = (_allowed(grids, v) for v in (grids.values, grids.values[:, :-1]))
    # a little above the limit, so that rounding marks nothing; the page does the same
    beyond = int((scores.abs() > top * (1 + 1e-9)).sum())
    holes = int((~torch.isfinite(shown)).sum())
    largest = float(torch.where(torch.isfinite(shown), shown.abs(), 0.0).max())
    levels = packed["levels"]
    steps = f"int8 in {2 * levels + 1} steps of each panel's largest value" if levels else "float16"
    # float16 has steps of 2**-11 between 0.5 and 1, where the largest values of a panel lie
    half_step = 0.5 / levels if levels else 2.0**-12
    rounded_up = Context(prec=1, rounding=ROUND_UP).create_decimal(largest * half_step)
    what, error, bound = split.reconstruction.nearest or ("", None, None)
    marked = f", {beyond} of {scores.numel()} cells beyond it marked" if beyond else ""
    said = [
        f"{'Row-centred' if centered else 'Raw'} scores by query (down) and key (across), "
        f"{tokens} tokens: red raises attention, blue lowers it",
        f"full colour at {top:.3g} on every panel and head{marked}",
        "pattern from 0 to 1",
        f"{steps}: rounded by at most {rounded_up:g}",
    ]
    if error is not None:
        said.append(f"reconstruction error {error:.1e} ({what}; allowed {bound:.1e})")
    if {term for terms in panels.values() for term in terms} != set(split.terms):
        said.append("some of the terms: they do not sum to the total")
    if grids.block > 1:
        blocks = f"each cell is the largest by absolute value of {grids.block} x {grids.block}"
        said.append(f"{blocks} (sums do not hold between cells)")
    if holes:
        said.append(f"{holes} cells are not a number (hatched)")
    return "; ".join(said) + "."


def _image(
    split: ScoreSplit,
    names: list[str],
    places: list[tuple[int, int]],
    grids: PanelValues,
    texts: list[str],
    top: float,
    title: str,
    caption: str,
) -> View:
    """The static image, from the numbers that the page shows: the panels of one head in their grid,
    or a row of panels for each of several heads."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    count, n = min(len(split.heads), ROWS), grids.values.shape[-1]
    single = count == 1
    at = [places] if single else [[(row, i) for i in range(len(names))] for row in range(count)]
    rows, columns = (1 + max(place[i] for panels in at for place in panels) for i in (0, 1))
    # panels and gaps in cells of the sheet; larger gaps between rows of a single head
    high, wide = n + math.ceil(n * (0.14 if single else 0.06)), n + math.ceil(n * 0.06)
    signed = matplotlib.colormaps[DIVERGING].with_extremes(over=BEYOND[0], under=BEYOND[1])
    score = ScalarMappable(Normalize(-top, top), signed)
    # a pattern has the same colours on every page: 1 is all of the attention that a query pays
    pattern = ScalarMappable(Normalize(0, 1), SEQUENTIAL)
    # one image for all panels; what is not painted stays transparent
    sheet = np.zeros(((rows - 1) * high + n, (columns - 1) * wide + n, 4), dtype=np.uint8)
    for row, panels in enumerate(at):
        for values, name, (r, c) in zip(grids.values[row], names, panels, strict=True):
            painted = _painted(values, grids.allowed[row], pattern if name == "pattern" else score)
            sheet[r * high : r * high + n, c * wide : c * wide + n] = painted
    inch = 2.1 if single else 1.0  # of a panel
    across = 1.15 * inch * columns + 0.8
    # estimated inches of a panel beside labels and colour bars: sets the height and the font size
    side = 0.9 * (across - 1.4) / (1.06 * columns)
    down = side * rows * high / n + (0.7 if single else 0.65)
    figure, axis = one_axes(None, (across, down))
    axis.imshow(sheet, interpolation="nearest")
    axis.spines[:].set_visible(False)
    for name, (r, c) in zip(names, at[0], strict=True):
        size = 8 if single else 6.5
        axis.text(c * wide, r * high - 0.5 - 0.02 * n, name, fontsize=size, va="bottom")
    if single:
        # in points, 72 an inch: 0.8 of the distance between two labels
        size = min(7.0, 0.8 * 72 * side / max(1, min(len(texts), LABELLED)))
        _name_tokens(axis, places, texts if grids.block == 1 else [], high, wide, size)
    else:
        no_ticks(axis)
        labels = [head_name(h) for h in split.heads[:count]]
        axis.set_yticks([r * high + n / 2 for r in range(rows)], labels, fontsize=8)
    axis.tick_params(length=0)
    axis.set_xlabel("key", fontsize=8)
    axis.set_ylabel("query" if single else "head", fontsize=8)
    shown = _allowed(grids, grids.values[:, :-1])
    beyond = bool((shown.abs() > top * (1 + 1e-9)).any())
    # colour bars of at most about 3 inches, however many rows there are
    bar = {"shrink": min(1.0, 3 / (inch * rows)), "fraction": 0.05, "pad": 0.02, "aspect": 25}
    figure.colorbar(pattern, ax=axis, label="pattern", **bar)
    figure.colorbar(score, ax=axis, label="score", extend="both" if beyond else "neither", **bar)
    if count < len(split.heads):
        caption += f" {count} of {len(split.heads)} heads are drawn."
    return View(figure, title=title, caption=caption, null=NULL, source=split.provenance.line())


def _name_tokens(
    axis: Axes,
    places: list[tuple[int, int]],
    texts: list[str],
    high: int,
    wide: int,
    size: float,
) -> None:
    """Write the texts of tokens at the left of each row of panels and below the last row: all of a
    few, every second, third, ... of more than :data:`LABELLED`."""
    every, last = max(1, -(-len(texts) // LABELLED)), max(r for r, _ in places)
    labels = [drawable(html.token_text(t)) for t in texts[::every]]
    ticks = range(0, every * len(labels), every)
    below = [c for r, c in places if r == last]
    right = [c * wide + t for c in below for t in ticks]
    axis.set_xticks(right, labels * len(below), rotation=90, fontsize=size)
    down = [r * high + t for r in range(last + 1) for t in ticks]
    axis.set_yticks(down, labels * (last + 1), fontsize=size)


def _painted(values: Tensor, allowed: Tensor, shade: Any) -> np.ndarray:
    """Colours of a panel: grey where no key is allowed, a chequered pattern for NaN."""
    colours = shade.to_rgba(torch.nan_to_num(values).numpy(), bytes=True)
    q, k = np.indices(values.shape)
    hole = np.where((q + k)[..., None] % 2, (50, 50, 50, 255), (190, 190, 190, 255))
    colours = np.where(torch.isnan(values).numpy()[..., None], hole, colours)
    return np.where(allowed.numpy()[..., None], colours, (237, 237, 240, 255))
