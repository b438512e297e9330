"""Mean decomposition of states ``h [context position d]`` (SPEC A) and the delete-group jackknife
(SPEC O.2), from whole arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t as student


class Parts(NamedTuple):
    """``h = mean + pos_t + ctx_c + resid`` (SPEC A.1). ``pos_seen`` is there for every position,
    the rest for those of the window."""

    mean: np.ndarray
    pos_seen: np.ndarray
    pos: np.ndarray
    ctx: np.ndarray
    resid: np.ndarray


def decompose(h: np.ndarray, window: tuple[int, int] | None = None) -> Parts:
    """SPEC A.1: mean over contexts and the window, pos_t = mean over contexts of h - mean, ctx_c =
    mean over the window of h - mean, resid the rest."""
    h = np.asarray(h, dtype=np.float64)
    start, end = window or (0, h.shape[1])
    inside = h[:, start:end]
    mean = inside.mean((0, 1))
    pos_seen = h.mean(0) - mean
    pos, ctx = pos_seen[start:end], inside.mean(1) - mean
    return Parts(mean, pos_seen, pos, ctx, inside - mean - pos - ctx[:, None])


def second_moment(h: np.ndarray, window: tuple[int, int], *, centred: bool = True) -> np.ndarray:
    """``sum (h - mean)(h - mean)^T`` over contexts and window, or ``sum h h^T`` (SPEC A.3)."""
    rows = np.asarray(h, dtype=np.float64)[:, window[0] : window[1]].reshape(-1, h.shape[-1])
    rows = rows - rows.mean(0) if centred else rows
    return rows.T @ rows


class Anova(NamedTuple):
    """Sums of squares (SPEC A.2), and the share of position by the formula of SPEC A.4,
    ``max(0, SS_pos - SS_resid / (C - 1)) / SS_total``."""

    total: float
    pos: float
    ctx: float
    resid: float
    pos_debiased: float

    @property
    def shares(self) -> np.ndarray:
        """pos, ctx, resid over the total."""
        return np.array([self.pos, self.ctx, self.resid]) / self.total


def anova(h: np.ndarray, window: tuple[int, int] | None = None) -> Anova:
    """SPEC A.2: ``sum |h - mean|^2 = C sum |pos|^2 + T sum |ctx|^2 + sum |resid|^2``."""
    parts = decompose(h, window)
    contexts, positions = parts.resid.shape[:2]
    sums = [float((x**2).sum()) for x in (parts.pos, parts.ctx, parts.resid)]
    pos, ctx, resid = contexts * sums[0], positions * sums[1], sums[2]
    total = pos + ctx + resid
    return Anova(total, pos, ctx, resid, max(0.0, pos - resid / (contexts - 1)) / total)


def half_cosine(h: np.ndarray, halves: tuple[Sequence[int], Sequence[int]]) -> float:
    """Mean over positions of the cosine of pos from two halves of the contexts (SPEC A.4)."""
    a, b = (decompose(h[list(half)]).pos for half in halves)
    cosines = [x @ y / np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(a, b)]
    return float(np.mean(cosines))


def jackknife(
    whole: np.ndarray, sources: Sequence[tuple[Sequence[np.ndarray], Sequence[float]]]
) -> list[np.ndarray]:
    """Value corrected for bias and its 95% bounds (SPEC O.2), for independent sources of (the
    statistic without each group, sizes of the groups): the pseudo-values of Busing, Meijer & van
    der Leeden 1999, variances added, Satterthwaite's degrees of freedom."""
    value, variance, squares = whole.copy(), 0.0, 0.0
    for left_out, sizes in sources:
        share = np.array(sizes) / sum(sizes)
        h, s = 1 / share, np.stack(left_out)
        shape = (-1,) + (1,) * whole.ndim
        corrected = len(h) * whole - ((1 - share).reshape(shape) * s).sum(0)
        pseudo = h.reshape(shape) * whole - (h - 1).reshape(shape) * s
        v = ((pseudo - corrected) ** 2 / (h - 1).reshape(shape)).mean(0)
        value = value + corrected - whole
        variance, squares = variance + v, squares + v**2 / (len(h) - 1)
    freedom = np.divide(variance**2, squares, out=np.ones(whole.shape), where=squares > 0)
    reach = student.ppf(0.975, freedom) * np.sqrt(variance)
    return [value, value - reach, value + reach]
