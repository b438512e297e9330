"""Laws of the reports: planted answers, jackknife by brute force, nulls that have lost the effect,
floors, degenerate bases."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.measures.test_contextual import cluster_compactness
from tl_geometry import decompose_activations
from tl_geometry.base import linalg
from tl_geometry.base.errors import GeometryError
from tl_geometry.decomposition import Parts, resampling
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.measures import comparison, context_report, contextual, position_report, positional
from tl_geometry.measures.state_measures import UNBOUNDED

pytestmark = pytest.mark.once

CONTEXTS, POSITIONS, D = 24, 48, 12


def gaussian(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def planted(*, noise: float = 0.3, seed: int = 0, contexts: int = CONTEXTS) -> Tensor:
    """Two states [state context position d_model] with three smooth positional directions, three
    documents, noise and a large mean."""
    t = torch.linspace(0, 1, POSITIONS, dtype=torch.float64)
    curve = torch.stack([torch.cos(math.pi * j * t) for j in (1, 2, 3)], dim=1) @ gaussian(
        100, 3, D
    )
    documents = 2 * gaussian(101, 3, D)[torch.arange(contexts) % 3]
    h = curve + documents[:, None] + noise * gaussian(seed, 2, contexts, POSITIONS, D)
    return h + 10 * gaussian(102, D)


def parts_of(h: Tensor) -> Parts:
    """The four parts of activations, of these alone."""
    return decompose_activations(h).transform(h)


def basis_of(h: Tensor, **options: object) -> PositionContext:
    return decompose_activations(h, **{"keep": 32, **options})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def basis() -> PositionContext:
    return basis_of(planted())


@pytest.fixture(scope="module")
def report(basis: PositionContext) -> position_report.PositionalReport:
    return position_report.positional_report(basis, k=4)


def test_values_are_those_of_the_whole_basis(report: position_report.PositionalReport) -> None:
    h = planted()
    for i in range(2):
        M = (h[i] - h[i].mean((0, 1))).numpy()
        P = M.mean(0)
        s = np.linalg.svd(P, compute_uv=False)
        assert float(report["stable_rank"][i]) == pytest.approx((s**2).sum() / s[0] ** 2)
        paper = math.sqrt(CONTEXTS) * s[0] / np.linalg.norm(M.reshape(-1, D), 2)
        assert float(report["relative_norm"][i]) == pytest.approx(paper)
        raw = math.sqrt(CONTEXTS) * s[0] / np.linalg.norm(h[i].reshape(-1, D).numpy(), 2)
        assert float(report["relative_norm_reference"][i]) == pytest.approx(raw)
        assert float(report["roughness"][i]) == pytest.approx(
            (np.diff(P, axis=0) ** 2).sum() / (P**2).sum()
        )
    assert report["rank"].tolist() == [3, 3]
    assert (report["low_frequency"] > 0.9).all()
    assert report.fourier.shape == (2, 10, 10)


def test_jackknife_is_that_of_the_decomposition_without_each_group(
    report: position_report.PositionalReport,
) -> None:
    h, left_out = planted(), []
    for g in range(8):
        kept = torch.arange(CONTEXTS) * 8 // CONTEXTS != g
        P = parts_of(h[:, kept]).pos
        left_out.append(
            torch.stack([linalg.stable_rank(torch.linalg.svdvals(P)), positional.roughness(P)])
        )
    for name, values in zip(
        ("stable_rank", "roughness"), torch.stack(left_out, dim=1), strict=True
    ):
        expected = np.sqrt(7 / 8 * ((values.numpy() - values.numpy().mean(0)) ** 2).sum(0))
        assert np.allclose(report.errors[name], expected, rtol=1e-6)


def test_what_jumps_or_cannot_be_bounded_has_no_error(
    report: position_report.PositionalReport,
) -> None:
    """Ranks and what follows from them, places, windings, and the norm whose denominator no group
    sum holds; everything else has one."""
    assert set(report.values) - set(report.errors) == {*UNBOUNDED, "split_half"}
    assert not {f"{name}_se" for name in UNBOUNDED} & set(report.columns())
    assert set(report.curve) >= {"rank", "explained", "relative_norm"}


def test_an_error_leaves_out_blocks_of_eight_contexts() -> None:
    h = planted(contexts=32)
    found = position_report.positional_report(basis_of(h), k=4, nulls=False)
    same = position_report.positional_report(basis_of(h, groups=4), k=4, nulls=False)
    assert found.blocks == same.blocks == 4
    for name, error in found.errors.items():
        assert torch.allclose(error, same.errors[name], rtol=1e-6), name


def test_blocks_of_unequal_size_count_by_their_size() -> None:
    """With labels groups follow documents: Busing's pseudo-values with h = contexts / block."""
    sizes = torch.tensor([9, 20, 12, 16])
    h, labels = planted(contexts=int(sizes.sum())), torch.arange(4).repeat_interleave(sizes)
    basis = basis_of(h, groups=4, labels=labels)
    assert basis.group_counts.tolist() == sizes.tolist()
    found = position_report.positional_report(basis, k=4, nulls=False)

    def ranks(kept: Tensor) -> Tensor:
        return linalg.stable_rank(torch.linalg.svdvals(parts_of(h[:, kept]).pos))

    whole, weight = ranks(labels >= 0), (sizes.sum() / sizes).double()[:, None]
    left_out = torch.stack([ranks(labels != g) for g in range(4)])
    pseudo = weight * whole - (weight - 1) * left_out
    mean = 4 * whole - ((1 - 1 / weight) * left_out).sum(0)
    expected = ((pseudo - mean).square() / (weight - 1)).mean(0).sqrt()
    assert torch.allclose(found.errors["stable_rank"], expected)
    as_if_equal = 3**0.5 * left_out.std(0, correction=0)
    assert not torch.allclose(expected, as_if_equal, rtol=0.02)


