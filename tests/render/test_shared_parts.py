"""What all figures and pages share: sizes in pixels, legends, ticks, frames, images of a limited
weight, and the sentences beside them."""

from __future__ import annotations

import base64
import io
import math
import re
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgba
from matplotlib.figure import Figure
from PIL import Image

from tl_geometry.base.errors import GeometryError
from tl_geometry.render import figure as shared
from tl_geometry.render import page
from tl_geometry.render.figure import View
from tl_geometry.render.page import PageView


def drawn(cells: int = 2, low: float = 0.0, **texts: str) -> View:
    """A small matrix as a figure."""
    made, (axis,) = shared.canvas(size=(3.0, 2.5))
    values = torch.rand(cells, cells, generator=torch.Generator().manual_seed(0))
    shared.draw_matrix(axis, values, low, 1.0)
    return View(made, **{"title": "A <b>", "caption": "How.", **texts})


def test_a_figure_as_html_says_all_and_is_as_wide_as_it_was_drawn() -> None:
    """Title, caption, null and source stand beside an image of 100 pixels an inch at most."""
    view = drawn(null="By chance.", source="from <x>")
    text = view.html()
    assert "max-width:min(100%,300px);background:white" in text
    assert '<b>A &lt;b&gt;</b> <span class="how">How. By chance.</span>' in text
    assert "<summary>How this was made</summary>from &lt;x&gt;</details></figure>" in text
    assert '<img alt="A &lt;b&gt;" class="kept" src="data:image/svg+xml;base64,' in text
    assert text.startswith('<figure style="margin-left:0;margin-right:0"><figcaption')
    assert repr(view) == "A <b> (300 x 250 px): How."
    plain = drawn(low=-1.0)
    assert "kept" not in plain.html(), "signed colours may be inverted"
    assert "<details>" not in plain.html()
    assert '<span class="how">How.</span>' in plain.html()


def test_points_in_sequential_colours_are_kept_from_being_inverted() -> None:
    """Not only images: a path with a colour for each state too."""
    made, (axis,) = shared.canvas()
    shared.draw_path(axis, torch.rand(4, 2), range(4), 5.0)
    assert 'class="kept"' in View(made, title="a").html()
    axis.collections[0].set_cmap(shared.DIVERGING)
    assert "kept" not in View(made, title="a").html()
    axis.collections[0].remove()
    axis.scatter([0], [0], color="k")
    assert "kept" not in View(made, title="a").html()


