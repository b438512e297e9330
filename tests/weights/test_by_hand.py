"""Token readouts, bias readouts and the noun probe by numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.modules import copy_of
from tl_geometry.base.linalg import SVD
from tl_geometry.models.layer_view import HeadWeights
from tl_geometry.models.norms import NormWeights
from tl_geometry.weights import probes, readout


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_readout(module: Any) -> None:
    tokens, vectors = draw(40, 6, seed=1), draw(3, 6, seed=2)
    module.VOCABULARY_CHUNK = 16  # the vocabulary in three pieces
    found = module.extremes(vectors, tokens, 4)
    scores = vectors.numpy() @ tokens.numpy().T
    order = np.argsort(-scores, axis=1)
    assert found.top_ids.tolist() == order[:, :4].tolist()
    assert found.bottom_ids.tolist() == order[:, ::-1][:, :4].tolist()
    assert np.allclose(found.bottom_scores, np.sort(scores, axis=1)[:, :4], atol=1e-5)
    s = torch.tensor([4.0, 2.0, 1.0, 1.0])
    assert module.coverage(s).tolist() == pytest.approx([0.5, 0.75, 0.875, 1.0])
    assert [int(module.features_needed(s, x)) for x in (0.49, 0.5, 0.8, 0.99)] == [1, 2, 3, 4]
    assert int(module.features_needed(torch.zeros(3))) == 0
    near = module.near_degenerate(torch.tensor([2e6, 2e6 - 1, 1.0, 0.9, 0.0]).double())
    assert near.tolist() == [True, True, False, False, True]
    U, V = (torch.linalg.qr(draw(6, 3, seed=s)).Q for s in (3, 4))
    reads, writes = module.read_tokens(SVD(U, torch.ones(3), V), tokens, tokens, features=3, k=2)
    signs = set()
    for i in range(3):
        right = tokens.numpy() @ V[:, i].numpy()
        sign = -1 if right.max() < -right.min() else 1
        left = sign * tokens.numpy() @ U[:, i].numpy()
        assert writes.top_ids[i, 0] == (sign * right).argmax()
        assert reads.top_ids[i].tolist() == np.argsort(-left)[:2].tolist()
        assert reads.bottom_ids[i, 0] == left.argmin()
        signs.add(sign)
    assert signs == {-1, 1}, "one direction at least was reversed"


def made(seed: int = 0) -> tuple[HeadWeights, NormWeights]:
    """Weights of two heads with random biases behind a norm with random gain and bias."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("W_Q", "W_K", "W_V"), (2, 6, 3))
    shapes |= {"W_O": (2, 3, 6), "b_O": (6,)} | dict.fromkeys(("b_Q", "b_K", "b_V"), (2, 3))
    weights = {n: draw(*shape, seed=seed + i) for i, (n, shape) in enumerate(shapes.items())}
    norm = NormWeights(norm_type="LN", gain=draw(6, seed=21) + 1, bias=draw(6, seed=22), eps=1e-5)
    return HeadWeights(**weights), norm


def normed(x: np.ndarray, norm: NormWeights) -> np.ndarray:
    c = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((c**2).mean(-1, keepdims=True) + norm.eps)
    return c / scale * norm.gain.numpy() + norm.bias.numpy()


def check_biases(module: Any) -> None:
    w, norm = made()
    found = module._bias_vectors(w, norm).numpy()
    gain, shift = norm.gain.numpy(), norm.bias.numpy()
    for h in range(2):
        W = {n: getattr(w, f"W_{n}")[h].numpy() for n in "QKVO"}
        b = {n: getattr(w, f"b_{n}")[h].numpy() + shift @ W[n] for n in "QKV"}
        wanted = [gain * (W["Q"] @ b["K"]), gain * (W["K"] @ b["Q"]), b["V"] @ W["O"]]
        for vector, mine in zip(found[h], wanted, strict=True):
            assert np.allclose(vector, mine - mine.mean(), atol=1e-4)


def check_probe(module: Any) -> None:
    w, norm = made(5)
    final = NormWeights(norm_type="LN", gain=draw(6, seed=31) + 1, bias=draw(6, seed=32), eps=1e-5)
    rows, ids = draw(30, 6, seed=33), torch.tensor([4, 7])
    unembed = torch.cat([draw(30, 6, seed=34), draw(30, 1, seed=35)], 1)
    view = SimpleNamespace(weights=lambda layer: w, attention_norm=lambda layer: norm, norm="LN")
    output = module._Output(final, unembed)
    E, U = rows.numpy(), unembed.numpy()
    for biases in (True, False):
        keys, values, sums, norms, total = module._probe_layer(
            view, 0, rows, ids, output, 3, biases
        )
        reads, whole = normed(E, norm), np.zeros((2, 6))
        for h in range(2):
            W = {n: getattr(w, f"W_{n}")[h].numpy() for n in "QKVO"}
            b = {n: getattr(w, f"b_{n}")[h].numpy() for n in "QKV"}
            for i, noun in enumerate(ids.tolist()):
                q = reads[noun] @ W["Q"] + biases * b["Q"]
                assert keys[h, i].tolist() == np.argsort(-(reads @ W["K"] @ q))[:3].tolist()
                u = (reads[noun] @ W["V"] + b["V"]) @ W["O"]
                u = u - u.mean()
                whole[i] += u
                assert float(norms[h, i]) == pytest.approx(np.linalg.norm(u), rel=1e-4)
                y = normed(E[noun] + u + w.b_O.numpy(), final)
                logits = U[:, :6] @ y + U[:, 6]
                assert values[h, i].tolist() == np.argsort(-logits)[:3].tolist()
        for i, noun in enumerate(ids.tolist()):
            y = normed(E[noun] + whole[i] + w.b_O.numpy(), final)
            assert sums[i].tolist() == np.argsort(-(U[:, :6] @ y + U[:, 6]))[:3].tolist()
            assert float(total[i]) == pytest.approx(np.linalg.norm(whole[i]), rel=1e-4)


def test_readouts_and_probes_by_hand() -> None:
    check_readout(copy_of(readout))
    check_biases(copy_of(probes))
    check_probe(copy_of(probes))
