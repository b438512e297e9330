"""The split of attention scores is exact on every architecture, in every class, folded and raw; and it refuses what does not close."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import ARCHITECTURES, loadable, tiny, tokens
from tl_geometry.decomposition import PositionContext

POST_SOFTMAX = ("bert", "roberta", "opt", "gptj", "gpt-neo")
"""Architectures whose bridge holds the pattern in ``hook_attn_scores``."""
CELLS = [(a, kind, processed) for a in ARCHITECTURES for kind, processed in loadable(a)]
LENGTH = 12


@cache
def basis_of(architecture: str, kind: str, processed: bool, dtype: torch.dtype = torch.float32) -> PositionContext:
    return tlg.decompose(tiny(kind, architecture, processed, dtype), tokens(24, LENGTH, seed=5), progress=False)


@cache
def split_of(architecture: str, kind: str, processed: bool, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny(kind, architecture, processed, dtype)
    return tlg.split_scores(model, tokens(2, LENGTH), basis_of(architecture, kind, processed, dtype))


def own(model: Any, name: str) -> Tensor:
    """An attention hook of every layer from TransformerLens's own cache, heads of all layers side by side."""
    _, cache = model.run_with_cache(tokens(2, LENGTH))
    layers = [cache[f"blocks.{layer}.attn.{name}"] for layer in range(model.cfg.n_layers)]
    return torch.cat([x.detach() for x in layers], dim=1)


@pytest.mark.parametrize(("architecture", "kind", "processed"), CELLS)
def test_terms_sum_to_the_models_own_scores(architecture: str, kind: str, processed: bool) -> None:
    split = split_of(architecture, kind, processed)
    model = tiny(kind, architecture, processed)
    terms = dict(split.terms)
    assert len(terms) == len(split.terms) == (10 if split.bias is not None else 9)
    total = torch.stack(list(terms.values())).sum(0)
    size = torch.stack([t.abs() for t in terms.values()]).sum(0)
    bound = 64 * 2.0**-24 * float(size.max())  # the closing error of two routes
    allowed = split.allowed.expand_as(total)
    assert all(torch.isfinite(t).all() for t in terms.values())  # finite at every cell, masked ones too
    assert (total - split.total())[allowed].abs().max() <= bound
    assert float(split.model_scores()[allowed].abs().max()) >= 10  # real attention, or nothing is proved
    pattern = own(model, "hook_pattern").float()
    assert (split.pattern() - pattern).abs().max() <= 4 * bound
    if kind == "hooked" or architecture not in POST_SOFTMAX:
        scores = own(model, "hook_attn_scores").float()
        assert (split.model_scores() - scores)[allowed].abs().max() <= bound
    for name, (error, limit) in split.closing.checks.items():
        assert error <= limit, name
    position = [name for name in terms if not {"cvec"} & set(name)]
    assert len(position) in (4, 5)


@pytest.mark.parametrize("architecture", ["gpt2", "bloom", "neox"])
def test_float64_closes_to_rounding(architecture: str) -> None:
    split = split_of(architecture, "bridge", False, torch.float64)
    checked = [name for name in split.closing.checks if "pattern" not in name]  # some softmaxes run in float32
    assert len(checked) >= 6
    for name in checked:
        assert split.closing.checks[name][0] <= 1e-12 * split.closing.scale, name


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if len(loadable(a)) > 1])
def test_terms_agree_between_classes_and_loadings(architecture: str) -> None:
    first, *others = [split_of(architecture, *way) for way in loadable(architecture)]
    reference = dict(first.terms)
    allowed = first.allowed
    size = float(torch.stack([t.abs() for t in reference.values()]).sum(0).max())
    for other in others:
        for name, term in other.terms.items():
            gap = torch.where(allowed, term - reference[name], 0.0)
            if name == ("alibi", "alibi"):  # equal up to a constant of each row
                gap = torch.where(allowed, gap - gap.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True), 0.0)
            assert gap.abs().max() <= 1e-4 * size, (architecture, name)


@pytest.mark.skipif(("bloom", "hooked", False) not in CELLS, reason="TransformerLens 4 has no HookedTransformer")
def test_alibi_closes_whatever_was_run_before() -> None:
    model, basis = tiny("hooked", "bloom"), basis_of("bloom", "hooked", False)
    for length in (8, 40, LENGTH):  # HookedTransformer keeps the bias of its longest prompt
        model(tokens(1, length))
        split = tlg.split_scores(model, tokens(2, LENGTH), basis)
        assert split.closing.checks["scores"][0] <= split.closing.checks["scores"][1]


def test_context_parts_refine_cvec() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("gpt2", "bridge", False)
    coarse = split_of("gpt2", "bridge", False)
    fine = tlg.split_scores(model, tokens(2, LENGTH), basis, parts=("pos", "ctx", "resid"))
    assert len(fine.terms) == 16
    size = float(coarse.total()[coarse.allowed.expand_as(coarse.total())].abs().max())
    assert (fine.total() - coarse.total()).nan_to_num(0.0).abs().max() < 1e-5 * size
    merged = sum((fine.terms["pos", part] for part in ("ctx", "resid")), torch.zeros(()))
    assert (merged - coarse.terms["pos", "cvec"]).abs().max() < 1e-5 * size
    assert torch.equal(fine.terms["pos", "pos"], coarse.terms["pos", "pos"])


