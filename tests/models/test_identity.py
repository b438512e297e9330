"""On which model: every weight and every setting counts in the fingerprint, at each call, and hooks
of others are seen."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import tl_geometry as tlg
from tests.tiny import (
    ARCHITECTURES,
    HAS_HOOKED,
    VOCAB,
    hf_model,
    loadable,
    randomize,
    tiny,
    tiny_hooked,
    tokens,
)
from tl_geometry.base.errors import GeometryError, ReconstructionError
from tl_geometry.models import fingerprints, from_hf, user_hooks, view
from tl_geometry.models.fingerprints import checksum, configuration, fingerprint
from tl_geometry.models.hook_points import hooked_points
from tl_geometry.models.reader import as_view
from tl_geometry.models.user_hooks import names_of, without_hooks

MODEL_CLASSES = ["bridge", "hooked"] if HAS_HOOKED else ["bridge"]
needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)
Change = Callable[[Tensor], Any]


def half_of(x: Tensor) -> None:
    x[:, : x.shape[1] * 7 // 8] = 0


def swapped_rows(x: Tensor) -> None:
    x[[3, 4]] = x[[4, 3]]


def one(x: Tensor) -> None:
    x[5, 7] = torch.nextafter(x[5, 7], torch.tensor(9.0))


def flipped(x: Tensor) -> None:
    x[1, 1] = -x[1, 1]


def two_flipped(x: Tensor) -> None:
    x[1, 1], x[1, 3] = -x[1, 1], -x[1, 3]


CHANGES: dict[str, Change] = {
    "a head": lambda x: x[:, 8:16].zero_(),
    "7/8 of the neurons": half_of,
    "one element, by one bit": one,
    "two rows": swapped_rows,
    "one sign": flipped,
    "two signs in the same half of their words": two_flipped,
    "one of the last elements": lambda x: x[-1, -1].mul_(1.5),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("shape", [(64, 64), (4096, 512), (61, 37)])
def test_every_change_of_a_matrix_changes_its_checksum(name: str, shape: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        y = x.clone()
        assert bool(checksum(x) == checksum(y))
        if dtype == torch.float32 or "bit" not in name:
            CHANGES[name](y)
            assert not torch.equal(x, y)
            assert bool(checksum(x) != checksum(y))


def test_columns_that_a_stride_would_miss_are_seen() -> None:
    x = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0))
    stride = x.numel() // 65536
    seen = {int(i) % 4096 for i in range(0, x.numel(), stride)}
    assert len(seen) < 4096 / 8  # what evenly spaced elements would look at
    whole = checksum(x)
    y = x.clone()
    y[:, [c for c in range(4096) if c not in seen]] = 0
    assert bool(checksum(y) != whole)


def test_a_checksum_is_one_number_of_the_values() -> None:
    x = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(300, 140)
    wide[:, 1::2] = x
    assert bool(checksum(wide[:, 1::2]) == checksum(x))  # whatever the strides
    odd = torch.cat([torch.zeros(1), x.flatten()])[1:]
    assert odd.storage_offset() % 2 == 1
    assert bool(checksum(odd) == checksum(x.flatten()))
    assert (
        int(checksum(torch.zeros(7)))
        == int(checksum(-torch.zeros(7)))
        == int(checksum(torch.zeros(0)))
        == 0
    )
    assert int(checksum(torch.tensor([True, False, True]))) != int(
        checksum(torch.tensor([True, True, True]))
    )
    # the plain sum that it stands for, with integers of any size
    lanes = x.flatten().view(torch.int64)
    weights = fingerprints.checksum_weights("cpu")
    rows = [
        sum(int((v >> 32) ^ v) * int(w) for v, w in zip(r, weights[0], strict=False))
        for r in lanes.split(fingerprints.ROW)
    ]
    signed = [(r + 2**63) % 2**64 - 2**63 for r in rows]
    total = sum(((v >> 32) ^ v) * int(w) for v, w in zip(signed, weights[1], strict=False))
    assert len(rows) > 1
    assert int(checksum(x)) == (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_any_edit_of_a_model_changes_its_fingerprint(model_class: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    first = fingerprint(model)
    for name, value in list(model.named_parameters()):
        if not bool(value.any()):
            continue
        old = value.detach().clone()
        value.data[(-1,) * value.dim()] *= -1.0
        assert fingerprint(model) != first, name
        value.data.copy_(old)
    assert fingerprint(model) == first
    named = dict(model.named_parameters())
    pair = next(
        [u, v]
        for u in named.values()
        for v in named.values()
        if u is not v and u.shape == v.shape and not torch.equal(u, v)
    )
    old = pair[0].detach().clone()
    pair[0].data.copy_(pair[1].data)
    pair[1].data.copy_(old)
    assert fingerprint(model) != first


@pytest.mark.parametrize("architecture", ["gpt2", "llama-yarn", "gemma3", "bloom", "bert", "gptj"])
def test_running_a_model_leaves_its_fingerprint(architecture: str) -> None:
    for model_class, processed in loadable(architecture)[:3]:
        model = from_hf(hf_model(architecture), None, model_class=model_class, processed=processed)
        first = fingerprint(model)
        for length in (5, 40):
            model(tokens(length=length))
        assert (
            view(model).fingerprint
            == first
            == fingerprint(
                from_hf(hf_model(architecture), None, model_class=model_class, processed=processed)
            )
        )


def test_tables_that_a_forward_pass_rewrites_do_not_count() -> None:
    rope = {
        "rope_type": "dynamic",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    model = from_hf(small_llama(rope_parameters=rope, max_position_embeddings=16), None)
    tables = next(m for m in model.modules() if "inv_freq" in m._buffers)
    first, table = fingerprint(model), tables.inv_freq.clone()
    model(tokens(length=60))
    assert not torch.equal(tables.inv_freq, table)
    assert fingerprint(model) == first


@pytest.mark.parametrize("how", ["data", "numpy", "optimiser", "alias"])
def test_an_edit_after_a_view_was_made_is_seen(how: str) -> None:
    model = from_hf(hf_model("gpt2"), None)
    seen = tlg.view(model)
    windows = tokens(12)
    basis = tlg.decompose(seen, windows, progress=False)
    assert as_view(seen) is seen
    value = next(v for n, v in model.named_parameters() if v.dim() == 2 and v.shape[0] != VOCAB)
    version = value._version
    if how == "data":
        value.data.mul_(1.5)
    elif how == "numpy":
        value.detach().numpy()[0, 0] += 0.5
    elif how == "optimiser":
        optimiser = torch.optim.Adam([value], lr=0.1, fused=True)
        value.grad = torch.ones_like(value)
        optimiser.step()
    else:
        value.detach().view(-1)[3] += 0.5
    assert how in ("optimiser", "alias") or value._version == version
    again = as_view(seen)
    assert again is not seen
    assert again.fingerprint == tlg.view(model).fingerprint != seen.fingerprint
    layers: list[Any] = []
    again.run_layers(windows, [0, 1], layers.append)  # its facts are of the new weights
    with pytest.raises(GeometryError, match="the model it was computed from"):
        tlg.split_scores(seen, windows, basis)
    assert tlg.decompose(seen, windows, progress=False).provenance.fingerprint == again.fingerprint


def test_a_checkpoint_of_edited_weights_does_not_go_on(tmp_path: Path) -> None:
    model = from_hf(hf_model("llama"), None)
    path = tmp_path / "sums.safetensors"
    windows = tokens(12)
    tlg.decompose(model, windows[:8], batch_size=4, checkpoint=path, progress=False)
    weight = next(
        v for n, v in model.named_parameters() if "down_proj" in n or n.endswith("mlp.out.weight")
    )
    old = weight.detach().clone()
    weight.data[:, :7] = 0
    with pytest.raises(GeometryError, match="fingerprint"):
        tlg.decompose(model, windows, batch_size=4, checkpoint=path, progress=False)
    weight.data.copy_(old)


def small_llama(seed: int = 0, **settings: Any) -> Any:
    import transformers

    base: dict[str, Any] = dict(ARCHITECTURES[settings.pop("architecture", "llama")][1])
    name = settings.pop("name", "LlamaForCausalLM")
    model_class = getattr(transformers, name)
    config = model_class.config_class(**(base | settings))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    randomize(model, seed)
    return model


SETTINGS: list[tuple[str, str, dict[str, Any]]] = [
    (
        "llama",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ),
    ("llama", "LlamaForCausalLM", {"rms_norm_eps": 1e-2}),
    ("llama", "LlamaForCausalLM", {"hidden_act": "gelu"}),
    ("mistral", "MistralForCausalLM", {"sliding_window": 3}),
    ("gemma2", "Gemma2ForCausalLM", {"attn_logit_softcapping": 20.0}),
    ("gemma2", "Gemma2ForCausalLM", {"query_pre_attn_scalar": 32}),
    ("gemma2", "Gemma2ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("gpt2", "GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    ("neox", "GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    ("opt", "OPTForCausalLM", {"do_layer_norm_before": True, "activation_function": "gelu"}),
]


@pytest.mark.parametrize(
    ("architecture", "name", "setting"), SETTINGS, ids=[next(iter(s[2])) for s in SETTINGS]
)
def test_a_basis_of_the_same_weights_under_another_setting_is_refused(
    architecture: str, name: str, setting: dict[str, Any]
) -> None:
    plain, same, other = (
        from_hf(small_llama(architecture=architecture, name=name, **s), None)
        for s in ({}, {"use_cache": False, "bos_token_id": 5}, setting)
    )
    pairs = zip(plain.named_parameters(), other.named_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    windows = tokens(4)
    basis = tlg.decompose(plain, windows, progress=False)
    tlg.split_scores(same, windows, basis)
    with pytest.raises(GeometryError, match="the model it was computed from"):
        tlg.split_scores(other, windows, basis)


def test_the_score_scale_is_the_number_that_the_model_holds() -> None:
    """Neither the usual ``d_head**-0.5``, nor a fit to the pattern, which a soft cap forbids."""
    settings: dict[str, Any] = {"query_pre_attn_scalar": 32, "architecture": "gemma2"}
    model = from_hf(small_llama(name="Gemma2ForCausalLM", **settings), None)
    for layer in range(2):
        assert view(model).layer_facts(layer).scale == pytest.approx(32**-0.5, rel=1e-7)


@needs_hooked
@pytest.mark.parametrize(
    "setting",
    [
        {"rotary_base": 500.0},
        {"eps": 1e-2},
        {"act_fn": "relu"},
        {"attn_scale": 5.0},
        {"window_size": 4},
    ],
)
def test_settings_of_hooked_transformer_count(setting: dict[str, Any]) -> None:
    base: dict[str, Any] = {
        "positional_embedding_type": "rotary",
        "rotary_dim": 8,
        "normalization_type": "RMS",
    }
    base |= {"use_local_attn": True, "attn_types": ["local", "global"], "window_size": 8}
    assert fingerprint(tiny_hooked(**base)) == fingerprint(
        tiny_hooked(**(base | {"model_name": "else"}))
    )
    assert fingerprint(tiny_hooked(**base)) != fingerprint(tiny_hooked(**(base | setting)))


def test_a_number_that_a_module_keeps_for_itself_counts() -> None:
    model = from_hf(hf_model("llama"), None)
    first = fingerprint(model)
    norm = next(m for m in model.modules() if "variance_epsilon" in vars(m))
    old, norm.variance_epsilon = norm.variance_epsilon, 1e-3
    assert fingerprint(model) != first
    norm.variance_epsilon = old
    assert fingerprint(model) == first
    assert not {"dtype", "_name_or_path", "use_cache", "bos_token_id", "attention_dropout"} & set(
        configuration(model)["settings"]
    )


@needs_hooked
def test_the_score_of_masked_keys_counts_only_where_it_acts() -> None:
    model = tiny_hooked(attn_only=True, normalization_type="LN")
    marks = {}
    for value in (-torch.inf, -1e5, -3.0):
        for block in model.blocks:
            block.attn.IGNORE.fill_(value)
        marks[value] = fingerprint(model)
    assert marks[-torch.inf] == marks[-1e5] != marks[-3.0]


def test_the_fingerprint_is_the_same_in_another_process() -> None:
    code = "from tests.tiny import tiny; from tl_geometry.models import view; "
    code += "print(view(tiny('bridge', 'gemma2', True)).fingerprint)"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout.strip().endswith(view(tiny("bridge", "gemma2", True)).fingerprint), run.stderr


def test_an_untrained_control_is_another_model_until_its_block_ends() -> None:
    model = from_hf(hf_model("gpt2"), None, name="own")
    with tlg.models.reinitialized(model) as control:
        inside = as_view(control)
        assert (inside.name, inside.head_trained) == ("own, untrained (init)", False)
        next(iter(model.parameters())).data.add_(1.0)
        edited = as_view(control)
        assert (edited.name, edited.head_trained) == ("own, untrained (init)", False)
        assert (
            len(
                {
                    edited.fingerprint,
                    inside.fingerprint,
                    view(from_hf(hf_model("gpt2"), None)).fingerprint,
                }
            )
            == 3
        )
    with pytest.raises(
        GeometryError, match=r"own, untrained \(init\): expected use inside its `with` block"
    ):
        tlg.decompose(control, tokens(), progress=False)


def test_an_untrained_control_has_random_matrices_gains_of_one_and_no_biases() -> None:
    model = from_hf(hf_model("gpt2"), None)
    with tlg.models.reinitialized(model, std=0.5):
        for module in model.original_model.modules():
            for leaf, value in module.named_parameters(recurse=False):
                if leaf == "bias":
                    assert not value.any()
                elif isinstance(module, nn.LayerNorm):
                    assert bool((value == 1).all())
                else:
                    assert float(value.detach().std()) == pytest.approx(0.5, rel=0.1)


# --------------------------------------------------------------------------------------------------
# ----- hooks of others


def shift(x: Tensor, hook: Any = None) -> Tensor:
    return x + 0.5


def after(module: nn.Module, args: Any, output: Any) -> Any:
    return None


def before(module: nn.Module, args: Any) -> Any:
    return None


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("architecture", ["gpt2", "bert", "opt", "llama"])
def test_a_model_by_itself_has_no_hooks_of_others(model_class: str, architecture: str) -> None:
    model = from_hf(hf_model(architecture), None, model_class=model_class)
    model(tokens())
    assert view(model).hooked() == ()
    model.run_with_cache(tokens())
    assert view(model).hooked() == ()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_hooks_of_others_are_named_wherever_they_are(model_class: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    seen = view(model)
    module = model.blocks[1].mlp
    for attach, name in (
        (lambda: model.add_hook("blocks.0.hook_resid_pre", shift), "blocks.0.hook_resid_pre"),
        (lambda: model.add_perma_hook("blocks.0.attn.hook_q", shift), "blocks.0.attn.hook_q"),
        (
            lambda: model.blocks[1].hook_resid_pre.register_forward_hook(after),
            "blocks.1.hook_resid_pre",
        ),
        (lambda: module.register_forward_hook(after), "blocks.1.mlp"),
        (lambda: module.register_forward_pre_hook(before), "blocks.1.mlp"),
    ):
        handle = attach()
        assert seen.hooked() == (name,)
        assert seen.provenance().hooks == (name,)
        if handle is not None and hasattr(handle, "remove"):
            handle.remove()
        model.reset_hooks(including_permanent=True)
        assert seen.hooked() == ()
    everywhere = register_module_forward_hook(after)
    assert seen.hooked() == ("every module",)
    everywhere.remove()
    with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", shift)]):
        assert seen.hooked() == ("blocks.1.hook_mlp_out",)
    inside: list[tuple[str, ...]] = []
    seen.run(tokens(), {"blocks.0.hook_resid_pre": lambda _: inside.append(seen.hooked())})
    assert inside == [()]  # a pass of ours is not somebody else's
    basis = tlg.decompose(model, tokens(6), progress=False)
    with tlg.interventions.remove_term(model, basis, ("pos", "pos"), heads=[(1, 0)]):
        assert seen.hooked()
        model(tokens())
    assert seen.hooked() == ()


def test_a_hook_on_the_model_inside_a_bridge_is_seen() -> None:
    hf = hf_model("llama")
    model = from_hf(hf, None)
    handle = hf.model.layers[0].register_forward_hook(after)
    assert len(view(model).hooked()) == 1
    handle.remove()
    handle = hf.register_forward_pre_hook(before)
    assert view(model).hooked() == ("original_model",)
    handle.remove()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_one_rule_says_whose_a_hook_is(model_class: str) -> None:
    """TransformerLens's caches are nobody's, its patching is the user's, however it is attached."""
    from transformer_lens import patching

    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    seen = view(model)
    point = model.hook_dict["blocks.1.attn.hook_z"]
    _, caching, _ = model.get_caching_hooks() if model_class == "hooked" else ({}, [], [])
    for name, hook in caching:
        model.hook_dict[name].add_hook(hook)
    assert names_of(model) == ()
    assert hooked_points(seen, "blocks.1.") == []
    patch = partial(patching.layer_head_vector_patch_setter, index=[1, 0], clean_activation=None)
    for attach in (point.add_hook, point.register_forward_hook):
        attach(patch)
        assert [name.rpartition(".")[2] for name in hooked_points(seen, "blocks.1.")] == ["hook_z"]
        assert len(names_of(model)) == 1
        model.reset_hooks()
        point._forward_hooks.clear()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_model_without_hooks_gets_them_back_in_their_order(model_class: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    calls: list[str] = []

    def named(name: str) -> Callable[..., None]:
        return lambda *_, **__: calls.append(name)

    point = model.blocks[0].hook_resid_pre if model_class == "hooked" else model.blocks[0].hook_in
    point.add_hook(named("a"))
    point.register_forward_hook(named("b"))
    point.add_hook(named("c"), is_permanent=True, prepend=True)
    everywhere = register_module_forward_hook(named("g"))
    before_, plain = list(point._forward_hooks), list(point.fwd_hooks)
    try:
        with pytest.raises(KeyError), without_hooks(model):
            assert names_of(model) == ()
            model(tokens())
            raise KeyError
        assert calls == []
        assert (list(point._forward_hooks), list(point.fwd_hooks)) == (before_, plain)
        assert names_of(model)
        model(tokens())
        assert [c for c in calls if c != "g"] == ["c", "a", "b"]
        assert "g" in calls
    finally:
        everywhere.remove()


def test_hooks_that_another_thread_removes_stay_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the listing of the tables and the moment at which hooks are silenced."""
    model = from_hf(hf_model("gpt2"), None)
    kept, removed = (model.blocks[0].hook_in.register_forward_hook(half_of) for _ in range(2))
    listed = list(user_hooks.foreign_tables(model))
    assert [len(ids) for _, _, ids in listed] == [2]
    removed.remove()
    monkeypatch.setattr(user_hooks, "foreign_tables", lambda _: listed)
    with without_hooks(model):
        assert list(model.blocks[0].hook_in._forward_hooks) == [kept.id]
    assert model.blocks[0].hook_in._forward_hooks == {kept.id: half_of}


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_facts_are_found_without_hooks_and_kept_under_them(model_class: str) -> None:
    model = from_hf(hf_model("llama"), None, model_class=model_class)
    model.add_hook("blocks.0.attn.hook_q", lambda q, hook: q * 3)
    seen = view(model)  # the first view of this model is made under the hook
    facts = seen.describe_layer(0)
    model.reset_hooks()
    layers: list[Any] = []
    seen.run_layers(tokens(), [0, 1], layers.append)
    assert [x.reconstruction.adds_up for x in layers] == [True, True]
    assert facts == view(from_hf(hf_model("llama"), None, model_class=model_class)).describe_layer(
        0
    )


ACTING = {
    "blocks.0.attn.hook_q": True,
    "blocks.0.attn.hook_k": True,
    "blocks.0.attn.hook_pattern": True,
    "blocks.0.ln1.hook_scale": True,
    "blocks.0.hook_resid_pre": False,
    "blocks.0.hook_mlp_out": False,
    "blocks.0.attn.hook_z": False,
    "blocks.0.attn.hook_v": False,
}


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("name", ACTING)
def test_a_split_under_somebody_elses_hook_is_exact_or_refused(model_class: str, name: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    basis = tlg.decompose(model, tokens(6), progress=False)
    model.add_hook(name, lambda x, hook: x * 1.05)
    view(model).run(tokens(), {name: lambda _: None})
    if ACTING[name]:
        with pytest.raises(ReconstructionError, match="off by"):
            tlg.sweep_heads(model, tokens(), basis, layers=0, progress=False)
        with pytest.raises(ReconstructionError, match="off by"):
            view(model).run_layers(tokens(), [0], lambda _: None)
        return
    table = tlg.sweep_heads(model, tokens(), basis, progress=False)
    assert table.provenance.hooks == (name,)
    split = tlg.split_scores(model, tokens(), basis)
    cache = model.run_with_cache(tokens())[1]
    own = cache["attn_scores", 1]
    ours = split.total()[:, 4:8]
    seen = torch.isfinite(ours)
    assert torch.allclose(ours[seen], own[seen], atol=1e-4 * float(own[seen].abs().max()))


# --------------------------------------------------------------------------------------------------
# padding and autocast


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bridge_masks_nothing_by_itself(side: str) -> None:
    from tests.models.test_adapter import small_tokenizer

    model = from_hf(hf_model("gpt2"), small_tokenizer(), name="pads")
    model.tokenizer.padding_side = side
    ids = tokens()
    ids[:, :3] = model.tokenizer.pad_token_id
    found: list[Tensor] = []
    view(model).run(ids, {"blocks.0.attn.hook_pattern": found.append})
    assert float(found[0][:, :, 5, 0].min()) > 0


def test_autocast_is_refused_by_name() -> None:
    model = from_hf(hf_model("gpt2"), None, name="cast")
    seen = view(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (
            lambda: seen.run(tokens(), {}),
            lambda: view(model),
            lambda: tlg.decompose(seen, tokens(), progress=False),
        ):
            with pytest.raises(
                GeometryError, match=r"cast: expected no torch\.autocast, got autocast on cpu"
            ):
                call()
        with torch.autocast("cpu", enabled=False):
            seen.run(tokens(), {})
    assert dataclasses.replace(seen).run(tokens(), {}) is None
