"""Gain: the part of each term in where attention goes. Laws, planted heads, precision, and the
tables that hold it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax
from torch import Tensor

from tests.lib.models import tiny, tokens
from tests.scores.dense import share_sums_dense, terms
from tl_geometry import decompose
from tl_geometry.base.results import Provenance
from tl_geometry.base.rows import causal_mask
from tl_geometry.scores.share_table import Marginals, ShareTable
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.sums import BLOCK, ShareSums, share_sums
from tl_geometry.scores.sweep import sweep_heads
from tl_geometry.scores.terms import term_names

PARTS = ("bias", "pos", "cvec")
MASKS = ["causal", "full", "sliding", "scattered"]
ONE = torch.tensor(1.0, dtype=torch.float64)


def draw(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """Float64 numbers with a mean, so that centring has something to do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return size * (x + torch.randn(shape[-1], generator=generator, dtype=torch.float64))


def mask_of(name: str, length: int) -> Tensor:
    causal = causal_mask(length)
    scattered = torch.rand(2, length, length, generator=torch.Generator().manual_seed(3)) < 0.4
    sliding = causal & ~causal.roll(5, 0).tril(-5)
    found = {"causal": causal, "full": torch.ones_like(causal), "sliding": sliding}
    return found.get(name, scattered)


