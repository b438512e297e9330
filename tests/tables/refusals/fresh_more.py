"""What public bug reports and fresh inputs found, by kind: 16 to 27, what stops, what counts or
reads too much, and states of torch. See :mod:`tests.tables.refusals.fresh`."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import torch

import tl_geometry as tlg
from tests.tables.refusals.changed_models import adapted, made
from tests.tables.refusals.fresh import QUIET
from tests.tables.refusals.row import NAN, Row, Scene
from tl_geometry import interventions

IDS = torch.arange(3, 43).view(4, 10)


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
)
