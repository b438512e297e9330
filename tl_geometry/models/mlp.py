"""What the MLP of a block computes, by its matrices or by its own module.

Passes by blocks and path edits ask :func:`live_mlp`, graphs that go through MLPs :func:`mlp_spec`.
A block's MLP is

    out = N_after((a(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out),    x = N(h)

Without a gate the factor ``x W_in + b_in`` is missing, and W_gate and b_gate are what the module
calls W_in and b_in. h is the stream after attention, or before it (parallel blocks). Norms,
activation and input are tried in turn; the combination that reproduces the model's own output on
the probe is kept. Without a norm N_after is the number by which the block multiplies (Granite).

A mixture of experts has more matrices than that. It is ``N_after(module(N(h)))`` with the model's
own module, run live: its router chooses experts anew for every input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from tl_geometry.base.errors import UnsupportedModelError, fail
from tl_geometry.models.attention import Stream
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import NormWeights, no_norm, norms_of
from tl_geometry.models.parameters import added_times, inner, part, upcast
from tl_geometry.models.reconstruction import nearest, reconstruction_bound
from tl_geometry.models.write_spec import attention_output, writing_of

Hidden = Float[Tensor, "*batch d_mlp"]

_TANH = partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh"), _TANH),
    "silu": functional.silu,
    "relu": functional.relu,
    # the sigmoid approximation of GELU (Hendrycks & Gimpel 2016)
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: functional.relu(x).square(),
}
"""Activations that are tried, by the names that configurations have for them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class MLPSpec:
    """The MLP of one block. ``stored_gate`` gives what the activation ``act`` is applied to,
    ``stored_in`` the other factor, or ``None``; ``before`` is the norm of its input, ``after`` of
    its output; ``parallel`` says that it reads the stream before attention.

    Matrices are held as the model stores them (``stored_*``), so that a model in half precision has
    no second copy of its MLPs in float32; they are converted at each use."""

    before: NormWeights
    after: NormWeights
    parallel: bool
    act: Callable[[Tensor], Tensor]
    stored_gate: Float[Tensor, "d_model d_mlp"]
    b_gate: Float[Tensor, " d_mlp"]
    stored_in: Float[Tensor, "d_model d_mlp"] | None
    b_in: Float[Tensor, " d_mlp"] | None
    stored_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, " d_model"]

    @property
    def W_out(self) -> Float[Tensor, "d_mlp d_model"]:
        """The matrix behind the activation."""
        return self.stored_out.to(self.b_gate)

    def hidden(self, x: Stream) -> tuple[Hidden, Hidden | None]:
        """What the activation is applied to, and the other factor, of a normed input."""
        gate = x @ self.stored_gate.to(self.b_gate) + self.b_gate
        if self.stored_in is None or self.b_in is None:
            return gate, None
        return gate, x @ self.stored_in.to(self.b_gate) + self.b_in

    def apply(self, h: Stream) -> Stream:
        """The MLP's output for the stream ``h`` that it reads."""
        gate, linear = self.hidden(self.before.apply(h))
        hidden = self.act(gate) if linear is None else self.act(gate) * linear
        return self.after.apply(hidden @ self.W_out + self.b_out)


@dataclass(frozen=True, eq=False, kw_only=True)
class MLPModule:
    """The MLP of one block as the model's own ``module``, between two norms; ``parallel`` as in
    :class:`MLPSpec`."""

    before: NormWeights
    after: NormWeights
    parallel: bool
    module: nn.Module

    def run(self, x: Stream) -> Stream:
        """The module's output for a normed input, computed in the module's own dtype."""
        output = self.module(x.to(next(self.module.parameters()).dtype))
        # some modules return the choice of their router too
        return (output[0] if isinstance(output, tuple) else output).to(x)

    def apply(self, h: Stream) -> Stream:
        """The MLP's output for the stream ``h`` that it reads."""
        return self.after.apply(self.run(self.before.apply(h)))


def live_mlp(view: ModelView, layer: int) -> MLPSpec | MLPModule | None:
    """The MLP of a block, by matrices or else by its module, ``None`` where the block has none;
    remembered as long as the weights stay the same.

    Raises ``UnsupportedModelError`` where the block's MLP gives neither.
    """
    return view.once(("mlp", layer), lambda: _infer(view, layer))


