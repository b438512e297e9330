"""Views of writers: edges and graphs name what the table has, and text from a model is drawn as
text."""

from __future__ import annotations

import dataclasses

import tl_geometry as tlg
from tl_geometry.base.html import token_text
from tl_geometry.render.figure import drawable
from tl_geometry.render.writers import composition_figure, logit_figure


def test_the_composition_and_its_graph() -> None:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=8)
    found = tlg.composition(model, windows, layers=[1, 2], progress=False)
    view = composition_figure(found, n=12)
    texts = {text.get_text() for text in view.figure.axes[0].texts}
    edges = found.edges(n=12)
    assert texts == {name for edge in edges for name in edge[:2]}
    axis = view.figure.axes[0]
    columns = [*axis.get_xticks(), *(text.get_position()[0] for text in axis.texts)]
    first, last = axis.get_xlim()
    assert first <= min(columns) - 0.5, "a name has room for its left half"
    assert last >= max(columns) + 0.5
    assert "12 strongest" in view.caption
    edges = found.to_dataframe().dropna(subset=["random_cs"])
    assert f"of {edges.random_cs.mean():.3f} (root" in view.null
    assert set(found.to_networkx(n=12)) == texts


def test_a_logit_shows_its_sources_and_why() -> None:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=1)
    found = tlg.explain_logit(model, windows, 14, 5, top=4)
    view = logit_figure(found)
    strip, bars = view.figure.axes
    named = strip.get_xticks().astype(int).tolist()
    largest = found.heads.sum((0, 1)).abs().argsort(descending=True).tolist()
    assert set(named) <= set(range(15))
    assert set(largest[:3]) <= set(named)
    assert [text.get_text() for text in strip.get_xticklabels()] == [
        drawable(token_text(found.str_tokens[i])) for i in named
    ]
    assert len(bars.get_yticklabels()) == 4
    layer, head, source = found.pairs[0]
    assert bars.get_yticklabels()[0].get_text().startswith(f"L{layer}H{head} from {source} ")
    assert "attention" in bars.texts[0].get_text()
    assert view.html().count("<img") == 1


def test_long_tokens_leave_room_for_the_bars() -> None:
    model = tlg.zoo.embedded()
    found = tlg.explain_logit(model, tlg.zoo.default_windows(model, 16, n=1), 14, 5, top=4)
    for length in (60, 1):  # warnings are errors: of axes that collapse
        long = dataclasses.replace(found, str_tokens=("W" * length,) * 16)
        view = logit_figure(long)
        view.bytes("svg")
        assert view.figure.axes[1].get_position().width > 0.2
