"""Lines of thought (SPEC G) for an ensemble ``X [trajectory state d]``: singular bases and their
alignment, maps between states and their residuals, truncated and replaced states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.stats import kurtosis
from torch import Tensor

from tests.lib.reference.decoder import Decoder, Run


class Bases(NamedTuple):
    """By state: directions ``U [state d r]``, singular values ``S [state r]``, and right vectors
    ``V [state n r]``, aligned."""

    U: np.ndarray
    S: np.ndarray
    V: np.ndarray


def bases(X: np.ndarray, align: str = "greedy", *, centred: bool = False) -> Bases:
    """SPEC G.2, G.3: ``M_t = X[:, t].T = U S V^T``; then order and signs so that direction i of a
    state continues direction i of the state before. ``greedy``: for i = 1, 2, ... the unused
    column of largest absolute cosine (ties: the later); ``hungarian``: the largest sum of absolute
    cosines; ``sign``: no reordering. Singular values are permuted alike. Signs of the first state
    make the largest coordinate of each direction positive."""
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for t in range(X.shape[1]):
        M = X[:, t].T.astype(float)
        M = M - M.mean(1, keepdims=True) if centred else M
        U, S, Vt = np.linalg.svd(M, full_matrices=False)
        V = Vt.T
        if not found:
            sign = np.sign(U[np.abs(U).argmax(0), np.arange(U.shape[1])])
        else:
            cosines = found[-1][0].T @ U
            order = _order(np.abs(cosines), align)
            U, S, V = U[:, order], S[order], V[:, order]
            sign = np.where((found[-1][0] * U).sum(0) < 0, -1.0, 1.0)
        found.append((U * sign, S, V * sign))
    return Bases(*(np.stack(part) for part in zip(*found)))


def _order(similarity: np.ndarray, align: str) -> np.ndarray:
    """Which column continues each row."""
    if align == "sign":
        return np.arange(len(similarity))
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


def flow_map(b: Bases, start: int, end: int, *, signs: str = "U", rtol: float = 1e-10) -> Map:
    """``x~ = R(end) diag(s(end) / s(start)) R(start)^T x`` (SPEC G.6); with ``signs="V"`` those of
    ``v_i(start) . v_i(end)``. Directions below ``rtol`` of the largest are dropped."""
    s = b.S[start]
    stretch = np.where(s > rtol * s.max(), b.S[end] / np.where(s > 0, s, 1.0), 0.0)
    if signs == "V":
        stretch = stretch * np.where((b.V[start] * b.V[end]).sum(0) < 0, -1.0, 1.0)
    return lambda x: x @ b.U[start] * stretch @ b.U[end].T


def fit_map(x: np.ndarray, y: np.ndarray, kind: str) -> Map:
    """Yardsticks of SPEC G.6, from states x to y: identity, mean-shift, scaled identity, best
    linear map, constant mean, and ridge with the penalty (share of s_1^2) by generalised
    cross-validation over 49 shares from 1e-10 to 100."""
    if kind == "identity":
        return lambda h: h
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


class Residual(NamedTuple):
    """Of ``y - y~``: averages over coordinates of |mean| / sd, ln variance and |excess kurtosis|
    (SPEC G.7); relative error, R^2 about the mean, mean cosine (G.6); covariance ``[d d]``."""

    mean_over_sd: float
    log_variance: float
    abs_kurtosis: float
    relative_error: float
    r2: float
    cosine: float
    covariance: np.ndarray


def residual(moved: np.ndarray, y: np.ndarray) -> Residual:
    """Statistics of predictions ``moved`` of states y."""
    off = y - moved
    variance = off.var(0, ddof=1)
    cosines = (y * moved).sum(1) / np.linalg.norm(y, axis=1) / np.linalg.norm(moved, axis=1)
    return Residual(
        float((np.abs(off.mean(0)) / np.sqrt(variance)).mean()),
        float(np.log(variance).mean()),
        float(np.abs(kurtosis(off, axis=0, bias=False)).mean()),
        float(np.linalg.norm(off) / np.linalg.norm(y)),
        float(1 - (off**2).sum() / ((y - y.mean(0)) ** 2).sum()),
        float(cosines.mean()),
        np.cov(off, rowvar=False),
    )


# -- outputs (SPEC G.5) ----------------------------------------------------------------------------


def trajectories(run: Run, n_layers: int, position: int = -1) -> np.ndarray:
    """States after every block at one position, ``[trajectory state d]`` (SPEC G.1)."""
    states = [run["state", l + 1][:, position] for l in range(n_layers)]
    return torch.stack(states, 1).numpy()


class Distances(NamedTuple):
    """Of changed and own next-token distributions, by row: KL(changed | own), KL(own | changed),
    whether the best tokens agree, how many of the best five are shared."""

    kl: Tensor
    kl_reverse: Tensor
    top1: Tensor
    top5: Tensor


def distances(changed: Tensor, own: Tensor) -> Distances:
    """From logits ``[row v]``."""
    p, q = changed.log_softmax(-1), own.log_softmax(-1)
    best = [x.topk(5, -1).indices for x in (p, q)]
    pairs = zip(best[0].tolist(), best[1].tolist())
    return Distances(
        (p.exp() * (p - q)).sum(-1),
        (q.exp() * (q - p)).sum(-1),
        (best[0][:, 0] == best[1][:, 0]).double(),
        torch.tensor([len(set(a) & set(b)) for a, b in pairs]).double(),
    )


def replaced(
    decoder: Decoder,
    tokens: Tensor,
    change: Mapping[int, Callable[[Tensor], Tensor]],
    *,
    everywhere: bool = False,
) -> Tensor:
    """Logits at the last position ``[b v]`` where states are mapped to others, at the last position
    or at all (SPEC G.5): ``change`` by state."""

    def replacing(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Run], Tensor]:
        def replace(h: Tensor, run: Run) -> Tensor:
            if everywhere:
                return f(h)
            return torch.cat([h[:, :-1], f(h[:, -1:])], 1)

        return replace

    hooks = {("state", state): replacing(f) for state, f in change.items()}
    return decoder.run(tokens, hooks)["logits", 0][:, -1]


def truncated(
    decoder: Decoder,
    tokens: Tensor,
    U: Mapping[int, np.ndarray],
    K: int,
    *,
    everywhere: bool = False,
) -> Tensor:
    """Logits where each state in U becomes ``U_K U_K^T x``, columns of U by singular value."""

    def project(directions: np.ndarray) -> Callable[[Tensor], Tensor]:
        top = torch.as_tensor(directions[:, :K].copy())
        return lambda x: x @ top @ top.T

    return replaced(decoder, tokens, {s: project(u) for s, u in U.items()}, everywhere=everywhere)
