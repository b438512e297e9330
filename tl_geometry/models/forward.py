"""How does a model of any TransformerLens class run once with hooks? Each hook must fire, each is
removed, and nothing is computed after what was asked for. :meth:`tl_geometry.models.ModelView.run`,
layers and probes call :class:`Runner`.

TransformerLens removes hooks by level or all at once, and its bridges call a hook under its
canonical name. Here each hook is closed over the name that was asked for and removed by its own
handle, so that user hooks stay, also on exceptions. Where nothing after some state is needed, a
hook at that state ends the pass by a private exception (:class:`Stop`), because ``stop_at_layer``
means different things at the last layer of different classes. A hook acts in the thread that asked
for it: other threads may run the model meanwhile.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import UnsupportedModelError, fail, require

Hook = Callable[[Tensor], Tensor | None]
"""Called with an activation; a tensor returned takes its place, ``None`` leaves it."""
K = TypeVar("K", bound=Hashable)


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

    def __post_init__(self) -> None:
        self.points: dict[str, Any] = dict(self.model.hook_dict)
        self.bridge = self.class_name == "TransformerBridge"
        self.kwargs: dict[str, Any] = {}
        if self.bridge:
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
        for name in hooks:
            self.has(name)  # points that were added since
        require_points(self.points, hooks, self.name, self.class_name)
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
        training = self.is_training()
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
        require(
            low >= 0 and high < self.d_vocab, "tokens", expected=expected, got=got, instead=instead
        )
        # ids in pinned memory are copied without waiting
        return tokens.to(self.device, torch.int64, non_blocking=True)

    def is_training(self) -> str:
        """The module that acts otherwise because it is in training mode, or an empty string.
        HookedTransformer itself has no dropout."""
        original = self.model.original_model if self.bridge else None
        if original is not None and (self.model.training or original.training):
            return type(original).__name__
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p:
                return f"dropout in {name}"
        return ""

    def _forward(self, ids: Tensor, logits: bool) -> Tensor | None:
        """Call the model; the logits, where they are asked for."""
        kwargs, tokenizer = self.kwargs, getattr(self.model, "tokenizer", None)
        hooked = self.class_name == "HookedTransformer"
        if hooked and getattr(tokenizer, "padding_side", None) == "left":
            # else it masks ids equal to the pad token, and windows have no padding
            kwargs = kwargs | {"attention_mask": torch.ones_like(ids)}
        out = self.model(ids, return_type="logits" if logits else None, **kwargs)
        return out if logits or self.class_name == "HookedEncoder" else None

    def _add(self, name: str, call: Hook, fired: set[str]) -> tuple[Any, Any]:
        """Add a hook for this thread that notes its name in ``fired``; its point and its handle."""
        thread = get_ident()

        def wrapped(value: Tensor, hook: Any) -> Tensor | None:
            if get_ident() != thread:  # another pass of the same model
                return None
            fired.add(name)
            return call(value)

        point = self.points[name]
        return point, put_on(point, wrapped)

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
    require(
        not missing, what, expected=expected, got=got, instead=instead, error=UnsupportedModelError
    )


def put_on(point: Any, hook: Callable[..., Any], **options: Any) -> Any:
    """Add a hook to a hook point and give its handle, also where another thread adds one
    meanwhile."""
    point.add_hook(hook, **options)
    return next(handle for handle in point.fwd_hooks if handle.user_hook is hook)


def take_away(point: Any, handle: Any) -> None:
    """Remove one hook of a hook point, and leave those of others in their order."""
    handle.hook.remove()
    with suppress(ValueError):  # reset_hooks() may have taken it
        point.fwd_hooks.remove(handle)


def require_full_precision(device: torch.device, name: str) -> None:
    """Raise under ``torch.autocast``, and where a GPU multiplies float32 matrices in TF32: numbers
    would be rounded to half precision, or to 11 bits, and labelled with the model's dtype."""
    types = [t for t in dict.fromkeys((device.type, "cpu")) if torch.is_autocast_enabled(t)]
    got = f"autocast on {', '.join(types)}"
    instead = "the model without autocast, or one that was loaded with dtype=torch.bfloat16"
    require(not types, name, expected="no torch.autocast", got=got, instead=instead)
    got, instead = "TF32, of 11 bits", 'torch.set_float32_matmul_precision("highest")'
    exact = not _multiplies_in_tf32(device)
    require(exact, name, expected="float32 products in float32", got=got, instead=instead)


def _multiplies_in_tf32(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    matmul = torch.backends.cuda.matmul
    # the older switch, the only one before torch 2.9, cannot be read once the newer one was used
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32"
    return bool(matmul.allow_tf32)


def _stop(value: Tensor) -> None:
    raise Stop


def collect(run: Callable[..., Any], tokens: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Activations of one forward pass by hook name, detached."""
    activations: dict[str, Tensor] = {}
    run(tokens, {name: keep(activations, name) for name in names})
    return activations
