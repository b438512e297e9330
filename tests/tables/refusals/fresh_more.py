"""What public bug reports and fresh inputs found, by kind: 16 to 27, what stops, what counts or
reads too much, and states of torch; 28, what a reading of all code found. See
:mod:`tests.tables.refusals.fresh`."""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tl_geometry as tlg
from tests.tables.refusals.changed_models import adapted, made
from tests.tables.refusals.circuits import pruned
from tests.tables.refusals.fresh import QUIET
from tests.tables.refusals.row import NAN, Row, Scene
from tl_geometry import corpus, interventions

ANY: Any = tlg  # takes what a type checker refuses
IDS, WAVES = torch.arange(3, 43).view(4, 10), torch.arange(120.0).view(4, 6, 5).sin()


# ---- 16. to 20.


def inferred(s: Scene, build: bool) -> Any:
    """Edge scores of a model that was looked at inside ``torch.inference_mode``, or made there."""
    model = made("llama")
    with torch.inference_mode():
        tlg.check_model(model := made("llama") if build else model)
    return scored(model)


def scored(model: Any) -> Any:
    return tlg.edge_scores(model, IDS[:2], counterfactual=IDS[2:], answer=(5, 9), method="gradient")


def copied(s: Scene, keep: bool) -> Any:
    """A basis of a deep copy of a model that was looked at, and is kept or is gone."""
    model = made("gpt2")
    tlg.check_model(model)
    other = copy.deepcopy(model)
    if not keep:
        del model
        gc.collect()
    return tlg.decompose(other, IDS, **QUIET)


# ---- 21. to 27.


def readout(merged: bool) -> torch.Tensor:
    table = tlg.token_readout(adapted(merged), matrix="OV", heads="L1H0")
    return torch.as_tensor(table.to_dataframe().select_dtypes("number").to_numpy(float))


def saved_at_home(s: Scene) -> bool:
    """Whether ``~`` is the home of the user."""
    before = {"HOME": os.environ.get("HOME", ""), "cwd": str(Path.cwd())}
    os.environ["HOME"] = str(s.folder)
    work = s.folder / "work"
    work.mkdir()
    os.chdir(work)
    try:
        s.w.basis.anova().save("~/table.safetensors")
        return (s.folder / "table.safetensors").is_file() and not list(work.iterdir())
    finally:
        os.environ["HOME"] = before["HOME"]
        os.chdir(before["cwd"])


def measured(s: Scene, value: float) -> Any:
    read = lambda logits: logits[:, -1, 5] * value
    edits = interventions.each(s.model, "L1H0", by="zero")
    return interventions.effects(s.model, s.ids, edits, metric=read)


# ---- 28. all code read once


def once(values: Any) -> Iterator[Any]:
    """What can be read once."""
    yield from values


def with_nan(s: Scene) -> torch.Tensor:
    states = WAVES.clone()
    states[0, 0, 0] = NAN
    return states


def copies(s: Scene, how: str) -> Any:
    """An edge of a prompt and its copy, which have two counterfactuals."""
    pair = corpus.prompts(s.model, s.ids[[0, 0]], counterfactuals=s.w.other[:2])
    return interventions.edge(s.model, pair, "L0H0", "L1H0", how=how)


def removed(s: Scene, positions: Any) -> torch.Tensor:
    edit = interventions.heads(s.model, ["L0H0", "L1H0"], by="zero", positions=positions)
    return torch.stack([s.logits(edit) for _ in range(2)])


def kept(s: Scene) -> Path:
    basis = tlg.decompose_activations(WAVES, seed=np.int64(2))  # type: ignore
    return basis.save(s.folder / "numpy.safetensors")


def of_another_version(s: Scene, module: str | None = None, **fields: int) -> Path:
    """A file of a class with more fields, or that is of another module."""
    table = tlg.decompose_activations(WAVES).anova()
    kind: Any = type(table)
    more = [(name, int, value) for name, value in fields.items()]
    other = dataclasses.make_dataclass(kind.__name__, more, bases=(kind,), frozen=True)
    other.__module__ = module or kind.__module__
    given = {f.name: getattr(table, f.name) for f in dataclasses.fields(table) if f.init}
    return other(**given).save(s.folder / "table.safetensors")


def of_former_weights(s: Scene) -> list[torch.Tensor]:
    """An edit by a view that was made before the weights changed, and by a fresh one."""
    model = made("llama")
    before = tlg.view(model)
    model.original_model.model.layers[0].mlp.up_proj.weight.data *= 2
    basis = tlg.decompose(model, IDS, **QUIET)
    edits = [interventions.term(view, basis, "content", "L1H0") for view in (before, model)]
    return [s.logits(edit, IDS, model) for edit in edits]


def of_one_state(s: Scene) -> Any:
    basis = tlg.decompose(s.model, s.windows, states=[1], **QUIET)
    edits = {"content": interventions.term(s.model, basis, "content", once(["L1H0"]))}
    given = {"control": "heads", "draws": 2, "seed": 2**32 - 1}
    return interventions.effects(s.model, s.ids, edits, **given, **QUIET)


