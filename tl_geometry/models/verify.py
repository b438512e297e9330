"""The checks of one layer: recomputed queries, keys, scores and patterns against the model's
own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tl_geometry.models.attention_spec import Facts, scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.reconstruction import (
    CHUNK,
    ReconstructionReport,
    pattern_bound,
    pattern_error,
    reconstruction_bound,
)


def largest(x: Tensor) -> float:
    """The largest absolute value."""
    return float(x.abs().max())


def check_inputs(
    facts: Facts,
    view: LayerView,
    raw: Mapping[str, Tensor],
    hooked: Mapping[str, Tensor | None],
) -> ReconstructionReport:
    """Queries and keys against the hooks, and the sizes behind them, as they are and as they
    enter the scores."""
    checks, sizes = {}, {}
    for w in "qk":
        value, size = hooked[w], facts.sizes(view.h, w)
        if value is not None:
            bound = reconstruction_bound(view.roundoff, largest(size))
            checks[w] = (largest(raw[w] - value), bound)
        sizes[w] = largest(size if facts.qk_norm is None else view.sizes(w))
    return ReconstructionReport(checks=checks, scale=0.0, sizes=sizes)


def check_scores(view: LayerView, report: ReconstructionReport) -> ReconstructionReport:
    """The report with ``pattern`` and ``scores``: recomputed scores against the model's, a few
    heads at a time."""
    batch, length, heads = view.q.shape[:3]
    step = max(1, CHUNK // (batch * length**2))
    errors: dict[str, list[float]] = {"pattern": [], "pattern sum": [], "scores": []}
    scale = 0.0
    for start in range(0, heads, step):
        part_ = slice(start, min(start + step, heads))
        total, size = _total_and_size(view, part_)
        scale = max(scale, float(torch.where(view.allowed, size, 0.0).max()))
        capped = total if view.softcap is None else view.softcap * torch.tanh(total / view.softcap)
        if view.scores is not None:
            difference = torch.where(view.allowed, capped - view.scores[:, part_], 0.0)
            errors["scores"].append(largest(difference))
        if view.pattern is not None:
            found = view.pattern[:, part_]
            errors["pattern"].append(pattern_error(capped, found, view.allowed, view.roundoff))
            errors["pattern sum"].append(_sum_error(view, capped, part_))
    bounds = {
        "pattern": pattern_bound(view.pattern, view.roundoff, scale),
        "scores": reconstruction_bound(view.roundoff, scale),
    }
    whole = 1.0 if view.sinks is None else scale
    bounds["pattern sum"] = pattern_bound(view.pattern, view.roundoff, whole)
    compared = {name: (max(values), bounds[name]) for name, values in errors.items() if values}
    return replace(report, checks={**report.checks, **compared}, scale=scale)


def _sum_error(view: LayerView, scores: Tensor, heads: slice) -> float:
    """How far rows of the pattern are from summing to one (less the sink's share), which
    row-centred logarithms do not see."""
    assert view.pattern is not None
    found = view.pattern[:, heads].sum(-1, dtype=torch.float64)
    if view.sinks is None:
        return largest(found - 1)
    whole = torch.where(view.allowed, scores, -torch.inf).double().logsumexp(-1)
    with_sink = torch.logaddexp(whole, view.sinks[heads, None].double())
    return largest(found - (whole - with_sink).exp())


def _total_and_size(view: LayerView, heads: slice) -> tuple[Tensor, Tensor]:
    """Scores, and the product of the absolute values of queries and keys, of what comes from the
    input and of the constant."""
    q, k, q0, k0 = (x[:, :, heads] for x in (view.q, view.k, view.q_constant, view.k_constant))
    total = scores_of(q, k, view.scale)
    size = scores_of((q - q0).abs() + q0.abs(), (k - k0).abs() + k0.abs(), view.scale)
    if view.bias is None:
        return total, size
    return total + view.bias[heads], size + view.bias[heads].abs()
