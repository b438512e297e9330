"""All heads of all layers in one streamed pass: what drives each head, and what type of head it is.

Each batch runs once through the model; as soon as a layer's attention has been computed its queries
and keys are split (frozen norm scale) and the sums behind the shares are updated, a few contexts at
a time, so that no term exists as a matrix:

1. mean and pos are projected once per layer and divided by the frozen scale (parts of the normed
   input, from a normalised basis, are not), cvec is the rest of the model's own q and k;
2. of one context of every batch, another row each time, the model's queries, keys, scores and
   patterns are recomputed from the stream, and cvec is projected explicitly, because the
   subtraction alone would add up whatever mean and pos were;
3. :func:`tl_geometry.scores.sums.share_sums` adds up numerators, gains and energies.

Head types come from repeated random tokens made for the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from tqdm.auto import tqdm

from tl_geometry.base import checks
from tl_geometry.base.errors import BudgetError, ReconstructionError, fail, require
from tl_geometry.base.intervals import FEWEST_GROUPS
from tl_geometry.base.results import Provenance, hash_tokens
from tl_geometry.corpus.sources import TokenSource
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.corpus.window_cutter import begins_with_bos
from tl_geometry.decomposition.groups import APART, CUT
from tl_geometry.decomposition.layer_intervals import BLOCK
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.batches import SAMPLED, another_row, default_batch
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.rotary import RotaryPlanes, rotary_planes
from tl_geometry.models.verify import some_queries
from tl_geometry.scores.blockwise import PlaneIndex
from tl_geometry.scores.details import DETAILS, Details
from tl_geometry.scores.families import sweep_of
from tl_geometry.scores.head_types import HeadTypes, measure_types
from tl_geometry.scores.leave_out import Resampled
from tl_geometry.scores.planes import HeadPlanes
from tl_geometry.scores.projection import (
    PARTS,
    MappedBasis,
    ProjectedParts,
    project_basis,
    split_layer,
)
from tl_geometry.scores.splitter import is_relative, rounding_flags
from tl_geometry.scores.sums import ShareSums, dropped_mass, share_sums
from tl_geometry.scores.sweep_table import SweepTable
from tl_geometry.scores.terms import bias_label, term_names

WORKING_SET = {"cpu": 2**23, "cuda": 2**29}
"""Bytes that one step works on: about the cache of a CPU core, enough to fill a GPU."""


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
    """Shares, dominant terms and head types of every head, in one pass over ``tokens`` without a
    term as a matrix.

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
        parts: ``"writers"`` or ``"blocks"`` for who wrote what each head reads: a
            :class:`~tl_geometry.circuits.WriterSweep` with the share of every earlier head, MLP and
            embedding on the query and on the key side. It needs no basis (which then only
            says how many positions to leave out; without one a BOS token is).
        layers: blocks to look at, all by default.
        detail: more to measure, at a cost: ``"ablation"`` (total variation and KL of the pattern
            without each term), ``"toeplitz"`` and ``"offsets"`` (how far the positional terms
            depend on i - j only, and the mean by offset), ``"contrast"`` (token identity in
            cvec-cvec), ``"intervals"`` (95% intervals of the shares, corrected for the bias of a
            basis made from the same contexts; then a head is labelled only where the margin's
            interval excludes zero; :mod:`tl_geometry.scores.leave_out`), ``"nulls"`` (the share of
            position where what the groups of the basis have in common cancels, its p-value, and
            the p-value adjusted for the number of heads by Benjamini and Hochberg;
            :mod:`tl_geometry.scores.position_null`), ``"energy"`` (energy shares ``es_X =
            sum X~^2 / sum_Y sum Y~^2``, NaN without); and ``"planes"`` (shares of rotary planes,
            ``.planes()``), at no further cost.
        memory_budget: bytes held for one batch. batch_size: contexts of one batch, where the budget
            allows.
        prepend_bos: with text only.

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
        fits, got = not detail, f"detail={detail!r} with parts={parts!r}"
        require(fits, "detail", expected="no detail with writers", got=got)
        options: dict[str, Any] = {
            "memory_budget": memory_budget,
            "batch_size": batch_size,
            "seed": seed,
        }
        options |= {"prepend_bos": prepend_bos, "progress": progress, "layers": layers}
        drop = None if basis is None else basis.window[0]
        return sweep_of(parts)(view, tokens, grain=parts, drop=drop, **options)
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
    rows = _rows_per_batch(view, source.length, memory_budget, batch_size)
    work = _Sweep(view, basis, chosen, source.length, wanted, memory_budget, seed)
    done, token_hash, begins = 0, "", True
    row, draws = 0, torch.Generator().manual_seed(seed)
    bar = tqdm(total=source.contexts, unit="ctx", disable=not progress, desc=view.name)
    with bar:
        for batch in source.batches(rows):
            begins = begins and begins_with_bos(batch, view.bos_id)
            # a row without BOS decides, one with it does not
            basis.check_model(view, None if begins else False)
            work.batch, row = batch, another_row(row, len(batch), draws)
            sample = (row, work.verify)
            queries = None if done == 0 else SAMPLED
            view.run_layers(
                batch, chosen, work.on_layer, verify=False, sample=sample, queries=queries
            )
            done, token_hash = done + len(batch), hash_tokens(batch, token_hash)
            bar.update(len(batch))
    basis.check_model(view, begins)
    bos = bool(basis.provenance.has_bos)
    types = measure_types(view, chosen, bos=bos, seed=1234 + seed)
    provenance = view.provenance(
        corpus=source.corpus,
        token_hash=token_hash,
        has_bos=basis.provenance.has_bos,
        window=(work.drop, source.length),
        contexts=done,
        seed=seed,
        flags=(*work.flags(), *basis.remarks(view), *source.flags),
        normalized=basis.provenance.normalized,
    )
    return work.table(types, provenance)


