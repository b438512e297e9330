"""Sinks, normalised states, contiguous groups, and what a basis says about itself: the same over
every partition of a corpus."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tl_geometry as tlg
from tests.decomposition.test_distributed import (
    OPTIONS,
    ids,
    toy,
)
from tests.lib.models import ARCHITECTURES, loadable, tiny, tokens
from tl_geometry import decompose_activations
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition.largest import KEPT
from tl_geometry.decomposition.position_context import RAW, PositionContext


def planted(contexts: int = 40, positions: int = 60, d_model: int = 6, seed: int = 0) -> Tensor:
    """States of one norm's order, and a sink at position 3 of every tenth context in coordinate
    4."""
    h = torch.randn(
        1,
        contexts,
        positions,
        d_model,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    h[0, ::10, 3, 4] = 200.0
    return h


# --- Largest tokens
# --------------------------------------------------------------------------------------------------


def test_sinks_are_those_of_the_states_themselves() -> None:
    h = planted()
    basis = decompose_activations(h, window=(1, 60), batch_size=7)
    norms = h[0, :, 1:].norm(dim=-1)
    held = basis.sinks(0)
    assert held is not None
    k = norms.numel() // 1000
    assert (held.tokens, held.of) == (k, norms.numel())
    exact = norms.flatten().square().sort(descending=True).values
    assert held.share == pytest.approx(float(exact[:k].sum() / exact.sum()), rel=1e-12)
    assert held.positions == (3,)
    table = basis.largest_tokens()
    assert torch.equal(table.norm[0], norms.flatten().sort(descending=True).values[:KEPT])
    assert table.position[0, :4].tolist() == [3] * 4
    assert sorted(table.context[0, :4].tolist()) == list(range(0, 40, 10))
    assert table.coordinate[0, :4].tolist() == [4] * 4
    assert table.share[0].sum() == pytest.approx(float(exact[:KEPT].sum() / exact.sum()))
    assert float(table.median[0]) == pytest.approx(float(norms.median()), rel=0.1)
    assert len(table.rows()) == KEPT
    assert len(table.rows()[0]) == len(table.columns())


def test_a_quarter_of_the_squares_in_few_tokens_is_said_everywhere() -> None:
    h = planted()
    basis = decompose_activations(torch.cat([h, torch.randn(1, 40, 60, 6)]), window=(1, 60))
    remark = "2 of 2360 tokens hold "
    table = basis.anova()
    assert remark in table.remarks[0]
    assert "(position 3)" in table.remarks[0]
    assert remark not in table.remarks[1]
    assert any(remark in f and "in states 0 few" in f for f in table.provenance.flags)
    assert remark in table.rows()[0][-1]  # type: ignore[operator]
    assert remark in repr(table)
    assert remark in table._repr_html_()
    assert table.top_share[0] > 0.4
    assert table.top_share[1] < 0.05
    for report in (
        tlg.positional_report(basis, jackknife=False, nulls=False),
        tlg.measures.compare_bases(basis, basis, rank=1),
    ):
        assert any(remark in f for f in report.provenance.flags)


@pytest.mark.slow
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_largest_and_tail_are_the_same_over_every_partition(sizes: list[int], seed: int) -> None:
    h = planted(24, 20, 6, seed)
    h[0, :, 0] = h[0, 0, 0]  # the same norm in every context: ties
    whole = decompose_activations(h, batch_size=24)
    cuts = [c for c in torch.tensor(sizes).cumsum(0).tolist() if c < 24]
    shards = [
        decompose_activations(part, batch_size=sizes[0]) for part in h.tensor_split(cuts, dim=1)
    ]
    for basis in (decompose_activations(h, batch_size=sizes[-1]), PositionContext.merge(shards)):
        for name, values in whole.largest.tensors().items():
            assert torch.equal(basis.largest.tensors()[name], values), name
        torch.testing.assert_close(basis.moments.tail, whole.moments.tail, rtol=1e-12, atol=0)


# --- Groups ---------------------------------------------------------------------------------------
# -------------------


@pytest.mark.parametrize("contexts", [1, 5, 8, 9, 16, 31, 50])
def test_groups_are_contiguous_with_a_known_number_and_without(contexts: int) -> None:
    known = tlg.decompose(toy(), ids(contexts), **OPTIONS)
    assert known.group_of.tolist() == [c * 4 // contexts for c in range(contexts)]
    for batch in (1, 3, 7):
        options: dict[str, Any] = OPTIONS | {"batch_size": batch}
        stream = tlg.decompose(toy(), iter(ids(contexts)), **options)
        counts = stream.group_counts.tolist()
        assert sum(counts) == contexts
        assert len(counts) <= 8
        assert contexts < 5 or len(counts) > 3
        assert len(set(counts[:-1])) <= 1  # equal blocks
        assert contexts == 1 or counts[-1] <= 1.5 * counts[0]
        start = 0
        for group, count in enumerate(counts):
            part = tlg.decompose(toy(), ids(contexts)[start : start + count], **OPTIONS)
            torch.testing.assert_close(
                stream.group_sums[group], part.group_sums.sum(0), rtol=1e-6, atol=1e-3
            )
            start += count


def test_merged_groups_are_contiguous(tmp_path: Path) -> None:
    h = torch.randn(1, 40, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cuts = (0, 10, 16, 40)
    parts = [decompose_activations(h[:, a:b], groups=4) for a, b in pairwise(cuts)]
    merged = PositionContext.merge(parts)
    assert (merged.group_of.diff() >= 0).all()
    assert len(merged.group_counts) == 4
    for g in range(4):
        torch.testing.assert_close(merged.group_sums[g], h[:, merged.group_of == g].sum(1))


# --- Normalised states
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_a_normalised_basis_is_that_of_normed_states(architecture: str) -> None:
    for model_class, processed in loadable(architecture):
        model, rows = tiny(model_class, architecture, processed), tokens(5, 8)
        view = tlg.view(model)
        try:
            norms = [view.attention_norm(l) for l in range(view.n_layers)]
        except tlg.UnsupportedModelError:
            continue
        found: dict[int, Tensor] = {}
        view.run(
            rows,
            {
                name: lambda h, s=s, found=found: found.__setitem__(s, h.detach().clone())
                for s, name in enumerate(view.state_hooks)
            },
        )
        last = view.final_norm()
        states = [norm.normalize(found[s]) for s, norm in enumerate(norms)]
        states.append(
            found[view.n_layers] if last is None else last.normalize(found[view.n_layers])
        )
        expected = decompose_activations(torch.stack(states), window=(1, 8))
        basis = tlg.decompose(model, rows, normalize=True, progress=False, batch_size=5)
        assert basis.provenance.normalized
        for name in ("mean", "pos", "ctx"):
            a, b = getattr(basis, name), getattr(expected, name)
            assert (a - b).abs().max() <= 1e-10 * b.abs().max(), (model_class, processed, name)
        plain = tlg.decompose(model, rows, progress=False, batch_size=5)
        bare = [norm.norm_type is None for norm in norms]
        assert all(torch.equal(plain.pos[s], basis.pos[s]) == b for s, b in enumerate(bare))
        assert any("as they are" in f for f in basis.provenance.flags) == any(bare)
        assert any(
            f.startswith(f"state {view.n_layers} as it is") for f in basis.provenance.flags
        ) == (last is None)
        if not any(bare):
            size = basis.moments.squares[:, 0, 1:].sum() / (5 * 7)
            assert float(size) <= view.d_model * (1 + 1e-6)  # |x| <= sqrt(d_model)


def test_normalised_and_raw_states_are_not_mixed(tmp_path: Path) -> None:
    model, rows = tiny("bridge", "llama"), tokens(6, 8)
    raw, normed = (tlg.decompose(model, rows, normalize=n, progress=False) for n in (False, True))
    assert "normalised states" in repr(normed)
    for call, text in (
        (
            lambda: PositionContext.merge([raw, normed]),
            "merge: normalized: expected False, got True",
        ),
        (
            lambda: tlg.measures.compare_bases(raw, normed),
            "bases: expected states of one kind, normalized=False, got normalized=True",
        ),
        (
            lambda: normed.require_raw("this"),
            "this: expected a basis of raw states, got one of normalised states",
        ),
        (
            lambda: tlg.token_paths(model, rows, basis=normed),
            "token_paths: expected a basis of raw states",
        ),
    ):
        with pytest.raises(GeometryError, match=text):
            call()
    path = tmp_path / "run"
    tlg.decompose(model, rows, checkpoint=path, progress=False)
    with pytest.raises(GeometryError, match=r"got another: normalized=False \(now True\)"):
        tlg.decompose(model, rows, checkpoint=path, normalize=True, progress=False)
    again = PositionContext.load(normed.save(tmp_path / "basis"))
    assert again.provenance.normalized


# --- What a basis says
# -----------------------------------------------------------------------------------------------


def test_one_context_tells_nothing_apart() -> None:
    model, rows = tiny("bridge", "gpt2"), tokens(1, 8)
    basis = tlg.decompose(model, rows, progress=False)
    table = basis.anova()
    assert not table.identifiable
    assert table.shares["pos"].isnan().all()
    assert table.pos_debiased.isnan().all()
    assert all("one context" in remark for remark in table.remarks)
    assert any("one context" in flag for flag in table.provenance.flags)
    two = tlg.decompose(model, tokens(2, 8), progress=False)
    assert two.anova().shares["pos"].isfinite().all()
    calls: list[Any] = [
        lambda b: tlg.split_scores(model, tokens(2, 8), b, heads="L1H0"),
        lambda b: tlg.split_values(model, tokens(2, 8), b, heads="L1H0"),
        lambda b: tlg.sweep_heads(model, tokens(2, 8), b, progress=False),
        lambda b: tlg.weight_geometry(model, b, layers=[0]),
        lambda b: tlg.interventions.remove_term(model, b, "pos-pos", heads="L1H0").__enter__(),
    ]
    for call in calls:
        with pytest.raises(
            GeometryError,
            match=r"expected a basis of at least 2 contexts \(with one, position and content "
            "cannot be told",
        ):
            call(basis)
    for call in calls[:4]:
        call(two)


def test_low_reliability_is_a_flag_on_the_row_and_on_the_table() -> None:
    noise = torch.randn(
        1, 30, 12, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    curve = 5 * torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    table = decompose_activations(torch.cat([noise, noise + curve])).anova()
    assert "reliability below 0.5" in table.remarks[0]
    assert "reliability" not in table.remarks[1]
    assert "split-half reliability of pos below 0.5 in states 0" in table.provenance.flags


def test_hooks_and_unknown_models_are_said_with_the_result(tmp_path: Path) -> None:
    model, rows = tiny("bridge", "gpt2"), tokens(6, 8)
    basis, path = tlg.decompose(model, rows, progress=False), tmp_path / "run"
    tlg.decompose(model, rows, checkpoint=path, progress=False)
    clean = tlg.split_scores(model, rows[:2], basis, heads="L1H0")
    assert not any("hooks" in f for f in clean.provenance.flags)
    model.blocks[0].hook_mlp_out.add_hook(lambda value, hook: value * 0.5, is_permanent=True)
    try:
        split = tlg.split_scores(model, rows[:2], basis, heads="L1H0")
        assert split.provenance.hooks
        assert any(f.startswith("basis fitted without these hooks") for f in split.provenance.flags)
        under = tlg.decompose(model, rows, progress=False)
        assert under.provenance.hooks
        assert not any(
            "fitted" in f
            for f in tlg.split_scores(model, rows[:2], under, heads="L1H0").provenance.flags
        )
        with pytest.raises(GeometryError, match=r"got another: hooks=\[\] \(now \['blocks\.0"):
            tlg.decompose(model, rows, checkpoint=path, progress=False)
        with pytest.raises(GeometryError, match="merge: hooks"):
            PositionContext.merge([basis, under])
    finally:
        model.reset_hooks(including_permanent=True)
    split = tlg.split_scores(model, rows[:2], under, heads="L1H0")
    assert any(f.startswith("basis fitted under other hooks") for f in split.provenance.flags)
    _, cache = model.run_with_cache(rows)
    h = torch.stack([cache[name] for name in tlg.view(model).state_hooks])
    bare = decompose_activations(h, window=(1, 8))
    assert RAW in tlg.split_scores(model, rows[:2], bare, heads="L1H0").provenance.flags
    with pytest.raises(GeometryError, match="basis: expected d_model 32 of tiny-gpt2, got 8"):
        decompose_activations(h[..., :8]).check_model(tlg.view(model))


# --- Checkpoints and files
# -------------------------------------------------------------------------------------------


def test_the_same_shard_twice_is_refused() -> None:
    first, second, third = (
        tlg.decompose(toy(), rows, **OPTIONS) for rows in (ids(12), ids(12, seed=1), ids(12)[:6])
    )
    merged = PositionContext.merge([first, second])
    assert merged.token_hashes is not None
    assert len(merged.token_hashes) == merged.contexts == 24
    hashes = [part.provenance.token_hash for part in (first, second)]
    assert merged.provenance.token_hash == "+".join(map(str, hashes))
    assert PositionContext.merge([first]).provenance.token_hash == hashes[0]
    for parts, text in (
        ([first, first], "parts 0 and 1 with the same sums"),
        ([first, second, third], "6 contexts that are in parts 0 and 2"),
        ([merged, first], "12 contexts that are in parts 0 and 1"),
    ):
        with pytest.raises(GeometryError, match=f"merge: expected disjoint contexts, got {text}"):
            PositionContext.merge(parts)
    some = tlg.decompose(
        toy(), torch.cat([ids(12)[:2], ids(12, seed=5)]), **OPTIONS
    )  # a text may repeat itself
    assert (
        "2 contexts are in more than one of the merged parts"
        in PositionContext.merge([first, some]).provenance.flags
    )
