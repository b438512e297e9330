"""Laws of the subject table. Each takes a row, one of its variants, a world and what the row
answers there, and raises ``AssertionError`` where the law is broken. A row says, in ``without``,
where a law of this name does not apply.

Laws compare named quantities, so that they outlive a redesign of results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.subjects.row import Answers, Subject, match, plain, results_in
from tests.lib.worlds import World, loadings, world
from tl_geometry import GeometryError, ReconstructionError

ROUNDING = 2e-5
"""Share of the largest value by which two orders of the same float32 sums may differ."""
LOADED = 2e-4
"""The same where weights were folded and centred, which rounds each of them."""
HALF = 0.25
"""Relative distance of answers of a bfloat16 model, whose sharp softmax enlarges its roundings."""
REFERENCE = 2e-4
"""Share of the largest value by which float32 may differ from float64, behind a sharp softmax."""
FAULT = 1.01
"""A planted fault changes what a hook sees by one percent."""
Law = Callable[[Subject, str, World, Answers], None]


def far(a: Any, b: Any, share: float) -> str | None:
    """How two answers differ by more than a share of the largest value, if they do."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        if a.shape != b.shape:
            return f"shapes {a.shape} and {b.shape}"
        if not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return "NaN or infinities in other places"
        a, b = (np.where(np.isfinite(x), x, 0.0) for x in (a, b))
        size, gap = float(np.abs(a).max(initial=0.0)), float(np.abs(a - b).max(initial=0.0))
        return f"off by {gap / size if size else gap:.1e}" if gap > share * size + 1e-9 else None
    return None if a == b else f"{a!r} and {b!r}"[:300]


def require_near(
    law: str, subject: Subject, variant: str, a: Answers, b: Answers, share: float
) -> None:
    """Two sets of answers agree, but for what the row excuses from a law."""
    wrong = {}
    for quantity in a.keys() | b.keys():
        key = f"{variant}/{quantity}"
        if subject.excused(law, key):
            continue
        if quantity not in a or quantity not in b:
            wrong[key] = "is in one of the two alone"
            continue
        # a row whose record is looser enlarges rounding
        own = match(subject.tolerance, key)
        if why := far(a[quantity], b[quantity], max(share, 2 * own[0] if own else 0.0)):
            wrong[key] = why
    told = "\n".join(f"{subject.name}/{key}: {why}" for key, why in sorted(wrong.items()))
    assert not wrong, f"{law}:\n{told}"


def disturbs(subject: Subject, variant: str, found: tuple[str, ...]) -> None:
    """Weights, hooks, the caller's tensors and the global generators are as before."""
    left = [what for what in found if not subject.excused("disturbs", f"{variant}/{what}")]
    assert not left, f"{subject.name}/{variant} changes {left}"


def empty(subject: Subject, variant: str, of_kinds: Sequence[Answers]) -> None:
    """No answer is NaN throughout, nor zero throughout in every kind of model: a test of exactness
    would pass without testing."""
    for quantity in {q for answers in of_kinds for q in answers}:
        values = [a[quantity] for a in of_kinds if isinstance(a.get(quantity), np.ndarray)]
        if not values or subject.excused("empty", f"{variant}/{quantity}"):
            continue
        finite = [value[np.isfinite(value)] for value in values]
        told = f"{subject.name}/{variant}/{quantity} is empty: {values[0]}"
        assert all(f.size for f in finite), told
        assert any(f.any() for f in finite), told


