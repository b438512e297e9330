"""One pass of a model of any TransformerLens class with hooks. Each must fire, each is removed by
its own handle, also on exceptions, and nothing is computed after what was asked for.

TransformerLens removes hooks by level or all at once, and its bridges call a hook under its
canonical name. Here each hook is closed over the name that was asked for. Where nothing after some
state is needed, a hook at that state ends the pass by a private exception (:class:`Stop`), because
``stop_at_layer`` means different things at the last layer of different classes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import UnsupportedModelError, fail, require

Hook = Callable[[Tensor], Tensor | None]
"""Called with an activation; a tensor returned takes its place, ``None`` leaves it."""
K = TypeVar("K", bound=Hashable)
OWN = (
    "transformer_lens.model_bridge.",
    "transformer_lens.hook_points.",
    "transformer_lens.components.",
    "transformer_lens.Hooked",
    "torch.",
    "transformers.",
    "accelerate.",
    "tl_geometry.models.runner.",
)
"""Beginnings of the names of Python modules whose hooks are not a user's: they belong to a model,
or to the pass that asks. A dot is added to a module's name before it is compared."""


def keep(into: MutableMapping[K, Tensor], key: K) -> Hook:
    """A hook that keeps an activation, detached (the first one, where the hook fires several
    times)."""

    def hook(value: Tensor) -> None:
        into.setdefault(key, value.detach())

    return hook


class Stop(Exception):
    """Raised by the last hook once everything that was asked for has been seen."""


