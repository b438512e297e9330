"""A local Hugging Face directory as a model: whole, without anybody's code, and without unpickling
anything.

Loading draws what a file lacks at random and says so in a table at most. Here every weight that is
missing, left over or of another shape is refused by name, except for what no forward pass reads
(masks that old versions saved, the tables of a rotary embedding) and for the output head, without
which states, scores and patterns are right all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tl_geometry.base.errors import fail, require

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
"""Ends of the names of buffers that old versions saved and new ones make."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


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
    if saved in ENCODERS:
        loader = (
            transformers.BertForPreTraining
            if model_class == "hooked"
            else transformers.BertForMaskedLM
        )
    else:
        body = saved.endswith("Model") and not saved.endswith("LMHeadModel")
        loader = (
            None if body else getattr(transformers, saved, None)
        ) or transformers.AutoModelForCausalLM
    custom = bool(config.get("auto_map")) and not hasattr(transformers, saved)
    require(
        not custom,
        "model",
        expected="an architecture of the installed transformers",
        got=f"{directory.name}, which brings code of its own",
        instead="from_hf(model) with the model that this code makes",
    )
    model, info = _loaded(loader, directory, dtype)
    new = _require_whole(directory.name, info)
    model._newly_initialised = any(k.startswith(HEADS) for k in new)
    files = [
        f
        for f in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
        if (directory / f).is_file()
    ]
    if not files:
        return model, None
    return model, transformers.AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )


@contextmanager
def only_whole(name: str) -> Iterator[list[bool]]:
    """Inside, what transformers loads for somebody else's loader is refused like a directory that
    is not whole.

    The list that it gives says of each model that was loaded whether its output head was new.
    """
    import transformers

    base, new = transformers.PreTrainedModel, []
    loader = base.__dict__["from_pretrained"]

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        model, info = loader.__func__(cls, *args, **{**options, "output_loading_info": True})
        new.append(any(k.startswith(HEADS) for k in _require_whole(name, info)))
        return (model, info) if options.get("output_loading_info") else model

    base.from_pretrained = classmethod(from_pretrained)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield new
    finally:
        base.from_pretrained = loader


def _config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(
            "model",
            expected=f"a readable config.json in {directory.name}",
            got=f"{type(error).__name__}: {error}",
        )
    require(
        isinstance(config, dict),
        "model",
        expected=f"an object in config.json of {directory.name}",
        got=type(config).__name__,
    )
    return config


def _require_safetensors(directory: Path) -> None:
    """Pickled weights can run any code when they are read, so they are not read."""
    pickled = sorted(
        p.name for p in directory.iterdir() if p.suffix in PICKLED and p.name != "training_args.bin"
    )
    safe = any(p.suffix == ".safetensors" for p in directory.iterdir())
    require(
        safe or not pickled,
        "model",
        expected=f"weights as safetensors in {directory.name}",
        got=f"{', '.join(pickled[:4])} (pickled)",
        instead="model.save_pretrained(directory) where you trust that file, which writes "
        "safetensors",
    )


def _loaded(loader: Any, directory: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": "eager",
        "local_files_only": True,
        "output_loading_info": True,
    }
    try:
        with quiet():
            # sizes that differ are taken here so that they are named below
            return loader.from_pretrained(
                directory,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except (
        Exception
    ) as error:  # the file format, the hub's client and the model class raise their own kinds
        text = (str(error).strip().splitlines() or [""])[0][:200]
        fail(
            "model",
            expected=f"weights in {directory.name}",
            got=f"{type(error).__name__}: {text}",
            instead="a whole directory",
        )


def _require_whole(name: str, info: dict[str, Any]) -> tuple[str, ...]:
    """Names of weights that the output head lacks, after making sure that nothing else is wrong."""

    def read(keys: Iterable[str]) -> list[str]:
        return sorted(k for k in keys if not k.startswith(UNREAD) and not k.endswith(BUFFERS))

    missing = read(info["missing_keys"])
    new = tuple(k for k in missing if k.startswith(HEADS))
    shapes = {
        k[0]: f"{k[0]} of shape {tuple(k[1])} where {tuple(k[2])} is asked for"
        for k in info["mismatched_keys"]
    }
    wrong = {
        "no": [k for k in missing if k not in new and k not in shapes],
        "of another shape": list(shapes.values()),
        "unexpected": read(info["unexpected_keys"]),
        "unreadable": [str(e) for e in info.get("error_msgs", ())],
    }
    got = "; ".join(f"{what} {_some(keys)}" for what, keys in wrong.items() if keys)
    require(
        not got,
        "model",
        expected=f"in {name} every weight that its config.json asks for, and no other",
        got=got,
        instead="a whole directory",
    )
    return new


def _some(keys: Sequence[str]) -> str:
    shown = ", ".join(keys[:4])
    return shown if len(keys) <= 4 else f"{shown} and {len(keys) - 4} more"


__all__ = ["ENCODERS", "only_whole", "quiet", "read_directory"]
