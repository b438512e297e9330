"""Hooks of ours on a live model: where they stand among everybody's, which heads are being edited,
and what a pass was given.

A hook point calls its hooks in the order in which they were added, and a user may add some at any
time, inside our context or before it. Ours therefore take their place anew whenever the point is
about to run: ``"first"`` (before everybody's hooks) or ``"last"`` (after them), by a pre-forward
hook that moves them in the point's own list.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.running import Hook

Place = Literal["first", "last"]


class Placed(NamedTuple):
    """A hook, and where it stands among all hooks of its point."""

    name: str
    call: Hook
    place: Place


class _Attachment:
    """One hook of ours on a hook point."""

    def __init__(self, view: ModelView, point: Any, hook: Placed) -> None:
        self.point, self.hook, self.view = point, hook, view
        known = {id(h) for h in point.fwd_hooks}
        point.add_hook(lambda value, hook, _call=hook.call: _call(value), is_permanent=True)
        self.handle = next(h for h in point.fwd_hooks if id(h) not in known)
        self.mover = point.register_forward_pre_hook(self._move)

    @property
    def present(self) -> bool:
        """Whether the hook is still there (``reset_hooks(including_permanent=True)`` takes it
        away)."""
        return any(h is self.handle for h in self.point.fwd_hooks)

    def _move(self, module: Any, given: Any) -> None:
        order = self.handle.hook.hooks_dict_ref()
        if not self.present or order is None or self.handle.hook.id not in order:
            _removed(self.view, [self])
        order.move_to_end(self.handle.hook.id, last=self.hook.place == "last")

    def remove(self) -> None:
        """Take the hook away, and leave those of others in their order."""
        self.mover.remove()
        self.handle.hook.remove()
        self.point.fwd_hooks[:] = [h for h in self.point.fwd_hooks if h is not self.handle]


def _removed(view: ModelView, gone: Sequence[_Attachment]) -> NoReturn:
    names = ", ".join(dict.fromkeys(a.hook.name for a in gone))
    fail(
        f"an open edit of {view.name}",
        expected="its hooks to stay until the end of the with block",
        got=f"none at {names} any more",
        instead="reset_hooks() without including_permanent, or after the with block",
    )


@contextmanager
def attached(view: ModelView, hooks: Iterable[Placed]) -> Iterator[None]:
    """Hooks on a live model, removed by their own handles on exit.

    Raises ``GeometryError`` at the next forward pass, and on exit, where somebody else has removed
    them meanwhile.
    """
    points, added, hooks = dict(view._model.hook_dict), list[_Attachment](), list(hooks)
    missing = [hook.name for hook in hooks if hook.name not in points]
    require(
        not missing,
        f"hooks of {view.name}",
        expected=f"hooks of this {view.class_name}",
        got=f"no {', '.join(missing)}",
        error=UnsupportedModelError,
    )
    try:
        for hook in hooks:
            added.append(_Attachment(view, points[hook.name], hook))
        yield
        if gone := [a for a in added if not a.present]:
            _removed(view, gone)
    finally:
        for attachment in added:
            attachment.remove()


@dataclass(eq=False)
class OpenEdits:
    """What is open on one model: the edited heads, and whether the model is being run for us alone
    (then edits do nothing)."""

    heads: list[tuple[int, int]] = field(default_factory=list)
    suspended: bool = False


_OPEN: weakref.WeakKeyDictionary[Any, OpenEdits] = weakref.WeakKeyDictionary()


def open_edits(view: ModelView) -> OpenEdits:
    """The open edits of a model."""
    return _OPEN.setdefault(view._model, OpenEdits())


@contextmanager
def claimed(view: ModelView, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Keep heads for one edit. Raises ``GeometryError`` for a head that an open edit has
    already."""
    record = open_edits(view)
    twice = sorted(set(heads) & set(record.heads))
    names = ", ".join(f"L{layer}H{head}" for layer, head in twice[:8])
    require(
        not twice,
        "heads",
        expected="heads that no open edit changes",
        got=f"{names}, edited already",
        instead="one edit with all the terms, remove_term(model, basis, [first, second], heads)",
    )
    record.heads.extend(heads)
    try:
        yield
    finally:
        for head in heads:
            record.heads.remove(head)


