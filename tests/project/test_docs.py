"""The site and README: what they show was made by the code that stands beside it; of the built site
(``python -m tests --only docs``, before the tests) every internal link leads somewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
from PIL import Image

import tl_geometry
from tests import support
from tests.lib.models import ARCHITECTURES
from tests.tables.test_signatures import PACKAGES

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [path for path in PAGES if "_build" not in path.parts]


def module(name: str) -> ModuleType:
    """A script of ``docs/``, which is no package."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


pictures, growth = module("pictures"), module("growth")
SCRIPTS: dict[str, Path] = pictures.SCRIPTS


def blocks(form: str) -> list[str]:
    """README's code of one language."""
    return re.findall(rf"^```{form}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_every_example_has_the_picture_of_its_code_and_a_text_to_read_it_by() -> None:
    stored = {path.stem for path in (DOCS / "_static").glob("*.png")}
    assert stored == set(SCRIPTS) | {growth.PICTURE.stem}
    assert len(SCRIPTS) == len(list((DOCS / "gallery").rglob("*.py")))
    assert set(pictures.THUMBNAILS) == set(SCRIPTS)
    for name, path in SCRIPTS.items():
        code = pictures.code(path)
        page = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        assert 20 < len(" ".join(page.splitlines()[3:]).split()) < 90, name
        assert len([line for line in code.splitlines() if line]) <= 14, name
        with Image.open(DOCS / "_static" / f"{name}.png") as image:
            assert image.text["script"] == pictures.digest(code), name  # type: ignore[attr-defined]
            assert image.text["null"], name  # type: ignore[attr-defined]
            assert image.text["source"], name  # type: ignore[attr-defined]
            assert image.width <= pictures.WIDEST
        part = pictures.thumbnail(name).convert("L")
        assert len(set(part.tobytes())) > 10, f"{name}: hardly anything on it"
    assert pictures.digest("a") != pictures.digest("b")


def test_readme_shows_the_first_script_its_picture_and_its_output() -> None:
    (code,) = blocks("python")
    script = pictures.code(SCRIPTS["induction"])
    assert code == f'{script}view.save("induction.html")  # linked panels, one page, offline\n'
    assert blocks("text")[0] == SCRIPTS["induction"].with_suffix(".txt").read_text("utf-8")
    site = "https://tl-geometry.github.io/tl-geometry/main/_static"  # where pages are live
    assert re.findall(r"^\[!\[[^]]*\]\(([^)]*)\)\]\(([^)]*)\)$", README, re.MULTILINE) == [
        ("docs/_static/graph.png", f"{site}/graph.html"),
    ]
    assert len(README.split()) <= 900


@pytest.mark.nightly
def test_the_first_script_prints_what_is_stored() -> None:
    view, printed = pictures.run(pictures.code(SCRIPTS["induction"]))
    assert printed == blocks("text")[0]
    assert "L1H0" in view.title


def links(page: str) -> set[str]:
    """Relative files that a page leads to."""
    found = re.findall(r"\]\(([^)\s#]+)", page)
    return {link for link in found if "://" not in link and not link.startswith("mailto:")}


def test_links_lead_to_files() -> None:
    pages = {path: links(path.read_text("utf-8")) for path in PAGES}
    absent = {str(p): link for p in pages for link in pages[p] if not (p.parent / link).exists()}
    assert not absent
    assert sum(map(len, pages.values())) > 30
    planted = "[a](b.md) [c](d.md#e) ![f](g.png) [h](https://i.j) [k](#l)"
    assert links(planted) == {"b.md", "d.md", "g.png"}


def test_the_support_table_has_every_architecture_and_nothing_between() -> None:
    stored = json.loads(support.STORED.read_text("utf-8"))
    assert support.TABLE.read_text("utf-8") == support.table(stored)
    assert [lens.split(".")[0] for lens in stored] == ["3", "4"]
    for columns in stored.values():
        for cells in columns.values():
            assert list(cells) == list(ARCHITECTURES)
            for cell in cells.values():
                exact = cell["verdict"] == "exact" and 0 < cell["worst"] <= 1
                assert exact != (cell["verdict"] == "refused" and len(cell["why"]) > 10)
    assert set(stored["3.9.0"]) == set(support.NAMES.values())
    said = re.search(r"\[(\d+) architectures measured\]", README)
    assert said is not None
    assert int(said[1]) == len(ARCHITECTURES)


def test_the_api_has_a_page_for_every_public_package() -> None:
    source = (DOCS / "conf.py").read_text("utf-8")
    named = re.findall(r'^    "(\w+)",$', source.split("PACKAGES = (")[1].split(")")[0], re.M)
    index = (DOCS / "api" / "index.md").read_text("utf-8")
    assert re.findall(r"^(\w+)$", index, re.M) == ["results", *named]
    assert set(named) == set(tl_geometry.__all__) & set(PACKAGES)


def shown(text: str, *, script: bool = False) -> set[str]:
    """Words of the code on a page: blocks, spans and roles (of a script: all but its docstring)."""
    code = re.sub(r'^""".*?"""', "", text, flags=re.S) if script else ""
    spans = [] if script else re.findall(r"```.*?```|`[^`]+`", text, flags=re.S)
    return set(re.findall(r"\w+", " ".join([code, *spans])))


def names_of(stub: str) -> list[str]:
    """What a package lists."""
    return re.findall(r"^from [.\w]+ import \w+ as (\w+)$", stub, re.M)


def test_each_public_name_is_used_where_a_reader_sees_it() -> None:
    stubs = [path.read_text("utf-8") for path in (ROOT / "tl_geometry").rglob("__init__.pyi")]
    names = {name for stub in stubs for name in names_of(stub)}
    seen = {word for path in PAGES for word in shown(path.read_text("utf-8"))}
    for path in SCRIPTS.values():
        seen |= shown(path.read_text("utf-8"), script=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            seen |= shown("".join(cell["source"]), script=cell["cell_type"] == "code")
    assert sorted(names - seen) == []
    assert names_of("from .a import b as b\nfrom . import c as c\nx: str\n") == ["b", "c"]
    page = "Some `tlg.used` and\n```python\nf(x)\n```\nunused"
    assert shown(page) == {"tlg", "used", "python", "f", "x"}
    assert shown('"""unused"""\nused()', script=True) == {"used"}
