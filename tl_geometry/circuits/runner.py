"""A decoder as blocks that can be run and walked back, with what is frozen as an argument
(:mod:`tl_geometry.circuits.arithmetic`). The graph of a logit, edge scores and pruned runs stand on
it; composition, which runs no block, on :mod:`tl_geometry.scores.head_readers`.

A block adds to the stream, x being the normed input each time,

    head h:  N_a(z_h W_O^h + b_O / H),   z_h the values of head h mixed by its pattern
    MLP:     N_b(a(x W_gate + b_gate) * (x W_in + b_in) W_out + b_out)

with N_a and N_b norms behind attention and MLP, where there are such. The scale of N_a is that of
all heads together; its bias, like b_O, is shared out evenly, so that the writes sum to what the
block adds. Everything is made of the model's own specifications (norms, projections, QK-norm,
rotation, biases, caps, sinks, MLPs), and the logits are compared with the model's own.

A walk back goes block by block from the last to the first. Where runs were not kept, each block is
run once more from the stream that entered it, so that memory is that of one block's run, the
streams, and the queries, keys and constants of every layer for one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError, fail, require
from tl_geometry.circuits.arithmetic import Live, NormMap
from tl_geometry.circuits.streams import Apart, Reads, Shared, Stream
from tl_geometry.models.attention import Heads, rotate, scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.mlp import MLPModule, MLPSpec, live_mlp
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.output_head import OutputHead
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.runner import keep
from tl_geometry.models.write_spec import writing_of


class Projected(NamedTuple):
    """Queries, keys or values on their way: behind the projection (``raw``, groups of heads), and
    as they enter scores and mixing (``entering``, all heads)."""

    raw: Float[Tensor, "batch position group d_head"]
    entering: Heads


class Attended(NamedTuple):
    """Attention of a block: its inputs and projections by kind, scores before a soft cap, patterns,
    and mixed values."""

    reads: dict[str, Reads]
    sides: dict[str, Projected]
    scores: Float[Tensor, "batch head query key"]
    pattern: Float[Tensor, "batch head query key"]
    z: Heads


@dataclass(eq=False)
class BlockRun:
    """One block as it was run: what it read and made. ``entered`` and ``after`` are the stream in
    front of it and behind it, ``mlp_read`` is what the MLP read. After :meth:`pull`, ``grads``
    holds gradients by name: ``"q"``, ``"k"``, ``"v"`` (of the raw projections), ``"scores"``
    (before a soft cap), ``"z"``, ``"heads"`` and ``"mlp read"`` (through the MLP alone)."""

    block: Block
    arithmetic: Live
    entered: Stream
    attention: Attended
    heads: Float[Tensor, "head batch position d_model"]
    mlp_read: Stream | None
    mlp: Stream | None
    after: Stream
    grads: dict[str, Tensor] = field(default_factory=dict)

    def pull(self, adjoint: Stream, *, patterns: bool = True) -> Stream:
        """dT/d(stream that entered the block) from dT/d(that behind it), in a walk back; without
        ``patterns`` through values alone (``grads`` has no queries, keys and scores then)."""
        seen, kinds = self.attention, "qkv" if patterns else "v"
        reads: list[Tensor] = [seen.reads[which] for which in kinds]
        tracked: dict[str, Any] = {which: seen.sides[which].raw for which in kinds}
        tracked |= {"scores": seen.scores} if patterns else {}
        tracked |= {"z": seen.z, "heads": self.heads}
        tracked |= {} if self.mlp is None else {"mlp read": self.mlp_read}
        wanted = [self.entered, *reads, *tracked.values()]
        options = {"allow_unused": True, "retain_graph": True}
        found = torch.autograd.grad(self.after, wanted, adjoint, **options)
        grads = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found)]
        self.grads = dict(zip(tracked, grads[1 + len(reads) :], strict=True))
        return grads[0] + sum(g[:, :, 0] for g in grads[1 : 1 + len(reads)])

    def to_readers(self, contexts: int) -> Float[Tensor, "batch reader position d_model"]:
        """dT/d(input of each reader) after :meth:`pull`, of the first contexts: queries by head,
        keys and values by group, the MLP."""
        found = []
        with torch.no_grad():
            for which in "qkv":
                norm = self.arithmetic.map(self.block.layer.norm, self.attention.reads[which])
                W, grads = self.block.matrix(which), self.grads[which][:contexts]
                read = einsum(grads, W, "b i r e, r d e -> b i r d")
                back = norm.pick(slice(contexts)).adjoint(read)
                found.append(back.transpose(1, 2))
        if "mlp read" in self.grads:
            found.append(self.grads["mlp read"][:contexts].unsqueeze(1))
        return torch.cat(found, 1)


@dataclass(frozen=True, eq=False)
class Block:
    """One block. ``layer`` gives its attention for prompts of one length, ``groups`` is how many
    heads of keys and values there are; ``after`` is the norm behind attention, if there is one."""

    number: int
    layer: LayerView
    groups: int
    after: NormWeights | None
    mlp: MLPSpec | MLPModule | None

    @property
    def n_heads(self) -> int:
        """Heads."""
        return len(self.layer.weights.W_Q)

    @property
    def parallel(self) -> bool:
        """Whether the MLP reads what the heads read."""
        return self.mlp is not None and self.mlp.parallel

    def size(self, which: str) -> int:
        """How many heads share one query, key or value."""
        return 1 if which == "q" else self.n_heads // self.groups

    def matrix(self, which: str) -> Float[Tensor, "group d_model d_head"]:
        """W_Q, W_K or W_V, once for each group of heads."""
        return self.layer.matrix(which)[:: self.size(which)]

    def run(self, stream: Shared, arithmetic: Live, *, leaf: bool = False) -> BlockRun:
        """Read and write as the block does; what the MLP wrote has no past with ``leaf``."""
        entered, before = stream.total, stream.read("mlp") if self.parallel else None
        attention = self.attend(stream, arithmetic)
        heads = self.written(attention.z, arithmetic)
        stream.add(heads)
        read = write = None
        if self.mlp is not None:
            read = (stream.read("mlp") if before is None else before)[:, :, 0]
            read = read.view_as(read)  # its gradient is then that of the MLP alone
            normed = arithmetic.norm(self.mlp.before, read.detach() if leaf else read)
            write = self.mlp_of(normed, arithmetic)
            if leaf:
                write = write.detach().requires_grad_(torch.is_grad_enabled())
            stream.add(write.unsqueeze(0))
        return BlockRun(self, arithmetic, entered, attention, heads, read, write, stream.total)

    def tracked(self, entered: Stream, arithmetic: Live, *, leaf: bool = False) -> BlockRun:
        """A run from which :meth:`BlockRun.pull` takes gradients; none leaves the block."""
        with torch.enable_grad():
            stream = Apart(entered.detach().requires_grad_())
            return self.run(stream, arithmetic, leaf=leaf)

    def attend(self, stream: Shared, arithmetic: Live) -> Attended:
        """Attention up to the mixed values of its heads."""
        reads = {which: stream.read(which) for which in "qkv"}
        sides = {which: self.projected(reads[which], which, arithmetic) for which in "qkv"}
        q, k, v = (sides[which].entering for which in "qkv")
        scores = arithmetic.times(lambda a, b: scores_of(a, b, self.layer.scale), q, k)
        if self.layer.bias is not None:
            scores = scores + self.layer.bias
        capped = arithmetic.cap(scores, self.layer.softcap)
        pattern = arithmetic.softmax(self._rows(capped))[..., : k.shape[1]]
        return Attended(reads, sides, scores, pattern, arithmetic.times(mix, pattern, v))

    def projected(self, reads: Reads, which: str, arithmetic: Live) -> Projected:
        """Queries, keys or values, from one input for all readers or one for each."""
        x, W = arithmetic.norm(self.layer.norm, reads), self.matrix(which)
        bias = getattr(self.layer.weights, f"b_{which.upper()}")[:: self.size(which)]
        if x.shape[2] == 1:
            raw = einsum(x[:, :, 0], W, "b i d, r d e -> b i r e") + bias
        else:
            raw = einsum(x, W, "b i r d, r d e -> b i r e") + bias
        entering = raw.repeat_interleave(self.size(which), 2)
        if which != "v" and self.layer.qk_norm is not None:
            entering = arithmetic.norm(self.layer.qk_norm[which], entering)
        if which != "v" and self.layer.turn is not None:
            entering = rotate(entering, *self.layer.turn)
        return Projected(raw, entering)

    def parts(
        self,
        normed: Float[Tensor, "row d_model"],
        at: Int[Tensor, " row"],
        which: str,
        head_norm: NormMap | None,
    ) -> Float[Tensor, "row group d_head"]:
        """Queries, keys or values of parts of the stream at some positions of one prompt or pair,
        without constants, once for each group of heads; the parts have been through the linear map
        of the norm, ``head_norm`` is that of the QK-norm (:meth:`head_map`)."""
        x, size = einsum(normed, self.matrix(which), "n d, r d e -> n r e"), self.size(which)
        if head_norm is not None:  # it runs over all heads
            x = head_norm.at(at).linear(x.repeat_interleave(size, 1))[:, ::size]
        if which == "v" or self.layer.turn is None:
            return x
        return rotate(x, *self.layer.turn.at(at))

    def head_map(self, raw: Heads, which: str, arithmetic: Live) -> NormMap | None:
        """The QK-norm as a linear map at raw queries or keys."""
        if which == "v" or self.layer.qk_norm is None:
            return None
        raw = raw.repeat_interleave(self.size(which), 2)
        return arithmetic.map(self.layer.qk_norm[which], raw)

    def written(self, z: Heads, arithmetic: Live) -> Float[Tensor, "head batch position d_model"]:
        """What each head writes, from its mixed values."""
        writes = einsum(z, self.layer.weights.W_O, "b i h e, h e d -> h b i d")
        return self.added(writes, arithmetic)

    def added(
        self, writes: Float[Tensor, "head batch position d_model"], arithmetic: Live
    ) -> Float[Tensor, "head batch position d_model"]:
        """What is added to the stream, of mixed values times W_O: with the bias, behind the norm
        after attention."""
        writes = writes + self.layer.weights.b_O / len(writes)
        if self.after is None or self.after.norm_type is None:
            return writes
        return arithmetic.shares(self.after, writes)

    def mlp_of(self, x: Float[Tensor, "batch _ d_model"], arithmetic: Live) -> Stream:
        """What the MLP writes, from its normed input (one for all positions will do)."""
        mlp = self.mlp
        assert mlp is not None, "a block with an MLP"
        if isinstance(mlp, MLPModule):
            out = arithmetic.module(mlp.run, x)
        else:
            out = arithmetic.hidden(mlp.act, *mlp.hidden(x)) @ mlp.W_out + mlp.b_out
        if mlp.after.norm_type is None:
            return out * mlp.after.gain.to(out)  # Granite's multiplier, else 1
        return arithmetic.norm(mlp.after, out)

    def _rows(self, scores: Tensor) -> Tensor:
        """What the softmax is taken of: masked cells at the least number, a sink one more key."""
        least = torch.finfo(scores.dtype).min
        rows = scores.masked_fill(~self.layer.allowed.to(scores.device), least)
        if self.layer.sinks is None:
            return rows
        sink = self.layer.sinks[:, None, None].to(rows).expand(*rows.shape[:-1], 1)
        return torch.cat([rows, sink], -1)


def mix(pattern: Tensor, v: Tensor) -> Heads:
    """Values mixed by patterns."""
    return einsum(pattern, v, "b h i j, b j h e -> b i h e")


def stream_at(stream: Stream, position: int | None) -> Float[Tensor, "batch some d_model"]:
    """The stream at one position, or all of it."""
    return stream if position is None else stream[:, [position]]


class States(NamedTuple):
    """A run: the input of every block and the last state, and the logits at some positions; of a
    verified one also the model's own embeddings, by hook."""

    streams: tuple[Stream, ...]
    logits: Float[Tensor, "batch position d_vocab"]
    embedded: dict[str, Tensor]