@dataclass(eq=False)
class Runner:
    """Runs one model; the callable behind :meth:`tl_geometry.models.ModelView.run`.

    ``state_hooks[s]`` is the hook of state s; ``points`` are the hook points by name, ``kwargs``
    further arguments of the model's forward().
    """

    model: Any
    class_name: str
    name: str
    state_hooks: tuple[str, ...]
    n_ctx: int
    d_vocab: int
    device: torch.device
    points: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.class_name == "TransformerBridge":
            accepted = inspect.signature(self.model.original_model.forward).parameters
            # else transformers keeps the keys and values of every layer
            self.kwargs = {"use_cache": False} if "use_cache" in accepted else {}

    def has(self, name: str) -> bool:
        """Whether the model has a hook of that name."""
        if name not in self.points:
            self.points = dict(self.model.hook_dict)
        return name in self.points

    def __call__(
        self, tokens: Tensor, hooks: Mapping[str, Hook], *, logits: bool = False
    ) -> Tensor | None:
        ids = self.checked(tokens)
        known = {name: name for name in hooks if self.has(name)}
        require_points(known, hooks, self.name, self.class_name)
        fired: set[str] = set()
        last = self._last_state(hooks, logits)
        handles = [self._add(name, hook, fired) for name, hook in hooks.items()]
        try:
            if last is not None:
                handles.append(self._add(self.state_hooks[last], _stop, set()))
            with torch.no_grad():
                out = self._forward(ids, logits)
        except Stop:
            out = None
        finally:
            for point, handle in handles:
                take_away(point, handle)
        silent = sorted(set(hooks) - fired)
        if silent:
            expected, got = "each to fire in a forward pass", f"silent: {', '.join(silent)}"
            what, instead = f"hooks of {self.name}", "another TransformerLens class for this model"
            fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
        return out

    def behind(self, cache: Any, tokens: Tensor) -> Runner:
        """The runner of a pass over ``tokens`` that reads and extends a cache of the keys and
        values before them."""
        runner = copy.copy(self)
        if self.class_name == "HookedTransformer":
            # without a mask it asks its tokenizer for one, and may have no tokenizer
            runner.kwargs = {"past_kv_cache": cache, "attention_mask": torch.ones_like(tokens)}
            return runner
        accepted = inspect.signature(self.model.original_model.forward).parameters
        # transformers 5.24 has given the argument another name
        name = "past_key_values" if "past_key_values" in accepted else "cache"
        runner.kwargs = {"use_cache": True, name: cache}
        return runner

    def empty_cache(self, batch: int, config: Any = None) -> Any:
        """A cache without keys. Layers with a sliding window that a ``config`` of transformers
        names forget the keys outside of it."""
        if self.class_name == "HookedTransformer":
            from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

            return TransformerLensKeyValueCache.init_cache(self.model.cfg, self.device, batch)
        from transformers import DynamicCache

        return DynamicCache(config=config)

    def checked(self, tokens: Tensor) -> Tensor:
        """The ids on the model's device, if the model can be run on them now. All of them are
        attended to: nothing is padding."""
        require_full_precision(self.device, self.name)
        training = training_module(self.model)
        got = f"training mode ({training})"
        expected, instead = "evaluation mode", "model.eval()"
        require(not training, self.name, expected=expected, got=got, instead=instead)
        ids = isinstance(tokens, Tensor) and tokens.dim() == 2 and not tokens.is_floating_point()
        expected = "integer ids [batch position]"
        got, instead = describe(tokens), "tl_geometry.windows(...)"
        require(ids and tokens.numel() > 0, "tokens", expected=expected, got=got, instead=instead)
        length = tokens.shape[1]
        expected = f"at most {self.n_ctx} positions (n_ctx of {self.name})"
        instead = "shorter windows"
        require(length <= self.n_ctx, "tokens", expected=expected, got=length, instead=instead)
        low, high = (int(v) for v in tokens.aminmax())
        expected = f"ids from 0 to {self.d_vocab - 1} (the vocabulary of {self.name})"
        got, instead = f"ids from {low} to {high}", "this model's tokenizer"
        fits = low >= 0 and high < self.d_vocab
        require(fits, "tokens", expected=expected, got=got, instead=instead)
        return tokens.to(self.device, torch.int64)

    def _forward(self, ids: Tensor, logits: bool) -> Tensor | None:
        """Call the model; the logits, where they are asked for."""
        kwargs, tokenizer = self.kwargs, getattr(self.model, "tokenizer", None)
        hooked = self.class_name == "HookedTransformer"
        if hooked and getattr(tokenizer, "padding_side", None) == "left":
            # else it masks ids equal to the pad token, and windows have no padding
            kwargs = kwargs | {"attention_mask": torch.ones_like(ids)}
        out = self.model(ids, return_type="logits" if logits else None, **kwargs)
        return out if logits else None

    def _add(self, name: str, call: Hook, fired: set[str]) -> tuple[Any, Any]:
        """Add a hook that notes its name in ``fired``; its point and its handle."""

        def wrapped(value: Tensor, hook: Any) -> Tensor | None:
            fired.add(name)
            return call(value)

        return self.points[name], put_on(self.points[name], wrapped)

    def _last_state(self, hooks: Mapping[str, Hook], logits: bool) -> int | None:
        """The state after which nothing is needed, ``None`` to run to the end."""
        deepest = max((self._state_of(name) for name in hooks), default=0)
        return None if logits or deepest >= len(self.state_hooks) else deepest

    def _state_of(self, name: str) -> int:
        """The first state that is complete once this hook has fired; beyond the last for hooks of
        the output head."""
        if name in self.state_hooks:
            return self.state_hooks.index(name)
        if name.startswith("blocks."):
            return int(name.split(".")[1]) + 1
        of_head = name.startswith(("ln_final", "unembed", "hook_unembed", "mlm_head"))
        return len(self.state_hooks) if of_head else 0


def require_points(
    points: Mapping[str, Any], names: Iterable[str], model_name: str, class_name: str
) -> None:
    """Raise ``UnsupportedModelError`` for hooks that a model does not have."""
    missing = [name for name in names if name not in points]
    what, expected = f"hooks of {model_name}", f"hooks of this {class_name}"
    got, instead = f"no {', '.join(missing)}", "check_model(model) to see what is supported"
    options = {"instead": instead, "error": UnsupportedModelError}
    require(not missing, what, expected=expected, got=got, **options)


def put_on(point: Any, hook: Callable[..., Any], **options: Any) -> Any:
    """Add a hook to a hook point and give its handle."""
    point.add_hook(hook, **options)
    return point.fwd_hooks[-1]


