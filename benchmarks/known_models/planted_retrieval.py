"""Which subspaces do keys read, by construction? The one-layer model of ``known("retrieval")``.

A token is a colour and a shape, ``t = 4 colour + shape``, each one-hot in directions of its own.
The retrieval head scores query and key by ``a [colour = colour'] + a [shape = shape']``. One head
matches colours alone, one shapes alone, and one attends evenly.
"""

from __future__ import annotations

import math
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

EACH = 4
"""How many colours there are, and how many shapes; EACH squared is VOCAB."""
READS = {
    "retrieval": tuple(range(2 * EACH)),
    "colour": tuple(range(EACH)),
    "shape": tuple(range(EACH, 2 * EACH)),
    "even": (),
}
"""Directions that queries and keys of each head read: colours, then shapes."""
STRENGTH, COPIED = 4.0, 0.5
"""Score of one matching attribute, and size of the copied attributes; those of the current token
have size 1."""


def planted_retrieval(positions: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """The Hugging Face model with its heads in random order, and the fields of its
    :class:`~benchmarks.known_models.KnownModel`.

    >>> sorted(planted_retrieval("rotary", 0)[1]["does"].values())
    ['colour', 'even', 'retrieval', 'shape']
    """
    g = torch.Generator().manual_seed(seed)
    names = tuple(list(READS)[i] for i in torch.randperm(len(READS), generator=g))
    learned, attributes = positions == "learned", 2 * EACH
    d_head, start = (LENGTH, 0) if learned else (D_ROTARY, SLOW)
    columns = attributes + (LENGTH if learned else 0)
    size, heads = math.sqrt(STRENGTH * math.sqrt(d_head)), []
    for name in names:
        head = HeadWeights(columns, d_head)
        for row in READS[name]:
            head.query[row, start + row] = head.key[row, start + row] = size
        head.value[:attributes, :attributes] = torch.eye(attributes)
        head.out[:attributes, :attributes] = COPIED * torch.eye(attributes)
        heads.append(head)
    model = empty_model(positions, 1, len(heads), d_head, VOCAB, LENGTH)
    basis = directions(columns, len(heads) * d_head, g)
    # squared norm of the input: colour, shape and (learned) position
    plant(model, 0, heads, basis, 3.0 if learned else 2.0, g)
    token = torch.arange(VOCAB)
    tokens = basis[token // EACH] + basis[EACH + token % EACH]
    embed(model, tokens, basis[attributes:] if learned else None, tokens)
    does = {(0, head): name for head, name in enumerate(names)}
    matching = [head for head, name in does.items() if name != "even"]
    return model, {
        "does": does,
        "labels": dict.fromkeys(does, "uniform") | dict.fromkeys(matching, "content"),
        "terms": dict.fromkeys(matching, "cvec-cvec"),
        "directions": basis,
        "reads": {head: READS[does[head]] for head in matching},
    }
