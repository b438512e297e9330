"""What one input is: a call or a command, the world it is called in, and small ways to call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tl_geometry as tlg

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

    def graph(self, tokens: Any = None) -> Any:
        return tlg.trace_logit(self.model, self.ids[:1] if tokens is None else tokens, 5, keep=0.3)

    def knockouts(self) -> Any:
        options: dict[str, Any] = {"heads": "L1H0", "controls": 0, "progress": False}
        return tlg.interventions.head_knockouts(
            self.model, self.ids[:2], targets=[(5, 9)] * 2, **options
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


def entered(context: Any, model: Any, tokens: torch.Tensor) -> Any:
    with context:
        return model(tokens)


def missing(module: Any) -> bool:
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
