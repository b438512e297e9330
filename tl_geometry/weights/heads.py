"""What do a model's heads read and write, as seen from W_QK and W_OV? Two public functions of a
model: :func:`weight_geometry` (structure in the positional basis) and :func:`token_readout` (the
tokens nearest to the singular directions)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks, linalg
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.base.results import Provenance, Result
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.variance import reliability
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.weights import bilinear, low_rank_diagonal, readout, subspaces
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.readout import Extremes
from tl_geometry.weights.vocabulary import (
    decode_table,
    embeddings,
    factors_of,
    normalized_rows,
    output_rows,
)

NUMBERS = (
    *("std", "threshold", "highest", "lowest", "above_threshold", "concentration", "null"),
    *("lift", "excess", "noise_null", "noise_high", "p", "reliability", "r2_low_rank"),
    *("r2_diagonal", "r2_joint", "null_r2", "symmetric", "singular"),
)
"""Fields and properties of a :class:`WeightGeometry` that its table shows for every head."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WeightGeometry(Result):
    """Low rank plus diagonal structure of W_QK or W_OV, one row per head (see
    :func:`weight_geometry`).

    ``k`` is the dimension of the subspace in each of ``layers`` and ``ranks`` the numerical rank of
    the positional vectors there. ``block`` is ``V^T W_o V`` over the shown directions, of which the
    first k span the subspace; W_o is W without ``diagonal``, its diagonal. ``mean`` to
    ``concentration`` are defined in :func:`tl_geometry.weights.bilinear.structure`.

    ``null`` is the exact expectation of ``concentration`` for a uniformly random subspace.
    ``noise_null`` and ``noise_high`` are its mean and maximum over subspaces estimated in the same
    way with positions destroyed (:mod:`tl_geometry.weights.subspaces`). ``p`` is the larger of the
    p-values against these and against drawn random subspaces, corrected for the choice among heads
    (:func:`tl_geometry.weights.subspaces.familywise_p`); NaN below 10 contexts or 4 groups, and at
    least 1 / 20 with the default draws. ``reliability`` is the split-half cosine of the positional
    vectors, the lower of the two states for W_OV: below 0.5 the subspace is mostly noise.

    ``L`` and ``delta`` are the joint least squares fit (zero padding in layers of lower rank),
    ``r2_*`` shares of ``|W|^2``, ``null_r2`` the expectation of ``r2_low_rank``; ``symmetric`` and
    ``singular`` are defined in :class:`tl_geometry.weights.low_rank_diagonal.LowRankDiagonal`.
    """

    matrix: str
    heads: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]
    k: tuple[int, ...]
    ranks: tuple[int, ...]
    raw: bool
    offsets: tuple[int, ...]
    diagonal: Float[Tensor, "head d_model"]
    block: Float[Tensor, "head row column"]
    mean: Float[Tensor, " head"]
    std: Float[Tensor, " head"]
    threshold: Float[Tensor, " head"]
    highest: Float[Tensor, " head"]
    lowest: Float[Tensor, " head"]
    above_threshold: Int[Tensor, " head"]
    concentration: Float[Tensor, " head"]
    null: Float[Tensor, " head"]
    noise_null: Float[Tensor, " head"]
    noise_high: Float[Tensor, " head"]
    p: Float[Tensor, " head"]
    reliability: Float[Tensor, " head"]
    L: Float[Tensor, "head rank rank"]
    delta: Float[Tensor, "head d_model"]
    r2_low_rank: Float[Tensor, " head"]
    r2_diagonal: Float[Tensor, " head"]
    r2_joint: Float[Tensor, " head"]
    null_r2: Float[Tensor, " head"]
    symmetric: Float[Tensor, " head"]
    singular: Bool[Tensor, " head"]

    @property
    def lift(self) -> Float[Tensor, " head"]:
        """Concentration over its expectation for a uniformly random subspace."""
        return self.concentration / self.null

    @property
    def excess(self) -> Float[Tensor, " head"]:
        """Concentration over its mean with positions destroyed: above 1 where a head reads (or
        writes) position itself."""
        return self.concentration / self.noise_null

    def head(self, head: Head) -> int:
        """Row of a head."""
        return checks.head_rows(head, self.heads)[0]

    table_axes = ("head",)
    table_values = NUMBERS

    def axis_labels(self, axis: str) -> Mapping[str, Sequence[object]]:
        """Layer and head, and the dimensions of the subspaces of the layer."""
        per_layer = dict(zip(self.layers, zip(self.k, self.ranks, strict=True), strict=True))
        k, ranks = zip(*(per_layer[layer] for layer, _ in self.heads), strict=True)
        return {**super().axis_labels(axis), "k": k, "rank": ranks}


