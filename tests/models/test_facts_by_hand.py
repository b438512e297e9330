"""Settings that identify a model, configurations made by hand, names and paths, hooks of others,
text, provenance, and what is said of layers and controls."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import HAS_HOOKED, hf_model, tiny, tokens
from tl_geometry.base.errors import GeometryError, ReconstructionError, UnsupportedModelError
from tl_geometry.models import from_hf, load, view
from tl_geometry.models.batches import device_of
from tl_geometry.models.fingerprints import checksum, configuration, fingerprint
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.loaders import _shown, hooked_class
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.names import check_name, listed_names, look_up
from tl_geometry.models.user_hooks import brief, foreign, home, replaced_forwards

Space = SimpleNamespace
needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)


@pytest.fixture
def seen() -> ModelView:
    """A small model that no test leaves changed."""
    return view(tiny("bridge", "gpt2"))


# ---- what identifies a model


class Weighted(nn.Module):
    """A model of two weights with some settings, in the order in which they are given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.second = nn.Parameter(torch.tensor([0.0, 0.0]))
        self.cfg = Space(**settings)


def digits(**settings: Any) -> str:
    return fingerprint(Weighted(**settings))


def test_the_order_of_settings_makes_no_difference() -> None:
    """The same settings written down in another order are the same model, nested ones too."""
    one = digits(n_heads=4, eps=0.5, rope={"type": "yarn", "factor": 4})
    assert one == digits(eps=0.5, rope={"factor": 4, "type": "yarn"}, n_heads=4)
    assert len(one) == 16
    assert set(one) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("n_heads", v) for v in (5, 4.5, "4", True)),
        ("rope", {"factor": 8}),
        ("scales", [1, 3]),
        ("extra", 0),
    ],
)
def test_every_setting_that_acts_counts(setting: str, value: Any) -> None:
    """Another value, kind of value or setting is another model."""
    own: dict[str, Any] = {"n_heads": 4, "rope": {"factor": 4}, "scales": [1, 2]}
    assert digits(**own) != digits(**(own | {setting: value}))


@pytest.mark.parametrize(
    "setting",
    [
        {"bos_token_id": 3},
        {"eos_token_ids": [3]},
        {"attention_dropout": 0.5},
        {"resid_pdrop": 0.5},
        {"hidden_dropout_prob": 0.5},
        {"summary_type": "x"},
        {"_private": 1},
        {"nothing": None},
        {"device": "cuda"},
        {"tie_word_embeddings": True},
        {"transformers_version": "5"},
        {"seed": 3},
        {"act": print},
        {"rope": {"factor": 4, "_name": 1, "dtype": "x"}},
    ],
)
def test_settings_that_do_not_act_are_left_out(setting: dict[str, Any]) -> None:
    """Token ids, dropout, files, devices, functions and None, in nested settings too."""
    own: dict[str, Any] = {"rope": {"factor": 4}}
    assert digits(**own) == digits(**(own | setting))


def test_numbers_are_written_the_same_way_everywhere() -> None:
    """Whole numbers, floats and numpy's are equal."""
    settings = {"a": 4, "b": torch.tensor(2), "c": [1, "x"], "d": True, "e": (0.5,), "f": Path("p")}
    assert configuration(Weighted(**settings))["settings"] == {
        "a": 4.0,
        "b": 2.0,
        "c": [1.0, "x"],
        "d": True,
        "e": [0.5],
        "f": "p",
    }


def test_zero_weights_of_either_sign_count_as_absent() -> None:
    """An absent bias and a zero one are the same model."""
    plain, negative, less = Weighted(), Weighted(), Weighted()
    negative.second = nn.Parameter(torch.tensor([-0.0, -0.0]))
    del less.second
    assert fingerprint(plain) == fingerprint(negative) == fingerprint(less)
    renamed, reshaped, widened = Weighted(), Weighted(), Weighted()
    renamed.third, renamed.first = renamed.first, nn.Parameter(torch.zeros(2))
    reshaped.first = nn.Parameter(torch.tensor([[1.0, 2.0]]))
    widened.first = nn.Parameter(torch.tensor([1.0, 2.0]).double())
    assert len({fingerprint(m) for m in (plain, renamed, reshaped, widened)}) == 4


# ---- configurations made by hand

ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 111.0},
    "full_attention": {"rope_type": "default", "rope_theta": 2222.0},
}


