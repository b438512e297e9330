"""Tiny models of every architecture with all parameters random (gains and biases too) and real
attention, built offline.

A freshly initialised model has unit gains, zero biases and near-uniform attention, on which most
mistakes leave no trace. :func:`tiny` therefore redraws every parameter and asserts that attention
is real.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from tl_geometry.models import from_hf, view
from tl_geometry.models.layer_view import LayerView

HAS_HOOKED = importlib.util.find_spec("transformer_lens.HookedTransformer") is not None
"""Whether the installed TransformerLens has HookedTransformer and HookedEncoder (3.x)."""
KIND = ("hooked", "HookedTransformer") if HAS_HOOKED else ("bridge", "TransformerBridge")
"""A model class, as users ask for it and by its name: not the default one where there are two."""
D, HEADS, VOCAB, CTX = 32, 4, 61, 64
_PLAIN = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 64,
}
_PLAIN |= {"max_position_embeddings": CTX, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": D,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": CTX,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GROUPED = {"num_key_value_heads": 2}
_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt2-inverse-layer": ("GPT2LMHeadModel", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("LlamaForCausalLM", _PLAIN | _GROUPED),
    "llama3-rope": (
        "LlamaForCausalLM",
        _PLAIN | _GROUPED | {"rope_parameters": _LLAMA3 | {"original_max_position_embeddings": 16}},
    ),
    "llama-yarn": ("LlamaForCausalLM", _PLAIN | _GROUPED | {"rope_parameters": _YARN}),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": D, "n_layer": 2, "n_head": HEADS, "bos_token_id": 0},
    ),
    "bloom6": (
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 6, "bos_token_id": 0},
    ),
    "mpt": (
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": D, "n_layers": 2, "n_heads": HEADS, "max_seq_len": CTX},
    ),
    "neox": ("GPTNeoXForCausalLM", _PLAIN | {"rotary_pct": 0.5, "use_parallel_residual": True}),
    "neox-sequential": (
        "GPTNeoXForCausalLM",
        _PLAIN | {"rotary_pct": 0.5, "use_parallel_residual": False},
    ),
    "mistral": ("MistralForCausalLM", _PLAIN | _GROUPED | {"sliding_window": 6, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", _PLAIN | _GROUPED),
    "qwen3": ("Qwen3ForCausalLM", _PLAIN | _GROUPED | {"head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        _PLAIN | _GROUPED | _LAYERS | {"head_dim": 8, "query_pre_attn_scalar": 5},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        _PLAIN | _GROUPED | _LAYERS | {"head_dim": 8, "query_pre_attn_scalar": 5},
    ),
    "olmo2": ("Olmo2ForCausalLM", _PLAIN | {"num_key_value_heads": HEADS}),
    "olmo2-grouped": ("Olmo2ForCausalLM", _PLAIN | _GROUPED),
    "phi": ("PhiForCausalLM", _PLAIN | {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", _PLAIN | _GROUPED),
    "cohere": ("CohereForCausalLM", _PLAIN | _GROUPED),
    "cohere-qk-norm": ("CohereForCausalLM", _PLAIN | _GROUPED | {"use_qk_norm": True}),
    "gpt-oss": (
        "GptOssForCausalLM",
        _PLAIN
        | _GROUPED
        | _LAYERS
        | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "falcon": (
        "FalconForCausalLM",
        {k: _PLAIN[k] for k in _PLAIN if k != "intermediate_size"} | {"multi_query": True},
    ),
    "falcon-alibi": (
        "FalconForCausalLM",
        {k: _PLAIN[k] for k in _PLAIN if k != "intermediate_size"} | {"alibi": True},
    ),
    "gptj": ("GPTJForCausalLM", _GPT2 | {"rotary_dim": 4}),
    "opt": ("OPTForCausalLM", _PLAIN | {"ffn_dim": 128, "word_embed_proj_dim": D, "dropout": 0.0}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        _PLAIN
        | {
            "intermediate_size": 128,
            "num_layers": 2,
            "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 6,
        },
    ),
    "bert": (
        "BertForMaskedLM",
        _PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "roberta": (
        "RobertaForMaskedLM",
        _PLAIN | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}
"""Name -> Hugging Face class and configuration."""
NOT_HOOKED = (
    "llama-yarn",
    "bloom6",
    "mpt",
    "olmo2-grouped",
    "phi",
    "cohere",
    "cohere-qk-norm",
    "falcon",
    "falcon-alibi",
    "roberta",
)
NOT_BRIDGE_3 = ("cohere", "cohere-qk-norm", "roberta")
_FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv_proj")
_QUERY_KEY = ("q_proj", "k_proj", "query.", "key.", ".q.", ".k.", *_FUSED)


def hf_model(
    architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """The Hugging Face model of an architecture, every parameter redrawn; ``changes`` are other
    settings of its configuration."""
    class_name, settings = ARCHITECTURES[architecture]
    return redrawn(class_name, settings | changes, dtype, seed)


def redrawn(
    class_name: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """A Hugging Face model of any configuration, every parameter redrawn."""
    import transformers

    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # grouped products have no float64
    torch.manual_seed(seed)
    model = model_class(config).to(dtype).eval()
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0, sharpness: float = 2.4) -> None:
    """Redraw every parameter: matrices at the scale of their fan-in, gains around one, biases;
    queries and keys enlarged."""
    generator = torch.Generator().manual_seed(seed)
    offset_gain = "Gemma" in type(model).__name__
    for name, value in model.named_parameters():
        draw = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        value.copy_(_redraw(name, value, draw, offset_gain, sharpness))


def _redraw(name: str, value: Tensor, draw: Tensor, offset_gain: bool, sharpness: float) -> Tensor:
    if value.dim() == 1 or "sinks" in name or ("norm" in name and value.dim() == 2):
        if ("norm" not in name.lower() and "ln_" not in name) or name.endswith("bias"):
            return 0.3 * draw
        size = sharpness if any(s in name for s in ("q_norm", "k_norm")) else 1.0
        return size * (1 + 0.3 * draw) - (1.0 if offset_gain else 0.0)
    fan_in = (
        value.shape[0]
        if "c_attn" in name or "c_proj" in name or "c_fc" in name
        else value.shape[-1]
    )
    if any(part in name for part in ("embed", "wte", "wpe")):
        return draw
    return (
        draw / math.sqrt(fan_in) * (sharpness if any(part in name for part in _QUERY_KEY) else 1.0)
    )


@torch.no_grad()
def randomize_hooked(model: nn.Module, seed: int = 0, sharpness: float = 2.4) -> None:
    """The same for a HookedTransformer made from a configuration: names and layouts of its own."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.named_parameters():
        draw = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        last = name.split(".")[-1]
        if last in ("w", "b") or last.startswith("b_"):
            value.copy_(1 + 0.3 * draw if last == "w" else 0.3 * draw)
        elif "embed" in name and last != "W_U":
            value.copy_(draw)
        else:
            value.copy_(
                draw
                / math.sqrt(value.shape[-2])
                * (sharpness if last in ("W_Q", "W_K", "_W_K") else 1.0)
            )


