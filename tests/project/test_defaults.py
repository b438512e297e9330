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
    "encoding": "utf-8",
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
    "base.results.Provenance.__init__ processed": "None where nobody said it",
    "base.results.Provenance.__init__ seed": "None where nothing was drawn",
    "circuits.features.feature_shares batch_size": "each feature of each token is held",
    "corpus.nulls.gibberish prepend_bos": "as published",
    "corpus.nulls.pseudo_sentences prepend_bos": "as published",
    "corpus.nulls.repeated_random_tokens seed": "as published",
    "interventions.effects.measure_effects progress": "its callers show one bar for many runs",
    "papers.lines_of_thought.sarfati prepend_bos": "as published",
    "papers.protocol.Settings.__init__ seed": "as published",
    "scores.corpus_pass.CorpusPass.__init__ progress": "a report shows one bar for many passes",
    "scores.head_types.measure_types seed": "as published",
    "zoo.embedded_model.default_windows prepend_bos": "the embedded model was trained with BOS",
}
"""Functions with another default, and why."""


def _functions() -> dict[str, Callable[..., Any]]:
    """The functions and methods of the package, by their dotted names."""
    found = {}
    for module in pkgutil.walk_packages(tl_geometry.__path__, f"{tl_geometry.__name__}."):
        if module.name.endswith("__main__"):
            continue
        for member in vars(importlib.import_module(module.name)).values():
            if getattr(member, "__module__", "") == module.name:
                inside = vars(member).values() if inspect.isclass(member) else [member]
                # a class method and a static method hold their function
                functions = [getattr(each, "__func__", each) for each in inside]
                for each in filter(inspect.isfunction, functions):
                    found[f"{module.name}.{each.__qualname__}".partition(".")[2]] = each
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
