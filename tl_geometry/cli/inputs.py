"""How do the words of a command become a model and its tokens? Nothing heavy is imported before
something is loaded, so that a mistyped option costs no more time than starting Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_geometry.base.errors import choice, fail, require
from tl_geometry.base.printable import printable
from tl_geometry.corpus.text_files import file_names, read_text

if TYPE_CHECKING:
    from tl_geometry.corpus.token_windows import TokenWindows

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Values of ``--dtype``."""
LENGTH = 512
"""Tokens of a window of a basis, if the user gives no length and the model takes as many."""
NARROW = 512
"""Width of a model below which threads cost more time than they save: on two busy cores a report of
a model 128 wide took 234 s on two threads and 65 s on one."""


def check_model_options(model: str | None, device: str, dtype: str) -> None:
    """Refuse a path that is no Hugging Face directory, and a device or dtype of no name."""
    choice(dtype, DTYPES, "--dtype")
    known = re.fullmatch(r"cpu|mps|cuda(:\d+)?", device)
    require(known, "--device", expected="cpu, cuda, cuda:1 or mps", got=repr(device))
    if model is None:
        return
    require(model.strip(), "model", expected="a name or a directory", got=repr(model))
    path = Path(model).expanduser()
    is_path = model.startswith(("/", ".", "~", "\\")) or path.exists()
    found = not is_path or (path / "config.json").is_file()
    expected = "a Hugging Face directory with config.json, or a name that TransformerLens knows"
    require(found, "model", expected=expected, got=printable(model))


def load_model(model: str | None, device: str, dtype: str, *, processed: bool) -> Any:
    """The model of this name: the embedded one, smollm2, minilm, a directory, or a name that
    TransformerLens knows."""
    import torch

    from tl_geometry import models, zoo

    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    if model is None:
        loaded = zoo.embedded(processed=processed)
        on_place = (device, dtype) == ("cpu", "float32")
        return loaded if on_place else loaded.to(device).to(options["dtype"])
    if model == "minilm":
        return zoo.minilm(**options)
    if model == "smollm2":
        return zoo.smollm2(processed=processed, **options)
    return models.load(model, processed=processed, **options)


def check_corpus(corpus: Sequence[Path]) -> None:
    """Read all text files once, so that an unreadable one is refused before any work."""
    for path in corpus:
        read_text(path, what="--corpus")
    file_names(corpus)


def cut(
    model: Any,
    corpus: Sequence[Path],
    length: int,
    contexts: int | None,
    *,
    most: int | None = None,
    bos: bool | None = None,
    seed: int = 0,
) -> TokenWindows:
    """Windows of the text files, or of the held-out standard-library modules: ``contexts`` of them,
    or all, at most ``most``."""
    from tl_geometry.base.errors import GeometryError
    from tl_geometry.corpus.texts import windows
    from tl_geometry.zoo.corpus import held_out_documents

    documents: Any = [*corpus]
    names, label = file_names(corpus), ", ".join(path.name for path in corpus)
    if not corpus:
        held_out = held_out_documents()
        documents, names = held_out.texts, held_out.names
        label = "held-out standard-library modules"
    options: Any = {"prepend_bos": bos, "labels": names, "seed": seed, "corpus": label}
    try:
        return windows(model, documents, length, n=contexts or most, **options)
    except GeometryError as error:
        # fewer windows than a report would take: all of them, where the number was not the user's
        if error.what != "n" or contexts is not None:
            raise
        return windows(model, documents, length, **options)


def token_rows(path: Path) -> Any:
    """The rows of a ``.npy`` file of token ids ``[context position]``, memory-mapped."""
    import numpy as np

    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        got = f"{printable(str(path))} ({' '.join(str(error).split())[:120]})"
        fail("--corpus", expected="a .npy file of token ids", got=got, instead="numpy.save")
    require(ids.ndim == 2, "--corpus", expected="rows of token ids", got=f"{ids.ndim} axes")
    return ids


def shard_of(text: str | None) -> tuple[int, int]:
    """``i/n`` as two numbers, 1 <= i <= n.

    >>> shard_of("2/8"), shard_of(None)
    ((2, 8), (1, 1))
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text or "1/1")
    i, n = (int(found[1]), int(found[2])) if found else (0, 0)
    require(1 <= i <= n, "--shard", expected="i/n with 1 <= i <= n", got=repr(text))
    return i, n
