"""Compares the recomputed queries, keys, scores and patterns of one layer with the model's own;
:mod:`tl_geometry.models.layers` calls it for every layer that is verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tl_geometry.models.attention_spec import AttentionSpec, scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.reconstruction import (
    CHUNK,
    ReconstructionReport,
    pattern_bound,
    pattern_error,
    reconstruction_bound,
)
from tl_geometry.models.softmax import soft_cap

SUMMANDS = 256
"""Keys of a row up to which its sum is one within the bound of one number."""


def largest(x: Tensor) -> float:
    """The largest absolute value, as a float."""
    return float(x.abs().max())


def check_inputs(
    spec: AttentionSpec,
    view: LayerView,
    raw: Mapping[str, Tensor],
    hooked: Mapping[str, Tensor | None],
    positions: slice = slice(None),
) -> ReconstructionReport:
    """Queries and keys of ``positions`` against the hooks, and the sizes behind them, as they are
    and as they enter the scores."""
    checks, sizes = {}, {}
    for w in "qk":
        value, size = hooked[w], spec.sizes(view.h[:, positions], w)
        if value is not None:
            bound = reconstruction_bound(view.roundoff, largest(size))
            checks[w] = (largest((raw[w] - value)[:, positions]), bound)
        sizes[w] = largest(size if spec.qk_norm is None else view.sizes(w))
    return ReconstructionReport(checks=checks, scale=0.0, sizes=sizes)


def some_queries(length: int, count: int | None) -> slice:
    """About ``count`` evenly spaced queries, the last one among them; all for ``None``.

    >>> list(range(10))[some_queries(10, 4)], some_queries(10, None)
    ([0, 3, 6, 9], slice(0, None, 1))
    """
    step = 1 if count is None else -(-length // count)
    return slice((length - 1) % step, None, step)


def check_scores(
    view: LayerView, report: ReconstructionReport, queries: slice = slice(None)
) -> ReconstructionReport:
    """The report with ``pattern`` and ``scores``: recomputed scores of ``queries`` against the
    model's, a few heads at a time."""
    batch, length, heads = view.q.shape[:3]
    step = max(1, CHUNK // (batch * length**2))
    errors: dict[str, list[float]] = {"pattern": [], "pattern sum": [], "scores": []}
    scale, allowed = 0.0, view.allowed[queries]
    for start in range(0, heads, step):
        some_heads = slice(start, min(start + step, heads))
        total, size = _total_and_size(view, some_heads, queries)
        scale = max(scale, float(torch.where(allowed, size, 0.0).max()))
        capped = soft_cap(total, view.softcap)
        if view.scores is not None:
            model_scores = view.scores[:, some_heads, queries]
            difference = torch.where(allowed, capped - model_scores, 0.0)
            errors["scores"].append(largest(difference))
        if view.pattern is not None:
            pattern = view.pattern[:, some_heads, queries]
            errors["pattern"].append(pattern_error(capped, pattern, allowed, view.roundoff))
            sinks = None if view.sinks is None else view.sinks[some_heads]
            errors["pattern sum"].append(_sum_error(pattern, capped, allowed, sinks))
    bounds = {
        "pattern": pattern_bound(view.pattern, view.roundoff, scale),
        "scores": reconstruction_bound(view.roundoff, scale),
    }
    # rows sum to one, but a sink's share depends on the scores and rounds as they do
    sum_scale = 1.0 if view.sinks is None else max(scale, 1.0)
    if view.roundoff <= 2**-24:
        # softmax divides by a sum over the keys, which rounds by the root of their number (Higham &
        # Mary 2019): 5 u measured for 512 keys, 55 u for 8,192. Half precision sums in float32
        sum_scale *= max(1.0, allowed.shape[-1] / SUMMANDS) ** 0.5
    bounds["pattern sum"] = pattern_bound(view.pattern, view.roundoff, sum_scale)
    compared = {name: (max(values), bounds[name]) for name, values in errors.items() if values}
    return replace(report, checks={**report.checks, **compared}, scale=scale)


def _sum_error(pattern: Tensor, scores: Tensor, allowed: Tensor, sinks: Tensor | None) -> float:
    """How far rows of the pattern are from summing to one (less the sink's share), which
    row-centred logarithms do not see."""
    sums = pattern.sum(-1, dtype=torch.float64)
    if sinks is None:
        return largest(sums - 1)
    without_sink = torch.where(allowed, scores, -torch.inf).double().logsumexp(-1)
    with_sink = torch.logaddexp(without_sink, sinks[:, None].double())
    return largest(sums - (without_sink - with_sink).exp())


def _total_and_size(view: LayerView, heads: slice, queries: slice) -> tuple[Tensor, Tensor]:
    """Scores, and the product of the absolute values of queries and keys, of what comes from the
    input and of the constant."""
    q, q0 = (x[:, queries, heads] for x in (view.q, view.q_constant))
    k, k0 = (x[:, :, heads] for x in (view.k, view.k_constant))
    total = scores_of(q, k, view.scale)
    size = scores_of((q - q0).abs() + q0.abs(), (k - k0).abs() + k0.abs(), view.scale)
    if view.bias is None:
        return total, size
    bias = view.bias[heads, queries]
    return total + bias, size + bias.abs()
