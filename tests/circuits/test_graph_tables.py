"""Small parts of circuits number by number: a graph that was written down, its tables and its file,
thresholds of pruning and of sums, and the steps in which features are multiplied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import D, hf_model, tiny, tokens
from tl_geometry.base.errors import ReconstructionError
from tl_geometry.base.results import Provenance
from tl_geometry.circuits import LogitGraph, dictionary, feature_shares, features, writer_sweep
from tl_geometry.circuits.graph_edges import fewest_carrying
from tl_geometry.circuits.graph_files import pairing, slug
from tl_geometry.circuits.logits import LogitExplanation, require_sum
from tl_geometry.circuits.writer_sweep import score_cotangents
from tl_geometry.models import from_hf, view
from tl_geometry.models.layer_view import LayerView

VALUE, QUERY, KEY = range(3)


def planted(**fields: Any) -> LogitGraph:
    """A graph of two blocks of two heads over three tokens, with nodes: logit, constants, an
    embedding at 0, head 1 of block 0 at 1, the MLP of block 1 at 2, positions at 1."""
    double = torch.float64
    given: dict[str, Any] = {
        "provenance": Provenance(model="a model"),
        "str_tokens": ("a", " b", "c"),
        "token_ids": (7, 8, 9),
        "position": 2,
        "target": (4, 6),
        "target_tokens": ("x", "y"),
        "target_weights": (1.0, -1.0),
        "log_probability": False,
        "probability": 0.25,
        "value": 6.0,
        "mlp": "frozen",
        "keep": 0.5,
        "leaf_names": ("embed", "pos_embed"),
        "leaf_values": torch.tensor([[1.0, 2, 3], [4, 5, 6]], dtype=double),
        "leaf_moved": torch.zeros(2, 3, dtype=double),
        "head_values": torch.zeros(2, 2, 3, dtype=double),
        "head_moved": torch.zeros(2, 2, 3, dtype=double),
        "mlp_values": torch.tensor([[10.0, 20, 30], [1, 2, 3]], dtype=double),
        "mlp_moved": torch.zeros(2, 3, dtype=double),
        "constant_value": -15.0,
        "constant_moved": 0.5,
        "names": ("logit", "constants", "embed", "L0H1", "mlp1", "pos_embed"),
        "layers": torch.tensor([-1, -1, -1, 0, 1, -1]),
        "heads_of": torch.tensor([-1, -1, -1, 1, -1, -1]),
        "positions": torch.tensor([2, -1, 0, 1, 2, 1]),
        "values": torch.tensor([6.0, -3, 1, 2, -4, 5], dtype=double),
        "moved": torch.tensor([0.0, 0.5, 9, 0.1, 0.2, 0.3], dtype=double),
        "totals": torch.zeros(6, 3, dtype=double),
        "rest": torch.tensor(
            [[2.0, 0, 0], *[[0.0] * 3] * 2, [0.5, 9, 9], *[[0.0] * 3] * 2]
        ).double(),
        "attention": torch.zeros(6, 3),
        "response": torch.zeros(6, 3),
        "sources": torch.tensor([1, 3, 2, 5, 5, 2, 4]),
        "targets": torch.tensor([0, 0, 3, 3, 3, 3, 0]),
        "edge_types": torch.tensor([VALUE, VALUE, VALUE, VALUE, QUERY, KEY, VALUE]),
        "weights": torch.tensor([-3.0, 2, 0.25, 1.25, 0.5, -0.75, 5], dtype=double),
    }
    return LogitGraph(**given | fields)


def test_the_logit_by_token_sums_its_leaves() -> None:
    """Leaves by position with the constants last, and MLPs as a part of their own where leaves."""
    table = planted().tokens()
    assert list(table.columns()) == ["position", "token", "value", "embed", "pos_embed"]
    assert [tuple(row) for row in table.rows()] == [
        (0, "a", 5.0, 1.0, 4.0),
        (1, " b", 7.0, 2.0, 5.0),
        (2, "c", 9.0, 3.0, 6.0),
        (-1, "constants", -15.0, 0.0, 0.0),
    ]
    leaves = planted(mlp="leaf").tokens()
    assert leaves.parts == ("embed", "pos_embed", "mlps")
    assert leaves.value.tolist() == [16, 29, 42, -15]
    ones = torch.ones(1, 3).double()
    one = planted(leaf_names=("embed",), leaf_values=ones, leaf_moved=ones, str_tokens=())
    assert list(one.tokens().columns()) == ["position", "token", "value"]
    rows = [("<7>", 1.0), ("<8>", 1.0), ("<9>", 1.0), ("constants", -15.0)]
    assert [tuple(row) for row in one.tokens().rows()] == [
        (position, *row) for position, row in zip((0, 1, 2, -1), rows, strict=True)
    ]


def test_the_table_of_nodes_is_by_value_and_has_the_rest_of_values() -> None:
    """Largest absolute value first, no token where a node has no position."""
    graph = planted()
    assert list(graph.columns()) == ["writer", "position", "token", "value", "moved", "rest"]
    assert [tuple(row) for row in graph.rows()] == [
        ("logit", 2, "c", 6.0, 0.0, 2.0),
        ("pos_embed", 1, " b", 5.0, 0.3, 0.0),
        ("mlp1", 2, "c", -4.0, 0.2, 0.0),
        ("constants", -1, "", -3.0, 0.5, 0.0),
        ("L0H1", 1, " b", 2.0, 0.1, 0.5),
        ("embed", 0, "a", 1.0, 9.0, 0.0),
    ]
    labels = ["logit at 2 'c'", "constants", "embed at 0 'a'", "L0H1 at 1 ' b'"]
    assert [graph.label(i) for i in range(4)] == labels


def test_edges_are_listed_by_size_of_one_type_or_all() -> None:
    """Into and out of a node, the largest absolute weight first."""
    graph = planted()
    assert graph.edges_into(3) == [
        (5, "value", 1.25),
        (2, "key", -0.75),
        (5, "query", 0.5),
        (2, "value", 0.25),
    ]
    assert graph.edges_into(3, "key") == [(2, "key", -0.75)]
    assert graph.edges_from(5) == [(3, "value", 1.25), (3, "query", 0.5)]
    assert graph.edges_from(2, "value") == [(3, "value", 0.25)]
    assert (graph.node((0, 1)), graph.node("L0H1", 1), graph.node("pos_embed", 1)) == (3, 3, 5)


def test_the_file_of_a_graph_is_that_by_hand() -> None:
    """Every node, link and setting of Neuronpedia's JSON, written down."""
    file = planted().to_json()
    assert [node["node_id"] for node in file["nodes"]] == [
        *("3_4_2", "E_constants_0", "E_7_0", "0_h1_1", "1_mlp_2", "E_pos-embed-8_1"),
        *("2_rest-logit_2", "0_rest-L0H1_1"),
    ]
    assert [(n["layer"], n["ctx_idx"], n["feature_type"]) for n in file["nodes"]] == [
        ("3", 2, "logit"),
        ("E", 0, "leaf"),
        ("E", 0, "embedding"),
        ("0", 1, "cross layer transcoder"),
        ("1", 2, "cross layer transcoder"),
        ("E", 1, "leaf"),
        ("2", 2, "mlp reconstruction error"),
        ("0", 1, "mlp reconstruction error"),
    ]
    first = [4, pairing(4, 1), pairing(4, 2), pairing(0, 1), pairing(1, 2), pairing(4, 5)]
    assert [node["feature"] for node in file["nodes"]] == [*first, pairing(4, 0), pairing(0, 4)]
    assert [node["clerp"] for node in file["nodes"]][::6] == [
        "Output 'x' - 'y' (p=0.250)",
        "rest of logit at 2 'c'",
    ]
    assert [node["activation"] for node in file["nodes"]] == [6, -3, 1, 2, -4, 5, 2, 0.5]
    influence = [6 / 21, 18 / 21, 1, 20 / 21, 15 / 21, 11 / 21, 1, 1]
    assert [node["influence"] for node in file["nodes"]] == pytest.approx(influence)
    assert [(n["token_prob"], n["is_target_logit"]) for n in file["nodes"]] == [
        (0.25, True),
        *[(0.0, False)] * 7,
    ]
    assert file["nodes"][3]["qk_tracing_results"] == {
        "pair_wise_contributors": [],
        "top_q_marginal_contributors": [["E_pos-embed-8_1", 0.5]],
        "top_k_marginal_contributors": [["E_7_0", -0.75]],
    }
    assert ["qk_tracing_results" in node for node in file["nodes"]].count(True) == 1
    assert [node["moved"] for node in file["nodes"][:6]] == [0, 0.5, 9, 0.1, 0.2, 0.3]
    same = {"run_idx": 0, "reverse_ctx_idx": 0}
    for node in file["nodes"]:
        assert same | {"jsNodeId": node["node_id"]} == {n: node[n] for n in (*same, "jsNodeId")}
    links = [(l["source"], l["target"], l["weight"], l["signed"]) for l in file["links"]]
    assert links == [
        ("E_constants_0", "3_4_2", -3.0, True),
        ("0_h1_1", "3_4_2", 2.0, True),
        ("E_7_0", "0_h1_1", 0.25, True),
        ("E_pos-embed-8_1", "0_h1_1", 1.25, True),
        ("1_mlp_2", "3_4_2", 5.0, True),
        ("2_rest-logit_2", "3_4_2", 2.0, True),
        ("0_rest-L0H1_1", "0_h1_1", 0.5, True),
    ]
    assert file["qParams"] == {
        "pinnedIds": ["3_4_2"],
        "supernodes": [],
        "linkType": "both",
        "clickedId": "",
        "sg_pos": "",
    }
    about = file["metadata"]
    assert about == {
        "slug": "a-bc",
        "scan": "a-model",
        "transcoder_list": [],
        "prompt_tokens": ["a", " b", "c"],
        "prompt": "a bc",
        "node_threshold": 1.0,
        "schema_version": 1,
        "info": {
            "creator_name": "tl_geometry",
            "source_urls": [],
            "generator": {"name": "tl_geometry", "target": ["x", "y"]},
        },
        "generation_settings": {
            "mlp": "frozen",
            "position": 2,
            "value": 6.0,
            "log_probability": False,
        },
        "pruning_settings": {"node_threshold": 0.5, "edge_threshold": 0.5},
    }


