"""Rows of ``interventions``: edits of a live model by the logits that they leave, and measurements
under edits beside controls."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.subjects import reference_runs as reference
from tests.lib.subjects.row import Answers, Subject, interval, labels, rotary
from tests.lib.worlds import World
from tl_geometry import interventions as live

POSITION_CONTENT = [("pos", "cvec"), ("cvec", "pos")]
TOKEN = [("bias", "cvec"), ("cvec", "bias")]
ORDERED = "which prompt another one gets follows their order"
ZERO = "processing moves the biases of values behind the heads, where zero spares them"


def edited(logits: Tensor) -> Answers:
    """What a model says under an edit; processing shifts all logits of a row alike."""
    return {"log probabilities": logits.double().log_softmax(-1)}


def inside(w: World, edit: Any, how: str = "with") -> Tensor:
    """Logits of ``w.ids`` under an edit: inside its ``with``, or with its list of hooks."""
    with torch.no_grad():
        if how == "list":
            run = w.model.run_with_hooks
            return run(w.ids, fwd_hooks=edit, return_type="logits").clone()
        with edit:
            return w.model(w.ids, return_type="logits").clone()


def _term(w: World, *, mode: str, term: Any, heads: Any = None, how: str = "with") -> Tensor:
    return inside(w, live.term(w.model, w.basis, term, heads or w.head, how=mode), how)


def _planes(w: World, *, mode: str, planes: Any, how: str = "with", **options: Any) -> Tensor:
    return inside(w, live.planes(w.model, planes, w.heads, how=mode, **options), how)


def _edge(w: World, *, mode: str, how: str = "with", **options: Any) -> Tensor:
    writer, head = options.pop("writer", "L0H0"), options.pop("head", w.heads[1])
    return inside(w, live.edge(w.model, w.ids, writer, head, how=mode, **options), how)


def _heads(w: World, *, how: str = "with", reference: bool = False, **options: Any) -> Tensor:
    heads = options.pop("heads", w.heads[0])
    options |= {"reference": w.other} if reference else {}
    return inside(w, live.heads(w.model, heads, **options), how)


def _surrogate(w: World, *, part: str, how: str = "with", **options: Any) -> Tensor:
    return inside(w, live.surrogate(w.model, w.basis, w.head, part=part, **options), how)


def _terms_of_edits() -> dict[str, dict[str, Any]]:
    terms = {
        "position": "position",
        "content": "content",
        "position-content": POSITION_CONTENT,
        "token": TOKEN,
        "pos-pos": ("pos", "pos"),
    }
    found = {
        f"{mode} {name}": {"mode": mode, "term": term}
        for mode in ("remove", "keep", "mean")
        for name, term in terms.items()
    }
    found["remove content, two heads"] = {
        "mode": "remove",
        "term": "content",
        "heads": lambda w: w.heads,
    }
    return found


EDIT: dict[str, Any] = {
    "answers": edited,
    "order": {"*": 0},
    "later": {"*": 1},
    "half": ("log probabilities",),
}
"""What all edits have in common."""

EDITS = (
    Subject(
        name="edit of a term",
        covers=("interventions.term",),
        call=_term,
        reference=reference.term_edit,
        variants=_terms_of_edits(),
        **EDIT,
        real=("remove content",),
    ),
    Subject(
        name="edit of planes",
        covers=("interventions.planes",),
        call=_planes,
        reference=reference.planes_edit,
        variants={
            "remove": {"mode": "remove", "planes": [0]},
            "keep": {"mode": "keep", "planes": [0, 1]},
            "swap": {"mode": "swap", "planes": [1]},
            "remove a band": {"mode": "remove", "planes": "near"},
            "remove random ones": {"mode": "remove", "planes": [0], "draw": 3},
        },
        only={"*": rotary},
        **EDIT,
        without={"order:swap/*": ORDERED},
        real=("remove",),
    ),
    Subject(
        name="edit of an edge",
        covers=("interventions.edge",),
        call=_edge,
        reference=reference.edge_edit,
        variants={
            **{
                f"remove {side}": {"mode": "remove", "side": side}
                for side in ("query", "key", "value")
            },
            **{
                f"swap {side}": {"mode": "swap", "side": side, "counterfactual": lambda w: w.other}
                for side in ("query", "key", "value")
            },
            "remove MLP": {"mode": "remove", "writer": "mlp0", "side": "query"},
            "remove embedding": {"mode": "remove", "writer": "embed", "head": "L0H1"},
            "swap by another prompt": {"mode": "swap", "seed": 2},
        },
        **EDIT,
        without={"order:swap by another prompt/*": ORDERED},
        real=("remove key",),
    ),
    Subject(
        name="edit of heads",
        covers=("interventions.heads",),
        call=_heads,
        reference=reference.heads_edit,
        variants={
            "mean": {"by": "mean", "reference": True},
            "zero": {"by": "zero"},
            "two heads": {"by": "mean", "reference": True, "heads": lambda w: w.heads},
            "another prompt": {"by": "prompt"},
        },
        **EDIT,
        gauge={"zero/*": ZERO},
        without={"order:another prompt/*": ORDERED},
        real=("mean",),
    ),
    Subject(
        name="edit by a surrogate",
        covers=("interventions.surrogate",),
        call=_surrogate,
        variants={
            "low rank and diagonal": {"part": "structured", "rank": 4},
            "low rank": {"part": "low_rank", "rank": 4},
            "diagonal": {"part": "diagonal"},
            "random directions": {"part": "structured", "rank": 4, "random": True},
        },
        only={
            "low rank and diagonal": lambda w: not w.rotary,
            "diagonal": lambda w: not w.rotary,
            "random directions": lambda w: not w.rotary,
        },
        **EDIT,
    ),
)


def conditions(e: Any) -> Answers:
    """Metric and paired change of each condition, the clean run first."""
    found: Answers = {
        "conditions": ["clean", *e.edits],
        "loss": torch.cat([e.clean[None], e.edited]),
    }
    for name in e.edits[:3]:
        found |= interval(f"change of loss, {name}", e.change(name))
    return found


def necessity(e: Any) -> Answers:
    """A term removed and kept alone, swapped, shrunk, and every other term removed."""
    found = conditions(e)
    found["p of changes"] = torch.tensor([e.p(name) for name in e.edits[:3]])
    return found | {"necessity, loss": e.change("remove").value}


def _necessity(w: World, *, term: Any = "content", **options: Any) -> Any:
    edit = partial(live.term, w.model, w.basis, heads=w.head)
    edits = {
        "bias terms only": edit([], how="keep"),
        "keep": edit(term, how="keep"),
        "remove": edit(term),
        "shrink": edit(term, how="shrink"),
    }
    others = {f"remove {name}": edit(name) for name in OTHER_TERMS[term]}
    alibi = {"remove alibi-alibi": edit("alibi-alibi")} if w.kind == "bloom" else {}
    more = {} if term == "position" else alibi
    return live.effects(w.model, w.prompts, {**edits, **others, **more}, **options)


SIDES = ("bias", "pos", "cvec")
CONTENT_TERMS = ("bias-cvec", "pos-cvec", "cvec-bias", "cvec-pos", "cvec-cvec")
OTHER_TERMS = {
    "content": [f"{a}-{b}" for a in SIDES for b in SIDES if (a, b) != ("cvec", "cvec")],
    "position": list(CONTENT_TERMS),
}


def _edge_effects(w: World, *, side: str = "key", **options: Any) -> Any:
    edit = partial(live.edge, w.model, w.prompts, "L0H0", w.heads[1], side=side)
    edits = {how: edit(how=how) for how in ("remove", "swap", "keep")}
    return live.effects(w.model, w.prompts, edits, **options)


def beside_controls(e: Any) -> Answers:
    """Effects on a metric, one for each prompt, beside random sets of as many heads."""
    effects, shape, names = e.changes, (), list(e.edits)
    found: Answers = {"metric, clean": e.clean}
    if not names[0].startswith("L") and "+" not in names[0]:
        effects, shape = effects[None], (1,)  # [sender receiver prompt]
    found["effect by prompt"] = effects
    each = [e.change(name) for name in names]
    found |= interval("effect", _stacked(each, shape))
    if e.controls:
        draws = [(e.controls[n, "random heads"] - e.clean).mean(1) for n in names]
        found["effect of random sets"] = torch.stack(draws).reshape(*shape, len(names), -1)
        beyond = [e.excess(n, "random heads") for n in names]
        found |= interval("effect beyond random sets", _stacked(beyond, shape))
    return found


def _stacked(each: list[Any], shape: tuple[int, ...]) -> Any:
    columns = [torch.stack(values).reshape(*shape, -1) for values in zip(*each)]
    return type(each[0])(*columns)


def knockouts(e: Any) -> Answers:
    """Knockouts of heads, or of sets of them."""
    return beside_controls(e) | {"sets of heads": list(e.edits)}


def paths(e: Any) -> Answers:
    return beside_controls(e) | {"sets of heads": ["L0H1"]}


def _measured(w: World, edits: Any, metric: str = "difference", **options: Any) -> Any:
    right, wrong = zip(*w.answers)
    if metric == "difference":
        options |= {"answer": right, "other": wrong}
    return live.effects(w.model, w.prompts, edits, metric=metric, **options)


def _knockouts(w: World, *, controls: int = 2, together: bool = False, **options: Any) -> Any:
    more = {k: options.pop(k) for k in ("by", "reference") if k in options}
    edits = live.each(w.model, w.heads, **more)
    if together:
        edits = {"+".join(labels(w.heads)): live.heads(w.model, w.heads, **more)}
    return _measured(w, edits, control="heads", draws=controls, **options)


def _paths(w: World, *, controls: int = 0, receivers: Any = None, **options: Any) -> Any:
    more = {k: options.pop(k) for k in ("by", "counterfactual") if k in options}
    if "counterfactual" in more:
        more |= {"reference": w.prompts}
    readers = receivers or ["mlp1", "output"]
    edits = {"to " + name: live.path(w.model, "L0H1", name, **more) for name in readers}
    beside = {"control": "heads", "draws": controls} if controls else {}
    return _measured(w, edits, **beside, **options)


RUNS = {"*": (1e-4, "a difference of two runs of the model, smaller than either")}
NEAR_ZERO = "a difference of mean losses that is near zero"
SMALL = {"necessity, *": (2e-3, NEAR_ZERO), "p of *": (2e-3, "some of 10,000 flips nearly tie")}

EFFECTS = (
    Subject(
        name="effects of a term",
        covers=("effects",),
        call=_necessity,
        answers=necessity,
        variants={"content": {}, "position": {"term": "position"}},
        order={"loss": 1},
        without={"order:*p of changes": "prompts get their sign flips in their order"},
        gauge={"necessity, *": NEAR_ZERO, "p of changes": "sign flips tie but for rounding"},
        tolerance=SMALL | RUNS,
    ),
    Subject(
        name="effects of an edge",
        covers=("effects",),
        call=_edge_effects,
        answers=conditions,
        variants={"key": {}, "value": {"side": "value"}, "query": {"side": "query"}},
        tolerance=RUNS,
        gauge={"value/*": "processing moves the biases of values behind the heads"},
        order={"loss": 1},
        without={"order:*": "of the swap, " + ORDERED},
    ),
    Subject(
        name="effects of knockouts",
        covers=("effects", "interventions.each"),
        call=_knockouts,
        reference=reference.knockouts,
        answers=knockouts,
        variants={
            "difference": {},
            "loss": {"metric": "loss"},
            "zero": {"by": "zero"},
            "reference": {"reference": lambda w: w.prompts_other},
            "one set": {"together": True},
        },
        order={"effect by prompt": 1, "metric, clean": 0},
        tolerance={"effect of random sets": (2e-3, NEAR_ZERO), **RUNS},
        seeds=("effect of random sets", "effect beyond random sets*"),
        gauge={"zero/*": ZERO},
        real=("difference",),
    ),
    Subject(
        name="effects of paths",
        covers=("effects", "interventions.path"),
        call=_paths,
        reference=reference.paths,
        answers=paths,
        variants={
            "frozen between": {},
            "query and value": {"receivers": lambda w: _inputs(w)},
            "counterfactual": {"by": "counterfactual", "counterfactual": lambda w: w.prompts_other},
            "beside random senders": {"controls": 2},
        },
        order={"effect by prompt": -1, "metric, clean": 0},
        tolerance=RUNS,
        real=("frozen between",),
    ),
)
SUBJECTS = (*EDITS, *EFFECTS)


def _inputs(w: World) -> list[str]:
    """A query, a key and a value of block 1, as the layout of edges names them."""
    groups = tlg.view(w.model).key_heads(1)
    each = tlg.view(w.model).n_heads // groups
    second = "L1H1" if each == 1 else f"L1H0-{each - 1}"
    return ["L1H1<q>", f"{second}<k>", f"{second}<v>"]
