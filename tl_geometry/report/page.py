"""The page that a report is written on: one self-contained HTML document, readable in light and
dark; script runs in the sandboxed frames of figures only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tl_geometry.base import html

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8881}
body{font:15px/1.55 system-ui,sans-serif;max-width:1020px;margin:0 auto;padding:24px 20px 80px;
  background:Canvas;color:CanvasText}
h1{font-size:26px;margin:8px 0 4px}
h2{font-size:19px;margin:36px 0 8px;border-top:1px solid var(--line);padding-top:16px}
nav{font-size:14px;margin:12px 0 0}
nav a{margin-right:14px;color:LinkText}
p{max-width:78ch}
.card{background:#fff;color:#222;border:1px solid var(--line);border-radius:8px;padding:10px;
  margin:14px 0;overflow-x:auto}
.card:has(iframe){background:none;padding:0;color:inherit}
.card figcaption{font-size:12.5px;color:#444;margin-top:6px;max-width:100ch}
.scroll{overflow-x:auto;margin:14px 0}
.card.absent{background:var(--soft);color:inherit;border-style:dashed}
.note{margin:4px 0;font-size:14px}
.failed{color:#b3261e}
pre{overflow-x:auto;font-size:12px}
.card>figure{min-width:0}
table{font-size:12.5px}
summary{cursor:pointer;font-size:14px;margin:8px 0}
footer{margin-top:48px;font-size:13px;border-top:1px solid var(--line);padding-top:12px}
"""


def anchor(title: str) -> str:
    """A title as an element id.

    >>> anchor("What was analysed?")
    'what-was-analysed'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def document(
    title: str,
    bodies: Sequence[str],
    titles: Sequence[str],
    sources: Sequence[str],
    *,
    note: str = "",
) -> str:
    """The whole page from section fragments (already escaped), their titles, the works to cite, and
    a line above everything."""
    links = "".join(f'<a href="#{anchor(t)}">{html.escape(t)}</a>' for t in titles)
    placed = [f'<div id="{anchor(t)}">{b}</div>' for t, b in zip(titles, bodies, strict=True)]
    cited = "".join(f"<li>{html.escape(s)}</li>" for s in sources)
    named = html.escape(title)
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{named}</title><style>{STYLE}</style>"
    )
    above = f'<p class="note">{html.escape(note)}</p>' if note else ""
    footer = f"<footer>Made with tl_geometry. Cite:<ul>{cited}</ul></footer>"
    body = f"<h1>{named}</h1><nav>{links}</nav>{above}{''.join(placed)}{footer}"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>'
