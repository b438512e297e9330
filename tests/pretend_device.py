"""A device that is none: tensors on the CPU that say ``pretend:0`` and refuse to be mixed with
others, as those of an accelerator do.

``python -m tests.pretend_device moved`` looks at a model, moves it, and runs what takes a model;
``python -m tests.pretend_device llama`` runs every call of :mod:`tests.device_calls` on a model and
on the same one moved, and prints whether they agree and how often the second waited for its device.
torch keeps a registered device for good, so that this needs a process of its own.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

CPU = torch.device("cpu")
ATEN = torch.ops.aten
PACKAGE = str(Path(__file__).parents[1] / "tl_geometry") + "/"
WAITS: Counter[str] = Counter()
"""How often a line of the library waited for the device, by its file and number."""
WAITING = (
    *(ATEN._local_scalar_dense.default, ATEN.is_nonzero.default, ATEN.nonzero.default),
    *(ATEN.masked_select.default, ATEN.equal.default, ATEN._unique2.default),
    *(ATEN.unique_dim.default, ATEN.bincount.default, ATEN.repeat_interleave.Tensor),
)
"""Operations whose result, or its shape, is needed on the CPU."""


class Pretend(Tensor):
    """A tensor on the pretended device, and the one on the CPU behind it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Pretend:
        out = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("pretend:0"),
        )
        out.held = held
        return out

    def tolist(self) -> Any:
        _wait()
        return self.held.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Pretend:  # pyright: ignore
        wanted: dict[str, Any] = {"dtype": self.dtype} | options
        return Pretend(torch.tensor(data, **wanted))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return call(func, args, kwargs or {})


def _real(x: Any) -> Any:
    return x.held if isinstance(x, Pretend) else x


def _wait() -> None:
    """Count a wait for the line of the library that caused it; those of the model are not ours."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "transformer" in name and "site-packages" in name:
            return
        if name.startswith(PACKAGE):
            WAITS[f"{name.removeprefix(PACKAGE)}:{frame.f_lineno}"] += 1
            return
        frame = frame.f_back


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation: on the pretended device where its tensors are, and refused where they are on
    both. Numbers (tensors without axes) and copies may cross."""
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = [x for x in given if isinstance(x, Pretend)]
    wanted = kwargs.get("device")
    home = func is ATEN._to_copy.default and wanted is not None and torch.device(wanted) == CPU
    home |= func is ATEN.copy_.default and not isinstance(args[0], Pretend)
    if there and (func in WAITING or home or _by_mask(func, args)):
        _wait()
    moved = wanted is not None and torch.device(wanted).type == "pretend"
    kwargs = kwargs | ({"device": CPU} if moved else {})
    here = tree_map(_real, args), tree_map(_real, kwargs)
    if func is ATEN.copy_.default:
        func(*here[0], **here[1])
        return args[0]
    out_there = moved if wanted is not None else bool(there)
    if func is not ATEN._to_copy.default:
        # indices may come from the CPU, values may not
        indexed = func in (ATEN.index.Tensor, ATEN.index_put_.default)
        values = [args[0], *args[2:3]] if indexed else given
        mixed = [x for x in values if isinstance(x, Tensor) and not isinstance(x, Pretend)]
        if there and any(x.dim() > 0 for x in mixed):
            raise RuntimeError(f"{func}: tensors on pretend:0 and cpu")
    out = func(*here[0], **here[1])
    if not out_there:
        return out
    known = {id(x.held): x for x in there}  # in-place operations give back what they were given

    def wrap(x: Any) -> Any:
        return known.get(id(x), Pretend(x)) if isinstance(x, Tensor) else x

    return tree_map(wrap, out)


