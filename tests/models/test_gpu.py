"""On a GPU, where there is one: what takes a model gives what it gives on the CPU, also in half
precision, in a group of NCCL and from the command line; a longer corpus needs no more memory.

The pretended device (:mod:`tests.pretend_device`) says the same where there is none, and cannot say
what other kernels compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed

import tl_geometry as tlg
from tests.device_calls import CONTEXTS, calls, verdicts
from tests.pretend_device import made
from tests.tiny import HAS_HOOKED, hf_model, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.models import from_hf

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA")
ROWS = tokens(64, 14, seed=2)
QUIET: dict[str, Any] = {"progress": False, "batch_size": 16}


def on_gpu(what: str, dtype: torch.dtype = torch.float32) -> Any:
    """A small model on the GPU."""
    return made(what).to(dtype).to("cuda")


@pytest.mark.parametrize("what", ["llama", "gpt2", *(["split"] if HAS_HOOKED else [])])
def test_what_takes_a_model_gives_the_same_on_a_gpu(what: str) -> None:
    """Grouped keys and rotation, learned positions, and a HookedTransformer of four blocks; with
    tokens on the CPU and on the GPU."""
    place = lambda ids: ids.to("cuda")
    found = dict(verdicts(made(what), on_gpu(what), place, rotary=what == "llama"))
    wrong = {name: verdict for name, verdict in found.items() if verdict != "same"}
    # the twin: its result says where the model is
    assert list(wrong) == ["planted"], wrong


@pytest.mark.parametrize("model_class", ["bridge", *(["hooked"] if HAS_HOOKED else [])])
def test_a_model_stays_on_the_gpu(model_class: str) -> None:
    """Unless another device is asked for."""
    for asked, device in ((None, "cuda"), ("cpu", "cpu")):
        weights = hf_model("gpt2").to("cuda")
        model = from_hf(weights, None, model_class=model_class, name="mine", device=asked)
        assert {p.device.type for p in model.parameters()} == {device}


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Matrix products of float32 in another precision: ``"high"`` is TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def test_products_in_tf32_are_refused() -> None:
    """A model that was seen before, and a new one."""
    view, new = tlg.view(on_gpu("gpt2")), on_gpu("gpt2")
    with products_in("high"):
        for model in (view, new):
            with pytest.raises(GeometryError, match="in float32, got TF32"):
                tlg.decompose(model, ROWS, **QUIET)
    tlg.decompose(view, ROWS, **QUIET)  # the twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_second_moments_are_those_of_the_states(dtype: torch.dtype) -> None:
    """Matrices in half precision are multiplied into float32 there, by a kernel that a CPU has not:
    against float64, from the states of the very model."""
    view = tlg.view(on_gpu("llama", dtype))
    basis = tlg.decompose(view, ROWS, second_moments=True, **QUIET)
    states = view.activations(ROWS, view.state_hooks)
    half = dtype != torch.float32
    for state, hook in enumerate(view.state_hooks):
        h = states[hook][:, 1:].double().cpu()
        far = (basis.pos[state] - (h.mean(0) - h.mean((0, 1)))).abs().max()
        assert far < 1e-5 * h.abs().max()
        centred = (h - h.mean((0, 1))).flatten(0, 1)
        expected = centred.T @ centred
        found = basis.second_moment(state).double().cpu()
        assert (found - expected).abs().max() < (2e-3 if half else 1e-5) * expected.trace()


def peak_bytes(view: Any, rows: Tensor, batch_size: int) -> int:
    """Bytes of the GPU that a decomposition takes at most."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tlg.decompose(view, rows, keep_ctx=False, keep=4, progress=False, batch_size=batch_size)
    return torch.cuda.max_memory_allocated() - before


def test_a_longer_corpus_needs_no_more_memory() -> None:
    """The twin: larger batches do."""
    view = tlg.view(on_gpu("gpt2"))
    peak_bytes(view, ROWS, 16)  # what is made once
    few, many, wide = (
        peak_bytes(view, ROWS, 16),
        peak_bytes(view, ROWS.repeat(8, 1), 16),
        peak_bytes(view, ROWS, 64),
    )
    assert many <= 1.02 * few
    assert wide > 1.5 * few


MODEL = {"transformer_lens", "transformers"}
"""Folders of what runs the model."""
MOST_WAITS_ON_GPU = {
    "decompose": 0,
    "sweep_heads": 2,
    "sweep_writers": 2,
    "sweep_heads, intervals": 8,
}
"""Waits for each layer of each batch that are allowed at most. Intervals copy the bases of their
groups."""


def waits(name: str, layers: int, batches: int) -> int:
    """How often a call waits for the GPU, where torch warns; what the model waits for is left
    out."""
    model = made("llama", num_hidden_layers=layers).to("cuda")
    run = calls(model.cfg.d_vocab, rotary=True, batch=CONTEXTS // batches)[name]
    run(model)  # what is inferred once is inferred
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(model)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    ours = [w for w in caught if not MODEL.intersection(Path(w.filename).parts)]
    return sum("synchroniz" in str(w.message) for w in ours)


@pytest.mark.parametrize("name", MOST_WAITS_ON_GPU)
def test_how_often_streams_wait_for_a_gpu(name: str) -> None:
    """The pretended device counts copies apart; a GPU waits for those of lists and small tensors
    too. The twin: a sweep waits at all."""
    found = {(l, b): waits(name, l, b) for l in (2, 4) for b in (2, 4)}
    each = (found[4, 4] - found[4, 2] - found[2, 4] + found[2, 2]) / 4
    # a copy now and then belongs to no batch
    assert round(each) <= MOST_WAITS_ON_GPU[name], found
    assert name == "decompose" or each >= 1


def test_a_group_of_nccl_gives_the_same(tmp_path: Path) -> None:
    """Of one process, since there may be one GPU."""
    view = tlg.view(on_gpu("gpt2"))
    alone = tlg.decompose(view, ROWS, **QUIET)
    store = f"file://{tmp_path / 'store'}"
    distributed.init_process_group("nccl", init_method=store, rank=0, world_size=1)
    try:
        together = tlg.decompose(view, ROWS, group=distributed.group.WORLD, **QUIET)
    finally:
        distributed.destroy_process_group()
    assert torch.allclose(alone.pos, together.pos, rtol=0, atol=1e-12)
    assert torch.equal(alone.second_moment(1), together.second_moment(1))


def test_the_command_line_fits_on_a_gpu(tmp_path: Path) -> None:
    """The same basis as on the CPU, up to rounding."""
    from typer.testing import CliRunner

    from tl_geometry.cli import app

    np.save(tmp_path / "ids.npy", ROWS.numpy())
    found, held = [], []
    for device in ("cpu", "cuda"):
        torch.cuda.reset_peak_memory_stats()
        out = tmp_path / f"{device}.safetensors"
        words = ["fit", "--corpus", str(tmp_path / "ids.npy"), "--out", str(out)]
        done = CliRunner().invoke(app, [*words, "--device", device, "--quiet"])
        assert done.exit_code == 0, done.output
        found.append(tlg.PositionContext.load(out))
        held.append(torch.cuda.max_memory_allocated())
    assert held[0] < held[1]
    here, there = found
    assert (here.pos - there.pos).abs().max() < 1e-5 * here.pos.abs().max()
