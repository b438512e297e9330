"""Which keys may a query see, as a mask or as ``first <= key < stop`` of each row, and what are
scores centred over these keys? Layer views, checks and everything that sums scores ask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROW_CELLS = 9 * 2**20
"""Cells ``[batch head row key]`` that are held at a time: 36 MiB in float32. Tensors above 32 MiB,
glibc's largest threshold, come from the kernel and go back to it; smaller ones of changing sizes
leave holes in the heap."""


def query_slices(q: Float[Tensor, "batch query head d_head"]) -> Iterator[slice]:
    """All query rows in slices, so that ``[batch head row key]`` has at most :data:`ROW_CELLS`
    cells (but at least one row)."""
    batch, length, heads, _ = q.shape
    step = max(1, ROW_CELLS // (batch * heads * length))
    return (slice(start, start + step) for start in range(0, length, step))


def causal_mask(
    queries: int, *, device: torch.device | str | None = None
) -> Bool[Tensor, "query key"]:
    """Keys up to and including the query's own position."""
    return torch.ones(queries, queries, dtype=torch.bool, device=device).tril()


def mask_facts(mask: Bool[Tensor, "query key"] | KeyRanges) -> dict[str, Bool[Tensor, ""]]:
    """What :func:`mask_form` asks of a mask, as tensors on its device: a caller reads them together
    with other numbers, so that a GPU is waited for once."""
    causal = torch.tensor(False)
    if isinstance(mask, KeyRanges):
        stop, from_first = mask.stop, (mask.first == 0).all()
        if len(stop) == mask.keys:
            causal = from_first & (stop == torch.arange(1, mask.keys + 1)).all()
        return {"causal mask": causal, "full mask": from_first & (stop == mask.keys).all()}
    queries, keys = mask.shape
    if queries == keys:
        causal = (mask == causal_mask(keys, device=mask.device)).all()
    return {"causal mask": causal, "full mask": mask.all()}


def mask_form(facts: Mapping[str, float | Tensor]) -> str:
    """``"causal"``, ``"full"`` (every query sees every key) or ``"other"``.

    >>> mask_form(mask_facts(causal_mask(3))), mask_form(mask_facts(causal_mask(3)[:2]))
    ('causal', 'other')
    """
    return "causal" if facts["causal mask"] else "full" if facts["full mask"] else "other"


def row_center(
    scores: Float[Tensor, "*batch query key"], allowed: Bool[Tensor, "..."]
) -> Float[Tensor, "*batch query key"]:
    """Scores minus the mean of their row over the allowed keys; zero elsewhere. This leaves their
    softmax over the allowed keys as it was.

    ``allowed [... query key]`` broadcasts against the scores, which may be infinite outside it.

    >>> row_center(torch.tensor([[5.0, 9.0], [1.0, 3.0]]), causal_mask(2)).tolist()
    [[0.0, 0.0], [-1.0, 1.0]]
    """
    # zeros first: an infinite score outside would make the mean NaN
    inside = torch.where(allowed, scores, 0)
    mean = inside.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, inside - mean, 0)


@dataclass(frozen=True, eq=False)
class KeyRanges:
    """A mask of which each query sees consecutive keys, ``first <= j < stop``, as causal masks and
    sliding windows are: two numbers for each query in place of a row of cells.

    Indexed as the mask ``[*head query key]`` that it stands for, over its leading axes, it gives
    rows of that mask. It lives on the CPU, so that asking it for a block waits for no device.

    >>> ranges = KeyRanges.of(causal_mask(3))
    >>> ranges[1].tolist(), ranges.cells.shape
    ([True, True, False], torch.Size([3, 3]))
    """

    first: Int[Tensor, "*head query"]
    stop: Int[Tensor, "*head query"]
    keys: int

    @classmethod
    def of(cls, cells: Bool[Tensor, "*head query key"]) -> KeyRanges | None:
        """The ranges of a mask; ``None`` where a row has a gap."""
        cells = cells.cpu()
        seen = cells.sum(-1)
        # argmax gives the first of equals: the first key that is seen
        first = torch.where(seen > 0, cells.int().argmax(-1), 0)
        ranges = cls(first, first + seen, cells.shape[-1])
        return ranges if torch.equal(ranges.cells, cells) else None

    @property
    def cells(self) -> Bool[Tensor, "*head query key"]:
        """The mask as a tensor."""
        return self[...]

    def __getitem__(self, at: Any) -> Bool[Tensor, "..."]:
        j = torch.arange(self.keys)
        return (j >= self.first[at].unsqueeze(-1)) & (j < self.stop[at].unsqueeze(-1))

    @property
    def counts(self) -> Int[Tensor, "*head query"]:
        """How many keys each query sees."""
        return self.stop - self.first


def after(
    mask: Bool[Tensor, "*head query key"] | KeyRanges, drop: int
) -> Bool[Tensor, "..."] | KeyRanges:
    """A mask without its first ``drop`` queries and keys."""
    if not isinstance(mask, KeyRanges):
        return mask[..., drop:, drop:]
    first, stop = ((x[..., drop:] - drop).clamp(min=0) for x in (mask.first, mask.stop))
    return KeyRanges(first, stop, mask.keys - drop)
