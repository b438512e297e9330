"""From the arguments of ``tl-geometry report`` to an :class:`~tl_geometry.report.Analysis`: load,
choose sizes, cut, decompose."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tl_geometry import __version__, zoo
from tl_geometry.base.errors import GeometryError, check_seed, choice, require
from tl_geometry.base.run_files import CHECKPOINT, LOCK, check_folder, lock
from tl_geometry.corpus.documents import Documents
from tl_geometry.corpus.sources import token_file
from tl_geometry.corpus.text_files import TOKENS, text_files
from tl_geometry.corpus.texts import cut_windows
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.names import CLASSES, DTYPES
from tl_geometry.models.reader import as_view
from tl_geometry.report.analysis import Analysis, versions, write
from tl_geometry.report.clock import Clock
from tl_geometry.report.contents import BASIS, BUDGETS, SECTIONS, report_files
from tl_geometry.report.folder import Folder
from tl_geometry.report.work import Costs, Work, threads_for

CONTEXTS, LENGTH = 1024, 512
"""Windows of the corpus, and longest window, where the user does not say."""
ENOUGH, SHORTEST, LEAST = 256, 128, 32
"""Windows are halved, down to SHORTEST tokens, until at least ENOUGH of them fit the share of the
decomposition; LEAST of them are taken in any case."""
SUMS, SAMPLED = 400 * 2**20, 256 * 2**20
"""Bytes that position sums may take before windows are halved, and bytes of the contexts that are
kept whole."""
GROUPS = 8
"""Groups of contexts, for errors."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a report was asked for: the options of the command."""

    model: str | None = None
    corpus: tuple[Path, ...] = ()
    encoding: str = "utf-8"
    field: str | None = None
    pack: bool = False
    contexts: int | None = None
    length: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    model_class: str = "bridge"
    processed: bool = False
    bos: bool | None = None
    seed: int = 0
    budget: str = "default"
    sections: tuple[str, ...] | None = None
    planes: bool = False

    def __post_init__(self) -> None:
        choice(self.budget, tuple(BUDGETS), "--budget")
        check_seed(self.seed)

    @property
    def names(self) -> tuple[str, ...]:
        """Sections to write."""
        return SECTIONS if self.sections is None else self.sections

    @property
    def limit(self) -> str:
        """What makes sizes smaller, as options."""
        return f"--budget {self.budget}"

    def loading(self) -> dict[str, Any]:
        """Options of :func:`load_model`."""
        return {
            "model_class": self.model_class,
            "processed": self.processed,
            "dtype": self.dtype,
            "device": self.device,
        }

    def settings(self, view: ModelView, texts: Documents) -> dict[str, Any]:
        """Everything that the numbers depend on, but for the tokens: what a run to be gone on with
        must share."""
        told = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("corpus", "sections", "model", "planes")
        }
        return told | {
            "version": __version__,
            "model": view.name,
            "fingerprint": view.fingerprint,
            "text": texts.digest(),
        }


def load_model(
    name: str | None,
    *,
    model_class: str,
    processed: bool,
    dtype: str,
    device: str,
    trained: bool = True,
) -> Any:
    """The model that a command names: a TransformerLens name, a local directory, ``smollm2``,
    ``minilm``, or (``None``) the embedded model; ``trained=False`` gives its untrained control."""
    choice(model_class, CLASSES, "--class")
    choice(dtype, DTYPES, "--dtype")
    if name is None:
        model = zoo.embedded(model_class=model_class, trained=trained, processed=processed)
        if (device, dtype) == ("cpu", "float32"):
            return model
        return model.to(device).to(getattr(torch, dtype))
    return zoo.by_name(
        name,
        model_class=model_class,
        processed=processed,
        dtype=getattr(torch, dtype),
        device=device,
    )


