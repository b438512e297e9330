"""What each question costs beside the forward pass that it needs: GPT-2 small's shape and SmolLM2,
against the same weights as transformers runs them, without the output head.

Ratios are to eager attention, whose patterns TransformerLens hooks; those to SDPA stand beside.
Nothing else should run on the machine: ``OMP_NUM_THREADS=1 python -m benchmarks --only costs``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tl_geometry as tlg
from benchmarks.decomposition import EAGER, SDPA, gpt2_weights, plain_models
from benchmarks.harness import Row, grown, interleave, synchronize
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models import from_hf
from tl_geometry.models.fingerprint import fingerprint
from tl_geometry.models.model_view import ModelView
from tl_geometry.scores.resampling import FEWEST_WINDOWS
from tl_geometry.zoo.pretrained import smollm2_hugging_face

SIZES = {"smoke": (2, 64, 32, 4), "cpu": (12, 768, 256, 32), "gpu": (12, 768, 256, 256)}
"""Layers, d_model, positions and windows of GPT-2's shape."""
ROUNDS = {"smoke": 1, "cpu": 5, "gpu": 7}
BATCH = 2048
"""Tokens of one forward pass on a CPU."""
PROMPT = 64
"""Tokens of the prompt whose logit is traced."""


class Case(NamedTuple):
    """One model: its view, the same weights as transformers runs them, and tokens."""

    name: str
    view: ModelView
    plain: dict[str, Any]
    tokens: Tensor
    batch: int
    basis: PositionContext


def cases(size: str) -> list[Case]:
    """GPT-2 small's shape with random weights, and SmolLM2 where it is installed."""
    layers, width, length, windows = SIZES[size]
    device = "cuda" if size == "gpu" else "cpu"
    some: list[tuple[str, Any, Any, int]] = [
        ("GPT-2 small's shape", gpt2_weights(layers, width, length), None, length)
    ]
    if size != "smoke":
        with suppress(tlg.GeometryError):  # one case fewer where it is not installed
            some.append(("SmolLM2-135M", *smollm2_hugging_face(), 128))
    found = []
    for name, model, tokenizer, positions in some:
        plain = plain_models(model, device)
        view = tlg.view(from_hf(model.to(device), tokenizer, name=name))
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, view.d_vocab, (windows, positions), generator=generator)
        batch = max(1, (32 * BATCH if size == "gpu" else BATCH) // positions)
        basis = tlg.decompose(view, tokens, second_moments=False, progress=False)
        found.append(Case(name, view, plain, tokens, batch, basis))
    return found


def agreement(case: Case) -> None:
    """Both kinds of attention give the states that the view gives."""
    few, hooks = case.tokens[:2], case.view.state_hooks[:-1]
    ours = case.view.activations(few, hooks)
    for name, model in case.plain.items():
        with torch.inference_mode():
            states = model(few.to(model.device), output_hidden_states=True).hidden_states
        for hook, state in zip(hooks, states, strict=False):
            far = float((ours[hook] - state).norm() / state.norm())
            assert far < 1e-4, f"{name} gives another {hook}: {far:.2g}"


Routes = dict[str, Callable[[], object]]


def forwards(case: Case) -> Routes:
    """The passes that everything is compared with, the baseline first."""

    def forward(model: Any) -> None:
        with torch.inference_mode():
            for part in case.tokens.split(case.batch):
                model(part.to(model.device), use_cache=False)

    return {name: partial(forward, model) for name, model in case.plain.items()}


def routes(case: Case) -> Routes:
    """What every model is asked."""
    view, batch = case.view, case.batch

    def bare() -> None:
        for part in case.tokens.split(batch):
            view.run(part, {view.state_hooks[-1]: lambda h: None})

    quiet: dict[str, Any] = {"batch_size": batch, "progress": False}
    fit = partial(tlg.decompose, view, case.tokens, keep_ctx=False, keep=4, **quiet)
    return forwards(case) | {
        "TransformerLens, stopped before its head": bare,
        "decompose, sums alone": partial(fit, second_moments=False),
        "decompose, second moments": partial(fit, second_moments=True),
        "sweep of all heads": partial(tlg.sweep_heads, view, case.tokens, case.basis, **quiet),
        "fingerprint of all weights": partial(fingerprint, view._model),
    }


def detailed(case: Case) -> Routes:
    """The sweep with planes and with intervals, beside the sweep without, on windows that their
    basis has not seen."""
    view, tokens = case.view, case.tokens
    other = tokens.flip(1)
    basis = tlg.decompose(view, other, second_moments=False, progress=False)
    sweep = partial(tlg.sweep_heads, view, tokens, basis, batch_size=case.batch, progress=False)
    made: Routes = forwards(case) | {"sweep of all heads": sweep}
    if view.position == "rotary":
        made["sweep with planes"] = partial(sweep, planes=True)
    if len(tokens) >= FEWEST_WINDOWS:
        made["sweep with intervals"] = partial(sweep, intervals=True)
    return made


def timed(case: Case, of: Callable[[Case], Routes], rounds: int) -> list[Row]:
    """Every route in turn, after one batch of each."""
    for route in of(case._replace(tokens=case.tokens[: case.batch])).values():
        route()
    found = of(case)
    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds):
        sys.stderr.write(f"{case.name}, round {number + 1} of {rounds}\n")  # rows come at the end
        for name, route in found.items():
            synchronize()
            start = time.perf_counter()
            route()
            synchronize()
            times[name].append(time.perf_counter() - start)
    rows = []
    windows, length = case.tokens.shape
    for name, own in times.items():
        eager, sdpa = (
            sorted(a / b for a, b in zip(own, times[base], strict=True)) for base in (EAGER, SDPA)
        )
        note = f"{eager[0]:.2f} to {eager[-1]:.2f}; of SDPA {statistics.median(sdpa):.2f}"
        called = f"costs, {case.name}, {windows} x {length}"
        rows.append(Row(called, name, statistics.median(own), statistics.median(eager), note))
    return rows


