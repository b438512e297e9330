"""Do Tables 1 to 5 of Song & Zhong 2023 (arXiv:2310.04861) come out again? :func:`song_zhong` puts
our numbers beside the published ones.

The published code deviates from the paper, and each deviation changes the published numbers. Each
is a quirk by name here (:data:`QUIRKS`). By default those are on that the published run of the
model had; without any the paper's formulas remain.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.base.errors import require
from tl_geometry.base.linalg import gram_spectrum
from tl_geometry.base.tables import Table
from tl_geometry.measures.contextual import cluster_similarity, incoherence
from tl_geometry.measures.positional import screenot, usable_k
from tl_geometry.models.as_published import attending_left, with_final_norm

QUIRKS = {
    "uint16": "token ids modulo 65,536",
    "causal": "causal mask",
    "raw_denominator": "relative norm over raw states of fresh windows",
    "overlap": "overlapping windows",
    "absolute_with_self": "similarities with self-pairs",
    "final_norm": "last state after the final norm",
}
"""Quirk of the published code -> the flag of a result that has it."""
SUMMARY = ("rank", "relative_norm", "inter", "intra", "incoherence")
"""Measures of Table 1."""
BY_STATE = {"table_3": "rank", "table_4": "stable_rank", "table_5": "relative_norm"}
"""Tables that have a measure for every state."""
TRAIN_SHARE = 0.9
"""Windows are drawn from this first share of the corpus, as published."""


@cache
def numbers() -> dict[str, Any]:
    """What was published, from ``published.json``: tables, cells in doubt, sizes and models."""
    return json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


def song_zhong(
    model: Any,
    corpus: str | Sequence[str] | Tensor | None = None,
    *,
    topics: Sequence[str] | Sequence[Tensor] | None = None,
    row: str | None = None,
    quirks: Collection[str] | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    **sizes: int,
) -> Table:
    r"""Tables 1 to 5 of Song & Zhong 2023 for a model and a corpus, beside the published numbers.

    For P the positional basis ``[T, d_model]`` of a state with singular values s, and M the states
    of C windows: the rank by ScreeNOT, the stable rank ``sum s^2 / s_1^2``, the relative norm
    ``sqrt(C) s_1 / |M|_op``; with ``topics`` the mean \|cos\| of contexts between and within
    documents, and of positions with contexts (incoherence).

    Args:
        model: a TransformerLens model. Published are gpt2, bert-base-cased, bigscience/bloom-560m
            and Llama-2-7B, with raw weights.
        corpus: text, texts (joined by newlines), or ids [position]; ``None`` for the held-out
            standard library.
        topics: a few documents (4 in the paper) for similarities and incoherence, as texts or ids;
            without them, the four longest modules where ``corpus`` too is ``None``, else none.
        row: the published row to compare with, such as ``"GPT-2 OWT"`` (corpora OWT, Wiki, GitHub).
        quirks: names among ``"uint16"`` (token ids were stored in 16 bits: BLOOM read corrupted
            text), ``"causal"`` (BERT attended to the left only), ``"raw_denominator"`` (M are raw
            states of fresh windows, where the paper centres those of the basis), ``"overlap"``
            (windows are drawn with replacement), ``"absolute_with_self"`` (each vector is paired
            with itself too), ``"final_norm"`` (the last state is taken after the final norm).
            ``None`` for those of the published run, ``()`` for the formulas of the paper.
        batch_size: windows of a forward pass.
        progress: show a bar.
        sizes: by default as published. ``length`` (512) tokens of a window, of which position 0 is
            left out, and of the longest window that the model takes; ``contexts`` (6,400; Llama-2
            800) windows of the basis and ``fresh`` (32; 8) further ones for M; ``states`` (13) at
            even distances; ``k`` (20), the upper bound on the rank; ``topic_windows`` (64) of each
            document, of ``topic_length`` (128) tokens; ``seed`` (1234) of the choice of windows.

    Returns a row per cell: table, cell, ours, published, tolerance, verdict. Table 1 has mean and
    population deviation over states, Tables 3 to 5 each state. The paper names its corpora but does
    not fix the text, hence the tolerances: 1 for the rank, 0.1 for the stable rank, 10% for the
    relative norm, else the published deviation. Verdicts: "agrees", "differs", "another model" (the
    row is not of this model), "doubtful: ..." (other published sources contradict the cell, or the
    run makes it meaningless), "not judged" (a deviation), "no published row".

    Raises ``GeometryError`` for text that is too short, an unknown row, quirk or size.

    >>> model = tlg.zoo.embedded()
    >>> sizes = {"contexts": 24, "length": 32, "fresh": 4, "states": 3}
    >>> table = song_zhong(model, torch.arange(2000), progress=False, **sizes)
    >>> table.column("cell", table="table 3")
    ['state 0', 'state 2', 'state 4']
    """
    view, printed = tlg.view(model), numbers()
    family = printed["families"].get(view.name.rstrip("/").rsplit("/", 1)[-1].lower())
    published = printed["sizes"]["all"] | printed["sizes"].get(family, {})
    _known("row", () if row is None else (row,), printed["table_1"] | printed["table_2"])
    _known("quirks", quirks or (), QUIRKS)
    _known("sizes", sizes, published)
    if corpus is None:
        corpus = tlg.zoo.corpus.held_out_documents().texts
        topics = sorted(corpus, key=len, reverse=True)[:4] if topics is None else topics
    used = _quirks(view, family) if quirks is None else [q for q in QUIRKS if q in quirks]
    size = published | sizes
    flags = [QUIRKS[quirk] for quirk in used] + ([] if row is None else [f"published row {row}"])
    for name, what in (("length", "windows"), ("topic_length", "windows of topics")):
        if size[name] > view.n_ctx:
            flags.append(f"{what} of {view.n_ctx} tokens, not {size[name]}")
            size[name] = view.n_ctx
    states = _evenly(view.n_layers, min(size["states"], view.n_layers + 1))
    run_view = with_final_norm(view) if "final_norm" in used else view
    options: dict[str, Any] = {"states": states, "batch_size": batch_size, "progress": progress}
    run = _Run(used, size, partial(tlg.decompose, run_view, **options))
    with attending_left(view) if "causal" in used else nullcontext():
        ids = [_ids(view, text, used) for text in (corpus, *(topics or ()))]
        windows = _topic_windows(size, ids[1:]) if ids[1:] else None
        basis, measured = _position(run, ids[0])
        if windows is not None:
            measured |= _topics(run, basis, windows)
    k = usable_k(size["k"], min(basis.pos.shape[1:]))
    flags += [f"rank bound k={k} of {size['k']}"] if k < size["k"] else []
    provenance = replace(basis.provenance.flagged(*flags), preset="reference", seed=size["seed"])
    names = ("table", "cell", "ours", "published", "tolerance", "verdict")
    cells = tuple(_cells(measured, states, row or "", family))
    return Table(names=names, cells=cells, provenance=provenance)


class _Run(NamedTuple):
    """Quirks and sizes of a run, and ``decompose`` of its model at its states."""

    quirks: Collection[str]
    size: dict[str, int]
    decompose: Callable[..., tlg.PositionContext]


def _known(what: str, given: Collection[str], names: Collection[str]) -> None:
    unknown, expected = sorted(set(given) - set(names)), f"one of {', '.join(names)}"
    require(not unknown, what, expected=expected, got=", ".join(map(repr, unknown)))


def _quirks(view: Any, family: str | None) -> list[str]:
    """The quirks that the published run of this model had."""
    off = set() if family == "BLOOM" else {"uint16", "final_norm"}
    off |= {"causal"} if view.causal else set()
    return [quirk for quirk in QUIRKS if quirk not in off]


def _evenly(last: int, count: int) -> list[int]:
    """``count`` whole numbers from 0 to ``last``, rounded down as in the published code."""
    return np.linspace(0, last, count, dtype=int).tolist()


def _ids(view: Any, text: Any, quirks: Collection[str]) -> Int[Tensor, " position"]:
    """One array of ids, without BOS. Texts are joined by newlines and tokenised as a whole, as
    published."""
    if isinstance(text, Tensor):
        fits, got = text.dim() == 1 and not text.is_floating_point(), f"{list(text.shape)}"
        require(fits, "corpus", expected="text, or integer ids [position]", got=got)
        ids = text.long().cpu()
    else:
        ids = torch.tensor(view.encode(text if isinstance(text, str) else "\n".join(text)))
    return ids % 2**16 if "uint16" in quirks else ids


def _windows(run: _Run, ids: Int[Tensor, " position"]) -> list[tlg.TokenWindows]:
    """The windows of the basis and the fresh ones, from the training share of one text.

    With ``"overlap"`` both are drawn with replacement from anywhere. Without it the text is cut
    into windows, and basis and fresh windows share none.
    """
    size, overlap = run.size, "overlap" in run.quirks
    train, length = ids[: int(TRAIN_SHARE * len(ids))], size["length"]
    least = length + 1 if overlap else 2 * length
    expected = f"at least {least} tokens in its first {TRAIN_SHARE:.0%}"
    require(len(train) >= least, "corpus", expected=expected, got=len(train), instead="more text")
    # seed + 1, or the fresh windows would be the first windows of the basis
    first, second = (torch.Generator().manual_seed(size["seed"] + i) for i in (0, 1))
    if overlap:
        # the last possible start is never drawn, as published
        starts = [
            torch.randint(len(train) - length, (size[name],), generator=generator)
            for name, generator in (("contexts", first), ("fresh", second))
        ]
        rows = [train[start[:, None] + torch.arange(length)] for start in starts]
    else:
        cut = train[: len(train) // length * length].view(-1, length)
        cut = cut[torch.randperm(len(cut), generator=first)]
        # at most a quarter of a short text, so that the basis keeps most windows
        fresh = min(size["fresh"], max(1, len(cut) // 4))
        rows = [cut[fresh:][: size["contexts"]], cut[:fresh]]
    return [tlg.TokenWindows(tokens=x, has_bos=False, corpus="corpus") for x in rows]


def _position(
    run: _Run, ids: Int[Tensor, " position"]
) -> tuple[tlg.PositionContext, dict[str, Float[Tensor, " state"]]]:
    """The basis, and the measures of position by state."""
    window, raw = (1, run.size["length"]), "raw_denominator" in run.quirks
    drawn = _windows(run, ids)[: 1 + raw]
    basis, *fresh = (run.decompose(rows, window=window, second_moments=True) for rows in drawn)
    denominator = fresh[0] if raw else basis
    moments = [denominator.second_moment(state, centered=not raw) for state in basis.states]
    values, size = torch.linalg.svdvals(basis.pos), gram_spectrum(torch.stack(moments))[:, 0]
    shape = (basis.pos.shape[1], basis.pos.shape[2])
    k = usable_k(run.size["k"], min(shape))
    return basis, {
        "rank": screenot(values, shape, k=k).rank.double(),
        "stable_rank": (values / values[:, :1]).square().sum(-1),
        "relative_norm": values[:, 0] / size * denominator.contexts**0.5,
    }


def _topic_windows(
    size: dict[str, int], documents: Sequence[Int[Tensor, " position"]]
) -> tlg.TokenWindows:
    """As many windows of each document, which start at ``linspace(0, len - topic_length,
    topic_windows)`` rounded down. They overlap heavily: similarities within a document are in part
    those of the same words."""
    length, n = size["topic_length"], size["topic_windows"]
    shortest, longest = min(map(len, documents)), size["length"]
    require(shortest >= length, "topics", expected=f"at least {length} tokens", got=shortest)
    require(length <= longest, "topic_length", expected=f"at most {longest}", got=length)
    # row s of an unfolded document is the window that starts at s
    tokens = torch.cat([x.unfold(0, length, 1)[_evenly(len(x) - length, n)] for x in documents])
    # a window that occurs twice would be one context
    count = len(tokens.unique(dim=0))
    require(count == len(tokens), "topics", expected="different windows", got=f"only {count}")
    return tlg.TokenWindows(tokens=tokens, has_bos=False, corpus="topics")


def _topics(
    run: _Run, basis: tlg.PositionContext, windows: tlg.TokenWindows
) -> dict[str, Float[Tensor, " state"]]:
    """Similarities and incoherence by state, of topic windows as published: mean and pos are those
    of the large corpus at positions 1 to ``topic_length - 1``, ``ctx_c`` is the mean of window c
    over these positions less that mean, so that ctx need not sum to zero."""
    length, n = run.size["topic_length"], run.size["topic_windows"]
    topics = run.decompose(windows, window=(1, length), keep_ctx=True)
    assert topics.ctx is not None  # for the type checker: keep_ctx=True gives them
    means = basis.mean[:, None] + basis.pos[:, : length - 1]
    # the mean over these positions alone, so that pos sums to zero over the shorter window
    centre = means.mean(1, keepdim=True)
    ctx = topics.ctx + topics.mean[:, None] - centre
    labels = torch.arange(len(windows) // n).repeat_interleave(n)
    similar = cluster_similarity(ctx, labels)
    intra = similar.intra_reference if "absolute_with_self" in run.quirks else similar.intra
    between = incoherence(means - centre, ctx).avg
    return {"inter": similar.inter, "intra": intra, "incoherence": between}


def _cells(
    measured: dict[str, Tensor], states: Sequence[int], row: str, family: str | None
) -> Iterator[tuple[Any, ...]]:
    """The rows of the table: Table 1 (mean and deviation over states), then Tables 3 to 5."""
    printed, nan, same = numbers(), math.nan, family == row.split(" ", maxsplit=1)[0]
    doubts = printed["doubts"].get(row, {})
    # Tables 1 and 2 first; the notebook has GitHub's similarities
    summary = printed["notebook_similarity"].get(row, {})
    summary = summary | (printed["table_1"] | printed["table_2"]).get(row, {})
    for measure in (m for m in SUMMARY if m in measured):
        theirs, deviation = summary.get(measure, (nan, nan))
        mean, sd = float(measured[measure].mean()), float(measured[measure].std(correction=0))
        near = _tolerance(measure, theirs, deviation)
        said = verdict(mean, theirs, near, same, doubts.get(measure, ""))
        yield "table 1", measure, mean, theirs, near, said
        doubt = doubts.get(f"{measure} sd")
        said = "not judged" if measure in summary else "no published row"
        said = f"doubtful: {doubt}" if doubt else said
        # the published standard deviation divides by the number of states
        yield "table 1", f"{measure} sd", sd, deviation, nan, said
    for table, measure in BY_STATE.items():
        # of a row for all states of the published model, none for some states or another depth
        published = [float(x) for x in printed[table].get(row, [])]
        published = published if len(published) == len(states) else [nan] * len(states)
        for state, ours, theirs in zip(states, measured[measure].tolist(), published, strict=True):
            near = _tolerance(measure, theirs)
            said = verdict(ours, theirs, near, same)
            yield table.replace("_", " "), f"state {state}", ours, theirs, near, said


def _tolerance(measure: str, published: float, deviation: float = 0.0) -> float:
    """How far the number of another sample of the corpus may lie from the published one."""
    by_measure = {"rank": 1.0, "stable_rank": 0.1, "relative_norm": 0.1 * published}
    return by_measure.get(measure, deviation)


def verdict(ours: float, theirs: float, near: float, same: bool, doubt: str = "") -> str:
    """The verdict on our number; ``same`` says whether the published row is of this model."""
    if math.isnan(theirs):
        return "no published row"
    if not same:
        return "another model"
    if doubt:
        return f"doubtful: {doubt}"
    return "agrees" if abs(ours - theirs) <= near else "differs"
