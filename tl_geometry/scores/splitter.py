"""Which queries, keys and values does each part of a layer's input give, and do the terms add up to
the model's scores? ``split_scores``, ``split_values`` and ``explain_logit`` call :class:`Splitter`;
sweeps and edits by term take :func:`rounding_flags` and :func:`is_relative` from here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.rows import KeyRanges
from tl_geometry.base.transfer import on_cpu
from tl_geometry.models.attention_spec import scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import (
    Check,
    head_spreads,
    judge_rounding,
    pattern_error,
    pattern_roundoff,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.rotary import RotaryPlanes, rotary_planes
from tl_geometry.models.row_pass import ROW_CELLS
from tl_geometry.models.softmax import soft_cap
from tl_geometry.scores.families import BIAS, Family
from tl_geometry.scores.projection import Side

PRESETS = ("exact", "paper", "reference")
"""Exact terms, and the two published ways to split (:func:`tl_geometry.split_scores`)."""


@dataclass(frozen=True, eq=False)
class HeadTerms:
    """The terms of the chosen heads of one layer: queries (with the score scale) and keys by part,
    and what else makes the scores.

    ``bias`` is ALiBi. ``scores`` are the model's own, with ``preset="reference"`` only. ``scale``
    is A of the bounds in ``checks``. ``rotary`` says that (bias, bias) holds the mean of a rotary
    model, ``relative`` that no frozen scale varies by token: both decide how that term is shown
    (:func:`tl_geometry.scores.terms.bias_label`).
    """

    layer: int
    heads: tuple[int, ...]
    q: Float[Tensor, "part batch query head d_head"]
    k: Float[Tensor, "part batch key head d_head"]
    bias: Float[Tensor, "head query key"] | None
    mask: Bool[Tensor, "query key"] | KeyRanges
    softcap: Float[Tensor, " head"]
    sinks: Float[Tensor, " head"]
    scores: Float[Tensor, "batch head query key"] | None
    checks: list[Check]
    scale: float
    rotary: bool
    relative: bool
    planes: RotaryPlanes


class Splitter:
    """Splits the inputs of layers into a family of parts and projects them; parts of a normalised
    basis are those of the normed stream."""

    def __init__(
        self, view: ModelView, family: Family, layers: Sequence[int], preset: str = "exact"
    ) -> None:
        self.view, self.family, self.preset = view, family, preset
        self.layers = tuple(sorted(layers))
        self.flags: list[str] = []
        exact = preset == "exact"
        usual = family.positional and family.names == ("pos", "cvec")
        expected, got = f"('pos', 'cvec') with preset={preset!r}", ", ".join(family.names[:4])
        require(exact or usual, "parts", expected=expected, got=got, instead="preset='exact'")
        fits, what = exact or not family.normalized, f"basis with preset={preset!r}"
        expected = "a basis of the states themselves, as published"
        instead = "decompose(model, tokens, normalize=False), or preset='exact'"
        require(fits, what, expected=expected, got="a normalised basis", instead=instead)
        # the paper's terms have no constants; the published code leaves the mean in the content
        leading = {"exact": (BIAS,), "paper": ("mean",), "reference": ()}[preset]
        self.names = (*leading, *family.names)

    def reading(self, layer: LayerView) -> LayerView:
        """The layer as a function of what is split: its input, or with a normalised basis the
        normed input."""
        return layer.normalized() if self.family.normalized else layer

    def terms_of(
        self, layer: LayerView, heads: Sequence[int], device: torch.device | str
    ) -> HeadTerms:
        """Project one layer's parts for the chosen heads and check that they add up."""
        layer = self.reading(layer)
        pick = torch.tensor(heads, device=layer.q.device)
        checks = [(layer.layer, name, *pair) for name, pair in layer.reconstruction.checks.items()]
        scale, scores = layer.reconstruction.scale, None
        if self.preset == "exact":
            q, k = (self._project(layer, which)[..., pick, :] for which in "qk")
            q = q * layer.scale
            scale = self._compare(layer, q, k, pick, checks)
        else:
            q, k = (x[..., pick, :] for x in self._published(layer))
        if self.preset == "reference":
            model_q, model_k = (x[None][..., pick, :] for x in (layer.q * layer.scale, layer.k))
            scores, _ = _sum_and_size(layer, model_q, model_k, pick)
        measured = layer.bias is not None and layer.bias_source == "measured"
        flags = ["scores before the soft cap"] if layer.softcap is not None else []
        flags += ["ALiBi measured"] if measured else []
        self.flags = list(dict.fromkeys([*self.flags, *flags]))
        sinks = torch.full((len(heads),), -torch.inf) if layer.sinks is None else layer.sinks[pick]
        cap = torch.inf if layer.softcap is None else layer.softcap
        numbers: dict[str, Any] = {"dtype": layer.h.dtype, "device": device}
        return HeadTerms(
            layer=layer.layer,
            heads=tuple(heads),
            q=q.to(device),
            k=k.to(device),
            bias=None if layer.bias is None else layer.bias[pick].to(device),
            mask=layer.mask,
            softcap=torch.full((len(heads),), cap, **numbers),
            sinks=sinks.to(**numbers),
            scores=None if scores is None else scores.to(device),
            checks=checks,
            scale=scale,
            rotary=layer.rotary and self.family.positional and "mean" not in self.family.names,
            relative=bool(is_relative(layer)),
            # the paper's terms are not rotated
            planes=rotary_planes(replace(layer, turn=None) if self.preset == "paper" else layer),
        )

    def values(self, layer: LayerView) -> Float[Tensor, "part batch position head d_head"]:
        """Values of the parts, the constants with ``bias``."""
        return self._project(self.reading(layer), "v")

    def _project(
        self, layer: LayerView, which: str
    ) -> Float[Tensor, "part batch position head d_head"]:
        """Each part projected by itself, the constants with ``bias``. No part is the remainder of
        the others, so that :meth:`_compare` is a real check."""
        side = Side.of(layer, which)
        mapped = side.map(torch.stack(list(self.family.parts(layer).values())))
        scaled = mapped * side.frozen.unsqueeze(-1)
        if not self.family.positional:
            return torch.cat([side.constant.unsqueeze(0), scaled])
        mean_apart = "mean" in self.family.names
        # bias takes in the mean, unless it is a part by itself
        mean = torch.zeros_like(mapped[0]) if mean_apart else mapped[0]
        bias, pos = side.bias_and_pos(torch.stack([mean, mapped[1]]))
        return torch.stack([bias, *([scaled[0]] if mean_apart else []), pos, *scaled[2:]])

    def _published(self, layer: LayerView) -> tuple[Tensor, Tensor]:
        """Queries and keys ``[part batch position head d_head]`` as the paper, or its code,
        computes them."""
        require(
            layer.added is None,
            "preset",
            got=repr(self.preset),
            instead="preset='exact'",
            expected="'exact' where positions are added to queries and keys (Shortformer)",
            error=UnsupportedModelError,
        )
        # by name, an exception: papers/ comes after scores/ in the order of packages
        presets = importlib.import_module("tl_geometry.papers.split_presets")
        return getattr(presets, self.preset)(self.view, layer, self.family.parts(layer))

    def _compare(
        self, layer: LayerView, q: Tensor, k: Tensor, heads: Tensor, checks: list[Check]
    ) -> float:
        """Compare the sum of all terms with the model's numbers; returns A, the largest product of
        the parts' absolute values."""
        for name, parts, model in (("q parts", q / layer.scale, layer.q), ("k parts", k, layer.k)):
            size = layer.reconstruction.sizes.get(name[0], 0.0)
            size = max(float(parts.abs().sum(0).max()), size)
            error = float((parts.sum(0) - model[:, :, heads]).abs().max())
            bound = reconstruction_bound(layer.roundoff, size)
            checks.append((layer.layer, name, error, bound))
        pattern_errors: list[Tensor] = []
        score_errors: list[Tensor] = []
        sizes = PartSizes()
        in_rows = layer.pattern is None and layer.scores is None
        for rows, allowed, total, size in score_blocks(layer, q, k, heads):
            sizes.take(allowed, total, size)
            if in_rows:
                # in blocks of rows the model's scores were compared with these, then dropped
                own = scores_of(layer.q[:, rows, heads], layer.k[:, :, heads], layer.scale)
                score_errors.append(torch.where(allowed, total - own, 0.0).abs().max())
            capped = soft_cap(total, layer.softcap)
            if layer.scores is not None:
                error = torch.where(allowed, capped - layer.scores[:, heads, rows], 0.0)
                score_errors.append(error.abs().max())
            if layer.pattern is not None:
                pattern = layer.pattern[:, heads, rows]
                pattern_errors.append(pattern_error(capped, pattern, allowed, layer.roundoff))
        scale, spreads = sizes.settled()
        if layer.pattern is not None:
            # softmax rounds by a few units however small the scores, as in report_of()
            unit = pattern_roundoff(layer.pattern, layer.roundoff)
            bound = reconstruction_bound(unit, max(scale, 1.0))
            error = float(torch.stack(pattern_errors).max())
            checks.append((layer.layer, "sum pattern", error, bound))
        if layer.scores is not None or in_rows:
            bound = reconstruction_bound(layer.roundoff, scale)
            # by the triangle inequality: terms to recomputed scores, plus these to the model's
            model = layer.reconstruction.checks.get("scores", (0.0, 0.0))[0] if in_rows else 0.0
            error = float(torch.stack(score_errors).max()) + model
            checks.append((layer.layer, "sum scores", error, bound))
        require_reconstruction(checks, f"split of layer {layer.layer}")
        scales, what = (layer.reconstruction.scale, scale), f"layer {layer.layer}"
        self.flags += judge_rounding(layer.roundoff, scales, spreads, what)
        return scale


