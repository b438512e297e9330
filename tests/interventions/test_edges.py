"""Removing an edge is HookedTransformer's split-input patching with frozen norms, acts in every
class, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import ARCHITECTURES, HAS_HOOKED, hf_model, loadable, tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.intervals import paired_interval, sign_flip_p
from tl_geometry.interventions import edge_necessity, remove_edge, swap_edge
from tl_geometry.interventions.edge_effects import _controls
from tl_geometry.models import from_hf, view
from tl_geometry.models.output_head import next_token_losses
from tl_geometry.models.writers import run_written

PROMPTS = tokens(batch=3, length=12, seed=7)


@cache
def embedded() -> Any:
    return tlg.zoo.embedded()


@cache
def windows(length: int, n: int) -> Tensor:
    return tlg.zoo.default_windows(embedded(), length, n=n).tokens


def writer_of(model: Any, name: str, prompts: Tensor = PROMPTS) -> Tensor:
    found: list[Tensor] = []
    run_written(view(model), prompts, [1], lambda _, w: found.append(w.parts()[name]))
    return found[0]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize(("swap", "drop"), [(False, 0), (True, 0), (False, 3)])
@pytest.mark.parametrize("side", ["query", "key", "value"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
@torch.no_grad()
def test_edges_are_those_of_split_inputs(
    architecture: str, side: str, swap: bool, drop: int
) -> None:
    """Independent route: HookedTransformer's ``hook_k_input`` and alike, norm scales held."""
    dtype = torch.float64
    model = from_hf(hf_model(architecture, dtype), None, model_class="hooked", dtype=dtype)
    w = writer_of(model, "L0H1")
    change = (w.roll(1, 0) - w if swap else -w)[:, drop:]
    plain = model(PROMPTS)
    if swap:
        context = swap_edge(model, PROMPTS, "L0H1", "L1H2", side=side, other=PROMPTS.roll(1, 0))
    else:
        context = remove_edge(model, PROMPTS, "L0H1", "L1H2", side=side, drop=drop)
    with context:
        ours = model(PROMPTS)
    cache = model.run_with_cache(PROMPTS)[1]
    model.set_use_split_qkv_input(True)
    model.set_ungroup_grouped_query_attention(True)

    def take(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, drop:, 2] += change
        return value

    def hold(value: Tensor, hook: Any) -> Tensor:
        kept = cache[hook.name]
        if hook.name.endswith("ln1.hook_scale"):
            return kept.unsqueeze(2).expand(value.shape)
        if kept.shape != value.shape:  # grouped keys were normed once for a group
            kept = kept.view(3, 12, -1, 1).repeat_interleave(2, 2).reshape(value.shape)
        return kept

    letter = side[0]
    hooks: list[Any] = [(f"blocks.1.hook_{letter}_input", take), ("blocks.1.ln1.hook_scale", hold)]
    if architecture == "qwen3":
        hooks += [(f"blocks.1.attn.{w}_norm.hook_scale", hold) for w in "qk"]
    theirs = model.run_with_hooks(PROMPTS, fwd_hooks=hooks)
    assert float((ours - theirs).abs().max()) < 1e-11
    assert float((ours - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_edges_act_in_every_class(architecture: str) -> None:
    found: list[Tensor] = []
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        plain = model(PROMPTS)
        for side in ("query", "key", "value"):
            with remove_edge(model, PROMPTS, "L0H1", ["L1H2", "L1H0"], side=side):
                edited = model(PROMPTS)
            assert float((edited - plain).abs().max()) > 1e-4, (kind, side)
        change = (edited - plain).log_softmax(-1) if architecture == "bert" else edited - plain
        found.append(change - change.mean(-1, keepdim=True))
        assert torch.equal(model(PROMPTS), plain)
    for one in found[1:]:
        assert float((one - found[0]).abs().max()) < 1e-3 * float(found[0].abs().max() + 1)


def test_removing_everything_leaves_the_constants() -> None:
    """All writers out of the keys: scores are those of the constants, the same for every key."""
    model = tiny("bridge", "gpt2")
    names = ["embed", "pos_embed", "constants", "attn0", "mlp0"]
    with remove_edge(model, PROMPTS, names, "L1H2"):
        pattern = model.run_with_cache(PROMPTS)[1]["pattern", 1][:, 2]
    even = torch.ones(12, 12).tril()
    assert torch.allclose(pattern, (even / even.sum(-1, keepdim=True)).expand(3, -1, -1), atol=1e-5)


def test_swapping_with_the_same_prompts_changes_nothing() -> None:
    model = tiny("bridge", "llama")
    plain = model(PROMPTS)
    with (
        pytest.raises(GeometryError, match="other: expected counterfactual prompts"),
        swap_edge(model, PROMPTS, "L0H1", "L1H2", other=PROMPTS[:, 1:]),
    ):
        pass
    with swap_edge(model, PROMPTS, "L0H1", "L1H2", other=PROMPTS):
        assert torch.allclose(model(PROMPTS), plain, atol=1e-5)
    with swap_edge(model, PROMPTS, "L0H1", "L1H2"):
        assert float((model(PROMPTS) - plain).abs().max()) > 1e-3


@pytest.mark.parametrize("architecture", ["bloom", "gpt2-inverse-layer"])
def test_edited_heads_keep_their_own_slope_and_scale(architecture: str) -> None:
    """Only the last key is edited, so that earlier rows stay as they were: with the ALiBi slope of
    another head, or a scale of one over the root of d_head, they would not."""
    model = tiny("bridge", architecture, dtype=torch.float64)
    plain = model(PROMPTS)
    with remove_edge(model, PROMPTS, "L0H1", "L1H3", side="key", drop=PROMPTS.shape[1] - 1):
        edited = model(PROMPTS)
    assert torch.allclose(edited[:, :-1], plain[:, :-1], atol=1e-10)
    assert not torch.allclose(edited[:, -1], plain[:, -1], atol=1e-4)


@pytest.mark.slow
def test_a_first_token_that_shares_leave_out_stays() -> None:
    """By default the input at a BOS stays whole; without a BOS nothing does."""
    model = embedded()
    bos = windows(12, 2)
    for prompts, drop in ((bos, 1), (bos[:, 1:], 0)):
        found: list[Tensor] = []
        for start in (None, 0, 1, 2):
            with remove_edge(model, prompts, "L0H0", "L1H0", drop=start):
                found.append(model(prompts))
        same = [torch.equal(found[0], other) for other in found[1:]]
        assert same == [start == drop for start in (0, 1, 2)]


def test_what_makes_no_sense_is_refused() -> None:
    model = tiny("bridge", "gpt2")
    with pytest.raises(GeometryError, match="L1H0"), remove_edge(model, PROMPTS, "L1H0", "L1H2"):
        pass
    wrong = remove_edge(model, PROMPTS, "L0H0", "L1H2", side="keys")
    with pytest.raises(GeometryError, match="side"), wrong:
        pass
    other = pytest.raises(GeometryError, match="tokens of the clean run")
    with remove_edge(model, PROMPTS, "L0H0", "L1H2"), other:
        model(PROMPTS.flip(0))
    with pytest.raises(GeometryError, match="drop"):
        remove_edge(model, PROMPTS, "L0H0", "L1H2", drop=12)
    with pytest.raises(GeometryError, match="2 prompts"):
        swap_edge(model, PROMPTS[:1], "L0H0", "L1H2")


@pytest.mark.parametrize("model_class", ["bridge", *(["hooked"] if HAS_HOOKED else [])])
def test_a_prompt_that_goes_on_is_refused(model_class: str) -> None:
    """HookedTransformer generates from embeddings, which do not show the tokens."""
    model = tiny(model_class, "gpt2")
    options: dict[str, Any] = {"max_new_tokens": 2, "stop_at_eos": False, "verbose": False}
    refused = pytest.raises(GeometryError, match="tokens of the clean run")
    with remove_edge(model, PROMPTS, "L0H0", "L1H2"), refused:
        model.generate(PROMPTS, use_past_kv_cache=False, do_sample=False, **options)


@pytest.mark.parametrize("model_class", ["bridge", *(["hooked"] if HAS_HOOKED else [])])
def test_a_pass_that_begins_with_embeddings_is_refused(model_class: str) -> None:
    """It may be one of other tokens, also where its length is that of the clean run."""
    model = tiny(model_class, "gpt2")
    embeddings = model.run_with_cache(PROMPTS.flip(0))[1]["hook_embed"]
    edit = remove_edge(model, PROMPTS, "L0H0", "L1H2")

    def run() -> None:
        if model_class == "bridge":
            model.original_model(inputs_embeds=embeddings)
        else:
            model(embeddings, start_at_layer=0)

    with edit, pytest.raises(GeometryError, match="or embeddings"):
        run()
    with model.hooks(fwd_hooks=edit.hooks()), pytest.raises(GeometryError, match="or embeddings"):
        run()


FIRST = ("clean", "remove", "swap", "keep", "shrink")


def test_necessity_is_paired_over_prompts() -> None:
    """Losses are those of the context managers, intervals and p-values those of their paired
    differences; the largest other writers are the controls."""
    model = embedded()
    prompts = tlg.scores.repeated_random_tokens(12, 2, 12, low=3, high=view(model).d_vocab)
    second = torch.arange(24) >= 13
    heads = ["L1H0", "L2H1"]
    found = edge_necessity(model, prompts, "L0H0", heads, counted=second, controls=3, drop=2)
    assert (found.conditions[:5], found.drop) == (FIRST, 2)
    with torch.no_grad(), remove_edge(model, prompts, "L0H0", heads, drop=2):
        own = next_token_losses(model(prompts), prompts)[:, second[1:]].mean(1)
    assert torch.allclose(found.losses[1].float(), own, atol=1e-5)
    assert float((found.losses[1] - found.losses[0]).abs().max()) > 1e-3
    assert float((found.losses[2] - found.losses[1]).abs().max()) > 1e-3
    shares = found.share[5:].abs()
    assert bool((shares[:-1] >= shares[1:]).all())
    assert found.change("remove") == paired_interval(found.losses[1] - found.losses[0])
    assert found.p_value("remove", against="swap") == sign_flip_p(found.losses[1] - found.losses[2])
    few = edge_necessity(model, prompts[:3], "L0H0", heads, controls=["mlp0", "attn0"])
    assert few.conditions == (*FIRST, "mlp0", "attn0")
    assert float(few.share[6].abs()) > float(few.share[1].abs())
    assert few.change("remove").low.isnan()
    for wrong in (second[:5], second.expand(3, -1), second.expand(2, 12, -1)):
        with pytest.raises(GeometryError, match=r"counted: expected bool \[12, 24\] or \[24\]"):
            edge_necessity(model, prompts, "L0H0", heads, counted=wrong)


def test_controls_of_a_block_are_none_of_its_heads() -> None:
    shares = {"L0H1": torch.tensor([0.9]), "L1H0": torch.tensor([0.3]), "mlp0": torch.tensor([0.1])}
    assert _controls(2, shares, "attn0") == ("L1H0", "mlp0")
    assert _controls(2, shares, "L1H0") == ("L0H1", "mlp0")
    assert _controls(1, shares, "attn1") == ("L0H1",)
    assert _controls(1, {"L1H10": torch.ones(1)}, "L1H1") == ("L1H10",)
    with pytest.raises(GeometryError, match="controls: expected 0 or more, got -1"):
        _controls(-1, shares, "L1H0")
    for named in (["mlp0", "L1H0"], ["mlp0", "mlp0"], "L1H0"):
        with pytest.raises(GeometryError, match="expected other writers than 'L1H0', each once"):
            _controls(named, shares, "L1H0")


@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_controls_are_the_largest_on_the_side_asked_for(side: str) -> None:
    model = embedded()
    prompts = tlg.zoo.default_windows(model, 20, n=4)
    heads = ["L2H1", "L2H3"]
    found = edge_necessity(model, prompts, "L1H0", heads, side=side, controls=4, drop=2)
    table = tlg.composition(model, prompts, heads=heads, drop=2, progress=False)
    cs = table.cs[:, ["query", "key", "value"].index(side)].mean(0)
    known = {n: float(x) for n, x in zip(table.parts, cs, strict=True)}
    others = [n for n in known if n not in ("bias", "constants", "L1H0")]
    ranked = sorted(others, key=lambda name: -abs(known[name]))
    assert found.conditions[5:] == tuple(ranked[:4])
    expected = torch.tensor([known[n] for n in ("L1H0", "L1H0", "L1H0", "L1H0", *ranked[:4])])
    assert torch.allclose(found.share[1:].float(), expected, atol=1e-4)


@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_what_is_kept_is_what_no_other_writer_wrote(side: str) -> None:
    model = embedded()
    prompts = windows(16, 2)
    found = edge_necessity(model, prompts, "L0H0", "L2H1", side=side, controls=0)
    table = tlg.composition(model, prompts, heads="L2H1", progress=False)
    rest = [n for n in table.parts[1:] if n != "L0H0"]
    with remove_edge(model, prompts, rest, "L2H1", side=side):
        own = next_token_losses(model(prompts), prompts).mean(1)
    assert torch.allclose(found.losses[3].float(), own, atol=1e-5)
    assert float((found.losses[3] - found.losses[0]).abs().max()) > 1e-3


@pytest.mark.parametrize("side", ["query", "key", "value"])
def test_shrinking_takes_an_equal_share_evenly(side: str) -> None:
    """Independent route: the pattern to the power 1 - share, or values times 1 - share."""
    model = embedded()
    prompts = windows(16, 2)
    found = edge_necessity(model, prompts, "L0H0", "L1H0", side=side, controls=0)
    kept = 1 - float(found.share[1])
    cache = model.run_with_cache(prompts)[1]
    power, values = (1.0, kept) if side == "value" else (kept, 1.0)
    pattern = cache["pattern", 1][:, 0] ** power
    pattern = pattern / pattern.sum(-1, keepdim=True)

    def other(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        z[:, :, 0] = values * pattern @ cache["v", 1][:, :, 0]
        return z

    logits = model.run_with_hooks(prompts, fwd_hooks=[("blocks.1.attn.hook_z", other)])
    own = next_token_losses(logits, prompts).mean(1)
    assert torch.allclose(found.losses[4].float(), own, atol=1e-5)
    assert float((found.losses[4] - found.losses[0]).abs().max()) > 1e-4


INDUCTION = ["L17H3", "L17H4", "L17H5", "L18H6", "L18H7", "L23H2"]
"""Induction heads of SmolLM2-135M."""
SINKS = 4
"""Its first positions: the stream of some prompts is 7 times as large there (at BOS 130 times)."""


@pytest.mark.smollm2
def test_one_edge_carries_induction_in_smollm2() -> None:
    """The strongest writer of the induction heads' keys is a previous-token head, far above its
    nulls, and without that edge nothing is copied. As large a share taken evenly, all other writers
    together, and the largest other edges cost far less; so does the same writer in L18H8, of whose
    keys it writes as much as of L18H6's and L18H7's."""
    model = tlg.zoo.smollm2()
    bos = view(model).bos_id
    prompts = tlg.scores.repeated_random_tokens(20, 2, 10, low=1000, high=40000, bos_id=bos)
    heads = [*INDUCTION[:5], "L18H8"]
    table = tlg.composition(model, prompts[:3], heads=heads, draws=2, progress=False)
    previous = table.parts.index("L16H0")
    for head in range(5):
        assert int(table.gs[head, 1].argmax()) == previous
        assert float(table.gs[head, 1, previous]) > 0.5
        nulls = (table.other_gs, table.random_gs)
        assert all(abs(float(null[head, 1, previous])) < 0.2 for null in nulls)
    assert float((table.cs[3:, 1, previous] - table.cs[5, 1, previous]).abs().max()) < 0.1
    second, others = torch.arange(41) >= 22, ["mlp16", "mlp11"]
    options: dict[str, Any] = {"counted": second, "controls": others, "drop": SINKS}
    found = edge_necessity(model, prompts, "L16H0", INDUCTION, **options)
    assert float(found.change("remove").low) > 4
    assert float(found.change("swap").low) > 4
    for name in found.conditions[3:]:
        assert float(found.change(name).high) < 3, name
        assert float(found.change("remove", against=name).low) > 3, name

    def change(writer: str, heads: Any, drop: int | None) -> Tensor:
        with remove_edge(model, prompts, writer, heads, drop=drop):
            losses = next_token_losses(model(prompts), prompts)[:, second[1:]].mean(1)
        return paired_interval(losses.double() - found.losses[0]).low

    # tokens 1 and 2 attract attention like BOS, and mlp11 keeps it off them
    assert float(change("mlp11", INDUCTION, None)) > 2
    assert float(change("L16H0", "L18H6", SINKS)) > 1
    assert float(change("L16H0", "L18H8", SINKS)) < 0.1
