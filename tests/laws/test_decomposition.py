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

import tl_geometry as tlg
from tests.lib.data import additive, random_states
from tests.lib.models import bridge_of, hf_model, tiny, tokens
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


def refused(call: Any) -> tlg.GeometryError:
    with pytest.raises(tlg.GeometryError) as caught:
        call()
    return caught.value


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


# ---- identities ----------------------------------------------------------------------------------


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


def test_additive_data_has_its_parts_and_no_rest() -> None:
    h, known = additive(7, 5, 4)
    basis = decompose_activations(h)
    parts = basis.transform(h)
    for name, value in known.items():
        assert close(getattr(parts, name), value)
    again = decompose_activations((parts.mean + parts.pos).expand(7, 5, 4))
    assert close(again.pos, basis.pos)
    assert ctx_of(again).abs().max() < 1e-12
    table = basis.anova()
    assert table.resid[0] < 1e-9 * table.total[0]
    noisy = decompose_activations(additive(7, 5, 4, noise=1.0)[0]).anova()
    assert noisy.resid[0] > 0.1 * noisy.total[0]  # the twin: with noise there is one


def test_positions_outside_of_the_window_have_a_vector() -> None:
    h = random_states(2, 6, 7, 3)
    basis = decompose_activations(h, window=(2, 6))
    for t in range(7):
        assert close(basis.pos_at(t), h[:, :, t].mean(1) - h[:, :, 2:6].mean((1, 2)))
    changed = torch.cat([9 * h[:, :, :2], h[:, :, 2:6], -h[:, :, 6:]], 2)
    other = decompose_activations(changed, window=(2, 6))
    assert close(other.pos, basis.pos)
    assert close(other.anova().total, basis.anova().total)
    assert close(other.second_moment(1), basis.second_moment(1))
    assert not close(other.pos_seen, basis.pos_seen, 1e-2)


def test_parts_of_a_part_of_a_window_are_exact_on_additive_data() -> None:
    h, known = additive(6, 8, 5)
    basis = decompose_activations(h)
    parts = basis.transform(h[:, :2], positions=range(2))
    assert (parts.ctx - known["ctx"]).abs().max() < 1e-10
    # the twin: the plain mean, without what position adds there
    assert (h[:, :2].mean(1) - basis.mean[0] - known["ctx"]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("h", "zero", "identifiable"),
    [
        (random_states(1, 1, 5, 3), ("ctx", "resid"), False),
        (random_states(1, 5, 1, 3), ("pos", "resid"), True),
        (random_states(1, 1, 5, 3).expand(1, 4, 5, 3), ("ctx", "resid"), True),
    ],
)
def test_degenerate_designs_have_defined_values(
    h: Tensor, zero: tuple[str, ...], identifiable: bool
) -> None:
    basis = decompose_activations(h)
    table = basis.anova()
    for name in zero:
        assert getattr(table, name)[0] <= 1e-12 * h.square().sum()
    assert table.identifiable is identifiable
    assert bool(table.shares["pos"].isnan()) is not identifiable
    assert any("one context" in flag for flag in basis.flags()) is not identifiable
    zeros = decompose_activations(torch.zeros(1, 3, 4, 2)).anova()
    assert zeros.total.tolist() == [0.0]
    assert zeros.shares["ctx"].isnan().all()


# ---- one sum whatever the partition --------------------------------------------------------------


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


def test_groups_are_the_sums_of_their_contexts_and_samples_are_whole_states() -> None:
    h = random_states(2, 11, 4, 3)
    basis = decompose_activations(h, groups=4, keep=5, batch_size=2, labels=torch.arange(11) % 3)
    assert basis.group_counts.sum() == 11
    for group in range(len(basis.group_counts)):
        assert close(
            basis.moments.sums[group],
            h[:, torch.repeat_interleave(basis.group_counts) == group].sum(1),
        )
    assert basis.sample_states is not None
    assert basis.sampled is not None
    assert close(basis.sample_states.double(), h[:, basis.sampled].transpose(0, 1), 1e-6)
    again = decompose_activations(h, keep=5, batch_size=11)
    assert again.sampled is not None
    assert torch.equal(again.sampled, basis.sampled)  # whatever the batches
    seeds = {tuple(decompose_activations(h, keep=5, seed=s).sampled.tolist()) for s in range(6)}  # type: ignore[union-attr]
    assert len(seeds) > 1
    assert decompose_activations(h).sample_states is None


