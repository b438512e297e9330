"""``sweep_heads``: what drives each attention head of a model, and what type of head it is, for all
heads of all layers in one streamed pass.

Each batch runs once through the model. As soon as a layer's attention has been computed, its
queries and keys are split (frozen norm scale) and the sums behind the shares are updated, a few
contexts at a time, so that no term exists as a matrix:

1. Mean and pos are projected once per layer and divided by the frozen norm scale (with a normalised
   basis there is none). cvec is the remainder of the model's own q and k.
2. For one context of every batch, at another row each time, the model's queries, keys, scores and
   patterns are recomputed from the stream. In the first batch cvec is projected explicitly there:
   a remainder makes the parts add up whatever mean and pos are, so their sum alone proves nothing.
3. :func:`tl_geometry.scores.sums.sums_of_some` adds up numerators and gains of a block of windows,
   the parts of the basis once for all of them (:mod:`tl_geometry.scores.shared_parts`).

Head types come from repeated random tokens made for the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.passes import batches, cuts
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.groups import APART, BLOCK, CUT
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.batches import batch_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import some_rows
from tl_geometry.models.rotary import RotaryPlanes
from tl_geometry.models.writers import GRAINS
from tl_geometry.scores import resampling
from tl_geometry.scores.families import stream_parts
from tl_geometry.scores.head_types import measure_types
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.projection import (
    PARTS,
    MappedBasis,
    of_groups,
    project_basis,
    shared_heads,
    split_heads,
)
from tl_geometry.scores.resampling import Noise, without
from tl_geometry.scores.share_table import SweepTable
from tl_geometry.scores.splitter import check_basis, compare_parts, is_relative
from tl_geometry.scores.sums import SHARES, ShareSums, blocks_of, sums_of_some
from tl_geometry.scores.terms import bias_label
from tl_geometry.scores.writer_sweep import sweep_writers

KEPT_BYTES = 2**28
"""Projections of mean and pos are kept between batches where those of all layers fit."""


def sweep_heads(
    model: ModelLike,
    windows: TokensLike,
    basis: PositionContext | None = None,
    *,
    parts: tuple[str, str] | str = PARTS[1:],
    layers: Sequence[int] | int | None = None,
    heads: Sequence[checks.Head] | checks.Head | None = None,
    intervals: bool = False,
    planes: bool = False,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> SweepTable | Any:  # with ``parts="writers"`` or ``"blocks"`` a WriterSweep
    """Shares, dominant terms and type (induction, previous-token, duplicate-token) of every
    attention head, in one pass over ``windows`` that forms no term as a matrix.

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
            reads: a :class:`~tl_geometry.scores.writer_sweep.WriterSweep` with the share of
            every earlier head, MLP and embedding on the query and on the key side. Writers need no
            basis; a basis then only says how many positions to leave out, and without one a BOS
            token is left out.
        layers, heads: which heads, all by default.
        intervals: 95% intervals of the shares (then a head is labelled only where the margin's
            interval excludes zero), the share that position has by noise alone, and the p-value of
            the share of position (:mod:`tl_geometry.scores.resampling`). For windows that the basis
            has not seen, at least 32 of them, and a basis of four blocks of 8 contexts or more.
        planes: shares of rotary planes too, ``.planes()``.
        batch_size: contexts of one batch.
        prepend_bos: whether strings get the BOS token; with text only.

    Returns a :class:`SweepTable`, one row per head: ``.to_dataframe()``, ``.top("induction", 10)``.

    Raises ``ReconstructionError`` where the split does not reproduce the model's own queries, keys,
    scores and patterns (checked on one context of every batch, of a long one on 512 query rows),
    ``GeometryError`` for a basis of another model or of fewer positions, and for intervals of
    windows that the basis has seen.

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
    if isinstance(parts, str):
        checks.choice(parts, GRAINS, "parts")
        choices = {"heads": heads is not None, "intervals": intervals, "planes": planes}
        asked = ", ".join(name for name, given in choices.items() if given)
        require(not asked, "parts", expected="no other choices with writers", got=asked)
        options: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
        options |= {"prepend_bos": prepend_bos, "layers": layers}
        options |= {"drop": None if basis is None else basis.window[0]}
        return sweep_writers(view, windows, grain=parts, **options)
    if basis is None:
        instead = 'decompose(model, windows), or parts="writers"'
        fail("basis", expected="a PositionContext", got=None, instead=instead)
    fits, expected = parts == PARTS[1:], f'{PARTS[1:]}, "writers" or "blocks"'
    require(fits, "parts", expected=expected, got=parts, instead="split_scores(..., parts=...)")
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    source = as_tokens(view, windows, prepend_bos=prepend_bos)
    swept = sorted({layer for layer, _ in chosen})
    _check(view, basis, source, swept, intervals)
    cut = cuts(len(source), batch_of(batch_size, source.length, view.device))
    sums = {layer: LayerSums(basis, len(swept), intervals, planes) for layer in swept}
    for batch in batches(view, source, cut, progress=progress, seed=seed):
        sample = batch.sample(lambda layer: sums[layer.layer].verify(layer))
        add = lambda layer: sums[layer.layer].add(layer)  # noqa: E731
        view.run_layers(batch.tokens, swept, add, **sample)
    table = _table(view, source, basis, sums, seed)
    table = table.select(torch.tensor([table.heads.index(head) for head in chosen]))
    if not intervals:
        return table
    corrected = {"p_position_bh": resampling.adjusted(table.nulls["p_position"])}
    return dataclasses.replace(table, nulls={**table.nulls, **corrected})


