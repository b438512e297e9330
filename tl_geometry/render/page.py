"""The object that every interactive view returns: one self-contained page in a sandboxed frame,
and an image for places where no script may run. The views of this package make it; notebooks and
the report show it.

A page holds its own script and style, and no address of another file. Its content policy allows
this script alone to run, and nothing to be fetched. What comes from outside (tokens, names) is JSON
in which ``<``, ``>`` and ``&`` are escaped; the script writes it as text, never as markup.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tl_geometry.base import html
from tl_geometry.base.files import as_path, write_bytes
from tl_geometry.render.cells import compressed
from tl_geometry.render.figure import View, drawable, folded

ASSETS = files("tl_geometry.render") / "assets"
"""Scripts and styles of the pages."""
FALLBACK = 300_000
"""Most bytes of the image that a notebook or a report holds beside a page."""
STEP = 10
"""Heights of frames are multiples of so many pixels (frame.js and page.js count in tens too)."""
DARK = (
    'body[data-jp-theme-light="false"],body.vscode-dark,html[theme="dark"],'
    'body[data-theme="dark"]{--tlg-dark:2px}'
    '@media(prefers-color-scheme:dark){body[data-theme="auto"]{--tlg-dark:2px}}'
)
"""Tells a frame that the page around it is dark. A sandboxed frame cannot see that page. So this
style of the outer page (JupyterLab, VS Code, Colab, furo) makes the frame two pixels higher than a
multiple of :data:`STEP`, and the script in the frame looks for these pixels. (One pixel is lost to
rounding when the reader zooms.)"""


@dataclass(eq=False, repr=False)
class PageView:
    """An interactive figure. It shows itself in a notebook; ``save`` writes a page that opens
    offline, or a PNG, SVG or PDF of ``image``. In a notebook it is as wide as its container, and
    ``width`` pixels at most. ``height`` is an estimate for a wide container, where the frame begins
    (see :func:`listener`).

    ``script`` names the file in ``assets/`` that draws ``data``. ``library`` is the text of another
    script (plotly, circuitsvis) that the first may start."""

    script: str
    data: Mapping[str, Any]
    _: KW_ONLY
    title: str
    caption: str
    width: int
    height: int
    image: Callable[[], View]
    source: str = ""
    null: str = ""
    library: str = ""

    def payload(self) -> Mapping[str, Any]:
        """The data that the script draws."""
        return self.data

    @property
    def page(self) -> str:
        """The whole HTML document."""
        said = " ".join(filter(None, (self.caption, self.null)))
        data = {"title": self.title, "caption": said, **self.payload()}
        return document(self.title, data, self.script, self.library)

    @property
    def scripts(self) -> tuple[str, ...]:
        """Hashes of the scripts that the page and its frame run."""
        return (*allowed_scripts(self.script, self.library), script_hash(listener()))

    def html(self, png: str = "", *, lazy: bool = False) -> str:
        """The page in a frame of its own, so that several work side by side.

        ``png`` (base64) lies behind the frame. A reader sees it where frames are forbidden: in
        notebooks that are not trusted, on code hosts, in e-mail. A ``lazy`` frame is drawn when a
        reader comes near it.
        """
        height = STEP * math.ceil(self.height / STEP)
        page = self.page.replace("<html ", "<html data-framed ", 1)
        title, page = html.escape(self.title), html.escape(page)
        # both in one cell of a grid: where there is no frame, the image alone sets the height
        place = "grid-area:1/1;width:100%"
        loading = ' loading="lazy"' if lazy else ""
        size = f"{place};height:calc({height}px + var(--tlg-dark, 0px));border:0"
        attributes = f'sandbox="allow-scripts"{loading} style="{size}" srcdoc="{page}"'
        frame = f'<iframe title="{title}" {attributes}></iframe>'
        if png:
            fit = f"{place};max-height:{height}px;object-fit:contain;object-position:0 0"
            frame = f'<img alt="{title}" style="{fit}" src="data:image/png;base64,{png}">{frame}'
        holder = f"display:grid;grid-template-columns:minmax(0,1fr);max-width:{self.width}px"
        frame = f'<div class="tlg-frame" style="{holder}">{frame}</div>'
        return f"<style>{DARK}</style>{frame}<script>{listener()}</script>{folded(self.source)}"

    def png(self) -> str:
        """The image with its title as base64, for places where frames are forbidden."""
        view = self.image()
        # characters of a line: about 12 of the bold 10-point title fit an inch
        wide = int(12 * view.figure.get_size_inches()[0])
        title = "\n".join(map(drawable, textwrap.wrap(view.title, wide)))
        view.figure.suptitle(title, x=0.01, ha="left", fontsize=10, weight="bold")
        return base64.b64encode(small_png(view, FALLBACK)).decode()

    def save(self, path: str | Path) -> Path:
        """Write to ``x.html``, or the image to ``x.png``, ``x.svg`` or ``x.pdf``, and return the
        path."""
        path = as_path(path)
        if path.suffix.lower() == ".html":
            end = f"{folded(self.source)}</body>"
            write_bytes(path, self.page.replace("</body>", end, 1).encode())
            return path
        return self.image().save(path)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        png = self.png()
        return {"text/html": self.html(png), "text/plain": repr(self), "image/png": png}

    def __repr__(self) -> str:
        size = f"{len(self.html().encode()) / 1000:.0f} kB of HTML, {self.width} x {self.height} px"
        return f"{self.title} ({size}): {self.caption}"


def document(title: str, data: Mapping[str, Any], script: str, library: str = "") -> str:
    """The page that runs ``assets/<script>.js`` on ``data``, styled by ``<script>.css`` if there is
    one. ``library`` is a script that it may start; the page holds it deflated."""
    style = _asset("page.css")
    if (ASSETS / f"{script}.css").is_file():
        style += _asset(f"{script}.css")
    allowed = " ".join(allowed_scripts(script, library))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    if library:
        data = {**data, "library": _deflated(library)}
    text = json.dumps(_shown(data), allow_nan=False, separators=(",", ":"))
    # no text of the data can then end the script element that holds it
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{html.escape(title)}</title><style>{style}</style></head><body>"
        f'<script type="application/json" id="data">{text}</script>'
        f"<script>{_code(script)}</script></body></html>"
    )


def allowed_scripts(script: str, library: str = "") -> tuple[str, ...]:
    """Hashes of the script of a page and of the library that it may start, for its policy."""
    return tuple(script_hash(text) for text in (_code(script), library) if text)


def listener() -> str:
    """The script beside a frame. The page in the frame posts its height, and this script gives the
    frame that height. Where it may not run, the frame keeps its first height and scrolls."""
    return _asset("frame.js").strip()


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _code(script: str) -> str:
    """The helpers of all pages, then ``assets/<script>.js``."""
    return f"'use strict';\n{_asset('page.js')}{_asset(f'{script}.js')}"


@functools.cache  # plotly's script takes a second
def _deflated(library: str) -> str:
    return compressed(library.encode())


def script_hash(script: str) -> str:
    """The hash of a script, as a content policy writes it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _shown(value: Any) -> Any:
    """Data with every text as :func:`tl_geometry.base.html.visible` shows it."""
    if isinstance(value, str):
        return html.visible(value)
    if isinstance(value, Mapping):
        return {_shown(k): _shown(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and not all(isinstance(v, int | float) for v in value):
        return [_shown(v) for v in value]
    return value  # a number, or a row of numbers, which is long and holds no text


def rounded(value: float, digits: int = 5) -> float | None:
    """A number as a page holds it: rounded to ``digits`` significant digits; ``None`` if it is not
    finite, which JSON cannot write.

    >>> rounded(1 / 3), rounded(float("nan"))
    (0.33333, None)
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def text_data(tokens: Sequence[str]) -> dict[str, Any]:
    r"""Tokens as a page shows them, and which of them end a line.

    >>> text_data([" a", "\n"])
    {'tokens': ['␣a', '⏎'], 'breaks': [False, True]}
    """
    breaks = ["\n" in token or "\u010a" in token for token in tokens]  # Ċ: GPT-2's line end
    return {"tokens": [html.token_text(token) for token in tokens], "breaks": breaks}


def text_lines(text: Mapping[str, Any], width: int, padding: int, font: int) -> int:
    """About how many lines the tokens of :func:`text_data` take on a page ``width`` pixels wide,
    with ``padding`` pixels beside each, in a monospaced ``font`` of that many pixels."""
    lines, used = 1, 0.0
    for token, ends in zip(text["tokens"], text["breaks"], strict=True):
        used += 0.6 * font * len(token) + padding  # a character is 0.6 times as wide as tall
        if ends or used > width:
            lines, used = lines + 1, 0.0
    return lines


def caption_height(caption: str) -> int:
    """Height of a caption in pixels: lines of 18 pixels, with about 105 characters in each.

    >>> caption_height("a" * 106)
    36
    """
    return 18 * math.ceil(len(caption) / 105)


def small_png(view: View, limit: int) -> bytes:
    """The image of a figure in at most ``limit`` bytes: with 128 colours where it would be larger,
    and with fewer pixels where that is not enough."""
    raw = view.bytes("png")
    if len(raw) <= limit:
        return raw
    from PIL import Image

    picture = Image.open(io.BytesIO(raw)).convert("RGB")
    # first guess: bytes grow with the square of the scale, and 128 colours take a quarter
    scale = min(1.0, (4 * limit / len(raw)) ** 0.5)
    while True:
        size = (round(picture.width * scale), round(picture.height * scale))
        buffer = io.BytesIO()
        small = picture.resize(size, Image.Resampling.BOX).quantize(
            128, method=Image.Quantize.FASTOCTREE
        )
        small.save(buffer, format="png")
        # an image below 50 pixels is returned whatever it weighs: smaller ones show nothing
        if buffer.tell() <= limit or min(size) < 50:
            return buffer.getvalue()
        scale *= 0.85
