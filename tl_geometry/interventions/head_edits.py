"""Knockouts and activation patching: :func:`heads` replaces the mixed values of
heads, the output of MLPs or a state of the stream; :func:`each` makes one edit for each head.

The values that take the place of a head's z (or of an MLP's output, or of a state):

    mean              their mean over reference prompts at the same position (mean ablation)
    zero              zero (zero ablation)
    prompt            those of another prompt of the batch (resampling)
    counterfactual    those of the prompt's own counterfactual (activation patching)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.prompts import Edit, Known, from_another
from tl_geometry.interventions.terms import heads_by_layer
from tl_geometry.models.edits import NamedHook, whole_prompts
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view, known_view
from tl_geometry.models.write_spec import by_head, writing_of

BY = ("mean", "zero", "prompt", "counterfactual")
Place = tuple[str, int, tuple[int, ...]]
"""A hook that is edited, its block (or state), and the heads that are; none unless the hook holds
mixed values."""


def places(view: ModelView, names: Any) -> list[Place]:
    """The hooks behind names: heads as ``(layer, head)`` or ``"L5H1"``, ``"attn5"`` (all heads of a
    block), ``"mlp5"``, ``"resid5"`` (state 5); all heads for ``None``."""
    of_blocks: list[Place] = []
    some: list[Any] = []
    text = isinstance(names, str)
    given = [names] if text or names is None or not isinstance(names, Iterable) else list(names)
    for name in given:
        match = re.fullmatch(r"(attn|mlp|resid)(\d+)", name) if isinstance(name, str) else None
        if match is None:
            some.append(name)
            continue
        kind = match[1]
        at = checks.index(int(match[2]), view.n_layers + (kind == "resid"), str(name))
        if kind == "attn":
            some += [(at, head) for head in range(view.n_heads)]
        elif kind == "resid":
            of_blocks.append((view.state_hooks[at], at, ()))
        else:
            hook = writing_of(view).blocks[at].mlp_hook
            if hook is None:
                fail(str(name), expected="a block with an MLP", got=f"none in block {at}")
            of_blocks.append((hook, at, ()))
    wanted, blocks_alone = None if names is None else some, not some and bool(of_blocks)
    chosen = () if blocks_alone else checks.heads(wanted, view.n_layers, view.n_heads)
    of_heads = heads_by_layer(chosen).items()
    return [*((view.z_hooks[at], at, heads) for at, heads in of_heads), *of_blocks]


@dataclass(frozen=True, eq=False)
class Replacement:
    """What takes the place of an activation at ``positions``: ``by`` (see the module), from the
    prompts ``known``; ``rows`` says which of them a pass is over, ``seed`` which other prompt each
    gets."""

    by: str
    known: Known | None
    rows: dict[str, Tensor]
    seed: int
    positions: tuple[Any, ...] | None

    def hooks(self, names: Iterable[str]) -> list[NamedHook]:
        """What must be seen of a pass before the values of some hooks are replaced. What comes from
        other passes is made now, as a model cannot run inside its own hooks."""
        if self.known is None:
            return []
        for name in names if self.by in ("mean", "counterfactual") else ():
            self.known.activation(name, self.by)
        named = [self.known.place(at) for at in self.positions or () if isinstance(at, str)]
        by_row = self.by == "counterfactual" or any(len(at) > 1 for at in named)
        return [self.known.hook(self.rows)] if by_row else []

    def where(self, like: Float[Tensor, "batch position ..."]) -> Bool[Tensor, "_ position 1"]:
        """Which positions of a pass are meant, by number (-1 is the last) or by name, all for
        ``None``: the same in all its rows, or others in each."""
        length = like.shape[1]
        chosen = torch.full((1, length), self.positions is None)
        for at in self.positions or ():
            if not isinstance(at, str):
                places = torch.tensor([checks.position(at, length)])
            elif self.known is None:
                fail("reference", expected=f"prompts that have a position {at!r}", got="none")
            else:
                places = self.known.place(at)
                places = places[self.rows["rows"].cpu()] if len(places) > 1 else places
            chosen = chosen | (torch.arange(length) == places.unsqueeze(1))
        return chosen.unsqueeze(-1).to(like.device)

    def of(self, name: str, value: Float[Tensor, "batch position ..."]) -> Tensor:
        """The value in place of ``value``, the activation of a hook."""
        if self.by == "zero":
            return torch.zeros_like(value)
        if self.by == "prompt":
            return from_another(value, self.seed)
        if self.known is None:
            expected = f'reference prompts for by="{self.by}"'
            fail("reference", expected=expected, got="none", instead="reference=prompts")
        new, length = self.known.activation(name, self.by), value.shape[1]
        new = new.unsqueeze(0) if self.by == "mean" else new[self.rows["rows"]]
        expected, got = f"{length} positions, as the prompts that are run", f"{new.shape[1]}"
        require(new.shape[1] >= length, "reference", expected=expected, got=got)
        return new[:, :length].to(value).expand_as(value)


def heads(
    model: ModelLike,
    names: Any = None,
    *,
    by: str = "mean",
    reference: TokensLike | Known | None = None,
    counterfactual: TokensLike | None = None,
    positions: Any = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> Edit:
    """Ablation (knockout) or activation patching of heads, MLPs and states.

    Args:
        names: ``(layer, head)`` or ``"L5H1"``, ``"attn5"`` (all heads of a block), ``"mlp5"``,
            ``"resid5"`` (the stream at state 5), one or several; all heads by default.
        by: ``"mean"``, ``"zero"``, ``"prompt"`` or ``"counterfactual"`` (see the module).
        reference: the prompts of means, or those of ``counterfactual``, row by row. Without them
            the edit takes the prompts of :func:`~tl_geometry.interventions.effects`.
        positions: where it is replaced, as numbers (-1 is the last) or names of ``reference``; by
            default everywhere.
        seed: which other prompt each gets.

    Raises ``GeometryError`` for names that the model does not have, and during a pass that is no
    whole prompt (padding on the left, cached keys) where a place is taken for a position.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=4).tokens
    >>> patch = {"reference": prompts[:2], "counterfactual": prompts[2:]}
    >>> with tlg.interventions.heads(model, "resid0", by="counterfactual", **patch):
    ...     patched = model(prompts[:2])
    >>> bool((patched - model(prompts[2:])).abs().max() < 1e-4)
    True
    """
    view = known_view(model)  # `each` and controls make many edits of one view
    checks.choice(by, BY, "by")
    known = known_prompts(view, by, reference, counterfactual, prepend_bos)
    where, positions = places(view, names), given_positions(positions)

    def make(known: Known | None) -> list[NamedHook]:
        new = Replacement(by, known, {}, seed, positions)
        hooks = new.hooks(name for name, _, _ in where)
        if by in ("mean", "counterfactual") or positions is not None:
            first = min(at for _, at, _ in where)
            hooks.append(whole_prompts(view, min(first, view.n_layers - 1)))
        return [*hooks, *(_replacing(view, place, new) for place in where)]

    chosen = [(at, head) for _, at, some in where for head in some]
    options: dict[str, Any] = {"names": names, "by": by, "reference": known, "seed": seed}
    again = partial(heads, model=view, positions=positions, **options)
    # other heads stand in the place of heads alone
    alone = bool(chosen) and all(some for _, _, some in where)
    pool = checks.heads(None, view.n_layers, view.n_heads) if alone else ()
    together = by == "prompt"
    return Edit(view, make, known=known, heads=chosen, pool=pool, together=together, again=again)


def each(
    model: ModelLike,
    names: Any = None,
    *,
    by: str = "mean",
    reference: TokensLike | None = None,
    counterfactual: TokensLike | None = None,
    prepend_bos: bool | None = None,
    **options: Any,
) -> dict[str, Edit]:
    """Ablation or activation patching of one head after the other: an edit of :func:`heads` for
    each name (all heads by default), by name.

    >>> import tl_geometry as tlg
    >>> list(tlg.interventions.each(tlg.zoo.embedded(), by="zero"))[:2]
    ['L0H0', 'L0H1']
    """
    view = as_view(model)
    find = partial(checks.heads, n_layers=view.n_layers, n_heads=view.n_heads)
    given = checks.several(find(None) if names is None else names)
    if len(given) == 2 and all(checks.whole(value) is not None for value in given):
        given = (given,)  # two integers alone are one pair
    labels = [n if isinstance(n, str) else checks.head_name(find([n])[0]) for n in given]
    known = known_prompts(view, by, reference, counterfactual, prepend_bos)
    options["positions"] = given_positions(options.get("positions"))  # once for all
    edits = (heads(view, name, by=by, reference=known, **options) for name in given)
    return dict(zip(labels, edits, strict=True))


def known_prompts(
    view: ModelView, by: str, reference: Any, counterfactual: Any, prepend_bos: bool | None
) -> Known | None:
    """The prompts that an edit was given, with counterfactuals where it needs them."""
    expected, instead = 'reference= and by="counterfactual"', "effects(..., counterfactual=)"
    got = "no reference" if reference is None else f"by={by!r}"
    used = counterfactual is None or (reference is not None and by == "counterfactual")
    require(used, "counterfactual", expected=expected, got=got, instead=instead)
    if reference is None:
        return None
    known = Known.of(view, reference, counterfactual, prepend_bos)
    if by == "counterfactual":
        _ = known.others  # refused now
    return known


def _replacing(view: ModelView, place: Place, new: Replacement) -> NamedHook:
    """The hook that replaces an activation, or some heads and positions of it."""
    name, _, some = place

    def replace(value: Tensor, hook: Any) -> Tensor:
        there, at = new.of(name, value), new.where(value)
        if not some:
            return torch.where(at, there, value)
        chosen = (at & one_hot(some, view.n_heads, value)).unsqueeze(-1)
        old, there = (by_head(x, view.n_heads) for x in (value, there))
        return torch.where(chosen, there, old).reshape(value.shape)

    return name, replace


def one_hot(some: Sequence[int], size: int, like: Tensor) -> Bool[Tensor, " _"]:
    """Which of ``size`` numbers are among ``some``."""
    mask = torch.zeros(size, dtype=torch.bool, device=like.device)
    mask[list(some)] = True
    return mask


def given_positions(wanted: Any) -> tuple[Any, ...] | None:
    """Positions as they were given, one or several, or ``None`` for all."""
    given = None if wanted is None else checks.several(wanted)
    require(given != (), "positions", expected="one at least, or None for all", got="none")
    return given
