"""Laws of the split of scores (SPEC C, L): on every architecture, class and loading the terms add
up to the model's own scores; writers, tensors of the caller, planes and offsets. That terms and
values are those of a decoder written out in float64, and what is refused, is in the tables."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import tl_geometry as tlg
from tests.lib.data import refused
from tests.lib.kinds import far
from tests.lib.models import loadable, tiny, tokens
from tl_geometry import scores

QUIET: dict[str, Any] = {"progress": False}
IDS = tokens(2, 14, seed=7)


@cache
def basis_of(architecture: str, normed: bool = False, way: tuple[str, bool] | None = None) -> Any:
    model = tiny(*_way(architecture, way))
    return tlg.decompose(model, tokens(16, 16, seed=2), normalize=normed, **QUIET)


def _way(architecture: str, way: tuple[str, bool] | None = None) -> tuple[str, str, bool]:
    model_class, processed = way or loadable(architecture)[0]
    return model_class, architecture, processed


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


@pytest.mark.once
def test_a_part_of_ones_own_keeps_its_name() -> None:
    terms = tlg.split_scores(tiny("bridge", "llama"), IDS, basis_of("llama"), layers=1).terms
    assert torch.equal(terms["mean", "mean"], terms["bias", "bias"])  # as it is shown
    h = tiny("bridge", "llama").run_with_cache(IDS)[1]["blocks.1.hook_resid_pre"]
    own = tlg.split_scores(tiny("bridge", "llama"), IDS, layers=1, parts={"mean": h}).terms
    assert [bool(own[name].any()) for name in ("mean-mean", "bias-bias")] == [True, False]


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
        assert [x in split.terms for x in ("pos-cvec", "mean-mean", "a-b", 5)] == [1, 1, 0, 0]
        assert split.shares(drop=2).provenance.window == (2, 9)
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
