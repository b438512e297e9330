"""Intervals and the null of position for the shares of a sweep, over windows that the basis has not
seen. ``sweep_heads(..., intervals=True)`` calls this.

Basis and windows are then two independent sources of error, each with its own delete-group
jackknife: over the groups of the basis, and over contiguous blocks of windows. (Of windows that the
basis has seen, shares of position are too high and intervals too narrow: these are refused.)

No basis without a group is projected by itself, because parts are linear in the sums of the groups.
Let ``w_g = n_g / C`` be the share of the contexts in group g, and ``M_g`` and ``P_g`` the queries
(or keys) of ``w_g`` times the mean and the positional vectors of group g
(:mod:`tl_geometry.scores.projection`). The basis without the
groups in L has::

    bias = c sum_(g not in L) M_g,   pos = c sum_(g not in L) P_g,   c = 1 / (1 - sum_(g in L) w_g)

and cvec is the rest. So the sums of all pairs of 2 G + 1 parts (all ``M_g``, all ``P_g``, and what
remains) give every share without a group, and every draw of the null.

**Null.** Does position explain more of a head's scores than noise would? A basis is the average of
G groups of contexts. Without position the group vectors ``sqrt(w_g) P_g / w_g`` are noise of one
covariance, about normal because each is an average of many contexts, so that every orthogonal
mixture of them is as likely as what was seen (Langsrud 2005, rotation tests)::

    P(r) = sum_g r_g / sqrt(w_g) P_g,   |r| = 1

The basis is ``r_g = sqrt(w_g)``. Where there is position this direction stands out, because all
groups contain the same vectors. The p-value is the share of random directions r in which position
explains as much; the null share is the mean over directions orthogonal to that of the basis, where
whatever all groups share cancels. Nothing is shifted along the window, so correlation between
positions is kept.

What is mixed is what the label calls position: ``pos`` of queries and keys; in a rotary model also
the rotated means of the keys (relative position), and of the rotated mean of the queries the part
that is noise. The bias of ALiBi is position that no noise makes: it is in the scores of every draw
and in the share of the basis, but in the position share of no draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from tl_geometry.base.checks import seeded
from tl_geometry.base.errors import fail, require
from tl_geometry.base.intervals import FEWEST_GROUPS
from tl_geometry.base.results import row_hashes
from tl_geometry.base.sums import Sums
from tl_geometry.decomposition.groups import BLOCK, blocks
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.scores.projection import MappedBasis, frozen_scale
from tl_geometry.scores.sums import SHARES, ShareSums

FEWEST_WINDOWS = FEWEST_GROUPS * BLOCK
"""Windows, and contexts of a basis, below which there is no jackknife: four blocks of eight."""
DRAWS = 1_999
"""Random directions. The smallest p-value is then 1 / 2000: three such heads among 270 are below
0.05 after the correction for all 270 (1 / 2000 * 270 / 3 = 0.045)."""
DEPENDENT = 0.1
"""No p-value where at most this share of random orders of the groups has neighbours as similar as
the order of the corpus: the groups are then not independent. Topics that cover two groups each
would make the test reject in 13% of the cases; with this check 2% of them get a p-value."""


def require_unseen(basis: PositionContext, tokens: Int[Tensor, "context position"]) -> None:
    """Raise unless intervals of the shares of these windows can be had from this basis."""
    what, instead = "intervals", f"decompose(model, windows[:-{FEWEST_WINDOWS}]) and "
    instead += f"sweep_heads(model, windows[-{FEWEST_WINDOWS}:], basis, intervals=True)"
    hashes = basis.token_hashes
    if hashes is None:
        expected = "a basis that knows which contexts it has seen"
        fail(what, expected=expected, got="one without", instead=instead)
    seen = int(torch.isin(row_hashes(tokens), hashes).sum())
    expected, got = "windows that the basis has not seen", f"{seen} of {len(tokens)} that it has"
    require(seen == 0, what, expected=expected, got=got, instead=instead)
    enough = len(blocks(basis.group_counts)) >= FEWEST_GROUPS and len(tokens) >= FEWEST_WINDOWS
    expected = f"at least {FEWEST_WINDOWS} windows, and a basis of {FEWEST_GROUPS} groups of "
    expected += f"{BLOCK} contexts or more"
    got = f"{len(tokens)} windows, and groups of {basis.group_counts.tolist()}"
    require(enough, what, expected=expected, got=got, instead=instead)


# ---- noise of the groups


@dataclass(frozen=True, eq=False, kw_only=True)
class Noise(Sums):
    """What the null needs of one layer besides pairs of parts, summed over contexts: the share of
    sampling noise in the mean query's squared norm (zero where the mean is not mixed), and products
    of the groups' keys less their mean, with their sum of squares."""

    contexts: Float[Tensor, ""]
    query: Float[Tensor, " head"]
    gram: Float[Tensor, "group column"]
    size: Float[Tensor, ""]


