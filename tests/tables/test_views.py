"""Every view that version 2 keeps: it says four things, the numbers that it draws are those of its
result, it opens offline, and hostile tokens in it are text.

A row of :data:`tests.lib.subjects.views.VIEWS` names a result and how it is drawn.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.lib.subjects import called
from tests.lib.subjects.views import VIEWS, data_of, drawn, inside
from tests.tables.answers import HOSTILE, Cells, asked
from tl_geometry import Table, render

pytestmark = pytest.mark.once
W = "llama"
"""The world that is drawn: rotary, so that every view has something to draw."""
LARGEST = 5_000_000
OTHERS = {"gram", "fourier", "noise_figure", "attention_heads", "induction", "heads"}
"""Views of results for which :func:`tl_geometry.plot` has another."""
NO_SCRIPT = frozenset({"http://www.w3.org/2000/svg"})
"""Addresses that are names and are never fetched."""
CELL = HOSTILE.replace("\ud800", "")
"""What a table can hold: pandas refuses halves of surrogate pairs."""
each_view = pytest.mark.parametrize("name", VIEWS)


@cache
def shown(name: str) -> tuple[Any, Any]:
    """The result and its view."""
    return called(W, f"view: {name}", "plain")[0]


def pages_of(view: Any) -> tuple[str, str]:
    """What a reader opens: the document of an interactive view, or the fragment of a figure; and
    what a notebook shows."""
    shown = view.html()
    return (view.page if hasattr(view, "page") else shown), shown


@cache
def pages(name: str) -> tuple[str, str]:
    """Of a view of the table, drawn once: to write an image takes longer than all laws."""
    return pages_of(shown(name)[1])


@each_view
def test_a_view_says_four_things(name: str) -> None:
    result, view = shown(name)
    said = {part: str(getattr(view, part, "")) for part in ("title", "caption", "null", "source")}
    assert {part for part, text in said.items() if len(text.strip()) < 3} == set()
    assert len(set(said.values())) >= 3
    if said["source"]:
        assert result.provenance.model in said["source"]
    if not hasattr(view, "page"):
        page = Cells(pages(name)[1]).text
        assert all(text in page for text in said.values())
        for axis in view.figure.axes:  # what is told apart by names has a legend
            names = {name for name in axis.get_legend_handles_labels()[1] if name[0] != "_"}
            assert len(names) < 2 or axis.get_legend() or view.figure.legends, names


@pytest.mark.parametrize("name", ["truncation_figure", "split"])
def test_notebooks_show_a_view(name: str) -> None:
    view = shown(name)[1]
    given = view._repr_mimebundle_()
    assert given.pop("text/plain") == repr(view) == f"{view.title}: {view.caption}"
    assert given.pop("text/html") == view.html()
    images = [base64.b64decode(image)[:4] for image in given.values()]
    assert images == [b"\x89PNG"] * hasattr(view, "figure")


@each_view
def test_plot_finds_the_view_of_a_result(name: str) -> None:
    result, view = shown(name)
    assert (render.plot(result).caption == view.caption) == (name not in OTHERS)


def numbers(value: Any, depth: int = 0) -> Iterator[np.ndarray]:
    """All numbers of a value."""
    if isinstance(value, torch.Tensor):
        yield value.detach().double().numpy().ravel()
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        yield value.astype(float).ravel()
    elif isinstance(value, float | int):
        yield np.array([float(value)])
    elif type(value).__name__ == "DataFrame":
        table: Any = value
        yield from (each for name in table for each in numbers(table[name].to_numpy()))
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from numbers(each, depth + 1)
    elif dataclasses.is_dataclass(value) and depth < 3:
        for field in dataclasses.fields(value):
            yield from numbers(getattr(value, field.name), depth + 1)


@cache
def known(name: str) -> np.ndarray:
    """The numbers of a view's result, sorted, and those that it computes."""
    result, _ = shown(name)
    found = [*numbers(asked(result)), *numbers(list(VIEWS[name].more(result)))]
    every = np.unique(np.concatenate(found))
    return every[np.isfinite(every)]


def missing(values: Any, among: np.ndarray, digits: float) -> list[float]:
    """Numbers that are none of ``among``. Whole numbers name heads, states and positions."""
    values = np.asarray(values, float).ravel()
    values = values[np.isfinite(values) & (values != np.round(values))]
    place = np.searchsorted(among, values).clip(1, len(among) - 1)
    near = np.minimum(abs(among[place] - values), abs(among[place - 1] - values))
    return values[near > 1e-7 + digits * abs(values)].tolist()


