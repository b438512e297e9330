"""Figures of the measures of position and context: every measure over the states beside its nulls,
spectra, Fourier blocks, the plane of position, incoherence, similarity of documents. The report and
notebooks draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tl_geometry.base import linalg
from tl_geometry.base.errors import fail, require
from tl_geometry.base.html import visible
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.measures import positional
from tl_geometry.measures.context_report import ContextualReport
from tl_geometry.measures.position_report import PositionalReport
from tl_geometry.measures.state_measures import StateMeasures
from tl_geometry.render.figure import (
    GREEN,
    GREY,
    PARTS,
    PINK,
    SEQUENTIAL,
    VERMILION,
    WIDTH,
    View,
    canvas,
    draw_matrix,
    drawable,
    legend_outside,
    no_ticks,
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
"""One colour for each null in every figure."""
SPECTRA = {
    "P": (PARTS["pos"], "position"),
    "Cvec": (PARTS["cvec"], "context + residual"),
    "R": (PARTS["resid"], "residual"),
}
"""Colour and name of each part in spectra."""
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
"""Units of measures; the others are shares."""
NAMES = {"incoherence_avg": "mean |cos|", "incoherence_max": "largest |cos|"}
"""Labels of measures whose key says too little."""
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
"""Measures of a positional report that are drawn unless others are named."""
CONTEXTUAL = ("incoherence_avg", "overlap", "intra", "inter", "compactness_cvec", "compactness_raw")
"""Measures of a contextual report that are drawn unless others are named."""
CONTEXTS = 10
"""Sampled contexts whose tokens stand in the plane of position, as in the paper's figure."""
NAMED = 24
"""Characters of a document's name on an axis: its last ones."""


def _rows(states: Sequence[int], chosen: Sequence[int] | None, most: int) -> list[int]:
    """Rows of the chosen states, by default at most ``most`` at even distances."""
    if chosen is None:
        return some(range(len(states)), most)
    missing = [s for s in chosen if s not in states]
    require(not missing, "states", expected=f"some of {tuple(states)}", got=missing)
    return [list(states).index(s) for s in chosen]


def singular_values(
    basis: PositionContext,
    *,
    states: Sequence[int] | None = None,
    ax: Axes | None = None,
) -> View:
    """Leading singular values of P, Cvec and R, one panel per state (Song & Zhong 2023, Fig. 3
    left); those of P are scaled by the root of the number of contexts, as if its rows were repeated
    in each.

    Args:
        basis: from :func:`tl_geometry.decompose`.
        states: which, by default at most four at even distances (with ``ax`` one).
        ax: axes to draw one state into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> singular_values(basis).title
    'In how many directions do position and context lie?'
    """
    require_basis(basis)
    rows = _rows(basis.states, states, 1 if ax is not None else 4)
    figure, axes = panels(ax, len(rows), "state", size=(max(1.8, WIDTH / 4), 2.4), sharey=True)
    for axis, row in zip(axes, rows, strict=True):
        ctx = None if basis.ctx is None else basis.ctx[row]
        moment = basis.second_moment(basis.states[row])
        spectra = positional.spectra_from_moments(basis.pos[row], moment, basis.contexts, ctx)
        for name, values in spectra.items():
            colour, label = SPECTRA[name]
            ranks = torch.arange(1, len(values) + 1)
            above = values > 1e-9 * values[0]  # below lies rounding
            line = {"ms": 3, "lw": 0.8, "color": colour, "label": label}
            axis.semilogy(ranks[above], values[above], ".-", **line)
        axis.set_title(f"state {basis.states[row]}", fontsize=9)
        axis.set_xlabel("rank")
    axes[0].set_ylabel("singular value\n(units of the stream)")
    legend_outside(figure, axes, ax=ax)
    return View(
        figure,
        title="In how many directions do position and context lie?",
        caption="Each line is the singular values of one part, largest first, on a logarithmic "
        "axis: the faster it falls, the fewer directions. Those of position are multiplied by the "
        "root of the number of contexts.",
        null="What noise gives is the null of the rank among the measures of position.",
        source=basis.provenance.line(),
    )


