"""Tables of interventions number by number (scipy, loops over tokens), whole sets of controls one
by one, and batches of any size."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import tl_geometry as tlg
from tests.bars import bars
from tests.interventions.bases import basis_of
from tests.tiny import HEADS, tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.intervals import sign_flip_p
from tl_geometry.base.results import Provenance
from tl_geometry.circuits.edge_pass import EdgePass
from tl_geometry.interventions import (
    HeadKnockouts,
    HeadPaths,
    edge_effects,
    edge_necessity,
    effects,
    head_knockouts,
    head_paths,
    head_removal,
    knockouts,
    paths,
    remove_edge,
    remove_heads,
    remove_term,
    surrogate,
    swap_edge,
)
from tl_geometry.interventions.causal import Dominance, NecessitySufficiency
from tl_geometry.interventions.edge_effects import EdgeNecessity
from tl_geometry.interventions.effects import excess_over, measure_effects, repeated_for
from tl_geometry.interventions.knockouts import control_sets
from tl_geometry.interventions.surrogates import replacements, surrogate_effect
from tl_geometry.models import view
from tl_geometry.models.output_head import next_token_losses

PROMPTS = tokens(batch=4, length=12, seed=4)
TARGETS = [(5, 9), (7, 3), (11, 20), (4, 6)]
EVERY_HEAD = [(layer, head) for layer in (0, 1) for head in range(HEADS)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def interval(values: Tensor) -> tuple[float, float, float]:
    """Mean and Student's 95% interval."""
    low, high = stats.ttest_1samp(values.numpy(), 0).confidence_interval(0.95)
    return float(values.mean()), float(low), float(high)


# ---- tables


def necessity(losses: Tensor, induction: Tensor, kls: Tensor, **fields: Any) -> Any:
    return NecessitySufficiency(
        provenance=Provenance(),
        conditions=("clean", "bias terms only", "keep", "remove", "swap"),
        losses=losses,
        induction_losses=induction,
        kls=kls,
        heads=((1, 0),),
        swap_cosine=0.1,
        shrunk=0.2,
        **{"term": ("cvec-cvec",), **fields},
    )


def test_the_table_of_a_term_by_scipy() -> None:
    level = torch.tensor([1.0, 3, 1.5, 2, 2.5]).double()[:, None]
    given = {"loss": level + draw(5, 12), "induction_loss": 2 * level + draw(5, 11, seed=1)}
    kls = draw(5, 12, seed=2).abs()
    found = necessity(given["loss"], given["induction_loss"], kls)
    table = found.to_dataframe().set_index("condition")
    names = [f"{measure}{end}" for measure in given for end in ("", "_change", "_low", "_high")]
    names[4:4], names[9:] = ["loss_remove_p"], ["induction_remove_p", "kl"]
    assert list(table.columns) == names
    for row, condition in enumerate(found.conditions):
        for measure, values in given.items():
            wanted = interval(values[row] - values[0]) if row else (0.0, 0.0, 0.0)
            columns = [f"{measure}_{end}" for end in ("change", "low", "high")]
            assert table.loc[condition, columns].tolist() == pytest.approx(wanted)
            assert table.loc[condition, measure] == pytest.approx(float(values[row].mean()))
            p = table.loc[condition, f"{measure.removesuffix('_loss')}_remove_p"]
            assert p == pytest.approx(sign_flip_p(values[3] - values[row]), nan_ok=True)
        assert table.loc[condition, "kl"] == pytest.approx(float(kls[row].mean()))
    for measure, values in given.items():
        clean, nothing, kept, removed = values.mean(1)[:4].tolist()
        assert found.necessity[measure] == pytest.approx(removed - clean)
        share = (nothing - kept) / (nothing - clean)
        assert found.sufficiency[measure] == pytest.approx(share)
    assert found.controls == ("bias terms only", "swap")
    assert float(found.change("keep", "kl").value) == pytest.approx(float((kls[2] - kls[0]).mean()))
    bias = necessity(given["loss"], given["induction_loss"], kls, term=("bias-bias", "bias-pos"))
    assert all(math.isnan(share) for share in bias.sufficiency.values())
    both = necessity(given["loss"], given["induction_loss"], kls, term=("bias-bias", "cvec-cvec"))
    assert both.sufficiency == found.sufficiency
    even = necessity(given["loss"][[0, 0, 2, 3, 4]], given["induction_loss"], kls)
    assert math.isnan(even.survival("keep"))


