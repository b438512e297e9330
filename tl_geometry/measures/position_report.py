"""What does a model's positional basis look like, state by state?
:func:`tl_geometry.positional_report` gives every measure of it in one table, with its uncertainty
and its nulls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.checks import count, seeded
from tl_geometry.base.intervals import FEWEST
from tl_geometry.base.tables import Table
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.decomposition.resampling import noise_weights, subsets, window_means
from tl_geometry.decomposition.variance import LOW_RELIABILITY, reliability, spans
from tl_geometry.measures import positional
from tl_geometry.measures.state_tables import Nulls, Values, report_table

CACHE = 2**22
"""Bytes of bases that are measured at a time, about a processor's cache: at 511 x 768 three times
as fast as all bases at once."""
CHANCE = (
    "_shuffled: positions in random order; _noise: differences of halves of the corpus; "
    "_isotropic: Gaussian rows of the same energy"
)


def _in_cache(measure: Callable[[Tensor], Values], pos: Tensor) -> Values:
    """Measures of many bases, a few at a time."""
    step = max(1, CACHE // (pos[0].numel() * pos.element_size()))
    parts = [measure(some) for some in pos.split(step)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _spectrum(pos: Tensor) -> Tensor:
    """Singular values of a batch of bases from the smaller of their two Gram matrices: three times
    as fast as an SVD, inaccurate below 1e-8 of the largest."""
    return linalg.gram_spectrum(pos @ pos.mT if pos.shape[-2] <= pos.shape[-1] else pos.mT @ pos)


class PositionState:
    """Measures of positional bases of one state: of the whole corpus, of a part of its contexts,
    and of nulls.

    ``centred`` and ``raw`` are ``sigma_1(M) / sqrt(C)``, M the matrix of all centred, then of all
    raw states (NaN without second moments).
    """

    def __init__(self, basis: PositionContext, row: int, *, k: int, frequencies: int) -> None:
        self.basis, self.row, self.pos = basis, row, basis.pos[row]
        self.k, self.frequencies = k, frequencies
        self.centred = self.raw = self.pos.new_tensor(torch.nan)
        if basis.has_second_moments:
            second, mean = basis.second_moment(basis.states[row]) / basis.contexts, basis.mean[row]
            raw = second + len(self.pos) * torch.outer(mean, mean)
            size = linalg.gram_spectrum(torch.stack([second, raw]))[:, 0]
            self.centred, self.raw = torch.where(size > 0, size, torch.nan)

    def over(self, member: Bool[Tensor, "sample group"]) -> Values:
        """All measures for sets of groups of contexts."""
        means = window_means(self.basis, self.row, member.double())
        values = _in_cache(self, means - means.mean(1, keepdim=True))
        values["fracture_at"] += self.basis.window[0]  # rows of the window as absolute positions
        return values

    def __call__(self, pos: Float[Tensor, "sample position d_model"]) -> Values:
        """All measures of some bases, in relative positions."""
        return self.spectral(_spectrum(pos)) | self.ordered(pos)

    def spectral(self, s: Float[Tensor, "sample rank"]) -> Values:
        """Measures of the singular values."""
        rank = threshold = explained = s.new_full(s.shape[:-1], torch.nan)
        if self.k >= 1:
            shape = (self.pos.shape[0], self.pos.shape[1])
            found = positional.screenot(s, shape, k=self.k)
            rank, threshold = found.rank.double(), found.threshold
            explained = positional.explained_ratio(s, found.rank)
        return {
            "rank": rank,
            "threshold": threshold,
            "stable_rank": linalg.stable_rank(s),
            "explained": explained,
            "relative_norm": s[:, 0] / self.centred,
            "relative_norm_reference": s[:, 0] / self.raw,
        }

    def ordered(self, pos: Float[Tensor, "sample position d_model"]) -> Values:
        """Measures that depend on the order of positions."""
        fracture = positional.fracture_score(pos)
        spectrum = positional.fourier(positional.normalized_gram(pos))
        return {
            "low_frequency": positional.low_frequency_share(pos, self.frequencies),
            "off_diagonal": positional.off_diagonal_share(spectrum),
            "smoothness": positional.smoothness(pos, 1),
            "smoothness_2": positional.smoothness(pos, 2),
            "fracture": fracture.score,
            "fracture_at": fracture.argmax.double(),
            "roughness": positional.roughness(pos),
        }

    def nulls(self, orders: Tensor, signs: Tensor, isotropic: tuple[Tensor, Values]) -> Nulls:
        """The measures of each draw of each null; ``isotropic`` holds the spectra of Gaussian bases
        of norm one, and their measures that depend on the order of positions."""
        noise = window_means(self.basis, self.row, signs)
        noise = noise - noise.mean(1, keepdim=True)
        spectra = torch.linalg.vector_norm(self.pos) * isotropic[0]
        found = {
            "shuffled": _in_cache(self.ordered, self.pos[orders]),
            "noise": _in_cache(self, noise) if len(noise) else {},
            "isotropic": self.spectral(spectra) | isotropic[1],
        }
        pairs = [(name, null) for null, values in found.items() for name in values]
        # a mean over draws of places means nothing
        return {p: found[p[1]][p[0]] for p in pairs if p[0] != "fracture_at"}


def position_states(
    basis: PositionContext, *, k: int = 20, frequencies: int = 10
) -> tuple[list[PositionState], list[str]]:
    """What measures each state of a basis, and remarks."""
    basis.require_identifiable("positional_report")
    k, frequencies = count(k, "k"), count(frequencies, "frequencies")
    used = positional.usable_k(k, min(basis.pos.shape[1:]))
    flags = [f"rank bound k={used} of {k} (few positions or dimensions)"] if used < k else []
    flags += [] if basis.has_second_moments else ["no second moments: no relative norm"]
    rows = range(len(basis.states))
    return [PositionState(basis, row, k=used, frequencies=frequencies) for row in rows], flags


def positional_report(
    basis: PositionContext,
    *,
    k: int = 20,
    frequencies: int = 10,
    jackknife: bool = True,
    nulls: bool = True,
    draws: int = 8,
    seed: int = 0,
) -> Table:
    """Every measure of the positional basis, a row per state (Song & Zhong 2023, section 2 and
    Tables 1 to 5).

    Measures (formulas in :mod:`tl_geometry.measures.positional`):

    - ``rank`` and ``threshold``: ScreeNOT with the bound ``k``;
    - ``stable_rank``; ``explained``, the share of the singular values in that rank;
    - ``relative_norm`` (centred states) and ``relative_norm_reference`` (raw states, with their
      mean: what the published Table 5 contains);
    - ``low_frequency`` (share of the first ``frequencies`` cosines) and ``off_diagonal``;
    - ``smoothness`` and ``smoothness_2`` (first and second differences), ``roughness``;
    - ``fracture``, and ``fracture_at``, the absolute position after which the largest break comes;
    - ``split_half``: mean cosine over positions between the bases of two halves of the contexts
      (``pos_reliability`` of the analysis of variance).

    Beside a measure stand ``_se``, its jackknife standard error over ``blocks`` of contexts
    (interval: ``+- t_(blocks - 1)`` errors; none for ``split_half`` and the measures of
    :data:`tl_geometry.measures.state_tables.UNBOUNDED`), and its nulls, each the mean over
    ``draws`` draws with their spread ``_sd`` (``_noise`` over half as many, or all there are,
    without a spread):

    - ``_shuffled``: the same positional vectors in random order;
    - ``_noise``: the difference of two random halves of the contexts, which holds the sampling
      noise of a basis but no effect of position. This noise is correlated, so its rank is not 0,
      and a rank near it is no evidence of position;
    - ``_isotropic``: Gaussian rows of the same energy.

    For an untrained model as a null, call this on its basis. The noise of a basis falls as
    1/sqrt(C): ranks and norms depend on C, see :func:`tl_geometry.measures.learning_curve`.
    ``jackknife=False`` leaves out errors. Nulls of the relative norms keep the denominators of the
    whole corpus.

    Raises ``GeometryError`` for a basis of one context.

    >>> from tl_geometry import decompose_activations
    >>> noise = torch.randn(16, 9, 6, generator=torch.Generator().manual_seed(0))
    >>> report = positional_report(
    ...     decompose_activations(noise + 3 * torch.linspace(-1, 1, 9)[:, None])
    ... )
    >>> report.df[["rank", "relative_norm"]].round(2).values.tolist()
    [[1.0, 0.98]]
    """
    require_basis(basis)
    draws = count(draws, "draws")
    states, flags = position_states(basis, k=k, frequencies=frequencies)
    halves = reliability(basis.moments)
    pairs = zip(basis.states, halves.tolist(), strict=True)
    noisy = [state for state, cosine in pairs if cosine < LOW_RELIABILITY]
    if noisy:
        flags.append(f"split_half below {LOW_RELIABILITY} in states {spans(noisy)}: mostly noise")
    positions, d_model = basis.pos.shape[1:]
    generator = seeded(seed)
    orders = [torch.randperm(positions, generator=generator) for _ in range(draws)]
    gaussian = torch.randn(draws, positions, d_model, generator=generator, dtype=torch.float64)
    gaussian = gaussian - gaussian.mean(1, keepdim=True)
    gaussian = gaussian / torch.linalg.vector_norm(gaussian, dim=(1, 2), keepdim=True)
    signs = noise_weights(basis, max(1, draws // 2), seed)
    # one position or one dimension has no null
    drawn = nulls and min(positions, d_model) > 1
    isotropic = (_spectrum(gaussian), _in_cache(states[0].ordered, gaussian)) if drawn else None
    sets = subsets(basis, jackknife=jackknife)
    per_state: list[tuple[Values, Nulls]] = []
    for row, state in enumerate(states):
        values = state.over(sets.member[: sets.jackknife.stop])
        values["split_half"] = halves[row : row + 1]
        null_values = state.nulls(torch.stack(orders), signs, isotropic) if isotropic else {}
        per_state.append((values, null_values))
    return report_table(basis, sets, per_state, flags, FEWEST, draws * drawn, CHANCE, seed)
