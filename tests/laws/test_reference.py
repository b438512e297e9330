"""The reference is Hugging Face's own computation, and keeps the laws that the library promises:
splits, moments, ranks, weights, flow. What it is good for, comparing the library with it, is the
matter of other files."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lib import models
from tests.lib.data import random_states
from tests.lib.double import InDouble, double_hf
from tests.lib.kinds import HEADS, KINDS, PROMPTS, basis, decoder, far, run
from tests.lib.models import tokens
from tests.lib.reference import flow, geometry, moments, scores
from tests.lib.reference.decoder import Decoder

every_kind = pytest.mark.parametrize("kind", KINDS)


# ---- Hugging Face


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


def _imported(path: Path) -> set[str]:
    """Packages that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def test_the_reference_imports_neither_the_library_nor_transformer_lens() -> None:
    folder, others = Path(flow.__file__).parent, {"tl_geometry", "transformer_lens"}
    assert len(list(folder.glob("*.py"))) > 5
    for path in folder.glob("*.py"):
        assert not _imported(path) & others, path.name
    assert "transformer_lens" in _imported(folder.parent / "models.py")  # such a thing is found


def test_near_uniform_attention_is_noticed() -> None:
    hf = models.hf_model("gpt2")
    models.assert_real_attention(models.bridge_of(hf))
    hf = models.hf_model("gpt2")
    with torch.no_grad():
        for block in hf.transformer.h:
            block.attn.c_attn.weight.mul_(0.1)
    with pytest.raises(AssertionError):
        models.assert_real_attention(models.bridge_of(hf))


# ---- splits


@every_kind
@pytest.mark.parametrize("normalized", [False, True])
def test_terms_sum_to_scores_and_shares_to_one(kind: str, normalized: bool) -> None:
    model, seen = decoder(kind), run(kind)
    for layer, head in HEADS:
        stream = scores.normed(model, seen, layer) if normalized else seen["state", layer]
        parts = scores.position_parts(stream, *basis(kind, layer, normalized))
        terms = scores.terms(model, seen, layer, parts, normalized=normalized)
        total = torch.stack(list(terms.values())).sum(0)
        assert far(total, seen["scores", layer]) < 1e-12
        found = scores.head_shares(model, terms, layer, head, drop=1)
        for share in (found.cs, found.gs):
            assert sum(share.values()) == pytest.approx(1, abs=1e-12)
        assert sum(cs for cs, _ in found.groups().values()) == pytest.approx(1, abs=1e-12)
        for shares in (*found.marginal(0), *found.marginal(1)):
            assert sum(shares.values()) == pytest.approx(1, abs=1e-12)
        # shares of terms taken together are the sums of theirs
        content = terms["cvec", "cvec"]
        two = {("a", "a"): content, ("b", "b"): total - content}
        coarse = scores.head_shares(model, two, layer, head, drop=1)
        for share, fine in ((coarse.cs, found.cs), (coarse.gs, found.gs)):
            assert share["a", "a"] == pytest.approx(fine["cvec", "cvec"], abs=1e-12)
        values = scores.split_values(model, seen, layer, parts, normalized=normalized)
        assert far(torch.stack(list(values.values())).sum(0), seen["z", layer]) < 1e-12


def test_groups_of_terms() -> None:
    terms = [("bias", "pos"), ("resid", "ctx"), ("cvec", "bias"), ("pos", "cvec"), ("alibi",) * 2]
    groups = ["position", "content", "token", "mixed", "position"]
    assert [scores.group_of((a, b)) for a, b in terms] == groups


def test_the_gain_of_all_scores_is_the_jeffreys_divergence() -> None:
    p = run("gpt2")["pattern", 1][:, 2]
    found = scores.shares({("a", "a"): run("gpt2")["scores", 1][:, 2]}, torch.ones(10, 10).tril())
    rows = [p[b, i, : i + 1] for b in range(3) for i in range(1, 10)]
    divergence = sum(((row - 1 / len(row)) * (row * len(row)).log()).sum() for row in rows)
    assert found.gain_total == pytest.approx(float(divergence), rel=1e-12)


