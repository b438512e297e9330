"""Pruned runs are path patching by hand, chosen heads are patched heads; f and its areas."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.circuits.edges_by_hand import (
    BY_HAND,
    COUNTERFACTUALS,
    PAIRS,
    PROMPTS,
    TARGETS,
    difference,
    hooked,
    pruned_by_hand,
)
from tests.lib.models import HAS_HOOKED, hf_model, tiny, tokens
from tl_geometry.base.errors import BudgetError, GeometryError
from tl_geometry.base.intervals import paired_interval
from tl_geometry.circuits import EdgeLayout, Faithfulness, edge_scores, faithfulness
from tl_geometry.circuits.edge_pass import PrunedStream
from tl_geometry.circuits.prompt_pairs import pairs_per_batch
from tl_geometry.models import from_hf, view

needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)


def half(layout: EdgeLayout, seed: int = 0) -> Tensor:
    """A random half of the edges."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(len(layout.edge_names()), generator=generator) < 0.5


@needs_hooked
@pytest.mark.parametrize("architecture", BY_HAND)
def test_pruned_runs_are_path_patching_by_hand(architecture: str) -> None:
    model = hooked(architecture)
    layout = EdgeLayout.of(view(model))
    kept = half(layout)
    names = [name for name, chosen in zip(layout.edge_names(), kept, strict=True) if chosen]
    result = faithfulness(model, names, **PAIRS, draws=1)
    expected = pruned_by_hand(model, layout, layout.kept(kept))
    assert result.complements is not None
    assert torch.allclose(result.metrics[0], expected, rtol=0, atol=1e-9)
    rest = pruned_by_hand(model, layout, layout.kept(~kept))
    assert torch.allclose(result.complements[0], rest, rtol=0, atol=1e-9)
    assert float((expected - rest).abs().min()) > 1e-3


def nothing_running(stream: PrunedStream, writes: Tensor) -> None:
    """The differences of the first pass only: writes that do not follow the pruned stream."""
    there = slice(stream.written, stream.written + len(writes))
    ADD(stream, writes)
    if there.start > 0:
        stream.differences[there] = 0.0


ADD = PrunedStream.add


@needs_hooked
def test_writes_that_do_not_run_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hooked("llama")
    layout = EdgeLayout.of(view(model))
    kept = half(layout)
    names = [name for name, chosen in zip(layout.edge_names(), kept, strict=True) if chosen]
    expected = pruned_by_hand(model, layout, layout.kept(kept))
    monkeypatch.setattr(PrunedStream, "add", nothing_running)
    result = faithfulness(model, names, **PAIRS, draws=1)
    assert not torch.allclose(result.metrics[0], expected, rtol=0, atol=1e-2)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3", "neox", "phi", "opt", "mpt"])
def test_chosen_heads_are_the_others_patched(architecture: str) -> None:
    model = from_hf(hf_model(architecture, torch.float64), None)
    chosen = [(0, 1), (1, 0), (1, 3)]
    result = faithfulness(model, chosen, **PAIRS, draws=1)
    with torch.no_grad():
        there = model.run_with_cache(COUNTERFACTUALS)[1]

    def patch(z: Tensor, hook: Any, layer: int, keep: bool) -> Tensor:
        heads = view(model).n_heads
        out = z.reshape(*z.shape[:2], heads, -1).clone()
        other = there[f"blocks.{layer}.attn.hook_z"].reshape(out.shape)
        for head in range(heads):
            if ((layer, head) in chosen) != keep:
                out[:, :, head] = other[:, :, head]
        return out.reshape(z.shape)

    found = []
    for keep in (True, False):
        hooks = [
            (f"blocks.{layer}.attn.hook_z", partial(patch, layer=layer, keep=keep))
            for layer in range(2)
        ]
        with torch.no_grad():
            found.append(difference(model.run_with_hooks(PROMPTS, fwd_hooks=hooks)))
    assert result.complements is not None
    # some families compute norms or tables in float32 whatever their dtype
    assert torch.allclose(result.metrics[0], found[0].double(), rtol=0, atol=1e-4)
    assert torch.allclose(result.complements[0], found[1].double(), rtol=0, atol=1e-4)
    assert float((found[0] - found[1]).abs().max()) > 1e-2
    assert result.unit == "heads"


