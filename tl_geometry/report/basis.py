"""How much of each state is position, context, or residual; the positional curves; norms, and
tokens that dwarf the others."""

from __future__ import annotations

from typing import Any

from tl_geometry.corpus.texts import splice
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.render import basis as views
from tl_geometry.report import findings, massive
from tl_geometry.report.analysis import TITLES, Analysis
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft, Section

NULL_CONTEXTS = 256
"""Windows of the null and of the untrained control."""


def _window_cost(analysis: Analysis) -> float:
    return 1.1 * analysis.costs.token * analysis.windows.tokens.shape[1]


def spliced(analysis: Analysis, count: int) -> PositionContext:
    """The basis of windows spliced from random places of the same corpus: the null of the context
    share."""
    return decompose(
        analysis.view,
        splice(analysis.pick(count), seed=analysis.seed),
        keep_ctx=False,
        **_small(analysis),
    )


def untrained(analysis: Analysis, count: int) -> PositionContext:
    """The basis of the embedded model's untrained control on some of the windows."""
    from tl_geometry.report.build import load_model

    view = analysis.view
    model_class = "hooked" if view.class_name == "HookedTransformer" else "bridge"
    dtype = str(view.dtype).removeprefix("torch.")
    control = load_model(
        None,
        model_class=model_class,
        processed=view.processed,
        dtype=dtype,
        device=str(view.device),
        trained=False,
    )
    return decompose(control, analysis.pick(count), **_small(analysis))


def _small(analysis: Analysis) -> dict[str, Any]:
    return {"second_moments": False, "keep": 0, "progress": False, "seed": analysis.seed}


def section(analysis: Analysis) -> Section:
    """The mean decomposition of every state."""
    draft, basis = Draft(TITLES["basis"]), analysis.basis
    draft.say(
        "Every state is split into mean + pos + ctx + resid (Song & Zhong 2023, Eq. 2): what all "
        "positions and contexts share, what depends on the "
        "position alone, on the context alone, and on both. The squared norms of the last three "
        "add up to the variance."
    )
    null, control = _beside(draft, analysis)
    short = None
    middle = basis.states[len(basis.states) // 2]
    with draft.part("the analysis of variance"):
        table = basis.anova(null=null)
        row, cell = basis.index(middle), Cells("anova", table)
        debiased = "pos_corrected" if table.intervals else "pos_debiased"
        draft.say(
            f"At state {middle}: {cell(row, 'pos', percent=True)} position "
            f"({cell(row, debiased, percent=True)} after the correction for sampling noise, "
            f"reliability {cell(row, 'pos_reliability')} between halves of the corpus), "
            f"{cell(row, 'ctx', percent=True)} context, "
            f"{cell(row, 'resid', percent=True)} residual (interaction of position and context)."
        )
        if table.ctx_null is not None:
            draft.say(
                "Windows spliced from random places of the same corpus have a context share of "
                f"{cell(row, 'ctx_null', percent=True)} there, and the two ends of a "
                f"window agree with a correlation of {cell(row, 'ctx_agreement')}: the "
                "part of the context share above the spliced one is what "
                "lasts longer than a piece of text."
            )
        untaught = None if control is None else control.anova()
        parts = {"position": "pos", "context": "ctx"}
        short, last = Cells("anova", table, rounded=True), len(table.states) - 1
        changes = [
            f"{part} {' to '.join(short(i, key, percent=True) for i in (0, last))}"
            for part, key in parts.items()
        ]
        title = f"Shares of variance from the first to the last state: {', '.join(changes)}"
        draft.draw(views.variance_shares(table, control=untaught), "variance", title=title)
        draft.table("anova", table, "Analysis of variance of each state")
        if untaught is not None:
            draft.table(findings.UNTRAINED, untaught, "The same of the untrained control")
        draft.find(findings.position_share(table, control=untaught))
        draft.find(findings.context_share(table))
    with draft.part("massive tokens"):
        massive.add(draft, analysis, short)
    with draft.part("the positional basis of each state"):
        draft.say(
            "What position alone does to a state is one vector for each position. Drawn on the two "
            "directions that hold most of it, a smooth curve is a code for position in which "
            "neighbours are alike."
        )
        draft.draw(views.spirals(basis, control=control))
    with draft.part("norms of the parts"):
        draft.say("The sizes of the parts say how far each moves a state.")
        draft.draw(views.norms(basis))
    with draft.part("the normalised Gram matrix"):
        draft.draw(views.gram(basis, middle))
    return draft.section()


def _beside(
    draft: Draft, analysis: Analysis
) -> tuple[PositionContext | None, PositionContext | None]:
    """The null and the control, as far as the time allows."""
    clock, work, each = analysis.clock, analysis.work, _window_cost(analysis)
    most = min(NULL_CONTEXTS, len(analysis.windows))
    null = control = None
    least = min(16, most)
    if count := work.take(each, most, least, share=0.45 if analysis.embedded else 0.9):
        clock.say(f"{count} spliced windows")
        with draft.part("the null of spliced windows"):
            null = spliced(analysis, count)
        if count < most:
            draft.say(
                f"The null is made of {count} windows in place of {most}, to keep the budget."
            )
    else:
        draft.too_long("the null of spliced windows", least * each)
    if analysis.embedded:
        with draft.part("the untrained control"):
            control = untrained(analysis, max(count, least))
    return null, control
