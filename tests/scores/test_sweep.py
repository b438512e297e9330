"""The sweep over all heads: equal to the split of the same prompts, whatever the batches and the
budget; nulls, details, errors."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tl_geometry as tlg
from tests.lib.models import tiny, tokens
from tl_geometry import decompose
from tl_geometry.base.errors import BudgetError, GeometryError, ReconstructionError
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models import view
from tl_geometry.models.batches import another_row
from tl_geometry.models.untrained import reinitialized
from tl_geometry.scores import sweep
from tl_geometry.scores.details import DETAILS, score
from tl_geometry.scores.head_types import head_type_scores, repeated_random_tokens
from tl_geometry.scores.shapes import contrast_sums, offset_sums
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.sweep import SweepTable, sweep_heads
from tl_geometry.scores.terms import GROUPS

ARCHITECTURES = ["gpt2", "llama", "bloom", "qwen3", "gemma2", "gpt-neo", "bert"]
PROMPTS = tokens(batch=5, length=20, seed=4)


@cache
def basis_of(architecture: str, length: int = 24) -> PositionContext:
    return decompose(
        tiny("bridge", architecture), tokens(batch=24, length=length, seed=2), progress=False
    )


def swept(architecture: str, **options: Any) -> SweepTable:
    return sweep_heads(
        tiny("bridge", architecture), PROMPTS, basis_of(architecture), progress=False, **options
    )


@cache
def everything(architecture: str) -> SweepTable:
    return swept(architecture, detail=DETAILS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_the_split_of_the_same_prompts(architecture: str) -> None:
    ours = swept(architecture, batch_size=2, detail="energy")
    theirs = split_scores(tiny("bridge", architecture), PROMPTS, basis_of(architecture)).shares()
    assert ours.heads == theirs.heads
    assert ours.terms == theirs.terms
    assert torch.allclose(ours.cs, theirs.cs, atol=2e-5)
    assert torch.allclose(ours.es, theirs.es, atol=2e-5)
    assert ours.dropped_mass is not None
    assert theirs.dropped_mass is not None
    assert torch.allclose(ours.dropped_mass, theirs.dropped_mass, atol=1e-6)
    assert ours.dominant == theirs.dominant
    assert float(ours.cs.abs().max()) > 0.1


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_cells_are_those_of_each_layers_mask(architecture: str) -> None:
    """Sliding windows: layers of one model have different masks."""
    split = split_scores(tiny("bridge", architecture), PROMPTS, basis_of(architecture))
    keys = split.allowed[:, 1:, 1:].sum(-1)  # the first position is outside of the window
    expected = len(PROMPTS) * torch.where(keys > 1, keys, 0).sum(-1)
    assert len(expected.unique()) == 2
    for table in (swept(architecture, batch_size=2).shares(), split.shares()):
        assert torch.equal(table.sums.cells, expected.double())
        cells = table.to_dataframe().groupby(["layer", "head"]).cells.first()
        assert cells.tolist() == expected.tolist()


def test_energies_are_measured_where_they_are_asked_for() -> None:
    plain, whole = swept("gpt2"), swept("gpt2", detail="energy")
    assert torch.equal(plain.cs, whole.cs)
    assert torch.equal(plain.gs, whole.gs)
    assert plain.es.isnan().all()
    assert not any(column.startswith("es_") for column in plain.columns())
    assert set(whole.columns()) - set(plain.columns()) == {
        f"es_{name}" for name in (*whole.groups, *whole.terms)
    }
    best = whole.top("es_cvec-cvec", 1).heads[0]
    assert best == whole.heads[int(whole.es[:, whole.terms.index("cvec-cvec")].argmax())]
    with pytest.raises(GeometryError, match=r'detail="energy"'):
        plain.top("es_cvec-cvec")


def test_any_batches_and_budgets_give_the_same_numbers() -> None:
    whole = everything("gpt2")
    for options in ({"batch_size": 1}, {"batch_size": 3}, {"memory_budget": 2**20}):
        other = swept("gpt2", detail=DETAILS, **options)
        assert torch.allclose(other.sums.numerators, whole.sums.numerators, rtol=1e-5, atol=1e-4)
        assert torch.allclose(other.sums.energies, whole.sums.energies, rtol=1e-5)
        for name, value in whole.details.items():
            assert torch.allclose(other.details[name], value, atol=1e-4, equal_nan=True), name


def test_head_types_come_from_repeated_random_tokens() -> None:
    model = tiny("bridge", "gpt2")
    table = swept("gpt2")
    made = repeated_random_tokens(32, 2, 12, low=0, high=61, seed=1234)
    made = made[:, :64]
    found: dict[str, Tensor] = {}
    view(model).run(
        made,
        {
            f"blocks.{i}.attn.hook_pattern": lambda p, i=i: found.update({str(i): p})
            for i in range(2)
        },
    )
    expected = torch.cat(
        [head_type_scores(found[str(i)], made).scores["induction"] for i in range(2)]
    )
    assert torch.allclose(table.types["induction"], expected, atol=1e-6)
    assert 0 < table.baselines["induction"] < 0.1


def test_no_tensor_of_all_terms_or_layers_is_made() -> None:
    """The largest tensor made while shares are computed is far below one with all terms, and within
    the budget."""
    model, made = tiny("bridge", "gpt2"), tokens(batch=8, length=64, seed=3)
    basis = decompose(model, made, progress=False)
    budget = 2**20

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                Largest.size = max(Largest.size, out.untyped_storage().nbytes())
            return out

    work = sweep._SweepSums(view(model), basis, (0, 1), 64, (), budget, 0)
    with Largest():
        view(model).run_layers(made, (0, 1), work.on_layer, verify=False)
    assert 0 < Largest.size <= budget
    assert Largest.size < 9 * 8 * 4 * 64 * 64 * 4 / 2, "nine terms of one layer as float32"


def test_ablation_effect_equals_the_pattern_of_the_scores_without_the_term() -> None:
    for architecture in ("gpt2", "gemma2", "bloom"):
        table = everything(architecture)
        split = split_scores(tiny("bridge", architecture), PROMPTS, basis_of(architecture))
        total = split.summed()
        for query, key in list(split.terms)[2:9:3]:
            cut = total - split.terms[query, key]
            cap = split.softcap[:, None, None]
            changed = torch.where(
                torch.isinf(cap),
                cut,
                cap * torch.tanh(cut / torch.where(torch.isinf(cap), 1.0, cap)),
            )
            pattern = changed.masked_fill(~split.allowed, -torch.inf).softmax(-1)
            tv = (pattern - split.pattern()).abs().sum(-1)[..., 1:].mean((0, 2)) / 2
            assert torch.allclose(table.details[f"tv_{query}-{key}"].float(), tv, atol=1e-4), (
                architecture,
                query,
                key,
            )


def test_model_pattern_is_the_models_own() -> None:
    for architecture in ("gpt2", "gemma2", "gpt-oss", "bert", "bloom"):
        model = view(tiny("bridge", architecture))

        def check(layer: Any, architecture: str = architecture) -> None:
            total = score(layer.q, layer.k) * layer.scale + (
                0 if layer.bias is None else layer.bias
            )
            assert torch.allclose(layer.pattern_of(total), layer.pattern, atol=1e-5), architecture

        model.run_layers(PROMPTS, range(2), check)


def test_details_have_columns_and_profiles() -> None:
    table = everything("gpt2")
    frame = table.to_dataframe()
    assert len(frame) == 8
    for name in (
        "tv_pos-pos",
        "kl_cvec-cvec",
        "toeplitz_position",
        "contrast_cvec-cvec",
        "cs_position_null",
        "dropped_mass",
    ):
        assert not any(frame[name].isna().tolist()), name
    assert table.details["offsets_cvec-cvec"].shape == (8, 2 * 19 - 1)
    assert table.intervals is not None
    assert table.intervals.low.isnan().all()  # 5 contexts are too few
    assert len(table.shares().to_dataframe()) == 8 * 12
    assert set(swept("gpt2").details) == set()


def test_top_sorts_and_round_trips(tmp_path: Path) -> None:
    table = everything("gpt2")
    best = table.top("induction", 3)
    values = best.types["induction"]
    assert len(best.heads) == 3
    assert values.tolist() == sorted(table.types["induction"].tolist(), reverse=True)[:3]
    assert table.top("cs_pos-pos", 1, ascending=True).cs[0, 4] == table.cs[:, 4].min()
    assert best.cs.shape == (3, 9)
    where = table.heads.index(best.heads[0])
    assert torch.equal(
        best.details["offsets_position"][0, 18:], table.details["offsets_position"][where, 18:]
    )
    again = SweepTable.load(best.save(tmp_path / "sweep.safetensors"))
    assert again.heads == best.heads
    assert again.to_dataframe().equals(best.to_dataframe())
    with pytest.raises(
        GeometryError,
        match=r"column: expected one of \d+ names, such as .*, got 'inductive'",
    ) as refused:
        swept("gpt2").top("inductive")
    said = str(refused.value)
    assert len(said) < 600
    assert "'induction'" in said
    assert "table.columns() for all" in said
    assert "_flag" not in said
    assert table.top("position", 3).heads == table.top("cs_position", 3).heads


def test_one_layer_equals_its_rows_of_the_whole() -> None:
    one, whole = swept("llama", layers=[1]), swept("llama")
    assert one.heads == tuple((1, h) for h in range(4))
    assert torch.allclose(one.cs, whole.cs[4:], atol=1e-9)


def test_bad_input_is_refused_by_name() -> None:
    basis = basis_of("gpt2")
    model = tiny("bridge", "gpt2")
    with pytest.raises(
        GeometryError, match=r"detail: expected one of 'ablation', 'toeplitz'.*, got 'ablate'"
    ):
        swept("gpt2", detail="ablate")
    with pytest.raises(GeometryError, match=r"layers: expected an index from 0 to 1, got 2"):
        swept("gpt2", layers=[2])
    with pytest.raises(
        GeometryError, match=r"tokens: expected at most 24 positions, as the basis has seen, got 30"
    ):
        sweep_heads(model, tokens(2, 30), basis, progress=False)
    with pytest.raises(
        GeometryError,
        match=r"tokens: expected more than 2 positions \(the window starts at 1\), got 2",
    ):
        sweep_heads(model, tokens(2, 2), basis, progress=False)
    with pytest.raises(
        GeometryError,
        match=r"basis: expected the model it was computed from, tiny-gpt2 .*, got tiny-llama",
    ):
        sweep_heads(tiny("bridge", "llama"), PROMPTS, basis, progress=False)
    with pytest.raises(
        BudgetError,
        match=r"memory_budget: expected at least \d+ bytes for one context of 20 positions, "
        "got 1000",
    ):
        swept("gpt2", memory_budget=1000)


def test_bos_is_compared_over_all_batches() -> None:
    model, without = (
        dataclasses.replace(view(tiny("bridge", "gpt2")), bos_id=0),
        tokens(batch=6, length=20, seed=4),
    )
    begun = torch.cat([torch.zeros(6, 1, dtype=torch.int64), without[:, 1:]], dim=1)
    mixed = torch.cat([begun[:3], without[3:]])
    options: dict[str, Any] = {"batch_size": 3, "progress": False}
    basis = decompose(model, mixed, progress=False)
    assert sweep_heads(model, mixed, basis, **options).provenance.contexts == 6
    with pytest.raises(
        GeometryError, match="tokens: expected has_bos=False, as in the basis, got has_bos=True"
    ):
        sweep_heads(model, begun, basis, **options)
    with pytest.raises(
        GeometryError, match="tokens: expected has_bos=True, as in the basis, got has_bos=False"
    ):
        sweep_heads(model, mixed, decompose(model, begun, progress=False), **options)


def test_a_wrong_projection_of_the_basis_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subtraction alone would add up whatever mean and pos were: the explicit projection of one
    context does not."""
    right = sweep.project_basis

    def scaled_twice(layer: Any, basis: Any, columns: int) -> Any:
        found = right(layer, basis, columns)
        return found._replace(q=found.q * torch.tensor([1.0, 2.0]).view(2, 1, 1, 1))

    assert swept("gpt2").cs.isfinite().all()
    monkeypatch.setattr(sweep, "project_basis", scaled_twice)
    with pytest.raises(
        ReconstructionError,
        match=r"cvec of q in layer 0: expected subtraction and projection within .*, got",
    ):
        swept("gpt2")