@each_view
def test_numbers_are_those_of_the_result(name: str) -> None:
    view, row = shown(name)[1], VIEWS[name]
    if hasattr(view, "page"):
        found = [(name, each) for each in inside(data_of(pages(name)[0]))]
        digits = 1e-3  # pages hold rounded numbers
    else:
        found, digits = list(drawn(view.figure)), 1e-4
    if row.why:
        return
    assert sum(np.asarray(each).size for _, each in found) >= 5
    wrong = {kind: x for kind, each in found if (x := missing(each, known(name), digits))}
    assert wrong == {}


def test_a_number_that_is_not_in_the_result_is_found() -> None:
    assert missing([1.5, 2.5, 3.0], np.array([1.5, 9.0]), 1e-5) == [2.5]
    _, view = shown("baseline_figure")
    axis = view.figure.axes[0]
    (planted,) = axis.plot([1, 2], [0.123456, 0.654321])
    try:
        wrong = [
            x
            for _, each in drawn(view.figure)
            for x in missing(each, known("baseline_figure"), 1e-5)
        ]
    finally:
        planted.remove()
    assert wrong == [0.123456, 0.654321]


@each_view
def test_red_is_positive_and_blue_is_negative(name: str) -> None:
    view = shown(name)[1]
    if hasattr(view, "page"):
        return  # tests in a browser look at pages
    for image in (image for axis in view.figure.axes for image in axis.images):
        values = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        low, high = image.norm.vmin, image.norm.vmax
        if values.ndim == 2 and low is not None and low < 0:
            assert low == -high
            red, blue = (image.cmap(image.norm(end)) for end in (high, low))
            assert (red[0] > red[2], blue[0] > blue[2]) == (True, False)
        elif values.ndim == 2 and np.nanmin(values) < -0.01 * np.nanmax(values):
            raise AssertionError(f"{name} draws negative values on a scale from 0")


@each_view
def test_a_view_opens_offline(name: str) -> None:
    view, (page, whole) = shown(name)[1], pages(name)
    assert len(whole.encode()) < LARGEST
    assert len(page) > 1000
    addresses = set(re.findall(r"https?://[^\s\"'<>)\\]+", page)) - NO_SCRIPT
    assert addresses == set()
    seen = Cells(page)
    assert not {"link", "iframe", "object", "embed", "form", "base"} & set(seen.tags)
    if hasattr(view, "page"):
        policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
        assert policy
        assert "default-src 'none'" in policy[1]
        assert not re.search("unsafe-eval|script-src[^;]*unsafe-inline", policy[1])
        assert 'sandbox="allow-scripts"' in whole
    else:
        assert "script" not in seen.tags
        assert re.search('src="data:image/(svg|png)', page)


def hostile(result: Any) -> Any:
    """The result with a hostile text in its corpus and in every text that may be any."""
    said = dataclasses.replace(result.provenance, corpus=HOSTILE, flags=(HOSTILE,))
    result = dataclasses.replace(result, provenance=said)
    if isinstance(result, Table):
        *rows, last = result.cells
        last = tuple(CELL if isinstance(cell, str) else cell for cell in last)
        return dataclasses.replace(result, cells=(*rows, last))
    for field in dataclasses.fields(result):
        value = getattr(result, field.name)
        texts = isinstance(value, tuple) and value and all(isinstance(x, str) for x in value)
        if texts and re.search("token|text|name|prompt", field.name):
            changed = {field.name: (*value[:-1], CELL)}
            result = dataclasses.replace(result, **changed)
    return result


@each_view
def test_hostile_text_is_inert(name: str) -> None:
    view = VIEWS[name].draw(hostile(shown(name)[0]))
    found = pages_of(view)
    assert found[1] != pages(name)[1]
    for page, before in zip(found, pages(name)):
        page.encode()  # a lone surrogate has no bytes
        assert "<script>alert" not in page
        seen, wanted = Cells(page), Cells(before)
        assert seen.tags == wanted.tags
        assert seen.attributes == wanted.attributes
        assert not re.search("[\x1b\u202e]", page)
    if hasattr(view, "page"):
        data_of(found[0])
    repr(view).encode()
