"""Functions of the offset by loops and by hand: profiles, shares under the mask of each layer,
waves of a kernel. No model."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

from tests.splits import synthetic
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.relative import (
    TOTAL,
    RelativeKernel,
    cross_validated,
    offset_profile,
    offset_share,
    prompt_groups,
)
from tl_geometry.scores.shapes import offset_sums
from tl_geometry.scores.split import ScoreSplit

LENGTH, PROMPTS = 7, 12


def window_mask(length: int = LENGTH, reach: int = 3) -> Tensor:
    """Keys ``i - reach < j <= i``."""
    ones = torch.ones(length, length, dtype=torch.bool)
    return ones.tril() & ~ones.tril(-reach)


def drawn(
    heads: tuple[tuple[int, int], ...], masks: list[Tensor], *, start: int | None = None
) -> ScoreSplit:
    """A split of twelve random prompts of seven tokens."""
    g = torch.Generator().manual_seed(3)
    q, k = (
        torch.randn(2, PROMPTS, LENGTH, len(heads), 4, generator=g, dtype=torch.float64)
        for _ in "qk"
    )
    window = None if start is None else (start, LENGTH)
    return dataclasses.replace(
        synthetic(heads=len(heads), tokens=LENGTH),
        provenance=Provenance(model="drawn", window=window),
        heads=heads,
        parts=("bias", "cvec"),
        q=q,
        k=k,
        mask=torch.stack(masks),
        planes=HeadPlanes(
            torch.zeros(len(heads), 4, dtype=torch.int64),
            torch.zeros(len(heads), 1).double(),
            LENGTH,
        ),
    )


def matrix(split: ScoreSplit, term: tuple[int, int] | None) -> np.ndarray:
    """A term by part numbers, or the sum of all."""
    q, k = (x.sum(0) if term is None else x[term[i]] for i, x in enumerate((split.q, split.k)))
    return torch.einsum("bihe,bjhe->bhij", q, k).numpy()


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
TWO_LAYERS = ((0, 1), (2, 0), (2, 1))


def two_layers(start: int | None = None) -> ScoreSplit:
    """One head under a causal mask, two of another layer that see three keys."""
    return drawn(TWO_LAYERS, [CAUSAL, window_mask(), window_mask()], start=start)


def test_offset_shares_are_those_of_each_layer_alone_under_its_own_mask() -> None:
    """Heads of two layers, one of them behind a window: each as if it were split alone."""
    split = two_layers()
    first = drawn(TWO_LAYERS[:1], [CAUSAL])
    first = dataclasses.replace(first, q=split.q[:, :, :, :1], k=split.k[:, :, :, :1])
    second = drawn(TWO_LAYERS[1:], [window_mask()] * 2)
    second = dataclasses.replace(second, q=split.q[:, :, :, 1:], k=split.k[:, :, :, 1:])
    for term in (None, "bias-cvec"):
        alone = torch.cat([offset_share(part, term) for part in (first, second)])
        torch.testing.assert_close(offset_share(split, term), alone)
        assert not torch.allclose(
            offset_share(drawn(TWO_LAYERS, [CAUSAL] * 3), term)[1:], alone[1:], atol=1e-4
        )


@pytest.mark.parametrize("groups", [None, 2, 3, 12])
@pytest.mark.parametrize("drop", [0, 2])
def test_an_offset_share_by_least_squares_on_the_other_groups(
    groups: int | None, drop: int
) -> None:
    """``1 - |S - D beta|^2 / |S|^2`` of held-out groups, with numpy's least squares."""
    split = drawn(((0, 0),), [CAUSAL])
    scores = matrix(split, None)[:, 0, drop:, drop:]
    n = LENGTH - drop
    inside = np.tril(np.ones((n, n), bool))

    def centred(x: np.ndarray) -> np.ndarray:
        mean = (x * inside).sum(-1, keepdims=True) / inside.sum(-1, keepdims=True)
        return np.where(inside, x - mean, 0)

    offset = np.arange(n)[:, None] - np.arange(n)
    dummies = np.stack([centred((offset == d).astype(float)).ravel() for d in range(n)], 1)
    rows = centred(scores).reshape(PROMPTS, -1)
    parts = np.array_split(np.arange(PROMPTS), 2 if groups is None else groups)
    left = 0.0
    for part in parts:
        others = np.setdiff1d(np.arange(PROMPTS), part)
        beta = np.linalg.lstsq(
            np.tile(dummies, (len(others), 1)), rows[others].ravel(), rcond=1e-10
        )[0]
        left += ((rows[part] - dummies @ beta) ** 2).sum()
    found = float(offset_share(split, groups=groups, drop=drop)[0])
    assert found == pytest.approx(1 - left / (rows**2).sum())


