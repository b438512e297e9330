"""Signed terms and maps of heads, without a browser: what is packed, what the images show and what
is refused."""

from __future__ import annotations

import base64
import dataclasses
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

import tl_geometry as tlg
from tests.browser import HOSTILE, payload
from tests.splits import synthetic
from tl_geometry import render
from tl_geometry.base.errors import GeometryError
from tl_geometry.base.rows import row_center
from tl_geometry.render import split_view
from tl_geometry.render.split_view import draw_panels, panels_of
from tl_geometry.scores.split import ScoreSplit

pytestmark = pytest.mark.once


def unpacked(data: dict[str, Any]) -> np.ndarray:
    """``[head plane query key]`` of a page's data, NaN outside the mask, by the format as it is
    described and not by the code."""
    n = data["size"]
    bits = np.frombuffer(zlib.decompress(base64.b64decode(data["masks"])), dtype=np.uint8)
    masks = [
        np.unpackbits(row, bitorder="little")[: n * n].astype(bool)
        for row in bits.reshape(-1, -(-n * n // 8))
    ]
    raw = zlib.decompress(base64.b64decode(data["cells"]))
    stored = np.frombuffer(raw, dtype=np.int8 if data["levels"] else np.float16).astype(float)
    out = np.full((len(data["heads"]), len(data["planes"]), n * n), np.nan)
    at = 0
    for h, mask in enumerate(data["mask"]):
        for p in range(len(data["planes"])):
            found = stored[at : at + masks[mask].sum()]
            found = np.where((found == -128) & bool(data["levels"]), np.nan, found)
            out[h, p, masks[mask]] = found / (data["levels"] or 1) * data["largest"][h][p]
            at += len(found)
    assert at == len(stored)
    return out.reshape(*out.shape[:2], n, n)


@pytest.mark.parametrize(("tokens", "causal"), [(20, True), (64, False), (65, True), (90, False)])
def test_what_is_stored_is_within_half_a_step_of_the_split(tokens: int, causal: bool) -> None:
    split = synthetic(3, tokens, causal=causal)
    data = payload(render.split(split, panels="terms"))
    found = unpacked(data)
    assert data["planes"] == [*(f"{a}-{b}" for a, b in split.terms), "total", "pattern"]
    true = (
        torch.stack(
            [*(split.terms[t][0] for t in split.terms), split.total()[0], split.pattern()[0]], 1
        )
        .double()
        .numpy()
    )
    allowed = split.allowed[:, None].expand(-1, true.shape[1], -1, -1).numpy()
    half = np.array(data["largest"])[:, :, None, None] * (
        0.5 / data["levels"] if data["levels"] else 2.0**-12
    )
    assert (data["levels"] is None) == (tokens <= 64)
    error = np.where(allowed, np.abs(found - true), 0)
    assert (error <= half * (1 + 1e-9)).all()
    assert (error > half / 10).any()  # the bound is of the right size
    assert np.isnan(found[~allowed]).all()


def test_the_four_groups_sum_to_the_total_and_terms_of_ones_own_parts_stand_alone() -> None:
    split = dataclasses.replace(
        synthetic(2, 9, parts=("bias", "pos", "ctx", "resid")), bias=torch.randn(2, 9, 9)
    )
    groups = panels_of(split, None)
    assert list(groups) == ["position", "content", "token", "mixed"]
    assert sorted(t for members in groups.values() for t in members) == sorted(split.terms)
    assert ("alibi", "alibi") in groups["position"]
    context = ("ctx", "resid")
    sides = [("bias", b) for b in context] + [(a, "bias") for a in context]
    assert sorted(groups["token"]) == sorted(sides)
    rows, columns, places = split_view._layout(split, panels_of(split, "terms"))
    assert (rows, columns) == (4, 5)
    assert places == [*(divmod(i, 4) for i in range(16)), (2, 4), (0, 4), (1, 4)]  # ALiBi below
    drawn = draw_panels(split, groups)
    inside = split.allowed[:, None]
    torch.testing.assert_close(
        drawn.values[:, :4].sum(1)[split.allowed],
        split.total()[0][split.allowed].double(),
        rtol=1e-5,
        atol=1e-5,
    )
    centred = draw_panels(split, groups, centered=True).values[:, :5]
    torch.testing.assert_close(
        torch.where(inside, centred, 0.0).sum(-1),
        torch.zeros(2, 5, 9, dtype=torch.float64),
        atol=1e-4,
        rtol=0,
    )
    torch.testing.assert_close(
        centred[:, 4][split.allowed],
        row_center(split.total()[0], split.allowed)[split.allowed].double(),
    )
    own = synthetic(1, 6, parts=("bias", "mlp"))
    assert list(panels_of(own, None)) == ["bias-bias", "bias-mlp", "mlp-bias", "mlp-mlp"]
    with pytest.raises(GeometryError, match="'groups' of parts of your own"):
        panels_of(own, "groups")


def test_cells_beyond_either_end_of_the_scale_have_a_colour_of_their_own() -> None:
    split = synthetic(1, 30)
    q = split.q.clone()
    q[:, 0, 20] *= 50
    split = dataclasses.replace(split, q=q)
    view = render.split(split)
    top = payload(view)["limit"]
    drawn = draw_panels(split, panels_of(split, None))
    scores = drawn.values[0, :-1, drawn.allowed[0]]
    sheet: Any = view.image().figure.axes[0].images[0].get_array()
    for colour, beyond in zip(split_view.BEYOND, (scores > top, scores < -top), strict=True):
        painted = (sheet[..., :3] == np.round(255 * np.array(to_rgb(colour)))).all(-1)
        assert painted.sum() == int(beyond.sum()) > 0


def test_caption_says_scale_saturation_closing_and_holes() -> None:
    split = synthetic(1, 30)
    q = split.q.clone()
    q[1, 0, 7] = torch.nan
    q[2, 0, 20] *= 50  # far above the others: what lies beyond the scale
    split = dataclasses.replace(split, q=q.nan_to_num())
    view = render.split(dataclasses.replace(split, q=q))
    data = payload(view)
    planes = [
        torch.stack([split.terms[t] for t in members]).sum(0)[0, 0]
        for members in panels_of(split, None).values()
    ]
    scores = torch.stack([*planes, split.total()[0, 0]])[:, split.allowed[0]]
    rows = split.allowed[0].nonzero()[:, 0]
    kept = torch.stack(list(scores[:, rows != 7]))
    top = data["limit"]
    beyond = int((kept.abs() > top).sum()) + int((scores[:, rows == 7].abs() > top)[[2, 3]].sum())
    assert 0 < beyond < kept.numel() / 50
    assert data["high"] > top
    assert "reconstruction error 1.0e-06 (scores; allowed 2.0e-05)" in view.caption
    assert f"full colour at {top:.3g} on every panel and head" in view.caption
    assert "pattern from 0 to 1" in view.caption
    assert f"{8 * 4} cells are not a number (hatched)" in view.caption
    assert f"{beyond} of {5 * 465} cells beyond it marked" in view.caption
    assert "some of the terms" in render.split(split, panels=["pos-pos", "content"]).caption


def test_outliers_do_not_stretch_the_scale() -> None:
    split = synthetic(1, 40)
    calm = payload(render.split(split))["limit"]
    q = split.q.clone()
    q[0, 0, 0] *= 1000
    wild = payload(render.split(dataclasses.replace(split, q=q)))
    assert wild["limit"] < 3 * calm
    assert wild["high"] > 50 * calm


@pytest.mark.slow
def test_images_and_files(tmp_path: Path) -> None:
    texts = [*HOSTILE, "$x^2$"]
    view = render.split(synthetic(1, len(texts), texts=texts), title="A <b>")
    for name, start in {
        "a.png": b"\x89PNG",
        "a.pdf": b"%PDF",
        "a.svg": b"<?xml",
        "a.html": b"<!doctype html>",
    }.items():
        assert view.save(tmp_path / name).read_bytes().startswith(start)
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes()
    page = (tmp_path / "a.html").read_text()
    assert "http:" not in page.replace("http-equiv", "")
    assert "https:" not in page
    assert "<img" not in page
    assert page.count("<script") == 2
    assert not any(
        word in page
        for word in ("url(", " src=", " href=", "@import", "fetch(", "XMLHttpRequest", "import(")
    )
    with pytest.raises(GeometryError, match=r"a name ending in \.html, \.png, \.svg or \.pdf"):
        view.save(tmp_path / "a.gif")
    several = render.split(synthetic(13, 12)).image
    assert several is not None
    assert "12 of 13 heads" in several().caption


def test_refusals() -> None:
    split = synthetic(2, 8)
    for wrong, text in [
        ({"heads": (3, 3)}, "head .3, 3.: expected an index from 0 to 0"),
        ({"context": 1}, "context: expected an index from 0 to 0"),
        ({"panels": "pos-mlp"}, "panels: expected 'groups', 'terms' or some of position, "),
        ({"panels": []}, "got none"),
        ({"tokens": ["a"]}, r"tokens: expected 8 texts, got 1\. Use tokens=model.to_str_tokens"),
    ]:
        with pytest.raises(GeometryError, match=text):
            render.split(split, **wrong)


def test_tokens_of_other_prompts_are_numbers_or_given() -> None:
    split = synthetic(1, 4)
    both = dataclasses.replace(
        split, q=torch.cat([split.q, split.q * 2], 1), k=split.k.expand(-1, 2, -1, -1, -1)
    )
    assert payload(render.split(both, context=1))["tokens"] == ["0", "1", "2", "3"]
    assert payload(render.split(both, context=1, tokens=list(" ab\n")))["tokens"] == [
        "␣",
        "a",
        "b",
        "⏎",
    ]
    first, second = (unpacked(payload(render.split(both, context=c)))[0, 3] for c in (0, 1))
    np.testing.assert_allclose(second[3], 2 * first[3], rtol=1e-2, atol=1e-2)


def sweep() -> tlg.Result:
    """A table with one row per head, NaN in it, and words."""
    from tests.lib.models import tiny, tokens

    model = tiny("bridge", "gpt2")
    basis = tlg.decompose(model, tokens(12, 16), progress=False)
    return tlg.sweep_heads(model, tokens(2, 16), basis, progress=False)


def test_map_of_heads_holds_the_table() -> None:
    table = sweep()
    view = render.heads(table, "induction")
    data = payload(view)
    frame = table.to_dataframe()
    assert data["value"] == "induction"
    for name, low in (("induction", 0), ("cs_position", -1)):
        scale, largest = data["columns"][name]["scale"], frame[name].abs().max()
        assert scale == [low * scale[1], scale[1]]
        assert largest <= scale[1] < 1.34 * largest
    assert [data["layers"][l] for l, _ in data["heads"]] == frame["layer"].tolist()
    for name, column in data["columns"].items():
        stored = np.array([np.nan if v is None else v for v in column["values"]])
        np.testing.assert_allclose(stored, frame[name], rtol=1e-4)
    assert data["words"]["dominant_term"] == frame["dominant_term"].tolist()
    assert set(data["words"]) | set(data["columns"]) | {"layer", "head"} == set(frame.columns)
    image: Any = view.image
    shown = np.asarray(image().figure.axes[0].images[0].get_array()).ravel()
    np.testing.assert_allclose(shown, frame["induction"])
    assert payload(render.heads(table))["value"] == "cs_position"
    with pytest.raises(
        GeometryError, match=r"value: expected one of \d+ names, such as .*, got 'dominant_term'"
    ):
        render.heads(table, "dominant_term")
    with pytest.raises(
        GeometryError, match="table: expected one row per layer and head, got ShareTable"
    ):
        render.heads(table.shares())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_public_views_exist_are_lazy_and_share_no_name_with_a_module() -> None:
    modules = {p.stem for p in Path(render.__file__).parent.glob("*.py")}
    for name in render.__all__:
        assert callable(getattr(render, name)) or name == "circuitsvis"
        assert name not in modules or name == "circuitsvis"
        assert name == "circuitsvis" or getattr(render, name).__name__ == name
    assert set(render.__all__) <= set(dir(render))
    with pytest.raises(AttributeError, match="nothing"):
        getattr(render, "nothing")  # noqa: B009 (a type checker refuses the attribute)
    heavy = "('matplotlib', 'circuitsvis', 'pandas')"
    code = (
        "import sys, tl_geometry.render as r; r.split, r.heads; print([m for m in "
        f"{heavy} if m in sys.modules])"
    )
    root = Path(tlg.__file__).parent.parent
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.slow
def test_a_split_of_a_model_shows_its_own_tokens() -> None:
    from tl_geometry import zoo

    model = zoo.embedded()
    basis = tlg.decompose(model, zoo.default_windows(model, 24, n=8), progress=False)
    split: ScoreSplit = tlg.split_scores(
        model, "def f(x):\n    return x", basis, prepend_bos=True, heads=["L1H0"]
    )
    data = payload(render.split(split))
    assert data["tokens"][0] == "<|endoftext|>"
    assert any("⏎" in t for t in data["tokens"])
    assert data["heads"] == ["L1H0"]
