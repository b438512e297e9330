"""Edge scores are TransformerLens's own gradients times differences of writes; integrated, they sum
to the change of the metric."""

from __future__ import annotations

import importlib
import json
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
    scores_by_hand,
)
from tests.lib.models import ARCHITECTURES, HAS_HOOKED, hf_model, loadable, tiny, tokens
from tl_geometry.base.errors import (
    BudgetError,
    GeometryError,
    ReconstructionError,
    UnsupportedModelError,
)
from tl_geometry.base.intervals import paired_interval
from tl_geometry.circuits import EdgeLayout, EdgeScores, edge_scores, faithfulness, read_mib
from tl_geometry.circuits.edge_attribution import largest
from tl_geometry.circuits.edge_pass import LiveBlock
from tl_geometry.models import from_hf, view
from tl_geometry.models.norms import NormWeights

REFUSED = ("bert", "roberta")
WAYS = [(c, a, p) for a in ARCHITECTURES for c, p in loadable(a) if (c, p) == ("bridge", False)]
WAYS += [
    (c, a, p) for a in ("gpt2", "llama", "gemma2") for c, p in loadable(a) if c == "hooked" or p
]
"""Every architecture as it is, and a few in every way."""
needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)


def matrix(scores: EdgeScores) -> Tensor:
    """Scores by reader and writer, zero where there is no edge."""
    out = torch.zeros(scores.layout.allowed.shape, dtype=torch.float64)
    out[scores.layout.allowed] = scores.scores
    return out


def close(a: Tensor, b: Tensor, rtol: float = 1e-9) -> bool:
    """Equal to rounding, relative to the largest."""
    return float((a - b).abs().max()) <= rtol * float(b.abs().max())


# ---- the pass by blocks


@pytest.mark.parametrize(("model_class", "architecture", "processed"), WAYS)
def test_every_architecture_runs_or_is_refused(
    model_class: str, architecture: str, processed: bool
) -> None:
    model = tiny(model_class, architecture, processed)
    if architecture in REFUSED:
        with pytest.raises(UnsupportedModelError, match="an encoder"):
            edge_scores(model, **PAIRS)
        return
    scores = edge_scores(model, **PAIRS, method="gradient")
    assert bool(scores.scores.isfinite().all())
    # all kept is the prompt's run and nothing kept the counterfactual's, by the model's own logits
    result = faithfulness(model, scores.names(), **PAIRS, draws=1)
    own = difference(view(model).logits(PROMPTS)).double()
    other = difference(view(model).logits(COUNTERFACTUALS)).double()
    assert torch.allclose(result.metrics[0], own, atol=1e-3)
    assert result.complements is not None
    assert torch.allclose(result.complements[0], other, atol=1e-3)
    assert float(result.f.value[0]) == pytest.approx(1, abs=1e-4)
    assert float(result.completeness.value[0]) == pytest.approx(0, abs=1e-4)


def wrong_group(block: LiveBlock, reads: Tensor, which: str) -> Tensor:
    """Keys and values handed to the heads of another group."""
    out = ENTERING(block, reads, which)
    return out if which == "q" else out.flip(2)


def no_constants(block: LiveBlock, reads: Tensor, which: str) -> Tensor:
    """Queries, keys and values without biases."""
    return ENTERING(block, reads, which) - ENTERING(block, torch.zeros_like(reads), which)


ENTERING = LiveBlock.entering


