"""Does a head need what one writer wrote, on its query, key or value side? Path patching of that
edge: :func:`remove_edge` takes the writer out of what chosen heads read, :func:`swap_edge` puts its
output of another prompt in its place.

The writer's output and the reader's norm scale (QK-norm's too) are those of the clean run on the
same tokens; everything after the reader is live. With w the clean output of the writer, h the
running stream, and A, s and gain the centring, clean scale and gain of the norm,

    remove      k' = ((h - w) A gain / s) W_K + constants          (queries and values likewise)
    swap        k' = ((h - w + w') A gain / s) W_K + constants     w' of another prompt

Because s is frozen, removing an edge takes exactly that writer's terms out of the scores: the terms
that :func:`tl_geometry.composition` measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import require
from tl_geometry.circuits.writer_edges import HEAD_SIDES
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.interventions.head_edits import (
    Heads,
    bias_of,
    by_layer,
    edit_of_heads,
    other_prompts,
)
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.hook_points import PassTokens
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.writers import GRAINS, Written, run_written, writer_names

Names = str | Sequence[str]
"""The name of a writer (or of a side), or several that are edited together."""


@dataclass(frozen=True, eq=False)
class CleanReader:
    """What one layer read in the clean run: the stream ``h``; the scale and constant of queries,
    keys and values (by ``"q"``, ``"k"``, ``"v"``); and what each chosen writer had written."""

    h: Float[Tensor, "batch position d_model"]
    scale: Mapping[str, Float[Tensor, "batch position head"]]
    constant: Mapping[str, Float[Tensor, "batch position head d_head"]]
    writers: Mapping[str, Float[Tensor, "batch position d_model"]]

    def written(self, names: Sequence[str]) -> Float[Tensor, "batch position d_model"]:
        """What some writers had written together."""
        return torch.stack([self.writers[name] for name in names]).sum(0)


@dataclass(frozen=True, eq=False)
class CleanRun:
    """The clean run behind edits of edges: its tokens, and what each edited layer read."""

    tokens: Int[Tensor, "batch position"]
    readers: Mapping[int, CleanReader]


def clean_run(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    writers: Sequence[str],
    layers: Iterable[int],
) -> CleanRun:
    """Run the model once and keep what edges from ``writers`` to heads of ``layers`` need."""
    edited = sorted(set(layers))
    for layer in edited:
        earlier = [w.name for grain in GRAINS for w in writer_names(view, layer, grain)]
        options = tuple(dict.fromkeys(earlier))  # both grains have the embeddings and the MLPs
        for name in writers:
            checks.choice(name, options, f"writer before block {layer}")
    readers: dict[int, CleanReader] = {}

    def take(layer: LayerView, written: Written) -> None:
        parts = written.parts("blocks") | written.parts()
        readers[layer.layer] = CleanReader(
            layer.h,
            {w: getattr(layer, f"{w}_scale") for w in "qkv"},
            {w: getattr(layer, f"{w}_constant") for w in "qkv"},
            {name: parts[name] for name in writers},
        )

    run_written(view, tokens, edited, take)
    return CleanRun(tokens, readers)


def edge_edits(
    run: CleanRun,
    writers: Names,
    heads: Heads,
    sides: Names,
    other: CleanRun | None = None,
    *,
    drop: int = 0,
    keep: bool = False,
) -> list[Edit]:
    """One edit for each layer that has chosen heads, from position ``drop`` on: it takes
    ``writers`` out of their inputs (with ``keep`` all other writers instead), and adds what the
    same writers wrote in the run ``other``."""
    names = _names(writers)
    letters = {checks.choice(side, HEAD_SIDES, "side")[0] for side in _names(sides)}
    edits: list[Edit] = []
    for at, chosen in by_layer(heads).items():
        clean = run.readers[at]
        written = clean.written(names)
        # the clean stream is the sum of all writers
        change = written - clean.h if keep else -written
        if other is not None:
            change = change + other.readers[at].written(names)
        change[:, :drop] = 0
        edits.append(_edit(run, at, chosen, change, letters))
    return edits


def _names(value: Names) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _edit(
    run: CleanRun, at: int, heads: tuple[int, ...], change: Tensor, letters: set[str]
) -> Edit:
    clean, chosen = run.readers[at], list(heads)

    def side(layer: LayerView, letter: str) -> Float[Tensor, "batch position head d_head"]:
        """Queries, keys or values of the heads, of the changed input where they are edited."""
        if letter not in letters:
            return getattr(layer, letter)[:, :, chosen]
        mapped = getattr(layer, f"{letter}_map")(layer.h + change.to(layer.h))
        projected = mapped * clean.scale[letter].unsqueeze(-1) + clean.constant[letter]
        return projected[:, :, chosen]

    def scores(layer: LayerView, total: Tensor) -> Tensor:
        if not {"q", "k"} & letters:
            return total
        q, k = side(layer, "q"), side(layer, "k")
        edited = layer.scale * einsum(q, k, "b i h e, b j h e -> b h i j")
        bias = bias_of(layer, heads)
        return edited if bias is None else edited + bias

    def on_tokens(tokens: PassTokens | None) -> None:
        """Refuse a pass of other tokens than those of the clean run, or of embeddings."""
        same = False
        if tokens is not None and tokens.shape == tuple(run.tokens.shape):
            same = bool(tokens.are(run.tokens).all())
        expected, got = "the tokens of the clean run", "others, or embeddings"
        instead = "remove_edge(model, these tokens, ...)"
        require(same, "tokens inside an edit", expected=expected, got=got, instead=instead)

    values = (lambda layer, v: side(layer, "v")) if "v" in letters else None
    return Edit(at, heads, scores, on_tokens, values)


def _live(
    model: ModelLike,
    rows: TokenWindows,
    writer: Names,
    heads: Sequence[Head] | Head,
    side: Names,
    drop: int | None,
    others: Int[Tensor, "batch position"] | None = None,
) -> LiveEdit:
    """Removes the edge, or with ``others`` swaps in what the writer writes in these prompts; the
    clean runs are made when the edit is opened."""
    start, writers = first_edited(drop, rows), _names(writer)

    def edits(view: ModelView, chosen: Heads) -> list[Edit]:
        layers = by_layer(chosen)
        run = clean_run(view, rows.tokens, writers, layers)
        source = None if others is None else clean_run(view, others, writers, layers)
        return edge_edits(run, writers, chosen, side, source, drop=start)

    return edit_of_heads(model, heads, edits)


def first_edited(drop: int | None, rows: TokenWindows) -> int:
    """The first position whose input is edited: ``drop``, by default 1 with a BOS token, else 0."""
    start, length = int(rows.has_bos) if drop is None else drop, rows.tokens.shape[1]
    fits = 0 <= start < length
    require(fits, "drop", expected=f"a position from 0 to {length - 1}", got=start)
    return start


def remove_edge(
    model: ModelLike,
    tokens: TokensLike,
    writer: Names,
    heads: Sequence[Head] | Head,
    *,
    side: Names = "key",
    drop: int | None = None,
    prepend_bos: bool | None = None,
) -> LiveEdit:
    """Context manager: take a writer out of what ``heads`` read, on the ``"query"``, ``"key"`` or
    ``"value"`` side.

    ``with remove_edge(model, tokens, "L0H3", "L1H0"): model(tokens)``. The passes inside must be
    over ``tokens``, whose clean run gives the writer's output and the norm's scale.

    Writers are named as in ``sweep_heads(..., parts="writers")`` (``"embed"``, ``"L0H3"``,
    ``"mlp0"``, ``"constants"``), or as in ``"blocks"`` (``"attn0"``); several are removed together.
    The first ``drop`` positions keep their inputs, by default the BOS token alone, so that the
    attention sink stays what it was and what is removed is the term whose share
    :func:`tl_geometry.composition` gives. ``drop=0`` removes the writer everywhere.

    Raises ``GeometryError`` for a writer that does not come before every reader, and for other
    tokens inside; else as :func:`remove_term`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tokens = tlg.zoo.default_windows(model, 16, n=2).tokens
    >>> with tlg.interventions.remove_edge(model, tokens, "L0H0", "L1H0"):
    ...     logits = model(tokens)
    """
    rows = token_rows(as_view(model), tokens, prepend_bos=prepend_bos)
    return _live(model, rows, writer, heads, side, drop)


def swap_edge(
    model: ModelLike,
    tokens: TokensLike,
    writer: Names,
    heads: Sequence[Head] | Head,
    *,
    side: Names = "key",
    other: TokensLike | None = None,
    drop: int | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> LiveEdit:
    """Context manager: replace what a writer wrote, in the inputs of ``heads`` alone, by what it
    wrote in other prompts.

    ``other`` are as many prompts of the same length, by default the same prompts in another order.
    The rest is as in :func:`remove_edge`.
    """
    view = as_view(model)
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    others = other_prompts(view, rows, other, prepend_bos, seed, "other")
    return _live(model, rows, writer, heads, side, drop, others)