def mlp_spec(view: ModelView, layer: int) -> MLPSpec | None:
    """The MLP of a block by matrices, ``None`` where the block has none.

    Raises ``UnsupportedModelError`` for a mixture of experts, and for an MLP that is not of this
    form.
    """
    found = live_mlp(view, layer)
    if isinstance(found, MLPModule):
        what, got = f"MLP of block {layer} of {view.name}", type(inner(found.module)).__name__
        expected = "two or three matrices with an activation between them"
        instead = 'trace_logit(..., mlp="leaf"), with MLPs as inputs'
        fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
    return found


@torch.no_grad()
def _infer(view: ModelView, layer: int) -> MLPSpec | MLPModule | None:
    """The reading of a block's MLP that reproduces the probe of :func:`writing_of`: by matrices,
    else by its module."""
    writing, block = writing_of(view), view._model.blocks[layer]
    spec, activations = writing.blocks[layer], writing.probe
    if spec.mlp_hook is None:
        return None
    h, output = activations[f"blocks.{layer}.hook_resid_pre"], activations[spec.mlp_hook]
    attention = attention_output(view, layer, activations)
    if spec.after_attention is not None:
        attention = spec.after_attention.apply(attention)
    rounding = reconstruction_bound(view.roundoff, float(output.abs().max()))

    def error(candidate: MLPSpec | MLPModule) -> float:
        read = h if candidate.parallel else h + attention
        return float((candidate.apply(read) - output).abs().max())

    around = _surroundings(view, block, h)
    # without the wrapper of a bridge, whose hooks may be those that ask
    modules = (MLPModule(**norms, module=inner(block.mlp)) for norms in around)
    for candidates in (_matrices(view, block, h), modules):
        tried = ((candidate, error(candidate)) for candidate in candidates)
        best, least = nearest(chain([(None, torch.inf)], tried), enough=rounding)
        # two products of matrices and an activation round more than one product; 1e-5 is for
        # outputs near zero. Readings that are closer to one another than this (gelu and gelu_tanh
        # on small inputs) are told apart by the smaller error, within rounding by the order.
        if least <= 8 * rounding + 1e-5:
            return best
    what, expected = f"MLP of block {layer} of {view.name}", "what its module gives for a norm"
    got = f"another output of {type(inner(block.mlp)).__name__}"
    return fail(what, expected=expected, got=got, error=UnsupportedModelError)


def _matrices(view: ModelView, block: object, h: Tensor) -> Iterator[MLPSpec]:
    """Readings of an MLP by its matrices, the likeliest first."""
    mlp = part(block, "mlp")
    W_in, W_gate, W_out = (part(mlp, name) for name in ("W_in", "W_gate", "W_out"))
    if W_in is None or W_out is None or W_in.dim() != 2:
        return

    def bias(name: str, width: int) -> Tensor:
        value = part(mlp, name)
        return h.new_zeros(width) if value is None else upcast(value).to(h)

    gated, (d_model, width) = W_gate is not None, W_in.shape
    b_in, b_out = bias("b_in", width), bias("b_out", d_model)
    biases = [(b_in, b_out)]
    if gated:  # HookedTransformer adds b_in after the product of gate and input
        biases.append((torch.zeros_like(b_in), b_out + b_in @ W_out.to(h)))
    # what the configuration calls the activation is tried first, and believed only if it fits;
    # each function once
    first = ACTIVATIONS.get(str(getattr(view._model.cfg, "act_fn", "")), functional.gelu)
    activations = dict.fromkeys([first, *ACTIVATIONS.values()])
    ways = product(activations, _surroundings(view, block, h), biases)
    for act, norms, (b_in, b_out) in ways:
        yield MLPSpec(
            **norms,
            act=act,
            stored_gate=(W_gate if gated else W_in).detach(),
            b_gate=bias("b_gate", width) if gated else b_in,
            stored_in=W_in.detach() if gated else None,
            b_in=b_in if gated else None,
            stored_out=W_out.detach(),
            b_out=b_out,
        )


def _surroundings(view: ModelView, block: object, h: Tensor) -> Iterator[dict[str, Any]]:
    """Readings of the norms of an MLP's input and of its output, and of what it reads, by the names
    that specs have for them, the likeliest first."""
    cfg, like = view._model.cfg, h[0, 0]
    ln1, ln2, post = (norms_of(part(block, n), cfg, like) for n in ("ln1", "ln2", "ln2_post"))
    # no block that multiplies has a norm behind its MLP
    afters = [*post, no_norm(like, added_times(block)), *ln2]
    befores = [*ln2, *ln1, no_norm(like)]
    for after, parallel, before in product(afters, (False, True), befores):
        yield {"before": before, "after": after, "parallel": parallel}
