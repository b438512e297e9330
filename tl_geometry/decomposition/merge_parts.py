"""How are the bases of several shards of a corpus joined? ``PositionContext.merge`` asks here what
must agree, how groups, labels and provenance are joined, and whether a shard was given twice, which
is refused."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.results import Provenance
from tl_geometry.decomposition.moments import Moments

if TYPE_CHECKING:
    from tl_geometry.decomposition.position_context import PositionContext

MOST_SHARED = 0.5
"""Two parts are taken for the same shard if they have more than this share of the smaller one's
contexts in common: repeated texts share a few windows, a shard given twice shares all."""
ONE_SETTING = ("model", "fingerprint", "has_bos", "dtype", "hooks", "normalized")
"""Fields of the provenance that must be the same in all parts."""


def require_one_setting(first: PositionContext, other: PositionContext) -> None:
    """Raise unless two parts come from one model and one setting."""
    for field in ONE_SETTING:
        ours, theirs = getattr(first.provenance, field), getattr(other.provenance, field)
        instead = "partial results of one model and one setting"
        require(
            ours == theirs,
            f"merge: {field}",
            expected=repr(ours),
            got=repr(theirs),
            instead=instead,
        )
    ours, theirs = first.states, other.states
    require(ours == theirs, "merge: states", expected=ours, got=theirs)


def merged_provenance(
    parts: Sequence[Provenance], contexts: int, flags: Sequence[str]
) -> Provenance:
    """Provenance of a merged basis: that of the first part with the token hashes of all, joined by
    "+", and with every flag."""
    first, hashes = parts[0], "+".join(str(p.token_hash) for p in parts)
    merged = dataclasses.replace(
        first, token_hash=hashes if len(parts) > 1 else first.token_hash, contexts=contexts
    )
    return merged.flagged(*(flag for p in parts for flag in p.flags), *flags)


def together(values: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    """The tensors of all parts one after another; ``None`` if any part has none."""
    tensors = [v for v in values if v is not None]
    return torch.cat(tensors, dim=dim) if len(tensors) == len(values) else None


def merged_labels(
    parts: Sequence[PositionContext],
) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """Labels of all contexts in one numbering, and the names of the numbers. Each part has numbered
    only the names that occur in it, so equal names get one number here; labels without names count
    as named by their numbers."""
    labels = [part.labels for part in parts if part.labels is not None]
    if not labels:
        return None, ()
    instead = "the same labels= for all parts"
    expected, got = "labels in all parts or in none", f"labels in {len(labels)} of {len(parts)}"
    require(len(labels) == len(parts), "merge: labels", expected=expected, got=got, instead=instead)
    names = [
        part.names or tuple(map(str, range(int(part_labels.max()) + 1)))
        for part, part_labels in zip(parts, labels, strict=True)
    ]
    numbers = {
        name: i
        for i, name in enumerate(dict.fromkeys(n for part_names in names for n in part_names))
    }
    named = [bool(part.names) for part in parts]
    if any(named) and not all(named):
        digits = all(name.isdecimal() for name in numbers)
        got = "names in some parts, numbers in others"
        require(digits, "merge: labels", expected="one kind", got=got, instead=instead)
        # names that are numbers are ordered as numbers, not by the part they came from
        numbers = {name: i for i, name in enumerate(sorted(numbers, key=int))}
    merged = [
        torch.tensor([numbers[name] for name in names_of])[labels_of]
        for names_of, labels_of in zip(names, labels, strict=True)
    ]
    names_are_numbers = list(numbers) == list(map(str, range(len(numbers))))
    return torch.cat(merged), () if names_are_numbers and not all(named) else tuple(numbers)


def joined(parts: Sequence[Moments]) -> Moments:
    """The sums of all parts, in as many contiguous groups (of equal width) as the part with the
    most groups has. A part's group goes whole into the one that contains its middle context."""
    groups, contexts, start = max(len(m.counts) for m in parts), sum(m.contexts for m in parts), 0
    regrouped: list[Moments] = []
    for part in parts:
        middle = start + part.counts.cumsum(0) - (part.counts + 1) // 2
        group_of = (middle * groups // contexts).clamp(0, groups - 1)
        regrouped.append(part if len(parts) == 1 else part.regrouped(group_of, groups))
        start += part.contexts
    return functools.reduce(operator.add, regrouped)


def same_contexts(parts: Sequence[Moments], hashes: Sequence[Tensor | None]) -> list[str]:
    """Refuse a shard given twice, recognised by equal sums or by the hashes of its tokens. Where
    parts share only some contexts, return a remark with their number."""
    instead = "each shard once, or decompose over all tokens"
    shared = 0
    for i, part in enumerate(parts):
        for k in range(i):
            same_sums = torch.equal(parts[k].sums, part.sums)
            got = f"parts {k} and {i} with the same sums"
            require(not same_sums, "merge", expected="disjoint contexts", got=got, instead=instead)
            these, others = hashes[i], hashes[k]
            if these is None or others is None:
                continue
            n_shared = int(torch.isin(these, others).sum())
            got = f"{n_shared} contexts that are in parts {k} and {i}"
            disjoint = n_shared <= MOST_SHARED * min(len(these), len(others))
            require(disjoint, "merge", expected="disjoint contexts", got=got, instead=instead)
            shared += n_shared
    return [f"{shared} contexts are in more than one of the merged parts"] if shared else []
