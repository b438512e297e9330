"""The site: ``python -m sphinx -W docs docs/_build/html`` in the second environment of README.

Offline, unless DOCS_ONLINE=1. Notebooks are copied from ``notebooks/`` as they are stored and never
run; the pages of the API are written from each package's ``__all__``; the gallery is made by
sphinx-gallery from the scripts in ``docs/gallery``, without a run: pictures are those of ``python
docs/pictures.py``.
"""

from __future__ import annotations

import ast
import functools
import html
import importlib
import inspect
import itertools
import os
import pkgutil
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes
from mdit_py_plugins.anchors.index import slugify
from PIL import Image
from sphinx_gallery.sorting import ExplicitOrder

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT), str(DOCS)]
from pictures import SHAPE, THUMBNAILS, thumbnail  # noqa: E402

from tl_geometry import Result  # noqa: E402 (of this tree, whatever is installed)

project = "tl_geometry"
author = "The tl_geometry authors"
copyright = author
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "support_table.md", "gallery", "examples/**.ipynb"]
html_theme = "furo"
html_title = "tl_geometry"
html_static_path = ["_static"]
html_extra_path = ["llms.txt"]
html_css_files = ["site.css"]
html_js_files = ["versions.js"]
# one link to the repository in place of links to the source of each page: many pages are generated
html_theme_options = {
    "footer_icons": [
        {
            "name": "Source on GitHub",
            "url": "https://github.com/tl-geometry/tl-geometry",
            "html": "Source on GitHub",
            "class": "",
        }
    ]
}
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
html_math_renderer = "mathml"
nb_execution_mode = "off"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
# Types of torch, numpy and TransformerLens lead to their own sites in builds with DOCS_ONLINE=1;
# without it nothing asks the network, and these names stay plain text.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "transformer_lens": ("https://transformerlensorg.github.io/TransformerLens", None),
}
if os.environ.get("DOCS_ONLINE") != "1":
    intersphinx_mapping = {}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!tl_geometry).*")]
suppress_warnings = ["mystnb.unknown_mime_type"]
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "examples",
    "nested_sections": False,
    "subsection_order": [
        f"gallery/{question}"
        for question in ("logits", "heads", "removal", "states", "weights", "sphere", "flow")
    ],
    "within_subsection_order": ExplicitOrder([f"{name}.py" for name in THUMBNAILS]),
    "thumbnail_size": SHAPE,
    "plot_gallery": False,  # pictures are stored: see place_pictures
    "image_scrapers": (),
    "reset_modules": (),
    "download_all_examples": False,
    "show_signature": False,
    "write_computation_times": False,
}
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


SECTIONS = (
    "Functions that take a model",
    "Other functions",
    "Results",
    "Other classes",
    "Modules",
    "Constants",
)
"""The summary at the top of a page of the API, in this order."""


def section(found: Any) -> str:
    """Which of :data:`SECTIONS` a public object belongs to."""
    if inspect.ismodule(found):
        return "Modules"
    if inspect.isclass(found):
        return "Results" if issubclass(found, Result) else "Other classes"
    if not callable(found):
        return "Constants"
    first = next(iter(inspect.signature(found).parameters), "")
    return SECTIONS[0] if first == "model" else SECTIONS[1]


def summary(package: str, names: list[str]) -> list[str]:
    """One table for each section; ``names`` are in order."""
    module = importlib.import_module(f"tl_geometry.{package}")
    lines: list[str] = []
    for title in SECTIONS:
        rows = [name for name in names if section(getattr(module, name)) == title]
        shown = title if lines else title.removeprefix("Other ").capitalize()
        lines += [f".. rubric:: {shown}", "", ".. list-table::", ""] if rows else []
        for name in rows:
            found = getattr(module, name)
            text = _said(package, name) if title == "Constants" else inspect.getdoc(found) or ""
            lines += [f"   * - :py:obj:`~tl_geometry.{package}.{name}`"]
            lines += [f"     - {_escaped([first_sentence(text)])[0]}"]
        lines += [""] if rows else []
    return lines