def noise_of(layer: LayerView, mapped: MappedBasis, start: int) -> Noise:
    """:class:`Noise` of one batch, with the frozen scales and constants averaged over its
    contexts."""
    (q_bias, _), (k_bias, k_pos) = (_averaged(layer, mapped, which) for which in "qk")
    weight = mapped.share.to(q_bias)
    noise = q_bias.new_zeros(q_bias.shape[1])
    if layer.turn is not None:
        # the mean's sampling variance, by the spread of the groups (G - 1 degrees of freedom)
        mean = einsum(weight, q_bias, "g, g h i e -> h i e")
        spread = einsum(weight, (q_bias - mean).square(), "g, g h i e -> h") / (len(weight) - 1)
        # 1e-30 only avoids 0 / 0 for a head whose mean query is zero
        noise = spread / mean.square().sum((1, 2)).clamp(min=1e-30)
        k_pos = k_pos + k_bias
    # a topic shifts the mean of its contexts; pos has no mean, so only rotated means hold it
    vectors = k_pos[:, :, start:].flatten(1)
    deviations, contexts = vectors - weight @ vectors, len(layer.h)
    return Noise(
        contexts=torch.tensor(float(contexts), dtype=torch.float64),
        query=contexts * noise.double(),
        gram=contexts * (deviations @ deviations.mT).double(),
        size=contexts * vectors.square().sum().double(),
    )


def _averaged(layer: LayerView, mapped: MappedBasis, which: str) -> tuple[Tensor, Tensor]:
    """Bias and pos of each group ``[group head position d_head]``, averaged over a batch."""
    scale = layer.scale if which == "q" else 1.0
    # root mean square, because the scales enter the sums of squares squared
    frozen = frozen_scale(layer, which, mapped.normalized).square().mean(0).sqrt() * scale
    constant = getattr(layer, f"{which}_constant").mean(0) * scale
    parts = rearrange(getattr(mapped, which), "h i (kind g) e -> kind g h i e", kind=2)
    mean, pos = parts / mapped.share.to(parts)[:, None, None, None] * frozen.mT.unsqueeze(-1)
    return mean + rearrange(constant, "i h e -> h i e"), pos


# ---- intervals


def without(
    share: Float[Tensor, " group"], left_out: Bool[Tensor, " group"] | None = None
) -> Float[Tensor, "part column"]:
    """Bias, pos and cvec (``part``) of the basis without some groups (of all for ``None``), as
    weighted sums of the 2 G + 1 parts (``column``).

    >>> change = without(torch.tensor([0.25, 0.75]), torch.tensor([True, False]))
    >>> change[:2, :4].round(decimals=2).tolist()
    [[0.0, 1.3300000429153442, 0.0, 0.0], [0.0, 0.0, 0.0, 1.3300000429153442]]
    """
    groups = len(share)
    used = torch.ones_like(share) if left_out is None else (~left_out).to(share)
    change = share.new_zeros(3, 2 * groups + 1)
    change[0, :groups] = change[1, groups:-1] = used / (share * used).sum()
    # the three rows must sum to one in every column, so that bias + pos + cvec is the whole query
    change[2] = 1 - change[:2].sum(0)
    return change


def resampled(
    pairs: ShareSums, of_blocks: Sequence[ShareSums], windows: int, groups: Int[Tensor, " group"]
) -> tuple[dict[str, Float[Tensor, "head sample term"]], tuple[tuple[float, ...], ...]]:
    """Samples of the shares of one layer, and their sizes, as :class:`ShareTable` has them.

    ``pairs`` are the sums of the 2 G + 1 parts over all ``windows``, ``of_blocks`` those of bias,
    pos and cvec in each block of 8 windows; ``groups`` counts the contexts in each group of the
    basis. Groups of fewer than 8 contexts are left out together with their neighbours, because
    topics continue over several windows.
    """
    groups = groups[groups > 0]
    share, rows = groups.double() / groups.sum(), blocks(groups)
    whole = pairs.of_parts(without(share))
    left_out = [pairs.of_parts(without(share, row)) for row in rows]
    counts = torch.tensor([len(x) for x in torch.arange(windows).split(BLOCK)])
    each, window_rows = ShareSums.stack(of_blocks), blocks(counts)
    left_out += [each.select(~row).pooled() for row in window_rows]
    samples = {n: torch.stack([getattr(s, n) for s in (whole, *left_out)], 1) for n in SHARES}
    sizes = rows.double() @ share, window_rows.double() @ counts.double() / windows
    return samples, tuple(tuple(x.tolist()) for x in sizes)


# ---- the null of position


