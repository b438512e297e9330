"""Tiny models of every architecture with ALL parameters random (gains and biases too) and real
attention, built offline by TransformerLens and transformers alone.

A freshly initialised model has unit gains, zero biases and near-uniform attention, on which most
mistakes leave no trace. :func:`tiny` therefore redraws every parameter, asserts that attention is
real, and that TransformerLens computes what Hugging Face does.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from tests.lib.architectures import ARCHITECTURES as ARCHITECTURES
from tests.lib.architectures import BY_HAND, CTX, HEADS, NOT_BRIDGE_3, NOT_HOOKED, VOCAB, D
from tests.lib.architectures import ENCODERS as ENCODERS

HAS_HOOKED = importlib.util.find_spec("transformer_lens.HookedTransformer") is not None
"""Whether the installed TransformerLens has HookedTransformer (3.x)."""
SPREAD, ENTROPY = 15.0, 0.8
"""Real attention: in some row the scores lie this far apart; and the mean entropy of a row is below
this share of that of uniform attention."""
_SIZES = {"d_model": D, "d_head": 8, "n_heads": HEADS, "n_layers": 2, "n_ctx": CTX}
_SIZES |= {"d_vocab": VOCAB, "d_mlp": 64}
_FUSED = ("c_attn", "query_key_value", "Wqkv", "qkv_proj")
_QUERY_KEY = ("q_proj", "k_proj", "query.", "key.", ".q.", ".k.", *_FUSED)


def hf_model(
    architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any
) -> Any:
    """The Hugging Face model of an architecture, every parameter redrawn; ``changes`` are other
    settings of its configuration."""
    import transformers

    class_name, settings = ARCHITECTURES[architecture]
    model_class = getattr(transformers, class_name)
    config = model_class.config_class(**settings | changes)
    config._attn_implementation = "eager"  # fused attention has no patterns to look at
    config._experts_implementation = "eager"  # grouped products have no float64
    torch.manual_seed(seed)
    model = model_class(config).to(dtype).eval()
    randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: nn.Module, seed: int = 0, sharpness: float = 2.4) -> None:
    """Redraw every parameter: matrices at the scale of their fan-in, gains around one, biases;
    queries and keys enlarged by ``sharpness``."""
    generator = torch.Generator().manual_seed(seed)
    offset_gain = "Gemma" in type(model).__name__
    for name, value in model.named_parameters():
        draw = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        value.copy_(_redraw(name, value, draw, offset_gain, sharpness))


def _redraw(name: str, value: Tensor, draw: Tensor, offset_gain: bool, sharpness: float) -> Tensor:
    if value.dim() == 1 or "sinks" in name or ("norm" in name and value.dim() == 2):
        if ("norm" not in name.lower() and "ln_" not in name) or name.endswith("bias"):
            return 0.3 * draw
        size = sharpness if re.search("[qk]_(layer)?norm", name) else 1.0
        return size * (1 + 0.3 * draw) - (1.0 if offset_gain else 0.0)
    if any(part in name for part in ("embed", "wte", "wpe")):
        return draw
    # GPT-2's Conv1D has its inputs along the first axis
    transposed = any(part in name for part in ("c_attn", "c_proj", "c_fc"))
    fan_in = value.shape[0] if transposed else value.shape[-1]
    size = sharpness if any(part in name for part in _QUERY_KEY) else 1.0
    return draw / math.sqrt(fan_in) * size


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
            size = sharpness if last in ("W_Q", "W_K", "_W_K") else 1.0
            value.copy_(draw / math.sqrt(value.shape[-2]) * size)


def tokens(batch: int = 2, length: int = 16, seed: int = 1) -> Tensor:
    """Random token ids ``[batch position]``, none of them special."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def tokenizer() -> Any:
    """A tokenizer of the tiny vocabulary: ``<bos> <eos> <pad> <unk> w4 w5 ... w60`` with ids in
    this order, words at white space. Like GPT-2's it puts no BOS before a text by itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<bos>", "<eos>", "<pad>", "<unk>"]
    words = special + [f"w{i}" for i in range(len(special), VOCAB)]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return PreTrainedTokenizerFast(tokenizer_object=inner, **dict(zip(names, special)))


@contextmanager
def _on_disk(tokenizer: Any) -> Iterator[Any]:
    """The tokenizer as if read from a directory: TransformerLens reads it again from its path."""
    if tokenizer is None:
        yield None
        return
    from transformers import AutoTokenizer

    with TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        yield AutoTokenizer.from_pretrained(directory, local_files_only=True)


def refusal(model_class: str, architecture: str, processed: bool = False) -> str | None:
    """Why the installed TransformerLens cannot hold a model, as far as is known, else ``None``."""
    if model_class == "hooked" and not HAS_HOOKED:
        return "TransformerLens 4 has no HookedTransformer"
    if model_class == "hooked" and architecture in NOT_HOOKED:
        return "HookedTransformer cannot hold it, or computes other outputs than Hugging Face"
    if HAS_HOOKED and model_class == "bridge" and architecture in NOT_BRIDGE_3:
        return "the bridge of TransformerLens 3 cannot hold it, or computes other outputs"
    if processed and architecture == "gpt-oss":
        return "folding norms into a mixture of experts changes its outputs"
    return None


def loadable(architecture: str) -> list[tuple[str, bool]]:
    """(model_class, processed): every way in which the installed version holds an architecture."""
    ways = itertools.product(("bridge", "hooked"), (False, True))
    return [way for way in ways if refusal(way[0], architecture, way[1]) is None]


def bridge_of(hf: Any, processed: bool = False, tokenizer: Any = None, name: str = "tiny") -> Any:
    """A TransformerBridge round a Hugging Face model, which it instruments in place; ``processed``
    folds and centres its weights (TransformerLens: compatibility mode)."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    with warnings.catch_warnings(), _on_disk(tokenizer) as read:
        warnings.simplefilter("ignore")  # remarks on what processing leaves out
        model = build_bridge_from_module(
            hf, type(hf).__name__, hf_config=hf.config, tokenizer=read, model_name=name
        )
        if processed:
            model.enable_compatibility_mode(disable_warnings=True)
    return model.eval()


