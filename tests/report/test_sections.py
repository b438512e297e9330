"""The report always finishes: refusals and errors are cards in their place, finished sections are
taken over, time is kept."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from tests.reports import model_directory, report
from tl_geometry import zoo
from tl_geometry.base.errors import GeometryError
from tl_geometry.interventions import Dominance
from tl_geometry.models import view as view_of
from tl_geometry.report import TITLES, contents, flow, folder, heads, measures
from tl_geometry.report import build as building
from tl_geometry.report.budget import PARTS, Budget, threads_for
from tl_geometry.report.contents import BUDGETS, SECTIONS
from tl_geometry.report.section import Draft
from tl_geometry.scores.sweep_table import SweepTable

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
    assert set(again["files"]) == set(contents.report_files(("overview",)))
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


def test_a_small_budget_leaves_out_and_says_so_but_not_labels(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A word that stands for no time at all: heads keep their intervals and the edits theirs."""
    monkeypatch.setitem(BUDGETS, "quick", 1e-5)
    given: dict[str, Any] = {"contexts": None, "sections": ("basis", "heads", "measures", "flow")}
    summary = report(directories["llama"], tmp_path, budget="quick", **given)
    assert summary["finished"]
    assert summary["failed"] == {}
    kinds = [card["status"] for entry in summary["manifest"].values() for card in entry["cards"]]
    assert kinds.count("left out") >= 2
    assert "windows are more than --budget quick allows" in (tmp_path / "report.html").read_text()
    heads_table = SweepTable.load(tmp_path / "heads.safetensors")
    assert heads_table.provenance.contexts == 32
    assert heads_table.group_intervals is not None
    assert bool(heads_table.group_intervals.low.isfinite().all())
    change = Dominance.load(tmp_path / "dominant_only.safetensors").change("random term")
    assert bool(change.low.isfinite())


def test_windows_that_were_made_shorter_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(zoo.embedded())
    request = building.Request(contexts=None, length=None, budget="quick")
    texts = request.texts()
    budget = Budget("quick", n_layers=4, d_model=128)
    windows, smaller = building.choose_sizes(request, view, texts, budget)
    assert not [words for words in smaller if "in place of" in words]  # the twin
    length = windows.tokens.shape[1]
    monkeypatch.setattr(building, "SUMS", 1)
    monkeypatch.setattr(building, "SHORTEST", length // 2)
    windows, smaller = building.choose_sizes(request, view, texts, budget)
    shorter = windows.tokens.shape[1]
    assert shorter < length
    words = f"windows of {shorter} tokens in place of {length} (--budget quick)"
    assert words in smaller


def test_too_few_windows_for_a_label_are_a_card(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    summary = report(directories["llama"], tmp_path, contexts=9, sections=("heads",))
    assert "heads.csv" not in summary["files"]
    page = (tmp_path / "report.html").read_text()
    assert (
        "the sweep over all heads: left out, because a label needs an interval, and 9 windows are "
        "fewer than the 32 of one." in page
    )


def test_one_command_gives_the_same_numbers_at_any_speed(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that stands still, and one on which every step takes an hour."""
    found = []
    for name, step in (("fast", 0.0), ("slow", 3600.0)):
        now = itertools.count(0.0, step) if step else itertools.repeat(0.0)
        for timer in ("monotonic", "perf_counter", "process_time"):
            monkeypatch.setattr(time, timer, lambda now=now: next(now))
        given: dict[str, Any] = {"contexts": None, "length": None, "budget": "quick"}
        sections = ("basis", "flow")
        found.append(report(directories["llama"], tmp_path / name, sections=sections, **given))
        monkeypatch.undo()
    fast, slow = found
    assert json.dumps(fast["tables"]) == json.dumps(slow["tables"])  # NaN is NaN here
    assert fast["provenance"] == slow["provenance"]
    assert fast["seconds"] < slow["seconds"]  # the twin: the clocks differ


def test_the_budget_and_the_shape_choose_sizes() -> None:
    def sized(word: str, layers: int, width: int, length: int = 128) -> int:
        budget = Budget(word, n_layers=layers, d_model=width)
        return budget.windows("position and context", length, 1024)

    assert sized("full", 32, 4096, 512) == 1024
    assert sized("default", 4, 128, 512) == 1024
    assert sized("quick", 30, 576) < sized("default", 30, 576) < 1024
    assert sized("default", 12, 768) > sized("default", 24, 1024)
    assert sized("default", 30, 576) == pytest.approx(4 * sized("default", 30, 576, 512), abs=3)
    budget = Budget("default", n_layers=30, d_model=576)
    fitting = budget.windows("trajectories", 50, 384)
    assert budget.windows("trajectories", 50, 10) == 10
    assert budget.windows("trajectories", 50, 384, 2 * fitting) == 2 * fitting  # PATIENCE
    assert budget.windows("trajectories", 50, 384, 3 * fitting) == 0
    assert sum(share for share, _ in PARTS.values()) < 1
    with pytest.raises(GeometryError, match="--budget: expected one of 'quick', 'default', 'full'"):
        building.Request(budget="10m")


def test_threads_follow_the_width_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for width, threads in ((128, 1), (576, 2)):
            with threads_for(width):
                assert torch.get_num_threads() == threads
            assert torch.get_num_threads() == 2
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        with threads_for(128):
            assert torch.get_num_threads() == 2  # the user's own choice
    finally:
        torch.set_num_threads(before)


def test_one_line_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    draft = Draft("The heads", tqdm(total=2, bar_format=building.PROGRESS))
    with draft.part("a part of it"):
        pass
    shown = capsys.readouterr().err.rpartition("\r")[2].rstrip()
    assert shown == "The heads: 0/2 (00:00 so far), a part of it"
    quiet = Draft("The heads")
    with quiet.part("a part of it"):
        pass
    assert capsys.readouterr().err == ""


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