def traced(case: Case, rounds: int) -> list[Row]:
    """The graph of one logit, beside passes forward and back that give its gradient by the embedded
    tokens (and by all weights); time and peak memory. The prompt is text where the model reads
    text, the target its likeliest token."""
    view, model = case.view, case.plain[EAGER]
    text = tlg.zoo.default_windows(view, PROMPT, n=1).tokens if view.has_tokenizer else case.tokens
    prompt = text[:1, :PROMPT].to(model.device)
    target = int(view.logits(prompt)[0, -1].argmax())
    direction, bias = view.unembed()[:, target], view.unembed_bias()[target]

    def plain(weights: Sequence[Tensor] = ()) -> float:
        first = model.get_input_embeddings()(prompt).detach().requires_grad_()
        last = model(inputs_embeds=first, use_cache=False).last_hidden_state[0, -1]
        logit = last @ direction + bias
        # the embedding is not used: the pass begins behind it
        torch.autograd.grad(logit, [first, *weights], allow_unused=True)
        return float(logit.detach())

    def hooked() -> float:
        first: list[Tensor] = []

        def leaf(h: Tensor, hook: object) -> Tensor:
            first.append(h.detach().requires_grad_())
            return first[0]

        logits = view._model.run_with_hooks(prompt, fwd_hooks=[(view.state_hooks[0], leaf)])
        torch.autograd.grad(logits[0, -1, target], first)
        return float(logits[0, -1, target].detach())

    def trace() -> float:
        return tlg.trace_logit(view, prompt, target).value

    with grown() as growth:
        value = trace()
    assert all(abs(value - route()) < 1e-3 for route in (plain, hooked)), "not the model's logit"
    called = f"costs, {case.name}, a prompt of {prompt.shape[1]}"
    found: Routes = {f"{EAGER}, forward and back": plain}
    weights = list(model.requires_grad_(True).parameters())
    found[f"{EAGER}, forward and back to all weights"] = partial(plain, weights)
    found |= {"TransformerLens, forward and back": hooked, "trace_logit": trace}
    on_cpu = model.device.type == "cpu"  # a GPU's work is no time of the processor
    *passes, graph = interleave(called, found, rounds=rounds, processor=on_cpu)
    return [*passes, growth.on(graph)]


def run(size: str) -> list[Row]:
    """Every case, agreement first; planes and intervals on a quarter of the windows."""
    rows = []
    for case in cases(size):
        agreement(case)
        rows += timed(case, routes, ROUNDS[size])
        few = case.tokens[: max(FEWEST_WINDOWS, len(case.tokens) // 4)]
        rows += timed(case._replace(tokens=few), detailed, ROUNDS[size])
        rows += traced(case, ROUNDS[size])
    return rows
