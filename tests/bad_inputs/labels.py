"""Labels of heads, sweeps and their tables."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.bad_inputs.cases import Call, Command, World

NONE: Any = None
THREE: Any = 3
"""No names of columns."""


def sweep(world: World, tokens: Any = None, **options: Any) -> Any:
    tokens = world.windows if tokens is None else tokens
    return tlg.sweep_heads(world.model, tokens, world.basis, progress=False, **options)


def swept_under(world: World, spared: int) -> Any:
    """A sweep under a hook that changes the queries of every row but one."""

    def act(q: torch.Tensor, hook: Any) -> torch.Tensor:
        changed = 1.5 * q
        changed[spared] = q[spared]
        return changed

    with world.model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", act)]):
        return sweep(world, batch_size=5)  # two batches: never the same row of both


def labels_agree(world: World, table: Any) -> bool:
    """Every label is the name that is first by both shares."""
    frame = table.to_dataframe()
    clear = frame[~frame.dominant_group.isin(["unclear", "uniform"])]
    return bool(
        (clear.dominant_group == clear.group_by_cs).all()
        and (clear.dominant_group == clear.group_by_gs).all()
        and (clear.group_flag == "").all()
    )


CALLS: list[Call] = [
    Call("labels of a sweep", sweep, check=labels_agree),
    Call(
        "labels of a sweep of ten windows with intervals",
        lambda w: sweep(w, detail="intervals"),
        check=labels_agree,
    ),
    Call(
        "labels of a sweep of three windows with intervals",
        lambda w: sweep(w, w.windows[:3], detail="intervals"),
        check=lambda w, t: set(t.by_group.labels) <= {"unclear", "uniform"},
    ),
    Call("a sweep of one window", lambda w: sweep(w, w.windows[:1]), check=labels_agree),
    Call("a sweep of one window a batch", lambda w: sweep(w, batch_size=1), check=labels_agree),
    Call("a sweep under a hook that spares row 0", lambda w: swept_under(w, 0), "add up"),
    Call("a sweep under a hook that spares the last row", lambda w: swept_under(w, -1), "add up"),
    Call(
        "the largest of a column that is a label", lambda w: w.table.top("dominant_group"), "column"
    ),
    Call("the largest of a flag", lambda w: w.table.top("group_flag"), "column"),
    Call("the largest of the first by covariance", lambda w: w.table.top("group_by_cs"), "column"),
    Call("the largest of a misspelt column", lambda w: w.table.top("positoin"), "column"),
    Call("the largest of no column", lambda w: w.table.top(NONE), "column"),
    Call("the largest of a numbered column", lambda w: w.table.top(THREE), "column"),
    Call("the largest of none", lambda w: w.table.top("induction", 0), "at least 1"),
    Call(
        "more heads than there are",
        lambda w: w.table.top("induction", 10_000),
        check=lambda w, t: len(t.heads) == len(w.table.heads),
    ),
    Call("a detail that is none", lambda w: sweep(w, detail="interval"), "detail"),
    Call("details for writers", lambda w: sweep(w, parts="writers", detail="intervals"), "detail"),
    Call("planes that were not asked for", lambda w: w.table.planes(), "planes"),
    Call(
        "energy that was not asked for",
        lambda w: w.table.top("es_cvec-cvec"),
        "energy",
    ),
    Call(
        "the share of a group by its short name",
        lambda w: w.table.top("position", 3),
        check=lambda w, t: t.heads == w.table.top("cs_position", 3).heads,
    ),
    Call(
        "a table and its labels from a file",
        lambda w: tlg.scores.SweepTable.load(w.table.save(w.folder / "table.safetensors")),
        check=lambda w, t: t.by_group.labels == w.table.by_group.labels,
    ),
]
COMMANDS: list[Command] = []
