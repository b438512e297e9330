"""How does one attention layer turn its input into scores? :class:`AttentionSpec` says it as data
(norm, projections, QK-norm, rotation, scale, bias, mask) that can be applied to any part of the
stream. :mod:`tl_geometry.models.infer` infers it, :mod:`tl_geometry.models.layers` applies it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.models.layer_view import AddedPosition, HeadWeights
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import Parameters, inner, part, upcast

MASKED = {torch.float16: -3e4, torch.bfloat16: -1e38, torch.float32: -1e38, torch.float64: -1e38}
"""Scores below this are masked: minus infinity, or the most negative number of the dtype, perhaps
plus a score. That number is -65504 in float16 and -3.4e38 in bfloat16 and float32; the thresholds
are about a half and a third of it, far below any score."""
ROTATIONS = ("half", "adjacent")
"""Pairs of coordinates that rotate together: (i, i + rotary_dim / 2), or (2i, 2i + 1)."""


@dataclass(frozen=True, eq=False)
class QKNorm:
    """Norm of queries and keys, over each head or ``flat`` over all heads of a token, centred
    (``"LN"``) or not (``"RMS"``)."""

    norm_type: str
    flat: bool
    gain_q: Float[Tensor, "head d_head"]
    gain_k: Float[Tensor, "head d_head"]
    eps: float

    def gain(self, which: str) -> Float[Tensor, "head d_head"]:
        """The gains of queries (``"q"``) or keys (``"k"``)."""
        return self.gain_q if which == "q" else self.gain_k

    def scale(self, x: Float[Tensor, "... head d_head"]) -> Float[Tensor, "... head"]:
        """``sqrt(mean(x^2) + eps)`` of the centred x, the scale that a split freezes; one for each
        head (of a ``flat`` norm the same for all)."""
        x = self.centre(x)
        dims = (-2, -1) if self.flat else (-1,)
        return (x.square().mean(dims, keepdim=True) + self.eps).sqrt()[..., 0].expand(x.shape[:-1])

    def centre(self, x: Tensor) -> Tensor:
        """Deviations from the mean over what is normalised, for ``"LN"``."""
        if self.norm_type != "LN":
            return x
        return x - x.mean((-2, -1) if self.flat else (-1,), keepdim=True)


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What one attention layer does to its input, whatever the tokens.

    Products of queries and keys are multiplied by ``scale``. A ``softcap`` c turns scores into
    ``c tanh(score / c)``. ``sinks [head]`` are one more logit for each head. ``rotation`` is one of
    :data:`ROTATIONS`. The score bias is ``slopes`` times a form of :func:`alibi` (``bias_form``),
    or ``"measured"``. ``has_scores`` says that ``hook_attn_scores`` holds scores, not the pattern.
    ``window`` is the width of a sliding window by the model's settings.

    ``single`` marks a layer of a float64 model that computes in float32 in places (RMSNorm, rotary
    tables, GPT-Neo's products), as its own numbers on the probe show. ``added`` is what Shortformer
    models add to the inputs of queries and keys, by position. ``ignore`` is the score that the
    layer itself gives to masked keys.

    In the methods ``which`` is ``"q"``, ``"k"`` or ``"v"``, ``h [batch position d_model]`` the
    layer's input, ``turn`` the tables of :func:`turn_of`.
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
    ignore: Tensor | None = None
    has_scores: bool = False
    single: bool = False
    added: Float[Tensor, "position d_model"] | None = None

    def every(self, share: int) -> AttentionSpec:
        """The specification of every ``share``-th head. Where groups of ``share`` heads have their
        keys and values in common, this is one head of each group."""
        assert self.weights is not None  # they are absent only between forward passes
        matrices = {f.name: getattr(self.weights, f.name) for f in fields(self.weights)}
        # b_O belongs to no head
        some = {name: x if name == "b_O" else x[::share] for name, x in matrices.items()}
        spec, norm = replace(self, weights=HeadWeights(**some)), self.qk_norm
        if norm is None:
            return spec
        gains = norm.gain_q[::share], norm.gain_k[::share]
        return replace(spec, qk_norm=replace(norm, gain_q=gains[0], gain_k=gains[1]))

    def bias(self, length: int) -> Tensor | None:
        """Analytic score bias ``[head query key]``."""
        if self.slopes is None or self.bias_form is None:
            return None
        return self.slopes[:, None, None] * alibi(self.bias_form, length).to(self.slopes)

    def linear(self, parts: Tensor, which: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Projection of additive parts: all that is linear, without the frozen scales.

        ``[*part position d_model] -> [*part position head d_head]``.
        """
        return self.head_map(self.projected(parts, which), which, turn)

    def projected(self, parts: Tensor, which: str) -> Tensor:
        """:meth:`linear` before QK-norm and rotation: centring, gain and the weight matrix."""
        return einsum(
            self.norm.centre(parts) * self.norm.gain, self.matrix(which), "... d, h d e -> ... h e"
        )

    def matrix(self, which: str) -> Tensor:
        """W_Q, W_K or W_V, ``[head d_model d_head]``."""
        assert self.weights is not None  # they are absent only between forward passes
        return getattr(self.weights, f"W_{which.upper()}")

    def constant(self, which: str) -> Float[Tensor, "... head d_head"]:
        """The part of query, key or value that does not depend on the stream (from the biases of
        norm and projection), before QK-norm and rotation: ``[head d_head]``, with ``added``
        ``[position head d_head]``."""
        source = self.norm.bias
        if self.added is not None and which != "v":
            source = source + self.added
        bias = getattr(self.weights, f"b_{which.upper()}")
        return einsum(source, self.matrix(which), "... d, h d e -> ... h e") + bias

    def added_position(self) -> AddedPosition | None:
        """``added`` and what queries and keys get from it. Models with it have neither rotation nor
        QK-norm."""
        if self.added is None:
            return None
        return AddedPosition(
            self.added, *(einsum(self.added, self.matrix(w), "t d, h d e -> t h e") for w in "qk")
        )

    def head_map(self, x: Tensor, which: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """The linear part of QK-norm (centring and gain), then the rotation, of queries or keys
        ``x [... position head d_head]``; values as they are."""
        if which == "v":
            return x
        if self.qk_norm is not None:
            x = self.qk_norm.centre(x) * self.qk_norm.gain(which)
        return x if self.rotation is None or turn is None else rotate(x, *turn, self.rotation)

    def raw(self, h: Tensor, which: str) -> Tensor:
        """Query, key or value ``[... position head d_head]`` before QK-norm and rotation, as
        ``hook_q``, ``hook_k``, ``hook_v`` hold it."""
        return self.projected(h, which) / self.norm.scale(h)[..., None, None] + self.constant(which)

    def sizes(self, h: Tensor, which: str) -> Float[Tensor, "... head d_head"]:
        """The same as :meth:`raw` with absolute values throughout, ``sum_d |x_d W_de| +
        |constant|``: rounding grows with these."""
        x = (self.norm.normalize(h) * self.norm.gain).abs()
        read = einsum(x, self.matrix(which).abs(), "... d, h d e -> ... h e")
        return read + self.constant(which).abs()

    def entering_sizes(self, h: Tensor, which: str) -> Float[Tensor, "... head d_head"]:
        """:meth:`sizes` of a query or key as it enters the score, after any QK-norm."""
        size = self.sizes(h, which)
        if self.qk_norm is None:
            return size
        frozen = self.qk_norm.scale(self.raw(h, which)).unsqueeze(-1)
        return size / frozen * self.qk_norm.gain(which).abs()

    def full(self, h: Tensor, which: str, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        """Query or key ``[... position head d_head]`` as it enters the score."""
        x = self.raw(h, which)
        if which != "v" and self.qk_norm is not None:
            return self.head_map(x / self.qk_norm.scale(x).unsqueeze(-1), which, turn)
        return self.head_map(x, which, turn)


def rotate(
    x: Float[Tensor, "... position head d_head"], cos: Tensor, sin: Tensor, style: str
) -> Tensor:
    """Rotary embedding of the first coordinates, linear in ``x``: each pair (a, b) becomes
    ``(a cos - b sin, b cos + a sin)``. ``cos`` and ``sin`` are ``[position rotary_dim]``."""
    size, rest = cos.shape[-1], x.shape[-1] - cos.shape[-1]
    first, second = slice(size // 2), slice(size // 2, size)
    if style == "adjacent":
        first, second = slice(0, size, 2), slice(1, size, 2)
    # coordinates beyond rotary_dim have cosine 1: they stay as they are
    cos, sin = pad(cos, (0, rest), value=1.0).unsqueeze(-2), sin.unsqueeze(-2)
    out = x * cos
    out[..., first].addcmul_(x[..., second], sin[..., first], value=-1)
    out[..., second].addcmul_(x[..., first], sin[..., second])
    return out


def turn_of(
    parameters: Parameters,
    layer: int,
    cached: Mapping[str, Tensor],
    length: int,
    style: str | None,
    memo: MutableMapping[Any, Any],
) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine tables ``[position rotary_dim]`` of a layer, from its activations or its
    buffers, one column for each coordinate that turns; ``None`` without a rotation (``style``) or
    without tables. ``memo`` keeps how a layer's tables are laid out."""
    if style is None:
        return None
    attn, prefix = parameters.attention(layer), f"blocks.{layer}.attn."
    cos, sin = cached.get(prefix + "hook_cos"), cached.get(prefix + "hook_sin")
    if cos is None or sin is None:
        cos, sin = rotary_tables(attn, length)
    if cos is None or sin is None:
        return None
    # of a batch the first: positions are the same in all
    cos, sin = (upcast(t).reshape(-1, length, t.shape[-1])[0] for t in (cos, sin))
    # compared once for each layer, because a GPU is waited for. The answer of a single position is
    # not kept: at position 0 all angles are zero, so that any layout looks like angles that repeat
    key, known = ("twice", layer), memo if length > 1 else {}
    if key not in known:
        known[key] = _each_angle_twice(cos)
    if known[key]:
        return cos, sin
    widen = "t n -> t (two n)" if style == "half" else "t n -> t (n two)"
    return repeat(cos, widen, two=2), repeat(sin, widen, two=2)


def _each_angle_twice(cos: Float[Tensor, "position column"]) -> bool:
    """Whether a table holds each angle twice (as two halves, or side by side), not once."""
    pairs = cos.shape[-1] // 2
    halves = cos.shape[-1] == 1 or torch.equal(cos[:, :pairs], cos[:, pairs:])
    return halves or torch.equal(cos[:, ::2], cos[:, 1::2])


def rotary_tables(attn: Any, length: int) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines ``[position column]`` of the first positions, from the buffers of a layer
    that has them, else ``None``."""
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
    """What a slope multiplies, for query i and key j: ``j`` (``"k"``, BLOOM), ``j - i`` (``"k-q"``,
    HookedTransformer) or ``j`` less the last position (``"k-last"``, MPT). They differ by a
    constant of each row, which softmax does not see."""
    k = torch.arange(length)
    origin = {"k": torch.zeros_like(k), "k-q": k, "k-last": torch.full_like(k, length - 1)}[form]
    return (k - origin[:, None]).float()


def scores_of(q: Tensor, k: Tensor, scale: float) -> Float[Tensor, "batch head query key"]:
    """Scaled products of queries ``[batch query head d_head]`` and keys ``[batch key head d_head]``
    as they enter the score."""
    return einsum(q, k, "b i h e, b j h e -> b h i j") * scale


def frozen_fields(
    spec: AttentionSpec, h: Tensor, raw: Mapping[str, Tensor], turn: tuple[Tensor, Tensor] | None
) -> dict[str, Any]:
    """The fields of a :class:`~tl_geometry.models.LayerView` that say how queries, keys and values
    are made of parts: maps, frozen scales, constants, and the queries and keys themselves. ``raw``
    holds queries and keys before QK-norm and rotation (:meth:`AttentionSpec.raw`)."""
    norm_scale = spec.norm.scale(h)
    constant = {w: spec.constant(w) for w in "qkv"}
    shape = (*h.shape[:2], constant["q"].shape[-2])
    # one tensor for q, k and v: LayerView.without_norm tells by its identity that there is no
    # QK-norm
    scale = dict.fromkeys("qkv", (1 / norm_scale).unsqueeze(-1).expand(shape))
    constant = {w: value.expand(*shape, -1) for w, value in constant.items()}
    entering = dict(raw)
    if spec.qk_norm is not None:
        for w in "qk":
            qk_scale = spec.qk_norm.scale(raw[w])
            scale[w] = scale[w] / qk_scale
            constant[w] = constant[w] / qk_scale.unsqueeze(-1)
            entering[w] = raw[w] / qk_scale.unsqueeze(-1)
    fields: dict[str, Any] = {"norm_scale": norm_scale, "projected": spec.projected}
    fields["turned"] = partial(spec.head_map, turn=turn)
    for w in "qkv":
        fields[f"{w}_map"] = partial(spec.linear, which=w, turn=None if w == "v" else turn)
        fields[f"{w}_scale"] = scale[w]
        fields[f"{w}_constant"] = spec.head_map(constant[w], w, turn)
    return fields | {w: spec.head_map(entering[w], w, turn) for w in "qk"}


def ignore_of(attn: Any) -> Tensor | None:
    """The score that a layer gives to masked keys (a buffer of HookedTransformer): -1e5 in older
    checkpoints, else minus infinity."""
    value = part(attn, "IGNORE")
    return value if isinstance(value, Tensor) else None


def unmasked(
    scores: Float[Tensor, "*batch query key"], ignore: Tensor | None
) -> Bool[Tensor, "*batch query key"]:
    """Where the model's scores are those of allowed keys. A masked key has a score below
    :data:`MASKED`, or exactly ``ignore``.

    >>> unmasked(torch.tensor([[3.0, -1e5, -torch.inf]]), torch.tensor(-1e5)).tolist()
    [[True, False, False]]
    """
    seen = scores > MASKED[scores.dtype]
    return seen if ignore is None else seen & (scores != ignore.to(scores))


def allowed_cells(
    spec: AttentionSpec, length: int, causal: bool, scores: Tensor | None, pattern: Tensor | None
) -> Bool[Tensor, "query key"]:
    """Which keys each query may attend to: by the model's masked scores, or, where it shows none,
    by ``causal`` and the window of its settings."""
    # windows have no padding, so that all contexts and heads have one mask: that of the first
    # context. One that differs elsewhere is refused when the layer is verified
    if scores is not None:
        return unmasked(scores[0], spec.ignore).any(0)
    places = torch.arange(length, device=None if pattern is None else pattern.device)
    i, j = places[:, None], places[None, :]
    allowed = (j <= i) if causal else torch.ones_like(j <= i)
    if spec.window is not None:
        allowed = allowed & (i - j < spec.window) & (True if causal else (j - i < spec.window))
    return allowed
