"""How are plain token ids cut or sampled into windows, do rows begin with BOS, and which hold
padding? For :mod:`tl_geometry.corpus.sources` and the papers' sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.errors import require

MANY_ROWS = 16
"""In at least this many rows, a single padding token at an end of one row may be chance."""
CERTAIN_RUN = 3
"""Length of a run of padding tokens at an end of a row that cannot be chance."""


def cut(ids: Sequence[int], length: int) -> Int[Tensor, "context position"]:
    """Consecutive non-overlapping windows of ``length`` ids; a shorter rest at the end is left out.

    >>> cut(range(7), 3).tolist()
    [[0, 1, 2], [3, 4, 5]]
    """
    used = len(ids) // length * length
    return torch.as_tensor(list(ids[:used]), dtype=torch.int64).view(-1, length)


def sample_starts(
    ids: Sequence[int], length: int, n: int, seed: int
) -> Int[Tensor, "context position"]:
    """``n`` windows at random starts, drawn with replacement (they overlap; the last possible start
    is never drawn): the published sampling of Song & Zhong 2023.

    >>> sample_starts(range(9), 3, 2, seed=0).diff(dim=1).tolist()
    [[1, 1], [1, 1]]
    """
    expected, got = f"more than {length} tokens", f"{len(ids)} tokens"
    require(len(ids) > length, "text", expected=expected, got=got, instead="a shorter length=")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - length, (n,), generator=generator)
    return torch.as_tensor(list(ids), dtype=torch.int64)[starts[:, None] + torch.arange(length)]


def begins_with_bos(ids: Int[Tensor, "batch position"], bos_id: int | None) -> bool:
    """Whether every row begins with the BOS id (false for a tokenizer that has none).

    >>> rows = torch.tensor([[0, 5], [0, 6]])
    >>> begins_with_bos(rows, 0), begins_with_bos(rows, 5), begins_with_bos(rows, None)
    (True, False, False)
    """
    return bos_id is not None and bool((ids[:, 0] == bos_id).all())


def padded_rows(ids: Int[Tensor, "batch position"], pad: int) -> int:
    """How many rows begin or end with padding; 0 where the ids do not decide it.

    If the padding token also occurs inside rows, the ids are random or the text itself uses it; a
    single one at an end of one row among many may be chance. Both count as no padding, unless some
    row has a run of three or more at an end.

    >>> padded_rows(torch.tensor([[5, 6, 7], [5, 6, 0]]), 0)
    1
    >>> padded_rows(torch.tensor([[5, 0, 7], [5, 6, 0]]), 0)
    0
    """
    is_pad = ids == pad
    if not bool(is_pad.any()):
        return 0
    # a cumulative product is 1 along the run at that end, and 0 after it
    left, right = is_pad.long().cumprod(1), is_pad.flip(1).long().cumprod(1)
    run_length = torch.maximum(left.sum(1), right.sum(1))
    inside = int(is_pad.sum() - (left.bool() | right.flip(1).bool()).sum())
    n_padded, longest = int((run_length > 0).sum()), int(run_length.max())
    chance = inside > 0 or (longest == 1 and n_padded == 1 and len(ids) >= MANY_ROWS)
    return 0 if chance and longest < CERTAIN_RUN else n_padded
