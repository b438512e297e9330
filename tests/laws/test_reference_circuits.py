"""The reference's circuits keep the laws that the library promises: edge scores, patched runs,
edited scores. Its graphs need none of their own: the library's equal them, and keep the laws of
sums (test_circuits_graph) beside the autograd of Hugging Face's code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.lib.kinds import KINDS, OTHERS, PROMPTS, basis, decoder, far, run
from tests.lib.reference import edits, scores
from tests.lib.reference.decoder import Run

every_kind = pytest.mark.parametrize("kind", KINDS)
ANSWERS, RIVALS = torch.tensor([5, 7, 11]), torch.tensor([9, 3, 40])
METRIC = edits.logit_difference(list(zip(ANSWERS.tolist(), RIVALS.tolist())))


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
