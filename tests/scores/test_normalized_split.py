"""Splits, sweeps, values and interventions on a normalised basis: the same scores, no frozen norm
scale, an exact kernel."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lib.models import HAS_HOOKED, loadable, tiny, tiny_hooked, tokens
from tl_geometry import decompose, render, split_scores, split_values, sweep_heads
from tl_geometry.base.errors import GeometryError, ReconstructionError
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions.terms import keep_term, remove_term
from tl_geometry.measures import compare_bases
from tl_geometry.models import attention_spec, view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.render import head_view, sweeps
from tl_geometry.scores import sweep
from tl_geometry.scores.details import DETAILS
from tl_geometry.scores.split import ScoreSplit

ARCHITECTURES = [
    "gpt2",
    "llama",
    "neox",
    "gptj",
    "bloom",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi",
    "olmo2",
    "opt",
    "gpt-oss",
    "bert",
]
PROMPTS = tokens(batch=3, length=18, seed=7)
CORPUS = tokens(batch=24, length=20, seed=2)


def normalized_basis(model: Any) -> PositionContext:
    """The basis of normed states."""
    return decompose(model, CORPUS, normalize=True, progress=False)


@cache
def bases(
    model_class: str, architecture: str, dtype: torch.dtype = torch.float32, processed: bool = False
) -> dict[str, PositionContext]:
    model = tiny(model_class, architecture, processed, dtype)
    return {"raw": decompose(model, CORPUS, progress=False), "normalized": normalized_basis(model)}


def split_on(
    which: str, architecture: str, model_class: str = "bridge", **options: Any
) -> ScoreSplit:
    return split_scores(
        tiny(model_class, architecture), PROMPTS, bases(model_class, architecture)[which], **options
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_terms_sum_to_the_same_scores(architecture: str) -> None:
    for model_class, processed in loadable(architecture):
        model, found = (
            tiny(model_class, architecture, processed),
            bases(model_class, architecture, processed=processed),
        )
        raw, normed = (split_scores(model, PROMPTS, found[name]) for name in ("raw", "normalized"))
        assert normed.reconstruction.adds_up
        assert normed.reconstruction.worst < 0.5
        assert normed.provenance.normalized
        assert not raw.provenance.normalized
        total = torch.stack([normed[t].double() for t in normed.terms]).sum(0)
        bound = reconstruction_bound(2**-24, max(raw.scale, normed.scale))
        assert float((total - raw.total())[:, raw.allowed].abs().max()) <= bound
        assert torch.allclose(normed.pattern(), raw.pattern(), atol=2 * bound)
        same = view(model).attention_norm(0).norm_type is None
        differ = max(float((normed[t] - raw[t]).abs().max()) for t in raw.terms)
        assert differ < 1e-3 if same else differ > 0.5, "other terms, unless nothing is normed"


def rotated_constants(
    architecture: str, dtype: torch.dtype, which: str
) -> tuple[Tensor, ScoreSplit]:
    split = split_scores(
        tiny("bridge", architecture, dtype=dtype),
        PROMPTS,
        bases("bridge", architecture, dtype)[which],
    )
    return split["bias-bias"].double(), split


def off_kernel(term: Tensor) -> float:
    """How far a term ``[batch head query key]`` is from a function of i - j alone, relative to its
    size."""
    worst = 0.0
    for offset in range(term.shape[-1]):
        cells = term.diagonal(-offset, -2, -1)
        spread = cells.amax((0, 2)) - cells.amin((0, 2))
        worst = max(worst, float(spread.max()))
    return worst / float(term.abs().max())


ROTARY = ["llama", "neox", "gptj", "qwen2", "phi"]


@pytest.mark.parametrize("architecture", ROTARY)
def test_bias_bias_is_a_function_of_the_offset(architecture: str) -> None:
    """To the rounding of the model's own tables of sines, which Hugging Face computes in float32
    whatever the model's dtype."""
    kernel, split = rotated_constants(architecture, torch.float64, "normalized")
    assert off_kernel(kernel) < 1e-6
    assert split.bias_label == "relative position"
    raw, split = rotated_constants(architecture, torch.float64, "raw")
    assert off_kernel(raw) > 0.05, "frozen scales vary by token"
    assert split.bias_label == "mean-mean"


