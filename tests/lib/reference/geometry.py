"""Ranks, shapes and angles (SPEC B, D, F) from whole matrices, by the formulas as they stand: rows
of P are positional vectors ``[position d]``, rows of C context vectors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.fft import dctn
from scipy.linalg import subspace_angles
from scipy.optimize import root_scalar
from torch import Tensor

from tests.lib.reference.decoder import Decoder, Norm, Run


def screenot(
    s: np.ndarray, shape: tuple[int, int], k: int = 20, strategy: str = "i"
) -> tuple[int, float]:
    """ScreeNOT (SPEC B.1): rank and threshold from singular values in descending order."""
    s = np.sort(s)[::-1].astype(float)
    f, gamma, edge = s.copy(), min(shape) / max(shape), s[k]
    for l in range(1, k + 1):
        a = (1 - ((l - 1) / k) ** (2 / 3)) / (2 ** (2 / 3) - 1)
        f[l - 1] = {"0": 0.0, "w": edge, "i": edge + a * (edge - s[2 * k])}[strategy]

    def psi(y: float) -> float:
        phi = np.mean(y / (y**2 - f**2))
        slope = -np.mean((y**2 + f**2) / (y**2 - f**2) ** 2)
        inner, inner_slope = gamma * phi + (1 - gamma) / y, gamma * slope - (1 - gamma) / y**2
        return float(y * (slope * inner + phi * inner_slope) / (phi * inner))

    low, high = f.max() * (1 + 1e-9), f.max() * 2
    while psi(high) < -4:
        high *= 2
    found = root_scalar(lambda y: psi(y) + 4, bracket=(low, high), xtol=1e-14 * high, rtol=1e-13)
    threshold = float(found.root)
    return int((s > threshold).sum()), threshold


def stable_rank(P: np.ndarray) -> float:
    """``sum s_i^2 / s_1^2`` (SPEC B.2)."""
    s = np.linalg.svd(P, compute_uv=False)
    return float((s**2).sum() / s[0] ** 2)


def relative_norm(h: np.ndarray, *, centred: bool = True) -> float:
    """``|P tiled over contexts|_op / |M|_op`` of ``h [context position d]`` in its window, M = h -
    mean (paper) or h (reference; SPEC B.3)."""
    mean = h.mean((0, 1))
    tiled = np.broadcast_to(h.mean(0) - mean, h.shape).reshape(-1, h.shape[-1])
    M = (h - mean if centred else h).reshape(-1, h.shape[-1])
    return float(np.linalg.norm(tiled, 2) / np.linalg.norm(M, 2))


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length one; zero rows stay."""
    length = np.linalg.norm(rows, axis=-1, keepdims=True)
    return rows / np.where(length > 0, length, 1.0)


def normalized_gram(P: np.ndarray) -> np.ndarray:
    """Cosines of all pairs of rows (SPEC B.5)."""
    return unit(P) @ unit(P).T


def fourier(P: np.ndarray) -> np.ndarray:
    """``F``, the two-dimensional orthonormal DCT-II of the normalised Gram matrix (SPEC B.6)."""
    return np.asarray(dctn(normalized_gram(P), type=2, norm="ortho"))


def low_frequency_share(P: np.ndarray, frequencies: int = 10) -> float:
    """``sum_(k < K) F_kk / tr F`` (SPEC B.6)."""
    diagonal = np.diag(fourier(P))
    return float(diagonal[:frequencies].sum() / diagonal.sum())


def off_diagonal_share(P: np.ndarray) -> float:
    """``1 - sum F_kk^2 / sum F_kl^2`` (SPEC B.6)."""
    F = fourier(P)
    return float(1 - (np.diag(F) ** 2).sum() / (F**2).sum())