@needs_hooked
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "olmo2-grouped"])
def test_a_configuration_made_by_hand(architecture: str, fold: bool) -> None:
    """Sizes, norm, windows, caps, scale and rotary bases of three families."""
    from tl_geometry.models.configs import hooked_config

    gemma = architecture.startswith("gemma")
    changes: dict[str, Any] = {"rope_parameters": ROPE} if architecture == "gemma3" else {}
    changes |= {"final_logit_softcapping": None} if architecture == "gemma2" else {}
    changes |= {"attn_logit_softcapping": 30.0} if architecture == "gemma2" else {}
    made = hooked_config(
        hf_model(architecture, rms_norm_eps=0.125, **changes), fold_ln=fold, dtype=torch.float64
    )
    local = ["local", "global"] if gemma else ["global", "global"]
    expected: dict[str, Any] = {"d_model": 32, "d_head": 8, "n_heads": 4, "n_key_value_heads": 2}
    expected |= {"d_mlp": 64, "n_layers": 2, "n_ctx": 64, "d_vocab": 61, "eps": 0.125}
    expected |= {"gated_mlp": True, "positional_embedding_type": "rotary", "rotary_dim": 8}
    expected |= {"attn_types": local, "init_weights": False, "dtype": torch.float64}
    expected |= {"device": "cpu", "act_fn": "gelu_pytorch_tanh" if gemma else "silu"}
    expected |= {"normalization_type": "RMSPre" if fold and gemma else "RMS"}
    expected |= {"rotary_base": 2222.0 if architecture == "gemma3" else 10000.0}
    if gemma:
        expected |= {"window_size": 6, "use_local_attn": True, "attn_scale": 5**0.5}
        expected |= {"final_rms": True, "use_normalization_before_and_after": True}
        expected |= {"attn_scores_soft_cap": 30.0 if architecture == "gemma2" else -1.0}
        expected |= {"output_logits_soft_cap": -1.0}
    if architecture == "gemma3":
        expected |= {"use_qk_norm": True, "rotary_base_local": 111.0}
    assert {name: getattr(made, name) for name in expected} == expected


# ---- names and paths


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("a/b", "b"),
        ("a/model", "a"),
        ("a/checkpoint", "a"),
        ("a/snapshot", "a"),
        ("a/models", "models"),
    ],
)
def test_a_directory_is_called_by_what_says_something(
    path: str, shown: str, tmp_path: Path
) -> None:
    """Its own name, or that of its parent where it is called model, checkpoint or snapshot."""
    assert _shown(tmp_path / path) == shown


def test_directories_without_a_model_are_refused(tmp_path: Path) -> None:
    """A directory without config.json, and a path where there is none."""
    text = "model: expected a Hugging Face directory with config.json, or a name that "
    text += "TransformerLens knows, got "
    for path, got in (
        (tmp_path, f"{tmp_path.name} without one"),
        ("./none", "no directory ./none"),
    ):
        with pytest.raises(GeometryError) as error:
            load(path)
        assert str(error.value) == f"{text}{got}."


def test_a_class_that_is_not_installed_is_refused() -> None:
    """The message names the class and the other one."""
    with pytest.raises(UnsupportedModelError) as error:
        hooked_class("HookedNothing")
    assert str(error.value) == (
        "model_class: expected TransformerLens 3 for HookedNothing, got a version without it. "
        'Use model_class="bridge".'
    )


def test_names_are_looked_up_without_regard_to_case() -> None:
    """Listed names are found; a similar one is proposed."""
    official, known = listed_names()
    assert set(official) <= set(known)
    assert look_up("GPT2", "hooked").listed
    hub = look_up("nobody/nothing-like-it-9", "bridge")
    assert not hub.listed
    unknown = f"'gpt2-smal', which is not among its {len(official)} models"
    for call in (
        functools.partial(look_up, "gpt2-smal"),
        functools.partial(check_name, "gpt2-smal"),
    ):
        with pytest.raises(GeometryError) as error:
            call("bridge")
        assert str(error.value).startswith(
            "model: expected a local directory, or a name that the installed TransformerLens "
            f"knows, got {unknown}. Use '"
        )
    with pytest.raises(GeometryError, match=r"models\. Use a local directory\."):
        look_up("zzzzzzzzzzzzzzzz", "bridge")
    with pytest.raises(GeometryError):
        look_up("nobody/nothing-like-it-9", "hooked")
    for name in (None, "smollm2", "minilm", "gpt2", str(Path(__file__).parent)):
        check_name(name, "bridge")


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_this_machine_lacks_is_refused(device: str) -> None:
    """Devices without values, unknown ones and missing ones; None is the default."""
    assert device_of(None, "cpu") == torch.device("cpu")
    assert device_of("cpu", "meta") == torch.device("cpu")
    with pytest.raises(GeometryError) as error:
        device_of(device, "cpu")
    assert str(error.value).startswith(
        f"device: expected a device of this machine, got '{device}' ("
    )
    assert str(error.value).endswith('). Use device="cpu".')
    assert ("which holds no values" in str(error.value)) == (device == "meta")


