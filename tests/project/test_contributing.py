"""What CONTRIBUTING says about the house is so, and the hosted workflow runs the one script."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.project.test_import_direction import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def absent(page: str) -> set[str]:
    """Files named in a page that are not in the project, from its top or from the package."""
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|txt|yml|md))`", page))
    return {n for n in named if not any((top / n).exists() for top in (ROOT, ROOT / "tl_geometry"))}


def test_the_tree_names_every_package_in_the_order_of_imports() -> None:
    tree = re.findall(r"^  (\w+)(?:/|\.py) ", PAGE, flags=re.MULTILINE)
    assert tuple(tree) == PACKAGES[:-1]


def test_files_that_the_page_names_exist() -> None:
    assert not absent(PAGE)
    assert absent("`base/linalg.py` and `tests/__main__.py`, `base/planted.py`") == {
        "base/planted.py"
    }


def test_the_readme_leads_there_and_the_workflow_runs_the_script() -> None:
    assert "(CONTRIBUTING.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    assert "- run: .ci/run ${{ matrix.part }}\n" in workflow


def test_the_parts_of_the_workflow_make_up_the_whole() -> None:
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text(encoding="utf-8")
    matrix = yaml.safe_load(workflow)["jobs"]["checks"]["strategy"]["matrix"]
    assert sorted(matrix["part"]) == sorted(["readme", *shares("3.9", 4), *shares("4.3", 3)])
    left_out = [(job["python"], job["part"]) for job in matrix["exclude"]]
    assert left_out == [("3.12", part) for part in shares("3.9", 4)]


def shares(generation: str, parts: int) -> list[str]:
    """The parts of one generation's tests, as `.ci/run` takes them."""
    return [f"{generation} {which}/{parts}" for which in range(1, parts + 1)]
