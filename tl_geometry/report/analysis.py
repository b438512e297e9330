"""Make the sections of a report, and write each as soon as it is finished. Called by
:mod:`tl_geometry.report.build`.

A section is a function ``section(draft, analysis)`` in a module of this package. The module is
named in :data:`~tl_geometry.report.contents.SECTIONS`, in reading order, and has a title in
:data:`TITLES`. The function adds paragraphs, figures, tables and findings to the
:class:`~tl_geometry.report.section.Draft`. What it cannot compute becomes a card that says why."""

from __future__ import annotations

import importlib
import platform
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm

from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.report.budget import Budget
from tl_geometry.report.folder import Folder
from tl_geometry.report.section import Draft, Section

TITLES = {
    "overview": "What was analysed",
    "basis": "Position and context",
    "heads": "What drives each head",
    "measures": "Measures of position and context",
    "weights": "Weights and the sphere",
    "flow": "Trajectories as a flow",
}
"""Section -> its title."""
EMBEDDED = (
    "The embedded model is a small language model of Python source. It demonstrates the library "
    "and is evidence for nothing; its untrained control (same initialisation, no training) stands "
    "beside it."
)
"""Caution at the head of a report on the embedded model."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Analysis:
    """What sections are made from: the model, the tokens, the basis, and how much to compute.

    - ``embedded``: whether this is the embedded model, which has an untrained control.
    - ``notes``: remarks about the texts; ``smaller``: what was reduced to keep the budget.
    - ``planes``: whether to write the table of every rotary plane.
    - ``bar``: shows which section is being made, and which part of it.
    """

    model: ModelLike
    view: ModelView
    windows: TokenWindows
    basis: PositionContext
    budget: Budget = field(default_factory=Budget)
    embedded: bool = False
    seed: int = 0
    notes: tuple[str, ...] = ()
    smaller: tuple[str, ...] = ()
    planes: bool = False
    bar: tqdm = field(default_factory=lambda: tqdm(disable=True))

    def pick(self, count: int) -> TokenWindows:
        """At most ``count`` of the windows, evenly spaced."""
        return at_even_distances(self.windows, count)


def at_even_distances(windows: TokenWindows, count: int) -> TokenWindows:
    """At most ``count`` of the windows, evenly spaced from the first to the last."""
    last_row = len(windows) - 1
    return windows[torch.linspace(0, last_row, min(count, last_row + 1)).long()]


def make(analysis: Analysis, name: str) -> Section:
    """Make one section. What cannot be computed becomes a card that says why."""
    draft = Draft(TITLES[name], analysis.bar)
    with draft.part("this section"):
        importlib.import_module(f"tl_geometry.report.{name}").section(draft, analysis)
    return draft.section()


def write(analysis: Analysis, folder: Folder) -> dict[str, Any]:
    """Write the report into ``folder``, each section as soon as it is finished, and return the
    summary that is also written as ``run.json``.

    Sections that the folder holds already are not computed again. ``summary["failed"]`` names the
    sections with an unexpected error.
    """
    view, basis = analysis.view, analysis.basis
    folder.describe(
        basis.provenance,
        notes=(*analysis.notes, *analysis.smaller),
        lede=f"{view.n_layers} blocks of {view.n_heads} heads; {basis.contexts:,} windows of "
        f"{basis.length} tokens of {basis.provenance.corpus}.",
        caution=EMBEDDED if analysis.embedded else "",
    )
    for name in folder.names:
        # a resumed folder holds the sections that an earlier run finished
        if name not in folder.parts:
            section_start = time.monotonic()
            section = make(analysis, name)
            folder.add(name, section, seconds=time.monotonic() - section_start)
        analysis.bar.update()
    return folder.finish()


def versions() -> dict[str, str]:
    """Versions of everything that shapes the numbers."""
    from importlib.metadata import PackageNotFoundError, version

    names = ("tl-geometry", "transformer-lens", "torch", "transformers", "numpy")
    by_name = {"python": platform.python_version(), "platform": sys.platform}
    for name in names:
        try:
            by_name[name] = version(name)
        except PackageNotFoundError:  # an uninstalled checkout has no metadata
            by_name[name] = "unknown"
    return by_name
