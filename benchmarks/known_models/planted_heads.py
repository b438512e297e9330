"""Which heads attend by offset, by position, by token identity, by both, or evenly, by
construction? The one-layer model of ``known("heads")``.

The list gives the score of each planted head before the softmax, and the label that it deserves.
The strength is a, the query has token t and position i, and the key has t' and j. Random numbers
are r, the offset is o, and w_f is the frequency of rotary plane f.

- ``offset``: ``a [i - j = o]``; position. Rotary: ``a mean_f cos((i - j - o) w_f)``.
- ``position``: ``a r_j``; position. Rotary: the kernel of ``offset`` with o = 0, on other planes.
- ``identity``: ``a [t = t']``; content.
- ``table``: ``a r_t . r'_t'``; content.
- ``token``: ``a r_t'``; token (bias-cvec).
- ``relation``: ``a r_i r_t'``; mixed (pos-cvec). Learned positions only.
- ``query``: ``a r_t``; uniform, because it is constant in each row. Rotary only.
- ``both``: offset and identity of equal energy; no clear label.
- ``disputed``: ``a [t = t'] + b r_j``; no clear label. Position has more of the variance, but
  attention goes where content puts it. Rotary: ``b cos((i - j - pi/2) w_0)`` for the second term.
- ``uniform``: 0; uniform.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from benchmarks.known_models.planted import (
    D_ROTARY,
    LENGTH,
    SLOW,
    VOCAB,
    HeadWeights,
    directions,
    embed,
    empty_model,
    frequencies,
    plant,
)
from tl_geometry.base.rows import causal_mask, row_center

_SHARED = ("offset", "position", "identity", "table", "token", "both", "disputed", "uniform")
LEARNED, ROTARY = (*_SHARED, "relation"), (*_SHARED, "query")
"""What the heads do, before they are shuffled: the names in the list above."""
LABELS = {
    "offset": "position",
    "position": "position",
    "identity": "content",
    "table": "content",
    "token": "token",
    "relation": "mixed",
    "both": "unclear",
    "disputed": "unclear",
    "query": "uniform",
    "uniform": "uniform",
}
"""What a head does -> the label that it deserves."""
TERMS = {
    "learned": {"offset": "pos-pos", "position": "bias-pos", "relation": "pos-cvec"},
    "rotary": {"offset": "bias-bias", "position": "bias-bias"},
}
"""The dominant terms that depend on how the model encodes position."""
CONTENT_TERMS = {"identity": "cvec-cvec", "table": "cvec-cvec", "token": "bias-cvec"}
"""The dominant terms that are the same in both models."""
RANK = 4
"""Rank of the random table of tokens."""
FAST, RECENT = range(8), range(4, 8)
"""Rotary planes of the offset head, and of the ``position`` head, which prefers recent keys."""
OVER, OVER_WAVE = 0.45, 0.85
"""Size of the positional term of the disputed head relative to that of the match, learned and
rotary. With these sizes position has about two thirds of the variance. Attention goes to the
matches; each query has at least one, its own token."""
COPIED = 0.5
"""Size of the token that a head copies; the current token has size 1."""


def planted_heads(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The Hugging Face model with its heads in random order, and the fields of its
    :class:`~benchmarks.known_models.KnownModel`.

    >>> planted_heads("learned", 0)[1]["does"][0, 0]
    'relation'
    """
    generator = torch.Generator().manual_seed(seed)
    roles = LEARNED if positions == "learned" else ROTARY
    order = torch.randperm(len(roles), generator=generator).tolist()
    names = tuple(roles[i] for i in order)
    offset = int(torch.randint(1, 4, (), generator=generator))
    columns, d_head = (VOCAB + LENGTH,) * 2 if positions == "learned" else (VOCAB, D_ROTARY)
    make = learned_head if positions == "learned" else rotary_head
    heads = []
    for name in names:
        strength = 5 + float(torch.rand((), generator=generator))
        head = make(name, offset, strength, generator)
        head.value[:VOCAB, :VOCAB] = torch.eye(VOCAB)
        head.out[:VOCAB, :VOCAB] = COPIED * torch.eye(VOCAB)
        heads.append(head)
    model = empty_model(positions, 1, len(heads), d_head, VOCAB, LENGTH)
    basis = directions(columns, len(heads) * d_head, generator)
    plant(model, 0, heads, basis, 2.0 if positions == "learned" else 1.0, generator)
    places = basis[VOCAB:] if positions == "learned" else None
    embed(model, basis[:VOCAB], places, basis[:VOCAB])
    does = {(0, head): name for head, name in enumerate(names)}
    terms = CONTENT_TERMS | TERMS[positions]
    # left out: BOS and its position, and the last positions, which no query reads at the offset
    tokens = tuple(range(1, VOCAB))
    rows = {"identity": tokens, "table": tokens}
    if positions == "learned":
        rows["offset"] = tuple(range(VOCAB + 1, VOCAB + LENGTH - offset))
    return model, {
        "does": does,
        "labels": {head: LABELS[name] for head, name in does.items()},
        "terms": {head: terms[name] for head, name in does.items() if name in terms},
        "offset": offset,
        "directions": basis,
        "reads": {head: rows[name] for head, name in does.items() if name in rows},
    }


