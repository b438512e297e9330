"""Who wrote what heads read, and how much of a behaviour does a circuit carry? Figures of the
strongest edges from writers to heads, and of the faithfulness of pruned runs over the size of the
circuit. The gallery and notebooks draw them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tl_geometry.base.errors import choice, count, require
from tl_geometry.base.results import Result
from tl_geometry.circuits.kept_edges import Faithfulness
from tl_geometry.render import figure as draw

COLOURS = dict(zip(("query", "key", "value"), draw.LINES, strict=False))
"""One colour for each side on which a head reads a writer."""
SHARES = {"cs": "covariance share", "gs": "gain share"}


def composition_figure(
    composition: Result | pd.DataFrame, *, share: str = "cs", n: int = 30
) -> draw.View:
    """The ``n`` strongest edges from writers to heads: a bar for each, in the colour of the side on
    which the head reads, with its 95% interval, and a tick where a randomly turned writer stands.

    Args:
        composition: from :func:`tl_geometry.circuits.composition`.
        share: ``"cs"`` (covariance) or ``"gs"`` (gain).
        n: how many edges.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> edges = tlg.composition(model, windows, layers=1, progress=False)
    >>> composition_figure(edges).title.split()[1]
    'reads'
    """
    said = SHARES[choice(share, tuple(SHARES), "share")]
    random, low, high = f"random_{share}", f"{share}_low", f"{share}_high"
    table: Any = draw.frame(composition, "layer", "head", "side", share, random, low, high)
    table = table[table[share].notna()].rename(columns={"writer": "part"})
    # rounding orders no equals: all that heads of the first block read is the embedding
    edges = table.iloc[(-table[share].abs()).round(6).argsort(kind="stable")].head(count(n, "n"))
    names = [
        f"L{row['layer']}H{row['head']} {row['side']} \N{LEFTWARDS ARROW} {row['part']}"
        for row in edges.to_dict("records")
    ]
    figure, (axis,) = draw.panels(None, size=(draw.WIDTH, 0.19 * len(edges) + 1.0))
    places = np.arange(len(edges))
    ends = [(edges[share] - edges[low]).fillna(0.0), (edges[high] - edges[share]).fillna(0.0)]
    look = {"color": edges["side"].map(COLOURS), "ecolor": draw.NULL, "height": 0.75}
    axis.barh(places, edges[share], xerr=ends, **look)
    sign = np.where(edges[share] < 0, -1, 1)
    axis.plot(sign * edges[random], places, "|", color="k", ms=7, label="null: turned writer")
    for side, colour in COLOURS.items():  # entries of the legend
        axis.plot([], [], "s", color=colour, label=f"read as {side}")
    draw.legend(figure, [axis])
    axis.set_yticks(places, [draw.drawable(name) for name in names], fontsize=7)
    axis.set(xlabel=said, ylabel="reader ← writer")
    axis.axvline(0, color=draw.NULL, lw=0.6)
    axis.invert_yaxis()
    axis.margins(y=0.01)
    best = edges.iloc[0]
    return draw.view(
        figure,
        composition,
        title=f"L{best['layer']}H{best['head']} reads {best['part']} in its {best['side']} most",
        caption=f"Each bar is one of the {len(edges)} strongest edges from a writer to a head that "
        f"reads it, with the 95% interval of its {said} over prompts (none below 10).",
        null="A tick is the share of the same writer, turned at random (root mean square).",
    )


def faithfulness_curve(
    results: Faithfulness | Mapping[str, Faithfulness], *, ax: draw.Axes | None = None
) -> draw.View:
    """Faithfulness f of pruned runs over the share of edges that are kept, with 95% intervals over
    prompts, beside that of random circuits of equal size.

    Args:
        results: from :func:`tl_geometry.faithfulness` for ranked edges; several by name,
            to compare rankings. The random circuits drawn are those of the first.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=4).tokens
    >>> pairs = {"counterfactual": windows[2:], "answer": (11, 12)}
    >>> scores = tlg.edge_scores(model, windows[:2], **pairs)
    >>> options = {"fractions": (0.05, 0.5, 1.0), "draws": 2}
    >>> result = tlg.faithfulness(model, windows[:2], scores, **pairs, **options)
    >>> faithfulness_curve(result).title
    'How much of the behaviour do the highest-ranked edges carry?'
    """
    named = dict(results) if isinstance(results, Mapping) else {"highest scores": results}
    few, expected = 0 < len(named) <= len(draw.LINES), f"1 to {len(draw.LINES)} curves"
    require(few, "results", expected=expected, got=len(named))
    for each in named.values():
        draw.require_result(each, Faithfulness, "results", "faithfulness(model, prompts, scores)")
    chosen = [name for name, result in named.items() if result.chosen]  # each is one point
    require(not chosen, "results", expected="ranked edges", got=f"sets: {chosen}", instead=".f")
    figure, (axis,) = draw.panels(ax, size=(draw.WIDTH, 3.2))
    first = next(iter(named.values()))
    for color, (name, result) in zip(draw.LINES, named.items(), strict=False):
        at, f = 100 * result.fractions, result.f
        label = f"{name}: CPR {float(result.cpr.value):.2f}, CMD {float(result.cmd.value):.2f}"
        axis.plot(at, f.value, "o-", color=color, ms=3, lw=1.5, label=label)
        axis.fill_between(at, f.low, f.high, color=color, alpha=0.2, lw=0)
    null, at = first.random_f, 100 * first.fractions
    random = {"color": draw.NULL, "ms": 3, "lw": 1, "label": f"null: {len(null)} random circuits"}
    axis.plot(at, null.mean(0), "s--", **random)
    axis.fill_between(at, null.amin(0), null.amax(0), color=draw.NULL, alpha=0.2, lw=0)
    axis.axhline(1, color=draw.NULL, lw=0.5)
    axis.set(xscale="log", xlabel="edges kept (%)", ylabel="faithfulness f (share of the metric)")
    draw.legend(figure, [axis], ax=ax)
    return draw.view(
        figure,
        first,
        title="How much of the behaviour do the highest-ranked edges carry?",
        caption="f is 1 where the pruned run has the metric of the whole model, and 0 where it has "
        "that of the counterfactual. Bands are 95% intervals over prompts (from 10 prompts on).",
        null=f"Grey: random circuits of the same sizes (those of {next(iter(named))}), their mean "
        "and range.",
    )
