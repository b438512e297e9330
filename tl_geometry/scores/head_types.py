"""Which heads attend to the previous token, to an equal token, or to the token that followed it
(induction heads)? Scores on repeated random tokens, with their baselines;
:func:`tl_geometry.sweep_heads` prints them beside the shares.

A random sequence that is repeated has no structure but position and repetition. The attention that
a head pays to a fixed set of keys then names its type (the synthetic input of Song & Zhong 2023,
Fig. 4). With the pattern A, query i, key j:

    previous-token   A[i, i-1]                                    i >= 1
    neighbourhood    sum over 1 <= i-j <= 3 of A[i, j]            i >= 1
    same-token       sum over j <= i with tok_j = tok_i           all queries
    duplicate-token  sum over j < i with tok_j = tok_i            queries whose token came before
    induction        sum over 1 <= j <= i with tok_{j-1} = tok_i  queries whose token came before

each averaged over its queries, beside what uniform attention over the allowed keys would score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import require
from tl_geometry.base.intervals import FEWEST
from tl_geometry.base.rows import causal_mask
from tl_geometry.corpus.texts import HIGH_TOKEN, repeated_random_tokens
from tl_geometry.models.model_view import ModelView

HEAD_TYPES = ("previous", "duplicate", "same", "neighbourhood", "induction")
"""Names of the scores."""
NEIGHBOURS = 3
"""How many tokens before its own a neighbourhood head may attend to, as in Song & Zhong 2023."""
SEQUENCES = 12
"""Sequences of repeated random tokens that a model's heads are scored on, each from a range of ids
of its own where the vocabulary is large. More than the 10 rows that standard errors need."""


def detection_patterns(
    tokens: Int[Tensor, "batch position"],
) -> dict[str, Bool[Tensor, "batch query key"]]:
    """For each type of head the keys that it attends to, as a mask ``[batch query key]``.

    >>> {k: int(v.sum()) for k, v in detection_patterns(torch.tensor([[5, 6, 5, 6]])).items()}
    {'previous': 3, 'duplicate': 2, 'same': 6, 'neighbourhood': 6, 'induction': 2}
    """
    batch, length = tokens.shape
    positions = torch.arange(length, device=tokens.device)
    offset = positions.unsqueeze(1) - positions
    equal = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    follows = torch.zeros_like(equal)
    # key j follows an equal token if key j - 1 is one; nothing comes before key 0
    follows[:, :, 1:] = equal[:, :, :-1]
    neighbours = (offset >= 1) & (offset <= NEIGHBOURS)
    return {
        "previous": (offset == 1).expand(batch, -1, -1),
        "duplicate": equal & (offset > 0),
        "same": equal & (offset >= 0),
        "neighbourhood": neighbours.expand(batch, -1, -1),
        "induction": follows & (offset >= 0),
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadTypes:
    """Scores of each type per head, between 0 and 1, and the ``baselines`` that uniform attention
    would score. Without a query that a score averages over it is NaN.

    ``errors`` are standard errors of the scores over the rows of tokens, weighted by the queries of
    each row; NaN below 10 rows. With rows from different ranges of ids (:func:`token_ranges`) they
    also cover the choice of tokens.
    """

    scores: dict[str, Float[Tensor, "*layer head"]]
    errors: dict[str, Float[Tensor, "*layer head"]]
    baselines: dict[str, float]


def head_type_scores(
    pattern: Float[Tensor, "*layer batch head query key"],
    tokens: Int[Tensor, "batch position"],
    *,
    allowed: Bool[Tensor, "query key"] | None = None,
) -> HeadTypes:
    """Induction, previous-token and duplicate-token scores of attention patterns (formulas at the
    top of the module); ``allowed`` (causal for ``None``) gives the baselines.

    >>> tokens = repeated_random_tokens(4, 2)
    >>> uniform = torch.ones(8, 8).tril() / torch.arange(1, 9).unsqueeze(1)
    >>> types = head_type_scores(uniform[None, None], tokens)
    >>> bool(abs(types.scores["induction"] - types.baselines["induction"]) < 1e-6)
    True
    """
    batch, length = tokens.shape
    fits = isinstance(pattern, Tensor) and pattern.dim() >= 4
    fits = fits and (pattern.shape[-4], *pattern.shape[-2:]) == (batch, length, length)
    expected = f"[... batch head query key] for tokens {tuple(tokens.shape)}"
    require(fits, "pattern", expected=expected, got=describe(pattern))
    device = pattern.device
    allowed = causal_mask(length) if allowed is None else allowed.cpu()
    uniform = allowed.double() / allowed.sum(-1, keepdim=True).clamp(min=1)
    keys_of = detection_patterns(tokens.cpu())
    repeated = keys_of["duplicate"].any(-1)
    after_first = torch.arange(length).expand(batch, -1) >= 1
    queries_of = {"same": torch.ones_like(repeated)}
    queries_of |= dict.fromkeys(("duplicate", "induction"), repeated)
    queries_of |= dict.fromkeys(("previous", "neighbourhood"), after_first)
    scores, errors, baselines = {}, {}, {}
    for name in HEAD_TYPES:
        keys = keys_of[name] & queries_of[name].unsqueeze(-1)
        counts = queries_of[name].sum(-1).double()
        # NaN in place of a count of zero, so that a type without a query has no score
        count = float(counts.sum()) or torch.nan
        row_sums = (pattern * keys.unsqueeze(1).to(device)).sum((-2, -1), dtype=torch.float64)
        scores[name] = row_sums.sum(-2) / count
        errors[name] = _ratio_error(row_sums, counts.to(device))
        baselines[name] = float((uniform * keys).sum()) / count
    return HeadTypes(scores=scores, errors=errors, baselines=baselines)


def _ratio_error(
    sums: Float[Tensor, "*layer batch head"], counts: Float[Tensor, " batch"]
) -> Float[Tensor, "*layer head"]:
    """Standard error of ``sum of sums / sum of counts`` over the rows of a batch (the delta method,
    exact for equal counts); NaN below 10 rows."""
    n_rows, total = sums.shape[-2], counts.sum()
    ratio = sums.sum(-2, keepdim=True) / total
    residuals = (sums - ratio * counts.unsqueeze(-1)) / (total / n_rows)
    error = (residuals.square().sum(-2) / max(1, n_rows * (n_rows - 1))).sqrt()
    return error if n_rows >= FEWEST else torch.full_like(error, torch.nan)


def token_ranges(d_vocab: int, avoid: Sequence[int | None] = ()) -> list[tuple[int, int]]:
    """Half-open ranges of ids to draw from. In a large vocabulary :data:`SEQUENCES` equal ones from
    common to rare ids, without the first 1,000 and the last fiftieth, where special tokens are. A
    small one is a single range, which begins above those ``avoid`` ids that lie in its lower half.

    A head may copy common tokens and not rare ones: SmolLM2's L17H5 has an induction score of 0.72
    on the ids up to 10,000 and of 0.56 on rare ones.

    >>> token_ranges(50257)[:2], token_ranges(100, avoid=[0])
    ([(1000, 5021), (5021, 9042)], [(1, 100)])
    """
    if d_vocab < 2 * HIGH_TOKEN:
        # above an avoided id in the upper half too few ids would be left to draw from
        low = max([a + 1 for a in avoid if a is not None and a < d_vocab // 2], default=0)
        return [(low, d_vocab)]
    low, width = 1000, (d_vocab - d_vocab // 50 - 1000) // SEQUENCES
    return [(low + i * width, low + (i + 1) * width) for i in range(SEQUENCES)]


def measure_types(
    view: ModelView, layers: Sequence[int], *, bos: bool = False, seed: int = 1234
) -> HeadTypes:
    """Head-type scores of all heads of ``layers`` on repeated random tokens made for the model:
    :data:`SEQUENCES` rows of two copies of up to 32 tokens, in a large vocabulary each row from
    another range of ids. The default seed is that of Song & Zhong 2023's code."""
    bos_id = view.bos_id if bos else None
    ranges = token_ranges(view.vocabulary_size, [view.bos_id])
    # two copies fit, of distinct ids; with 32, a head that attends evenly pays 2% to the token that
    # induction looks for
    ids = ranges[0][1] - ranges[0][0]
    period = max(1, min(32, (view.n_ctx - (bos_id is not None)) // 2, ids - 1))
    rows = SEQUENCES // len(ranges)
    seeds = [(seed + i) % 2**32 for i in range(len(ranges))]
    batches = [
        repeated_random_tokens(period, 2, rows, low=low, high=high, seed=own, bos_id=bos_id)
        for own, (low, high) in zip(seeds, ranges, strict=True)
    ]
    tokens = torch.cat(batches)
    all_keys = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    allowed = None if view.causal else all_keys
    types: dict[int, HeadTypes] = {}

    def take(layer: int, pattern: Tensor) -> None:
        # one layer after another: patterns of all layers would not stay in the cache
        types[layer] = head_type_scores(pattern.detach().float(), tokens, allowed=allowed)

    view.run(tokens, {view.pattern_hooks[layer]: partial(take, layer) for layer in layers})
    scores, errors = (
        {t: torch.cat([getattr(types[i], of)[t].cpu() for i in layers]) for t in HEAD_TYPES}
        for of in ("scores", "errors")
    )
    return dataclasses.replace(types[layers[0]], scores=scores, errors=errors)
