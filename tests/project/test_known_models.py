"""Models whose circuit is known do what they say: planted heads attend where they should, planted
edges (and no other) carry the next token, and trained models have learnt induction."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.known_judging import exact_effects
from benchmarks.known_models import (
    POSITIONS,
    KnownModel,
    known,
    planted,
    planted_circuit,
    planted_heads,
    trained,
)
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.rows import causal_mask, row_center
from tl_geometry.models import view

BOTH = pytest.mark.parametrize("positions", POSITIONS)


def pattern(truth: KnownModel, tokens: Tensor, layer: int = 0) -> Tensor:
    return truth.model.run_with_cache(tokens)[1]["pattern", layer]


def scores_of(truth: KnownModel, tokens: Tensor) -> Tensor:
    """Row-centred logarithms of the first layer's patterns (position 0 apart)."""
    return row_center(pattern(truth, tokens).clamp(min=1e-30).log(), causal_mask(tokens.shape[1]))[
        ..., 1:, 1:
    ]


@BOTH
def test_planted_scores_depend_on_what_they_say_and_on_nothing_else(positions: str) -> None:
    """Two prompts that agree in it have the same scores; twins differ in it."""
    truth = known("heads", seed=1, positions=positions)
    a, b = (truth.random_tokens(8, seed=seed) for seed in (1, 2))
    inside = causal_mask(truth.length - 1)

    def centred(tokens: Tensor) -> Tensor:
        return row_center(scores_of(truth, tokens), inside)

    at, other = centred(a), centred(b)
    turned = centred(torch.cat([a[:, :1], a[:, 1:].roll(1, 1)], 1))
    moved = torch.zeros_like(at)
    moved[..., 1:, 1:] = row_center(at[..., :-1, :-1], inside[1:, 1:])
    for (_, head), does in truth.does.items():
        size = float(at[:, head].abs().max())
        by_tokens = float((at[:, head] - other[:, head]).abs().max())
        if does in ("uniform", "query"):
            assert size < 0.02, does
            continue
        assert size > 1, does
        if truth.labels[0, head] == "position":
            assert by_tokens < 1e-3, does
        else:
            assert by_tokens > 1, does
        if truth.labels[0, head] == "content" or does == "token":
            # keys and queries one place on, over the keys that both have
            after = row_center(turned[:, head, 1:, 1:], inside[1:, 1:])
            assert float((after - moved[:, head, 1:, 1:]).abs().max()) < 0.02 * size, does
        if does == "relation":
            after = row_center(turned[:, head, 1:, 1:], inside[1:, 1:])
            assert float((after - moved[:, head, 1:, 1:]).abs().max()) > 1, "the twin"


@BOTH
@pytest.mark.parametrize("name", ["heads", "retrieval", "circuit"])
def test_the_final_norm_of_planted_models_scales_nothing(name: str, positions: str) -> None:
    norm = view(known(name, seed=1, positions=positions).model).final_norm()
    assert norm is not None
    assert torch.equal(norm.gain, torch.ones_like(norm.gain))


@BOTH
def test_planted_heads_attend_where_they_should(positions: str) -> None:
    for seed in (0, 4):
        truth = known("heads", seed=seed, positions=positions)
        tokens = truth.random_tokens(16, seed=3)
        by_name = {does: pattern(truth, tokens)[:, head] for (_, head), does in truth.does.items()}
        assert truth.offset is not None
        rows = range(truth.offset + 2, truth.length)
        peak = by_name["offset"][:, list(rows), 2:].argmax(-1) + 2
        assert bool((peak == torch.tensor(rows) - truth.offset).all())
        equal = (tokens[:, :, None] == tokens[:, None]) & causal_mask(truth.length)
        on_equal = (by_name["identity"] * equal).sum(-1)[:, 1:].mean()
        evenly = (by_name["uniform"] * equal).sum(-1)[:, 1:].mean()
        assert float(on_equal) > 0.7 > 3 * float(evenly)
        last = by_name["uniform"][:, -1]
        assert float((last - 1 / truth.length).abs().max()) < 1e-6