def _feature_shares(model: Any, ids: Tensor, batch_size: int) -> Any:
    width = model.cfg.d_model
    source = (torch.rand(*ids.shape, 3), torch.randn(3, width), torch.zeros(width))
    known = tlg.circuits.dictionary(source, 1)
    return tlg.circuits.feature_shares(model, ids, known, batch_size=batch_size)


STREAMED: dict[str, Any] = {
    "position": lambda model, ids, size: sweep_heads(
        model, ids, basis_of("gpt2", 50), batch_size=size, progress=False
    ),
    "writers": lambda model, ids, size: sweep_heads(
        model, ids, parts="writers", batch_size=size, progress=False
    ),
    "composition": lambda model, ids, size: tlg.composition(
        model, ids, batch_size=size, progress=False
    ),
    "features": _feature_shares,
}
"""What reads scores batch by batch."""


@pytest.mark.parametrize("name", list(STREAMED))
@pytest.mark.parametrize("batch_size", [5, 2])
@pytest.mark.parametrize("spared", [0, 1, 2])
def test_a_hook_that_spares_a_row_is_refused(name: str, batch_size: int, spared: int) -> None:
    """One context of every batch is verified in the pass of that batch, another row each time."""
    model, ids = tiny("bridge", "gpt2"), tokens(batch=11, length=20, seed=4)
    spare = slice(spared, spared + 1)

    def act(q: Tensor, hook: Any) -> Tensor:
        changed = 1.3 * q
        changed[spare] = q[spare]
        return changed

    refused = pytest.raises(ReconstructionError, match=r"layer 1 of tiny-gpt2")
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_q", act)]), refused:
        STREAMED[name](model, ids, batch_size)
    assert STREAMED[name](model, ids, batch_size).cs.isfinite().all()


