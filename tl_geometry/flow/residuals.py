"""How well does a linear map carry one state to a later one? Fits the rotation and stretch of
Sarfati et al. 2025 and its baselines, and takes statistics of their residuals, for
:func:`tl_geometry.flow_report` and :func:`tl_geometry.flow.skip_map`.

Every map is ``x -> output + scale * ((x - input) @ left * stretch) @ right.T``: the flow (rotation
and stretch between two aligned bases), the identity, the scaled identity, the mean shift, the best
linear map, a ridge regression, the constant mean. Compare them on held-out trajectories: in-sample
the best linear map wins by construction, and with fewer trajectories than coordinates its residual
is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe, finite, index
from tl_geometry.base.errors import choice, require
from tl_geometry.base.linalg import SVD, svd
from tl_geometry.flow.alignment import AlignedBases, inverse_values
from tl_geometry.flow.noise import varying

MAPS = ("flow", "linear", "ridge", "scaled", "shift", "identity", "mean")
"""Types of map from one state to another, see :func:`fit_map`."""
ALWAYS = ("ridge", "identity")
"""Maps that are always compared with the flow: with few trajectories any map beats the best linear
map, which alone would be no baseline."""
VECTOR_MAPS = ("identity", "mean", "shift", "scaled")
"""Maps that fit at most a vector or a number: for them fewer trajectories than dimensions do."""
SIGNS = ("U", "V")
"""Signs of the directions: ``"U"`` those of the aligned bases (published), ``"V"`` those that
minimise the residual."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerMap:
    """``x -> output + scale * ((x - input) @ left * stretch) @ right.T``; ``left`` ``None`` stands
    for the identity.

    Row vectors: ``input`` and ``output`` are the centres of the two states. ``dropped`` counts the
    directions left out because their singular value at the start is too small to divide by.
    ``penalty`` is the penalty that a ridge regression chose, as a share of the largest squared
    singular value (0 for every other map).
    """

    map_type: str
    input: Float[Tensor, " d_model"]
    output: Float[Tensor, " d_model"]
    scale: float = 1.0
    left: Float[Tensor, "d_model rank"] | None = None
    stretch: Float[Tensor, " rank"] | None = None
    right: Float[Tensor, "d_model rank"] | None = None
    dropped: int = 0
    penalty: float = 0.0

    def __call__(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The map applied to states, in their own dtype."""
        return self.unfold(self.coordinates(x))

    def coordinates(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch rank"]:
        """``(x - input) @ left``."""
        moved = x - self.input.to(x)
        return moved if self.left is None else moved @ self.left.to(x)

    def reads_as(self, other: LayerMap) -> bool:
        """Whether both certainly give the same :meth:`coordinates`: the same ``left`` object, so
        that no matrices are compared, and equal ``input``."""
        return self.left is other.left and torch.equal(self.input, other.input)

    def unfold(self, c: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch d_model"]:
        """The mapped states, from their :meth:`coordinates` ``c``."""
        if self.right is not None:
            c = (c if self.stretch is None else c * self.stretch.to(c)) @ self.right.to(c).mT
        return self.output.to(c) + self.scale * c

    def single(self) -> LayerMap:
        """The same map in float32, which takes half the memory."""
        tensors = {k: v.float() for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)


class MappedStates:
    """Some states, mapped by one map after another. Maps that read the same coordinates, as all
    flows from one start do, share one product."""

    def __init__(self, x: Float[Tensor, "trajectory d_model"]) -> None:
        self.x, self.coordinates = x, x
        self.before: LayerMap | None = None

    def __call__(self, layer_map: LayerMap) -> Float[Tensor, "trajectory d_model"]:
        if self.before is None or not layer_map.reads_as(self.before):
            self.coordinates = layer_map.coordinates(self.x)
        self.before = layer_map
        return layer_map.unfold(self.coordinates)


def flow_map(aligned: AlignedBases, start: int, end: int, *, signs: str = "U") -> LayerMap:
    """Rotation and stretch from state row ``start`` to ``end``:
    ``x~ = R(end) diag(s_i(end) / s_i(start)) R(start)^T x``.

    Sarfati et al. 2025, Eq. 1, about the centres of the aligned bases (zero when uncentred). By
    construction ``X~ X~^T = M M^T`` with M the states at ``end``: the second moments of the
    ensemble match exactly, except for directions dropped because their singular value is below
    1e-10 of the largest. The residual energy is ``2 sum s_i(end)^2 (1 - v_i(start).v_i(end))``, so
    that only signs and order decide the error. ``signs="U"`` keeps the signs of the aligned bases
    (published); ``"V"`` takes the sign of ``v_i(start).v_i(end)``, which minimises the error.

    >>> from tl_geometry.flow.alignment import fit_aligned_bases
    >>> X = torch.randn(20, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> moved = flow_map(fit_aligned_bases(X), 0, 1)(X[:, 0])
    >>> torch.allclose(moved.mT @ moved, X[:, 1].mT @ X[:, 1])
    True
    """
    start, end = index(start, len(aligned.S), "start"), index(end, len(aligned.S), "end")
    inverse = inverse_values(aligned.S[start])
    stretch = aligned.S[end] * inverse
    if choice(signs, SIGNS, "signs") == "V":
        overlap = aligned.overlap[start, end]
        stretch = stretch * torch.where(overlap < 0, -1.0, 1.0)
    return LayerMap(
        map_type="flow",
        input=aligned.center[start],
        output=aligned.center[end],
        left=aligned.directions[start],
        stretch=stretch,
        right=aligned.directions[end],
        dropped=int((inverse == 0).sum()),
    )


PENALTIES = torch.logspace(-10, 2, 49, dtype=torch.float64)
"""Ridge penalties that are tried, four per decade, as shares of the largest squared singular value:
from hardly any shrinkage to nearly the constant mean."""


def ridge_inverse(S: Float[Tensor, " rank"], share: float) -> Float[Tensor, " rank"]:
    """``s / (s^2 + share s_1^2)``: what a ridge regression has in place of 1 / s; 0 where s is 0.

    >>> ridge_inverse(torch.tensor([2.0, 0.0]), 1.0).tolist()
    [0.25, 0.0]
    """
    penalty = share * S[0].square()
    # the 1 avoids 0 / 0: it is used only where all of S is 0, and there the result is 0 anyway
    return torch.where(S > 0, S / (S.square() + torch.where(penalty > 0, penalty, 1.0)), 0.0)


class MapsFrom:
    """Fits maps from one state to any later states; what depends on the start alone is computed
    once.

    ``MapsFrom(before).to(after, map_type)`` is :func:`fit_map`, which documents the types.

    >>> x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> maps = MapsFrom(x)
    >>> torch.allclose(maps.to(2 * x, "linear")(x), 2 * x), round(maps.to(2 * x, "scaled").scale, 6)
    (True, 2.0)
    """

    def __init__(self, before: Float[Tensor, "trajectory d_model"]) -> None:
        ok = isinstance(before, Tensor) and before.dim() == 2
        require(ok, "states", expected="a tensor [trajectory d_model]", got=describe(before))
        self.shape = before.shape
        self.x = finite(before.double(), "states before")

    @cached_property
    def factors(self) -> SVD:
        """Singular value decomposition of the states."""
        return svd(self.x)

    @cached_property
    def centered(self) -> tuple[Float[Tensor, " d_model"], SVD]:
        """Mean of the states, and singular value decomposition about it."""
        mean = self.x.mean(0)
        return mean, svd(self.x - mean)

    def ridge(
        self, y: Float[Tensor, "trajectory d_model"]
    ) -> tuple[float, Float[Tensor, "rank d_model"]]:
        """The ridge penalty for ``y``, as a share of s_1^2, and ``U^T (y - mean)``.

        The penalty is the one of :data:`PENALTIES` that minimises the criterion of generalised
        cross-validation, ``n |y - y~|^2 / (n - 1 - trace)^2``: trace of the shrinkage, and one
        degree of freedom for the mean.
        """
        (U, S, _), n = self.centered[1], len(y)
        centered = y - y.mean(0)
        target = U.mT @ centered
        shares = PENALTIES.to(S.device)
        penalty = S[0].square() * shares[:, None]
        # 1 minus the shrinkage: where the rank is n - 1 both sums below are small differences of
        # large numbers, and rounding would decide
        left = torch.where(penalty > 0, penalty / (S.square() + penalty), 1.0)
        outside = (centered - U @ target).square().sum()
        residual_energy = outside + (target.square().sum(1) * left.square()).sum(1)
        freedom = left.sum(1) + (n - 1 - len(S))
        gcv = n * residual_energy / freedom.square()
        return float(shares[gcv.argmin()]), target

    def to(self, after: Float[Tensor, "trajectory d_model"], map_type: str) -> LayerMap:
        """The map of a type to ``after``, states of the same trajectories."""
        expected = "two tensors [trajectory d_model] of one shape"
        got = f"{describe(self.x)} and {describe(after)}"
        require(self.shape == after.shape, "states", expected=expected, got=got)
        choice(map_type, MAPS, "map_type")
        x, y = self.x, finite(after.double(), "states after")
        zero = torch.zeros_like(x[0])
        plain = LayerMap(map_type=map_type, input=zero, output=zero)
        if map_type == "identity":
            return plain
        if map_type == "shift":
            return replace(plain, output=(y - x).mean(0))
        if map_type == "mean":
            return replace(plain, output=y.mean(0), scale=0.0)
        if map_type == "scaled":
            energy = float(x.square().sum())
            return replace(plain, scale=float((x * y).sum()) / energy if energy > 0 else 0.0)
        if map_type == "ridge":
            mean, (_, S, V) = self.centered
            penalty, target = self.ridge(y)
            return LayerMap(
                map_type=map_type,
                input=mean,
                output=y.mean(0),
                left=V,
                stretch=ridge_inverse(S, penalty),
                right=target.mT,
                penalty=penalty,
            )
        U, S, V = self.factors
        inverse = inverse_values(S)
        dropped = int((inverse == 0).sum())
        if map_type == "linear":
            return replace(plain, left=V, stretch=inverse, right=y.mT @ U, dropped=dropped)
        # "flow": rotation and stretch
        _, S_after, V_after = svd(y)
        V_after = V_after * torch.where((V * V_after).sum(0) < 0, -1.0, 1.0)
        return replace(plain, left=V, stretch=S_after * inverse, right=V_after, dropped=dropped)


def fit_map(
    before: Float[Tensor, "trajectory d_model"],
    after: Float[Tensor, "trajectory d_model"],
    map_type: str,
) -> LayerMap:
    """A map from states to later states of the same trajectories, by least squares within its type.

    - ``"identity"``: x;
    - ``"shift"``: x + mean(after - before);
    - ``"scaled"``: c x with the best c;
    - ``"linear"``: the best linear map ``M_after pinv(M_before)``, without intercept: in-sample the
      lower bound for the flow;
    - ``"ridge"``: the best affine map with a ridge penalty chosen by generalised cross-validation
      (Golub, Heath & Wahba 1979): the fair baseline where trajectories are few;
    - ``"mean"``: the constant mean(after);
    - ``"flow"``: rotation and stretch between the singular bases of the two states, in the order of
      their singular values and with signs that make the cosines of paired directions positive.

    Raises ``GeometryError`` for states of different shapes or not finite.

    >>> x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    >>> fit_map(x, x + 1, "shift").output.round(decimals=4).tolist()
    [1.0, 1.0, 1.0]
    """
    return MapsFrom(before).to(after, map_type)


class Fit(NamedTuple):
    """How well a map predicts states y by y~, over all trajectories."""

    relative_error: float
    """``|y - y~| / |y|`` (Frobenius)."""
    r2: float
    """Share of the variance about the mean of ``y`` that is explained (negative: worse than the
    mean)."""
    cosine: float
    """Mean over trajectories of the cosine between ``y`` and ``y~``."""


def score_map(
    moved: Float[Tensor, "trajectory d_model"], true: Float[Tensor, "trajectory d_model"]
) -> Fit:
    """Relative error, R^2 about the mean and mean cosine of the predictions ``moved``.

    >>> score_map(torch.eye(3), torch.eye(3))
    Fit(relative_error=0.0, r2=1.0, cosine=1.0)
    """
    moved, true = moved.double(), true.double()
    residual_energy = (true - moved).square().sum()
    spread = (true - true.mean(0)).square().sum()
    # the default eps of 1e-8 would shrink the cosines of short states
    cosine = torch.nn.functional.cosine_similarity(moved, true, dim=-1, eps=1e-300)
    return Fit(
        relative_error=float((residual_energy / true.square().sum()).sqrt()),
        r2=float(1 - residual_energy / spread) if spread > 0 else float("nan"),
        cosine=float(cosine.mean()),
    )


class ResidualStatistics(NamedTuple):
    """Statistics of a residual ``dx = x - x~``: mean m, variance v (n - 1) and kurtosis k of each
    coordinate over trajectories, then averaged over coordinates.

    As the text of the paper defines them: ``mean_over_sd`` = mean |m| / sqrt(v), ``log_variance`` =
    mean ln v, ``abs_kurtosis`` = mean |excess kurtosis|, the excess bias-corrected (0 for a
    Gaussian; G2 of Joanes & Gill 1998, MATLAB's flag 0 minus 3). The published code plots other
    numbers under these names: ``mean_over_variance`` = mean |m / v| as |mean|/sd,
    ``log10_mean_variance`` = log10(mean v) as the mean of ln v, and ``mean_abs_kurtosis_minus_3`` =
    mean |k| - 3 (k not in excess) as mean |k - 3|, which it equals only where every k is at least
    3.
    """

    mean_over_sd: float
    log_variance: float
    abs_kurtosis: float
    mean_over_variance: float
    log10_mean_variance: float
    mean_abs_kurtosis_minus_3: float
    degenerate: int
    """Coordinates without variance (left out)."""


def residual_statistics(residual: Float[Tensor, "trajectory d_model"]) -> ResidualStatistics:
    """The averages over coordinates that Fig. 4 of Sarfati et al. 2025 shows, as the text defines
    them and as published.

    >>> g = torch.Generator().manual_seed(0)
    >>> s = residual_statistics(torch.randn(500, 8, generator=g) * 2 + 1)
    >>> round(s.mean_over_sd, 1), round(s.log_variance, 1)
    (0.5, 1.4)
    """
    n = len(residual)
    # the unbiased kurtosis divides by n - 3
    require(n >= 4, "residuals", expected="at least 4 trajectories", got=n, instead="more chunks")
    values = residual.double()
    mean = values.mean(0)
    centered = values - mean
    second_moment = centered.square().mean(0)
    varies = varying(values)
    if not bool(varies.any()):
        return ResidualStatistics(*[float("nan")] * 6, degenerate=values.shape[1])
    fourth_moment = centered.square().square().mean(0)[varies]
    mean, second_moment = mean[varies], second_moment[varies]
    variance = second_moment * n / (n - 1)
    excess = (
        (n - 1) / ((n - 2) * (n - 3)) * ((n + 1) * (fourth_moment / second_moment.square() - 3) + 6)
    )
    return ResidualStatistics(
        mean_over_sd=float((mean.abs() / variance.sqrt()).mean()),
        log_variance=float(variance.log().mean()),
        abs_kurtosis=float(excess.abs().mean()),
        mean_over_variance=float((mean / variance).abs().mean()),
        log10_mean_variance=float(variance.mean().log10()),
        mean_abs_kurtosis_minus_3=float((excess + 3).abs().mean() - 3),
        degenerate=int((~varies).sum()),
    )


class Maps(NamedTuple):
    """Tables of one number per pair of state rows ``[start, end]``, NaN unless ``start < end``.
    :class:`ResidualStatistics` and :class:`Fit` define them."""

    mean_over_sd: Float[Tensor, "state state"]
    log_variance: Float[Tensor, "state state"]
    abs_kurtosis: Float[Tensor, "state state"]
    mean_over_variance: Float[Tensor, "state state"]
    log10_mean_variance: Float[Tensor, "state state"]
    mean_abs_kurtosis_minus_3: Float[Tensor, "state state"]
    relative_error: Float[Tensor, "state state"]
    r2: Float[Tensor, "state state"]
    cosine: Float[Tensor, "state state"]


MapOf = Callable[[int, int], LayerMap]
"""Gives the map from one state row to a later one."""


def residual_maps(
    X: Float[Tensor, "trajectory state d_model"],
    map_of: MapOf,
    *,
    first_end: int = 1,
    collect: Callable[[int, int, Tensor], None] | None = None,
) -> Maps:
    """Residual statistics and fit of ``x(end) - map(x(start))`` for all pairs of state rows, or
    those with an end from ``first_end`` on; one pair in memory at a time.

    ``map_of`` gives the map of a pair, fitted on these or on other trajectories (for the paper's
    map ``partial(flow_map, aligned_bases)``). ``collect(start, end, residual)`` receives every
    residual ``[trajectory d_model]``.
    """
    states = X.shape[1]
    require(states >= 2, "trajectories", expected="at least two states", got=states)
    table = np.full((len(Maps._fields), states, states), np.nan)
    for start in range(states - 1):
        mapped = MappedStates(X[:, start].double())
        for end in range(max(first_end, start + 1), states):
            true, moved = X[:, end].double(), mapped(map_of(start, end))
            residual = true - moved
            statistics = residual_statistics(residual)
            # 6: all statistics but the last, the count of degenerate coordinates
            table[:, start, end] = [*statistics[:6], *score_map(moved, true)]
            if collect is not None:
                collect(start, end, residual)
    return Maps(*torch.from_numpy(table).unbind(0))


def held_out_errors(
    train: Float[Tensor, "fitted state d_model"],
    test: Float[Tensor, "trajectory state d_model"],
    map_types: Sequence[str],
) -> dict[str, Float[Tensor, "state state"]]:
    """``|x(end) - map(x(start))| / |x(end)|`` (Frobenius norms over ``test``) of maps fitted on
    ``train``, by map type: ``[start end]``, NaN unless ``start < end``.

    >>> X = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> errors = held_out_errors(X[:10], X[10:] * 0 + 1, ("identity", "mean"))
    >>> errors["identity"][0, 1:].tolist()
    [0.0, 0.0]
    """
    states = train.shape[1]
    errors = {t: torch.full((states, states), torch.nan, dtype=torch.float64) for t in map_types}
    for start in range(states - 1):
        maps, start_states = MapsFrom(train[:, start]), test[:, start].double()
        # one for each type, as each type reads other coordinates of the start and caches them
        mapped = {map_type: MappedStates(start_states) for map_type in map_types}
        for end in range(start + 1, states):
            target = test[:, end].double()
            for map_type in map_types:
                residual = target - mapped[map_type](maps.to(train[:, end], map_type))
                errors[map_type][start, end] = residual.norm() / target.norm()
    return errors
