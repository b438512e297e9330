"""The reference's circuits keep the laws that the library promises: the graph of a logit, the graph
between two runs, edge scores, patched runs, edited scores."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from tests.lib.frozen_hf import frozen_run
from tests.lib.kinds import HEADS, KINDS, OTHERS, PROMPTS, basis, decoder, far, run
from tests.lib.reference import contrast, edits, graph, scores
from tests.lib.reference.decoder import Run

every_kind = pytest.mark.parametrize("kind", KINDS)
ANSWERS, RIVALS = torch.tensor([5, 7, 11]), torch.tensor([9, 3, 40])
METRIC = edits.logit_difference(list(zip(ANSWERS.tolist(), RIVALS.tolist())))


# ---- the graph of a logit


@every_kind
@pytest.mark.parametrize("follow", [False, True])
def test_adjoints_are_gradients_of_hugging_faces_frozen_code(kind: str, follow: bool) -> None:
    theirs = frozen_run(kind, PROMPTS[:1], follow=follow)
    ours = graph.Graph.of(decoder(kind), PROMPTS[:1], 5, 9, position=7)
    target = theirs.logits[0, 7, 5] - theirs.logits[0, 7, 9]
    target.backward()
    assert far(ours.value, target.detach()) < 1e-12
    adjoints = ours.following if follow else ours.frozen
    for layer in range(2):
        grads = [x[layer].grad for x in (theirs.stream, theirs.mixed)]
        expected = [torch.zeros_like(theirs.stream[0]) if g is None else g for g in grads]
        assert far(adjoints["state", layer], expected[0]) < 1e-11
        assert far(adjoints["z", layer].flatten(2), expected[1]) < 1e-11
        if follow:  # theirs is at the score behind a soft cap
            block, entered = decoder(kind).blocks[layer], theirs.scores[layer]
            cap = block.softcap
            slope = 1.0 if cap is None else 1 - (block.cap(ours.run["scores", layer]) / cap) ** 2
            assert entered.grad is not None
            assert far(adjoints["scores", layer], entered.grad * slope) < 1e-11


@every_kind
@pytest.mark.parametrize("mlp_leaf", [False, True])
def test_a_graph_sums_to_its_logit_and_edges_to_their_nodes(kind: str, mlp_leaf: bool) -> None:
    found = graph.Graph.of(decoder(kind), PROMPTS[:1], 5, 9, 7, mlp_leaf=mlp_leaf)
    values, bound = (
        found.values(),
        1e-12 * sum(float(x.abs().sum()) for x in found.values().values()),
    )
    names = [*found.leaves(), *(["mlp0", "mlp1"] if mlp_leaf else [])]
    total = sum(float(values[name].sum()) for name in names) + float(values["constants"])
    logits = run(kind)["raw_logits", 0][0, 7]
    assert found.value == pytest.approx(float(logits[5] - logits[9]), abs=bound)
    assert total == pytest.approx(found.value, abs=bound)
    out = {name: torch.zeros(10, dtype=torch.float64) for name in values if name != "constants"}
    for layer, head in HEADS:
        edges = found.into_head(layer, head)
        assert float((edges.value.sum((1, 2)) - values[f"L{layer}H{head}"]).abs().max()) < bound
        response = found.response(layer, head)
        both = (response * _without_alibi(found, layer, head)).sum(-1)
        assert float((edges.query.sum(1) - both).abs().max()) < 10 * bound
        assert float((edges.key.sum((1, 2)) - both).abs().max()) < 10 * bound
        for at, name in enumerate(edges.names[:-1]):
            out[name] += edges.value[:, at].sum(0)
    for layer in [] if mlp_leaf else range(2):
        names, weights = found.into_mlp(layer)
        assert float((weights.sum(1) - values[f"mlp{layer}"]).abs().max()) < bound
        for at, name in enumerate(names[:-1]):
            out[name] += weights[:, at]
    names, weights = found.into_logit()
    assert float(weights.sum()) == pytest.approx(found.value, abs=bound)
    for at, name in enumerate(names[:-1]):
        out[name][7] += weights[at]
    assert max(float((out[name] - values[name]).abs().max()) for name in out) < bound
    assert float(found.moved()["L0H1"].abs().max()) > 1e6 * bound  # patterns are followed
    assert float(found.moved()["L1H1"].abs().max()) < bound  # none is behind the last block


def _without_alibi(found: graph.Graph, layer: int, head: int) -> Tensor:
    total, alibi = found.run["scores", layer][0, head], found.decoder.alibi(10)
    return total if alibi is None else total - alibi[head]


# ---- the graph between two runs


@cache
def between(kind: str) -> contrast.Contrast:
    return contrast.contrast(decoder(kind), PROMPTS, OTHERS, ANSWERS, RIVALS, capped=True)


@every_kind
def test_a_contrast_sums_to_the_difference_and_edges_to_their_nodes(kind: str) -> None:
    found, nodes = between(kind), between(kind).nodes()
    there = decoder(kind).run(OTHERS)["logits", 0]
    difference = METRIC(run(kind)["logits", 0]) - METRIC(there)
    bound = 1e-12 * sum(float(x.abs().sum()) for x in nodes.values())
    for value in (found.value, nodes["embed"].sum(-1)):
        assert float((value - difference).abs().max()) < bound
    assert float(difference.abs().min()) > 1e6 * bound
    out = {name: torch.zeros_like(value) for name, value in nodes.items()}
    for reader in found.adjoints:
        layer = 2 if reader == "output" else int(reader[1 if reader[0] == "L" else 3])
        for writer in contrast.seen_by(decoder(kind), layer, mlp=reader[0] == "m"):
            out[writer] += found.edge(writer, reader)
    assert max(float((out[name] - nodes[name]).abs().max()) for name in nodes) < bound
    for layer, head in HEADS:
        edges = found.into_head(layer, head)
        total = edges.value.sum((1, 2)) + edges.query.sum(1) + edges.key.sum((1, 2))
        assert float((total - nodes[f"L{layer}H{head}"][0]).abs().max()) < bound
    for layer in range(2):
        seen = contrast.seen_by(decoder(kind), layer, mlp=True)
        total = torch.stack([found.edge(writer, f"mlp{layer}") for writer in seen]).sum(0)
        assert float((total - nodes[f"mlp{layer}"]).abs().max()) < bound
    # before the two prompts differ there is nothing
    assert not any(value[:, :2].any() for value in nodes.values())


@every_kind
def test_a_contrast_turns_its_sign_with_the_prompts_and_vanishes_between_equal_ones(
    kind: str,
) -> None:
    model, nodes = decoder(kind), between(kind).nodes()
    turned = contrast.contrast(model, OTHERS, PROMPTS, ANSWERS, RIVALS, capped=True).nodes()
    assert max(far(-turned[name], nodes[name]) for name in nodes) < 1e-11
    same = contrast.contrast(model, PROMPTS, PROMPTS, ANSWERS, RIVALS)
    assert not any(value.any() for value in same.nodes().values())


# ---- edited runs


@every_kind
def test_edge_scores_are_directional_derivatives(kind: str) -> None:
    model, layout = decoder(kind), edits.Layout.of(decoder(kind))
    found = edits.edge_scores(model, PROMPTS, OTHERS, METRIC).sum(1)
    change = edits.written(model, model.run(OTHERS)) - edits.written(model, run(kind))
    for writer, reader in (("embed", "L0H1<q>"), ("L0H2", "mlp1"), ("mlp0", "output")):
        w, r = layout.writers.index(writer), layout.readers.index(reader)
        key, at = layout.inputs[r]
        metrics = []
        for step in (1e-4, -1e-4):

            def moved(
                value: Tensor, run: Run, step: float = step, w: int = w, at: int = at
            ) -> Tensor:
                value = value.clone()
                value[:, :, at] += step * change[w]
                return value

            metrics.append(METRIC(model.run(PROMPTS, {key: moved})["logits", 0]))
        assert far((metrics[0] - metrics[1]) / 2e-4, found[:, r, w]) < 1e-5


@every_kind
def test_pruned_runs_have_their_ends(kind: str) -> None:
    model, layout = decoder(kind), edits.Layout.of(decoder(kind))
    kept = edits.pruned(model, PROMPTS, OTHERS, layout.allowed)["logits", 0]
    none = edits.pruned(model, PROMPTS, OTHERS, torch.zeros_like(layout.allowed))["logits", 0]
    assert far(kept, run(kind)["logits", 0]) < 1e-11
    assert far(none, model.run(OTHERS)["logits", 0]) < 1e-11
    assert edits.areas([0.5], [1.0]) == pytest.approx((0.75, 0.25))


@every_kind
def test_a_head_patched_into_all_that_read_it_is_knocked_out(kind: str) -> None:
    model, layout = decoder(kind), edits.Layout.of(decoder(kind))
    new = {(0, 2): run(kind)["z", 0][:, :, 2].mean(0)}
    out = model.run(PROMPTS, edits.knockout(model, new))["logits", 0]
    readers = [name for name, seen in zip(layout.readers, layout.seen) if seen > 3]
    whole = edits.path_patch(model, PROMPTS, new, readers)["logits", 0]
    assert far(whole, out) < 1e-11
    part = edits.path_patch(model, PROMPTS, new, readers[:1])["logits", 0]
    assert far(part, out) > 1e-6


@every_kind
def test_an_edge_taken_out_takes_its_terms_out_of_the_scores(kind: str) -> None:
    model, seen = decoder(kind), run(kind)
    written = scores.writers(model, seen, 1)
    terms = scores.terms(model, seen, 1, written)
    for which, side in (("q", 0), ("k", 1)):
        hooks = edits.edit_edge(model, seen, 1, [1, 3], which, -written["L0H2"])
        edited = model.run(PROMPTS, hooks)["scores", 1]
        gone = torch.stack([x for term, x in terms.items() if term[side] == "L0H2"]).sum(0)
        assert far(edited[:, [1, 3]], (seen["scores", 1] - gone)[:, [1, 3]]) < 1e-11
        assert far(edited[:, [0, 2]], seen["scores", 1][:, [0, 2]]) < 1e-11


@every_kind
def test_terms_removed_and_kept_make_up_the_scores(kind: str) -> None:
    model, mean_pos = decoder(kind), basis(kind, 1)
    names = [("cvec", "cvec"), ("pos", "cvec")]
    kept_names = [("cvec", "pos"), ("pos", "pos")]
    kept_names += [("alibi", "alibi")] if model.slopes is not None else []
    edited = [
        model.run(PROMPTS, edits.edit_terms(model, 1, [2], mean_pos, change))["scores", 1]
        for change in (edits.removing(*names), edits.keeping(*kept_names))
    ]
    assert far(edited[0][:, 2], edited[1][:, 2]) < 1e-11
    assert far(edited[0][:, 2], run(kind)["scores", 1][:, 2]) > 1e-3
    assert far(edited[0][:, :2], run(kind)["scores", 1][:, :2]) < 1e-11
    averaged = edits.edit_terms(model, 1, [2], mean_pos, edits.averaging(*names))
    swapped = edits.edit_terms(model, 1, [2], mean_pos, edits.swapping([1, 2, 0], *names))
    means = [model.run(PROMPTS, hooks)["scores", 1][:, 2].mean(0) for hooks in (averaged, swapped)]
    for mean in means:  # neither changes the mean over prompts
        assert far(mean, run(kind)["scores", 1][:, 2].mean(0)) < 1e-11
