"""Are position and context orthogonal, and do contexts of one document cluster?
:func:`tl_geometry.contextual_report` gives every measure of the context basis, a row per state,
with its uncertainty and its nulls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import fail, require
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.base.linalg import numerical_rank
from tl_geometry.corpus.sources import label_ids
from tl_geometry.decomposition.groups import BLOCK
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.resampling import Subsets, subsets, window_means
from tl_geometry.decomposition.variance import reliability
from tl_geometry.measures import contextual
from tl_geometry.measures.contextual import Space
from tl_geometry.measures.state_measures import Nulls, StateMeasures, Values, state_fields

LEAST = FEWEST_GROUPS * BLOCK
"""Contexts below which no error is given: fewer than four blocks do not show how much contexts vary
(with 10 and 16 contexts, intervals meant to cover 95% covered 99%)."""
SIMILARITY_LIMIT = 1024
"""Contexts whose pairwise cosines are averaged, since the cost grows with the square of their
number. Of more contexts, that many are taken at even distances (a flag says so)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ContextualReport(StateMeasures):
    """What :func:`contextual_report` returns; ``similarity [state label label]`` holds the mean
    |cosine| between context vectors of the documents ``names``."""

    names: tuple[str, ...]
    similarity: Float[Tensor, "state label label"] | None


def contextual_report(
    basis: PositionContext,
    labels: Int[Tensor, "..."] | Sequence[int] | Sequence[str] | None = None,
    *,
    rank: int = 10,
    norm: str = "N",
    space: Space = "full",
    ridge: float | None = None,
    jackknife: bool = True,
    nulls: bool = True,
    draws: int = 8,
    seed: int = 0,
) -> ContextualReport:
    """Every measure of the context basis, a row per state (Song & Zhong 2023, sections 2 to 4 and
    Table 1).

    Measures:

    - ``incoherence_max``, ``_avg``, ``_rms``, ``_signed`` of pos and ctx (the paper defines the
      maximum and tabulates the average);
    - ``overlap`` of their ``rank`` leading directions, the mean squared cosine of the principal
      angles. Where pos or ctx of some state has fewer directions, all states use that number, with
      a flag; NaN where the contexts are too few to have them.

    With documents (``labels``, or those of the basis) also:

    - ``intra`` and ``inter``, the mean |cos| within and between documents, self-pairs left out;
      ``intra_signed`` and ``inter_signed``; ``intra_reference`` with self-pairs, as published;
    - ``compactness_cvec`` and ``compactness_raw``, the cluster compactness of the states without
      and with their positional part (``norm``, ``space`` and ``ridge`` as in
      :func:`tl_geometry.measures.contextual.compactness_from_moments`; NaN and a flag where the
      within-document covariance is singular or second moments are missing).

    Nulls:

    - ``random``: isotropic directions (analytic);
    - ``flipped``: context vectors with random signs of their coordinates. This keeps outlier
      coordinates, but not the directions in which averages of states vary most. Where those are not
      coordinate axes and pos has fewer than ``rank`` directions, noise along them fills both
      subspaces, and this null is too low: 49 to 90% of independent pos and ctx exceeded it at level
      5%. Choose a ``rank`` that pos has;
    - ``exchanged``: windows in which each position comes from another of the sampled contexts.
      Their context vectors hold no context, only the noise of averages, which lies along the
      directions in which states vary most;
    - ``shuffled``: the labels in random order.

    Errors are delete-one jackknife errors over blocks of contexts, given from 32 contexts on.
    Windows of one document are not independent, so with few documents errors hold for these
    documents only.

    Args:
        labels: the document of each context, as numbers or names.
        rank: directions of pos and of ctx whose overlap is measured.
        draws: draws of each sampled null, with ``seed``.

    Raises ``GeometryError`` for a basis without context vectors or of one context, and for labels
    that do not fit its contexts.

    >>> h = torch.randn(16, 5, 6, generator=torch.Generator().manual_seed(0))
    >>> h[:8] += 9 * torch.eye(6)[0]
    >>> from tl_geometry import decompose_activations
    >>> report = contextual_report(decompose_activations(h), labels=[0] * 8 + [1] * 8)
    >>> chance = report.nulls["compactness_raw", "shuffled"]
    >>> bool(report["intra"] > 0.9), bool(report["compactness_raw"] > chance)
    (True, True)
    """
    require_basis(basis)
    means = basis.context_means
    if means is None:
        instead = "decompose(..., keep_ctx=True)"
        fail("basis", expected="context vectors", got="a basis without", instead=instead)
    require(draws >= 1, "draws", expected="at least 1", got=draws)
    z, names = _labels(basis, labels)
    basis.require_identifiable("contextual_report")
    context_subsets = subsets(basis, jackknife=jackknife)
    chosen = torch.linspace(0, basis.contexts - 1, min(basis.contexts, SIMILARITY_LIMIT)).long()
    n_directions = _overlap_rank(basis, rank)
    flags = _flags(basis, z, len(chosen), n_directions, rank)
    orders = [] if z is None else [z, *(_shuffles(z, draws, seed) if nulls else [])]
    per_state, similarities = [], []
    halves = reliability(basis.moments)
    singular_states: list[int] = []
    for row, state in enumerate(basis.states):
        values = _over_subsets(basis, row, context_subsets, z, chosen, n_directions)
        values["split_half"] = halves[row : row + 1]
        null_values = (
            _contextual_nulls(basis, row, z, chosen, n_directions, draws, seed) if nulls else {}
        )
        if z is not None:
            try:
                compact = _compactness(basis, row, orders, norm=norm, space=space, ridge=ridge)
            except contextual.SingularError:
                singular_states.append(state)
                compact = _no_compactness(orders)
            values |= {n: v[:1] for n, v in compact.items()}
            null_values |= {(n, "shuffled"): v[1:] for n, v in compact.items() if nulls}
            ctx = means[row, chosen] - basis.mean[row]
            similarities.append(contextual.cluster_similarity(ctx, z[chosen]).table)
        per_state.append((values, null_values))
    if singular_states:
        flags.append(
            f"within-document covariance singular at states {singular_states}: "
            "compactness needs space=('pca', k) or ridge="
        )
    # the table of similarities has rows only for labels that the chosen contexts have
    similarity = torch.stack(similarities) if similarities else None
    compared = [] if z is None else z[chosen].unique().tolist()
    names = tuple(names[label] for label in compared) if names else ()
    fields = state_fields(basis, context_subsets, per_state, flags=flags, least=LEAST, draws=draws)
    return ContextualReport(**fields, names=names, similarity=similarity)


