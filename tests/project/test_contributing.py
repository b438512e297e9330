"""What CONTRIBUTING says about the house is so, and the hosted workflow runs the one script."""

from __future__ import annotations

import re
from pathlib import Path

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
    assert "- run: .ci/run\n" in workflow
