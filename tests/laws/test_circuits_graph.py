"""The graph of a logit, of one prompt and between two: what sums, and what it must equal. In
float64 throughout, so that a sum that is off by 1e-9 is off."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import pandas as pd
import pytest
import torch

import tl_geometry as tlg
from tests.lib.double import InDouble, exact
from tests.lib.frozen_hf import frozen_run
from tests.lib.kinds import KINDS, OTHERS, PROMPTS, decoder, far
from tests.lib.models import tiny, tokens
from tests.lib.reference import contrast as reference
from tl_geometry.circuits import LogitGraph, mean_graph

MORE = ("neox", "qwen3", "olmo2", "olmo2-grouped", "falcon-alibi", "gptj", "mistral", "opt", "phi")
"""Parallel blocks, QK-norm over a head and over all heads, norms behind blocks, ALiBi, adjacent
pairs, sliding window, ReLU, biases of projections."""
EVERY = (*KINDS, *MORE)
BOTH = [(kind, 1.0) for kind in EVERY] + [(kind, 0.5) for kind in KINDS]
"""Kinds and the share that their graphs keep."""
UNBIASED = ("llama", "gemma2", "qwen3", "olmo2", "mistral")
"""Models without any bias."""
AT = 7
WITHIN = 1e-9
"""Of sums, as a share of all that is added up."""
ANSWER, OTHER = 5, 9


@cache
def one(kind: str, keep: float = 1.0, mlp: str = "frozen") -> LogitGraph:
    """The graph of one prompt."""
    with InDouble():
        return tlg.trace_logit(
            exact(kind), PROMPTS[:1], ANSWER, other=OTHER, position=AT, keep=keep, mlp=mlp
        )


@cache
def two(kind: str, keep: float = 1.0, mlp: str = "frozen", turned: bool = False) -> LogitGraph:
    """The graph between two prompts; ``turned``: from the second to the first."""
    clean, counterfactual = (OTHERS, PROMPTS) if turned else (PROMPTS, OTHERS)
    options: dict[str, Any] = {"other": OTHER, "keep": keep, "mlp": mlp}
    with InDouble():
        return tlg.trace_logit(
            exact(kind), clean[:1], ANSWER, counterfactual=counterfactual[:1], **options
        )


def size(graph: LogitGraph) -> float:
    """What rounding grows with."""
    parts = (graph.leaf_values, graph.head_values, graph.mlp_values)
    return sum(float(x.abs().sum()) for x in parts) + abs(graph.constant)


def summed(graph: LogitGraph, by: str, types: tuple[str, ...]) -> Any:
    """Edges of some types summed by their source or target."""
    edges: Any = graph.edges[graph.edges["type"].isin(types)]
    return edges.groupby(by)["value"].sum()


def values(graph: LogitGraph) -> Any:
    """The value of each node by name."""
    nodes: Any = graph.nodes[graph.nodes["kind"] != "rest"]
    return nodes.set_index("node")["value"]


def total(table: Any) -> float:
    """The sum of a table's values."""
    return float(table.df["value"].sum())


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("follow", [False, True])
def test_leaves_are_gradients_of_hugging_faces_frozen_code(kind: str, follow: bool) -> None:
    theirs = frozen_run(kind, PROMPTS[:1], follow=follow)
    target = theirs.logits[0, AT, ANSWER] - theirs.logits[0, AT, OTHER]
    target.backward()
    graph = one(kind)
    assert graph.value == pytest.approx(float(target.detach()), abs=WITHIN * size(graph))
    first = theirs.stream[0]
    assert first.grad is not None
    wanted = (first.detach() * first.grad).sum(-1)[0]
    leaves = graph.leaf_values + (graph.leaf_moved if follow else 0.0)
    assert float((leaves.sum(0) - wanted).abs().max()) < WITHIN * size(graph)
    if kind in UNBIASED and "grouped" not in kind:
        for layer, mixed in enumerate(theirs.mixed):
            grad = torch.zeros_like(mixed) if mixed.grad is None else mixed.grad
            heads = (mixed.detach() * grad)[0].unflatten(-1, (4, -1)).sum(-1).mT
            ours = graph.head_values[layer] + (graph.head_moved[layer] if follow else 0.0)
            assert float((ours - heads).abs().max()) < WITHIN * size(graph)


