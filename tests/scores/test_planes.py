"""Rotary planes of scores: they add up to every term, their shares need no matrix, and planted
heads are read back."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.induction import D_ROTARY, rotary_previous_token
from tests.lib.models import loadable, tiny, tokens
from tl_geometry import decompose, split_scores, sweep_heads
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.base.results import Result
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.scores import (
    Band,
    HeadPlanes,
    OffsetProfile,
    PlaneTable,
    RelativeKernel,
    ScoreSplit,
    default_bands,
    offset_profile,
    offset_share,
    relative_kernel,
)

ROTARY = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "neox",
    "phi",
    "gptj",
    "olmo2",
    "llama3-rope",
    "llama-yarn",
)
PLAIN = ("gpt2", "bloom", "bert")
PROMPTS = tokens(batch=3, length=18, seed=7)
MANY = tokens(batch=12, length=18, seed=8)


@cache
def basis_of(
    kind: str, architecture: str, normalize: bool = False, dtype: torch.dtype = torch.float64
) -> PositionContext:
    corpus = tokens(batch=24, length=20, seed=2)
    model = tiny(kind, architecture, dtype=dtype)
    return decompose(model, corpus, normalize=normalize, progress=False)


@cache
def split_of(kind: str, architecture: str, normalize: bool = False) -> ScoreSplit:
    model = tiny(kind, architecture, dtype=torch.float64)
    return split_scores(model, PROMPTS, basis_of(kind, architecture, normalize))


def sizes(split: ScoreSplit) -> float:
    """The largest sum of absolute products of a score."""
    q, k = split.q.abs().sum(0), split.k.abs().sum(0)
    return float(torch.einsum("bihe,bjhe->bhij", q, k).max())


@pytest.mark.parametrize("architecture", [*ROTARY, *PLAIN])
def test_planes_add_up_to_every_term(architecture: str) -> None:
    for kind in dict.fromkeys(kind for kind, _ in loadable(architecture)):
        split = split_of(kind, architecture)
        count = split.planes.theta.shape[1]
        assert count == (1 if architecture in PLAIN else len(split.planes.theta[0]))
        each = [split.on_planes(m) for m in range(count)]
        for term in [t for t in split.terms if t != ("alibi", "alibi")]:
            total = torch.stack([part[term] for part in each]).sum(0)
            assert float((total - split[term]).abs().max()) <= 1e-12 * sizes(split)
        whole = torch.stack([part.total().nan_to_num(neginf=0) for part in each]).sum(0)
        alibi = 0 if split.bias is None else torch.where(split.allowed, split.bias, 0)
        assert torch.allclose(
            whole + alibi, split.total().nan_to_num(neginf=0), atol=1e-12 * sizes(split)
        )
        if count > 1:
            parts = [float(part[split.parts[2], split.parts[2]].abs().max()) for part in each]
            assert min(parts) > 1e-3 * max(parts), "every plane carries something"


def test_a_model_without_rotation_has_one_plane() -> None:
    split = split_of("bridge", "gpt2")
    assert split.planes.theta.tolist() == [[0.0]] * 8
    assert split.planes.bands() == (("pass",),) * 8
    assert torch.equal(split.on_planes("pass")["pos-cvec"], split["pos-cvec"])
    assert float(split.on_planes("near")["pos-cvec"].abs().max()) == 0
    table = split.shares()
    assert torch.allclose(table.planes().cs[:, 0], table.cs, atol=1e-12)


def test_bands_make_up_all_planes() -> None:
    for architecture in ROTARY:
        planes = split_of("bridge", architecture).planes
        chosen = torch.stack([planes.chosen(name) for name in (*default_bands(18), "pass")])
        assert torch.equal(chosen.sum(0), (~planes.theta.isnan()).long())
    edges = HeadPlanes(
        torch.zeros(1, 8, dtype=torch.int64),
        2 * math.pi / torch.tensor([[16.0, 16.1, 128.0, 128.1, math.inf]], dtype=torch.float64),
        128,
    )
    assert edges.bands() == (("near", "middle", "middle", "far", "pass"),)
    assert edges.chosen([Band(16.05, 128), 4]).tolist() == [[False, True, True, False, True]]
    assert edges.select(torch.tensor([0])).bands() == edges.bands()


def dense_shares(split: ScoreSplit, drop: int) -> tuple[Tensor, Tensor]:
    """cs and gs [head plane term] from every plane of every term as a matrix."""
    allowed = split.allowed[:, drop:, drop:]
    centre = lambda x: row_center(x[..., drop:, drop:].double(), allowed)
    whole = split.total().nan_to_num(neginf=0)
    total, cap = centre(whole), split.softcap[:, None, None]
    capped = torch.where(torch.isinf(cap), whole, cap * torch.tanh(whole / cap))[..., drop:, drop:]
    p = torch.where(allowed, capped, -torch.inf).softmax(-1)
    moved = torch.where(allowed, p - 1 / allowed.sum(-1, keepdim=True), 0)
    sums: list[list[Tensor]] = [[], []]
    for m in range(split.planes.theta.shape[1]):
        part = split.on_planes(m)
        terms = [centre(part[t]) for t in split.terms if t != ("alibi", "alibi")]
        for out, weight in zip(sums, (total, moved), strict=True):
            out.append(torch.stack([(t * weight).sum((0, 2, 3)) for t in terms], -1))
    cs, gs = (torch.stack(out, 1) for out in sums)
    return (
        cs / total.square().sum((0, 2, 3))[:, None, None],
        gs / (moved * total).sum((0, 2, 3))[:, None, None],
    )


@pytest.mark.parametrize("architecture", ["llama", "neox", "gptj", "gemma2", "gemma3", "bloom"])
@pytest.mark.parametrize("normalize", [False, True])
def test_shares_are_those_of_the_planes_as_matrices(architecture: str, normalize: bool) -> None:
    split = split_of("bridge", architecture, normalize)
    shares = split.shares()
    table = shares.planes()
    for ours, dense in zip((table.cs, table.gs), dense_shares(split, 1), strict=True):
        assert torch.allclose(ours, dense, atol=1e-10)
    for of_planes, of_terms in ((table.cs, shares.cs), (table.gs, shares.gs)):
        terms = len(split.parts) ** 2
        assert torch.allclose(of_planes.sum(1), of_terms[:, :terms], atol=1e-12)
    rest = shares.cs[:, -1] if split.bias is not None else 0
    assert torch.allclose(table.total_cs.sum(-1), 1 - rest * torch.ones(8).double(), atol=1e-12)


def test_planes_of_what_each_writer_wrote() -> None:
    """Which frequency carries which writer: the same sums with a part for each writer."""
    model = tiny("bridge", "llama", dtype=torch.float64)
    split = split_scores(model, PROMPTS, None, parts="writers", heads="L1H2")
    shares = split.shares()
    table = shares.planes()
    assert table.terms == shares.terms
    assert len(table.terms) == len(split.parts) ** 2 > 9
    for ours, dense in zip((table.cs, table.gs), dense_shares(split, shares.drop), strict=True):
        assert torch.allclose(ours, dense, atol=1e-10)
    assert torch.allclose(table.cs.sum(1), shares.cs, atol=1e-12)


@pytest.mark.parametrize("architecture", ["llama", "neox", "gemma3", "gpt2", "bloom"])
def test_the_sweep_gives_the_same_shares(architecture: str) -> None:
    model, basis = (
        tiny("bridge", architecture, dtype=torch.float64),
        basis_of("bridge", architecture),
    )
    theirs = split_of("bridge", architecture).shares()
    options: list[dict[str, Any]] = [{"batch_size": 1}, {"detail": ("planes", "toeplitz")}]
    swept = sweep_heads(model, PROMPTS, basis, progress=False, detail="planes")
    for option in options:
        given: dict[str, Any] = {"detail": "planes"} | option
        swept = sweep_heads(model, PROMPTS, basis, progress=False, **given)
        table = swept.planes()
        assert torch.allclose(table.cs, theirs.planes().cs, atol=1e-6)
        assert torch.allclose(table.gs, theirs.planes().gs, atol=1e-6)
        assert torch.allclose(swept.cs, theirs.cs, atol=1e-6)
        assert table.head_planes.bands() == theirs.planes().head_planes.bands()
        assert swept.shares().planes().length == 18
    some = swept.top("cs_cvec-cvec", 3)
    rows = [swept.heads.index(head) for head in some.heads]
    assert torch.equal(some.planes().cs, swept.planes().cs[rows])
    plain = sweep_heads(model, PROMPTS, basis, progress=False)
    with pytest.raises(GeometryError, match='detail="planes"'):
        plain.planes()


def test_layers_with_fewer_planes_stand_beside_others() -> None:
    one = HeadPlanes(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 1).double(), 20)
    assert one.theta.tolist() == [[0.0]]
    table = PlaneTable(
        provenance=split_of("bridge", "llama").provenance,
        heads=((0, 0), (1, 0)),
        terms=("a-a",),
        head_planes=HeadPlanes(
            torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0]]),
            torch.tensor([[1.0, 0.1], [0.0, torch.nan]], dtype=torch.float64),
            20,
        ),
        cs=torch.tensor([[[0.75], [0.25]], [[1.0], [0.0]]]),
        gs=torch.tensor([[[0.5], [0.5]], [[1.0], [0.0]]]),
    )
    assert [row[:5] for row in table.rows()] == [
        (0, 0, 0, pytest.approx(6.2832, abs=1e-4), "near"),
        (0, 0, 1, pytest.approx(62.832, abs=1e-3), "far"),
        (1, 0, 0, math.inf, "pass"),
    ]
    by_band = table.by_band()
    assert by_band.bands == ("near", "middle", "far", "pass")
    assert by_band.total_cs.tolist() == [[0.75, 0, 0.25, 0], [0, 0, 0, 1]]
    assert by_band.dominant == ("unclear", "pass")  # near by covariance alone
    agreeing = dataclasses.replace(table, gs=table.cs).by_band()
    assert agreeing.dominant == ("near", "pass")
    own = table.by_band({"short": Band(0, 10), "long": Band(10, math.inf)})
    assert own.total_gs.tolist() == [[0.5, 0.5, 0], [0, 0, 1]]
    assert len(list(own.rows())) == 6


PLANTED = [(1.0, range(4)), (1.0, (0,)), (3.0, (1,)), (5.0, range(4))]


@pytest.mark.parametrize(("offset", "planes"), PLANTED, ids=str)
def test_a_planted_head_is_read_back(offset: float, planes: Any) -> None:
    """Head L0H0 scores ``c sum_m cos((i - j - offset) w_m)``: offset, planes, kernel and share."""
    model = rotary_previous_token(offset, planes)
    basis = decompose(model, tokens(24, 20, 2), normalize=True, progress=False)
    kernel = relative_kernel(model, basis, heads="L0H0", length=20)
    there = torch.zeros(D_ROTARY // 2, dtype=torch.bool)
    there[list(planes)] = True
    assert torch.equal(kernel.amplitude[0] > 1e-3, there)
    assert torch.allclose(kernel.peak[0][there], torch.tensor(offset).double(), atol=1e-4)
    split = split_scores(model, MANY, basis, heads="L0H0")
    profile = offset_profile(split)
    waves = 2 * math.pi * 4.0 ** (torch.arange(4).double() / 4)
    delta = torch.arange(17).double()
    expected = torch.cos((delta[:, None] - offset) * 2 * math.pi / waves)[:, there].sum(-1)
    scale = 36 / math.sqrt(D_ROTARY)
    assert torch.allclose(profile.mean[0], scale * expected, atol=1e-4)
    assert torch.allclose(kernel.total()[0, :17], profile.mean[0], atol=1e-4)
    assert int(profile.peak[0]) == round(offset) if len(planes) == 4 else True
    assert float((profile.high - profile.low).max()) < 1e-4, "the same for every prompt"
    assert float(offset_share(split)[0]) > 1 - 1e-6
    table = split.shares().planes()
    assert torch.allclose(table.wavelength[0], waves, rtol=1e-5)
    cells = torch.where(split.allowed[0, 1:, 1:], 1.0, 0).double()
    i = torch.arange(17.0).double()
    terms = torch.stack(
        [torch.cos((i[:, None] - i - offset) * 2 * math.pi / w) for w in waves[there]]
    )
    centred = row_center(terms, cells.bool())
    whole = centred.sum(0)
    shares = (centred * whole).sum((1, 2)) / whole.square().sum()
    assert torch.allclose(table.total_cs[0][there], shares, atol=1e-4)
    assert torch.allclose(table.cs[0, :, 0], table.total_cs[0], atol=1e-5), "all of it in bias-bias"
    near = float(shares[waves[there] <= 16].sum())
    bands = table.by_band()
    assert float(bands.total_cs[0, 0]) == pytest.approx(near, abs=1e-4)


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "qwen2", "neox", "phi", "gptj", "gemma2"]
)
def test_the_kernel_is_the_bias_term_at_every_cell(architecture: str) -> None:
    model = tiny("bridge", architecture, dtype=torch.float64)
    basis = basis_of("bridge", architecture, True)
    kernel = relative_kernel(model, basis, length=18)
    split = split_of("bridge", architecture, True)
    assert kernel.heads == split.heads
    at = torch.arange(18).unsqueeze(1) - torch.arange(18)
    table = kernel.total(at.clamp(min=0).flatten()).view(-1, 18, 18)
    error = torch.where(split.allowed, split["bias-bias"] - table, 0).abs().max()
    assert float(error) < 1e-6 * float(table.abs().max()), "tables of sines are float32"
    for m in range(kernel.theta.shape[1]):
        part = split.on_planes(m)["bias-bias"][0, :, :, 0]
        assert torch.allclose(part, kernel.by_plane(torch.arange(18))[:, m], atol=1e-5)
    profile = offset_profile(split, "bias-bias", drop=0)
    seen = ~profile.mean.isnan()  # a sliding window sees some offsets only
    assert torch.allclose(profile.mean[seen], kernel.total()[seen], atol=1e-5)
    negative = kernel.total(torch.tensor([-3]))
    assert torch.allclose(negative[:, 0], split["bias-bias"][0, :, 2, 5], atol=1e-5)
    raw = split_of("bridge", architecture)["bias-bias"]
    assert float(torch.where(split.allowed, raw - table, 0).abs().max()) > 0.05 * float(
        table.abs().max()
    )


def test_what_has_no_kernel_is_refused() -> None:
    model = tiny("bridge", "llama", dtype=torch.float64)
    with pytest.raises(GeometryError, match=r"normalize=True"):
        relative_kernel(model, basis_of("bridge", "llama"))
    with pytest.raises(GeometryError, match=r"length: expected 2 to 64 positions, got 65"):
        relative_kernel(model, basis_of("bridge", "llama", True), length=65)
    qwen = tiny("bridge", "qwen3", dtype=torch.float64)
    with pytest.raises(UnsupportedModelError, match=r'got QK-norm. Use offset_profile\(.*"bias'):
        relative_kernel(qwen, basis_of("bridge", "qwen3", True))
    gpt2 = tiny("bridge", "gpt2", dtype=torch.float64)
    with pytest.raises(GeometryError, match="expected a rotary model"):
        relative_kernel(gpt2, basis_of("bridge", "gpt2", True))


@cache
def many(architecture: str = "llama") -> ScoreSplit:
    model = tiny("bridge", architecture, dtype=torch.float64)
    return split_scores(model, MANY, basis_of("bridge", architecture))


@pytest.mark.parametrize("architecture", ["llama", "bert", "gemma2"])
def test_profiles_are_means_over_diagonals(architecture: str) -> None:
    split = many(architecture)
    for term, matrix in (("pos-cvec", split["pos-cvec"]), (None, split.total())):
        profile = offset_profile(split, term, drop=2)
        for d in profile.offsets.tolist():
            for h in range(8):
                kept = split.allowed[h, 2:, 2:].diagonal(-d)
                cells = matrix[:, h, 2:, 2:].diagonal(-d, -2, -1)[:, kept]
                at = d - profile.first
                assert int(profile.cells[h, at]) == int(kept.sum())
                if not bool(kept.any()):
                    assert math.isnan(float(profile.mean[h, at]))
                    continue
                each = cells.mean(1)
                assert float(profile.mean[h, at]) == pytest.approx(float(each.mean()), abs=1e-9)
                half = 2.200985 * float(each.std()) / math.sqrt(12)  # t(11) at 0.975
                assert float(profile.high[h, at] - each.mean()) == pytest.approx(half, rel=1e-5)
    assert (offset_profile(many("bert")).first, offset_profile(many("llama")).first) == (-16, 0)


def test_few_prompts_give_no_interval() -> None:
    profile = offset_profile(split_of("bridge", "llama"))
    assert bool(profile.low.isnan().all())
    assert not bool(profile.mean.isnan().any())
    assert not bool(offset_profile(many()).low.isnan().any())


def test_heads_are_shared_under_the_mask_of_their_own_layer() -> None:
    """Gemma 2's first block attends to a window."""
    model, basis = tiny("bridge", "gemma2", dtype=torch.float64), basis_of("bridge", "gemma2")
    split = many("gemma2")
    assert not torch.equal(split.allowed[0], split.allowed[-1])
    alone = [
        offset_share(split_scores(model, MANY, basis, heads=[(layer, h) for h in range(4)]))
        for layer in (0, 1)
    ]
    assert torch.allclose(offset_share(split), torch.cat(alone), atol=1e-12)


