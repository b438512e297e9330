"""Old names of :mod:`tl_geometry.base.html`."""

from __future__ import annotations

from tl_geometry.base.html import plain as printable
from tl_geometry.base.html import unicode_escape as unicode_escape


def printable_lines(text: str) -> str:
    """:func:`tl_geometry.base.html.plain` for text of several lines."""
    return "\n".join(map(printable, text.split("\n")))