def test_a_heavy_drawing_is_a_png(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SVG of more bytes than the limit, and not one of just as many."""
    size = len(drawn().bytes("svg"))
    for limit, form in ((size, "svg+xml"), (size - 1, "png")):
        monkeypatch.setattr(shared, "HEAVY", limit)
        assert f"data:image/{form};base64," in drawn().html()
    view = drawn()
    raw = base64.b64decode(view.html().split("base64,")[1].split('"')[0])
    assert Image.open(io.BytesIO(raw)).size == (450, 375), "150 dots an inch"
    bundle = view._repr_mimebundle_()
    assert Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))).size == (450, 375)
    assert bundle["text/plain"] == repr(view)
    assert bundle["text/html"].startswith("<figure style")


@pytest.mark.parametrize("form", ["svg", "pdf"])
def test_the_same_figure_gives_the_same_bytes(form: str) -> None:
    """Files hold no date and no ids at random, and text stays text."""
    first, second = drawn().bytes(form), drawn().bytes(form)
    assert first == second
    assert b"Date" not in first
    if form == "svg":
        made, (axis,) = shared.canvas()
        axis.set_title("words")
        assert b">words</text>" in View(made, title="a").bytes(form)


def test_figures_have_the_settings_of_the_library() -> None:
    """White paper, two spines, nine points, and colours in the order of the list."""
    made, (axis,) = shared.canvas()
    assert to_hex(made.get_facecolor()) == "#ffffff"
    assert [axis.spines[side].get_visible() for side in ("top", "right", "left", "bottom")] == [
        False,
        False,
        True,
        True,
    ]
    assert made.get_size_inches().tolist() == [3.2, 2.6]
    assert axis.xaxis.label.get_fontsize() == 9
    lines = [axis.plot([0, 1])[0] for _ in range(7)]
    wanted = [shared.BLUE, shared.VERMILION, shared.GREEN, shared.AMBER, shared.PINK, shared.GREY]
    assert [to_hex(line.get_color()) for line in lines] == [*wanted, "#000000"]
    assert made.get_constrained_layout()
    grid, axes = shared.canvas(3, 2, size=(1.0, 2.0))
    assert grid.get_size_inches().tolist() == [3.0, 4.0]
    assert len(axes) == 6
    places: Any = [a.get_subplotspec() for a in axes]
    assert [p.colspan.start for p in places] == [0, 1, 2] * 2


@pytest.mark.parametrize(
    ("count", "columns", "size"), [(1, None, (2, 1)), (3, None, (6, 1)), (5, 2, (4, 3))]
)
def test_panels_fill_rows_and_leave_no_empty_axes(
    count: int, columns: int | None, size: tuple[int, int]
) -> None:
    """Also where the last row is not full."""
    made, axes = shared.panels(None, count, "thing", columns=columns, size=(2.0, 1.0))
    assert len(made.axes) == len(axes) == count
    assert tuple(made.get_size_inches()) == size
    own = Figure().subplots()
    assert shared.panels(own, 1, "thing", size=(1.0, 1.0)) == (own.figure, [own])
    with pytest.raises(GeometryError, match="ax: expected one thing when drawing into ax, got 2"):
        shared.panels(own, 2, "thing", size=(1.0, 1.0))


def test_a_path_is_a_thin_line_below_its_points() -> None:
    """In two dimensions and in three, where far points keep their colours."""
    _, (flat,) = shared.canvas()
    points = torch.tensor([[0.0, 1.0], [2.0, 3.0], [5.0, 4.0]])
    marks = shared.draw_path(flat, points, [3, 4, 6], 7.0)
    assert marks.get_zorder() > flat.lines[0].get_zorder()
    assert np.asarray(marks.get_offsets()).tolist() == points.tolist()
    assert marks.get_array().tolist() == [3, 4, 6]
    assert marks.get_sizes().tolist() == [7]
    assert marks.get_cmap().name == shared.SEQUENTIAL
    assert flat.lines[0].get_linewidth() == 0.7
    assert to_rgba(flat.lines[0].get_color()) == to_rgba("#8888")
    made, (solid,) = shared.canvas(subplot_kw={"projection": "3d"})
    paths = torch.rand(2, 9, 3)
    shared.draw_paths_3d(solid, paths, range(4, 13), ["a", "b", "c"], size=2.0)
    axis: Any = solid
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_zlabel()) == ("a", "b", "c")
    assert not any(c.get_depthshade() for c in axis.collections)
    assert max(len(axis.get_xticks()), len(axis.get_zticks())) <= 5 + 1
    bar = made.axes[1]
    assert bar.get_ylabel() == "state"
    assert bar.get_yticks().tolist() == list(range(4, 13))


def test_legends_name_each_line_once_where_they_cover_nothing() -> None:
    """Beside the axes, at an edge of the figure, or inside the axes of a caller."""
    made, axes = shared.canvas(2)
    for axis, labels in zip(axes, (("a", "b"), ("b", "c")), strict=True):
        for label in labels:
            axis.plot([0, 1], label=label)
    shared.legend_outside(made, axes)
    legends: Any = made.legends
    (legend,) = legends
    assert [t.get_text() for t in legend.get_texts()] == ["a", "b", "c"]
    assert legend._ncols == 3
    assert not legend.get_frame_on()
    assert legend.get_texts()[0].get_fontsize() == 8
    handles: Any = legend.legend_handles
    assert [h.get_color() for h in handles[:2]] == [line.get_color() for line in axes[0].lines]
    shared.legend_beside(axes[0])
    beside: Any = axes[0].get_legend()
    assert beside is not None
    anchor = beside.get_bbox_to_anchor().transformed(axes[0].transAxes.inverted())
    assert (anchor.x0, anchor.y0) == pytest.approx((1, 1))
    assert beside._loc == 2, "its upper left corner"
    assert not beside.get_frame_on()
    shared.legend_outside(made, axes, ax=axes[1])
    inside = axes[1].get_legend()
    assert inside is not None
    assert len(made.legends) == 1
    assert [t.get_text() for t in inside.get_texts()] == ["b", "c"]
    assert inside.get_texts()[0].get_fontsize() == 7
    assert not inside.get_frame_on()


@pytest.mark.parametrize(
    ("values", "most", "ticks"),
    [
        (range(12), 12, list(range(12))),
        (range(13), 12, [0, 2, 4, 6, 8, 10, 12]),
        (range(3, 25), 12, list(range(4, 25, 2))),
        (range(25), 12, [0, 5, 10, 15, 20]),
        (range(61), 12, [0, 10, 20, 30, 40, 50, 60]),
        (range(601), 12, [0, 100, 200, 300, 400, 500, 600]),
        (range(17), 17, list(range(17))),
        (range(18), 17, list(range(0, 18, 2))),
        ([0, 3, 7], 12, [0, 3, 7]),
    ],
)
def test_ticks_stand_at_round_numbers(values: Any, most: int, ticks: list[int]) -> None:
    """The multiples of the smallest step that leaves few enough."""
    assert shared.whole_ticks(values, most) == ticks


@pytest.mark.parametrize(("values", "ends"), [([2, 5, 9], (2, 9)), ([4], (4, 5))])
def test_shades_go_from_the_first_value_to_the_last(
    values: list[int], ends: tuple[int, int]
) -> None:
    """A single value has a scale too."""
    made, (axis,) = shared.canvas()
    shade = shared.shades(made, axis, values, "layer")
    bar = made.axes[1]
    assert bar.get_ylim() == ends
    assert bar.get_ylabel() == "layer"
    map_of = mpl.colormaps[shared.SEQUENTIAL]
    for value in values:
        share = (value - ends[0]) / (ends[1] - ends[0])
        assert shade(value) == pytest.approx(map_of(share))


@pytest.mark.parametrize("length", [79, 80, 81, 200])
def test_a_label_has_at_most_eighty_characters(length: int) -> None:
    """Longer texts end in an ellipsis, and no dollar begins a formula."""
    text = "w" * length
    assert shared.drawable(text) == (text if length <= 80 else "w" * 79 + "…")
    assert shared.drawable("$" * length, 3) == r"\$\$…"
    assert shared.head_names([(0, i) for i in range(4)]) == "L0H0, L0H1, L0H2, L0H3"
    assert shared.some(range(9), 8) == [0, 1, 2, 3, 5, 6, 7, 8]


def view_of(height: int = 101, **options: Any) -> PageView:
    """A page of a map without heads."""
    return PageView(
        "heads",
        {"n": 1},
        title="A <b>",
        caption="How.",
        width=640,
        height=height,
        image=drawn,
        **options,
    )


@pytest.mark.parametrize(("height", "shown"), [(100, 100), (101, 110), (109, 110), (110, 110)])
def test_a_frame_is_as_high_as_the_next_ten_pixels(height: int, shown: int) -> None:
    """And as wide as its container, up to the width of the page."""
    text = view_of(height, source="s").html("aGk=")
    size = f"grid-area:1/1;width:100%;height:calc({shown}px + var(--tlg-dark, 0px));border:0"
    assert f'<iframe title="A &lt;b&gt;" sandbox="allow-scripts" style="{size}"' in text
    assert f"max-height:{shown}px;object-fit:contain;object-position:0 0" in text
    assert 'src="data:image/png;base64,aGk=">' in text
    assert "grid-template-columns:minmax(0,1fr);max-width:640px" in text
    assert text.endswith("<details><summary>How this was made</summary>s</details>")
    assert text.count("data-framed") == 1 + text.split("srcdoc")[1].count("data-framed") - 1
    bare = view_of(height)
    assert "<img" not in bare.html()
    assert "loading" not in bare.html().split("srcdoc")[0]
    assert ' loading="lazy" style' in bare.html(lazy=True)
    assert "data-framed " not in bare.page.split("<head>")[0], "a page alone is in no frame"
    assert "data-framed " in bare.html().split("&lt;head&gt;")[0]


def test_a_page_says_its_title_caption_and_null(tmp_path: Any) -> None:
    """A saved one ends with its source, and the image says its title."""
    view = view_of(null="By chance.", source="from x")
    assert '"title":"A \\u003cb\\u003e","caption":"How. By chance.","n":1}' in view.page
    assert "<title>A &lt;b&gt;</title>" in view.page
    saved = view.save(tmp_path / "a.HTML").read_text()
    assert saved.endswith("<summary>How this was made</summary>from x</details></body></html>")
    kilobytes = len(view.html().encode()) / 1000
    assert repr(view) == f"A <b> ({kilobytes:.0f} kB of HTML, 640 x 101 px): How."
    bundle = view._repr_mimebundle_()
    assert bundle["image/png"] == view.png()
    assert f"base64,{view.png()}" in bundle["text/html"]
    assert len(view.scripts) == 2
    assert len(PageView("heads", {}, **said(), library="f()").scripts) == 3


def said() -> dict[str, Any]:
    return {"title": "a", "caption": "", "width": 9, "height": 9, "image": drawn}


def test_the_image_behind_a_page_has_its_title_in_lines() -> None:
    """About twelve characters for each inch."""
    made: list[View] = []

    def image() -> View:
        made.append(drawn(title="four words " * 8))
        return made[-1]

    options: dict[str, Any] = {**said(), "image": image}
    PageView("heads", {}, **options).png()
    title: Any = made[0].figure._suptitle  # type: ignore[attr-defined]
    lines = title.get_text().split("\n")
    assert all(len(line) <= 36 for line in lines)
    assert len(lines) == 3
    assert (title.get_ha(), title.get_fontsize(), title.get_weight()) == ("left", 10, "bold")
    assert title.get_position()[0] == 0.01


def test_an_image_of_limited_weight_loses_colours_first_and_then_pixels() -> None:
    """An image that is light enough stays as it is."""
    raw = drawn(60).bytes("png")
    assert page.small_png(drawn(60), len(raw)) == raw
    fewer = Image.open(io.BytesIO(page.small_png(drawn(60), len(raw) - 1)))
    assert (fewer.mode, fewer.size) == ("P", (450, 375)), "as large, in 128 colours"
    assert len(fewer.getcolors() or ()) <= 128
    small = page.small_png(drawn(60), 4000)
    assert len(small) <= 4000
    width, height = Image.open(io.BytesIO(small)).size
    assert width < 450
    assert width / height == pytest.approx(450 / 375, rel=0.05)
    least = page.small_png(drawn(60), 10)
    assert len(least) > 10, "an image that shows nothing is made no smaller"
    assert min(Image.open(io.BytesIO(least)).size) < 50


def test_numbers_texts_and_lines_of_a_page() -> None:
    """Rounded numbers, line ends, and about how many lines a text takes."""
    assert [page.rounded(v) for v in (math.inf, -math.inf, 123456.7, 0.0)] == [
        None,
        None,
        123460.0,
        0.0,
    ]
    assert page.rounded(2 / 3, 2) == 0.67
    assert page.text_data(["\u010a", "a\n", "b"])["breaks"] == [True, True, False]
    text = {"tokens": ["aaaa"] * 6, "breaks": [False] * 6}
    # 0.6 x 10 x 4 + 6 = 30 pixels for a token
    for width, lines in ((30, 4), (29, 7), (179, 2), (180, 1)):
        assert page.text_lines(text, width, padding=6, font=10) == lines
    broken = {"tokens": ["a", "b", "c"], "breaks": [True, False, True]}
    assert page.text_lines(broken, 999, padding=1, font=10) == 3
    assert [page.caption_height("a" * n) for n in (1, 105, 106, 210, 211)] == [18, 18, 36, 36, 54]


def test_names_in_the_data_of_a_page_are_seen_and_rows_of_numbers_stay() -> None:
    """Control characters are written out at any depth, in keys too."""
    data = {"a\u202e": ["x\u202e", [1, "y\u202e"]], "n": (1, 2.5), "t": (True, None, "z\u202e")}
    found = page._shown(data)
    assert found["a\\u202e"] == ["x\\u202e", [1, "y\\u202e"]]
    assert found["n"] == (1, 2.5)
    assert found["t"] == [True, None, "z\\u202e"]


def test_a_page_allows_its_own_script_alone() -> None:
    """The policy names the hash of each script that the page holds."""
    text = PageView("planes", {}, **said(), library="f()").page
    policy = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)[0]
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert policy.endswith(page.script_hash("f()"))
    script = text.split("</script><script>")[1].split("</script>")[0]
    assert page.script_hash(script) in policy
    assert script.startswith("'use strict';\n")
    assert page._asset("planes.css") in text
    assert page._asset("page.css") in text
