"""Which linear model is left when what is not linear stays as it was in one forward pass?
:func:`tl_geometry.trace_logit` and :mod:`tl_geometry.interventions.head_attributions` follow a
logit through it.

For one prompt (the batch axis has length 1 everywhere) everything that is not linear is frozen as
it was: the scales of all norms, the attention patterns, and the MLPs' activations by their secant,
``a(g) -> (a(g) / g) g``. With g = x W_gate and u = x W_in, a gated MLP a(g) u is written as
two linear maps of x, one half through g (a(g) / g and u frozen), one half through u (a(g) frozen).
Every write to the residual stream, and every difference T of two logits, is then affine in the
embeddings. That the parts sum to T is exact; that MLPs are split by the secant and by halves is a
convention.

The **adjoint** of a write is dT/d(write) in this model: one walk from the logit back through the
blocks gives all of them. With ``follow_patterns=True`` the walk also follows what a change of
queries and keys does to the patterns (the derivative of the softmax): first order, and not part of
the exact sum. Norm scales, QK-norm scales and MLP slopes stay frozen in this walk too.

What a block writes comes from :mod:`tl_geometry.models.writers` (``HeadWrites``), what its MLP
computes from :mod:`tl_geometry.models.mlp` (``MLPSpec``). A head's **constant write** is what b_V
and the norm's bias put into its output: it is the same whichever keys the head attends to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.linalg import transposed
from tl_geometry.base.rows import query_slices
from tl_geometry.models.attention import Attention
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.mlp import MLPSpec, mlp_spec
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.write_spec import require_decoder, writing_of
from tl_geometry.models.writers import HeadWrites, Written, run_written

SMALL = 1e-6
"""Arguments of an activation that are closer to 0 are replaced by this, so that a(x) / x divides by
no 0: it is then nearly the derivative at 0 (of ReLU that from the right)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FrozenMLP:
    """An MLP as a linear map of the stream it reads, and the constant that it adds.

    ``gate_slope`` multiplies ``x W_gate``, ``linear_slope`` ``x W_in`` (gated MLPs only);
    ``scale`` and ``after_scale`` are the frozen norms'. ``written`` is the linear part of its
    output, ``constant`` the rest.
    """

    spec: MLPSpec
    scale: Float[Tensor, "batch position 1"]
    after_scale: Float[Tensor, "batch position 1"]
    gate_slope: Float[Tensor, "batch position d_mlp"]
    linear_slope: Float[Tensor, "batch position d_mlp"] | None
    written: Float[Tensor, "batch position d_model"]
    constant: Float[Tensor, "batch position d_model"]

    @classmethod
    def of(cls, spec: MLPSpec, h: Float[Tensor, "batch position d_model"]) -> FrozenMLP:
        """Freeze an MLP at the stream that it reads."""
        gate, linear = spec.hidden(spec.before.apply(h))
        argument = torch.where(gate.abs() < SMALL, SMALL, gate)
        gate_slope, linear_slope = spec.act(argument) / argument, None
        if linear is not None:
            gate_slope, linear_slope = 0.5 * gate_slope * linear, 0.5 * spec.act(gate)
        output = spec.out(gate, linear)
        after_scale = spec.after.scale(output).unsqueeze(-1)
        offset = gate_slope * (spec.before.bias @ spec.W_gate + spec.b_gate)
        W_in = spec.W_in  # once: each access converts the matrix
        if linear_slope is not None and W_in is not None and spec.b_in is not None:
            offset = offset + linear_slope * (spec.before.bias @ W_in + spec.b_in)
        constant = offset @ spec.W_out + spec.b_out
        constant = spec.after.centre(constant) * spec.after.gain / after_scale + spec.after.bias
        return cls(
            spec=spec,
            scale=spec.before.scale(h).unsqueeze(-1),
            after_scale=after_scale,
            gate_slope=gate_slope,
            linear_slope=linear_slope,
            written=spec.after.apply(output) - constant,
            constant=constant,
        )

    def adjoint(
        self, adjoint: Float[Tensor, "batch position d_model"]
    ) -> Float[Tensor, "batch position d_model"]:
        """dT/d(stream that it reads) from dT/d(what it wrote), through this MLP alone."""
        spec = self.spec
        back = spec.after.centre(adjoint * spec.after.gain) / self.after_scale @ spec.W_out.mT
        normed = (back * self.gate_slope) @ spec.W_gate.mT
        W_in = spec.W_in  # once: each access converts the matrix
        if self.linear_slope is not None and W_in is not None:
            normed = normed + (back * self.linear_slope) @ W_in.mT
        return spec.before.centre(normed * spec.before.gain) / self.scale


