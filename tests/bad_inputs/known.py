"""Models whose circuit is known."""

from __future__ import annotations

from typing import Any

import tl_geometry as tlg
from tests.bad_inputs.cases import Call, Command

COMMANDS: list[Command] = []
TRUTH: Any = True
HALF: Any = 1.5
NAME: Any = None
CALLS: list[Call] = [
    Call("a known model by number", lambda w: tlg.zoo.known(NAME), "name"),
    Call("a known model that is none", lambda w: tlg.zoo.known("bracket"), "idle"),
    Call("one by another case", lambda w: tlg.zoo.known("Heads"), "name"),
    Call("positions that none has", lambda w: tlg.zoo.known("heads", positions="alibi"), "rotary"),
    Call("a seed below zero", lambda w: tlg.zoo.known("circuit", seed=-1), "seed"),
    Call("half a seed", lambda w: tlg.zoo.known("circuit", seed=HALF), "seed"),
    Call("a seed that is true", lambda w: tlg.zoo.known("circuit", seed=TRUTH), "seed"),
    Call("no seed", lambda w: tlg.zoo.known("circuit", seed=NAME), "seed"),
    Call("no seed of pairs", lambda w: tlg.zoo.known("circuit").pairs(2, seed=NAME), "seed"),
    Call("a seed of no training", lambda w: tlg.zoo.known("sum", seed=3), "which are stored"),
    Call("half a pair", lambda w: tlg.zoo.known("circuit").pairs(HALF), "n: expected"),
    Call("no rows", lambda w: tlg.zoo.known("circuit").random_tokens(0), "at least 1"),
    Call(
        "pairs of repeats by key", lambda w: tlg.zoo.known("idle").pairs(2, changed="key"), "last"
    ),
    Call(
        "pairs of sums by the last", lambda w: tlg.zoo.known("sum").pairs(2, changed="last"), "key"
    ),
    Call(
        "a known model", lambda w: tlg.zoo.known("idle"), check=lambda w, t: t.heads("idle") != []
    ),
]