def position_null(
    pairs: ShareSums, share: Float[Tensor, " group"], noise: Noise, *, rotary: bool, seed: int
) -> dict[str, Float[Tensor, " head"]]:
    """Mean and 95% quantile of the null share of position, and its p-value, for the heads of one
    layer. The p-value is NaN where the groups are not independent (:func:`independence`)."""
    groups = len(share)
    # row 0 is the bias of the whole basis, row 1 + g what is mixed of group g: its pos, and in a
    # rotary model its bias
    change = torch.zeros(1 + groups, 2 * groups + 1, dtype=torch.float64)
    change[0, :groups] = 1
    change[1:, groups:-1] = torch.eye(groups)
    if rotary:
        change[1:, :groups] = torch.eye(groups)
    numerators = pairs.of_parts(change).numerators
    table = numerators[:, : (1 + groups) ** 2].unflatten(1, (1 + groups, 1 + groups))
    alibi = numerators[:, (1 + groups) ** 2 :].sum(1, keepdim=True)
    total = pairs.total.masked_fill(pairs.uniform, torch.nan).unsqueeze(1)
    reliability = (1 - noise.query / noise.contexts).clamp(min=0)

    def cs(c: Float[Tensor, "sample group"]) -> Float[Tensor, "head sample"]:
        # with rotation what is mixed of each group holds its mean, c . w times in all: the query's
        # mean keeps the rest, and the key's none
        mean_of_query = 1 - c @ share if rotary else torch.ones(len(c)).double()
        mean = reliability.unsqueeze(1) * mean_of_query
        query = torch.cat([mean.unsqueeze(-1), c.expand(len(mean), -1, -1)], -1)
        key = torch.cat([torch.full_like(c[:, :1], float(not rotary)), c], 1)
        return einsum(query, table, key, "h s a, h a b, s b -> h s") / total

    draws, off_basis = directions(share, seed)
    of_draws, null = cs(draws), cs(off_basis)
    position = of_draws[:, :1] + alibi / total
    # the basis counts as one of the draws, so that p is never zero
    p = (1 + (of_draws[:, 1:] >= position).sum(1)).double() / (1 + DRAWS)
    independent = independence(noise.gram, noise.size, seed, ordered=rotary) > DEPENDENT
    unknown = torch.isnan(position[:, 0]) | torch.tensor(not independent)
    return {
        "cs_position_null": null.mean(1),
        "cs_position_null_95": null.quantile(0.95, 1),
        "p_position": torch.where(unknown, torch.nan, p),
    }


def directions(
    share: Float[Tensor, " group"], seed: int
) -> tuple[Float[Tensor, "sample group"], Float[Tensor, "row group"]]:
    """``c_g = r_g / sqrt(w_g)``, so that ``P(r) = sum_g c_g P_g``: for the basis (all ones) and
    :data:`DRAWS` random directions, and for these made orthogonal to the basis."""
    generator = seeded(seed)
    of_basis = share.sqrt()
    r = torch.randn(DRAWS, len(of_basis), generator=generator, dtype=torch.float64)
    r = r / r.norm(dim=1, keepdim=True)
    off_basis = r - (r @ of_basis).unsqueeze(1) * of_basis
    off_basis = off_basis / off_basis.norm(dim=1, keepdim=True)
    return torch.cat([of_basis.unsqueeze(0), r]) / of_basis, off_basis / of_basis


def independence(
    gram: Float[Tensor, "group column"], size: Float[Tensor, ""], seed: int, *, ordered: bool
) -> float:
    """The share of random orders of the groups in which neighbours are as similar as in the order
    of the corpus (one unless ``ordered``). It is small where a topic continues from one group to
    the next. Zero where all groups are the same (one prompt many times): they show no noise to
    compare with."""
    # float32 projections of equal groups differ by rounding, about 1e-6 of their norm
    identical = float(gram.trace()) <= 1e-10 * float(size)
    if identical or not ordered:
        return float(not identical)
    generator = seeded(seed)
    orders = [torch.randperm(len(gram), generator=generator) for _ in range(DRAWS)]
    order = torch.stack([torch.arange(len(gram)), *orders])
    alike = gram[order[:, :-1], order[:, 1:]].sum(1)
    tie = 1e-9 * gram.abs().sum()  # orders that differ by less differ by rounding: ties count
    return float((alike >= alike[0] - tie).double().mean())


def adjusted(p: Float[Tensor, " head"]) -> Float[Tensor, " head"]:
    """p-values adjusted for the number of heads (Benjamini and Hochberg 1995): of the heads below
    0.05 at most 5%, on average, have no effect of position. NaN stays NaN and is not counted as a
    head.

    >>> adjusted(torch.tensor([0.01, 0.04, torch.nan, 0.02], dtype=torch.float64)).tolist()
    [0.03, 0.04, nan, 0.03]
    """
    finite = torch.isfinite(p)
    corrected = torch.full_like(p, torch.nan)
    corrected[finite] = torch.as_tensor(stats.false_discovery_control(p[finite].numpy())).to(p)
    return corrected
