"""Verbs on weights: the same canonical numbers in every loading, readouts against brute force,
exact reconstruction of a block."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, VOCAB, loadable, tiny, tokens
from tl_geometry.base.errors import BudgetError, GeometryError, UnsupportedModelError
from tl_geometry.models.norms import remove_mean
from tl_geometry.sphere import paths, projection
from tl_geometry.weights import bilinear, probes, readout, subspaces, vocabulary
from tl_geometry.weights.heads import TokenReadout, WeightGeometry, token_readout, weight_geometry

ARCHITECTURES = ["gpt2", "llama", "bloom", "bert", "qwen3", "gemma3"]
LOADINGS = [
    ("bridge", False),
    ("bridge", True),
    *([("hooked", False), ("hooked", True)] if HAS_HOOKED else []),
]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def basis_of(model: Any) -> tlg.PositionContext:
    return tlg.decompose(model, tokens(24, 16), keep=32, progress=False)


def loadings(architecture: str) -> list[Any]:
    """The loadings that this TransformerLens has: a HookedTransformer of BLOOM cannot run shorter
    inputs after longer ones."""
    hooked = architecture in ("gpt2", "llama", "bert")
    return [
        tiny(model_class, architecture, processed)
        for model_class, processed in LOADINGS
        if model_class == "bridge" or (hooked and architecture != "bert")
    ]


def test_random_draws_of_a_state_do_not_depend_on_the_states_before() -> None:
    basis = basis_of(tiny("bridge", "gpt2"))
    both, alone, other = (
        subspaces.Subspaces(basis, width=8, k=4, centered=True, seed=seed) for seed in (0, 0, 1)
    )
    before = both.at(0).draws
    assert torch.equal(both.at(1).draws.random, alone.at(1).draws.random)
    assert not torch.equal(before.random, alone.at(1).draws.random)
    assert not torch.equal(other.at(1).draws.random, alone.at(1).draws.random)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_loading_gives_the_same_canonical_numbers(architecture: str) -> None:
    models = loadings(architecture)
    bases = [basis_of(m) for m in models]
    for matrix in ("QK", "OV"):
        geometries = [weight_geometry(m, b, matrix) for m, b in zip(models, bases, strict=True)]
        readouts = [token_readout(m, matrix=matrix, features=2, k=4) for m in models]
        first, read = geometries[0], readouts[0]
        size = float(first.diagonal.abs().max())
        for g, r in zip(geometries[1:], readouts[1:], strict=True):
            for name in ("diagonal", "delta", "std", "threshold"):
                assert float((getattr(g, name) - getattr(first, name)).abs().max()) < 1e-6 * size
            for name in (
                "concentration",
                "null",
                "r2_low_rank",
                "r2_diagonal",
                "r2_joint",
                "symmetric",
                "noise_null",
            ):
                close(getattr(g, name), getattr(first, name), 1e-5)
            close(
                g.block.abs(), first.block.abs(), 1e-4
            )  # single directions are only as stable as the gaps of the basis
            close(r.values, read.values, 1e-6)
            assert r.right_tokens == read.right_tokens
            assert r.left_opposite_tokens == read.left_opposite_tokens
            close(r.right.top_scores, read.right.top_scores, 1e-5)


def test_raw_weights_do_depend_on_the_loading_and_reproduce_the_plain_product() -> None:
    raw, folded = tiny("bridge", "gpt2"), tiny("bridge", "gpt2", True)
    a, b = (weight_geometry(m, basis_of(m), raw=True) for m in (raw, folded))
    assert not torch.allclose(a.diagonal, b.diagonal, atol=1e-2)
    w = tlg.view(raw).weights(1)
    W = (w.W_Q @ w.W_K.mT / w.W_Q.shape[-1] ** 0.5).double()
    close(a.diagonal[4:], W.diagonal(dim1=-2, dim2=-1), 1e-5)
    V = bilinear.leading_directions(basis_of(raw).pos[1], 32)[0][:, : a.k[1]]
    W_o = W - torch.diag_embed(W.diagonal(dim1=-2, dim2=-1))
    close(
        a.concentration[4:],
        (V.mT @ W_o @ V).square().sum((-2, -1)) / W_o.square().sum((-2, -1)),
        1e-5,
    )
    assert a.provenance.preset == "paper"
    assert "published coordinates" in a.provenance.flags[0]


def test_the_score_is_the_bilinear_form_of_the_factors_at_every_offset() -> None:
    """For rotary models: scores of the model at (query, key) equal the form at offset query - key
    plus terms of the constants."""
    for architecture in ("llama", "gpt2", "qwen3"):
        view = tlg.view(tiny("bridge", architecture))
        seen: dict[int, Any] = {}
        view.run_layers(tokens(1, 16), [1], lambda s, seen=seen: seen.__setitem__(s.layer, s))
        s = seen[1]
        for offset in (0, 5) if view.position == "rotary" else (0,):
            ((_, f),) = vocabulary.factors_of(view, [1], "QK", offsets=(offset,))
            x = remove_mean(s.h, s.norm.norm_type)[0].double()
            i, j = 9, 9 - offset
            scale = (s.q_scale[0, i] * s.k_scale[0, j]).double()
            ours = scale * torch.einsum("d,hde,hfe,f->h", x[i], f.left, f.right, x[j])
            q, k = s.project_q(s.h)[0, i].double(), s.project_k(s.h)[0, j].double()
            close(ours, s.scale * (q * k).sum(-1), 1e-4)


def test_the_average_over_offsets_is_the_mean_of_the_matrices() -> None:
    view = tlg.view(tiny("bridge", "llama"))

    def dense(offsets: tuple[int, ...]) -> Tensor:
        ((_, f),) = vocabulary.factors_of(view, [0], "QK", offsets=offsets)
        return f.left @ f.right.mT

    close(dense(tuple(range(1, 5))), torch.stack([dense((o,)) for o in range(1, 5)]).mean(0), 1e-6)
    assert not torch.allclose(dense((0,)), dense((3,)), atol=1e-2)
    model = tiny("bridge", "llama")
    g = weight_geometry(model, basis_of(model), offsets=tuple(range(1, 17)))
    assert g.offsets == tuple(range(1, 17))
    with pytest.raises(
        GeometryError, match="offsets: expected offsets of at least 0, for W_QK of a rotary model"
    ):
        weight_geometry(tiny("bridge", "gpt2"), basis_of(tiny("bridge", "gpt2")), offsets=(1,))


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "bert"])
def test_the_sum_over_heads_of_all_terms_is_the_attention_block(architecture: str) -> None:
    """All four score terms, value biases once, output bias once, with random biases."""
    view = tlg.view(tiny("bridge", architecture, dtype=torch.float64))
    ids, found = tokens(2, 9), {}
    names = ("blocks.1.hook_resid_pre", "blocks.1.hook_attn_out", "blocks.1.attn.hook_z")
    view.run(ids, {n: lambda v, n=n: found.__setitem__(n, v.double()) for n in names})
    w, norm = view.weights(1), view.attention_norm(1)
    h = found[names[0]]
    x = (
        h
        if norm.norm_type is None
        else projection.norm_geometry(h, norm.gain, norm.bias, norm.eps, norm.norm_type).y
    )
    d = {
        n: getattr(w, n).double() for n in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
    }
    root = w.W_Q.shape[-1] ** 0.5
    both = torch.einsum("bid,hde,hfe,bjf->bhij", x, d["W_Q"], d["W_K"], x)
    query = torch.einsum("bid,hde,he->bhi", x, d["W_Q"], d["b_K"])[..., None]
    key = torch.einsum("bjd,hde,he->bhj", x, d["W_K"], d["b_Q"])[:, :, None]
    scores = (both + query + key + (d["b_Q"] * d["b_K"]).sum(-1)[:, None, None]) / root
    allowed = (
        torch.ones(9, 9, dtype=torch.bool).tril()
        if view.causal
        else torch.ones(9, 9, dtype=torch.bool)
    )
    pattern = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    out = torch.einsum("bhij,bjd,hde,hef->bif", pattern, x, d["W_V"], d["W_O"])
    total = out + torch.einsum("he,hef->f", d["b_V"], d["W_O"]) + d["b_O"]
    # BERT's hook_attn_out comes after its norm: the block's output is rebuilt from the mixed values
    # of its heads
    mixed = torch.einsum("bihe,hef->bif", found[names[2]].view(2, 9, 4, 8), d["W_O"]) + d["b_O"]
    expected = mixed if architecture == "bert" else found[names[1]]
    close(total, expected, 1e-6)
    close(mixed, expected, 1e-6)
    assert not torch.allclose(out + d["b_O"], expected, atol=1e-2)  # the value biases are needed


def test_table_and_file_of_a_geometry(tmp_path: Any) -> None:
    model = tiny("bridge", "gpt2")
    basis = basis_of(model)
    g = weight_geometry(model, basis, "OV", layers=1, rank=4)
    table = g.to_dataframe()
    assert list(table["layer"]) == [1] * 4
    assert list(table["k"]) == [4] * 4
    assert g.ranks == (14,)  # 15 positions of the window, centred
    assert g.L.shape == (4, 4, 4)
    again = WeightGeometry.load(g.save(tmp_path / "g.safetensors"))
    close(again.L, g.L)
    assert (again.heads, again.provenance) == (g.heads, g.provenance)
    assert g.head("L1H2") == 2
    with pytest.raises(GeometryError, match="a head of layers"):
        g.head((0, 1))
    ((_, factors),) = vocabulary.factors_of(tlg.view(model), [1], "OV")
    W = factors.left @ factors.right.mT
    W = W - torch.diag_embed(W.diagonal(dim1=-2, dim2=-1))
    centring = torch.eye(32).double() - 1 / 32  # positional directions have one dimension less
    reachable = (centring @ W @ centring).square().sum((1, 2)) / W.square().sum((1, 2))
    close(g.null, 16 / 31**2 * reachable)


def test_refusals() -> None:
    model = tiny("bridge", "gpt2")
    partial = tlg.decompose(model, tokens(24, 16), states=[0, 1], progress=False)
    weight_geometry(model, partial)
    with pytest.raises(
        GeometryError, match=r"basis: expected states \[0, 1, 2\], got states \(0, 1\)"
    ):
        weight_geometry(model, partial, "OV")
    with pytest.raises(GeometryError, match="basis: expected the model it was computed from"):
        weight_geometry(tiny("bridge", "opt"), basis_of(model))
    same = tlg.decompose_activations(torch.ones(1, 3, 4, 32).expand(3, -1, -1, -1))
    with pytest.raises(GeometryError, match="basis: expected positional vectors that differ"):
        weight_geometry(model, same)
    with (
        mock.patch.object(subspaces, "Subspaces", side_effect=AssertionError("refused too late")),
        pytest.raises(GeometryError, match="matrix: expected one of 'QK', 'OV'"),
    ):
        weight_geometry(model, basis_of(model), "VO")
    with pytest.raises(GeometryError, match="matrix: expected one of 'QK', 'OV'"):
        token_readout(model, matrix="VO")


def test_readout_equals_dense_singular_vectors_against_all_tokens() -> None:
    model = tiny("bridge", "gpt2")
    view = tlg.view(model)
    r = token_readout(model, matrix="QK", heads=["L1H3", "L0H1"], features=3, k=4)
    assert r.heads == ((0, 1), (1, 3))
    ((_, f),) = vocabulary.factors_of(view, [1], "QK")
    _, S, Vh = torch.linalg.svd(f.left[3] @ f.right[3].mT)
    close(r.values[1], S[:8], 1e-9)
    norm = view.attention_norm(1)
    z = projection.norm_geometry(model.W_E.detach(), eps=norm.eps).z
    for i in range(3):
        scores = z @ Vh[i]
        scores = scores if float(scores.max()) >= float(-scores.min()) else -scores
        order = scores.argsort(descending=True)
        assert r.right.top_ids[3 + i].tolist() == order[:4].tolist()
        assert r.right.bottom_ids[3 + i].tolist() == order.flip(0)[:4].tolist()
    close(r.coverage[:, -1], torch.ones(2).double())
    frame = r.to_dataframe()
    assert list(frame.columns)[6:] == ["queries", "queries_opposite", "keys", "keys_opposite"]
    assert len(frame) == 6


def test_a_readout_survives_a_file(tmp_path: Any) -> None:
    r = token_readout(tiny("bridge", "gpt2"), matrix="OV", heads="L1H2", features=2)
    again = TokenReadout.load(r.save(tmp_path / "r.safetensors"))
    assert again.right_tokens == r.right_tokens
    close(again.values, r.values)


def test_writes_are_read_where_the_logits_are() -> None:
    """Adding a written direction to the last state moves the logits in the order of the readout."""
    model = tiny("bridge", "gpt2")
    view = tlg.view(model)
    rows = vocabulary.output_rows(view)
    norm, U = view.final_norm(), view.unembed().detach()
    assert norm is not None
    u = remove_mean(torch.randn(32, generator=torch.Generator().manual_seed(0)))
    logits = projection.norm_geometry(1e4 * u, norm.gain, None, norm.eps).y.float() @ U
    centred = logits - logits.mean()
    assert float(torch.corrcoef(torch.stack([rows @ u, centred]))[0, 1]) > 1 - 1e-5
    raw = vocabulary.output_rows(view, raw=True)
    close(raw, U.mT)


@pytest.mark.parametrize("architecture", ["bloom", "gemma3", "llama"])
def test_embeddings_are_what_tokens_put_into_the_stream(architecture: str) -> None:
    view = tlg.view(tiny("bridge", architecture))
    rows = vocabulary.embeddings(view, centered=False)
    found: dict[str, Tensor] = {}
    ids = torch.arange(12)[None]
    view.run(ids, {view.state_hooks[0]: lambda v: found.__setitem__("h", v)})
    close(rows[:12], found["h"][0], 1e-5)


@pytest.mark.parametrize("scale", [1e-8, 1e6])
def test_a_scaled_embedding_is_told_from_the_plain_one_at_any_size(scale: float) -> None:
    """Gemma multiplies its embedding by sqrt(d_model)."""
    model = copy.deepcopy(tiny("bridge", "gemma3"))
    table = model.original_model.get_input_embeddings().weight.detach()
    table.mul_(scale)
    rows = vocabulary.embeddings(tlg.view(model), centered=False)
    assert float(rows.norm() / table.norm()) == pytest.approx(table.shape[1] ** 0.5, 0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_updates_are_split_in_every_precision(dtype: torch.dtype) -> None:
    """Half precision rounds the sum of a stream at one part in 256."""
    paths = tlg.token_paths(tiny("bridge", "llama", dtype=dtype), tokens(2, 9))
    assert paths.radial.isfinite().all()
    assert not any("no updates" in flag for flag in paths.provenance.flags)


@pytest.fixture(scope="module")
def embedded() -> Any:
    from tl_geometry import zoo

    return zoo.embedded()


def test_noun_probe_by_hand(embedded: Any) -> None:
    view = tlg.view(embedded)
    p = probes.noun_probe(embedded, ["class", "map", "a noun of several tokens"], layers=[1], k=3)
    assert p.nouns == ("class", "map")
    assert p.skipped == ("a noun of several tokens",)
    assert len(p.to_dataframe()) == 2 * (view.n_heads + 1)
    (noun,) = view.encode("map")
    w, norm, final = view.weights(1), view.attention_norm(1), view.final_norm()
    assert final is not None
    E = embedded.W_E.detach()
    x = projection.norm_geometry(E, norm.gain, norm.bias, norm.eps).y.float()
    for h in range(view.n_heads):
        scores = (x[noun] @ w.W_Q[h] + w.b_Q[h]) @ (x @ w.W_K[h]).T
        assert p.key_ids[0, h, 1].tolist() == scores.argsort(descending=True)[:3].tolist()
        u = (x[noun] @ w.W_V[h] + w.b_V[h]) @ w.W_O[h]
        logits = (
            projection.norm_geometry(
                E[noun] + u + w.b_O, final.gain, final.bias, final.eps
            ).y.float()
            @ view.unembed()
        )
        assert p.value_ids[0, h, 1].tolist() == logits.argsort(descending=True)[:3].tolist()
        assert float(p.norms[0, h, 1]) == pytest.approx(
            float(torch.linalg.vector_norm(u - u.mean())), rel=1e-4
        )
    without = probes.noun_probe(embedded, ["map"], layers=[1], biases=False)
    assert without.provenance.preset == "paper"
    assert without.value_ids[0, :, 0].tolist() == p.value_ids[0, :, 1].tolist()
    assert without.key_ids[0, :, 0].tolist() != p.key_ids[0, :, 1].tolist()
    assert probes.noun_probe(embedded, "map", layers=[1]).nouns == (
        "map",
    )  # one noun, not its letters
    with pytest.raises(GeometryError, match="nouns: expected at least one noun of a single token"):
        probes.noun_probe(embedded, ["a noun of several tokens"])


def test_bias_readout_and_its_file(embedded: Any, tmp_path: Any) -> None:
    b = probes.bias_readout(embedded, heads="L2H1", k=4)
    view = tlg.view(embedded)
    w, norm = view.weights(2), view.attention_norm(2)
    z = projection.norm_geometry(embedded.W_E.detach(), eps=norm.eps).z
    key = norm.gain * (w.W_K[1] @ (w.b_Q[1] + norm.bias @ w.W_Q[1]))
    order = (z @ remove_mean(key).double()).argsort(descending=True)
    assert b.top_ids[0, 1].tolist() == order[:4].tolist()
    assert b.bottom_ids[0, 1].tolist() == order.flip(0)[:4].tolist()
    assert [row[2] for row in b.rows()] == ["query", "key", "value"]
    again = probes.BiasReadout.load(b.save(tmp_path / "b.safetensors"))
    assert again.texts == b.texts


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("qwen3", "QK-norm"),
        ("gemma3", "QK-norm"),
        ("gemma2", "a norm after attention"),
        ("olmo2", "QK-norm"),
    ],
)
def test_probes_refuse_heads_that_are_not_plain(architecture: str, reason: str) -> None:
    for model_class, processed in loadable(architecture):
        model = tiny(model_class, architecture, processed)
        for call in (lambda m: probes.noun_probe(m, ["map"]), probes.bias_readout):
            with pytest.raises(
                UnsupportedModelError,
                match=f"without a norm after attention, got {reason}.* in layer 0",
            ):
                call(model)


def test_the_table_of_embedding_distances() -> None:
    model = tiny("bridge", "gpt2")
    d = probes.embedding_distance_table(model)
    close(d.cosine_mean[0], d.cosine_mean[2])
    close(d.cosine_mean[1], d.cosine_mean[3])
    rows = model.W_E.detach().double()
    target = torch.nn.functional.layer_norm(rows, (32,))
    assert float(d.l2_mean[0]) == pytest.approx(
        float((rows - target).norm(dim=-1).mean()), rel=1e-6
    )
    assert d.identity == pytest.approx(32**0.5 - float(rows.norm(dim=-1).mean()), rel=1e-6)


def test_when_embeddings_are_nearly_normalised_the_distance_identity_holds(embedded: Any) -> None:
    d = probes.embedding_distance_table(embedded)
    assert float(d.cosine_mean[0]) < 0.05
    assert float(d.l2_mean[0]) == pytest.approx(d.identity, rel=0.02)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_paths_by_hand(architecture: str) -> None:
    model = tiny("bridge", architecture)
    view, ids = tlg.view(model), tokens(2, 7)
    p = paths.token_paths(model, ids)
    found: dict[str, Tensor] = {}
    view.run(ids, {n: lambda v, n=n: found.__setitem__(n, v.double()) for n in view.state_hooks})
    h = torch.stack([found[n] for n in view.state_hooks], dim=2)
    c = remove_mean(h, view.norm)
    close(p.steps.cos(), torch.cosine_similarity(c[:, :, :-1], c[:, :, 1:], dim=-1), 1e-6)
    rows = vocabulary.output_rows(view).double()
    cosine = (
        torch.nn.functional.normalize(c[:, :-1], dim=-1)
        @ torch.nn.functional.normalize(rows, dim=-1).mT
    )
    own = cosine.gather(-1, ids[:, 1:, None, None].expand(-1, -1, 3, 1))
    assert p.rank[:, :-1].tolist() == ((cosine > own).sum(-1) + 1).tolist()
    assert p.rank[:, -1].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert bool(p.angle[:, -1].isnan().all())
    both = p.radial.square() + p.tangential.square()
    assert both.shape == (2, 2, 2, 7)
    attention = torch.stack([found_update(view, ids, l) for l in range(2)])
    close(both[0], remove_mean(attention, view.norm).square().sum(-1), 1e-4)
    assert p.coordinates.shape == (2, 7, 3, 3)
    assert 0 < p.shown < 1
    fitted = paths.token_paths(model, ids, basis_of(model))
    assert fitted.fitted_on == "sampled states"
    assert not torch.allclose(fitted.coordinates, p.coordinates)
    assert len(p.to_dataframe()) == 2 * 7 * 3


@pytest.mark.parametrize("architecture", ["gpt2", "bert"])
def test_paths_of_batches_are_those_of_all_contexts(architecture: str) -> None:
    model, ids = tiny("bridge", architecture), tokens(5, 7)
    whole, parts = paths.token_paths(model, ids), paths.token_paths(model, ids, batch_size=2)
    for name in (
        "steps",
        "length",
        "net",
        "tortuosity",
        "radial",
        "tangential",
        "turn",
        "angle",
        "coordinates",
    ):
        torch.testing.assert_close(
            getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-4, equal_nan=True
        )
    assert torch.equal(parts.rank, whole.rank)
    assert parts.provenance == whole.provenance
    need = 8 * (16 * 32 + VOCAB) * 3 * 7  # two blocks
    assert torch.equal(paths.token_paths(model, ids, memory_budget=need).rank, whole.rank)
    with pytest.raises(
        BudgetError, match=f"memory_budget: expected at least {need} bytes for 1 x 7 tokens"
    ):
        paths.token_paths(model, ids, memory_budget=need - 1)
    with pytest.raises(BudgetError, match="for 5 x 7 tokens"):  # UMAP places all at once
        paths.token_paths(model, ids, method="umap", memory_budget=need)


def found_update(view: Any, ids: Tensor, layer: int) -> Tensor:
    found: dict[str, Tensor] = {}
    view.run(ids, {f"blocks.{layer}.hook_attn_out": lambda v: found.__setitem__("u", v.double())})
    return found["u"]


def test_post_norm_models_have_paths_but_no_updates_and_untrained_heads_no_output_measures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import dataclasses

    view = tlg.view(tiny("bridge", "bert"))
    p = paths.token_paths(view, tokens(1, 6))
    assert bool(p.radial.isnan().all())
    assert any("no updates" in f for f in p.provenance.flags)
    headless = dataclasses.replace(view, head_trained=False)
    with pytest.raises(UnsupportedModelError, match="expected a model with a trained output head"):
        probes.noun_probe(headless)
    q = paths.token_paths(headless, tokens(1, 6))
    assert any("sought in the embedding" in f for f in q.provenance.flags)
    close(vocabulary.output_rows(headless), vocabulary.embeddings(view))
    r = token_readout(headless, matrix="OV", features=1)
    assert any("writes are read in the embedding" in f for f in r.provenance.flags)


def test_the_path_of_text_and_bad_methods(embedded: Any) -> None:
    p = paths.token_paths(embedded, "def f(x):\n    return x", prepend_bos=True)
    assert p.str_tokens[0][0] == "<|endoftext|>"
    assert p.provenance.has_bos
    assert "␣" in "".join(p.str_tokens[0])
    with pytest.raises(GeometryError, match="method: expected one of 'pca', 'umap'"):
        paths.token_paths(embedded, tokens(1, 4), method="tsne")
    assert float(readout.coverage(torch.ones(4))[-1]) == 1


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_mlp_turns_the_stream_that_attention_has_added_to(architecture: str) -> None:
    view, ids = tlg.view(tiny("bridge", architecture)), tokens(2, 7)
    p, found = paths.token_paths(view, ids), {}
    for l in range(2):
        names = [f"blocks.{l}.hook_{name}" for name in ("resid_pre", "attn_out", "mlp_out")]
        view.run(ids, {n: lambda v, n=n: found.__setitem__(n, v.double()) for n in names})
        before, attention, update = (remove_mean(found[n], view.norm) for n in names)
        state = before + attention
        radial = (update * torch.nn.functional.normalize(state, dim=-1)).sum(-1)
        close(p.radial[1, l], radial, 1e-4)
        close(p.tangential[1, l].square(), update.square().sum(-1) - radial.square(), 1e-4)
        close(p.turn[1, l].cos(), torch.cosine_similarity(state, state + update, dim=-1), 1e-5)
