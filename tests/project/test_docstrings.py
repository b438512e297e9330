"""Everything public says what it is: ruff checks modules, classes and functions; here the methods,
which may have the text of the method that they fulfil."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator

import tl_geometry


def public_classes() -> Iterator[type]:
    for module in pkgutil.walk_packages(tl_geometry.__path__, "tl_geometry."):
        if module.name == "tl_geometry.__main__":
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and value.__module__ == module.name and name[0] != "_":
                yield value


def silent(cls: type) -> list[str]:
    """Public methods and properties without a text, their own or an inherited one."""
    methods = [
        name
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, classmethod | staticmethod | property))
    ]
    said = lambda name: any(getattr(vars(c).get(name), "__doc__", None) for c in cls.__mro__)
    return [f"{cls.__qualname__}.{name}" for name in methods if not said(name)]


def test_public_methods_say_what_they_do() -> None:
    classes = list(public_classes())
    assert len(classes) > 100
    assert not [name for cls in classes for name in silent(cls)]


def test_a_silent_method_is_seen_and_an_inherited_text_counts() -> None:
    class Spoken:
        def rows(self) -> None:
            """Rows of the table."""

    class Planted(Spoken):
        def rows(self) -> None:
            pass

        def columns(self) -> None:
            pass

        @property
        def size(self) -> int:
            return 0

    names = [name.rsplit(".", 1)[-1] for name in silent(Planted)]
    assert names == ["columns", "size"]
