"""Scale: processes of ``torchrun`` against one, half precision, the command line, and nothing that
is not needed."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.base.records import encode
from tl_geometry.decomposition import checkpoints
from tl_geometry.decomposition.position_context import PositionContext
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


OPTIONS: dict[str, Any] = {"progress": False, "batch_size": 3, "keep": 5, "groups": 4}


def test_a_group_needs_torch_distributed() -> None:
    with pytest.raises(
        tlg.GeometryError, match=r"group: expected an initialised process group.*init_process_group"
    ):
        tlg.decompose(toy(), ids(4), group="all of them", progress=False)


def test_half_precision_models_are_decomposed() -> None:
    full, half = (
        tlg.decompose(toy(), ids(40), **OPTIONS),
        tlg.decompose(toy(dtype=torch.bfloat16), ids(40), **OPTIONS),
    )
    assert half.provenance.dtype == "bfloat16"
    others = [i for i in range(D) if i != 3]  # bfloat16 resolves 3,000 to 16
    assert (half.pos - full.pos)[..., others].abs().max() < 0.02
    assert (half.mean - full.mean)[..., 3].abs().max() < 16


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
    from tests.lib.models import tiny

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


@pytest.mark.nightly
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


@pytest.mark.nightly
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
