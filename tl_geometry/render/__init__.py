"""Views of results. Each function returns an object that shows itself in Jupyter and saves itself
as HTML, PNG, SVG or PDF.

``split``, ``heads``, ``logit_page``, ``bands_page``, ``bundle_3d`` and ``sphere_3d`` are
interactive pages (self-contained, offline, in a sandboxed frame); the others are matplotlib
figures, which draw into ``ax=`` where they draw one axes (of several panels the first).
:mod:`tl_geometry.render.circuitsvis` has the familiar circuitsvis views.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tl_geometry.render import circuitsvis
    from tl_geometry.render.basis import gram, norms, spirals, variance_shares
    from tl_geometry.render.extrapolation import clouds
    from tl_geometry.render.flow import (
        angle_maps,
        baseline_figure,
        bundle_figure,
        first_coordinate,
        noise_figure,
        residual_figure,
        spectra_figure,
        truncation_figure,
    )
    from tl_geometry.render.head_view import head_grid, heads
    from tl_geometry.render.logit_view import logit_page
    from tl_geometry.render.measures import (
        fourier,
        incoherence,
        learning_curve,
        measure_curves,
        planes,
        similarity,
        singular_values,
    )
    from tl_geometry.render.rotary import band_atlas, bands_page, head_planes
    from tl_geometry.render.skipping import skip_figure
    from tl_geometry.render.space import bundle_3d, sphere_3d
    from tl_geometry.render.split_view import split
    from tl_geometry.render.sweeps import head_shares, head_types
    from tl_geometry.render.weights import (
        coverage_curves,
        effect_bars,
        sphere_paths,
        surrogate_bars,
        weight_blocks,
    )
    from tl_geometry.render.writers import composition_figure, logit_figure

_VIEWS = {
    "basis": ("gram", "norms", "spirals", "variance_shares"),
    "extrapolation": ("clouds",),
    "flow": (
        "angle_maps",
        "bundle_figure",
        "first_coordinate",
        "noise_figure",
        "residual_figure",
        "spectra_figure",
        "truncation_figure",
        "baseline_figure",
    ),
    "head_view": ("head_grid", "heads"),
    "logit_view": ("logit_page",),
    "measures": (
        "fourier",
        "incoherence",
        "learning_curve",
        "measure_curves",
        "planes",
        "similarity",
        "singular_values",
    ),
    "rotary": ("band_atlas", "bands_page", "head_planes"),
    "skipping": ("skip_figure",),
    "space": ("bundle_3d", "sphere_3d"),
    "split_view": ("split",),
    "sweeps": ("head_shares", "head_types"),
    "weights": (
        "coverage_curves",
        "effect_bars",
        "sphere_paths",
        "surrogate_bars",
        "weight_blocks",
    ),
    "writers": ("composition_figure", "logit_figure"),
}
"""Public views by the module that holds them; a module is loaded when one is first used."""
HOME = {name: module for module, names in _VIEWS.items() for name in names}

__all__ = [
    "angle_maps",
    "band_atlas",
    "bands_page",
    "baseline_figure",
    "bundle_3d",
    "bundle_figure",
    "circuitsvis",
    "clouds",
    "composition_figure",
    "coverage_curves",
    "effect_bars",
    "first_coordinate",
    "fourier",
    "gram",
    "head_grid",
    "head_planes",
    "head_shares",
    "head_types",
    "heads",
    "incoherence",
    "learning_curve",
    "logit_figure",
    "logit_page",
    "measure_curves",
    "noise_figure",
    "norms",
    "planes",
    "residual_figure",
    "similarity",
    "singular_values",
    "skip_figure",
    "spectra_figure",
    "sphere_3d",
    "sphere_paths",
    "spirals",
    "split",
    "surrogate_bars",
    "truncation_figure",
    "variance_shares",
    "weight_blocks",
]


# a type checker reads the imports above, and would take every unknown name for Any
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in HOME:
            return getattr(importlib.import_module(f"{__name__}.{HOME[name]}"), name)
        if name == "circuitsvis":
            return importlib.import_module(f"{__name__}.circuitsvis")
        known = ", ".join(__all__)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}. Public names: {known}"
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
