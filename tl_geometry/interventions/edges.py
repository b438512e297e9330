"""Take one writer out of what chosen heads read, or put another prompt's in its place: path
patching of the edge from a writer to the query, key or value input of a head.

The writer's output and the reader's norm scale (QK-norm's too) are those of the clean run on the
same tokens; everything after the reader is live. With w the clean output of the writer and h the
running stream,

    remove      k' = ((h - w) A / s_clean gain) W_K + constants       (query and value alike)
    swap        k' = ((h - w + w') A / s_clean gain) W_K + constants,  w' of another prompt

so that an edge takes exactly that writer's terms out of the scores, the terms that
:func:`tl_geometry.composition` measures.
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
from tl_geometry.base.errors import fail, require
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.interventions.terms import HeadsLike, derangement
from tl_geometry.models.edit_lists import LiveEdit, live_edit
from tl_geometry.models.hook_points import PassTokens
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.writers import Written, run_written, writer_names

SIDES = {"query": "q", "key": "k", "value": "v"}
"""Sides of a head that an edge can end at, and their letters."""
Writers = str | Sequence[str]
"""One writer, or several that are edited together."""
Sides = str | Sequence[str]
"""One side, or several."""


@dataclass(frozen=True, eq=False)
class CleanReader:
    """What one layer read in the clean run: the stream, frozen scales and constants of its sides,
    and what each chosen writer had written."""

    h: Float[Tensor, "batch position d_model"]
    scale: Mapping[str, Float[Tensor, "batch position head"]]
    constant: Mapping[str, Float[Tensor, "batch position head d_head"]]
    writers: Mapping[str, Float[Tensor, "batch position d_model"]]


@dataclass(frozen=True, eq=False)
class CleanRun:
    """The clean run behind edits of edges, of the tokens that it was made from."""

    view: ModelView
    tokens: Int[Tensor, "batch position"]
    readers: Mapping[int, CleanReader]


def clean_run(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    writers: Sequence[str],
    layers: Iterable[int],
) -> CleanRun:
    """Run the model once and keep what edges from ``writers`` to heads of ``layers`` need."""
    chosen = sorted(set(layers))
    for layer in chosen:
        known = [w.name for w in writer_names(view, layer)]
        known += [w.name for w in writer_names(view, layer, "blocks") if w.name not in known]
        for name in writers:
            checks.choice(name, known, f"writer before block {layer}")
    readers: dict[int, CleanReader] = {}

    def take(layer: LayerView, written: Written) -> None:
        parts = written.parts("blocks") | written.parts()
        readers[layer.layer] = CleanReader(
            layer.h,
            {w: getattr(layer, f"{w}_scale") for w in "qkv"},
            {w: getattr(layer, f"{w}_constant") for w in "qkv"},
            {name: parts[name] for name in writers},
        )

    run_written(view, tokens, chosen, take)
    return CleanRun(view, tokens, readers)


def edge_edits(
    run: CleanRun,
    writers: Writers,
    heads: Sequence[tuple[int, int]],
    sides: Sides,
    other: CleanRun | None = None,
    *,
    drop: int = 0,
    keep: bool = False,
) -> list[Edit]:
    """One edit for each layer that has chosen heads: ``writers`` (with ``keep`` all others) out of
    their inputs from position ``drop`` on, and those of ``other`` in, where it is given."""
    names = [writers] if isinstance(writers, str) else list(writers)
    given = [sides] if isinstance(sides, str) else list(sides)
    letters = [SIDES[checks.choice(side, tuple(SIDES), "side")] for side in given]
    out: list[Edit] = []
    for at in sorted({layer for layer, _ in heads}):
        clean = run.readers[at]
        written = torch.stack([clean.writers[name] for name in names]).sum(0)
        change = written - clean.h if keep else -written
        if other is not None:
            found = other.readers[at].writers
            change = change + torch.stack([found[name] for name in names]).sum(0)
        change[:, :drop] = 0
        mine = tuple(sorted(head for layer, head in heads if layer == at))
        out.append(_edit(run, at, mine, change, letters))
    return out


def _require_clean_tokens(same: bool) -> None:
    """Refuse a pass of other tokens than those of the clean run."""
    expected, instead = "the tokens of the clean run", "remove_edge(model, these tokens, ...)"
    require(same, "tokens inside an edit", expected=expected, got="others", instead=instead)


def _edit(
    run: CleanRun, at: int, heads: tuple[int, ...], change: Tensor, letters: Sequence[str]
) -> Edit:
    clean, pick = run.readers[at], list(heads)

    def side(layer: LayerView, which: str) -> Float[Tensor, "batch position head d_head"]:
        """Queries, keys or values of the changed input, under the clean run's scales."""
        _require_clean_tokens(
            layer.h.shape == change.shape
        )  # tokens may be unseen, embedded before
        mapped = getattr(layer, f"{which}_map")(layer.h + change.to(layer.h))
        whole = mapped * clean.scale[which].unsqueeze(-1) + clean.constant[which]
        return whole[:, :, pick]

    def scores(layer: LayerView, whole: Tensor) -> Tensor:
        if not {"q", "k"} & set(letters):
            return whole
        q = side(layer, "q") if "q" in letters else layer.q[:, :, pick]
        k = side(layer, "k") if "k" in letters else layer.k[:, :, pick]
        found = layer.scale * einsum(q, k, "b i h e, b j h e -> b h i j")
        return found if layer.bias is None else found + layer.bias[pick]

    def on_tokens(tokens: PassTokens) -> None:
        same = tokens.shape == tuple(run.tokens.shape)
        _require_clean_tokens(same and bool(tokens.are(run.tokens).all()))

    values = (lambda layer, v: side(layer, "v")) if "v" in letters else None
    return Edit(at, heads, scores, on_tokens, values)