def test_a_basis_of_one_position_has_a_report() -> None:
    found = position_report.positional_report(basis_of(planted()[:, :, :1]))
    assert found["rank"].isnan().all()


def test_the_error_of_the_raw_relative_norm_moves_its_denominator() -> None:
    contexts, mean = 64, gaussian(102, D)
    size = 1 + 0.6 * gaussian(5, contexts)[:, None, None]  # contexts differ along the mean
    h = planted(contexts=contexts)[0] - 10 * mean + 10 * mean * size
    basis = basis_of(h)
    error = float(position_report.positional_report(basis).errors["relative_norm_reference"])
    assert torch.repeat_interleave(basis.group_counts) is not None
    exact, fixed = [], []
    for g in range(8):
        kept = h[torch.repeat_interleave(basis.group_counts) != g]
        top = torch.linalg.svdvals(kept.mean(0) - kept.mean((0, 1)))[0]
        raw = torch.linalg.svdvals(kept.flatten(0, 1))[0] / len(kept) ** 0.5
        exact.append(top / raw)
        fixed.append(top / torch.linalg.svdvals(h.flatten(0, 1))[0] * contexts**0.5)
    expected, kept_whole = (7**0.5 * torch.stack(x).std(correction=0) for x in (exact, fixed))
    assert error == pytest.approx(float(expected), rel=0.1)
    assert error > 2 * kept_whole, "one denominator for all would hide most of it"


def test_levels_of_the_curve_are_the_contexts_that_were_used() -> None:
    basis = basis_of(planted(contexts=29))
    sets = resampling.subsets(basis)
    for contexts, rows in sets.levels:
        used = (sets.member[rows] * basis.group_counts).sum(1).tolist()
        assert contexts == round(sum(used) / len(used))
        assert max(used) - min(used) <= 1


def test_learning_curve_is_that_of_disjoint_blocks_and_ends_at_the_whole(
    report: position_report.PositionalReport,
) -> None:
    assert report.curve_contexts == (3, 6, 12, 24)
    h, group = planted(), torch.arange(CONTEXTS) * 8 // CONTEXTS
    halves = [
        linalg.stable_rank(torch.linalg.svdvals(parts_of(h[:, part]).pos))
        for part in (group < 4, group >= 4)
    ]
    assert torch.allclose(report.curve["stable_rank"][2], (halves[0] + halves[1]) / 2)
    for name, values in report.curve.items():
        assert torch.equal(values[-1], report[name])
    rough = report.curve["roughness"]
    assert (rough[0] > rough[1]).all()  # sampling noise falls with C
    assert (rough[1] > rough[2]).all()


