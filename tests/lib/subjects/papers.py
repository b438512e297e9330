"""Rows of ``papers``: the published protocols at small size, without training."""

from __future__ import annotations

from typing import Any

import torch

from tests.lib.subjects.decomposition import STATES
from tests.lib.subjects.row import Answers, Subject
from tests.lib.worlds import QUIET, World
from tl_geometry import papers


def readouts(t: Any) -> Answers:
    """Tokens that each readout names."""
    rows = [dict(zip(t.columns(), row)) for row in t.rows()]
    found: Answers = {"size": [float(row["size"]) for row in rows]}
    found["readouts"] = [f"{r['readout']} L{r['layer']}H{r['head']} {r['of']}" for r in rows]
    return found | {"tokens": [f"{row['tokens']} / {row['others']}" for row in rows]}


def ours(t: Any) -> Answers:
    """Our numbers by their names; those that are published stand in the library's data."""
    rows = [dict(zip(t.columns(), row)) for row in t.rows()]
    name = lambda row: row["quantity"] if "quantity" in row else f"{row['table']}: {row['cell']}"
    return {name(row): float(row["ours"]) for row in rows}


def _song_zhong(w: World, **options: Any) -> Any:
    small = {"length": 16, "contexts": 24, "fresh": 8, "states": 3, "k": 5}
    small |= {"topic_windows": 6, "topic_length": 16}
    ids, topics = w.corpus.flatten(), None
    if options.pop("topics", False):
        topics = list(w.fresh.flatten().split(200))[:3]
    return papers.song_zhong(w.model, ids, topics=topics, **small, **options, **QUIET)


def _sarfati(w: World, **options: Any) -> Any:
    options = {"n": 34, "length": 8, "K": (1, 4, 16), **QUIET} | options
    return papers.sarfati(w.model, w.text * 2, **options)


SUBJECTS = (
    Subject(
        name="song_zhong",
        covers=("papers.song_zhong",),
        call=_song_zhong,
        answers=ours,
        variants={"published": {}, "exact": {"quirks": ()}, "topics": {"topics": True}},
        only={"*": lambda w: w.kind in ("gpt2", "bloom", "embedded")},
        gauge={"*": STATES},
        without={
            "order:*": "windows are drawn by their place",
            "empty:*rank*": "the rank of noise is 0",
            "empty:*state *": "the rank of noise is 0",
        },
    ),
    Subject(
        name="sarfati",
        covers=("papers.sarfati",),
        call=_sarfati,
        answers=ours,
        only={"*": lambda w: w.kind == "embedded"},  # three states are needed
        gauge={"*": STATES},
        without={"classes:*untrained*": "parameters of other shapes are other random numbers"},
    ),
    Subject(
        name="molina",
        covers=("papers.molina",),
        call=lambda w: papers.molina(w.model, nouns=_nouns(w), k=2),
        answers=readouts,
        only={"*": lambda w: w.kind in ("gpt2", "llama", "embedded")},
        gauge={"*": STATES},
    ),
    Subject(
        name="published_split",
        covers=("papers.published_split",),
        call=lambda w, **o: papers.published_split(w.model, w.ids, w.basis, 1, **o),
        answers=lambda terms: {f"{a}-{b}": scores for (a, b), scores in terms.items()},
        variants={"paper": {}, "reference": {"form": "reference"}},
        only={"*": lambda w: w.kind in ("gpt2", "embedded")},
        order={"*": 0},
        gauge={"*": STATES},
    ),
    Subject(
        name="factorisation_gap",
        covers=("papers.factorisation_gap",),
        call=lambda w: _gap(w),
        answers=lambda gap: {"log kernel": gap.log_lhs, "gap": gap.r, "bound": gap.bound},
        only={"*": lambda w: w.kind in ("gpt2", "embedded")},
        without={"order:*": "it takes the first contexts of the basis"},
        gauge={"*": STATES},
    ),
)


def _gap(w: World) -> Any:
    rows = (w.basis.ctx[1][:6], w.basis.pos[1][:6])
    content, position = (torch.nn.functional.normalize(x, dim=-1) for x in rows)
    kinds, drawn = ("content", "position"), torch.linspace(-1, 1, 36).view(6, 6).roll(7, 0)
    A = {(a, b): drawn.roll(i + 2 * j, 1) for i, a in enumerate(kinds) for j, b in enumerate(kinds)}
    return papers.factorisation_gap(content, position, A)


def _nouns(w: World) -> list[str]:
    return ["w7", "w19"] if w.tiny else ["file", "list"]
