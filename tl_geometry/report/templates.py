"""How does a report become HTML? By templates in ``assets``, which jinja2 fills. Pages, sections,
cards and tables call :func:`fill`.

Every value is escaped, and its control characters are made visible. In a template ``|numbers`` also
gives numbers the place of their cell (:mod:`tl_geometry.report.origin`), and ``|safe`` marks what
is HTML already."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from tl_geometry.base import html
from tl_geometry.report.origin import linked


def asset(name: str) -> str:
    """The text of a file in ``assets``."""
    return (files("tl_geometry.report") / "assets" / name).read_text(encoding="utf-8")


def anchor(text: str) -> str:
    """A name in a form that can be part of an element's id.

    >>> anchor("weights_qk")
    'weights-qk'
    """
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tl_geometry.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        # jinja2 marks escaped or trusted HTML as a subclass of str: only plain str is changed
        finalize=lambda value: html.visible(value) if type(value) is str else value,
    )
    environment.filters |= {"anchor": anchor, "numbers": lambda text: linked(html.escape(text))}
    return environment


def fill(name: str, /, **values: Any) -> str:
    """The template ``assets/name.html``, filled.

    >>> fill("section", title="T", blocks=["a < b"])
    '<section><h2>T</h2><p>a &lt; b</p></section>'
    """
    return _environment().get_template(f"{name}.html").render(**values)
