"""Laws of who wrote what heads read (SPEC M): shares by writer are those of a decoder written out
in float64 and of the split; nulls and intervals are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import tl_geometry as tlg
from tests.lib import kinds
from tests.lib.dense import marginals
from tests.lib.double import InDouble, exact
from tests.lib.models import HAS_HOOKED, D, loadable, tiny, tiny_hooked, tokens
from tests.lib.reference import scores as reference

PROMPTS, MANY = tokens(batch=4, length=14, seed=7), tokens(batch=16, length=12, seed=3)
SIDES = ("query", "key", "value")
QUIET: dict[str, Any] = {"progress": False}


def swept(model: Any, prompts: Tensor = PROMPTS, parts: str = "writers", **options: Any) -> Any:
    return tlg.sweep_heads(model, prompts, parts=parts, **QUIET, **options)  # pyright: ignore


def composed(model: Any, prompts: Tensor = PROMPTS, **options: Any) -> Any:
    return tlg.composition(model, prompts, **QUIET, **options)


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def refused(call: Any, kind: type[Exception] = tlg.GeometryError) -> Any:
    with pytest.raises(kind) as caught:
        call()
    return caught.value.what  # pyright: ignore[reportAttributeAccessIssue]


# ---- shares by writer


@pytest.mark.parametrize("grain", ["writers", "blocks"])
@pytest.mark.parametrize("kind", kinds.KINDS)
def test_shares_are_those_of_the_explicit_decoder(kind: str, grain: str) -> None:
    """In float64, by a route that shares nothing with the library; a position left out."""
    with InDouble():
        options: dict[str, Any] = {"heads": ["L1H2", "L0H1"], "drop": 1, "draws": 1}
        table = composed(exact(kind), kinds.PROMPTS, parts=grain, **options)
    decoder, run = kinds.decoder(kind), kinds.run(kind)
    for row, (layer, head) in enumerate(table.heads):
        parts = reference.writers(decoder, run, layer)
        parts = parts if grain == "writers" else reference.by_block(parts)
        of_layer = reference.terms(decoder, run, layer, parts)
        shares = reference.head_shares(decoder, of_layer, layer, head, drop=1)
        for side in (0, 1):
            for ours, expected in zip((table.cs, table.gs), shares.marginal(side), strict=True):
                for name, value in expected.items():
                    if name in table.parts:  # ALiBi is a part of scores alone
                        own = float(ours[row, side, table.parts.index(name)])
                        assert own == pytest.approx(value, rel=1e-8, abs=1e-9), (name, side)


@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "neox", "qwen3", "gemma2", "gpt-oss"])
def test_sweep_and_composition_are_marginals_of_the_split(architecture: str) -> None:
    """In every class and loading, raw and folded weights with the same writers."""
    found: list[Any] = []
    for kind, processed in loadable(architecture):
        model = tiny(kind, architecture, processed)
        summed = marginals(tlg.split_scores(model, PROMPTS, layers=1, parts="writers").shares())
        sweep, table = swept(model, layers=1), composed(model, heads=["L1H2", "L1H0"])
        assert sweep.parts == summed.parts
        assert table.heads == ((1, 2), (1, 0))
        width = len(table.parts)
        for name in ("cs", "gs"):
            ours, theirs = getattr(sweep, name), getattr(summed, name)
            assert far(ours, theirs) < 2e-4
            assert far(getattr(table, name)[:, :2], theirs[[2, 0], :, :width]) < 2e-4
            assert far(ours.sum(-1), torch.ones(())) < 1e-3
        assert float(sweep.cs.abs().max()) > 0.1
        assert far(table.cs[:, 2].sum(-1), torch.ones(())) < 1e-3
        assert bool(table.gs[:, 2].isnan().all())
        found.append(sweep)
    assert all(far(one.cs, found[0].cs) < 5e-5 for one in found)


def test_steps_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model's writes are formed a few positions at a time, and not kept."""
    model, names = tiny("bridge", "gemma2", dtype=torch.float64), ("cs", "gs", "other_gs", "cosine")
    whole, sweep = composed(model, drop=3), swept(model)
    for size in (1, 2**17):
        monkeypatch.setattr("tl_geometry.circuits.head_readers.WORKING_SET", size)
        parts = composed(model, drop=3)
        for name in names:
            here, there = getattr(parts, name), getattr(whole, name)
            assert torch.allclose(here, there, rtol=1e-9, atol=1e-9, equal_nan=True), name
        assert far(swept(model).cs, sweep.cs) < 1e-9


