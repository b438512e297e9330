"""Knockouts in a real decoder on names, beside what attributions say: the numbers of a plain torch
computation that was made before this library had either."""

from __future__ import annotations

import pytest

import tl_geometry as tlg

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]
PAIRS = [("Mary", "John"), ("James", "Anna"), ("Paul", "Sarah"), ("Mark", "Jane"), ("Lisa", "Tom")]
FORMS = [
    "When {IO} and {S} went to the store, {S} gave a drink to",
    "When {S} and {IO} went to the store, {S} gave a drink to",
]
HEADS = ("L23H3", "L29H1", "L23H0", "L20H0")


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
    effect = dict(zip(HEADS, table.effect.value.tolist(), strict=True))
    direct = dict(zip(HEADS, table.direct.mean(1).tolist(), strict=True))
    # 64 prompts by the other route: direct 2.31, 1.21, 0.89, 0.03; effect -2.36 (0.22), -1.27
    # (0.14), -0.07 (0.10), -0.93 (0.18) with 2 standard errors
    assert effect["L23H3"] == pytest.approx(-2.36, abs=1.0)
    assert effect["L29H1"] == pytest.approx(-1.27, abs=0.6)
    assert direct["L23H3"] == pytest.approx(2.31, abs=0.8)
    assert direct["L23H0"] > 0.4 > abs(effect["L23H0"])
    assert abs(direct["L20H0"]) < 0.1 < 0.4 < -effect["L20H0"]
    marked = dict(zip(HEADS, table.disagrees.tolist(), strict=True))
    assert marked["L20H0"]
    assert not marked["L23H3"]
    assert not marked["L29H1"]
    assert float(table.all_paths.mean(1)[HEADS.index("L20H0")]) > 0.5  # by the attention it moves
