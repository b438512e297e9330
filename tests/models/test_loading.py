"""Loading: a directory is whole, or refused by the names of its weights; nothing is unpickled, no
code of it runs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import HAS_HOOKED, hf_model, tiny, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.models import from_hf, load, loaders, view
from tl_geometry.models.directories import only_whole, quiet
from tl_geometry.models.support import check_model
from tl_geometry.zoo import tokenizer

MODEL_CLASSES = ["bridge", "hooked"] if HAS_HOOKED else ["bridge"]


def saved(directory: Path, architecture: str = "gpt2") -> Path:
    hf_model(architecture).save_pretrained(directory)
    return directory


def edit(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    state = load_file(directory / "model.safetensors")
    change(state)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def configure(directory: Path, **settings: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return directory


def without(*parts: str) -> Callable[[dict[str, Tensor]], None]:
    def change(state: dict[str, Tensor]) -> None:
        gone = [k for k in state if any(p in k for p in parts)]
        assert gone
        for key in gone:
            del state[key]

    return change


def message(directory: Any, **options: Any) -> str:
    with pytest.raises(GeometryError) as error:
        load(directory, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_missing_layer_is_refused_by_name(model_class: str, tmp_path: Path) -> None:
    whole = view(load(saved(tmp_path), model_class=model_class))
    assert whole.head_trained
    text = message(edit(tmp_path, without("h.1.attn.")), model_class=model_class)
    assert "every weight that its config.json asks for, and no other, got no " in text
    assert "transformer.h.1.attn.c_attn.bias, transformer.h.1.attn.c_attn.weight" in text


def test_another_number_of_layers_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path)
    more = message(configure(tmp_path, n_layer=5))
    assert "got no transformer.h.2.attn.c_attn.bias" in more
    assert "and 32 more" in more
    assert "unexpected transformer.h.1.attn.c_" in message(configure(tmp_path, n_layer=1))
    configure(tmp_path, n_layer=2)
    load(tmp_path)


def test_a_weight_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    name = "model.layers.1.mlp.up_proj.weight"
    text = message(edit(tmp_path, lambda s: s.update({name: torch.zeros(3, 4)})))
    assert f"of another shape {name} of shape (3, 4) where (64, 32) is asked for" in text


def test_only_the_output_head_may_be_new(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    edit(configure(tmp_path, tie_word_embeddings=False), without("lm_head"))
    seen = view(load(tmp_path))
    assert not seen.head_trained
    assert "refused for every output-based measure" in repr(check_model(seen))
    assert "got no model.norm.weight" in message(edit(tmp_path, without("model.norm")))


def test_buffers_that_old_versions_saved_are_no_weights(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    edit(
        tmp_path,
        lambda s: s.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    )
    load(tmp_path)
    assert "unexpected model.layers.0.self_attn.scale" in message(
        edit(tmp_path, lambda s: s.update({"model.layers.0.self_attn.scale": torch.ones(4)}))
    )


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "expected weights in " in message(tmp_path)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    saved(tmp_path)
    torch.save({"x": Trap()}, tmp_path / "pytorch_model.bin")
    load(tmp_path)  # there is a safe file beside it
    (tmp_path / "model.safetensors").unlink()
    text = message(tmp_path)
    assert "weights as safetensors in " in text
    assert "got pytorch_model.bin (pickled)" in text
    assert not (tmp_path / "sprung").exists()


def test_code_in_a_directory_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path)
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('it ran')")
    configure(
        tmp_path,
        architectures=["OwnForCausalLM"],
        model_type="own",
        auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"},
    )
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    assert "which brings code of its own" in message(tmp_path)


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (saved(tmp_path) / "config.json").write_text("{nope")
    assert "a readable config.json" in message(tmp_path)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_an_unknown_name_is_not_a_connection_problem(model_class: str) -> None:
    text = message("gpt2-smal", model_class=model_class)
    assert "'gpt2-smal', which is not among its" in text
    assert "'gpt2-small'" in text
    assert "onnect" not in text
    if model_class == "bridge":
        assert "which is not among its" in message("nobody/no-such-model")
    known = message(
        "gpt2-xl", model_class=model_class
    )  # no network in tests, and nobody has it cached
    assert "expected weights of 'gpt2-xl', got a known name that cannot be fetched (" in known


CACHED = """
import sys
import tl_geometry as tlg
from tl_geometry.models import load
for name in sys.argv[2:]:
    try:
        seen = tlg.view(load(name, model_class=sys.argv[1]))
        print("loaded", seen.n_layers, seen.head_trained, seen.class_name, seen.name)
    except tlg.GeometryError as error:
        print("refused", error)
