"""The files of a composition: shares into a side sum to one, and nothing is hidden by what reads
them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import networkx
import pytest

from tests.circuits.graph_schema import cumulative, faults, has_a_top
from tests.tiny import tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.writer_edges import HEAD_SIDES, Composition, composition

PROMPTS = tokens(batch=4, length=12, seed=7)


@pytest.fixture(scope="module")
def found() -> Composition:
    return composition(tiny("bridge", "llama"), PROMPTS, progress=False)


@pytest.fixture(scope="module")
def file(found: Composition) -> dict[str, Any]:
    return json.loads(json.dumps(found.to_json("neuronpedia", n=60), allow_nan=False))


def unbalanced(file: dict[str, Any]) -> list[str]:
    """Nodes with links that do not sum to what the node carries."""
    incoming: Counter[str] = Counter()
    for link in file["links"]:
        incoming[link["target"]] += link["weight"]
    carried = {node["node_id"]: node["activation"] for node in file["nodes"]}
    return [name for name, total in incoming.items() if abs(total - carried[name]) > 1e-9]


def hidden(file: dict[str, Any]) -> list[str]:
    """Nodes that the front ends delete: those whose layer, number and column another one has, and
    those that stand in more than two thirds of the columns."""
    places = Counter((n["layer"], n["feature"], n["ctx_idx"]) for n in file["nodes"])
    most = len(file["metadata"]["prompt_tokens"]) * 2 / 3
    return [
        node["node_id"]
        for node in file["nodes"]
        if (count := places[node["layer"], node["feature"], node["ctx_idx"]]) > 1 or count > most
    ]


def test_shares_into_every_side_sum_to_one_in_the_file(file: dict[str, Any]) -> None:
    assert not unbalanced(file)
    assert {n["activation"] for n in file["nodes"] if n["clerp"].endswith((*HEAD_SIDES,))} >= {1.0}
    without_rest = [x for x in file["links"] if "rest" not in x["source"]]
    assert len(without_rest) == 60
    assert unbalanced(file | {"links": without_rest})
    flipped = [x | {"weight": -x["weight"]} for x in file["links"]]
    assert unbalanced(file | {"links": flipped})


def test_the_file_has_what_the_front_ends_read(file: dict[str, Any]) -> None:
    assert not faults(file)
    ids = [node["node_id"] for node in file["nodes"]]
    assert len(set(ids)) == len(ids)
    assert all(node["jsNodeId"] == node["node_id"] for node in file["nodes"])
    assert all(
        0 <= node["ctx_idx"] < len(file["metadata"]["prompt_tokens"]) for node in file["nodes"]
    )
    for link in file["links"]:
        assert {link["source"], link["target"]} <= set(ids)
    assert has_a_top(file)
    assert cumulative(file["nodes"])
    assert faults(file | {"qParams": file["qParams"] | {"linkType": "input"}})
    assert not cumulative([node | {"influence": 1.0} for node in file["nodes"]])


def test_names_of_writers_have_no_underscores() -> None:
    """A positional embedding is a writer of its own."""
    found = composition(tiny("bridge", "gpt2"), PROMPTS, progress=False)
    file = found.to_json(n=200)
    assert "E_pos-embed_0" in {node["node_id"] for node in file["nodes"]}
    assert not faults(file)


def test_no_node_is_hidden(file: dict[str, Any]) -> None:
    assert not hidden(file)
    assert hidden(file | {"nodes": [n | {"feature": 0} for n in file["nodes"]]})
    one_column = file["metadata"] | {"prompt_tokens": ["writers"]}
    assert hidden(file | {"metadata": one_column})


@pytest.mark.parametrize("writers", ["all", "heads"])
@pytest.mark.parametrize("share", ["cs", "gs"])
def test_every_edge_is_in_every_file(
    found: Composition, writers: str, share: str, tmp_path: Path
) -> None:
    edges = found.edges(share=share, writers=writers, n=40)
    assert all(re.fullmatch(r"L\dH\d", writer) for writer, *_ in edges) == (writers == "heads")
    graph = found.to_networkx(share=share, writers=writers, n=40)
    networkx.write_graphml(graph, tmp_path / "composition.xml")
    read = networkx.read_graphml(tmp_path / "composition.xml", force_multigraph=True)
    for each in (graph, read):
        at = {(a, b, x["edge_type"], x["weight"]) for a, b, x in each.edges(data=True)}
        assert at == set(edges)
        assert each.graph["share"] == share
    assert graph.nodes["L1H0"] == {"layer": 1, "head": 0}
    file = found.to_json(share=share, writers=writers, n=40)
    texts = {node["node_id"]: node["clerp"] for node in file["nodes"]}
    links = {
        (*(texts[link[end]] for end in ("source", "target")), link["weight"])
        for link in file["links"]
        if "rest" not in link["source"]
    }
    assert links == {(f"{a} writes", f"{b} {side}", x) for a, b, side, x in edges}
    assert not unbalanced(file)
    assert not hidden(file)


def test_blocks_as_writers_and_what_no_file_can_show() -> None:
    model = tiny("bridge", "llama")
    blocks = composition(model, PROMPTS, parts="blocks", layers=1, progress=False)
    file = blocks.to_json()
    assert not hidden(file)
    assert any(node["clerp"] == "attn0 writes" for node in file["nodes"])
    with pytest.raises(GeometryError, match="readers behind block 0"):
        blocks.to_json(writers="heads")
    first = composition(model, PROMPTS, layers=0, progress=False)
    with pytest.raises(GeometryError, match="readers behind block 0"):
        first.to_json()
    wrongs: tuple[dict[str, Any], ...] = ({"layout": "mib"}, {"writers": "mlps"}, {"share": "es"})
    for wrong in wrongs:
        with pytest.raises(GeometryError, match=next(iter(wrong))):
            blocks.to_json(**wrong)
