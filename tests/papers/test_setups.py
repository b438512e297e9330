"""The settings of the experiments, how a model is made and trained with them, and what an
experiment measures and writes."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.modules import copy_of
from tests.tiny import tiny, tokens
from tl_geometry import positional_report
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.papers import arithmetic, characters, experiments, outcome, random_tokens
from tl_geometry.papers import setup as training
from tl_geometry.papers.setup import Setup

SIZES: dict[str, Any] = {"layers": 1, "heads": 2, "d_model": 16, "context": 8, "batch": 4}
TINY = Setup(scale="test", steps=9, warmup=2, measurements=3, **SIZES)
DEFAULTS: dict[str, Any] = {
    "learning_rate": 5e-5,
    "final_learning_rate": 5e-6,
    "weight_decay": 0.1,
    "betas": (0.9, 0.99),
    "clip": 1.0,
    "dropout": 0.1,
    "bias": False,
    "measurements": 10,
    "contexts": 512,
    "frequencies": 10,
}
SMOKE = {"scale": "smoke", "layers": 2, "heads": 2, "d_model": 32, "warmup": 5}
SMOKE |= {"learning_rate": 3e-3, "measurements": 1, "contexts": 32}
CPU = {"scale": "cpu", "layers": 4, "heads": 4, "warmup": 100}


def test_the_settings_that_a_user_need_not_give() -> None:
    """Those of the published runs."""
    own = SIZES | {"scale": "test", "steps": 9, "warmup": 2, "measurements": 3}
    assert dataclasses.asdict(TINY) == DEFAULTS | own
    extra = {"tokenizer": "", "characters": 10_000_000, "shown": (1, 5)}
    randomised = random_tokens.RandomisationSetup(scale="test", steps=9, warmup=2, **SIZES)
    assert dataclasses.asdict(randomised).items() >= extra.items()
    adding = arithmetic.AdditionSetup(
        scale="test", steps=9, warmup=2, low=1, high=2, examples=3, **SIZES
    )
    assert adding.problems == 1000


@pytest.mark.parametrize(
    ("module", "scale", "changed"),
    [
        (
            random_tokens,
            "smoke",
            SMOKE
            | {"context": 24, "batch": 8, "steps": 20, "frequencies": 3, "characters": 100_000}
            | {"shown": (1, 2), "tokenizer": ""},
        ),
        (
            random_tokens,
            "cpu",
            CPU
            | {"d_model": 64, "context": 64, "batch": 16, "steps": 2000, "learning_rate": 3e-3}
            | {"final_learning_rate": 3e-4, "dropout": 0.0, "measurements": 5, "contexts": 1024}
            | {"frequencies": 4, "shown": (1, 3), "characters": 10_000_000, "tokenizer": ""},
        ),
        (
            arithmetic,
            "smoke",
            SMOKE
            | {"context": 14, "batch": 16, "steps": 30, "frequencies": 2, "low": 3, "high": 4}
            | {"examples": 200, "problems": 20},
        ),
        (
            arithmetic,
            "cpu",
            CPU
            | {"layers": 3, "d_model": 128, "context": 20, "batch": 64, "steps": 5000}
            | {"warmup": 200, "learning_rate": 1e-3, "final_learning_rate": 1e-5, "dropout": 0.0}
            | {"measurements": 6, "contexts": 256, "frequencies": 3, "low": 3, "high": 6}
            | {"examples": 100_000, "problems": 500},
        ),
        (characters, "smoke", SMOKE | {"context": 24, "batch": 8, "steps": 20, "frequencies": 3}),
        (
            characters,
            "cpu",
            CPU
            | {"d_model": 128, "context": 64, "batch": 32, "steps": 1500, "learning_rate": 2e-3}
            | {"final_learning_rate": 2e-4, "measurements": 5, "contexts": 1024, "frequencies": 4},
        ),
    ],
)
def test_the_settings_of_each_scale(module: Any, scale: str, changed: dict[str, Any]) -> None:
    """What the file of settings says, and the defaults for the rest."""
    assert dataclasses.asdict(module.SETUPS[scale]) == DEFAULTS | changed


@pytest.mark.parametrize(("steps", "every"), [(9, 1), (39, 1), (40, 2), (5000, 250)])
def test_the_trainer_has_the_settings_and_about_twenty_checkpoints(steps: int, every: int) -> None:
    """And the seed of the run."""
    changed = {"clip": "0.5", "learning_rate": "0.25", "final_learning_rate": "0.125"}
    changed |= {"warmup": "3", "weight_decay": "0.7", "betas": "0.8,0.6", "steps": str(steps)}
    found = TINY.changed(changed).training(6)
    wanted = {"steps": steps, "learning_rate": 0.25, "final_learning_rate": 0.125, "warmup": 3}
    wanted |= {"weight_decay": 0.7, "betas": (0.8, 0.6), "clip": 0.5, "seed": 6}
    wanted["checkpoint_every"] = every
    assert {name: getattr(found, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    ("steps", "measurements", "wanted"),
    [
        (100, 4, (0, 6, 25, 56, 100)),
        (9, 3, (0, 1, 4, 9)),
        (4, 4, (0, 1, 2, 4)),
        (9, 1, (0, 9)),
        (9, 0, (0, 9)),
    ],
)
def test_measurements_are_even_in_the_root_of_the_step(
    steps: int, measurements: int, wanted: tuple[int, ...]
) -> None:
    """Each step once, and at least the first and the last."""
    changed = TINY.changed({"steps": str(steps), "measurements": str(measurements)})
    assert changed.measure_at() == wanted


@pytest.mark.parametrize("bias", [False, True])
def test_the_model_before_training(bias: bool) -> None:
    """A GPT-2 of the sizes and the dropout that were asked for; only weights of the seed, and
    biases that are trained only if they are asked for."""
    setup = dataclasses.replace(TINY, dropout=0.25, bias=bias)
    model = setup.model(11, 3)
    config = model.config
    sizes = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "layer_norm_epsilon")
    assert [getattr(config, name) for name in sizes] == [11, 8, 16, 1, 2, 1e-5]
    assert config.activation_function == "gelu"
    assert (config.resid_pdrop, config.embd_pdrop, config.attn_pdrop) == (0.25,) * 3
    biases = [p for name, p in model.named_parameters() if name.endswith(".bias")]
    assert {p.requires_grad for p in biases} == {bias}
    assert not any(bool(p.any()) for p in biases)
    weights = [p for name, p in model.named_parameters() if not name.endswith(".bias")]
    assert all(p.requires_grad for p in weights)
    first, again, other = (
        m.transformer.wpe.weight for m in (model, *map(setup.model, (11, 11), (3, 4)))
    )
    assert first.equal(again)
    assert not first.equal(other)


def test_settings_are_changed_by_their_text() -> None:
    """With values of the type of the setting; names and values that it has not are refused."""
    found = TINY.changed({"bias": "true", "clip": "2", "layers": "3", "betas": "1,0.5"})
    assert found == dataclasses.replace(TINY, bias=True, clip=2.0, layers=3, betas=(1.0, 0.5))
    assert TINY.changed({"bias": "false"}) == TINY
    names = ", ".join(sorted({f.name for f in dataclasses.fields(Setup)} - {"scale"}))
    for changes, message in (
        ({"scale": "cpu"}, f"--set: expected names among {names}, got scale."),
        ({"z": "1", "y": "1"}, f"--set: expected names among {names}, got y, z."),
        ({"bias": "True"}, "--set bias: expected true or false, got True."),
        ({"layers": "1.5"}, "--set layers: expected a value of type int, got '1.5'."),
        ({"betas": "1,b"}, "--set betas: expected a value of type tuple, got '1,b'."),
    ):
        with pytest.raises(GeometryError) as wrong:
            TINY.changed(changes)
        assert str(wrong.value) == message


def test_a_scale_is_a_name_or_a_setup() -> None:
    """A setup is returned as it is."""
    setups = arithmetic.SETUPS
    assert training.chosen("cpu", setups) is setups["cpu"]
    own = setups["cpu"].changed({"steps": "1"})
    assert training.chosen(own, setups) is own
    with pytest.raises(GeometryError, match="scale: expected one of 'smoke', 'cpu', 'paper', got"):
        training.chosen("big", setups)


def trained(module: Any, **options: Any) -> tuple[Any, list[Any]]:
    """A run whose trainer only says that it has done each step, and what the trainer was given."""
    asked: list[Any] = []

    def train(
        model: Any, batch_at: Any, settings: Any, *, on_step: Any, **given: Any
    ) -> list[float]:
        asked.append((model, batch_at, settings, given))
        for step in range(settings.steps):
            on_step(step, None)
        return [0.5]

    module.train = train
    setup = module.Setup(scale="test", steps=9, warmup=2, measurements=3, **SIZES)
    measure = lambda step, model: [{"row": 1, "at": step}, {"row": 2}]
    given: dict[str, Any] = {"name": "run", "seed": 3} | options
    return module.run_training(setup, 11, "batches", measure, **given), asked


def test_a_run_is_measured_at_its_steps_and_its_weights_are_kept(tmp_path: Path) -> None:
    """The trainer has the folder's checkpoint, the records so far and the bar of the caller."""
    module: Any = copy_of(training)
    found, asked = trained(module, out=tmp_path, progress=False)
    wanted = [{"step": s, **r} for s in (0, 1, 4, 9) for r in ({"row": 1, "at": s}, {"row": 2})]
    assert found.records == wanted
    assert found.losses == [0.5]
    (model, batches, settings, given), folder = asked[0], tmp_path / "run"
    assert found.model is model
    assert (batches, settings.seed) == ("batches", 3)
    checkpoint = folder / "training.safetensors"
    assert given == {"checkpoint": checkpoint, "records": wanted, "progress": False}
    steps = ["step-000000", "step-000001", "step-000004", "step-000009"]
    assert sorted(path.stem for path in folder.glob("*.safetensors")) == steps
    record = json.loads((folder / "run.json").read_text())
    assert record["written_by"] == "tl-geometry"
    assert record["setup"]["d_model"] == 16
    checkpoint.write_bytes(b"")
    again, asked = trained(module, out=tmp_path)
    assert [r["step"] for r in again.records] == [1, 1, 4, 4, 9, 9], (
        "the start is in the checkpoint"
    )
    assert asked[0][3]["progress"] is True


