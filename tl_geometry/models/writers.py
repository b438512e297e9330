"""Who wrote the residual stream? One forward pass gives the stream at each block as a sum over
embeddings, heads, MLPs and constants; composition, logits and splits by writer ask for it.

1. Each block's heads write ``z_h W_O^h``, its MLP what its hook holds. The biases b_O and b_out go
   to the writer ``constants``. So does what a head writes whichever keys it attends to:
   ``(beta W_V + b_V) W_O sum_j p_ij``, with beta the norm's bias (the sum is one without sinks).
   Raw and folded weights then give the same writers.
2. A norm behind a write is frozen at its scale: what was written goes through the centring A, the
   gain and 1/s, and the norm's bias joins the constants.
3. Heads stay factored: z with a scale for each token, and W_O with the centrings and gains of the
   norms behind it, ``w[b, i, h] = z[b, i, h] W[h]``. No vector of d_model is held for each head.
4. The parts are added up and compared with the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import choice
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import upcast
from tl_geometry.models.reconstruction import reconstruction_bound, require_reconstruction
from tl_geometry.models.states import entries_of
from tl_geometry.models.write_spec import Writing, by_head, writing_of

Parts = Float[Tensor, "part batch position d_model"]

CONSTANTS = "constants"
"""The writer that holds b_O, b_out, the biases of norms behind writes, and the constant writes of
heads."""
GRAINS = ("writers", "blocks")
"""How finely the stream is divided: every head by itself, or the attention of a block as a
whole."""


class Writer(NamedTuple):
    """One writer of the stream: its name, block and head. The block is -1 for embeddings and
    constants, the head for everything but a single head."""

    name: str
    layer: int
    head: int


def writer_names(view: ModelView, layer: int, grain: str = "writers") -> tuple[Writer, ...]:
    """Writers of the input of block ``layer`` (of the last state for ``n_layers``), those of
    earlier blocks first. Constants stand before the heads, so that each block only appends to the
    list."""
    choice(grain, GRAINS, "parts")
    writing = writing_of(view)
    writers = [Writer(name, -1, -1) for name, _ in writing.embeddings]
    writers.append(Writer(CONSTANTS, -1, -1))
    for at, block in enumerate(writing.blocks[:layer]):
        heads = [Writer(f"L{at}H{head}", at, head) for head in range(view.n_heads)]
        writers += heads if grain == "writers" else [Writer(f"attn{at}", at, -1)]
        writers += [Writer(f"mlp{at}", at, -1)] if block.mlp_hook is not None else []
    return tuple(writers)


class HeadWrites(NamedTuple):
    """What the heads of one block wrote, in factors: ``z[b, i, h] W[h]``, with the scale of a norm
    behind the write in ``z``, its centring and gain in ``W``."""

    layer: int
    z: Float[Tensor, "batch position head d_head"]
    W: Float[Tensor, "head d_head d_model"]

    def each(self) -> Float[Tensor, "head batch position d_model"]:
        """Every head's write as a vector of the stream."""
        return einsum(self.z, self.W, "b i h e, h e d -> h b i d")

    def whole(self) -> Float[Tensor, "batch position d_model"]:
        """The sum over heads."""
        return einsum(self.z, self.W, "b i h e, h e d -> b i d")