@pytest.mark.parametrize("fault", [wrong_group, no_constants])
def test_a_pass_that_is_not_the_models_is_refused(
    fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("bridge", "qwen2")
    edge_scores(model, **PAIRS, method="gradient")
    monkeypatch.setattr(LiveBlock, "entering", fault)
    with pytest.raises(ReconstructionError, match="a pass by blocks"):
        edge_scores(model, **PAIRS, method="gradient")


def test_hooks_that_change_the_model_are_refused() -> None:
    model = from_hf(hf_model("llama"), None, name="hooked-llama")
    model.add_hook("blocks.0.hook_mlp_out", lambda value, hook: 0.5 * value)
    with pytest.raises(ReconstructionError):
        edge_scores(model, **PAIRS)


# ---- gradients


@needs_hooked
@pytest.mark.parametrize("architecture", BY_HAND)
def test_scores_are_transformer_lens_own_gradients(architecture: str) -> None:
    model = hooked(architecture)
    scores = edge_scores(model, **PAIRS, method="gradient")
    expected = scores_by_hand(model)
    assert close(matrix(scores), expected * scores.layout.allowed)
    assert close(scores.node_scores, (expected * scores.layout.allowed).sum(0))


@needs_hooked
@pytest.mark.parametrize("fault", ["sign", "swapped", "norm frozen", "group"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hooked("llama")
    expected = scores_by_hand(model)
    pairs: dict[str, Any] = dict(PAIRS)
    if fault == "swapped":
        pairs |= {"prompts": COUNTERFACTUALS, "counterfactuals": PROMPTS}
    if fault == "norm frozen":
        scale = NormWeights.scale
        monkeypatch.setattr(NormWeights, "scale", lambda norm, h: scale(norm, h).detach())
    if fault == "group":  # the same values, from the inputs of the other group's readers
        monkeypatch.setattr(LiveBlock, "entering", other_reader)
    scores = matrix(edge_scores(model, **pairs, method="gradient"))
    scores = -scores if fault == "sign" else scores
    assert not close(scores, expected * (scores != 0), rtol=1e-3)


def other_reader(block: LiveBlock, reads: Tensor, which: str) -> Tensor:
    """Groups of keys and values that read each other's inputs."""
    return ENTERING(block, reads if which == "q" else reads.flip(2), which)


def node_scores_by_hand(model: Any, heads: int) -> Tensor:
    """Scores of writers as a whole: ``(z_counterfactual - z_clean) . d metric / d z``, by the
    model's own autograd."""
    layers = range(model.cfg.n_layers)
    names = ["blocks.0.hook_resid_pre"]
    for layer in layers:
        names += [f"blocks.{layer}.attn.hook_z", f"blocks.{layer}.hook_mlp_out"]
    seen: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any, name: str) -> Tensor:
        value = value.detach().requires_grad_() if name == names[0] else value
        value.retain_grad()
        seen[name] = value
        return value

    with torch.no_grad():
        there = model.run_with_cache(COUNTERFACTUALS)[1]
    with torch.enable_grad():
        hooks = [(name, partial(keep, name=name)) for name in names]
        difference(model.run_with_hooks(PROMPTS, fwd_hooks=hooks)).sum().backward()
    model.zero_grad()
    out = []
    for name in names:
        moved = (there[name] - seen[name]).detach() * seen[name].grad
        if name.endswith("hook_z"):
            moved = moved.reshape(*moved.shape[:2], heads, -1)
            out += moved.sum((0, 1, 3)).tolist()
        else:
            out.append(float(moved.sum()))
    return torch.tensor(out, dtype=torch.float64) / len(PROMPTS)


@pytest.mark.parametrize(
    "architecture", ["gpt2", "llama", "llama3-rope", "neox", "qwen3", "phi", "falcon", "mpt", "opt"]
)
def test_nodes_are_the_models_own_gradients(architecture: str) -> None:
    model = from_hf(hf_model(architecture, torch.float64), None)
    scores = edge_scores(model, **PAIRS, method="gradient")
    expected = node_scores_by_hand(model, view(model).n_heads)
    # some families compute norms or tables in float32 whatever their dtype
    assert close(scores.node_scores, expected, rtol=1e-4)
    assert not close(-scores.node_scores, expected, rtol=1e-1)


@pytest.mark.skipif(HAS_HOOKED, reason="TransformerLens 3 has no edge scores")
def test_scores_are_those_of_transformer_lens_4() -> None:
    analysis = importlib.import_module("transformer_lens.tools.analysis.attribution_patching")
    model = from_hf(hf_model("gpt2", torch.float64), None)
    ours = edge_scores(model, **PAIRS, method="gradient")
    found = matrix(ours)
    config = analysis.EdgeAttributionConfig(granularity="edge")
    expected, scored = torch.zeros_like(found), set()
    for row in range(len(PROMPTS)):
        answer, other = TARGETS[row]
        # its gradient is that of the second prompt, and its difference points to the first
        theirs = analysis.attribution_patch(
            model,
            COUNTERFACTUALS[row : row + 1],
            PROMPTS[row : row + 1],
            lambda logits, a=answer, b=other: logits[0, -1, a] - logits[0, -1, b],
            config,
        )
        for (writer, reader), score in theirs.edge_scores.items():
            at = (reader_of(ours.layout, reader), writer_of(ours.layout, writer))
            expected[at] += score / len(PROMPTS)
            scored.add(at)
    assert close(found, expected)
    assert len(scored) == len(ours.scores)


def writer_of(layout: EdgeLayout, node: Any) -> int:
    """A writer of TransformerLens's edges among ours."""
    names = {"embed": "embed", "attn_head_out": f"L{node.layer}H{node.head}"}
    return layout.writers.index(names.get(node.kind, f"mlp{node.layer}"))


def reader_of(layout: EdgeLayout, node: Any) -> int:
    """A reader of TransformerLens's edges among ours."""
    names = {"mlp_in": f"mlp{node.layer}", "logits": "output"}
    return layout.readers.index(names.get(node.kind, f"L{node.layer}H{node.head}<{node.kind[0]}>"))


# ---- integrated gradients


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "qwen2"])
def test_integrated_scores_of_the_embedding_sum_to_the_change(architecture: str) -> None:
    model = tiny("bridge", architecture, dtype=torch.float64)
    change, errors = None, []
    for steps in (1, 20, 320):
        scores = edge_scores(model, PROMPTS[:1], COUNTERFACTUALS[:1], targets=(5, 9), steps=steps)
        change = scores.counterfactual - scores.clean
        errors.append(abs(float(scores.node_scores[0]) - change) / abs(change))
    assert errors[0] > 0.05
    assert errors[2] < 0.01
    assert errors[2] < errors[1]


