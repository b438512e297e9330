"""Do the published numbers of Sarfati et al. 2025 (Lines of Thought, arXiv:2410.01545) come out
again? ``tl-geometry reproduce lines-of-thought`` and notebooks call
:func:`~tl_geometry.papers.sarfati`, which puts our numbers beside those in :data:`PUBLISHED`.

The corpus of the paper is Walden (H. D. Thoreau; 647,409 bytes, about 3,000 chunks of 50 GPT-2
tokens). It is not shipped: pass its text. The published states of GPT-2-medium were exported before
the final norm. Those of Llama and Mistral are Hugging Face hidden states, the last of which is
taken after the final norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from tl_geometry.base.errors import require
from tl_geometry.corpus.nulls import gibberish, pseudo_sentences
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.flow.ensemble import Trajectories, trajectories
from tl_geometry.flow.noise import fit_noise_law
from tl_geometry.flow.separation import ensembles_apart, true_against_extrapolated
from tl_geometry.flow.truncation import GRID, truncation_kl
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.untrained import reinitialized
from tl_geometry.report.tables import Table


class Published(NamedTuple):
    """A published number. ``low`` and ``high`` are equal unless a range is given; ``origin`` says
    where the number was read. Our number agrees if it lies within ``tolerance`` of the range: our
    chunks are not cut at the same places, and the numbers are printed with few digits."""

    quantity: str
    model: str
    low: float
    high: float
    origin: str
    tolerance: float


V1, REPLY, NOTES = "arXiv version 1", "authors' reply to reviewers", "third-party notes"
"""Where published numbers were read."""
SEPARABLE = 'says "separable at all layers", read here as 1.0; no number is printed'
"""Remark on the accuracy of the perceptron."""
PERCEPTRON_ROW = "perceptron accuracy against gibberish, lowest layer"
"""The quantity that :func:`_perceptron` measures."""
REVIEWER = "a reviewer reads 0.7"
"""Remark on the KL at K = 256."""
PUBLISHED: tuple[Published, ...] = (
    Published("alpha", "gpt2-medium", 0.64, 0.64, V1, 0.1),
    Published("lambda", "gpt2-medium", 0.18, 0.18, V1, 0.02),
    Published("ln alpha", "Llama-2-7b", -5.4, -5.4, f"{V1}, printed as alpha, never negative", 0.3),
    Published("lambda", "Llama-2-7b", 0.27, 0.27, V1, 0.02),
    Published("K with 90% of the KL gone", "gpt2-medium", 256, 256, REPLY, 128),
    Published("KL at K = 1", "gpt2-medium", 5.0, 5.0, REPLY, 0.5),
    Published("KL at K = 256", "gpt2-medium", 0.5, 0.7, f"{REPLY} (0.5); {REVIEWER}", 0.1),
    Published("top-5 overlap at K = 256", "gpt2-medium", 2.5, 2.5, REPLY, 0.3),
    Published("SVM accuracy, tau = 1", "gpt2-medium", 0.50, 0.51, REPLY, 0.02),
    Published("SVM accuracy, tau = 10", "gpt2-medium", 0.60, 0.60, REPLY, 0.05),
    Published(PERCEPTRON_ROW, "gpt2-medium", 1.0, 1.0, f"{V1} {SEPARABLE}", 0.02),
    Published("mean |kurtosis|", "gpt2-medium", 0.0, 0.3, NOTES, 0.1),
    Published("mean |kurtosis|, untrained", "gpt2-medium", 1.0, 1.5, NOTES, 0.2),
)
"""Numbers stated for the models of the paper. For Mistral-7B and Llama-3.2 (1B, 3B) no numbers are
stated; the paper only says that their last layer is anomalous."""
SETTINGS = {
    "gpt2-medium": (3000, False),
    "Llama-2-7b": (1000, True),
    "Mistral-7B": (1000, True),
    "Llama-3.2-1B": (1000, True),
    "Llama-3.2-3B": (1000, True),
}
"""Model -> number of chunks of the published run, and whether its last state is taken after the
final norm. The paper does not state the number of chunks of the last three models; that of
Llama-2-7b stands in for it."""
LLAMA_OUTLIERS = (66, 223, 277, 330, 435, 538, 669)
"""Chunks of Walden, counted from 1, that the paper removes for Llama-2-7b."""
PERCEPTRON = (14_000, 10)
"""Number of trajectories, and tokens in each, of the published separability from gibberish."""


Row = tuple[str, float, str]
"""A quantity, our number, and a note about it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LinesOfThought(Table):
    """Our numbers beside the published range of ``model`` (NaN where none is published), a row per
    quantity.

    Verdicts: "agrees" (within the tolerance of the range), "differs", "not published", and "not
    measured" (our number is NaN).
    """

    names: tuple[str, ...] = (
        *("quantity", "published_low", "published_high", "ours", "tolerance"),
        *("verdict", "origin", "note"),
    )
    model: str


