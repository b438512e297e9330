"""Do measures of position and context stand above their nulls? Figures of every measure over the
states, of Fourier blocks, of incoherence, and of learning curves. The report, the gallery and a
notebook draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tl_geometry.base.errors import choice, require
from tl_geometry.base.tables import Table
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures import positional
from tl_geometry.render.figure import (
    GREEN,
    GREY,
    PINK,
    VERMILION,
    WIDTH,
    View,
    canvas,
    draw_matrix,
    legend_outside,
    one_axes,
    panels,
    shades,
    some,
    whole_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NULLS = {
    "shuffled": VERMILION,
    "noise": GREY,
    "isotropic": GREEN,
    "random": GREEN,
    "flipped": PINK,
    "exchanged": VERMILION,
}
"""Colour of each null in every figure. Nulls of one colour never stand in one panel."""
UNITS = {
    "rank": "directions",
    "stable_rank": "directions",
    "relative_norm": "ratio of norms",
    "relative_norm_reference": "ratio of norms",
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
POSITIONAL = (
    "rank",
    "stable_rank",
    "relative_norm",
    "low_frequency",
    "smoothness",
    "fracture",
    "roughness",
    "split_half",
)
"""Measures of a positional report that are drawn by default."""
CONTEXTUAL = ("incoherence_avg", "overlap", "intra", "inter", "compactness_cvec", "compactness_raw")
"""Measures of a contextual report that are drawn by default."""


def fourier(basis: PositionContext, frequencies: int = 10) -> View:
    """Leading block of the 2-D cosine transform of the cosines between positions, a panel for each
    of at most five evenly spaced states (Song & Zhong 2023, Fig. 3 right).

    Mass in the top left corner means that positions lie on a smooth curve.

    Args:
        basis: a decomposition.
        frequencies: rows and columns of the block.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> fourier(basis).title
    'Are neighbouring positions alike?'
    """
    rows = some(range(len(basis.states)), 5)
    pos = basis.pos[rows]
    spectrum = positional.fourier(positional.normalized_gram(pos))
    block = spectrum[:, :frequencies, :frequencies]
    shares, count = positional.low_frequency_share(pos, frequencies).tolist(), block.shape[-1]
    # one scale for all panels; 1 where all coefficients are zero
    limit = float(block.nan_to_num().abs().amax()) or 1.0
    figure, axes = canvas(len(rows), size=(WIDTH / len(rows), 1.9))
    for axis, row, share, coefficients in zip(axes, rows, shares, block, strict=True):
        draw_matrix(axis, coefficients, -limit, limit)
        axis.set_title(f"state {basis.states[row]}: {share:.0%}", fontsize=8)
        axis.set(xlabel="frequency", xticks=whole_ticks(range(count), 6))
    figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.8, label="coefficient")
    axes[0].set_ylabel("frequency")
    caption = (
        "Each panel is the leading block of the cosine transform of the cosines between positions: "
        "mass in the top left corner means that neighbours are alike. The percentage is the share "
        f"of the energy in the first {count} frequencies."
    )
    return View(
        figure,
        title="Are neighbouring positions alike?",
        caption=caption,
        null=f"In random order they hold about {count / pos.shape[1]:.0%}.",
        source=basis.provenance.line(),
    )


def _draw_measure(axis: Axes, report: Table, name: str) -> None:
    """Draw one measure over the states, with its errors and nulls."""
    frame, states = report.df, [int(str(s)) for s in report.column("state")]
    bars = frame[f"{name}_se"].fillna(0) if f"{name}_se" in frame else None
    look = {"color": "k", "marker": "o", "ms": 3, "lw": 1, "capsize": 2, "label": "measured"}
    axis.errorbar(states, frame[name], yerr=bars, **look)
    for null, color in NULLS.items():
        if f"{name}_{null}" in frame:
            values = frame[f"{name}_{null}"]
            axis.plot(states, values, "--", lw=1, color=color, label=f"null: {null}")
    axis.set_title(NAMES.get(name, name.replace("_", " ")), fontsize=9)
    axis.ticklabel_format(axis="y", scilimits=(-3, 3), useMathText=True)
    ticks = whole_ticks(states, 8)
    axis.set(xlabel="state", xticks=ticks, ylabel=UNITS.get(name, "share"))


def measure_curves(
    report: Table, names: Sequence[str] | None = None, *, ax: Axes | None = None
) -> View:
    """Measures over the states, with jackknife errors (bars) and nulls (dashed). A measure that
    lies on a null is no finding.

    Args:
        report: from :func:`tl_geometry.positional_report` or
            :func:`tl_geometry.contextual_report`.
        names: measures, one panel each; by default :data:`POSITIONAL` or :data:`CONTEXTUAL`.
        ax: axes to draw one measure into.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> report = tlg.positional_report(basis)
    >>> measure_curves(report, ("stable_rank",)).title
    'Do measures of position stand above their nulls?'
    """
    of_position = "relative_norm" in report.names
    usual = POSITIONAL if of_position else CONTEXTUAL
    chosen = [n for n in usual if n in report.names] if names is None else list(names)
    require(len(chosen) > 0, "names", expected=f"some of {', '.join(report.names)}", got="none")
    for name in chosen:
        choice(name, report.names, "names")
    # four panels fill two rows of two
    columns = 2 if len(chosen) == 4 else min(3, len(chosen))
    size = (WIDTH / columns, 2.0)
    figure, axes = panels(ax, len(chosen), "measure", columns=columns, size=size)
    for axis, name in zip(axes, chosen, strict=True):
        _draw_measure(axis, report, name)
    legend_outside(figure, axes, ax=ax)
    what = "position" if of_position else "context"
    return View(
        figure,
        title=f"Do measures of {what} stand above their nulls?",
        caption="Points are measured, bars one jackknife standard error (for 95% times Student's "
        "t, with one degree of freedom fewer than groups).",
        null="Dashed lines are nulls: a measure that lies on one is no finding.",
        source=report.provenance.line(),
    )


def incoherence(report: Table) -> View:
    """Mean and largest |cos| between positional and context vectors, beside three nulls: random
    directions, coordinates with flipped signs, and windows without a context.

    Args:
        report: from :func:`tl_geometry.contextual_report`.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> report = tlg.contextual_report(basis)
    >>> incoherence(report).title
    'Are position and context aligned otherwise than by chance?'
    """
    figure, axes = canvas(2, size=(WIDTH / 2, 2.4))
    for axis, name in zip(axes, ("incoherence_avg", "incoherence_max"), strict=True):
        _draw_measure(axis, report, name)
        axis.set_ylim(bottom=0)
    legend_outside(figure, axes)
    return View(
        figure,
        title="Are position and context aligned otherwise than by chance?",
        caption="Mean and largest |cos| between positional and context vectors; the paper defines "
        "the maximum and tabulates the average.",
        null="On a dashed line it is chance: random directions, coordinates with flipped signs, "
        "windows whose positions were exchanged (no context).",
        source=report.provenance.line(),
    )


def learning_curve(curve: Table, name: str, *, ax: Axes | None = None) -> View:
    """A measure over the number of contexts, one line per state. A measure that still changes at
    the right end depends on the size of the corpus.

    Args:
        curve: from :func:`tl_geometry.measures.learning_curve`.
        name: the measure.
        ax: axes to draw into.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> learning_curve(tlg.measures.learning_curve(basis), "rank").title
    'Does the rank still grow with the corpus?'
    """
    choice(name, curve.names[2:], "learning_curve")
    figure, axis = one_axes(ax, (WIDTH, 2.6))
    frame = curve.df
    states, contexts = frame["state"].unique().tolist(), frame["contexts"].unique().tolist()
    shade = shades(figure, axis, states, "state")
    for state in states:
        values = frame[frame["state"] == state][name]
        axis.semilogx(contexts, values, "o-", ms=3, lw=1, color=shade(state))
    axis.set_xticks(contexts, [str(c) for c in contexts])
    axis.minorticks_off()
    words = name.replace("_", " ")
    axis.set(xlabel="contexts", ylabel=f"{words} ({UNITS.get(name, 'share')})")
    return View(
        figure,
        title=f"Does the {words} still grow with the corpus?",
        caption="Each line is a state; a point is the mean over disjoint blocks that "
        "have the number of contexts on the x axis.",
        null="A line that is flat at its right end would not change with more text.",
        source=curve.provenance.line(),
    )
