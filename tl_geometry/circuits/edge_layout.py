"""Which edges does a model have? Its writers, its readers, and who is read by whom; edge scores,
pruned runs ask here.

Writers are the embedding (the first state), every head and every MLP. Readers are the query of
every head, the key and the value of every group of heads that share them, the input of every MLP,
and the output. Writers stand in the order in which they write, so that a reader sees the first
``seen`` of them, and an edge is a reader with one writer that it sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_geometry.models.mlp import live_mlp
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.write_spec import require_decoder

EMBED, OUTPUT = "embed", "output"
"""The first writer and the last reader."""
NO_MLP, SEQUENTIAL, PARALLEL = "none", "sequential", "parallel"
"""What the MLP of a block reads: there is none, the stream after attention, or that before it."""


class LayerReaders(NamedTuple):
    """Numbers of the readers of one block in the list of readers (``mlp`` is empty without one)."""

    query: slice
    key: slice
    value: slice
    mlp: slice


@dataclass(frozen=True)
class EdgeLayout:
    """The writers and readers of a model: ``n_key_heads[l]`` groups of heads of block l share keys
    and values, ``mlps[l]`` says what its MLP reads.

    >>> layout = EdgeLayout(
    ...     n_layers=1, n_heads=2, d_model=8, n_key_heads=(1,), mlps=("sequential",)
    ... )
    >>> layout.writers, layout.readers[:4]
    (('embed', 'L0H0', 'L0H1', 'mlp0'), ('L0H0<q>', 'L0H1<q>', 'L0H0-1<k>', 'L0H0-1<v>'))
    >>> layout.readers[4:], layout.seen
    (('mlp0', 'output'), (1, 1, 1, 1, 3, 4))
    """

    n_layers: int
    n_heads: int
    d_model: int
    n_key_heads: tuple[int, ...]
    mlps: tuple[str, ...]

    @classmethod
    def of(cls, view: ModelView) -> EdgeLayout:
        """The layout of a decoder.

        Raises ``UnsupportedModelError`` for an encoder, and for an MLP that gives something else
        than its module does for a norm of the stream.
        """
        require_decoder(view, f"edges of {view.name}")
        mlps = [live_mlp(view, layer) for layer in range(view.n_layers)]
        return cls(
            n_layers=view.n_layers,
            n_heads=view.n_heads,
            d_model=view.d_model,
            n_key_heads=tuple(view.key_heads(layer) for layer in range(view.n_layers)),
            mlps=tuple(
                NO_MLP if mlp is None else PARALLEL if mlp.parallel else SEQUENTIAL for mlp in mlps
            ),
        )

    def _layers(self) -> Iterator[tuple[int, int, int, str]]:
        """Of every block its number, the number of writers before it, the size of a group of heads,
        and what its MLP reads."""
        before = 1
        for layer, mlp in enumerate(self.mlps):
            yield layer, before, self.n_heads // self.n_key_heads[layer], mlp
            before += self.n_heads + (mlp != NO_MLP)

    @property
    def writers(self) -> tuple[str, ...]:
        """Names of the writers."""
        names = [EMBED]
        for layer, _, _, mlp in self._layers():
            names += [f"L{layer}H{head}" for head in range(self.n_heads)]
            names += [f"mlp{layer}"] if mlp != NO_MLP else []
        return tuple(names)

    @property
    def head_writers(self) -> Int[Tensor, " head"]:
        """Numbers of the heads among the writers, layer by layer."""
        return torch.tensor([i for i, name in enumerate(self.writers) if name[0] == "L"])

    def _rows(self) -> list[tuple[str, int]]:
        """Each reader's name, and how many writers it sees: the first so many."""
        rows: list[tuple[str, int]] = []
        for layer, before, size, mlp in self._layers():
            rows += [(f"L{layer}H{head}<q>", before) for head in range(self.n_heads)]
            firsts = range(0, self.n_heads, size)
            groups = [f"{h}" if size == 1 else f"{h}-{h + size - 1}" for h in firsts]
            rows += [(f"L{layer}H{group}<{side}>", before) for side in "kv" for group in groups]
            seen = before + (self.n_heads if mlp == SEQUENTIAL else 0)
            rows += [(f"mlp{layer}", seen)] if mlp != NO_MLP else []
        return [*rows, (OUTPUT, len(self.writers))]

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of the readers: ``"L5H1<q>"``, ``"L5H0-2<k>"`` (heads 0 to 2 share a key),
        ``"mlp5"``, ``"output"``."""
        return tuple(name for name, _ in self._rows())

    @property
    def seen(self) -> tuple[int, ...]:
        """How many writers each reader sees: the first so many."""
        return tuple(seen for _, seen in self._rows())

    def layer_readers(self) -> Iterator[LayerReaders]:
        """The readers of each block."""
        at = 0
        for layer, _, _, mlp in self._layers():
            groups, slices = self.n_key_heads[layer], []
            for size in (self.n_heads, groups, groups, int(mlp != NO_MLP)):
                slices.append(slice(at, at + size))
                at += size
            yield LayerReaders(*slices)

    @property
    def allowed(self) -> Bool[Tensor, "row writer"]:
        """Which pairs of reader (a row) and writer are edges."""
        return torch.arange(len(self.writers)) < torch.tensor(self.seen).unsqueeze(1)

    def ends(self) -> tuple[Int[Tensor, " edge"], Int[Tensor, " edge"]]:
        """Writer and reader of every edge, reader by reader."""
        targets, sources = self.allowed.nonzero().unbind(1)
        return sources, targets

    def edge_names(self) -> tuple[str, ...]:
        """Every edge by name, ``"L0H3->L5H1<q>"``."""
        writers, readers = self.writers, self.readers
        ends = zip(*(end.tolist() for end in self.ends()), strict=True)
        return tuple(f"{writers[source]}->{readers[target]}" for source, target in ends)

    def kept(self, edges: Bool[Tensor, " edge"]) -> Bool[Tensor, "row writer"]:
        """A set of edges as a matrix of readers and writers."""
        kept = torch.zeros_like(self.allowed)
        kept[self.allowed] = edges
        return kept
