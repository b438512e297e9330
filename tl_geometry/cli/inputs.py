"""How do the words of a command become a model and its tokens? Nothing heavy is imported before
something is loaded, so that a mistyped option costs no more time than starting Python."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_geometry.base.errors import GeometryError, choice, require
from tl_geometry.base.html import plain
from tl_geometry.corpus.text_files import read_text

if TYPE_CHECKING:
    from tl_geometry.corpus.token_windows import TokenWindows
    from tl_geometry.models.model_view import ModelView

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Values of ``--dtype``."""
LENGTH = 512
"""Tokens of a window of a basis, if the user gives no length and the model takes as many."""
NARROW = 512
"""Width of a model below which threads cost more time than they save: on two busy cores a report of
a model 128 wide took 234 s on two threads and 65 s on one."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What a user sets to choose the number of threads."""


def check_model(model: str | None, device: str, dtype: str) -> None:
    """Refuse a path that is no Hugging Face directory, and a device or dtype of no name."""
    choice(dtype, DTYPES, "--dtype")
    known = re.fullmatch(r"cpu|mps|cuda(:\d+)?", device)
    require(known, "--device", expected="cpu, cuda, cuda:1 or mps", got=repr(device))
    name = "the embedded model" if model is None else model
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~", "\\")) or path.exists()
    found = name.strip() and (not is_path or (path / "config.json").is_file())
    expected = "a Hugging Face directory with config.json, or a name that TransformerLens knows"
    require(found, "model", expected=expected, got=plain(repr(name)))


def load_model(model: str | None, device: str, dtype: str, *, processed: bool) -> ModelView:
    """The model of this name: the embedded one, smollm2, minilm, a directory, or a name that
    TransformerLens knows. Narrow models run on one thread, unless the user has set a number."""
    import torch

    from tl_geometry import models, zoo
    from tl_geometry.models.loading import require_device
    from tl_geometry.zoo.pretrained import minilm_directory

    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": require_device(device)}
    if model is None:
        loaded = zoo.embedded(processed=processed).to(**options, print_details=False)
    elif model == "smollm2":
        loaded = zoo.smollm2(processed=processed, **options)
    else:
        place = minilm_directory() if model == "minilm" else model
        loaded = models.load(place, processed=processed, **options)
    view = models.view(loaded)
    if view.d_model < NARROW and not any(name in os.environ for name in THREADS):
        torch.set_num_threads(1)
    return view


def check_corpus(corpus: Sequence[Path] | None) -> None:
    """Read all text files once, so that an unreadable one, or one that is given twice, is refused
    before any work."""
    for path in corpus or ():
        read_text(path, what="--corpus")
    once = corpus is None or len({path.resolve() for path in corpus}) == len(corpus)
    require(once, "--corpus", expected="each file once", got="one of them twice")


def windows_of(
    model: ModelView,
    corpus: Sequence[Path] | None,
    length: int,
    contexts: int | None,
    *,
    most: int | None = None,
    **options: Any,
) -> TokenWindows:
    """Windows of the text files, or of the held-out standard-library modules: ``contexts`` of them,
    else ``most``, or all where there are fewer."""
    from tl_geometry.corpus.texts import windows
    from tl_geometry.zoo import default_windows

    source = partial(windows, model, corpus) if corpus else partial(default_windows, model)
    cut = partial(source, length, **options)
    try:
        return cut(n=contexts or most)
    except GeometryError as error:
        # of fewer windows than the usual number all are taken, but not of fewer than were asked for
        if error.what != "n" or contexts is not None:
            raise
        return cut(n=None)


def shard_of(text: str) -> tuple[int, int]:
    """``i/n`` as two numbers, 1 <= i <= n.

    >>> shard_of("2/8")
    (2, 8)
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    i, n = (int(found[1]), int(found[2])) if found else (0, 0)
    require(1 <= i <= n, "--shard", expected="i/n with 1 <= i <= n", got=repr(text))
    return i, n


def check_file(out: Path, *, force: bool) -> None:
    """Refuse a file to write that is there already, or that can be none."""
    place = plain(out)
    named = out.suffix == ".safetensors" and not out.is_dir()
    named = named and (out.parent.is_dir() or not out.parent.exists())
    require(named, "--out", expected="a file name ending in .safetensors", got=place)
    free = force or not out.exists()
    require(free, "--out", expected="a new file", got=f"{place}, which is there", instead="--force")