def test_a_graph_of_networkx_has_what_the_nodes_have() -> None:
    """Attributes of a node, of an edge and of the graph."""
    out = planted().to_networkx()
    assert out.graph == {"value": 6.0, "model": "a model"}
    assert dict(out.nodes[3]) == {
        "label": "L0H1 at 1 ' b'",
        "writer": "L0H1",
        "layer": 0,
        "head": 1,
        "position": 1,
        "value": 2.0,
        "moved": 0.1,
        "rest": 0.5,
    }
    assert sorted((s, t, e["edge_type"], e["weight"]) for s, t, e in out.edges(data=True)) == [
        (1, 0, "value", -3.0),
        (2, 3, "key", -0.75),
        (2, 3, "value", 0.25),
        (3, 0, "value", 2.0),
        (4, 0, "value", 5.0),
        (5, 3, "query", 0.5),
        (5, 3, "value", 1.25),
    ]
    assert planted(provenance=Provenance()).to_networkx().graph["model"] == ""
    assert planted(provenance=Provenance()).to_json()["metadata"]["scan"] == "model"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a" * 70, "a" * 60), ("-.a b?c.-", "a-b-c"), ("Ab_9.x-y", "Ab_9.x-y"), ("é", "graph")],
)
def test_names_of_files_have_sixty_plain_characters(text: str, expected: str) -> None:
    """What is kept, what becomes a hyphen, what is cut off, and a name for nothing."""
    assert slug(text) == expected


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (0.3, [1]),
        (0.4, [1]),
        (0.41, [1, 2]),
        (0.7, [1, 2]),
        (0.71, [1, 2, 3]),
        (0.9, [1, 2, 3]),
        (0.91, [0, 1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ],
)
def test_the_fewest_that_carry_a_share(keep: float, kept: list[int]) -> None:
    """Of sizes 1, 4, 3, 2 and 0, on both sides of each sum; zeros never."""
    sizes = torch.tensor([1.0, -4.0, 3.0, -2.0, 0.0])
    assert fewest_carrying(sizes, keep).nonzero()[:, 0].tolist() == kept
    both = fewest_carrying(torch.stack([sizes, sizes.flip(0)]), keep)
    assert torch.equal(both[0], both[1].flip(0))


