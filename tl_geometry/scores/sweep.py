"""What drives each attention head of a model, and what type of head is it? The public function
``sweep_heads`` answers for all heads of all layers in one streamed pass; the report and the causal
test of dominant terms call it too.

Each batch runs once through the model. As soon as a layer's attention has been computed, its
queries and keys are split (frozen norm scale) and the sums behind the shares are updated, a few
contexts at a time, so that no term exists as a matrix:

1. Mean and pos are projected once per layer and divided by the frozen norm scale (with a normalised
   basis there is none). cvec is the remainder of the model's own q and k.
2. For one context of every batch, at another row each time, the model's queries, keys, scores and
   patterns are recomputed from the stream. For the first one cvec is also projected explicitly: a
   remainder makes the parts add up whatever mean and pos are, so the sum alone proves nothing.
3. :func:`tl_geometry.scores.sums.share_sums` adds up numerators, gains and energies.

Head types come from repeated random tokens made for the model.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import ReconstructionError, fail, require
from tl_geometry.base.intervals import FEWEST_GROUPS
from tl_geometry.base.results import Provenance
from tl_geometry.base.rows import after
from tl_geometry.base.transfer import on_cpu
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.groups import APART, CUT
from tl_geometry.decomposition.groups import BLOCK as CONTEXTS_PER_BLOCK
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.batches import SAMPLED
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.rotary import RotaryPlanes, rotary_planes
from tl_geometry.models.row_pass import ROW_CELLS
from tl_geometry.models.verify import some_queries
from tl_geometry.models.writers import GRAINS
from tl_geometry.scores.blockwise import BLOCK, PlaneIndex
from tl_geometry.scores.corpus_pass import CorpusPass, rows_per_batch
from tl_geometry.scores.details import DETAILS, Details
from tl_geometry.scores.head_types import HeadTypes, measure_types
from tl_geometry.scores.leave_out import Resampled, own_groups
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.projection import (
    PARTS,
    MappedBasis,
    ProjectedParts,
    project_basis,
    split_layer,
)
from tl_geometry.scores.splitter import is_relative, rounding_flags
from tl_geometry.scores.sums import ShareSums, share_sums
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.scores.terms import bias_label

WORKING_SET = {"cpu": 2**23, "cuda": 2**29}
"""Bytes that one step works on, by type of device: about the cache of a CPU core, or enough to fill
a GPU."""


@overload
def sweep_heads(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext,
    *,
    parts: tuple[str, str] = PARTS[1:],
    layers: Sequence[int] | int | None = None,
    detail: Sequence[str] | str = (),
    memory_budget: int = 2**31,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> SweepTable: ...
@overload
def sweep_heads(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext | None = None,
    *,
    parts: Literal["writers", "blocks"],
    layers: Sequence[int] | int | None = None,
    detail: Sequence[str] | str = (),
    memory_budget: int = 2**31,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Any: ...
def sweep_heads(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext | None = None,
    *,
    parts: tuple[str, str] | str = PARTS[1:],
    layers: Sequence[int] | int | None = None,
    detail: Sequence[str] | str = (),
    memory_budget: int = 2**31,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Any:
    """Shares, dominant terms and head types of every head, in one pass over ``tokens`` that
    forms no term as a matrix.

    For each head, over all prompts and rows: covariance share ``cs_X = sum X~ . S~ / sum S~^2``,
    and gain share ``gs_X`` (the part in where attention goes) of the terms X over {bias, pos, cvec}
    on either side and of the groups position, content and mixed (row-centred; Song & Zhong 2023,
    Eq. 7, with the norm scale frozen so that the terms sum to the model's scores). Shares have no
    unit; formulas in :mod:`tl_geometry.scores.sums`.

    Args:
        tokens: anything that :func:`tl_geometry.decompose` takes, any number of prompts of one
            length.
        basis: from :func:`tl_geometry.decompose` of the same model, of its states or normalised
            (the same scores, other terms; see :func:`tl_geometry.split_scores`). The first
            ``basis.window[0]`` queries and keys are left out of the shares (position 0 is an
            attention sink); the attention paid to them is the column ``dropped_mass``.
        parts: ``("pos", "cvec")``, or ``"writers"`` or ``"blocks"`` for who wrote what each head
            reads: a :class:`~tl_geometry.circuits.WriterSweep` with the share of every earlier
            head, MLP and embedding on the query and on the key side. Writers need no basis; a basis
            then only says how many positions to leave out, and without one a BOS token is left out.
        layers: blocks to look at, all by default.
        detail: more to measure, at a cost: ``"ablation"`` (total variation and KL of the pattern
            without each term), ``"toeplitz"`` and ``"offsets"`` (how far the positional terms
            depend on i - j only, and the mean by offset), ``"contrast"`` (token identity in
            cvec-cvec), ``"intervals"`` (95% intervals of the shares, corrected for the bias of a
            basis made from the same contexts; then a head is labelled only where the margin's
            interval excludes zero; :mod:`tl_geometry.scores.leave_out`), ``"nulls"`` (the share
            that position has by noise alone, the p-value of the share of position, and the p-value
            adjusted for the number of heads by Benjamini and Hochberg;
            :mod:`tl_geometry.scores.position_null`), ``"energy"`` (energy shares ``es_X =
            sum X~^2 / sum_Y sum Y~^2``, NaN without); and ``"planes"`` (shares of rotary planes,
            ``.planes()``), at no further cost.
        memory_budget: bytes held for one batch.
        batch_size: contexts of one batch, fewer where the budget does not allow them.
        prepend_bos: whether strings get the BOS token; with text only.

    Returns a :class:`SweepTable`, one row per head: ``.to_dataframe()``, ``.top("induction", 10)``,
    ``.shares()``.

    Raises ``ReconstructionError`` where the split does not reproduce the model's own queries, keys,
    scores and patterns (checked on one context of every batch), ``BudgetError`` where one context
    exceeds the budget, ``GeometryError`` for a basis of another model or of fewer positions, and
    for unknown details.

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
        fits, got = not detail, f"detail={detail!r} with parts={parts!r}"
        require(fits, "detail", expected="no detail with writers", got=got)
        options: dict[str, Any] = {
            "memory_budget": memory_budget,
            "batch_size": batch_size,
            "seed": seed,
        }
        options |= {"prepend_bos": prepend_bos, "progress": progress, "layers": layers}
        drop = None if basis is None else basis.window[0]
        # by name, an exception: circuits/ comes after scores/ in the order of packages
        writers = importlib.import_module("tl_geometry.circuits.writer_sweep")
        return writers.sweep_writers(view, tokens, grain=parts, drop=drop, **options)
    if basis is None:
        instead = 'decompose(model, tokens), or parts="writers"'
        fail("basis", expected="a PositionContext", got=None, instead=instead)
    fits, expected = parts == PARTS[1:], f'{PARTS[1:]}, "writers" or "blocks"'
    require(fits, "parts", expected=expected, got=parts, instead="split_scores(..., parts=...)")
    wanted = (detail,) if isinstance(detail, str) else tuple(detail)
    for name in wanted:
        checks.choice(name, DETAILS, "detail")
    chosen = checks.indices(layers, view.n_layers, "layers")
    source = TokenSource.of(view, tokens, prepend_bos=prepend_bos)
    basis.require_identifiable("sweep_heads")
    size = _bytes_per_context(view, source.length)
    contexts_per_batch = rows_per_batch(view, source.length, size, memory_budget, batch_size)
    sums = _SweepSums(view, basis, chosen, source.length, wanted, memory_budget, seed)
    stream = CorpusPass(view, source, contexts_per_batch, progress=progress, seed=seed)
    for batch in stream:
        # one batch without BOS decides; while all have BOS a later one may not, so None for now
        basis.check_model(view, None if stream.begins_with_bos else False)
        sums.begin(batch)
        options = stream.sample(sums.verify)
        options["on_rows"] = sums.on_rows
        view.run_layers(batch, chosen, sums.on_layer, verify=False, **options)
    basis.check_model(view, stream.begins_with_bos)
    has_bos, normalized = basis.provenance.has_bos, basis.provenance.normalized
    types = measure_types(view, chosen, bos=bool(has_bos), seed=1234 + seed)
    flags = (*sums.flags(), *basis.remarks(view), *source.flags)
    return sums.table(
        types, stream.provenance(sums.drop, has_bos=has_bos, normalized=normalized, flags=flags)
    )


def _bytes_per_context(view: ModelView, length: int) -> int:
    """Bytes that one context holds in a forward pass (an estimate): a layer's pattern and scores,
    its vectors, and the step that works on them; in blocks of rows, one block of pattern and scores
    and the vectors of all layers."""
    width = view.n_heads * view.d_head
    cells, vectors = 2 * view.n_heads * length**2, 14 * width + 8 * view.d_model
    if view.in_rows(length):
        cells, vectors = 2 * ROW_CELLS, vectors + view.n_layers * (4 * width + view.d_model)
    numbers = cells + length * vectors
    return max(4, view.dtype.itemsize) * numbers


def check_cvec(layer: LayerView, basis: PositionContext, parts: ProjectedParts) -> None:
    """Compare cvec by subtraction (part 2 of ``parts``) with its explicit projection, within 32 u A
    (4 u A in half precision); A is the sum of absolute values of what is added up."""
    layer = layer.normalized() if basis.provenance.normalized else layer
    row = basis.index(layer.layer)
    h = layer.h.double()
    mean, pos = basis.mean[row].to(h), basis.pos_seen[row, : h.shape[1]].to(h)
    cvec64 = h - (mean + pos)
    # where parts cancel, rounding grows with their norms, not with that of h; 1e-300 avoids 0 / 0
    norms = (x.norm(dim=-1) for x in (mean, pos, cvec64))
    cancellation = max(
        1.0, float((sum(norms, torch.zeros(())) / h.norm(dim=-1).clamp(min=1e-300)).max())
    )
    cvec, scale, sizes = cvec64.to(layer.h), layer.scale, layer.reconstruction.sizes
    layer_sizes = {w: cancellation * sizes.get(w, 0.0) * (scale if w == "q" else 1.0) for w in "qk"}
    for name, subtracted, explicit in (
        ("q", parts.q, layer.project_q(cvec) * scale),
        ("k", parts.k, layer.project_k(cvec)),
    ):
        size = max(float(subtracted.abs().sum(0).max()), layer_sizes[name])
        error = float((subtracted[2] - explicit).abs().max())
        bound = reconstruction_bound(layer.roundoff, size)
        if error > bound:
            what, expected = f"cvec of {name} in layer {layer.layer}", "subtraction and projection"
            fail(
                what,
                expected=f"{expected} within {bound:.2e}",
                got=f"{error:.2e}",
                instead="check_model(model)",
                error=ReconstructionError,
            )


class _SweepSums:
    """Sums in progress over one pass, by layer, on the layers' devices; they are moved once, at the
    end. ``batch`` are the tokens that the model is running over, ``own`` the group of the basis
    that each of its contexts belongs to (for intervals and nulls), ``mass`` the attention paid to
    dropped keys, ``blunt`` flags of layers where rounding hides errors (the keys of a dict, which
    keep their order)."""

    def __init__(
        self,
        view: ModelView,
        basis: PositionContext,
        layers: Sequence[int],
        length: int,
        detail: Sequence[str],
        memory_budget: int,
        seed: int,
    ) -> None:
        self.drop = basis.window[0]
        expected = f"at most {basis.length} positions, as the basis has seen"
        instead = "decompose(...) on windows of this length"
        require(length <= basis.length, "tokens", expected=expected, got=length, instead=instead)
        expected = f"more than {self.drop + 1} positions (the window starts at {self.drop})"
        require(length > self.drop + 1, "tokens", expected=expected, got=length)
        # refuse a layer that the basis lacks before the pass begins
        for layer in layers:
            basis.index(layer)
        self.view, self.basis, self.layers, self.length = view, basis, tuple(layers), length
        self.memory_budget, self.seed = memory_budget, seed
        self.detail = tuple(name for name in detail if name not in ("planes", "energy"))
        self.energy, self.by_plane = "energy" in detail, "planes" in detail
        self.batch: Tensor = torch.empty(0, length, dtype=torch.int64)
        self.projected: dict[int, MappedBasis] = {}
        self.sums: dict[int, ShareSums] = {}
        self.mass: dict[int, Float[Tensor, " head"]] = {}
        self.details: dict[int, Details] = {}
        self.planes: dict[int, RotaryPlanes] = {}
        self.plane_index: dict[int, PlaneIndex] = {}
        self.relative: dict[int, Tensor] = {}
        self.own: list[int] = []
        self.softcap, self.rotary = False, True
        self.blunt: dict[str, None] = {}

    def begin(self, batch: Tensor) -> None:
        """Begin a batch of tokens, before the model runs over it."""
        self.batch = batch
        if {"intervals", "nulls"} & set(self.detail):
            self.own = own_groups(self.basis, batch).tolist()

    def verify(self, layer: LayerView) -> None:
        """Check the parts of the sampled context; the pass itself has compared the layer with the
        model. cvec is checked in the first batch only."""
        index = layer.layer
        read = layer.normalized() if self.basis.provenance.normalized else layer
        self.relative[index] = is_relative(read) & self.relative.get(index, True)
        parts = split_layer(layer, self._projection(layer), slice(None))
        first = index not in self.sums
        if first:
            check_cvec(layer, self.basis, parts)
        queries = some_queries(self.length, None if first else SAMPLED)
        self.blunt |= dict.fromkeys(rounding_flags(layer, parts.q, parts.k, queries))

    def on_rows(self, layer: int, start: int, pattern: Tensor) -> None:
        """Add the attention that query rows from ``start`` on pay to dropped keys: part of a mean
        over kept queries, summed over contexts (the table divides by their number)."""
        rows = pattern[:, :, max(0, self.drop - start) :, : self.drop]
        mass = rows.sum((0, 2, 3), dtype=torch.float64) / (self.length - self.drop)
        self.mass[layer] = self.mass.get(layer, torch.zeros_like(mass)) + mass

    def on_layer(self, layer: LayerView) -> None:
        """Take in one layer of one batch, a few contexts at a time."""
        index, mapped = layer.layer, self._projection(layer)
        self.softcap = self.softcap or layer.softcap is not None
        self.rotary = self.rotary and layer.rotary
        details = None
        if self.detail:
            details = self.details.setdefault(index, Details(self.detail, self.drop, self.seed))
            details.begin(layer, self.basis)
        # details read dropped positions too; shares alone do without them from the start
        start = 0 if details else self.drop
        bias = None if layer.bias is None else layer.bias[..., start:, start:]
        if self.by_plane and index not in self.planes:
            self.planes[index] = planes = rotary_planes(layer)
            where = planes.plane.to(layer.q.device)
            self.plane_index[index] = PlaneIndex(where, len(planes.theta))
        limit, mask = self._working_set(layer), after(layer.mask, start)
        options: dict[str, Any] = {
            "bias": bias,
            "drop": self.drop - start,
            "softcap": layer.softcap,
            "working_set": limit,
            "energy": self.energy,
            "planes": self.plane_index.get(index),
            "form": layer.mask_form,
        }
        sums: list[ShareSums] = []
        for indices in torch.arange(len(layer.q)).split(self._step(layer, limit)):
            contexts = slice(int(indices[0]), int(indices[-1]) + 1)
            parts = split_layer(layer, mapped, contexts, start=start)
            sums.append(share_sums(parts.q, parts.k, mask, **options))
            if details is not None:
                details.update(layer, parts, contexts, self.batch[contexts], self.own[contexts])
        if details is not None:
            details.end()
        pooled = ShareSums.cat(sums).pooled()
        self.sums[index] = self.sums[index] + pooled if index in self.sums else pooled

    def _working_set(self, layer: LayerView) -> int:
        """Bytes that one step may work on."""
        limit = WORKING_SET.get(layer.q.device.type, WORKING_SET["cpu"])
        return min(limit, max(1, self.memory_budget // 4))

    def _step(self, layer: LayerView, limit: int) -> int:
        """Contexts that are split at a time, by an estimate of the numbers that one holds per head:
        three parts of queries and keys with their temporaries (18 vectors), five blocks of 64 rows
        of scores, and one block of all nine pairs of parts (energies)."""
        _, length, heads, width = layer.q.shape
        numbers = heads * (length * (5 * BLOCK + 18 * width) + 9 * BLOCK * BLOCK)
        return max(1, limit // (layer.q.element_size() * numbers))

    def _projection(self, layer: LayerView) -> MappedBasis:
        """Projected mean and pos, kept between batches while they are small."""
        mapped = self.projected.get(layer.layer)
        if mapped is None:
            mapped = project_basis(layer, self.basis, self.length)
            # this layer's bytes, queries and keys, times the number of layers
            size = mapped.q.numel() * mapped.q.element_size() * 2 * len(self.layers)
            if size <= self.memory_budget // 8:
                self.projected[layer.layer] = mapped
        return mapped

    def flags(self) -> tuple[str, ...]:
        """Flags of the result: what was left out, and what to be careful about."""
        start = [f"queries and keys before position {self.drop} left out"] if self.drop else []
        return (*start, *(["scores before the soft cap"] if self.softcap else []), *self.blunt)

    def _resampled(self) -> Resampled | None:
        """Shares with groups of contexts left out, where intervals were asked for."""
        if "intervals" not in self.detail:
            return None
        layers = [self.details[l].resampled(self.basis.contexts) for l in self.layers]
        cs, gs = (torch.cat([getattr(r, share) for r in layers]) for share in ("cs", "gs"))
        return Resampled(cs, gs, layers[0].sizes)

    def table(self, types: HeadTypes, provenance: Provenance) -> SweepTable:
        """The finished table."""
        order, heads = self.layers, range(self.view.n_heads)
        for details_of_layer in self.details.values():
            details_of_layer.finish()
        resampled = self._resampled()
        if resampled is not None and bool(torch.isnan(resampled.cs).all()):
            too_few = f"fewer than {FEWEST_GROUPS} blocks of {CONTEXTS_PER_BLOCK} contexts"
            provenance = provenance.flagged(f"{too_few}: no intervals")
        elif resampled is not None:
            basis_flags = self.basis.provenance.flags
            provenance = provenance.flagged(*(flag for flag in (CUT, APART) if flag in basis_flags))
        details = [self.details[l] for l in order] if self.details else []
        planes = [self.planes[l] for l in order for _ in heads] if self.by_plane else []
        mass = torch.cat(on_cpu([self.mass[l] for l in order]))
        relative = all(map(bool, on_cpu(list(self.relative.values()))))
        return SweepTable(
            provenance=provenance,
            heads=tuple((layer, head) for layer in order for head in heads),
            parts=PARTS,
            sums=ShareSums.beside([self.sums[l].to("cpu") for l in order]),
            bias_label=bias_label(rotary=self.rotary, relative=relative),
            drop=self.drop,
            dropped_mass=mass / (provenance.contexts or 1),
            resampled=resampled,
            types=types.scores,
            type_errors=types.errors,
            baselines=types.baselines,
            details=Details.beside(details, self.basis.contexts),
            head_planes=HeadPlanes.of(planes, self.length) if planes else None,
        )