def _rows_per_batch(
    view: ModelView, length: int, memory_budget: int, batch_size: int | None
) -> int:
    """Contexts of one forward pass within the budget: a layer's pattern and scores, its vectors,
    and the step that works on them."""
    number = max(4, view.dtype.itemsize)
    width = view.n_heads * view.d_head
    per_context = number * (2 * view.n_heads * length**2 + length * (14 * width + 8 * view.d_model))
    fits = memory_budget // per_context
    require(
        fits >= 1,
        "memory_budget",
        expected=f"at least {per_context} bytes for one context of {length} positions",
        got=memory_budget,
        instead="shorter windows, or a larger memory_budget=",
        error=BudgetError,
    )
    return max(1, min(fits, batch_size or default_batch(length, view.device)))


def check_cvec(layer: LayerView, basis: PositionContext, parts: ProjectedParts) -> None:
    """Compare cvec by subtraction with its explicit projection, within 32 u A (4 u A in half
    precision), A the sizes of what is summed."""
    layer = layer.normalized() if basis.provenance.normalized else layer
    row = basis.index(layer.layer)
    h = layer.h.double()
    mean, pos = basis.mean[row].to(h), basis.pos_seen[row, : h.shape[1]].to(h)
    rest = h - (mean + pos)
    # parts that cancel are rounded as large as they are
    apart = (x.norm(dim=-1) for x in (mean, pos, rest))
    larger = max(1.0, float((sum(apart, torch.zeros(())) / h.norm(dim=-1).clamp(min=1e-300)).max()))
    cvec, scale, sizes = rest.to(layer.h), layer.scale, layer.reconstruction.sizes
    behind = {w: larger * sizes.get(w, 0.0) * (scale if w == "q" else 1.0) for w in "qk"}
    for name, ours, explicit in (
        ("q", parts.q, layer.project_q(cvec) * scale),
        ("k", parts.k, layer.project_k(cvec)),
    ):
        size = max(float(ours.abs().sum(0).max()), behind[name])
        error = float((ours[2] - explicit).abs().max())
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


