"""Patched paths are path patching by hand, all paths of a head together are its knockout, and the
path to the output alone is what its write does through the final norm."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.circuits.edges_by_hand import difference, head_writes, hooked, reader_hooks
from tests.lib.models import HAS_HOOKED, HEADS, loadable, tiny, tokens
from tl_geometry.base.errors import GeometryError, ReconstructionError, UnsupportedModelError
from tl_geometry.circuits import EdgeLayout
from tl_geometry.circuits.edge_pass import EdgePass, PathStream, PrunedStream
from tl_geometry.interventions import HeadPaths, head_knockouts, head_paths, paths
from tl_geometry.models import view

needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)
PROMPTS, COUNTERFACTUALS = tokens(3, 10, seed=5), tokens(3, 10, seed=6)
TARGETS = [(5, 9), (7, 3), (11, 40)]
OPTIONS: dict[str, Any] = {"targets": TARGETS, "controls": 0, "progress": False}
SENDERS = {"one": "L0H1", "two": ["L0H0", "L0H3"]}
BY_HAND = ("gpt2", "llama", "neox", "bloom", "gemma3", "gpt-oss")
LAWS = ("gpt2", "llama", "qwen3", "neox", "gemma2", "bloom", "gptj", "olmo2", "opt", "gpt-oss")


def model_of(architecture: str) -> Any:
    return tiny(loadable(architecture)[0][0], architecture, dtype=torch.float64)


def patched(model: Any, senders: Any, receivers: Any, **options: Any) -> HeadPaths:
    return head_paths(model, PROMPTS, senders, receivers, **(OPTIONS | options))


def layout_of(model: Any) -> EdgeLayout:
    return EdgeLayout.of(view(model))


def readers_behind(layout: EdgeLayout, layer: int) -> list[str]:
    """All readers that see the heads of a block."""
    last = int(layout.head_writers.view(layout.n_layers, -1)[layer, -1])
    return [name for name, seen in zip(layout.readers, layout.seen, strict=True) if seen > last]


def receivers_of(layout: EdgeLayout) -> dict[str, list[str]]:
    """Sets of receivers: a query, a key and a value of a group that is not the first, MLPs, the
    output, and several together."""
    behind = readers_behind(layout, 0)
    sides = {which: [r for r in behind if r.endswith(f"<{which}>")][1] for which in "qkv"}
    sets = {name: [reader] for name, reader in sides.items()}
    sets |= {name: [name] for name in behind if "<" not in name}
    return sets | {"several": [sides["q"], sides["v"], behind[-1]], "all": behind}


# ---- path patching by hand


def patched_by_hand(
    model: Any, heads: list[int], receivers: list[str], between: str, position: int | None = None
) -> Tensor:
    """The difference of logits with heads of the first block replaced by those of the
    counterfactuals for some readers, by hooks on the readers' own inputs."""
    names, layout = reader_hooks(model), layout_of(model)
    places = [
        (name, row)
        for name in names
        for row in range(
            layout.n_heads
            if "q_input" in name
            else layout.n_key_heads[0]
            if "k_input" in name or "v_input" in name
            else 1
        )
    ]
    place = dict(zip(layout.readers, places, strict=True))
    with torch.no_grad():
        clean, other = (model.run_with_cache(rows)[1] for rows in (PROMPTS, COUNTERFACTUALS))
    z = "blocks.0.attn.hook_z"
    new = clean[z].clone()
    new[:, :, heads] = other[z][:, :, heads]
    change = (head_writes(model, 0, new) - head_writes(model, 0, clean[z])).sum(0)
    knocked: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        knocked[hook.name] = value.clone()

    def replace(value: Tensor, hook: Any) -> Tensor:
        return new

    def patch(value: Tensor, hook: Any) -> Tensor:
        out = value.clone()
        at = slice(None) if position is None else slice(position, position + 1)
        for name, row in (place[receiver] for receiver in receivers):
            if name == hook.name:
                part = (slice(None), at) if value.dim() == 3 else (slice(None), at, row)
                if between == "live":
                    out[part] = knocked[name][part]
                else:
                    out[part] = value[part] + change[:, at]
        return out

    with torch.no_grad():
        model.run_with_hooks(PROMPTS, fwd_hooks=[(z, replace), *((n, keep) for n in names)])
        return difference(model.run_with_hooks(PROMPTS, fwd_hooks=[(n, patch) for n in names]))