def test_a_run_without_a_folder_writes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """And trains on the device that was asked for."""
    monkeypatch.chdir(tmp_path)
    module: Any = copy_of(training)
    found, asked = trained(module, device="meta")
    assert len(found.records) == 8
    assert asked[0][3]["checkpoint"] is None
    assert {p.device.type for p in found.model.parameters()} == {"meta"}
    assert list(tmp_path.iterdir()) == []


def claimed(folder: Path, setup: Setup) -> str:
    """The message where a run is refused its folder."""
    with pytest.raises(GeometryError) as refused:
        training._claim(folder, setup)
    return str(refused.value)


def test_a_folder_with_files_of_others_is_refused(tmp_path: Path) -> None:
    """Eight of them are named. Other files, and those of an earlier run, are not in the way."""
    expected = "--out: expected a folder of each training run without files of these names, got"
    folder = tmp_path / "run"
    training._claim(folder, TINY)
    (folder / "training.safetensors").write_bytes(b"")
    training._claim(folder, TINY)
    (folder / "run.json").unlink()
    said = claimed(folder, TINY)
    assert said == f"{expected} {folder} with training.safetensors. Use another --out."
    names = [f"step-{i:06d}.safetensors" for i in range(8)]
    for name in (*names[:7], "notes.txt"):
        (folder / name).write_bytes(b"")
    listed = ", ".join(["training.safetensors", *names[:7]])
    assert claimed(folder, TINY) == f"{expected} {folder} with {listed}. Use another --out."
    (folder / names[7]).write_bytes(b"")
    assert claimed(folder, TINY) == f"{expected} {folder} with {listed} .... Use another --out."
    (folder / "run.json").write_text("{}")
    assert f"{folder} with run.json, training" in claimed(folder, TINY)
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_text("")
    said = claimed(file, TINY)
    assert said == f"{expected} {file} with a file in its place. Use another --out."
    other.mkdir()
    (other / "notes.txt").write_text("")
    training._claim(other, TINY)


