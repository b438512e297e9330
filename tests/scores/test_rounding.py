"""Where rounding makes the check of sums blunt, the result says so, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.base.errors import ReconstructionError
from tl_geometry.models.reconstruction import judge_rounding


def with_a_large_token(times: float) -> tuple[Any, Tensor]:
    """The embedded model with one token's embedding so many times as large, and windows with it."""
    model = tlg.zoo.embedded()
    ids = tlg.zoo.default_windows(model, 16, n=8).tokens
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2 and len(p) == model.cfg.d_vocab:
                p[int(ids[3, 7])] *= times
                break
    return model, ids


def blunt(flags: tuple[str, ...]) -> list[str]:
    return [flag for flag in flags if "rounding may reach" in flag]


@pytest.mark.slow
def test_a_check_that_rounding_makes_blunt_is_flagged_with_both_numbers() -> None:
    for times, flagged in ((1.0, False), (1e3, True)):
        model, ids = with_a_large_token(times)
        basis = tlg.decompose(model, ids, progress=False)
        for result in (
            tlg.split_scores(model, ids, basis, layers=[0]),
            tlg.sweep_heads(model, ids, basis, progress=False),
        ):
            found = blunt(result.provenance.flags)
            assert bool(found) == flagged
            assert all(flag.startswith("layer 0: ") and "spread over" in flag for flag in found)


@pytest.mark.slow
def test_a_check_that_would_see_nothing_is_refused() -> None:
    model, ids = with_a_large_token(1e6)
    basis = tlg.decompose(model, ids, progress=False)
    with pytest.raises(ReconstructionError, match=r"may reach .*\. Use model\.double\(\)"):
        tlg.split_scores(model, ids, basis, layers=[0])
    with pytest.raises(ReconstructionError, match=r"may reach .*\. Use model\.double\(\)"):
        tlg.sweep_heads(model, ids, basis, progress=False)
    normalized = tlg.decompose(model, ids, normalize=True, progress=False)
    assert not blunt(tlg.split_scores(model, ids, normalized, layers=[0]).provenance.flags)


@pytest.mark.slow
def test_edits_of_such_terms_are_flagged_and_refused() -> None:
    def edited(times: float) -> tuple[str, ...]:
        model, ids = with_a_large_token(times)
        basis = tlg.decompose(model, ids, progress=False)
        edit = tlg.interventions.remove_term(model, basis, "cvec-cvec", "L0H0")
        with edit, torch.no_grad():
            model(ids)
        return edit.flags

    assert not edited(1.0)
    (flag,) = edited(3e3)
    assert flag.startswith("layer 0: rounding may reach")
    with pytest.raises(ReconstructionError, match=r"may reach .*\. Use model\.double\(\)"):
        edited(1e6)


@pytest.mark.slow
def test_values_that_cancel_are_flagged_and_refused() -> None:
    def split(times: float) -> list[str]:
        model, ids = with_a_large_token(times)
        basis = tlg.decompose(model, ids, progress=False)
        return blunt(tlg.split_values(model, ids, basis, layers=[0]).provenance.flags)

    assert not split(1.0)
    (flag,) = split(1e6)
    assert flag.startswith("values of layer 0: ")
    assert "z of a token reaches" in flag
    with pytest.raises(ReconstructionError, match="what z of a token reaches"):
        split(1e8)


def test_the_limits_are_one_percent_and_the_whole_spread() -> None:
    unit, ranges = 2**-24, torch.tensor([1.0, 10.0, 10.0])
    bound = 32 * unit

    def judged(parts: float, roundoff: float = unit, spreads: Tensor = ranges) -> int:
        return len(judge_rounding(roundoff, (1.0, parts), spreads, "layer 0"))

    assert judged(0.0999 / bound) == 0
    assert judged(0.101 / bound) == judged(9.99 / bound) == 1
    with pytest.raises(ReconstructionError):
        judged(10.01 / bound)
    # half precision: rounding of the model is said, ours decides
    assert judged(100.0, 2**-8) == 1
    # uniform heads have nothing that could be seen
    assert judged(10.01 / bound, spreads=torch.tensor([0.0, bound])) == 0
