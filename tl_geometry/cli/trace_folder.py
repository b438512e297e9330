"""What does ``tl-geometry trace`` write to its folder? The graph of a logit as a page, as tables,
and in the form of other tools. The command calls :func:`save_graph`.

Nothing heavy is imported at the top, because the command checks the folder before it loads a model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_geometry.base import run_files

if TYPE_CHECKING:
    from tl_geometry.circuits.logit_graph import LogitGraph

OWNER = "trace"
"""The name in ``run.json`` that marks a folder as one of this command."""
PAGE, GRAPH, METADATA = "graph.html", "graph.json", "graph-metadata.json"
"""The page; the graph as Neuronpedia and circuit-tracer's front end read it; and the list of graphs
that circuit-tracer's front end opens first."""
TOKENS, NODES, RESULT = "tokens.csv", "nodes.csv", "graph.safetensors"
"""The logit by input token, the nodes, and the whole result (``LogitGraph.load``)."""
FILES = (PAGE, GRAPH, METADATA, TOKENS, NODES, RESULT)
"""Files that the command writes beside ``run.json``."""


def save_graph(
    graph: LogitGraph, out: Path, *, settings: dict[str, Any], command: Sequence[str], force: bool
) -> dict[str, Any]:
    """Write the files and their record, and return the record."""
    from tl_geometry.render import graph_page
    from tl_geometry.report.analysis import versions
    from tl_geometry.report.folder import write_csv

    file = graph.to_json("neuronpedia")
    # circuit-tracer's server looks for a graph in the file named by its slug
    file["metadata"]["slug"] = Path(GRAPH).stem
    saves: dict[str, Callable[[Path], object]] = {
        PAGE: graph_page(graph).save,
        GRAPH: partial(_put, file),
        METADATA: partial(_put, {"graphs": [file["metadata"]]}),
        TOKENS: partial(write_csv, graph.tokens()),
        NODES: partial(write_csv, graph),
        RESULT: graph.save,
    }
    last = run_files.check_folder(out, OWNER, FILES, force=force)
    files = run_files.OwnFiles(out, last.get("files", {}), force=force)
    record: dict[str, Any] = {
        "written_by": run_files.WRITER,
        "experiment": OWNER,
        "command": list(command),
        "versions": versions(),
        "settings": settings,
        "provenance": dataclasses.asdict(graph.provenance),
        "value": graph.value,
        "nodes": len(graph.names),
        "edges": len(graph.weights),
    }
    # run.json is written again with every file, so that it lists the files of a stopped run
    write = lambda: run_files.write_record(out, {**record, "files": files.hashes})  # noqa: E731
    for name, save in saves.items():
        files.write(name, save, write)
    return record


def _put(value: Any, path: Path) -> None:
    path.write_text(json.dumps(value, allow_nan=False), encoding="utf-8")
