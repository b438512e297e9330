"""Edges without a long run: layouts counted by hand, tables of planted scores, edge lists as text,
the sentences of refusals, and one small pass of each kind of block."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.tiny import hf_model, tiny, tokens
from tl_geometry.base.errors import GeometryError, ReconstructionError
from tl_geometry.base.results import Provenance
from tl_geometry.circuits import EdgeLayout, EdgeScores, edge_scores, read_mib
from tl_geometry.circuits.edge_attribution import bounds, largest
from tl_geometry.circuits.edge_files import mib_names
from tl_geometry.circuits.edge_pass import EdgePass, PathStream, PrunedStream, SharedStream
from tl_geometry.models import from_hf, view

MIXED = EdgeLayout(
    n_layers=3,
    n_heads=2,
    d_model=8,
    n_key_heads=(1, 2, 1),
    mlps=("none", "parallel", "sequential"),
)
"""A layout with a block of each kind, of two heads."""
WRITERS = ("embed", "L0H0", "L0H1", "L1H0", "L1H1", "mlp1", "L2H0", "L2H1", "mlp2")
SEEN = {
    **dict.fromkeys(("L0H0<q>", "L0H1<q>", "L0H0-1<k>", "L0H0-1<v>"), 1),
    **dict.fromkeys(("L1H0<q>", "L1H1<q>", "L1H0<k>", "L1H1<k>", "L1H0<v>", "L1H1<v>"), 3),
    "mlp1": 3,
    **dict.fromkeys(("L2H0<q>", "L2H1<q>", "L2H0-1<k>", "L2H0-1<v>"), 6),
    "mlp2": 8,
    "output": 9,
}
"""Every reader with the number of writers before it."""
NAMES = [f"{writer}->{reader}" for reader, n in SEEN.items() for writer in WRITERS[:n]]


def planted(layout: EdgeLayout = MIXED, prompts: int = 12, **fields: Any) -> EdgeScores:
    """Scores that say their own number, signs in turn."""
    edges, writers = sum(layout.seen), len(layout.writers)
    scores = torch.arange(1.0, edges + 1).double() * torch.tensor([1.0, -1.0]).repeat(edges)[:edges]
    nodes = torch.arange(1.0, writers + 1).double()
    given: dict[str, Any] = {
        "layout": layout,
        "scores": scores,
        "errors": scores.abs() / 10,
        "node_scores": nodes,
        "node_errors": nodes / 4,
        "prompts": prompts,
        "clean": 2.0,
        "counterfactual": 1.0,
        "method": "gradient",
        "provenance": Provenance(),
    }
    return EdgeScores(**given | fields)


def test_a_layout_of_every_kind_of_block_is_that_by_hand() -> None:
    """Writers, readers, what each reader sees, and edges in order, counted by hand."""
    assert MIXED.writers == WRITERS
    assert dict(zip(MIXED.readers, MIXED.seen, strict=True)) == SEEN
    assert MIXED.readers == tuple(SEEN)
    assert MIXED.head_writers.tolist() == [1, 2, 3, 4, 6, 7]
    assert list(MIXED.edge_names()) == NAMES
    assert MIXED.allowed.sum(1).tolist() == list(SEEN.values())
    kept = MIXED.kept(torch.tensor([name.startswith("mlp1->") for name in NAMES]))
    assert kept.nonzero().tolist() == [[row, 5] for row in range(11, 17)]


def test_readers_of_each_block_are_found_by_number() -> None:
    """Slices of the list of readers hold the names of the block and of the kind."""
    names = MIXED.readers
    for layer, readers in enumerate(MIXED.layer_readers()):
        for part, letter in zip(readers[:3], "qkv", strict=True):
            assert names[part]
            assert all(
                n.startswith(f"L{layer}H") and n.endswith(f"<{letter}>") for n in names[part]
            )
        assert names[readers.mlp] == (() if layer == 0 else (f"mlp{layer}",))
        assert readers.attention == slice(readers.query.start, readers.value.stop)
        attention = [n for n in names if n.startswith(f"L{layer}H")]
        assert list(names[readers.attention]) == attention


def test_tables_begin_with_the_largest_and_have_students_interval() -> None:
    """Rows by absolute score with bounds by scipy; nodes alike."""
    scores = planted()
    reach = stats.t.ppf(0.975, 11)
    rows = scores.rows()
    assert len(rows) == len(NAMES)
    for row, number in zip(rows, range(len(NAMES), 0, -1), strict=True):
        value = number if number % 2 else -number
        assert f"{row[0]}->{row[1]}" == NAMES[number - 1]
        assert row[2] == value
        assert row[3:] == pytest.approx((value - reach * number / 10, value + reach * number / 10))
    assert list(scores.columns()) == ["source", "target", "score", "low", "high"]
    nodes = scores.nodes()
    assert list(nodes.columns()) == ["writer", "score", "low", "high"]
    first = nodes.rows()[0]
    assert first[:2] == ("mlp2", 9.0)
    assert first[2:] == pytest.approx((9 - reach * 9 / 4, 9 + reach * 9 / 4))
    assert [row[0] for row in nodes.rows()] == list(reversed(WRITERS))


@pytest.mark.parametrize(("prompts", "freedom"), [(0, 1), (1, 1), (2, 1), (3, 2), (30, 29)])
def test_bounds_have_one_degree_of_freedom_less_than_prompts(prompts: int, freedom: int) -> None:
    """Half the width is the quantile times the error, of one degree of freedom at least."""
    value, low, high = bounds(torch.tensor([3.0]), torch.tensor([2.0]), prompts)
    reach = 2 * stats.t.ppf(0.975, freedom)
    assert value.tolist() == [3.0]
    assert float(low) == pytest.approx(3 - reach, rel=1e-5)
    assert float(high) == pytest.approx(3 + reach, rel=1e-5)


@pytest.mark.parametrize(
    ("fraction", "rows"),
    [
        (1e-9, [1]),
        (0.28, [1]),
        (0.32, [1, 2]),
        (0.6, [1, 2, 3]),
        (0.9, [1, 2, 3, 4]),
        (1.0, [*range(5)]),
    ],
)
def test_a_share_of_the_largest_rounds_to_the_nearest_and_takes_the_first_of_equals(
    fraction: float, rows: list[int]
) -> None:
    """Of sizes 1, 4, 3, 3, 2 the largest by share; of two equal ones the first."""
    scores = torch.tensor([1.0, -4.0, 3.0, -3.0, 2.0])
    assert largest(scores, fraction).nonzero()[:, 0].tolist() == rows


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.001, math.nan])
def test_a_share_outside_of_zero_to_one_is_refused(fraction: Any) -> None:
    """The message says which shares there are and what came."""
    with pytest.raises(GeometryError) as error:
        largest(torch.ones(3), fraction)
    assert str(error.value) == (f"fraction: expected a share above 0, at most 1, got {fraction!r}.")


def test_marked_edges_are_taken_where_no_share_is_given() -> None:
    """A file's marks by default, a share where one is given, an error where there is neither."""
    marks = torch.zeros(len(NAMES), dtype=torch.bool)
    marks[[2, 5]] = True
    assert planted(in_graph=marks).edges() == [NAMES[2], NAMES[5]]
    assert planted(in_graph=marks).edges(1 / len(NAMES)) == [NAMES[-1]]
    with pytest.raises(GeometryError) as error:
        planted().edges()
    assert str(error.value) == (
        "fraction: expected a share of the edges, got none. Use fraction=0.01."
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embed", ["input"]),
        ("output", ["logits"]),
        ("mlp12", ["m12"]),
        ("L10H11", ["a10.h11"]),
        ("L3H4<v>", ["a3.h4<v>"]),
        ("L3H4-6<k>", ["a3.h4<k>", "a3.h5<k>", "a3.h6<k>"]),
    ],
)
def test_names_of_the_benchmark(name: str, expected: list[str]) -> None:
    """Every kind of writer and reader as the file names it."""
    assert mib_names(name) == expected


