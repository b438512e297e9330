"""With which settings were Tables 1 to 5 of Song & Zhong 2023 made?
:func:`~tl_geometry.papers.song_zhong` runs them.

The published code deviates from the paper, and each deviation changes the published numbers. Each
has a switch here. :func:`settings_for` turns a switch on where the published run had the deviation.
With every switch off (:meth:`Settings.exact`) the paper's formulas remain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.models.model_view import ModelView

FAMILIES = {
    "gpt2": "GPT-2",
    "bert-base-cased": "BERT",
    "bloom-560m": "BLOOM",
    "llama-2-7b": "Llama-2",
    "llama-2-7b-hf": "Llama-2",
}
"""Last part of a model's name, in lower case -> its name in the published tables."""
SWITCHES = {
    "uint16": "token ids modulo 65,536",
    "causal": "causal mask",
    "raw_denominator": "relative norm over raw states of fresh windows",
    "overlap": "overlapping windows",
    "absolute_with_self": "similarities with self-pairs",
    "final_norm": "last state after the final norm",
}
"""Switches of :class:`Settings` -> the flag that a result carries where one is on."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What was run. The defaults are those of the published code.

    Sizes:

    - ``length``: tokens of a window; position 0 is left out of all measures.
    - ``contexts``: windows of the basis.
    - ``fresh``: further windows, for the denominator of the relative norm.
    - ``states``: how many states are measured, at even distances.
    - ``k``, ``strategy``: the upper bound on the rank, and how ScreeNOT (which estimates the rank)
      fills in the spectrum of the noise.
    - ``seed``: of the choice of windows.
    - ``train_share``: windows are drawn from this first share of the corpus.
    - ``topic_windows``, ``topic_length``: windows of each topic document, and tokens of such a
      window.

    Switches, each a difference between the published code and the paper or the model:

    - ``uint16``: token ids are stored in 16 bits, so ids above 65,535 wrap around. BLOOM read
      corrupted text.
    - ``causal``: BERT was run with a causal mask (``is_decoder=True``).
    - ``raw_denominator``: the relative norm divides by the raw states of the fresh windows, their
      mean included, where the paper divides by the centred states.
    - ``overlap``: windows start anywhere and are drawn with replacement. The paper says that they
      do not overlap.
    - ``absolute_with_self``: cluster similarity counts the pair of each vector with itself.
    - ``final_norm``: the last state is taken after the model's final norm, as Hugging Face's
      ``hidden_states`` have it (BLOOM).
    """

    length: int = 512
    contexts: int = 6400
    fresh: int = 32
    states: int = 13
    k: int = 20
    strategy: str = "i"
    seed: int = 1234
    train_share: float = 0.9
    topic_windows: int = 64
    topic_length: int = 128
    uint16: bool = False
    causal: bool = False
    raw_denominator: bool = True
    overlap: bool = True
    absolute_with_self: bool = True
    final_norm: bool = False

    def exact(self) -> Settings:
        """The same sizes with every switch off."""
        return dataclasses.replace(self, **dict.fromkeys(SWITCHES, False))

    def remarks(self) -> tuple[str, ...]:
        """The switches that are on, in words."""
        return tuple(text for name, text in SWITCHES.items() if getattr(self, name))


def family_of(view: ModelView) -> str | None:
    """The name that the published tables give this model, or ``None``."""
    return FAMILIES.get(view.name.rstrip("/").rsplit("/", 1)[-1].lower())


def settings_for(view: ModelView) -> Settings:
    """The published settings for this model: causal mask for encoders, wrapped ids and final norm
    for BLOOM, small samples for Llama-2."""
    family = family_of(view)
    sizes: dict[str, Any] = {"contexts": 800, "fresh": 8} if family == "Llama-2" else {}
    is_bloom = family == "BLOOM"
    return Settings(uint16=is_bloom, final_norm=is_bloom, causal=not view.causal, **sizes)


def wrap_uint16(ids: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Token ids as they come back from 16-bit storage: modulo 65,536.

    >>> wrap_uint16(torch.tensor([5, 65_536, 250_879])).tolist()
    [5, 0, 54271]
    """
    return ids % 2**16


def chosen_states(n_layers: int, count: int) -> tuple[int, ...]:
    """``count`` of the states 0..n_layers at even distances, rounded down as in the published code;
    all states if there are fewer.

    >>> chosen_states(32, 13)
    (0, 2, 5, 8, 10, 13, 16, 18, 21, 24, 26, 29, 32)
    """
    if n_layers < count:
        return tuple(range(n_layers + 1))
    return tuple(np.linspace(0, n_layers, count, dtype=int).tolist())


def draw(
    ids: Int[Tensor, " position"], settings: Settings, name: str = ""
) -> tuple[TokenWindows, TokenWindows]:
    """The windows of the basis and the fresh ones, from the training share of one array of ids.

    With ``overlap`` both are drawn with replacement from anywhere (seeded). Without it the text is
    cut into windows, and basis and fresh windows share none. Raises GeometryError when the text is
    too short.
    """
    ids = wrap_uint16(ids) if settings.uint16 else ids
    train, length = ids[: int(settings.train_share * len(ids))], settings.length
    if settings.overlap:
        expected, got = f"more than {length} tokens", f"{len(train)} tokens"
        require(
            len(train) > length, "text", expected=expected, got=got, instead="a shorter length="
        )
        window_sets: list[Tensor] = []
        for i, n_windows in enumerate((settings.contexts, settings.fresh)):
            # seed + i, or the fresh windows would be the first windows of the basis
            generator = torch.Generator().manual_seed(settings.seed + i)
            # the last possible start is never drawn, as published
            starts = torch.randint(len(train) - length, (n_windows,), generator=generator)
            window_sets.append(train[starts[:, None] + torch.arange(length)])
    else:
        rows = train[: len(train) // length * length].view(-1, length)
        share = f"{settings.train_share:.0%} of the text"
        require(
            len(rows) >= 2,
            "corpus",
            expected=f"at least 2 windows of {length} tokens in {share}",
            got=f"{len(rows)} of {len(ids)} tokens",
            instead="more text",
        )
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed))
        # at most a quarter of a short text, so that the basis keeps most windows
        fresh = min(settings.fresh, max(1, len(rows) // 4))
        window_sets = [rows[order[fresh:][: settings.contexts]], rows[order[:fresh]]]
    basis_windows, fresh_windows = (
        TokenWindows(tokens=windows, has_bos=False, corpus=name) for windows in window_sets
    )
    return basis_windows, fresh_windows


def corpus_ids(view: ModelView, corpus: str | Sequence[str] | Tensor) -> Int[Tensor, " position"]:
    """One array of ids, without BOS. Texts are joined by newlines and tokenised as a whole, as
    published; ids are taken as they are."""
    if isinstance(corpus, Tensor):
        ids_given = corpus.dim() == 1 and not corpus.is_floating_point()
        require(
            ids_given, "corpus", expected="text, or integer ids [position]", got=describe(corpus)
        )
        return corpus.long().cpu()
    text = corpus if isinstance(corpus, str) else "\n".join(corpus)
    return torch.tensor(view.encode(text), dtype=torch.int64)
