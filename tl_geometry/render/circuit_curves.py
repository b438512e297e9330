"""How much of a behaviour does a circuit carry? The faithfulness of pruned runs over the size of
the circuit, beside random circuits. The gallery and a notebook draw it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tl_geometry.base.errors import require
from tl_geometry.circuits.pruned_runs import Faithfulness
from tl_geometry.render.figure import (
    BLUE,
    GREEN,
    GREY,
    PINK,
    VERMILION,
    WIDTH,
    View,
    legend_beside,
    one_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = (BLUE, VERMILION, GREEN, PINK)
"""Colours of the curves, which also limit how many one figure compares."""


def faithfulness_curve(
    results: Faithfulness | Mapping[str, Faithfulness], *, ax: Axes | None = None
) -> View:
    """Faithfulness f of pruned runs over the share of edges (or nodes) that are kept, with 95%
    intervals over prompts, beside that of random circuits of equal size.

    Args:
        results: from :func:`tl_geometry.faithfulness` for ranked edges or nodes; several by name,
            to compare rankings. The random circuits drawn are those of the first.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=4).tokens
    >>> pairs = {"prompts": windows[:2], "counterfactuals": windows[2:], "targets": (11, 12)}
    >>> scores = tlg.edge_scores(model, **pairs)
    >>> result = tlg.faithfulness(model, scores, **pairs, fractions=(0.05, 0.5, 1.0), draws=2)
    >>> faithfulness_curve(result).title
    'How much of the behaviour do the highest-ranked edges carry?'
    """
    named = {"highest scores": results} if isinstance(results, Faithfulness) else dict(results)
    expected = f"1 to {len(COLORS)} curves"
    require(0 < len(named) <= len(COLORS), "results", expected=expected, got=len(named))
    units = {result.unit for result in named.values()}
    # complements belong to a chosen set of edges, which is one point and has no curve
    same = len(units) == 1 and not any(r.complements is not None for r in named.values())
    expected = "curves of edges, or of nodes"
    require(same, "results", expected=expected, got=", ".join(sorted(units)))
    unit = units.pop()
    figure, axis = one_axes(ax, (WIDTH * 0.8, 3.0))
    first = next(iter(named.values()))
    for color, (name, result) in zip(COLORS, named.items(), strict=False):
        at, f = 100 * result.fractions, result.f
        label = f"{name}: CPR {float(result.cpr.value):.2f}, CMD {float(result.cmd.value):.2f}"
        axis.plot(at, f.value, "o-", color=color, ms=3, lw=1, label=label)
        axis.fill_between(at, f.low, f.high, color=color, alpha=0.2, lw=0)
    null = first.random_f
    at = 100 * first.fractions
    axis.plot(at, null.mean(0), "s--", color=GREY, ms=3, lw=1, label=f"{len(null)} random circuits")
    axis.fill_between(at, null.amin(0), null.amax(0), color=GREY, alpha=0.3, lw=0)
    axis.axhline(1, color="k", lw=0.5)
    axis.set(xscale="log", xlabel=f"{unit} kept (%)", ylabel="faithfulness f (share of the metric)")
    legend_beside(axis) if ax is None else axis.legend(fontsize=7, frameon=False)
    return View(
        figure,
        title=f"How much of the behaviour do the highest-ranked {unit} carry?",
        caption="f is 1 where the pruned run has the metric of the whole model, and 0 where it has "
        "that of the counterfactual. Bands are 95% intervals over prompts (from 10 prompts on).",
        null=f"Grey: random circuits of the same sizes (those of {next(iter(named))}), their mean "
        "and range.",
        source=first.provenance.line(),
    )
