"""The report on a positional basis against the straightforward numpy computation, one basis and one
matrix at a time.

The plain route computes the measures of the report one by one: an SVD of each positional basis and
of each subset of contexts that errors and curve need, its two-dimensional DCT, extended
differences, and ScreeNOT by its reference implementation where that is installed. Nulls are left
out of both.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from scipy.fft import dctn

import tl_geometry as tlg
from benchmarks.harness import Row, interleave
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.resampling import subsets
from tl_geometry.measures.positional import usable_k

SIZES = {"smoke": (2, 16, 24, 32, 1), "cpu": (5, 64, 256, 768, 1), "gpu": (13, 64, 512, 768, 1)}
"""States, contexts, columns, d_model, rounds."""


def basis_of(states: int, contexts: int, columns: int, width: int) -> PositionContext:
    """A basis of random states around a smooth curve."""
    generator = torch.Generator().manual_seed(0)
    t = (torch.arange(columns) + 0.5) / columns
    waves = torch.cos(torch.arange(1, 9) * torch.pi * t[:, None])
    h = torch.randn(states, contexts, columns, width, generator=generator)
    return tlg.decompose_activations(
        h + waves @ torch.randn(states, 1, 8, width, generator=generator), window=(1, columns)
    )


def screenot() -> Any:
    """The published rank estimate, where its package is installed."""
    try:
        return importlib.import_module("screenot.ScreeNOT").adaptiveHardThresholding
    except ImportError:
        return None


def plain(P: np.ndarray, sizes: tuple[float, float], k: int, estimate: Any) -> dict[str, float]:
    """Measures of one positional basis."""
    s = np.linalg.svd(P, compute_uv=False)
    positions = len(P)
    rank = estimate(P, k)[2] if estimate is not None else (s > np.median(s)).sum()
    unit = P / np.linalg.norm(P, axis=1, keepdims=True)
    spectrum = np.asarray(dctn(unit @ unit.T, norm="ortho"))
    extended = np.concatenate([P, P[::-1]])
    gram = extended @ extended.T
    differences = [gram]
    for _ in range(2):
        last = differences[-1]
        differences.append(
            last - np.roll(last, 1, 0) - np.roll(last, 1, 1) + np.roll(np.roll(last, 1, 0), 1, 1)
        )
    return {
        "stable_rank": float((s**2).sum() / s[0] ** 2),
        "explained": float(s[: int(rank)].sum() / s.sum()),
        "relative_norm": s[0] / sizes[0],
        "relative_norm_reference": s[0] / sizes[1],
        "low_frequency": float(np.trace(spectrum[:10, :10]) / np.trace(spectrum)),
        "off_diagonal": float(1 - (np.diag(spectrum) ** 2).sum() / (spectrum**2).sum()),
        "smoothness": positions**2 * float(np.abs(differences[1]).max() / np.abs(gram).max()),
        "smoothness_2": positions**4 * float(np.abs(differences[2]).max() / np.abs(gram).max()),
    }


def straightforward(basis: PositionContext) -> list[dict[str, float]]:
    """Measures of every state; those of the subsets behind errors and curve are computed too."""
    estimate, found = screenot(), []
    sums, counts = basis.moments.sums.numpy(), basis.group_counts.numpy()
    members = subsets(basis).member.numpy()[1:]
    inside, k = slice(*basis.window), usable_k(20, min(basis.pos.shape[1:]))
    for row, state in enumerate(basis.states):
        sizes = [
            float(
                np.linalg.eigvalsh(basis.second_moment(state, centered=centred).numpy())[-1]
                / basis.contexts
            )
            ** 0.5
            for centred in (True, False)
        ]
        found.append(plain(basis.pos[row].numpy(), (sizes[0], sizes[1]), k, estimate))
        for member in members:
            means = sums[member, row, inside].sum(0) / counts[member].sum()
            plain(means - means.mean(0), (sizes[0], sizes[1]), k, estimate)
    return found


def run(size: str) -> list[Row]:
    """Both routes over all states, with errors and learning curve."""
    states, contexts, columns, width, rounds = SIZES[size]
    basis = basis_of(states, contexts, columns, width)
    ours, plainly = tlg.positional_report(basis, nulls=False), straightforward(basis)
    compared = [
        "stable_rank",
        "relative_norm",
        "relative_norm_reference",
        "low_frequency",
        "off_diagonal",
        "smoothness",
        "smoothness_2",
    ]
    for name in compared + (["explained"] if screenot() is not None else []):
        expected = torch.tensor([p[name] for p in plainly], dtype=torch.float64)
        found = torch.tensor(ours.column(name), dtype=torch.float64)
        assert torch.allclose(found, expected, rtol=1e-6), (name, found, expected)
    routes = {
        "numpy, one basis at a time": lambda: straightforward(basis),
        "positional_report": lambda: tlg.positional_report(basis, nulls=False),
        "positional_report, with nulls": lambda: tlg.positional_report(basis),
    }
    note = f"{states} states, {columns - 1} positions, d {width}" + (
        "" if screenot() else "; numpy without ScreeNOT"
    )
    return interleave("measures", routes, rounds=rounds, notes={"positional_report": note})
