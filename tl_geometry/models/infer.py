"""What does an attention layer do to its input (norm, QK-norm, rotation, scale, score bias)?
:class:`SpecInference` tries candidates and keeps the one that reproduces the cached activations of
the probe. :mod:`tl_geometry.models.layers` calls it once for each layer.

A candidate is judged by the queries, keys and row-centred logarithm of the pattern that it gives.
What no candidate reproduces is refused later by the reconstruction error, so a wrong guess cannot
give a wrong number.
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
    AttentionSpec,
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

TIE = 0.99
"""A later candidate must be better by 1%: equal ones differ by rounding, and the first is the one
that the module itself declares."""


class SpecInference:
    """The inference for one layer, from the activations of the probe, in float64; ``roundoff`` is
    that of the probe's own dtype."""

    def __init__(
        self, parameters: Parameters, layer: int, probe: Mapping[str, Tensor], causal: bool
    ) -> None:
        self.parameters, self.layer, self.probe, self.causal = parameters, layer, probe, causal
        self.attn, h = parameters.attention(layer), probe[f"blocks.{layer}.hook_resid_pre"]
        self.h, self.length, self.roundoff = h.double(), h.shape[1], unit_roundoff(h.dtype)
        weights = parameters.weights(layer)
        self.weights = HeadWeights(**{k: v.double() for k, v in vars(weights).items()})
        self.heads, _, self.d_head = weights.W_Q.shape
        self.scheme = str(getattr(parameters.model.cfg, "positional_embedding_type", ""))

    def hook(self, name: str) -> Tensor | None:
        """A probed activation of this layer in float64, grouped heads expanded."""
        value = self.probe.get(f"blocks.{self.layer}.attn.{name}")
        if value is None:
            return None
        by_head = name in ("hook_q", "hook_k")
        repeats = self.heads // value.shape[-2] if by_head else 1
        return value.double().repeat_interleave(repeats, -2)

    def infer(self) -> AttentionSpec:
        """The candidate that comes closest to the model's own numbers."""
        spec = self.norm()
        pattern, scores = self.hook("hook_pattern"), self.hook("hook_attn_scores")
        if pattern is None:
            return spec
        if scores is not None and torch.allclose(scores, pattern):
            scores = None  # some classes hold the pattern there
        spec = replace(
            spec,
            softcap=self.softcap(),
            sinks=self.sinks(),
            has_scores=scores is not None,
            window=self.window(),
            ignore=ignore_of(self.attn),
        )
        hook = f"blocks.{self.layer}.attn.hook_attn_scores"
        masked = self.probe[hook] if spec.has_scores else None  # in its own dtype
        allowed = allowed_cells(spec, self.length, self.causal, masked, pattern)
        best, least, size = spec, math.inf, 0.0
        for option in self.options(spec):
            # without tables a rotation is no candidate
            turn = turn_of(
                self.parameters, self.layer, self.probe, self.length, option.rotation, {}
            )
            if (turn is None) != (option.rotation is None):
                continue
            q, k = (option.full(self.h, w, turn) for w in "qk")
            content, absolute = scores_of(q, k, 1.0), float(scores_of(q.abs(), k.abs(), 1.0).max())
            for candidate in self.scaled(option, content, pattern, allowed):
                if self.scheme == "alibi" and scores is not None:
                    candidate = self.with_bias(candidate, content, absolute, scores, allowed)
                error = self.misfit(candidate, content, scores, pattern, allowed)
                if error < least * TIE:
                    best, least, size = candidate, error, absolute * candidate.scale
        return replace(best, single=best.single or self.is_single(least, size))

    def is_single(self, error: float, size: float) -> bool:
        """Whether an error in a float64 model is that of float32 arithmetic."""
        low, high = (reconstruction_bound(u, size) for u in (self.roundoff, 2**-24))
        # a roundoff below 2^-40: of the dtypes, float64 alone
        return self.roundoff < 2**-40 and low < error <= high

    def norm(self) -> AttentionSpec:
        """The norm that reproduces ``hook_q`` and ``hook_k``."""
        module = part(block_of(self.parameters.model, self.layer), "ln1")
        q, k = self.hook("hook_q"), self.hook("hook_k")
        best, least = None, math.inf
        for norm in self.parameters.norm_candidates(module, self.h):
            spec = AttentionSpec(norm=norm, weights=self.weights, added=self.added())
            pairs = [(spec.raw(self.h, "q"), q), (spec.raw(self.h, "k"), k)]
            error = sum(float((a - b).abs().max()) for a, b in pairs if b is not None)
            if error < least * TIE:
                single = self.is_single(error, float(pairs[0][0].abs().max()))
                best, least = replace(spec, single=single), error
        assert best is not None  # the candidate without a norm always exists
        return best

    def added(self) -> Tensor | None:
        """Positional vectors that go into queries and keys only (Shortformer)."""
        if self.scheme != "shortformer":
            return None
        return self.parameters.model.pos_embed.W_pos.detach().double()[: self.length]

    def options(self, spec: AttentionSpec) -> Iterator[AttentionSpec]:
        """Candidates for QK-norm and rotation."""
        styles: list[str | None] = [None]
        if self.scheme == "rotary":
            adjacent = getattr(self.parameters.model.cfg, "rotary_adjacent_pairs", False)
            styles = [*(reversed(ROTATIONS) if adjacent else ROTATIONS), None]
        for norm, style in itertools.product(self.qk_norms(), styles):
            yield replace(spec, qk_norm=norm, rotation=style)

    def qk_norms(self) -> Iterator[QKNorm | None]:
        """Candidates for the norm of queries and keys."""
        modules = [inner(qk_norm_module(self.attn, w)) for w in "qk"]
        if all(module is not None for module in modules):
            q, k = (part(module, "weight", "w") for module in modules)
            module_eps = part(modules[0], "eps", "variance_epsilon")
            eps = float(module_eps or self.parameters.model.cfg.eps)
            flat = q is not None and q.dim() == 1 and q.numel() > self.d_head
            # the gain is the weight, or one more (Gemma)
            for norm_type, shift in itertools.product(("RMS", "LN"), (0.0, 1.0)):
                yield QKNorm(norm_type, flat, self._gain(q, shift), self._gain(k, shift), eps)
        yield None

    def _gain(self, gain: Tensor | None, shift: float) -> Tensor:
        if gain is None:
            return torch.ones(self.heads, self.d_head, dtype=torch.float64, device=self.h.device)
        rows = gain.detach().double().reshape(-1, self.d_head) + shift
        return rows.repeat_interleave(self.heads // len(rows), 0)

    def softcap(self) -> float | None:
        """The cap c of ``c tanh(score / c)``."""
        if self.parameters.bridge:
            cap = part(inner(self.attn), "attn_logit_softcapping")
        else:
            cap = self.parameters.model.cfg.attn_scores_soft_cap
        return float(cap) if cap is not None and float(cap) > 0 else None

    def sinks(self) -> Tensor | None:
        """One more logit for each head, ``[head]``."""
        value = part(inner(self.attn), "sinks")
        return None if value is None else value.detach().double().reshape(-1)

    def window(self) -> int | None:
        """Width of a sliding window by the model's settings (used only where no hook holds
        scores)."""
        model, source = self.parameters.model, inner(self.attn)
        config = getattr(part(model, "original_model"), "config", None)
        if config is None:  # HookedTransformer
            local = part(self.attn, "attn_type") == "local"
            return int(model.cfg.window_size) if local else None
        layer_types = part(config, "layer_types")
        if layer_types is not None:
            slides = layer_types[self.layer] == "sliding_attention"
            return int(config.sliding_window) if slides else None
        width = part(source, "sliding_window") or part(config, "sliding_window")
        if not width and part(source, "attention_type") == "local":
            width = config.window_size
        return int(width) if width and part(config, "use_sliding_window") is not False else None

    def scaled(
        self, spec: AttentionSpec, content: Tensor, pattern: Tensor, allowed: Tensor
    ) -> Iterator[AttentionSpec]:
        """Candidates for the scale: those that the module holds, the usual one, 1, and the least
        squares fit to the log pattern (which a soft cap or ALiBi would bend). ``content`` holds the
        unscaled products of queries and keys, ``[batch head query key]``."""
        source = inner(self.attn)
        multiply = [part(source, name) for name in ("scaling", "inv_norm_factor", "softmax_scale")]
        divide = [part(self.attn, "attn_scale"), part(source, "scale_attn"), part(source, "scale")]
        numbers = (int, float, Tensor)
        scales = [float(v) for v in multiply if isinstance(v, numbers)]
        scales += [1 / float(v) for v in divide if isinstance(v, numbers) and float(v) != 0]
        for scale in dict.fromkeys([*scales, self.d_head**-0.5, 1.0]):
            if scale > 0:
                yield replace(spec, scale=scale)
        if spec.softcap is None and self.scheme != "alibi":
            # far above the smallest normal float32 (1e-38), near which a probability loses digits
            cells = allowed & (pattern > 1e-30)
            x, y = row_center(content, cells), row_center(pattern.clamp(min=1e-38).log(), cells)
            energy = float(x.square().sum())
            if energy > 0:
                yield replace(spec, scale=float((x * y).sum()) / energy)

    def with_bias(
        self, spec: AttentionSpec, content: Tensor, absolute: float, scores: Tensor, allowed: Tensor
    ) -> AttentionSpec:
        """The specification with the analytic ALiBi bias, where it matches the measured one, else
        with ``"measured"``; ``absolute`` is the largest product of absolute values."""
        cells = allowed.expand(self.heads, -1, -1)
        measured = torch.where(cells, scores - content * spec.scale, 0.0).mean(0)
        j = torch.arange(self.length, dtype=torch.float64, device=measured.device)
        x, y = row_center(j.expand_as(measured), cells), row_center(measured, cells)
        # of each head, the least squares line through the measured bias
        # 1e-300 keeps the slope of a probe of one token, 0 / 0, finite
        slopes = (x * y).sum((-2, -1)) / x.square().sum((-2, -1)).clamp(min=1e-300)
        for form in ("k", "k-q", "k-last"):
            for tried in (alibi_slopes(self.heads).to(slopes), slopes):
                option = replace(spec, slopes=tried, bias_form=form)
                bias = option.bias(self.length)
                assert bias is not None
                size = float(measured.abs().max()) + absolute * spec.scale
                error = float(torch.where(cells, measured - bias, 0.0).abs().max())
                if error <= reconstruction_bound(self.roundoff, size):
                    return option
        return replace(spec, bias_form="measured")

    def misfit(
        self,
        spec: AttentionSpec,
        content: Tensor,
        scores: Tensor | None,
        pattern: Tensor,
        allowed: Tensor,
    ) -> float:
        """Largest difference of scores, or of row-centred log patterns where the hook holds no
        scores; of a measured bias, how far the two sequences of the probe disagree."""
        total = content * spec.scale
        bias = spec.bias(self.length)
        total = total if bias is None else total + bias
        if spec.bias_form == "measured" and scores is not None:
            rest = torch.where(allowed, scores - total, 0.0)
            return float((rest - rest.mean(0)).abs().max())
        total = soft_cap(total, spec.softcap)
        if scores is not None:
            return float(torch.where(allowed, scores - total, 0.0).abs().max())
        cells = allowed & (pattern > 1e-30)  # as in scaled()
        log = row_center(pattern.clamp(min=1e-38).log(), cells)
        return float((log - row_center(total, cells)).abs().max())


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