def _labels(
    basis: PositionContext, labels: Tensor | Sequence[int] | Sequence[str] | None
) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """The documents of the contexts and their names, or ``None`` where there are fewer than two."""
    if labels is None and basis.labels is not None and basis.label_names:
        labels = [basis.label_names[label] for label in basis.labels.tolist()]
    ids, names = label_ids(basis.labels if labels is None else labels, basis.contexts)
    has_documents = ids is not None and len(ids.unique()) >= 2
    return (ids.long(), names) if has_documents and ids is not None else (None, ())


def _flags(
    basis: PositionContext, z: Tensor | None, compared: int, rank: int, requested_rank: int
) -> list[str]:
    """What the report leaves out, and why."""
    flags = []
    if z is not None and compared < basis.contexts:
        flags.append(f"similarities from {compared} contexts")
    if rank < requested_rank:
        flags.append(f"overlap of {rank} of {requested_rank} directions (some state has no more)")
    if z is not None and not basis.has_second_moments:
        flags.append("no second moments: no compactness")
    return flags


def _over_subsets(
    basis: PositionContext, row: int, sets: Subsets, z: Tensor | None, chosen: Tensor, rank: int
) -> Values:
    """Measures of one state [sample], for every subset of the contexts (the first is all)."""
    assert basis.context_means is not None
    group_of = torch.repeat_interleave(basis.group_counts)
    means = basis.context_means[row]
    per_set: list[Values] = []
    bases = window_means(basis, row, sets.member.double())
    for rows, member in zip(bases, sets.member, strict=True):
        inside = member[group_of]
        compared = chosen[inside[chosen]]
        pos, ctx = rows - rows.mean(0), means - rows.mean(0)
        values = _incoherence_and_overlap(pos, ctx[inside], rank)
        per_set.append(
            values if z is None else values | _cluster_similarities(ctx[compared], z[compared])
        )
    return {n: torch.stack([v[n] for v in per_set]) for n in per_set[0]}


def _overlap_rank(basis: PositionContext, rank: int) -> int:
    """``rank``, or fewer where pos or ctx (both centred) of some state has fewer directions; states
    without any do not count."""
    require(rank >= 1, "rank", expected="at least 1 direction", got=rank)
    assert basis.context_means is not None
    ranks = []
    for pos, means, mean in zip(basis.pos, basis.context_means, basis.mean, strict=True):
        point_sets = (pos, means - mean)
        ranks.append(
            min(
                int(numerical_rank(torch.linalg.svdvals(points), points.shape))
                for points in point_sets
            )
        )
    # centred rows have one direction fewer than rows; a state without any does not count
    return min(
        rank,
        basis.pos.shape[1] - 1,
        basis.contexts - 1,
        *(state_rank for state_rank in ranks if state_rank > 0),
    )