def test_the_edge_list_is_that_by_hand(tmp_path: Path) -> None:
    """Scores of shared keys in equal parts, marks, nodes touched, and sizes, as written."""
    layout = EdgeLayout(n_layers=1, n_heads=2, d_model=8, n_key_heads=(1,), mlps=("sequential",))
    scores = planted(layout, scores=torch.tensor([1.0, 2, 8, 6, 3, -4, 5, 7, -9, 1, 2]).double())
    file = scores.to_mib(tmp_path / "edges.json", fraction=2 / 11)
    stored = json.loads(file.read_text())
    by_hand = {
        "input->a0.h0<q>": 1,
        "input->a0.h1<q>": 2,
        "input->a0.h0<k>": 4,
        "input->a0.h1<k>": 4,
        "input->a0.h0<v>": 3,
        "input->a0.h1<v>": 3,
        "input->m0": 3,
        "a0.h0->m0": -4,
        "a0.h1->m0": 5,
        "input->logits": 7,
        "a0.h0->logits": -9,
        "a0.h1->logits": 1,
        "m0->logits": 2,
    }
    marked = {"input->a0.h0<k>", "input->a0.h1<k>", "a0.h0->logits"}
    expected = {n: {"score": float(x), "in_graph": n in marked} for n, x in by_hand.items()}
    assert stored["edges"] == expected
    nodes = {"input": True, "a0.h0": True, "a0.h1": True, "m0": False, "logits": True}
    assert stored["nodes"] == {name: {"in_graph": there} for name, there in nodes.items()}
    cfg = {"n_layers": 1, "n_heads": 2, "d_model": 8}
    assert stored["cfg"] == cfg | {"parallel_attn_mlp": False}
    parallel = EdgeLayout(n_layers=1, n_heads=2, d_model=8, n_key_heads=(1,), mlps=("parallel",))
    stored = json.loads(planted(parallel).to_mib(tmp_path / "edges.json", 0.5).read_text())
    assert stored["cfg"] == cfg | {"parallel_attn_mlp": True}


