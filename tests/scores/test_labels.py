"""A label says what removing does: it stands only where covariance and gain name the same group, in
every table and text that prints it; and the tables of a sweep are narrow enough to be read."""

from __future__ import annotations

import dataclasses
import os
import shutil
from functools import cache
from typing import Any

import pytest
import torch

from tests.induction import corpus, induction_model, prompts
from tl_geometry import decompose, split_scores, sweep_heads
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions.causal import necessity_sufficiency
from tl_geometry.scores import labels
from tl_geometry.scores.sweep_table import SweepTable

PROMPTS, STEEP = prompts(12, seed=3), 32.0
"""``STEEP``: the induction head's scores rise by so much over the positions, for no use."""


@cache
def basis_of(slope: float) -> PositionContext:
    return decompose(induction_model(slope=slope), corpus(), progress=False)


@cache
def swept(slope: float) -> SweepTable:
    return sweep_heads(induction_model(slope=slope), PROMPTS, basis_of(slope), progress=False)


@pytest.mark.parametrize("slope", [0.0, STEEP])
def test_removing_what_the_gain_names_costs_most(slope: float) -> None:
    """The head matches content. A slope over positions that changes nothing in where it looks takes
    most of the covariance."""
    cost = {
        group: necessity_sufficiency(
            induction_model(slope=slope),
            PROMPTS,
            basis_of(slope),
            "L1H0",
            group,
            draws=1,
            progress=False,
        ).necessity["induction_loss"]
        for group in ("position", "content")
    }
    assert cost["content"] > cost["position"] + 4
    table = swept(slope)
    at = table.heads.index((1, 0))
    cs = dict(zip(table.groups, table.group_cs[at].tolist(), strict=True))
    gs = dict(zip(table.groups, table.group_gs[at].tolist(), strict=True))
    assert gs["content"] > 0.8
    assert (cs["position"] > max(0.5, cs["content"] + 0.1)) == (slope > 0)
    assert table.by_group.labels[at] == ("unclear" if slope else "content")


def test_a_head_whose_shares_disagree_names_both_and_is_flagged() -> None:
    table = swept(STEEP)
    row = table.to_dataframe().set_index(["layer", "head"]).loc[1, 0]
    assert row.dominant_group == row.dominant_term == "unclear"
    assert (row.group_by_cs, row.group_by_gs) == ("position", "content")
    assert row.group_flag == "position by cs, content by gs"
    assert (row.term_by_cs, row.term_by_gs) == ("bias-pos", "cvec-cvec")
    assert row.term_flag == "bias-pos by cs, cvec-cvec by gs"
    assert row.group_share == row.cs_position > row.cs_content
    assert row.group_gain == row.gs_content > row.gs_position
    assert row.group_gain_margin == pytest.approx(row.gs_content - row.gs_position)
    basis = basis_of(STEEP)
    options: dict[str, Any] = {"heads": "L1H0"}
    split = split_scores(induction_model(slope=STEEP), PROMPTS, basis, **options)
    frame = split.to_dataframe()
    assert set(frame.flag) == {row.group_flag, row.term_flag}
    assert not frame.dominant.any()
    agreeing = split_scores(induction_model(), PROMPTS, basis_of(0.0), **options).to_dataframe()
    assert set(agreeing.flag) == {""}
    assert agreeing[agreeing.dominant].group.dropna().tolist() == ["content"]


def test_uniform_heads_stay_uniform() -> None:
    table = swept(STEEP)
    for label in (table.by_group, table.by_term):
        assert label.labels[-1] == label.by_cs[-1] == label.by_gs[-1] == "uniform"
        assert label.flags[-1] == ""


def check_rule(module: Any) -> None:
    """The rule, by hand: first by both, more than half of the covariance, both leads over 0.1 (and
    certain, where intervals are known)."""
    cs = torch.tensor([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1], [0.55, 0.5, -0.05]])
    cs = torch.cat([cs, torch.tensor([[0.45, 0.25, 0.3], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])])
    gs = torch.tensor([[0.5, 0.3, 0.2], [0.3, 0.5, 0.2], [0.4, 0.35, 0.25], [0.9, 0.1, 0.0]])
    gs = torch.cat([gs, torch.tensor([[0.9, 0.1, 0.0], [0.9, 0.1, 0.0], [0.9, 0.1, 0.0]])])
    sure = torch.tensor([True, True, True, True, True, False, True])
    gain = torch.tensor([True, True, True, True, True, True, False])
    found = module.dominant(cs, gs, ["a", "b", "c"], certain=(sure, gain))
    assert found.labels == ("a", *["unclear"] * 6)
    assert found.flags == ("", "a by cs, b by gs", *[""] * 5)
    known = module.dominant(cs, gs, ["a", "b", "c"])
    assert known.labels == ("a", "unclear", "unclear", "unclear", "unclear", "a", "a")
    assert known.margin[:3].tolist() == pytest.approx([0.3, 0.3, 0.3])
    assert known.gain_margin[:3].tolist() == pytest.approx([0.2, 0.2, 0.05])
    blank = torch.full_like(cs[:1], torch.nan)
    assert module.dominant(blank, blank, ["a", "b", "c"]).labels == ("uniform",)
    assert module.dominant(cs[:1], blank, ["a", "b", "c"]).labels == ("unclear",)


def test_the_rule() -> None:
    check_rule(labels)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_sweep_shows_itself_within_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = swept(0.0)
    assert len(table.columns()) > 40
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((width, 24)))
    caption, head, *rows = repr(table).splitlines()
    assert all(len(line) <= width for line in (head, *rows))
    assert head.split()[:4] == ["layer", "head", "dominant_group", "group_share"]
    assert len(head) > width - 20 or width == 200
    assert f"of {len(table.columns())} columns" in caption
    page = table._repr_html_()
    assert page.count("<th") <= 11
    assert all(name in page for name in ("dominant_group", "group_gain", "to_dataframe"))


def test_labels_need_both_intervals() -> None:
    """Where intervals were asked for: a lead that one group of contexts decides is none."""
    many = prompts(32, seed=3)
    table = sweep_heads(
        induction_model(slope=0.0), many, basis_of(0.0), detail="intervals", progress=False
    )
    at = table.heads.index((1, 0))
    assert table.resampled is not None
    assert table.by_group.labels[at] == "content"
    for field in ("cs", "gs"):
        torn = getattr(table.resampled, field).clone()
        torn[:, 1, 0] += 20
        resampled = dataclasses.replace(table.resampled, **{field: torn})
        assert dataclasses.replace(table, resampled=resampled).by_group.labels[at] == "unclear"