def test_batches_do_not_matter_and_dropped_positions_are_those_of_the_basis() -> None:
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    assert far(swept(model).cs, swept(model, batch_size=1).cs) < 1e-9
    basis = tlg.decompose(model, tokens(24, 14, seed=2), window=(3, 14), **QUIET)
    sweep = swept(model, basis=basis)
    summed = marginals(tlg.split_scores(model, PROMPTS, basis, parts="writers").shares())
    assert sweep.drop == 3
    assert far(sweep.cs, summed.cs) < 1e-9
    assert far(sweep.cs, swept(model).cs) > 0.01


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
@pytest.mark.parametrize("queries", [None, [4, 13]], ids=["all", "chosen"])
def test_the_value_side_is_the_covariance_of_the_output(
    architecture: str, queries: list[int] | None
) -> None:
    model = tiny("bridge", architecture)
    table = composed(model, layers=1, queries=queries)
    values = tlg.split_values(model, PROMPTS, layers=1, parts="writers")
    W_O = values.W_O if architecture == "llama" else values.W_O - values.W_O.mean(-1, keepdim=True)
    z = values.z[:, :, slice(None) if queries is None else queries]
    out = torch.einsum("pbihe,hed->pbihd", z, W_O)[1:]  # without the constants
    total = out.sum(0)
    expected = (out * total).sum((1, 2, 4)) / total.square().sum((0, 1, 3))
    assert far(table.cs[:, 2, 1:], expected.mT) < 1e-4
    assert queries is None or far(table.cs, composed(model, layers=1).cs) > 1e-2


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_chosen_queries_are_rows_of_the_split(architecture: str) -> None:
    model, queries = tiny(loadable(architecture)[0][0], architecture), [5, 9, 13]
    table = composed(model, heads=["L1H2", "L1H0"], queries=[5, 9, -1], drop=2)
    assert table.queries == (5, 9, 13)
    split = tlg.split_scores(model, PROMPTS, heads=table.heads, parts="writers")
    allowed = split.allowed[0][queries, 2:]
    n_keys, cap = allowed.sum(-1, keepdim=True), float(split.softcap[0])
    total = torch.where(allowed, split.total()[..., queries, 2:].double(), 0.0)
    p = (cap * torch.tanh(total / cap) if cap < torch.inf else total).masked_fill(~allowed, -1e30)
    centred = torch.where(allowed, total - total.sum(-1, keepdim=True) / n_keys, 0.0)
    for weight, shares in ((centred, table.cs), (p.softmax(-1) - allowed / n_keys, table.gs)):
        for part, name in enumerate(split.parts):
            for side in (0, 1):
                q, k = (
                    x[part] if side == n else x.sum(0) for n, x in enumerate((split.q, split.k))
                )
                term = torch.einsum("bihe,bjhe->bhij", q, k)[..., queries, 2:].double()
                expected = (weight * term).sum((0, 2, 3)) / (weight * centred).sum((0, 2, 3))
                assert far(shares[:, side, table.parts.index(name)], expected) < 2e-4
    pooled, named = composed(model, drop=1), composed(model, queries=range(1, 14), drop=1)
    assert far(pooled.other_cs.nan_to_num(), named.other_cs.nan_to_num()) < 1e-5


# ---- nulls and intervals


@torch.no_grad()
def test_another_context_is_another_context() -> None:
    """The null from other prompts is what a split of swapped writers would give, and a writer of
    position is its own null."""
    model = tiny("bridge", "gpt2", dtype=torch.float64)
    table = composed(model, heads="L1H1")
    place, head = table.parts.index("pos_embed"), table.parts.index("L0H2")
    assert float(table.cosine[place]) == pytest.approx(1.0)
    assert torch.allclose(table.other_cs[0, :, place], table.cs[0, :, place])
    split = tlg.split_scores(model, PROMPTS, heads="L1H1", parts="writers")
    cache = model.run_with_cache(PROMPTS)[1]
    scale = cache["blocks.1.ln1.hook_scale"].unsqueeze(-1)
    k = (split.k[head] * scale).roll(1, 0) / scale  # the reader's norm stays as it is
    allowed = split.allowed[0]
    term = torch.einsum("bihe,bjhe->bhij", split.q.sum(0), k)[:, 0]
    total = split.total()[:, 0].masked_fill(~allowed, 0)
    centred = (total - total.sum(-1, keepdim=True) / allowed.sum(-1)[:, None]) * allowed
    expected = (term * centred).sum() / centred.square().sum()
    assert float(table.other_cs[0, 1, head]) == pytest.approx(float(expected), rel=1e-9)
    assert float(table.other_cs[0, 1, head]) != pytest.approx(float(table.cs[0, 1, head]))