@pytest.mark.parametrize("name", list(STREAMED))
@pytest.mark.parametrize("point", ["attn.hook_q", "attn.hook_k", "attn.hook_pattern"])
def test_a_hook_that_acts_in_later_batches_is_refused(name: str, point: str) -> None:
    """Of windows longer than the sample of queries that later batches compare."""
    model, ids, passes = tiny("bridge", "gpt2"), tokens(batch=6, length=50, seed=4), [0]

    def act(value: Tensor, hook: Any) -> Tensor:
        passes[0] += 1
        return value if passes[0] < 2 else 1.3 * value

    refused = pytest.raises(ReconstructionError, match=r"layer 1 of tiny-gpt2")
    with model.hooks(fwd_hooks=[(f"blocks.1.{point}", act)]), refused:
        STREAMED[name](model, ids, 3)
    assert passes[0] == 2


def test_verified_rows_are_seeded_and_differ() -> None:
    def drawn(seed: int) -> list[int]:
        draws, rows = torch.Generator().manual_seed(seed), [0]
        for _ in range(40):
            rows.append(another_row(rows[-1], 5, draws))
        return rows

    assert drawn(0) == drawn(0) != drawn(1)
    assert set(drawn(0)) == set(range(5))
    assert all(a != b for a, b in itertools.pairwise(drawn(0)))


