"""Where do the hooks of an edit stand on a live model, which heads are being edited, and what was a
forward pass given? :mod:`tl_geometry.models.live_edits` builds edits from the answers.

A hook point calls its hooks in the order in which they were added, and a user may add some at any
time, inside an edit or before it. The hooks of an edit therefore take their place anew whenever the
point is about to run: ``"first"`` (before user hooks) or ``"last"`` (after them), by a pre-forward
hook that moves them in the point's own table.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.models.forward import Hook, put_on, require_points, take_away
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.user_hooks import foreign, home, without_hooks

Place = Literal["first", "last"]


class PlacedHook(NamedTuple):
    """A hook, and where it stands among all hooks of its point."""

    name: str
    call: Hook
    place: Place


class _Attachment:
    """One hook of an edit on a hook point, and the pre-forward hook that moves it to its place."""

    def __init__(self, view: ModelView, point: Any, hook: PlacedHook) -> None:
        self.point, self.hook, self.view = point, hook, view
        act = hook.call
        self.handle = put_on(point, lambda value, hook: act(value), is_permanent=True)
        # functions, which a deep copy of the model shares: a bound method would be copied with it
        self.mover = point.register_forward_pre_hook(lambda module, arguments: self._move(module))

    def require_present(self) -> None:
        """Raise where ``reset_hooks(including_permanent=True)`` has taken the hook away."""
        present, what = self.handle.hook.id in self.point._forward_hooks, self.view.name
        expected = "its hooks to stay until the end of the with block"
        got = f"none at {self.hook.name} any more"
        instead = "reset_hooks() without including_permanent, or after the with block"
        require(present, f"an open edit of {what}", expected=expected, got=got, instead=instead)

    def _move(self, module: Any) -> None:
        """Move the hook to its place among those of its point; ``module`` is the point that
        runs."""
        what, expected = f"a copy of {self.view.name}", "a model that was copied outside of edits"
        got = f"one that was copied inside an edit of {self.hook.name}, whose hooks it has"
        instead = "copy.deepcopy(model) before or after the with block"
        require(module is self.point, what, expected=expected, got=got, instead=instead)
        self.require_present()
        last = self.hook.place == "last"
        self.point._forward_hooks.move_to_end(self.handle.hook.id, last=last)

    def remove(self) -> None:
        """Take the hook away, and leave those of others in their order."""
        self.mover.remove()
        take_away(self.point, self.handle)


@contextmanager
def attached(view: ModelView, hooks: Sequence[PlacedHook]) -> Iterator[None]:
    """Hooks on a live model, removed by their own handles on exit.

    Raises ``GeometryError`` at the next forward pass, and on exit, where user code has removed them
    meanwhile.
    """
    points = view._model.hook_dict  # a bridge makes it anew each time, through all its aliases
    require_points(points, [h.name for h in hooks], view.name, view.class_name)
    with ExitStack() as stack:
        attachments: list[_Attachment] = []
        for hook in hooks:
            attachments.append(_Attachment(view, points[hook.name], hook))
            stack.callback(attachments[-1].remove)
        yield
        for attachment in attachments:
            attachment.require_present()


_EDITED: weakref.WeakKeyDictionary[Any, list[tuple[int, int]]] = weakref.WeakKeyDictionary()
"""By model, the heads (layer, head) that open contexts change."""


def edited_heads(view: ModelView) -> list[tuple[int, int]]:
    """The heads that open edits of a model change."""
    return _EDITED.setdefault(view._model, [])


@contextmanager
def claimed(view: ModelView, heads: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Reserve heads for one edit inside ``with``. Raises ``GeometryError`` for a head that another
    open edit has."""
    taken = edited_heads(view)
    require_free(heads, taken)
    taken.extend(heads)
    try:
        yield
    finally:
        for head in heads:
            taken.remove(head)