def test_jackknife_error_covers_the_truth_and_shrinks_with_the_corpus() -> None:
    """The error of roughness over fresh corpora is what the jackknife says, within a factor of two;
    four times C halves it."""
    values, errors = [], []
    for seed in range(24):
        found = position_report.positional_report(
            basis_of(planted(seed=1000 + seed)), k=4, nulls=False
        )
        values.append(float(found["stable_rank"][0]))
        errors.append(float(found.errors["stable_rank"][0]))
    assert 0.5 < np.mean(errors) / np.std(values) < 2
    more = position_report.positional_report(
        basis_of(planted(seed=5, contexts=4 * CONTEXTS)), k=4, nulls=False
    )
    assert float(more.errors["stable_rank"][0]) < 0.75 * np.mean(errors)


def test_nulls_have_lost_the_effect(report: position_report.PositionalReport) -> None:
    for i in range(2):
        assert report["low_frequency"][i] > 1.5 * report.nulls["low_frequency", "shuffled"][i]
        assert report["smoothness"][i] < 0.2 * report.nulls["smoothness", "shuffled"][i]
        assert report["roughness"][i] < 0.2 * report.nulls["roughness", "noise"][i]
        assert report["relative_norm"][i] > 5 * report.nulls["relative_norm", "noise"][i]
        assert report["stable_rank"][i] < report.nulls["stable_rank", "isotropic"][i]
        assert report["low_frequency"][i] > 1.5 * report.nulls["low_frequency", "isotropic"][i]
    assert (report["split_half"] > 0.98).all()
    nothing = position_report.positional_report(
        basis_of(gaussian(7, 1, CONTEXTS, POSITIONS, D)), k=4
    )
    assert float(nothing["relative_norm"]) == pytest.approx(
        float(nothing.nulls["relative_norm", "noise"]), rel=0.3
    )
    assert (
        abs(float(nothing["low_frequency"]) - float(nothing.nulls["low_frequency", "shuffled"]))
        < 0.15
    )
    assert abs(float(nothing["split_half"])) < 0.2


def test_noise_null_has_the_covariance_of_the_sampling_noise() -> None:
    """E|P_null|^2 is what averages over C contexts of independent noise leave: (1 - 1/T) T d /
    C."""
    bare = basis_of(gaussian(3, 1, 64, POSITIONS, D) + 20 * gaussian(4, POSITIONS, D))
    noise = resampling.window_means(bare, 0, resampling.noise_weights(bare, 30, seed=0))
    noise = noise - noise.mean(1, keepdim=True)
    assert float(noise.square().sum((1, 2)).mean()) == pytest.approx(
        (POSITIONS - 1) * D / 64, rel=0.1
    )
    whole = resampling.window_means(bare, 0, torch.ones(1, 8, dtype=torch.float64))
    assert float(whole.square().sum()) > 100 * float(noise[0].square().sum())


@pytest.mark.parametrize("contexts", [2, 5, 7, 8, 21])
def test_noise_of_the_weights_is_that_of_the_mean_over_all_contexts(contexts: int) -> None:
    """Of an even and an odd number of groups, and of groups of different sizes."""
    bare = basis_of(gaussian(3, 1, contexts, POSITIONS, D))
    weights, counts = resampling.noise_weights(bare, 9, seed=0), bare.group_counts.double()
    variance = weights.square() @ counts / (weights.abs() @ counts).square()
    assert (variance * contexts).tolist() == pytest.approx([1] * 9, abs=0.05)
    assert (weights @ counts).tolist() == pytest.approx([0] * 9)  # what all share cancels
    assert len(weights.sign().unique(dim=0)) > 1


def test_report_is_deterministic_saved_and_tabulated(
    basis: PositionContext, report: position_report.PositionalReport, tmp_path: Path
) -> None:
    again = position_report.positional_report(basis, k=4)
    assert all(torch.equal(again.nulls[n], report.nulls[n]) for n in report.nulls)
    loaded = position_report.PositionalReport.load(report.save(tmp_path / "r.safetensors"))
    assert torch.equal(loaded["rank"], report["rank"])
    assert loaded.nulls.keys() == report.nulls.keys()
    frame = report.to_dataframe()
    assert list(frame["state"]) == [0, 1]
    assert {"rank", "stable_rank_se", "rank_noise", "low_frequency_shuffled", "fracture_at"} <= set(
        frame.columns
    )
    bare = position_report.positional_report(basis, jackknife=False, nulls=False)
    assert not bare.errors
    assert not bare.nulls
    assert not bare.curve
    assert torch.equal(bare["roughness"], report["roughness"])
    with pytest.raises(GeometryError, match="one of rank, threshold"):
        report["ranks"]


