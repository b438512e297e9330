"""Views of a sweep over heads: layer x head maps of shares and head types."""

from __future__ import annotations

from tl_geometry.base.errors import choice
from tl_geometry.render.figure import View, canvas
from tl_geometry.render.head_view import draw_map
from tl_geometry.scores.sweep import SweepTable


def head_shares(sweep: SweepTable, *, share: str = "cs") -> View:
    """Shares of position, content and mixed terms for every head; each triple adds up to one.

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
    'Shares of the score'
    """
    about = {
        "cs": ("Shares of the score", "covariance shares"),
        "gs": ("Shares of the gain", "gain shares (of where attention goes)"),
    }
    title, said = about[choice(share, tuple(about), "share")]
    values = {"cs": sweep.group_cs, "gs": sweep.group_gs}[share]
    figure, axes = canvas(len(sweep.groups), size=(3.4, _height(sweep)))
    for axis, group, column in zip(axes, sweep.groups, values.T, strict=True):
        draw_map(axis, sweep.heads, column, f"share of {group}", -1.0, 1.0)
    axes[0].set_ylabel("layer")
    return View(
        figure,
        title=title,
        caption=f"{said}, summing to one over the panels; {sweep.provenance.line()}",
    )


def _height(sweep: SweepTable) -> float:
    """Inches in which the rows of a deep model stay apart."""
    return max(2.6, 0.13 * len({layer for layer, _ in sweep.heads}) + 0.8)


def head_types(sweep: SweepTable) -> View:
    """Head-type scores on repeated random tokens for every head; uniform attention's score stands
    in each title.

    Args:
        sweep: from :func:`tl_geometry.sweep_heads` over heads whose types were scored.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> sweep = tlg.sweep_heads(model, windows, basis, progress=False)
    >>> head_types(sweep).title
    'Head types'
    """
    names = [n for n in ("previous", "induction", "duplicate") if n in sweep.types]
    figure, axes = canvas(len(names), size=(3.4, _height(sweep)))
    for axis, name in zip(axes, names, strict=True):
        draw_map(
            axis,
            sweep.heads,
            sweep.types[name],
            f"{name} (uniform {sweep.baselines[name]:.2f})",
            0.0,
            1.0,
        )
    axes[0].set_ylabel("layer")
    return View(
        figure,
        title="Head types",
        caption=f"mean attention paid on repeated random tokens; {sweep.provenance.line()}",
    )
