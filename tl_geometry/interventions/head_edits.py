"""Knockouts, activation patching and path patching: :func:`heads` replaces the mixed values of
heads, the output of MLPs or a state of the stream; :func:`path` lets only chosen readers see what
heads would write then; :func:`each` makes one edit for each head.

The values that take the place of a head's z (or of an MLP's output, or of a state):

    mean              their mean over reference prompts at the same position (mean ablation)
    zero              zero (zero ablation)
    prompt            those of another prompt of the batch (resampling)
    counterfactual    those of the prompt's own counterfactual (activation patching)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.prompts import Edit, Known, from_another
from tl_geometry.interventions.terms import heads_by_layer
from tl_geometry.models.edits import (
    NamedHook,
    RunningHeads,
    edited_attention,
    reread,
    whole_prompts,
)
from tl_geometry.models.mlp import live_mlp
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.write_spec import attention_of, by_head, require_decoder, writing_of

BY = ("mean", "zero", "prompt", "counterfactual")
Place = tuple[str, int, tuple[int, ...]]
"""A hook that is edited, its block (or state), and the heads for one of mixed values."""


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
    wanted = None if given == [None] else some
    none = not some and bool(of_blocks)
    chosen = () if none else checks.heads(wanted, view.n_layers, view.n_heads)
    of_heads = heads_by_layer(chosen).items()
    return [*((view.z_hooks[at], at, heads) for at, heads in of_heads), *of_blocks]


@dataclass(frozen=True, eq=False)
class Replacement:
    """What takes the place of an activation: ``by`` (see the module), from the prompts ``known``;
    ``rows`` says which of them a pass is over, ``seed`` which other prompt each gets."""

    by: str
    known: Known | None
    rows: dict[str, Tensor]
    seed: int

    def hooks(self, names: Iterable[str]) -> list[NamedHook]:
        """What must be seen of a pass before the values of some hooks are replaced. What comes from
        other passes is made now, as a model cannot run inside its own hooks."""
        if self.known is None or self.by in ("zero", "prompt"):
            return []
        for name in names:
            self.known.activation(name, self.by)
        return [self.known.hook(self.rows)] if self.by == "counterfactual" else []

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
        new = new if self.by == "mean" else new[self.rows["rows"]]
        seen = new.shape[-value.dim() + 1] if self.by == "mean" else new.shape[1]
        expected = f"at least {length} positions, as the prompts that are run"
        require(seen >= length, "reference", expected=expected, got=f"{seen} positions")
        return (new[:length] if self.by == "mean" else new).to(value).expand_as(value)


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
    """Knock out (ablate) heads, or patch heads, MLPs and states from other prompts.

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
    whole prompt (padding on the left, cached keys) where a column is taken for a position.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompts = tlg.zoo.default_windows(model, 16, n=4).tokens
    >>> patch = {"reference": prompts[:2], "counterfactual": prompts[2:]}
    >>> with tlg.interventions.heads(model, "resid0", by="counterfactual", **patch):
    ...     patched = model(prompts[:2])
    >>> bool((patched - model(prompts[2:])).abs().max() < 1e-4)
    True
    """
    view = as_view(model)
    checks.choice(by, BY, "by")
    where, known = places(view, names), _known(view, by, reference, counterfactual, prepend_bos)

    def make(known: Known | None) -> list[NamedHook]:
        new = Replacement(by, known, {}, seed)
        hooks = new.hooks(name for name, _, _ in where)
        if by in ("mean", "counterfactual") or positions is not None:
            first = min(at for _, at, _ in where)
            hooks.append(whole_prompts(view, min(first, view.n_layers - 1)))
        return [*hooks, *(_replacing(view, place, new, positions) for place in where)]

    chosen = [(at, head) for _, at, some in where for head in some]
    options: dict[str, Any] = {"names": names, "by": by, "reference": known, "seed": seed}
    again = partial(heads, model=view, positions=positions, **options)
    pool = checks.heads(None, view.n_layers, view.n_heads) if chosen else ()
    more: dict[str, Any] = {"pool": pool, "together": by == "prompt", "again": again}
    return Edit(view, make, known=known, heads=chosen, **more)


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
    """One edit of :func:`heads` for each name (all heads by default), by name.

    >>> import tl_geometry as tlg
    >>> list(tlg.interventions.each(tlg.zoo.embedded(), by="zero"))[:2]
    ['L0H0', 'L0H1']
    """
    view = as_view(model)
    given: Any = checks.heads(None, view.n_layers, view.n_heads) if names is None else names
    given = [given] if isinstance(given, str) else list(given)
    labels = [name if isinstance(name, str) else checks.head_name(name) for name in given]
    known = _known(view, by, reference, counterfactual, prepend_bos)
    edits = (heads(view, name, by=by, reference=known, **options) for name in given)
    return dict(zip(labels, edits, strict=True))


def _known(
    view: ModelView, by: str, reference: Any, counterfactual: Any, prepend_bos: bool | None
) -> Known | None:
    """The prompts that an edit was given, with counterfactuals where it needs them."""
    if reference is None:
        return None
    known = Known.of(view, reference, counterfactual, prepend_bos)
    if by == "counterfactual":
        _ = known.others  # refused now
    return known


def _replacing(view: ModelView, place: Place, new: Replacement, positions: Any) -> NamedHook:
    """The hook that replaces an activation, or some heads and positions of it."""
    name, _, some = place

    def replace(value: Tensor, hook: Any) -> Tensor:
        there = new.of(name, value)
        if not some and positions is None:
            return there
        old, there = (by_head(x, view.n_heads) if some else x for x in (value, there))
        chosen = torch.zeros(old.shape[1:3], dtype=torch.bool, device=value.device)
        at = _positions(positions, value.shape[1], new.known)
        chosen[at] = _one_hot(some, old.shape[2], value) if some else True
        return torch.where(chosen if old.dim() == 3 else chosen[..., None], there, old).reshape(
            value.shape
        )

    return name, replace


def _one_hot(some: Sequence[int], size: int, like: Tensor) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool, device=like.device)
    mask[list(some)] = True
    return mask


def _positions(wanted: Any, length: int, known: Known | None) -> list[int]:
    """Positions of a pass by number (-1 is the last) or by name, all for ``None``."""
    if wanted is None:
        return list(range(length))
    several = isinstance(wanted, Iterable) and not isinstance(wanted, str | Tensor)
    found: list[int] = []
    for at in list(wanted) if several else [wanted]:
        if isinstance(at, str) and known is None:
            fail("reference", expected=f"prompts that have a position {at!r}", got="none")
        number = known.rows.position(at) if isinstance(at, str) and known else checks.whole(at)
        number = length + number if number is not None and number < 0 else number
        found.append(checks.index(at if number is None else number, length, "position"))
    return found


# ---- paths


@dataclass(frozen=True, eq=False)
class Receivers:
    """Readers of the stream: for each layer and side (``"q"``, ``"k"``, ``"v"``) the heads that
    receive, the blocks whose MLP does, and whether the output does."""

    heads: Mapping[int, Mapping[str, tuple[int, ...]]]
    mlps: tuple[int, ...]
    output: bool

    @classmethod
    def of(cls, view: ModelView, names: str | Sequence[str]) -> Receivers:
        """From names: ``"L5H1<q>"``, ``"L5H1<k>"`` or ``"L5H0-2<k>"`` (all heads that share the
        key), ``"L5H1<v>"``, ``"mlp5"``, ``"output"``."""
        given = [names] if isinstance(names, str) else list(names)
        heads: dict[int, dict[str, tuple[int, ...]]] = {}
        mlps: list[int] = []
        for name in given:
            match = re.fullmatch(r"L(\d+)H(\d+)(?:-\d+)?<([qkv])>|mlp(\d+)|output", str(name))
            expected = 'inputs of this model, as "L1H0<q>", "L1H0<k>", "L1H0<v>", "mlp1", "output"'
            found: Any = match.groups() if match else (None,) * 4
            layer, head, which, mlp = found
            fits = match is not None and int(layer or mlp or 0) < view.n_layers
            fits = fits and int(head or 0) < view.n_heads
            fits = fits and (mlp is None or live_mlp(view, int(mlp)) is not None)
            require(fits, "receivers", expected=expected, got=repr(name))
            if mlp is not None:
                mlps.append(int(mlp))
            elif which is not None:
                size = 1 if which == "q" else view.n_heads // view.key_heads(int(layer))
                first = int(head) // size * size
                sides = heads.setdefault(int(layer), {})
                sides[which] = (*sides.get(which, ()), *range(first, first + size))
        require(len(given) > 0, "receivers", expected="at least one input", got="none")
        return cls(heads, tuple(sorted(set(mlps))), "output" in given)

    def last_sender(self, view: ModelView) -> int:
        """The last block whose heads all receivers read."""
        before = [layer - 1 for layer in self.heads] + [view.n_layers - 1] * self.output
        before += [mlp - bool(live_mlp(view, mlp).parallel) for mlp in self.mlps]  # type: ignore[union-attr]
        return min(before)


def path(
    model: ModelLike,
    senders: Any,
    receivers: str | Sequence[str],
    *,
    by: str = "mean",
    reference: TokensLike | Known | None = None,
    counterfactual: TokensLike | None = None,
    positions: Any = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> Edit:
    """Path patching: only ``receivers`` read what other values of the heads ``senders`` write.

    Every other reader reads the running stream x; a receiver reads ``x + write(z') - write(z)``,
    the direct edge from the senders alone. ``write`` is what the senders' block adds, after the
    norm behind attention where there is one. Everything behind a receiver is live, norms included.
    Where every reader of a sender is a receiver, this is the knockout.

    Args:
        receivers: ``"L5H1<q>"``, ``"L5H1<k>"`` and ``"L5H1<v>"`` (of all heads that share them),
            ``"mlp5"``, ``"output"``, one or several.
        by, reference, counterfactual, seed: as in :func:`heads`.
        positions: where the receivers read it, as in :func:`heads`.

    Raises ``GeometryError`` for a sender that does not come before every receiver, and for unknown
    inputs; ``UnsupportedModelError`` for encoders.

    Sources: Wang et al. 2022, arXiv:2211.00593; Goldowsky-Dill et al. 2023, arXiv:2304.05969.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> with tlg.interventions.path(model, "L0H3", ["L1H2<q>", "mlp1"], by="zero") as edit:
    ...     logits = model(tlg.zoo.default_windows(model, 16, n=2).tokens)
    """
    view = as_view(model)
    require_decoder(view, f"paths of {view.name}")
    checks.choice(by, BY, "by")
    chosen = checks.heads(senders, view.n_layers, view.n_heads)
    to = Receivers.of(view, receivers)
    last, known = to.last_sender(view), _known(view, by, reference, counterfactual, prepend_bos)
    late = [checks.head_name(head) for head in chosen if head[0] > last]
    require(not late, "senders", expected="heads that write before every receiver reads", got=late)

    def make(known: Known | None) -> list[NamedHook]:
        new = Replacement(by, known, {}, seed)
        first = [whole_prompts(view, min(at for at, _ in chosen))]
        names = [view.z_hooks[layer] for layer in heads_by_layer(chosen)]
        before, other = _frozen(view, chosen, new)
        hooks = [*new.hooks(names), *first, *before]
        return [*hooks, *_receiving(view, to, other, positions, known)]

    options: dict[str, Any] = {"senders": senders, "receivers": receivers, "by": by, "seed": seed}
    options |= {"reference": known, "positions": positions}
    pool = [head for head in checks.heads(None, view.n_layers, view.n_heads) if head[0] <= last]
    together, again = by == "prompt", partial(path, model=view, **options)
    return Edit(view, make, known=known, heads=chosen, pool=pool, together=together, again=again)


Other = Callable[[str, Tensor], Tensor]
"""What a receiver reads, by the name of its place, in place of the running stream there."""


def _frozen(
    view: ModelView, senders: Sequence[tuple[int, int]], new: Replacement
) -> tuple[list[NamedHook], Other]:
    """Readers of the senders' values, and the stream with ``write(z') - write(z)``."""
    changes: dict[int, Tensor] = {}

    def reader(layer: int, some: tuple[int, ...]) -> NamedHook:
        name = view.z_hooks[layer]

        def read(value: Tensor, hook: Any) -> None:
            z, there = (by_head(x, view.n_heads) for x in (value, new.of(name, value)))
            there = torch.where(_one_hot(some, view.n_heads, value)[:, None], there, z)
            changes[layer] = written(view, layer, there) - written(view, layer, z)

        return name, read

    hooks = [reader(layer, some) for layer, some in heads_by_layer(senders).items()]
    return hooks, lambda name, x: x + torch.stack(list(changes.values())).sum(0).to(x)


def written(
    view: ModelView, layer: int, z: Float[Tensor, "batch position head d_head"]
) -> Float[Tensor, "batch position d_model"]:
    """What attention adds to the stream with some mixed values."""
    out = attention_of(view, layer, {view.z_hooks[layer]: z})
    after = writing_of(view).blocks[layer].after_attention
    return out if after is None else after.apply(out)


def _mlp_input(view: ModelView, layer: int, pre: Tensor, z: Tensor) -> Tensor:
    """The stream that the MLP of a block reads, from the block's input and its mixed values."""
    mlp = live_mlp(view, layer)
    assert mlp is not None
    return pre if mlp.parallel else pre + written(view, layer, by_head(z, view.n_heads)).to(pre)


