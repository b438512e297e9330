"""Shares of the terms of attention scores: contraction against matrices against numpy, laws, and
degenerate heads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.scores.dense import share_sums_dense, terms
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Provenance
from tl_geometry.base.rows import causal_mask, row_center
from tl_geometry.scores.share_table import ShareTable
from tl_geometry.scores.sums import (
    BLOCK,
    ShareSums,
    share_sums,
)
from tl_geometry.scores.terms import GROUPS, group_of, term_names

pytestmark = pytest.mark.once

PARTS = ("bias", "pos", "cvec")


def draw(*shape: int, seed: int = 0, offset: float = 2.0) -> Tensor:
    """Correlated float64 numbers with a mean, so that centring has something to do."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x + offset * torch.randn(
        shape[-1], generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
    )


def numpy_shares(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray, drop: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """cs and es of one head, cell by cell, from the definitions. q, k [part context position
    d_head]."""
    parts, contexts, length, _ = q.shape
    numerator, energy, total = np.zeros((parts, parts)), np.zeros((parts, parts)), 0.0
    for c, i in itertools.product(range(contexts), range(drop, length)):
        keys = [j for j in range(drop, length) if mask[i, j]]
        rows = {
            (a, b): np.array([q[a, c, i] @ k[b, c, j] for j in keys])
            for a in range(parts)
            for b in range(parts)
        }
        rows = {n: r - r.mean() for n, r in rows.items()} if keys else {}
        score = sum(rows.values(), np.zeros(len(keys)))
        total += float(score @ score)
        for (a, b), row in rows.items():
            numerator[a, b] += row @ score
            energy[a, b] += row @ row
    return numerator.ravel() / total, energy.ravel() / energy.sum()


def masks(length: int) -> dict[str, Tensor]:
    causal = causal_mask(length)
    sliding = causal & ~causal.roll(5, 0).tril(-5)
    scattered = torch.rand(2, length, length, generator=torch.Generator().manual_seed(3)) < 0.4
    return {
        "causal": causal,
        "full": torch.ones_like(causal),
        "sliding": sliding,
        "scattered": scattered,
    }


@pytest.mark.parametrize("name", ["causal", "full", "sliding", "scattered"])
@pytest.mark.parametrize("drop", [0, 3])
@pytest.mark.parametrize("with_bias", [False, True])
def test_contraction_equals_matrices(name: str, drop: int, with_bias: bool) -> None:
    length = 2 * BLOCK + 21
    q, k, mask = draw(3, 2, length, 2, 5), draw(3, 2, length, 2, 5, seed=7), masks(length)[name]
    bias = draw(2, length, length, seed=9) if with_bias else None
    matrices = terms(q, k).flatten(0, 1)
    if bias is not None:
        matrices = torch.cat([matrices, bias.expand(1, 2, -1, -1, -1)])
    dense = share_sums_dense(matrices, mask if mask.dim() == 2 else mask.unsqueeze(1), drop=drop)
    fast = share_sums(q, k, mask, bias=bias, drop=drop)
    for field in ("numerators", "energies", "total", "cells"):
        ours, expected = getattr(fast, field), getattr(dense, field)
        assert torch.allclose(
            ours, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max())
        ), field


def test_shares_equal_numpy_cell_by_cell() -> None:
    q, k = draw(3, 2, 11, 1, 4), draw(3, 2, 11, 1, 4, seed=5)
    sums = share_sums(q, k, drop=2).pooled()
    cs, es = numpy_shares(
        q[..., 0, :].numpy(), k[..., 0, :].numpy(), causal_mask(11).numpy(), drop=2
    )
    assert np.allclose(sums.cs[0], cs, atol=1e-12)
    assert np.allclose(sums.es[0], es, atol=1e-12)
    uncentred = np.einsum(
        "acie,bcje->abij", q[:, :, 2:, 0].numpy(), k[:, :, 2:, 0].numpy()
    ).reshape(9, -1)
    assert not np.allclose(
        (uncentred * uncentred.sum(0)).sum(1) / (uncentred.sum(0) ** 2).sum(), cs, atol=0.01
    ), "centring matters here"


