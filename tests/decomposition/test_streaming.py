"""The loop over data on live models: sources, windows, checkpoints that survive ``kill -9``, and
what is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, VOCAB, tiny, tokens
from tl_geometry.decomposition import checkpoints
from tl_geometry.decomposition.from_activations import decompose_tensor
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_view import ModelView

MODEL_CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("bridge", "gpt2")


def states_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """All states by TransformerLens's own cache: ``[state context position d_model]``."""
    _, cache = model.run_with_cache(ids)
    n = model.cfg.n_layers
    rows = [cache[f"blocks.{layer}.hook_resid_pre"] for layer in range(n)] + [
        cache[f"blocks.{n - 1}.hook_resid_post"]
    ]
    return torch.stack(rows).detach()


def same(a: PositionContext, b: PositionContext, tolerance: float = 1e-10) -> bool:
    pairs = [
        (a.mean, b.mean),
        (a.pos_seen, b.pos_seen),
        (a.moments.squares.sum(0), b.moments.squares.sum(0)),
    ]
    pairs += [(a.ctx, b.ctx)] if a.ctx is not None and b.ctx is not None else []
    return a.contexts == b.contexts and all(
        bool((x - y).abs().max() <= tolerance * y.abs().max()) for x, y in pairs
    )


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_decompose_equals_the_cached_states(model_class: str, architecture: str) -> None:
    model, ids = tiny(model_class, architecture), tokens(11, 10)
    basis = tlg.decompose(model, ids, batch_size=4, progress=False)
    exact = decompose_tensor(states_of(model, ids)[:, :, 1:])
    assert basis.window == (1, 10)
    assert torch.allclose(basis.pos, exact.pos, atol=1e-5)
    assert torch.allclose(basis.mean, exact.mean, atol=1e-5)
    assert basis.ctx is not None
    assert torch.allclose(basis.ctx, exact.ctx, atol=1e-5)
    assert "position 0 left out" in basis.provenance.line()
    assert "position 0 left out of the statistics" in repr(basis)
    assert (
        basis.pos_at(0) - (states_of(model, ids)[:, :, 0].double().mean(1) - basis.mean)
    ).abs().max() < 1e-5


def test_every_source_gives_the_same_basis(model: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="comes with TransformerLens")
    ids = tokens(10, 8)
    np.save(tmp_path / "ids.npy", ids.numpy())
    whole = tlg.decompose(model, ids, progress=False)
    windows = tlg.TokenWindows(tokens=ids, has_bos=False)
    _, cache = model.run_with_cache(ids)
    sources: dict[str, Any] = {
        "windows": windows,
        "lists": ids.tolist(),
        "iterable of batches": iter(ids.split(3)),
        "iterable of rows": iter(ids),
        "dictionaries": ({"tokens": row.tolist()} for row in ids),
        "memory map": np.load(tmp_path / "ids.npy", mmap_mode="r"),
        "file": str(tmp_path / "ids.npy"),
        "dataset": datasets.Dataset.from_dict({"tokens": ids.tolist()}),
    }
    for name, source in sources.items():
        basis = tlg.decompose(model, source, batch_size=4, progress=False)
        assert same(basis, whole, 1e-6), name
        assert basis.provenance.token_hash == whole.provenance.token_hash, name
    cached = tlg.decompose_activations(cache, window=(1, 8))
    assert same(cached, whole, 1e-6)
    some = tlg.decompose(model, ids, states=[2, 0], progress=False)
    assert torch.allclose(some.pos, whole.pos[[2, 0]], atol=1e-6)


def test_bos_is_recorded_and_a_foreign_basis_is_refused(model: Any) -> None:
    ids = tokens(4, 6)
    with_bos = torch.cat([torch.zeros(4, 1, dtype=torch.int64), ids], 1)
    view = tlg.view(model)
    basis = tlg.decompose(model, with_bos, progress=False)
    assert tlg.decompose(model, ids, progress=False).provenance.has_bos is False
    if view.bos_id == 0:
        assert basis.provenance.has_bos is True
    basis.check_model(view)
    other = tlg.view(tiny("bridge", "llama"))
    with pytest.raises(
        tlg.GeometryError, match="basis: expected the model it was computed from, tiny-gpt2"
    ):
        basis.check_model(other)
    with pytest.raises(tlg.GeometryError, match="tokens: expected has_bos="):
        basis.check_model(view, has_bos=not basis.provenance.has_bos)


