"""The fingerprint of a model: a hash of all weights and buffers and of the settings that its passes
read. Results carry it, and a basis of another model is refused by it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

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
ACTIVATIONS = ("act", "act_fn", "activation_fn")
"""Where modules keep a function that is no module."""
GROWING = ("training", "mask", "max_seq_len_cached")
"""Flags, buffers and numbers that a pass changes, or that say nothing of what it computes: the mask
and the tables of HookedTransformer grow with the longest input so far."""
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
    """16 hex digits that identify what a model computes: xxh3 of every parameter and buffer, of the
    class, numbers and flags of every module, and of the configuration.

    The same weights and settings in the same class give the same digits in every process and on
    every device. An output head that loading drew at random is left out.

    Raises ``UnsupportedModelError`` for weights that are quantised, or that have no values (the
    meta device).
    """
    skipped, held = () if head_trained(model) else HEADS, require_numbers(model)
    named = {BIAS.get(n, n): value for n, value in held.tensors.items()}
    named = {n: named[n] for n in sorted(named) if not n.startswith(skipped)}
    settings = _settings(model) | {"modules": held.modules}
    digest = xxhash.xxh3_64(json.dumps(settings, sort_keys=True, default=str).encode())
    # memory is what this waits for, and xxhash lets other threads run meanwhile
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        hashes = map if torch.get_num_threads() == 1 else pool.map
        for (name, value), bits in zip(named.items(), hashes(_bits, named.values())):
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


class Held(NamedTuple):
    """What the modules of a model hold, by names that are the same in every version of
    TransformerLens: ``tensors`` are parameters and buffers, each once; ``modules`` says the class,
    numbers and flags of each; ``unusable`` names what is no floating-point weight."""

    tensors: dict[str, Tensor]
    modules: dict[str, list[Any]]
    unusable: list[str]


def held_by(model: Any) -> Held:
    """Everything that the modules of a model hold, in one walk."""
    # HookedTransformer holds a position table that ALiBi does not use, and never fills it
    alibi = getattr(getattr(model, "cfg", None), "positional_embedding_type", "") == "alibi"
    unused = "pos_embed.W_pos" if alibi else None
    held, seen, kinds = Held({}, {}, []), set[int](), dict[type, str]()
    for name, module in modules_of(model):
        kinds[type(module)] = name
        # peft keeps the map that an adapter stands beside under this name
        if "base_layer" in module._modules:
            held.unusable.append(f"{name.rstrip('.')}, an adapter that is not merged")
        for leaf, value in (*module._parameters.items(), *module._buffers.items()):
            if value is None or id(value) in seen or leaf in GROWING or name + leaf == unused:
                continue
            seen.add(id(value))
            held.tensors[name + leaf] = value.detach()
            if value.is_meta or (leaf in module._parameters and value.dtype not in DTYPES):
                where = "on the meta device" if value.is_meta else value.dtype
                held.unusable.append(f"{name}{leaf}, {where}")
        # wrappers of TransformerLens, whose settings differ between its versions, compute nothing
        if "_original_component" not in module._modules and module is not model:
            held.modules[name] = [type(module).__name__, *_plain(vars(module))]
    for cls, name in kinds.items():
        kind = f"{cls.__module__}.{cls.__name__}"
        if any(text in kind.lower() for text in QUANTISED):
            held.unusable.append(f"{name.rstrip('.')}, a {kind}")
    return held


def _plain(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Numbers, flags and activation functions among the attributes of a module."""
    for name, value in attributes.items():
        if type(value) in (bool, int, float) and name[0] != "_" and name not in GROWING:
            yield name, value
        elif name in ACTIVATIONS and callable(value):
            yield name, getattr(value, "__name__", type(value).__name__)


def require_numbers(model: Any) -> Held:
    """:func:`held_by`. Raise ``UnsupportedModelError`` unless all weights are there, as
    floating-point numbers."""
    held = held_by(model)
    what, expected = f"weights of {type(model).__name__}", "numbers, not quantised"
    got, fits = ", ".join(held.unusable[:1]), not held.unusable
    require(fits, what, expected=expected, got=got, error=UnsupportedModelError)
    return held


def _settings(model: Any) -> dict[str, Any]:
    """The settings that the forward pass reads: those of the Hugging Face configuration, or of
    HookedTransformer's own."""
    config = getattr(getattr(model, "original_model", None), "config", None)
    read = config.to_dict() if config is not None else vars(model.cfg)
    acting = {k: str(v) for k, v in read.items() if v is not None and not _left_out(k, v)}
    return {"class": type(model).__name__, "settings": acting}


def _left_out(name: str, value: Any) -> bool:
    return name.startswith("_") or callable(value) or any(part in name for part in IGNORED)