def _beside_published(model: str, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    """The rows of a :class:`LinesOfThought`."""
    by_quantity = {number.quantity: number for number in PUBLISHED if number.model == model}
    unpublished = Published("", "", math.nan, math.nan, "", math.nan)
    for quantity, ours, note in rows:
        number = by_quantity.get(quantity, unpublished)
        values = (number.low, number.high, ours, number.tolerance)
        yield (quantity, *values, _verdict(number, ours), number.origin, note)


def _verdict(published: Published, ours: float) -> str:
    if math.isnan(published.low) or math.isnan(ours):
        return "not published" if math.isnan(published.low) else "not measured"
    low, high = published.low - published.tolerance, published.high + published.tolerance
    return "agrees" if low <= ours <= high else "differs"


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

    As published:

    - Bases of neighbouring layers are aligned greedily; signs make the matched directions agree.
    - All numbers are in-sample, except accuracies.
    - The noise law is fitted to residual log variances (natural logarithms) over all pairs of
      layers.
    - The seven chunks that the paper removes for Llama-2-7b are left out.
    - Separability from gibberish is measured on 14,000 trajectories of 10 tokens. If there are
      fewer (a short text, or ``n``), the note of its row says so.

    Truncation always projects the last state before the final norm, even where the other numbers
    take it after the norm. ``separate`` asks for the rows of separability, which need scikit-learn.
    ``prepend_bos`` departs from the paper; it is for models that were trained with BOS only."""
    require(n is None or n >= 1, "n", expected="at least 1 chunk", got=n)
    view = as_view(model)
    name = published_as or next((m for m in SETTINGS if m.lower() in view.name.lower()), view.name)
    chunks = pseudo_sentences(view, text, length, prepend_bos=prepend_bos)
    published_chunks, post_norm = SETTINGS.get(name, (None, False))
    chunks = chunks[: published_chunks if n is None else n]
    chunks, removed = _without_outliers(chunks, name)
    enough_chunks, instead = len(chunks) >= 32, "a longer text"
    require(enough_chunks, "text", expected="at least 32 chunks", got=len(chunks), instead=instead)
    before_norm = trajectories(view, chunks, post_norm=post_norm, progress=progress)
    published_states = before_norm.after_norm() if post_norm else before_norm
    # truncation needs states before the norm, because the model applies the norm itself
    rows: list[Row] = [*_law(published_states), *_truncation(view, before_norm, K, progress)]
    with reinitialized(view, seed=seed) as untrained:
        untrained_maps = trajectories(untrained, chunks, progress=progress).residuals()
    kurtosis = float(untrained_maps.abs_kurtosis.nanmean())
    rows.append(("mean |kurtosis|, untrained", kurtosis, "same configuration, new weights"))
    if separate:
        rows += _separability(published_states, seed)
        rows.append(_perceptron(view, text, n, prepend_bos, post_norm, seed, progress))
    provenance = replace(published_states.provenance, preset="paper", seed=seed).flagged(*removed)
    cells = tuple(_beside_published(name, rows))
    return LinesOfThought(model=name, cells=cells, provenance=provenance)


def _without_outliers(chunks: TokenWindows, name: str) -> tuple[TokenWindows, list[str]]:
    """The chunks without those that the paper removes, and flags that say so."""
    if name != "Llama-2-7b":
        return chunks, []
    # the paper counts chunks from 1
    outliers = [i - 1 for i in LLAMA_OUTLIERS if i <= len(chunks)]
    remaining = [i for i in range(len(chunks)) if i not in outliers]
    flag = f"{len(outliers)} of the 7 outlying chunks of the paper left out"
    return chunks[torch.tensor(remaining)], [flag]


def _law(paths: Trajectories) -> list[Row]:
    """The noise law and the kurtosis of the residuals."""
    maps = paths.residuals()
    law, increment_law = (
        fit_noise_law(maps.log_variance, law=law, times=paths.times)
        for law in ("asymptotic", "increment")
    )
    preferred = "asymptotic" if law.aic <= increment_law.aic else "increment"
    return [
        ("alpha", law.alpha, f"R^2 {law.r2:.3f}; AIC prefers the {preferred} law"),
        ("ln alpha", law.log_alpha, "natural logarithm"),
        ("lambda", law.rate, f"increment law: {increment_law.rate:.3f}"),
        ("mean |kurtosis|", float(maps.abs_kurtosis.nanmean()), "over all pairs of layers"),
    ]


def _truncation(
    view: ModelView, paths: Trajectories, K: tuple[int, ...], progress: bool
) -> list[Row]:
    """How many directions the output needs; no rows without a trained next-token output."""
    if not (view.head_trained and view.causal) or paths.tokens is None:
        return []
    grid = tuple(k for k in K if k <= paths.aligned_bases(align="none").rank)
    curve = truncation_kl(view, paths.tokens, paths, K=grid, progress=progress)
    kl = dict(zip(curve.K, curve.kl.tolist(), strict=True))
    top5 = dict(zip(curve.K, curve.top5.tolist(), strict=True))
    # the reply's criterion: a tenth of the KL at the smallest K
    sufficient = [k for k in curve.K if kl[k] <= 0.1 * kl[curve.K[0]]]
    needed = float(sufficient[0]) if curve.claimed and sufficient else math.nan
    note = f"by the text's other criterion, 10% of the baseline: {curve.needed()}"
    if not curve.claimed:
        note = f"not claimed: {curve.fitted} chunks are fewer than {view.d_model} dimensions"
    in_sample = "in-sample directions"
    rows = [("K with 90% of the KL gone", needed, note)]
    rows += [(f"KL at K = {k}", kl[k], in_sample) for k in (1, 256) if k in kl]
    if 256 in top5:
        rows.append(("top-5 overlap at K = 256", top5[256], in_sample))
    return rows


def _separability(paths: Trajectories, seed: int) -> list[Row]:
    """How well a linear SVM tells true states from extrapolated ones, tau layers on."""
    # the middle state: GPT-2-medium, whose published accuracies go to tau = 10, has 12 layers left
    start = paths.states[max(0, len(paths.states) // 2 - 1)]
    table = true_against_extrapolated(paths, start=start, seed=seed)
    note = f"held out, from state {start}"
    return [
        (f"SVM accuracy, tau = {tau}", float(table.accuracy[tau - 1, 0]), note)
        for tau in (1, 10)
        if tau <= len(table.names)
    ]


def _perceptron(
    view: ModelView,
    text: str,
    n: int | None,
    prepend_bos: bool,
    post_norm: bool,
    seed: int,
    progress: bool,
) -> Row:
    """The lowest accuracy over layers with which a perceptron tells text from gibberish. The
    protocol is the published one, with fewer trajectories if the text is short."""
    published_chunks, length = PERCEPTRON
    chunks = pseudo_sentences(view, text, length, prepend_bos=prepend_bos)
    chunks = chunks[: published_chunks if n is None else min(n, published_chunks)]
    random_chunks = gibberish(view, len(chunks), length, prepend_bos=prepend_bos, seed=seed)
    paths = [
        trajectories(view, tokens, post_norm=post_norm, progress=progress)
        for tokens in (chunks, random_chunks)
    ]
    text_paths, random_paths = (
        ensemble.after_norm() if post_norm else ensemble for ensemble in paths
    )
    separation = ensembles_apart(text_paths, random_paths, seed=seed)
    protocol = f"{len(chunks)} trajectories of {length} tokens, held out"
    as_published = len(chunks) == published_chunks
    note = protocol if as_published else f"{protocol}; published protocol: {published_chunks:,}"
    lowest = float(separation.accuracy[:, 0].min())
    return PERCEPTRON_ROW, lowest, note
