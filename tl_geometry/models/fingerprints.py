"""On which model something was computed: a fingerprint of all weights and of the settings that the
forward pass reads.

1. The bits of every parameter and persistent buffer go into a checksum: lanes of 64 bits, each
   folded onto itself (so that sign bits do not meet in the highest bit, where an even number of
   changes would cancel), times a pseudo-random odd weight, summed modulo 2^64 in rows of
   :data:`ROW` lanes, and the sums again until one number is left. Odd weights are invertible modulo
   2^64, so that a change of one element always shows; any other change is missed with probability
   about 2^-32.
2. The checksums of all tensors are read from their device at once and hashed with names, dtypes,
   shapes, and the configuration.

Nothing is remembered between calls: ``p.data.mul_``, numpy and fused optimisers leave a tensor's
version counter alone.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tl_geometry.base.errors import UnsupportedModelError, fail
from tl_geometry.models.parameters import part

ROW, ROWS, LEVELS = 4096, 16, 4
"""Lanes of one row, rows of one step (half a MiB, which stays in a core's cache), and levels of
sums: 4096^4 lanes."""
SMALL = 2**16
"""Elements up to which a zero of either sign counts as zero (biases that folding makes are -0.0
here and there)."""
ACTS = -1e4
"""A saved ``IGNORE`` above this may leave weight on masked keys; below it, its value makes no
difference."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTISED = ("bitsandbytes", "quantized", "linear4bit", "linear8bit", "gptq", "awq")
"""Text in the names of modules that hold quantised weights."""
HEADS = ("cls.", "lm_head.", "mlm_head.", "unembed.")
"""What output heads are called. The bias that processing gives a bridge is ``lm_head.bias`` in 3.9
and ``unembed.bias`` in 4.3."""
ABOUT_FILES = (
    "transformers_version",
    "architectures",
    "model_type",
    "_name_or_path",
    "name_or_path",
    "torch_dtype",
    "dtype",
    "id2label",
    "label2id",
    "problem_type",
    "tokenizer_class",
    "auto_map",
    "quantization_config",
    "pruned_heads",
    "task_specific_params",
    "finetuning_task",
    "prefix",
)
ABOUT_USE = (
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "use_return_dict",
    "torchscript",
    "gradient_checkpointing",
    "initializer_range",
    "initializer_factor",
    "initializer_cutoff_factor",
    "is_decoder",
    "cross_attention_hidden_size",
    "add_cross_attention",
    "is_encoder_decoder",
    "tie_encoder_decoder",
    "chunk_size_feed_forward",
    "tie_word_embeddings",
    "loss_type",
    "classifier_dropout",
    "layerdrop",
    "router_aux_loss_coef",
    "output_router_logits",
    "pretraining_tp",
)
ABOUT_HOOKED = (
    "model_name",
    "tokenizer_name",
    "device",
    "seed",
    "init_mode",
    "init_weights",
    "from_checkpoint",
    "n_devices",
    "n_params",
    "default_prepend_bos",
    "tokenizer_prepends_bos",
    "use_attn_result",
    "use_attn_in",
    "use_split_qkv_input",
    "use_hook_mlp_in",
    "use_hook_tokens",
    "ungroup_grouped_query_attention",
    "trust_remote_code",
    "original_architecture",
    "weight_init_mode",
    "checkpoint_index",
    "checkpoint_label_type",
    "checkpoint_value",
    "layer_norm_folding",
    "load_in_4bit",
    "quantization_method",
)
IGNORED = frozenset((*ABOUT_FILES, *ABOUT_USE, *ABOUT_HOOKED))
"""Settings that say where a model is from, how it is kept, or how it is trained, and not what it
computes."""
SETTINGS = (
    "eps",
    "variance_epsilon",
    "scaling",
    "scale_attn",
    "inv_norm_factor",
    "softmax_scale",
    "attention_scaling",
    "attn_scale",
    "attn_logit_softcapping",
    "sliding_window",
    "scale_attn_weights",
    "rotary_ndims",
    "rotary_dim",
    "approximate",
)
"""Numbers that modules keep for themselves and use in place of the configuration."""

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
    known = loader_facts(model).get("head_trained")
    original = getattr(model, "original_model", None)
    saved = getattr(getattr(original, "config", None), "architectures", None) or []
    return (
        bool(known)
        if known is not None
        else not saved or any("For" in a or "Head" in a for a in saved)
    )


def fingerprint(model: Any) -> str:
    """16 hex digits that identify what a model computes: all its weights, and all settings that the
    forward pass reads.

    The same weights and settings in the same class give the same digits in every process, on every
    device and with every version of TransformerLens. An output head that loading drew at random is
    left out.

    Raises ``UnsupportedModelError`` for weights that are quantised, or that have no values (the
    meta device).
    """
    skipped = _random_parts(model)
    named = [(name, value) for name, value in _tensors(model) if not name.startswith(skipped)]
    digest = hashlib.sha256(json.dumps(configuration(model), sort_keys=True, default=str).encode())
    totals = zip(named, _read([checksum(v) for _, v in named]), strict=True)
    for (name, value), total in sorted(totals, key=lambda pair: pair[0][0]):
        # An absent bias and a zero one are the same model: versions differ in which they keep.
        if total != 0:
            digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|{total}".encode())
    return digest.hexdigest()[:16]


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and the saved buffers that act, by name."""
    # a walk through a bridge takes as long as its weights
    parameters, modules = list(model.named_parameters()), list(model.named_modules())
    _require_numbers(model, parameters, modules)
    for name, value in parameters:
        yield _called(name), value.detach()
    for prefix, module in modules:
        for name, value in module.named_buffers(recurse=False):
            derived = name in module._non_persistent_buffers_set or value.is_meta
            unread = name == "IGNORE" and float(value) <= ACTS
            if not derived and not unread:
                yield _called(f"{prefix}.{name}"), value.detach()


def require_numbers(model: nn.Module) -> None:
    """Raise ``UnsupportedModelError`` unless all weights are there, as floating-point numbers."""
    _require_numbers(model, list(model.named_parameters()), list(model.named_modules()))


def _require_numbers(
    model: nn.Module,
    parameters: Sequence[tuple[str, Tensor]],
    modules: Sequence[tuple[str, nn.Module]],
) -> None:
    for name, value in parameters:
        if value.is_meta:
            got = f"{name} on the meta device, without values"
            _refuse(model, got, "a model whose weights are loaded")
        if value.dtype not in DTYPES:
            got = f"{name} in {str(value.dtype).removeprefix('torch.')}"
            _refuse(model, got, "the model without quantisation")
    for name, module in modules:
        if _is_quantised(type(module)):
            _refuse(model, f"{name}, a {type(module).__name__}", "the model without quantisation")


@cache
def _is_quantised(kind: type) -> bool:
    called = f"{kind.__module__}.{kind.__name__}".lower()
    return any(text in called for text in QUANTISED)


def _refuse(model: nn.Module, got: str, instead: str) -> NoReturn:
    what = f"weights of {type(model).__name__}"
    fail(
        what,
        expected="floating-point numbers, not quantised",
        got=got,
        instead=instead,
        error=UnsupportedModelError,
    )


def _called(name: str) -> str:
    """A tensor's name in every version: without the wrappers of bridges."""
    name = name.replace("_original_component.", "")
    return "unembed.bias" if name in ("lm_head.bias", "embed_out.bias") else name


def _random_parts(model: Any) -> tuple[str, ...]:
    """Prefixes of parameters that loading draws at random, so that they say nothing about the
    model."""
    encoder = (
        ("pooler.", "nsp_head.")
        if any(c.__name__ == "HookedEncoder" for c in type(model).__mro__)
        else ()
    )
    head = () if head_trained(model) else HEADS
    # HookedTransformer holds an unused, unfilled position table
    alibi = getattr(model.cfg, "positional_embedding_type", "") == "alibi"
    return (*encoder, *head, *(("pos_embed.",) if alibi else ()))


@torch.no_grad()
def checksum(value: Tensor) -> Tensor:
    """One 64-bit integer, on the device of ``value``, that every bit of it counts in; zero for
    zeros of either sign.

    >>> x = torch.arange(10.0)
    >>> y = x.clone()
    >>> bool(checksum(x) == checksum(y)), bool(checksum(x) == checksum(x.flip(0)))
    (True, False)
    """
    if value.is_floating_point() and value.numel() <= SMALL:
        value = value + 0.0
    flat = value.reshape(-1).contiguous().view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    whole = flat.numel() // 8 * 8
    sums = flat[:whole].view(torch.int64)
    if whole < flat.numel():
        rest = torch.nn.functional.pad(flat[whole:], (0, 8 - (flat.numel() - whole))).view(
            torch.int64
        )
        sums = torch.cat([_sums(sums, 0), _sums(rest, 1)])
    level = 0
    while level == 0 or sums.numel() > 1:
        sums, level = _sums(sums, level), level + 1
    return sums.sum()


def _sums(lanes: Tensor, level: int) -> Tensor:
    """Weighted sum of each row of lanes, modulo 2^64."""
    weights = checksum_weights(str(lanes.device))[level % LEVELS]
    if 0 < lanes.numel() <= ROW:  # most tensors of a model
        return ((lanes >> 32) ^ lanes).mul_(weights[: lanes.numel()]).sum().unsqueeze(0)
    whole = lanes.numel() // ROW
    parts = [lanes[: whole * ROW].view(whole, ROW)] if whole else []
    if whole * ROW < lanes.numel():
        parts.append(lanes[whole * ROW :].unsqueeze(0))
    height = ROWS if lanes.device.type == "cpu" else 64 * ROWS
    # new memory at each step costs as much again
    space = torch.empty(min(height, whole + 1), ROW, dtype=torch.int64, device=lanes.device)
    found: list[Tensor] = []
    for rows in (some for p in parts for some in p.split(height)):
        folded, w = space[: len(rows), : rows.shape[1]], weights[: rows.shape[1]]
        torch.bitwise_right_shift(rows, 32, out=folded).bitwise_xor_(rows)
        # integers have no matrix product on a GPU
        found.append(torch.mv(folded, w) if lanes.device.type == "cpu" else folded.mul_(w).sum(1))
    return torch.cat(found) if found else lanes


@cache
def checksum_weights(device: str) -> Tensor:
    """Pseudo-random odd numbers, the same everywhere."""
    generator = torch.Generator().manual_seed(20230410)
    return (
        torch.randint(-(2**62), 2**62, (LEVELS, ROW), generator=generator)
        .mul_(2)
        .add_(1)
        .to(device)
    )


def _read(sums: Sequence[Tensor]) -> list[int]:
    """All numbers, with one synchronisation for each device."""
    devices = list(dict.fromkeys(s.device for s in sums))
    read = {d: iter(torch.stack([s for s in sums if s.device == d]).tolist()) for d in devices}
    return [next(read[s.device]) for s in sums]


def configuration(model: Any) -> dict[str, Any]:
    """The settings that the forward pass reads, by name: of the Hugging Face configuration, or of
    HookedTransformer's own.

    Names, paths, versions, token ids, dtypes, dropout and what only training reads are left out,
    and settings that are ``None``.
    """
    original = getattr(model, "original_model", None)
    source = getattr(original, "config", None)
    if source is not None and hasattr(source, "to_dict"):
        found = _acting(source.to_dict())
    else:
        found = _acting({k: v for k, v in vars(model.cfg).items() if not callable(v)})
    return {"settings": found, "modules": _modules(original if original is not None else model)}


def _acting(settings: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        left_out = (
            name in IGNORED
            or name.endswith(("_token_id", "_token_ids", "dropout", "_pdrop", "_dropout_prob"))
            or value is None
        )
        if not left_out and not name.startswith(("summary_", "_")):
            kept[str(name)] = _acting(value) if isinstance(value, Mapping) else _plain(value)
    return kept


def _plain(value: Any) -> Any:
    """A setting as JSON writes it the same way everywhere: numbers as floats (numpy's and whole
    ones too), anything else as text."""
    if isinstance(value, str | bool):
        return value
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _modules(root: nn.Module) -> list[str]:
    """Numbers that modules use in place of the configuration, and the activation functions that
    were put in."""
    found: list[str] = []
    for name, module in root.named_modules():
        if type(module).__module__.startswith("transformer_lens.model_bridge"):
            continue
        path = name.replace("_original_component.", "").replace("._original_component", "")
        for key in SETTINGS:
            value = part(module, key) if key in vars(module) else None
            if isinstance(value, str | bool | int | float):
                found.append(f"{path}.{key}={_plain(value)}")
        act = vars(module).get("act_fn")  # HookedTransformer keeps its function there
        if callable(act):
            found.append(f"{path}.act_fn={getattr(act, '__name__', type(act).__name__)}")
    return sorted(found)


__all__ = [
    "checksum",
    "configuration",
    "fingerprint",
    "head_trained",
    "loader_facts",
    "remember",
    "require_numbers",
]