def _receiving(
    view: ModelView, to: Receivers, other: Other, positions: Any, known: Known | None
) -> list[NamedHook]:
    """Hooks under which the receivers read another stream."""

    def stream(name: str, x: Float[Tensor, "batch position d_model"]) -> Tensor:
        if positions is None:
            return other(name, x)
        at, there = _positions(positions, x.shape[1], known), x.clone()
        there[:, at] = other(name, x)[:, at]
        return there

    hooks: list[NamedHook] = []
    for layer, sides in sorted(to.heads.items()):
        some = tuple(sorted({head for of in sides.values() for head in of}))

        def side(
            run: RunningHeads, which: str, layer: int = layer, sides: Any = sides, some: Any = some
        ) -> Tensor:
            if which not in sides:
                return run.own(which)
            there = reread(run.layer, stream(f"L{layer}", run.layer.h))
            there = getattr(there, which)[:, :, list(some)]
            receives = torch.tensor([head in sides[which] for head in some], device=there.device)
            return torch.where(receives[:, None], there, run.own(which))

        hooks += edited_attention(
            view,
            layer,
            some,
            lambda run, side=side: run.scores(side(run, "q"), side(run, "k")),
            lambda run, side=side: side(run, "v"),
        )
    for at in to.mlps:
        hooks += _mlp_hooks(view, at, stream)
    if to.output:
        hooks.append((view.state_hooks[-1], lambda value, hook: stream("output", value)))
    return hooks


def _mlp_hooks(view: ModelView, at: int, stream: Other) -> list[NamedHook]:
    """Hooks under which an MLP reads another stream: readers of its input, and a writer of its
    output."""
    seen: dict[str, Tensor] = {}
    mlp, name = live_mlp(view, at), writing_of(view).blocks[at].mlp_hook
    assert mlp is not None
    assert name is not None

    def write(value: Tensor, hook: Any) -> Tensor:
        x = _mlp_input(view, at, seen["pre"], seen["z"])
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        seen.clear()
        return value + (mlp.apply(stream(f"mlp{at}", x)) - mlp.apply(x)).to(value)

    readers: list[NamedHook] = [
        (view.state_hooks[at], lambda value, hook: seen.__setitem__("pre", value)),
        (view.z_hooks[at], lambda value, hook: seen.__setitem__("z", value)),
    ]
    return [*readers, (name, write)]
