"""The table of views: each with the result that it draws, how it is drawn, and what it computes
from its result, computed here by another route. :mod:`tests.tables.test_views` has their laws.

Those that are functions of ``render`` are rows of the subject table too, which records their words,
styles and numbers. Where a look is changed on purpose, ``python -m tests --accept``.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.colors import to_hex, to_rgba_array
from matplotlib.figure import Figure
from scipy.fft import dctn

import tl_geometry as tlg
from tests.lib.subjects.flow import skips
from tests.lib.subjects.row import Answers, Subject, prefixed, rotary
from tests.lib.worlds import QUIET, World
from tl_geometry import circuits, interventions, measures, render, sphere
from tl_geometry.scores import offset_profile

Numbers = Iterable[Any]
NUMBER = re.compile(r"(?<![\w#])[-+−]?\d[\d.,]*(?:e[-+−]?\d+)?")  # no digit of a name or colour
WORST = re.compile(r"\([\w ]+; allowed")  # rounding decides which error is the largest
STYLE = ("text", "color", "facecolor", "edgecolor", "linestyle", "linewidth", "marker")
STYLE += ("markersize", "alpha", "label", "fontsize", "visible")
LETTERS = [chr(97 + i) for i in range(18)]
SCALES = {"limit", "limits", "units", "minValue", "maxValue"}
"""Numbers of a page's data that its script needs for scales."""


@dataclass(frozen=True)
class Shown:
    """A view: the result, how it is drawn, what is drawn beside the numbers of the result (``more``
    of them), or why no number is looked for."""

    result: Callable[[World], Any]
    draw: Callable[[Any], Any]
    more: Callable[[Any], Numbers] = lambda result: ()
    why: str = ""

    def __call__(self, w: World) -> tuple[Any, Any]:
        """The result and its view."""
        result = self.result(w)
        return result, self.draw(result)


def cosines(basis: Any) -> Numbers:
    """Of the positional and context vectors of state 1."""
    rows = torch.cat([basis.pos[1], basis.ctx[1]]).double()
    rows = rows / rows.norm(dim=-1, keepdim=True)
    yield rows @ rows.T


def transformed(basis: Any) -> Numbers:
    """The cosine transform of the cosines between positions of each state."""
    for pos in basis.pos:
        rows = pos.double() / pos.double().norm(dim=-1, keepdim=True)
        yield dctn((rows @ rows.T).numpy(), norm="ortho")


def principal(basis: Any) -> Numbers:
    """Coordinates of positional vectors along the first directions of their state, and opposite."""
    for pos in basis.pos:
        left, sizes, _ = np.linalg.svd(pos.double().numpy(), full_matrices=False)
        yield from (left[:, :3] * sizes[:3], -left[:, :3] * sizes[:3])


def with_errors(times: float) -> Callable[[Any], Numbers]:
    """The ends of error bars: each column that has an error beside it, ``NAME`` and ``NAME_se``."""

    def ends(report: Any) -> Numbers:
        for name in (name for name in report.df if f"{name}_se" in report.df):
            error = times * report.df[f"{name}_se"].fillna(0.0)
            yield from (report.df[name] - error, report.df[name] + error)

    return lambda report: (each.to_numpy() for each in ends(report))


def laws(report: Any) -> Numbers:
    """The fitted laws of noise between all pairs of states."""
    start, end = (torch.tensor(report.df[name]).double() for name in ("start", "end"))
    for law in ("asymptotic", "increment"):
        yield tlg.flow.fit_noise_law(report, law=law).variance(start, end).log()


def by_group(planes: Any) -> Numbers:
    """Shares of planes summed over the terms of a group, and logarithms of wavelengths."""
    sides = [term.split("-") for term in planes.terms]
    content = torch.tensor([pair.count("cvec") for pair in sides])
    beside_pos = torch.tensor(["pos" in pair for pair in sides])
    one = content == 1
    for group in (content == 2, one & beside_pos, one & ~beside_pos, content == 0):
        yield planes.cs[..., group].sum(-1)


