"""Views where notebooks are read: in a JupyterLab (trusted or not, light or dark, narrow), and as
nbconvert writes them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.browser import FITS, Browser, Page
from tests.render.test_graph_view import traced
from tests.render.test_split import synthetic
from tl_geometry import render
from tl_geometry.render.page import PageView

pytestmark = [pytest.mark.nightly, pytest.mark.once]
LAB = shutil.which("jupyter-lab") or shutil.which("jupyter-lab", path=Path(sys.executable).parent)
needs_lab = pytest.mark.skipif(LAB is None, reason="needs jupyterlab (requirements-docs.txt)")
OUTPUT = ".jp-OutputArea-output"
ENDS_BELOW = """i => i.parentElement.getBoundingClientRect().bottom -
  i.getBoundingClientRect().bottom < 8"""
"""Whether what holds an image ends with it, but for the descent of a line of text."""
AS_HIGH = """(r => document.documentElement.scrollHeight <= innerHeight && r >= 0 && r < 13)(
  innerHeight - document.body.getBoundingClientRect().bottom)"""
"""Whether a frame is as high as its page."""
WHITE, BLACK = "rgb(255, 255, 255)", "rgb(18, 18, 18)"


def see(page: Page, frame: int) -> None:
    """Scroll to a frame: out of sight, browsers observe no sizes in it."""
    page.frames[frame].frame_element().scroll_into_view_if_needed()


def view() -> PageView:
    return render.split(synthetic(1, 6), title="A view")


def notebook() -> Any:
    """Three cells whose outputs are stored: a view, the page of a graph, and a page alone, without
    its image."""
    split, graph = (v._repr_mimebundle_() for v in (view(), render.graph_page(traced())))
    bare = {"text/html": view().html(), "text/plain": "bare"}
    cells = []
    for data in (split, graph, bare):
        cell = nbformat.v4.new_code_cell("view", execution_count=1)
        cell.outputs = [nbformat.v4.new_output("execute_result", data, execution_count=1)]
        cells.append(cell)
    return nbformat.v4.new_notebook(cells=cells)


class Lab:
    """A running JupyterLab in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTERLAB_WORKSPACES_DIR")
        self.settings = folder / "settings"
        self.environment = {**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(self.settings)}
        self.environment |= {name: str(folder / name.lower()) for name in names}
        nbformat.write(notebook(), folder / "view.ipynb")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [
            str(LAB),
            "--no-browser",
            "--allow-root",
            f"--port={self.port}",
            "--IdentityProvider.token=",
            f"--ServerApp.root_dir={folder}",
            "--LabApp.news_url=None",
        ]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                time.sleep(0.2)
        raise TimeoutError((self.folder / "log").read_text())

    def trust(self) -> None:
        """Sign the notebook."""
        command = [sys.executable, "-m", "nbformat.sign", str(self.folder / "view.ipynb")]
        subprocess.run(command, env=self.environment, check=True, capture_output=True)

    def open(self, browser: Browser, *, dark: bool, width: int = 1300) -> Page:
        """The notebook in a tab, once its outputs are there."""
        home = self.settings / "@jupyterlab" / "apputils-extension"
        home.mkdir(parents=True, exist_ok=True)
        theme = {"theme": f"JupyterLab {'Dark' if dark else 'Light'}"}
        (home / "themes.jupyterlab-settings").write_text(json.dumps(theme))
        tab = browser.chromium.new_page(viewport={"width": width, "height": 1000})
        page = Page(tab, f"http://127.0.0.1:{self.port}/lab/tree/view.ipynb?reset")
        said = json.dumps(not dark).lower()
        page.wait(f"document.body.dataset.jpThemeLight === '{said}'", timeout=120)
        page.wait(f"document.querySelectorAll('{OUTPUT}').length === 3", timeout=120)
        if width < 600:  # fold the list of files, which takes more than half of a narrow window
            tab.keyboard.press("Control+b")
            page.wait(f"document.querySelector('{OUTPUT}').clientWidth > {width} / 2")
        return page


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("lab"))
    yield made
    made.process.kill()  # it holds nothing; SIGTERM did not end it within 30 s
    made.process.wait(30)


@needs_lab
def test_an_untrusted_notebook_shows_the_image_and_a_trusted_one_the_view(
    lab: Lab, browser: Browser
) -> None:
    """In this order: what is signed stays signed."""
    images = (
        f"[...document.querySelectorAll('{OUTPUT}')].map(o => o.querySelectorAll('img').length)"
    )
    frames = f"document.querySelectorAll('{OUTPUT} iframe').length"
    pictures = f"[...document.querySelectorAll('{OUTPUT} img')]"
    for dark, width in ((False, 1300), (True, 400)):
        page = lab.open(browser, dark=dark, width=width)
        assert page.evaluate(frames) == 0
        assert page.evaluate(images) == [1, 1, 0], "without its image the page shows nothing"
        assert page.wait(f"{pictures}.every(i => i.naturalWidth > 300)")
        assert page.evaluate(f"{pictures}.every(i => i.getBoundingClientRect().right < innerWidth)")
        assert page.evaluate(f"{pictures}.map({ENDS_BELOW})") == [True, True], (
            "nothing below an image"
        )
        text = page.evaluate(f"document.querySelector('{OUTPUT}').innerText")
        assert "jp-theme" not in text
        assert "tlg" not in text
        page.tab.close()
    lab.trust()
    for dark, width in ((False, 1300), (True, 1300), (True, 400)):
        page = lab.open(browser, dark=dark, width=width)
        assert page.wait(frames) == 3
        for frame in (1, 2):
            page.wait("document.body.dataset.drawn", frame=frame)
            paper = page.evaluate("getComputedStyle(document.body).backgroundColor", frame=frame)
            assert paper == (BLACK if dark else WHITE), (
                "the theme of the notebook, not the system's"
            )
            assert page.evaluate(FITS, frame=frame)
            see(page, frame)
            page.wait(AS_HIGH, frame=frame, timeout=10)
        inside = (
            f"(o => o.scrollWidth <= o.clientWidth + 1)(document.querySelector('{OUTPUT}"
            " .jp-RenderedHTMLCommon') ?? document.body)"
        )
        assert page.evaluate(inside), "what is wider scrolls inside its frame"
        page.tab.close()


@needs_lab
def test_nbconvert_keeps_the_view(browser: Browser, tmp_path: Path) -> None:
    nbformat.write(notebook(), tmp_path / "view.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "view.ipynb"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with browser.open(tmp_path / "view.html", width=400, height=900) as page:
        page.wait("document.body.dataset.drawn", frame=1)
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor", frame=1)
        assert paper == WHITE
