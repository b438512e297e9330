"""The measures of position and of context, with their errors and nulls."""

from __future__ import annotations

from tl_geometry.measures import contextual_report, positional_report
from tl_geometry.render import measures as views
from tl_geometry.report import TITLES, Analysis, findings
from tl_geometry.report.clock import PATIENCE
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
DECOMPOSITIONS = 70
"""Singular value decompositions of the basis that errors, curves and nulls of a state cost
(measured)."""


def estimate(analysis: Analysis) -> float:
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
    needed, left = estimate(analysis), analysis.clock.left()
    jackknife = needed <= PATIENCE * left
    smallest = needed / 3  # without errors and learning curves
    if smallest > 3 * left:
        draft.too_long("measures", smallest)
        return draft.section()
    if not jackknife:
        draft.say("Errors and learning curves are left out, to keep the budget.")
    with draft.part("measures of position"):
        _position(draft, analysis, jackknife)
    with draft.part("measures of context"):
        _context(draft, analysis, jackknife)
    return draft.section()


def _position(draft: Draft, analysis: Analysis, jackknife: bool) -> None:
    basis = analysis.basis
    position = positional_report(basis, seed=analysis.seed, jackknife=jackknife)
    middle = len(basis.states) // 2
    row = basis.states[middle]
    draft.say(
        "Is the positional basis low-dimensional and smooth? Bars are jackknife errors over "
        "groups of contexts; dashed lines are nulls "
        "(positions in random order, sampling noise alone, isotropic noise of the same energy): a "
        "measure that lies on its null is no finding."
    )
    draft.say(
        f"At state {row} the rank estimate is {float(position['rank'][middle]):.0f} (ScreeNOT), "
        f"the stable rank {float(position['stable_rank'][middle]):.2f}, and "
        f"{float(position['low_frequency'][middle]):.0%} of the cosines' energy lies in the ten "
        "lowest frequencies. The published relative norm "
        "divides by the uncentred states; both forms are in the table."
    )
    draft.draw(views.measure_curves(position, SHAPE), "position")
    with draft.part("singular values"):
        draft.draw(views.singular_values(basis), "spectra")
    with draft.part("the Fourier transform of the cosines"):
        draft.draw(views.fourier(position), "fourier")
    if jackknife:
        draft.say(
            "The rank grows with the number of contexts, because sampling noise falls: where the "
            "learning curve still rises, a larger corpus would give a larger one."
        )
        draft.draw(views.learning_curve(position, "rank"), "learning")
    draft.table("positional", position, "Measures of position in each state", MEASURED)
    draft.find(findings.smooth(position, groups=analysis.groups))


def _context(draft: Draft, analysis: Analysis, jackknife: bool) -> None:
    basis = analysis.basis
    if basis.ctx is None:
        draft.leave_out(
            "measures of context", "context vectors would take more than 1 GiB and were not kept"
        )
        return
    middle = len(basis.states) // 2
    context = contextual_report(basis, seed=analysis.seed, jackknife=jackknife)
    draft.draw(views.planes(basis), "plane-of-position")
    draft.say(
        f"Positional and context vectors of state {basis.states[middle]} have a mean |cos| of "
        f"{float(context['incoherence_avg'][middle]):.3f} where random directions have "
        f"{float(context.nulls['incoherence_avg', 'random'][middle]):.3f}. The paper defines "
        "incoherence as a maximum and tabulates an average; both are here."
    )
    draft.draw(views.incoherence(context), "incoherence")
    if context.similarity is None:
        draft.leave_out("similarity of documents", "it takes at least two documents")
    else:
        draft.draw(views.similarity(context), "similarity")
    draft.table("contextual", context, "Measures of context in each state")
    draft.find(findings.incoherence(context, groups=analysis.groups))
