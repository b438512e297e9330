"""What a sweep measures on request, at the cost of holding one term of a few contexts as a matrix:
ablation, shapes, nulls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.projection import PARTS, ProjectedParts, Side
from tl_geometry.scores.shapes import (
    ContrastSums,
    OffsetSums,
    ablation_effect,
    contrast_sums,
    offset_sums,
)
from tl_geometry.scores.sums import ShareSums, share_sums
from tl_geometry.scores.terms import GROUPS, group_of, term_names

DETAILS = ("ablation", "toeplitz", "offsets", "contrast", "nulls", "bootstrap", "planes")
"""Names that ``detail=`` of :func:`tl_geometry.sweep_heads` takes."""
NULLS = ("permuted", "rotated")
"""Positional bases of equal energy that know nothing: positions of the window permuted, directions
rotated at random."""
DRAWS = 5
"""Draws of each null."""


def score(
    q: Float[Tensor, "batch query head d_head"], k: Float[Tensor, "batch key head d_head"]
) -> Float[Tensor, "batch head query key"]:
    """One term as a matrix."""
    return einsum(q, k, "batch query head e, batch key head e -> batch head query key")


class Details:
    """Sums in progress of one layer."""

    def __init__(self, wanted: Sequence[str], drop: int, seed: int) -> None:
        self.wanted, self.drop, self.seed = set(wanted), drop, seed
        self.contexts = 0
        self.effects: dict[str, Tensor] = {}
        self.offsets: dict[str, OffsetSums] = {}
        self.contrasts: ContrastSums | None = None
        self.null_bases: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.null_sums: dict[tuple[str, int], ShareSums] = {}

    def update(
        self,
        layer: LayerView,
        parts: ProjectedParts,
        rows: slice,
        tokens: Int[Tensor, "batch position"],
        basis: PositionContext,
    ) -> None:
        """Take in some contexts of one layer."""
        self.contexts += len(tokens)
        if "ablation" in self.wanted:
            self._ablation(layer, parts)
        inside = layer.allowed[self.drop :, self.drop :]

        def centred(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
            term = score(q[:, self.drop :], k[:, self.drop :])
            return row_center(
                term if bias is None else term + bias[:, self.drop :, self.drop :], inside
            )

        content = (
            centred(parts.q[2], parts.k[2])
            if self.wanted & {"toeplitz", "offsets", "contrast"}
            else torch.empty(0)
        )
        if self.wanted & {"toeplitz", "offsets"}:
            position = centred(parts.q[:2].sum(0), parts.k[:2].sum(0), layer.bias)
            shown = {
                "pos-pos": centred(parts.q[1], parts.k[1]),
                "position": position,
                "cvec-cvec": content,
            }
            for name, term in shown.items():
                new = offset_sums(term, inside)
                self.offsets[name] = self.offsets[name] + new if name in self.offsets else new
        if "contrast" in self.wanted:
            new_contrast = contrast_sums(content, tokens[:, self.drop :].to(content.device), inside)
            self.contrasts = (
                new_contrast if self.contrasts is None else self.contrasts + new_contrast
            )
        if "nulls" in self.wanted:
            self._nulls(layer, parts, rows, basis)

    def _ablation(self, layer: LayerView, parts: ProjectedParts) -> None:
        whole = score(parts.q.sum(0), parts.k.sum(0))
        whole = whole if layer.bias is None else whole + layer.bias
        for name, term in _each_term(parts, layer):
            before, allowed = layer.logits(whole)
            after = layer.logits(whole - term)[0]
            effect = ablation_effect(
                before[..., self.drop :, :],
                (before - after)[..., self.drop :, :],
                allowed[self.drop :],
            )
            new = torch.stack([effect.tv, effect.kl]).sum(1)
            self.effects[name] = self.effects.get(name, torch.zeros_like(new)) + new

    def _nulls(
        self, layer: LayerView, parts: ProjectedParts, rows: slice, basis: PositionContext
    ) -> None:
        require(
            layer.added is None,
            "detail='nulls'",
            expected="positions that are part of the stream",
            got="a positional embedding added to queries and keys (Shortformer)",
            instead="the other details",
            error=UnsupportedModelError,
        )
        length = parts.q.shape[2]
        if not self.null_bases:
            for name, pos in null_positions(basis, layer.layer, length, self.drop, self.seed):
                q_pos, k_pos = layer.q_map(pos.to(layer.h)), layer.k_map(pos.to(layer.h))
                self.null_bases[name] = (q_pos * layer.scale, k_pos)
        sides = [Side.of(layer, w, normalized=basis.provenance.normalized) for w in ("q", "k")]
        options = {"bias": layer.bias, "drop": self.drop, "energy": False, "gain": False}
        for name, mapped in self.null_bases.items():
            made: list[Tensor] = []
            for own, other, side in zip(parts, mapped, sides, strict=True):
                pos = other * side.frozen[rows].unsqueeze(-1)
                made.append(torch.stack([own[0], pos, own[1] + own[2] - pos]))
            sums = share_sums(made[0], made[1], layer.allowed, **options).pooled()
            self.null_sums[name] = self.null_sums[name] + sums if name in self.null_sums else sums

    def table(self) -> dict[str, Float[Tensor, "head ..."]]:
        """Finished quantities by column name, heads first."""
        out: dict[str, Tensor] = {}
        for name, (tv, kl) in self.effects.items():
            out |= {f"tv_{name}": tv / self.contexts, f"kl_{name}": kl / self.contexts}
        for name, sums in self.offsets.items():
            if "toeplitz" in self.wanted:
                out[f"toeplitz_{name}"] = sums.toeplitz_r2
            if "offsets" in self.wanted:
                out[f"offsets_{name}"] = sums.profile
        if self.contrasts is not None:
            out["contrast_cvec-cvec"] = self.contrasts.contrast
        for null in NULLS if self.null_sums else ():
            shares = torch.stack([self.null_sums[null, i].cs for i in range(DRAWS)])
            names = term_names(PARTS, alibi=shares.shape[-1] > len(PARTS) ** 2)
            for group in GROUPS[:2]:
                member = torch.tensor([group_of(n) == group for n in names], device=shares.device)
                draws = shares[..., member].sum(-1).T
                out |= {f"cs_{group}_{null}": draws.mean(1), f"draws_{group}_{null}": draws}
        return {k: v.cpu() for k, v in out.items()}

    @staticmethod
    def beside(layers: Sequence[Details]) -> dict[str, Tensor]:
        """The tables of several layers, their heads in order."""
        tables: list[Mapping[str, Tensor]] = [d.table() for d in layers]
        return {k: torch.cat([t[k] for t in tables]) for k in tables[0]}


def _each_term(parts: ProjectedParts, layer: LayerView) -> Iterator[tuple[str, Tensor]]:
    names = iter(term_names(PARTS))
    for q in parts.q:
        for k in parts.k:
            yield next(names), score(q, k)
    if layer.bias is not None:
        yield "alibi-alibi", layer.bias.unsqueeze(0)


def null_positions(
    basis: PositionContext, layer: int, length: int, drop: int, seed: int
) -> Iterator[tuple[tuple[str, int], Float[Tensor, "position d_model"]]]:
    """(Null, draw) and positional vectors of equal energy, at wrong positions or in wrong
    directions, :data:`DRAWS` of each; positions before ``drop`` stay."""
    pos = basis.pos_seen[basis.index(layer), :length]
    for i in range(DRAWS):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        order = torch.arange(length)
        order[drop:] = drop + torch.randperm(length - drop, generator=generator)
        yield ("permuted", i), pos[order]
        width = pos.shape[1]
        mixed = pos @ torch.randn(width, width, generator=generator, dtype=pos.dtype)
        own, other = (torch.linalg.vector_norm(x[drop:]) for x in (pos, mixed))
        scale = own / other.clamp(min=1e-300)  # nearly a rotation, times a scale
        yield ("rotated", i), torch.cat([pos[:drop], mixed[drop:] * scale])
