"""How does a request become a report? Load the model, choose sizes, cut the texts into windows,
decompose, write the sections. The command line calls :func:`build` with the options of
``tl-geometry report``."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from tl_geometry import __version__
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.run_files import LOCK, check_folder, lock
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.report.analysis import Analysis, versions, write
from tl_geometry.report.budget import Budget, threads_for
from tl_geometry.report.contents import BASIS, Request, report_files
from tl_geometry.report.folder import Folder
from tl_geometry.report.inputs import LENGTH, Texts

CONTEXTS = 1024
"""Most windows where the user does not say. Intervals shrink only with the square root of their
number, so that more would gain little."""
ENOUGH, SHORTEST, LEAST = 256, 128, 32
"""Windows are halved, down to SHORTEST tokens, until at least ENOUGH of them fit into the share of
the budget that the decomposition has. LEAST of them are taken in any case, because intervals need
several windows in each of :data:`GROUPS` groups."""
SUMS, SAMPLED = 400 * 2**20, 256 * 2**20
"""Bytes that position sums may take; above them windows are halved. Bytes that the states of kept
contexts may take."""
GROUPS = 8
"""Groups of contexts, for standard errors: the jackknife leaves out one at a time."""
DECOMPOSITION = "position and context"
"""The part of the budget that chooses the windows."""
PROGRESS = "{desc}{n_fmt}/{total_fmt} ({elapsed} so far){postfix}"
"""The line of progress: the section, its number of how many, the time so far, the part of the
section. The time left is not known well enough to be shown."""


def settings(request: Request, view: ModelView, texts: Texts) -> dict[str, Any]:
    """Everything that the numbers depend on, except the tokens. A run can be resumed only where all
    of this is the same."""
    options = dataclasses.asdict(request)
    # fingerprint and digest replace model and corpus; sections and planes change no number
    for name in ("corpus", "sections", "model", "planes"):
        del options[name]
    return options | {
        "version": __version__,
        "model": view.name,
        "fingerprint": view.fingerprint,
        "text": _digest(texts),
    }


def _digest(texts: Texts) -> str:
    """A hash of the text of all documents."""
    digest = hashlib.sha256()
    for document in texts.documents:
        if isinstance(document, str):
            digest.update(document.encode(errors="surrogatepass"))
        else:
            digest.update(document.read_bytes())
        digest.update(b"\0")
    return digest.hexdigest()


def choose_sizes(
    request: Request, view: ModelView, texts: Texts, budget: Budget
) -> tuple[TokenWindows, tuple[str, ...]]:
    """The windows that fit into the decomposition's share of the budget, and in words what was
    reduced for it. The same model, texts and budget always give the same windows."""
    usual_length = length = request.length or min(view.n_ctx, LENGTH)
    windows = request.windows(view, texts, length, most=CONTEXTS)
    while request.length is None and request.contexts is None and length // 2 >= SHORTEST:
        # float64 sums of each group at every state and position
        sum_bytes = 8 * GROUPS * len(view.state_hooks) * length * view.d_model
        n_fitting = budget.windows(DECOMPOSITION, length, len(windows))
        if n_fitting >= min(ENOUGH, len(windows)) and sum_bytes <= SUMS:
            break
        length //= 2
        windows = request.windows(view, texts, length, most=CONTEXTS)
    limit = f"--budget {request.budget}"
    smaller = []
    if length < usual_length:
        smaller.append(f"windows of {length} tokens in place of {usual_length} ({limit})")
    count = len(windows)
    n_fitting = max(min(LEAST, count), budget.windows(DECOMPOSITION, length, count))
    if request.contexts is None and n_fitting < count:
        smaller.append(f"{n_fitting} of {count} windows ({limit})")
        windows = request.windows(view, texts, length, most=n_fitting)
    return windows, tuple(smaller)


def kept_samples(view: ModelView, length: int) -> int:
    """How many contexts have their states kept whole: 32, or as many float32 ones as
    :data:`SAMPLED` bytes hold, but at least 4."""
    return max(4, min(32, SAMPLED // (4 * len(view.state_hooks) * length * view.d_model)))


def basis_of(
    view: ModelView, tokens: TokenWindows, folder: Folder, *, seed: int, resume: bool
) -> PositionContext:
    """The basis of the windows. It is loaded if a stopped run of the same model, tokens and seed
    has saved it; else it is computed and saved now."""
    if resume and folder.files.unchanged(BASIS):
        try:
            basis = PositionContext.load(folder.out / BASIS)
            basis.check_model(view)
            same_tokens = basis.provenance.token_hash == tokens.token_hash
            if same_tokens and basis.provenance.seed in (None, seed):
                return basis
        except GeometryError:
            pass  # the file belongs to another model or version: compute the basis again
    basis = decompose(
        view,
        tokens,
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
    """Run the analysis and write it. Returns the summary of :func:`tl_geometry.report.write`.

    The basis and each section are on the disk as soon as they are finished. With ``resume``, what a
    stopped run of the same request has finished is not computed again. Files in the way that no run
    of tl_geometry wrote are an error, unless ``force`` overwrites them. A folder that another run
    is writing to is an error too.
    """
    out.mkdir(parents=True, exist_ok=True)
    stages = 1 + len(request.names)  # the first stage is the decomposition
    bar = tqdm(total=stages, bar_format=PROGRESS, disable=not progress)
    bar.set_description("loading the model")
    with lock(out / LOCK), bar:
        # checked before the model is loaded, which may take long
        check_folder(out, "report", report_files(request.names), force=force)
        texts = request.texts()
        model = request.load()
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
        if folder.kept and progress:
            kept = f"kept, because changed since they were written: {', '.join(folder.kept)}"
            bar.write(kept, file=sys.stderr)
        with threads_for(view.d_model):
            analysis = analyse(request, model, texts, folder, bar, resume=resume)
            return write(analysis, folder)


def analyse(
    request: Request, model: Any, texts: Texts, folder: Folder, bar: tqdm, *, resume: bool
) -> Analysis:
    """Choose the windows of a report and decompose them."""
    view = as_view(model)
    budget = Budget(request.budget, n_layers=view.n_layers, d_model=view.d_model)
    bar.set_description("position and context of every state")
    windows, smaller = choose_sizes(request, view, texts, budget)
    folder.begin({**settings(request, view, texts), "tokens": windows.token_hash})
    count, length = windows.tokens.shape
    bar.set_postfix_str(f"{count:,} windows of {length} tokens, --budget {budget.word}")
    basis = basis_of(view, windows, folder, seed=request.seed, resume=resume)
    bar.update()
    return Analysis(
        model=model,
        view=view,
        windows=windows,
        basis=basis,
        budget=budget,
        embedded=request.model is None,
        seed=request.seed,
        notes=texts.notes,
        smaller=smaller,
        planes=request.planes,
        bar=bar,
    )
