"""Reports on a basis: every measure of position and of context, a row per state, with its
uncertainty and its nulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.decomposition.resampling import (
    FEWEST,
    Subsets,
    jackknife_error,
    noise_weights,
    subsets,
    window_means,
)
from tl_geometry.decomposition.variance import LOW_RELIABILITY, spans
from tl_geometry.measures import contextual, differences, positional
from tl_geometry.measures import rank as ranks
from tl_geometry.measures.contextual import Space

Values = dict[str, Tensor]
SIMILARITY_LIMIT = 1024
"""Contexts whose pairwise cosines are averaged; from more, that many are taken at even distances (a
flag says so)."""
CACHE = 2**22
"""Bytes of bases that are measured at a time."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StateMeasures(Result):
    """Measures of each state: ``report["rank"]`` is one of them ``[state]``; the table has a row
    per state.

    ``errors`` are delete-one jackknife standard errors over groups of contexts.
    ``curve["rank"] [level state]`` is the measure at ``curve_contexts`` contexts (mean over
    disjoint blocks, the last level all contexts): what still moves there depends on the size of the
    corpus. ``nulls["rank|noise"] [state]`` is the measure of a basis in which the effect is absent.
    """

    states: tuple[int, ...]
    values: Mapping[str, Float[Tensor, " state"]]
    errors: Mapping[str, Float[Tensor, " state"]]
    nulls: Mapping[str, Float[Tensor, " state"]]
    curve: Mapping[str, Float[Tensor, "row state"]]
    curve_contexts: tuple[int, ...]

    def __getitem__(self, measure: str) -> Float[Tensor, " state"]:
        require(
            measure in self.values,
            "measure",
            expected=f"one of {', '.join(self.values)}",
            got=repr(measure),
        )
        return self.values[measure]

    def columns(self) -> Sequence[str]:
        names = ["state"]
        for name in self.values:
            names += [name, *([f"{name}_se"] if name in self.errors else [])]
            names += [
                f"{name}_{key.split('|')[1]}" for key in self.nulls if key.split("|")[0] == name
            ]
        return names

    def rows(self) -> Sequence[Sequence[object]]:
        table: list[Tensor] = []
        for name, value in self.values.items():
            table += [value, *([self.errors[name]] if name in self.errors else [])]
            table += [self.nulls[key] for key in self.nulls if key.split("|")[0] == name]
        return [
            [state, *(float(column[i]) for column in table)] for i, state in enumerate(self.states)
        ]

    def learning_curve(self) -> list[tuple[str, int, int, float]]:
        """``(measure, contexts, state, value)`` for every level of the curve."""
        rows = list(enumerate(self.curve_contexts))
        return [
            (m, c, s, float(v[i, j]))
            for m, v in self.curve.items()
            for i, c in rows
            for j, s in enumerate(self.states)
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionalReport(StateMeasures):
    """What :func:`positional_report` returns; besides the measures, spectra and curves for figures.

    ``singular_values`` of P; ``fourier`` the leading block of the 2-D DCT of the cosines;
    ``adjacent`` cosines of neighbours.
    """

    k: int
    singular_values: Float[Tensor, "state rank"]
    fourier: Float[Tensor, "state column column"]
    adjacent: Float[Tensor, "state position"]


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextualReport(StateMeasures):
    """What :func:`contextual_report` returns; ``similarity [state label label]`` are mean |cosines|
    between the documents ``names``."""

    names: tuple[str, ...]
    similarity: Float[Tensor, "state label label"] | None


def _join(parts: Sequence[Values]) -> dict[str, list[Tensor]]:
    return {n: [p[n] for p in parts] for n in parts[0]}


def _shape(pos: Tensor, axes: Tensor, frequencies: int) -> Values:
    """Measures of the curve that depend on the order of positions, for a batch of bases [sample
    position d_model]."""
    whole = positional.fourier(positional.normalized_gram(pos).gram)
    fracture = positional.fracture_score(pos)
    return {
        "low_frequency": positional.low_frequency_share(pos, frequencies),
        "off_diagonal": positional.off_diagonal_share(whole),
        "smoothness": differences.smoothness(pos, 1),
        "smoothness_2": differences.smoothness(pos, 2),
        "fracture": fracture.score,
        "fracture_at": fracture.argmax.double(),
        "roughness": positional.roughness(pos),
        "winding": positional.winding_number(positional.pca_view(pos, axes, 2)),
    }


def _spectral(
    s: Tensor, shape: tuple[int, int], k: int, strategy: str, sizes: tuple[Tensor, Tensor]
) -> Values:
    """Measures of the singular values [sample rank]; ``sizes`` are sigma_1 of all states over
    sqrt(C), centred and raw."""
    nothing = s.new_full(s.shape[:-1], torch.nan)
    rank, threshold, r = nothing, nothing, torch.zeros(s.shape[:-1], dtype=torch.int64)
    if k >= 1:
        estimate = ranks.screenot(s, shape, k=k, strategy=strategy)
        rank, threshold, r = estimate.rank.double(), estimate.threshold, estimate.rank
    explained = [positional.explained_ratio(s, r, power=p) if k >= 1 else nothing for p in (1, 2)]
    names = ("relative_norm", "relative_norm_reference")
    return {
        "rank": rank,
        "threshold": threshold,
        "stable_rank": linalg.stable_rank(s),
        "explained": explained[0],
        "explained_energy": explained[1],
    } | {name: s[..., 0] / size for name, size in zip(names, sizes, strict=True)}


def _gram_spectrum(pos: Tensor) -> Tensor:
    """Singular values of small batches of bases from their T x T Gram matrices: three times as
    fast, wrong below 1e-8 of the largest."""
    small = pos @ pos.mT if pos.shape[-2] <= pos.shape[-1] else pos.mT @ pos
    return torch.linalg.eigvalsh(small).flip(-1).clamp(min=0).sqrt()


def _sizes(basis: PositionContext, row: int) -> tuple[Tensor, Tensor]:
    """``sigma_1(M) / sqrt(C)`` with M the centred and the raw states, or NaN without second
    moments."""
    if not basis.has_second_moments:
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        return nan, nan
    centred, mean = basis.second_moment(basis.states[row]), basis.mean[row]
    raw = centred + basis.contexts * basis.pos.shape[1] * torch.outer(mean, mean)
    sizes = positional.top_singular_value(torch.stack([centred, raw])) / basis.contexts**0.5
    sizes = torch.where(sizes > 0, sizes, torch.nan)
    return sizes[0], sizes[1]


def _collect(
    basis: PositionContext,
    sets: Subsets,
    per_state: list[tuple[Values, dict[str, Tensor]]],
    **more: Any,
) -> dict[str, Any]:
    """Fields of a :class:`StateMeasures` from (values [sample] by name, nulls by name) of every
    state."""
    names = list(per_state[0][0])
    table = {
        n: torch.stack([values[n] for values, _ in per_state], dim=1) for n in names
    }  # [sample state]
    varied = [
        n for n in names if len(table[n]) > 1 and n != "fracture_at"
    ]  # a place has no mean over subsets
    curve = {
        n: torch.stack([*(table[n][span].mean(0) for _, span in sets.levels), table[n][0]])
        for n in varied
        if sets.levels
    }
    errors = {
        n: jackknife_error(table[n][sets.jackknife]) for n in varied if sets.jackknife.stop > 1
    }
    flags = list(more.pop("flags", ()))
    if errors and basis.contexts < FEWEST:
        errors = {n: torch.full_like(v, torch.nan) for n, v in errors.items()}
        flags.append(f"fewer than {FEWEST} contexts: no errors")
    return {
        "provenance": basis.provenance.flagged(*flags, *basis.flags()),
        "states": basis.states,
        "values": {n: table[n][0] for n in names},
        "errors": errors,
        "nulls": {n: torch.stack([nulls[n] for _, nulls in per_state]) for n in per_state[0][1]},
        "curve": curve,
        "curve_contexts": (*(c for c, _ in sets.levels), basis.contexts) if curve else (),
        **more,
    }


def positional_report(
    basis: PositionContext,
    *,
    k: int = 20,
    strategy: str = "i",
    frequencies: int = 10,
    jackknife: bool = True,
    nulls: bool = True,
    draws: int = 4,
    seed: int = 0,
) -> PositionalReport:
    """Every measure of the positional basis, a row per state (Song & Zhong 2023, section 2 and
    Tables 1 to 5).

    Measures: ``rank`` and ``threshold`` (ScreeNOT, at most k), ``stable_rank``, ``explained`` and
    ``explained_energy`` (share of the singular values, of their squares, in that rank),
    ``relative_norm`` (centred states) and ``relative_norm_reference`` (the raw states, with their
    mean: what the published Table 5 contains), ``low_frequency`` (share of the first
    ``frequencies`` cosines) and ``off_diagonal``, ``smoothness`` (first and second differences),
    ``fracture`` and the absolute column ``fracture_at`` after which the largest break comes,
    ``roughness``, ``winding`` (turns on the first two components), ``split_half`` (cosine of the
    bases of two halves of the contexts). The noise of a basis falls as 1/sqrt(C): ranks and norms
    depend on C, see ``curve``.

    Nulls, each the mean over ``draws`` (``noise`` half as many): ``shuffled`` the same positional
    vectors in random order; ``noise`` the difference of random halves of the contexts, which holds
    no position effect but all its sampling noise (this noise is correlated, so its rank is not 0: a
    rank near it says nothing); ``isotropic`` Gaussian rows of the same energy. An untrained model
    is one more basis: run this on it. ``jackknife=False`` leaves errors and curve out (3 times
    faster). The relative norms' errors and nulls keep the denominators of the whole corpus.

    >>> h = torch.randn(16, 9, 6, generator=torch.Generator().manual_seed(0)) + 3 * torch.linspace(-1, 1, 9)[:, None]
    >>> from tl_geometry import decompose_activations
    >>> report = positional_report(decompose_activations(h))
    >>> int(report["rank"]), round(float(report["relative_norm"]), 2), report["low_frequency"].shape
    (1, 0.98, torch.Size([1]))
    """
    basis.require_identifiable("positional_report")
    positions, d_model = basis.pos.shape[1:]
    used = min(k, ranks.usable_k(k, min(positions, d_model)))
    sets = subsets(basis, jackknife=jackknife)
    flags = [f"rank bound k={used} of {k} (short window)"] if used < k else []
    flags += [] if basis.has_second_moments else ["no second moments: no relative norm"]
    unsure = [
        s
        for s, r in zip(basis.states, _split_half(basis).tolist(), strict=True)
        if r < LOW_RELIABILITY
    ]
    flags += (
        [f"split_half below {LOW_RELIABILITY} in states {spans(unsure)}: mostly noise"]
        if unsure
        else []
    )
    found, spectra, blocks, adjacent = [], [], [], []
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(positions, generator=generator) for _ in range(draws)]
    gaussian = torch.randn(draws, positions, d_model, generator=generator, dtype=torch.float64)
    gaussian = gaussian - gaussian.mean(1, keepdim=True)
    gaussian = gaussian / torch.linalg.vector_norm(gaussian, dim=(1, 2), keepdim=True)
    isotropic = (
        (_gram_spectrum(gaussian), _shape(gaussian, gaussian[0].T, frequencies))
        if nulls and d_model > 1
        else None
    )
    signs, halves = noise_weights(basis, max(1, draws // 2), seed), _split_half(basis)
    for row in range(len(basis.states)):
        pos, sizes = basis.pos[row], _sizes(basis, row)
        parts = linalg.svd(pos)
        axes = parts.V if parts.V.shape[1] > 1 else torch.nn.functional.pad(parts.V, (0, 1))
        measure = _Measure(axes, (positions, d_model), used, strategy, sizes, frequencies)
        others = window_means(basis, row, sets.member[1:].double())
        others = others - others.mean(1, keepdim=True)
        whole = measure(pos[None], parts.S[None])
        rest = measure.each(others) if len(others) else {n: v[:0] for n, v in whole.items()}
        values = {n: torch.cat([whole[n], rest[n]]) for n in whole}
        values["fracture_at"] = values["fracture_at"] + basis.window[0]
        absent = (
            _positional_nulls(basis, row, orders, isotropic, signs, measure) if isotropic else {}
        )
        found.append((values | {"split_half": halves[row : row + 1]}, absent))
        spectra.append(parts.S)
        blocks.append(
            positional.fourier(positional.normalized_gram(pos).gram)[:frequencies, :frequencies]
        )
        adjacent.append(positional.adjacent_cosine(pos))
    stacked = {
        "singular_values": torch.stack(spectra),
        "fourier": torch.stack(blocks),
        "adjacent": torch.stack(adjacent),
    }
    return PositionalReport(**_collect(basis, sets, found, flags=flags, k=used, **stacked))


@dataclass(frozen=True, eq=False)
class _Measure:
    """All measures of a batch of bases of one state; the plane of the winding number is that of the
    whole basis."""

    axes: Tensor
    shape: tuple[int, int]
    k: int
    strategy: str
    sizes: tuple[Tensor, Tensor]
    frequencies: int

    def spectrum(self, s: Tensor) -> Values:
        return _spectral(s, self.shape, self.k, self.strategy, self.sizes)

    def curve(self, pos: Tensor) -> Values:
        return _shape(pos, self.axes, self.frequencies)

    def __call__(self, pos: Tensor, s: Tensor | None = None) -> Values:
        return self.spectrum(_gram_spectrum(pos) if s is None else s) | self.curve(pos)

    def each(self, pos: Tensor) -> Values:
        """All measures of many bases, a few at a time so that they stay in cache (three times as
        fast at 511 x 768)."""
        step = max(1, CACHE // (pos[0].numel() * pos.element_size()))
        parts = [self(p) for p in pos.split(step)]
        return {n: torch.cat(v) for n, v in _join(parts).items()}


def _split_half(basis: PositionContext) -> Float[Tensor, " state"]:
    """Cosine between the positional bases of two halves of the contexts, as whole matrices."""
    halves = basis.half_pos()
    if halves is None:
        return torch.full((len(basis.states),), torch.nan, dtype=torch.float64)
    return torch.nan_to_num(torch.cosine_similarity(*(h.flatten(1) for h in halves), dim=1))


def _positional_nulls(
    basis: PositionContext,
    row: int,
    orders: Sequence[Tensor],
    isotropic: tuple[Tensor, Values],
    signs: Tensor,
    measure: _Measure,
) -> Values:
    """Means over draws of the measures under each null; ``isotropic`` are spectra and shapes of
    Gaussian bases of norm one."""
    pos = basis.pos[row]
    noise = window_means(basis, row, signs)
    noise = noise - noise.mean(1, keepdim=True)
    tables = {
        "shuffled": {
            n: torch.cat(v)
            for n, v in _join([measure.curve(pos[None, order]) for order in orders]).items()
        },
        "noise": measure.each(noise) if len(noise) else {},
        "isotropic": measure.spectrum(torch.linalg.vector_norm(pos) * isotropic[0]) | isotropic[1],
    }
    left_out = ("fracture_at", "winding")  # neither has a mean over draws that says anything
    return {
        f"{n}|{null}": v.mean(0)
        for null, values in tables.items()
        for n, v in values.items()
        if n not in left_out
    }


def contextual_report(
    basis: PositionContext,
    labels: Int[Tensor, "..."] | Sequence[int] | None = None,
    *,
    rank: int = 10,
    norm: str = "N",
    space: Space = "full",
    ridge: float | None = None,
    jackknife: bool = True,
    nulls: bool = True,
    draws: int = 4,
    seed: int = 0,
) -> ContextualReport:
    """Every measure of the context basis, a row per state (Song & Zhong 2023, sections 2 to 4 and
    Table 1).

    Measures: incoherence of pos and ctx (``incoherence_max``, ``_avg``, ``_rms``, ``_signed``: the
    paper defines the maximum and tabulates the average), ``overlap`` of their ``rank`` leading
    directions (mean squared cosine of the principal angles; where pos or ctx of some state has
    fewer, of that many in all states, and a flag; NaN for contexts too few to have them); with
    documents (``labels``, or those of the basis) ``intra`` and ``inter`` (mean |cos| within and
    between documents, self-pairs left out), ``intra_signed``, ``inter_signed``, ``intra_reference``
    (self-pairs counted: the published number), ``compactness_cvec`` and ``compactness_raw``
    (cluster compactness of the states without and with their positional part; ``norm``, ``space``
    and ``ridge`` as in :func:`tl_geometry.measures.contextual.cluster_compactness`; NaN and a flag
    where the within-document covariance is singular or second moments are missing).

    Nulls: ``random`` isotropic directions (analytic); ``flipped`` the context vectors with the
    signs of their coordinates drawn at random, which keeps outlier coordinates; ``shuffled`` the
    labels in random order. Errors are delete-one jackknife errors over groups of contexts: windows
    of one document are not independent, so with few documents they speak of these documents only.

    >>> h = torch.randn(16, 5, 6, generator=torch.Generator().manual_seed(0))
    >>> h[:8] += 9 * torch.eye(6)[0]
    >>> from tl_geometry import decompose_activations
    >>> report = contextual_report(decompose_activations(h), labels=[0] * 8 + [1] * 8)
    >>> bool(report["intra"] > 0.9), bool(report["compactness_raw"] > report.nulls["compactness_raw|shuffled"])
    (True, True)
    """
    means = basis.context_means
    require(
        means is not None,
        "basis",
        expected="context vectors",
        got="a basis without",
        instead="decompose(..., keep_ctx=True)",
    )
    assert means is not None
    given = basis.labels if labels is None else torch.as_tensor(labels)
    ok = given is None or (
        given.dim() == 1
        and len(given) == basis.contexts
        and not given.is_floating_point()
        and bool((given >= 0).all())
    )
    require(
        ok,
        "labels",
        expected=f"a label >= 0 for each of {basis.contexts} contexts",
        got=describe(given),
    )
    z = None if given is None or len(given.unique()) < 2 else given.long()
    basis.require_identifiable("contextual_report")
    group_of = basis.group_of
    sets = subsets(basis, jackknife=jackknife and group_of is not None)
    flags = (
        []
        if group_of is not None
        else ["groups of contexts not known (merged files of an earlier version): no errors"]
    )
    chosen = torch.linspace(0, basis.contexts - 1, min(basis.contexts, SIMILARITY_LIMIT)).long()
    flags += (
        [f"similarities from {len(chosen)} contexts"]
        if z is not None and len(chosen) < basis.contexts
        else []
    )
    r = _overlap_rank(basis, rank)
    flags += [f"overlap of {r} of {rank} directions (some state has no more)"] if r < rank else []
    flags += (
        ["no second moments: no compactness"]
        if z is not None and not basis.has_second_moments
        else []
    )
    found, tables = [], []
    singular: list[int] = []
    for row, state in enumerate(basis.states):
        bases = window_means(basis, row, sets.member.double())
        per_set: list[Values] = []
        for columns, member in zip(bases, sets.member, strict=True):
            inside = (
                torch.ones(basis.contexts, dtype=torch.bool)
                if group_of is None
                else member[group_of]
            )
            kept = chosen[inside[chosen]]
            pos, ctx = columns - columns.mean(0), means[row] - columns.mean(0)
            per_set.append(
                _pair(pos, ctx[inside], r) | ({} if z is None else _clusters(ctx[kept], z[kept]))
            )
        values = {n: torch.stack([v[n] for v in per_set]) for n in per_set[0]}
        absent = _contextual_nulls(basis, row, z, chosen, r, draws, seed) if nulls else {}
        if z is not None:
            orders = [z, *(_shuffles(z, draws, seed) if nulls else [])]
            try:
                compact = _compactness(basis, row, orders, norm=norm, space=space, ridge=ridge)
            except contextual.SingularError:
                singular.append(state)
                compact = _no_compactness(orders)
            values |= {n: v[:1] for n, v in compact.items()}
            absent |= {f"{n}|shuffled": v[1:].mean() for n, v in compact.items() if nulls}
            tables.append(
                contextual.cluster_similarity(means[row, chosen] - basis.mean[row], z[chosen]).table
            )
        found.append((values, absent))
    flags += (
        [
            f"within-document covariance singular at states {singular}: compactness needs space=('pca', k) or ridge="
        ]
        if singular
        else []
    )
    more = {
        "names": basis.names if labels is None else (),
        "similarity": torch.stack(tables) if tables else None,
    }
    return ContextualReport(**_collect(basis, sets, found, flags=flags, **more))


def _overlap_rank(basis: PositionContext, rank: int) -> int:
    """``rank``, or as many directions as pos and ctx of every state have, both centred; states that
    have none do not count."""
    require(rank >= 1, "rank", expected="at least 1 direction", got=rank)
    assert basis.context_means is not None
    found = []
    for pos, means, mean in zip(basis.pos, basis.context_means, basis.mean, strict=True):
        found += [
            min(
                int(contextual.numerical_rank(torch.linalg.svdvals(x), x.shape))
                for x in (pos, means - mean)
            )
        ]
    return min(rank, basis.pos.shape[1] - 1, basis.contexts - 1, *(n for n in found if n > 0))


def _pair(pos: Tensor, ctx: Tensor, rank: int) -> Values:
    """Measures of how the two bases lie towards each other; no overlap of more directions than
    centred rows have."""
    i = contextual.incoherence(pos, ctx)
    enough = 1 <= rank < min(len(pos), len(ctx))
    overlap = (
        contextual.subspace_overlap(pos, ctx, rank).overlap
        if enough
        else i.avg.new_tensor(torch.nan)
    )
    names = ("max", "avg", "rms", "signed")
    return {f"incoherence_{n}": v for n, v in zip(names, i[:4], strict=True)} | {"overlap": overlap}


def _clusters(ctx: Tensor, labels: Tensor) -> Values:
    """Similarities within and between documents."""
    exact = contextual.cluster_similarity(ctx, labels)
    signed = contextual.cluster_similarity(ctx, labels, signed=True)
    reference = contextual.cluster_similarity(ctx, labels, preset="reference")
    names = ("intra", "inter", "intra_signed", "inter_signed", "intra_reference")
    return dict(
        zip(
            names,
            (exact.intra, exact.inter, signed.intra, signed.inter, reference.intra),
            strict=True,
        )
    )


def _compactness(
    basis: PositionContext, row: int, orders: Sequence[Tensor], **options: Any
) -> Values:
    """Compactness of cvec and raw [sample] for each of the given labellings of the contexts."""
    if not basis.has_second_moments:
        return _no_compactness(orders)
    assert basis.context_means is not None
    accuracy = 1e-6 if basis.moments.product_dtype == torch.float32 else 1e-12
    second, pairs = basis.second_moment(basis.states[row]), []
    for z in orders:
        counts = torch.bincount(z)
        sums = torch.zeros(len(counts), basis.mean.shape[1], dtype=torch.float64).index_add_(
            0, z, basis.context_means[row].double()
        )
        means = sums / counts.clamp(min=1)[:, None] - basis.mean[row]
        pairs.append(
            contextual.compactness_from_moments(
                second, basis.pos[row], means, counts, accuracy=accuracy, **options
            )
        )
    return {
        "compactness_cvec": torch.stack([p.cvec for p in pairs]),
        "compactness_raw": torch.stack([p.raw for p in pairs]),
    }


def _no_compactness(orders: Sequence[Tensor]) -> Values:
    return {
        f"compactness_{n}": torch.full((len(orders),), torch.nan, dtype=torch.float64)
        for n in ("cvec", "raw")
    }


def _shuffles(z: Tensor, draws: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [z[torch.randperm(len(z), generator=generator)] for _ in range(draws)]


def _contextual_nulls(
    basis: PositionContext,
    row: int,
    z: Tensor | None,
    chosen: Tensor,
    rank: int,
    draws: int,
    seed: int,
) -> Values:
    assert basis.context_means is not None
    pos, ctx = basis.pos[row], basis.context_means[row] - basis.mean[row]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (draws, 1, pos.shape[1]), generator=generator) * 2.0 - 1
    flipped = contextual.incoherence(pos.expand(draws, *pos.shape), ctx * signs)
    base = contextual.cosine_baseline(pos.shape[1], len(pos) * len(ctx))
    absent = {
        "overlap|random": torch.tensor(rank / pos.shape[1] or torch.nan, dtype=torch.float64)
    }  # as SubspaceOverlap.baseline
    for n, random, flip in zip(
        ("max", "avg", "rms"),
        (base.max, base.avg, base.rms),
        (flipped.max, flipped.avg, flipped.rms),
        strict=True,
    ):
        absent |= {
            f"incoherence_{n}|random": torch.tensor(random, dtype=torch.float64),
            f"incoherence_{n}|flipped": flip.mean(),
        }
    if z is not None:
        similar = [_clusters(ctx[chosen], order[chosen]) for order in _shuffles(z, draws, seed)]
        absent |= {
            f"{n}|shuffled": torch.stack([s[n] for s in similar]).mean()
            for n in ("intra", "intra_signed", "intra_reference")
        }
    return absent
