"""The sweep over all heads against the bare forward pass, and against a full cache with nine terms
per head as matrices."""

from __future__ import annotations

from typing import Any

import torch

import tl_geometry as tlg
from benchmarks.decomposition import gpt2
from benchmarks.harness import Row, child, interleave, machine, paired
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.scores.sweep import sweep_heads

SIZES = {"smoke": (2, 64, 32, 8), "cpu": (12, 768, 256, 96), "gpu": (12, 768, 256, 512)}
"""Layers, d_model, length, contexts."""


def made(size: str) -> tuple[Any, torch.Tensor, PositionContext, int]:
    """Model, tokens, basis, and the contexts of one batch."""
    layers, width, length, contexts = SIZES[size]
    model = gpt2(layers, width, length)
    model = model.to("cuda") if size == "gpu" else model
    view = tlg.view(model)
    tokens = torch.randint(
        0, view.d_vocab, (contexts, length), generator=torch.Generator().manual_seed(0)
    )
    basis = tlg.decompose(view, tokens[:8], second_moments=False, progress=False)
    return view, tokens, basis, max(1, (16384 if size == "gpu" else 4096) // length)


def materialised(view: Any, tokens: torch.Tensor, basis: PositionContext) -> torch.Tensor:
    """The plain route: one full cache, then the nine terms of every head of every layer as
    matrices; the covariance shares ``[head term]``."""
    _, cache = view._model.run_with_cache(tokens.to(view.device), return_type=None)
    found = []
    for at in range(view.n_layers):
        layer = view.layer(at, cache, verify=False)
        mean = basis.mean[at].to(layer.h).expand_as(layer.h)
        pos = basis.pos_seen[at, : layer.h.shape[1]].to(layer.h).expand_as(layer.h)
        stream = torch.stack([mean, pos, layer.h - mean - pos])
        q, k = layer.project(stream, "q"), layer.project(stream, "k")
        q[0] += layer.q_constant
        k[0] += layer.k_constant
        pairs = [(a * layer.scale, b) for a in q for b in k]
        terms = torch.stack([torch.einsum("bihe,bjhe->bhij", a, b) for a, b in pairs])
        found.append(covariance_shares(terms, layer.allowed, basis.window[0]).cpu())
    return torch.cat(found)


def covariance_shares(terms: torch.Tensor, allowed: torch.Tensor, drop: int) -> torch.Tensor:
    """Shares ``[head term]`` of terms ``[term batch head query key]``, by their definition."""
    terms, allowed = terms[..., drop:, drop:].double(), allowed[drop:, drop:]
    counts = allowed.sum(-1, keepdim=True).clamp(min=1)
    inside = torch.where(allowed, terms, 0)
    centred = torch.where(allowed, inside - inside.sum(-1, keepdim=True) / counts, 0)
    products = (centred.sum(0) * centred).sum((1, 3, 4))
    return (products / products.sum(0)).mT


def run(size: str) -> list[Row]:
    """Ratios to the forward pass without the output head over the same tokens in the same
    batches."""
    view, tokens, basis, batch = made(size)
    few = tokens[: min(len(tokens), 8)]

    def bare_few() -> None:
        with torch.inference_mode():
            for part in few.split(batch):
                view.run(part, {view.state_hooks[-1]: lambda h: None})

    def with_logits() -> None:
        with torch.inference_mode():
            for part in few.split(batch):
                view._model(part.to(view.device), return_type=None)

    def sweep(rows: torch.Tensor, **options: Any) -> Any:
        return sweep_heads(view, rows, basis, batch_size=batch, progress=False, **options)

    dense, ours = materialised(view, few[:2], basis), sweep(few[:2])
    assert (dense - ours.cs).abs().max() < 1e-3, "the routes disagree"
    name = "sweep " + "x".join(map(str, SIZES[size][:3]))
    rows = paired(
        name,
        f"sweep_heads, {len(tokens)} contexts",
        view,
        tokens.split(batch),
        lambda batches: sweep_heads(view, batches, basis, batch_size=batch, progress=False),
        rounds={"smoke": 1, "cpu": 2, "gpu": 5}[size],
    )
    routes: dict[str, Any] = {
        "forward without the head, 8 contexts": bare_few,
        "return_type=None, 8 contexts": with_logits,
    }
    routes["sweep_heads, 8 contexts"] = lambda: sweep(few)
    routes["planes=True, 8 contexts"] = lambda: sweep(few, planes=True)
    return rows + interleave(name, routes, rounds=2) + against_a_cache(size)


CHILD = """
import sys, time, torch
from benchmarks.harness import grown
from benchmarks.sweep import made, materialised
from tl_geometry.scores.sweep import sweep_heads
torch.set_num_threads(1)
view, tokens, basis, batch = made(sys.argv[1])
few = tokens[:8]
with grown() as used:
    start = time.perf_counter()
    if sys.argv[2] == "sweep":
        sweep_heads(view, few, basis, batch_size=1, progress=False)
    elif sys.argv[2] == "forward":
        for row in few.split(1):
            view.run(row, {view.state_hooks[-1]: lambda h: None})
    else:
        materialised(view, few, basis)
    seconds = time.perf_counter() - start
print(seconds, used.mib)
"""


def against_a_cache(size: str) -> list[Row]:
    """Time and growth of the peak memory of whole processes over 8 contexts on the CPU; ratios are
    to the forward pass."""
    if "cuda" in str(machine()["device"]).lower() or size == "gpu":
        return []
    names = {
        "forward": "forward without the head",
        "sweep": "sweep_heads, one by one",
        "cache": "full cache, nine terms",
    }
    if size == "smoke":
        del names["cache"]
    found = {
        name: [float(v) for v in child(CHILD, size, route).split()] for route, name in names.items()
    }
    base = found["forward without the head"][0]
    title = "sweep, 8 contexts, own process"
    return [
        Row(title, name, seconds, seconds / base, f"peak {mib:.0f} MiB above the start")
        for name, (seconds, mib) in found.items()
    ]
