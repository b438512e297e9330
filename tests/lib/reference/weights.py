"""The weights of a Hugging Face model in the layout of the explicit decoder
(:mod:`tests.lib.reference.decoder`): matrices act from the right, by head, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.lib.reference.decoder import Block, Decoder, Norm


def decoder_of(hf: Any) -> Decoder:
    """The decoder of a model of one of four families."""
    readers = {"GPT2LMHeadModel": _gpt2, "BloomForCausalLM": _bloom}
    readers |= dict.fromkeys(("LlamaForCausalLM", "Gemma2ForCausalLM"), _llama)
    return readers[type(hf).__name__](hf)


def _double(weight: Tensor) -> Tensor:
    return weight.detach().double()


def _gelu(x: Tensor) -> Tensor:
    """GELU by tanh (BLOOM's own code has 0.79788456 for sqrt(2 / pi), off by 1e-9)."""
    return functional.gelu(x, approximate="tanh")


def _norm(module: Any, *, centred: bool, offset: float = 0.0) -> Norm:
    gain = _double(module.weight) + offset
    bias = getattr(module, "bias", None)
    eps = getattr(module, "variance_epsilon", None) or module.eps
    zero = torch.zeros_like(gain)
    return Norm(gain, zero if bias is None else _double(bias), float(eps), centred)


def _by_head(weight: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """``[d out]`` as ``[h d e]``, and the bias ``[h e]``."""
    W = _double(weight).unflatten(1, (heads, -1)).movedim(1, 0)
    b = torch.zeros_like(W[:, 0]) if bias is None else _double(bias).view(heads, -1)
    return W, b


def _gpt2(hf: Any) -> Decoder:
    config, body, blocks = hf.config, hf.transformer, []
    H, d = config.n_head, config.n_embd
    for l, layer in enumerate(body.h):
        attn, mlp, sides = layer.attn, layer.mlp, dict[str, Any]()
        for which, W, b in zip("QKV", attn.c_attn.weight.split(d, 1), attn.c_attn.bias.split(d)):
            sides[f"W_{which}"], sides[f"b_{which}"] = _by_head(W, b, H)
        inverse = l + 1 if config.scale_attn_by_inverse_layer_idx else 1
        blocks.append(
            Block(
                norm=_norm(layer.ln_1, centred=True),
                **sides,
                W_O=_double(attn.c_proj.weight).unflatten(0, (H, -1)),
                b_O=_double(attn.c_proj.bias),
                mlp_norm=_norm(layer.ln_2, centred=True),
                W_gate=_double(mlp.c_fc.weight),
                b_gate=_double(mlp.c_fc.bias),
                W_in=None,
                W_out=_double(mlp.c_proj.weight),
                b_out=_double(mlp.c_proj.bias),
                act=_gelu,
                score_scale=(d // H) ** -0.5 / inverse,
            )
        )
    return Decoder(
        embed=_double(body.wte.weight),
        pos_embed=_double(body.wpe.weight),
        embed_norm=None,
        blocks=tuple(blocks),
        norm=_norm(body.ln_f, centred=True),
        W_U=_double(hf.lm_head.weight).T,
    )


def _bloom(hf: Any) -> Decoder:
    body, blocks, H = hf.transformer, [], hf.config.n_head
    assert H & (H - 1) == 0, "slopes of a power of two heads"
    d = hf.config.hidden_size
    for layer in body.h:
        attn, mlp, sides = layer.self_attention, layer.mlp, dict[str, Any]()
        # fused head by head: [h, (q, k, v), e] along the outputs
        fused = attn.query_key_value
        W = _double(fused.weight).view(H, 3, d // H, d)
        b = _double(fused.bias).view(H, 3, d // H)
        for i, which in enumerate("QKV"):
            sides[f"W_{which}"], sides[f"b_{which}"] = W[:, i].mT, b[:, i]
        blocks.append(
            Block(
                norm=_norm(layer.input_layernorm, centred=True),
                **sides,
                W_O=_double(attn.dense.weight).T.unflatten(0, (H, -1)),
                b_O=_double(attn.dense.bias),
                mlp_norm=_norm(layer.post_attention_layernorm, centred=True),
                W_gate=_double(mlp.dense_h_to_4h.weight).T,
                b_gate=_double(mlp.dense_h_to_4h.bias),
                W_in=None,
                W_out=_double(mlp.dense_4h_to_h.weight).T,
                b_out=_double(mlp.dense_4h_to_h.bias),
                act=_gelu,
                score_scale=(d // H) ** -0.5,
            )
        )
    return Decoder(
        embed=_double(body.word_embeddings.weight),
        pos_embed=None,
        embed_norm=_norm(body.word_embeddings_layernorm, centred=True),
        blocks=tuple(blocks),
        norm=_norm(body.ln_f, centred=True),
        W_U=_double(hf.lm_head.weight).T,
        slopes=2.0 ** (-8 * torch.arange(1, H + 1, dtype=torch.float64) / H),
    )


def _llama(hf: Any) -> Decoder:
    """Llama, and Gemma 2, whose gains are one more than the stored weights."""
    config, body, blocks = hf.config, hf.model, []
    gemma = type(hf).__name__.startswith("Gemma")
    counts = {"Q": config.num_attention_heads, "K": config.num_key_value_heads}
    counts["V"], offset = counts["K"], 1.0 if gemma else 0.0
    e = getattr(config, "head_dim", None) or config.hidden_size // counts["Q"]
    square = config.query_pre_attn_scalar if gemma else e
    for l, layer in enumerate(body.layers):
        attn, mlp, sides = layer.self_attn, layer.mlp, dict[str, Any]()
        for which, heads in counts.items():
            module = getattr(attn, f"{which.lower()}_proj")
            W, b = _by_head(module.weight.T, module.bias, heads)
            sides[f"W_{which}"], sides[f"b_{which}"] = W, b
        before_mlp, more = "post_attention_layernorm", dict[str, Any]()
        if gemma:
            before_mlp, local = "pre_feedforward_layernorm", config.layer_types[l]
            after = (layer.post_attention_layernorm, layer.post_feedforward_layernorm)
            norms = (_norm(module, centred=False, offset=offset) for module in after)
            more |= dict(zip(("after_attention", "after_mlp"), norms))
            more["softcap"] = config.attn_logit_softcapping
            more["window"] = config.sliding_window if local == "sliding_attention" else None
        W_gate, W_out = _double(mlp.gate_proj.weight).T, _double(mlp.down_proj.weight).T
        blocks.append(
            Block(
                norm=_norm(layer.input_layernorm, centred=False, offset=offset),
                **sides,
                W_O=_double(attn.o_proj.weight).T.unflatten(0, (counts["Q"], -1)),
                b_O=torch.zeros(config.hidden_size, dtype=torch.float64),
                mlp_norm=_norm(getattr(layer, before_mlp), centred=False, offset=offset),
                W_gate=W_gate,
                b_gate=torch.zeros_like(W_gate[0]),
                W_in=_double(mlp.up_proj.weight).T,
                W_out=W_out,
                b_out=torch.zeros_like(W_out[0]),
                act=_gelu if gemma else functional.silu,
                score_scale=square**-0.5,
                **more,
            )
        )
    embed = _double(body.embed_tokens.weight)
    return Decoder(
        # sqrt(d_model) as the model holds it: in float32 where it was made so
        embed=embed * _double(body.embed_tokens.embed_scale) if gemma else embed,
        pos_embed=None,
        embed_norm=None,
        blocks=tuple(blocks),
        norm=_norm(body.norm, centred=False, offset=offset),
        W_U=_double(hf.lm_head.weight).T,
        logit_cap=config.final_logit_softcapping if gemma else None,
        rotary_base=float(config.rope_parameters["rope_theta"]),
    )
