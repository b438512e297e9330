"""``python docs/pictures.py [NAME ...]``: the pictures of the gallery and of README.

Each script of ``docs/gallery`` runs as it stands; its ``view`` becomes ``docs/_static/NAME.png``
(trimmed, with the script's digest inside, so that a test sees a picture that is older than its
script) and, where it is an interactive page of moderate size, ``NAME.html``; what it prints becomes
``docs/gallery/NAME.txt``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, PngImagePlugin

DOCS = Path(__file__).resolve().parent
SCRIPTS = {path.stem: path for path in sorted((DOCS / "gallery").glob("*.py"))}
LARGEST, WIDEST, MARGIN = 400_000, 1600, 12
"""Bytes of an interactive page that is kept; pixels of a picture's width and margin."""


def digest(script: str) -> str:
    """Of the script's text."""
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


def draw(name: str) -> None:
    """Run one script and write its files."""
    script = SCRIPTS[name].read_text("utf-8")
    view, printed = run(script)
    stamp = PngImagePlugin.PngInfo()
    stamp.add_text("script", digest(script))
    figure = view.image() if hasattr(view, "image") else view
    trimmed(figure.bytes("png")).save(
        DOCS / "_static" / f"{name}.png", pnginfo=stamp, optimize=True
    )
    page = DOCS / "_static" / f"{name}.html"
    page.unlink(missing_ok=True)
    if hasattr(view, "image") and len(view.page.encode()) <= LARGEST:
        view.save(page)
    text = SCRIPTS[name].with_suffix(".txt")
    text.unlink(missing_ok=True)
    if printed:
        text.write_text(printed, "utf-8")


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all."""
    for name in names or SCRIPTS:
        draw(name)
        sys.stdout.write(f"{name}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
