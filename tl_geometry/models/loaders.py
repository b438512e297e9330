"""How is a model loaded as a TransformerLens object? :func:`load` takes a name or a local directory
(offline then), :func:`from_hf` a Hugging Face model in memory. The command line, the zoo and users
call them; the result is the same on every version of TransformerLens, or it is refused."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.errors import GeometryError, UnsupportedModelError, choice, fail, require
from tl_geometry.models.batches import device_of
from tl_geometry.models.configs import BY_HAND, hooked_config
from tl_geometry.models.directories import ENCODERS, only_whole, read_directory
from tl_geometry.models.fingerprints import DTYPES, remember, require_numbers
from tl_geometry.models.names import CLASSES, EXPECTED, look_up


def load(
    name: str | Path,
    *,
    model_class: str = "bridge",
    processed: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Any:
    """Load a model by a name that TransformerLens knows, or from a local Hugging Face directory
    (then without any network).

    ``model_class="bridge"`` is a TransformerBridge; ``"hooked"`` a HookedTransformer, or for BERT a
    HookedEncoder (TransformerLens 3 only). ``processed`` folds and centres weights as
    TransformerLens does by default. A directory of a bare BERT encoder (sentence transformers) is
    loaded with a newly initialised output head, and marked so: only its states are of use.

    Raises ``GeometryError`` where the weights cannot be had, ``UnsupportedModelError`` where the
    class cannot hold the model.
    """
    choice(model_class, CLASSES, "model_class")
    # refused before anything large is imported or read
    dtypes = ", ".join(map(str, DTYPES))
    require(dtype in DTYPES, "dtype", expected=dtypes, got=repr(dtype))
    device = device_of(device, "cpu")
    directory = Path(name).expanduser()
    if (directory / "config.json").is_file():
        hf, tokenizer = read_directory(directory, model_class, dtype)
        options = {"model_class": model_class, "processed": processed, "device": device}
        return from_hf(hf, tokenizer, name=_shown(directory), dtype=dtype, **options)
    if directory.is_dir() or str(name).startswith(("/", ".", "~")):
        got = f"{directory.name} without one" if directory.is_dir() else f"no directory {name}"
        expected = "a Hugging Face directory with config.json, or a name that TransformerLens knows"
        fail("model", expected=expected, got=got)
    return _by_name(str(name), model_class, processed, dtype, device)


@torch.no_grad()
def from_hf(
    hf_model: Any,
    tokenizer: Any = None,
    *,
    model_class: str = "bridge",
    processed: bool = False,
    name: str = "model",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Any:
    """A TransformerLens model around a Hugging Face model in memory (a bridge instruments it in
    place).

    It stays on its device, in its precision, unless ``device`` or ``dtype`` is given. ``tokenizer``
    may be ``None``: the model then takes token ids only. A conversion or processing that changes
    what the model computes is refused (ALiBi of 6 heads or local YaRN as a HookedTransformer,
    folding of a mixture of experts).
    """
    choice(model_class, CLASSES, "model_class")
    require_numbers(hf_model)
    hf_model = hf_model.to(device=device, dtype=dtype or next(hf_model.parameters()).dtype).eval()
    with warnings.catch_warnings(), TemporaryDirectory() as scratch:
        # deprecations of HookedTransformer, and remarks on centring that processing makes
        warnings.simplefilter("ignore")
        make = _bridge if model_class == "bridge" else _hooked
        ids = torch.arange(3, 11, device=hf_model.device).unsqueeze(0) % hf_model.config.vocab_size
        # half precision differs by rounding alone
        exact = next(hf_model.parameters()).dtype in (torch.float32, torch.float64)
        before = _log_probabilities(_logits(hf_model(ids))) if exact else None
        model = make(hf_model, _on_disk(tokenizer, Path(scratch)), processed, name)
        if before is not None:
            after = _log_probabilities(model(ids, return_type="logits"))
            error = float((before - after).abs().max())
            # conversion and folding round, by far less than 1%
            if not error <= 0.01 * float(before.abs().max()):
                expected = "the outputs of the Hugging Face model"
                got = f"log probabilities off by {error:.2g}"
                instead = 'processed=False, model_class="bridge", or another TransformerLens'
                fail(name, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    new_head = getattr(hf_model, "_newly_initialised", False)
    return remember(model.eval(), name=name, head_trained=not new_head)


def _on_disk(tokenizer: Any, directory: Path) -> Any:
    """A tokenizer that was made in memory, as if it had been read from a directory: TransformerLens
    reads it again from its path."""
    if tokenizer is None or tokenizer.init_kwargs.get("name_or_path"):
        return tokenizer
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(directory)
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


def _logits(output: Any) -> Tensor:
    """Token logits of a Hugging Face output (``BertForPreTraining`` has two heads and another name
    for them)."""
    return output.prediction_logits if hasattr(output, "prediction_logits") else output.logits


def _log_probabilities(logits: Tensor) -> Tensor:
    return logits.detach().double().log_softmax(-1)


def _shown(directory: Path) -> str:
    """The directory's name, or its parent's where that says nothing."""
    path = directory.resolve()
    return path.parent.name if path.name in ("model", "checkpoint", "snapshot") else path.name


def _by_name(
    name: str, model_class: str, processed: bool, dtype: torch.dtype, device: torch.device
) -> Any:
    """A model of TransformerLens's own list, or (for a bridge) another ``owner/name`` of the
    Hugging Face hub."""
    entry = look_up(name, model_class)
    options: dict[str, Any] = {"device": str(device), "dtype": dtype}
    try:
        with warnings.catch_warnings(), only_whole(name) as new:
            warnings.simplefilter("ignore")
            if model_class == "bridge":
                from transformer_lens.model_bridge import TransformerBridge as Bridge

                model = Bridge.boot_transformers(name, trust_remote_code=False, **options)
                _process(model, processed)
            else:
                hooked = hooked_class("HookedTransformer")
                make = hooked.from_pretrained if processed else hooked.from_pretrained_no_processing
                model = make(name, **options).eval()
    except GeometryError:
        raise
    except Exception as error:  # each loader and the hub raise their own types
        reason = f"{type(error).__name__}: {_first_line(error)}"
        if entry.listed:
            got = f"a known name that cannot be fetched ({reason})"
            fail("model", expected=f"weights of {name!r}", got=got, instead="a local directory")
        # a hub that was not reached says nothing about an unknown name
        cause = "" if isinstance(error, OSError) else f" ({reason})"
        fail("model", expected=EXPECTED, got=entry.unknown + cause, instead=entry.near)
    return remember(model, name=name, head_trained=not any(new))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _bridge(hf_model: Any, tokenizer: Any, processed: bool, name: str) -> Any:
    """The model as a TransformerBridge."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    architecture = type(hf_model).__name__
    # fused attention has no scores and patterns to hook
    hf_model.config._attn_implementation = "eager"
    try:
        model = build_bridge_from_module(
            hf_model, architecture, hf_config=hf_model.config, tokenizer=tokenizer
        )
    except (ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        expected = "an architecture that TransformerBridge supports"
        got = f"{architecture} ({_first_line(error)})"
        fail(name, expected=expected, got=got, error=UnsupportedModelError)
    _process(model, processed)
    return model


def _process(model: Any, processed: bool) -> None:
    """Fold and centre the weights of a bridge, which TransformerLens calls compatibility mode."""
    if processed:
        model.enable_compatibility_mode(disable_warnings=True)


def hooked_class(which: str) -> Any:
    """HookedTransformer or HookedEncoder, which TransformerLens 4 no longer has."""
    try:
        module = importlib.import_module(f"transformer_lens.{which}")
    except ImportError:
        what, expected = "model_class", f"TransformerLens 3 for {which}"
        got, instead = "a version without it", 'model_class="bridge"'
        fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    return getattr(module, which)


def _hooked(hf_model: Any, tokenizer: Any, processed: bool, name: str) -> Any:
    """The model as a HookedTransformer or HookedEncoder."""
    encoder = type(hf_model).__name__ in ENCODERS
    hf_model = _with_pooler(hf_model) if encoder else hf_model
    hooked = hooked_class("HookedEncoder" if encoder else "HookedTransformer")
    import transformer_lens.loading_from_pretrained as loading

    architecture, dtype = type(hf_model).__name__, next(hf_model.parameters()).dtype
    # TransformerLens guesses the architecture from the path, so it gets a neutral one
    with TemporaryDirectory() as parent:
        directory = Path(parent, "checkpoint")
        directory.mkdir()
        config = hf_model.config.to_dict()
        config["architectures"] = ["BertForMaskedLM" if encoder else architecture]
        config.setdefault("n_ctx", config.get("n_positions"))
        (directory / "config.json").write_text(json.dumps(config, default=str))
        try:
            if architecture in BY_HAND:
                cfg = hooked_config(hf_model, fold_ln=processed, dtype=dtype)
            else:
                cfg = loading.get_pretrained_model_config(
                    str(directory),
                    device=str(hf_model.device),
                    fold_ln=processed and not encoder,
                    dtype=dtype,
                )
            cfg.model_name, cfg.tokenizer_name = name, None
            state = loading.get_pretrained_state_dict(
                str(directory), cfg, hf_model=hf_model, dtype=dtype
            )
            return _fill(hooked, cfg, state, tokenizer, processed, encoder)
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
            expected = f"an architecture that {hooked.__name__} can hold"
            got, instead = f"{architecture} ({_first_line(error)})", 'model_class="bridge"'
            fail(name, expected=expected, got=got, instead=instead, error=UnsupportedModelError)


def _with_pooler(hf_model: Any) -> Any:
    """The same encoder with the pooler and the next-sentence head that HookedEncoder wants (newly
    initialised, never used here)."""
    import transformers

    if type(hf_model).__name__ == "BertForPreTraining":
        return hf_model
    full = transformers.BertForPreTraining(hf_model.config)
    full = full.to(hf_model.device, next(hf_model.parameters()).dtype).eval()
    full.load_state_dict(hf_model.state_dict(), strict=False)
    return full


def _fill(
    hooked: Any, cfg: Any, state: dict[str, Any], tokenizer: Any, processed: bool, encoder: bool
) -> Any:
    """A hooked model of class ``hooked`` with the weights ``state``, processed if asked for."""
    model = hooked(cfg, tokenizer=tokenizer, move_to_device=False)
    if encoder:
        missing, unexpected = model.load_state_dict(state, strict=False)
        unread = ("mask", "IGNORE", "nsp", "pooler")
        lost = [k for k in (*missing, *unexpected) if not any(part in k for part in unread)]
        expected, got = "all weights of the encoder", f"no {', '.join(lost[:4])}"
        require(not lost, "model", expected=expected, got=got, error=UnsupportedModelError)
    else:
        # centring shifts all logits alike, which softmax does not see, but through a cap it does
        capped = float(getattr(cfg, "output_logits_soft_cap", -1.0) or -1.0) > 0
        # a norm that follows its block (OLMo 2) cannot be folded
        fold = processed and str(cfg.normalization_type).endswith("Pre")
        model.load_and_process_state_dict(
            state,
            fold_ln=fold,
            center_writing_weights=processed,
            center_unembed=processed and not capped,
            fold_value_biases=processed,
        )
    return model.to(cfg.device, print_details=False)
