"""``sweep_heads``: what drives each attention head of a model, and what type of head it is, for all
heads of all layers in one streamed pass.

Each batch runs once through the model. As soon as a layer's attention has been computed, its
queries and keys are split (frozen norm scale) and the sums behind the shares are updated, a few
contexts at a time, so that no term exists as a matrix:

1. Mean and pos are projected once per layer and divided by the frozen norm scale (with a normalised
   basis there is none). cvec is the remainder of the model's own q and k.
2. For one context of every batch, at another row each time, the model's queries, keys, scores and
   patterns are recomputed from the stream. For the first one cvec is also projected explicitly: a
   remainder makes the parts add up whatever mean and pos are, so the sum alone proves nothing.
3. :func:`tl_geometry.scores.sums.share_sums` adds up numerators and gains.

Head types come from repeated random tokens made for the model.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import ReconstructionError, fail, require
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.groups import APART, BLOCK, CUT
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.batches import batch_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.rotary import RotaryPlanes
from tl_geometry.models.writers import GRAINS
from tl_geometry.scores.corpus_pass import CorpusPass
from tl_geometry.scores.head_types import HeadTypes, measure_types
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.projection import (
    PARTS,
    MappedBasis,
    ProjectedParts,
    project_basis,
    split_heads,
)
from tl_geometry.scores.resampling import (
    GroupParts,
    Noise,
    adjusted,
    position_null,
    require_unseen,
    resampled,
)
from tl_geometry.scores.splitter import is_relative, require_positions, rounding_flags
from tl_geometry.scores.sums import ShareSums, contexts_at_once, share_sums
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.scores.terms import bias_label

KEPT_BYTES = 2**28
"""Projections of mean and pos are kept between batches where those of all layers fit."""


def sweep_heads(
    model: ModelLike,
    windows: TokensLike,
    basis: PositionContext | None = None,
    *,
    parts: tuple[str, str] | str = PARTS[1:],
    layers: Sequence[int] | int | None = None,
    heads: Sequence[Head] | Head | None = None,
    intervals: bool = False,
    planes: bool = False,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> SweepTable | Any:  # with ``parts="writers"`` or ``"blocks"`` a WriterSweep
    """Shares, dominant terms and head types of every attention head, in one pass over ``windows``
    that forms no term as a matrix.

    For each head, over all windows and rows: covariance share ``cs_X = sum X~ . S~ / sum S~^2``,
    and gain share ``gs_X`` (the part in where attention goes) of the terms X over {bias, pos, cvec}
    on either side and of the groups position, content, token and mixed (row-centred; Song & Zhong
    2023, Eq. 7, with the norm scale frozen so that the terms sum to the model's scores). Shares
    have no unit; formulas in :mod:`tl_geometry.scores.sums`.

    Args:
        windows: anything that :func:`tl_geometry.decompose` takes, any number of one length.
        basis: from :func:`tl_geometry.decompose` of the same model, of its states or normalised
            (the same scores, other terms; see :func:`tl_geometry.split_scores`). The first
            ``basis.window[0]`` queries and keys are left out of the shares (position 0 is an
            attention sink); the attention paid to them is the column ``dropped_mass``.
        parts: ``("pos", "cvec")``, or ``"writers"`` or ``"blocks"`` for who wrote what each head
            reads: a :class:`~tl_geometry.circuits.writer_sweep.WriterSweep` with the share of
            every earlier head, MLP and embedding on the query and on the key side. Writers need no
            basis; a basis then only says how many positions to leave out, and without one a BOS
            token is left out.
        layers, heads: which heads, all by default.
        intervals: 95% intervals of the shares (then a head is labelled only where the margin's
            interval excludes zero), the share that position has by noise alone, and the p-value of
            the share of position (:mod:`tl_geometry.scores.resampling`). For windows that the basis
            has not seen, at least 32 of them.
        planes: shares of rotary planes, ``.planes()``, at no further cost.
        batch_size: contexts of one batch.
        prepend_bos: whether strings get the BOS token; with text only.

    Returns a :class:`SweepTable`, one row per head: ``.to_dataframe()``, ``.top("induction", 10)``,
    ``.shares()``.

    Raises ``ReconstructionError`` where the split does not reproduce the model's own queries, keys,
    scores and patterns (checked on one context of every batch), ``GeometryError`` for a basis of
    another model or of fewer positions, and for intervals of windows that the basis has seen.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> tlg.sweep_heads(model, windows, basis, progress=False).top("induction", 2).heads
    ((1, 0), (1, 3))
    """
    view = as_view(model)
    if basis is not None:
        require_basis(basis)
    options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
    if isinstance(parts, str):
        checks.choice(parts, GRAINS, "parts")
        choices = {"heads": heads is not None, "intervals": intervals, "planes": planes}
        asked = ", ".join(name for name, given in choices.items() if given)
        require(not asked, "parts", expected="no other choices with writers", got=asked)
        options |= {"prepend_bos": prepend_bos, "layers": layers}
        drop = None if basis is None else basis.window[0]
        # by name, an exception: circuits/ comes after scores/ in the order of packages
        writers = importlib.import_module("tl_geometry.circuits.writer_sweep")
        return writers.sweep_writers(view, windows, grain=parts, drop=drop, **options)
    if basis is None:
        instead = 'decompose(model, windows), or parts="writers"'
        fail("basis", expected="a PositionContext", got=None, instead=instead)
    fits, expected = parts == PARTS[1:], f'{PARTS[1:]}, "writers" or "blocks"'
    require(fits, "parts", expected=expected, got=parts, instead="split_scores(..., parts=...)")
    require(seed >= 0, "seed", expected="a whole number, at least 0", got=seed)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    source = as_tokens(view, windows, prepend_bos=prepend_bos)
    basis.require_identifiable("sweep_heads")
    require_positions(basis, source.length)
    drop, blocks = basis.window[0], sorted({layer for layer, _ in chosen})
    expected = f"more than {drop + 1} positions (the window starts at {drop})"
    require(source.length > drop + 1, "tokens", expected=expected, got=source.length)
    if intervals:
        require_unseen(basis, source.tokens)
    sums = {layer: LayerSums(basis, len(blocks), intervals, planes) for layer in blocks}
    stream = _pass(view, source, basis, sums, **options)
    types = measure_types(view, blocks, bos=bool(basis.provenance.has_bos), seed=1234 + seed)
    left_out = (f"queries and keys before position {drop} left out",) if drop else ()
    of_layers = (flag for of in sums.values() for flag in of.flags)
    cut = (flag for flag in (CUT, APART) if intervals and flag in basis.provenance.flags)
    flags = (*left_out, *of_layers, *basis.remarks(view), *source.flags, *cut)
    provenance = stream.provenance(
        drop,
        has_bos=basis.provenance.has_bos,
        normalized=basis.provenance.normalized,
        flags=tuple(dict.fromkeys(flags)),
    )
    table = _table(view, sums, types, provenance, seed)
    table = table.select(torch.tensor([table.heads.index(head) for head in chosen]))
    if intervals:
        corrected = {"p_position_bh": adjusted(table.nulls["p_position"])}
        table = dataclasses.replace(table, nulls={**table.nulls, **corrected})
    return table


def _pass(
    view: ModelView,
    source: TokenWindows,
    basis: PositionContext,
    sums: dict[int, LayerSums],
    *,
    batch_size: int | None,
    progress: bool,
    seed: int,
) -> CorpusPass:
    """Add up the sums of all layers in one pass over the windows."""
    for layer in sums:
        basis.index(layer)  # refuse a layer that the basis lacks before the pass begins
    rows = batch_of(batch_size, source.length, view.device)
    stream = CorpusPass(view, source, rows, progress=progress, seed=seed)
    for batch in stream:
        # one batch without BOS decides; while all have BOS a later one may not, so None for now
        basis.check_model(view, None if stream.begins_with_bos else False)
        options = stream.sample(lambda layer: sums[layer.layer].verify(layer))
        view.run_layers(
            batch, list(sums), lambda layer: sums[layer.layer].add(layer), verify=False, **options
        )
    basis.check_model(view, stream.begins_with_bos)
    return stream


@dataclass(eq=False)
class LayerSums:
    """Sums in progress of one layer, on its device: those of each block of windows (one block
    without ``intervals``), the attention paid to dropped keys, and for intervals those of all pairs
    of the parts of groups. ``layers`` is the number of layers that are swept at once."""

    basis: PositionContext
    layers: int
    intervals: bool
    by_plane: bool
    of_blocks: list[ShareSums] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    pairs: ShareSums | None = None
    noise: Noise | None = None
    mass: Float[Tensor, " head"] = field(default_factory=lambda: torch.zeros(1).double())
    mapped: MappedBasis | None = None
    planes: RotaryPlanes | None = None
    rotary: bool = False
    relative: bool = True
    flags: dict[str, None] = field(default_factory=dict)

    def verify(self, layer: LayerView) -> None:
        """Check the parts of the sampled context; the pass itself has compared the layer with the
        model. cvec is checked in the first batch only."""
        normalized, first = self.basis.provenance.normalized, not self.counts
        self.relative &= is_relative(layer.normalized() if normalized else layer)
        parts = split_heads(layer, self._projection(layer))
        if first:
            check_cvec(layer, self.basis, parts)
            if layer.softcap is not None:
                self.flags["scores before the soft cap"] = None
        self.flags |= dict.fromkeys(rounding_flags(layer, parts.q, parts.k))

    def add(self, layer: LayerView) -> None:
        """Take in one layer of one batch, a few contexts at a time."""
        start, contexts, self.rotary = self.basis.window[0], len(layer.h), layer.rotary
        mapped, groups = self._projection(layer), None
        if self.by_plane and self.planes is None:
            self.planes = layer.planes()
        plane = None if self.planes is None else self.planes.plane
        options: dict[str, Any] = {"softcap": layer.softcap}
        options["bias"] = None if layer.bias is None else layer.bias[:, start:, start:]
        mask = layer.allowed[start:, start:]
        if self.intervals:
            groups = GroupParts(layer, self.basis)
            noise = groups.noise(layer, start)
            self.noise = noise if self.noise is None else self.noise + noise
        step = contexts_at_once(layer.q, len(PARTS))
        at = 0
        while at < contexts:
            # a step ends where a block of windows is full
            room = BLOCK - self.counts[-1] % BLOCK if self.counts else BLOCK
            some = slice(at, min(at + step, contexts, at + room if groups else contexts))
            parts = split_heads(layer, mapped, contexts=some, start=start)
            self._take(share_sums(*parts, mask, plane=plane, **options), some.stop - at)
            if groups:
                pairs = share_sums(*groups.of(layer, some, start), mask, **options)
                self.pairs = pairs if self.pairs is None else self.pairs + pairs
            at = some.stop
        if start and layer.pattern is not None:
            paid = layer.pattern[:, :, start:, :start].sum((0, 2, 3), dtype=torch.float64)
            self.mass = self.mass + paid.cpu() / (layer.pattern.shape[2] - start)

    def _take(self, sums: ShareSums, contexts: int) -> None:
        """Add the sums of some contexts to the block of windows that they belong to."""
        if not self.counts or (self.intervals and self.counts[-1] == BLOCK):
            self.of_blocks.append(sums)
            self.counts.append(contexts)
        else:
            self.of_blocks[-1] += sums
            self.counts[-1] += contexts

    def _projection(self, layer: LayerView) -> MappedBasis:
        """Projected mean and pos, kept between batches while they are small."""
        mapped = self.mapped or project_basis(layer, self.basis, layer.h.shape[1])
        if mapped.q.numel() * mapped.q.element_size() * 2 * self.layers <= KEPT_BYTES:
            self.mapped = mapped
        return mapped

    def samples(self) -> tuple[dict[str, Tensor], tuple[tuple[float, ...], ...]]:
        """Shares with groups and blocks left out (:func:`resampled`)."""
        assert self.pairs is not None
        of_blocks = [dataclasses.replace(sums, by_plane=None).to("cpu") for sums in self.of_blocks]
        return resampled(of_blocks, self.counts, self.pairs.to("cpu"), self.basis.group_counts)

    def null(self, seed: int) -> dict[str, Tensor]:
        """The null of position (:func:`position_null`)."""
        assert self.pairs is not None
        assert self.noise is not None
        counts = self.basis.group_counts[self.basis.group_counts > 0].double()
        share, noise = counts / counts.sum(), self.noise.to("cpu")
        return position_null(self.pairs.to("cpu"), share, noise, rotary=self.rotary, seed=seed)


def _table(
    view: ModelView,
    sums: dict[int, LayerSums],
    types: HeadTypes,
    provenance: Provenance,
    seed: int,
) -> SweepTable:
    """The finished table of all heads of the layers."""
    heads = range(view.n_heads)
    of_layers = list(sums.values())
    more: dict[str, Any] = {}
    if of_layers[0].intervals:
        samples = [of.samples() for of in of_layers]
        nulls = [of.null(seed) for of in of_layers]
        more["samples"] = {n: torch.cat([x[n] for x, _ in samples]) for n in samples[0][0]}
        more["sizes"] = samples[0][1]
        more["nulls"] = {name: torch.cat([x[name] for x in nulls]) for name in nulls[0]}
    planes = [of.planes for of in of_layers for _ in heads if of.planes is not None]
    if planes:
        more["head_planes"] = HeadPlanes.of(planes, (provenance.window or (0, 0))[1])
    mass = torch.cat([of.mass.expand(view.n_heads) for of in of_layers])
    rotary, relative = (all(getattr(of, x) for of in of_layers) for x in ("rotary", "relative"))
    pooled = [reduce(ShareSums.__add__, of.of_blocks) for of in of_layers]
    return SweepTable.of(
        ShareSums.beside(pooled),
        provenance=provenance,
        heads=tuple((layer, head) for layer in sums for head in heads),
        parts=PARTS,
        bias_label=bias_label(rotary=rotary, relative=relative),
        dropped_mass=mass / (provenance.contexts or 1),
        types=types.scores,
        type_errors=types.errors,
        baselines=types.baselines,
        **more,
    )


def check_cvec(layer: LayerView, basis: PositionContext, parts: ProjectedParts) -> None:
    """Compare cvec by subtraction (part 2 of ``parts``) with its explicit projection, within 32 u A
    (4 u A in half precision); A is the sum of absolute values of what is added up."""
    layer = layer.normalized() if basis.provenance.normalized else layer
    h = layer.h.double()
    mean, pos = (x.to(h) for x in basis.of_state(layer.layer, h.shape[1]))
    cvec64 = h - (mean + pos)
    # where parts cancel, rounding grows with their norms, not with that of h; 1e-300 avoids 0 / 0
    norms = mean.norm(dim=-1) + pos.norm(dim=-1) + cvec64.norm(dim=-1)
    cancellation = max(1.0, float((norms / h.norm(dim=-1).clamp(min=1e-300)).max()))
    cvec, scale = cvec64.to(layer.h), layer.scale
    for name, subtracted, explicit, unit in (
        ("q", parts.q, layer.project_q(cvec) * scale, scale),
        ("k", parts.k, layer.project_k(cvec), 1.0),
    ):
        size = cancellation * unit * layer.reconstruction.sizes.get(name, 0.0)
        size = max(float(subtracted.abs().sum(0).max()), size)
        error = float((subtracted[2] - explicit).abs().max())
        bound = reconstruction_bound(layer.roundoff, size)
        require(
            error <= bound,
            f"cvec of {name} in layer {layer.layer}",
            expected=f"subtraction and projection within {bound:.2e}",
            got=f"{error:.2e}",
            instead="check_model(model)",
            error=ReconstructionError,
        )
