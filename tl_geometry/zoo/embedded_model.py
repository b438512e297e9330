"""How is the embedded model loaded? With its tokenizer, card, untrained control and windows of its
held-out corpus. :func:`by_name` loads any model by the name that a command takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.model_like import ModelLike
from tl_geometry.zoo import corpus
from tl_geometry.zoo.pretrained import minilm_directory, smollm2

NAME = "tl-geometry-embedded"
"""The embedded model's name in results."""


def card() -> dict[str, Any]:
    """The model card: data, mixture, steps, losses, head scores, hashes.

    >>> card()["steps"]
    3600
    """
    return json.loads((directory() / "card.json").read_text(encoding="utf-8"))


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
    from safetensors.torch import load_file

    from tl_geometry.zoo.train_embedded import new_model

    model = new_model()
    if trained:  # not strict: the output head is tied to the embedding
        model.load_state_dict(load_file(directory() / "model.safetensors"), strict=False)
    return model


def by_name(
    name: str | Path, *, model_class: str = "bridge", processed: bool = False, **options: Any
) -> Any:
    """A model by the name that a command takes: ``"smollm2"``, ``"minilm"``, a name that
    TransformerLens knows, or a Hugging Face directory.

    ``options`` are ``dtype`` and ``device`` of :func:`tl_geometry.models.load`.

    >>> by_name(directory()).cfg.n_layers
    4
    """
    from tl_geometry.models import load

    options |= {"model_class": model_class, "processed": processed}
    if name == "smollm2":
        return smollm2(**options)
    return load(minilm_directory() if name == "minilm" else name, **options)


def embedded(*, model_class: str = "bridge", trained: bool = True, processed: bool = False) -> Any:
    """The embedded model as a TransformerBridge (``model_class="bridge"``) or HookedTransformer
    (``"hooked"``, TransformerLens 3.9).

    Args:
        trained: ``False`` gives the untrained control.
        processed: fold and centre the weights as TransformerLens does.

    >>> embedded().cfg.n_layers
    4
    """
    from tl_geometry.models import from_hf

    return from_hf(
        hugging_face(trained=trained),
        tokenizer(),
        model_class=model_class,
        processed=processed,
        name=NAME + ("" if trained else "-untrained"),
    )


def default_windows(
    model: ModelLike, length: int, *, n: int | None = None, prepend_bos: bool = True, seed: int = 0
) -> TokenWindows:
    """Windows of the held-out standard-library modules for any model, labelled by module.

    Arguments are those of :func:`tl_geometry.windows`.

    >>> default_windows(embedded(), 16, n=8).tokens.shape
    torch.Size([8, 16])
    """
    from tl_geometry.corpus.texts import windows

    documents = corpus.held_out_documents()
    return windows(
        model,
        documents.texts,
        length,
        n=n,
        prepend_bos=prepend_bos,
        labels=documents.names,
        seed=seed,
        corpus="held-out stdlib",
    )
