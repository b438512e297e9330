"""How are the scores of one attention layer of one forward pass made of parts of the stream? With
every scale frozen they are bilinear in them: :class:`LayerView`. Splits, writers, edits and weight
geometry read layers through it; :mod:`tl_geometry.models.layers` makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.rows import KeyRanges
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.reconstruction import ReconstructionReport
from tl_geometry.models.softmax import masked_softmax, soft_cap


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadWeights:
    """Weights of one attention layer in TransformerLens order, grouped keys expanded to
    ``n_heads``; absent biases are zeros."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"]
    b_K: Float[Tensor, "head d_head"]
    b_V: Float[Tensor, "head d_head"]
    b_O: Float[Tensor, " d_model"]


LinearMap = Callable[[Tensor], Tensor]
"""A linear map of additive parts of the stream, ``[*part position d_model] -> [*part position head
d_head]``."""


class AddedPosition(NamedTuple):
    """A positional embedding that is added, after the norm, to the inputs of queries and keys, and
    what queries and keys get from it."""

    embedding: Float[Tensor, "position d_model"]
    q: Float[Tensor, "position head d_head"]
    k: Float[Tensor, "position head d_head"]


class Rotation(NamedTuple):
    """The rotary embedding of a forward pass: its tables, and which coordinates turn together
    (``"half"``: (i, i + d_rot / 2), ``"adjacent"``: (2i, 2i + 1))."""

    cos: Float[Tensor, "position d_rot"]
    sin: Float[Tensor, "position d_rot"]
    pairing: str


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerView:
    """One attention layer of one forward pass, with every scale frozen, so that scores are bilinear
    in parts of the stream.

    For any additive split ``h = sum_a p_a`` of the layer's input (all tensors have the full
    position axis)::

        q_a = q_map(p_a) * q_scale[..., None]     [batch position head d_head]   (k_a likewise)
        q   = sum_a q_a + q_constant
        score[b, h, i, j] = scale * <q[b, i, h], k[b, j, h]> + bias[h, i, j]
        pattern = softmax of score, or of softcap * tanh(score / softcap)

    over the allowed keys (and one more logit, ``sinks[h]``, where there are sinks); scores are
    before any soft cap.

    ``q_map`` holds what does not depend on the tokens: centring, gain, W_Q (``projected``), then
    the linear part of QK-norm and the rotation by the position (``turned``); ``q_scale`` the frozen
    scales (one over norm scale, and over the QK-norm's); ``q_constant`` the bias of norm and
    projection, scaled and rotated alike. ``v_map``, ``v_scale`` (one over norm scale) and
    ``v_constant`` make values in the same way. ``turn`` is the rotation inside the maps, where
    there is one. ``added`` is the positional embedding of models that add it to the inputs of
    queries and keys only (Shortformer), and its share of the constants: position, though not in the
    stream. ``bias`` is ALiBi, analytic or measured (``bias_source``), else ``None``; ``allowed``
    the mask (causal, sliding window, bidirectional), as cells or as the range of each query,
    ``mask_form`` its form (:func:`tl_geometry.base.rows.mask_form`), where that is known.

    ``pattern``, ``scores``, ``v`` and ``z`` (mixed values) are the model's own; ``scores`` is
    masked and after the soft cap, ``None`` where the hook holds the pattern. Pattern and scores are
    ``None`` where a long prompt ran in blocks of rows (:mod:`tl_geometry.models.row_pass`).
    Rounding of queries grows with ``sizes("q")``, ``sum_d |x_d W_de| + |constant|`` (``"k"``: of
    keys); ``reconstruction`` reports the checks that were made. Grouped keys and values are
    expanded to all heads. Tensors are float32, or float64 for float64 models, on the layer's
    device.
    """

    layer: int
    h: Float[Tensor, "batch position d_model"]
    norm: NormWeights
    norm_scale: Float[Tensor, "batch position"]
    scale: float
    softcap: float | None
    sinks: Float[Tensor, " head"] | None
    bias: Float[Tensor, "head query key"] | None
    bias_source: str
    mask: Bool[Tensor, "query key"] | KeyRanges
    q_map: LinearMap
    k_map: LinearMap
    v_map: LinearMap
    projected: Callable[[Tensor, str], Tensor]
    turned: Callable[[Tensor, str], Tensor]
    q_scale: Float[Tensor, "batch position head"]
    k_scale: Float[Tensor, "batch position head"]
    v_scale: Float[Tensor, "batch position head"]
    q_constant: Float[Tensor, "batch position head d_head"]
    k_constant: Float[Tensor, "batch key head d_head"]
    v_constant: Float[Tensor, "batch position head d_head"]
    q: Float[Tensor, "batch position head d_head"]
    k: Float[Tensor, "batch key head d_head"]
    pattern: Float[Tensor, "batch head query key"] | None
    scores: Float[Tensor, "batch head query key"] | None
    v: Float[Tensor, "batch position head d_head"] | None
    z: Float[Tensor, "batch position head d_head"] | None
    roundoff: float
    sizes: Callable[[str], Tensor]
    reconstruction: ReconstructionReport
    turn: Rotation | None = None
    added: AddedPosition | None = None
    mask_form: str | None = None

    @property
    def allowed(self) -> Bool[Tensor, "query key"]:
        """The mask as cells."""
        return self.seen_by(...)

    def seen_by(self, queries: Any) -> Bool[Tensor, "... key"]:
        """The keys that some queries may attend to."""
        return self.mask[queries].to(self.q.device)

    @property
    def rotary(self) -> bool:
        """Whether the maps rotate."""
        return self.turn is not None

    def without_norm(
        self, scale: Float[Tensor, "batch position head"]
    ) -> Float[Tensor, "batch position head"]:
        """A frozen scale without that of the norm: exactly one, or the QK-norm's."""
        # Values have no QK-norm: their scale is one over the norm's. frozen_fields gives queries
        # and keys the same tensor where they have no QK-norm either. Compared by identity, because
        # to compare numbers would mean to wait for a GPU
        return (
            torch.ones_like(scale)
            if scale is self.v_scale
            else scale * self.norm_scale.unsqueeze(-1)
        )

    def normalized(self) -> LayerView:
        """The same layer as a function of ``norm(h)`` (no gain, no bias), which is its ``h``: no
        norm scale is frozen any more.

        ``q = q_map(x) * q_scale + q_constant`` for ``x = (h A) / s``, with ``q_scale`` that of the
        QK-norm where there is one, else one.
        """
        return replace(
            self,
            h=self.norm.normalize(self.h),
            norm_scale=torch.ones_like(self.norm_scale),
            q_scale=self.without_norm(self.q_scale),
            k_scale=self.without_norm(self.k_scale),
            v_scale=torch.ones_like(self.v_scale),
        )

    def __repr__(self) -> str:
        batch, length, heads, d_head = self.q.shape
        size = f"{batch} contexts of {length} positions, {heads} heads of {d_head}"
        settings = f"norm {self.norm.norm_type}, scale {self.scale:.4g}"
        worst = f"worst check {self.reconstruction.worst:.2g} of what is allowed"
        return f"LayerView(layer {self.layer}, {size}, {settings}, {worst})"

    def logits(
        self, scores: Float[Tensor, "batch head query key"], heads: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the model takes the softmax of, and where: scores after any soft cap, a sink as one
        more key that is always allowed.

        ``heads`` names the heads on the head axis (all of the layer's for ``None``).
        """
        scores = soft_cap(scores, self.softcap)
        allowed = self.allowed.to(scores.device)
        if self.sinks is None:
            return scores, allowed
        sinks = self.sinks if heads is None else self.sinks[list(heads)]
        sink = sinks[:, None, None].expand(*scores.shape[:-1], 1).to(scores)
        return torch.cat([scores, sink], -1), torch.cat(
            [allowed, torch.ones_like(allowed[:, :1])], -1
        )

    def pattern_of(
        self, scores: Float[Tensor, "batch head query key"], heads: Sequence[int] | None = None
    ) -> Float[Tensor, "batch head query key"]:
        """The pattern that the layer makes of scores: soft cap, mask, sinks, softmax."""
        capped, allowed = self.logits(scores, heads)
        return masked_softmax(capped, allowed)[..., : self.allowed.shape[-1]]

    def project_q(
        self, parts: Float[Tensor, "*part batch position d_model"]
    ) -> Float[Tensor, "*part batch position head d_head"]:
        """Queries of additive parts (without the constant)."""
        return self.q_map(parts) * self.q_scale.unsqueeze(-1)

    def project_k(
        self, parts: Float[Tensor, "*part batch position d_model"]
    ) -> Float[Tensor, "*part batch position head d_head"]:
        """Keys of additive parts (without the constant)."""
        return self.k_map(parts) * self.k_scale.unsqueeze(-1)


LayerHook = Callable[[LayerView], None]
"""Receives the view of a layer as soon as the forward pass has finished that layer."""
