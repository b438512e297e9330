"""What becomes of a gradient on its way back through a block? One class for each answer, asked by
the runner (:mod:`tl_geometry.circuits.runner`) for norms, activations, products, soft caps and
softmaxes. Values are always the model's own; the classes differ in the linear map that stands for
an operation on the way back.

- :class:`Live`: its derivative.
- :class:`Frozen`: what is not linear stays as it was. A norm keeps its scale, a pointwise
  activation its secant, ``a(g) -> (a(g) / g) g``, and a gated product is taken by halves. Patterns
  stay live: a walk that takes them as constants pulls through values alone.
- :class:`Between`: two runs, one in each half of the batch (clean first). With D the difference of
  the halves and a bar their mean, each map takes D of the input to D of the output exactly:

      norm         D y = gain (r- D x + x- rho (2 / d) x- . D x),   x centred, r = 1 / s,
                   rho = D r / D mean(x^2) = -1 / (s_1 s_2 (s_1 + s_2))
      pointwise    D a = (D a / D g) D g, the derivative in the middle where the two are near
      product      D(u v) = u- D v + v- D u
      softmax      D p = integral over t of J(s_t) dt D s along the straight line of the rows,
                   J(s) D s = p (D s - p . D s), by Gauss-Legendre

  A gradient that is g in the first half and -g in the second stays so through all maps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.softmax import soft_cap

SMALL = 1e-6
"""Arguments of an activation nearer to 0 are replaced by this, so that a(x) / x divides by no 0."""
NODES = (8, 16, 32, 64, 128, 256, 512, 1024)
"""Gauss-Legendre nodes that are tried for a row. Most rows close with 8 or 16; one whose scores
move by hundreds crosses from one key to another within 1% of the line, which takes hundreds."""
CLOSED = 64 * 2**-52
"""A row of float64 numbers is closed within this share of its difference of scores, a row of others
within their own rounding: along the line everything is float64, or the error of thousands of rows
would add up."""


@dataclass(frozen=True, eq=False)
class NormMap:
    """A norm as a linear map, ``x -> gain (inverse A x + middle slope (middle . A x))``, A the
    centring. ``inverse`` and ``slope`` have one entry for each vector, ``middle`` is ``None`` at a
    frozen scale; ``axes`` are those that the norm runs over."""

    centre: Callable[[Tensor], Tensor]
    gain: Float[Tensor, "..."]
    inverse: Float[Tensor, "..."]
    middle: Float[Tensor, "..."] | None = None
    slope: Float[Tensor, "..."] | None = None
    axes: tuple[int, ...] = (-1,)

    def linear(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The map of a part of the input."""
        return self._scaled(self.centre(x)) * self.gain

    def adjoint(self, g: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Its transpose."""
        return self.centre(self._scaled(g * self.gain))

    def _scaled(self, x: Tensor) -> Tensor:
        scaled = self.inverse * x
        if self.middle is None or self.slope is None:
            return scaled
        return scaled + self.middle * (self.slope * (self.middle * x).sum(self.axes, keepdim=True))

    def at(self, positions: Int[Tensor, " row"]) -> NormMap:
        """The maps at some positions of the first context, a row for each."""
        return self.pick((0, positions))

    def pick(self, chosen: Any) -> NormMap:
        """The maps of some contexts."""
        middle, slope = (None if x is None else x[chosen] for x in (self.middle, self.slope))
        return replace(self, inverse=self.inverse[chosen], middle=middle, slope=slope)


class Live:
    """Everything by its derivative."""

    def map(self, norm: NormWeights, x: Float[Tensor, "..."]) -> NormMap:
        """The linear map of a norm at x."""
        inverse = 1 / norm.scale(x).unsqueeze(-1)
        if norm.norm_type is None:
            return NormMap(norm.centre, norm.gain, inverse)
        x = norm.centre(x)
        size = int(np.prod([x.shape[axis] for axis in norm.axes]))
        return self._map(NormMap(norm.centre, norm.gain, inverse, axes=norm.axes), x, size)

    def _map(self, frozen: NormMap, x: Tensor, size: int) -> NormMap:
        return replace(frozen, middle=x, slope=-(frozen.inverse**3) / size)

    def norm(self, norm: NormWeights, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """The norm."""
        return norm.apply(x)

    def shares(
        self, norm: NormWeights, parts: Float[Tensor, "head batch position d_model"]
    ) -> Float[Tensor, "head batch position d_model"]:
        """The norm of a sum, shared out among its parts: each at the scale of all together; the
        bias evenly."""
        inverse = 1 / norm.scale(parts.sum(0)).unsqueeze(-1)
        return norm.centre(parts) * inverse * norm.gain + norm.bias / len(parts)

    def hidden(
        self, act: Callable[[Tensor], Tensor], gate: Tensor, linear: Tensor | None
    ) -> Tensor:
        """``a(gate)``, or ``a(gate) linear``."""
        return act(gate) if linear is None else act(gate) * linear

    def times(
        self, f: Callable[[Tensor, Tensor], Tensor], u: Tensor, v: Tensor
    ) -> Float[Tensor, "..."]:
        """A bilinear function."""
        return f(u, v)

    def cap(self, x: Tensor, cap: float | None) -> Tensor:
        """A soft cap."""
        return soft_cap(x, cap)

    def softmax(self, rows: Tensor) -> Tensor:
        """Softmax of rows, whose masked cells are at the least number."""
        return rows.softmax(-1)

    def module(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A module of the model's own."""
        return module(x)


class Frozen(Live):
    """Norm scales and MLP slopes as they were. What was kept is used once more by :meth:`again`,
    for other inputs of the same maps."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._queue: list[Any] = []

    def again(self, last: int) -> Frozen:
        """The maps of the ``last`` norms and activations once more, in their order."""
        other = Frozen()
        other._queue = self._kept[len(self._kept) - last :]
        return other

    def _keep(self, make: Callable[[], Any]) -> Any:
        self._kept.append(self._queue.pop(0) if self._queue else make())
        return self._kept[-1]

    def _map(self, frozen: NormMap, x: Tensor, size: int) -> NormMap:
        return replace(frozen, inverse=frozen.inverse.detach())

    def norm(self, norm: NormWeights, x: Tensor) -> Tensor:
        return self._keep(lambda: self.map(norm, x)).linear(x) + norm.bias

    def shares(self, norm: NormWeights, parts: Tensor) -> Tensor:
        linear = self._keep(lambda: self.map(norm, parts.sum(0))).linear(parts)
        return linear + norm.bias / len(parts)

    def hidden(
        self, act: Callable[[Tensor], Tensor], gate: Tensor, linear: Tensor | None
    ) -> Tensor:
        def slopes() -> tuple[Tensor, Tensor]:
            at = torch.where(gate.abs() < SMALL, SMALL, gate).detach()
            secant = act(at) / at
            if linear is None:
                return secant, secant
            return secant * linear.detach() / 2, act(gate).detach() / 2

        of_gate, of_linear = self._keep(slopes)
        return of_gate * gate if linear is None else of_gate * gate + of_linear * linear


class Between(Live):
    """Two runs, stacked along the batch."""

    def _map(self, frozen: NormMap, x: Tensor, size: int) -> NormMap:
        first, second = (1 / frozen.inverse).chunk(2)
        rho = -1 / (first * second * (first + second))
        rho = torch.cat([rho, rho]).detach()
        inverse, middle = mean_of(frozen.inverse).detach(), mean_of(x).detach()
        return replace(frozen, inverse=inverse, middle=middle, slope=rho * 2 / size)

    def norm(self, norm: NormWeights, x: Tensor) -> Tensor:
        return through(norm.apply(x), lambda: self.map(norm, x).linear(x))

    def shares(self, norm: NormWeights, parts: Tensor) -> Tensor:
        total = parts.sum(0)
        each = self.map(norm, total).linear(parts)
        return each + (norm.apply(total) - each.sum(0)).detach() / len(parts)

    def hidden(
        self, act: Callable[[Tensor], Tensor], gate: Tensor, linear: Tensor | None
    ) -> Tensor:
        value = self.pointwise(act, gate)
        return value if linear is None else self.times(torch.mul, value, linear)

    def pointwise(self, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A function of every entry."""
        return through(f(x), lambda: secant(f, x.detach()) * x)

    def times(self, f: Callable[[Tensor, Tensor], Tensor], u: Tensor, v: Tensor) -> Tensor:
        return through(f(u, v), lambda: f(mean_of(u).detach(), v) + f(u, mean_of(v).detach()))

    def cap(self, x: Tensor, cap: float | None) -> Tensor:
        return x if cap is None else self.pointwise(lambda s: soft_cap(s, cap), x)

    def softmax(self, rows: Tensor) -> Tensor:
        return _LineOfRows.apply(rows) if torch.is_grad_enabled() else rows.softmax(-1)

    def module(self, module: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        what, instead = "a mixture of experts between two runs", 'mlp="leaf", or method="gradient"'
        needless, error = not x.requires_grad, UnsupportedModelError
        expected, got = "no way back through experts", "a router, which may choose others"
        require(needless, what, expected=expected, got=got, instead=instead, error=error)
        return module(x)


def through(value: Tensor, linear: Callable[[], Tensor]) -> Tensor:
    """A value as computed, whose gradient is that of a linear map."""
    if not torch.is_grad_enabled():
        return value
    mapped = linear()
    return value.detach() + (mapped - mapped.detach())


def mean_of(x: Float[Tensor, "batch ..."]) -> Float[Tensor, "batch ..."]:
    """The mean of both halves of the batch, in both halves."""
    first, second = x.chunk(2)
    middle = (first + second) / 2
    return torch.cat([middle, middle])


def difference(x: Float[Tensor, "batch ..."]) -> Float[Tensor, "half ..."]:
    """The first half of a batch less the second."""
    first, second = x.chunk(2)
    return first - second


def secant(
    f: Callable[[Tensor], Tensor], x: Float[Tensor, "batch ..."]
) -> Float[Tensor, "batch ..."]:
    """``D f / D x`` between both halves, in both of them; f' in the middle where they are nearer
    than 0.25 eps^(1/3) relative: the quotient's rounding, eps over the distance, and the
    derivative's error, the distance squared, are then alike."""
    a, b = x.chunk(2)
    limit = 0.25 * torch.finfo(x.dtype).eps ** (1 / 3)
    near = (a - b).abs() < limit * (1 + torch.maximum(a.abs(), b.abs()))
    with torch.enable_grad():
        middle = ((a + b) / 2).requires_grad_()
        slope = torch.autograd.grad(f(middle).sum(), middle)[0]
    with torch.no_grad():
        quotient = (f(a) - f(b)) / torch.where(near, 1.0, a - b)
        slope = torch.where(near, slope, quotient)
    return torch.cat([slope, slope])


@cache
def gauss_legendre(nodes: int) -> tuple[tuple[float, float], ...]:
    """Points of (0, 1) and their weights."""
    points, weights = np.polynomial.legendre.leggauss(nodes)
    return tuple(zip(((points + 1) / 2).tolist(), (weights / 2).tolist(), strict=True))


def along_rows(end: Tensor, gap: Tensor, g: Tensor, nodes: int) -> Tensor:
    """``integral of J(end + t gap) dt g``, J the derivative of the softmax of each row."""
    total = torch.zeros_like(g)
    for t, weight in gauss_legendre(nodes):
        p = (end + t * gap).softmax(-1)
        total += weight * p * (g - (p * g).sum(-1, keepdim=True))
    return total


class _LineOfRows(torch.autograd.Function):
    """Softmax of rows; back through the mean of J on the line between both halves. J is symmetric,
    so that the map is its own transpose. A row that does not close gets twice the nodes. What the
    most nodes miss, e = D p - J D s, is added along the line, ``J + e D s^T / |D s|^2`` (Broyden
    1965), so that every row closes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        pattern = rows.softmax(-1)
        ends = rows.double().flatten(0, -2).chunk(2)
        gap = ends[0] - ends[1]
        first, second = (end.softmax(-1) for end in ends)
        change, reach = first - second, 1 + gap.abs().amax(-1)
        within = max(CLOSED, torch.finfo(rows.dtype).eps)
        left = torch.arange(len(gap), device=gap.device)
        ctx.levels, missed = [], torch.zeros_like(gap)
        for nodes in NODES:
            error = change[left] - along_rows(ends[1][left], gap[left], gap[left], nodes)
            done = error.abs().amax(-1) <= within * reach[left]
            last = nodes == NODES[-1]
            missed[left] = error * last  # of rows that closed it is rounding
            ctx.levels.append((nodes, left[done | last]))
            left = left[~done]
            if not len(left):
                break
        ctx.save_for_backward(ends[1], gap, missed)
        return pattern

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        end, gap, missed = ctx.saved_tensors
        g = grads[0].double().flatten(0, -2).chunk(2)[0]
        back = torch.zeros_like(gap)
        for nodes, rows in ctx.levels:
            back[rows] = along_rows(end[rows], gap[rows], g[rows], nodes)
        size = gap.square().sum(-1, keepdim=True).clamp(min=1e-300)
        back += gap * (missed * g).sum(-1, keepdim=True) / size
        return torch.cat([back, -back]).view_as(grads[0]).to(grads[0])