# ---- hooks of others


def test_a_hook_belongs_to_the_module_that_defined_it() -> None:
    """Inside partials and methods; torch's and this library's passes are no user's."""

    class Mine:
        def method(self) -> None: ...

    outer = functools.partial(functools.partial(torch.relu), torch.ones(1))
    assert home(Mine().method) == home(Mine()) == __name__
    assert (foreign(Mine().method), foreign(outer), foreign(nn.Linear(1, 1))) == (
        True,
        False,
        False,
    )
    cases = {
        "torchvision.x": True,
        "transformers": False,
        "transformers.x": False,
        "accelerate.hooks": False,
        "transformer_lens.patching": True,
        "transformer_lens.hook_points": False,
        "transformer_lens.HookedTransformer": False,
        "tl_geometry.models.forward": False,
        "tl_geometry.models.live_edits": True,
    }
    for name, expected in cases.items():
        function: Callable[..., None] = lambda: None
        function.__module__ = name
        assert foreign(function) is expected, name


def test_a_forward_that_was_replaced_is_named() -> None:
    """In an instance by its path; a user's own class has replaced nothing."""

    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    model = nn.Module()
    model.a, model.b = nn.Linear(1, 1), Own()
    assert replaced_forwards(model) == ()
    vars(model.a)["forward"] = lambda x: x
    assert replaced_forwards(model) == ("a.forward",)
    model.forward = lambda x: x
    assert replaced_forwards(model) == ("a.forward", "forward")


@pytest.mark.parametrize(
    ("count", "text"), [(0, ""), (1, "0"), (4, "0, 1, 2, 3"), (5, "0, 1, 2, 3 and 1 more")]
)
def test_four_names_are_shown(count: int, text: str) -> None:
    """And how many more there are."""
    assert brief([str(i) for i in range(count)]) == text


# ---- text, provenance


def test_text_of_tokens_with_and_without_a_tokenizer(seen: ModelView) -> None:
    """A token without text is shown by its id; reading text needs a tokenizer."""
    assert not seen.has_tokenizer
    assert seen.decode([7, 0]) == ["<7>", "<0>"]
    with pytest.raises(GeometryError) as error:
        seen.encode("x")
    assert str(error.value) == (
        f"{seen.name}: expected a tokenizer to read text, got none. Use token ids."
    )


def test_what_a_result_was_made_of(seen: ModelView) -> None:
    """The model, its class and hooks, and of the rows their corpus."""
    made = seen.provenance(seed=3, flags=("own",))
    assert (made.model, made.fingerprint, made.seed) == (seen.name, seen.fingerprint, 3)
    assert made.library == f"TransformerBridge, {seen.library}"
    assert (made.processed, made.dtype, made.hooks, made.flags) == (False, "float32", (), ("own",))

    class Rows(list[int]):
        corpus, token_hash, has_bos, flags = "c", "h", True, ("rows", "own")

    made = seen.provenance(Rows([1, 2, 3]), flags=("own", "mine"))
    assert (made.corpus, made.token_hash, made.has_bos, made.contexts) == ("c", "h", True, 3)
    assert made.flags == ("rows", "own", "mine")


# ---- layers