@dataclass(frozen=True, eq=False, kw_only=True)
class Texts:
    """Documents of a corpus: texts and names (``None``: file and line of each), a label for all,
    remarks, and whether they are joined."""

    texts: Documents
    names: tuple[str, ...] | None
    label: str
    notes: tuple[str, ...] = ()
    pack: bool = False

    @staticmethod
    def of(
        corpus: Sequence[Path] | None,
        encoding: str = "utf-8",
        *,
        field: str | None = None,
        pack: bool = False,
    ) -> Texts:
        """The user's text files, or the held-out standard-library modules."""
        if not corpus:
            found = zoo.corpus.held_out_documents()
            notes = (found.note,) if found.note else ()
            return Texts(
                texts=Documents.of(found.texts),
                names=found.names,
                label="held-out standard-library modules",
                notes=notes,
                pack=pack,
            )
        files = text_files(corpus, encoding, field=field, binary=TOKENS)
        names = tuple(file.name for file in files)
        return Texts(
            texts=Documents(files),
            names=names if field is None else None,
            label=", ".join(names),
            pack=pack,
        )


def token_source(
    model: ModelLike,
    corpus: Sequence[Path] | None,
    *,
    encoding: str = "utf-8",
    field: str | None = None,
    pack: bool = False,
    contexts: int | None,
    length: int | None,
    bos: bool | None,
    seed: int,
) -> TokenWindows | np.ndarray:
    """Tokens that a command names: all windows of its texts, or a ``.npy`` file of ids
    ``[context position]``, left on the disk."""
    if not corpus or corpus[0].suffix != ".npy":
        view, texts = as_view(model), Texts.of(corpus, encoding, field=field, pack=pack)
        size = length or min(view.n_ctx, LENGTH)
        return corpus_windows(
            view, texts, contexts=contexts, length=size, bos=bos, seed=seed, most=None
        )
    require(
        len(corpus) == 1 and corpus[0].is_file(),
        "--corpus",
        expected="one existing .npy file",
        got=", ".join(map(str, corpus)),
    )
    require(
        length is None and bos is None,
        "--length, --bos",
        expected="none with a token file",
        got="some",
        instead="text files",
    )
    ids = token_file(corpus[0], "--corpus")
    rows = len(ids) if getattr(ids, "ndim", 0) else 0
    require(
        contexts is None or contexts <= rows,
        "--contexts",
        expected=f"at most {rows}, the rows of the file",
        got=contexts,
    )
    return ids[:contexts]


def corpus_windows(
    view: ModelView,
    corpus: Texts,
    *,
    contexts: int | None,
    length: int,
    bos: bool | None,
    seed: int,
    most: int | None = CONTEXTS,
) -> TokenWindows:
    """Windows of the documents: ``contexts`` of them, or at most ``most``, a seeded choice in the
    order of the corpus."""
    require(2 <= length <= view.n_ctx, "--length", expected=f"2 to {view.n_ctx} tokens", got=length)
    prepend = view.bos_id is not None if bos is None else bos
    found = cut_windows(
        view,
        corpus.texts,
        length,
        n=contexts or most,
        at_most=True,
        prepend_bos=prepend,
        labels=corpus.names,
        seed=seed,
        pack=corpus.pack,
        corpus=corpus.label,
    )
    expected = f"at most {len(found)} windows of {length} tokens in this corpus"
    enough = contexts is None or contexts <= len(found)
    require(enough, "--contexts", expected=expected, got=contexts, instead="more --corpus")
    return found


def choose_sizes(
    request: Request, view: ModelView, corpus: Texts, work: Work
) -> tuple[TokenWindows, tuple[str, ...]]:
    """Windows that the decomposition can take within its share of the budget, and what was made
    smaller for it: the same for the same model, texts and budget."""
    length = request.length or min(view.n_ctx, LENGTH)
    options: dict[str, Any] = {
        "contexts": request.contexts,
        "bos": request.bos,
        "seed": request.seed,
    }
    tokens = corpus_windows(view, corpus, length=length, **options)
    costs = Costs.of(view.n_layers, view.d_model, view.d_vocab)
    token, usual = 1.1 * costs.token, length
    while request.length is None and request.contexts is None and length // 2 >= SHORTEST:
        sums = 8 * GROUPS * len(view.state_hooks) * length * view.d_model
        if work.room(token * length, len(tokens)) >= min(ENOUGH, len(tokens)) and sums <= SUMS:
            break
        length //= 2
        tokens = corpus_windows(view, corpus, length=length, **options)
    smaller = []
    if length < usual:
        smaller.append(f"windows of {length} tokens in place of {usual} ({request.limit})")
    if request.contexts is None:
        wanted = len(tokens)
        fit = max(min(LEAST, wanted), work.room(token * length, wanted))
        if fit < wanted:
            smaller.append(f"{fit} of {wanted} windows ({request.limit})")
            tokens = corpus_windows(view, corpus, length=length, **{**options, "contexts": fit})
    return tokens, tuple(smaller)