@pytest.mark.parametrize("architecture", ROTARY)
def test_with_exact_tables_of_sines_it_is_one_to_rounding(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maps of the layer with the angles of the tables recomputed in float64, through the
    queries and keys of the mean."""
    right = attention_spec.rotate

    def exact(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
        size = cos.shape[-1]
        pair = torch.arange(size) % (size // 2) if style == "half" else torch.arange(size) // 2
        angle = torch.arange(len(cos)).double()[:, None] * 10000.0 ** (-2 * pair.double() / size)
        assert torch.allclose(angle.cos(), cos, atol=1e-5)
        return right(x, angle.cos(), angle.sin(), style)

    model, found = (
        tiny("bridge", architecture, dtype=torch.float64),
        bases("bridge", architecture, torch.float64),
    )
    layers: list[Any] = []
    monkeypatch.setattr(attention_spec, "rotate", exact)
    view(model).run_layers(PROMPTS, (0, 1), layers.append, verify=False)

    def term(layer: Any, mean: Tensor) -> Tensor:
        part = mean.expand_as(layer.h)
        q, k = layer.project_q(part) + layer.q_constant, layer.project_k(part) + layer.k_constant
        return torch.einsum("bihe,bjhe->bhij", q, k)

    for layer in layers:
        assert off_kernel(term(layer.normalized(), found["normalized"].mean[layer.layer])) < 1e-12
        assert off_kernel(term(layer, found["raw"].mean[layer.layer])) > 0.05


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize(
    "options",
    [
        {"normalization_type": "RMS", "n_key_value_heads": 2},
        {"normalization_type": "LN", "rotary_dim": 4},
        {"normalization_type": "LN", "rotary_dim": 4, "rotary_adjacent_pairs": True},
    ],
)
def test_in_full_float64_the_kernel_is_exact_to_rounding(options: dict[str, Any]) -> None:
    model = tiny_hooked(
        positional_embedding_type="rotary", dtype=torch.float64, **{"rotary_dim": 8, **options}
    )
    model = model.double()
    term = split_scores(model, PROMPTS, normalized_basis(model))["bias-bias"]
    assert term.dtype == torch.float64
    assert off_kernel(term) < 1e-12
    raw = split_scores(model, PROMPTS, decompose(model, CORPUS, progress=False))["bias-bias"]
    assert off_kernel(raw) > 0.05


def test_a_qk_norm_stays_frozen_so_that_its_constants_are_no_kernel() -> None:
    term, split = rotated_constants("qwen3", torch.float64, "normalized")
    assert off_kernel(term) > 0.01
    assert split.bias_label == "mean-mean"
    assert split.reconstruction.adds_up


def test_without_rotation_nothing_is_relabelled_and_constants_apart_are_named_so() -> None:
    assert split_on("normalized", "gpt2").bias_label == "bias-bias"
    assert split_on("normalized", "llama", parts=("mean", "pos", "cvec")).bias_label == "bias-bias"
    split = split_on("normalized", "llama")
    assert [split.label(t) for t in ("bias-bias", "pos-cvec")] == ["relative position", "pos-cvec"]
    text, table = split.shares().text(), split.shares()
    assert "relative position" in text
    assert "bias-bias" not in text
    assert "relative position" in table._repr_html_()
    assert "bias-bias" in set(table.to_dataframe().term.dropna())
    assert "bias-bias" in split_on("normalized", "gpt2").shares().text()


@pytest.mark.parametrize(
    "parts", [("pos", "ctx", "resid"), ("mean", "pos", "cvec"), ("mean", "pos", "ctx", "resid")]
)
def test_other_named_parts_refine_the_same_terms(parts: tuple[str, ...]) -> None:
    fine, coarse = split_on("normalized", "llama", parts=parts), split_on("normalized", "llama")
    assert fine.reconstruction.adds_up
    bound = reconstruction_bound(2**-24, fine.scale)
    merged = {"bias": ("bias", "mean"), "pos": ("pos",), "cvec": ("cvec", "ctx", "resid")}
    for a, b in itertools.product(merged, merged):
        members = [(x, y) for x in merged[a] for y in merged[b] if (x, y) in fine.terms]
        summed = torch.stack([fine[m] for m in members]).sum(0)
        assert float((summed - coarse[a, b]).abs().max()) <= bound


def test_parts_are_those_of_the_normed_stream() -> None:
    """Worked out from the weights: ``q_pos = (pos gain) W_Q``, rotated, with no scale of any token
    in it."""
    model, basis = tiny("bridge", "gpt2"), bases("bridge", "gpt2")["normalized"]
    seen, split = view(model), split_on("normalized", "gpt2", layers=1)
    weights, norm = seen.weights(1), seen.attention_norm(1)
    pos = basis.pos_seen[1, :18] * norm.gain.double()
    q = torch.einsum("id,hde->ihe", pos, weights.W_Q.double()) / 8**0.5
    k = torch.einsum("id,hde->ihe", pos, weights.W_K.double())
    expected = torch.einsum("ihe,jhe->hij", q, k)
    assert torch.allclose(split["pos-pos"].double(), expected.expand(3, -1, -1, -1), atol=1e-4)
    assert float(expected.abs().max()) > 1


def test_parts_of_ones_own_stay_parts_of_the_stream() -> None:
    model = tiny("bridge", "llama")
    h = model.run_with_cache(PROMPTS)[1]["resid_pre", 1]
    parts = {"half": h / 2, "rest": h / 2}
    with_basis, without = (
        split_scores(model, PROMPTS, basis, parts=parts, layers=1)
        for basis in (bases("bridge", "llama")["normalized"], None)
    )
    assert torch.equal(with_basis["half-rest"], without["half-rest"])
    assert not with_basis.provenance.normalized
    assert with_basis.bias_label == "bias-bias"


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_the_published_presets_refuse_a_normalised_basis(preset: str) -> None:
    with pytest.raises(
        GeometryError,
        match=rf"basis with preset='{preset}': expected .* got a normalised basis\. Use decompose",
    ):
        split_on("normalized", "gpt2", preset=preset)
    assert split_on("raw", "gpt2", preset=preset).parts


def test_a_raw_basis_and_a_normalised_one_are_not_compared() -> None:
    raw, normed = (bases("bridge", "gpt2")[n] for n in ("raw", "normalized"))
    with pytest.raises(
        GeometryError, match="states of one kind, normalized=False, got normalized=True"
    ):
        compare_bases(raw, normed, states=[0, 1])
    assert compare_bases(normed, normed, rank=2).angle_max.abs().max() < 1e-3


# ------------------------------------------------------------------------------------- sweep,
# values


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3", "gemma2", "bloom", "bert"])
def test_the_sweep_equals_the_split(architecture: str) -> None:
    model, basis = tiny("bridge", architecture), bases("bridge", architecture)["normalized"]
    options = {"detail": "energy", "batch_size": 2, "progress": False}
    table = sweep_heads(model, PROMPTS, basis, **options)
    shares = split_scores(model, PROMPTS, basis).shares()
    assert table.provenance.normalized
    for name in ("cs", "gs", "es"):
        assert torch.allclose(getattr(table, name), getattr(shares, name), atol=5e-5), name
    assert table.bias_label == shares.bias_label
    shown = table.readable("bias-bias")
    assert (shown == "relative position") == (architecture in ("llama", "gemma2"))
    assert "cs_bias-bias" in table.columns()
    assert "cs_bias-bias" in table.to_dataframe().columns
    raw = sweep_heads(model, PROMPTS, bases("bridge", architecture)["raw"], progress=False)
    assert (raw.bias_label == "mean-mean") == (architecture in ("llama", "qwen3", "gemma2"))
    assert (architecture == "bert") == torch.allclose(raw.cs, table.cs, atol=1e-3)


def test_details_work_on_a_normalised_basis() -> None:
    model, basis = tiny("bridge", "llama"), bases("bridge", "llama")["normalized"]
    table = sweep_heads(model, PROMPTS, basis, detail=DETAILS, progress=False)
    split = split_scores(model, PROMPTS, basis)
    pattern = (
        (split.summed() - split["cvec-cvec"]).masked_fill(~split.allowed, -torch.inf).softmax(-1)
    )
    tv = (pattern - split.pattern()).abs().sum(-1)[..., 1:].mean((0, 2)) / 2
    assert torch.allclose(table.details["tv_cvec-cvec"].float(), tv, atol=1e-4)
    assert table.details["cs_position_null"].isfinite().all()


def test_a_frozen_scale_left_in_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, basis = tiny("bridge", "llama"), bases("bridge", "llama")["normalized"]
    assert sweep_heads(model, PROMPTS, basis, progress=False).cs.isfinite().all()
    right = sweep.project_basis
    monkeypatch.setattr(sweep, "project_basis", lambda *a: right(*a)._replace(normalized=False))
    with pytest.raises(ReconstructionError, match="cvec of q in layer 0"):
        sweep_heads(model, PROMPTS, basis, progress=False)


def test_a_normalised_basis_that_says_it_is_raw_gives_other_terms_that_still_close() -> None:
    """No reconstruction check can see it, because cvec takes up the rest: the provenance has to be
    right."""
    model, basis = tiny("bridge", "llama"), bases("bridge", "llama")["normalized"]
    lying = dataclasses.replace(
        basis, provenance=dataclasses.replace(basis.provenance, normalized=False)
    )
    assert not torch.allclose(
        split_scores(model, PROMPTS, lying)["pos-pos"],
        split_on("normalized", "llama")["pos-pos"],
        atol=0.1,
    )


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "olmo2", "bert"])
def test_values_on_a_normalised_basis(architecture: str) -> None:
    model = tiny("bridge", architecture)
    split = split_values(model, PROMPTS, bases("bridge", architecture)["normalized"])
    assert split.reconstruction.adds_up
    assert split.provenance.normalized
    z = model.run_with_cache(PROMPTS)[1]["z", 1]
    assert torch.allclose(split.z.sum(0)[:, :, 4:], z, atol=2e-4 * float(z.abs().max()))
    raw = split_values(model, PROMPTS, bases("bridge", architecture)["raw"])
    apart = float((raw.z - split.z).abs().max())
    assert apart < 1e-4 if architecture in ("bert", "olmo2") else apart > 0.1
    if architecture == "llama":  # the value of the mean is one vector, whatever the token
        constant = split.z[0] / split.z[0, :1, :1]
        assert torch.allclose(constant, torch.ones_like(constant), atol=1e-3)


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "qwen3"])
def test_terms_are_removed_from_a_live_model(architecture: str) -> None:
    for model_class, processed in loadable(architecture):
        model, basis = (
            tiny(model_class, architecture, processed),
            bases(model_class, architecture, processed=processed)["normalized"],
        )
        split, clean = (
            split_scores(model, PROMPTS, basis, layers=1),
            model.run_with_cache(PROMPTS)[1],
        )
        cut = (
            (split.summed() - split["cvec-cvec"])
            .masked_fill(~split.allowed, -torch.inf)
            .softmax(-1)
        )
        v = clean["v", 1]
        v = v if v.shape[2] == 4 else v.repeat_interleave(4 // v.shape[2], 2)
        with remove_term(model, basis, "cvec-cvec", [(1, h) for h in range(4)]):
            z = model.run_with_cache(PROMPTS)[1]["z", 1]
        z = z.unflatten(-1, (4, -1)) if z.dim() == 3 else z
        expected = torch.einsum("bhij,bjhe->bihe", cut, v)
        assert torch.allclose(z, expected, atol=1e-3 * float(expected.abs().max()))
        assert float((z - clean["z", 1].view_as(z)).abs().max()) > 0.01
        with keep_term(model, basis, "pos-pos", "L1H0"):
            assert model(PROMPTS).isfinite().all()


# ----------------------------------------------------------------------------------------- figures


def test_figures_show_the_readable_names_and_the_gains() -> None:
    model, basis = tiny("bridge", "llama"), bases("bridge", "llama")["normalized"]
    split, table = (
        split_scores(model, PROMPTS, basis),
        sweep_heads(model, PROMPTS, basis, progress=False),
    )
    assert "relative position" in render.split(split, "L1H0", panels="terms").html()
    assert "bias-bias" not in render.split(split, "L1H0", panels="terms").html()
    page = render.heads(table, "gs_bias-bias").html()
    assert "gs_relative position" in page
    assert "bias-bias" not in page
    assert (
        head_view.head_grid(table, "cs_bias-bias").title == "Every head: share of relative position"
    )
    assert head_view.scale("gs_position", torch.tensor([0.25])) == (-0.3, 0.3)
    for share, values in (("cs", table.group_cs), ("gs", table.group_gs)):
        drawn = sweeps.head_shares(table, share=share)
        image = np.asarray(drawn.figure.axes[0].images[0].get_array())
        assert np.allclose(image.ravel(), values[:, 0])
    with pytest.raises(GeometryError, match="share: expected one of 'cs', 'gs', got 'es'"):
        sweeps.head_shares(table, share="es")
