"""Laws of ``tl_geometry.decomposition``: the identities of the mean decomposition (SPEC A),
streaming equals memory under every partition, groups and their intervals (SPEC O), files and
shards."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, distributed

from tests.lib.data import random_states, refused
from tests.lib.models import tiny, tokens
from tests.lib.reference import moments as reference
from tl_geometry import PositionContext, decompose, decompose_activations
from tl_geometry.corpus import TokenWindows

pytestmark = pytest.mark.once

SIZES = {
    "contexts": st.integers(2, 9),
    "positions": st.integers(2, 8),
    "d_model": st.integers(1, 6),
    "seed": st.integers(0, 99),
}
QUIET: dict[str, Any] = {"progress": False}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    """Equal to ``tolerance`` relative to the largest entry of ``b``."""
    largest = b.abs().max().clamp(min=1e-30)
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * largest)


def ctx_of(basis: PositionContext) -> Tensor:
    assert basis.ctx is not None
    return basis.ctx


def assert_same(a: PositionContext, b: PositionContext, tolerance: float = 1e-10) -> None:
    """Everything that two bases of the same contexts in the same groups hold."""
    assert (a.states, a.window, a.contexts) == (b.states, b.window, b.contexts)
    assert torch.equal(a.group_counts, b.group_counts)
    assert close(a.moments.sums, b.moments.sums, tolerance)
    assert close(ctx_of(a), ctx_of(b), tolerance)
    mine, theirs = a.anova(), b.anova()
    for name in ("total", "pos", "ctx", "resid", "top_share"):
        assert close(getattr(mine, name), getattr(theirs, name), tolerance), name
    for name, values in mine.intervals.items():
        assert torch.allclose(values, theirs.intervals[name], rtol=1e-6, equal_nan=True), name
    assert close(a.largest["norm"], b.largest["norm"], tolerance)
    for name in ("context", "position", "coordinate"):
        assert torch.equal(a.largest[name], b.largest[name]), name
    # products of float32 states are float32, about the mean of the first batch
    products = tolerance if a.provenance.dtype == "float64" else max(tolerance, 1e-6)
    for state in a.states if a.has_second_moments else ():
        trace = float(b.second_moment(state, centered=False).trace())
        assert (a.second_moment(state) - b.second_moment(state)).abs().max() <= products * trace


@given(**SIZES)
def test_parts_sum_to_the_states_and_are_centred(
    contexts: int, positions: int, d_model: int, seed: int
) -> None:
    h = random_states(2, contexts, positions, d_model, seed=seed)
    parts = decompose_activations(h).transform(h)
    assert close(parts.total(), h)
    scale = 1e-10 * h.abs().max() * max(contexts, positions)
    for total in (parts.pos.sum(-2), parts.ctx.sum(-2), parts.resid.sum(-2), parts.resid.sum(-3)):
        assert total.abs().max() < scale


@given(**SIZES, start=st.integers(0, 3))
def test_sums_of_squares_are_those_of_whole_arrays(
    contexts: int, positions: int, d_model: int, seed: int, start: int
) -> None:
    h = random_states(2, contexts, positions, d_model, seed=seed)
    window = (min(start, positions - 2), positions)
    basis = decompose_activations(h, window=window)
    table = basis.anova()
    for row in range(2):
        plain = reference.decompose(h[row].numpy(), window)
        assert close(basis.mean[row], torch.from_numpy(plain.mean))
        assert close(basis.pos_seen[row], torch.from_numpy(plain.pos_seen), 1e-9)
        assert close(ctx_of(basis)[row], torch.from_numpy(plain.ctx), 1e-9)
        expected = reference.anova(h[row].numpy(), window)
        for name in ("total", "pos", "ctx", "resid"):
            found = float(getattr(table, name)[row])
            assert found == pytest.approx(
                getattr(expected, name), rel=1e-7, abs=1e-9 * expected.total
            )
        assert float(table.pos_debiased[row]) == pytest.approx(expected.pos_debiased, abs=1e-7)
        moment = torch.from_numpy(reference.second_moment(h[row].numpy(), window))
        assert close(basis.second_moment(row), moment, 1e-8)
        raw = torch.from_numpy(reference.second_moment(h[row].numpy(), window, centred=False))
        assert close(basis.second_moment(row, centered=False), raw, 1e-9)
    shares = torch.stack(list(table.shares.values())).sum(0)
    assert close(shares, torch.ones(2, dtype=torch.float64))


@given(**SIZES, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), groups=st.integers(1, 9))
def test_streaming_equals_memory_under_every_partition(
    contexts: int, positions: int, d_model: int, seed: int, sizes: list[int], groups: int
) -> None:
    """Into batches, groups and shards, in any order of merging."""
    h = random_states(2, contexts, positions, d_model, seed=seed)
    h[0, :, 0] = h[0, 0, 0]  # the same norm in every context: ties
    whole = decompose_activations(h, groups=groups, batch_size=contexts)
    assert_same(decompose_activations(h, groups=groups, batch_size=sizes[-1]), whole)
    cuts = [c for c in torch.tensor(sizes).cumsum(0).tolist() if c < contexts]
    shards = [
        decompose_activations(shard, batch_size=sizes[0], groups=groups)
        for shard in torch.tensor_split(h, cuts, dim=1)
    ]
    left = PositionContext.merge(shards)
    nested = PositionContext.merge([shards[0], PositionContext.merge(shards[1:])]) if cuts else left
    for merged in (left, nested):
        assert close(merged.mean, whole.mean)
        assert close(merged.pos_seen + merged.mean.unsqueeze(1), h.mean(1))
        assert close(ctx_of(merged), ctx_of(whole), 1e-9)
        assert close(merged.second_moment(1), whole.second_moment(1), 1e-9)
        assert close(merged.anova().total, whole.anova().total, 1e-9)
        for name, values in whole.largest.items():
            assert torch.equal(merged.largest[name], values), name
        assert merged.group_counts.sum() == contexts


def test_float32_products_stay_accurate_where_plain_ones_fail() -> None:
    """A coordinate with a mean of 3,000 and a variance of one, as in GPT-2."""
    h = torch.randn(1, 64, 16, 8, generator=torch.Generator().manual_seed(1))
    h[..., 3] += 3000
    rows = h[0].flatten(0, 1)
    exact = torch.from_numpy(reference.second_moment(h[0].numpy(), (0, 16)))
    ours = decompose_activations(h, batch_size=8)
    assert (ours.second_moment(0) - exact).abs().max() < 1e-6 * exact.trace()
    halves = [decompose_activations(x, batch_size=8) for x in (h[:, :20], h[:, 20:])]
    merged = PositionContext.merge(halves)
    assert (merged.second_moment(0) - exact).abs().max() < 1e-6 * exact.trace()
    mean = rows.double().mean(0)
    plain = (rows.T @ rows).double() - len(rows) * torch.outer(mean, mean)
    assert (plain - exact).abs().max() > 1e-3 * exact.trace()


@pytest.mark.parametrize("copies", [2, 8])
def test_a_context_counts_once(copies: int) -> None:
    model, ids = tiny("bridge", "gpt2"), tokens(12, 10)
    many = ids.repeat(copies, 1)[torch.randperm(12 * copies)]
    once, often = decompose(model, ids, **QUIET), decompose(model, many, **QUIET)
    assert often.contexts == 12
    assert once.provenance.flags == ()
    flag = f"{12 * (copies - 1)} of {12 * copies} contexts are copies of others"
    assert [f.startswith(flag) for f in often.provenance.flags] == [True]
    assert close(often.mean, once.mean, 1e-6)  # in another order
    assert close(often.anova().pos, once.anova().pos, 1e-6)
    same = decompose(model, ids[:1].repeat(9, 1), **QUIET)
    assert (same.contexts, same.anova().identifiable) == (1, False)
    # the twin: tensors of activations are taken as they are
    assert decompose_activations(random_states(1, 1, 4, 3).repeat(1, 9, 1, 1)).contexts == 9


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20), groups=st.integers(1, 9))
def test_no_group_cuts_through_a_document_unless_it_is_said(sizes: list[int], groups: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    contexts = len(labels)
    even = [c * groups // contexts for c in range(contexts)]

    def grouped(labels: Any) -> tuple[list[int], str]:
        states = torch.ones(contexts, 1, 1)
        basis = decompose_activations(states, labels=labels, groups=groups)
        of = torch.repeat_interleave(basis.group_counts).tolist()
        return of, " ".join(basis.provenance.flags)

    of, said = grouped(labels)
    assert "several groups" not in said
    if "cut through" in said or len(sizes) == 1:
        assert of == even or contexts < groups
    else:
        assert len(set(zip(of, labels.tolist(), strict=True))) == len(sizes)
        assert min(groups, 4) <= len(set(of)) <= groups
    assert grouped(None)[0] == even
    if contexts >= max(groups, 4):
        assert grouped(torch.arange(contexts))[0] == even
        # two documents turn by turn
        assert ("several groups" in grouped(torch.arange(contexts) % 2)[1]) == (groups > 1)


def test_documents_keep_their_names_and_shards_their_groups() -> None:
    h, names = random_states(1, 16, 4, 3), [f"d{c // 2}" for c in range(16)]
    whole = decompose_activations(h, labels=names)
    halves = [decompose_activations(h[:, at], labels=names[at]) for at in (slice(7), slice(7, 16))]
    for basis in (whole, PositionContext.merge(halves)):
        assert [basis.label_names[i] for i in torch.as_tensor(basis.labels)] == names
    of = torch.arange(16) // 2  # without names the documents of two shards are others
    bare = [decompose_activations(h[:, :6], labels=of[:6])]
    bare += [decompose_activations(h[:, 6:], labels=of[:10])]
    assert torch.equal(torch.as_tensor(PositionContext.merge(bare).labels), of)
    each = [decompose_activations(h[:, 4 * i : 4 * i + 4], groups=4) for i in range(4)]
    assert PositionContext.merge(each).group_counts.tolist() == [4] * 4
    uneven = decompose_activations(h[:, :7], groups=1), decompose_activations(h[:, 7:12], groups=5)
    assert PositionContext.merge(uneven).group_counts.tolist() == [0, 7, 1, 2, 2]  # each 2.4 wide


def test_sums_over_a_gibibyte_are_left_out_by_themselves() -> None:
    wide, narrow = (decompose_activations(torch.ones(1, 2, 2, width)) for width in (11_600, 8))
    assert (wide.has_second_moments, narrow.has_second_moments) == (False, True)
    assert "over 1 GiB" in " ".join(wide.provenance.flags)


def planted(contexts: int, seed: int, *, size: float = 0.2) -> Tensor:
    """Two states: noise, correlated along the window, with a positional effect of some size."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(2, contexts, 6, 5, generator=g).double().cumsum(2)
    return h + size * torch.linspace(-1, 1, 6).double()[:, None]