@dataclass(frozen=True, eq=False, kw_only=True)
class FrozenBlock:
    """One block of a forward pass.

    ``spec`` says how its heads read (``key_heads`` groups of them share keys). ``heads`` holds what
    they wrote, in factors and without their constant writes, ``attention_constant`` the rest of
    what attention wrote. ``mlp`` is the frozen MLP; the output of one that is a leaf is
    ``mlp_leaf``.
    """

    layer: LayerView
    spec: Attention
    key_heads: int
    heads: HeadWrites
    attention_constant: Float[Tensor, "batch position d_model"]
    mlp: FrozenMLP | None
    mlp_leaf: Float[Tensor, "batch position d_model"] | None

    def pattern(self, queries: Tensor | slice) -> tuple[Tensor, Tensor]:
        """The pattern of some queries ``[batch head query key]``, and the slope of the soft cap at
        each score (1 without one)."""
        layer = self.layer
        scores = layer.scale * einsum(layer.q[:, queries], layer.k, "b i h e, b j h e -> b h i j")
        if layer.bias is not None:
            scores = scores + layer.bias[:, queries]
        slope = torch.ones_like(scores)
        if layer.softcap is not None:
            slope = 1 - torch.tanh(scores / layer.softcap).square()
        # without the bias, which is of all queries, and in the scores by now
        rows = replace(layer, allowed=layer.seen_by(queries), bias=None)
        return rows.pattern_of(scores), slope

    def turned(
        self, x: Float[Tensor, "row head d_head"], which: str, positions: Int[Tensor, " row"]
    ) -> Float[Tensor, "row head d_head"]:
        """Projections at some positions as they enter scores and mixing: the linear part of
        QK-norm, rotation, frozen scale."""
        layer, turn = self.layer, self.layer.turn
        tables = None if turn is None else turn.at(positions)
        scale = {"q": layer.q_scale, "k": layer.k_scale, "v": layer.v_scale}[which]
        return self.spec.turned(x, which, tables) * scale[0, positions].unsqueeze(-1)

    def keys(
        self, parts: Float[Tensor, "row d_model"], positions: Int[Tensor, " row"]
    ) -> Float[Tensor, "row head d_head"]:
        """Keys of parts of the stream at some positions, without constants: one for each group of
        heads that share keys."""
        layer = self.layer
        group_size = layer.q.shape[2] // self.key_heads
        spec = self.spec.every(group_size)
        tables = None if layer.turn is None else layer.turn.at(positions)
        keys = spec.turned(spec.projected(parts, "k"), "k", tables)
        return keys * layer.k_scale[0, positions, ::group_size, None]

    def to_stream(
        self,
        cotangents: Float[Tensor, "row head d_head"],
        which: str,
        positions: Int[Tensor, " row"],
    ) -> Float[Tensor, "row d_model"]:
        """dT/d(stream) from dT/d(queries, keys or values): the transpose of how they are read."""
        projected = transposed(lambda x: self.turned(x, which, positions), cotangents)
        return self.back(projected, which)

    def back(
        self, cotangents: Float[Tensor, "row head d_head"], which: str
    ) -> Float[Tensor, "row d_model"]:
        """The transpose of centring, gain and projection."""
        stream = einsum(cotangents, self.spec.matrix(which), "r h e, h d e -> r d")
        return self.spec.norm.centre(stream * self.spec.norm.gain)


