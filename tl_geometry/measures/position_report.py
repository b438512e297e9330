"""What does a model's positional basis look like, state by state?
:func:`tl_geometry.positional_report` gives every measure of it in one table, with its uncertainty
and its nulls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import require
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.resampling import noise_weights, subsets, window_means
from tl_geometry.decomposition.variance import LOW_RELIABILITY, reliability, spans
from tl_geometry.measures import differences, positional
from tl_geometry.measures import rank as ranks
from tl_geometry.measures.state_measures import Nulls, StateMeasures, Values, state_fields

CACHE = 2**22
"""Bytes of bases that are measured at a time, about a processor's cache: at 511 x 768 three times
as fast as all bases at once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionalReport(StateMeasures):
    """What :func:`positional_report` returns: the measures, the bound ``k`` on the rank that was
    used, and ``fourier``, the lowest frequencies of the two-dimensional DCT of the cosines between
    positions."""

    k: int
    fourier: Float[Tensor, "state column column"]


def _joined(batches: Sequence[Values]) -> Values:
    """Measures of several batches of bases, joined."""
    return {name: torch.cat([measures[name] for measures in batches]) for name in batches[0]}


def _gram_spectrum(pos: Tensor) -> Tensor:
    """Singular values of a batch of bases from the smaller of their two Gram matrices: three times
    as fast as an SVD, inaccurate below 1e-8 of the largest."""
    return linalg.gram_spectrum(pos @ pos.mT if pos.shape[-2] <= pos.shape[-1] else pos.mT @ pos)


def _sizes(basis: PositionContext, row: int) -> tuple[Tensor, Tensor]:
    """``sigma_1(M) / sqrt(C)``, M the matrix of all centred, then of all raw states; NaN without
    second moments. Denominators of the relative norms."""
    if not basis.has_second_moments:
        nan = torch.tensor(torch.nan, dtype=torch.float64)
        return nan, nan
    centred, mean = basis.second_moment(basis.states[row]), basis.mean[row]
    raw = centred + basis.contexts * basis.pos.shape[1] * torch.outer(mean, mean)
    sizes = linalg.gram_spectrum(torch.stack([centred, raw]))[:, 0] / basis.contexts**0.5
    sizes = torch.where(sizes > 0, sizes, torch.nan)
    return sizes[0], sizes[1]


def _raw_sizes(
    basis: PositionContext,
    row: int,
    pos: Float[Tensor, "sample position d_model"],
    mean: Float[Tensor, "sample d_model"],
) -> Float[Tensor, " sample"]:
    """The raw size of :func:`_sizes` for each subset of the contexts, taken along the leading
    direction v of the whole corpus.

    Its square is ``|P v|^2 + T (mean . v)^2`` of the subset plus the variance along v within
    positions. Group sums do not hold that variance, so that of the whole corpus stands in.
    """
    overall_mean = basis.mean[row]
    second = basis.second_moment(basis.states[row]) / basis.contexts
    raw = second + pos.shape[1] * torch.outer(overall_mean, overall_mean)
    leading = torch.linalg.eigh(raw)[1][:, -1]
    # the second moment along v less the part of position is the variance within positions
    within = leading @ second @ leading - (basis.pos[row] @ leading).square().sum()
    return (
        within + (pos @ leading).square().sum(1) + pos.shape[1] * (mean @ leading).square()
    ).sqrt()


def _curve(pos: Tensor, axes: Tensor, frequencies: int) -> Values:
    """Measures that depend on the order of positions, for a batch of bases [sample position
    d_model]."""
    spectrum = positional.fourier(positional.normalized_gram(pos))
    fracture = positional.fracture_score(pos)
    return {
        "low_frequency": positional.low_frequency_share(pos, frequencies),
        "off_diagonal": positional.off_diagonal_share(spectrum),
        "smoothness": differences.smoothness(pos, 1),
        "smoothness_2": differences.smoothness(pos, 2),
        "fracture": fracture.score,
        "fracture_at": fracture.argmax.double(),
        "roughness": positional.roughness(pos),
        "winding": positional.winding_number(pos @ axes[:, :2]),
    }


