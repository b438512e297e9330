"""Pilot-token trajectories against one filtered-cache forward pass per chunk, and exact simulation
of the stochastic flow.

The baseline is the published way: ``run_with_cache`` on every chunk alone, hooks on the block
outputs only, no logits. Ours reads the followed position in one pass per batch. The flow is sampled
exactly, float32 at every layer and float64 at chosen layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Row, interleave
from tl_geometry.flow import LangevinModel, trajectories
from tl_geometry.models.reader import as_view

SIZES = {
    "smoke": (16, 2, 200, 32, 4),
    "cpu": (256, 3, 10_000, 1024, 24),
    "gpu": (2048, 3, 10_000, 1024, 24),
}
"""Chunks, rounds; paths, d_model and layers of the flow."""
LENGTH = 50


def one_by_one(model: Any, tokens: Tensor, layers: int) -> Tensor:
    """States of the last token, a cache per chunk."""
    names = {f"blocks.{l}.hook_resid_post" for l in range(layers)}
    found = []
    with torch.inference_mode():
        for row in tokens:
            _, cache = model.run_with_cache(
                row[None], names_filter=lambda name: name in names, return_type=None
            )
            found.append(
                torch.stack([cache[f"blocks.{l}.hook_resid_post"][0, -1] for l in range(layers)])
            )
    return torch.stack(found)


def extraction(size: str) -> list[Row]:
    """Both routes at the embedded model's size."""
    from tl_geometry import zoo

    chunks, rounds, *_ = SIZES[size]
    device = "cuda" if size == "gpu" and torch.cuda.is_available() else "cpu"
    model = zoo.embedded().to(device)
    view = as_view(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, view.d_vocab, (chunks, LENGTH), generator=generator).to(device)
    ours = trajectories(view, tokens, progress=False).X
    error = float(
        (ours - one_by_one(model, tokens, view.n_layers).cpu()).abs().max() / ours.abs().max()
    )
    assert error < 1e-4, error
    routes = {
        "one cache per chunk": lambda: one_by_one(model, tokens, view.n_layers),
        "trajectories": lambda: trajectories(view, tokens, progress=False),
    }
    note = (
        f"{chunks} chunks of {LENGTH}, {view.n_layers} layers, d {view.d_model}; states "
        f"agree to {error:.0e}"
    )
    return interleave("trajectories", routes, rounds=rounds, notes={"trajectories": note})


def flow(layers: int, size: int) -> LangevinModel:
    """A flow with random rotations and stretches."""
    generator = torch.Generator().manual_seed(0)
    U = torch.stack(
        [
            torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
            for _ in range(layers)
        ]
    )
    S = torch.rand(layers, size, generator=generator, dtype=torch.float64) + 0.5
    times = torch.arange(1, layers + 1).double()
    return LangevinModel(U=U, S=S, times=times, alpha=0.64, rate=0.18)


def simulation(size: str) -> list[Row]:
    """Exact paths; agreement with the closed-form mean first."""
    _, rounds, paths, d, layers = SIZES[size]
    model = flow(layers, d)
    x = (
        torch.randn(1, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        .expand(paths, d)
        .contiguous()
    )
    last = float(layers)
    rows = model.simulate(x, [last])[0, :, 0]
    mean, covariance = model.moments(x[0], torch.zeros(d, d).double(), 1.0, last)
    spread = covariance.diagonal().sqrt()
    error = float(((rows.mean(0) - mean).abs() / spread).max() * paths**0.5)
    assert error < 6, error
    every, chosen = (
        list(range(1, layers + 1)),
        [t for t in (12, 14, 16, 18, 20, 24) if t <= layers] or [layers],
    )
    routes = {
        f"float32, all {layers} layers": lambda: model.simulate(x, every, dtype=torch.float32),
        f"float64, {len(chosen)} layers": lambda: model.simulate(x, chosen),
    }
    note = f"{paths} paths, d {d}; mean within {error:.1f} standard errors of the closed form"
    return interleave("langevin", routes, rounds=rounds, notes=dict.fromkeys(routes, note))


def run(size: str) -> list[Row]:
    """Rows of both benchmarks."""
    return extraction(size) + simulation(size)