def test_what_dominant_terms_save_takes_in_one_more_draw() -> None:
    conditions = ("clean", "dominant term", "dominant group", "random term", "bias terms only")
    losses, drawn = draw(5, 12) + torch.arange(5)[:, None], draw(4, seed=3)
    found = Dominance(
        provenance=Provenance(),
        conditions=(*conditions, "uniform attention"),
        losses=torch.cat([losses, losses[:1] + 7]),
        induction_losses=draw(6, 12, seed=1),
        kls=draw(6, 12, seed=2),
        drawn=drawn,
    )
    mean, low, _ = interval(losses[3] - losses[1])
    one_more = stats.t.ppf(0.975, 3) * float(drawn.std()) * math.sqrt(1 + 1 / 4)
    reach = math.hypot(mean - low, one_more)
    table = found.to_dataframe().set_index("condition")
    columns = ["saved", "saved_low", "saved_high"]
    wanted = pytest.approx([mean, mean - reach, mean + reach])
    assert table.loc["dominant term", columns].tolist() == wanted
    assert bool(table[columns].drop("dominant term").isna().to_numpy().all())
    assert found.controls == ("random term", "bias terms only", "uniform attention")
    single = excess_over(draw(12), drawn[:1])
    assert bool(single.low.isnan())
    assert bool(single.value.isfinite())


def test_the_table_of_an_edge_by_scipy() -> None:
    losses, share = draw(6, 13) + torch.arange(6)[:, None], draw(6)
    found = EdgeNecessity(
        provenance=Provenance(),
        writer="L0H0",
        heads=((1, 0),),
        side="key",
        conditions=("clean", "remove", "swap", "keep", "shrink", "mlp0"),
        losses=losses,
        share=share,
        drop=1,
    )
    table = found.to_dataframe().set_index("condition")
    ends = [f"{name}{end}" for name in ("change", "excess") for end in ("", "_low", "_high")]
    assert list(table.columns) == ["share", "loss", *ends, "p"]
    for row, condition in enumerate(found.conditions):
        for name, gaps in (
            ("change", losses[row] - losses[0]),
            ("excess", losses[1] - losses[row]),
        ):
            wanted = interval(gaps) if bool(gaps.any()) else (0.0, 0.0, 0.0)
            columns = [name, f"{name}_low", f"{name}_high"]
            assert table.loc[condition, columns].tolist() == pytest.approx(wanted)
        assert table.loc[condition, "share"] == float(share[row])
        assert found.of(condition) == table.loc[condition, "loss"] == float(losses[row].mean())
        p = sign_flip_p(losses[1] - losses[row])
        assert table.loc[condition, "p"] == pytest.approx(p, nan_ok=True)
    with pytest.raises(GeometryError, match="measure: expected one of 'loss', got 'kl'"):
        found.change("remove", "kl")


@pytest.mark.parametrize(
    ("direct", "effect", "disagrees"),
    [(1, -0.6, False), (1, -0.4, True), (-1, 0.6, False), (-1, 0.4, True), (0.4, -1, True)],
)
def test_knockouts_disagree_by_more_than_half_of_the_larger(
    direct: float, effect: float, disagrees: bool
) -> None:
    sums = torch.tensor([0.01, -0.01] * 6).double()
    table = HeadKnockouts(
        provenance=Provenance(),
        conditions=("a",),
        sets=(((0, 0),),),
        metric="difference",
        by="mean",
        clean=torch.zeros(12),
        effects=(effect + sums)[None],
        direct=(direct + sums)[None],
        all_paths=(direct - sums)[None],
    )
    row = table.to_dataframe().iloc[0]
    assert row["disagrees"] == disagrees
    assert row["effect"] == pytest.approx(effect)
    assert row["all_paths"] == pytest.approx(direct)
    assert "value_paths" not in row


# ---- what is measured


