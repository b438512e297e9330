"""What are the rotation and the stretches of a flow between two states? Interpolates them for
:class:`tl_geometry.flow.LangevinModel`. R follows the geodesic ``U_k exp(a log(U_k^T U_{k+1}))``,
with a the share of the interval that has passed; ``ln sigma_i`` is a cubic spline through the
states, so that sigma stays positive. Times are layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from einops import einsum
from jaxtyping import Float
from scipy.interpolate import CubicSpline
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.linalg import rotation_log

NODES, WEIGHTS = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(16))
"""Nodes and weights of the 16-point Gauss-Legendre rule on [-1, 1], exact up to degree 31."""


@dataclass(frozen=True, eq=False)
class GeodesicPath:
    """Rotations ``U`` (determinant +1 between states) and singular values ``S`` at ``times``
    (layers), interpolated between them.

    >>> U, S = torch.eye(2).repeat(2, 1, 1), torch.tensor([[1.0, 2.0], [4.0, 2.0]])
    >>> path = GeodesicPath(U.double(), S.double(), torch.tensor([1.0, 2.0]).double())
    >>> path.sigma(1.5).tolist(), path.locate(1.5)
    ([2.0, 2.0], (0, 0.5))
    """

    U: Float[Tensor, "state rank rank"]
    S: Float[Tensor, "state rank"]
    times: Float[Tensor, " state"]

    @cached_property
    def spline(self) -> CubicSpline:
        """``ln sigma`` over the layers."""
        return CubicSpline(self.times.numpy(), self.S.log().cpu().numpy(), axis=0)

    @cached_property
    def logs(self) -> Float[Tensor, "row rank rank"]:
        """``log(U_k^T U_{k+1})`` of each interval, skew-symmetric, from real Schur forms."""
        pairs = zip(self.U[:-1], self.U[1:], strict=True)
        return torch.stack([rotation_log(here.mT @ there) for here, there in pairs])

    def locate(self, t: float) -> tuple[int, float]:
        """Index of the interval that holds time ``t``, and the share of it that has passed.

        Intervals are half-open: state k begins interval k; only the last state ends its interval.
        """
        first, last = float(self.times[0]), float(self.times[-1])
        slack = 1e-9 * max(1.0, last)  # a time that is a sum of steps carries rounding errors
        inside = first - slack <= t <= last + slack
        require(inside, "time", expected=f"{first:g} to {last:g} (layers)", got=t)
        time = torch.tensor(t, dtype=torch.float64)
        k = int(torch.searchsorted(self.times, time, right=True)) - 1
        # the last state, and times within the slack, lie outside all half-open intervals
        k = min(max(k, 0), len(self.times) - 2)
        return k, (t - float(self.times[k])) / self.length(k)

    def length(self, k: int) -> float:
        """Layers of interval ``k``."""
        return float(self.times[k + 1] - self.times[k])

    def require_ordered(self, start: float, end: float) -> None:
        """Refuse times that are not on the path, or run backward."""
        self.locate(start)
        self.locate(end)
        require(start <= end, "times", expected="start <= end", got=f"{start:g} and {end:g}")

    def sigma(self, t: float) -> Float[Tensor, " rank"]:
        """``sigma_i`` at time ``t``, from the spline of their logarithms."""
        self.locate(t)
        return torch.from_numpy(np.exp(self.spline(t))).to(self.S.device)

    def stretch_rate(self, t: float) -> Float[Tensor, " rank"]:
        """``sigma_i' / sigma_i``, per layer: the derivative of the spline of ``ln sigma``."""
        self.locate(t)
        return torch.from_numpy(self.spline(t, 1)).to(self.S.device)

    def rotation(self, t: float) -> Float[Tensor, "rank rank"]:
        """``R(t)``; at a state exactly its ``U``."""
        k, a = self.locate(t)
        # at a state: log and exp would only add their rounding
        if abs(a) < 1e-12 or abs(a - 1) < 1e-12:
            return self.U[k + round(a)]
        return self.U[k] @ torch.linalg.matrix_exp(a * self.logs[k])

    def turning(self, k: int) -> Float[Tensor, "rank rank"]:
        """``R' R^T``, constant within interval ``k``: ``U_k logs[k] U_k^T / length``."""
        return self.U[k] @ self.logs[k] @ self.U[k].mT / self.length(k)

    def integral(self, start: float, end: float, rate: float) -> Float[Tensor, " rank"]:
        """``integral e^{rate u} sigma_i(u)^{-2} du`` from ``start`` to ``end``, by 16-point
        Gauss-Legendre on each interval."""
        # third derivatives of a cubic spline jump at the states: across one the rule loses order
        inner_states = [float(v) for v in self.times if start < float(v) < end]
        total = torch.zeros(self.S.shape[1], dtype=torch.float64)
        for left, right in zip([start, *inner_states], [*inner_states, end]):
            u = (left + right) / 2 + (right - left) / 2 * NODES
            values = torch.exp(rate * u[:, None] - 2 * torch.from_numpy(self.spline(u.numpy())))
            total = total + (right - left) / 2 * einsum(
                WEIGHTS, values, "sample, sample rank -> rank"
            )
        return total.to(self.S.device)
