"""The graph between two runs: the difference of a metric between a prompt and a counterfactual as
an exact sum over edges, through norms, softmax and MLPs.

Delta = clean - counterfactual, a bar is the mean of both runs. Every operation is replaced by the
linear map that takes the Delta of its input to that of its output exactly:

    norm           Delta y = gain (r- Delta x + x- rho (2 / d) x- . Delta x), x centred where the
                   norm centres, r = (mean(x^2) + eps)^-1/2, rho = Delta r / Delta mean(x^2)
    pointwise      Delta a = (Delta a / Delta g) Delta g
    product        Delta(u v) = u- Delta v + v- Delta u    (gated MLP, query key, pattern value)
    softmax        Delta p = integral over t of J(S_t) dt Delta S along the straight line of the
                   entered scores, J(S) D = p (D - p . D), by Gauss-Legendre
    linear         itself; biases drop out

One backward pass through the composed maps gives the adjoint of every reader's input, and an edge
is ``Delta write . adjoint``. Keys and values have an input for each head here; that of a group is
the sum of its heads'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.lib.reference.decoder import Block, Decoder, Norm, Run

NEAR = 1e-5
"""Relative distance below which a difference quotient is the derivative in the middle: there both
are off by about 1e-11."""
NODES, SEGMENTS = 16, 16
"""Gauss-Legendre nodes on each segment of the line between two rows of scores."""


def derivative(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """f'(x), entry by entry."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(f(x).sum(), x)[0]