def weight_geometry(
    model: ModelLike,
    basis: PositionContext,
    matrix: str = "QK",
    *,
    layers: Iterable[int] | int | None = None,
    rank: int | None = None,
    raw: bool = False,
    offsets: tuple[int, ...] = (0,),
    shown: int = 60,
    draws: int = subspaces.DRAWS,
    seed: int = 0,
) -> WeightGeometry:
    """How much of every head's W_QK (or W_OV) is a diagonal plus a small block in the positional
    subspace.

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
        raw: take the weights without gain and centring, and the positional vectors uncentred, as
            the published figure does, which mixes coordinates before and after the norm. These
            numbers depend on how the model was loaded; those of the default do not.
        offsets: for rotary models, the query-key offsets that W_QK is averaged over (``(0,)``, or
            ``range(1, 17)``).
        shown: number of directions in ``block`` (60 as in the published figure).
        draws: draws of each null, with ``seed`` (0 leaves them out).

    Raises ``GeometryError`` for a basis of another model or without the states needed.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> tlg.weight_geometry(model, basis, layers=0).concentration.shape
    torch.Size([4])
    """
    view = as_view(model)
    require_basis(basis)
    basis.check_model(view)
    basis.require_identifiable("weight_geometry")
    checks.choice(matrix, bilinear.MATRICES, "matrix")
    chosen = checks.indices(layers, view.n_layers, "layers")
    step = 1 if matrix == "OV" else 0
    needed = sorted({s for l in chosen for s in (l, l + step)})
    expected, got = f"states {needed}", f"states {basis.states}"
    instead = "states=None"
    require(set(needed) <= set(basis.states), "basis", expected=expected, got=got, instead=instead)
    require(rank is None or rank >= 1, "rank", expected="at least 1", got=rank)
    require(draws >= 0, "draws", expected="at least 0", got=draws)
    max_rank = 20 if rank is None else rank  # as Song & Zhong 2023, like the 60 of ``shown``
    width = min(max(shown, max_rank), view.d_model)
    centered = not raw and view.attention_norm(chosen[0]).norm_type == "LN"
    positional = subspaces.Subspaces(
        basis, width=width, k=min(max_rank, width), centered=centered, draws=draws, seed=seed
    )
    reliability_of = dict(zip(basis.states, reliability(basis.moments).tolist(), strict=True))
    layer_numbers: list[dict[str, Tensor]] = []
    k_and_rank: list[tuple[int, int]] = []
    for layer, factors in factors_of(view, chosen, matrix, raw=raw, offsets=tuple(offsets)):
        left, right = positional.at(layer), positional.at(layer + step) if step else None
        pos_rank = left.rank if right is None else min(left.rank, right.rank)
        expected, got = "positional vectors that differ", f"none at state {layer}"
        require(pos_rank > 0, "basis", expected=expected, got=got, instead="a longer window")
        k = min(max_rank, pos_rank)
        k_and_rank.append((k, pos_rank))
        numbers = _layer(factors, left, right, k=k, centered=centered)
        lowest = min(reliability_of[layer], reliability_of[layer + step])
        numbers["reliability"] = torch.full((view.n_heads,), lowest, dtype=torch.float64)
        # layers of lower rank are padded with zeros, so that L of all heads is one tensor
        n_padding = min(max_rank, width) - k
        numbers["L"] = torch.nn.functional.pad(numbers["L"], (0, n_padding, 0, n_padding))
        layer_numbers.append(numbers)
    # draws are taken out of the numbers per layer: only their summaries become columns
    nulls = subspaces.Draws(
        *(torch.cat([n.pop(name) for n in layer_numbers], 1).cpu() for name in ("noise", "random"))
    )
    table: dict[str, Any] = {
        name: torch.cat([n[name] for n in layer_numbers]).cpu() for name in layer_numbers[0]
    }
    table |= _null_columns(nulls, table["concentration"])
    flags = _flags(bool(draws and not len(nulls.noise)), raw, bool(table["singular"].any()))
    return WeightGeometry(
        provenance=_provenance(view, basis, raw, flags),
        matrix=matrix,
        heads=tuple((l, h) for l in chosen for h in range(view.n_heads)),
        layers=chosen,
        k=tuple(k for k, _ in k_and_rank),
        ranks=tuple(r for _, r in k_and_rank),
        raw=raw,
        offsets=tuple(offsets),
        **table,
    )