@dataclass(frozen=True, eq=False)
class _Measure:
    """All measures of a batch of bases of one state.

    ``axes`` are the principal axes of the whole basis, in whose first plane every basis winds;
    ``shape`` is (positions, d_model); ``sizes`` are those of :func:`_sizes`; ``frequencies`` counts
    the cosines of ``low_frequency``.
    """

    axes: Tensor
    shape: tuple[int, int]
    k: int
    strategy: str
    sizes: tuple[Tensor, Tensor]
    frequencies: int

    def spectrum(self, s: Tensor) -> Values:
        """Measures of the singular values [sample rank]."""
        rank = threshold = explained = explained_energy = s.new_full(s.shape[:-1], torch.nan)
        if self.k >= 1:
            estimate = ranks.screenot(s, self.shape, k=self.k, strategy=self.strategy)
            rank, threshold = estimate.rank.double(), estimate.threshold
            explained, explained_energy = (
                positional.explained_ratio(s, estimate.rank, power=power) for power in (1, 2)
            )
        centred, raw = self.sizes
        return {
            "rank": rank,
            "threshold": threshold,
            "stable_rank": linalg.stable_rank(s),
            "explained": explained,
            "explained_energy": explained_energy,
            "relative_norm": s[..., 0] / centred,
            "relative_norm_reference": s[..., 0] / raw,
        }

    def curve(self, pos: Tensor) -> Values:
        return _curve(pos, self.axes, self.frequencies)

    def __call__(self, pos: Tensor, s: Tensor | None = None) -> Values:
        return self.spectrum(_gram_spectrum(pos) if s is None else s) | self.curve(pos)

    def each(self, pos: Tensor) -> Values:
        """All measures of many bases, a few at a time so that they stay in cache."""
        step = max(1, CACHE // (pos[0].numel() * pos.element_size()))
        return _joined([self(p) for p in pos.split(step)])


def positional_report(
    basis: PositionContext,
    *,
    k: int = 20,
    strategy: str = "i",
    frequencies: int = 10,
    jackknife: bool = True,
    nulls: bool = True,
    draws: int = 8,
    seed: int = 0,
) -> PositionalReport:
    """Every measure of the positional basis, a row per state (Song & Zhong 2023, section 2 and
    Tables 1 to 5).

    Measures (formulas in :mod:`tl_geometry.measures.positional`):

    - ``rank`` and ``threshold``: ScreeNOT with the bound ``k`` and ``strategy``;
    - ``stable_rank``; ``explained`` and ``explained_energy``, the share of the singular values, or
      of their squares, in that rank;
    - ``relative_norm`` (centred states) and ``relative_norm_reference`` (raw states, with their
      mean: what the published Table 5 contains);
    - ``low_frequency`` (share of the first ``frequencies`` cosines) and ``off_diagonal``;
    - ``smoothness`` and ``smoothness_2`` (first and second differences), ``roughness``;
    - ``fracture``, and ``fracture_at``, the absolute position after which the largest break comes;
    - ``winding``: turns in the plane of the first two components;
    - ``split_half``: mean cosine over positions between the bases of two halves of the contexts
      (``pos_reliability`` of the analysis of variance).

    The noise of a basis falls as 1/sqrt(C): ranks and norms depend on C, see ``curve``.

    Nulls, each with ``draws`` draws (``noise`` with half as many):

    - ``shuffled``: the same positional vectors in random order;
    - ``noise``: the difference of two random halves of the contexts, which holds the sampling noise
      of a basis but no effect of position. This noise is correlated, so its rank is not 0, and a
      rank near it is no evidence of position;
    - ``isotropic``: Gaussian rows of the same energy.

    For an untrained model as a null, call this on its basis. ``jackknife=False`` leaves out errors
    and curve (3 times faster). Nulls of the relative norms keep the denominators of the whole
    corpus; for the errors of ``relative_norm_reference`` the denominator follows the mean of each
    subset. Measures without an error are those of
    :data:`tl_geometry.measures.state_measures.UNBOUNDED`.

    Raises ``GeometryError`` for a basis of one context.

    >>> from tl_geometry import decompose_activations
    >>> noise = torch.randn(16, 9, 6, generator=torch.Generator().manual_seed(0))
    >>> report = positional_report(
    ...     decompose_activations(noise + 3 * torch.linspace(-1, 1, 9)[:, None])
    ... )
    >>> int(report["rank"]), round(float(report["relative_norm"]), 2), report["low_frequency"].shape
    (1, 0.98, torch.Size([1]))
    """
    require_basis(basis)
    basis.require_identifiable("positional_report")
    for name, value in {"k": k, "frequencies": frequencies, "draws": draws}.items():
        require(value >= 1, name, expected="at least 1", got=value)
    positions, d_model = basis.pos.shape[1:]
    k_used = min(k, ranks.usable_k(k, min(positions, d_model)))
    context_subsets = subsets(basis, jackknife=jackknife)
    flags = [f"rank bound k={k_used} of {k} (short window)"] if k_used < k else []
    flags += [] if basis.has_second_moments else ["no second moments: no relative norm"]
    halves = reliability(basis.moments)
    state_reliability = zip(basis.states, halves.tolist(), strict=True)
    unreliable = [state for state, cosine in state_reliability if cosine < LOW_RELIABILITY]
    if unreliable:
        flags.append(
            f"split_half below {LOW_RELIABILITY} in states {spans(unreliable)}: mostly noise"
        )
    per_state, blocks = [], []
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(positions, generator=generator) for _ in range(draws)]
    gaussian = torch.randn(draws, positions, d_model, generator=generator, dtype=torch.float64)
    gaussian = gaussian - gaussian.mean(1, keepdim=True)
    gaussian = gaussian / torch.linalg.vector_norm(gaussian, dim=(1, 2), keepdim=True)
    isotropic = None
    if nulls and min(positions, d_model) > 1:
        isotropic = (_gram_spectrum(gaussian), _curve(gaussian, gaussian[0].T, frequencies))
    signs = noise_weights(basis, max(1, draws // 2), seed)
    for row in range(len(basis.states)):
        pos, sizes = basis.pos[row], _sizes(basis, row)
        factors = linalg.svd(pos)
        # a basis of one dimension has no second axis: with a zero one its winding number says
        # nothing, because each change of sign is half a turn to one side or the other
        axes = factors.V if factors.V.shape[1] > 1 else torch.nn.functional.pad(factors.V, (0, 1))
        measure = _Measure(axes, (positions, d_model), k_used, strategy, sizes, frequencies)
        position_means = window_means(basis, row, context_subsets.member[1:].double())
        centres = position_means.mean(1)
        subset_pos = position_means - centres.unsqueeze(1)
        whole_basis = measure(pos[None], factors.S[None])
        no_subsets = {n: v[:0] for n, v in whole_basis.items()}
        subset_values = measure.each(subset_pos) if len(position_means) else no_subsets
        if len(position_means) and basis.has_second_moments:
            ratio = sizes[1] / _raw_sizes(basis, row, subset_pos, centres)
            subset_values["relative_norm_reference"] = (
                subset_values["relative_norm_reference"] * ratio
            )
        values = {n: torch.cat([whole_basis[n], subset_values[n]]) for n in whole_basis}
        # rows of the window become absolute positions
        values["fracture_at"] = values["fracture_at"] + basis.window[0]
        null_values = (
            _positional_nulls(basis, row, orders, isotropic, signs, measure) if isotropic else {}
        )
        per_state.append((values | {"split_half": halves[row : row + 1]}, null_values))
        cosines = positional.normalized_gram(pos)
        blocks.append(positional.fourier(cosines)[:frequencies, :frequencies])
    fields = state_fields(basis, context_subsets, per_state, flags=flags, draws=draws)
    return PositionalReport(**fields, k=k_used, fourier=torch.stack(blocks))


def _positional_nulls(
    basis: PositionContext,
    row: int,
    orders: Sequence[Tensor],
    isotropic: tuple[Tensor, Values],
    signs: Tensor,
    measure: _Measure,
) -> Nulls:
    """The measures of each draw of each null; ``isotropic`` holds the spectra of Gaussian bases of
    norm one, and their measures that depend on the order of positions."""
    pos = basis.pos[row]
    noise = window_means(basis, row, signs)
    noise = noise - noise.mean(1, keepdim=True)
    tables = {
        "shuffled": _joined([measure.curve(pos[None, order]) for order in orders]),
        "noise": measure.each(noise) if len(noise) else {},
        "isotropic": measure.spectrum(torch.linalg.vector_norm(pos) * isotropic[0]) | isotropic[1],
    }
    left_out = ("fracture_at", "winding")  # their mean over draws means nothing
    return {
        (n, null): v
        for null, values in tables.items()
        for n, v in values.items()
        if n not in left_out
    }
