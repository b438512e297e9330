"""Chunks of text, and chunks of random tokens as a null."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.corpus.texts import windows
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.describing import as_view


def pseudo_sentences(
    model: Any,
    text: str,
    length: int = 50,
    *,
    n: int | None = None,
    prepend_bos: bool = False,
    corpus: str = "text",
) -> TokenWindows:
    """Consecutive non-overlapping chunks of ``length`` tokens of a text, newlines replaced by
    spaces, without BOS (as published).

    A short last chunk is left out (the published code keeps it). The first ``n`` chunks, or all.
    Sarfati et al. 2025, section 2. A model that was always trained behind a BOS token may know
    little without it: ``prepend_bos=True`` then (it counts in ``length``).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.corpus.pseudo_sentences(model, "def f(x): return x " * 20, 10).tokens.shape[1]
    10
    """
    cut = windows(model, text.replace("\n", " "), length, prepend_bos=prepend_bos, corpus=corpus)
    require(
        n is None or 1 <= n <= len(cut),
        "n",
        expected=f"1 to {len(cut)} chunks",
        got=n,
        instead="n=None for all",
    )
    return cut[: n or len(cut)]


def gibberish(
    model: Any,
    n: int,
    length: int = 50,
    *,
    like: TokenWindows | Tensor | None = None,
    prepend_bos: bool = False,
    seed: int = 0,
) -> TokenWindows:
    """Chunks of random tokens: uniform over the vocabulary (as published), or drawn from the tokens
    of ``like``.

    ``like`` keeps the frequencies of a corpus and destroys its order: the milder null. Set
    ``prepend_bos`` as in the chunks that it is compared with, or the missing BOS is part of the
    difference (it counts in ``length``).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.corpus.gibberish(model, 4, 10, prepend_bos=True).tokens.shape
    torch.Size([4, 10])
    """
    view = as_view(model)
    generator = torch.Generator().manual_seed(seed)
    if like is None:
        tokens, name = (
            torch.randint(0, view.d_vocab, (n, length), generator=generator),
            "gibberish, uniform",
        )
    else:
        rows = like.tokens[:, int(like.has_bos) :] if isinstance(like, TokenWindows) else like
        pool = rows.reshape(-1)
        tokens, name = (
            pool[torch.randint(0, len(pool), (n, length), generator=generator)],
            "gibberish, corpus frequencies",
        )
    if prepend_bos:
        require(
            view.bos_id is not None,
            "prepend_bos",
            expected="a tokenizer with a BOS token",
            got="none",
            instead="prepend_bos=False",
        )
        tokens[:, 0] = view.bos_id or 0
    return TokenWindows(tokens=tokens, has_bos=prepend_bos, corpus=name)