@pytest.mark.parametrize("steps", [1, 2, None])
def test_integrated_gradients_are_taken_in_the_middle_of_each_step(steps: int | None) -> None:
    """The model's own, five steps where no number is given."""
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    options = {} if steps is None else {"method": "integrated", "steps": steps}
    scores = edge_scores(model, PROMPTS, COUNTERFACTUALS, targets=(5, 9), **options)
    name, count = view(model).state_hooks[0], steps or 5
    clean, other = (view(model).activations(x, [name])[name] for x in (PROMPTS, COUNTERFACTUALS))
    expected = 0.0
    for m in range(count):
        first = other + (2 * m + 1) / (2 * count) * (clean - other)
        first = first.detach().requires_grad_()
        with torch.enable_grad():
            logits = model.run_with_hooks(
                PROMPTS, fwd_hooks=[(name, lambda value, hook, first=first: first)]
            )
            metric = (logits[:, -1, 5] - logits[:, -1, 9]).sum()
        (gradient,) = torch.autograd.grad(metric, first)
        expected += float(((other - clean) * gradient).sum()) / count / len(PROMPTS)
    assert float(scores.node_scores[0]) == pytest.approx(expected, rel=1e-5)
    assert scores.method == "integrated"


def test_a_small_change_is_the_sum_of_the_gradient_scores() -> None:
    hf = hf_model("llama", torch.float64)
    embedding = hf.get_input_embeddings().weight
    with torch.no_grad():
        embedding[7] = embedding[5] + 1e-5 * embedding[9]
    model = from_hf(hf, None)
    prompts = tokens(2, 8, seed=3).clamp(min=10)
    prompts[:, 3] = 5
    other = prompts.clone()
    other[:, 3] = 7
    scores = edge_scores(model, prompts, other, method="gradient", targets=(20, 30))
    change = scores.counterfactual - scores.clean
    embed = scores.layout.ends()[0] == 0
    assert float(scores.scores[embed].sum()) == pytest.approx(change, rel=1e-2)
    assert abs(change) > 1e-7


