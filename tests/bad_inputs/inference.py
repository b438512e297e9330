"""Intervals, p-values and nulls."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.bad_inputs.cases import PATH, Call, Command, World
from tl_geometry.scores.head_types import token_ranges

UNKNOWN: Any = [None] * 10


def unknown(world: World, values: torch.Tensor) -> bool:
    """Nothing but NaN: said, not made up."""
    return bool(values.isnan().all())


MEASURES: list[Call] = [
    Call(
        "an analysis of nine windows has no interval",
        lambda w: w.decompose(w.ids.repeat(3, 1)[:9]).anova(),
        check=lambda w, v: "pos_corrected" not in v.columns() and "pos_debiased" in v.columns(),
    ),
    Call(
        "an analysis of twelve windows bounds position alone",
        lambda w: w.decompose(w.ids.repeat(3, 1)[:12]).anova().intervals,
        check=lambda w, v: v["pos"].isfinite().all() and unknown(w, v["ctx"][:, 1:]),
    ),
    Call(
        "a null of other states",
        lambda w: w.basis.anova(null=w.decompose(w.ids, states=[0])),
        "null: expected a basis of states",
    ),
    Call("a path as a null", lambda w: w.basis.anova(null=PATH), "PositionContext"),
    Call(
        "directions of few windows have no null",
        lambda w: tlg.weight_geometry(w.model, w.decompose(w.ids[:8]), layers=0),
        check=lambda w, v: unknown(w, v.p) and any("no null" in f for f in v.provenance.flags),
    ),
    Call(
        "directions without draws",
        lambda w: tlg.weight_geometry(w.model, w.basis, layers=0, draws=0).p,
        check=unknown,
    ),
    Call(
        "directions with -1 draws",
        lambda w: tlg.weight_geometry(w.model, w.basis, layers=0, draws=-1),
        "draws: expected at least 0",
    ),
    Call("measures without draws", lambda w: tlg.positional_report(w.basis, draws=0), "draws"),
    Call("a rank bound of 0", lambda w: tlg.positional_report(w.basis, k=0), "k: expected"),
    Call("no frequencies", lambda w: tlg.positional_report(w.basis, frequencies=0), "frequencies"),
    Call(
        "an unknown pseudo-noise",
        lambda w: tlg.positional_report(w.basis, strategy="x"),
        "strategy: expected one of",
    ),
    Call(
        "an error of a rank",
        lambda w: tlg.positional_report(w.decompose(w.ids.repeat(3, 1)[:12])),
        check=lambda w, v: "rank" not in v.errors and "stable_rank" in v.errors,
    ),
    Call(
        "context of twelve windows has no error",
        lambda w: tlg.contextual_report(w.decompose(w.ids.repeat(3, 1)[:12])),
        check=lambda w, v: all(unknown(w, e) for e in v.errors.values()),
    ),
    Call("context without draws", lambda w: tlg.contextual_report(w.basis, draws=0), "draws"),
    Call(
        "labels of other windows",
        lambda w: tlg.contextual_report(w.basis, labels=[0, 1]),
        "labels: expected one integer label",
    ),
    Call(
        "labels of contexts that are huge",
        lambda w: tlg.contextual_report(w.basis, labels=[300_000, 10**12] * 5),
        check=lambda w, v: v.names == ("300000", "1000000000000"),
    ),
    Call(
        "labels of contexts that are names",
        lambda w: tlg.contextual_report(w.basis, labels=["a", "b"] * 5),
        check=lambda w, v: v.names == ("a", "b"),
    ),
    Call(
        "labels of contexts that are none",
        lambda w: tlg.contextual_report(w.basis, labels=UNKNOWN),
        "labels: expected one integer label",
    ),
    Call(
        "labels of contexts below zero",
        lambda w: tlg.contextual_report(w.basis, labels=[-1, 0] * 5),
        "labels from -1 to 0",
    ),
    Call("no ranges of ids", lambda w: token_ranges(50_000, count=0), "count: expected at least 1"),
]
CALLS: list[Call] = [*MEASURES]


def nulls(world: World, tokens: Any = None, basis: Any = None, **options: Any) -> Any:
    """A sweep with the null of position."""
    tokens = many(world) if tokens is None else tokens
    basis = world.decompose(many(world)) if basis is None else basis
    options = {"detail": "nulls", "progress": False} | options
    return tlg.sweep_heads(world.model, tokens, basis, **options)


def many(world: World, contexts: int = 12) -> torch.Tensor:
    """Different prompts, whatever the world holds."""
    generator = torch.Generator().manual_seed(contexts)
    ids = world.ids[torch.arange(contexts) % len(world.ids)].clone()
    shuffled = torch.randint(5, 60, ids[:, 1:].shape, generator=generator)
    ids[:, 1:] = shuffled
    return ids


def p_values(table: Any) -> torch.Tensor:
    return table.details["p_position"]


def no_p_value(world: World, table: Any) -> bool:
    """No p-value, and a null share all the same."""
    null = table.details["cs_position_null"]
    return bool(p_values(table).isnan().all() and null.isfinite().all())


def known(world: World, table: Any) -> bool:
    p, adjusted = p_values(table), table.details["p_position_bh"]
    return bool((p >= 1 / 2000).all() and (adjusted >= p).all() and (adjusted <= 1).all())


POSITION_NULL = [
    Call("the null of twelve prompts", lambda w: nulls(w), check=known),
    Call("the null of nine prompts", lambda w: nulls(w, many(w, 9)), check=no_p_value),
    Call(
        "the null of a basis of nine prompts",
        lambda w: nulls(w, basis=w.decompose(many(w, 9))),
        check=no_p_value,
    ),
    Call(
        "the null of a basis of three groups",
        lambda w: nulls(w, basis=w.decompose(many(w), groups=3)),
        check=no_p_value,
    ),
    Call(
        "the null of one prompt twelve times",
        lambda w: nulls(w, many(w)[:1].repeat(12, 1), w.decompose(many(w)[:1].repeat(12, 1))),
        check=no_p_value,
    ),
    Call("the null of other prompts", lambda w: nulls(w, many(w, 15)), check=known),
    Call("the null of shorter prompts", lambda w: nulls(w, many(w)[:, :-3]), check=known),
    Call(
        "the null on a normalised basis",
        lambda w: nulls(w, basis=w.decompose(many(w), normalize=True)),
        check=known,
    ),
    Call("the null asked for twice", lambda w: nulls(w, detail=("nulls", "nulls")), check=known),
    Call(
        "the null beside intervals is the null alone",
        lambda w: nulls(w, detail=("intervals", "nulls")),
        check=lambda w, t: torch.equal(p_values(t), p_values(nulls(w))),
    ),
    Call(
        "the null of one layer has fewer heads to answer for",
        lambda w: nulls(w, layers=1),
        check=lambda w, t: (
            known(w, t)
            and set(p_values(t).tolist()) < set(p_values(nulls(w)).tolist())
            and {layer for layer, _ in t.heads} == {1}
        ),
    ),
    Call(
        "a sweep sorted by its p-values",
        lambda w: nulls(w).top("p_position_bh", 2, ascending=True),
        check=lambda w, t: len(t.heads) == 2 and known(w, t),
    ),
    Call("a detail of almost this name", lambda w: nulls(w, detail="null"), "detail"),
    Call("the null of content", lambda w: nulls(w).top("cs_content_null"), "column"),
]
CALLS += POSITION_NULL
COMMANDS: list[Command] = []
