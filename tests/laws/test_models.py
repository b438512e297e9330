"""Laws of ``tl_geometry.models`` on public names: what a view says is what Hugging Face computes,
planted faults are outside the bound and clean runs inside, the fingerprint is of what acts, models
are loaded whole or refused, and nothing of the user's is touched."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, bridge_of, hf_model, hooked_of, tokens
from tl_geometry.models import reinitialized

BUILD = {"bridge": bridge_of} | ({"hooked": hooked_of} if HAS_HOOKED else {})
CLASSES = pytest.mark.parametrize("model_class", BUILD)


def fresh(model_class: str, architecture: str = "gpt2", dtype: torch.dtype = torch.float32) -> Any:
    return BUILD[model_class](hf_model(architecture, dtype))


@CLASSES
def test_the_fingerprint_is_of_what_acts(model_class: str) -> None:
    model = fresh(model_class, "llama")
    digits = tlg.view(model).fingerprint
    assert tlg.view(fresh(model_class, "llama")).fingerprint == digits
    for _, parameter in model.named_parameters():
        kept = parameter.data.clone()
        flat = parameter.data.view(-1)
        flat[len(flat) // 2] += 1e-3
        assert tlg.view(model).fingerprint != digits
        parameter.data.copy_(kept)
    assert tlg.view(model).fingerprint == digits
    if model_class == "bridge":
        model.original_model.config.rope_theta = 77.0
        assert tlg.view(model).fingerprint != digits


@pytest.mark.parametrize("how", ["init", "shuffle"])
def test_only_the_chosen_blocks_are_redrawn_and_come_back(how: str) -> None:
    model = fresh("bridge")
    before = copy.deepcopy(model.original_model.state_dict())
    with pytest.raises(KeyError), reinitialized(model, [1], how=how, seed=3) as control:
        changed = {
            name
            for name, value in model.original_model.state_dict().items()
            if not torch.equal(value, before[name])
        }
        assert changed
        assert all(".h.1." in name or name.startswith("h.1.") for name in changed)
        assert "untrained" in control.name
        assert control.head_trained
        if how == "shuffle":
            for name in changed:
                now = model.original_model.state_dict()[name]
                assert torch.equal(
                    now.flatten().sort().values, before[name].flatten().sort().values
                )
        raise KeyError
    after = model.original_model.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert "untrained" not in tlg.view(control).name


def test_an_untrained_control_is_drawn_by_its_seed() -> None:
    model = fresh("bridge")
    drawn = []
    for seed in (0, 0, 1):
        with reinitialized(model, seed=seed, std=0.02) as control:
            assert not control.head_trained
            drawn.append(tlg.view(model).weights(0).W_Q.clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert float(drawn[0].std()) == pytest.approx(0.02, rel=0.1)


def test_a_directory_is_loaded_offline_and_whole_or_refused(tmp_path: Path) -> None:
    hf, folder = hf_model("llama"), tmp_path / "my-llama"
    hf.save_pretrained(folder)
    model = tlg.load(folder)
    assert tlg.view(model).name == "my-llama"
    assert not tlg.view(model).has_tokenizer
    ids = tokens(2, 9)
    assert torch.allclose(tlg.view(model).logits(ids), hf_model("llama")(ids).logits, atol=1e-4)
    processed, whole = tlg.load(folder, processed=True), tlg.load(hf, processed=True)
    assert torch.equal(whole(ids), processed(ids))
    said = [tlg.view(m).provenance().line() for m in (model, processed)]
    assert ["processed" in line for line in said] == [False, True]
    assert all("TransformerBridge, transformer_lens" in line for line in said)
    assert not any("normalised" in line for line in said)
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    key = next(name for name in weights if "q_proj" in name)
    save_file(
        {n: w for n, w in weights.items() if n != key},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(tlg.GeometryError, match="q_proj"):
        tlg.load(folder)


def test_an_encoder_without_its_head_gives_states_alone(tmp_path: Path) -> None:
    import transformers

    bare = transformers.BertModel(hf_model("bert").config).eval()
    bare.save_pretrained(tmp_path / "bare")
    seen = tlg.view(tlg.load(tmp_path / "bare"))
    assert not seen.head_trained
    assert not seen.causal
    tlg.decompose(seen, tokens(6, 8), progress=False)
    (row,) = (r for r in tlg.check_model(seen).rows() if r[0] == "output head")
    assert "refused" in str(row[2])
    with pytest.raises(tlg.UnsupportedModelError):
        tlg.trace_logit(seen, tokens(1, 6), 5)


def test_what_is_printed_says_its_sizes() -> None:
    model, ids = fresh("bridge"), tokens(3, 18)
    seen, embedded = tlg.view(model), tlg.zoo.embedded()
    layer = seen.layer(1, model.run_with_cache(ids)[1])
    rows = tlg.TokenWindows(tokens=ids[:2, :5], has_bos=False, corpus="mine")
    for each, words in (
        (seen, "2 layers, 4 heads, d_model 32, float32, on cpu"),
        (layer, "layer 1, 3 contexts of 18 positions, 4 heads of 8, norm LN, scale 0.35"),
        (rows, f"2 contexts of 5 tokens; no BOS; corpus 'mine'; {ids[0, :5].tolist()}"),
        (tlg.zoo.default_windows(embedded, 12, n=3), "12 tokens; with BOS; corpus 'held-out"),
        (tlg.corpus.prompts(embedded, ["a b c", "d"]), "Prompts(2 prompts of 2 to 4 tokens)"),
    ):
        assert words in repr(each)