# ---- sums, intervals, positions


def test_batches_lengths_and_positions_give_the_same_sums() -> None:
    model = tiny("bridge", "llama", dtype=torch.float64)
    whole = edge_scores(model, **PAIRS)
    parts = edge_scores(model, **PAIRS, batch_size=2)
    assert close(parts.scores, whole.scores, 1e-12)
    by_position = edge_scores(model, **PAIRS, positions=True)
    assert by_position.by_position is not None
    assert by_position.by_position.shape == (len(whole.scores), PROMPTS.shape[1])
    assert close(by_position.by_position.sum(1), whole.scores, 1e-12)
    assert not close(by_position.by_position[:, :-1].sum(1), whole.scores, 1e-3)
    # pairs of two lengths in one call are the mean of both calls
    longer: dict[str, Any] = {
        "prompts": tokens(1, 12, seed=8),
        "counterfactuals": tokens(1, 12, seed=9),
    }
    alone = edge_scores(model, **longer, targets=(4, 6))
    mixed = edge_scores(
        model,
        [*PROMPTS, longer["prompts"][0]],
        [*COUNTERFACTUALS, longer["counterfactuals"][0]],
        targets=[*TARGETS, (4, 6)],
    )
    assert close(mixed.scores, (3 * whole.scores + alone.scores) / 4, 1e-12)


def test_intervals_are_those_of_the_scores_of_single_prompts() -> None:
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    prompts, other = tokens(12, 6, seed=1), tokens(12, 6, seed=2)
    scores = edge_scores(model, prompts, other, targets=(5, 9), method="gradient")
    each = [
        edge_scores(model, a[None], b[None], targets=(5, 9), method="gradient")
        for a, b in zip(prompts, other, strict=True)
    ]
    expected = paired_interval(torch.stack([x.scores for x in each]))
    table = scores.to_dataframe().set_index(["source", "target"])
    order = [tuple(name.split("->")) for name in scores.names()]
    for column, values in (("low", expected.low), ("high", expected.high)):
        assert close(torch.tensor(table.loc[order, column].to_numpy()), values, 1e-9)
    nodes = paired_interval(torch.stack([x.node_scores for x in each]))
    assert close(scores.node_errors, nodes.error, 1e-9)
    assert bool(each[0].errors.isnan().all())


def test_a_metric_of_the_user_and_the_likeliest_tokens() -> None:
    model = tiny("bridge", "llama", dtype=torch.float64)
    given = edge_scores(model, PROMPTS, COUNTERFACTUALS, targets=(5, 9))
    by_user = edge_scores(
        model, PROMPTS, COUNTERFACTUALS, lambda logits: logits[:, -1, 5] - logits[:, -1, 9]
    )
    assert close(by_user.scores, given.scores, 1e-12)
    own = [
        int(view(model).logits(rows)[:, -1].argmax(-1)[0]) for rows in (PROMPTS, COUNTERFACTUALS)
    ]
    first: dict[str, Any] = {"prompts": PROMPTS[:1], "counterfactuals": COUNTERFACTUALS[:1]}
    likeliest = edge_scores(model, **first)
    assert close(likeliest.scores, edge_scores(model, **first, targets=own).scores, 1e-12)
    assert not close(likeliest.scores, edge_scores(model, **first, targets=own[::-1]).scores, 1.0)


