"""Which heads attend by position, which by content, and which are previous-token or induction
heads? Maps of all heads side by side. The report and the gallery draw them."""

from __future__ import annotations

import torch

from tl_geometry.base.errors import choice
from tl_geometry.render.figure import WIDTH, View, canvas
from tl_geometry.render.head_view import draw_map, map_bar, scale
from tl_geometry.scores.sweep_table import SweepTable


def head_shares(sweep: SweepTable, *, share: str = "cs") -> View:
    """Shares of position, content, token and mixed terms for every head, which add up to one.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads`.
        share: ``"cs"`` (of the covariance over all cells) or ``"gs"`` (gain: of where attention
            goes).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    >>> head_shares(sweep).title
    'Which heads attend by position, which by content?'
    """
    choice(share, ("cs", "gs"), "share")
    if share == "cs":
        title = "Which heads attend by position, which by content?"
        values, said = sweep.group_cs, "the covariance of its scores"
    else:
        title = "Where attention goes, is it by position or by content?"
        values, said = sweep.group_gs, "its gain"
    figure, axes = canvas(len(sweep.groups), size=(WIDTH / 4, _height(sweep)), sharey=True)
    for axis, group, column in zip(axes, sweep.groups, values.T, strict=True):
        draw_map(axis, sweep.heads, column, group, *scale(f"{share}_", values))
    axes[0].set_ylabel("layer")
    map_bar(axes, "share")
    destroyed = sweep.nulls.get(f"{share}_position_null")
    null = "Shares have no null here."
    if destroyed is not None and bool(destroyed.isfinite().any()):
        largest = float(destroyed.nan_to_num(-1.0).max())
        null = f"With position destroyed, the share of position is at most {largest:.2f}."
    return View(
        figure,
        title=title,
        caption=f"Each cell is a head: the part of {said} that terms without content, with content "
        "alone, with content beside a constant, and with content beside position hold. Red is "
        "positive, blue negative; the panels add up to one.",
        null=null,
        source=sweep.provenance.line(),
    )


def _height(sweep: SweepTable) -> float:
    """Height of a figure in inches: 0.13 for a row, so that the layers of a deep model stay apart,
    and room for titles and labels."""
    return max(2.6, 0.13 * len({layer for layer, _ in sweep.heads}) + 0.8)


def head_types(sweep: SweepTable) -> View:
    """Head-type scores of every head on repeated random tokens. The title of each panel has the
    score of uniform attention.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads` over heads whose types were scored.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    >>> head_types(sweep).title
    'Which heads are previous-token or induction heads?'
    """
    names = ("previous", "induction", "duplicate")
    figure, axes = canvas(len(names), size=(WIDTH / len(names), _height(sweep)))
    ends = scale("", torch.stack([sweep.types[name] for name in names]))
    for axis, name in zip(axes, names, strict=True):
        title = f"{name} (uniform {sweep.baselines[name]:.2f})"
        draw_map(axis, sweep.heads, sweep.types[name], title, *ends)
    axes[0].set_ylabel("layer")
    map_bar(axes, "attention")
    return View(
        figure,
        title="Which heads are previous-token or induction heads?",
        caption="Each cell is a head: the mean attention that it pays, on repeated random tokens, "
        "to where a head of that type looks.",
        null="What uniform attention would pay stands above each panel.",
        source=sweep.provenance.line(),
    )