OnBlock = Callable[[BlockRun], None]
"""Receives each block that was run."""


@dataclass(frozen=True, eq=False)
class Runner:
    """The blocks of one model, for prompts of one length."""

    view: ModelView
    blocks: tuple[Block, ...]
    head: OutputHead

    @classmethod
    def of(cls, view: ModelView, tokens: Int[Tensor, "batch position"]) -> Runner:
        """Read the model once, over the first of the prompts; its attention is verified there.

        Raises ``UnsupportedModelError`` for an encoder, a newly initialised head, and an MLP that
        gives something else than its module does for a norm of the stream.
        """
        head = _trained_head(view)
        layers: list[LayerView] = []

        def on_layer(layer: LayerView) -> None:
            layers.append(replace(layer, pattern=None, scores=None, z=None))

        view.run_layers(tokens[:1], range(view.n_layers), on_layer)
        writing = writing_of(view).blocks
        blocks = []
        for number, layer in enumerate(layers):
            groups, after = view.key_heads(number), writing[number].after_attention
            blocks.append(Block(number, layer, groups, after, live_mlp(view, number)))
        return cls(view, tuple(blocks), head)

    @torch.no_grad()
    def verified(
        self,
        tokens: Int[Tensor, "batch position"],
        arithmetic: Callable[[], Live] = Live,
        *,
        position: int | None = None,
        on_block: OnBlock | None = None,
        kept: list[BlockRun] | None = None,
        leaf: bool = False,
    ) -> States:
        """The model's own pass over ``tokens`` and one by blocks; their logits, at one ``position``
        if it is given, are compared. Between two runs ``tokens`` are the prompts, then their
        counterfactuals. The list ``kept`` gets the blocks, as a walk back (with MLPs perhaps a
        ``leaf``) would run them once more."""
        embedded: dict[str, Tensor] = {}
        hook, writing = self.view.state_hooks[0], writing_of(self.view)
        hooks = {name: keep(embedded, name) for name in (hook, *dict(writing.embeddings).values())}
        logits = self.view.logits(tokens, hooks, position)
        first = embedded[hook].to(self.blocks[0].layer.h)
        run = self.run(first, arithmetic, position, on_block, kept, leaf=leaf)
        self.require_model_logits(logits, stream_at(run.streams[-1], position), run.logits)
        return run._replace(embedded=embedded)

    def run(
        self,
        first: Stream,
        arithmetic: Callable[[], Live] = Live,
        position: int | None = None,
        on_block: OnBlock | None = None,
        kept: list[BlockRun] | None = None,
        *,
        leaf: bool = False,
    ) -> States:
        """One pass by blocks from the first state."""
        streams = [first]
        for block in self.blocks:
            if kept is None:
                ran = block.run(Shared(streams[-1]), arithmetic())
            else:
                kept.append(ran := block.tracked(streams[-1], arithmetic(), leaf=leaf))
            streams.append(ran.after.detach())
            if on_block is not None:
                on_block(ran)
        logits = self.logits(stream_at(streams[-1], position), arithmetic())
        return States(tuple(streams), logits, {})

    def logits(self, last: Stream, arithmetic: Live) -> Float[Tensor, "batch position d_vocab"]:
        """Logits of last states, behind the soft cap."""
        normed = arithmetic.norm(self.head.norm, last)
        raw = normed @ self.head.W_U.to(normed) + self.head.b_U.to(normed)
        return arithmetic.cap(raw, self.head.softcap)

    def require_model_logits(
        self,
        model_logits: Float[Tensor, "batch position d_vocab"],
        last: Stream,
        logits: Float[Tensor, "batch position d_vocab"],
    ) -> None:
        """Compare logits with the model's own at some positions: every block may add the rounding
        of :func:`reconstruction_bound`, relative to the sums of absolute values behind them.

        Raises ``ReconstructionError`` where they differ, as under hooks that change the model.
        """
        model_logits, normed = model_logits.to(logits), self.head.norm.apply(last)
        size = float((normed.abs() @ self.head.W_U.to(normed).abs()).max())
        size += float(self.head.b_U.abs().max())
        bound = len(self.blocks) * reconstruction_bound(self.view.roundoff, size)
        error = float((logits - model_logits).abs().max())
        fits, what = error <= bound, f"logits of {self.view.name}"
        expected, kind = f"those of a pass by blocks, within {bound:.1e}", ReconstructionError
        got = f"differences of {error:.1e}"
        instead = "the model without hooks that change it; check_model(model) says more"
        require(fits, what, expected=expected, got=got, instead=instead, error=kind)


def _trained_head(view: ModelView) -> OutputHead:
    """The output head of a model whose logits are a norm and a trained linear map of the last
    state; refuses other models."""
    head, expected = view.output_head() if view.head_trained else None, "a norm and a linear map"
    if head is None:
        got = f"the output head of {view.class_name}" if view.head_trained else "a new output head"
        what, expected = f"logits of {view.name}", f"{expected}, trained"
        fail(what, expected=expected, got=got, error=UnsupportedModelError)
    return head
