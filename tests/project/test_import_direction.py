"""A package imports only packages above it, and importing the package is light. Each detector has
a twin that proves it detects."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tl_geometry

PACKAGE = Path(tl_geometry.__file__).parent
PACKAGES = (
    "base",
    "models",
    "corpus",
    "decomposition",
    "scores",
    "circuits",
    "weights",
    "sphere",
    "measures",
    "flow",
    "interventions",
    "zoo",
    "render",
    "report",
    "papers",
    "cli",
    "__main__",
)
"""Packages from the ground up: each imports only those before it."""
HEAVY = (
    "transformer_lens",
    "circuitsvis",
    "matplotlib",
    "pandas",
    "transformers",
    "sklearn",
    "plotly",
)
ONLY = {
    "transformer_lens": {"models"},
    "circuitsvis": {"render"},
    "matplotlib": {"render", "papers"},
}
"""Libraries that only these packages may import."""
BY_NAME = {
    "scores.splitter imports tl_geometry.papers.split_presets",
    "scores.sweep imports tl_geometry.circuits.writer_sweep",
}
"""One public function takes what a later package adds to it: presets of publications, writers."""


def imports(source: str) -> list[tuple[str, bool]]:
    """(dotted module, at import time) of every import in a module, names of ``from a import b`` as
    ``a.b`` and modules imported by a name in quotes too."""
    tree = ast.parse(source)
    lazy: set[ast.AST] = set()
    for node in ast.walk(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or typing_only:
            lazy.update(ast.walk(node))
    found: list[tuple[str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node not in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", node not in lazy) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found += [(str(name.value), False) for name in node.args if type(name) is ast.Constant]
    return found


def package(dotted: str) -> str:
    """Package of a module of this project."""
    return dotted.split(".")[1] if "." in dotted else "__init__"


def violations(name: str, source: str) -> list[str]:
    """What a module named ``tl_geometry.<name>`` must not import."""
    mine = package(f"tl_geometry.{name}")
    wrong = []
    for dotted, eager in imports(source):
        top = dotted.split(".")[0]
        if top in ONLY and mine not in ONLY[top]:
            wrong.append(f"{name} imports {top}")
        if top in HEAVY and eager:
            wrong.append(f"{name} imports {top} at import time")
        if top != "tl_geometry" or mine == "__init__":
            continue
        other = package(dotted)
        if other in PACKAGES and PACKAGES.index(other) > PACKAGES.index(mine):
            wrong.append(f"{name} imports {dotted}")
    return wrong


def modules() -> dict[str, str]:
    return {
        ".".join(p.relative_to(PACKAGE).with_suffix("").parts).removesuffix(
            ".__init__"
        ): p.read_text(encoding="utf-8")
        for p in sorted(PACKAGE.rglob("*.py"))
    }


def test_every_package_has_a_place() -> None:
    assert {name.split(".")[0] for name in modules()} - {"__init__"} <= set(PACKAGES)


def test_packages_import_only_those_above_them() -> None:
    wrong = [
        line
        for name, source in modules().items()
        if name != "__init__"
        for line in violations(name, source)
    ]
    assert set(wrong) == BY_NAME, "\n".join(wrong)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("base.linalg", "from tl_geometry.models.model_view import ModelView"),
        ("models.reader", "from tl_geometry import corpus"),
        ("models.model_view", "if TYPE_CHECKING:\n    from tl_geometry.corpus import TokenWindows"),
        ("decomposition.streaming", "def f():\n    from tl_geometry.scores import split"),
        ("decomposition.streaming", "import transformer_lens"),
        ("render.basis", "import matplotlib.pyplot as plt"),
        ("models.reader", "import transformer_lens"),
        ("models.reader", "import tl_geometry.render.basis"),
        ("report.build", "from tl_geometry import papers"),
        ("scores.split", "def f():\n    importlib.import_module('tl_geometry.papers.figures')"),
    ],
)
def test_a_planted_import_is_caught(name: str, planted: str) -> None:
    assert violations(name, planted)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("decomposition.position_context", "from tl_geometry.decomposition.moments import Moments"),
        ("render.basis", "def f():\n    import matplotlib"),
        ("models.reader", "def f():\n    import transformer_lens"),
        ("corpus.sources", "def f():\n    from tl_geometry.models import view"),
    ],
)
def test_an_allowed_import_is_let_through(name: str, planted: str) -> None:
    assert not violations(name, planted)


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_is_light() -> None:
    assert loaded_by("import tl_geometry; dir(tl_geometry); tl_geometry.decompose") == set()


def test_the_light_import_detector_detects() -> None:
    assert "matplotlib" in loaded_by("import tl_geometry, matplotlib")


def shadowed(package: Any) -> set[str]:
    """Public callables of a package that share the name of one of its modules."""
    folder = Path(package.__file__).parent
    modules = {p.stem for p in folder.iterdir() if p.suffix == ".py" or p.is_dir()}
    return {n for n in package.__all__ if n in modules and callable(getattr(package, n))}


def test_public_names_exist_and_differ_from_submodules() -> None:
    assert 20 <= len(set(tl_geometry.__all__) - set(PACKAGES)) <= 30
    for name in PACKAGES[1:-2]:
        package = importlib.import_module(f"tl_geometry.{name}")
        assert not shadowed(package), name
        assert package.__doc__
    assert not shadowed(tl_geometry)
    with pytest.raises(AttributeError, match="decompse"):
        getattr(tl_geometry, "decompse")  # noqa: B009 (a type checker refuses the attribute)


def test_a_planted_name_is_caught(tmp_path: Path) -> None:
    (tmp_path / "split.py").touch()
    planted = SimpleNamespace(__file__=str(tmp_path / "x"), __all__=["split"], split=len)
    assert shadowed(planted) == {"split"}


def test_axis_names_come_from_the_vocabulary() -> None:
    import re

    from tl_geometry.base.axes import AXES

    pattern = re.compile(r"\b(?:Float|Int|Bool|Num|Shaped|Complex)\[Tensor, \"([^\"]*)\"\]")
    used = {
        (n, axis)
        for n, source in modules().items()
        for text in pattern.findall(source)
        for axis in text.split()
    }
    unknown = {
        (n, a)
        for n, a in used
        if not a.isdigit()
        and a != "..."
        and a.lstrip("*").split("+")[0].split("-")[0].split("*")[-1] not in AXES
    }
    assert not unknown, sorted(unknown)


def too_long(sources: dict[str, str]) -> list[str]:
    """Modules of more than 500 lines, and functions of more than 60 below their docstring."""
    found = [name for name, source in sources.items() if source.count("\n") > 500]
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1:2] if ast.get_docstring(node) else node.body[:1]
                if first and (node.end_lineno or 0) - first[0].lineno >= 60:
                    found.append(f"{name}.{node.name}")
    return found


def test_sizes_stay_readable() -> None:
    assert too_long(modules()) == []


def test_what_is_too_long_is_found() -> None:
    def function(lines: int) -> str:
        return "def f():\n    'Long.'\n" + "    pass\n" * lines

    sources = {"a": function(60), "b": function(61), "c": "\n" * 501}
    assert too_long(sources) == ["c", "b.f"]
