"""Figures in a browser: nothing in a token runs, nothing is requested, what is drawn is what was computed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser import HOSTILE, Browser, as_cells

pytestmark = pytest.mark.slow


def test_the_detectors_detect(browser: Browser) -> None:
    """A page that writes tokens unescaped runs their code, asks for addresses and fails, in a sandboxed frame too."""
    naive = "<img src='http://example.invalid/a.png'><script>nothing()</script><script>const D=" + json.dumps(HOSTILE) + "</script>"
    frame = '<iframe sandbox="allow-scripts" srcdoc="<img src=y onerror=window.planted=1>"></iframe>'
    with browser.open(as_cells(frame, naive)) as page:
        page.wait("window.planted", frame=1)
        assert page.planted == 2
        assert not page.evaluate("document.getElementById('after')")  # and lose what follows them
        assert any("example.invalid" in address for address in page.requests)
        assert any("nothing is not defined" in error for error in page.errors)
        with pytest.raises(AssertionError):
            page.assert_harmless()


def test_a_plain_page_is_harmless(browser: Browser, tmp_path: Path) -> None:
    fragment = (
        '<iframe sandbox="allow-scripts" srcdoc="<body style=\'color-scheme:light dark\'><button onclick=this.id=1>x</button>"></iframe>'
    )
    with browser.open(as_cells(fragment, fragment), dark=True, width=400, height=300) as page:
        page.assert_harmless()
        assert len(page.frames) == 3
        assert page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches", frame=2)
        x, y = page.evaluate("(b => [b.left + 20, b.top + 20])(document.querySelectorAll('iframe')[1].getBoundingClientRect())")
        page.click(x, y)
        assert page.wait("document.querySelector('button').id", frame=2) == "1"
        assert not page.evaluate("document.querySelector('button').id", frame=1)
        assert page.screenshot(tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