class PartSizes:
    """Collects, block by block, the largest product of absolute values of the parts (A of the
    bounds) and how far scores spread in each row."""

    def __init__(self) -> None:
        self.sizes: list[Tensor] = []
        self.extremes: list[tuple[Tensor, Tensor]] = []

    def take(self, allowed: Tensor, total: Tensor, size: Tensor) -> None:
        """Take in a block of rows."""
        self.sizes.append(torch.where(allowed, size, 0.0).max())
        lowest = torch.where(allowed, total, torch.inf).amin(-1)
        highest = torch.where(allowed, total, -torch.inf).amax(-1)
        # a row of two "keys", lowest and highest: head_spreads needs no others
        several = (allowed.sum(-1) > 1).unsqueeze(-1).expand(-1, 2)
        self.extremes.append((torch.stack([lowest, highest], -1), several))

    def settled(self) -> tuple[float, Float[Tensor, " head"]]:
        """The largest product, and :func:`head_spreads` of all rows. Both are copied to the CPU
        together, because each copy waits for a GPU."""
        extremes, several = zip(*self.extremes, strict=True)
        spreads = head_spreads(torch.cat(extremes, 2), torch.cat(several))
        scale, spreads = on_cpu([torch.stack(self.sizes).max(), spreads])
        return float(scale), spreads