def test_what_is_restricted_says_so() -> None:
    split = many()
    near = split.on_planes(["near", 3])
    assert "rotary planes near, 3 alone" in near.provenance.flags
    assert near.planes.theta.equal(split.planes.theta)
    assert not torch.allclose(near.pattern(), split.pattern(), atol=0.1)
    with pytest.raises(GeometryError, match="planes 0 to 3"):
        split.on_planes(4)
    with pytest.raises(GeometryError, match="planes"):
        split.on_planes("fast")
    with pytest.raises(GeometryError, match="over < up_to"):
        split.on_planes(Band(5, 5))
    paper = split_scores(
        tiny("bridge", "llama", dtype=torch.float64),
        PROMPTS,
        basis_of("bridge", "llama"),
        preset="paper",
    )
    assert paper.planes.theta.tolist() == [[0.0]] * 8, "the paper's terms are not rotated"
    with pytest.raises(GeometryError, match="preset='exact'"):
        paper.on_planes("near")


def test_results_keep_their_planes(tmp_path: Path) -> None:
    split = many()
    kernel = relative_kernel(
        tiny("bridge", "llama", dtype=torch.float64), basis_of("bridge", "llama", True)
    )
    table = split.shares()
    results: list[Result] = [split, table, table.planes(), table.planes().by_band()]
    results += [kernel, offset_profile(split)]
    for i, result in enumerate(results):
        again = type(result).load(result.save(tmp_path / f"{i}.safetensors"))
        assert str(list(again.rows())) == str(list(result.rows()))
        assert len(result.columns()) == len(next(iter(result.rows())))
    assert isinstance(results[4], RelativeKernel)
    assert isinstance(results[5], OffsetProfile)
    loaded = ScoreSplit.load(tmp_path / "0.safetensors")
    assert torch.equal(loaded.on_planes("near").q, split.on_planes("near").q)
