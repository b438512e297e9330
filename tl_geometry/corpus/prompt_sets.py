"""What is a set of prompts of any lengths? :class:`Prompts`: rows of ids with what belongs to each
of them (a counterfactual of the same length, an answer and another one, named positions). Passes
run :meth:`Prompts.groups`, whose rows have one length: nothing is padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import whole
from tl_geometry.base.errors import choice, fail, require
from tl_geometry.base.results import hash_tokens
from tl_geometry.corpus.token_windows import TokenWindows

Rows = tuple[Int[Tensor, " _"], ...]
"""Ids of prompts, each of its own length."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Prompts:
    """Prompts, as :func:`tl_geometry.corpus.prompts` makes them.

    ``ids`` and ``counterfactual_ids`` are a row of tokens for each prompt, ``answers`` and
    ``others`` token ids ``[prompt]``, ``positions`` maps names to positions ``[prompt]``, ``rows``
    are the numbers of these prompts in the set that they were chosen from. ``has_bos`` says whether
    all prompts begin with BOS.

    >>> ids = (torch.tensor([5, 6]), torch.tensor([7]))
    >>> prompts = Prompts(ids=ids, rows=torch.arange(2), has_bos=False)
    >>> [(group.rows.tolist(), group.tokens.tolist()) for group in prompts.groups()]
    [([1], [[7]]), ([0], [[5, 6]])]
    """

    ids: Rows
    rows: Int[Tensor, " prompt"]
    has_bos: bool
    counterfactual_ids: Rows | None = None
    answers: Int[Tensor, " prompt"] | None = None
    others: Int[Tensor, " prompt"] | None = None
    positions: Mapping[str, Int[Tensor, " prompt"]] = field(default_factory=dict)
    corpus: str = "prompts"
    flags: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        tokens = " to ".join(map(str, sorted({min(self.lengths), max(self.lengths)})))
        return f"Prompts({'; '.join([f'{len(self)} prompts of {tokens} tokens', *self.flags])})"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        return tuple(map(len, self.ids))

    @property
    def tokens(self) -> Int[Tensor, "prompt position"]:
        """The ids of prompts of one length."""
        return self._stacked(self.ids)

    @property
    def counterfactuals(self) -> Int[Tensor, "prompt position"] | None:
        """The ids of the counterfactuals of prompts of one length."""
        return None if self.counterfactual_ids is None else self._stacked(self.counterfactual_ids)

    def _stacked(self, rows: Rows) -> Int[Tensor, "prompt position"]:
        lengths, instead = sorted(set(self.lengths)), "prompts.groups(), each of one length"
        fits, expected = len(lengths) == 1, "prompts of one length"
        require(fits, "prompts", expected=expected, got=lengths[:8], instead=instead)
        return torch.stack(rows)

    @property
    def token_hash(self) -> str:
        """Hash of the ids in their order."""
        found = ""
        for row in self.ids:
            found = hash_tokens(row.unsqueeze(0), found)
        return found

    def __getitem__(self, chosen: Any) -> Prompts:
        """The chosen prompts (a number, a slice, numbers), with all that belongs to them."""
        pick = torch.arange(len(self))[chosen].reshape(-1)
        changed: dict[str, Any] = {"rows": self.rows[pick]}
        for name in ("answers", "others"):
            value = getattr(self, name)
            changed[name] = None if value is None else value[pick]
        for name in ("ids", "counterfactual_ids"):
            rows = getattr(self, name)
            changed[name] = None if rows is None else tuple(rows[i] for i in pick.tolist())
        changed["positions"] = {name: at[pick] for name, at in self.positions.items()}
        return dataclasses.replace(self, **changed)

    def groups(self) -> Iterator[Prompts]:
        """The prompts of each length, the shortest first."""
        for length in sorted(set(self.lengths)):
            yield self[[i for i, of_row in enumerate(self.lengths) if of_row == length]]

    def at(self, position: int | str) -> Int[Tensor, " prompt"]:
        """The position of each prompt that a name or a number stands for (-1 is the last)."""
        if isinstance(position, str):
            return self.positions[choice(position, tuple(self.positions), "position")]
        number, shortest = whole(position), min(self.lengths)
        if number is None or not -shortest <= number < shortest:
            expected = f"a name, or a number from {-shortest} to {shortest - 1}"
            fail("position", expected=expected, got=repr(position))
        return number + torch.tensor(self.lengths) * (number < 0)

    def as_windows(self) -> TokenWindows:
        """The same rows as windows, for what takes prompts of one length; names stay that stand for
        one position in all prompts."""
        shared = {n: int(at[0]) for n, at in self.positions.items() if len(at.unique()) == 1}
        about: dict[str, Any] = {"corpus": self.corpus, "notes": self.flags, "positions": shared}
        return TokenWindows(tokens=self.tokens, has_bos=self.has_bos, **about)