def test_targets_are_given_for_each_pair_or_for_all() -> None:
    model = tiny("bridge", "llama")
    score = partial(edge_scores, model, PROMPTS, COUNTERFACTUALS, method="gradient")
    for forms in (
        ((5, 9), [5, 9], torch.tensor([5, 9]), [(5, 9)] * 3, torch.tensor([[5, 9]] * 3)),
        ([(5, 9), (7, 3), (4, 6)], torch.tensor([[5, 9], [7, 3], [4, 6]])),
    ):
        first, *others = (score(targets=form).scores for form in forms)
        assert all(torch.equal(first, of) for of in others)
    for bad, text in (
        ([(5, 9), (7, 7), (4, 6)], "targets of prompt pair 1: expected two different tokens"),
        ([(5, 9), (7, 3), (4,)], "targets of prompt pair 2: expected two different tokens"),
        ([(5, 9)] * 2, r"\(answer, other\) for each of 3 prompts"),
        ([5, 9, 7], r"\(answer, other\) for each of 3 prompts"),
        (5, r"\(answer, other\) for each of 3 prompts"),
    ):
        with pytest.raises(GeometryError, match=text):
            score(targets=bad)
    with pytest.raises(GeometryError, match="metric, targets: expected one of them, got both"):
        score(lambda logits: logits[:, -1, 0], targets=(5, 9))
    with pytest.raises(GeometryError, match="metric: expected finite numbers"):
        score(lambda logits: logits[:, -1, 0] * torch.inf)
    with pytest.raises(GeometryError, match="counterfactuals: expected one for each of 3 prompts"):
        edge_scores(model, PROMPTS, COUNTERFACTUALS[:2])
    # a metric sees the logits of every position
    middle, own = score(lambda logits: logits[:, 4, 5]), view(model).logits(PROMPTS)
    assert middle.clean == pytest.approx(float(own[:, 4, 5].mean()), abs=1e-4)


def test_the_largest_edges_are_a_share_of_all_and_at_least_one() -> None:
    scores = torch.tensor([0.1, -0.5, 0.3, -0.3, 0.0, 0.2, 0.05])
    for fraction, rows in ((1e-9, [1]), (0.3, [1, 2]), (3 / 7, [1, 2, 3]), (1.0, list(range(7)))):
        assert largest(scores, fraction).nonzero()[:, 0].tolist() == rows
    for bad in (0.0, -0.1, 1.01, float("nan")):
        with pytest.raises(GeometryError, match="a share above 0, at most 1"):
            largest(scores, bad)
    found = edge_scores(tiny("bridge", "llama"), **PAIRS, method="gradient")
    names = dict(zip(found.names(), found.scores.tolist(), strict=True))
    first = sorted(names, key=lambda name: -abs(names[name]))[:4]
    assert set(found.edges(4 / len(names))) == set(first)
    assert [f"{row[0]}->{row[1]}" for row in found.rows()[:4]] == first
    nodes = dict(zip(found.layout.writers, found.node_scores.tolist(), strict=True))
    rows = found.nodes().rows()
    assert [row[:2] for row in rows] == sorted(nodes.items(), key=lambda of: -abs(of[1]))
    assert all(row[2] != row[2] for row in rows)  # three prompts have no interval
    with pytest.raises(GeometryError, match="fraction: expected a share of the edges, got none"):
        found.edges()
    assert found.provenance.contexts == 3
    assert found.provenance.sources == ("syed2023", "hanna2024")
    assert found.provenance.has_bos is False


def test_the_layout_counts_every_edge_once() -> None:
    layout = EdgeLayout(
        n_layers=2, n_heads=4, d_model=8, n_key_heads=(2, 2), mlps=("sequential", "parallel")
    )
    names = layout.edge_names()
    assert len(names) == len(set(names)) == 8 * 1 + 5 + 8 * 6 + 6 + 11
    assert "L0H3->mlp0" in names
    assert "L1H3->mlp1" not in names  # a parallel block reads before its heads write
    assert "L0H0->L1H2-3<v>" in names


# ---- files