def _incoherence_and_overlap(pos: Tensor, ctx: Tensor, rank: int) -> Values:
    """Incoherence and overlap of the two bases; overlap is NaN where centred rows have fewer
    directions than ``rank``."""
    cosines = contextual.incoherence(pos, ctx)
    # n centred rows have at most n - 1 directions
    overlap = cosines.avg.new_tensor(torch.nan)
    if 1 <= rank < min(len(pos), len(ctx)):
        overlap = contextual.subspace_overlap(pos, ctx, rank)
    return {
        "incoherence_max": cosines.max,
        "incoherence_avg": cosines.avg,
        "incoherence_rms": cosines.rms,
        "incoherence_signed": cosines.signed,
        "overlap": overlap,
    }


def _exchanged(basis: PositionContext, row: int, draws: int, generator: torch.Generator) -> Tensor:
    """Context vectors [sample context d_model] of windows in which each position comes from another
    of the sampled contexts: states vary as before, but share no context."""
    assert basis.sample_states is not None
    window = slice(*basis.window)
    h = basis.sample_states[:, row, window].double() - basis.pos[row] - basis.mean[row]
    keys = torch.rand(draws, *h.shape[:2], generator=generator)
    orders = keys.argsort(1)  # a random order of the contexts at each position
    return torch.stack([h[order, torch.arange(h.shape[1])].mean(1) for order in orders])


def _cluster_similarities(ctx: Tensor, labels: Tensor) -> Values:
    """Similarities within and between documents."""
    exact = contextual.cluster_similarity(ctx, labels)
    signed = contextual.cluster_similarity(ctx, labels, signed=True)
    reference = contextual.cluster_similarity(ctx, labels, preset="reference")
    return {
        "intra": exact.intra,
        "inter": exact.inter,
        "intra_signed": signed.intra,
        "inter_signed": signed.inter,
        "intra_reference": reference.intra,
    }


def _compactness(
    basis: PositionContext, row: int, orders: Sequence[Tensor], **options: Any
) -> Values:
    """Compactness of cvec and raw [sample] for each of the given labellings of the contexts."""
    if not basis.has_second_moments:
        return _no_compactness(orders)
    assert basis.context_means is not None
    # relative rounding of the stored second moments: smaller eigenvalues count as zero
    accuracy = 1e-12 if basis.provenance.dtype == "float64" else 1e-6
    second, compactness_pairs = basis.second_moment(basis.states[row]), []
    for labelling in orders:
        counts = torch.bincount(labelling)
        sums = torch.zeros(len(counts), basis.mean.shape[1], dtype=torch.float64)
        sums.index_add_(0, labelling, basis.context_means[row].double())
        means = sums / counts.clamp(min=1)[:, None] - basis.mean[row]
        compact = contextual.compactness_from_moments(
            second, basis.pos[row], means, counts, accuracy=accuracy, **options
        )
        compactness_pairs.append(compact)
    return {
        "compactness_cvec": torch.stack([pair.cvec for pair in compactness_pairs]),
        "compactness_raw": torch.stack([pair.raw for pair in compactness_pairs]),
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
) -> Nulls:
    """Measures of one state by (measure, null): of each draw, or one number known without
    drawing."""
    assert basis.context_means is not None
    pos, ctx = basis.pos[row], basis.context_means[row] - basis.mean[row]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (draws, 1, pos.shape[1]), generator=generator) * 2.0 - 1
    flipped = contextual.incoherence(pos.expand(draws, *pos.shape), ctx * signs)
    baseline = contextual.cosine_baseline(pos.shape[1], len(pos) * len(ctx))
    random = {f"incoherence_{n}": getattr(baseline, n) for n in ("max", "avg", "rms")}
    random["overlap"] = rank / pos.shape[1] or torch.nan  # see subspace_overlap
    null_values = {(n, "random"): torch.tensor(v, dtype=torch.float64) for n, v in random.items()}
    for n in ("max", "avg", "rms"):
        null_values[f"incoherence_{n}", "flipped"] = getattr(flipped, n)
    if basis.sampled is not None and len(basis.sampled) >= FEWEST:
        exchanged = _exchanged(basis, row, draws, generator)
        noise_incoherence = contextual.incoherence(pos.expand(draws, *pos.shape), exchanged)
        for n in ("avg", "rms"):  # a maximum depends on how many contexts are compared
            null_values[f"incoherence_{n}", "exchanged"] = getattr(noise_incoherence, n)
    # one sign per coordinate keeps the sizes of coordinates, which both bases share
    overlaps = [_incoherence_and_overlap(pos, ctx * sign, rank)["overlap"] for sign in signs]
    null_values["overlap", "flipped"] = torch.stack(overlaps)
    if z is not None:
        shuffled_clusters = [
            _cluster_similarities(ctx[chosen], order[chosen]) for order in _shuffles(z, draws, seed)
        ]
        null_values |= {
            (n, "shuffled"): torch.stack([clusters[n] for clusters in shuffled_clusters])
            for n in ("intra", "intra_signed", "intra_reference")
        }
    return null_values
