"""Probes of tokens by numpy, in a model whose gains and biases are all random: whole tables, every
bias direction, untrained heads, distances of embeddings."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.lib.models import hf_model, tiny
from tl_geometry.base import html
from tl_geometry.base.errors import GeometryError
from tl_geometry.models import from_hf
from tl_geometry.weights import probes
from tl_geometry.zoo.embedded_model import tokenizer

LAYERS = 7


@pytest.fixture(scope="module")
def model() -> Any:
    """A GPT-2 with the tokenizer of the embedded model, whose output head is its embedding."""
    hf = hf_model("gpt2", n_layer=LAYERS, vocab_size=2048)
    return from_hf(hf, tokenizer(), name="probed")


def said(view: Any, ids: Sequence[int]) -> str:
    return " ".join(html.token_text(text) for text in view.decode(ids))


def plain(x: Any) -> np.ndarray:
    return x.detach().double().numpy()


def unit_variance(x: np.ndarray, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)


def test_the_table_of_nouns_has_three_tokens_of_first_middle_and_last_layer(model: Any) -> None:
    view = tlg.view(model)
    nouns = ["map", "several tokens", "class"]
    p = probes.noun_probe(view, nouns)
    assert (p.nouns, p.skipped, p.layers) == (("map", "class"), ("several tokens",), (0, 3, 6))
    assert p.key_ids.shape == p.value_ids.shape == (3, view.n_heads, 2, 3)
    assert p.provenance.preset == "exact"
    rows = iter(p.rows())
    for i, layer in enumerate((0, 3, 6)):
        for noun in range(2):
            for head in range(view.n_heads):
                texts = [said(view, x[i, head, noun].tolist()) for x in (p.key_ids, p.value_ids)]
                norm = float(p.norms[i, head, noun])
                assert next(rows) == [layer, head, p.nouns[noun], *texts, norm]
            texts = ["", said(view, p.sum_ids[i, noun].tolist())]
            assert next(rows) == [layer, "all", p.nouns[noun], *texts, float(p.sum_norms[i, noun])]
    assert next(rows, None) is None
    few = probes.noun_probe(view, nouns, layers=3, k=2)
    assert torch.equal(few.key_ids, p.key_ids[1:2, ..., :2])
    assert torch.equal(few.value_ids, p.value_ids[1:2, ..., :2])
    assert torch.equal(few.sum_ids, p.sum_ids[1:2, ..., :2])


@pytest.mark.parametrize("trained", [True, False])
def test_every_bias_direction_by_numpy(model: Any, trained: bool) -> None:
    """Values are read where the logits are, or in the embedding of a model without a head."""
    view = dataclasses.replace(tlg.view(model), head_trained=trained)
    final = view.final_norm()
    assert final is not None
    heads = [(1, 0), (5, 2), (5, 3)]
    found = probes.bias_readout(view, heads=heads[::-1], k=4)
    assert found.heads == tuple(heads)
    assert found.top_ids.shape == found.bottom_ids.shape == (3, 3, 4)
    E = plain(view.embed())
    writes = E * plain(final.gain) if trained else E
    rows = iter(found.rows())
    for row, (layer, head) in enumerate(heads):
        w, norm = view.weights(layer), view.attention_norm(layer)
        W = {n: plain(getattr(w, f"W_{n}")[head]) for n in "QKVO"}
        gain, shift = plain(norm.gain), plain(norm.bias)
        b = {n: plain(getattr(w, f"b_{n}")[head]) + shift @ W[n] for n in "QKV"}
        vectors = [gain * (W["Q"] @ b["K"]), gain * (W["K"] @ b["Q"]), b["V"] @ W["O"]]
        reads = unit_variance(E, norm.eps)
        for i, (vector, tokens) in enumerate(zip(vectors, (reads, reads, writes), strict=True)):
            vector = vector - vector.mean()
            order = np.argsort(tokens @ vector).tolist()
            assert found.top_ids[row, i].tolist() == order[:-5:-1]
            assert found.bottom_ids[row, i].tolist() == order[:4]
            length = float(found.lengths[row, i])
            assert length == pytest.approx(np.linalg.norm(vector), rel=1e-4)
            name = ("query", "key", "value")[i]
            texts = said(view, order[:-5:-1]), said(view, order[:4])
            assert next(rows) == [layer, head, name, length, *texts]
    remark = "output head not trained: values are read in the embedding"
    assert (remark in found.provenance.flags) == (not trained)
    five = probes.bias_readout(view, layers=1)
    assert five.heads == tuple((1, h) for h in range(view.n_heads))
    assert five.top_ids.shape == (4, 3, 5)
    assert torch.equal(five.top_ids[0, :, :4], found.top_ids[0])


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_whole_table_of_embedding_distances_by_numpy(architecture: str) -> None:
    model = tiny("bridge", architecture)
    E = plain(tlg.view(model).embed())
    table = probes.embedding_distance_table(model)
    around = E - E.mean(-1, keepdims=True) if architecture == "gpt2" else E
    target = around / np.sqrt((around**2).mean(-1, keepdims=True) + 1e-5)
    mean_norm = np.linalg.norm(E, axis=1).mean()
    scale, centred = 32**0.5 / mean_norm, E - E.mean(0)
    numbers = []
    for rows in (E, centred, scale * E, scale * centred):
        distance = np.linalg.norm(rows - target, axis=1)
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(target, axis=1)
        cosine = 1 - (rows * target).sum(1) / lengths
        numbers.append(
            [f(x) for x in (distance, cosine) for f in (np.mean, lambda x: x.std(ddof=1))]
        )
    frame = table.to_dataframe()
    assert list(frame["matrix"]) == ["original", "centred", "scaled", "centred, scaled"]
    names = ["l2_mean", "l2_sd", "cosine_distance_mean", "cosine_distance_sd"]
    assert np.allclose(frame[names], numbers, rtol=1e-7)
    assert table.mean_norm == pytest.approx(mean_norm)
    assert table.identity == pytest.approx(32**0.5 - mean_norm)


def test_an_embedding_of_zeros_has_no_distances() -> None:
    model = copy.deepcopy(tiny("bridge", "gpt2"))
    model.original_model.get_input_embeddings().weight.detach().zero_()
    with pytest.raises(GeometryError, match="embeddings: expected rows that are not all zero"):
        probes.embedding_distance_table(model)