"""


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_weights_by_name_are_whole_as_well(model_class: str, tmp_path: Path) -> None:
    """A hub's cache with small models under known names: whole, without the output head, and
    without a layer's attention."""

    def cached(name: str) -> Path:
        snapshot = saved(tmp_path / f"models--{name}" / "snapshots" / "0")
        tokenizer().save_pretrained(snapshot)
        refs = tmp_path / f"models--{name}" / "refs"
        refs.mkdir()
        (refs / "main").write_text("0")
        return configure(snapshot, n_ctx=64)

    cached("gpt2")
    configure(cached("gpt2-medium"), tie_word_embeddings=False)
    edit(cached("gpt2-large"), without("h.1.attn."))
    command = [sys.executable, "-c", CACHED, model_class, "gpt2", "gpt2-medium", "gpt2-large"]
    options = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    printed = subprocess.run(
        command, env=options, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    whole, headless, broken = (line for line in printed if line.startswith(("loaded", "refused")))
    class_name = {"bridge": "TransformerBridge", "hooked": "HookedTransformer"}[model_class]
    assert whole == f"loaded 2 True {class_name} gpt2"
    assert headless == f"loaded 2 False {class_name} gpt2-medium"
    assert broken.startswith(
        "refused model: expected in gpt2-large every weight that its config.json asks for"
    )
    assert "got no transformer.h.1.attn.c_attn.bias" in broken


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("processed", [False, True])
def test_a_name_is_loaded_as_it_was_asked_for(
    model_class: str, processed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    calls: list[Any] = []

    class Loaded(torch.nn.Module):
        def enable_compatibility_mode(self, **options: Any) -> None:
            calls.append("processed")

    def loads(how: str) -> Callable[..., Loaded]:
        def call(name: str, **options: Any) -> Loaded:
            calls.append((how, name, options))
            return Loaded()

        return call

    names = ("from_pretrained", "from_pretrained_no_processing")
    hooked = SimpleNamespace(**{name: loads(name) for name in names})
    monkeypatch.setattr(loaders, "hooked_class", lambda which: hooked)
    monkeypatch.setattr(TransformerBridge, "boot_transformers", loads("boot_transformers"))
    load("gpt2", model_class=model_class, processed=processed, dtype=torch.float64, device="cpu")
    options = {"device": "cpu", "dtype": torch.float64}
    if model_class == "hooked":
        assert calls == [(names[not processed], "gpt2", options)]
        return
    how, name, given = calls[0]
    assert (how, name) == ("boot_transformers", "gpt2")
    assert given == options | {"trust_remote_code": False}
    assert calls[1:] == ["processed"] * processed


def test_a_directory_is_loaded_in_the_dtype_asked_for(tmp_path: Path) -> None:
    hf_model("llama", torch.bfloat16).save_pretrained(tmp_path / "snapshot")
    assert view(load(tmp_path / "snapshot")).dtype == torch.float32
    seen = view(load(tmp_path / "snapshot", dtype=torch.float16))
    assert (seen.dtype, seen.name, seen.processed) == (torch.float16, tmp_path.name, False)
    kept = view(from_hf(hf_model("llama", torch.bfloat16), None))
    assert (kept.dtype, kept.name, kept.processed) == (torch.bfloat16, "model", False)
    assert view(from_hf(hf_model("llama"), None, dtype=torch.float64)).dtype == torch.float64
    assert not check_model(load(tmp_path / "snapshot")).refused


@pytest.mark.parametrize(("share", "refused"), [(0.9, False), (1.1, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_conversion_may_be_off_by_one_percent(
    share: float, refused: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the largest log-probability, in what is not half precision."""
    hf = hf_model("gpt2", dtype)

    class Off(torch.nn.Module):
        def forward(self, ids: Tensor, return_type: str) -> Tensor:
            assert return_type == "logits"
            log_p = hf(ids).logits.double().log_softmax(-1)
            log_p.view(-1)[log_p.argmin()] *= 1 + 0.01 * share  # a token without weight
            return log_p

    monkeypatch.setattr(loaders, "_bridge", lambda *_: Off())
    if refused and dtype == torch.float32:
        with pytest.raises(UnsupportedModelError, match="off: expected the outputs of the Hugging"):
            from_hf(hf, None, name="off")
    else:
        assert isinstance(from_hf(hf, None, name="off"), Off)


@pytest.mark.parametrize("bars", [True, False])
def test_what_transformers_prints_is_put_back(bars: bool) -> None:
    from transformers.utils import logging as hf_logging

    before, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    (hf_logging.enable_progress_bar if bars else hf_logging.disable_progress_bar)()
    hf_logging.set_verbosity(logging.DEBUG)
    try:
        with pytest.raises(KeyError), quiet():
            assert not hf_logging.is_progress_bar_enabled()
            assert hf_logging.get_verbosity() == logging.ERROR
            raise KeyError
        assert hf_logging.is_progress_bar_enabled() == bars
        assert hf_logging.get_verbosity() == logging.DEBUG
    finally:
        hf_logging.set_verbosity(level)
        (hf_logging.enable_progress_bar if before else hf_logging.disable_progress_bar)()


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_an_encoder_with_its_head_is_whole(model_class: str, tmp_path: Path) -> None:
    """Also without the pooler that HookedEncoder has, and no forward pass here reads."""
    seen = view(load(saved(tmp_path, "bert"), model_class=model_class))
    assert (seen.head_trained, seen.causal) == (True, False)
    found, own = ([x.run(tokens(), logits=True)] for x in (seen, view(tiny("bridge", "bert"))))
    assert found[0] is not None
    assert own[0] is not None
    assert torch.allclose(found[0], own[0], atol=1e-5)
    text = message(edit(tmp_path, without("cls.predictions.transform.LayerNorm", "layer.1.output")))
    assert "got no bert.encoder.layer.1.output." in text
    assert "cls.predictions" not in text


def test_settings_of_a_trainer_are_no_weights(tmp_path: Path) -> None:
    (saved(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "training_args.bin").write_text("")
    assert "pickled" not in message(tmp_path)
    (tmp_path / "consolidated.pth").write_text("")
    assert "got consolidated.pth (pickled)" in message(tmp_path)


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("processed", [False, True])
def test_a_gemma_without_caps_is_held_without_caps(processed: bool) -> None:
    """Outputs are compared with those of Hugging Face when it is made."""
    hf = hf_model("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    model = from_hf(hf, None, model_class="hooked", processed=processed)
    facts, head = view(model).layer_facts(0), view(model).output_head()
    assert facts.softcap is None
    assert head is not None
    assert head.softcap is None


def test_arguments_are_refused_before_anything_is_read() -> None:
    for options, text in (
        ({"model_class": "other"}, "one of 'bridge', 'hooked'"),
        (
            {"dtype": torch.int8},
            "dtype: expected torch.float16, torch.bfloat16, torch.float32, torch.float64, "
            "got torch.int8",
        ),
        ({"device": "nonsense"}, "device: expected a device of this machine, got 'nonsense'"),
        ({"device": "meta"}, "device: expected a device of this machine, got 'meta'"),
    ):
        assert text in message("no-such-model", **options)


def test_quantised_weights_and_weights_without_values_are_refused() -> None:
    model = from_hf(hf_model("llama"), None)
    weight = (
        model.original_model.model.layers[0].mlp.up_proj.weight
        if HAS_HOOKED
        else next(iter(model.parameters()))
    )
    view(model)
    name = next(n for n, p in model.named_parameters() if p is weight)
    owner = model.get_submodule(name.rpartition(".")[0])
    quantised = torch.nn.Parameter(weight.detach().to(torch.int8), requires_grad=False)
    owner.register_parameter(name.rpartition(".")[2], quantised)
    with pytest.raises(
        UnsupportedModelError, match=r"floating-point numbers, not quantised, got .* in int8"
    ):
        view(model)
    meta = hf_model("llama").to("meta")
    with pytest.raises(UnsupportedModelError, match=r"on the meta device, without values"):
        from_hf(meta, None)


class Linear4bit(torch.nn.Linear):
    """Named as bitsandbytes names its own."""


def test_a_module_that_quantises_is_refused_by_its_class() -> None:
    model = from_hf(hf_model("llama"), None)
    model.add_module("extra", Linear4bit(2, 2))
    with pytest.raises(UnsupportedModelError, match="extra, a Linear4bit"):
        view(model)


def test_what_is_no_model_keeps_its_clear_error() -> None:
    with pytest.raises(
        GeometryError,
        match=r"expected HookedTransformer or HookedEncoder or TransformerBridge, got str",
    ):
        tlg.view("gpt2")
    with pytest.raises(GeometryError, match="from_hf"):
        tlg.view(hf_model("gpt2"))


def test_a_view_fits_on_a_screen() -> None:
    seen = view(tiny("bridge", "gpt2"))
    assert len(repr(seen)) < 250
    assert seen.fingerprint in repr(seen)
    layers: list[Any] = []
    seen.run_layers(tokens(), [1], layers.append)
    assert len(repr(layers[0])) < 400


def test_two_threads_may_load_at_once(tmp_path: Path) -> None:
    """What one thread replaces acts on no load of another, and is put back in order."""
    hf_model("gpt2").save_pretrained(tmp_path)
    original = transformers.PreTrainedModel.__dict__["from_pretrained"]
    inside, leave = Event(), Event()

    def load() -> None:
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path)

    def replace() -> None:
        with only_whole("another"):
            inside.set()
            leave.wait(30)

    threads = Thread(target=load), Thread(target=replace)
    with only_whole("one") as new_heads:
        threads[0].start()
        threads[0].join()
        assert new_heads == [], "a load of another thread"
        threads[1].start()
        assert not inside.wait(0.3)
    assert inside.wait(30)
    leave.set()
    threads[1].join()
    assert transformers.PreTrainedModel.__dict__["from_pretrained"] is original
