"""Untrained controls: which parameters are redrawn, how, and that all come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lib.models import hf_model
from tl_geometry.models import from_hf, reinitialized, view


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.original_model.named_parameters()}


@pytest.mark.parametrize("how", ["init", "shuffle"])
def test_only_the_chosen_blocks_are_redrawn_and_come_back(how: str) -> None:
    model = from_hf(hf_model("gpt2"), None, name="own")
    before = parameters_of(model)
    with reinitialized(model, [1], how=how) as control:
        inside = parameters_of(model)
        assert (control.name, control.head_trained) == (f"own, blocks 1 untrained ({how})", True)
        assert control.fingerprint == view(model).fingerprint
    changed = {name for name in before if not torch.equal(before[name], inside[name])}
    assert changed == {name for name in before if ".h.1." in name}
    after = parameters_of(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_shuffled_parameters_keep_their_entries(architecture: str) -> None:
    """Also those that are parts of one weight (GPT-2's queries, keys and values)."""
    model = from_hf(hf_model(architecture), None)
    parameters = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    with reinitialized(model, how="shuffle"):
        inside = {name: p.detach().clone() for name, p in parameters.items()}
    for name, value in before.items():
        assert value.unique().numel() == 1 or not torch.equal(inside[name], value), name
        assert torch.equal(inside[name].flatten().sort()[0], value.flatten().sort()[0]), name


def test_a_control_is_drawn_by_its_seed_with_the_standard_deviation_of_gpt2() -> None:
    model = from_hf(hf_model("gpt2"), None)

    def drawn(**options: Any) -> str:
        with reinitialized(model, **options) as control:
            return control.fingerprint

    assert drawn() == drawn(how="init", std=0.02, seed=0)
    assert drawn(seed=1) == drawn(seed=1) != drawn()
    assert drawn(std=0.03) != drawn()
    assert drawn(how="shuffle", seed=1) == drawn(how="shuffle", seed=1) != drawn(how="shuffle")