@given(
    seed=st.integers(0, 1000),
    parts=st.integers(1, 4),
    drop=st.integers(0, 4),
    name=st.sampled_from(["causal", "full", "sliding"]),
)
def test_shares_sum_to_one_and_energies_are_shares(
    seed: int, parts: int, drop: int, name: str
) -> None:
    sums = share_sums(
        draw(parts, 2, 9, 2, 3, seed=seed),
        draw(parts, 2, 9, 2, 3, seed=seed + 50),
        masks(9)[name],
        drop=drop,
    ).pooled()
    assert torch.allclose(sums.cs.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(sums.es.sum(-1), torch.ones(2, dtype=torch.float64), atol=1e-10)
    assert (sums.es >= -1e-12).all()


@given(seed=st.integers(0, 1000))
def test_what_softmax_ignores_the_shares_ignore(seed: int) -> None:
    q, k = draw(3, 2, 8, 2, 4, seed=seed), draw(3, 2, 8, 2, 4, seed=seed + 50)
    shifted = share_sums(q, k + draw(3, 2, 1, 2, 4, seed=seed + 9)).pooled()
    assert torch.allclose(shifted.cs, share_sums(q, k).pooled().cs, atol=1e-10)
    changed = share_sums(q + draw(3, 2, 1, 2, 4, seed=seed + 9), k).pooled()
    assert not torch.allclose(changed.cs, share_sums(q, k).pooled().cs, atol=1e-3), (
        "the same shift of the queries is not a gauge"
    )


def test_sums_merge_in_any_partition() -> None:
    q, k = draw(3, 5, 12, 2, 4), draw(3, 5, 12, 2, 4, seed=3)
    whole = share_sums(q, k).pooled()
    halves = share_sums(q[:, :2], k[:, :2]).pooled() + share_sums(q[:, 2:], k[:, 2:]).pooled()
    tight = share_sums(q, k, working_set=1).pooled()
    spliced = ShareSums.cat(
        [share_sums(q[:, :1], k[:, :1]), share_sums(q[:, 1:], k[:, 1:])]
    ).pooled()
    for other in (halves, tight, spliced):
        assert torch.allclose(other.cs, whole.cs, atol=1e-12)
        assert torch.allclose(other.energies, whole.energies, rtol=1e-12)
        # rows of 2 to 12 keys in each of five contexts
        assert other.cells.tolist() == whole.cells.tolist() == [5 * 77] * 2
    average = torch.stack(
        [share_sums(q[:, c : c + 1], k[:, c : c + 1]).pooled().cs for c in range(5)]
    ).mean(0)
    assert not torch.allclose(average, whole.cs, atol=1e-4), (
        "a mean of ratios is not the ratio of sums"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_stays_close(dtype: torch.dtype) -> None:
    q, k = draw(3, 2, 100, 2, 8).to(dtype), draw(3, 2, 100, 2, 8, seed=4, offset=30).to(dtype)
    exact = share_sums(q.double(), k.double()).pooled()
    ours = share_sums(q, k).pooled()
    assert (ours.cs - exact.cs).abs().max() < 1e-5
    assert (ours.es / exact.es - 1).abs().max() < 1e-4
    assert ours.numerators.dtype == torch.float64


def test_a_planted_dominant_term_is_found() -> None:
    torch.manual_seed(0)
    q, k = 0.1 * torch.randn(3, 4, 30, 2, 8), 0.1 * torch.randn(3, 4, 30, 2, 8)
    q[1, :, :, 0], k[1, :, :, 0] = (
        torch.randn(30, 8),
        torch.randn(30, 8),
    )  # head 0: position to position
    q[2, :, :, 1], k[2, :, :, 1] = (
        torch.randn(4, 30, 8),
        torch.randn(4, 30, 8),
    )  # head 1: content to content
    table = table_of(share_sums(q, k))
    assert table.dominant == ("pos-pos", "cvec-cvec")
    assert table.by_group.labels == ("position", "content")
    assert (table.margin > 0.8).all()


def table_of(sums: ShareSums, **fields: Any) -> ShareTable:
    heads = tuple((0, h) for h in range(sums.total.shape[-1]))
    return ShareTable(
        provenance=Provenance(), heads=heads, parts=PARTS, sums=sums.pooled(), **fields
    )


def test_uniform_heads_are_nan_and_labelled_and_others_are_not() -> None:
    q, k = draw(3, 2, 20, 2, 4).float(), draw(3, 2, 20, 2, 4, seed=2).float()
    k[:, :, :, 0] = k[:, :, :1, 0]  # the same key everywhere: nothing to choose between
    table = table_of(share_sums(q, k))
    assert table.dominant[0] == "uniform"
    assert table.dominant[1] != "uniform"
    assert torch.isnan(table.cs[0]).all()
    assert torch.isnan(table.margin[0])
    assert not torch.isnan(table.cs[1]).any()
    assert table_of(share_sums(torch.zeros_like(q), k)).dominant == ("uniform", "uniform")


def test_groups_partition_the_terms() -> None:
    names = term_names(("bias", "pos", "ctx", "resid"), alibi=True)
    groups = {g: [n for n in names if group_of(n) == g] for g in GROUPS}
    assert sorted(itertools.chain(*groups.values())) == sorted(names)
    assert groups["position"] == ["bias-bias", "bias-pos", "pos-bias", "pos-pos", "alibi-alibi"]
    assert groups["content"] == ["ctx-ctx", "ctx-resid", "resid-ctx", "resid-resid"]
    table = table_of(share_sums(draw(3, 2, 9, 2, 4), draw(3, 2, 9, 2, 4, seed=3)))
    assert torch.allclose(table.group_cs.sum(-1), torch.ones(2, dtype=torch.float64))
    position = [
        table.cs[:, table.terms.index(t)] for t in ("bias-bias", "bias-pos", "pos-bias", "pos-pos")
    ]
    assert torch.allclose(table.group_cs[:, 0], torch.stack(position).sum(0))


def test_table_round_trip_and_dataframe(tmp_path: Path) -> None:
    sums = share_sums(draw(3, 4, 9, 2, 4), draw(3, 4, 9, 2, 4, seed=3))
    table = table_of(sums, dropped_mass=torch.tensor([0.25, 0.5]), drop=1)
    frame = table.to_dataframe()
    assert len(frame) == 2 * (9 + 3)
    assert frame[frame.term.notna()].groupby("head").cs.sum().tolist() == pytest.approx([1, 1])
    assert frame[frame.group.notna()].groupby("head").cs.sum().tolist() == pytest.approx([1, 1])
    assert float(
        frame[(frame.term == "pos-cvec") & (frame["head"] == 1)].cs.iloc[0]
    ) == pytest.approx(float(table.cs[1, 5]))
    again = ShareTable.load(table.save(tmp_path / "shares.safetensors"))
    assert again.terms == table.terms
    assert again.heads == table.heads
    assert torch.equal(again.cs, table.cs)
    assert again.dominant == table.dominant


def test_errors_say_what_came() -> None:
    q = draw(3, 2, 9, 2, 4)
    with pytest.raises(GeometryError, match=r"drop: expected 0 to 8 of 9 positions, got 9"):
        share_sums(q, q, drop=9)
    with pytest.raises(
        GeometryError,
        match=r"allowed: expected bool \[query key\] or \[batch query key\] of 9 positions, "
        "got bool tensor",
    ):
        share_sums(q, q, causal_mask(8))


def test_row_centring_keeps_the_pattern_and_zeroes_rows() -> None:
    scores = draw(2, 7, 7).masked_fill(~causal_mask(7), -torch.inf)
    centred = row_center(scores, causal_mask(7))
    assert torch.allclose(centred.sum(-1), torch.zeros(2, 7, dtype=torch.float64), atol=1e-12)
    masked = torch.where(causal_mask(7), centred, -torch.inf)
    assert torch.allclose(masked.softmax(-1), scores.softmax(-1))


# ---- shapes
