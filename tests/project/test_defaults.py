"""A parameter that many functions have is left out with the same effect in all of them."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import tl_geometry

DEFAULTS: dict[str, object] = {
    "batch_size": None,
    "force": False,
    "jackknife": True,
    "layers": None,
    "level": 0.95,
    "memory_budget": 2**31,
    "model_class": "bridge",
    "norm_type": "LN",
    "prepend_bos": None,
    "processed": False,
    "progress": True,
    "raw": False,
    "seed": 0,
    "seeds": (0,),
}
OTHERS = {
    "circuits.features.feature_shares batch_size": "each feature of each token is held",
    "corpus.nulls.gibberish prepend_bos": "as published",
    "corpus.nulls.pseudo_sentences prepend_bos": "as published",
    "corpus.nulls.repeated_random_tokens seed": "as published",
    "interventions.effects.measure_effects progress": "its callers show one bar for many runs",
    "papers.lines_of_thought.sarfati prepend_bos": "as published",
    "scores.head_types.measure_types seed": "as published",
    "zoo.embedded_model.default_windows prepend_bos": "the embedded model was trained with BOS",
}
"""Functions with another default, and why."""


def _functions() -> dict[str, Callable[..., Any]]:
    """The functions of the package that are not private, by their dotted names."""
    found = {}
    for info in pkgutil.walk_packages(tl_geometry.__path__, f"{tl_geometry.__name__}."):
        if not info.name.endswith("__main__"):
            module = importlib.import_module(info.name)
            for name, member in inspect.getmembers(module, inspect.isfunction):
                if member.__module__ == info.name and not name.startswith("_"):
                    found[f"{info.name.partition('.')[2]}.{name}"] = member
    return found


def _different(functions: dict[str, Callable[..., Any]]) -> set[str]:
    """Parameters with another default than :data:`DEFAULTS`."""
    return {
        f"{name} {parameter.name}"
        for name, function in functions.items()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name in DEFAULTS and parameter.default is not parameter.empty
        if parameter.default != DEFAULTS[parameter.name]
    }


def test_a_parameter_has_one_default() -> None:
    functions = _functions()
    assert len(functions) > 500
    assert _different(functions) == OTHERS.keys()


def test_another_default_is_found() -> None:
    def planted(*, seed: int = 1, level: float = 0.95) -> None:
        """Has one default of its own."""

    assert _different({"planted": planted}) == {"planted seed"}
