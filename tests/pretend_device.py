"""A device that is none: tensors on the CPU that say ``pretend:0`` (or ``pretend:1``) and refuse to
be mixed with others, as those of an accelerator do.

=========================================== ========================================================
``python -m tests.pretend_device``          measures how often each public function waits for its
                                            device, and writes the table of ``CONTRIBUTING.md``
``... waits sweep_heads composition``       prints the rows of some functions
``python -m tests.pretend_device moved``    looks at a model, moves it, and runs what takes a model
``python -m tests.pretend_device llama``    runs every call of :mod:`tests.device_calls` on a model,
                                            on the same one moved, with tokens here and there, and
                                            prints whether they agree
``python -m tests.pretend_device split``    the same on a model split over two devices
=========================================== ========================================================

torch keeps a registered device for good, so that this needs a process of its own.

A split model is one that its own forward pass expects: HookedTransformer sends the stream to the
device of each block's number. A bridge leaves its split to accelerate, and asks for CUDA by name.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

CPU = torch.device("cpu")
ATEN = torch.ops.aten
PACKAGE = str(Path(__file__).parents[1] / "tl_geometry") + "/"
GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"
HELPERS = tuple(PACKAGE + name for name in ("base/transfer.py", "base/sums.py"))
"""Modules that copy for others, who are named in their place."""
WAITS: Counter[str] = Counter()
"""How often a function of the library waited for the device, by its file and name."""
COPIES: Counter[str] = Counter()
"""How often one copied to the device what it then has to wait for."""
WAITING = (
    *(ATEN._local_scalar_dense.default, ATEN.is_nonzero.default, ATEN.nonzero.default),
    *(ATEN.masked_select.default, ATEN.equal.default, ATEN._unique2.default),
    *(ATEN.unique_dim.default, ATEN.bincount.default, ATEN.repeat_interleave.Tensor),
)
"""Operations whose result, or its shape, is needed on the CPU."""


@cache
def _device(number: int) -> torch.device:
    return torch.device("pretend", number)


class Pretend(Tensor):
    """A tensor on a pretended device, and the one on the CPU behind it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    held: Tensor
    number: int

    @staticmethod
    def __new__(cls, held: Tensor, number: int = 0) -> Pretend:
        out = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=_device(number),
        )
        out.held, out.number = held, number
        return out

    def tolist(self) -> Any:
        _count(WAITS)
        return self.held.tolist()

    def new_tensor(self, data: Any, **options: Any) -> Pretend:  # pyright: ignore
        wanted: dict[str, Any] = {"dtype": self.dtype} | options
        _count(COPIES)
        return Pretend(torch.tensor(data, **wanted), self.number)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return call(func, args, kwargs or {})


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """An argument or result of an operation with every tensor changed: one, or a list of them, and
    no deeper (torch's trees of any depth took half of the time)."""
    return type(x)(map(change, x)) if isinstance(x, list | tuple) else change(x)


def _real(x: Any) -> Any:
    return x.held if isinstance(x, Pretend) else x


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for x in arguments:
        for each in x if isinstance(x, list | tuple) else (x,):
            if isinstance(each, Tensor):
                yield each


def _count(events: Counter[str]) -> None:
    """Count a wait or a copy for the function of the library that caused it; those of the model are
    not ours."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "transformer" in name and "site-packages" in name:
            return
        if name.startswith(PACKAGE) and not name.startswith(HELPERS):
            function = frame.f_code.co_qualname.replace(".<locals>", "").replace(".<listcomp>", "")
            events[f"{name.removeprefix(PACKAGE)}: {function}"] += 1
            return
        frame = frame.f_back


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation: on the pretended device where its tensors are, and refused where they are on
    several. Numbers (tensors without axes) and copies may cross."""
    given = list(_tensors((*args, *kwargs.values())))
    there = [x for x in given if isinstance(x, Pretend)]
    wanted = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    home = func is ATEN._to_copy.default and wanted == CPU
    home |= func is ATEN.copy_.default and not isinstance(args[0], Pretend)
    if there and (func in WAITING or home or _by_mask(func, args)):
        _count(WAITS)
    moved = wanted is not None and wanted.type == "pretend"
    copies = func in (ATEN._to_copy.default, ATEN.copy_.default)
    from_here = [x for x in given if not isinstance(x, Pretend) and x.dim() > 0]
    target = moved if func is ATEN._to_copy.default else isinstance(args[0] if args else 0, Pretend)
    if from_here and target and (copies or func in INDEXED):
        _count(COPIES)
    kwargs = kwargs | ({"device": CPU} if moved else {})
    here = [_each(_real, x) for x in args]
    named = {name: _each(_real, x) for name, x in kwargs.items()}
    if func is ATEN.copy_.default:
        func(*here, **named)
        return args[0]
    out_there = moved if wanted is not None else bool(there)
    # indices may come from the CPU, values may not
    values = [args[0], *args[2:3]] if func in INDEXED else given
    wide = [x for x in values if isinstance(x, Tensor) and x.dim() > 0]
    places = dict.fromkeys(str(x.device) for x in wide)
    if not copies and there and (len(places) > 1 or not all(isinstance(x, Pretend) for x in wide)):
        raise RuntimeError(f"{func}: tensors on {' and '.join(places)}")
    out = func(*here, **named)
    if not out_there:
        return out
    number = (wanted.index or 0) if moved and wanted is not None else _number(wide, there)
    known = {id(x.held): x for x in there}  # in-place operations give back what they were given

    def wrap(x: Any) -> Any:
        return known.get(id(x), Pretend(x, number)) if isinstance(x, Tensor) else x

    return _each(wrap, out)


