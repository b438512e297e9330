"""What an accumulation keeps, says and refuses, and which samples and largest tokens it holds:
defaults, limits, and the sentence of each refusal."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.refusals import refused
from tl_geometry.base.errors import BudgetError
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition import accumulator
from tl_geometry.decomposition.accumulator import Accumulation, Plan, out_of_memory
from tl_geometry.decomposition.largest import Largest
from tl_geometry.decomposition.reservoir import Reservoir

F64 = torch.float64


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


# ---- accumulations


def begun(**plan: Any) -> Accumulation:
    settings: dict[str, Any] = {"states": (0,), "window": (0, 4)} | plan
    return Accumulation(
        Plan(**settings), Provenance(), length=4, d_model=2, contexts=20, device="cpu"
    )


def test_a_plan_has_the_defaults_of_decompose() -> None:
    """Eight groups, thirty-two samples of seed 0, float32 products, and what fits is kept."""
    plan = Plan(states=(0,), window=(0, 4))
    public = inspect.signature(tlg.decompose).parameters
    for name in ("groups", "keep", "seed", "second_moments", "keep_ctx", "moments_dtype"):
        assert getattr(plan, name) == public[name].default, name
    assert (plan.groups, plan.keep, plan.seed) == (8, 32, 0)
    assert (plan.second_moments, plan.keep_ctx, plan.moments_dtype) == (
        "auto",
        "auto",
        torch.float32,
    )
    work = begun()
    assert (len(work.moments.counts), work.reservoir.size) == (8, 32)
    assert work.moments.second is not None
    assert work.keep_ctx
    assert work.provenance.flags == ()
    assert (work.done, work.limit, work.has_bos, work.block) == (0, None, None, 1)


@pytest.mark.parametrize(
    ("name", "least", "bad"),
    [("groups", 1, (0, True)), ("keep", 0, (-1, False)), ("seed", 0, (-1, True))],
)
def test_numbers_of_a_plan_are_whole_and_large_enough(
    name: str, least: int, bad: tuple[object, ...]
) -> None:
    """The least one is taken."""
    begun(**{name: least})
    for value in bad:
        text = f"{name}: expected at least {least}, got {value!r}."
        assert refused(lambda v=value: begun(**{name: v})) == text


@pytest.mark.parametrize("name", ["second_moments", "keep_ctx"])
def test_what_is_kept_is_asked_for_by_truth_values(name: str) -> None:
    """True, False or "auto"."""
    shown = {"second_moments": "second moments", "keep_ctx": "context vectors"}[name]
    assert refused(lambda: begun(**{name: "yes"})) == (
        f"{shown}: expected True, False or \"auto\", got 'yes'."
    )
    work = begun(**{name: False})
    kept = {"second_moments": work.moments.second is not None, "keep_ctx": work.keep_ctx}
    assert kept == {"second_moments": True, "keep_ctx": True} | {name: False}


@pytest.mark.parametrize(
    ("window", "flags"),
    [
        ((0, 4), ()),
        ((1, 4), ("position 0 left out of the statistics",)),
        ((2, 4), ("positions 0 to 1 left out of the statistics",)),
        ((3, 4), ("positions 0 to 2 left out of the statistics",)),
    ],
)
def test_positions_that_are_left_out_are_said(
    window: tuple[int, int], flags: tuple[str, ...]
) -> None:
    """By their numbers."""
    assert begun(window=window).provenance.flags == flags


@pytest.mark.parametrize("wanted", [True, "auto"])
def test_only_auto_has_a_limit(wanted: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 32 bytes and context means of 320: what was asked for is kept, and what is left
    to the limit is said where it is over."""
    for limit, products, means in ((31, False, False), (32, True, False), (320, True, True)):
        monkeypatch.setattr(accumulator, "KEEP_LIMIT", limit)
        work = begun(second_moments=wanted, keep_ctx=wanted, keep=0)
        kept = (work.moments.second is not None, work.keep_ctx)
        assert kept == ((True, True) if wanted is True else (products, means))
        names = ("second moments", "context vectors")
        said = [f"{n} not kept (over 1 GiB)" for n, k in zip(names, kept, strict=True) if not k]
        assert list(work.provenance.flags) == said
    monkeypatch.setattr(accumulator, "KEEP_LIMIT", 3 * 4 * 1 * 4 * 2 + 1)
    limited = begun(second_moments=False, keep_ctx=False)
    assert limited.reservoir.size == 3
    assert limited.provenance.flags == ("3 of 32 samples kept (1 GiB)",)


def test_errors_of_memory_are_told_from_others() -> None:
    """By their class, or by the texts that CPUs and other devices give."""
    for text in ("CUDA out of memory.", "can't allocate memory: x", "not enough memory: y"):
        assert out_of_memory(RuntimeError(text))
    for error in (MemoryError(), torch.OutOfMemoryError("")):
        assert out_of_memory(error)
    assert not out_of_memory(RuntimeError("mat1 and mat2"))