@pytest.mark.parametrize(
    ("dtype", "bound", "text"),
    [(torch.float32, 1e-6, "1e-06"), (torch.bfloat16, 1e-2, "1e-02")],
)
def test_sums_of_a_logit_have_a_bound_by_precision(
    dtype: torch.dtype, bound: float, text: str
) -> None:
    """Just below the bound is taken; just above, and NaN, are refused in a sentence."""
    model = from_hf(hf_model("gpt2", dtype), None, model_class="bridge", name="few", dtype=dtype)
    seen = view(model)
    require_sum(seen, 0.99 * bound)
    require_sum(seen, bound)
    for error in (1.01 * bound, float("nan")):
        with pytest.raises(ReconstructionError) as refused:
            require_sum(seen, error)
        assert str(refused.value) == (
            f"logit of few: expected contributions that sum to it within {text} of their "
            f"absolute values, got {error:.2e}. Use check_model(model)."
        )


def explained(**fields: Any) -> LogitExplanation:
    """Direct contributions that were written down: one block of two heads over two tokens."""
    given: dict[str, Any] = {
        "provenance": Provenance(),
        "position": 1,
        "target": (3,),
        "target_tokens": ("x",),
        "str_tokens": ("a", "b"),
        "logit": 2.0,
        "heads": torch.tensor([[[1.0, -2.0], [0.25, 0.0]]]).double(),
        "other_names": ("embed", "constants"),
        "others": torch.tensor([1.5, -0.5]).double(),
        "parts": ("bias", "w"),
        "pairs": ((0, 0, 1), (0, 1, 0)),
        "pair_values": torch.zeros(2, 2).double(),
        "pair_terms": torch.tensor([[[1.0, -4.0], [2.0, 3.0]], [[0.0] * 2] * 2]).double(),
        "pair_alibi": torch.zeros(2).double(),
        "pair_scores": torch.tensor([0.5, 0.75]).double(),
        "pair_patterns": torch.tensor([0.125, 0.875]).double(),
    }
    return LogitExplanation(**given | fields)


