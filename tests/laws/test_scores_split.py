"""Laws of the split of scores (SPEC C, L): on every architecture, class and loading the terms add
up to the model's own scores; writers, tensors of the caller, planes and offsets. That terms and
values are those of a decoder written out in float64, and what is refused, is in the tables."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.lib.kinds import far
from tests.lib.models import ARCHITECTURES, ENCODERS, loadable, tiny, tokens
from tl_geometry import scores

QUIET: dict[str, Any] = {"progress": False}
IDS = tokens(2, 14, seed=7)
STREAM = (("pos", "cvec"), ("pos", "ctx", "resid"))


def refused(call: Any, kind: type[Exception] = tlg.GeometryError) -> Any:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


@cache
def basis_of(architecture: str, normed: bool = False, way: tuple[str, bool] | None = None) -> Any:
    model = tiny(*_way(architecture, way))
    return tlg.decompose(model, tokens(16, 16, seed=2), normalize=normed, **QUIET)


def _way(architecture: str, way: tuple[str, bool] | None = None) -> tuple[str, str, bool]:
    model_class, processed = way or loadable(architecture)[0]
    return model_class, architecture, processed


def patterns(model: Any, ids: Tensor) -> Tensor:
    """The model's own patterns, the heads of all layers one after the other."""
    with torch.no_grad():
        cache = model.run_with_cache(ids)[1]
    layers = range(model.cfg.n_layers)
    return torch.cat([cache[f"blocks.{l}.attn.hook_pattern"] for l in layers], 1)


# ---- the terms add up


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_terms_sum_to_the_scores_of_the_model(architecture: str) -> None:
    """In every class and loading, for raw and normalised bases; the pattern that they make is the
    model's own. Guards: scores are large, terms differ, nothing is vacuous."""
    for way in loadable(architecture):
        model = tiny(*_way(architecture, way))
        own = patterns(model, IDS)
        for normed, parts in ((False, STREAM[0]), (True, STREAM[1])):
            split = tlg.split_scores(model, IDS, basis_of(architecture, normed, way), parts=parts)
            assert split.parts == ("bias", *parts)
            assert split.reconstruction.worst < 0.5
            assert split.reconstruction.scale > 10
            terms = torch.stack([x.double() for x in split.terms.values()])
            total = split.total()
            inside = split.allowed.expand_as(total)
            bound = 32 * 2**-24 * split.reconstruction.scale
            assert float((terms.sum(0) - total)[inside].abs().max()) <= bound
            assert bool(total[~inside].isneginf().all())
            assert float((split.pattern() - own).abs().max()) <= 2 * bound
            sizes = terms[:, inside].abs().amax(1)
            assert int((sizes > 0.1).sum()) >= 3, "several terms matter"
            assert (split.sinks.isfinite().any()) == (architecture == "gpt-oss")
            assert bool((split.allowed.sum(-1)[:, 0] > 1).all()) == (architecture in ENCODERS)


def test_writers_of_several_layers_have_one_set_of_names() -> None:
    """Those of the last layer; what has not written yet is zero."""
    model = tiny("bridge", "gpt2")
    split = tlg.split_scores(model, IDS, parts="writers")
    assert split.parts[:4] == ("bias", "embed", "pos_embed", "constants")
    late, early = split.parts.index("L0H1"), slice(0, 4)
    assert float(split.q[late, :, :, early].abs().max()) == 0.0
    assert float(split.q[late, :, :, 4:].abs().max()) > 0.1
    with_bos = torch.cat([torch.zeros(2, 1, dtype=torch.int64), IDS[:, 1:]], 1)
    named = tiny("bridge", "gpt2", text=True)
    splits = [tlg.split_scores(named, x, parts="blocks") for x in (IDS, with_bos)]
    starts = [(split.provenance.window or (None,))[0] for split in splits]
    assert starts == [0, 1], "without a basis a BOS token is left out"


