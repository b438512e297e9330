"""The facts of one attention layer: proposed from its module, chosen by what reproduces the model's
own probe.

For each ingredient (norm, QK-norm, rotation, scale, score bias) there are a few readings of the
module; the one that brings recomputed queries, keys and the row-centred logarithm of the pattern
closest to the model's is kept. What no reading reproduces is refused later by the reconstruction
error, so a wrong guess cannot give a wrong number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import row_center
from tl_geometry.models.attention_spec import (
    ROTATIONS,
    Facts,
    QKNorm,
    allowed_cells,
    ignore_of,
    scores_of,
    turn_of,
)
from tl_geometry.models.layer_view import HeadWeights
from tl_geometry.models.parameters import Parameters, block_of, inner, part, qk_norm_module
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.softmax import soft_cap


class FactFinder:
    """Finds the :class:`Facts` of one layer from the probe's activations."""

    def __init__(
        self,
        parameters: Parameters,
        layer: int,
        found: Mapping[str, Tensor],
        causal: bool,
        h: Tensor,
    ) -> None:
        self.parameters, self.layer, self.found, self.causal = parameters, layer, found, causal
        self.attn, self.h = parameters.attention(layer), h.double()
        self.roundoff = unit_roundoff(h.dtype)
        self.length = h.shape[1]
        weights = parameters.weights(layer)
        self.weights = HeadWeights(**{k: v.double() for k, v in vars(weights).items()})
        self.heads = len(weights.W_Q)

    def hook(self, name: str) -> Tensor | None:
        """A probed activation of this layer in float64, grouped heads expanded."""
        value = self.found.get(f"blocks.{self.layer}.attn.{name}")
        if value is None:
            return None
        value = value.double()
        by_head = name in ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k")
        if not by_head or value.shape[-2] == self.heads:
            return value
        return value.repeat_interleave(self.heads // value.shape[-2], -2)

    def find(self) -> Facts:
        """The reading that comes closest to the model's own numbers (float64)."""
        facts = self.norm()
        pattern, raw_scores = self.hook("hook_pattern"), self.hook("hook_attn_scores")
        if pattern is None:
            return facts
        is_scores = raw_scores is not None and not torch.allclose(raw_scores, pattern)
        scores = raw_scores if is_scores else None
        facts = replace(
            facts,
            softcap=self.softcap(),
            sinks=self.sinks(),
            has_scores=is_scores,
            window=self.window(),
            ignore=ignore_of(self.attn),
        )
        original = self.found.get(f"blocks.{self.layer}.attn.hook_attn_scores")
        masked = original if is_scores else None
        allowed = allowed_cells(facts, self.length, self.causal, masked, pattern)
        best, least, size = facts, math.inf, 0.0
        for option in self.options(facts):
            turn = turn_of(self.parameters, self.layer, self.found, self.length, option.rotation)
            if (turn is None) != (option.rotation is None):
                continue
            q, k = (option.full(self.h, w, turn) for w in "qk")
            content, absolute = scores_of(q, k, 1.0), float(scores_of(q.abs(), k.abs(), 1.0).max())
            for scaled in self.scaled(option, content, pattern, allowed):
                completed = scaled
                if self.is_alibi():
                    completed = self.with_bias(scaled, content, absolute, scores, allowed)
                error = self.misfit(completed, content, scores, pattern, allowed)
                if error < least * 0.99:  # ties go to the earlier reading
                    best, least, size = completed, error, absolute * scaled.scale
        return replace(best, single=best.single or self.is_single(least, size))

    def is_single(self, error: float, size: float) -> bool:
        """Whether an error in a float64 model is that of float32 arithmetic."""
        low, high = (reconstruction_bound(u, size) for u in (self.roundoff, 2**-24))
        return self.roundoff < 2**-40 and low < error <= high

    def norm(self) -> Facts:
        """The norm that reproduces ``hook_q`` and ``hook_k``."""
        module = part(block_of(self.parameters.model, self.layer), "ln1")
        q, k = self.hook("hook_q"), self.hook("hook_k")
        best, least = None, math.inf
        for norm in self.parameters.norm_candidates(module, self.h):
            facts = Facts(norm=norm, weights=self.weights, added=self.added())
            pairs = [(facts.raw(self.h, "q"), q), (facts.raw(self.h, "k"), k)]
            error = sum(float((a - b).abs().max()) for a, b in pairs if b is not None)
            if error < least * 0.99:
                single = self.is_single(error, float(pairs[0][0].abs().max()))
                best, least = replace(facts, single=single), error
        assert best is not None  # the candidate without a norm always exists
        return replace(best, norm_after=self.norm_after(best))

    def norm_after(self, facts: Facts) -> bool:
        """Whether heads write through a norm: its module, or a decoder with norms of which none
        stands before attention."""
        model = self.parameters.model
        only_after = facts.norm.norm_type is None and model.cfg.normalization_type is not None
        return (self.causal and only_after) or hasattr(model.blocks[self.layer], "ln1_post")

    def added(self) -> Tensor | None:
        """Positional vectors that go into queries and keys only (Shortformer)."""
        if getattr(self.parameters.model.cfg, "positional_embedding_type", "") != "shortformer":
            return None
        return self.parameters.model.pos_embed.W_pos.detach().double()[: self.length]

    def options(self, facts: Facts) -> Iterator[Facts]:
        """Readings of QK-norm and rotation."""
        styles: list[str | None] = [None]
        cfg = self.parameters.model.cfg
        if str(getattr(cfg, "positional_embedding_type", "")) == "rotary":
            adjacent = bool(getattr(cfg, "rotary_adjacent_pairs", False))
            styles = [*(reversed(ROTATIONS) if adjacent else ROTATIONS), None]
        for norm, style in itertools.product(self.qk_norms(), styles):
            yield replace(facts, qk_norm=norm, rotation=style)

    def qk_norms(self) -> Iterator[QKNorm | None]:
        """Readings of the norm of queries and keys."""
        pair = [qk_norm_module(self.attn, w) for w in "qk"]
        if any(p is None for p in pair):
            yield None
            return
        modules = [inner(p) for p in pair]
        gains = [part(m, "weight", "w") for m in modules]
        eps = float(part(modules[0], "eps", "variance_epsilon") or self.parameters.model.cfg.eps)
        flat = (
            gains[0] is not None
            and gains[0].dim() == 1
            and gains[0].numel() > self.weights.W_Q.shape[-1]
        )
        for norm_type, shift in itertools.product(("RMS", "LN"), (0.0, 1.0)):
            yield QKNorm(
                norm_type, flat, self._gain(gains[0], shift), self._gain(gains[1], shift), eps
            )
        yield None

    def _gain(self, gain: Tensor | None, shift: float) -> Tensor:
        d_head = self.weights.W_Q.shape[-1]
        if gain is None:
            return torch.ones(self.heads, d_head, dtype=torch.float64, device=self.h.device)
        rows = gain.detach().double().reshape(-1, d_head) + shift
        return rows.repeat_interleave(self.heads // len(rows), 0)

    def softcap(self) -> float | None:
        """The cap c of ``c tanh(score / c)``."""
        if self.parameters.bridge:
            cap = part(inner(self.attn), "attn_logit_softcapping")
        else:
            cap = self.parameters.model.cfg.attn_scores_soft_cap
        return float(cap) if cap is not None and float(cap) > 0 else None

    def sinks(self) -> Tensor | None:
        """One more logit for each head."""
        value = part(inner(self.attn), "sinks")
        return None if value is None else value.detach().double().reshape(-1)

    def window(self) -> int | None:
        """Width of a sliding window by the model's own account (used only where no scores are
        held)."""
        model, source = self.parameters.model, inner(self.attn)
        config = getattr(part(model, "original_model"), "config", None)
        if config is None:  # HookedTransformer
            local = part(self.attn, "attn_type") == "local"
            return int(model.cfg.window_size) if local else None
        kinds = part(config, "layer_types")
        if kinds is not None:
            return int(config.sliding_window) if kinds[self.layer] == "sliding_attention" else None
        width = part(source, "sliding_window") or part(config, "sliding_window")
        if not width and part(source, "attention_type") == "local":
            width = config.window_size
        return int(width) if width and part(config, "use_sliding_window") is not False else None

    def is_alibi(self) -> bool:
        """Whether scores carry a bias by position."""
        return getattr(self.parameters.model.cfg, "positional_embedding_type", "") == "alibi"

    def scaled(
        self, facts: Facts, content: Tensor, pattern: Tensor, allowed: Tensor
    ) -> Iterator[Facts]:
        """Readings of the scale: by the module, then the usual one, then measured from the
        pattern."""
        source, d_head = inner(self.attn), self.weights.W_Q.shape[-1]
        multiply = [part(source, name) for name in ("scaling", "inv_norm_factor", "softmax_scale")]
        divide = [part(self.attn, "attn_scale"), part(source, "scale_attn"), part(source, "scale")]
        found = [float(v) for v in multiply if isinstance(v, int | float | Tensor)]
        found += [
            1 / float(v) for v in divide if isinstance(v, int | float | Tensor) and float(v) != 0
        ]
        known = [s for s in dict.fromkeys([*found, d_head**-0.5, 1.0]) if s > 0]
        for scale in known:
            yield replace(facts, scale=scale)
        if facts.softcap is None and not self.is_alibi():
            cells = allowed & (pattern > 1e-30)
            x, y = row_center(content, cells), row_center(pattern.clamp(min=1e-38).log(), cells)
            energy = float(x.square().sum())
            if energy > 0:
                yield replace(facts, scale=float((x * y).sum()) / energy)

    def with_bias(
        self, facts: Facts, content: Tensor, absolute: float, scores: Tensor | None, allowed: Tensor
    ) -> Facts:
        """The analytic ALiBi bias, where it matches the measured one; ``absolute`` is the largest
        content in absolute values."""
        if scores is None:
            return facts
        cells = allowed.expand(self.heads, -1, -1)
        measured = torch.where(cells, scores - content * facts.scale, 0.0).mean(0)
        j = torch.arange(self.length, dtype=torch.float64, device=measured.device)
        x, y = row_center(j.expand_as(measured), cells), row_center(measured, cells)
        slopes = (x * y).sum((-2, -1)) / x.square().sum((-2, -1)).clamp(min=1e-300)
        for form in ("k", "k-q", "k-last"):
            for exact in (alibi_slopes(self.heads).to(slopes), slopes):
                option = replace(facts, slopes=exact, bias_form=form)
                bias = option.bias(self.length)
                assert bias is not None
                size = float(measured.abs().max()) + absolute * facts.scale
                error = float(torch.where(cells, measured - bias, 0.0).abs().max())
                if error <= reconstruction_bound(self.roundoff, size):
                    return option
        return replace(facts, bias_form="measured")

    def misfit(
        self, facts: Facts, content: Tensor, scores: Tensor | None, pattern: Tensor, allowed: Tensor
    ) -> float:
        """Largest difference of scores, or of row-centred log patterns where the hook holds no
        scores."""
        total = content * facts.scale
        bias = facts.bias(self.length)
        total = total if bias is None else total + bias
        if facts.bias_form == "measured" and scores is not None:
            rest = torch.where(allowed, scores - total, 0.0)
            return float((rest - rest.mean(0)).abs().max())
        total = soft_cap(total, facts.softcap)
        if scores is not None:
            return float(torch.where(allowed, scores - total, 0.0).abs().max())
        cells = allowed & (pattern > 1e-30)
        log = row_center(pattern.clamp(min=1e-38).log(), cells)
        return float((log - row_center(total, cells)).abs().max())


def alibi_slopes(heads: int) -> Float[Tensor, " head"]:
    """ALiBi slopes (Press et al. 2022): ``2^(-8 (h+1) / H)`` for H a power of two, interleaved with
    those of 2H otherwise.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    closest = 2 ** math.floor(math.log2(heads))
    main = [2 ** (-8 * (h + 1) / closest) for h in range(closest)]
    rest = [2 ** (-8 * (h + 1) / (2 * closest)) for h in range(0, 2 * (heads - closest), 2)]
    return torch.tensor(main + rest, dtype=torch.float64)