def smoothness(P: np.ndarray, m: int = 1) -> float:
    """``|Delta^(m,m) G~|_max / |G|_max`` (SPEC B.7, B.8) by the stencil on the extended Gram matrix
    (rounding grows as (4 T^2)^m: for m up to 3)."""
    T, G = len(P), P @ P.T
    extended = np.block([[G, G[:, ::-1]], [G[::-1], G[::-1, ::-1]]])
    for _ in range(m):
        a, b = np.roll(extended, 1, 0), np.roll(extended, 1, 1)
        extended = T**2 * (extended - a - b + np.roll(a, 1, 1))
    return float(np.abs(extended).max() / np.abs(G).max())


def roughness(P: np.ndarray) -> float:
    """``sum |pos_(t+1) - pos_t|^2 / sum |pos_t|^2`` (SPEC B.8)."""
    return float((np.diff(P, axis=0) ** 2).sum() / (P**2).sum())


def fracture(P: np.ndarray) -> tuple[float, int]:
    """``max_t (1 - a_t) / median_t (1 - a_t)``, a_t = cos(pos_t, pos_(t+1)), and where (SPEC
    B.8)."""
    steps = np.array([1 - a @ b for a, b in itertools.pairwise(unit(P))])
    return float(steps.max() / np.median(steps)), int(steps.argmax())


class Cosines(NamedTuple):
    """Of all (position, context) pairs: largest and mean absolute value, RMS."""

    max: float
    avg: float
    rms: float


def incoherence(P: np.ndarray, C: np.ndarray) -> Cosines:
    """SPEC B.9."""
    cos = np.array([[a @ b for b in unit(C)] for a in unit(P)])
    size, rms = np.abs(cos), np.sqrt((cos**2).mean())
    return Cosines(*(float(x) for x in (size.max(), size.mean(), rms)))


def subspace_overlap(P: np.ndarray, C: np.ndarray, rank: int) -> float:
    """Mean cos^2 of the principal angles between the leading directions (SPEC B.9)."""
    spans = [np.linalg.svd(X, full_matrices=False)[2][:rank].T for X in (P, C)]
    return float((np.cos(subspace_angles(*spans)) ** 2).mean())


def cluster_similarity(C: np.ndarray, labels: Sequence[int]) -> tuple[float, float]:
    """Mean absolute cosine over pairs with one label and with two (SPEC B.10)."""
    size = np.abs(unit(C) @ unit(C).T)
    same = np.equal.outer(labels, labels)
    inside = same & ~np.eye(len(C), dtype=bool)
    return float(size[inside].mean()), float(size[~same].mean())


def compactness(x: np.ndarray, labels: Sequence[int]) -> float:
    """``tr(S_B S_W^-1)`` of points ``[n d]`` (SPEC B.11)."""
    names, mean = np.asarray(labels), x.mean(0)
    within, between = np.zeros((x.shape[1],) * 2), np.zeros((x.shape[1],) * 2)
    for label in np.unique(names):
        rows = x[names == label]
        centre = rows.mean(0)
        within += (rows - centre).T @ (rows - centre) / len(x)
        between += len(rows) * np.outer(centre - mean, centre - mean) / len(x)
    known = np.linalg.cond(within) < 1e9  # not where states lie in a subspace
    return float(np.trace(between @ np.linalg.inv(within))) if known else np.nan


def head_matrix(decoder: Decoder, layer: int, head: int, matrix: str) -> np.ndarray:
    """Canonical W_QK (times the score scale, at offset 0) or W_OV ``[d d]``: ``A gain W_Q (A gain
    W_K)^T`` or ``A gain W_V W_O A_out``, A the centring of a LayerNorm (SPEC 0.3, D)."""
    block, d = decoder.blocks[layer], decoder.embed.shape[1]
    A = torch.eye(d, dtype=torch.float64)
    A = A - 1 / d if block.norm.centred else A
    read = A * block.norm.gain
    if matrix == "QK":
        W_K = block.by_head(block.W_K, 0)[head]
        return (block.score_scale * read @ block.W_Q[head] @ (read @ W_K).T).numpy()
    return (read @ block.by_head(block.W_V, 0)[head] @ block.W_O[head] @ A).numpy()