def test_fracture_is_given_in_absolute_columns() -> None:
    h = planted(noise=0.01)
    h[:, :, 20:] = h[:, :, 20:] @ torch.linalg.qr(gaussian(9, D, D)).Q
    found = position_report.positional_report(basis_of(h, window=(5, POSITIONS)), k=4)
    assert found["fracture_at"].tolist() == [19, 19]
    assert (found["fracture"] > 10).all()


def test_short_windows_and_missing_moments_are_flagged() -> None:
    short = position_report.positional_report(
        basis_of(gaussian(0, 1, 8, 3, 6), second_moments=False)
    )
    assert short["rank"].isnan().all()
    assert short["relative_norm"].isnan().all()
    assert "rank bound k=0 of 20 (short window)" in short.provenance.flags
    assert "no second moments: no relative norm" in short.provenance.flags
    few = position_report.positional_report(basis_of(gaussian(0, 1, 9, 10, 6)), k=2)
    assert "fewer than 10 contexts: no errors" in few.provenance.flags
    assert all(e.isnan().all() for e in few.errors.values())
    assert (
        position_report.positional_report(basis_of(gaussian(0, 1, 10, 10, 6)), k=2)
        .errors["stable_rank"]
        .isfinite()
        .all()
    )
    single = position_report.positional_report(basis_of(gaussian(0, 1, 8, 10, 6), groups=1), k=2)
    assert not single.errors
    assert single["split_half"].isnan().all()
    assert not any("noise" in n for n in single.nulls)
    for report in (position_report.positional_report, context_report.contextual_report):
        with pytest.raises(
            GeometryError, match="with one, position and content cannot be told apart"
        ):
            report(basis_of(gaussian(0, 1, 1, 10, 6)))
    constant = position_report.positional_report(basis_of(torch.ones(1, 8, 10, 6)), k=2)
    assert constant["rank"].tolist() == [0]
    assert constant["stable_rank"].isnan().all()


# --- Context --------------------------------------------------------------------------------------
# ------------------


LABELS = torch.arange(CONTEXTS) % 3


def test_contextual_report_equals_the_measures_of_the_whole_basis(basis: PositionContext) -> None:
    found = context_report.contextual_report(basis, LABELS, rank=3)
    parts = parts_of(planted())
    incoherent = contextual.incoherence(parts.pos, parts.ctx)
    similar = contextual.cluster_similarity(parts.ctx, LABELS)
    rows = LABELS.repeat_interleave(POSITIONS)
    for name, expected in {
        "incoherence_max": incoherent.max,
        "incoherence_avg": incoherent.avg,
        "intra": similar.intra,
        "inter": similar.inter,
        "intra_reference": contextual.cluster_similarity(
            parts.ctx, LABELS, preset="reference"
        ).intra,
        "overlap": contextual.subspace_overlap(parts.pos, parts.ctx, 3),
        "compactness_raw": cluster_compactness(planted().flatten(1, 2), rows),
        "compactness_cvec": cluster_compactness(parts.cvec.flatten(1, 2), rows),
    }.items():
        assert torch.allclose(found[name], expected, rtol=1e-6), name
    assert found.similarity is not None
    assert torch.allclose(found.similarity, similar.table)
    assert (found["compactness_cvec"] >= found["compactness_raw"]).all()
    assert (found["intra"] > 1.3 * found.nulls["intra", "shuffled"]).all()
    assert (found["compactness_raw"] > 5 * found.nulls["compactness_raw", "shuffled"]).all()
    assert found.nulls["incoherence_rms", "random"].tolist() == [1 / math.sqrt(D)] * 2