def paths_of(model: Any, between: str = "frozen", **options: Any) -> HeadPaths:
    receivers, other = receivers_of(layout_of(model)), COUNTERFACTUALS
    return patched(
        model, SENDERS, receivers, between=between, by="prompt", reference=other, **options
    )


def distance(
    model: Any, between: str = "frozen", receivers: set[str] | None = None, **options: Any
) -> float:
    """How far patched paths are from those by hand."""
    table = paths_of(model, between, **options)
    place = options.get("receiver_position")
    errors = []
    for column, (name, inputs) in enumerate(zip(table.receivers, table.inputs, strict=True)):
        if receivers is None or name in receivers:
            for row, heads in enumerate([[1], [0, 3]]):
                wanted = patched_by_hand(model, heads, list(inputs), between, place)
                errors.append((table.clean + table.effects[row, column] - wanted).abs().max())
    return float(torch.stack(errors).max())


@needs_hooked
@pytest.mark.parametrize("between", ["frozen", "live"])
@pytest.mark.parametrize("architecture", BY_HAND)
def test_paths_are_those_by_hand(architecture: str, between: str) -> None:
    model = hooked(architecture)
    assert distance(model, between) < 1e-9
    effects = paths_of(model, between).effects
    assert float(effects.abs().amax(-1).min()) > 1e-4


@needs_hooked
@pytest.mark.parametrize("between", ["frozen", "live"])
def test_receivers_read_at_one_position(between: str) -> None:
    model = hooked("llama")
    assert distance(model, between, receiver_position=9) < 1e-9
    all_positions, one = paths_of(model, between), paths_of(model, between, receiver_position=9)
    assert not torch.allclose(all_positions.effects, one.effects, atol=1e-3)


READ = PathStream.read


def wrong_sign(stream: PathStream, readers: slice) -> Tensor:
    if stream.change is not None:
        return READ(_with(stream, change=-stream.change), readers)
    return READ(stream, readers)


def swapped_sides(stream: PathStream, readers: slice) -> Tensor:
    """The second block's queries (4 heads) read for its keys and values (2 groups each)."""
    order = torch.arange(stream.receives.shape[1])
    order[9:13], order[13:17] = torch.arange(13, 17), torch.arange(9, 13)
    return READ(_with(stream, receives=stream.receives[:, order]), readers)


def wrong_group(stream: PathStream, readers: slice) -> Tensor:
    """The other of the two groups of keys, and of values."""
    order = torch.arange(stream.receives.shape[1])
    order[13:17] = torch.tensor([14, 13, 16, 15])
    return READ(_with(stream, receives=stream.receives[:, order]), readers)


def everyone(stream: PathStream, readers: slice) -> Tensor:
    return READ(_with(stream, receives=torch.ones_like(stream.receives)), readers)


def _with(stream: PathStream, **fields: Any) -> PathStream:
    now = {"first": stream.total, "receives": stream.receives, "change": stream.change}
    return PathStream(**(now | fields))


FAULTS = [
    (wrong_sign, {"q", "k", "v", "mlp0", "mlp1", "output"}),
    (swapped_sides, {"q", "k", "v"}),
    (wrong_group, {"k", "v"}),
    (everyone, {"q", "k", "v", "mlp0", "mlp1"}),
]