def groups_of(split: Any) -> Numbers:
    """Sums of the terms of constants, of position, of content, content beside a constant, beside
    position."""
    of_pair = lambda pair: (pair.count("cvec"), pair.count("cvec") < 2 and "pos" in pair)
    for group in ((0, False), (0, True), (2, False), (1, False), (1, True)):
        found = [split.terms[pair] for pair in split.terms if of_pair(pair) == group]
        yield from (torch.stack(found).sum(0), torch.stack(found).sum(0).abs())
    yield from (split.total(), split.total().abs(), split.pattern())


def percent(result: Any) -> Numbers:
    """Kept edges in per cent of all."""
    yield from (100 * result.kept.double() / total for total in range(1, 400))


def positional(w: World) -> Any:
    return tlg.positional_report(w.basis, draws=2)


def flow(w: World) -> Any:
    return tlg.flow_report(w.all_states)


def between(w: World) -> Any:
    return tlg.trace_logit(w.model, w.ids[:1], w.targets[0][0], counterfactual=w.other[:1])


def planes(w: World) -> Any:
    return tlg.sweep_heads(w.model, w.fresh, w.basis, planes=True, **QUIET).planes()


def faithful(w: World) -> Any:
    pairs = {"counterfactual": w.other, "answer": w.targets}
    return tlg.faithfulness(w.model, w.ids, w.edges, **pairs, fractions=(0.1, 0.5), draws=2)


VIEWS = {
    "spirals": Shown(lambda w: w.basis, render.spirals, principal),
    "gram": Shown(lambda w: w.basis, lambda b: render.gram(b, 1), cosines),
    "variance_shares": Shown(lambda w: w.basis.anova(), render.variance_shares),
    "fourier": Shown(lambda w: w.basis, render.fourier, transformed),
    "measure_curves": Shown(
        positional, lambda r: render.measure_curves(r, ("rank", "smoothness")), with_errors(1)
    ),
    "measure_curves over contexts": Shown(
        lambda w: measures.learning_curve(w.basis), lambda r: render.measure_curves(r, "rank")
    ),
    "measure_curves of context": Shown(
        lambda w: tlg.contextual_report(w.basis, draws=2), render.measure_curves, with_errors(1)
    ),
    "noise_figure": Shown(flow, render.noise_figure, laws),
    "baseline_figure": Shown(flow, render.baseline_figure),
    "skip_figure": Shown(lambda w: skips(w, pairs=[(0, 1), (1, 2)]), render.skip_figure),
    "truncation_figure": Shown(
        lambda w: tlg.truncation_kl(w.model, w.prompts, w.ensemble, K=(1, 4), **QUIET),
        render.truncation_figure,
        with_errors(2),
    ),
    "head_shares": Shown(lambda w: w.sweep, render.head_shares),
    "head_planes": Shown(planes, lambda p: render.head_planes(p, heads="L1H0"), by_group),
    "heads of bands": Shown(lambda w: planes(w).by_band(), render.heads),
    "heads of a readout": Shown(lambda w: tlg.token_readout(w.model, matrix="OV"), render.heads),
    "sphere_paths": Shown(
        lambda w: sphere.token_paths(w.model, w.ids, w.basis), render.sphere_paths
    ),
    "weight_blocks": Shown(
        lambda w: tlg.weight_geometry(w.model, w.basis, layers=[1], draws=4),
        render.weight_blocks,
        why="a cell is a colour of its own",
    ),
    "effect_bars": Shown(
        lambda w: interventions.effects(
            w.model, w.prompts, interventions.each(w.model, w.heads, by="zero")
        ),
        lambda t: render.effect_bars(t, ax=Figure().subplots()),
    ),
    "composition_figure": Shown(
        lambda w: circuits.composition(w.model, w.prompts, draws=3, **QUIET),
        render.composition_figure,
    ),
    "faithfulness_curve": Shown(
        faithful, lambda r: render.faithfulness_curve({"a": r, "b": r}), percent
    ),
    "token_attribution": Shown(lambda w: w.graph.tokens(), render.token_attribution),
    "split": Shown(lambda w: w.split, render.split, groups_of),
    "heads": Shown(lambda w: w.sweep, render.heads),
    "graph_page": Shown(lambda w: w.graph, render.graph_page),
    "attention_heads": Shown(lambda w: w.split, render.attention_heads, groups_of),
    "induction": Shown(lambda w: w.graph, render.induction),
}