def test_any_named_parts_of_the_stream_are_split_and_false_ones_refused() -> None:
    model = tiny("bridge", "gpt2")
    _, cache = model.run_with_cache(tokens(2, LENGTH))
    embed, position = cache["hook_embed"].detach(), cache["hook_pos_embed"].detach().expand(2, -1, -1)
    split = tlg.split_scores(model, tokens(2, LENGTH), None, layers=[0], parts={"token": embed, "position": position})
    assert set(split.parts) == {"bias", "token", "position"}
    allowed = split.allowed.expand_as(split.total())
    exact = own(model, "hook_attn_scores")[:, :4]
    assert (split.total() - exact)[allowed].abs().max() < 1e-4
    with pytest.raises(tlg.GeometryError, match=r"parts: expected parts that sum to the input of layer 0, got a sum that is off by"):
        tlg.split_scores(model, tokens(2, LENGTH), None, layers=[0], parts={"token": embed, "position": 1.01 * position})


def test_shares_sum_to_one_over_terms_and_groups() -> None:
    for architecture in ("gpt2", "llama", "bloom"):
        table = split_of(architecture, "bridge", False).shares()
        frame = table.to_dataframe()
        for column in ("term", "group"):
            rows = frame[frame[column].notna() & (frame[column] != "")] if column in frame else frame
            sums = rows.groupby(["layer", "head", rows[column].notna()])["cs"].sum()
            assert len(rows) > 0
            assert (sums - 1).abs().max() < 1e-6 or column == "group"


def test_published_presets_miss_the_total_and_say_so() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("gpt2", "bridge", False)
    exact = split_of("gpt2", "bridge", False)
    allowed = exact.allowed.expand_as(exact.total())
    scale = float(exact.total()[allowed].abs().max())
    gaps = {}
    for name, options in {"reference": {}, "reference, double norm": {"legacy_double_ln": True}, "paper": {}}.items():
        split = tlg.split_scores(model, tokens(2, LENGTH), basis, preset=name.split(",", maxsplit=1)[0], **options)
        total = torch.stack(list(split.terms.values())).sum(0)
        gaps[name] = float((total - exact.total())[allowed].abs().max()) / scale
        assert split.provenance.preset == name.split(",", maxsplit=1)[0]
    assert gaps["reference"] > 0.2  # its parts are normalised one by one, with every bias in each
    assert gaps["reference, double norm"] > 0.2
    assert gaps["paper"] > 0.2  # no norm, no bias
    assert gaps["reference"] != gaps["reference, double norm"]


def test_values_split_exactly_and_reach_the_logits() -> None:
    for kind in dict.fromkeys(kind for kind, _ in loadable("gpt2")):
        model, basis = tiny(kind, "gpt2"), basis_of("gpt2", kind, False)
        split = tlg.split_values(model, tokens(2, LENGTH), basis)
        z = torch.cat(
            [x.detach() for x in (model.run_with_cache(tokens(2, LENGTH))[1][f"blocks.{i}.attn.hook_z"] for i in range(2))], dim=2
        )
        fields = [f for f in vars(split).values() if isinstance(f, Tensor) and f.dim() == 5]
        assert any((f.sum(0) - z).abs().max() < 1e-4 * z.abs().max() for f in fields if f.shape[1:] == z.shape), [f.shape for f in fields]


ASK = {"tokens": tokens(1, LENGTH)}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"preset": "exactly"}, r"preset: expected one of 'exact'"),
        ({"layers": [2]}, r"layers: expected an index from 0 to 1, got 2"),
        ({"heads": ["L0H4"]}, r"head 'L0H4': expected an index from 0 to 3, got 4"),
        ({"heads": ["first"]}, r"heads: expected \(layer, head\) pairs"),
        ({"memory_budget": 100}, r"heads=.*sweep_heads|sweep_heads"),
        ({"parts": ("pos", "content")}, r"parts: expected"),
        ({"tokens": tokens(1, LENGTH + 4)}, r"expected at most 12|positions"),
        ({"tokens": "text"}, r"prepend_bos: expected True or False with text"),
    ],
)
def test_bad_requests_are_refused(options: dict[str, Any], text: str) -> None:
    arguments = ASK | options
    with pytest.raises(tlg.GeometryError, match=text):
        tlg.split_scores(tiny("bridge", "gpt2"), arguments.pop("tokens"), basis_of("gpt2", "bridge", False), **arguments)


def test_a_basis_of_another_model_is_refused() -> None:
    with pytest.raises(tlg.GeometryError, match=r"basis: expected the model it was computed from, tiny-llama"):
        tlg.split_scores(tiny("bridge", "gpt2"), tokens(1, LENGTH), basis_of("llama", "bridge", False))


def test_what_does_not_close_is_refused_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    from tl_geometry.verbs import cuts

    whole = cuts.Cut.stream

    def without_mean(self: Any, layer: Any) -> dict[str, Tensor]:
        found = whole(self, layer)
        return {**found, "cvec": found["cvec"] + found["mean"]}

    monkeypatch.setattr(cuts.Cut, "stream", without_mean)
    with pytest.raises(tlg.ClosingError, match="split of layer 0"):
        tlg.split_scores(tiny("bridge", "gpt2"), tokens(1, LENGTH), basis_of("gpt2", "bridge", False))
