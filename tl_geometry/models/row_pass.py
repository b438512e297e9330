"""How do long prompts run so that memory grows with their length, not with its square? A few query
rows at a time.

A hooked model holds ``[batch head query key]`` cells in each layer. Here it runs over a block of
tokens, with a cache of the keys and values before them, and holds ``[batch head rows key]``. The
attention is the model's own; only the order of some sums differs. :class:`RowCheck` compares the
scores and pattern of each block with recomputed ones and drops them. All other activations are
joined. ``ModelView.run_layers`` and ``run_written`` call this where their caller passes
``on_rows``; ``ModelView.run_in_rows`` (behind ``decompose``) and ``ModelView.logits_at`` always.

Prompts still run whole if they are short, if the user has set hooks (which would take a block for a
prompt), and for models that cannot run in blocks or give other states there: encoders, ALiBi (a
bias for each cell), attention sinks, Shortformer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import GeometryError, UnsupportedModelError, fail
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import KeyRanges
from tl_geometry.models.attention_spec import ignore_of, rotary_tables, unmasked
from tl_geometry.models.forward import Hook, Runner, collect
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.parameters import upcast
from tl_geometry.models.precision import in_single
from tl_geometry.models.user_hooks import names_of, without_hooks
from tl_geometry.models.verify import Measured, measured_scores, some_queries, worst_of

if TYPE_CHECKING:
    from tl_geometry.models.layers import Layers

LONG = 2**23
"""Cells of one layer's pattern of one prompt (32 MB in float32) above which prompts run in blocks
of rows: more than 1,448 tokens with four heads, 836 with twelve."""
ROW_CELLS = 9 * 2**20
"""Cells ``[batch head rows key]`` of a block: 36 MiB in float32, of which eager attention holds
four or five copies. Tensors above 32 MiB, glibc's largest threshold, come from the kernel and go
back to it; smaller ones of changing sizes leave holes in the heap. Splits, views and circuits that
go through rows of scores take blocks of this size too."""
OnRows = Callable[[int, int, Tensor], None]
"""Receives a layer, the first query of some rows, and their pattern ``[batch head query key]``:
all rows at once where the prompts ran whole."""
Take = Callable[[int, Mapping[str, Tensor]], None]
"""Receives a layer, and its activations by hook name."""


def no_rows(layer: int, start: int, pattern: Tensor) -> None:
    """The :data:`OnRows` of a caller that needs no pattern, but lets long prompts run in rows."""


@dataclass(frozen=True)
class Rows:
    """What a pass in blocks of rows does: ``on_rows`` receives the patterns, and the scores of
    ``queries`` of ``contexts`` (``None``: of no context) are compared with the model's."""

    on_rows: OnRows
    contexts: slice | None
    queries: slice

    @classmethod
    def of(
        cls,
        on_rows: OnRows | None,
        tokens: Tensor,
        verify: bool,
        row: int | None,
        queries: int | None,
    ) -> Rows | None:
        """What a pass compares: all contexts with ``verify``, else the context ``row`` alone, if
        there is one; of each about ``queries`` queries, all for ``None``. Without ``on_rows`` the
        result is ``None``: nothing runs in rows."""
        if on_rows is None:
            return None
        sampled = None if row is None else slice(row, row + 1)
        contexts = slice(None) if verify else sampled
        return cls(on_rows, contexts, some_queries(tokens.shape[1], queries))


class RowActivations(dict[str, Tensor]):
    """Activations of one layer of prompts that ran in blocks of rows, without scores and pattern:
    ``check`` holds what these gave."""

    def __init__(self, activations: Mapping[str, Tensor], check: RowCheck) -> None:
        super().__init__(activations)
        self.check = check


def of_contexts(activations: Mapping[str, Tensor], contexts: slice) -> dict[str, Tensor]:
    """The activations of some contexts of a batch; rotary tables are those of all."""
    tables = ("hook_cos", "hook_sin")
    some = {k: v if k.endswith(tables) else v[contexts] for k, v in activations.items()}
    rows = isinstance(activations, RowActivations)
    return RowActivations(some, activations.check) if rows else some


