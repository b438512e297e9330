"""Tokens, windows of text, prompts and null corpora."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
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
        right={
            "a tensor": {"tokens": lambda s: s.w.corpus},
            "int32": {"tokens": lambda s: s.w.corpus.int()},
            "not contiguous": {"tokens": lambda s: s.w.corpus.T.contiguous().T},
            "windows": {"tokens": lambda s: s.windows},
            "lists": {"tokens": lambda s: s.w.corpus.tolist()},
            "a list of rows": {"tokens": lambda s: list(s.w.corpus)},
            "numpy": {"tokens": lambda s: s.w.corpus.numpy().astype(np.uint16)},
            "batches of a generator": {"tokens": lambda s: (x for x in s.w.corpus.split(7))},
            "a loader": {"tokens": loader},
        },
        wrong={
            "floats": ({"tokens": lambda s: s.w.corpus.float()}, "tokens"),
            "truth values": ({"tokens": lambda s: s.w.corpus > 3}, "tokens"),
            "complex numbers": ({"tokens": lambda s: s.w.corpus.to(torch.complex64)}, "tokens"),
            "three axes": ({"tokens": lambda s: s.w.corpus[None]}, "tokens"),
            "no contexts": ({"tokens": lambda s: s.w.corpus[:0]}, "tokens"),
            "no positions": ({"tokens": lambda s: s.w.corpus[:, :0]}, "tokens"),
            "ragged lists": ({"tokens": [[1, 2, 3], [1, 2]]}, "tokens"),
            "strings among ids": ({"tokens": [[1, 2], [1, "b"]]}, "tokens|texts"),
            "a number": ({"tokens": 7}, "tokens"),
            "None": ({"tokens": None}, "tokens"),
            "an empty list": ({"tokens": []}, "tokens"),
            "an empty generator": ({"tokens": lambda s: iter(())}, "tokens"),
            "beyond the vocabulary": ({"tokens": lambda s: s.w.corpus + 5000}, "tokens"),
            "below zero": ({"tokens": lambda s: s.w.corpus - 5000}, "tokens"),
            "beyond 64 bits": ({"tokens": [[1, 2**70]]}, "tokens"),
            "beyond n_ctx": ({"tokens": lambda s: s.w.corpus.repeat(1, 20)}, "tokens"),
            "on the meta device": ({"tokens": lambda s: s.w.corpus.to("meta")}, "tokens"),
            "sparse": ({"tokens": lambda s: s.w.corpus.to_sparse()}, "tokens"),
            "nested": (
                {"tokens": lambda s: torch.nested.nested_tensor(list(s.w.corpus))},
                "tokens",
            ),
            "a cache": ({"tokens": lambda s: s.model.run_with_cache(s.ids)[1]}, "tokens|hook"),
            "a basis": ({"tokens": lambda s: s.w.basis}, "tokens"),
            "what a tokenizer returns": ({"tokens": tokenized}, "tokens"),
            "a data set of records": ({"tokens": lambda s: columns([{"label": 1}])}, "tokens"),
            "a path": ({"tokens": lambda s: s.path("a.txt", CODE)}, "tokens"),
            "a path to nothing": ({"tokens": lambda s: s.folder / "no.npy"}, "tokens"),
            "texts of unequal length": (
                {"tokens": lambda s: ["a b c d", "a"]},
                "tokens",
            ),
        },
    ),
    Group(
        name="BOS of ids",
        call=lambda s, prepend_bos=None: tlg.decompose(
            s.model, s.w.corpus, prepend_bos=prepend_bos, progress=False
        ),
        right={"as they are": {}},
        wrong={
            "to be added": ({"prepend_bos": True}, "prepend_bos"),
            "in words": ({"prepend_bos": "no"}, "prepend_bos"),
        },
    ),
    Group(
        name="windows",
        call=windows,
        holds=lambda s, found: found.tokens.shape[1] == 8 and bool(found.has_bos),
        right={
            "a text": {},
            "texts": {"texts": [CODE, CODE]},
            "some": {"n": 3, "seed": 5},
            "a file": {"texts": lambda s: s.path("a.txt", CODE)},
            "a file with a byte order mark": {
                "texts": lambda s: s.path("a.txt", b"\xef\xbb\xbf" + CODE.encode())
            },
            "a column": {"texts": lambda s: columns([{"text": CODE}])["text"]},
            "labels": {"texts": [CODE, CODE], "labels": [0, 1]},
        },
        wrong={
            "length 0": ({"length": 0}, "length"),
            "length 1": ({"length": 1}, "length"),
            "length 2.5": ({"length": 2.5}, "length"),
            "a length in words": ({"length": "8"}, "length"),
            "a true length": ({"length": True}, "length"),
            "none of them": ({"n": 0}, "^n$"),
            "half a window": ({"n": 2.5}, "^n$"),
            "more than there are": ({"n": 9999}, "^n$"),
            "a seed below zero": ({"n": 2, "seed": -1}, "seed"),
            "a seed in words": ({"n": 2, "seed": "x"}, "seed"),
            "an empty text": ({"texts": ""}, "texts"),
            "no texts": ({"texts": []}, "texts"),
            "None": ({"texts": None}, "texts"),
            "too short a text": ({"texts": "x"}, "texts"),
            "bytes": ({"texts": CODE.encode()}, "texts"),
            "a text among numbers": ({"texts": [CODE, 7]}, "texts"),
            "half a surrogate pair": ({"texts": "abc \ud800 " * 99}, "texts"),
            "a path to nothing": ({"texts": Path("no.txt")}, "texts"),
            "a folder": ({"texts": lambda s: s.folder}, "texts"),
            "an empty file": ({"texts": lambda s: s.path("a.txt")}, "texts"),
            "a binary file": ({"texts": lambda s: s.path("a.txt", b"abc\0" * 99)}, "texts"),
            "a file that is no UTF-8": (
                {"texts": lambda s: s.path("a.txt", "caf\xe9 ".encode("latin-1") * 99)},
                "texts",
            ),
            "a file of ids": ({"texts": lambda s: s.path("a.npy", b"\x93NUMPY")}, "texts"),
            "a data set without text": ({"texts": lambda s: columns([{"a": 1}])}, "texts"),
            "labels for fewer texts": ({"labels": ["a", "b"]}, "labels"),
            "BOS in words": ({"prepend_bos": "no"}, "prepend_bos"),
        },
    ),
    Group(
        name="rows of windows",
        call=lambda s, rows: s.windows[rows],
        holds=lambda s, found: len(found) == 2,
        right={
            "a slice": {"rows": slice(0, 2)},
            "numbers": {"rows": torch.tensor([3, 1])},
            "a mask": {"rows": lambda s: torch.arange(len(s.windows)) < 2},
        },
        wrong={"none": ({"rows": slice(0, 0)}, "tokens")},
    ),
    Group(
        name="TokenWindows",
        call=lambda s, **fields: tlg.TokenWindows(**{"tokens": s.ids, "has_bos": True, **fields}),
        right={"ids": {}, "labels": {"labels": torch.tensor([0, 1, 1])}},
        wrong={
            "lists": ({"tokens": lambda s: s.ids.tolist()}, "TokenWindows|tokens"),
            "floats": ({"tokens": lambda s: s.ids.float()}, "TokenWindows|tokens"),
            "sparse": ({"tokens": lambda s: s.ids.to_sparse()}, "TokenWindows|tokens"),
            "one row": ({"tokens": lambda s: s.ids[0]}, "TokenWindows|tokens"),
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
            "a position beyond": ({"positions": {"x": 99}}, "position"),
            "a position that is not there": ({"positions": {"x": "zz"}}, "position"),
        },
    ),
    Group(
        name="gibberish",
        call=lambda s, n=2, length=6, **o: corpus.gibberish(s.model, n, length, **o),
        right={"two": {}, "one length": {"n": 1, "length": 2}},
        wrong={
            "none": ({"n": 0}, "^n$|TokenWindows"),
            "no length": ({"length": 0}, "length|TokenWindows"),
        },
    ),
    Group(
        name="repeated random tokens",
        call=lambda s, **o: corpus.repeated_random_tokens(
            **{"period": 4, "copies": 2, "low": 5, "high": 60, **o}
        ),
        holds=lambda s, found: bool((found[:, :4] == found[:, 4:]).all()),
        right={"two copies": {}, "three rows": {"batch": 3}},
        wrong={
            "no period": ({"period": 0}, "sizes|period"),
            "no copies": ({"copies": 0}, "sizes|copies"),
            "a range without ids": ({"low": 9, "high": 3}, "low|high"),
            "a range of fewer ids than the period": ({"low": 5, "high": 7}, "low|high"),
        },
    ),
)
