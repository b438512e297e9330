"""Rows of ``papers``: the published protocols at small size, without training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tl_geometry as tlg
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


def _settings(w: World) -> Any:
    return papers.settings_for(tlg.view(w.model))


def _song_zhong(w: World, **options: Any) -> Any:
    small = {"length": 16, "contexts": 24, "fresh": 8, "states": 3, "k": 5}
    small |= {"topic_windows": 6, "topic_length": 16}
    settings = replace(_settings(w), **small)
    settings = settings.exact() if options.pop("exact", False) else settings
    ids, topics = w.corpus.flatten(), None
    if options.pop("topics", False):
        topics = list(w.fresh.flatten().split(200))[:3]
    return papers.song_zhong(w.model, ids, settings=settings, topics=topics, **QUIET)


def _sarfati(w: World, **options: Any) -> Any:
    options = {"n": 34, "length": 8, "K": (1, 4, 16), **QUIET} | options
    return papers.sarfati(w.model, w.text * 2, **options)


SUBJECTS = (
    Subject(
        name="song_zhong",
        covers=("papers.song_zhong",),
        call=_song_zhong,
        answers=ours,
        variants={"published": {}, "exact": {"exact": True}, "topics": {"topics": True}},
        only={"*": lambda w: w.kind in ("gpt2", "bloom", "embedded")},
        drawn=("*",),
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
        drawn=("*",),
        gauge={"*": STATES},
    ),
    Subject(
        name="molina",
        covers=("papers.molina",),
        call=lambda w: papers.molina(w.model, nouns=_nouns(w), k=2),
        answers=readouts,
        only={"*": lambda w: w.kind in ("gpt2", "llama", "embedded")},
        gauge={"*": STATES},
    ),
)


def _nouns(w: World) -> list[str]:
    return ["w7", "w19"] if w.tiny else ["file", "list"]
