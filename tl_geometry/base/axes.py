"""What does each axis of a tensor count? Every tensor annotation of the library uses the names
below (tested); letters for sizes in a formula stand in docstrings only.

Results derive their tables from these annotations, and sums the axes that they are joined along
(:func:`axes_of`).
"""

from __future__ import annotations

import functools
import re

AXES: dict[str, str] = {
    "state": "residual stream states: 0 the embedding output, l the input of block l, n_layers the "
    "stream before the final norm",
    "layer": "blocks (attention and MLP), 0 to n_layers - 1",
    "context": "sequences of a corpus",
    "batch": "sequences of one forward pass or of one prompt set",
    "position": "places in a sequence (absolute, or rows of a window where the docstring says so)",
    "d_model": "coordinates of the residual stream",
    "d_head": "coordinates of one head",
    "d_rot": "coordinates of one head that are rotated",
    "d_mlp": "hidden units of an MLP",
    "d_vocab": "token ids of the vocabulary",
    "head": "attention heads of one layer, or of a selection of (layer, head) pairs",
    "query": "query positions",
    "key": "key positions",
    "group": "disjoint groups of contexts: contiguous blocks",
    "label": "document labels",
    "bin": "bins of a histogram",
    "kept": "the tokens of largest norm of a state, descending",
    "token": "tokens of any contexts",
    "part": "additive parts of the residual stream",
    "side": "the query side and the key side of a score (in a graph: value, query, key)",
    "term": "pairs of parts: terms of an attention score",
    "pair": "terms of queries and keys alone, without ALiBi",
    "plane": "rotary planes of a head: pairs of coordinates that turn together, then the rest",
    "band": "bands of wavelengths of rotary planes",
    "rank": "singular directions, strongest first",
    "trajectory": "token trajectories through the layers",
    "fitted": "trajectories that a map is fitted on, where it is tried on others",
    "sample": "draws of a random quantity",
    "offset": "differences i - j of query and key position",
    "row": "rows of a general matrix",
    "column": "columns of a general matrix",
    "cell": "chosen cells of a row of scores",
    "time": "times of a flow, in layers",
    "condition": "what was done to a model: clean, removed, swapped, another term removed",
    "feature": "directions of a dictionary of the stream",
    "active": "features that are active at a token, largest first",
    "source": "positions that a head reads from",
    "writer": "what wrote the stream: embeddings, heads, MLPs, constants",
    "sender": "heads, or sets of heads, whose output is replaced for some readers",
    "receiver": "inputs, or sets of inputs, that read the replaced output",
    "node": "nodes of a graph: writers at positions, the logit, the constants",
    "edge": "edges of a graph",
    "level": "sizes of a circuit, as shares of all edges",
    "weight": "weightings of cells: row-centred scores (cs), attention above uniform (gs)",
    "symbol": "characters of a small alphabet",
    "vocab": "token ids of a model that is trained here",
}


@functools.cache
def axes_of(cls: type) -> dict[str, tuple[str, ...]]:
    """Axis names of every tensor that a class has as a field or as a property, from the
    annotations: ``Float[Tensor, "head side part"]``.

    >>> from tl_geometry.circuits import WriterSweep
    >>> axes_of(WriterSweep)["cs"]
    ('head', 'side', 'part')
    """
    axes: dict[str, tuple[str, ...]] = {}
    # bases first, so that a subclass has the last word on a name
    for base in reversed(cls.__mro__):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            axes[name] = _axes(str(annotation))
        for name, value in vars(base).items():
            if isinstance(value, property) and value.fget is not None:
                axes[name] = _axes(str(value.fget.__annotations__.get("return", "")))
    return axes


def _axes(annotation: str) -> tuple[str, ...]:
    """Axis names in the text of an annotation; none where it names no tensor."""
    axes = re.search(r"Tensor, ['\"]([^'\"]*)['\"]", annotation)
    return tuple(axes[1].split()) if axes else ()
