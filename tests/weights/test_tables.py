"""What the verbs on weights return, by numpy: readouts of both matrices in both coordinates, nulls
and reliability of a geometry, what is asked for and what comes by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition.variance import reliability
from tl_geometry.weights import bilinear, low_rank_diagonal, subspaces, vocabulary
from tl_geometry.weights.heads import token_readout, weight_geometry


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


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


def off_diagonal(factors: bilinear.Factors) -> Tensor:
    W = factors.left @ factors.right.mT
    return W - torch.diag_embed(W.diagonal(dim1=-2, dim2=-1))


def test_subspaces_have_20_directions_and_60_are_shown(basis: tlg.PositionContext) -> None:
    model = tiny("bridge", "gpt2")
    g = weight_geometry(model, basis, draws=0)
    assert g.k == (20, 20)
    assert g.L.shape == (8, 20, 20)
    assert g.block.shape == (8, 32, 32)  # of 32 coordinates
    assert g.p.isnan().all()
    assert g.provenance.flags == ()
    few, least, one = (
        weight_geometry(model, basis, layers=1, rank=rank, shown=shown, draws=0)
        for rank, shown in ((3, 7), (9, 1), (1, 1))
    )
    ((_, factors),) = vocabulary.factors_of(tlg.view(model), [1], "QK")
    energy = off_diagonal(factors).square().sum((1, 2))
    for found, k, size in ((few, 3, 7), (least, 9, 9), (one, 1, 1)):
        torch.testing.assert_close(found.block, g.block[4:, :size, :size])
        expected = g.block[4:, :k, :k].square().sum((1, 2)) / energy
        torch.testing.assert_close(found.concentration, expected)
    expected = g.block[4:, :20, :20].square().sum((1, 2)) / energy
    torch.testing.assert_close(g.concentration[4:], expected)
    for name in ("corpus", "token_hash", "has_bos", "window", "contexts"):
        assert getattr(g.provenance, name) == getattr(basis.provenance, name)


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


@pytest.mark.parametrize(
    ("architecture", "matrix", "raw"),
    [("gpt2", "QK", False), ("gpt2", "OV", False), ("gpt2", "OV", True), ("llama", "QK", False)],
)
def test_nulls_and_reliability_of_a_geometry(architecture: str, matrix: str, raw: bool) -> None:
    """Of three draws of seed 5, whose subspaces are centred where a LayerNorm reads them."""
    model = tiny("bridge", architecture)
    basis = tlg.decompose(model, tokens(24, 16), progress=False)
    g = weight_geometry(model, basis, matrix, layers=1, rank=4, raw=raw, draws=3, seed=5)
    states = (1, 2) if matrix == "OV" else (1, 1)
    lowest = min(float(reliability(basis.moments)[s]) for s in states)
    assert g.reliability.tolist() == pytest.approx([lowest] * 4)
    centring = architecture == "gpt2" and not raw
    ((_, factors),) = vocabulary.factors_of(tlg.view(model), [1], matrix, raw=raw)
    drawn = subspaces.Subspaces(basis, width=32, k=4, centered=centring, draws=3, seed=5)
    left, right = (drawn.at(s).draws for s in states)
    W_o, p = off_diagonal(factors), []
    for V, U in zip(left, right, strict=True):
        blocks = V.mT[:, None] @ W_o @ U[:, None]
        shares = blocks.square().sum((2, 3)) / W_o.square().sum((1, 2))
        p.append(subspaces.familywise_p(g.concentration, shares))
        if V is left.noise:
            torch.testing.assert_close(g.noise_null, shares.mean(0))
            torch.testing.assert_close(g.noise_high, shares.amax(0))
            torch.testing.assert_close(g.excess, g.concentration / shares.mean(0))
    torch.testing.assert_close(g.p, torch.maximum(*p))
    options = {"one_basis": matrix == "QK", "centered": centring}
    for name, off in (("null", True), ("null_r2", False)):
        expected = bilinear.haar_null(factors, 4, off_diagonal=off, **options)
        torch.testing.assert_close(getattr(g, name), expected)
    fit = low_rank_diagonal.fit_low_rank_diagonal(
        factors, *(drawn.at(s).directions[:, :4] for s in states)
    )
    torch.testing.assert_close(g.L, fit.L)
    torch.testing.assert_close(g.delta, fit.delta)


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


@pytest.mark.parametrize(("rows", "columns"), [(5, 9), (9, 5), (40, 5)])
def test_leading_directions_of_many_matrices_are_singular_vectors(rows: int, columns: int) -> None:
    x = normal(3, rows, columns)
    found = subspaces._leading(x, 7)
    assert found.shape == (3, columns, 7)
    for i in range(3):
        V = torch.linalg.svd(x[i], full_matrices=False)[2].mT
        rank = V.shape[1]
        torch.testing.assert_close(found[i, :, :rank].abs(), V.abs())
        assert not found[i, :, rank:].any()


def test_p_values_of_heads_by_loops() -> None:
    values = torch.tensor([0.5, 2.0, 4.0, 30.0]).double()
    draws = normal(9, 4, seed=4).exp()
    rows = np.concatenate([values[None], draws])
    ratio = np.array(
        [
            [row[h] / np.delete(rows, i, 0)[:, h].mean() for h in range(4)]
            for i, row in enumerate(rows)
        ]
    )
    expected = [
        (1 + sum(max(ratio[i]) >= ratio[0, h] for i in range(1, 10))) / 10 for h in range(4)
    ]
    assert len(set(expected)) > 2
    assert subspaces.familywise_p(values, draws).tolist() == pytest.approx(expected)
    nothing = torch.zeros(10, 1, dtype=torch.float64)  # a head without a ratio is never the largest
    with_nothing = subspaces.familywise_p(
        torch.cat([values, nothing[0]]), torch.cat([draws, nothing[1:]], 1)
    )
    assert with_nothing[:4].tolist() == pytest.approx(expected)


@pytest.mark.parametrize("architecture", ["gpt2", "bert", "bloom", "llama"])
def test_what_heads_write_is_centred_where_the_norm_centres(architecture: str) -> None:
    view = tlg.view(tiny("bridge", architecture))
    for layer, factors in vocabulary.factors_of(view, [0, 1], "OV"):
        w = view.weights(layer)
        written = w.W_O.double().mT
        if architecture != "llama":
            written = written - written.mean(1, keepdim=True)
        torch.testing.assert_close(factors.right, written)


def test_state_zero_of_all_tokens_comes_from_windows_of_any_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    view = tlg.view(tiny("bridge", "bloom"))
    whole = {c: vocabulary.embeddings(view, centered=c) for c in (True, False)}
    monkeypatch.setattr(vocabulary, "ROWS", 16)
    for centring, rows in whole.items():
        assert rows.shape == (61, 32)
        torch.testing.assert_close(vocabulary.embeddings(view, centered=centring), rows)
    torch.testing.assert_close(whole[True], whole[False] - whole[False].mean(1, keepdim=True))


@pytest.mark.parametrize(
    ("architecture", "matrix", "offsets", "raw", "taken"),
    [
        ("llama", "QK", (63,), False, True),
        ("llama", "QK", (0, 2), False, True),
        ("llama", "QK", (-1, 2), False, False),
        ("llama", "QK", (), False, False),
        ("llama", "OV", (1,), False, False),
        ("bloom", "QK", (1,), False, False),
        ("llama", "QK", (1,), True, False),
        ("llama", "QK", (0,), True, True),
    ],
)
def test_offsets_are_those_of_a_rotary_score(
    architecture: str, matrix: str, offsets: tuple[int, ...], raw: bool, taken: bool
) -> None:
    view = tlg.view(tiny("bridge", architecture))
    if taken:
        found = dict(vocabulary.factors_of(view, [1], matrix, raw=raw, offsets=offsets))
        assert found.keys() == {1}
    else:
        with pytest.raises(GeometryError, match="offsets: expected"):
            dict(vocabulary.factors_of(view, [1], matrix, raw=raw, offsets=offsets))


def test_nulls_of_one_and_two_dimensions() -> None:
    """Of two coordinates, vectors that sum to zero are multiples of (1, -1); all are the mean over
    lines of every angle."""
    W = normal(3, 2, 2)
    factors = bilinear.Factors(W, torch.eye(2).double().expand(3, 2, 2).contiguous())
    u = torch.tensor([1.0, -1.0]).double() / 2**0.5
    expected = (u @ W @ u).square() / W.square().sum((1, 2))
    found = bilinear.haar_null(factors, 1, off_diagonal=False, centered=True)
    torch.testing.assert_close(found, expected)
    turn = torch.arange(8).double() * torch.pi / 8
    lines = torch.stack([turn.cos(), turn.sin()], 1)  # eight of them average fourth powers exactly
    shares = (lines @ W * lines).sum(2).square().mean(1) / W.square().sum((1, 2))
    torch.testing.assert_close(bilinear.haar_null(factors, 1, off_diagonal=False), shares)


def test_a_fit_of_two_bases_of_unequal_size_has_no_symmetric_part() -> None:
    factors = bilinear.Factors(normal(2, 9, 3), normal(2, 9, 3, seed=1))
    V, U = (torch.linalg.qr(normal(9, k, seed=k)).Q for k in (2, 3))
    assert low_rank_diagonal.fit_low_rank_diagonal(factors, V, U).symmetric.isnan().all()
    whole = low_rank_diagonal.fit_low_rank_diagonal(factors, U, U)
    S = (whole.L + whole.L.mT) / 2
    share = S.square().sum((1, 2)) / whole.L.square().sum((1, 2))
    torch.testing.assert_close(whole.symmetric, share)
