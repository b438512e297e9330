"""How much of each state is position, context, or neither; the positional curves; norms; the normalised Gram matrix."""

from __future__ import annotations

from tl_geometry.render import basis as views
from tl_geometry.report import Analysis, Section


def section(analysis: Analysis) -> Section:
    """The mean decomposition of every state."""
    basis, twin = analysis.basis, analysis.twin
    table = basis.anova(null=analysis.null)
    states = basis.states if len(basis.states) <= 7 else tuple(basis.states[round(i * (len(basis.states) - 1) / 6)] for i in range(7))
    middle = basis.states[len(basis.states) // 2]
    shares = table.shares
    row = basis.index(middle)
    text = [
        "Every state is split into mean + pos + ctx + resid (Song & Zhong 2023, Eq. 2): what all positions and contexts share, what depends on the "
        "position alone, on the context alone, and on both. The squared norms of the last three add up to the variance.",
        f"At state {middle}: {float(shares['pos'][row]):.1%} position ({float(table.pos_debiased[row]):.1%} after the correction for sampling noise, "
        f"reliability {float(table.pos_reliability[row]):.3f} between halves of the corpus), {float(shares['ctx'][row]):.1%} context, "
        f"{float(shares['resid'][row]):.1%} neither.",
    ]
    if table.ctx_null is not None:
        text.append(
            f"Windows glued from random places of the same corpus have a context share of {float(table.ctx_null[row]):.1%} there, and the two ends of a "
            f"window agree with a correlation of {float(table.ctx_agreement[row]):.2f}: the part of the context share above the glued one is what "
            "lasts longer than a piece of text."
        )
    figures = [
        views.variance_shares(table, twin=None if twin is None else twin.anova()),
        views.spirals(basis, states=states, twin=twin),
        views.norms(basis),
        views.gram(basis, middle),
    ]
    return Section(title="Position and context", text=text, figures=figures, tables={"anova": table})
