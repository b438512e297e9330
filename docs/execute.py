"""``python docs/execute.py [NAME ...]``: run the notebooks and store their outputs.

Each runs as it stands, offline, from an empty folder. A stored notebook holds the digest of its
code, so that a test sees outputs that are older than it, and at most :data:`LARGEST` bytes. Its
pictures have 256 colours; where outputs are larger, the largest leave out one of their two forms.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
LARGEST = 1_400_000
"""Bytes of a stored notebook."""
PICTURE = re.compile(r"(?<=data:image/png;base64,)[A-Za-z0-9+/=]+")
"""A picture within a page."""
MARK = "tl_geometry_code"
"""Where the digest stands in a notebook's metadata."""


def code(notebook: Any) -> list[Any]:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """Of all code of a notebook."""
    whole = "\n\n".join(cell.source for cell in code(notebook))
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def executed(notebook: Any, folder: Path) -> Any:
    """The notebook after a run in a fresh kernel, offline, with this checkout."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        timeout=1800,
        kernel_name="python3",
        resources=resources,
        coalesce_streams=True,  # lines printed one by one are one output
    )
    client.execute(env=environment)
    return notebook


def stored(notebook: Any) -> Any:
    """What is kept of a run: no times, and no more than fits."""
    for cell in code(notebook):
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = _palette(data["image/png"])
            if "text/html" in data:
                data["text/html"] = PICTURE.sub(lambda m: _palette(m[0]), data["text/html"])
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}  # of no single version
    notebook.metadata[MARK] = digest(notebook)
    while len(nbformat.writes(notebook)) > LARGEST:
        twice = [
            (output.data, _less(output.data))
            for cell in code(notebook)
            for output in cell.outputs
            if "image/png" in output.get("data", {}) and "text/html" in output.data
        ]
        if not twice:
            raise ValueError(f"outputs larger than {LARGEST} bytes without a page to leave out")
        data, form = max(twice, key=lambda item: len(item[0][item[1]]))
        del data[form]
    return notebook


def _palette(picture: str) -> str:
    """The same picture in 256 colours, a third of the bytes, or as it is where that is no less."""
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.mode == "P":
        return picture
    buffer, colours = io.BytesIO(), image.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colours.save(buffer, "png", optimize=True, dpi=image.info.get("dpi"))
    return min(base64.b64encode(buffer.getvalue()).decode(), picture, key=len)


def _less(data: Any) -> str:
    """Which form of an output to leave out: a page leaves its picture, which has the title too; a
    picture with a title above leaves the bare one."""
    return "text/html" if "<iframe" in data["text/html"] else "image/png"


def main(names: list[str]) -> None:
    """Run and store the named notebooks, or all."""
    for name in names or list(NOTEBOOKS):
        path = NOTEBOOKS[name]
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(nbformat.read(path, as_version=4), Path(folder))
        nbformat.write(stored(notebook), path)
        sys.stdout.write(f"{path.name}: {path.stat().st_size / 1e6:.2f} MB\n")


if __name__ == "__main__":
    main(sys.argv[1:])
