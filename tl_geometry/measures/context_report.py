"""Are position and context orthogonal, and do contexts of one document cluster?
:func:`tl_geometry.contextual_report` gives every measure of the context basis, a row per state,
with its uncertainty and its nulls. Does a measure of either basis depend on the size of the corpus?
:func:`learning_curve`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_geometry.base.checks import choice, count, seeded
from tl_geometry.base.errors import fail
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS
from tl_geometry.base.linalg import numerical_rank
from tl_geometry.base.tables import Table
from tl_geometry.corpus.sources import label_ids
from tl_geometry.decomposition.groups import BLOCK
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.resampling import subsets, window_means
from tl_geometry.decomposition.variance import reliability
from tl_geometry.measures import contextual
from tl_geometry.measures.position_report import position_states
from tl_geometry.measures.state_tables import Nulls, Values, report_table, table_of

LEAST = FEWEST_GROUPS * BLOCK
"""Contexts below which no error is given: fewer than four blocks do not show how much contexts vary
(with 10 and 16 contexts, intervals meant to cover 95% covered 99%)."""
SIMILARITY_LIMIT = 1024
"""Contexts whose pairwise cosines are averaged, since the cost grows with the square of their
number. Of more contexts, that many are taken at even distances (a flag says so)."""
CHANCE = (
    "_random: isotropic directions; _flipped: random signs of coordinates; _exchanged: windows "
    "without a context; _shuffled: labels in random order"
)
Labels = Int[Tensor, "..."] | Sequence[int] | Sequence[str]


class ContextState:
    """Measures of the context basis of one state, of the whole corpus and of a part of its
    contexts, and of nulls.

    ``documents`` holds the document of each context (``None`` without documents), ``chosen`` the
    contexts whose similarities are averaged, ``rank`` the number of directions whose overlap is
    measured.
    """

    def __init__(
        self, basis: PositionContext, row: int, means: Tensor, documents: Tensor | None, rank: int
    ) -> None:
        self.basis, self.row, self.means = basis, row, means
        self.documents, self.rank = documents, rank
        self.pos, self.ctx = basis.pos[row], means - basis.mean[row]
        most = min(basis.contexts, SIMILARITY_LIMIT)
        self.chosen = torch.linspace(0, basis.contexts - 1, most).long()

    def over(self, member: Bool[Tensor, "sample group"]) -> Values:
        """All measures but compactness, for sets of groups of contexts."""
        per_set: list[Values] = []
        bases = window_means(self.basis, self.row, member.double())
        inside_of = member.repeat_interleave(self.basis.group_counts, 1)  # by context
        for rows, inside in zip(bases, inside_of, strict=True):
            pos, ctx = rows - rows.mean(0), self.means - rows.mean(0)
            cosines = contextual.incoherence(pos, ctx[inside])._asdict()
            values = {f"incoherence_{name}": value for name, value in cosines.items()}
            values["overlap"] = contextual.subspace_overlap(pos, ctx[inside], self.rank)
            if self.documents is not None:
                compared = self.chosen[inside[self.chosen]]
                of_compared = self.documents[compared]
                values |= contextual.cluster_similarity(ctx[compared], of_compared)._asdict()
            per_set.append(values)
        return {name: torch.stack([v[name] for v in per_set]) for name in per_set[0]}

    def compactness(self, orders: Sequence[Tensor]) -> Values:
        """Compactness of cvec and raw for each of the given labellings of the contexts; NaN without
        second moments."""
        names = ("compactness_cvec", "compactness_raw")
        if not self.basis.has_second_moments:
            return dict.fromkeys(names, torch.full((len(orders),), torch.nan))
        # relative rounding of the stored second moments: smaller eigenvalues count as zero
        accuracy = 1e-12 if self.basis.provenance.dtype == "float64" else 1e-6
        second = self.basis.second_moment(self.basis.states[self.row])
        measure = partial(contextual.compactness, second, self.pos, self.ctx)
        found = [torch.stack(measure(labels, accuracy=accuracy)) for labels in orders]
        return dict(zip(names, torch.stack(found, 1), strict=True))

    def nulls(self, orders: Sequence[Tensor], draws: int, seed: int) -> Nulls:
        """Measures by (measure, null): of each draw, or one number known without drawing.
        ``orders`` are the documents in random order."""
        generator = seeded(seed)
        pos, d_model = self.pos.expand(draws, *self.pos.shape), self.pos.shape[1]
        signs = torch.randint(2, (draws, 1, d_model), generator=generator) * 2.0 - 1
        # one sign per coordinate keeps the sizes of coordinates, which both bases share
        flipped = self.ctx * signs
        found: Nulls = {
            ("overlap", "random"): torch.tensor(self.rank / d_model or torch.nan).double(),
            ("overlap", "flipped"): contextual.subspace_overlap(pos, flipped, self.rank),
        }
        random = contextual.cosine_baseline(d_model, len(self.pos) * len(self.ctx))
        by_null = {"flipped": contextual.incoherence(pos, flipped), "random": random}
        if self.basis.sampled is not None and len(self.basis.sampled) >= FEWEST:
            by_null["exchanged"] = contextual.incoherence(pos, self._exchanged(draws, generator))
        for null, cosines in by_null.items():
            # a maximum depends on how many contexts are compared
            for name in ("avg", "rms") if null == "exchanged" else ("max", "avg", "rms"):
                found[f"incoherence_{name}", null] = getattr(cosines, name)
        ctx = self.ctx[self.chosen]
        drawn = [contextual.cluster_similarity(ctx, order[self.chosen]) for order in orders]
        for name in ("intra", "intra_reference") if drawn else ():
            found[name, "shuffled"] = torch.stack([getattr(similar, name) for similar in drawn])
        return found

    def _exchanged(self, draws: int, generator: torch.Generator) -> Tensor:
        """Context vectors [sample context d_model] of windows in which each position comes from
        another of the sampled contexts: states vary as before, but share no context."""
        states = vars(self.basis)["sample_states"]  # without a copy; nulls() knows that it is there
        window = slice(*self.basis.window)
        h = states[:, self.row, window].double() - self.pos - self.basis.mean[self.row]
        keys = torch.rand(draws, *h.shape[:2], generator=generator)
        # a random order of the contexts at each position
        places = torch.arange(h.shape[1])
        return torch.stack([h[order, places].mean(1) for order in keys.argsort(1)])


def _directions(rows: Tensor) -> int:
    """How many directions rows have."""
    return int(numerical_rank(torch.linalg.svdvals(rows), rows.shape))


def context_states(
    basis: PositionContext, *, labels: Labels | None = None, rank: int = 10
) -> tuple[list[ContextState], list[str]]:
    """What measures each state of a basis, and remarks."""
    means = basis.context_means
    if means is None:
        instead = "decompose(..., keep_ctx=True)"
        fail("basis", expected="context vectors", got="a basis without", instead=instead)
    basis.require_identifiable("contextual_report")
    rank = count(rank, "rank")
    ids = label_ids(basis.labels if labels is None else labels, basis.contexts)[0]
    documents = ids.long() if ids is not None and len(ids.unique()) >= 2 else None
    # all states use as many directions as each has; a state without any does not count
    bases = zip(basis.pos, means, basis.mean, strict=True)
    ranks = [min(map(_directions, (pos, ctx - mean))) for pos, ctx, mean in bases]
    # n centred rows have at most n - 1 directions
    most = min(basis.pos.shape[1] - 1, basis.contexts - 1, *(r for r in ranks if r > 0))
    used, flags = min(rank, most), []
    if documents is not None and basis.contexts > SIMILARITY_LIMIT:
        flags.append(f"similarities from {SIMILARITY_LIMIT} contexts")
    if used < rank:
        flags.append(f"overlap of {used} of {rank} directions (some state has no more)")
    if documents is not None and not basis.has_second_moments:
        flags.append("no second moments: no compactness")
    return [ContextState(basis, row, x, documents, used) for row, x in enumerate(means)], flags


def contextual_report(
    basis: PositionContext,
    labels: Labels | None = None,
    *,
    rank: int = 10,
    jackknife: bool = True,
    nulls: bool = True,
    draws: int = 8,
    seed: int = 0,
) -> Table:
    """Every measure of the context basis, a row per state (Song & Zhong 2023, sections 2 to 4 and
    Table 1).

    Measures:

    - ``incoherence_max``, ``_avg``, ``_rms`` of pos and ctx (the paper defines the
      maximum and tabulates the average);
    - ``overlap`` of their ``rank`` leading directions, the mean squared cosine of the principal
      angles. Where pos or ctx of some state has fewer directions, all states use that number, with
      a flag; NaN where the contexts are too few to have them.

    With documents (``labels``, or those of the basis) also:

    - ``intra`` and ``inter``, the mean |cos| within and between documents, self-pairs left out;
      ``intra_reference`` with self-pairs, as published;
    - ``compactness_cvec`` and ``compactness_raw``, the cluster compactness of the states without
      and with their positional part (NaN and a flag where the within-document covariance is
      singular or second moments are missing).

    Beside a measure stand ``_se``, its delete-one jackknife standard error over ``blocks`` of
    contexts, given from 32 contexts on (none for compactness), and its nulls, each the mean over
    ``draws`` draws with their spread ``_sd`` (none for ``inter``). Windows of one document are not
    independent, so with few documents errors hold for these documents only. Nulls:

    - ``_random``: isotropic directions (analytic);
    - ``_flipped``: context vectors with random signs of their coordinates. This keeps outlier
      coordinates, but not the directions in which averages of states vary most. Where those are not
      coordinate axes and pos has fewer than ``rank`` directions, noise along them fills both
      subspaces, and this null is too low: 49 to 90% of independent pos and ctx exceeded it at level
      5%. Choose a ``rank`` that pos has;
    - ``_exchanged`` (of mean and root mean square |cos|, with 10 sampled contexts or more): windows
      in which each position comes from another of the sampled contexts. Their context vectors hold
      no context, only the noise of averages, which lies along the directions in which states vary
      most;
    - ``_shuffled``: the labels in random order.

    Args:
        labels: the document of each context, as numbers or names.
        rank: directions of pos and of ctx whose overlap is measured.
        draws: draws of each sampled null, with ``seed``.

    Raises ``GeometryError`` for a basis without context vectors or of one context, and for labels
    that do not fit its contexts.

    >>> h = torch.randn(16, 5, 6, generator=torch.Generator().manual_seed(0))
    >>> h[:8] += 9 * torch.eye(6)[0]
    >>> from tl_geometry import decompose_activations
    >>> report = contextual_report(decompose_activations(h), labels=[0] * 8 + [1] * 8).df
    >>> bool(report["intra"][0] > 0.9)
    True
    >>> bool(report["compactness_raw"][0] > report["compactness_raw_shuffled"][0])
    True
    """
    require_basis(basis)
    draws = count(draws, "draws")
    states, flags = context_states(basis, labels=labels, rank=rank)
    sets, halves = subsets(basis, jackknife=jackknife), reliability(basis.moments)
    documents, generator = states[0].documents, seeded(seed)
    shuffled: list[Tensor] = []
    if documents is not None and nulls:
        orders = [torch.randperm(len(documents), generator=generator) for _ in range(draws)]
        shuffled = [documents[order] for order in orders]
    per_state: list[tuple[Values, Nulls]] = []
    singular: list[int] = []
    for row, state in enumerate(states):
        values = state.over(sets.member[: sets.jackknife.stop])
        values["split_half"] = halves[row : row + 1]
        null_values = state.nulls(shuffled, draws, seed) if nulls else {}
        if documents is not None:
            compact = state.compactness([documents, *shuffled])
            values |= {name: value[:1] for name, value in compact.items()}
            null_values |= {(n, "shuffled"): v[1:] for n, v in compact.items() if nulls}
            if basis.has_second_moments and bool(compact["compactness_cvec"].isnan().any()):
                singular.append(basis.states[row])
        per_state.append((values, null_values))
    if singular:
        flags.append(f"within-document covariance singular at states {singular}: no compactness")
    return report_table(basis, sets, per_state, flags, LEAST, draws * nulls, CHANCE, seed)


MEASURES = {"position": position_states, "context": context_states}
OF_ONE_BASIS = ("fracture_at", "relative_norm_reference")
"""Measures without a curve: the mean of a position over blocks says nothing, and by the raw norm of
the whole corpus the curve of ``relative_norm`` would only be repeated."""


def learning_curve(basis: PositionContext, of: str = "position", **options: Any) -> Table:
    """The measures of :func:`tl_geometry.positional_report` (of ``"position"``) or
    :func:`tl_geometry.contextual_report` (of ``"context"``) at fewer contexts.

    At an eighth, a quarter and half of the contexts (as far as there are enough groups), the mean
    over disjoint blocks of so many; the last rows are the whole basis. The noise of an average over
    C contexts falls as 1/sqrt(C), so that ranks and norms depend on C: a measure that still changes
    at its end depends on the size of the corpus.

    Args:
        basis: a decomposition.
        of: which measures.
        options: those of the report that change a measure (``k`` and ``frequencies``,
            or ``labels`` and ``rank``).

    Returns a row per number of ``contexts`` and ``state``, of measures that a block of contexts has
    by itself; ``relative_norm`` is over the norm of the whole corpus.
    Raises ``GeometryError`` for a basis of one context.

    >>> from tl_geometry import decompose_activations
    >>> noise = torch.randn(16, 9, 6, generator=torch.Generator().manual_seed(0))
    >>> curve = learning_curve(decompose_activations(noise))
    >>> curve.column("contexts")
    [2, 4, 8, 16]
    """
    require_basis(basis)
    choice(of, tuple(MEASURES), "of")
    states, flags = MEASURES[of](basis, **options)
    sets = subsets(basis)
    levels = [*sets.levels, (basis.contexts, slice(0, 1))]  # row 0 is the whole basis
    found = [state.over(sets.member[rows]) for _, rows in levels for state in states]
    contexts = torch.tensor([n for n, _ in levels]).repeat_interleave(len(basis.states))
    columns = {"contexts": contexts, "state": torch.tensor(basis.states).repeat(len(levels))}
    for name in found[0]:
        if name not in OF_ONE_BASIS:
            columns[name] = torch.stack([values[name].mean() for values in found])
    return table_of(basis, columns, flags, "")
