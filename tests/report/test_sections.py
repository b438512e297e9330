"""The report always finishes: refusals and errors are cards in their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.reports import model_directory, report
from tl_geometry.base.errors import GeometryError
from tl_geometry.report import TITLES, flow, heads, measures
from tl_geometry.report.contents import SECTIONS
from tl_geometry.report.section import Draft

SHAPES = ("llama", "gemma2", "bloom", "bert")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shapes")
    return {name: model_directory(root / name, name) for name in SHAPES}


def cards(summary: dict[str, Any], section: str) -> dict[str, str]:
    return {card["what"]: card["status"] for card in summary["manifest"][section]["cards"]}


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_report_of_every_shape(
    shape: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    summary = report(directories[shape], tmp_path)
    assert summary["sections"] == [TITLES[name] for name in SECTIONS]
    assert summary["failed"] == {}
    assert summary["finished"]
    expected = {
        "anova.csv",
        "massive_tokens.csv",
        "heads.csv",
        "positional.csv",
        "weights_qk.csv",
        "flow.csv",
        "run.json",
        "report.html",
    }
    assert expected <= {p.name for p in tmp_path.iterdir()}
    found = cards(summary, "weights") | cards(summary, "flow") | cards(summary, "heads")
    if shape == "bert":  # no next token to lose
        assert found["surrogates of W_QK in the live model"] == "left out"
        assert found["truncated states and skipped layers"] == "left out"
    else:
        assert {"surrogates.csv", "skipped_layers.csv", "truncation.csv"} <= {
            p.name for p in tmp_path.iterdir()
        }
    page = (tmp_path / "report.html").read_text()
    for card in [c for entry in summary["manifest"].values() for c in entry["cards"]]:
        assert f"{card['what']}: {card['status']}, because" in page


@pytest.mark.slow
def test_a_crash_is_a_card_and_the_rest_stays(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("planted <b>crash</b>")

    def refuse(*_: Any, **__: Any) -> None:
        raise GeometryError("planted refusal")

    monkeypatch.setattr(heads, "sweep_heads", crash)
    monkeypatch.setattr(measures, "contextual_report", refuse)
    monkeypatch.setattr(flow, "section", crash)
    summary = report(directories["llama"], tmp_path, contexts=64)
    assert set(summary["failed"]) == {"heads", "flow"}
    assert summary["finished"]
    assert cards(summary, "measures")["measures of context"] == "refused"
    assert "positional.csv" in summary["files"]  # the rest of that section
    assert "contextual.csv" not in summary["files"]
    page = (tmp_path / "report.html").read_text()
    assert "planted &lt;b&gt;crash" in page
    assert "<b>crash" not in page
    assert "<summary>Traceback</summary>" in page
    assert "refused, because planted refusal." in page
    assert all(title in page for title in TITLES.values())


def test_too_few_windows_are_said(directories: dict[str, Path], tmp_path: Path) -> None:
    summary = report(
        directories["llama"],
        tmp_path,
        contexts=12,
        length=6,
        sections=("measures", "weights", "flow"),
    )
    page = (tmp_path / "report.html").read_text()
    assert "trajectories: left out, because 12 windows are fewer than 32" in page
    assert "measures: left out, because 5 positions are fewer than 8" in page
    assert cards(summary, "flow") == {"trajectories": "left out"}


def test_too_few_windows_for_a_label_are_a_card(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    summary = report(directories["llama"], tmp_path, contexts=9, sections=("heads",))
    assert "heads.csv" not in summary["files"]
    page = (tmp_path / "report.html").read_text()
    assert (
        "the sweep over all heads: left out, because a label needs an interval, and 9 windows are "
        "fewer than the 64 of one." in page
    )


@pytest.mark.slow
def test_a_part_that_fails_leaves_what_came_before() -> None:
    draft = Draft("Title")
    draft.say("before")
    with draft.part("the part"):
        draft.say("inside")
        raise KeyError("x")
    made = draft.section()
    assert list(made.text) == ["before", "inside"]
    assert [c.status for c in made.cards] == ["failed"]
    with pytest.raises(KeyboardInterrupt), draft.part("stopped by hand"):
        raise KeyboardInterrupt
