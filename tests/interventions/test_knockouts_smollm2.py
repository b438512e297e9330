"""Knockouts in a real decoder on names, beside what attributions say: the numbers of a plain torch
computation that was made before this library had either."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tl_geometry as tlg

pytestmark = [pytest.mark.smollm2, pytest.mark.once]
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
FEW = 2
"""Pairs of names whose prompts every head is knocked out on: 60 s."""
CORRELATION, SPREAD = 0.926, 0.017
"""Of all paths with knockouts over all 270 heads, on the prompts of two of the five pairs of names:
mean and standard deviation over the ten choices. On all ten prompts 0.942 (standard error 0.013 by
a jackknife over names), and 0.861 (0.039) of direct contributions; the other route, on sixteen
prompts of its own, had 0.96 and 0.88."""


def names_prompts(model: Any) -> Any:
    """The prompts of all pairs of names, form by form."""
    rows = [{"IO": right, "S": wrong} for right, wrong in PAIRS]
    return tlg.corpus.aligned_prompts(model, FORMS, rows, prepend_bos=True)


def test_attributions_along_all_paths_predict_knockouts() -> None:
    model = tlg.zoo.smollm2()
    every = names_prompts(model)
    rows = [form * len(PAIRS) + pair for form in range(len(FORMS)) for pair in range(FEW)]
    prompts = every.tokens[rows]
    targets = [(f" {right}", f" {wrong}") for _ in FORMS for right, wrong in PAIRS[:FEW]]
    table = tlg.interventions.head_knockouts(
        model, prompts, targets=targets, reference=every, attributions=True, progress=False
    )
    assert len(table.conditions) == 270
    # one of them by itself: a head that matters by where later heads look
    with tlg.interventions.remove_heads(model, "L20H0", reference=every), torch.no_grad():
        logits = model(prompts)[:, -1].double()
    ids = torch.tensor([[int(model.to_single_token(token)) for token in pair] for pair in targets])
    chosen = logits.gather(1, ids)
    alone = chosen[:, 0] - chosen[:, 1] - table.clean
    effects = table.effects[table.conditions.index("L20H0")]
    assert float((alone - effects).abs().max()) < 1e-3 < 0.1 < float(-effects.mean())
    found = {}
    for name in ("direct", "all_paths"):
        attributed = getattr(table, name).mean(1)
        found[name] = float(torch.corrcoef(torch.stack([attributed, -table.effects.mean(1)]))[0, 1])
    assert found["all_paths"] == pytest.approx(CORRELATION, abs=2 * SPREAD)
    # direct contributions alone predict worse
    assert found["direct"] < CORRELATION - 2 * SPREAD


def test_writing_is_not_mattering() -> None:
    model = tlg.zoo.smollm2()
    prompts = names_prompts(model)
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
    error = table.direct.std(1) * (1 / len(targets) + 1 / 64) ** 0.5
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
