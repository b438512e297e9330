"""The fingerprint of a model: a hash of all weights and of the settings that its passes read.
Results carry it, and a basis of another model is refused by it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.parameters import modules_of

SMALL = 2**16
"""Elements up to which -0.0 counts as 0.0, and a tensor of zeros as absent: versions of
TransformerLens differ in which zero biases they keep, and in the sign of some zeros."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that a model is loaded and computed in; anything else counts as quantised."""
QUANTISED = ("bitsandbytes", "quantized", "linear4bit", "linear8bit", "gptq", "awq")
"""Text in the names of modules that hold quantised weights."""
HEADS = ("cls.", "lm_head.", "mlm_head.", "unembed.")
"""What output heads are called in a TransformerLens model."""
BIAS: dict[str, str] = dict.fromkeys(("lm_head.bias", "embed_out.bias"), "unembed.bias")
"""Names of a bias of the logits that only some versions of TransformerLens give it."""
IGNORED = ("name", "path", "version", "dtype", "token", "dropout", "device", "seed", "init", "use_")
"""Parts of the names of settings that say where a model comes from, how it is saved, trained or
looked at, and not what it computes."""
_LOADED: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""What the loader knows about a model that it made: ``name``, ``head_trained``."""


def remember(model: Any, **facts: Any) -> Any:
    """Note facts about a model that only its loader can know; returns the model."""
    _LOADED.setdefault(model, {}).update(facts)
    return model


def loader_facts(model: Any) -> Mapping[str, Any]:
    """What :func:`remember` noted."""
    return _LOADED.get(model, {})


def head_trained(model: Any) -> bool:
    """False where the checkpoint was of a model without this output head, so that loading it made a
    random one."""
    noted = loader_facts(model).get("head_trained")
    if noted is not None:
        return bool(noted)
    # a class without a head is called BertModel or GPT2Model, one with a head ...ForMaskedLM or
    # ...LMHeadModel
    original = getattr(model, "original_model", None)
    saved = getattr(getattr(original, "config", None), "architectures", None) or []
    return not saved or any("For" in name or "Head" in name for name in saved)


def fingerprint(model: Any) -> str:
    """16 hex digits that identify what a model computes: xxh3 of every parameter, of the small
    tables that modules keep (rotary frequencies), and of the configuration.

    The same weights and settings in the same class give the same digits in every process and on
    every device. An output head that loading drew at random is left out.

    Raises ``UnsupportedModelError`` for weights that are quantised, or that have no values (the
    meta device).
    """
    skipped = () if head_trained(model) else HEADS
    named = {BIAS.get(n, n): value for n, value in require_numbers(model).items()}
    named = {n: named[n] for n in sorted(named) if not n.startswith(skipped)}
    digest = xxhash.xxh3_64(json.dumps(_settings(model), sort_keys=True, default=str).encode())
    # memory is what this waits for, and xxhash lets other threads run meanwhile
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for (name, value), bits in zip(named.items(), pool.map(_bits, named.values())):
            if bits is not None:
                digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|{bits}".encode())
    return digest.hexdigest()


def _bits(value: Tensor) -> str | None:
    """The hash of a tensor, ``None`` for small zeros."""
    if value.numel() <= SMALL:
        if not bool(value.any()):
            return None
        value = value + 0 if value.is_floating_point() else value  # -0.0 becomes 0.0
    flat = value.cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_64(flat.numpy().data).hexdigest()


def weights_of(model: Any) -> dict[str, Tensor]:
    """Parameters (each once), and rotary frequencies, by names that are the same in every version
    of TransformerLens."""
    # HookedTransformer holds a position table that ALiBi does not use, and never fills it
    alibi = getattr(getattr(model, "cfg", None), "positional_embedding_type", "") == "alibi"
    unused = ("pos_embed.W_pos",) if alibi else ()
    found: dict[int, tuple[str, Tensor]] = {}
    for name, module in modules_of(model):
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            acts = leaf in module._parameters or leaf.endswith("inv_freq")
            if acts and value is not None:
                found.setdefault(id(value), (f"{name}{leaf}", value.detach()))
    return {name: value for name, value in found.values() if name not in unused}


def _settings(model: Any) -> dict[str, Any]:
    """The settings that the forward pass reads: those of the Hugging Face configuration, or of
    HookedTransformer's own, and the activation functions that modules hold."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    read, acts = config.to_dict() if config is not None else vars(model.cfg), set()
    for _, module in modules_of(model):
        for name in ("act", "act_fn", "activation_fn"):
            act = vars(module).get(name) or module._modules.get(name)
            known = type(act) if isinstance(act, nn.Module) else act
            acts |= {getattr(known, "__name__", str(known))} if callable(act) else set()
    acting = {k: str(v) for k, v in read.items() if v is not None and not _left_out(k, v)}
    return {"class": type(model).__name__, "settings": acting, "activations": sorted(acts)}


def _left_out(name: str, value: Any) -> bool:
    return name.startswith("_") or callable(value) or any(part in name for part in IGNORED)


def require_numbers(model: nn.Module) -> dict[str, Tensor]:
    """:func:`weights_of`. Raise ``UnsupportedModelError`` unless all are there, as floating-point
    numbers."""
    weights = weights_of(model)
    bad = [
        f"{name}, {'on the meta device' if p.is_meta else p.dtype}"
        for name, p in weights.items()
        if p.is_meta or p.dtype not in DTYPES
    ]
    kinds: dict[type, str] = {}
    for name, module in modules_of(model):
        kinds[type(module)] = name = name.rstrip(".")
        # peft keeps the map that an adapter stands beside under this name
        bad += [f"{name}, an adapter that is not merged"] if "base_layer" in module._modules else []
    named = {f"{kind.__module__}.{kind.__name__}": name for kind, name in kinds.items()}
    bad += [f"{n}, a {k}" for k, n in named.items() if any(q in k.lower() for q in QUANTISED)]
    what, expected = f"weights of {type(model).__name__}", "numbers, not quantised"
    require(not bad, what, expected=expected, got=", ".join(bad[:1]), error=UnsupportedModelError)
    return weights