def first_sentence(text: str) -> str:
    """Of a docstring. A full stop inside ``code``, or before a number as in "Fig. 2" and "et al.
    2025", ends nothing (autosummary stops there)."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.match(r"(``.*?``|`[^`]*`|[^`])*?\.(?=\s+[A-Z`]|$)", paragraph)
    return sentence[0] if sentence else paragraph


def api_page(package: str) -> str:
    """A page with every public name of a package: a summary that begins with the main functions,
    then each name from its docstring, by the module that holds it, whose formulas stand above."""
    module = importlib.import_module(f"tl_geometry.{package}")
    title = f"tl_geometry.{package}"
    lines = [title, "=" * len(title), "", f".. automodule:: {title}", "   :no-members:", ""]
    at_top = set(importlib.import_module("tl_geometry").__all__)

    def rank(name: str) -> tuple[Any, ...]:
        where = SECTIONS.index(section(getattr(module, name)))
        return (where, name not in at_top, name.lower())

    names = sorted(module.__all__, key=rank)
    lines += summary(package, names)
    homes: dict[str, list[str]] = {}
    places = documented()
    for name in names:
        found = getattr(module, name)
        if places.get(id(found), title).rpartition(".")[0] not in (title, "tl_geometry"):
            continue  # it belongs to two packages: the summary leads to the page of the first
        home = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", title)
        homes.setdefault(home if home.startswith(f"{title}.") else title, []).append(name)
    for home, held in homes.items():
        if home != title:
            heading = home.split(".")[-1].replace("_", " ").capitalize()
            text = inspect.getdoc(importlib.import_module(home)) or ""
            lines += [heading, "-" * len(heading), "", *_formulas(text), ""]
        for name in held:
            lines += _entry(package, name, getattr(module, name))
    if classes := returned()[package]:
        lines += ["What they return", "----------------", ""]
        for found in classes:
            lines += [f".. autoclass:: {found.__module__}.{found.__qualname__}", "   :members:", ""]
    return "\n".join(lines)


@functools.cache
def returned() -> dict[str, list[type]]:
    """Package -> classes that its functions return and that no package lists: nobody makes them,
    so that they stand on the page of the first function that gives them."""
    known, found = {id(x) for x in _listed()}, {package: list[type]() for package in PACKAGES}
    for package in PACKAGES:
        module = importlib.import_module(f"tl_geometry.{package}")
        for function in filter(inspect.isfunction, map(module.__getattr__, module.__all__)):
            said = str(inspect.signature(function).return_annotation)
            for name in re.findall(r"\w+", said):
                held = function.__globals__.get(name)
                ours = inspect.isclass(held) and held.__module__.startswith("tl_geometry")
                if ours and id(held) not in known:
                    known.add(id(held))
                    found[package].append(held)
    return found


def _listed() -> list[Any]:
    """Everything that a package lists, and what stands on the page of results."""
    places = {f"tl_geometry.{p}": None for p in PACKAGES} | RESULTS
    modules = {place: importlib.import_module(place) for place in places}
    return [
        getattr(modules[place], name)
        for place, names in places.items()
        for name in names or modules[place].__all__
    ]


@functools.cache
def uses() -> dict[str, list[str]]:
    """Documented name -> links to the examples and recipes whose code calls it."""
    places = documented()
    links: dict[str, list[str]] = {}
    for link, code in examples():
        for path in dict.fromkeys(re.findall(r"\btlg((?:\.\w+)+)", code)):
            steps = path.split(".")[1:]
            for length in range(len(steps), 0, -1):  # a method counts for its class
                try:
                    found = pkgutil.resolve_name(".".join(["tl_geometry", *steps[:length]]))
                except (ImportError, AttributeError):
                    continue
                if id(found) in places:
                    links.setdefault(places[id(found)], []).append(link)
                    break
    return {name: list(dict.fromkeys(found)) for name, found in links.items()}


def examples() -> list[tuple[str, str]]:
    """(link from a page of the API, code) of every example of the gallery and every recipe."""
    found = [
        (f":doc:`/examples/{script.parent.name}/{script.stem}`", script.read_text("utf-8"))
        for script in sorted((DOCS / "gallery").glob("*/*.py"))
    ]
    for page in ("recipes", "how_to"):
        for part in (DOCS / f"{page}.md").read_text("utf-8").split("\n## ")[1:]:
            title, _, text = part.partition("\n")
            code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.S | re.M))
            found.append((f"`{title} <../{page}.html#{slugify(title)}>`__", code))
    return found


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
        return [f".. automodule:: {place}", "   :members:", ""]
    if inspect.isclass(found):
        return [f".. autoclass:: {place}", "   :members:", "", *_used(place)]
    if callable(found):
        return [f".. autofunction:: {place}", "", *_used(place)]
    return [f".. py:data:: {place}", "", f"   {_said(package, name)}", ""]


def _used(place: str) -> list[str]:
    """The last paragraph of an entry."""
    links = uses().get(place, [])
    if not links:
        return []
    more = len(links) - MOST_LINKS
    shown = " · ".join(links[:MOST_LINKS]) + (f" · and {more} more" if more > 0 else "")
    return [f"   Examples that use it: {shown}", ""]


MOST_LINKS = 5
"""Examples that an entry names: the first lines of all examples are the same."""


RESULTS = {
    "tl_geometry": (
        "Result",
        "Table",
        "GeometryError",
        "BudgetError",
        "ReconstructionError",
        "UnsupportedModelError",
    ),
    "tl_geometry.base.results": ("Provenance",),
    "tl_geometry.render.figure": ("View",),
    "tl_geometry.render.page": ("Page",),
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
    for classes in returned().values():
        found |= {id(each): f"{each.__module__}.{each.__qualname__}" for each in classes}
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
            if getattr(target, "id", None) != name or not isinstance(after, ast.Expr):
                continue
            if isinstance(after.value, ast.Constant):
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


def place_pictures(*_: Any) -> None:
    """Put a part of each stored picture where sphinx-gallery looks for those of a run, so that
    thumbnails are made of them."""
    for script in (DOCS / "gallery").glob("*/*.py"):
        folder = DOCS / "examples" / script.parent.name / "images"
        folder.mkdir(parents=True, exist_ok=True)
        thumbnail(script.stem).save(folder / f"sphx_glr_{script.stem}_001.png")


def show_results(_: Any, page: str, text: list[str]) -> None:
    """On the page of an example, put its picture before the code and what it prints behind."""
    folder, _, example = page.partition("/")
    script = DOCS / "gallery" / f"{example}.py"
    if folder != "examples" or not script.exists():
        return
    name, page_text = script.stem, ast.get_docstring(ast.parse(script.read_text("utf-8")))
    shown = f".. image:: /_static/{name}.png\n   :target: ../../_static/{name}.png\n"
    shown += f"   :alt: {(page_text or name).splitlines()[0]}\n\n"
    with Image.open(DOCS / "_static" / f"{name}.png") as image:  # what docs/pictures.py put inside
        null, source = (html.escape(image.info[field]) for field in ("null", "source"))
    folded = f"<details><summary>How this was made</summary>{source}</details>"
    shown += f".. raw:: html\n\n   <div class='how'><p>{null}</p>{folded}</div>\n\n"
    if (DOCS / "_static" / f"{name}.html").exists():
        shown += f"`Open the live page <../../_static/{name}.html>`__\n\n"
    before, code = text[0].split(".. GENERATED FROM", 1)
    text[0] = f"{before}{shown}.. GENERATED FROM{code}"
    if script.with_suffix(".txt").exists():
        code, footer = text[0].split(".. _sphx_glr_download", 1)
        printed = f"It prints\n\n.. literalinclude:: /gallery/{example}.txt\n   :language: text\n\n"
        text[0] = f"{code}{printed}.. _sphx_glr_download{footer}"


def visit_math(display: str) -> Any:
    """Formulas as MathML, which browsers draw by themselves: no script and no network."""

    def visit(translator: Any, node: Any) -> None:
        formula = latex2mathml.converter.convert(node.astext(), display=display)
        around = ("<div class='formula'>", "</div>") if display == "block" else ("", "")
        translator.body.append(formula.join(around))
        raise nodes.SkipNode

    return visit


def mend_source_links(app: Any, error: Any) -> None:
    """Pages of source lead back by a package's name; what only a module has stands under that."""
    objects, root = app.env.domains["py"].objects, Path(app.outdir) / "_modules"
    for page in root.rglob("*.html"):
        module = ".".join(page.relative_to(root).with_suffix("").parts)

        def mended(found: re.Match[str], module: str = module) -> str:
            steps = found[1].split(".")
            names = [".".join([module, *steps[i:]]) for i in range(1, len(steps))]
            there = [name for name in (found[1], *names) if name in objects]
            return f'#{there[0]}"' if there else found[0]

        text = page.read_text("utf-8")
        page.write_text(re.sub(r'#(tl_geometry\.[\w.]+)"', mended, text), "utf-8")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", mend_source_links)
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_math("inline"), None),
        block_renderers=(visit_math("block"), None),
    )
    app.connect("builder-inited", write_pages)
    app.connect("builder-inited", place_pictures, priority=100)  # before sphinx-gallery looks
    app.connect("source-read", show_results)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", escape_bars, priority=100)
