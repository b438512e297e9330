"""How one attention layer is read: candidates for norm, QK-norm, rotation, scale and score bias are
tried on the probe, and the one that reproduces the model's own numbers is kept
(:func:`infer_layer`). :mod:`tl_geometry.models.layers` asks once for each layer.

A candidate is judged by the queries, keys and row-centred scores (or logarithm of the pattern)
that it gives. What no candidate reproduces is refused later by the reconstruction error, so a wrong
guess cannot give a wrong number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.rows import row_center
from tl_geometry.models.attention import (
    ROTATIONS,
    Attention,
    Reading,
    allowed_cells,
    attention_of,
    cached,
    each_angle_twice,
    qk_norm_module,
    rotary_tables,
    scores_of,
)
from tl_geometry.models.norms import NormReading, norm_readings
from tl_geometry.models.parameters import HeadWeights, inner, part
from tl_geometry.models.reconstruction import nearest, reconstruction_bound
from tl_geometry.models.softmax import soft_cap

VISIBLE = 1e-30
"""Probabilities that count: far above the smallest normal float32 (1e-38), near which a probability
loses digits."""


@torch.no_grad()
def infer_layer(
    model: Any, layer: int, weights: HeadWeights, activations: Mapping[str, Tensor], causal: bool
) -> Reading:
    """The reading of a layer with these ``weights`` that comes closest to the activations of the
    probe, in float64."""
    prefix, block, cfg = f"blocks.{layer}.attn.", model.blocks[layer], model.cfg
    module, ln1 = block.attn, part(block, "ln1")
    h = activations[f"blocks.{layer}.hook_resid_pre"].double()
    weights, length = weights.to(h), h.shape[1]

    def bound(reading: Reading, tables: Tensor | None = None) -> Attention:
        return attention_of(module, ln1, weights, reading, tables)

    def hook(name: str) -> Tensor:
        value = cached(activations, f"{prefix}hook_{name}", len(weights.W_Q))
        assert value is not None  # the probe holds every hook of the layer
        return value.double()

    def off(reading: Reading) -> float:
        errors = ((bound(reading).raw(h, w) - hook(w)).abs().max() for w in "qk")
        return float(sum(errors))

    readings = map(Reading, norm_readings(ln1, cfg))
    reading, _ = nearest((option, off(option)) for option in readings)
    pattern, scores = hook("pattern"), hook("attn_scores")
    cap = part(inner(module), "attn_logit_softcapping") or part(cfg, "attn_scores_soft_cap") or 0.0
    reading = replace(
        reading,
        softcap=float(cap) if cap > 0 else None,
        has_scores=not torch.allclose(scores, pattern),  # some classes hold the pattern there
        window=_window(model, module, layer),
    )
    # in its own dtype, whose least number marks masked keys
    masked = activations[f"{prefix}hook_attn_scores"] if reading.has_scores else None
    allowed = allowed_cells(module, reading, length, causal, masked, h)
    cells = allowed if reading.has_scores else allowed & (pattern > VISIBLE)
    scheme = str(getattr(cfg, "positional_embedding_type", ""))

    # a log pattern is known up to a constant of each row, and ALiBi alike
    target = row_center(scores if reading.has_scores else pattern.clamp(min=1e-38).log(), cells)
    tables = rotary_tables(module, activations, prefix, length)
    order = reversed(ROTATIONS) if getattr(cfg, "rotary_adjacent_pairs", False) else ROTATIONS
    styles = [*order, None] if scheme == "rotary" and tables is not None else [None]
    twice = tables is None or each_angle_twice(tables[0])

    def candidates() -> Iterator[tuple[Reading, float]]:
        for qk, style in product(_qk_readings(module, cfg.eps), styles):
            option = replace(reading, qk=qk, rotation=style, each_angle_twice=twice)
            attention = bound(option, tables)
            q, k = (attention.entering(attention.raw(h, w), w) for w in "qk")
            content = scores_of(q, k, 1.0)
            for scale, slopes in _scales(option, module, content, target, cells, scheme):
                total = content * scale
                if slopes is not None:
                    total = total + slopes[:, None, None] * torch.arange(length, device=h.device)
                error = (row_center(soft_cap(total, option.softcap), cells) - target).abs().max()
                given = None if slopes is None else tuple(slopes.tolist())
                yield replace(option, scale=scale, slopes=given), float(error)

    return nearest(candidates())[0]


def _qk_readings(attn: object, cfg_eps: float) -> Iterator[NormReading | None]:
    """Candidates for the norm of queries and keys."""
    module, keys = (inner(qk_norm_module(attn, w)) for w in "qk")
    if module is not None and keys is not None:
        gain, d_head = part(module, "weight", "w"), part(attn, "W_Q").shape[-1]
        eps = float(part(module, "eps", "variance_epsilon") or cfg_eps)
        flat = gain is not None and gain.dim() == 1 and gain.numel() > d_head
        axes = (-2, -1) if flat else (-1,)
        # the gain is the weight, or one more (Gemma)
        for norm_type, shift in product(("RMS", "LN"), (0.0, 1.0)):
            yield NormReading(norm_type, shift, eps, axes)
    yield None


def _window(model: Any, module: object, layer: int) -> int | None:
    """Width of a sliding window by the model's settings (used where no hook holds scores, and in
    edits, which act before these are known)."""
    source, config = inner(module), getattr(part(model, "original_model"), "config", model.cfg)
    if "local" in (part(source, "attention_type"), part(source, "attn_type")):
        return int(config.window_size)
    kinds = part(config, "layer_types")
    slides = part(config, "use_sliding_window") is not False
    slides = slides if kinds is None else kinds[layer] == "sliding_attention"
    width = part(source, "sliding_window") or part(config, "sliding_window")
    return int(width) if width and slides else None


def _scales(
    reading: Reading, module: object, content: Tensor, target: Tensor, cells: Tensor, scheme: str
) -> Iterator[tuple[float, Float[Tensor, " head"] | None]]:
    """Candidates for the scale: those that the module holds, the usual one, 1, and the least
    squares fit (which a soft cap or ALiBi would bend). With ALiBi each has slopes: the published
    ones where they fit, else those of the least squares line. ``content`` are products without
    scale."""
    source = inner(module)
    factors = [part(source, name) for name in ("scaling", "inv_norm_factor", "softmax_scale")]
    divisors = [part(module, "attn_scale"), part(source, "scale_attn"), part(source, "scale")]
    named = [(value, 1) for value in factors] + [(value, -1) for value in divisors]
    numbers = [(float(v), power) for v, power in named if isinstance(v, int | float | Tensor)]
    scales = [value**power for value, power in numbers if value > 0]
    scales = dict.fromkeys([*scales, part(module, "W_Q").shape[-1] ** -0.5, 1.0])
    if scheme != "alibi":
        yield from ((scale, None) for scale in scales)
        x = row_center(content, cells)
        energy = float(x.square().sum())
        if reading.softcap is None and energy > 0:
            yield float((x * target).sum()) / energy, None
        return
    published = alibi_slopes(content.shape[1]).to(content)
    first = cells if cells.dim() == 2 else cells[0]
    j = torch.arange(content.shape[-1], device=content.device).to(content)
    for scale in scales:
        rest = (target - row_center(content * scale, cells)).mean(0)
        x = row_center(j.expand_as(rest), first)
        # 1e-300 keeps the slope of a probe of one token, 0 / 0, finite
        fit = (x * rest).sum((-2, -1)) / x.square().sum((-2, -1)).clamp(min=1e-300)
        off = float((published[:, None, None] * x - rest).abs().max())
        size = float(rest.abs().max() + content.abs().max() * scale)
        yield scale, published if off <= reconstruction_bound(2**-24, size) else fit


def alibi_slopes(heads: int) -> Float[Tensor, " head"]:
    """ALiBi slopes (Press et al. 2022): ``2^(-8 (h+1) / H)`` for H heads, a power of two; otherwise
    those of the power below, then every other one of its double.

    >>> alibi_slopes(4).tolist(), alibi_slopes(3).tolist()
    ([0.25, 0.0625, 0.015625, 0.00390625], [0.0625, 0.00390625, 0.25])
    """
    closest = 2 ** math.floor(math.log2(heads))
    main = [2 ** (-8 * (h + 1) / closest) for h in range(closest)]
    rest = [2 ** (-8 * (h + 1) / (2 * closest)) for h in range(0, 2 * (heads - closest), 2)]
    return torch.tensor(main + rest, dtype=torch.float64)
