"""How one attention layer makes scores: proposed from its module, chosen by what reproduces the
model's own probe.

For each ingredient (norm, QK-norm, rotation, scale, score bias) there are a few readings of the
module; the one that brings recomputed queries, keys and the row-centred logarithm of the pattern
closest to the model's is kept. What no reading reproduces is refused later by the reconstruction
error, so a wrong guess cannot give a wrong number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import row_center
from tl_geometry.models.layer_view import AddedPosition, HeadWeights
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import Parameters, block_of, inner, part, upcast
from tl_geometry.models.reconstruction import reconstruction_bound

MASKED = {torch.float16: -3e4, torch.bfloat16: -1e38, torch.float32: -1e38, torch.float64: -1e38}
"""Scores below this are masked (minus infinity, or the most negative number of the dtype, perhaps
plus a score)."""
ROTATIONS = ("half", "adjacent")
"""Pairs of coordinates that rotate together: (i, i + rotary_dim / 2), or (2i, 2i + 1)."""


@dataclass(frozen=True, eq=False)
class QKNorm:
    """Norm of queries and keys: gains ``[head d_head]``, over one head or ``flat`` over all,
    centred (``"LN"``) or not."""

    norm_type: str
    flat: bool
    gain_q: Float[Tensor, "head d_head"]
    gain_k: Float[Tensor, "head d_head"]
    eps: float

    def scale(self, x: Float[Tensor, "... head d_head"]) -> Float[Tensor, "... head"]:
        """The scale that is frozen."""
        x = self.centre(x)
        dims = (-2, -1) if self.flat else (-1,)
        return (x.square().mean(dims, keepdim=True) + self.eps).sqrt()[..., 0].expand(x.shape[:-1])

    def centre(self, x: Tensor) -> Tensor:
        """Deviations from the mean over what is normalised, for ``"LN"``."""
        return (
            x - x.mean((-2, -1) if self.flat else (-1,), keepdim=True) if self.norm_type == "LN" else x
        )


@dataclass(frozen=True, eq=False)
class Facts:
    """What one attention layer does to its input, apart from the tokens.

    ``single`` marks a layer of a float64 model that computes in float32 in places (RMSNorm, rotary
    tables, GPT-Neo's products), as its own numbers on the probe show. ``added`` is what Shortformer
    models add to the inputs of queries and keys, by position. ``ignore`` is the score that the
    layer itself gives to masked keys, where it is finite.
    """

    norm: NormWeights
    weights: HeadWeights | None = None
    qk_norm: QKNorm | None = None
    rotation: str | None = None
    scale: float = 1.0
    softcap: float | None = None
    sinks: Tensor | None = None
    bias_form: str | None = None
    slopes: Float[Tensor, " head"] | None = None
    window: int | None = None
    ignore: float | None = None
    has_scores: bool = False
    single: bool = False
    added: Float[Tensor, "position d_model"] | None = None

    def bias(self, length: int) -> Tensor | None:
        """Analytic score bias ``[head query key]``."""
        return (
            None
            if self.slopes is None or self.bias_form is None
            else self.slopes[:, None, None] * alibi(self.bias_form, length).to(self.slopes)
        )

    def linear(self, parts: Tensor, which: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Projection of additive parts ``[*part position d_model] -> [*part position head d_head]``
        without frozen scales."""
        return self.head_map(self.projected(parts, which), which, turn)

    def projected(self, parts: Tensor, which: str) -> Tensor:
        """The same before QK-norm and rotation: centring, gain and the weight matrix."""
        return einsum(
            self.norm.centre(parts) * self.norm.gain, self.matrix(which), "... d, h d e -> ... h e"
        )

    def matrix(self, which: str) -> Tensor:
        """W_Q, W_K or W_V."""
        assert (
            self.weights is not None
        )  # left out only of the facts that are remembered between forward passes
        return {"q": self.weights.W_Q, "k": self.weights.W_K, "v": self.weights.W_V}[which]

    def constant(self, which: str) -> Float[Tensor, "... head d_head"]:
        """Query, key or value of what does not depend on the stream (biases of norm and
        projection), before QK-norm and rotation."""
        assert self.weights is not None
        bias = {"q": self.weights.b_Q, "k": self.weights.b_K, "v": self.weights.b_V}[which]
        source = (
            self.norm.bias if self.added is None or which == "v" else self.norm.bias + self.added
        )
        return einsum(source, self.matrix(which), "... d, h d e -> ... h e") + bias

    def added_position(self) -> AddedPosition | None:
        """``added`` and its share of the constants. Models that have it have neither rotation nor
        QK-norm."""
        if self.added is None:
            return None
        return AddedPosition(
            self.added, *(einsum(self.added, self.matrix(w), "t d, h d e -> t h e") for w in "qk")
        )

    def head_map(self, x: Tensor, which: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """The linear part of QK-norm, then the rotation."""
        if which == "v":
            return x
        if self.qk_norm is not None:
            x = self.qk_norm.centre(x) * (
                self.qk_norm.gain_q if which == "q" else self.qk_norm.gain_k
            )
        return x if self.rotation is None or turn is None else rotate(x, *turn, self.rotation)

    def raw(self, h: Tensor, which: str) -> Tensor:
        """Query, key or value before QK-norm and rotation, as ``hook_q``, ``hook_k``, ``hook_v``
        hold it."""
        return self.projected(h, which) / self.norm.scale(h)[..., None, None] + self.constant(which)

    def sizes(self, h: Tensor, which: str) -> Float[Tensor, "... head d_head"]:
        """The same as :meth:`raw` with absolute values throughout,
        ``sum_d |x_d W_de| + |constant|``, which rounding grows with."""
        x = (self.norm.normalize(h) * self.norm.gain).abs()
        return (
            einsum(x, self.matrix(which).abs(), "... d, h d e -> ... h e")
            + self.constant(which).abs()
        )

    def full(self, h: Tensor, which: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Query or key as it enters the score."""
        x = self.raw(h, which)
        if which != "v" and self.qk_norm is not None:
            return self.head_map(x / self.qk_norm.scale(x).unsqueeze(-1), which, turn)
        return self.head_map(x, which, turn)


def rotate(
    x: Float[Tensor, "... position head d_head"], cos: Tensor, sin: Tensor, style: str
) -> Tensor:
    """Rotary embedding of the first coordinates, linear in ``x``; ``cos`` and ``sin`` are
    ``[position rotary_dim]``."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if style == "half":
        a, b = turned.chunk(2, dim=-1)
        flipped = torch.cat([-b, a], dim=-1)
    else:
        pairs = rearrange(turned, "... (n two) -> ... n two", two=2)
        flipped = rearrange(
            torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1), "... n two -> ... (n two)"
        )
    return torch.cat([turned * cos.unsqueeze(-2) + flipped * sin.unsqueeze(-2), rest], dim=-1)


def turn_of(
    parameters: Parameters, layer: int, found: Mapping[str, Tensor], length: int, style: str | None
) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine tables ``[position rotary_dim]`` of a layer, from its activations or its
    buffers."""
    if style is None:
        return None
    attn, prefix = parameters.attention(layer), f"blocks.{layer}.attn."
    cos, sin = found.get(prefix + "hook_cos"), found.get(prefix + "hook_sin")
    if cos is None or sin is None:
        cos, sin = _tables(attn, length)
    if cos is None or sin is None:
        return None
    cos, sin = (upcast(t).reshape(-1, length, t.shape[-1])[0] for t in (cos, sin))
    pairs = cos.shape[-1] // 2
    full = (
        cos.shape[-1] == 1
        or torch.equal(cos[:, :pairs], cos[:, pairs:])
        or torch.equal(cos[:, ::2], cos[:, 1::2])
    )
    if full:
        return cos, sin
    widen = "t n -> t (two n)" if style == "half" else "t n -> t (n two)"
    return repeat(cos, widen, two=2), repeat(sin, widen, two=2)


def _tables(attn: Any, length: int) -> tuple[Tensor | None, Tensor | None]:
    source = inner(attn)
    if part(attn, "rotary_cos") is not None:  # HookedTransformer
        return attn.rotary_cos[:length], attn.rotary_sin[:length]
    if part(source, "embed_positions") is not None:  # GPT-J: sines, then cosines
        sin, cos = source.embed_positions[:length].chunk(2, dim=-1)
        return repeat(cos, "t n -> t (n two)", two=2), repeat(sin, "t n -> t (n two)", two=2)
    rotary = part(source, "rotary")
    if part(rotary, "cos_cached") is not None:  # boot_native
        return rotary.cos_cached[:length], rotary.sin_cached[:length]
    return None, None


def alibi(form: str, length: int) -> Float[Tensor, "query key"]:
    """What a slope multiplies: ``"k"`` the key column, ``"k-q"``, or ``"k-last"`` (all equal up to
    a constant per row)."""
    k = torch.arange(length)
    return (
        k
        - {"k": torch.zeros_like(k), "k-q": k, "k-last": torch.full_like(k, length - 1)}[form][
            :, None
        ]
    ).float()


def scores_of(q: Tensor, k: Tensor, scale: float) -> Float[Tensor, "batch head query key"]:
    """Scaled products of queries and keys."""
    return einsum(q, k, "b i h e, b j h e -> b h i j") * scale


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
        few = (
            name in ("hook_q", "hook_k", "hook_v", "hook_rot_q", "hook_rot_k")
            and value.shape[-2] != self.heads
        )
        return value.repeat_interleave(self.heads // value.shape[-2], -2) if few else value

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
        original = (
            self.found.get(f"blocks.{self.layer}.attn.hook_attn_scores") if is_scores else None
        )
        allowed = allowed_cells(facts, self.length, self.causal, original, pattern)
        best, least, size = facts, math.inf, 0.0
        for option in self.options(facts):
            turn = turn_of(self.parameters, self.layer, self.found, self.length, option.rotation)
            if (turn is None) != (option.rotation is None):
                continue
            q, k = (option.full(self.h, w, turn) for w in "qk")
            content, absolute = scores_of(q, k, 1.0), float(scores_of(q.abs(), k.abs(), 1.0).max())
            for scaled in self.scaled(option, content, pattern, allowed):
                completed = (
                    self.with_bias(scaled, content, absolute, scores, allowed)
                    if self.is_alibi()
                    else scaled
                )
                error = self.misfit(completed, content, scores, pattern, allowed)
                if error < least * 0.99:  # ties go to the earlier reading
                    best, least, size = completed, error, absolute * scaled.scale
        return replace(best, single=best.single or self.is_single(least, size))

    def is_single(self, error: float, size: float) -> bool:
        """Whether an error in a float64 model is that of float32 arithmetic."""
        return self.roundoff < 2**-40 and reconstruction_bound(
            self.roundoff, size
        ) < error <= reconstruction_bound(2**-24, size)

    def norm(self) -> Facts:
        """The norm that reproduces ``hook_q`` and ``hook_k``."""
        modules = [part(block_of(self.parameters.model, self.layer), "ln1")]
        q, k = self.hook("hook_q"), self.hook("hook_k")
        best, least = None, math.inf
        for norm in itertools.chain.from_iterable(
            self.parameters.norm_candidates(m, self.h) for m in modules
        ):
            facts = Facts(norm=norm, weights=self.weights, added=self.added())
            pairs = [(facts.raw(self.h, "q"), q), (facts.raw(self.h, "k"), k)]
            error = sum(float((a - b).abs().max()) for a, b in pairs if b is not None)
            if error < least * 0.99:
                best, least = (
                    replace(facts, single=self.is_single(error, float(pairs[0][0].abs().max()))),
                    error,
                )
        assert best is not None  # the candidate without a norm always exists
        return best

    def added(self) -> Tensor | None:
        """Positional vectors that go into queries and keys only (Shortformer)."""
        if getattr(self.parameters.model.cfg, "positional_embedding_type", "") != "shortformer":
            return None
        return self.parameters.model.pos_embed.W_pos.detach().double()[: self.length]

    def options(self, facts: Facts) -> Iterator[Facts]:
        """Readings of QK-norm and rotation."""
        styles: list[str | None] = [None]
        if str(getattr(self.parameters.model.cfg, "positional_embedding_type", "")) == "rotary":
            adjacent = bool(getattr(self.parameters.model.cfg, "rotary_adjacent_pairs", False))
            styles = [*(reversed(ROTATIONS) if adjacent else ROTATIONS), None]
        for norm, style in itertools.product(self.qk_norms(), styles):
            yield replace(facts, qk_norm=norm, rotation=style)

    def qk_norms(self) -> Iterator[QKNorm | None]:
        """Readings of the norm of queries and keys."""
        source = inner(self.attn)
        pair = [
            part(self.attn, f"{w}_norm") or part(source, f"{w}_norm", f"{w}_layernorm")
            for w in "qk"
        ]
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
            yield QKNorm(norm_type, flat, self._gain(gains[0], shift), self._gain(gains[1], shift), eps)
        yield None

    def _gain(self, gain: Tensor | None, shift: float) -> Tensor:
        d_head = self.weights.W_Q.shape[-1]
        if gain is None:
            return torch.ones(self.heads, d_head, dtype=torch.float64, device=self.h.device)
        rows = gain.detach().double().reshape(-1, d_head) + shift
        return rows.repeat_interleave(self.heads // len(rows), 0)

    def softcap(self) -> float | None:
        """The cap c of ``c tanh(score / c)``."""
        cap = (
            part(inner(self.attn), "attn_logit_softcapping")
            if self.parameters.bridge
            else self.parameters.model.cfg.attn_scores_soft_cap
        )
        return float(cap) if cap is not None and float(cap) > 0 else None

    def sinks(self) -> Tensor | None:
        """One more logit for each head."""
        value = part(inner(self.attn), "sinks")
        return None if value is None else value.detach().double().reshape(-1)

    def window(self) -> int | None:
        """Width of a sliding window by the model's own account (used only where no scores are
        held)."""
        source, config = (
            inner(self.attn),
            getattr(part(self.parameters.model, "original_model"), "config", None),
        )
        if config is None:  # HookedTransformer
            return (
                int(self.parameters.model.cfg.window_size)
                if part(self.attn, "attn_type") == "local"
                else None
            )
        kinds = part(config, "layer_types")
        if kinds is not None:
            return int(config.sliding_window) if kinds[self.layer] == "sliding_attention" else None
        local = part(source, "attention_type")
        width = (
            part(source, "sliding_window")
            or part(config, "sliding_window")
            or (config.window_size if local == "local" else None)
        )
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
                if float(
                    torch.where(cells, measured - bias, 0.0).abs().max()
                ) <= reconstruction_bound(self.roundoff, size):
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
        total = (
            total if facts.softcap is None else facts.softcap * torch.tanh(total / facts.softcap)
        )
        if scores is not None:
            return float(torch.where(allowed, scores - total, 0.0).abs().max())
        cells = allowed & (pattern > 1e-30)
        return float(
            (row_center(pattern.clamp(min=1e-38).log(), cells) - row_center(total, cells))
            .abs()
            .max()
        )


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


def ignore_of(attn: Any) -> float | None:
    """The score that a layer gives to masked keys (a buffer of HookedTransformer), where it is
    finite: -1e5 in older checkpoints."""
    value = part(attn, "IGNORE")
    return float(value) if isinstance(value, Tensor) and bool(torch.isfinite(value)) else None


def allowed_cells(
    facts: Facts, length: int, causal: bool, scores: Tensor | None, pattern: Tensor | None
) -> Bool[Tensor, "query key"]:
    """Which keys each query may attend to: from the model's masked scores, else causal and window
    by its own account."""
    if scores is not None:
        seen = scores[0] > MASKED[scores.dtype]
        seen = (
            seen
            if facts.ignore is None
            else seen & (scores[0] != torch.tensor(facts.ignore).to(scores))
        )
        return seen.any(0)  # windows have no padding: one mask for all contexts
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    allowed = (j <= i) if causal else torch.ones(length, length, dtype=torch.bool)
    if facts.window is not None:
        allowed = allowed & (i - j < facts.window) & (True if causal else (j - i < facts.window))
    return allowed if pattern is None else allowed.to(pattern.device)
