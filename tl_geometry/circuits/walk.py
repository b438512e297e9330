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
from tl_geometry.circuits.arithmetic import Between, Frozen, Live
from tl_geometry.circuits.logit_graph import CONSTANTS
from tl_geometry.circuits.runner import BlockRun, Runner, States, Write
from tl_geometry.corpus.prompt_sets import Prompts
from tl_geometry.models.mlp import MLPModule, mlp_spec
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


@dataclass(eq=False)
class Layer:
    """What a walk back leaves of one block, for one prompt (or pair): the linear part of what its
    MLP wrote, its constants, and dT/d of: mixed values, by values alone (``z``) and with patterns
    (``responsive``); what the MLP read and what stands behind the block."""

    heads: Float[Tensor, "head position"]
    followed: Float[Tensor, "head position"]
    attention_constant: Write
    mlp: Write
    mlp_constant: Write
    z: Float[Tensor, "position head d_head"]
    responsive: Float[Tensor, "position head d_head"]
    mlp_read: Write
    constant: Float[Tensor, " 2"]
    mlp_values: Float[Tensor, "2 position"]
    direct_heads: Float[Tensor, "head source"]


@dataclass(eq=False)
class Walk:
    """A logit on its way back. ``adjoints`` are dT/d(state 0), by values and with patterns."""

    runner: Runner
    states: States
    answers: tuple[int, ...]
    position: int
    leaf: bool
    between: bool
    direction: Float[Tensor, " d_model"]
    readout_constant: float
    value: float
    tokens: Tensor
    layers: list[Layer] = field(default_factory=list)
    adjoints: list[Write] = field(default_factory=list)

    @classmethod
    def of(cls, view: ModelView, asked: Prompts, at: int, *, leaf: bool, between: bool) -> Walk:
        answers = [ids for ids in (asked.answers, asked.others) if ids is not None]
        expected, got = "answer=, the token whose logit is traced", "none"
        require(asked.answers is not None, "answer", expected=expected, got=got)
        ids = tuple(int(x) for x in answers)
        differ, text = len(set(ids)) == len(ids), repr(view.decode(ids[:1])[0])
        expected = "two different tokens"
        require(differ, "answer, other", expected=expected, got=f"{text} twice")
        tokens = asked.tokens
        if between:
            assert asked.counterfactuals is not None
            tokens = torch.cat([tokens, asked.counterfactuals])
        if not leaf:
            for layer in range(0 if between else view.n_layers):
                mlp_spec(view, layer)  # refuses a mixture of experts by name
        runner = Runner.of(view, tokens)
        arithmetic = Between if between else Frozen
        states = runner.verified(tokens, arithmetic, positions=slice(at, at + 1))
        head, last = runner.head, states.streams[-1][:, [at]]
        weights = torch.zeros(len(head.b_U), dtype=torch.float64)
        weights[list(ids)] = torch.tensor([1.0, -1.0], dtype=torch.float64)[: len(ids)]
        readout = head.W_U[:, list(ids)].to(last) @ weights[list(ids)].to(last)
        with torch.no_grad():
            direction = arithmetic().map(head.norm, last).adjoint(readout)[0, 0]
        constant = float(head.norm.bias.double() @ readout.double())
        constant += float(head.b_U.double().cpu() @ weights)
        part = _difference(last)[0, 0] if between else last[0, 0]
        value = float(part.double() @ direction.double()) + (0.0 if between else constant)
        if between:  # the model's own difference, from normed states
            normed = head.norm.apply(last)[:, 0].double() @ readout.double()
            value = float(normed[0] - normed[1])
        return cls(
            runner,
            states,
            ids,
            at,
            leaf,
            between,
            direction,
            0.0 if between else constant,
            value,
            tokens,
        )

    # ---- the walk

    def one(self, x: Tensor) -> Tensor:
        """The prompt of a batch of one; between two runs their difference."""
        return _difference(x)[0] if self.between else x[0]

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
        adjoint, followed = self.both(last), self.both(last)
        for entered, run in self.runner.back(self.states.streams, self.arithmetic, leaf=self.leaf):
            behind = adjoint
            adjoint = run.pull(entered, adjoint, patterns=self.between)
            grads, following, behind_followed = run.grads, run.grads, behind
            if not self.between:
                behind_followed = followed
                followed = run.pull(entered, followed)
                following = run.grads
            direct = torch.autograd.grad(run.heads.sum(0), run.attention.z, self.both(last))[0]
            with torch.no_grad():
                layer = self._layer(run, grads, following, behind[0], behind_followed[0], direct[0])
            self.layers.insert(0, layer)
        self.adjoints = [adjoint[0], adjoint[0] if self.between else followed[0]]

    def _layer(
        self,
        run: BlockRun,
        grads: dict[str, Tensor],
        following: dict[str, Tensor],
        behind: Write,
        behind_followed: Write,
        direct: Float[Tensor, "position head d_head"],
    ) -> Layer:
        heads, head_constants, mlp, mlp_constant = self.writes(run)
        values = [dot(heads, g["heads"][:, 0]) for g in (grads, following)]
        middles = [g["heads"][0, 0] for g in (grads, following)]
        constants = [
            dot(head_constants, middle).sum() + dot(mlp_constant, after).sum()
            for middle, after in zip(middles, (behind, behind_followed), strict=True)
        ]
        read = grads.get("mlp read")
        return Layer(
            heads=values[0],
            followed=values[1],
            attention_constant=head_constants,
            mlp=mlp,
            mlp_constant=mlp_constant,
            z=grads["z"][0],
            responsive=following["z"][0],
            mlp_read=torch.zeros_like(behind) if read is None else read[0],
            constant=torch.stack(constants),
            mlp_values=torch.stack([dot(mlp, after) for after in (behind, behind_followed)]),
            direct_heads=self._direct(run, direct[self.position]),
        )

    def writes(
        self, run: BlockRun
    ) -> tuple[Float[Tensor, "head position d_model"], Write, Write, Write]:
        """What heads and MLP wrote without constants, each followed by its constants (of all heads
        together); between two runs the differences, which have none."""
        nothing = torch.zeros_like(run.after[0])
        mlp = nothing if run.mlp is None else self.one(run.mlp.detach())
        heads = run.heads.detach()
        if self.between:
            return heads[:, 0] - heads[:, 1], nothing, mlp, nothing
        block, frozen, constant = run.block, run.arithmetic, nothing
        assert isinstance(frozen, Frozen)
        kept = 0  # maps of the MLP that were kept last
        if run.mlp is not None and block.mlp is not None:
            kept = (1 if isinstance(block.mlp, MLPModule) else 2) + (
                block.mlp.after.norm_type is not None
            )
            if self.leaf:
                constant = constant + writing_of(self.runner.view).blocks[block.number].b_out
            else:
                zero = torch.zeros_like(run.after)
                constant = block.mlp_write(zero, frozen.again(kept))[0]
        shared = block.after is not None and block.after.norm_type is not None
        weights = run.attention.pattern.sum(-1)
        z = einsum(weights, block.spec.constant("v"), "b h i, h e -> b i h e")
        head_constants = block.written(z, frozen.again(kept + shared))[:, 0]
        return heads[:, 0] - head_constants, head_constants.sum(0), mlp - constant, constant

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
        return pattern.mean(0) * _difference(towards)[0] + _difference(pattern)[0] * towards.mean(0)

    # ---- values

    def leaves(self) -> tuple[dict[str, Write], Write]:
        """Embeddings by name, and what a norm behind them added to their sum."""
        view = self.runner.view
        writing = writing_of(view)
        written = Written(view, writing, view.activations(self.tokens, writing.hooks(0)))
        first = self.states.streams[0]
        parts = {name: self.one(part.to(first)) for name, part in written.dense.items()}
        constants = written.constants.to(first)[0]
        return parts, torch.zeros_like(constants) if self.between else constants

    def component_values(
        self, leaves: dict[str, Write], first_constant: Write, *, follow: bool
    ) -> Values:
        """Values along value paths, or with those that patterns add."""
        adjoint = self.adjoints[follow]
        parts = torch.stack([dot(leaf, adjoint) for leaf in leaves.values()])
        constant = dot(first_constant, adjoint).sum().cpu() + self.readout_constant
        constant = constant + sum(layer.constant[int(follow)].cpu() for layer in self.layers)
        return Values(
            parts.cpu(),
            torch.stack([layer.followed if follow else layer.heads for layer in self.layers]).cpu(),
            torch.stack([layer.mlp_values[int(follow)] for layer in self.layers]).cpu(),
            constant,
        )

    def require_sum(self, values: Values) -> None:
        """Raise where leaves and constants do not sum to T within the rounding of all that is added
        up on the way."""
        total = float(values.leaves.sum() + values.constant)
        total += float(values.mlps.sum()) if self.leaf else 0.0
        size = float(values.flat().abs().sum() + values.constant.abs())
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
        for number, layer in enumerate(self.layers):
            constant = constant + layer.attention_constant + layer.mlp_constant
            if self.runner.blocks[number].mlp is not None:
                named[f"mlp{number}"] = dot(layer.mlp[at], self.direction)
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


def _difference(x: Float[Tensor, "batch ..."]) -> Float[Tensor, "half ..."]:
    """The first half of a batch less the second."""
    first, second = x.chunk(2)
    return first - second
