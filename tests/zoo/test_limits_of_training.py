"""Seeds, schedules and stored circuits of the zoo: what a new model, a rate and a batch are at
their limits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tl_geometry.base.errors import GeometryError
from tl_geometry.zoo import trained
from tl_geometry.zoo.trainer import IGNORE, TrainSettings, new_gpt2

SMALL: dict[str, Any] = {
    "vocab_size": 7,
    "n_positions": 4,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
}


def test_a_new_model_has_the_weights_of_its_seed_whatever_was_drawn_before() -> None:
    """Seed by seed the same, as transformers draws them; another seed has others."""
    torch.manual_seed(5)
    first = new_gpt2(3, **SMALL)
    torch.randn(11)
    again, other = new_gpt2(3, **SMALL), new_gpt2(4, **SMALL)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    plain = GPT2LMHeadModel(GPT2Config(**SMALL, bos_token_id=0, eos_token_id=0))
    torch.set_rng_state(state)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
        assert torch.equal(value, plain.state_dict()[name]), name
    name = "transformer.wte.weight"
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
    assert (first.config.bos_token_id, first.config.eos_token_id) == (0, 0)
    assert not first.training


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_new_circuit_has_the_weights_of_its_seed_whatever_was_drawn_before(
    positions: str,
) -> None:
    """Also the global generator goes on as if nothing had been made."""
    models = []
    for before in (1, 2):
        torch.manual_seed(before)
        models.append(trained.new_model("sum", positions, 1))
        drawn = torch.rand(3)
        torch.manual_seed(before)
        assert torch.equal(torch.rand(3), drawn)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("steps", "warmup", "rates"),
    [
        (4, 0, [1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 4)), 0.55]),
        (4, 1, [1.0, 1.0, 0.1 + 0.45 * (1 + math.cos(math.pi / 3))]),
        (3, 2, [0.5, 1.0, 1.0, 0.1]),
        (2, 2, [0.5, 1.0, 1.0, 0.1]),
        (6, 4, [0.25, 0.5, 0.75, 1.0, 1.0, 0.55, 0.1]),
    ],
)
def test_rates_warm_up_to_the_largest_and_end_at_the_last(
    steps: int, warmup: int, rates: list[float]
) -> None:
    """Also without a warm-up, and where there is hardly anything after it."""
    settings = TrainSettings(steps=steps, learning_rate=1.0, final_learning_rate=0.1, warmup=warmup)
    assert [settings.rate(step) for step in range(len(rates))] == pytest.approx(rates)


@pytest.mark.parametrize(
    ("name", "sizes", "steps", "rate"),
    [
        ("induction", (64, 49, 2, 64, 0, 16, 4), 1500, 8e-3),
        ("sum", (21, 16, 1, 48, 96, 32, 4), 3000, 4e-3),
    ],
)
def test_tasks_are_trained_as_long_and_as_fast_as_they_were(
    name: str, sizes: tuple[int, ...], steps: int, rate: float
) -> None:
    """With these settings the stored weights were made: others make other circuits."""
    task = trained.TASKS[name]
    found = (task.vocab, task.length, task.layers, task.width, task.d_mlp, task.batch, task.heads)
    assert found == sizes
    assert task.settings == TrainSettings(
        steps=steps,
        learning_rate=rate,
        final_learning_rate=1e-5,
        warmup=50,
        weight_decay=0.1,
        betas=(0.9, 0.98),
        clip=1.0,
        seed=0,
        checkpoint_every=500,
    )


@pytest.mark.parametrize("name", ["induction", "sum"])
def test_batches_are_those_of_their_seed_and_step_and_none_is_shared(name: str) -> None:
    """Inputs and targets are one row shifted by a token; only predicted tokens are targets."""
    task = trained.TASKS[name]
    for seed, step in ((0, 0), (0, 5), (2, 1)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        tokens, counted = task.rows(task.batch, generator)
        inputs, targets = task.batch_at(seed, step)
        assert torch.equal(inputs, tokens[:, :-1])
        assert torch.equal(targets[counted[:, 1:]], tokens[:, 1:][counted[:, 1:]])
        assert bool((targets[~counted[:, 1:]] == IGNORE).all())
    batches = [task.batch_at(seed, step)[0] for seed in (0, 1) for step in (0, 1)]
    for i, batch in enumerate(batches):
        assert not any(torch.equal(batch, other) for other in batches[:i])


def test_stored_circuits_show_their_patterns_and_others_are_refused() -> None:
    """Attention is computed in the open, in evaluation mode."""
    model = trained.hugging_face("sum", "rotary", 1)
    assert model.config._attn_implementation == "eager"
    assert not model.training
    ids = trained.TASKS["sum"].batch_at(0, 0)[0][:2]
    with torch.no_grad():
        (pattern,) = model(ids, output_attentions=True).attentions
    assert torch.allclose(pattern.sum(-1), torch.ones(2, 4, 15), atol=1e-5)
    with pytest.raises(
        GeometryError, match=r"seed: expected one of \(0, 1, 2\), which are stored, got 3"
    ):
        trained.hugging_face("sum", "rotary", 3)
    assert trained.path("sum", "learned", 2).name == "sum_learned_2.safetensors"
    assert trained.path("sum", "learned", 2).parent.name == "known"
