"""What the verbs on weights return, by numpy: readouts of both matrices in both coordinates, and
what is asked for by default."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tl_geometry as tlg
from tests.lib.models import tiny, tokens
from tl_geometry.weights.heads import token_readout, weight_geometry


def plain(x: Any) -> np.ndarray:
    return x.detach().double().numpy()


def centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(-1, keepdims=True)


# --- Readouts -------------------------------------------------------------------------------------
# ------------------


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("matrix", ["QK", "OV"])
def test_both_sides_of_a_readout_and_its_table_by_numpy(matrix: str, raw: bool) -> None:
    view = tlg.view(tiny("bridge", "gpt2"))
    heads, k, features = [(0, 1), (1, 3)], 4, 3
    r = token_readout(view, matrix=matrix, heads=heads[::-1], features=features, k=k, raw=raw)
    assert (r.heads, r.features, r.raw) == (tuple(heads), features, raw)
    assert (r.provenance.preset, r.provenance.flags) == ("paper" if raw else "exact", ())
    final, E, table = view.final_norm(), plain(view.embed()), iter(r.rows())
    assert final is not None
    for i, (layer, head) in enumerate(heads):
        w, norm = view.weights(layer), view.attention_norm(layer)
        W = {n: plain(getattr(w, f"W_{n}")[head]) for n in "QKVO"}
        reads = centred(E) / np.sqrt((centred(E) ** 2).mean(-1, keepdims=True) + norm.eps)
        writes = plain(view.unembed()).T
        if raw:
            reads = reads * plain(norm.gain) + plain(norm.bias)
        else:
            W |= {n: centred(W[n].T * plain(norm.gain)).T for n in "QKV"} | {"O": centred(W["O"])}
            writes = centred(writes * plain(final.gain))
            writes = writes - writes.mean(0)
        product = W["V"] @ W["O"] if matrix == "OV" else W["Q"] @ W["K"].T / 8**0.5
        U, S, Vt = np.linalg.svd(product)
        assert np.allclose(r.values[i], S[:8], rtol=1e-5)
        shares = np.cumsum(S[:8]) / S[:8].sum()
        assert int(r.needed[i]) == 1 + (shares <= 0.99).sum()
        for feature in range(features):
            right = (writes if matrix == "OV" else reads) @ Vt[feature]
            sign = 1 if right.max() >= -right.min() else -1
            texts = []
            for side, scores in ((r.left, reads @ U[:, feature]), (r.right, right)):
                order = np.argsort(sign * scores)
                row = i * features + feature
                assert side.top_ids[row].tolist() == order[::-1][:k].tolist()
                assert side.bottom_ids[row].tolist() == order[:k].tolist()
                assert np.allclose(
                    side.top_scores[row], np.sort(sign * scores)[::-1][:k], rtol=1e-3
                )
                texts += [" ".join(f"<{t}>" for t in ids[:k]) for ids in (order[::-1], order)]
            value, share = float(r.values[i, feature]), pytest.approx(shares[feature])
            assert next(table) == [layer, head, feature, value, share, False, *texts]
    sides = ("queries", "keys") if matrix == "QK" else ("reads", "writes")
    assert r.columns()[6:] == [f"{side}{end}" for side in sides for end in ("", "_opposite")]


def test_a_readout_has_five_tokens_of_five_directions_of_every_head() -> None:
    model = tiny("bridge", "llama")
    r = token_readout(model)
    assert (r.matrix, r.features, len(r.heads), r.left.top_ids.shape) == ("QK", 5, 8, (40, 5))
    given = token_readout(model, matrix="QK", features=5, k=5, raw=False, offsets=(0,))
    assert torch.equal(r.left.top_ids, given.left.top_ids)
    apart = token_readout(model, offsets=(3,))
    assert not torch.equal(r.values, apart.values)


# --- Geometry -------------------------------------------------------------------------------------
# ------------------


@pytest.fixture(scope="module")
def basis() -> tlg.PositionContext:
    """33 positions, so that there are more than 20 directions."""
    return tlg.decompose(tiny("bridge", "gpt2"), tokens(24, 34), progress=False)


def test_a_geometry_of_fewer_directions_is_padded() -> None:
    embedded = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(embedded, 16, n=8)
    short = tlg.decompose(embedded, windows, states=[0], progress=False)
    wide = weight_geometry(embedded, short, layers=0)
    assert wide.block.shape == (4, 60, 60)
    (k,) = wide.k
    assert k < 20
    assert wide.L.shape == (4, 20, 20)
    assert not wide.L[:, k:].any()
    assert not wide.L[:, :, k:].any()
    assert wide.L[:, :k, :k].all()
    assert any("no null of position" in flag for flag in wide.provenance.flags)


def test_a_geometry_has_19_draws_of_seed_0(basis: tlg.PositionContext) -> None:
    model = tiny("bridge", "gpt2")
    plain = weight_geometry(model, basis, layers=0)
    same = weight_geometry(model, basis, layers=0, draws=19, seed=0)
    other = weight_geometry(model, basis, layers=0, seed=1)
    for name in ("noise_null", "noise_high", "p"):
        assert torch.equal(getattr(plain, name), getattr(same, name))
    assert not torch.allclose(plain.noise_null, other.noise_null)


# --- Their parts ----------------------------------------------------------------------------------
# ------------------
