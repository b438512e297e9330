"""Which 32 architectures are tested, and with which sizes? Hugging Face class and configuration of
each, and which class of TransformerLens holds it. :mod:`tests.lib.models` builds them."""

from __future__ import annotations

from typing import Any

D, HEADS, VOCAB, CTX = 32, 4, 61, 64

_SHARED = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1}
_PLAIN = _SHARED | {
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
    "max_position_embeddings": CTX,
    "pad_token_id": 2,
}
_GPT2 = _SHARED | {"n_embd": D, "n_layer": 2, "n_head": HEADS, "n_positions": CTX}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BLOOM = {"vocab_size": VOCAB, "n_layer": 2, "bos_token_id": 0}
_MPT = {"vocab_size": VOCAB, "d_model": D, "n_layers": 2, "n_heads": HEADS, "max_seq_len": CTX}
_GROUPED = _PLAIN | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 8}
_MIXED = _WIDE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_GEMMA = _MIXED | {"query_pre_attn_scalar": 5}
_GRANITE = {"residual_multiplier": 0.4, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
_GRANITE |= {"attention_multiplier": 0.35}
_NEOX = _PLAIN | {"rotary_pct": 0.5}
_FALCON = {name: value for name, value in _PLAIN.items() if name != "intermediate_size"}
_ROPE = {"rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = _ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_NEO = {"intermediate_size": 128, "num_layers": 2, "num_heads": HEADS, "window_size": 6}
_NEO |= {"attention_types": [[["global", "local"], 1]]}
_OPT = {"ffn_dim": 128, "word_embed_proj_dim": D, "dropout": 0.0}
_BERT = _PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-inverse-layer": ("GPT2LMHeadModel", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "llama3-rope": ("LlamaForCausalLM", _GROUPED | {"rope_parameters": _LLAMA3}),
    "llama-yarn": (
        "LlamaForCausalLM",
        _GROUPED | {"rope_parameters": _ROPE | {"rope_type": "yarn"}},
    ),
    "smollm3": ("SmolLM3ForCausalLM", _GROUPED | {"no_rope_layers": [1, 0]}),
    "bloom": ("BloomForCausalLM", _BLOOM | {"hidden_size": D, "n_head": HEADS}),
    "bloom6": ("BloomForCausalLM", _BLOOM | {"hidden_size": 48, "n_head": 6}),
    "mpt": ("MptForCausalLM", _MPT),
    "neox": ("GPTNeoXForCausalLM", _NEOX | {"use_parallel_residual": True}),
    "neox-sequential": ("GPTNeoXForCausalLM", _NEOX | {"use_parallel_residual": False}),
    "mistral": ("MistralForCausalLM", _WIDE | {"sliding_window": 6}),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _WIDE),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA),
    "olmo2": ("Olmo2ForCausalLM", _PLAIN | {"num_key_value_heads": HEADS}),
    "olmo2-grouped": ("Olmo2ForCausalLM", _GROUPED),
    "phi": ("PhiForCausalLM", _PLAIN | {"partial_rotary_factor": 0.5}),
    "stablelm": ("StableLmForCausalLM", _GROUPED | {"qk_layernorm": True}),
    "granite": ("GraniteForCausalLM", _GROUPED | _GRANITE),
    "phi3": ("Phi3ForCausalLM", _GROUPED),
    "cohere": ("CohereForCausalLM", _GROUPED),
    "cohere-qk-norm": ("CohereForCausalLM", _GROUPED | {"use_qk_norm": True}),
    "gpt-oss": ("GptOssForCausalLM", _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "falcon": ("FalconForCausalLM", _FALCON | {"multi_query": True}),
    "falcon-alibi": ("FalconForCausalLM", _FALCON | {"alibi": True}),
    "gptj": ("GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}),
    "opt": ("OPTForCausalLM", _PLAIN | _OPT),
    "gpt-neo": ("GPTNeoForCausalLM", _PLAIN | _NEO),
    "bert": ("BertForMaskedLM", _BERT),
    "roberta": ("RobertaForMaskedLM", _BERT),
}
"""Name -> Hugging Face class and configuration."""

BY_HAND = ("gemma2", "gemma3", "olmo2")
"""TransformerLens 3 has HookedTransformer configurations of these by official name only."""
NOT_HOOKED = (
    *("llama-yarn", "smollm3", "bloom6", "mpt", "olmo2-grouped", "phi", "stablelm", "granite"),
    *("cohere", "cohere-qk-norm", "falcon", "falcon-alibi", "bert", "roberta"),
)
"""What HookedTransformer cannot hold, or computes otherwise than Hugging Face."""
NOT_BRIDGE_3 = ("cohere", "cohere-qk-norm", "roberta")
"""The same of the bridge of TransformerLens 3."""
ENCODERS = ("bert", "roberta")
"""Attention goes both ways in these."""
