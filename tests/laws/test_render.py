"""Laws of views: pages add up to their results, stay offline and harmless, fit a narrow window, and
follow light and dark; figures are drawn where they are asked to be. (That the numbers of every view
are those of its result is in ``tests/tables/test_views.py``.)"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import tl_geometry as tlg
from tests.browser import FITS, HOSTILE, Browser, check_beside_itself, check_escapes_matter
from tests.lib.data import Provenance
from tests.lib.models import tiny, tokens
from tests.lib.subjects.views import data_of, inside
from tests.lib.worlds import world
from tl_geometry import GeometryError, Table, render
from tl_geometry.render.split_view import groups_of
from tl_geometry.scores import ScoreSplit
from tl_geometry.scores.planes import HeadPlanes

pytestmark = pytest.mark.once
nightly = pytest.mark.nightly


def synthetic(
    heads: int = 2,
    tokens: int = 20,
    *,
    parts: Sequence[str] = ("bias", "pos", "cvec"),
    texts: Sequence[str] = (),
) -> ScoreSplit:
    """A split of one prompt by random queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(len(parts), 1, tokens, heads, 16, generator=generator) / 2 for _ in "qk")
    stop = torch.arange(1, tokens + 1)
    key_range = torch.stack([torch.zeros_like(stop), stop], -1).expand(heads, -1, -1)
    return ScoreSplit(
        provenance=Provenance(model="synthetic"),
        heads=tuple((i // 12, i % 12) for i in range(heads)),
        parts=tuple(parts),
        q=q,
        k=k,
        bias=None,
        key_range=key_range,
        softcap=torch.full((heads,), torch.inf),
        sinks=torch.full((heads,), -torch.inf),
        head_planes=HeadPlanes(
            torch.zeros(heads, 16, dtype=torch.int64), torch.zeros(heads, 1).double(), tokens
        ),
        checks=((0, "scores", 1e-6, 2e-5),),
        str_tokens=tuple(texts) or tuple(f" t{i}" for i in range(tokens)),
    )


def hostile_table(kind: str) -> Table:
    """A row per head with a hostile word, or a text of hostile tokens."""
    if kind == "heads":
        rows = [(i // 2, i % 2, 0.5 - i / 4, word) for i, word in enumerate(HOSTILE)]
        frame = pd.DataFrame(rows, columns=["layer", "head", "cs_position", "word"])
    else:
        rows = [(i, word, i - 2.5) for i, word in enumerate(HOSTILE)]
        frame = pd.DataFrame(rows, columns=["position", "token", "value"])
    return Table.of(frame, Provenance(model=HOSTILE[0], corpus=HOSTILE[3]))


@cache
def graph(*, between: bool = False) -> Any:
    """The graph of a logit of the tiny model, of one prompt or between two."""
    w = world("gpt2")
    options: dict[str, Any] = {"counterfactual": w.other[:1]} if between else {}
    return tlg.trace_logit(w.model, w.ids[:1], w.targets[0][0], **options)


@cache
def page(name: str) -> Any:
    """One page of each kind, whose texts are hostile wherever a user's text may stand."""
    texts = list(HOSTILE)
    hurt = dataclasses.replace(graph(), texts=(HOSTILE * 2)[: len(graph().texts)])
    views = {
        "split": lambda: render.split(synthetic(2, len(texts), texts=texts), title=texts[0]),
        "heads": lambda: render.heads(hostile_table("heads"), title=texts[0]),
        "graph": lambda: render.graph_page(hurt),
        "tokens": lambda: render.token_attribution(hostile_table("tokens"), title=texts[0]),
        "attention": lambda: render.attention_heads(synthetic(1, len(texts), texts=texts)),
        "induction": lambda: render.induction(hurt),
    }
    return views[name]()


PAGES = ("split", "heads", "graph", "tokens", "attention", "induction")
each_page = pytest.mark.parametrize("name", PAGES)


def test_the_panels_of_a_split_add_up_and_constants_stand_apart() -> None:
    split = synthetic(2, 9)
    part = data_of(render.split(split).page)["parts"][0]
    values, names = next(inside(part)), part["names"]
    groups = ["position", "content", "token", "mixed", "constants (bias-bias)"]
    assert names == [*groups, "total", "pattern"]
    cases = (split, None), (split, ["position"]), (synthetic(2, 9, parts=("mlp0", "bias")), None)
    shown = [data_of(render.split(s, panels=p).page)["parts"][1]["groups"] for s, p in cases]
    assert [len(each) for each in shown] == [5, 0, 0]
    np.testing.assert_allclose(values[:, :5].sum(1), values[:, 5], atol=2e-2)
    allowed = split.allowed.numpy()
    assert (np.isnan(values) == ~allowed[:, None]).all()
    wanted = split.terms["bias", "bias"][0].double().numpy()
    np.testing.assert_allclose(values[:, 4][allowed], wanted[allowed], atol=1e-2)
    for group, terms in groups_of(list(split.terms)).items():
        assert all(("pos" in term) == (group in ("position", "mixed")) for term in terms)


def test_planes_are_drawn_beside_a_head_that_does_not_rotate() -> None:
    """Bars add up to the shares of all planes of their head (SmolLM3: the first layer rotates)."""
    model, ids = tiny("bridge", "smollm3"), tokens(20, 12)
    basis = tlg.decompose(model, ids, progress=False)
    planes = tlg.sweep_heads(model, ids, basis, planes=True, progress=False).planes()
    axes: Any = render.head_planes(planes, heads=["L0H0", "L1H0"]).figure.axes
    for axis, head in zip(axes, [(0, 0), (1, 0)], strict=True):
        drawn = sum(bar.get_height() for bar in axis.patches)
        shares = planes.total_cs[planes.heads.index(head)].nan_to_num()
        assert drawn == pytest.approx(float(shares.sum()), rel=1e-5)


@pytest.mark.parametrize("between", [False, True])
def test_the_lists_of_a_graph_add_up(between: bool) -> None:
    """The edges into a node that a page lists, and what it leaves out, sum to the node."""
    part = data_of(render.graph_page(graph(between=between)).page)["parts"][1]
    nodes, edges = part["nodes"], pd.DataFrame(part["edges"])
    inside: Any = edges if between else edges[edges["type"] == "value"]
    sums = inside.groupby("target")["value"].sum()
    scale = max(map(abs, nodes["value"]))
    assert len(sums) >= 3
    for node, total in sums.items():
        assert abs(total - nodes["value"][node]) < 1e-4 * scale
    assert abs(sums.iloc[0] - nodes["value"][1]) > 1e-3 * scale  # not of any other node


def test_too_large_a_page_is_refused_and_a_part_of_it_is_not() -> None:
    split = synthetic(48, 128)
    with pytest.raises(GeometryError, match="heads=") as refused:
        render.split(split)
    assert refused.value.what in ("split", "page")
    assert len(render.split(split, heads=split.heads[:4]).page) < 5_000_000


@each_page
def test_where_frames_are_forbidden_a_sentence_stands(name: str) -> None:
    left = re.sub(r"<iframe.*?</iframe>", "", page(name).html(), flags=re.S)
    assert "trusted notebook" in left
    assert "<script" not in left


@nightly
@each_page
def test_hostile_text_stays_text(name: str, browser: Browser, tmp_path: Path) -> None:
    view = page(name)
    with browser.open(view.save(tmp_path / "page.html")) as tab:
        tab.wait("document.body.dataset.drawn")
        tab.assert_harmless()
        shown = tab.evaluate("document.body.innerText")
        assert ("onerror" in shown) == (name != "attention")  # whose labels are drawings
    if name in ("split", "heads"):
        check_escapes_matter(browser, view)


@nightly
@each_page
@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_a_narrow_window_in_light_and_dark(
    name: str, dark: bool, browser: Browser, tmp_path: Path
) -> None:
    check_beside_itself(browser, page(name), dark=dark)
    with browser.open(page(name).save(tmp_path / "page.html"), dark=dark, width=400) as tab:
        tab.wait("document.body.dataset.drawn")
        assert tab.evaluate(FITS)
        paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == ("rgb(15, 18, 22)" if dark else "rgb(255, 255, 255)")


@nightly
def test_moving_over_a_cell_reads_it(browser: Browser, tmp_path: Path) -> None:
    """Head, query and key are named, every panel has its number there, and the groups their
    share; a choice of another head shows its numbers."""
    split = synthetic(2, 8)
    view = render.split(split)
    values = next(inside(data_of(view.page)["parts"][0]))
    read = "[...document.querySelectorAll('.bar b')].map(b => +b.dataset.value)"
    with browser.open(view.save(tmp_path / "page.html"), height=1200) as tab:
        tab.wait("document.body.dataset.drawn")
        box = tab.evaluate(
            "(r => [r.x, r.y, r.width])(document.querySelector('canvas').getBoundingClientRect())"
        )
        tab.hover(box[0] + box[2] * 2.5 / 8, box[1] + box[2] * 5.5 / 8)
        where = tab.evaluate("document.querySelector('.where').textContent")
        assert re.fullmatch(r"L0H0 · query 5 “.t5” · key 2 “.t2”", where)
        np.testing.assert_allclose(tab.evaluate(read), values[0, :-1, 5, 2], rtol=1e-5)
        assert "This score is made of" in tab.evaluate("document.body.innerText")
        tab.evaluate(
            "(s => { s.value = 1; s.dispatchEvent(new Event('change')); })"
            "(document.querySelector('select'))"
        )
        np.testing.assert_allclose(tab.evaluate(read), values[1, :-1, 5, 2], rtol=1e-5)
        tab.assert_harmless()


@nightly
def test_a_click_on_an_edge_goes_to_its_node(browser: Browser, tmp_path: Path) -> None:
    said = "[...document.querySelectorAll('h2')].at(-1).textContent"
    with browser.open(render.graph_page(graph()).save(tmp_path / "page.html")) as tab:
        tab.wait("document.body.dataset.drawn")
        before = tab.evaluate(said)
        name = tab.evaluate(
            "(b => { b.click(); return b.title; })(document.querySelector('.bar button'))"
        )
        assert tab.evaluate(said).startswith(name)
        assert before != tab.evaluate(said)
        assert tab.evaluate("document.querySelectorAll('.node[aria-pressed=true]').length") == 1
        tab.assert_harmless()


def anova() -> Any:
    return tlg.decompose_activations(torch.randn(4, 12, 16, 8)).anova()


def test_a_figure_is_the_same_in_every_form_and_run(tmp_path: Path) -> None:
    table = anova()
    first, second = render.variance_shares(table), render.variance_shares(table)
    canvas = first.figure.canvas
    assert first.svg() == second.svg()
    assert first.figure.canvas is canvas  # a figure on a screen stays there
    for form, starts in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        assert first.save(tmp_path / f"x.{form}").read_bytes().startswith(starts)
    assert "prefers-color-scheme:dark" in first.html()
    assert b"position" in first.svg()  # text stays text
    assert " from " in first.title
    one = tlg.decompose_activations(torch.randn(4, 1, 16, 8)).anova()
    assert " from " not in render.variance_shares(one).title  # one context says nothing of position
    errors = pd.DataFrame(
        {"start": [0, 1, 2], "end": [1, 2, 3], "relative_error_out": [0.5, 1, 50]}
    )
    assert render.baseline_figure(errors).figure.axes[0].get_ylim()[0] > 0  # of logarithms
