"""Rows of ``scores``: the exact split of attention scores, shares, sweeps over heads, rotary planes
and relative position, values."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.subjects import reference_scores as reference
from tests.lib.subjects.decomposition import BLOCKS
from tests.lib.subjects.row import (
    Answers,
    Subject,
    columns,
    given,
    interval,
    labels,
    prefixed,
    rotary,
    sizes,
)
from tests.lib.worlds import QUIET, World
from tl_geometry import scores

FEW_PARTS = 4
"""Terms are recorded one by one where they are of this many parts at most."""
CELLS = ("term *", "total", "pattern", "scores before softmax")
"""Quantities ``[prompt head query key]``."""


def split(s: Any) -> Answers:
    """A split: its terms where they are few, their sum, and what the model makes of it. ALiBi is
    known up to a constant of each row, which softmax ignores: its mean over a row is left out."""
    shift = 0.0
    if s.bias is not None:
        counts = s.allowed.sum(-1, keepdim=True)
        shift = s.bias.where(s.allowed, 0.0).sum(-1, keepdim=True) / counts
    found: Answers = {
        "heads": labels(s.heads),
        "parts": list(s.parts),
        "total": s.total() - shift,
        "scores before softmax": s.model_scores() - shift,
        "pattern": s.pattern(),
        "adds up": str(s.reconstruction.adds_up),
        "size of query parts": sizes(s.q, (0, 1, 3)),
        "size of key parts": sizes(s.k, (0, 1, 3)),
    }
    if len(s.parts) <= FEW_PARTS:
        # where a query may not attend, a term is no part of anything
        for a, b in s.terms:
            term = s.terms[a, b] - (shift if a == "alibi" else 0.0)
            found[f"term {a}, {b}"] = term.where(s.allowed, 0.0)
        found |= {f"query part {name}": s.q[i] for i, name in enumerate(s.parts)}
        found |= {f"key part {name}": s.k[i] for i, name in enumerate(s.parts)}
    return found


def shares(table: Any) -> Answers:
    """Covariance and gain shares by term and by group, and the label of each head."""
    found: Answers = {"heads": labels(table.heads), "sum of squared scores": table.total}
    found |= {"terms": [f"{a}, {b}" for a, b in table.pairs]}
    found |= {"cs by term": table.cs, "gs by term": table.gs}
    found["attention to positions left out"] = table.dropped_mass
    first = table.dominant_by("term")
    found |= {"first term by cs": list(first.by_cs), "first term by gs": list(first.by_gs)}
    found["lead"] = first.margin
    if table.groups:
        for name in ("cs", "gs"):
            for group, values in zip(table.groups, table.share(name).mT):
                found[f"{name} of {group}"] = values
        found["label of each head"] = list(table.dominant_by("group").labels)
    return found


def intervals(table: Any) -> Answers:
    """The same with intervals of shares and the null of position."""
    found = shares(table)
    for by in ("term", "group"):
        for name in ("cs", "gs"):
            found |= interval(f"{name} by {by}, corrected", table.interval(name, by))
    found |= {
        "cs of position by chance": table.nulls["cs_position_null"],
        "cs of position by chance, 95%": table.nulls["cs_position_null_95"],
        "p of position": table.nulls["p_position"],
        "p of position, adjusted for heads": table.nulls["p_position_bh"],
    }
    return found


def types(table: Any) -> Answers:
    """Head-type scores, with standard errors and what uniform attention would score."""
    found = prefixed("head type", table.types)
    found |= prefixed("error of head type", table.type_errors)
    return found | prefixed("head type by uniform attention", table.baselines)


def planes(table: Any) -> Answers:
    """Shares of rotary planes and of bands of wavelengths."""
    found: Answers = {"wavelength of planes": table.wavelength, "terms": list(table.terms)}
    found |= {"cs by plane and term": table.cs, "gs by plane and term": table.gs}
    found |= {"cs by plane": table.total_cs, "gs by plane": table.total_gs}
    bands = table.by_band().df.drop(columns=["layer", "head", "dominant"])
    return found | {n.replace("s_", "s of band."): bands[n].to_numpy() for n in bands}


def writers(table: Any) -> Answers:
    """Who wrote what each head reads, by side."""
    return {
        "heads": labels(table.heads),
        "writers": list(table.parts),
        "cs by side and writer": table.cs,
        "gs by side and writer": table.gs,
        "sum of squared scores": table.total,
        "attention to positions left out": table.dropped_mass,
    }


def values(v: Any) -> Answers:
    """What heads write, by part of what they read."""
    found: Answers = {
        "heads": labels(v.heads),
        "adds up": str(v.reconstruction.adds_up),
        "output": v.output(),
        "norm of parts": v.norm,
        "share of parts": v.share,
    }
    for part in v.parts:
        found[f"output part {part}"] = v.output(part)
    return found | columns("mixed values part", v.parts, v.z, 0)


def types_of_pattern(t: Any) -> Answers:
    """Head types of any attention pattern."""
    found = prefixed("head type", t.scores)
    return found | prefixed("head type by uniform attention", t.baselines)


def profile(p: Any) -> Answers:
    """A term by offset, with its interval over prompts."""
    found: Answers = {"heads": labels(p.heads), "offsets": p.offsets, "cells": p.cells}
    return found | {"mean": p.mean, "mean.low": p.low, "mean.high": p.high, "peak": p.peak}


def parts_of_stream(w: World) -> dict[str, torch.Tensor]:
    """The stream of each block in three parts that no family names: two random shares of it at
    each position, and the rest."""
    stream = w.stream()[:-1]
    generator = torch.Generator().manual_seed(3)
    share = torch.rand(2, len(stream), 1, stream.shape[2], 1, generator=generator)
    first, second = share[0] * stream, (1 - share[0]) * share[1] * stream
    return {"first": first, "second": second, "rest": stream - first - second}


def _split(w: World, **options: Any) -> Any:
    defaults: dict[str, Any] = {"basis": w.basis, "heads": w.heads}
    return tlg.split_scores(w.model, w.ids, **defaults | options)


def _sweep(w: World, *, tokens: Any = None, basis: Any = None, **options: Any) -> Any:
    tokens, basis = w.fresh if tokens is None else tokens, basis or w.basis
    return tlg.sweep_heads(w.model, tokens, basis, **QUIET, **options)


def _random_pattern(w: World) -> Any:
    """Sharp random causal patterns on tokens that repeat."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.tensor([[3, 4, 5, 3, 4, 5, 3, 4], [7, 7, 8, 9, 7, 8, 8, 9]])
    logits = 3 * torch.randn(2, 2, 4, 8, 8, generator=generator)
    pattern = logits.masked_fill(~torch.ones(8, 8).tril().bool(), -torch.inf).softmax(-1)
    return scores.head_type_scores(pattern, ids)


