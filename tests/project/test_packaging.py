"""The wheel carries the embedded model, pins are plain, the conda recipe agrees with the
project, and the README's commands are the ones that CI runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
YOUR_MODEL = ROOT / "docs" / "guide" / "your_model.md"


@pytest.mark.nightly
def test_the_wheel_carries_the_embedded_model(tmp_path: Path) -> None:
    build = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    wheel = tmp_path / done.stdout.strip().splitlines()[-1]
    assert wheel.stat().st_size < 5_000_000
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (n for n in packed.namelist() if n.endswith(".dist-info/METADATA"))
        shown = packed.read(name).decode().split("\n\n", 1)[1]
    links = re.findall(r"\]\(([^)]*)\)", shown)
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links), "a package index has no files"
    page = "https://tl-geometry.github.io/tl-geometry/main/_static/graph.html"
    assert f"/main/docs/_static/graph.png)]({page})" in shown, "a picture with a link"
    target = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(target),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assets = target / "tl_geometry" / "zoo" / "assets"
    sizes = {p.name: p.stat().st_size for p in assets.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "config.json", "card.json"} <= set(sizes)
    assert sum(sizes.values()) <= 6_000_000
    assert (target / "tl_geometry" / "py.typed").exists()
    views = target / "tl_geometry" / "render" / "assets"
    assert {"kit.css", "kit.js", "maps.js", "arcs.js"} <= {p.name for p in views.iterdir()}
    assert {"report.css", "page.html", "words.toml"} <= {
        p.name for p in (target / "tl_geometry" / "report" / "assets").iterdir()
    }
    read = (
        "import tl_geometry, tl_geometry.zoo as z; print(tl_geometry.__file__); "
        "print(z.card()['held_out_loss'] < 9)"
    )
    environment = {**os.environ, "PYTHONPATH": str(target)}
    out = subprocess.run(
        [sys.executable, "-c", read],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(target) in out.stdout
    assert "True" in out.stdout


@pytest.mark.parametrize(
    "name",
    ["requirements.txt", "requirements-tl4.txt", "requirements-dev.txt", "requirements-docs.txt"],
)
def test_pins_are_exact_and_carry_no_local_version(name: str) -> None:
    lines = [
        line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")
    ]
    assert lines
    loose = [
        line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)
    ]
    assert not loose


def test_the_pin_detector_detects() -> None:
    assert not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", "torch==2.13.0+cpu")
    assert not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", "torch>=2")


CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Packages that conda-forge has under another name."""


def recipe_faults(recipe: str, project: dict[str, Any]) -> list[str]:
    """Where a conda recipe differs from pyproject.toml."""
    context = dict(re.findall(r'^  (\w+): "(.*)"$', recipe, flags=re.MULTILINE))
    filled = re.sub(r"\$\{\{ (\w+) \}\}", lambda m: context.get(m[1], m[0]), recipe)
    run = filled.partition("  run:\n")[2].partition("\n\n")[0]
    found = {line.strip().removeprefix("- ").replace(" ", "") for line in run.splitlines()}
    names = [re.fullmatch(r"([\w-]+)(.*)", line) for line in project["dependencies"]]
    expected = {CONDA_NAMES.get(m[1], m[1]) + m[2] for m in names if m}
    expected.add("python" + project["requires-python"])
    lines = [
        f"  version: {project['version']}",
        f"  license: {project['license']}",
        f"  summary: {project['description']}",
        f"  homepage: {project['urls']['Homepage']}",
        f"  url: {project['urls']['Repository']}/archive/refs/tags/v{project['version']}.tar.gz",
        *(f"      - {name} = {entry}" for name, entry in project["scripts"].items()),
    ]
    return [*sorted(found ^ expected), *(line for line in lines if f"\n{line}\n" not in filled)]


def test_the_conda_recipe_agrees_with_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text()
    assert not recipe_faults(recipe, project)
    for old, new, faults in [
        ("    - einops >=0.8\n", "", 1),
        ("pytorch >=2.6", "pytorch >=2.5", 2),
        ('python_min: "3.11"', 'python_min: "3.10"', 2),
        ('version: "0.1.0"', 'version: "0.0.9"', 2),
    ]:
        assert recipe.count(old) == 1
        assert len(recipe_faults(recipe.replace(old, new), project)) == faults
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert recipe.count("  sha256: SHA256\n") == 1
    assert "s/SHA256/" in workflow