@BOTH
def test_retrieval_heads_read_the_attributes_that_they_say(positions: str) -> None:
    """Another colour of one key changes the heads that read colours, and no other; shapes alike."""
    truth = known("retrieval", seed=2, positions=positions)
    tokens = truth.random_tokens(16, seed=1)
    tokens[:, 5] = 5
    before = pattern(truth, tokens)
    for changed, token in (("colour", 9), ("shape", 6)):
        others = tokens.clone()
        others[:, 5] = token
        differs = (pattern(truth, others) - before)[:, :, 6:].abs().amax((0, 2, 3))
        for (_, head), does in truth.does.items():
            reads = does in ("retrieval", changed)
            assert float(differs[head]) > 0.1 if reads else float(differs[head]) < 1e-4, does
    equal = (tokens[:, :, None] == tokens[:, None]) & causal_mask(truth.length)
    ((_, head),) = truth.heads("retrieval")
    assert float((before[:, head] * equal).sum(-1)[:, 1:].mean()) > 0.6


def test_two_reasons_have_equal_energy() -> None:
    """By drawing tokens, not by the formula that sets it."""
    kernel = planted_heads.offsets(2)
    ratio = planted_heads.balance(kernel)
    tokens = torch.randint(
        1, planted.VOCAB, (4000, planted.LENGTH - 1), generator=torch.Generator().manual_seed(0)
    )
    equal = (tokens[:, :, None] == tokens[:, None]).double() * ratio
    allowed = causal_mask(planted.LENGTH - 1)
    energy = row_center(equal, allowed).square().sum((1, 2)).mean()
    wanted = row_center(kernel[1:, 1:].double(), allowed).square().sum()
    assert abs(float(energy / wanted) - 1) < 0.02


@BOTH
@pytest.mark.parametrize("name", ["circuit", "idle"])
@pytest.mark.nightly
def test_planted_edges_and_no_other_carry_the_next_token(name: str, positions: str) -> None:
    """One edge at a time from the counterfactual, in live runs."""
    truth = known(name, seed=2, positions=positions)
    for changed in ("all", "last"):
        pairs = truth.pairs(4, changed=changed, seed=1)
        assert bool((truth.model(pairs.prompts)[:, -1].argmax(-1) == pairs.targets[:, 0]).all())
        names, effects = exact_effects(truth.model, pairs)
        assert truth.edges[changed] < set(names)
        for name, effect in zip(names, effects.tolist(), strict=True):
            needed = name in truth.edges[changed]
            assert effect > 0.3 if needed else abs(effect) < 0.05, (name, effect)


def test_a_head_reads_what_the_planted_pairs_say() -> None:
    truth = known("circuit", seed=5)
    does = {f"L{layer}H{head}": what for (layer, head), what in truth.does.items()}
    named = {(does[a], does[b], side) for a, b, side in truth.head_pairs}
    assert named == {
        ("previous", "induction", "key"),
        ("second", "decoy", "key"),
        ("itself", "decoy", "key"),
        ("previous", "match", "value"),
        ("even", "even", "value"),
    }


@BOTH
def test_idle_heads_write_next_to_nothing(positions: str) -> None:
    """And attend and are connected as they are in the twin, where they write."""
    tokens, sizes = known("circuit").random_tokens(8), {}
    for name in ("circuit", "idle"):
        truth = known(name, seed=2, positions=positions)
        cache = truth.model.run_with_cache(tokens)[1]
        weights = view(truth.model).weights(0).W_O
        writes = torch.einsum("bihe,hed->hbid", cache["blocks.0.attn.hook_z"], weights)
        norms = writes.square().sum(-1).mean((1, 2)).sqrt()
        sizes[name] = {truth.does[0, head]: float(x) for head, x in enumerate(norms)}
    assert sizes["idle"]["idle"] < 0.1 < 0.4 < min(sizes["circuit"].values())
    assert sizes["idle"]["previous"] > 1


@BOTH
@pytest.mark.parametrize("seed", trained.SEEDS)
def test_a_trained_mlp_adds(positions: str, seed: int) -> None:
    """With its mean in place of what it writes sums are no better than guessed; the twin: with what
    it writes they are right. Without what an attention head brings there is nothing to add."""
    truth = known("sum", seed=seed, positions=positions)
    tokens, counted = trained.sums(200, torch.Generator().manual_seed(11))
    replaced = lambda value, hook: value.mean((0, 1), keepdim=True).expand_as(value)

    def right(*hooks: str) -> float:
        with torch.no_grad(), truth.model.hooks(fwd_hooks=[(name, replaced) for name in hooks]):
            hits = truth.model(tokens)[:, :-1].argmax(-1) == tokens[:, 1:]
        return float(hits[counted[:, 1:]].double().mean())

    assert right() > 0.99
    assert right("blocks.0.hook_mlp_out") < 0.3
    assert right("blocks.0.hook_attn_out") < 0.2
    assert truth.heads("summand")


