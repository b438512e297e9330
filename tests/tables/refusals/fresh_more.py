"""What public bug reports and fresh inputs found, by kind: 16 to 27, what stops, what counts or
reads too much, and states of torch. See :mod:`tests.tables.refusals.fresh`."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tl_geometry as tlg
from tests.tables.refusals.changed_models import adapted, made, with_text
from tests.tables.refusals.fresh import QUIET
from tests.tables.refusals.row import NAN, Row, Scene
from tl_geometry import circuits, interventions, scores

IDS = torch.arange(3, 43).view(4, 10)


# ---- 16. to 20.


def in_inference(call: Callable[[Scene], Any]) -> Callable[[Scene], Any]:
    def inside(s: Scene) -> Any:
        with torch.inference_mode():
            return call(s)

    return inside


def traced(model: Any, ids: Any = IDS[:1], target: Any = 5, **options: Any) -> Any:
    return tlg.trace_logit(model, ids, target, **options)


def made_inside(s: Scene) -> Any:
    """Edge scores of a model that was made inside ``torch.inference_mode``."""
    with torch.inference_mode():
        model = made("llama")
    return scored(model)


def looked_at_inside(s: Scene) -> Any:
    """Edge scores of a model that was looked at inside ``torch.inference_mode``."""
    model = made("llama")
    with torch.inference_mode():
        tlg.check_model(model)
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


def parallel(s: Scene) -> Any:
    model: Any = torch.nn.DataParallel(s.model)
    return tlg.decompose(model, s.ids, **QUIET)


def frames(s: Scene) -> Any:
    import pandas as pd

    return pd.DataFrame({"text": ["x = y + z\n" * 40, "a = b\n" * 40]})


def filtered(s: Scene) -> bool:
    """Whether a column of a filtered table gives the windows of its own texts."""
    table = frames(s)
    column = table[table.text.str.startswith("a")].text
    cut = lambda texts: tlg.windows(s.model, texts, 6, prepend_bos=True).tokens
    return torch.equal(cut(column), cut(list(column)))


def averaged(s: Scene) -> Any:
    """The mean of a generator of graphs."""
    graphs: Any = (graph for graph in [s.w.graph, s.w.graph])
    return circuits.mean_graph(graphs)


ONE: Any = 0.1
"""One fraction, where several are meant."""

# ---- 21. to 27.


def repeated(s: Scene, times: int) -> Any:
    return tlg.decompose(s.model, s.w.corpus[:16].repeat(times, 1), **QUIET)


def counted_once(s: Scene, found: Any) -> bool:
    """Repeated contexts are one context each, and the result says so."""
    return found.contexts == 16 and any("16" in flag for flag in found.provenance.flags)


def one_token(s: Scene) -> Any:
    """A corpus of one repeated token."""
    return tlg.decompose(s.model, torch.full((16, 12), 9), **QUIET)


def readout(merged: bool) -> torch.Tensor:
    table = tlg.token_readout(adapted(merged), matrix="OV", heads="L1H0")
    return torch.as_tensor(table.to_dataframe().select_dtypes("number").to_numpy(float))


def as_merged(s: Scene, found: torch.Tensor) -> bool:
    """What is read out is what the model computes."""
    return torch.allclose(found, readout(True), atol=1e-3, equal_nan=True)


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
            name=f"16 an id of {what}, {function}",
            call=lambda s, call=call, n=n: call(s, torch.tensor([[5, 9, n, 7]])),
            what="tokens|prompt",
        )
        for what, n in {"-5": -5, "2^40": 2**40}.items()
        for function, call in {
            "trace_logit": lambda s, ids: traced(s.model, ids),
            "split_scores": lambda s, ids: tlg.split_scores(s.model, ids, s.w.basis, heads="L1H0"),
        }.items()
    ),
    Row(
        name="16 a numpy pattern",
        call=lambda s: scores.head_type_scores(s.w.split.pattern().numpy(), s.ids),
        what="pattern",
        either=True,
    ),
    Row(
        name="16 a numpy cache",
        call=lambda s: tlg.decompose_activations(
            {name: value.numpy() for name, value in s.w.cache.items()}
        ),
        what="cache|activations",
        either=True,
    ),
    Row(name="17 DataParallel", call=parallel, what="model", error=tlg.UnsupportedModelError),
    Row(name="17 a deep copy beside its model", call=lambda s: copied(s, True)),
    Row(
        name="17 a deep copy of what is gone",
        call=lambda s: copied(s, False),
        what=".",
        either=True,
    ),
    Row(
        name="18 a graph in inference mode",
        call=in_inference(lambda s: traced(s.model, s.ids[:1, :6])),
        what=".",
        either=True,
    ),
    Row(
        name="18 edge scores in inference mode",
        call=in_inference(lambda s: scored(s.model)),
        what="inference|gradient",
        either=True,
    ),
    Row(name="18 a model made in inference mode", call=made_inside, what=".", either=True),
    Row(
        name="20 half a surrogate pair in a prompt",
        call=lambda s: traced(s.model, "x = \ud800", prepend_bos=True),
        what="texts|prompt|tokens",
    ),
    Row(
        name="20 a DataFrame as texts",
        call=lambda s: tlg.windows(s.model, frames(s), 2, prepend_bos=True),
        what="texts",
    ),
    Row(name="20 a generator of graphs", call=averaged, what="graphs", either=True),
    Row(
        name="20 one fraction",
        call=lambda s: tlg.faithfulness(
            s.model,
            s.ids[:, :6],
            s.w.edges,
            counterfactual=s.w.other[:, :6],
            answer=(5, 9),
            fractions=ONE,
            draws=1,
        ),
        what="fraction",
        either=True,
    ),
    Row(
        name="20 projected embeddings",
        call=lambda s: traced(made("opt", word_embed_proj_dim=16)),
        what=".",
        either=True,
    ),
    Row(name="21 contexts that repeat", call=lambda s: repeated(s, 8), holds=counted_once),
    Row(
        name="21 contexts that differ",
        call=lambda s: repeated(s, 1),
        holds=lambda s, found: found.contexts == 16,
    ),
    Row(
        name="21 a corpus of one token",
        call=one_token,
        what="tokens",
        holds=lambda s, found: found.contexts == 1 and not found.anova().identifiable,
        either=True,
    ),
    Row(
        name="24 an adapter that is not merged",
        call=lambda s: readout(False),
        what=".",
        holds=as_merged,
        either=True,
    ),
    Row(name="24 an adapter that is merged", call=lambda s: readout(True), holds=as_merged),
    Row(
        name="25 a target that the vocabulary lacks",
        call=lambda s: traced(with_text(), "w5 w6 w7", "zzz", prepend_bos=True),
        what="answers",
    ),
    Row(name="25 a column after a filter", call=filtered, holds=lambda s, same: same),
    *(
        Row(
            name=f"27 a metric of {name}",
            call=lambda s, v=v: measured(s, v),
            what="metric",
        )
        for name, v in {"NaN": NAN, "infinity": float("inf")}.items()
    ),
    Row(name="27 a metric of numbers", call=lambda s: measured(s, 1.0)),
    Row(name="27 edge scores after a look in inference mode", call=looked_at_inside),
    Row(name="27 a file at home", call=saved_at_home, holds=lambda s, found: found),
)
