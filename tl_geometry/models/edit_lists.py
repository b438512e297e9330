"""Edits of a live model as context managers and as lists of hooks.

A list knows nothing of the pass that it is given to but what its hooks see, and TransformerLens
decides when they are added and removed. So

1. hooks that only read move behind everybody's as soon as a pass begins (at the token ids or the
   embeddings, and at the input of an edited layer): they see what leaves a point;
2. hooks that write stay where the list has them: what comes before them sees what the model made;
3. other edits of the same heads are found by the hooks that stand at the same points;
4. what a pass was given is known by what it makes: :class:`~tl_geometry.models.hook_points.Shown`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from threading import RLock, get_ident
from typing import Any

from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.models.fingerprints import fingerprint
from tl_geometry.models.forward import Hook
from tl_geometry.models.hook_points import Shown, edited_heads, require_free
from tl_geometry.models.live_edits import Edit, LiveLayer, OpenEdit, edited, edited_scores
from tl_geometry.models.model_view import ModelView

HookList = list[tuple[str, Callable[[Tensor, Any], Tensor | None]]]
"""What ``run_with_hooks`` and ``hooks`` of TransformerLens take as ``fwd_hooks``."""


class OneThread:
    """The thread that a list of hooks belongs to: the first that adds it to the model."""

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.thread: int | None = None

    def require(self) -> None:
        """Refuse any other thread."""
        self.thread = self.thread or get_ident()
        require(
            self.thread == get_ident(),
            f"hooks of an edit of {self.view.name}",
            expected="passes of one thread",
            got="a pass of another, which has these hooks too",
            instead="with edit: ... around all threads",
        )


_ADDING = RLock()
"""One thread at a time adds a list to a model."""


class OwnedHooks(HookList):
    """The hooks of an edit. TransformerLens goes through the list to add them, in the thread of the
    pass: another thread is refused here, before its pass could run without the hooks that the first
    one takes away with its own."""

    def __init__(self, hooks: HookList, owner: OneThread) -> None:
        super().__init__(hooks)
        self.owner = owner

    def __iter__(self) -> Iterator[tuple[str, Callable[[Tensor, Any], Tensor | None]]]:
        with _ADDING:  # held until the whole list is on the model
            self.owner.require()
            for point in self.owner.view._model.hook_dict.values():
                for handle in point.fwd_hooks:
                    if isinstance(handle.user_hook, ListedHook):
                        handle.user_hook.thread.require()
            yield from super().__iter__()


class LiveEdit(AbstractContextManager[OpenEdit]):
    """An edit of a live model: a context manager, and a list of hooks.

    ``with edit: model(tokens)`` edits every pass inside; ``model.run_with_hooks(tokens,
    fwd_hooks=edit.hooks())`` edits that pass alone, with the same logits. Nothing happens before
    either. ``passes`` counts the passes that were edited, both ways; a block without any raises on
    exit.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[OpenEdit]],
        listed: Callable[[], tuple[OpenEdit, HookList]],
    ) -> None:
        self._opened, self._listed = opened, listed
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

    def __enter__(self) -> OpenEdit:
        context = self._opened()
        found = context.__enter__()
        self._stack.append(context)
        self._records.append(found)
        return found

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.pop().__exit__(*error)

    def hooks(self) -> HookList:
        """The edit as ``fwd_hooks`` of ``model.run_with_hooks`` or ``model.hooks``, for as many
        passes as one likes, alone or among other hooks in one list.

        The stream and the values are read as they leave everybody's hooks, wherever those stand in
        the list; at scores, pattern and z the order of the list counts: hooks before ours see what
        the model made (and may not change it), hooks after ours act on what the edit made. A list
        sees no arguments of a pass, and runs in one thread (TransformerLens removes the hooks of
        all threads when one is done). Whether it has edited a pass is counted in :attr:`passes`.
        Padding, keys of earlier passes and autocast are refused all
        the same, by the numbers that they leave; other position ids only where the model embeds
        them. Two edits of one head are refused, be they lists or open contexts.

        >>> import tl_geometry as tlg
        >>> model = tlg.zoo.embedded()
        >>> tokens = tlg.zoo.default_windows(model, 16, n=2).tokens
        >>> edit = tlg.interventions.remove_edge(model, tokens, "L0H0", "L1H0")
        >>> with edit:
        ...     inside = model(tokens)
        >>> bool((model.run_with_hooks(tokens, fwd_hooks=edit.hooks()) == inside).all())
        True
        """
        record, hooks = self._listed()
        self._records.append(record)
        return hooks


