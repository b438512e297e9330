"""How one attention layer is read: candidates for norm, QK-norm, rotation, scale and score bias are
tried on the probe, and the one that reproduces the model's own numbers is kept
(:func:`infer_layer`). :mod:`tl_geometry.models.layers` asks once for each layer.

A candidate is judged by the queries, keys and row-centred scores (or logarithm of the pattern)
that it gives. What no candidate reproduces is refused later by the reconstruction error, so a wrong
guess cannot give a wrong number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.rows import row_center
from tl_geometry.models.attention import (
    ROTATIONS,
    Attention,
    QKReading,
    Reading,
    allowed_cells,
    attention_of,
    each_angle_twice,
    qk_norm_module,
    rotation_of,
    scores_of,
)
from tl_geometry.models.norms import norm_readings
from tl_geometry.models.parameters import HeadWeights, Parameters, inner, part
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.softmax import soft_cap

TIE = 0.99
"""A later candidate must be better by 1%: equal ones differ by rounding, and the first is the one
that the module itself declares."""
VISIBLE = 1e-30
"""Probabilities that count: far above the smallest normal float32 (1e-38), near which a probability
loses digits."""


@dataclass(frozen=True, eq=False)
class _Probe:
    """What a layer did on the probe, in float64. ``target`` is what candidates must reproduce on
    ``cells``: the model's scores, or the logarithm of its pattern, row-centred where a constant of
    each row is not known."""

    parameters: Parameters
    layer: int
    activations: Mapping[str, Tensor]
    weights: HeadWeights
    h: Float[Tensor, "batch position d_model"]

    @property
    def prefix(self) -> str:
        return f"blocks.{self.layer}.attn."

    def hook(self, name: str) -> Tensor | None:
        """An activation of this layer, grouped heads expanded."""
        value = self.activations.get(f"{self.prefix}{name}")
        if value is None or name not in ("hook_q", "hook_k"):
            return None if value is None else value.double()
        return value.double().repeat_interleave(len(self.weights.W_Q) // value.shape[-2], -2)

    def bound(self, reading: Reading) -> Attention:
        """The layer by one reading."""
        module, block = self.parameters.attention(self.layer), self.parameters.block(self.layer)
        return attention_of(module, part(block, "ln1"), self.weights, reading)


@torch.no_grad()
def infer_layer(
    parameters: Parameters, layer: int, activations: Mapping[str, Tensor], causal: bool
) -> Reading:
    """The reading that comes closest to the activations of the probe."""
    h = activations[f"blocks.{layer}.hook_resid_pre"].double()
    probe = _Probe(parameters, layer, activations, parameters.weights(layer).to(h), h)
    module, reading = parameters.attention(layer), _norm(probe)
    pattern, scores = probe.hook("hook_pattern"), probe.hook("hook_attn_scores")
    if pattern is None:
        return reading
    # some classes hold the pattern there
    has_scores = scores is not None and not torch.allclose(scores, pattern)
    reading = replace(
        reading,
        softcap=_softcap(parameters, module),
        has_scores=has_scores,
        window=_window(parameters, module, layer),
    )
    # in its own dtype, whose least number marks masked keys
    masked = activations[f"{probe.prefix}hook_attn_scores"] if has_scores else None
    allowed = allowed_cells(module, reading, h.shape[1], causal, masked, h)
    cells = allowed if has_scores else allowed & (pattern > VISIBLE)
    seen = scores if has_scores and scores is not None else pattern.clamp(min=1e-38).log()
    scheme = str(getattr(parameters.model.cfg, "positional_embedding_type", ""))
    # ALiBi is known up to a constant of each row, a log pattern alike
    centred = not has_scores or scheme == "alibi"
    target = _on(cells, seen, centred)
    best, least = reading, math.inf
    for option in _options(probe, reading, scheme):
        attention = probe.bound(option)
        turn = rotation_of(module, activations, probe.prefix, h.shape[1], option)
        if (turn is None) != (option.rotation is None):
            continue  # without tables a rotation is no candidate
        q, k = (attention.entering(attention.raw(h, w), w, turn) for w in "qk")
        content = scores_of(q, k, 1.0)
        for candidate in _scaled(option, module, content, target, cells, scheme):
            total = content * candidate.scale
            if candidate.slopes is not None:
                slopes = total.new_tensor(candidate.slopes)
                total = total + slopes[:, None, None] * torch.arange(h.shape[1], device=h.device)
            total = soft_cap(total, candidate.softcap)
            error = float((_on(cells, total, centred) - target).abs().max())
            if error < least * TIE:
                best, least = candidate, error
    return best


def _on(cells: Tensor, scores: Tensor, centred: bool) -> Tensor:
    """Scores on some cells, zero elsewhere."""
    return row_center(scores, cells) if centred else torch.where(cells, scores, 0.0)


def _norm(probe: _Probe) -> Reading:
    """The norm that reproduces ``hook_q`` and ``hook_k``."""
    cfg = probe.parameters.model.cfg
    seen = {w: value for w in "qk" if (value := probe.hook(f"hook_{w}")) is not None}
    best, least = None, math.inf
    for norm in norm_readings(part(probe.parameters.block(probe.layer), "ln1"), cfg):
        reading = Reading(norm)
        attention = probe.bound(reading)
        errors = (float((attention.raw(probe.h, w) - x).abs().max()) for w, x in seen.items())
        error = sum(errors)
        if best is None or error < least * TIE:
            best, least = reading, error
    assert best is not None  # "no norm" is always a candidate
    return best


def _options(probe: _Probe, reading: Reading, scheme: str) -> Iterator[Reading]:
    """Candidates for QK-norm and rotation."""
    styles: list[str | None] = [None]
    if scheme == "rotary":
        adjacent = getattr(probe.parameters.model.cfg, "rotary_adjacent_pairs", False)
        styles = [*(reversed(ROTATIONS) if adjacent else ROTATIONS), None]
    for qk, style in itertools.product(_qk_readings(probe), styles):
        option = replace(reading, qk=qk, rotation=style)
        turn = rotation_of(
            probe.parameters.attention(probe.layer),
            probe.activations,
            probe.prefix,
            probe.h.shape[1],
            option,
        )
        yield (
            option if turn is None else replace(option, each_angle_twice=each_angle_twice(turn.cos))
        )


def _qk_readings(probe: _Probe) -> Iterator[QKReading | None]:
    """Candidates for the norm of queries and keys."""
    attn = probe.parameters.attention(probe.layer)
    modules = [inner(qk_norm_module(attn, w)) for w in "qk"]
    if all(module is not None for module in modules):
        gain = part(modules[0], "weight", "w")
        own = part(modules[0], "eps", "variance_epsilon")
        eps = float(own or probe.parameters.model.cfg.eps)
        flat = gain is not None and gain.dim() == 1 and gain.numel() > probe.weights.W_Q.shape[-1]
        # the gain is the weight, or one more (Gemma)
        for norm_type, shift in itertools.product(("RMS", "LN"), (0.0, 1.0)):
            yield QKReading(norm_type, flat, shift, eps)
    yield None


def _softcap(parameters: Parameters, module: object) -> float | None:
    """The cap c of ``c tanh(score / c)``."""
    if parameters.bridge:
        cap = part(inner(module), "attn_logit_softcapping")
    else:
        cap = parameters.model.cfg.attn_scores_soft_cap
    return float(cap) if cap is not None and float(cap) > 0 else None


def _window(parameters: Parameters, module: object, layer: int) -> int | None:
    """Width of a sliding window by the model's settings (used only where no hook holds scores)."""
    model, source = parameters.model, inner(module)
    config = getattr(part(model, "original_model"), "config", None)
    if config is None:  # HookedTransformer
        local = part(module, "attn_type") == "local"
        return int(model.cfg.window_size) if local else None
    layer_types = part(config, "layer_types")
    if layer_types is not None:
        slides = layer_types[layer] == "sliding_attention"
        return int(config.sliding_window) if slides else None
    width = part(source, "sliding_window") or part(config, "sliding_window")
    if not width and part(source, "attention_type") == "local":
        width = config.window_size
    return int(width) if width and part(config, "use_sliding_window") is not False else None