def hooked_of(hf: Any, processed: bool = False, tokenizer: Any = None, name: str = "tiny") -> Any:
    """A HookedTransformer with a copy of a Hugging Face model's weights (TransformerLens 3 only);
    ``processed`` folds and centres them as TransformerLens does by default."""
    import transformer_lens
    import transformer_lens.loading_from_pretrained as loading

    dtype = next(hf.parameters()).dtype
    # TransformerLens guesses the architecture from the path, so it gets a neutral one
    with warnings.catch_warnings(), TemporaryDirectory() as parent, _on_disk(tokenizer) as read:
        warnings.simplefilter("ignore")  # HookedTransformer says that it goes in 4.0
        directory = Path(parent, "checkpoint")
        directory.mkdir()
        config = hf.config.to_dict() | {"architectures": [type(hf).__name__]}
        config.setdefault("n_ctx", config.get("n_positions"))
        (directory / "config.json").write_text(json.dumps(config, default=str))
        if any(type(hf).__name__ == ARCHITECTURES[name][0] for name in BY_HAND):
            cfg = _config_by_hand(hf, processed, dtype)
        else:
            cfg = loading.get_pretrained_model_config(
                str(directory), device="cpu", fold_ln=processed, dtype=dtype
            )
        cfg.model_name, cfg.tokenizer_name = name, None
        state = loading.get_pretrained_state_dict(str(directory), cfg, hf_model=hf, dtype=dtype)
        model = transformer_lens.HookedTransformer(cfg, tokenizer=read, move_to_device=False)
        model.load_and_process_state_dict(
            state,
            # a norm that follows its block (OLMo 2) cannot be folded
            fold_ln=processed and str(cfg.normalization_type).endswith("Pre"),
            center_writing_weights=processed,
            # centring shifts all logits alike, which softmax does not see, but a cap does
            center_unembed=processed and cfg.output_logits_soft_cap <= 0,
            fold_value_biases=processed,
        )
    return model.eval()


