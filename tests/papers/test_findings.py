"""What the experiments say they found, word for word, on rows that are made up: the numbers that
they show, and where an expectation holds, on both sides of its bound."""

from __future__ import annotations

from typing import Any

import pytest

from tests.modules import copy_of
from tl_geometry.base.results import Provenance
from tl_geometry.papers import arithmetic, characters, random_tokens
from tl_geometry.papers.formats import Problem
from tl_geometry.papers.outcome import Claim, table_of


def said(claims: Any) -> list[tuple[str, str, str, bool | None]]:
    return [(c.statement, c.expected, c.found, c.holds) for c in claims]


# --- partly random text: 3 blocks, so that of 4 states the last is left out; 24 positions

LOW: dict[tuple[str, str], list[list[float]]] = {
    ("baseline", "baseline"): [[0.8, 0.6, 0.2, 9.0], [0.75, 0.5, 0.25, 9.0]],
    ("full", "full"): [[0.4, 0.3, 0.1, 9.0], [0.375, 0.25, 0.125, 9.0]],
    ("full", "baseline"): [[0.4, 0.3, 0.1, 9.0], [0.38, 0.25, 0.13, 9.0]],
}
TURN: dict[tuple[str, str], list[list[float]]] = {
    ("partial", "partial"): [[9.0, 10.0, 13.0, 0.0], [11.0, 12.0, 13.0, 0.0]],
    ("partial", "baseline"): [[11.0, 11.0, 11.0, 0.0], [11.0, 8.0, 11.0, 0.0]],
    ("baseline", "baseline"): [[11.0, 5.0, 6.0, 0.0], [7.0, 8.0, 9.0, 0.0]],
}
STEP: dict[tuple[str, str], list[list[float]]] = {
    ("partial", "partial"): [[11.0, 11.0, 14.0, 0.0], [11.0, 11.0, 11.0, 0.0]],
    ("partial", "baseline"): [[11.0, 11.0, 9.0, 0.0], [11.0, 11.0, 11.0, 0.0]],
    ("baseline", "baseline"): [[8.0, 14.0, 1.0, 11.0], [3.0, 4.0, 20.0, 11.0]],
}
HALVES: dict[tuple[str, str], list[list[float]]] = {
    ("baseline", "baseline"): [[1.234, 2.0, 3.0, 9.0], [4.0, 5.0, 6.0, 9.0]],
    ("partial", "partial"): [[7.0, 8.0, 9.876, 9.0], [1.0, 2.0, 3.0, 9.0]],
}


def final(step: Any = STEP) -> Any:
    """The last rows of two seeds, the second one first; cells that no finding is about hold 77."""
    measures = {"low_frequency": LOW, "fracture_at": TURN, "jump_at": step}
    measures |= dict.fromkeys(("fracture", "jump", "roughness_first", "roughness_second"), HALVES)
    rows = [
        {"seed": seed, "trained": trained, "measured": measured, "state": state}
        | {
            name: values.get((trained, measured), [[77.0] * 4] * 2)[seed][state]
            for name, values in measures.items()
        }
        for seed in (1, 0)
        for trained in ("baseline", "partial", "full")
        for measured in ("baseline", "partial", "full")
        for state in range(4)
    ]
    return table_of(rows, Provenance())


SETUP = random_tokens.SETUPS["smoke"].changed({"layers": "3", "context": "24"})