def _scaled(
    reading: Reading, module: object, content: Tensor, target: Tensor, cells: Tensor, scheme: str
) -> Iterator[Reading]:
    """Candidates for the scale: those that the module holds, the usual one, 1, and the least
    squares fit (which a soft cap or ALiBi would bend). With ALiBi each has slopes: the published
    ones where they fit, else those of the least squares line. ``content`` are products without
    scale."""
    source = inner(module)
    multiply = [part(source, name) for name in ("scaling", "inv_norm_factor", "softmax_scale")]
    divide = [part(module, "attn_scale"), part(source, "scale_attn"), part(source, "scale")]
    numbers = (int, float, Tensor)
    scales = [float(v) for v in multiply if isinstance(v, numbers)]
    scales += [1 / float(v) for v in divide if isinstance(v, numbers) and float(v) != 0]
    heads, d_head = content.shape[1], part(module, "W_Q").shape[-1]
    for scale in dict.fromkeys([*scales, d_head**-0.5, 1.0]):
        if scale > 0 and scheme != "alibi":
            yield replace(reading, scale=scale)
        elif scale > 0:
            rest = (target - row_center(content * scale, cells)).mean(0)
            x = _positions(rest, cells)
            # 1e-300 keeps the slope of a probe of one token, 0 / 0, finite
            fit = (x * rest).sum((-2, -1)) / x.square().sum((-2, -1)).clamp(min=1e-300)
            published = alibi_slopes(heads).to(fit)
            off = float((published[:, None, None] * x - rest).abs().max())
            size = float(rest.abs().max() + content.abs().max() * scale)
            slopes = published if off <= reconstruction_bound(2**-24, size) else fit
            yield replace(reading, scale=scale, slopes=tuple(slopes.tolist()))
    if reading.softcap is None and scheme != "alibi":
        x = row_center(content, cells)
        energy = float(x.square().sum())
        if energy > 0:
            yield replace(reading, scale=float((x * row_center(target, cells)).sum()) / energy)


def _positions(like: Tensor, cells: Tensor) -> Float[Tensor, "head query key"]:
    """Key positions, row-centred."""
    j = torch.arange(like.shape[-1], dtype=torch.float64, device=like.device)
    return row_center(j.expand_as(like), cells if cells.dim() == 2 else cells[0])


def alibi_slopes(heads: int) -> Float[Tensor, " head"]:
    """ALiBi slopes (Press et al. 2022): ``2^(-8 (h+1) / H)`` for H heads, a power of two; otherwise
    those of the power below, then every other one of its double.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    closest = 2 ** math.floor(math.log2(heads))
    main = [2 ** (-8 * (h + 1) / closest) for h in range(closest)]
    rest = [2 ** (-8 * (h + 1) / (2 * closest)) for h in range(0, 2 * (heads - closest), 2)]
    return torch.tensor(main + rest, dtype=torch.float64)
