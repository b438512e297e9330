"""Lines of thought (SPEC G) for an ensemble ``X [trajectory state d]``: singular bases and their
alignment, maps between states, truncated states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tests.lib.reference.decoder import Decoder, Run


class Bases(NamedTuple):
    """By state: directions ``U [state d r]`` and singular values ``S [state r]``, aligned."""

    U: np.ndarray
    S: np.ndarray


def bases(X: np.ndarray, align: str = "greedy") -> Bases:
    """SPEC G.2, G.3: ``M_t = X[:, t].T = U S V^T``; then order and signs so that direction i of a
    state continues direction i of the state before. ``greedy``: for i = 1, 2, ... the unused
    column of largest absolute cosine (ties: the later); ``hungarian``: the largest sum of absolute
    cosines. Singular values are permuted alike. Signs of the first state make the largest
    coordinate of each direction positive."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for t in range(X.shape[1]):
        U, S, _ = np.linalg.svd(X[:, t].T.astype(float), full_matrices=False)
        if not found:
            sign = np.sign(U[np.abs(U).argmax(0), np.arange(U.shape[1])])
        else:
            cosines = found[-1][0].T @ U
            order = _order(np.abs(cosines), align)
            U, S = U[:, order], S[order]
            sign = np.where((found[-1][0] * U).sum(0) < 0, -1.0, 1.0)
        found.append((U * sign, S))
    return Bases(*(np.stack(part) for part in zip(*found)))


def _order(similarity: np.ndarray, align: str) -> np.ndarray:
    """Which column continues each row."""
    if align == "hungarian":
        return linear_sum_assignment(similarity, maximize=True)[1]
    free, order = set(range(len(similarity))), []
    for row in similarity:
        best = max(free, key=lambda j: (row[j], j))
        free.remove(best)
        order.append(best)
    return np.array(order)


Map = Callable[[np.ndarray], np.ndarray]
"""From states ``[trajectory d]`` to later states."""


def flow_map(b: Bases, start: int, end: int, *, rtol: float = 1e-10) -> Map:
    """``x~ = R(end) diag(s(end) / s(start)) R(start)^T x`` (SPEC G.6). Directions below ``rtol`` of
    the largest are dropped."""
    s = b.S[start]
    stretch = np.where(s > rtol * s.max(), b.S[end] / np.where(s > 0, s, 1.0), 0.0)
    return lambda x: x @ b.U[start] * stretch @ b.U[end].T


def fit_map(x: np.ndarray, y: np.ndarray, kind: str) -> Map:
    """Yardsticks of SPEC G.6, from states x to y: mean-shift, scaled identity, best
    linear map, constant mean, and ridge with the penalty (share of s_1^2) by generalised
    cross-validation over 49 shares from 1e-10 to 100."""
    if kind == "shift":
        return lambda h: h + (y - x).mean(0)
    if kind == "mean":
        return lambda h: np.zeros_like(h) + y.mean(0)
    if kind == "scaled":
        return lambda h: h * (x * y).sum() / (x**2).sum()
    if kind == "linear":
        best = np.linalg.pinv(x, rcond=1e-10) @ y
        return lambda h: h @ best
    assert kind == "ridge"
    xc, yc, n = x - x.mean(0), y - y.mean(0), len(x)
    largest = np.linalg.norm(xc, 2) ** 2
    best, lowest = np.zeros((x.shape[1], y.shape[1])), np.inf
    for share in np.logspace(-10, 2, 49):
        inverse = np.linalg.inv(xc.T @ xc + share * largest * np.eye(x.shape[1]))
        weights = inverse @ xc.T @ yc
        trace = np.trace(xc @ inverse @ xc.T)
        gcv = n * ((yc - xc @ weights) ** 2).sum() / (n - 1 - trace) ** 2
        if gcv < lowest:
            best, lowest = weights, gcv
    return lambda h: (h - x.mean(0)) @ best + y.mean(0)


def trajectories(run: Run, n_layers: int, position: int = -1) -> np.ndarray:
    """States after every block at one position, ``[trajectory state d]`` (SPEC G.1)."""
    states = [run["state", l + 1][:, position] for l in range(n_layers)]
    return torch.stack(states, 1).numpy()


def divergence(changed: Tensor, own: Tensor) -> Tensor:
    """KL(changed | own) of next-token distributions, from logits ``[row v]``."""
    p, q = changed.log_softmax(-1), own.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def truncated(decoder: Decoder, tokens: Tensor, U: Mapping[int, np.ndarray], K: int) -> Tensor:
    """Logits at the last position ``[b v]`` where each state in U becomes ``U_K U_K^T x`` there
    (SPEC G.5), columns of U by singular value."""

    def project(directions: np.ndarray) -> Callable[[Tensor, Run], Tensor]:
        top = torch.as_tensor(directions[:, :K].copy())
        return lambda h, run: torch.cat([h[:, :-1], h[:, -1:] @ top @ top.T], 1)

    hooks = {("state", state): project(u) for state, u in U.items()}
    return decoder.run(tokens, hooks)["logits", 0][:, -1]