@pytest.mark.parametrize(("contexts", "groups"), [(20, 5), (48, 6), (50, 6)])
def test_intervals_are_those_of_decompositions_without_each_group(
    contexts: int, groups: int
) -> None:
    """Beside the jackknife by formula, over blocks of at least 8 contexts where there are four."""
    h = planted(contexts, 0)
    basis = decompose_activations(h, groups=groups)
    table, of = basis.anova(), torch.repeat_interleave(basis.group_counts)
    members = [[c for c in range(contexts) if int(of[c]) == g] for g in range(groups)]
    for row in range(2):
        shares = lambda rows, row=row: reference.anova(h[row, rows].numpy()).shares
        without = [shares(np.setdiff1d(range(contexts), group)) for group in members]
        sizes = [len(group) for group in members]
        expected = reference.jackknife(shares(range(contexts)), [(without, sizes)])
        for i, name in enumerate(("pos", "ctx", "resid")):
            value, low, high = table.intervals[name][row].tolist()
            assert value == pytest.approx(expected[0][i], rel=1e-6)
            if name == "pos" or contexts >= 32:
                assert [low, high] == pytest.approx([x[i] for x in expected[1:]], rel=1e-6)
            else:
                assert np.isnan([low, high]).all()
    corrected = torch.stack([values[:, 0] for values in table.intervals.values()]).sum(0)
    assert close(corrected, torch.ones(2).double())
    assert table.blocks == groups
    column = table.to_dataframe()["pos_corrected_low"].to_numpy()
    assert float(column[1]) == float(table.intervals["pos"][1, 1])