@needs_hooked
@pytest.mark.parametrize(("fault", "seen"), FAULTS)
def test_faults_are_seen(fault: Any, seen: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = hooked("llama")
    assert layout_of(model).readers[9:17:4] == ("L1H0<q>", "L1H0-1<k>")
    monkeypatch.setattr(PathStream, "read", fault)
    for receiver in seen:
        assert distance(model, receivers={receiver}) > 1e-4, receiver


# ---- laws, on both generations


@pytest.mark.parametrize("between", ["frozen", "live"])
@pytest.mark.parametrize("architecture", LAWS)
def test_all_paths_together_are_the_knockout(architecture: str, between: str) -> None:
    model = model_of(architecture)
    behind = readers_behind(layout_of(model), 0)
    sets = {"all": behind, "but one": [r for r in behind if r != "L1H0<q>"]}
    table = patched(model, SENDERS, sets, between=between, by="zero")
    knockout = head_knockouts(model, PROMPTS, heads=SENDERS, by="zero", **OPTIONS)
    # some families compute norms or tables in float32 whatever their dtype
    bound = 2e-5 * float(knockout.clean.abs().max())
    assert float((table.clean - knockout.clean).abs().max()) < bound
    assert float((table.effects[:, 0] - knockout.effects).abs().max()) < bound
    if between == "frozen":
        assert float((table.effects[:, 1] - knockout.effects).abs().max()) > 10 * bound
    assert float(knockout.effects.abs().min()) > 50 * bound


@pytest.mark.parametrize("architecture", LAWS)
def test_the_live_path_to_the_output_is_the_knockout(architecture: str) -> None:
    model = model_of(architecture)
    reference = tokens(5, 12, seed=7)
    heads = ["L0H2", "L1H1"]
    table = patched(model, heads, "output", between="live", reference=reference)
    knockout = head_knockouts(model, PROMPTS, heads=heads, reference=reference, **OPTIONS)
    bound = 2e-5 * float(knockout.clean.abs().max())
    assert float((table.effects[:, 0] - knockout.effects).abs().max()) < bound
    frozen = patched(model, heads, "output", reference=reference).effects[:, 0]
    assert float((frozen[0] - knockout.effects[0]).abs().max()) > 50 * bound


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3", "neox", "bloom", "gptj"])
def test_the_frozen_path_to_the_output_is_the_write_through_the_final_norm(
    architecture: str,
) -> None:
    """A hook on the last state of the live model adds what replaces the head's write."""
    model = model_of(architecture)
    seen, last = view(model), view(model).state_hooks[-1]
    table = patched(model, ["L0H2", "L1H1"], "output", by="zero")
    clean = measured_difference(model)
    for row, (layer, head) in enumerate([(0, 2), (1, 1)]):
        name = f"blocks.{layer}.attn.hook_z"
        z = by_head(seen.activations(PROMPTS, [name])[name])
        write = z[:, :, head] @ seen.weights(layer).W_O[head].to(z)
        effect = measured_difference(model, [(last, partial(_less, change=write))]) - clean
        bound = 2e-5 * float(clean.abs().max())
        assert float((table.effects[row, 0] - effect).abs().max()) < bound
        assert float(effect.abs().max()) > 50 * bound


def measured_difference(model: Any, hooks: list[Any] | None = None) -> Tensor:
    with torch.no_grad():
        return difference(model.run_with_hooks(PROMPTS, fwd_hooks=hooks or []).double())


def _less(value: Tensor, hook: Any, change: Tensor) -> Tensor:
    return value - change.to(value)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "neox", "gemma2", "bloom", "gptj"])
def test_live_paths_patch_what_readers_make_of_the_other_stream(architecture: str) -> None:
    """Queries, keys and values of the last heads together: their mixed values are those of a run
    without the sender, patched into a clean one."""
    model = model_of(architecture)
    size = HEADS // layout_of(model).n_key_heads[1]
    group = f"L1H{HEADS - size}-{HEADS - 1}" if size > 1 else f"L1H{HEADS - 1}"
    queries = [f"L1H{head}<q>" for head in range(HEADS - size, HEADS)]
    inputs = {"heads": [*queries, f"{group}<k>", f"{group}<v>"]}
    table = patched(model, "L0H1", inputs, between="live", by="zero")
    sender, reader = (f"blocks.{layer}.attn.hook_z" for layer in (0, 1))
    knocked: list[Tensor] = []

    def keep(value: Tensor, hook: Any) -> None:
        knocked.append(by_head(value).clone())

    def patch(value: Tensor, hook: Any) -> Tensor:
        out = by_head(value).clone()
        out[:, :, HEADS - size :] = knocked[0][:, :, HEADS - size :]
        return out.view(value.shape)

    measured_difference(model, [(sender, zero), (reader, keep)])
    clean = measured_difference(model)
    wanted = measured_difference(model, [(reader, patch)]) - clean
    bound = 2e-5 * float(clean.abs().max())
    assert float((table.effects[0, 0] - wanted).abs().max()) < bound
    assert float(wanted.abs().max()) > 20 * bound


