"""What a report consists of: sections, the files that they write, budgets. Imports nothing
heavy."""

from __future__ import annotations

import math
from collections.abc import Iterable

from tl_geometry.base.run_files import PAGE

SECTIONS = ("overview", "basis", "heads", "measures", "weights", "flow")
"""Sections of a report in reading order; each is a module of :mod:`tl_geometry.report` with a
``section`` function."""
TABLES = {
    "overview": ("overview",),
    "basis": ("anova", "massive_tokens"),
    "heads": ("heads", "bands", "planes", "dominant_only"),
    "measures": ("positional", "contextual"),
    "weights": ("weights_qk", "weights_ov", "readout_ov", "paths", "surrogates"),
    "flow": ("flow", "flow_nulls", "truncation", "skipped_layers"),
}
"""Section -> the tables that it may write, each to a CSV and a safetensors file."""
PARTS, BASIS = "sections", "basis.safetensors"
BUDGETS = {"quick": 120.0, "default": 540.0, "full": math.inf}
"""Words of ``--budget``, and seconds that a report may take at the prices of
:mod:`tl_geometry.report.work`."""


def report_files(sections: Iterable[str]) -> list[str]:
    """Files that a report of these sections may write.

    >>> report_files(["overview"])[1:]
    ['report.html', 'sections/overview.json', 'overview.csv', 'overview.safetensors']
    """
    parts = [f"{PARTS}/{name}.json" for name in sections]
    tables = [table for name in sections for table in TABLES[name]]
    return [BASIS, PAGE, *parts, *(f"{t}.{end}" for t in tables for end in ("csv", "safetensors"))]