READ: dict[str, tuple[Callable[[Scene], Any], str | None]] = {
    "a seed of numpy in a file": (lambda s: tlg.load(kept(s)), None),
    "a file of this version": (lambda s: tlg.load(of_another_version(s)), None),
    "a field of another version": (lambda s: tlg.load(of_another_version(s, new=1)), "file"),
    "a class of another version": (
        lambda s: tlg.load(of_another_version(s, "tl_geometry.gone")),
        "file",
    ),
    "an area under rankings": (lambda s: pruned(s, s.w.edges).cpr.value, None),
    "an area under a chosen set": (lambda s: pruned(s, "L1H0").cpr.value, "CPR"),
    "a file in another precision": (lambda s: tlg.load(kept(s), dtype=torch.float64), "load"),
    "a bridge to load": (lambda s: tlg.load(made("llama")), "^model$"),
    "None to load": (lambda s: tlg.load(None), "model"),
    "one NaN": (lambda s: tlg.decompose_activations(WAVES).transform(with_nan(s)), "activations"),
    "states by number": (lambda s: ANY.decompose_activations({0: IDS.float()}), "activations"),
    "a window of torch": (lambda s: ANY.decompose(s.model, IDS, window=torch.tensor(5)), "window"),
    "heads of torch": (lambda s: ANY.sweep_heads(s.model, IDS, s.w.basis, heads=IDS[0]), "heads"),
    "texts by name": (lambda s: ANY.windows(s.model, {"a": "x y" * 99}, 8), "texts"),
    "parts of numpy": (lambda s: ANY.split_scores(s.model, IDS, parts={"a": np.ones(3)}), "part"),
    "shares by a misspelt name": (lambda s: s.w.split.shares().share("cs", by="terms"), "by"),
    "writers of one token": (
        lambda s: tlg.sweep_heads(s.model, IDS[:, :1], parts="writers", **QUIET),
        "tokens",
    ),
    "a control of a basis of one state": (of_one_state, None),
    "an edge of copies": (lambda s: copies(s, "remove"), None),
    "a swap of copies": (lambda s: copies(s, "swap"), "counterfactuals"),
    "an edge to no side": (
        lambda s: interventions.edge(s.model, IDS, "L0H0", "L1H0", side=[]),
        "side",
    ),
    "no terms": (lambda s: interventions.term(s.model, s.w.basis, []), "term"),
    "no positions": (lambda s: removed(s, []), "positions"),
    "heads of numpy": (lambda s: interventions.heads(s.model, np.array([[0, 1]]), by="zero"), None),
    "random diagonals": (
        lambda s: interventions.surrogate(s.model, s.w.basis, part="diagonal", random=True),
        "part",
    ),
    "edits of another model": (
        lambda s: interventions.effects(s.model, IDS, interventions.each(made("gpt2"), "L0H0")),
        "edits",
    ),
    "more frequencies than positions": (
        lambda s: tlg.papers.theorem1(with_nan(s).nan_to_num()[0], k=7, m=1),
        "^k$",
    ),
    "a mean of tables": (lambda s: ANY.circuits.mean_graph([s.w.edges]), "graphs"),
    "a curve of a path": (lambda s: ANY.measures.learning_curve("basis.safetensors"), "basis"),
}


ROWS: tuple[Row, ...] = (
    *(
        Row(
            f"16 an id of {what}, {function}",
            lambda s, call=call, n=n: call(s, torch.tensor([[5, 9, n, 7]])),
            "tokens|prompt",
        )
        for what, n in {"-5": -5, "2^40": 2**40}.items()
        for function, call in {
            "trace_logit": lambda s, ids: tlg.trace_logit(s.model, ids, 5),
            "split_scores": lambda s, ids: tlg.split_scores(s.model, ids, s.w.basis, heads="L1H0"),
        }.items()
    ),
    Row("17 a deep copy beside its model", lambda s: copied(s, True)),
    Row("17 a deep copy of what is gone", lambda s: copied(s, False), "tiny"),
    Row(
        "24 an adapter that is not merged",
        lambda s: readout(False),
        "weights",
        tlg.UnsupportedModelError,
    ),
    Row("24 a merged adapter", lambda s: readout(True)),
    Row("27 a metric of NaN", lambda s: measured(s, NAN), "metric"),
    Row("27 a metric of numbers", lambda s: measured(s, 1.0)),
    Row("18 a model made in inference mode", lambda s: inferred(s, True), "gradients"),
    Row("27 edge scores after a look in inference mode", lambda s: inferred(s, False)),
    Row("27 a file at home", saved_at_home, holds=lambda s, found: found),
    Row("28 a former view", of_former_weights, holds=lambda s, found: torch.equal(*found)),
    *(Row(f"28 {name}", call, what) for name, (call, what) in READ.items()),
    Row(
        "28 positions that are read once",
        lambda s: removed(s, once([1, 2])),
        holds=lambda s, found: torch.equal(found, removed(s, [1, 2])),
    ),
)
