"""Controls of edits: the same edit of something else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.interventions.edge_edits import edge, parts_of, writers_before
from tl_geometry.interventions.head_edits import heads
from tl_geometry.interventions.path_edits import path
from tl_geometry.interventions.prompts import Edit
from tl_geometry.interventions.surrogates import WITH_DIRECTIONS, surrogate
from tl_geometry.interventions.terms import PAIRS, pairs_of, planes, term

CONTROLS = ("shrink", "terms", "heads", "planes", "directions", "writers")
Head = tuple[int, int]


class Draw(NamedTuple):
    """A control that is still to be made; equal keys are equal edits."""

    key: Any
    make: Callable[[], Edit]


def draws_of(
    edits: Mapping[str, Edit], controls: Sequence[str], draws: int, seed: int
) -> dict[tuple[str, str], list[Draw]]:
    """The controls of every edit, by (edit, name of the control).

    Raises ``GeometryError`` for a control that no edit has, and for fewer than 2 random draws.
    """
    found: dict[tuple[str, str], list[Draw]] = {}
    taken = {head for edit in edits.values() for head in edit.heads}
    count = checks.whole(draws)
    for control in controls:
        checks.choice(control, CONTROLS, "control")
        before = len(found)
        fits = count is not None and (control in ("shrink", "terms") or count >= 2)
        require(fits, "draws", expected="at least 2 random ones", got=repr(draws))
        for name, edit in edits.items():
            seeds = [(seed + draw) % 2**32 for draw in range(count or 0)]
            named = _named(edit, control, seeds, taken)
            found |= {(name, beside): made for beside, made in named.items()}
        got = f"{control!r}, which none of {list(edits)[:4]} has"
        require(len(found) > before, "control", expected="a control of some edit", got=got)
    return found


def _named(edit: Edit, control: str, seeds: list[int], taken: set[Head]) -> dict[str, list[Draw]]:
    """The controls of one edit, by their names."""
    again: Any = edit.again
    if again is None or again.keywords.get("how") == "swap":
        return {}
    options, kind = again.keywords, again.func
    if control == "heads":
        return _random_heads(edit, seeds, taken)
    if control == "terms":
        return _other_terms(again) if kind is term and options["how"] in ("remove", "keep") else {}
    if control == "shrink":
        of = kind is term and options["how"] == "remove"
        return {"shrink": [_draw(again, how="shrink")]} if of else {}
    if kind is not {"planes": planes, "directions": surrogate, "writers": edge}[control]:
        return {}
    if kind is surrogate and options["part"] not in WITH_DIRECTIONS:
        return {}
    if control == "writers":
        return _random_writers(edit, seeds)
    drawn = [{"draw": s} if kind is planes else {"random": True, "seed": s} for s in seeds]
    return {f"random {control}": [_draw(again, **changes) for changes in drawn]}


def _draw(again: Any, **changes: Any) -> Draw:
    """The edit with other options; its key tells whether two are the same."""
    plain = (str, int, float, tuple, type(None))
    options = {**again.keywords, **changes}
    # by repr, as plane 0 is another than the wavelength 0.0
    key = tuple((k, repr(v) if isinstance(v, plain) else id(v)) for k, v in sorted(options.items()))
    return Draw((again.func, key), partial(again, **changes))


def _other_terms(again: Any) -> dict[str, list[Draw]]:
    """Every other term, of those that the edit would change."""
    how, own = again.keywords["how"], pairs_of(again.keywords["names"])
    others = [p for p in PAIRS if p not in own and not (how == "keep" and "bias" in p)]
    return {f"{how} {'-'.join(p)}": [_draw(again, names=p)] for p in others}


def _random_heads(edit: Edit, seeds: list[int], taken: set[Head]) -> dict[str, list[Draw]]:
    """As many heads, drawn from those that could stand in their place and that no edit has."""
    again: Any = edit.again
    key = {heads: "names", path: "senders"}.get(again.func, "heads")
    pool, size = [head for head in edit.pool if head not in taken], len(set(edit.heads))
    if not edit.pool:
        return {}
    drawn = _drawn(pool, size, seeds, f"{size} other heads that no edit has")
    return {"random heads": [_draw(again, **{key: heads}) for heads in drawn]}


def _random_writers(edit: Edit, seeds: list[int]) -> dict[str, list[Draw]]:
    """As many other writers (heads, MLPs, embeddings) that come before the same heads."""
    again: Any = edit.again
    own = again.keywords["writer"]
    first = min(layer for layer, _ in edit.heads)
    # heads of a block whose attention is edited are parts of it, and no other writers
    without = ("attn", *parts_of(own))
    names = [w for w in writers_before(edit.view, first) if not w.startswith(without)]
    pool = [name for name in names if name not in (*own, "constants")]
    expected = f"{len(own)} other writers before {checks.head_name(edit.heads[0])}"
    drawn = _drawn(pool, len(own), seeds, expected)
    return {"random writers": [_draw(again, writer=writers) for writers in drawn]}


def _drawn(pool: list[Any], size: int, seeds: list[int], expected: str) -> list[tuple[Any, ...]]:
    """Sets of so many of a pool, drawn one after the other from the first seed, so that edits of
    one size share them."""
    require(len(pool) >= size, "control", expected=expected, got=len(pool), instead="fewer edits")
    generator = torch.Generator().manual_seed(seeds[0])
    orders = [torch.randperm(len(pool), generator=generator)[:size].tolist() for _ in seeds]
    return [tuple(pool[i] for i in sorted(order)) for order in orders]
