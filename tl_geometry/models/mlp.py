"""What the MLP of a block computes, by its matrices or by its own module.

:func:`mlp_spec` is called for the frozen linear model of a forward pass
(:mod:`tl_geometry.circuits.frozen`), :func:`live_mlp` for passes in which everything is live
(:mod:`tl_geometry.circuits.edge_pass`). A block's MLP is

    out = N_after((a(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out),    x = N(h)

Without a gate the factor ``x W_in + b_in`` is missing, and W_gate and b_gate are what the module
calls W_in and b_in. h is the stream after attention, or before it (parallel blocks). Norms,
activation and input are tried in turn; the combination that reproduces the model's own output on
the probe is kept.

A mixture of experts has more matrices than that. It is ``N_after(module(N(h)))`` with the model's
own module, run live: its router chooses experts anew for every input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from tl_geometry.base.errors import UnsupportedModelError, fail
from tl_geometry.models.infer import TIE
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, no_norm, norms_of
from tl_geometry.models.parameters import inner, part, upcast
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.write_spec import attention_of, writing_of

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    # the sigmoid approximation of GELU (Hendrycks & Gimpel 2016)
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu_squared": lambda x: functional.relu(x).square(),
}
"""Activations that are tried, by name."""
CONFIGURED: dict[str, str] = dict.fromkeys(
    ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), "gelu_tanh"
)
"""Name in a configuration -> name in :data:`ACTIVATIONS`, where the two differ."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MLPSpec:
    """The MLP of one block. ``W_gate`` is what the activation is applied to, ``W_in`` the other
    factor, or ``None``; ``before`` is the norm of its input, ``after`` of its output; ``parallel``
    says that it reads the stream before attention.

    Matrices are held as the model stores them (``stored_*``), so that a model in half precision has
    no second copy of its MLPs in float32. ``W_gate``, ``W_in`` and ``W_out`` convert them to the
    dtype of the biases at each use."""

    before: NormWeights
    after: NormWeights
    parallel: bool
    activation: str
    stored_gate: Float[Tensor, "d_model d_mlp"]
    b_gate: Float[Tensor, " d_mlp"]
    stored_in: Float[Tensor, "d_model d_mlp"] | None
    b_in: Float[Tensor, " d_mlp"] | None
    stored_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, " d_model"]

    @property
    def W_gate(self) -> Float[Tensor, "d_model d_mlp"]:
        """The matrix in front of the activation."""
        return self.stored_gate.to(self.b_gate)

    @property
    def W_in(self) -> Float[Tensor, "d_model d_mlp"] | None:
        """The matrix of the other factor, ``None`` without a gate."""
        return None if self.stored_in is None else self.stored_in.to(self.b_gate)

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """The matrix behind the activation."""
        return self.stored_out.to(self.b_gate)

    def act(self, x: Tensor) -> Tensor:
        """The activation."""
        return ACTIVATIONS[self.activation](x)

    def hidden(
        self, x: Float[Tensor, "*batch d_model"]
    ) -> tuple[Float[Tensor, "*batch d_mlp"], Float[Tensor, "*batch d_mlp"] | None]:
        """What the activation is applied to, and the other factor, of a normed input."""
        gate = x @ self.W_gate + self.b_gate
        W_in = self.W_in  # once: each access converts the matrix
        if W_in is None or self.b_in is None:
            return gate, None
        return gate, x @ W_in + self.b_in

    def out(
        self, gate: Float[Tensor, "*batch d_mlp"], linear: Float[Tensor, "*batch d_mlp"] | None
    ) -> Float[Tensor, "*batch d_model"]:
        """The output, before the last norm, of what :meth:`hidden` gives."""
        hidden = self.act(gate) if linear is None else self.act(gate) * linear
        return hidden @ self.W_out + self.b_out

    def apply(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The MLP's output for the stream ``h`` that it reads."""
        return self.after.apply(self.out(*self.hidden(self.before.apply(h))))


@dataclass(frozen=True, eq=False, kw_only=True)
class MLPModule:
    """The MLP of one block as the model's own ``module``, between two norms; ``parallel`` as in
    :class:`MLPSpec`."""

    before: NormWeights
    after: NormWeights
    parallel: bool
    module: nn.Module

    def run(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The module's output for a normed input, computed in the module's own dtype."""
        output = self.module(x.to(next(self.module.parameters()).dtype))
        # some modules return the choice of their router too
        return (output[0] if isinstance(output, tuple) else output).to(x)

    def apply(self, h: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        """The MLP's output for the stream ``h`` that it reads."""
        return self.after.apply(self.run(self.before.apply(h)))


def live_mlp(view: ModelView, layer: int) -> MLPSpec | MLPModule | None:
    """The MLP of a block, by matrices or else by its module, ``None`` where the block has none;
    remembered as long as the weights stay the same.

    Raises ``UnsupportedModelError`` where the block's MLP gives neither.
    """
    found, key = view._layers.found, ("mlp", layer)
    if key not in found:
        found[key] = _infer(view, layer)
    return found[key]


def mlp_spec(view: ModelView, layer: int) -> MLPSpec | None:
    """The MLP of a block by matrices, ``None`` where the block has none.

    Raises ``UnsupportedModelError`` for a mixture of experts, and for an MLP that is not of this
    form.
    """
    found = live_mlp(view, layer)
    if isinstance(found, MLPModule):
        fail(
            f"MLP of block {layer} of {view.name}",
            expected="two or three matrices with an activation between them",
            got=type(inner(found.module)).__name__,
            instead='trace_logit(..., mlp="leaf"), with MLPs as inputs',
            error=UnsupportedModelError,
        )
    return found


class _Probe(NamedTuple):
    """What a few tokens give at one block: its input, the stream after attention, the MLP's output;
    and how those numbers are rounded."""

    block_input: Float[Tensor, "batch position d_model"]
    after_attention: Float[Tensor, "batch position d_model"]
    output: Float[Tensor, "batch position d_model"]
    roundoff: float


def _probe(view: ModelView, layer: int) -> _Probe | None:
    """What the probe of :func:`writing_of` gives at one block, ``None`` where it has no MLP."""
    spec = writing_of(view).blocks[layer]
    if spec.mlp_hook is None:
        return None
    activations, roundoff = writing_of(view).probe, view._layers.roundoff
    h = activations[f"blocks.{layer}.hook_resid_pre"]
    attention = attention_of(view, layer, activations)
    if spec.after_attention is not None:
        attention = spec.after_attention.apply(attention)
    return _Probe(h, h + attention, activations[spec.mlp_hook], roundoff)


@torch.no_grad()
def _infer(view: ModelView, layer: int) -> MLPSpec | MLPModule | None:
    """The first reading of a block's MLP that reproduces the probe: by matrices, else by its
    module."""
    memo, probe = view._layers.found, _probe(view, layer)
    if probe is None:
        return None
    block = view._model.blocks[layer]
    for candidates in (_candidates, _modules):
        best = _best(candidates(view, block, probe.block_input, memo.get("mlp way")), probe)
        if best is not None:
            memo["mlp way"], found = best
            return found
    return fail(
        f"MLP of block {layer} of {view.name}",
        expected="what its module gives for a norm of the stream",
        got=f"another output of {type(inner(block.mlp)).__name__}",
        error=UnsupportedModelError,
    )


Found = TypeVar("Found", bound=MLPSpec | MLPModule)
Way = tuple[int, ...]
"""Which of its choices a reading takes, by number: 0 is the likeliest one."""


def _ways(sizes: tuple[int, ...], fitted: Way | None) -> list[Way]:
    """All readings: first the one that ``fitted`` the block before, since blocks are alike; then
    the others, those with the smallest numbers first. What fitted a block of the other kind
    (matrices, module) has another length and equals none."""
    ways = product(*map(range, sizes))
    return sorted(ways, key=lambda way: (way != fitted, sum(way)))


def _best(candidates: Iterator[tuple[Way, Found]], probe: _Probe) -> tuple[Way, Found] | None:
    """The nearest candidate to the output of the probe (the first within rounding), ``None`` where
    none comes near."""
    rounding = reconstruction_bound(probe.roundoff, float(probe.output.abs().max()))
    best, least = None, torch.inf
    for way, candidate in candidates:
        read = probe.block_input if candidate.parallel else probe.after_attention
        error = float((candidate.apply(read) - probe.output).abs().max())
        if error < least * TIE:
            best, least = (way, candidate), error
        if least <= rounding:
            break
    # two products of matrices and an activation round more than one product; 1e-5 is for outputs
    # near zero. Readings that are closer to one another than this (gelu and gelu_tanh on small
    # inputs) are told apart by the smaller error, then by the order.
    return best if least <= 8 * rounding + 1e-5 else None


def _candidates(
    view: ModelView, block: object, h: Tensor, fitted: Way | None
) -> Iterator[tuple[Way, MLPSpec]]:
    """Readings of an MLP by its matrices."""
    mlp = part(block, "mlp")
    W_in, W_gate, W_out = (part(mlp, name) for name in ("W_in", "W_gate", "W_out"))
    if W_in is None or W_out is None or W_in.dim() != 2:
        return
    gated = W_gate is not None
    first = (W_gate if gated else W_in).detach()

    def bias(name: str, width: int) -> Tensor:
        value = part(mlp, name)
        return h.new_zeros(width) if value is None else upcast(value).to(h)

    width = first.shape[1]
    W_in, W_out = W_in.detach(), W_out.detach()
    b_in, b_out, no_bias = bias("b_in", width), bias("b_out", h.shape[-1]), h.new_zeros(width)
    biases = [(b_in, b_out)]
    if gated:  # HookedTransformer adds b_in after the product of gate and input
        biases.append((no_bias, b_out + b_in @ W_out.to(h)))
    # what the configuration calls the activation is tried first, and believed only if it fits
    configured = str(getattr(view._model.cfg, "act_fn", ""))
    configured = CONFIGURED.get(configured, configured)
    activations = sorted(ACTIVATIONS, key=lambda name: name != configured)
    b_gate = bias("b_gate", width) if gated else b_in
    before, after = _norms(view, block, h)
    sizes = (len(after), 2, len(activations), len(biases), len(before))
    for way in _ways(sizes, fitted):
        norm_after, parallel, activation, biased, norm_before = way
        b_in, b_out = biases[biased]
        yield (
            way,
            MLPSpec(
                before=before[norm_before],
                after=after[norm_after],
                parallel=bool(parallel),
                activation=activations[activation],
                stored_gate=first,
                b_gate=b_gate,
                stored_in=W_in if gated else None,
                b_in=b_in if gated else None,
                stored_out=W_out,
                b_out=b_out,
            ),
        )


def _modules(
    view: ModelView, block: object, h: Tensor, fitted: Way | None
) -> Iterator[tuple[Way, MLPModule]]:
    """Readings of an MLP as its own module."""
    before, after = _norms(view, block, h)
    for way in _ways((len(after), 2, len(before)), fitted):
        norm_after, parallel, norm_before = way
        yield (
            way,
            MLPModule(
                before=before[norm_before],
                after=after[norm_after],
                parallel=bool(parallel),
                module=part(block, "mlp"),
            ),
        )


def _norms(
    view: ModelView, block: object, h: Tensor
) -> tuple[list[NormWeights], list[NormWeights]]:
    """Readings of the norms of an MLP's input and of its output, the likeliest first."""
    cfg, like = view._model.cfg, h[0, 0]
    ln1, ln2, post = (norms_of(part(block, n), cfg, like) for n in ("ln1", "ln2", "ln2_post"))
    return [*ln2, *ln1, no_norm(like)], [*post, no_norm(like), *ln2]
