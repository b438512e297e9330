"""Intervals of the analysis of variance: the jackknife of decompositions made without each group,
with the noise that few contexts leave in pos taken out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tl_geometry import decompose_activations
from tl_geometry.base.intervals import t_quantile
from tl_geometry.base.results import Result
from tl_geometry.decomposition.variance import Anova
from tl_geometry.report.tables import joined

pytestmark = pytest.mark.once


def planted(contexts: int, seed: int, *, size: float = 0.2) -> Tensor:
    """Two states: noise, correlated along the window, with a positional effect of some size."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(2, contexts, 6, 5, generator=g).double().cumsum(2)
    return h + size * torch.linspace(-1, 1, 6).double()[:, None]


@pytest.mark.parametrize(("contexts", "groups"), [(20, 5), (48, 6)])
def test_intervals_are_those_of_decompositions_without_each_group(
    contexts: int, groups: int, tmp_path: Path
) -> None:
    h = planted(contexts, 0)
    basis = decompose_activations(h, groups=groups)
    table = basis.anova()
    shares = table.shares
    of = basis.group_of
    for name in ("pos", "ctx", "resid"):
        rest = torch.stack(
            [decompose_activations(h[:, of != g]).anova().shares[name] for g in range(groups)]
        )
        corrected = groups * shares[name] - (groups - 1) * rest.mean(0)
        error = ((groups - 1) / groups * (rest - rest.mean(0)).square().sum(0)).sqrt()
        found = table.intervals[name]
        assert torch.allclose(found[:, 0], corrected)
        if name == "pos" or contexts >= 32:
            reach = float(t_quantile(torch.tensor(groups - 1.0))) * error
            assert torch.allclose(found[:, 2] - corrected, reach, rtol=1e-6)
            assert torch.allclose(found[:, 1] + found[:, 2], 2 * corrected)
        else:
            assert found[:, 1:].isnan().all()
    total = sum(v[:, 0] for v in table.intervals.values())
    assert torch.allclose(torch.as_tensor(total), torch.ones(2).double())
    assert table.blocks == groups
    row = dict(zip(table.columns(), table.rows()[1], strict=True))
    assert row["pos_corrected"] == pytest.approx(float(table.intervals["pos"][1, 0]))
    assert row["pos_corrected_low"] == pytest.approx(float(table.intervals["pos"][1, 1]))
    again = Anova.load(table.save(tmp_path / "anova.safetensors"))
    assert str(again.rows()) == str(table.rows())


def test_blocks_hold_eight_contexts() -> None:
    """Runs of up to 8 windows of one topic are left out whole."""
    h = planted(32, 0)
    basis = decompose_activations(h)
    assert basis.group_counts.tolist() == [4] * 8
    same = decompose_activations(h, groups=4).anova()
    assert basis.anova().blocks == same.blocks == 4
    for name, values in basis.anova().intervals.items():
        assert torch.allclose(values, same.intervals[name])


@pytest.mark.parametrize(("contexts", "groups", "given"), [(10, 8, 1), (9, 8, 0), (20, 3, 0)])
def test_no_interval_from_few_contexts_or_groups(contexts: int, groups: int, given: bool) -> None:
    table = decompose_activations(planted(contexts, 1), groups=groups).anova()
    assert bool(table.intervals) == given
    assert ("pos_corrected_low" in table.columns()) == given
    assert ("pos_debiased" in table.columns()) != given


def outside(table: Result) -> list[str]:
    """Cells whose number is not within the interval that is written beside it."""
    texts = [str(c).replace("−", "-") for row in joined(table)[1] for c in row]
    numbers = [[float(x) for x in re.findall(r"-?[0-9.]+", c)] for c in texts if "[" in c]
    ends = [(x, (low, high), f"{x} [{low}, {high}]") for x, low, high in numbers]
    assert ends
    return [c for x, (low, high), c in ends if not low <= x <= high]


def test_every_printed_value_is_inside_its_printed_interval() -> None:
    """Few contexts leave much noise in pos: the share of the sample is far outside the interval,
    which is that of the corrected share (the twin writes the one beside the other)."""
    table = decompose_activations(planted(48, 3, size=0.0)).anova()
    assert outside(table) == []
    shifted = {
        n: v - torch.tensor([v[:, 2].max() - v[:, 1].min(), 0, 0])
        for n, v in table.intervals.items()
    }
    assert outside(dataclasses.replace(table, intervals=shifted))


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
