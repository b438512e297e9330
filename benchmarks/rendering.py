"""Size and time of the figure of a split: pages that open offline, against circuitsvis with the
same planes where that is possible."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch

import tl_geometry as tlg
from benchmarks.harness import Row, interleave
from tl_geometry import zoo

SIZES = {"smoke": ((16,), 1), "cpu": ((32, 64, 128), 3), "gpu": ((32, 64, 128), 3)}
"""Lengths of the prompt, rounds."""


def circuitsvis_page(split: Any, texts: list[str]) -> str:
    """The groups of terms, the total and the pattern of the first layer's heads, an
    ``attention_heads`` figure of circuitsvis each."""
    heads = importlib.import_module("circuitsvis.attention").attention_heads
    planes = [*(sum_of(split, terms) for terms in groups(split).values()), split.pattern()[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return "".join(
            heads(tokens=texts, attention=torch.nan_to_num(p, neginf=0.0)).local_src for p in planes
        )


def groups(split: Any) -> dict[str, list[tuple[str, str]]]:
    """Terms by whether a context part is on the query and on the key side."""
    found: dict[str, list[tuple[str, str]]] = {}
    for query, key in split.terms:
        found.setdefault(
            f"{'c' if query == 'cvec' else 'p'}{'c' if key == 'cvec' else 'p'}", []
        ).append((query, key))
    return found


def sum_of(split: Any, terms: list[tuple[str, str]]) -> torch.Tensor:
    """One plane ``[head query key]``: the sum of some terms."""
    return torch.stack([split.terms[t][0] for t in terms]).sum(0)


def run(size: str) -> list[Row]:
    """Pages of one layer's heads; without the views of splits there is nothing to measure."""
    try:
        render = importlib.import_module("tl_geometry.render").split
    except AttributeError:
        return []
    lengths, rounds = SIZES[size]
    view = tlg.view(zoo.embedded())
    tokens = torch.randint(
        1, view.d_vocab, (8, max(lengths)), generator=torch.Generator().manual_seed(0)
    )
    basis = tlg.decompose(view, tokens, second_moments=False, progress=False)
    rows: list[Row] = []
    for length in lengths:
        ids = tokens[:1, :length]
        split = tlg.split_scores(view, ids, basis, layers=[0])
        texts = view.decode(ids[0].tolist())
        page = render(split, tokens=texts).html()
        assert "http://" not in page.replace("http://www.w3.org", ""), "the page needs a network"
        theirs = circuitsvis_page(split, texts)
        notes = {
            "circuitsvis": f"{len(theirs) / 1e6:.2f} MB",
            "render.split": f"{len(page) / 1e6:.2f} MB",
        }
        routes = {
            "circuitsvis": lambda split=split, texts=texts: circuitsvis_page(split, texts),
            "render.split": lambda split=split, texts=texts: render(split, tokens=texts).html(),
        }
        rows += interleave(
            f"render {len(split.heads)} heads x {length}", routes, rounds=rounds, notes=notes
        )
    return rows
