"""What does the page of a report look like as a whole? It is one self-contained HTML document that
opens with its findings. It is readable in light and dark, on paper, and where no script runs.
:mod:`tl_geometry.report.folder` and the experiments of :mod:`tl_geometry.papers` write it.

The script of the page searches tables. The content policy names the hash of every script that may
run (that of the page, and those of figures in their sandboxed frames) and allows nothing to be
fetched.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tl_geometry.render.page import script_hash
from tl_geometry.report.findings import Finding
from tl_geometry.report.templates import asset, fill

LEDE = (
    "Each finding stands beside its interval or p-value and what chance would give; so does each "
    "number of a table, where its measure has them."
)
"""Sentence below the title, after the one that says what was analysed."""
SHOWN, EACH = 5, 2
"""Most findings at the head of a report; most of one section while others have some left."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A finished section, as the page and the JSON file of a section hold it: its HTML (escaped),
    its findings, the hashes of the scripts that its figures run, the keys of the works to cite, and
    the columns and rows of its tables."""

    name: str
    title: str
    html: str
    findings: Sequence[Finding] = ()
    scripts: Sequence[str] = ()
    sources: Sequence[str] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path) -> Part:
        """The part that an earlier run has written as JSON."""
        saved = json.loads(path.read_text(encoding="utf-8"))
        findings = [Finding(**finding) for finding in saved.pop("findings")]
        return Part(findings=findings, **saved)


def document(
    title: str,
    parts: Sequence[Part],
    sources: Sequence[str],
    *,
    lede: str = "",
    caution: str = "",
    note: str = "",
) -> str:
    """The whole page, from its sections and the works to cite. ``lede`` says what was analysed,
    ``caution`` what the report is no evidence for, ``note`` which sections are still to come."""
    script = asset("report.js")
    hashes = [script_hash(script), *(text_hash for part in parts for text_hash in part.scripts)]
    head, rest = chosen((part.name, finding) for part in parts for finding in part.findings)
    return fill(
        "page",
        title=title,
        parts=parts,
        sources=sources,
        lede=lede and f"{lede} {LEDE}",
        caution=caution,
        note=note,
        head=head,
        rest=rest,
        allowed=" ".join(dict.fromkeys(hashes)),
        style=asset("report.css"),
        script=script,
    )


def chosen(findings: Iterable[tuple[str, Finding]]) -> tuple[list[Finding], list[Finding]]:
    """The findings for the head of a page, and the others, from ``(section, finding)`` in reading
    order. Findings that exclude their null come first. A section has at most :data:`EACH` at the
    head while other sections have some left."""
    ranked = sorted(findings, key=lambda item: not item[1].clear)
    # first round: at most EACH of a section; second round: the remaining room goes by rank
    head: list[tuple[str, Finding]] = []
    for max_of_section in (EACH, SHOWN):
        for section, finding in ranked:
            of_section = sum(name == section for name, _ in head)
            if len(head) < SHOWN and of_section < max_of_section and (section, finding) not in head:
                head.append((section, finding))
    rest = [finding for section, finding in ranked if (section, finding) not in head]
    return [finding for _, finding in head], rest
