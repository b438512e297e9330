"""Section: how much of each state is position, context or residual, which curve positions lie on,
and which tokens have very large norms. Called by :mod:`tl_geometry.report.analysis`."""

from __future__ import annotations

from typing import Any

from tl_geometry.corpus.texts import splice
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.render import basis as views
from tl_geometry.report import findings, massive
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.inputs import Inputs
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft

NULL_CONTEXTS = 256
"""Most windows for the null and for the untrained control, which have bases of their own."""
SMALL: dict[str, Any] = {"second_moments": False, "keep": 0, "progress": False}
"""Options of their decomposition: no second moments, no kept states, no progress bar."""


def spliced(analysis: Analysis, count: int) -> PositionContext:
    """The basis of windows spliced from random places of the same corpus, which is the null of the
    context share."""
    windows = splice(analysis.pick(count), seed=analysis.seed)
    return decompose(analysis.view, windows, keep_ctx=False, seed=analysis.seed, **SMALL)


def untrained(analysis: Analysis, count: int) -> PositionContext:
    """The basis of the embedded model's untrained control on some of the windows."""
    view = analysis.view
    inputs = Inputs(
        processed=view.processed,
        dtype=str(view.dtype).removeprefix("torch."),
    )
    control = inputs.load(device=str(view.device), trained=False)
    return decompose(control, analysis.pick(count), seed=analysis.seed, **SMALL)


def section(draft: Draft, analysis: Analysis) -> None:
    """The mean decomposition of every state."""
    basis = analysis.basis
    draft.say(
        "Every state is split into mean + pos + ctx + resid (Song & Zhong 2023, Eq. 2): what all "
        "positions and contexts share, what depends on the position alone, on the context alone, "
        "and on both. The squared norms of the last three add up to the variance."
    )
    null, control = _beside(draft, analysis)
    # an example for the text: the middle state is neither the embedding nor what the output reads
    middle = basis.states[len(basis.states) // 2]
    anova_cells = None
    with draft.part("the analysis of variance"):
        anova_cells = _variance(draft, basis, middle, null, control)
    with draft.part("massive tokens"):
        massive.add(draft, analysis, anova_cells)
    with draft.part("the positional basis of each state"):
        draft.say(
            "What position alone does to a state is one vector for each position. Drawn on the two "
            "directions that hold most of it, a smooth curve is a code for position in which "
            "neighbours are alike."
        )
        draft.draw(views.spirals(basis, control=control))
    with draft.part("the normalised Gram matrix"):
        draft.draw(views.gram(basis, middle))


def _variance(
    draft: Draft,
    basis: PositionContext,
    middle: int,
    null: PositionContext | None,
    control: PositionContext | None,
) -> Cells:
    """Add the shares of position, context and residual. Returns the cells of their table, for
    sentences of other parts."""
    table = basis.anova(null=null)
    untrained_table = None if control is None else control.anova()
    row, cell = basis.index(middle), Cells("anova", table)
    debiased = "pos_corrected" if table.intervals else "pos_debiased"
    draft.say(
        f"At state {middle}: {cell(row, 'pos', percent=True)} position "
        f"({cell(row, debiased, percent=True)} after the correction for sampling noise, "
        f"reliability {cell(row, 'pos_reliability')} between halves of the corpus), "
        f"{cell(row, 'ctx', percent=True)} context, {cell(row, 'resid', percent=True)} residual "
        "(interaction of position and context)."
    )
    if table.ctx_null is not None:
        draft.say(
            "Windows spliced from random places of the same corpus have a context share of "
            f"{cell(row, 'ctx_null', percent=True)} at this state. What real windows have beyond "
            "that is context that lasts longer than one spliced piece."
        )
    short_cell, last_row = Cells("anova", table, rounded=True), len(table.states) - 1
    changes = [
        f"{part} {short_cell(0, key, percent=True)} to {short_cell(last_row, key, percent=True)}"
        for part, key in (("position", "pos"), ("context", "ctx"))
    ]
    title = f"Shares of variance from the first to the last state: {', '.join(changes)}"
    draft.draw(views.variance_shares(table, control=untrained_table), "variance", title=title)
    draft.table("anova", table, "Analysis of variance of each state")
    if untrained_table is not None:
        draft.table("anova_untrained", untrained_table, "The same of the untrained control")
    draft.find(findings.position_share(table, control=untrained_table))
    draft.find(findings.context_share(table))
    return short_cell


def _beside(
    draft: Draft, analysis: Analysis
) -> tuple[PositionContext | None, PositionContext | None]:
    """The bases of the null and of the untrained control; ``None`` for one that is not made."""
    length = analysis.windows.tokens.shape[1]
    max_windows = min(NULL_CONTEXTS, len(analysis.windows))
    min_windows, null, control = min(16, max_windows), None, None
    name = "the null of spliced windows"
    count = draft.fit(analysis.budget, name, length, max_windows, min_windows)
    if count:
        with draft.part(name):
            null = spliced(analysis, count)
        if count < max_windows:
            draft.say(
                f"The null has {count} windows in place of {max_windows}, to keep the budget."
            )
    if analysis.embedded:
        with draft.part("the untrained control"):
            control = untrained(analysis, max(count, min_windows))
    return null, control
