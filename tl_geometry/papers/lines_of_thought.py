"""Do the published numbers of Sarfati et al. 2025 (Lines of Thought, arXiv:2410.01545) come out
again? :func:`sarfati` puts our numbers beside them.

The corpus of the paper is Walden (H. D. Thoreau; 647,409 bytes, about 3,000 chunks of 50 GPT-2
tokens). It is not shipped: pass its text. The published states of GPT-2-medium were exported before
the final norm; those of Llama and Mistral are Hugging Face hidden states, the last of which is
taken after it. For Mistral-7B and Llama-3.2 (1B, 3B) no numbers are stated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import tl_geometry as tlg
from tl_geometry import flow
from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.base.tables import Table
from tl_geometry.corpus import gibberish, pseudo_sentences
from tl_geometry.flow.costs import GRID
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.papers.published import numbers

LLAMA_OUTLIERS = (66, 223, 277, 330, 435, 538, 669)
"""Chunks of Walden, counted from 1, that the paper removes for Llama-2-7b."""
PERCEPTRON = (14_000, 10)
"""Number of trajectories, and tokens in each, of the published separability from gibberish."""
FEWEST = 32
"""Chunks that a fit over pairs of states needs to mean anything."""
COLUMNS = (
    *("quantity", "published_low", "published_high", "ours", "tolerance", "verdict"),
    *("origin", "note"),
)
Row = tuple[str, float, str]
"""A quantity, our number, and a note about it."""


def sarfati(
    model: Any,
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
) -> Table:
    r"""The numbers of Sarfati et al. 2025 for a model on a text: trajectories of the last token of
    chunks as a flow with noise ``log var(t, tau) = ln alpha + lambda (t + tau)``, its kurtosis, the
    directions that the output needs, and separability.

    As published, bases of neighbouring layers are aligned greedily, all numbers but accuracies are
    in sample, the noise law is fitted to residual log variances (natural logarithms) over all pairs
    of layers, and the seven chunks that the paper removes for Llama-2-7b are left out.

    Args:
        model: a TransformerLens model.
        text: cut into chunks; Walden in the paper.
        published_as: the model of the paper to compare with; by default the model's own name.
        n: number of chunks; by default as published, where the text has as many.
        length: tokens of a chunk.
        K: numbers of directions at which the output is truncated, which always projects the last
            state before the final norm.
        separate: whether to measure separability, which needs scikit-learn. From gibberish it is
            measured on 14,000 trajectories of 10 tokens, or on fewer and the note says so.
        prepend_bos: departs from the paper, for models that were trained with BOS only.
        seed: of the untrained control, of gibberish and of the splits of the classifiers.
        progress: show a bar.

    Returns a row per quantity: the published range (NaN where none is published), ours, tolerance,
    verdict, where the published number was read, and a note. Verdicts: "agrees" (within the
    tolerance of the range, because chunks are not cut at the same places and few digits are
    printed), "differs", "not published", "not measured" (ours is NaN).

    Raises ``GeometryError`` for fewer than 32 chunks.

    >>> model, text = tlg.zoo.embedded(), "\n".join(tlg.zoo.corpus.held_out_documents().texts)
    >>> table = sarfati(model, text, n=34, length=8, K=(1, 4), separate=False, progress=False)
    >>> table.column("verdict", quantity="alpha")
    ['not published']
    """
    n = None if n is None else checks.count(n, "n")
    view = tlg.view(model)
    runs = numbers()["trajectories"]
    own = next((m for m in runs if m.lower() in view.name.lower()), view.name)
    name = own if published_as is None else checks.choice(published_as, tuple(runs), "published_as")
    published_chunks, post_norm = runs.get(name, (None, False))
    chunks = pseudo_sentences(view, text, length, prepend_bos=prepend_bos)
    chunks, flags = chunks[: published_chunks if n is None else n], []
    if name == "Llama-2-7b":
        outliers = [i - 1 for i in LLAMA_OUTLIERS if i <= len(chunks)]
        chunks = chunks[torch.tensor([i for i in range(len(chunks)) if i not in outliers])]
        flags = [f"{len(outliers)} of the 7 outlying chunks of the paper left out"]
    enough, expected = len(chunks) >= FEWEST, f"at least {FEWEST} chunks"
    require(enough, "text", expected=expected, got=len(chunks), instead="a longer text")

    def paths_of(windows: tlg.TokenWindows) -> Trajectories:
        return flow.trajectories(view, windows, progress=progress)

    # truncation needs states before the norm, because the model applies the norm itself
    before_norm = paths_of(chunks)
    paths = before_norm.after_norm(view) if post_norm else before_norm
    rows = [*_law(paths), *_truncation(view, before_norm, K, progress)]
    with tlg.models.reinitialized(view, seed=seed) as untrained:
        residuals = flow.trajectories(untrained, chunks, progress=progress).residuals()
    kurtosis = _mean(residuals.column("abs_kurtosis"))
    rows.append(("mean |kurtosis|, untrained", kurtosis, "same configuration, new weights"))
    if separate:
        most, size = PERCEPTRON
        real = pseudo_sentences(view, text, size, prepend_bos=prepend_bos)
        real = real[: most if n is None else min(n, most)]
        random = gibberish(view, len(real), size, prepend_bos=prepend_bos, seed=seed)
        ends = [x.after_norm(view) if post_norm else x for x in map(paths_of, (real, random))]
        rows += [*_separability(paths, seed), _from_gibberish(ends[0], ends[1], seed)]
    provenance = replace(paths.provenance, preset="paper", seed=seed).flagged(*flags)
    return Table(names=COLUMNS, cells=tuple(_beside(name, rows)), provenance=provenance)


def _beside(model: str, rows: Iterable[Row]) -> Iterator[tuple[Any, ...]]:
    """The rows of the table."""
    printed = [each for each in numbers()["lines_of_thought"] if each["model"] == model]
    by_quantity = {each["quantity"]: each for each in printed}
    for quantity, ours, note in rows:
        number = by_quantity.get(quantity, {})
        low, high, near = (number.get(key, math.nan) for key in ("low", "high", "tolerance"))
        said = "agrees" if low - near <= ours <= high + near else "differs"
        if math.isnan(low) or math.isnan(ours):
            said = "not published" if math.isnan(low) else "not measured"
        yield quantity, low, high, ours, near, said, number.get("origin", ""), note


def _law(paths: Trajectories) -> list[Row]:
    """The noise law and the kurtosis of the residuals."""
    residuals = paths.residuals()
    law, increment = (flow.fit_noise_law(residuals, law=law) for law in ("asymptotic", "increment"))
    preferred = "asymptotic" if law.aic <= increment.aic else "increment"
    return [
        ("alpha", law.alpha, f"R^2 {law.r2:.3f}; AIC prefers the {preferred} law"),
        ("ln alpha", law.log_alpha, "natural logarithm"),
        ("lambda", law.rate, f"increment law: {increment.rate:.3f}"),
        ("mean |kurtosis|", _mean(residuals.column("abs_kurtosis")), "over all pairs of layers"),
    ]


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


def _truncation(view: Any, paths: Trajectories, K: tuple[int, ...], progress: bool) -> list[Row]:
    """How many directions the output needs; no rows without a trained next-token output."""
    if not (view.head_trained and view.causal) or paths.tokens is None:
        return []
    grid = tuple(k for k in K if k <= paths.aligned_bases.rank)
    curve = flow.truncation_kl(view, paths.tokens, paths, K=grid, progress=progress)
    grid, *columns = (curve.column(name) for name in ("K", "kl", "top5"))  # sorted, each once
    kl, top5 = (dict(zip(grid, column, strict=True)) for column in columns)
    # the reply's criterion: a tenth of the KL at the smallest K
    sufficient = [k for k in grid if kl[k] <= 0.1 * kl[grid[0]]]
    claimed = bool(curve.column("claimed")[0])
    needed = float(sufficient[0]) if claimed and sufficient else math.nan
    note = f"by the text's other criterion, 10% of the baseline: {flow.directions_needed(curve)}"
    if not claimed:
        note = f"not claimed: {len(paths)} chunks are fewer than {view.d_model} dimensions"
    rows = [("K with 90% of the KL gone", needed, note)]
    rows += [(f"KL at K = {k}", kl[k], "in-sample directions") for k in (1, 256) if k in kl]
    if 256 in top5:
        rows.append(("top-5 overlap at K = 256", top5[256], "in-sample directions"))
    return rows


def _separability(paths: Trajectories, seed: int) -> list[Row]:
    """How well a linear SVM tells true states from extrapolated ones, tau layers on."""
    # the middle state: GPT-2-medium, whose published accuracies go to tau = 10, has 12 layers left
    start = max(0, len(paths.states) // 2 - 1)
    note, rows = f"held out, from state {paths.states[start]}", []
    train, test = paths.split(seed=seed)
    for tau in (t for t in (1, 10) if start + t < len(paths.states)):
        move = flow.flow_map(train.aligned_bases, start, start + tau)
        true, moved = test.X[:, start + tau].double(), move(test.X[:, start].double())
        found = flow.separability(true, moved, paired=True, seed=seed)
        rows.append((f"SVM accuracy, tau = {tau}", found.accuracy, note))
    return rows


def _from_gibberish(real: Trajectories, random: Trajectories, seed: int) -> Row:
    """The lowest accuracy over layers with which a perceptron tells text from gibberish."""
    (most, length), count = PERCEPTRON, len(real.X)
    note = f"{count} trajectories of {length} tokens, held out"
    note += "" if count == most else f"; published protocol: {most:,}"
    states = zip(real.X.unbind(1), random.X.unbind(1), strict=True)
    tell = partial(flow.separability, classifier="perceptron", seed=seed)
    lowest = min(tell(a, b).accuracy for a, b in states)
    return "perceptron accuracy against gibberish, lowest layer", lowest, note
