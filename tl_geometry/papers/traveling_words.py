"""What do the readouts of Molina 2023 (Traveling Words, arXiv:2309.07315) show for a model? The
tokens that biases prefer, the tokens of the leading directions of heads, and the noun probe:
:func:`molina`.

The sources at hand print no table of values for them, so there is nothing to compare with. Settings
are the published ones, and numbers are ours. The published examples are of GPT-2; for any other
model every row says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tl_geometry as tlg
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Result
from tl_geometry.base.tables import Table
from tl_geometry.weights import bias_readout, noun_probe, token_readout

GPT2, LAYERS, HEADS = "gpt2", (0, 5, 11), 12
"""The published model: its name, blocks of the noun probe, heads per block (of 12 blocks)."""
COLUMNS = ("readout", "layer", "head", "of", "tokens", "others", "size", "verdict")
READ = {
    "bias": ("{bias} bias", "top", "bottom", "length"),
    "head QK": ("direction {feature}", "queries", "keys", "value"),
    "head OV": ("direction {feature}", "reads", "writes", "value"),
    "noun": ("{noun}", "keys", "values", "norm"),
}
"""Readout -> what a row is about, and which columns of the readout's table become ``tokens``,
``others`` and ``size``."""


def molina(
    model: Any, *, nouns: Sequence[str] | None = None, features: int = 1, k: int = 5
) -> Table:
    """The bias readouts of all heads, the tokens of the ``features`` leading directions of every
    head's QK and OV circuit (the logit lens of W_QK and W_OV), and the noun probe at the first,
    middle and last block.

    Published: 20 directions, k = 5 tokens, blocks 0, 5 and 11 of GPT-2 small, biases left out of
    the keys of the probe, value norms printed as whole numbers.

    Returns a row per readout, block, head, and bias, direction or noun that is read (``of``):
    ``tokens`` and ``others`` are those at either end of a bias, the queries and keys of W_QK, what
    W_OV reads and writes, the keys of a noun and what its value promotes; ``size`` is the length or
    singular value. For GPT-2 the verdict of every row says that no published value is at hand; for
    another model, that the published examples need GPT-2's weights. A readout that the model does
    not allow (QK-norm, a norm after attention) is one row that says why.

    >>> table = molina(tlg.zoo.embedded(), nouns=["file", "list"], k=2)
    >>> sorted(set(table.column("readout")))
    ['bias', 'head OV', 'head QK', 'noun']
    """
    view = tlg.view(model)
    published = view.name.split("/")[-1] == GPT2 and (view.n_layers, view.n_heads) == (12, HEADS)
    verdict = "the published model; the sources print no values"
    if not published:
        verdict = "needs GPT-2's weights: the published examples are its own"
    probed = {"layers": LAYERS if published else None, "biases": False, "k": k}
    readouts: dict[str, Callable[[], Result]] = {
        "bias": lambda: bias_readout(view, k=k),
        "head QK": lambda: token_readout(view, matrix="QK", features=features, k=k),
        "head OV": lambda: token_readout(view, matrix="OV", features=features, k=k),
        "noun": lambda: noun_probe(view, nouns, **probed),
    }
    cells = tuple(row for name, read in readouts.items() for row in _rows(name, read, verdict))
    provenance = view.provenance(sources=("molina2023",), preset="paper")
    return Table(names=COLUMNS, cells=cells, provenance=provenance)


def _rows(readout: str, read: Callable[[], Result], verdict: str) -> Iterator[tuple[Any, ...]]:
    """The rows of one readout, or the one that says why the model has none."""
    subject, tokens, others, size = READ[readout]
    try:
        table = read()
    except GeometryError as error:
        refused = f"refused: {' '.join(str(error).split())}"
        yield readout, -1, "", "", "", "", math.nan, refused
        return
    for values in table.rows():
        row: dict[str, Any] = dict(zip(table.columns(), values, strict=True))
        place = (int(row["layer"]), str(row["head"]), subject.format(**row))
        yield readout, *place, str(row[tokens]), str(row[others]), float(row[size]), verdict
