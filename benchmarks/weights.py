"""Geometry of W_QK and W_OV, and their singular vectors, from factors, against ``torch.linalg.svd``
of every dense matrix.

The baseline is the float32 SVD with vectors of the dense d_model x d_model matrices on the same
threads, measured on the heads of one layer and scaled to all of them (said in the note), dense
matrices given. The geometry starts at the model's float32 weights and includes folding the norm;
the factor SVDs start at folded factors, and folding has its own row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.harness import Row, grown
from tl_geometry.base import linalg
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import HeadWeights
from tl_geometry.weights import bilinear, low_rank_diagonal
from tl_geometry.weights.bilinear import Factors

SIZES = {"smoke": (2, 2, 64, 16, 3), "cpu": (12, 12, 768, 64, 5), "gpu": (12, 12, 768, 64, 5)}
"""Layers, heads, d_model, d_head, rounds."""
K, SHOWN, POSITIONS = 20, 60, 511

Layer = tuple[HeadWeights, NormWeights]


def layers_of(n: int, heads: int, size: int, width: int) -> list[Layer]:
    """Random weights of GPT-2's shape, with random gains."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    zero = torch.zeros(heads, width)
    out = []
    for _ in range(n):
        q, k, v = (draw(heads, size, width) / size**0.5 for _ in range(3))
        w = HeadWeights(
            W_Q=q,
            W_K=k,
            W_V=v,
            W_O=draw(heads, width, size) / width**0.5,
            b_Q=zero,
            b_K=zero,
            b_V=zero,
            b_O=draw(size),
        )
        out.append(
            (w, NormWeights(norm_type="LN", gain=1 + 0.3 * draw(size), bias=draw(size), eps=1e-5))
        )
    return out


def positions(states: int, size: int) -> list[Tensor]:
    """Smooth random positional vectors of each state."""
    g, rows = torch.Generator().manual_seed(1), min(POSITIONS, 4 * size)
    waves = torch.cos(
        torch.arange(1, 40) * torch.pi * (torch.arange(rows) + 0.5)[:, None] / rows
    ) / torch.arange(1, 40)
    return [
        (
            waves @ torch.randn(39, size, generator=g) + 0.01 * torch.randn(rows, size, generator=g)
        ).double()
        for _ in range(states)
    ]


def geometry(
    model: list[Layer], bases: list[Tensor]
) -> list[tuple[dict[str, Tensor], low_rank_diagonal.LowRankDiagonal, Tensor]]:
    """Structure, joint fit and exact null of W_QK and W_OV of every layer."""
    out = []
    for l, (w, norm) in enumerate(model):
        for matrix, right in (("QK", bases[l]), ("OV", bases[l + 1])):
            f = bilinear.fold(w, norm, matrix)
            k = min(K, bases[l].shape[1])
            s = bilinear.structure(f, bases[l], right, k=k)
            fit = low_rank_diagonal.fit_low_rank_diagonal(f, bases[l][:, :k], right[:, :k])
            out.append((s, fit, bilinear.haar_null(f, k, one_basis=matrix == "QK")))
    return out


def folded(model: list[Layer]) -> list[Factors]:
    """Canonical factors of W_QK and W_OV of every layer."""
    return [bilinear.fold(w, norm, matrix) for w, norm in model for matrix in bilinear.MATRICES]


def dense_of(f: Factors) -> Tensor:
    """The dense float32 matrices of a layer."""
    return (f.left @ f.right.mT).float()


def check(model: list[Layer], bases: list[Tensor], svds: list[linalg.SVD]) -> float:
    """Agreement with dense float64 results on the first layer; the largest relative error of a
    singular value is returned."""
    w, norm = model[0]
    f = bilinear.fold(w, norm, "QK")
    dense = f.left @ f.right.mT
    expected = torch.linalg.svdvals(dense)[:, : svds[0].S.shape[-1]]
    error = float((svds[0].S - expected).abs().max() / expected.max())
    assert error < 1e-6, error
    (s, fit, _), V = geometry(model[:1], bases)[0], bases[0][:, : min(K, bases[0].shape[1])]
    W_o = dense - torch.diag_embed(dense.diagonal(dim1=-2, dim2=-1))
    concentration = (V.mT @ W_o @ V).square().sum((-2, -1)) / W_o.square().sum((-2, -1))
    torch.testing.assert_close(s["concentration"], concentration, rtol=1e-8, atol=1e-12)
    residual = dense - V @ fit.L @ V.mT - torch.diag_embed(fit.delta)
    size = float(dense.abs().max())
    assert float(residual.diagonal(dim1=-2, dim2=-1).abs().max()) < 1e-9 * size
    assert float((V.mT @ residual @ V).abs().max()) < 1e-9 * size
    return error


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run(size: str) -> list[Row]:
    """Seconds for all heads, and ratios to dense SVDs of the same matrices (below 0.025 is more
    than 40 times faster)."""
    n, heads, width, d_head, rounds = SIZES[size]
    model, rows = layers_of(n, heads, width, d_head), positions(n + 1, width)
    bases = [bilinear.leading_directions(p, min(SHOWN, width // 2), centered=True)[0] for p in rows]
    factors = folded(model)
    error = check(model, bases, [linalg.product_svd(factors[0].left, factors[0].right)])
    sample = dense_of(bilinear.fold(*model[0], "QK"))
    torch.linalg.svd(sample[:1])  # noqa: TID251 (the textbook route)
    with grown() as used:
        geometry(model, bases)
        for f in factors:
            linalg.product_svd(f.left, f.right)

    routes: dict[str, Callable[[], object]] = {
        "geometry, QK and OV": lambda: geometry(model, bases),
        "factor SVDs, QK and OV": lambda: [linalg.product_svd(f.left, f.right) for f in factors],
        "folding, QK and OV": lambda: folded(model),
        "bases of the states": lambda: [
            bilinear.leading_directions(p, SHOWN, centered=True) for p in rows
        ],
    }
    times: dict[str, list[float]] = {name: [] for name in ("dense", *routes)}
    for _ in range(rounds):
        times["dense"].append(timed(lambda: torch.linalg.svd(sample)) * 2 * n)  # noqa: TID251
        for name, route in routes.items():
            times[name].append(timed(route))
    out = [
        Row(
            "weights",
            "dense float32 SVD, all heads",
            statistics.median(times["dense"]),
            1.0,
            f"{heads} of {2 * n * heads} measured, scaled",
        )
    ]
    for name in routes:
        ratio = statistics.median([t / d for t, d in zip(times[name], times["dense"], strict=True)])
        note = {
            "geometry, QK and OV": f"{used.mib:.0f} MiB above the model",
            "factor SVDs, QK and OV": f"agreement {error:.1e}",
        }.get(name, "")
        out.append(
            Row(
                "weights",
                name,
                statistics.median(times[name]),
                ratio,
                f"{1 / ratio:.0f} times faster. {note}".strip(),
            )
        )
    return out
