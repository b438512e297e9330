"""How do the options of a command become its model and tokens? :class:`Inputs` checks them, loads
the model and cuts the texts into windows. All commands share it.

Nothing heavy is imported before something is loaded, so that a mistyped option costs no more time
than starting Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tl_geometry.base.errors import GeometryError, check_seed, choice, fail, require
from tl_geometry.base.printable import printable
from tl_geometry.corpus.text_files import file_names, read_texts

if TYPE_CHECKING:
    import numpy as np

    from tl_geometry.corpus.token_windows import TokenWindows
    from tl_geometry.models.model_like import ModelLike
    from tl_geometry.models.model_view import ModelView

DTYPES = ("float32", "float64", "bfloat16", "float16")
"""Values of ``--dtype``."""
LENGTH = 512
"""Tokens of a window if the user gives no length and the model takes as many."""


class Texts(NamedTuple):
    """The documents of a corpus, a name for each, a label for the whole corpus, and remarks."""

    documents: tuple[str | Path, ...]
    names: tuple[str, ...]
    label: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A model and the texts it runs on, as a command names them. Each field is an option of the
    command line, and its annotation is the help of that option."""

    model: Annotated[
        str | None,
        "A name that TransformerLens knows, a Hugging Face directory, smollm2 or minilm; default: "
        "the embedded model.",
    ] = None
    corpus: Annotated[
        tuple[Path, ...],
        "Text file, a document each; may be repeated. Default: held-out standard library.",
    ] = ()
    encoding: Annotated[str, "Encoding of the text files."] = "utf-8"
    contexts: Annotated[
        int | None,
        "Windows to use (default: all; in reports what the budget allows, at most 1024).",
    ] = None
    length: Annotated[
        int | None,
        "Tokens of a window (default: what the model, and in reports the budget, allows, at most "
        "512).",
    ] = None
    bos: Annotated[
        bool | None, "Begin windows with the BOS token (default: if the tokenizer has one)."
    ] = None
    device: Annotated[str, "cpu, cuda, cuda:1, mps."] = "cpu"
    dtype: Annotated[str, "float32, float64, bfloat16 or float16."] = "float32"
    processed: Annotated[bool, "Fold and centre the weights as TransformerLens does."] = False
    seed: Annotated[int, "Seed of every random choice: windows, nulls, controls."] = 0

    def __post_init__(self) -> None:
        choice(self.dtype, DTYPES, "--dtype")
        check_device(self.device)
        _check_directory(self.model)
        at_least(self.contexts, 1, "--contexts")
        at_least(self.length, 2, "--length")
        check_seed(self.seed)

    @property
    def token_file(self) -> bool:
        """Whether the corpus is given as token ids, in a ``.npy`` file."""
        return any(path.suffix == ".npy" for path in self.corpus)

    def check_corpus(self, *, ids: bool = False) -> None:
        """Read all text files once, so that an unreadable one is refused before any work. With
        ``ids`` a single ``.npy`` file of token ids is allowed too."""
        if not (ids and self.token_file):
            for path in self.corpus:
                read_texts([path], self.encoding)
            file_names(self.corpus)
            return
        got = printable(", ".join(map(str, self.corpus)))
        single_file = len(self.corpus) == 1 and self.corpus[0].is_file()
        require(single_file, "--corpus", expected="one existing .npy file", got=got)
        expected, no_windows = "none with a token file", self.length is None and self.bos is None
        require(no_windows, "--length, --bos", expected=expected, got="some", instead="text files")

    def load(self, *, device: str | None = None, trained: bool = True) -> Any:
        """The model, on ``device`` if one is given, else on that of the options. ``trained=False``
        gives the untrained control of the embedded model."""
        import torch

        from tl_geometry import zoo
        from tl_geometry.models import load
        from tl_geometry.zoo.pretrained import minilm_directory

        target, dtype = device or self.device, getattr(torch, self.dtype)
        options: dict[str, Any] = {"processed": self.processed}
        if self.model is None:
            model = zoo.embedded(trained=trained, **options)
            on_place = (target, self.dtype) == ("cpu", "float32")
            return model if on_place else model.to(target).to(dtype)
        options |= {"dtype": dtype, "device": target}
        if self.model == "smollm2":
            return zoo.smollm2(**options)
        return load(minilm_directory() if self.model == "minilm" else self.model, **options)

    def texts(self) -> Texts:
        """The documents of the text files, or the held-out standard-library modules."""
        from tl_geometry.zoo.corpus import held_out_documents

        if not self.corpus:
            held_out = held_out_documents()
            notes = (held_out.note,) if held_out.note else ()
            label = "held-out standard-library modules"
            return Texts(held_out.texts, held_out.names, label, notes)
        names = tuple(file_names(self.corpus))
        utf8 = self.encoding.lower() in ("utf-8", "utf8")
        documents = self.corpus if utf8 else tuple(read_texts(self.corpus, self.encoding)[0])
        return Texts(documents, names, ", ".join(names))

    def windows(
        self, view: ModelView, texts: Texts, length: int | None = None, *, most: int | None = None
    ) -> TokenWindows:
        """Windows of the texts: ``contexts`` of them, or at most ``most`` if the user gave no
        number. The choice is seeded; windows keep the order of the corpus."""
        from tl_geometry.corpus.texts import windows

        size = length or self.length or min(view.n_ctx, LENGTH)
        fits = 2 <= size <= view.n_ctx
        require(fits, "--length", expected=f"2 to {view.n_ctx} tokens", got=size)
        options: Any = {
            "prepend_bos": view.bos_id is not None if self.bos is None else self.bos,
            "labels": texts.names,
            "seed": self.seed,
            "corpus": texts.label,
        }
        try:
            return windows(view, texts.documents, size, n=self.contexts or most, **options)
        except GeometryError as error:
            if error.what != "n":
                raise
            # fewer windows than asked for: all of them where the number was not the user's
            expected, instead = f"{error.expected} of {size} tokens", "more --corpus"
            got = self.contexts
            require(got is None, "--contexts", expected=expected, got=got, instead=instead)
            return windows(view, texts.documents, size, **options)

    def tokens(self, model: ModelLike) -> TokenWindows | np.ndarray:
        """All tokens: windows of the texts, or the rows of a ``.npy`` file
        ``[context position]``, which is memory-mapped."""
        import numpy as np

        from tl_geometry.models.reader import as_view

        if not self.token_file:
            return self.windows(as_view(model), self.texts())
        try:
            ids = np.load(self.corpus[0], mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            got = f"{self.corpus[0]} ({' '.join(str(error).split())[:120]})"
            fail("--corpus", expected="a .npy file of token ids", got=got, instead="numpy.save")
        rows = len(ids) if getattr(ids, "ndim", 0) else 0
        expected = f"at most {rows}, the rows of the file"
        enough = self.contexts is None or self.contexts <= rows
        require(enough, "--contexts", expected=expected, got=self.contexts)
        return ids if self.contexts is None else ids[: self.contexts]


def at_least(value: int | None, low: int, what: str) -> None:
    """Refuse a number below ``low``; ``None`` is the default and passes."""
    require(value is None or value >= low, what, expected=f"{low} or more", got=value)


def _check_directory(name: str | None) -> None:
    """Refuse a path that is not a Hugging Face directory. Names that do not look like a path pass:
    TransformerLens may know them."""
    if name is None:
        return
    expected = "a name, a directory, or nothing for the embedded model"
    require(name.strip(), "model", expected=expected, got=repr(name))
    path = Path(name).expanduser()
    is_path = name.startswith(("/", ".", "~", "\\")) or path.is_dir() or path.is_file()
    if not is_path or (path / "config.json").is_file():
        return
    got = f"{'a file' if path.is_file() else 'no directory'} {printable(name)}"
    if path.is_dir():
        got = f"{printable(path.name or str(path))} without one"
    expected = "a Hugging Face directory with config.json, or a name that TransformerLens knows"
    fail("model", expected=expected, got=got)


def check_device(device: str) -> None:
    """Refuse a text that names no device, and a GPU that is absent (torch is imported only for a
    GPU)."""
    well_formed = re.fullmatch(r"cpu|mps|cuda(:\d+)?", device) is not None
    require(well_formed, "--device", expected="cpu, cuda, cuda:1 or mps", got=repr(device))
    if device == "cpu":
        return
    import torch

    if device == "mps":
        available, got = torch.backends.mps.is_available(), "none"
    else:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        available, got = int(device.partition(":")[2] or 0) < count, f"{count} CUDA devices"
    expected = f"a machine with {'MPS' if device == 'mps' else device}"
    require(available, "--device", expected=expected, got=got, instead="--device cpu")