def _null_columns(
    nulls: subspaces.Draws, values: Float[Tensor, " head"]
) -> dict[str, Float[Tensor, " head"]]:
    """Mean and maximum of the draws with positions destroyed, and the p-value of ``values``: the
    larger of those against both nulls."""
    unknown = torch.full_like(values, torch.nan)
    has_draws = len(nulls.noise) > 0
    p = [subspaces.familywise_p(values, draws) for draws in nulls]
    return {
        "noise_null": nulls.noise.mean(0) if has_draws else unknown,
        "noise_high": nulls.noise.amax(0) if has_draws else unknown,
        "p": torch.maximum(*p),
    }


def _flags(no_null: bool, raw: bool, singular: bool) -> list[str]:
    flags = ["published coordinates: raw weights"] if raw else []
    if no_null:
        flags.append(f"fewer than {FEWEST} contexts or {FEWEST_GROUPS} groups: no null of position")
    if singular:
        flags.append("singular: some diagonal cells not determined")
    return flags


def _provenance(
    view: ModelView, basis: PositionContext, raw: bool, flags: Sequence[str]
) -> Provenance:
    """The weights' provenance with the corpus of the basis."""
    of_weights = view.provenance(
        sources=("song2023",), preset="paper" if raw else "exact", flags=tuple(flags)
    )
    fields = ("corpus", "token_hash", "has_bos", "window", "contexts")
    return dataclasses.replace(
        of_weights.flagged(*basis.flags()),
        **{name: getattr(basis.provenance, name) for name in fields},
    )


def _layer(
    factors: Factors,
    left: subspaces.Subspace,
    right: subspaces.Subspace | None,
    *,
    k: int,
    centered: bool,
) -> dict[str, Tensor]:
    """All numbers of one layer, a row per head."""
    device = factors.left.device
    left, right = left.to(device), None if right is None else right.to(device)
    V, U = left.directions, None if right is None else right.directions
    structure = bilinear.structure(factors, V, U, k=k)
    fit = low_rank_diagonal.fit_low_rank_diagonal(
        factors, V[:, :k], None if U is None else U[:, :k]
    )
    numbers = {**structure._asdict(), **fit._asdict()}
    numbers["singular"] = fit.singular.expand(factors.left.shape[0])
    for name, off_diagonal in (("null", True), ("null_r2", False)):
        numbers[name] = bilinear.haar_null(
            factors, k, off_diagonal=off_diagonal, one_basis=right is None, centered=centered
        )
    return numbers | subspaces.drawn_concentration(factors, left, right, k)._asdict()


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenReadout(Result):
    """Tokens with the largest and smallest scores on each head's first singular directions: one row
    per head and direction, heads first (see :func:`token_readout`).

    ``left`` is the query side of W_QK or the reading side of W_OV, ``right`` the key side or the
    writing side: tokens ``[row k]`` with the largest (``top``) and smallest (``bottom``) dot
    products; ``*_tokens`` and ``*_opposite_tokens`` are their texts. ``values`` are all singular
    values per head, ``coverage`` their cumulative share, ``needed`` the number of directions whose
    share first exceeds 99%; ``degenerate`` directions are not unique.
    """

    matrix: str
    heads: tuple[tuple[int, int], ...]
    features: int
    raw: bool
    values: Float[Tensor, "head rank"]
    needed: Int[Tensor, " head"]
    degenerate: Bool[Tensor, "head rank"]
    left: Extremes
    right: Extremes
    left_tokens: tuple[tuple[str, ...], ...]
    left_opposite_tokens: tuple[tuple[str, ...], ...]
    right_tokens: tuple[tuple[str, ...], ...]
    right_opposite_tokens: tuple[tuple[str, ...], ...]

    @property
    def coverage(self) -> Float[Tensor, "head rank"]:
        """Coverage curves: cumulative sums of singular values over their total."""
        return readout.coverage(self.values)

    def columns(self) -> Sequence[str]:
        sides = ("queries", "keys") if self.matrix == "QK" else ("reads", "writes")
        tokens = [f"{side}{end}" for side in sides for end in ("", "_opposite")]
        return ["layer", "head", "feature", "value", "coverage", "degenerate", *tokens]

    def rows(self) -> Sequence[Sequence[object]]:
        texts = (
            self.left_tokens,
            self.left_opposite_tokens,
            self.right_tokens,
            self.right_opposite_tokens,
        )
        table_rows: list[list[object]] = []
        coverage = self.coverage
        for i, (layer, head) in enumerate(self.heads):
            for feature in range(self.features):
                numbers = (self.values[i, feature].item(), coverage[i, feature].item())
                tokens = (" ".join(rows[i * self.features + feature]) for rows in texts)
                table_rows.append(
                    [layer, head, feature, *numbers, bool(self.degenerate[i, feature]), *tokens]
                )
        return table_rows