def test_the_table_of_a_logit_is_that_by_hand() -> None:
    """Writers and pairs by absolute contribution, the terms of a pair, the sum and its error."""
    table = explained()
    assert (table.total, table.size, table.error) == (0.25, 5.25, 1.75 / 5.25)
    assert list(table.columns()) == [
        *("writer", "layer", "head", "source", "token", "contribution", "attention", "score"),
    ]
    assert [tuple(row) for row in table.rows()] == [
        ("L0H0", 0, 0, 1, "b", -2.0, 0.125, 0.5),
        ("embed", None, None, None, None, 1.5, None, None),
        ("constants", None, None, None, None, -0.5, None, None),
        ("L0H1", 0, 1, 0, "a", 0.25, 0.875, 0.75),
    ]
    assert explained(str_tokens=()).rows()[0][4] is None
    assert table.terms(0) == [
        ("bias", "w", -4.0),
        ("w", "w", 3.0),
        ("w", "bias", 2.0),
        ("bias", "bias", 1.0),
    ]


# ---- features


def known(keep: int, batch: int = 2, length: int = 10) -> tuple[Any, Tensor, Any]:
    """A model, its prompts, and a dictionary of ``keep`` features, active everywhere."""
    model, prompts = tiny("bridge", "gpt2"), tokens(batch, length, seed=7)
    generator = torch.Generator().manual_seed(0)
    active = 1 + torch.rand(batch, length, keep, generator=generator)
    source = active, torch.randn(keep, D, generator=generator), torch.zeros(D)
    return model, prompts, dictionary(source, 1, model)


