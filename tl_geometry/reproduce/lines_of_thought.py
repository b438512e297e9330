"""Published numbers of Sarfati et al. 2025 (Lines of Thought, arXiv:2410.01545) as data, and ours
beside them.

The corpus of the paper is Walden (H. D. Thoreau; 647,409 bytes, about 3,000 chunks of 50 GPT-2
tokens), which is not shipped: pass its text. GPT-2-medium's states were exported before the final
norm, those of Llama and Mistral are Hugging Face hidden states, whose last one is after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.corpus.nulls import gibberish, pseudo_sentences
from tl_geometry.flow.ensemble import Trajectories, trajectories
from tl_geometry.flow.noise import fit_noise_law
from tl_geometry.flow.separation import ensembles_apart, true_against_extrapolated
from tl_geometry.flow.truncation import GRID, truncation_kl
from tl_geometry.models.control import reinitialized
from tl_geometry.models.describing import as_view
from tl_geometry.models.model_like import ModelLike


class Published(NamedTuple):
    """A published number: ``low`` and ``high`` are equal unless a range is given; ``origin`` says
    where it was read."""

    quantity: str
    model: str
    low: float
    high: float
    origin: str


V1, REPLY, NOTES = "arXiv version 1", "authors' reply to reviewers", "third-party notes"
PUBLISHED: tuple[Published, ...] = (
    Published("alpha", "gpt2-medium", 0.64, 0.64, V1),
    Published("lambda", "gpt2-medium", 0.18, 0.18, V1),
    Published(
        "ln alpha", "Llama-2-7b", -5.4, -5.4, f"{V1}, printed as alpha, which cannot be negative"
    ),
    Published("lambda", "Llama-2-7b", 0.27, 0.27, V1),
    Published("K with 90% of the KL gone", "gpt2-medium", 256, 256, REPLY),
    Published("KL at K = 1", "gpt2-medium", 5.0, 5.0, REPLY),
    Published("KL at K = 256", "gpt2-medium", 0.5, 0.7, f"{REPLY} (0.5); a reviewer reads 0.7"),
    Published("top-5 overlap at K = 256", "gpt2-medium", 2.5, 2.5, REPLY),
    Published("SVM accuracy, tau = 1", "gpt2-medium", 0.50, 0.51, REPLY),
    Published("SVM accuracy, tau = 10", "gpt2-medium", 0.60, 0.60, REPLY),
    Published(
        "perceptron accuracy against gibberish, lowest layer",
        "gpt2-medium",
        1.0,
        1.0,
        f"{V1}: separable at all layers",
    ),
    Published("mean |kurtosis|", "gpt2-medium", 0.0, 0.3, NOTES),
    Published("mean |kurtosis|, untrained", "gpt2-medium", 1.0, 1.5, NOTES),
)
"""Numbers stated for the models of the paper. Mistral-7B and Llama-3.2 (1B, 3B) are only said to
have an anomalous last layer."""

SETTINGS: dict[str, dict[str, int | bool]] = {
    "gpt2-medium": {
        "layers": 24,
        "d_model": 1024,
        "chunks": 3000,
        "length": 50,
        "post_norm": False,
    },
    "Llama-2-7b": {"layers": 32, "d_model": 4096, "chunks": 1000, "length": 50, "post_norm": True},
    "Mistral-7B": {"layers": 32, "d_model": 4096, "chunks": 1000, "length": 50, "post_norm": True},
    "Llama-3.2-1B": {
        "layers": 16,
        "d_model": 2048,
        "chunks": 1000,
        "length": 50,
        "post_norm": True,
    },
    "Llama-3.2-3B": {
        "layers": 28,
        "d_model": 3072,
        "chunks": 1000,
        "length": 50,
        "post_norm": True,
    },
}
"""Published settings; chunks of the last three are those of Llama-2-7b, theirs is not stated."""
LLAMA_OUTLIERS = (66, 223, 277, 330, 435, 538, 669)
"""Chunks (from 1) of Walden that the paper removes for Llama-2-7b."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LinesOfThought(Result):
    """Our numbers in the order of ``quantities``, beside the published range of ``model`` (NaN
    where none is published)."""

    model: str
    quantities: tuple[str, ...]
    ours: tuple[float, ...]
    notes: tuple[str, ...]

    def columns(self) -> tuple[str, ...]:
        return ("quantity", "published_low", "published_high", "ours", "origin", "note")

    def rows(self) -> list[tuple[object, ...]]:
        known = {p.quantity: p for p in PUBLISHED if p.model == self.model}
        empty = Published("", "", math.nan, math.nan, "")
        found = [known.get(q, empty) for q in self.quantities]
        return [
            (q, p.low, p.high, o, p.origin, n)
            for q, p, o, n in zip(self.quantities, found, self.ours, self.notes, strict=True)
        ]