def edge_list(layout: EdgeLayout) -> dict[str, Any]:
    """An edge list with scores 1, 2, ... in the order of the file, nothing in the graph."""
    edges = [
        f"{mib_names(name.split('->')[0])[0]}->{reader}"
        for name in layout.edge_names()
        for reader in mib_names(name.split("->")[1])
    ]
    return {name: {"score": n + 1, "in_graph": False} for n, name in enumerate(edges)}


def test_an_edge_list_is_read_by_name_and_parts_are_added_up(tmp_path: Path) -> None:
    """Scores of a group are summed, one mark marks it, a score that is not there counts as 0."""
    model, path = tiny("bridge", "llama"), tmp_path / "edges.json"
    layout = EdgeLayout.of(view(model))
    edges = edge_list(layout)
    edges["input->a0.h1<k>"]["in_graph"] = True
    del edges["input->a0.h0<q>"]["score"]
    edges["input->a0.h2<k>"] = {"in_graph": False}
    shuffled = dict(sorted(edges.items(), reverse=True))
    path.write_text(json.dumps({"edges": shuffled}))
    read = read_mib(model, path)
    scores = dict(zip(layout.edge_names(), read.scores.tolist(), strict=True))
    # the first 4 are queries, then keys of heads 0 to 3, then their values
    assert scores["embed->L0H0<q>"] == 0
    assert scores["embed->L0H1<q>"] == 2
    assert scores["embed->L0H0-1<k>"] == 5 + 6
    assert scores["embed->L0H2-3<k>"] == 8
    assert scores["embed->L0H0-1<v>"] == 9 + 10
    assert read.edges() == ["embed->L0H0-1<k>"]
    by_writer = dict.fromkeys(layout.writers, 0.0)
    for name, score in scores.items():
        by_writer[name.split("->")[0]] += score
    assert read.node_scores.tolist() == pytest.approx(list(by_writer.values()))
    assert bool(read.errors.isnan().all())
    assert bool(read.node_errors.isnan().all())
    assert (read.prompts, read.method, read.by_position) == (0, "file", None)
    assert math.isnan(read.clean)
    assert math.isnan(read.counterfactual)
    assert read.provenance.corpus == "edges.json"


