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

from tl_geometry.base.errors import ReconstructionError, fail, require
from tl_geometry.circuits.arithmetic import Between, Frozen, Live, difference
from tl_geometry.circuits.logit_graph import CONSTANTS
from tl_geometry.circuits.runner import Attended, Block, BlockRun, Runner, States, Write
from tl_geometry.corpus.prompt_sets import Prompts
from tl_geometry.models.mlp import mlp_spec
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.write_spec import writing_of
from tl_geometry.models.writers import Written


class Values(NamedTuple):
    """``write . dT/d(write)`` of every component at every position, in float64."""

    leaves: Float[Tensor, "part position"]
    heads: Float[Tensor, "layer head position"]
    mlps: Float[Tensor, "layer position"]
    constant: Float[Tensor, ""]

    def map(self, f: Callable[[Tensor], Tensor]) -> Values:
        """A function of each."""
        return Values(*map(f, self))

    def minus(self, other: Values) -> Values:
        """Component by component."""
        return Values(*(a - b for a, b in zip(self, other, strict=True)))

    def flat(self) -> Float[Tensor, " row"]:
        """Leaves, heads and MLPs in one row."""
        return torch.cat([x.flatten() for x in self[:3]])


class Way(NamedTuple):
    """What one gradient says of a block, by values alone or with patterns: values of its heads and
    its MLP, of all its constants together; dT/d(mixed values), and through the MLP alone
    dT/d(stream that it reads)."""

    heads: Float[Tensor, "head position"]
    mlp: Float[Tensor, " position"]
    constant: Float[Tensor, ""]
    z: Float[Tensor, "position head d_head"]
    mlp_read: Write


class Layer(NamedTuple):
    """What a walk back leaves of one block, for one prompt (or pair): its :class:`Way` by values,
    then that with patterns (between two prompts one that is both), what its MLP wrote without
    constants, and the constants of attention and MLP."""

    ways: tuple[Way, ...]
    mlp: Write
    attention_constant: Write
    mlp_constant: Write
    direct_heads: Float[Tensor, "head source"]


