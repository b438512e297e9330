"""How a report is made: what it is loaded, checked, named and written with, step by step. The
functions of the library are stand-ins that note their arguments."""

from __future__ import annotations

import importlib.metadata
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.modules import copy_of
from tl_geometry import __version__
from tl_geometry.report import analysis as analysis_module
from tl_geometry.report import build as building
from tl_geometry.report.contents import Request, report_files


def test_settings_are_all_that_the_numbers_depend_on() -> None:
    """The options but sections and planes; model and text by their hashes."""
    request = Request(seed=3, contexts=7, length=9, budget="quick", planes=True)
    view = SimpleNamespace(name="m", fingerprint="f1")
    texts = SimpleNamespace(documents=SimpleNamespace(digest=lambda: "d1"))
    found = copy_of(building).settings(request, view, texts)
    wanted = {"seed": 3, "contexts": 7, "length": 9, "budget": "quick", "model": "m"}
    wanted |= {"fingerprint": "f1", "text": "d1", "version": __version__, "dtype": "float32"}
    assert found.items() >= wanted.items()
    assert not {"corpus", "sections", "planes"} & set(found)
    assert {"encoding", "bos", "processed", "model_class", "device"} <= set(found)


@pytest.mark.parametrize(
    ("resume", "force", "progress"), [(True, False, False), (False, True, True)]
)
def test_a_report_from_request_to_summary(
    tmp_path: Path, capsys: Any, resume: bool, force: bool, progress: bool
) -> None:
    """The folder is locked and checked before the model is loaded; each option is passed on."""
    module: Any = copy_of(building)
    asked: list[Any] = []

    @contextmanager
    def noting(name: str, given: Any) -> Any:
        asked.append((name, given))
        yield
        asked.append(("end", name))

    module.lock = lambda path: noting("lock", path)
    module.threads_for = lambda d_model: noting("threads", d_model)
    module.check_folder = lambda *given, **options: asked.append(("check", given, options))
    view = SimpleNamespace(name="m", d_model=8)
    module.as_view, module.versions = lambda model: view, lambda: {"v": "1"}

    def folder(*given: Any, **options: Any) -> Any:
        asked.append(("folder", given, options))
        return SimpleNamespace(kept=["a.csv", "b.csv"])

    module.Folder = folder
    module.analyse = lambda *given, resume: asked.append((given[1:3], resume)) or "an analysis"
    module.write = lambda analysis, folder: (analysis, folder.kept)
    request = SimpleNamespace(
        names=("overview", "flow"),
        texts=lambda: asked.append("texts") or "the texts",
        load=lambda: asked.append("load") or "the model",
    )
    out, options = tmp_path / "a" / "b", {"resume": resume, "force": force}
    found = module.build(request, out, **options, progress=progress, command=["x"])
    assert found == ("an analysis", ["a.csv", "b.csv"])
    names = {"names": ("overview", "flow"), "command": ["x"], "versions": {"v": "1"}}
    assert asked == [
        ("lock", out / ".tl-geometry.lock"),
        ("check", (out, "report", report_files(("overview", "flow"))), {"force": force}),
        "texts",
        "load",
        ("folder", (out, "m"), options | names),
        ("threads", 8),
        (("the model", "the texts"), resume),
        ("end", "threads"),
        ("end", "lock"),
    ]
    said = capsys.readouterr().err
    kept = "kept, because changed since they were written: a.csv, b.csv"
    assert (kept in said) is progress
    assert ("loading the model: 0/3" in said) is progress


@pytest.mark.parametrize("model", [None, "gpt2"])
def test_an_analysis_has_what_was_asked_for(model: str | None) -> None:
    """Without a name it is the embedded model. The bar says how many windows there are."""
    module: Any = copy_of(building)
    said: list[Any] = []
    view = SimpleNamespace(n_layers=30, d_model=576)
    windows = SimpleNamespace(tokens=torch.zeros(1200, 64), token_hash="t1")
    module.as_view = lambda given: view
    module.choose_sizes = lambda request, view, texts, budget: (windows, ("smaller",))
    module.settings = lambda request, view, texts: {"a": 1}
    module.basis_of = lambda *given, **options: (given, options)
    module.Analysis = lambda **given: given
    bar = SimpleNamespace(
        set_description=said.append, set_postfix_str=said.append, update=lambda: said.append(1)
    )
    folder = SimpleNamespace(begin=said.append)
    request = SimpleNamespace(budget="quick", seed=4, model=model, planes="planes")
    texts = SimpleNamespace(notes=("a note",))
    found = module.analyse(request, "model", texts, folder, bar, resume=True)
    budget = found.pop("budget")
    assert (budget.word, budget.token_seconds) == ("quick", 1.6e-11 * 12 * 30 * 576**2)
    assert found == {
        "model": "model",
        "view": view,
        "windows": windows,
        "basis": ((view, windows, folder), {"seed": 4, "resume": True}),
        "embedded": model is None,
        "seed": 4,
        "notes": ("a note",),
        "smaller": ("smaller",),
        "planes": "planes",
        "bar": bar,
    }
    assert said == [
        "position and context of every state",
        {"a": 1, "tokens": "t1"},
        "1,200 windows of 64 tokens, --budget quick",
        1,
    ]


@pytest.mark.parametrize("embedded", [False, True])
def test_sections_are_written_one_after_the_other(embedded: bool) -> None:
    """Those that the folder holds already are not made again; the page says what was analysed."""
    module: Any = copy_of(analysis_module)
    told: list[Any] = []
    module.make = lambda analysis, name: f"section {name}"
    provenance = SimpleNamespace(corpus="a corpus")
    of = SimpleNamespace(
        view=SimpleNamespace(n_layers=2, n_heads=4),
        basis=SimpleNamespace(contexts=1200, length=64, provenance=provenance),
        notes=("a",),
        smaller=("b",),
        embedded=embedded,
        bar=SimpleNamespace(update=lambda: told.append("update")),
    )
    folder = SimpleNamespace(
        names=("overview", "heads", "flow"),
        parts={"heads": 1},
        describe=lambda *given, **options: told.append((given, options)),
        add=lambda name, section, seconds: told.append((name, section, 0 <= seconds < 60)),
        finish=lambda: {"the": "summary"},
    )
    assert module.write(of, folder) == {"the": "summary"}
    caution = (
        "The embedded model is a small language model of Python source. It demonstrates the "
        "library and is evidence for nothing; its untrained control (same initialisation, no "
        "training) stands beside it."
    )
    lede = "2 blocks of 4 heads; 1,200 windows of 64 tokens of a corpus."
    options = {"notes": ("a", "b"), "lede": lede, "caution": caution if embedded else ""}
    assert told == [
        ((provenance,), options),
        ("overview", "section overview", True),
        "update",
        "update",
        ("flow", "section flow", True),
        "update",
    ]


def test_a_package_without_metadata_has_an_unknown_version(monkeypatch: Any) -> None:
    """As in a checkout that is not installed."""

    def version(name: str) -> str:
        if name == "tl-geometry":
            raise importlib.metadata.PackageNotFoundError
        return f"{name} 1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = analysis_module.versions()
    names = ("transformer-lens", "torch", "transformers", "numpy")
    wanted = {name: f"{name} 1" for name in names} | {"tl-geometry": "unknown"}
    assert found.items() >= wanted.items()
    assert set(found) == {*wanted, "python", "platform"}
