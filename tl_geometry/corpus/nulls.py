"""Which inputs do the papers use, and which input holds no text? :func:`pseudo_sentences` are the
chunks of text for trajectories, :func:`gibberish` the chunks of random tokens to compare them with,
:func:`repeated_random_tokens` the input that shows head types."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.corpus.sources import bos_to_prepend
from tl_geometry.corpus.texts import windows
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view

HIGH_TOKEN = 10_000
"""Random ids stay below this one, as published: in large vocabularies special tokens rarely have
lower ids."""


def pseudo_sentences(
    model: ModelLike,
    text: str,
    length: int = 50,
    *,
    n: int | None = None,
    prepend_bos: bool = False,
    corpus: str = "text",
) -> TokenWindows:
    """Consecutive non-overlapping chunks of ``length`` tokens of a text, newlines replaced by
    spaces, without BOS (as published).

    Sarfati et al. 2025, section 2; the published code keeps a short last chunk, which is left out
    here. ``n`` takes the first chunks, ``None`` all. A model whose training texts always began with
    BOS may predict badly without it: then set ``prepend_bos=True`` (BOS counts in ``length``).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.corpus.pseudo_sentences(model, "def f(x): return x " * 20, 10).tokens.shape[1]
    10
    """
    chunks = windows(model, text.replace("\n", " "), length, prepend_bos=prepend_bos, corpus=corpus)
    expected, instead = f"1 to {len(chunks)} chunks", "n=None for all"
    require(n is None or 1 <= n <= len(chunks), "n", expected=expected, got=n, instead=instead)
    return chunks[:n]


def gibberish(
    model: ModelLike, n: int, length: int = 50, *, prepend_bos: bool = False, seed: int = 0
) -> TokenWindows:
    """Chunks of random tokens, uniform over the vocabulary (as published).

    Set ``prepend_bos`` as in the chunks of text to compare with, or a missing BOS becomes part of
    the difference. BOS counts in ``length``.

    Raises ``GeometryError`` for ``prepend_bos`` with a tokenizer that has no BOS.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.corpus.gibberish(model, 4, 10, prepend_bos=True).tokens.shape
    torch.Size([4, 10])
    """
    view, generator = as_view(model), torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, view.d_vocab, (n, length), generator=generator)
    bos = bos_to_prepend(view, prepend_bos)
    if bos is not None:
        tokens[:, 0] = bos
    return TokenWindows(tokens=tokens, has_bos=prepend_bos, corpus="gibberish, uniform")


def repeated_random_tokens(
    period: int = 8,
    copies: int = 3,
    batch: int = 1,
    *,
    low: int = 1000,
    high: int = HIGH_TOKEN,
    seed: int = 1234,
    bos_id: int | None = None,
) -> Int[Tensor, "batch position"]:
    """``batch`` rows of ``period`` distinct random token ids from ``low`` to ``high - 1``, repeated
    ``copies`` times, after ``bos_id`` where one is given.

    The defaults, range and seed included, give the input of Song & Zhong 2023, Fig. 4: the text
    says "repeated twice", the published code makes three copies, 24 tokens, without BOS.

    >>> repeated_random_tokens()[0, :9].tolist()
    [6775, 4171, 8806, 7365, 8316, 2564, 7432, 3625, 6775]
    """
    expected, got = "at least 1 each", (period, copies, batch)
    require(min(got) >= 1, "sizes", expected=expected, got=got)
    expected, got = f"at least {period} ids", f"{max(0, high - low)} from {low} to {high - 1}"
    require(high - low >= period, "low, high", expected=expected, got=got, instead="a wider range")
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(low, high, (batch, period), generator=generator)
    if 4 * period**2 > high - low:
        # a row repeats a token with probability near period^2 / (2 (high - low)), here above 1 / 8:
        # not redrawn until distinct, but taken from a permutation of the range
        orders = [torch.randperm(high - low, generator=generator)[:period] for _ in range(batch)]
        rows = low + torch.stack(orders)
    # sorted, equal ids are neighbours
    while bool((twice := (rows.sort(-1).values.diff(dim=-1) == 0).any(-1)).any()):
        rows[twice] = torch.randint(low, high, (int(twice.sum()), period), generator=generator)
    tokens = rows.repeat(1, copies)
    return tokens if bos_id is None else torch.cat([torch.full((batch, 1), bos_id), tokens], dim=1)
