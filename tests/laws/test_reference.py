"""The reference is Hugging Face's own computation, and imports nothing of what it is compared with.
The laws of splits, shares, graphs and flow are asked of the library, which is compared with the
reference and with Hugging Face's gradients: here is only what all these start from."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib import models
from tests.lib.double import InDouble, double_hf
from tests.lib.kinds import KINDS, PROMPTS, decoder, far, run
from tests.lib.reference import flow
from tests.lib.reference.decoder import Decoder


@pytest.mark.parametrize("kind", [*KINDS, "gpt2-inverse-layer"])
def test_the_decoder_is_hugging_faces(kind: str) -> None:
    hf = double_hf(kind)
    with torch.no_grad(), InDouble():
        out = hf(PROMPTS, output_hidden_states=True, output_attentions=True)
    ours = Decoder.of(hf).run(PROMPTS)
    assert out.logits.dtype == torch.float64
    assert float(out.logits.abs().max()) > 1
    assert far(ours["logits", 0], out.logits) < 1e-12
    for layer in range(2):
        assert far(ours["state", layer], out.hidden_states[layer]) < 1e-12
        assert far(ours["pattern", layer], out.attentions[layer]) < 1e-12


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", {"rotary_base": 500.0}),
        ("bloom", {"slopes": None}),
        ("gemma2", {"logit_cap": None}),
        ("gpt2", {"pos_embed": None}),
        ("gemma2", {"softcap": None}),
        ("gemma2", {"window": None}),
        ("gemma2", {"after_mlp": None}),
        ("llama", {"score_scale": 0.36}),
    ],
)
def test_a_wrong_decoder_is_not(kind: str, change: dict[str, Any]) -> None:
    """The twin: each setting matters."""
    right = decoder(kind)
    if next(iter(change)) in {field.name for field in dataclasses.fields(Decoder)}:
        wrong = dataclasses.replace(right, **change)
    else:
        blocks = tuple(dataclasses.replace(block, **change) for block in right.blocks)
        wrong = dataclasses.replace(right, blocks=blocks)
    assert far(wrong.run(PROMPTS)["logits", 0], run(kind)["logits", 0]) > 1e-3


def test_the_reference_imports_neither_the_library_nor_transformer_lens() -> None:
    forbidden = re.compile(r"^ *(import|from) (tl_geometry|transformer_lens)", re.MULTILINE)
    folder = Path(flow.__file__).parent
    assert len(list(folder.glob("*.py"))) > 5
    assert [p.name for p in folder.glob("*.py") if forbidden.search(p.read_text())] == []
    assert forbidden.search((folder.parent / "models.py").read_text()), "such a thing is found"


def test_near_uniform_attention_is_noticed() -> None:
    hf = models.hf_model("gpt2")
    models.assert_real_attention(models.bridge_of(hf))
    hf = models.hf_model("gpt2")
    with torch.no_grad():
        for block in hf.transformer.h:
            block.attn.c_attn.weight.mul_(0.1)
    with pytest.raises(AssertionError):
        models.assert_real_attention(models.bridge_of(hf))