def token_readout(
    model: ModelLike,
    *,
    matrix: str = "QK",
    layers: Iterable[int] | int | None = None,
    heads: Iterable[Head] | Head | None = None,
    features: int = 5,
    k: int = 5,
    raw: bool = False,
    offsets: tuple[int, ...] = (0,),
) -> TokenReadout:
    """What heads read and write, in tokens: singular directions of W_QK or W_OV against the
    vocabulary (Molina 2023, section 4).

    Both sides of W_QK and the left side of W_OV are scored against the token embeddings after the
    block's norm, the right side of W_OV against the unembedding. Weights and rows are canonical by
    default (gains folded into the weights, so that the way of loading the model does not change the
    result); ``raw`` takes raw weights, the output of the norm with its gain and bias, and the plain
    rows of the unembedding, as published.

    Args:
        matrix: ``"QK"`` or ``"OV"``.
        layers: which layers, by default all.
        heads: which heads (``(layer, head)`` or ``"L5H1"``), by default all of the layers.
        features: singular directions per head.
        k: tokens at each end of a direction.
        offsets: for rotary models, the offsets that W_QK is averaged over.

    Raises ``GeometryError`` for heads, layers or offsets that the model does not have, and for more
    ``features`` or tokens than there are.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.token_readout(model, heads="L1H0", features=2, k=3).left.top_ids.shape
    torch.Size([2, 3])
    """
    view = as_view(model)
    checks.choice(matrix, bilinear.MATRICES, "matrix")
    pairs = tuple(sorted(checks.heads(heads, view.n_layers, view.n_heads, layers)))
    rows = embeddings(view)
    writes = output_rows(view, raw=raw) if matrix == "OV" else None
    layer_readings: list[tuple[Tensor, Extremes, Extremes]] = []
    reads_norm, reads = None, rows
    read_layers = sorted({layer for layer, _ in pairs})
    for layer, factors in factors_of(view, read_layers, matrix, raw=raw, offsets=tuple(offsets)):
        chosen = [h for l, h in pairs if l == layer]
        svd = linalg.product_svd(factors.left[chosen], factors.right[chosen])
        norm = view.attention_norm(layer)
        layer_norm = (norm.norm_type, norm.eps)
        # without gain and bias most layers have the same norm: its rows are reused
        if raw or reads_norm != layer_norm:
            reads_norm, reads = layer_norm, normalized_rows(rows, norm, affine=raw)
        left, right = readout.read_tokens(
            svd, reads, reads if writes is None else writes, features=features, k=k
        )
        layer_readings.append((svd.S, left, right))
    return _readout(view, matrix, pairs, features, raw, layer_readings)


def _readout(
    view: ModelView,
    matrix: str,
    pairs: tuple[tuple[int, int], ...],
    features: int,
    raw: bool,
    layer_readings: list[tuple[Tensor, Extremes, Extremes]],
) -> TokenReadout:
    values = torch.cat([S for S, _, _ in layer_readings]).cpu()
    fields: dict[str, Any] = {}
    for i, side in enumerate(("left", "right"), start=1):
        ends_of_side = [
            torch.cat([end.flatten(0, -2) for end in layers]).cpu()
            for layers in zip(*(part[i] for part in layer_readings), strict=True)
        ]
        ends = Extremes(*ends_of_side)
        fields |= {
            side: ends,
            f"{side}_tokens": decode_table(view, ends.top_ids),
            f"{side}_opposite_tokens": decode_table(view, ends.bottom_ids),
        }
    untrained = matrix == "OV" and not view.head_trained
    flags = ["output head not trained: writes are read in the embedding"] if untrained else []
    return TokenReadout(
        provenance=view.provenance(
            sources=("molina2023",), preset="paper" if raw else "exact", flags=tuple(flags)
        ),
        matrix=matrix,
        heads=pairs,
        features=features,
        raw=raw,
        values=values,
        needed=readout.features_needed(values),
        degenerate=readout.near_degenerate(values),
        **fields,
    )