def test_a_share_of_nothing_is_unknown() -> None:
    """Scores without energy have no share; the other heads keep theirs."""
    centred = torch.zeros(2, 2, 3, 3, dtype=torch.float64)
    centred[:, 0, 1, :2] = torch.tensor([0.5, -0.5])
    centred[:, 0, 2] = torch.tensor([1.0, 0.0, -1.0])
    inside = torch.ones(3, 3, dtype=torch.bool).tril()
    found = cross_validated([offset_sums(x, inside) for x in centred.split(1)])
    assert float(found[0]) == pytest.approx(1)
    assert math.isnan(float(found[1]))


def test_groups_hold_eight_prompts_and_number_two_to_eight() -> None:
    """Both sides of every threshold."""
    prompts = (2, 15, 16, 23, 24, 63, 64, 72, 1000)
    assert [prompt_groups(n) for n in prompts] == [2, 2, 2, 2, 3, 7, 8, 8, 8]


@pytest.mark.parametrize(
    ("groups", "says"),
    [(1, "groups: expected 2 to 12, the prompts, got 1"), (13, "2 to 12, the prompts, got 13")],
)
def test_a_share_needs_two_groups_of_prompts(groups: int, says: str) -> None:
    """As many groups as prompts are the most."""
    with pytest.raises(GeometryError, match=says):
        offset_share(two_layers(), groups=groups)


@pytest.mark.parametrize("drop", [None, 0, 2])
@pytest.mark.parametrize("term", [None, ("bias", "cvec"), "cvec-bias"])
@pytest.mark.parametrize("level", [0.95, 0.5])
def test_a_profile_by_loops(
    drop: int | None, term: tuple[str, str] | str | None, level: float
) -> None:
    """Means over cells, then over prompts, with a t interval; the window of the basis is the
    default of what is dropped."""
    split = two_layers(start=1)
    found = offset_profile(split, term, drop=drop, level=level)
    start = 1 if drop is None else drop
    number = {None: None, ("bias", "cvec"): (0, 1), "cvec-bias": (1, 0)}[term]
    scores, n = matrix(split, number), LENGTH
    names = {None: "all terms", ("bias", "cvec"): "bias-cvec", "cvec-bias": "cvec-bias"}
    assert (found.term, found.level, found.heads) == (names[term], level, TWO_LAYERS)
    assert found.first == 0
    assert found.offsets.tolist() == list(range(n - start))
    t = scipy.stats.t.ppf((1 + level) / 2, PROMPTS - 1)
    for h, reach in enumerate((n, 3, 3)):
        means = []
        for d in range(n - start):
            cells = [(i, i - d) for i in range(start + d, n) if d < reach]
            assert int(found.cells[h, d]) == len(cells)
            if not cells:
                assert math.isnan(float(found.mean[h, d]))
                continue
            by_prompt = np.mean([scores[:, h, i, j] for i, j in cells], axis=0)
            reach_of_mean = t * by_prompt.std(ddof=1) / PROMPTS**0.5
            means.append(by_prompt.mean())
            assert float(found.mean[h, d]) == pytest.approx(means[-1])
            assert float(found.low[h, d]) == pytest.approx(means[-1] - reach_of_mean)
            assert float(found.high[h, d]) == pytest.approx(means[-1] + reach_of_mean)
        assert int(found.peak[h]) == int(np.argmax(means))


