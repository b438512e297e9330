"""Laws of the mean decomposition (its identities): reconstruction, orthogonality,
equivariance, streaming, files."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tl_geometry as tlg
from tests.decomposition.test_distributed import tensors_of
from tests.fixtures import additive, random_states
from tl_geometry.decomposition.from_activations import decompose_tensor
from tl_geometry.decomposition.moments import Moments, half_width
from tl_geometry.decomposition.position_context import PositionContext

pytestmark = pytest.mark.once

SIZES = {
    "contexts": st.integers(2, 9),
    "positions": st.integers(2, 8),
    "d_model": st.integers(1, 6),
    "seed": st.integers(0, 99),
}


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> bool:
    """Equal to ``tolerance`` relative to the largest entry of ``b``."""
    return a.shape == b.shape and bool(
        (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-30)
    )


def basis_of(h: Tensor, **options: object) -> PositionContext:
    return tlg.decompose_activations(h, **options)  # type: ignore[arg-type]


@given(**SIZES)
def test_reconstruction_is_exact(contexts: int, positions: int, d_model: int, seed: int) -> None:
    h = random_states(2, contexts, positions, d_model, seed=seed)
    assert close(basis_of(h).transform(h).total(), h)


@given(**SIZES)
def test_parts_sum_to_zero(contexts: int, positions: int, d_model: int, seed: int) -> None:
    h = random_states(1, contexts, positions, d_model, seed=seed)
    parts = basis_of(h).transform(h)
    scale = 1e-10 * h.abs().max()
    for total in (parts.pos.sum(-2), parts.ctx.sum(-2), parts.resid.sum(-2), parts.resid.sum(-3)):
        assert total.abs().max() < scale * max(contexts, positions)


@given(**SIZES)
def test_scalar_anova(contexts: int, positions: int, d_model: int, seed: int) -> None:
    h = random_states(2, contexts, positions, d_model, seed=seed)
    table = basis_of(h).anova()
    brute = (h - h.mean((1, 2), keepdim=True)).square().sum((1, 2, 3))
    assert close(table.total, brute, 1e-9)
    assert close(table.pos + table.ctx + table.resid, table.total)
    parts = decompose_tensor(h)
    assert close(table.ctx, positions * parts.ctx.square().sum((1, 2)), 1e-8)
    assert close(table.resid, parts.resid.square().sum((1, 2, 3)), 1e-8)
    assert close(sum(table.shares.values(), torch.zeros(2)), torch.ones(2, dtype=torch.float64))


@given(**SIZES)
def test_matrix_anova(contexts: int, positions: int, d_model: int, seed: int) -> None:
    h = random_states(1, contexts, positions, d_model, seed=seed)
    basis = basis_of(h, moments_dtype=torch.float64)
    parts = decompose_tensor(h[0])
    within = parts.resid.flatten(0, 1)
    expected = (
        contexts * parts.pos.T @ parts.pos + positions * parts.ctx.T @ parts.ctx + within.T @ within
    )
    assert close(basis.second_moment(0), expected, 1e-8)
    cvec = parts.cvec.flatten(0, 1)
    assert close(cvec.T @ cvec, positions * parts.ctx.T @ parts.ctx + within.T @ within, 1e-8)
    raw = h[0].flatten(0, 1)
    assert close(basis.second_moment(0, centered=False), raw.T @ raw, 1e-8)


@given(**SIZES)
def test_equivariance(contexts: int, positions: int, d_model: int, seed: int) -> None:
    h = random_states(1, contexts, positions, d_model, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(d_model, d_model, generator=generator, dtype=torch.float64)
    b = torch.randn(d_model, generator=generator, dtype=torch.float64)
    before, after = basis_of(h), basis_of(h @ q + b)
    scale = h.abs().max() * q.abs().max() * d_model
    assert (after.pos - before.pos @ q).abs().max() < 1e-11 * scale
    assert after.ctx is not None
    assert before.ctx is not None
    assert (after.ctx - before.ctx @ q).abs().max() < 1e-11 * scale
    assert (after.mean - (before.mean @ q + b)).abs().max() < 1e-11 * scale


@given(**SIZES)
def test_permuted_contexts_permute_ctx_only(
    contexts: int, positions: int, d_model: int, seed: int
) -> None:
    h = random_states(1, contexts, positions, d_model, seed=seed)
    order = torch.randperm(contexts, generator=torch.Generator().manual_seed(seed))
    before, after = basis_of(h), basis_of(h[:, order])
    assert before.ctx is not None
    assert after.ctx is not None
    assert close(after.pos, before.pos, 1e-9)
    assert close(after.ctx, before.ctx[:, order], 1e-9)


def test_idempotence_and_additive_data() -> None:
    h, known = additive(7, 5, 4)
    parts = decompose_tensor(h)
    for name, value in known.items():
        assert close(getattr(parts, name), value)
    assert parts.resid.abs().max() < 1e-12
    again = decompose_tensor((parts.mean + parts.pos).expand(7, 5, 4))
    assert close(again.pos, parts.pos)
    assert again.ctx.abs().max() < 1e-12
    table = basis_of(h).anova()
    assert table.resid[0] < 1e-9 * table.total[0]
    noisy = basis_of(additive(7, 5, 4, noise=1.0)[0]).anova()
    assert noisy.resid[0] > 0.1 * noisy.total[0]  # the twin: with noise the residual is seen


@given(**SIZES, sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5), groups=st.integers(1, 9))
def test_streaming_equals_memory_under_every_partition(
    contexts: int, positions: int, d_model: int, seed: int, sizes: list[int], groups: int
) -> None:
    h = random_states(2, contexts, positions, d_model, seed=seed)
    whole = decompose_tensor(h)
    cuts = [c for c in torch.tensor(sizes).cumsum(0).tolist() if c < contexts]
    shards = torch.tensor_split(h, cuts, dim=1)
    pieces = [
        basis_of(shard, batch_size=sizes[0], groups=groups, moments_dtype=torch.float64)
        for shard in shards
    ]
    merged = PositionContext.merge(pieces)
    streamed = basis_of(h, batch_size=sizes[-1], groups=groups, moments_dtype=torch.float64)
    for basis in (merged, streamed):
        assert basis.ctx is not None
        assert close(basis.mean, whole.mean)
        assert close(basis.pos + basis.mean.unsqueeze(1), whole.pos + whole.mean.unsqueeze(1))
        assert close(basis.ctx + basis.mean.unsqueeze(1), whole.ctx + whole.mean.unsqueeze(1))
        assert basis.contexts == contexts
    a, b = merged.second_moment(1), streamed.second_moment(1)
    assert (a - b).abs().max() <= 1e-10 * streamed.second_moment(1, centered=False).trace()
    assert (merged.anova().total - streamed.anova().total).abs().max() <= 1e-10 * h.square().sum()


def test_pilot_keeps_float32_products_accurate_where_plain_ones_fail() -> None:
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(1, 64, 16, 8, generator=generator)
    h[..., 3] += 3000
    exact = basis_of(h, moments_dtype=torch.float64).second_moment(0)
    ours = basis_of(h, batch_size=8).second_moment(0)
    assert (ours - exact).abs().max() < 1e-6 * exact.trace()
    rows = h[0].flatten(0, 1)
    plain = (rows.T @ rows).double() - len(rows) * torch.outer(
        rows.double().mean(0), rows.double().mean(0)
    )
    assert (plain - exact).abs().max() > 1e-3 * exact.trace()


def test_float64_states_are_centred_before_they_are_rounded() -> None:
    h = (
        torch.randn(1, 64, 16, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        + 1e6
    )
    rows = (h[0] - h.mean((0, 1, 2))).flatten(0, 1)
    rows = rows - rows.mean(0)
    exact = rows.T @ rows
    assert (basis_of(h, batch_size=8).second_moment(0) - exact).abs().max() < 1e-6 * exact.trace()
    assert (
        rows.float() + 1e6 - 1e6
    ).double().var() > 1.0001 * rows.var()  # the twin: states rounded with their mean


def test_the_dtype_of_the_products_stays_with_the_basis(tmp_path: Path) -> None:
    h = random_states(1, 9, 5, 3)
    plain, exact = basis_of(h), basis_of(h, moments_dtype=torch.float64)
    other_plain, other = basis_of(-h), basis_of(-h, moments_dtype=torch.float64)
    loaded = PositionContext.load(exact.save(tmp_path / "basis.safetensors"))
    for basis, dtype in (
        (plain, torch.float32),
        (exact, torch.float64),
        (loaded, torch.float64),
        (PositionContext.merge([other, loaded]), torch.float64),
        (PositionContext.merge([exact, other_plain]), torch.float32),
        (PositionContext.merge([plain, other]), torch.float32),
    ):
        assert basis.moments.product_dtype == dtype


def test_window_and_columns_outside_it() -> None:
    h = random_states(2, 6, 7, 3)
    basis = basis_of(h, window=(2, 6))
    inside = decompose_tensor(h[:, :, 2:6])
    assert close(basis.pos, inside.pos)
    assert close(basis.mean, inside.mean)
    assert basis.ctx is not None
    assert close(basis.ctx, inside.ctx)
    assert close(basis.anova().ctx, 4 * inside.ctx.square().sum((1, 2)), 1e-8)
    for t in range(7):
        assert close(basis.pos_at(t), h[:, :, t].mean(1) - inside.mean)
    assert close(basis.second_moment(0), basis_of(h[:, :, 2:6]).second_moment(0), 1e-5)
    with pytest.raises(tlg.GeometryError, match="position: expected an index from 0 to 6, got 7"):
        basis.pos_at(7)


def test_transform_of_parts_of_a_window_is_exact_on_additive_data() -> None:
    h, known = additive(6, 8, 5)
    basis = basis_of(h)
    parts = basis.transform(h[:, :2], positions=range(2))
    assert (parts.ctx - known["ctx"]).abs().max() < 1e-10
    textbook = h[:, :2].mean(1) - basis.mean[0]
    assert (
        textbook - known["ctx"]
    ).abs().max() > 0.1  # the textbook form is wrong on a part of a window


def sampled(basis: PositionContext) -> list[int]:
    """Numbers of the sampled contexts, by priority."""
    assert basis.reservoir is not None
    return basis.reservoir.contexts.tolist()


def test_groups_labels_and_samples() -> None:
    h = random_states(2, 11, 4, 3)
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1])
    basis = basis_of(h, groups=4, keep=5, labels=labels, batch_size=3)
    assert basis.group_counts.tolist() == [3, 3, 3, 2]
    assert close(basis.group_sums[1], h[:, 3:6].sum(1))
    assert basis.group_of is not None
    assert basis.group_of.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3]
    assert basis.labels is not None
    assert torch.equal(basis.labels, labels)
    assert basis.samples is not None
    contexts = sampled(basis)
    assert close(basis.samples.double(), h[:, contexts].transpose(0, 1), 1e-6)
    assert sampled(basis_of(h, keep=5, batch_size=11)) == contexts  # whatever the batches
    seeds = {tuple(sampled(basis_of(h, keep=5, seed=s))) for s in range(6)}
    assert len(seeds) > 1


def test_shards_of_one_seed_sample_what_one_run_samples() -> None:
    h = random_states(1, 40, 4, 3)
    whole = basis_of(h, keep=6)
    shards = [basis_of(part, keep=6) for part in h.split(10, dim=1)]
    assert sampled(PositionContext.merge(shards)) == sampled(whole)
    within = [set(sampled(shard)) for shard in shards]
    assert any(a != within[0] for a in within[1:])  # not the same numbers in every shard
    assert len(sampled(PositionContext.merge([shards[0], basis_of(h[:, 10:20], keep=2)]))) == 2


def test_debiased_share_and_reliability_tell_signal_from_noise() -> None:
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 200, 12, 16, generator=generator, dtype=torch.float64)
    table = basis_of(noise).anova()
    assert 0.5 / 200 < table.shares["pos"][0] < 2.0 / 200  # noise leaves 1/C in the plain share
    assert table.pos_debiased[0] < 0.2 / 200
    assert abs(table.pos_reliability[0]) < 0.3
    curve = torch.randn(12, 16, generator=generator, dtype=torch.float64)
    signal = basis_of(noise + curve).anova()
    assert signal.pos_reliability[0] > 0.95
    assert abs(signal.pos_debiased[0] - 0.5) < 0.08


@pytest.mark.parametrize("contexts", [16, 32, 64])
def test_halves_of_the_contexts_do_not_share_a_topic(contexts: int) -> None:
    """Eight windows in a row have one curve in common (a form of their text), and no curve is that
    of all: halves agree on nothing. The twin: halves whose groups cut through the eight."""
    g = torch.Generator().manual_seed(0)
    curves = torch.randn(contexts // 8, 12, 10, generator=g).repeat_interleave(8, 0)
    h = curves + 0.5 * torch.randn(contexts, 12, 10, generator=g)
    basis = basis_of(h)
    assert abs(float(basis.anova().pos_reliability[0])) < 0.2
    order = torch.arange(contexts).view(-1, 8).mT.flatten()
    apart = basis_of(h[order])
    assert float(apart.anova().pos_reliability[0]) > 0.6


def test_half_window_agreement_sees_a_common_context_and_not_a_slow_drift() -> None:
    generator = torch.Generator().manual_seed(4)
    contexts, positions = 150, 32
    innovation = torch.randn(contexts, positions, 8, generator=generator, dtype=torch.float64)
    drift = innovation.clone()
    for t in range(1, positions):
        drift[:, t] = 0.9 * drift[:, t - 1] + 0.19**0.5 * innovation[:, t]
    slow = basis_of(drift.unsqueeze(0)).anova()
    common = basis_of(
        (drift + torch.randn(contexts, 1, 8, generator=generator, dtype=torch.float64)).unsqueeze(0)
    ).anova()
    assert slow.shares["ctx"][0] > 0.25  # no context effect at all, and yet a large share
    assert slow.ctx_agreement[0] < 0.3
    assert common.ctx_agreement[0] > 0.6
    part = half_width(positions)
    a, b = drift[:, :part].mean(1), drift[:, -part:].mean(1)
    a, b = a - a.mean(0), b - b.mean(0)
    assert torch.isclose(
        slow.ctx_agreement[0],
        (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt(),
        atol=1e-10,
    )


@pytest.mark.parametrize("window", [(2, 14), (6, 14)])
def test_the_ends_that_agree_are_those_of_the_window(window: tuple[int, int]) -> None:
    """Outside the window the states differ, and the agreement does not see it."""
    h, (start, end) = random_states(1, 12, 20, 3, seed=8), window
    inside = basis_of(h, window=window).anova().ctx_agreement[0]
    part = half_width(end - start)
    a, b = h[0, :, start : start + part].mean(1), h[0, :, end - part : end].mean(1)
    a, b = a - a.mean(0), b - b.mean(0)
    expected = (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()
    assert torch.isclose(inside, expected, atol=1e-10)
    changed = torch.cat([100 * h[:, :, :start], h[:, :, start:end], -50 * h[:, :, end:]], dim=2)
    assert torch.isclose(basis_of(changed, window=window).anova().ctx_agreement[0], expected)


def test_the_debiased_share_by_hand() -> None:
    """The residual mean square has (C - 1)(T - 1) degrees of freedom, and position T - 1, so that
    SS_resid / (C - 1) of SS_pos is noise: with three contexts that is far from SS_resid / C."""
    h = random_states(1, 3, 6, 4, seed=9)
    h = h + 2 * random_states(1, 1, 6, 4, seed=10)
    centred = h[0] - h[0].mean((0, 1))
    pos, ctx = centred.mean(0), centred.mean(1)
    resid = (centred - pos - ctx[:, None]).square().sum()
    expected = (3 * pos.square().sum() - resid / 2) / centred.square().sum()
    assert expected > 0.1
    assert torch.isclose(basis_of(h).anova().pos_debiased[0], expected)


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
    table = basis_of(h).anova()
    for name in zero:
        assert getattr(table, name)[0] <= 1e-12 * h.square().sum()
    assert table.identifiable is identifiable
    assert torch.isfinite(table.total).all()
    assert bool(torch.isfinite(basis_of(torch.zeros(1, 3, 4, 2)).anova().total).all())


def test_save_load_round_trip_and_foreign_files(tmp_path: Path) -> None:
    h = random_states(2, 6, 5, 3)
    basis = basis_of(h, labels=torch.tensor([0, 1, 0, 1, 0, 1]), keep=3)
    again = PositionContext.load(basis.save(tmp_path / "basis.safetensors"))
    assert again.provenance == basis.provenance
    assert tensors_of(again).keys() == tensors_of(basis).keys()
    for name, value in tensors_of(basis).items():
        assert torch.equal(tensors_of(again)[name], value), name
    table = basis.anova()
    loaded = tlg.decomposition.Anova.load(table.save(tmp_path / "anova.safetensors"))
    assert torch.equal(loaded.pos, table.pos)
    assert loaded.states == table.states
    assert list(loaded.to_dataframe().columns) == list(table.columns())
    with pytest.raises(
        tlg.GeometryError,
        match="expected schema tl_geometry/PositionContext/1, got 'tl_geometry/Anova/1'",
    ):
        PositionContext.load(tmp_path / "anova.safetensors")
    whole = (tmp_path / "basis.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        tlg.GeometryError, match="expected a whole file written by tl_geometry, got SafetensorError"
    ):
        PositionContext.load(tmp_path / "cut.safetensors")
    with pytest.raises(tlg.GeometryError, match="expected an existing safetensors file"):
        PositionContext.load(tmp_path / "absent.safetensors")


def test_a_basis_is_a_result() -> None:
    basis = basis_of(random_states(2, 6, 5, 3))
    assert isinstance(basis, tlg.Result)
    assert basis.length == 5
    assert list(basis.columns()) == list(basis.anova().columns())
    assert basis.to_dataframe().equals(basis.anova().to_dataframe())


def test_merge_refuses_what_does_not_belong_together() -> None:
    h = random_states(1, 6, 5, 3)
    a = basis_of(h)
    with pytest.raises(tlg.GeometryError, match=r"merge: expected window \(0, 5\)"):
        PositionContext.merge([a, basis_of(h, window=(1, 4))])
    other = dataclasses.replace(
        a, provenance=dataclasses.replace(a.provenance, fingerprint="0" * 16)
    )
    with pytest.raises(tlg.GeometryError, match="merge: fingerprint"):
        PositionContext.merge([a, other])
    with pytest.raises(tlg.GeometryError, match="second moments in both or in neither"):
        PositionContext.merge([a, basis_of(h, second_moments=False)])
    with pytest.raises(tlg.GeometryError, match="merge: expected at least one basis, got none"):
        PositionContext.merge([])


def test_merged_samples_keep_their_contexts_labels_and_flags() -> None:
    h, labels = random_states(2, 14, 4, 3), torch.arange(14) % 3
    parts = [
        basis_of(h[:, cut], keep=6, labels=labels[cut])
        for cut in (slice(0, 4), slice(4, 9), slice(9, 14))
    ]
    parts[2] = dataclasses.replace(
        parts[2], provenance=parts[2].provenance.flagged("only of the last")
    )
    merged = PositionContext.merge(parts)
    assert merged.samples is not None
    assert merged.labels is not None
    contexts = sampled(merged)
    assert len(set(contexts)) == 6
    assert max(contexts) >= 9
    assert close(merged.samples.double(), h[:, contexts].transpose(0, 1), 1e-6)
    assert torch.equal(merged.labels[contexts], labels[contexts])
    assert "only of the last" in merged.provenance.flags


def test_merge_refuses_labels_that_differ() -> None:
    h = random_states(1, 6, 4, 3)
    three, named, none = (
        basis_of(h, labels=torch.arange(6) % 3),
        basis_of(h, labels=list("abcabc")),
        basis_of(h),
    )
    for parts, text in (
        ([three, none], "labels in all parts or in none, got labels in 1 of 2"),
        ([none, three], "labels in all parts or in none, got labels in 1 of 2"),
        ([named, three], "one kind, got names in some parts, numbers in others"),
    ):
        with pytest.raises(tlg.GeometryError, match=f"merge: labels: expected {re.escape(text)}"):
            PositionContext.merge(parts)


@pytest.mark.parametrize("labels", [[5, 5, 900_000, 0, 0, 1, 5, 1], list("xxyzzwxw")])
def test_labels_that_parts_do_not_share_keep_their_documents(labels: list[Any]) -> None:
    h = random_states(2, 8, 4, 3)
    shards = [slice(0, 3), slice(3, 5), slice(5, 8)]
    merged = PositionContext.merge(basis_of(h[:, cut], labels=labels[cut]) for cut in shards)
    whole = basis_of(h, labels=labels)
    for basis in (merged, whole):
        assert basis.labels is not None
        assert len(basis.names) == 4
        assert [basis.names[i] for i in basis.labels.tolist()] == [str(v) for v in labels]
    # numbers from 0 on that all occur need no names
    plain = basis_of(h, labels=torch.arange(8) % 4)
    assert plain.names == ()
    assert PositionContext.merge([basis_of(h[:, :4], labels=torch.arange(4)), plain]).names == ()


def test_moments_are_a_monoid() -> None:
    h = random_states(1, 9, 4, 3)[0]

    def of(part: Tensor) -> Moments:
        m = Moments.zeros(
            states=1,
            length=4,
            d_model=3,
            window=(0, 4),
            groups=2,
            second=True,
            product_dtype=torch.float64,
        )
        group_of = torch.arange(len(part)) % 2
        m.add(0, part, group_of)
        m.count(group_of)
        return m

    a, b, c = of(h[:2]), of(h[2:5]), of(h[5:])
    left, right = (a + b) + c, a + (b + c)
    nothing = Moments.zeros(states=1, length=4, d_model=3, window=(0, 4), groups=2, second=True)
    assert close(left.sums, right.sums)
    centre = torch.zeros(3, dtype=torch.float64)
    assert close(left.centred_second(0, centre), right.centred_second(0, centre), 1e-9)
    assert torch.equal((a + nothing).sums, a.sums)
    assert torch.equal((nothing + a).sums, a.sums)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: basis_of(torch.zeros(3, 4)),
            r"activations: expected floating \[context position d_model\]",
        ),
        (lambda: basis_of(torch.zeros(1, 2, 3, dtype=torch.int64)), "got int64 tensor of shape"),
        (
            lambda: basis_of(torch.full((2, 3, 4), torch.nan)),
            "activations: expected finite numbers, got NaN or infinite in states",
        ),
        (lambda: basis_of(torch.full((2, 3, 4), torch.inf)), "contexts 0 to 1"),
        (
            lambda: basis_of(torch.zeros(2, 3, 4), window=(1, 9)),
            r"window: expected 0 <= start < end <= 3 \(positions of the input\), got \(1, 9\)",
        ),
        (lambda: basis_of(torch.zeros(2, 3, 4), window=(2, 2)), "window: expected"),
        (
            lambda: basis_of(torch.zeros(2, 3, 4), states=[-1]),
            "states: expected an index from 0 to 0, got -1",
        ),
        (lambda: basis_of(torch.zeros(2, 3, 4), groups=0), "groups: expected at least 1, got 0"),
        (
            lambda: basis_of(torch.zeros(2, 3, 4), second_moments="yes"),
            "second moments: expected True, False or",
        ),
        (
            lambda: basis_of(torch.zeros(2, 3, 4), second_moments=False).second_moment(0),
            r"Use decompose\(\.\.\., second_moments=True\)",
        ),
        (
            lambda: basis_of(torch.zeros(2, 3, 4)).transform(torch.zeros(2, 3, 5)),
            "activations: expected",
        ),
        (
            lambda: basis_of(torch.zeros(2, 3, 4)).transform(torch.full((2, 3, 4), torch.nan)),
            "24 NaN or infinite of 24",
        ),
        (
            lambda: basis_of(torch.zeros(2, 3, 4)).transform(
                torch.zeros(2, 3, 4), positions=[0, 1, 3]
            ),
            "positions: expected 3 from 0 to 2",
        ),
        (lambda: basis_of(torch.zeros(2, 3, 4)).index(1), r"state: expected one of \(0,\), got 1"),
    ],
)
def test_errors_say_what_to_do(call, text: str) -> None:
    with pytest.raises(tlg.GeometryError, match=text):
        call()