def kept_samples(view: ModelView, length: int) -> int:
    """Contexts whose states are kept whole: 32, or as many as take a quarter of a GiB."""
    return max(4, min(32, SAMPLED // (4 * len(view.state_hooks) * length * view.d_model)))


def basis_of(
    view: ModelView,
    tokens: TokenWindows,
    folder: Folder,
    *,
    seed: int,
    resume: bool,
) -> PositionContext:
    """The basis of the windows: that of a stopped run of the same model, tokens and seed, or
    computed now and saved."""
    if resume and folder.files.unchanged(BASIS):
        try:
            basis = PositionContext.load(folder.out / BASIS)
            basis.check_model(view)
            same = basis.provenance.token_hash == tokens.token_hash
            if same and basis.provenance.seed in (None, seed):
                return basis
        except GeometryError:
            pass  # of another model or version: computed again
    basis = decompose(
        view,
        tokens,
        checkpoint=folder.out / CHECKPOINT,
        progress=False,
        seed=seed,
        groups=GROUPS,
        keep=kept_samples(view, tokens.tokens.shape[1]),
    )
    folder.save_basis(basis)
    return basis


def build(
    request: Request,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    progress: bool = True,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the analysis and write it; returns the summary of :func:`tl_geometry.report.write`.

    The basis and each section are on the disk as soon as they are finished; with ``resume`` what a
    stopped run of the same request has finished is not computed again. Files that no run of ours
    wrote are refused, or with ``force`` overwritten; a folder that another run is writing to is
    refused.
    """
    out.mkdir(parents=True, exist_ok=True)
    with lock(out / LOCK):
        return _build(request, out, resume, force, progress, command)


def _build(
    request: Request,
    out: Path,
    resume: bool,
    force: bool,
    progress: bool,
    command: Sequence[str],
) -> dict[str, Any]:
    names = ("decompose", *request.names)
    work = Work(request.budget)
    clock = Clock(names, show=progress)
    check_folder(out, "report", report_files(request.names), force=force)
    corpus = Texts.of(request.corpus, request.encoding, field=request.field, pack=request.pack)
    clock.say("loading the model")
    model = load_model(request.model, **request.loading())
    view = as_view(model)
    folder = Folder(
        out,
        view.name,
        command=command,
        versions=versions(),
        resume=resume,
        force=force,
        names=request.names,
    )
    if folder.kept:
        clock.note(f"kept, because changed since they were written: {', '.join(folder.kept)}")
    clock.begin("decompose", "position and context of every state")
    work.begin("decompose")
    tokens, smaller = choose_sizes(request, view, corpus, work)
    folder.begin({**request.settings(view, corpus.texts), "tokens": tokens.token_hash})
    count, length = tokens.tokens.shape
    clock.note(f"{count:,} windows of {length} tokens ({work.about})")
    with threads_for(view.d_model):
        basis = basis_of(view, tokens, folder, seed=request.seed, resume=resume)
    analysis = Analysis(
        model=model,
        view=view,
        windows=tokens,
        basis=basis,
        clock=clock,
        work=work,
        costs=Costs.of(view.n_layers, view.d_model, view.d_vocab),
        embedded=request.model is None,
        seed=request.seed,
        notes=corpus.notes,
        smaller=smaller,
        planes=request.planes,
    )
    with threads_for(view.d_model):
        return write(analysis, out, command=command, names=request.names, folder=folder)