@dataclass(eq=False)
class Walk:
    """A logit on its way back. ``adjoints`` are dT/d(state 0), by values and with patterns;
    ``rounding`` is what the sum rounds with beside its own terms."""

    runner: Runner
    states: States
    answers: tuple[int, ...]
    position: int
    leaf: bool
    between: bool
    direction: Float[Tensor, " d_model"]
    readout_constant: float
    value: float
    rounding: float
    layers: list[Layer] = field(default_factory=list)
    adjoints: list[Write] = field(default_factory=list)

    @classmethod
    def of(cls, view: ModelView, asked: Prompts, tokens: Tensor, at: int, *, leaf: bool) -> Walk:
        """Run the model over ``tokens``, a prompt and perhaps its counterfactual."""
        between = len(tokens) == 2
        answers = [ids for ids in (asked.answers, asked.others) if ids is not None]
        expected, got = "answer=, the token whose logit is traced", "none"
        require(asked.answers is not None, "answer", expected=expected, got=got)
        ids = tuple(int(x) for x in answers)
        differ, text = len(set(ids)) == len(ids), repr(view.decode(ids[:1])[0])
        expected = "two different tokens"
        require(differ, "answer, other", expected=expected, got=f"{text} twice")
        if not leaf:
            for layer in range(0 if between else view.n_layers):
                mlp_spec(view, layer)  # refuses a mixture of experts by name
        runner = Runner.of(view, tokens)
        arithmetic = Between if between else Frozen
        states = runner.verified(tokens, arithmetic, positions=slice(at, at + 1))
        head, last = runner.head, states.streams[-1][:, [at]]
        signs = torch.tensor([1.0, -1.0], device=last.device).to(last)[: len(ids)]
        readout = head.W_U[:, list(ids)].to(last) @ signs
        with torch.no_grad():
            direction = arithmetic().map(head.norm, last).adjoint(readout)[0, 0]
        normed = head.norm.apply(last)[:, 0].double()
        read, size = normed @ readout.double(), normed.abs() @ readout.abs().double()
        if between:
            # each run's logit rounds by its own size, in every block
            rounding = len(runner.blocks) * float(size.sum())
            found = direction, 0.0, float(read[0] - read[1]), rounding
            return cls(runner, states, ids, at, leaf, True, *found)
        bias = float(head.b_U[list(ids)].double() @ signs.double())
        constant = float(head.norm.bias.double() @ readout.double()) + bias
        found = direction, constant, float(read[0]) + bias, 0.0
        return cls(runner, states, ids, at, leaf, False, *found)

    # ---- the walk

    def one(self, x: Tensor) -> Tensor:
        """The prompt of a batch of one; between two runs their difference."""
        return difference(x)[0] if self.between else x[0]

    def both(self, adjoint: Tensor) -> Tensor:
        """A gradient for the batch."""
        return torch.stack([adjoint, -adjoint]) if self.between else adjoint.unsqueeze(0)

    def arithmetic(self) -> Live:
        """The arithmetic of a block."""
        return Between() if self.between else Frozen(follow=True)

    def walk(self) -> None:
        """From the last block to the first."""
        last = torch.zeros_like(self.states.streams[-1][0])
        last[self.position] = self.direction
        follow = (True,) if self.between else (False, True)
        adjoints = [self.both(last) for _ in follow]
        for entered, run in self.runner.back(self.states.streams, self.arithmetic, leaf=self.leaf):
            behind = list(adjoints)
            grads: list[dict[str, Tensor]] = []
            for i, patterns in enumerate(follow):
                adjoints[i] = run.pull(entered, behind[i], patterns=patterns)
                grads.append(run.grads)
            direct = torch.autograd.grad(run.heads.sum(0), run.attention.z, self.both(last))[0]
            with torch.no_grad():
                layer = self._layer(run, grads, [x[0] for x in behind], direct[0])
            self.layers.insert(0, layer)
        self.adjoints = [adjoint[0] for adjoint in adjoints]

    def _layer(
        self,
        run: BlockRun,
        grads: list[dict[str, Tensor]],
        behind: list[Write],
        direct: Float[Tensor, "position head d_head"],
    ) -> Layer:
        heads, head_constants, mlp, mlp_constant = self.writes(run)
        ways = tuple(
            Way(
                dot(heads, g["heads"][:, 0]),
                dot(mlp, after),
                dot(head_constants, g["heads"][0, 0]).sum() + dot(mlp_constant, after).sum(),
                g["z"][0],
                g["mlp read"][0] if "mlp read" in g else torch.zeros_like(after),
            )
            for g, after in zip(grads, behind, strict=True)
        )
        readout = self._direct(run, direct[self.position])
        return Layer(ways, mlp, head_constants, mlp_constant, readout)

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
            else:  # its last maps: a norm, the activation, perhaps a norm
                last = frozen.again(2 + (block.mlp.after.norm_type is not None))
                constant = block.mlp_write(torch.zeros_like(run.after), last)[0]
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
        z = einsum(paid, block.spec.constant("v"), "b h i, h e -> b i h e")
        behind = block.after is not None and block.after.norm_type is not None
        constants = block.written(z, arithmetic.again(int(behind)))[:, 0]
        return heads[:, 0] - constants, constants.sum(0)

    def _direct(
        self, run: BlockRun, readout: Float[Tensor, "head d_head"]
    ) -> Float[Tensor, "head source"]:
        """What each head wrote straight to the logit, by source."""
        v = run.attention.sides["v"].entering.detach()
        pattern = run.attention.pattern[:, :, self.position].detach()
        if not self.between:
            v = v - run.block.spec.constant("v")
        towards = einsum(v.double(), readout.double(), "b j h e, h e -> b h j")
        if not self.between:
            return pattern[0] * towards[0]
        return pattern.mean(0) * difference(towards)[0] + difference(pattern)[0] * towards.mean(0)

    # ---- values

    def leaves(self, tokens: Tensor) -> tuple[dict[str, Write], Write]:
        """Embeddings by name, and what a norm behind them added to their sum."""
        view = self.runner.view
        writing = writing_of(view)
        written = Written(view, writing, view.activations(tokens, writing.hooks(0)))
        first = self.states.streams[0]
        parts = {name: self.one(part.to(first)) for name, part in written.dense.items()}
        constants = written.constants.to(first)[0]
        return parts, torch.zeros_like(constants) if self.between else constants

    def component_values(
        self, leaves: dict[str, Write], first_constant: Write, *, follow: bool
    ) -> Values:
        """Values along value paths, or with those that patterns add."""
        which = -1 if follow else 0
        ways, adjoint = [layer.ways[which] for layer in self.layers], self.adjoints[which]
        constant = dot(first_constant, adjoint).sum() + self.readout_constant
        return Values(
            torch.stack([dot(leaf, adjoint) for leaf in leaves.values()]).cpu(),
            torch.stack([way.heads for way in ways]).cpu(),
            torch.stack([way.mlp for way in ways]).cpu(),
            (constant + torch.stack([way.constant for way in ways]).sum()).cpu(),
        )

    def require_sum(self, values: Values) -> None:
        """Raise where leaves and constants do not sum to T within the rounding of all that is added
        up on the way."""
        total = float(values.leaves.sum() + values.constant)
        total += float(values.mlps.sum()) if self.leaf else 0.0
        size = float(values.flat().abs().sum() + values.constant.abs()) + self.rounding
        bound = reconstruction_bound(self.runner.roundoff, size)
        if not abs(total - self.value) <= bound:  # NaN is refused too
            fail(
                f"logit of {self.runner.view.name}",
                expected=f"{self.value:.6g} as a sum over tokens and constants, within {bound:.1e}",
                got=f"{total:.6g}",
                instead="check_model(model)",
                error=ReconstructionError,
            )

    def direct_others(
        self, leaves: dict[str, Write], first_constant: Write
    ) -> tuple[Float[Tensor, " writer"], tuple[str, ...]]:
        """What everything but heads wrote straight to the logit."""
        at, constant = self.position, first_constant
        named = {name: dot(part[at], self.direction) for name, part in leaves.items()}
        blocks = writing_of(self.runner.view).blocks
        for number, layer in enumerate(self.layers):
            b_out = blocks[number].b_out.to(constant) * (not self.between)
            constant = constant + layer.attention_constant + b_out
            if self.runner.blocks[number].mlp is not None:
                whole = layer.mlp[at] + layer.mlp_constant[at] - b_out
                named[f"mlp{number}"] = dot(whole, self.direction)
        if not self.between:
            named[CONSTANTS] = dot(constant[at], self.direction) + self.readout_constant
        return torch.stack(list(named.values())).cpu(), tuple(named)

    def straight(
        self, values: Values, names: tuple[str, ...], others: Tensor, keep: float
    ) -> Bool[Tensor, " row"]:
        """The components that carry ``keep`` of what was written straight to the logit, as marks in
        the order of ``values.flat()``."""
        sizes = values.map(torch.zeros_like)
        for number, layer in enumerate(self.layers):
            sizes.heads[number, :, self.position] = layer.direct_heads.sum(1).cpu()
        for name, value in zip(names, others, strict=True):
            if name.startswith("mlp"):
                sizes.mlps[int(name[3:]), self.position] = value
            elif name != CONSTANTS:
                sizes.leaves[names.index(name), self.position] = value
        return fewest_carrying(sizes.flat(), keep)


def fewest_carrying(
    sizes: Float[Tensor, "*row column"], keep: float
) -> Bool[Tensor, "*row column"]:
    """In each row, the fewest columns whose absolute sizes make up the share ``keep`` of all.

    >>> fewest_carrying(torch.tensor([5.0, -1.0, 3.0, 1.0]), 0.8).tolist()
    [True, False, True, False]
    """
    size = sizes.abs()
    ordered, order = size.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    # 1e-6: a share reached but for rounding counts as reached; zeros are never kept
    short = (before < keep * ordered.sum(-1, keepdim=True) * (1 - 1e-6)) & (ordered > 0)
    return torch.zeros_like(short).scatter(-1, order, short if keep < 1 else ordered > 0)


def dot(a: Float[Tensor, "..."], b: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Dot products over the last axis, summed in float64."""
    return (a.double() * b.double()).sum(-1)