# --- what is measured and written


def test_a_bridge_is_made_of_a_copy_of_the_model() -> None:
    """It has the name and the device, and hooks into no module that is trained."""
    model, asked = TINY.model(11, 0), []
    module: Any = copy_of(outcome)
    module.from_hf = lambda *given, **options: asked.append((given, options))
    module.bridge_of(model.to("meta"), "the name")
    ((copied, tokenizer), options) = asked[0]
    assert tokenizer is None
    assert copied is not model
    assert options == {"name": "the name", "device": torch.device("meta")}


def test_a_basis_of_an_experiment_leaves_the_first_position_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It knows its corpus, has no BOS, and shows no bar."""
    basis = outcome.basis_of(tiny("bridge", "gpt2"), tokens(batch=8, length=12), "a corpus")
    assert (basis.window, basis.provenance.corpus, basis.contexts) == ((1, 12), "a corpus", 8)
    assert capsys.readouterr().err == ""
    report = positional_report(basis, frequencies=3, jackknife=False, nulls=False)
    rows = outcome.state_measures(basis, 3)
    names = (*outcome.MEASURES, "split_half")
    assert [row["state"] for row in rows] == [0, 1, 2]
    for i, row in enumerate(rows):
        steps = [
            math.dist(a, b)
            for a, b in zip(basis.pos[i].tolist(), basis.pos[i, 1:].tolist(), strict=False)
        ]
        middle = sorted(steps)[(len(steps) - 1) // 2]
        wanted = {name: float(report[name][i]) for name in names}
        wanted |= {"state": i, "jump": max(steps) / middle}
        # the first row of the basis is position 1
        assert row == pytest.approx(wanted | {"jump_at": 1 + steps.index(max(steps))}, rel=1e-6)
    first = outcome.state_measures(basis, 1)[0]["low_frequency"]
    assert first < rows[0]["low_frequency"]


def test_measures_that_every_experiment_records() -> None:
    """In this order."""
    assert (
        *("rank", "stable_rank", "relative_norm", "relative_norm_reference", "low_frequency"),
        *("roughness", "fracture", "fracture_at"),
    ) == outcome.MEASURES


def test_files_of_another_program_are_overwritten_only_by_force(tmp_path: Path) -> None:
    """In a folder without a record, and in one with the record of a report."""
    made = outcome.table_of([{"a": 1}], Provenance())
    whole = outcome.Outcome(
        name="addition",
        title="Sums",
        setup=TINY,
        seeds=(0,),
        corpus="a corpus",
        findings=(outcome.Claim(statement="one", expected="more", found="2"),),
        tables={"curves": made},
        figures={},
    )
    page = tmp_path / "report.html"
    page.write_text("mine")
    with pytest.raises(GeometryError, match=r"report\.html"):
        whole.save(tmp_path)
    assert page.read_text() == "mine"
    assert whole.save(tmp_path, force=True) == page
    assert "Sums" in page.read_text()
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["written_by"] == "tl-geometry"
    assert set(record["versions"]) >= {"python", "torch", "tl-geometry"}


def test_a_table_has_the_columns_of_its_first_row() -> None:
    """In their order, whatever the order of the others."""
    made = Provenance(corpus="x")
    table = outcome.table_of([{"b": 1, "a": 2}, {"a": 4, "b": 3}], made)
    assert (table.columns(), table.rows(), table.provenance) == (
        ("b", "a"),
        ((1, 2), (3, 4)),
        made,
    )


# --- experiments by name


@pytest.fixture
def module() -> Any:
    """The module of experiments, whose experiments note what they are given."""
    changed: Any = copy_of(experiments)
    changed.asked = []

    def runs(name: str) -> Any:
        def run(setup: Any, **options: Any) -> Any:
            changed.asked.append((name, setup, options))
            save = lambda out, **given: changed.asked.append(("saved", out, given))
            return SimpleNamespace(save=save)

        return run

    setups = {"smoke": TINY, "cpu": TINY.changed({"steps": "7"})}
    changed.MODULES = {
        name: SimpleNamespace(SETUPS=setups, **{name: runs(name)})
        for name in ("randomisation", "addition", "nanogpt")
    }
    return changed


def test_an_experiment_has_the_options_of_the_caller(module: Any, tmp_path: Path) -> None:
    """Changed settings, seeds, texts and the names of at most three files."""
    files = [tmp_path / f"{i}.txt" for i in range(5)]
    for file in files:
        file.write_bytes("\u00e9".encode("latin-1"))
    module.experiment("nanogpt")
    usual = {"seeds": (0,), "out": None, "device": "cpu", "progress": True}
    assert module.asked.pop() == ("nanogpt", TINY.changed({"steps": "7"}), usual)
    for count, names in ((3, "{}, {}, {}"), (5, "{}, {}, {} and 2 more"), (1, "{}")):
        asked: dict[str, Any] = {"scale": "smoke", "seeds": [4, 2], "encoding": "latin-1"}
        asked |= {"device": "meta", "progress": False, "changes": [" clip = 2 ", "layers=3"]}
        module.experiment("randomisation", texts=files[:count], **asked)
        options = {"seeds": (4, 2), "out": None, "device": "meta", "progress": False}
        label = names.format(*(file.name for file in files))
        options |= {"texts": ["\u00e9"] * count, "name": label}
        setup = dataclasses.replace(TINY, clip=2.0, layers=3)
        assert module.asked.pop() == ("randomisation", setup, options)


def test_an_experiment_is_written_to_its_folder(module: Any, tmp_path: Path) -> None:
    """It is marked before the run begins, and a file in the way is refused unless forced."""
    out = tmp_path / "new" / "folder"
    module.experiment("addition", out=out, command=("a", "b"))
    assert module.asked[0][2]["out"] == out
    assert module.asked[1] == ("saved", out, {"command": ("a", "b"), "force": False})
    wanted = {"written_by": "tl-geometry", "experiment": "addition"}
    assert json.loads((out / "run.json").read_text()) == wanted
    module.experiment("addition", out=out)
    with pytest.raises(GeometryError):
        module.experiment("nanogpt", out=out)
    (other := tmp_path / "other").mkdir()
    (other / "report.html").write_text("mine")
    module.asked.clear()
    with pytest.raises(GeometryError, match=r"report\.html"):
        module.experiment("nanogpt", out=other)
    assert module.asked == []
    module.experiment("nanogpt", out=other, force=True)
    assert module.asked[1] == ("saved", other, {"command": (), "force": True})


def test_what_an_experiment_cannot_use_is_refused(module: Any, tmp_path: Path) -> None:
    """Before anything is trained."""
    for name, options, message in (
        ("addition", {"texts": [tmp_path]}, "--text: expected none for addition, which makes its"),
        ("nanogpt", {"seeds": []}, "--seeds: expected at least one, got none"),
        ("nanogpt", {"seeds": [0, -1]}, "--seeds: expected"),
        ("nanogpt", {"changes": ["steps", "clip"]}, "--set: expected NAME=VALUE, got steps, clip"),
        (
            "nanogpt",
            {"scale": "big"},
            "--scale: expected one of 'smoke', 'cpu', 'paper', got 'big'",
        ),
        (
            "gpt",
            {},
            "experiment: expected one of 'randomisation', 'addition', 'nanogpt', got 'gpt'",
        ),
    ):
        with pytest.raises(GeometryError) as refused:
            module.experiment(name, **options)
        assert str(refused.value).startswith(message)
    assert module.asked == []
