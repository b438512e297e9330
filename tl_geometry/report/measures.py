"""The measures of position and of context, with their errors and nulls."""

from __future__ import annotations

from tl_geometry.render import measures as views
from tl_geometry.report import Analysis, Figure, Section
from tl_geometry.results import Result
from tl_geometry.verbs.measures import contextual_report, positional_report

SHAPE = ("rank", "stable_rank", "relative_norm", "low_frequency", "smoothness", "fracture")


def section(analysis: Analysis) -> Section | None:
    """Rank, norm, smoothness of the positional basis; similarity, incoherence, compactness of the context basis."""
    basis = analysis.basis
    if basis.window[1] - basis.window[0] < 8:
        return None
    position = positional_report(basis, seed=analysis.seed)
    tables: dict[str, Result] = {"positional": position}
    figures: list[Figure] = [views.singular_values(basis), views.fourier(position), views.measure_curves(position, SHAPE)]
    middle = len(basis.states) // 2
    row = basis.states[middle]
    text = [
        "Is the positional basis low-dimensional and smooth? Bars are jackknife errors over groups of contexts; dashed lines are nulls "
        "(positions in random order, sampling noise alone, isotropic noise of the same energy): a measure that lies on its null is no finding.",
        f"At state {row} the rank estimate is {float(position['rank'][middle]):.0f} (ScreeNOT), the stable rank {float(position['stable_rank'][middle]):.2f}, and "
        f"{float(position['low_frequency'][middle]):.0%} of the cosines' energy lies in the ten lowest frequencies. The rank grows with the number of contexts, "
        "because sampling noise falls: see the learning curve. The published relative norm divides by the uncentred states; both forms are in the table.",
    ]
    figures.append(views.learning_curve(position, "rank"))
    if basis.ctx is not None:
        context = contextual_report(basis, seed=analysis.seed)
        tables["contextual"] = context
        figures += [views.planes(basis), views.incoherence(context)]
        if context.similarity is not None:
            figures.append(views.similarity(context))
        text.append(
            f"Positional and context vectors of state {row} have a mean |cos| of {float(context['incoherence_avg'][middle]):.3f} where random directions have "
            f"{float(context.nulls['incoherence_avg|random'][middle]):.3f}. The paper defines incoherence as a maximum and tabulates an average; both are here."
        )
    return Section(title="Measures of position and context", text=text, figures=figures, tables=tables)
