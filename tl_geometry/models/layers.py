"""Views of attention layers: facts found once on the probe, applied to a forward pass, and verified
against it every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tl_geometry.base.checks import describe, index
from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.models.facts import FactFinder, Facts, allowed_cells, ignore_of, scores_of, turn_of
from tl_geometry.models.hooks import without_hooks
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import Hook, LayerHook
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import Parameters, part, upcast
from tl_geometry.models.precision import is_half
from tl_geometry.models.reconstruction import (
    CHUNK,
    ReconstructionReport,
    pattern_bound,
    pattern_error,
    reconstruction_bound,
    require_reconstruction,
)
from tl_geometry.models.running import Runner, require_full_precision

CORE = (
    "attn.hook_q",
    "attn.hook_k",
    "attn.hook_v",
    "attn.hook_z",
    "attn.hook_pattern",
    "attn.hook_attn_scores",
)
TABLES = ("attn.hook_cos", "attn.hook_sin")


@dataclass(eq=False)
class Layers:
    """The attention layers of one model; behind ``ModelView.layer``, ``.layer_hooks``,
    ``.run_layers``, ``.attention_norm``."""

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

    def facts(self, layer: int) -> Facts:
        """Facts of one layer, found on first use (memo lives as long as the weights stay the
        same)."""
        index(layer, len(self.parameters.model.blocks), "layer")
        if layer not in self.memo:
            h = self.probe[f"blocks.{layer}.hook_resid_pre"]
            finder = FactFinder(self.parameters, layer, self.probe, self.causal, h)
            need = [
                f"blocks.{layer}.{name}"
                for name in CORE
                if f"blocks.{layer}.{name}" not in self.probe
            ]
            require(
                not need,
                f"layer {layer} of {self.parameters.name}",
                expected="hooks of queries, keys and pattern",
                got=f"no {', '.join(need)}",
                instead="a model with eager attention",
                error=UnsupportedModelError,
            )
            self.memo[layer] = replace(finder.find(), weights=None)
            self._verify_facts(layer, h)
        return self.memo[layer]

    def _verify_facts(self, layer: int, h: Tensor) -> None:
        """Verify the facts of a half-precision model on its probe in float32, where faults below 1%
        show (a measured bias has its own)."""
        if (
            h.dtype != torch.float32
            or not is_half(self.parameters.model)
            or self.memo[layer].bias_form == "measured"
        ):
            return
        try:
            self._build(layer, self.probe, True, unit_roundoff(torch.float32))
        except ReconstructionError:
            del self.memo[layer]
            raise

    def norm(self, layer: int) -> NormWeights:
        """The norm in front of the projections of one layer, as the model has it."""
        norm = self.facts(layer).norm
        dtype = upcast(next(iter(self.parameters.model.parameters()))).dtype
        return replace(norm, gain=norm.gain.to(dtype), bias=norm.bias.to(dtype))

    def describe(self, layer: int) -> dict[str, object]:
        """How a layer makes its scores, in words."""
        f, weights = self.facts(layer), self.parameters.weights(layer)
        kv = self.probe[f"blocks.{layer}.attn.hook_k"].shape[-2]
        qk = (
            None
            if f.qk_norm is None
            else f"{f.qk_norm.norm_type} over {'all heads' if f.qk_norm.flat else 'each head'}"
        )
        return {
            "norm before attention": f.norm.norm_type or "none",
            "key and value heads": f"{kv} for {len(weights.W_Q)} query heads",
            "QK-norm": qk or "none",
            "rotation": "none"
            if f.rotation is None
            else {"half": "pairs (i, i + n/2)", "adjacent": "pairs (2i, 2i+1)"}[f.rotation],
            "score scale": f"{f.scale:.6g}",
            "soft cap": "none" if f.softcap is None else f"{f.softcap:g}",
            "sinks": "none" if f.sinks is None else "one logit for each head",
            "score bias": {None: "none", "measured": "ALiBi, measured"}.get(
                f.bias_form, "ALiBi, analytic"
            ),
            "sliding window": "none" if f.window is None else f"{f.window} positions",
            "hook_attn_scores holds": "scores" if f.has_scores else "the pattern",
            "arithmetic": "float32 in places"
            if f.single
            else str(next(iter(self.parameters.model.parameters())).dtype).removeprefix("torch."),
        }

    def hooks(self, layer: int) -> tuple[str, ...]:
        """Hooks that a cache must hold for :meth:`view`."""
        facts = self.facts(layer)
        names = [h for h in CORE if h != "attn.hook_attn_scores" or facts.has_scores]
        names += [
            h for h in TABLES if facts.rotation is not None and f"blocks.{layer}.{h}" in self.probe
        ]
        return (f"blocks.{layer}.hook_resid_pre", *(f"blocks.{layer}.{h}" for h in names))

    def view(self, layer: int, cache: Any, *, verify: bool = True) -> LayerView:
        """The layer as this forward pass went through it, verified. Without ``verify`` pattern,
        scores and z may be missing, and gradients pass through the activations and weights.

        Raises ``ReconstructionError`` where recomputed queries, keys, scores or patterns are not
        the model's within the reconstruction error.
        """
        names = self.hooks(layer)
        entries: Mapping[str, Tensor] = getattr(
            cache, "cache_dict", cache
        )  # an ActivationCache is no Mapping
        found = {name: entries[name] for name in names if name in entries}
        later = (
            () if verify else ("hook_pattern", "hook_attn_scores", "hook_z")
        )  # needed only to verify; some fire after hook_z
        missing = [name for name in names if name not in found and not name.endswith(later)]
        require(
            not missing,
            "cache",
            expected=f"hooks of layer {layer}",
            got=f"no {', '.join(missing)}",
            instead="model.run_with_cache(tokens) without names_filter",
        )
        h = found[names[0]]
        require(
            h.dim() == 3,
            "cache",
            expected="a batch dimension",
            got=describe(h),
            instead="remove_batch_dim=False",
        )
        return self._build(layer, found, verify, detach=verify)

    def _build(
        self,
        layer: int,
        found: Mapping[str, Tensor],
        verify: bool,
        roundoff: float | None = None,
        *,
        detach: bool = True,
    ) -> LayerView:
        prefix = f"blocks.{layer}."
        require_full_precision(self.runner.device, self.parameters.name)
        h = upcast(found[prefix + "hook_resid_pre"], detach=detach)
        facts, length = self._local(layer, h, detach=detach), h.shape[1]
        own = {
            name: found.get(f"{prefix}attn.hook_{name}")
            for name in ("q", "k", "v", "z", "pattern", "attn_scores")
        }
        turn = turn_of(self.parameters, layer, found, length, facts.rotation)
        turn = None if turn is None else (turn[0].to(h), turn[1].to(h))
        norm_scale, heads = facts.norm.scale(h), facts.constant("q").shape[-2]
        hooked = {w: self._grouped(own[w], facts, detach=detach) for w in "qk"}
        taken = {
            w: value for w, value in hooked.items() if value is not None and not verify
        }  # unverified: the model's own
        raw = {w: taken[w] if w in taken else facts.raw(h, w) for w in "qk"}
        frozen = {w: (1 / norm_scale).unsqueeze(-1).expand(*h.shape[:2], heads) for w in "qkv"}
        constant = {w: facts.constant(w).expand(*h.shape[:2], -1, -1) for w in "qkv"}
        whole = raw
        if facts.qk_norm is not None:
            scales = {w: facts.qk_norm.scale(raw[w]) for w in "qk"}
            frozen |= {w: frozen[w] / s for w, s in scales.items()}
            constant |= {w: constant[w] / s.unsqueeze(-1) for w, s in scales.items()}
            whole = {w: raw[w] / s.unsqueeze(-1) for w, s in scales.items()}
        constant = {w: facts.head_map(constant[w], w, turn) for w in "qkv"}
        q, k = (facts.head_map(whole[w], w, turn) for w in "qk")
        pattern, scores, z = (
            own["pattern"],
            own["attn_scores"] if facts.has_scores else None,
            own["z"],
        )
        bias, source = self._bias(layer, facts, length, h)
        view = LayerView(
            layer=layer,
            h=h,
            norm=facts.norm,
            norm_scale=norm_scale,
            scale=facts.scale,
            softcap=facts.softcap,
            sinks=facts.sinks,
            bias=bias,
            bias_source=source,
            allowed=allowed_cells(facts, length, self.causal, scores, pattern),
            q_map=partial(facts.linear, which="q", turn=turn),
            k_map=partial(facts.linear, which="k", turn=turn),
            v_map=partial(facts.linear, which="v", turn=None),
            q_scale=frozen["q"],
            k_scale=frozen["k"],
            v_scale=frozen["v"],
            q_constant=constant["q"],
            k_constant=constant["k"],
            v_constant=constant["v"],
            q=q,
            k=k,
            added=facts.added_position(),
            pattern=None if pattern is None else upcast(pattern),
            scores=None if scores is None else upcast(scores),
            v=self._grouped(own["v"], facts, detach=detach),
            z=None if z is None else upcast(z),
            roundoff=roundoff or self.roundoff(layer),
            reconstruction=ReconstructionReport(checks={}, scale=0.0),
            rotary=facts.rotation is not None,
        )
        if not verify:
            return view
        report = check_scores(view, self._check_inputs(facts, view, raw, hooked))
        require_reconstruction(
            [(layer, name, *pair) for name, pair in report.checks.items()],
            f"layer {layer} of {self.parameters.name}",
        )
        return replace(view, reconstruction=report)

    def roundoff(self, layer: int) -> float:
        """Unit roundoff of the arithmetic behind a layer's numbers."""
        dtype = next(iter(self.parameters.model.parameters())).dtype
        return unit_roundoff(torch.float32 if self.facts(layer).single else dtype)

    def _local(self, layer: int, h: Tensor, *, detach: bool = True) -> Facts:
        """Facts with the layer's weights, in the dtype and on the device of ``h``. Weights are not
        kept between forward passes."""
        facts, weights = self.facts(layer), self.parameters.weights(layer, detach=detach)
        norm, qk = facts.norm, facts.qk_norm
        if not detach:
            norm, qk = self.parameters.with_gradients(layer, norm, qk)
        return replace(
            facts,
            norm=replace(norm, gain=norm.gain.to(h), bias=norm.bias.to(h)),
            weights=replace(weights, **{k: v.to(h) for k, v in vars(weights).items()}),
            qk_norm=None
            if qk is None
            else replace(qk, gain_q=qk.gain_q.to(h), gain_k=qk.gain_k.to(h)),
            ignore=ignore_of(self.parameters.attention(layer)),
            sinks=None if facts.sinks is None else facts.sinks.to(h),
            slopes=None if facts.slopes is None else facts.slopes.to(h),
            added=None
            if facts.added is None
            else upcast(self.parameters.model.pos_embed.W_pos, detach=detach)[: h.shape[1]].to(h),
        )

    @staticmethod
    def _grouped(value: Tensor | None, facts: Facts, *, detach: bool = True) -> Tensor | None:
        if value is None:
            return None
        heads = facts.constant("q").shape[-2]
        return upcast(
            value
            if value.shape[-2] == heads
            else value.repeat_interleave(heads // value.shape[-2], -2),
            detach=detach,
        )

    def _bias(self, layer: int, facts: Facts, length: int, h: Tensor) -> tuple[Tensor | None, str]:
        if facts.bias_form is None:
            return None, "none"
        if facts.bias_form != "measured":
            bias, kept = (
                facts.bias(length),
                getattr(self.parameters.model.blocks[layer].attn, "alibi", None),
            )
            if bias is not None and facts.slopes is not None and isinstance(kept, Tensor):
                # HookedTransformer keeps the bias of its longest prompt and takes the last rows: a
                # constant of each row too much
                bias = bias - facts.slopes[:, None, None] * (kept.shape[-1] - length)
            return bias, "analytic"
        self._measure((layer,), length)
        return self.memo["bias", layer, length].to(h), "measured"

    def _measure(self, layers: Sequence[int], length: int) -> None:
        """Score minus content of layers with an unknown bias, on two random sequences; kept only if
        both give the same."""
        wanted = [
            l
            for l in layers
            if self.facts(l).bias_form == "measured" and ("bias", l, length) not in self.memo
        ]
        if not wanted:
            return
        ids = torch.randint(
            0, self.runner.d_vocab, (2, length), generator=torch.Generator().manual_seed(length)
        )

        def take(layer: int, found: Mapping[str, Tensor]) -> None:
            h = found[f"blocks.{layer}.hook_resid_pre"].double()
            facts = self._local(layer, h)
            turn = turn_of(self.parameters, layer, found, length, facts.rotation)
            q, k = (facts.full(h, w, turn) for w in "qk")
            content, absolute = (
                scores_of(q, k, facts.scale),
                scores_of(q.abs(), k.abs(), facts.scale),
            )
            scores = found[f"blocks.{layer}.attn.hook_attn_scores"]
            rest = torch.where(
                allowed_cells(facts, length, self.causal, scores, None),
                scores.double() - content,
                0.0,
            )
            spread = _largest(rest - rest.mean(0))
            bound = reconstruction_bound(self.roundoff(layer), _largest(absolute) + _largest(rest))
            what = f"score bias of layer {layer} of {self.parameters.name}"
            require(
                spread <= bound,
                what,
                expected=f"one for all sequences to {bound:.1e}",
                got=f"differences of {spread:.1e}",
                instead="an architecture that check_model lists",
                error=UnsupportedModelError,
            )
            self.memo["bias", layer, length] = rest.mean(0)

        with without_hooks(self.parameters.model):  # the bias is the model's own
            self._stream(ids, wanted, take)

    @staticmethod
    def _check_inputs(
        facts: Facts,
        view: LayerView,
        raw: Mapping[str, Tensor],
        hooked: Mapping[str, Tensor | None],
    ) -> ReconstructionReport:
        """Queries and keys against the hooks, and the sizes behind them, as they are and as they
        enter the scores."""
        checks, sizes = {}, {}
        for w in "qk":
            value, size = hooked[w], facts.sizes(view.h, w)
            if value is not None:
                checks[w] = (
                    _largest(raw[w] - value),
                    reconstruction_bound(view.roundoff, _largest(size)),
                )
            if facts.qk_norm is not None:
                gain = facts.qk_norm.gain_q if w == "q" else facts.qk_norm.gain_k
                size = size / facts.qk_norm.scale(raw[w]).unsqueeze(-1) * gain.abs()
            sizes[w] = _largest(size)
        return ReconstructionReport(checks=checks, scale=0.0, sizes=sizes)

    def run(
        self, tokens: Tensor, layers: Sequence[int], on_layer: LayerHook, *, verify: bool = True
    ) -> None:
        """One forward pass; each layer is handed over at its end and let go."""
        self._measure(
            layers, tokens.shape[-1]
        )  # before the pass: a model cannot be run from within its own hooks
        self._stream(
            tokens, layers, lambda layer, found: on_layer(self._build(layer, found, verify))
        )

    def _stream(
        self,
        tokens: Tensor,
        layers: Sequence[int],
        take: Callable[[int, Mapping[str, Tensor]], None],
    ) -> None:
        """One forward pass that hands over each layer's activations once the layer is done, and
        lets them go."""
        wanted = {l: self.hooks(l) for l in layers}
        held: dict[str, Tensor] = {}

        def keep(name: str) -> Hook:
            return lambda value: _put(held, name, value)

        def finish(layer: int, before: Hook | None) -> Hook:
            def hook(value: Tensor) -> None:
                take(layer, {n: held.pop(n) for n in wanted[layer]})
                if before is not None:
                    before(value)

            return hook

        hooks: dict[str, Hook] = {name: keep(name) for names in wanted.values() for name in names}
        ends = {self.runner.state_hooks[l + 1]: l for l in layers}
        self.runner(
            tokens, hooks | {name: finish(layer, hooks.get(name)) for name, layer in ends.items()}
        )

    def final_norm(self) -> NormWeights | None:
        """The norm before the unembedding, if logits are ``norm(h) W_U + b_U`` (before a cap on
        logits), else ``None``."""
        if "final" not in self.memo:
            self.memo["final"] = self._final_norm()
        return self.memo["final"]

    def _final_norm(self) -> NormWeights | None:
        model = self.parameters.model
        if self.parameters.kind == "HookedEncoder":
            return None
        last = self.runner.state_hooks[-1]
        ids = torch.randint(
            0, self.runner.d_vocab, (1, 4), generator=torch.Generator().manual_seed(1)
        )
        states: dict[str, Tensor] = {}
        with without_hooks(model):
            logits = self.runner(ids, {last: lambda value: _put(states, last, value)}, logits=True)
        h, W_U, b_U = (
            states[last].double(),
            self.parameters.unembed().double(),
            self.parameters.unembed_bias(),
        )
        if logits is None or W_U.shape[0] != h.shape[-1]:
            return None
        cap = part(
            getattr(part(model, "original_model"), "config", None), "final_logit_softcapping"
        ) or part(model.cfg, "output_logits_soft_cap")
        for norm in self.parameters.norm_candidates(part(model, "ln_final"), h):
            ours = norm.apply(h) @ W_U + (0.0 if b_U is None else b_U.double())
            ours = cap * torch.tanh(ours / cap) if cap and float(cap) > 0 else ours
            if (
                _largest(ours - logits.double())
                <= 1e3
                * reconstruction_bound(unit_roundoff(logits.dtype), _largest(logits.double()))
                + 1e-4
            ):
                return replace(
                    norm, gain=norm.gain.to(upcast(logits)), bias=norm.bias.to(upcast(logits))
                )
        return None


def _put(held: dict[str, Tensor], name: str, value: Tensor) -> None:
    held.setdefault(name, value.detach())


def _largest(x: Tensor) -> float:
    return float(x.abs().max())


def check_scores(view: LayerView, report: ReconstructionReport) -> ReconstructionReport:
    """The report with ``pattern`` and ``scores``: recomputed scores against the model's, a few
    heads at a time."""
    batch, length, heads = view.q.shape[:3]
    step = max(1, CHUNK // (batch * length**2))
    errors: dict[str, list[float]] = {"pattern": [], "pattern sum": [], "scores": []}
    scale = 0.0
    for start in range(0, heads, step):
        part_ = slice(start, min(start + step, heads))
        total, size = _total_and_size(view, part_)
        scale = max(scale, float(torch.where(view.allowed, size, 0.0).max()))
        capped = total if view.softcap is None else view.softcap * torch.tanh(total / view.softcap)
        if view.scores is not None:
            errors["scores"].append(
                _largest(torch.where(view.allowed, capped - view.scores[:, part_], 0.0))
            )
        if view.pattern is not None:
            errors["pattern"].append(
                pattern_error(capped, view.pattern[:, part_], view.allowed, view.roundoff)
            )
            errors["pattern sum"].append(_sum_error(view, capped, part_))
    bounds = {
        "pattern": pattern_bound(view.pattern, view.roundoff, scale),
        "scores": reconstruction_bound(view.roundoff, scale),
    }
    bounds["pattern sum"] = pattern_bound(
        view.pattern, view.roundoff, 1.0 if view.sinks is None else scale
    )
    found = {name: (max(values), bounds[name]) for name, values in errors.items() if values}
    return replace(report, checks={**report.checks, **found}, scale=scale)


def _sum_error(view: LayerView, scores: Tensor, heads: slice) -> float:
    """How far rows of the pattern are from summing to one (less the sink's share), which
    row-centred logarithms do not see."""
    assert view.pattern is not None
    found = view.pattern[:, heads].sum(-1, dtype=torch.float64)
    if view.sinks is None:
        return _largest(found - 1)
    whole = torch.where(view.allowed, scores, -torch.inf).double().logsumexp(-1)
    return _largest(
        found - (whole - torch.logaddexp(whole, view.sinks[heads, None].double())).exp()
    )


def _total_and_size(view: LayerView, heads: slice) -> tuple[Tensor, Tensor]:
    """Scores, and the product of the absolute values of queries and keys, of what comes from the
    input and of the constant."""
    q, k, q0, k0 = (x[:, :, heads] for x in (view.q, view.k, view.q_constant, view.k_constant))
    total = scores_of(q, k, view.scale)
    size = scores_of((q - q0).abs() + q0.abs(), (k - k0).abs() + k0.abs(), view.scale)
    return (
        (total, size)
        if view.bias is None
        else (total + view.bias[heads], size + view.bias[heads].abs())
    )
