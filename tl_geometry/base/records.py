"""Records (dataclasses and named tuples) as JSON and named tensors (:func:`encode`), and records
again (:func:`decode`). A field may hold tensors, mappings, and records of these.

Each tensor gets a name (``result|moments|sums``), to which the JSON refers. A record names its
class, and only classes of this library (or the one that is asked for) are built from a file.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tl_geometry.base.errors import fail, require

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
        return {RECORD: named(type(value)), **encode(fields, name, tensors)}
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        items = encode(list(value.values()), name, tensors)
        return {MAPPING: list(zip(map(list, value), items, strict=True))}
    if isinstance(value, Mapping):
        return {key: encode(item, f"{name}|{key}", tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(v, f"{name}|{i}", tensors) for i, v in enumerate(value)]
    return value


def decode(value: Any, tensors: Mapping[str, Tensor], known: type | None = None) -> Any:
    """The inverse of :func:`encode` (lists become tuples); ``known`` is a class beside those of the
    library that may be built."""
    if isinstance(value, list):
        return tuple(decode(v, tensors, known) for v in value)
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if MAPPING in value:
        return {tuple(k): decode(v, tensors, known) for k, v in value[MAPPING]}
    fields = {k: decode(v, tensors, known) for k, v in value.items() if k != RECORD}
    if RECORD not in value:
        return fields
    try:
        return _class(value[RECORD], known)(**fields)
    except (ImportError, TypeError) as error:
        fail("file", expected="classes and fields of this version", got=str(error))


def named(cls: type) -> str:
    """A class as a file names it."""
    return f"{cls.__module__}:{cls.__name__}"


def _class(name: str, known: type | None) -> Any:
    """The class of a record, which has fields."""
    if known is not None and name == named(known):
        return known
    module, _, cls = name.partition(":")
    ours = module.startswith("tl_geometry.")
    found = getattr(importlib.import_module(module), cls, None) if ours else None
    require(fields_of(found), "file", expected="a result of tl_geometry", got=repr(name))
    return found


def fields_of(cls: Any) -> tuple[str, ...]:
    """Names of the fields of a record that its constructor takes; none for another class."""
    if not dataclasses.is_dataclass(cls):
        return getattr(cls, "_fields", ())
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)
