"""Which direction of one state continues which direction of the state before, and how well does a
linear map carry one state to a later one? Aligned singular bases of an ensemble of trajectories,
the rotation and stretch between them (Sarfati et al. 2025), its baselines, and statistics of their
residuals, for :func:`tl_geometry.flow_report` and :func:`tl_geometry.skip_costs`.

An ensemble is ``X [trajectory state d_model]``. At state t its matrix is ``M_t = X[:, t].T``
(d_model x N) ``= U_t S_t V_t^T``; the basis of t is ``(U_t, S_t)``. Singular vectors are defined up
to sign, and their order is that of the singular values; alignment chooses order and signs so that
direction i of one state continues direction i of the state before, and permutes the singular values
with them.

Maps are the flow (rotation and stretch between two aligned bases), the identity, the scaled
identity, the mean shift, the best linear map, a ridge regression, the constant mean. Compare them
on held-out trajectories: in-sample the best linear map wins by construction, and with fewer
trajectories than coordinates its residual is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from tl_geometry.base.checks import describe, finite, index
from tl_geometry.base.errors import choice, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.linalg import SVD, svd

ALIGNMENTS = ("greedy", "hungarian")
"""How :func:`align_directions` chains singular directions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class AlignedBases(Guarded):
    """Aligned bases of all states: ``M_t = U_t diag(S_t) V_t^T``, float64. Directions are the
    columns of ``U``; they are not in the order of their singular values."""

    U: Float[Tensor, "state d_model rank"]
    S: Float[Tensor, "state rank"]

    @property
    def rank(self) -> int:
        """Directions of each basis, ``min(d_model, trajectories)``."""
        return vars(self)["S"].shape[-1]


def _bases(aligned: AlignedBases) -> tuple[Tensor, Tensor]:
    """Directions and singular values as they are: loops over pairs of states copy nothing."""
    return vars(aligned)["U"], vars(aligned)["S"]


def fit_aligned_bases(
    X: Float[Tensor, "trajectory state d_model"], *, align: str = "greedy"
) -> AlignedBases:
    """Aligned bases of an ensemble, uncentred (as published), so that the first direction is nearly
    that of the ensemble mean.

    Computed in float64; ``align`` as in :func:`align_directions`, for which directions that a state
    lacks (a singular value below 1e-10 of the largest) are zero. Source: Sarfati et al. 2025,
    section 2 ("latent space bases"). Raises ``GeometryError`` for states that are not finite.

    >>> X = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> f = fit_aligned_bases(X)
    >>> M = X[:, 1].mT
    >>> torch.allclose(f.U[1] * f.S[1] ** 2 @ f.U[1].mT, M @ M.mT)
    True
    """
    ok = X.dim() == 3 and X.is_floating_point() and X.numel() > 0
    expected, instead = "a floating tensor [trajectory state d_model]", "tl_geometry.trajectories"
    require(ok, "trajectories", expected=expected, got=describe(X), instead=instead)
    for s, state in enumerate(X.unbind(1)):
        finite(state, f"trajectories, state row {s}")
    choice(align, ALIGNMENTS, "align")
    # state by state: no float64 copy of the whole ensemble exists; M_t^T = V_t S_t U_t^T
    factors = [svd(state.double()) for state in X.unbind(1)]
    U, S = torch.stack([f.V for f in factors]), torch.stack([f.S for f in factors])
    # rounding would choose what continues a direction that a state lacks
    order, sign = align_directions(U * (inverse_values(S)[:, None] > 0), align)
    U = U.gather(2, order[:, None].expand_as(U)) * sign[:, None]
    return AlignedBases(U=U, S=S.gather(1, order))


NEGLIGIBLE = 1e-10
"""Share of a state's largest singular value below which states do not vary in a direction: far
below the rounding of float32 states (1e-7), above that of float64, at which
:func:`tl_geometry.base.linalg.numerical_rank` cuts."""