def secant(f: Callable[[Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    """``(f(a) - f(b)) / (a - b)``; the derivative in the middle where a and b are near."""
    near = (a - b).abs() < NEAR * (1 + a.abs())
    quotient = (f(a) - f(b)) / torch.where(near, 1.0, a - b)
    return torch.where(near, derivative(f, (a + b) / 2), quotient)


def between_norms(norm: Norm, a: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    """The map of a norm between two inputs; a change may have axes in front of theirs."""
    a, b = norm.centre(a), norm.centre(b)
    squares = [x.square().mean(-1, keepdim=True) + norm.eps for x in (a, b)]
    near = (squares[0] - squares[1]).abs() < NEAR * squares[0]
    gap = torch.where(near, 1.0, squares[0] - squares[1])
    middle = (squares[0] + squares[1]) / 2
    rho = torch.where(near, -(middle**-1.5) / 2, (squares[0].rsqrt() - squares[1].rsqrt()) / gap)
    r, x = (squares[0].rsqrt() + squares[1].rsqrt()) / 2, (a + b) / 2

    def apply(change: Tensor) -> Tensor:
        change = norm.centre(change)
        along = (x * change).sum(-1, keepdim=True)
        return norm.gain * (r * change + x * rho * 2 / x.shape[-1] * along)

    return apply


def between_softmaxes(block: Block, a: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    """The map of soft cap and softmax between two matrices of scores (before the cap)."""
    slope = torch.ones_like(a) if block.softcap is None else secant(block.cap, a, b)
    blocked = ~block.allowed(a.shape[-1])
    entered = [block.cap(s).masked_fill(blocked, -torch.inf) for s in (a, b)]
    gap = torch.where(blocked, 0.0, block.cap(a) - block.cap(b))
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    patterns = []
    for segment in range(SEGMENTS):
        for node, weight in zip(nodes.tolist(), weights.tolist()):
            t = (segment + (node + 1) / 2) / SEGMENTS
            patterns.append((weight / 2 / SEGMENTS, (entered[1] + t * gap).softmax(-1)))

    def apply(change: Tensor) -> Tensor:
        change, total = slope * change, torch.zeros_like(a)
        for weight, p in patterns:
            total = total + weight * p * (change - (p * change).sum(-1, keepdim=True))
        return total

    return apply


@dataclass(frozen=True, eq=False)
class HeadEdges:
    """Edges into one head: ``value [i source j]``, ``query [i source]``, ``key [i source j]``."""

    names: tuple[str, ...]
    value: Tensor
    query: Tensor
    key: Tensor


@dataclass(frozen=True, eq=False)
class Contrast:
    """The linear network between two runs.

    ``value`` ``[b]`` is T(clean) - T(counterfactual). ``writes`` holds the Delta of what every
    writer wrote, ``adjoints`` dT/d(input) of every reader (``L1H2<q>``, ``<k>``, ``<v>``, ``mlp1``,
    ``output``), ``write_adjoints`` dT/d(write), all ``[b i d]``; ``score_adjoints`` and
    ``z_adjoints`` dT/d(Delta S) and dT/d(Delta z) of each layer.
    """

    decoder: Decoder
    clean: Run
    other: Run
    value: Tensor
    writes: dict[str, Tensor]
    adjoints: dict[str, Tensor]
    write_adjoints: dict[str, Tensor]
    score_adjoints: dict[int, Tensor]
    z_adjoints: dict[int, Tensor]

    def nodes(self) -> dict[str, Tensor]:
        """``Delta write . dT/d(write)`` of every writer by position, ``[b i]``."""
        adjoints = self.write_adjoints
        return {name: (x * adjoints[name]).sum(-1) for name, x in self.writes.items()}

    def edge(self, writer: str, reader: str) -> Tensor:
        """Delta write . adjoint of the reader's input, by position ``[b i]``."""
        return (self.writes[writer] * self.adjoints[reader]).sum(-1)

    def into_head(self, layer: int, head: int) -> HeadEdges:
        """Edges into one head of the first pair at every query, from every writer at every
        position; together they sum to the node's value."""
        block, names = self.decoder.blocks[layer], seen_by(self.decoder, layer)
        writes = torch.stack([self.writes[name][0] for name in names])  # [source i d]
        read = between_norms(
            block.norm, self.clean["state", layer][0], self.other["state", layer][0]
        )(writes)
        sides = {}
        for which in "qkv":
            W = block.by_head(block.weights(which)[0], 0)[head]
            projected = (read @ W).unsqueeze(2)
            sides[which] = (projected if which == "v" else self.decoder.rotate(projected))[:, :, 0]
        mean = {
            key: (self.clean[key, layer] + self.other[key, layer])[0] / 2
            for key in ("q", "k", "pattern")
        }
        c, p = block.score_scale * self.score_adjoints[layer][0, head], mean["pattern"][head]
        q, k, adjoint = mean["q"][:, head], mean["k"][:, head], self.z_adjoints[layer][0, :, head]
        return HeadEdges(
            names,
            torch.einsum("ij,sje,ie->isj", p, sides["v"], adjoint),
            torch.einsum("ij,sie,je->is", c, sides["q"], k),
            torch.einsum("ij,ie,sje->isj", c, q, sides["k"]),
        )


def seen_by(decoder: Decoder, layer: int, *, mlp: bool = False) -> tuple[str, ...]:
    """Names of the writers that the heads of a block read (its MLP, which reads its heads too)."""
    names = ["embed"]
    for l in range(layer + mlp):
        names += [f"L{l}H{h}" for h in range(decoder.n_heads)]
        names += [f"mlp{l}"] if l < layer else []
    return tuple(names)


@torch.no_grad()
def contrast(
    decoder: Decoder,
    clean: Tensor,
    other: Tensor,
    answers: Tensor,
    rivals: Tensor | None = None,
    *,
    position: int = -1,
    capped: bool = False,
) -> Contrast:
    """Two prompts of equal length, ``[b i]``, and T = logit(answer) - logit(rival) at a position,
    before a soft cap of the output or (``capped``) after it."""
    a, b = decoder.run(clean), decoder.run(other)
    with torch.enable_grad():
        return _network(decoder, a, b, answers, rivals, position, capped)


def _network(
    decoder: Decoder,
    a: Run,
    b: Run,
    answers: Tensor,
    rivals: Tensor | None,
    position: int,
    capped: bool,
) -> Contrast:
    stream = (a["state", 0] - b["state", 0]).requires_grad_()
    writes, reads, scores, mixed = {"embed": stream}, {}, {}, {}
    for l, block in enumerate(decoder.blocks):
        norm, sides = between_norms(block.norm, a["state", l], b["state", l]), {}
        for which in "qkv":
            W, heads = block.by_head(block.weights(which)[0], 0), []
            for h in range(decoder.n_heads):
                reads[f"L{l}H{h}<{which}>"] = read = stream.clone()
                heads.append(norm(read) @ W[h])
            side = torch.stack(heads, 2)
            sides[which] = side if which == "v" else decoder.rotate(side)
        middle = {key: (a[key, l] + b[key, l]) / 2 for key in ("q", "k", "v", "pattern")}
        by_query = torch.einsum("bihe,bjhe->bhij", sides["q"], middle["k"])
        by_key = torch.einsum("bihe,bjhe->bhij", middle["q"], sides["k"])
        scores[l] = block.score_scale * (by_query + by_key)
        p = between_softmaxes(block, a["scores", l], b["scores", l])(scores[l])
        mixed[l] = torch.einsum("bhij,bjhe->bihe", middle["pattern"], sides["v"]) + torch.einsum(
            "bhij,bjhe->bihe", p, middle["v"]
        )
        out = torch.einsum("bihe,hed->hbid", mixed[l], block.W_O)
        if block.after_attention is not None:
            totals = [
                torch.einsum("bihe,hed->bid", x["z", l], block.W_O) + block.b_O for x in (a, b)
            ]
            out = between_norms(block.after_attention, *totals)(out)
        for h in range(decoder.n_heads):
            writes[f"L{l}H{h}"] = write = out[h].clone()
            stream = stream + write
        reads[f"mlp{l}"] = read = stream.clone()
        writes[f"mlp{l}"] = write = _mlp(block, l, a, b, read)
        stream = stream + write
    reads["output"] = read = stream.clone()
    last = decoder.n_layers
    raw = between_norms(decoder.norm, a["state", last], b["state", last])(read) @ decoder.W_U
    if capped and (cap := decoder.logit_cap) is not None:
        slope = secant(lambda x: cap * torch.tanh(x / cap), a["raw_logits", 0], b["raw_logits", 0])
        raw = raw * slope
    rows = torch.arange(len(raw))
    value = raw[rows, position, answers]
    value = value if rivals is None else value - raw[rows, position, rivals]
    tensors = [*reads.values(), *writes.values(), *scores.values(), *mixed.values()]
    grads = torch.autograd.grad(value.sum(), tensors, allow_unused=True)
    found = iter([torch.zeros_like(x) if g is None else g for x, g in zip(tensors, grads)])
    return Contrast(
        decoder,
        a,
        b,
        value.detach(),
        {name: write.detach() for name, write in writes.items()},
        dict(zip(reads, found)),
        dict(zip(writes, found)),
        dict(zip(scores, found)),
        dict(zip(mixed, found)),
    )


def _mlp(block: Block, l: int, a: Run, b: Run, read: Tensor) -> Tensor:
    """The Delta of what the MLP writes."""
    inputs = [x["mlp_in", l][:, :, 0] for x in (a, b)]
    change = between_norms(block.mlp_norm, *inputs)(read)
    gates = a["gate", l], b["gate", l]
    hidden = secant(block.act, *gates) * (change @ block.W_gate)
    acts = [block.act(gate) for gate in gates]
    if block.W_in is not None:
        linear = a["linear", l], b["linear", l]
        hidden = hidden * (linear[0] + linear[1]) / 2
        hidden = hidden + (acts[0] + acts[1]) / 2 * (change @ block.W_in)
        acts = [act * u for act, u in zip(acts, linear)]
    out = hidden @ block.W_out
    if block.after_mlp is not None:
        totals = [act @ block.W_out + block.b_out for act in acts]
        out = between_norms(block.after_mlp, *totals)(out)
    return out
