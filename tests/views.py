"""Views of a model with some of their methods replaced: planted faults, and other tokenizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tl_geometry.models.model_view import ModelView


def with_methods(view: ModelView, **methods: Callable[..., Any]) -> ModelView:
    """The same view, with functions in the place of its methods (they are not given the view)."""
    planted = {name: staticmethod(method) for name, method in methods.items()}
    kind: type[ModelView] = type("PlantedView", (ModelView,), planted)
    return kind(**{f.name: getattr(view, f.name) for f in dataclasses.fields(ModelView)})