def test_what_a_cache_must_hold_for_a_layer(seen: ModelView) -> None:
    """Hooks that are missing are named; those that only verify may be missing without verify."""
    names = seen.layer_hooks(1)
    cache = seen.activations(tokens(), names)
    optional = ("hook_pattern", "hook_attn_scores", "hook_z")
    some = {name: x for name, x in cache.items() if not name.endswith(optional)}
    with pytest.raises(GeometryError) as error:
        seen.layer(1, some)
    missing = [name for name in names if name.endswith(optional)]
    assert str(error.value) == (
        f"cache: expected hooks of layer 1, got no {', '.join(missing)}. "
        "Use model.run_with_cache(tokens) without names_filter."
    )
    layer = seen.layer(1, Space(cache_dict=some), verify=False)
    assert (layer.pattern, layer.scores, layer.z) == (None, None, None)
    assert dict(layer.reconstruction.checks) == {}
    with pytest.raises(GeometryError, match=r"got no blocks\.1\.attn\.hook_v\. Use"):
        seen.layer(1, {k: v for k, v in some.items() if not k.endswith("_v")}, verify=False)
    with pytest.raises(GeometryError, match=r"expected a batch dimension, got .*remove_batch_dim"):
        seen.layer(1, {name: x[0] for name, x in cache.items()})


def test_a_pass_with_padding_is_refused_by_its_mask(seen: ModelView) -> None:
    """Other masked keys in one prompt are named as what padding makes."""
    name, hook = "blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_q"
    cache = dict(seen.activations(tokens(), seen.layer_hooks(1)))
    padded = cache[name].clone()
    padded[1, :, :, 0] = -math.inf
    with pytest.raises(ReconstructionError) as error:
        seen.layer(1, cache | {name: padded})
    assert str(error.value) == (
        "mask of layer 1 of tiny-gpt2: expected one mask for all prompts and heads, of minus "
        "infinity, got other masked keys in 1 of 2 prompts, as padding makes. "
        "Use prompts of one length without padding."
    )
    with pytest.raises(
        ReconstructionError, match=r"^layer 1 of tiny-gpt2: expected parts .* q off"
    ):
        seen.layer(1, cache | {hook: cache[hook] + 1})


def test_a_layer_as_a_function_of_its_normed_input() -> None:
    """No scale of the norm is left; with a norm of queries its own stays; queries are the same."""
    for architecture in ("gpt2", "qwen3"):
        found: list[LayerView] = []
        view(tiny("bridge", architecture)).run_layers(tokens(), [1], found.append)
        (layer,), normed = found, found[0].normalized()
        assert torch.allclose(normed.h, layer.norm.normalize(layer.h))
        assert float((normed.v_scale - 1).abs().max()) == 0
        assert float((normed.norm_scale - 1).abs().max()) == 0
        plain = architecture == "gpt2"
        assert (float((normed.q_scale - 1).abs().max()) == 0) == plain
        assert torch.allclose(normed.project_q(normed.h) + normed.q_constant, layer.q, atol=1e-4)
        assert torch.allclose(normed.project_k(normed.h) + normed.k_constant, layer.k, atol=1e-4)
        assert repr(layer) == (
            "LayerView(layer 1, 2 contexts of 16 positions, 4 heads of 8, norm "
            f"{layer.norm.norm_type}, scale {layer.scale:.4g}, worst check "
            f"{layer.reconstruction.worst:.2g} of what is allowed)"
        )


def test_the_control_of_a_model_has_its_name_and_weights_back() -> None:
    """Half of the labels say what was drawn and how; afterwards the control is refused."""
    from tl_geometry.models import reinitialized

    model = from_hf(hf_model("gpt2"), None, name="m")
    before = fingerprint(model)
    for blocks, how, label in (
        (None, "init", "m, untrained (init)"),
        ([1, 0], "shuffle", "m, blocks 1, 0 untrained (shuffle)"),
    ):
        with reinitialized(model, blocks, how=how) as control:
            assert control.name == label
            assert control.head_trained == (blocks is not None)
            assert control.refreshed().name == label
        assert fingerprint(model) == before
        with pytest.raises(GeometryError) as error:
            control.refreshed()
        assert str(error.value) == (
            f"{label}: expected use inside its `with` block, "
            "got one after it, with the trained weights back. Use the model itself."
        )


def test_checksums_are_those_that_stored_results_hold() -> None:
    """Of one word that is not full, of one row, and of several."""
    bytes_, row = torch.arange(7, dtype=torch.int8), torch.arange(10.0)
    rows = torch.arange(100_000, dtype=torch.float64)
    assert [int(checksum(x)) for x in (bytes_, row, rows)] == [
        3597783033271811687,
        -6814475160325718016,
        -9043809034391916936,
    ]
