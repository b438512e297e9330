"""What must a call leave as it was? :class:`Guard` compares a model, its hooks, the caller's
tensors and the global generators of torch and numpy before and after. (Python's own is no matter of
the library: beartype's checks draw from it.)"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.lib.worlds import World


class Guard:
    """``with Guard(world) as guard: ...``, then ``guard.disturbed`` names what changed."""

    disturbed: tuple[str, ...] = ()

    def __init__(self, world: World) -> None:
        self.world = world

    def __enter__(self) -> Guard:
        self.before = state_of(self.world)
        return self

    def __exit__(self, *error: object) -> None:
        after = state_of(self.world)
        keys = sorted(self.before.keys() | after.keys())
        self.disturbed = tuple(k for k in keys if not same(self.before.get(k), after.get(k)))


def same(a: Any, b: Any) -> bool:
    """Whether two such values are equal."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


@cache
def _parts(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, Tensor]]:
    """Modules, parameters and buffers, looked up once: to list them takes longer than all else."""
    tensors = dict(model.named_parameters())
    # TransformerLens grows the mask and the bias of ALiBi with the length of a prompt
    tensors |= {n: b for n, b in model.named_buffers() if not n.endswith(("mask", "alibi"))}
    return dict(model.named_modules()), tensors


def state_of(world: World) -> dict[str, Any]:
    """What is to stay, by name."""
    model = world.model
    modules, tensors = _parts(model)
    found = {f"input {name}": tensor.clone() for name, tensor in world.inputs.tensors().items()}
    found |= {f"weights {name}": _digest(value) for name, value in tensors.items()}
    found |= {f"hooks of {name}": _hooks(module) for name, module in modules.items()}
    parameters = [value for value in tensors.values() if isinstance(value, nn.Parameter)]
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 (it is the global one)
    found |= {
        "gradients": [p.grad is None for p in parameters],
        "requires_grad": [p.requires_grad for p in parameters],
        "training": [module.training for module in modules.values()],
        "torch's generator": torch.random.get_rng_state(),
        "numpy's generator": numpy_state[1].tobytes(),
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "TF32": (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warning filters": len(warnings.filters),
        "switches of the model": _switches(model),
    }
    return found


def _digest(value: Tensor) -> tuple[float, float]:
    """Two sums: cheap, and equal where nothing was written."""
    flat = value.detach().double().flatten()
    weights = torch.arange(len(flat), dtype=torch.float64).remainder_(97).add_(1)
    return float(flat.sum()), float(flat @ weights.to(flat.device))


def _hooks(module: nn.Module) -> int:
    return sum(map(len, (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)))


def _switches(model: Any) -> list[Any]:
    """Settings of TransformerLens that a function may turn on for a pass."""
    names = ("use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in")
    return [getattr(model.cfg, name, None) for name in names]