def test_findings_of_randomisation() -> None:
    low = "falls by half in every seed (mean over states)"
    shares = "low-frequency share at {}, trained on random tokens and measured on {}, against text"
    first = "text 0.80; 0.75; random {}"
    others = "text 0.60, 0.20; 0.50, 0.25; random {}"
    broken = "trained on half-random text, measured on {}: first position after the {}"
    middle = "within 2 of 12 at every state"
    control = "control, trained and measured on text: first position after the {}"
    anywhere = "anywhere: a smooth curve turns fastest where it passes its mean"
    halves = "{}, half-random text against text (each measured on its own format)"
    second = "the second half breaks, the first does not"
    one = "text 1.2, 2.0, 3.0; 4.0, 5.0, 6.0; half-random 7.0, 8.0, 9.9; 1.0, 2.0, 3.0"
    two = "text 1.23, 2.00, 3.00; 4.00, 5.00, 6.00; half-random 7.00, 8.00, 9.88; 1.00, 2.00, 3.00"
    assert said(random_tokens.findings(final(), SETUP)) == [
        (shares.format("state 0", "full"), low, first.format("0.40; 0.38"), True),
        (
            shares.format("the other states", "full"),
            low,
            others.format("0.30, 0.10; 0.25, 0.12"),
            True,
        ),
        (shares.format("state 0", "baseline"), low, first.format("0.40; 0.38"), False),
        (
            shares.format("the other states", "baseline"),
            low,
            others.format("0.30, 0.10; 0.25, 0.13"),
            False,
        ),
        (broken.format("partial", "largest turn"), middle, "10, 11, 14; 12, 13, 14", True),
        (broken.format("baseline", "largest turn"), middle, "12, 12, 12; 12, 9, 12", False),
        (control.format("largest turn"), anywhere, "12, 6, 7; 8, 9, 10", None),
        (broken.format("partial", "longest step"), middle, "12, 12, 15; 12, 12, 12", False),
        (broken.format("baseline", "longest step"), middle, "12, 12, 10; 12, 12, 12", True),
        (control.format("longest step"), "not near 12", "9, 15, 2; 4, 5, 21", True),
        (halves.format("fracture"), second, one, None),
        (halves.format("jump"), second, one, None),
        (halves.format("roughness first"), second, two, None),
        (halves.format("roughness second"), second, two, None),
    ]


@pytest.mark.parametrize("before", [9.0, 13.0])
def test_a_control_that_breaks_near_the_middle_does_not_hold(before: float) -> None:
    near = STEP | {("baseline", "baseline"): [[8.0, 14.0, 1.0, 0.0], [3.0, before, 20.0, 0.0]]}
    claims = {c.statement: c for c in random_tokens.findings(final(near), SETUP)}
    found = claims["control, trained and measured on text: first position after the longest step"]
    assert (found.found, found.holds) == (f"9, 15, 2; 4, {before + 1:.0f}, 21", False)


# --- addition


def test_findings_of_addition() -> None:
    module: Any = copy_of(arithmetic)
    sums = ("1", "2", "3"), ("2", "1", "3"), ("1", "1", "2"), ("10", "10", "20")
    guessed = [Problem(*parts) for parts in sums]
    module.asked_problems = lambda setup, task: ([], guessed if task == "no-carry" else guessed[:3])
    names = ("exact_in", "exact_out", "digits_out", "wpe_roughness")
    values = {
        ("no-carry", 0): (0.9, 0.125, 0.5, 1.234),
        ("no-carry", 1): (1.0, 0.0, 0.25, 0.5),
        ("carry", 0): (0.1, 0.02, 0.3, 2.0),
        ("carry", 1): (0.95, 0.03, 0.4, 1.0),
    }
    setup = arithmetic.SETUPS["smoke"]
    steps = [
        {"task": task, "seed": seed, "step": step}
        | dict(zip(names, numbers if step else (0.0, 0.77, 0.77, 7.7), strict=True))
        for (task, seed), numbers in values.items()
        for step in (0, setup.steps)
    ]
    predicted = [
        {"task": task, "seed": seed, "measure": name, "levels": 7.7}
        | {"changes": (i + 4 * (task == "carry")) / 10 - seed}
        for task, seed in values
        for i, name in enumerate(module.PREDICTORS)
    ]
    correlations = (
        "rank correlation of changes of geometry with changes of right digits out of range, over "
        "training"
    )
    negative = "negative for fracture and roughness, if they predict the failure"
    roughness = "roughness of the table of position vectors at the end"
    smooth = "2 for independent rows, near 0 for a smooth curve"
    claims = module.findings(setup, steps, predicted)
    assert said(claims) == [
        (
            "no-carry: exact match, 3 to 4 digits",
            "published 100%; at least 90%",
            "90.0%; 100.0%",
            True,
        ),
        (
            "no-carry: exact match, 1 to 2 digits",
            "published 5.02%: fails",
            "12.5%; 0.0% (50.0%; 25.0% of the digits); the likeliest digit at each place: 75.0% "
            "(80.0%)",
            None,
        ),
        (
            f"no-carry: {correlations}",
            negative,
            "fracture 0.00/-1.00, fracture_digits 0.10/-0.90, roughness 0.20/-0.80, "
            "pos_pos_fracture 0.30/-0.70, wpe_fracture 0.40/-0.60, wpe_roughness 0.50/-0.50",
            None,
        ),
        (f"no-carry: {roughness}", smooth, "1.23; 0.50", None),
        ("carry: exact match, 3 to 4 digits", "published 72%", "10.0%; 95.0%", None),
        (
            "carry: exact match, 1 to 2 digits",
            "published 0.00%: fails",
            "2.0%; 3.0% (30.0%; 40.0% of the digits); the likeliest digit at each place: 66.7% "
            "(66.7%)",
            None,
        ),
        (
            f"carry: {correlations}",
            negative,
            "fracture 0.40/-0.60, fracture_digits 0.50/-0.50, roughness 0.60/-0.40, "
            "pos_pos_fracture 0.70/-0.30, wpe_fracture 0.80/-0.20, wpe_roughness 0.90/-0.10",
            None,
        ),
        (f"carry: {roughness}", smooth, "2.00; 1.00", None),
    ]
    below = [row | {"exact_in": 0.89} if row["seed"] else row for row in steps]
    assert module.findings(setup, below, predicted)[0].holds is False


