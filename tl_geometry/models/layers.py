"""How did a forward pass go through an attention layer? :class:`Layers` makes the view of a layer
(:class:`~tl_geometry.models.layer_view.LayerView`) from its activations. The layer's specification
is inferred once, on the probe, applied to every pass and verified against it.
:class:`~tl_geometry.models.ModelView` calls this."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from tl_geometry.base.checks import describe, index
from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError, fail, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.rows import mask_facts, mask_form
from tl_geometry.base.transfer import floats
from tl_geometry.models.attention_spec import (
    AttentionSpec,
    allowed_cells,
    frozen_fields,
    ignore_of,
    scores_of,
    turn_of,
)
from tl_geometry.models.forward import Hook, Runner, keep, require_full_precision
from tl_geometry.models.infer import SpecInference
from tl_geometry.models.layer_view import LayerHook, LayerView, Rotation
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.output_head import OutputHead
from tl_geometry.models.parameters import Parameters, part, upcast
from tl_geometry.models.precision import in_single, is_half
from tl_geometry.models.reconstruction import (
    ReconstructionReport,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.row_pass import OnRows, RowActivations, Rows, of_contexts, stream
from tl_geometry.models.user_hooks import brief, names_of, without_hooks
from tl_geometry.models.verify import (
    Measured,
    largest,
    measured_inputs,
    measured_scores,
    report_of,
    some_queries,
)

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


@dataclass(eq=False)
class Layers:
    """The attention layers of one model; behind the methods of
    :class:`tl_geometry.models.ModelView` that are about layers.

    ``memo`` holds what was inferred, as long as the weights stay the same: the specification under
    its layer, a measured bias under ``("bias", layer, length)``, the output norm under ``"head"``,
    and what :func:`turn_of`, ``row_pass``, ``write_spec`` and ``mlp`` note under keys of their own.
    """

    parameters: Parameters
    runner: Runner
    probe: Mapping[str, Tensor]
    causal: bool
    memo: dict[Any, Any] = field(default_factory=dict)

    @staticmethod
    def available(runner: Runner, model: Any, layer: int) -> list[str]:
        """Hooks of a layer that the probe records, as far as the class has them."""
        if part(model.blocks[layer], "attn") is None:
            return []
        return [name for h in (*CORE, *TABLES) if runner.has(name := f"blocks.{layer}.{h}")]

    def spec(self, layer: int) -> AttentionSpec:
        """The specification of one layer, inferred on first use."""
        index(layer, len(self.parameters.model.blocks), "layer")
        if layer not in self.memo:
            inference = SpecInference(self.parameters, layer, self.probe, self.causal)
            names = [f"blocks.{layer}.{name}" for name in CORE]
            missing = [name for name in names if name not in self.probe]
            if missing:
                what, got = f"layer {layer} of {self.parameters.name}", f"no {', '.join(missing)}"
                expected = "hooks of queries, keys and pattern"
                instead = "a model with eager attention"
                fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
            self.memo[layer] = replace(inference.infer(), weights=None)
            self.verify_spec(layer, self.probe[f"blocks.{layer}.hook_resid_pre"])
        return self.memo[layer]

    def verify_spec(self, layer: int, h: Tensor) -> None:
        """Verify the specification of a half-precision model on its probe in float32, where faults
        below 1% show (:meth:`measure` checks a measured bias)."""
        half = h.dtype == torch.float32 and is_half(self.parameters.model)
        if not half or self.memo[layer].bias_form == "measured":
            return
        try:
            self._judged(*self._build(layer, self.probe, True, unit_roundoff(torch.float32)))
        except ReconstructionError:
            del self.memo[layer]
            raise

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's weights."""
        return next(iter(self.parameters.model.parameters())).dtype

    def norm(self, layer: int) -> NormWeights:
        """The norm in front of the projections of one layer, as the model has it."""
        norm = self.spec(layer).norm
        dtype = torch.promote_types(self.dtype, torch.float32)
        return replace(norm, gain=norm.gain.to(dtype), bias=norm.bias.to(dtype))

    def key_heads(self, layer: int) -> int:
        """How many heads of keys and values a layer has."""
        return self.probe[f"blocks.{layer}.attn.hook_k"].shape[-2]

    def describe(self, layer: int) -> dict[str, object]:
        """How a layer makes its scores, in words."""
        spec, weights = self.spec(layer), self.parameters.weights(layer)
        qk = "none"
        if spec.qk_norm is not None:
            over = "all heads" if spec.qk_norm.flat else "each head"
            qk = f"{spec.qk_norm.norm_type} over {over}"
        pairs = {None: "none", "half": "pairs (i, i + n/2)", "adjacent": "pairs (2i, 2i+1)"}
        biases = {None: "none", "measured": "ALiBi, measured"}
        dtype = str(self.dtype).removeprefix("torch.")
        return {
            "norm before attention": spec.norm.norm_type or "none",
            "key and value heads": f"{self.key_heads(layer)} for {len(weights.W_Q)} query heads",
            "QK-norm": qk,
            "rotation": pairs[spec.rotation],
            "score scale": f"{spec.scale:.6g}",
            "soft cap": "none" if spec.softcap is None else f"{spec.softcap:g}",
            "sinks": "none" if spec.sinks is None else "one logit for each head",
            "score bias": biases.get(spec.bias_form, "ALiBi, analytic"),
            "sliding window": "none" if spec.window is None else f"{spec.window} positions",
            "hook_attn_scores holds": "scores" if spec.has_scores else "the pattern",
            "arithmetic": "float32 in places" if spec.single else dtype,
        }

    def hooks(self, layer: int) -> tuple[str, ...]:
        """Hooks that a cache must hold for :meth:`view`."""
        spec = self.spec(layer)
        names = [h for h in CORE if h != "attn.hook_attn_scores" or spec.has_scores]
        if spec.rotation is not None:
            names += [h for h in TABLES if f"blocks.{layer}.{h}" in self.probe]
        return (f"blocks.{layer}.hook_resid_pre", *(f"blocks.{layer}.{h}" for h in names))

    def view(self, layer: int, cache: Any, *, verify: bool = True) -> LayerView:
        """The layer as this forward pass went through it, verified. Without ``verify`` pattern,
        scores and z may be missing, and gradients pass through the activations and weights.

        Raises ``ReconstructionError`` where recomputed queries, keys, scores or patterns are not
        the model's within the reconstruction error.
        """
        if isinstance(cache, RowActivations):
            return self._judged(*self._build(layer, cache, verify, detach=verify))
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
        return self._judged(*self._build(layer, activations, verify, detach=verify))

    def sampled(
        self, layer: int, activations: Mapping[str, Tensor], row: int, queries: int | None = None
    ) -> tuple[LayerView, LayerView]:
        """Two views of a layer: of the context ``row`` alone, verified (scores at ``queries``
        queries), and of the whole batch, unverified, with the form of its mask. Errors and form are
        read from the device together."""
        context = of_contexts(activations, slice(row, row + 1))
        one, found = self._build(layer, context, True, queries=queries)
        every, _ = self._build(layer, activations, False)
        numbers = floats(found | mask_facts(every.mask))
        return self._judged(one, found, numbers), replace(every, mask_form=mask_form(numbers))

    def _build(
        self,
        layer: int,
        activations: Mapping[str, Tensor],
        verify: bool,
        roundoff: float | None = None,
        *,
        detach: bool = True,
        queries: int | None = None,
    ) -> tuple[LayerView, Measured]:
        """The view of a layer, and with ``verify`` how far it is from the model (else nothing)."""
        require_full_precision(self.runner.device, self.parameters.name)
        h = upcast(activations[f"blocks.{layer}.hook_resid_pre"], detach=detach)
        spec, length = self.spec_with_weights(layer, h, detach=detach), h.shape[1]
        heads = spec.constant("q").shape[-2]

        def cached(name: str) -> Tensor | None:
            """The model's activation, if it is there, with grouped heads expanded."""
            value = activations.get(f"blocks.{layer}.attn.hook_{name}")
            if value is not None and name in "qkv" and value.shape[-2] != heads:
                value = value.repeat_interleave(heads // value.shape[-2], -2)
            return None if value is None else upcast(value, detach=detach)

        hooked = {w: cached(w) for w in "qkv"}
        raw: dict[str, Tensor] = {}
        for w in "qk":  # the model's own where they are not verified
            value = None if verify else hooked[w]
            raw[w] = spec.raw(h, w) if value is None else value
        turn = turn_of(self.parameters, layer, activations, length, spec.rotation, self.memo)
        turn = None if turn is None else (turn[0].to(h), turn[1].to(h))
        bias, source = self._bias(layer, spec, length, h)
        scores = cached("attn_scores") if spec.has_scores else None
        pattern, z = (None if t is None else t.detach() for t in (cached("pattern"), cached("z")))
        masked = (
            activations[f"blocks.{layer}.attn.hook_attn_scores"] if scores is not None else None
        )
        rows = activations.check if isinstance(activations, RowActivations) else None
        view = LayerView(
            layer=layer,
            h=h,
            norm=spec.norm,
            scale=spec.scale,
            softcap=spec.softcap,
            sinks=spec.sinks,
            bias=bias,
            bias_source=source,
            mask=rows.mask if rows else allowed_cells(spec, length, self.causal, masked, pattern),
            **frozen_fields(spec, h, raw, turn),
            added=spec.added_position(),
            pattern=pattern,
            scores=None if scores is None else scores.detach(),
            v=hooked["v"],
            z=z,
            roundoff=roundoff or self.roundoff(layer),
            sizes=lambda w: spec.entering_sizes(h, w),
            reconstruction=ReconstructionReport(checks={}, scale=0.0),
            turn=None if turn is None or not spec.rotation else Rotation(*turn, spec.rotation),
        )
        if not verify:
            return view, {}
        at = some_queries(length, queries)
        of_scores = measured_scores(view, at) if rows is None else rows.measured()
        return view, measured_inputs(spec, view, raw, hooked, at) | of_scores

    def _judged(
        self, view: LayerView, found: Measured, numbers: Mapping[str, float] | None = None
    ) -> LayerView:
        """The view with a report of what was measured, or a refusal; unchanged where nothing was.
        ``numbers`` are the measured values, if they were read from the device already."""
        if not found:
            return view
        report = report_of(view, floats(found) if numbers is None else numbers)
        if not report.adds_up:
            self._refuse(view, report)
        return replace(view, reconstruction=report)

    def _refuse(self, view: LayerView, report: ReconstructionReport) -> NoReturn:
        """Say why a layer does not add up: a mask that differs between prompts or heads, user
        hooks, or by how much."""
        prefix = f"blocks.{view.layer}."
        hooks = [name for name in names_of(self.parameters.model) if name.startswith(prefix)]
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

    def roundoff(self, layer: int) -> float:
        """Unit roundoff of the arithmetic behind a layer's numbers."""
        return unit_roundoff(torch.float32 if self.spec(layer).single else self.dtype)

    def spec_with_weights(self, layer: int, h: Tensor, *, detach: bool = True) -> AttentionSpec:
        """The specification with the layer's weights, in the dtype and on the device of ``h``.
        Weights are not kept between forward passes."""
        spec, weights = self.spec(layer), self.parameters.weights(layer, detach=detach)
        norm, qk = spec.norm, spec.qk_norm
        if not detach:
            norm, qk = self.parameters.with_gradients(layer, norm, qk)
        added = spec.added
        if added is not None:
            positions = upcast(self.parameters.model.pos_embed.W_pos, detach=detach)
            added = positions[: h.shape[1]].to(h)
        return replace(
            spec,
            norm=replace(norm, gain=norm.gain.to(h), bias=norm.bias.to(h)),
            weights=replace(weights, **{k: v.to(h) for k, v in vars(weights).items()}),
            qk_norm=qk and replace(qk, gain_q=qk.gain_q.to(h), gain_k=qk.gain_k.to(h)),
            ignore=ignore_of(self.parameters.attention(layer)),
            sinks=None if spec.sinks is None else spec.sinks.to(h),
            slopes=None if spec.slopes is None else spec.slopes.to(h),
            added=added,
        )

    def _bias(
        self, layer: int, spec: AttentionSpec, length: int, h: Tensor
    ) -> tuple[Tensor | None, str]:
        if spec.bias_form is None:
            return None, "none"
        if spec.bias_form != "measured":
            bias = spec.bias(length)
            table = getattr(self.parameters.model.blocks[layer].attn, "alibi", None)
            if bias is not None and spec.slopes is not None and isinstance(table, Tensor):
                # HookedTransformer keeps the bias of its longest prompt and takes the last rows,
                # which adds a constant to each row
                bias = bias - spec.slopes[:, None, None] * (table.shape[-1] - length)
            return bias, "analytic"
        self.measure((layer,), length)
        return self.memo["bias", layer, length].to(h), "measured"

    def measure(self, layers: Sequence[int], length: int) -> None:
        """Measure the bias of layers whose bias no formula gives: scores minus scaled products, on
        two random sequences that must agree."""
        measured = [l for l in layers if self.spec(l).bias_form == "measured"]
        wanted = [l for l in measured if ("bias", l, length) not in self.memo]
        if not wanted:
            return
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, self.runner.d_vocab, (2, length), generator=generator)

        def take(layer: int, activations: Mapping[str, Tensor]) -> None:
            h = activations[f"blocks.{layer}.hook_resid_pre"].double()
            spec = self.spec_with_weights(layer, h)
            turn = turn_of(self.parameters, layer, activations, length, spec.rotation, self.memo)
            q, k = (spec.full(h, w, turn) for w in "qk")
            content = scores_of(q, k, spec.scale)
            absolute = scores_of(q.abs(), k.abs(), spec.scale)
            scores = activations[f"blocks.{layer}.attn.hook_attn_scores"]
            allowed = allowed_cells(spec, length, self.causal, scores, None)
            rest = torch.where(allowed, scores.double() - content, 0.0)
            spread = largest(rest - rest.mean(0))
            bound = reconstruction_bound(self.roundoff(layer), largest(absolute) + largest(rest))
            if not spread <= bound:
                what = f"score bias of layer {layer} of {self.parameters.name}"
                expected, got = (
                    f"one for all sequences to {bound:.1e}",
                    f"differences of {spread:.1e}",
                )
                instead = "an architecture that check_model lists"
                fail(what, expected=expected, got=got, instead=instead, error=UnsupportedModelError)
            self.memo["bias", layer, length] = rest.mean(0)

        with without_hooks(self.parameters.model):  # the bias is the model's own
            self.stream(ids, {layer: self.hooks(layer) for layer in wanted}, take)

    def run(
        self,
        tokens: Tensor,
        layers: Sequence[int],
        on_layer: LayerHook,
        *,
        verify: bool = True,
        sample: tuple[int, LayerHook] | None = None,
        queries: int | None = None,
        on_rows: OnRows | None = None,
    ) -> None:
        """One forward pass; each layer is handed over at its end and let go. With ``on_rows`` long
        prompts run in blocks of rows (:mod:`tl_geometry.models.row_pass`)."""
        # before the pass: a model cannot be run from within its own hooks
        self.measure(layers, tokens.shape[-1])

        def take(layer: int, activations: Mapping[str, Tensor]) -> None:
            if sample is None:
                on_layer(self._judged(*self._build(layer, activations, verify)))
                return
            row, on_sample = sample
            one, every = self.sampled(layer, activations, row, queries)
            on_sample(one)
            on_layer(every)

        rows = Rows.of(on_rows, tokens, verify, sample and sample[0], queries)
        stream(self, tokens, {layer: self.hooks(layer) for layer in layers}, take, rows=rows)

    def stream(
        self,
        tokens: Tensor,
        names: Mapping[int, Sequence[str]],
        take: Callable[[int, Mapping[str, Tensor]], None],
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

    def output_head(self) -> OutputHead | None:
        """The norm and the linear map that make the logits of the last state, or ``None``."""
        if "head" not in self.memo:
            self.memo["head"] = self._readout()
        norm, factor, cap = self.memo["head"]
        return None if norm is None else self._head(norm, factor, cap)

    def _head(self, norm: NormWeights, factor: float, cap: float | None) -> OutputHead:
        """The head whose unembedding is the model's times a factor."""
        W_U, bias = self.parameters.unembed(), self.parameters.unembed_bias()
        if factor != 1:
            W_U, bias = W_U * factor, bias * factor
        return OutputHead(norm, W_U, bias, cap)

    def _readout(self) -> tuple[NormWeights | None, float, float | None]:
        """The norm and the factor of the unembedding that reproduce the model's logits, and the cap
        on them."""
        nothing = None, 1.0, None
        model, parameters = self.parameters.model, self.parameters
        if parameters.class_name == "HookedEncoder":
            return nothing
        last = self.runner.state_hooks[-1]
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, self.runner.d_vocab, (1, 4), generator=generator)
        states: dict[str, Tensor] = {}

        def run() -> Tensor | None:
            states.clear()
            return self.runner(ids, {last: keep(states, last)}, logits=True)

        with without_hooks(model):
            logits, _ = in_single(model, run)
        h = states[last].double()
        if logits is None or parameters.unembed().shape[0] != h.shape[-1]:
            return nothing
        config = getattr(part(model, "original_model"), "config", None)
        cap = part(config, "final_logit_softcapping") or part(model.cfg, "output_logits_soft_cap")
        cap = float(cap) if cap and float(cap) > 0 else None
        exact = logits.double()
        # float64 here, the model's dtype there. The largest logit stands in for the absolute sum
        # behind it, hence 1000 times the bound; 1e-4 is for logits near zero. Another norm is off
        # by far more
        bound = 1e3 * reconstruction_bound(unit_roundoff(logits.dtype), largest(exact)) + 1e-4
        # Cohere multiplies its logits; processing folds the number into the unembedding
        factors = dict.fromkeys((1.0, float(part(config, "logit_scale") or 1)))
        best, best_factor, least = None, 1.0, torch.inf
        candidates = parameters.norm_candidates(part(model, "ln_final"), h)
        for norm, factor in itertools.product(candidates, factors):
            error = largest(self._head(norm, factor, cap).logits(h) - exact)
            if error < least:
                best, best_factor, least = norm, factor, error
            # in half precision several norms lie within the bound: the nearest is taken
            if least <= bound and unit_roundoff(logits.dtype) <= 2**-24:
                break
        if best is None or least > bound:
            return nothing
        like = upcast(logits)
        norm = replace(best, gain=best.gain.to(like), bias=best.bias.to(like))
        return norm, best_factor, cap