class RowCheck:
    """Mask and reconstruction errors of one layer, block by block. ``keys`` holds the keys of all
    blocks so far, ``ranges`` the mask of each block, ``found`` its errors."""

    def __init__(self, layers: Layers, layer: int, length: int, rows: Rows) -> None:
        self.layers, self.layer, self.length, self.rows = layers, layer, length, rows
        self.keys: dict[str, Tensor] = {}
        self.ranges: list[KeyRanges] = []
        self.found: list[Measured] = []

    def take(self, start: int, activations: dict[str, Tensor]) -> None:
        """Take scores and pattern of a block out of its activations."""
        prefix = f"blocks.{self.layer}.attn.hook_"
        pattern = activations.pop(f"{prefix}pattern")
        scores = activations.pop(f"{prefix}attn_scores", None)
        self.rows.on_rows(self.layer, start, pattern)
        rows = slice(start, start + pattern.shape[-2])
        ranges = self._ranges(rows, scores)
        if ranges is None or pattern.shape[-1] != rows.stop:
            what = f"mask of layer {self.layer} of {self.layers.parameters.name}"
            expected, got = "consecutive keys for each query of a long prompt", "others"
            fail(what, expected=expected, got=got, error=UnsupportedModelError)
        self.ranges.append(ranges)
        if self.rows.contexts is not None:
            contexts = self.rows.contexts
            model = {"pattern": upcast(pattern[contexts]), "mask": ranges.cells.to(pattern.device)}
            model |= {} if scores is None else {"scores": upcast(scores[contexts])}
            self._compare(rows, self._block(rows, activations, contexts), model)

    def _ranges(self, rows: slice, scores: Tensor | None) -> KeyRanges | None:
        """The keys of a block of queries: by the model's masked scores, or, where it shows none, by
        causality and the window of its settings."""
        if scores is not None:
            ignore = ignore_of(self.layers.parameters.attention(self.layer))
            return KeyRanges.of(unmasked(scores[0], ignore).any(0))
        spec = self.layers.spec(self.layer)
        i = torch.arange(rows.start, rows.stop)
        first = torch.zeros_like(i) if spec.window is None else (i + 1 - spec.window).clamp(min=0)
        return KeyRanges(first, i + 1, rows.stop)

    def _block(self, rows: slice, activations: Mapping[str, Tensor], contexts: slice) -> LayerView:
        """The layer at the positions of a block, queries and keys recomputed from its input."""
        prefix = f"blocks.{self.layer}.attn.hook_"
        recomputed = {f"{prefix}q", f"{prefix}k"}
        held = {k: v for k, v in activations.items() if k not in recomputed}
        attn = self.layers.parameters.attention(self.layer)
        if f"{prefix}cos" not in held:  # tables of all positions, from the first on
            tables = zip(("cos", "sin"), rotary_tables(attn, rows.stop), strict=True)
            held |= {f"{prefix}{name}": t[rows] for name, t in tables if t is not None}
        return self.layers._build(self.layer, of_contexts(held, contexts), False)[0]

    def _compare(self, rows: slice, block: LayerView, model: Mapping[str, Tensor]) -> None:
        """Compare the queries of a block that were asked for, with all keys so far."""
        for name, value in (("k", block.k), ("k_constant", block.k_constant)):
            put(self.keys, name, value, rows.start, self.length)
        queries = self.rows.queries
        # the queries of the whole prompt that fall into this block, counted from its first row
        at = slice((queries.start - rows.start) % queries.step, None, queries.step)
        if at.start >= rows.stop - rows.start:
            return
        keys = {name: value[:, : rows.stop] for name, value in self.keys.items()}
        seen = replace(block, **keys, **model)
        self.found.append(measured_scores(seen, at))

    @property
    def mask(self) -> KeyRanges:
        """Which keys each query may attend to."""
        first, stop = (torch.cat([getattr(r, x) for r in self.ranges]) for x in ("first", "stop"))
        return KeyRanges(first, stop, self.length)

    def measured(self) -> Measured:
        """The worst of all blocks."""
        return worst_of(self.found)