def test_one_context_that_does_not_fit_is_refused() -> None:
    """After batches were halved to it, with what to do."""
    work, sizes = begun(), []

    def feed(contexts: slice, on_state: object) -> None:
        sizes.append(contexts.stop - contexts.start)
        raise MemoryError

    with pytest.raises(BudgetError) as error:
        work.update(torch.arange(7), feed, None)
    assert str(error.value) == (
        "memory: expected room for one context of 4 positions, got out of memory. "
        "Use shorter windows, second_moments=False, or fewer states=."
    )
    assert sizes == [7, 3, 1]
    assert work.limit == 1


def test_numbers_that_are_not_finite_are_named_by_their_states_and_contexts() -> None:
    """With the next batch, or at the end."""
    work = begun(states=(0, 3))
    h = gaussian(0, 2, 4, 4, 2)

    def feed(contexts: slice, on_state: Callable[[int, Tensor], None]) -> None:
        for row in range(2):
            on_state(row, h[row, contexts])

    work.update(torch.arange(4), feed, None)
    h[1, 2, 3, 0] = torch.nan
    work.update(torch.arange(4), feed, None)
    assert refused(work.settle) == (
        "activations: expected finite numbers, got NaN or infinite in states [3], contexts 4 to 7. "
        "Use float32 weights."
    )
    work.settle()  # said once
    assert refused(lambda: begun().finish(None, ())) == (
        "tokens: expected at least one context, got none."
    )


# ---- samples and largest tokens


def test_samples_are_those_of_lowest_priority() -> None:
    """Drawn from the seed and the key, in any batches; merged parts keep the smaller size."""
    keys = torch.tensor([5, 9, 2, 7, 11, 3])
    priority = [float(np.random.default_rng((4, int(k))).random()) for k in keys]
    lowest = sorted(range(6), key=priority.__getitem__)
    at_once, by_two = (Reservoir.empty(3, 4, (1, 2, 2)) for _ in range(2))
    entered = at_once.enter(0, keys)
    assert sorted(i for _, i in entered) == sorted(lowest[:3])
    for first in (0, 2, 4):
        by_two.enter(first, keys[first : first + 2])
    for found in (at_once, by_two):
        found.sort()
        assert found.contexts.tolist() == lowest[:3]
        assert found.priorities.tolist() == [priority[i] for i in lowest[:3]]
    assert repr(at_once) == "Reservoir(3 of 3 contexts, seed 4)"
    few = Reservoir.empty(3, 4, (1, 2, 2))
    assert len(few) == 0
    few.enter(7, keys[:2])
    assert (len(few), repr(few)) == (2, "Reservoir(2 of 3 contexts, seed 4)")
    small = Reservoir.empty(2, 4, (1, 2, 2))
    small.enter(0, keys[3:])
    merged = Reservoir.merge([at_once, small.filled()], [0, 10])
    both = sorted(
        [(priority[i], i) for i in range(6)] + [(priority[i], 7 + i) for i in range(3, 6)]
    )
    assert merged.size == 2
    assert merged.contexts.tolist() == [i for _, i in sorted(both)[:2]]


def test_equal_norms_are_kept_by_context_and_position() -> None:
    """The earlier ones first, in any batches, with ids where they are known."""
    h = torch.zeros(3, 2, 2, dtype=F64)
    h[:, :, 1] = -2.0
    h[1, 0, 0] = 5.0
    ids = torch.arange(6).view(3, 2) + 40
    found = Largest.empty(1)
    for part in (slice(2, 3), slice(0, 2)):
        norms = h[part].norm(dim=-1)
        found.add(0, h[part], norms, torch.arange(3)[part], 7, ids[part])
    order = [(1, 7), (0, 7), (0, 8), (1, 8), (2, 7), (2, 8)]
    assert found.context[0, :6].tolist() == [c for c, _ in order]
    assert found.position[0, :6].tolist() == [p for _, p in order]
    assert found.token[0, :6].tolist() == [42, 40, 41, 43, 44, 45]
    assert found.coordinate[0, :6].tolist() == [0, 1, 1, 1, 1, 1]
    assert found.norm[0, :2].tolist() == pytest.approx([math.sqrt(29), 2])
    assert bool((found.context[0, 6:] == -1).all())
    unknown = Largest.empty(1)
    unknown.add(0, h, h.norm(dim=-1), torch.arange(3), 0, None)
    assert bool((unknown.token == -1).all())
    both = Largest.merge([found, unknown], [0, 3])
    assert both.context[0, :2].tolist() == [1, 4]
    assert both.context[0, 12] == -1