def _check(
    view: ModelView,
    basis: PositionContext,
    source: TokenWindows,
    layers: Sequence[int],
    intervals: bool,
) -> None:
    """Raise unless these windows can be swept with this basis."""
    check_basis(view, source, basis)
    basis.require_identifiable("sweep_heads")
    for layer in layers:
        basis.index(layer)
    drop = basis.window[0]
    expected = f"more than {drop + 1} positions (the window starts at {drop})"
    require(source.length > drop + 1, "tokens", expected=expected, got=source.length)
    if intervals:
        resampling.require_unseen(basis, source.tokens)


@dataclass(eq=False)
class LayerSums:
    """Sums in progress of one layer, on its device: those of the parts of its :class:`MappedBasis`
    over all windows, for intervals those of bias, pos and cvec in each block of 8 windows
    (``of_blocks``), and the attention paid to dropped keys. ``layers`` is the number of layers that
    are swept at once, ``share`` the share of the contexts in each group that the basis is taken
    apart into."""

    basis: PositionContext
    layers: int
    intervals: bool
    by_plane: bool
    sums: ShareSums | None = None
    of_blocks: list[ShareSums] = field(default_factory=list)
    windows: int = 0
    noise: Noise | None = None
    mass: Float[Tensor, " head"] = field(default_factory=lambda: torch.zeros(1).double())
    mapped: MappedBasis | None = None
    share: Float[Tensor, " group"] = field(default_factory=lambda: torch.ones(1).double())
    planes: RotaryPlanes | None = None
    rotary: bool = False
    relative: bool = True
    flags: dict[str, None] = field(default_factory=dict)

    def verify(self, layer: LayerView) -> None:
        """Check in the first batch that the parts of the sampled context sum to the model's queries
        and keys, with cvec projected from the stream."""
        if self.windows:
            return  # bias and pos are the same in every batch, and cvec is a remainder
        layer = layer.normalized() if self.basis.provenance.normalized else layer
        self.relative = is_relative(layer)
        mapped = project_basis(layer, self.basis, layer.h.shape[1])
        known = [x[:-1] for x in split_heads(layer, mapped)]  # without cvec, which is a remainder
        stream = stream_parts(self.basis, PARTS[1:], layer)["cvec"].unsqueeze(0)
        cvec = [layer.project(stream, "q") * layer.scale, layer.project(stream, "k")]
        if layer.softcap is not None:
            self.flags["scores before the soft cap"] = None
        q, k = (torch.cat(pair) for pair in zip(known, cvec, strict=True))
        rows, heads = some_rows(q.shape[2]), list(range(q.shape[3]))
        self.flags |= dict.fromkeys(compare_parts(layer, q, k, heads, rows)[2])

    def add(self, layer: LayerView) -> None:
        """Take in one layer of one batch, a few contexts at a time."""
        start, contexts, self.rotary = self.basis.window[0], len(layer.h), layer.turn is not None
        mapped = self._projection(layer)
        if self.by_plane and self.planes is None:
            self.planes = layer.planes()
        blocks = list(blocks_of(layer.allowed[start:, start:], layer.q))
        options: dict[str, Any] = {
            "bias": None if layer.bias is None else layer.bias[:, start:, start:],
            "softcap": layer.softcap,
            "plane": None if self.planes is None else self.planes.plane,
        }
        if self.intervals:
            noise = resampling.noise_of(layer, mapped, start)
            self.noise = noise if self.noise is None else self.noise + noise
        at = 0
        while at < contexts:
            # at most 8 windows: shared parts are contracted once for these, and intervals need
            # their sums
            some = slice(at, min(at + BLOCK - self.windows % BLOCK, contexts))
            q, k, shared, constant = shared_heads(layer, mapped, some, start)
            sums = sums_of_some(q, k, blocks, shared=shared, **options)
            sums = sums.of_parts(of_groups(mapped.share)) if constant else sums
            self._take(sums, some.stop - at)
            at = some.stop
        if start and layer.pattern is not None:
            paid = layer.pattern[:, :, start:, :start].sum((0, 2, 3), dtype=torch.float64)
            self.mass = self.mass + paid.cpu() / (layer.pattern.shape[2] - start)

    def _take(self, sums: ShareSums, contexts: int) -> None:
        """Add the sums of some contexts, and to the block of windows that they belong to."""
        self.sums = sums if self.sums is None else self.sums + sums
        if self.intervals:
            block = dataclasses.replace(sums, by_plane=None).of_parts(without(self.share))
            if self.windows % BLOCK:
                block = self.of_blocks.pop() + block
            self.of_blocks.append(block)
        self.windows += contexts

    def _projection(self, layer: LayerView) -> MappedBasis:
        """Projected mean and pos, kept between batches while they are small."""
        length = layer.h.shape[1]
        mapped = self.mapped or project_basis(layer, self.basis, length, by_group=self.intervals)
        self.share = mapped.share
        if mapped.q.numel() * mapped.q.element_size() * 2 * self.layers <= KEPT_BYTES:
            self.mapped = mapped
        return mapped

    @property
    def pairs(self) -> ShareSums:
        """The sums of all windows, on the CPU, by pairs of the parts of groups."""
        assert self.sums is not None
        return self.sums.to("cpu")

    def samples(self) -> tuple[dict[str, Tensor], tuple[tuple[float, ...], ...]]:
        """Shares with groups and blocks left out."""
        of_blocks = [sums.to("cpu") for sums in self.of_blocks]
        return resampling.resampled(self.pairs, of_blocks, self.windows, self.basis.group_counts)

    def null(self, seed: int) -> dict[str, Tensor]:
        """The null of position and its p-values."""
        assert self.noise is not None
        sums, noise = self.pairs, self.noise.to("cpu")
        return resampling.position_null(sums, self.share, noise, rotary=self.rotary, seed=seed)


