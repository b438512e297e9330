"""Figures of weights and of edits from tables made by hand: what is drawn where, in which colour,
and every sentence."""

from __future__ import annotations

from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.render.test_basis_and_measures_by_hand import LINE, SOURCE, size
from tests.render.test_by_hand import draw
from tl_geometry.base.errors import GeometryError
from tl_geometry.interventions.causal import Dominance, NecessitySufficiency
from tl_geometry.interventions.surrogates import SurrogateEffect
from tl_geometry.render import figure, weights
from tl_geometry.render.figure import WIDTH
from tl_geometry.sphere.paths import TokenPaths
from tl_geometry.weights.heads import TokenReadout, WeightGeometry
from tl_geometry.weights.readout import Extremes

HEADS = ((1, 0), (1, 1), (2, 0), (2, 1))


def geometry(matrix: str = "QK", shown: int = 3, **options: Any) -> WeightGeometry:
    """Four heads of two layers, with subspaces of one and of two dimensions."""
    per_head = ["mean", "std", "threshold", "highest", "lowest", "concentration", "null", "p"]
    per_head += ["noise_null", "noise_high", "reliability", "r2_low_rank", "r2_diagonal"]
    per_head += ["r2_joint", "null_r2", "symmetric"]
    fields = {name: draw(4, seed=i) for i, name in enumerate(per_head)}
    fields["threshold"] = torch.tensor([0.5, 0.5, 0.5, 9.0]).double()
    fields["concentration"], fields["null"] = draw(4, seed=1), torch.full((4,), 0.1).double()
    return WeightGeometry(
        **{
            **fields,
            "provenance": SOURCE,
            "matrix": matrix,
            "heads": HEADS,
            "layers": (1, 2),
            "k": (1, 2),
            "ranks": (1, 2),
            "raw": False,
            "offsets": (0,),
            "diagonal": draw(4, 5, seed=3) - 0.6,
            "block": 2 * draw(4, shown, shown, seed=4) - 1.2,
            "above_threshold": torch.ones(4, dtype=torch.int64),
            "L": draw(4, 2, 2),
            "delta": draw(4, 5),
            "singular": torch.zeros(4, dtype=torch.bool),
            **options,
        }
    )


def test_a_cell_of_weights_is_tinted_by_the_root_of_its_share_of_the_largest() -> None:
    """Blue for the block above the threshold, red for the diagonal, a mix of both, white for
    neither; a head with nothing above its threshold has no blue."""
    found = geometry()
    view = weights.weight_blocks(found, HEADS)
    blue, red = (0.0, 0.45, 0.70), (0.84, 0.10, 0.11)
    for i, axis in enumerate(view.figure.axes):
        image: Any = axis.images[0].get_array()
        block = [[abs(float(v)) for v in row] for row in found.block[i]]
        block = [[v if v > float(found.threshold[i]) else 0.0 for v in row] for row in block]
        diagonal = [abs(float(v)) for v in found.diagonal[i, :3]]
        largest = max(max(row) for row in block) or 1.0
        for r in range(3):
            for c in range(3):
                b = (block[r][c] / largest) ** 0.5
                d = (diagonal[r] / max(diagonal)) ** 0.5 if r == c else 0.0
                want = [
                    (1 - b * (1 - x)) * (1 - d * (1 - y)) for x, y in zip(blue, red, strict=True)
                ]
                assert image[r, c].tolist() == pytest.approx(want, abs=1e-6)
        assert (largest == 1.0) == (i == 3)


@pytest.mark.parametrize(
    ("matrix", "verb", "across", "down"),
    [("QK", "read", "key", "query"), ("OV", "write", "output", "input")],
)
def test_blocks_of_weights_are_framed_and_named(
    matrix: str, verb: str, across: str, down: str
) -> None:
    """The frame holds the dimensions of the subspace of the layer, the title the lift."""
    found = geometry(matrix)
    view = weights.weight_blocks(found, HEADS)
    for i, axis in enumerate(view.figure.axes):
        edge = (0, 0, 1, 1)[i] + 0.5
        (frame,) = axis.lines
        assert np.asarray(frame.get_xdata()).tolist() == [-0.5, edge, edge]
        assert np.asarray(frame.get_ydata()).tolist() == [edge, edge, -0.5]
        assert (frame.get_linestyle(), frame.get_color(), frame.get_linewidth()) == ("--", "k", 0.5)
        lift = float(found.concentration[i] / 0.1)
        assert axis.get_title() == f"L{i // 2 + 1}H{i % 2}: {lift:.3g} x chance"
        assert (axis.get_xlabel(), axis.get_ylabel()) == (
            f"{across} direction",
            f"{down} direction",
        )
        assert (axis.get_xlim(), axis.get_ylim()) == ((-0.5, 2.5), (2.5, -0.5))
        assert not len(axis.get_xticks())
        sizes = {t.get_fontsize() for t in (axis.title, axis.xaxis.label, axis.yaxis.label)}
        assert sizes == {8}
    assert size(view) == (WIDTH, 2.0)
    assert view.title == f"Which directions does W_{matrix} of each head {verb}?"
    assert view.caption == (
        f"Blue cells are entries of W_{matrix} in the directions of the basis, above the "
        f"threshold; red ones are |diag(W_{matrix})| in the model's own coordinates; the dashed "
        "frame holds the leading directions of position."
    )
    assert view.null == (
        "Above each panel: its concentration in the frame over that of a random subspace."
    )
    assert view.source == LINE


