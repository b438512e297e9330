"""One pass of a model of any TransformerLens class with hooks. Each must fire, each is removed by
its own handle, also on exceptions, and nothing is computed after what was asked for.

TransformerLens removes hooks by level or all at once, and its bridges call a hook under its
canonical name. Here each hook is closed over the name that was asked for. Where nothing after some
state is needed, a hook at that state ends the pass by a private exception (:class:`Stop`), because
``stop_at_layer`` means different things at the last layer of different classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from tl_geometry.base.checks import describe, holds_integers
from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.models.parameters import modules_of, part

Hook = Callable[[Tensor], Tensor | None]
"""Called with an activation; a tensor returned takes its place, ``None`` leaves it."""
NOTHING: Mapping[str, Any] = MappingProxyType({})
TABLES = ("attn.hook_cos", "attn.hook_sin")
"""Rotary hooks of a block; silent where a layer without rotation stands beside rotated ones."""
OWN = ("transformer_lens.", "tl_geometry.models.runner")
"""Beginnings of the names of Python modules whose hooks are not a user's: they belong to a model,
or to the pass that asks."""


def keep(into: dict[Any, Tensor], key: Any) -> Hook:
    """A hook that keeps an activation, detached (the first one, where the hook fires several
    times)."""

    def hook(value: Tensor) -> None:
        into.setdefault(key, value.detach())

    return hook


class Stop(Exception):
    """Raised by the last hook once everything that was asked for has been seen."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Runner:
    """Runs one model: the base of :class:`~tl_geometry.models.model_view.ModelView`.

    ``state_hooks[s]`` is the hook of state s.
    """

    name: str
    class_name: str
    state_hooks: tuple[str, ...]
    _model: Any

    @cached_property
    def _points(self) -> Mapping[str, Any]:
        """The hook points by name."""
        return self._model.hook_dict

    def run(
        self,
        tokens: Tensor,
        hooks: Mapping[str, Hook] = NOTHING,
        *,
        logits: bool = False,
        forward: Mapping[str, Any] = NOTHING,
        optional: tuple[str, ...] = (),
    ) -> Tensor | None:
        """Run the model once over ``tokens [batch position]`` in evaluation mode without gradients.

        ``hooks`` maps hook names (``state_hooks`` and the like) to functions of the activation.
        With ``logits`` the logits are returned, otherwise ``None``, and the pass ends at the last
        state that is hooked. Hooks are removed afterwards, also on exceptions; a hook that did not
        fire is an error, unless its name has one of the ``optional`` ends. ``forward`` are further
        arguments of the model's forward().
        """
        ids, last = self.checked(tokens), self._last_state(hooks, logits)
        adding = [*hooks.items(), *([] if last is None else [(self.state_hooks[last], _stop)])]
        require_points(self._points, dict(adding), self)
        fired: set[str] = set()
        handles = [(self._points[name], self._add(name, hook, fired)) for name, hook in adding]
        try:
            with torch.no_grad():
                out = self._forward(ids, logits, forward)
        except Stop:
            out = None
        except ReferenceError:  # bridges hold on to the model that they were copied from
            expected, got = "a whole model", "a copy of a TransformerBridge that is gone"
            fail(self.name, expected=expected, got=got, instead="tl_geometry.load(hf_model)")
        finally:
            for point, handle in handles:
                take_away(point, handle)
        unseen, expected = set(hooks) - fired, "each to fire in a forward pass"
        silent = sorted(name for name in unseen if not name.endswith(optional))
        what, got = f"hooks of {self.name}", f"silent: {', '.join(silent)}"
        instead, kind = "another TransformerLens class for this model", UnsupportedModelError
        require(not silent, what, expected=expected, got=got, instead=instead, error=kind)
        return out

    def activations(
        self, tokens: Tensor, hooks: Iterable[str], optional: tuple[str, ...] = ()
    ) -> dict[str, Tensor]:
        """Activations of one forward pass by hook name, detached."""
        held: dict[str, Tensor] = {}
        self.run(tokens, {name: keep(held, name) for name in hooks}, optional=optional)
        return held

    def checked(self, tokens: Tensor) -> Tensor:
        """The ids on the model's device, if the model can be run on them now. All of them are
        attended to: nothing is padding."""
        cfg, device = self._model.cfg, next(iter(self._model.parameters())).device
        require_full_precision(device, self.name)
        training = training_module(self._model)
        got, instead = f"training mode ({training})", "model.eval()"
        require(not training, self.name, expected="evaluation mode", got=got, instead=instead)
        ids = isinstance(tokens, Tensor) and tokens.dim() == 2 and holds_integers(tokens)
        expected, instead = "integer ids [batch position]", "tl_geometry.windows(...)"
        fits = ids and tokens.numel() > 0
        require(fits, "tokens", expected=expected, got=describe(tokens), instead=instead)
        low, high = (int(v) for v in tokens.aminmax())
        fits = tokens.shape[1] <= cfg.n_ctx and low >= 0 and high < cfg.d_vocab
        expected, got = f"at most {cfg.n_ctx} ids below {cfg.d_vocab}", describe(tokens)
        got, instead = f"{got}, from {low} to {high}", f"shorter windows, of {self.name}"
        require(fits, "tokens", expected=expected, got=got, instead=instead)
        return tokens.to(device, torch.int64)

    def require_gradients(self) -> None:
        """Raise where autograd cannot follow a pass: inside of ``torch.inference_mode``, and for a
        model that was made inside of it."""
        made = any(weight.is_inference() for weight in self._model.parameters())
        got, instead = "those of torch.inference_mode", "torch.no_grad() in its place"
        fits = not made and not torch.is_inference_mode_enabled()
        what = f"gradients of {self.name}"
        require(fits, what, expected="tensors of autograd", got=got, instead=instead)

    def _forward(self, ids: Tensor, logits: bool, forward: Mapping[str, Any]) -> Tensor | None:
        """Call the model; the logits, where they are asked for."""
        original, tokenizer = (part(self._model, n) for n in ("original_model", "tokenizer"))
        given: dict[str, Any] = {}
        if original is not None and "use_cache" in inspect.signature(original.forward).parameters:
            given["use_cache"] = False  # else transformers keeps the keys and values of every layer
        if original is None and part(tokenizer, "padding_side") == "left":
            # else HookedTransformer masks ids equal to the pad token, and windows have no padding
            given["attention_mask"] = torch.ones_like(ids)
        out = self._model(ids, return_type="logits" if logits else None, **{**given, **forward})
        return out if logits else None

    def _add(self, name: str, call: Hook, fired: set[str]) -> Any:
        """Add a hook that notes its name in ``fired``; its handle."""

        def wrapped(value: Tensor, hook: Any) -> Tensor | None:
            fired.add(name)
            return call(value)

        return put_on(self._points[name], wrapped)

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


