"""Knockouts in a real decoder on names, beside what attributions say: the numbers of a plain torch
computation that was made before this library had either."""

from __future__ import annotations

import pytest
import torch

import tl_geometry as tlg

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]
PAIRS = [("Mary", "John"), ("James", "Anna"), ("Paul", "Sarah"), ("Mark", "Jane"), ("Lisa", "Tom")]
FORMS = [
    "When {IO} and {S} went to the store, {S} gave a drink to",
    "When {S} and {IO} went to the store, {S} gave a drink to",
]
EFFECTS = {
    "L23H3": (-2.36, 0.22),
    "L29H1": (-1.27, 0.14),
    "L29H0": (1.01, 0.13),
    "L23H0": (-0.07, 0.10),
    "L24H4": (0.57, 0.25),
    "L23H1": (0.25, 0.12),
    "L20H0": (-0.93, 0.18),
}
"""Effect of mean ablation on 64 prompts by the other route, with 2 standard errors. On the ten
prompts here: -2.35, -1.11, 0.87, -0.24, 0.39, -0.05, -0.81."""
DIRECT = (2.31, 1.21, -0.95, 0.89, -0.63, 0.21, 0.03)
"""Direct contributions of these heads by the other route. On the ten prompts here: 2.11, 1.08,
-0.76, 0.79, -0.52, 0.28, 0.01."""
HEADS = tuple(EFFECTS)
WIDE = 2.26
"""Standard errors to either side of a mean over ten prompts that cover 95% (t with 9 degrees)."""


def test_writing_is_not_mattering() -> None:
    rows = [{"IO": right, "S": wrong} for right, wrong in PAIRS]
    model = tlg.zoo.smollm2()
    prompts = tlg.corpus.aligned_prompts(model, FORMS, rows, prepend_bos=True)
    assert prompts.positions == {"S2": 10, "end": 14}
    targets = [(f" {right}", f" {wrong}") for _ in FORMS for right, wrong in PAIRS]
    table = tlg.interventions.head_knockouts(
        model,
        prompts,
        targets=targets,
        position="end",
        heads=HEADS,
        controls=3,
        attributions=True,
        progress=False,
    )
    assert bool((table.clean > 0).all())
    assert table.direct is not None
    assert table.all_paths is not None
    assert table.disagrees is not None
    error = table.effect.error
    for row, (head, (value, two_errors)) in enumerate(EFFECTS.items()):
        bound = WIDE * float(torch.hypot(error[row], torch.tensor(two_errors / 2)))
        assert float(table.effect.value[row]) == pytest.approx(value, abs=bound), head
    direct = table.direct.mean(1)
    # no errors were stated of these: those of 64 prompts with the spread of the prompts here
    error = table.direct.std(1) * (1 / len(rows) / 2 + 1 / 64) ** 0.5
    for row, value in enumerate(DIRECT):
        assert float(direct[row]) == pytest.approx(value, abs=WIDE * float(error[row])), HEADS[row]
    marked = dict(zip(HEADS, table.disagrees.tolist(), strict=True))
    assert marked["L20H0"]
    assert not marked["L23H3"]
    assert not marked["L29H1"]
    # it writes against the answer, and its removal helps
    against = HEADS.index("L29H0")
    assert float(direct[against]) < -WIDE * float(error[against])
    assert float(table.effect.value[against]) > WIDE * float(table.effect.error[against])
    assert float(table.all_paths.mean(1)[HEADS.index("L20H0")]) > 0.5  # by the attention it moves