@pytest.mark.parametrize(
    ("count", "wanted"), [(1, (WIDTH / 3, 2)), (2, (2 * WIDTH / 3, 2)), (3, (WIDTH, 2))]
)
def test_one_head_of_weights_is_a_third_of_the_page(
    count: int, wanted: tuple[float, float]
) -> None:
    """By default the heads of the first layer are drawn."""
    assert size(weights.weight_blocks(geometry(), HEADS[:count])) == pytest.approx(wanted)
    titles = [a.get_title()[:4] for a in weights.weight_blocks(geometry()).figure.axes]
    assert titles == ["L1H0", "L1H1"]
    large = geometry(shown=61, diagonal=draw(4, 70), delta=draw(4, 70))
    image: Any = weights.weight_blocks(large, "L2H1").figure.axes[0].images[0].get_array()
    assert image.shape == (60, 60, 3), "at most sixty entries"


def readout() -> TokenReadout:
    ids = torch.zeros(4, 1, dtype=torch.int64)
    ends = Extremes(ids, ids.double(), ids, ids.double())
    texts = (("a",),) * 4
    return TokenReadout(
        provenance=SOURCE,
        matrix="OV",
        heads=HEADS,
        features=1,
        raw=False,
        values=draw(4, 5).sort(descending=True).values,
        needed=torch.ones(4, dtype=torch.int64),
        degenerate=torch.zeros(4, 5, dtype=torch.bool),
        left=ends,
        right=ends,
        left_tokens=texts,
        left_opposite_tokens=texts,
        right_tokens=texts,
        right_opposite_tokens=texts,
    )