@every_kind
def test_writers_sum_to_the_stream(kind: str) -> None:
    for layer in range(3):
        written = scores.writers(decoder(kind), run(kind), layer)
        for parts in (written, scores.by_block(written)):
            total = torch.stack(list(parts.values())).sum(0)
            assert far(total, run(kind)["state", layer]) < 1e-12
    constants = scores.writers(decoder(kind), run(kind), 2)["constants"]
    assert bool(constants.any()) == (kind in ("gpt2", "bloom"))  # the others have no biases


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_planes_sum_to_the_term_and_the_kernel_is_a_function_of_the_offset(kind: str) -> None:
    model, seen, layer = decoder(kind), run(kind), 1
    parts = scores.position_parts(scores.normed(model, seen, layer), *basis(kind, layer, True))
    q, k = (
        scores.projected(model, seen, layer, which, parts, normalized=True)["bias"]
        for which in "qk"
    )
    planes = scores.plane_terms(model, layer, q, k)
    terms = scores.terms(model, seen, layer, parts, normalized=True)
    assert far(planes.sum(0), terms["bias", "bias"]) < 1e-12
    kernel = scores.relative_kernel(model, layer, basis(kind, layer, True)[0], range(10))
    for offset in range(10):
        diagonal = planes[:, 0].diagonal(-offset, -2, -1)
        assert float((diagonal - kernel[:, :, offset, None]).abs().max()) < 1e-12
    assert float(kernel.sum(0).std(-1).min()) > 1e-4


# ---- moments


@given(seed=st.integers(0, 1000), start=st.integers(0, 2))
def test_moments_add_up_and_do_not_overlap(seed: int, start: int) -> None:
    h = random_states(1, 6, 7, 4, seed=seed)[0].numpy()
    window, inside = (start, 7), h[:, start:]
    parts, table = moments.decompose(h, window), moments.anova(h, window)
    sums = (parts.pos.sum(0), parts.ctx.sum(0), parts.resid.sum(0), parts.resid.sum(1))
    assert max(np.abs(x).max() for x in sums) < 1e-10 * np.abs(h).max()
    rebuilt = parts.mean + parts.pos + parts.ctx[:, None] + parts.resid
    assert np.allclose(rebuilt, inside, rtol=1e-12)
    assert table.total == pytest.approx(((inside - inside.mean((0, 1))) ** 2).sum(), rel=1e-9)
    rows, T = parts.resid.reshape(-1, 4), 7 - start
    apart = 6 * parts.pos.T @ parts.pos + T * parts.ctx.T @ parts.ctx + rows.T @ rows
    assert np.allclose(moments.second_moment(h, window), apart, rtol=1e-8, atol=1e-8 * apart.max())


def test_the_jackknife_of_a_mean_is_the_usual_interval_and_a_square_loses_its_bias() -> None:
    x = np.random.default_rng(0).normal(size=(12, 3))
    groups, usual = [[c] for c in range(12)], x.mean(0)
    found = moments.jackknife(lambda rows: x[rows].mean(0), groups)
    assert np.allclose(found.value, usual)
    assert np.allclose(found.error, x.std(0, ddof=1) / 12**0.5)
    assert np.allclose(found.high, moments.paired(x).high)
    squares = moments.jackknife(lambda rows: x[rows].mean(0) ** 2, groups)
    assert np.allclose(squares.value, usual**2 - x.var(0, ddof=1) / 12)


def test_the_share_of_position_is_corrected_for_few_contexts() -> None:
    """Four contexts of noise about a curve: on average the squares of the curve are left."""
    rng = np.random.default_rng(1)
    curve = rng.normal(size=(5, 3))
    curve -= curve.mean(0)
    tables = [moments.anova(curve + rng.normal(size=(4, 5, 3))) for _ in range(400)]
    left = np.array([table.pos_debiased * table.total for table in tables])
    error = left.std() / 20
    assert abs(left.mean() - 4 * (curve**2).sum()) < 3 * error
    assert np.mean([table.pos for table in tables]) - 4 * (curve**2).sum() > 10 * error


# ---- ranks, weights, flow


@pytest.mark.skipif(
    importlib.util.find_spec("screenot") is None, reason="needs the package screenot"
)
@pytest.mark.parametrize("strategy", ["i", "w", "0"])
def test_screenot_is_that_of_its_authors(strategy: str) -> None:
    from screenot.ScreeNOT import adaptiveHardThresholding

    rng = np.random.default_rng(3)
    for m, n in ((60, 90), (90, 60), (70, 70)):
        Y = rng.normal(size=(m, n)) / n**0.5
        Y[:4, :4] += 6 * np.eye(4)
        _, threshold, rank = adaptiveHardThresholding(Y, 10, strategy=strategy)
        found = geometry.screenot(np.linalg.svd(Y, compute_uv=False), (m, n), 10, strategy)
        assert found[0] == int(rank)
        assert found[1] == pytest.approx(float(threshold), abs=2e-5)


