"""What an ensemble of trajectories looks like: angles between aligned bases, spectra, how straight
and how parallel the bundle runs, outliers.

Plain tensors in, named tuples out. ``X [trajectory state d_model]`` holds one token per trajectory
at every state; aligned bases are ``U [state d_model rank]`` and ``S [state rank]``. Source: Sarfati
et al. 2025 (Lines of Thought); definitions are restated below.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.linalg import normalize_rows, stable_rank

MAD_TO_SD = 1.4826
"""Median absolute deviation of a Gaussian -> its standard deviation."""


def basis_angles(
    U: Float[Tensor, "state d_model column"], k: int = 4
) -> Float[Tensor, "rank state state"]:
    """Angle between direction i at two states, ``arccos |u_i(s).u_i(t)|`` in degrees, 0 to 90, for
    the first ``k`` directions.

    Symmetric with a zero diagonal. The absolute value (missing from the published formula) makes it
    free of sign conventions. Sarfati et al. 2025, Fig. 2a.

    >>> basis_angles(torch.eye(2).repeat(3, 1, 1), k=1)[0, 0].tolist()
    [0.0, 0.0, 0.0]
    """
    require(1 <= k <= U.shape[2], "k", expected=f"1 to {U.shape[2]} directions", got=k)
    u = rearrange(U[:, :, :k], "state d rank -> rank state d").double()
    cosine = einsum(u, u, "rank s d, rank t d -> rank s t")
    flip = torch.where(cosine < 0, -1.0, 1.0)
    # half-angle form: exact at 0, where arccos loses half the digits
    apart = u[:, :, None] - flip[..., None] * u[:, None]
    angle = 2 * torch.asin((torch.linalg.vector_norm(apart, dim=-1) / 2).clamp(max=1))
    return torch.rad2deg(angle)


class Spectra(NamedTuple):
    """Summaries of the singular values of each state."""

    stable_rank: Float[Tensor, " state"]
    entropy_rank: Float[Tensor, " state"]
    decay: Float[Tensor, " state"]
    """Slope of ln s against ln rank over ranks 2 to 512 (the first is left out: uncentred, it is
    the ensemble mean)."""


def spectra(S: Float[Tensor, "state rank"]) -> Spectra:
    """Stable rank ``sum s^2 / s_1^2``, entropy rank ``exp(-sum p ln p)`` with
    ``p = s^2 / sum s^2``, and the log-log slope.

    >>> spectra(torch.ones(1, 5)).entropy_rank.round(decimals=4).tolist()
    [5.0]
    """
    values = S.double().sort(-1, descending=True).values
    share = values.square() / values.square().sum(-1, keepdim=True)
    entropy = -torch.xlogy(share, share).sum(-1)
    used = values[:, 1:512]
    x = torch.log(torch.arange(2, 2 + used.shape[1], dtype=torch.float64, device=S.device))
    ok = used > 1e-12 * values[:, :1]
    y = torch.where(ok, torch.log(torch.where(ok, used, 1.0)), 0.0)
    w = ok.double()
    count = w.sum(-1)
    dx = x - ((w * x).sum(-1) / count)[:, None]
    dy = y - ((w * y).sum(-1) / count)[:, None]
    slope = (w * dx * dy).sum(-1) / (w * dx.square()).sum(-1)
    return Spectra(stable_rank(values), entropy.exp(), torch.where(count >= 2, slope, torch.nan))


class Bundle(NamedTuple):
    """How the trajectories run: one number per trajectory, or one per step from a state to the
    next."""

    straightness: Float[Tensor, " trajectory"]
    """``|sum of steps| / sum of |step|``: 1 for a straight line, about ``1/sqrt(steps)`` for a
    random walk."""
    parallel: Float[Tensor, " state"]
    """Mean cosine between the steps of two trajectories (0 for unrelated directions)."""
    neighbours: Float[Tensor, " state"]
    """Share of each trajectory's ``k`` nearest neighbours that are still among them after the
    step."""
    neighbours_chance: float
    degenerate: int
    """Steps of length zero (left out of the cosines)."""


def bundle(X: Float[Tensor, "trajectory state d_model"], *, k: int = 10) -> Bundle:
    """Straightness, parallelism and neighbour preservation of a bundle of trajectories, to set
    beside those of a null ensemble.

    ``parallel`` and ``neighbours`` have one entry per step (states minus one). The null for
    ``neighbours`` is ``k / (N - 1)``. Raises ``GeometryError`` for a single state or fewer than
    three trajectories.

    >>> X = torch.randn(5, 1, 2, generator=torch.Generator().manual_seed(0))
    >>> straight = bundle(torch.cat([X, X + 1, X + 2], dim=1), k=2)
    >>> straight.parallel.round(decimals=4).tolist(), straight.neighbours.tolist()
    ([1.0, 1.0], [1.0, 1.0])
    """
    n, states, _ = X.shape
    require(states >= 2, "trajectories", expected="at least two states", got=states)
    require(n >= 3, "trajectories", expected="at least three trajectories", got=n)
    k = min(k, n - 2)
    straight = torch.linalg.vector_norm(X[:, -1].double() - X[:, 0].double(), dim=-1)
    length = torch.zeros_like(straight)
    parallel, kept, zero, before = [], [], 0, _nearest(X[:, 0].double(), k)
    for s in range(states - 1):
        step = X[:, s + 1].double() - X[:, s].double()
        length += torch.linalg.vector_norm(step, dim=-1)
        unit, degenerate = normalize_rows(step)
        m = n - int(degenerate.sum())
        zero += n - m
        cosines = unit.sum(0).square().sum() - m  # of the m (m - 1) ordered pairs, summed
        parallel.append(cosines / (m * (m - 1)) if m > 1 else torch.full_like(cosines, torch.nan))
        after = _nearest(X[:, s + 1].double(), k)
        kept.append((before[:, :, None] == after[:, None]).any(-1).double().mean())
        before = after
    return Bundle(
        straightness=torch.where(length > 0, straight / length, torch.nan),
        parallel=torch.stack(parallel),
        neighbours=torch.stack(kept),
        neighbours_chance=k / (n - 1),
        degenerate=zero,
    )


def _nearest(
    rows: Float[Tensor, "trajectory d_model"], k: int, chunk: int = 1024
) -> Int[Tensor, "trajectory rank"]:
    """The ``k`` nearest other trajectories of each."""
    found = []
    squares = rows.square().sum(-1)
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        distance = squares - 2 * part @ rows.mT
        distance[torch.arange(len(part)), torch.arange(start, start + len(part))] = torch.inf
        found.append(distance.topk(k, largest=False).indices)
    return torch.cat(found)


class Outliers(NamedTuple):
    """Trajectories whose norm leaves the others at some state; nothing is dropped."""

    mask: Bool[Tensor, " trajectory"]
    indices: tuple[int, ...]
    states: tuple[int, ...]
    """State rows at which each of them is farthest out."""
    constant: tuple[int, ...]
    """State rows whose median absolute deviation is zero: there only the median itself passes."""


def outliers(X: Float[Tensor, "trajectory state d_model"], *, factor: float = 10.0) -> Outliers:
    """Trajectories with ``|r - median(r)| > factor * 1.4826 * MAD(r)`` at any state, ``r`` the norm
    (Sarfati et al. 2025: factor 10).

    >>> X = torch.ones(5, 1, 1) + torch.arange(5).view(5, 1, 1) / 10
    >>> X[3] = 50.0
    >>> outliers(X).indices
    (3,)
    """
    norms = [torch.linalg.vector_norm(state.double(), dim=-1) for state in X.unbind(1)]
    r = torch.stack(norms, dim=1)
    away = (r - r.quantile(0.5, dim=0)).abs()
    mad = away.quantile(0.5, dim=0)
    out = away > factor * MAD_TO_SD * mad
    mask = out.any(1)
    found = tuple(int(i) for i in mask.nonzero()[:, 0])
    score = torch.where(mad > 0, away / mad, torch.where(away > 0, torch.inf, 0.0))
    worst = tuple(int(score[i].argmax()) for i in found)
    return Outliers(mask, found, worst, tuple(int(s) for s in (mad == 0).nonzero()[:, 0]))
