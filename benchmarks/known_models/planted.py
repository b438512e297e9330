"""Which weights give a head a known reason to attend? Parts of models whose heads are planted by
hand, without training. ``planted_heads``, ``planted_circuit`` and ``planted_retrieval`` use them.

The stream has orthonormal directions ``E [column d_model]``. They are drawn at random and
orthogonal to the vector of ones, so that the centring of a LayerNorm changes nothing. Tokens and
positions are sums of a few of them. If the squared norm of a state x is n, a norm with random gains
g and biases b gives ``g sqrt(d_model / n) x + b``. A head that is to read ``x E^T A`` undoes this
with the weights

    W = diag(1 / g) E^T A sqrt(n / d_model),    constant = -b W

GPT-2 (learned positions, LayerNorm) and Qwen2 (rotary positions, RMSNorm, biases of queries and
keys) are built the same way; their MLPs are zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

VOCAB, LENGTH = 16, 24
"""Token ids (0 is BOS) and positions of every planted model."""
D_ROTARY, THETA = 64, 1e8
"""Width of a rotary head, and base of its frequencies ``THETA ** (-2 f / D_ROTARY)`` in plane f.
Both are so large that at least VOCAB planes are slow."""
SLOW = 12
"""First plane that turns by less than 0.03 radians within LENGTH positions. From this plane on,
rotation hardly changes a score, so these planes carry content."""


class HeadWeights:
    """What one head reads and writes in the planted directions (columns). It begins as a head that
    attends evenly and writes nothing; its tensors are filled in place.

    ``query``, ``key`` and ``value`` are ``[column d_head]``, the constants ``query_bias`` and
    ``key_bias`` are ``[d_head]``, and ``out`` is ``[d_head column]``.
    """

    def __init__(self, columns: int, d_head: int) -> None:
        self.query, self.key, self.value = (torch.zeros(columns, d_head) for _ in range(3))
        self.out = torch.zeros(d_head, columns)
        self.query_bias, self.key_bias = torch.zeros(d_head), torch.zeros(d_head)


def directions(
    columns: int, d_model: int, generator: torch.Generator
) -> Float[Tensor, "column d_model"]:
    """Random orthonormal rows, orthogonal to the vector of ones.

    >>> rows = directions(3, 8, torch.Generator().manual_seed(0))
    >>> torch.allclose(rows @ rows.T, torch.eye(3), atol=1e-6), bool(rows.sum(1).abs().max() < 1e-5)
    (True, True)
    """
    drawn = torch.randn(d_model, columns, generator=generator, dtype=torch.float64)
    # the vector of ones comes first: all other columns of Q are orthogonal to it
    basis = torch.cat([torch.ones(d_model, 1, dtype=torch.float64), drawn], 1)
    return torch.linalg.qr(basis)[0][:, 1:].T.float()


def empty_model(
    positions: str, layers: int, heads: int, d_head: int, vocab: int, length: int
) -> Any:
    """A Hugging Face GPT-2 (``positions="learned"``) or Qwen2 (``"rotary"``) whose parameters are
    zero, with one unused unit in each MLP."""
    import transformers

    d_model = heads * d_head
    # eps is tiny, so that a norm divides by the norm of the stream alone, as `plant` assumes
    if positions == "learned":
        settings: dict[str, Any] = {"n_embd": d_model, "n_layer": layers, "n_head": heads}
        settings |= {"n_inner": 1, "n_positions": length, "layer_norm_epsilon": 1e-12}
        settings |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config_class, model_class = transformers.GPT2Config, transformers.GPT2LMHeadModel
    else:
        settings = {"hidden_size": d_model, "num_hidden_layers": layers, "intermediate_size": 1}
        settings |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        settings |= {"max_position_embeddings": length, "rms_norm_eps": 1e-12}
        settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}
        config_class, model_class = transformers.Qwen2Config, transformers.Qwen2ForCausalLM
    shared: dict[str, Any] = {"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": 0}
    config: Any = config_class(**settings, **shared, tie_word_embeddings=False)
    config._attn_implementation = "eager"
    model: Any = model_class(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    return model


@torch.no_grad()
def plant(
    model: Any,
    layer: int,
    heads: list[HeadWeights],
    basis: Float[Tensor, "column d_model"],
    squared_norm: float,
    generator: torch.Generator,
) -> None:
    """Write heads into a layer of :func:`empty_model`. They undo the random gains (and biases) of
    the norm before them. ``squared_norm`` is that of the states that enter the layer."""
    d_model = basis.shape[1]
    learned = hasattr(model, "transformer")
    block = model.transformer.h[layer] if learned else model.model.layers[layer]
    norm = block.ln_1 if learned else block.input_layernorm
    # random, because with gains 1 and biases 0 a measure that forgets them would still be right
    norm.weight.copy_(1 + 0.3 * torch.rand(d_model, generator=generator))
    if learned:
        norm.bias.copy_(0.3 * torch.randn(d_model, generator=generator))
    # `read` makes W and the constant of the formula at the top of this file
    scale = math.sqrt(squared_norm / d_model)

    def read(side: str) -> tuple[Tensor, Tensor]:
        matrix = basis.T @ torch.cat([getattr(h, side) for h in heads], 1) * scale
        matrix = matrix / norm.weight[:, None]
        constant = -norm.bias @ matrix if learned else matrix.new_zeros(matrix.shape[1])
        if side != "value":
            constant = constant + torch.cat([getattr(h, f"{side}_bias") for h in heads])
        return matrix, constant

    out = torch.cat([h.out for h in heads]) @ basis
    q, k, v = (read(side) for side in ("query", "key", "value"))
    if learned:
        block.attn.c_attn.weight.copy_(torch.cat([q[0], k[0], v[0]], 1))
        block.attn.c_attn.bias.copy_(torch.cat([q[1], k[1], v[1]]))
        block.attn.c_proj.weight.copy_(out)
        return
    for name, (matrix, constant) in zip("qkv", (q, k, v), strict=True):
        projection = getattr(block.self_attn, f"{name}_proj")
        projection.weight.copy_(matrix.T)
        projection.bias.copy_(constant)
    block.self_attn.o_proj.weight.copy_(out.T)


@torch.no_grad()
def embed(
    model: Any,
    tokens: Float[Tensor, "d_vocab d_model"],
    places: Float[Tensor, "position d_model"] | None,
    unembed: Float[Tensor, "d_vocab d_model"],
) -> None:
    """Set the embeddings, the final norm (gain one) and the output head."""
    if places is not None:
        model.transformer.wte.weight.copy_(tokens)
        model.transformer.wpe.weight.copy_(places)
        model.transformer.ln_f.weight.fill_(1.0)
    else:
        model.model.embed_tokens.weight.copy_(tokens)
        model.model.norm.weight.fill_(1.0)
    model.lm_head.weight.copy_(unembed)


def frequencies() -> Float[Tensor, " plane"]:
    """Radians by which each rotary plane turns from one position to the next."""
    return THETA ** (-torch.arange(0, D_ROTARY, 2) / D_ROTARY)