def _live(
    model: ModelLike,
    tokens: TokensLike,
    writers: Writers,
    heads: HeadsLike,
    side: Sides,
    other: TokensLike | None,
    swap: bool,
    drop: int | None,
    prepend_bos: bool | None,
    seed: int,
) -> LiveEdit:
    view = as_view(model)
    given = token_rows(view, tokens, prepend_bos=prepend_bos)
    rows, start = given.tokens, first_edited(drop, given)
    others = _others(view, rows, other, prepend_bos, seed) if swap else None
    chosen = checks.heads(heads, view.n_layers, view.n_heads)
    names = [writers] if isinstance(writers, str) else list(writers)
    sides = [side] if isinstance(side, str) else list(side)
    layers = {layer for layer, _ in chosen}

    def prepare() -> tuple[ModelView, list[Edit]]:
        now = as_view(model)
        run = clean_run(now, rows, names, layers)
        source = None if others is None else clean_run(now, others, names, layers)
        return now, edge_edits(run, names, chosen, sides, source, drop=start)

    return live_edit(prepare)


def first_edited(drop: int | None, rows: TokenWindows) -> int:
    """The first position whose input an edge's removal changes: that where its shares begin."""
    start, length = int(rows.has_bos) if drop is None else drop, rows.tokens.shape[1]
    fits = 0 <= start < length
    require(fits, "drop", expected=f"fewer than the {length} positions", got=start)
    return start


def _others(
    view: ModelView, rows: Tensor, other: TokensLike | None, prepend_bos: bool | None, seed: int
) -> Int[Tensor, "batch position"]:
    """The prompts that a swap takes writers from: given, or the same ones in another order."""
    if other is None:
        if len(rows) < 2:
            got = "one prompt"
            fail("swap", expected="at least 2 prompts", got=got, instead="other=other_tokens")
        return rows[derangement(len(rows), seed)]
    found = token_rows(view, other, prepend_bos=prepend_bos).tokens
    fits, got = found.shape == rows.shape, tuple(found.shape)
    require(fits, "other", expected=f"tokens {tuple(rows.shape)}", got=got)
    return found


def remove_edge(
    model: ModelLike,
    tokens: TokensLike,
    writer: Writers,
    heads: Sequence[Head] | Head,
    *,
    side: Sides = "key",
    drop: int | None = None,
    prepend_bos: bool | None = None,
) -> LiveEdit:
    """Context manager: take a writer out of what ``heads`` read, on the ``"query"``, ``"key"`` or
    ``"value"`` side.

    ``with remove_edge(model, tokens, "L0H3", "L1H0"): model(tokens)``. Writers are named as in
    ``sweep_heads(..., parts="writers")`` (``"embed"``, ``"L0H3"``, ``"mlp0"``, ``"constants"``), or
    as in ``"blocks"`` (``"attn0"``); several are removed together. The inputs of the first ``drop``
    positions stay whole, by default that of a BOS token: what is removed is the term whose share
    :func:`tl_geometry.composition` gives, and the attention sink stays what it was. ``drop=0``
    removes it everywhere. The passes inside must be over ``tokens``, whose clean run gives the
    writer's output and the norm's scale.

    Raises ``GeometryError`` for a writer that does not come before every reader, and for other
    tokens inside; else as :func:`remove_term`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tokens = tlg.zoo.default_windows(model, 16, n=2).tokens
    >>> with tlg.interventions.remove_edge(model, tokens, "L0H0", "L1H0"):
    ...     logits = model(tokens)
    """
    return _live(model, tokens, writer, heads, side, None, False, drop, prepend_bos, 0)


def swap_edge(
    model: ModelLike,
    tokens: TokensLike,
    writer: Writers,
    heads: Sequence[Head] | Head,
    *,
    side: Sides = "key",
    other: TokensLike | None = None,
    drop: int | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> LiveEdit:
    """Context manager: what a writer wrote in other prompts in place of what it wrote in these, in
    the inputs of ``heads`` alone.

    ``other`` are as many prompts of the same length, by default the same prompts in another order.
    See :func:`remove_edge`.
    """
    return _live(model, tokens, writer, heads, side, other, True, drop, prepend_bos, seed)