@pytest.mark.skipif(HAS_HOOKED, reason="TransformerLens 3 has no edge scores")
def test_f_is_that_of_transformer_lens_4() -> None:
    analysis = importlib.import_module("transformer_lens.tools.analysis.attribution_patching")
    model = from_hf(hf_model("gpt2", torch.float64), None)
    scores = edge_scores(model, PROMPTS[:1], COUNTERFACTUALS[:1], targets=TARGETS[0])
    names = set(scores.edges(0.3))
    answer, other = TARGETS[0]
    metric = partial(lambda logits, a, b: logits[0, -1, a] - logits[0, -1, b], a=answer, b=other)
    config = analysis.EdgeAttributionConfig(granularity="edge")
    every = analysis.attribution_patch(model, PROMPTS[:1], COUNTERFACTUALS[:1], metric, config)
    circuit = [edge for edge in every.edge_scores if named(edge) in names]
    assert len(circuit) == len(names) * PROMPTS.shape[1]
    theirs = analysis.faithfulness(model, PROMPTS[:1], COUNTERFACTUALS[:1], metric, circuit)
    ours = faithfulness(
        model, sorted(names), PROMPTS[:1], COUNTERFACTUALS[:1], targets=TARGETS[0], draws=1
    )
    assert float(ours.f.value[0]) == pytest.approx(theirs.recovered, abs=1e-9)
    assert abs(theirs.recovered - 1) > 1e-3


def named(edge: Any) -> str:
    """An edge of TransformerLens by our name."""
    writer, reader = edge
    source = {"embed": "embed", "attn_head_out": f"L{writer.layer}H{writer.head}"}
    target = {"mlp_in": f"mlp{reader.layer}", "logits": "output"}
    head = f"L{reader.layer}H{reader.head}<{reader.kind[0]}>"
    return f"{source.get(writer.kind, f'mlp{writer.layer}')}->{target.get(reader.kind, head)}"


# ---- levels, areas, intervals


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2", "neox"])
def test_ends_of_the_curve_are_exact(architecture: str) -> None:
    model = tiny("bridge", architecture, dtype=torch.float64)
    scores = edge_scores(model, **PAIRS)
    for nodes in (False, True):
        result = faithfulness(model, scores, **PAIRS, fractions=(0.2, 1.0), nodes=nodes, draws=2)
        assert float(result.f.value[1]) == pytest.approx(1, abs=1e-9)
        assert torch.allclose(result.random_f[:, 1], torch.ones(2).double(), atol=1e-9)
        assert abs(float(result.f.value[0]) - 1) > 1e-4
    everything = faithfulness(model, scores.names(), **PAIRS, draws=1)
    assert everything.complements is not None
    assert torch.allclose(everything.complements[0], everything.counterfactual, atol=1e-10)
    assert float(everything.completeness.value[0]) == pytest.approx(0, abs=1e-9)


def planted(**values: Any) -> Faithfulness:
    """Pruned runs with chosen metrics."""
    model = view(tiny("bridge", "llama"))
    fields: dict[str, Any] = {
        "unit": "edges",
        "total": 100,
        "kept": torch.tensor([10, 50]),
        "clean": torch.full((12,), 3.0).double(),
        "counterfactual": torch.full((12,), 1.0).double(),
        "random": torch.ones(2, *values["metrics"].shape).double(),
        "seed": 0,
        "provenance": model.provenance(),
    }
    return Faithfulness(**(fields | values))


def test_areas_by_hand() -> None:
    metrics = torch.tensor([[2.0], [4.0]]).double().expand(2, 12)
    result = planted(metrics=metrics)
    assert result.f.value.tolist() == [0.5, 1.5]
    # trapezoids through (0, 0), (0.1, 0.5), (0.5, 1.5), (1, 1)
    assert float(result.cpr.value) == pytest.approx(0.025 + 0.4 + 0.625)
    # and of |1 - f| through (0, 1), (0.1, 0.5), (0.5, 0.5), (1, 0)
    assert float(result.cmd.value) == pytest.approx(0.075 + 0.2 + 0.125)
    assert result.random_cpr.tolist() == pytest.approx([0.25, 0.25])
    shuffled = planted(metrics=metrics.flip(0), kept=torch.tensor([50, 10]))
    assert float(shuffled.cpr.value) == pytest.approx(float(result.cpr.value))