def test_an_edge_list_of_other_edges_is_refused_with_their_numbers(tmp_path: Path) -> None:
    """How many edges are missing and how many are foreign; and what is no edge list at all."""
    model, path = tiny("bridge", "llama"), tmp_path / "edges.json"
    edges = edge_list(EdgeLayout.of(view(model)))
    fewer = {name: edge for name, edge in edges.items() if not name.startswith("m0->m1")}
    other = {**edges, "m9->logits": {"in_graph": True}, "m8->logits": {"in_graph": True}}
    for given, counts in ((fewer, (1, 0)), (other, (0, 2))):
        path.write_text(json.dumps({"edges": given}))
        with pytest.raises(GeometryError) as error:
            read_mib(model, path)
        assert str(error.value) == (
            f"{path}: expected the edges of tiny-llama, got {counts[0]} that it lacks, "
            f"{counts[1]} that the model has not."
        )
    for text, kind in (
        ("{", "JSONDecodeError"),
        ('{"edges": []}', "AttributeError"),
        ('{"nodes": {}}', "KeyError"),
        ('{"edges": {"a": {"score": 1}}}', "KeyError"),
        ('{"edges": {"a": {"score": [], "in_graph": true}}}', "TypeError"),
    ):
        path.write_text(text)
        with pytest.raises(GeometryError, match=f"expected an edge list in JSON, got {kind}: "):
            read_mib(model, path)
    with pytest.raises(GeometryError, match=r"an edge list in JSON, got FileNotFoundError: "):
        read_mib(model, tmp_path / "none.json")


# ---- streams


def test_streams_give_each_reader_its_own_input() -> None:
    """The three streams with writes 1, 10 and 100, by hand."""
    first, writes = torch.full((1, 2, 1), 1.0), torch.tensor([10.0, 100.0]).view(2, 1, 1, 1)
    writes = writes.expand(2, 1, 2, 1)
    shared = SharedStream(first)
    assert shared.read(slice(2, 5)).shape == (1, 2, 3, 1)
    shared.add(writes)
    assert shared.read(slice(0, 1)).flatten().tolist() == [111, 111]
    assert shared.all_writes()[:, 0, 0, 0].tolist() == [1, 10, 100]
    counterfactual = torch.tensor([2.0, 30.0, 400.0]).view(3, 1, 1, 1).expand(3, 1, 2, 1)
    kept = torch.tensor([[True, False, False], [False, True, False], [True, True, True]])
    pruned = PrunedStream(first, counterfactual, kept)
    assert pruned.read(slice(0, 3))[0, 0, :, 0].tolist() == [1, 2, 1]
    pruned.add(writes)
    assert pruned.read(slice(0, 3))[0, 1, :, 0].tolist() == [431, 412, 111]
    receives = torch.tensor([[True, False], [False, True]])
    path = PathStream(first, receives, torch.full((1, 2, 1), 5.0))
    path.add(writes)
    assert path.read(slice(0, 2))[0, :, :, 0].tolist() == [[116, 111], [111, 116]]
    halves = PathStream(torch.tensor([1.0, 2.0]).view(2, 1, 1).expand(2, 2, 1), receives, None)
    assert halves.read(slice(0, 2))[..., 0].tolist() == [[[1, 1], [1, 1]], [[1, 2], [2, 1]]]
    assert halves.read(slice(1, 2))[..., 0].tolist() == [[[1], [1]], [[2], [1]]]


