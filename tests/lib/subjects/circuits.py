"""Rows of ``circuits``: the graph of a logit, edges between writers and readers and how much of a
behaviour they carry, composition, and features of a dictionary."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.subjects import reference_runs as reference
from tests.lib.subjects.decomposition import BLOCKS
from tests.lib.subjects.row import Answers, Subject, columns, given, interval, labels
from tests.lib.worlds import QUIET, World
from tl_geometry import circuits

EDGE_TYPES = ("value", "query", "key")
MOVED = "processing moves constants between writers, and what each of them makes heads attend to"
KEPT = "which nodes and edges are kept depends on values that processing changes"
CANCELS = (1e-4, "what moves a sharp softmax is a difference of nearly equal numbers")
FRACTIONS = (0.02, 0.1, 0.5)


def graph(g: Any) -> Answers:
    """The graph of a logit: complete tables of components, and edges by component."""
    found: Answers = {
        "value": g.value,
        "probability": g.probability,
        "heads": g.head_values,
        "MLPs, as leaves" if g.mlp == "leaf" else "MLPs": g.mlp_values,
        "constants": g.constant,
        "moved by heads": g.head_moved,
        "moved by MLPs": g.mlp_moved,
        "moved by constants": g.constant_moved,
        "by token": g.tokens().column("value"),
    }
    found |= columns("leaf", g.leaf_names, g.leaf_values, 0)
    found |= columns("moved by leaf", g.leaf_names, g.leaf_moved, 0)
    return found | _edges_by_component(g)


def _named(g: Any) -> list[str]:
    """The component of each node; T itself is called the logit."""
    return ["logit" if name == "target" else name for name in g.components]


def _edges_by_component(g: Any) -> Answers:
    """Edges summed over positions, ``[target source]``, and the largest of them one by one. A node
    that carries nothing but rounding may be left out or not, and changes neither."""
    components = _named(g)
    names = sorted(set(components))
    rows = torch.tensor([names.index(name) for name in components])
    found: Answers = {"components": names}
    for i, edge_type in enumerate(EDGE_TYPES):
        of = g.edge_types == i
        sums = torch.zeros(len(names), len(names), dtype=torch.float64)
        where = (rows[g.targets[of]], rows[g.sources[of]])
        sums.index_put_(where, g.weights[of].double(), accumulate=True)
        found[f"{edge_type} edges by target and source"] = sums
        found[f"largest {edge_type} edges"] = g.weights[of].abs().sort(descending=True).values[:20]
    return found


def between(g: Any) -> Answers:
    """The graph between two prompts: one sum."""
    found: Answers = {"value": g.value, "heads": g.head_values}
    found |= {"MLPs, as leaves" if g.mlp == "leaf" else "MLPs": g.mlp_values}
    found |= columns("leaf", g.leaf_names, g.leaf_values, 0)
    found |= {"by token": g.tokens().column("value"), "straight to the logit": g.direct_heads}
    return found | _edges_by_component(g)


def pruned(g: Any) -> Answers:
    """Which nodes and edges the graph keeps."""
    names = _named(g)
    node = lambda i: f"{names[i]} at {int(g.positions[i])}"
    ends = zip(g.sources.tolist(), g.targets.tolist(), g.edge_types.tolist(), g.weights.tolist())
    edges = {f"{EDGE_TYPES[t]}: {node(a)} -> {node(b)}": w for a, b, t, w in ends}
    order = sorted(range(len(names)), key=node)
    top = sorted(edges, key=lambda name: -abs(edges[name]))
    heads = [i for i in order if names[i].startswith("L")]
    return {
        "nodes": [node(i) for i in order],
        "values of nodes": g.values[order],
        "moved by nodes": g.moved[order],
        "rest of nodes": g.rest[order],
        "totals of nodes": g.totals[order],
        "attention of nodes that are heads": g.attention[heads],
        "response of nodes that are heads": g.response[heads],
        "edges": sorted(edges),
        "largest edges": top[:10],
        "weights of edges": [edges[name] for name in sorted(edges)],
    }


def mean_graph(g: Any) -> Answers:
    """Means over prompts with intervals, by node or edge."""
    table = g.df.sort_values(["type", "target", "source"])
    keys = zip(table["type"], table["source"], table["target"])
    found: Answers = {"nodes and edges": [" ".join(key) for key in keys]}
    found["value, low, high"] = torch.tensor(table[["value", "low", "high"]].to_numpy())
    sizes = table["value"].abs()  # rounding decides how many prompts have the smallest
    found["prompts"] = table["prompts"].where(sizes > 1e-6 * sizes.max(), 0).to_numpy()
    return found | {"moved": table["moved"].to_numpy()}


def direct(e: Any) -> Answers:
    """Direct effects on a logit: of each head from each source position, and of other writers."""
    found: Answers = {"value": e.value, "heads by source": e.direct_heads}
    names = {"other writers": list(e.direct_names), "values of other writers": e.direct_others}
    return found | names


def edges(e: Any) -> Answers:
    """Scores of edges and of writers, as the record has them: counterfactual minus clean."""
    return {
        "edges": list(e.names()),
        "scores": -e.scores,
        "errors": e.errors,
        "writers": list(e.layout.writers),
        "scores of writers": -e.node_scores,
        "errors of writers": e.node_errors,
        "metric, clean": e.clean,
        "metric, counterfactual": e.counterfactual,
        "edges of largest score": e.edges(0.03),
    }


def faithful(f: Any) -> Answers:
    """How much of a behaviour a circuit carries, beside random circuits."""
    found: Answers = {"share kept": f.fractions, "number kept": f.kept}
    found |= {"metric": f.metrics, "metric, clean": f.clean}
    found |= {"metric, counterfactual": f.counterfactual, "f of random circuits": f.random_f}
    found |= interval("f", f.f)
    if f.chosen:
        return found
    found |= interval("CPR", f.cpr) | interval("CMD", f.cmd)
    return found | {"CPR of random circuits": f.random_cpr}


def composed(c: Any) -> Answers:
    """Who wrote what heads read, on data and by weights alone, with two nulls."""
    return {
        "heads": labels(c.heads),
        "writers": list(c.parts),
        "cs": c.cs,
        "gs": c.gs,
        "bounds of cs": torch.stack([c.cs_low, c.cs_high]),
        "bounds of gs": torch.stack([c.gs_low, c.gs_high]),
        "by weights alone": c.weights,
        "cs by another prompt": c.other_cs,
        "gs by another prompt": c.other_gs,
        "cs of random directions": c.random_cs,
        "gs of random directions": c.random_gs,
        "cosine of a write and that of another prompt": c.cosine,
    }


def featured(f: Any) -> Answers:
    """Shares of features on query and key side."""
    return {
        "heads": labels(f.heads),
        "parts": list(f.parts),
        "features": f.feature_ids,
        "cs by side": f.cs,
        "gs by side": f.gs,
        "share not explained": f.unexplained,
    }


def _prompt(w: World) -> torch.Tensor:
    return w.ids[:1, :8]


def _trace(w: World, **options: Any) -> Any:
    answer, other = w.targets[0]
    if options.pop("counterfactual", None):
        options["counterfactual"] = w.other[:1, :8]
    against = options.pop("other", None)
    return tlg.trace_logit(w.model, _prompt(w), answer, other=other if against else None, **options)


def _mean_of_graphs(w: World) -> Any:
    answers = [answer for answer, _ in w.answers]
    return circuits.mean_graph(
        [
            tlg.trace_logit(w.model, w.prompts[i : i + 1, :6], answers[i], keep=0.6)
            for i in range(len(w.prompts))
        ]
    )


def _pairs(w: World) -> dict[str, Any]:
    return {"counterfactual": w.prompts_other, "answer": w.answers}


def _edge_scores(w: World, **options: Any) -> Any:
    return circuits.edge_scores(w.model, w.prompts, **_pairs(w), **options)


def faithfulness(w: World, *, circuit: Any = None, **options: Any) -> Any:
    ranked = {} if circuit else {"fractions": FRACTIONS}
    options = {"draws": 2, **_pairs(w), **ranked} | options
    return tlg.faithfulness(w.model, w.prompts, circuit or w.edges, **options)


def composition(w: World, **options: Any) -> Any:
    return tlg.composition(w.model, w.fresh, **given(options, heads=w.heads, draws=4, **QUIET))


def _feature_shares(w: World, **options: Any) -> Any:
    return circuits.feature_shares(w.model, w.ids, w.features(), **given(options, heads="L1H0"))


SUBJECTS = (
    Subject(
        name="trace_logit",
        covers=("trace_logit", "LogitGraph"),
        call=_trace,
        answers=graph,
        variants={
            "one target": {"keep": 1.0},
            "against another": {"keep": 1.0, "other": True},
            "MLPs as leaves": {"keep": 1.0, "mlp": "leaf"},
            "basis": {"keep": 1.0, "basis": lambda w: w.basis},
            "inner position": {"keep": 1.0, "position": 4},
        },
        adds={"value": ("leaf.*", "constants", "MLPs, as leaves")},
        tolerance={"*moved*": CANCELS, "query *": CANCELS, "key *": CANCELS},
        faults=("q", "pattern", "z"),
        half=("value",),
        gauge={"*": MOVED},
        without={"order": "its prompt is the first one alone"},
    ),
    Subject(
        name="trace_logit, two prompts",
        covers=("trace_logit", "LogitGraph"),
        call=_trace,
        reference=reference.between,
        answers=between,
        variants={
            "one target": {"keep": 1.0, "counterfactual": True},
            "against another": {"keep": 1.0, "counterfactual": True, "other": True},
            "MLPs as leaves": {"keep": 1.0, "counterfactual": True, "mlp": "leaf"},
        },
        adds={"value": ("leaf.*", "MLPs, as leaves")},
        gauge={"*": MOVED},
        half=("value",),
        without={
            "order": "its prompt is the first one alone",
            "empty:leaf.pos_embed": "both prompts stand at the same positions",
        },
    ),
    Subject(
        name="trace_logit, pruned",
        covers=("trace_logit", "LogitGraph"),
        call=_trace,
        answers=pruned,
        variants={"default": {}, "half": {"keep": 0.5, "other": True}},
        gauge={"*": KEPT},
        without={"order": "its prompt is the first one alone"},
        real=("default",),
    ),
    Subject(name="mean_graph", call=_mean_of_graphs, answers=mean_graph, gauge={"*": KEPT}),
    Subject(
        name="direct effects on a logit",
        covers=("LogitGraph",),
        call=lambda w, at=-1: _trace(w, position=at),
        answers=direct,
        variants={"last position": {}, "inner position": {"at": 4}},
        adds={"value": ("heads by source", "values of other writers")},
        gauge={"*": MOVED},
        without={"order": "its prompt is the first one alone"},
    ),
    Subject(
        name="edge_scores",
        call=_edge_scores,
        reference=reference.edge_scores,
        answers=edges,
        variants={
            "gradient": {"method": "gradient"},
            "integrated": {"method": "integrated", "steps": 3},
            "contrast": {},
        },
        batches=(1, 5),
        real=("gradient",),
    ),
    Subject(
        name="faithfulness",
        call=faithfulness,
        reference=reference.faithfulness,
        answers=faithful,
        variants={"edges": {}, "chosen heads": {"circuit": ["L0H1", "L1H0", "L1H2"]}},
        order={"metric": 1, "metric, *": 0},
        batches=(5,),
        seeds=("* of random circuits",),
    ),
    Subject(
        name="composition",
        call=composition,
        answers=composed,
        variants={"writers": {}, "blocks": {"parts": "blocks"}, "last query": {"queries": -1}},
        seeds=("* of random directions",),
        without={
            **dict.fromkeys(("order:bounds *", "order:* random *"), BLOCKS),
            "order:*another prompt": "another prompt is the next one",
            "empty:blocks/by weights *": "a block has no one matrix",
        },
        gauge={"cosine *": MOVED, "* of random directions": MOVED},
        real=("blocks",),
    ),
    Subject(
        name="feature_shares",
        covers=("feature_shares", "dictionary"),
        call=_feature_shares,
        answers=featured,
        gauge={"share not explained": "its directions are those of states as they are"},
    ),
)