def test_effects_are_means_over_the_tokens_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all prompts together: a prompt with more such tokens weighs more; loss and divergence
    token by token."""
    monkeypatch.setattr(effects, "output_batch", lambda *_, **__: 2)
    model, basis, ids = tiny("bridge", "gpt2"), basis_of("bridge"), tokens(5, 9, seed=3)
    counted = torch.rand(5, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    edit = remove_term(model, basis, "content", "L0H1")
    losses, kls = measure_effects(view(model), ids, [nullcontext, lambda: edit], counted=counted)
    with torch.no_grad():
        clean = model(ids).double().log_softmax(-1)
        with edit:
            edited = model(ids).double().log_softmax(-1)
    total = int(counted[:, 1:].sum())
    for row, log_p in enumerate((clean, edited)):
        loss, kl = torch.zeros(5).double(), torch.zeros(5).double()
        for prompt, at in ((b, i) for b in range(5) for i in range(1, 9) if counted[b, i]):
            loss[prompt] -= log_p[prompt, at - 1, ids[prompt, at]]
            p, q = clean[prompt, at - 1], log_p[prompt, at - 1]
            kl[prompt] += (p.exp() * (p - q)).sum()
        assert losses[row].tolist() == pytest.approx((5 * loss / total).tolist(), rel=1e-4)
        assert kls[row].tolist() == pytest.approx((5 * kl / total).tolist(), rel=1e-3, abs=1e-6)
    assert float(kls[1].max()) > 1e-3


@pytest.mark.parametrize("has_bos", [False, True])
def test_tokens_after_a_repeated_one_count_and_periods_differ(has_bos: bool) -> None:
    seen, basis = view(tiny("bridge", "gpt2")), basis_of("bridge")
    if has_bos:
        seen = dataclasses.replace(seen, bos_id=3)
        basis = dataclasses.replace(
            basis, provenance=dataclasses.replace(basis.provenance, has_bos=True)
        )
    rows, counted = repeated_for(seen, basis, 12, seed=5)
    longest = 8 if has_bos else 9
    assert rows.shape == counted.shape == (12, 2 * longest + has_bos)
    assert not has_bos or bool((rows[:, 0] == 3).all())
    periods: list[int] = []
    for row, counts in zip(rows.tolist(), counted.tolist(), strict=True):
        text = row[has_bos:]
        period = next(p for p in range(1, len(text)) if text[p:] == text[:-p])
        assert len(set(text)) == period
        assert not has_bos or min(text) > 3
        assert counts == [False] * (has_bos + period + 1) + [True] * (len(text) - period - 1)
        periods.append(period)
    half = longest // 2
    assert periods == [longest - i % half for i in range(12)]
    short = 5 if has_bos else 4
    for length, fits in ((short, True), (short - 1, False)):
        cut = dataclasses.replace(basis, **_cut(basis, length))
        if fits:
            assert repeated_for(seen, cut, 3, seed=5)[0].shape == (3, short)
        else:
            with pytest.raises(GeometryError, match=f"at least {short} positions"):
                repeated_for(seen, cut, 3, seed=5)


def _cut(basis: tlg.PositionContext, length: int) -> dict[str, Any]:
    """Fields of a basis that has seen fewer positions."""
    cut = tlg.decompose(tiny("bridge", "gpt2"), tokens(16, length, seed=2), progress=False)
    names = [f.name for f in dataclasses.fields(cut) if f.name != "provenance"]
    return {name: getattr(cut, name) for name in names}


# ---- edges


def test_every_condition_is_that_of_its_context_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """In batches of any size: a swap takes from any prompt, and no condition edits the first
    ``drop`` inputs."""
    model, ids, heads = tiny("bridge", "gpt2"), tokens(5, 12, seed=7), ["L1H0", "L1H3"]
    others = ["mlp0", "embed"]
    found = edge_necessity(model, ids, "L0H1", heads, controls=others, drop=3)
    assert found.side == "key"
    assert found.drop == 3
    assert found.provenance.seed == 0
    assert found.provenance.contexts == 5
    options: dict[str, Any] = {"side": "key", "drop": 3}
    edits = {
        "remove": remove_edge(model, ids, "L0H1", heads, **options),
        "swap": swap_edge(model, ids, "L0H1", heads, seed=0, **options),
        **{name: remove_edge(model, ids, name, heads, **options) for name in others},
    }
    with torch.no_grad():
        for name, edit in edits.items():
            with edit:
                own = next_token_losses(model(ids), ids).mean(1)
            assert torch.allclose(found.losses[found.row(name)].float(), own, atol=1e-5), name
    monkeypatch.setattr(edge_effects, "output_batch", lambda *_, **__: 2)
    parts = edge_necessity(model, ids, "L0H1", heads, controls=others, drop=3)
    assert torch.allclose(parts.losses, found.losses, atol=1e-5)
    few = edge_necessity(model, ids, "L0H1", "L1H0")
    assert len(few.conditions) == 5 + 6, "six controls"
    for drop in (-1, 12):
        with pytest.raises(GeometryError, match=f"a position from 0 to 11, got {drop}"):
            edge_necessity(model, ids, "L0H1", heads, drop=drop)
    counted = torch.ones(5, 12, dtype=torch.bool)
    counted[2, 1:] = False
    with pytest.raises(GeometryError, match="counted: expected tokens of every prompt"):
        edge_necessity(model, ids, "L0H1", heads, counted=counted)


# ---- knockouts and paths


def test_means_are_over_all_reference_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = tiny("bridge", "gpt2"), tokens(5, 14, seed=5)
    found: list[Tensor] = []
    for size in (64, 2):
        monkeypatch.setattr(head_removal, "default_batch", lambda *_, size=size: size)
        with torch.no_grad(), remove_heads(model, "L0H1", reference=reference):
            found.append(model(PROMPTS))
    assert torch.allclose(found[0], found[1], atol=1e-5)


def test_random_sets_of_each_size_are_knocked_out() -> None:
    """Draws of two sizes, each the mean effect of its set; eight by default."""
    model, sets = tiny("bridge", "gpt2"), {"two": ["L0H0", "L1H3"], "one": "L0H1", "1": "L1H0"}
    options: dict[str, Any] = {"progress": False, "by": "zero"}
    table = head_knockouts(model, PROMPTS, "loss", heads=sets, controls=3, seed=5, **options)
    drawn = control_sets(table.sets, EVERY_HEAD, 3, seed=5)
    assert {size: [len(heads) for heads in draws] for size, draws in drawn.items()} == {
        1: [1, 1, 1],
        2: [2, 2, 2],
    }
    assert table.control is not None
    assert table.control_draws is not None
    for row, size in enumerate((2, 1, 1)):
        named = {str(i): heads for i, heads in enumerate(drawn[size])}
        each = head_knockouts(model, PROMPTS, "loss", heads=named, controls=0, **options)
        assert torch.allclose(table.control_draws[row], each.effects.mean(1), atol=1e-6)
        assert torch.allclose(table.control[row], each.effects.mean(0), atol=1e-6)
    frame = table.to_dataframe()
    gap = table.effects - table.control
    assert frame["control"].tolist() == pytest.approx(table.control.mean(1).tolist())
    assert frame["excess"].tolist() == pytest.approx(gap.mean(1).tolist())
    default = head_knockouts(model, PROMPTS, "loss", heads="L0H1", **options)
    assert default.control_draws is not None
    assert default.control_draws.shape == (1, 8)
    assert default.provenance.seed == 0
    same = head_knockouts(model, PROMPTS, "loss", heads="L0H1", controls=8, seed=0, **options)
    assert torch.equal(default.control_draws, same.control_draws)  # type: ignore[arg-type]


def test_random_senders_of_each_size_are_patched() -> None:
    model, receivers = tiny("bridge", "llama"), ["mlp1", "output"]
    senders = {"two": ["L0H0", "L1H3"], "one": "L0H1"}
    options: dict[str, Any] = {"progress": False, "by": "zero"}

    def patched(chosen: Any, receivers: Any, **more: Any) -> HeadPaths:
        return head_paths(model, PROMPTS, chosen, receivers, "loss", **(options | more))

    table = patched(senders, receivers, controls=3, seed=5)
    drawn = control_sets(table.sets, EVERY_HEAD, 3, seed=5)
    assert table.control is not None
    assert table.control_draws is not None
    for row, size in enumerate((2, 1)):
        named = {str(i): heads for i, heads in enumerate(drawn[size])}
        each = patched(named, receivers, controls=0)
        assert torch.allclose(table.control_draws[row].mT, each.effects.mean(2), atol=1e-5)
        assert torch.allclose(table.control[row], each.effects.mean(0), atol=1e-5)
    assert table.provenance.sources == ("wang2022", "goldowskydill2023")
    assert table.provenance.seed == 5
    default = patched("L0H1", "output")
    assert default.control_draws is not None
    assert default.control_draws.shape == (1, 1, 8)
    assert (default.between, default.provenance.seed) == ("frozen", 0)


@pytest.mark.parametrize(("between", "rows"), [("frozen", 3), ("live", 2)])
def test_a_pass_takes_as_many_inputs_as_fit(
    between: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader for each query, and for the keys and values of each of two groups, has its own
    float32 stream; live paths have two streams for a row."""
    of_a_row = (4 + 2 + 2) * 12 * 32 * 4
    monkeypatch.setattr(paths, "READ_BYTES", 3 * of_a_row)
    seen: list[int] = []
    run = EdgePass.run

    def watched(self: EdgePass, stream: Any, *given: Any, **options: Any) -> Tensor:
        seen.append(len(stream.total))
        return run(self, stream, *given, **options)

    monkeypatch.setattr(EdgePass, "run", watched)
    options: dict[str, Any] = {"controls": 0, "progress": False, "between": between, "by": "zero"}
    model, receivers = tiny("bridge", "llama"), "output"
    head_paths(model, PROMPTS[:3], ["L0H0", "L1H1"], receivers, "loss", **options)
    assert max(seen) == rows


