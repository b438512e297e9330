"""How a forward pass went through the attention layers of a model: :class:`Layers`, the half of a
:class:`~tl_geometry.models.model_view.ModelView` that reads each layer once on the probe, makes its
view (:class:`~tl_geometry.models.layer_view.LayerView`) from the activations of any pass, and
compares it with the model's own numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tl_geometry.base.checks import index
from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.models.attention import (
    Attention,
    Reading,
    alibi,
    allowed_cells,
    attention_of,
    cached,
    rotary_tables,
)
from tl_geometry.models.infer import infer_layer
from tl_geometry.models.layer_view import LayerHook, LayerView
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import (
    HeadWeights,
    added_times,
    head_weights,
    inner,
    part,
    upcast,
)
from tl_geometry.models.reconstruction import (
    ReconstructionReport,
    require_reconstruction,
    some_rows,
)
from tl_geometry.models.runner import TABLES, Hook, Runner, brief, hooked_points, keep
from tl_geometry.models.states import entries_of

CORE = tuple(f"attn.hook_{n}" for n in ("q", "k", "v", "z", "pattern", "attn_scores"))
"""Hooks of a layer, beside its input and rotary tables, that a view is made from."""
OnLayer = Callable[[int, Mapping[str, Tensor]], None]
"""Receives a layer, and its activations by hook name."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Layers(Runner):
    """What :class:`~tl_geometry.models.model_view.ModelView` can say about its attention layers.
    ``_found`` keeps what was inferred, by name, as long as the weights stay the same."""

    causal: bool
    _probe: Mapping[str, Tensor]
    _found: dict[Any, Any] = field(default_factory=dict)

    @property
    def roundoff(self) -> float:
        """Unit roundoff of the model's arithmetic, never below that of float32: models in float64
        compute in float32 in places."""
        return max(unit_roundoff(next(iter(self._model.parameters())).dtype), 2**-24)

    def layer_facts(self, layer: int) -> Reading:
        """How one attention layer is read, inferred on first use and verified."""
        return self.once(("attention", layer), lambda: self._infer_layer(layer))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` found, which is compared in float64, remembered as long as the weights stay
        the same."""
        if key not in self._found:
            place, instead = next(iter(self._model.parameters())).device.type, 'model.to("cpu")'
            require(place != "mps", self.name, expected="float64", got="MPS", instead=instead)
            self._found[key] = make()
        return self._found[key]

    def _infer_layer(self, layer: int) -> Reading:
        weights, name = self.weights(layer), f"layer {layer} of {self.name}"
        missing = [n for n in CORE if f"blocks.{layer}.{n}" not in self._probe]
        expected = "hooks of queries, keys and pattern, as eager attention has"
        got, kind = f"no {', '.join(missing)}", UnsupportedModelError
        require(not missing, name, expected=expected, got=got, error=kind)
        return infer_layer(self._model, layer, weights, self._probe, self.causal)

    @torch.no_grad()
    def weights(self, layer: int) -> HeadWeights:
        """Weights of the heads of one layer, grouped keys expanded, at least float32; ``W_O`` and
        ``b_O`` as the block adds them to the stream."""
        return self._weights(layer)

    def _weights(self, layer: int) -> HeadWeights:
        """:meth:`weights`, through which gradients reach the parameters."""
        block = self._model.blocks[index(layer, len(self._model.blocks), "layer")]
        weights = head_weights(part(block, "attn"), f"block {layer} of {self.name}")
        times = added_times(block)
        if times == 1:
            return weights
        return replace(weights, W_O=weights.W_O * times, b_O=weights.b_O * times)

    def _attention(self, layer: int, like: Tensor, tables: Tensor | None = None) -> Attention:
        """The layer with its tensors as they are now, in dtype and on the device of ``like``, under
        the rotation of ``tables``."""
        reading, block = self.layer_facts(layer), self._model.blocks[layer]
        weights = self._weights(layer).to(like)
        return attention_of(block.attn, part(block, "ln1"), weights, reading, tables)

    @torch.no_grad()
    def attention_norm(self, layer: int) -> NormWeights:
        """The norm in front of the projections of one layer, as the model has it."""
        return self._attention(layer, upcast(next(iter(self._model.parameters())))).norm

    def _has_sinks(self, layer: int) -> bool:
        """Whether the heads of a layer have one more logit each."""
        return part(inner(self._model.blocks[layer].attn), "sinks") is not None

    def key_heads(self, layer: int) -> int:
        """How many heads of keys and values one layer has: fewer than query heads where groups of
        these share them."""
        return self._probe[f"blocks.{layer}.attn.hook_k"].shape[-2]

    def describe_layer(self, layer: int) -> dict[str, str]:
        """:meth:`layer_facts` in words, for a reader."""
        reading, hooked = self.layer_facts(layer), self._probe[f"blocks.{layer}.attn.hook_q"]
        qk, heads = reading.qk, hooked.shape[-2]
        over = "" if qk is None else f" over {'all heads' if len(qk.axes) > 1 else 'each head'}"
        pairs = {None: "none", "half": "pairs (i, i + n/2)", "adjacent": "pairs (2i, 2i+1)"}
        return {
            "norm before attention": reading.norm.norm_type or "none",
            "key and value heads": f"{self.key_heads(layer)} for {heads} query heads",
            "QK-norm": "none" if qk is None else f"{qk.norm_type}{over}",
            "rotation": pairs[reading.rotation],
            "score scale": f"{reading.scale:.6g}",
            "soft cap": "none" if reading.softcap is None else f"{reading.softcap:g}",
            "sinks": "one logit for each head" if self._has_sinks(layer) else "none",
            "score bias": "none" if reading.slopes is None else "ALiBi",
            "sliding window": "none" if reading.window is None else f"{reading.window} positions",
            "hook_attn_scores holds": "scores" if reading.has_scores else "the pattern",
        }

    def layer_hooks(self, layer: int) -> tuple[str, ...]:
        """Hooks that a cache must hold for :meth:`layer`."""
        reading = self.layer_facts(layer)
        names = [h for h in CORE if h != "attn.hook_attn_scores" or reading.has_scores]
        if reading.rotation is not None:
            names += [h for h in TABLES if f"blocks.{layer}.{h}" in self._probe]
        return (f"blocks.{layer}.hook_resid_pre", *(f"blocks.{layer}.{h}" for h in names))

    def layer(self, layer: int, cache: Any, *, verify: bool = True) -> LayerView:
        """View of a layer from a TransformerLens ``ActivationCache``, or any mapping that holds its
        :meth:`layer_hooks`, verified. Without ``verify`` pattern, scores and z may be missing, and
        gradients pass through the activations and weights.

        Raises ``ReconstructionError`` where recomputed queries, keys, scores or patterns are not
        the model's within the reconstruction error.
        """
        # needed only to verify; some fire after hook_z
        optional = () if verify else ("hook_pattern", "hook_attn_scores", "hook_z")
        names = self.layer_hooks(layer)
        entries = entries_of(cache, [name for name in names if not name.endswith(optional)])
        activations = {name: entries[name] for name in names if name in entries}
        return self._build(layer, activations, verify=verify)

    def _sampled(
        self, layer: int, activations: Mapping[str, Tensor], row: int
    ) -> tuple[LayerView, LayerView]:
        """Two views of a layer: of the context ``row`` alone, verified, and of the whole batch, not
        verified."""
        # the tables are those of all contexts
        one = {k: v if k.endswith(TABLES) else v[row : row + 1] for k, v in activations.items()}
        read = self._read(layer, activations)  # its weights serve both
        length = activations[f"blocks.{layer}.hook_resid_pre"].shape[1]
        checked = self._build(layer, one, verify=True, read=read, rows=some_rows(length))
        every = self._build(layer, activations, verify=False, read=read, allowed=checked.allowed)
        return checked, every

    def _read(self, layer: int, activations: Mapping[str, Tensor]) -> Attention:
        """The layer with its tensors as they are now, under the rotation of a pass."""
        h, module = activations[f"blocks.{layer}.hook_resid_pre"], self._model.blocks[layer].attn
        tables = rotary_tables(module, activations, f"blocks.{layer}.attn.", h.shape[1])
        return self._attention(layer, upcast(h[:1, :1]), tables)

    def _build(
        self,
        layer: int,
        activations: Mapping[str, Tensor],
        *,
        verify: bool,
        read: Attention | None = None,
        allowed: Bool[Tensor, "query key"] | None = None,
        rows: slice = slice(None),
    ) -> LayerView:
        """The view of a layer from its activations by hook name, of which query ``rows`` are
        verified."""
        if verify and torch.is_grad_enabled():
            with torch.no_grad():
                return self._build(layer, activations, verify=True, read=read, rows=rows)
        prefix, module = f"blocks.{layer}.attn.", self._model.blocks[layer].attn
        h = upcast(activations[f"blocks.{layer}.hook_resid_pre"])
        attention, length = read or self._read(layer, activations), h.shape[1]
        reading, heads = attention.reading, len(attention.weights.W_Q)
        q, k, v, z, pattern, scores = (
            cached(activations, f"blocks.{layer}.{name}", heads) for name in CORE
        )
        # queries and keys are the model's own where they are not verified
        raw = {w: attention.raw(h, w) if verify or x is None else x for w, x in zip("qk", (q, k))}
        masked = activations.get(f"{prefix}hook_attn_scores") if reading.has_scores else None
        if allowed is None:
            allowed = allowed_cells(module, reading, length, self.causal, masked, h)
        scores = None if masked is None else _detached(scores)
        frozen = attention.frozen(h, raw)
        view = LayerView(
            **vars(attention),
            **frozen,
            layer=layer,
            h=h,
            v=v,
            z=_detached(z),
            pattern=_detached(pattern),
            scores=scores,
            bias=alibi(reading, frozen["q"], frozen["k"], scores, allowed),
            allowed=allowed,
            roundoff=self.roundoff,
            reconstruction=ReconstructionReport(checks={}, scale=0.0),
        )
        if not verify:
            return view
        report = view.report(raw, {"q": q, "k": k}, rows)
        if not report.adds_up:  # to look for hooks takes as long as a check
            hooks = [n for n in hooked_points(self._model) if n.startswith(f"blocks.{layer}.")]
            acting = f", under hooks at {brief(hooks)}" if hooks else ""
            checks = [(layer, name, *pair) for name, pair in report.checks.items()]
            require_reconstruction(checks, f"layer {layer} of {self.name}{acting}")
        return replace(view, reconstruction=report)

    # ---- passes

    def run_layers(
        self,
        tokens: Tensor,
        layers: Sequence[int],
        on_layer: LayerHook,
        *,
        sample: tuple[int, LayerHook] | None = None,
    ) -> None:
        """Run the model once over ``tokens`` and call ``on_layer`` for each of ``layers``, in the
        model's order, holding one layer at a time.

        Each layer's scores, patterns, queries and keys are recomputed and compared, and a layer
        that does not add up raises ``ReconstructionError``. ``sample`` is a pair (row, function):
        that context alone is verified, by itself in the same pass (of a long one
        :func:`~tl_geometry.models.reconstruction.some_rows`), and its view given to the function;
        queries and keys of the others are the model's own, from its hooks.
        """

        def take(layer: int, activations: Mapping[str, Tensor]) -> None:
            if sample is None:
                on_layer(self._build(layer, activations, verify=True))
                return
            one, every = self._sampled(layer, activations, sample[0])
            sample[1](one)
            on_layer(every)

        self._stream(tokens, {layer: self.layer_hooks(layer) for layer in layers}, take)

    def _stream(self, tokens: Tensor, names: Mapping[int, Sequence[str]], take: OnLayer) -> None:
        """One forward pass that hands over each layer's activations (``names``) once the layer is
        done, and lets them go."""
        held: dict[str, Tensor] = {}
        hooks = {name: keep(held, name) for of_layer in names.values() for name in of_layer}

        def finish(layer: int, record: Hook | None, value: Tensor) -> None:
            take(layer, {name: held.pop(name) for name in names[layer]})
            if record is not None:  # the output of this layer is the input of the next
                record(value)

        for layer in names:
            end = self.state_hooks[layer + 1]
            hooks[end] = partial(finish, layer, hooks.get(end))
        self.run(tokens, hooks)


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()
