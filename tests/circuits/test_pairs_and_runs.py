"""Pairs of prompts, pruned runs and composition number by number, without long runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from tests.tiny import tiny, tokens
from tl_geometry.base.errors import BudgetError
from tl_geometry.base.results import Provenance, hash_tokens
from tl_geometry.circuits import Composition, EdgeLayout, Faithfulness, edge_scores, faithfulness
from tl_geometry.circuits.graph_files import pairing
from tl_geometry.circuits.prompt_pairs import Metric, PromptPairs, pairs_per_batch
from tl_geometry.circuits.pruned_runs import FRACTIONS, _mask, _random_sets
from tl_geometry.models import view

CLEAN = [[5, 6, 7], [8, 9], [10, 11, 12], [33, 44]]
OTHER = [[25, 26, 27], [33, 44], [30, 31, 32], [28, 29]]


def pairs() -> PromptPairs:
    """Four pairs of two lengths."""
    return PromptPairs.of(view(tiny("bridge", "gpt2")), CLEAN, OTHER, None)


@pytest.mark.parametrize(
    ("most", "rows"), [(1, [[1], [3], [0], [2]]), (2, [[1, 3], [0, 2]]), (9, [[1, 3], [0, 2]])]
)
def test_pairs_go_through_the_model_by_length(most: int, rows: list[list[int]]) -> None:
    """The shortest first, at most so many at once, each with its own counterfactual."""
    lengths: list[int] = []
    of_length = list(pairs().batches(lambda length: lengths.append(length) or most))
    assert lengths == [2, 3]
    assert pairs().lengths == (2, 3)
    assert len(pairs()) == 4
    batches = [batch for batches in of_length for batch in batches]
    assert [batch.rows.tolist() for batch in batches] == rows
    for batch in batches:
        assert batch.clean.tolist() == [CLEAN[i] for i in batch.rows.tolist()]
        assert batch.counterfactual.tolist() == [OTHER[i] for i in batch.rows.tolist()]


def test_the_source_of_pairs_is_their_tokens_in_order() -> None:
    """Prompts, then counterfactuals; BOS where every prompt begins with it."""
    seen = view(tiny("bridge", "gpt2"))
    about = pairs().provenance(seen, seed=3)
    wanted = ""
    for row in (*CLEAN, *OTHER):
        wanted = hash_tokens(torch.tensor([row]), wanted)
    assert about.token_hash == wanted
    assert (about.corpus, about.contexts, about.seed) == ("pairs of prompts", 4, 3)
    assert about.has_bos is False
    marked = dataclasses.replace(seen, bos_id=3)
    for first, has_bos in ((3, True), (5, False)):
        with_bos = PromptPairs.of(seen, [[3, 6, 7], [first, 9]], [[1, 2, 3], [4, 5]], None)
        assert with_bos.provenance(marked).has_bos is has_bos
        assert with_bos.provenance(seen).has_bos is False


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("length", [7, 20])
def test_a_budget_takes_so_many_pairs(gradients: bool, length: int) -> None:
    """Four vectors for each writer and six for each reader in float32, at every position."""
    seen = view(tiny("bridge", "llama"))
    layout = EdgeLayout.of(seen)
    vectors = 4 * 11 + (6 * 19 if gradients else 0)
    one = vectors * length * 32 * 4
    for budget, rows in ((one, 1), (3 * one - 1, 2), (3 * one, 3)):
        assert pairs_per_batch(seen, layout, None, budget, gradients)(length) == rows
    assert pairs_per_batch(seen, layout, 2, 9 * one, gradients)(length) == 2
    with pytest.raises(BudgetError):
        pairs_per_batch(seen, layout, None, one - 1, gradients)(length)
    wide = view(tiny("bridge", "llama", dtype=torch.float64))
    assert pairs_per_batch(wide, layout, None, 4 * one, gradients)(length) == 2


def test_the_tokens_compared_are_the_likeliest_of_both_runs() -> None:
    """After the prompt and after its counterfactual, pair by pair, at the last position."""
    model, given = tiny("bridge", "gpt2"), pairs()
    measure = Metric.of(view(model), given, None, None)
    assert measure.targets is not None
    for pair in range(4):
        ids = [int(model(torch.tensor([x[pair]]))[0, -1].argmax()) for x in (CLEAN, OTHER)]
        assert measure.targets[pair].tolist() == ids
    assert measure.positions == slice(-1, None)
    logits = torch.randn(2, 3, 61, generator=torch.Generator().manual_seed(0))
    of_pairs = measure(logits, torch.tensor([3, 1]))
    (a, b), (c, d) = measure.targets[[3, 1]].tolist()
    assert torch.equal(of_pairs, logits[[0, 1], -1, [a, c]] - logits[[0, 1], -1, [b, d]])
    own = Metric.of(view(model), given, lambda logits: logits[:, 0, 3], None)
    assert (own.positions, own.targets) == (slice(None), None)
    assert torch.equal(own(logits, torch.tensor([0, 1])), logits[:, 0, 3])


# ---- pruned runs

LAYOUT = EdgeLayout(
    n_layers=2, n_heads=2, d_model=8, n_key_heads=(2, 1), mlps=("sequential", "none")
)


def test_what_a_circuit_keeps_for_each_reader() -> None:
    """Edges as they are; nodes for whoever reads them; heads beside embedding and MLPs."""
    allowed = LAYOUT.allowed
    edges = torch.arange(int(allowed.sum())) % 3 == 0
    assert torch.equal(_mask(LAYOUT, edges, "edges")[allowed], edges)
    assert not bool(_mask(LAYOUT, edges, "edges")[~allowed].any())
    nodes = torch.tensor([False, True, False, True, False, True])
    for reader, row in enumerate(_mask(LAYOUT, nodes, "nodes").tolist()):
        seen = LAYOUT.seen[reader]
        assert row == [*nodes.tolist()[:seen], *[False] * (6 - seen)]
    heads = torch.tensor([False, True, True, False])
    kept = _mask(LAYOUT, heads, "heads")[-1]
    assert LAYOUT.writers == ("embed", "L0H0", "L0H1", "mlp0", "L1H0", "L1H1")
    assert kept.tolist() == [True, False, True, True, True, False]


def test_random_circuits_are_as_large_and_lie_within_each_other() -> None:
    """Sizes of each level; the smaller within the larger; other draws, and other seeds, differ."""
    sets = torch.stack([torch.arange(20) < 3, torch.arange(20) < 11, torch.arange(20) < 20])
    drawn = _random_sets(sets, 4, 0)
    assert drawn.sum(-1).tolist() == [[3, 11, 20]] * 4
    assert bool((drawn[:, 0] <= drawn[:, 1]).all())
    assert len({tuple(row.tolist()) for row in drawn[:, 0]}) == 4
    assert torch.equal(drawn, _random_sets(sets, 4, 0))
    assert not torch.equal(drawn, _random_sets(sets, 4, 1))


def planted(**fields: Any) -> Faithfulness:
    """A chosen set of 3 of 12 heads over 10 pairs."""
    ones = torch.ones(10).double()
    given: dict[str, Any] = {
        "unit": "heads",
        "total": 12,
        "kept": torch.tensor([3]),
        "clean": 5 * ones,
        "counterfactual": ones,
        "metrics": 4 * ones[None],
        "random": torch.stack([2 * ones, 3 * ones])[:, None],
        "complements": 2 * ones[None],
        "random_complements": torch.stack([5 * ones, 0 * ones])[:, None],
        "seed": 0,
        "provenance": Provenance(),
    }
    return Faithfulness(**given | fields)


def test_the_table_of_a_chosen_set_is_that_by_hand() -> None:
    """Shares of the change from counterfactual to clean, with mean and ends of random sets."""
    found = planted()
    frame = found.to_dataframe()
    assert list(frame) == [
        *("fraction", "kept", "f", "f_low", "f_high", "random", "random_low", "random_high"),
        *("complement", "complement_low", "complement_high"),
        *("random_complement", "random_complement_low", "random_complement_high"),
    ]
    assert frame.iloc[0].tolist() == pytest.approx(
        [0.25, 3, 0.75, 0.75, 0.75, 0.375, 0.25, 0.5, 0.25, 0.25, 0.25, 0.375, -0.25, 1.0]
    )
    curve = planted(complements=None, random_complements=None)
    assert list(curve.to_dataframe())[-1] == "random_high"
    # trapezoids through (0, 0), (0.25, 0.75), (1, 1)
    assert float(curve.cpr.value) == pytest.approx(0.25 * 0.375 + 0.75 * 0.875)
    assert float(curve.cmd.value) == pytest.approx(0.25 * 0.625 + 0.75 * 0.125)
    assert curve.random_cpr.tolist() == pytest.approx(
        [0.25 * 0.125 + 0.75 * 0.625, 0.25 * 0.25 + 0.75 * 0.75]
    )


def test_a_ranking_is_run_at_the_shares_of_the_benchmark() -> None:
    """The ten default shares with three random circuits each; all edges kept is the clean run."""
    model, prompts = tiny("bridge", "gpt2"), tokens(2, 3, seed=5)
    given = {"prompts": prompts, "counterfactuals": tokens(2, 3, seed=6), "targets": (5, 9)}
    scores = edge_scores(model, **given, method="gradient")
    found = faithfulness(model, scores, **given)
    shares = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    assert list(FRACTIONS) == shares
    assert found.kept.tolist() == [max(1, round(share * 110)) for share in shares]
    assert found.random.shape == (3, 10, 2)
    assert torch.allclose(found.metrics[-1], found.clean, atol=1e-4)
    assert found.complements is None
    logits = model(prompts).detach()[:, -1]
    assert torch.allclose(found.clean, (logits[:, 5] - logits[:, 9]).double(), atol=1e-4)


# ---- composition


def composed() -> Composition:
    """Composition that was written down: two readers of blocks 0 and 1."""
    parts = ("bias", "embed", "L0H0", "mlp0")
    cs = torch.zeros(2, 3, 4).double()
    cs[0, 0] = torch.tensor([0.25, 0.75, 0, 0])
    cs[1, 0] = torch.tensor([0.125, 0.25, 0.5, 0.125])
    cs[1, 1] = torch.tensor([0.5, -0.75, 1.25, math.nan])
    cs[1, 2] = torch.tensor([0.0, 0.0625, 0.03125, 0.9375])
    names = ("weights", "other_cs", "other_gs", "random_cs", "random_gs")
    bounds = ("cs_low", "cs_high", "gs_low", "gs_high")
    return Composition(
        provenance=Provenance(model="m"),
        heads=((0, 1), (1, 0)),
        parts=parts,
        wrote=(-1, -1, 0, 0),
        writer_heads=(-1, -1, 0, -1),
        cs=cs,
        gs=-cs,
        cosine=torch.tensor([math.nan, 0.5, 0.25, 0.125]),
        drop=1,
        draws=2,
        queries=(4,),
        **{name: cs + i for i, name in enumerate((*names, *bounds), 1)},
    )


def test_the_strongest_edges_of_composition_are_those_by_hand() -> None:
    """By absolute share over all sides or one, without NaN, from all writers or heads alone."""
    table = composed()
    assert table.edges(n=4) == [
        ("L0H0", "L1H0", "key", 1.25),
        ("mlp0", "L1H0", "value", 0.9375),
        ("embed", "L0H1", "query", 0.75),
        ("embed", "L1H0", "key", -0.75),
    ]
    assert table.edges(side="query", writers="heads", share="gs") == [
        ("L0H0", "L1H0", "query", -0.5),
    ]
    assert len(table.edges()) == 3 + 8
    assert (table.place("L1H0"), table.place("mlp0"), table.place("bias")) == (
        *((1, 0), (0, -1), (-1, -1)),
    )
    first = next(row for row in table.rows() if row[:3] == (1, 0, "value"))
    offsets = (0, 6, 7, None, 8, 9, 1, 2, 3, 4, 5)
    wanted = [-0.9375 if more is None else 0.9375 + more for more in offsets]
    assert list(first[3:]) == ["mlp0", *wanted, 0.125]


def test_the_file_of_composition_is_that_by_hand() -> None:
    """Nodes, links and settings of the four strongest edges, written down."""
    file = composed().to_json(n=3)
    nodes = {node["node_id"]: node for node in file["nodes"]}
    assert list(nodes) == [
        *("0_h0_0", "0_mlp0_0", "E_embed_0", "1_h0_2", "1_rest-h0_2", "1_h0_3", "1_rest-h0_3"),
        *("0_h1_1", "0_rest-h1_1"),
    ]
    assert {name: node["activation"] for name, node in nodes.items()} == {
        "0_h0_0": 1.25,
        "0_mlp0_0": 0.9375,
        "E_embed_0": 0.75,
        "1_h0_2": 1.0,
        "1_rest-h0_2": -0.25,
        "1_h0_3": 1.0,
        "1_rest-h0_3": 0.0625,
        "0_h1_1": 1.0,
        "0_rest-h1_1": 0.25,
    }
    assert [node["feature"] for node in nodes.values()] == [
        *(pairing(1, 2), pairing(1, 3), pairing(0, 1), pairing(2, 0), pairing(2, 1)),
        *(pairing(2, 0), pairing(2, 1), pairing(1, 2), pairing(1, 3)),
    ]
    assert [(node["layer"], node["ctx_idx"]) for node in nodes.values()] == [
        *(("0", 0), ("0", 0), ("E", 0), ("1", 2), ("1", 2), ("1", 3), ("1", 3), ("0", 1), ("0", 1)),
    ]
    assert [node["clerp"] for node in nodes.values()] == [
        *("L0H0 writes", "mlp0 writes", "embed writes", "L1H0 key", "rest of L1H0 key"),
        *("L1H0 value", "rest of L1H0 value", "L0H1 query", "rest of L0H1 query"),
    ]
    assert [(link["source"], link["target"], link["weight"]) for link in file["links"]] == [
        ("0_h0_0", "1_h0_2", 1.25),
        ("1_rest-h0_2", "1_h0_2", -0.25),
        ("0_mlp0_0", "1_h0_3", 0.9375),
        ("1_rest-h0_3", "1_h0_3", 0.0625),
        ("E_embed_0", "0_h1_1", 0.75),
        ("0_rest-h1_1", "0_h1_1", 0.25),
    ]
    about = file["metadata"]
    assert about["prompt_tokens"] == ["writers", "query", "key", "value"]
    assert (about["slug"], about["scan"]) == ("composition", "m")
    assert about["info"]["generator"] == {"name": "tl_geometry", "readers": ["L0H1", "L1H0"]}
    assert about["generation_settings"] == {
        "share": "cs",
        "writers": "all",
        "drop": 1,
        "queries": [4],
    }
    assert about["pruning_settings"] == {"node_threshold": 1.0, "edge_threshold": 1.0, "edges": 3}
    assert file["qParams"]["pinnedIds"] == []


def test_the_graph_of_composition_has_names_sides_and_shares() -> None:
    """Attributes of nodes, edges and the graph."""
    out = composed().to_networkx(n=2, writers="heads", share="gs")
    assert dict(out.nodes(data=True)) == {
        "L0H0": {"layer": 0, "head": 0},
        "L1H0": {"layer": 1, "head": 0},
    }
    assert [(s, t, e) for s, t, e in out.edges(data=True)] == [
        ("L0H0", "L1H0", {"edge_type": "key", "weight": -1.25}),
        ("L0H0", "L1H0", {"edge_type": "query", "weight": -0.5}),
    ]
    assert out.graph == {"model": "m", "share": "gs"}
