"""How a forward pass went through the attention layers of a model: :class:`Layers` reads each layer
once on the probe, makes its view (:class:`~tl_geometry.models.layer_view.LayerView`) from the
activations of any pass, and compares it with the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tl_geometry.base.checks import describe, index
from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError, fail, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.models.attention import (
    Attention,
    Reading,
    alibi,
    allowed_cells,
    attention_of,
    rotation_of,
    scores_of,
)
from tl_geometry.models.infer import infer_layer
from tl_geometry.models.layer_view import LayerHook, LayerView, frozen_fields
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import Parameters, inner, part, upcast
from tl_geometry.models.reconstruction import ReconstructionReport, require_reconstruction
from tl_geometry.models.runner import Hook, Runner, brief, hooked_points, keep

CORE = (
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_z",
    "attn.hook_pattern",
    "attn.hook_attn_scores",
)
TABLES = ("attn.hook_cos", "attn.hook_sin")
"""Hooks of a layer, beside its input, that a view is made from: ``CORE`` in every class, rotary
``TABLES`` where there are any."""
OnLayer = Callable[[int, Mapping[str, Tensor]], None]
"""Receives a layer, and its activations by hook name."""


@dataclass(eq=False)
class Layers:
    """The attention layers of one model; behind the methods of
    :class:`tl_geometry.models.ModelView` that are about layers. ``found`` keeps what was inferred,
    by name, as long as the weights stay the same."""

    parameters: Parameters
    runner: Runner
    probe: Mapping[str, Tensor]
    causal: bool
    found: dict[Any, Any] = field(default_factory=dict)

    def reading(self, layer: int) -> Reading:
        """How one layer is read, inferred on first use."""
        index(layer, len(self.parameters.model.blocks), "layer")
        key = ("attention", layer)
        if key not in self.found:
            self.parameters.attention(layer)
            names = [f"blocks.{layer}.{name}" for name in CORE]
            missing = [name for name in names if name not in self.probe]
            if missing:
                what, got = f"layer {layer} of {self.parameters.name}", f"no {', '.join(missing)}"
                expected = "hooks of queries, keys and pattern"
                instead = "a model with eager attention"
                fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
            self.found[key] = infer_layer(self.parameters, layer, self.probe, self.causal)
        return self.found[key]

    def attention(self, layer: int, like: Tensor) -> Attention:
        """The layer with its tensors as they are now, in dtype and on the device of ``like``."""
        module, ln1 = self.parameters.attention(layer), part(self.parameters.block(layer), "ln1")
        weights = self.parameters.weights(layer).to(like)
        return attention_of(module, ln1, weights, self.reading(layer))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return next(iter(self.parameters.model.parameters())).dtype

    @torch.no_grad()
    def norm(self, layer: int) -> NormWeights:
        """The norm in front of the projections of one layer, as the model has it."""
        like = upcast(next(iter(self.parameters.model.parameters())))
        return self.attention(layer, like).norm

    def has_sinks(self, layer: int) -> bool:
        """Whether the heads of a layer have one more logit each."""
        return part(inner(self.parameters.attention(layer)), "sinks") is not None

    def key_heads(self, layer: int) -> int:
        """How many heads of keys and values a layer has."""
        return self.probe[f"blocks.{layer}.attn.hook_k"].shape[-2]

    def describe(self, layer: int) -> dict[str, str]:
        """How a layer makes its scores, in words."""
        reading, heads = self.reading(layer), self.probe[f"blocks.{layer}.attn.hook_q"].shape[-2]
        qk = reading.qk
        over = "" if qk is None else f" over {'all heads' if qk.flat else 'each head'}"
        pairs = {None: "none", "half": "pairs (i, i + n/2)", "adjacent": "pairs (2i, 2i+1)"}
        return {
            "norm before attention": reading.norm.norm_type or "none",
            "key and value heads": f"{self.key_heads(layer)} for {heads} query heads",
            "QK-norm": "none" if qk is None else f"{qk.norm_type}{over}",
            "rotation": pairs[reading.rotation],
            "score scale": f"{reading.scale:.6g}",
            "soft cap": "none" if reading.softcap is None else f"{reading.softcap:g}",
            "sinks": "one logit for each head" if self.has_sinks(layer) else "none",
            "score bias": "none" if reading.slopes is None else "ALiBi",
            "sliding window": "none" if reading.window is None else f"{reading.window} positions",
            "hook_attn_scores holds": "scores" if reading.has_scores else "the pattern",
        }

    def hooks(self, layer: int) -> tuple[str, ...]:
        """Hooks that a cache must hold for :meth:`view`."""
        reading = self.reading(layer)
        names = [h for h in CORE if h != "attn.hook_attn_scores" or reading.has_scores]
        if reading.rotation is not None:
            names += [h for h in TABLES if f"blocks.{layer}.{h}" in self.probe]
        return (f"blocks.{layer}.hook_resid_pre", *(f"blocks.{layer}.{h}" for h in names))

    def view(self, layer: int, cache: Any, *, verify: bool = True) -> LayerView:
        """The layer as this forward pass went through it, verified. Without ``verify`` pattern,
        scores and z may be missing, and gradients pass through the activations and weights.

        Raises ``ReconstructionError`` where recomputed queries, keys, scores or patterns are not
        the model's within the reconstruction error.
        """
        names = self.hooks(layer)
        # an ActivationCache is no Mapping
        entries: Mapping[str, Tensor] = getattr(cache, "cache_dict", cache)
        activations = {name: entries[name] for name in names if name in entries}
        # needed only to verify; some fire after hook_z
        optional = () if verify else ("hook_pattern", "hook_attn_scores", "hook_z")
        missing = [n for n in names if n not in activations and not n.endswith(optional)]
        got = f"no {', '.join(missing)}"
        instead = "model.run_with_cache(tokens) without names_filter"
        require(not missing, "cache", expected=f"hooks of layer {layer}", got=got, instead=instead)
        h = activations[names[0]]
        expected, got = "a batch dimension", describe(h)
        require(h.dim() == 3, "cache", expected=expected, got=got, instead="remove_batch_dim=False")
        return self.build(layer, activations, verify=verify)

    def sampled(
        self, layer: int, activations: Mapping[str, Tensor], row: int
    ) -> tuple[LayerView, LayerView]:
        """Two views of a layer: of the context ``row`` alone, verified, and of the whole batch, not
        verified."""
        tables = ("hook_cos", "hook_sin")  # those of all contexts
        one = {k: v if k.endswith(tables) else v[row : row + 1] for k, v in activations.items()}
        return self.build(layer, one, verify=True), self.build(layer, activations, verify=False)

    def build(self, layer: int, activations: Mapping[str, Tensor], *, verify: bool) -> LayerView:
        """The view of a layer from its activations by hook name."""
        if not verify:
            return self._build(layer, activations, verify)
        with torch.no_grad():
            return self._build(layer, activations, verify)

    def _build(self, layer: int, activations: Mapping[str, Tensor], verify: bool) -> LayerView:
        prefix, reading = f"blocks.{layer}.attn.", self.reading(layer)
        h = upcast(activations[f"blocks.{layer}.hook_resid_pre"])
        attention, length = self.attention(layer, h), h.shape[1]
        heads = len(attention.weights.W_Q)

        def cached(name: str) -> Tensor | None:
            """The model's activation, if it is there, with grouped heads expanded."""
            value = activations.get(f"{prefix}hook_{name}")
            if value is not None and name in "qkv" and value.shape[-2] != heads:
                value = value.repeat_interleave(heads // value.shape[-2], -2)
            return None if value is None else upcast(value)

        hooked = {w: cached(w) for w in "qk"}
        # queries and keys are the model's own where they are not verified
        raw = {
            w: x if x is not None and not verify else attention.raw(h, w) for w, x in hooked.items()
        }
        module = self.parameters.attention(layer)
        turn = rotation_of(module, activations, prefix, length, reading)
        turn = None if turn is None else turn._replace(cos=turn.cos.to(h), sin=turn.sin.to(h))
        masked = activations.get(f"{prefix}hook_attn_scores") if reading.has_scores else None
        allowed = allowed_cells(module, reading, length, self.causal, masked, h)
        scores, frozen = (
            cached("attn_scores") if reading.has_scores else None,
            frozen_fields(attention, h, raw, turn),
        )
        bias, own = None, None
        if reading.slopes is not None:
            own = scores_of(frozen["q"][:1].detach(), frozen["k"][:1].detach(), reading.scale)
            slopes = own.new_tensor(reading.slopes)
            bias = alibi(slopes, own, None if scores is None else scores.detach(), allowed)
        pattern, z = (None if t is None else t.detach() for t in (cached("pattern"), cached("z")))
        view = LayerView(
            layer=layer,
            attention=attention,
            h=h,
            **frozen,
            v=cached("v"),
            z=z,
            pattern=pattern,
            scores=None if scores is None else scores.detach(),
            bias=bias,
            allowed=allowed,
            turn=turn,
            roundoff=self.roundoff,
            reconstruction=ReconstructionReport(checks={}, scale=0.0),
        )
        if not verify:
            return view
        report = view.report(raw, hooked)
        if not report.adds_up:
            self._refuse(view, report)
        return replace(view, reconstruction=report)

    def _refuse(self, view: LayerView, report: ReconstructionReport) -> NoReturn:
        """Say why a layer does not add up: a mask that differs between prompts or heads, user
        hooks, or by how much."""
        prefix = f"blocks.{view.layer}."
        hooks = [name for name in hooked_points(self.parameters.model) if name.startswith(prefix)]
        acting = f", under hooks at {brief(hooks)}" if hooks else ""
        what = f"layer {view.layer} of {self.parameters.name}{acting}"
        if view.scores is not None:
            # no query and key of these sizes make a score that low
            hidden = view.scores < -2 * max(report.scale, 1.0)
            masked = int((hidden == view.allowed).flatten(1).any(1).sum())
            if masked:
                expected = "one mask for all prompts and heads, of minus infinity"
                got = f"other masked keys in {masked} of {len(view.h)} prompts, as padding makes"
                instead = "prompts of one length without padding"
                instead += ", or the model without these hooks" if hooks else ""
                options = {"instead": instead, "error": ReconstructionError}
                fail(f"mask of {what}", expected=expected, got=got, **options)
        require_reconstruction(
            [(view.layer, name, *pair) for name, pair in report.checks.items()], what
        )
        raise AssertionError("a report that does not add up names a check")

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the model's arithmetic, never below that of float32: models in float64
        compute in float32 in places."""
        return max(unit_roundoff(self.dtype), unit_roundoff(torch.float32))

    # ---- passes

    def run(
        self,
        tokens: Tensor,
        layers: Sequence[int],
        on_layer: LayerHook,
        *,
        verify: bool = True,
        sample: tuple[int, LayerHook] | None = None,
    ) -> None:
        """One forward pass; each layer is handed over at its end and let go."""

        def take(layer: int, activations: Mapping[str, Tensor]) -> None:
            if sample is None:
                on_layer(self.build(layer, activations, verify=verify))
                return
            row, on_sample = sample
            one, every = self.sampled(layer, activations, row)
            on_sample(one)
            on_layer(every)

        self.stream(tokens, {layer: self.hooks(layer) for layer in layers}, take)

    def stream(
        self,
        tokens: Tensor,
        names: Mapping[int, Sequence[str]],
        take: OnLayer,
        last: str | None = None,
    ) -> Tensor | None:
        """One forward pass that hands over each layer's activations (``names``) once the layer is
        done, and lets them go; returns the activation of the hook ``last``."""
        held: dict[str, Tensor] = {}
        hooks = {name: keep(held, name) for of_layer in names.values() for name in of_layer}
        if last is not None:
            hooks[last] = keep(held, last)

        def finish(layer: int, record: Hook | None) -> Hook:
            def hook(value: Tensor) -> None:
                take(layer, {name: held.pop(name) for name in names[layer]})
                if record is not None:  # the output of this layer is the input of the next
                    record(value)

            return hook

        for layer in names:
            end = self.runner.state_hooks[layer + 1]
            hooks[end] = finish(layer, hooks.get(end))
        self.runner(tokens, hooks)
        return None if last is None else held[last]
