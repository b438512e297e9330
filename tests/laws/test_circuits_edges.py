"""Edges of the live model: scores are the reference's, contrast sums, and pruned runs have their
ends."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import tl_geometry as tlg
from tests.lib.double import InDouble, double_hf, exact
from tests.lib.kinds import KINDS, OTHERS, PROMPTS, decoder, far
from tests.lib.models import HAS_HOOKED, bridge_of, tiny, tiny_hooked, tokens
from tests.lib.reference import contrast as reference
from tests.lib.reference import edits
from tl_geometry.circuits.scored_edges import largest

ANSWERS = [(5, 9), (7, 3), (11, 40)]
METRIC = edits.logit_difference(ANSWERS)
MORE = ("neox", "qwen3", "olmo2-grouped", "falcon-alibi", "opt")
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def scored(kind: str, method: str = "contrast") -> Any:
    with InDouble():
        return tlg.edge_scores(
            exact(kind), PROMPTS, counterfactual=OTHERS, answer=ANSWERS, method=method, steps=3
        )


def by_reader(scores: Any) -> Tensor:
    """Scores as a matrix of readers and writers."""
    sources, targets = scores.layout.ends()
    found = torch.zeros(scores.layout.allowed.shape, dtype=torch.float64)
    found[targets, sources] = scores.scores
    return found


@every_kind
def test_contrast_is_the_references(kind: str) -> None:
    found = scored(kind)
    answers, rivals = (torch.tensor(side) for side in zip(*ANSWERS))
    right = reference.contrast(decoder(kind), PROMPTS, OTHERS, answers, rivals, capped=True)
    matrix, layout = by_reader(found), found.layout
    groups = {name: name.split("<")[0] for name in layout.readers}
    for r, reader in enumerate(layout.readers):
        heads = groups[reader]
        if "-" in heads:  # the input of a group is that of all its heads
            layer, (first, last) = heads.split("H")[0], map(int, heads.split("H")[1].split("-"))
            names = [f"{layer}H{h}<{reader[-2]}>" for h in range(first, last + 1)]
        else:
            names = [reader]
        for w, writer in enumerate(layout.writers):
            if layout.allowed[r, w]:
                wanted = sum(right.edge(writer, name).sum(1).mean() for name in names)
                assert matrix[r, w] == pytest.approx(
                    float(wanted), abs=1e-9 * float(matrix.abs().sum())
                )


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_contrast_sums_to_the_difference_of_the_metric(kind: str) -> None:
    found = scored(kind)
    size = float(found.node_scores.abs().sum())
    assert float(found.node_scores[0]) == pytest.approx(
        found.clean - found.counterfactual, abs=1e-9 * size
    )
    into, allowed = by_reader(found), found.layout.allowed
    for reader in ("mlp1", "output"):  # what enters an MLP is what leaves it
        at = found.layout.readers.index(reader)
        total = float(into[at][allowed[at]].sum())
        wanted = found.clean - found.counterfactual
        if reader == "mlp1":
            wanted = float(found.node_scores[found.layout.writers.index("mlp1")])
        assert total == pytest.approx(wanted, abs=1e-9 * size)
    gradient = scored(kind, "gradient")
    assert far(gradient.node_scores[0], found.node_scores[0]) > 1e-3  # which does not sum


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_contrast_sums_for_a_metric_that_is_not_linear(kind: str) -> None:
    options: dict[str, Any] = {"metric": lambda logits: logits.softmax(-1)[:, -1, 5]}
    with InDouble():
        found = tlg.edge_scores(exact(kind), PROMPTS, counterfactual=OTHERS, **options)
    assert far(found.node_scores[0], found.clean - found.counterfactual) < 1e-6


WITHOUT = "TransformerLens 4 has no HookedTransformer"
NORMLESS = pytest.param("no norm", marks=pytest.mark.skipif(not HAS_HOOKED, reason=WITHOUT))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", NORMLESS])
def test_near_prompts_have_the_gradients_scores(kind: str) -> None:
    """Token 60 becomes a neighbour of token 4, at a distance that shrinks tenfold."""
    ids, near, errors = PROMPTS.clone(), PROMPTS.clone(), []
    ids[:, 3], near[:, 3] = 4, 60
    for distance in (1e-3, 1e-4):
        with InDouble():
            if kind == "no norm":
                model = tiny_hooked(normalization_type=None, dtype=torch.float64)
                embed = model.W_E.data
            else:
                hf = double_hf(kind)
                embed = hf.get_input_embeddings().weight.data
                model = bridge_of(hf, name=f"near-{kind}-{distance}")
            embed[60] = embed[4] + distance * embed[5]
            scores = [
                tlg.edge_scores(model, ids, counterfactual=near, answer=ANSWERS, method=method)
                for method in ("contrast", "gradient")
            ]
        errors.append(far(scores[0].scores, scores[1].scores))
    assert errors[0] < 0.05
    assert errors[1] < 0.2 * errors[0]


@pytest.mark.parametrize("method", ["contrast", "gradient"])
def test_pairs_of_any_lengths_and_batches_give_the_same_means(method: str) -> None:
    model = tiny("bridge", "llama")
    rows, others = (
        [row[: 9 - i % 2] for i, row in enumerate(tokens(10, 9, seed=seed))] for seed in (1, 2)
    )
    options: dict[str, Any] = {"answer": (5, 9), "method": method}
    whole = tlg.edge_scores(model, rows, counterfactual=others, **options)
    split = tlg.edge_scores(model, rows, counterfactual=others, batch_size=1, **options)
    each = [
        tlg.edge_scores(model, a[None], counterfactual=b[None], **options)
        for a, b in zip(rows, others)
    ]
    for found in (split.scores, torch.stack([x.scores for x in each]).mean(0)):
        assert float((found - whole.scores).abs().max()) < 1e-5 * float(whole.scores.abs().max())
    asked = [[model(x[None])[0, -1].argmax() for x in side] for side in (rows, others)]
    own = tlg.edge_scores(model, rows, counterfactual=others, method=method)
    answers: dict[str, Any] = {"answer": torch.tensor(asked).T}
    named = tlg.edge_scores(model, rows, counterfactual=others, **options | answers)
    assert torch.equal(own.scores, named.scores), "what each run says most by default"
    few = tlg.edge_scores(model, rows[:9], counterfactual=others[:9], **options)
    assert few.errors.isnan().all()  # nine pairs have no standard error, ten have
    nodes = torch.stack([x.node_scores for x in each]).numpy()
    low, high = stats.t.interval(0.95, 9, nodes.mean(0), stats.sem(nodes))
    table = whole.nodes().df.set_index("writer").loc[list(whole.layout.writers)]
    for column, wanted in (("low", low), ("high", high)):
        assert table[column].to_numpy() == pytest.approx(wanted, rel=1e-3, abs=1e-5)


@every_kind
def test_circuits_are_the_references_pruned_runs(kind: str) -> None:
    scores, model = scored(kind), decoder(kind)
    options: dict[str, Any] = {"counterfactual": OTHERS, "answer": ANSWERS, "draws": 2}
    options["fractions"] = (0.05, 0.3, 1.0)
    with InDouble():
        found = tlg.faithfulness(exact(kind), PROMPTS, scores, **options)
    kept = []
    for fraction in (0.05, 0.3, 1.0):
        mask = scores.layout.kept(largest(scores.scores, fraction))
        kept.append(METRIC(edits.pruned(model, PROMPTS, OTHERS, mask)["logits", 0]))
    clean, other = (METRIC(model.run(rows)["logits", 0]) for rows in (PROMPTS, OTHERS))
    assert far(found.metrics, torch.stack(kept)) < 1e-9
    assert far(found.clean, clean) < 1e-9
    assert far(found.counterfactual, other) < 1e-9
    f = edits.faithfulness(torch.stack(kept), clean, other)
    assert far(found.f.value, f) < 1e-9
    assert float(found.f.value[-1]) == pytest.approx(1.0, abs=1e-9)
    fractions = found.fractions.tolist()
    areas = edits.areas(fractions, f.tolist())
    assert (float(found.cpr.value), float(found.cmd.value)) == pytest.approx(areas, abs=1e-9)


def test_a_chosen_set_of_heads_keeps_embedding_and_mlps() -> None:
    model, layout = tiny("bridge", "gpt2"), scored("gpt2").layout
    options: dict[str, Any] = {"counterfactual": OTHERS, "answer": ANSWERS, "draws": 2}
    heads = tlg.faithfulness(model, PROMPTS, ["L0H1", (1, 2)], **options)
    kept = {"embed", "L0H1", "L1H2", "mlp0", "mlp1"}
    edges = [name for name in layout.edge_names() if name.split("->")[0] in kept]
    same = tlg.faithfulness(model, PROMPTS, edges, **options)
    assert far(heads.metrics, same.metrics) < 1e-5
    assert far(heads.metrics, heads.clean) > 1e-2
    assert heads.unit == "heads"
    everything = tlg.faithfulness(model, PROMPTS, list(layout.edge_names()), **options)
    assert float(everything.f.value) == pytest.approx(1.0, abs=1e-4)
