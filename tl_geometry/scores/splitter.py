"""Splitting a layer's input into parts, projecting them to queries and keys, and checking that the
terms add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import (
    CHUNK,
    Check,
    head_spreads,
    judge_rounding,
    pattern_bound,
    pattern_error,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.rotary import RotaryPlanes, rotary_planes
from tl_geometry.models.writers import Written, writer_names
from tl_geometry.scores.projection import Side
from tl_geometry.scores.split_request import UserParts


@dataclass(frozen=True, eq=False)
class HeadTerms:
    """The terms of the chosen heads of one layer: queries (with the score scale) and keys by part,
    and what else makes the scores."""

    layer: int
    heads: tuple[int, ...]
    q: Float[Tensor, "part batch query head d_head"]
    k: Float[Tensor, "part batch key head d_head"]
    bias: Float[Tensor, "head query key"] | None
    allowed: Bool[Tensor, "head query key"]
    softcap: Float[Tensor, " head"]
    sinks: Float[Tensor, " head"]
    scores: Float[Tensor, "batch head query key"] | None
    q_again: Float[Tensor, "part batch query head d_head"] | None
    checks: list[Check]
    scale: float
    rotary: bool
    relative: bool
    planes: RotaryPlanes


class Splitter:
    """Splits the inputs of layers into parts and projects them; with a normalised basis the parts
    are those of the normed stream.

    User parts are parts of the stream itself, whatever the basis.
    """

    def __init__(
        self,
        view: ModelView,
        basis: PositionContext | None,
        parts: Sequence[str] | UserParts,
        preset: str,
        double: bool,
        layers: Sequence[int],
    ) -> None:
        own = isinstance(parts, Mapping | str)
        if basis is None and not own:
            instead = 'decompose(model, tokens), or parts="writers", which needs no basis'
            fail(
                "basis",
                expected=f"a PositionContext for parts={parts!r}",
                got=None,
                instead=instead,
            )
        known = not double or preset == "reference"
        require(known, "legacy_double_ln", expected="preset='reference'", got=repr(preset))
        self.view, self.basis, self.parts = view, basis, parts
        self.preset, self.double, self.own = preset, double, own
        self.written: Written | None = None
        self.layers = tuple(sorted(layers))
        self.normalized = not own and basis is not None and basis.provenance.normalized
        require(
            preset == "exact" or not self.normalized,
            f"basis with preset={preset!r}",
            expected="a basis of the states themselves, as published",
            got="a normalised basis",
            instead="decompose(model, tokens, normalize=False), or preset='exact'",
        )
        self.flags: list[str] = []
        if basis is not None and not own:
            basis.require_identifiable("split")
            for layer in self.layers:
                basis.index(layer)

    def stream(self, layer: LayerView) -> dict[str, Tensor]:
        """Additive parts of a layer's input, the mean first unless the parts are the caller's
        own."""
        if isinstance(self.parts, Mapping):
            return _own_parts(self.parts, layer, self.layers, self.view.n_layers)
        if isinstance(self.parts, str):
            return self._by_writers(layer, self.parts)
        basis = cast(PositionContext, self.basis)
        row, h = basis.index(layer.layer), layer.h.double()
        length = h.shape[1]
        mean = basis.mean[row].to(h.device)
        pos = basis.pos_seen[row, :length].to(h.device)
        cvec = h - mean - pos
        found = {"mean": mean.expand_as(h), "pos": pos.expand_as(h), "cvec": cvec}
        if "ctx" in self.parts:
            inside = slice(min(basis.window[0], length - 1), max(min(basis.window[1], length), 1))
            ctx = cvec[:, inside].mean(1, keepdim=True).expand_as(h)
            found = {"mean": found["mean"], "pos": found["pos"], "ctx": ctx, "resid": cvec - ctx}
        return {name: value.to(layer.h) for name, value in found.items()}

    def on_written(self, written: Written) -> None:
        """Take the writers of the next layer's input."""
        self.written = written

    def _by_writers(self, layer: LayerView, grain: str) -> dict[str, Tensor]:
        """Writers of a layer's input, zeros for those that come later and are read by another."""
        found = cast(Written, self.written).parts(grain)
        nothing = torch.zeros_like(layer.h)
        names = [w.name for w in writer_names(self.view, max(self.layers), grain)]
        return {name: found.get(name, nothing) for name in names}

    def reading(self, layer: LayerView) -> LayerView:
        """The layer as a function of what is split: its input, or with a normalised basis the
        normed input."""
        return layer.normalized() if self.normalized else layer

    def layer(
        self, layer: LayerView, heads: Sequence[int], device: torch.device | str
    ) -> HeadTerms:
        """Project one layer's parts for the chosen heads and check that they add up."""
        layer = self.reading(layer)
        require(
            layer.added is None or self.preset == "exact",
            "preset",
            got=repr(self.preset),
            instead="preset='exact'",
            expected="'exact' where positions are added to queries and keys (Shortformer)",
            error=UnsupportedModelError,
        )
        if self.preset == "exact":
            q, k, again = self._project(layer, "q") * layer.scale, self._project(layer, "k"), None
        else:
            q, k, again = (self._paper if self.preset == "paper" else self._reference)(layer)
        measured = layer.bias is not None and layer.bias_source == "measured"
        found = ["scores before the soft cap"] if layer.softcap is not None else []
        found += ["ALiBi measured"] if measured else []
        self.flags = list(dict.fromkeys([*self.flags, *found]))
        checks = [(layer.layer, name, *pair) for name, pair in layer.reconstruction.checks.items()]
        scale, n, length = layer.reconstruction.scale, len(heads), layer.h.shape[1]
        cells = torch.tensor(heads, device=q.device)
        q, k = q[..., cells, :], k[..., cells, :]
        if self.preset == "exact":
            scale = self._compare(layer, q, k, cells, checks)
        options = {"dtype": layer.h.dtype, "device": device}
        cap = torch.inf if layer.softcap is None else layer.softcap
        own = (
            einsum(layer.q[:, :, cells], layer.k[:, :, cells], "b i h e, b j h e -> b h i j")
            * layer.scale
        )
        own = own if layer.bias is None else own + layer.bias[cells]
        return HeadTerms(
            layer=layer.layer,
            heads=tuple(heads),
            q=q.to(device),
            k=k.to(device),
            bias=None if layer.bias is None else layer.bias[cells].to(device),
            allowed=layer.allowed.to(device).expand(n, length, length).clone(),
            softcap=torch.full((n,), cap, **options),
            sinks=torch.full((n,), -torch.inf, **options)
            if layer.sinks is None
            else layer.sinks[cells].to(device),
            scores=own.to(device) if self.preset == "reference" else None,
            q_again=None if again is None else again[..., cells, :].to(device),
            checks=checks,
            scale=scale,
            rotary=layer.rotary and not self.own and "mean" not in self.parts,
            relative=is_relative(layer),
            planes=rotary_planes(layer),
        )

    def values(self, layer: LayerView) -> Float[Tensor, "part batch position head d_head"]:
        """Values of the parts, the constants with ``bias``."""
        return self._project(self.reading(layer), "v")

    def _project(
        self, layer: LayerView, which: str
    ) -> Float[Tensor, "part batch position head d_head"]:
        """All parts by themselves, the constants with ``bias``; nothing is got by subtraction."""
        side, parts = Side.of(layer, which), self.stream(layer)
        if self.own:
            own = side.project(torch.stack(list(parts.values())))
            return torch.cat([side.constant.unsqueeze(0), own])
        mapped = side.map(torch.stack(list(parts.values())))
        apart = "mean" in self.parts
        mean = torch.zeros_like(mapped[0]) if apart else mapped[0]
        bias, pos = side.bias_and_pos(torch.stack([mean, mapped[1]]))
        scaled = mapped * side.frozen.unsqueeze(-1)
        kept = [bias, *([scaled[0]] if apart else []), pos, *scaled[2:]]
        return torch.stack(kept)

    def _paper(self, layer: LayerView) -> tuple[Tensor, Tensor, None]:
        weights = self.view.weights(layer.layer)
        values = torch.stack(list(self.stream(layer).values()))
        scale = layer.q.shape[-1] ** -0.5
        q = einsum(values, weights.W_Q.to(values), "part b i d, h d e -> part b i h e") * scale
        return q, einsum(values, weights.W_K.to(values), "part b i d, h d e -> part b i h e"), None

    def _reference(self, layer: LayerView) -> tuple[Tensor, Tensor, Tensor | None]:
        frozen = torch.equal(layer.q_scale, layer.v_scale) and torch.equal(
            layer.k_scale, layer.v_scale
        )
        require(
            frozen,
            "preset",
            expected="'exact' for models with QK-norm",
            got="'reference'",
            instead="preset='exact'",
        )
        stream = self.stream(layer)
        values = torch.stack([stream["pos"], stream["cvec"] + stream["mean"]])

        def through(x: Tensor, project: Callable[[Tensor], Tensor], constant: Tensor) -> Tensor:
            return project(x) / layer.norm.scale(x)[..., None, None] + constant

        q = through(values, layer.q_map, layer.q_constant) * layer.scale
        k = through(values, layer.k_map, layer.k_constant)
        again = (
            through(layer.norm.apply(values), layer.q_map, layer.q_constant) * layer.scale
            if self.double
            else None
        )
        return q, k, again

    def _compare(
        self, layer: LayerView, q: Tensor, k: Tensor, heads: Tensor, checks: list[Check]
    ) -> float:
        """Compare the sum of all terms with the model's numbers; returns A, the largest product of
        the parts' absolute values."""
        for name, ours, model in (("q parts", q / layer.scale, layer.q), ("k parts", k, layer.k)):
            size = max(float(ours.abs().sum(0).max()), layer.reconstruction.sizes.get(name[0], 0.0))
            bound = reconstruction_bound(layer.roundoff, size)
            checks.append(
                (layer.layer, name, float((ours.sum(0) - model[:, :, heads]).abs().max()), bound)
            )
        worst, scale = {"sum pattern": 0.0, "sum scores": 0.0}, 0.0
        spreads: list[Tensor] = []
        step = max(1, CHUNK // (layer.h.shape[0] * layer.h.shape[1] ** 2))
        sums, sizes = (q.sum(0), k.sum(0)), (q.abs().sum(0), k.abs().sum(0))
        for some in torch.arange(len(heads)).split(step):
            which = heads[some]
            total, size = (
                einsum(a[:, :, some], b[:, :, some], "b i h e, b j h e -> b h i j")
                for a, b in (sums, sizes)
            )
            if layer.bias is not None:
                total, size = total + layer.bias[which], size + layer.bias[which].abs()
            scale = max(scale, float(torch.where(layer.allowed, size, 0.0).max()))
            spreads.append(head_spreads(total, layer.allowed))
            capped = (
                total
                if layer.softcap is None
                else layer.softcap * torch.tanh(total / layer.softcap)
            )
            if layer.scores is not None:
                error = torch.where(layer.allowed, capped - layer.scores[:, which], 0.0).abs().max()
                worst["sum scores"] = max(worst["sum scores"], float(error))
            if layer.pattern is not None:
                error = pattern_error(
                    capped, layer.pattern[:, which], layer.allowed, layer.roundoff
                )
                worst["sum pattern"] = max(worst["sum pattern"], error)
        if layer.pattern is not None:
            bound = pattern_bound(layer.pattern, layer.roundoff, scale)
            checks.append((layer.layer, "sum pattern", worst["sum pattern"], bound))
        if layer.scores is not None:
            checks.append(
                (
                    layer.layer,
                    "sum scores",
                    worst["sum scores"],
                    reconstruction_bound(layer.roundoff, scale),
                )
            )
        require_reconstruction(checks, f"split of layer {layer.layer}")
        scales, what = (layer.reconstruction.scale, scale), f"layer {layer.layer}"
        self.flags += judge_rounding(layer.roundoff, scales, torch.cat(spreads), what)
        return scale


def rounding_flags(
    layer: LayerView,
    q: Float[Tensor, "part batch position head d_head"],
    k: Float[Tensor, "part batch position head d_head"],
    queries: slice = slice(None),
    heads: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """:func:`judge_rounding` for the parts of some queries (after the scale) and of all keys, of
    ``heads`` (all)."""
    own = layer.reconstruction.scale or float(
        q.sum(0).norm(dim=-1).max() * k.sum(0).norm(dim=-1).max()  # of a layer without checks
    )
    q, allowed = q[:, :, queries], layer.allowed[queries]
    total, size = (
        einsum(a, b, "b i h e, b j h e -> b h i j")
        for a, b in ((q.sum(0), k.sum(0)), (q.abs().sum(0), k.abs().sum(0)))
    )
    if layer.bias is not None:
        bias = (layer.bias if heads is None else layer.bias[list(heads)])[:, queries]
        total, size = total + bias, size + bias.abs()
    scale = float(torch.where(allowed, size, 0.0).max())
    spreads = head_spreads(total, allowed)
    return judge_rounding(layer.roundoff, (own, scale), spreads, f"layer {layer.layer}")


def is_relative(layer: LayerView) -> bool:
    """Whether no frozen scale varies by token, so that products of constants depend on the rotation
    alone."""
    return all(bool((scale == 1).all()) for scale in (layer.q_scale, layer.k_scale))


def _own_parts(
    parts: UserParts, layer: LayerView, layers: Sequence[int], n_layers: int
) -> dict[str, Tensor]:
    """The caller's parts for one layer, if they sum to its input."""
    found: dict[str, Tensor] = {}
    for name, value in parts.items():
        if value.dim() == 4:
            known = (n_layers, n_layers + 1, len(layers))
            expected = f"a first axis of {n_layers} layers or of the {len(layers)} chosen"
            fits = len(value) in known
            require(fits, f"part {name!r}", expected=expected, got=describe(value))
            chosen = len(value) == len(layers) and len(layers) < n_layers
            value = value[layers.index(layer.layer) if chosen else layer.layer]
        require(
            value.shape == layer.h.shape,
            f"part {name!r}",
            expected=f"shape {tuple(layer.h.shape)}",
            got=describe(value),
        )
        found[name] = checks.finite(value, f"part {name!r}").to(layer.h.device)
    total = torch.stack([v.double() for v in found.values()]).sum(0)
    size = torch.stack([v.double().abs() for v in found.values()]).sum(0).max()
    coarsest = max([layer.roundoff, *(unit_roundoff(v.dtype) for v in found.values())])
    rest = total - layer.h.double()
    error = float(rest.abs().max())
    _refuse_added(layer, rest)
    require(
        error <= max(reconstruction_bound(coarsest, float(size)), 1e-12 * float(size)),
        "parts",
        expected=f"parts that sum to the input of layer {layer.layer}",
        got=f"a sum that is off by {error:.3g}",
        instead="one more part for the rest",
    )
    return {name: value.to(layer.h) for name, value in found.items()}


def _refuse_added(layer: LayerView, rest: Tensor) -> None:
    """Refuse parts that hold the positional embedding of a model that adds it after the norm, not
    to the stream."""
    if layer.added is None:
        return
    embedding = layer.added.embedding.double().expand_as(rest)
    far = float((rest - embedding).abs().max()) > 1e-3 * float(embedding.abs().max())
    require(
        far,
        "parts",
        expected=f"parts that sum to the input of layer {layer.layer}",
        got="the positional embedding among them",
        instead="the parts without it (added to queries and keys after the norm, it is in 'bias')",
    )
