"""A logit on its way back through the blocks: what every component wrote, and how T changes with
it. :func:`tl_geometry.trace_logit` makes a graph of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base.errors import ReconstructionError, require
from tl_geometry.circuits.arithmetic import Between, Frozen, Live, difference
from tl_geometry.circuits.runner import Attended, Block, BlockRun, Runner, States
from tl_geometry.circuits.streams import Apart, Write
from tl_geometry.corpus.prompt_sets import Prompts
from tl_geometry.models.mlp import mlp_spec
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.write_spec import writing_of
from tl_geometry.models.writers import Written

KEPT_BYTES = 2**29
"""Most bytes that heads make in runs which are kept for the walk back and the edges; the rest of a
run is at most about as much."""


class Values(NamedTuple):
    """A number for every component at every position, and one for all constants, in float64;
    perhaps with one more axis in front."""

    leaves: Float[Tensor, "*way part position"]
    heads: Float[Tensor, "*way layer head position"]
    mlps: Float[Tensor, "*way layer position"]
    constant: Float[Tensor, "*way"]

    def map(self, f: Callable[[Tensor], Tensor]) -> Values:
        """A function of each."""
        return Values(*map(f, self))

    def flat(self) -> Float[Tensor, " row"]:
        """Leaves, heads and MLPs in one row."""
        return torch.cat([x.flatten() for x in self[:3]])


class Layer(NamedTuple):
    """What a walk back leaves of one block, for one prompt (or pair): values of heads, of the MLP
    and of all constants together, and dT/d(mixed values), by values alone and then with patterns
    (``way``; between two prompts one that is both); dT/d(stream that the MLP reads) through it
    alone; what the MLP wrote without constants, and the constants of attention and MLP; what heads
    wrote straight to the logit."""

    heads: Float[Tensor, "way head position"]
    mlps: Float[Tensor, "way position"]
    constants: Float[Tensor, " way"]
    z: Float[Tensor, "way position head d_head"]
    mlp_read: Write
    mlp: Write
    attention_constant: Write
    mlp_constant: Write
    direct_heads: Float[Tensor, "head source"]


@dataclass(eq=False)
class Walk:
    """A logit on its way back. ``leaves`` are the embeddings by name (between two runs their
    differences) and ``constant`` what a norm behind them added to their sum; ``adjoints`` are
    dT/d(state 0), by values and with patterns; ``rounding`` is what the sum rounds with beside its
    own terms. ``runs`` are those of all blocks where they fit, or they are made twice more."""

    runner: Runner
    arithmetic: Callable[[], Live]
    states: States
    runs: list[BlockRun]
    answers: tuple[int, ...]
    position: int
    leaf: bool
    between: bool
    direction: Float[Tensor, " d_model"]
    readout_constant: float
    value: float
    rounding: float
    leaves: dict[str, Write]
    constant: Write
    layers: list[Layer] = field(default_factory=list)
    adjoints: list[Write] = field(default_factory=list)

    @classmethod
    def of(cls, view: ModelView, asked: Prompts, tokens: Tensor, at: int, *, leaf: bool) -> Walk:
        """Run the model over ``tokens``, a prompt and perhaps its counterfactual."""
        view.require_gradients()
        between = len(tokens) == 2
        answers = [ids for ids in (asked.answers, asked.others) if ids is not None]
        expected, got = "answer=, the token whose logit is traced", "none"
        require(asked.answers is not None, "answer", expected=expected, got=got)
        ids = tuple(int(x) for x in answers)
        differ, text = len(set(ids)) == len(ids), repr(view.decode(ids[:1])[0])
        expected = "two different tokens"
        require(differ, "answer, other", expected=expected, got=f"{text} twice")
        if not leaf:
            for layer in range(view.n_layers):
                mlp_spec(view, layer)  # refuses a mixture of experts by name
        runner = Runner.of(view, tokens)
        arithmetic = Between if between else Frozen
        # four arrays of scores and of writes, four bytes a number
        heads, (batch, length) = sum(block.n_heads for block in runner.blocks), tokens.shape
        few = 16 * batch * length * heads * (length + view.d_model) <= KEPT_BYTES
        kept = list[BlockRun]() if few else None
        states = runner.verified(tokens, arithmetic, position=at, kept=kept, leaf=leaf)
        head, last = runner.head, states.streams[-1][:, [at]]
        signs = torch.tensor([1.0, -1.0], device=last.device).to(last)[: len(ids)]
        readout = head.W_U[:, list(ids)].to(last) @ signs
        with torch.no_grad():
            direction = arithmetic().map(head.norm, last).adjoint(readout)[0, 0]
        normed = head.norm.apply(last)[:, 0].double()
        read, size = normed @ readout.double(), normed.abs() @ readout.abs().double()
        bias = float(head.b_U[list(ids)].double() @ signs.double())
        constant = float(head.norm.bias.double() @ readout.double()) + bias
        # between two runs each logit rounds by its own size, in every block
        rounding = len(runner.blocks) * float(size.sum())
        own = (0.0, float(read[0] - read[-1]), rounding)
        own = own if between else (constant, float(read[0]) + bias, 0.0)
        written = Written(view, writing_of(view), states.embedded)
        parts = {name: part.to(last) for name, part in written.dense.items()}
        leaves = {n: difference(x)[0] if between else x[0] for n, x in parts.items()}
        first = written.constants.to(last)[0] * (not between)
        runs = (runner, arithmetic, states, kept or [])
        return cls(*runs, ids, at, leaf, between, direction, *own, leaves, first)

    # ---- the walk

    def one(self, x: Tensor) -> Tensor:
        """The prompt of a batch of one; between two runs their difference."""
        return difference(x)[0] if self.between else x[0]

    def both(self, adjoint: Tensor) -> Tensor:
        """A gradient for the batch."""
        return torch.stack([adjoint, -adjoint]) if self.between else adjoint.unsqueeze(0)

    def walk(self) -> None:
        """From the last block to the first."""
        last = torch.zeros_like(self.states.streams[-1][0])
        last[self.position] = self.direction
        follow = (True,) if self.between else (False, True)
        adjoints = [self.both(last) for _ in follow]
        for block, entered in zip(reversed(self.runner.blocks), self.states.streams[-2::-1]):
            kept = self.runs[block.number] if self.runs else None
            run = kept or block.tracked(entered, self.arithmetic(), leaf=self.leaf)
            behind, grads = torch.stack([x[0] for x in adjoints]), []
            for i, patterns in enumerate(follow):
                adjoints[i] = run.pull(adjoints[i], patterns=patterns)
                grads.append(run.grads)
            with torch.no_grad():
                self.layers.insert(0, self._layer(run, grads, behind))
        self.adjoints = [adjoint[0] for adjoint in adjoints]

    def _layer(
        self,
        run: BlockRun,
        grads: list[dict[str, Tensor]],
        behind: Float[Tensor, "way position d_model"],
    ) -> Layer:
        heads, head_constants, mlp, mlp_constant = self.writes(run)
        of_heads = torch.stack([g["heads"][:, 0] for g in grads])
        constants = dot(head_constants, of_heads[:, 0]) + dot(mlp_constant, behind)
        return Layer(
            dot(heads, of_heads),
            dot(mlp, behind),
            constants.sum(-1),
            torch.stack([g["z"][0] for g in grads]),
            grads[0]["mlp read"][0] if "mlp read" in grads[0] else torch.zeros_like(mlp),
            mlp,
            head_constants,
            mlp_constant,
            self._direct(run),
        )

    def attended(self, block: Block) -> tuple[Attended, Float[Tensor, "head query key"]]:
        """Attention of a block as it was run, and dT/d(scores)."""
        if self.runs:
            run = self.runs[block.number]
            return run.attention, run.grads["scores"][0]
        with torch.enable_grad():
            seen = block.attend(Apart(self.states.streams[block.number]), self.arithmetic())
            cotangent = self.both(self.layers[block.number].z[-1])
            return seen, torch.autograd.grad(seen.z, seen.scores, cotangent)[0][0]

    def writes(
        self, run: BlockRun
    ) -> tuple[Float[Tensor, "head position d_model"], Write, Write, Write]:
        """What heads and MLP wrote without constants, each followed by its constants (of all heads
        together); between two runs the differences, which have none."""
        constant = torch.zeros_like(run.after[0])
        mlp = constant if run.mlp is None else self.one(run.mlp.detach())
        block, frozen = run.block, run.arithmetic
        if isinstance(frozen, Frozen) and run.mlp is not None and block.mlp is not None:
            if self.leaf:
                constant = constant + writing_of(self.runner.view).blocks[block.number].b_out
            else:  # its last maps: the activation, perhaps a norm; a norm gives its bias of nothing
                last = frozen.again(1 + (block.mlp.after.norm_type is not None))
                bias = block.mlp.before.bias.to(run.after)
                constant = block.mlp_of(bias.expand(1, 1, -1), last)[0]
        heads = self.head_writes(block, run.attention, frozen)
        return *heads, mlp - constant, constant

    def head_writes(
        self, block: Block, seen: Attended, arithmetic: Live
    ) -> tuple[Float[Tensor, "head position d_model"], Write]:
        """What heads wrote without their constants, and these of all heads together."""
        heads = block.written(seen.z.detach(), arithmetic)
        if not isinstance(arithmetic, Frozen):
            return heads[:, 0] - heads[:, 1], torch.zeros_like(heads[0, 0])
        paid = seen.pattern.detach().sum(-1)  # one, less what a sink takes
        each = einsum(block.layer.constant("v"), block.layer.weights.W_O, "h e, h e d -> h d")
        behind = block.after is not None and block.after.norm_type is not None
        constants = einsum(paid, each, "b h i, h d -> h b i d")
        constants = block.added(constants, arithmetic.again(int(behind)))[:, 0]
        return heads[:, 0] - constants, constants.sum(0)

    def written(
        self, block: Block, seen: Attended, which: str
    ) -> Float[Tensor, "position head d_head"]:
        """What queries, keys or values are beside constant values; between two runs their
        difference."""
        entering = seen.sides[which].entering.detach()
        if which == "v" and not self.between:
            entering = entering - block.layer.constant("v")
        return self.one(entering)

    def _direct(self, run: BlockRun) -> Float[Tensor, "head source"]:
        """What each head wrote straight to the logit, by source."""
        seen, v = run.attention, self.written(run.block, run.attention, "v")
        with torch.enable_grad():
            z = seen.z[:, [self.position]].detach().requires_grad_()
            heads = run.block.written(z, self.arithmetic()).sum(0)
            last = self.both(self.direction.unsqueeze(0))
            readout = torch.autograd.grad(heads, z, last)[0][0, 0]
        pattern = seen.pattern[:, :, self.position].detach()
        readout, towards = readout.double(), "j h e, h e -> h j"
        found = pattern.mean(0) * einsum(v.double(), readout, towards)
        if self.between:
            values = seen.sides["v"].entering.detach().mean(0)
            found = found + difference(pattern)[0] * einsum(values.double(), readout, towards)
        return found

    # ---- values

    def values(self) -> Values:
        """``write . dT/d(write)`` of every component, along value paths and with those that
        patterns add (``way``)."""
        adjoint = torch.stack(self.adjoints)
        constant = dot(self.constant, adjoint).sum(-1) + self.readout_constant
        found = Values(
            torch.stack([dot(leaf, adjoint) for leaf in self.leaves.values()], 1),
            torch.stack([layer.heads for layer in self.layers], 1),
            torch.stack([layer.mlps for layer in self.layers], 1),
            constant + torch.stack([layer.constants for layer in self.layers]).sum(0),
        )
        return found.map(Tensor.cpu)

    def straight(self) -> Values:
        """What every component wrote straight to the logit, from where that is read."""
        at, blocks = self.position, writing_of(self.runner.view).blocks
        biases = torch.stack([block.b_out.to(self.constant) for block in blocks])
        biases = biases * (not self.between)
        mlps = torch.stack([(layer.mlp + layer.mlp_constant)[at] for layer in self.layers])
        constants = torch.stack([layer.attention_constant[at] for layer in self.layers]) + biases
        constant = dot(self.constant[at] + constants.sum(0), self.direction)
        found = Values(
            dot(torch.stack([leaf[at] for leaf in self.leaves.values()]), self.direction),
            torch.stack([layer.direct_heads.sum(1) for layer in self.layers]),
            dot(mlps - biases, self.direction),
            constant + self.readout_constant,
        )
        return found.map(Tensor.cpu)

    def require_sum(self, values: Values) -> None:
        """Raise where leaves and constants do not sum to T within the rounding of all that is added
        up on the way."""
        total = float(values.leaves.sum() + values.constant)
        total += float(values.mlps.sum()) if self.leaf else 0.0
        size = float(values.flat().abs().sum() + values.constant.abs()) + self.rounding
        bound = reconstruction_bound(self.runner.view.roundoff, size)
        # NaN is refused too
        fits, what = abs(total - self.value) <= bound, f"logit of {self.runner.view.name}"
        expected = f"{self.value:.6g} as a sum over tokens and constants, within {bound:.1e}"
        got, instead, kind = f"{total:.6g}", "check_model(model)", ReconstructionError
        require(fits, what, expected=expected, got=got, instead=instead, error=kind)


FIRST = 128
"""Columns that are sorted at first: the largest few of thousands carry the share nearly always."""


def fewest_carrying(
    sizes: Float[Tensor, "*row column"], keep: float, first: int = FIRST
) -> Bool[Tensor, "*row column"]:
    """In each row, the fewest columns whose absolute sizes make up the share ``keep`` of all.

    >>> fewest_carrying(torch.tensor([5.0, -1.0, 3.0, 1.0]), 0.8).tolist()
    [True, False, True, False]
    """
    size = sizes.abs()
    if keep == 1:
        return size > 0
    few = min(first, size.shape[-1])
    ordered, order = size.topk(few, -1)
    # 1e-6: a share reached but for rounding counts as reached
    enough = keep * size.sum(-1, keepdim=True) * (1 - 1e-6)
    short = (ordered.cumsum(-1) - ordered < enough) & (ordered > 0)  # zeros are never kept
    kept = torch.zeros_like(size, dtype=torch.bool).scatter(-1, order, short)
    more = ordered.sum(-1) < enough[..., 0]
    if few < size.shape[-1] and bool(more.any()):
        kept[more] = fewest_carrying(size[more], keep, 8 * first)
    return kept


def dot(a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Dot products over the last axis, summed in float64."""
    return (a.double() * b.double()).sum(-1)
