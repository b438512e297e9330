"""The files of a logit's graph: what other tools read still adds up, and nothing is hidden."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch

from tests.circuits.graph_schema import cumulative, faults, has_a_top
from tests.lib.models import hf_model, tiny, tiny_native, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.graph_edges import fewest_carrying
from tl_geometry.circuits.graph_files import node_id, pairing
from tl_geometry.circuits.logit_graph import LogitGraph
from tl_geometry.circuits.trace import trace_logit
from tl_geometry.models import from_hf

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def graph() -> LogitGraph:
    prompt = tokens(batch=1, length=14, seed=7)
    return trace_logit(tiny("bridge", "llama"), prompt, 5, against=9, position=11)


@pytest.fixture(scope="module")
def file(graph: LogitGraph) -> dict[str, Any]:
    return json.loads(json.dumps(graph.to_json("neuronpedia"), allow_nan=False))


def unbalanced(graph: LogitGraph, file: dict[str, Any]) -> list[str]:
    """Nodes whose links do not sum to what they wrote."""
    incoming: Counter[str] = Counter()
    for link in file["links"]:
        incoming[link["target"]] += link["weight"]
    nodes = {node["node_id"]: node for node in file["nodes"]}
    bound = 1e-5 * float(graph.values.abs().sum())
    return [
        name for name, total in incoming.items() if abs(total - nodes[name]["activation"]) > bound
    ]


def test_links_of_every_node_sum_to_it_in_the_file(graph: LogitGraph, file: dict[str, Any]) -> None:
    assert not unbalanced(graph, file)
    logit = next(node for node in file["nodes"] if node["is_target_logit"])
    assert logit["activation"] == pytest.approx(graph.value)
    without_rest = [x for x in file["links"] if "rest" not in x["source"]]
    assert len(without_rest) < len(file["links"])
    assert unbalanced(graph, file | {"links": without_rest})
    flipped = [x | {"weight": -x["weight"]} for x in file["links"]]
    assert unbalanced(graph, file | {"links": flipped})


def test_the_file_has_what_the_front_ends_read(graph: LogitGraph, file: dict[str, Any]) -> None:
    assert not faults(file)
    assert len(file["metadata"]["prompt_tokens"]) == 14
    ids = [node["node_id"] for node in file["nodes"]]
    assert len(set(ids)) == len(ids)
    assert all(node["jsNodeId"] == node["node_id"] for node in file["nodes"])
    assert all(0 <= node["ctx_idx"] < 14 for node in file["nodes"])
    places = Counter((n["layer"], n["ctx_idx"], n["feature"]) for n in file["nodes"])
    assert max(places.values()) == 1  # nodes that share all three hide each other
    for link in file["links"]:
        assert {link["source"], link["target"]} <= set(ids)
    (logit,) = (node for node in file["nodes"] if node["feature_type"] == "logit")
    assert logit["node_id"] == f"{int(logit['layer'])}_5_11"
    assert [
        node["token_prob"] for node in file["nodes"] if node is not logit and node["token_prob"]
    ] == []
    assert {(node["run_idx"], node["reverse_ctx_idx"]) for node in file["nodes"]} == {(0, 0)}
    layers = {int(n["layer"]) for n in file["nodes"] if n["layer"] != "E"}
    assert int(logit["layer"]) == max(layers) > 1
    token = next(
        n for n in file["nodes"] if n["feature_type"] == "embedding" and "embed" in n["clerp"]
    )
    assert token["node_id"] == f"E_{graph.token_ids[token['ctx_idx']]}_{token['ctx_idx']}"


BROKEN: dict[str, tuple[str, Any]] = {
    "another version": ("metadata.schema_version", 2),
    "a slug with a space": ("metadata.slug", "two words"),
    "a scan with a slash": ("metadata.scan", "org/model"),
    "transcoders": ("metadata.transcoder_list", ["one"]),
    "tokens that are numbers": ("metadata.prompt_tokens.0", 17),
    "no creator": ("metadata.info.creator_name", None),
    "links of one direction": ("qParams.linkType", "input"),
    "a clicked node": ("qParams.clickedId", "0_h1_3"),
    "a place of the subgraph": ("qParams.sg_pos", None),
    "a layer between two": ("nodes.0.layer", "0.5"),
    "a layer that is a number": ("nodes.0.layer", 3),
    "a feature between two": ("nodes.0.feature", 1.5),
    "a position as text": ("nodes.0.ctx_idx", "11"),
    "a logit without its probability": ("nodes.0.clerp", "Output"),
    "an unknown type": ("nodes.0.feature_type", "head"),
    "constants as a token": ("nodes.1.feature_type", "embedding"),
    "influence above one": ("nodes.0.influence", 1.5),
    "an underscore too many": ("nodes.0.node_id", "E_pos_embed-46_2"),
    "a weight as text": ("links.0.weight", "0.3"),
    "no sign": ("links.0.signed", False),
}
"""Where a file is changed, and to what."""
FOUND_AT = {"constants as a token": "nodes.1.clerp"}
"""Where the schema finds a fault, if not there."""


def changed(file: Any, path: str, change: Callable[[dict[Any, Any], Any], Any]) -> dict[str, Any]:
    """A copy of a file, changed at one place."""
    file = copy.deepcopy(file)
    *parents, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    at: Any = file
    for step in parents:
        at = at[step]
    change(at, last)
    return file


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name: str, file: dict[str, Any]) -> None:
    path, value = BROKEN[name]
    broken = changed(file, path, lambda at, last: at.__setitem__(last, value))
    assert faults(broken) == [re.sub(r"\.(\d+)", r"[\1]", f"$.{FOUND_AT.get(name, path)}")]


def test_a_file_that_lacks_a_field_is_refused(file: dict[str, Any]) -> None:
    head = next(i for i, node in enumerate(file["nodes"]) if "qk_tracing_results" in node)
    records = ("metadata", "qParams", "nodes.0", "links.0", f"nodes.{head}.qk_tracing_results")
    fields = 0
    for path in records:
        at: Any = file
        for step in path.split("."):
            at = at[int(step) if step.isdigit() else step]
        for field in at:
            if field != "moved":  # the library's own
                assert faults(changed(file, f"{path}.{field}", lambda at, last: at.pop(last))), (
                    field
                )
                fields += 1
    assert fields == 10 + 5 + 13 + 4 + 3


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_files_of_models_with_more_leaves_or_constants(architecture: str) -> None:
    graph = trace_logit(tiny("bridge", architecture), tokens(batch=1, length=14, seed=7), 5)
    assert not faults(graph.to_json())


def test_influence_is_cumulative(graph: LogitGraph, file: dict[str, Any]) -> None:
    nodes = [node for node in file["nodes"] if "rest" not in node["node_id"]]
    assert cumulative(nodes)
    ordered = sorted(nodes, key=lambda node: -abs(node["activation"]))
    influence = [node["influence"] for node in ordered]
    assert influence == sorted(influence)
    assert influence[-1] == pytest.approx(1)
    size = sum(abs(node["activation"]) for node in nodes)
    shares = [node | {"influence": abs(node["activation"]) / size} for node in nodes]
    assert not cumulative(shares)
    # pages keep the nodes up to a threshold; one more node reaches it
    fewest = fewest_carrying(graph.values, 0.5).nonzero()[:, 0].tolist()
    below = {node["node_id"] for node in nodes if node["influence"] < 0.5}
    assert below < {node_id(graph, i) for i in fewest}
    assert len(below) == len(fewest) - 1


def test_a_model_of_one_layer_has_a_largest_layer_above_0() -> None:
    model = from_hf(hf_model("gpt2", n_layer=1), None, name="one-layer")
    graph = trace_logit(model, tokens(batch=1, length=14, seed=7), 5, position=11)
    file = graph.to_json()
    assert not faults(file)
    assert not unbalanced(graph, file)
    assert {node["layer"] for node in file["nodes"]} == {"E", "0", "1", "2"}  # 1: the logit's rest
    assert next(node["node_id"] for node in file["nodes"] if node["is_target_logit"]) == "2_5_11"
    assert has_a_top(file)
    low = [n | {"layer": "E" if n["layer"] == "E" else "0"} for n in file["nodes"]]
    assert not has_a_top(file | {"nodes": low})


@pytest.mark.parametrize("length", [1, 6])
def test_a_graph_of_one_position_has_a_column_before_it(length: int) -> None:
    """Front ends divide by the widths of all columns but the first."""
    prompt = tokens(batch=1, length=length, seed=7)
    file = trace_logit(tiny("bridge", "llama"), prompt, 5, position=0).to_json()
    assert {node["ctx_idx"] for node in file["nodes"]} == {1}
    names = file["metadata"]["prompt_tokens"]
    assert len(names) == 1 + length
    assert names[0] == ""
    assert all(names[1:])


def test_pages_show_every_node_of_the_file(file: dict[str, Any]) -> None:
    """Their slider begins at ``node_threshold`` and hides nodes of a larger influence."""
    assert max(node["influence"] for node in file["nodes"]) <= file["metadata"]["node_threshold"]
    assert file["metadata"]["pruning_settings"]["node_threshold"] == 0.8


def test_heads_say_why_they_looked(graph: LogitGraph, file: dict[str, Any]) -> None:
    ids = {node["node_id"] for node in file["nodes"]}
    heads = [node for node in file["nodes"] if "qk_tracing_results" in node]
    assert len(heads) == int((graph.heads_of >= 0).sum()) > 0
    for node in heads:
        results = node["qk_tracing_results"]
        assert set(results) == {
            "pair_wise_contributors",
            "top_q_marginal_contributors",
            "top_k_marginal_contributors",
        }
        for name, weight in results["top_q_marginal_contributors"]:
            assert name in ids
            assert isinstance(weight, float)
    assert any(node["qk_tracing_results"]["top_k_marginal_contributors"] for node in heads)


def test_numbers_of_places_differ() -> None:
    assert len({pairing(a, b) for a in range(40) for b in range(40)}) == 1600


def test_a_graph_comes_back_from_its_file(graph: LogitGraph, tmp_path: Path) -> None:
    loaded = LogitGraph.load(graph.save(tmp_path / "graph"))
    assert loaded.names == graph.names
    assert torch.equal(loaded.weights, graph.weights)
    assert loaded.to_json() == graph.to_json()
    assert loaded.tokens().rows() == graph.tokens().rows()
    assert loaded.provenance == graph.provenance


def test_the_table_begins_with_what_writes_most(graph: LogitGraph) -> None:
    sizes = [abs(float(row[3])) for row in graph.rows()]  # type: ignore[arg-type]
    assert sizes == sorted(sizes, reverse=True)
    moved = [abs(float(row[4])) for row in graph.rows()]  # type: ignore[arg-type]
    assert moved != sorted(moved, reverse=True)


def test_networkx_has_every_number(graph: LogitGraph) -> None:
    found = graph.to_networkx()
    assert found.number_of_nodes() == len(graph.names)
    assert found.number_of_edges() == len(graph.weights)
    assert found.graph["value"] == graph.value
    into = sum(d["weight"] for _, _, d in found.in_edges(0, data=True))
    assert into + found.nodes[0]["rest"] == pytest.approx(graph.value, abs=1e-5)
    node = graph.node("L1H2", 11) if "L1H2" in graph.names else int(graph.targets[-1])
    types = {d["edge_type"] for _, _, d in found.in_edges(node, data=True)}
    assert types <= {"value", "query", "key"}


def test_graphml_comes_back(graph: LogitGraph, tmp_path: Path) -> None:
    written = graph.to_networkx()
    networkx.write_graphml(written, tmp_path / "graph.xml")
    read = networkx.read_graphml(tmp_path / "graph.xml", node_type=int, force_multigraph=True)
    assert dict(read.nodes(data=True)) == dict(written.nodes(data=True))
    edges, again = (sorted(x.edges(data=True), key=repr) for x in (written, read))
    assert len(edges) == len(graph.weights)
    assert [(a, b, x["edge_type"], x["weight"]) for a, b, x in again] == [
        (a, b, x["edge_type"], x["weight"]) for a, b, x in edges
    ]
    assert read.graph["value"] == graph.value
    assert read.graph["model"] == "tiny-llama"


def test_a_model_without_texts_and_with_one_basis_of_names() -> None:
    model = tiny_native("LN", "standard")
    graph = trace_logit(model, tokens(batch=1, length=6), 5)
    file = graph.to_json()
    assert file["metadata"]["prompt_tokens"][0].startswith("<") or graph.str_tokens
    assert not faults(file)
    assert len({node["node_id"] for node in file["nodes"]}) == len(file["nodes"])
    assert not unbalanced(graph, file)
    flipped = replace(graph, weights=-graph.weights)
    assert unbalanced(flipped, flipped.to_json())
    with pytest.raises(GeometryError, match="layout"):
        graph.to_json("mib")