@pytest.mark.parametrize(("kind", "keep"), BOTH)
def test_tokens_sum_to_the_logit_and_edges_to_their_node(kind: str, keep: float) -> None:
    graph = one(kind, keep)
    within = WITHIN * size(graph)
    assert total(graph.tokens()) == pytest.approx(graph.value, abs=within)
    assert total(graph.direct()) == pytest.approx(graph.value, abs=within)
    names, rows = list(graph.leaf_names), graph.tokens().df[:-1]  # without the constants
    if len(names) > 1:  # a single part is the value itself
        assert float((rows[names].sum(axis=1) - rows["value"]).abs().max()) < within
    nodes, into = values(graph), summed(graph, "target", ("value",))
    assert sum(graph.into("target")["value"]) == pytest.approx(into["target"], abs=within)
    assert len(into) > (20 if keep == 1 else 2)
    assert float((into - nodes[into.index]).abs().max()) < within
    assert nodes["target"] == pytest.approx(graph.value, abs=within)
    out = summed(graph, "source", ("value",)).drop("constants", errors="ignore")
    rest = graph.nodes[graph.nodes["kind"] == "rest"].set_index("node")["value"]
    assert float((rest - out.reindex(rest.index, fill_value=0.0)).abs().sum()) < within
    assert (len(rest) == 0) == (keep == 1)
    if keep == 1:
        assert float((out - nodes[out.index]).abs().max()) < within
        sides = (summed(graph, "target", (side,)) for side in ("query", "key"))
        query, key = (side[[name for name in side.index if name != "target"]] for side in sides)
        assert float((query - key).abs().max()) < within * 10  # both are sum_j c_ij S_ij
        assert float(query.abs().max()) > 1e3 * within
    assert not graph.head_moved[-1].any()  # no pattern is behind the last block
    assert float(graph.head_moved[0].abs().max()) > 1e6 * within


@pytest.mark.parametrize(("kind", "keep"), BOTH)
def test_between_two_prompts_everything_is_one_sum(kind: str, keep: float) -> None:
    graph = two(kind, keep)
    within = WITHIN * size(graph)
    rows = torch.cat([PROMPTS[:1], OTHERS[:1]])
    with InDouble(), torch.no_grad():  # before the cap of Gemma 2
        known = decoder(kind).run(rows)["raw_logits", 0] if kind in KINDS else exact(kind)(rows)
    here, there = (row[ANSWER] - row[OTHER] for row in known[:, -1])
    change = float(here - there)
    assert graph.value == pytest.approx(change, abs=within)
    assert abs(change) > 1e4 * within
    assert total(graph.tokens()) == pytest.approx(graph.value, abs=within)  # (a)
    assert total(graph.direct()) == pytest.approx(graph.value, abs=within)
    types = ("value", "query", "key")
    nodes, into = values(graph), summed(graph, "target", types)
    assert float((into - nodes[into.index]).abs().max()) < within  # (b)
    if keep == 1:
        out = summed(graph, "source", types)
        assert float((out - nodes[out.index]).abs().max()) < within  # (c)
        for side in ("query", "key"):
            assert float(summed(graph, "target", (side,)).abs().max()) > 1e4 * within
    same = PROMPTS[0] == OTHERS[0]
    assert not graph.leaf_values[:, same].any()  # (e)
    assert bool(graph.leaf_values[:, ~same].abs().max() > 0)
    assert graph.constant == 0
    assert graph.head_moved.isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_references_graph(kind: str) -> None:
    found = two(kind)
    ids = [torch.tensor([token]) for token in (ANSWER, OTHER)]
    right = reference.contrast(decoder(kind), PROMPTS[:1], OTHERS[:1], *ids)
    edges: Any = found.edges.assign(writer=found.edges["source"].str.split("@").str[0])
    edges = edges.groupby(["target", "type", "writer"])["value"].sum()
    compared = 0
    for layer, head in ((0, 1), (1, 2)):
        wanted = right.into_head(layer, head)
        for at, side in itertools.product((4, 9), ("value", "query", "key")):
            for name, weights in zip(wanted.names, getattr(wanted, side)[at]):
                ours = edges.get((f"L{layer}H{head}@{at}", side, name), 0.0)
                assert ours == pytest.approx(float(weights.sum()), abs=WITHIN * size(found))
                compared += abs(ours) > 1e-3 * size(found)
    assert compared > 3


@pytest.mark.parametrize("kind", KINDS)
def test_turned_around_every_sign_turns(kind: str) -> None:
    here, there = two(kind), two(kind, turned=True)  # (d)
    for name in ("leaf_values", "head_values", "mlp_values", "direct_heads"):
        assert far(getattr(here, name), -getattr(there, name)) < WITHIN
    pair: list[Any] = [
        g.edges.groupby(["source", "target", "type"])["value"].sum() for g in (here, there)
    ]
    assert float((pair[0] + pair[1]).abs().max()) < WITHIN * size(here)


