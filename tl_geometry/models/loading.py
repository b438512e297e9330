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

from tl_geometry.base import results
from tl_geometry.base.errors import GeometryError, UnsupportedModelError, fail, require
from tl_geometry.base.files import as_path
from tl_geometry.models.fingerprint import DTYPES, remember, require_numbers

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
    Hugging Face directory (without any network), or around a Hugging Face model in memory (which is
    moved to ``device`` and converted to ``dtype``, also where it is refused then; :func:`from_hf`
    leaves it where it is, in its precision).

    ``processed`` folds and centres weights as TransformerLens does by default (its compatibility
    mode). A directory of a bare BERT encoder (sentence transformers) is loaded with a newly
    initialised output head, and marked so: only its states are of use. A HookedTransformer is made
    by TransformerLens itself and taken everywhere as it is.

    Raises ``GeometryError`` where the weights cannot be had, ``UnsupportedModelError`` where the
    class cannot hold a model in memory. A file is opened as a result that the library saved.
    """
    require(dtype in DTYPES, "dtype", expected=", ".join(map(str, DTYPES)), got=repr(dtype))
    device = require_device(device)
    if not isinstance(model, str | Path):
        _require_hugging_face(model, "a name, a path or a model of transformers")
        return from_hf(model.to(device=device, dtype=dtype), processed=processed)
    path = as_path(model, "model")
    if path.is_file():
        alone = not processed and dtype == torch.float32 and device.type == "cpu"
        require(alone, "load", expected="a file alone", got=f"{processed=}, {dtype}, {device}")
        return results.load(path)
    require(path.suffix != ".safetensors", "path", expected="a file that is there", got=str(path))
    expected = f"a model with safetensors in {path.name}, or a name that TransformerLens knows"
    with _refusing("model", expected), torch.random.fork_rng(devices=[]):
        if path.is_dir() or str(model).startswith(("/", ".", "~")):
            hf, tokenizer, trained = _read(path, dtype)
            options = {"processed": processed, "name": _shown(path), "head_trained": trained}
            return from_hf(hf.to(device), tokenizer, **options)
        from transformer_lens.model_bridge import TransformerBridge

        options = {"dtype": dtype, "device": str(device)}
        bridge = TransformerBridge.boot_transformers(str(model), **options)
        if processed:
            bridge.enable_compatibility_mode(disable_warnings=True)
        return remember(bridge.eval(), name=str(model))


def require_device(device: torch.device | str) -> torch.device:
    """The device of a name; refused where torch or this machine has none."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError):
        fail("device", expected="cpu, or cuda, cuda:1, mps of this machine", got=repr(device))


@contextlib.contextmanager
def _refusing(
    what: str, expected: str, error: type[GeometryError] = GeometryError
) -> Iterator[None]:
    """Say what was expected where a loader raises: each loader, file format and the hub raise
    their own types. Their warnings are not shown."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except GeometryError:
        raise
    except Exception as raised:
        said = (str(raised).strip().splitlines() or [""])[0][:200].rstrip(".")
        fail(what, expected=expected, got=f"{type(raised).__name__}: {said}", error=error)


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

    _require_hugging_face(hf_model)
    require_numbers(hf_model)
    architecture, hf_model = type(hf_model).__name__, hf_model.eval()
    # fused attention has no scores and patterns to hook
    hf_model.config._attn_implementation = "eager"
    ids = torch.arange(3, 11, device=hf_model.device).unsqueeze(0) % hf_model.config.vocab_size
    expected = f"an architecture that TransformerBridge supports, not {architecture}"
    refusing = _refusing(name, expected, UnsupportedModelError)
    with TemporaryDirectory() as scratch, quiet(), refusing:
        before = hf_model(ids).logits.double().log_softmax(-1) if processed else ids
        options = {"hf_config": hf_model.config, "tokenizer": _on_disk(tokenizer, scratch)}
        bridge = build_bridge_from_module(hf_model, architecture, **options)
        if processed:
            bridge.enable_compatibility_mode(disable_warnings=True)
            after = bridge(ids, return_type="logits").double().log_softmax(-1)
            off = float((before - after).abs().max() / before.abs().max())
            # folding rounds, in float32 by far less than 1%, in half precision by some units
            expected, got = "the outputs of the Hugging Face model", f"others, by {off:.2g}"
            fits = off <= max(0.01, 8 * torch.finfo(hf_model.dtype).eps)
            kind, instead = UnsupportedModelError, "processed=False"
            require(fits, name, expected=expected, got=got, instead=instead, error=kind)
    return remember(bridge.eval(), name=name, head_trained=head_trained)


def _require_hugging_face(model: Any, expected: str = "a model of transformers") -> None:
    got, instead = type(model).__name__, "tl_geometry.view(model) of one of TransformerLens"
    # TransformerLens's models have cfg, and a bridge passes on the config of what it wraps
    fits = hasattr(model, "config") and not hasattr(model, "cfg")
    require(fits, "model", expected=expected, got=got, instead=instead)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no remarks of transformers on standard error, and no draw from the
    global generator, by which models are initialised before their weights are read."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()


def _on_disk(tokenizer: Any, directory: str) -> Any:
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


def _read(directory: Path, dtype: torch.dtype) -> tuple[Any, Any, bool]:
    """Model and tokenizer of a directory, and whether its output head was there. transformers draws
    missing weights at random; all but the head must be there. Nothing is unpickled."""
    import transformers

    options = {"local_files_only": True, "trust_remote_code": False}
    saved = (transformers.AutoConfig.from_pretrained(directory, **options).architectures or [""])[0]
    # a bare decoder (GPT2Model) gets its language model's head, which is tied or counts as missing
    bare = saved.endswith("Model") and not saved.endswith("LMHeadModel")
    name = "BertForMaskedLM" if saved.startswith("Bert") else "" if bare else saved
    loader: Any = getattr(transformers, name, transformers.AutoModelForCausalLM)
    asked = {"dtype": dtype, "attn_implementation": "eager", "use_safetensors": True, **options}
    with quiet():
        model, info = loader.from_pretrained(directory, output_loading_info=True, **asked)
    missing = [key for key in info["missing_keys"] if not key.startswith(UNREAD)]
    lost = [key for key in missing if not key.startswith(HEADS)]
    lost += [str(key[0]) for key in info["mismatched_keys"]]
    expected = f"in {directory.name} every weight that its config.json asks for"
    require(not lost, "model", expected=expected, got=f"no {', '.join(sorted(lost)[:4])}")
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    has = any((directory / file).is_file() for file in files)
    load = transformers.AutoTokenizer.from_pretrained
    return model, load(directory, **options) if has else None, not missing
