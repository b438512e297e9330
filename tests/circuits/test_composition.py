"""Composition on data: the shares of each side sum to one and are those of the split, the nulls are
what they say, and the weight-only score is TransformerLens's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import tl_geometry as tlg
from tests.lib.models import HAS_HOOKED, loadable, tiny, tiny_hooked, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.head_readers import Reader
from tl_geometry.circuits.writer_edges import HEAD_SIDES, Composition, composition
from tl_geometry.circuits.writer_sweep import score_cotangents
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.reader import as_view
from tl_geometry.models.writers import run_written
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.values import split_values

PROMPTS = tokens(batch=4, length=14, seed=7)


def found(model: Any, **options: Any) -> Composition:
    return composition(model, PROMPTS, progress=False, **options)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2", "neox", "gpt-oss"])
def test_shares_sum_to_one_and_are_those_of_the_split(architecture: str) -> None:
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        table = found(model, heads=["L1H2", "L1H0"])
        assert table.heads == ((1, 2), (1, 0))
        assert float((table.cs.sum(-1) - 1).abs().max()) < 1e-3
        shares = split_scores(model, PROMPTS, None, heads=table.heads, parts="writers").shares()
        marginals = shares.marginals()
        assert float((table.cs[:, :2] - marginals.cs).abs().max()) < 2e-4
        assert float((table.gs[:, :2] - marginals.gs).abs().max()) < 2e-4
        assert bool(table.gs[:, 2].isnan().all())


def test_rows_are_in_the_order_of_the_heads_asked_for() -> None:
    """Layers in any order: each row is that of the head asked for alone."""
    model, asked = tiny("bridge", "gpt2"), ("L1H2", "L0H1", "L1H0")
    together, alone = found(model, heads=asked), [found(model, heads=head) for head in asked]
    assert together.heads == ((1, 2), (0, 1), (1, 0))
    for name in ("cs", "gs", "weights", "other_cs", "other_gs"):
        for row, table in zip(getattr(together, name), alone, strict=True):
            (expected,) = getattr(table, name)
            width = expected.shape[-1]
            assert torch.allclose(row[:, :width], expected, atol=1e-6, equal_nan=True), name


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_value_side_is_the_covariance_of_the_output(architecture: str) -> None:
    model = tiny("bridge", architecture)
    table = found(model, layers=1)
    values = split_values(model, PROMPTS, None, layers=1, parts="writers")
    W_O = values.W_O if architecture == "llama" else values.W_O - values.W_O.mean(-1, keepdim=True)
    out = torch.einsum("pbihe,hed->pbihd", values.z, W_O)[1:]  # without the constants
    total = out.sum(0)
    expected = (out * total).sum((1, 2, 4)) / total.square().sum((0, 1, 3))
    assert float((table.cs[:, 2, 1:] - expected.mT).abs().max()) < 1e-4


def test_another_context_is_another_context() -> None:
    """The null from other prompts is what a split of swapped writers would give, and a writer of
    position is its own null."""
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    table = found(model, heads="L1H1")
    place = table.parts.index("pos_embed")
    assert float(table.cosine[place]) == pytest.approx(1.0)
    assert torch.allclose(table.other_cs[0, :, place], table.cs[0, :, place])
    head = table.parts.index("L0H2")
    assert float(table.cosine[head]) < 0.9
    split = split_scores(model, PROMPTS, None, heads="L1H1", parts="writers")
    scale = model.run_with_cache(PROMPTS)[1]["blocks.1.ln1.hook_scale"].unsqueeze(-1)
    k = (split.k[head] * scale).roll(1, 0) / scale  # the reader's norm stays as it is
    allowed = split.allowed[0]
    term = torch.einsum("bihe,bjhe->bhij", split.q.sum(0), k)[:, 0]
    total = split.total()[:, 0].masked_fill(~allowed, 0)
    centred = (total - total.sum(-1, keepdim=True) / allowed.sum(-1)[:, None]) * allowed
    expected = (term * centred).sum() / centred.square().sum()
    assert float(table.other_cs[0, 1, head]) == pytest.approx(float(expected), rel=1e-9)
    assert float(table.other_cs[0, 1, head]) != pytest.approx(float(table.cs[0, 1, head]))


@pytest.mark.parametrize("grain", ["writers", "blocks"])
def test_the_cosine_of_two_contexts_is_that_of_what_was_written_in_them(grain: str) -> None:
    model, writes = tiny("bridge", "qwen3", dtype=torch.float64), []
    run_written(
        as_view(model), PROMPTS, [1], lambda layer, written: writes.append(written.stacked(grain))
    )
    own = writes[0][:, :, 1:]
    products = torch.einsum("pbid,pbid->p", own, own.roll(1, 1))
    expected = products / own.square().sum((1, 2, 3))
    table = found(model, parts=grain, drop=1, draws=1)
    there = ~table.cosine.isnan()
    assert int(there.sum()) >= 3
    assert torch.allclose(table.cosine[1:][there[1:]], expected.to(table.cosine)[there[1:]])
    assert float(table.cosine[there].min()) < 0.9


def test_a_random_direction_has_no_share_but_the_spread_of_chance() -> None:
    model = tiny("bridge", "llama")
    table = found(model, layers=1, draws=8)
    constants = table.parts.index("constants")  # Llama has none
    assert not bool(table.random_cs[..., constants].any())
    rest = [i for i in range(1, len(table.parts)) if i != constants]
    random = table.random_cs[:, :2, rest]
    assert bool((random > 0).all())
    assert float(random.mean()) < float(table.cs[:, :2, rest].abs().mean())
    again = found(model, layers=1, draws=8)
    assert torch.equal(table.random_cs[..., 1:], again.random_cs[..., 1:])
    other = found(model, layers=1, draws=8, seed=1)
    assert not torch.equal(table.random_cs[..., 1:], other.random_cs[..., 1:])


def test_the_random_null_is_that_of_random_orthogonal_maps() -> None:
    """Against writers that are turned, and against the mean over all maps, |M| / sqrt(d_model)."""
    model = tiny("bridge", "llama", dtype=torch.float64)
    layers: list[tuple[LayerView, Tensor]] = []
    view = as_view(model)
    run_written(
        view, PROMPTS, [1], lambda layer, written: layers.append((layer, written.stacked()))
    )
    [(layer, writes)] = layers
    cotangents = score_cotangents(layer, 1)
    reader = Reader.of(layer, "k", cotangents.key)
    reads = torch.einsum("nbihe,dhe->nhbid", reader.cotangents, reader.matrix)[0]
    M = torch.einsum("pbid,hbif->hpdf", writes, reads)
    total = cotangents.total[0].sum(0)[:, None]

    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(400, view.d_model, view.d_model, generator=generator).double()
    Q, R = torch.linalg.qr(maps)
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform only with these signs
    turned = torch.einsum("rfd,hpdf->rhp", Q, M) / total
    expected = M.square().sum((-2, -1)).div(view.d_model).sqrt() / total
    sizes = turned.square().mean(0).sqrt()
    wrote = expected > 0  # Llama has no constants
    # 400 squares of nearly normal numbers: 3.5% of the root
    assert float((sizes / expected - 1)[wrote].abs().max()) < 0.15

    found_null = found(model, layers=1, draws=4000, drop=1).random_cs[:, 1, 1:]
    # squares of products of two normals have a heavier tail: 2.4% at most
    assert float((found_null / expected - 1)[wrote].abs().max()) < 0.1
    assert not bool(found_null[~wrote].any())


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@torch.no_grad()
def test_weight_only_scores_are_those_of_transformerlens() -> None:
    model = tiny_hooked(attn_only=True, normalization_type=None)
    table = found(model, layers=1)
    first = table.parts.index("L0H0")
    for side, letter in zip(HEAD_SIDES, "QKV", strict=True):
        theirs: Tensor = model.all_composition_scores(letter)[0, :, 1, :]  # writer, reader
        mine = table.weights[:, HEAD_SIDES.index(side), first : first + 4].mT
        assert torch.allclose(mine.float(), theirs, atol=1e-4), side


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_weight_only_scores_are_the_same_for_raw_and_folded(architecture: str) -> None:
    tables = [found(tiny(*_way(way, architecture)), layers=1) for way in loadable(architecture)]
    for table in tables[1:]:
        known = ~tables[0].weights.isnan()
        assert torch.equal(known, ~table.weights.isnan())
        assert torch.allclose(table.weights[known], tables[0].weights[known], atol=1e-5)


def _way(way: tuple[str, bool], architecture: str) -> tuple[str, str, bool]:
    return way[0], architecture, way[1]


def test_edges_and_rows() -> None:
    table = found(tlg.zoo.embedded(), heads=["L1H0", "L2H1"])
    edges = table.edges(n=5)
    assert [abs(e[3]) for e in edges] == sorted((abs(e[3]) for e in edges), reverse=True)
    assert all(writer[:1] == "L" for writer, *_ in table.edges(side="key", writers="heads"))
    assert not any(row[0] == 1 and row[3] == "L1H0" for row in table.rows())
    assert any(row[0] == 2 and row[3] == "L1H0" for row in table.rows())
    blocks = found(tlg.zoo.embedded(), heads="L2H1", parts="blocks")
    assert "attn1" in blocks.parts
    assert float((blocks.cs.sum(-1) - 1).abs().max()) < 1e-3


@pytest.mark.parametrize("parts", ["writers", "blocks"])
def test_rows_and_edges_by_loops(parts: str) -> None:
    table = found(tiny("bridge", "gpt2"), heads=["L1H2", "L0H1", "L1H0"], parts=parts)
    names = ("cs", "cs_low", "cs_high", "gs", "gs_low", "gs_high", "weights")
    names += ("other_cs", "other_gs", "random_cs", "random_gs")
    read = [
        (h, s, p)
        for h, (layer, _) in enumerate(table.heads)
        for s in range(3)
        for p in range(len(table.parts))
        if table.wrote[p] < layer
    ]
    order = sorted(read, key=lambda at: (*at[:2], -abs(float(table.cs[at]))))
    expected = [
        (
            *table.heads[h],
            HEAD_SIDES[s],
            table.parts[p],
            *(float(getattr(table, name)[h, s, p]) for name in names),
            float(table.cosine[p]),
        )
        for h, s, p in order
    ]
    columns = ["layer", "head", "side", "writer", *names, "cosine"]
    assert list(table.columns()) == columns
    assert str(table.rows()) == str(expected)  # as texts, NaN equals NaN
    assert table.wrote[0] == table.writer_heads[0] == -1
    for share in ("cs", "gs"):
        for side in (None, *HEAD_SIDES):
            for writers in ("all", "heads"):
                edges = [
                    (table.parts[p], f"L{l}H{head}", HEAD_SIDES[s], value)
                    for h, s, p in read
                    for l, head in [table.heads[h]]
                    for value in [float(getattr(table, share)[h, s, p])]
                    if p > 0 and value == value and side in (None, HEAD_SIDES[s])
                    if writers == "all" or "H" in table.parts[p]
                ]
                edges.sort(key=lambda edge: -abs(edge[3]))
                options: dict[str, Any] = {"share": share, "side": side, "writers": writers}
                assert table.edges(**options, n=1000) == edges
                assert table.edges(**options) == edges[:20]
    assert table.edges(n=3) == table.edges(share="cs", side=None, writers="all", n=3)
    assert table.place("L0H1") == (0, 1)
    assert table.place("embed") == (-1, -1)
    last = "L0H3" if parts == "writers" else "mlp0"
    assert table.place(last) == ((0, 3) if parts == "writers" else (0, -1))
    if parts == "blocks":
        assert all(bool(table.weights[at].isnan()) for at in read)


def test_one_prompt_has_no_null() -> None:
    with pytest.raises(GeometryError, match="at least 2 prompts"):
        composition(tiny("bridge", "gpt2"), PROMPTS[:1], progress=False)
    with pytest.raises(GeometryError, match="at least 2 prompts"):
        found(tiny("bridge", "gpt2"), batch_size=1)


@pytest.mark.parametrize("architecture", ["gpt2", "qwen3", "gemma2", "bloom"])
def test_chosen_queries_are_rows_of_the_split(architecture: str) -> None:
    """Against scores as matrices."""
    model, queries = tiny(loadable(architecture)[0][0], architecture), [5, 9, 13]
    table = found(model, heads=["L1H2", "L1H0"], queries=[5, 9, -1], drop=2)
    assert table.queries == (5, 9, 13)
    split = split_scores(model, PROMPTS, None, heads=table.heads, parts="writers")
    allowed = split.allowed[0][queries, 2:]
    n_keys = allowed.sum(-1, keepdim=True)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(allowed, x[..., queries, 2:].double(), 0.0)
        return torch.where(allowed, x - x.sum(-1, keepdim=True) / n_keys, 0.0)

    total, raw = centred(split.total()), split.total()[..., queries, 2:].double()
    cap = float(split.softcap[0])
    capped = cap * torch.tanh(raw / cap) if cap < torch.inf else raw
    moved = capped.masked_fill(~allowed, -torch.inf).softmax(-1) - allowed / n_keys
    for weight, shares in ((total, table.cs), (moved, table.gs)):
        size = (weight * total).sum((0, 2, 3))
        for part, name in enumerate(split.parts):
            for side in (0, 1):
                q, k = (
                    x[part] if side == at else x.sum(0) for at, x in enumerate((split.q, split.k))
                )
                term = centred(torch.einsum("bihe,bjhe->bhij", q, k))
                expected = (weight * term).sum((0, 2, 3)) / size
                at = table.parts.index(name)
                assert float((shares[:, side, at] - expected).abs().max()) < 2e-4
    assert float((table.cs.sum(-1) - 1).abs().max()) < 1e-3 or architecture == "bloom"


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_value_side_of_chosen_queries_is_the_covariance_of_their_output(
    architecture: str,
) -> None:
    model = tiny("bridge", architecture)
    table, pooled = found(model, layers=1, queries=[4, 13]), found(model, layers=1)
    values = split_values(model, PROMPTS, None, layers=1, parts="writers")
    W_O = values.W_O if architecture == "llama" else values.W_O - values.W_O.mean(-1, keepdim=True)
    out = torch.einsum("pbihe,hed->pbihd", values.z[:, :, [4, 13]], W_O)[1:]
    total = out.sum(0)
    expected = (out * total).sum((1, 2, 4)) / total.square().sum((0, 1, 3))
    assert float((table.cs[:, 2, 1:] - expected.mT).abs().max()) < 1e-4
    assert float((table.cs - pooled.cs).abs().max()) > 1e-2


def test_all_queries_chosen_are_all_queries() -> None:
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    chosen, pooled = found(model, queries=range(1, 14), drop=1), found(model, drop=1)
    for name in ("cs", "gs", "weights", "other_cs", "other_gs", "random_cs", "random_gs"):
        assert torch.allclose(getattr(chosen, name), getattr(pooled, name), equal_nan=True), name


def test_queries_that_are_not_there_are_refused() -> None:
    model = tiny("bridge", "gpt2")
    with pytest.raises(GeometryError, match="queries from 3 on"):
        found(model, queries=2, drop=3)
    with pytest.raises(GeometryError, match="an index from 0 to 13"):
        found(model, queries=14)
    with pytest.raises(GeometryError, match="position: expected one of"):
        found(model, queries="end")


MANY = tokens(batch=16, length=12, seed=3)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_intervals_are_a_jackknife_over_groups_of_prompts(architecture: str) -> None:
    """By hand: the table of all prompts but two, for each of eight pairs. Batches of 5 cut through
    the pairs."""
    model = tiny("bridge", architecture)
    options: dict[str, Any] = {"layers": 1, "drop": 1, "draws": 1, "progress": False}
    table = composition(model, MANY, batch_size=5, **options)
    without = [
        composition(model, torch.cat([MANY[:i], MANY[i + 2 :]]), **options)
        for i in range(0, len(MANY), 2)
    ]
    for share in ("cs", "gs"):
        left_out = torch.stack([getattr(t, share) for t in without])
        whole = getattr(table, share)
        value = 8 * whole - 7 * left_out.mean(0)
        error = (7 / 8 * (left_out - left_out.mean(0)).square().sum(0)).sqrt()
        reach = float(stats.t.ppf(0.975, 7)) * error
        low, high = getattr(table, f"{share}_low"), getattr(table, f"{share}_high")
        assert torch.equal(low.isnan(), whole.isnan())
        assert torch.allclose(low, value - reach, atol=1e-4, equal_nan=True)
        assert torch.allclose(high, value + reach, atol=1e-4, equal_nan=True)
        assert float(error[:, :2].max()) > 1e-3  # the prompts differ


def test_prompts_that_are_alike_have_no_spread_and_few_have_no_interval() -> None:
    model = tiny("bridge", "llama")
    alike = composition(model, MANY[:1].repeat(16, 1), layers=1, progress=False)
    assert float((alike.cs_high - alike.cs_low).abs().max()) < 1e-5
    assert float((alike.cs_high - alike.cs).abs().max()) < 1e-5
    table = composition(model, MANY[:9], layers=1, progress=False)
    assert bool(table.cs_low.isnan().all())
    assert not bool(table.cs[:, :2].isnan().any())
    assert not bool(composition(model, MANY[:10], layers=1, progress=False).cs_low.isnan().any())
