"""Removing an edge of a logit's graph changes the logit by the edge's weight.

Hugging Face's own code runs with the frozen constants of a first pass
(:mod:`tests.circuits.frozen_hf`). What a sender wrote is taken out of what one receiver reads, and
everything behind the receiver is recomputed. Nothing of the library's arithmetic is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from torch import Tensor

from tests.circuits.frozen_hf import Edit, FrozenRun, frozen_run
from tests.circuits.test_trace import AT, PRECISION, PROMPT, complete, size
from tests.lib.models import HEADS
from tl_geometry.circuits.logit_graph import LogitGraph


class Places(NamedTuple):
    """Modules by name: those of a block, the blocks, and the final norm. ``attention_end`` and
    ``mlp_end`` give what is added to the stream."""

    blocks: str
    attention_norm: str
    projection: str
    attention_end: str
    mlp_norm: str
    mlp_end: str
    final_norm: str

    def of(self, layer: int, name: str) -> str:
        """The full name of a module of a block."""
        return f"{self.blocks}.{layer}.{getattr(self, name)}"


LLAMA = Places(
    "model.layers",
    "input_layernorm",
    "self_attn.o_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp",
    "model.norm",
)
PLACES = {
    "gpt2": Places(
        "transformer.h", "ln_1", "attn.c_proj", "attn.c_proj", "ln_2", "mlp", "transformer.ln_f"
    ),
    "llama": LLAMA,
    "qwen3": LLAMA,
    "neox": Places(
        "gpt_neox.layers",
        "input_layernorm",
        "attention.dense",
        "attention.dense",
        "post_attention_layernorm",
        "mlp",
        "gpt_neox.final_layer_norm",
    ),
    "falcon": Places(
        "transformer.h",
        "input_layernorm",
        "self_attention.dense",
        "self_attention.dense",
        "input_layernorm",
        "mlp",
        "transformer.ln_f",
    ),
    "gemma2": LLAMA._replace(
        attention_end="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_end="post_feedforward_layernorm",
    ),
}
KINDS = [
    ("embed", "head"),
    ("head", "head"),
    ("mlp", "head"),
    ("embed", "mlp"),
    ("head", "mlp"),
    ("embed", "logit"),
    ("head", "logit"),
    ("mlp", "logit"),
]


def kind(graph: LogitGraph, node: int) -> str:
    """``"head"``, ``"mlp"``, ``"embed"``, ``"logit"``; other leaves and constants by name."""
    if graph.layers[node] < 0:
        return graph.names[node]
    return "head" if graph.heads_of[node] >= 0 else "mlp"


def put(position: int, value: Tensor, part: slice = slice(None)) -> Callable[[Tensor], Tensor]:
    """A change that puts ``value`` in place of (a part of) a vector at one position."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[0, position, part] = value[part]
        return x

    return change


def less(position: int, value: Tensor) -> Callable[[Tensor], Tensor]:
    """A change that takes ``value`` off the vector at one position."""
    return lambda x: put(position, x[0, position] - value)(x)


class Node(NamedTuple):
    """A node: layer, head and position (-1 where it has none)."""

    layer: int
    head: int
    position: int

    @classmethod
    def of(cls, graph: LogitGraph, node: int) -> Node:
        return cls(*(int(x[node]) for x in (graph.layers, graph.heads_of, graph.positions)))