def by_head(value: Tensor) -> Tensor:
    return value.unflatten(-1, (HEADS, -1)) if value.dim() == 3 else value


def zero(value: Tensor, hook: Any) -> Tensor:
    out = by_head(value).clone()
    out[:, :, 1] = 0
    return out.view(value.shape)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3", "neox", "bloom", "opt"])
def test_frozen_paths_are_pruned_runs(architecture: str) -> None:
    """A run in which every reader keeps every writer, but the receivers not the sender, whose
    counterfactual writes nothing but its share of the bias."""
    model = model_of(architecture)
    layout, seen = layout_of(model), view(model)
    sets = receivers_of(layout)
    table = patched(model, "L0H1", sets, by="zero")
    edges, at = EdgePass.of(seen, layout, PROMPTS), slice(-1, None)
    stream, logits = edges.verified(PROMPTS, at)
    sender = layout.writers.index("L0H1")
    counterfactual = stream.all_writes().clone()
    bound = 2e-5 * float(table.clean.abs().max())
    counterfactual[sender] = seen.weights(0).b_O / HEADS
    for column, receivers in enumerate(sets.values()):
        kept = layout.allowed.clone()
        kept[[layout.readers.index(name) for name in receivers], sender] = False
        pruned = PrunedStream(stream.writes[0][0], counterfactual, kept)
        wanted = difference(edges.run(pruned, at)) - difference(logits)
        assert float((table.effects[0, column] - wanted).abs().max()) < bound
        assert float(wanted.abs().max()) > 50 * bound


# ---- what it is measured with


