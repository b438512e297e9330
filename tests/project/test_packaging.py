"""What a user installs: the wheel carries its data, pins are plain, whatever is imported is
declared, the version is the same everywhere, and README's commands are those of CI."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
ASSETS = {
    "zoo": {"model.safetensors", "tokenizer.json", "config.json", "card.json"},
    "render": {"kit.css", "kit.js", "maps.js", "arcs.js"},
    "report": {"report.css", "page.html", "words.toml"},
}
PIN = r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*"


def python(code: str, *words: object, **options: Any) -> str:
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


def built(kind: str, source: Path, folder: Path) -> Path:
    """A wheel or a source distribution."""
    code = f"import hatchling.build as b, sys; print(b.build_{kind}(sys.argv[1]))"
    return folder / python(code, folder, cwd=source).strip().splitlines()[-1]


@pytest.mark.nightly
def test_the_wheel_carries_the_data_and_imports(tmp_path: Path) -> None:
    wheel, target = built("wheel", ROOT, tmp_path), tmp_path / "site"
    assert wheel.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        shown = packed.read(name).decode().split("\n\n", 1)[1]
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links), "a package index has no files"
    words = ["install", "--quiet", "--no-index", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, capture_output=True)
    for package, names in ASSETS.items():
        assert names <= {p.name for p in (target / "tl_geometry" / package / "assets").iterdir()}
    assert (target / "tl_geometry" / "py.typed").exists()
    code = "import tl_geometry as t; print(t.__file__, t.view(t.zoo.embedded()).n_layers)"
    said = python(code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(target)})
    assert str(target) in said


@pytest.mark.parametrize("name", ["", "-tl4", "-dev", "-docs"])
def test_pins_are_exact_and_carry_no_local_version(name: str) -> None:
    lines = (ROOT / f"requirements{name}.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    assert lines
    assert not [line for line in lines if not re.fullmatch(PIN, line)]
    assert not any(re.fullmatch(PIN, planted) for planted in ("torch==2.13.0+cpu", "torch>=2"))


OURS = {"tl_geometry", "tests", "benchmarks"}
DISTRIBUTION = {"PIL": "pillow", "sklearn": "scikit-learn"}
BY_NAME = {"import_module", "importorskip"}


def imported(source: str) -> set[str]:
    """Distributions of the modules that a source imports, at its top or inside a function."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in BY_NAME:
            argument = node.args[0]
            names += [str(argument.value)] if isinstance(argument, ast.Constant) else []
    tops = {name.split(".")[0] for name in names} - OURS - sys.stdlib_module_names - {""}
    return {DISTRIBUTION.get(top, top.replace("_", "-")) for top in tops}


def declared(*, dev: bool) -> set[str]:
    """Distributions that ``pyproject.toml`` names; on request those of the extra ``dev``, and what
    README installs by itself because its own pins are narrower (``--no-deps``)."""
    extras = {k: v for k, v in PROJECT["optional-dependencies"].items() if dev or k != "dev"}
    lines = [*PROJECT["dependencies"], *(line for lines in extras.values() for line in lines)]
    apart = re.findall(r"^pip install --no-deps (.*==.*)$", README, re.M)
    lines += [name for line in apart for name in line.split() if dev and "==" in name]
    return {re.split(r"[^\w.-]", line)[0].lower() for line in lines}


@pytest.mark.parametrize("folder", sorted(OURS))
def test_whatever_is_imported_is_declared(folder: str) -> None:
    known = declared(dev=folder != "tl_geometry")
    sources = {p: p.read_text("utf-8") for p in sorted((ROOT / folder).rglob("*.py"))}
    missing = {str(p.relative_to(ROOT)): imported(text) - known for p, text in sources.items()}
    assert not {path: names for path, names in missing.items() if names}


def test_the_import_detector_detects() -> None:
    planted = """
import os.path, msgpack.ext
def f():
    from PIL import Image
    import_module("left_pad.x"), importlib.import_module(name), pytest.importorskip("rpy2")
    from tl_geometry import base
    from . import here
"""
    assert imported(planted) == {"msgpack", "pillow", "left-pad", "rpy2"}
    assert "pillow" in declared(dev=False)
    assert "pytest" in declared(dev=True) - declared(dev=False)
    assert not {"msgpack", "left-pad", "rpy2"} & declared(dev=True)


def test_the_version_and_its_date_are_the_same_everywhere() -> None:
    version = PROJECT["version"]
    newest = re.search(r"^## (\d.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    cited = dict(
        line.split(": ", 1)
        for line in (ROOT / "CITATION.cff").read_text().splitlines()
        if line.startswith(("version: ", "date-released: "))
    )
    assert newest is not None
    assert newest[1] == f"{version} ({cited['date-released']})"
    assert cited["version"] == version


def test_ci_runs_what_the_readme_says() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    assert all("requirements.txt" in block for block in blocks[:2])
    assert blocks[0].strip().splitlines()[-1].startswith("tl-geometry report")
    assert "python -m tests" in blocks[1]
    script = (ROOT / ".ci" / "run").read_text()
    assert "$(block 1)" in script
    assert "$(block 2 | head -n -1)" in script
    lines = [line for line in README.splitlines() if not line.endswith("with TransformerLens 3")]
    pins = set(re.findall(r"[\w.-]+==[\w.]+", "\n".join(lines)))
    assert len(pins) >= 3
    # TransformerLens 4.3 is tested with the same models
    assert pins <= set(re.findall(r"[\w.-]+==[\w.]+", script))