def again(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """The same call with the same seed gives the same, bit for bit."""
    require_near("again", subject, variant, answers, subject.answer(here, variant), 0.0)


def seeds(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """Another seed changes what is drawn, and nothing else, and results say it."""
    result = subject.result(here, variant, seed=5)
    other, said = subject.told(result), {each.provenance.seed for each in results_in(result)}
    own = said <= {5} or subject.excused("seeds", f"{variant}/said")
    assert own, f"{subject.name}: seed {said}"
    drawn: set[str] = set()
    for pattern in subject.seeds:
        of = {q for q in answers.keys() | other if match({pattern: True}, f"{variant}/{q}")}
        changed = [q for q in of if far(answers.get(q), other.get(q), 1e-9)]
        excused = subject.excused("seeds", f"{variant}/{pattern}")
        assert changed or not of or excused, f"{subject.name}/{variant}: {pattern} is the same"
        drawn |= of
    fixed, found = ({q: v for q, v in a.items() if q not in drawn} for a in (answers, other))
    require_near("seeds", subject, variant, fixed, found, ROUNDING)


def order(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """Where prompts change places their rows do, and nothing else changes."""
    inputs = here.inputs.tensors()
    moved = {n: _permutation(n) for n in {len(tensor) for tensor in inputs.values()}}
    there = _changed(here, "order", {k: v[moved[len(v)]] for k, v in inputs.items()})
    expected = dict(answers)
    for quantity, value in answers.items():
        axis = match({k: (v,) for k, v in subject.order.items()}, f"{variant}/{quantity}")
        if axis is not None:
            expected[quantity] = np.take(value, moved[value.shape[axis[0]]].numpy(), axis[0])
    require_near("order", subject, variant, expected, subject.answer(there, variant), ROUNDING)


def _permutation(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(n))


_CHANGED: dict[tuple[World, str], World] = {}


def _changed(here: World, why: str, inputs: Mapping[str, Tensor]) -> World:
    """A world with other inputs, made once in a process."""
    if (here, why) not in _CHANGED:
        _CHANGED[here, why] = here.changed(**inputs)
    return _CHANGED[here, why]


def batches(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """The size of batches does not matter."""
    for size in subject.batches:
        other = subject.answer(here, variant, batch_size=size)
        require_near("batches", subject, variant, answers, other, ROUNDING)


def later(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """Rows before the first token that changes stay as they are (all models here are causal)."""
    cut = 2 * here.ids.shape[1] // 3
    inputs = {name: here.inputs.tensors()[name].clone() for name in ("ids", "other")}
    for tensor in inputs.values():
        tensor[:, cut:] = tensor[:, cut:].roll(1, 0).flip(1)
    other = subject.answer(_changed(here, "later", inputs), variant)
    axes = {k: (v,) for k, v in subject.later.items()}
    changed = False
    for quantity, value in answers.items():
        axis = match(axes, f"{variant}/{quantity}")
        if axis is None or subject.excused("later", f"{variant}/{quantity}"):
            continue
        before, after = (np.split(x, [cut], axis[0]) for x in (value, other[quantity]))
        why = far(before[0], after[0], ROUNDING)
        assert why is None, f"{subject.name}/{variant}/{quantity}: {why}"
        changed = changed or far(before[1], after[1], ROUNDING) is not None
    assert changed, f"{subject.name}/{variant}: the tokens that change do nothing"


def loaded(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """Processed weights, in the other class where there is one: what is no matter of gauge is the
    same."""
    _other_loading("loaded", loadings(here.kind)[-1], subject, variant, here, answers)


def classes(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """The same weights in each class of TransformerLens give the same of everything."""
    for loading in loadings(here.kind)[1:]:
        if "processed" not in loading:
            _other_loading("classes", loading, subject, variant, here, answers)


def _other_loading(
    law: str, loading: str, subject: Subject, variant: str, here: World, answers: Answers
) -> None:
    if all(subject.excused(law, f"{variant}/{quantity}") for quantity in answers):
        return
    other = subject.answer(world(here.kind, loading), variant)
    require_near(law, subject, variant, answers, other, LOADED)


def half(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """A bfloat16 model gives nearly the same of what the row names, or is refused by name."""
    try:
        other = subject.answer(world(here.kind, dtype=torch.bfloat16), variant)
    except GeometryError as error:
        if any(word in str(error) for word in ("bfloat16", "precision")):
            return
        raise AssertionError(f"{subject.name}/{variant} is refused by no name") from error
    names = dict.fromkeys(subject.half, True)
    for quantity in (q for q in answers if match(names, f"{variant}/{q}")):
        value, near = answers[quantity], other[quantity]
        finite = np.isfinite(value) & np.isfinite(near)
        share = np.linalg.norm((value - near)[finite]) / np.linalg.norm(value[finite])
        assert share < HALF, f"{subject.name}/{variant}/{quantity}: off by {share:.2g}"


def lists(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """An edit as a list of hooks equals the edit inside ``with``, and does something."""
    other = subject.answer(here, variant, how="list")
    require_near("lists", subject, variant, answers, other, 1e-6)
    with torch.no_grad():
        clean = here.model(here.ids, return_type="logits").double().log_softmax(-1).numpy()
    changed = far(answers["log probabilities"], clean, 1e-3)
    assert changed, f"{subject.name}/{variant} does nothing"


def adds(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """Parts sum to the whole, and more than one of them has a size."""
    for whole, patterns in subject.adds.items():
        total, names = answers[whole], dict.fromkeys(patterns, True)
        parts = [v for q, v in answers.items() if match(names, f"{variant}/{q}")]
        if not parts or subject.excused("adds", f"{variant}/{whole}"):
            continue
        finite = np.isfinite(total)
        summed = sum(p if p.shape == total.shape else p.sum() for p in parts)
        gap = np.abs((summed - np.where(finite, total, 0.0)) * finite).max()
        in_place = [np.abs(p * finite).sum() for p in parts if p.shape == total.shape]
        one_by_one = [np.abs(p).ravel() for p in parts if p.shape != total.shape]
        sizes = np.sort(np.concatenate([in_place, *one_by_one]))
        assert gap <= ROUNDING * max(sizes[-1], 1.0), f"{subject.name}/{variant}: off by {gap:.2g}"
        assert sizes[-2] > 0.01 * sizes[-1], f"{subject.name}/{variant}: one part is all"


def reference(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """What the reference computes in float64 from the same weights is what the library answers."""
    assert subject.reference is not None
    for quantity, value in subject.reference(here, variant, answers).items():
        key = f"{variant}/{quantity}"
        if quantity not in answers:
            raise AssertionError(f"{subject.name} answers nothing about {quantity}")
        why = far(plain(value), answers[quantity], REFERENCE)
        assert why is None, f"{subject.name}/{key}: {why}"


def faults(subject: Subject, variant: str, here: World, answers: Answers) -> None:
    """A hook that changes queries, keys, values, the pattern or z by one percent makes a model of
    which the formulas are false, and is refused. Its twin, which changes nothing, is no reason."""
    for where in subject.faults:
        if subject.excused("faults", f"{variant}/{where}"):
            continue
        with planted(here, where, 1.0) as same:
            other = subject.answer(same, variant)
        require_near("faults", subject, variant, answers, other, ROUNDING)
        with planted(here, where, FAULT) as faulty:
            what = f"{subject.name}/{variant} takes a model whose {where} is changed"
            with pytest.raises((ReconstructionError, GeometryError)):
                subject.answer(faulty, variant)
                pytest.fail(what)


@contextmanager
def planted(here: World, where: str, factor: float) -> Iterator[World]:
    """The world with a hook in block 1; what was fitted on the clean model stays. The factor is of
    three coordinates (or keys): a norm behind attention would cancel a factor of all."""
    there = here.changed()
    for name in ("basis", "normalized_basis", "ensemble"):
        vars(there)[name] = getattr(here, name)
    changed = lambda value, hook: torch.cat([value[..., :3] * factor, value[..., 3:]], -1)
    hooks = [(f"blocks.1.attn.hook_{where}", changed)]
    with here.model.hooks(fwd_hooks=hooks):
        yield there


LAWS = ("disturbs", "empty", "again", "seeds", "order", "batches", "later", "loaded", "classes")
LAWS += ("half", "lists", "adds", "faults", "reference")
"""Names that rows may excuse themselves from."""