def learned_head(name: str, offset: int, strength: float, g: torch.Generator) -> HeadWeights:
    """A head that reads one-hot tokens (columns 0 to VOCAB - 1) and positions (the other columns).
    Each column has its own coordinate of the head, with the same number."""
    columns = VOCAB + LENGTH
    head = HeadWeights(columns, columns)
    tokens, places = slice(0, VOCAB), slice(VOCAB, None)
    # the size of query and of key; their product over sqrt(d_head) is the strength, and d_head is
    # the number of columns
    size = math.sqrt(strength * math.sqrt(columns))
    if name in ("offset", "both"):
        head.query[places, places] = size * torch.eye(LENGTH)
        # key j answers query j + offset
        head.key[places, places] = size * torch.ones(LENGTH - offset).diag(offset)
    if name in ("identity", "both", "disputed"):
        match = size * math.sqrt(balance(offsets(offset)) if name == "both" else 1.0)
        head.query[tokens, tokens] = head.key[tokens, tokens] = match * torch.eye(VOCAB)
    if name == "table":
        fill_table(head, tokens, slice(0, RANK), size, g)
    if name == "token":
        head.query_bias[0] = size
    if name == "relation":
        head.query[places, 0] = size * signs(LENGTH, g)
    if name in ("token", "relation"):
        head.key[tokens, 0] = 0.5 * size * signs(VOCAB, g)
    if name in ("position", "disputed"):
        # the coordinate of the first position, which no match of tokens uses
        head.query_bias[VOCAB] = size
        head.key[places, VOCAB] = (OVER if name == "disputed" else 0.5) * size * signs(LENGTH, g)
    return head


def rotary_head(name: str, offset: int, strength: float, g: torch.Generator) -> HeadWeights:
    """A head that reads one-hot tokens. Constants on fast planes attend by position, and tokens are
    read on slow planes."""
    head = HeadWeights(VOCAB, D_ROTARY)
    slow = slice(SLOW, SLOW + VOCAB)
    # the size of query and of key; their product over sqrt(d_head) is the strength
    size = math.sqrt(strength * math.sqrt(D_ROTARY))
    if name in ("offset", "both"):
        head.query_bias, head.key_bias = constants(FAST, offset, size)
    if name == "position":
        head.query_bias, head.key_bias = constants(RECENT, 0, size)
    if name == "disputed":
        # a quarter turn, so that the wave is zero at the query's own token: cos(pi / 2)
        head.query_bias, head.key_bias = constants(range(1), math.pi / 2, OVER_WAVE * size)
    if name in ("identity", "both", "disputed"):
        match = size * math.sqrt(balance(cosines(FAST, offset)) if name == "both" else 1.0)
        head.query[:, slow] = head.key[:, slow] = match * torch.eye(VOCAB)
    if name == "table":
        fill_table(head, slice(None), slice(SLOW, SLOW + RANK), size, g)
    if name == "token":
        head.query_bias[SLOW] = size
        head.key[:, SLOW] = 0.5 * size * signs(VOCAB, g)
    if name == "query":
        head.query[:, SLOW] = 0.5 * size * signs(VOCAB, g)
        head.key_bias[SLOW] = size
    return head


def signs(n: int, g: torch.Generator) -> Float[Tensor, " row"]:
    """Random signs."""
    return torch.randint(0, 2, (n,), generator=g) * 2.0 - 1


def fill_table(head: HeadWeights, rows: slice, at: slice, size: float, g: torch.Generator) -> None:
    """Fill query and key with a random table of tokens. Each has mean zero over all tokens but BOS,
    so that the scores are content alone."""
    for side in (head.query, head.key):
        table = torch.randn(VOCAB, RANK, generator=g)
        table[0] = 0
        table[1:] -= table[1:].mean(0)
        side[rows, at] = size * table / math.sqrt(RANK)


def constants(
    planes: range, offset: float | int, size: float
) -> tuple[Float[Tensor, " d_head"], Float[Tensor, " d_head"]]:
    """Constant query and key with the score ``size^2 mean_f cos((i - j - offset) w_f)`` before the
    division by ``sqrt(d_head)``."""
    turn = offset * frequencies()
    # plane f has coordinates f and f + D_ROTARY / 2; the key is ahead by the offset's angle
    parts = torch.zeros(D_ROTARY // 2)
    parts[planes.start : planes.stop] = size / math.sqrt(len(planes))
    query = torch.cat([parts, torch.zeros_like(parts)])
    return query, torch.cat([parts * turn.cos(), parts * turn.sin()])


def offsets(offset: int) -> Float[Tensor, "query key"]:
    """One at a fixed offset of query and key."""
    return torch.ones(LENGTH - offset).diag(-offset)


def cosines(planes: range, offset: int) -> Float[Tensor, "query key"]:
    """The kernel of :func:`constants` with size one."""
    i = torch.arange(LENGTH)
    angles = (i[:, None] - i - offset)[..., None] * frequencies()[planes.start : planes.stop]
    return angles.cos().mean(-1)


def balance(kernel: Float[Tensor, "query key"]) -> float:
    """The size of a token match that has the row-centred energy of a kernel of offsets, if tokens
    are uniform. BOS is left out."""
    inside = kernel[1:, 1:]
    energy = float(row_center(inside, causal_mask(LENGTH - 1)).square().sum())
    keys = torch.arange(1, LENGTH).double()
    # a query matches itself, and each of the m other keys with probability p. With s matches among
    # n keys, the centred row has the sum of squares s (1 - s / n), and s is 1 + Binomial(m, p)
    p, m = 1 / (VOCAB - 1), keys - 1
    mean, second = 1 + m * p, (1 + m * p) ** 2 + m * p * (1 - p)
    return math.sqrt(energy / float((mean - second / keys).sum()))
