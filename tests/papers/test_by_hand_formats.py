"""Held-out text is no training text: what an experiment trains on and measures on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.modules import copy_of
from tl_geometry.base.errors import GeometryError
from tl_geometry.papers import characters
from tl_geometry.papers.setup import Training


def check_held_out(module: Any) -> None:
    text = "abcdefghij" * 7 + "klmnopqrst" * 3 + "abcdefghij"
    other = "tsrqponmlk" * 4
    seen: dict[str, Any] = {"windows": [], "trained": []}
    module.chosen = lambda scale, setups: scale
    setup = SimpleNamespace(context=5, contexts=3, batch=2, frequencies=2)
    module.held_out_windows = lambda ids, *sizes: seen["windows"].append(ids) or ids
    module.text_windows = lambda ids, length, batch, seed: seen["trained"].append((ids, seed))
    module.shifted = lambda windows: windows

    def training(setup: Any, d_vocab: Any, batch_at: Any, measure: Any, **options: Any) -> Any:
        batch_at(4)
        seen["found"] = measure(0, None)
        return Training(None, [], [])

    module.run_training = training
    module.bridge_of = lambda model, name: None
    module.as_view = lambda bridge: bridge
    module.next_token_loss = lambda view, tokens, rows: float(len(tokens))
    module.basis_of = lambda bridge, tokens, name: name
    module.state_measures = lambda basis, frequencies: [{"basis": basis}]
    module.spirals = lambda basis: None
    module.views = SimpleNamespace(state_cosines=lambda basis: None)
    module._outcome = lambda *arguments: arguments
    module.nanogpt(setup, texts=[text], other=[other], seeds=(2,), progress=False)
    ids = torch.tensor(["abcdefghijklmnopqrst".index(c) for c in text])
    own, second = seen["windows"]
    cut = int(0.9 * len(text))
    assert torch.equal(own, ids[cut:]), "the last tenth"
    assert second.tolist() == ["abcdefghijklmnopqrst".index(c) for c in other]
    trained, seed = seen["trained"][0]
    assert torch.equal(trained, ids[:cut]), "and no more"
    assert seed == 2 * 10_000_019 + 4
    assert [(r["measured"], r["loss"], r["basis"]) for r in seen["found"]] == [
        ("own text", float(len(own)), "own text"),
        ("other text", float(len(second)), "other text"),
    ]


def test_a_row_beside_the_published_one_is_a_mean_over_states() -> None:
    place = {"seed": 4, "measured": "own text", "loss": 2.0}
    rows = [place | {"rank": value} for value in (3.0, 5.0, 10.0)]
    row = characters._beside_published(rows, "rank")
    assert (row["seed"], row["mean"]) == (4, 6.0)
    assert row["sd"] == pytest.approx((26 / 3) ** 0.5)


def test_a_text_of_one_character_is_refused() -> None:
    with pytest.raises(GeometryError, match="two characters or more, got 1"):
        characters.nanogpt("smoke", texts=["a" * 4000], other=["a" * 4000], progress=False)


def test_experiments_by_hand() -> None:
    check_held_out(copy_of(characters))