# --- characters


def rows_of(loss: float, **where: Any) -> list[dict[str, Any]]:
    """A measurement: two states with this loss."""
    numbers = {"rank": 9.0, "relative_norm": 0.5, "relative_norm_reference": 0.25}
    return [
        {"loss": loss, "state": state} | {k: v + 2 * state for k, v in numbers.items()} | where
        for state in (0, 1)
    ]


@pytest.mark.parametrize(("last", "falls"), [(1.5, True), (2.25, False)])
def test_findings_of_characters(last: float, falls: bool) -> None:
    """Published: Song & Zhong 2023, Tables 1 and 2."""
    texts = "own text", "other text"
    start = [
        row
        for seed, losses in ((0, (3.0, 8.0)), (4, (2.25, 9.0)))
        for text, loss in zip(texts, losses, strict=True)
        for row in rows_of(loss, seed=seed, measured=text, step=0)
    ]
    end = [
        row
        for seed, losses in ((0, (2.0, 8.5)), (4, (last, 9.5)))
        for text, loss in zip(texts, losses, strict=True)
        for row in rows_of(loss, seed=seed, measured=text, step=5)
    ]
    summary = [
        characters._beside_published(
            [r for r in end if (r["seed"], r["measured"]) == (seed, text)], measure
        )
        for text in texts
        for seed in (0, 4)
        for measure in ("rank", "relative_norm_reference", "relative_norm")
    ]
    summary = [row | {"mean": row["mean"] + row["seed"]} for row in summary]
    middle = [row | {"step": 3, "loss": 7.0} for row in start]
    first_state = [row for row in start + middle + end if row["state"] == 0]
    claims: list[Claim] = list(characters._findings(summary, first_state, (0, 4)))
    rank = "10.00(1.00); 14.00(1.00)"
    reference, norm = "1.25(1.00); 5.25(1.00)", "1.50(1.00); 5.50(1.00)"
    losses = f"3.000 to 2.000; 2.250 to {last:.3f}"
    assert said(claims) == [
        ("own text: rank over states", "7.86(1.96) published", rank, None),
        ("own text: relative norm reference over states", "0.66(0.28) published", reference, None),
        ("own text: relative norm over states", "0.66(0.28) published", norm, None),
        ("other text: rank over states", "7.86(1.96) published", rank, None),
        (
            "other text: relative norm reference over states",
            "0.66(0.28) published",
            reference,
            None,
        ),
        ("other text: relative norm over states", "0.66(0.28) published", norm, None),
        ("held-out loss (nats per character)", "falls", losses, falls),
    ]


def test_one_state_has_no_deviation() -> None:
    (row, *_) = rows_of(2.5, seed=3, measured="other text")
    assert characters._beside_published([row], "relative_norm_reference") == {
        "seed": 3,
        "measured": "other text",
        "measure": "relative_norm_reference",
        "mean": 0.25,
        "sd": 0.0,
        "published_mean": 0.66,
        "published_sd": 0.28,
        "loss": 2.5,
    }
