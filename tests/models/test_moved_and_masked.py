"""Models as users have them: moved after they were looked at, with NaN in a weight, with masks of
their own, under hooks that a reader must be told of."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device_calls import calls
from tests.pretend_device import BEGIN, END, GUIDE
from tests.tiny import HAS_HOOKED, hf_model, tokens
from tl_geometry import (
    check_model,
    decompose,
    split_scores,
    sweep_heads,
    token_readout,
    weight_geometry,
)
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.interventions import keep_term, mean_term, remove_term
from tl_geometry.models import from_hf
from tl_geometry.models.forward import require_full_precision

MODEL_CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]
ROWS, IDS = tokens(16, 14, seed=2), tokens(3, 10, seed=9)


def fresh(model_class: str, architecture: str = "gpt2") -> Any:
    return from_hf(hf_model(architecture), None, model_class=model_class, name="mine")


# -------------------------------------------------------------------------------------------------
# moved


def on_the_device(*what: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.pretend_device", *what],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_model_moved_to_another_device_after_a_look() -> None:
    words = ["mixed", "together", "weights", "readout", "edges", "truncated", "removed"]
    assert on_the_device("moved").split() == words


@pytest.mark.slow
@pytest.mark.parametrize("what", ["llama", "gpt2"])
def test_what_takes_a_model_gives_the_same_on_a_device(what: str) -> None:
    """Grouped keys and rotation; learned positions. Each with tokens on the CPU and on the
    device."""
    verdicts = dict(line.split(": ", 1) for line in on_the_device(what).splitlines())
    assert len(verdicts) >= 25
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict != "same"}
    # the twin: its result says where the model is
    assert list(wrong) == ["planted"], wrong


OVER_TWO_DEVICES = (
    *("check_model", "decompose", "split_scores", "split_values", "trajectories"),
    *("sweep_heads", "sweep_heads, intervals", "sweep_heads, all details"),
)
"""What takes a model that is split over two devices. Writers, knockouts and weights do not yet:
they put what several blocks hold into one tensor."""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_a_model_that_is_split_over_two_devices() -> None:
    """``n_devices=2``, each block where HookedTransformer's forward pass sends the stream. A bridge
    asks for CUDA by name to be split."""
    lines = on_the_device("split", *OVER_TWO_DEVICES, "planted").splitlines()
    verdicts = dict(line.split(": ", 1) for line in lines)
    assert [name for name, verdict in verdicts.items() if verdict == "same"] == list(verdicts)[:-1]
    assert set(verdicts) == {*OVER_TWO_DEVICES, "planted"}


MOST_WAITS = {
    "decompose": (1, 0, 0),  # finite or not, samples, means: together
    "sweep_heads": (2, None, 2),  # a layer with its mask, the rounding of its parts
    "sweep_heads, intervals": (2, None, 2),
    "sweep_writers": (1, None, 2),  # a layer with its mask, the sum of its writers
}
"""Waits for each batch (of sweeps, with those of their basis), each layer and each layer of each
batch that are allowed at most."""


@pytest.mark.slow
def test_how_often_streams_wait_for_the_device() -> None:
    """Differences between two and four layers and two and four batches. Every function has a row in
    the guide's table."""
    lines = on_the_device("waits", *MOST_WAITS).splitlines()[2:]
    assert len(lines) == len(MOST_WAITS)
    for line in lines:
        name, *numbers, where = (cell.strip() for cell in line.strip("| ").split(" | "))
        for got, most in zip(numbers, MOST_WAITS[name], strict=True):
            assert most is None or float(got) <= most, (name, numbers, where)
        # the twin: what is counted at all
        assert name == "decompose" or float(numbers[2]) >= 1


def test_every_call_has_a_row_in_the_guide() -> None:
    """``python -m tests.pretend_device`` writes the table."""
    table = GUIDE.read_text().partition(BEGIN)[2].partition(END)[0]
    known = [line.split(" | ")[0].removeprefix("| ") for line in table.strip().splitlines()[2:]]
    assert known == [name for name in calls(61, rotary=True) if name != "planted"]


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_moved_to_another_dtype_after_a_look(model_class: str, dtype: torch.dtype) -> None:
    model = fresh(model_class, "llama" if model_class == "bridge" else "gpt2")
    assert not check_model(model).refused
    basis = decompose(model, ROWS, progress=False)
    model.to(dtype)
    assert not check_model(model).refused
    weight_geometry(model, decompose(model, ROWS, progress=False))
    token_readout(model)
    with pytest.raises(GeometryError, match="the model it was computed from"):
        split_scores(model, IDS, basis, heads="L1H0")


MATMUL = torch.backends.cuda.matmul
TF32: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "precision": (
        lambda: torch.set_float32_matmul_precision("high"),
        lambda: torch.set_float32_matmul_precision("highest"),
    ),
    "switch": (
        lambda: setattr(MATMUL, "allow_tf32", True),
        lambda: setattr(MATMUL, "allow_tf32", False),
    ),
    "newer": (
        lambda: setattr(MATMUL, "fp32_precision", "tf32"),
        lambda: setattr(MATMUL, "fp32_precision", "ieee"),
    ),
}
"""Each of torch's settings: on and off."""


