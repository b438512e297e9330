"""How are the bases of several shards of a corpus joined? ``PositionContext.merge`` asks here what
must agree, how groups, labels and provenance are joined, and whether a shard was given twice, which
is refused."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.corpus.sources import corpus_of, label_ids
from tl_geometry.decomposition import largest
from tl_geometry.decomposition.moments import Moments

if TYPE_CHECKING:
    from tl_geometry.decomposition.position_context import PositionContext

MOST_SHARED = 0.5
"""Two parts are taken for the same shard if they have more than this share of the smaller one's
contexts in common: repeated texts share a few windows, a shard given twice shares all."""
ONE_SETTING = ("model", "fingerprint", "has_bos", "dtype", "hooks", "normalized")
"""Fields of the provenance that must be the same in all parts."""


def merged(parts: Sequence[PositionContext]) -> dict[str, Any]:
    """The fields of the basis of all parts."""
    first = parts[0]
    for part in parts:
        theirs, instead = _setting(part), "parts of one model and one setting"
        for name, ours in _setting(first).items():
            fits, got = ours == theirs[name], repr(theirs[name])
            require(fits, f"merge: {name}", expected=repr(ours), got=got, instead=instead)
    starts = [0, *accumulate(part.contexts for part in parts)]
    shared = _shared(parts)
    flags = [flag for part in parts for flag in part.provenance.flags]
    flags += [f"{shared} contexts are in more than one of the merged parts"] if shared else []
    hashes = [part.provenance.token_hash for part in parts]
    known = None if None in hashes else "+".join(map(str, hashes))
    corpora = [*dict.fromkeys(c for part in parts if (c := part.provenance.corpus))]
    about = {"contexts": starts[-1], "token_hash": known, "corpus": corpus_of(corpora) or None}
    labels, names = _labels(parts)
    known_in_all = set.intersection(*(set(part.largest) for part in parts))
    places = [{name: part.largest[name] for name in known_in_all} for part in parts]
    places = [p | {"context": p["context"] + start} for p, start in zip(places, starts)]
    numbers = [None if p.sampled is None else p.sampled + s for p, s in zip(parts, starts)]
    return {
        "provenance": dataclasses.replace(first.provenance, **about).flagged(*flags),
        "states": first.states,
        "moments": _joined([part.moments for part in parts]),
        "context_means": _together([vars(part)["context_means"] for part in parts], dim=1),
        "labels": labels,
        "label_names": names,
        "sampled": _together(numbers),
        "sample_states": _together([vars(part)["sample_states"] for part in parts]),
        "token_hashes": _together([part.token_hashes for part in parts]),
        "largest": largest.top(places),
        "token_texts": {key: text for part in parts for key, text in part.token_texts.items()},
        "lean": any(part.lean for part in parts),
    }


def _setting(part: PositionContext) -> dict[str, Any]:
    """What must be the same in all parts."""
    setting = {name: getattr(part.provenance, name) for name in ONE_SETTING}
    shape, kept = tuple(part.moments.sums.shape[2:]), part.has_second_moments
    setting |= {"states": part.states, "window": part.window, "positions and d_model": shape}
    return setting | {"second moments": kept}


def _together(values: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    """The tensors of all parts one after another; ``None`` if any part has none."""
    tensors = [v for v in values if v is not None]
    return torch.cat(tensors, dim=dim) if len(tensors) == len(values) else None


def _labels(
    parts: Sequence[PositionContext],
) -> tuple[Int[Tensor, " context"] | None, tuple[str, ...]]:
    """Labels of all contexts in one numbering. Documents of different parts are different, unless
    all parts have names: then equal names are one document."""
    labels = [part.labels for part in parts if part.labels is not None]
    if len(labels) < len(parts):
        return None, ()
    if all(part.label_names for part in parts):
        of = zip(parts, labels)
        each = [part.label_names[label] for part, numbers in of for label in numbers.tolist()]
        return label_ids(each, len(each))
    starts = accumulate([int(label.max()) + 1 for label in labels[:-1]], initial=0)
    return torch.cat([label + start for label, start in zip(labels, starts)]), ()


def _joined(parts: Sequence[Moments]) -> Moments:
    """The sums of all parts, in as many contiguous groups (of equal width) as the part with the
    most groups has. A part's group goes whole into the one that contains its middle context."""
    if len(parts) == 1:
        return parts[0]
    groups, contexts, start = max(len(m.counts) for m in parts), sum(m.contexts for m in parts), 0
    regrouped: list[Moments] = []
    for part in parts:
        middle = start + part.counts.cumsum(0) - (part.counts + 1) // 2
        group_of = (middle * groups // contexts).clamp(0, groups - 1)
        regrouped.append(part.regrouped(group_of, groups))
        start += part.contexts
    return functools.reduce(operator.add, regrouped)


def _shared(parts: Sequence[PositionContext]) -> int:
    """How many contexts are in two parts; a shard given twice is refused, recognised by equal sums
    or by the hashes of its tokens."""
    shared, instead = 0, "each shard once, or decompose over all tokens"
    for (k, first), (i, second) in itertools.combinations(enumerate(parts), 2):
        hashes, other = first.token_hashes, second.token_hashes
        common = 0
        if hashes is not None and other is not None:
            common = int(torch.isin(hashes, other).sum())
        same = torch.equal(first.moments.sums, second.moments.sums)
        same = same or common > MOST_SHARED * min(first.contexts, second.contexts)
        expected, got = "disjoint contexts", f"the same ones in parts {k} and {i}"
        require(not same, "merge", expected=expected, got=got, instead=instead)
        shared += common
    return shared
