"""How does a corpus go through a model? In :func:`batches` of contexts: the one loop behind
``decompose``, the sweeps over heads and writers, composition and features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base.checks import seeded
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.batches import another_row
from tl_geometry.models.model_view import ModelView


class Batch(NamedTuple):
    """The contexts ``at`` of a corpus, and the ``row`` of the one that is verified: a different row
    each time, because a user's hook may change some rows only."""

    at: slice
    tokens: Int[Tensor, "batch position"]
    row: int

    def sample(self, verify: Callable[..., None] | None = None) -> dict[str, Any]:
        """Keyword arguments of :meth:`ModelView.run_layers` that verify the sampled context;
        ``verify`` is called with its view for further checks."""
        return {"sample": (self.row, verify or (lambda *_: None))}


def cuts(contexts: int, size: int, borders: Sequence[int] = ()) -> list[slice]:
    """Batches of at most ``size`` contexts; each ends where a group does.

    >>> cuts(5, 2, borders=(3,))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 5, None)]
    """
    groups = pairwise([0, *borders, contexts])
    return [slice(i, min(i + size, end)) for start, end in groups for i in range(start, end, size)]


def batches(
    view: ModelView,
    source: TokenWindows,
    cut: Sequence[slice],
    *,
    progress: bool = False,
    seed: int = 0,
) -> Iterator[Batch]:
    """Each batch of ``cut`` in turn; ``seed`` draws the rows that are verified."""
    row, draws = 0, seeded(seed)
    sizes = [at.stop - at.start for at in cut]
    with tqdm(total=sum(sizes), unit="ctx", disable=not progress, desc=view.name) as bar:
        for at, size in zip(cut, sizes, strict=True):
            row = another_row(row, size, draws)
            yield Batch(at, source.tokens[at], row)
            bar.update(size)
