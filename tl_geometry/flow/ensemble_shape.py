"""What does an ensemble of trajectories look like? Over how many directions it spreads, how
straight and how parallel the bundle runs, and which trajectories are outliers. For
:func:`tl_geometry.flow_report`, :func:`tl_geometry.flow.compare_ensembles` and the methods of
:class:`tl_geometry.flow.Trajectories`.

Plain tensors in, plain tensors or named tuples out. ``X [trajectory state d_model]`` holds one
token per trajectory at every state; ``S [state rank]`` are singular values of the states. Source:
Sarfati et al. 2025 (Lines of Thought); definitions are restated below.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.linalg import normalize_rows

MAD_TO_SD = 1.4826
"""Standard deviation of a Gaussian over its median absolute deviation."""


def entropy_rank(S: Float[Tensor, "state rank"]) -> Float[Tensor, " state"]:
    """Number of directions over which the energy of each state spreads: ``exp(-sum p ln p)`` with
    ``p = s^2 / sum s^2``.

    >>> entropy_rank(torch.ones(1, 5)).round(decimals=4).tolist()
    [5.0]
    """
    energy = S.double().square()
    share = energy / energy.sum(-1, keepdim=True)
    return (-torch.xlogy(share, share).sum(-1)).exp()


class Bundle(NamedTuple):
    """What :func:`bundle` returns: one number per trajectory, or one per step from a state to the
    next."""

    straightness: Float[Tensor, " trajectory"]
    """``|sum of steps| / sum of |step|``: 1 for a straight line, about ``1/sqrt(steps)`` for a
    random walk."""
    parallel: Float[Tensor, " state"]
    """Mean cosine between the steps of two trajectories, for each step (0 for unrelated
    directions)."""
    neighbours: Float[Tensor, " state"]
    """Share of each trajectory's ``k`` nearest neighbours that are still among them after the
    step."""
    neighbours_chance: float
    """``k / (N - 1)``: the share expected if neighbours after the step were drawn at random."""
    degenerate: int
    """Steps of length zero (left out of the cosines)."""


def bundle(X: Float[Tensor, "trajectory state d_model"], *, k: int = 10) -> Bundle:
    """Straightness, parallelism and neighbour preservation of a bundle of trajectories, to be
    compared with those of a null ensemble.

    ``parallel`` and ``neighbours`` have one entry per step (states minus one); ``k`` is the number
    of nearest neighbours, at most N - 2. Raises ``GeometryError`` for a single state or fewer than
    three trajectories.

    >>> X = torch.randn(5, 1, 2, generator=torch.Generator().manual_seed(0))
    >>> straight = bundle(torch.cat([X, X + 1, X + 2], dim=1), k=2)
    >>> straight.parallel.round(decimals=4).tolist(), straight.neighbours.tolist()
    ([1.0, 1.0], [1.0, 1.0])
    """
    n, states, _ = X.shape
    require(states >= 2, "trajectories", expected="at least two states", got=states)
    require(n >= 3, "trajectories", expected="at least three trajectories", got=n)
    # with all n - 1 others as neighbours none could be lost
    k = min(k, n - 2)
    net_length = torch.linalg.vector_norm(X[:, -1].double() - X[:, 0].double(), dim=-1)
    path_length = torch.zeros_like(net_length)
    mean_cosines, neighbours_kept, n_degenerate = [], [], 0
    neighbours_before = _nearest(X[:, 0].double(), k)
    for s in range(states - 1):
        step = X[:, s + 1].double() - X[:, s].double()
        path_length += torch.linalg.vector_norm(step, dim=-1)
        unit, degenerate = normalize_rows(step)
        n_moving = n - int(degenerate.sum())
        n_degenerate += n - n_moving
        # |sum of unit steps|^2 is the sum of cosines over all ordered pairs, self-pairs included
        cosines = unit.sum(0).square().sum() - n_moving
        n_pairs = n_moving * (n_moving - 1)
        unknown = torch.full_like(cosines, torch.nan)
        mean_cosines.append(cosines / n_pairs if n_pairs > 0 else unknown)
        neighbours_after = _nearest(X[:, s + 1].double(), k)
        neighbours_kept.append(
            (neighbours_before[:, :, None] == neighbours_after[:, None]).any(-1).double().mean()
        )
        neighbours_before = neighbours_after
    return Bundle(
        straightness=torch.where(path_length > 0, net_length / path_length, torch.nan),
        parallel=torch.stack(mean_cosines),
        neighbours=torch.stack(neighbours_kept),
        neighbours_chance=k / (n - 1),
        degenerate=n_degenerate,
    )


def _nearest(rows: Float[Tensor, "trajectory d_model"], k: int) -> Int[Tensor, "trajectory rank"]:
    """The ``k`` nearest other trajectories of each."""
    nearest = []
    for start in range(0, len(rows), 1024):  # distances of 1,024 rows to all others at a time
        distances = torch.cdist(rows[start : start + 1024], rows)
        distances.diagonal(start).fill_(torch.inf)  # of each to itself
        nearest.append(distances.topk(k, largest=False).indices)
    return torch.cat(nearest)


def outliers(
    X: Float[Tensor, "trajectory state d_model"], *, factor: float = 10.0
) -> tuple[int, ...]:
    """Rows of the trajectories whose norm r is far from the others' at some state:
    ``|r - median(r)| > factor * 1.4826 * MAD(r)`` (Sarfati et al. 2025: factor 10). Nothing is
    dropped.

    Where the median absolute deviation (MAD) is 0, every norm other than the median is an outlier.

    >>> X = torch.ones(5, 1, 1) + torch.arange(5).view(5, 1, 1) / 10
    >>> X[3] = 50.0
    >>> outliers(X)
    (3,)
    """
    norms = [torch.linalg.vector_norm(state.double(), dim=-1) for state in X.unbind(1)]
    r = torch.stack(norms, dim=1)
    # quantile: of an even count, torch.median takes the lower of the two middle values
    deviation = (r - r.quantile(0.5, dim=0)).abs()
    far = (deviation > factor * MAD_TO_SD * deviation.quantile(0.5, dim=0)).any(1)
    return tuple(far.nonzero()[:, 0].tolist())