def test_contextual_jackknife_leaves_whole_groups_out() -> None:
    basis, labels = basis_of(planted(contexts=64)), torch.arange(64) % 3
    found = context_report.contextual_report(basis, labels, rank=3, nulls=False)
    h, values = planted(contexts=64), []
    for g in range(8):
        kept = torch.arange(64) // 8 != g
        parts = parts_of(h[:, kept])
        similar = contextual.cluster_similarity(parts.ctx, labels[kept])
        values.append(
            torch.stack([contextual.incoherence(parts.pos, parts.ctx).avg, similar.inter])
        )
    expected = torch.stack(values).numpy()
    expected = np.sqrt(7 / 8 * ((expected - expected.mean(0)) ** 2).sum(0))
    assert np.allclose(found.errors["incoherence_avg"], expected[0], rtol=1e-6)
    assert np.allclose(found.errors["inter"], expected[1], rtol=1e-6)
    assert found.curve_contexts == (8, 16, 32, 64)


def test_flipped_signs_keep_outlier_coordinates_and_lose_alignment() -> None:
    h = gaussian(0, 1, CONTEXTS, POSITIONS, D)
    shared = gaussian(1, D)
    h = h + 5 * gaussian(2, CONTEXTS, 1, 1) * shared + 5 * gaussian(3, POSITIONS, 1) * shared
    aligned = context_report.contextual_report(basis_of(h), jackknife=False)
    assert aligned["incoherence_avg"] > 1.5 * aligned.nulls["incoherence_avg", "flipped"]
    outlier = torch.zeros(D, dtype=torch.float64)
    outlier[0] = 1
    h = (
        gaussian(0, 1, CONTEXTS, POSITIONS, D)
        + 5 * gaussian(2, CONTEXTS, 1, 1) * outlier
        + 5 * gaussian(3, POSITIONS, 1) * outlier
    )
    spiked = context_report.contextual_report(basis_of(h), jackknife=False)
    assert spiked["incoherence_avg"] > 2 * spiked.nulls["incoherence_avg", "random"]
    assert float(spiked.nulls["incoherence_avg", "flipped"]) == pytest.approx(
        float(spiked["incoherence_avg"]), rel=0.1
    )


def test_labels_of_a_report_are_those_that_occur(basis: PositionContext) -> None:
    """However large; names are those of the similarities."""
    numbers, many = [[i % 3 for i in range(24)], [10**9 * (i % 3) for i in range(24)]]
    words = [f"book {i % 3}" for i in range(24)]
    known, *others = (
        context_report.contextual_report(basis, z, jackknife=False) for z in (numbers, many, words)
    )
    assert known.names == ()
    assert [found.names for found in others] == [
        ("0", "1000000000", "2000000000"),
        ("book 0", "book 1", "book 2"),
    ]
    for found in others:
        assert found.similarity is not None
        assert known.similarity is not None
        assert torch.equal(found.similarity, known.similarity)


def test_contextual_report_without_documents_and_its_refusals(basis: PositionContext) -> None:
    bare = context_report.contextual_report(basis, jackknife=False)
    assert "intra" not in bare.values
    assert bare.similarity is None
    with pytest.raises(
        GeometryError,
        match="labels",
    ):
        context_report.contextual_report(basis, [0, 1, 2])
    with pytest.raises(GeometryError, match="keep_ctx=True"):
        context_report.contextual_report(basis_of(planted(), keep_ctx=False))
    hyperplane = planted() @ (torch.eye(D, dtype=torch.float64) - 1 / D)
    flagged = context_report.contextual_report(basis_of(hyperplane), LABELS, jackknife=False)
    assert flagged["compactness_raw"].isnan().all()
    assert any("covariance singular at states [0, 1]" in f for f in flagged.provenance.flags)
    projected = context_report.contextual_report(
        basis_of(hyperplane), LABELS, jackknife=False, space=("pca", 4)
    )
    assert (projected["compactness_raw"] > 0).all()


def test_only_a_singular_covariance_is_called_singular(basis: PositionContext) -> None:
    for options, text in (
        ({"norm": "n"}, "norm: expected one of 'N', 'dof'"),
        ({"space": ("pca", 99)}, "space: expected"),
    ):
        with pytest.raises(GeometryError, match=text):
            context_report.contextual_report(basis, LABELS, jackknife=False, **options)  # type: ignore[arg-type]
    bare = context_report.contextual_report(
        basis_of(planted(), second_moments=False), LABELS, jackknife=False
    )
    assert bare["compactness_cvec"].isnan().all()
    assert bare.nulls["compactness_raw", "shuffled"].isnan().all()
    assert "no second moments: no compactness" in bare.provenance.flags
    assert not any("singular" in f for f in bare.provenance.flags)
    assert torch.equal(
        bare["intra"], context_report.contextual_report(basis, LABELS, jackknife=False)["intra"]
    )