@pytest.mark.parametrize("setting", TF32)
def test_a_model_on_a_gpu_is_refused_where_its_products_are_rounded_to_tf32(setting: str) -> None:
    """Whichever way it was asked for; on a CPU it changes nothing. No GPU is asked."""
    (on, off), gpu = TF32[setting], torch.device("cuda")
    require_full_precision(gpu, "mine")  # the twin
    on()
    try:
        require_full_precision(torch.device("cpu"), "mine")
        with pytest.raises(GeometryError) as error:
            require_full_precision(gpu, "mine")
    finally:
        off()
    assert str(error.value) == (
        "mine: expected float32 products in float32, got TF32, of 11 bits. Use "
        'torch.set_float32_matmul_precision("highest").'
    )


# -------------------------------------------------------------------------------------------------
# NaN


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(
    "kind", ["embedding", "positions", "query", "key", "output", "norm", "last MLP", "unembedding"]
)
def test_a_weight_that_is_no_number_is_named(model_class: str, kind: str) -> None:
    names = {
        "embedding": ("embed.W_E", "wte"),
        "positions": ("W_pos", "wpe"),
        "query": ("1.attn.W_Q", "h.1._original_component.attn.q."),
        "key": ("1.attn.b_K", "h.1._original_component.attn.k."),
        "output": ("1.attn.W_O", "h.1._original_component.attn.o."),
        "norm": ("1.ln2.w", "h.1._original_component.ln_2"),
        "last MLP": ("1.mlp.b_out", "h.1._original_component.mlp._original_component.c_proj"),
        "unembedding": ("W_U", "wte"),
    }[kind]
    model = fresh(model_class)
    assert not check_model(model).refused  # the twin
    named = dict(model.named_parameters())
    name = next(n for n in named if any(part in n for part in names))
    named[name].data[..., -1] = torch.nan
    with pytest.raises(UnsupportedModelError, match="expected numbers, got NaN in ") as error:
        check_model(model)
    assert name in str(error.value)


# -------------------------------------------------------------------------------------------------
# masks


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("change", [remove_term, keep_term, mean_term])
def test_a_saved_mask_value_is_a_mask_to_edits(change: Callable[..., Any]) -> None:
    plain = fresh("hooked")
    old = fresh("hooked")
    for block in old.blocks:
        block.attn.IGNORE = torch.tensor(-1e5)
    found: list[Tensor] = []
    for model in (plain, old):
        basis = decompose(model, ROWS, progress=False)
        with torch.no_grad(), change(model, basis, "pos-cvec", [(0, 1), (1, 0)]) as edit:
            found.append(model(IDS, return_type="logits"))
        assert edit.passes == 1
    assert torch.equal(found[0], found[1])


def masks_padding(model: Any, pad: int, value: float, *, added: bool) -> None:
    """The permanent hooks with which a course masks padding in its own models."""

    def hook(scores: Tensor, hook: Any) -> Tensor:
        hidden = (model.seen_ids == pad)[:, None, None, :]
        hidden = hidden & ~torch.eye(scores.shape[-1], dtype=torch.bool)
        if added:
            return torch.where(hidden, scores + value, scores)
        return scores.masked_fill(hidden, value)

    for name, point in model.hook_dict.items():
        if name.endswith("attn.hook_attn_scores"):
            point.add_hook(hook, is_permanent=True)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(("value", "added"), [(-torch.inf, False), (-1e5, False), (-1e9, True)])
def test_padding_hooks_are_named(model_class: str, value: float, added: bool) -> None:
    model, pad = fresh(model_class), 60
    basis = decompose(model, ROWS.clamp(max=59), progress=False)
    masks_padding(model, pad, value, added=added)
    notes = " ".join(row[1] for row in check_model_with_ids(model).findings if row[0] == "note")
    assert "blocks.0.attn.hook_attn_scores" in notes
    ids = IDS.clamp(max=59)
    model.__dict__["seen_ids"] = ids
    assert split_scores(model, ids, basis, heads="L1H0").provenance.hooks  # nothing is masked
    ids = ids.clone()
    ids[1, 3:5] = pad
    model.__dict__["seen_ids"] = ids
    with pytest.raises(GeometryError, match=r"mask of layer .* under hooks at blocks") as error:
        split_scores(model, ids, basis, heads="L1H0")
    assert "1 of 3 prompts" in str(error.value)
    assert "without padding" in str(error.value)


def check_model_with_ids(model: Any) -> Any:
    model.__dict__["seen_ids"] = torch.zeros(1, 1, dtype=torch.int64)
    return check_model(model)


# -------------------------------------------------------------------------------------------------
# hooks among the flags


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_hooks_that_acted_are_flags(model_class: str) -> None:
    model = fresh(model_class)
    flags = decompose(model, ROWS, progress=False).provenance.flags
    assert not any("hooks" in flag for flag in flags)  # the twin
    name = "blocks.0.hook_resid_post" if model_class == "hooked" else "blocks.0.hook_out"
    with model.hooks(fwd_hooks=[(name, lambda value, hook: value * 1.5)]):
        basis = decompose(model, ROWS, progress=False)
        table = sweep_heads(model, IDS, basis, progress=False)
    for result in (basis, table):
        assert any(f.startswith("under hooks at blocks.0.") for f in result.provenance.flags)
        assert result.provenance.line().count("under hooks at") == 1
