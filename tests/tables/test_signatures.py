"""What every package, public name and signature must keep: which package imports which, what an
import loads, what a public name says of itself, frozen dataclasses.

Each law is a function that lists what breaks it. It finds nothing in the library, and it finds the
fault that its twin plants.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import tl_geometry
from tl_geometry import cli

pytestmark = pytest.mark.once
ROOT = Path(tl_geometry.__file__).parent
PACKAGES = (
    *("base", "models", "corpus", "decomposition", "scores", "circuits", "weights", "sphere"),
    *("measures", "flow", "interventions", "zoo", "render", "report", "papers", "cli", "__main__"),
)
"""From the ground up: each imports only those before it."""
ONLY = {"transformer_lens": {"models"}, "circuitsvis": {"render"}, "matplotlib": {"render"}}
"""Libraries that only these packages may import."""
HEAVY = (*ONLY, "pandas", "transformers", "sklearn", "plotly")
"""Libraries that nothing imports before it needs them (ruff looks where modules import them)."""
MOST_LINES, MOST_OF_A_FUNCTION = 400, 60
UNSHOWN = 8
"""How many public functions show no example. This number only falls."""
HOOK = re.compile(r"\bhook_[a-z]|\bblocks\.|\bln_final\b|\bhook_dict\b")
"""Text that is, or begins, a hook name of TransformerLens."""
VIEWS = ("view", "seen", "control")
"""What a view is called where it is a variable or a field."""


def modules() -> dict[str, str]:
    """The source of every module by its name without ``tl_geometry.``; a package's is its own."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.read_text("utf-8")
    return found


def imports(source: str) -> list[str]:
    """The dotted module of every import, those of a name in quotes too."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            found += [str(name.value) for name in node.args if type(name) is ast.Constant]
    return found


def forbidden(name: str, source: str) -> list[str]:
    """What a module imports and must not."""
    mine, wrong = name.partition(".")[0], []
    for dotted in imports(source):
        top, _, rest = dotted.partition(".")
        if top in ONLY and mine not in ONLY[top]:
            wrong.append(f"{name} imports {top}")
        later = PACKAGES[PACKAGES.index(mine) + 1 :] if mine else ()
        if top == "tl_geometry" and rest.partition(".")[0] in later:
            wrong.append(f"{name} imports {dotted}")
    return wrong


def reaches(name: str, source: str) -> list[str]:
    """Where a module outside ``models`` reaches the model behind a view, or spells the name of a
    hook (docstrings may)."""
    if name.partition(".")[0] == "models":
        return []
    tree = ast.parse(source)
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    documentation = {id(node) for node in statements if isinstance(node, ast.Constant)}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
            if node.attr == "_model" or (node.attr == "model" and owner in VIEWS):
                found.append(f"{name}: {ast.unparse(node)}")
        text = getattr(node, "value", None) if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in documentation and HOOK.search(text):
            found.append(f"{name}: {text!r}")
    return found


def too_long(sources: dict[str, str]) -> set[str]:
    """Modules and functions (below their docstring) with too many lines."""
    found = {name for name, source in sources.items() if source.count("\n") > MOST_LINES}
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1:2] if ast.get_docstring(node) else node.body[:1]
                if first and (node.end_lineno or 0) - first[0].lineno >= MOST_OF_A_FUNCTION:
                    found.add(f"{name}.{node.name}")
    return found


def loaded_by(statement: str) -> set[str]:
    """The heavy libraries that a fresh process has loaded after a statement."""
    code = f"import sys; {statement}; print(' '.join(m for m in {HEAVY!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_packages_import_only_those_before_them() -> None:
    sources = modules()
    assert {name.partition(".")[0] for name in sources} - {""} == set(PACKAGES)
    assert {line for name in sources for line in forbidden(name, sources[name])} == set()


@pytest.mark.parametrize(
    ("name", "planted", "caught"),
    [
        ("base.linalg", "from tl_geometry.models import view", True),
        ("models.reader", "from tl_geometry import corpus", True),
        ("models.view", "if TYPE_CHECKING:\n    from tl_geometry.corpus import windows", True),
        ("decomposition.sums", "def f():\n    from tl_geometry.scores import split_scores", True),
        ("scores.split", "def f():\n    importlib.import_module('tl_geometry.papers.x')", True),
        ("decomposition.sums", "def f():\n    import transformer_lens", True),
        ("flow.maps", "import matplotlib.pyplot as plt", True),
        ("decomposition.sums", "from tl_geometry.decomposition import moments", False),
        ("corpus.sources", "def f():\n    from tl_geometry.models import view", False),
        ("models.reader", "def f():\n    import transformer_lens", False),
    ],
)
def test_a_planted_import_is_caught(name: str, planted: str, caught: bool) -> None:
    assert bool(forbidden(name, planted)) == caught


def test_importing_the_package_is_light() -> None:
    assert loaded_by("import tl_geometry; dir(tl_geometry); tl_geometry.decompose") == set()
    # views draw tables and load no drawing library by their names; what they load is seen
    drawing = "import tl_geometry.render as r; [getattr(r, name) for name in r.__all__]"
    assert loaded_by(drawing) == {"pandas"}


def test_only_models_knows_the_model_and_its_hooks() -> None:
    assert [line for name, source in modules().items() for line in reaches(name, source)] == []
    for planted in (
        "rows = view.model.W_E",
        "norm = self.view._model.ln_final",
        'names = [f"blocks.{l}.hook_attn_out" for l in layers]',
    ):
        assert reaches("scores.split", planted)
        assert not reaches("models.reader", planted)
    for fine in ('"""A hook such as ``blocks.1.hook_resid_pre``."""', "model = analysis.model"):
        assert not reaches("scores.split", fine)


def test_modules_and_functions_stay_readable() -> None:
    assert too_long(modules()) == set()
    function = "def f():\n    'Long.'\n" + "    pass\n" * MOST_OF_A_FUNCTION
    longer = {"a": function, "b": f"{function}    pass\n", "c": "\n" * (MOST_LINES + 1)}
    assert too_long(longer) == {"b.f", "c"}


@cache
def public() -> dict[str, Any]:
    """Every function, class and value that a package exports, by its shortest name."""
    found: dict[str, Any] = {}
    for name in ("", *(f".{package}" for package in PACKAGES[:-1])):
        package = importlib.import_module(f"tl_geometry{name}")
        for each in getattr(package, "__all__", ()):
            member = getattr(package, each)
            if not inspect.ismodule(member) and not any(
                member is known for known in found.values()
            ):
                found[f"{name}.{each}".removeprefix(".")] = member
    return found


def functions(names: dict[str, Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, and the public methods and properties of public classes."""
    for name, member in names.items():
        if inspect.isfunction(member):
            yield name, member
        elif inspect.isclass(member) and member.__module__.startswith("tl_geometry"):
            for method, value in vars(member).items():
                inside = getattr(value, "__func__", getattr(value, "fget", value))
                if not method.startswith("_") and inspect.isfunction(inside):
                    yield f"{name}.{method}", inside