def test_parts_of_the_callers_own() -> None:
    """For each layer, or for one; what they must not be is in the table of refusals."""
    model = tiny("bridge", "llama")
    with torch.no_grad():
        cache = model.run_with_cache(IDS)[1]
    stream = torch.stack([cache[f"blocks.{l}.hook_resid_pre"] for l in range(2)])
    parts = {"first": 0.25 * stream, "rest": 0.75 * stream}
    split = tlg.split_scores(model, IDS, parts=parts)
    assert (split.parts, split.shares().groups) == (("bias", "first", "rest"), ())
    one = tlg.split_scores(model, IDS, parts={n: x[1] for n, x in parts.items()}, layers=1)
    assert torch.equal(one.q, split.q[..., 4:, :])
    for wrong in (
        {"a-b": stream},
        {"all": torch.cat([stream, stream])},
        {"all": stream * torch.nan},
    ):
        refused(lambda wrong=wrong: tlg.split_scores(model, IDS, parts=wrong))
    refused(lambda: tlg.split_scores(model, IDS, parts=parts, memory_budget=1000), tlg.BudgetError)


@pytest.mark.once
def test_parts_too_large_for_their_rounding() -> None:
    """A mean that holds an enormous vector which cvec cancels: first a flag, then a refusal."""
    model, width = tiny("bridge", "gpt2"), 32
    flags = {}
    with torch.no_grad():
        stream = model.run_with_cache(IDS)[1]["blocks.0.hook_resid_pre"]
    direction = torch.randn(width, generator=torch.Generator().manual_seed(0))

    def call(size: float) -> Any:
        huge = (size * direction).expand_as(stream)
        parts = {"a": huge, "b": stream - huge}
        return tlg.split_scores(model, IDS, layers=0, parts=parts)

    for size in (1.0, 1e2):
        flags[size] = call(size).provenance.flags
    refused(lambda: call(1e6))  # they sum to the stream only as far as float32 goes
    assert not any("rounding" in flag for flag in flags[1.0])
    assert any("rounding" in flag for flag in flags[1e2])


# ---- other ways in


@pytest.mark.once
def test_heads_come_in_the_order_in_which_they_are_named() -> None:
    model, fitted = tiny("bridge", "gpt2"), basis_of("gpt2")
    several = tlg.split_scores(model, IDS, fitted, heads=["L1H2", "L0H3", "L1H0"])
    assert several.heads == ((1, 2), (0, 3), (1, 0))
    for at, head in enumerate(several.heads):
        one = tlg.split_scores(model, IDS, fitted, heads=head)
        assert torch.equal(several.q[..., at, :], one.q[..., 0, :])


@pytest.mark.once
def test_terms_are_taken_under_every_name_that_is_shown() -> None:
    llama, gpt2 = basis_of("llama"), basis_of("gpt2")
    shown = {}
    for kind, fitted in (("llama", llama), ("gpt2", gpt2), ("llama", basis_of("llama", True))):
        split = tlg.split_scores(tiny("bridge", kind), IDS, fitted, heads="L0H1")
        shown[kind, fitted.provenance.normalized] = split.bias_label
        expected = split.terms["bias", "bias"]
        for name in ("bias-bias", split.bias_label):
            assert torch.equal(split.terms[name], expected)
        table = split.shares()
        assert split.bias_label in repr(table)
        assert "bias-bias" in table.to_dataframe().term.tolist()
        refused(lambda split=split: split.terms["pos-cvecs"])
    assert shown == {
        ("llama", False): "mean-mean",
        ("gpt2", False): "bias-bias",
        ("llama", True): "relative position",
    }
    qwen3 = tlg.split_scores(tiny("bridge", "qwen3"), IDS, basis_of("qwen3", True), heads="L0H1")
    assert qwen3.bias_label == "mean-mean", "the scale of a QK-norm varies by token"


# ---- rotary planes