Prepared = Callable[[], tuple[ModelView, Sequence[Edit]]]
"""Makes the edits of a model when they are wanted, before any hook of ours."""


def live_edit(prepare: Prepared) -> LiveEdit:
    """Edits of scores as a context manager that is a list of hooks too."""

    @contextmanager
    def opened() -> Iterator[OpenEdit]:
        view, edits = prepare()
        with edited_scores(view, edits) as record:
            yield record
        require_unchanged(view)

    def listed() -> tuple[OpenEdit, HookList]:
        edit = _ListedEdit(*prepare())
        return edit.record, OwnedHooks(edit.hooks(), edit.thread)

    return LiveEdit(opened, listed)


def require_unchanged(view: ModelView) -> None:
    """Raise ``GeometryError`` where weights or settings changed while an edit was in use: what it
    removes was measured with the old ones."""
    now = fingerprint(view._model)
    require(
        now == view.fingerprint,
        f"an edit of {view.name}",
        expected=f"the weights that it was made for ({view.fingerprint})",
        got=f"others ({now})",
        instead="a basis of the changed model, decompose(model, tokens)",
    )


class ListedHook:
    """A hook of ours in somebody's list; ``owner`` has the heads that it edits."""

    def __init__(
        self,
        thread: OneThread,
        call: Hook,
        begin: Callable[[], None] | None = None,
        owner: _ListedEdit | None = None,
    ) -> None:
        self.thread, self.call, self.begin, self.owner = thread, call, begin, owner

    def __deepcopy__(self, memo: Any) -> ListedHook:
        return self  # a copied model has the hooks of the same edit, which checks its numbers

    def __call__(self, value: Tensor, hook: Any) -> Tensor | None:
        self.thread.require()
        if self.begin is not None:
            self.begin()
        return self.call(value)


class _ListedEdit:
    """The hooks of an edit for a list.

    They stand where the list has them; only those that read move behind everybody's, as soon as a
    pass begins. TransformerLens removes them as it removes all of the list.
    """

    def __init__(self, view: ModelView, edits: Sequence[Edit]) -> None:
        self.view, self.shown = view, Shown(view)
        self.heads = edited(edits)
        self.record = OpenEdit(self.heads)
        self.thread = OneThread(view)
        self.layers = [LiveLayer(view, edit, self.shown, self.record) for edit in edits]
        self.points: dict[str, Any] = dict(view._model.hook_dict)
        self.readers: list[tuple[str, ListedHook]] = []

    def hooks(self) -> HookList:
        """The list."""
        shown = self.shown.hooks()
        out: HookList = [(n, self._hook(call, self.begin)) for n, call in shown]
        for layer in self.layers:
            begin = self.begin_edit if layer.counts else self.begin
            for name, call, place in layer.hooks():
                hook = self._hook(call, begin if name == layer.names[0] else None)
                out.append((name, hook))
                if place == "last":
                    self.readers.append((name, hook))
        return out

    def _hook(self, call: Hook, begin: Callable[[], None] | None) -> ListedHook:
        return ListedHook(self.thread, call, begin, self)

    def begin_edit(self) -> None:
        """A pass reaches the first edited layer."""
        self.begin()
        require_unchanged(self.view)

    def begin(self) -> None:
        """A pass begins: no head may be another edit's, and readers come last."""
        taken = list(edited_heads(self.view))
        for layer in self.layers:
            hooks = [handle.user_hook for handle in self.points[layer.z].fwd_hooks]
            found = (hook.owner for hook in hooks if isinstance(hook, ListedHook))
            owners = [owner for owner in found if owner is not None]
            again = owners.count(self) > 1
            for owner in owners:
                taken += owner.heads if again or owner is not self else []
        require_free(self.heads, taken)
        for name, hook in self.readers:
            for handle in self.points[name].fwd_hooks:
                order = handle.hook.hooks_dict_ref() if handle.user_hook is hook else None
                if order is not None and handle.hook.id in order:
                    order.move_to_end(handle.hook.id)
