"""How large is the error of maps between states on trajectories they were not fitted on? Computes
the baselines of :func:`tl_geometry.flow_report`, for all pairs of states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.flow.residuals import MappedStates, MapsFrom


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
