"""The site: ``python -m sphinx -W docs docs/_build/html`` in the second environment of README.

Offline. Notebooks are copied from ``notebooks/`` as they are stored and never run; the pages of the
API are written from each package's ``__all__``; pictures are those of ``python docs/pictures.py``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import shutil
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))

project = "tl_geometry"
author = "The tl_geometry authors"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "support_table.md"]
html_theme = "furo"
html_title = "tl_geometry"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "source_repository": "https://github.com/tl-geometry/tl-geometry/",
    "source_branch": "main",
    "source_directory": "docs/",
}
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
nb_execution_mode = "off"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!tl_geometry).*")]
suppress_warnings = ["mystnb.unknown_mime_type"]
PACKAGES = (
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
)
"""Public packages, in the order of imports."""


def api_page(package: str) -> str:
    """A page with every public name of a package, from its docstrings, by the module that holds it:
    formulas stand at the top of modules."""
    module = importlib.import_module(f"tl_geometry.{package}")
    title = f"tl_geometry.{package}"
    lines = [title, "=" * len(title), "", f".. automodule:: {title}", "   :no-members:", ""]
    homes: dict[str, list[str]] = {}
    for name in sorted(module.__all__, key=str.lower):
        found = getattr(module, name)
        home = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", title)
        homes.setdefault(home if home.startswith(f"{title}.") else title, []).append(name)
    for home, names in sorted(homes.items()):
        if home != title:
            heading = home.split(".")[-1].replace("_", " ").capitalize()
            text = inspect.getdoc(importlib.import_module(home)) or ""
            lines += [heading, "-" * len(heading), "", *_formulas(text), ""]
        for name in names:
            lines += _entry(package, name, getattr(module, name))
    return "\n".join(lines)


def _formulas(text: str) -> list[str]:
    """A module's docstring; indented paragraphs are formulas, and keep their lines."""
    lines: list[str] = []
    for paragraph in _escaped(text.splitlines(), "    "):
        before = [line for line in lines if line.strip()][-1:]
        starts = paragraph.startswith("    ") and not lines[-1].strip()
        if starts and not before[0].startswith((" ", "-")) and not before[0].endswith("::"):
            lines += [".. code-block:: text", ""]
        lines.append(paragraph)
    return lines


def _entry(package: str, name: str, found: Any) -> list[str]:
    place = f"tl_geometry.{package}.{name}"
    if inspect.ismodule(found):
        return [f".. automodule:: {place}", "   :members:", "   :no-index:", ""]
    if inspect.isclass(found):
        return [f".. autoclass:: {place}", "   :members:", ""]
    if callable(found):
        return [f".. autofunction:: {place}", ""]
    return [f".. py:data:: {place}", "", f"   {_said(package, name)}", ""]


RESULTS = {
    "tl_geometry": (
        "Result",
        "Provenance",
        "GeometryError",
        "BudgetError",
        "ReconstructionError",
        "UnsupportedModelError",
    ),
    "tl_geometry.render.figure": ("View",),
    "tl_geometry.render.page": ("PageView",),
}
"""What every package returns and raises, on a page of its own."""


def results_page() -> str:
    """Results, errors and views, which belong to no one package."""
    title = "Results, errors and views"
    lines = [title, "=" * len(title), ""]
    for module, names in RESULTS.items():
        for name in names:
            lines += [f".. autoclass:: {module}.{name}", "   :members:", ""]
    return "\n".join(lines)


def documented() -> dict[int, str]:
    """Identity of every object on a page of the API -> the name that it has there."""
    places = {f"tl_geometry.{p}": None for p in PACKAGES} | RESULTS
    found: dict[int, str] = {}
    for place, names in places.items():
        module = importlib.import_module(place)
        found |= {} if names else {id(module): place}
        for name in names or module.__all__:
            found.setdefault(id(getattr(module, name)), f"{place}.{name}")
    return found


def resolve(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """A reference by the name of the module that holds something, or by its name at the top, leads
    to where it is documented; what exists without a page is plain text; the rest is an error."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("tl_geometry"):
        return None
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    name = documented().get(id(found))
    if name is None and inspect.ismodule(found):
        name = ".".join(target.split(".")[:2])
    if name is None or name == target:
        return contnode
    domain, role = env.domains["py"], "mod" if inspect.ismodule(found) else "obj"
    link = domain.resolve_xref(env, node["refdoc"], app.builder, role, name, node, contnode)
    return contnode if link is None else link


def _said(package: str, name: str) -> str:
    """The text below a public constant, which Python itself does not keep."""
    for path in sorted((ROOT / "tl_geometry" / package).glob("*.py")):
        body = ast.parse(path.read_text("utf-8")).body
        for statement, after in itertools.pairwise(body):
            target = getattr(statement, "target", None) or getattr(statement, "targets", [None])[0]
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if getattr(target, "id", None) == name and is_text:
                return " ".join(str(after.value.value).split())
    return ""


def _escaped(lines: list[str], verbatim: str = "\0") -> list[str]:
    """``|x|`` is an absolute value in a docstring, and never the name of a substitution; lines that
    start with ``verbatim`` stay."""
    return [
        line
        if line.startswith(verbatim) or line.lstrip().startswith((">>>", "..."))
        else "``".join(
            part if i % 2 else part.replace("|", "\\|") for i, part in enumerate(line.split("``"))
        )
        for line in lines
    ]


def escape_bars(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """The same for what autodoc reads."""
    lines[:] = _escaped(lines)


def write_pages(*_: Any) -> None:
    """Copy the notebooks and write the pages of the API, where they have changed."""
    pages = {DOCS / "api" / f"{name}.rst": api_page(name) for name in PACKAGES}
    pages[DOCS / "api" / "results.rst"] = results_page()
    for path, text in pages.items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
    target = DOCS / "notebooks"
    target.mkdir(exist_ok=True)
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        if not (target / notebook.name).exists() or (
            (target / notebook.name).read_bytes() != notebook.read_bytes()
        ):
            shutil.copy(notebook, target)


def visit_math(display: str) -> Any:
    """Formulas as MathML, which browsers draw by themselves: no script and no network."""

    def visit(translator: Any, node: Any) -> None:
        formula = latex2mathml.converter.convert(node.astext(), display=display)
        around = ("<div class='formula'>", "</div>") if display == "block" else ("", "")
        translator.body.append(formula.join(around))
        raise nodes.SkipNode

    return visit


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_math("inline"), None),
        block_renderers=(visit_math("block"), None),
    )
    app.connect("builder-inited", write_pages)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", escape_bars, priority=100)
