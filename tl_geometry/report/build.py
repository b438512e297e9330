"""From the arguments of ``tl-geometry report`` to an :class:`~tl_geometry.report.Analysis`: load, cut, decompose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tl_geometry import zoo
from tl_geometry._check import choice, fail, require
from tl_geometry.capture import as_view
from tl_geometry.records import ModelView, TokenWindows
from tl_geometry.report import SECTIONS, Analysis, write
from tl_geometry.verbs.decompose import decompose, glue, windows

CONTEXTS, NULL_CONTEXTS, LENGTH = 1024, 256, 512
"""Windows of the corpus, windows of the null and of the untrained twin, and longest window, where the user does not say."""


def load_model(name: str | None, *, kind: str, processed: bool, dtype: str, device: str, trained: bool = True) -> Any:
    """The model that a command names: a TransformerLens name, a local directory, ``smollm2``, ``minilm``, or the embedded model."""
    choice(kind, ("bridge", "hooked"), "--class")
    choice(dtype, ("float32", "float64", "bfloat16", "float16"), "--dtype")
    if name is None:
        model = zoo.embedded(kind=kind, trained=trained, processed=processed)
        return model.to(device).to(getattr(torch, dtype)) if (device, dtype) != ("cpu", "float32") else model
    from tl_geometry.adapters import load

    if name == "smollm2":
        return zoo.smollm2(kind=kind, processed=processed, dtype=getattr(torch, dtype), device=device)
    name = str(zoo.minilm_directory()) if name == "minilm" else name
    return load(name, kind=kind, processed=processed, dtype=getattr(torch, dtype), device=device)


def token_source(
    model: Any, corpus: Sequence[Path] | None, *, contexts: int | None, length: int | None, bos: bool | None, seed: int
) -> TokenWindows | np.ndarray:
    """Tokens that a command names: all windows of its texts, or a ``.npy`` file of ids ``[context position]``, left on the disk."""
    if corpus is None or corpus[0].suffix != ".npy":
        return corpus_windows(as_view(model), corpus, contexts=contexts, length=length, bos=bos, seed=seed, most=None)[0]
    require(len(corpus) == 1 and corpus[0].is_file(), "--corpus", expected="one existing .npy file", got=", ".join(map(str, corpus)))
    require(length is None and bos is None, "--length, --bos", expected="none with a token file", got="some", instead="text files")
    return np.load(corpus[0], mmap_mode="r", allow_pickle=False)[:contexts]


def corpus_windows(
    view: ModelView,
    corpus: Sequence[Path] | None,
    *,
    contexts: int | None,
    length: int | None,
    bos: bool | None,
    seed: int,
    most: int | None = CONTEXTS,
) -> tuple[TokenWindows, list[str]]:
    """Windows of the user's text files (one document each) or of the held-out standard-library modules, and remarks on them."""
    length = length or min(view.n_ctx, LENGTH)
    require(2 <= length <= view.n_ctx, "--length", expected=f"2 to {view.n_ctx} tokens", got=length)
    prepend = view.bos_id is not None if bos is None else bos
    notes: list[str] = []
    if corpus:
        missing = [str(p) for p in corpus if not p.is_file()]
        require(not missing, "--corpus", expected="existing text files", got=", ".join(missing))
        texts, names = [p.read_text(encoding="utf-8", errors="replace") for p in corpus], [p.name for p in corpus]
        binary = [p.name for p, text in zip(corpus, texts, strict=True) if "\0" in text or p.suffix == ".npy"]
        require(
            not binary, "--corpus", expected="text files", got=", ".join(binary), instead="tl-geometry fit for a .npy file of token ids"
        )
        label = ", ".join(dict.fromkeys(names))
    else:
        found = zoo.corpus.held_out_documents()
        texts, names, label = list(found.texts), list(found.names), "held-out standard-library modules"
        notes += [found.note] if found.note else []
    everything = windows(view, texts, length, prepend_bos=prepend, labels=names, seed=seed, corpus=label)
    n = min(len(everything), contexts or most or len(everything))
    if contexts is not None and contexts > len(everything):
        fail(
            "--contexts",
            expected=f"at most {len(everything)} windows of {length} tokens in this corpus",
            got=contexts,
            instead="more --corpus",
        )
    kept = torch.randperm(len(everything), generator=torch.Generator().manual_seed(seed))[:n].sort().values
    return everything[kept], notes


def build(
    name: str | None,
    *,
    corpus: Sequence[Path] | None,
    contexts: int | None,
    length: int | None,
    out: Path,
    device: str,
    dtype: str,
    kind: str,
    processed: bool,
    bos: bool | None,
    seed: int,
    resume: bool,
    progress: bool,
    command: Sequence[str],
    sections: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Run the whole analysis and write it; returns the summary of :func:`tl_geometry.report.write`."""
    options = {"kind": kind, "processed": processed, "dtype": dtype, "device": device}
    model = load_model(name, **options)
    view = as_view(model)
    tokens, notes = corpus_windows(view, corpus, contexts=contexts, length=length, bos=bos, seed=seed)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.safetensors"
    if not resume:
        checkpoint.unlink(missing_ok=True)
    basis = decompose(view, tokens, checkpoint=checkpoint, progress=progress, seed=seed)
    needed = sections is None or "basis" in sections  # the null and the twin are drawn in the section on position and context only
    few = tokens[torch.linspace(0, len(tokens) - 1, min(len(tokens), NULL_CONTEXTS)).long()]
    small: dict[str, Any] = {"second_moments": False, "keep": 0, "progress": progress, "seed": seed}
    null = decompose(view, glue(few, seed=seed), keep_ctx=False, **small) if needed else None
    twin = decompose(load_model(None, **options, trained=False), few, **small) if name is None and needed else None
    analysis = Analysis(
        model=model, view=view, windows=tokens, basis=basis, null=null, twin=twin, seed=seed, notes=tuple(notes), progress=progress
    )  # fmt: skip
    summary = write(analysis, out, command=command, names=SECTIONS if sections is None else sections)
    checkpoint.unlink(missing_ok=True)
    return summary
