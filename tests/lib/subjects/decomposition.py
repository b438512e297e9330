"""Rows of ``decomposition``: mean, position and context of states, and their shares of variance."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.subjects import reference_scores as reference
from tests.lib.subjects.row import Answers, Subject, prefixed
from tests.lib.worlds import QUIET, World
from tl_geometry import decomposition

BLOCKS = "groups are blocks of neighbouring contexts, and the jackknife leaves one out at a time"
STATES = "states contain the directions that processing centres or folds away"
NO_ORDER = "contexts that change places change groups"


def basis(b: Any) -> Answers:
    """A basis of any making."""
    found: Answers = {
        "mean": b.mean,
        "pos": b.pos,
        "contexts": b.contexts,
        "positions": b.length,
        "window": b.window,
        "contexts in groups": b.group_counts,
    }
    if b.context_means is not None:
        found["ctx"] = b.ctx
    if b.has_second_moments:
        last = b.states[-1]
        found["second moment"] = b.second_moment(last)
        found["second moment, not centred"] = b.second_moment(last, centered=False)
    return found


def variance(table: Any) -> Answers:
    """Shares of variance, with their intervals."""
    parts = {name: getattr(table, name) for name in ("total", "pos", "ctx", "resid")}
    found: Answers = prefixed("variance", parts)
    found |= {f"share.{part}": parts[part] / parts["total"] for part in ("pos", "ctx", "resid")}
    found["variance.pos, debiased"] = table.pos_debiased
    found["reliability of pos"] = table.pos_reliability
    found["share of the largest tokens"] = table.top_share
    if table.ctx_null is not None:
        found["variance.ctx by chance"] = table.ctx_null
    for name, values in table.intervals.items():
        found[f"interval of {name}"] = values
    return found


def largest(table: Any) -> Answers:
    """The eight tokens of largest norm of each state."""
    frame, states = table.df, len(set(table.df.state))
    grid = {name: frame[name].to_numpy().reshape(states, -1) for name in frame if name != "text"}
    names = ("norm", "context", "position", "token", "coordinate", "share")
    found: Answers = {"rms norm": grid["rms"][:, 0]}
    return found | {f"largest.{name}": grid[name][:, :8] for name in names}


def parts(p: Any) -> Answers:
    """The additive parts of activations."""
    found = {name: getattr(p, name) for name in ("mean", "pos", "ctx", "resid", "cvec")}
    return prefixed("part", found) | {"sum of parts": p.total()}


def _two_shards(w: World) -> Any:
    half = len(w.corpus) // 2
    shards = [tlg.decompose(w.model, part, **QUIET) for part in w.corpus.split(half)]
    return decomposition.PositionContext.merge(shards)


def _own_activations(w: World, **options: Any) -> Any:
    """The last state of the model's own stream, as a tensor."""
    return tlg.decompose_activations(w.stream()[-1], **options)


def _planted(states: int = 2) -> torch.Tensor:
    """Activations with a mean, position and context of known sizes, of no model."""
    g = torch.Generator().manual_seed(11)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    noise = draw(states, 40, 9, 16)
    return 3 * draw(states, 1, 1, 16) + 2 * draw(states, 1, 9, 16) + draw(states, 40, 1, 16) + noise


SUBJECTS = (
    Subject(
        name="decompose",
        covers=("decompose", "PositionContext"),
        call=lambda w, **o: tlg.decompose(w.model, w.corpus, **QUIET, **o),
        reference=reference.decompose,
        answers=basis,
        variants={
            "plain": {},
            "two states": {"states": lambda w: [0, w.model.cfg.n_layers]},
            "window": {"window": (4, 12)},
            "normalized": {"normalize": True},
            "four groups": {"groups": 4},
        },
        order={"ctx": 1},
        batches=(1, 5),
        half=("mean", "pos"),
        gauge={"*": STATES},
        real=("plain",),
    ),
    Subject(
        name="decompose, groups of contexts",
        covers=("PositionContext",),
        call=lambda w: w.basis.moments.sums,
        answers=lambda sums: {"sum over each group": sums},
        gauge={"*": STATES},
        without={"order": NO_ORDER},
    ),
    Subject(
        name="anova",
        covers=("PositionContext",),
        call=lambda w, **o: w.basis.anova(**o),
        reference=reference.anova,
        answers=variance,
        variants={"plain": {}, "null": {"null": lambda w: _fresh_basis(w)}},
        half=("share.pos",),
        gauge={"*": STATES},
        without={
            f"order:{name}": BLOCKS for name in ("interval *", "*debiased", "reliab*", "*chance")
        },
        real=("plain",),
    ),
    Subject(
        name="transform",
        covers=("PositionContext",),
        call=lambda w: w.basis.transform(w.stream()),
        answers=parts,
        order={"part.ctx": 1, "part.resid": 1, "part.cvec": 1, "sum of parts": 1},
        gauge={"*": STATES},
    ),
    Subject(
        name="merge",
        covers=("PositionContext",),
        call=_two_shards,
        answers=lambda b: basis(b) | variance(b.anova()),
        order={"ctx": 1},
        gauge={"*": STATES},
        without={f"order:{name}": BLOCKS for name in ("interval *", "*debiased", "reliab*")},
    ),
    Subject(
        name="largest tokens",
        covers=("PositionContext",),
        call=lambda w: w.basis.largest_tokens(),
        answers=largest,
        gauge={"*": STATES},
        without={
            "order:largest.context": "it counts contexts in their order",
            "order:largest.*": "equal tokens have equal norms at state 0, and come in their order",
        },
    ),
    Subject(
        name="decompose_activations",
        call=_own_activations,
        answers=basis,
        variants={"tensor": {}, "window": {"window": (1, 9)}},
        order={"ctx": 1},
        gauge={"*": STATES},
    ),
    Subject(
        name="decompose_activations, planted",
        covers=("decompose_activations",),
        call=lambda w: tlg.decompose_activations(_planted()),
        answers=lambda b: basis(b) | variance(b.anova()),
        only={"*": lambda w: w.kind == "gpt2"},
        without={"order": "its activations are those of no world"},
    ),
    Subject(
        name="decompose_activations, cache",
        covers=("decompose_activations",),
        call=lambda w: tlg.decompose_activations(w.cache),
        answers=basis,
        order={"ctx": 1},
        gauge={"*": STATES},
    ),
)


def _fresh_basis(w: World) -> Any:
    """The basis of windows that the other one has not seen."""
    return tlg.decompose(w.model, w.fresh, **QUIET)
