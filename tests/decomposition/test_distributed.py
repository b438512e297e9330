"""Scale: several processes against one, memory that runs out, half precision, sources on disk,
models on several devices.

The laws run on processes that are threads here; real ones, started by ``torchrun``, are the slow
tests.
"""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.base.records import encode
from tl_geometry.decomposition import checkpoints, stream_pass
from tl_geometry.decomposition.moments import Moments, Scratch
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.processes import Processes
from tl_geometry.decomposition.stream_pass import time
from tl_geometry.models.model_view import ModelView

ROOT = Path(tlg.__file__).parent.parent
STATES, D, LENGTH, VOCAB = 3, 16, 12, 50


def toy(
    fail: Callable[[int, int], None] = lambda contexts, state: None,
    dtype: torch.dtype = torch.float32,
) -> ModelView:
    """A view of a small function of the tokens with an outlier coordinate; ``fail`` is called
    before each state and may raise."""
    generator = torch.Generator().manual_seed(0)
    embed, position = (
        torch.randn(VOCAB, D, generator=generator),
        torch.randn(LENGTH, D, generator=generator),
    )
    weights = torch.randn(STATES, D, D, generator=generator) / D**0.5
    offset = torch.zeros(D)
    offset[3] = 3000.0

    def run(tokens: Tensor, hooks: Any, **options: Any) -> None:
        h = embed[tokens] + position[: tokens.shape[1]]
        for state in range(STATES):
            fail(len(tokens), state)
            if f"state{state}" in hooks:
                hooks[f"state{state}"]((h + offset).to(dtype))
            h = h + torch.tanh(h @ weights[state]) + h.cumsum(1) / 10

    fields: dict[str, Any] = {
        "name": "toy",
        "class_name": "toy",
        "library": "none",
        "processed": False,
        "bos_id": 7,
        "run": run,
        "_refresh": lambda view: view,
        "in_rows": lambda length: False,
        "require_unchanged": lambda: None,  # it has no weights
    }
    fields |= {"hooked": lambda: (), "decode": lambda found: [f"<{i}>" for i in found]}
    fields |= {
        "fingerprint": "0" * 16,
        "n_layers": STATES - 1,
        "d_model": D,
        "dtype": dtype,
        "device": torch.device("cpu"),
    }
    view = object.__new__(ModelView)  # without the fields that nothing here reads
    view.__dict__.update(fields, state_hooks=tuple(f"state{s}" for s in range(STATES)))
    return view