@torch.no_grad()
def test_the_random_null_is_that_of_random_orthogonal_maps() -> None:
    """Against splits in which a writer is turned."""
    model = tiny("bridge", "llama", dtype=torch.float64)
    table = composed(model, layers=1, draws=4000)
    cache = model.run_with_cache(PROMPTS)[1]
    h, wrote = cache["resid_pre", 1], cache["z", 0][:, :, 1] @ model.blocks[0].attn.W_O[1]
    written = table.parts.index("L0H1")
    for drop in (0, 3):
        own = wrote[:, drop:]
        cosine = float((own * own.roll(1, 0)).sum() / own.square().sum())
        found = composed(model, layers=1, drop=drop, draws=1).cosine[written]
        assert float(found) == pytest.approx(cosine, rel=1e-9)
        assert abs(cosine) < 0.9
    generator, squares = torch.Generator().manual_seed(0), []
    for _ in range(4):
        Q, R = torch.linalg.qr(torch.randn(50, D, D, generator=generator).double())
        Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # uniform only with these signs
        parts = {f"r{i}": wrote @ turn for i, turn in enumerate(Q)}
        parts["rest"] = h - sum(parts.values())
        summed = marginals(tlg.split_scores(model, PROMPTS, layers=1, parts=parts).shares())
        drawn = torch.stack([summed.cs, summed.gs])[..., 1:-1]
        squares.append(drawn.square().mean(-1))
    for found, expected in zip(
        (table.random_cs, table.random_gs), torch.stack(squares).mean(0).sqrt(), strict=True
    ):
        # 200 squares of nearly normal numbers: 5% of the root; ours: 2.4% at most
        assert far(found[:, :2, written] / expected, torch.ones(())) < 0.2
    assert not bool(table.random_cs[..., table.parts.index("constants")].any())  # Llama has none
    few = [composed(model, layers=1, draws=8, seed=seed).random_cs[..., 1:] for seed in (0, 0, 1)]
    assert torch.equal(few[0], few[1])
    assert not torch.equal(few[0], few[2])


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@torch.no_grad()
def test_weight_only_scores_are_those_of_transformerlens() -> None:
    model = tiny_hooked(attn_only=True, normalization_type=None)
    table = composed(model, layers=1)
    first = table.parts.index("L0H0")
    for side, letter in enumerate("QKV"):
        theirs: Tensor = model.all_composition_scores(letter)[0, :, 1, :]  # writer, reader
        assert torch.allclose(
            table.weights[:, side, first : first + 4].mT.float(), theirs, atol=1e-4
        )


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_intervals_are_a_jackknife_over_groups_of_prompts(architecture: str) -> None:
    """By hand: the table of all prompts but two, for each of eight pairs. Batches of 5 cut through
    the pairs."""
    model = tiny("bridge", architecture)
    options: dict[str, Any] = {"layers": 1, "drop": 1, "draws": 1}
    table = composed(model, MANY, batch_size=5, **options)
    rest = [torch.cat([MANY[:i], MANY[i + 2 :]]) for i in range(0, len(MANY), 2)]
    without = [composed(model, prompts, **options) for prompts in rest]
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


# ---- the table


def test_rows_have_the_strongest_writers_of_a_side_first() -> None:
    table = composed(tiny("bridge", "gpt2"), heads=["L1H2", "L0H1", "L1H0"])
    assert table.heads == ((1, 2), (0, 1), (1, 0))  # in the order asked for
    rows = table.to_dataframe()
    assert len(rows) == 3 * (len(table.parts) + len(table.parts) + 4)
    assert not (rows["part"].str.startswith("L1") | (rows["part"] == "mlp1")).any()
    for (layer, head, side), of_side in rows.groupby(["layer", "head", "side"], sort=False):
        at = table.heads.index((layer, head)), SIDES.index(side)
        values = dict(zip(table.parts, table.cs[at].tolist()))
        assert of_side["cs"].tolist() == [values[part] for part in of_side["part"]]
        assert of_side["cs"].abs().is_monotonic_decreasing