# ---- models --------------------------------------------------------------------------------------


def test_only_the_blocks_that_are_needed_run_and_never_the_output_head() -> None:
    model, ran = tiny("bridge", "gpt2"), []
    tlg.view(model)  # which looks at a model that is new to it
    inner = model.original_model
    blocks = inner.transformer.h
    watched = {"0": blocks[0].mlp, "1": blocks[1].mlp, "head": inner.lm_head}
    handles = [
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
        for name, module in watched.items()
    ]
    try:
        for states, expected in (([0, 1], ["0"]), (None, ["0", "1"])):
            basis = decompose(model, tokens(3, 8), states=states, groups=1, **QUIET)
            assert ran == expected
            ran.clear()
        model(tokens(3, 8), return_type="logits")
        assert ran == ["0", "1", "head"]  # the twin
    finally:
        for handle in handles:
            handle.remove()
    assert not any(t.is_inference() for t in (*basis.moments.tensors().values(), ctx_of(basis)))


def test_what_a_basis_says_of_a_state_or_position_is_a_copy() -> None:
    basis = decompose_activations(random_states(2, 12, 5, 3))
    asked = (lambda: basis.pos_at(2), lambda: basis.second_moment(1), lambda: basis.of_state(1, 4))
    for ask in asked:
        first = torch.cat([torch.atleast_2d(x) for x in ask()])
        for tensor in ask():
            tensor.zero_()
        assert torch.equal(torch.cat([torch.atleast_2d(x) for x in ask()]), first)
        assert first.abs().max() > 0


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


