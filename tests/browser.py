"""A headless Chromium for tests, driven over its debugging pipe: nothing to install besides the
browser.

A test takes the fixture ``browser`` (the test is skipped, with its reason, where there is no
Chromium), opens HTML in it and asks::

    @pytest.mark.slow
    def test_my_view(browser: Browser) -> None:
        with browser.open(as_cells(view.html(), view.html())) as page:   # or
        browser.open(Path("saved.html"), dark=True)
            page.wait("document.body.dataset.drawn", frame=1)                 # frame 0 is the page,
            then its iframes in order page.hover(120, 80)
            # real mouse events, in page coordinates assert
            page.evaluate("document.querySelector('output').textContent", frame=1) == "..."
            page.assert_harmless()                                            # no planted code ran,
            nothing was requested, no error page.screenshot(Path("look.png"))
            # for the eye

Tokens of :data:`HOSTILE` set ``window.planted`` where they are not escaped; ``planted`` says in how
many frames that happened, so that an unescaped twin proves that the detector detects. Sandboxed
frames run in the process of the page, so that ``frame=`` reaches them.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--disable-features=IsolateSandboxedIframes",
    "--remote-debugging-pipe",
)
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


def find() -> str | None:
    """Path of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a process."""
    path = find()
    if path is None:
        pytest.skip(f"no Chromium here (looked for {', '.join(NAMES)})")
    with Browser(path) as running:
        yield running


def as_cells(*fragments: str, after: str = "the end") -> str:
    """HTML fragments as a notebook page would hold them, each in its cell, with a paragraph after
    them."""
    cells = "".join(f'<div class="cell">{f}</div>' for f in fragments)
    return f'<!doctype html><meta charset="utf-8"><style>body{{margin:0}}</style>{cells}<p id="after">{after}</p>'


class Browser:
    """A running Chromium. ``open`` gives pages."""

    def __init__(self, path: str) -> None:
        self.home = tempfile.TemporaryDirectory(
            prefix="tl_geometry_chromium_", ignore_cleanup_errors=True
        )
        ours, theirs = os.pipe(), os.pipe()  # commands, answers
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (ours[0], theirs[1])]
        os.close(ours[0])
        os.close(theirs[1])
        self.commands, self.answers = ours[1], theirs[0]
        # Chromium reads commands on 3 and answers on 4
        move = 'r=$1 w=$2; shift 2; exec "$@" 3<&"$r" 4>&"$w"'
        arguments = [*FLAGS, f"--user-data-dir={self.home.name}", "about:blank"]
        self.process = subprocess.Popen(
            ["bash", "-c", move, "bash", *map(str, high), path, *arguments],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in high:
            os.close(fd)
        self.buffer, self.last, self.events = b"", 0, list[dict[str, Any]]()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.commands)  # Chromium ends when its pipe does
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.answers)
        self.home.cleanup()

    def call(
        self, method: str, session: str | None = None, timeout: float = 60, **parameters: Any
    ) -> dict[str, Any]:
        """Send a command of the DevTools protocol and return its answer; events on the way are
        kept."""
        self.last += 1
        message = {
            "id": self.last,
            "method": method,
            "params": parameters,
            **({"sessionId": session} if session else {}),
        }
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        deadline = time.monotonic() + timeout
        while True:
            answer = self.read(deadline - time.monotonic())
            if answer is None:
                raise TimeoutError(f"no answer to {method} in {timeout} s")
            if answer.get("id") == self.last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def read(self, timeout: float) -> dict[str, Any] | None:
        """The next message, ``None`` after ``timeout`` seconds; events go to ``events`` too."""
        deadline = time.monotonic() + timeout
        while b"\0" not in self.buffer:
            if not select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            chunk = os.read(self.answers, 2**20)
            if not chunk:
                raise RuntimeError(f"Chromium ended with {self.process.poll()}")
            self.buffer += chunk
        text, _, self.buffer = self.buffer.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append(message)
        return message

    def open(
        self, source: str | Path, *, width: int = 1000, height: int = 800, dark: bool = False
    ) -> Page:
        """Load HTML text, or a file, and wait until the page and its frames are loaded."""
        if isinstance(source, str):
            path = Path(self.home.name) / f"page{self.last}.html"
            path.write_text(source, encoding="utf-8")
        else:
            path = source.resolve()
        return Page(self, path.as_uri(), width, height, dark)


class Page:
    """A page that was loaded; a context manager that closes it. ``requests`` are the addresses
    asked for besides the page itself."""

    def __init__(self, browser: Browser, address: str, width: int, height: int, dark: bool) -> None:
        self.browser, self.address = browser, address
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session: str = browser.call(
            "Target.attachToTarget", targetId=self.target, flatten=True
        )["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        browser.events.clear()  # of the blank page
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + 120
        while not self.seen("Page.loadEventFired"):
            if self.browser.read(deadline - time.monotonic()) is None:
                raise TimeoutError(f"{address} did not load")

    def __enter__(self) -> Page:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.events = [e for e in self.browser.events if e.get("sessionId") != self.session]

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol to this page."""
        return self.browser.call(method, self.session, **parameters)

    def seen(self, method: str) -> list[dict[str, Any]]:
        """Parameters of the events of one kind so far."""
        return [
            e["params"]
            for e in self.browser.events
            if e["method"] == method and e.get("sessionId") == self.session
        ]

    @property
    def frames(self) -> list[str]:
        """Frame ids: the page, then its iframes in document order."""

        def flat(node: dict[str, Any]) -> list[str]:
            return [
                node["frame"]["id"],
                *(i for child in node.get("childFrames", []) for i in flat(child)),
            ]

        return flat(self.call("Page.getFrameTree")["frameTree"])

    def evaluate(self, expression: str, *, frame: int = 0) -> Any:
        """Value of a JavaScript expression (a promise is awaited) in a frame."""
        wanted = self.frames[frame]
        gone = {e["executionContextId"] for e in self.seen("Runtime.executionContextDestroyed")}
        made = [e["context"] for e in self.seen("Runtime.executionContextCreated")]
        ids = [
            c["id"]
            for c in made
            if c["auxData"]["frameId"] == wanted
            and c["auxData"]["isDefault"]
            and c["id"] not in gone
        ]
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            contextId=ids[-1],
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait(self, expression: str, *, frame: int = 0, timeout: float = 60) -> Any:
        """Evaluate until the value is true, and return it."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            value = self.evaluate(expression, frame=frame)
            if value:
                return value
            self.browser.read(0.05)
        raise TimeoutError(f"{expression} stayed false for {timeout} s")

    def hover(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> Path:
        """The visible part of the page as PNG."""
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )
        return path

    @property
    def requests(self) -> list[str]:
        """Addresses that the page and its frames asked for, besides itself and what it carries
        (data:, blob:, about:)."""
        asked = [e["request"]["url"] for e in self.seen("Network.requestWillBeSent")]
        return [
            u for u in asked if u != self.address and not u.startswith(("data:", "blob:", "about:"))
        ]

    @property
    def errors(self) -> list[str]:
        """Uncaught exceptions and console errors."""
        thrown = [
            e["exceptionDetails"].get("exception", {}).get("description", "")
            for e in self.seen("Runtime.exceptionThrown")
        ]
        said = [
            str(e["args"]) for e in self.seen("Runtime.consoleAPICalled") if e["type"] == "error"
        ]
        return thrown + said

    @property
    def planted(self) -> int:
        """In how many frames code from a token ran."""
        return sum(bool(self.evaluate("window.planted", frame=i)) for i in range(len(self.frames)))

    def assert_harmless(self) -> None:
        """No token's code ran, nothing was requested, nothing failed."""
        assert self.planted == 0
        assert self.requests == []
        assert self.errors == []
