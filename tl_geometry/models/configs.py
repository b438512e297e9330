"""HookedTransformer configurations for families that TransformerLens 3 reads by official name only,
from any Hugging Face configuration."""

from __future__ import annotations

from typing import Any

import torch

BY_HAND = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM")
"""Architectures handled here."""


def hooked_config(hf_model: Any, *, fold_ln: bool, dtype: torch.dtype) -> Any:
    """A ``HookedTransformerConfig`` for a model of one of the families ``BY_HAND``."""
    from transformer_lens import HookedTransformerConfig

    architecture, source = type(hf_model).__name__, hf_model.config
    gemma, newer = architecture.startswith("Gemma"), architecture == "Gemma3ForCausalLM"
    kinds = getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers
    # a norm after the block cannot be folded into what follows
    norm = "RMSPre" if fold_ln and gemma else "RMS"
    settings: dict[str, Any] = {
        "d_model": source.hidden_size,
        "d_head": getattr(source, "head_dim", None)
        or source.hidden_size // source.num_attention_heads,
        "n_heads": source.num_attention_heads,
        "n_key_value_heads": None
        if source.num_key_value_heads == source.num_attention_heads
        else source.num_key_value_heads,
        "d_mlp": source.intermediate_size,
        "n_layers": source.num_hidden_layers,
        "n_ctx": source.max_position_embeddings,
        "d_vocab": source.vocab_size,
        "eps": source.rms_norm_eps,
        "act_fn": getattr(source, "hidden_activation", None) or source.hidden_act,
        "normalization_type": norm,
        "positional_embedding_type": "rotary",
        "rotary_base": _base(source, "full_attention"),
        "attn_types": ["local" if kind == "sliding_attention" else "global" for kind in kinds],
        "gated_mlp": True,
        "original_architecture": architecture,
        "init_weights": False,
        "device": str(hf_model.device),
        "dtype": dtype,
    }
    settings["rotary_dim"] = settings["d_head"]
    if gemma:
        settings |= {
            "window_size": source.sliding_window,
            "use_local_attn": True,
            "attn_scale": source.query_pre_attn_scalar**0.5,
            "attn_scores_soft_cap": source.attn_logit_softcapping or -1.0,
            "output_logits_soft_cap": source.final_logit_softcapping or -1.0,
            "final_rms": True,
            "use_normalization_before_and_after": True,
        }
    if newer:
        settings |= {"use_qk_norm": True, "rotary_base_local": _base(source, "sliding_attention")}
    return HookedTransformerConfig(**settings)


def _base(source: Any, kind: str) -> float:
    """Rotary base, of one kind of layer where kinds differ."""
    given = getattr(source, "rope_parameters", None) or {}
    given = given.get(kind, given)
    return float(given.get("rope_theta", 10000.0))
