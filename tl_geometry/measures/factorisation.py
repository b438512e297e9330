"""Whether a model's own heads and bases factorise as the theorem on kernels wants:
:func:`kernel_gaps`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import fail
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.measures import contextual, kernels
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

    def columns(self) -> Sequence[str]:
        """Column names of the table."""
        return (
            "layer",
            "head",
            "relative",
            "relative_random",
            "gap_max",
            "explained",
            "incoherence_max",
            "incoherence_avg",
        )

    def rows(self) -> Sequence[Sequence[object]]:
        """Rows of the table."""
        values = [getattr(self, name) for name in self.columns()[2:]]
        return [[*head, *(float(v[i]) for v in values)] for i, head in enumerate(self.heads)]


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
    width, per_layer = geometry.L.shape[-1], view.n_heads
    found: list[dict[str, Tensor]] = []
    for i, layer in enumerate(geometry.layers):
        row, norm = basis.index(layer), view.attention_norm(layer).norm_type
        pos = remove_mean(basis.pos[row], norm)
        h = basis.samples[:, row, slice(*basis.window)].double()
        cvec = remove_mean((h - basis.mean[row] - basis.pos[row]).flatten(0, 1), norm)
        V = bilinear.leading_directions(basis.pos[row], width, centered=norm == "LN")[0]
        generator = torch.Generator().manual_seed(seed)
        random = torch.randn(pos.shape, generator=generator, dtype=torch.float64)
        random = remove_mean(random, norm)
        mine = slice(i * per_layer, (i + 1) * per_layer)
        arguments = (V, geometry.L[mine], geometry.delta[mine])
        gaps, null = (
            kernels.structured_gaps(p, cvec, *arguments, pairs=pairs, seed=seed)
            for p in (pos, random)
        )
        incoherent = contextual.incoherence(pos, cvec)
        numbers = {
            "relative": _ratio(gaps),
            "relative_random": _ratio(null),
            "gap_max": gaps.r_max,
            "explained": geometry.r2_joint[mine],
            "incoherence_max": incoherent.max.expand(per_layer),
            "incoherence_avg": incoherent.avg.expand(per_layer),
        }
        found.append(numbers)
    return KernelGaps(
        provenance=dataclasses.replace(geometry.provenance, seed=seed),
        heads=geometry.heads,
        **{name: torch.cat([numbers[name] for numbers in found]) for name in found[0]},
    )


def _ratio(gaps: kernels.StructuredGaps) -> Float[Tensor, " head"]:
    """Root mean square of the gap over that of the scores."""
    return torch.where(gaps.score_rms > 0, gaps.r_rms / gaps.score_rms, torch.nan)
