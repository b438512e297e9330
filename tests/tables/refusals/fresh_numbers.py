"""What public bug reports and fresh inputs found: numbers as people have them (kind 15), and the
default dtype and device of torch (of kind 27). See :mod:`tests.tables.refusals.fresh`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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
    "split_scores head": (
        lambda s, n: tlg.split_scores(s.model, s.ids, s.w.basis, heads=[(1, n)]),
        "head",
    ),
    "edge_scores targets": (lambda s, n: _edges(s)(answer=(n, 9)), "answer"),
    "decompose states": (lambda s, n: tlg.decompose(s.model, s.ids, states=[n], **QUIET), "state"),
    "windows length": (lambda s, n: tlg.windows(s.model, "x = y + z\n" * 40, n), "length"),
    "gibberish n": (lambda s, n: tlg.corpus.gibberish(s.model, n, 8), "^n$"),
    "gibberish length": (lambda s, n: tlg.corpus.gibberish(s.model, 4, n), "^length$"),
    "top n": (lambda s, n: s.w.sweep.top("induction", n), "^n$"),
    "first rows": (lambda s, n: s.w.split.top(n), "^n$"),
    "a state": (lambda s, n: s.w.basis.index(n), "^state$"),
    "queries": (
        lambda s, n: tlg.composition(s.model, s.ids, heads="L1H0", queries=n, **QUIET),
        "position",
    ),
    "rows picked": (lambda s, n: s.w.ensemble.pick(n), "^rows$"),
}
OPTIONS: dict[str, tuple[Callable[[Scene], Callable[..., Any]], str]] = {
    "trace_logit": (lambda s: partial(tlg.trace_logit, s.model, s.ids[:1, :6], 5), "position"),
    "split_scores": (lambda s: partial(tlg.split_scores, s.model, s.ids, s.w.basis), "layers"),
    "decompose": (
        lambda s: partial(tlg.decompose, s.model, s.ids, **QUIET),
        "batch_size groups keep seed",
    ),
    "windows": (lambda s: partial(tlg.windows, s.model, "x = y + z\n" * 40, 6), "n seed"),
    "gibberish": (lambda s: partial(tlg.corpus.gibberish, s.model, 4, 8), "seed"),
    "splice": (lambda s: partial(tlg.corpus.splice, s.windows), "seed"),
    "pseudo_sentences": (
        lambda s: partial(tlg.corpus.pseudo_sentences, s.model, "x = y + z\n" * 40, 6),
        "n",
    ),
    "token_readout": (lambda s: partial(tlg.token_readout, s.model, heads="L1H0"), "k features"),
    "weight_geometry": (
        lambda s: partial(tlg.weight_geometry, s.model, s.w.basis, layers=0),
        "rank shown draws seed",
    ),
    "contextual_report": (
        lambda s: partial(tlg.contextual_report, s.w.basis, draws=1),
        "rank draws seed",
    ),
    "positional_report": (
        lambda s: partial(tlg.positional_report, s.w.basis, draws=1),
        "k frequencies draws seed",
    ),
    "compare_bases": (lambda s: partial(tlg.measures.compare_bases, s.w.basis, s.w.basis), "rank"),
    "sweep_heads": (
        lambda s: partial(tlg.sweep_heads, s.model, s.ids, s.w.basis, layers=0, **QUIET),
        "seed batch_size",
    ),
    "edge_scores": (lambda s: partial(_edges(s), answer=(5, 9)), "steps batch_size"),
    "faithfulness": (
        lambda s: partial(tlg.faithfulness, s.model, **_pair(s), circuit="L1H0", answer=(5, 9)),
        "draws seed",
    ),
    "composition": (
        lambda s: partial(tlg.composition, s.model, s.ids, heads="L1H0", draws=2, progress=False),
        "draws drop seed",
    ),
    "heads by another prompt": (
        lambda s: (
            lambda seed: s.logits(interventions.heads(s.model, "L1H0", by="prompt", seed=seed))
        ),
        "seed",
    ),
    "trajectories": (
        lambda s: partial(tlg.trajectories, s.model, s.w.pilots, **QUIET),
        "position batch_size",
    ),
    "a part of an ensemble": (lambda s: s.w.ensemble.split, "seed"),
    "compare_ensembles": (lambda s: partial(tlg.flow.compare_ensembles, {"a": s.w.ensemble}), "k"),
    "truncation_kl": (
        lambda s: partial(tlg.truncation_kl, s.model, s.w.pilots, s.w.ensemble, **QUIET),
        "K batch_size",
    ),
    "token_paths": (lambda s: partial(tlg.token_paths, s.model, s.ids), "batch_size"),
}
"""Functions, and options of theirs that are numbers: each is what a refusal is about."""


def _pair(s: Scene) -> dict[str, Any]:
    return {"prompts": s.ids[:, :6], "counterfactual": s.w.other[:, :6]}


def _edges(s: Scene) -> Callable[..., Any]:
    return partial(tlg.edge_scores, s.model, **_pair(s), method="integrated")


TAKEN = {"numpy": np.int64(2), "a tensor": torch.tensor(2)}
REFUSED = {"true": True, "a float": 2.0, "a string": "2", "below zero": -1, "zero": 0}
LAST, FIRST = (
    "position|queries|picked",
    "target|head|state|layer|seed|keep|drop|weight_geometry draw",
)
LEGAL = {"below zero": LAST, "zero": f"{LAST}|{FIRST}", "a string": "target|first row"}
"""Where -1 is the last, 0 the first or none, and a string a token or a column."""


def _named() -> Iterator[tuple[str, Callable[[Scene, Any], Any], str]]:
    for where, (call, what) in NUMBERS.items():
        yield where, call, what
    for where, (of, options) in OPTIONS.items():
        for name in options.split():
            yield f"{where} {name}", lambda s, n, of=of, name=name: of(s)(**{name: n}), f"^{name}$"


def _numbers() -> Iterator[Row]:
    for where, call, what in _named():
        for kind, number in (TAKEN | REFUSED).items():
            if re.search(rf"\b({LEGAL.get(kind, 'nothing')})s?$", where):
                continue
            name = f"15 {kind}: {where}"
            yield Row(
                name,
                lambda s, call=call, number=number: call(s, number),
                what if kind in REFUSED else None,
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
    name: lambda s, of=of: of(s)()
    for name, (of, _) in OPTIONS.items()
    if name not in ("faithfulness", "heads by another prompt", "truncation_kl")
} | {
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
                _ = s.w.basis, s.w.ensemble  # made before
                with default(**settings):
                    return call(s)

            yield Row(f"27 tensors are {state} by default: {function}", inside, what)


def embedded_dtype(s: Scene) -> torch.dtype:
    with default(dtype=torch.float64):
        return tlg.view(tlg.zoo.embedded()).dtype


ROWS: tuple[Row, ...] = (
    *_numbers(),
    *_defaults(),
    Row(
        "27 the embedded model under another default",
        embedded_dtype,
        holds=lambda s, dtype: dtype == torch.float32,
    ),
)
