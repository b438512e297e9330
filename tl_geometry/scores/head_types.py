"""Head types on repeated random tokens: previous-token, duplicate-token, neighbourhood and
induction heads, with their baselines.

On a random sequence repeated several times nothing but position and repetition can be attended to,
so the attention that a head pays to a fixed set of keys names its type (the synthetic input of Song
& Zhong 2023, Fig. 4). With the pattern A, query i, key j:

    previous-token   A[i, i-1]                                    i >= 1
    neighbourhood    sum over 1 <= i-j <= width of A[i, j]        i >= 1
    same-token       sum over j <= i with tok_j = tok_i           all queries
    duplicate-token  sum over j < i with tok_j = tok_i            queries whose token came before
    induction        sum over 1 <= j <= i with tok_{j-1} = tok_i  queries whose token came before

each averaged over its queries, beside what uniform attention over the allowed keys would score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import choice, require

HEAD_TYPES = ("previous", "duplicate", "same", "neighbourhood", "induction")
"""Names of the scores."""
HIGH_TOKEN = 10_000


def repeated_random_tokens(
    period: int = 8,
    copies: int = 3,
    batch: int = 1,
    *,
    low: int = 1000,
    high: int = HIGH_TOKEN,
    seed: int = 1234,
    bos_id: int | None = None,
    distinct: bool = True,
) -> Int[Tensor, "batch position"]:
    """Random token ids from ``low`` to ``high - 1``, ``period`` of them repeated ``copies`` times,
    ``batch`` such rows.

    Tokens within a period are ``distinct`` unless told otherwise (rows with a repeat are drawn
    again). The defaults give the input of Song & Zhong 2023, Fig. 4: the text says "repeated
    twice", the published code makes three copies, 24 tokens, without BOS.

    >>> repeated_random_tokens()[0, :9].tolist()
    [6775, 4171, 8806, 7365, 8316, 2564, 7432, 3625, 6775]
    """
    require(
        period >= 1 and copies >= 1 and batch >= 1,
        "sizes",
        expected="at least 1 each",
        got=(period, copies, batch),
    )
    enough = high - low >= (period if distinct else 1)
    require(
        enough,
        "low, high",
        expected=f"at least {period} ids",
        got=f"{max(0, high - low)} from {low} to {high - 1}",
        instead="a wider range",
    )
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(low, high, (batch, period), generator=generator)
    if (
        distinct and 4 * period**2 > high - low
    ):  # redrawing would take long: a permutation of the range is distinct by construction
        rows = torch.stack(
            [low + torch.randperm(high - low, generator=generator)[:period] for _ in range(batch)]
        )
    while distinct and bool((again := (rows.sort(-1).values.diff(dim=-1) == 0).any(-1)).any()):
        rows[again] = torch.randint(low, high, (int(again.sum()), period), generator=generator)
    tokens = rows.repeat(1, copies)
    return tokens if bos_id is None else torch.cat([torch.full((batch, 1), bos_id), tokens], dim=1)


def detection_patterns(
    tokens: Int[Tensor, "batch position"], *, width: int = 3
) -> dict[str, Bool[Tensor, "batch query key"]]:
    """The keys that each type of head attends to, as masks over ``[query key]``.

    >>> {k: int(v.sum()) for k, v in detection_patterns(torch.tensor([[5, 6, 5, 6]])).items()}
    {'previous': 3, 'duplicate': 2, 'same': 6, 'neighbourhood': 6, 'induction': 2}
    """
    batch, length = tokens.shape
    offset = torch.arange(length, device=tokens.device).unsqueeze(1) - torch.arange(
        length, device=tokens.device
    )
    equal = tokens.unsqueeze(2) == tokens.unsqueeze(1)
    follows = torch.zeros_like(equal)
    follows[:, :, 1:] = equal[:, :, :-1]
    spread = (offset >= 1) & (offset <= width)
    return {
        "previous": (offset == 1).expand(batch, -1, -1),
        "duplicate": equal & (offset > 0),
        "same": equal & (offset >= 0),
        "neighbourhood": spread.expand(batch, -1, -1),
        "induction": follows & (offset >= 0),
    }


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadTypes:
    """Scores of each type between 0 and 1, per head, and what uniform attention would score. Types
    without a query are NaN."""

    scores: dict[str, Float[Tensor, "*layer head"]]
    baselines: dict[str, float]
    queries: dict[str, int]

    def labels(self, *, over: float = 0.4) -> tuple[str, ...]:
        """Of previous, duplicate and induction the highest, where it is over ``over`` (and the
        baseline), else ``""``; heads flattened."""
        kinds = ("previous", "duplicate", "induction")
        table = torch.stack([self.scores[k].flatten() for k in kinds], dim=-1)
        floor = torch.tensor([max(over, self.baselines[k]) for k in kinds], dtype=table.dtype)
        best = torch.where(table > floor, table, -torch.inf).max(dim=-1)
        return tuple(
            kinds[i] if v > 0 else ""
            for i, v in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )


def head_type_scores(
    pattern: Float[Tensor, "*layer batch head query key"],
    tokens: Int[Tensor, "batch position"],
    *,
    allowed: Bool[Tensor, "query key"] | None = None,
    width: int = 3,
    common: bool = False,
    method: str = "mean",
) -> HeadTypes:
    """Head-type scores of attention patterns (formulas at the top of the module).

    ``allowed`` (causal for ``None``) gives the baselines; ``width`` is the reach of
    ``neighbourhood``. With ``common`` every score is averaged over the queries whose token came
    before: then previous + duplicate + induction is at most one for distinct tokens of period 3 or
    more. ``method="mul"`` is TransformerLens's ``detect_head``, ``sum(A * D) / sum(A)`` for the
    same sets of keys.

    >>> tokens = repeated_random_tokens(4, 2)
    >>> uniform = torch.ones(8, 8).tril() / torch.arange(1, 9).unsqueeze(1)
    >>> found = head_type_scores(uniform[None, None], tokens)
    >>> bool(abs(found.scores["induction"] - found.baselines["induction"]) < 1e-6)
    True
    """
    choice(method, ("mean", "mul"), "method")
    length = tokens.shape[1]
    ok = pattern.shape[-2:] == (length, length) and pattern.shape[-4] == len(tokens)
    require(
        ok,
        "pattern",
        expected=f"[... batch head query key] for tokens {tuple(tokens.shape)}",
        got=describe(pattern),
    )
    tokens = tokens.to(pattern.device)
    allowed = torch.ones(length, length, dtype=torch.bool).tril() if allowed is None else allowed
    uniform = (allowed.double() / allowed.sum(-1, keepdim=True).clamp(min=1)).to(pattern.device)
    sets = detection_patterns(tokens, width=width)
    repeated = sets["duplicate"].any(-1)
    later = torch.arange(length, device=pattern.device).expand_as(repeated) >= 1
    queries: dict[str, Tensor] = dict.fromkeys(HEAD_TYPES, repeated if common else later)
    if not common:
        queries |= {"duplicate": repeated, "induction": repeated, "same": torch.ones_like(repeated)}
    scores, baselines = {}, {}
    for name, keys in sets.items():
        chosen = keys & queries[name].unsqueeze(-1) if method == "mean" else keys
        weight = float(queries[name].sum()) if method == "mean" else float(len(tokens) * length)
        total = (
            pattern.sum((-4, -2, -1), dtype=torch.float64)
            if method == "mul"
            else weight or torch.nan
        )
        scores[name] = (pattern * chosen.unsqueeze(1)).sum(
            (-4, -2, -1), dtype=torch.float64
        ) / total
        baselines[name] = float((uniform * chosen).sum()) / weight if weight else float("nan")
    return HeadTypes(
        scores=scores, baselines=baselines, queries={k: int(v.sum()) for k, v in queries.items()}
    )


def period_for(n_ctx: int, d_vocab: int, *, copies: int = 2, bos: bool = False) -> int:
    """The longest period up to 32 that fits ``copies`` copies into ``n_ctx`` positions and has that
    many distinct ids.

    >>> period_for(1024, 50257), period_for(24, 100)
    (32, 12)
    """
    return max(1, min(32, (n_ctx - bos) // copies, d_vocab - 1))


def token_range(d_vocab: int, avoid: Sequence[int | None] = ()) -> tuple[int, int]:
    """Ids to draw from: 1,000 to 9,999 where the vocabulary has them (rarely special tokens), else
    all above the ``avoid`` ids.

    >>> token_range(50257), token_range(100, avoid=[0])
    ((1000, 10000), (1, 100))
    """
    if d_vocab >= 2 * HIGH_TOKEN:
        return 1000, HIGH_TOKEN
    low = max([a + 1 for a in avoid if a is not None and a < d_vocab // 2], default=0)
    return low, d_vocab
