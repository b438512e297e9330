"""Bases: settings, activations, what is asked of them, merging, files."""

from __future__ import annotations

import re
from typing import Any

import torch

import tl_geometry as tlg
from tests.tables.refusals.row import NAN, NOT_A_BASIS, Group, Scene


def fitted(s: Scene, tokens: Any = None, **options: Any) -> Any:
    tokens = s.w.corpus if tokens is None else tokens
    return tlg.decompose(s.model, tokens, progress=False, **options)


def of_activations(s: Scene, source: Any = None, **options: Any) -> Any:
    return tlg.decompose_activations(noise(4, 5, 6) if source is None else source, **options)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def merged(s: Scene, parts: Any) -> Any:
    return tlg.PositionContext.merge(parts)


def halves(s: Scene, **options: Any) -> list[Any]:
    return [fitted(s, rows, **options) for rows in s.w.corpus.split(20)]


def loaded(s: Scene, path: Any) -> Any:
    return tlg.PositionContext.load(path)


GROUPS = (
    Group(
        name="settings of decompose",
        call=fitted,
        of="states",
        right={
            "plain": {},
            "states by number": [0, 2],
            "a window": {"window": (2, 8)},
            "labels": {"labels": lambda s: [i % 3 for i in range(len(s.w.corpus))]},
        },
        wrong={
            "a state twice": [1, 1],
            "a window of halves": ({"window": (1.5, 8.0)}, "window"),
            "a window beyond the positions": ({"window": (1, 99)}, "window"),
            "a window the wrong way": ({"window": (8, 1)}, "window"),
            "too few labels": ({"labels": [0]}, "labels"),
            "labels below zero": ({"labels": lambda s: [-1] * len(s.w.corpus)}, "labels"),
        },
    ),
    Group(
        name="activations",
        call=of_activations,
        holds=lambda s, found: found.contexts >= 1,
        of="source",
        about="activations",
        right={
            "a tensor": {},
            "with gradients": lambda s: noise(4, 5, 6).requires_grad_(),
            "in half precision": lambda s: noise(4, 5, 6).half(),
            "of several states": lambda s: noise(2, 4, 5, 6),
            "a cache": lambda s: s.w.cache,
            "one context": lambda s: noise(1, 5, 6),
            "a window": {"window": (1, 4)},
        },
        wrong={
            "NaN": lambda s: torch.full((4, 5, 6), NAN),
            "integers": lambda s: torch.ones(4, 5, 6).long(),
            "two axes": lambda s: noise(4, 5),
            "no contexts": lambda s: noise(0, 5, 6),
            "a window beyond": ({"window": (1, 9)}, "window"),
            "labels of other contexts": ({"labels": [0, 1]}, "labels"),
            "a cache of one layer": (
                {"source": lambda s: {"blocks.0.hook_resid_pre": noise(4, 5, 6)}},
                "cache",
            ),
            "a cache without a batch": (
                {"source": lambda s: s.model.run_with_cache(s.ids[:1], remove_batch_dim=True)[1]},
                "cache",
            ),
        },
    ),
    Group(
        name="what a basis is asked for",
        call=lambda s, ask: ask(s.w.basis),
        right={
            "pos at a position": {"ask": lambda s: lambda b: b.pos_at(3)},
            "variance": {"ask": lambda s: lambda b: b.anova()},
            "a moment": {"ask": lambda s: lambda b: b.second_moment(1)},
        },
        wrong={
            "pos beyond the positions": ({"ask": lambda s: lambda b: b.pos_at(99)}, "position"),
            "a moment of no state": ({"ask": lambda s: lambda b: b.second_moment(99)}, "state"),
            "a path as a null": ({"ask": lambda s: lambda b: b.anova(null=NOT_A_BASIS)}, "null"),
            "a null of other states": (
                {"ask": lambda s: lambda b: b.anova(null=fitted(s, states=[0]))},
                "state",
            ),
        },
    ),
    Group(
        name="transform",
        call=lambda s, activations: s.w.basis.transform(activations),
        of="activations",
        right={"the model's own states": lambda s: s.w.stream()},
        wrong={
            "fewer states": lambda s: s.w.stream()[:2],
            "another width": lambda s: s.w.stream()[..., :5],
            "NaN": lambda s: s.w.stream() * NAN,
        },
    ),
    Group(
        name="merge",
        call=merged,
        holds=lambda s, found: torch.allclose(found.pos, s.w.basis.pos, atol=1e-5),
        of="parts",
        about="merge",
        right={"two halves": halves, "a generator": lambda s: (part for part in halves(s))},
        wrong={
            "nothing": [],
            "one basis without a list": lambda s: s.w.basis,
            "a path among bases": lambda s: [s.w.basis, NOT_A_BASIS],
            "the same contexts twice": lambda s: [s.w.basis, s.w.basis],
            "another window": lambda s: [s.w.basis, fitted(s, s.w.fresh, window=(2, 9))],
            "another model": lambda s: [s.w.basis, s.rotary.basis],
            "one of them normalised": lambda s: [s.w.basis, fitted(s, s.w.fresh, normalize=True)],
        },
    ),
    Group(
        name="a file that is read",
        call=loaded,
        holds=lambda s, found: found.contexts == 40,
        of="path",
        about="file",
        right={"of a basis": lambda s: s.w.basis.save(s.folder / "b.safetensors")},
        wrong={
            "nothing there": lambda s: s.folder / "none.safetensors",
            "one byte changed": ({"path": lambda s: altered(s)}, "safetensors|file"),
            "another shape": ({"path": lambda s: altered(s, shape=True)}, "safetensors|file"),
            "cut": ({"path": lambda s: cut(s)}, "safetensors|file"),
            "another result": (
                {"path": lambda s: s.w.sweep.save(s.folder / "t.safetensors")},
                "safetensors",
            ),
        },
    ),
)


def altered(s: Scene, shape: bool = False) -> Any:
    """A basis whose file has one other byte among its numbers, or two axes exchanged."""
    path = s.w.basis.save(s.folder / "b.safetensors")
    content = bytearray(path.read_bytes())
    content[-9] ^= 0 if shape else 64
    turned = re.sub(rb'"shape":\[(\d+),(\d+),', rb'"shape":[\2,\1,', content)
    path.write_bytes(turned if shape else content)
    return path


def cut(s: Scene) -> Any:
    """A basis whose file is half as long."""
    path = s.w.basis.save(s.folder / "b.safetensors")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path
