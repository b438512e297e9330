"""How large is the project? ``python -m tests.sizes`` writes the table of sizes into CONTRIBUTING,
beside version 1 and the limits, which a test holds.

Lines of code are those that are no docstring, comment or blank line. ``--minutes N`` gives what a
run of the tests took (it is measured by hand, on two quiet cores); without it the old figure stays.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
PACKAGE = ROOT / "tl_geometry"
NOT_CODE = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
PUBLIC = re.compile(r"^from [.\w]+ import (?:\w+ as )?(\w+)$", re.MULTILINE)
MINUTES = "minutes of `python -m tests`, two cores"


class Size(NamedTuple):
    """What version 1 had, and what version 2 may have at most."""

    version_1: int
    limit: int


SIZES = {
    "lines of code": Size(31_963, 16_000),
    "public names": Size(245, 120),
    "words of documentation": Size(21_000, 12_000),
    "lines of js and css": Size(1_142, 550),
    "lines of tests": Size(71_700, 20_000),
    MINUTES: Size(20, 5),
}


def lines_of_code(path: Path) -> int:
    """Lines of a module that are no docstring, no comment and not blank."""
    text = path.read_text(encoding="utf-8")
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, *NOT_CODE):
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - documented)


def lines_in(folder: Path, *suffixes: str) -> int:
    """All lines of the files with these endings."""
    files = (path for suffix in suffixes for path in folder.rglob(f"*{suffix}"))
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)


def pages() -> list[Path]:
    """The pages of the site that somebody wrote; built pages and the API are not."""
    made = {"_build", "api", "notebooks", "auto_gallery"}
    found = (ROOT / "docs").rglob("*.md")
    return [path for path in found if not made & {part.name for part in path.parents}]


def public_names() -> set[str]:
    """What the packages list, without their own names in front."""
    stubs = (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("__init__.pyi"))
    return {name for stub in stubs for name in PUBLIC.findall(stub)}


@cache
def today() -> dict[str, int]:
    """The sizes that can be counted."""
    return {
        "lines of code": sum(map(lines_of_code, PACKAGE.rglob("*.py"))),
        "public names": len(public_names()),
        "words of documentation": sum(len(path.read_text().split()) for path in pages()),
        "lines of js and css": lines_in(PACKAGE, ".js", ".css"),
        "lines of tests": lines_in(ROOT / "tests", ".py"),
    }


def stored() -> dict[str, int]:
    """The figures of today that stand in the table."""
    rows = re.findall(r"^\| (.+?) \| [\d,]+ \| ([\d,]+) \| [\d,]+ \|$", PAGE.read_text(), re.M)
    return {name: int(number.replace(",", "")) for name, number in rows}


def table(now: dict[str, int]) -> str:
    """The rows of the page."""
    rows = [
        f"| {name} | {size.version_1:,} | {now[name]:,} | {size.limit:,} |"
        for name, size in SIZES.items()
    ]
    return "\n".join(["| | version 1 | now | limit |", "|---|---:|---:|---:|", *rows])


def main() -> int:
    """Write the table; 1 where something is larger than its limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.sizes", description=__doc__)
    parser.add_argument("--minutes", type=int, help="what a run of the tests took")
    given = parser.parse_args()
    now = dict(today())
    now[MINUTES] = given.minutes or stored().get(MINUTES, 0)
    text = PAGE.read_text(encoding="utf-8")
    old = re.search(r"^\| \| version 1 \| now \| limit \|\n(?:\|.*\n)+", text, re.M)
    if old is None:
        sys.exit(f"{PAGE.name}: expected a table of sizes, got none")
    PAGE.write_text(text.replace(old[0], table(now) + "\n"), encoding="utf-8")
    sys.stdout.write(table(now) + "\n")
    return int(any(now[name] > size.limit for name, size in SIZES.items()))


if __name__ == "__main__":
    sys.exit(main())
