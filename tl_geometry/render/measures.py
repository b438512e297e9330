"""Do measures of position and context stand above their nulls? The figure of every measure over the
states, or over the number of contexts. The report, the gallery and a notebook draw it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from tl_geometry.base.checks import choice
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.render import figure as draw

NULLS = {
    "shuffled": (draw.NULL, "--"),
    "noise": (draw.NULL, ":"),
    "isotropic": (draw.LINES[2], "--"),
    "random": (draw.LINES[2], "--"),
    "flipped": (draw.LINES[3], "--"),
    "exchanged": (draw.NULL, "-."),
}
"""Colour and style of each null in every figure."""
UNITS = {
    "rank": "directions",
    "stable_rank": "directions",
    "relative_norm": "ratio of norms",
    "low_frequency": "share of energy",
    "smoothness": "ratio",
    "fracture": "ratio",
    "roughness": "ratio",
    "split_half": "cosine",
    "incoherence_avg": "|cos|",
    "incoherence_max": "|cos|",
    "intra": "|cos|",
    "inter": "|cos|",
}
"""Units of measures; measures that are not listed are shares."""
NAMES = {"incoherence_avg": "mean |cos|", "incoherence_max": "largest |cos|"}
"""Titles of measures whose key is not clear by itself."""
USUAL = {
    "position": (
        *("rank", "stable_rank", "relative_norm", "low_frequency"),
        *("smoothness", "fracture", "roughness", "split_half"),
    ),
    "context": (
        *("incoherence_avg", "overlap", "intra", "inter", "compactness_cvec", "compactness_raw"),
    ),
}
"""Measures that are drawn by default."""


def measure_curves(
    report: Result | pd.DataFrame,
    names: Sequence[str] | str | None = None,
    *,
    ax: draw.Axes | None = None,
) -> draw.View:
    """Measures over the states, with jackknife errors (bars) and nulls (dashed); or over the number
    of contexts, a line for each state. A measure that lies on a null is no finding, and one that
    still changes with the contexts depends on the size of the corpus.

    Args:
        report: from :func:`tl_geometry.positional_report`, :func:`tl_geometry.contextual_report` or
            :func:`tl_geometry.measures.learning_curve`.
        names: measures, one panel each; by default the best known of the table.
        ax: axes to draw one measure into.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> report = tlg.positional_report(basis)
    >>> measure_curves(report, "stable_rank").title
    'Do measures of position stand above their nulls?'
    """
    table = draw.frame(report, "state")
    about = "position" if "relative_norm" in table else "context"
    usual = [name for name in USUAL[about] if name in table]
    asked = [names] if isinstance(names, str) else names
    chosen = usual if asked is None else [choice(n, [*table.columns], "names") for n in asked]
    require(len(chosen) > 0, "names", expected="some measures", got="none")
    # four draw.panels fill two rows of two
    columns = 2 if len(chosen) == 4 else min(3, len(chosen))
    size = (draw.WIDTH / columns, 2.0)
    figure, axes = draw.panels(ax, len(chosen), columns=columns, size=size)
    growing = "contexts" in table
    for axis, name in zip(axes, chosen, strict=True):
        (_over_contexts if growing else _over_states)(axis, table, name)
    if growing:
        words = " and ".join(name.replace("_", " ") for name in chosen)
        title = f"Does the {words} still grow with the corpus?"
        caption = "Each line is a state; a point is the mean over disjoint blocks of that many "
        caption += "contexts."
        null = "A line that is flat at its right end would not change with more text."
    else:
        draw.legend(figure, axes, ax=ax)
        title = f"Do measures of {about} stand above their nulls?"
        caption = "Points are measured, bars one jackknife standard error (for 95% times Student's "
        caption += "t, with one degree of freedom fewer than groups)."
        null = "Dashed and dotted lines are nulls: a measure that lies on one is no finding."
    return draw.View(figure, title=title, caption=caption, null=null, source=draw.source_of(report))


def _over_states(axis: draw.Axes, table: pd.DataFrame, name: str) -> None:
    """Draw one measure over the states, with its errors and nulls."""
    states, error = table["state"].tolist(), f"{name}_se"
    bars = table[error].fillna(0.0) if error in table else None
    look = {"color": "k", "marker": "o", "ms": 3, "lw": 1, "capsize": 2, "label": "measured"}
    axis.errorbar(states, table[name], yerr=bars, **look)
    for null, (colour, style) in NULLS.items():
        if f"{name}_{null}" in table:
            line = {"lw": 1, "color": colour, "label": f"null: {null}"}
            axis.plot(states, table[f"{name}_{null}"], style, **line)
    if name.startswith("incoherence"):
        axis.set_ylim(bottom=0)
    axis.set_title(NAMES.get(name, name.replace("_", " ")))
    axis.ticklabel_format(axis="y", scilimits=(-3, 3), useMathText=True)
    axis.set(xlabel="state", xticks=draw.whole_ticks(states, 8), ylabel=UNITS.get(name, "share"))


def _over_contexts(axis: draw.Axes, table: pd.DataFrame, name: str) -> None:
    """Draw one measure over the number of contexts, a line for each state."""
    states, counts = sorted(set(table["state"])), sorted(set(table["contexts"]))
    shade = draw.shades(axis.figure, axis, states, "state")  # type: ignore[arg-type]
    for state, rows in table.groupby("state"):
        axis.semilogx(rows["contexts"], rows[name], "o-", ms=3, lw=1, color=shade(state))
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    words = NAMES.get(name, name.replace("_", " "))
    axis.set(xlabel="contexts", ylabel=f"{words} ({UNITS.get(name, 'share')})")
