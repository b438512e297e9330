"""What a view says about a model, and what it refuses: names, special tokens, remarks, weights
that are no numbers, and the probe behind all of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiny import HAS_HOOKED, hf_model, tiny, tiny_hooked, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.models import from_hf, reader, view
from tl_geometry.models.fingerprints import head_trained, remember
from tl_geometry.models.forward import Runner, collect
from tl_geometry.models.states import other_states, state_hooks, state_of, states_from_cache

Space = SimpleNamespace
needs_hooked = pytest.mark.skipif(
    not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer"
)


# ---- what is no model


def of_kind(name: str, *bases: type, **values: Any) -> Any:
    """An object of a class of that name."""
    return type(name, bases, {})() if not values else type(name, bases, values)()


EXPECTED = "model: expected HookedTransformer or HookedEncoder or TransformerBridge, got "
OTHERS = {
    "Thing": ({}, "a model loaded with TransformerLens"),
    "OptimizedModule": (
        {"_orig_mod": 1, "config": 1, "forward": 1},
        "the model that torch.compile was given, model._orig_mod: hooks act there",
    ),
    "GPT2": (
        {"config": 1, "forward": 1},
        "tl_geometry.models.from_hf(model, tokenizer)",
    ),
    "Config": ({"config": 1}, "a model loaded with TransformerLens"),
    "Forward": ({"forward": 1}, "a model loaded with TransformerLens"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objects_are_told_what_would_help(name: str) -> None:
    """The advice depends on what the object is: compiled, of transformers, or anything else."""
    values, instead = OTHERS[name]
    with pytest.raises(UnsupportedModelError) as error:
        reader.class_of(of_kind(name, **values))
    assert str(error.value) == f"{EXPECTED}{name}. Use {instead}."


@pytest.mark.parametrize("name", reader.CLASS_NAMES)
def test_subclasses_count_as_their_class_and_need_blocks(name: str) -> None:
    """A subclass is read as the class that it derives from; a model without blocks is refused."""
    base = type(name, (), {})
    assert reader.class_of(of_kind("Mine", base, blocks=[1])) == name
    for values in ({}, {"blocks": []}):
        with pytest.raises(UnsupportedModelError) as error:
            reader.class_of(of_kind("Mine", base, **values))
        assert str(error.value) == (
            "Mine: expected a stack of blocks, got none. Use a decoder or encoder."
        )


# ---- names and tokens


@pytest.mark.parametrize(
    ("of_settings", "of_config", "shown"),
    [
        ("gpt2", "other", "gpt2"),
        ("owner/gpt2", "other", "owner/gpt2"),
        ("external", "owner/name", "owner/name"),
        ("custom", "owner/name", "owner/name"),
        ("", "owner/name", "owner/name"),
        (None, "owner/name", "owner/name"),
        ("/data/models/mine", None, "mine"),
        ("./models/mine", None, "mine"),
        ("~/models/mine", None, "mine"),
        ("custom", "", "SimpleNamespace"),
        (None, None, "SimpleNamespace"),
    ],
)
def test_a_model_is_called_by_its_own_name(
    of_settings: str | None, of_config: str | None, shown: str
) -> None:
    """The settings' name comes first, then the configuration's, then the class."""
    config = Space(_name_or_path=of_config)
    model = Space(cfg=Space(model_name=of_settings), original_model=Space(config=config))
    assert reader._name(model) == shown


def test_a_model_without_a_configuration_is_called_by_its_class() -> None:
    """HookedTransformer has no original model, and its settings may have no name."""
    assert reader._name(Space(cfg=Space())) == "SimpleNamespace"


SPECIAL = ("bos", "eos", "unk", "cls", "sep", "mask")


def with_tokens(**ids: int) -> Any:
    return Space(tokenizer=Space(**{f"{name}_token_id": i for name, i in ids.items()}))


def test_the_token_that_begins_a_text_is_cls_or_bos() -> None:
    """CLS comes before BOS; token 0 counts; without either there is none."""
    assert reader._bos_id(with_tokens(cls=0, bos=5)) == 0
    assert reader._bos_id(with_tokens(bos=0, eos=5)) == 0
    assert reader._bos_id(with_tokens(eos=5)) is None
    assert reader._bos_id(Space()) is None


@pytest.mark.parametrize("other", SPECIAL)
def test_padding_that_is_another_special_token_is_none(other: str) -> None:
    """The padding token is known only where it is no other special token; token 0 counts."""
    assert reader.unambiguous_pad_id(with_tokens(pad=0, **{other: 0})) is None
    assert reader.unambiguous_pad_id(with_tokens(pad=0, **{other: 1})) == 0
    assert reader.unambiguous_pad_id(with_tokens(**{other: 1})) is None


# ---- remarks

SLOPES = (
    "HookedTransformer's ALiBi slopes differ from Hugging Face's when n_heads is not a power of two"
)


@pytest.mark.parametrize(
    ("class_name", "position", "heads", "notes"),
    [
        ("HookedTransformer", "alibi", 6, (SLOPES,)),
        ("HookedTransformer", "alibi", 12, (SLOPES,)),
        ("HookedTransformer", "alibi", 8, ()),
        ("HookedTransformer", "alibi", 1, ()),
        ("HookedTransformer", "rotary", 6, ()),
        ("TransformerBridge", "alibi", 6, ()),
    ],
)
def test_slopes_of_other_numbers_of_heads_are_remarked(
    class_name: str, position: str, heads: int, notes: tuple[str, ...]
) -> None:
    """Only HookedTransformer has other slopes, and only where heads are no power of two."""
    cfg = Space(positional_embedding_type=position, n_heads=heads)
    assert reader._notes(Space(cfg=cfg), class_name) == notes


def test_hooks_of_the_user_are_remarked() -> None:
    """A view of a model with hooks names them, and one made afterwards does not."""
    model = from_hf(hf_model("gpt2"), None, name="hooked")
    assert view(model).notes == ()
    model.blocks[1].hook_mlp_out.add_hook(lambda value, hook: None)
    assert view(model).notes == (
        "the model carries hooks of its own, which act in every number: blocks.1.hook_mlp_out",
    )
    model.reset_hooks()
    assert view(model).notes == ()


@pytest.mark.parametrize(
    ("class_name", "flag", "kind", "processed"),
    [
        ("TransformerBridge", True, "LN", True),
        ("TransformerBridge", False, "LNPre", False),
        ("HookedTransformer", True, "LN", False),
        ("HookedTransformer", False, "LNPre", True),
        ("HookedEncoder", False, "RMSPre", True),
        ("HookedTransformer", False, None, False),
    ],
)
def test_processed_is_said_by_each_class_in_its_way(
    class_name: str, flag: bool, kind: str | None, processed: bool
) -> None:
    """A bridge has a flag, the other classes call their norms ...Pre."""
    model = Space(_weights_processed=flag, cfg=Space(normalization_type=kind))
    assert reader._processed(model, class_name) is processed


def test_a_bridge_without_the_flag_is_not_processed() -> None:
    """The flag appears only with processing."""
    assert reader._processed(Space(), "TransformerBridge") is False


# ---- weights


class Weights(nn.Module):
    """A model of a few parameters."""

    def __init__(self, position: str, **values: list[float]) -> None:
        super().__init__()
        self.cfg = Space(positional_embedding_type=position)
        self.pos_embed = nn.Module()
        self.pos_embed.W_pos = nn.Parameter(torch.tensor([float("nan")]))
        for name, value in values.items():
            setattr(self, name, nn.Parameter(torch.tensor(value)))


NAN = float("nan")


def test_weights_that_are_no_numbers_are_named() -> None:
    """Every such weight is named, wherever in it the NaN is; an infinite or empty one is none."""
    model = Weights("alibi", a=[1.0, NAN], b=[NAN, 1.0], c=[float("inf")], d=[])
    with pytest.raises(UnsupportedModelError) as error:
        reader._require_weights(model, "m")
    assert str(error.value) == (
        "weights of m: expected numbers, got NaN in a, b. Use a checkpoint without NaN."
    )


def test_the_position_table_counts_only_where_it_is_used() -> None:
    """ALiBi models hold a table that nothing fills; elsewhere NaN in it is refused."""
    reader._require_weights(Weights("alibi", a=[1.0]), "m")
    with pytest.raises(UnsupportedModelError, match=r"got NaN in pos_embed\.W_pos\. Use"):
        reader._require_weights(Weights("standard", a=[1.0]), "m")


# ---- the view


def test_every_field_of_a_view() -> None:
    """Sizes, norm, position and names of a small model, each different from the others."""
    model = from_hf(
        hf_model(
            "llama", num_hidden_layers=3, hidden_size=48, head_dim=8, max_position_embeddings=40
        ),
        None,
        name="small",
    )
    model.tokenizer = Space(cls_token_id=None, bos_token_id=3, pad_token_id=4, padding_side="right")
    seen = view(model)
    library = reader._library_version()
    expected = {
        "name": "small",
        "class_name": "TransformerBridge",
        "library": f"transformer_lens {library}",
        "processed": False,
        "n_layers": 3,
        "n_heads": 4,
        "d_model": 48,
        "d_head": 8,
        "d_vocab": 61,
        "n_ctx": 40,
        "causal": True,
        "position": "rotary",
        "norm": "RMS",
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "head_trained": True,
        "bos_id": 3,
        "pad_id": 4,
        "notes": (),
        "state_hooks": (
            "blocks.0.hook_resid_pre",
            "blocks.1.hook_resid_pre",
            "blocks.2.hook_resid_pre",
            "blocks.2.hook_resid_post",
        ),
    }
    assert {name: getattr(seen, name) for name in expected} == expected
    assert repr(seen) == (
        f"ModelView(small ({seen.fingerprint}), TransformerBridge, transformer_lens {library}, "
        "3 layers, 4 heads, d_model 48, float32, on cpu)"
    )
    assert seen.mlp_hooks == tuple(f"blocks.{layer}.hook_mlp_out" for layer in range(3))
    assert seen.attention_hooks == tuple(f"blocks.{layer}.hook_attn_out" for layer in range(3))
    assert seen.pattern_hooks == tuple(f"blocks.{layer}.attn.hook_pattern" for layer in range(3))
    assert seen.has_tokenizer


@needs_hooked
def test_a_folded_norm_is_called_by_its_kind_and_no_norm_is_none() -> None:
    """LNPre is LN; a model without norms has None."""
    assert view(tiny("hooked", "gpt2", True)).norm == "LN"
    assert view(tiny_hooked(normalization_type=None)).norm is None


def test_a_model_is_refused_under_autocast_whether_it_was_seen_before_or_not() -> None:
    """A new view, a view of a model that was probed before, and an old view are all refused."""
    seen = view(tiny("bridge", "gpt2"))
    new = from_hf(hf_model("gpt2"), None, name="new")
    calls: list[Callable[[], Any]] = [
        lambda: view(new),
        lambda: view(seen._model),
        lambda: view(seen),
        seen.refreshed,
    ]
    for call in calls:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(GeometryError) as error:
            call()
        assert "expected no torch.autocast, got autocast on cpu. Use the model without" in str(
            error.value
        )


def test_the_probe_is_two_random_prompts_of_twelve_tokens() -> None:
    """The same tokens at each look: facts that are read off them do not change between runs."""
    model = tiny("bridge", "gpt2")
    seen = view(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 61, (2, 12), generator=generator)
    name = "blocks.1.hook_resid_pre"
    assert torch.equal(seen._layers.probe[name], seen.activations(ids, [name])[name])


@pytest.mark.parametrize(("longest", "causal"), [(1, False), (2, True), (5, True)])
def test_a_model_of_short_prompts_is_probed_with_its_longest(longest: int, causal: bool) -> None:
    """A single position does not show whether a model is causal."""
    model = from_hf(hf_model("gpt2"), None, name="short")
    model.cfg.n_ctx = longest
    seen = view(model)
    assert (seen.n_ctx, seen.causal) == (longest, causal)
    assert seen._layers.probe["blocks.0.hook_resid_pre"].shape == (2, longest, 32)


def test_a_refreshed_view_keeps_what_the_model_does_not_say() -> None:
    """After an edit of the weights the view is a new one, under its name and mark."""
    model = from_hf(hf_model("gpt2"), None, name="edited")
    seen = dataclasses.replace(view(model), name="mine", head_trained=False)
    assert seen.refreshed() is seen
    with torch.no_grad():
        next(iter(model.parameters())).mul_(2)
    again = seen.refreshed()
    assert again is not seen
    assert (again.name, again.head_trained) == ("mine", False)
    assert again.fingerprint == view(model).fingerprint != seen.fingerprint


# ---- facts of loaders


@pytest.mark.parametrize(
    ("architectures", "trained"),
    [
        (None, True),
        ([], True),
        (["GPT2LMHeadModel"], True),
        (["BertForMaskedLM"], True),
        (["BertModel"], False),
        (["BertModel", "BertForMaskedLM"], True),
    ],
)
def test_a_class_without_a_head_has_no_trained_head(
    architectures: list[str] | None, trained: bool
) -> None:
    """The class that saved a checkpoint says whether it had an output head."""
    config = Space(architectures=architectures)
    kind: Any = type("Model", (), {})
    model = kind()
    model.original_model = Space(config=config)
    assert head_trained(model) is trained
    assert head_trained(remember(model, head_trained=not trained)) is not trained
    assert head_trained(kind())


# ---- states


@pytest.mark.parametrize(
    ("class_name", "last"),
    [
        ("HookedTransformer", "hook_resid_post"),
        ("TransformerBridge", "hook_resid_post"),
        ("HookedEncoder", "hook_normalized_resid_post"),
    ],
)
def test_states_are_inputs_of_blocks_and_the_last_output(class_name: str, last: str) -> None:
    """An encoder's last state is behind its last norm."""
    expected = ("blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", f"blocks.1.{last}")
    hooks = state_hooks(class_name, 2)
    assert hooks == expected
    assert [state_of(hook, 3, hooks) for hook in hooks] == [0, 1, 2]
    assert state_of(f"blocks.0.{last}", 3, hooks) == 1
    other = {"hook_resid_post": "hook_normalized_resid_post"}.get(last, "hook_resid_post")
    with pytest.raises(GeometryError) as error:
        state_of(f"blocks.0.{other}", 3, hooks)
    assert str(error.value) == (
        'states: expected a number from 0 to 2 or a hook such as "blocks.1.hook_resid_pre", '
        f"got 'blocks.0.{other}'."
    )


