"""The table of views: each with the result that it draws, how it is drawn, and what it computes
from its result, computed here by another route. :mod:`tests.tables.test_views` has their laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import tl_geometry as tlg
from tests.lib.subjects.flow import skips
from tests.lib.worlds import QUIET, World
from tests.tables.answers import frame
from tl_geometry import circuits, interventions, render, sphere
from tl_geometry.flow import fit_noise_law

Numbers = Iterable[Any]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A view: the result, how it is drawn, what is drawn beside the numbers of the result (``more``
    of them), or why no number is looked for; and the numbers whose ``signs`` colour its bars."""

    result: Callable[[World], Any]
    draw: Callable[[Any], Any]
    more: Callable[[Any], Numbers] = lambda result: ()
    why: str = ""
    signs: Callable[[Any], Any] | None = None


# ---- what views compute from their results


def cosines(basis: Any) -> Numbers:
    """Of the positional and context vectors of state 1."""
    rows = torch.cat([basis.pos[1], basis.ctx[1]]).double()
    rows = rows / rows.norm(dim=-1, keepdim=True)
    yield rows @ rows.T


def principal(basis: Any) -> Numbers:
    """Coordinates of positional vectors along the first directions of their state, and opposite."""
    for pos in basis.pos:
        left, sizes, _ = np.linalg.svd(pos.double().numpy(), full_matrices=False)
        yield from (left[:, :3] * sizes[:3], -left[:, :3] * sizes[:3])


def with_errors(times: float) -> Callable[[Any], Numbers]:
    """The ends of error bars."""

    def ends(report: Any) -> Numbers:
        if "kl_se" in getattr(report, "names", ()):
            kl, error = (torch.tensor(report.column(name)) for name in ("kl", "kl_se"))
            yield from (kl - times * error, kl + times * error)
            return
        for name, error in report.errors.items():
            yield from (report.values[name] - times * error, report.values[name] + times * error)

    return ends


def laws(report: Any) -> Numbers:
    """The fitted laws of noise between all pairs of states."""
    states = torch.tensor(sorted({*report.column("start"), *report.column("end")})).double()
    for law in ("asymptotic", "increment"):
        fit = fit_noise_law(report, law=law)
        for start in states:
            later = states[states > start]
            yield fit.variance(start.expand_as(later), later).log()


def by_group(planes: Any) -> Numbers:
    """Shares of planes summed over the terms of a group, and logarithms of wavelengths."""
    sides = [term.split("-") for term in planes.terms]
    content = torch.tensor([pair.count("cvec") for pair in sides])
    beside_pos = torch.tensor(["pos" in pair for pair in sides])
    one = content == 1
    for group in (content == 2, one & beside_pos, one & ~beside_pos, content == 0):
        yield planes.cs[..., group].sum(-1)
    yield from (planes.wavelength.log10(), np.log10([16, planes.length]))


def groups_of(split: Any) -> Numbers:
    """Sums of the terms without content, of content alone, beside a constant, beside position."""
    of_pair = lambda pair: (pair.count("cvec"), pair.count("cvec") == 1 and "pos" in pair)
    for group in ((0, False), (2, False), (1, False), (1, True)):
        found = [split.terms[pair] for pair in split.terms if of_pair(pair) == group]
        yield from (torch.stack(found).sum(0), torch.stack(found).sum(0).abs())
    yield from (split.total(), split.total().abs(), split.pattern())


def shares_of_heads(readout: Any) -> Numbers:
    """Steps of a distribution over heads."""
    for n in range(1, len(frame(readout)) + 1):
        yield torch.arange(n + 1) / n


def percent(result: Any) -> Numbers:
    """Kept edges in per cent of all."""
    yield from (100 * result.kept.double() / total for total in range(1, 400))


# ---- the table


def positional(w: World) -> Any:
    return tlg.positional_report(w.basis, draws=2)


def flow(w: World) -> Any:
    return tlg.flow_report(w.all_states)


