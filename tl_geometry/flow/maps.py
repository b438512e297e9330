"""How well does a linear map carry one state to a later one? Fits the rotation and stretch of
Sarfati et al. 2025 and its baselines, and takes statistics of their residuals, for
:func:`tl_geometry.flow_report` and :func:`tl_geometry.skip_costs`.

Maps are the flow (rotation and stretch between two aligned bases), the identity, the scaled
identity, the mean shift, the best linear map, a ridge regression, the constant mean. Compare them
on held-out trajectories: in-sample the best linear map wins by construction, and with fewer
trajectories than coordinates its residual is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe, finite, index
from tl_geometry.base.errors import choice, require
from tl_geometry.base.linalg import SVD, svd
from tl_geometry.flow.bases import AlignedBases, inverse_values

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
    start, end = index(start, len(aligned.S), "start"), index(end, len(aligned.S), "end")
    stretch = aligned.S[end] * inverse_values(aligned.S[start])
    return low_rank(aligned.U[start], stretch, aligned.U[end])


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

    Raises ``GeometryError`` for states of different shapes or not finite.

    >>> x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    >>> MapsFrom(x).to(x + 1, "shift")(torch.zeros(3)).round(decimals=4).tolist()
    [1.0, 1.0, 1.0]
    """

    def __init__(self, before: Float[Tensor, "trajectory d_model"]) -> None:
        ok = isinstance(before, Tensor) and before.dim() == 2
        require(ok, "states", expected="a tensor [trajectory d_model]", got=describe(before))
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
        got = describe(after)
        require(self.x.shape == after.shape, "states", expected=describe(self.x), got=got)
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
    numbers under these names: ``mean_over_variance`` = mean |m / v| as |mean|/sd,
    ``log10_mean_variance`` = log10(mean v) as the mean of ln v, and ``mean_abs_kurtosis_minus_3`` =
    mean |k| - 3 (k not in excess) as mean |k - 3|, which it equals only where every k is at least
    3.

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
        "mean_over_variance": float((mean / variance).abs().mean()),
        "log10_mean_variance": float(variance.mean().log10()),
        "mean_abs_kurtosis_minus_3": float((excess + 3).abs().mean() - 3),
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