def test_a_probability_is_that_of_the_first_target() -> None:
    model = tiny("bridge", "gpt2")
    options: dict[str, Any] = {"heads": "L0H1", "controls": 0, "progress": False, "by": "zero"}
    first = [right for right, _ in TARGETS]
    found = [
        head_knockouts(model, PROMPTS, "probability", targets=targets, **options)
        for targets in (TARGETS, first, [[right] for right in first])
    ]
    with torch.no_grad():
        wanted = model(PROMPTS)[:, -1].double().softmax(-1)[torch.arange(4), first]
    for table in found:
        assert torch.allclose(table.clean, wanted, atol=1e-6)
        assert torch.equal(table.effects, found[0].effects)
    for targets in ([(5, 9, 3)] * 4, [()] * 4, first[:3]):
        with pytest.raises(GeometryError, match="a token for each of 4 prompts"):
            head_knockouts(model, PROMPTS, "probability", targets=targets, **options)


# ---- surrogates


def test_the_table_of_surrogates_by_hand() -> None:
    """Heads of the first block, whose input is not edited: patterns with and without the edit."""
    model, ids = tiny("bridge", "gpt2"), tokens(5, 12, seed=3)
    basis = tlg.decompose(model, tokens(24, 30), progress=False)
    heads, parts = ["L0H2", "L0H0"], ("structured", "none")
    found = surrogate_effect(model, ids, basis, heads, parts=parts, seed=3)
    assert found.heads == ((0, 0), (0, 2))
    with torch.no_grad():
        plain, cached = model.run_with_cache(ids)
        loss = float(next_token_losses(plain, ids).mean())
        rows: list[list[Any]] = [["model", pytest.approx(loss), 0.0, 0.0]]
        for part in parts:
            with surrogate(model, basis, heads, part):
                edited, inside = model.run_with_cache(ids)
            new = float(next_token_losses(edited, ids).mean())
            moved = (inside["pattern", 0] - cached["pattern", 0]).abs().sum(-1)[..., 1:] / 2
            far = float(moved.mean((0, 2))[[0, 2]].mean())
            near = partial_approx(new), partial_approx(new - loss), partial_approx(far)
            rows.append([part, *near])
    assert [list(row) for row in found.rows()] == rows
    assert abs(rows[2][2].expected) > 1e-3
    assert (found.provenance.seed, found.provenance.contexts) == (3, 5)


