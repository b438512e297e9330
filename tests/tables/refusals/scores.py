"""Splits of scores and values, sweeps, planes, relative position, head types."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.tables.refusals.row import NOT_A_BASIS, Group, Scene, calls
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
    "a head by words": ({"heads": "induction"}, "head"),
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
            "no parts at all": ({"parts": 3}, "parts"),
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
    calls(
        "what splits and sweeps are asked for",
        right={
            "a term": lambda s: s.w.split.terms["pos", "cvec"],
            "its name": lambda s: s.w.split.terms["pos-cvec"],
            "shares": lambda s: s.w.split.shares(drop=2),
            "the first three": lambda s: s.w.sweep.top("induction", 3),
            "all of them": lambda s: s.w.sweep.top("induction", 10_000),
            "a plane": lambda s: s.rotary.split.on_planes(0),
            "planes": lambda s: s.rotary.split.on_planes([0, 3]),
            "a profile": lambda s: scores.offset_profile(s.w.split),
            "a profile of a term": lambda s: scores.offset_profile(s.w.split, term="pos-pos"),
            "types": lambda s: scores.head_type_scores(s.w.split.pattern(), s.ids),
        },
        wrong={
            "no term": (lambda s: s.w.split.terms["pos-no"], "terms"),
            "shares of nothing": (lambda s: s.w.split.shares(drop=99), "drop"),
            "a column of words": (lambda s: s.w.sweep.top("dominant_group"), "column"),
            "planes without them": (lambda s: s.w.sweep.planes(), "planes"),
            "a profile of no term": (lambda s: scores.offset_profile(s.w.split, term="x"), "terms"),
            "no queries": (lambda s: scores.offset_profile(s.w.split, drop=99), "drop"),
            "types of other prompts": (
                lambda s: scores.head_type_scores(s.w.split.pattern(), s.w.corpus),
                "pattern",
            ),
            "types of no pattern": (
                lambda s: scores.head_type_scores(torch.zeros(3, 4), s.ids),
                "pattern",
            ),
        },
    ),
    Group(name="split_values", call=values, right={"one head": {}}, wrong=BASES | HEADS),
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
)
