"""How much of a head's W_QK or W_OV is a diagonal plus a small block in the directions of position?
:func:`weight_geometry` answers for every head of a model (Song & Zhong 2023, Eq. 8 and Fig. 5).
Does the head read position, or the directions in which any average of states varies? Two nulls.

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

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import check_seed, require
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.base.linalg import ratio
from tl_geometry.base.tables import Table
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.resampling import noise_weights, window_means
from tl_geometry.decomposition.variance import reliability
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.reader import as_view
from tl_geometry.weights import bilinear
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.low_rank_diagonal import fit_low_rank_diagonal
from tl_geometry.weights.vocabulary import factors_of

DRAWS = 19
"""Draws of each null: the smallest p-value is 1 / 20."""
NULLS = ("noise", "random")
RANK, SHOWN = 20, 60
"""Largest dimension of the subspace, and directions of the block: those of Song & Zhong 2023."""
FIELDS = ("diagonal", "block", "L", "delta")
"""Tensors of a :class:`WeightGeometry`."""
NUMBERS = (
    *("k", "rank", "std", "threshold", "above_threshold"),
    *("concentration", "null", "lift", "excess", "noise_null", "noise_high", "p", "reliability"),
    *("r2_low_rank", "r2_diagonal", "r2_joint", "null_r2", "singular"),
)
"""Columns of a :class:`WeightGeometry`, behind layer and head."""
NO_NULL = f"fewer than {FEWEST} contexts or {FEWEST_GROUPS} groups: no null of position"


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightGeometry(Guarded, Table):
    """Low rank plus diagonal structure of W_QK or W_OV, one row per head (see
    :func:`weight_geometry`): a table of numbers (``geometry["excess"]`` is a column as a tensor),
    and matrices in the order of its rows.

    ``block`` is ``V^T W_o V`` over the shown directions, of which the first k span the subspace;
    W_o is W without ``diagonal``, its diagonal. ``L`` and ``delta`` are the joint least squares fit
    ``W = V L V^T + diag(delta)`` (zero padding in layers of lower rank).

    Columns: ``k``, the dimension of the subspace, and ``rank``, the numerical rank of the
    positional vectors at the head's layer (for W_OV the lower of the two states); ``std`` to
    ``concentration`` of :func:`tl_geometry.weights.bilinear.structure`. ``null`` is the exact
    expectation of ``concentration`` for a uniformly random subspace and ``lift`` the ratio of the
    two. ``noise_null`` and ``noise_high`` are its mean and maximum over subspaces estimated in the
    same way with positions destroyed (the noise null above), ``excess`` its ratio to that mean:
    above 1 where a head reads (or writes) position itself. ``p`` is the larger of the p-values
    against these and against drawn random subspaces, corrected for the choice among heads
    (:func:`familywise_p`); NaN below 10 contexts or 4 groups, and at least 1 / 20 with the default
    draws (1 / 4 with 4 groups, 1 / 11 with 5 or 6: no halves are drawn twice). ``reliability`` is
    the split-half cosine of the positional vectors, the lower of the two states for W_OV: below 0.5
    the subspace is mostly noise. ``r2_*`` are shares of ``|W|^2``, ``null_r2`` the expectation of
    ``r2_low_rank``; ``singular`` is defined in
    :class:`tl_geometry.weights.low_rank_diagonal.LowRankDiagonal`.
    """

    matrix: str
    heads: tuple[tuple[int, int], ...]
    diagonal: Float[Tensor, "head d_model"]
    block: Float[Tensor, "head row column"]
    L: Float[Tensor, "head rank rank"]
    delta: Float[Tensor, "head d_model"]

    def __getitem__(self, name: str) -> Tensor:
        return torch.tensor(self.df[name].to_numpy())


def weight_geometry(
    model: ModelLike,
    basis: PositionContext,
    matrix: str = "QK",
    *,
    layers: Iterable[int] | int | None = None,
    rank: int | None = None,
    shown: int = SHOWN,
    draws: int = DRAWS,
    seed: int = 0,
) -> WeightGeometry:
    """How much of every head's QK circuit W_QK (or OV circuit W_OV) is a diagonal plus a small
    block in the positional subspace.

    ``W = V L V^T + D + noise`` (Song & Zhong 2023, Eq. 8 and Fig. 5) with V the top singular
    directions of the positional vectors at the block's input; for W_OV the left basis is that of
    state l and the right one that of state l + 1.

    Args:
        model: a TransformerLens model.
        basis: its decomposition, with state l (and l + 1 for ``"OV"``) of every layer.
        matrix: ``"QK"`` or ``"OV"``.
        layers: which layers, by default all.
        rank: dimension of the subspace, by default the smaller of 20 and the numerical rank of the
            positional vectors.
        shown: number of directions in ``block`` (60 as in the published figure), at least ``rank``.
        draws: draws of each null, with ``seed`` (0 leaves them out).

    Weights and positional vectors are canonical, the same however the model was loaded; the
    published figure takes raw ones. W_QK of a rotary model is that of equal positions.

    Raises ``GeometryError`` for a basis of another model or without the states needed.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> tlg.weight_geometry(model, basis, layers=0)["concentration"].shape
    torch.Size([4])
    """
    view = as_view(model)
    require_basis(basis)
    basis.check_model(view)
    basis.require_identifiable("weight_geometry")
    checks.choice(matrix, bilinear.MATRICES, "matrix")
    chosen = checks.indices(layers, view.n_layers, "layers")
    step = int(matrix == "OV")  # W_OV reads state l and writes to state l + 1
    most = checks.count(RANK if rank is None else rank, "rank")
    shown, draws = checks.count(shown, "shown"), checks.count(draws, "draws", 0)
    seed = check_seed(seed, "seed")
    width = min(max(shown, most), view.d_model)
    most = min(most, width)
    centered = view.attention_norm(chosen[0]).norm_type == "LN"
    few = basis.contexts < FEWEST or int((basis.group_counts > 0).sum()) < FEWEST_GROUPS
    signs = noise_weights(basis, 0 if few else draws, seed)
    # two states are held: the state that a layer writes to is the one that the next reads
    subspace = lru_cache(2)(partial(_subspace, view, basis, signs, width, most, centered, seed))
    trust = dict(zip(basis.states, reliability(basis.moments).tolist(), strict=True))
    by_layer: list[dict[str, Tensor]] = []
    for layer, factors in factors_of(view, chosen, matrix):
        numbers = _of_layer(factors, subspace(layer), subspace(layer + step), most, centered)
        lowest = min(trust[layer], trust[layer + step])
        numbers["reliability"] = torch.full_like(numbers["null"], lowest)
        by_layer.append(numbers)
    columns = {name: torch.cat([n[name] for n in by_layer]).cpu() for name in by_layer[0]}
    columns |= _beside_nulls(columns)
    heads = tuple((l, h) for l in chosen for h in range(view.n_heads))
    flags = [NO_NULL] if draws and few else []
    flags += ["singular: some diagonal cells not determined"] if columns["singular"].any() else []
    numbers = zip(*(columns[name].tolist() for name in NUMBERS), strict=True)
    of_basis = ("corpus", "token_hash", "has_bos", "window", "contexts", "normalized")
    about: dict[str, Any] = {name: getattr(basis.provenance, name) for name in of_basis}
    about |= {"seed": seed, "flags": (*flags, *basis.remarks(view))}
    return WeightGeometry(
        provenance=view.provenance(sources=("song2023",), **about),
        names=("layer", "head", *NUMBERS),
        cells=tuple((*head, *row) for head, row in zip(heads, numbers, strict=True)),
        chance="null (random subspace) and noise_null (positions destroyed) of concentration",
        matrix=matrix,
        heads=heads,
        **{name: columns[name] for name in FIELDS},
    )


def _of_layer(
    factors: Factors, left: Subspace, right: Subspace, most: int, centered: bool
) -> dict[str, Tensor]:
    """All numbers of one layer, a row per head; those of the draws ``[head sample]``. W_QK has one
    and the same subspace on both sides."""
    rank = min(left.rank, right.rank)
    expected, instead = "positional vectors that differ", "a longer window"
    require(rank > 0, "basis", expected=expected, got="none", instead=instead)
    k = min(most, rank)
    V, U = left.directions, right.directions
    fit = fit_low_rank_diagonal(factors, V[:, :k], U[:, :k])
    numbers = {"diagonal": factors.diagonal, **bilinear.structure(factors, V, U, k=k)}
    numbers |= fit._asdict() | _drawn(factors, left, right, k)
    null = partial(bilinear.haar_null, factors, k, one_basis=right is left, centered=centered)
    numbers |= {"null": null(), "null_r2": null(off_diagonal=False)}
    # layers of lower rank are padded with zeros, so that L of all heads is one tensor
    numbers["L"] = torch.nn.functional.pad(fit.L, (0, most - k, 0, most - k))
    n_heads = len(fit.L)
    numbers["singular"] = fit.singular.expand(n_heads)
    return numbers | {"k": torch.full((n_heads,), k), "rank": torch.full((n_heads,), rank)}


def _beside_nulls(columns: dict[str, Tensor]) -> dict[str, Float[Tensor, " head"]]:
    """Concentration beside its nulls: p is the larger of those against both that are drawn."""
    values, noise = columns["concentration"], columns["noise"]
    noise_null = noise.mean(1)
    return {
        "lift": values / columns["null"],
        "excess": values / noise_null,
        "noise_null": noise_null,
        "noise_high": noise.amax(1) if noise.shape[1] else noise_null,  # NaN without draws
        "p": torch.maximum(*(familywise_p(values, columns[null]) for null in NULLS)),
    }


class Subspace(NamedTuple):
    """The number ``rank`` of positional directions of one state, the leading ones, strongest first,
    and those of every draw of the two nulls."""

    rank: int
    directions: Float[Tensor, "d_model column"]
    noise: Float[Tensor, "sample d_model column"]
    random: Float[Tensor, "sample d_model column"]


def _subspace(
    view: ModelView,
    basis: PositionContext,
    signs: Tensor,
    width: int,
    k: int,
    centered: bool,
    seed: int,
    state: int,
) -> Subspace:
    """The ``width`` leading positional directions of a state, and the ``k`` leading ones of each
    draw.

    ``signs`` split the corpus into halves, the same for all states, a row per draw
    (:func:`tl_geometry.decomposition.resampling.noise_weights`); ``centered`` removes means over
    d_model, as a LayerNorm does.
    """
    row = basis.index(state)
    pos = basis.pos[row]
    directions, _, rank = bilinear.leading_directions(pos, width, centered=centered)
    noise = window_means(basis, row, signs)
    # centred over positions, as the positional vectors are
    noise = noise - noise.mean(1, keepdim=True)
    # a seed for each state: the null of a layer is the same whichever layers are asked for. No
    # model has a million states, so that no two seeds share a generator
    generator = torch.Generator().manual_seed(seed * 1_000_003 + state)
    size = (len(signs), pos.shape[1], k)
    normal = torch.randn(size, generator=generator, dtype=torch.float64)
    if centered:  # positional directions lie in the hyperplane of the norm too
        noise, normal = remove_mean(noise), remove_mean(normal, axes=(1,))
    found = (directions, _leading(noise, k), torch.linalg.qr(normal).Q)
    return Subspace(rank, *(x.to(view.device) for x in found))


def _leading(rows: Float[Tensor, "sample row d_model"], k: int) -> Tensor:
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


def _drawn(factors: Factors, left: Subspace, right: Subspace, k: int) -> dict[str, Tensor]:
    """Concentration of W_o in the first ``k`` directions of every draw of each null ``[head
    sample]``."""
    energy, found = factors.off_diagonal_energy, {}
    for null in NULLS:
        pairs = zip(getattr(left, null), getattr(right, null), strict=True)
        blocks = [bilinear.rotated_block(factors, V[:, :k], U[:, :k]) for V, U in pairs]
        shares = [ratio(block.square().sum((-2, -1)), energy) for block in blocks]
        found[null] = torch.stack(shares, 1) if shares else energy.new_zeros(len(energy), 0)
    return found


def familywise_p(
    values: Float[Tensor, " head"], draws: Float[Tensor, "head sample"]
) -> Float[Tensor, " head"]:
    """p-value of each head, corrected for the choice among all heads: the share of draws, the data
    counted as one of them, in which *some* head exceeds its own mean over the other draws by as
    large a factor.

    This is Westfall and Young's maximum over heads, of the ratios ``x_i / mean_(j != i) x_j`` with
    i and j draws; NaN without draws.

    >>> familywise_p(torch.tensor([2.0, 1.0]), torch.ones(2, 19)).tolist()
    [0.05000000074505806, 1.0]
    """
    n_draws = draws.shape[1]
    if not n_draws:
        return torch.full_like(values, torch.nan)
    with_data = torch.cat([values[:, None], draws], 1)
    mean_of_others = (with_data.sum(1, keepdim=True) - with_data) / n_draws
    # a head without a ratio (0 / 0) must not be the maximum
    factors = torch.nan_to_num(with_data / mean_of_others, nan=-torch.inf)
    n_as_high = (factors[:, 1:].amax(0) >= factors[:, :1]).sum(1)
    p = (1 + n_as_high).to(values) / (1 + n_draws)
    return torch.where(values.isnan(), torch.nan, p)
