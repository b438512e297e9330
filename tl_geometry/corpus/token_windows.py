"""In what form do tokens travel through the library? As :class:`TokenWindows`, rows of one length:
what :func:`tl_geometry.windows` returns and every function that runs a model takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe, holds_integers, position
from tl_geometry.base.errors import require
from tl_geometry.base.html import plain
from tl_geometry.base.results import hash_tokens


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TokenWindows:
    """Windows of one length: ``tokens [context position]``, and ``has_bos`` if position 0 is BOS.

    ``labels`` number the documents that contexts were cut from, ``label_names`` names them (empty:
    by their numbers), ``corpus`` names the text, ``str_tokens`` are the readable tokens of the
    first window, ``notes`` say what was done to the text, ``remarks`` what is unusual about these
    rows as a whole, ``positions`` are named positions that all contexts share.

    >>> rows = TokenWindows(tokens=torch.arange(6).view(3, 2), has_bos=False)
    >>> [rows[i].tokens.tolist() for i in (1, torch.tensor([2]), [True, False, False])]
    [[[2, 3]], [[4, 5]], [[0, 1]]]
    """

    tokens: Int[Tensor, "context position"]
    has_bos: bool
    labels: Int[Tensor, " context"] | None = None
    label_names: tuple[str, ...] = ()
    corpus: str = "tokens"
    str_tokens: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked = {"tokens": 2} if self.labels is None else {"tokens": 2, "labels": 1}
        for name, axes in checked.items():
            value = getattr(self, name)
            fits = isinstance(value, Tensor) and holds_integers(value) and value.numel() > 0
            fits = fits and value.dim() == axes and len(value) == len(self.tokens)
            expected = f"a tensor of integers with {axes} axes, at least one context"
            require(fits, f"TokenWindows: {name}", expected=expected, got=describe(value))
            # a copy, because a caller may write into its tensor later
            object.__setattr__(self, name, value.to("cpu", torch.int64, copy=True))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Positions of each context."""
        return self.tokens.shape[1]

    def __getitem__(self, contexts: Any) -> TokenWindows:
        """The contexts that a slice, numbers or a mask choose, as a tensor is indexed; a number
        gives windows of one context."""
        chosen = torch.arange(len(self))[contexts].reshape(-1)
        first = len(chosen) > 0 and int(chosen[0]) == 0
        return dataclasses.replace(
            self,
            tokens=self.tokens[chosen],
            labels=None if self.labels is None else self.labels[chosen],
            str_tokens=self.str_tokens if first else (),
            remarks=(),
        )

    @property
    def token_hash(self) -> str:
        """Hash of the tokens in their order."""
        return hash_tokens(self.tokens)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for a result made from these windows: notes and remarks."""
        return (*self.notes, *self.remarks)

    def position(self, value: int | str) -> int:
        """A position by number (-1 is the last) or by name.

        >>> rows = TokenWindows(tokens=torch.ones(2, 5).int(), has_bos=False, positions={"S": 2})
        >>> rows.position("S"), rows.position(-1)
        (2, 4)
        """
        if isinstance(value, str):
            known, instead = value in self.positions, "a number, or a name of one place in all rows"
            expected = f"one of {', '.join(self.positions) or 'no names'}"
            require(known, "position", expected=expected, got=repr(value), instead=instead)
            return self.positions[value]
        return position(value, self.length)

    def __repr__(self) -> str:
        bos, ids = "with BOS" if self.has_bos else "no BOS", self.tokens[0, :8].tolist()
        text = repr("".join(self.str_tokens)[:60]) if self.str_tokens else str(ids)
        said = f"{len(self)} contexts of {self.length} tokens; {bos}; corpus {self.corpus[:60]!r}"
        return f"TokenWindows({plain('; '.join([said, text, *self.flags]))})"


def begins_with_bos(ids: Int[Tensor, "batch position"], bos_id: int | None) -> bool:
    """Whether every row begins with the BOS id (false for a tokenizer that has none).

    >>> rows = torch.tensor([[0, 5], [0, 6]])
    >>> begins_with_bos(rows, 0), begins_with_bos(rows, 5), begins_with_bos(rows, None)
    (True, False, False)
    """
    return bos_id is not None and bool((ids[:, 0] == bos_id).all())


TokensLike = Any
"""Tokens as every public function takes them: :class:`TokenWindows` or ``Prompts`` of one length;
ids ``[context position]`` as a tensor, an array or lists (one row ``[position]`` is one context); a
text or texts of equal token length (at the end of one for an encoder stands no [SEP]); an iterable
of rows or batches of ids, such as a ``DataLoader``, which is read first. Ids are never edited."""
