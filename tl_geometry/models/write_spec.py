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
from itertools import chain, product
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, no_norm, norms_of
from tl_geometry.models.parameters import added_times, part, upcast
from tl_geometry.models.reconstruction import nearest, reconstruction_bound
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
    ``embeddings`` (name, hook), through a norm or times a number in some families."""

    embeddings: tuple[tuple[str, str], ...]
    embedding_norm: NormWeights
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


def attention_output(
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
    return view.once("writing", lambda: _infer(view))


def require_decoder(view: ModelView, what: str) -> None:
    """Raise ``UnsupportedModelError`` for an encoder; ``what`` was asked of the model."""
    expected = "a decoder, whose blocks add to the stream"
    got = "an encoder, which norms the stream after each addition"
    require(view.causal, what, expected=expected, got=got, error=UnsupportedModelError)


@torch.no_grad()
def _infer(view: ModelView) -> Writing:
    """:func:`writing_of` from one forward pass over eight tokens."""
    require_decoder(view, f"writers of {view.name}")
    points = view._points
    embeds = [name for name in EMBED if name in points]
    in_stream = view.position == "standard"  # other schemes add no positions to the stream
    added = [name for name in POSITION if in_stream and name in points][:1]
    # attention-only blocks of HookedTransformer have the hook, and no MLP
    has_mlp = [part(block, "mlp") is not None for block in view._model.blocks]
    mlps = [hook if has else None for hook, has in zip(view.mlp_hooks, has_mlp, strict=True)]
    names = [*view.state_hooks, *embeds, *added, *view.z_hooks, *(mlp for mlp in mlps if mlp)]
    ids = torch.arange(min(8, view.n_ctx)).unsqueeze(0) % view.d_vocab
    with without_hooks(view._model):
        seen = view.activations(ids, list(dict.fromkeys(names)))
    probe = {name: upcast(x) for name, x in seen.items()}
    blocks = tuple(_block(view, layer, probe, mlp) for layer, mlp in enumerate(mlps))
    return Writing(*_embedding(view, probe, embeds, added), blocks, probe)


def _require_sum(view: ModelView, gap: Tensor, h: Tensor, what: str) -> None:
    """Refuse a stream that no candidate gives. What is allowed is far above rounding (of sums of
    three parts, each rounded by itself, and 1e-5 for streams near zero), far below another norm or
    a missing bias."""
    bound = 8 * reconstruction_bound(view.roundoff, float(h.abs().max())) + 1e-5
    expected = "a sum of what embeddings, heads and MLPs write, perhaps each normed"
    got, fits = f"a stream that is off by {float(gap.abs().max()):.2g}", gap.abs().max() <= bound
    instead = "parts of your own, split_scores(..., parts={name: tensor})"
    what, error = f"{what} of {view.name}", UnsupportedModelError
    require(fits, what, expected=expected, got=got, instead=instead, error=error)


def _embedding(
    view: ModelView, probe: Mapping[str, Tensor], embeds: list[str], added: list[str]
) -> tuple[tuple[tuple[str, str], ...], NormWeights]:
    """The embeddings that sum to the first state, as many as possible, and the norm behind them."""
    h, model = probe[view.state_hooks[0]], view._model
    module = part(model, "embed_ln") or part(part(model, "embed"), "ln")
    config = getattr(part(model, "original_model"), "config", None)
    times = float(part(config, "embedding_multiplier") or 1)  # Granite
    plain = [no_norm(h[0, 0], number) for number in dict.fromkeys((1.0, times))]
    norms = [*plain, *norms_of(module, model.cfg, h[0, 0])]

    def gap(hooks: list[str], norm: NormWeights) -> Tensor:
        return norm.apply(sum((probe[name] for name in hooks), torch.zeros_like(h))) - h

    # OPT projects embeddings of another width into the stream
    embeds = [name for name in embeds if probe[name].shape[-1] == h.shape[-1]]
    counts = range(len(added), -1, -1)
    ways = [([e, *added[:n]], norm) for n, norm, e in product(counts, norms, embeds)]
    tried = ((way, float(gap(*way).abs().max())) for way in ways)
    (hooks, norm), _ = nearest(chain([(([], norms[0]), torch.inf)], tried))
    _require_sum(view, gap(hooks, norm), h, "embeddings")
    return tuple(zip(("embed", "pos_embed"), hooks)), norm


def _block(
    view: ModelView, layer: int, probe: Mapping[str, Tensor], mlp: str | None
) -> BlockWriting:
    """The candidate for a block that reproduces its output."""
    h, after = probe[f"blocks.{layer}.hook_resid_pre"], probe[view.state_hooks[layer + 1]]
    attention, block = attention_output(view, layer, probe), view._model.blocks[layer]
    rest = after - h - (0 if mlp is None else probe[mlp])

    def gap(norm: NormWeights | None) -> Tensor:
        return (attention if norm is None else norm.apply(attention)) - rest

    # OLMo 2 calls the norm behind attention ln1
    modules, cfg = (part(block, name) for name in ("ln1_post", "ln1")), view._model.cfg
    norms = [None, *(norm for module in modules for norm in norms_of(module, cfg, h[0, 0]))]
    # errors are divided by the size of their token, then averaged: one token of enormous norm
    # rounds by more than attention writes. 1e-30 stands for the size of a token of zeros
    size = after.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    norm, _ = nearest((norm, float((gap(norm) / size).abs().mean())) for norm in norms)
    _require_sum(view, gap(norm), after, f"block {layer}")
    # models with a norm behind attention have one behind the MLP too, whose output its hook holds:
    # b_out, in front of that norm, cannot be separated
    b_out = part(part(block, "mlp"), "b_out") if norm is None else None
    b_out = h.new_zeros(h.shape[-1]) if b_out is None else upcast(b_out).to(h)
    return BlockWriting(norm, mlp, b_out * added_times(block))
