"""The command line and the report: files, self-contained HTML, hostile names, JSON, one-line
errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tl_geometry import cli
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.base.tables import Table
from tl_geometry.render import page as render_page
from tl_geometry.render.basis import token_norms
from tl_geometry.render.figure import View
from tl_geometry.report import build, page
from tl_geometry.report import folder as report_folder
from tl_geometry.report.findings import Finding
from tl_geometry.report.section import Card, Section
from tl_geometry.report.tables import TableBlock

HOSTILE = "<img src=x onerror=alert(1)>.txt"
NASTY = "<script>$x^{$ \x00\x1b[31m\u202e\u2066 \ud800 \u2028&\"'.txt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of the embedded model on two text files, one of them with a hostile name."""
    out = tmp_path_factory.mktemp("report")
    text = "def f(x):\n    return x + 1\n\nclass A:\n    pass\n" * 60
    paths = [out / "plain.txt", out / HOSTILE]
    for path in paths:
        path.write_text(text)
    request = build.Request(corpus=tuple(paths), contexts=12, length=32)
    build.build(request, out / "made", progress=False, command=["tl-geometry", "report"])
    return out / "made"


@pytest.mark.slow
def test_the_folder_holds_everything(folder: Path) -> None:
    assert {"report.html", "anova.csv", "anova.safetensors", "basis.safetensors", "run.json"} <= {
        p.name for p in folder.iterdir()
    }
    basis = tlg.PositionContext.load(folder / "basis.safetensors")
    assert 4 < basis.contexts <= 12  # copies count once
    assert basis.label_names == ("plain.txt", HOSTILE)
    run = json.loads((folder / "run.json").read_text())
    assert run["provenance"]["fingerprint"] == basis.provenance.fingerprint
    assert run["versions"]["torch"]
    assert run["command"] == ["tl-geometry", "report"]
    assert not (folder / "checkpoint.safetensors").exists()
    csv = (folder / "anova.csv").read_text().splitlines()
    assert csv[0].startswith("state,ss_total,pos,ctx,resid")
    assert len(csv) == 6


@pytest.mark.slow
def test_the_page_is_self_contained_and_escaped(folder: Path) -> None:
    html = (folder / "report.html").read_text()
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror" in html
    own = (Path(tlg.__file__).parent / "report" / "assets" / "report.js").read_text()
    scripts = set(re.findall(r"<script[^>]*>(.*?)</script>", html, re.DOTALL))
    assert scripts == {own, render_page.listener()}
    policy = html.partition('content="')[2].partition('"')[0]
    assert all(render_page.script_hash(script) in policy for script in scripts)
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", html)
    for needle in (
        "evidence for nothing",
        "untrained control",
        "do not say",
        "spliced from random places",
        "left out of the statistics",
    ):
        assert needle in html, needle
    assert html.count("data:image/svg+xml;base64,") >= 4
    assert "color-scheme:light dark" in html


def test_a_report_makes_its_folder_and_says_what_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, Any]] = [{}, {"progress": False}]
    for options in given:
        out = tmp_path / str(len(options)) / "made"
        request = build.Request(corpus=(tmp_path / "absent.txt",))
        with pytest.raises(GeometryError, match="expected existing text files"):
            build.build(request, out, **options)
        assert out.is_dir()
        assert ("loading the model" in capsys.readouterr().err) == (not options)


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tlg.__file__).parent.parent),
        "HF_HUB_OFFLINE": "1",
    }
    call = [sys.executable, "-m", "tl_geometry", *arguments]
    return subprocess.run(
        call, capture_output=True, text=True, check=False, env=environment, **options
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["report", "--length", "500"], "--length: expected 2 to 128 tokens, got 500"),
        (
            ["report", "--corpus", "absent.txt"],
            "--corpus: expected existing text files",
        ),
        (["report", "--dtype", "int8"], "--dtype: expected one of 'float32'"),
        (["report", "."], "expected a Hugging Face directory with config.json"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tl-geometry", *arguments, "--quiet"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("tl-geometry: ")
    assert text in lines[0]


@pytest.mark.nightly
def test_the_command_prints_json_and_resumes(tmp_path: Path) -> None:
    done = command(
        "report",
        "--contexts",
        "8",
        "--length",
        "16",
        "--out",
        str(tmp_path / "made"),
        "--json",
        "--quiet",
        "--resume",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["tables"]["anova"]["rows"]
    assert summary["provenance"]["contexts"] == 8


def test_hostile_names_break_no_page(tmp_path: Path) -> None:
    found = Finding(value=NASTY, said=NASTY, beside=NASTY, figure=NASTY, clear=True)
    part = page.Part(name="x", title=NASTY, html="<p>x</p>", findings=(found,))
    body = page.document(NASTY, [part], [NASTY], lede=NASTY, caution=NASTY, note=NASTY)
    assert body.encode()  # no lone surrogate
    assert body.count("<script") == 1  # its own
    assert not {"\x00", "\x1b", "\u202e", "\u2066", "\u2028"} & set(body)
    made = report_folder.Folder(tmp_path, NASTY, command=[NASTY], names=("overview",))
    card = Card(status="failed", what=NASTY, why=NASTY, trace=NASTY)
    facts = Table(
        names=("property", "value"),
        cells=((NASTY, NASTY),),
        provenance=Provenance(model=NASTY, corpus=NASTY),
    )
    made.describe(Provenance(model=NASTY), notes=[NASTY])
    blocks = [NASTY, card, TableBlock(name="overview", table=facts)]
    made.add("overview", Section(title=NASTY, blocks=blocks))
    made.finish()
    for name in ("report.html", "run.json", "overview.csv"):
        text = (tmp_path / name).read_bytes().decode("utf-8")
        assert text
        assert name == "overview.csv" or not {"\x00", "\x1b", "\u202e"} & set(text)
    assert json.loads((tmp_path / "run.json").read_text())["failed"]["overview"]


def test_hostile_names_break_no_figure(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    marked = [(3, 900.0, NASTY), (4, 90.0, "$a")]
    norms = torch.rand(4, 16, generator=generator) + 1
    figure = token_norms(
        norms, (0, 16), marked, state=1, title=NASTY, provenance=Provenance(model=NASTY)
    )
    for view in (figure, View(figure.figure, title=NASTY, caption=NASTY)):
        assert "<script" not in view.html()
        assert view.html().encode()
        assert view.save(tmp_path / "x.png").stat().st_size > 1000
    data = render_page.document(
        NASTY, {"caption": NASTY, "labels": [NASTY], "numbers": [1.5]}, "space"
    )
    assert data.encode()
    assert data.count("<script") == 2  # its own
    assert not {"\x00", "\u202e"} & set(data)


@pytest.mark.slow
def test_views_say_what_they_take() -> None:
    code = """
import torch, tl_geometry as tlg
basis = tlg.decompose_activations(torch.randn(4, 6, 3))
views = (tlg.render.split, tlg.render.heads, tlg.render.heads)
for view, value in zip(views, (basis, basis, basis.anova())):
    try:
        view(value)
    except tlg.GeometryError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )  # the hook of the tests would refuse first
    split, heads, grid = done.stdout.splitlines()
    assert split.startswith("split: expected a ScoreSplit, got PositionContext. Use split_scores")
    assert heads.startswith(
        "heads: expected a table with a row for each layer and head, got PositionContext. "
        "Use sweep_heads"
    )
    assert "got Anova" in grid