class Written:
    """The stream so far as a sum over writers, for one forward pass; grows block by block.

    ``dense`` holds embeddings and MLPs as vectors ``[batch position d_model]`` by name,
    ``constants`` alike, ``heads`` the writes of each block's heads in factors.
    """

    def __init__(
        self, view: ModelView, writing: Writing, activations: Mapping[str, Tensor]
    ) -> None:
        self.view, self.writing, norm = view, writing, writing.embedding_norm
        first = upcast(activations["blocks.0.hook_resid_pre"])
        dense = {name: upcast(activations[hook]).to(first) for name, hook in writing.embeddings}
        dense = {name: x.expand_as(first) for name, x in dense.items()}
        scale = norm.scale(torch.stack(list(dense.values())).sum(0))
        self.dense = {name: _normed(x, norm, scale) for name, x in dense.items()}
        self.constants = norm.bias.to(first).expand_as(first)
        self.heads: list[HeadWrites] = []
        # how many blocks :meth:`check` has added up, their sum, and that of absolute values
        self._summed: tuple[int, Tensor, Tensor] | None = None

    @property
    def layer(self) -> int:
        """The block whose input is the sum so far."""
        return len(self.heads)

    def extend(self, activations: Mapping[str, Tensor]) -> None:
        """Take in what the next block wrote."""
        layer, block = self.layer, self.writing.blocks[self.layer]
        z = by_head(upcast(activations[f"blocks.{layer}.attn.hook_z"]), self.view.n_heads)
        z = z.to(self.constants)
        weights, norm = self.view.weights(layer).to(z), self.view.attention_norm(layer)
        value = einsum(norm.bias.to(z), weights.W_V, "d, h d e -> h e") + weights.b_V
        constant = value.expand_as(z)
        if self.view._has_sinks(layer):  # a sink takes its share of what rows sum to
            pattern = upcast(activations[f"blocks.{layer}.attn.hook_pattern"])
            constant = pattern.sum(-1).mT.to(z).unsqueeze(-1) * value
        heads = HeadWrites(layer, z - constant, weights.W_O)
        rest = einsum(constant, weights.W_O, "b i h e, h e d -> b i d") + weights.b_O
        if block.after_attention is not None:
            norm = block.after_attention
            scale = norm.scale(heads.whole() + rest)
            z_scaled = heads.z / scale[..., None, None]
            heads = HeadWrites(layer, z_scaled, norm.linear(heads.W))
            rest = _normed(rest, norm, scale) + norm.bias.to(z)
        self.heads.append(heads)
        if block.mlp_hook is not None:
            mlp, b_out = upcast(activations[block.mlp_hook]).to(z), block.b_out.to(z)
            self.dense[f"mlp{layer}"], rest = mlp - b_out, rest + b_out
        self.constants = self.constants + rest

    def context(self, row: int) -> Written:
        """What was written in one context of the batch."""
        return self._each(lambda x: x[row : row + 1])

    def tokens(self, some: Any) -> Written:
        """What was written at the tokens ``some``, counted over all contexts one after another, as
        one context."""
        return self._each(lambda x: x.flatten(0, 1)[some].unsqueeze(0))

    def along(self, directions: Float[Tensor, "column d_model"]) -> Written:
        """What was written along each of ``directions``: the same writers, with an axis of
        directions in place of d_model."""
        onto, written = directions.to(self.constants).mT, self._each(lambda x: x)
        written.dense = {name: value @ onto for name, value in self.dense.items()}
        written.constants = self.constants @ onto
        written.heads = [x._replace(W=x.W @ onto) for x in self.heads]
        return written

    def _each(self, pick: Callable[[Tensor], Tensor]) -> Written:
        """What was written at some contexts or positions."""
        some = copy(self)
        some._summed = None
        some.dense = {name: pick(value) for name, value in self.dense.items()}
        some.constants = pick(self.constants)
        some.heads = [x._replace(z=pick(x.z)) for x in self.heads]
        return some

    def names(self, grain: str = "writers") -> tuple[Writer, ...]:
        """The writers so far, in the order of :meth:`parts`."""
        return writer_names(self.view, self.layer, grain)

    def parts(self, grain: str = "writers") -> dict[str, Float[Tensor, "batch position d_model"]]:
        """Every writer's part of the stream by name; they sum to it."""
        names = [writer.name for writer in self.names(grain)]
        return dict(zip(names, self.stacked(grain), strict=True))

    def stacked(self, grain: str = "writers") -> Parts:
        """:meth:`parts` as one tensor."""
        return torch.cat([self._first(), *self._by_blocks(grain)])

    def _first(self) -> Parts:
        """What was written before the first block, and the constants."""
        return torch.stack([*(self.dense[n] for n, _ in self.writing.embeddings), self.constants])

    def _by_blocks(self, grain: str, since: int = 0) -> Iterator[Parts]:
        """What the blocks from ``since`` on wrote, in the order of :meth:`names`."""
        for heads in self.heads[since:]:
            yield heads.each() if grain == "writers" else heads.whole().unsqueeze(0)
            if f"mlp{heads.layer}" in self.dense:
                yield self.dense[f"mlp{heads.layer}"].unsqueeze(0)

    def check(self, h: Float[Tensor, "batch position d_model"], roundoff: float) -> None:
        """Compare the sum of all parts with the stream (:func:`reconstruction_bound`).

        Raises ``ReconstructionError`` where they differ, as where a user hook writes into the
        stream too.
        """
        # what earlier blocks wrote was added up when their outputs were checked
        if self._summed is None:
            first = self._first()[:-1]
            self._summed = 0, first.sum(0, dtype=torch.float64), first.abs().sum(0)
        since, total, size = self._summed
        for parts in self._by_blocks("writers", since):
            total = total + parts.sum(0, dtype=torch.float64)
            size = size + parts.abs().sum(0)
        self._summed = self.layer, total, size
        error = float((total + self.constants - h.double()).abs().max())
        bound = reconstruction_bound(roundoff, float((size + self.constants.abs()).max()))
        checks = [(self.layer, "sum of the writers", error, bound)]
        require_reconstruction(checks, f"state {self.layer} of {self.view.name}")


def _normed(x: Tensor, norm: NormWeights, scale: Float[Tensor, "batch position"]) -> Tensor:
    """A part of what a norm was given, with the norm's scale frozen."""
    return norm.linear(x) / scale.unsqueeze(-1)


OnWritten = Callable[[LayerView, Written], None]
"""Receives a layer, and its input by writers; both are valid during the call only."""


def run_written(
    view: ModelView,
    tokens: Tensor,
    layers: Sequence[int],
    on_layer: OnWritten,
    *,
    sample: int | None = None,
    cache: Any = None,
) -> None:
    """One forward pass over ``tokens [batch position]`` (or a cache of it) that hands over each of
    ``layers`` with the writers of its input.

    Layers are verified as :meth:`ModelView.run_layers` does, and the writers are added up and
    compared with the stream. ``sample`` is a row: that context alone is verified, by itself in the
    same pass.
    """
    writing, last = writing_of(view), max(layers)
    written: list[Written] = []

    def take(layer: int, activations: Mapping[str, Tensor]) -> None:
        if layer == 0:
            written.append(Written(view, writing, activations))
        if layer in layers and sample is not None:
            one, every = view._sampled(layer, activations, sample)
            context = written[0].context(sample)
            context.check(one.h, one.roundoff)
            on_layer(every, written[0])
        elif layer in layers:
            every = view.layer(layer, activations)
            written[0].check(every.h, every.roundoff)
            on_layer(every, written[0])
        if layer < last:
            written[0].extend(activations)

    names: dict[int, list[str]] = {}
    for layer in range(last + 1):
        hooks = view.layer_hooks(layer) if layer in layers else ()
        sinks = [view.pattern_hooks[layer]] if view._has_sinks(layer) else []
        names[layer] = list(dict.fromkeys([*writing.hooks(layer), *hooks, *sinks]))
    if cache is None:
        view._stream(tokens, names, take)
        return
    entries = entries_of(cache, [name for of_layer in names.values() for name in of_layer])
    for layer, of_layer in names.items():
        take(layer, {name: entries[name] for name in of_layer})
