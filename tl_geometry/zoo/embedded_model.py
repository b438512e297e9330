"""How is the embedded model loaded? It is a GPT-2 of 4 blocks, 128 dimensions and 4 heads, trained
on Python source; with it come its tokenizer, card, untrained control and windows of its held-out
corpus. ``benchmarks/training/embedded.py`` trained it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.model_like import ModelLike
from tl_geometry.zoo import corpus

NAME = "tl-geometry-embedded"
"""The embedded model's name in results."""
SEED = 0
"""Under which its first weights were drawn: those of the untrained control."""


def directory() -> Path:
    """The embedded model as a Hugging Face directory (weights, configuration, byte-level BPE
    tokenizer, card).

    >>> (directory() / "model.safetensors").is_file()
    True
    """
    return Path(__file__).parent / "assets"


def tokenizer() -> Any:
    """The tokenizer of the embedded model; ``<|endoftext|>``, id 0, is its BOS token.

    >>> tokenizer().bos_token_id
    0
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory(), local_files_only=True)


def hugging_face(*, trained: bool = True) -> Any:
    """The embedded model as a ``transformers`` GPT2LMHeadModel. ``trained=False`` gives its
    untrained control: the weights from which its training began.

    >>> hugging_face(trained=False).config.n_layer
    4
    """
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config.from_json_file(directory() / "config.json")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    if trained:  # not strict: the output head is tied to the embedding
        model.load_state_dict(load_file(directory() / "model.safetensors"), strict=False)
    return model


def embedded(*, trained: bool = True, processed: bool = False) -> Any:
    """The embedded model as a TransformerBridge.

    Args:
        trained: ``False`` gives the untrained control.
        processed: fold and centre the weights as TransformerLens does.

    >>> embedded().cfg.n_layers
    4
    """
    from tl_geometry.models import from_hf

    model, name = hugging_face(trained=trained), NAME + ("" if trained else "-untrained")
    return from_hf(model, tokenizer(), name=name, processed=processed)


def default_windows(
    model: ModelLike, length: int, *, n: int | None = None, prepend_bos: bool = True, seed: int = 0
) -> TokenWindows:
    """Windows of the held-out standard-library modules for any model, labelled by module.

    Arguments are those of :func:`tl_geometry.windows`, but texts begin with BOS by default.

    >>> default_windows(embedded(), 16, n=8).tokens.shape
    torch.Size([8, 16])
    """
    from tl_geometry import windows

    documents = corpus.held_out_documents()
    options: dict[str, Any] = {"n": n, "prepend_bos": prepend_bos, "seed": seed}
    options |= {"labels": documents.names, "corpus": "held-out stdlib"}
    return windows(model, documents.texts, length, **options)
