"""Do Tables 1 to 5 of Song & Zhong 2023 come out again? ``tl-geometry reproduce song-zhong`` and
notebooks call :func:`song_zhong`, which puts our numbers beside the published ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tl_geometry import zoo
from tl_geometry.base import linalg
from tl_geometry.base.errors import require
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.measures import contextual, positional
from tl_geometry.measures import rank as ranks
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.papers.protocol import (
    Settings,
    chosen_states,
    corpus_ids,
    draw,
    family_of,
    settings_for,
    wrap_uint16,
)
from tl_geometry.papers.topics import topic_bases, topic_windows
from tl_geometry.report.tables import Table

Text = str | Sequence[str] | Tensor
BY_STATE = {
    "rank": "table_3_rank",
    "stable_rank": "table_4_stable_rank",
    "relative_norm": "table_5_relative_norm",
}
"""Measure -> the published table that has it for every state."""
DATA = Path(__file__).with_name("published.json")
"""Tables 1 to 5 as printed, read by :func:`published_tables`."""
SUMMARY = ("rank", "relative_norm", "inter", "intra", "incoherence")
"""Measures of Table 1."""
DOUBTS = {
    ("BERT OWT", "rank"): "Table 3 averages to 12.46(2.76)",
    ("BERT Wiki", "rank"): "Table 3 averages to 12.54(2.71)",
    ("Llama-2 Wiki", "relative_norm"): (
        "Table 5 averages to 0.073(0.023); Table 1 repeats the OWT value"
    ),
    ("Llama-2 GitHub", "rank sd"): "Table 3 has a deviation of 1.07",
}
for _row in ("Llama-2 OWT", "Llama-2 Wiki", "Llama-2 GitHub"):
    DOUBTS[_row, "intra"] = "all windows of a document were the same text"
for _row in ("BERT Wiki", "BLOOM OWT", "BLOOM Wiki"):
    DOUBTS[_row, "inter"] = DOUBTS[_row, "intra"] = "the published notebook has other values"
"""(row, measure) -> why the published cell is in doubt: other published sources contradict it, or
the run makes it meaningless."""


@functools.cache
def published_tables() -> dict[str, Any]:
    """Tables 1 to 5 (and the notebook's similarity table) as data: table -> "model corpus" ->
    measure or list over 13 states.

    >>> published_tables()["table_1"]["GPT-2 OWT"]["rank"]
    [11.38, 1.86]
    """
    return json.loads(DATA.read_text(encoding="utf-8"))


def printed_rows() -> dict[str, Any]:
    """The rows of Tables 1 and 2, by "model corpus"."""
    return published_tables()["table_1"] | published_tables()["table_2"]


def tolerance(measure: str, published: float, deviation: float | None = None) -> float:
    """How far the number of another sample of the corpus may lie from the published one: 1 for the
    rank, 0.1 for the stable rank, 10% for the relative norm, else the published deviation over
    states."""
    by_measure = {"rank": 1.0, "stable_rank": 0.1, "relative_norm": 0.1 * published}
    return by_measure.get(measure, deviation or 0.0)


@dataclass(frozen=True, eq=False, kw_only=True)
class Reproduction(Table):
    """Ours beside published, a row per cell: table, cell, ours, published, tolerance, verdict.

    Verdicts:

    - "agrees", or "differs" by more than the tolerance;
    - "another model": the published row is not of this model;
    - "doubtful: ..." and why the published cell is in doubt;
    - "not judged": a standard deviation over states;
    - "no published row"."""

    names: tuple[str, ...] = ("table", "cell", "ours", "published", "tolerance", "verdict")
    row: str | None
    settings: dict[str, Any]


def song_zhong(
    model: ModelLike | str | Path | None = None,
    corpus: Text | None = None,
    *,
    topics: Sequence[str] | Sequence[Tensor] | None = None,
    row: str | None = None,
    settings: Settings | None = None,
    batch_size: int | None = None,
    progress: bool = True,
) -> Reproduction:
    """Run the published protocol of Song & Zhong 2023 on a model and a corpus, and put our numbers
    beside theirs.

    Args:
        model: a TransformerLens model, a name or directory to load (raw weights, float32), or
            ``None`` for the embedded model. The published models are gpt2, bert-base-cased,
            bigscience/bloom-560m and Llama-2-7B.
        corpus: text, texts (joined by newlines), or ids [position]; ``None`` for the held-out
            standard library.
        topics: a few documents for similarities and incoherence (4 in the paper), as texts or ids;
            ``None`` leaves them out, or takes the four longest modules where ``corpus`` too is
            ``None``.
        row: the published row to compare with, such as ``"GPT-2 OWT"`` (corpora OWT, Wiki, GitHub).
            Without it every verdict is "no published row".
        settings: by default those of the published run of this model
            (:func:`~tl_geometry.papers.settings_for`), with the window shortened to what the model
            takes.

    The cells need not agree to the digit even for the same model, because the paper names its
    corpora but does not fix the text. Raises GeometryError when weights cannot be loaded, and for
    text that is too short.
    """
    if corpus is None:
        corpus = list(zoo.corpus.held_out_documents().texts)
        topics = sorted(corpus, key=len, reverse=True)[:4] if topics is None else topics
    require_row(row, "row")
    view = as_view(loaded(model))
    chosen = settings or settings_for(view)
    # a model that takes only shorter windows still gives numbers; a flag below says so
    run_settings = dataclasses.replace(
        chosen,
        length=min(chosen.length, view.n_ctx),
        topic_length=min(chosen.topic_length, view.n_ctx),
    )
    options: dict[str, Any] = {"batch_size": batch_size, "progress": progress}
    with view.attending_left() if run_settings.causal else nullcontext():
        measured_view = view.with_final_norm() if run_settings.final_norm else view
        measured, provenance = _measure(measured_view, corpus, topics, run_settings, options)
    flags = [*run_settings.remarks(), *([] if row is None else [f"published row {row}"])]
    if run_settings.length < chosen.length:
        flags.append(f"windows of {run_settings.length} tokens, not {chosen.length}")
    if run_settings.topic_length < chosen.topic_length:
        shorter = f"{run_settings.topic_length} tokens, not {chosen.topic_length}"
        flags.append(f"windows of topics of {shorter}")
    return Reproduction(
        provenance=dataclasses.replace(provenance.flagged(*flags), preset="reference"),
        cells=tuple(_cells(measured, chosen_states(view.n_layers, run_settings.states), row, view)),
        row=row,
        settings=dataclasses.asdict(run_settings),
    )


def require_row(row: str | None, what: str) -> None:
    """Refuse a row that no published table has."""
    rows = printed_rows()
    require(row is None or row in rows, what, expected=f"one of {', '.join(rows)}", got=repr(row))


def loaded(model: ModelLike | str | Path | None) -> Any:
    """The model of a name or directory, the embedded one for ``None``; a model is returned as it
    is."""
    if model is None:
        return zoo.embedded()
    return zoo.by_name(model) if isinstance(model, str | Path) else model


def _measure(
    view: ModelView,
    corpus: Text,
    topics: Sequence[Any] | None,
    settings: Settings,
    options: dict[str, Any],
) -> tuple[dict[str, Tensor], Any]:
    """Every measure ``[state]`` of the protocol, and the provenance of the basis."""
    windows, fresh = draw(corpus_ids(view, corpus), settings, "corpus")
    states = chosen_states(view.n_layers, settings.states)
    common: dict[str, Any] = {
        "states": states,
        "window": (1, settings.length),
        "seed": settings.seed,
    }
    common |= {"keep": 0, "keep_ctx": False, **options}
    basis = decompose(view, windows, second_moments=not settings.raw_denominator, **common)
    singular_values = torch.linalg.svdvals(basis.pos)
    shape = (basis.pos.shape[1], basis.pos.shape[2])
    k = min(settings.k, ranks.usable_k(settings.k, min(shape)))
    # published: raw second moments of the fresh windows; in the paper: centred ones of the basis
    denominator_basis = (
        decompose(view, fresh, second_moments=True, **common) if settings.raw_denominator else basis
    )
    centered = not settings.raw_denominator
    moments = torch.stack(
        [denominator_basis.second_moment(state, centered=centered) for state in states]
    )
    measured = {
        "rank": ranks.screenot(
            singular_values, shape, k=k, strategy=settings.strategy
        ).rank.double(),
        "stable_rank": linalg.stable_rank(singular_values),
        "relative_norm": positional.relative_norm(
            singular_values, moments, denominator_basis.contexts
        ),
    }
    if topics is not None:
        ids = [corpus_ids(view, topic_text) for topic_text in topics]
        documents = [
            wrap_uint16(document_ids) if settings.uint16 else document_ids for document_ids in ids
        ]
        rows = topic_windows(
            documents, windows=settings.topic_windows, length=settings.topic_length
        )
        assert rows.labels is not None  # for the type checker: topic_windows gives them
        pos, ctx = topic_bases(view, basis, rows, **options)
        preset = "reference" if settings.absolute_with_self else "exact"
        similarity = contextual.cluster_similarity(ctx, rows.labels, preset=preset)
        measured |= {
            "inter": similarity.inter,
            "intra": similarity.intra,
            "incoherence": contextual.incoherence(pos, ctx).avg,
        }
    flags = [f"rank bound k={k} of {settings.k}"] if k < settings.k else []
    return measured, basis.provenance.flagged(*flags)


def _cells(
    measured: dict[str, Tensor], states: Sequence[int], row: str | None, view: ModelView
) -> Iterator[tuple[Any, ...]]:
    """The rows of a :class:`Reproduction`: Table 1 (mean and deviation over states), then Tables 3
    to 5 (each state)."""
    tables, row_name, nan = published_tables(), row or "", math.nan
    same_model = family_of(view) == row_name.split(" ", maxsplit=1)[0]
    # Tables 1 and 2 first; the notebook has GitHub's similarities
    summary = tables["notebook_similarity"].get(row_name, {}) | printed_rows().get(row_name, {})
    for measure in (m for m in SUMMARY if m in measured):
        values = measured[measure]
        # the published standard deviation divides by the number of states
        mean, sd = float(values.mean()), float(values.std(correction=0))
        printed, deviation = summary.get(measure, (nan, nan))
        allowed, doubt = tolerance(measure, printed, deviation), DOUBTS.get((row_name, measure), "")
        cell_verdict = verdict(mean, printed, allowed, same_model, doubt)
        yield "table 1", measure, mean, printed, allowed, cell_verdict
        doubt = DOUBTS.get((row_name, f"{measure} sd"))
        cell_verdict = "not judged" if measure in summary else "no published row"
        cell_verdict = f"doubtful: {doubt}" if doubt else cell_verdict
        yield "table 1", f"{measure} sd", sd, deviation, nan, cell_verdict
    for measure, table in BY_STATE.items():
        # nan for states of this model beyond those of the published row
        published = [*map(float, tables[table].get(row_name, [])), *[nan] * len(states)]
        for state, value, printed in zip(
            states, measured[measure].tolist(), published, strict=False
        ):
            allowed = tolerance(measure, printed)
            cell_verdict = verdict(value, printed, allowed, same_model)
            # "table_3_rank" -> "table 3"
            table_name = table[:7].replace("_", " ")
            yield table_name, f"state {state}", value, printed, allowed, cell_verdict


def verdict(ours: float, theirs: float, near: float, same: bool, doubt: str = "") -> str:
    """The verdict on our number beside the published one (:class:`Reproduction`); ``same`` says
    whether the published row is of this model."""
    if math.isnan(theirs):
        return "no published row"
    if not same:
        return "another model"
    if doubt:
        return f"doubtful: {doubt}"
    return "agrees" if abs(ours - theirs) <= near else "differs"
