"""How is a local Hugging Face directory read as a model? All weights or none, without running code
from the directory, without unpickling anything. :func:`tl_geometry.models.load` calls this.

transformers initialises missing weights at random and at most prints a table. Here every weight
that is missing, left over or of another shape is refused by name, except for what no forward pass
reads (masks that old versions saved, tables of a rotary embedding) and for the output head, without
which states, scores and patterns are still right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock, get_ident
from typing import Any

import torch

from tl_geometry.base.errors import fail, require
from tl_geometry.models.user_hooks import brief

ENCODERS = ("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction")
HEADS = ("cls.predictions", "lm_head", "embed_out", "score")
"""Output heads, the only weights that may be new."""
UNREAD = ("pooler.", "bert.pooler.", "cls.seq_relationship.")
"""Parts of an encoder that nothing here reads: HookedEncoder wants them, a masked language model
leaves them out."""
BUFFERS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".position_ids",
    ".rotary_emb.inv_freq",
    ".attn.embed_positions",
)
"""Ends of the names of buffers that old versions saved and new ones compute."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Ends of the names of files that are read by unpickling."""


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no remarks of transformers on standard error (what matters in them
    becomes ``head_trained``)."""
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


def read_directory(directory: Path, model_class: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a directory; ``_newly_initialised`` is set where the checkpoint has no
    output head.

    Raises ``GeometryError`` for weights that are pickled, truncated, missing, left over or of
    another shape, and for custom code.
    """
    config = _config(directory)
    _require_safetensors(directory)
    import transformers

    saved = (config.get("architectures") or [""])[0]
    loader = getattr(transformers, saved, None)
    expected = "an architecture of the installed transformers"
    got = f"{directory.name}, which brings code of its own"
    instead = "from_hf(model) with the model that this code makes"
    known = loader is not None or not config.get("auto_map")
    require(known, "model", expected=expected, got=got, instead=instead)
    if saved in ENCODERS:
        hooked = model_class == "hooked"  # HookedEncoder wants the next-sentence head too
        loader = transformers.BertForPreTraining if hooked else transformers.BertForMaskedLM
    elif saved.endswith("Model") and not saved.endswith("LMHeadModel"):  # saved without a head
        loader = None
    model, info = _loaded(loader or transformers.AutoModelForCausalLM, directory, dtype)
    model._newly_initialised = _head_is_new(directory.name, info)
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((directory / name).is_file() for name in files):
        return model, None
    return model, transformers.AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )


@contextmanager
def only_whole(name: str) -> Iterator[list[bool]]:
    """Inside the block, a model that TransformerLens loads through transformers is refused where
    weights are missing, as a directory is.

    For this the block replaces ``PreTrainedModel.from_pretrained``, which all threads share: one
    block at a time is open, and other threads load as before. It gives a list that says of each
    model that was loaded whether its output head is new.
    """
    import transformers

    base, new_heads, thread = transformers.PreTrainedModel, [], get_ident()

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        if get_ident() != thread:
            return loader.__func__(cls, *args, **options)
        model, info = loader.__func__(cls, *args, **{**options, "output_loading_info": True})
        new_heads.append(_head_is_new(name, info))
        return (model, info) if options.get("output_loading_info") else model

    with _REPLACED:
        loader = base.__dict__["from_pretrained"]
        base.from_pretrained = classmethod(from_pretrained)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield new_heads
        finally:
            base.from_pretrained = loader


_REPLACED = RLock()
"""Held by the block that has replaced transformers's loader."""


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        problem = "" if isinstance(config, dict) else f"a {type(config).__name__}"
    except (OSError, ValueError) as error:
        config, problem = {}, f"{type(error).__name__}: {error}"
    expected = f"a readable config.json in {directory.name}, one object"
    require(not problem, "model", expected=expected, got=problem)
    return config


def _require_safetensors(directory: Path) -> None:
    """Pickled weights can run any code when they are read, so they are not read."""
    # training_args.bin holds the trainer's settings, no weights, and is never read
    pickled = sorted(
        p.name for p in directory.iterdir() if p.suffix in PICKLED and p.name != "training_args.bin"
    )
    safe = any(p.suffix == ".safetensors" for p in directory.iterdir())
    expected = f"weights as safetensors in {directory.name}"
    got = f"{', '.join(pickled[:4])} (pickled)"
    instead = "model.save_pretrained(directory) where you trust that file, which writes safetensors"
    require(safe or not pickled, "model", expected=expected, got=got, instead=instead)


def _loaded(loader: Any, directory: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    try:
        with quiet():
            return loader.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation="eager",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below by name
            )
    except Exception as error:  # the file format, the hub and the model class raise their own
        text = (str(error).strip().splitlines() or [""])[0][:200]
        got = f"{type(error).__name__}: {text}"
        fail("model", expected=f"weights in {directory.name}", got=got, instead="a whole directory")


def _head_is_new(name: str, info: dict[str, Any]) -> bool:
    """Whether the checkpoint lacks the output head; it must lack nothing else and hold nothing
    else."""

    def relevant(keys: Iterable[str]) -> list[str]:
        return sorted(k for k in keys if not k.startswith(UNREAD) and not k.endswith(BUFFERS))

    missing = relevant(info["missing_keys"])
    shapes = {
        k[0]: f"{k[0]} of shape {tuple(k[1])} where {tuple(k[2])} is asked for"
        for k in info["mismatched_keys"]
    }
    wrong = {
        "no": [k for k in missing if not k.startswith(HEADS) and k not in shapes],
        "of another shape": list(shapes.values()),
        "unexpected": relevant(info["unexpected_keys"]),
        "unreadable": [str(e) for e in info.get("error_msgs", ())],
    }
    got = "; ".join(f"{what} {brief(keys)}" for what, keys in wrong.items() if keys)
    expected = f"in {name} every weight that its config.json asks for, and no other"
    require(not got, "model", expected=expected, got=got, instead="a whole directory")
    return any(k.startswith(HEADS) for k in missing)
