"""Planted data: activations whose parts are known, with outlier coordinates, offsets and every size
that a test asks for; and what a planted result says of where it comes from."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_geometry import GeometryError
from tl_geometry.base.results import Provenance

__all__ = ["Provenance", "marginals", "normal", "random_states", "refused"]


def refused(call: Callable[[], object], kind: Any = GeometryError, what: str = "") -> Any:
    """The error of a call, whose text names ``what``."""
    with pytest.raises(kind) as caught:
        call()
    assert what in str(caught.value), caught.value
    return caught.value


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_states(
    states: int, contexts: int, positions: int, d_model: int, *, seed: int = 0, offset: float = 3.0
) -> Tensor:
    """Random float64 states ``[state context position d_model]`` with a mean, correlated
    coordinates and one outlier coordinate."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    h = draw(states, contexts, positions, d_model) @ draw(d_model, d_model)
    h = h + offset * draw(states, 1, 1, d_model) + draw(states, 1, positions, d_model)
    h = h + draw(states, contexts, 1, d_model)
    h[..., 0] += 50 * offset
    return h


def marginals(table: Any) -> SimpleNamespace:
    """Shares of the ``parts`` of a share table by side: ``cs`` and ``gs`` ``[head side part]``,
    summed over the parts of the other side. ALiBi counts as a part on both."""
    parts = tuple(dict.fromkeys(part for pair in table.pairs for part in pair))
    member = torch.tensor(
        [[[pair[side] == name for name in parts] for side in (0, 1)] for pair in table.pairs]
    ).double()
    cs, gs = (torch.einsum("ht,tsp->hsp", x, member) for x in (table.cs, table.gs))
    return SimpleNamespace(parts=parts, cs=cs, gs=gs)
