"""How far the maps of :mod:`tl_geometry.flow.residuals`, fitted on some trajectories, miss others,
for all pairs of states.

Every baseline predicts a test state from the training states of the same layer: with Y and E the
training and the test trajectories ``[trajectory d_model]`` at the end, ``E~ = K Y + c X`` (X the
test trajectories at the start). K and c depend on the start (and on the penalty of a ridge
regression), Y and E on the end, so that the energy of what is missed needs only inner products:

    |E - E~|^2 = |E|^2 - 2 <K, E Y^T> + <K^T K, Y Y^T> + ...

which is N^2 operations for each pair of states in place of N^2 d_model. Where it cancels (a map
that leaves less than a hundredth), or where there are more trajectories than dimensions, the map is
applied and its residual summed instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.flow.alignment import inverse_values
from tl_geometry.flow.residuals import MapsFrom, ridge_inverse

CANCELS = 1e-4
"""Share of the energy below which the difference of energies has lost too many digits."""
CHUNK = 64
"""Trajectories that are held in float64 at a time."""


def held_out_errors(
    train: Float[Tensor, "fitted state d_model"],
    test: Float[Tensor, "trajectory state d_model"],
    map_types: Sequence[str],
) -> dict[str, Float[Tensor, "state state"]]:
    """``|x(end) - map(x(start))| / |x(end)|`` over ``test`` of maps that were fitted on ``train``,
    for all pairs of states.

    >>> X = torch.randn(20, 3, 4, generator=torch.Generator().manual_seed(0))
    >>> errors = held_out_errors(X[:10], X[10:] * 0 + 1, ("identity", "mean"))
    >>> errors["identity"][0, 1:].tolist()
    [0.0, 0.0]
    """
    states = train.shape[1]
    out = {t: torch.full((states, states), torch.nan, dtype=torch.float64) for t in map_types}
    ends = _Ends(train, test) if len(train) <= train.shape[-1] else None
    for start in range(states - 1):
        maps, x = MapsFrom(train[:, start]), test[:, start].double()
        kernels = _Kernels(maps, x) if ends is not None else None
        for end in range(start + 1, states):
            after, y = train[:, end], test[:, end].double()
            size = y.square().sum()
            for name in map_types:
                share = None
                if ends is not None and kernels is not None and name != "flow":
                    share = ends.missed(kernels, name, start, end) / size
                if share is None or not share > CANCELS:
                    share = (y - maps.to(after, name)(x)).square().sum() / size
                out[name][start, end] = share.sqrt()
    return out


class _Ends:
    """Inner products of all states with each other, over the test trajectories and between training
    and test."""

    def __init__(self, train: Tensor, test: Tensor) -> None:
        self.trajectories = len(test)
        self.rows = [train[:, s].double() for s in range(train.shape[1])]
        self.own = [y @ y.mT for y in self.rows]
        self.across = [test[:, s].double() @ y.mT for s, y in enumerate(self.rows)]
        self.inner = _inner(test)
        self.inner_train = _inner(train)
        self.mean = torch.stack([y.mean(0) for y in self.rows])
        self.total = torch.stack([test[:, s].double().sum(0) for s in range(test.shape[1])])

    def missed(self, kernels: _Kernels, name: str, start: int, end: int) -> Tensor:
        """``|E - E~|^2`` of a type of map from one state to another."""
        n, inner, mean, total = self.trajectories, self.inner, self.mean, self.total
        energy = inner[end, end]
        if name == "mean":
            return energy - 2 * total[end] @ mean[end] + n * mean[end] @ mean[end]
        if name in ("identity", "shift", "scaled"):
            own = self.inner_train[start]
            scale = own[end] / own[start].clamp(min=1e-300) if name == "scaled" else 1.0
            left = energy - 2 * scale * inner[start, end] + scale**2 * inner[start, start]
            if name != "shift":
                return left
            step = mean[end] - mean[start]
            return left - 2 * (total[end] - total[start]) @ step + n * step @ step
        kernel, square = kernels.of(name, self.rows[end])
        return energy - 2 * (kernel * self.across[end]).sum() + (square * self.own[end]).sum()


class _Kernels:
    """``K`` and ``K^T K`` of the maps from one state, by type and penalty."""

    def __init__(self, maps: MapsFrom, x: Float[Tensor, "trajectory d_model"]) -> None:
        self.maps, self.x = maps, x
        self.made: dict[tuple[str, float], tuple[Tensor, Tensor]] = {}

    def of(self, name: str, y: Float[Tensor, "trajectory d_model"]) -> tuple[Tensor, Tensor]:
        """The kernel of a linear map to ``y``."""
        penalty = self.maps.ridge(y)[0] if name == "ridge" else 0.0
        if (name, penalty) not in self.made:
            self.made[name, penalty] = self._make(name, penalty)
        return self.made[name, penalty]

    def _make(self, name: str, penalty: float) -> tuple[Tensor, Tensor]:
        if name == "ridge":
            mean, (U, S, V) = self.maps.centered
            K = ((self.x - mean) @ V * ridge_inverse(S, penalty)) @ U.mT
            K += (1 - K.sum(1, keepdim=True)) / K.shape[1]  # about the mean of the end
        else:
            U, S, V = self.maps.factors
            K = (self.x @ V * inverse_values(S)) @ U.mT
        return K, K.mT @ K


def _inner(X: Float[Tensor, "trajectory state d_model"]) -> Float[Tensor, "state state"]:
    """``sum over trajectories of <x(s), x(t)>``."""
    found = torch.zeros(X.shape[1], X.shape[1], dtype=torch.float64, device=X.device)
    for part in X.split(CHUNK):
        rows = rearrange(part.double(), "n state d -> state (n d)")
        found += rows @ rows.mT
    return found
