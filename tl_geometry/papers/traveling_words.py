"""What do the readouts of Molina 2023 (Traveling Words, arXiv:2309.07315) show for a model? There
are three: the tokens that biases prefer, the tokens of the leading directions of heads, and the
noun probe. ``tl-geometry reproduce traveling-words`` and notebooks call :func:`molina`.

The sources at hand print no table of values for them, so there is nothing to compare with. Settings
are the published ones, and numbers are ours. The published examples are of GPT-2; for any other
model every row says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Result
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.report.tables import Table
from tl_geometry.weights.heads import token_readout
from tl_geometry.weights.probes import bias_readout, noun_probe

GPT2, LAYERS, HEADS, TOKENS = "gpt2", (0, 5, 11), 12, 5
"""The published model and settings: name, blocks of the noun probe, heads per block (of 12 blocks),
and tokens of a readout."""
COLUMNS = {
    "bias": ("{bias} bias", "top", "bottom", "length"),
    "head QK": ("direction {feature}", "queries", "keys", "value"),
    "head OV": ("direction {feature}", "reads", "writes", "value"),
    "noun": ("{noun}", "keys", "values", "norm"),
}
"""Readout -> what a row is about, and which columns of the readout's table become ``tokens``,
``others`` and ``size``."""
NEEDS = "needs GPT-2's weights: the published examples are its own"
"""Verdict of every row of another model."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TravelingWords(Table):
    """What :func:`molina` returns: a row per readout, block, head, and bias, direction or noun that
    is read (``of``). ``tokens`` are those at one end, ``others`` those at the other end (for a
    noun: the tokens that its value promotes). ``verdict`` says what the row can be compared
    with."""

    names: tuple[str, ...] = (
        *("readout", "layer", "head", "of", "tokens", "others", "size", "verdict"),
    )


def molina(
    model: ModelLike,
    *,
    nouns: Sequence[str] | None = None,
    features: int = 1,
    k: int = TOKENS,
) -> TravelingWords:
    """The bias readouts of all heads, the tokens of the ``features`` leading directions of every
    head's W_QK and W_OV, and the noun probe at the first, middle and last block.

    Published: 20 directions, k = 5, blocks 0, 5 and 11 of GPT-2 small, biases left out of the keys
    of the probe. For GPT-2 the verdict of every row says that no published value is at hand; for
    another model, that the published examples need GPT-2's weights. A readout that the model does
    not allow (QK-norm, a norm after attention) is one row that says why.

    >>> import tl_geometry as tlg
    >>> table = tlg.papers.molina(tlg.zoo.embedded(), nouns=["file", "list"], k=2)
    >>> sorted({row[0] for row in table.rows()})
    ['bias', 'head OV', 'head QK', 'noun']
    """
    view = as_view(model)
    published = view.name.split("/")[-1] == GPT2 and (view.n_layers, view.n_heads) == (12, HEADS)
    verdict = "published settings; the sources print no values" if published else NEEDS
    cells: list[tuple[str, int, str, str, str, str, float, str]] = []
    layers = LAYERS if published else None
    readouts: dict[str, Callable[[], Result]] = {
        "bias": lambda: bias_readout(view, k=k),
        "head QK": lambda: token_readout(view, matrix="QK", features=features, k=k),
        "head OV": lambda: token_readout(view, matrix="OV", features=features, k=k),
        "noun": lambda: noun_probe(view, nouns, layers=layers, k=k, biases=False),
    }
    for readout, read in readouts.items():
        subject, tokens, others, size = COLUMNS[readout]
        try:
            table = read()
        except GeometryError as error:
            why = " ".join(str(error).split())
            cells.append((readout, -1, "", "", "", "", float("nan"), f"refused: {why}"))
            continue
        for values in table.rows():
            row: dict[str, Any] = dict(zip(table.columns(), values, strict=True))
            layer_and_head = (int(row["layer"]), str(row["head"]), subject.format(**row))
            end_tokens = (str(row[tokens]), str(row[others]))
            cells.append((readout, *layer_and_head, *end_tokens, float(row[size]), verdict))
    provenance = view.provenance(sources=("molina2023",), preset="paper")
    return TravelingWords(cells=tuple(cells), provenance=provenance)
