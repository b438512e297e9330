"""Errors of tl_geometry. All are :class:`GeometryError`: the text says what was expected, what came, and what to call instead."""

from __future__ import annotations


class GeometryError(ValueError):
    """Input from which no correct answer can be computed. Nothing is lost when it is raised: files and models are as before."""


class UnsupportedModelError(GeometryError):
    """A model, or a feature of one, that is refused by name because its numbers would be wrong."""


class ClosingError(GeometryError):
    """Parts that do not add up to what the model itself computed, within the closing error."""


class BudgetError(GeometryError):
    """A request that would not fit the memory budget; the text names the cheaper request."""