def ids(contexts: int, seed: int = 0) -> Tensor:
    """Random tokens behind BOS."""
    rows = torch.randint(
        8, VOCAB, (contexts, LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    rows[:, 0] = 7
    return rows


def tensors_of(basis: PositionContext) -> dict[str, Tensor]:
    """Everything of a basis that is stored as a tensor, by its name in the file."""
    tensors: dict[str, Tensor] = {}
    for field in dataclasses.fields(basis):
        encode(getattr(basis, field.name), field.name, tensors)
    return tensors


def assert_same(
    a: PositionContext, b: PositionContext, tolerance: float = 1e-10, *, order: bool = True
) -> None:
    """Everything that two bases hold, to rounding; exactly where nothing is rounded."""
    assert (a.provenance, a.states, a.names) == (b.provenance, b.states, b.names)
    ours, theirs = tensors_of(a), tensors_of(b)
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        found = ours[name]
        if name in ("moments|second", "moments|shift"):
            continue
        if expected.is_floating_point() and not name.startswith("reservoir"):
            assert float((found - expected).abs().max()) <= tolerance * float(
                expected.abs().max()
            ), name
        else:
            assert torch.equal(found, expected), name
    for state in a.states if a.has_second_moments else ():
        trace = float(b.second_moment(state, centered=False).trace())
        assert (
            float((a.second_moment(state) - b.second_moment(state)).abs().max())
            <= tolerance * trace
        ), state


def ungrouped(basis: PositionContext) -> PositionContext:
    """The same basis with all contexts in one group."""
    return dataclasses.replace(
        basis, moments=basis.moments.regrouped(torch.zeros(len(basis.group_counts)).long(), 1)
    )


class Together:
    """What the threads of one run share."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.slots = (
            size,
            threading.Barrier(size, timeout=20),
            [torch.empty(0)] * size,
        )


class Thread(Processes):
    """One of several processes that are threads: sums and copies go through shared slots."""

    def __init__(self, rank: int, together: Together) -> None:
        super().__init__(None)
        self.rank, self.size, self.together, self.device = (
            rank,
            together.size,
            together,
            torch.device("cpu"),
        )

    def _meet(self, tensor: Tensor) -> list[Tensor]:
        self.together.slots[self.rank] = tensor.clone()
        self.together.barrier.wait()
        found = list(self.together.slots)
        self.together.barrier.wait()
        return found

    def total(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._meet(tensor)).sum(0))

    def share(self, tensor: Tensor) -> None:
        tensor.copy_(self._meet(tensor)[0])


def together(size: int, call: Callable[[Thread], Any]) -> list[Any]:
    """Results of ``call`` in as many threads; the first exception is raised here."""
    shared, results, errors = Together(size), [None] * size, []

    def work(rank: int) -> None:
        try:
            results[rank] = call(Thread(rank, shared))
        except Exception as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    if errors:
        raise (real or errors)[0]
    return results


@pytest.fixture(autouse=True)
def _threads_as_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        stream_pass,
        "Processes",
        lambda group: group if isinstance(group, Thread) else Processes(group),
    )


OPTIONS: dict[str, Any] = {"progress": False, "batch_size": 3, "keep": 5, "groups": 4}


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("kind", ["tensor", "iterable", "labels"])
def test_any_number_of_processes_gives_the_basis_of_one(size: int, kind: str) -> None:
    tokens = ids(31)
    labels = torch.arange(31) % 3 if kind == "labels" else None

    def source() -> Any:
        return iter(tokens) if kind == "iterable" else tokens

    whole = tlg.decompose(toy(), source(), labels=labels, **OPTIONS)
    for basis in together(
        size, lambda group: tlg.decompose(toy(), source(), labels=labels, group=group, **OPTIONS)
    ):
        assert_same(
            basis, whole
        )  # with float32 products too: the same shift and the same batches in every process


def test_more_processes_than_batches() -> None:
    whole = tlg.decompose(toy(), ids(4), **OPTIONS)
    for basis in together(4, lambda group: tlg.decompose(toy(), ids(4), group=group, **OPTIONS)):
        assert_same(basis, whole)


def test_each_batch_is_run_by_one_process() -> None:
    seen: list[int] = []
    together(
        3,
        lambda group: tlg.decompose(
            toy(lambda n, s: seen.append(n) if s == 0 else None), ids(31), group=group, **OPTIONS
        ),
    )
    assert sum(seen) == 31


def test_processes_that_disagree_are_refused() -> None:
    def tokens(group: Thread) -> Any:
        return tlg.decompose(toy(), ids(7, seed=int(group.rank == 1)), group=group, **OPTIONS)

    with pytest.raises(
        tlg.GeometryError, match="tokens: expected the same in every process, got another in 1 of 3"
    ):
        together(3, tokens)

    def settings(group: Thread) -> Any:
        options: dict[str, Any] = OPTIONS | {"groups": 2 + group.rank}
        return tlg.decompose(toy(), ids(7), group=group, **options)

    with pytest.raises(
        tlg.GeometryError,
        match="arguments of decompose: expected the same in every process, got another in 1 of 2",
    ):
        together(2, settings)


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(
        tlg.GeometryError, match=r"group: expected an initialised process group.*init_process_group"
    ):
        tlg.decompose(toy(), ids(4), group="all of them", progress=False)


class Killed(Exception):
    pass


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4)])
def test_a_checkpoint_of_some_processes_resumes_with_others(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_pass, "SAVE_SHARE", 1e9)  # every round is saved
    path, tokens = tmp_path / "run.safetensors", ids(40)
    whole = tlg.decompose(toy(), tokens, **OPTIONS)
    counts: dict[int, int] = {}

    def dying(contexts: int, state: int) -> None:
        mine = threading.get_ident()
        counts[mine] = counts.get(mine, 0) + (state == 0)
        if counts[mine] == 3:
            raise Killed

    with pytest.raises(Killed):
        together(
            before,
            lambda group: tlg.decompose(
                toy(dying), tokens, checkpoint=path, group=group, **OPTIONS
            ),
        )
    kept = checkpoints.read(path)[1].contexts
    assert kept == before * 2 * 3
    again: list[int] = []
    view = toy(lambda n, s: again.append(n) if s == 0 else None)
    for basis in together(
        after, lambda group: tlg.decompose(view, tokens, checkpoint=path, group=group, **OPTIONS)
    ):
        assert_same(basis, whole)
    assert sum(again) == 40 - kept
    again.clear()
    for basis in together(
        2, lambda group: tlg.decompose(view, tokens, checkpoint=path, group=group, **OPTIONS)
    ):
        assert_same(basis, whole)
    assert again == []  # a finished checkpoint costs nothing


def test_a_foreign_checkpoint_is_refused_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    tlg.decompose(toy(), ids(6), checkpoint=path, **OPTIONS)
    refused: list[str] = []

    def call(group: Thread) -> None:
        try:
            tlg.decompose(toy(), ids(6), window=(0, 4), checkpoint=path, group=group, **OPTIONS)
        except tlg.GeometryError as error:
            refused.append(str(error))

    together(2, call)
    assert len(refused) == 2
    assert all("expected the run that wrote it, got another: window=" in text for text in refused)


CPU_TEXT = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 99 bytes."
)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(CPU_TEXT), MemoryError()],
    ids=str,
)
@pytest.mark.parametrize("state", [0, 2])
def test_batches_are_halved_when_memory_runs_out(error: Exception, state: int) -> None:
    tokens, sizes = ids(31), []
    options: dict[str, Any] = OPTIONS | {"batch_size": 11, "moments_dtype": torch.float64}
    whole = tlg.decompose(toy(), tokens, **options)

    def fail(contexts: int, at: int) -> None:
        if at == 0:
            sizes.append(contexts)
        if contexts > 3 and at == state:  # the states before have been taken in
            raise error

    assert_same(tlg.decompose(toy(fail), tokens, **options), whole)
    assert sizes[:4] == [11, 5, 2, 2]  # halved until it fits
    assert max(sizes[2:]) <= 3  # and not tried again


def test_running_out_in_the_sums_is_recovered_before_they_change_and_raised_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = ids(20)
    options: dict[str, Any] = OPTIONS | {"batch_size": 8, "moments_dtype": torch.float64}
    whole = tlg.decompose(toy(), tokens, **options)
    get = Scratch.get

    def short(
        self: Scratch, name: str, shape: Any, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if name == "rows" and shape[0] > 3:
            raise torch.OutOfMemoryError("planted")
        return get(self, name, shape, dtype, device)

    monkeypatch.setattr(Scratch, "get", short)
    assert_same(tlg.decompose(toy(), tokens, **options), whole)

    def late(
        self: Scratch, name: str, shape: Any, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if name == "product":  # some products have been added
            raise torch.OutOfMemoryError("planted")
        return get(self, name, shape, dtype, device)

    monkeypatch.setattr(Scratch, "get", late)
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        tlg.decompose(toy(), tokens, **options)


def test_other_errors_and_a_context_too_large_are_raised() -> None:
    def broken(contexts: int, state: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        tlg.decompose(toy(broken), ids(4), **OPTIONS)

    def full(contexts: int, state: int) -> None:
        raise torch.OutOfMemoryError("no")

    with pytest.raises(
        tlg.BudgetError,
        match=r"memory: expected room for one context of 12 positions, got out of memory\. "
        "Use shorter",
    ):
        tlg.decompose(toy(full), ids(4), **OPTIONS)


def test_checkpoints_take_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, saved = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def save(work: Any, path: Path) -> None:
        now[0] += 2.0
        saved.append(work.done)

    monkeypatch.setattr(checkpoints, "save", save)

    def second(contexts: int, state: int) -> None:
        now[0] += 1.0 if state == 0 else 0.0

    tlg.decompose(toy(second), ids(300), checkpoint=tmp_path / "run", **OPTIONS)
    assert saved == [3, 123, 243, 300]  # 2 s of writing to 40 s of batches, and the end


def test_half_precision_products_are_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(64, 40, 6, generator=generator) * torch.tensor([1.0, 0.1, 30.0, 1.0, 5.0, 2.0])
    h = (h + torch.tensor([0.0, 0.0, 3000.0, -4.5, 2.5, -0.3])).to(torch.bfloat16)
    sums = Moments.zeros(states=1, length=40, d_model=6, window=(0, 40), second=True)
    sums.add(0, h, torch.arange(64) % 8)
    sums.count(torch.arange(64) % 8)
    assert sums.counts.tolist() == [8] * 8
    assert sums.shift is not None
    shift = sums.shift[0]

    def relative(centre: Tensor) -> float:
        """Error of products of half-precision differences, as a GPU multiplies them, against the
        trace."""
        rows = (h - centre.to(torch.bfloat16)).double().flatten(0, 1)
        exact = h.double().flatten(0, 1) - centre.double()
        return float((rows.T @ rows - exact.T @ exact).abs().max() / exact.square().sum())

    assert torch.equal(shift, shift.to(torch.bfloat16).float())
    assert (shift[[2, 3]] != 0).all()
    assert (shift[[0, 1, 4, 5]] == 0).all()  # small means are left where they are
    assert relative(shift) < 1e-6
    assert relative(h.double().mean((0, 1)).float()) > 1e-4  # an unrounded shift
    exact = h.double().flatten(0, 1)
    centred = exact - exact.mean(0)
    found = sums.centred_second(0, exact.mean(0))
    assert float((found - centred.T @ centred).abs().max()) < 1e-6 * float(centred.square().sum())


def test_half_precision_models_are_decomposed() -> None:
    full, half = (
        tlg.decompose(toy(), ids(40), **OPTIONS),
        tlg.decompose(toy(dtype=torch.bfloat16), ids(40), **OPTIONS),
    )
    assert half.provenance.dtype == "bfloat16"
    others = [i for i in range(D) if i != 3]  # bfloat16 resolves 3,000 to 16
    assert (half.pos - full.pos)[..., others].abs().max() < 0.02
    assert (half.mean - full.mean)[..., 3].abs().max() < 16


def test_sums_are_made_where_they_live() -> None:
    """Every operand is moved: a tensor left on another device than ``meta`` would raise."""
    sums = Moments.zeros(
        states=1,
        length=LENGTH,
        d_model=D,
        window=(1, LENGTH),
        groups=4,
        second=True,
        device="meta",
    )
    mean, finite = sums.add(0, torch.randn(3, LENGTH, D), torch.arange(3))
    assert (mean.device.type, finite.device.type) == ("meta", "meta")
    with pytest.raises(RuntimeError, match="meta"):
        torch.addmm(
            sums.sums[0, 0], torch.zeros(LENGTH, LENGTH), torch.zeros(LENGTH, D)
        )  # which is what would happen


def test_buffers_are_reused_and_grow() -> None:
    scratch, cpu = Scratch(), torch.device("cpu")
    first = scratch.get("a", (4, 5), torch.float64, cpu)
    assert scratch.get("a", (2, 5), torch.float64, cpu).data_ptr() == first.data_ptr()
    assert scratch.get("a", (5, 5), torch.float64, cpu).shape == (5, 5)
    assert scratch.get("a", (5, 5), torch.float32, cpu).dtype == torch.float32
    assert len(scratch.held) == 1


def test_no_gradients_no_history_and_no_inference_tensors_remain() -> None:
    seen: list[bool] = []
    basis = tlg.decompose(
        toy(lambda n, s: seen.append(torch.is_inference_mode_enabled())), ids(6), **OPTIONS
    )
    assert all(seen)
    for name, tensor in tensors_of(basis).items():
        assert not tensor.is_inference(), name
        assert not tensor.requires_grad, name


def test_only_the_blocks_that_are_needed_run_and_never_the_output_head() -> None:
    from tests.tiny import tiny

    model, ran = tiny("bridge", "gpt2"), []
    original = model.original_model
    watched = {
        "block 0": original.transformer.h[0].mlp,
        "block 1": original.transformer.h[1].mlp,
        "head": original.lm_head,
    }
    handles = [
        m.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, m in watched.items()
    ]
    try:
        tlg.decompose(model, ids(4), states=[0, 1], **OPTIONS)
        assert ran == ["block 0", "block 0"]
        ran.clear()
        tlg.decompose(model, ids(3), **OPTIONS)
        assert ran == ["block 0", "block 1"]
        ran.clear()
        model(ids(3), return_type="logits")
        assert ran == ["block 0", "block 1", "head"]  # what would run
    finally:
        for handle in handles:
            handle.remove()


def test_token_files_and_streams_are_sources(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="comes with TransformerLens")
    tokens = ids(10)
    whole = tlg.decompose(toy(), tokens, **OPTIONS)
    flat = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="w+", shape=(10 * LENGTH,))
    flat[:] = tokens.numpy().astype(np.uint16).ravel()
    flat.flush()
    np.save(tmp_path / "ids.npy", tokens.numpy().astype(np.uint16))
    read = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    rows = [{"tokens": row} for row in tokens.tolist()]
    sources: dict[
        str, Callable[[], Any]
    ] = {  # each rank makes its own: a stream is not shared between threads
        "flat file": lambda: read.reshape(-1, LENGTH),
        "npy": lambda: tmp_path / "ids.npy",
        "dataset": lambda: datasets.Dataset.from_list(rows),
        "torch dataset": lambda: datasets.Dataset.from_list(rows).with_format("torch"),
        "stream": lambda: datasets.Dataset.from_list(rows).to_iterable_dataset(),
        "torch stream": lambda: (
            datasets.Dataset.from_list(rows).to_iterable_dataset().with_format("torch")
        ),
    }

    def decomposed(source: Callable[[], Any], group: Any) -> PositionContext:
        return tlg.decompose(toy(), source(), group=group, **OPTIONS)

    for name, source in sources.items():
        for group in (None, *([2] if name == "stream" else [])):
            found = (
                tlg.decompose(toy(), source(), **OPTIONS)
                if group is None
                else together(group, partial(decomposed, source))[1]
            )
            assert found.provenance.token_hash == whole.provenance.token_hash, name
            same = dataclasses.replace(found, provenance=whole.provenance)
            if (
                "stream" in name
            ):  # their length is not known, so that groups are blocks: 10 contexts in 5 pairs
                assert found.group_counts.tolist() == [2] * 5
                assert_same(ungrouped(same), ungrouped(whole))
            else:
                assert_same(same, whole)
    with pytest.raises(
        tlg.GeometryError,
        match=r"got memmap of shape \(120,\).*\.reshape\(-1, length\) of a flat file",
    ):
        tlg.decompose(toy(), read, **OPTIONS)


PROGRAM = """
import os, sys, torch
from tests.decomposition.test_distributed import OPTIONS, ids, toy
import tl_geometry as tlg
from tl_geometry.decomposition import stream_pass
stream_pass.SAVE_SHARE = 1e9
torch.set_num_threads(1)
folder = sys.argv[1]
torch.distributed.init_process_group("gloo")
group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
basis = tlg.decompose(toy(), ids(31), group=group, **OPTIONS)
basis.save(f"{folder}/{rank}.safetensors")
if sys.argv[2] == "die":
    left = [3]
    def fail(contexts, state):
        left[0] -= state == 0
        if left[0] == 0 and rank == 1:
            os._exit(9)
    checkpoint = f"{folder}/run.safetensors"
    tlg.decompose(toy(fail), ids(31), checkpoint=checkpoint, group=group, **OPTIONS)
else:
    basis = tlg.decompose(toy(), ids(31), checkpoint=sys.argv[2], group=group, **OPTIONS)
    basis.save(f"{folder}/resumed{rank}.safetensors")
torch.distributed.destroy_process_group()
"""


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Start several processes as a user would."""
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={processes}",
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(
        [*start, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.slow
def test_torchrun_two_and_four_processes_and_one_that_dies(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    whole = tlg.decompose(toy(), ids(31), **OPTIONS)
    (tmp_path / "two").mkdir()
    (tmp_path / "four").mkdir()
    two = torchrun(2, str(program), str(tmp_path / "two"), "die")
    assert two.returncode != 0
    assert "exitcode  : 9" in two.stderr
    for rank in range(2):
        assert_same(PositionContext.load(tmp_path / "two" / f"{rank}.safetensors"), whole)
    checkpoint = tmp_path / "two" / "run.safetensors"
    done = checkpoints.read(checkpoint)[1].contexts
    assert done == 12  # two rounds of two batches of three
    (tmp_path / "one.safetensors").write_bytes(checkpoint.read_bytes())
    assert_same(
        tlg.decompose(toy(), ids(31), checkpoint=tmp_path / "one.safetensors", **OPTIONS), whole
    )
    four = torchrun(4, str(program), str(tmp_path / "four"), str(checkpoint))
    assert four.returncode == 0, four.stderr
    for rank in range(4):
        assert_same(PositionContext.load(tmp_path / "four" / f"{rank}.safetensors"), whole)
        assert_same(PositionContext.load(tmp_path / "four" / f"resumed{rank}.safetensors"), whole)


@pytest.mark.slow
def test_fit_on_the_command_line_equals_decompose(tmp_path: Path) -> None:
    from tl_geometry import zoo

    text = tmp_path / "text.txt"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(400)))
    options = [
        "--corpus",
        str(text),
        "--length",
        "32",
        "--out",
        str(tmp_path / "basis.safetensors"),
        "--batch-size",
        "16",
        "--quiet",
    ]
    done = torchrun(2, "-m", "tl_geometry", "fit", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("basis.safetensors") == 1  # one process speaks
    basis = PositionContext.load(tmp_path / "basis.safetensors")
    model = zoo.embedded()
    tokens = tlg.windows(
        model, text.read_text(), 32, prepend_bos=True, labels=["text.txt"], corpus="text.txt"
    )
    torch.set_num_threads(1)
    whole = tlg.decompose(model, tokens, batch_size=16, progress=False)
    assert basis.contexts == len(tokens) > 64
    assert math.isclose(float(basis.mean.norm()), float(whole.mean.norm()), rel_tol=1e-10)
    assert_same(basis, whole)
    assert not list(tmp_path.glob("*checkpoint*"))


def test_fit_takes_a_token_file(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from tl_geometry import zoo
    from tl_geometry.cli import app

    np.save(tmp_path / "ids.npy", ids(9).numpy())
    out = tmp_path / "basis.safetensors"
    done = CliRunner().invoke(
        app,
        [
            "fit",
            "--corpus",
            str(tmp_path / "ids.npy"),
            "--contexts",
            "6",
            "--out",
            str(out),
            "--quiet",
            "--json",
        ],
    )
    assert done.exit_code == 0, done.output
    found, expected = (
        PositionContext.load(out),
        tlg.decompose(zoo.embedded(), ids(9)[:6], progress=False),
    )
    assert_same(dataclasses.replace(found, provenance=expected.provenance), expected)
    assert '"contexts": 6' in done.output
