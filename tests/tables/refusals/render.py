"""Views: what they are given, their options, and the files that they are saved to."""

from __future__ import annotations

from typing import Any

from tests.tables.refusals.row import NOT_A_BASIS, Group, Options, Scene, Wrong
from tl_geometry import render

VIEWS = (
    *("sphere_paths", "weight_blocks", "faithfulness_curve", "fourier", "noise_figure"),
    *("baseline_figure", "skip_figure", "truncation_figure", "variance_shares"),
    *("composition_figure", "effect_bars", "token_attribution", "head_shares", "split"),
    *("graph_page", "heads", "spirals"),
)
"""Every view that takes one result."""
OTHERS: Options = {
    "a basis": lambda s: s.w.basis,
    "a split": lambda s: s.w.split,
    "a path": NOT_A_BASIS,
    "None": None,
}
ITS_OWN = "^(?!terms)"
"""What a refusal is about: not what the view looked for in the wrong thing."""
RIGHT = {"split": "a split"} | dict.fromkeys(("spirals", "fourier", "variance_shares"), "a basis")


def drawn(s: Scene, view: str, result: Any) -> Any:
    return getattr(render, view)(result)


def wrong_results(view: str) -> dict[str, Wrong]:
    """Each result that a view cannot draw, as its argument."""
    found: dict[str, Wrong] = {}
    for name, result in OTHERS.items():
        if RIGHT.get(view) != name:
            found[name] = ({"result": result}, ITS_OWN)
    return found


GROUPS = (
    *(
        Group(
            name=f"render.{view}",
            call=drawn,
            base={"view": view},
            right={},
            wrong=wrong_results(view),
            twin="tests/tables/test_views.py draws each from its own result",
        )
        for view in VIEWS
    ),
    Group(
        name="a page of a split",
        call=lambda s, **o: render.split(s.w.split, **o),
        right={"all": {}, "one head": {"heads": "L1H2"}, "a context": {"context": 1}},
        wrong={
            "a context beyond": ({"context": 99}, "context"),
            "heads that it lacks": ({"heads": "L0H0"}, "heads"),
            "panels of no name": ({"panels": ["nothing"]}, "terms|panels|heads"),
            "fewer tokens": ({"tokens": ["a"]}, "tokens"),
        },
    ),
    Group(
        name="a page of heads",
        call=lambda s, value: render.heads(s.w.sweep, value),
        right={"a column": {"value": "induction"}},
        wrong={
            "no column": ({"value": "nothing"}, "value"),
            "a label": ({"value": "head"}, "value"),
        },
    ),
    Group(
        name="a Gram matrix",
        call=lambda s, state: render.gram(s.w.basis, state),
        right={"a state": {"state": 1}},
        wrong={
            "a state beyond": ({"state": 99}, "state"),
            "a state below zero": ({"state": -1}, "state"),
        },
    ),
    Group(
        name="shares of heads",
        call=lambda s, share: render.head_shares(s.w.sweep, share=share),
        right={"of covariance": {"share": "cs"}},
        wrong={"of no name": ({"share": "x"}, "share")},
    ),
    Group(
        name="a figure in a file",
        call=lambda s, path: render.variance_shares(s.w.basis.anova()).save(path),
        of="path",
        right={"PNG": lambda s: s.folder / "a.png"},
        wrong={
            "of no kind": lambda s: s.folder / "a.docx",
            "below a file": ({"path": lambda s: s.path("plain") / "a.html"}, "."),
        },
    ),
    Group(
        name="the view of a result",
        call=lambda s, result: render.plot(result),
        right={"a sweep": {"result": lambda s: s.w.sweep}},
        wrong={
            "prompts": ({"result": lambda s: s.w.prompts}, "result"),
            "None": ({"result": None}, "result"),
        },
    ),
)
