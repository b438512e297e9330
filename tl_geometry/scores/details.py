"""What does a sweep measure beyond shares, on request (``detail=``)? Ablations, shapes of terms,
intervals and nulls. ``sweep_heads`` keeps one :class:`Details` per layer. Ablations and shapes hold
one term of a few contexts as a matrix, which the shares do not need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.leave_out import GroupProjections, LeaveOut, Resampled
from tl_geometry.scores.position_null import PositionNull, adjusted
from tl_geometry.scores.projection import PARTS, ProjectedParts
from tl_geometry.scores.shapes import (
    ContrastSums,
    Offsets,
    OffsetSums,
    Pattern,
    contrast_sums,
    offset_sums,
)
from tl_geometry.scores.terms import term_names

DETAILS = (
    *("ablation", "toeplitz", "offsets", "contrast", "nulls", "intervals"),
    *("planes", "energy"),
)
"""Names that ``detail=`` of :func:`tl_geometry.sweep_heads` takes. The last two do not come here:
:func:`~tl_geometry.scores.sums.share_sums` takes them with the shares."""


def score(
    q: Float[Tensor, "batch query head d_head"], k: Float[Tensor, "batch key head d_head"]
) -> Float[Tensor, "batch head query key"]:
    """One term as a matrix."""
    return einsum(q, k, "batch query head e, batch key head e -> batch head query key")


class Details:
    """Sums in progress of one layer; call :meth:`begin`, :meth:`update` for each step of a few
    contexts, and :meth:`end` for each batch, then :meth:`finish` once.

    ``effects`` holds, by the name of the removed term, summed distances ``[tv or kl, head]``;
    ``offsets`` sums by offset of three terms, ``mask`` the offsets that the mask allows;
    ``contrasts`` the token-identity contrast. ``groups`` are projections for the batch at hand,
    ``left_out`` and ``null`` what intervals and p-values are made from.
    """

    def __init__(self, wanted: Sequence[str], drop: int, seed: int) -> None:
        self.wanted, self.drop, self.seed = set(wanted), drop, seed
        self.contexts = 0
        self.effects: dict[str, Tensor] = {}
        self.offsets: dict[str, OffsetSums] = {}
        self.mask: Offsets | None = None
        self.contrasts: ContrastSums | None = None
        self.null: PositionNull | None = None
        self.groups: GroupProjections | None = None
        self.left_out: LeaveOut | None = None

    def begin(self, layer: LayerView, basis: PositionContext) -> None:
        """Begin a batch of one layer: project the groups of the basis for all its contexts."""
        if "nulls" in self.wanted:
            expected = "positions that are part of the stream"
            got = "a positional embedding added to queries and keys (Shortformer)"
            options = {"instead": "the other details", "error": UnsupportedModelError}
            require(layer.added is None, "detail='nulls'", expected=expected, got=got, **options)
        if self.wanted & {"nulls", "intervals"}:
            # projections belong to one batch; the sums and the null go on over all batches
            self.groups = groups = GroupProjections(layer, basis)
            self.left_out = self.left_out or LeaveOut(groups.share)
            if "nulls" in self.wanted:
                self.null = self.null or PositionNull(groups.share, self.drop, self.seed)
                self.null.add(layer, groups)

    def update(
        self,
        layer: LayerView,
        parts: ProjectedParts,
        rows: slice,
        tokens: Int[Tensor, "batch position"],
        own: Sequence[int],
    ) -> None:
        """Take in some contexts of one layer: ``rows`` of the batch, with their ``parts`` and
        ``tokens``. ``own`` are their groups in the basis (-1: none), for intervals and nulls."""
        self.contexts += len(tokens)
        if "ablation" in self.wanted:
            self._ablation(layer, parts)
        if self.wanted & {"toeplitz", "offsets", "contrast"}:
            self._shapes(layer, parts, tokens)
        if self.groups is not None and self.left_out is not None:
            self.left_out.add(self.groups.sums(layer, rows, self.drop), own)

    def end(self) -> None:
        """End a batch of one layer: drop the projections, because the details of all layers are
        held at once."""
        self.groups = None
        if self.left_out is not None:
            self.left_out.settle()

    def finish(self) -> None:
        """End the pass: move what tables are made of to the CPU."""
        for sums in (self.left_out, self.null):
            if sums is not None:
                sums.to_cpu()

    def resampled(self, contexts: int) -> Resampled:
        """Shares with groups of contexts left out; ``contexts`` is the number of contexts in the
        basis."""
        assert self.left_out is not None
        return self.left_out.table(contexts)

    def _shapes(
        self, layer: LayerView, parts: ProjectedParts, tokens: Int[Tensor, "batch position"]
    ) -> None:
        """Sums by offset and by equal tokens of row-centred terms, without dropped positions."""
        positions = slice(self.drop, None)
        inside = layer.allowed[positions, positions]

        def centred(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
            term = score(q[:, positions], k[:, positions])
            return row_center(
                term if bias is None else term + bias[:, positions, positions], inside
            )

        content = centred(parts.q[2], parts.k[2])  # 2 is cvec; 0 and 1, bias and pos, are position
        if self.wanted & {"toeplitz", "offsets"}:
            self.mask = self.mask or Offsets.of(inside)
            terms = {
                "pos-pos": centred(parts.q[1], parts.k[1]),
                "position": centred(parts.q[:2].sum(0), parts.k[:2].sum(0), layer.bias),
                "cvec-cvec": content,
            }
            for name, term in terms.items():
                sums = offset_sums(term, inside, self.mask)
                self.offsets[name] = self.offsets[name] + sums if name in self.offsets else sums
        if "contrast" in self.wanted:
            contrasts = contrast_sums(content, tokens[:, positions].to(content.device), inside)
            self.contrasts = contrasts if self.contrasts is None else self.contrasts + contrasts

    def _ablation(self, layer: LayerView, parts: ProjectedParts) -> None:
        """Distance of the pattern (total variation, KL) from the pattern without each term."""
        total = score(parts.q.sum(0), parts.k.sum(0))
        total = total if layer.bias is None else total + layer.bias
        before, allowed = layer.logits(total)
        # dropped queries are left out; dropped keys stay, as the model's softmax has them
        pattern = Pattern(before[..., self.drop :, :], allowed[self.drop :])
        for name, remaining in _without_each_term(total, parts, layer):
            after = layer.logits(remaining)[0]
            distances = pattern.distance(after[..., self.drop :, :]).sum(1)
            self.effects[name] = self.effects.get(name, torch.zeros_like(distances)) + distances

    def table(self, contexts: int) -> dict[str, Float[Tensor, "head ..."]]:
        """Finished quantities by column name, head axis first; ``contexts`` is the number of
        contexts in the basis."""
        columns: dict[str, Tensor] = {}
        for name, (tv, kl) in self.effects.items():
            columns |= {f"tv_{name}": tv / self.contexts, f"kl_{name}": kl / self.contexts}
        for name, sums in self.offsets.items():
            if "toeplitz" in self.wanted:
                columns[f"toeplitz_{name}"] = sums.toeplitz_r2
            if "offsets" in self.wanted:
                columns[f"offsets_{name}"] = sums.profile
        if self.contrasts is not None:
            columns["contrast_cvec-cvec"] = self.contrasts.contrast
        if self.null is not None and self.left_out is not None:
            columns |= self.null.table(self.left_out, contexts)
        return {k: v.cpu() for k, v in columns.items()}

    @staticmethod
    def beside(layers: Sequence[Details], contexts: int) -> dict[str, Tensor]:
        """The tables of several layers as one, their heads in order; ``contexts`` is the number of
        contexts in the basis."""
        tables: list[Mapping[str, Tensor]] = [d.table(contexts) for d in layers]
        names = tables[0] if tables else ()
        columns = {name: torch.cat([table[name] for table in tables]) for name in names}
        # the correction counts the heads of all layers
        if "p_position" in columns:
            columns["p_position_bh"] = adjusted(columns["p_position"])
        return columns


def _without_each_term(
    total: Float[Tensor, "batch head query key"], parts: ProjectedParts, layer: LayerView
) -> Iterator[tuple[str, Tensor]]:
    """Name of each term, and the scores ``[batch head query key]`` without it."""
    # query part outside, key part inside: the order of term_names
    names, flat = iter(term_names(PARTS)), total.flatten(0, 1)
    queries, keys = (rearrange(x, "part b i h e -> part (b h) i e") for x in (parts.q, parts.k))
    for q in queries:
        for k in keys:
            remaining = torch.baddbmm(flat, q, k.mT, alpha=-1)
            yield next(names), remaining.view_as(total)
    if layer.bias is not None:
        yield "alibi-alibi", total - layer.bias
