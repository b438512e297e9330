"""Inputs that a user gives by mistake or in good faith, as data: what is called, and whether it is
taken or refused, and how.

``CALLS`` goes through the API, ``COMMANDS`` through the command line. A refusal is a
``GeometryError`` (on the command line exit 2 and one line) whose text matches ``refused``; what is
taken returns a value that ``check`` accepts.

``python -m tests.bad_inputs`` makes all calls as a user would, without the checks of annotations
that tests switch on, and prints what came of each as JSON; ``tests/project/test_bad_inputs.py``
judges.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tl_geometry as tlg
from tl_geometry.base.errors import GeometryError

PATH: Any = "basis.safetensors"
"""What is often given where a basis is meant."""


@dataclass(frozen=True)
class World:
    """What the inputs are built from: the embedded model, windows, a basis, a split, a sweep,
    another model, a scratch folder."""

    model: Any
    windows: tlg.TokenWindows
    basis: tlg.PositionContext
    split: Any
    table: Any
    other: Any
    folder: Path

    @property
    def ids(self) -> torch.Tensor:
        return self.windows.tokens

    def decompose(self, tokens: Any, **options: Any) -> tlg.PositionContext:
        return tlg.decompose(self.model, tokens, progress=False, **options)

    def splits(self, tokens: Any = None, basis: Any = None, **options: Any) -> Any:
        options = {"heads": "L1H0"} | options
        return tlg.split_scores(
            self.model,
            self.windows[:2] if tokens is None else tokens,
            basis or self.basis,
            **options,
        )

    def path(self, name: str, content: str | bytes = "") -> Path:
        found = self.folder / name
        found.write_bytes(content if isinstance(content, bytes) else content.encode())
        return found


@dataclass(frozen=True)
class Call:
    """One input: taken where ``refused`` is ``None``, else refused with a text that matches it."""

    name: str
    call: Callable[[World], Any]
    refused: str | None = None
    check: Callable[[World, Any], bool] = lambda world, value: value is not None


def same_pos(world: World, found: tlg.PositionContext) -> bool:
    return torch.allclose(found.pos, world.basis.pos, atol=1e-6)


def columns(world: World, rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def loader(world: World, rows: Any, size: int = 3) -> Any:
    return torch.utils.data.DataLoader(rows, batch_size=size)


def removed(world: World, **options: Any) -> Any:
    return tlg.interventions.remove_term(
        world.model, world.basis, options.get("term", "pos-pos"), options.get("heads", "L1H0")
    )


def run_removed(world: World, tokens: torch.Tensor, **options: Any) -> Any:
    with removed(world, **options):
        return world.model(tokens)


def run_listed(world: World, tokens: torch.Tensor, times: int = 1) -> Any:
    hooks = [hook for _ in range(times) for hook in removed(world).hooks()]
    return world.model.run_with_hooks(tokens, fwd_hooks=hooks)


def run_planes(world: World, planes: Any) -> Any:
    with tlg.interventions.remove_planes(world.model, planes, "L1H0"):
        return world.model(world.ids[:2])


def run_edge(world: World, writer: str, tokens: torch.Tensor) -> Any:
    with tlg.interventions.remove_edge(world.model, tokens, writer, "L1H0"):
        return world.model(world.ids[:2])


def replaced(world: World, **fields: Any) -> tlg.PositionContext:
    return dataclasses.replace(
        world.basis, provenance=dataclasses.replace(world.basis.provenance, **fields)
    )


TOKENS = [
    Call("ids as a tensor", lambda w: w.decompose(w.ids), check=same_pos),
    Call("ids as int32", lambda w: w.decompose(w.ids.int()), check=same_pos),
    Call(
        "ids as numpy uint16",
        lambda w: w.decompose(w.ids.numpy().astype(np.uint16)),
        check=same_pos,
    ),
    Call("ids as lists", lambda w: w.decompose(w.ids.tolist()), check=same_pos),
    Call("ids as a list of rows", lambda w: w.decompose(list(w.ids)), check=same_pos),
    Call("ids as floats", lambda w: w.decompose(w.ids.float()), "integer"),
    Call("ids as truth values", lambda w: w.decompose(w.ids > 3), "integer|bool"),
    Call(
        "ids of one row without a batch axis",
        lambda w: w.decompose(w.ids[0]),
        r"\[context position\]",
    ),
    Call("ids with three axes", lambda w: w.decompose(w.ids[None]), r"\[context position\]"),
    Call("no ids", lambda w: w.decompose(w.ids[:0]), "at least one"),
    Call("windows of no tokens", lambda w: w.decompose(w.ids[:, :0]), "at least one|position"),
    Call("ragged lists", lambda w: w.decompose([[1, 2, 3], [1, 2]]), "equal length"),
    Call("ids beyond the vocabulary", lambda w: w.decompose(w.ids + 5000), "vocabulary|ids from"),
    Call("negative ids", lambda w: w.decompose(w.ids - 5000), "ids from"),
    Call("windows beyond n_ctx", lambda w: w.decompose(w.ids.repeat(1, 20)), "n_ctx|positions"),
    Call("no tokens at all", lambda w: w.decompose(None), "tokens"),
    Call("an empty list", lambda w: w.decompose([]), "tokens|batch"),
    Call("an empty generator", lambda w: w.decompose(iter(())), "at least one batch"),
    Call(
        "a generator of batches", lambda w: w.decompose(x for x in w.ids.split(3)), check=same_pos
    ),
    Call("a mapping of ids", lambda w: w.decompose({"input_ids": w.ids}), check=same_pos),
    Call(
        "a cache where tokens are meant",
        lambda w: w.decompose(w.model.run_with_cache(w.ids[:2])[1]),
        "decompose_activations|cache",
    ),
    Call("ids on the meta device", lambda w: w.decompose(w.ids.to("meta")), "meta"),
    Call(
        "a data set with ids",
        lambda w: w.decompose(columns(w, [{"input_ids": r.tolist()} for r in w.ids])),
        check=same_pos,
    ),
    Call("a data set without ids", lambda w: w.decompose(columns(w, [{"label": 1}])), "column"),
    Call(
        "a data set whose mask is all ones",
        lambda w: w.decompose(
            columns(w, [{"input_ids": r.tolist(), "attention_mask": [1] * len(r)} for r in w.ids])
        ),
        check=same_pos,
    ),
    Call(
        "a data set with padding",
        lambda w: w.decompose(
            columns(
                w,
                [
                    {"input_ids": r.tolist(), "attention_mask": [0] + [1] * (len(r) - 1)}
                    for r in w.ids
                ],
            )
        ),
        "attention_mask|padd",
    ),
    Call("a loader of rows", lambda w: w.decompose(loader(w, list(w.ids))), check=same_pos),
    Call(
        "a loader of a TensorDataset",
        lambda w: w.decompose(loader(w, torch.utils.data.TensorDataset(w.ids))),
        check=same_pos,
    ),
    Call(
        "a text file where ids are meant",
        lambda w: w.decompose(w.path("a.txt", "def f(): pass")),
        "windows|text",
    ),
    Call(
        "a file that is not there",
        lambda w: w.decompose(w.folder / "nothing.npy"),
        "existing|nothing",
    ),
    Call("text without prepend_bos", lambda w: w.decompose("def f(x): return x"), "prepend_bos"),
    Call(
        "texts of unequal length",
        lambda w: w.decompose(["a b c d", "a"], prepend_bos=True),
        "equal token lengths",
    ),
    Call("ids with prepend_bos", lambda w: w.decompose(w.ids, prepend_bos=True), "never edited"),
    Call(
        "windows of a path",
        lambda w: tlg.windows(w.model, Path("x.txt"), 8, prepend_bos=True),
        "text|read",
    ),  # pyright: ignore[reportArgumentType]
    Call(
        "windows of a data set with text",
        lambda w: tlg.windows(
            w.model, columns(w, [{"text": "def f(x): return x " * 30}]), 8, prepend_bos=True
        ),
        check=lambda w, v: v.tokens.shape[1] == 8,
    ),
    Call(
        "windows of a data set without text",
        lambda w: tlg.windows(w.model, columns(w, [{"a": 1}]), 8, prepend_bos=True),
        "text",
    ),
    Call(
        "windows of length 0",
        lambda w: tlg.windows(w.model, "abc " * 50, 0, prepend_bos=True),
        "length",
    ),
    Call(
        "windows of length 2.5",
        lambda w: tlg.windows(w.model, "abc " * 50, 2.5, prepend_bos=True),  # pyright: ignore
        "length",
    ),
    Call(
        "windows of an empty text", lambda w: tlg.windows(w.model, "", 8, prepend_bos=True), "text"
    ),
    Call("windows of no text", lambda w: tlg.windows(w.model, [], 8, prepend_bos=True), "text"),
    Call(
        "more windows than there are",
        lambda w: tlg.windows(w.model, "abc " * 50, 8, n=9999, prepend_bos=True),
        "1 to",
    ),
    Call(
        "labels of another length",
        lambda w: tlg.windows(w.model, ["abc " * 50], 8, labels=["a", "b"], prepend_bos=True),
        "labels",
    ),
    Call(
        "a window by a tensor of one element",
        lambda w: w.windows[torch.tensor([3])],
        check=lambda w, v: len(v) == 1,
    ),
    Call(
        "windows by a mask",
        lambda w: w.windows[torch.arange(len(w.windows)) < 2],
        check=lambda w, v: len(v) == 2,
    ),
    Call("a window that is not there", lambda w: w.windows[torch.tensor([99])], "99|context"),
]
SETTINGS = [
    Call(
        "states by name",
        lambda w: w.decompose(w.ids, states=["blocks.1.hook_resid_pre"]),
        check=lambda w, v: v.states == (1,),
    ),
    Call("a state that is not there", lambda w: w.decompose(w.ids, states=[9]), "state"),
    Call(
        "a state by a wrong name",
        lambda w: w.decompose(w.ids, states=["blocks.1.hook_nothing"]),
        "state|hook_resid_pre",
    ),
    Call("a negative state", lambda w: w.decompose(w.ids, states=[-1]), "state"),
    Call("no states", lambda w: w.decompose(w.ids, states=[]), "at least one"),
    Call("a state twice", lambda w: w.decompose(w.ids, states=[1, 1]), "once"),
    Call(
        "a window of floats",
        lambda w: w.decompose(w.ids, window=(1.0, 8.0)),
        check=lambda w, v: v.window == (1, 8),
    ),
    Call("a window of halves", lambda w: w.decompose(w.ids, window=(1.5, 8.0)), "window"),
    Call("a window beyond the positions", lambda w: w.decompose(w.ids, window=(1, 99)), "window"),
    Call("a window the wrong way", lambda w: w.decompose(w.ids, window=(8, 1)), "window"),
    Call("a window of one number", lambda w: w.decompose(w.ids, window=8), "window"),
    Call("batch_size 0", lambda w: w.decompose(w.ids, batch_size=0), "batch_size"),
    Call("batch_size -3", lambda w: w.decompose(w.ids, batch_size=-3), "batch_size"),
    Call("groups 0", lambda w: w.decompose(w.ids, groups=0), "groups"),
    Call("keep -1", lambda w: w.decompose(w.ids, keep=-1), "keep"),
    Call(
        "second_moments 'yes'",
        lambda w: w.decompose(w.ids, second_moments="yes"),
        "second moments|second_moments",
    ),
    Call("labels too few", lambda w: w.decompose(w.ids, labels=[0]), "labels"),
    Call("labels of floats", lambda w: w.decompose(w.ids, labels=torch.rand(len(w.ids))), "label"),
    Call(
        "negative labels",
        lambda w: w.decompose(w.ids, labels=-torch.ones(len(w.ids), dtype=torch.int64)),
        "label",
    ),
    Call(
        "labels of a generator",
        lambda w: w.decompose((x for x in w.ids.split(3)), labels=[0, 1]),
        "label",
    ),
    Call(
        "a checkpoint that is a folder",
        lambda w: w.decompose(w.ids, checkpoint=w.folder),
        "file|folder|director",
    ),
    Call(
        "a checkpoint that is something else",
        lambda w: w.decompose(w.ids, checkpoint=w.path("c.safetensors", "no")),
        "written by",
    ),
    Call(
        "a device that is not there",
        lambda w: w.decompose(w.ids, device="cuda:9" if not torch.cuda.is_available() else "xpu"),
        "device",
    ),
    Call(
        "activations to decompose",
        lambda w: tlg.decompose(torch.randn(4, 5, 6), progress=False),  # type: ignore[arg-type]
        "decompose_activations",
    ),  # pyright: ignore[reportCallIssue]
    Call("a model without tokens", lambda w: tlg.decompose(w.model, progress=False), "tokens"),  # pyright: ignore[reportCallIssue]
    Call(
        "a torch module as a model",
        lambda w: tlg.decompose(torch.nn.Linear(2, 2), w.ids),  # type: ignore[arg-type]
        "HookedTransformer",
    ),
    Call("a name as a model", lambda w: tlg.decompose("gpt2", w.ids), "model|load"),  # type: ignore[arg-type]
    Call(
        "a transformers model as a model",
        lambda w: tlg.decompose(tlg.zoo.hugging_face(), w.ids),
        "from_hf|HookedTransformer",
    ),
]
ACTIVATIONS = [
    Call(
        "activations",
        lambda w: tlg.decompose_activations(torch.randn(4, 5, 6)),
        check=lambda w, v: v.pos.shape == (1, 5, 6),
    ),
    Call(
        "activations with gradients",
        lambda w: tlg.decompose_activations(torch.randn(4, 5, 6, requires_grad=True)),
    ),
    Call(
        "activations in half precision",
        lambda w: tlg.decompose_activations(torch.randn(4, 5, 6).half()),
    ),
    Call(
        "activations with NaN",
        lambda w: tlg.decompose_activations(torch.full((4, 5, 6), torch.nan)),
        "finite|NaN",
    ),
    Call(
        "activations on the meta device",
        lambda w: tlg.decompose_activations(torch.randn(4, 5, 6, device="meta")),
        "meta",
    ),
    Call(
        "integer activations",
        lambda w: tlg.decompose_activations(torch.ones(4, 5, 6, dtype=torch.int64)),
        "floating",
    ),
    Call(
        "activations with two axes",
        lambda w: tlg.decompose_activations(torch.randn(4, 5)),
        r"\[context position d_model\]",
    ),
    Call(
        "numpy activations",
        lambda w: tlg.decompose_activations(np.ones((4, 5, 6), dtype=np.float32)),
        "activation",
    ),
    Call(
        "a cache",
        lambda w: tlg.decompose_activations(w.model.run_with_cache(w.ids)[1]),
        check=lambda w, v: len(v.states) == 5,
    ),
    Call(
        "a plain dict of a cache",
        lambda w: tlg.decompose_activations(
            w.model.run_with_cache(w.ids, return_cache_object=False)[1]
        ),
    ),
    Call(
        "a cache of one layer",
        lambda w: tlg.decompose_activations({"blocks.0.hook_resid_pre": torch.randn(4, 5, 6)}),
        "state|cache",
    ),
    Call(
        "a cache without a batch",
        lambda w: tlg.decompose_activations(
            w.model.run_with_cache(w.ids[:1], remove_batch_dim=True)[1]
        ),
        "batch",
    ),
    Call(
        "one context",
        lambda w: tlg.decompose_activations(torch.randn(1, 5, 6)),
        check=lambda w, v: not v.anova().identifiable,
    ),
]
BASES = [
    Call(
        "a basis of another model",
        lambda w: tlg.split_scores(w.other, torch.ones(1, 8, dtype=torch.int64), w.basis),
        "model",
    ),
    Call("a basis of one context", lambda w: w.splits(basis=w.decompose(w.ids[:1])), "context"),
    Call(
        "a sweep with a basis of one context",
        lambda w: tlg.sweep_heads(w.model, w.ids, w.decompose(w.ids[:1]), progress=False),
        "context",
    ),
    Call(
        "a basis that is a path", lambda w: w.splits(basis="basis.safetensors"), "PositionContext"
    ),
    Call(
        "no basis", lambda w: tlg.split_scores(w.model, w.windows[:2], None, heads="L1H0"), "basis"
    ),
    Call(
        "a basis of fewer states", lambda w: w.splits(basis=w.decompose(w.ids, states=[0])), "state"
    ),
    Call(
        "a basis of shorter windows",
        lambda w: w.splits(basis=w.decompose(w.ids[:, :6])),
        "positions",
    ),
    Call(
        "a basis with another BOS",
        lambda w: w.splits(basis=w.decompose(w.ids[:, 1:]), tokens=w.windows[:2].tokens[:, :8]),
        "has_bos|bos",
    ),
    Call(
        "merging a basis with itself",
        lambda w: tlg.PositionContext.merge([w.basis, w.basis]),
        "twice|same",
    ),
    Call("merging nothing", lambda w: tlg.PositionContext.merge([]), "at least one"),
    Call(
        "merging other states",
        lambda w: tlg.PositionContext.merge([w.basis, w.decompose(w.ids, states=[0])]),
        "states",
    ),
    Call(
        "a file that is not there",
        lambda w: tlg.PositionContext.load(w.folder / "none.safetensors"),
        "existing",
    ),
    Call(
        "a file that is text",
        lambda w: tlg.PositionContext.load(w.path("t.safetensors", "text")),
        "written by",
    ),
    Call("a folder as a file", lambda w: tlg.PositionContext.load(w.folder), "file"),
    Call(
        "saving into a file as a folder",
        lambda w: w.basis.save(w.path("plain") / "basis.safetensors"),
        "write|director|folder",
    ),
    Call(
        "a table as a basis file",
        lambda w: tlg.PositionContext.load(w.table.save(w.folder / "table.safetensors")),
        "schema|written",
    ),
    Call(
        "a second moment that was not kept",
        lambda w: w.decompose(w.ids, second_moments=False).second_moment(0),
        "second_moments=True",
    ),
    Call("a position that was not seen", lambda w: w.basis.pos_at(99), "position"),
    Call(
        "transform of other states",
        lambda w: w.basis.transform(torch.randn(2, 3, 12, 128)),
        "state",
    ),
    Call(
        "transform of NaN",
        lambda w: w.basis.transform(torch.full((5, 3, 12, 128), torch.nan)),
        "finite",
    ),
]
SPLITS = [
    Call("a head beyond the last", lambda w: w.splits(heads="L1H9"), "head"),
    Call("a layer beyond the last", lambda w: w.splits(heads="L9H0"), "layer"),
    Call("a head by words", lambda w: w.splits(heads="induction"), "heads"),
    Call("heads of other layers", lambda w: w.splits(heads="L1H0", layers=[0]), "layers"),
    Call("no heads", lambda w: w.splits(heads=[]), "at least one"),
    Call("unknown parts", lambda w: w.splits(parts=("pos", "content")), "parts"),
    Call("parts that do not sum", lambda w: w.splits(parts={"a": torch.zeros(2, 12, 128)}), "sum"),
    Call(
        "parts of another shape", lambda w: w.splits(parts={"a": torch.zeros(2, 3)}), "shape|part"
    ),
    Call(
        "a part called alibi", lambda w: w.splits(parts={"alibi": torch.zeros(2, 12, 128)}), "alibi"
    ),
    Call("an unknown preset", lambda w: w.splits(preset="papers"), "preset"),
    Call("a memory budget of 1 byte", lambda w: w.splits(memory_budget=1), "memory_budget"),
    Call("an unknown term", lambda w: w.split.terms["pos-nothing"], "terms"),
    Call(
        "a cache of other tokens",
        lambda w: w.splits(cache=w.model.run_with_cache(w.ids[2:4])[1]),
        "cache",
    ),
    Call("a cache of something else", lambda w: w.splits(cache=42), "cache"),
    Call(
        "tokens that are None without a cache",
        lambda w: tlg.split_scores(w.model, None, w.basis, heads="L1H0"),  # type: ignore[arg-type]
        "tokens",
    ),
    Call("text without prepend_bos", lambda w: w.splits(tokens="def f(x)"), "prepend_bos"),
    Call(
        "text with prepend_bos",
        lambda w: w.splits(tokens="def f(x)", prepend_bos=True),
        check=lambda w, v: len(v.str_tokens) > 2,
    ),
    Call(
        "prompts beyond the basis", lambda w: w.splits(tokens=w.ids[:2].repeat(1, 3)), "positions"
    ),
    Call("drop beyond the prompt", lambda w: w.split.shares(drop=99), "drop|positions|queries"),
    Call("drop -1", lambda w: w.split.shares(drop=-1), "drop"),
    Call(
        "an unknown detail",
        lambda w: tlg.sweep_heads(w.model, w.ids, w.basis, detail="everything", progress=False),
        "detail",
    ),
    Call(
        "a sweep within 1 byte",
        lambda w: tlg.sweep_heads(w.model, w.ids, w.basis, memory_budget=1, progress=False),
        "memory_budget",
    ),
    Call(
        "writers without a basis",
        lambda w: tlg.sweep_heads(w.model, w.ids, parts="writers", progress=False),
    ),
    Call(
        "parts of no name",
        lambda w: tlg.sweep_heads(w.model, w.ids, parts="heads", progress=False),  # type: ignore[call-overload]
        "'writers', 'blocks'",
    ),
    Call(
        "details of writers",
        lambda w: tlg.sweep_heads(w.model, w.ids, parts="writers", detail="nulls", progress=False),
        "no detail with writers",
    ),
    Call(
        "composition of one prompt",
        lambda w: tlg.composition(w.model, w.ids[:1], progress=False),
        "at least 2 prompts",
    ),
    Call("a logit of two prompts", lambda w: tlg.explain_logit(w.model, w.ids, 3, 5), "one prompt"),
    Call(
        "a logit beyond the prompt",
        lambda w: tlg.explain_logit(w.model, w.ids[:1], 99, 5),
        "position",
    ),
    Call(
        "a difference of three logits",
        lambda w: tlg.explain_logit(w.model, w.ids[:1], 3, [1, 2, 3]),
        "target",
    ),
    Call("an edge", lambda w: run_edge(w, "L0H0", w.ids[:2])),
    Call("an edge from a later head", lambda w: run_edge(w, "L2H0", w.ids[:2]), "L2H0"),
    Call(
        "an edge of other tokens",
        lambda w: run_edge(w, "L0H0", w.ids[2:4]),
        "tokens of the clean run",
    ),
    Call(
        "a dictionary of another width",
        lambda w: tlg.scores.feature_shares(
            w.model,
            w.ids[:1],
            tlg.scores.dictionary((torch.ones(1, 12, 3), torch.eye(3), torch.zeros(3)), 1),
        ),
        "d_model",
    ),
    Call(
        "a dictionary that is none",
        lambda w: tlg.scores.dictionary(torch.nn.Linear(2, 2), 1),
        "encode, W_dec",
    ),
    Call("planes that were not asked for", lambda w: w.table.planes(), 'detail="planes"'),
    Call("a plane beyond the last", lambda w: w.split.on_planes(1), "planes 0 to 0"),
    Call("a band that has no name", lambda w: w.split.on_planes("fast"), "near.*far"),
    Call(
        "a profile of no term", lambda w: w.split.offset_profile("pos-nothing"), "terms: expected"
    ),
    Call(
        "a kernel of a model without rotation",
        lambda w: tlg.scores.relative_kernel(w.model, w.decompose(w.ids, normalize=True)),
        "a rotary model",
    ),
    Call(
        "a kernel on a raw basis",
        lambda w: tlg.scores.relative_kernel(w.model, w.basis),
        "normalize=True",
    ),
    Call("a column that is not there", lambda w: w.table.top("nothing"), "column"),
    Call("a number of rows below zero", lambda w: w.table.top("induction", -1), "n|rows"),
]
EDITS = [
    Call(
        "near planes of a model without rotation",
        lambda w: run_planes(w, "near"),
        "planes that the heads have",
    ),
    Call("the plane of all coordinates", lambda w: run_planes(w, "pass")),
    Call("an unknown term", lambda w: run_removed(w, w.ids[:2], term="pos-nothing"), "term"),
    Call("an unknown head", lambda w: run_removed(w, w.ids[:2], heads="L9H9"), "head"),
    Call("prompts without BOS", lambda w: run_removed(w, w.ids[:2, 1:]), "has_bos|BOS"),
    Call("prompts beyond the basis", lambda w: run_removed(w, w.ids[:2].repeat(1, 3)), "positions"),
    Call(
        "a basis of another model",
        lambda w: tlg.interventions.remove_term(w.other, w.basis, "pos-pos").__enter__(),
        "model",
    ),
    Call(
        "an unknown subspace",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, 1, "context").__enter__(),
        "subspace",
    ),
    Call(
        "a state that is not there",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, 9).__enter__(),
        "state",
    ),
    Call(
        "a rank beyond",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, 1, rank=999).__enter__(),
        "rank",
    ),
    Call(
        "the mean of one prompt",
        lambda w: _entered(
            tlg.interventions.mean_term(w.model, w.basis, "cvec-cvec", "L1H0"), w.model, w.ids[:1]
        ),
        "at least 2 prompts",
    ),
    Call("one head in two lists of hooks", lambda w: run_listed(w, w.ids[:2], 2), "edited already"),
    Call("hooks for prompts without BOS", lambda w: run_listed(w, w.ids[:2, 1:]), "has_bos|BOS"),
    Call(
        "a state that no hook holds",
        lambda w: tlg.interventions.project_stream(w.model, w.basis, "blocks.1.hook_z").hooks(),
        "states",
    ),
]
VIEWS = [
    Call("a basis as a split", lambda w: tlg.render.split(w.basis), "ScoreSplit"),  # pyright: ignore[reportArgumentType]
    Call(
        "a split as a logit",
        lambda w: tlg.render.circuitsvis.induction(w.split),
        r"ScoreSplit\. Use explain_logit",
    ),
    Call("a basis as heads", lambda w: tlg.render.heads(w.basis, "induction"), "table|heads"),  # pyright: ignore[reportArgumentType]
    Call("a value that is not there", lambda w: tlg.render.heads(w.table, "nothing"), "nothing"),
    Call("a matrix that is not there", lambda w: tlg.weight_geometry(w.model, w.basis, "QV"), "QK"),
    Call("a readout of nothing", lambda w: tlg.token_readout(w.model, matrix="VO"), "OV"),
    Call(
        "few positions for spectra",
        lambda w: tlg.positional_report(w.decompose(w.ids, window=(1, 3))),
    ),
    Call("a path as a positional basis", lambda w: tlg.positional_report(PATH), "PositionContext"),
    Call("a path as a context basis", lambda w: tlg.contextual_report(PATH), "PositionContext"),
    Call("a path to compare", lambda w: tlg.compare_bases(w.basis, PATH), "PositionContext"),
    Call("axes from a path", lambda w: tlg.token_paths(w.model, w.ids, PATH), "PositionContext"),
    Call(
        "kernels of a path",
        lambda w: tlg.measures.kernel_gaps(w.model, PATH),
        "PositionContext",
    ),
    Call(
        "topics without labels",
        lambda w: tlg.contextual_report(w.decompose(w.ids, keep_ctx=False)),
        "ctx",
    ),
    Call("LaTeX of unknown columns", lambda w: w.table.to_latex(["nothing"]), "columns"),
    Call("an attribute that is not there", lambda w: _missing(tlg), None),
]
CALLS = [*TOKENS, *SETTINGS, *ACTIVATIONS, *BASES, *SPLITS, *EDITS, *VIEWS]


def _entered(context: Any, model: Any, tokens: torch.Tensor) -> Any:
    with context:
        return model(tokens)


def _missing(module: Any) -> bool:
    try:
        return module.decompse is None
    except AttributeError as error:
        return "Public names" in str(error)


@dataclass(frozen=True)
class Command:
    """One command line; ``files`` are made in the working folder first. ``refused`` as in
    :class:`Call` (exit 2 and one line)."""

    name: str
    words: tuple[str, ...]
    refused: str
    files: tuple[tuple[str, bytes], ...] = ()


TEXT = (("a.txt", b"def f(x):\n    return x\n" * 300),)


def fit(*words: str) -> tuple[str, ...]:
    return ("fit", "--corpus", "a.txt", "--length", "16", "--contexts", "4", "--quiet", *words)


COMMANDS = [
    Command("an unknown option", ("fit", "--nothing"), "nothing"),
    Command("an unknown command", ("fitt",), "fitt"),
    Command("contexts -5", fit("--contexts", "-5"), "contexts", TEXT),
    Command("contexts 0", fit("--contexts", "0"), "contexts", TEXT),
    Command("contexts beyond the corpus", fit("--contexts", "9999"), "windows|contexts", TEXT),
    Command("contexts in words", fit("--contexts", "many"), "many", TEXT),
    Command("length 0", fit("--length", "0"), "length", TEXT),
    Command("length 1", fit("--length", "1"), "length", TEXT),
    Command("length beyond n_ctx", fit("--length", "4096"), "length|positions|tokens", TEXT),
    Command("batch size 0", fit("--batch-size", "0"), "batch-size|batch_size", TEXT),
    Command("seed -1", fit("--seed", "-1"), "seed", TEXT),
    Command("a corpus that is not there", ("fit", "--corpus", "nope.txt"), "nope.txt"),
    Command("a corpus that is a folder", ("fit", "--corpus", "."), "corpus"),
    Command(
        "an empty corpus", ("fit", "--corpus", "empty.txt"), "text|empty", (("empty.txt", b""),)
    ),
    Command(
        "a corpus that is binary",
        ("fit", "--corpus", "b.txt"),
        "text",
        (("b.txt", b"abc\0def" * 500),),
    ),
    Command(
        "a corpus in Latin-1",
        ("fit", "--corpus", "l.txt"),
        "UTF-8|encoding",
        (("l.txt", "caf\xe9 ".encode("latin-1") * 500),),
    ),
    Command(
        "a token file that is cut",
        ("fit", "--corpus", "t.npy"),
        "t.npy|npy",
        (("t.npy", b"\x93NUMPY"),),
    ),
    Command(
        "a device that is not there",
        fit("--device", "cuda" if not torch.cuda.is_available() else "cuda:99"),
        "device|CUDA",
        TEXT,
    ),
    Command("a device that is nonsense", fit("--device", "toaster"), "device", TEXT),
    Command("a dtype that is nonsense", fit("--dtype", "float7"), "dtype", TEXT),
    Command("a class that is nonsense", fit("--class", "hook"), "class", TEXT),
    Command("an output that is a folder", fit("--out", "."), "out", TEXT),
    Command("an output below a file", fit("--out", "a.txt/basis.safetensors"), "out|a.txt", TEXT),
    Command(
        "a report into a file", ("report", "--corpus", "a.txt", "--out", "a.txt"), "out|a.txt", TEXT
    ),
    Command(
        "a section that is not there",
        ("report", "--corpus", "a.txt", "--sections", "head"),
        "sections|heads",
        TEXT,
    ),
    Command(
        "a budget that is nonsense",
        ("report", "--corpus", "a.txt", "--budget", "soon"),
        "budget",
        TEXT,
    ),
    Command("a model that is not there", ("check", "gpt-99"), "gpt-99|name"),
    Command("a folder without a model", ("check", "."), "config.json"),
    Command(
        "a folder with a pickled model",
        ("check", "."),
        "safetensors",
        (
            ("config.json", b'{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}'),
            ("pytorch_model.bin", b"\x80\x04."),
        ),
    ),
    Command(
        "a folder with its own code",
        ("check", "."),
        "code|trust",
        (
            (
                "config.json",
                b'{"model_type": "mine", "auto_map": {"AutoConfig": "a.B", '
                b'"AutoModelForCausalLM": "a.C"}}',
            ),
            ("a.py", b"raise SystemExit(7)"),
            ("model.safetensors", b""),
        ),
    ),
    Command(
        "a config that is no JSON", ("check", "."), "config.json|JSON", (("config.json", b"{"),)
    ),
    Command("a head beyond the last", ("readout", "--layer", "0", "--head", "9"), "head"),
    Command("weights that are nonsense", ("readout", "--weights", "KV"), "QK"),
    Command("a readout of no tokens", ("readout", "--k", "0"), "k"),
    Command("a work that is unknown", ("reproduce", "newton"), "newton|song-zhong"),
    Command("a row that is unknown", ("reproduce", "song-zhong", "--row", "GPT-9"), "row"),
    Command("an experiment that is unknown", ("experiment", "cooking"), "cooking|addition"),
    Command("a scale that is unknown", ("experiment", "addition", "--scale", "huge"), "scale|huge"),
    Command(
        "a setting that is unknown",
        ("experiment", "addition", "--scale", "smoke", "--set", "salt=1"),
        "salt|setting",
    ),
    Command(
        "a setting without a value",
        ("experiment", "addition", "--scale", "smoke", "--set", "steps"),
        "steps|setting",
    ),
]


def outcome(given: Call, world: World) -> dict[str, Any]:
    """What came of one call: taken (and as it should be), refused with a text, or an error that no
    user should see; and traces left."""
    before = next(iter(world.model.parameters())).clone()
    try:
        found: dict[str, Any] = {"taken": bool(given.check(world, given.call(world)))}
    except GeometryError as error:
        found = {"refused": str(error)}
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    parts = [path.name for path in world.folder.rglob("*.part")]
    same = torch.equal(before, next(iter(world.model.parameters())))
    return found | {"parts": parts, "weights": same, "hooks": list(tlg.view(world.model).hooked())}


def main() -> None:
    """All calls, in order, as JSON on standard output."""
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 12, n=10)
    basis = tlg.decompose(model, windows, progress=False)
    split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    table = tlg.sweep_heads(model, windows, basis, progress=False)
    from tests.tiny import tiny

    made = {
        "model": model,
        "windows": windows,
        "basis": basis,
        "split": split,
        "table": table,
        "other": tiny("bridge", "llama"),
    }
    found = []
    for given in CALLS:
        with tempfile.TemporaryDirectory() as folder:
            found.append(outcome(given, World(**made, folder=Path(folder))))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
