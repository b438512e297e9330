"""A model as a TransformerBridge, from a name that TransformerLens knows, a local Hugging Face
directory (offline then), or a Hugging Face model in memory: :func:`load`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.models.batches import device_of
from tl_geometry.models.fingerprint import DTYPES, remember, require_numbers

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Ends of the names of files that are read by unpickling, which can run any code."""
HEADS = ("cls.predictions", "lm_head", "embed_out", "score")
"""Output heads: without one, states, scores and patterns are still right."""
UNREAD = ("pooler.", "bert.pooler.", "cls.seq_relationship.")
"""Parts of an encoder that nothing here reads."""


def load(
    model: str | Path | Any,
    *,
    processed: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """Load a model as a TransformerBridge: by a name that TransformerLens knows, from a local
    Hugging Face directory (without any network), or around a Hugging Face model in memory.

    ``processed`` folds and centres weights as TransformerLens does by default (its compatibility
    mode). A directory of a bare BERT encoder (sentence transformers) is loaded with a newly
    initialised output head, and marked so: only its states are of use. A HookedTransformer is made
    by TransformerLens itself and taken everywhere as it is.

    Raises ``GeometryError`` where the weights cannot be had, ``UnsupportedModelError`` where the
    class cannot hold the model.
    """
    require(dtype in DTYPES, "dtype", expected=", ".join(map(str, DTYPES)), got=repr(dtype))
    device = device_of(device, "cpu")
    if isinstance(model, torch.nn.Module):
        return from_hf(model.to(device=device, dtype=dtype), processed=processed)
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        hf, tokenizer, new_head = _read(path, dtype)
        options = {"processed": processed, "name": _shown(path), "head_trained": not new_head}
        return from_hf(hf.to(device), tokenizer, **options)
    if path.is_dir() or str(model).startswith(("/", ".", "~")):
        got = f"{path.name} without one" if path.is_dir() else f"no directory {model}"
        expected = "a Hugging Face directory with config.json, or a name that TransformerLens knows"
        fail("model", expected=expected, got=got)
    from transformer_lens.model_bridge import TransformerBridge

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bridge = TransformerBridge.boot_transformers(
                str(model), dtype=dtype, device=str(device)
            )
    except Exception as error:  # each loader and the hub raise their own types
        expected = "a name that TransformerLens knows and the hub has"
        got, instead = f"{model!r} ({_first_line(error)})", "a local directory"
        fail("model", expected=expected, got=got, instead=instead)
    if processed:
        bridge.enable_compatibility_mode(disable_warnings=True)
    return remember(bridge.eval(), name=str(model))


@torch.no_grad()
def from_hf(
    hf_model: Any,
    tokenizer: Any = None,
    *,
    processed: bool = False,
    name: str = "model",
    head_trained: bool = True,
) -> Any:
    """A TransformerBridge around a Hugging Face model in memory, which it instruments in place,
    where it is and in its precision. ``tokenizer`` may be ``None``: the model then takes token ids
    only. Processing that changes what the model computes is refused (folding of a mixture of
    experts)."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    require_numbers(hf_model)
    architecture, hf_model = type(hf_model).__name__, hf_model.eval()
    # fused attention has no scores and patterns to hook
    hf_model.config._attn_implementation = "eager"
    ids = torch.arange(3, 11, device=hf_model.device).unsqueeze(0) % hf_model.config.vocab_size
    before = hf_model(ids).logits.double().log_softmax(-1)
    with warnings.catch_warnings(), TemporaryDirectory() as scratch:
        # remarks on centring that processing makes
        warnings.simplefilter("ignore")
        tokenizer = _on_disk(tokenizer, Path(scratch))
        try:
            options = {"hf_config": hf_model.config, "tokenizer": tokenizer}
            bridge = build_bridge_from_module(hf_model, architecture, **options)
        except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
            expected = "an architecture that TransformerBridge supports"
            got = f"{architecture} ({_first_line(error)})"
            fail(name, expected=expected, got=got, error=UnsupportedModelError)
        if processed:
            bridge.enable_compatibility_mode(disable_warnings=True)
            after = bridge(ids, return_type="logits").double().log_softmax(-1)
            error = float((before - after).abs().max())
            # folding rounds, in float32 by far less than 1%, in half precision by some units
            roundoff = torch.finfo(hf_model.dtype).eps
            if not error <= max(0.01, 8 * roundoff) * float(before.abs().max()):
                expected, instead = "the outputs of the Hugging Face model", "processed=False"
                got = f"log probabilities off by {error:.2g}"
                fail(name, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    return remember(bridge.eval(), name=name, head_trained=head_trained)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no remarks of transformers on standard error."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _on_disk(tokenizer: Any, directory: Path) -> Any:
    """A tokenizer that was made in memory, as if it had been read from a directory: TransformerLens
    reads it again from its path."""
    if tokenizer is None or tokenizer.init_kwargs.get("name_or_path"):
        return tokenizer
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _shown(directory: Path) -> str:
    """The directory's name, or its parent's where that says nothing."""
    path = directory.resolve()
    return path.parent.name if path.name in ("model", "checkpoint", "snapshot") else path.name


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"


def _read(directory: Path, dtype: torch.dtype) -> tuple[Any, Any, bool]:
    """Model and tokenizer of a directory, and whether the output head is new. transformers draws
    missing weights at random; all but the head must be there."""
    import transformers

    pickled = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLED)
    safe = any(p.suffix == ".safetensors" for p in directory.iterdir())
    expected, got = (
        f"weights as safetensors in {directory.name}",
        f"{', '.join(pickled[:4])} (pickled)",
    )
    instead = "model.save_pretrained(directory) where you trust that file, which writes safetensors"
    require(safe or not pickled, "model", expected=expected, got=got, instead=instead)
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(directory, **options)
        saved = (config.architectures or [""])[0]
        loader: Any = transformers.AutoModelForCausalLM
        if saved.startswith("Bert"):
            loader = transformers.BertForMaskedLM
        elif not saved.endswith("Model") or saved.endswith("LMHeadModel"):
            loader = getattr(transformers, saved, loader)
        with quiet():
            model, info = loader.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # the file format, the hub and the model class raise their own
        expected, got = f"a whole model in {directory.name}", _first_line(error)
        fail("model", expected=expected, got=got)
    missing = [key for key in info["missing_keys"] if not key.startswith(UNREAD)]
    lost = [key for key in missing if not key.startswith(HEADS)]
    lost += [str(key[0]) for key in info["mismatched_keys"]]
    expected = f"in {directory.name} every weight that its config.json asks for"
    require(not lost, "model", expected=expected, got=f"no {', '.join(sorted(lost)[:4])}")
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    tokenizer = None
    if any((directory / name).is_file() for name in files):
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
    return model, tokenizer, len(missing) > 0
