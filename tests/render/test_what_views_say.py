"""Every view says what it shows, how it is read, what chance gives and what it was made from."""

from __future__ import annotations

import ast
from pathlib import Path

import tl_geometry

SAID = {"title", "caption", "null", "source"}
OF_ANY_ARRAYS = {("circuitsvis.py", "null"), ("circuitsvis.py", "source")}
"""Views of arrays that a user brings, whose origin nobody knows."""


def _left_out(path: Path, text: str) -> set[tuple[str, str]]:
    """What a call in a file leaves out, as (name of the file, argument)."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    views = [c for c in calls if getattr(c.func, "id", "") in ("View", "PageView")]
    return {(path.name, name) for c in views for name in SAID - {k.arg for k in c.keywords}}


def test_all_views() -> None:
    folder = Path(tl_geometry.__file__).parent
    texts = {path: path.read_text() for path in folder.rglob("*.py")}
    assert sum(text.count("View(\n") for text in texts.values()) > 30
    assert set().union(*(_left_out(*item) for item in texts.items())) == OF_ANY_ARRAYS


def test_a_view_that_does_not_say_is_found() -> None:
    text = "def f(): return View(figure, title='t', caption='c', null='n')"
    assert _left_out(Path("a.py"), text) == {("a.py", "source")}
