"""Edits of terms, planes, edges, heads and paths, and what is measured with them."""

from __future__ import annotations

from typing import Any

from tests.tables.refusals.row import Group, Scene
from tests.tables.refusals.scores import BASES, HEADS
from tl_geometry import interventions


def term(s: Scene, ids: Any = None, **options: Any) -> Any:
    """Logits without a term."""
    given = {"basis": s.w.basis, "names": "pos-pos", "heads": "L1H0", **options}
    return s.logits(interventions.term(s.model, **given), ids)


def planes(s: Scene, planes: Any, w: Any = None, **options: Any) -> Any:
    w = w or s.rotary
    edit = interventions.planes(w.model, planes, **{"heads": "L1H0", **options})
    return s.logits(edit, w.ids, w.model)


def edge(s: Scene, writer: Any = "L0H0", tokens: Any = None, **options: Any) -> Any:
    given = {"heads": "L1H0", **options}
    tokens = s.ids if tokens is None else tokens
    return s.logits(interventions.edge(s.model, tokens, writer, **given))


def removed(
    s: Scene, heads: Any = "L0H0", by: str = "zero", ids: Any = None, **options: Any
) -> Any:
    return s.logits(interventions.heads(s.model, heads, by=by, **options), ids)


def measured(s: Scene, prompts: Any = None, heads: Any = "L1H0", **options: Any) -> Any:
    given: dict[str, Any] = {"metric": "difference", "answer": [5, 7], "other": 9, **options}
    prompts = s.ids[:2] if prompts is None else prompts
    edits = {"removed": interventions.heads(s.model, heads, by=given.pop("by", "mean"))}
    return interventions.effects(s.model, prompts, edits, **given)


def patched(s: Scene, senders: Any = "L0H0", receivers: Any = "output", **options: Any) -> Any:
    given: dict[str, Any] = {"by": "zero", **options}
    return s.logits(interventions.path(s.model, senders, receivers, **given))


def surrogate(s: Scene, **options: Any) -> Any:
    given = {"basis": s.w.basis, "heads": "L1H0", **options}
    return s.logits(interventions.surrogate(s.model, **given))


GROUPS = (
    Group(
        name="a term",
        call=term,
        right={
            "named": {},
            "a pair": {"names": ("pos", "cvec")},
            "a group": {"names": "content"},
            "several": {"names": ["pos-pos", "pos-cvec"], "heads": ["L0H0", "L1H1"]},
        },
        wrong={
            **BASES,
            **HEADS,
            "a term of no name": ({"names": "pos-nothing"}, "term"),
            "prompts without BOS": ({"ids": lambda s: s.ids[:, 1:]}, "tokens"),
            "prompts beyond the basis": ({"ids": lambda s: s.ids.repeat(1, 2)}, "tokens"),
        },
    ),
    Group(
        name="planes",
        call=planes,
        right={"one": {"planes": [0]}, "two": {"planes": [1, 2]}},
        wrong={
            **{name: ({"planes": [0], **o}, what) for name, (o, what) in HEADS.items()},
            "none of the model": ({"planes": [99]}, "planes"),
            "of no name": ({"planes": "fast"}, "planes"),
            "near ones without rotation": ({"planes": "near", "w": lambda s: s.w}, "planes"),
        },
    ),
    Group(
        name="an edge",
        call=edge,
        right={"to the keys": {}, "of an MLP": {"writer": "mlp0"}, "values": {"side": "value"}},
        wrong={
            **HEADS,
            "from a later head": ({"writer": "L2H0"}, "writer"),
            "from an empty list": ({"writer": []}, "writer"),
            "from one twice": ({"writer": ["L0H0", "L0H0"]}, "writer"),
            "from a part of another": ({"writer": ["attn0", "L0H0"]}, "writer"),
            "to no side": ({"side": "output"}, "side"),
            "of other tokens": ({"tokens": lambda s: s.w.other}, "tokens"),
            "nothing left": ({"drop": 99}, "drop"),
            "counterfactuals of no swap": ({"counterfactual": lambda s: s.ids}, "counterfactual"),
        },
    ),
    Group(
        name="heads",
        call=removed,
        right={
            "zero": {},
            "the mean": {"by": "mean", "reference": lambda s: s.w.corpus},
            "another prompt": {"by": "prompt"},
            "twice": {"heads": ["L0H0", (0, 0)]},
        },
        wrong={
            **HEADS,
            "by no name": ({"by": "median"}, "^by"),
            "a mean of no prompts": ({"by": "mean"}, "reference"),
            "counterfactuals of no prompts": (
                {"by": "counterfactual", "counterfactual": lambda s: s.ids},
                "counterfactual",
            ),
            "a mean of shorter prompts": (
                {"by": "mean", "reference": lambda s: s.ids[:, :3]},
                "reference|tokens",
            ),
            "another of one": ({"by": "prompt", "ids": lambda s: s.ids[:1]}, "prompts|tokens"),
        },
    ),
    Group(
        name="effects",
        call=measured,
        right={
            "of a difference": {},
            "of the loss": {"metric": "loss", "answer": None, "other": None},
            "one prompt": {"prompts": lambda s: s.ids[:1], "answer": 5, "by": "zero"},
            "pairs": {"answer": [(5, 9), (7, 9)], "other": None},
        },
        wrong={
            "tokens of three prompts": ({"answer": [5, 6, 7]}, "answer"),
            "no tokens": ({"answer": None}, "answer"),
            "tokens beside the loss": ({"metric": "loss"}, "answer"),
            "the mean of one prompt": ({"prompts": lambda s: s.ids[:1], "answer": 5}, "prompts"),
            "a metric of no name": ({"metric": "accuracy"}, "metric"),
            "a control of no name": ({"control": "neurons"}, "control"),
            "a control that no edit has": ({"control": "planes"}, "control"),
            "other heads for an MLP": ({"heads": ["L1H0", "mlp0"], "control": "heads"}, "control"),
            "one draw": ({"control": "heads", "draws": 1}, "draws"),
            "a position beyond": ({"position": 99}, "position"),
            "a position of no name": ({"position": "end"}, "position"),
        },
    ),
    Group(
        name="paths",
        call=patched,
        of="receivers",
        right={"to the output": {}, "to queries": ["L1H0<q>", "L1H1<q>"]},
        wrong={
            "to a block before": ({"senders": "L1H0", "receivers": ["L0H1<v>"]}, "senders"),
            "to a head as a whole": "L1H0",
            "to the queries of two heads": "L1H0-1<q>",
            "to nothing": [],
            "from nothing": ({"senders": []}, "head|senders"),
            "counterfactuals of other length": (
                {
                    "by": "counterfactual",
                    "reference": lambda s: s.ids,
                    "counterfactual": lambda s: s.ids[:, :6],
                },
                "counterfactuals",
            ),
            "a receiver beyond the prompt": ({"positions": 99}, "position"),
        },
    ),
    Group(
        name="surrogate",
        call=surrogate,
        right={"structured": {}, "diagonal": {"part": "diagonal"}},
        wrong={
            **BASES,
            **HEADS,
            "a part of no name": ({"part": "nothing"}, "part"),
            "more directions than there are": ({"rank": 10**4}, "rank"),
        },
    ),
)
