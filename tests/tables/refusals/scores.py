"""Splits of scores and values, sweeps, planes, relative position, head types."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.tables.refusals.row import NOT_A_BASIS, Group, Scene
from tl_geometry import scores


def split(s: Scene, tokens: Any = None, **options: Any) -> Any:
    """A split of one head of the embedded model."""
    given = {"basis": s.w.basis, "heads": "L1H0"} | options
    return tlg.split_scores(s.model, s.ids if tokens is None else tokens, **given)


def values(s: Scene, **options: Any) -> Any:
    return tlg.split_values(s.model, s.ids, **{"basis": s.w.basis, "heads": "L1H0", **options})


def sweep(s: Scene, **options: Any) -> Any:
    given: dict[str, Any] = {"basis": s.w.basis, "layers": 0, "progress": False, **options}
    return tlg.sweep_heads(s.model, given.pop("tokens", s.ids), **given)


def own_parts(s: Scene, **changed: Any) -> dict[str, torch.Tensor]:
    """The input of block 1 in two parts, which a user made, some of them changed."""
    h = s.w.stream()[1]
    return {"first": 0.25 * h, "second": 0.75 * h} | {k: v(h) for k, v in changed.items()}


BASES = {
    "a path": ({"basis": NOT_A_BASIS}, "basis"),
    "a table": ({"basis": lambda s: s.w.basis.anova()}, "basis"),
    "a basis of another model": ({"basis": lambda s: s.rotary.basis}, "basis"),
}
"""What is no basis of this model: every function refuses it."""
HEADS = {
    "a head beyond the last": ({"heads": "L1H99"}, "head"),
    "a layer beyond the last": ({"heads": "L99H0"}, "layer|head"),
    "a head below zero": ({"heads": [(1, -1)]}, "head"),
    "a head by words": ({"heads": "induction"}, "head"),
    "half a head": ({"heads": [(1, 0.5)]}, "head"),
    "no heads": ({"heads": []}, "head"),
    "a number as heads": ({"heads": 7}, "head"),
}
"""What is no head: every function that takes heads refuses it."""

GROUPS = (
    Group(
        name="split_scores",
        call=split,
        of="cache",
        right={
            "one head": {},
            "several heads": {"heads": ["L0H1", (1, 2)]},
            "a layer": {"heads": None, "layers": 1},
            "finer parts": {"parts": ("pos", "ctx", "resid")},
            "writers": {"parts": "writers", "basis": None},
            "own parts": {"parts": own_parts, "basis": None},
            "a text": {"tokens": "def f(x):", "prepend_bos": True},
            "a cache": lambda s: s.w.cache,
        },
        wrong={
            **BASES,
            **HEADS,
            "no basis": ({"basis": None}, "basis"),
            "a basis of one context": (
                {"basis": lambda s: tlg.decompose(s.model, s.ids[:1], progress=False)},
                "split|basis",
            ),
            "a basis without the state": (
                {"basis": lambda s: tlg.decompose(s.model, s.ids, states=[0], progress=False)},
                "state",
            ),
            "a prompt longer than the basis": ({"tokens": lambda s: s.ids.repeat(1, 2)}, "tokens"),
            "a prompt without BOS": ({"tokens": lambda s: s.ids[:, 1:]}, "tokens"),
            "heads of other layers": ({"layers": [0]}, "heads"),
            "a layer beyond": ({"heads": None, "layers": 99}, "layers"),
            "parts of no name": ({"parts": ("pos", "content")}, "parts"),
            "a word for parts": ({"parts": "tokens"}, "parts"),
            "own parts that do not sum": (
                {"parts": lambda s: own_parts(s, second=lambda h: h), "basis": None},
                "parts",
            ),
            "own parts of another shape": (
                {"parts": lambda s: own_parts(s, second=lambda h: h[:, :3]), "basis": None},
                "part",
            ),
            "an own part called bias": (
                {"parts": lambda s: own_parts(s, bias=lambda h: h), "basis": None},
                "parts",
            ),
            "a cache of other tokens": lambda s: s.model.run_with_cache(s.w.other)[1],
            "a cache of fewer hooks": lambda s: {"blocks.1.hook_resid_pre": s.w.stream()[1]},
        },
    ),
    Group(
        name="what a split is asked for",
        call=lambda s, ask: ask(s.w.split),
        of="ask",
        about="terms",
        right={
            "a term": lambda s: lambda split: split.terms["pos", "cvec"],
            "its name": lambda s: lambda split: split.terms["pos-cvec"],
            "shares": lambda s: lambda split: split.shares(drop=2),
        },
        wrong={
            "no term": lambda s: lambda split: split.terms["pos-no"],
            "shares of nothing": ({"ask": lambda s: lambda split: split.shares(drop=99)}, "drop"),
            "shares from before": ({"ask": lambda s: lambda split: split.shares(drop=-1)}, "drop"),
        },
    ),
    Group(
        name="split_values",
        call=values,
        right={"one head": {}},
        wrong={
            **BASES,
            **HEADS,
        },
    ),
    Group(
        name="sweep_heads",
        call=sweep,
        right={
            "parts of a basis": {},
            "writers": {"parts": "writers", "basis": None},
            "in batches": {"batch_size": 2},
            "intervals of others": {"tokens": lambda s: s.w.fresh, "intervals": True},
        },
        wrong={
            **BASES,
            "no basis": ({"basis": None}, "basis"),
            "parts of no name": ({"parts": "heads"}, "parts"),
            "intervals of windows that the basis has seen": (
                {"tokens": lambda s: s.w.corpus, "intervals": True},
                "intervals",
            ),
            "intervals of writers": (
                {"parts": "writers", "basis": None, "intervals": True},
                "parts",
            ),
            "a layer beyond": ({"layers": 99}, "layers"),
        },
    ),
    Group(
        name="what a sweep is asked for",
        call=lambda s, ask: ask(s.w.sweep),
        of="ask",
        about="column",
        right={
            "the first three": lambda s: lambda table: table.top("induction", 3),
            "all of them": lambda s: lambda table: table.top("induction", 10_000),
        },
        wrong={
            "no column": lambda s: lambda table: table.top("nothing"),
            "planes without them": ({"ask": lambda s: lambda table: table.planes()}, "planes"),
            "LaTeX of no column": (
                {"ask": lambda s: lambda table: table.to_latex(["nothing"])},
                "columns",
            ),
        },
    ),
    Group(
        name="planes of a split",
        call=lambda s, planes: s.rotary.split.on_planes(planes),
        of="planes",
        right={"one": 0, "two": [0, 3]},
        wrong={
            "beyond the last": 99,
            "below zero": -1,
            "a band of no name": "fast",
        },
    ),
    Group(
        name="offset_profile",
        call=lambda s, split=None, **o: scores.offset_profile(split or s.w.split, **o),
        right={"total": {}, "a term": {"term": "pos-pos"}},
        wrong={
            "no term": ({"term": "pos-nothing"}, "terms"),
            "none of the queries": ({"drop": 99}, "drop"),
        },
    ),
    Group(
        name="head_type_scores",
        call=lambda s, pattern=None, tokens=None: scores.head_type_scores(
            s.w.split.pattern() if pattern is None else pattern,
            s.ids if tokens is None else tokens,
        ),
        right={"a pattern and its tokens": {}},
        wrong={
            "tokens of other prompts": ({"tokens": lambda s: s.w.corpus}, "pattern"),
            "no pattern": ({"pattern": torch.zeros(3, 4)}, "pattern"),
        },
    ),
)