class Given:
    """What a forward pass was given beside the stream: token ids, masks, positions, keys and values
    of earlier passes.

    Edits are of whole prompts without padding, whose position is their index. Everything else is
    refused, each by its name.
    """

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.ids: Tensor | None = None
        self.arguments: dict[str, Any] = {}
        self.past = 0

    @contextmanager
    def watched(self, layers: Iterable[int]) -> Iterator[None]:
        """Look at the arguments of the model's parts during forward passes."""
        model = self.view._model
        handles = [model.embed.register_forward_pre_hook(self._embedding)]
        # run_with_hooks calls the forward method of the model itself, past its module hooks
        bridge = self.view.class_name == "TransformerBridge"
        whole = [model.original_model] if bridge else [model.blocks[l] for l in layers]
        handles += [
            module.register_forward_pre_hook(self._take, with_kwargs=True) for module in whole
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _embedding(self, module: Any, given: tuple[Any, ...]) -> None:
        ids = given[0] if given else None
        known = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim() == 2
        self.ids = ids if known else None

    def _take(self, module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        try:
            self.arguments = dict(
                inspect.signature(module.forward).bind_partial(*given, **named).arguments
            )
        except TypeError:
            self.arguments = dict(named)
        self.arguments |= self.arguments.pop("kwargs", {})
        names = ("past_kv_cache_entry", "past_key_values", "layer_past")
        # before this pass adds its own
        self.past = max(_past(self.arguments.get(name)) for name in names)

    def check(self, h: Tensor) -> Tensor | None:
        """Refuse what cannot be edited exactly; gives the token ids of the pass once, where they
        are known."""
        found, ids, self.ids = self.arguments, self.ids, None
        what, length = f"a forward pass of {self.view.name} inside an edit", h.shape[1]
        device = h.device.type
        require(
            not torch.is_autocast_enabled(device),
            what,
            expected="the model's own dtype",
            got="torch.autocast",
            instead="a model loaded in bfloat16, or no autocast",
        )
        require(
            self.past == 0,
            what,
            expected="whole prompts",
            got=f"tokens after {self.past} others in a key-value cache",
            instead="generate(..., use_past_kv_cache=False)",
        )
        masks = ("attention_mask", "one_zero_attention_mask")
        padded = [name for name in masks if _padded(found.get(name))]
        extra = found.get("additive_attention_mask")
        if isinstance(extra, Tensor) and bool((extra != 0).any()):
            padded.append("one_zero_attention_mask")
        require(
            not padded,
            what,
            expected="no padding: the basis knows positions by their index",
            got=f"zeros in {', '.join(padded)}",
            instead="prompts of one length, with attention_mask=torch.ones_like(tokens) where ids "
            "equal the pad token",
        )
        positions = found.get("position_ids")
        usual = not isinstance(positions, Tensor) or bool(
            (positions == torch.arange(length, device=positions.device)).all()
        )
        require(
            usual,
            what,
            expected=f"positions 0 to {length - 1}",
            got="other position_ids",
            instead="the model's own positions",
        )
        return ids if ids is not None and tuple(ids.shape) == tuple(h.shape[:2]) else None


def _past(cache: Any) -> int:
    """Tokens that a key-value cache holds."""
    if isinstance(keys := getattr(cache, "past_keys", None), Tensor):
        return keys.shape[1]
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0


def _padded(mask: Any) -> bool:
    """Whether a mask of one number for each token leaves some out; masks ``[batch head query key]``
    are compared with the scores."""
    return isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask == 0).any())


def hooked_points(view: ModelView, prefix: str, besides: Sequence[str] = ()) -> list[str]:
    """Hook points with somebody else's functions, under a prefix, each once. Caches of
    TransformerLens and hooks of ours count for nothing: they change no value."""
    own = ("transformer_lens", __name__.partition(".")[0])
    points = view._model.hook_dict
    seen = {id(points[name]) for name in besides if name in points}
    found: list[str] = []
    for name, point in points.items():
        homes = [getattr(h.user_hook, "__module__", None) or "" for h in point.fwd_hooks]
        others = any(not home.startswith(own) for home in homes)
        if name.startswith(prefix) and id(point) not in seen and others:
            seen.add(id(point))
            found.append(name)
    return found
