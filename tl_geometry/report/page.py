"""The page that a report is written on: one self-contained HTML document that opens with what was
found, readable in light and dark, on paper and where no script runs.

The page's own script searches tables and hands a library to the sandboxed frames of figures that
ask for it; its content policy names the hash of every script that may run, its own and theirs, and
lets nothing be fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

from tl_geometry.base import html
from tl_geometry.render.page import script_hash
from tl_geometry.report.findings import Finding
from tl_geometry.report.origin import linked
from tl_geometry.report.tables import anchor

LEDE = (
    "Findings stand with their interval or p-value and with what chance would give; tables have "
    "these where a measure has them."
)
SHOWN, EACH = 5, 2
"""Findings at the head of a report, and the most of one section while others have some."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A finished section on the page: its HTML (escaped), what it found, the hashes of the scripts
    that its figures run, and whether they need the library."""

    name: str
    title: str
    html: str
    findings: tuple[Finding, ...] = ()
    scripts: tuple[str, ...] = ()
    library: bool = False


def _asset(name: str) -> str:
    path = files("tl_geometry.report") / "assets" / name
    return path.read_text(encoding="utf-8")


def document(
    title: str,
    parts: Sequence[Part],
    sources: Sequence[str],
    *,
    lede: str = "",
    caution: str = "",
    note: str = "",
) -> str:
    """The whole page from its sections and the works to cite; ``lede`` says what was analysed,
    ``caution`` what it is no evidence for, ``note`` what is still to come."""
    titles = [p.title for p in parts]
    found = [(p.name, finding) for p in parts for finding in p.findings]
    placed = [f'<div id="{anchor(p.title)}">{p.html}</div>' for p in parts]
    links = [(anchor(t), t) for t in titles]
    links = [("findings", "Findings"), *links] if found else links
    listed = "".join(f'<a href="#{at}">{html.escape(t)}</a>' for at, t in links)
    cited = "".join(f"<li>{html.escape(s)}</li>" for s in sources)
    named = html.escape(title)
    above = [f'<p class="lede">{html.escape(f"{lede} {LEDE}")}</p>'] if lede else []
    above += [f'<p class="caution">{html.escape(caution)}</p>'] if caution else []
    above += [f'<p class="note">{html.escape(note)}</p>'] if note else []
    footer = f"<footer>Made with tl_geometry. Cite:<ul>{cited}</ul></footer>"
    main = f"<h1>{named}</h1>{''.join(above)}{_findings(found)}{''.join(placed)}{footer}"
    body = f'<div class="page"><nav aria-label="Contents">{listed}</nav><main>{main}</main></div>'
    whole = f"<head>{_head(named, parts)}</head><body>{body}</body>"
    return f'<!doctype html><html lang="en">{whole}</html>'


def _head(title: str, parts: Sequence[Part]) -> str:
    """Policy, style, script, and the library where a figure needs it."""
    script = _asset("report.js")
    allowed = " ".join(dict.fromkeys([script_hash(script), *(s for p in parts for s in p.scripts)]))
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src {allowed}; frame-src 'self' about:"
    )
    shared = ""
    if any(p.library for p in parts):
        from tl_geometry.render.space import library

        shared = f'<script type="text/plain" id="library">{library()[1]}</script>'
    return (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_asset('report.css')}</style><script>{script}</script>{shared}"
    )


def chosen(found: Iterable[tuple[str, Finding]]) -> tuple[list[Finding], list[Finding]]:
    """The findings of a page's head and the others, from ``(section, finding)`` in reading order:
    those that exclude their null first, at most :data:`EACH` of a section while others have
    some."""
    ranked = sorted(found, key=lambda item: not item[1].clear)
    head: list[tuple[str, Finding]] = []
    for most in (EACH, SHOWN):
        for section, finding in ranked:
            held = sum(s == section for s, _ in head)
            if len(head) < SHOWN and held < most and (section, finding) not in head:
                head.append((section, finding))
    rest = [finding for section, finding in ranked if (section, finding) not in head]
    return [finding for _, finding in head], rest


def _findings(found: Sequence[tuple[str, Finding]]) -> str:
    """The findings at the head of the page, and the others folded."""
    if not found:
        return ""
    head, rest = chosen(found)
    about = (
        f"{len(head)} of the {len(found)} questions that this report asks of its tables, first "
        "those whose interval excludes what chance gives. A finding is no cause: causes are tested "
        "by edits of the live model, where it says so."
    )
    more = (
        f"<details><summary>{len(rest)} more</summary>{''.join(map(_finding, rest))}</details>"
        if rest
        else ""
    )
    listed = "".join(map(_finding, head))
    return f'<section id="findings">{listed}<p class="about">{about}</p>{more}</section>'


def _finding(finding: Finding) -> str:
    link = f'<a href="#{html.escape(finding.figure)}">Figure</a>'
    value, said, beside = (
        linked(html.escape(text)) for text in (finding.value, finding.said, finding.beside)
    )
    kind = "find" if finding.clear else "find none"
    text = f"{said}&nbsp;{link}<small>{beside}.</small>"
    return f'<div class="{kind}"><b>{value}</b><div>{text}</div></div>'
