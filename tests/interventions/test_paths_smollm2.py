"""Paths into the query of a name mover of a real decoder: beside the same edges removed with the
norm's scale frozen, and beside a query that is recomputed by hand under the live norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.interventions.test_knockouts_smollm2 import FORMS, PAIRS
from tl_geometry.models.layer_view import LayerView

pytestmark = [pytest.mark.smollm2]
EDGES = {
    "L20H0": (-0.166, 0.031),
    "L21H5": (0.433, 0.047),
    "L18H6": (0.010, 0.002),
    "L17H3": (-0.020, 0.002),
}
"""Effect of ``remove_edge`` into the query of L23H3 at the last position on 58 prompts of the same
form, with 2 standard errors."""


def rms(x: Tensor, eps: float) -> Tensor:
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def test_paths_into_the_query_of_a_name_mover() -> None:
    rows = [{"IO": right, "S": wrong} for right, wrong in PAIRS]
    model = tlg.zoo.smollm2()
    seen = tlg.models.view(model)
    prompts = tlg.corpus.aligned_prompts(model, FORMS, rows, prepend_bos=True)
    targets = [(f" {right}", f" {wrong}") for _ in FORMS for right, wrong in PAIRS]
    table = tlg.interventions.head_paths(
        model,
        prompts,
        list(EDGES),
        {"query": "L23H3<q>", "key": "L23H3-5<k>"},
        targets=targets,
        position="end",
        receiver_position="end",
        by="zero",
        controls=0,
        progress=False,
    )
    query, key = table.effects.unbind(1)
    layers: dict[int, LayerView] = {}
    seen.run_layers(prompts.tokens, [17, 18, 20, 21, 23], lambda l: layers.update({l.layer: l}))
    reader, ids = layers[23], torch.tensor([seen.encode("".join(pair)) for pair in targets])

    def difference(z: Tensor) -> Tensor:
        def patch(value: Tensor, hook: Any) -> Tensor:
            out = value.reshape(*value.shape[:2], seen.n_heads, -1).clone()
            out[:, -1, 3] = z
            return out.view(value.shape)

        hooks = [("blocks.23.attn.hook_z", patch)]
        with torch.no_grad():
            last = model.run_with_hooks(prompts.tokens, fwd_hooks=hooks)[:, -1].double()
        return last.gather(1, ids) @ torch.tensor([1.0, -1.0]).double()

    assert reader.z is not None
    assert reader.v is not None
    clean = difference(reader.z[:, -1, 3])
    assert torch.allclose(table.clean, clean, atol=1e-3)
    for row, (head, (value, two_errors)) in enumerate(EDGES.items()):
        error = torch.hypot(table.effect.error[row, 0], torch.tensor(two_errors / 2).double())
        assert float(query[row].mean()) == pytest.approx(value, abs=2 * float(error)), head
        layer, number = int(head[1:3]), int(head[-1])
        z = layers[layer].z
        assert z is not None
        left = reader.h - z[:, :, number] @ seen.weights(layer).W_O[number]
        q = reader.q_map(left) * reader.q_scale.unsqueeze(-1)
        q = q * (rms(reader.h, reader.norm.eps) / rms(left, reader.norm.eps)).unsqueeze(-1)
        scores = torch.einsum("bhe,bjhe->bhj", q[:, -1], reader.k)[:, 3] * reader.scale
        wanted = torch.einsum("bj,bje->be", scores.softmax(-1), reader.v[:, :, 3])
        removed = difference(wanted) - clean
        assert float((query[row] - removed).abs().max()) < 1e-3, head
        assert float((key[row] - removed).abs().max()) > 4e-3, head