# ---- small passes


def pairs(length: int = 4, batch: int = 2) -> dict[str, Any]:
    """Prompts and counterfactuals that end alike, with the tokens compared."""
    clean, other = tokens(batch, length, seed=5), tokens(batch, length, seed=6)
    return {"prompts": clean, "counterfactuals": other, "targets": (5, 9)}


def gradient(model: Any, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """The first state, and the gradient of the difference of two logits there, by autograd."""
    seen, states = view(model), {}

    def keep(h: Tensor, hook: Any) -> Tensor:
        states["h"] = h.detach().requires_grad_()
        return states["h"]

    with torch.enable_grad():
        logits = model.run_with_hooks(prompts, fwd_hooks=[(seen.state_hooks[0], keep)])[:, -1]
        (grad,) = torch.autograd.grad((logits[:, 5] - logits[:, 9]).sum(), states["h"])
    return states["h"].detach(), grad


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "neox", "gemma2"])
def test_the_score_of_the_embedding_is_the_models_own_gradient(architecture: str) -> None:
    """Gradient scores of the first writer, summed over readers, by autograd through the model."""
    model, given = tiny("bridge", architecture, dtype=torch.float64), pairs()
    scores = edge_scores(model, **given, method="gradient", positions=True)
    (h, grad), (other, _) = (
        gradient(model, given[name]) for name in ("prompts", "counterfactuals")
    )
    by_position = ((other - h) * grad).sum(-1).mean(0)
    assert float(scores.node_scores[0]) == pytest.approx(float(by_position.sum()), abs=1e-4)
    assert scores.by_position is not None
    assert scores.by_position.shape == (len(scores.scores), 4)
    assert torch.allclose(scores.by_position.sum(1), scores.scores, atol=1e-12)
    embed = torch.tensor([name.startswith("embed->") for name in scores.names()])
    assert torch.allclose(scores.by_position[embed].sum(0), by_position.double(), atol=1e-4)
    assert bool(scores.errors.isnan().all())
    assert (scores.prompts, scores.method) == (2, "gradient")


def test_a_model_of_one_block_has_edges() -> None:
    """One block: its embedding, heads and MLP are the writers, and scores are there."""
    hf = hf_model("gpt2", torch.float64, n_layer=1)
    model = from_hf(hf, None, model_class="bridge", name="one-block", dtype=torch.float64)
    scores = edge_scores(model, **pairs(), method="gradient")
    assert scores.layout.writers == ("embed", "L0H0", "L0H1", "L0H2", "L0H3", "mlp0")
    assert bool((scores.scores != 0).all())


def test_errors_of_means_are_those_of_single_prompts_from_ten_on() -> None:
    """The standard error by torch over ten pairs, NaN over nine; the mean of the metric of both."""
    model, given = tiny("bridge", "gpt2", dtype=torch.float64), pairs(3, 10)
    options: dict[str, Any] = {"method": "integrated", "steps": 1}
    scores = edge_scores(model, **given, **options)
    fewer = {name: x[:9] if isinstance(x, Tensor) else x for name, x in given.items()}
    nine = edge_scores(model, **fewer, **options)
    assert bool(nine.errors.isnan().all())
    assert bool(nine.node_errors.isnan().all())
    single = [
        edge_scores(
            model,
            given["prompts"][i : i + 1],
            given["counterfactuals"][i : i + 1],
            **options,
            targets=(5, 9),
        )
        for i in range(10)
    ]
    each, nodes = (torch.stack([getattr(s, n) for s in single]) for n in ("scores", "node_scores"))
    assert torch.allclose(scores.scores, each.mean(0), atol=1e-6)
    assert torch.allclose(scores.errors, each.std(0) / 10**0.5, rtol=1e-3, atol=1e-6)
    assert torch.allclose(scores.node_errors, nodes.std(0) / 10**0.5, rtol=1e-3, atol=1e-6)
    for name, rows in (("clean", "prompts"), ("counterfactual", "counterfactuals")):
        logits = model(given[rows])[:, -1].detach()
        expected = float((logits[:, 5] - logits[:, 9]).mean())
        assert getattr(scores, name) == pytest.approx(expected, abs=1e-4)


