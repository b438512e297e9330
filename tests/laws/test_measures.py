"""Measures of position and context by numpy, their errors and nulls by their laws, two bases beside
their floors, and the sphere of a norm with the paths of tokens on it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from screenot.ScreeNOT import adaptiveHardThresholding
from torch import Tensor

import tl_geometry as tlg
from benchmarks.calibration_measures import two_bases
from tests.lib.reference.moments import jackknife
from tl_geometry import decompose_activations, measures, sphere
from tl_geometry.decomposition import PositionContext, resampling
from tl_geometry.measures.positional import screenot
from tl_geometry.models.norms import remove_mean
from tl_geometry.sphere import paths as formulas

cases = settings(deadline=None, max_examples=15)
seeds = st.integers(0, 10_000)
CONTEXTS, POSITIONS, D, FIRST = 32, 20, 12, 2
# pandas has no types for what is asked of it here
of_position: Any = tlg.positional_report
of_context: Any = tlg.contextual_report
compare: Any = measures.compare_bases
learning: Any = measures.learning_curve
QUICK: dict[str, Any] = {"jackknife": False, "nulls": False}


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def states(contexts: int = CONTEXTS, *, seed: int = 0, count: int = 2) -> Tensor:
    """States ``[state context position d_model]`` with a curve of three directions, three documents
    and a mean."""
    t = torch.linspace(0, 2 * math.pi, POSITIONS + FIRST, dtype=torch.float64)
    curve = torch.stack([t.cos(), t.sin(), 0.4 * (2 * t).cos()], 1) @ gaussian(50, 3, D)
    documents = gaussian(52, 3, D)[torch.arange(contexts) % 3]
    noise = 0.7 * gaussian(seed, count, contexts, POSITIONS + FIRST, D)
    return curve + documents[:, None] + noise + 3 * gaussian(51, D)


def basis_of(h: Tensor, **options: Any) -> PositionContext:
    return decompose_activations(h, **{"keep": 32, **options})


def numbers(table: Any, name: str) -> list[float]:
    return table.df[name].tolist()


def estimate(matrix: Tensor) -> Any:
    return screenot(torch.linalg.svdvals(matrix), (len(matrix), matrix.shape[1]), k=8)


@cases
@given(seeds, st.integers(24, 40), st.integers(24, 60))
def test_screenot_equals_the_authors_package_and_has_no_scale(
    seed: int, rows: int, columns: int
) -> None:
    spikes = gaussian(seed + 1, rows, 3) @ gaussian(seed + 2, 3, columns)
    Y = gaussian(seed, rows, columns) / columns**0.5 + 2 * spikes / columns
    _, threshold, rank = adaptiveHardThresholding(Y.numpy(), 8, strategy="i")
    ours, turn = estimate(Y), torch.linalg.qr(gaussian(seed, rows, rows)).Q
    assert abs(float(ours.threshold) - threshold) < 2e-5
    assert int(ours.rank) == rank
    for other, scale in ((Y.T, 1.0), (turn @ Y, 1.0), (1e-150 * Y, 1e-150), (1e120 * Y, 1e120)):
        found = estimate(other)
        assert int(found.rank) == rank
        assert float(found.threshold) / scale == pytest.approx(float(ours.threshold), rel=1e-9)


def stable_rank(pos: Tensor) -> Tensor:
    s = torch.linalg.svdvals(pos)
    return (s / s[..., :1]).square().sum(-1)


@pytest.mark.parametrize("sizes", [None, (9, 20, 12, 16)])
def test_errors_are_those_without_each_block(sizes: tuple[int, ...] | None) -> None:
    """Blocks of eight contexts; or documents as groups, which count by their size (Busing)."""
    labels = torch.arange(4).repeat_interleave(torch.tensor(sizes or (8, 8, 8, 8)))
    h = states(len(labels))
    basis = basis_of(h, groups=4, labels=labels) if sizes else basis_of(h)
    found = of_position(basis, k=4, nulls=False)
    of = lambda kept: stable_rank(decompose_activations(h[:, kept]).pos)
    whole, *without = (of(labels != g).numpy() for g in (-1, *range(4)))
    value, _, high = jackknife(whole, [(without, torch.bincount(labels).tolist())])
    expected = (high - value) / stats.t.ppf(0.975, 3)
    assert numbers(found, "stable_rank_se") == pytest.approx(expected.tolist())
    assert numbers(found, "blocks") == [4, 4]


def test_a_learning_curve_is_that_of_disjoint_blocks_and_ends_at_the_whole() -> None:
    h, basis = states(), basis_of(states())
    curve, report = learning(basis, k=4), of_position(basis, k=4, **QUICK)
    assert curve.column("contexts", state=0) == [4, 8, 16, 32]
    halves = [
        stable_rank(decompose_activations(h[:, part]).pos) for part in (slice(16), slice(16, 32))
    ]
    found = curve.column("stable_rank", contexts=16)
    assert found == pytest.approx(((halves[0] + halves[1]) / 2).tolist())
    for name in curve.names[2:]:
        assert curve.column(name, contexts=32) == pytest.approx(numbers(report, name)), name
    rough = curve.column("roughness", state=0)
    assert rough == sorted(rough, reverse=True)  # sampling noise falls with C
    context = learning(basis, "context", labels=torch.arange(32) % 3, rank=3)
    assert {"incoherence_avg", "overlap", "intra"} <= set(context.names)


def test_nulls_of_position_have_lost_the_effect_and_keep_their_laws() -> None:
    """Rows in random order, and Gaussian rows, have roughness 2 in expectation; noise holds what
    averages leave, whatever the curve."""
    draws, basis = 40, basis_of(states())
    table = of_position(basis, draws=draws, seed=3, k=4, jackknife=False)
    frame = table.df
    for null in ("shuffled", "isotropic"):
        error = frame[f"roughness_{null}_sd"] / draws**0.5
        assert ((frame[f"roughness_{null}"] - 2).abs() < 4 * error).all()
        assert (frame["roughness"] < 0.5 * frame[f"roughness_{null}"]).all()
        assert (frame["low_frequency"] > 1.2 * frame[f"low_frequency_{null}"]).all()
    assert (frame["relative_norm"] > 2 * frame["relative_norm_noise"]).all()
    noise = resampling.window_means(basis, 0, resampling.noise_weights(basis, draws // 2, 3))
    rows = (noise - noise.mean(1, keepdim=True)).numpy()
    rough = ((np.diff(rows, axis=1) ** 2).sum((1, 2)) / (rows**2).sum((1, 2))).mean()
    assert frame["roughness_noise"][0] == pytest.approx(rough)
    assert "rank_noise" in frame
    # random halves vary as the corpus does; places mean nothing on average
    assert not {"rank_noise_sd", "fracture_at_isotropic"} & set(frame)
    nothing = of_position(basis_of(gaussian(7, 1, 24, 48, D)), k=4, jackknife=False).df
    assert nothing["relative_norm"][0] == pytest.approx(nothing["relative_norm_noise"][0], rel=0.3)
    assert abs(nothing["split_half"][0]) < 0.2
    for part in (states()[..., :1], states()[:, :, :1]):
        assert "roughness_shuffled" not in of_position(basis_of(part)).names


def test_nulls_of_context_keep_coordinates_or_variance_and_lose_what_is_shared() -> None:
    """Independent pos and ctx that share large coordinates overlap far above random directions, but
    not above their flipped null; a common direction across coordinates stays above both."""
    g, size = torch.Generator().manual_seed(0), torch.ones(64)
    size[:4] = 30.0
    pos, ctx = (torch.randn(n, 64, generator=g) * size for n in (40, 60))
    shared = [
        torch.randn(n, 10, generator=g) @ torch.randn(10, 64, generator=g) * 8 for n in (40, 60)
    ]
    both = shared[0], torch.randn(60, 10, generator=g) @ torch.linalg.svd(shared[0])[2][:10] * 30

    def report(p: Tensor, c: Tensor) -> Any:
        h = p + c.unsqueeze(1) + 0.1 * torch.randn(60, 40, 64, generator=g)
        return of_context(basis_of(h), jackknife=False).df.iloc[0]

    alone, common = report(pos, ctx), report(pos + both[0], ctx + both[1])
    assert alone["overlap"] > 2.5 * alone["overlap_random"]
    assert alone["overlap_flipped"] == pytest.approx(alone["overlap"], abs=0.08)
    assert common["overlap"] > common["overlap_flipped"] + 0.15
    noise = gaussian(1, 1, 40, 8, D)  # no context at all: what is left is the noise of averages
    found = of_context(basis_of(noise), jackknife=False).df
    assert found["incoherence_avg"][0] == pytest.approx(
        found["incoherence_avg_exchanged"][0], rel=0.2
    )
    few = of_context(basis_of(noise, keep=9), jackknife=False)
    assert "incoherence_avg_exchanged" not in few.names


def flags_of(table: Any) -> str:
    return " | ".join(table.provenance.flags)


def test_what_is_unusual_about_a_basis_is_said() -> None:
    h, labels = states(), torch.arange(32) % 3
    noisy = torch.stack([h[0], gaussian(7, 32, POSITIONS + FIRST, D)])
    plain = of_position(basis_of(h), k=4, **QUICK)
    assert flags_of(plain) == flags_of(of_context(basis_of(h), labels, rank=3, **QUICK)) == ""
    assert (numbers(plain, "blocks"), numbers(plain, "draws")) == ([0, 0], [0, 0])
    assert numbers(of_position(basis_of(h), k=4, jackknife=False, draws=3), "draws") == [3, 3]
    bare, flat = basis_of(h, second_moments=False), gaussian(3, 1, 12, 1, D).expand(-1, -1, 3, -1)
    for word, found in {
        "k=5 of 20": of_position(basis_of(h), **QUICK),
        "states 1": of_position(basis_of(noisy), k=4, **QUICK),
        "no relative norm": of_position(bare, k=4, **QUICK),
        "overlap of 2 of 3": of_context(basis_of(h[:, :, :3]), rank=3, **QUICK),
        "no compactness": of_context(bare, labels, rank=3, **QUICK),
        "at states [0]": of_context(basis_of(flat), labels[:12], **QUICK),
        "fewer than 32 contexts": of_context(basis_of(h[:, :31]), rank=3, nulls=False),
        "10 contexts or 4 blocks": of_position(basis_of(h, groups=3), k=4, nulls=False),
        "fewer than 10 contexts": of_position(basis_of(h[:, :9]), k=4, nulls=False),
    }.items():
        assert word in flags_of(found)
        assert "0" not in flags_of(found).partition("states 1")[2][:3]
        for name in (name for name in found.names if name.endswith("_se")):
            assert all(map(math.isnan, numbers(found, name)))
    enough = of_context(basis_of(h), rank=3, nulls=False)
    assert not any(map(math.isnan, numbers(enough, "overlap_se")))


def test_comparison_by_scipy_and_of_a_basis_with_its_rotation() -> None:
    other = states(seed=3) @ (torch.eye(D).double() + 0.3 * gaussian(6, D, D))
    basis, second = basis_of(states()), basis_of(other)
    found = compare(basis, second, rank=3).df
    for i, (A, B) in enumerate(zip(basis.pos.numpy(), second.pos.numpy(), strict=True)):
        spans = [np.linalg.svd(x)[2][:3].T for x in (A, B)]
        angles = scipy.linalg.subspace_angles(*spans)
        sizes = np.linalg.norm(A) * np.linalg.norm(B)
        _, scale = scipy.linalg.orthogonal_procrustes(A, B)
        row = found.iloc[i]
        assert (row["angle_max"], row["angle_mean"]) == pytest.approx((angles.max(), angles.mean()))
        assert row["overlap"] == pytest.approx((np.cos(angles) ** 2).mean())
        assert row["procrustes"] == pytest.approx(scale / sizes)
        assert row["difference"] == pytest.approx(np.linalg.norm(A - B) / math.sqrt(sizes))
    Q = torch.linalg.qr(gaussian(5, D, D)).Q
    turned = compare(basis, basis_of(3 * states() @ Q), rank=3).df
    assert turned["procrustes"].tolist() == pytest.approx([1, 1])
    assert (turned["angle_max"] > 0.2).all()


def test_one_population_is_within_the_floors_and_noise_has_none() -> None:
    far, unlike = two_bases("topics of 8 windows with their own curve", 64, 30)
    assert far.kept
    assert unlike.value < 0.25
    flipped = basis_of(states(64, seed=7).flip(-1))
    apart = compare(basis_of(states(64)), flipped).df
    assert (apart["difference"] > 2 * apart["difference_floor"]).all()
    assert (apart["overlap"] < apart["overlap_floor"]).all()
    noise = [basis_of(gaussian(seed, 1, 64, 12, 10)) for seed in (1, 2)]
    found = compare(*noise, rank=2)
    assert math.isnan(numbers(found, "overlap_floor")[0])
    halved = basis_of(states(64), groups=1), basis_of(states(64))  # the first has no halves
    assert compare(*halved, rank=2).df["overlap_floor"].isna().all()
    assert any("not reliable in state 0" in flag for flag in found.provenance.flags)


@cases
@given(seeds, st.sampled_from(["LN", "RMS"]), st.sampled_from([0.0, 1e-5, 0.1]))
def test_a_norm_puts_states_on_a_sphere(seed: int, norm_type: str, eps: float) -> None:
    x, gain, bias = gaussian(seed, 5, 8), 1 + gaussian(seed + 1, 8) ** 2, gaussian(seed + 2, 8)
    g = sphere.norm_geometry(x, gain, bias, eps, norm_type)
    of = torch.nn.functional.layer_norm if norm_type == "LN" else torch.nn.functional.rms_norm
    assert torch.allclose(g.z, of(x, (8,), eps=eps), atol=1e-9)
    assert torch.allclose(g.y, gain * g.z + bias)
    assert torch.allclose(((g.y - bias) / gain).square().sum(-1), g.radius.square())
    assert torch.allclose(g.deficit, 8**0.5 - g.radius, atol=1e-12)
    assert (float(g.z.sum(-1).abs().max()) < 1e-9) == (norm_type == "LN")
    if norm_type == "LN" and eps == 0:  # scale and shift are forgotten; cosines are correlations
        assert torch.allclose(sphere.norm_geometry(3 * x + 7, eps=0.0).y, g.z)
        assert np.allclose(g.z @ g.z.T / 8, np.corrcoef(x))
    assert bool(sphere.norm_geometry(torch.zeros(8), norm_type=norm_type).degenerate)


@cases
@given(seeds, st.sampled_from(["LN", "RMS"]))
def test_paths_obey_the_triangle_and_updates_pythagoras(seed: int, norm_type: str) -> None:
    points, h, u = gaussian(seed, 3, 6, 7), gaussian(seed, 5, 8), gaussian(seed + 1, 5, 8)
    p = sphere.path_geometry(points, norm_type)
    assert bool((p.tortuosity >= 1 - 1e-12).all())
    scaled = points * (1 + torch.arange(6).double())[:, None] + 2.0 * (norm_type == "LN")
    assert torch.allclose(sphere.path_geometry(scaled, norm_type).steps, p.steps)
    radial, across, turn = formulas.update_split(h, u, norm_type)
    around = remove_mean(u, norm_type).square().sum(-1)
    assert torch.allclose(radial.square() + across.square(), around)
    length = torch.linalg.vector_norm(remove_mean(h, norm_type), dim=-1)
    assert torch.allclose(turn, torch.atan2(across, length + radial))
    assert float(formulas.update_split(h, 0.5 * h, norm_type)[2].max()) < 1e-7
