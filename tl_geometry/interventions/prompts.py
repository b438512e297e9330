"""Prompts that an edit knows: :class:`Known` tells which of them a running pass is over, and
:class:`Edit` is an edit that may still wait for them."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from tl_geometry.base.checks import seeded
from tl_geometry.base.errors import check_seed, fail, require
from tl_geometry.corpus.prompt_sets import Prompts
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.models.batches import default_batch
from tl_geometry.models.edits import LiveEdit, NamedHook
from tl_geometry.models.model_view import ModelView

SAME = 1e-4
"""Relative difference up to which two first states are of the same tokens: those of other batches
round differently by some 1e-7 (1e-2 in half precision, where other tokens differ by about 1)."""


@dataclass(frozen=True, eq=False)
class Known:
    """Prompts ``rows`` (``asked`` where they were given as such), and a ``counterfactual`` of each;
    ``are_run`` where an edit is measured on them, so that the mean over one would be that one."""

    view: ModelView
    rows: TokenWindows
    counterfactual: Int[Tensor, "batch position"] | None = None
    are_run: bool = False
    asked: Prompts | None = None
    _kept: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        view: ModelView,
        prompts: TokensLike | Known,
        counterfactual: TokensLike | None = None,
        prepend_bos: bool | None = None,
        *,
        are_run: bool = False,
    ) -> Known:
        """Prompts as users give them (:func:`~tl_geometry.corpus.sources.as_tokens`);
        counterfactuals are as many prompts of the same length."""
        if isinstance(prompts, Known):
            return prompts
        rows = as_tokens(view, prompts, prepend_bos=prepend_bos)
        asked = prompts if isinstance(prompts, Prompts) else None
        others = None if asked is None else asked.counterfactuals
        if counterfactual is not None:
            others = as_tokens(view, counterfactual, prepend_bos=prepend_bos).tokens
            shape, got = tuple(rows.tokens.shape), tuple(others.shape)
            expected = f"counterfactuals {shape}, one for each prompt"
            require(got == shape, "counterfactuals", expected=expected, got=got)
        return cls(view, rows, others, are_run, asked)

    def place(self, position: int | str) -> Int[Tensor, " _"]:
        """A position by number or name: one for all prompts, or one for each."""
        if self.asked is None or not isinstance(position, str) or position in self.rows.positions:
            return torch.tensor([self.rows.position(position)])
        return self.asked.at(position)

    @property
    def others(self) -> Int[Tensor, "batch position"]:
        """The counterfactuals, refused where there are none, and where copies of a prompt have
        different ones, which no state of a pass tells apart."""
        if self.counterfactual is None:
            expected = "prompts with counterfactuals"
            fail("counterfactuals", expected=expected, got="none", instead="counterfactual=")
        pairs = torch.cat([self.rows.tokens, self.counterfactual], 1)
        prompts, pairs = (len(ids.unique(dim=0)) for ids in (self.rows.tokens, pairs))
        got, instead = f"{pairs} for {prompts} different prompts", "a call for each"
        expected = "one for each prompt, the same for its copies"
        require(pairs == prompts, "counterfactuals", expected=expected, got=got, instead=instead)
        return self.counterfactual

    def activation(self, name: str, of: str) -> Float[Tensor, "..."]:
        """An activation of clean passes ``of`` the prompts, of their ``"counterfactual"``, or its
        ``"mean"`` over the prompts; each is made once."""
        if (name, of) not in self._kept:
            tokens = self.others if of == "counterfactual" else self.rows.tokens
            what, expected = f"prompts of {tokens.shape[1]} tokens", "at least 2 for their mean"
            fits, instead = len(tokens) > 1 or of != "mean" or not self.are_run, "reference=prompts"
            require(fits, what, expected=expected, got=len(tokens), instead=instead)
            parts = tokens.split(default_batch(tokens.shape[1], self.view.device))
            value = torch.cat([self.view.activations(part, [name])[name] for part in parts])
            value = value.double().mean(0).to(value) if of == "mean" else value
            self._kept[name, of] = value
        return self._kept[name, of]

    def hook(self, into: dict[str, Tensor]) -> NamedHook:
        """A hook that notes which of the prompts the rows of a pass are, by their first state, as
        ``into["rows"]``; a pass over other tokens is refused."""
        name = self.view.state_hooks[0]
        first = self.activation(name, "prompts")
        size = float(first.abs().max())
        near = max(SAME, torch.finfo(self.view.dtype).eps) * size

        def look(value: Tensor, hook: Any) -> None:
            same = value.shape[1:] == first.shape[1:]
            if same:
                with torch.no_grad():
                    gaps = torch.stack([(first - row).abs().amax((1, 2)) for row in value])
                least, into["rows"] = gaps.min(1)
                same = bool((least <= near).all())
            expected, got = "the prompts that the edit was made for", "others, or embeddings"
            instead = "an edit made with these prompts"
            require(same, "tokens inside an edit", expected=expected, got=got, instead=instead)

        return name, look


Make = Callable[[Known | None], list[NamedHook]]
"""Makes the hooks of an edit from the prompts that it is given, if any."""
Again = partial[Any]
"""The same edit with other options; a ``functools.partial`` of the function that made it."""


class Edit(LiveEdit):
    """An edit of a live model: inside ``with edit:``, or as
    ``model.run_with_hooks(tokens, fwd_hooks=edit)``; two edits are added with ``+``.

    An edit that needs prompts and was made without them takes those of
    :func:`~tl_geometry.interventions.effects`. ``together`` says that what it does to a prompt
    depends on the other prompts of the batch; ``again`` makes it with other options, which is how
    controls are made; ``pool`` are the heads that could take the place of its own; ``flags`` are
    remarks on the passes so far.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tokens = tlg.zoo.default_windows(model, 16, n=2).tokens
    >>> edit = tlg.interventions.heads(model, "L0H0", by="zero")
    >>> with edit:
    ...     inside = model(tokens)
    >>> bool((model.run_with_hooks(tokens, fwd_hooks=edit) == inside).all()), edit.passes
    (True, 2)
    """

    def __init__(
        self,
        view: ModelView,
        make: Make,
        *,
        known: Known | None = None,
        heads: Iterable[tuple[int, int]] = (),
        pool: Iterable[tuple[int, int]] = (),
        together: bool = False,
        again: Again | None = None,
        flags: MutableMapping[str, None] | None = None,
    ) -> None:
        if again is not None:
            check_seed(again.keywords["seed"], "seed")
        self.make, self.known, self.together, self.again = make, known, together, again
        other = {} if again is None or not together else flag_of_another(again.keywords["seed"])
        self.pool, self.flags = tuple(pool), other if flags is None else flags
        super().__init__(view, make(known), heads)

    def given(self, known: Known) -> Edit:
        """The edit with prompts, where it has none of its own."""
        if self.known is not None:
            return self
        if self.together:
            require_several(len(known.rows))
        names = ("heads", "pool", "together", "again", "flags")
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        return Edit(self.view, self.make, known=known, **options)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Edit):
            return [*self, *other]
        first, second = self, other
        same = first.view.is_of_model(second.view)
        require(same, "edits", expected="edits of one model with the same weights", got="others")

        def make(known: Known | None) -> list[NamedHook]:
            return [*first.make(first.known or known), *second.make(second.known or known)]

        together, heads = first.together or second.together, (*first.heads, *second.heads)
        flags = ChainMap(first.flags, second.flags)  # passes still add to either
        return Edit(first.view, make, heads=heads, together=together, flags=flags)


def derangement(prompts: int, seed: int) -> Int[Tensor, " batch"]:
    """Which other prompt each prompt gets: a permutation without fixed point, where there are at
    least two. The prompts are put in a random order, and each gets the one before it in that order
    (the first gets the last).

    >>> order = derangement(5, 0)
    >>> sorted(order.tolist()), bool((order == torch.arange(5)).any())
    ([0, 1, 2, 3, 4], False)
    """
    order = torch.randperm(prompts, generator=seeded(seed))
    other = torch.empty_like(order)
    other[order] = order.roll(1)
    return other


def from_another(values: Shaped[Tensor, "batch ..."], seed: int) -> Shaped[Tensor, "batch ..."]:
    """The same values of another prompt of the batch, for every prompt."""
    require_several(len(values))
    return values[derangement(len(values), seed).to(values.device)]


def flag_of_another(seed: int) -> MutableMapping[str, None]:
    """The flag of an edit that takes values of another prompt."""
    return {f"values of a random other prompt of the batch (seed {seed})": None}


def require_several(prompts: int) -> None:
    """Refuse a single prompt, which has no other to take anything from."""
    expected, instead = "at least 2 prompts in a batch", "more prompts of the same length"
    require(prompts >= 2, "prompts", expected=expected, got=prompts, instead=instead)