def test_reliability_and_the_debiased_share_tell_signal_from_noise() -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 200, 12, 16, generator=generator, dtype=torch.float64)
    table = decompose_activations(noise.expand(3, -1, -1, -1)).anova()
    assert 0.5 / 200 < table.shares["pos"][0] < 2.0 / 200  # noise leaves 1/C in the plain share
    assert table.pos_debiased[0] < 0.2 / 200
    assert abs(table.pos_reliability[0]) < 0.3
    assert "reliability" in table.remarks[0]
    assert table.provenance.flags[0].endswith("in states 0 to 2")
    curve = torch.randn(12, 16, generator=generator, dtype=torch.float64)
    signal = decompose_activations(noise + curve).anova()
    assert signal.pos_reliability[0] > 0.95
    assert abs(signal.pos_debiased[0] - 0.5) < 0.08
    assert signal.remarks == ("",)
    basis = decompose_activations(noise[0, :16] + curve, groups=2)
    halves = (range(8), range(8, 16))
    expected = reference.half_cosine((noise[0, :16] + curve).numpy(), halves)
    assert float(basis.anova().pos_reliability[0]) == pytest.approx(expected, rel=1e-9)


def test_one_context_and_one_position_have_defined_shares() -> None:
    h = random_states(1, 5, 4, 3)
    single, narrow = decompose_activations(h[:, :1]), decompose_activations(h, window=(0, 1))
    for basis, part, rest in ((single, "pos", "ctx"), (narrow, "ctx", "pos")):
        table = basis.anova()
        assert close(getattr(table, part), table.total)
        assert (float(getattr(table, rest)), float(table.resid)) == (0.0, 0.0)
        assert table.identifiable == (part == "ctx")
        for said in (table.remarks[0], *basis.flags(), str(table.pos_debiased.tolist())):
            assert ("one context" in said or "nan" in said) == (part == "pos")
    many = decompose_activations(random_states(1, 40, 4, 3)).anova(null=narrow)
    assert set(many.intervals) == {"pos", "ctx", "resid"}, "a null without intervals has none"


