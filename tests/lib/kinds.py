"""The four kinds of model that the tables run on, as the reference has them: decoders of the tiny
models in float64, one run of each, and a mean decomposition of its states."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.lib.double import double_hf
from tests.lib.models import tokens
from tests.lib.reference import moments, scores
from tests.lib.reference.decoder import Decoder, Run

KINDS = ("gpt2", "llama", "bloom", "gemma2")
PROMPTS, OTHERS = tokens(3, 10, seed=5), tokens(3, 10, seed=6)
"""Prompts, and others that agree with them at the first two positions and at the last."""
OTHERS[:, :2], OTHERS[:, -1] = PROMPTS[:, :2], PROMPTS[:, -1]
CORPUS = tokens(24, 20, seed=2)
"""Windows that a basis is fitted on, position 0 left out of the window."""


@cache
def decoder(kind: str) -> Decoder:
    """The explicit decoder of a tiny model, the weights of ``double_hf(kind)``."""
    return Decoder.of(double_hf(kind))


@cache
def run(kind: str) -> Run:
    """Its run over the prompts."""
    return decoder(kind).run(PROMPTS)


@cache
def basis(kind: str, layer: int, normalized: bool = False) -> tuple[Tensor, Tensor]:
    """Mean and positional vectors (of every position) of a block's input over the corpus."""
    corpus = decoder(kind).run(CORPUS)
    h = scores.normed(decoder(kind), corpus, layer) if normalized else corpus["state", layer]
    parts = moments.decompose(h.numpy(), (1, CORPUS.shape[1]))
    return torch.from_numpy(parts.mean), torch.from_numpy(parts.pos_seen)


def far(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest value."""
    a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (a, b))
    return float((a - b).abs().max() / b.abs().max())
