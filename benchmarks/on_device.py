"""What a GPU decides, in one run: ``sh benchmarks/gpu.sh`` (with ``--size smoke`` on a CPU).

Weights and activations are on the device; every kind of call gives what the CPU gives; then what
decomposition, sweep, graphs and edges of SmolLM2-135M-Instruct cost beside its forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tl_geometry as tlg
from benchmarks.circuits import pairs
from benchmarks.decomposition import plain_models
from benchmarks.harness import Row, grown, paired, synchronize
from tl_geometry import interventions, zoo
from tl_geometry.zoo.pretrained import smollm2_hugging_face

SIZES: dict[str, tuple[int, int, int, tuple[int, ...], int]] = {
    "smoke": (4, 32, 2, (16,), 2),
    "cpu": (16, 128, 4, (64, 512), 16),
    "gpu": (256, 512, 32, (64, 512, 2300), 48),
}
"""Windows, positions and windows of a batch that are decomposed; lengths that are traced; pairs."""
CLOSE = 2e-3
"""Largest difference of two devices, in the largest number of the answer."""
QUIET: dict[str, Any] = {"progress": False}
GENERATOR = torch.Generator().manual_seed(0)


def answers(device: str) -> dict[str, Tensor]:
    """One answer of every kind of call, on a device."""
    model = zoo.embedded().to(device)
    windows = zoo.default_windows(model, 24, n=40)
    fitted, held_out = windows[:32], windows[32:]
    basis = tlg.decompose(model, fitted, **QUIET)
    ids, other = held_out.tokens[:2], held_out.tokens[2:4]
    between: dict[str, Any] = {"counterfactual": other, "answer": (5, 9)}
    edits = {"content": interventions.term(model, basis, "content", "L1H0")}
    graph = {"answer": 5, "other": 9, "keep": 1.0}
    paths = tlg.trajectories(model, fitted, **QUIET)
    split = tlg.split_scores(model, ids, basis, heads="L1H0")
    return {
        "decompose": basis.pos,
        "split_scores": split.summed(),
        "sweep_heads": tlg.sweep_heads(model, held_out, basis, **QUIET).cs,
        "composition": tlg.composition(model, ids, heads="L1H0", **QUIET).cs,
        "trace_logit": _values(tlg.trace_logit(model, ids[:1], **graph)),
        "a graph between two prompts": _values(
            tlg.trace_logit(model, ids[:1], counterfactual=other[:1], **graph)
        ),
        "edge_scores": tlg.edge_scores(model, ids, **between, **QUIET).scores,
        "effects": interventions.effects(model, ids, edits, **QUIET).edited,
        "trajectories": paths.X,
        **_columns("weight_geometry", tlg.weight_geometry(model, basis, draws=2)),
    }


def _values(graph: Any) -> Tensor:
    """The values of all nodes of a graph, in their own order."""
    values = (graph.leaf_values, graph.head_values, graph.mlp_values)
    return torch.cat([torch.as_tensor(x).flatten().double() for x in values])


def _columns(name: str, result: Any) -> dict[str, Tensor]:
    """Each column of numbers of a table, with its own size."""
    numbers = result.to_dataframe().select_dtypes("number")
    return {
        f"{name}, {column}": torch.tensor(numbers[column].to_numpy(float)) for column in numbers
    }


def agreement(device: str) -> None:
    """Weights and states are on the device, and answers are those of the CPU."""
    model = zoo.embedded().to(device)
    view = tlg.view(model)
    places = {p.device.type for p in (*model.parameters(), *model.buffers())}
    hook = view.state_hooks[-1]
    places.add(view.activations(torch.arange(3, 19)[None], [hook])[hook].device.type)
    assert places == {device}, f"weights or activations on {places}"
    right = answers("cpu")
    for name, found in answers(device).items():
        wanted = right[name].double()
        found = found.double().cpu()
        assert torch.equal(found.isnan(), wanted.isnan()), f"{name}: NaN"
        assert not bool(wanted.isinf().any()), f"{name}: no size to compare with"
        off = float((found - wanted).abs().nan_to_num().max())
        assert off <= CLOSE * float(wanted.abs().nan_to_num().max()), f"{name}: off by {off:.2g}"


def timed(name: str, route: str, call: Callable[[], object]) -> Row:
    """Seconds and memory of one call after one that is not counted."""
    call()
    synchronize()
    with grown() as growth:
        start = time.perf_counter()
        call()
        synchronize()
        seconds = time.perf_counter() - start
    return growth.on(Row(name, route, seconds, float("nan")))


def run(size: str) -> list[Row]:
    """Agreement, ratios to the forward pass in SDPA and eager attention, seconds and memory."""
    device = "cuda" if size == "gpu" else "cpu"
    agreement(device)
    model = zoo.smollm2(device=device)
    return [*_corpus(model, size, device), *_prompts(model, size, device)]


def _corpus(model: Any, size: str, device: str) -> list[Row]:
    """Decomposition and sweep, and the memory of few and of many contexts."""
    windows, length, batch = SIZES[size][:3]
    view, name = tlg.view(model), f"SmolLM2 on {device}"
    tokens = torch.randint(0, view.d_vocab, (windows, length), generator=GENERATOR)
    basis = tlg.decompose(view, tokens[: 2 * batch], **QUIET)
    routes: dict[str, Any] = {
        "decompose": lambda stream: tlg.decompose(view, stream, **QUIET),
        "sweep of all heads": lambda stream: tlg.sweep_heads(view, stream, basis, **QUIET),
    }
    rows: list[Row] = []
    for kind, own in plain_models(smollm2_hugging_face()[0], device).items():

        def forward(ids: Tensor, own: Any = own) -> object:
            return own(ids.to(device), use_cache=False)

        for route, work in routes.items():
            beside, split = f"{name}, beside {kind}", tokens.split(batch)
            rows += paired(beside, route, view, split, work, rounds=3, plain=forward)
    for few in (2 * batch, windows):
        some = partial(routes["decompose"], tokens[:few].split(batch))
        rows.append(timed(name, f"decompose {few} windows", some))
    return rows


def _prompts(model: Any, size: str, device: str) -> list[Row]:
    """Graphs of one prompt and between two, of several lengths, and edges of pairs."""
    lengths, count = SIZES[size][3:]
    view, name, rows = tlg.view(model), f"SmolLM2 on {device}", list[Row]()
    for n in lengths:
        one, other = torch.randint(0, view.d_vocab, (2, 1, n), generator=GENERATOR)
        graph = partial(tlg.trace_logit, view, one, 5, other=9)
        rows.append(timed(name, f"trace_logit, {n} tokens", graph))
        between = partial(graph, counterfactual=other)
        rows.append(timed(name, f"between two prompts, {n} tokens", between))
    ranked = pairs(model, "names", (count, 1))[0]
    edges = partial(tlg.edge_scores, model, ranked, **QUIET)
    return [*rows, timed(name, f"edges of {count} pairs", edges)]
