"""What a row of the refusal tables is: a call that a user makes by mistake, or in good faith, and
whether it is taken or refused, with which class of error and about what (``error.what``).

No sentence is pinned. A :class:`Group` holds calls that differ in one thing each: those of
``right`` are taken, those of ``wrong`` are refused. They are made as a user would, in a process of
its own (:mod:`tests.tables.refusals.__main__`), without the checks of annotations that tests
switch on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import tl_geometry as tlg
from tests.lib.worlds import World, world

Options = Mapping[str, Any]
"""Options of a call. A function stands for its value on the scene."""
Wrong = tuple[Options, str] | tuple[Options, str, type[tlg.GeometryError]]
"""What is given, what the refusal is about, and its class where it is not ``GeometryError``."""
NOT_A_BASIS = "basis.safetensors"
"""What is often given where a basis is meant: its path."""
NAN = float("nan")


@dataclass(frozen=True)
class Scene:
    """What calls are made of: the embedded model with its inputs and results, one of another kind,
    and a scratch folder."""

    folder: Path

    @property
    def w(self) -> World:
        """The embedded model, which has a tokenizer and learned positions."""
        return world("embedded")

    @property
    def rotary(self) -> World:
        """A tiny Llama with grouped keys."""
        return world("llama")

    @property
    def model(self) -> Any:
        return self.w.model

    @property
    def ids(self) -> torch.Tensor:
        """Three prompts of 18 tokens."""
        return self.w.ids

    @property
    def windows(self) -> tlg.TokenWindows:
        return tlg.TokenWindows(tokens=self.w.corpus, has_bos=True)

    @property
    def d_model(self) -> int:
        return self.model.cfg.d_model

    def logits(self, edit: Any, ids: torch.Tensor | None = None, model: Any = None) -> torch.Tensor:
        """The logits under an edit."""
        with edit, torch.no_grad():
            return (model or self.model)(self.ids if ids is None else ids, return_type="logits")

    def path(self, name: str, content: str | bytes = "") -> Path:
        """A file with this content."""
        found = self.folder / name
        found.write_bytes(content if isinstance(content, bytes) else content.encode())
        return found


def taken(_scene: Scene, value: Any) -> bool:
    """The call gives something."""
    return value is not None


@dataclass(frozen=True)
class Row:
    """One call. It is refused where ``what`` (a regular expression) is given, else taken with a
    value that ``holds``."""

    name: str
    call: Callable[[Scene], Any]
    what: str | None = None
    error: type[tlg.GeometryError] = tlg.GeometryError
    holds: Callable[[Scene, Any], bool] = taken


@dataclass(frozen=True, kw_only=True)
class Group:
    """Calls of one function: ``right`` and ``wrong`` options by name, added to ``base``. A row that
    is no set of options is a value of the parameter ``of``, and where it is wrong the refusal is
    ``about`` it (or what is said). ``twin`` says where right input is tried, if not here."""

    name: str
    call: Callable[..., Any]
    right: Mapping[str, Any]
    wrong: Mapping[str, Any]
    holds: Callable[[Scene, Any], bool] = taken
    twin: str = ""
    of: str = ""
    about: str = ""
    base: Options = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        for name, options in self.right.items():
            yield Row(f"{self.name}: {name}", self._made(options), holds=self.holds)
        for name, given in self.wrong.items():
            named = isinstance(given, tuple) and isinstance(given[0], Mapping)
            case: Any = given if named else (given, self.about or self.of)
            yield Row(f"{self.name}: {name}", self._made(case[0]), *case[1:])

    def _made(self, options: Any) -> Callable[[Scene], Any]:
        changed = options if isinstance(options, Mapping) else {self.of: options}

        def call(scene: Scene) -> Any:
            given = {**self.base, **changed}
            values = {k: v(scene) if callable(v) else v for k, v in given.items()}
            return self.call(scene, **values)

        return call


def calls(
    name: str, right: Mapping[str, Callable[[Scene], Any]], wrong: Mapping[str, tuple[Any, ...]]
) -> Group:
    """Whole calls, each by its name; a wrong one with what is refused (and the class)."""
    taken, refused = {n: {"found": c} for n, c in right.items()}, dict[str, Any]()
    for case, (call, *what) in wrong.items():
        refused[case] = ({"found": call}, *what)
    return Group(name=name, call=lambda s, found: found, right=taken, wrong=refused)


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line that is refused: exit code 2, and a line about ``what``. ``files`` are made
    in the working folder first."""

    name: str
    words: tuple[str, ...]
    what: str
    files: Mapping[str, bytes] = field(default_factory=dict)