def test_overlap_has_one_rank_whatever_is_resampled() -> None:
    basis = basis_of(planted(contexts=64))
    found, bare = (
        context_report.contextual_report(basis, rank=9, jackknife=j) for j in (True, False)
    )
    assert torch.equal(found["overlap"], bare["overlap"])
    assert found.curve["overlap"].isnan().all(1).tolist() == [
        True,
        False,
        False,
        False,
    ]  # 8 contexts have fewer than 9 directions
    assert found.errors["overlap"].isfinite().all()
    assert found.nulls["overlap", "random"].tolist() == [9 / D] * 2
    assert not any("overlap" in f for f in found.provenance.flags)


def test_overlap_is_limited_by_the_directions_there_are() -> None:
    parts = parts_of(planted())
    h = gaussian(4, 2, CONTEXTS, 1, D) + parts.pos[:, None]
    t = torch.linspace(0, 1, POSITIONS, dtype=torch.float64)
    h[0] += torch.stack([t, t**2], dim=1) @ gaussian(5, 2, D) - parts.pos[0]  # two directions only
    found = context_report.contextual_report(basis_of(h), jackknife=False)
    assert "overlap of 2 of 10 directions (some state has no more)" in found.provenance.flags
    exact = parts_of(h)
    assert torch.allclose(found["overlap"], contextual.subspace_overlap(exact.pos, exact.ctx, 2))
    assert found.nulls["overlap", "random"].tolist() == [2 / D] * 2
    h[0] = gaussian(
        6, CONTEXTS, 1, D
    ).round()  # no position at all: no overlap, and no limit for the other state
    empty = context_report.contextual_report(basis_of(h), jackknife=False)
    assert empty["overlap"].isnan().tolist() == [True, False]
    assert not any("overlap" in f for f in empty.provenance.flags)
    with pytest.raises(GeometryError, match="rank: expected at least 1 direction, got 0"):
        context_report.contextual_report(basis_of(h), rank=0)


def test_errors_need_32_contexts_and_merged_bases_have_them() -> None:
    h, more, cuts = planted(), planted(contexts=64), (slice(0, 27), slice(27, None))
    merged = PositionContext.merge([basis_of(more[:, part]) for part in cuts])
    report = context_report.contextual_report(merged, torch.arange(64) % 3)
    assert report.errors["intra"].isfinite().all()
    few = context_report.contextual_report(basis_of(h), LABELS)
    assert few.errors["intra"].isnan().all()
    assert "fewer than 32 contexts: no errors" in few.provenance.flags
    assert not context_report.contextual_report(basis_of(h), LABELS, jackknife=False).errors


def test_many_contexts_are_thinned_for_similarities_and_flagged(
    monkeypatch: pytest.MonkeyPatch, basis: PositionContext
) -> None:
    full = context_report.contextual_report(basis, LABELS, jackknife=False)
    monkeypatch.setattr(context_report, "SIMILARITY_LIMIT", 12)
    thin = context_report.contextual_report(basis, LABELS, jackknife=False)
    assert "similarities from 12 contexts" in thin.provenance.flags
    assert not torch.equal(thin["intra"], full["intra"])
    assert torch.equal(thin["incoherence_avg"], full["incoherence_avg"])
    # from the first context to the last, evenly
    chosen = np.linspace(0, basis.contexts - 1, 12).astype(int)
    assert thin.similarity is not None
    assert basis.context_means is not None
    for table, means, mean in zip(thin.similarity, basis.context_means, basis.mean, strict=True):
        expected = contextual.cluster_similarity(means[chosen] - mean, LABELS[chosen]).table
        assert torch.equal(table, expected)


# --- Comparison -----------------------------------------------------------------------------------
# ------------------