def stream(
    layers: Layers,
    tokens: Int[Tensor, "batch position"],
    names: Mapping[int, Sequence[str]],
    take: Take,
    last: str | None = None,
    rows: Rows | None = None,
) -> Tensor | None:
    """:meth:`Layers.stream`, in blocks of rows where ``rows`` are asked for and the prompts are
    long. Layers are then handed over after the pass, as :class:`RowActivations`."""
    if rows is None:
        return layers.stream(tokens, names, take, last)
    if not in_rows(layers, tokens.shape[1]):
        return layers.stream(tokens, names, _with_patterns(rows.on_rows, take), last)
    length = tokens.shape[1]
    checks = {
        layer: RowCheck(layers, layer, length, rows)
        for layer, hooks in names.items()
        if f"blocks.{layer}.attn.hook_pattern" in hooks
    }
    held: dict[int, dict[str, Tensor]] = {layer: {} for layer in names}
    ends: dict[str, Tensor] = {}

    def on_block(layer: int, activations: Mapping[str, Tensor]) -> None:
        block = dict(activations)
        if layer in checks:
            checks[layer].take(start, block)
        for name, value in block.items():
            put(held[layer], name, value, start, length)

    for start, block, runner in runners(layers, tokens):
        end = replace(layers, runner=runner).stream(block, names, on_block, last)
        if last is not None and end is not None:
            put(ends, last, end, start, length)
    for layer in names:
        of_layer = held.pop(layer)
        take(layer, RowActivations(of_layer, checks.pop(layer)) if layer in checks else of_layer)
    return None if last is None else ends[last]