@dataclass
class FrozenModel:
    """The frozen Hugging Face model of one pass over the prompt."""

    architecture: str
    first: FrozenRun = field(init=False)

    def __post_init__(self) -> None:
        self.places = PLACES[self.architecture]
        self.first = frozen_run(self.architecture, PROMPT)

    def seen(self, at: Edit, *edits: Edit) -> Tensor:
        """What ``at`` sees ``[position column]``, everything recomputed with some ``edits``."""
        kept: list[Tensor] = []
        keep = Edit(at.module, lambda x: kept.append(x.clone()) or x, at.output)
        self.run(*edits, keep)
        return kept[0][0]

    def run(self, *edits: Edit) -> FrozenRun:
        again = frozen_run(self.architecture, PROMPT, given=self.first.constants, edits=edits)
        assert len(again.constants) == len(self.first.constants)
        return again

    def T(self, *edits: Edit) -> float:
        logits = self.run(*edits).logits.detach()
        return float(logits[0, AT, 5] - logits[0, AT, 9])

    def write(self, layer: int, head: int, position: int) -> Tensor:
        """What a head, an MLP (head -1) or the token embedding (layer -1) wrote, without what it
        writes for any input: its constant."""
        places = self.places
        if layer < 0:
            embed = self.first.embed if self.architecture == "gpt2" else self.first.stream
            return embed[0][0, position]
        if head < 0:
            end = see(places.of(layer, "mlp_end"), output=True)
            nothing = Edit(places.of(layer, "mlp_norm"), lambda x: 0 * x)
            return (self.seen(end) - self.seen(end, nothing))[position]
        end, before = see(places.of(layer, "attention_end"), True), places.of(layer, "projection")
        nothing = Edit(places.of(layer, "attention_norm"), lambda x: 0 * x)
        constant = self.seen(see(before), nothing)[position]
        silent = Edit(before, put(position, constant, part_of(head, constant)))
        return (self.seen(end) - self.seen(end, silent))[position]

    def without(self, source: Node, target: Node) -> float:
        """T without what a sender wrote in what one receiver reads."""
        places, wrote = self.places, less(source.position, self.write(*source))
        if target.layer < 0:
            return self.T(Edit(places.final_norm, wrote))
        if target.head < 0:
            end = see(places.of(target.layer, "mlp_end"), output=True)
            changed = self.seen(end, Edit(places.of(target.layer, "mlp_norm"), wrote))
            return self.T(end._replace(change=put(target.position, changed[target.position])))
        before = see(places.of(target.layer, "projection"))
        mixed = self.seen(before, Edit(places.of(target.layer, "attention_norm"), wrote))
        mixed = mixed[target.position]
        part = part_of(target.head, mixed)
        return self.T(before._replace(change=put(target.position, mixed, part)))


def see(module: str, output: bool = False) -> Edit:
    """A place that is looked at."""
    return Edit(module, lambda x: x, output)


def part_of(head: int, mixed: Tensor) -> slice:
    """Columns of a head in the input of the output projection."""
    width = mixed.shape[-1] // HEADS
    return slice(head * width, (head + 1) * width)


def value_edges(graph: LogitGraph) -> dict[int, list[tuple[int, float]]]:
    """(source, weight) of the value edges into each node, the largest first."""
    edges = {node: graph.edges_into(node, "value") for node in range(len(graph.names))}
    return {node: [(source, weight) for source, _, weight in x] for node, x in edges.items()}


@pytest.mark.parametrize("architecture", PLACES)
def test_removing_an_edge_changes_the_logit_by_its_weight(architecture: str) -> None:
    """The largest edge of every kind; the largest other edge into its target has another weight."""
    model, graph = FrozenModel(architecture), complete(architecture)
    T, bound = model.T(), PRECISION * size(graph)
    assert pytest.approx(graph.value, abs=bound) == T
    into = value_edges(graph)
    for wanted in KINDS:
        weight, source, target = max(
            (
                (weight, source, target)
                for target, edges in into.items()
                for source, weight in edges
                if (kind(graph, source), kind(graph, target)) == wanted and len(edges) > 1
            ),
            key=lambda edge: abs(edge[0]),
        )
        change = T - model.without(Node.of(graph, source), Node.of(graph, target))
        assert change == pytest.approx(weight, abs=bound), wanted
        assert abs(change) > 1e9 * bound, wanted
        wrong = next(x for other, x in into[target] if other != source)
        assert change != pytest.approx(wrong, abs=1e6 * bound), wanted