def test_a_pass_begins_at_a_block_and_maps_mixed_values() -> None:
    """From block 1 on its own input gives the same logits; zeroed values are a knockout."""
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    seen, prompts = view(model), tokens(2, 5, seed=3)
    runs = EdgePass.of(seen, EdgeLayout.of(seen), prompts)
    states = seen.activations(prompts, list(seen.state_hooks[:2]))
    whole = runs.run(SharedStream(states[seen.state_hooks[0]]))
    later = runs.run(SharedStream(states[seen.state_hooks[1]]), start=1)
    assert torch.allclose(later, whole, atol=1e-5)
    assert torch.allclose(whole, model(prompts), atol=1e-5)
    chosen = runs.run(SharedStream(states[seen.state_hooks[0]]), slice(1, 3))
    assert torch.equal(chosen, whole[:, 1:3])
    without = runs.run(SharedStream(states[seen.state_hooks[0]]), outputs={1: torch.zeros_like})
    hook = [("blocks.1.attn.hook_z", lambda z, hook: torch.zeros_like(z))]
    assert torch.allclose(without, model.run_with_hooks(prompts, fwd_hooks=hook), atol=1e-5)
    assert float((without - whole).abs().max()) > 0.1


def test_logits_of_another_model_are_refused_with_the_size_of_the_difference() -> None:
    """A difference of 1 is refused in a whole sentence, one of rounding is not."""
    model = tiny("bridge", "gpt2")
    seen, prompts = view(model), tokens(1, 4, seed=3)
    runs = EdgePass.of(seen, EdgeLayout.of(seen), prompts)
    stream, logits = runs.verified(prompts, slice(None))
    runs.require_model_logits(logits + 1e-6, stream.total, logits)
    with pytest.raises(ReconstructionError) as error:
        runs.require_model_logits(logits + 1, stream.total, logits)
    message = str(error.value)
    assert message.startswith("logits of tiny-gpt2: expected those of a pass by blocks, within ")
    assert message.endswith(
        "got differences of 1.0e+00. Use the model without hooks that change it; "
        "check_model(model) says more."
    )
    with pytest.raises(ReconstructionError):
        runs.require_model_logits(logits * torch.nan, stream.total, logits)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"steps": 0}, "steps: expected a whole number, at least 1, got 0."),
        ({"steps": True}, "steps: expected a whole number, at least 1, got True."),
        ({"method": "exact"}, "method: expected one of 'integrated', 'gradient', got 'exact'."),
    ],
)
def test_other_steps_and_methods_are_refused(options: dict[str, Any], text: str) -> None:
    """The whole sentence for each."""
    with pytest.raises(GeometryError) as error:
        edge_scores(tiny("bridge", "gpt2"), **pairs(), **options)
    assert str(error.value) == text


def test_scores_by_position_need_pairs_of_one_length() -> None:
    """Two lengths are refused with positions, and are taken without."""
    model = tiny("bridge", "gpt2")
    prompts, others = ([list(range(a, a + 4)), list(range(a, a + 3))] for a in (5, 20))
    options: dict[str, Any] = {"targets": (5, 9), "method": "gradient"}
    with pytest.raises(GeometryError) as error:
        edge_scores(model, prompts, others, **options, positions=True)
    assert str(error.value) == ("positions=True: expected pairs of one length, got lengths (3, 4).")
    assert edge_scores(model, prompts, others, **options).prompts == 2
