"""Fields of a result as JSON and named tensors (:func:`encode`), and fields again
(:func:`decode`). A field may hold tensors, mappings, and records (dataclasses and named tuples) of
these.

Each tensor gets a name (``moments|sums``), to which the JSON refers. A record is read back only as
a class that the field's annotation names: a file cannot choose what is built.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tl_geometry.base.errors import require

TENSOR, RECORD, MAPPING = "$tensor", "$record", "$mapping"
"""Keys of JSON objects that stand for a tensor, a record, and a mapping whose keys are tuples."""


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors go into ``tensors``, under ``name`` and below.

    >>> import torch
    >>> tensors = {}
    >>> encode({"a": torch.zeros(2), "b": (1, "x")}, "parts", tensors), list(tensors)
    ({'a': {'$tensor': 'parts|a'}, 'b': [1, 'x']}, ['parts|a'])
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if names := fields_of(type(value)):  # before lists and tuples: a named tuple is a tuple too
        fields = {field: getattr(value, field) for field in names}
        return {RECORD: type(value).__name__, **encode(fields, name, tensors)}
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        items = encode(list(value.values()), name, tensors)
        return {MAPPING: list(zip(map(list, value), items, strict=True))}
    if isinstance(value, Mapping):
        return {key: encode(item, f"{name}|{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v, f"{name}|{i}", tensors) for i, v in enumerate(value)]
    return value


def decode(value: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]) -> Any:
    """The inverse of :func:`encode` (lists become tuples); ``known`` are the classes of records
    that may be built."""
    if isinstance(value, list):
        return tuple(decode(v, tensors, known) for v in value)
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if MAPPING in value:
        return {tuple(k): decode(v, tensors, known) for k, v in value[MAPPING]}
    if RECORD not in value:
        return {k: decode(v, tensors, known) for k, v in value.items()}
    fields = dict(value)
    name = fields.pop(RECORD)
    require(name in known, "record", expected=f"one of {', '.join(known)}", got=repr(name))
    # what a newer version wrote would be lost unseen
    unknown = ", ".join(sorted(set(fields) - set(fields_of(known[name]))))
    require(not unknown, name, expected="fields of this version", got=unknown)
    inside = {**known, **records_of(known[name])}
    return known[name](**{k: decode(v, tensors, inside) for k, v in fields.items()})


def records_of(cls: type) -> dict[str, type]:
    """Classes of records that the annotations of a class name."""
    classes: dict[str, type] = {}
    for base in cls.__mro__:
        names = vars(sys.modules[base.__module__])
        text = " ".join(map(str, vars(base).get("__annotations__", {}).values()))
        found = {word: names.get(word) for word in re.findall(r"\w+", text)}
        classes |= {n: c for n, c in found.items() if isinstance(c, type) and fields_of(c)}
    return classes


def fields_of(cls: Any) -> tuple[str, ...]:
    """Names of the fields of a record that its constructor takes; none for another class."""
    if not dataclasses.is_dataclass(cls):
        return getattr(cls, "_fields", ())
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)
