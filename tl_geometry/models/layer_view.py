"""One attention layer of one forward pass, with every scale frozen, so that its scores are bilinear
in parts of the stream: :class:`LayerView`. Splits, writers, edits and weight geometry read layers
through it; :mod:`tl_geometry.models.layers` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.models.attention import Attention, Heads, Stream, scores_of
from tl_geometry.models.reconstruction import (
    ReconstructionReport,
    pattern_error,
    reconstruction_bound,
)
from tl_geometry.models.rotary import RotaryPlanes, planes_of_tables
from tl_geometry.models.softmax import masked_softmax, soft_cap

Scores = Float[Tensor, "batch head query key"]

SUMMANDS = 256
"""Up to this many keys the sum of a row of the pattern rounds no more than one number does; beyond,
its bound grows with the root of the number of keys (:meth:`LayerView.report`)."""
CHUNK = {"cpu": 2**18, "cuda": 2**25}
"""Cells of scores that are compared at a time, by type of device: what stays in the cache of a CPU
core (1 MiB in float32), or enough to fill a GPU."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView(Attention):
    """One attention layer of one forward pass, with every scale frozen, so that scores are bilinear
    in parts of the stream.

    For any additive split ``h = sum_a p_a`` of the layer's input (all tensors have the full
    position axis)::

        q_a = mapped(p_a, "q") * q_scale[..., None]  [batch position head d_head]  (k_a likewise)
        q   = sum_a q_a + q_constant
        score[b, h, i, j] = scale * <q[b, i, h], k[b, j, h]> + bias[h, i, j]
        pattern = softmax of score, or of softcap * tanh(score / softcap)

    over the allowed keys (and one more logit, ``sinks[h]``, where there are sinks); scores are
    before any soft cap.

    ``mapped`` holds what does not depend on the tokens: centring, gain, W_Q (``projected``), then
    the linear part of QK-norm and the rotation by the position (``turned``); ``q_scale`` the frozen
    scales (one over norm scale, and over the QK-norm's); ``q_constant`` the bias of norm and
    projection, scaled and rotated alike. ``v_scale`` (one over norm scale) and ``v_constant`` make
    values in the same way. ``turn`` is the rotation, where there is one; ``bias`` is ALiBi's, else
    ``None``; ``allowed`` the mask (causal, sliding window, bidirectional).

    ``pattern``, ``scores``, ``v`` and ``z`` (mixed values) are the model's own; ``scores`` is
    masked and after the soft cap, ``None`` where the hook holds the pattern. ``reconstruction``
    reports the checks that were made. Grouped keys and values are expanded to all heads. Tensors
    are float32, or float64 for float64 models, on the layer's device.
    """

    layer: int
    h: Float[Tensor, "batch position d_model"]
    norm_scale: Float[Tensor, "batch position"]
    q_scale: Float[Tensor, "batch position head"]
    k_scale: Float[Tensor, "batch position head"]
    v_scale: Float[Tensor, "batch position head"]
    q_constant: Float[Tensor, "batch position head d_head"]
    k_constant: Float[Tensor, "batch key head d_head"]
    v_constant: Float[Tensor, "batch position head d_head"]
    q: Float[Tensor, "batch position head d_head"]
    k: Float[Tensor, "batch key head d_head"]
    v: Float[Tensor, "batch position head d_head"] | None
    z: Float[Tensor, "batch position head d_head"] | None
    pattern: Float[Tensor, "batch head query key"] | None
    scores: Float[Tensor, "batch head query key"] | None
    bias: Float[Tensor, "head query key"] | None
    allowed: Bool[Tensor, "query key"]
    roundoff: float
    reconstruction: ReconstructionReport

    def project(self, parts: Stream, which: str) -> Heads:
        """Queries (``"q"``), keys or values of additive parts, at the frozen scales and without the
        constant: the one place where a part of the stream becomes a query."""
        return self.mapped(parts, which) * getattr(self, f"{which}_scale").unsqueeze(-1)

    def without_norm(
        self, scale: Float[Tensor, "batch position head"]
    ) -> Float[Tensor, "batch position head"]:
        """A frozen scale of queries or keys without that of the norm: one, or the QK-norm's."""
        if self.qk_norm is None:
            return torch.ones_like(scale)
        return scale * self.norm_scale.unsqueeze(-1)

    def normalized(self) -> LayerView:
        """The same layer as a function of ``norm(h)`` (no gain, no bias), which is its ``h``: no
        norm scale is frozen any more.

        ``q = mapped(x, "q") * q_scale + q_constant`` for ``x = (h A) / s``, with ``q_scale`` that
        of the QK-norm where there is one, else one.
        """
        return replace(
            self,
            h=self.norm.normalize(self.h),
            norm_scale=torch.ones_like(self.norm_scale),
            q_scale=self.without_norm(self.q_scale),
            k_scale=self.without_norm(self.k_scale),
            v_scale=torch.ones_like(self.v_scale),
        )

    # ---- scores and pattern

    def logits(
        self, scores: Scores, heads: Any = slice(None), rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor]:
        """What the model takes the softmax of, and where: scores of some heads and queries after
        any soft cap, a sink as one more key that is always allowed."""
        scores, allowed = soft_cap(scores, self.softcap), self.allowed[rows].to(scores.device)
        if self.sinks is None:
            return scores, allowed
        sink = self.sinks[heads, None, None].expand(*scores.shape[:-1], 1).to(scores)
        return torch.cat([scores, sink], -1), pad(allowed, (0, 1), value=True)

    def pattern_of(self, scores: Scores, heads: Sequence[int]) -> Scores:
        """The pattern that the layer makes of scores of some heads: soft cap, mask, sinks,
        softmax."""
        return masked_softmax(*self.logits(scores, list(heads)))[..., : self.allowed.shape[-1]]

    def report(
        self,
        raw: Mapping[str, Tensor],
        hooked: Mapping[str, Tensor | None],
        rows: slice = slice(None),
    ) -> ReconstructionReport:
        """Queries, keys, and of some query ``rows`` scores and pattern, against the model's own.
        ``raw`` holds queries and keys before QK-norm and rotation, ``hooked`` the model's, where
        they are known."""
        checks: dict[str, tuple[float, float]] = {}
        of_raw = {w: self.magnitudes(self.h, w) for w in "qk"}
        for w, value in hooked.items():
            if value is not None:
                error = float((raw[w] - value).abs().max())
                checks[w] = error, reconstruction_bound(self.roundoff, float(of_raw[w].max()))
        batch, queries, heads, _ = self.q.shape
        of_row = batch * self.allowed.shape[1]
        most = CHUNK.get(self.q.device.type, CHUNK["cuda"])
        first, end, every = rows.indices(queries)
        at_once = every * max(1, min(-(-(end - first) // every), most // of_row))
        step = max(1, most * every // (at_once * of_row))
        blocks = product(range(0, heads, step), range(first, end, at_once))
        found = [
            self._errors(slice(i, i + step), slice(j, min(j + at_once, end), every))
            for i, j in blocks
        ]
        # torch's max, because a NaN stays
        worst = {n: float(torch.stack([errors[n] for errors in found]).max()) for n in found[0]}
        scale = worst.pop("scale")
        # softmax rounds by a few units however small the scores; rows sum to one, but a sink's
        # share depends on the scores and rounds as they do
        of_sums = 1.0 if self.sinks is None else max(scale, 1.0)
        if self.roundoff <= 2**-24:
            # softmax divides by a sum over the keys, which rounds by the root of their number
            # (Higham & Mary 2019): 11 u measured for 512 keys, 55 u for 8,192. Half precision sums
            # in float32
            of_sums *= max(1.0, self.k.shape[1] / SUMMANDS) ** 0.5
        allowed = {"scores": scale, "pattern": max(scale, 1.0), "pattern sum": of_sums}
        for name, error in worst.items():
            checks[name] = error, reconstruction_bound(self.roundoff, allowed[name])
        sizes = {w: float(self.sizes_entering(of_raw[w], raw[w], w).max()) for w in "qk"}
        return ReconstructionReport(checks=checks, scale=scale, sizes=sizes)

    def _errors(self, heads: slice, rows: slice) -> dict[str, Tensor]:
        """The largest errors of scores and pattern of some heads and queries, and the size A of the
        scores (``"scale"``): the same products of absolute values, ``|q - q0| + |q0|`` of a query
        with constant q0, and keys alike."""
        q, q0 = (x[:, rows, heads] for x in (self.q, self.q_constant))
        k, k0 = (x[:, :, heads] for x in (self.k, self.k_constant))
        allowed = self.allowed[rows]
        total = scores_of(q, k, self.scale)
        size = scores_of((q - q0).abs() + q0.abs(), (k - k0).abs() + k0.abs(), self.scale)
        if self.bias is not None:
            bias = self.bias[heads, rows]
            total, size = total + bias, size + bias.abs()
        capped = soft_cap(total, self.softcap)
        errors = {"scale": torch.where(allowed, size, 0.0).amax()}
        if self.scores is not None:
            gap = (capped - self.scores[:, heads, rows]).abs()
            errors["scores"] = torch.where(allowed, gap, 0.0).amax()
        if self.pattern is not None:
            pattern = self.pattern[:, heads, rows]
            errors["pattern"] = pattern_error(capped, pattern, allowed, self.roundoff)
            # row-centred logarithms do not see what the rows sum to: one, less the sink's share
            whole = torch.ones(())
            if self.sinks is not None:
                with_sink, seen = self.logits(total, heads, rows)
                whole = masked_softmax(with_sink.double(), seen)[..., :-1].sum(-1)
            errors["pattern sum"] = (pattern.sum(-1, dtype=torch.float64) - whole).abs().max()
        return errors

    def planes(self) -> RotaryPlanes:
        """Which coordinates of a head turn together, and how fast.

        Raises ``UnsupportedModelError`` where the tables are not those of one frequency for each
        plane.
        """
        what = f"rotation of layer {self.layer}"
        return planes_of_tables(self.turn, self.q.shape[-1], roundoff=self.roundoff, what=what)

    def __repr__(self) -> str:
        batch, length, heads, d_head = self.q.shape
        size = f"{batch} contexts of {length} positions, {heads} heads of {d_head}"
        settings = f"norm {self.norm.norm_type}, scale {self.scale:.4g}"
        worst = f"worst check {self.reconstruction.worst:.2g} of what is allowed"
        return f"LayerView(layer {self.layer}, {size}, {settings}, {worst})"


LayerHook = Callable[[LayerView], None]
"""Receives the view of a layer as soon as the forward pass has finished that layer."""