def massive(seed: int = 0) -> Tensor:
    """States of one norm's order, and in the first a massive token at position 3 of every tenth
    context, in coordinate 4."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(2, 40, 60, 6, generator=generator, dtype=torch.float64)
    h[0, ::10, 3, 4] = 200.0
    return h


def test_the_largest_tokens_are_those_of_the_states_themselves() -> None:
    h = massive()
    basis = decompose_activations(h, window=(1, 60), batch_size=7)
    table, norms = basis.largest_tokens().to_dataframe(), h[:, :, 1:].norm(dim=-1)
    for state in (0, 1):
        rows: Any = table[table["state"] == state]
        order = norms[state].flatten().sort(descending=True).values
        assert rows["norm"].tolist() == order[: len(rows)].tolist()
        for _, row in rows.iterrows():
            vector = h[state, int(row["context"]), int(row["position"])]
            assert float(vector.norm()) == row["norm"]
            assert int(vector.abs().argmax()) == row["coordinate"]
        squares = order.square()
        share = float(squares[:2].sum() / squares.sum())  # 0.1% of 2,360 tokens
        held = basis.sinks(state)
        assert held.share == pytest.approx(share, rel=1e-12)
        assert float(basis.anova().top_share[state]) == held.share
        shares = squares[: len(rows)] / squares.sum()
        assert rows["share"].tolist() == pytest.approx(shares.tolist())
        assert float(rows["rms"].iloc[0]) == pytest.approx(float(squares.mean().sqrt()))


def test_a_file_holds_mean_and_pos_and_all_else_only_if_asked(tmp_path: Path) -> None:
    model, ids = tiny("bridge", "gpt2"), tokens(40, 12)
    rows = TokenWindows(tokens=ids, has_bos=False, labels=torch.arange(40) // 5, corpus="mine")
    basis = decompose(model, rows, keep=3, **QUIET)
    full = PositionContext.load(basis.save(tmp_path / "full.safetensors", full=True))
    lean = PositionContext.load(basis.save(tmp_path / "lean.safetensors"))
    assert_same(full, basis, 0)
    assert full.provenance == basis.provenance
    for name in ("sample_states", "sampled", "labels", "token_hashes", "second_moment"):
        mine, theirs = (getattr(b, name) for b in (basis, full))
        mine, theirs = (x(1) if callable(x) else x for x in (mine, theirs))
        assert torch.equal(mine, theirs), name
    for name in ("mean", "pos", "pos_seen", "token_hashes"):
        assert close(getattr(lean, name), getattr(basis, name)), name
    for name in ("total", "pos", "ctx", "resid", "top_share"):
        assert close(getattr(lean.anova(), name), getattr(basis.anova(), name)), name
    assert lean.window == basis.window
    assert torch.equal(lean.pos_at(7), lean.pos_seen[:, 7])
    assert (lean.ctx, lean.sample_states, lean.has_second_moments) == (None, None, False)
    assert lean.anova().intervals == {}
    assert basis.anova().intervals
    assert any("no intervals" in flag for flag in lean.anova().provenance.flags)
    assert "full=True" in str(refused(lambda: lean.second_moment(1)).instead)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("lean", "full")]
    assert sizes[0] < sizes[1] / 4


def _one_of(rank: int, size: int, store: Path) -> None:
    """What one of several processes asserts."""
    address = f"file://{store}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    model, ids = tiny("bridge", "gpt2"), tokens(22, 9)
    options: dict[str, Any] = {"groups": 5, "batch_size": 2, "keep": 4, "progress": False}
    alone = decompose(model, ids, **options)
    for ranks in ([*range(size)], [0, 1])[: size - 1]:
        group = distributed.new_group(ranks)
        if rank in ranks:
            found = decompose(model, ids, group=group, **options)
            assert_same(found, alone)
            assert found.provenance == alone.provenance
            assert torch.equal(found.sample_states, alone.sample_states)  # type: ignore[arg-type]
            one_batch = decompose(model, ids[:3], group=group, progress=False, groups=1)
            assert_same(one_batch, decompose(model, ids[:3], progress=False, groups=1))
    whole, other = distributed.new_group([*range(size)]), ids if rank < size - 1 else ids.flip(0)
    assert refused(lambda: decompose(model, other, group=whole, **options)).what == "group"
    distributed.destroy_process_group()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_give_what_one_gives(size: int, tmp_path: Path) -> None:
    """Two and three processes, also where some have no batch; other tokens are refused in all."""
    tiny("bridge", "gpt2")  # made once, before the others are forked
    forked: Any = multiprocessing.get_context("fork")
    each = [(rank, size, tmp_path / "store") for rank in range(size)]
    started = [forked.Process(target=_one_of, args=arguments) for arguments in each]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
    assert [process.exitcode for process in started] == [0] * size