@dataclass(frozen=True, eq=False, kw_only=True)
class Adjoints:
    """dT/d(write) of everything that was written: ``stream[l]`` of the input of block l
    (and of what MLP l - 1 wrote), ``after_attention[l]`` of what attention l wrote, ``heads[l]`` of
    the mixed values of its heads; ``mlps[l]`` is dT/d(stream) through MLP l alone (``None`` for a
    leaf)."""

    stream: tuple[Float[Tensor, "batch position d_model"], ...]
    heads: tuple[Float[Tensor, "batch position head d_head"], ...]
    after_attention: tuple[Float[Tensor, "batch position d_model"], ...]
    mlps: tuple[Float[Tensor, "batch position d_model"] | None, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class FrozenPass:
    """The frozen linear model of one forward pass.

    ``leaves`` are the parts of the first state by name, ``embedding_constant`` what the norm behind
    the embedding added to them, ``last`` the last state. ``roundoff`` is that of the model's
    arithmetic (of its softmax, where that is coarser).
    """

    view: ModelView
    blocks: tuple[FrozenBlock, ...]
    leaves: dict[str, Float[Tensor, "batch position d_model"]]
    embedding_constant: Float[Tensor, "batch position d_model"]
    last: Float[Tensor, "batch position d_model"]
    roundoff: float

    @classmethod
    def of(cls, view: ModelView, tokens: Tensor, *, mlp: str = "frozen") -> FrozenPass:
        """Run the model once over ``tokens`` and freeze the pass; ``mlp="leaf"`` takes MLPs as
        inputs in place of following them back."""
        layers: list[LayerView] = []
        constants: list[Tensor] = []
        ends: list[tuple[Tensor, Written]] = []

        def on_layer(layer: LayerView, written: Written) -> None:
            layers.append(replace(layer, pattern=None, scores=None, z=None))
            constants.append(written.constants)

        def on_end(h: Tensor, written: Written) -> None:
            constants.append(written.constants)
            ends.append((h, written))

        require_decoder(view, f"logits of {view.name}")
        run_written(view, tokens, range(view.n_layers), on_layer, on_end=on_end)
        last, written = ends[0]
        states = [layer.h for layer in layers] + [last]
        frozen = [
            _block(view, layers[l], written, constants[l + 1] - constants[l], states[l + 1], mlp)
            for l in range(view.n_layers)
        ]
        embeds = {name: written.dense[name] for name, _ in writing_of(view).embeddings}
        return cls(
            view=view,
            blocks=tuple(frozen),
            leaves=embeds,
            embedding_constant=constants[0],
            last=last,
            roundoff=view._layers.roundoff,
        )

    def adjoints(
        self, readout: Float[Tensor, "batch position d_model"], *, follow_patterns: bool = False
    ) -> Adjoints:
        """All adjoints of ``T = sum(last * readout)``, by one walk from the last block to the
        first."""
        stream, heads, after_attention, mlps = [readout], [], [], []
        for block in reversed(self.blocks):
            after = stream[0]
            parallel = block.mlp is not None and block.mlp.spec.parallel
            through_mlp = None if block.mlp is None else block.mlp.adjoint(after)
            middle = after if through_mlp is None or parallel else after + through_mlp
            head_adjoints = einsum(middle, block.heads.W, "b i d, h e d -> b i h e")
            head_adjoints = head_adjoints * block.heads.scale[..., None, None]
            before = middle + self._through_attention(block, head_adjoints, follow_patterns)
            if through_mlp is not None and parallel:
                before = before + through_mlp
            stream.insert(0, before)
            heads.insert(0, head_adjoints)
            after_attention.insert(0, middle)
            mlps.insert(0, through_mlp)
        return Adjoints(
            stream=tuple(stream),
            heads=tuple(heads),
            after_attention=tuple(after_attention),
            mlps=tuple(mlps),
        )

    @staticmethod
    def _through_attention(
        block: FrozenBlock,
        head_adjoints: Float[Tensor, "batch position head d_head"],
        follow_patterns: bool,
    ) -> Float[Tensor, "batch position d_model"]:
        """dT/d(input of the block) through its heads: their values, and with ``follow_patterns``
        their queries and keys."""
        layer, to_values = block.layer, torch.zeros_like(head_adjoints)
        to_queries, to_keys = torch.zeros_like(layer.q), torch.zeros_like(layer.k)
        # patterns are recomputed, so that memory grows with the prompt and not its square
        for rows in query_slices(layer.q):
            pattern, slope = block.pattern(rows)
            to_values += einsum(pattern, head_adjoints[:, rows], "b h i j, b i h e -> b j h e")
            if follow_patterns:
                response = attention_response(layer, pattern, slope, head_adjoints[:, rows])
                response = response * layer.scale
                to_queries[:, rows] = einsum(response, layer.k, "b h i j, b j h e -> b i h e")
                to_keys += einsum(response, layer.q[:, rows], "b h i j, b i h e -> b j h e")
        everywhere = torch.arange(to_values.shape[1], device=to_values.device)
        out = block.to_stream(to_values[0], "v", everywhere)
        if follow_patterns:
            out = out + block.to_stream(to_queries[0], "q", everywhere)
            out = out + block.to_stream(to_keys[0], "k", everywhere)
        return out.unsqueeze(0)


def attention_response(
    layer: LayerView,
    pattern: Float[Tensor, "batch head query key"],
    slope: Float[Tensor, "batch head query key"],
    head_adjoints: Float[Tensor, "batch query head d_head"],
) -> Float[Tensor, "batch head query key"]:
    """dT/d(score) of some rows: ``p_ij (t_ij - sum_j p_ij t_ij) slope_ij``. ``t_ij`` is what one
    unit of attention to j writes towards T, ``slope`` is that of :meth:`FrozenBlock.pattern`.
    Without a soft cap the sum over keys is zero (a sink, which writes nothing, counts as a key)."""
    if layer.v is None:
        raise RuntimeError("a verified layer has values")
    towards = einsum(head_adjoints, layer.v, "b i h e, b j h e -> b h i j")
    return pattern * (towards - (pattern * towards).sum(-1, keepdim=True)) * slope


def _block(
    view: ModelView,
    layer: LayerView,
    written: Written,
    constant: Tensor,
    after: Tensor,
    mlp: str,
) -> FrozenBlock:
    """Freeze one block; ``constant`` is what its biases wrote, ``after`` the stream after it."""
    mlp_output = written.dense.get(f"mlp{layer.layer}")
    spec = mlp_spec(view, layer.layer) if mlp == "frozen" and mlp_output is not None else None
    frozen = None
    if spec is not None and mlp_output is not None:
        b_out = writing_of(view).blocks[layer.layer].b_out.to(layer.h)
        # what the MLP read: the block's input, or the stream without what the MLP wrote
        frozen = FrozenMLP.of(spec, layer.h if spec.parallel else after - mlp_output - b_out)
        constant = constant - b_out  # it is in the MLP's own constant
    return FrozenBlock(
        layer=layer,
        spec=layer.attention,
        key_heads=view.key_heads(layer.layer),
        heads=written.heads[layer.layer],
        attention_constant=constant,
        mlp=frozen,
        mlp_leaf=None if frozen is not None else mlp_output,
    )