def noisy(seed: int, prompts: int = 20) -> Faithfulness:
    """Pruned runs whose f is 0.4 and 0.8 up to noise."""
    generator = torch.Generator().manual_seed(seed)
    whole = 2 + 0.5 * torch.randn(prompts, generator=generator).double()
    noise = 0.4 * torch.randn(2, prompts, generator=generator).double()
    other = torch.randn(prompts, generator=generator).double()
    metrics = other + torch.tensor([[0.4], [0.8]]).double() * whole + noise
    return planted(metrics=metrics, clean=other + whole, counterfactual=other)


@pytest.mark.nightly
def test_intervals_of_ratios_cover() -> None:
    truth = {"f": 0.4, "cpr": 0.02 + 0.24 + 0.45, "cmd": 0.08 + 0.16 + 0.05}
    covered, repeats = dict.fromkeys(truth, 0), 400
    for seed in range(repeats):
        result = noisy(seed)
        for name, value in truth.items():
            interval = getattr(result, name)
            low, high = (x[0] if name == "f" else x for x in (interval.low, interval.high))
            covered[name] += bool(low <= value <= high)
    assert all(0.9 <= count / repeats <= 0.98 for count in covered.values())
    assert bool(noisy(0, prompts=9).f.low.isnan().all())
    # of equal denominators it is the paired interval of the differences
    metrics = torch.randn(2, 12, generator=torch.Generator().manual_seed(1)).double()
    expected = paired_interval((metrics[0] - 1) / 2)
    assert float(planted(metrics=metrics).f.low[0]) == pytest.approx(float(expected.low))