def drawn(figure: Any) -> Iterator[tuple[str, Any]]:
    """The numbers of a figure: of lines, error bars, points, bars and images, not of scales."""
    for axis in figure.axes:
        if axis.get_label() == "<colorbar>":
            continue
        guides = (axis.get_xaxis_transform(), axis.get_yaxis_transform())
        for line in axis.lines:
            if line.get_transform() not in guides and line.get_marker() != "|":
                # lines in three dimensions give what was projected last
                data = line.get_data_3d() if hasattr(line, "get_data_3d") else line.get_data()
                yield "line", np.stack([np.asarray(each, float) for each in data])
        for image in axis.images:
            yield "image", np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
        for each in axis.collections:
            if hasattr(each, "get_segments"):
                yield from (("segment", segment) for segment in each.get_segments())
            elif len(each.get_offsets()) > 1 and axis.name != "3d":
                yield "points", np.asarray(each.get_offsets(), float)
        bars = [p for p in axis.patches if hasattr(p, "get_height")]
        sizes = np.array([(bar.get_width(), bar.get_height()) for bar in bars])
        # the thickness of bars is the same for all, and no number
        if len(bars) > 1:
            yield "bars", sizes[:, np.ptp(sizes, axis=0) > 1e-6]


def inside(value: Any) -> Iterator[Any]:
    """The numbers of a page's data, packed ones too; not what a list of edges leaves out."""
    if isinstance(value, Mapping):
        if "packed" in value:
            raw = zlib.decompress(base64.b64decode(value["packed"]))
            cells = np.frombuffer(raw, np.float16).astype(float).reshape(value["shape"])
            yield cells * np.asarray(value["units"])[..., None, None]
        if "source" in value and "value" in value:
            pairs = zip(value["source"], value["value"], strict=True)
            value = {"value": [weight for source, weight in pairs if source >= 0]}
        for key, each in value.items():
            if key not in SCALES and key not in ("library", "packed"):
                yield from inside(each)
    elif isinstance(value, list):
        yield from (each for item in value for each in inside(item))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def data_of(page: str) -> Any:
    """The data of a page, as its script reads it."""
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert text
    assert not re.search("[<>&]", text[1])  # nothing could end the element, or begin another
    return json.loads(text[1])


def look(figure: Any) -> Answers:
    """Styles and texts of a figure, numbers in texts left out, and what :func:`drawn` finds; signs
    of principal directions are free."""
    limits = [[a.get_xlim(), a.get_ylim()] for a in figure.axes]
    found: dict[str, list[Any]] = {"limits": limits, "size": [figure.get_size_inches()]}
    for kind, values in drawn(figure):
        if np.size(values):
            found.setdefault(kind, []).append(np.nan_to_num(values))
    words = Counter(
        f"{type(a).__name__} {n}: {styled(a, n)}" for a in figure.findobj() for n in STYLE
    )
    sizes = {n: abs(np.concatenate([np.ravel(x) for x in each])) for n, each in found.items()}
    return {"words": sorted(f"{n} x {x}" for x, n in words.items()), **prefixed("drawn", sizes)}


