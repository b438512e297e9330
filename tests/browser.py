"""A headless Chromium for tests, driven by playwright: the system's own, none is downloaded.

A test takes the fixture ``browser`` (the test is skipped, with its reason, where there is no
Chromium or no playwright), opens HTML in it and asks.

:func:`check_beside_itself` and :func:`check_escapes_matter` are what every page promises.

Tokens of :data:`HOSTILE` set ``window.planted`` where they are not escaped; ``planted`` says in how
many frames that happened, so that an unescaped twin proves that the detector detects.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium
    from playwright.sync_api import Frame
    from playwright.sync_api import Page as Tab

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
FLAGS = (
    "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--enable-unsafe-swiftshader",
)
"""No network but this machine, and three dimensions without a graphics card."""
HOSTILE = (
    "</script><img src=x onerror=window.planted=1>",
    "<img/src='x'onerror='window.planted=1'>",
    "<!--<script>",
    "<script>window.planted=1</script>",
    "\u2028\u2029",
    "\u202eabc\u200f",
    "\U0001f600",
    "<s>",
    "",
    " ",
    "\n",
    "\"'&amp;`${window.planted=1}",
    "]]>\\u003c\\",
    "</textarea></style></iframe></title>",
)
"""Tokens that break pages which do not escape them."""

FITS = "document.documentElement.scrollWidth <= innerWidth"
"""Whether a page is no wider than its window."""


def find() -> str | None:
    """Path of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a process."""
    path = find()
    if path is None:
        pytest.skip(f"no Chromium here (looked for {', '.join(NAMES)})")
    reason = "playwright is not installed (requirements-dev.txt)"
    driver = pytest.importorskip("playwright.sync_api", reason=reason)
    with driver.sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        chromium = playwright.chromium.launch(
            executable_path=path, args=list(FLAGS), chromium_sandbox=False
        )
        yield Browser(chromium, Path(folder))
        chromium.close()


def as_cells(*fragments: str, after: str = "the end") -> str:
    """HTML fragments as a notebook page would hold them, each in its cell, with a paragraph after
    them."""
    cells = "".join(f'<div class="cell">{f}</div>' for f in fragments)
    head = '<!doctype html><meta charset="utf-8"><style>body{margin:0}</style>'
    return f'{head}{cells}<p id="after">{after}</p>'


class Browser:
    """A running Chromium. ``open`` gives pages."""

    def __init__(self, chromium: Chromium, folder: Path) -> None:
        self.chromium, self.folder = chromium, folder

    @contextmanager
    def open(
        self, source: str | Path, *, width: int = 1000, height: int = 800, dark: bool = False
    ) -> Iterator[Page]:
        """Load HTML text, or a file, and wait until the page and its frames are loaded."""
        path = self.folder / "page.html" if isinstance(source, str) else source.resolve()
        if isinstance(source, str):
            path.write_text(source, encoding="utf-8")
        tab = self.chromium.new_page(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        try:
            yield Page(tab, path.as_uri())
        finally:
            tab.close()


class Page:
    """A page that was loaded. ``requests`` are the addresses asked for besides the page itself and
    what it carries (data:, blob:, about:), ``errors`` uncaught exceptions and console errors."""

    def __init__(self, tab: Tab, address: str) -> None:
        self.tab, self.asked, self.errors = tab, list[str](), list[str]()
        tab.on("request", lambda request: self.asked.append(request.url))
        tab.on("pageerror", lambda error: self.errors.append(str(error)))
        tab.on("console", lambda said: self.errors.extend([said.text] * (said.type == "error")))
        tab.goto(address, timeout=120_000)
        self.address = address

    @property
    def frames(self) -> list[Frame]:
        """The page, then its iframes in document order."""

        def flat(frame: Frame) -> list[Frame]:
            return [frame, *(found for child in frame.child_frames for found in flat(child))]

        return flat(self.tab.main_frame)

    def evaluate(self, expression: str, *, frame: int = 0) -> Any:
        """Value of a JavaScript expression (a promise is awaited) in a frame."""
        return self.frames[frame].evaluate(expression)

    def wait(self, expression: str, *, frame: int = 0, timeout: float = 60) -> Any:
        """Evaluate until the value is true, and return it. (``wait_for_function`` would need a
        policy that lets pages evaluate text.)"""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if value := self.evaluate(expression, frame=frame):
                return value
            self.tab.wait_for_timeout(50)
        raise TimeoutError(f"{expression} stayed false for {timeout} s")

    def hover(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.tab.mouse.move(x, y)

    @property
    def requests(self) -> list[str]:
        own = ("data:", "blob:", "about:")
        return [u for u in self.asked if u != self.address and not u.startswith(own)]

    @property
    def planted(self) -> int:
        """In how many frames code from a token ran."""
        return sum(bool(frame.evaluate("window.planted")) for frame in self.frames)

    def assert_harmless(self) -> None:
        """No token's code ran, nothing was requested, nothing failed."""
        assert self.planted == 0
        assert self.requests == [], self.requests
        assert self.errors == [], self.errors


def without_policy(page: str) -> str:
    """A page that may run any script."""
    return re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)


def check_beside_itself(browser: Browser, view: Any, *, dark: bool) -> None:
    """Two frames of a view in a narrow notebook fit, are drawn and leave what follows them."""
    with browser.open(as_cells(view.html(), view.html()), dark=dark, width=400) as page:
        for frame in (1, 2):
            page.wait("document.body.dataset.drawn", frame=frame)
            assert page.evaluate(FITS, frame=frame)
        assert page.evaluate(FITS)
        assert page.evaluate("document.getElementById('after').textContent") == "the end"
        page.assert_harmless()


def check_escapes_matter(browser: Browser, view: Any) -> None:
    """The twin of every check with hostile tokens: without escapes and policy they run."""
    text = view.page
    for character in "<>&":
        text = text.replace(f"\\u{ord(character):04x}", character)
    with browser.open(without_policy(text)) as page:
        page.wait("window.planted")
        with pytest.raises(AssertionError):
            page.assert_harmless()
