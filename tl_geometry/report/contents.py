"""What can a report be asked for, and what does it consist of? Its sections, the files that they
write, its budgets and options. The command line checks its arguments here before anything else, so
this file imports nothing heavy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from tl_geometry.base.errors import choice, require
from tl_geometry.base.run_files import PAGE
from tl_geometry.report.inputs import Inputs

SECTIONS = ("overview", "basis", "heads", "measures", "weights", "flow")
"""Sections of a report in reading order. Each is a module of :mod:`tl_geometry.report` that has a
function ``section``."""
TABLES = {
    "overview": ("overview",),
    "basis": ("anova", "anova_untrained", "massive_tokens"),
    "heads": ("heads", "head_bands", "bands", "planes"),
    "measures": ("positional", "contextual"),
    "weights": ("weights_qk", "weights_ov", "readout_ov", "paths", "surrogates"),
    "flow": ("flow", "flow_nulls", "truncation", "skipped_layers"),
}
"""Section -> the tables that it may write, each as a CSV and a safetensors file."""
PARTS, BASIS = "sections", "basis.safetensors"
"""Name of the folder of finished sections, and name of the file of the basis."""
BUDGETS = {"quick": 120.0, "default": 540.0, "full": math.inf}
"""Word of ``--budget`` -> seconds that a report may cost, at the prices of
:mod:`tl_geometry.report.budget`."""


@dataclass(frozen=True, kw_only=True)
class Request(Inputs):
    """What a report was asked for: the options of the command."""

    budget: Annotated[
        str,
        "quick, default or full: how much is computed, by the shape of the model and not by the "
        "clock. For SmolLM2-135M default is about 10 minutes on two cores, quick a fifth of the "
        "work, full leaves nothing out.",
    ] = "default"
    sections: Annotated[
        tuple[str, ...], f"Some of {', '.join(SECTIONS)}, separated by commas. Default: all."
    ] = SECTIONS
    planes: Annotated[bool, "Write the shares of every rotary plane too."] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        choice(self.budget, tuple(BUDGETS), "--budget")
        unknown = ", ".join(name for name in self.sections if name not in SECTIONS)
        expected = f"some of {', '.join(SECTIONS)}"
        valid = bool(self.sections) and not unknown
        require(valid, "--sections", expected=expected, got=unknown or "none")

    @property
    def names(self) -> tuple[str, ...]:
        """Sections to write, in reading order."""
        return tuple(name for name in SECTIONS if name in self.sections)


def report_files(sections: Iterable[str]) -> list[str]:
    """Files that a report of these sections may write.

    >>> report_files(["overview"])[1:]
    ['report.html', 'sections/overview.json', 'overview.csv', 'overview.safetensors']
    """
    parts = [f"{PARTS}/{name}.json" for name in sections]
    tables = [table for name in sections for table in TABLES[name]]
    return [BASIS, PAGE, *parts, *(f"{t}.{end}" for t in tables for end in ("csv", "safetensors"))]
