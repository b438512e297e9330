"""Tokens, settings and activations of a decomposition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import tl_geometry as tlg
from tests.bad_inputs.cases import (
    Call,
    columns,
    loader,
    same_pos,
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
    *[
        Call(
            f"{function.__name__}, batch_size {size}",
            lambda w, f=function, s=size: f(w.model, w.ids, batch_size=s),
            "batch_size",
        )
        for function in (tlg.trajectories, tlg.skip_map, tlg.token_paths)
        for size in (0, -3)
    ],
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
CALLS = [*TOKENS, *SETTINGS, *ACTIVATIONS]
