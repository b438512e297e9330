"""Whatever is imported is declared: by the package in its dependencies or an extra, by tests and
benchmarks there or among the development extras."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
OURS = {"tl_geometry", "tests", "benchmarks"}
DISTRIBUTION = {
    "PIL": "pillow",
    "mpl_toolkits": "matplotlib",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Modules that are not named as the distribution that brings them."""
BY_NAME = {"import_module", "importorskip"}
"""Functions that import what their first argument names."""


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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if dev or k != "dev"}
    lines = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    apart = re.findall(r"^pip install --no-deps (.*==.*)$", (ROOT / "README.md").read_text(), re.M)
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