@pytest.mark.parametrize("changed", ["all", "key"])
def test_pairs_of_sums_have_other_targets(changed: str) -> None:
    truth = known("sum")
    prompts, others, targets = truth.pairs(64, changed=changed, seed=3)
    assert bool((targets[:, 0] != targets[:, 1]).all())
    for rows, target in ((prompts, targets[:, 0]), (others, targets[:, 1])):
        key, last = rows[:, 1] - 1 - trained.DIGITS, rows[:, 1 + trained.SUMMED] - 1
        assert torch.equal(target, 1 + (key + last) % trained.DIGITS)
    differ = (prompts != others).double().mean(0)
    alone = [float(place == 1) for place in range(prompts.shape[1])]
    assert differ.tolist() == (alone if changed == "key" else [0.0] + [1.0] * (len(alone) - 1))
    with pytest.raises(GeometryError, match="key"):
        truth.pairs(2, changed="last")


@BOTH
@pytest.mark.parametrize("seed", trained.SEEDS)
def test_trained_circuits_have_learnt_induction(positions: str, seed: int) -> None:
    truth = known("induction", seed=seed, positions=positions)
    tokens, counted = trained.repeats(32, torch.Generator().manual_seed(11))
    with torch.no_grad():
        losses = F.cross_entropy(truth.model(tokens)[:, :-1].mT, tokens[:, 1:], reduction="none")
    assert float(losses[counted[:, 1:]].mean()) < 0.35
    assert float(losses[~counted[:, 1:]].mean()) > math.log(truth.vocab) - 0.5, "unpredictable"
    assert truth.heads("offset")
    assert truth.heads("induction")
    assert all(layer == 0 for layer, _ in truth.heads("offset"))
    assert all(layer == 1 for layer, _ in truth.heads("induction"))


def test_the_stored_weights_are_small_and_what_the_trainer_makes_begins_alike() -> None:
    at = itertools.product(trained.TASKS, POSITIONS, trained.SEEDS)
    assert sum(trained.path(*place).stat().st_size for place in at) < 2**20
    first, second = (trained.new_model("sum", "rotary", 0) for _ in range(2))
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    other = trained.new_model("sum", "rotary", 1).lm_head.weight
    assert not torch.equal(first.lm_head.weight, other)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("bracket", {}, "heads"),
        ("heads", {"positions": "alibi"}, "rotary"),
        ("induction", {"seed": 3}, "which are stored"),
        ("circuit", {"seed": -1}, "seed"),
    ],
)
def test_what_is_not_known_is_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(GeometryError, match=says):
        known(name, **options)


@pytest.mark.parametrize("name", ["circuit", "idle"])
def test_every_head_that_chooses_keys_has_a_label(name: str) -> None:
    truth = known(name)
    # where heads are idle, the block that the decoy reads is empty
    even = {"even", "idle", "decoy"} if name == "idle" else {"even"}
    assert set(truth.labels) == {head for head, does in truth.does.items() if does not in even}


def test_an_unknown_change_of_the_prompts_and_no_rows_are_refused() -> None:
    truth = known("circuit")
    with pytest.raises(GeometryError, match="last"):
        truth.pairs(2, changed="first")
    for ask in (truth.pairs, truth.random_tokens):
        with pytest.raises(GeometryError, match="at least 1, got 0"):
            ask(0)


def test_seeds_change_what_is_random() -> None:
    one, same, other = (planted_heads.planted_heads("learned", seed) for seed in (0, 0, 1))
    assert all(one[1][name] == same[1][name] for name in ("does", "offset"))
    weights = [x[0].transformer.h[0].attn.c_attn.weight for x in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    does = [planted_circuit.planted_circuit("learned", seed)[1]["does"] for seed in (0, 3)]
    assert does[0] != does[1]


@pytest.mark.parametrize("name", sorted(trained.TASKS))
def test_batches_of_a_task_are_those_of_their_step(name: str) -> None:
    """Whatever was drawn before, and another in every step and seed."""
    task = trained.TASKS[name]
    first, _ = task.batch_at(3, 5)
    torch.manual_seed(99)
    again, targets = task.batch_at(3, 5)
    assert torch.equal(first, again)
    assert len(again) == len(targets) == task.batch
    assert not torch.equal(first, task.batch_at(3, 6)[0])
    assert not torch.equal(first, task.batch_at(4, 5)[0])
