"""Measures of position and context by numpy, their errors and nulls by their laws, two bases beside
their floors, and the sphere of a norm with the paths of tokens on it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from screenot.ScreeNOT import adaptiveHardThresholding
from torch import Tensor

import tl_geometry as tlg
from benchmarks.calibration_measures import two_bases
from tests.lib.models import HAS_HOOKED, hf_model, tiny, tiny_hooked, tokens
from tests.lib.reference import geometry as reference
from tl_geometry import decompose_activations, measures, sphere
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition import PositionContext, resampling
from tl_geometry.measures import contextual
from tl_geometry.measures.positional import screenot
from tl_geometry.measures.state_tables import UNBOUNDED
from tl_geometry.models import from_hf
from tl_geometry.models.norms import remove_mean
from tl_geometry.sphere import paths as formulas
from tl_geometry.weights import vocabulary

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


# ---- ranks


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


def test_screenot_of_zeros_and_of_too_few_values() -> None:
    s = torch.stack([torch.zeros(20), torch.linspace(9, 1, 20)]).double()
    found = screenot(s, (20, 30), k=5)
    assert (int(found.rank[0]), float(found.threshold[0])) == (0, 0)
    assert float(found.threshold[1]) > 0
    for k in (0, 10):
        with pytest.raises(GeometryError, match=r"k: expected k >= 1 and 2k \+ 1 < 20"):
            screenot(s, (20, 30), k=k)


# ---- position


def by_numpy(P: np.ndarray, k: int, frequencies: int) -> dict[str, float]:
    """Measures of a basis that depend on it alone."""
    s = np.linalg.svd(P)[1]
    _, threshold, rank = adaptiveHardThresholding(P, k, strategy="i")
    unit = P / np.linalg.norm(P, axis=1, keepdims=True)
    F = np.asarray(scipy.fft.dctn(unit @ unit.T, norm="ortho"))
    score, place = reference.fracture(P)
    return {
        "rank": rank,
        "threshold": threshold,
        "stable_rank": (s**2).sum() / s[0] ** 2,
        "explained": s[:rank].sum() / s.sum(),
        "low_frequency": F.diagonal()[:frequencies].sum() / len(P),
        "off_diagonal": 1 - (F.diagonal() ** 2).sum() / (F**2).sum(),
        "smoothness": reference.smoothness(P, 1),
        "smoothness_2": reference.smoothness(P, 2),
        "fracture": score,
        "fracture_at": FIRST + place,
        "roughness": (np.diff(P, axis=0) ** 2).sum() / (P**2).sum(),
    }


def test_every_measure_of_position_in_a_window_by_numpy() -> None:
    h = states()
    basis = basis_of(h, window=(FIRST, POSITIONS + FIRST))
    found = of_position(basis, k=3, frequencies=2, nulls=False)
    for i in range(2):
        inside = h[i, :, FIRST:].numpy()
        P = inside.mean(0) - inside.mean((0, 1))
        expected = by_numpy(P, 3, 2)
        expected["relative_norm"] = reference.relative_norm(inside)
        expected["relative_norm_reference"] = reference.relative_norm(inside, centred=False)
        for name, value in expected.items():
            assert abs(found.df[name][i]) == pytest.approx(value, rel=1e-4), name
        errors = {f"{n}_se" for n in expected if n not in UNBOUNDED}
        other = {"state", "split_half", "blocks", "draws"}
        assert set(found.names) == {*expected, *errors, *other}
    assert (numbers(found, "blocks"), numbers(found, "draws")) == ([4, 4], [0, 0])


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
    whole, weight = of(labels >= 0), (len(labels) / torch.bincount(labels)).double()[:, None]
    without = torch.stack([of(labels != g) for g in range(4)])
    pseudo = weight * whole - (weight - 1) * without
    mean = 4 * whole - ((1 - 1 / weight) * without).sum(0)
    expected = ((pseudo - mean).square() / (weight - 1)).mean(0).sqrt()
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
    with pytest.raises(GeometryError, match="of: expected one of 'position', 'context'"):
        learning(basis, "both")


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


def test_short_windows_missing_moments_and_few_contexts_are_flagged() -> None:
    short = of_position(basis_of(gaussian(0, 1, 8, 3, 6), second_moments=False))
    assert short.df[["rank", "threshold", "relative_norm"]].isna().all(axis=None)
    assert "rank bound k=0 of 20 (short window)" in short.provenance.flags
    assert "no second moments: no relative norm" in short.provenance.flags
    for contexts, known in ((9, False), (10, True)):
        basis = basis_of(gaussian(0, 1, contexts, 10, 6), groups=4)
        found = of_position(basis, k=2, nulls=False)
        assert bool(found.df["stable_rank_se"].notna().all()) is known
        assert ("fewer than 10 contexts: no errors" in found.provenance.flags) is not known
    single = of_position(basis_of(gaussian(0, 1, 8, 10, 6), groups=1), k=2)
    assert not any(name.endswith(("_se", "_noise")) for name in single.names)
    for report in (of_position, of_context):
        with pytest.raises(GeometryError, match="with one, position and content cannot be told"):
            report(basis_of(gaussian(0, 1, 1, 10, 6)))


# ---- context

LABELS = torch.arange(CONTEXTS) % 3


@cases
@given(seeds, st.lists(st.integers(0, 3), min_size=4, max_size=9).filter(lambda z: len(set(z)) > 1))
def test_similarities_equal_all_pairs_and_labels_may_be_large(seed: int, labels: list[int]) -> None:
    ctx, z = gaussian(seed, len(labels), 4), torch.tensor(labels)
    found = contextual.cluster_similarity(ctx, 10**9 * z)
    pairs = [(i, j) for i, j in itertools.permutations(range(len(labels)), 2)]
    cosines = torch.nn.functional.normalize(ctx, dim=-1)
    cosines = (cosines @ cosines.T).abs()
    same = [float(cosines[i, j]) for i, j in pairs if labels[i] == labels[j]]
    apart = [float(cosines[i, j]) for i, j in pairs if labels[i] != labels[j]]
    assert float(found.inter) == pytest.approx(np.mean(apart))
    if same:
        assert float(found.intra) == pytest.approx(np.mean(same))
    with_self = np.mean([*same, *[1.0] * len(labels)])
    assert float(found.intra_reference) == pytest.approx(with_self)


def test_the_report_of_context_by_brute_force() -> None:
    h = states()
    basis = basis_of(h)
    found, parts = of_context(basis, LABELS, rank=3), basis.transform(h)
    frame, points = found.df, LABELS.repeat_interleave(POSITIONS + FIRST)
    for i in range(2):
        pos, ctx = parts.pos[i].numpy(), parts.ctx[i].numpy()
        intra, inter = reference.cluster_similarity(ctx, LABELS.tolist())
        expected = {"intra": intra, "inter": inter}
        expected["overlap"] = reference.subspace_overlap(pos, ctx, 3)
        expected["incoherence_max"], expected["incoherence_avg"], *_ = reference.incoherence(
            pos, ctx
        )
        for name, x in (("cvec", parts.cvec[i]), ("raw", h[i])):
            flat = x.flatten(0, 1).numpy()
            expected[f"compactness_{name}"] = reference.compactness(flat, points.tolist())
        for name, value in expected.items():
            assert frame[name][i] == pytest.approx(value, rel=1e-6), name
    assert (frame["compactness_cvec"] >= frame["compactness_raw"]).all()
    assert (frame["compactness_raw"] > 5 * frame["compactness_raw_shuffled"]).all()
    assert (frame["intra"] > 1.3 * frame["intra_shuffled"]).all()
    assert frame["incoherence_rms_random"].tolist() == pytest.approx([D**-0.5] * 2)
    assert frame["overlap_random"].tolist() == [3 / D] * 2
    assert found.provenance.flags == ()


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


def test_singular_covariances_and_missing_parts_are_said_not_computed() -> None:
    plane = states() @ (torch.eye(D).double() - 1 / D)
    flagged = of_context(basis_of(plane), LABELS, **QUICK)
    assert flagged.df["compactness_raw"].isna().all()
    assert any("covariance singular at states [0, 1]" in f for f in flagged.provenance.flags)
    bare = of_context(basis_of(states(), second_moments=False), LABELS, **QUICK)
    assert bare.df["compactness_cvec"].isna().all()
    assert "no second moments: no compactness" in bare.provenance.flags
    assert not any("singular" in flag for flag in bare.provenance.flags)
    one = of_context(basis_of(states()), ["a"] * CONTEXTS, **QUICK)
    assert "intra" not in one.names
    h = gaussian(4, 2, CONTEXTS, 1, D) + states().mean(1, keepdim=True)
    t = torch.linspace(0, 1, POSITIONS + FIRST, dtype=torch.float64)
    h[0] = gaussian(4, CONTEXTS, 1, D) + torch.stack([t, t**2], dim=1) @ gaussian(5, 2, D)
    two = of_context(basis_of(h), **QUICK)
    assert "overlap of 2 of 10 directions (some state has no more)" in two.provenance.flags
    with pytest.raises(GeometryError, match="keep_ctx=True"):
        of_context(basis_of(states(), keep_ctx=False))


# ---- two bases


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
    with pytest.raises(GeometryError, match="b: expected bases of one kind"):
        compare(basis, basis_of(states()[..., :5]))
    with pytest.raises(GeometryError, match="rank: expected 1 to 12 directions, got 13"):
        compare(basis, second, rank=13)


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
    assert any("not reliable in state 0" in flag for flag in found.provenance.flags)


# ---- the sphere


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
        assert torch.allclose(sphere.norm_geometry(3 * x + 7, eps=0.0).z, g.z)
        assert np.allclose(g.z @ g.z.T / 8, np.corrcoef(x))


def test_vectors_without_a_direction_and_very_long_ones() -> None:
    rows = torch.tensor([[0.1] * 9, [0.0] * 9]).double()
    for eps in (0.0, 0.1):
        g = sphere.norm_geometry(rows, eps=eps)
        assert g.degenerate.all()
        assert (g.radius.tolist(), g.deficit.tolist()) == ([0, 0], pytest.approx([3, 3]))
    far = 1e6 * gaussian(0, 1, 100)
    deficit = float(sphere.norm_geometry(far, norm_type="RMS").deficit)
    assert deficit == pytest.approx(10 * 100 * 1e-5 / (2 * float(far.square().sum())), rel=1e-6)
    closed = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.5, 4.0], [1.0, 2.0, 4.0]])
    assert float(sphere.path_geometry(closed).net) == 0
    assert sphere.path_geometry(closed).tortuosity.isnan()
    for call, text in (
        (lambda: sphere.norm_geometry(rows, norm_type="BN"), "norm_type: expected one of 'LN'"),
        (lambda: sphere.norm_geometry(rows, eps=-1.0), "eps: expected a number of at least 0"),
        (lambda: sphere.path_geometry(rows[:1]), "points: expected at least two states"),
    ):
        with pytest.raises(GeometryError, match=text):
            call()


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


def on_sphere(view: Any, x: Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(remove_mean(x.double(), view.norm), dim=-1).numpy()


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_paths_of_tokens_by_numpy(architecture: str) -> None:
    view, ids = tlg.view(tiny("bridge", architecture)), tokens(3, 6)
    basis = tlg.decompose(view, tokens(12, 6, seed=4), progress=False, keep=5)
    p, fitted = tlg.token_paths(view, ids), tlg.token_paths(view, ids, basis, batch_size=2)
    names = [f"blocks.{l}.hook_{n}" for l in (0, 1) for n in ("attn_out", "mlp_out")]
    found = view.activations(ids, [*view.state_hooks, *names])
    h = torch.stack([found[hook] for hook in view.state_hooks], 2)
    unit = on_sphere(view, h)
    for l in (0, 1):  # the MLP turns the stream that attention has added to
        attention, mlp = (found[f"blocks.{l}.hook_{n}"].double() for n in ("attn_out", "mlp_out"))
        before = h[:, :, l].double()
        for u, (state, update) in enumerate(((before, attention), (before + attention, mlp))):
            for name, x in zip(
                ("radial", "tangential", "turn"), formulas.update_split(state, update, view.norm)
            ):
                assert torch.allclose(getattr(p, name)[:, :, l, u], x, atol=1e-5)
    sampled = (vocabulary.embeddings(view), basis.sample_states)
    for path, points in zip((p, fitted), sampled, strict=True):
        assert points is not None
        fit = on_sphere(view, points.flatten(0, -2))
        _, s, axes = np.linalg.svd(fit - fit.mean(0), full_matrices=False)
        signs = np.sign(axes[:3][range(3), np.abs(axes[:3]).argmax(1)])
        expected = (unit - fit.mean(0)) @ (signs[:, None] * axes[:3]).T
        assert np.allclose(path.coordinates, expected, atol=1e-5)
        assert path.shown == pytest.approx((s[:3] ** 2).sum() / (s**2).sum(), rel=1e-5)
    assert torch.equal(fitted.rank, p.rank)
    frame: Any = p.to_dataframe()
    assert len(frame) == 3 * 6 * 3
    row = frame[(frame.context == 1) & (frame.position == 2) & (frame.state == 1)].iloc[0]
    assert row["token"] == f"<{int(ids[1, 2])}>"
    assert row["step"] == pytest.approx(float(p.steps[1, 2, 1]))
    assert row["turn_mlp"] == pytest.approx(float(p.turn[1, 2, 1, 1]))
    assert frame[frame.state == 2]["step"].isna().all()


def test_what_models_without_such_updates_or_heads_give() -> None:
    post_norm = tlg.token_paths(tiny("bridge", "bert"), tokens(1, 6))
    assert bool(post_norm.radial.isnan().all())
    assert any("no updates" in flag for flag in post_norm.provenance.flags)
    for dtype in (torch.bfloat16, torch.float64):  # half precision rounds sums at 1 in 256
        assert (
            tlg.token_paths(tiny("bridge", "llama", dtype=dtype), tokens(2, 9))
            .turn.isfinite()
            .all()
        )
    one = tlg.token_paths(from_hf(hf_model("gpt2", n_layer=1), None, name="one"), tokens(2, 5))
    assert torch.equal(one.steps.sum(-1), one.net)
    if HAS_HOOKED:
        bare = tlg.token_paths(tiny_hooked(attn_only=True, normalization_type="LN"), tokens(2, 5))
        assert bare.radial[..., 0].any()
        assert not bare.tangential[..., 1].any()
    text = tlg.token_paths(tlg.zoo.embedded(), "def f(x):\n    return x", prepend_bos=True)
    assert text.str_tokens[0][0] == "<|endoftext|>"
    assert text.provenance.has_bos
    model, ids = tiny("bridge", "gpt2"), tokens(2, 4)
    other = tlg.decompose(tiny("bridge", "opt"), tokens(8, 6), progress=False)
    bare = tlg.decompose(model, tokens(8, 6), progress=False, keep=0)
    for basis, words in ((other, "the model it was computed from"), (bare, "sampled states")):
        with pytest.raises(GeometryError, match=f"basis: expected {words}"):
            tlg.token_paths(model, ids, basis)