def score_blocks(
    layer: LayerView,
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    heads: Tensor | slice,
    queries: slice = slice(None),
) -> Iterator[tuple[slice, Bool[Tensor, "row key"], Tensor, Tensor]]:
    """Some queries with all keys, a few rows at a time: the rows, the keys that they may attend to,
    and the sums and sizes of :func:`_sum_and_size`."""
    batch, length = q.shape[1:3]
    # indexing a range resolves the slice, a step included, to positions
    step, places = max(1, ROW_CELLS // (batch * q.shape[3] * length)), range(length)[queries]
    for start in range(0, len(places), step):
        block = places[start : start + step]
        rows = slice(block.start, block.stop, block.step)
        yield rows, layer.seen_by(rows), *_sum_and_size(layer, q, k, heads, rows)


def _sum_and_size(
    layer: LayerView,
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    heads: Tensor | slice,
    queries: slice = slice(None),
) -> tuple[Tensor, Tensor]:
    """Scores of some queries (after the scale) with all keys, summed over all parts, and
    ``sum_e (sum_a |q_a,e|) (sum_b |k_b,e|) + |bias|``, which their rounding is proportional to.
    Both are ``[batch head query key]``."""
    q = q[:, :, queries]
    total, size = (
        einsum(a, b, "batch query head e, batch key head e -> batch head query key")
        for a, b in ((q.sum(0), k.sum(0)), (q.abs().sum(0), k.abs().sum(0)))
    )
    if layer.bias is None:
        return total, size
    bias = layer.bias[heads][:, queries]
    return total + bias, size + bias.abs()


def rounding_flags(
    layer: LayerView,
    q: Float[Tensor, "part batch position head d_head"],
    k: Float[Tensor, "part batch position head d_head"],
    queries: slice = slice(None),
    heads: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """:func:`judge_rounding` for the parts of some queries (after the scale) and of all keys;
    ``heads`` are those on the head axis, ``None`` for all of the layer's."""
    # a view that was not verified has no A: the largest |q| |k| bounds its scores instead
    unsplit = layer.reconstruction.scale or float(
        q.sum(0).norm(dim=-1).max() * k.sum(0).norm(dim=-1).max()
    )
    pick = slice(None) if heads is None else torch.tensor(heads, device=q.device)
    sizes = PartSizes()
    for _, allowed, total, size in score_blocks(layer, q, k, pick, queries):
        sizes.take(allowed, total, size)
    scale, spreads = sizes.settled()
    return judge_rounding(layer.roundoff, (unsplit, scale), spreads, f"layer {layer.layer}")


def masks_of(
    layers: Sequence[HeadTerms], pick: Int[Tensor, " head"]
) -> Bool[Tensor, "head query key"] | KeyRanges:
    """The masks of the chosen heads; ranges of keys where the prompts ran in blocks of rows."""
    masks = [terms.mask for terms in layers for _ in terms.heads]
    ranges = [mask for mask in masks if isinstance(mask, KeyRanges)]
    if not ranges:
        return torch.stack([masks[i][:].to(pick.device) for i in pick.tolist()])
    first, stop = (
        torch.stack([getattr(ranges[i], x) for i in pick.tolist()]) for x in ("first", "stop")
    )
    return KeyRanges(first, stop, ranges[0].keys)


def is_relative(layer: LayerView) -> Bool[Tensor, ""]:
    """Whether all frozen scales are one (a normalised basis and no QK-norm), so that products of
    constant queries and keys depend on the rotation alone."""
    return ((layer.q_scale == 1) & (layer.k_scale == 1)).all()