def test_random_circuits_have_the_size_and_the_seed() -> None:
    model = tiny("bridge", "llama")
    scores = edge_scores(model, **PAIRS)
    options: dict[str, Any] = {"fractions": (0.1, 0.3), "draws": 3}
    first, again, other = (
        faithfulness(model, scores, **PAIRS, **options, seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(first.random, again.random)
    assert not torch.equal(first.random, other.random)
    assert first.random.shape == (3, 2, 3)
    assert first.kept.tolist() == [round(0.1 * first.total), round(0.3 * first.total)]


def test_results_come_back(tmp_path: Path) -> None:
    model = tiny("bridge", "llama")
    result = faithfulness(model, ["L0H1", "L1H2"], **PAIRS)
    stored = Faithfulness.load(result.save(tmp_path / "f.safetensors"))
    assert stored.to_dataframe().equals(result.to_dataframe())
    assert {"f", "random", "complement"} <= set(result.columns())
    assert tuple(result.to_dataframe())[:3] == ("fraction", "kept", "f")
    assert result.to_dataframe().fraction.tolist() == result.fractions.tolist() == [2 / 8]
    row = result.to_dataframe().iloc[0]
    for of, draws in (
        ("random", result.random_f),
        ("random_complement", result.random_completeness),
    ):
        ends = [float(x) for x in (draws.min(), draws.mean(), draws.max())]
        assert ends == [row[f"{of}_low"], row[of], row[f"{of}_high"]]
        assert ends[0] < ends[2]


def test_what_cannot_be_run_is_refused() -> None:
    model = tiny("bridge", "llama")
    scores = edge_scores(model, **PAIRS)
    with pytest.raises(GeometryError, match="scores of this model's edges"):
        faithfulness(tiny("bridge", "gpt2"), scores, **PAIRS)
    with pytest.raises(GeometryError, match="edges of this model"):
        faithfulness(model, ["L1H0->L0H0<q>"], **PAIRS)
    with pytest.raises(GeometryError, match="fraction: expected a share"):
        faithfulness(model, scores, **PAIRS, fractions=[1.5])
    with pytest.raises(GeometryError, match="draws"):
        faithfulness(model, scores, **PAIRS, draws=0)
    with pytest.raises(GeometryError, match="prompts and counterfactuals differ in"):
        faithfulness(model, scores, tokens(2), tokens(2), targets=(5, 9))
    with pytest.raises(GeometryError, match="a chosen set"):
        _ = faithfulness(model, scores, **PAIRS, fractions=[0.5], draws=1).completeness


def test_circuits_are_of_edges_nodes_or_heads() -> None:
    model = tiny("bridge", "llama")
    layout, scores = EdgeLayout.of(view(model)), edge_scores(model, **PAIRS)
    nodes = faithfulness(model, scores, **PAIRS, nodes=True, fractions=(0.001, 0.5), draws=1)
    assert (nodes.unit, nodes.total, nodes.kept.tolist()) == ("nodes", 11, [1, 6])  # 5.5, to even
    assert nodes.complements is None
    # nodes kept are writers kept for whoever reads them: the two largest by hand
    two = scores.node_scores.abs().argsort(descending=True)[:2].tolist()
    names = [
        name
        for name, source in zip(layout.edge_names(), layout.ends()[0].tolist(), strict=True)
        if source in two
    ]
    by_edges = faithfulness(model, names, **PAIRS, draws=2, seed=3)
    pair = faithfulness(model, scores, **PAIRS, nodes=True, fractions=(2 / 11,), draws=1)
    assert torch.equal(pair.metrics, by_edges.metrics)
    assert (by_edges.unit, by_edges.total) == ("edges", len(layout.edge_names()))
    assert by_edges.kept.tolist() == [len(names)]
    assert (by_edges.seed, by_edges.provenance.seed) == (3, 3)
    assert by_edges.random.shape == (2, 1, 3)
    # random circuits of a chosen set and what they leave out are other runs than those of the set
    assert by_edges.random_complements is not None
    assert not torch.allclose(by_edges.random[0], by_edges.random[1], atol=1e-3)
    assert not torch.allclose(by_edges.random_complements, by_edges.random, atol=1e-3)
    single = faithfulness(model, "L1H2", **PAIRS)
    assert (single.unit, single.total, single.kept.tolist()) == ("heads", 8, [1])
    assert torch.equal(single.metrics, faithfulness(model, [(1, 2)], **PAIRS, draws=1).metrics)
    assert len(single.random) == 3
    rankings: list[dict[str, Any]] = [{"nodes": True}, {"fractions": (0.5,)}]
    for options in rankings:
        with pytest.raises(GeometryError, match="EdgeScores, which they rank, got a chosen set"):
            faithfulness(model, "L1H2", **PAIRS, **options)
    with pytest.raises(GeometryError, match="fractions: expected at least one share"):
        faithfulness(model, scores, **PAIRS, fractions=())


@pytest.mark.parametrize("gradients", [True, False])
def test_the_budget_of_a_pair_is_about_what_it_holds(gradients: bool) -> None:
    """At least the writes of both runs and their differences, with gradients also the reads and
    their gradients, and at most four times as much."""
    needed = {}
    for dtype in (torch.float32, torch.float64):
        seen = view(tiny("bridge", "llama", dtype=dtype))
        layout = EdgeLayout.of(seen)
        held = 3 * len(layout.writers) + gradients * 2 * len(layout.readers)
        for length in (12, 24):
            rows_of = pairs_per_batch(seen, layout, None, 1, gradients)
            with pytest.raises(BudgetError, match="at least") as raised:
                rows_of(length)
            needed[dtype, length] = int(str(raised.value).split("at least ")[1].split(" bytes")[0])
            least = held * length * 32 * dtype.itemsize
            assert least <= needed[dtype, length] <= 4 * least
            for budget, pairs in (
                (3 * needed[dtype, length], 3),
                (3 * needed[dtype, length] - 1, 2),
            ):
                assert pairs_per_batch(seen, layout, None, budget, gradients)(length) == pairs
                assert pairs_per_batch(seen, layout, 2, budget, gradients)(length) == 2
    assert needed[torch.float32, 24] == 2 * needed[torch.float32, 12]
    assert needed[torch.float64, 12] == 2 * needed[torch.float32, 12]
