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

from tl_geometry.base.errors import check_seed, choice, fail, require
from tl_geometry.base.printable import printable
from tl_geometry.corpus.text_files import text_files
from tl_geometry.models.names import CLASSES, DTYPES, check_name

if TYPE_CHECKING:
    import numpy as np

    from tl_geometry.corpus.documents import Documents
    from tl_geometry.corpus.token_windows import TokenWindows
    from tl_geometry.models.model_like import ModelLike
    from tl_geometry.models.model_view import ModelView

LENGTH = 512
"""Tokens of a window if the user gives no length and the model takes as many."""


class Texts(NamedTuple):
    """The documents of a corpus, a name for each (``None``: named by file and line), a label for
    the whole corpus, and remarks."""

    documents: Documents
    names: tuple[str, ...] | None
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
    field: Annotated[
        str | None, "Field of .jsonl files that holds the text: each line is a document."
    ] = None
    pack: Annotated[
        bool, "Join documents with a blank line between them, so that short ones are used too."
    ] = False
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
    model_class: Annotated[
        str, "bridge (TransformerBridge) or hooked (HookedTransformer, TransformerLens 3.9)."
    ] = "bridge"
    processed: Annotated[bool, "Fold and centre the weights as TransformerLens does."] = False
    seed: Annotated[int, "Seed of every random choice: windows, nulls, controls."] = 0

    def __post_init__(self) -> None:
        choice(self.model_class, CLASSES, "--class")
        choice(self.dtype, DTYPES, "--dtype")
        check_device(self.device)
        _check_directory(self.model)
        check_name(self.model, self.model_class)
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
            lines = "files of JSON lines in --corpus"
            require(self.corpus or self.field is None, "--field", expected=lines, got="none")
            if self.corpus:
                text_files(self.corpus, self.encoding, field=self.field)
            return
        # options that say how text is read or cut mean nothing for ids: refused, not ignored
        ignored = " ".join(["--field"] * (self.field is not None) + ["--pack"] * self.pack)
        require(not ignored, ignored, expected="text files in --corpus", got="token ids")
        got = printable(", ".join(map(str, self.corpus)))
        single_file = len(self.corpus) == 1 and self.corpus[0].is_file()
        require(single_file, "--corpus", expected="one existing .npy file", got=got)
        expected, no_windows = "none with a token file", self.length is None and self.bos is None
        require(no_windows, "--length, --bos", expected=expected, got="some", instead="text files")

    def load(self, *, device: str | None = None, trained: bool = True) -> Any:
        """The model, on ``device`` if one is given, else on that of the options. ``trained=False``
        gives the untrained control of the embedded model."""
        import torch

        from tl_geometry.zoo.embedded_model import by_name, embedded

        target, dtype = device or self.device, getattr(torch, self.dtype)
        options: dict[str, Any] = {"model_class": self.model_class, "processed": self.processed}
        if self.model is not None:
            return by_name(self.model, dtype=dtype, device=target, **options)
        model = embedded(trained=trained, **options)
        if (target, self.dtype) == ("cpu", "float32"):
            return model
        return model.to(target).to(dtype)

    def texts(self) -> Texts:
        """The documents of the text files, or the held-out standard-library modules."""
        from tl_geometry.corpus.documents import Documents
        from tl_geometry.zoo.corpus import held_out_documents

        if not self.corpus:
            held_out = held_out_documents()
            notes = (held_out.note,) if held_out.note else ()
            label = "held-out standard-library modules"
            return Texts(Documents.of(held_out.texts), held_out.names, label, notes)
        files = text_files(self.corpus, self.encoding, field=self.field)
        names = tuple(file.name for file in files)
        label = ", ".join(names)
        return Texts(Documents(files), names if self.field is None else None, label)

    def windows(
        self, view: ModelView, texts: Texts, length: int | None = None, *, most: int | None = None
    ) -> TokenWindows:
        """Windows of the texts: ``contexts`` of them, or at most ``most`` if the user gave no
        number. The choice is seeded; windows keep the order of the corpus."""
        from tl_geometry.corpus.texts import windows

        size = length or self.length or min(view.n_ctx, LENGTH)
        fits = 2 <= size <= view.n_ctx
        require(fits, "--length", expected=f"2 to {view.n_ctx} tokens", got=size)
        chosen = windows(
            view,
            texts.documents,
            size,
            n=self.contexts or most,
            at_most=True,
            prepend_bos=view.bos_id is not None if self.bos is None else self.bos,
            labels=texts.names,
            seed=self.seed,
            pack=self.pack,
            corpus=texts.label,
        )
        # at_most returned what there is; fewer than --contexts asks for is refused by that name
        expected = f"at most {len(chosen)} windows of {size} tokens in this corpus"
        enough = self.contexts is None or self.contexts <= len(chosen)
        instead = "more --corpus"
        require(enough, "--contexts", expected=expected, got=self.contexts, instead=instead)
        return chosen

    def tokens(self, model: ModelLike) -> TokenWindows | np.ndarray:
        """All tokens: windows of the texts, or the rows of a ``.npy`` file
        ``[context position]``, which is memory-mapped."""
        from tl_geometry.corpus.sources import token_file
        from tl_geometry.models.reader import as_view

        if not self.token_file:
            return self.windows(as_view(model), self.texts())
        ids = token_file(self.corpus[0], "--corpus")
        rows = len(ids) if getattr(ids, "ndim", 0) else 0
        expected = f"at most {rows}, the rows of the file"
        enough = self.contexts is None or self.contexts <= rows
        require(enough, "--contexts", expected=expected, got=self.contexts)
        # TokenSource says what is wrong with an array of no dimension
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
