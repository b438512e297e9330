"""Which context vectors are compared by topic in Table 1 of Song & Zhong 2023? Their protocol takes
few documents, many overlapping windows of each, and bases relative to the large corpus.
:func:`~tl_geometry.papers.song_zhong` calls it for similarities and incoherence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.from_model import decompose
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.model_view import ModelView


def topic_windows(
    documents: Sequence[Int[Tensor, "..."]], *, windows: int = 64, length: int = 128
) -> TokenWindows:
    """``windows`` windows of ``length`` ids from each document, at starts
    ``linspace(0, len - length, windows)`` rounded down.

    They overlap heavily, as published. So windows of one document are far from independent, and
    similarities within a document are in part similarities of the same words. The text of the
    paper's Fig. 2 says 32 windows per document; the figure shows 64.

    >>> topic_windows([torch.arange(10)], windows=3, length=4).tokens.tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    """
    require(len(documents) > 0, "documents", expected="at least one document", got="none")
    shortest = min(len(document) for document in documents)
    require(
        shortest >= length,
        "documents",
        expected=f"at least {length} tokens each",
        got=f"{shortest} in one",
        instead="longer documents",
    )
    # row s of the unfolded document is the window that starts at s
    rows = [
        document.unfold(0, length, 1)[np.linspace(0, len(document) - length, windows, dtype=int)]
        for document in documents
    ]
    return TokenWindows(
        tokens=torch.cat(rows),
        has_bos=False,
        labels=torch.arange(len(documents)).repeat_interleave(windows),
        names=tuple(str(i) for i in range(len(documents))),
        corpus="topics",
    )


def topic_bases(
    view: ModelView,
    basis: PositionContext,
    topics: TokenWindows,
    *,
    batch_size: int | None = None,
    progress: bool = True,
) -> tuple[Float[Tensor, "state position d_model"], Float[Tensor, "state context d_model"]]:
    """Positional and context vectors as published, for topic windows of L tokens. Mean and pos come
    from the large corpus at positions 1 to L - 1 only. ``ctx_c`` is the mean of topic window c over
    these positions, minus the mean of the large corpus, so the ctx of the topics need not sum to
    zero."""
    require_basis(basis)
    length = topics.tokens.shape[1]
    require(
        length <= basis.length,
        "topics",
        expected=f"windows of at most {basis.length} tokens",
        got=length,
        instead="longer length=",
    )
    means = basis.mean[:, None] + basis.pos_seen[:, 1:length]
    # the mean over these positions alone, so that pos sums to zero over the shorter window
    centre = means.mean(1)
    topic_basis = decompose(
        view,
        topics,
        states=basis.states,
        window=(1, length),
        second_moments=False,
        keep_ctx=True,
        keep=0,
        batch_size=batch_size,
        progress=progress,
    )
    # for the type checker: keep_ctx=True gives them
    assert topic_basis.context_means is not None
    return means - centre[:, None], topic_basis.context_means - centre[:, None]