def require_free(heads: Iterable[tuple[int, int]], taken: Iterable[tuple[int, int]]) -> None:
    """Raise ``GeometryError`` for heads that another edit changes."""
    twice = sorted(set(heads) & set(taken))
    names = ", ".join(f"L{layer}H{head}" for layer, head in twice[:8])
    expected = "heads that no open edit changes"
    instead = "one edit with all the terms, remove_term(model, basis, [first, second], heads)"
    require(not twice, "heads", expected=expected, got=f"{names}, edited already", instead=instead)


def _unchanged(ids: Tensor) -> Tensor:
    """Token ids as they are."""
    return ids


@dataclass(frozen=True, eq=False)
class PassTokens:
    """The tokens of a running pass as it shows them: ids ``[batch position]``, or embeddings
    ``[batch position d_model]``, which ``embed`` makes of ids."""

    shown: Tensor
    embed: Callable[[Tensor], Tensor] = _unchanged

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch and length."""
        return tuple(self.shown.shape[:2])

    def are(self, ids: Int[Tensor, "batch position"]) -> Bool[Tensor, "batch position"]:
        """Where they are the given ones."""
        same = self.shown == self.embed(ids.to(self.shown.device))
        return same if same.dim() == 2 else same.all(-1)


class _RunningPass(threading.local):
    """What the running pass of this thread was given: its tokens, arguments by name, and how many
    tokens a key-value cache holds already (``past``)."""

    tokens: PassTokens | None = None
    named: Mapping[str, Any] = MappingProxyType({})
    past: int = 0


class PassArguments:
    """What a forward pass was given beside the stream: token ids, masks, positions, keys and values
    of earlier passes; each thread has its own pass.

    An edit takes whole prompts without padding, in which a token's position is its index. Whatever
    else comes is refused by name. ``first`` is the position id that the model gives the first
    token.
    """

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.running = _RunningPass()
        self.first = 0

    @contextmanager
    def watched(self, layers: Iterable[int]) -> Iterator[None]:
        """Look at the arguments of the model's parts during forward passes."""
        model = self.view._model
        # functions, as in _Attachment
        ids = lambda module, arguments: self._ids(arguments[0] if arguments else None)  # noqa: E731
        take = lambda module, given, named: self._take(module, given, named)  # noqa: E731
        # run_with_hooks calls the forward method of the model itself, past its module hooks
        bridge = self.view.class_name == "TransformerBridge"
        modules = [model.original_model] if bridge else [model.blocks[l] for l in layers]
        with ExitStack() as stack:
            stack.callback(model.embed.register_forward_pre_hook(ids).remove)
            for module in modules:
                handle = module.register_forward_pre_hook(take, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _ids(self, ids: Any) -> None:
        """Note what the embedding is given, if it is token ids."""
        are_ids = isinstance(ids, Tensor) and not ids.is_floating_point() and ids.dim() == 2
        self.running.tokens = PassTokens(ids) if are_ids else None

    def _take(self, module: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Note the arguments of a module by name, positional ones too."""
        try:
            bound = inspect.signature(module.forward).bind_partial(*given, **named)
            arguments = dict(bound.arguments)
        except TypeError:
            arguments = dict(named)
        arguments |= arguments.pop("kwargs", {})
        # HookedTransformer's name, that of transformers, and its new one (Runner.behind)
        names = ("past_kv_cache_entry", "past_key_values", "cache")
        # counted now, before this pass adds its own keys
        self.running.past = max(_past(arguments.get(name)) for name in names)
        self.running.named = arguments

    def check(self, h: Tensor) -> PassTokens | None:
        """Refuse what cannot be edited exactly. The first call in a pass gives its tokens, where
        they are known; later calls give ``None``. Tokens are those last embedded in this thread: a
        pass that starts at a later layer is taken for one of the tokens embedded before it."""
        running = self.running
        arguments, tokens, running.tokens = running.named, running.tokens, None
        length = h.shape[1]

        def allow(condition: bool, expected: str, got: str, instead: str) -> None:
            what = f"a forward pass of {self.view.name} inside an edit"
            require(condition, what, expected=expected, got=got, instead=instead)

        autocast, instead = torch.is_autocast_enabled(h.device.type), "a model loaded in bfloat16"
        allow(not autocast, "the model's own dtype", "torch.autocast", f"{instead}, or no autocast")
        got = f"tokens after {running.past} others in a key-value cache"
        allow(running.past == 0, "whole prompts", got, "generate(..., use_past_kv_cache=False)")
        masks = ("attention_mask", "one_zero_attention_mask")
        padded = [name for name in masks if _padded(arguments.get(name))]
        extra = arguments.get("additive_attention_mask")
        if isinstance(extra, Tensor) and bool((extra != 0).any()):
            padded.append("one_zero_attention_mask")  # of which HookedEncoder makes it
        expected = "no padding: the basis knows positions by their index"
        instead = "prompts of one length, with attention_mask=torch.ones_like(tokens)"
        instead += " where ids equal the pad token"
        allow(not padded, expected, f"zeros in {', '.join(padded)}", instead)
        positions = arguments.get("position_ids")
        if isinstance(positions, Tensor):
            usual = self.first + torch.arange(length, device=positions.device)
            expected = f"positions {self.first} to {self.first + length - 1}"
            same = bool((positions == usual).all())
            allow(same, expected, "other position_ids", "the model's own positions")
        return tokens if tokens is not None and tokens.shape == tuple(h.shape[:2]) else None


POSITIONS = "pos_embed.hook_in"
"""The hook of position ids, where a bridge's model embeds them."""


class HookedArguments(PassArguments):
    """:class:`PassArguments` read by hooks alone, which see activations, not the arguments of
    forward(): tokens by their ids or embeddings, and position ids where the model embeds them.
    Masks and keys of earlier passes show in the scores, patterns and mixed values that they
    make."""

    def hooks(self) -> list[tuple[str, Hook]]:
        """Readers of what a pass shows before its first block."""
        points = self.view._model.hook_dict
        readers: list[tuple[str, Hook]] = [self._tokens()]
        if POSITIONS in points:
            # the last id: some models do not count padding tokens, which mostly stand earlier
            ids = torch.full((1, 2), self.view.d_vocab - 1)
            usual = self.view.activations(ids, [POSITIONS])[POSITIONS]
            if not usual.is_floating_point():  # OPT has its mask there
                self.first = int(usual.flatten()[0])
                readers.append((POSITIONS, self._positions))
        return [hook for hook in readers if hook[0] in points]

    def _tokens(self) -> tuple[str, Hook]:
        """The hook that shows the tokens: a bridge has one of the ids, the other classes one of
        their embeddings."""
        model, class_name = self.view._model, self.view.class_name
        if class_name == "TransformerBridge":
            return "embed.hook_in", self._ids
        encoder = class_name == "HookedEncoder"
        name, table = (
            ("embed.hook_embed", model.embed.embed) if encoder else ("hook_embed", model.embed)
        )

        def embed(ids: Tensor) -> Tensor:
            with without_hooks(model), torch.no_grad():
                return table(ids)

        def embedded(value: Tensor) -> None:
            self.running.tokens = PassTokens(value.detach(), embed)

        return name, embedded

    def _positions(self, ids: Tensor) -> None:
        self.running.named = {"position_ids": ids}


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
    """Hook points under a prefix that have user hooks, each once, except those in ``besides``.
    Those of this library do not count."""
    library = f"{__name__.partition('.')[0]}."
    points = view._model.hook_dict
    excepted = {id(points[name]) for name in besides if name in points}
    hooked: dict[int, str] = {}
    for name, point in points.items():
        functions: dict[int, Any] = {h.hook.id: h.user_hook for h in point.fwd_hooks}
        hooks = [functions.get(i, hook) for i, hook in point._forward_hooks.items()]
        has_user_hook = any(foreign(h) and not home(h).startswith(library) for h in hooks)
        if name.startswith(prefix) and id(point) not in excepted and has_user_hook:
            # a point has several names: the last one, TransformerLens's alias, stays
            hooked[id(point)] = name
    return list(hooked.values())
