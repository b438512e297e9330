"""A hand-built induction model whose every score is known, and a rotary model whose only pattern is
the previous token.

The stream has three orthogonal subspaces of one-hot vectors: the token, the position, and the token
before. Each one-hot is a pair (+1, -1), so that the mean over d_model is zero and a LayerNorm only
rescales. Two blocks of attention, no MLP:

1. head 0 of block 0 matches the query's position i with key position i - 1 and copies the token
   there into "token before";
2. head 0 of block 1 matches the query's token with the key's "token before" and copies the key's
   token to the output.

On a repeated sequence the second head attends to the token that followed the query's token: an
induction head.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.lib.models import bridge_of, hooked_of
from tl_geometry.models import from_hf

VOCAB, CONTEXT, HEADS = 12, 24, 4
D_HEAD = 24
D = HEADS * D_HEAD
TOKEN, POSITION, BEFORE = 0, 2 * VOCAB, 2 * (VOCAB + CONTEXT)
SHARPNESS = 25.0
"""Score of a match over a mismatch in block 0, where every token has the same norm."""
COPIED = 3.0
"""Size of the copied token over that of the current one."""
BOS = 0


def one_hot(start: int, size: int) -> Tensor:
    """Rows of one-hot pairs (+1, -1) from coordinate ``start``: ``[size, D]``."""
    rows = torch.zeros(size, D)
    index = torch.arange(size)
    rows[index, start + 2 * index], rows[index, start + 2 * index + 1] = 1, -1
    return rows


@torch.no_grad()
def hugging_face(slope: float = 0.0) -> Any:
    """The model as a GPT2LMHeadModel whose MLPs are zero; ``slope`` is what the score of head 0 of
    block 1 rises by from the first position to the last, besides the match."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=D,
        n_layer=2,
        n_head=HEADS,
        bos_token_id=BOS,
        eos_token_id=BOS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=1e-12,
    )
    config._attn_implementation = "eager"
    model: Any = transformers.GPT2LMHeadModel(config).eval()
    for name, value in model.named_parameters():
        value.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
    token, position, before = (
        one_hot(TOKEN, VOCAB),
        one_hot(POSITION, CONTEXT),
        one_hot(BEFORE, VOCAB),
    )
    model.transformer.wte.weight.copy_(token)
    model.transformer.wpe.weight.copy_(position)
    scale = D / 4  # square of one over the norm scale of block 0: each token has squared norm 4
    strength = math.sqrt(SHARPNESS * math.sqrt(D_HEAD) / (4 * scale))
    first, second = (block.attn for block in model.transformer.h)
    first.c_attn.weight[:, :CONTEXT] = position.T * strength
    first.c_attn.weight[:, D : D + CONTEXT] = (
        position.roll(1, 0).T * strength
    )  # key j answers to query position j + 1
    first.c_attn.weight[:, D] = 0  # no key comes before the first query
    first.c_attn.weight[:, 2 * D : 2 * D + VOCAB] = token.T / 2
    first.c_proj.weight[:VOCAB] = before / math.sqrt(
        scale
    )  # undoes the norm scale: "token before" has size one
    second.c_attn.weight[:, :VOCAB] = token.T * strength
    second.c_attn.weight[:, D : D + VOCAB] = before.T * strength
    second.c_attn.weight[:, 2 * D : 2 * D + VOCAB] = token.T / 2
    second.c_proj.weight[:VOCAB] = token * COPIED / math.sqrt(D / 6)
    # a coordinate of its own: a constant query, a key that rises with the position
    second.c_attn.bias[VOCAB] = 1.0
    rise = slope * math.sqrt(D_HEAD) * torch.linspace(0, 1, CONTEXT)
    second.c_attn.weight[:, D + VOCAB] = rise @ position / (2 * math.sqrt(D / 6))
    return model


@cache
def induction_model(model_class: str = "bridge", slope: float = 0.0) -> Any:
    """The model as a TransformerBridge or a HookedTransformer."""
    make = bridge_of if model_class == "bridge" else hooked_of
    return make(hugging_face(slope), name="hand-built")


@cache
def attention_only() -> Any:
    """The same weights as an attention-only HookedTransformer without norms (TransformerLens 3):
    scores differ by the norm scales."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=2,
        d_model=D,
        n_ctx=CONTEXT,
        d_head=D_HEAD,
        n_heads=HEADS,
        d_vocab=VOCAB,
        attn_only=True,
        normalization_type=None,
    )
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # HookedTransformer ends with TransformerLens 3
        model: Any = HookedTransformer(config).eval()
    hf = hugging_face().transformer
    scale = math.sqrt(D / 4)
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
        model.embed.W_E.copy_(hf.wte.weight)
        model.pos_embed.W_pos.copy_(hf.wpe.weight)
        model.unembed.W_U.copy_(6 * hf.wte.weight.T)
        for block, source in zip(model.blocks, hf.h, strict=True):
            q, k, v = (
                source.attn.c_attn.weight[:, i * D : (i + 1) * D]
                .reshape(D, HEADS, D_HEAD)
                .permute(1, 0, 2)
                for i in range(3)
            )
            block.attn.W_Q.copy_(q * scale)
            block.attn.W_K.copy_(k * scale)
            block.attn.W_V.copy_(v * scale)
            block.attn.W_O.copy_(source.attn.c_proj.weight.reshape(HEADS, D_HEAD, D))
    return model


def prompts(batch: int, period: int = 7, seed: int = 0) -> Tensor:
    """BOS, then distinct random tokens repeated: ``[batch, 1 + 3 period]``, at most 24 of them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.stack(
        [1 + torch.randperm(VOCAB - 1, generator=generator)[:period] for _ in range(batch)]
    )
    return torch.cat([torch.full((batch, 1), BOS), rows.repeat(1, 3)], 1)


def corpus(batch: int = 64, length: int = 22, seed: int = 1) -> Tensor:
    """BOS, then independent random tokens."""
    rows = torch.randint(
        1, VOCAB, (batch, length - 1), generator=torch.Generator().manual_seed(seed)
    )
    return torch.cat([torch.full((batch, 1), BOS), rows], 1)


@torch.no_grad()
def rotary_previous_token(offset: float = 1.0, planes: Sequence[int] = range(4)) -> Any:
    """A Qwen2-style rotary bridge: head 0 of block 0 has constant queries and keys,
    ``score = c sum_f cos((i - j - offset) w_f)`` over the frequencies of ``planes``."""
    import transformers

    from tests.lib.models import ARCHITECTURES, randomize

    settings = ARCHITECTURES["qwen2"][1] | {
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 4.0},
    }
    config = transformers.Qwen2Config(**settings)
    config._attn_implementation = "eager"
    model: Any = transformers.Qwen2ForCausalLM(config).eval()
    randomize(model)
    attn, size = model.model.layers[0].self_attn, D_ROTARY
    angles = 4.0 ** (-torch.arange(size // 2) * 2 / size)
    kept = torch.zeros(size // 2).index_fill_(0, torch.tensor(list(planes)), 6.0)
    for projection, turn in ((attn.q_proj, 0.0), (attn.k_proj, offset)):
        projection.weight[:size] = 0
        projection.bias[:size] = torch.cat(
            [kept * torch.cos(turn * angles), kept * torch.sin(turn * angles)]
        )
    return from_hf(model, None, name="rotary previous-token")


D_ROTARY = 8
"""Width of a head of :func:`rotary_previous_token`."""
