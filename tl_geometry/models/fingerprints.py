"""On which model was this result computed? A fingerprint of a model's weights and settings answers:
every view of a model computes it, and results carry it.

1. Every parameter and persistent buffer gets a checksum, a 64-bit multilinear hash, sum of w_i x_i
   mod 2^64 with odd w_i, computed on the tensor's device in rows of :data:`ROW` words, and the row
   sums again until one number is left. Words are XOR-folded first, so that two flipped sign bits do
   not cancel. Odd weights are invertible modulo 2^64: a change of one word always shows, unless
   all its 64 bits flip (which folding hides); any other change is missed with probability about
   2^-32.
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tl_geometry.base.errors import UnsupportedModelError, fail
from tl_geometry.models.parameters import part

ROW, ROWS, LEVELS = 4096, 16, 4
"""Words of one row, rows of one step on a CPU (half a MiB, which stays in a core's cache), and
levels of row sums that have weights of their own: enough for 4096^4 words."""
SMALL = 2**16
"""Elements up to which a tensor's -0.0 counts as 0.0: folding leaves -0.0 in some biases."""
ACTS = -1e4
"""A saved ``IGNORE`` (HookedTransformer's score of masked keys) above this may leave weight on
them. Below it, its value makes no difference: exp(-1e4) is zero in every dtype."""
# those that a model is loaded and computed in; anything else counts as quantised
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
QUANTISED = ("bitsandbytes", "quantized", "linear4bit", "linear8bit", "gptq", "awq")
"""Text in the names of modules that hold quantised weights."""
HEADS = ("cls.", "lm_head.", "mlm_head.", "unembed.")
"""What output heads are called in a TransformerLens model (:mod:`tl_geometry.models.directories`
has their names in checkpoints). The bias that processing gives a bridge is ``lm_head.bias`` in 3.9
and ``unembed.bias`` in 4.3."""
ABOUT_FILES = """
transformers_version architectures model_type _name_or_path name_or_path torch_dtype dtype
id2label label2id problem_type tokenizer_class auto_map quantization_config pruned_heads
task_specific_params finetuning_task prefix
"""
ABOUT_USE = """
use_cache return_dict output_attentions output_hidden_states use_return_dict torchscript
gradient_checkpointing initializer_range initializer_factor initializer_cutoff_factor is_decoder
cross_attention_hidden_size add_cross_attention is_encoder_decoder tie_encoder_decoder
chunk_size_feed_forward tie_word_embeddings loss_type classifier_dropout layerdrop
router_aux_loss_coef output_router_logits pretraining_tp
"""
ABOUT_HOOKED = """
model_name tokenizer_name device seed init_mode init_weights from_checkpoint n_devices n_params
default_prepend_bos tokenizer_prepends_bos use_attn_result use_attn_in use_split_qkv_input
use_hook_mlp_in use_hook_tokens ungroup_grouped_query_attention trust_remote_code
original_architecture weight_init_mode checkpoint_index checkpoint_label_type checkpoint_value
layer_norm_folding load_in_4bit quantization_method
"""
IGNORED = frozenset(f"{ABOUT_FILES} {ABOUT_USE} {ABOUT_HOOKED}".split())
"""Settings that say where a model comes from, how it is saved or how it is trained, and not what it
computes: of its files, of its use by transformers, and of HookedTransformer."""
_SETTINGS = """
eps variance_epsilon scaling scale_attn inv_norm_factor softmax_scale attention_scaling
attn_scale attn_logit_softcapping sliding_window scale_attn_weights rotary_ndims rotary_dim
approximate
"""
SETTINGS = frozenset(_SETTINGS.split())
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
    noted = loader_facts(model).get("head_trained")
    if noted is not None:
        return bool(noted)
    # a class without a head is called BertModel or GPT2Model, one with a head ...ForMaskedLM or
    # ...LMHeadModel
    original = getattr(model, "original_model", None)
    saved = getattr(getattr(original, "config", None), "architectures", None) or []
    return not saved or any("For" in name or "Head" in name for name in saved)


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
    sums = [checksum(value) for _, value in named]
    # stacked on one device, so that reading them waits for it once
    totals = torch.stack([total.to(sums[0].device) for total in sums]).tolist()
    for (name, value), total in sorted(zip(named, totals, strict=True), key=lambda x: x[0][0]):
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
    meta = [f"{name} on the meta device, without values" for name, p in parameters if p.is_meta]
    quantised = [
        f"{name} in {str(p.dtype).removeprefix('torch.')}"
        for name, p in parameters
        if p.dtype not in DTYPES
    ]
    quantised += [f"{name}, a {type(m).__name__}" for name, m in modules if _is_quantised(type(m))]
    instead = "a model whose weights are loaded" if meta else "the model without quantisation"
    for problem in [*meta, *quantised][:1]:
        what = f"weights of {type(model).__name__}"
        expected = "floating-point numbers, not quantised"
        fail(what, expected=expected, got=problem, instead=instead, error=UnsupportedModelError)


@cache
def _is_quantised(kind: type) -> bool:
    called = f"{kind.__module__}.{kind.__name__}".lower()
    return any(text in called for text in QUANTISED)


def _called(name: str) -> str:
    """The name of a tensor that is the same in every version of TransformerLens: without the
    wrappers of bridges."""
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
    """One 64-bit integer, on the device of ``value``, in which every bit of it counts; zero for
    zeros (of either sign, up to :data:`SMALL` elements).

    >>> x = torch.arange(10.0)
    >>> y = x.clone()
    >>> bool(checksum(x) == checksum(y)), bool(checksum(x) == checksum(x.flip(0)))
    (True, False)
    """
    if value.is_floating_point() and value.numel() <= SMALL:
        value = value + 0.0  # -0.0 becomes 0.0
    flat = value.reshape(-1).contiguous().view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()  # words must be aligned
    aligned = flat.numel() // 8 * 8
    sums = flat[:aligned].view(torch.int64)
    if aligned < flat.numel():
        rest = pad(flat[aligned:], (0, 8 - (flat.numel() - aligned))).view(torch.int64)
        sums = torch.cat([_row_sums(sums, 0), _row_sums(rest, 1)])
    level = 0
    while level == 0 or sums.numel() > 1:
        sums, level = _row_sums(sums, level), level + 1
    return sums.sum()


def _row_sums(words: Tensor, level: int) -> Tensor:
    """Weighted sum of each row of words, modulo 2^64."""
    weights = checksum_weights(str(words.device))[level % LEVELS]
    if 0 < words.numel() <= ROW:  # most tensors of a model
        return ((words >> 32) ^ words).mul_(weights[: words.numel()]).sum().unsqueeze(0)
    on_cpu = words.device.type == "cpu"
    # a GPU takes 32 MiB at a time, so that it starts fewer kernels
    height = ROWS if on_cpu else 64 * ROWS
    # one buffer for all steps: new memory at each step costs as much again
    buffer = torch.empty(height, ROW, dtype=torch.int64, device=words.device)
    full = words.numel() // ROW * ROW
    blocks = [*words[:full].view(-1, ROW).split(height), words[full:].unsqueeze(0)]
    sums: list[Tensor] = []
    for rows in blocks:
        if not rows.numel():
            continue
        folded, w = buffer[: len(rows), : rows.shape[1]], weights[: rows.shape[1]]
        torch.bitwise_right_shift(rows, 32, out=folded).bitwise_xor_(rows)
        # integers have no matrix product on a GPU
        sums.append(torch.mv(folded, w) if on_cpu else folded.mul_(w).sum(1))
    return torch.cat(sums) if sums else words


@cache
def checksum_weights(device: str) -> Tensor:
    """Pseudo-random odd numbers ``[level word]``, the same everywhere. Any other seed would change
    every fingerprint that a stored result holds."""
    generator = torch.Generator().manual_seed(20230410)
    return (
        torch.randint(-(2**62), 2**62, (LEVELS, ROW), generator=generator)
        .mul_(2)
        .add_(1)
        .to(device)
    )


def configuration(model: Any) -> dict[str, Any]:
    """The settings that the forward pass reads, by name: of the Hugging Face configuration, or of
    HookedTransformer's own.

    Names, paths, versions, token ids, dtypes, dropout and what only training reads are left out,
    and settings that are ``None``.
    """
    original = getattr(model, "original_model", None)
    source = getattr(original, "config", None)
    if source is not None and hasattr(source, "to_dict"):
        settings = _acting(source.to_dict())
    else:
        settings = _acting({k: v for k, v in vars(model.cfg).items() if not callable(v)})
    return {"settings": settings, "modules": _modules(original if original is not None else model)}


def _acting(settings: Mapping[str, Any]) -> dict[str, Any]:
    acting: dict[str, Any] = {}
    for name, value in settings.items():
        left_out = (
            name in IGNORED
            or name.endswith(("_token_id", "_token_ids", "dropout", "_pdrop", "_dropout_prob"))
            or value is None
        )
        if not left_out and not name.startswith(("summary_", "_")):
            acting[str(name)] = _acting(value) if isinstance(value, Mapping) else _plain(value)
    return acting


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
    settings: list[str] = []
    for name, module in root.named_modules():
        if type(module).__module__.startswith("transformer_lens.model_bridge"):
            continue
        path = name.replace("_original_component.", "").replace("._original_component", "")
        for key in SETTINGS.intersection(vars(module)):
            value = part(module, key)
            if isinstance(value, str | bool | int | float):
                settings.append(f"{path}.{key}={_plain(value)}")
        act = vars(module).get("act_fn")  # HookedTransformer keeps its function there
        if callable(act):
            settings.append(f"{path}.act_fn={getattr(act, '__name__', type(act).__name__)}")
    return sorted(settings)
