"""Rows of ``interventions``: edits of a live model by the logits that they leave, and measurements
under edits beside controls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.subjects import reference_runs as reference
from tests.lib.subjects.row import Answers, Subject, given, interval, labels, rotary
from tests.lib.worlds import QUIET, World
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
            return run(w.ids, fwd_hooks=edit.hooks(), return_type="logits").clone()
        with edit:
            return w.model(w.ids, return_type="logits").clone()


def _term(w: World, *, mode: str, term: Any, heads: Any = None, how: str = "with") -> Tensor:
    make = {"remove": live.remove_term, "keep": live.keep_term, "mean": live.mean_term}[mode]
    return inside(w, make(w.model, w.basis, term, heads or w.head), how)


def _planes(w: World, *, mode: str, planes: Any, how: str = "with", **options: Any) -> Tensor:
    modes = {"remove": live.remove_planes, "keep": live.keep_planes, "swap": live.swap_planes}
    return inside(w, modes[mode](w.model, planes, w.heads, **options), how)


def _edge(w: World, *, mode: str, how: str = "with", **options: Any) -> Tensor:
    make = live.remove_edge if mode == "remove" else live.swap_edge
    writer, head = options.pop("writer", "L0H0"), options.pop("head", w.heads[1])
    return inside(w, make(w.model, w.ids, writer, head, **options), how)


def _heads(w: World, *, how: str = "with", reference: bool = False, **options: Any) -> Tensor:
    heads = options.pop("heads", w.heads[0])
    options |= {"reference": w.other} if reference else {}
    return inside(w, live.remove_heads(w.model, heads, **options), how)


def _surrogate(w: World, *, part: str, how: str = "with", **options: Any) -> Tensor:
    return inside(w, live.surrogate(w.model, w.basis, w.head, part, **options), how)


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
            "remove random ones": {"mode": "remove", "planes": [0], "control": 3},
        },
        only={"*": rotary},
        drawn=("remove random ones/*", "swap/*"),
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
                f"swap {side}": {"mode": "swap", "side": side, "other": lambda w: w.other}
                for side in ("query", "key", "value")
            },
            "remove MLP": {"mode": "remove", "writer": "mlp0", "side": "query"},
            "remove embedding": {"mode": "remove", "writer": "embed", "head": "L0H1"},
            "swap by another prompt": {"mode": "swap", "seed": 2},
        },
        drawn=("swap by another prompt/*",),
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
        drawn=("another prompt/*",),
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
            "random directions": {"part": "random", "rank": 4},
        },
        only={
            "low rank and diagonal": lambda w: not w.rotary,
            "diagonal": lambda w: not w.rotary,
        },
        drawn=("random directions/*",),
        **EDIT,
    ),
)


# ---- measurements


def conditions(e: Any) -> Answers:
    """Loss, induction loss and divergence of each condition, and paired changes."""
    found: Answers = {
        "conditions": list(e.conditions),
        "loss": e.losses,
        "induction loss": e.induction_losses,
        "KL from the clean run": e.kls,
    }
    for condition in e.conditions[1:4]:
        found |= interval(f"change of loss, {condition}", e.change(condition))
    found["p of changes"] = torch.tensor([e.p_value(c) for c in e.conditions[1:4]])
    return found


def necessity(e: Any) -> Answers:
    """A term removed and kept alone, beside controls."""
    found = conditions(e) | {"heads": labels(e.heads), "terms": list(e.term)}
    found |= {f"necessity, {k}": v for k, v in e.necessity.items()}
    found |= {f"sufficiency, {k}": v for k, v in e.sufficiency.items()}
    found["cosine of a term and that of another prompt"] = e.swap_cosine
    found["share that shrinking takes"] = e.shrunk
    return found


def edge_necessity(e: Any) -> Answers:
    """An edge removed, swapped and kept alone, beside other writers."""
    found: Answers = {"conditions": list(e.conditions), "loss": e.losses, "cs of writers": e.share}
    for condition in e.conditions[1:4]:
        found |= interval(f"change of loss, {condition}", e.change(condition))
    return found


def beside_controls(e: Any) -> Answers:
    """Effects on a metric, one for each prompt, beside random sets of as many heads."""
    found: Answers = {
        "sets of heads": ["+".join(labels(heads)) for heads in e.sets],
        "metric, clean": e.clean,
        "effect by prompt": e.effects,
    }
    found |= interval("effect", e.effect)
    if e.control is not None:
        found |= {"effect of random sets": e.control_draws}
        found |= interval("effect beyond random sets", e.excess)
    return found


def knockouts(e: Any) -> Answers:
    """Knockouts of heads, beside what three attributions say."""
    found = beside_controls(e)
    for name in ("direct", "value_paths", "all_paths"):
        if getattr(e, name) is not None:
            found[f"attribution, {name.replace('_', ' ')}"] = getattr(e, name)
    return found


def surrogates(e: Any) -> Answers:
    """Loss, and how far patterns move, with each part of W_QK in its place."""
    return {
        "heads": labels(e.heads),
        "parts": list(e.parts),
        "loss, clean": e.clean_loss,
        "loss": e.loss,
        "total variation of patterns": e.moved,
    }


def _knockouts(w: World, **options: Any) -> Any:
    options = {"targets": w.answers, "heads": w.heads, "controls": 2, **QUIET} | options
    return live.head_knockouts(w.model, w.prompts, options.pop("metric", "difference"), **options)


def _paths(w: World, **options: Any) -> Any:
    options = {"targets": w.answers, "controls": 0, **QUIET} | options
    readers = options.pop("receivers", ["mlp1", "output"])
    return live.head_paths(w.model, w.prompts, options.pop("senders", "L0H1"), readers, **options)


RUNS = {"*": (1e-4, "a difference of two runs of the model, smaller than either")}
NEAR_ZERO = "a difference of mean losses that is near zero"
SMALL = {"necessity, *": (2e-3, NEAR_ZERO), "sufficiency, *": (2e-3, NEAR_ZERO), **RUNS}
BY_PROMPT = {"loss": 1, "KL from the clean run": 1, "effect by prompt": -1, "metric, clean": 0}

EFFECTS = (
    Subject(
        name="effects of a term",
        covers=("effects",),
        call=lambda w, **o: live.necessity_sufficiency(
            w.model, w.prompts, w.basis, w.head, **given(o, term="content", draws=2, **QUIET)
        ),
        answers=necessity,
        variants={"content": {}, "position": {"term": "position"}},
        order=BY_PROMPT,
        seeds=("*",),
        drawn=("induction loss", "*swap*", "loss", "KL*", "cosine*"),
        gauge={"necessity, *": NEAR_ZERO, "sufficiency, *": NEAR_ZERO},
        tolerance=SMALL,
        without={
            "order:*": "of the swap, " + ORDERED,
            "empty:sufficiency, *": "a random model loses nothing by bias terms alone",
        },
    ),
    Subject(
        name="effects of an edge",
        covers=("effects",),
        call=lambda w, **o: live.edge_necessity(
            w.model, w.prompts, "L0H0", w.heads[1], **given(o, controls=2)
        ),
        answers=edge_necessity,
        variants={"key": {}, "value": {"side": "value"}, "query": {"side": "query"}},
        drawn=("loss", "change of loss, swap*"),
        tolerance=RUNS,
        gauge={"value/*": "processing moves the biases of values behind the heads"},
        order={"loss": 1},
        without={"order:*": "of the swap, " + ORDERED},
    ),
    Subject(
        name="effects of knockouts",
        covers=("effects",),
        call=_knockouts,
        reference=reference.knockouts,
        answers=knockouts,
        variants={
            "difference": {"attributions": True},
            "loss": {"metric": "loss", "targets": None},
            "zero": {"by": "zero"},
            "reference": {"reference": lambda w: w.prompts_other},
            "one set": {"heads": lambda w: {"both": w.heads}},
        },
        order={"effect by prompt": 1, "metric, clean": 0, "attribution, *": 1},
        tolerance=RUNS,
        seeds=("effect of random sets", "effect beyond random sets*"),
        drawn=("effect of random sets", "effect beyond random sets*"),
        gauge={"zero/*": ZERO},
        real=("difference",),
    ),
    Subject(
        name="effects of paths",
        covers=("effects", "interventions.path"),
        call=_paths,
        reference=reference.paths,
        answers=beside_controls,
        variants={
            "frozen between": {},
            "live between": {"between": "live", "receivers": "output"},
            "query and value": {"receivers": lambda w: _inputs(w)},
            "counterfactual": {"by": "prompt", "reference": lambda w: w.prompts_other},
            "beside random senders": {"controls": 2},
        },
        order={"effect by prompt": -1, "metric, clean": 0},
        tolerance=RUNS,
        drawn=("effect of random sets", "effect beyond random sets*"),
        real=("frozen between",),
    ),
    Subject(
        name="effects of surrogates",
        covers=("effects",),
        call=lambda w: live.surrogate_effect(w.model, w.prompts, w.basis, layers=[1], rank=4),
        answers=surrogates,
        drawn=("loss", "total variation of patterns"),
    ),
)
SUBJECTS = (*EDITS, *EFFECTS)


def _inputs(w: World) -> list[str]:
    """A query, a key and a value of block 1, as the layout of edges names them."""
    groups = tlg.view(w.model).key_heads(1)
    each = tlg.view(w.model).n_heads // groups
    second = "L1H1" if each == 1 else f"L1H0-{each - 1}"
    return ["L1H1<q>", f"{second}<k>", f"{second}<v>"]