def test_coverage_has_a_line_for_each_head_in_the_colour_of_its_layer() -> None:
    """Over 1, 2, ... directions; equal singular values are dotted."""
    found = readout()
    view = weights.coverage_curves(found)
    axis, bar = view.figure.axes
    *lines, equal = axis.lines
    for i, line in enumerate(lines):
        assert np.asarray(line.get_xdata()).tolist() == [1, 2, 3, 4, 5]
        values = found.values[i].tolist()
        wanted = [sum(values[: n + 1]) / sum(values) for n in range(5)]
        assert np.asarray(line.get_ydata()).tolist() == pytest.approx(wanted)
        assert line.get_linewidth() == 0.8
        shade = mpl.colormaps[figure.SEQUENTIAL](float(i // 2))
        assert line.get_color() == pytest.approx(shade)
    assert np.asarray(equal.get_ydata()).tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert np.asarray(equal.get_xdata()).tolist() == [1, 2, 3, 4, 5]
    assert (equal.get_linestyle(), equal.get_color(), equal.get_linewidth()) == (":", "k", 0.8)
    box = axis.get_legend()
    assert box is not None
    assert [t.get_text() for t in box.get_texts()] == ["null: equal singular values"]
    assert not box.get_frame_on()
    assert bar.get_ylabel() == "layer"
    assert bar.get_ylim() == (1, 2)
    assert axis.get_xlabel() == "singular directions"
    assert axis.get_ylabel() == "share of the sum of singular values"
    assert size(view) == (WIDTH, 2.8)
    assert view.title == "In how many directions does W_OV of a head lie?"
    assert (view.source, view.null) == (LINE, "The dotted line has equal singular values.")
    own = Figure().subplots()
    assert weights.coverage_curves(found, ax=own).figure is own.figure


def paths(shown: float = 0.75) -> TokenPaths:
    """Two prompts of three tokens, the ends of the second far apart."""
    coordinates = draw(2, 3, 4, 3)
    coordinates[1, :, -1] = torch.tensor([[0.0, 0, 0], [9, 0, 0], [0, 9, 9]]).double()
    numbers = draw(2, 3)
    return TokenPaths(
        provenance=SOURCE,
        tokens=torch.zeros(2, 3, dtype=torch.int64),
        str_tokens=((" a", "b", "c"), (" d", "$e", "f")),
        steps=draw(2, 3, 3),
        length=numbers,
        net=numbers,
        tortuosity=numbers,
        radial=draw(2, 3, 2, 3),
        tangential=draw(2, 3, 2, 3),
        turn=draw(2, 3, 2, 3),
        angle=draw(2, 3, 4),
        rank=torch.ones(2, 3, 4, dtype=torch.int64),
        coordinates=coordinates,
        shown=shown,
        method="pca",
        fitted_on="these prompts",
    )


def test_a_path_on_the_sphere_ends_with_its_token() -> None:
    """Those of the chosen prompt and positions, in the order in which they were asked for."""
    found = paths()
    view = weights.sphere_paths(found, 1, [2, 0])
    axis: Any = view.figure.axes[0]
    for line, points, position in zip(axis.lines, axis.collections, (2, 0), strict=True):
        drawn = np.stack(line.get_data_3d(), -1)
        assert np.allclose(drawn, found.coordinates[1, position])
        assert points.get_array().tolist() == [0, 1, 2, 3]
        assert points.get_sizes().tolist() == [12]
    assert [t.get_text().strip() for t in axis.texts] == ["f", "␣d"]
    ends = [t.get_position_3d() for t in axis.texts]
    assert np.allclose(ends, found.coordinates[1, [2, 0], -1])
    assert {(t.get_fontsize(), t.get_zorder()) for t in axis.texts} == {(7, 9)}
    assert [axis.get_xlabel(), axis.get_ylabel(), axis.get_zlabel()] == ["pca 1", "pca 2", "pca 3"]
    assert size(view) == (5.2, 4.6)
    assert view.caption == (
        "Each line is the path of one token over the unit sphere, from the embedding to its last "
        "state, where its text stands; axes (pca) fitted on these prompts, which hold 75% of their "
        "variance. 2 of 2 tokens have room for their name."
    )
    assert view.null == "No null is drawn: the paths are the model's own, exactly."
    unknown = weights.sphere_paths(paths(torch.nan))
    assert "fitted on these prompts. " in unknown.caption
    assert len(unknown.figure.axes[0].lines) == 3
    dollar = weights.sphere_paths(found, 1, [1]).figure.axes[0].texts[0].get_text()
    assert dollar == r" \$e"
    for wrong in (2, -1):
        with pytest.raises(GeometryError, match="context: expected an index from 0 to 1"):
            weights.sphere_paths(found, wrong)


def test_names_take_the_first_corner_that_is_free_and_are_left_out_after_four() -> None:
    """Right above, right below, left above, left below; a space parts each from its point."""
    figure_, axis = figure.one_axes(None, (5.0, 4.0), subplot_kw={"projection": "3d"})
    ends = torch.zeros(5, 3, dtype=torch.float64)
    assert weights._name_ends(axis, ends, ["a", "bb", "c", "d", "e"]) == 4
    found = [(t.get_text(), t.get_ha(), t.get_va()) for t in axis.texts]
    assert found == [
        (" a", "left", "bottom"),
        (" bb", "left", "top"),
        ("c ", "right", "bottom"),
        ("d ", "right", "top"),
    ]
    (halo,) = axis.texts[0].get_path_effects()
    assert halo._gc == {"linewidth": 2, "foreground": "white"}
    assert figure_ is axis.figure


@pytest.mark.parametrize(("pixels", "side"), [(11.5, "bottom"), (10.5, "top")])
def test_a_name_takes_eleven_pixels_up(pixels: float, side: str) -> None:
    """A second name a little above the first covers it, or does not."""
    _, axis = figure.one_axes(None, (5.0, 4.0), subplot_kw={"projection": "3d"})
    axis.view_init(elev=0, azim=-90)
    place(axis, 0.0, pixels)
    ends = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.5 + place(axis, 0.0, pixels)]]).double()
    weights._name_ends(axis, ends, ["aa", "bb"])
    # where it is covered at the right above, the right below lies on the first name too
    sides = [(t.get_ha(), t.get_va()) for t in axis.texts]
    assert sides == [("left", "bottom"), ("left" if side == "bottom" else "right", "bottom")]


def place(axis: Any, start: float, pixels: float) -> float:
    """How far up a point moves by so many pixels."""
    from mpl_toolkits.mplot3d.proj3d import proj_transform

    heights = []
    for z in (0.5, 0.6):
        x, y, _ = proj_transform(0.5, 0.5, z, axis.get_proj())
        heights.append(float(axis.transData.transform((x, y))[1]))
    return start + 0.1 * pixels / (heights[1] - heights[0])


def surrogate(parts: tuple[str, ...]) -> SurrogateEffect:
    return SurrogateEffect(
        provenance=SOURCE,
        heads=HEADS,
        parts=parts,
        clean_loss=1.5,
        loss=torch.tensor([2.0, 1.25, 3.0])[: len(parts)].double(),
        moved=torch.zeros(len(parts), 4).double(),
    )


