"""Views of writers: edges and graphs name what the table has, and text from a model is drawn as
text."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from matplotlib.colors import to_hex

import tl_geometry as tlg
from tl_geometry.base.html import signed, token_text
from tl_geometry.base.results import Provenance
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.render.figure import NEGATIVE, POSITIVE, drawable
from tl_geometry.render.logit_view import followers
from tl_geometry.render.writers import composition_figure, finding, logit_figure


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


def explained() -> LogitExplanation:
    """A logit at position 45 of 50 tokens, with 14 pairs."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    heads, terms = draw(2, 3, 50), draw(14, 2, 2)
    heads[:, :, 46:] = 0
    order = heads.flatten().abs().argsort(descending=True)[:14].tolist()
    return LogitExplanation(
        provenance=Provenance(),
        position=45,
        target=(1, 2),
        target_tokens=(" a", "b"),
        str_tokens=tuple(f"t{i % 7}" for i in range(50)),
        logit=-1.25,
        heads=heads,
        other_names=("mlp0", "constants"),
        others=draw(2),
        parts=("pos", "cvec"),
        pairs=tuple((i // 150, i // 50 % 3, i % 50) for i in order),
        pair_values=draw(14, 2),
        pair_terms=terms,
        pair_alibi=torch.zeros(14).double(),
        pair_scores=terms.sum((1, 2)),
        pair_patterns=torch.rand(14, generator=generator).double(),
    )


def sign(value: float) -> str:
    return POSITIVE if value > 0 else NEGATIVE


def test_bars_of_a_logit_are_what_was_written() -> None:
    found = explained()
    view = logit_figure(found)
    strip, bars = view.figure.axes
    by_token = found.heads.sum((0, 1))[:46].tolist()
    drawn: Any = strip.patches
    assert [bar.get_height() for bar in drawn] == pytest.approx(by_token)
    assert [bar.get_x() + bar.get_width() / 2 for bar in drawn] == pytest.approx(range(46))
    assert [to_hex(bar.get_facecolor()) for bar in drawn] == [sign(v) for v in by_token]
    largest = sorted(range(46), key=lambda i: -abs(by_token[i]))[:40]
    assert strip.get_xticks().tolist() == sorted(largest)
    drawn = bars.patches
    written = [float(found.heads[pair]) for pair in found.pairs[:12]]
    assert [bar.get_width() for bar in drawn] == pytest.approx(written)
    assert [to_hex(bar.get_facecolor()) for bar in drawn] == [sign(v) for v in written]
    assert bars.yaxis_inverted(), "the largest stands at the top"
    for row, (layer, head, source) in enumerate(found.pairs[:12]):
        name = bars.get_yticklabels()[row].get_text()
        assert name == f"L{layer}H{head} from {source} t{source % 7}"
        terms = [
            (f"{a}-{b}", float(found.pair_terms[row, i, j]))
            for i, a in enumerate(found.parts)
            for j, b in enumerate(found.parts)
        ]
        two = sorted(terms, key=lambda term: -abs(term[1]))[:2]
        said = ", ".join(f"{term} {signed(v, '+.1f')}" for term, v in two)
        paid, score = float(found.pair_patterns[row]), float(found.pair_scores[row])
        why = f"attention {paid:.2f}, score {signed(score, '+.1f')}: {said}"
        text = bars.texts[row]
        assert text.get_text() == f"{signed(written[row], '+.2f')}   {why}"
        assert text.get_position()[1] == row
    total = float(found.heads.sum() + found.others.sum())
    assert f"sums to {signed(total)}; the logit at position 45 is −1.25." in view.caption
    layer, head, source = found.pairs[0]
    assert view.title == (
        f"L{layer}H{head} wrote {signed(written[0], '+.2f')} of the logit −1.25 of “␣a” minus “b”, "
        f"from “t{source % 7}” at {source}"
    )
    none = dataclasses.replace(found, pairs=())
    assert finding(none) == "What wrote the logit −1.25 of “␣a” minus “b”"


def test_an_induction_head_reads_what_followed_earlier_copies() -> None:
    """Of t3 at 45: the tokens after t3 at 3, 10, ...; also the token itself, after a copy."""
    assert followers(explained()) == [4, 11, 18, 25, 32, 39]
    texts = tuple("aabaa") + ("b",) * 45
    repeated = dataclasses.replace(explained(), str_tokens=texts, position=4)
    assert followers(repeated) == [1, 2, 4]
