"""A dataclass that holds arrays is compared by identity (of two tensors ``==`` is no truth). None
changes but those that are filled in step by step. Results take their fields by name."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from typing import Any

import pytest

import tl_geometry
from tl_geometry.base.results import Provenance, Result
from tl_geometry.zoo.inputs import Inputs

ARRAYS = {"Tensor", "Float", "Int", "Bool", "ndarray"}
MAY_CHANGE = {
    *("corpus.sources.TokenSource", "models.layers.Layers", "models.writers.HeadWrites"),
    *("models.forward.Runner", "models.live_edits.OpenEdit", "models.parameters.Parameters"),
    *("render.figure.View", "render.page.PageView", "render.space.SpaceView"),
}
"""Readers of a corpus and of a model, and figures, whose texts a report replaces."""


def _dataclasses() -> dict[str, Any]:
    found = {}
    for module in pkgutil.walk_packages(tl_geometry.__path__, f"{tl_geometry.__name__}."):
        if not module.name.endswith("__main__"):
            for _, member in inspect.getmembers(importlib.import_module(module.name)):
                package, _, rest = getattr(member, "__module__", "").partition(".")
                if inspect.isclass(member) and dataclasses.is_dataclass(member):
                    found[f"{rest}.{member.__qualname__}"] = member, package
    return {name: cls for name, (cls, package) in found.items() if package == "tl_geometry"}


def _with_arrays(classes: dict[str, Any]) -> dict[str, Any]:
    """Those with a field that is an array, or a dataclass with arrays."""
    words = {
        name: {w for f in dataclasses.fields(cls) for w in re.findall(r"\w+", str(f.type))}
        for name, cls in classes.items()
    }
    found: set[str] = set()
    known = set(ARRAYS)
    while new := {name for name in classes if name not in found and words[name] & known}:
        found |= new
        known |= {name.rpartition(".")[2] for name in new}
    return {name: classes[name] for name in found}


def _wrong(classes: dict[str, Any]) -> set[str]:
    with_arrays = _with_arrays(classes)
    by_value = {n for n, cls in with_arrays.items() if cls.__dataclass_params__.eq}
    may_change = {n for n, cls in classes.items() if not cls.__dataclass_params__.frozen}
    return by_value | may_change - MAY_CHANGE


def test_of_the_package() -> None:
    classes = _dataclasses()
    assert len(_with_arrays(classes)) > 100
    assert _wrong(classes) == set()


@pytest.mark.parametrize("options", [{"frozen": True}, {"eq": False}])
def test_a_class_that_is_compared_or_changes_is_found(options: dict[str, bool]) -> None:
    class Inner:
        """Holds an array."""

    class Outer:
        """Holds what holds an array."""

    Inner.__annotations__ = {"x": "Float[Tensor, 'n']"}
    Outer.__annotations__ = {"inner": "list[Inner]"}
    good, bad = dataclasses.dataclass(frozen=True, eq=False), dataclasses.dataclass(**options)
    assert _wrong({"a.Inner": good(Inner), "a.Outer": bad(Outer)}) == {"a.Outer"}


def _by_place(classes: dict[str, Any]) -> set[str]:
    """Results and parts of a report with a field that may be given without its name."""
    return {
        name
        for name, cls in classes.items()
        if issubclass(cls, (Result, Provenance, Inputs)) or name.startswith("report.")
        if any(field.init and not field.kw_only for field in dataclasses.fields(cls))
    }


def test_results_take_their_fields_by_name() -> None:
    assert _by_place(_dataclasses()) == set()


def test_a_result_with_a_field_by_place_is_found() -> None:
    class Planted(Result):
        """Has one field of its own."""

    Planted.__annotations__ = {"x": "int"}
    assert _by_place({"by place": dataclasses.dataclass(frozen=True)(Planted)}) == {"by place"}