def by_hand(
    matrices: Tensor, mask: Tensor, drop: int = 0, cap: float | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gains ``[context head term]`` and both directions of KL ``[context head]``, row by row."""
    n, contexts, heads, length, _ = matrices.shape
    gains = np.zeros((contexts, heads, n))
    forward, backward = np.zeros((contexts, heads)), np.zeros((contexts, heads))
    for c, h, i in itertools.product(range(contexts), range(heads), range(drop, length)):
        allowed = mask if mask.dim() == 2 else mask[c]
        keys = [j for j in range(drop, length) if allowed[i, j]]
        if len(keys) < 2:
            continue
        rows = matrices[:, c, h, i, keys].numpy()
        score = rows.sum(0)
        score = score if cap is None else cap * np.tanh(score / cap)
        p, u = softmax(score), np.full(len(keys), 1 / len(keys))
        gains[c, h] += rows @ (p - u)
        log_p = log_softmax(score)
        forward[c, h] += (p * (log_p - np.log(u))).sum()
        backward[c, h] += (u * (np.log(u) - log_p)).sum()
    return gains, forward, backward


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("drop", [0, 3])
@pytest.mark.parametrize(("with_bias", "cap"), [(False, None), (True, None), (True, 2.0)])
def test_gains_equal_the_definition_row_by_row(
    name: str, drop: int, with_bias: bool, cap: float | None
) -> None:
    length = BLOCK + 13
    q, k, mask = draw(3, 2, length, 2, 4), draw(3, 2, length, 2, 4, seed=7), mask_of(name, length)
    bias = draw(2, length, length, seed=9) if with_bias else None
    matrices = terms(q, k).flatten(0, 1)
    if bias is not None:
        matrices = torch.cat([matrices, bias.expand(1, 2, -1, -1, -1)])
    gains, forward, backward = by_hand(matrices, mask, drop, cap)
    allowed = mask if mask.dim() == 2 else mask.unsqueeze(1)
    fast = share_sums(q, k, mask, bias=bias, drop=drop, softcap=cap)
    for sums in (fast, share_sums_dense(matrices, allowed, drop=drop, softcap=cap)):
        assert np.allclose(sums.gains, gains, rtol=1e-11, atol=1e-11 * np.abs(gains).max())
        assert np.allclose(sums.gain_total, gains.sum(-1), rtol=1e-11)
    jeffreys = forward + backward
    assert np.allclose(fast.gain_total, jeffreys, rtol=1e-12) == (cap is None)
    assert (fast.gain_total.numpy() >= forward).all()


@given(
    seed=st.integers(0, 1000),
    parts=st.integers(1, 4),
    drop=st.integers(0, 4),
    name=st.sampled_from(MASKS[:3]),
    size=st.floats(1e-3, 8),
)
def test_the_whole_score_gains_the_jeffreys_divergence_exactly(
    seed: int, parts: int, drop: int, name: str, size: float
) -> None:
    q, k = draw(parts, 2, 9, 2, 3, seed=seed, size=size), draw(parts, 2, 9, 2, 3, seed=seed + 50)
    sums = share_sums(q, k, mask_of(name, 9), drop=drop)
    _, forward, backward = by_hand(terms(q, k).flatten(0, 1), mask_of(name, 9), drop)
    scale = max(1.0, float(sums.gain_total.max()))
    assert np.abs(sums.gain_total.numpy() - forward - backward).max() <= 1e-12 * scale
    assert torch.allclose(sums.pooled().gs.sum(-1), ONE, atol=1e-9)


@given(seed=st.integers(0, 1000), cap=st.floats(0.5, 20))
def test_with_a_soft_cap_the_gain_is_at_least_the_divergence(seed: int, cap: float) -> None:
    q, k = draw(3, 2, 9, 2, 3, seed=seed), draw(3, 2, 9, 2, 3, seed=seed + 50)
    matrices = terms(q, k).flatten(0, 1)
    _, forward, backward = by_hand(matrices, causal_mask(9), cap=cap)
    capped = share_sums(q, k, softcap=cap)
    assert (capped.gain_total.numpy() >= forward * (1 - 1e-12)).all()
    assert torch.allclose(capped.pooled().gs.sum(-1), ONE, atol=1e-9)
    assert (capped.gain_total.numpy() >= (forward + backward) * (1 - 1e-12)).all()


def test_gains_add_up_over_any_grouping_of_parts() -> None:
    q, k = draw(4, 2, 12, 2, 5), draw(4, 2, 12, 2, 5, seed=3)
    fine = share_sums(q, k).gains.unflatten(-1, (4, 4))
    join = lambda x: torch.stack([x[0] + x[1], x[2] + x[3]])
    coarse = share_sums(join(q), join(k)).gains.unflatten(-1, (2, 2))
    expected = fine.unflatten(-1, (2, 2)).sum(-1).unflatten(-2, (2, 2)).sum(-2)
    assert torch.allclose(coarse, expected, rtol=1e-10, atol=1e-10)


@given(seed=st.integers(0, 1000))
def test_a_constant_of_each_row_gains_nothing(seed: int) -> None:
    q, k = draw(3, 2, 8, 2, 4, seed=seed), draw(3, 2, 8, 2, 4, seed=seed + 50)
    before = share_sums(q, k)
    shifted = share_sums(q, k + draw(3, 2, 1, 2, 4, seed=seed + 9))
    assert torch.allclose(shifted.gains, before.gains, rtol=1e-9, atol=1e-9)
    rows = draw(2, 2, 8, 1, seed=seed).expand(-1, -1, -1, 8)
    biased = share_sums(q, k, bias=rows)
    assert float(biased.gains[..., -1].abs().max()) < 1e-9
    assert torch.allclose(biased.gains[..., :-1], before.gains, rtol=1e-9, atol=1e-9)
    changed = share_sums(q + draw(3, 2, 1, 2, 4, seed=seed + 9), k)
    assert not torch.allclose(changed.gains, before.gains, atol=1e-3), "no gauge of the queries"


def test_a_constant_of_each_row_matters_under_a_soft_cap() -> None:
    q, k = draw(3, 2, 8, 2, 4), draw(3, 2, 8, 2, 4, seed=5)
    shift = draw(3, 2, 1, 2, 4, seed=9)
    before, shifted = share_sums(q, k, softcap=3.0), share_sums(q, k + shift, softcap=3.0)
    assert not torch.allclose(before.gains, shifted.gains, rtol=1e-2)


def planted(size: float = 12.0) -> tuple[Tensor, Tensor]:
    """One key of each row gets all the attention by content; position moves the other keys much and
    keeps none of it.

    The positional term is a deep valley: keys far away sink by a lot, which is most of the
    covariance over cells, but they had no attention to lose once the matching key is far above
    everything.
    """
    length, width = 32, 40
    generator = torch.Generator().manual_seed(0)
    match = torch.randint(
        0, 8, (length,), generator=generator
    )  # each query matches one of the first keys
    q, k = (
        torch.zeros(3, 1, length, 1, width).double(),
        torch.zeros(3, 1, length, 1, width).double(),
    )
    q[2, 0, torch.arange(length), 0, match] = size
    k[2, 0, torch.arange(8), 0, torch.arange(8)] = 1
    k[1, 0, :, 0, 39] = torch.linspace(0, 9, length).double().sin() * 8
    q[1, 0, :, 0, 39] = 1
    return q[:, :, 8:], k[:, :, :]


def test_a_term_that_decides_where_attention_goes_has_the_gain_whatever_its_covariance() -> None:
    queries, k = planted()
    length = k.shape[2]
    q = torch.zeros_like(k)
    q[:, :, 8:] = queries
    mask = torch.zeros(length, length, dtype=torch.bool)
    mask[8:] = True  # the first rows are only keys
    sums = share_sums(q, k, mask).pooled()
    content = term_names(PARTS).index("cvec-cvec")
    position = term_names(PARTS).index("pos-pos")
    assert float(sums.cs[0, content]) < 0.2
    assert float(sums.cs[0, position]) > 0.8
    assert float(sums.gs[0, content]) > 0.55
    weaker = share_sums(
        q * torch.tensor([1.0, 1.0, 0.05]).double().view(3, 1, 1, 1, 1), k, mask
    ).pooled()
    assert float(weaker.gs[0, content]) < 0.05, "the same term decides nothing where it is small"


def test_gains_merge_in_any_partition() -> None:
    q, k = draw(3, 5, 12, 2, 4), draw(3, 5, 12, 2, 4, seed=3)
    whole = share_sums(q, k).pooled()
    halves = share_sums(q[:, :2], k[:, :2]).pooled() + share_sums(q[:, 2:], k[:, 2:]).pooled()
    tight = share_sums(q, k, working_set=1).pooled()
    joined = ShareSums.cat(
        [share_sums(q[:, :1], k[:, :1]), share_sums(q[:, 1:], k[:, 1:])]
    ).pooled()
    for other in (halves, tight, joined):
        assert torch.allclose(other.gs, whole.gs, atol=1e-12)
        assert torch.allclose(other.gains, whole.gains, rtol=1e-12)
        assert torch.allclose(other.gain_total, whole.gain_total, rtol=1e-12)
    ratios = torch.stack(
        [share_sums(q[:, c : c + 1], k[:, c : c + 1]).pooled().gs for c in range(5)]
    )
    assert not torch.allclose(ratios.mean(0), whole.gs, atol=1e-4), (
        "a mean of ratios is another number"
    )
    heads = (slice(1), slice(1, None))
    beside = ShareSums.beside([share_sums(q[..., h, :], k[..., h, :]).pooled() for h in heads])
    assert torch.allclose(beside.gs, whole.gs, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 1.0, 30.0])
def test_lower_precision_stays_close_for_flat_and_for_sharp_attention(
    dtype: torch.dtype, size: float
) -> None:
    q, k = draw(3, 2, 300, 2, 8, size=size).to(dtype), draw(3, 2, 300, 2, 8, seed=4).to(dtype)
    exact = share_sums(q.double(), k.double()).pooled()
    ours = share_sums(q, k).pooled()
    assert float((ours.gain_total / exact.gain_total - 1).abs().max()) < 1e-6
    assert float((ours.gs - exact.gs).abs().max()) < 1e-6
    assert ours.gains.dtype == torch.float64


def test_uniform_heads_have_no_gain_share_and_gains_may_be_left_out() -> None:
    q, k = draw(3, 2, 20, 2, 4).float(), draw(3, 2, 20, 2, 4, seed=2).float()
    k[:, :, :, 0] = k[:, :, :1, 0]
    sums = share_sums(q, k).pooled()
    assert bool(torch.isnan(sums.gs[0]).all())
    assert not bool(torch.isnan(sums.gs[1]).any())
    without = share_sums(q, k, gain=False).pooled()
    assert bool(torch.isnan(without.gains).all())
    assert torch.equal(without.numerators, sums.numerators)


# ------------------------------------------------------------------------------------------- tables


def table_of(sums: ShareSums, parts: tuple[str, ...] = PARTS, **fields: Any) -> ShareTable:
    heads = tuple((0, h) for h in range(sums.total.shape[-1]))
    return ShareTable(
        provenance=Provenance(), heads=heads, parts=parts, sums=sums.pooled(), **fields
    )


def test_marginals_are_sums_over_the_other_side() -> None:
    q, k = draw(3, 2, 9, 2, 4), draw(3, 2, 9, 2, 4, seed=3)
    bias = draw(2, 9, 9, seed=6)
    table = table_of(share_sums(q, k, bias=bias), dropped_mass=torch.tensor([0.5, 0.25]))
    found = table.marginals()
    frame: Any = found.to_dataframe()
    assert list(frame.columns) == ["layer", "head", "side", "part", "cs", "gs", "dropped_mass"]
    for side, names in (
        ("query", [f"pos-{b}" for b in PARTS]),
        ("key", [f"{a}-pos" for a in PARTS]),
    ):
        chosen = frame[(frame.side == side) & (frame.part == "pos") & (frame["head"] == 1)]
        expected = sum(float(table.cs[1, table.terms.index(n)]) for n in names)
        assert float(chosen.cs.iloc[0]) == pytest.approx(expected, abs=1e-12)
        expected = sum(float(table.gs[1, table.terms.index(n)]) for n in names)
        assert float(chosen.gs.iloc[0]) == pytest.approx(expected, abs=1e-12)
    for share in ("cs", "gs"):
        assert frame.groupby(["head", "side"])[share].sum().tolist() == pytest.approx([1] * 4)
    assert set(frame.part) == {*PARTS, "alibi"}
    assert isinstance(found, Marginals)


def test_marginals_of_parts_with_any_names() -> None:
    table = table_of(share_sums(draw(2, 2, 9, 1, 4), draw(2, 2, 9, 1, 4, seed=3)), ("L3H5", "mlp3"))
    frame: Any = table.marginals().to_dataframe()
    assert frame.part.tolist() == ["L3H5", "mlp3"] * 2
    assert table.groups == ()
    assert frame.groupby("side").gs.sum().tolist() == pytest.approx([1, 1])


def test_the_table_holds_gains_beside_covariances(tmp_path: Path) -> None:
    sums = share_sums(draw(3, 4, 9, 2, 4), draw(3, 4, 9, 2, 4, seed=3))
    table = table_of(sums, dropped_mass=torch.tensor([0.25, 0.5]), drop=1)
    frame: Any = table.to_dataframe()
    assert frame[frame.term.notna()].groupby("head").gs.sum().tolist() == pytest.approx([1, 1])
    assert frame[frame.group.notna()].groupby("head").gs.sum().tolist() == pytest.approx([1, 1])
    assert frame.dropped_mass.unique().tolist() == [0.25, 0.5]
    assert torch.allclose(table.group_gs.sum(-1), ONE)
    again = ShareTable.load(table.save(tmp_path / "shares.safetensors"))
    assert torch.equal(again.gs, table.gs)
    assert again.marginals().rows() == table.marginals().rows()


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "bloom", "gpt-oss"])
def test_gains_of_a_model_are_those_of_its_terms(architecture: str) -> None:
    model, prompts = tiny("bridge", architecture), tokens(batch=3, length=18, seed=7)
    basis = decompose(model, tokens(batch=24, length=20, seed=2), progress=False)
    split = split_scores(model, prompts, basis)
    cap = None if torch.isinf(split.softcap).all() else float(split.softcap[0])
    assert (cap is not None) == (architecture == "gemma2")
    matrices = torch.stack([split.terms[t].double() for t in split.terms])
    assert torch.allclose(split["pos-cvec"], split.terms["pos", "cvec"])
    shares, sweep = split.shares(), sweep_heads(model, prompts, basis, progress=False)
    for at in (slice(0, 4), slice(4, 8)):
        gains = by_hand(matrices[:, :, at], split.allowed[at.start], 1, cap)[0].sum(0)
        expected = torch.from_numpy(gains / gains.sum(-1, keepdims=True))
        assert torch.allclose(shares.gs[at], expected, atol=2e-5)
        assert torch.allclose(sweep.gs[at], expected, atol=5e-5)
    frame = sweep.to_dataframe()
    assert frame["gs_position"].tolist() == pytest.approx(sweep.group_gs[:, 0].tolist())
    best = sweep.top("gs_position", 1)
    assert best.heads[0] == sweep.heads[int(sweep.group_gs[:, 0].argmax())]


def test_dropped_mass_stands_beside_every_label() -> None:
    model = tiny("bridge", "gpt2")
    basis = decompose(model, tokens(batch=24, length=20, seed=2), progress=False)
    prompts = tokens(batch=2, length=18, seed=7)
    split, sweep = (
        split_scores(model, prompts, basis),
        sweep_heads(model, prompts, basis, progress=False),
    )
    expected = split.pattern()[:, :, 1:, 0].mean((0, 2)).tolist()
    for table in (split.shares(), sweep, sweep.shares(), split.shares().marginals()):
        frame: Any = table.to_dataframe()
        first = frame.groupby(["layer", "head"]).dropped_mass.first()
        assert first.tolist() == pytest.approx(expected, abs=1e-6)
        assert "dropped_mass" in table.text(limit=3).splitlines()[1]
        assert "dropped_mass" in table._repr_html_()
    names = list(sweep.columns())
    assert names.index("dropped_mass") < names.index("previous")
    kept = split.shares(drop=0).to_dataframe()
    assert kept.dropped_mass.tolist() == [0.0] * len(kept)