@pytest.mark.parametrize("traced", [one, two])
def test_runs_that_do_not_fit_are_made_again(traced: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = traced("gemma2")
    monkeypatch.setattr("tl_geometry.circuits.walk.KEPT_BYTES", 0)
    again = traced.__wrapped__("gemma2")
    pd.testing.assert_frame_equal(again.edges, kept.edges, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
def test_equal_prompts_differ_in_nothing(kind: str) -> None:
    with InDouble():  # (f)
        graph = tlg.trace_logit(
            exact(kind), PROMPTS[:1], ANSWER, counterfactual=PROMPTS[:1], keep=1.0
        )
    # two equal rows of one product differ by rounding on some processors
    assert abs(graph.value) + size(graph) + float(graph.weights.abs().sum()) < 1e-11


@pytest.mark.parametrize("times", [10.0, 200.0])
def test_rows_that_move_far_close_with_more_nodes(times: float) -> None:
    """Scores that move by hundreds, and by thousands, where no number of nodes closes."""
    from tests.lib.double import double_hf
    from tests.lib.models import bridge_of

    with InDouble():
        hf = double_hf("llama")
        for block in hf.model.layers:
            block.self_attn.q_proj.weight.data *= times
        model = bridge_of(hf, name=f"sharp-{times:.0f}")
        options: dict[str, Any] = {"counterfactual": OTHERS[:1], "keep": 1.0}
        graph = tlg.trace_logit(model, PROMPTS[:1], ANSWER, **options)
    assert total(graph.tokens()) == pytest.approx(graph.value, abs=WITHIN * size(graph))
    assert graph.head_values.abs().sum() > 0.1


def test_a_graph_is_kept_in_a_file_and_in_json(tmp_path: Any) -> None:
    for graph in (one("gpt2", 0.5), two("gpt2", 0.5)):
        again = LogitGraph.load(graph.save(tmp_path / "graph.safetensors"))
        pd.testing.assert_frame_equal(again.edges, graph.edges)
        pd.testing.assert_frame_equal(again.nodes, graph.nodes)
        file = graph.to_json()
        ids = [node["node_id"] for node in file["nodes"]]
        assert len(set(ids)) == len(ids)
        places = [(n["layer"], n["ctx_idx"], n["feature"]) for n in file["nodes"]]
        assert len(set(places)) == len(places)
        into: Any = pd.DataFrame(file["links"]).groupby("target")["weight"].sum()
        for node in file["nodes"]:
            if node["node_id"] in into and node["feature_type"] != "logit":
                wanted = pytest.approx(node["activation"], abs=WITHIN * size(graph))
                assert into[node["node_id"]] == wanted
        (target,) = (node for node in file["nodes"] if node["is_target_logit"])
        assert into[target["node_id"]] == pytest.approx(graph.value, abs=WITHIN * size(graph))
        assert "'<5>' - '<9>'" in repr(graph)


def test_means_over_prompts_have_paired_intervals() -> None:
    model, rows = tiny("bridge", "llama"), tokens(12, 6, seed=7)
    graphs = [tlg.trace_logit(model, row[None], ANSWER, keep=1.0) for row in rows]
    table: Any = mean_graph(graphs).df
    node = table[(table["type"] == "node") & (table["target"] == "L0H1@5")].iloc[0]
    each = torch.stack([graph.head_values[0, 1, 5] for graph in graphs]).double()
    assert node["value"] == pytest.approx(float(each.mean()), abs=1e-9)
    reach = 2.201 * float(each.std()) / 12**0.5  # Student's t with 11 degrees of freedom
    assert node["high"] - node["value"] == pytest.approx(reach, rel=1e-3)
    assert node["prompts"] == 12
    whole = table[(table["type"] == "node") & (table["target"] == "target")].iloc[0]
    assert whole["value"] == pytest.approx(sum(graph.value for graph in graphs) / 12)
    few: Any = mean_graph(graphs[:3]).df
    assert few["low"].isna().all()
    # of pruned graphs nodes count whole, and edges have an interval where every graph has them
    pruned = [tlg.trace_logit(model, row[None], ANSWER, keep=0.9) for row in rows]
    shown: Any = mean_graph(pruned).df.merge(table, on=["source", "target", "type"])
    gaps = (shown[["value_x", "low_x"]] - shown[["value_y", "low_y"]].to_numpy()).abs().max(axis=1)
    nodes, known = shown["type"] == "node", shown["prompts_x"] == 12
    assert (shown["low_x"].notna() == known).all()
    assert (gaps[known] < 1e-9).all()
    assert 9 < sum(nodes) == sum(known & nodes) < sum(known) < len(shown) - 99
    with pytest.raises(tlg.GeometryError, match="one length"):
        mean_graph([graphs[0], tlg.trace_logit(model, tokens(1, 7, seed=1), ANSWER, keep=0.5)])
    between = tlg.trace_logit(model, rows[:1], ANSWER, counterfactual=rows[1:2], keep=0.5)
    assert mean_graph([between, between]).df["moved"].isna().tolist().count(False) == 0
    with pytest.raises(tlg.GeometryError, match="one length"):
        mean_graph([graphs[0], between])