def planes(w: World) -> Any:
    return tlg.sweep_heads(w.model, w.fresh, w.basis, planes=True, **QUIET).planes()


def faithful(w: World) -> Any:
    return tlg.faithfulness(
        w.model, w.edges, w.ids, w.other, targets=w.targets, fractions=(0.1, 0.5), draws=2
    )


VIEWS = {
    "spirals": Shown(result=lambda w: w.basis, draw=render.spirals, more=principal),
    "gram": Shown(result=lambda w: w.basis, draw=lambda b: render.gram(b, 1), more=cosines),
    "variance_shares": Shown(result=lambda w: w.basis.anova(), draw=render.variance_shares),
    "fourier": Shown(result=positional, draw=render.fourier),
    "incoherence": Shown(
        result=lambda w: tlg.contextual_report(w.basis, draws=2),
        draw=render.incoherence,
        more=with_errors(1),
    ),
    "measure_curves": Shown(
        result=positional,
        draw=lambda r: render.measure_curves(r, ("rank", "smoothness")),
        more=with_errors(1),
    ),
    "learning_curve": Shown(result=positional, draw=lambda r: render.learning_curve(r, "rank")),
    "noise_figure": Shown(result=flow, draw=render.noise_figure, more=laws),
    "baseline_figure": Shown(result=flow, draw=render.baseline_figure),
    "residual_figure": Shown(result=flow, draw=render.residual_figure),
    "skip_figure": Shown(
        result=lambda w: skips(w, pairs=[(0, 1), (1, 2)]),
        draw=render.skip_figure,
    ),
    "truncation_figure": Shown(
        result=lambda w: tlg.truncation_kl(w.model, w.prompts, w.ensemble, K=(1, 4), **QUIET),
        draw=render.truncation_figure,
        more=with_errors(2),
    ),
    "head_shares": Shown(result=lambda w: w.sweep, draw=render.head_shares),
    "head_types": Shown(result=lambda w: w.sweep, draw=render.head_types),
    "head_planes": Shown(
        result=planes, draw=lambda p: render.head_planes(p, heads="L1H0"), more=by_group
    ),
    "band_atlas": Shown(
        result=planes, draw=render.band_atlas, why="a share is the strength of a colour"
    ),
    "coverage_curves": Shown(
        result=lambda w: tlg.token_readout(w.model, matrix="OV"),
        draw=render.coverage_curves,
        more=shares_of_heads,
    ),
    "sphere_paths": Shown(
        result=lambda w: sphere.token_paths(w.model, w.ids, w.basis), draw=render.sphere_paths
    ),
    "weight_blocks": Shown(
        result=lambda w: tlg.weight_geometry(w.model, w.basis, layers=[1], draws=4),
        draw=render.weight_blocks,
        why="a cell is a colour of its own",
    ),
    "effect_bars": Shown(
        result=lambda w: interventions.effects(
            w.model, w.prompts, interventions.each(w.model, w.heads, by="zero")
        ),
        draw=render.effect_bars,
    ),
    "composition_figure": Shown(
        result=lambda w: circuits.composition(w.model, w.prompts, draws=3, **QUIET),
        draw=render.composition_figure,
        why="a share is the width of a line between places of heads",
    ),
    "faithfulness_curve": Shown(result=faithful, draw=render.faithfulness_curve, more=percent),
    "token_attribution": Shown(
        result=lambda w: w.graph.tokens(),
        draw=render.token_attribution,
        why="a value is the colour behind its token",
        signs=lambda table: table.value,
    ),
    "split": Shown(result=lambda w: w.split, draw=render.split, more=groups_of),
    "heads": Shown(result=lambda w: w.sweep, draw=render.heads),
    "graph_page": Shown(result=lambda w: w.graph, draw=render.graph_page),
    "attention_heads": Shown(
        result=lambda w: w.split, draw=render.circuitsvis.attention_heads, more=groups_of
    ),
}