def test_bars_of_surrogates_are_blue_and_controls_grey() -> None:
    """Each bar rises by the change of the loss."""
    view = weights.surrogate_bars(surrogate(("low_rank", "none", "random")))
    axis = view.figure.axes[0]
    bars: Any = axis.patches
    assert [b.get_height() for b in bars] == [0.5, -0.25, 1.5]
    assert [to_hex(b.get_facecolor()) for b in bars] == [figure.BLUE, figure.GREY, figure.GREY]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["low rank", "none", "random"]
    (zero,) = axis.lines
    assert np.asarray(zero.get_ydata()).tolist() == [0, 0]
    assert axis.get_xlabel() == "what is kept of W_QK"
    assert axis.get_ylabel() == "change in loss (nats per token)"
    assert view.caption == (
        "Each bar shows how far the loss of 1.500 nats rises when W_QK of L1H0, L1H1, L2H0, "
        "L2H1 is replaced by one part of it."
    )
    assert view.null == (
        "Grey bars are controls: no W_QK at all, a random subspace of the same rank."
    )
    assert weights.surrogate_bars(surrogate(("low_rank",))).null == "No control is drawn."


def effects(kind: type[Any], prompts: int = 12) -> Any:
    """Three conditions with changes of 1 and -2 and their spread."""
    around = torch.linspace(-1, 1, prompts).double()
    losses = torch.stack([0 * around, 1 + around, around.flip(0) * 0.5 - 2])
    own: dict[str, Any] = {"drawn": torch.zeros(2).double()}
    conditions = ("clean", "dominant term", "random term")
    if kind is NecessitySufficiency:
        conditions = ("clean", "remove", "shrink")
        own = {"heads": HEADS[:2], "term": ("pos-pos", "pos-cvec"), "swap_cosine": 0.0}
        own |= {"shrunk": 0.0}
    return kind(
        provenance=SOURCE,
        conditions=conditions,
        losses=losses,
        induction_losses=2 * losses,
        kls=3 * losses,
        **own,
    )


@pytest.mark.parametrize("kind", [NecessitySufficiency, Dominance])
@pytest.mark.parametrize(("measure", "factor"), [("loss", 1), ("induction_loss", 2), ("kl", 3)])
def test_bars_of_edits_have_their_change_and_its_interval(
    kind: type[Any], measure: str, factor: int
) -> None:
    """The first edit stands at the top, the clean run has no bar."""
    found = effects(kind)
    view = weights.effect_bars(found, measure)
    axis = view.figure.axes[0]
    bars: Any = axis.patches
    assert [b.get_width() for b in bars] == pytest.approx([factor, -2 * factor])
    assert [b.get_height() for b in bars] == pytest.approx([0.7, 0.7])
    assert [to_hex(b.get_facecolor()) for b in bars] == [figure.BLUE, figure.GREY]
    assert [t.get_text() for t in axis.get_yticklabels()] == list(found.conditions[1:])
    assert axis.yaxis_inverted()
    spread = float(found.losses[1].std()) / 12**0.5 * 2.200985
    segments = axis.collections[0].get_segments()  # type: ignore[attr-defined]
    halves = [(s[1][0] - s[0][0]) / 2 for s in segments]
    assert halves == pytest.approx([factor * spread, factor * spread / 2], rel=1e-4)
    assert any(np.asarray(line.get_xdata()).tolist() == [0, 0] for line in axis.lines)
    assert axis.get_xlabel() == f"change in {measure.replace('_', ' ')} (nats per token)"
    assert size(view) == pytest.approx((WIDTH, 0.32 * 3 + 0.9), abs=1e-4)
    assert view.caption == (
        "Each bar is an edit of the live model, with its 95% interval over 12 prompts (none below "
        "10)."
    )
    if kind is NecessitySufficiency:
        assert view.title == "Does L1H0, L1H1 need pos-pos, pos-cvec?"
        assert axis.get_ylabel() == "what is done to the scores"
        assert view.null == (
            "Grey bars are controls: only constants, the term of another prompt, smaller scores, "
            "other terms removed."
        )
    else:
        assert view.title == (
            "What is left of the model when heads keep only a part of their scores?"
        )
        assert axis.get_ylabel() == "what heads keep"
        assert view.null == (
            "Grey bars are controls: a random term, only constants, uniform attention."
        )
    few = weights.effect_bars(effects(kind, 4), measure).figure.axes[0]
    widths = [(s[1][0] - s[0][0]) / 2 for s in few.collections[0].get_segments()]  # type: ignore[attr-defined]
    assert widths == [0, 0]