def test_comparison_of_a_basis_with_itself_and_its_rotation(basis: PositionContext) -> None:
    same = comparison.compare_bases(basis, basis)
    assert same.rank == (3, 3)
    assert torch.allclose(same.angle_max, torch.zeros(2).double(), atol=1e-7)
    assert torch.allclose(same.difference, torch.zeros(2).double(), atol=1e-9)
    Q = torch.linalg.qr(gaussian(5, D, D)).Q
    turned = comparison.compare_bases(basis, basis_of(3 * planted() @ Q), rank=3)
    assert torch.allclose(turned.procrustes, torch.ones(2).double())
    assert (turned.angle_max > 0.2).all()
    assert (turned.difference > 0.5).all()


def test_comparison_numbers_against_scipy(basis: PositionContext) -> None:
    import scipy.linalg

    other = basis_of(planted(seed=3) @ (torch.eye(D) + 0.3 * gaussian(6, D, D)))
    found = comparison.compare_bases(basis, other, rank=3, states=[(0, 1)])
    A, B = basis.pos[0].numpy(), other.pos[1].numpy()
    spans = [np.linalg.svd(x)[2][:3].T for x in (A, B)]
    angles = scipy.linalg.subspace_angles(*spans)
    assert float(found.angle_max) == pytest.approx(angles.max())
    assert float(found.angle_mean) == pytest.approx(angles.mean())
    assert float(found.overlap) == pytest.approx((np.cos(angles) ** 2).mean())
    _, scale = scipy.linalg.orthogonal_procrustes(A, B)
    assert float(found.procrustes) == pytest.approx(scale / np.linalg.norm(A) / np.linalg.norm(B))
    assert float(found.difference) == pytest.approx(
        np.linalg.norm(A - B) / math.sqrt(np.linalg.norm(A) * np.linalg.norm(B))
    )


def test_two_corpora_agree_to_the_floor_and_two_models_do_not(basis: PositionContext) -> None:
    corpus = comparison.compare_bases(basis, basis_of(planted(seed=77)))
    assert (corpus.difference < corpus.difference_floor).all()
    assert (corpus.procrustes > corpus.procrustes_floor).all()
    model = planted(seed=78)
    model[:, :, :, :] = model.flip(-1)
    apart = comparison.compare_bases(basis, basis_of(model))
    assert (apart.difference > 3 * apart.difference_floor).all()
    assert (apart.overlap < apart.overlap_floor).all()
    assert apart.overlap_random.tolist() == [3 / D] * 2


def test_bases_of_noise_have_no_floors() -> None:
    """Two bases without position differ by as much as their halves do: a relative floor would be
    passed by half of them."""
    g = torch.Generator().manual_seed(0)
    noise, other = (torch.randn(64, 12, 10, generator=g) for _ in range(2))
    curve = torch.randn(12, 10, generator=g)
    found = comparison.compare_bases(*(decompose_activations(h) for h in (noise, other)))
    for name in ("overlap", "procrustes", "difference"):
        assert getattr(found, f"{name}_floor").isnan().all()
        assert getattr(found, name).isfinite().all()
    flags = [f"position is not reliable in state 0 of {basis}: no floors there" for basis in "ab"]
    assert found.provenance.flags[-2:] == tuple(flags)
    both = [decompose_activations(h + curve) for h in (noise, other)]
    there = comparison.compare_bases(*both)
    assert there.difference_floor.isfinite().all()
    assert not set(flags) & set(there.provenance.flags)
    half = comparison.compare_bases(both[0], decompose_activations(other))
    assert [flag in half.provenance.flags for flag in flags] == [False, True]
    assert half.difference_floor.isnan().all(), "of either basis"


def test_comparison_across_sizes_and_its_refusals(basis: PositionContext) -> None:
    wide = basis_of(torch.nn.functional.pad(planted(), (0, 3)))
    found = comparison.compare_bases(basis, wide)
    assert torch.allclose(found.procrustes, torch.ones(2).double())
    assert found.angle_max.isnan().all()
    assert found.mean_cosine.isnan().all()
    with pytest.raises(GeometryError, match="equal lengths, 48 positions, got 40"):
        comparison.compare_bases(basis, basis_of(planted(), window=(8, POSITIONS)))
    with pytest.raises(GeometryError, match="1 to 12 directions"):
        comparison.compare_bases(basis, basis, rank=13)
    with pytest.raises(GeometryError, match="pairs of states"):
        comparison.compare_bases(basis, basis, states=[])
    one = basis_of(planted()[:, :1])
    assert comparison.compare_bases(one, one, rank=2).difference_floor.isnan().all()
