"""``docs/publish.sh`` puts the sites of versions beside each other."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]


def git(folder: Path, *words: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def published(clone: Path, name: str, text: str) -> None:
    site = clone.parent / "site"
    shutil.rmtree(site, ignore_errors=True)
    (site / "_static").mkdir(parents=True)
    (site / "index.html").write_text(text)
    (site / "_static" / f"{text}.css").write_text("")
    command = ["bash", str(ROOT / "docs" / "publish.sh"), str(site), name]
    subprocess.run(command, cwd=clone, check=True, capture_output=True)


def test_sites_of_versions_stand_beside_each_other(tmp_path: Path) -> None:
    shared, clone = tmp_path / "shared", tmp_path / "clone"
    git(tmp_path, "init", "-q", "--bare", str(shared))
    git(tmp_path, "clone", "-q", str(shared), str(clone))
    for setting in ("user.name", "user.email"):
        git(clone, "config", setting, "a@b.c")
    (clone / "code.py").write_text("")
    git(clone, "add", "-A")
    git(clone, "commit", "-qm", "code")

    def shown(path: str) -> str:
        return git(shared, "show", f"gh-pages:{path}")

    published(clone, "main", "first")
    assert json.loads(shown("versions.json")) == ["main"]
    assert "url=main/" in shown("index.html")
    for name in ("0.9.0", "0.10.0", "main"):
        published(clone, name, f"of {name}")
    assert json.loads(shown("versions.json")) == ["0.10.0", "0.9.0", "main"]
    assert "url=0.10.0/" in shown("index.html")
    assert shown("main/index.html") == "of main"
    files = git(shared, "ls-tree", "-r", "--name-only", "gh-pages").splitlines()
    assert "main/_static/of main.css" in files
    assert "main/_static/first.css" not in files, "what a site no longer has goes"
    assert "code.py" not in files
    assert ".nojekyll" in files
    published(clone, "main", "of main")  # nothing to commit
    assert git(clone, "worktree", "list").count("\n") == 1


def test_the_workflow_calls_the_script() -> None:
    workflow = (ROOT / ".github" / "workflows" / "site.yml").read_text()
    assert '- run: docs/publish.sh site "${GITHUB_REF_NAME#v}"\n' in workflow
    assert "DOCS_ONLINE=1 python -m sphinx -q -W" in workflow