def test_uniform_heads_are_labelled() -> None:
    from tests.lib.models import hf_model
    from tl_geometry.models import from_hf

    hf = hf_model("gpt2")
    with torch.no_grad():
        attn = hf.transformer.h[1].attn.c_attn
        attn.weight[:, :8] = 0  # queries of head 0 of layer 1
        attn.bias[:8] = 0
    model = from_hf(hf, None, name="uniform")
    basis = decompose(model, tokens(12, 20, seed=2), progress=False)
    table = sweep_heads(model, PROMPTS, basis, progress=False)
    assert table.dominant[4] == "uniform"
    assert table.by_group.labels[4] == "uniform"
    assert torch.isnan(table.cs[4]).all()
    assert not torch.isnan(table.cs[[0, 1, 2, 3, 5, 6, 7]]).any()
    assert len(GROUPS) == len(table.groups)


def test_a_freshly_initialised_model_is_not_refused() -> None:
    """Its scores are of size 0.1: the pattern is reproduced to its own rounding, not to that of the
    scores."""
    import transformers

    from tl_geometry.models import from_hf

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=2,
        n_positions=32,
        vocab_size=100,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = from_hf(transformers.GPT2LMHeadModel(config), None, name="fresh")
    ids = torch.randint(0, 100, (8, 32))
    table = sweep_heads(model, ids, decompose(model, ids, progress=False), progress=False)
    assert table.cs.isfinite().all()
    assert split_scores(model, ids[:2], decompose(model, ids, progress=False)).total().max() < 1


def test_an_untrained_control_is_read_anew() -> None:
    """What is remembered of the trained layers does not reach the untrained control, and the
    trained model is as before afterwards."""
    model, before = tiny("bridge", "gpt2"), swept("gpt2")
    with reinitialized(model) as control:
        table = sweep_heads(
            control,
            PROMPTS,
            decompose(control, tokens(batch=24, length=24, seed=2), progress=False),
            progress=False,
        )
    assert not torch.allclose(table.cs, before.cs, atol=1e-2)
    assert torch.allclose(swept("gpt2").cs, before.cs)


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
def test_shapes_are_those_of_the_terms_of_the_split(architecture: str) -> None:
    table, split = (
        everything(architecture),
        split_scores(tiny("bridge", architecture), PROMPTS, basis_of(architecture)),
    )
    position = sum(
        (v for (a, b), v in split.terms.items() if "cvec" not in (a, b)), torch.zeros(())
    )
    shown = {
        "pos-pos": split.terms["pos", "pos"],
        "position": position,
        "cvec-cvec": split.terms["cvec", "cvec"],
    }
    for at in (slice(0, 4), slice(4, 8)):
        allowed = split.allowed[at.start, 1:, 1:]
        for name, term in shown.items():
            centred = row_center(term[:, at, 1:, 1:], allowed)
            expected = offset_sums(centred, allowed)
            assert torch.allclose(
                table.details[f"toeplitz_{name}"][at], expected.toeplitz_r2, atol=1e-4
            ), name
            assert torch.allclose(
                table.details[f"offsets_{name}"][at], expected.profile, atol=1e-4, equal_nan=True
            ), name
        content = row_center(shown["cvec-cvec"][:, at, 1:, 1:], allowed)
        contrast = contrast_sums(content, PROMPTS[:, 1:], allowed).contrast
        assert torch.allclose(table.details["contrast_cvec-cvec"][at], contrast, atol=1e-4)