def runners(layers: Layers, tokens: Tensor) -> Iterator[tuple[int, Tensor, Runner]]:
    """The blocks of a pass: first query, tokens, and the runner behind all blocks before. Each must
    run before the next is asked for."""
    ids, runner = layers.runner.checked(tokens), layers.runner
    cache = runner.empty_cache(len(ids))
    for start, stop in row_blocks(ids.shape[1], ROW_CELLS // (len(ids) * _heads(layers))):
        block = ids[:, start:stop]
        yield start, block, runner.behind(cache, block)


def run(layers: Layers, tokens: Tensor, hooks: Mapping[str, Hook]) -> None:
    """One pass in blocks of rows for hooks that change nothing; they receive all positions after
    it."""
    held: dict[str, Tensor] = {}
    for start, block, runner in runners(layers, tokens):
        for name, value in collect(runner, block, list(hooks)).items():
            put(held, name, value, start, tokens.shape[1])
    for name, hook in hooks.items():
        hook(held.pop(name))


def logits_at(layers: Layers, tokens: Tensor, position: int) -> Tensor:
    """Logits ``[batch d_vocab]`` of one position; the logits of other blocks are never computed."""
    logits = None
    if in_rows(layers, tokens.shape[1]):
        for start, block, runner in runners(layers, tokens[:, : position + 1]):
            here = start + block.shape[1] > position
            # without logits the runner stops behind its last hook: the one of the last state
            last = {} if here else {runner.state_hooks[-1]: lambda h: None}
            logits = runner(block, last, logits=here)
        last_place = -1
    else:
        logits, last_place = layers.runner(tokens, {}, logits=True), position
    assert logits is not None
    return logits[:, last_place]


def _with_patterns(on_rows: OnRows, take: Take) -> Take:
    """Hands over all rows of the pattern of a layer, then the layer."""

    def on_layer(layer: int, activations: Mapping[str, Tensor]) -> None:
        pattern = activations.get(f"blocks.{layer}.attn.hook_pattern")
        if pattern is not None:
            on_rows(layer, 0, pattern)
        take(layer, activations)

    return on_layer


def put(into: dict[str, Tensor], name: str, block: Tensor, start: int, length: int) -> None:
    """Put the activations of a block where they belong among those of all positions.

    Their memory is taken once: blocks that are joined at the end would be held twice.
    """
    dim = min(1, block.dim() - 2)  # [batch position ...], or rotary tables of [position ...]
    if name not in into:
        into[name] = block.new_empty((*block.shape[:dim], length, *block.shape[dim + 1 :]))
    into[name].narrow(dim, start, block.shape[dim]).copy_(block)


def row_blocks(length: int, cells: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of blocks of query rows, ``stop`` excluded. The rows of a block with
    all keys before ``stop`` have at most ``cells`` cells, but a block has at least one row.

    Blocks have one size, not one number of rows, so that the memory of one serves the next.

    >>> list(row_blocks(10, 24))
    [(0, 4), (4, 7), (7, 9), (9, 10)]
    """
    start = 0
    while start < length:
        rows = (math.isqrt(start**2 + 4 * cells) - start) // 2  # rows (start + rows) = cells
        stop = min(length, start + max(1, rows))
        yield start, stop
        start = stop


def query_slices(q: Float[Tensor, "batch query head d_head"]) -> Iterator[slice]:
    """All query rows in slices, so that ``[batch head row key]`` has at most :data:`ROW_CELLS`
    cells (but at least one row)."""
    batch, length, heads, _ = q.shape
    step = max(1, ROW_CELLS // (batch * heads * length))
    return (slice(start, start + step) for start in range(0, length, step))


def _heads(layers: Layers) -> int:
    return layers.probe["blocks.0.attn.hook_pattern"].shape[1]


def in_rows(layers: Layers, length: int) -> bool:
    """Whether prompts of this length run in blocks of rows: they are long, no hooks act, and a
    short prompt has the same last state in blocks as whole (:func:`_agrees`)."""
    if not layers.causal or "blocks.0.attn.hook_pattern" not in layers.probe:
        return False
    long = _heads(layers) * length**2 > LONG
    return long and not names_of(layers.parameters.model) and _agrees(layers)


def _agrees(layers: Layers) -> bool:
    """Whether twelve random tokens give the same last state in blocks as whole; asked once. They do
    not reach the end of a sliding window: :class:`RowCheck` sees it in contexts that are
    verified."""
    runner, model = layers.runner, layers.parameters.model
    if "rows" not in layers.memo:
        cached = runner.class_name == "HookedTransformer" or "use_cache" in runner.kwargs
        layers.memo["rows"] = cached and _plain(layers)
        if layers.memo["rows"]:
            with without_hooks(model):
                (whole, blocks), _ = in_single(model, lambda: _short_states(layers))
            # 1000 units of the largest state, for rounding that adds up over all layers; a wrong
            # cache is off by far more
            bound = 1e3 * unit_roundoff(whole.dtype) * float(whole.abs().max())
            layers.memo["rows"] = float((whole - blocks).abs().max()) <= bound
    return layers.memo["rows"]


def _plain(layers: Layers) -> bool:
    """Whether attention is known, and has no bias, sinks or positions of its own."""
    try:
        specs = [layers.spec(layer) for layer in range(len(layers.runner.state_hooks) - 1)]
    except GeometryError:  # decompose takes models whose attention no specification fits
        return False
    return all(s.bias_form is None and s.sinks is None and s.added is None for s in specs)


def _short_states(layers: Layers) -> tuple[Tensor, Tensor]:
    """The last state of twelve random tokens, as a whole and in blocks of five, five and two."""
    generator, runner = torch.Generator().manual_seed(2), layers.runner
    ids = torch.randint(0, runner.d_vocab, (1, min(12, runner.n_ctx)), generator=generator)
    last, cache = runner.state_hooks[-1], runner.empty_cache(1)
    whole = collect(runner, ids, [last])[last]
    blocks = [collect(runner.behind(cache, b), b, [last])[last] for b in ids.split(5, 1)]
    return whole, torch.cat(blocks, 1)
