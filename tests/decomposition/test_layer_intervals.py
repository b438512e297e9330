"""Intervals of the analysis of variance: the jackknife of decompositions made without each group,
with the noise that few contexts leave in pos taken out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tl_geometry import decompose_activations
from tl_geometry.decomposition.variance import Anova


def planted(contexts: int, seed: int, *, size: float = 0.2) -> Tensor:
    """Two states: noise, correlated along the window, with a positional effect of some size."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(2, contexts, 6, 5, generator=g).double().cumsum(2)
    return h + size * torch.linspace(-1, 1, 6).double()[:, None]


def test_intervals_are_those_of_decompositions_without_each_group(tmp_path: Path) -> None:
    h = planted(20, 0)
    basis = decompose_activations(h, groups=5)
    table = basis.anova()
    shares = table.shares
    groups = basis.group_of
    assert groups is not None
    for name in ("pos", "ctx", "resid"):
        rest = torch.stack(
            [decompose_activations(h[:, groups != g]).anova().shares[name] for g in range(5)]
        )
        corrected = 5 * shares[name] - 4 * rest.mean(0)
        error = (4 / 5 * (rest - rest.mean(0)).square().sum(0)).sqrt()
        found = table.intervals[name]
        assert torch.allclose(found[:, 0], corrected)
        assert torch.allclose(found[:, 2] - corrected, 2.776445 * error, rtol=1e-6)
        assert torch.allclose(found[:, 1] + found[:, 2], 2 * corrected)
    total = sum(v[:, 0] for v in table.intervals.values())
    assert torch.allclose(torch.as_tensor(total), torch.ones(2).double())
    row = dict(zip(table.columns(), table.rows()[1], strict=True))
    assert row["pos_low"] == pytest.approx(float(table.intervals["pos"][1, 1]))
    assert row["ctx_high"] == pytest.approx(float(table.intervals["ctx"][1, 2]))
    again = Anova.load(table.save(tmp_path / "anova.safetensors"))
    assert again.rows() == table.rows()


@pytest.mark.parametrize(("contexts", "groups", "given"), [(10, 8, 1), (9, 8, 0), (20, 3, 0)])
def test_no_interval_from_few_contexts_or_groups(contexts: int, groups: int, given: bool) -> None:
    table = decompose_activations(planted(contexts, 1), groups=groups).anova()
    assert bool(table.intervals) == given
    assert ("pos_low" in table.columns()) == given


def test_the_interval_is_about_the_share_without_sampling_noise() -> None:
    """No position at all: the share of pos is what noise leaves, and zero is in the interval, about
    as often as it says; around the share itself the same interval would hardly ever hold zero."""
    held = plain = 0
    for seed in range(120):
        white = torch.randn(24, 6, 12, generator=torch.Generator().manual_seed(seed))
        table = decompose_activations(white).anova()
        _, low, high = table.intervals["pos"][0].tolist()
        half = (high - low) / 2
        held += low <= 0 <= high
        plain += float(table.shares["pos"][0]) - half <= 0
    assert 0.88 <= held / 120 <= 1.0
    assert plain / 120 < 0.3
