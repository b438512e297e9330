"""What do attributions predict for a knockout of a head? :func:`head_attributions` gives three
predictions for the same replacement of its mixed values, z by z_new;
:func:`tl_geometry.interventions.head_knockouts` sets them beside what the knockout does.

Each is ``sum (z - z_new) . dT/dz`` with T a difference of two logits. They differ in the paths from
the head to the logits that dT/dz counts:

- direct: straight to the final norm, at its frozen scale; at the position of the logits alone
- value paths: also through later heads and MLPs, with patterns, norms and MLP slopes frozen
  (:mod:`tl_geometry.circuits.frozen`)
- all paths: also through the patterns of later heads, to first order
"""

from __future__ import annotations

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.circuits.frozen import Adjoints, FrozenPass
from tl_geometry.circuits.trace import logit_readout
from tl_geometry.models.model_view import ModelView


def head_attributions(
    view: ModelView,
    tokens: Int[Tensor, "1 position"],
    removed: Float[Tensor, "layer position head d_head"],
    position: int,
    ids: tuple[int, int],
) -> Float[Tensor, "row layer head"]:
    """``sum_i (z_i - z_new_i) . dT/dz_i`` of every head over positions i of one prompt, with T the
    logit of the first of ``ids`` minus that of the second; ``removed`` is ``z - z_new``. The rows
    are direct, value paths, all paths."""
    frozen = FrozenPass.of(view, tokens)
    readout = logit_readout(view, frozen, position, ids[0], ids[1], log_probability=False)
    entry = torch.zeros_like(frozen.last)
    entry[0, position] = readout.direction.to(entry)
    direct = torch.stack(
        [
            einsum(removed[l, position], block.heads.W, readout.direction, "h e, h e d, d -> h")
            * block.heads.scale[0, position]
            for l, block in enumerate(frozen.blocks)
        ]
    )
    value_paths, all_paths = (
        _through(removed, frozen.adjoints(entry, follow_patterns=follow))
        for follow in (False, True)
    )
    return torch.stack([direct.double().cpu(), value_paths, all_paths])


def _through(
    removed: Float[Tensor, "layer position head d_head"], adjoints: Adjoints
) -> Float[Tensor, "layer head"]:
    """``sum_i removed_i . dT/dz_i`` of every head, in float64: a sum over all positions."""
    head_adjoints = torch.stack([of_layer[0] for of_layer in adjoints.heads]).double()
    return einsum(removed.double(), head_adjoints, "l i h e, l i h e -> l h").cpu()