def test_a_basis_from_a_cache_belongs_to_the_model_of_the_cache(model: Any) -> None:
    _, cache = model.run_with_cache(tokens(4, 6))
    basis = tlg.decompose_activations(cache)
    basis.check_model(tlg.view(model))
    with pytest.raises(
        tlg.GeometryError, match="basis: expected the model it was computed from, tiny-gpt2"
    ):
        basis.check_model(tlg.view(tiny("bridge", "llama")))
    cache.model = None
    assert tlg.decompose_activations(cache).provenance.fingerprint is None


def test_checkpoint_of_another_run_is_refused_and_kept(model: Any, tmp_path: Path) -> None:
    ids, path = tokens(6, 8), tmp_path / "run.safetensors"
    tlg.decompose(model, ids, checkpoint=path, progress=False)
    before = path.read_bytes()
    with pytest.raises(tlg.GeometryError, match=r"got another: window=\[1, 8\] \(now \[0, 8\]\)"):
        tlg.decompose(model, ids, window=(0, 8), checkpoint=path, progress=False)
    with pytest.raises(tlg.GeometryError, match="expected the tokens it was made from, got others"):
        tlg.decompose(model, tokens(6, 8, seed=9), checkpoint=path, progress=False)
    assert path.read_bytes() == before
    path.write_bytes(before[:-100])
    with pytest.raises(tlg.GeometryError, match="expected a whole file written by tl_geometry"):
        tlg.decompose(model, ids, checkpoint=path, progress=False)
    assert path.read_bytes() == before[:-100]


CHILD = """
import sys, time, torch
import tl_geometry as tlg
from tl_geometry.decomposition import accumulator, stream_pass
from tests.lib.models import tiny, tokens
stream_pass.SAVE_SHARE = 1e9
forward = stream_pass.forward_states
def slow(*args):
    time.sleep(0.02)
    forward(*args)
    print("batch", flush=True)
stream_pass.forward_states = slow
options = {"batch_size": 2, "progress": False, "moments_dtype": torch.float64}
tlg.decompose(tiny("bridge", "gpt2"), tokens(400, 8), checkpoint=sys.argv[1], **options)
"""


@pytest.mark.nightly
def test_kill_9_at_any_moment_loses_nothing(model: Any, tmp_path: Path) -> None:
    ids, path = tokens(400, 8), tmp_path / "run.safetensors"
    whole = tlg.decompose(model, ids, progress=False, moments_dtype=torch.float64)
    environment = {**os.environ, "PYTHONPATH": str(Path(tlg.__file__).parent.parent)}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert child.stdout is not None
    for _ in range(7):
        assert child.stdout.readline() == "batch\n"
    time.sleep(0.013)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert child.returncode == -signal.SIGKILL
    assert 12 <= checkpoints.read(path)[1].contexts < 400
    resumed = tlg.decompose(
        model, ids, checkpoint=path, progress=False, moments_dtype=torch.float64
    )
    assert same(resumed, whole)


ROUGH = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
from tests.decomposition.test_distributed import OPTIONS, ids, toy
import tl_geometry as tlg
from tl_geometry.decomposition import accumulator, stream_pass
stream_pass.SAVE_SHARE = 1e9
path, out = map(Path, sys.argv[1:])
for _ in sys.stdin:
    child = os.fork()
    if not child:
        print(os.getpid(), flush=True)
        view = toy(lambda contexts, state: time.sleep(0.015))
        try:
            tlg.decompose(view, ids(240), checkpoint=path, **OPTIONS).save(out)
        except tlg.GeometryError as error:
            print(error, file=sys.stderr)
            os._exit(3)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""
"""A process that imports once, and at each line it reads starts another, which saves after every
batch: says its number, and how it ended."""


