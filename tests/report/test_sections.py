"""The report always finishes: refusals and errors are cards in their place, finished sections are
taken over, time is kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reports import model_directory, report
from tl_geometry import zoo
from tl_geometry.base.arguments import SECTIONS
from tl_geometry.base.errors import GeometryError
from tl_geometry.models.describing import as_view
from tl_geometry.report import TITLES, WEIGHTS, flow, folder, heads, measures, speed
from tl_geometry.report import build as building
from tl_geometry.report.clock import Clock, span
from tl_geometry.report.section import Draft

SHAPES = ("llama", "gemma2", "bloom", "bert")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shapes")
    return {name: model_directory(root / name, name) for name in SHAPES}


def cards(summary: dict[str, Any], section: str) -> dict[str, str]:
    return {card["what"]: card["status"] for card in summary["manifest"][section]["cards"]}


@pytest.mark.slow
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
        assert found["the model with dominant terms only"] == "left out"
        assert found["truncated states and skipped layers"] == "left out"
    else:
        assert {"dominant_only.csv", "skipped_layers.csv", "truncation.csv"} <= {
            p.name for p in tmp_path.iterdir()
        }
    page = (tmp_path / "report.html").read_text()
    for card in [c for entry in summary["manifest"].values() for c in entry["cards"]]:
        assert f"{card['what']}: {card['status']}, because" in page


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
    summary = report(directories["llama"], tmp_path)
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


@pytest.mark.slow
def test_every_section_is_on_the_disk_as_soon_as_it_is_finished(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measures, "section", stop)
    with pytest.raises(KeyboardInterrupt):
        report(directories["bloom"], tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["sections"] == [TITLES[n] for n in ("overview", "basis", "heads")]
    assert not run["finished"]
    page = (tmp_path / "report.html").read_text()
    assert "3 of 6 sections are here, measures, weights, flow to come" in page
    assert (tmp_path / "heads.csv").exists()
    assert not (tmp_path / "positional.csv").exists()
    assert (tmp_path / "basis.safetensors").exists()
    monkeypatch.undo()

    made: list[str] = []
    original = folder.Folder.add
    monkeypatch.setattr(
        folder.Folder,
        "add",
        lambda self, name, *a, **o: made.append(name) or original(self, name, *a, **o),
    )
    monkeypatch.setattr(building, "decompose", stop)  # the basis is taken over too
    summary = report(directories["bloom"], tmp_path, resume=True)
    assert made == ["measures", "weights", "flow"]
    assert summary["sections"] == [TITLES[name] for name in SECTIONS]
    assert summary["tables"]["heads"]["rows"]
    assert "to come" not in (tmp_path / "report.html").read_text()


def test_only_sections_of_the_same_settings_are_taken_over(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = folder.Folder.add
    monkeypatch.setattr(
        folder.Folder,
        "add",
        lambda self, name, *a, **o: made.append(name) or original(self, name, *a, **o),
    )
    wanted: dict[str, Any] = {"sections": ("overview", "measures")}
    first = report(directories["llama"], tmp_path, **wanted)
    assert made == ["overview", "measures"]
    report(directories["llama"], tmp_path, resume=True, **wanted)
    assert made == ["overview", "measures"]  # nothing again
    report(directories["llama"], tmp_path, resume=True, seed=1, **wanted)
    assert made[2:] == ["overview", "measures"]
    other = report(directories["gemma2"], tmp_path, resume=True, **wanted)
    assert made[4:] == ["overview", "measures"]
    assert other["provenance"]["fingerprint"] != first["provenance"]["fingerprint"]
    again = report(
        directories["gemma2"], tmp_path, sections=("overview",)
    )  # a fresh run takes the old tables away
    assert again["files"] == ["basis.safetensors", "overview.csv", "overview.safetensors"]
    assert not (tmp_path / "positional.csv").exists()


def test_a_failed_section_is_tried_again(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise RuntimeError("once")

    with monkeypatch.context() as patch:
        patch.setattr(measures, "section", crash)
        assert report(directories["llama"], tmp_path, sections=("measures",))["failed"] == {
            "measures": "RuntimeError: once"
        }
    assert (
        report(directories["llama"], tmp_path, sections=("measures",), resume=True)["failed"] == {}
    )


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


def test_a_tiny_budget_leaves_out_and_says_so(directories: dict[str, Path], tmp_path: Path) -> None:
    summary = report(directories["llama"], tmp_path, budget=0.01)
    assert summary["finished"]
    assert summary["failed"] == {}
    kinds = [card["status"] for entry in summary["manifest"].values() for card in entry["cards"]]
    assert kinds.count("left out") >= 3
    assert "which --budget does not leave" in (tmp_path / "report.html").read_text()


def test_the_budget_chooses_sizes_and_says_which(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = building.Costs(token=0.5, output=0.5)
    monkeypatch.setattr(building, "measured_costs", lambda *_: slow)
    monkeypatch.setattr(building, "token_cost", lambda *_, **__: slow.token)
    monkeypatch.setattr(building, "SHORTEST", 8)
    summary = report(
        directories["llama"],
        tmp_path,
        contexts=None,
        length=None,
        budget=300.0,
        sections=("overview", "measures"),
    )
    length, contexts = summary["plan"]["length"], summary["plan"]["contexts"]
    assert length < 64
    assert contexts * length * 0.5 <= 300
    said = " ".join(summary["notes"])
    assert f"windows of {length} tokens in place of 64" in said
    assert summary["plan"]["smaller"]
    monkeypatch.setattr(
        building, "measured_costs", lambda *_: building.Costs(token=1e-6, output=1e-6)
    )
    monkeypatch.setattr(building, "token_cost", lambda *_, **__: 1e-6)
    resumed = report(
        directories["llama"],
        tmp_path,
        contexts=None,
        length=None,
        budget=300.0,
        sections=("overview", "measures"),
        resume=True,
    )
    assert resumed["plan"] == summary["plan"]  # a faster hour changes nothing


def test_the_clock_shares_out_what_is_left() -> None:
    now = [0.0]
    clock = Clock(100.0, {"a": 1.0, "b": 3.0}, show=False, now=lambda: now[0])
    assert clock.begin("a") == pytest.approx(25.0)
    assert clock.fits(1.0, 100) == 25
    assert clock.fits(1.0, 10) == 10
    assert clock.fits(1.0, 100, share=0.2) == 5
    assert clock.fits(20.0, 100, 2) == 2  # 40 s for 25: worth it
    assert clock.fits(60.0, 100, 1) == 0
    now[0] = 60.0
    assert clock.left() == 0.0
    assert clock.begin("b") == pytest.approx(40.0)
    assert WEIGHTS.keys() >= set(SECTIONS)


def test_one_line_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    clock = Clock(600.0, {"a": 1.0, "b": 1.0}, show=True, now=lambda: now[0])
    clock.expect({"a": 30.0, "b": 45.0})
    clock.begin("a", 30.0, "The heads")
    said = capsys.readouterr().err
    assert re.fullmatch(r"\[1/2\] The heads: about 30 s \(.* left\)\n", said)
    clock.say("a part of it")
    assert capsys.readouterr().err == ""  # a line for each stage where none is rewritten
    clock.begin("b", 45.0, "The flow")
    assert capsys.readouterr().err.count("\n") == 1
    quiet = Clock(600.0, {"a": 1.0}, show=False)
    quiet.begin("a", 30.0)
    quiet.finish()
    assert capsys.readouterr().err == ""
    assert span(0.2) == "1 s"


def test_threads_are_those_that_a_model_gains_by(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    view = as_view(zoo.embedded())
    seconds = {"idle": {8: 1.0, 4: 2.0}, "narrow": {8: 1.1, 4: 1.0, 2: 1.0, 1: 1.9}}
    seconds["busy"] = {8: 9.0, 4: 5.0, 2: 3.0, 1: 1.0}
    before = torch.get_num_threads()
    try:
        for case, best in {"idle": 8, "narrow": 2, "busy": 1}.items():
            monkeypatch.setattr(
                speed,
                "token_cost",
                lambda *_, case=case, **__: seconds[case][torch.get_num_threads()],
            )
            torch.set_num_threads(8)
            with speed.own_threads(view):
                assert torch.get_num_threads() == best
            assert torch.get_num_threads() == 8
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        with speed.own_threads(view):
            assert torch.get_num_threads() == 8  # the user's own choice
    finally:
        torch.set_num_threads(before)


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