@pytest.mark.parametrize("name", ["blocks.3.hook_resid_pre", "blocks.2.hook_resid_post", "x"])
def test_states_beyond_the_last_are_refused(name: str) -> None:
    """Three states are 0, 1 and 2."""
    assert state_of("blocks.2.hook_resid_pre", 3) == state_of("blocks.1.hook_resid_post", 3) == 2
    with pytest.raises(GeometryError, match="states: expected a number from 0 to 2 or a hook"):
        state_of(name, 3)


def test_an_autoencoder_of_another_hook_is_named() -> None:
    """Both settings are looked at; the input of a block is the output of the one before."""
    state = 2
    for hook in ("blocks.2.hook_resid_pre", "blocks.1.hook_resid_post", None):
        assert other_states({"hook_name": hook, "hook_name_out": hook}.get, state) == []
    wrong = {"hook_name": "blocks.2.hook_resid_post", "hook_name_out": "blocks.1.hook_mlp_out"}
    assert other_states(wrong.get, state) == [
        "hook_name=blocks.2.hook_resid_post",
        "hook_name_out=blocks.1.hook_mlp_out",
    ]


def test_states_of_a_cache_without_a_model() -> None:
    """A plain mapping tells its number of blocks itself."""
    seen = view(tiny("bridge", "gpt2"))
    entries = seen.activations(tokens(), seen.state_hooks)
    states = states_from_cache(entries)
    assert torch.equal(states, torch.stack([entries[hook] for hook in seen.state_hooks]))
    with pytest.raises(GeometryError) as error:
        states_from_cache({k: v for k, v in entries.items() if "pre" in k})
    assert str(error.value) == (
        "cache: expected every residual stream state, got no blocks.1.hook_resid_post. Use "
        "model.run_with_cache(tokens) without names_filter, or decompose(model, tokens)."
    )
    with pytest.raises(GeometryError) as error:
        states_from_cache({k: v[0] for k, v in entries.items()})
    assert str(error.value) == (
        "cache: expected a batch dimension, got states of shape (16, 32). "
        "Use remove_batch_dim=False."
    )
    with pytest.raises(GeometryError, match="expected a batch dimension"):
        states_from_cache(Space(cache_dict=entries, has_batch_dim=False))
    encoder = {
        "blocks.0.hook_resid_pre": states[0],
        "blocks.0.hook_resid_post": states[1],
        "blocks.0.hook_normalized_resid_post": states[2],
    }
    assert torch.equal(states_from_cache(encoder), states[[0, 2]])


def test_collect_runs_once_for_all_names() -> None:
    """Activations come by name from one pass."""
    seen = view(tiny("bridge", "gpt2"))
    assert isinstance(seen._run, Runner)
    found = collect(seen._run, tokens(), list(seen.state_hooks))
    assert list(found) == list(seen.state_hooks)
