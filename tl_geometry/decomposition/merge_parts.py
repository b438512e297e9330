"""Shards of one corpus put together: what must agree, their sums in contiguous groups again, and
the same shard given twice refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition.moments import Moments
from tl_geometry.decomposition.reservoir import Reservoir

if TYPE_CHECKING:
    from tl_geometry.decomposition.position_context import PositionContext

MOST_SHARED = 0.5
"""Share of a part's contexts that another part may hold too before both are taken for the same
shard."""
ONE_SETTING = ("model", "fingerprint", "has_bos", "dtype", "hooks", "normalized")
"""Fields of the provenance that are the same in all parts."""


def require_one_setting(first: PositionContext, other: PositionContext) -> None:
    """Raise unless two parts come from one model and one setting."""
    for field in ONE_SETTING:
        a, b = getattr(first.provenance, field), getattr(other.provenance, field)
        instead = "partial results of one model and one setting"
        require(a == b, f"merge: {field}", expected=repr(a), got=repr(b), instead=instead)
    a, b = first.states, other.states
    require(a == b, "merge: states", expected=a, got=b)
    same, got = first.contiguous == other.contiguous, "contiguous and interleaved"
    expected, instead = "files of one version", "decompose again"
    require(same, "merge: groups", expected=expected, got=got, instead=instead)


def merged_provenance(
    parts: Sequence[Provenance], contexts: int, flags: Sequence[str]
) -> Provenance:
    """Where the whole comes from: the tokens of all parts, and every flag."""
    first, hashes = parts[0], "+".join(str(p.token_hash) for p in parts)
    whole = dataclasses.replace(
        first, token_hash=hashes if len(parts) > 1 else first.token_hash, contexts=contexts
    )
    return whole.flagged(*(flag for p in parts for flag in p.flags), *flags)


def together(values: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    """The tensors of all parts one after another, ``None`` where a part has none."""
    known = [v for v in values if v is not None]
    return torch.cat(known, dim=dim) if len(known) == len(values) else None


class Labelled(NamedTuple):
    """The sums of a part, and the labels of its contexts, under the labels of the whole."""

    moments: Moments
    labels: Int[Tensor, " context"] | None


def one_labelling(
    parts: Sequence[PositionContext],
) -> tuple[list[Labelled], tuple[str, ...]]:
    """Parts whose labels are numbered alike, and the names of the numbers: each part numbers the
    values that occur in it. Labels without names are named by their numbers."""
    counts = [0 if p.label_counts is None else len(p.label_counts) for p in parts]
    known = all(counts) or not any(counts)
    expected, instead = "labels in all parts or in none", "the same labels= for all parts"
    require(known, "merge: labels", expected=expected, got=f"{counts} labels", instead=instead)
    own = [p.names or tuple(map(str, range(n))) for p, n in zip(parts, counts, strict=True)]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(n for names in own for n in names))}
    mixed = any(p.names for p in parts) and not all(p.names for p in parts)
    if mixed:
        digits = all(name.isdecimal() for name in numbers)
        got = "names in some parts, numbers in others"
        require(digits, "merge: labels", expected="one kind", got=got, instead=instead)
        numbers = {name: i for i, name in enumerate(sorted(numbers, key=int))}
    labelled = [
        _relabelled(p, torch.tensor([numbers[n] for n in names], dtype=torch.int64), len(numbers))
        for p, names in zip(parts, own, strict=True)
    ]
    plain = list(numbers) == list(map(str, range(len(numbers))))
    return labelled, () if plain and not all(p.names for p in parts) else tuple(numbers)


def _relabelled(part: PositionContext, to: Int[Tensor, " label"], labels: int) -> Labelled:
    """A part whose label k becomes ``to[k]`` of so many ``labels``."""
    m = part.moments
    if m.label_sums is None or m.label_counts is None:
        return Labelled(m, None)
    sums = m.label_sums.new_zeros(labels, *m.label_sums.shape[1:]).index_add_(0, to, m.label_sums)
    counts = m.label_counts.new_zeros(labels).index_add_(0, to, m.label_counts)
    moments = dataclasses.replace(m, label_sums=sums, label_counts=counts)
    return Labelled(moments, None if part.labels is None else to[part.labels])


def merged_samples(parts: Sequence[Reservoir | None], starts: Sequence[int]) -> Reservoir | None:
    """The sample of the whole; ``starts`` are the numbers that the first contexts of the parts have
    in it."""
    whole = parts[0]
    for part, start in zip(parts[1:], starts[1:], strict=True):
        if whole is not None and part is not None:
            whole = Reservoir.merge(whole, part, start)
    return whole


def joined(parts: Sequence[Moments], *, contiguous: bool = True) -> Moments:
    """The sums of all parts, in as many groups as the part with most has; each group joins the one
    that holds its middle.

    Groups that are not ``contiguous`` (files of earlier versions) are joined by their number.
    """
    groups, total, start = max(len(m.counts) for m in parts), sum(m.contexts for m in parts), 0
    whole = parts[0]
    for i, part in enumerate(parts):
        group_of = torch.arange(len(part.counts))
        if contiguous:
            middle = start + part.counts.cumsum(0) - (part.counts + 1) // 2
            group_of = (middle * groups // total).clamp(0, groups - 1)
        mine = part if len(parts) == 1 else part.regrouped(group_of, groups)
        whole = mine if i == 0 else Moments.merge(whole, mine)
        start += part.contexts
    return whole


def same_contexts(parts: Sequence[Moments], hashes: Sequence[Tensor | None]) -> list[str]:
    """Refuse a shard given twice, by its sums or the hashes of its tokens; a remark on single
    contexts that are in two."""
    instead = "each shard once, or decompose over all tokens"
    shared = 0
    for i, part in enumerate(parts):
        for k in range(i):
            same = torch.equal(parts[k].sums, part.sums)
            got = f"parts {k} and {i} with the same sums"
            require(not same, "merge", expected="disjoint contexts", got=got, instead=instead)
            mine, theirs = hashes[i], hashes[k]
            if mine is None or theirs is None:
                continue
            both = int(torch.isin(mine, theirs).sum())
            got = f"{both} contexts that are in parts {k} and {i}"
            few = both <= MOST_SHARED * min(len(mine), len(theirs))
            require(few, "merge", expected="disjoint contexts", got=got, instead=instead)
            shared += both
    return [f"{shared} contexts are in more than one of the merged parts"] if shared else []
