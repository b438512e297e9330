"""Masks as ranges of keys are the masks that they stand for, and rows are centred over the keys
that they see."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tl_geometry.base.rows import (
    KeyRanges,
    after,
    causal_mask,
    mask_facts,
    mask_form,
    row_center,
)


def sliding(queries: int, keys: int, width: int) -> Tensor:
    """Queries that see the last ``width`` keys up to their own."""
    i, j = torch.arange(queries).unsqueeze(1), torch.arange(keys)
    return (j <= i) & (j > i - width)


FULL = torch.ones(3, 5, dtype=torch.bool)
PADDED = causal_mask(5) & (torch.arange(5) > 1)
MASKS = {
    "causal": (causal_mask(5), "causal"),
    "one cell": (torch.ones(1, 1, dtype=torch.bool), "causal"),
    "full": (FULL, "full"),
    "full square": (torch.ones(4, 4, dtype=torch.bool), "full"),
    "first rows": (causal_mask(5)[:3], "other"),
    "more queries than keys": (sliding(5, 3, 9), "other"),
    "sliding": (sliding(6, 6, 3), "other"),
    "without its first keys": (PADDED, "other"),
    "anticausal": (causal_mask(4).mT, "other"),
    "all but one": (
        FULL & ~((torch.arange(5) == 4) & (torch.arange(3) == 2).unsqueeze(1)),
        "other",
    ),
}
"""Masks whose rows have no gap, and their forms."""


@pytest.mark.parametrize("name", MASKS)
def test_ranges_are_the_masks_they_stand_for(name: str) -> None:
    mask, form = MASKS[name]
    ranges = KeyRanges.of(mask)
    assert ranges is not None
    assert torch.equal(ranges.cells, mask)
    assert torch.equal(ranges.counts, mask.sum(-1))
    assert torch.equal(ranges[1:3], mask[1:3])
    assert mask_form(mask_facts(mask)) == form
    assert mask_form(mask_facts(ranges)) == form
    for drop in range(min(3, *mask.shape)):
        rest = after(ranges, drop)
        assert isinstance(rest, KeyRanges)
        assert torch.equal(rest.cells, mask[drop:, drop:])
        dense = after(mask, drop)
        assert isinstance(dense, Tensor)
        assert torch.equal(dense, mask[drop:, drop:])
    per_head = KeyRanges.of(torch.stack([mask, mask]))
    assert per_head is not None
    assert torch.equal(per_head.cells, torch.stack([mask, mask]))


def test_a_row_with_a_gap_is_no_range() -> None:
    mask = causal_mask(4)
    mask[3, 1] = False
    assert KeyRanges.of(mask) is None


def test_rows_are_centred_over_what_they_see() -> None:
    mask = PADDED & (torch.arange(5) != 3)
    scores = torch.randn(2, 5, 5, generator=torch.Generator().manual_seed(0)).double() + 4
    found = row_center(scores.masked_fill(~mask, torch.inf), mask)
    for head in range(2):
        for i in range(5):
            seen = mask[i].nonzero()[:, 0]
            row = torch.zeros(5, dtype=torch.float64)
            if len(seen):
                row[seen] = scores[head, i, seen] - scores[head, i, seen].mean()
            assert torch.allclose(found[head, i], row, atol=1e-12)
    assert not bool(mask[0].any())