# ---- groups and documents ------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20), groups=st.integers(1, 9))
def test_no_group_cuts_through_a_document_unless_it_is_said(sizes: list[int], groups: int) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    contexts = len(labels)
    basis = decompose_activations(torch.ones(contexts, 1, 1), labels=labels, groups=groups)
    of, cut = (
        torch.repeat_interleave(basis.group_counts),
        any("cut through" in f for f in basis.provenance.flags),
    )
    if cut or len(sizes) == 1:
        assert of.tolist() == [c * groups // contexts for c in range(contexts)] or contexts < groups
    else:
        assert all(len(of[labels == d].unique()) == 1 for d in range(len(sizes)))
        assert min(groups, 4) <= int((basis.group_counts > 0).sum()) <= groups
    alone = decompose_activations(torch.ones(contexts, 1, 1), groups=groups)
    assert torch.repeat_interleave(alone.group_counts).tolist() == [
        c * groups // contexts for c in range(contexts)
    ]
    single = decompose_activations(
        torch.ones(contexts, 1, 1), labels=torch.arange(contexts), groups=groups
    )
    if contexts >= max(groups, 4):
        assert torch.equal(
            torch.repeat_interleave(single.group_counts),
            torch.repeat_interleave(alone.group_counts),
        )


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
        expected = reference.jackknife(shares, members)
        for i, name in enumerate(("pos", "ctx", "resid")):
            value, low, high = table.intervals[name][row].tolist()
            assert value == pytest.approx(expected.value[i], rel=1e-6)
            if name == "pos" or contexts >= 32:
                assert (low, high) == pytest.approx((expected.low[i], expected.high[i]), rel=1e-6)
            else:
                assert np.isnan([low, high]).all()
    corrected = torch.stack([values[:, 0] for values in table.intervals.values()]).sum(0)
    assert close(corrected, torch.ones(2).double())
    assert table.blocks == groups
    column = table.to_dataframe()["pos_corrected_low"].to_numpy()
    assert float(column[1]) == float(table.intervals["pos"][1, 1])


@pytest.mark.parametrize(
    ("contexts", "groups", "enough"), [(10, 8, True), (9, 8, False), (20, 3, False)]
)
def test_no_interval_from_few_contexts_or_groups(contexts: int, groups: int, enough: bool) -> None:
    table = decompose_activations(planted(contexts, 1), groups=groups).anova()
    assert bool(table.intervals) is enough
    assert ("pos_corrected_low" in table.to_dataframe()) is enough
    assert ("pos_debiased" in table.to_dataframe()) is not enough


def test_the_interval_is_about_the_share_without_sampling_noise() -> None:
    """No position at all: the share of pos is what noise leaves, and zero is in the interval, about
    as often as it says; around the share itself the same interval would hardly ever hold zero."""
    held = plain = 0
    for seed in range(120):
        white = torch.randn(24, 6, 12, generator=torch.Generator().manual_seed(seed))
        table = decompose_activations(white).anova()
        _, low, high = table.intervals["pos"][0].tolist()
        held += low <= 0 <= high
        plain += float(table.shares["pos"][0]) - (high - low) / 2 <= 0
    assert 0.88 <= held / 120 <= 1.0
    assert plain / 120 < 0.3


@pytest.mark.parametrize("repeats", [40, pytest.param(400, marks=pytest.mark.nightly)])
def test_intervals_cover_where_windows_come_in_topics(repeats: int) -> None:
    contexts, block, positions, width = 64, 16, 12, 8
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    pos = normal(positions, width)
    pos = pos - pos.mean(0)
    pos *= 0.5 / pos.square().mean().sqrt()
    ctx = 1 + 0.25 + 1 / positions  # of infinitely many topics
    parts = torch.tensor([0.25, ctx, 1 - 1 / positions])
    truth: dict[str, float] = dict(zip(("pos", "ctx", "resid"), (parts / parts.sum()).tolist()))
    labels = torch.arange(contexts) // block
    covered = {(known, name): 0 for known in (True, False) for name in truth}
    for _ in range(repeats):
        topics = normal(contexts // block, 1, width).repeat_interleave(block, 0)
        h = pos + topics + 0.5 * normal(contexts, 1, width) + normal(contexts, positions, width)
        for known in (True, False):
            basis = decompose_activations(h, labels=labels if known else None, second_moments=False)
            for name, bounds in basis.anova().intervals.items():
                low, high = bounds[0, 1:].tolist()
                covered[known, name] += low <= truth[name] <= high
    # 95% within three standard errors
    least = 0.95 - 3 * (0.95 * 0.05 / repeats) ** 0.5
    assert all(covered[True, name] / repeats > least for name in truth), covered
    # the twin: groups that cut through topics do not cover
    assert covered[False, "ctx"] / repeats < 0.85, covered


def test_reliability_and_the_debiased_share_tell_signal_from_noise() -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 200, 12, 16, generator=generator, dtype=torch.float64)
    table = decompose_activations(noise).anova()
    assert 0.5 / 200 < table.shares["pos"][0] < 2.0 / 200  # noise leaves 1/C in the plain share
    assert table.pos_debiased[0] < 0.2 / 200
    assert abs(table.pos_reliability[0]) < 0.3
    assert "reliability" in table.remarks[0]
    curve = torch.randn(12, 16, generator=generator, dtype=torch.float64)
    signal = decompose_activations(noise + curve).anova()
    assert signal.pos_reliability[0] > 0.95
    assert abs(signal.pos_debiased[0] - 0.5) < 0.08
    assert signal.remarks == ("",)
    basis = decompose_activations(noise[0, :16] + curve, groups=2)
    halves = (range(8), range(8, 16))
    expected = reference.half_cosine((noise[0, :16] + curve).numpy(), halves)
    assert float(basis.anova().pos_reliability[0]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("contexts", [16, 32, 64])
def test_halves_of_the_contexts_do_not_share_a_topic(contexts: int) -> None:
    """Eight windows in a row have one curve in common (a form of their text), and no curve is that
    of all: halves agree on nothing. The twin: halves whose groups cut through the eight."""
    g = torch.Generator().manual_seed(0)
    curves = torch.randn(contexts // 8, 12, 10, generator=g).repeat_interleave(8, 0)
    h = curves + 0.5 * torch.randn(contexts, 12, 10, generator=g)
    assert abs(float(decompose_activations(h).anova().pos_reliability[0])) < 0.2
    order = torch.arange(contexts).view(-1, 8).mT.flatten()
    assert float(decompose_activations(h[order]).anova().pos_reliability[0]) > 0.6


# ---- the largest tokens --------------------------------------------------------------------------


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
        top = 2  # 0.1% of 2,360 tokens
        share = float(squares[:top].sum() / squares.sum())
        held = basis.sinks(state)
        assert held.share == pytest.approx(share, rel=1e-12)
        assert float(basis.anova().top_share[state]) == held.share
        assert rows["share"].sum() == pytest.approx(
            float(squares[: len(rows)].sum() / squares.sum())
        )
        assert float(rows["rms"].iloc[0]) == pytest.approx(float(squares.mean().sqrt()))


def test_a_quarter_of_the_squares_in_few_tokens_is_said() -> None:
    basis = decompose_activations(massive(), window=(1, 60))
    table = basis.anova()
    assert "2 of 2360 tokens hold" in table.remarks[0]
    assert "position 3" in table.remarks[0]
    assert "tokens hold" not in table.remarks[1]
    said = [flag for flag in table.provenance.flags if "tokens hold" in flag]
    assert len(said) == 1
    assert "in states 0 " in said[0]
    assert said[0] in repr(table)
    assert said[0] in basis.flags()
    ids = tokens(6, 9)
    found = decompose(tiny("bridge", "llama"), ids, **QUIET).largest
    assert torch.equal(found["token"], ids[found["context"], found["position"]])


# ---- files, shards, processes --------------------------------------------------------------------


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
    assert (lean.ctx, lean.sample_states, lean.has_second_moments) == (None, None, False)
    assert lean.anova().intervals == {}
    assert basis.anova().intervals
    assert any("no intervals" in flag for flag in lean.anova().provenance.flags)
    assert "full=True" in str(refused(lambda: lean.second_moment(1)).instead)
    sizes = [(tmp_path / f"{name}.safetensors").stat().st_size for name in ("lean", "full")]
    assert sizes[0] < sizes[1] / 4


def test_groups_of_shards_are_contiguous_and_named_as_the_shards_are() -> None:
    h = random_states(1, 20, 4, 3)
    for cuts in ([8], [5, 10], [4, 8]):
        shards = [decompose_activations(x, groups=4) for x in h.tensor_split(cuts, dim=1)]
        counts, first = [0] * 4, 0
        for n in torch.cat([shard.group_counts for shard in shards]).tolist():
            counts[(first + n // 2) * 4 // 20] += n  # where its middle context is
            first += n
        joined = PositionContext.merge(iter(shards))
        assert joined.group_counts.tolist() == counts
        for group in range(4):  # contiguous, and the sums of their contexts
            assert close(
                joined.moments.sums[group],
                h[:, torch.repeat_interleave(joined.group_counts) == group].sum(1),
            )


def test_a_shard_given_twice_is_refused_and_shared_contexts_are_said() -> None:
    model, ids = tiny("bridge", "gpt2"), tokens(20, 6)
    first, second = (decompose(model, x, **QUIET) for x in (ids[:12], ids[10:]))
    shared = PositionContext.merge([first, second])
    assert torch.equal(shared.token_hashes[:12], first.token_hashes)  # type: ignore[index]
    at = shared.largest
    assert torch.equal(at["token"], torch.cat([ids[:12], ids[10:]])[at["context"], at["position"]])
    assert "2 contexts are in more than one of the merged parts" in shared.provenance.flags
    same = decompose(model, ids[:12].flip(0), **QUIET)
    assert refused(lambda: PositionContext.merge([first, same])).what == "merge"
    assert refused(lambda: PositionContext.merge([first, second, first])).what == "merge"


def test_hooks_on_one_side_only_are_said() -> None:
    hooked, ids = bridge_of(hf_model("gpt2")), tokens(12, 6)
    own = decompose(hooked, ids, **QUIET)
    assert own.remarks(tlg.view(hooked)) == ()
    hooked.add_hook("blocks.1.hook_resid_pre", lambda h, hook: None)
    assert any("hooks" in flag for flag in own.remarks(tlg.view(hooked)))
    raw = decompose_activations(random_states(3, 6, 5, 32))
    assert any("not known" in flag for flag in raw.remarks(tlg.view(hooked)))


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