@pytest.mark.parametrize("architecture", ["llama", "gptj", "neox", "llama-yarn", "gemma3", "gpt2"])
def test_planes_add_up_to_their_terms(architecture: str) -> None:
    model = tiny("bridge", architecture)
    split = tlg.split_scores(model, IDS, basis_of(architecture), heads=["L1H1", "L0H2"])
    choices = ["near", "middle", "far", "pass"]
    numbered = range(split.head_planes.theta.shape[1])
    for planes in (choices, list(numbered)):
        parts = [split.on_planes(choice).summed() for choice in planes]
        assert far(torch.stack(parts).sum(0), split.summed()) < 1e-5
        assert sum(float(part.abs().max()) > 0.1 for part in parts) > (architecture != "gpt2")
    together = split.on_planes("near").summed() + split.on_planes("pass").summed()
    assert far(split.on_planes(["near", "pass"]).summed(), together) < 1e-5
    below = split.on_planes((0.0, 16.0))
    assert torch.equal(below.q, split.on_planes("near").q)
    shares: Any = (
        split.planes().to_dataframe().groupby(["layer", "head"], sort=False)[["cs", "gs"]].sum()
    )
    assert float((shares - 1).abs().max(axis=None)) < 1e-5
    for wrong in ("nearest", len(numbered), (5.0, 1.0), -1):
        refused(lambda wrong=wrong: split.on_planes(wrong))


@pytest.mark.parametrize("architecture", ["llama", "gptj", "neox", "llama-yarn", "gpt-oss"])
def test_the_constant_term_of_a_normalized_split_is_a_function_of_the_offset(
    architecture: str,
) -> None:
    """In every prompt the same, so that its profile has no width; on a raw basis it is not."""
    model, ids = tiny("bridge", architecture), tokens(12, 14, seed=7)
    heads = ["L1H1", "L0H2"]
    split = tlg.split_scores(model, ids, basis_of(architecture, True), heads=heads)
    profile = scores.offset_profile(split, "relative position", drop=0)
    # beyond a sliding window no cell has the offset
    term, means = split.terms["relative position"], profile.mean.nan_to_num()
    size = float(means.abs().max())
    offsets = torch.arange(14).unsqueeze(1) - torch.arange(14)
    inside = split.allowed.expand_as(term)
    kernel = means[:, offsets.clamp(min=0)].expand_as(term)
    assert float((term - kernel)[inside].abs().max()) < 1e-5 * size
    assert float((profile.high - profile.low).nan_to_num().max()) < 1e-5 * size
    assert float(term.max() - term.min()) > 0.1
    raw = tlg.split_scores(model, ids, basis_of(architecture), heads=heads).terms["mean-mean"]
    assert float((raw[:, :, 5, 3] - raw[:, :, 6, 4]).abs().max()) > 1e-3


def test_offset_profiles_are_means_over_diagonals() -> None:
    for kind in ("gpt2", "gemma2", "bert"):
        ids = tokens(12, 9, seed=7)
        split = tlg.split_scores(tiny("bridge", kind), ids, basis_of(kind), heads="L0H1")
        for term, drop in ((None, None), (("pos", "cvec"), 0)):
            table = scores.offset_profile(split, term, drop=drop).to_dataframe().set_index("offset")
            matrix = split.summed() if term is None else split.terms[term]
            start = 1 if drop is None else drop
            matrix = matrix[:, 0, start:, start:].double()
            allowed = split.allowed[0, start:, start:]
            for offset in [int(x) for x in table.index]:
                found: Any = table.loc[offset]
                cells = allowed.diagonal(-offset)
                assert int(cells.sum()) == found.cells
                if not found.cells:  # beyond a sliding window
                    assert (kind, found.isna().sum()) == ("gemma2", 3)
                    continue
                means = matrix.diagonal(-offset, 1, 2)[:, cells].mean(1)
                reach = 2.200985160 * float(means.std()) / 12**0.5  # t of 11 degrees of freedom
                expected = [float(means.mean()) + x for x in (0, -reach, reach)]
                assert found[["mean", "low", "high"]].tolist() == pytest.approx(
                    expected, rel=1e-6, abs=1e-9
                )
            assert (table.index[0] < 0) == (kind == "bert")
