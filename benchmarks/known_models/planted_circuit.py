"""Which edges make induction, by construction? The two-layer models of ``known("circuit")`` and
``known("idle")``, with heads that look alike and do not matter.

The stream has blocks of one-hot directions: the token, the token before ("before"), a first and a
second scratch block, and in the learned model the position. The output reads the token block alone.

Heads of layer 0 attend at an offset:

- ``previous``: at offset 1; it copies the token to "before".
- ``second``: at offset 2; it copies the token to the first scratch block.
- ``itself``: at offset 0; it copies the token to the first scratch block.
- ``even``: evenly; it copies the token to the second scratch block.

Heads of layer 1 attend where the token of the query matches a block of the key:

- ``induction``: matches "before"; it copies the token to the token block, which the output reads.
- ``decoy``: matches the first scratch block; it copies the token to the second scratch block.
- ``match``: matches the token; it copies "before" to the second scratch block.
- ``even``: attends evenly; it copies the second scratch block to itself.

On tokens that repeat, the induction head and what it reads produce the next token, and nothing else
does. Small random entries are added to every matrix, so that no other edge is exactly zero.

In ``known("idle")`` weights alone mislead. All heads of layer 0 but ``previous`` read the
second scratch block, which nothing has written yet. They attend and are connected as before (but
``itself`` writes to "before"), yet what they write is almost nothing. ``previous`` copies the token
to the second scratch block too, so that a head of layer 1 reads a smaller part of its output
weights than of an idle head's.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from benchmarks.known_models.planted import (
    D_ROTARY,
    LENGTH,
    SLOW,
    VOCAB,
    HeadWeights,
    directions,
    embed,
    empty_model,
    plant,
)
from benchmarks.known_models.planted_heads import constants

FIRST = ("previous", "second", "itself", "even")
SECOND = ("induction", "decoy", "match", "even")
"""Heads of layer 0 and of layer 1."""
LABELS = {"previous": "position", "second": "position", "itself": "position"}
LABELS |= {"induction": "content", "match": "content", "decoy": "content"}
"""What a head does -> the label that it deserves; none for heads that attend evenly."""
OFFSETS = {"previous": 1, "second": 2, "itself": 0}
"""Offset at which a head of layer 0 attends."""
TOKEN, BEFORE, SCRATCH_1, SCRATCH_2, PLACE = range(5)
"""Blocks of directions, in the order of the text above."""
READS = {"induction": (BEFORE, TOKEN), "decoy": (SCRATCH_1, TOKEN), "match": (TOKEN, BEFORE)}
"""Blocks that the heads of layer 1 read as keys and as values; queries are tokens."""
WRITES = {
    "previous": (BEFORE,),
    "second": (SCRATCH_1,),
    "itself": (SCRATCH_1,),
    "even": (SCRATCH_2,),
}
"""Blocks that the heads of layer 0 copy to."""
IDLE = WRITES | {"previous": (BEFORE, SCRATCH_2), "itself": (BEFORE,)}
"""Blocks that they copy to in ``known("idle")``."""
STRENGTH, COPIED, NOISE = 25.0, 3.0, 0.05
"""Score of a match, size of the predicted token, and norm of the random entries of a matrix
relative to that of its planted ones. Where there is no match, scores are near 0, so a match takes
almost all attention. The current token has size 1 in the token block, so the predicted one
wins."""
SHARP = range(4)
"""Fast rotary planes, which tell one offset from the next."""
SQUARED_NORMS = {"learned": (2.0, 5.0), "rotary": (1.0, 4.0)}
"""Squared norm of the input of each layer: 1 for the token and 1 for a learned position; before
layer 1 also 3 for what ``previous``, ``second`` and ``itself`` copy. With idle heads ``previous``
alone writes, to two blocks, which makes 2."""


def planted_circuit(positions: str, seed: int, *, idle: bool = False) -> tuple[Any, dict[str, Any]]:
    """The Hugging Face model with the heads of each layer in random order, and the fields of its
    :class:`~benchmarks.known_models.KnownModel`. With ``idle`` all heads of layer 0 but
    ``previous`` read an empty block.

    >>> sorted(planted_circuit("learned", 0)[1]["edges"]["last"])
    ['L1H0->output', 'embed->L1H0<q>']
    """
    g = torch.Generator().manual_seed(seed)
    orders = [[names[i] for i in torch.randperm(4, generator=g)] for names in (FIRST, SECOND)]
    learned = positions == "learned"
    columns = 4 * VOCAB + (LENGTH if learned else 0)
    d_head = LENGTH if learned else D_ROTARY
    model = empty_model(positions, 2, 4, d_head, VOCAB, LENGTH)
    basis = directions(columns, 4 * d_head, g)
    for layer, (names, norm) in enumerate(zip(orders, SQUARED_NORMS[positions], strict=True)):
        make = second_head if layer else partial(first_head, idle=idle)
        heads = [noisy(make(name, columns, d_head), g) for name in names]
        # idle heads have written one block less before layer 1: see SQUARED_NORMS
        squared_norm = norm - 1 if layer == 1 and idle else norm
        plant(model, layer, heads, basis, squared_norm, g)
    places = basis[4 * VOCAB :] if learned else None
    embed(model, basis[:VOCAB], places, basis[:VOCAB])
    at = {f"{layer}{n}": f"L{layer}H{h}" for layer in (0, 1) for h, n in enumerate(orders[layer])}
    previous, induction = at["0previous"], at["1induction"]
    last = frozenset({f"embed->{induction}<q>", f"{induction}->output"})
    edges = last | {f"embed->{previous}<v>", f"{previous}->{induction}<k>"}
    edges |= {f"embed->{induction}<v>"}
    pairs = {(previous, induction, "key"), (previous, at["1match"], "value")}
    does = {(layer, h): name for layer in (0, 1) for h, name in enumerate(orders[layer])}
    if idle:
        pairs |= {(previous, at["1even"], "value")}
        does |= {head: "idle" for head, name in does.items() if head[0] == 0 and name != "previous"}
    else:
        pairs |= {(at[f"0{name}"], at["1decoy"], "key") for name in ("second", "itself")}
        pairs |= {(at["0even"], at["1even"], "value")}
    # the block that the decoy reads is empty where heads are idle: it attends evenly, so no label
    labelled = LABELS.keys() - ({"decoy"} if idle else set())
    return model, {
        "does": does,
        "labels": {head: LABELS[name] for head, name in does.items() if name in labelled},
        "edges": {"all": edges, "last": last},
        "head_pairs": frozenset(pairs),
    }


def block(number: int) -> slice:
    """Columns of a block of directions; PLACE is the last one and has LENGTH columns."""
    return slice(number * VOCAB, (number + 1) * VOCAB if number < PLACE else None)


def first_head(name: str, columns: int, d_head: int, *, idle: bool) -> HeadWeights:
    """A head of layer 0. It attends at an offset or evenly, and copies the token, or with ``idle``
    the empty second scratch block."""
    # size: of query and of key, whose product over sqrt(d_head) is the strength
    head, size = HeadWeights(columns, d_head), math.sqrt(STRENGTH * math.sqrt(d_head))
    # only the learned model has columns of positions; key j answers query j + offset
    if name in OFFSETS and columns > 4 * VOCAB:
        offset = OFFSETS[name]
        head.query[block(PLACE)] = size * torch.eye(LENGTH)
        head.key[block(PLACE)] = size * torch.ones(LENGTH - offset).diag(offset)
    elif name in OFFSETS:
        head.query_bias, head.key_bias = constants(SHARP, OFFSETS[name], size)
    copied = SCRATCH_2 if idle and name != "previous" else TOKEN
    head.value[block(copied), :VOCAB] = torch.eye(VOCAB)
    for to in (IDLE if idle else WRITES)[name]:
        head.out[:VOCAB, block(to)] = torch.eye(VOCAB)
    return head


def second_head(name: str, columns: int, d_head: int) -> HeadWeights:
    """A head of layer 1. It matches the query's token with a block of the key, or attends evenly.
    A rotary head matches in slow planes."""
    head, size = HeadWeights(columns, d_head), math.sqrt(STRENGTH * math.sqrt(d_head))
    start = 0 if columns > 4 * VOCAB else SLOW
    at = slice(start, start + VOCAB)
    key, value = READS.get(name, (None, SCRATCH_2))
    if key is not None:
        head.query[block(TOKEN), at] = head.key[block(key), at] = size * torch.eye(VOCAB)
    head.value[block(value), :VOCAB] = torch.eye(VOCAB)
    to, copied = (TOKEN, COPIED) if name == "induction" else (SCRATCH_2, 1.0)
    head.out[:VOCAB, block(to)] = copied * torch.eye(VOCAB)
    return head


def noisy(head: HeadWeights, g: torch.Generator) -> HeadWeights:
    """The head with random entries added to each matrix, in proportion to its norm; zero matrices
    stay zero."""
    for name in ("query", "key", "value", "out"):
        matrix = getattr(head, name)
        noise = torch.randn(matrix.shape, generator=g) * matrix.norm() / math.sqrt(matrix.numel())
        setattr(head, name, matrix + NOISE * noise)
    return head
