"""The files of a logit's graph: what other tools read still adds up, and nothing is hidden."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny, tiny_native, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.graph_files import pairing
from tl_geometry.circuits.logit_graph import LogitGraph
from tl_geometry.circuits.trace import trace_logit

NODE_FIELDS = {
    "node_id",
    "feature",
    "layer",
    "ctx_idx",
    "feature_type",
    "token_prob",
    "is_target_logit",
    "run_idx",
    "reverse_ctx_idx",
    "jsNodeId",
    "clerp",
    "influence",
    "activation",
}
METADATA = {
    "slug",
    "scan",
    "transcoder_list",
    "prompt_tokens",
    "prompt",
    "node_threshold",
    "schema_version",
    "info",
    "generation_settings",
    "pruning_settings",
}


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
    assert set(file) == {"metadata", "qParams", "nodes", "links"}
    assert set(file["metadata"]) >= METADATA
    for name in ("slug", "scan"):
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", file["metadata"][name])
    assert file["metadata"]["transcoder_list"] == []
    assert len(file["metadata"]["prompt_tokens"]) == 14
    assert set(file["qParams"]) == {"pinnedIds", "supernodes", "linkType", "clickedId", "sg_pos"}
    ids = [node["node_id"] for node in file["nodes"]]
    assert len(set(ids)) == len(ids)
    for node in file["nodes"]:
        assert set(node) >= NODE_FIELDS
        assert node["jsNodeId"] == node["node_id"]
        assert node["feature"] is None or isinstance(node["feature"], int)
        assert re.fullmatch(r"E|\d+", node["layer"])
        assert 0 <= node["ctx_idx"] < 14
        assert 0 <= node["influence"] <= 1 + 1e-9
    places = Counter((n["layer"], n["ctx_idx"], n["feature"]) for n in file["nodes"])
    assert max(places.values()) == 1  # nodes that share all three hide each other
    for link in file["links"]:
        assert {link["source"], link["target"]} <= set(ids)
        assert link["signed"] is True
    (logit,) = (node for node in file["nodes"] if node["feature_type"] == "logit")
    assert re.search(r"\(p=\d\.\d{3}\)", logit["clerp"])
    assert logit["node_id"] == f"{int(logit['layer'])}_5_11"
    layers = {int(n["layer"]) for n in file["nodes"] if n["layer"] != "E"}
    assert int(logit["layer"]) == max(layers) > 1
    token = next(
        n for n in file["nodes"] if n["feature_type"] == "embedding" and "embed" in n["clerp"]
    )
    assert token["node_id"] == f"E_{graph.token_ids[token['ctx_idx']]}_{token['ctx_idx']}"


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


def test_a_model_without_texts_and_with_one_basis_of_names() -> None:
    model = tiny_native("LN", "standard")
    graph = trace_logit(model, tokens(batch=1, length=6), 5)
    file = graph.to_json()
    assert file["metadata"]["prompt_tokens"][0].startswith("<") or graph.str_tokens
    assert len({node["node_id"] for node in file["nodes"]}) == len(file["nodes"])
    assert not unbalanced(graph, file)
    flipped = replace(graph, weights=-graph.weights)
    assert unbalanced(flipped, flipped.to_json())
    with pytest.raises(GeometryError, match="layout"):
        graph.to_json("mib")