def tokens(batch: int = 2, length: int = 16, seed: int = 1) -> Tensor:
    """Random token ids ``[batch position]``."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def refusal(model_class: str, architecture: str, processed: bool = False) -> str | None:
    """Why the installed TransformerLens cannot hold a model, as far as is known, else ``None``."""
    if model_class == "hooked" and not HAS_HOOKED:
        return "TransformerLens 4 has no HookedTransformer"
    if model_class == "hooked" and architecture in NOT_HOOKED:
        return "HookedTransformer cannot hold it, or computes other outputs than Hugging Face"
    if HAS_HOOKED and model_class == "bridge" and architecture in NOT_BRIDGE_3:
        return (
            "the bridge of TransformerLens 3 cannot hold it, or computes other outputs "
            "than Hugging Face"
        )
    if processed and architecture == "gpt-oss":
        return "folding norms into a mixture of experts changes its outputs"
    return None


def loadable(architecture: str) -> list[tuple[str, bool]]:
    """(model_class, processed): every way in which the installed version holds an architecture."""
    ways = itertools.product(("bridge", "hooked"), (False, True))
    return [
        (model_class, processed)
        for model_class, processed in ways
        if refusal(model_class, architecture, processed) is None
    ]


def tiny(
    model_class: str, architecture: str, processed: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """A tiny model, ``"bridge"`` or ``"hooked"``, the same weights in both; built once, so do not
    edit it."""
    return _tiny(model_class, architecture, processed, dtype)


@cache
def _tiny(model_class: str, architecture: str, processed: bool, dtype: torch.dtype) -> Any:
    model = from_hf(
        hf_model(architecture, dtype),
        None,
        model_class=model_class,
        processed=processed,
        name=f"tiny-{architecture}",
        dtype=dtype,
    )
    assert_real_attention(model)
    return model


def tiny_hooked(**settings: Any) -> Any:
    """A HookedTransformer from a configuration, for what no Hugging Face family has
    (TransformerLens 3 only)."""
    import transformer_lens

    base: dict[str, Any] = {
        "d_model": D,
        "d_head": 8,
        "n_heads": HEADS,
        "n_layers": 2,
        "n_ctx": CTX,
        "d_vocab": VOCAB,
    }
    base |= {"d_mlp": 64, "act_fn": "gelu", "seed": 0} | settings
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # HookedTransformer says that it goes in 4.0
        model = transformer_lens.HookedTransformer(transformer_lens.HookedTransformerConfig(**base))
    randomize_hooked(model)
    assert_real_attention(model)
    return model


def tiny_native(norm: str, position: str) -> Any:
    """TransformerLens's own architecture in a bridge."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    sizes: dict[str, Any] = {
        "d_model": D,
        "d_head": 8,
        "n_heads": HEADS,
        "n_layers": 2,
        "n_ctx": CTX,
        "d_vocab": VOCAB,
    }
    sizes |= {"d_mlp": 64, "act_fn": "gelu"}
    config: Any = TransformerBridgeConfig
    model = TransformerBridge.boot_native(
        config(**sizes, normalization_type=norm, positional_embedding_type=position)
    )
    randomize(model.original_model, sharpness=6.0)
    model.eval()
    assert_real_attention(model)
    return model


def assert_real_attention(model: Any) -> None:
    """Scores reach 10 and the pattern's entropy is below 0.8 of uniform: near-uniform attention
    hides mistakes."""
    sizes: list[float] = []
    entropies: list[tuple[float, float]] = []

    def look(layer: LayerView) -> None:
        scores = torch.einsum("bihe,bjhe->bhij", layer.q, layer.k) * layer.scale
        sizes.append(float(torch.where(layer.allowed, scores, 0.0).abs().max()))
        assert layer.pattern is not None
        p = layer.pattern.double()
        entropies.append(
            (
                float(-torch.special.xlogy(p, p).sum(-1).mean()),
                float(layer.allowed.sum(-1).double().log().mean()),
            )
        )

    seen = view(model)
    seen.run_layers(tokens(), range(seen.n_layers), look)
    assert max(sizes) >= 10, sizes
    assert sum(e for e, _ in entropies) < 0.8 * sum(u for _, u in entropies), entropies
