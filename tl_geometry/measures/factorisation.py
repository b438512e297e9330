"""Does a head's attention factorise into a position kernel and a content kernel? Measures how far a
model is from it (Song & Zhong 2023, section 4, Eq. 9 to 12, Theorem 2).

A state is x = c + t, context plus position, and attention has the kernel ``exp(x^T W x')``. If W is
the sum of a part for positions, ``V L V^T``, and a part for contexts, a diagonal, and the two bases
are incoherent, each part sees its own basis only. The gap is what is left of the score:

    r = (c + t)^T W (c' + t') - t^T V L V^T t' - c^T diag(delta) c'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import fail, require
from tl_geometry.base.linalg import normalize_rows
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.measures import contextual
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.reader import as_view
from tl_geometry.weights import bilinear
from tl_geometry.weights.heads import weight_geometry


@dataclass(frozen=True, eq=False, kw_only=True)
class KernelGaps(Result):
    """What :func:`kernel_gaps` returns: a row per head.

    ``relative`` is the gap's root mean square over that of the scores (0: attention factorises),
    ``relative_random`` the same with isotropic directions in place of the positional ones;
    ``gap_max`` the largest gap; ``explained`` the share of ``|W|^2`` that the structured weights
    hold; ``incoherence_max`` and ``incoherence_avg`` belong to the layer.
    """

    heads: tuple[tuple[int, int], ...]
    relative: Float[Tensor, " head"]
    relative_random: Float[Tensor, " head"]
    gap_max: Float[Tensor, " head"]
    explained: Float[Tensor, " head"]
    incoherence_max: Float[Tensor, " head"]
    incoherence_avg: Float[Tensor, " head"]
    table_axes = ("head",)
    table_values = (
        "relative",
        "relative_random",
        "gap_max",
        "explained",
        "incoherence_max",
        "incoherence_avg",
    )


class StructuredGaps(NamedTuple):
    """Root mean square and largest gap, and root mean square score, one number per head."""

    r_rms: Float[Tensor, " head"]
    r_max: Float[Tensor, " head"]
    score_rms: Float[Tensor, " head"]

    @property
    def relative(self) -> Float[Tensor, " head"]:
        """Root mean square of the gap over that of the scores; NaN for scores of zero."""
        return torch.where(self.score_rms > 0, self.r_rms / self.score_rms, torch.nan)


def structured_gaps(
    pos: Float[Tensor, "position d_model"],
    cvec: Float[Tensor, "sample d_model"],
    V: Float[Tensor, "d_model rank"],
    L: Float[Tensor, "head rank rank"],
    delta: Float[Tensor, "head d_model"],
    *,
    pairs: int = 4096,
    seed: int = 0,
) -> StructuredGaps:
    """The gap r of ``W = V L V^T + diag(delta)`` of every head, over random pairs of states.

    Bases are the unit rows of ``cvec`` (c) and ``pos`` (t), zero rows left out; each query and each
    key is a random c plus a random t. No d_model x d_model matrix is formed: directions are
    projected on V once for all heads.

    >>> e = torch.eye(4).double()
    >>> L, delta = torch.ones(1, 2, 2).double(), (e[2] + e[3])[None]
    >>> g = structured_gaps(e[:2], e[2:], e[:, :2], L, delta)
    >>> g.r_max.tolist()
    [0.0]
    """
    generator = torch.Generator().manual_seed(seed)
    bases = [_unit_rows(rows) for rows in (cvec, pos)]

    def draw() -> tuple[Tensor, Tensor]:
        context, position = (
            rows[torch.randint(len(rows), (pairs,), generator=generator)] for rows in bases
        )
        return context, position

    (q_context, q_position), (k_context, k_position) = draw(), draw()
    V, L, delta = V.double(), L.double(), delta.double()

    def low_rank(q: Tensor, k: Tensor) -> Float[Tensor, "head sample"]:
        return einsum(q @ V, L, k @ V, "sample i, head i j, sample j -> head sample")

    def diagonal(q: Tensor, k: Tensor) -> Float[Tensor, "head sample"]:
        return einsum(q * k, delta, "sample d_model, head d_model -> head sample")

    q, k = q_context + q_position, k_context + k_position
    score = low_rank(q, k) + diagonal(q, k)
    gap = score - low_rank(q_position, k_position) - diagonal(q_context, k_context)
    return StructuredGaps(
        r_rms=gap.square().mean(-1).sqrt(),
        r_max=gap.abs().amax(-1),
        score_rms=score.square().mean(-1).sqrt(),
    )


def _unit_rows(rows: Tensor) -> Float[Tensor, "row d_model"]:
    unit, zero = normalize_rows(rows.double())
    only_zero = bool(zero.all())
    require(not only_zero, "bases", expected="a direction in each", got="only zero rows")
    return unit[~zero]


def kernel_gaps(
    model: ModelLike,
    basis: PositionContext,
    *,
    layers: Iterable[int] | int | None = None,
    rank: int | None = None,
    pairs: int = 4096,
    seed: int = 0,
) -> KernelGaps:
    """How far each head's scores are from the product of a position kernel and a content kernel
    (Song & Zhong 2023, Theorem 2).

    W_QK is replaced by its best ``V L V^T + D`` (Eq. 8, :func:`tl_geometry.weight_geometry`), V the
    leading positional directions at the block's input. For unit positional and context vectors of
    the basis (cvec of the sampled contexts), position is expected to see V L V^T only and context D
    only; the gap is everything else. The theorem bounds it by the *largest* incoherence of the
    bases, which real models do not make small: read the gap, and how much of W the structure holds
    at all.

    Raises ``GeometryError`` for a basis of another model or without sampled contexts.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> gaps = kernel_gaps(model, tlg.decompose(model, windows, progress=False), layers=0)
    >>> gaps.relative.shape, bool((gaps.relative >= 0).all())
    (torch.Size([4]), True)
    """
    view = as_view(model)
    require_basis(basis)
    if basis.samples is None:
        fail("basis", expected="sampled contexts", got="none", instead="decompose(..., keep=32)")
    geometry = weight_geometry(
        view, basis, "QK", layers=layers, rank=rank, draws=0, shown=rank or 20, seed=seed
    )
    width, n_heads = geometry.L.shape[-1], view.n_heads
    per_head: list[dict[str, Tensor]] = []
    for i, layer in enumerate(geometry.layers):
        row, norm = basis.index(layer), view.attention_norm(layer).norm_type
        h = basis.samples[:, row, slice(*basis.window)].double()
        cvec = remove_mean((h - basis.mean[row] - basis.pos[row]).flatten(0, 1), norm)
        pos = remove_mean(basis.pos[row], norm)
        generator = torch.Generator().manual_seed(seed)
        random = torch.randn(pos.shape, generator=generator, dtype=torch.float64)
        V = bilinear.leading_directions(basis.pos[row], width, centered=norm == "LN")[0]
        heads = slice(i * n_heads, (i + 1) * n_heads)
        gaps, null = (
            structured_gaps(
                p, cvec, V, geometry.L[heads], geometry.delta[heads], pairs=pairs, seed=seed
            )
            for p in (pos, remove_mean(random, norm))
        )
        incoherent = contextual.incoherence(pos, cvec)
        numbers = {
            "relative": gaps.relative,
            "relative_random": null.relative,
            "gap_max": gaps.r_max,
            "explained": geometry.r2_joint[heads],
            "incoherence_max": incoherent.max.expand(n_heads),
            "incoherence_avg": incoherent.avg.expand(n_heads),
        }
        per_head.append(numbers)
    return KernelGaps(
        provenance=dataclasses.replace(geometry.provenance, seed=seed),
        heads=geometry.heads,
        **{name: torch.cat([numbers[name] for numbers in per_head]) for name in per_head[0]},
    )
