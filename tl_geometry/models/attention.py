"""What one attention layer does to its input, from the norm to the mask.

It computes::

    x = N(h),   q = R(N_qk(x W_Q + b_Q)),   score = scale <q_i, k_j> + slope_h j

:class:`Reading` holds the choices among the habits of architectures, found once on a probe
(:mod:`tl_geometry.models.infer`). :class:`Attention` holds the tensors behind them, read from the
modules at each pass, so that gradients reach the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import einsum, repeat
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.models.norms import NormReading, NormWeights, read_norm
from tl_geometry.models.parameters import HeadWeights, inner, part, upcast

Stream = Float[Tensor, "*batch d_model"]
Heads = Float[Tensor, "*batch head d_head"]

ROTATIONS = ("half", "adjacent")
"""Pairs of coordinates that rotate together: (i, i + rotary_dim / 2), or (2i, 2i + 1)."""
MASKED = {torch.float16: -3e4, torch.bfloat16: -1e38, torch.float32: -1e38, torch.float64: -1e38}
"""Scores below this are masked: minus infinity, or the most negative number of the dtype, perhaps
plus a score. That number is -65504 in float16 and -3.4e38 in bfloat16 and float32; the thresholds
are about a half and a third of it, far below any score."""


@dataclass(frozen=True)
class Reading:
    """The choices that describe one attention layer, whatever the tokens.

    ``qk`` is the norm of queries and keys. ``rotation`` is one of :data:`ROTATIONS`;
    ``each_angle_twice`` says that its tables hold a column for each coordinate. A ``softcap`` c
    turns scores into ``c tanh(score / c)``. ``slopes`` are those of ALiBi. ``has_scores`` says that
    ``hook_attn_scores`` holds scores, not the pattern. ``window`` is the width of a sliding window
    by the model's settings.
    """

    norm: NormReading
    qk: NormReading | None = None
    rotation: str | None = None
    each_angle_twice: bool = True
    scale: float = 1.0
    softcap: float | None = None
    slopes: tuple[float, ...] | None = None
    has_scores: bool = False
    window: int | None = None


class Rotation(NamedTuple):
    """The rotary embedding of a forward pass: its tables, and which coordinates turn together
    (``"half"``: (i, i + d_rot / 2), ``"adjacent"``: (2i, 2i + 1))."""

    cos: Float[Tensor, "position d_rot"]
    sin: Float[Tensor, "position d_rot"]
    pairing: str

    def at(self, positions: Any) -> Rotation:
        """The tables of some positions."""
        return Rotation(self.cos[positions], self.sin[positions], self.pairing)


@dataclass(frozen=True, eq=False)
class Attention:
    """One attention layer with its tensors, in one dtype. ``qk_norm`` are the norms of queries and
    keys, each with a gain for every head. ``turn`` is the rotation at the positions
    of a pass, ``sinks`` one more logit for each head, each ``None`` where there is none. In the
    methods ``which`` is ``"q"``, ``"k"`` or ``"v"``; keys and values of grouped heads are expanded
    to all heads."""

    reading: Reading
    norm: NormWeights
    weights: HeadWeights
    qk_norm: Mapping[str, NormWeights] | None
    sinks: Float[Tensor, " head"] | None
    turn: Rotation | None = None

    @property
    def scale(self) -> float:
        """The factor of products of queries and keys."""
        return self.reading.scale

    @property
    def softcap(self) -> float | None:
        """The cap c of ``c tanh(score / c)``."""
        return self.reading.softcap

    def matrix(self, which: str) -> Float[Tensor, "head d_model d_head"]:
        """W_Q, W_K or W_V."""
        return getattr(self.weights, f"W_{which.upper()}")

    def constant(self, which: str) -> Float[Tensor, "head d_head"]:
        """What the biases of norm and projection give, before QK-norm and rotation."""
        bias = getattr(self.weights, f"b_{which.upper()}")
        return einsum(self.norm.bias, self.matrix(which), "d, h d e -> h e") + bias

    def projected(self, parts: Stream, which: str) -> Heads:
        """Centring, gain and weight matrix of additive parts: linear, without any scale."""
        return einsum(self.norm.linear(parts), self.matrix(which), "... d, h d e -> ... h e")

    def turned(self, x: Heads, which: str) -> Heads:
        """The linear part of QK-norm (centring and gain), then the rotation, of queries or keys;
        values as they are."""
        if which == "v":
            return x
        if self.qk_norm is not None:
            x = self.qk_norm[which].linear(x)
        return x if self.turn is None else rotate(x, *self.turn)

    def mapped(self, parts: Stream, which: str) -> Heads:
        """Queries, keys or values of additive parts, without scale and constant."""
        return self.turned(self.projected(parts, which), which)

    def raw(self, h: Stream, which: str) -> Heads:
        """Query, key or value before QK-norm and rotation, as ``hook_q``, ``hook_k``, ``hook_v``
        hold it."""
        return self.projected(h, which) / self.norm.scale(h)[..., None, None] + self.constant(which)

    def entering(self, raw: Heads, which: str) -> Heads:
        """Query or key as it enters the score, of what :meth:`raw` gives."""
        if which != "v" and self.qk_norm is not None:
            raw = raw / self.qk_norm[which].scale(raw).unsqueeze(-1)
        return self.turned(raw, which)

    def frozen(self, h: Stream, raw: Mapping[str, Heads]) -> dict[str, Any]:
        """Frozen scales, constants, queries and keys of a pass with input ``h``, by the names that
        they have in a :class:`~tl_geometry.models.layer_view.LayerView`; ``raw`` holds queries and
        keys as :meth:`raw` gives them."""
        fields = {"norm_scale": self.norm.scale(h)} | {w: self.entering(raw[w], w) for w in "qk"}
        shape = raw["q"].shape[:-1]
        for w in "qkv":
            scale = (1 / fields["norm_scale"]).unsqueeze(-1).expand(shape)
            # one row for each position, the same in all contexts
            constant = self.turned(self.constant(w).expand(*shape[1:], -1), w).expand(*shape, -1)
            if w != "v" and self.qk_norm is not None:
                qk_scale = self.qk_norm[w].scale(raw[w])
                scale, constant = scale / qk_scale, constant / qk_scale.unsqueeze(-1)
            fields |= {f"{w}_scale": scale, f"{w}_constant": constant}
        return fields

    def magnitudes(self, h: Stream, which: str) -> Heads:
        """:meth:`raw` with absolute values throughout, ``sum_d |x_d W_de| + |constant|``: rounding
        grows with these."""
        x = (self.norm.normalize(h) * self.norm.gain).abs()
        read = einsum(x, self.matrix(which).abs(), "... d, h d e -> ... h e")
        return read + self.constant(which).abs()

    def sizes_entering(self, sizes: Heads, raw: Heads, which: str) -> Heads:
        """:meth:`magnitudes` after any QK-norm, whose scale is that of ``raw``."""
        if self.qk_norm is None:
            return sizes
        norm = self.qk_norm[which]
        return sizes / norm.scale(raw).unsqueeze(-1) * norm.gain.abs()


def attention_of(
    module: Any, ln1: Any, weights: HeadWeights, reading: Reading, tables: Tensor | None = None
) -> Attention:
    """The tensors of one layer, of the dtype and on the device of ``weights``; ``ln1`` is the norm
    module in front of it, ``tables`` are those of :func:`rotary_tables`."""
    like, of_heads, qk_norm = weights.W_Q[0, :, 0], weights.W_Q[:, 0], None
    if reading.qk is not None:
        modules = {which: qk_norm_module(module, which) for which in "qk"}
        qk_norm = {w: read_norm(norm, reading.qk, of_heads) for w, norm in modules.items()}
    sinks = part(inner(module), "sinks")
    return Attention(
        reading=reading,
        norm=read_norm(ln1, reading.norm, like),
        weights=weights,
        qk_norm=qk_norm,
        sinks=None if sinks is None else upcast(sinks).reshape(-1).to(like),
        turn=_rotation(tables, reading, like),
    )


def qk_norm_module(attn: Any, which: str) -> Any:
    """The norm of queries (``"q"``) or keys (``"k"``), or ``None``."""
    names = (f"{which}_norm", f"{which}_layernorm")
    return part(attn, names[0]) or part(inner(attn), *names)


def rotate(x: Heads, cos: Tensor, sin: Tensor, pairing: str) -> Heads:
    """Rotary embedding of the first coordinates, linear in ``x``: each pair (a, b) becomes
    ``(a cos - b sin, b cos + a sin)``. ``cos`` and ``sin`` are ``[position rotary_dim]``."""
    size, rest = cos.shape[-1], x.shape[-1] - cos.shape[-1]
    first, second = slice(size // 2), slice(size // 2, size)
    if pairing == "adjacent":
        first, second = slice(0, size, 2), slice(1, size, 2)
    # coordinates beyond rotary_dim have cosine 1: they stay as they are
    cos, sin = pad(cos, (0, rest), value=1.0).unsqueeze(-2), sin.unsqueeze(-2)
    out = x * cos
    out[..., first].addcmul_(x[..., second], sin[..., first], value=-1)
    out[..., second].addcmul_(x[..., first], sin[..., second])
    return out


def cached(activations: Mapping[str, Tensor], name: str, heads: int) -> Tensor | None:
    """An activation, at least float32, with grouped heads expanded, ``None`` where it is not
    there."""
    value = activations.get(name)
    if value is not None and name[-6:] in ("hook_q", "hook_k", "hook_v"):
        groups = heads // value.shape[-2]
        value = value if groups == 1 else value.repeat_interleave(groups, -2)
    return None if value is None else upcast(value)


def rotary_tables(
    attn: Any, activations: Mapping[str, Tensor], prefix: str, length: int
) -> Float[Tensor, "side position column"] | None:
    """Cosines and sines of a forward pass, from its activations or from the buffers of the layer;
    ``None`` where there are none."""
    source, cos = inner(attn), activations.get(f"{prefix}hook_cos")
    sin, rotary = activations.get(f"{prefix}hook_sin"), part(source, "rotary")
    if cos is None or sin is None:
        if part(attn, "rotary_cos") is not None:  # HookedTransformer
            cos, sin = attn.rotary_cos[:length], attn.rotary_sin[:length]
        elif part(source, "embed_positions") is not None:  # GPT-J: sines, then cosines
            tables = repeat(source.embed_positions[:length], "t n -> t (n two)", two=2)
            sin, cos = tables.chunk(2, dim=-1)
        elif part(rotary, "cos_cached") is not None:  # boot_native
            cos, sin = rotary.cos_cached[:length], rotary.sin_cached[:length]
        else:
            return None
    # of a batch the first: positions are the same in all
    return torch.stack([upcast(t).reshape(-1, length, t.shape[-1])[0] for t in (cos, sin)])


def _rotation(tables: Tensor | None, reading: Reading, like: Tensor) -> Rotation | None:
    """The rotation by :func:`rotary_tables`, ``None`` without one."""
    if tables is None or reading.rotation is None:
        return None
    if not reading.each_angle_twice:
        widen = "t n -> t (two n)" if reading.rotation == "half" else "t n -> t (n two)"
        tables = torch.stack([repeat(table, widen, two=2) for table in tables])
    cos, sin = tables.to(like)
    return Rotation(cos, sin, reading.rotation)


def each_angle_twice(cos: Float[Tensor, "position column"]) -> bool:
    """Whether a table holds each angle twice (as two halves, or side by side), not once. Of a
    single position no table tells."""
    pairs = cos.shape[-1] // 2
    halves = cos.shape[-1] == 1 or torch.equal(cos[:, :pairs], cos[:, pairs:])
    return halves or torch.equal(cos[:, ::2], cos[:, 1::2])


def scores_of(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key head d_head"],
    scale: float,
) -> Float[Tensor, "batch head query key"]:
    """Scaled products of queries and keys as they enter the score."""
    return einsum(q, k, "b i h e, b j h e -> b h i j") * scale


def alibi(
    reading: Reading, q: Tensor, k: Tensor, scores: Tensor | None, allowed: Tensor
) -> Float[Tensor, "head query key"] | None:
    """The score bias of ALiBi, ``None`` without slopes: slope times key position, and a constant of
    each row. Softmax does not see the constant (architectures differ in it: j, j - i, j - T), so it
    is what the first context shows, where there are ``scores``, beside the products of its queries
    ``q`` and keys ``k``."""
    if reading.slopes is None:
        return None
    own = scores_of(q[:1].detach(), k[:1].detach(), reading.scale)[0]
    line = own.new_tensor(reading.slopes)[:, None, None] * torch.arange(own.shape[-1]).to(own)
    line = line.expand_as(own)
    if scores is None:
        return line
    rest = torch.where(allowed, scores[0] - own - line, 0.0)
    return line + rest.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)


def allowed_cells(
    attn: Any, reading: Reading, length: int, causal: bool, scores: Tensor | None, like: Tensor
) -> Bool[Tensor, "query key"]:
    """Which keys each query may attend to: by the model's masked scores, or, where it shows none,
    by ``causal`` and the window of its settings."""
    if scores is not None:
        # windows have no padding, so that all contexts and heads have one mask: that of the first
        # context. One that differs elsewhere is refused when the layer is verified
        seen = scores[0] > MASKED[scores.dtype]
        ignore = part(attn, "IGNORE")  # of HookedTransformer: -1e5 in older checkpoints
        return (seen & (scores[0] != ignore.to(scores)) if ignore is not None else seen).any(0)
    places = torch.arange(length, device=like.device)
    offset = places[:, None] - places
    allowed = offset >= 0 if causal else torch.ones_like(offset, dtype=torch.bool)
    return allowed if reading.window is None else allowed & (offset.abs() < reading.window)
