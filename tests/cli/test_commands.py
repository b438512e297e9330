"""Commands as a user gives them: what is resumed, what the null and the control are, options
that reach the results."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tl_geometry as tlg
from tests.reports import model_directory
from tl_geometry import zoo
from tl_geometry.base.errors import GeometryError
from tl_geometry.cli import app
from tl_geometry.decomposition import from_model, stream_pass
from tl_geometry.decomposition.stream_pass import forward_states
from tl_geometry.report import Analysis, build
from tl_geometry.report import basis as basis_section
from tl_geometry.zoo.inputs import Inputs

CORPUS: dict[str, Any] = {"contexts": 12, "length": 16, "bos": None, "seed": 3}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "code.txt"
    path.write_text(
        "".join(f"def f{i}(x):\n    return x * {i} + y[{i % 7}]\n\n" for i in range(60))
    )
    return path


def test_the_null_is_spliced_and_the_control_is_untrained(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Analysis] = []
    monkeypatch.setattr(
        build, "write", lambda analysis, *args, **options: kept.append(analysis) or {"sections": []}
    )
    build.build(build.Request(corpus=(text,), **CORPUS), tmp_path, progress=False)
    (a,) = kept
    assert a.embedded
    null, control = basis_section.spliced(a, 12), basis_section.untrained(a, 12)
    spliced = tlg.decompose(a.view, tlg.corpus.splice(a.windows, seed=3), progress=False)
    assert null.provenance.token_hash == spliced.provenance.token_hash
    shares, found = a.basis.anova().shares["ctx"], a.basis.anova(null=null).ctx_null
    assert found is not None
    assert torch.allclose(found, spliced.anova().shares["ctx"])
    assert not torch.allclose(found, shares, atol=1e-2)
    assert control.provenance.token_hash == a.basis.provenance.token_hash
    assert (
        control.provenance.fingerprint
        == tlg.view(zoo.embedded(trained=False)).fingerprint
        != a.view.fingerprint
    )


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("command", "checkpoint"),
    [("heads", "out/checkpoint.safetensors"), ("fit", "out.checkpoint.safetensors")],
)
@pytest.mark.parametrize("resume", [True, False])
def test_resume_goes_on_from_a_half_done_checkpoint(
    command: str,
    checkpoint: str,
    resume: bool,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    forward = forward_states

    def counting(view: Any, states: Any, batch: Tensor, on_state: Any, most: int) -> None:
        if sum(seen) + len(batch) > most:
            raise Killed
        seen.append(len(batch))
        forward(view, states, batch, on_state)

    view = tlg.view(zoo.embedded())
    tokens = Inputs(corpus=(text,), **CORPUS).tokens(view)
    monkeypatch.setattr(stream_pass, "forward_states", lambda *args: counting(*args, most=5))
    (tmp_path / "out").mkdir()
    if command == "heads":  # as a stopped run leaves its folder
        (tmp_path / "out" / "run.json").write_text('{"written_by": "tl-geometry"}')
    with pytest.raises(Killed):
        tlg.decompose(
            view, tokens, checkpoint=tmp_path / checkpoint, batch_size=5, progress=False, seed=3
        )
    assert seen == [5]
    seen.clear()
    monkeypatch.setattr(stream_pass, "forward_states", lambda *args: counting(*args, most=99))
    monkeypatch.setattr(build, "kept_samples", lambda *_: 32)  # as in the interrupted run
    bases: list[tlg.PositionContext] = []
    monkeypatch.setattr(
        build,
        "write",
        lambda analysis, *args, **options: (
            bases.append(analysis.basis) or {"sections": [], "failed": {}}
        ),
    )
    out = tmp_path / ("out" if command == "heads" else "out.safetensors")
    options = [
        "--corpus",
        str(text),
        "--contexts",
        "12",
        "--length",
        "16",
        "--seed",
        "3",
        "--out",
        str(out),
        "--quiet",
    ]
    done = CliRunner().invoke(app, [command, *options, "--resume" if resume else "--force"])
    assert done.exit_code == 0, done.output
    assert sum(seen) == (7 if resume else 12)
    basis = bases[0] if command == "heads" else tlg.PositionContext.load(out)
    assert basis.contexts == 12
    assert (
        basis.provenance.token_hash
        == tlg.decompose(view, tokens, progress=False).provenance.token_hash
    )
    assert not (tmp_path / checkpoint).exists()


@pytest.mark.parametrize(("words", "sizes"), [(["--batch-size", "5"], [5, 5, 2]), ([], [12])])
def test_fit_runs_batches_of_the_size_asked_for(
    words: list[str],
    sizes: list[int],
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def counting(view: Any, states: Any, batch: Tensor, on_state: Any) -> None:
        seen.append(len(batch))
        forward_states(view, states, batch, on_state)

    monkeypatch.setattr(stream_pass, "forward_states", counting)
    options = ["--corpus", str(text), "--contexts", "12", "--length", "16", "--quiet", *words]
    done = CliRunner().invoke(app, ["fit", *options, "--out", str(tmp_path / "basis.safetensors")])
    assert done.exit_code == 0, done.output
    assert seen == sizes


def test_a_checkpoint_that_is_gone_when_fit_ends_is_no_error(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decompose = from_model.decompose

    def deleting(*args: Any, checkpoint: Path, **options: Any) -> tlg.PositionContext:
        basis = decompose(*args, checkpoint=checkpoint, **options)
        checkpoint.unlink()
        return basis

    monkeypatch.setattr(from_model, "decompose", deleting)
    options = ["--corpus", str(text), "--contexts", "3", "--length", "8", "--quiet"]
    done = CliRunner().invoke(app, ["fit", *options, "--out", str(tmp_path / "a.safetensors")])
    assert done.exit_code == 0, done.output
    assert "a.safetensors" in done.output


def test_windows_have_at_least_two_tokens_and_at_most_those_of_the_model(text: Path) -> None:
    view = tlg.view(zoo.embedded())
    for length in (2, view.n_ctx):
        inputs = Inputs(corpus=(text,), contexts=3, length=length)
        assert inputs.windows(view, inputs.texts()).tokens.shape == (3, length)
    with pytest.raises(GeometryError, match=f"--length: expected 2 to {view.n_ctx} tokens"):
        Inputs(corpus=(text,), length=view.n_ctx + 1).tokens(view)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 with a tokenizer and a text of its words, as a Hugging Face directory."""
    return model_directory(tmp_path_factory.mktemp("models") / "small", "gpt2")


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_planes_are_written_where_heads_are_rotated(architecture: str, tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "small", architecture)
    sizes = ["--corpus", str(folder / "text.txt"), "--contexts", "32", "--length", "16"]
    out = tmp_path / "out"
    done = CliRunner().invoke(
        app, ["heads", str(folder), *sizes, "--out", str(out), "--quiet", "--planes"]
    )
    assert done.exit_code == 0, done.output
    page = (out / "report.html").read_text()
    there = {path.stem for path in out.glob("*.csv")}
    assert {"bands", "planes"} & there == (
        {"bands", "planes"} if architecture == "llama" else set()
    )
    if architecture == "gpt2":
        assert "rotary planes: left out, because the model has no rotary embedding" in page
        return
    assert "A rotary embedding turns pairs of coordinates" in page
    rows = (out / "planes.csv").read_text().splitlines()
    assert rows[0] == "layer,head,plane,wavelength,band,term,cs,gs"
    assert len(rows) == 1 + 2 * 4 * 4 * 9


