"""W = V L V^T + D from factors against brute force, exact and drawn nulls, readouts and probes by
numpy, the same numbers in every loading."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tl_geometry as tlg
from tests.lib.data import normal
from tests.lib.models import hf_model, loadable, tiny, tokens
from tl_geometry.base.errors import UnsupportedModelError
from tl_geometry.decomposition import resampling
from tl_geometry.models import from_hf
from tl_geometry.models.norms import remove_mean
from tl_geometry.weights import bilinear, readout, vocabulary
from tl_geometry.weights.bilinear import Factors
from tl_geometry.weights.low_rank_diagonal import fit_low_rank_diagonal
from tl_geometry.zoo.embedded_model import tokenizer

SEEDS = st.integers(0, 10_000)
fast = settings(deadline=None, max_examples=15)


def basis(size: int, k: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(normal(size, k, seed=seed)).Q


def random_factors(*, heads: int = 3, size: int = 12, width: int = 4, seed: int = 0) -> Factors:
    left, right = (normal(heads, size, width, seed=seed + i) for i in (0, 1))
    return Factors(left, right + 0.3)


def dense(factors: Factors) -> Tensor:
    return factors.left @ factors.right.mT


def without_diagonal(matrix: Tensor) -> Tensor:
    return matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def from_dense(matrix: Tensor) -> Factors:
    return Factors(matrix, torch.eye(matrix.shape[-1]).to(matrix).expand_as(matrix).contiguous())


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@given(SEEDS, st.integers(1, 5))
@fast
def test_quantities_of_the_factors_equal_those_of_the_dense_matrix(seed: int, k: int) -> None:
    f, V, U = random_factors(seed=seed), basis(12, 5, seed), basis(12, 6, seed + 1)
    W = dense(f)
    close(f.diagonal, W.diagonal(dim1=-2, dim2=-1))
    close(f.energy, W.square().sum((-2, -1)))
    W_o = without_diagonal(W)
    close(f.off_diagonal_energy, W_o.square().sum((-2, -1)))
    rotated = V.mT @ W_o @ U
    s = bilinear.structure(f, V, U, k=k)
    close(s["block"], rotated)
    # the same for every square basis
    whole = basis(12, 12, seed).mT @ W_o @ basis(12, 12, seed + 1)
    close(s["std"], whole.square().mean((-2, -1)).sqrt())
    close(s["threshold"], math.sqrt(2 * math.log(144)) * s["std"])
    above = rotated.abs() > s["threshold"][:, None, None]
    assert s["above_threshold"].tolist() == above[:, :k, :k].sum((-2, -1)).tolist()
    share = rotated[:, :k, :k].square().sum((-2, -1)) / W_o.square().sum((-2, -1))
    close(s["concentration"], share)


@given(SEEDS, st.booleans())
@fast
def test_fit_equals_brute_force_least_squares(seed: int, two_sided: bool) -> None:
    size, k = 9, 2
    f, V = random_factors(size=size, seed=seed), basis(size, k, seed)
    U = basis(size, 3, seed + 3) if two_sided else V
    fit = fit_low_rank_diagonal(f, V, U if two_sided else None)
    columns = [np.outer(V[:, a], U[:, b]).ravel() for a in range(k) for b in range(U.shape[1])]
    columns += [np.diag(np.eye(size)[i]).ravel() for i in range(size)]
    # the diagonal is the less determined the nearer a coordinate axis comes to the subspaces
    tolerance = 1e-12 / float(1 - (V.square().sum(-1) * U.square().sum(-1)).sqrt().max()) + 1e-11
    for h, W in enumerate(dense(f).numpy()):
        solution, *_ = np.linalg.lstsq(np.stack(columns, 1), W.ravel(), rcond=None)
        n = k * U.shape[1]
        close(fit.L[h].flatten(), torch.from_numpy(solution[:n]), tolerance)
        close(fit.delta[h], torch.from_numpy(solution[n:]), tolerance)
        rest = W.ravel() - np.stack(columns, 1) @ solution
        assert float(fit.r2_joint[h]) == pytest.approx(1 - (rest**2).sum() / (W**2).sum())
    assert bool((fit.r2_joint >= torch.maximum(fit.r2_diagonal, fit.r2_low_rank) - 1e-12).all())
    more = [fit_low_rank_diagonal(f, basis(size, 5, seed)[:, :j]).r2_joint for j in range(1, 6)]
    assert bool((torch.stack(more).diff(dim=0) > -1e-10).all())


def test_a_coordinate_axis_inside_the_subspace_gives_the_minimum_norm_fit_and_a_flag() -> None:
    V = torch.zeros(9, 2, dtype=torch.float64)
    V[4, 0] = 1
    V[[0, 1], 1] = 0.5**0.5
    f = random_factors(size=9)
    fit = fit_low_rank_diagonal(f, V)
    assert bool(fit.singular)
    close(fit.delta[:, 4], torch.zeros(3).double())  # the axis' diagonal cell is L's to explain
    rest = dense(f) - torch.diag_embed(fit.delta) - V @ fit.L @ V.mT
    close(rest.diagonal(dim1=-2, dim2=-1), torch.zeros(3, 9).double())
    close(V.mT @ rest @ V, torch.zeros(3, 2, 2).double())
    assert not bool(fit_low_rank_diagonal(f, basis(9, 2)).singular)


@pytest.mark.parametrize("centered", [False, True])
def test_the_null_of_random_subspaces_is_exact(centered: bool) -> None:
    f = from_dense(normal(2, 7, 7, seed=4) + 2 * torch.eye(7).double() + 0.5)
    pair = normal(2, 40_000, 7, 2, seed=5)
    left, right = torch.linalg.qr(pair - centered * pair.mean(2, keepdim=True)).Q
    for off_diagonal, W in [(True, without_diagonal(dense(f))), (False, dense(f))]:
        for one_basis, other in ((True, left), (False, right)):
            blocks = left.mT.unsqueeze(1) @ W @ other.unsqueeze(1)
            shares = blocks.square().sum((-2, -1)) / W.square().sum((-2, -1))
            error = 5 * shares.std(0) / len(left) ** 0.5
            options: dict[str, Any] = {"off_diagonal": off_diagonal, "one_basis": one_basis}
            null = bilinear.haar_null(f, 2, centered=centered, **options)
            assert bool(((shares.mean(0) - null).abs() < error).all())
            wrong = bilinear.haar_null(f, 2, centered=not centered, **options)
            if centered:
                assert not bool(((shares.mean(0) - wrong).abs() < error).all())
            elif one_basis and not off_diagonal:  # (k / d)^2 is not it
                assert not bool((((2 / 7) ** 2 - shares.mean(0)).abs() < error).any())


def basis_of(model: Any) -> tlg.PositionContext:
    return tlg.decompose(model, tokens(24, 16), keep=32, progress=False)


def factors_at(view: Any, layer: int, matrix: str) -> Factors:
    ((_, factors),) = vocabulary.factors_of(view, [layer], matrix)
    return factors


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
def test_every_loading_gives_the_same_canonical_numbers(architecture: str) -> None:
    models = [tiny(kind, architecture, processed) for kind, processed in loadable(architecture)]
    bases = [basis_of(model) for model in models]
    shares = ("concentration", "null", "r2_low_rank", "r2_diagonal", "r2_joint")
    for matrix in ("QK", "OV"):
        first, *others = (tlg.weight_geometry(m, b, matrix) for m, b in zip(models, bases))
        size = float(first.diagonal.abs().max())
        for g in others:
            for a, b in ((g.diagonal, first.diagonal), (g.delta, first.delta)):
                assert float((a - b).abs().max()) < 1e-6 * size
            for name in (*shares, "noise_null"):
                close(g[name], first[name], 1e-5)
            # single directions are only as stable as the gaps of the basis
            close(g.block.abs(), first.block.abs(), 1e-4)
        read, *others = (tlg.token_readout(m, matrix=matrix, features=2, k=4) for m in models)
        for r in others:
            close(r.values, read.values, 1e-6)
            assert [row[6:] for row in r.rows()] == [row[6:] for row in read.rows()]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3"])
def test_the_score_is_the_bilinear_form_of_the_factors(architecture: str) -> None:
    view, seen = tlg.view(tiny("bridge", architecture)), {}
    view.run_layers(tokens(1, 16), [1], lambda layer: seen.update({layer.layer: layer}))
    s, f, i = seen[1], factors_at(view, 1, "QK"), 9
    x = remove_mean(s.h, s.norm.norm_type)[0].double()
    for j in (9, 4):  # in a rotary model of equal positions alone
        ours = torch.einsum("d,hde,hfe,f->h", x[i], f.left, f.right, x[j])
        q, k = s.project(s.h, "q")[0, i].double(), s.project(s.h, "k")[0, j].double()
        scale = (s.q_scale[0, i] * s.k_scale[0, j]).double()
        gap = scale * ours - s.scale * (q * k).sum(-1)
        assert (float(gap.abs().max()) < 1e-4) == (i == j or view.position != "rotary")


CONTEXTS, POSITIONS, D = 32, 24, 32


def states(seed: int, *, position: float = 0.0, shared: float = 0.0) -> Tensor:
    """Slowly varying states (AR 0.9 along the window); position moves them along what W_QK of L0H1
    reads, and (``shared``) they vary most along it, wherever they stand."""
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, CONTEXTS, POSITIONS, D, generator=g).double()
    for t in range(1, POSITIONS):
        noise[:, :, t] = 0.9 * noise[:, :, t - 1] + 0.19**0.5 * noise[:, :, t]
    W = dense(factors_at(tlg.view(tiny("bridge", "gpt2")), 0, "QK"))[1]
    values, vectors = torch.linalg.eigh((W + W.mT) / 2)
    V = vectors[:, values.abs().argsort(descending=True)[:3]]
    curve = torch.randn(POSITIONS, 3, generator=torch.Generator().manual_seed(1)).double()
    return noise + shared * (noise @ V) @ V.T + position * curve @ V.T


def geometry(h: Tensor, **options: Any) -> Any:
    basis = tlg.decompose_activations(h)
    return tlg.weight_geometry(tiny("bridge", "gpt2"), basis, rank=3, **options)


def rolled(h: Tensor, seed: int) -> Tensor:
    """Each window shifted cyclically by an offset of its own: no position, all else as it was."""
    offsets = torch.randint(
        h.shape[2], (h.shape[1],), generator=torch.Generator().manual_seed(seed)
    )
    return torch.stack([x.roll(int(o), 1) for x, o in zip(h.unbind(1), offsets, strict=True)], 1)


def test_position_along_what_a_head_reads_is_found_and_goes_with_position() -> None:
    h = states(1, position=1.5)
    real, gone, none = geometry(h), geometry(rolled(h, 2)), geometry(states(0, shared=3.0))
    row = real.heads.index((0, 1))
    assert float(real["p"][row]) == 1 / 20
    assert float(real["concentration"][row]) > float(real["noise_high"][row])
    assert float(real["reliability"][row]) > 0.5
    assert float(gone["p"][row]) > 0.05
    # states that vary most where a head reads are no evidence, although random subspaces hold less
    assert float(none["p"][row]) > 0.05
    assert float(none["lift"][row]) > 3


@pytest.mark.parametrize(("matrix", "end"), [("QK", 0), ("OV", 1)])
def test_the_nulls_of_concentration_by_hand(matrix: str, end: int) -> None:
    """Of the state that a head reads and of the one to which it writes; of W without its
    diagonal."""
    h, view = states(1, position=0.3), tlg.view(tiny("bridge", "gpt2"))
    h = torch.cat([h, states(2)], 2) if end else h  # more positions than coordinates
    fitted = tlg.decompose_activations(h)
    found = geometry(h, matrix=matrix, layers=0, draws=7, seed=5, shown=4)
    W_o = without_diagonal(dense(factors_at(view, 0, matrix)))
    size = W_o.square().sum((-2, -1))
    signs = resampling.noise_weights(fitted, 7, 5)

    def around(x: Tensor) -> Tensor:
        x = x - x.mean(-2, keepdim=True)
        return torch.linalg.svd(x - x.mean(-1, keepdim=True)).Vh[..., :3, :].mT

    def drawn(state: int) -> tuple[Tensor, Tensor, Tensor]:
        """The directions of position, of noise, and random ones."""
        generator = torch.Generator().manual_seed(5 * 1_000_003 + state)
        z = torch.randn(7, D, 3, generator=generator, dtype=torch.float64)
        noise = around(resampling.window_means(fitted, state, signs))
        random = torch.linalg.qr(z - z.mean(1, keepdim=True)).Q
        return around(fitted.pos[state])[None], noise, random

    shares = [
        ((V.mT[:, None] @ W_o @ U[:, None]).square().sum((-2, -1)) / size).mT
        for V, U in zip(drawn(0), drawn(end), strict=True)
    ]
    own, noise, random = shares
    close(found["concentration"], own[:, 0], 1e-8)
    close(found["noise_null"], noise.mean(1), 1e-8)
    close(found["noise_high"], noise.max(1).values, 1e-8)
    close(found["excess"], own[:, 0] / noise.mean(1), 1e-8)
    close(found["lift"], own[:, 0] / found["null"], 1e-8)
    p = []
    for null in (noise, random):
        x = torch.cat([own, null], 1).numpy()
        factors = 7 * x / (x.sum(1, keepdims=True) - x)
        p.append((1 + (factors[:, 1:].max(0) >= factors[:, :1]).sum(1)) / 8)
    assert found["p"].tolist() == np.maximum(*p).tolist()
    reliable = fitted.anova().pos_reliability
    close(found["reliability"], reliable[[0, end]].min().expand(4))
    assert found.block.shape == (4, 4, 4)
    assert ["raw activations" in flag for flag in found.provenance.flags] == [True]
    groups = tlg.decompose_activations(states(1, position=1.5), groups=4)
    four = tlg.weight_geometry(tiny("bridge", "gpt2"), groups, rank=3)
    assert float(four["p"].min()) == 1 / 4  # four groups have three pairs of halves
    few = tlg.weight_geometry(tiny("bridge", "gpt2"), tlg.decompose_activations(h[:, :9]))
    assert few["p"].isnan().all()
    assert any("fewer than 10 contexts" in flag for flag in few.provenance.flags)
    along = h - h.mean(1, keepdim=True)
    along[..., 4] += torch.linspace(-1, 1, along.shape[2])  # position is one coordinate
    one = tlg.weight_geometry(tiny("bridge", "llama"), tlg.decompose_activations(along))
    assert [any("singular" in f for f in t.provenance.flags) for t in (one, four)] == [True, False]


def test_extremes_equal_a_full_sort_and_ties_come_by_id() -> None:
    vectors, rows = normal(2, 3, 5), normal(31, 5, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readout, "SCORES", 4 * 31)  # four vectors at a time
        e = readout.extremes(vectors, rows, 7)
        ties = readout.extremes(torch.ones(1), torch.tensor([[1.0], [2.0], [1.0], [2.0], [1.0]]), 5)
    scores = vectors @ rows.mT
    close(e.scores[..., 0, :], scores.sort(descending=True).values[..., :7])
    close(e.scores[..., 1, :], scores.sort().values[..., :7])
    close(scores.unsqueeze(-2).expand(2, 3, 2, 31).gather(-1, e.ids), e.scores)
    assert ties.ids.tolist() == [[1, 3, 0, 2, 4], [0, 2, 4, 1, 3]]


@pytest.fixture(scope="module")
def model() -> Any:
    """A GPT-2 with the tokenizer of the embedded model, whose output head is its embedding."""
    return from_hf(hf_model("gpt2", n_layer=7, vocab_size=2048), tokenizer(), name="probed")


def plain(x: Any) -> np.ndarray:
    return x.detach().double().numpy()


def centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(-1, keepdims=True)


def unit_variance(x: np.ndarray, eps: float) -> np.ndarray:
    return centred(x) / np.sqrt((centred(x) ** 2).mean(-1, keepdims=True) + eps)


def listed(ids: Any) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize("biases", [True, False])
def test_the_noun_probe_by_numpy(model: Any, biases: bool) -> None:
    view, nouns = tlg.view(model), ["map", "several tokens", "class"]
    table = tlg.weights.noun_probe(view, nouns, biases=biases, k=3)
    assert table.provenance.flags == ("several tokens, left out: several tokens",)
    assert table.provenance.preset == ("exact" if biases else "paper")
    E, final, rows = plain(view.embed()), view.final_norm(), iter(table.df.to_dict("records"))
    assert final is not None
    for layer in (0, 3, 6):
        w, norm = view.weights(layer), view.attention_norm(layer)
        W = {n: plain(getattr(w, n)) for n in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_V", "b_O")}
        x = unit_variance(E, norm.eps) * plain(norm.gain) + plain(norm.bias)
        for noun in ("map", "class"):
            (i,) = view.encode(noun)
            written: list[np.ndarray] = []
            for head in [*range(view.n_heads), "all"]:
                row, keys = next(rows), ""
                if head == "all":
                    u = np.sum(written, 0)
                else:
                    q = x[i] @ W["W_Q"][head] + biases * W["b_Q"][head]
                    keys = listed(np.argsort(-(x @ W["W_K"][head]) @ q)[:3])
                    u = centred((x[i] @ W["W_V"][head] + W["b_V"][head]) @ W["W_O"][head])
                    written.append(u)
                y = unit_variance(E[i] + u + W["b_O"], final.eps)
                logits = (y * plain(final.gain) + plain(final.bias)) @ plain(view.unembed())
                assert [row[n] for n in ("layer", "head", "noun")] == [layer, head, noun]
                assert (row["key_ids"], row["value_ids"]) == (keys, listed(np.argsort(-logits)[:3]))
                assert row["norm"] == pytest.approx(np.linalg.norm(u), rel=1e-4)
    assert next(rows, None) is None
    assert set(tlg.weights.noun_probe(view, "map", layers=3).column("noun")) == {"map"}


@pytest.mark.parametrize("trained", [True, False])
def test_every_bias_direction_by_numpy(model: Any, trained: bool) -> None:
    """Values are read where the logits are, or in the embedding of a model without a head."""
    view = dataclasses.replace(tlg.view(model), head_trained=trained)
    final = view.final_norm()
    assert final is not None
    table = tlg.weights.bias_readout(view, heads=[(5, 3), (1, 0)], k=4)
    E, rows = plain(view.embed()), iter(table.df.to_dict("records"))
    writes = E * plain(final.gain) if trained else E
    for layer, head in [(1, 0), (5, 3)]:
        w, norm = view.weights(layer), view.attention_norm(layer)
        W = {n: plain(getattr(w, f"W_{n}")[head]) for n in "QKVO"}
        gain, shift = plain(norm.gain), plain(norm.bias)
        b = {n: plain(getattr(w, f"b_{n}")[head]) + shift @ W[n] for n in "QKV"}
        vectors = [gain * (W["Q"] @ b["K"]), gain * (W["K"] @ b["Q"]), b["V"] @ W["O"]]
        reads = unit_variance(E, norm.eps)
        for i, (vector, found) in enumerate(zip(vectors, (reads, reads, writes), strict=True)):
            order, row = np.argsort(found @ centred(vector)).tolist(), next(rows)
            name = ("query", "key", "value")[i]
            assert (row["layer"], row["head"], row["bias"]) == (layer, head, name)
            assert (row["top_ids"], row["bottom_ids"]) == (listed(order[:-5:-1]), listed(order[:4]))
            assert row["length"] == pytest.approx(np.linalg.norm(centred(vector)), rel=1e-4)
    assert next(rows, None) is None
    readout = tlg.token_readout(view, matrix="OV", heads="L1H0", k=4)
    for made, what in ((table, "values"), (readout, "writes")):
        remark = f"output head not trained: {what} are read in the embedding"
        assert (remark in made.provenance.flags) == (not trained)
    if not trained:
        with pytest.raises(UnsupportedModelError, match="a trained output head"):
            tlg.weights.noun_probe(view)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_table_of_embedding_distances_by_numpy(architecture: str) -> None:
    model = tiny("bridge", architecture)
    E = plain(tlg.view(model).embed())
    around = centred(E) if architecture == "gpt2" else E
    target = around / np.sqrt((around**2).mean(-1, keepdims=True) + 1e-5)
    mean_norm = np.linalg.norm(E, axis=1).mean()
    scale, numbers = 32**0.5 / mean_norm, []
    for rows in (E, E - E.mean(0), scale * E, scale * (E - E.mean(0))):
        distance = np.linalg.norm(rows - target, axis=1)
        lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(target, axis=1)
        cosine = 1 - (rows * target).sum(1) / lengths
        row = [f(x) for x in (distance, cosine) for f in (np.mean, lambda x: x.std(ddof=1))]
        numbers.append([*row, mean_norm, 32**0.5 - mean_norm])
    frame = tlg.weights.embedding_distance_table(model).df
    assert list(frame["matrix"]) == ["original", "centred", "scaled", "centred, scaled"]
    assert np.allclose(frame.drop(columns="matrix"), numbers, rtol=1e-6)