def partial_approx(value: float) -> Any:
    return pytest.approx(value, rel=1e-3, abs=1e-5)


def test_a_surrogate_has_twenty_directions_by_default_and_no_more_than_positions_span() -> None:
    model = tiny("bridge", "gpt2")
    basis = tlg.decompose(model, tokens(40, 30), progress=False)

    def rank_of(**options: Any) -> int:
        new = replacements(view(model), basis, [(1, 2)], "low_rank", **options)[1]
        return new.left.shape[-1]  # type: ignore[union-attr]

    assert [rank_of(), rank_of(rank=20), rank_of(rank=21), rank_of(rank=1)] == [20, 20, 21, 1]
    assert rank_of(rank=32) == int(np.linalg.matrix_rank(basis.pos[1].numpy(), tol=1e-8))


# ---- bars


@pytest.mark.parametrize("progress", [True, False])
def test_bars_move_to_their_end_and_show_where_asked(
    progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = bars(monkeypatch, knockouts, paths, effects)
    for module in (knockouts, paths, effects):
        fits = 12 if module is effects else 2
        monkeypatch.setattr(module, "output_batch", lambda *_, fits=fits, **__: fits)
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge")
    options: dict[str, Any] = {} if progress else {"progress": False}
    head_knockouts(model, PROMPTS, targets=TARGETS, attributions=True, by="zero", **options)
    receivers = ["mlp1", "output"]
    head_paths(model, PROMPTS, ["L0H1"], receivers, "loss", controls=1, by="zero", **options)
    tlg.interventions.necessity_sufficiency(
        model, PROMPTS, basis, "L0H1", "content", draws=1, **options
    )
    attributed, passes, patched, measured, repeated = made
    assert (len(passes.items), len(attributed.items)) == (8, 4)
    assert patched.total == patched.seen == 2 * 2 * 2
    assert measured.total == measured.seen == 6 + 8
    assert repeated.seen == repeated.total
    assert [bar.disable for bar in made] == [not progress] * 4 + [True]
