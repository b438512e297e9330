"""Which edges does a model have? Its writers, its readers, and who is read by whom; edge scores and
pruned runs ask here.

Writers are the embedding (the first state), every head and every MLP. Readers are the query of
every head, the key and the value of every group of heads that share them, the input of every MLP,
and the output. Writers stand in the order in which they write, so that a reader sees the first
``seen`` of them, and an edge is a reader with one writer that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tl_geometry.models.mlp import live_mlp
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.write_spec import require_decoder

EMBED, OUTPUT = "embed", "output"
"""The first writer and the last reader."""
KINDS = ("q", "k", "v", "mlp")
"""Kinds of readers of a block, in the order of the list of readers."""


@dataclass(frozen=True)
class EdgeLayout:
    """The writers and readers of a model by name: ``"embed"``, ``"L5H1"``, ``"mlp5"``;
    ``"L5H1<q>"``, ``"L5H0-2<k>"`` (heads 0 to 2 share a key), ``"mlp5"``, ``"output"``. ``seen``
    says how many writers each reader sees, the first so many; ``borders`` of each block where
    its readers begin, and where those of each kind end.

    >>> import tl_geometry as tlg
    >>> layout = EdgeLayout.of(tlg.view(tlg.zoo.embedded()))
    >>> layout.writers[:2], layout.readers[4:6], layout.seen[-1] == len(layout.writers)
    (('embed', 'L0H0'), ('L0H0<k>', 'L0H1<k>'), True)
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    seen: tuple[int, ...]
    borders: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, view: ModelView) -> EdgeLayout:
        """The layout of a decoder.

        Raises ``UnsupportedModelError`` for an encoder, and for an MLP that gives something else
        than its module does for a norm of the stream.
        """
        require_decoder(view, f"edges of {view.name}")
        writers, readers, borders = [EMBED], [], []
        for layer in range(view.n_layers):
            mlp, groups, before = live_mlp(view, layer), view.key_heads(layer), len(writers)
            size, heads = view.n_heads // groups, range(view.n_heads)
            shared = [f"{h}" if size == 1 else f"{h}-{h + size - 1}" for h in heads[::size]]
            sizes = (len(readers), len(heads), groups, groups, int(mlp is not None))
            borders.append(tuple(accumulate(sizes)))
            readers += [(f"L{layer}H{head}<q>", before) for head in heads]
            readers += [(f"L{layer}H{group}<{side}>", before) for side in "kv" for group in shared]
            writers += [f"L{layer}H{head}" for head in heads]
            if mlp is not None:
                readers.append((f"mlp{layer}", before if mlp.parallel else len(writers)))
                writers.append(f"mlp{layer}")
        names, seen = zip(*readers, (OUTPUT, len(writers)), strict=True)
        return cls(tuple(writers), names, seen, tuple(borders))

    def of_block(self, layer: int, kind: str) -> slice:
        """Numbers of the readers of one kind in a block (none of an MLP that is not there)."""
        at = KINDS.index(kind)
        return slice(*self.borders[layer][at : at + 2])

    @property
    def allowed(self) -> Bool[Tensor, "row writer"]:
        """Which pairs of reader (a row) and writer are edges."""
        return torch.arange(len(self.writers)) < torch.tensor(self.seen).unsqueeze(1)

    def ends(self) -> tuple[Int[Tensor, " edge"], Int[Tensor, " edge"]]:
        """Writer and reader of every edge, reader by reader."""
        targets, sources = self.allowed.nonzero().unbind(1)
        return sources, targets

    def pairs(self) -> list[tuple[str, str]]:
        """Writer and reader of every edge by name."""
        ends = zip(*(end.tolist() for end in self.ends()), strict=True)
        return [(self.writers[source], self.readers[target]) for source, target in ends]

    def edge_names(self) -> tuple[str, ...]:
        """Every edge by name, ``"L0H3->L5H1<q>"``."""
        return tuple(f"{writer}->{reader}" for writer, reader in self.pairs())

    def kept(self, edges: Bool[Tensor, " edge"]) -> Bool[Tensor, "row writer"]:
        """A set of edges as a matrix of readers and writers."""
        kept = torch.zeros_like(self.allowed)
        kept[self.allowed] = edges
        return kept
