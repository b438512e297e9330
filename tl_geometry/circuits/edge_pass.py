"""One forward pass in which every reader has an input of its own: the queries of a head, the keys
and values of a group of heads, the MLP, the output. Edge scores take gradients at these inputs,
pruned runs and :func:`tl_geometry.interventions.path` change them.

The pass is made of the model's own specifications (norms, projections, QK-norm, rotation, caps,
sinks, MLPs), everything live. A block adds to the stream

    head h:  N_a(z_h W_O^h + b_O / H)
    MLP:     N_b(a(x W_gate + b_gate) * (x W_in + b_in) W_out + b_out)

with z_h the values of head h mixed by its pattern, and x the normed input of the MLP. N_a and N_b
are norms behind attention and MLP, where there are such. The scale of N_a is that of all heads
together, and its bias, like b_O, is shared out evenly, so that the writes sum to what the block
adds. A mixture of experts writes N_b of what the model's own module gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.errors import ReconstructionError, fail
from tl_geometry.circuits.edge_layout import EdgeLayout, LayerReaders
from tl_geometry.models.attention import Attention, scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.mlp import MLPModule, MLPSpec, live_mlp
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.output_head import OutputHead
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.runner import keep
from tl_geometry.models.write_spec import writing_of
from tl_geometry.scores.values import trained_head

Reads = Float[Tensor, "batch position row d_model"]
"""Inputs of some readers (rows)."""
Writes = Float[Tensor, "writer batch position d_model"]
"""What some writers added to the stream."""


class SharedStream:
    """The ordinary stream: every reader reads all that was written. It keeps the ``writes`` and the
    ``reads`` of every reader, at which gradients can be taken."""

    def __init__(self, first: Float[Tensor, "batch position d_model"]) -> None:
        self.total = first
        self.writes: list[Writes] = [first.unsqueeze(0)]
        self.reads: list[Reads] = []

    def read(self, readers: slice) -> Reads:
        """The stream, once for each reader."""
        reads = self.total.unsqueeze(2).expand(-1, -1, readers.stop - readers.start, -1)
        self.reads.append(reads)
        return reads

    def add(self, writes: Writes) -> None:
        """Add to what every reader reads."""
        self.total = self.total + writes.sum(0)
        self.writes.append(writes)

    def all_writes(self) -> Writes:
        """The writes of every writer."""
        return torch.cat(self.writes).detach()


class PrunedStream:
    """Each reader gets the counterfactual stream, plus (running - counterfactual) of the writers
    that are kept for it."""

    def __init__(
        self,
        first: Float[Tensor, "batch position d_model"],
        counterfactual: Writes,
        kept: Bool[Tensor, "row writer"],
    ) -> None:
        self.counterfactual, self.kept = counterfactual, kept.to(first)
        self.total = torch.zeros_like(first)
        self.differences = torch.empty_like(counterfactual)
        self.written = 0
        self.add(first.unsqueeze(0))

    def read(self, readers: slice) -> Reads:
        """What each reader gets."""
        kept, differences = self.kept[readers, : self.written], self.differences[: self.written]
        return self.total.unsqueeze(2) + einsum(kept, differences, "r w, w b i d -> b i r d")

    def add(self, writes: Writes) -> None:
        """Add the counterfactual writes of these writers; keep how the running ones differ."""
        writers = slice(self.written, self.written + len(writes))
        self.differences[writers] = writes - self.counterfactual[writers]
        self.total = self.total + self.counterfactual[writers].sum(0)
        self.written = writers.stop


class PathStream:
    """The ordinary stream, and another one for the receivers: ``receives`` marks their readers and
    positions.

    With ``change`` receivers read the stream plus ``change``. Without it the batch is two runs of
    the same prompts, one in each half: receivers of the second half read the stream of the first,
    and every other reader that of its own half.
    """

    def __init__(
        self,
        first: Float[Tensor, "batch position d_model"],
        receives: Bool[Tensor, "position row"],
        change: Float[Tensor, "batch position d_model"] | None,
    ) -> None:
        self.total, self.receives, self.change = first, receives.to(first.device), change

    def read(self, readers: slice) -> Reads:
        """What each reader gets."""
        receives = self.receives[:, readers].unsqueeze(-1)
        if self.change is not None:
            other, ordinary = (x.unsqueeze(2) for x in (self.total + self.change, self.total))
            return torch.where(receives, other, ordinary)
        other, ordinary = self.total.unsqueeze(2).chunk(2)
        return torch.cat(
            [other.expand(-1, -1, receives.shape[1], -1), torch.where(receives, other, ordinary)]
        )

    def add(self, writes: Writes) -> None:
        """Add to what every reader reads."""
        self.total = self.total + writes.sum(0)


OutputEdit = Callable[[Float[Tensor, "batch position head d_head"]], Tensor]
"""Receives the mixed values of the heads of a block and returns those to use."""
Stream = SharedStream | PrunedStream | PathStream
"""Gives each reader its input, and adds what is written."""


@dataclass(frozen=True, eq=False)
class LiveBlock:
    """One block with everything live. ``layer`` gives mask, bias and rotation for the length of the
    prompts; ``after`` is the norm behind attention, if there is one."""

    spec: Attention
    layer: LayerView
    after: NormWeights | None
    mlp: MLPSpec | MLPModule | None

    def run(self, stream: Stream, readers: LayerReaders, outputs: OutputEdit | None = None) -> None:
        """Read and write as the block does; ``outputs`` maps its mixed values to others."""
        z = self.mixed(stream.read(readers.attention), readers)
        attention = self.written(z if outputs is None else outputs(z))
        # a parallel block reads for its MLP what it reads for its heads
        parallel = self.mlp is not None and self.mlp.parallel
        reads = stream.read(readers.mlp) if parallel else None
        stream.add(attention)
        if self.mlp is not None:
            reads = stream.read(readers.mlp) if reads is None else reads
            stream.add(self.mlp.apply(reads[:, :, 0]).unsqueeze(0))

    def mixed(
        self, reads: Reads, readers: LayerReaders
    ) -> Float[Tensor, "batch position head d_head"]:
        """The values of each head mixed by its pattern."""
        first = readers.query.start
        parts = (slice(s.start - first, s.stop - first) for s in readers[:3])
        q, k, v = (
            self.entering(reads[:, :, part], which)
            for part, which in zip(parts, "qkv", strict=True)
        )
        scores = scores_of(q, k, self.spec.scale)
        if self.layer.bias is not None:
            scores = scores + self.layer.bias
        return einsum(self.layer.pattern_of(scores), v, "b h i j, b j h e -> b i h e")

    def written(self, z: Float[Tensor, "batch position head d_head"]) -> Writes:
        """What each head writes, from its mixed values."""
        weights = self.spec.weights
        writes = einsum(z, weights.W_O, "b i h e, h e d -> h b i d")
        writes = writes + weights.b_O / len(writes)
        if self.after is None or self.after.norm_type is None:
            return writes
        scale = self.after.scale(writes.sum(0)).unsqueeze(-1)
        bias = self.after.bias / len(writes)
        return self.after.centre(writes) / scale * self.after.gain + bias

    def entering(self, reads: Reads, which: str) -> Float[Tensor, "batch position head d_head"]:
        """Queries, keys or values of all heads as they enter scores and mixing, each from the input
        of its own reader."""
        spec, n_heads = self.spec, len(self.spec.matrix("q"))
        size = n_heads // reads.shape[2]  # heads that share this reader
        x = spec.norm.centre(reads) * spec.norm.gain / spec.norm.scale(reads).unsqueeze(-1)
        x = einsum(x, spec.matrix(which)[::size], "b i r d, r d e -> b i r e")
        x = (x + spec.constant(which)[..., ::size, :]).repeat_interleave(size, 2)
        if which != "v" and spec.qk_norm is not None:
            x = x / spec.qk_norm.scale(x).unsqueeze(-1)
        return spec.turned(x, which, self.layer.turn)


@dataclass(frozen=True, eq=False)
class EdgePass:
    """The passes of one model over prompts of one length."""

    view: ModelView
    layout: EdgeLayout
    blocks: tuple[LiveBlock, ...]
    head: OutputHead
    roundoff: float

    @classmethod
    def of(cls, view: ModelView, layout: EdgeLayout, tokens: Tensor) -> EdgePass:
        """Read the model once, over the first of the prompts ``tokens [batch position]``; its
        attention is verified there."""
        layers: list[LayerView] = []

        def on_layer(layer: LayerView) -> None:
            layers.append(replace(layer, pattern=None, scores=None, z=None))

        view.run_layers(tokens[:1], range(view.n_layers), on_layer)
        writing = writing_of(view).blocks
        blocks = (
            LiveBlock(
                spec=layer.attention,
                layer=layer,
                after=writing[l].after_attention,
                mlp=live_mlp(view, l),
            )
            for l, layer in enumerate(layers)
        )
        head = trained_head(view, instead="a language model whose logits are such a readout")
        return cls(view, layout, tuple(blocks), head, view._layers.roundoff)

    def run(
        self,
        stream: Stream,
        positions: slice = slice(None),
        *,
        start: int = 0,
        outputs: Mapping[int, OutputEdit] | None = None,
    ) -> Float[Tensor, "batch position d_vocab"]:
        """One pass from block ``start``: logits at some positions. ``outputs`` maps the mixed
        values of some blocks to others."""
        edits = outputs or {}
        for layer, readers in enumerate(self.layout.layer_readers()):
            if layer >= start:
                self.blocks[layer].run(stream, readers, edits.get(layer))
        end = len(self.layout.readers)
        return self.head.logits(stream.read(slice(end - 1, end))[:, positions, 0])

    def verified(
        self, tokens: Tensor, positions: slice
    ) -> tuple[SharedStream, Float[Tensor, "batch position d_vocab"]]:
        """The ordinary pass over ``tokens``, and its logits at some positions, compared with the
        model's own (:meth:`require_model_logits`)."""
        first, model_logits = self.model_run(tokens, positions)
        stream = SharedStream(first)
        logits = self.run(stream, positions)
        self.require_model_logits(model_logits, stream.total[:, positions], logits)
        return stream, logits

    def model_run(self, tokens: Tensor, positions: slice) -> tuple[Tensor, Tensor]:
        """The model's own first state ``[batch position d_model]``, which its embedding writes, and
        its logits ``[batch position d_vocab]`` at some positions."""
        states: dict[str, Tensor] = {}
        hook = self.view.state_hooks[0]
        hooks = {hook: keep(states, hook)}
        logits = self.view.logits(tokens, hooks)
        return states[hook].to(self.blocks[0].layer.h), logits[:, positions]

    def require_model_logits(
        self,
        model_logits: Float[Tensor, "batch position d_vocab"],
        last: Float[Tensor, "batch position d_model"],
        logits: Float[Tensor, "batch position d_vocab"],
    ) -> None:
        """Compare the logits of an ordinary pass, which reads them from the states ``last`` at some
        positions, with the model's own there: every block may add the rounding of
        :func:`reconstruction_bound`, relative to the sums of absolute values behind the logits.

        Raises ``ReconstructionError`` where they differ, as under hooks that change the model.
        """
        model_logits, normed = model_logits.to(logits), self.head.norm.apply(last)
        size = float((normed.abs() @ self.head.W_U.to(normed).abs()).max())
        size += float(self.head.b_U.abs().max())
        bound = len(self.blocks) * reconstruction_bound(self.roundoff, size)
        error = float((logits - model_logits).abs().max())
        if not error <= bound:
            fail(
                f"logits of {self.view.name}",
                expected=f"those of a pass by blocks, within {bound:.1e}",
                got=f"differences of {error:.1e}",
                instead="the model without hooks that change it; check_model(model) says more",
                error=ReconstructionError,
            )