class _Sweep:
    """Sums in progress over one pass."""

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
        require(
            length <= basis.length,
            "tokens",
            expected=f"at most {basis.length} positions, as the basis has seen",
            got=length,
            instead="decompose(...) on windows of this length",
        )
        self.drop = basis.window[0]
        require(
            length > self.drop + 1,
            "tokens",
            expected=f"more than {self.drop + 1} positions (the window starts at {self.drop})",
            got=length,
        )
        for layer in layers:
            basis.index(layer)
        self.view, self.basis, self.layers, self.length, self.detail, self.seed = (
            view,
            basis,
            tuple(layers),
            length,
            tuple(name for name in detail if name not in ("planes", "energy")),
            seed,
        )
        self.memory_budget, self.energy = memory_budget, "energy" in detail
        self.batch: Tensor = torch.empty(0, length, dtype=torch.int64)
        self.projected: dict[int, MappedBasis] = {}
        self.sums: dict[int, list[ShareSums]] = {}
        self.mass: dict[int, list[Tensor]] = {}
        self.details: dict[int, Details] = {}
        self.planes: dict[int, RotaryPlanes] | None = {} if "planes" in detail else None
        self.alibi = self.softcap = False
        self.rotary = self.relative = True
        self.blunt: dict[str, None] = {}  # layers where rounding hides errors, in order

    def verify(self, layer: LayerView) -> None:
        """Check one context of a batch explicitly; the view has verified its own scores. What does
        not depend on the context is checked once."""
        read = layer.normalized() if self.basis.provenance.normalized else layer
        self.relative = self.relative and is_relative(read)
        parts = split_layer(layer, self._projection(layer), slice(None))
        first = layer.layer not in self.sums
        if first:
            check_cvec(layer, self.basis, parts)
        at = some_queries(self.length, None if first else SAMPLED)
        self.blunt |= dict.fromkeys(rounding_flags(layer, parts.q, parts.k, at))

    def on_layer(self, layer: LayerView) -> None:
        """Take in one layer of one batch."""
        projected = self._projection(layer)
        batch, length, heads, width = layer.q.shape
        self.alibi = self.alibi or layer.bias is not None
        self.softcap = self.softcap or layer.softcap is not None
        self.rotary = self.rotary and layer.rotary
        number = layer.q.element_size()
        per_context = number * heads * (length * (5 * 64 + 18 * width) + 9 * 64 * 64)
        limit = min(WORKING_SET.get(layer.q.device.type, 2**23), max(1, self.memory_budget // 4))
        step = max(1, limit // per_context)
        found: list[ShareSums] = []
        made = None
        if self.detail:
            made = self.details.setdefault(layer.layer, Details(self.detail, self.drop, self.seed))
            made.begin(layer, self.basis)
        for start in range(0, batch, step):
            rows = slice(start, min(start + step, batch))
            start_at = 0 if self.detail else self.drop  # only details look at what is dropped
            parts = split_layer(layer, projected, rows, start=start_at)
            allowed, bias = (
                None if x is None else x[..., start_at:, start_at:]
                for x in (layer.allowed, layer.bias)
            )
            options = {
                "bias": bias,
                "drop": self.drop - start_at,
                "softcap": layer.softcap,
                "working_set": limit,
                "energy": self.energy,
                "planes": self._plane_index(layer),
            }
            found.append(share_sums(parts.q, parts.k, allowed, **options))
            if made is not None:
                made.update(layer, parts, rows, self.batch[rows], self.basis)
        if made is not None:
            made.end()
        sums = ShareSums.cat(found).to("cpu")
        kept = self.sums.setdefault(layer.layer, [])
        kept[:] = [kept[0] + sums] if kept else [sums.pooled()]
        if layer.pattern is not None:
            mass = dropped_mass(layer.pattern, self.drop)
            self.mass.setdefault(layer.layer, []).append(mass.sum(0).cpu().double())

    def _plane_index(self, layer: LayerView) -> PlaneIndex | None:
        """The rotary plane of each coordinate, where planes are wanted."""
        if self.planes is None:
            return None
        if layer.layer not in self.planes:
            self.planes[layer.layer] = rotary_planes(layer)
        found = self.planes[layer.layer]
        return PlaneIndex(found.plane, len(found.theta))

    def _projection(self, layer: LayerView) -> MappedBasis:
        """Projected mean and pos, kept between batches while they are small."""
        found = self.projected.get(layer.layer)
        if found is None:
            found = project_basis(layer, self.basis, self.length)
            size = found.q.numel() * found.q.element_size() * 2 * len(self.layers)
            if size <= self.memory_budget // 8:
                self.projected[layer.layer] = found
        return found

    def flags(self) -> tuple[str, ...]:
        """Remarks for the reader."""
        start = [f"queries and keys before position {self.drop} left out"] if self.drop else []
        return (*start, *(["scores before the soft cap"] if self.softcap else []), *self.blunt)

    def _resampled(self) -> Resampled | None:
        """Shares with groups of contexts left out, where intervals were asked for."""
        if "intervals" not in self.detail:
            return None
        found = [self.details[x].resampled(self.basis.contexts) for x in self.layers]
        cs, gs = (torch.cat([getattr(r, x) for r in found]) for x in ("shares", "gains"))
        return Resampled(cs, gs, found[0].sizes)

    def _details(self) -> dict[str, Tensor]:
        """What ``detail=`` asked for, by column name."""
        if not self.details:
            return {}
        return Details.beside([self.details[x] for x in self.layers], self.basis.contexts)

    def table(self, types: HeadTypes, provenance: Provenance) -> SweepTable:
        """The finished table."""
        order = self.layers
        contexts = provenance.contexts or 1
        pooled = ShareSums.beside([self.sums[x][0] for x in order])
        mass = [sum(self.mass[x], torch.zeros(())) / contexts for x in order if x in self.mass]
        resampled = self._resampled()
        if resampled is not None and bool(torch.isnan(resampled.shares).all()):
            few = f"fewer than {FEWEST_GROUPS} blocks of {BLOCK} contexts: no intervals"
            provenance = provenance.flagged(few)
        elif resampled is not None:
            known = self.basis.provenance.flags
            provenance = provenance.flagged(*(flag for flag in (CUT, APART) if flag in known))
        details = self._details()
        planes: dict[str, Any] = {"length": self.length}
        if self.planes is not None:
            each = [self.planes[x] for x in order for _ in range(self.view.n_heads)]
            found = HeadPlanes.of(each, self.length)
            planes |= {"plane": found.plane, "theta": found.theta}
        names = term_names(PARTS, alibi=self.alibi)
        return SweepTable(
            provenance=provenance,
            heads=tuple((layer, head) for layer in order for head in range(self.view.n_heads)),
            parts=PARTS,
            terms=names,
            numerators=pooled.numerators,
            energies=pooled.energies,
            gains=pooled.gains,
            total=pooled.total,
            gain_total=pooled.gain_total,
            floor=pooled.floor,
            bias_label=bias_label(rotary=self.rotary, relative=self.relative),
            rows_used=float(pooled.rows),
            cells=float(pooled.cells),
            drop=self.drop,
            dropped_mass=torch.cat(mass) if len(mass) == len(order) else None,
            resampled=None if resampled is None else resampled.shares,
            resampled_gains=None if resampled is None else resampled.gains,
            resampled_sizes=() if resampled is None else resampled.sizes,
            types=dict(types.scores),
            type_errors=dict(types.errors),
            baselines=dict(types.baselines),
            details=details,
            plane_numerators=pooled.plane_numerators,
            plane_gains=pooled.plane_gains,
            **planes,
        )
