"""Cutting a layer's input into parts, projecting them to queries and keys, and checking that the
terms add up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import BudgetError, UnsupportedModelError, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import LayerHook, ModelView
from tl_geometry.models.reconstruction import (
    CHUNK,
    Check,
    pattern_bound,
    pattern_error,
    reconstruction_bound,
    require_reconstruction,
)

BIAS, ALIBI = "bias", "alibi"
STREAM_PARTS = (
    ("pos", "cvec"),
    ("pos", "ctx", "resid"),
    ("mean", "pos", "cvec"),
    ("mean", "pos", "ctx", "resid"),
)
"""Named splits of the stream; without ``mean`` the mean belongs to ``bias``."""
CACHE_TOLERANCE = 0.02
"""Relative difference of a state beyond which a cache is one of other tokens: above the rounding of
half precision."""
UserParts = Mapping[
    str, Float[Tensor, "batch position d_model"] | Float[Tensor, "layer batch position d_model"]
]


def part_names(parts: Sequence[str] | UserParts, preset: str) -> tuple[str, ...]:
    """Names of the parts in the order of the part axis, or an error that lists what is possible."""
    if isinstance(parts, Mapping):
        require(
            preset == "exact", "preset", expected="'exact' with parts of your own", got=repr(preset)
        )
        bad = [n for n in parts if n in (BIAS, ALIBI) or "-" in n]
        require(
            len(parts) > 0 and not bad,
            "parts",
            expected="names other than bias and alibi, without '-'",
            got=bad or "none",
        )
        return (BIAS, *parts)
    given = tuple(parts)
    require(
        given in STREAM_PARTS,
        "parts",
        expected=f"one of {STREAM_PARTS}, or a mapping from names to tensors",
        got=repr(given),
    )
    if preset == "exact":
        return (BIAS, *given)
    require(
        given == ("pos", "cvec"),
        "parts",
        expected=f"('pos', 'cvec') with preset={preset!r}",
        got=repr(given),
    )
    return ("mean", *given) if preset == "paper" else given


def check_request(
    view: ModelView,
    rows: TokenWindows,
    basis: PositionContext | None,
    size: int,
    budget: int,
    heads: int,
) -> None:
    """Raise unless the basis is of this model, has seen these positions, and ``size`` bytes fit the
    budget."""
    length = rows.tokens.shape[1]
    if basis is not None:
        require_basis(basis)
        basis.check_model(view, rows.has_bos if view.bos_id is not None else None)
        require(
            length <= basis.columns,
            "tokens",
            expected=f"at most {basis.columns} positions, as the basis has seen",
            got=length,
            instead="decompose(model, longer windows)",
        )
    require(
        size <= budget,
        "split",
        expected=f"at most memory_budget={budget} bytes",
        got=f"{size} bytes for {heads} heads",
        instead="heads= to choose some, or sweep_heads for all",
        error=BudgetError,
    )


def each_layer(
    view: ModelView, rows: TokenWindows, cache: Any, layers: Sequence[int], on_layer: LayerHook
) -> None:
    """Views of the layers, from one forward pass or from a cache of these tokens."""
    if cache is None:
        view.run_layers(rows.tokens, layers, on_layer)
        return
    _check_cache(view, rows, cache)
    for layer in layers:
        found = view.layer(layer, cache)
        shape = tuple(found.h.shape[:2])
        require(
            shape == tuple(rows.tokens.shape),
            "cache",
            expected=f"activations of tokens {tuple(rows.tokens.shape)}",
            got=shape,
        )
        on_layer(found)


def _check_cache(view: ModelView, rows: TokenWindows, cache: Any) -> None:
    """Refuse a cache whose first state is not what the model makes of these tokens (far beyond
    rounding, at any of them)."""
    shape = tuple(rows.tokens.shape)
    mapping = hasattr(cache, "cache_dict") or isinstance(cache, Mapping)
    require(
        mapping,
        "cache",
        expected="an ActivationCache, or a mapping from hook names",
        got=describe(cache),
        instead="cache=None",
    )
    name = next((name for name in view.state_hooks if name in cache), None)
    if name is None or tuple(cache[name].shape[:2]) != shape:
        return  # refused with the layer
    own = view.activations(rows.tokens, [name])[name].float()
    theirs = cache[name].to(own.device).float()
    far = torch.linalg.vector_norm(
        own - theirs, dim=-1
    ) > CACHE_TOLERANCE * torch.linalg.vector_norm(own, dim=-1)
    require(
        not bool(far.any()),
        "cache",
        expected="activations of these tokens",
        got=f"others at {int(far.sum())} tokens",
        instead="cache=None",
    )


def provenance_of(
    view: ModelView,
    rows: TokenWindows,
    basis: PositionContext | None,
    preset: str,
    flags: Sequence[str],
    normalized: bool,
) -> Provenance:
    """What a split was computed from."""
    start = 0 if basis is None else min(basis.window[0], rows.tokens.shape[1] - 1)
    window, about = (start, rows.tokens.shape[1]), () if basis is None else basis.remarks(view)
    return view.provenance(
        rows, window=window, preset=preset, flags=(*flags, *about), normalized=normalized
    )


@dataclass(frozen=True, eq=False)
class Piece:
    """The chosen heads of one layer."""

    layer: int
    heads: tuple[int, ...]
    q: Tensor
    k: Tensor
    bias: Tensor | None
    allowed: Tensor
    softcap: Tensor
    sinks: Tensor
    scores: Tensor | None
    q_again: Tensor | None
    checks: list[Check]
    scale: float
    rotary: bool
    relative: bool


class Cut:
    """Cuts layers into parts and projects them; with a normalised basis the parts are those of the
    normed stream.

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
        own = isinstance(parts, Mapping)
        require(
            own or basis is not None,
            "basis",
            expected="a PositionContext",
            got=None,
            instead="decompose(model, tokens)",
        )
        require(
            not double or preset == "reference",
            "legacy_double_ln",
            expected="preset='reference'",
            got=repr(preset),
        )
        self.view, self.basis, self.parts, self.preset, self.double = (
            view,
            basis,
            parts,
            preset,
            double,
        )
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
        basis = cast(PositionContext, self.basis)
        row, h = basis.index(layer.layer), layer.h.double()
        length = h.shape[1]
        mean = basis.mean[row].to(h.device)
        pos = basis.pos_columns[row, :length].to(h.device)
        cvec = h - mean - pos
        found = {"mean": mean.expand_as(h), "pos": pos.expand_as(h), "cvec": cvec}
        if "ctx" in self.parts:
            inside = slice(min(basis.window[0], length - 1), max(min(basis.window[1], length), 1))
            ctx = cvec[:, inside].mean(1, keepdim=True).expand_as(h)
            found = {"mean": found["mean"], "pos": found["pos"], "ctx": ctx, "resid": cvec - ctx}
        return {name: value.to(layer.h) for name, value in found.items()}

    def reading(self, layer: LayerView) -> LayerView:
        """The layer as a function of what is split: its input, or with a normalised basis the
        normed input."""
        return layer.normalized() if self.normalized else layer

    def layer(self, layer: LayerView, heads: Sequence[int], device: torch.device | str) -> Piece:
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
        make = {"exact": self._exact, "paper": self._paper, "reference": self._reference}[
            self.preset
        ]
        q, k, again = make(layer)
        if layer.softcap is not None and "scores before the soft cap" not in self.flags:
            self.flags.append("scores before the soft cap")
        if (
            layer.bias is not None
            and layer.bias_source == "measured"
            and "ALiBi measured" not in self.flags
        ):
            self.flags.append("ALiBi measured")
        checks = [(layer.layer, name, *pair) for name, pair in layer.reconstruction.checks.items()]
        scale, n, length = layer.reconstruction.scale, len(heads), layer.h.shape[1]
        cells = torch.tensor(heads, device=q.device)
        q, k = q[..., cells, :], k[..., cells, :]
        if self.preset == "exact":
            scale = self._close(layer, q, k, cells, checks)
        options = {"dtype": layer.h.dtype, "device": device}
        cap = torch.inf if layer.softcap is None else layer.softcap
        own = (
            einsum(layer.q[:, :, cells], layer.k[:, :, cells], "b i h e, b j h e -> b h i j")
            * layer.scale
        )
        own = own if layer.bias is None else own + layer.bias[cells]
        return Piece(
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
            rotary=layer.rotary and self._merged,
            relative=is_relative(layer),
        )

    @property
    def _merged(self) -> bool:
        """Whether ``bias`` holds the mean, or the constants alone."""
        return not isinstance(self.parts, Mapping) and "mean" not in self.parts

    def _exact(self, layer: LayerView) -> tuple[Tensor, Tensor, None]:
        return self._project(layer, "q") * layer.scale, self._project(layer, "k"), None

    def values(self, layer: LayerView) -> Float[Tensor, "part batch position head d_head"]:
        """Values of the parts, the constants with ``bias``."""
        return self._project(self.reading(layer), "v")

    def _project(
        self, layer: LayerView, which: str
    ) -> Float[Tensor, "part batch position head d_head"]:
        project = {"q": layer.project_q, "k": layer.project_k, "v": layer.project_v}[which]
        constant = {"q": layer.q_constant, "k": layer.k_constant, "v": layer.v_constant}[which]
        projected = project(torch.stack(list(self.stream(layer).values())))
        if layer.added is not None and which != "v" and not isinstance(self.parts, Mapping):
            added = (
                layer.added.q if which == "q" else layer.added.k
            )  # position, though not in the stream
            constant, projected = (
                constant - added,
                torch.cat([projected[:1], projected[1:2] + added, projected[2:]]),
            )
        first = constant + projected[0] if self._merged else constant
        return torch.cat([first.unsqueeze(0), projected[1:] if self._merged else projected])

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
            return project(x) / _norm_scale(layer, x)[..., None, None] + constant

        q = through(values, layer.q_map, layer.q_constant) * layer.scale
        k = through(values, layer.k_map, layer.k_constant)
        again = (
            through(_normalized(layer, values), layer.q_map, layer.q_constant) * layer.scale
            if self.double
            else None
        )
        return q, k, again

    def _close(
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
        return scale


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
            known = {
                n_layers: layer.layer,
                n_layers + 1: layer.layer,
                len(layers): layers.index(layer.layer),
            }
            require(
                len(value) in known,
                f"part {name!r}",
                expected=f"a first axis of {n_layers} layers or of the {len(layers)} chosen",
                got=describe(value),
            )
            value = value[
                known[len(value)]
                if len(value) != len(layers) or len(layers) >= n_layers
                else layers.index(layer.layer)
            ]
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
        instead="the parts without it (it is added to queries and keys after the norm, and is in 'bias')",
    )


def _norm_scale(layer: LayerView, x: Tensor) -> Tensor:
    if layer.norm.norm_type is None:
        return torch.ones_like(x[..., 0])
    x = x - x.mean(-1, keepdim=True) if layer.norm.norm_type == "LN" else x
    return (x.square().mean(-1) + layer.norm.eps).sqrt()


def _normalized(layer: LayerView, x: Tensor) -> Tensor:
    """The whole norm, gain and bias included."""
    centred = x - x.mean(-1, keepdim=True) if layer.norm.norm_type == "LN" else x
    return centred / _norm_scale(layer, x).unsqueeze(-1) * layer.norm.gain + layer.norm.bias
