"""What does a user hold who edits a live model? A :class:`LiveEdit`: a context manager, and a list
of hooks for ``run_with_hooks``. Every function of ``interventions`` that edits a model returns one.

Both ways put the same hooks of :mod:`tl_geometry.models.live_edits` on the model. In a list they
lack two things: TransformerLens decides when they are added and removed, and they see activations,
not the arguments of forward(). So in a list

1. hooks that only read move behind user hooks when a pass begins (at the token ids or embeddings,
   and at the input of an edited layer), so that they see what leaves a point;
2. hooks that write stay where the list has them: hooks before them see what the model made;
3. another edit of the same heads is recognised by its hooks at the same points, and refused;
4. the arguments of a pass are read off the activations that they make
   (:class:`~tl_geometry.models.hook_points.HookedArguments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock, get_ident
from typing import Any

from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.models.forward import Hook
from tl_geometry.models.hook_points import HookedArguments, edited_heads, require_free
from tl_geometry.models.live_edits import (
    Edit,
    LiveLayer,
    OpenEdit,
    StreamEdit,
    edited,
    edited_scores,
    score_edits,
    stream_hooks,
)
from tl_geometry.models.model_view import ModelView

HookList = list[tuple[str, Callable[[Tensor, Any], Tensor | None]]]
"""What ``run_with_hooks`` and ``hooks`` of TransformerLens take as ``fwd_hooks``."""
_ADDING = RLock()
"""One thread at a time adds a list to a model."""


class ListedHook:
    """A hook of an edit in a list. ``owner`` is the list that it was made for; ``begin``, if given,
    is called before the hook, where a pass or an edit begins."""

    def __init__(self, owner: EditHooks, call: Hook, begin: Callable[[], None] | None) -> None:
        self.owner, self.call, self.begin = owner, call, begin

    def __deepcopy__(self, memo: Any) -> ListedHook:
        return self  # a copy of the model has hooks of the same edit, which checks its numbers

    def __call__(self, value: Tensor, hook: Any) -> Tensor | None:
        self.owner.require_thread()
        if self.begin is not None:
            self.begin()
        return self.call(value)


class EditHooks(HookList):
    """The hooks of some edits as a list, which belongs to the first thread that adds it to a model.

    TransformerLens goes through the list to add the hooks, in the thread of the pass, and removes
    those of all threads when one pass is done. Another thread is therefore refused as soon as it
    goes through the list, before its pass could run without its hooks.

    ``record`` counts the passes, ``points`` are the model's hook points by name, ``readers`` the
    hooks that move to the end of their point when a pass begins.
    """

    def __init__(self, view: ModelView, edits: Sequence[Edit | StreamEdit]) -> None:
        super().__init__()
        self.view = view
        self.thread: int | None = None
        self.record = OpenEdit(edited(edits))
        self.points: dict[str, Any] = dict(view._model.hook_dict)
        self.readers: list[tuple[str, ListedHook]] = []
        arguments = HookedArguments(view)
        scored = score_edits(edits)
        self.layers = [LiveLayer(view, edit, arguments, self.record) for edit in scored]
        for name, call in arguments.hooks() if scored else ():
            self._add(name, call, self._begin)
        for layer in self.layers:
            begin = self._begin_edit if layer.counts else self._begin
            for name, call, place in layer.hooks():
                hook = self._add(name, call, begin if name == layer.names[0] else None)
                if place == "last":
                    self.readers.append((name, hook))
        for i, (name, call, _) in enumerate(stream_hooks(edits, self.record)):
            self._add(name, call, None if i else self._begin_edit)

    def _add(self, name: str, call: Hook, begin: Callable[[], None] | None) -> ListedHook:
        hook = ListedHook(self, call, begin)
        self.append((name, hook))
        return hook

    def require_thread(self) -> None:
        """Refuse any other thread than the first."""
        self.thread = self.thread or get_ident()
        what = f"hooks of an edit of {self.view.name}"
        expected, got = "passes of one thread", "a pass of another, which has these hooks too"
        instead = "with edit: ... around all threads"
        require(self.thread == get_ident(), what, expected=expected, got=got, instead=instead)

    def __iter__(self) -> Iterator[tuple[str, Callable[[Tensor, Any], Tensor | None]]]:
        with _ADDING:  # held until the whole list is on the model
            self.require_thread()
            for point in self.points.values():
                for handle in point.fwd_hooks:
                    if isinstance(handle.user_hook, ListedHook):
                        handle.user_hook.owner.require_thread()
            yield from super().__iter__()

    def _begin_edit(self) -> None:
        """A pass reaches the first edited layer: the weights are compared once a pass, here."""
        self._begin()
        self.view.require_unchanged()

    def _begin(self) -> None:
        """A pass begins: no head may be another edit's, and readers come last. Open contexts
        reserve their heads (:func:`edited_heads`), lists show theirs by their hooks at z."""
        taken = list(edited_heads(self.view))
        for layer in self.layers:
            hooks = [handle.user_hook for handle in self.points[layer.z].fwd_hooks]
            owners = [hook.owner for hook in hooks if isinstance(hook, ListedHook)]
            twice = sum(owner is self for owner in owners) > 1  # the list was added twice
            for owner in owners:
                taken += owner.record.heads if twice or owner is not self else []
        require_free(self.record.heads, taken)
        for name, hook in self.readers:
            point = self.points[name]
            # torch calls the hooks of a module in the order of this table
            for handle in point.fwd_hooks:
                if handle.user_hook is hook and handle.hook.id in point._forward_hooks:
                    point._forward_hooks.move_to_end(handle.hook.id)


class LiveEdit(AbstractContextManager[OpenEdit]):
    """An edit of a live model: a context manager, and a list of hooks.

    ``with edit: model(tokens)`` edits every pass inside; ``model.run_with_hooks(tokens,
    fwd_hooks=edit.hooks())`` edits that pass alone, with the same logits. ``prepare`` makes
    the view and the edits when the block opens or hooks() is called; nothing runs before.
    ``passes`` counts the passes that were edited, both ways; a block without any raises on exit.
    """

    def __init__(
        self, prepare: Callable[[], tuple[ModelView, Sequence[Edit | StreamEdit]]]
    ) -> None:
        self._prepare = prepare
        self._stack: list[AbstractContextManager[OpenEdit]] = []
        self._records: list[OpenEdit] = []

    def __repr__(self) -> str:
        flags = "".join(f", {flag}" for flag in self.flags)
        return f"LiveEdit({self.passes} passes edited{flags})"

    @property
    def passes(self) -> int:
        """Forward passes that were edited."""
        return sum(record.passes for record in self._records)

    @property
    def flags(self) -> tuple[str, ...]:
        """What was noticed in them."""
        return tuple(dict.fromkeys(flag for record in self._records for flag in record.flags))

    @contextmanager
    def _opened(self) -> Iterator[OpenEdit]:
        view, edits = self._prepare()
        with edited_scores(view, edits) as record:
            yield record
        view.require_unchanged()

    def __enter__(self) -> OpenEdit:
        context = self._opened()
        record = context.__enter__()
        self._stack.append(context)
        self._records.append(record)
        return record

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.pop().__exit__(*error)

    def hooks(self) -> HookList:
        """The edit as ``fwd_hooks`` of ``model.run_with_hooks`` or ``model.hooks``, for as many
        passes as one likes, alone or among other hooks in one list.

        The stream and the values are read as they leave all user hooks, wherever those stand in the
        list; at scores, pattern and z the order of the list counts: hooks before the edit's see
        what the model made (and may not change it), hooks after them act on what the edit made. A
        list sees no arguments of a pass, and runs in one thread (TransformerLens removes the hooks
        of all threads when one is done). Whether it has edited a pass is counted in :attr:`passes`.
        Padding, keys of earlier passes and autocast are refused all the same, by the numbers that
        they leave; other position ids only where the model embeds them. Two edits of one head are
        refused, be they lists or open contexts.

        >>> import tl_geometry as tlg
        >>> model = tlg.zoo.embedded()
        >>> tokens = tlg.zoo.default_windows(model, 16, n=2).tokens
        >>> edit = tlg.interventions.remove_edge(model, tokens, "L0H0", "L1H0")
        >>> with edit:
        ...     inside = model(tokens)
        >>> bool((model.run_with_hooks(tokens, fwd_hooks=edit.hooks()) == inside).all())
        True
        """
        hooks = EditHooks(*self._prepare())
        self._records.append(hooks.record)
        return hooks
