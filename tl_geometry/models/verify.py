"""How far are the recomputed queries, keys, scores and patterns of one layer from the model's own?
:mod:`tl_geometry.models.layers` asks for every layer that is verified.

Errors and sizes are measured where the layer is, read together (a GPU is waited for once), and
judged on the CPU by :func:`report_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.models.attention_spec import AttentionSpec, scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.reconstruction import (
    CHUNK,
    ReconstructionReport,
    fits_single,
    pattern_error,
    reconstruction_bound,
)
from tl_geometry.models.softmax import soft_cap

SUMMANDS = 256
"""Up to this many keys the sum of a row of the pattern rounds no more than one number does; beyond,
its bound grows with the root of the number of keys (:func:`report_of`)."""
Measured = dict[str, Float[Tensor, ""]]
"""Errors and sizes by name, on the layer's device. Errors are ``"q"``, ``"k"``, ``"scores"``,
``"pattern"`` and ``"pattern sum"``. ``"q read"`` is the size that bounds the error of queries,
``"q entering"`` their size in the scores, ``"scale"`` the size of the scores. ``"single"`` says
whether float32 holds the pattern exactly."""


def largest(x: Tensor) -> float:
    """The largest absolute value, as a float."""
    return float(x.abs().max())


def measured_inputs(
    spec: AttentionSpec,
    view: LayerView,
    raw: Mapping[str, Tensor],
    hooked: Mapping[str, Tensor | None],
    positions: slice = slice(None),
) -> Measured:
    """Queries and keys of ``positions`` against the hooks (``hooked``; ``raw`` are the recomputed
    ones), and the sizes behind them, as they are and as they enter the scores."""
    found: Measured = {}
    for w in "qk":
        value, size = hooked[w], spec.sizes(view.h[:, positions], w)
        if value is not None:
            found[w] = (raw[w] - value)[:, positions].abs().max()
            found[f"{w} read"] = size.max()
        found[f"{w} entering"] = (size if spec.qk_norm is None else view.sizes(w)).max()
    return found


def some_queries(length: int, count: int | None) -> slice:
    """About ``count`` evenly spaced queries, the last one among them; all for ``None``.

    >>> list(range(10))[some_queries(10, 4)], some_queries(10, None)
    ([0, 3, 6, 9], slice(0, None, 1))
    """
    step = 1 if count is None else -(-length // count)
    return slice((length - 1) % step, None, step)


def measured_scores(view: LayerView, queries: slice = slice(None)) -> Measured:
    """Recomputed scores of ``queries`` against the model's, a few heads at a time."""
    batch, length, heads = view.q.shape[:3]
    step = max(1, CHUNK // (batch * length * view.k.shape[1]))
    found: list[Measured] = []
    allowed = view.seen_by(queries)
    for start in range(0, heads, step):
        some_heads = slice(start, min(start + step, heads))
        total, size = _total_and_size(view, some_heads, queries)
        of_heads = {"scale": torch.where(allowed, size, 0.0).max()}
        capped = soft_cap(total, view.softcap)
        if view.scores is not None:
            model_scores = view.scores[:, some_heads, queries]
            difference = torch.where(allowed, capped - model_scores, 0.0)
            of_heads["scores"] = difference.abs().max()
        if view.pattern is not None:
            pattern = view.pattern[:, some_heads]
            of_heads["single"] = fits_single(pattern)
            pattern = pattern[:, :, queries]
            of_heads["pattern"] = pattern_error(capped, pattern, allowed, view.roundoff)
            sinks = None if view.sinks is None else view.sinks[some_heads]
            of_heads["pattern sum"] = _sum_error(pattern, capped, allowed, sinks)
        found.append(of_heads)
    return worst_of(found)


def worst_of(found: Sequence[Measured]) -> Measured:
    """What was measured of some heads or queries at a time, as if of all at once: the largest of
    each number (NaN where one is); a pattern is ``"single"`` where all of it is."""
    by_name = {name: torch.stack([numbers[name] for numbers in found]) for name in found[0]}
    return {name: x.all() if name == "single" else x.max() for name, x in by_name.items()}


def report_of(view: LayerView, numbers: Mapping[str, float]) -> ReconstructionReport:
    """The errors that were measured, each beside the largest one allowed."""
    scale = numbers["scale"]
    unit = max(view.roundoff, 2**-24) if numbers.get("single") else view.roundoff
    # softmax rounds by a few units however small the scores; rows sum to one, but a sink's share
    # depends on the scores and rounds as they do
    of_sums = 1.0 if view.sinks is None else max(scale, 1.0)
    if view.roundoff <= 2**-24:
        # softmax divides by a sum over the keys, which rounds by the root of their number (Higham &
        # Mary 2019): 11 u measured for 512 keys, 55 u for 8,192. Half precision sums in float32
        of_sums *= max(1.0, view.k.shape[1] / SUMMANDS) ** 0.5
    bounds = {
        **{w: reconstruction_bound(view.roundoff, numbers.get(f"{w} read", 0.0)) for w in "qk"},
        "pattern": reconstruction_bound(unit, max(scale, 1.0)),
        "pattern sum": reconstruction_bound(unit, of_sums),
        "scores": reconstruction_bound(view.roundoff, scale),
    }
    checks = {name: (numbers[name], bound) for name, bound in bounds.items() if name in numbers}
    sizes = {w: numbers[f"{w} entering"] for w in "qk" if f"{w} entering" in numbers}
    return ReconstructionReport(checks=checks, scale=scale, sizes=sizes)


def _sum_error(pattern: Tensor, scores: Tensor, allowed: Tensor, sinks: Tensor | None) -> Tensor:
    """How far rows of the pattern are from summing to one (less the sink's share), which
    row-centred logarithms do not see."""
    sums = pattern.sum(-1, dtype=torch.float64)
    if sinks is None:
        return (sums - 1).abs().max()
    without_sink = torch.where(allowed, scores, -torch.inf).double().logsumexp(-1)
    with_sink = torch.logaddexp(without_sink, sinks[:, None].double())
    return (sums - (without_sink - with_sink).exp()).abs().max()


def _total_and_size(view: LayerView, heads: slice, queries: slice) -> tuple[Tensor, Tensor]:
    """Scores ``[batch head query key]``, and their size A: the same products of absolute values,
    ``|q - q0| + |q0|`` of a query with constant q0, and keys alike."""
    q, q0 = (x[:, queries, heads] for x in (view.q, view.q_constant))
    k, k0 = (x[:, :, heads] for x in (view.k, view.k_constant))
    total = scores_of(q, k, view.scale)
    size = scores_of((q - q0).abs() + q0.abs(), (k - k0).abs() + k0.abs(), view.scale)
    if view.bias is None:
        return total, size
    bias = view.bias[heads, queries]
    return total + bias, size + bias.abs()
