"""Hooks of somebody else on a model: which there are, and the model without them.

A hook counts where it was defined outside of TransformerLens's own models (its bridges put hooks on
themselves, on the first forward pass, permanent ones too), torch, transformers and accelerate. An
intervention of this package that is open counts, and so does a hook that a user makes from
TransformerLens's ``patching``: both change what the model computes. Whatever the way it was
attached, a hook acts through torch's own tables of forward and pre-forward hooks, of one module or
of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

OWN = (
    "transformer_lens.model_bridge",
    "transformer_lens.hook_points",
    "transformer_lens.components",
    "transformer_lens.Hooked",
    "torch.",
    "transformers.",
    "accelerate.",
    "tl_geometry.models.running",
)
"""Where hooks are defined that belong to a model, or to the pass that asks."""
GLOBAL = "every module"
"""The name given to torch's global hooks."""
Table = dict[int, Any]


def foreign(hook: Any) -> bool:
    """Whether somebody else defined a hook."""
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{home}.".startswith(
        tuple(own if own.endswith(("Hooked", ".")) else f"{own}." for own in OWN)
    )


def foreign_tables(model: Any) -> Iterator[tuple[str, Table, frozenset[int]]]:
    """Name, table of hooks, and the ids in it that are foreign, wherever there are any."""
    for table in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks):
        ids = frozenset(i for i, hook in table.items() if foreign(hook))
        if ids:
            yield GLOBAL, table, ids
    for name, module in _modules(model):
        functions: Mapping[int, Any] = {
            h.hook.id: h.user_hook for h in getattr(module, "fwd_hooks", ())
        }
        for table in (module._forward_hooks, module._forward_pre_hooks):
            ids = frozenset(i for i, hook in table.items() if foreign(functions.get(i, hook)))
            if ids:
                yield name, table, ids


def _modules(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """All modules with their names, those too that a bridge only keeps in the model that it was
    made from."""
    seen: set[int] = set()
    for prefix, root in (("", model), ("original_model", getattr(model, "original_model", None))):
        for path, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if id(module) not in seen:
                seen.add(id(module))
                steps = [prefix, *path.split(".")]
                yield ".".join(p for p in steps if p not in ("", "_original_component")), module


def names_of(model: Any) -> tuple[str, ...]:
    """Where foreign hooks act: hook points as HookedTransformer calls them, other modules by their
    path."""
    # an alias comes after what it is one of
    points = {id(point._forward_hooks): name for name, point in model.hook_dict.items()}
    tables = [(name, id(table)) for name, table, _ in foreign_tables(model)]
    found = {points.get(table, name) or type(model).__name__ for name, table in tables}
    return tuple(sorted(found))


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """The model as it is by itself: foreign hooks are off inside ``with``, and back in their order
    afterwards, also on exceptions."""
    with ExitStack() as stack:
        for _, table, ids in list(foreign_tables(model)):
            stack.callback(_restore, table, dict(table), ids)
            for i in ids:
                del table[i]
        yield


def _restore(table: Table, before: Table, ids: frozenset[int]) -> None:
    """Put hooks back where they were; those that were added meanwhile (by a bridge's first pass)
    come last."""
    now = dict(table)
    table.clear()
    table.update({i: hook for i, hook in before.items() if i in ids or i in now})
    table.update(now)


__all__ = ["foreign", "foreign_tables", "names_of", "without_hooks"]