@pytest.mark.nightly
@pytest.mark.parametrize("writers", [1, 2])
def test_twenty_kills_lose_nothing(writers: int, tmp_path: Path) -> None:
    """SIGKILL and SIGINT at random moments, of one process or of two that write the same
    checkpoint."""
    from tests.decomposition.test_distributed import OPTIONS, assert_same, ids, toy

    path, outs = tmp_path / "run.safetensors", [tmp_path / f"basis{i}" for i in range(writers)]
    environment = {**os.environ, "PYTHONPATH": str(Path(tlg.__file__).parent.parent)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    random, done, ends = np.random.default_rng(writers), [0], []
    with ExitStack() as stack:
        parents: list[Any] = [  # with both pipes
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", ROUGH, str(path), str(out)],
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    **pipes,
                )
            )
            for out in outs
        ]
        for turn in range(20 // writers):
            kill = signal.SIGKILL if turn % 2 else signal.SIGINT
            for parent in parents:
                parent.stdin.write("\n")
                parent.stdin.flush()
            children = [int(parent.stdout.readline()) for parent in parents]
            time.sleep(float(random.uniform(0.0, 0.25)))
            for child, parent in zip(children, parents, strict=True):
                with suppress(ProcessLookupError):  # it has finished
                    os.kill(child, kill)
                status = int(parent.stdout.readline())
                # an interrupt in the middle of torch's own code ends as another error (exit 1);
                # the library's own (3: a checkpoint that it refuses) is a failure
                interrupted = kill == signal.SIGINT and os.waitstatus_to_exitcode(status) == 1
                assert status == 0 or os.WTERMSIG(status) == kill or interrupted
                ends.append(status)
            if path.exists():
                done.append(checkpoints.read(path)[1].contexts)  # whole at every moment
    assert sum(map(bool, ends)) >= 10
    assert max(done) > 0
    if writers == 1:
        assert done == sorted(done)  # never behind what it was
    whole = tlg.decompose(toy(), ids(240), **OPTIONS)
    assert_same(tlg.decompose(toy(), ids(240), checkpoint=path, **OPTIONS), whole)
    assert not any(p.suffix == ".part" and p.name.startswith(path.name) for p in tmp_path.iterdir())


def test_windows_are_cut_sampled_and_labelled() -> None:
    class Letters(ModelView):
        """A view that encodes each character as its code."""

        bos_id = 1

        def __init__(self) -> None: ...

        def encode(self, text: str) -> list[int]:
            return [ord(c) for c in text]

        def decode(self, ids: Sequence[int]) -> list[str]:
            return [chr(i) for i in ids]

    from tl_geometry.corpus import texts as source

    letters: Any = Letters()
    original = source.as_view
    source.as_view = lambda model: model  # type: ignore[assignment]
    try:
        found = tlg.windows(
            letters, ["abcdefg", "hijkl", "m"], 4, prepend_bos=True, labels=["x", "y", "x"]
        )
        assert found.tokens.tolist() == [[1, 97, 98, 99], [1, 100, 101, 102], [1, 104, 105, 106]]
        assert found.labels is not None
        assert found.labels.tolist() == [0, 0, 1]
        assert found.names == ("x", "y")
        assert found.str_tokens == ("\x01", "a", "b", "c")
        some = tlg.windows(letters, "abcdefghijkl", 2, n=3, prepend_bos=False, seed=5)
        assert len(set(map(tuple, some.tokens.tolist()))) == 3  # without replacement
        texts = ["abcdefghijklmnopqrst", "uv", "wxyzABC"]
        drawn = tlg.windows(letters, texts, 4, n=2100, prepend_bos=False, replace=True)
        starts, counts = drawn.tokens[:, 0].unique(return_counts=True)
        assert "".join(map(chr, starts.tolist())) == "abcdefghijklmnopqwxyz"  # none across texts
        assert (
            (counts - 100).abs() < 50
        ).all()  # each place as likely as another, so that long texts give more
        assert drawn.labels is not None
        assert torch.bincount(drawn.labels).tolist() == [
            int(counts[:17].sum()),
            0,
            int(counts[17:].sum()),
        ]
        assert all("".join(map(chr, row)) in " ".join(texts) for row in drawn.tokens.tolist())
        for call, text in [
            (
                lambda: tlg.windows(letters, ["ab"], 4, prepend_bos=False),
                "texts: expected a text of at least 4 tokens, got at most 2",
            ),
            (
                lambda: tlg.windows(letters, "abcdefgh", 4, n=3, prepend_bos=False),
                "n: expected 1 to 2 windows, got 3",
            ),
            (
                lambda: tlg.windows(letters, [], 4, prepend_bos=False),
                "texts: expected a string or a list of strings",
            ),
            (
                lambda: tlg.windows(letters, ["abc"], 4, n=3, prepend_bos=False, replace=True),
                "texts: expected a text of at least 4",
            ),
            (
                lambda: tlg.windows(letters, ["abcd"], 4, n=0, prepend_bos=False, replace=True),
                "n: expected a number of windows",
            ),
            (
                lambda: tlg.windows(letters, "abcdefgh", 4, prepend_bos=False, labels=["a", "b"]),
                "labels: expected one for each of 1 texts",
            ),
        ]:
            with pytest.raises(tlg.GeometryError, match=text):
                call()
    finally:
        source.as_view = original


def test_spliced_windows_keep_positions_and_tokens_and_lose_the_context() -> None:
    ids = torch.arange(40)[:, None] * 100 + torch.arange(9)
    spliced = tlg.corpus.splice(tlg.TokenWindows(tokens=ids, has_bos=True), piece=2)
    assert torch.equal(spliced.tokens % 100, ids % 100)  # every token stays in its position
    assert torch.equal(spliced.tokens[:, 0], ids[:, 0])
    assert torch.equal(spliced.tokens.sort(0).values, ids)
    source = spliced.tokens // 100
    assert (source == ids // 100)[:, 1:].float().mean() < 0.2
    pieces = source[:, 1::2]  # each piece comes from a window of its own
    assert (pieces != pieces[:, :1]).any(1).float().mean() > 0.8
    with pytest.raises(tlg.GeometryError, match="piece: expected 1 to 9 tokens, got 10"):
        tlg.corpus.splice(tlg.TokenWindows(tokens=ids, has_bos=False), piece=10)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda m: tlg.decompose(m, [[1, 2, 3], [1, 2]]),
            r"tokens: expected rows of equal length, got lengths \[2, 3\]",
        ),
        (
            lambda m: tlg.decompose(m, iter([tokens(2, 5), tokens(2, 6)]), progress=False),
            "tokens: expected 5 positions, as in the first row, got 6",
        ),
        (
            lambda m: tlg.decompose(m, iter([])),
            "tokens: expected at least one batch, got an empty iterable",
        ),
        (lambda m: tlg.decompose(m, torch.zeros(0, 5, dtype=torch.int64)), "at least one context"),
        (lambda m: tlg.decompose(m, torch.zeros(2, 5)), "tokens: expected integer ids"),
        (
            lambda m: tlg.decompose(m, torch.full((2, 5), VOCAB), progress=False),
            f"tokens: expected ids from 0 to {VOCAB - 1}",
        ),
        (
            lambda m: tlg.decompose(m, tokens(2, 65), progress=False),
            "tokens: expected at most 64 positions",
        ),
        (lambda m: tlg.decompose(m), "tokens: expected tokens to run the model on, got None"),
        (
            lambda m: tlg.decompose(m, tokens(2, 5), states=[3]),
            "states: expected an index from 0 to 2, got 3",
        ),
        (
            lambda m: tlg.decompose(m, tokens(2, 5), labels=[1]),
            r"labels: expected one integer label \(0 or more\) for each of 2 contexts",
        ),
        (lambda m: tlg.decompose(m, "text"), "prepend_bos: expected True or False with text"),
        (lambda m: tlg.decompose(m, "/nowhere/ids.npy"), "tokens: expected an existing .npy file"),
        (
            lambda m: tlg.decompose(torch.nn.Linear(2, 2), tokens(2, 5)),  # type: ignore[arg-type]
            "model: expected HookedTransformer or HookedEncoder or TransformerBridge",
        ),
    ],
)
def test_bad_input_is_refused_with_a_reason(model: Any, call: Any, text: str) -> None:
    with pytest.raises(tlg.GeometryError, match=text):
        call(model)


def test_one_context_and_one_position_are_defined(model: Any) -> None:
    one = tlg.decompose(model, tokens(1, 6), progress=False).anova()
    assert one.identifiable is False
    assert one.shares["ctx"].abs().max() == 0
    single = tlg.decompose(model, tokens(5, 1), progress=False)
    assert single.window == (0, 1)
    assert single.pos.abs().max() < 1e-9


def test_training_mode_is_refused_and_the_users_hooks_stay(model: Any) -> None:
    fired: list[int] = []
    ids = tokens(3, 6)
    model.blocks[0].hook_in.add_hook(lambda value, hook: fired.append(1), is_permanent=True)
    try:
        tlg.decompose(model, ids, progress=False)
        assert fired
        fired.clear()
        model(ids)
        assert fired  # still there afterwards
    finally:
        model.reset_hooks(including_permanent=True)
    model.train()
    try:
        with pytest.raises(
            tlg.GeometryError,
            match=r"expected evaluation mode, got training mode.*Use model\.eval\(\)",
        ):
            tlg.decompose(model, ids, progress=False)
    finally:
        model.eval()
