"""Does a head read position, or the directions in which any average of states varies? Gives
:func:`tl_geometry.weight_geometry` the positional subspaces of a basis and those of two nulls.

The noise null: T averages of states always have leading directions. They are those in which states
vary most along slowly varying text, whether or not position has an effect. So positional directions
are compared with the leading directions of the difference between two random halves of the corpus:
the effect of position, common to all contexts, cancels, and the noise of an average stays
(:func:`tl_geometry.decomposition.resampling.noise_weights`).

The random null: uniformly random subspaces, for the chance that true positional directions happen
to align with some head.

Two other nulls fail. Random combinations of states are too weak: in SmolLM2's L7H7 they held 0.80%
of W_QK and the true positions 1.34%, but windows of source code rolled by random offsets, where
position means nothing, held 1.89%. Groups of contexts that are only shifted against each other keep
the directions of a strong effect, and so hide it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.resampling import noise_weights, window_means
from tl_geometry.weights import bilinear

DRAWS = 19
"""Draws of each null: the smallest p-value is 1 / 20."""


class Draws(NamedTuple):
    """One entry per draw of the two nulls: subspaces ``[sample d_model rank]``, or the share of
    each head that lies in them ``[sample head]``."""

    noise: Float[Tensor, "sample ..."]
    random: Float[Tensor, "sample ..."]


class Subspace(NamedTuple):
    """The positional directions of one state, strongest first, their number ``rank``, and the
    directions of every draw (no draws where contexts or groups are too few)."""

    directions: Float[Tensor, "d_model column"]
    rank: int
    draws: Draws

    def to(self, device: torch.device) -> Subspace:
        """The same on another device."""
        draws = Draws(*(directions.to(device) for directions in self.draws))
        return Subspace(self.directions.to(device), self.rank, draws)


class Subspaces:
    """The positional subspaces of a basis, state by state: at most ``width`` directions, and ``k``
    in each draw. A draw splits the corpus into the same halves for all states."""

    def __init__(
        self,
        basis: PositionContext,
        *,
        width: int,
        k: int,
        centered: bool,
        draws: int = DRAWS,
        seed: int = 0,
    ) -> None:
        self.basis, self.width, self.k, self.centered = basis, width, k, centered
        few = basis.contexts < FEWEST or int((basis.group_counts > 0).sum()) < FEWEST_GROUPS
        self.signs = noise_weights(basis, 0 if few else draws, seed)
        self.seed = seed
        self.held: dict[int, Subspace] = {}

    def at(self, state: int) -> Subspace:
        """The subspace of one state. That of the state before is cached, because W_OV reads state l
        and writes to state l + 1."""
        if state not in self.held:
            row = self.basis.index(state)
            pos, size = self.basis.pos[row], (len(self.signs), self.basis.pos.shape[2], self.k)
            directions, _, rank = bilinear.leading_directions(
                pos, self.width, centered=self.centered
            )
            noise = window_means(self.basis, row, self.signs)
            # centred over positions, as the positional vectors are
            noise = noise - noise.mean(1, keepdim=True)
            if self.centered:
                noise = noise - noise.mean(2, keepdim=True)
            # a seed for each state: the null of a layer is the same whichever layers are asked for
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + state)
            normal = torch.randn(size, generator=generator, dtype=torch.float64)
            if self.centered:  # positional directions lie in the hyperplane of the norm too
                normal = normal - normal.mean(1, keepdim=True)
            draws = Draws(_leading(noise, self.k), torch.linalg.qr(normal).Q)
            # at most two states are held: W_OV of the next layer reads the state this one writes to
            self.held = {s: v for s, v in self.held.items() if s == state - 1}
            self.held[state] = Subspace(directions, rank, draws)
        return self.held[state]


def _leading(
    rows: Float[Tensor, "sample row d_model"], k: int
) -> Float[Tensor, "sample d_model column"]:
    """The k leading right singular vectors, from the smaller Gram matrix: a third of the time of an
    SVD, and accurate enough for singular values above 1e-6 of the first. Columns beyond the rank
    are zero."""
    wide = rows.shape[1] < rows.shape[2]
    values, vectors = torch.linalg.eigh(rows @ rows.mT if wide else rows.mT @ rows)
    values, vectors = values.flip(-1)[:, None, :k], vectors.flip(-1)[..., :k]
    present = values > 1e-12 * values[..., :1]  # eigenvalues: 1e-6 in singular values
    if wide:
        vectors = rows.mT @ vectors / torch.where(present, values, 1.0).sqrt()
    vectors = torch.where(present, vectors, 0.0)
    return torch.nn.functional.pad(vectors, (0, k - vectors.shape[-1]))


def drawn_concentration(
    factors: bilinear.Factors, left: Subspace, right: Subspace | None, k: int
) -> Draws:
    """Concentration of W_o in the subspaces of every draw, ``[sample head]`` (NaN where W_o is
    zero)."""
    off_diagonal_energy = factors.off_diagonal_energy

    def concentrations(left: Tensor, right: Tensor) -> Tensor:
        blocks = [
            bilinear.rotated_block(factors, left_directions[:, :k], right_directions[:, :k])
            .square()
            .sum((-2, -1))
            for left_directions, right_directions in zip(left, right, strict=True)
        ]
        energy = (
            torch.stack(blocks)
            if blocks
            else off_diagonal_energy.new_zeros(0, len(off_diagonal_energy))
        )
        return torch.where(off_diagonal_energy > 0, energy / off_diagonal_energy, torch.nan)

    return Draws(
        *(concentrations(*pair) for pair in zip(left.draws, (right or left).draws, strict=True))
    )


def familywise_p(
    values: Float[Tensor, " head"], draws: Float[Tensor, "sample head"]
) -> Float[Tensor, " head"]:
    """p-value of each head, corrected for the choice among all heads: the share of draws, the data
    counted as one of them, in which *some* head exceeds its own mean over the other draws by as
    large a factor.

    This is Westfall and Young's maximum over heads, of the ratios ``x_i / mean_(j != i) x_j`` with
    i and j draws; NaN without draws.

    >>> familywise_p(torch.tensor([2.0, 1.0]), torch.ones(19, 2)).tolist()
    [0.05000000074505806, 1.0]
    """
    if not len(draws):
        return torch.full_like(values, torch.nan)
    with_data = torch.cat([values[None], draws])
    mean_of_others = (with_data.sum(0) - with_data) / len(draws)
    # a head without a ratio (0 / 0) must not be the maximum
    ratio = torch.nan_to_num(with_data / mean_of_others, nan=-torch.inf)
    n_as_high = (ratio[1:].amax(1, keepdim=True) >= ratio[0]).sum(0)
    p = (1 + n_as_high).to(values) / (1 + len(draws))
    return torch.where(values.isnan(), torch.nan, p)
