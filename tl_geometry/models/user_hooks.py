"""Which user hooks act on a model, and what does it compute without them? Views, probes and results
ask.

A hook is a user's, or foreign, unless torch, transformers, accelerate or TransformerLens's models
defined it (bridges put hooks on themselves at the first forward pass, permanent ones too). An open
edit of this library counts, and so does a hook that a user makes with TransformerLens's
``patching``: both change what the model computes. However it was attached, a hook acts through
torch's own tables of forward and pre-forward hooks, of one module or of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import RLock, get_ident
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

OWN = (
    "transformer_lens.model_bridge.",
    "transformer_lens.hook_points.",
    "transformer_lens.components.",
    "transformer_lens.Hooked",
    "torch.",
    "transformers.",
    "accelerate.",
    "tl_geometry.models.forward.",
)
"""Beginnings of the names of Python modules whose hooks are not a user's: they belong to a model,
or to the pass that asks. A dot is added to a module's name before it is compared."""
GLOBAL = "every module"
"""The name given to torch's global hooks."""
Table = dict[int, Any]


def home(hook: Any) -> str:
    """The name of the Python module that defined a hook."""
    # the function inside: a partial object belongs to functools
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    return getattr(hook, "__module__", None) or type(hook).__module__


def foreign(hook: Any) -> bool:
    """Whether a hook is a user's: defined outside of the modules in :data:`OWN`."""
    return not f"{home(hook)}.".startswith(OWN)


def foreign_tables(model: Any) -> Iterator[tuple[str, Table, frozenset[int]]]:
    """Where foreign hooks act: the name of each place, its table of hooks, and the ids of the
    foreign ones in it."""
    for table in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        ids = frozenset(i for i, hook in acting(table) if foreign(hook))
        if ids:
            yield GLOBAL, table, ids
    for name, module in _modules(model):
        # a hook point wraps the user's function; its handle keeps it as user_hook
        functions: Mapping[int, Any] = {
            h.hook.id: h.user_hook for h in getattr(module, "fwd_hooks", ())
        }
        for table in (module._forward_hooks, module._forward_pre_hooks):
            ids = frozenset(i for i, hook in acting(table) if foreign(functions.get(i, hook)))
            if ids:
                yield name, table, ids


def acting(table: Table) -> list[tuple[int, Any]]:
    """The hooks of a table that are not silenced in this thread, with their ids."""
    # a copy: other threads add and remove hooks meanwhile
    return [(i, hook) for i, hook in list(table.items()) if not _silent(hook)]


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their names, each once; of a bridge also those of the model that it was made
    from."""
    seen: set[int] = set()
    # named_modules would pass each module up through all levels above it, which takes longer
    pending = [("original_model", getattr(model, "original_model", None)), ("", model)]
    while pending:
        name, module = pending.pop()
        if isinstance(module, nn.Module) and id(module) not in seen:
            seen.add(id(module))
            yield name, module
            for step, child in reversed(module._modules.items()):
                called = f"{name}.{step}".lstrip(".") if step != "_original_component" else name
                pending.append((called, child))


def names_of(model: Any) -> tuple[str, ...]:
    """Where foreign hooks act: hook points as HookedTransformer calls them, other modules by their
    path; and each ``forward`` that a user has replaced."""
    tables = [(name, id(table)) for name, table, _ in foreign_tables(model)]
    # asked only where it is needed, since a bridge makes its list of points anew each time; a point
    # has several names: the last one, TransformerLens's alias, stays
    listed = model.hook_dict.items() if tables else ()
    points = {id(point._forward_hooks): name for name, point in listed}
    places = {points.get(table, name) or type(model).__name__ for name, table in tables}
    return tuple(sorted(places.union(replaced_forwards(model))))


def replaced_forwards(model: Any) -> tuple[str, ...]:
    """Modules whose ``forward`` a user has replaced, in the module or in its class, as
    ``"blocks.0.mlp.forward"``."""
    return tuple(
        sorted(
            f"{name}.forward".lstrip(".") for name, module in _modules(model) if _replaced(module)
        )
    )


def _replaced(module: nn.Module) -> bool:
    """Whether a user has replaced a module's ``forward``."""
    of_instance = vars(module).get("forward")
    if of_instance is not None:
        return foreign(of_instance)
    owner = next(c for c in type(module).__mro__ if "forward" in vars(c))
    forward = vars(owner)["forward"]
    # a user's own class defines its forward itself: that replaces nothing
    return foreign(forward) and getattr(forward, "__module__", None) != owner.__module__


def brief(names: Sequence[str], most: int = 4) -> str:
    """A list of names (of hooks, weights) for a reader: the first ones, and how many more.

    >>> brief(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """The model as it is by itself: foreign hooks do nothing inside ``with`` in this thread, also
    on exceptions; in other threads they act as before."""
    with _SILENCING, ExitStack() as stack:
        for _, table, ids in list(foreign_tables(model)):
            for i in ids:
                hook = table.get(i)
                if hook is not None:  # not removed by another thread meanwhile
                    stack.callback(_restore, table, i, hook)
                    table[i] = _Elsewhere(hook, get_ident())
        yield


_SILENCING = RLock()
"""Held while a thread is inside :func:`without_hooks`: of two that overlap, one would put hooks
back twice or too early."""


@dataclass(frozen=True, eq=False)
class _Elsewhere:
    """A hook that acts in all threads but one."""

    hook: Callable[..., Any]
    thread: int

    def __call__(self, *given: Any) -> Any:
        return None if _silent(self) else self.hook(*given)


def _silent(hook: Any) -> bool:
    """Whether a hook does nothing in this thread."""
    return isinstance(hook, _Elsewhere) and hook.thread == get_ident()


def _restore(table: Table, i: int, hook: Any) -> None:
    """Put a hook back in its place, unless it was removed meanwhile."""
    if i in table:
        table[i] = hook
