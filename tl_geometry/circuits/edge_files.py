"""How are edges exchanged with other tools? ``edge_scores(...).to_mib`` writes a list of edges with
this module, and :func:`read_mib` reads one.

The format is that of the Mechanistic Interpretability Benchmark (Mueller et al. 2025,
arXiv:2504.13151), JSON::

    {"cfg": {"n_layers", "n_heads", "d_model", "parallel_attn_mlp"},
     "nodes": {"a0.h3": {"in_graph"}},
     "edges": {"input->a0.h0<q>": {"score", "in_graph"}}}

Its nodes are ``input``, heads ``a0.h3``, MLPs ``m0`` and ``logits``. It has a key and a value for
every query head. Where heads share a key, the file holds the one edge to it once for each head,
with an equal part of the score; reading adds the parts up.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from tl_geometry.base.errors import fail, require
from tl_geometry.base.files import as_path, write_bytes
from tl_geometry.circuits.edge_attribution import EdgeScores
from tl_geometry.circuits.edge_layout import EMBED, OUTPUT, PARALLEL, EdgeLayout
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view

MIB_NAMES = {EMBED: "input", OUTPUT: "logits"}
"""What the file calls the ends of the graph."""


def mib_names(name: str) -> list[str]:
    """A writer or reader as the file names it; a group of heads is one name for each head.

    >>> mib_names("L2H4"), mib_names("L2H0-1<k>"), mib_names("mlp3"), mib_names("embed")
    (['a2.h4'], ['a2.h0<k>', 'a2.h1<k>'], ['m3'], ['input'])
    """
    if name in MIB_NAMES:
        return [MIB_NAMES[name]]
    head = re.fullmatch(r"L(\d+)H(\d+)(?:-(\d+))?(<[qkv]>)?", name)
    if head is None:
        return [name.replace("mlp", "m")]
    layer, first, last, which = head.groups()
    return [f"a{layer}.h{h}{which or ''}" for h in range(int(first), int(last or first) + 1)]


def mib_edges(layout: EdgeLayout) -> list[tuple[str, list[str]]]:
    """Of every edge its writer, and the names that the file has for its reader."""
    writers = [mib_names(name)[0] for name in layout.writers]
    readers = [mib_names(name) for name in layout.readers]
    ends = zip(*(end.tolist() for end in layout.ends()), strict=True)
    return [(writers[source], readers[target]) for source, target in ends]


def write_mib(scores: EdgeScores, path: str | Path, fraction: float) -> Path:
    """Write the edge list, with the edges of largest absolute score, ``fraction`` of all, in the
    graph, and the nodes that these touch."""
    kept, layout = scores.kept(fraction), scores.layout
    edges: dict[str, dict[str, Any]] = {}
    touched = set(MIB_NAMES.values())
    for (writer, readers), score, chosen in zip(
        mib_edges(layout), scores.scores.tolist(), kept.tolist(), strict=True
    ):
        for reader in readers:
            edges[f"{writer}->{reader}"] = {"score": score / len(readers), "in_graph": chosen}
        if chosen:
            touched |= {writer, *(reader.split("<")[0] for reader in readers)}
    names = [mib_names(name)[0] for name in (*layout.writers, OUTPUT)]
    cfg = {"n_layers": layout.n_layers, "n_heads": layout.n_heads, "d_model": layout.d_model}
    cfg["parallel_attn_mlp"] = PARALLEL in layout.mlps
    nodes = {name: {"in_graph": name in touched} for name in names}
    path = as_path(path)
    write_bytes(path, json.dumps({"cfg": cfg, "nodes": nodes, "edges": edges}).encode())
    return path


def read_mib(model: ModelLike, path: str | Path) -> EdgeScores:
    """Read an edge list of the Mechanistic Interpretability Benchmark as scores of a model's edges;
    ``.edges()`` are those that the file has in its graph.

    Scores have no errors. Raises ``GeometryError`` for a file of another form, and for one whose
    edges are not the model's.

    >>> import tempfile
    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=2).tokens
    >>> scores = tlg.edge_scores(model, windows[:1], windows[1:], targets=(11, 12))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stored = read_mib(model, scores.to_mib(f"{folder}/edges.json", fraction=0.1))
    >>> stored.edges() == scores.edges(0.1)
    True
    """
    path, view = as_path(path), as_view(model)
    layout = EdgeLayout.of(view)
    try:
        edges = json.loads(path.read_text("utf-8"))["edges"]
        given = {
            name: (float(edge.get("score", 0.0)), bool(edge["in_graph"]))
            for name, edge in edges.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fail(str(path), expected="an edge list in JSON", got=f"{type(error).__name__}: {error}")
    stored = [
        [given.pop(f"{writer}->{reader}", None) for reader in readers]
        for writer, readers in mib_edges(layout)
    ]
    missing = sum(edge is None for of_edge in stored for edge in of_edge)
    got = f"{missing} that it lacks, {len(given)} that the model has not"
    require(not missing and not given, str(path), expected=f"the edges of {view.name}", got=got)
    complete = [[edge for edge in of_edge if edge is not None] for of_edge in stored]
    scores = torch.tensor([sum(x for x, _ in edge) for edge in complete], dtype=torch.float64)
    nodes = torch.zeros(len(layout.writers), dtype=torch.float64)
    nodes.index_add_(0, layout.ends()[0], scores)
    return EdgeScores(
        layout=layout,
        scores=scores,
        errors=torch.full_like(scores, torch.nan),
        node_scores=nodes,
        node_errors=torch.full_like(nodes, torch.nan),
        in_graph=torch.tensor([any(chosen for _, chosen in edge) for edge in complete]),
        prompts=0,
        clean=float("nan"),
        counterfactual=float("nan"),
        method="file",
        provenance=view.provenance(corpus=path.name),
    )