def test_the_edge_list_comes_back(tmp_path: Path) -> None:
    model = tiny("bridge", "llama")
    scores = edge_scores(model, **PAIRS)
    path = scores.to_mib(tmp_path / "edges.json", fraction=0.1)
    stored = read_mib(model, path)
    assert torch.allclose(stored.scores, scores.scores, rtol=1e-12)
    assert torch.allclose(stored.node_scores, scores.node_scores, rtol=1e-9)
    assert stored.edges() == scores.edges(0.1)
    curve = faithfulness(model, scores, **PAIRS, fractions=[0.1], draws=1)
    chosen = faithfulness(model, stored.edges(), **PAIRS, draws=1)
    assert torch.equal(curve.metrics, chosen.metrics)
    saved = EdgeScores.load(scores.save(tmp_path / "scores.safetensors"))
    assert saved.layout == scores.layout
    assert [row[:3] for row in saved.rows()] == [row[:3] for row in scores.rows()]
    with pytest.raises(GeometryError, match="expected the edges of"):
        read_mib(tiny("bridge", "bloom6"), path)
    chosen_alone = json.loads(path.read_text())
    for edge in chosen_alone["edges"].values():
        del edge["score"]
    path.write_text(json.dumps(chosen_alone))
    assert not bool(read_mib(model, path).scores.any())
    assert read_mib(model, path).edges() == stored.edges()
    path.write_text("{}")
    with pytest.raises(GeometryError, match="expected an edge list in JSON"):
        read_mib(model, path)


def test_the_edge_list_has_the_names_of_the_benchmark(tmp_path: Path) -> None:
    import json

    scores = edge_scores(tiny("bridge", "llama"), **PAIRS)
    stored = json.loads(scores.to_mib(tmp_path / "edges.json", fraction=0.01).read_text())
    assert stored["cfg"] == {
        "n_layers": 2,
        "n_heads": 4,
        "d_model": 32,
        "parallel_attn_mlp": False,
    }
    assert set(stored["nodes"]) == {
        "input",
        "logits",
        *(f"a{l}.h{h}" for l in range(2) for h in range(4)),
        "m0",
        "m1",
    }
    # heads 0 and 1 share a key: each has half of the score
    shared = dict(zip(scores.names(), scores.scores.tolist(), strict=True))["embed->L0H0-1<k>"]
    for head in (0, 1):
        assert stored["edges"][f"input->a0.h{head}<k>"]["score"] == pytest.approx(shared / 2)
    # writers: 1, then 4 heads and an MLP per block; 12 readers per head layer once ungrouped
    assert len(stored["edges"]) == 12 * 1 + 5 + 12 * 6 + 10 + 11
    marked = [name for name, edge in stored["edges"].items() if edge["in_graph"]]
    assert 0 < len(marked) < len(stored["edges"])
    for name in marked:
        writer, reader = name.split("->")
        assert stored["nodes"][writer]["in_graph"]
        assert stored["nodes"][reader.split("<")[0]]["in_graph"]


# ---- refusals


def test_what_cannot_be_scored_is_refused() -> None:
    model = tiny("bridge", "llama")
    with pytest.raises(GeometryError, match=r"prompt pair 1 .* equal token length, got 10 and 9"):
        edge_scores(
            model, list(PROMPTS), [COUNTERFACTUALS[0], COUNTERFACTUALS[1, 1:], COUNTERFACTUALS[2]]
        )
    with pytest.raises(GeometryError, match=r"targets of prompt pair 0 .* after both"):
        edge_scores(model, PROMPTS, PROMPTS)
    with pytest.raises(GeometryError, match="one number for each of 3 prompts"):
        edge_scores(model, PROMPTS, COUNTERFACTUALS, lambda logits: logits.sum())
    with pytest.raises(GeometryError, match="a differentiable function"):
        edge_scores(model, PROMPTS, COUNTERFACTUALS, lambda logits: logits[:, -1, 0].detach())
    with pytest.raises(BudgetError, match="memory_budget"):
        edge_scores(model, **PAIRS, memory_budget=1000)


def test_a_run_under_inference_mode_and_gradients_off() -> None:
    model = tiny("bridge", "llama")
    expected = edge_scores(model, **PAIRS, method="gradient").scores
    with torch.no_grad():
        assert torch.equal(edge_scores(model, **PAIRS, method="gradient").scores, expected)
    assert all(p.grad is None for p in model.parameters())
