"""How do the fields of a result become JSON and named tensors, and fields again? Results and
checkpoints call :func:`encode` and :func:`decode`. A field may hold tensors, mappings, and records
(dataclasses and named tuples) of these.

Each tensor gets a name (``moments|sums``), to which the JSON refers. A record is read back only as
a class that the field's annotation names: a file cannot choose what is built.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.errors import require

TENSOR, RECORD, MAPPING, DTYPE = "$tensor", "$record", "$mapping", "$dtype"
"""Keys of JSON objects that stand for a tensor, a record, a mapping whose keys are tuples, a
dtype."""


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A value as JSON; its tensors go into ``tensors``, under ``name`` and below.

    >>> tensors = {}
    >>> encode({"a": torch.zeros(2), "b": (1, "x")}, "parts", tensors), list(tensors)
    ({'a': {'$tensor': 'parts|a'}, 'b': [1, 'x']}, ['parts|a'])
    """
    if isinstance(value, Tensor):
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, torch.dtype):
        return {DTYPE: str(value).removeprefix("torch.")}
    # before lists and tuples: a named tuple is a tuple too
    if _is_record(type(value)):
        fields = {field: getattr(value, field) for field in _fields(type(value))}
        return {RECORD: type(value).__name__, **_encoded(fields, name, tensors)}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return _encoded(value, name, tensors)
    if isinstance(value, Mapping):
        keys_fit, got = all(isinstance(key, tuple) for key in value), repr(list(value)[:3])
        require(keys_fit, name, expected="keys that are all strings or all tuples", got=got)
        items = encode(list(value.values()), name, tensors)
        return {MAPPING: [[list(key), item] for key, item in zip(value, items, strict=True)]}
    if isinstance(value, list | tuple):
        return [encode(v, f"{name}|{i}", tensors) for i, v in enumerate(value)]
    return value


def _encoded(value: Mapping[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {key: encode(item, f"{name}|{key}", tensors) for key, item in value.items()}


def decode(value: Any, tensors: Mapping[str, Tensor], known: Mapping[str, type]) -> Any:
    """The inverse of :func:`encode` (lists become tuples); ``known`` are the classes of records
    that may be built."""
    if isinstance(value, list):
        return tuple(decode(v, tensors, known) for v in value)
    if not isinstance(value, dict):
        return value
    if TENSOR in value:
        return tensors[value[TENSOR]]
    if DTYPE in value:
        return getattr(torch, value[DTYPE])
    if MAPPING in value:
        return {tuple(k): decode(v, tensors, known) for k, v in value[MAPPING]}
    if RECORD not in value:
        return {k: decode(v, tensors, known) for k, v in value.items()}
    name = value[RECORD]
    require(name in known, "record", expected=f"one of {', '.join(known)}", got=repr(name))
    cls = known[name]
    # records inside a record are those that its own annotations name
    inside = {**known, **records_of(cls)}
    fields = {k: v for k, v in value.items() if k != RECORD}
    unknown = ", ".join(sorted(set(fields) - set(_fields(cls))))
    require(not unknown, name, expected="fields of this version", got=unknown)
    return cls(**{k: decode(v, tensors, inside) for k, v in fields.items()})


def references(value: Any) -> Iterator[str]:
    """Names of all tensors that encoded JSON refers to."""
    if isinstance(value, dict) and TENSOR in value:
        yield value[TENSOR]
    elif isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from references(inside)


def records_of(cls: type) -> dict[str, type]:
    """Classes of records that the annotations of a class name."""
    classes: dict[str, type] = {}
    for base in cls.__mro__:
        names = vars(sys.modules[base.__module__])
        for annotation in vars(base).get("__annotations__", {}).values():
            for word in re.findall(r"\w+", str(annotation)):
                if isinstance(names.get(word), type) and _is_record(names[word]):
                    classes[word] = names[word]
    return classes


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))


def _fields(cls: Any) -> tuple[str, ...]:
    """Names of the fields that are saved: those that the constructor takes."""
    if not dataclasses.is_dataclass(cls):
        return cls._fields
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)