def sarfati(
    model: ModelLike,
    text: str,
    *,
    published_as: str | None = None,
    n: int | None = None,
    length: int = 50,
    K: tuple[int, ...] = (1, *GRID),
    separate: bool = True,
    prepend_bos: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> LinesOfThought:
    """Our numbers for a model on a text, beside those published for ``published_as`` (default: the
    model's own name).

    As published: greedy alignment, signs by the directions, all numbers in-sample except accuracies
    and the last rows. The noise law is fitted with natural logarithms to residual log variances
    over all pairs of layers. Truncation projects the last state before the final norm, whichever
    side of it the other numbers take theirs from. ``separate`` needs scikit-learn. ``prepend_bos``
    departs from the paper, for models that know no text without BOS.
    """
    view = as_view(model)
    name = published_as or next((m for m in SETTINGS if m.lower() in view.name.lower()), view.name)
    chunks = pseudo_sentences(view, text, length, prepend_bos=prepend_bos)
    asked = n or int(SETTINGS.get(name, {}).get("chunks", len(chunks)))
    chunks = chunks[: min(asked, len(chunks))]
    require(
        len(chunks) >= 32,
        "text",
        expected="at least 32 chunks",
        got=len(chunks),
        instead="a longer text",
    )
    post_norm = bool(SETTINGS.get(name, {}).get("post_norm", False))
    raw = trajectories(view, chunks, post_norm=post_norm, progress=progress)
    own = raw.after_norm() if post_norm else raw
    rows: list[tuple[str, float, str]] = [*_law(own), *_truncation(view, raw, K, progress)]
    with reinitialized(view, seed=seed) as untrained:
        null = trajectories(untrained, chunks, progress=progress).residuals()
    rows.append(
        (
            "mean |kurtosis|, untrained",
            float(null.abs_kurtosis.nanmean()),
            "same configuration, new weights",
        )
    )
    if separate:
        rows += _separability(view, own, len(chunks), length, seed, progress)
    names, values, notes = zip(*rows, strict=True)
    provenance = replace(own.provenance, preset="paper", seed=seed)
    return LinesOfThought(
        model=name, quantities=names, ours=values, notes=notes, provenance=provenance
    )


def _law(own: Trajectories) -> list[tuple[str, float, str]]:
    maps = own.residuals()
    law, other = (
        fit_noise_law(maps.log_variance, law=law, times=own.times)
        for law in ("asymptotic", "increment")
    )
    better = "asymptotic" if law.aic <= other.aic else "increment"
    return [
        ("alpha", law.alpha, f"R^2 {law.r2:.3f}; AIC prefers the {better} law"),
        ("ln alpha", law.log_alpha, "natural logarithm"),
        ("lambda", law.rate, f"increment law: {other.rate:.3f}"),
        ("mean |kurtosis|", float(maps.abs_kurtosis.nanmean()), "over all pairs of layers"),
    ]


def _truncation(
    view: Any, own: Trajectories, K: tuple[int, ...], progress: bool
) -> list[tuple[str, float, str]]:
    if not (view.head_trained and view.causal) or own.tokens is None:
        return []
    grid = tuple(k for k in K if k <= own.aligned_bases(align="none").rank)
    curve = truncation_kl(view, own.tokens, own, K=grid, progress=progress)
    kl, top5 = (
        dict(zip(curve.K, curve.kl.tolist(), strict=True)),
        dict(zip(curve.K, curve.top5.tolist(), strict=True)),
    )
    drop = (
        next((k for k in curve.K if kl[k] <= 0.1 * kl[curve.K[0]]), None) if curve.claimed else None
    )
    against = curve.needed()
    note = f"by the text's other criterion, 10% of the baseline: {against}"
    note = (
        note
        if curve.claimed
        else f"not claimed: {curve.fitted} chunks are fewer than {view.d_model} dimensions"
    )
    rows = [("K with 90% of the KL gone", math.nan if drop is None else float(drop), note)]
    rows += [(f"KL at K = {k}", kl[k], "in-sample directions") for k in (1, 256) if k in kl]
    return rows + [
        (f"top-5 overlap at K = {k}", top5[k], "in-sample directions") for k in (256,) if k in top5
    ]


def _separability(
    view: Any, own: Trajectories, n: int, length: int, seed: int, progress: bool
) -> list[tuple[str, float, str]]:
    start = own.states[max(0, len(own.states) // 2 - 1)]
    table = true_against_extrapolated(own, start=start, seed=seed)
    note = f"held out, from state {start}"
    rows = [
        (f"SVM accuracy, tau = {tau}", float(table.accuracy[tau - 1, 0]), note)
        for tau in (1, 10)
        if tau <= len(table.names)
    ]
    noise = trajectories(
        view,
        gibberish(view, n, length, prepend_bos=bool(own.provenance.has_bos), seed=seed),
        post_norm=own.post_norm is not None,
        progress=progress,
    )
    noise = noise.after_norm() if own.post_norm is not None else noise
    apart = ensembles_apart(own, noise, seed=seed)
    return [
        *rows,
        (
            "perceptron accuracy against gibberish, lowest layer",
            float(apart.accuracy[:, 0].min()),
            "held out",
        ),
    ]