SUBJECTS = (
    Subject(
        name="split_scores",
        covers=("split_scores", "ScoreSplit"),
        call=_split,
        reference=reference.split,
        answers=split,
        variants={
            "pos, cvec": {},
            "pos, ctx, resid": {"parts": ("pos", "ctx", "resid")},
            "one head": {"heads": lambda w: w.head},
            "all heads": {"heads": None},
            "mapping": {"parts": parts_of_stream, "basis": None},
            "normalized basis": {"basis": lambda w: w.normalized_basis},
            "cache": {"cache": lambda w: w.cache},
        },
        order={**dict.fromkeys((*CELLS, "query part *", "key part *"), 0), "size of *": 1},
        later={**dict.fromkeys(CELLS, 2), "query part *": 1, "key part *": 1},
        adds={"total": ("term *",)},
        faults=("q", "k", "pattern"),
        half=("pattern",),
        without={
            "later:pos, ctx, resid/*": "ctx is a mean over the whole prompt",
            "faults:cache/*": "a cache of the clean run holds none of it",
        },
        real=("pos, cvec", "one head"),
    ),
    Subject(
        name="split_scores by writers",
        covers=("split_scores", "ScoreSplit"),
        call=lambda w, **o: tlg.split_scores(w.model, w.ids, heads=w.heads, **o),
        reference=reference.split,
        answers=split,
        variants={"blocks": {"parts": "blocks"}, "writers": {"parts": "writers"}},
        order={**dict.fromkeys(CELLS[1:], 0), "size of *": 1},
        later=dict.fromkeys(CELLS[1:], 2),
        faults=("q", "k"),
        half=("pattern",),
        real=("blocks",),
    ),
    Subject(
        name="shares of a split",
        covers=("ScoreSplit",),
        call=lambda w, **o: _split(w, **o).shares(),
        reference=reference.shares,
        answers=shares,
        variants={
            "pos, cvec": {},
            "normalized basis": {"basis": lambda w: w.normalized_basis},
            "mapping": {"parts": parts_of_stream, "basis": None},
            "blocks": {"parts": "blocks", "basis": None},
        },
        half=("cs by term",),
        without={
            "empty:mapping/attention *": "without a basis no position is left out",
            "empty:blocks/attention *": "without a basis no position is left out",
        },
        real=("pos, cvec",),
    ),
    Subject(
        name="planes of a split",
        covers=("ScoreSplit",),
        call=lambda w, **o: _split(w, **o).planes(),
        answers=planes,
        variants={"plain": {}, "normalized basis": {"basis": lambda w: w.normalized_basis}},
        only={"*": rotary},
        without={"empty:* of band.*": "no plane of so few lies in this band"},
        real=("plain",),
    ),
    Subject(
        name="split on some planes",
        covers=("ScoreSplit",),
        call=lambda w: [w.split.on_planes(choice).total() for choice in ([0], [1, 2, 3])],
        answers=lambda found: {"total on plane 0": found[0], "total on planes 1, 2, 3": found[1]},
        only={"*": rotary},
        order={"total *": 0},
        later={"total *": 2},
    ),
    Subject(
        name="split_values",
        call=lambda w, **o: tlg.split_values(
            w.model, w.ids, **given(o, basis=w.basis, heads=w.heads)
        ),
        reference=reference.values,
        answers=values,
        variants={
            "pos, cvec": {},
            "pos, ctx, resid": {"parts": ("pos", "ctx", "resid")},
            "blocks": {"parts": "blocks", "basis": None},
            "mapping": {"parts": parts_of_stream, "basis": None},
        },
        order={**dict.fromkeys(("output", "output *", "mixed *"), 0)},
        later={**dict.fromkeys(("output", "output *", "mixed *"), 1)},
        adds={"output": ("output part *",)},
        faults=("v",),
        half=("output",),
        gauge={"*": "processing moves the biases of values behind the heads, and centres outputs"},
        without={"later:pos, ctx, resid/*": "ctx is a mean over the whole prompt"},
        real=("pos, cvec",),
    ),
    Subject(
        name="sweep_heads",
        covers=("sweep_heads", "SweepTable"),
        call=_sweep,
        reference=reference.sweep,
        answers=lambda table: shares(table) | types(table),
        variants={
            "plain": {},
            "normalized basis": {"basis": lambda w: w.normalized_basis},
            "one layer": {"layers": 1},
        },
        batches=(1, 5),
        faults=("q", "k"),
        half=("cs by term",),
        real=("plain",),
    ),
    Subject(
        name="sweep_heads with intervals",
        covers=("sweep_heads", "SweepTable"),
        call=lambda w, **o: _sweep(w, intervals=True, **o),
        answers=intervals,
        batches=(3,),
        seeds=("cs of position by chance*", "p of position*"),
        without={
            "seeds:plain/p of position*": "p is the least that so many draws allow",
            **dict.fromkeys(
                ("order:* by * corrected*", "order:*by chance*", "order:p *", "order:label *"),
                BLOCKS,
            ),
        },
    ),
    Subject(
        name="sweep_heads by planes",
        covers=("sweep_heads", "SweepTable"),
        call=lambda w, **o: _sweep(w, planes=True, **o).planes(),
        answers=planes,
        variants={"plain": {}, "normalized basis": {"basis": lambda w: w.normalized_basis}},
        only={"*": rotary},
        batches=(3,),
        without={"empty:* of band.*": "no plane of so few lies in this band"},
    ),
    Subject(
        name="sweep_heads by writers",
        covers=("sweep_heads",),
        call=lambda w, **o: tlg.sweep_heads(w.model, w.fresh, **QUIET, **o),
        answers=writers,
        variants={"writers": {"parts": "writers"}, "blocks": {"parts": "blocks"}},
        without={"empty:attention *": "without a basis no position is left out"},
        batches=(3,),
    ),
    Subject(
        name="head_type_scores",
        call=lambda w: scores.head_type_scores(w.split.pattern(), w.ids),
        answers=types_of_pattern,
    ),
    Subject(
        name="head_type_scores, planted",
        covers=("head_type_scores",),
        call=_random_pattern,
        answers=types_of_pattern,
        only={"*": lambda w: w.kind == "gpt2"},
    ),
    Subject(
        name="offset_profile",
        call=lambda w, **o: scores.offset_profile(
            tlg.split_scores(w.model, w.prompts, w.basis, heads=w.heads), **o
        ),
        answers=profile,
        variants={"total": {}, "pos-pos": {"term": ("pos", "pos")}},
        only={"total": lambda w: w.kind != "bloom"},  # see split: rows of ALiBi have no zero
    ),
)
