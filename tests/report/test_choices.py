"""The sizes that a budget allows, the windows of a report, and what a stopped run leaves to the
next."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.modules import copy_of
from tests.reports import model_directory, request
from tests.tiny import tiny, tokens
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.report import budget as budget_module
from tl_geometry.report import build as building
from tl_geometry.report.budget import PARTS, Budget
from tl_geometry.report.folder import Folder

SMOLLM2 = {
    "position and context": (128, 441),
    "the null of spliced windows": (128, 180),
    "the sweep over all heads": (128, 67),
    "rotary planes": (128, 33),
    "the model with dominant terms only": (48, 4),
    "surrogates of W_QK in the live model": (48, 15),
    "surrogates of W_QK at every offset": (16, 7),
    "trajectories": (50, 47),
    "truncated states": (50, 9),
    "skipped layers": (50, 21),
}
"""Part -> tokens of a window, and windows of them in a default report of SmolLM2-135M."""


def test_the_sizes_of_a_default_report_of_smollm2_cost_at_most_nine_minutes() -> None:
    """Its sizes, and what they cost: 1.9 ms for a pass over a token."""
    budget = Budget(n_layers=30, d_model=576)
    assert budget.word == "default"
    assert budget.token_seconds == pytest.approx(1.9e-3, rel=0.01)
    sizes = {part: (n, budget.windows(part, n, 10**6)) for part, (n, _) in SMOLLM2.items()}
    assert sizes == SMOLLM2
    assert set(PARTS) == set(SMOLLM2)
    spent = {p: PARTS[p][1] * n * count * 1.911e-3 for p, (n, count) in SMOLLM2.items()}
    # SmolLM2 is rotary, and has a W_QK at every offset
    del spent["surrogates of W_QK in the live model"]
    assert 0.7 * 540 < sum(spent.values()) < 540
    quick, full = (Budget(word, n_layers=30, d_model=576) for word in ("quick", "full"))
    assert quick.windows("position and context", 128, 10**6) == 98
    assert full.windows("position and context", 128, 10**6) == 10**6
    assert Budget().windows("position and context", 128, 10**6) == 10**6


def test_the_least_size_may_cost_twice_the_share_of_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(budget_module.PARTS, "a part", (0.25, 2.0))
    budget = Budget("quick", n_layers=1, d_model=1)
    budget.token_seconds = 0.75
    given = ((20, 1), (21, 1), (10**6, 20), (10**6, 21), (10**6, 40), (30, 50), (10**6, 41))
    counts = [budget.windows("a part", 1, most, least) for most, least in given]
    assert counts == [20, 20, 20, 21, 40, 0, 0]
    assert budget.windows("a part", 2, 10**6) == 10
    assert [budget.windows("a part", 40, 5), budget.windows("a part", 41, 5)] == [1, 0]
    assert budget.windows("a part", 20, 30, 1) == 1


class Fits(Budget):
    """A budget that allows so many windows of each length."""

    def __init__(self, **counts: int) -> None:
        super().__init__("quick")
        self.counts = counts

    def windows(self, part: str, length: int, most: int, least: int = 1) -> int:
        assert part == "position and context"
        return min(most, self.counts.get(f"of_{length}", 10**6))


def asked(there: int, **options: Any) -> SimpleNamespace:
    """A request for windows of a corpus that holds ``there`` windows of any length."""

    def windows(view: Any, texts: Any, length: int, *, most: int) -> TokenWindows:
        assert (view.name, texts) == ("view", "texts")
        count = min(there, given["contexts"] or most)
        return TokenWindows(tokens=torch.zeros(count, length, dtype=torch.int64), has_bos=False)

    given = {"length": None, "contexts": None, "budget": "quick", **options}
    return SimpleNamespace(windows=windows, **given)


FEW = Fits(of_512=10, of_256=10, of_128=10)
SHORTER = "windows of {} tokens in place of 512 (--budget quick)"


@pytest.mark.parametrize(
    ("there", "options", "states", "n_ctx", "budget", "shape", "smaller"),
    [
        (2000, {}, 3, 1024, Fits(), (1024, 512), []),
        (2000, {}, 3, 1024, Fits(of_512=256), (256, 512), ["256 of 1024 windows (--budget quick)"]),
        (
            2000,
            {},
            3,
            1024,
            Fits(of_512=255, of_256=400),
            (400, 256),
            [SHORTER.format(256), "400 of 1024 windows (--budget quick)"],
        ),
        (
            2000,
            {},
            3,
            1024,
            FEW,
            (32, 128),
            [SHORTER.format(128), "32 of 1024 windows (--budget quick)"],
        ),
        (20, {}, 3, 1024, FEW, (20, 128), [SHORTER.format(128)]),
        (10, {}, 3, 1024, FEW, (10, 512), []),
        (2000, {"length": 512}, 3, 1024, FEW, (32, 512), ["32 of 1024 windows (--budget quick)"]),
        (2000, {"contexts": 50}, 3, 1024, FEW, (50, 512), []),
        (2000, {}, 100, 1024, Fits(), (1024, 512), []),
        (2000, {}, 101, 1024, Fits(), (1024, 256), [SHORTER.format(256)]),
        (2000, {}, 3, 200, Fits(of_200=90), (90, 200), ["90 of 1024 windows (--budget quick)"]),
    ],
)
def test_windows_are_halved_until_enough_fit(
    there: int,
    options: dict[str, int],
    states: int,
    n_ctx: int,
    budget: Fits,
    shape: tuple[int, int],
    smaller: list[str],
) -> None:
    """Of 100 states 128 wide, the sums of eight groups at 512 positions take 400 MiB."""
    view = SimpleNamespace(name="view", n_ctx=n_ctx, d_model=128, state_hooks=["hook"] * states)
    choose = copy_of(building).choose_sizes
    windows, said = choose(asked(there, **options), view, "texts", budget)
    assert windows.tokens.shape == shape
    assert said == tuple(smaller)


def test_states_of_at_most_32_contexts_are_kept_in_256_mib() -> None:
    kept = copy_of(building).kept_samples
    for states, d_model, length, count in (
        (5, 128, 128, 32),
        (31, 576, 128, 29),
        (32, 4096, 512, 4),
        (16, 1024, 512, 8),
    ):
        view = SimpleNamespace(d_model=d_model, state_hooks=["hook"] * states)
        assert kept(view, length) == count


def test_the_basis_of_a_stopped_run_is_loaded_where_it_is_the_same(tmp_path: Path) -> None:
    module, made = copy_of(building), []

    def decompose(view: Any, windows: TokenWindows, **options: Any) -> tlg.PositionContext:
        made.append(options)
        return tlg.decompose(view, windows, **options)

    module.decompose = decompose
    views = {name: tlg.view(tiny("bridge", name)) for name in ("gpt2", "llama")}
    windows = [
        TokenWindows(tokens=tokens(batch=12, length=8, seed=seed), has_bos=False) for seed in (0, 1)
    ]

    def basis(name: str, number: int, seed: int, *, resume: bool) -> tlg.PositionContext:
        folder = Folder(tmp_path, "m", names=("overview",), resume=True)
        return module.basis_of(views[name], windows[number], folder, seed=seed, resume=resume)

    for name, number, seed, resume, again in (
        ("gpt2", 0, 3, True, True),
        ("gpt2", 0, 3, True, False),
        ("gpt2", 0, 3, False, True),
        ("gpt2", 0, 4, True, True),
        ("gpt2", 1, 4, True, True),
        ("llama", 1, 4, True, True),
        ("llama", 1, 4, True, False),
    ):
        made.clear()
        found = basis(name, number, seed, resume=resume)
        assert bool(made) == again
        assert found.provenance.fingerprint == views[name].fingerprint
        assert found.provenance.token_hash == windows[number].token_hash
        assert found.provenance.seed in (None, seed)
        for options in made:
            checkpoint = options.pop("checkpoint")
            assert checkpoint == tmp_path / "checkpoint.safetensors"
            assert options == {"progress": False, "seed": seed, "groups": 8, "keep": 32}


def test_a_report_shows_its_progress_and_has_all_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, seen = model_directory(tmp_path / "small", "gpt2"), []
    write = building.write
    monkeypatch.setattr(
        building, "write", lambda analysis, folder: seen.append(analysis) or write(analysis, folder)
    )
    of = request(directory, sections=("overview",), seed=3, planes=True, budget="quick")
    for progress in (True, False):
        out = tmp_path / f"out {progress}"
        earlier = Folder(out, "m", names=("overview", "flow"))
        earlier.files.write("flow.csv", lambda part: part.write_text("a"), lambda: None)
        earlier.write()
        (out / "flow.csv").write_text("changed")
        building.build(of, out, progress=progress)
        printed, shown = capsys.readouterr()
        assert printed == "", "a command prints its JSON there"
        said = (
            "loading the model: 0/2 (",
            "position and context of every state: 0/2 (",
            "40 windows of 16 tokens, --budget quick",
            "What was analysed: 1/2 (",
            "What was analysed: 2/2 (",
            "kept, because changed since they were written: flow.csv\n",
        )
        assert [text in shown for text in said] == [progress] * len(said), shown
        analysis = seen.pop()
        assert analysis.seed == 3
        assert analysis.planes
        assert not analysis.embedded
        assert analysis.budget.word == "quick"
        assert (
            analysis.budget.token_seconds == Budget("quick", n_layers=2, d_model=32).token_seconds
        )
        assert analysis.basis.provenance.seed == 3
        assert analysis.windows.token_hash == analysis.basis.provenance.token_hash