@pytest.mark.parametrize("rows_at_once", [1, 3, 64])
@pytest.mark.parametrize("metric", ["difference", "loss", "own"])
def test_passes_of_any_size_give_the_same(
    metric: str, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of("llama")
    options: dict[str, Any] = {"by": "prompt", "seed": 2, "between": "live"}
    if metric != "difference":
        options |= {"targets": None, "metric": "loss" if metric == "loss" else entropy}
    heads, receivers = ["L0H0", "L0H3"], ["mlp1", "L1H2-3<v>"]
    whole = patched(model, heads, receivers, **options)
    monkeypatch.setattr(paths, "output_batch", lambda *_, **__: rows_at_once)
    parts = patched(model, heads, receivers, **options)
    assert torch.allclose(whole.effects, parts.effects, atol=1e-10)
    assert whole.metric == ("entropy" if metric == "own" else metric)


def entropy(logits: Tensor) -> Tensor:
    return torch.distributions.Categorical(logits=logits[:, 3]).entropy()


def test_controls_are_random_heads_on_the_same_receivers() -> None:
    model = model_of("gpt2")
    receivers = ["mlp1", "output"]
    every = patched(model, None, receivers, controls=None)
    assert every.control is None
    assert every.senders == tuple(f"L{l}H{h}" for l in (0, 1) for h in range(HEADS))
    table = patched(model, ["L0H1", "L1H3"], receivers, controls=40)
    assert table.control is not None
    assert table.control_draws is not None
    others = [i for i, name in enumerate(every.senders) if name not in table.senders]
    for column in range(2):
        singles = every.effects[others, column].mean(1)
        gaps = (table.control_draws[0, column, :, None] - singles).abs()
        assert float(gaps.min(1).values.max()) < 1e-9
        assert set(gaps.argmin(1).tolist()) == set(range(len(others)))
    assert torch.allclose(table.control.mean(-1), table.control_draws.mean(-1))
    assert table.excess is not None
    assert torch.allclose(table.excess.value, (table.effects - table.control).mean(-1))
    first = patched(model, None, "mlp0")
    assert first.senders == tuple(f"L0H{h}" for h in range(HEADS))


def test_the_table_is_stored_and_read_back(tmp_path: Path) -> None:
    receivers = {"last": ["mlp1", "output"], "output": "output"}
    table = patched(model_of("llama"), SENDERS, receivers, controls=2)
    loaded = HeadPaths.load(table.save(tmp_path / "paths.safetensors"))
    assert loaded.sets == table.sets == (((0, 1),), ((0, 0), (0, 3)))
    assert loaded.inputs == table.inputs
    assert loaded.columns()[:5] == ("sender", "receiver", "effect", "effect_low", "effect_high")
    assert [row[:2] for row in loaded.rows()][:2] == [("one", "last"), ("one", "output")]
    assert loaded.control_draws is not None
    assert loaded.control_draws.shape == (2, 2, 2)
    assert str(loaded.to_dataframe()) == str(table.to_dataframe())
    assert torch.equal(loaded.effects, table.effects)


def test_a_small_dtype_and_the_loss() -> None:
    model = tiny(loadable("gpt2")[0][0], "gpt2")
    behind = readers_behind(layout_of(model), 0)
    table = head_paths(model, PROMPTS, "L0H1", {"all": behind}, "loss", by="zero", progress=False)
    knockout = head_knockouts(model, PROMPTS, "loss", heads="L0H1", by="zero", progress=False)
    assert torch.allclose(table.clean, knockout.clean, atol=2e-5)
    assert torch.allclose(table.effects[0], knockout.effects, atol=2e-5)


# ---- refusals

REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    ("L1H0", "L1H2<q>", {}, r"from L1H0 to L1H2<q>: expected a receiver that reads behind"),
    ("L1H0", ["output", "mlp0"], {}, "from L1H0 to mlp0"),
    ("L0H0", "L1H0<k>", {}, r"receivers: expected inputs of this model.*L1H0-1<k>"),
    ("L0H0", "L1H0", {}, "receivers: expected inputs of this model"),
    ("L0H0", [], {}, "at least one input"),
    ("L0H0", {}, {}, "at least one set of inputs"),
    (None, "L0H0<q>", {}, "inputs that read some head"),
    ("L9H0", "output", {}, "L9H0"),
    ("L0H0", "output", {"between": "thawed"}, "between: expected one of"),
    ("L0H0", "output", {"by": "median"}, "by: expected one of"),
    ("L0H0", "output", {"by": "zero", "reference": PROMPTS}, 'by="mean"'),
    ("L0H0", "output", {"by": "prompt", "reference": PROMPTS[:2]}, "one for each prompt"),
    ("L0H0", "output", {"reference": PROMPTS[:, :5]}, "prompts of at least 10 tokens"),
    ("L0H0", "output", {"receiver_position": 99}, "an index from 0 to 9"),
    ("L0H0", "output", {"targets": None}, r"a pair \(right, wrong\)"),
    (None, "output", {"controls": 2}, "heads that no row has"),
]


@pytest.mark.parametrize(("senders", "receivers", "options", "text"), REFUSED)
def test_what_makes_no_sense_is_refused(
    senders: Any, receivers: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(GeometryError, match=text):
        patched(model_of("llama"), senders, receivers, **options)


def test_models_without_these_inputs_are_refused() -> None:
    with pytest.raises(UnsupportedModelError):
        patched(tiny("bridge", "bert"), "L0H0", "output")
    with pytest.raises(GeometryError, match="at least 2 prompts"):
        head_paths(model_of("llama"), PROMPTS[:1], "L0H0", "output", **OPTIONS)


def test_hooks_that_change_the_model_are_refused() -> None:
    model = model_of("llama")
    hooks = [("blocks.0.attn.hook_z", lambda z, hook: 2 * z)]
    with model.hooks(fwd_hooks=hooks), pytest.raises(ReconstructionError):
        patched(model, "L0H0", "output")
