"""Which HookedTransformer configuration holds a Gemma 2, Gemma 3 or OLMo 2 model of any size?
TransformerLens 3 knows these families by official name only;
:mod:`tl_geometry.models.loaders` calls :func:`hooked_config` for all others."""

from __future__ import annotations

from typing import Any

import torch

BY_HAND = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM")
"""Architectures handled here."""


def hooked_config(hf_model: Any, *, fold_ln: bool, dtype: torch.dtype) -> Any:
    """A ``HookedTransformerConfig`` for a model of one of the families ``BY_HAND``."""
    from transformer_lens import HookedTransformerConfig

    architecture, source = type(hf_model).__name__, hf_model.config
    gemma = architecture.startswith("Gemma")
    heads, key_heads = source.num_attention_heads, source.num_key_value_heads
    d_head = getattr(source, "head_dim", None) or source.hidden_size // heads
    full = ["full_attention"] * source.num_hidden_layers
    layer_types = getattr(source, "layer_types", None) or full
    settings: dict[str, Any] = {
        "d_model": source.hidden_size,
        "d_head": d_head,
        "n_heads": heads,
        "n_key_value_heads": None if key_heads == heads else key_heads,
        "d_mlp": source.intermediate_size,
        "n_layers": source.num_hidden_layers,
        "n_ctx": source.max_position_embeddings,
        "d_vocab": source.vocab_size,
        "eps": source.rms_norm_eps,
        "act_fn": getattr(source, "hidden_activation", None) or source.hidden_act,
        # OLMo 2 has its norms after the blocks: they cannot be folded into what follows
        "normalization_type": "RMSPre" if fold_ln and gemma else "RMS",
        "positional_embedding_type": "rotary",
        "rotary_dim": d_head,
        "rotary_base": _base(source, "full_attention"),
        "attn_types": ["local" if t == "sliding_attention" else "global" for t in layer_types],
        "gated_mlp": True,
        "original_architecture": architecture,
        "init_weights": False,
        "device": str(hf_model.device),
        "dtype": dtype,
    }
    if gemma:
        settings |= {
            "window_size": source.sliding_window,
            "use_local_attn": True,
            # HookedTransformer divides scores by this number
            "attn_scale": source.query_pre_attn_scalar**0.5,
            # its caps are -1 where there is none
            "attn_scores_soft_cap": source.attn_logit_softcapping or -1.0,
            "output_logits_soft_cap": source.final_logit_softcapping or -1.0,
            "final_rms": True,
            "use_normalization_before_and_after": True,
        }
    if architecture == "Gemma3ForCausalLM":
        settings |= {"use_qk_norm": True, "rotary_base_local": _base(source, "sliding_attention")}
    return HookedTransformerConfig(**settings)


def _base(source: Any, kind: str) -> float:
    """Rotary base of the layers of one kind (their entry in ``layer_types``); 10000 is what
    transformers takes where a configuration names none."""
    rope = getattr(source, "rope_parameters", None) or {}
    rope = rope.get(kind, rope)  # by kind, where kinds differ
    return float(rope.get("rope_theta", 10000.0))