@pytest.mark.parametrize(
    ("products", "drop", "sizes"),
    [
        (10 * 9 * 3, 0, [(3, 3), (3, 6), (3, 9), (1, 10)]),
        (10 * 9 * 4 - 1, 0, [(3, 3), (3, 6), (3, 9), (1, 10)]),
        (8 * 9 * 5, 2, [(5, 5), (3, 8)]),
        (1, 6, [(1, 1), (1, 2), (1, 3), (1, 4)]),
    ],
)
def test_pairs_of_features_are_multiplied_in_steps(
    products: int, drop: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes the queries whose products fit, and the keys that they see."""
    model, prompts, read = known(3)
    seen: list[tuple[int, int]] = []
    whole = features._largest

    def largest(q: Tensor, k: Tensor, n: int) -> Any:
        seen.append((q.shape[1], k.shape[1]))
        return whole(q, k, n)

    monkeypatch.setattr(features, "PRODUCTS", products)
    monkeypatch.setattr(features, "_largest", largest)
    feature_shares(model, prompts, read, heads=["L1H0", "L1H2"], drop=drop)
    assert seen == sizes * 4  # two prompts of two heads


def test_pairs_that_a_head_has_not_are_minus_one_and_nan() -> None:
    """One pair of each cell for two heads, of which one has fewer: filled up at the end."""
    model, prompts, read = known(3)
    found = feature_shares(model, prompts, read, per_cell=1, pairs=9)
    missing = found.pairs[..., 0] < 0
    assert bool(missing.any())
    assert found.pairs[missing].unique().tolist() == [-1]
    assert bool((found.pairs[~missing] >= 0).all())
    assert torch.equal(found.pair_cs.isnan(), missing)
    assert torch.equal(found.pair_gs.isnan(), missing)


# ---- shares of writers


def layer_of(architecture: str) -> LayerView:
    """The second layer of a float64 model over two prompts."""
    seen, layers = view(tiny("bridge", architecture, dtype=torch.float64)), []
    seen.run_layers(tokens(2, 7, seed=3), [1], layers.append)
    return layers[0]


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "bloom"])
@pytest.mark.parametrize(("drop", "heads"), [(0, None), (2, [2, 0])])
def test_cotangents_are_sums_over_cells_by_loops(
    architecture: str, drop: int, heads: list[int] | None
) -> None:
    """What a part of queries and keys is multiplied by, totals, ALiBi and floor, cell by cell."""
    layer = layer_of(architecture)
    found = score_cotangents(layer, drop, heads)
    batch, length = layer.h.shape[:2]
    for at, head in enumerate(range(4) if heads is None else heads):
        floor, alibi = 0.0, torch.zeros(2).double()
        for b in range(batch):
            q, k = layer.q[b, :, head], layer.k[b, :, head]
            scores = layer.scale * q @ k.mT
            scores = scores if layer.bias is None else scores + layer.bias[head]
            query, key = torch.zeros(2, *q.shape).double(), torch.zeros(2, *k.shape).double()
            total = torch.zeros(2).double()
            for i in range(drop, length):
                keys = [j for j in range(drop, length) if layer.allowed[i, j]]
                row = scores[i, keys]
                capped = (
                    row if layer.softcap is None else (row / layer.softcap).tanh() * layer.softcap
                )
                centred = row - row.mean()
                weights = torch.stack([centred, capped.softmax(-1) - 1 / len(keys)])
                query[:, i] = weights @ k[keys] * layer.scale
                for w, j in enumerate(keys):
                    key[:, j] += weights[:, w, None] * q[i] * layer.scale
                total += (weights * centred).sum(-1)
                if layer.bias is not None:
                    alibi += (weights * layer.bias[head, i, keys]).sum(-1)
            assert torch.allclose(found.query[:, b, :, at], query, atol=1e-6)
            assert torch.allclose(found.key[:, b, :, at], key, atol=1e-6)
            assert torch.allclose(found.total[:, b, at], total, atol=1e-6)
            sizes = (layer.scale * q[drop:]).norm() * (k[drop:] - k[drop:].mean(0)).norm()
            floor += float(32 * 2**-53 * sizes) ** 2
        assert torch.allclose(found.alibi[:, at], alibi, atol=1e-6)
        assert float(found.floor[at]) == pytest.approx(floor, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("size", [1e-4, 0.0])
@pytest.mark.parametrize("side", [0, 1])
def test_numerators_that_do_not_sum_are_refused_by_side(side: int, size: float) -> None:
    """The bound: 1024 roundings of the sizes, and 32 roots of the floor; both sides of it."""
    layer = layer_of("gpt2")
    floor = torch.full((1,), size).double()
    bound = 1024 * layer.roundoff * (3.0 + 3.0) + 32 * size**0.5
    for off, fits in ((0.98 * bound, True), (1.02 * bound, False), (float("nan"), False)):
        shares = torch.tensor([1.0, 2.0]).double().expand(2, 2, 1, 2).clone()
        total, alibi = torch.full((2, 1), 3.0).double(), torch.zeros(2, 1).double()
        shares[0, side, 0, 0] += off
        sums = writer_sweep._Sums(
            shares=shares, total=total, floor=floor, alibi=alibi, mass=torch.zeros(1).double()
        )
        if fits:
            sums.check(layer)
            continue
        with pytest.raises(ReconstructionError) as error:
            sums.check(layer)
        seen = 1.0 + off + 2.0 - 3.0  # rounded as the sum is
        assert str(error.value) == (
            f"{('query', 'key')[side]} side of layer 1: expected writers' numerators that sum to "
            f"those of the scores, got a sum that is off by {seen:.3g}. Use check_model(model)."
        )