def fourier(report: PositionalReport, *, states: Sequence[int] | None = None) -> View:
    """Leading block of the 2-D cosine transform of the cosines between positions, a panel per state
    (Song & Zhong 2023, Fig. 3 right).

    Mass in the top left corner means that positions lie on a smooth curve.

    Args:
        report: from :func:`tl_geometry.positional_report`.
        states: which, by default at most five at even distances.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> report = tlg.positional_report(basis)
    >>> fourier(report).title
    'Are neighbouring positions alike?'
    """
    rows = _rows(report.states, states, 5)
    count, block = report.fourier.shape[-1], report.fourier[rows]
    limit = float(block.nan_to_num().abs().amax()) or 1.0
    figure, axes = canvas(len(rows), size=(WIDTH / min(len(rows), 5), 1.9))
    for axis, row, coefficients in zip(axes, rows, block, strict=True):
        draw_matrix(axis, coefficients, -limit, limit)
        share = float(report["low_frequency"][row])
        axis.set_title(f"state {report.states[row]}: {share:.0%}", fontsize=8)
        axis.set(xlabel="frequency", xticks=whole_ticks(range(count), 6))
    figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.8, label="coefficient")
    axes[0].set_ylabel("frequency")
    caption = (
        "Each panel is the leading block of the cosine transform of the cosines between positions: "
        "mass in the top left corner means that neighbours are alike. The percentage is the share "
        f"of the energy in the first {count} frequencies."
    )
    order = report.nulls.get(("low_frequency", "shuffled"))
    null = "" if order is None else f"In random order they hold {float(order[rows].max()):.0%}."
    return View(
        figure,
        title="Are neighbouring positions alike?",
        caption=caption,
        null=null,
        source=report.provenance.line(),
    )


def planes(basis: PositionContext, *, states: Sequence[int] | None = None) -> View:
    """Positional vectors and cvec of a few contexts on the two leading directions of P, not centred
    again (Song & Zhong 2023, Fig. 1).

    Context vectors are grey; where they scatter as widely as the coloured curve, position does not
    dominate this plane.

    Args:
        basis: from :func:`tl_geometry.decompose`.
        states: which, by default at most five at even distances.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> planes(basis).title
    'Does context stay out of the plane of position?'
    """
    require_basis(basis)
    rows = _rows(basis.states, states, 5)
    figure, axes = canvas(len(rows), size=(WIDTH / min(len(rows), 5), 1.7))
    for axis, row in zip(axes, rows, strict=True):
        pos = basis.pos[row]
        # a stream of one dimension has one direction: a zero one is added
        V = torch.nn.functional.pad(linalg.svd(pos).V, (0, 1))
        if basis.samples is not None:
            h = basis.samples[:CONTEXTS, row, slice(*basis.window)].double()
            cloud = positional.pca_view((h - basis.mean[row] - pos).flatten(0, 1), V)
            axis.scatter(*cloud.T, s=0.5, color="#bbbbbb", rasterized=True)
        points = positional.pca_view(pos, V)
        axis.scatter(*points.T, c=range(*basis.window), cmap=SEQUENTIAL, s=5)
        axis.set_title(f"state {basis.states[row]}", fontsize=8)
        axis.set_xlabel("u1")
        no_ticks(axis)
    axes[0].set_ylabel("u2")
    caption = (
        f"{len(rows)} of {len(basis.states)} states on the two leading directions of their "
        f"positional vectors: coloured points are positions, grey ones the tokens of {CONTEXTS} "
        "contexts without their position."
    )
    return View(
        figure,
        title="Does context stay out of the plane of position?",
        caption=caption,
        null="Where grey scatters as widely as the curve, position does not dominate.",
        source=basis.provenance.line(),
    )


def _draw_measure(axis: Axes, report: StateMeasures, name: str) -> None:
    """One measure over the states, with its errors and nulls."""
    error = report.errors.get(name)
    bars = None if error is None else error.nan_to_num()
    look = {"color": "k", "marker": "o", "ms": 3, "lw": 1, "capsize": 2, "label": "measured"}
    axis.errorbar(report.states, report[name], yerr=bars, **look)
    for (measure, null), values in report.nulls.items():
        if measure == name:
            axis.plot(report.states, values, "--", lw=1, color=NULLS[null], label=f"null: {null}")
    axis.set_title(NAMES.get(name, name.replace("_", " ")), fontsize=9)
    axis.ticklabel_format(axis="y", scilimits=(-3, 3), useMathText=True)
    states = whole_ticks(report.states, 8)
    axis.set(xlabel="state", xticks=states, ylabel=UNITS.get(name, "share"))


