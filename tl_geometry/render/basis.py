"""What do the positional and context vectors of a basis look like? Figures of how much variance
each part holds, the curve that positions lie on, which vectors point the same way, and whether
measures stand above their nulls. The report, the gallery and notebooks draw them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from tl_geometry.base import linalg
from tl_geometry.base.errors import choice, require
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.measures.positional import fourier as transform
from tl_geometry.measures.positional import low_frequency_share, normalized_gram
from tl_geometry.render import figure as draw

CONTEXTS = 128
"""Most context vectors of a Gram matrix: about as many as there are positions."""
WORDS = {"pos": "position", "ctx": "context", "resid": "residual"}
"""Column of an analysis of variance -> its name in legends."""
PANELS, FREQUENCIES = 5, 10
"""Most states that have a panel, and frequencies in each direction, as in the paper."""
NULLS = {
    "shuffled": (draw.NULL, "--"),
    "noise": (draw.NULL, ":"),
    "isotropic": (draw.LINES[2], "--"),
    "random": (draw.LINES[2], "--"),
    "flipped": (draw.LINES[3], "--"),
    "exchanged": (draw.NULL, "-."),
}
"""Colour and style of each null in every figure."""
UNITS = {
    **dict.fromkeys(("rank", "stable_rank"), "directions"),
    **dict.fromkeys(("relative_norm", "relative_norm_reference", "fracture", "roughness"), "ratio"),
    **dict.fromkeys(("smoothness", "smoothness_2", "compactness_cvec", "compactness_raw"), "ratio"),
    **dict.fromkeys(("incoherence_avg", "incoherence_max", "incoherence_rms"), "|cos|"),
    **dict.fromkeys(("intra", "inter", "intra_reference"), "|cos|"),
    "threshold": "singular value",
    "fracture_at": "position",
    "low_frequency": "share of energy",
    "split_half": "cosine",
}
"""Units of measures; measures that are not listed are shares."""
NAMES = {"incoherence_avg": "mean |cos|", "incoherence_max": "largest |cos|"}
"""Titles of measures whose key is not clear by itself."""
USUAL = {
    "position": (
        *("rank", "stable_rank", "relative_norm", "low_frequency"),
        *("smoothness", "fracture", "roughness", "split_half"),
    ),
    "context": ("incoherence_avg", "overlap", "intra", "inter", "compactness_cvec"),
}
"""Measures that are drawn by default."""


def variance_shares(
    table: Result | pd.DataFrame,
    *,
    control: Result | pd.DataFrame | None = None,
    ax: draw.Axes | None = None,
) -> draw.View:
    """Share of each state's variance that is position, context and residual, beside that of an
    untrained control.

    The dashed line, where the table has one, is the context share of spliced windows, which have no
    common context.

    Args:
        table: from :meth:`~tl_geometry.PositionContext.anova`.
        control: the same of the untrained control, in a second panel.
        ax: axes to draw into (without ``control``).

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> variance_shares(basis.anova()).title[:13]
    'Position goes'
    """
    tables = [draw.frame(t, "state", *WORDS) for t in (table, control)[: 1 + (control is not None)]]
    figure, axes = draw.panels(ax, len(tables), size=(draw.WIDTH / len(tables), 2.6), sharey=True)
    for axis, current, name in zip(axes, tables, ("trained", "untrained control"), strict=False):
        for part, word in WORDS.items():
            line = {"ms": 3.5, "lw": 1.8, "color": draw.PARTS[part], "label": word}
            axis.plot(current["state"], current[part], "o-", **line)
        if "ctx_null" in current:
            line = {"color": draw.NULL, "lw": 1.0, "label": "null: context of spliced windows"}
            axis.plot(current["state"], current["ctx_null"], "--", **line)
        axis.set(xlabel="state", xticks=draw.whole_ticks(current["state"].tolist()), ylim=(0, 1.02))
        axis.set_title(name if control is not None else "")
    axes[0].set_ylabel("share of variance")
    draw.legend(figure, axes[:1], ax=ax)
    return draw.view(
        figure,
        table,
        title=_change(tables[0]),
        caption="Shares of the variance of each state (0: the embedding), which add up to one. "
        "Position and context hold sampling noise, which the columns '_corrected' take away.",
        null="Dashed: windows spliced from random places, which have no common context."
        if "ctx_null" in tables[0]
        else "No null is drawn: anova(null=) takes the basis of spliced windows.",
    )


def _change(shares: pd.DataFrame) -> str:
    """How the shares change from the first to the last state, where they are known (one context
    does not tell them apart)."""
    ends = shares[["pos", "ctx"]].iloc[[0, -1]]
    if ends.isna().any(axis=None):
        return "Shares of the variance of each state"
    (pos, ctx), (last, last_ctx) = 100 * ends.to_numpy()
    change = "from {:.2g}% to {:.2g}%".format
    return f"Position goes {change(pos, last)} of the variance, context {change(ctx, last_ctx)}"


def spirals(basis: PositionContext, *, control: PositionContext | None = None) -> draw.View:
    """The positional basis of at most five evenly spaced states, each on its first two principal
    directions and coloured by position (Song & Zhong 2023, Fig. 1).

    Axes are scaled per panel. Above each panel stands the share of ``|pos|^2`` that the two
    directions hold.

    Args:
        basis: from :func:`tl_geometry.decompose`.
        control: the basis of the untrained control, on its own directions in a second row.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> spirals(basis).title
    'What curve do positions lie on in each state?'
    """
    require_basis(basis)
    if control is not None:
        require_basis(control, "control")
    chosen = draw.some(basis.states, PANELS)
    bases = [b for b in (basis, control) if b is not None]
    ylabels = ["u2"] if control is None else ["trained: u2", "untrained control: u2"]
    figure, axes = draw.panels(
        None, len(chosen) * len(bases), columns=len(chosen), size=(draw.WIDTH / len(chosen), 1.7)
    )
    for row, (current, ylabel) in enumerate(zip(bases, ylabels, strict=True)):
        of_row = axes[row * len(chosen) : (row + 1) * len(chosen)]
        curves = [_draw_curve(*each, current) for each in zip(of_row, chosen, strict=True)]
        of_row[0].set_ylabel(ylabel)
        figure.colorbar(curves[-1], ax=of_row[-1], label="position", shrink=0.8)
    for axis in axes[-len(chosen) :]:
        axis.set_xlabel("u1")
    return draw.view(
        figure,
        basis,
        title="What curve do positions lie on in each state?",
        caption="Each point is a position, on the two leading directions of its state (axes scaled "
        "per panel, no unit; a few may lie outside). Above: the share of |pos|² that the two hold.",
        null="The lower row is the untrained control."
        if control
        else "No null is drawn: control= takes the basis of an untrained model.",
    )


def _draw_curve(axis: draw.Axes, state: int, basis: PositionContext) -> Any:
    """Draw the positional vectors of one state on their two leading directions. Returns the points,
    for a colour bar."""
    pos = basis.pos[basis.index(state)]
    directions = linalg.svd(pos)
    points = pos @ directions.V[:, :2]
    # first and last column: a stream of one dimension has one direction, which serves both axes
    # one or two outliers, such as the first position, may leave the frame
    low, high = torch.quantile(points, torch.tensor([0.03, 0.97]).to(points), dim=0)
    pad = 0.15 * (high - low).clamp(min=1e-12)
    (left, bottom), (right, top) = (low - pad)[[0, -1]].tolist(), (high + pad)[[0, -1]].tolist()
    axis.set(xlim=(left, right), ylim=(bottom, top), xticks=[], yticks=[])
    drawn = draw.path(axis, points[:, [0, -1]], range(*basis.window), 7.0)
    energy = directions.S.square()
    # a state without position has no energy
    share = energy[:2].sum() / energy.sum().clamp(min=1e-300)
    axis.set_title(f"state {state}: {float(share):.0%}", fontsize=8)
    return drawn


def gram(
    basis: PositionContext, state: int | None = None, *, ax: draw.Axes | None = None
) -> draw.View:
    """Cosines between all positional and context vectors of one state, contexts ordered by document
    (Song & Zhong 2023, Fig. 2).

    Args:
        basis: from :func:`tl_geometry.decompose`. At most 128 of its context vectors are shown,
            evenly spaced; a basis without context vectors shows positions only.
        state: which state, by default the middle one of the basis.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> gram(basis, 1).title
    'Which positions and contexts of state 1 point the same way?'
    """
    require_basis(basis)
    state = basis.states[len(basis.states) // 2] if state is None else state
    row = basis.index(state)
    vectors = {"positions": basis.pos[row]}
    if basis.ctx is not None:
        order = torch.arange(basis.contexts)
        if basis.labels is not None:
            order = torch.argsort(basis.labels, stable=True)
        evenly = torch.linspace(0, len(order) - 1, min(CONTEXTS, len(order))).long()
        vectors["contexts"] = basis.ctx[row, order[evenly]]
    rows, _ = linalg.normalize_rows(torch.cat([*vectors.values()]))
    figure, (axis,) = draw.panels(ax, size=(0.75 * draw.WIDTH, 4.2))
    # cosines have one scale in all figures, so that states can be compared
    image = draw.image(axis, (rows @ rows.T).numpy(), 1.0)
    positions = len(vectors["positions"])
    axis.axhline(positions - 0.5, color="k", lw=0.6)
    axis.axvline(positions - 0.5, color="k", lw=0.6)
    ticks = [positions / 2, (positions + len(rows)) / 2][: len(vectors)]
    axis.set_xticks(ticks, [*vectors])
    axis.set_yticks(ticks, [*vectors], rotation=90, va="center")
    figure.colorbar(image, ax=axis, label="cosine", shrink=0.8)
    axis.set(xlabel="vector", ylabel="vector")
    chance = rows.shape[1] ** -0.5  # standard deviation of the cosine of two random directions
    return draw.view(
        figure,
        basis,
        title=f"Which positions and contexts of state {state} point the same way?",
        caption="Each cell is the cosine of two vectors; contexts, of which at most "
        f"{CONTEXTS} are drawn, are ordered by document where that is known.",
        null=f"Random directions of as many dimensions have a cosine of 0 ± {chance:.2f}.",
    )


def fourier(basis: PositionContext) -> draw.View:
    """Leading block of the 2-D cosine transform of the cosines between positions, a panel for each
    of at most five evenly spaced states (Song & Zhong 2023, Fig. 3 right).

    Mass in the top left corner means that positions lie on a smooth curve.

    Args:
        basis: from :func:`tl_geometry.decompose`.

    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> fourier(basis).title
    'Are neighbouring positions alike?'
    """
    require_basis(basis)
    chosen = draw.some(basis.states, PANELS)
    pos = basis.pos[[basis.index(state) for state in chosen]]
    count = min(FREQUENCIES, pos.shape[1])
    block = transform(normalized_gram(pos))[:, :count, :count]
    shares = low_frequency_share(pos, count)
    # one scale for all draw.panels; 1 where all coefficients are zero
    limit = float(block.nan_to_num().abs().amax()) or 1.0
    figure, axes = draw.panels(None, len(chosen), size=(draw.WIDTH / len(chosen), 1.9))
    for axis, state, values, share in zip(axes, chosen, block, shares.tolist(), strict=True):
        draw.image(axis, values.numpy(), limit)
        axis.set_title(f"state {state}: {share:.0%}", fontsize=8)
        axis.set(xlabel="frequency", xticks=draw.whole_ticks(range(count), 6))
    figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.8, label="coefficient")
    axes[0].set_ylabel("frequency")
    return draw.view(
        figure,
        basis,
        title="Are neighbouring positions alike?",
        caption="Each panel is the leading block of the cosine transform of the cosines between "
        f"positions, and the share of the energy that it holds ({count} frequencies).",
        null=f"In random order they would hold about {count / pos.shape[1]:.0%}.",
    )


def measure_curves(
    report: Result | pd.DataFrame,
    names: Sequence[str] | str | None = None,
    *,
    ax: draw.Axes | None = None,
) -> draw.View:
    """Measures over the states, with jackknife errors (bars) and nulls (dashed); or over the number
    of contexts, a line for each state. A measure that lies on a null is no finding, and one that
    still changes with the contexts depends on the size of the corpus.

    Args:
        report: from :func:`tl_geometry.positional_report`, :func:`tl_geometry.contextual_report` or
            :func:`tl_geometry.measures.learning_curve`.
        names: measures, one panel each; by default the best known of the table.
        ax: axes to draw one measure into.

    >>> import torch
    >>> import tl_geometry as tlg
    >>> basis = tlg.decompose_activations(torch.randn(4, 12, 16, 8))
    >>> report = tlg.positional_report(basis)
    >>> measure_curves(report, "stable_rank").title
    'Do measures of position stand above their nulls?'
    """
    table = draw.frame(report, "state")
    about = "position" if "relative_norm" in table else "context"
    usual = [name for name in USUAL[about] if name in table]
    asked = [names] if isinstance(names, str) else names
    chosen = usual if asked is None else [choice(n, [*table.columns], "names") for n in asked]
    require(len(chosen) > 0, "names", expected="some measures", got="none")
    # four draw.panels fill two rows of two
    columns = 2 if len(chosen) == 4 else min(3, len(chosen))
    size = (draw.WIDTH / columns, 2.0)
    figure, axes = draw.panels(ax, len(chosen), columns=columns, size=size)
    growing = "contexts" in table
    for axis, name in zip(axes, chosen, strict=True):
        (_over_contexts if growing else _over_states)(axis, table, name)
    if growing:
        words = " and ".join(name.replace("_", " ") for name in chosen)
        title = f"Does the {words} still grow with the corpus?"
        caption = "Each line is a state; a point is the mean over disjoint blocks of that many "
        caption += "contexts."
        null = "A line that is flat at its right end would not change with more text."
    else:
        draw.legend(figure, axes, ax=ax)
        title = f"Do measures of {about} stand above their nulls?"
        caption = "Points are measured, bars one jackknife standard error (for 95% times Student's "
        caption += "t, with one degree of freedom fewer than the table has blocks)."
        null = "Dashed and dotted lines are nulls: a measure that lies on one is no finding."
    return draw.View(figure, title=title, caption=caption, null=null, source=draw.source_of(report))


def _over_states(axis: draw.Axes, table: pd.DataFrame, name: str) -> None:
    """Draw one measure over the states, with its errors and nulls."""
    states = table["state"].tolist()
    look = {"color": "k", "marker": "o", "ms": 3, "lw": 1, "capsize": 2, "label": "measured"}
    axis.errorbar(states, table[name], yerr=table.get(f"{name}_se"), **look)
    for null, (colour, style) in NULLS.items():
        if f"{name}_{null}" in table:
            line = {"lw": 1, "color": colour, "label": f"null: {null}"}
            axis.plot(states, table[f"{name}_{null}"], style, **line)
    if name.startswith("incoherence"):
        axis.set_ylim(bottom=0)
    axis.set_title(NAMES.get(name, name.replace("_", " ")))
    axis.ticklabel_format(axis="y", scilimits=(-3, 3), useMathText=True)
    axis.set(xlabel="state", xticks=draw.whole_ticks(states, 8), ylabel=UNITS.get(name, "share"))


def _over_contexts(axis: draw.Axes, table: pd.DataFrame, name: str) -> None:
    """Draw one measure over the number of contexts, a line for each state."""
    states, counts = sorted(set(table["state"])), sorted(set(table["contexts"]))
    shade = draw.shades(axis.figure, axis, states, "state")  # type: ignore[arg-type]
    for state, rows in table.groupby("state"):
        axis.semilogx(rows["contexts"], rows[name], "o-", ms=3, lw=1, color=shade(state))
    axis.set_xticks(counts, [str(count) for count in counts])
    axis.minorticks_off()
    words = NAMES.get(name, name.replace("_", " "))
    axis.set(xlabel="contexts", ylabel=f"{words} ({UNITS.get(name, 'share')})")