def test_a_profile_under_a_full_mask_begins_at_the_most_negative_offset() -> None:
    """Queries that see later keys have negative offsets, in the table too."""
    full = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    found = offset_profile(drawn(((0, 0),), [full]))
    assert (found.first, found.offsets[0], found.offsets[-1]) == (-6, -6, 6)
    assert found.cells[0].tolist() == [1, 2, 3, 4, 5, 6, 7, 6, 5, 4, 3, 2, 1]
    frame = found.to_dataframe()
    assert frame["offset"].tolist() == list(range(-6, 7))
    assert frame["layer"].tolist() == [0] * 13
    assert TOTAL == "all terms"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"level": 0.0}, "level: expected between 0 and 1, got 0.0"),
        ({"level": 1.0}, "level: expected between 0 and 1, got 1.0"),
        ({"drop": -1}, "drop: expected 0 to 6, got -1"),
        ({"drop": 7}, "drop: expected 0 to 6, got 7"),
    ],
)
def test_a_profile_refuses_what_it_cannot_take(options: dict[str, Any], says: str) -> None:
    """A level of 0 or 1, and more positions dropped than there are."""
    with pytest.raises(GeometryError, match=says):
        offset_profile(two_layers(), **options)


def test_all_positions_but_one_can_be_dropped() -> None:
    """The last query alone sees itself."""
    found = offset_profile(two_layers(), drop=6)
    assert found.cells.tolist() == [[1], [1], [1]]


# --- Kernels --------------------------------------------------------------------------------------


def kernel() -> RelativeKernel:
    """Two heads: planes of frequency 0.5, -0.25 and 0, and one plane of 2 in place of three."""
    nan = math.nan
    theta = torch.tensor([[0.5, -0.25, 0.0], [2.0, nan, nan]], dtype=torch.float64)
    plane = torch.tensor([[0, 0, 1, 1, 2], [0, 0, 0, 0, 0]])
    return RelativeKernel(
        provenance=Provenance(model="planted"),
        heads=((0, 0), (3, 1)),
        head_planes=HeadPlanes(plane, theta, 4),
        cosine=torch.tensor([[3.0, 0.0, -2.0], [-1.0, nan, nan]], dtype=torch.float64),
        sine=torch.tensor([[4.0, 1.0, 0.0], [0.0, nan, nan]], dtype=torch.float64),
    )


def test_waves_of_a_kernel_by_hand() -> None:
    """Amplitudes, peaks and wavelengths; a plane that is not rotated is a constant without peak,
    and the peak under a negative frequency is where its wave is largest."""
    found = kernel()
    assert found.amplitude[0].tolist() == pytest.approx([5, 1, -2])
    assert found.amplitude[1].tolist() == pytest.approx([1, math.nan, math.nan], nan_ok=True)
    wavelengths = [4 * math.pi, 8 * math.pi, math.inf]
    assert found.wavelength[0].tolist() == pytest.approx(wavelengths)
    peaks = [math.atan2(4, 3) / 0.5, (2 * math.pi - math.pi / 2) / 0.25, math.nan]
    assert found.peak[0].tolist() == pytest.approx(peaks, nan_ok=True)
    assert float(found.peak[1, 0]) == pytest.approx(math.pi / 2)
    for m in (0, 1):
        peak = float(found.peak[0, m])
        assert 0 <= peak < wavelengths[m]
        value = found.by_plane(torch.tensor([round(peak)]))[0, m, 0]
        assert float(value) == pytest.approx(float(found.amplitude[0, m]), rel=0.05)


def test_a_kernel_at_offsets_by_hand() -> None:
    """By default at the offsets of the prompt; planes that a head lacks add nothing."""
    found = kernel()
    for offsets, given in ((range(4), None), ((9, -2), torch.tensor([9, -2]))):
        by_plane = found.by_plane(given)
        assert by_plane.shape == (2, 3, len(offsets))
        for column, d in enumerate(offsets):
            waves = [3 * math.cos(d / 2) + 4 * math.sin(d / 2), math.sin(-d / 4), -2]
            assert by_plane[0, :, column].tolist() == pytest.approx(waves)
            assert by_plane[1, :, column].tolist() == pytest.approx([-math.cos(2 * d), 0, 0])
            total = found.total(given)[:, column].tolist()
            assert total == pytest.approx([sum(waves), -math.cos(2 * d)])


def test_the_table_of_a_kernel_has_the_planes_that_a_head_has() -> None:
    """Four rows, those of the second head end after its one plane."""
    frame = kernel().to_dataframe()
    assert frame["layer"].tolist() == [0, 0, 0, 3]
    assert frame["plane"].tolist() == [0, 1, 2, 0]
    assert frame["amplitude"].tolist() == pytest.approx([5, 1, -2, 1])
    names = ["wavelength", "amplitude", "peak", "cosine", "sine"]
    assert frame.columns.tolist()[-5:] == names
