"""Tables for papers: LaTeX in plain ASCII, which compiles with every engine whatever the tokens
are."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence

_SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "␣": r"\textvisiblespace{}",
    "⏎": r"$\hookleftarrow$",
    "⇥": r"$\mapsto$",
    "∅": r"$\emptyset$",
    "[": "{[}",  # behind the end of a row it would begin an argument, as a star would
    "*": "{*}",
    "–": "--",
    "—": "---",
    "…": r"\ldots{}",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "ø": r"\o{}",
    "Δ": r"$\Delta$",
    "λ": r"$\lambda$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "×": r"$\times$",
    "°": r"$^\circ$",
}
_ACCENTS = {
    "\u0300": "`",
    "\u0301": "'",
    "\u0302": "^",
    "\u0303": "~",
    "\u0304": "=",
    "\u0306": "u",
    "\u0307": ".",
    "\u0308": '"',
    "\u030a": "r",
    "\u030b": "H",
    "\u030c": "v",
    "\u0327": "c",
    "\u0328": "k",
}
"""Combining marks -> LaTeX accents."""


def escape(text: object) -> str:
    r"""Text as LaTeX: white space is one space, a character without a command (a broken token's
    too) its code point.

    >>> print(escape("a_b & 5% of $x$"), escape("caf\u00e9 \ufffd"))
    a\_b \& 5\% of \$x\$ caf\'{e} \texttt{U+FFFD}
    """
    return "".join(_character(c) for c in str(text))


def _character(c: str) -> str:
    if c in _SPECIAL:
        return _SPECIAL[c]
    if c.isascii():
        return c if c.isprintable() else " "
    base, *marks = unicodedata.normalize("NFD", c)
    if len(marks) == 1 and marks[0] in _ACCENTS and base.isascii() and base.isalpha():
        return f"\\{_ACCENTS[marks[0]]}{{{base}}}"
    return rf"\texttt{{U+{ord(c):04X}}}"


def cell(value: object, digits: int = 4) -> str:
    r"""A number with ``digits`` significant digits, a dash for None and NaN, other things as
    escaped text.

    >>> [cell(v) for v in (0.123456, -3, 1.5e-7, float("nan"), None, True, "a_b")]
    ['0.1235', '$-3$', '$1.5 \\times 10^{-7}$', '--', '--', 'yes', 'a\\_b']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "--"
    if not isinstance(value, int | float):
        return escape(value)
    if math.isinf(value):
        return r"$\infty$" if value > 0 else r"$-\infty$"
    text = f"{value:.{digits}g}" if isinstance(value, float) else str(value)
    if found := re.fullmatch(r"(.+)e([+-]\d+)", text):
        return rf"${found[1]} \times 10^{{{int(found[2])}}}$"
    return f"${text}$" if text.startswith("-") else text


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    digits: int = 4,
    booktabs: bool = True,
    note: str = "",
) -> str:
    r"""A ``tabular``: text columns to the left, numbers to the right; ``note`` becomes a comment
    above it.

    >>> print(table(["head", "share"], [("L0H1", 0.5)], note="mine"), end="")
    % mine; needs \usepackage{booktabs}
    \begin{tabular}{lr}
    \toprule
    head & share \\
    \midrule
    L0H1 & 0.5 \\
    \bottomrule
    \end{tabular}
    """
    rows = list(rows)
    number = [
        bool(rows)
        and all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in c)
        for c in zip(*rows)
    ]
    align = "".join("r" if n else "l" for n in number) or "l" * len(columns)
    top, middle, bottom = (
        (r"\toprule", r"\midrule", r"\bottomrule") if booktabs else (r"\hline",) * 3
    )
    comment = (
        "% "
        + " ".join(note.encode("ascii", "backslashreplace").decode().split())
        + (r"; needs \usepackage{booktabs}" if booktabs else "")
    )
    line = lambda cells: " & ".join(cells) + r" \\"  # noqa: E731
    body = [line(cell(v, digits) for v in row) for row in rows]
    parts = [
        comment,
        rf"\begin{{tabular}}{{{align}}}",
        top,
        line(escape(c) for c in columns),
        middle,
        *body,
        bottom,
        r"\end{tabular}",
    ]
    return "\n".join(parts) + "\n"