def silent(names: dict[str, Any]) -> set[str]:
    """Names without a docstring (a method may have that of the method it fulfils), and functions
    whose docstring has no example."""
    found = set()
    for name, member in names.items():
        if callable(member) and not inspect.getdoc(member):
            found.add(f"{name}: no text")
        elif inspect.isfunction(member) and ">>>" not in str(member.__doc__):
            found.add(f"{name}: no example")
        if inspect.isclass(member):
            methods = [each for each, _ in functions({name: member})]
            known = lambda each: inspect.getdoc(getattr(member, each.rpartition(".")[2]))  # noqa: B023
            found |= {f"{each}: no text" for each in methods if not known(each)}
    return found


def loose(names: dict[str, Any]) -> set[str]:
    """Dataclasses that may change, that compare arrays by ``==``, and results whose fields may be
    given without their names."""
    found = set()
    for name, each in names.items():
        if not (inspect.isclass(each) and dataclasses.is_dataclass(each)):
            continue
        fields, made = dataclasses.fields(each), getattr(each, "__dataclass_params__")  # noqa: B009
        arrays = any(re.search("Tensor|ndarray|DataFrame", str(f.type)) for f in fields)
        if not made.frozen or (arrays and made.eq):
            found.add(name)
        if issubclass(each, tl_geometry.Result) and any(f.init and not f.kw_only for f in fields):
            found.add(name)
    return found


def test_public_names_say_what_they_do() -> None:
    found = silent(public())
    assert {each for each in found if not each.endswith("no example")} == set()
    assert len(found) <= UNSHOWN, sorted(found)

    def planted() -> None:
        """Has no example."""

    class Planted:
        """Has a silent method."""

        def rows(self) -> None: ...

    Planted.__module__ = "tl_geometry.planted"
    found = silent({"f": planted, "g": lambda: None, "P": Planted})
    assert found == {"f: no example", "g: no text", "P.rows: no text"}


def test_dataclasses_do_not_change() -> None:
    assert loose(public()) == set()
    options: dict[str, Any]
    for options in ({}, {"frozen": True}, {"eq": False}):
        planted = dataclasses.make_dataclass("Planted", [("x", "Tensor")], **options)
        assert loose({"P": planted}) == {"P"}
    assert not loose(
        {"P": dataclasses.make_dataclass("Q", [("x", "Tensor")], frozen=True, eq=False)}
    )
    by_place: Any = {"bases": (tl_geometry.Result,), "frozen": True, "eq": False}
    assert loose({"R": dataclasses.make_dataclass("R", [("x", "int")], **by_place)}) == {"R"}


def test_public_names_exist_and_differ_from_modules() -> None:
    for name in ("", *(f".{package}" for package in PACKAGES[:-1])):
        package = importlib.import_module(f"tl_geometry{name}")
        assert package.__doc__, name
        # a function would hide the module of its name, or be hidden by it
        files = {path.stem for path in Path(str(package.__file__)).parent.iterdir()}
        both = files & set(getattr(package, "__all__", ()))
        assert [each for each in both if callable(getattr(package, each))] == [], name
    assert {m.name for m in pkgutil.iter_modules(tl_geometry.__path__)} == set(PACKAGES)
    with pytest.raises(AttributeError, match="decompse"):
        getattr(tl_geometry, "decompse")  # noqa: B009 (a type checker refuses the attribute)


def test_there_are_four_commands_each_with_help_and_an_example_that_parses() -> None:
    group: Any = typer.main.get_command(cli.app)
    assert set(group.commands) == {"report", "trace", "fit", "check"}
    for name, command in group.commands.items():
        assert not [p.name for p in command.params if not p.help and p.name != "help"]
        on = {p.name for p in command.params if isinstance(p.default, int) and p.default}
        assert on <= {"position"}  # -1, the last
        program, said, *words = shlex.split(command.epilog.removeprefix("For example: "))
        assert (program, said) == ("tl-geometry", name)
        command.make_context(name, list(words))
    with pytest.raises(cli.USAGE):
        group.commands["check"].make_context("check", ["--planted"])
