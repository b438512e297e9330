"""Figures of writers, of pruned runs and of a logit from tables made by hand: what is drawn where,
in which colour, and every sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from tests.render.test_basis_and_measures_by_hand import LINE, SOURCE, legend, size
from tests.render.test_by_hand import draw
from tests.render.test_writers import explained
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits.pruned_runs import Faithfulness
from tl_geometry.circuits.writer_edges import Composition
from tl_geometry.render import figure, writers
from tl_geometry.render.figure import WIDTH

PARTS = ("bias", "embed", "pos_embed", "L0H0", "L0H1", "mlp0")
"""Parts of a composition: constants, two embeddings, two heads, an MLP."""


def composition() -> Composition:
    """Two readers in block 1; few edges have a share."""
    shape = (2, 3, 6)
    cs, gs = torch.zeros(shape).double(), torch.zeros(shape).double()
    cs[0, 0, 3], cs[0, 1, 3], cs[0, 2, 5] = 0.5, -0.3, 2.0
    cs[1, 1, 2], cs[1, 2, 4] = 0.1, -0.2
    gs[1, 0, 1] = -0.4
    random = torch.full(shape, torch.nan).double()
    random[:, :, 1:] = torch.linspace(0.1, 0.4, 30).view(2, 3, 5)
    nothing = torch.zeros(shape).double()
    return Composition(
        provenance=SOURCE,
        heads=((1, 0), (1, 2)),
        parts=PARTS,
        wrote=(-1, -1, -1, 0, 0, 0),
        writer_heads=(-1, -1, -1, 0, 1, -1),
        cs=cs,
        gs=gs,
        weights=nothing,
        other_cs=nothing,
        other_gs=nothing,
        random_cs=random,
        random_gs=2 * random,
        cs_low=nothing,
        cs_high=nothing,
        gs_low=nothing,
        gs_high=nothing,
        cosine=torch.zeros(6).double(),
        drop=0,
        draws=1,
    )


def test_edges_lead_from_writers_to_readers_in_the_colour_of_their_side() -> None:
    """Wider for a larger share (at most 5.3 points), dashed where it is negative, and beside each
    other where a pair has several."""
    view = writers.composition_figure(composition(), n=5)
    axis = view.figure.axes[0]
    drawn = [line for line in axis.lines if len(np.asarray(line.get_xdata()))]
    found = {
        (str(line.get_color()), str(line.get_linestyle())): (
            np.asarray(line.get_xdata()).tolist(),
            np.asarray(line.get_ydata()).tolist(),
            line.get_linewidth(),
        )
        for line in drawn
    }
    assert {line.get_alpha() for line in drawn} == {0.7}
    query, key, value = (writers.COLOURS[side] for side in ("query", "key", "value"))
    # columns: heads 0, 1, 2, then the MLP; rows: embeddings, block 0, block 1
    wanted = {
        (value, "-"): ([3.08, 0.08], [1.35, 2], 5.3),
        (query, "-"): ([-0.08, -0.08], [1, 2], 2.8),
        (key, "--"): ([0, 0], [1, 2], 1.8),
        (value, "--"): ([1.08, 2.08], [1, 2], 1.3),
        (key, "-"): ([1, 2], [0, 2], 0.8),
    }
    assert set(found) == set(wanted)
    for look, (x, y, width) in wanted.items():
        assert found[look][0] == pytest.approx(x)
        assert found[look][1] == pytest.approx(y)
        assert found[look][2] == pytest.approx(width)
    assert [line.get_linewidth() for line in drawn] == sorted(
        line.get_linewidth() for line in drawn
    ), "the strongest are drawn last"
    sixth = writers.composition_figure(composition(), n=6).figure.axes[0].lines[0]
    assert (sixth.get_linestyle(), sixth.get_linewidth()) == ("--", 0.3), "a share of zero"
    names = {t.get_text(): t.get_position() for t in axis.texts}
    assert names == {
        "mlp0": (3, 1.35),
        "L1H0": (0, 2),
        "L0H0": (0, 1),
        "L0H1": (1, 1),
        "L1H2": (2, 2),
        "pos_embed": (1, 0),
    }
    texts: Any = axis.texts
    assert {(t.get_ha(), t.get_va(), t.get_fontsize()) for t in texts} == {("center", "center", 7)}
    boxes: Any = [t.get_bbox_patch() for t in axis.texts]
    assert {(to_hex(b.get_facecolor()), to_hex(b.get_edgecolor())) for b in boxes} == {
        ("#ffffff", figure.GREY)
    }


def test_rows_of_a_composition_are_blocks_and_columns_heads() -> None:
    """From the embeddings down, with a column for MLPs; the sentences name the share."""
    view = writers.composition_figure(composition(), n=5)
    axis = view.figure.axes[0]
    assert [t.get_text() for t in axis.get_yticklabels()] == ["embeddings", "0", "1"]
    assert axis.get_yticks().tolist() == [0, 1, 2]
    assert [t.get_text() for t in axis.get_xticklabels()] == ["0", "1", "2", "MLP"]
    assert axis.get_xticks().tolist() == [0, 1, 2, 3]
    assert axis.get_ylim() == pytest.approx((2.7, -0.6))
    assert axis.get_xlim() == pytest.approx((-0.6, 3.6))
    assert axis.get_xlabel() == "head (of the writer or reader)"
    assert axis.get_ylabel() == "block (those with an edge)"
    assert size(view) == pytest.approx((WIDTH, 0.45 * 3 + 1.5), abs=1e-4)
    assert legend(view) == ["read as query", "read as key", "read as value"]
    handles: Any = view.figure.legends[0].legend_handles
    assert [h.get_color() for h in handles] == [figure.BLUE, figure.VERMILION, figure.GREEN]
    assert view.caption == (
        "Lines run down from writers to the heads that read them: the 5 strongest edges by "
        "covariance share. A wider line has a larger share, a dashed one a negative one."
    )
    assert view.null == (
        "Randomly turned writers have a covariance share of 0.250 (root mean square, mean over "
        "edges)."
    )
    one = writers.composition_figure(composition(), share="gs", n=1)
    (line,) = [v for v in one.figure.axes[0].lines if len(np.asarray(v.get_xdata()))]
    assert np.asarray(line.get_xdata()).tolist() == pytest.approx([-0.08, 1.92]), "embed is first"
    assert np.asarray(line.get_ydata()).tolist() == [0, 1], "block 0 has no edge"
    assert "1 strongest edges by gain share" in one.caption
    assert "a gain share of 0.500 (" in one.null
    late = dataclasses.replace(composition(), wrote=(-1, -1, -1, 0, 0, 1))
    random = late.random_cs[:, :, 1:5].mean()
    assert f"of {float(random):.3f} (" in writers.composition_figure(late, n=3).null
    with pytest.raises(GeometryError, match="share: expected one of 'cs', 'gs', got 'es'"):
        writers.composition_figure(composition(), share="es")


def pruned(unit: str = "edges", prompts: int = 10, **options: Any) -> Faithfulness:
    """Two levels, and two random circuits, of a metric from 0 to 1."""
    metrics = torch.tensor([[0.25], [0.75]]).double() + 0.1 * draw(2, prompts)
    return Faithfulness(
        **{
            "provenance": SOURCE,
            "unit": unit,
            "total": 200,
            "kept": torch.tensor([2, 100]),
            "clean": torch.ones(prompts).double(),
            "counterfactual": torch.zeros(prompts).double(),
            "metrics": metrics,
            "random": 0.5 * draw(2, 2, prompts, seed=4),
            "seed": 0,
            **options,
        }
    )


def test_faithfulness_has_bands_and_the_range_of_random_circuits() -> None:
    """Curves in their colours over the share that is kept, on a logarithmic axis; those of random
    circuits are grey and dashed."""
    first, other = pruned(), pruned(random=draw(2, 2, 10, seed=9))
    view = writers.faithfulness_curve({"a": first, "b": other})
    axis = view.figure.axes[0]
    a, b, null, one = axis.lines
    assert [line.get_color() for line in (a, b, null)] == [
        figure.BLUE,
        figure.VERMILION,
        figure.GREY,
    ]
    assert np.asarray(a.get_xdata()).tolist() == pytest.approx([1, 50])
    assert np.asarray(a.get_ydata()).tolist() == pytest.approx(first.metrics.mean(1).tolist())
    assert [line.get_linestyle() for line in (a, b, null)] == ["-", "-", "--"]
    assert [line.get_marker() for line in (a, b, null)] == ["o", "o", "s"]
    assert np.asarray(null.get_ydata()).tolist() == pytest.approx(
        first.random.mean((0, 2)).tolist()
    )
    assert np.asarray(one.get_ydata()).tolist() == [1, 1]
    label = f"a: CPR {float(first.cpr.value):.2f}, CMD {float(first.cmd.value):.2f}"
    assert (a.get_label(), null.get_label()) == (label, "2 random circuits")
    bands: Any = axis.collections
    ends = [(first.f.low, first.f.high), (other.f.low, other.f.high)]
    means = first.random.mean(2)
    ends.append((means.amin(0), means.amax(0)))
    for band, (low, high), alpha in zip(bands, ends, (0.2, 0.2, 0.3), strict=True):
        edge = band.get_paths()[0].vertices[:, 1]
        assert (edge.min(), edge.max()) == pytest.approx((float(low.min()), float(high.max())))
        assert (band.get_alpha(), band.get_linewidth().tolist()) == (alpha, [0])
    assert [to_hex(band.get_facecolor()[0]) for band in bands] == [
        figure.BLUE,
        figure.VERMILION,
        figure.GREY,
    ]
    assert axis.get_xscale() == "log"
    assert (axis.get_xlabel(), axis.get_ylabel()) == (
        "edges kept (%)",
        "faithfulness f (share of the metric)",
    )
    assert size(view) == pytest.approx((0.8 * WIDTH, 3.0), abs=1e-4)
    assert view.title == "How much of the behaviour do the highest-ranked edges carry?"
    assert view.null == (
        "Grey: random circuits of the same sizes (those of a), their mean and range."
    )
    assert view.source == LINE
    nodes = writers.faithfulness_curve(pruned("nodes"))
    assert "(those of highest scores)" in nodes.null
    assert nodes.figure.axes[0].get_xlabel() == "nodes kept (%)"
    assert "highest-ranked nodes carry" in nodes.title
    own = Figure().subplots()
    writers.faithfulness_curve(first, ax=own)
    for drawn, points in ((own, 7), (axis, 8)):
        box = drawn.get_legend()
        assert box is not None
        assert box.get_texts()[0].get_fontsize() == points
        assert not box.get_frame_on()


def test_curves_that_cannot_be_compared_are_refused() -> None:
    """Five curves, two units, a chosen set, which is one point; four curves are drawn."""
    four = {name: pruned() for name in "abcd"}
    lines = writers.faithfulness_curve(four).figure.axes[0].lines
    assert [line.get_color() for line in lines[:4]] == list(writers.CURVES)
    chosen = pruned(kept=torch.tensor([2]), metrics=draw(1, 10), random=draw(2, 1, 10))
    chosen = dataclasses.replace(chosen, complements=draw(1, 10), random_complements=draw(2, 1, 10))
    wrong: list[tuple[Any, str]] = [
        ({**four, "e": pruned()}, "results: expected 1 to 4 curves, got 5"),
        (
            {"a": pruned(), "b": pruned("nodes")},
            "results: expected curves of edges, or of nodes, got edges, nodes",
        ),
        (
            {"a": pruned(), "b": chosen},
            "results: expected curves of edges, or of nodes, got a chosen set, which is one point",
        ),
    ]
    for results, said in wrong:
        with pytest.raises(GeometryError, match=said):
            writers.faithfulness_curve(results)


def test_the_image_of_a_logit_has_its_sizes_labels_and_lines_at_zero() -> None:
    """A bar takes 0.19 inches; a value of zero is blue."""
    found = explained()
    for count in (12, 3):
        some = dataclasses.replace(
            found,
            pairs=found.pairs[:count],
            **{
                name: getattr(found, name)[:count]
                for name in ("pair_values", "pair_terms", "pair_alibi", "pair_scores")
            },
            pair_patterns=found.pair_patterns[:count],
        )
        view = writers.logit_figure(some)
        assert size(view) == pytest.approx((8.4, 2.3 + 0.19 * count), abs=1e-3)
        strip, bars = view.figure.axes
        grid = strip.get_subplotspec()
        assert grid is not None
        ratios = grid.get_gridspec().get_height_ratios()
        assert ratios == pytest.approx([1.2, 0.19 * count + 0.2])
    assert strip.get_ylabel() == "from each token\n(logits, all heads)"
    assert bars.get_xlabel() == (
        "written towards the target (logits); the score with its largest terms"
    )
    assert np.asarray(strip.lines[0].get_ydata()).tolist() == [0, 0]
    assert np.asarray(bars.lines[0].get_xdata()).tolist() == [0, 0]
    assert {t.get_rotation() for t in strip.get_xticklabels()} == {90}
    assert {t.get_fontsize() for t in (*strip.get_xticklabels(), *bars.get_yticklabels())} == {7}
    texts: Any = bars.texts
    assert {t.get_position()[0] for t in texts} == {1.02}
    assert {(t.get_va(), t.get_fontsize()) for t in texts} == {("center", 7)}
    assert texts[0].get_transform().transform((0, 0))[0] == pytest.approx(
        bars.transAxes.transform((0, 0))[0]
    ), "x in shares of the width"
    assert strip.xaxis.get_tick_params()["length"] == 0
    assert bars.yaxis.get_tick_params()["labelsize"] == 7
    assert writers._signs(torch.tensor([1.0, 0.0, -1.0])) == [
        figure.POSITIVE,
        figure.NEGATIVE,
        figure.NEGATIVE,
    ]
    assert view.caption.startswith(
        "Above, what all heads wrote from each token; below, the largest pairs of a head and its "
        "source. With MLPs, embeddings and constants it sums to "
    )
    assert view.null == "What was written adds up to the logit exactly: it has no null."


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        (1.0, "writes 0.00, removing it adds 1.00 ± 0.25"),
        (-1.0, "writes 0.00, removing it costs 1.00 ± 0.25"),
        (0.0, "writes 0.00, removing it costs 0.00 ± 0.25"),
    ],
)
def test_a_knockout_adds_or_costs(effect: float, said: str) -> None:
    """A value that rounds to zero has no sign."""
    assert writers.knockout_sentence(-0.001, effect, 0.25) == said
