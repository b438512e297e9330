"""Edits of a live model as context managers and as lists of hooks.

A list knows nothing of the pass that it is given to but what its hooks see, and TransformerLens
decides when they are added and removed. So

1. hooks that only read move behind everybody's as soon as a pass begins (at the token ids or the
   embeddings, and at the input of an edited layer): they see what leaves a point;
2. hooks that write stay where the list has them: what comes before them sees what the model made;
3. other edits of the same heads are found by the hooks that stand at the same points;
4. what a pass was given is known by what it makes: :class:`~tl_geometry.models.points.Shown`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

from torch import Tensor

from tl_geometry.models.live import Edit, LiveLayer, OpenEdit, edited_scores
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.points import Shown, open_edits, require_free
from tl_geometry.models.running import Hook

HookList = list[tuple[str, Callable[[Tensor, Any], Tensor | None]]]
"""What ``run_with_hooks`` and ``hooks`` of TransformerLens take as ``fwd_hooks``."""
Opened = TypeVar("Opened")


class LiveEdit(AbstractContextManager[Opened], Generic[Opened]):
    """An edit of a live model: a context manager, and a list of hooks.

    ``with edit: model(tokens)`` edits every pass inside; ``model.run_with_hooks(tokens,
    fwd_hooks=edit.hooks())`` edits that pass alone, with the same logits. Nothing happens before
    either.
    """

    def __init__(
        self,
        opened: Callable[[], AbstractContextManager[Opened]],
        listed: Callable[[], HookList],
    ) -> None:
        self._opened, self._listed = opened, listed
        self._stack: list[AbstractContextManager[Opened]] = []

    def __enter__(self) -> Opened:
        context = self._opened()
        found = context.__enter__()
        self._stack.append(context)
        return found

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.pop().__exit__(*error)

    def hooks(self) -> HookList:
        """The edit as ``fwd_hooks`` of ``model.run_with_hooks`` or ``model.hooks``, for as many
        passes as one likes, alone or among other hooks in one list.

        The stream and the values are read as they leave everybody's hooks, wherever those stand in
        the list; at scores, pattern and z the order of the list counts: hooks before ours see what
        the model made (and may not change it), hooks after ours act on what the edit made. A list
        sees no arguments of a pass. Padding, keys of earlier passes and autocast are refused all
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
        return self._listed()


Prepared = Callable[[], tuple[ModelView, Sequence[Edit]]]
"""Makes the edits of a model when they are wanted, before any hook of ours."""


def live_edit(prepare: Prepared) -> LiveEdit[OpenEdit]:
    """Edits of scores as a context manager that is a list of hooks too."""
    return LiveEdit(lambda: edited_scores(*prepare()), lambda: _ListedEdit(*prepare()).hooks())


class _ListedHook:
    """A hook of ours in somebody's list."""

    def __init__(self, owner: _ListedEdit, call: Hook, begins: bool) -> None:
        self.owner, self.call, self.begins = owner, call, begins

    def __call__(self, value: Tensor, hook: Any) -> Tensor | None:
        if self.begins:
            self.owner.begin()
        return self.call(value)


class _ListedEdit:
    """The hooks of an edit for a list.

    They stand where the list has them; only those that read move behind everybody's, as soon as a
    pass begins. TransformerLens removes them as it removes all of the list.
    """

    def __init__(self, view: ModelView, edits: Sequence[Edit]) -> None:
        self.view, self.shown = view, Shown(view)
        self.layers = [LiveLayer(view, edit, self.shown, []) for edit in edits]
        self.heads = [(edit.layer, head) for edit in edits for head in edit.heads]
        self.points: dict[str, Any] = dict(view._model.hook_dict)
        self.readers: list[tuple[str, _ListedHook]] = []

    def hooks(self) -> HookList:
        """The list."""
        out: HookList = [(n, _ListedHook(self, call, True)) for n, call in self.shown.hooks()]
        for layer in self.layers:
            for name, call, place in layer.hooks():
                hook = _ListedHook(self, call, name == layer.names[0])
                out.append((name, hook))
                if place == "last":
                    self.readers.append((name, hook))
        return out

    def begin(self) -> None:
        """A pass begins: no head may be another edit's, and readers come last."""
        taken = list(open_edits(self.view).heads)
        for layer in self.layers:
            hooks = [handle.user_hook for handle in self.points[layer.z].fwd_hooks]
            owners = [hook.owner for hook in hooks if isinstance(hook, _ListedHook)]
            again = owners.count(self) > 1
            for owner in owners:
                taken += owner.heads if again or owner is not self else []
        require_free(self.heads, taken)
        for name, hook in self.readers:
            for handle in self.points[name].fwd_hooks:
                order = handle.hook.hooks_dict_ref() if handle.user_hook is hook else None
                if order is not None and handle.hook.id in order:
                    order.move_to_end(handle.hook.id)