def measure_curves(
    report: StateMeasures, names: Sequence[str] | None = None, *, ax: Axes | None = None
) -> View:
    """Measures over the states, with jackknife errors (bars) and nulls (dashed); what lies on a
    null is no finding.

    Args:
        report: from :func:`tl_geometry.positional_report` or
            :func:`tl_geometry.contextual_report`.
        names: measures, a panel each; the usual ones of the report by default.
        ax: axes to draw one measure into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> report = tlg.positional_report(basis)
    >>> measure_curves(report, ("stable_rank",)).title
    'Do measures of position stand above their nulls?'
    """
    usual = POSITIONAL if isinstance(report, PositionalReport) else CONTEXTUAL
    chosen = [n for n in usual if n in report.values] if names is None else list(names)
    require(len(chosen) > 0, "names", expected=f"some of {', '.join(report.values)}", got="none")
    columns = 2 if len(chosen) == 4 else min(3, len(chosen))
    size = (WIDTH / columns, 2.0)
    figure, axes = panels(ax, len(chosen), "measure", columns=columns, size=size)
    for axis, name in zip(axes, chosen, strict=True):
        _draw_measure(axis, report, name)
    if ax is None:
        legend_outside(figure, axes)
    what = "position" if isinstance(report, PositionalReport) else "context"
    return View(
        figure,
        title=f"Do measures of {what} stand above their nulls?",
        caption="Points are measured, bars one jackknife standard error (for 95% times Student's "
        "t, with one degree of freedom fewer than groups).",
        null="Dashed lines are nulls: a measure that lies on one is no finding.",
        source=report.provenance.line(),
    )


def incoherence(report: ContextualReport) -> View:
    """Mean and largest |cos| between positional and context vectors, beside random directions,
    sign-flipped coordinates, and windows without a context.

    Args:
        report: from :func:`tl_geometry.contextual_report`.

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


def learning_curve(report: StateMeasures, name: str, *, ax: Axes | None = None) -> View:
    """A measure against the number of contexts, a line per state: what still moves at the right end
    depends on the size of the corpus.

    Args:
        report: from :func:`tl_geometry.positional_report` or
            :func:`tl_geometry.contextual_report`, with ``jackknife=True``.
        name: the measure.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> report = tlg.positional_report(basis)
    >>> learning_curve(report, "rank").title
    'Does the rank still grow with the corpus?'
    """
    expected = f"one of {', '.join(report.curve) or 'no measure (jackknife=False)'}"
    require(name in report.curve, "learning_curve", expected=expected, got=repr(name))
    figure, axis = one_axes(ax, (WIDTH, 2.6))
    shade = shades(figure, axis, report.states, "state")
    for i, state in enumerate(report.states):
        values = report.curve[name][:, i]
        axis.semilogx(report.curve_contexts, values, "o-", ms=3, lw=1, color=shade(state))
    axis.set_xticks(report.curve_contexts, [str(c) for c in report.curve_contexts])
    axis.minorticks_off()
    words = name.replace("_", " ")
    axis.set(xlabel="contexts", ylabel=f"{words} ({UNITS.get(name, 'share')})")
    return View(
        figure,
        title=f"Does the {words} still grow with the corpus?",
        caption="Each line is a state; its points are means over disjoint blocks of so many "
        "contexts.",
        null="A line that is flat at its right end would not change with more text.",
        source=report.provenance.line(),
    )


def similarity(
    report: ContextualReport, *, state: int | None = None, ax: Axes | None = None
) -> View:
    """Mean |cos| between the context vectors of every pair of documents, in one state.

    Args:
        report: from :func:`tl_geometry.contextual_report` of a corpus with documents.
        state: which state, by default the middle one.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8), labels=[0, 1] * 6)
    >>> report = tlg.contextual_report(basis, rank=3)
    >>> similarity(report).title
    'Which documents have similar contexts?'
    """
    if report.similarity is None:
        instead = "contextual_report(basis, labels=...)"
        fail("similarity", expected="a report with documents", got="none", instead=instead)
    row = len(report.states) // 2 if state is None else _rows(report.states, [state], 1)[0]
    cosines = report.similarity[row]
    figure, axis = one_axes(ax, (0.75 * WIDTH, 4.2))
    image = draw_matrix(axis, cosines, 0.0, 1.0)
    if 0 < len(report.names) == len(cosines) <= 12:
        names = [drawable(visible(name)[-NAMED:]) for name in report.names]
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=6)
        axis.set_yticks(range(len(names)), names, fontsize=6)
    axis.set(xlabel="document", ylabel="document")
    figure.colorbar(image, ax=axis, label="mean |cos|", shrink=0.8)
    axis.set_title(f"state {report.states[row]}", fontsize=9)
    shuffled = report.nulls.get(("intra", "shuffled"))
    null = "" if shuffled is None else f"With documents shuffled it is {float(shuffled[row]):.2f}."
    return View(
        figure,
        title="Which documents have similar contexts?",
        caption="Each cell is the mean |cos| of context vectors of two documents, pairs of "
        "different windows; the diagonal is within a document, white is no pair.",
        null=null,
        source=report.provenance.line(),
    )
