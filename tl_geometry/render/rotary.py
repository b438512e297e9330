"""Which wavelengths carry the scores of a head in a rotary model, and how does the head score each
offset of query and key? Views of rotary planes. The report, the gallery and a notebook draw
them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, head_name
from tl_geometry.base.errors import require
from tl_geometry.render.figure import (
    PARTS,
    View,
    canvas,
    legend_beside,
    legend_outside,
    one_axes,
)
from tl_geometry.render.head_view import name_heads
from tl_geometry.render.page import PageView, rounded
from tl_geometry.scores.planes import NEAR, PASS, BandTable, PlaneTable, default_bands
from tl_geometry.scores.relative import OffsetProfile
from tl_geometry.scores.terms import group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BANDS = {"near": "#96304e", "middle": "#b3b536", "far": "#8573d6", PASS: "#6e6e6e"}
"""Colour of each band in every figure. They differ in greyscale too, and differ from all parts."""
GROUPS = {
    "position": PARTS["pos"],
    "content": PARTS["cvec"],
    "token": "#009e73",
    "mixed": "#56b4e9",
    "all terms": PARTS["resid"],
}
"""Colours of groups of terms."""
REACH = 32
"""A profile shows the offsets smaller than this, in tokens."""
NULL = "The planes of a head share all of its score: no null is drawn."


def band_atlas(planes: PlaneTable, *, ax: Axes | None = None) -> View:
    """Every head in the colour of one band of wavelengths: the band with the largest share of the
    covariance of its scores. The larger the share, the stronger the colour.

    Args:
        planes: from ``sweep_heads(..., planes=True).planes()``.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, planes=True, progress=False)
    >>> band_atlas(sweep.planes()).title  # a model without rotation has one plane
    'The band of wavelengths that carries each head: pass in 16 of 16'
    """
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch

    bands, top, which, title = _carried(planes)
    layers = sorted({layer for layer, _ in planes.heads})
    width = 1 + max(head for _, head in planes.heads)
    grid = torch.ones(len(layers), width, 3)
    rows = zip(planes.heads, top.clamp(0, 1).tolist(), which.tolist(), strict=True)
    for (layer, head), strength, band in rows:
        colour = torch.tensor(to_rgb(BANDS[bands.bands[band]]))
        # mixed with white by the share; 15% of colour at least, to be told from white
        grid[layers.index(layer), head] = 1 - (1 - colour) * (0.15 + 0.85 * strength)
    size = (0.3 * width + 2.6, max(2.6, 0.16 * len(layers) + 1.2))
    figure, axis = one_axes(ax, size)
    axis.imshow(grid.numpy(), aspect="auto", interpolation="nearest")
    axis.set_ylabel("layer")
    name_heads(axis, layers, width)
    words = _in_words(planes.length)
    used = [band for i, band in enumerate(bands.bands) if bool((which == i).any())]
    patches = [Patch(color=BANDS[band], label=f"{band}: {words[band]}") for band in used]
    legend_beside(axis, handles=patches, fontsize=7)
    return View(
        figure,
        title=title,
        caption="Each cell is a head, coloured by the band of wavelengths with the largest share "
        "of the covariance of its scores; the stronger the colour, the larger that share.",
        null=NULL,
        source=planes.provenance.line(),
    )


def _carried(planes: PlaneTable) -> tuple[BandTable, Tensor, Tensor, str]:
    """The shares of bands, the largest share of each head, the number of the band that has it, and
    a title that says how many heads each band carries."""
    bands = planes.by_band()
    top, which = torch.nan_to_num(bands.cs).max(-1)
    each = [(band, int((which == i).sum())) for i, band in enumerate(bands.bands)]
    said = ", ".join(f"{band} in {count}" for band, count in each if count)
    title = f"The band of wavelengths that carries each head: {said} of {len(planes.heads)}"
    return bands, top, which, title


def bands_page(
    planes: PlaneTable,
    profile: OffsetProfile | None = None,
) -> PageView:
    """:func:`band_atlas` as an interactive page. A click or the arrow keys choose a head. Beside
    the map the page shows its planes (the share of each by its wavelength, position and content
    stacked) and, if the head has a profile, its mean score at each offset. A line of code gives the
    number under the mouse from ``planes`` or ``profile``; a click keeps it.

    Args:
        planes: from ``sweep_heads(..., planes=True).planes()``.
        profile: from ``offset_profile(split)`` of some of these heads.

    The page opens at the first head of ``profile``, or else at the head with the largest share of
    a band that is rotated.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, planes=True, progress=False)
    >>> bands_page(sweep.planes()).title
    'The band of wavelengths that carries each head: pass in 16 of 16'
    """
    profiled = () if profile is None else profile.heads
    missing = [h for h in profiled if h not in planes.heads]
    require(not missing, "profile", expected="heads of the table", got=missing)
    first = profiled[0] if profiled else _strongest(planes)
    layers = sorted({layer for layer, _ in planes.heads})
    bands, groups, words = planes.by_band(), _groups(planes), _in_words(planes.length)
    totals = {"cs": bands.cs, "gs": bands.gs}
    data = {
        "heads": [[layers.index(layer), number] for layer, number in planes.heads],
        "layers": layers,
        "count": 1 + max(number for _, number in planes.heads),
        "bands": [[name, words[name], BANDS[name]] for name in bands.bands],
        "groups": [[name, GROUPS[name]] for name in groups],
        "terms": [member.nonzero()[:, 0].tolist() for member in groups.values()],
        "shares": {
            name: {"bands": _rows(total), "planes": _stacked(planes, name)}
            for name, total in totals.items()
        },
        # w == w leaves out NaN, which marks planes that a head lacks
        "waves": [[rounded(w, 4) for w in row if w == w] for row in planes.wavelength.tolist()],
        "marks": [NEAR, planes.length],
        "profile": None if profile is None else _profile(planes, profile),
        "share": "cs",
        "head": planes.heads.index(first),
    }
    # height: 19 pixels for a row of the map (planes.css), at least that of the plots beside it
    return PageView(
        "planes",
        data,
        title=_carried(planes)[-1],
        caption="Rows are layers, columns heads. Each cell has the colour of the band of "
        "wavelengths with the largest share of the head's scores, the stronger the larger that "
        "share. Choose a head, by a click or the arrow keys, to see its planes.",
        width=1000,
        height=max(520 if profile is None else 720, 200 + 19 * len(layers)),
        image=functools.partial(band_atlas, planes),
        source=planes.provenance.line(),
        null=NULL,
    )


def _strongest(planes: PlaneTable) -> tuple[int, int]:
    """The head with the largest share of one rotated band; of any band where nothing is rotated."""
    bands = planes.by_band()
    total = torch.nan_to_num(bands.cs)
    turns = torch.tensor([name != PASS for name in bands.bands])
    total = total[:, turns] if bool(total[:, turns].any()) else total
    return planes.heads[int(total.amax(-1).argmax())]


def _groups(planes: PlaneTable) -> dict[str, Bool[Tensor, " term"]]:
    """Which terms belong to each group; all of them to ``"all terms"`` where they have no group."""
    names = [group_of(term) or "all terms" for term in planes.terms]
    groups = [group for group in GROUPS if group in names]
    return {group: torch.tensor([name == group for name in names]) for group in groups}


def _stacked(planes: PlaneTable, share: str) -> list[list[list[int]]]:
    """Shares of the planes of each head by group of terms, in units of 1/10,000. Whole numbers take
    a third of the bytes in a table of many planes."""
    shares = torch.nan_to_num(planes.cs if share == "cs" else planes.gs).double()
    member = torch.stack(list(_groups(planes).values()), -1).to(shares)
    parts = (1e4 * shares @ member).round().int()
    existing = ~planes.wavelength.isnan()
    return [head[rows].tolist() for head, rows in zip(parts, existing, strict=True)]


def _profile(planes: PlaneTable, profile: OffsetProfile) -> dict[str, Any]:
    """The offset profiles for the page, by the number of the head."""
    shown = profile.offsets.abs() < REACH
    curves = [_rows(x[:, shown]) for x in (profile.mean, profile.low, profile.high)]
    heads = [str(planes.heads.index(h)) for h in profile.heads]
    return {
        "offsets": profile.offsets[shown].tolist(),
        "first": profile.first,
        "heads": {h: list(c) for h, *c in zip(heads, *curves, strict=True)},
        "rows": {h: row for row, h in enumerate(heads)},
        "said": f"mean of {profile.term}, with its {profile.level:.0%} interval over prompts",
    }


def _rows(values: Tensor) -> list[list[float | None]]:
    return [[rounded(v, 4) for v in row] for row in values.tolist()]


def head_planes(
    planes: PlaneTable,
    profile: OffsetProfile | None = None,
    *,
    heads: Sequence[Head] | Head | None = None,
) -> View:
    """One row for each head: the share of each plane by its wavelength, position and content
    stacked; and, with ``profile``, the mean score at each offset with its interval.

    Args:
        planes: from a split's or a sweep's shares, ``.planes()``.
        profile: from ``offset_profile(split)`` of the same heads, for the second column.
        heads: some of the heads of ``planes`` (at most 12); by default all, or those of
            ``profile``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    >>> head_planes(split.shares().planes(), tlg.scores.offset_profile(split)).title
    'Which wavelengths carry L1H0'
    """
    available = planes.heads if profile is None else profile.heads
    # any layer and head passes here; those that the tables lack are refused by name below
    chosen = available if heads is None else checks.heads(heads, 10**6, 10**6)
    missing = [h for h in chosen if h not in planes.heads or h not in available]
    require(not missing, "heads", expected="heads of the table and the profile", got=missing)
    require(len(chosen) <= 12, "heads", expected="at most 12 to draw", got=len(chosen))
    columns = 1 if profile is None else 2
    figure, axes = canvas(columns, len(chosen), size=(4.2, 1.9))
    for row, head in enumerate(chosen):
        _draw_shares(axes[row * columns], planes, planes.heads.index(head), head)
        if profile is not None:
            _draw_profile(axes[row * columns + 1], profile, profile.heads.index(head))
    axes[-columns].set_xlabel("wavelength of the plane (tokens)")
    caption = (
        "Each bar is the share of one plane in the covariance of scores, from fast to slow; grey "
        f"lines stand at {NEAR} and {planes.length} tokens, hatched is not rotated."
    )
    if profile is not None:
        axes[-1].set_xlabel("offset, query minus key (tokens)")
        caption += f" The curve is the mean of {profile.term} at each offset"
        # a few prompts have no interval
        has_interval = bool(profile.low.isfinite().any())
        caption += f", with its {profile.level:.0%} interval over prompts." if has_interval else "."
    legend_outside(figure, axes[:columns], "upper center")
    return View(
        figure,
        title=f"Which wavelengths carry {', '.join(map(head_name, chosen))}",
        caption=caption,
        null=NULL,
        source=planes.provenance.line(),
    )


def _in_words(length: int) -> dict[str, str]:
    """Band -> its wavelengths in words, for windows of this length."""
    bands = default_bands(length)
    (low, high), longest = bands["middle"], bands["far"][0]
    return {
        "near": f"up to {NEAR} tokens",
        "middle": f"{low:g} to {high:g} tokens",
        "far": f"over {longest:g} tokens",
        PASS: "not rotated",
    }


def _draw_shares(axis: Axes, planes: PlaneTable, at: int, head: tuple[int, int]) -> None:
    """Draw bars of the planes of one head, stacked by group of terms where terms have groups."""
    waves = planes.wavelength[at]
    existing = ~waves.isnan()
    rotated = existing & ~waves.isinf()
    last = float(waves[rotated].max()) if bool(rotated.any()) else 1.0
    # what is not rotated has no wavelength: it stands at 4 times the longest one
    centre = torch.where(waves.isinf(), 4 * last, waves)[existing].log10()
    # bars leave a gap at the closest two wavelengths; planes that share one share a place
    apart = centre.unique().diff()
    width = 0.7 * float(apart.min()) if len(apart) else 0.5
    hatches = ["//" if w else "" for w in waves[existing].isinf().tolist()]
    # positive shares are stacked upwards from 0, negative ones downwards
    up, down = (torch.zeros(len(centre), dtype=torch.float64) for _ in range(2))
    for name, member in _groups(planes).items():
        share = torch.nan_to_num(planes.cs[at][existing][:, member].sum(-1).double())
        bottom = torch.where(share >= 0, up, down)
        look = {"color": GROUPS[name], "label": name, "hatch": hatches}
        axis.bar(centre.numpy(), share.numpy(), width, bottom.numpy(), **look)
        up, down = up + share.clamp(min=0), down + share.clamp(max=0)
    for edge in (NEAR, planes.length):
        axis.axvline(math.log10(edge), color="0.7", lw=0.8)
    axis.axhline(0, color="0.3", lw=0.6)
    # the axis holds logarithms, so ticks at powers of ten are written by hand
    low, high = math.floor(float(centre.min())), math.ceil(float(centre.max()))
    ticks = range(low, high + 1)
    axis.set_xticks(list(ticks), [f"$10^{{{t}}}$" for t in ticks])
    axis.set_title(head_name(head), fontsize=9)
    axis.set_ylabel("share")


def _draw_profile(axis: Axes, profile: OffsetProfile, at: int) -> None:
    """Draw the mean score of one head at each offset, with its interval."""
    shown = profile.offsets.abs() < REACH
    x, mean = profile.offsets[shown].numpy(), profile.mean[at][shown].numpy()
    low, high = profile.low[at][shown].numpy(), profile.high[at][shown].numpy()
    axis.fill_between(x, low, high, color=PARTS["pos"], alpha=0.25, lw=0)
    axis.plot(x, mean, ".-", ms=3, lw=0.9, color=PARTS["pos"], label="mean score")
    axis.axhline(0, color="0.3", lw=0.6)
    axis.axvline(1, color="0.7", lw=0.8, label="the token before")
    axis.set_ylabel("score\n(before softmax)")
