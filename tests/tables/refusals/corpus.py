"""Tokens, windows of text, prompts and null corpora."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

import tl_geometry as tlg
from tests.tables.refusals.row import Group, Scene
from tl_geometry import corpus

CODE = "def f(x):\n    return x + 1\n" * 40


def same_basis(s: Scene, found: Any) -> bool:
    """The basis of these very tokens."""
    return torch.allclose(found.pos, s.w.basis.pos, atol=1e-5)


def windows(s: Scene, texts: Any = CODE, length: Any = 8, **options: Any) -> tlg.TokenWindows:
    return tlg.windows(s.model, texts, length, **{"prepend_bos": True, **options})


def columns(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def loader(s: Scene) -> Any:
    rows: Any = list(s.w.corpus)
    return torch.utils.data.DataLoader(rows, batch_size=7, generator=torch.Generator())


def tokenized(s: Scene) -> dict[str, torch.Tensor]:
    """What a tokenizer returns: ids and a mask, which would be dropped."""
    return {"input_ids": s.w.corpus, "attention_mask": torch.ones_like(s.w.corpus)}


def prompts(s: Scene, texts: Any = ("a b", "c"), **options: Any) -> Any:
    return corpus.prompts(s.model, list(texts), **{"prepend_bos": True, **options})


GROUPS = (
    Group(
        name="tokens of decompose",
        call=lambda s, tokens: tlg.decompose(s.model, tokens, progress=False),
        holds=same_basis,
        of="tokens",
        right={
            "a tensor": lambda s: s.w.corpus,
            "int32": lambda s: s.w.corpus.int(),
            "not contiguous": lambda s: s.w.corpus.T.contiguous().T,
            "windows": lambda s: s.windows,
            "lists": lambda s: s.w.corpus.tolist(),
            "a list of rows": lambda s: list(s.w.corpus),
            "numpy": lambda s: s.w.corpus.numpy().astype(np.uint16),
            "batches of a generator": lambda s: (x for x in s.w.corpus.split(7)),
            "a loader": loader,
        },
        wrong={
            "three axes": lambda s: s.w.corpus[None],
            "no contexts": lambda s: s.w.corpus[:0],
            "strings among ids": ({"tokens": [[1, 2], [1, "b"]]}, "tokens|texts"),
            "an empty generator": lambda s: iter(()),
            "beyond the vocabulary": lambda s: s.w.corpus + 5000,
            "below zero": lambda s: s.w.corpus - 5000,
            "beyond 64 bits": [[1, 2**70]],
            "beyond n_ctx": lambda s: s.w.corpus.repeat(1, 20),
            "a cache": ({"tokens": lambda s: s.model.run_with_cache(s.ids)[1]}, "tokens|hook"),
            "a basis": lambda s: s.w.basis,
            "what a tokenizer returns": tokenized,
            "a data set of records": lambda s: columns([{"label": 1}]),
            "a path": lambda s: s.path("a.txt", CODE),
            "texts of unequal length": lambda s: ["a b c d", "a"],
        },
    ),
    Group(
        name="windows",
        call=windows,
        holds=lambda s, found: found.tokens.shape[1] == 8 and bool(found.has_bos),
        of="texts",
        right={
            "a text": {},
            "texts": [CODE, CODE],
            "some": {"n": 3, "seed": 5},
            "a file": lambda s: s.path("a.txt", CODE),
            "a file with a byte order mark": lambda s: s.path(
                "a.txt", b"\xef\xbb\xbf" + CODE.encode()
            ),
            "a column": lambda s: columns([{"text": CODE}])["text"],
            "a column after a filter": lambda s: pd.Series(["", CODE])[1:],
            "labels": {"texts": [CODE, CODE], "labels": [0, 1]},
        },
        wrong={
            "None": None,
            "too short a text": "x",
            "bytes": CODE.encode(),
            "half a surrogate pair": "abc \ud800 " * 99,
            "a folder": lambda s: s.folder,
            "a binary file": lambda s: s.path("a.txt", b"abc\0" * 99),
            "a file that is no UTF-8": lambda s: s.path("a.txt", "caf\xe9 ".encode("latin-1") * 99),
            "a file of ids": lambda s: s.path("a.npy", b"\x93NUMPY"),
            "a data set without text": lambda s: columns([{"a": 1}]),
            "a table": lambda s: pd.DataFrame({"text": [CODE]}),
            "BOS in words": ({"prepend_bos": "no"}, "prepend_bos"),
            "labels for fewer texts": ({"labels": ["a", "b"]}, "labels"),
        },
    ),
    Group(
        name="TokenWindows",
        call=lambda s, **fields: tlg.TokenWindows(**{"tokens": s.ids, "has_bos": True, **fields}),
        of="tokens",
        about="TokenWindows|tokens",
        right={"ids": {}, "labels": {"labels": torch.tensor([0, 1, 1])}},
        wrong={
            "lists": lambda s: s.ids.tolist(),
            "one row": lambda s: s.ids[0],
            "labels in a list": ({"labels": [0, 1, 1]}, "labels"),
            "too few labels": ({"labels": torch.tensor([0])}, "labels"),
        },
    ),
    Group(
        name="prompts",
        call=prompts,
        holds=lambda s, found: len(found) == 2,
        right={
            "two texts": {},
            "counterfactuals": {"counterfactuals": ["c d", "a"]},
            "an answer": {"answers": 5},
            "positions": {"positions": {"first": 1, "last": -1}},
            "ids of two lengths": {"texts": [[5, 6], [5, 6, 7]], "prepend_bos": None},
        },
        wrong={
            "none": ({"texts": []}, "tokens|prepend_bos"),
            "an empty text": ({"texts": ["a b", ""], "prepend_bos": False}, "texts"),
            "padding in a longer prompt": (
                {
                    "texts": lambda s: [[5, 6], [5] + [s.model.tokenizer.pad_token_id] * 2],
                    "prepend_bos": None,
                },
                "tokens",
            ),
            "a counterfactual too few": ({"counterfactuals": ["c d"]}, "counterfactuals"),
            "a longer counterfactual": (
                {"counterfactuals": ["a b", "c = 1 + 2 + 3"]},
                "counterfactuals",
            ),
            "an answer of no id": ({"answers": -1}, "answers"),
            "answers of other prompts": ({"answers": [5, 6, 7]}, "answers"),
            "three answers each": ({"answers": (5, 6, 7)}, "answers"),
            "a pair and an answer": ({"answers": [(5, 6), 7]}, "answers"),
            "others alone": ({"others": 5}, "answers"),
            "a position beyond": ({"positions": {"x": 99}}, "position"),
        },
    ),
)