def inverse_values(S: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch rank"]:
    """``1 / S``, and 0 for singular values below :data:`NEGLIGIBLE` times the largest: maps drop
    those directions.

    >>> inverse_values(torch.tensor([[2.0, 0.0], [0.0, 0.0]])).tolist()
    [[0.5, 0.0], [0.0, 0.0]]
    """
    large = S.amax(-1, keepdim=True) * NEGLIGIBLE < S
    return torch.where(large, 1 / torch.where(large, S, 1.0), 0.0)


def align_directions(
    U: Float[Tensor, "state d_model rank"], method: str = "greedy"
) -> tuple[Int[Tensor, "state rank"], Float[Tensor, "state rank"]]:
    """Order and signs that make column i of each state continue column i of the state before. The
    aligned columns are ``psi_t = U_t[:, order_t] * sign_t``, ``psi_0 = U_0``.

    ``"greedy"`` (as published): for i = 1, 2, ..., columns of zeros last, the unused column with
    the largest ``|psi_i(t-1).u_j(t)|``, the later one on a tie. ``"hungarian"``: the permutation
    with the largest sum of absolute cosines. Both then choose signs that make the cosines positive.
    Singular values must be permuted with the columns (the published code does not;
    :func:`fit_aligned_bases` does).

    >>> U = torch.stack([torch.eye(2), -torch.eye(2).flip(1)])
    >>> order, sign = align_directions(U)
    >>> order[1].tolist(), sign[1].tolist()
    ([1, 0], [-1.0, -1.0])
    """
    order = torch.arange(U.shape[2], device=U.device).repeat(len(U), 1)
    sign = torch.ones(order.shape, dtype=U.dtype, device=U.device)
    previous = U[0]
    for t in range(1, len(U)):
        cosines = previous.mT @ U[t]
        order[t] = torch.tensor(_continued(cosines.abs().cpu().numpy(), method))
        matched = cosines.gather(1, order[t][:, None])[:, 0]
        # a cosine of 0 counts as positive: a sign of 0 would erase the direction
        sign[t] = torch.where(matched < 0, -1.0, 1.0).to(sign)
        previous = U[t][:, order[t]] * sign[t]
    return order, sign


def _continued(similarity: np.ndarray, method: str) -> list[int]:
    """The column that continues each row of ``similarity [row column]`` (absolute cosines)."""
    if method == "hungarian":
        return linear_sum_assignment(similarity, maximize=True)[1].tolist()
    # a direction that a state lacks (a row of zeros) gets what the others leave
    rows, order = np.argsort(~similarity.any(1), kind="stable"), []
    for row in similarity[rows]:
        row[order] = -1  # below every absolute cosine: a column is used once
        order.append(len(row) - 1 - int(np.argmax(row[::-1])))  # reversed: the later one on a tie
    return np.array(order)[np.argsort(rows)].tolist()


def top_directions(aligned: AlignedBases, row: int, K: int) -> Float[Tensor, "d_model rank"]:
    """The ``K`` directions of one state with the largest singular values, strongest first."""
    U, S = _bases(aligned)
    # aligned directions are not in the order of their singular values
    return U[row][:, S[row].argsort(descending=True, stable=True)[:K]]


MAPS = ("linear", "ridge", "scaled", "shift", "identity", "mean")
"""Maps from one state to another that the flow is compared with, see :class:`MapsFrom`."""
ALWAYS = ("ridge", "identity")
"""Maps that are always compared with the flow: with few trajectories any map beats the best linear
map, which alone would be no baseline."""


def map_names(value: Sequence[str] | str, options: Sequence[str]) -> tuple[str, ...]:
    """The types of map that are asked for, each once, and those that are always compared."""
    names = (value,) if isinstance(value, str) else tuple(value)
    unknown = [name for name in names if name not in options]
    require(not unknown, "map_types", expected=f"some of {', '.join(options)}", got=unknown)
    return tuple(dict.fromkeys([*names, *ALWAYS]))


Map = Callable[[Tensor], Tensor]
"""From states ``[*batch d_model]`` to the states that are expected later, in float64."""


def low_rank(left: Tensor, stretch: Tensor, right: Tensor) -> Map:
    """``x -> (x @ left * stretch) @ right.T`` for row vectors, with matrices ``[d_model rank]``."""
    return lambda x: (x.double() @ left * stretch) @ right.mT


def flow_map(aligned: AlignedBases, start: int, end: int) -> Map:
    """Rotation and stretch from state row ``start`` to ``end``:
    ``x~ = R(end) diag(s_i(end) / s_i(start)) R(start)^T x``.

    Sarfati et al. 2025, Eq. 1. By construction ``X~ X~^T = M M^T`` with M the states at ``end``:
    the second moments of the ensemble match exactly, except for directions dropped because their
    singular value is below 1e-10 of the largest. With v_i the right singular vectors, the residual
    energy is ``2 sum s_i(end)^2 (1 - v_i(start).v_i(end))``, so that only signs and order decide
    the error.

    >>> from tl_geometry.flow import fit_aligned_bases
    >>> X = torch.randn(20, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> moved = flow_map(fit_aligned_bases(X), 0, 1)(X[:, 0])
    >>> torch.allclose(moved.mT @ moved, X[:, 1].mT @ X[:, 1])
    True
    """
    U, S = _bases(aligned)
    start, end = index(start, len(S), "start"), index(end, len(S), "end")
    return low_rank(U[start], S[end] * inverse_values(S[start]), U[end])


PENALTIES = torch.logspace(-10, 2, 49, dtype=torch.float64)
"""Ridge penalties that are tried, four per decade, as shares of the largest squared singular value:
from hardly any shrinkage to nearly the constant mean."""


class MapsFrom:
    """Fits maps from one state to later states of the same trajectories, by least squares within
    their type; what depends on the start alone is computed once.

    - ``"identity"``: x;
    - ``"shift"``: x + mean(after - before);
    - ``"scaled"``: c x with the best c;
    - ``"linear"``: the best linear map ``M_after pinv(M_before)``, without intercept: in-sample the
      lower bound for the flow;
    - ``"ridge"``: the best affine map with a ridge penalty chosen by generalised cross-validation
      (Golub, Heath & Wahba 1979): the fair baseline where trajectories are few;
    - ``"mean"``: the constant mean(after).

    Raises ``GeometryError`` for states that are not finite.

    >>> x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    >>> MapsFrom(x).to(x + 1, "shift")(torch.zeros(3)).round(decimals=4).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, before: Float[Tensor, "trajectory d_model"]) -> None:
        self.x = finite(before.double(), "states before")

    @cached_property
    def factors(self) -> SVD:
        """Singular value decomposition of the states."""
        return svd(self.x)

    @cached_property
    def centered(self) -> SVD:
        """Singular value decomposition of the states about their mean."""
        return svd(self.x - self.x.mean(0))

    def ridge(self, y: Float[Tensor, "trajectory d_model"]) -> Map:
        """The best affine map with the penalty ``share * s_1^2`` whose share, one of
        :data:`PENALTIES`, minimises the criterion of generalised cross-validation,
        ``n |y - y~|^2 / (n - 1 - trace)^2``: trace of the shrinkage, and one degree of freedom for
        the mean."""
        (U, S, V), n = self.centered, len(y)
        centered = y - y.mean(0)
        target = U.mT @ centered
        penalty = S[0].square() * PENALTIES.to(S.device)[:, None]
        # 1 minus the shrinkage: where the rank is n - 1 both sums below are small differences of
        # large numbers, and rounding would decide
        left = torch.where(penalty > 0, penalty / (S.square() + penalty), 1.0)
        outside = (centered - U @ target).square().sum()
        residual_energy = outside + (target.square().sum(1) * left.square()).sum(1)
        freedom = left.sum(1) + (n - 1 - len(S))
        best = (n * residual_energy / freedom.square()).argmin()
        # what a ridge regression has in place of 1 / s, s / (s^2 + penalty); 0 where s is 0
        shrunk = S / (S.square() + penalty[best])
        shrunk = torch.where(S > 0, shrunk, 0.0)
        slope, before, after = low_rank(V, shrunk, target.mT), self.x.mean(0), y.mean(0)
        return lambda h: slope(h.double() - before) + after

    def to(self, after: Float[Tensor, "trajectory d_model"], map_type: str) -> Map:
        """The map of a type to ``after``, states of the same trajectories."""
        choice(map_type, MAPS, "map_type")
        x, y = self.x, finite(after.double(), "states after")
        if map_type == "ridge":
            return self.ridge(y)
        if map_type == "linear":
            U, S, V = self.factors
            return low_rank(V, inverse_values(S), y.mT @ U)
        if map_type == "scaled":
            energy = float(x.square().sum())
            scale = float((x * y).sum()) / energy if energy > 0 else 0.0
            return lambda h: scale * h.double()
        if map_type == "mean":
            return lambda h: y.mean(0).expand_as(h)
        step = (y - x).mean(0) if map_type == "shift" else torch.zeros_like(x[0])
        return lambda h: h.double() + step


def score_map(
    moved: Float[Tensor, "trajectory d_model"], true: Float[Tensor, "trajectory d_model"]
) -> dict[str, float]:
    """How well predictions ``moved`` fit true states y, over all trajectories.

    ``relative_error``: ``|y - y~| / |y|`` (Frobenius); ``r2``: the share of the variance about the
    mean of y that is explained (negative: worse than the mean); ``cosine``: the mean over
    trajectories of the cosine between y and y~.

    >>> score_map(torch.eye(3), torch.eye(3))
    {'relative_error': 0.0, 'r2': 1.0, 'cosine': 1.0}
    """
    moved, true = moved.double(), true.double()
    residual_energy = (true - moved).square().sum()
    spread = (true - true.mean(0)).square().sum()
    # the default eps of 1e-8 would shrink the cosines of short states
    cosine = torch.nn.functional.cosine_similarity(moved, true, dim=-1, eps=1e-300)
    return {
        "relative_error": float((residual_energy / true.square().sum()).sqrt()),
        "r2": float(1 - residual_energy / spread) if spread > 0 else float("nan"),
        "cosine": float(cosine.mean()),
    }


def varying_coordinates(
    values: Float[Tensor, "trajectory d_model"],
) -> tuple[Float[Tensor, " rank"], Float[Tensor, "trajectory rank"]]:
    """Mean and centred values of the coordinates that vary, in float64. A constant coordinate keeps
    a few rounding errors of its mean, which are no variance.

    >>> varying_coordinates(torch.tensor([[0.1, 1.0], [0.1, 2.0], [0.1, 6.0]]))[0].tolist()
    [3.0]
    """
    values = values.double()
    mean = values.mean(0)
    centered = values - mean
    rounding = 64 * torch.finfo(torch.float64).eps * values.abs().amax(0)
    varies = centered.square().mean(0).sqrt() > rounding
    return (mean, centered) if bool(varies.all()) else (mean[varies], centered[:, varies])


def residual_statistics(residual: Float[Tensor, "trajectory d_model"]) -> dict[str, float]:
    """Statistics of a residual ``dx = x - x~`` (Sarfati et al. 2025, Fig. 4): mean m, variance v
    (n - 1) and kurtosis k of each coordinate over trajectories, then averaged over the coordinates
    that vary (NaN where none does).

    As the text of the paper defines them: ``mean_over_sd`` = mean |m| / sqrt(v), ``log_variance`` =
    mean ln v, ``abs_kurtosis`` = mean |excess kurtosis|, the excess bias-corrected (0 for a
    Gaussian; G2 of Joanes & Gill 1998, MATLAB's flag 0 minus 3). The published code plots other
    numbers under these names: mean |m / v|, log10(mean v), and mean |k| - 3 (k not in excess).

    >>> g = torch.Generator().manual_seed(0)
    >>> s = residual_statistics(torch.randn(500, 8, generator=g) * 2 + 1)
    >>> round(s["mean_over_sd"], 1), round(s["log_variance"], 1)
    (0.5, 1.4)
    """
    n = len(residual)
    # the unbiased kurtosis divides by n - 3
    require(n >= 4, "residuals", expected="at least 4 trajectories", got=n, instead="more chunks")
    mean, centered = varying_coordinates(residual)
    squares = centered.square()
    second, fourth = squares.mean(0), squares.square().mean(0)
    variance = second * n / (n - 1)
    excess = (n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * (fourth / second.square() - 3) + 6)
    return {
        "mean_over_sd": float((mean.abs() / variance.sqrt()).mean()),
        "log_variance": float(variance.log().mean()),
        "abs_kurtosis": float(excess.abs().mean()),
    }


def measured(
    layer_map: Map,
    before: Float[Tensor, "trajectory d_model"],
    after: Float[Tensor, "trajectory d_model"],
) -> tuple[dict[str, float], Float[Tensor, "trajectory d_model"]]:
    """:func:`residual_statistics` and :func:`score_map` of a map on some states, and the residual
    ``after - map(before)``."""
    true, moved = after.double(), layer_map(before.double())
    residual = true - moved
    return {**residual_statistics(residual), **score_map(moved, true)}, residual