INDEXED = (ATEN.index.Tensor, ATEN.index_put_.default)
"""Operations that take a list of indices."""


def _number(wide: Iterable[Tensor], there: Iterable[Pretend]) -> int:
    """The device of a result: that of the tensors with axes, if there are any."""
    return next((x.number for x in (*wide, *there) if isinstance(x, Pretend)), 0)


def _by_mask(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a tensor is indexed by a mask, whose sum is needed on the CPU."""
    return func in INDEXED and any(x is not None and x.dtype == torch.bool for x in args[1])


def register() -> None:
    """Make the device known to torch."""
    _setup_privateuseone_for_python_backend("pretend")
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda op, *args, **kwargs: call(op, args, kwargs), "PrivateUse1")
    globals()["_library"] = library  # it goes with its last reference
    get, put = Tensor.__getitem__, Tensor.__setitem__

    def as_tensors(at: Any, number: int) -> Any:  # torch's own conversion of lists asks the device
        if isinstance(at, tuple):
            return tuple(as_tensors(each, number) for each in at)
        if not isinstance(at, list | range):
            return at
        _count(COPIES)
        return Pretend(torch.tensor(list(at)), number)

    Pretend.__getitem__ = lambda x, at: get(x, as_tensors(at, x.number))  # pyright: ignore
    Pretend.__setitem__ = lambda x, at, to: put(x, as_tensors(at, x.number), to)  # pyright: ignore

    # torch makes these by resizing an empty tensor, which a wrapper cannot follow
    for name in ("eye", "tensor", "as_tensor"):
        setattr(torch, name, _made_here(getattr(torch, name)))


def _made_here(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A factory whose tensors are made on the CPU and moved."""

    def made(*given: Any, device: Any = None, **named: Any) -> Tensor:
        out = make(*given, **named)
        return out if device is None else out.to(device)

    return made


def move(model: nn.Module, number: Callable[[str], int] = lambda name: 0) -> None:
    """All parameters and buffers to the device of this number (of their names), shared ones
    once."""
    known: dict[int, Tensor] = {}

    def there(x: Tensor, to: int) -> Tensor:
        moved = Pretend(x.detach(), to)
        own = nn.Parameter(moved, requires_grad=False) if isinstance(x, nn.Parameter) else moved
        return known.setdefault(id(x), own)

    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for name, x in list(table.items()):
                if x is not None and not isinstance(x.data, Pretend):
                    table[name] = there(x, number(f"{path}.{name}"))  # pyright: ignore
        cfg: Any = getattr(module, "cfg", None)
        if hasattr(cfg, "device"):
            cfg.device = torch.device("pretend:0")


def split(model: Any) -> None:
    """A HookedTransformer over two devices, each block where its forward pass sends the stream."""
    last, n_layers = 1, model.cfg.n_layers

    def number(name: str) -> int:
        block = re.match(r"blocks\.(\d+)\.", name)
        if block is not None:
            return 2 * int(block[1]) // n_layers
        return last if name.startswith(("ln_final", "unembed")) else 0

    move(model, number)
    model.cfg.n_devices = 2


def together() -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of many types and sizes, and the same ones from two devices, in one copy of each."""
    from tl_geometry.base.transfer import LARGE, on_cpu

    here = [torch.arange(5.0), torch.tensor(True), torch.ones(2, 3).double() / 3, torch.zeros(0)]
    here += [torch.arange(6).view(2, 3).T, torch.rand(3).half(), torch.ones(LARGE)]
    found = on_cpu([Pretend(x, i % 2) for i, x in enumerate(here)])
    return here, found


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
    say("together" if all(map(torch.equal, *together())) else "torn")
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
        "truncated": lambda: tlg.flow.truncation_kl(
            model, rows, tlg.trajectories(model, rows, progress=False), K=(2,), progress=False
        ),
    }
    for name, step in steps.items():
        step()
        say(name)
    with tlg.interventions.remove_term(model, basis, "pos-cvec", "L1H0"):
        tlg.view(model).logits(rows[:2])
    say("removed")


def made(what: str, **changes: Any) -> Any:
    """A small model on the CPU: an architecture of :mod:`tests.tiny`, or ``"split"``, a GPT-2 of
    four blocks as a HookedTransformer."""
    from tests.tiny import hf_model
    from tl_geometry.models import from_hf

    if what == "split":
        gpt2 = hf_model("gpt2", n_layer=4)
        return from_hf(gpt2, None, model_class="hooked", name="tiny")
    return from_hf(hf_model(what, **changes), None, name="tiny")


def compared(what: str, *names: str) -> None:
    """Every call (or those of some names) on a model, and on another of the same weights on the
    device: whether all give the same."""
    from tests.device_calls import verdicts

    here, there = made(what), made(what)
    (split if what == "split" else move)(there)
    place: Callable[[Tensor], Tensor] = lambda ids: Pretend(ids)
    for name, verdict in verdicts(here, there, place, *names, rotary=what == "llama"):
        sys.stdout.write(f"{name}: {verdict}\n")


SIZES = ((2, 2), (2, 4), (4, 2), (4, 4))
"""Layers and batches of the runs that the table is made from."""


def counted(
    events: Counter[str], names: Sequence[str] = ()
) -> dict[str, tuple[dict[str, float], ...]]:
    """By name of a call (all by default), its waits (or copies) for each batch, for each layer, and
    for each layer of each batch, by function of the library: differences between models of two and
    four layers over two and four batches."""
    from tests.device_calls import CONTEXTS, STREAMED, calls

    runs: dict[str, dict[tuple[int, int], Counter[str]]] = {}
    for layers, batches in SIZES:
        model = made("llama", num_hidden_layers=layers)
        move(model)
        of_model = calls(model.cfg.d_vocab, rotary=True, batch=CONTEXTS // batches)
        # what is inferred once for a model and a length is inferred
        for name in ("check_model", "split_writers", "sweep_heads"):
            of_model[name](model)
        for name in names or [name for name in of_model if name != "planted"]:
            if name in STREAMED or batches == 2:
                run = of_model[name]
                events.clear()
                run(model)
                runs.setdefault(name, {})[layers, batches] = Counter(events)
    return {name: _slopes(of_sizes) for name, of_sizes in runs.items()}


def _slopes(runs: dict[tuple[int, int], Counter[str]]) -> tuple[dict[str, float], ...]:
    """Per batch, per layer, and per layer of each batch."""
    names = sorted({name for events in runs.values() for name in events})
    batch, layer, both = {}, {}, {}
    for name in names:
        few, more = (runs[layers, 2][name] for layers in (2, 4))
        layer[name] = (more - few) / 2
        if (2, 4) in runs:
            long_few, long_more = (runs[layers, 4][name] for layers in (2, 4))
            both[name] = (long_more - more - long_few + few) / 4
            batch[name] = (long_few - few) / 2 - 2 * both[name]
            layer[name] -= 2 * both[name]
    return batch, layer, both


def rows(names: Sequence[str] = ()) -> list[str]:
    """The table of waits, a row for each call (all by default), as Markdown."""
    head = ["public function", "waits: each batch", "each layer", "each layer and batch"]
    lines = ["| " + " | ".join([*head, "where"]) + " |", "|---|---|---|---|---|"]
    for name, (batch, layer, both) in counted(WAITS, names).items():
        numbers = [f"{sum(of.values()):g}" if of else "" for of in (batch, layer, both)]
        sizes = {k: batch.get(k, 0) + layer[k] + both.get(k, 0) for k in layer}
        most = sorted((k for k in sizes if sizes[k] > 0), key=lambda k: -sizes[k])[:3]
        lines.append(f"| {name} | {' | '.join(numbers)} | {', '.join(f'`{k}`' for k in most)} |")
    return lines


BEGIN, END = "<!-- waits -->", "<!-- /waits -->"


def write_table() -> None:
    """Write the table into the guide."""
    text = GUIDE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(rows())
    GUIDE.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")
    sys.stdout.write(table + "\n")


def main(what: str = "", *names: str) -> None:
    """What the command line asks for."""
    register()
    # a wrapped tensor cannot be an inference tensor
    torch.inference_mode = torch.no_grad  # pyright: ignore
    commands: dict[str, Callable[[], Any]] = {"": write_table, "moved": moved_after_a_look}
    commands["waits"] = lambda: sys.stdout.write("\n".join(rows(names)) + "\n")
    commands.get(what, lambda: compared(what, *names))()


if __name__ == "__main__":
    main(*sys.argv[1:])