def token_rows(decoder: Decoder, layer: int, matrix: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows ``[token d]`` that left and right singular vectors are read in (SPEC D.3, canonical):
    token embeddings after the block's norm without gain and bias; for the right side of W_OV the
    unembedding with the final gain, centred over d (LayerNorm) and over the vocabulary."""
    norm, embed = decoder.blocks[layer].norm, decoder.embed
    embed = embed if decoder.embed_norm is None else decoder.embed_norm(embed)
    read = norm.centre(embed) / norm.scale(norm.centre(embed))
    if matrix == "QK":
        return read.numpy(), read.numpy()
    out = decoder.norm.centre(decoder.W_U.T * decoder.norm.gain)
    return read.numpy(), (out - out.mean(0)).numpy()


class Readout(NamedTuple):
    """Singular values, and tokens with the largest and smallest scores on left and right vectors,
    ``[feature k]``."""

    values: np.ndarray
    left_top: np.ndarray
    left_bottom: np.ndarray
    right_top: np.ndarray
    right_bottom: np.ndarray


def token_readout(
    decoder: Decoder, layer: int, head: int, matrix: str, features: int = 5, k: int = 5
) -> Readout:
    """SPEC D.3 by a dense SVD; of each pair of signs the one by which the right vector's best token
    scores at least as high as that of its negative."""
    U, S, Vt = np.linalg.svd(head_matrix(decoder, layer, head, matrix))
    left, right = token_rows(decoder, layer, matrix)
    ends: list[list[np.ndarray]] = [[], [], [], []]
    for u, v in zip(U.T[:features], Vt[:features]):
        sign = 1 if (right @ v).max() >= (-(right @ v)).max() else -1
        for i, scores in enumerate((left @ u * sign, right @ v * sign)):
            order = np.argsort(-scores, kind="stable")
            ends[2 * i].append(order[:k])
            ends[2 * i + 1].append(order[::-1][:k])
    rank = decoder.blocks[layer].W_Q.shape[-1]
    return Readout(S[:rank], *(np.stack(end) for end in ends))


def angle(a: Tensor, b: Tensor) -> Tensor:
    """``2 atan2(|a - b|, |a + b|)`` of unit vectors."""
    a, b = (x / x.norm(dim=-1, keepdim=True) for x in (a, b))
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))


def update_split(norm: Norm, state: Tensor, update: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Radial part ``<u, h> / |h|``, tangential length, and the angle by which u turns h (both
    centred where the norm centres)."""
    h, u = norm.centre(state), norm.centre(update)
    radial = (u * h).sum(-1) / h.norm(dim=-1)
    across = u - radial.unsqueeze(-1) * h / h.norm(dim=-1, keepdim=True)
    return radial, across.norm(dim=-1), angle(h, h + u)


class Paths(NamedTuple):
    """Of every token: step angles ``[b i layer]``, their sum, the angle from first to last state,
    and by state ``[b i state]`` the angle to the next token's row of the unembedding and that
    token's rank (the last token has none: NaN and 0)."""

    steps: Tensor
    length: Tensor
    net: Tensor
    angle: Tensor
    rank: Tensor


def token_paths(decoder: Decoder, run: Run, tokens: Tensor) -> Paths:
    """Paths on the sphere of the final norm (SPEC F), rows of the unembedding with the final gain,
    centred over the vocabulary."""
    norm = decoder.norm
    h = norm.centre(torch.stack([run["state", l] for l in range(decoder.n_layers + 1)], 2))
    steps = angle(h[:, :, :-1], h[:, :, 1:])
    rows = norm.centre(decoder.W_U.T * norm.gain)
    rows = norm.centre(rows - rows.mean(0))
    every = angle(h.unsqueeze(-2), rows)  # [b i state token]
    after = torch.cat([tokens[:, 1:], tokens[:, :1]], 1)
    own = every.gather(-1, after[:, :, None, None].expand(*h.shape[:3], 1))
    rank = (every < own).sum(-1) + 1
    own, last = own[..., 0].clone(), tokens.shape[1] - 1
    own[:, last], rank[:, last] = torch.nan, 0
    return Paths(steps, steps.sum(-1), angle(h[:, :, 0], h[:, :, -1]), own, rank)
