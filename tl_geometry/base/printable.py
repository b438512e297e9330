"""How is a file name or a message written so that every terminal and file can hold it? The command
line and messages about files call this."""

from __future__ import annotations

import re
import unicodedata


def printable(text: str) -> str:
    r"""A file name as text that every output can hold: bytes that are no UTF-8, control characters
    and direction marks become escapes.

    >>> print(printable("a\udce9\u202e.txt"))
    a\xe9\u202e.txt
    """
    # a byte that is no UTF-8 stands in a file name as a surrogate, 0xDC00 above it
    text = re.sub("[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:02x}", text)
    # control, format, surrogate, private, unassigned; line and paragraph separators
    hidden = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return "".join(unicode_escape(c) if unicodedata.category(c) in hidden else c for c in text)


def unicode_escape(character: str) -> str:
    r"""A character as Python's escape: four digits, eight beyond U+FFFF.

    >>> print(unicode_escape("\u202e"), unicode_escape("\U0001f9e0"))
    \u202e \U0001f9e0
    """
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def printable_lines(text: str) -> str:
    """:func:`printable` for text of several lines."""
    return "\n".join(printable(line) for line in text.split("\n"))