def _config_by_hand(hf: Any, processed: bool, dtype: torch.dtype) -> Any:
    """A ``HookedTransformerConfig`` for a Gemma 2, Gemma 3 or OLMo 2 model of any size."""
    from transformer_lens import HookedTransformerConfig

    architecture, source = type(hf).__name__, hf.config
    gemma = architecture.startswith("Gemma")
    heads, key_heads = source.num_attention_heads, source.num_key_value_heads
    d_head = getattr(source, "head_dim", None) or source.hidden_size // heads
    kinds = getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers
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
        "normalization_type": "RMSPre" if processed and gemma else "RMS",
        "positional_embedding_type": "rotary",
        "rotary_dim": d_head,
        "rotary_base": _rotary_base(source, "full_attention"),
        "attn_types": ["local" if kind == "sliding_attention" else "global" for kind in kinds],
        "gated_mlp": True,
        "original_architecture": architecture,
        "init_weights": False,
        "device": "cpu",
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
        local = _rotary_base(source, "sliding_attention")
        settings |= {"use_qk_norm": True, "rotary_base_local": local}
    return HookedTransformerConfig(**settings)


def _rotary_base(source: Any, kind: str) -> float:
    """Rotary base of the layers of one kind; 10000 is what transformers takes where a configuration
    names none."""
    rope = getattr(source, "rope_parameters", None) or {}
    rope = rope.get(kind, rope)  # by kind, where kinds differ
    return float(rope.get("rope_theta", 10000.0))


def tiny(
    model_class: str,
    architecture: str,
    processed: bool = False,
    dtype: torch.dtype = torch.float32,
    *,
    text: bool = False,
) -> Any:
    """A tiny model, ``"bridge"`` or ``"hooked"``, the same weights in both; with ``text`` it has
    the tiny tokenizer. It is built once, so do not edit it."""
    return _tiny(model_class, architecture, processed, dtype, text)


@cache
def _tiny(
    model_class: str, architecture: str, processed: bool, dtype: torch.dtype, text: bool
) -> Any:
    if reason := refusal(model_class, architecture, processed):
        raise ValueError(f"{architecture} as {model_class}: {reason}")
    hf = hf_model(architecture, dtype)
    with torch.no_grad():
        before = hf(tokens()).logits
        build = bridge_of if model_class == "bridge" else hooked_of
        model = build(hf, processed, tokenizer() if text else None, f"tiny-{architecture}")
        after = model(tokens(), return_type="logits")
    before, after = (logits.double().log_softmax(-1) for logits in (before, after))
    # measured: up to 12 roundoffs of float32, in which some norms are computed whatever the dtype;
    # the models of NOT_HOOKED are off by 1 and more
    roundoff = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    off, bound = (before - after).abs().max(), 50 * roundoff * before.abs().max()
    assert off <= bound, f"{architecture} as {model_class}: log probabilities off by {off:.2g}"
    assert_real_attention(model)
    if model_class == "hooked":
        for (
            block
        ) in model.blocks:  # as it was before these runs, of whose ALiBi it keeps the longest
            block.attn.alibi = None
    return model


def tiny_hooked(**settings: Any) -> Any:
    """A HookedTransformer from a configuration, for what no Hugging Face family has
    (TransformerLens 3 only)."""
    import transformer_lens

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # HookedTransformer goes in 4.0
        config: Any = transformer_lens.HookedTransformerConfig
        model = transformer_lens.HookedTransformer(
            config(**_SIZES | {"act_fn": "gelu", "seed": 0} | settings)
        )
    randomize_hooked(model)
    assert_real_attention(model)
    return model


def assert_real_attention(model: Any) -> None:
    """The model's own patterns are far from uniform: near-uniform attention hides mistakes."""
    names = [f"blocks.{l}.attn.hook_pattern" for l in range(model.cfg.n_layers)]
    with torch.no_grad():
        seen = model.run_with_cache(tokens(), names_filter=names)[1]
    spreads, entropies, uniform = [], 0.0, 0.0
    for name in names:
        p = seen[name].double()
        allowed = p > 0
        log_p = torch.where(allowed, p, 1.0).log()
        largest = torch.where(allowed, log_p, -math.inf).amax(-1)
        spreads.append(float((largest - torch.where(allowed, log_p, math.inf).amin(-1)).max()))
        entropies += float(-torch.special.xlogy(p, p).sum(-1).mean())
        uniform += float(allowed.sum(-1).double().log().mean())
    assert max(spreads) >= SPREAD, f"scores of a row differ by {max(spreads):.2g} at most"
    assert entropies < ENTROPY * uniform, f"entropy {entropies:.3g} of {uniform:.3g}"
