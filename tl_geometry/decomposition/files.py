"""The file of a basis: its header fields and tensors by name, and how those of earlier versions are
read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.files import read_file, refuse_unknown
from tl_geometry.base.records import decode
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition.largest import Largest
from tl_geometry.decomposition.moments import SETTINGS, Moments
from tl_geometry.decomposition.reservoir import Reservoir

HEADER = (
    "schema",
    "provenance",
    "states",
    "window",
    "names",
    "product_dtype",
    "reservoir",
    "largest_texts",
    "contiguous",
    "checksum",
)
"""Fields of the header."""
PLAIN = ("context_means", "labels", "token_hashes")
"""Tensors that are fields of a basis themselves."""
GROUPS = {
    "moments": tuple(f.name for f in dataclasses.fields(Moments) if f.name not in SETTINGS),
    "reservoir": ("priorities", "contexts", "states", "tokens"),
    "largest": tuple(f.name for f in dataclasses.fields(Largest)),
}
"""Tensors of the records inside a basis, in a file under ``record|field``."""
TENSORS = (*PLAIN, *(f"{group}|{name}" for group, names in GROUPS.items() for name in names))
"""Names of all tensors."""
RENAMED = {"moments|pilot": "moments|shift"}
"""What earlier versions called a tensor -> what it is called now."""


def read(
    path: str | Path, *schemas: str, more: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file of one of ``schemas``, under the names of this version; fields
    that it does not know (but for ``more``) are refused."""
    header, found = read_file(path, *schemas)
    tensors = {RENAMED.get(name, name): value for name, value in found.items()}
    refuse_unknown(path, header, (*HEADER, more), "fields")
    refuse_unknown(path, tensors, TENSORS, "tensors")
    return header, tensors


def tensors_of(
    plain: Mapping[str, Tensor | None],
    moments: Moments,
    sample: Reservoir | None,
    top: Largest | None,
) -> dict[str, Tensor]:
    """Everything of a basis that is stored as a tensor, by its name in the file."""
    held = {"moments": moments.tensors(), "largest": {} if top is None else top.tensors()}
    if sample is not None and sample.states is not None:
        held["reservoir"] = sample.tensors()
    found = {f"{group}|{name}": v for group, values in held.items() for name, v in values.items()}
    return found | {name: value for name, value in plain.items() if value is not None}


def fields_of(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of a basis from the header and the tensors of its file.

    Files of earlier versions say nothing of the dtype of products (it was float32), of the largest
    tokens, and of groups (a context's group was its index modulo their number).
    """
    held: dict[str, dict[str, Any]] = {
        group: {n: tensors[f"{group}|{n}"] for n in names if f"{group}|{n}" in tensors}
        for group, names in GROUPS.items()
    }
    fields: Any = decode(header["provenance"], {}, {})
    provenance, sample = Provenance(**fields), header["reservoir"]
    dtype = getattr(torch, header.get("product_dtype", "float32"))
    return {
        "provenance": provenance,
        "states": tuple(header["states"]),
        "moments": Moments.of(header["window"], held["moments"], dtype),
        "names": tuple(header["names"]),
        "reservoir": Reservoir(**sample, **held["reservoir"]) if sample["size"] else None,
        "largest": Largest(**held["largest"]) if held["largest"] else None,
        "largest_texts": tuple(tuple(row) for row in header.get("largest_texts", ())),
        "contiguous": header.get("contiguous", False),
        **{name: tensors.get(name) for name in PLAIN},
    }
