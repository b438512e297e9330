"""``python docs/pictures.py [NAME ...]``: the pictures of the gallery and of README.

Each script of ``docs/gallery/QUESTION`` begins with the title and the text of its page; the code
below runs as it stands. Its ``view`` becomes ``docs/_static/NAME.png`` (trimmed; inside are the
digest of the code, so that a test sees a picture that is older than its code, and the view's null
and source, which its page shows) and, where it is an interactive page of moderate size,
``NAME.html``; what it prints becomes ``NAME.txt`` beside the script. README's first code and output
follow.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, PngImagePlugin

DOCS = Path(__file__).resolve().parent
SCRIPTS = {path.stem: path for path in sorted((DOCS / "gallery").glob("*/*.py"))}
FIRST = "induction"
"""The script that README shows."""
THUMBNAILS = {
    "tokens": (0, 0, 400),
    "graph": (480, 380, 480),
    "text": (0, 0, 500),
    "head_types": (0, 300, 480),
    "heads": (0, 0, 345),
    "induction": (405, 315, 460),
    "writers": (0, 0, 480),
    "planes": (0, 0, 400),
    "removal": (0, 0, 480),
    "faithfulness": (0, 0, 500),
    "shares": (0, 0, 550),
    "curves": (0, 0, 410),
    "incoherence": (0, 0, 550),
    "weights": (0, 0, 350),
    "surrogates": (0, 0, 560),
    "sphere": (90, 60, 420),
    "steps": (0, 0, 560),
    "truncation": (0, 0, 560),
    "skipping": (0, 0, 450),
}
"""The examples of each question in the order in which a newcomer reads them; of each picture, the
left, top and width of the part that its card in the gallery shows: whole, its text would be too
small to read."""
SHAPE = (400, 280)
"""Pixels of a card's picture."""
LARGEST, WIDEST, MARGIN = 400_000, 1600, 12
"""Bytes of an interactive page that is kept; pixels of a picture's width and margin."""


def code(path: Path) -> str:
    """A script without the text of its page."""
    script = path.read_text("utf-8")
    text = ast.parse(script).body[0]
    return "\n".join(script.split("\n")[text.end_lineno :]).lstrip("\n")


def digest(script: str) -> str:
    """Of the code alone: a change of the text leaves the picture as it is."""
    return hashlib.sha256(script.encode()).hexdigest()[:16]


def run(script: str) -> tuple[Any, str]:
    """The script's ``view`` and what it printed."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(script, "gallery", "exec"), names)
    return names["view"], printed.getvalue()


def trimmed(png: bytes) -> Image.Image:
    """The image without its white border, at most :data:`WIDEST` pixels wide."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    left, top, right, bottom = box or (0, 0, *image.size)
    image = image.crop(
        (
            max(left - MARGIN, 0),
            max(top - MARGIN, 0),
            min(right + MARGIN, image.width),
            min(bottom + MARGIN, image.height),
        )
    )
    if image.width > WIDEST:
        image = image.resize((WIDEST, round(image.height * WIDEST / image.width)))
    return image


def thumbnail(name: str) -> Image.Image:
    """The part of a stored picture that its card shows."""
    left, top, width = THUMBNAILS[name]
    with Image.open(DOCS / "_static" / f"{name}.png") as image:
        height = min(width * SHAPE[1] // SHAPE[0], image.height - top)
        return image.crop((left, top, left + width, top + height))


def picture(view: Any) -> bytes:
    """A figure, or what a browser shows of a page (the system's Chromium, through playwright)."""
    if not hasattr(view, "page"):
        return view.png()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), chromium_sandbox=False
        )
        tab = chromium.new_page(viewport={"width": 860, "height": 400}, device_scale_factor=1.5)
        tab.set_content(view.page)
        tab.wait_for_selector("body[data-drawn]")
        png = tab.screenshot(full_page=True)
        chromium.close()
    return png


def draw(name: str) -> None:
    """Run one script and write its files."""
    script = code(SCRIPTS[name])
    view, printed = run(script)
    stamp = PngImagePlugin.PngInfo()
    stamp.add_text("script", digest(script))
    for field in ("null", "source"):
        stamp.add_text(field, getattr(view, field))
    image = trimmed(picture(view))
    image.save(DOCS / "_static" / f"{name}.png", pnginfo=stamp, optimize=True)
    page = DOCS / "_static" / f"{name}.html"
    page.unlink(missing_ok=True)
    if hasattr(view, "page") and len(view.page.encode()) <= LARGEST:
        view.save(page)
    text = SCRIPTS[name].with_suffix(".txt")
    text.unlink(missing_ok=True)
    if printed:
        text.write_text(printed, "utf-8")


def write_readme() -> None:
    """README's first code and its output, from the first script of the gallery."""
    path = DOCS.parent / "README.md"
    script = SCRIPTS[FIRST]
    saved = f'view.save("{FIRST}.html")  # linked panels, one page, offline\n'
    printed = script.with_suffix(".txt").read_text("utf-8")
    text = path.read_text("utf-8")
    for form, body in (("python", code(script) + saved), ("text", printed)):
        start = text.index(f"```{form}\n") + len(f"```{form}\n")
        text = text[:start] + body + text[text.index("```\n", start) :]
    path.write_text(text, "utf-8")


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all."""
    for name in names or SCRIPTS:
        draw(name)
        sys.stdout.write(f"{name}\n")
    write_readme()


if __name__ == "__main__":
    main(sys.argv[1:])
