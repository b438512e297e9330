"""How a model writes into its residual stream: its embeddings, and what each block adds. Of the
candidates that its modules suggest, the one that reproduces the model's own states is taken.
:mod:`tl_geometry.models.writers` applies it.

A decoder's block adds what attention and MLP give, in some families (Gemma 2 and 3, OLMo 2) each
through a norm; an encoder (BERT), which norms the whole stream after each addition, is refused::

    h' = h + N_a(sum_h z_h W_O^h + b_O) + mlp          N_a the norm behind attention, or none
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, norms_of
from tl_geometry.models.parameters import part, upcast
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.runner import without_hooks

EMBED = ("hook_embed", "embed.hook_embed", "embed.hook_out")
POSITION = ("hook_pos_embed", "embed.hook_pos_embed")
"""What the hooks of token and position embeddings are called; a bridge's ``hook_embed``
comes after a norm behind the embeddings, where there is one."""


class BlockWriting(NamedTuple):
    """What a block does to the stream: the norm behind attention, the MLP's hook and output
    bias."""

    after_attention: NormWeights | None
    mlp_hook: str | None
    b_out: Float[Tensor, " d_model"]


@dataclass(frozen=True, eq=False)
class Writing:
    """How the whole model writes, inferred once for its weights. The first state is a sum of
    ``embeddings`` (name, hook), through a norm in some families."""

    embeddings: tuple[tuple[str, str], ...]
    embedding_norm: NormWeights | None
    blocks: tuple[BlockWriting, ...]
    probe: Mapping[str, Tensor]
    """The activations that it was inferred from, which tell how MLPs are read too."""

    def hooks(self, layer: int) -> tuple[str, ...]:
        """Hooks of the input of block ``layer``, its mixed values and its MLP's output; for block 0
        also those of the embeddings."""
        names = [hook for _, hook in self.embeddings] if layer == 0 else []
        names += [f"blocks.{layer}.hook_resid_pre", f"blocks.{layer}.attn.hook_z"]
        mlp = self.blocks[layer].mlp_hook
        return (*names, *([] if mlp is None else [mlp]))


def by_head(z: Tensor, heads: int) -> Float[Tensor, "batch position head d_head"]:
    """Mixed values with a head axis (some bridges give them side by side)."""
    return rearrange(z, "b i (h e) -> b i h e", h=heads) if z.dim() == 3 else z


def attention_of(
    view: ModelView, layer: int, activations: Mapping[str, Tensor]
) -> Float[Tensor, "batch position d_model"]:
    """What attention gives, before a norm behind it, from its mixed values."""
    weights = view.weights(layer)
    z = by_head(activations[f"blocks.{layer}.attn.hook_z"], view.n_heads).to(weights.W_O)
    return einsum(z, weights.W_O, "b i h e, h e d -> b i d") + weights.b_O


def writing_of(view: ModelView) -> Writing:
    """How the model writes, from its probe; remembered as long as its weights stay the same.

    Raises ``UnsupportedModelError`` for a block whose output is no sum of what its attention and
    its MLP give.
    """
    found = view._layers.found
    if "writing" not in found:
        found["writing"] = _infer(view)
    return found["writing"]


def require_decoder(view: ModelView, what: str) -> None:
    """Raise ``UnsupportedModelError`` for an encoder; ``what`` was asked of the model."""
    expected = "a decoder, whose blocks add to the stream"
    got = "an encoder, which norms the stream after each addition"
    require(view.causal, what, expected=expected, got=got, error=UnsupportedModelError)


@torch.no_grad()
def _infer(view: ModelView) -> Writing:
    """:func:`writing_of` from one forward pass over eight tokens."""
    require_decoder(view, f"writers of {view.name}")
    runner = view._layers.runner
    embeds = [name for name in EMBED if runner.has(name)]
    in_stream = view.position == "standard"  # other schemes add no positions to the stream
    added = [name for name in POSITION if in_stream and runner.has(name)][:1]
    # attention-only blocks of HookedTransformer have the hook, and no MLP
    mlps = [
        f"blocks.{layer}.hook_mlp_out" if part(block, "mlp") is not None else None
        for layer, block in enumerate(view._model.blocks)
    ]
    z = [f"blocks.{layer}.attn.hook_z" for layer in range(view.n_layers)]
    ids = torch.arange(8).unsqueeze(0) % view.d_vocab
    names = [*runner.state_hooks, *embeds, *added, *z, *(mlp for mlp in mlps if mlp)]
    ids, names = ids[:, : view.n_ctx], list(dict.fromkeys(names))
    with without_hooks(view._model):
        seen = view.activations(ids, names)
    activations, u = {name: upcast(x) for name, x in seen.items()}, view._layers.roundoff
    blocks = [_block(view, layer, activations, mlp, u) for layer, mlp in enumerate(mlps)]
    return Writing(*_embedding(view, activations, embeds, added, u), tuple(blocks), activations)


def _tolerance(roundoff: float, h: Tensor) -> float:
    """Far above rounding (of sums of three parts, each rounded by itself, and 1e-5 for streams near
    zero), far below another norm or a missing bias."""
    return 8 * reconstruction_bound(roundoff, float(h.abs().max())) + 1e-5


def _embedding(
    view: ModelView,
    activations: Mapping[str, Tensor],
    embeds: list[str],
    added: list[str],
    roundoff: float,
) -> tuple[tuple[tuple[str, str], ...], NormWeights | None]:
    """The embeddings that sum to the first state, as many as possible, and the norm behind them."""
    h = activations[view.state_hooks[0]]
    model = view._model
    module = part(model, "embed_ln") or part(part(model, "embed"), "ln")
    norms = [None, *norms_of(module, model.cfg, h[0, 0])]
    for count, norm, embed in product(range(len(added), -1, -1), norms, embeds):
        hooks = [embed, *added[:count]]
        total = sum((activations[name] for name in hooks), torch.zeros_like(h))
        total = total if norm is None else norm.apply(total)
        if float((total - h).abs().max()) <= _tolerance(roundoff, h):
            return tuple(zip(("embed", "pos_embed"), hooks)), norm
    return fail(
        f"embeddings of {view.name}",
        expected="a sum of token and position embeddings, perhaps normed",
        got="another first state",
        instead="parts of your own, split_scores(..., parts={name: tensor})",
        error=UnsupportedModelError,
    )


def _block(
    view: ModelView,
    layer: int,
    activations: Mapping[str, Tensor],
    mlp: str | None,
    roundoff: float,
) -> BlockWriting:
    """The candidate for a block that reproduces its output."""
    h = activations[f"blocks.{layer}.hook_resid_pre"]
    after = activations[view.state_hooks[layer + 1]]
    attention = attention_of(view, layer, activations)
    mlp_out = torch.zeros_like(h) if mlp is None else activations[mlp]
    block = view._model.blocks[layer]
    b_out = part(part(block, "mlp"), "b_out")
    b_out = h.new_zeros(h.shape[-1]) if b_out is None else upcast(b_out).to(h)
    candidates: list[tuple[Tensor, BlockWriting]] = []
    # OLMo 2 calls the norm behind attention ln1
    modules, cfg = (part(block, name) for name in ("ln1_post", "ln1")), view._model.cfg
    behind = [norm for module in modules for norm in norms_of(module, cfg, h[0, 0])]
    for norm in (None, *behind):
        total = h + (attention if norm is None else norm.apply(attention)) + mlp_out
        # such models have a norm behind the MLP too, whose output its hook holds: b_out, in front
        # of that norm, cannot be separated
        bias = b_out if norm is None else torch.zeros_like(b_out)
        candidates.append((total - after, BlockWriting(norm, mlp, bias)))
    # errors are divided by the size of their token, then averaged: one token of enormous norm
    # rounds by more than attention writes. min() takes the first of equal candidates. 1e-30 stands
    # for the size of a token of zeros
    size = after.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    error, best = min(candidates, key=lambda pair: float((pair[0] / size).abs().mean()))
    if float(error.abs().max()) <= _tolerance(roundoff, after):
        return best
    return fail(
        f"block {layer} of {view.name}",
        expected="the sum of its heads, its MLP and its input, with or without norms behind them",
        got="another output",
        instead="parts of your own, split_scores(..., parts={name: tensor})",
        error=UnsupportedModelError,
    )
