"""How much of each state is position, context, or residual; the positional curves; norms, and
tokens that dwarf the others."""

from __future__ import annotations

from typing import Any

from tl_geometry.corpus.texts import splice
from tl_geometry.decomposition.decomposing import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.render import basis as views
from tl_geometry.report import TITLES, Analysis, findings, massive
from tl_geometry.report.section import Draft, Section

NULL_CONTEXTS = 256
"""Windows of the null and of the untrained control."""


def estimate(analysis: Analysis) -> float:
    """Seconds of the null (and the control) at full size."""
    count = min(NULL_CONTEXTS, len(analysis.windows))
    return 5.0 + (1 + analysis.embedded) * count * _window_cost(analysis)


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
    middle = basis.states[len(basis.states) // 2]
    with draft.part("the analysis of variance"):
        table = basis.anova(null=null)
        row, shares = basis.index(middle), table.shares
        draft.say(
            f"At state {middle}: {float(shares['pos'][row]):.1%} position "
            f"({float(table.pos_debiased[row]):.1%} after the correction for sampling noise, "
            f"reliability {float(table.pos_reliability[row]):.3f} between halves of the corpus), "
            f"{float(shares['ctx'][row]):.1%} context, "
            f"{float(shares['resid'][row]):.1%} residual (interaction of position and context)."
        )
        if table.ctx_null is not None:
            draft.say(
                "Windows spliced from random places of the same corpus have a context share of "
                f"{float(table.ctx_null[row]):.1%} there, and the two ends of a "
                f"window agree with a correlation of {float(table.ctx_agreement[row]):.2f}: the "
                "part of the context share above the spliced one is what "
                "lasts longer than a piece of text."
            )
        draft.draw(
            views.variance_shares(table, control=None if control is None else control.anova()),
            "variance",
        )
        draft.table("anova", table, "Analysis of variance of each state")
        draft.find(findings.position_share(table, groups=analysis.groups))
        draft.find(findings.context_share(table, groups=analysis.groups))
    with draft.part("massive tokens"):
        massive.add(draft, analysis)
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
    clock, each = analysis.clock, _window_cost(analysis)
    most = min(NULL_CONTEXTS, len(analysis.windows))
    null = control = None
    least = min(16, most)
    if count := clock.fits(each, most, least, share=0.45 if analysis.embedded else 0.9):
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
