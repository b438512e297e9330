"""The measures of position and of context, with their errors and nulls."""

from __future__ import annotations

from tl_geometry.measures import contextual_report, positional_report
from tl_geometry.render import measures as views
from tl_geometry.report import findings
from tl_geometry.report.analysis import TITLES, Analysis
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft, Section

SHAPE = ("rank", "stable_rank", "relative_norm", "low_frequency", "smoothness", "fracture")
"""Measures of position that are drawn."""
MEASURED = (
    "state",
    *SHAPE,
    *(f"{name}_{null}" for name in SHAPE for null in ("noise", "shuffled")),
)
"""Columns of the table of position that stand on the page."""
FEWEST = 8
"""Positions that measures of a positional basis need."""
DECOMPOSITIONS = 84
"""Singular value decompositions of the basis that errors, curves and nulls of a state cost
(measured)."""


def _cost(analysis: Analysis) -> float:
    """Seconds of both reports, with jackknife errors."""
    width, d = analysis.basis.window[1] - analysis.basis.window[0], analysis.view.d_model
    small, large = sorted((width, d))
    return 3 + DECOMPOSITIONS * analysis.costs.svd * len(analysis.basis.states) * small**2 * large


def section(analysis: Analysis) -> Section:
    """Rank, norm, smoothness of the positional basis; similarity, incoherence, compactness of the
    context basis."""
    draft, basis = Draft(TITLES["measures"]), analysis.basis
    width = basis.window[1] - basis.window[0]
    if width < FEWEST:
        draft.leave_out("measures", f"{width} positions are fewer than {FEWEST}")
        return draft.section()
    if not analysis.work.take(_cost(analysis), 1):
        draft.too_long("measures", _cost(analysis))
        return draft.section()
    with draft.part("measures of position"):
        _position(draft, analysis)
    with draft.part("measures of context"):
        _context(draft, analysis)
    return draft.section()


def _position(draft: Draft, analysis: Analysis) -> None:
    basis = analysis.basis
    position = positional_report(basis, seed=analysis.seed)
    middle = len(basis.states) // 2
    row = basis.states[middle]
    draft.say(
        "Is the positional basis low-dimensional and smooth? Bars are jackknife errors over "
        "groups of contexts; dashed lines are nulls "
        "(positions in random order, sampling noise alone, isotropic noise of the same energy): a "
        "measure that lies on its null is no finding."
    )
    cell, short = (Cells("positional", position, rounded=x) for x in (False, True))
    draft.say(
        f"At state {row} the rank estimate is {cell(middle, 'rank')} (ScreeNOT), "
        f"the stable rank {cell(middle, 'stable_rank')}, and "
        f"{cell(middle, 'low_frequency', percent=True)} of the cosines' energy lies in the ten "
        "lowest frequencies. The published relative norm "
        "divides by the uncentred states; both forms are in the table."
    )
    draft.draw(views.measure_curves(position, SHAPE), "position")
    with draft.part("singular values"):
        draft.draw(views.singular_values(basis), "spectra")
    with draft.part("the Fourier transform of the cosines"):
        column = "low_frequency_shuffled"
        null = f"In random order they hold {short(middle, column, percent=True)} in state {row}."
        draft.draw(views.fourier(position), "fourier", null=null)
    draft.say(
        "The rank grows with the number of contexts, because sampling noise falls: where the "
        "learning curve still rises, a larger corpus would give a larger one."
    )
    draft.draw(views.learning_curve(position, "rank"), "learning")
    draft.table("positional", position, "Measures of position in each state", MEASURED)
    draft.find(findings.smooth(position))


def _context(draft: Draft, analysis: Analysis) -> None:
    basis = analysis.basis
    if basis.ctx is None:
        draft.leave_out(
            "measures of context", "context vectors would take more than 1 GiB and were not kept"
        )
        return
    middle = len(basis.states) // 2
    context = contextual_report(basis, seed=analysis.seed)
    draft.draw(views.planes(basis), "plane-of-position")
    cell, exchanged = Cells("contextual", context), ("incoherence_avg", "exchanged")
    without = (
        f" and windows whose positions were exchanged {cell(middle, '_'.join(exchanged))}"
        if exchanged in context.nulls
        else ""
    )
    draft.say(
        f"Positional and context vectors of state {basis.states[middle]} have a mean |cos| of "
        f"{cell(middle, 'incoherence_avg')} where random directions have "
        f"{cell(middle, 'incoherence_avg_random')}{without}. The paper defines "
        "incoherence as a maximum and tabulates an average; both are here."
    )
    draft.draw(views.incoherence(context), "incoherence")
    if context.similarity is None:
        draft.leave_out("similarity of documents", "it takes at least two documents")
    else:
        shuffled = f"With documents shuffled it is {cell(middle, 'intra_shuffled')}."
        draft.draw(views.similarity(context), "similarity", null=shuffled)
    shown = [name for name in context.columns() if not name.endswith("_sd")]
    draft.table("contextual", context, "Measures of context in each state", shown)
    draft.find(findings.incoherence(context))
