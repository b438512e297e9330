"""From the arguments of ``tl-geometry report`` to an :class:`~tl_geometry.report.Analysis`: load,
choose sizes, cut, decompose."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tl_geometry import __version__, zoo
from tl_geometry.base.arguments import CLASSES, DTYPES, SECTIONS, read_texts
from tl_geometry.base.errors import GeometryError, choice, fail, require
from tl_geometry.corpus.texts import windows
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.decomposing import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.describing import as_view
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.report import WEIGHTS, Analysis, versions, write
from tl_geometry.report.clock import Clock, span
from tl_geometry.report.folder import Folder
from tl_geometry.report.speed import Costs, measured_costs, own_threads, token_cost

CONTEXTS, LENGTH, BUDGET = 1024, 512, 600.0
"""Windows of the corpus, longest window and seconds, where the user does not say."""
ENOUGH, SHORTEST = 256, 128
"""Windows are halved, down to SHORTEST tokens, until at least ENOUGH of them fit the time of the
decomposition."""
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
    contexts: int | None = None
    length: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    model_class: str = "bridge"
    processed: bool = False
    bos: bool | None = None
    seed: int = 0
    budget: float = BUDGET
    sections: tuple[str, ...] | None = None
    planes: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Sections to write."""
        return SECTIONS if self.sections is None else self.sections

    def loading(self) -> dict[str, Any]:
        """Options of :func:`load_model`."""
        return {
            "model_class": self.model_class,
            "processed": self.processed,
            "dtype": self.dtype,
            "device": self.device,
        }

    def settings(self, view: ModelView, texts: Sequence[str]) -> dict[str, Any]:
        """Everything that the numbers depend on, but for the tokens: what a run to be gone on with
        must share."""
        told = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("corpus", "sections", "model", "planes")
        }
        text = hashlib.sha256("\0".join(texts).encode(errors="replace")).hexdigest()[:16]
        return told | {
            "version": __version__,
            "model": view.name,
            "fingerprint": view.fingerprint,
            "text": text,
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
    """Documents of a corpus: texts and names, a label for all, and remarks."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    label: str
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(corpus: Sequence[Path] | None, encoding: str = "utf-8") -> Texts:
        """The user's text files, or the held-out standard-library modules."""
        if not corpus:
            found = zoo.corpus.held_out_documents()
            notes = (found.note,) if found.note else ()
            return Texts(
                texts=found.texts,
                names=found.names,
                label="held-out standard-library modules",
                notes=notes,
            )
        texts, names = read_texts(
            corpus, encoding, binary="tl-geometry fit for a .npy file of token ids"
        )
        return Texts(texts=tuple(texts), names=tuple(names), label=", ".join(names))


def token_source(
    model: ModelLike,
    corpus: Sequence[Path] | None,
    *,
    encoding: str = "utf-8",
    contexts: int | None,
    length: int | None,
    bos: bool | None,
    seed: int,
) -> TokenWindows | np.ndarray:
    """Tokens that a command names: all windows of its texts, or a ``.npy`` file of ids
    ``[context position]``, left on the disk."""
    if not corpus or corpus[0].suffix != ".npy":
        view, texts = as_view(model), Texts.of(corpus, encoding)
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
    try:
        ids = np.load(corpus[0], mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        fail(
            "--corpus",
            expected="a .npy file of token ids",
            got=f"{corpus[0].name} ({' '.join(str(error).split())[:120]})",
        )
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
    everything = windows(
        view,
        corpus.texts,
        length,
        prepend_bos=prepend,
        labels=corpus.names,
        seed=seed,
        corpus=corpus.label,
    )
    n = min(len(everything), contexts or most or len(everything))
    if contexts is not None and contexts > len(everything):
        expected = f"at most {len(everything)} windows of {length} tokens in this corpus"
        fail("--contexts", expected=expected, got=contexts, instead="more --corpus")
    generator = torch.Generator().manual_seed(seed)
    return everything[torch.randperm(len(everything), generator=generator)[:n].sort().values]


def choose_sizes(
    request: Request, view: ModelView, corpus: Texts, clock: Clock
) -> tuple[TokenWindows, Costs, tuple[str, ...]]:
    """Windows that the decomposition can take in its time, the cost of a token, and what was made
    smaller for it."""
    length = request.length or min(view.n_ctx, LENGTH)
    options: dict[str, Any] = {
        "contexts": request.contexts,
        "bos": request.bos,
        "seed": request.seed,
    }
    found = corpus_windows(view, corpus, length=length, **options)
    token = token_cost(view, found.tokens)
    usual, wanted = length, len(found)
    while request.length is None and request.contexts is None and length // 2 >= SHORTEST:
        fit = clock.fits(1.1 * token * length, wanted, 1)
        sums = 8 * GROUPS * len(view.state_hooks) * length * view.d_model
        if fit >= min(ENOUGH, wanted) and sums <= SUMS:
            break
        length //= 2
        found = corpus_windows(view, corpus, length=length, **options)
        wanted = len(found)  # a token of a shorter window costs less, if anything
    costs = measured_costs(view, found.tokens, token if length == usual else None)
    kept = f"to keep the budget of {span(clock.budget)}"
    smaller = []
    if length < usual:
        smaller.append(f"windows of {length} tokens in place of {usual}, {kept}")
    if request.contexts is None:
        fit = max(min(32, wanted), clock.fits(1.1 * costs.token * length, wanted, 1))
        if fit < wanted:
            smaller.append(f"{fit} of {wanted} windows, {kept}")
            found = corpus_windows(view, corpus, length=length, **{**options, "contexts": fit})
    return found, costs, tuple(smaller)


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
    out = folder.out
    kept, checkpoint = out / "basis.safetensors", out / "checkpoint.safetensors"
    if resume and kept.is_file():
        try:
            basis = PositionContext.load(kept)
            basis.check_model(view)
            same = basis.provenance.token_hash == tokens.token_hash
            if same and basis.provenance.seed in (None, seed):
                return basis
        except GeometryError:
            pass  # of another model or version: computed again
    if not resume:
        checkpoint.unlink(missing_ok=True)
    samples = kept_samples(view, tokens.tokens.shape[1])
    basis = decompose(
        view, tokens, checkpoint=checkpoint, progress=False, seed=seed, groups=GROUPS, keep=samples
    )
    basis.save(kept)
    checkpoint.unlink(missing_ok=True)
    return basis


def build(
    request: Request,
    out: Path,
    *,
    resume: bool = False,
    progress: bool = True,
    command: Sequence[str] = (),
) -> dict[str, Any]:
    """Run the analysis and write it; returns the summary of :func:`tl_geometry.report.write`.

    The basis and each section are on the disk as soon as they are finished; with ``resume`` what a
    stopped run of the same request has finished is not computed again.
    """
    weights = {name: WEIGHTS[name] for name in ("decompose", *request.names)}
    clock = Clock(request.budget, weights, show=progress)
    corpus = Texts.of(request.corpus, request.encoding)
    if progress:
        clock.say("loading the model")
    model = load_model(request.model, **request.loading())
    view = as_view(model)
    folder = Folder(out, view.name, command=command, versions=versions(), resume=resume)
    clock.begin("decompose", None, "position and context of every state")
    with own_threads(view):
        tokens, basis, costs, smaller = _based(request, view, corpus, clock, folder, resume=resume)
    analysis = Analysis(
        model=model,
        view=view,
        windows=tokens,
        basis=basis,
        clock=clock,
        costs=costs,
        embedded=request.model is None,
        seed=request.seed,
        notes=corpus.notes,
        smaller=smaller,
        planes=request.planes,
    )
    return write(analysis, out, command=command, names=request.names, folder=folder)


def _based(
    request: Request,
    view: ModelView,
    corpus: Texts,
    clock: Clock,
    folder: Folder,
    *,
    resume: bool,
) -> tuple[TokenWindows, PositionContext, Costs, tuple[str, ...]]:
    """Windows and their basis, what things cost, and what was made smaller."""
    settings = request.settings(view, corpus.texts)
    plan = folder.planned(settings)
    if plan:
        tokens = corpus_windows(
            view,
            corpus,
            contexts=plan["contexts"],
            length=plan["length"],
            bos=request.bos,
            seed=request.seed,
        )
        costs, smaller = measured_costs(view, tokens.tokens), tuple(plan["smaller"])
    else:
        tokens, costs, smaller = choose_sizes(request, view, corpus, clock)
    folder.remember(settings, contexts=len(tokens), length=tokens.tokens.shape[1], smaller=smaller)
    folder.begin({**settings, "tokens": tokens.token_hash})
    count, length = tokens.tokens.shape
    clock.say(
        f"{count} windows of {length} tokens, about {span(1.1 * costs.token * count * length)}"
    )
    basis = basis_of(view, tokens, folder, seed=request.seed, resume=resume)
    return tokens, basis, costs, smaller