def _table(
    view: ModelView,
    source: TokenWindows,
    basis: PositionContext,
    sums: dict[int, LayerSums],
    seed: int,
) -> SweepTable:
    """The finished table of all heads of the layers."""
    of_layers, has_bos, drop = list(sums.values()), source.has_bos, basis.window[0]
    types = measure_types(view, list(sums), bos=bool(has_bos), seed=1234 + seed)
    intervals = of_layers[0].intervals
    more: dict[str, Any] = {}
    if intervals:
        samples, nulls = [of.samples() for of in of_layers], [of.null(seed) for of in of_layers]
        more["samples"] = {n: torch.cat([x[n] for x, _ in samples]) for n in SHARES}
        more["sizes"] = samples[0][1]
        more["nulls"] = {name: torch.cat([x[name] for x in nulls]) for name in nulls[0]}
    planes = [of.planes for of in of_layers for _ in range(view.n_heads) if of.planes is not None]
    if planes:
        more["head_planes"] = HeadPlanes.of(planes, source.length)
    flags = [f"queries and keys before position {drop} left out"] if drop else []
    flags += [*(flag for of in of_layers for flag in of.flags), *basis.remarks(view)]
    flags += [flag for flag in (CUT, APART) if intervals and flag in basis.provenance.flags]
    provenance = view.provenance(
        source,
        window=(drop, source.length),
        seed=seed,
        has_bos=has_bos,
        normalized=basis.provenance.normalized,
        sources=basis.provenance.sources,
        flags=tuple(dict.fromkeys(flags)),
    )
    mass = torch.cat([of.mass.expand(view.n_heads) for of in of_layers])
    rotary, relative = (all(getattr(of, x) for of in of_layers) for x in ("rotary", "relative"))
    return SweepTable.of(
        ShareSums.beside([of.pairs.of_parts(without(of.share)) for of in of_layers]),
        provenance=provenance,
        heads=tuple((layer, head) for layer in sums for head in range(view.n_heads)),
        parts=PARTS,
        bias_label=bias_label(rotary=rotary, relative=relative),
        dropped_mass=mass / len(source),
        types=types.scores,
        type_errors=types.errors,
        baselines=types.baselines,
        **more,
    )
