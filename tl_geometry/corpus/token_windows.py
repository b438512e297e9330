"""In what form do tokens travel through the library? As :class:`TokenWindows`, rows of one length:
what :func:`tl_geometry.windows` returns and every function that runs a model takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.checks import describe, holds_integers, index, is_plain, whole
from tl_geometry.base.errors import choice, fail, require
from tl_geometry.base.html import plain
from tl_geometry.base.results import hash_tokens

Selection = Any
"""A choice of contexts: a number, a slice, or a list, tensor or array of numbers or of a mask."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class TokenWindows:
    """Windows of one length: ``tokens [context position]``, and ``has_bos`` if position 0 is BOS.

    ``names[labels[c]]`` is the document that context ``c`` was cut from (``labels`` may be
    ``None``); ``corpus`` names the text; ``str_tokens`` are the readable tokens of the first
    window; ``notes`` say what was done to the text; ``positions`` are named positions that all
    contexts share (:func:`tl_geometry.corpus.aligned_prompts`).
    """

    tokens: Int[Tensor, "context position"]
    has_bos: bool
    labels: Int[Tensor, " context"] | None = None
    names: tuple[str, ...] = ()
    corpus: str = ""
    str_tokens: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    positions: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tokens", "labels"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and not is_plain(value):
                fail(f"TokenWindows: {name}", expected="integers in rows", got=describe(value))
        fits = isinstance(self.tokens, Tensor) and self.tokens.dim() == 2
        fits = fits and holds_integers(self.tokens) and self.tokens.numel() > 0
        expected = "integer tokens [context position] as a tensor, at least one"
        require(fits, "TokenWindows", expected=expected, got=describe(self.tokens))
        if self.labels is not None:
            fits = isinstance(self.labels, Tensor) and self.labels.shape == self.tokens.shape[:1]
            expected = f"one label for each of {len(self.tokens)} contexts, as a tensor"
            require(fits, "labels", expected=expected, got=describe(self.labels))
            object.__setattr__(self, "labels", self.labels.clone())
        # cloned, because a caller may write into its tensor later
        object.__setattr__(self, "tokens", self.tokens.clone())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, contexts: Selection) -> TokenWindows:
        """The chosen contexts, in the given order: a slice, a list, a tensor or a mask; a number
        gives windows of one context.

        >>> rows = TokenWindows(tokens=torch.arange(6).view(3, 2), has_bos=False)
        >>> [rows[i].tokens.tolist() for i in (1, torch.tensor([2]), [True, False, False])]
        [[[2, 3]], [[4, 5]], [[0, 1]]]
        """
        chosen = self._rows(contexts)
        tokens, labels = self.tokens[chosen], None if self.labels is None else self.labels[chosen]
        # `str_tokens` belong to the first window only
        same_first = len(tokens) > 0 and torch.equal(tokens[0], self.tokens[0])
        texts = self.str_tokens if same_first else ()
        return dataclasses.replace(self, tokens=tokens, labels=labels, str_tokens=texts)

    def _rows(self, contexts: Selection) -> Int[Tensor, " batch"]:
        size = len(self)
        all_contexts = torch.arange(size)
        if isinstance(contexts, slice):
            return all_contexts[contexts]
        has_axes = bool(getattr(contexts, "shape", ()))  # a tensor [1] is a list of one
        if whole(contexts) is not None and not has_axes:
            # torch raises IndexError past the end, which ends a for loop over the windows
            return all_contexts[contexts].unsqueeze(0)
        try:
            given = contexts if isinstance(contexts, Tensor) else list(contexts)
            index = torch.as_tensor(given).cpu()
            if index.dim() == 1 and index.dtype == torch.bool and len(index) == size:
                return all_contexts[index]
            if index.dim() == 1 and holds_integers(index) and len(index) > 0:
                return all_contexts[index.long()]
        except (TypeError, ValueError, IndexError, RuntimeError):
            pass
        expected = f"a slice, numbers from 0 to {size - 1}, or a mask of {size}"
        return fail("contexts", expected=expected, got=describe(contexts))

    @property
    def token_hash(self) -> str:
        """Hash of the tokens in their order."""
        return hash_tokens(self.tokens)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for a result made from these windows: the notes, and how many windows begin with
        BOS twice."""
        if not self.has_bos or self.tokens.shape[1] < 2:
            return self.notes
        double = int((self.tokens[:, 0] == self.tokens[:, 1]).sum())
        return (*self.notes, double_bos(double, len(self))) if double else self.notes

    def position(self, value: int | str) -> int:
        """A position by number (-1 is the last) or by name.

        >>> rows = TokenWindows(tokens=torch.ones(2, 5).int(), has_bos=False, positions={"S": 2})
        >>> rows.position("S"), rows.position(-1)
        (2, 4)
        """
        if isinstance(value, str):
            return self.positions[choice(value, tuple(self.positions), "position")]
        length, number = self.tokens.shape[1], whole(value)
        from_end = number is not None and number < 0
        return index(length + value if from_end else value, length, "position")

    def __repr__(self) -> str:
        contexts, length = self.tokens.shape
        parts = [
            f"{contexts} contexts of {length} tokens",
            "with BOS" if self.has_bos else "no BOS",
        ]
        parts += [f"corpus {self.corpus[:60]!r}"] if self.corpus else []
        parts += [f"{len(self.names)} documents"] if self.names else []
        text, ids = "".join(self.str_tokens)[:60], self.tokens[0, :8].tolist()
        parts.append(repr(text) if self.str_tokens else str(ids))
        return f"TokenWindows({plain('; '.join([*parts, *self.flags]))})"


def begins_with_bos(ids: Int[Tensor, "batch position"], bos_id: int | None) -> bool:
    """Whether every row begins with the BOS id (false for a tokenizer that has none).

    >>> rows = torch.tensor([[0, 5], [0, 6]])
    >>> begins_with_bos(rows, 0), begins_with_bos(rows, 5), begins_with_bos(rows, None)
    (True, False, False)
    """
    return bos_id is not None and bool((ids[:, 0] == bos_id).all())


def double_bos(contexts: int, of: int) -> str:
    """Flag of windows that begin with BOS twice."""
    return f"{contexts} of {of} contexts begin with BOS twice"


if TYPE_CHECKING:
    from torch.utils.data import Dataset

    TokensLike = TokenWindows | str | Path | Iterable[Any] | Dataset[Any]
else:  # Any at run time: corpus/sources.py inspects tokens, and refuses them with a reason
    TokensLike = Any
"""Tokens as every public function takes them: :class:`TokenWindows`; ids ``[context position]`` as
a tensor, an array, nested lists, a ``.npy`` file (its path) or a memory map; one prompt
``[position]`` where a prompt is meant; what a tokenizer returns; an iterable of rows or batches (a
``DataLoader``, a ``datasets.Dataset`` with a ``tokens`` or ``input_ids`` column); a string or
strings of equal token length, with an explicit ``prepend_bos``. Ids are never edited."""
