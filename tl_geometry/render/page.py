"""The object that every interactive view returns: one self-contained page in a sandboxed frame,
made of a few parts (:mod:`tl_geometry.render.parts`).

A page holds its own script and style, and no address of another file. Its content policy allows
this script alone to run, and nothing to be fetched. What comes from outside (tokens, names) is JSON
in which ``<``, ``>`` and ``&`` are escaped; the script writes it as text, never as markup. Light
and dark follow the reader's system, by CSS.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tl_geometry.base import html
from tl_geometry.base.errors import require
from tl_geometry.base.files import as_path, write_bytes
from tl_geometry.render.parts import deflated

ASSETS = files("tl_geometry.render") / "assets"
"""Scripts and the style of the pages."""
KIT = ("kit", "maps", "bars", "tokens", "arcs", "library")
"""The scripts that make the one script of all pages, in their order."""
LARGEST = 5_000_000
"""Most bytes of a page: larger ones make notebooks slow to open and to save."""
UNTRUSTED = "This interactive page needs a trusted notebook: trust it, or run the cell again."


@dataclass(eq=False, repr=False, kw_only=True)
class Page:
    """An interactive figure. It shows itself in a notebook; ``save`` writes a page that opens
    offline. It is as wide as its container, and ``height`` pixels high there (a longer page
    scrolls).

    ``parts`` are drawn one below the other, ``begin`` is what is chosen first, ``title`` states the
    finding or the question, ``caption`` says how to read the page, ``null`` what chance gives,
    ``source`` what it was computed from. ``library`` is the text of another script that a part may
    start (circuitsvis)."""

    title: str
    caption: str
    parts: Sequence[Mapping[str, Any]]
    begin: Mapping[str, Any]
    height: int
    source: str = ""
    null: str = ""
    library: str = ""

    @property
    def page(self) -> str:
        """The whole HTML document. Refused above 5 MB."""
        how = f"{self.caption} {self.null}".strip()
        data = {"title": self.title, "caption": how, "parts": self.parts, "start": self.begin}
        text = document(self.title, {**data, "source": self.source}, self.library)
        size, instead = f"{len(text) / 1e6:.1f} MB", "fewer heads= (or panels, or tokens)"
        require(len(text) <= LARGEST, "page", expected="at most 5 MB", got=size, instead=instead)
        return text

    @property
    def scripts(self) -> tuple[str, ...]:
        """Hashes of the scripts that the page runs, for the policy of a page around it."""
        return tuple(script_hash(text) for text in (kit(), self.library) if text)

    def html(self) -> str:
        """The page in a frame of its own. Where frames are taken out (a notebook that is not
        trusted, a code host) a reader sees the title and a sentence."""
        title, page = html.escape(self.title), html.escape(self.page)
        place = "grid-area:1/1;width:100%"  # one cell: the frame lies over the sentence
        behind = f'<p style="{place}"><b>{title}</b> {UNTRUSTED}</p>'
        style = f"{place};height:{self.height}px;border:0"
        sandbox = f'sandbox="allow-scripts" loading="lazy" style="{style}"'
        frame = f'<iframe title="{title}" {sandbox} srcdoc="{page}"></iframe>'
        grid = "display:grid;grid-template-columns:minmax(0,1fr);overflow-wrap:anywhere"
        return f'<div class="tlg-page" style="{grid}">{behind}{frame}</div>'

    def save(self, path: str | Path) -> Path:
        """Write to ``x.html`` and return the path."""
        path = as_path(path)
        require(path.suffix.lower() == ".html", "path", expected="a .html file", got=str(path))
        write_bytes(path, self.page.encode())
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"{self.title}: {self.caption}"


def document(title: str, data: Mapping[str, Any], library: str = "") -> str:
    """The page that draws ``data``. ``library`` is a script that it may start; the page holds it
    deflated."""
    allowed = " ".join(script_hash(text) for text in (kit(), library) if text)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    data = {**data, "library": packed_library(library)} if library else data
    text = json.dumps(shown(data), allow_nan=False, separators=(",", ":"))
    # no text of the data can then end the script element that holds it
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{html.escape(title)}</title><style>{_asset('kit.css')}</style></head><body>"
        f'<script type="application/json" id="data">{text}</script>'
        f"<script>{kit()}</script></body></html>"
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


@functools.cache
def kit() -> str:
    """The script of all pages."""
    return "".join(_asset(f"{name}.js") for name in KIT) + "start();"


@functools.cache  # circuitsvis's script takes a second
def packed_library(library: str) -> str:
    """A script as base64 of its deflated text."""
    return deflated(library.encode())


def script_hash(script: str) -> str:
    """The hash of a script, as a content policy writes it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def shown(value: Any) -> Any:
    """Data as a page holds it: texts as :func:`tl_geometry.base.html.visible` shows them, floats of
    seven digits, what is no number as ``None``.

    >>> shown({"a": [1 / 3, float("nan")]})
    {'a': [0.3333333, None]}
    """
    if isinstance(value, str):
        return html.visible(value)
    if isinstance(value, Mapping):
        return {shown(str(k)): shown(v) for k, v in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [shown(v) for v in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
