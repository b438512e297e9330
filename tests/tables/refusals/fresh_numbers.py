"""What public bug reports and fresh inputs found: numbers as people have them (kind 15), and the
default dtype and device of torch (of kind 27). See :mod:`tests.tables.refusals.fresh`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import tl_geometry as tlg
from tests.tables.refusals.fresh import QUIET
from tests.tables.refusals.row import Row, Scene
from tl_geometry import interventions

# ---- 15. numbers as people have them


NUMBERS: dict[str, tuple[Callable[[Scene, Any], Any], str]] = {
    "trace_logit target": (lambda s, n: tlg.trace_logit(s.model, s.ids[:1, :6], n), "answer"),
    "trace_logit position": (
        lambda s, n: tlg.trace_logit(s.model, s.ids[:1, :6], 5, position=n),
        "position",
    ),
    "split_scores layers": (
        lambda s, n: tlg.split_scores(s.model, s.ids, s.w.basis, layers=n),
        "layers",
    ),
    "split_scores head": (
        lambda s, n: tlg.split_scores(s.model, s.ids, s.w.basis, heads=[(1, n)]),
        "head",
    ),
    "edge_scores targets": (
        lambda s, n: tlg.edge_scores(
            s.model, s.ids[:, :6], counterfactual=s.w.other[:, :6], answer=(n, 9), method="gradient"
        ),
        "answer",
    ),
    "decompose states": (lambda s, n: tlg.decompose(s.model, s.ids, states=[n], **QUIET), "state"),
    "decompose batch_size": (
        lambda s, n: tlg.decompose(s.model, s.ids, batch_size=n, **QUIET),
        "batch_size",
    ),
    "decompose groups": (lambda s, n: tlg.decompose(s.model, s.ids, groups=n, **QUIET), "groups"),
    "windows length": (
        lambda s, n: tlg.windows(s.model, "x = y + z\n" * 40, n, prepend_bos=True),
        "length",
    ),
    "windows n": (
        lambda s, n: tlg.windows(s.model, "x = y + z\n" * 40, 6, n=n, prepend_bos=True),
        "^n$",
    ),
    "top n": (lambda s, n: s.w.sweep.top("induction", n), "^n$"),
    "token_readout k": (lambda s, n: tlg.token_readout(s.model, heads="L1H0", k=n), "^k$"),
    "faithfulness draws": (
        lambda s, n: tlg.faithfulness(
            s.model,
            s.ids[:, :6],
            "L1H0",
            counterfactual=s.w.other[:, :6],
            answer=(5, 9),
            draws=n,
        ),
        "draws",
    ),
    "composition draws": (
        lambda s, n: tlg.composition(s.model, s.ids, heads="L1H0", draws=n, **QUIET),
        "draws",
    ),
    "composition drop": (
        lambda s, n: tlg.composition(s.model, s.ids, heads="L1H0", draws=2, drop=n, **QUIET),
        "drop",
    ),
    "heads seed": (
        lambda s, n: s.logits(interventions.heads(s.model, "L1H0", by="prompt", seed=n)),
        "seed",
    ),
}
TAKEN = {"numpy": np.int64(2), "a tensor": torch.tensor(2)}
REFUSED = {"true": True, "a float": 2.0, "a string": "2"}
"""A string as a target is a text of one token, which has its own rows."""


def _numbers() -> Iterator[Row]:
    for where, (call, what) in NUMBERS.items():
        for kind, number in (TAKEN | REFUSED).items():
            if kind == "a string" and "target" in where:
                continue
            name = f"15 {kind}: {where}"
            yield Row(
                name=name,
                call=lambda s, call=call, number=number: call(s, number),
                what=what if kind in REFUSED else None,
            )


@contextmanager
def default(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    before = torch.get_default_dtype()
    if dtype:
        torch.set_default_dtype(dtype)
    if device:
        torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


CALLS: dict[str, Callable[[Scene], Any]] = {
    "decompose": lambda s: tlg.decompose(s.model, s.ids, **QUIET),
    "split_scores": lambda s: tlg.split_scores(s.model, s.ids, s.w.basis, heads="L1H0"),
    "sweep_heads": lambda s: tlg.sweep_heads(s.model, s.ids, s.w.basis, layers=0, **QUIET),
    "trace_logit": lambda s: tlg.trace_logit(s.model, s.ids[:1, :6], 5),
    "edge_scores": lambda s: tlg.edge_scores(
        s.model, s.ids[:, :6], counterfactual=s.w.other[:, :6], answer=(5, 9), method="gradient"
    ),
    "composition": lambda s: tlg.composition(s.model, s.ids, heads="L1H0", draws=2, **QUIET),
    "trajectories": lambda s: tlg.trajectories(s.model, s.w.pilots, **QUIET),
    "weight_geometry": lambda s: tlg.weight_geometry(s.model, s.w.basis, layers=0, draws=1),
    "token_readout": lambda s: tlg.token_readout(s.model, heads="L1H0"),
    "token_paths": lambda s: tlg.token_paths(s.model, s.ids),
    "knockouts": lambda s: interventions.effects(
        s.model, s.ids, interventions.each(s.model, "L1H0", by="zero")
    ),
}
STATES: dict[str, tuple[dict[str, Any], str | None]] = {
    "float64": ({"dtype": torch.float64}, None),
    "meta": ({"device": "meta"}, "default device"),
}
"""A default dtype acts on nothing; a default device, on which no generator draws, is refused."""


def _defaults() -> Iterator[Row]:
    for state, (settings, what) in STATES.items():
        for function, call in CALLS.items():

            def inside(s: Scene, call: Any = call, settings: Any = settings) -> Any:
                s.w.basis  # noqa: B018 (it is made before)
                with default(**settings):
                    return call(s)

            yield Row(name=f"27 tensors are {state} by default: {function}", call=inside, what=what)


def embedded_dtype(s: Scene) -> torch.dtype:
    with default(dtype=torch.float64):
        return tlg.view(tlg.zoo.embedded()).dtype


ROWS: tuple[Row, ...] = (
    *_numbers(),
    *_defaults(),
    Row(
        name="27 the embedded model under another default",
        call=embedded_dtype,
        holds=lambda s, dtype: dtype == torch.float32,
    ),
)