@pytest.mark.parametrize(
    ("command", "title", "tables"),
    [
        ("heads", "What drives each head", {"heads", "dominant_only"}),
        (
            "weights",
            "Weights and the sphere",
            {"weights_qk", "weights_ov", "readout_ov", "paths", "surrogates"},
        ),
        (
            "trajectories",
            "Trajectories as a flow",
            {"flow", "flow_nulls", "skipped_layers", "truncation"},
        ),
    ],
)
def test_commands_write_their_sections_with_the_options_given(
    command: str, title: str, tables: set[str], directory: Path, tmp_path: Path
) -> None:
    options = [
        "--corpus",
        str(directory / "text.txt"),
        "--contexts",
        "32",
        "--length",
        "16",
        "--out",
        str(tmp_path),
        "--quiet",
        "--json",
    ]
    done = CliRunner().invoke(
        app, [command, str(directory), *options, "--processed", "--dtype", "float64", "--seed", "3"]
    )
    assert done.exit_code == 0, done.output
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["sections"] == ["What was analysed", title]
    expected = {
        "model": "small",
        "processed": True,
        "dtype": "float64",
        "seed": 3,
        "contexts": 32,
        "has_bos": True,
    }
    assert {k: run["provenance"][k] for k in expected} == expected
    assert {p.stem for p in tmp_path.glob("*.csv")} == {"overview", *tables}
    assert title in (tmp_path / "report.html").read_text()


def test_check_and_readout_of_a_directory(directory: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["check", str(directory), "--processed", "--dtype", "float64"])
    assert done.exit_code == 0, done.output
    assert "processed, float64, cpu" in done.output
    assert "verified, state l+1 is the output of block l" in done.output
    options = [
        "--layer",
        "1",
        "--head",
        "2",
        "--weights",
        "QK",
        "--k",
        "3",
        "--processed",
        "--out",
        str(tmp_path / "read.csv"),
    ]
    done = CliRunner().invoke(app, ["readout", str(directory), *options])
    assert done.exit_code == 0, done.output
    rows = list(csv.DictReader((tmp_path / "read.csv").read_text().splitlines()))
    assert rows
    assert f"{len(rows)} rows" in done.output
    assert {(row["layer"], row["head"]) for row in rows} == {("1", "2")}
    assert len(rows[0]["queries"].split()) == 3


def test_commands_and_options_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"_TL_GEOMETRY_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    for typed, wanted in (("rep", {"report", "reproduce"}), ("fi", {"fit"})):
        environment = {**words, "COMP_WORDS": f"tl-geometry {typed}"}
        done = CliRunner().invoke(app, [], prog_name="tl-geometry", env=environment)
        assert set(done.output.split()) == wanted
