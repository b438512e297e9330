"""What do tables of tests ask of a result? All that it offers, by no name of a field; its table,
the cells of its page, and the same result with another text in it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from typing import Any

import numpy as np
import torch

import tl_geometry as tlg

HOSTILE = "<script>alert('x')</script>\"&\ud800\u202e\x1b[31m%_$\\"
WRITES = ("save", "load", "to_mib")
"""Methods that read or write files."""


def offered(result: Any) -> list[str]:
    """The public fields, properties and methods without arguments of a result."""
    found = []
    for name in dir(result):
        member = inspect.getattr_static(result, name)
        if name.startswith("_") or name in WRITES or isinstance(member, staticmethod | classmethod):
            continue
        if inspect.isfunction(member):
            parameters = list(inspect.signature(member).parameters.values())[1:]
            if any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters):
                continue
        found.append(name)
    return found


def ask(result: Any, name: str) -> Any:
    """The answer of a result. What is refused by name is an answer too."""
    try:
        value = getattr(result, name)
        return value() if inspect.ismethod(value) else value
    except tlg.GeometryError as error:
        return f"refused: {error.what}"


def asked(result: Any) -> dict[str, Any]:
    """All answers of a result."""
    return {name: ask(result, name) for name in offered(result)}


def different(a: Any, b: Any, depth: int = 0) -> str:
    """Where two answers differ, or nothing."""
    if type(a) is not type(b):
        return f"{type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return "" if same and torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) else "numbers"
    if isinstance(a, np.ndarray):
        return "" if np.array_equal(a, b, equal_nan=a.dtype.kind == "f") else "numbers"
    if type(a).__name__ == "DataFrame":
        return "" if a.equals(b) else "a table"
    if isinstance(a, Mapping):
        a, b = [list(a), *a.values()], [list(b), *b.values()]
    elif dataclasses.is_dataclass(a):
        names = [f.name for f in dataclasses.fields(a) if not f.name.startswith("_")]
        a, b = ([getattr(each, name) for name in names] for each in (a, b))
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return "lengths"
        pairs = (different(x, y, depth + 1) for x, y in zip(a, b))
        return next(filter(None, pairs), "")
    if isinstance(a, float) and math.isnan(a):
        return "" if math.isnan(b) else "NaN"
    plain = isinstance(a, str | int | float | bool | bytes | complex | None | set | frozenset)
    return "" if not plain or a == b else f"{a!r} and {b!r}"


def frame(result: Any) -> Any:
    """The table of a result."""
    return result.df if hasattr(result, "df") else result.to_dataframe()


class Cells(HTMLParser):
    """The rows of the tables of a page, its tags and its text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.rows: list[list[str]] = []
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("td", "th")
        if self.inside and self.rows:
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th", "tr")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.inside and self.rows:
            self.rows[-1][-1] += data


def with_text(result: Any, text: str) -> Iterator[Any]:
    """The same result with this text in one of its texts at a time, and in its corpus."""
    yield dataclasses.replace(
        result, provenance=dataclasses.replace(result.provenance, corpus=text, flags=(text,))
    )
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        if isinstance(value, str):
            value = text
        elif isinstance(value, tuple) and value and all(isinstance(x, str) for x in value):
            value = (text, *value[1:])
        else:
            continue
        # names of parts or panels are no free text: a result that they no longer fit is none
        with contextlib.suppress(Exception):
            changed = dataclasses.replace(result, **{field.name: value})
            frame(changed)
            yield changed


def arrays(value: Any, depth: int = 0) -> Iterator[Any]:
    """The tensors and arrays that an answer holds."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping | list | tuple) and depth < 3:
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from arrays(each, depth + 1)
    elif hasattr(value, "to_numpy"):  # a DataFrame
        yield from (value[name].to_numpy() for name in value)
