"""How much of a head's scores does each term explain? Covariance, gain and energy shares, computed
exactly and without a term as a matrix. Called by ``split.shares()`` and every sweep.

A score is a sum of terms, ``S = sum_ab X_ab`` with ``X_ab[i, j] = q_a[i] . k_b[j]`` over the parts
a of the query stream and b of the key stream (plus a bias such as ALiBi). Softmax ignores a
constant added to a row, so terms are compared row-centred over the allowed keys,
``X~ = X - (mean of the row)``. Then

    covariance share  cs_X = sum X~ . S~ / sum S~^2       (sums to one over the terms; may be < 0)
    energy share      es_X = sum X~^2 / sum_Y sum Y~^2    (between 0 and 1; sums to one)

with both sums over all contexts and rows. These two count all cells of a row alike. The gain share
weights each cell by the attention that it gets beyond its even share:

    gain share        gs_X = sum_i G_X(i) / sum_i G_S(i),   G_X(i) = sum_j (p_ij - u_ij) X_ij

where p is the softmax of S over the allowed keys and u is uniform over them. G is additive over
terms and does not change with a constant per row, and ``G_S(i) = KL(p_i || u) + KL(u || p_i)`` is
how far the row is from uniform. With a soft cap p is that of the capped scores while X and S are
those before it; sinks are left out of p.

No term is needed as a matrix. With ``S~`` formed once, ``sum X~_ab . S~`` is
``sum_i q_a[i] . (S~ k_b)[i]`` (rows of S~ sum to zero, so X need not be centred). The gain is the
same with ``p - u`` in place of S~. ``sum X~^2`` is a quadratic form of the queries in the second
moments of the keys, taken in blocks of query rows
(:class:`~tl_geometry.scores.blockwise.KeyMoments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import KeyRanges, after, causal_mask
from tl_geometry.base.sums import Sums
from tl_geometry.scores.blockwise import (
    BLOCK,
    KeyMoments,
    PlaneIndex,
    block_scores,
    contracted,
    form_of,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShareSums(Sums):
    """Sums behind the shares, per context or pooled (:meth:`~tl_geometry.base.sums.Sums.pooled`);
    pooled ones add up over contexts, prompts and processes.

    ``numerators`` are ``sum X~ . S~``, ``energies`` ``sum X~^2``, ``gains`` ``sum (p - u) . X``;
    ``total`` is ``sum S~^2``, ``gain_total`` ``sum (p - u) . S``, all in float64; ``floor`` is the
    total that rounding alone could leave; ``cells`` counts the allowed keys of query rows with at
    least two, for each head, because masks differ between layers (sliding windows).
    ``plane_numerators`` and ``plane_gains`` are numerators and gains of the coordinates of each
    rotary plane, where asked for. The ``pair`` axis is (query part, key part), flattened; the
    ``term`` axis is the same and then the bias, where there is one
    (:func:`tl_geometry.scores.terms.term_pairs`).
    """

    numerators: Float[Tensor, "*context head term"]
    energies: Float[Tensor, "*context head term"]
    gains: Float[Tensor, "*context head term"]
    total: Float[Tensor, "*context head"]
    gain_total: Float[Tensor, "*context head"]
    floor: Float[Tensor, "*context head"]
    cells: Float[Tensor, "*context head"]
    plane_numerators: Float[Tensor, "*context head plane pair"] | None = None
    plane_gains: Float[Tensor, "*context head plane pair"] | None = None

    @staticmethod
    def beside(layers: Sequence[ShareSums]) -> ShareSums:
        """Pooled sums of several layers as one, with their heads in order on the head axis. Rotary
        planes that a layer lacks are zeros."""
        planes = [s.plane_gains.shape[-2] for s in layers if s.plane_gains is not None]

        def filled(name: str, value: Tensor) -> Tensor:
            if not name.startswith("plane_"):
                return value
            return pad(value, (0, 0, 0, max(planes) - value.shape[-2]))

        return ShareSums.cat([layer.mapped(filled) for layer in layers], "head")

    @property
    def cs(self) -> Float[Tensor, "*context head term"]:
        """Covariance shares; NaN where a head is uniform."""
        return self.numerators / self.known(self.total).unsqueeze(-1)

    @property
    def es(self) -> Float[Tensor, "*context head term"]:
        """Energy shares; NaN where a head is uniform."""
        return self.energies / self.known(self.energies.sum(-1)).unsqueeze(-1)

    @property
    def gs(self) -> Float[Tensor, "*context head term"]:
        """Gain shares; NaN where a head is uniform."""
        return self.gains / self.known(self.gain_total).unsqueeze(-1)

    @property
    def uniform(self) -> Bool[Tensor, "*context head"]:
        """Heads whose row-centred scores are zero within rounding: they attend uniformly."""
        return self.total <= self.floor

    def known(self, total: Float[Tensor, "*context head"]) -> Float[Tensor, "*context head"]:
        """``total`` as a divisor: NaN where a head is uniform, so that its shares are NaN."""
        return torch.where(self.uniform, torch.nan, total)


def share_sums(
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    allowed: Bool[Tensor, "..."] | KeyRanges | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    drop: int = 0,
    softcap: float | None = None,
    energy: bool = True,
    gain: bool = True,
    planes: PlaneIndex | None = None,
    working_set: int = 2**24,
    form: str | None = None,
) -> ShareSums:
    """Numerators, gains and energies of all terms per context, without a term as a matrix.

    ``q`` and ``k`` are the projected parts after any rotation, grouped keys expanded to the heads,
    ``q`` times the attention scale. ``allowed`` is ``[query key]`` or ``[batch query key]`` (causal
    for ``None``), or the range of keys of each query, which holds no cells;
    ``bias [head query key]`` (or with a batch axis in front) is added to the scores and becomes the
    last term. The first ``drop`` queries and keys are left out. ``softcap`` c makes the pattern
    behind the gains that of ``c tanh(S / c)``. ``energy=False`` leaves the energies NaN,
    ``gain=False`` the gains. ``planes`` says which rotary plane each coordinate lies in, for sums
    by plane as well. ``working_set`` bounds the bytes held at a time. ``form`` is that of the mask,
    where it is known (:func:`~tl_geometry.base.rows.mask_form`). Half precision is computed in
    float32; sums are float64.

    The cost, in products of all queries with all keys of a head: about parts + 1 for the
    numerators, parts more for the gains, and parts (2 d_head + parts BLOCK) / keys for the
    energies.

    >>> q = torch.randn(3, 2, 9, 4, 8); k = torch.randn(3, 2, 9, 4, 8)
    >>> sums = share_sums(q, k).pooled()
    >>> sums.cs.shape, bool(torch.allclose(sums.cs.sum(-1), torch.ones(4).double(), atol=1e-4))
    (torch.Size([4, 9]), True)
    """
    expected, got = "two tensors [part batch position head d_head] of one shape", describe(q)
    fits = q.dim() == 5 and q.shape == k.shape
    require(fits, "q, k", expected=expected, got=f"{got} and {describe(k)}")
    length = q.shape[2]
    expected = f"0 to {length - 1} of {length} positions"
    require(0 <= drop < length, "drop", expected=expected, got=drop)
    mask = after(allowed if isinstance(allowed, KeyRanges) else _mask(allowed, q), drop)
    masks = len(mask) if isinstance(mask, Tensor) else 1
    q, k = (x[:, :, drop:] if x.element_size() > 2 else x[:, :, drop:].float() for x in (q, k))
    if bias is not None:
        bias = bias[..., drop:, drop:].to(q)
        bias = bias if bias.dim() == 4 else bias.unsqueeze(0)
        bias = bias.expand(max(len(bias), masks), -1, -1, -1)
    form = form or ("causal" if allowed is None else form_of(mask))
    planes = planes and planes._replace(plane=planes.plane.to(q.device))
    parts, batch, queries, heads, width = q.shape
    # numbers of one head and context: a block of scores (the softmax behind the gains takes two
    # more), queries and keys by part, and a block of all pairs of parts for the energies
    score_rows = (1 + 2 * gain) * min(BLOCK, queries)
    cells = queries * (score_rows + 2 * parts * width) + parts**2 * BLOCK * BLOCK * 2
    step = max(1, working_set // (q.element_size() * heads * cells))
    sums: list[ShareSums] = []
    for start in range(0, batch, step):
        contexts = slice(start, start + step)
        batch_mask = mask[contexts] if masks > 1 else mask
        batch_bias = bias if bias is None or len(bias) == 1 else bias[contexts]
        options: dict[str, Any] = {"softcap": softcap, "energy": energy, "gain": gain}
        options["form"] = form
        sums.append(
            _sums(q[:, contexts], k[:, contexts], batch_mask, batch_bias, planes, **options)
        )
    return ShareSums.cat(sums)


def _mask(allowed: Tensor | None, q: Tensor) -> Bool[Tensor, "batch query key"]:
    batch, length = q.shape[1:3]
    allowed = causal_mask(length, device=q.device) if allowed is None else allowed
    mask = allowed if allowed.dim() == 3 else allowed.unsqueeze(0)
    fits = mask.dim() == 3 and mask.shape[1:] == (length, length) and len(mask) in (1, batch)
    expected = f"bool [query key] or [batch query key] of {length} positions"
    fits = fits and mask.dtype == torch.bool
    require(fits, "allowed", expected=expected, got=describe(allowed))
    return mask.to(q.device)


def _sums(
    q: Tensor,
    k: Tensor,
    mask: Tensor | KeyRanges,
    bias: Tensor | None,
    planes: PlaneIndex | None,
    *,
    softcap: float | None,
    energy: bool,
    gain: bool,
    form: str,
) -> ShareSums:
    """Sums of a few contexts.

    The mean over positions is first subtracted from the keys. That changes each row of a term by a
    constant, which row-centring removes, and leaves smaller numbers to round.
    """
    parts, batch, _, heads, _ = q.shape
    queries = rearrange(q, "a b i h e -> b h i a e").contiguous()
    keys = rearrange(k, "c b j h e -> b h j c e").contiguous()
    norms = [torch.linalg.vector_norm(x.flatten(2), dim=-1).double() for x in (queries, keys)]
    shift = keys.mean(2, keepdim=True)
    keys = keys - shift  # not in place: it may be the caller's memory
    query, key = reduce(torch.add, queries.unbind(3)), reduce(torch.add, keys.unbind(3))
    tables, moments = keys.flatten(3), KeyMoments(keys)
    shape = (batch, heads, planes.planes if planes else 1, parts**2)
    zeros = partial(torch.zeros, dtype=torch.float64, device=q.device)
    pairs = {"numerators": zeros(shape), "gains": zeros(shape)}
    of_bias = {name: zeros(batch, heads, int(bias is not None)) for name in (*pairs, "energies")}
    energies, total, gain_total = zeros(batch, heads, parts**2), *zeros(2, batch, heads)
    options: dict[str, Any] = {"key_shift": shift.sum(3), "bias": bias, "softcap": softcap}
    options["form"] = form
    for block, centred, block_bias, moved in block_scores(query, key, mask, gain=gain, **options):
        rows = queries[:, :, block.start : block.stop]
        total += torch.linalg.vector_norm(centred, dim=(-2, -1)).double().square()
        for name, weight in (("numerators", centred), ("gains", moved)):
            if weight is None:
                continue
            pairs[name] += contracted(weight, rows, tables[:, :, : block.end], planes)
            if block_bias is not None:
                product = (weight * block_bias).sum((-2, -1), dtype=torch.float64)
                of_bias[name] += product.unsqueeze(-1)
        if moved is not None:
            gain_total += moved.mul_(centred).sum(-1).sum(-1, dtype=torch.float64)
        if energy:
            energies += moments.energies(rows, block).flatten(2)
        if block_bias is not None:
            squares = block_bias.square().sum((-2, -1), dtype=torch.float64)
            of_bias["energies"] += squares.unsqueeze(-1)
    # rounding of a score is at most 32 u |q| |k|, as in models.reconstruction; the squares of all
    # cells sum to at most (32 u)^2 sum |q|^2 sum |k|^2
    unit = 32 * unit_roundoff(q.dtype)
    floor = (unit * norms[0] * norms[1]).square() + unit**2 * of_bias["energies"].sum(-1)
    allowed_keys = mask.counts if isinstance(mask, KeyRanges) else mask.sum(-1)
    # a row with one key has no choice: its centred scores are zero
    several = torch.where(allowed_keys > 1, allowed_keys, 0)
    by_plane = {} if planes is None else {f"plane_{name}": x for name, x in pairs.items()}
    if not gain:
        by_plane.pop("plane_gains", None)
    terms = {name: x.sum(2) for name, x in pairs.items()} | {"energies": energies}
    terms = {name: torch.cat([x, of_bias[name]], -1) for name, x in terms.items()}
    for name, measured in (("gains", gain), ("energies", energy)):
        if not measured:
            terms[name].fill_(torch.nan)
    return ShareSums(
        **terms,
        **by_plane,
        total=total,
        gain_total=gain_total,
        floor=floor,
        cells=zeros(batch, heads) + several.sum(-1).reshape(-1, 1).to(q.device),
    )