def take_away(point: Any, handle: Any) -> None:
    """Remove one hook of a hook point, and leave those of others in their order."""
    handle.hook.remove()
    with suppress(ValueError):  # reset_hooks() may have taken it
        point.fwd_hooks.remove(handle)


def _stop(value: Tensor) -> None:
    raise Stop


def collect(run: Callable[..., Any], tokens: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Activations of one forward pass by hook name, detached."""
    activations: dict[str, Tensor] = {}
    run(tokens, {name: keep(activations, name) for name in names})
    return activations


# ---- the state of model and machine


def training_module(model: Any) -> str:
    """A module in training mode by name, or an empty string: dropout, layerdrop and router jitter
    act there. HookedTransformer is loaded in training mode and has none of these."""
    original = getattr(model, "original_model", None)
    # a bridge shows its own modules, not all of those that it wraps
    roots = [model] if original is None else [original, model]
    modules = ((n, m) for root in roots for n, m in root.named_modules() if m.training)
    if original is None:
        modules = ((n, m) for n, m in modules if isinstance(m, _DropoutNd) and m.p)
    return next((n or type(m).__name__ for n, m in modules), "")


def require_full_precision(device: torch.device, name: str) -> None:
    """Raise under ``torch.autocast``, and where float32 matrices are multiplied in TF32 or
    bfloat16: numbers would be rounded to 11 or 8 bits, and labelled with the model's dtype."""
    types = [t for t in dict.fromkeys((device.type, "cpu")) if torch.is_autocast_enabled(t)]
    got = f"autocast on {', '.join(types)}"
    instead = "the model without autocast, or one that was loaded with dtype=torch.bfloat16"
    require(not types, name, expected="no torch.autocast", got=got, instead=instead)
    precision = _product_precision(device)
    instead = 'torch.set_float32_matmul_precision("highest")'
    expected = "float32 products in float32"
    require(not precision, name, expected=expected, got=precision, instead=instead)


def _product_precision(device: torch.device) -> str:
    """In what float32 products are rounded, an empty string for float32 itself."""
    if device.type != "cuda":
        # "medium" lets a CPU multiply in bfloat16
        return "bfloat16" if torch.get_float32_matmul_precision() == "medium" else ""
    matmul = torch.backends.cuda.matmul
    # the older switch, the only one before torch 2.9, cannot be read once the newer one was used
    if hasattr(matmul, "fp32_precision"):
        return "TF32, of 11 bits" if matmul.fp32_precision == "tf32" else ""
    return "TF32, of 11 bits" if matmul.allow_tf32 else ""


# ---- hooks of the user


def _foreign(hook: Any) -> bool:
    """Whether a hook is a user's: defined outside of the modules in :data:`OWN`."""
    # the function inside: a partial object belongs to functools
    while isinstance(hook, partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    home = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{home}.".startswith(OWN)


def _foreign_handles(point: Any) -> list[Any]:
    return [handle for handle in getattr(point, "fwd_hooks", ()) if _foreign(handle.user_hook)]


def hooked_points(model: Any) -> tuple[str, ...]:
    """Hook points at which a user's hooks act, by the names that HookedTransformer gives them."""
    # a point has several names in a bridge: the last one, TransformerLens's alias, stays
    names = {id(point): name for name, point in model.hook_dict.items() if _foreign_handles(point)}
    return tuple(sorted(names.values()))


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """The model as it is by itself: a user's hooks do nothing inside ``with``, also on
    exceptions."""
    silenced = []
    for point in {id(point): point for point in model.hook_dict.values()}.values():
        table, ids = point._forward_hooks, [h.hook.id for h in _foreign_handles(point)]
        if ids:
            silenced.append((table, dict(table)))
            for i in ids:
                table.pop(i, None)
    try:
        yield
    finally:
        for table, before in silenced:
            table.clear()
            table.update(before)


def brief(names: Sequence[str], most: int = 4) -> str:
    """A list of names (of hooks, weights) for a reader: the first ones, and how many more.

    >>> brief(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