def test_what_the_host_reads_can_be_read_and_only_a_published_release_uploads() -> None:
    files = [*(ROOT / ".github").rglob("*.y*ml"), ROOT / ".pre-commit-config.yaml"]
    read = {path.name: yaml.safe_load(path.read_text()) for path in files}
    assert {"checks.yml", "nightly.yml", "faults.yml", "site.yml", "release.yml"} <= set(read)
    parts = [
        job["part"] for job in read["checks.yml"]["jobs"]["checks"]["strategy"]["matrix"]["include"]
    ]
    assert sorted(parts) == ["3.9", "3.9", "4.3", "site"]
    jobs = read["release.yml"]["jobs"]
    uploading = [n for n, job in jobs.items() if "id-token" in job.get("permissions", {})]
    assert uploading == ["publish"]
    assert jobs["publish"]["if"] == "github.event_name == 'release'"
    with pytest.raises(yaml.YAMLError):  # a colon in a command that is not quoted
        yaml.safe_load('run: grep "date: today" file')


def test_the_version_and_its_date_are_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\d.*)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    cited = dict(
        line.split(": ", 1)
        for line in (ROOT / "CITATION.cff").read_text().splitlines()
        if line.startswith(("version: ", "date-released: "))
    )
    assert newest is not None
    assert newest[1] == f"{version} ({cited['date-released']})"
    assert cited["version"] == version


def test_readme_begins_with_the_two_commands() -> None:
    blocks = re.findall(
        r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE
    )
    assert len(blocks) >= 2
    for block in blocks[:2]:
        assert "python3 -m venv" in block
        assert "requirements.txt" in block
    assert blocks[0].strip().splitlines()[-1].startswith("tl-geometry report")
    assert "python -m tests" in blocks[1]


@pytest.mark.nightly
@pytest.mark.parametrize("model_class", ["hooked", "bridge"])
def test_the_examples_for_your_model_run(
    model_class: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.lib.models import HAS_HOOKED

    if model_class == "hooked" and not HAS_HOOKED:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    blocks = re.findall(
        r"^```python\n(.*?)^```$", YOUR_MODEL.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    make = "zoo.embedded()"
    if model_class == "hooked":
        make = "tests.lib.worlds.world('embedded', 'hooked').model"
    code = next(b for b in blocks if ("HookedTransformer" in b) is (model_class == "hooked"))
    (tmp_path / "book.txt").write_text("def f(x):\n    return x\n\n" * 400)
    monkeypatch.chdir(tmp_path)
    swaps = {
        r"^from transformer_lens.*$": "import tests.lib.worlds\nfrom tl_geometry import zoo",
        r"^model = .*$": f"model = {make}",
    }
    swaps |= {
        r"\b256\b": "32",
        r"L5H1|L4H11": "L1H0",
        r"open\(\"book.txt\"\)": "__import__('pathlib').Path('book.txt')",
        r"\.read\(\)": ".read_text()",
    }
    for old, new in swaps.items():
        code, count = re.subn(old, new, code, flags=re.MULTILINE)
        assert count or "L5H1" in old
    names: dict[str, object] = {}
    exec(compile(code, YOUR_MODEL.name, "exec"), names)
    assert names["basis"].contexts > 10  # type: ignore[attr-defined]


@pytest.mark.nightly
def test_the_source_distribution_builds_the_same_wheel_and_ships_no_test_that_cannot_run(
    tmp_path: Path,
) -> None:
    build = "import hatchling.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    with tarfile.open(tmp_path / done.stdout.strip().splitlines()[-1]) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert {p.name for p in source.iterdir()} >= {
        "tl_geometry",
        "README.md",
        "LICENSE",
        "pyproject.toml",
    }
    assert not (source / "tests").exists()
    again = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1]))"
    subprocess.run(
        [sys.executable, "-c", again, str(tmp_path)],
        cwd=source,
        capture_output=True,
        text=True,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        assert {
            "tl_geometry/zoo/assets/model.safetensors",
            "tl_geometry/render/assets/kit.js",
            "tl_geometry/report/assets/words.toml",
        } <= set(packed.namelist())


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "$(block 1)" in script
    assert "$(block 2 | head -n -1)" in script
    assert "--dry-run" in script
    readme = (ROOT / "README.md").read_text().splitlines()
    both = "\n".join(line for line in readme if not line.endswith("with TransformerLens 3"))
    pins = set(re.findall(r"[\w.-]+==[\w.]+", both))
    assert len(pins) >= 3
    # TransformerLens 4.3 is tested with the same models
    assert pins <= set(re.findall(r"[\w.-]+==[\w.]+", script))
