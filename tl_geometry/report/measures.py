"""Section: do measures of position and of context stand above their nulls? Called by
:mod:`tl_geometry.report.analysis`."""

from __future__ import annotations

from tl_geometry.measures import contextual_report, learning_curve, positional_report
from tl_geometry.render import measures as views
from tl_geometry.report import findings
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft

SHAPE = ("rank", "stable_rank", "relative_norm", "low_frequency", "smoothness", "fracture")
"""Measures of position in the figure and the table of the page."""
MEASURED = (
    "state",
    *SHAPE,
    *(f"{name}_{null}" for name in SHAPE for null in ("noise", "shuffled")),
)
"""Columns of the table of position that are shown on the page."""
FEWEST = 8
"""Fewest positions for which a positional basis is measured."""


def section(draft: Draft, analysis: Analysis) -> None:
    """Rank, norm, smoothness of the positional basis; similarity, incoherence, compactness of the
    context basis."""
    width = analysis.basis.window[1] - analysis.basis.window[0]
    if width < FEWEST:
        draft.leave_out("measures", f"{width} positions are fewer than {FEWEST}")
        return
    with draft.part("measures of position"):
        _position(draft, analysis)
    with draft.part("measures of context"):
        _context(draft, analysis)


def _position(draft: Draft, analysis: Analysis) -> None:
    basis = analysis.basis
    report = positional_report(basis, seed=analysis.seed)
    middle = len(basis.states) // 2
    state = basis.states[middle]
    draft.say(
        "Is the positional basis low-dimensional and smooth? Bars are jackknife errors over groups "
        "of contexts; dashed lines are nulls (positions in random order, sampling noise alone, "
        "isotropic noise of the same energy): a measure that lies on its null is not a finding."
    )
    cell = Cells("positional", report)
    draft.say(
        f"At state {state} the rank estimate is {cell(middle, 'rank')} (ScreeNOT), the stable rank "
        f"{cell(middle, 'stable_rank')}, and {cell(middle, 'low_frequency', percent=True)} of the "
        "energy of the unit positional vectors lies in the ten lowest frequencies. The published "
        "relative norm divides by the uncentred states; both forms are in the table."
    )
    draft.draw(views.measure_curves(report, SHAPE), "position")
    with draft.part("the Fourier transform of the cosines"):
        short = Cells("positional", report, rounded=True)
        shuffled = short(middle, "low_frequency_shuffled", percent=True)
        null = f"In random order they hold {shuffled} in state {state}."
        draft.draw(views.fourier(basis), "fourier", null=null)
    draft.say(
        "The rank grows with the number of contexts, because sampling noise falls: where the "
        "learning curve still rises, a larger corpus would give a larger rank."
    )
    draft.draw(views.learning_curve(learning_curve(basis), "rank"), "learning")
    draft.table("positional", report, "Measures of position in each state", MEASURED)
    draft.find(findings.smooth(report))


def _context(draft: Draft, analysis: Analysis) -> None:
    basis = analysis.basis
    if basis.ctx is None:
        why = "context vectors would take more than 1 GiB and were not kept"
        draft.leave_out("measures of context", why)
        return
    middle = len(basis.states) // 2
    report = contextual_report(basis, seed=analysis.seed)
    cell, exchanged = Cells("contextual", report), ""
    if "incoherence_avg_exchanged" in report.names:
        value = cell(middle, "incoherence_avg_exchanged")
        exchanged = f" and windows whose positions were exchanged {value}"
    draft.say(
        f"Positional and context vectors of state {basis.states[middle]} have a mean |cos| of "
        f"{cell(middle, 'incoherence_avg')}, where random directions have "
        f"{cell(middle, 'incoherence_avg_random')}{exchanged}. The paper defines incoherence as a "
        "maximum and tabulates an average; both are here."
    )
    draft.draw(views.incoherence(report), "incoherence")
    columns = [name for name in report.columns() if not name.endswith("_sd")]
    draft.table("contextual", report, "Measures of context in each state", columns)
    draft.find(findings.incoherence(report))
