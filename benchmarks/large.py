"""A model of seven billion parameters on one GPU: what the basis and the sweep of all heads cost
beside the forward pass, in tokens a second and memory.

The weights are random, in bfloat16 and of Llama-2-7B's shape; the arithmetic does not depend on
them. Other sizes run the same on a small Llama.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import tl_geometry as tlg
from benchmarks.harness import Row, grown, paired
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models import from_hf
from tl_geometry.models.model_view import ModelView

LLAMA_2_7B = {"layers": 32, "width": 4096, "heads": 32, "hidden": 11008, "vocab": 32000}
SMALL = {"layers": 4, "width": 512, "heads": 8, "hidden": 1376, "vocab": 4096}
SMOKE = {"layers": 2, "width": 64, "heads": 4, "hidden": 128, "vocab": 256}
SIZES = {
    "smoke": (SMOKE, 4, 32, 2),
    "cpu": (SMALL, 16, 128, 4),
    "gpu": (LLAMA_2_7B, 128, 512, 16),
}
"""Shape, windows, positions, windows of one batch."""


def llama(device: str, *, layers: int, width: int, heads: int, hidden: int, vocab: int) -> Any:
    """A Llama with random weights in bfloat16, made where it stays, as a bridge."""
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=hidden,
        vocab_size=vocab,
    )
    torch.manual_seed(0)
    with torch.device(device):
        weights = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        )
    return from_hf(weights.eval(), None, name="random-llama")


def agreement(view: ModelView, tokens: Tensor, basis: PositionContext) -> None:
    """The positional basis of the last state is that of its activations, in the same batches (those
    of one group of contexts), as products of another size may round otherwise in bfloat16."""
    hook, groups = view.state_hooks[-1], tokens.split(max(1, len(tokens) // 8))
    h = torch.cat([view.activations(ids, [hook])[hook] for ids in groups])[:, 1:].double().cpu()
    pos = h.mean(0) - h.mean((0, 1))
    assert (basis.pos[-1] - pos).abs().max() < 1e-4 * pos.abs().max(), "the routes disagree"


def run(size: str) -> list[Row]:
    """Agreement, then ratios to the forward pass without the output head over the same batches.
    Memory is that of two batches, before anything is timed."""
    shape, windows, length, batch = SIZES[size]
    view = tlg.view(llama("cuda" if size == "gpu" else "cpu", **shape))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, view.d_vocab, (windows, length), generator=generator)
    basis = tlg.decompose(view, tokens[: 2 * batch], second_moments=False, progress=False)
    agreement(view, tokens[: 2 * batch], basis)
    options: dict[str, Any] = {"keep_ctx": False, "keep": 4, "progress": False}
    routes: dict[str, Any] = {
        "decompose, sums alone": lambda stream: tlg.decompose(
            view, stream, second_moments=False, **options
        ),
        "decompose, second moments": lambda stream: tlg.decompose(
            view, stream, second_moments=True, **options
        ),
        "sweep of all heads": lambda stream: tlg.sweep_heads(view, stream, basis, progress=False),
    }
    name = f"large, {sum(p.numel() for p in view._model.parameters()) / 1e9:.1f}B, "
    name += f"{windows} x {length}"
    rows = []
    for route, work in routes.items():
        with grown() as growth:
            work(iter(tokens[: 2 * batch].split(batch)))
        found = paired(
            name, route, view, tokens.split(batch), work, rounds=1 if size == "smoke" else 2
        )
        rows += [_with_rate(row, tokens.numel()) for row in (found[0], growth.on(found[1]))]
    return rows


def _with_rate(row: Row, tokens: int) -> Row:
    rate = f"{tokens / row.seconds:,.0f} tokens a second"
    note = f"{rate}; over two batches {row.note}" if row.note else rate
    return dataclasses.replace(row, note=note)
