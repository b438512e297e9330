"""Edges of a model in half precision: scores are those of its weights in float32, and a writer that
is off by less than bfloat16 resolves is still refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.circuits.edges_by_hand import PAIRS
from tests.circuits.test_edges_smollm2 import PAIRS as NAMES
from tests.lib.models import hf_model
from tl_geometry.base.errors import ReconstructionError
from tl_geometry.circuits import edge_scores
from tl_geometry.circuits.edge_pass import LiveBlock
from tl_geometry.models import from_hf, precision, view
from tl_geometry.models.mlp import mlp_spec
from tl_geometry.models.write_spec import writing_of

HALF = (torch.bfloat16, torch.float16)


def rounded(architecture: str, half: torch.dtype, *, enormous: bool = False) -> tuple[Any, Any]:
    """A model in half precision, and in float32 with the same numbers as weights; with ``enormous``
    one of its tokens has a coordinate a thousand times larger than the others."""
    hf = hf_model(architecture, torch.float32)
    if enormous:
        with torch.no_grad():
            hf.get_input_embeddings().weight[3, 5] = 3000.0
    hf = hf.to(half)
    single = from_hf(deepcopy(hf).float(), None, dtype=torch.float32)
    return from_hf(hf, None, dtype=half), single


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "gemma2", "gpt-oss"])
def test_scores_are_those_of_the_same_weights_in_float32(
    architecture: str, half: torch.dtype
) -> None:
    in_half, single = rounded(architecture, half)
    found, expected = (edge_scores(model, **PAIRS).scores for model in (in_half, single))
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    assert {p.dtype for p in in_half.parameters()} == {half}


@pytest.mark.parametrize("limit", [precision.LIMIT, 0])
def test_a_token_of_enormous_norm_hides_no_norm(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rounding is larger than what attention writes; in float32 and, for models too large to
    widen, in their own precision."""
    monkeypatch.setattr(precision, "LIMIT", limit)
    for architecture, has_norm in (("llama", False), ("gemma2", True)):
        about = view(rounded(architecture, torch.bfloat16, enormous=True)[0])
        for layer, block in enumerate(writing_of(about).blocks):
            assert (block.after_attention is not None) == has_norm
            assert mlp_spec(about, layer) is not None


def scaled(heads: Any, factor: float) -> Any:
    """Heads of which the second writes too much."""

    def wrong(*args: Any) -> Tensor:
        writes = heads(*args).clone()
        writes[1] *= factor
        return writes

    return wrong


def test_a_wrong_writer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = rounded("llama", torch.bfloat16)
    monkeypatch.setattr(LiveBlock, "written", scaled(LiveBlock.written, 1.005))
    with pytest.raises(ReconstructionError, match="those of a pass by blocks"):
        edge_scores(model, **PAIRS)
    monkeypatch.setattr(precision, "LIMIT", 0)  # in its own precision nobody can see that
    edge_scores(model, **PAIRS)


@pytest.mark.smollm2
def test_scores_of_a_real_decoder_in_bfloat16() -> None:
    few: dict[str, Any] = {name: x[:2] if isinstance(x, list) else x for name, x in NAMES.items()}
    found, expected = (
        tlg.edge_scores(tlg.zoo.smollm2(dtype=dtype), **few, method="gradient").scores
        for dtype in (torch.bfloat16, torch.float32)
    )
    ranks = torch.stack([x.abs().argsort().argsort().double() for x in (found, expected)])
    assert float(torch.corrcoef(ranks)[0, 1]) > 0.98
    top = [set(x.abs().topk(len(x) // 100).indices.tolist()) for x in (found, expected)]
    assert len(top[0] & top[1]) > 0.85 * len(top[0])