@pytest.mark.parametrize("m", [1, 2, 3])
def test_smoothness_of_a_cosine_is_a_power_of_its_frequency(m: int) -> None:
    t = (np.arange(64) + 0.5) / 64
    for frequency in (1, 3):
        P = np.cos(np.pi * frequency * t)[:, None]
        per_step = 128 * np.sin(np.pi * frequency / 128)
        assert geometry.smoothness(P, m) == pytest.approx(per_step ** (2 * m), rel=0.02)
        assert geometry.low_frequency_share(P - 5, 1) > 0.9  # all rows point one way


@every_kind
def test_heads_as_matrices_give_their_scores_and_a_planted_structure_is_found(kind: str) -> None:
    rng = np.random.default_rng(0)
    V = np.linalg.qr(rng.normal(size=(16, 3)))[0]
    L, delta = rng.normal(size=(3, 3)), rng.normal(size=16)
    found = geometry.low_rank_diagonal(V @ L @ V.T + np.diag(delta), V)
    assert np.allclose(found.L, L)
    assert np.allclose(found.delta, delta)
    assert found.r2_joint == pytest.approx(1)
    model, block = decoder(kind), decoder(kind).blocks[1]
    W = torch.from_numpy(geometry.head_matrix(model, 1, 2, "QK"))
    read = geometry.token_readout(model, 1, 2, "QK")
    assert np.allclose(read.values, np.linalg.svd(W.numpy(), compute_uv=False)[:8])
    # at offset 0 rotation drops out, and without biases W is all there is to a score
    bare = dataclasses.replace(
        block,
        norm=dataclasses.replace(block.norm, bias=torch.zeros_like(block.norm.bias)),
        b_Q=torch.zeros_like(block.b_Q),
        b_K=torch.zeros_like(block.b_K),
    )
    bare_run = dataclasses.replace(model, blocks=(model.blocks[0], bare)).run(PROMPTS)
    x = scores.normed(model, bare_run, 1)
    product = torch.einsum("bid,de,bie->bi", x, W, x)
    assert far(product, bare_run["scores", 1][:, 2].diagonal(0, -2, -1)) < 1e-11


@given(seed=st.integers(0, 1000))
def test_the_flow_keeps_second_moments_and_the_best_map_is_better(seed: int) -> None:
    X = random_states(3, 9, 1, 5, seed=seed)[:, :, 0].movedim(0, 1).numpy()
    found = {align: flow.bases(X, align) for align in ("greedy", "hungarian", "sign")}
    cosines = {align: (b.U[0] * b.U[1]).sum() for align, b in found.items()}
    assert cosines["hungarian"] >= max(cosines["greedy"], cosines["sign"]) - 1e-9
    strongest = np.abs(found["sign"].U[0][:, 0] @ found["sign"].U[1])
    greedy = found["greedy"].U[:2, :, 0]
    assert greedy[0] @ greedy[1] == pytest.approx(strongest.max())
    x, y = X[:, 0], X[:, 2]
    linear = flow.fit_map(x, y, "linear")(x)
    assert np.abs(x.T @ (y - linear)).max() < 1e-7 * np.abs(x.T @ y).max()
    for b in found.values():
        moved = flow.flow_map(b, 0, 2)(X[:, 0])
        assert np.allclose(moved.T @ moved, y.T @ y, rtol=1e-7, atol=1e-7 * (y**2).sum())
        best = flow.residual(flow.fit_map(X[:, 0], y, "linear")(X[:, 0]), y)
        assert best.relative_error <= flow.residual(moved, y).relative_error + 1e-9


@every_kind
def test_all_directions_truncate_nothing(kind: str) -> None:
    X = flow.trajectories(decoder(kind).run(tokens(40, 9, seed=11)), 2)
    U = {state + 1: flow.bases(X[:, [state]]).U[0] for state in range(2)}
    own = run(kind)["logits", 0][:, -1]
    whole = flow.distances(flow.truncated(decoder(kind), PROMPTS, U, 32), own)
    few = flow.truncated(decoder(kind), PROMPTS, U, 4)
    part, p, q = flow.distances(few, own), few.log_softmax(-1), own.log_softmax(-1)
    for kl, (a, b) in ((part.kl, (p, q)), (part.kl_reverse, (q, p))):
        theirs = torch.nn.functional.kl_div(b, a, reduction="none", log_target=True).sum(-1)
        assert far(kl, theirs) < 1e-10
    assert float(whole.kl.abs().max()) < 1e-10
    assert whole.top5.tolist() == [5.0] * 3
    assert float(part.kl.min()) > 1e-6