def _by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a tensor is indexed by a mask, whose sum is needed on the CPU."""
    indexed = func in (ATEN.index.Tensor, ATEN.index_put_.default)
    return indexed and any(x is not None and x.dtype == torch.bool for x in args[1])


def register() -> None:
    """Make the device known to torch."""
    _setup_privateuseone_for_python_backend("pretend")
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: call(op, args, kwargs), "PrivateUse1")
    globals()["_library"] = library  # it goes with its last reference
    get, put = Tensor.__getitem__, Tensor.__setitem__

    def as_tensors(at: Any) -> Any:  # torch's own conversion of lists asks for the device's indices
        if isinstance(at, tuple):
            return tuple(map(as_tensors, at))
        return Pretend(torch.tensor(list(at))) if isinstance(at, list | range) else at

    Pretend.__getitem__ = lambda self, at: get(self, as_tensors(at))  # pyright: ignore
    Pretend.__setitem__ = lambda self, at, value: put(self, as_tensors(at), value)  # pyright: ignore

    # torch makes these by resizing an empty tensor, which a wrapper cannot follow
    for name in ("eye", "tensor", "as_tensor"):
        setattr(torch, name, _made_here(getattr(torch, name)))


def _made_here(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory whose tensors are made on the CPU and moved."""

    def made(*given: Any, device: Any = None, **named: Any) -> Tensor:
        out = make(*given, **named)
        return out if device is None else out.to(device)

    return made


def move(model: nn.Module) -> None:
    """All parameters and buffers to the device, shared ones once."""
    known: dict[int, Tensor] = {}

    def there(x: Tensor) -> Tensor:
        moved = Pretend(x.detach())
        own = nn.Parameter(moved, requires_grad=False) if isinstance(x, nn.Parameter) else moved
        return known.setdefault(id(x), own)

    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, x in list(table.items()):
                if x is not None and not isinstance(x.data, Pretend):
                    table[name] = there(x)  # pyright: ignore
        cfg: Any = getattr(module, "cfg", None)
        if hasattr(cfg, "device"):
            cfg.device = torch.device("pretend:0")


def moved_after_a_look() -> None:
    """Look, move, run."""
    import tl_geometry as tlg
    from tests.tiny import hf_model, tokens
    from tl_geometry.models import from_hf

    say = lambda word: sys.stdout.write(f"{word}\n")
    try:
        _ = Pretend(torch.ones(2)) + torch.ones(2)
    except RuntimeError:
        say("mixed")
    rows = tokens(16, 14, seed=2)
    model = from_hf(hf_model("gpt2"), None, name="moved")
    basis = tlg.decompose(model, rows, progress=False)
    tlg.check_model(model)
    move(model)
    steps: dict[str, Callable[[], Any]] = {
        "weights": lambda: tlg.weight_geometry(model, basis),
        "readout": lambda: tlg.token_readout(model),
        "edges": lambda: tlg.interventions.edge_necessity(
            model, rows[:4], "L0H0", "L1H0", controls=1
        ),
    }
    for name, step in steps.items():
        step()
        say(name)
    with tlg.interventions.remove_term(model, basis, "pos-cvec", "L1H0"):
        tlg.view(model).logits(rows[:2])
    say("removed")


def compared(architecture: str) -> None:
    """Every call on a model and on another of the same weights on the device: whether both give the
    same, and how often the second waited."""
    import tl_geometry as tlg
    from tests.device_calls import calls, numbers_of
    from tests.tiny import hf_model
    from tl_geometry.models import from_hf

    embedded = architecture == "embedded"
    here, there = (
        tlg.zoo.embedded() if embedded else from_hf(hf_model(architecture), None, name="tiny")
        for _ in range(2)
    )
    move(there)
    for name, run in calls(here.cfg.d_vocab, rotary=not embedded).items():
        expected = numbers_of(run(here))
        WAITS.clear()
        found = numbers_of(run(there))
        close = found.shape == expected.shape and torch.allclose(
            found, expected, rtol=1e-3, atol=1e-4, equal_nan=True
        )
        verdict = "same" if len(found) and close else "differs"
        sys.stdout.write(f"{name} {verdict} {WAITS.total()} {WAITS.most_common(3)}\n")


if __name__ == "__main__":
    register()
    # a wrapped tensor cannot be an inference tensor
    torch.inference_mode = torch.no_grad  # pyright: ignore
    moved_after_a_look() if sys.argv[1] == "moved" else compared(sys.argv[1])
