"""One logit as a graph back to the tokens (SPEC P.1 to P.3): the frozen model by autograd of the
explicit decoder, and every edge as a sum.

T is the logit of one token, less that of another, at one position, before a soft cap. In the frozen
run (norm scales, patterns, MLP secants as they were) T is affine in the embeddings. ``value`` of a
node is its write times dT/d(write) there; ``moved`` is what the derivative adds when patterns
follow too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tests.lib.reference.decoder import Decoder, Run, secants

Names = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Graph:
    """The frozen run of one prompt. ``answer`` and ``other`` are token ids."""

    decoder: Decoder
    run: Run
    answer: int
    other: int | None
    position: int
    mlp_leaf: bool = False

    @staticmethod
    def of(
        decoder: Decoder,
        tokens: Tensor,
        answer: int,
        other: int | None = None,
        position: int = -1,
        *,
        mlp_leaf: bool = False,
    ) -> Graph:
        """The graph of one prompt ``[1 position]``; with ``mlp_leaf`` MLPs are leaves."""
        run = decoder.run(tokens)
        return Graph(decoder, run, answer, other, position % tokens.shape[1], mlp_leaf)

    # -- adjoints

    def target(self, run: Run) -> Tensor:
        """T in some run."""
        logits = run["raw_logits", 0][0, self.position]
        return logits[self.answer] - (0.0 if self.other is None else logits[self.other])

    @property
    def value(self) -> float:
        """T."""
        return float(self.target(self.run))

    def _linear(self, follow: bool) -> Run:
        """The frozen run again, with gradients of everything in it."""
        first = self.run["state", 0].detach().clone().requires_grad_()
        hooks = {}
        if self.mlp_leaf:  # what MLPs wrote are inputs of their own
            for l in range(self.decoder.n_layers):
                leaf = self.run["mlp", l].detach().clone().requires_grad_()
                hooks["mlp", l] = lambda value, run, leaf=leaf: leaf
        with torch.enable_grad():
            return self.decoder.run(None, hooks, first=first, frozen=self.run, follow=follow)

    def adjoints(self, *, follow: bool = False) -> dict[tuple[str, int], Tensor]:
        """dT/d(value) of states, mixed values z, head writes and MLP writes; with ``follow`` of
        scores too (P.3)."""
        run = self._linear(follow)
        names = ("state", "z", "writes", "mlp", *(("scores",) if follow else ()))
        keys = [key for key in run if key[0] in names]
        # blocks behind the last reader of scores give none
        found = torch.autograd.grad(self.target(run), [run[key] for key in keys], allow_unused=True)
        return {
            key: torch.zeros_like(run[key]) if grad is None else grad
            for key, grad in zip(keys, found)
        }

    @cached_property
    def frozen(self) -> dict[tuple[str, int], Tensor]:
        """Adjoints along value paths."""
        return self.adjoints()

    @cached_property
    def following(self) -> dict[tuple[str, int], Tensor]:
        """Adjoints that also follow queries and keys into the softmax."""
        return self.adjoints(follow=True)

    # -- writes

    @cached_property
    def constants(self) -> dict[tuple[str, int], Tensor]:
        """What attention and MLP of each block write whatever the stream is, ``[i d]``: the frozen
        block run on zeros. A head's is ``(beta W_V + b_V) W_O`` and the biases."""
        found, run = {}, self.run
        for l, block in enumerate(self.decoder.blocks):
            zero = torch.zeros_like(run["v_in", l])
            v = self.decoder.project(l, "v", zero, run["v_scale", l])
            z = torch.einsum("bhij,bjhe->bihe", run["pattern", l], v)
            writes = torch.einsum("bihe,hed->hbid", z, block.W_O)
            writes = writes + block.b_O / self.decoder.n_heads
            if (norm := block.after_attention) is not None:
                writes = norm.linear(writes, run["after_attention_scale", l])
                writes = writes + norm.bias / self.decoder.n_heads
            found["writes", l] = writes[:, 0]
            found["mlp", l] = self._mlp_of(l, torch.zeros_like(run["state", l]))
            if self.mlp_leaf:  # its output bias alone, where no norm is behind it
                bias = block.b_out if block.after_mlp is None else torch.zeros_like(block.b_out)
                found["mlp", l] = bias.expand_as(found["mlp", l])
        return found

    def _mlp_of(self, l: int, stream: Tensor) -> Tensor:
        """The frozen MLP of a stream ``[1 i d]``: what it writes, ``[i d]``."""
        block, run = self.decoder.blocks[l], self.run
        x = block.mlp_norm.linear(stream, run["mlp_scale", l][:, :, 0]) + block.mlp_norm.bias
        slope, other = secants(block, run["gate", l], run.get(("linear", l)))
        hidden = slope * (x @ block.W_gate + block.b_gate)
        if block.W_in is not None:
            hidden = hidden + other * (x @ block.W_in)
        out = hidden @ block.W_out + block.b_out
        if (norm := block.after_mlp) is not None:
            out = norm.linear(out, run["after_mlp_scale", l]) + norm.bias
        return out[0]

    def leaves(self, parts: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Parts of state 0 by name, ``[i d]``: embeddings, or those given (``[1 i d]``)."""
        if parts is None:
            names = ("embed", "pos_embed")
            parts = {name: self.run[name, 0] for name in names if (name, 0) in self.run}
        return {name: part[0] for name, part in parts.items()}

    def writes(self, parts: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The write of every writer without its constant, ``[i d]``, in the order of writing."""
        found = self.leaves(parts)
        for l in range(self.decoder.n_layers):
            heads = self.run["writes", l][:, 0] - self.constants["writes", l]
            found |= {f"L{l}H{h}": head for h, head in enumerate(heads)}
            found[f"mlp{l}"] = self.run["mlp", l][0] - self.constants["mlp", l]
        return found

    def _adjoint_of(self, name: str, adjoints: dict[tuple[str, int], Tensor]) -> Tensor:
        """dT/d(write) of a writer, ``[i d]``."""
        if name.startswith("L"):
            layer, head = name[1:].split("H")
            return adjoints["writes", int(layer)][int(head), 0]
        if name.startswith("mlp"):
            return adjoints["mlp", int(name[3:])][0]
        return adjoints["state", 0][0]

    def values(self, parts: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """``write . adjoint`` of every writer at every position, ``[i]`` by name, and of all
        constants (with the readout's) as one number, ``constants``. Leaves and constants sum to T
        (P.2, law a)."""
        return self._values(self.frozen, parts)

    def moved(self, parts: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What the same gives more where patterns follow (P.8's second number)."""
        more, less = self._values(self.following, parts), self._values(self.frozen, parts)
        return {name: more[name] - less[name] for name in more}

    def _values(
        self, adjoints: dict[tuple[str, int], Tensor], parts: dict[str, Tensor] | None
    ) -> dict[str, Tensor]:
        found = {
            name: (write * self._adjoint_of(name, adjoints)).sum(-1)
            for name, write in self.writes(parts).items()
        }
        constant = torch.tensor(self.readout_constant, dtype=torch.float64)
        for (name, l), write in self.constants.items():
            adjoint = adjoints[name, l][:, 0] if name == "writes" else adjoints[name, l][0]
            constant = constant + (write * adjoint).sum()
        return found | {"constants": constant}

    @property
    def readout_constant(self) -> float:
        """T of a last state of zeros: the final norm's bias through the unembedding."""
        logits = self.decoder.norm.bias @ self.decoder.W_U
        return float(logits[self.answer] - (0.0 if self.other is None else logits[self.other]))

    # -- edges
