"""Text and tables as a notebook, a page or a terminal shows them: escaped, without script or
network. Results, views and the report call these."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Sequence

STYLE = (
    "border-collapse:collapse;font:12px/1.4 ui-monospace,monospace;color:inherit",
    "padding:1px 8px;border-bottom:1px solid #8884;text-align:",
)
"""Styles of a table and of its cells; the alignment is appended."""
MOST_ROWS = 60
"""Most rows of a table that are shown, as many as pandas shows by default."""
# GPT-2's encoder: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTES = {chr(b): b for b in _PRINTED} | {chr(256 + n): b for n, b in enumerate(_OTHERS)}
"""The byte that each character of a byte-level vocabulary stands for."""
HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Characters that are not seen but act: controls, direction marks, joiners, line separators, and
halves of surrogate pairs."""


def unicode_escape(character: str) -> str:
    r"""A character as Python's escape: four digits, eight beyond U+FFFF.

    >>> print(unicode_escape("\u202e"), unicode_escape("\U0001f9e0"))
    \u202e \U0001f9e0
    """
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def visible(text: str) -> str:
    r"""Control characters, direction marks and lone surrogates as ``\uXXXX``, so that they act on
    nothing; line ends and tabs stay.

    >>> print(visible("a\u202eb\ud800"))
    a\u202eb\ud800
    """
    return HIDDEN.sub(lambda match: unicode_escape(match[0]), text)


def escape(text: object) -> str:
    """Text as HTML: ``<``, ``>``, ``&`` and quotes escaped, so that token strings and file names
    stay data; see :func:`visible`.

    >>> escape("</script>")
    '&lt;/script&gt;'
    """
    return html.escape(visible(str(text)), quote=True)


def plain(text: object) -> str:
    r"""Text for a terminal, a message or a file name: control characters, direction marks, line
    breaks and bytes that are no UTF-8 are written out.

    >>> print(plain("a\x1b[31m\u202eb\n\udce9"))
    a\x1b[31m\u202eb\n\udce9
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(text)
    )


def number(value: object) -> str:
    """A short reading of a cell: four significant digits for floats, a dash for None and NaN.

    >>> [number(v) for v in (0.123456, 3, float("nan"), None, "a<b")]
    ['0.1235', '3', '–', '–', 'a<b']
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def signed(value: float, digits: str = ".2f") -> str:
    """A number in a sentence, with the minus sign of the axes and not a hyphen.

    >>> signed(-0.094), signed(0.5, "+.1f")
    ('−0.09', '+0.5')
    """
    return format(value, digits).replace("-", "−")


def of_bytes(token: str) -> str:
    r"""A token of a byte-level vocabulary, which writes each byte as one character, as text; a byte
    that is no part of a whole character as ``<0xF0>``. Other tokens as they are.

    >>> of_bytes("\u0120\xc3\xa9"), of_bytes("\xf0\u0141\u0130"), of_bytes("<0xF0>")
    (' é', '<0xF0><0x9F><0x8E>', '<0xF0>')
    """
    if not all(character in BYTES for character in token):
        return token
    text = bytes(BYTES[character] for character in token).decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda byte: f"<0x{ord(byte[0]) - 0xDC00:02X}>", text)


def token_text(token: str) -> str:
    r"""A token made visible: a space as ``␣``, a newline as ``⏎``, a tab as ``⇥``, other control
    and direction marks as ``\uXXXX``, nothing as ``∅``.

    >>> token_text(" the\n")
    '␣the⏎'
    """
    # \u0120 and \u010a stand for space and newline in vocabularies of byte-level BPE
    shown = {" ": "␣", "\n": "⏎", "\t": "⇥", "\u0120": "␣", "\u010a": "⏎"}
    return "".join(shown.get(c, c if c.isprintable() else unicode_escape(c)) for c in token) or "∅"


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "", of: int = 0
) -> str:
    """An escaped HTML table of at most 60 rows (the caption says ``of`` how many, by default all
    that are given); numbers stand to the right.

    >>> "&lt;b&gt;" in table(["token", "norm"], [("<b>", 2.5)])
    True
    """
    rows = list(rows)
    # counted before the cut, for the caption
    count, rows = of or len(rows), rows[:MOST_ROWS]
    note = f" (first {MOST_ROWS} of {count} rows)" if count > MOST_ROWS else ""
    texts = [any(isinstance(row[i], str) for row in rows) for i in range(len(columns))]
    styles = [STYLE[1] + ("left" if text or not rows else "right") for text in texts]

    def line(cells: Iterable[object], tag: str) -> str:
        pairs = zip(cells, styles, strict=True)
        return "".join(f'<{tag} style="{s}">{escape(number(v))}</{tag}>' for v, s in pairs)

    body = [line(columns, "th"), *(line(row, "td") for row in rows)]
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f'<div>{escape(caption + note)}</div><table style="{STYLE[0]}">{lines}</table>'
