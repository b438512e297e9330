"""Which term of an attention score makes the pattern: covariance and energy shares of the terms,
exactly, per head.

A score is a sum of terms, ``S = sum_ab X_ab`` with ``X_ab[i, j] = q_a[i] . k_b[j]`` over the parts
a of the query stream and b of the key stream (plus a bias such as ALiBi). Softmax ignores a
constant added to a row, so terms are compared row-centred over the allowed keys,
``X~ = X - (mean of the row)``. Then

    covariance share  cs_X = sum X~ . S~ / sum S~^2       (sums to one over the terms; may be < 0)
    energy share      es_X = sum X~^2 / sum_Y sum Y~^2    (between 0 and 1; sums to one)

with both sums over all contexts and rows. A cell counts by the attention that is paid to it in

    gain share        gs_X = sum_i G_X(i) / sum_i G_S(i),   G_X(i) = sum_j (p_ij - u_ij) X_ij

where p is the softmax of S over the allowed keys and u spreads the row evenly: it is additive,
blind to a constant of each row, and ``G_S(i) = KL(p_i || u) + KL(u || p_i)``, how far the row is
from uniform. With a soft cap p is that of the capped scores while X and S are those before it;
sinks are left out of p.

No term is needed as a matrix: with ``S~`` formed once, ``sum X~_ab . S~`` is
``sum_i q_a[i] . (S~ k_b)[i]`` (rows of S~ sum to zero, so X need not be centred), the gain is the
same with ``p - u`` in place of S~, and ``sum X~^2`` is a quadratic form of the queries in the
moments of the keys seen so far, taken in blocks of query rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import causal_mask, row_center
from tl_geometry.scores.blockwise import (
    BLOCK,
    KeyMoments,
    PlaneIndex,
    blocks_of,
    centred_scores,
    contracted,
    contracted_by_plane,
    moved_attention,
    with_added,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ShareSums:
    """Sums behind the shares, per context or pooled; they add up over contexts, prompts and
    processes (``+``, :meth:`pooled`).

    ``numerators`` are ``sum X~ . S~``, ``energies`` ``sum X~^2``, ``gains`` ``sum (p - u) . X``;
    ``total`` is ``sum S~^2``, ``gain_total`` ``sum (p - u) . S``, all in float64; ``floor`` is the
    total that rounding alone could leave; ``rows`` counts query rows with at least two allowed
    keys, ``cells`` the keys of those rows. ``plane_numerators`` and ``plane_gains`` are those of
    the terms of queries and keys in each rotary plane, where asked for.
    """

    numerators: Float[Tensor, "*context head term"]
    energies: Float[Tensor, "*context head term"]
    gains: Float[Tensor, "*context head term"]
    total: Float[Tensor, "*context head"]
    gain_total: Float[Tensor, "*context head"]
    floor: Float[Tensor, "*context head"]
    rows: Float[Tensor, "*context"]
    cells: Float[Tensor, "*context"]
    plane_numerators: Float[Tensor, "*context head plane pair"] | None = None
    plane_gains: Float[Tensor, "*context head plane pair"] | None = None

    def _tensors(self) -> dict[str, Tensor]:
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def pooled(self) -> ShareSums:
        """Summed over contexts."""
        return (
            self
            if self.rows.dim() == 0
            else ShareSums(**{k: v.sum(0) for k, v in self._tensors().items()})
        )

    def __add__(self, other: ShareSums) -> ShareSums:
        mine, theirs = self.pooled()._tensors(), other.pooled()._tensors()
        return ShareSums(**{k: v + theirs[k] for k, v in mine.items()})

    @staticmethod
    def cat(sums: Sequence[ShareSums]) -> ShareSums:
        """Per-context sums of several calls, one after another."""
        all_ = [s._tensors() for s in sums]
        return ShareSums(**{k: torch.cat([t[k] for t in all_]) for k in all_[0]})

    @staticmethod
    def stack(sums: Sequence[ShareSums]) -> ShareSums:
        """Pooled sums as those of contexts."""
        all_ = [s._tensors() for s in sums]
        return ShareSums(**{k: torch.stack([t[k] for t in all_]) for k in all_[0]})

    @staticmethod
    def beside(sums: Sequence[ShareSums]) -> ShareSums:
        """Pooled sums of several layers side by side, their heads in order."""
        all_ = [s.pooled()._tensors() for s in sums]
        most = max(0 if (p := s.plane_numerators) is None else p.shape[-2] for s in sums)
        for t in all_:  # layers with fewer planes
            for k in ("plane_numerators", "plane_gains"):
                if k in t:
                    t[k] = pad(t[k], (0, 0, 0, most - t[k].shape[-2]))
        heads = {k: torch.cat([t[k] for t in all_]) for k, v in all_[0].items() if v.dim() > 0}
        return ShareSums(**{**all_[0], **heads})

    def plus(self, other: ShareSums) -> ShareSums:
        """Context by context, without pooling."""
        theirs = other._tensors()
        return ShareSums(**{k: v + theirs[k] for k, v in self._tensors().items()})

    def context(self, index: int | slice) -> ShareSums:
        """The sums of one context, or of some, of per-context sums."""
        return ShareSums(**{k: v[index] for k, v in self._tensors().items()})

    def select(self, heads: Int[Tensor, " head"]) -> ShareSums:
        """Pooled sums of some heads, in the given order."""
        return ShareSums(
            **{k: v[heads] if v.dim() > 0 else v for k, v in self.pooled()._tensors().items()}
        )

    def to(self, device: torch.device | str) -> ShareSums:
        """The same sums on another device."""
        return ShareSums(**{k: v.to(device) for k, v in self._tensors().items()})

    @property
    def cs(self) -> Float[Tensor, "*context head term"]:
        """Covariance shares; NaN where a head is uniform."""
        return self.numerators / torch.where(self.uniform, torch.nan, self.total).unsqueeze(-1)

    @property
    def es(self) -> Float[Tensor, "*context head term"]:
        """Energy shares; NaN where a head is uniform."""
        return self.energies / torch.where(
            self.uniform, torch.nan, self.energies.sum(-1)
        ).unsqueeze(-1)

    @property
    def gs(self) -> Float[Tensor, "*context head term"]:
        """Gain shares; NaN where a head is uniform."""
        return self.gains / torch.where(self.uniform, torch.nan, self.gain_total).unsqueeze(-1)

    @property
    def uniform(self) -> Bool[Tensor, "*context head"]:
        """Heads whose row-centred scores are zero within rounding: they attend uniformly."""
        return self.total <= self.floor


def share_sums(
    q: Float[Tensor, "part batch query head d_head"],
    k: Float[Tensor, "part batch key head d_head"],
    allowed: Bool[Tensor, "..."] | None = None,
    *,
    bias: Float[Tensor, "..."] | None = None,
    drop: int = 0,
    softcap: float | None = None,
    energy: bool = True,
    gain: bool = True,
    planes: PlaneIndex | None = None,
    working_set: int = 2**24,
) -> ShareSums:
    """Numerators, gains and energies of all terms per context, without a term as a matrix.

    ``q``, ``k`` as in :func:`terms`; ``allowed [query key]`` or ``[batch query key]`` (causal for
    ``None``); ``bias [... head query key]`` is added to the scores and becomes the last term. The
    first ``drop`` queries and keys are left out. ``softcap`` c makes the pattern behind the gains
    that of ``c tanh(S / c)``. ``energy=False`` leaves the energies NaN, ``gain=False`` the gains.
    ``planes`` says which rotary plane each coordinate lies in, for sums by plane as well.
    ``working_set`` bounds the bytes held at a time. Half precision is computed in float32; sums are
    float64.

    Cost per head and token over one product of all queries with all keys: about parts + 1 such
    products for the numerators, parts more for the gains, parts (parts + BLOCK / d_head) d_head /
    keys for the energies.

    >>> q = torch.randn(3, 2, 9, 4, 8); k = torch.randn(3, 2, 9, 4, 8)
    >>> sums = share_sums(q, k).pooled()
    >>> sums.cs.shape, bool(torch.allclose(sums.cs.sum(-1), torch.ones(4).double(), atol=1e-4))
    (torch.Size([4, 9]), True)
    """
    ok = q.dim() == 5 and q.shape == k.shape
    require(
        ok,
        "q, k",
        expected="two tensors [part batch position head d_head] of one shape",
        got=f"{describe(q)} and {describe(k)}",
    )
    length = q.shape[2]
    require(
        0 <= drop < length, "drop", expected=f"0 to {length - 1} of {length} positions", got=drop
    )
    mask = _mask(allowed, q)[..., drop:, drop:]
    q, k = (x[:, :, drop:] if x.element_size() > 2 else x[:, :, drop:].float() for x in (q, k))
    if bias is not None:
        bias = bias[..., drop:, drop:].to(q)
        bias = bias if bias.dim() == 4 else bias.unsqueeze(0)
        bias = bias.expand(max(len(bias), len(mask)), -1, -1, -1)
    parts, batch, queries, heads, width = q.shape
    rows = (1 + 2 * gain) * min(BLOCK, queries)  # of scores, and of the softmax behind the gains
    per_context = (
        q.element_size()
        * heads
        * (queries * (rows + 2 * parts * width) + parts**2 * BLOCK * BLOCK * 2)
    )
    step = max(1, working_set // per_context)
    found: list[ShareSums] = []
    for at in range(0, batch, step):
        part = slice(at, at + step)
        some = mask if len(mask) == 1 else mask[part]
        added = bias if bias is None or len(bias) == 1 else bias[part]
        found.append(
            _sums(q[:, part], k[:, part], some, added, _Wanted(softcap, energy, gain, planes))
        )
    return ShareSums.cat(found)


def _mask(allowed: Tensor | None, q: Tensor) -> Bool[Tensor, "batch query key"]:
    batch, length = q.shape[1:3]
    allowed = causal_mask(length, device=q.device) if allowed is None else allowed
    mask = allowed if allowed.dim() == 3 else allowed.unsqueeze(0)
    ok = (
        mask.dim() == 3
        and mask.shape[1:] == (length, length)
        and len(mask) in (1, batch)
        and mask.dtype == torch.bool
    )
    require(
        ok,
        "allowed",
        expected=f"bool [query key] or [batch query key] of {length} positions",
        got=describe(allowed),
    )
    return mask.to(q.device)


class _Wanted(NamedTuple):
    """What :func:`share_sums` was asked for."""

    softcap: float | None
    energy: bool
    gain: bool
    planes: PlaneIndex | None


def _sums(q: Tensor, k: Tensor, mask: Tensor, bias: Tensor | None, wanted: _Wanted) -> ShareSums:
    """Sums of a few contexts. Keys are first shifted by their mean over positions: row-centring
    does not see it, rounding does."""
    parts, batch, _, heads, _ = q.shape
    queries = rearrange(q, "a b i h e -> b h i a e").contiguous()
    keys = rearrange(k, "c b j h e -> b h j c e").contiguous()
    sizes = [torch.linalg.vector_norm(x.flatten(2), dim=-1).double() for x in (queries, keys)]
    shift = keys.mean(2, keepdim=True)
    keys = keys - shift  # not in place: it may be the caller's memory
    query, key = reduce(torch.add, queries.unbind(3)), reduce(torch.add, keys.unbind(3))
    tables, near = keys.flatten(3), mask.unsqueeze(1)
    extra = None if bias is None else row_center(bias, near)
    level = None if wanted.softcap is None else (query * shift.sum(3)).sum(-1, keepdim=True)
    if bias is not None and extra is not None and level is not None:
        level = level + torch.where(near, bias - extra, -torch.inf).amax(-1, keepdim=True)
    made = {"dtype": torch.float64, "device": q.device}
    n = parts**2 + (bias is not None)
    numerators, gains, energies = (torch.zeros(batch, heads, n, **made) for _ in range(3))
    by_plane = _ByPlane.of(wanted, (batch, heads, parts**2), made)
    total, gain_total = (torch.zeros(batch, heads, **made) for _ in range(2))
    seen = KeyMoments(keys)
    for block in blocks_of(mask, q.dtype):
        at = slice(block.start, block.stop)
        count = (block.full + block.mask.sum(-1, keepdim=True)).clamp(min=1)
        rows, known = queries[:, :, at], tables[:, :, : block.end]
        centred, mean = centred_scores(query[:, :, at], key, block, count)
        added = None if extra is None else extra[:, :, at, : block.end]
        centred = centred if added is None else centred + added
        total += torch.linalg.vector_norm(centred, dim=(-2, -1)).double().square()
        numerators += by_plane.contracted("numerators", centred, rows, known, added)
        if wanted.gain:
            entered = None if level is None else mean + level[:, :, at]
            moved = moved_attention(centred, block, count, wanted.softcap, entered)
            gains += by_plane.contracted("gains", moved, rows, known, added)
            gain_total += moved.mul_(centred).sum(-1).sum(-1, dtype=torch.float64)
        if wanted.energy:
            seen.extend(block.full)
            energies[..., : parts**2] += seen.energies(rows, block, count).flatten(2)
            if added is not None:
                energies[..., -1] += added.square().sum((-2, -1), dtype=torch.float64)
    allowed_keys = mask.sum(-1)
    several = torch.where(allowed_keys > 1, allowed_keys, 0)
    ones = torch.ones(batch, **made)
    unit = 32 * unit_roundoff(q.dtype)
    floor = (unit * sizes[0] * sizes[1]).square()
    if extra is not None:
        floor = floor + unit**2 * extra.double().square().sum((-2, -1))
    return ShareSums(
        numerators=numerators,
        energies=energies if wanted.energy else energies.fill_(torch.nan),
        gains=gains if wanted.gain else gains.fill_(torch.nan),
        total=total,
        gain_total=gain_total,
        floor=floor,
        rows=ones * (several > 0).sum(-1),
        cells=ones * several.sum(-1),
        plane_numerators=by_plane.sums.get("numerators"),
        plane_gains=by_plane.sums.get("gains"),
    )


class _ByPlane(NamedTuple):
    """Contractions that add up by plane on the way, where planes are wanted."""

    wanted: PlaneIndex | None
    sums: dict[str, Tensor]

    @staticmethod
    def of(wanted: _Wanted, sizes: tuple[int, int, int], made: Any) -> _ByPlane:
        index = wanted.planes
        if index is None:
            return _ByPlane(None, {})
        shape = (*sizes[:2], index.planes, sizes[2])
        names = ("numerators", "gains")[: 1 + wanted.gain]
        return _ByPlane(index, {name: torch.zeros(shape, **made) for name in names})

    def contracted(
        self, name: str, weight: Tensor, rows: Tensor, tables: Tensor, added: Tensor | None
    ) -> Float[Tensor, "batch head term"]:
        """:func:`tl_geometry.scores.blockwise.contracted`."""
        if self.wanted is None:
            return contracted(weight, rows, tables, added)
        found = contracted_by_plane(weight, rows, tables, self.wanted)
        self.sums[name] += found
        return with_added(found.sum(2), weight, added)


def share_sums_dense(
    terms: Float[Tensor, "term batch head query key"],
    allowed: Bool[Tensor, "..."],
    *,
    drop: int = 0,
    softcap: float | None = None,
) -> ShareSums:
    """The sums of :func:`share_sums` from terms held as matrices, ``allowed`` broadcasting to
    ``[batch head query key]``; float64."""
    allowed = allowed.expand(terms.shape[1:])[..., drop:, drop:]
    centred = row_center(terms[..., drop:, drop:].double(), allowed)
    scores = centred.sum(0)
    many = allowed[:, 0].sum(-1)
    several = torch.where(many > 1, many, 0)
    energies = centred.square().sum((-2, -1))
    whole = torch.where(allowed, terms[..., drop:, drop:].double(), 0).sum(0)
    entered = whole if softcap is None else softcap * torch.tanh(whole / softcap)
    even = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
    moved = (
        torch.where(allowed, entered, torch.finfo(entered.dtype).min).softmax(-1) * allowed - even
    )
    unit = 32 * unit_roundoff(terms.dtype)
    size = torch.where(allowed, terms[..., drop:, drop:].double(), 0).square().sum((0, -2, -1))
    return ShareSums(
        numerators=rearrange(
            (centred * scores).sum((-2, -1)), "term batch head -> batch head term"
        ),
        energies=rearrange(energies, "term batch head -> batch head term"),
        gains=rearrange((moved * centred).sum((-2, -1)), "term batch head -> batch head term"),
        total=scores.square().sum((-2, -1)),
        gain_total=(moved * scores).sum((-2, -1)),
        floor=size * unit**2,
        rows=(several > 0).sum(-1).double(),
        cells=several.sum(-1).double(),
    )


def dropped_mass(
    pattern: Float[Tensor, "batch head query key"], drop: int
) -> Float[Tensor, "batch head"]:
    """Attention that the kept queries pay to the first ``drop`` keys, which the shares leave out:
    mean over queries.

    >>> dropped_mass(torch.tensor([[[[1.0, 0.0], [0.8, 0.2]]]]), 1)
    tensor([[0.8000]])
    """
    return pattern[..., drop:, :drop].sum(-1, dtype=torch.float32).mean(-1)