def styled(artist: Any, name: str) -> str:
    """A property of an artist, if it has one; of many colours only that they are many."""
    value = getattr(artist, f"get_{name}", str)()
    if name.endswith("color") and not isinstance(value, str):
        colours = sorted({to_hex(colour) for colour in to_rgba_array(value)})
        value = colours if len(colours) < 9 else "many"
    return NUMBER.sub("#", str(value)) if name in ("text", "label") else str(value)


def read(page: str) -> Answers:
    """The texts of a page, numbers in texts left out, and its numbers by name."""
    words, found = set[str](), dict[str, list[float]]()

    def walk(name: str, value: Any) -> None:
        if isinstance(value, dict) and "packed" in value:
            found.setdefault("cells", []).extend(
                x for each in inside(value) for x in np.ravel(each)
            )
        elif isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else ((name, each) for each in value)
            for key, each in pairs:
                walk(key, each)
        elif isinstance(value, int | float):
            found.setdefault(name, []).append(value)
        elif name != "library":
            words.add(NUMBER.sub("#", WORST.sub("(scores; allowed", f"{name}: {value}")))

    walk("page", data_of(page))
    return {"words": sorted(words), **prefixed("page", found)}


def said(shown: tuple[Any, Any]) -> Answers:
    """Title, caption and null, their numbers apart, and how the view looks."""
    view = shown[1]
    found: Answers = {"height": getattr(view, "height", 0)}
    for name in ("title", "caption", "null"):
        text = WORST.sub("(scores; allowed", getattr(view, name).replace("−", "-"))
        found[name] = NUMBER.sub("#", text)
        if numbers := NUMBER.findall(text):
            found[f"numbers of {name}"] = [float(x.rstrip(".,")) for x in numbers]
    return found | (read(view.page) if hasattr(view, "page") else look(view.figure))


ALONE = {
    "bundle_3d": Shown(lambda w: w.all_states, render.bundle_3d),
    "plot": Shown(lambda w: w.sweep, render.plot),
    "variance_shares beside a control": Shown(
        lambda w: w.basis.anova(null=w.basis), lambda t: render.variance_shares(t, control=t)
    ),
    "spirals beside a control": Shown(lambda w: w.basis, lambda b: render.spirals(b, control=b)),
    "head_shares of gain": Shown(lambda w: w.sweep, lambda t: render.head_shares(t, share="gs")),
    "head_planes and offsets": Shown(
        lambda w: w.split, lambda s: render.head_planes(s.planes(), offset_profile(s))
    ),
    "split of terms": Shown(
        lambda w: w.split,
        lambda s: render.split(s, "L1H2", context=1, panels="terms", centered=True),
    ),
    "graph_page between prompts": Shown(between, render.graph_page),
    "attention_heads of values": Shown(
        lambda w: w.split.terms["pos", "cvec"][0], lambda x: render.attention_heads(x, LETTERS)
    ),
    "induction of a head": Shown(lambda w: w.graph, lambda g: render.induction(g, "L1H0")),
    "composition_figure of gain": Shown(
        lambda w: circuits.composition(w.model, w.prompts, draws=3, **QUIET),
        lambda t: render.composition_figure(t, share="gs", n=4),
    ),
}
"""Views that need plotly or are of options: recorded, and under no law of :data:`VIEWS`."""
WITHOUT = dict.fromkeys(
    ("again", "order", "loaded", "classes", "half", "empty"),
    "drawn in one world, from results that have these laws",
)
PLOTLY = {"disturbs:warning filters": "plotly adds filters of warnings when it is imported"}
SUBJECTS = tuple(
    Subject(
        name=f"view: {name}",
        covers=(f"render.{name.split()[0]}",),
        call=lambda w, shown=shown: shown(w),
        answers=said,
        only={"*": rotary} if "planes" in name else {},
        tolerance={"*": (2e-3, "pages hold numbers rounded to three digits")},
        without=WITHOUT | (PLOTLY if name == "bundle_3d" else {}),
    )
    for name, shown in (VIEWS | ALONE).items()
)