def require_points(points: Container[str], names: Iterable[str], model: Any) -> None:
    """Raise ``UnsupportedModelError`` for hooks that a model (a view or runner of it) has not."""
    missing, what = ", ".join(n for n in names if n not in points), f"hooks of {model.name}"
    expected, got = f"hooks of this {model.class_name}", f"no {missing}"
    require(not missing, what, expected=expected, got=got, error=UnsupportedModelError)


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


# ---- the state of model and machine


def training_module(model: Any) -> str:
    """A module in training mode by name, or an empty string: dropout, layerdrop and router jitter
    act there. HookedTransformer is loaded in training mode and has none of these."""
    modules = [(n, m) for n, m in [("", model), *modules_of(model)] if m.training]
    if not hasattr(model, "original_model"):
        modules = [(n, m) for n, m in modules if isinstance(m, _DropoutNd) and m.p]
    return next((n.rstrip(".") or type(m).__name__ for n, m in modules), "")


def require_full_precision(device: torch.device, name: str) -> None:
    """Raise under ``torch.autocast``, and where float32 matrices are multiplied in TF32 or
    bfloat16: numbers would be rounded to 11 or 8 bits, and labelled with the model's dtype."""
    got = "autocast" if any(map(torch.is_autocast_enabled, {device.type, "cpu"})) else ""
    matmul = torch.backends.cuda.matmul
    if device.type != "cuda" and torch.get_float32_matmul_precision() == "medium":
        got = "bfloat16"  # lets a CPU multiply so
    elif device.type == "cuda":
        # the older switch, the only one before torch 2.9, cannot be read once the newer was used
        tf32 = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else None
        got = "TF32" if (matmul.allow_tf32 if tf32 is None else tf32) else got
    instead = 'torch.set_float32_matmul_precision("highest"), without autocast'
    require(not got, name, expected="products in the dtype of the model", got=got, instead=instead)


# ---- hooks of the user


def _user_handles(point: Any) -> list[Any]:
    """Handles of the hooks of a point that are a user's: defined outside of :data:`OWN`."""

    def home(hook: Any) -> str:
        # the function inside: a partial object belongs to functools
        return str(getattr(getattr(hook, "func", hook), "__module__", ""))

    handles = getattr(point, "fwd_hooks", ())
    return [handle for handle in handles if not home(handle.user_hook).startswith(OWN)]


def hooked_points(model: Any) -> tuple[str, ...]:
    """Hook points at which a user's hooks act, by the names that HookedTransformer gives them."""
    # a point has several names in a bridge: the last one, TransformerLens's alias, stays
    names = {id(point): name for name, point in model.hook_dict.items() if _user_handles(point)}
    return tuple(sorted(names.values()))


@contextmanager
def without_hooks(model: Any) -> Iterator[None]:
    """The model as it is by itself: a user's hooks do nothing inside ``with``, also on
    exceptions."""
    points = {id(point): point for point in model.hook_dict.values()}.values()
    hooked = {point: dict(point._forward_hooks) for point in points if _user_handles(point)}
    for point in hooked:
        for handle in _user_handles(point):
            point._forward_hooks.pop(handle.hook.id, None)
    try:
        yield
    finally:
        for point, before in hooked.items():
            point._forward_hooks.clear()
            point._forward_hooks.update(before)


def brief(names: Sequence[str], most: int = 4) -> str:
    """A list of names (of hooks, weights) for a reader: the first ones, and how many more.

    >>> brief(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
