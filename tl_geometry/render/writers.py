"""Who wrote what heads read, and how much of a behaviour does a circuit carry? Figures of the
strongest edges from writers to heads, and of the faithfulness of pruned runs over the size of the
circuit, which the gallery and notebooks draw; and a figure of one logit with the sources and scores
behind it, the image of :func:`tl_geometry.render.logit_page`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.errors import choice, require
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.circuits.pruned_runs import Faithfulness
from tl_geometry.circuits.writer_edges import HEAD_SIDES, Composition
from tl_geometry.render.figure import (
    BLUE,
    GREEN,
    GREY,
    NEGATIVE,
    PINK,
    POSITIVE,
    VERMILION,
    WIDTH,
    View,
    canvas,
    drawable,
    legend_beside,
    legend_outside,
    one_axes,
)
from tl_geometry.scores.terms import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIRS, LABELS = 12, 40
"""Most (head, source) pairs, and most names of tokens, in the image of a logit."""
TOKEN = 16
"""Most characters of a token beside an axis; longer ones leave no room for the bars."""
COLOURS = {"query": BLUE, "key": VERMILION, "value": GREEN}
"""One colour for each side on which a head reads a writer."""
CURVES = (BLUE, VERMILION, GREEN, PINK)
"""Colours of the curves of faithfulness, which also limit how many one figure compares."""
TERMS = 2
"""How many terms of a score stand beside its bar."""
SHARES = {"cs": "covariance share", "gs": "gain share"}
EXACT = "What was written adds up to the logit exactly: it has no null."


def composition_figure(composition: Composition, *, share: str = "cs", n: int = 30) -> View:
    """The ``n`` strongest edges from writers to heads, with layers from top to bottom. The width of
    a line is the size of its share; a line is dashed where the share is negative.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> edges = tlg.composition(model, windows, layers=1, progress=False)
    >>> composition_figure(edges).title
    'Who wrote what the heads read'
    """
    said = SHARES[choice(share, tuple(SHARES), "share")]
    edges = composition.edges(share=share, n=n)
    places = zip(composition.wrote, composition.writer_heads, strict=True)
    wrote = dict(zip(composition.parts, places, strict=True))
    # block and head of every writer and reader; -1 stands for none
    wrote |= {f"L{layer}H{head}": (layer, head) for layer, head in composition.heads}
    width = 1 + max(head for _, head in wrote.values())
    embeddings = [name for name, (layer, head) in wrote.items() if layer < 0 and name != "bias"]
    drawn = [wrote[name] for edge in edges for name in edge[:2]]
    blocks = sorted({layer for layer, _ in drawn})  # rows are the blocks that have an edge
    figure, axis = one_axes(None, (WIDTH, 0.45 * len(blocks) + 1.5))

    def place(name: str) -> tuple[float, float]:
        layer, head = wrote[name]
        row = float(blocks.index(layer))
        if layer < 0:
            return float(embeddings.index(name)), row
        # MLPs stand to the right of the heads and lower, because they read what the heads wrote
        return (float(width), row + 0.35) if head < 0 else (float(head), row)

    for writer, reader, side, value in reversed(edges):  # the strongest edges are drawn on top
        (x0, y0), (x1, y1) = place(writer), place(reader)
        # edges of one pair on several sides lie beside each other
        shift = 0.08 * (HEAD_SIDES.index(side) - 1)
        style = "-" if value > 0 else "--"
        line = {"linewidth": 0.3 + 5 * min(1.0, abs(value)), "linestyle": style}
        axis.plot([x0 + shift, x1 + shift], [y0, y1], color=COLOURS[side], alpha=0.7, **line)
    for name in dict.fromkeys(name for edge in edges for name in edge[:2]):
        x, y = place(name)
        box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": GREY}
        axis.text(x, y, drawable(name), ha="center", va="center", fontsize=7, bbox=box)
    for side, colour in COLOURS.items():  # entries of the legend
        axis.plot([], [], color=colour, label=f"read as {side}")
    legend_outside(figure, [axis], "upper center")
    axis.set_ylim(len(blocks) - 0.3, -0.6)
    axis.set_yticks(range(len(blocks)), ["embeddings" if b < 0 else str(b) for b in blocks])
    axis.set_xlim(-0.6, width + 0.6)
    axis.set_xticks([*range(width), width], [*map(str, range(width)), "MLP"])
    axis.set(ylabel="block (those with an edge)", xlabel="head (of the writer or reader)")
    random = {"cs": composition.random_cs, "gs": composition.random_gs}[share]
    layers = torch.tensor([[[layer]] for layer, _ in composition.heads])
    # constants (NaN), later writers (0) and the gain of values (NaN) have no edges
    are_edges = (torch.tensor(composition.wrote) < layers) & random.isfinite()
    null = float(random[are_edges].mean())
    return View(
        figure,
        title="Who wrote what the heads read",
        caption=f"Lines run down from writers to the heads that read them: the {len(edges)} "
        f"strongest edges by {said}. A wider line has a larger share, a dashed one a negative one.",
        null=f"Randomly turned writers have a {said} of {null:.3f} (root mean square, mean over "
        "edges).",
        source=composition.provenance.line(),
    )


def faithfulness_curve(
    results: Faithfulness | Mapping[str, Faithfulness], *, ax: Axes | None = None
) -> View:
    """Faithfulness f of pruned runs over the share of edges (or nodes) that are kept, with 95%
    intervals over prompts, beside that of random circuits of equal size.

    Args:
        results: from :func:`tl_geometry.faithfulness` for ranked edges or nodes; several by name,
            to compare rankings. The random circuits drawn are those of the first.
        ax: axes to draw into.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=4).tokens
    >>> pairs = {"prompts": windows[:2], "counterfactuals": windows[2:], "targets": (11, 12)}
    >>> scores = tlg.edge_scores(model, **pairs)
    >>> result = tlg.faithfulness(model, scores, **pairs, fractions=(0.05, 0.5, 1.0), draws=2)
    >>> faithfulness_curve(result).title
    'How much of the behaviour do the highest-ranked edges carry?'
    """
    named = {"highest scores": results} if isinstance(results, Faithfulness) else dict(results)
    expected = f"1 to {len(CURVES)} curves"
    require(0 < len(named) <= len(CURVES), "results", expected=expected, got=len(named))
    units = {result.unit for result in named.values()}
    expected = "curves of edges, or of nodes"
    # complements belong to a chosen set of edges
    chosen = any(result.complements is not None for result in named.values())
    require(not chosen, "results", expected=expected, got="a chosen set, which is one point")
    require(len(units) == 1, "results", expected=expected, got=", ".join(sorted(units)))
    unit = units.pop()
    figure, axis = one_axes(ax, (WIDTH * 0.8, 3.0))
    first = next(iter(named.values()))
    for color, (name, result) in zip(CURVES, named.items(), strict=False):
        at, f = 100 * result.fractions, result.f
        label = f"{name}: CPR {float(result.cpr.value):.2f}, CMD {float(result.cmd.value):.2f}"
        axis.plot(at, f.value, "o-", color=color, ms=3, lw=1, label=label)
        axis.fill_between(at, f.low, f.high, color=color, alpha=0.2, lw=0)
    null = first.random_f
    at = 100 * first.fractions
    axis.plot(at, null.mean(0), "s--", color=GREY, ms=3, lw=1, label=f"{len(null)} random circuits")
    axis.fill_between(at, null.amin(0), null.amax(0), color=GREY, alpha=0.3, lw=0)
    axis.axhline(1, color="k", lw=0.5)
    axis.set(xscale="log", xlabel=f"{unit} kept (%)", ylabel="faithfulness f (share of the metric)")
    if ax is None:
        legend_beside(axis)
    else:
        axis.legend(fontsize=7, frameon=False)
    return View(
        figure,
        title=f"How much of the behaviour do the highest-ranked {unit} carry?",
        caption="f is 1 where the pruned run has the metric of the whole model, and 0 where it has "
        "that of the counterfactual. Bands are 95% intervals over prompts (from 10 prompts on).",
        null=f"Grey: random circuits of the same sizes (those of {next(iter(named))}), their mean "
        "and range.",
        source=first.provenance.line(),
    )


def logit_figure(found: LogitExplanation) -> View:
    """One logit: what was written from each token of the text; the largest (head, source) pairs,
    with the terms of the score that made the head look there. It is the image of
    :func:`tl_geometry.render.logit_page`."""
    texts = [drawable(html.token_text(t), TOKEN) for t in texts_of(found)]
    pairs = found.pairs[:PAIRS]
    # inches: 0.19 for a bar, the rest for the strip of tokens and the labels
    height = 2.3 + 0.19 * len(pairs)
    heights = {"height_ratios": [1.2, 0.19 * len(pairs) + 0.2]}
    figure, (strip, bars) = canvas(1, 2, size=(8.4, height / 2), gridspec_kw=heights)
    by_token = found.heads.sum((0, 1))[: found.position + 1]
    strip.bar(range(len(by_token)), by_token.tolist(), color=_signs(by_token))
    largest = by_token.abs().argsort(descending=True, stable=True)[:LABELS]
    named = sorted(largest.tolist())  # a long text has the names of only its largest tokens
    strip.set_xticks(named, [texts[i] for i in named], fontsize=7, rotation=90)
    strip.axhline(0, color="0.6", linewidth=0.5)
    strip.set_ylabel("from each token\n(logits, all heads)", fontsize=7)
    written = torch.tensor([float(found.heads[pair]) for pair in pairs])
    bars.barh(range(len(pairs)), written.tolist(), color=_signs(written))
    # texts stand right of the bars: x in shares of the width, y in rows
    place = {"transform": bars.get_yaxis_transform(), "va": "center", "fontsize": 7}
    for row, value in enumerate(written.tolist()):
        bars.text(1.02, row, drawable(f"{_signed(value)}   {_why(found, row)}"), **place)
    labels = [f"L{layer}H{head} from {source} {texts[source]}" for layer, head, source in pairs]
    bars.set_yticks(range(len(labels)), labels, fontsize=7)
    bars.axvline(0, color="0.6", linewidth=0.5)
    bars.invert_yaxis()
    axis_label = "written towards the target (logits); the score with its largest terms"
    bars.set_xlabel(axis_label, fontsize=8)
    for axis in (strip, bars):
        axis.tick_params(length=0, labelsize=7)
    total, logit = html.signed(found.total), html.signed(found.logit)
    return View(
        figure,
        title=finding(found),
        caption=f"Above, what all heads wrote from each token; below, the largest pairs of a head "
        f"and its source. With MLPs, embeddings and constants it sums to {total}; the "
        f"logit at position {found.position} is {logit}. Scores are relative to the mean "
        "of their row, terms have the query part first.",
        null=EXACT,
        source=found.provenance.line(),
    )


def _signs(values: Tensor) -> list[str]:
    """Red for values that raise the logit, blue for those that lower it."""
    return [POSITIVE if value > 0 else NEGATIVE for value in values.tolist()]


def _why(found: LogitExplanation, pair: int) -> str:
    """The attention, the score and its largest terms of one pair, in words."""
    terms = ", ".join(
        f"{label(f'{query}-{key}', found.bias_label)} {_signed(value, 1)}"
        for query, key, value in found.terms(pair)[:TERMS]
    )
    paid, score = float(found.pair_patterns[pair]), float(found.pair_scores[pair])
    return f"attention {paid:.2f}, score {_signed(score, 1)}: {terms}"


def _signed(value: float, digits: int = 2) -> str:
    return html.signed(value, f"+.{digits}f")


def texts_of(found: LogitExplanation) -> list[str]:
    """Texts of the tokens, or their positions if the explanation has no texts."""
    return [str(t) for t in found.str_tokens or range(found.heads.shape[-1])]


def finding(found: LogitExplanation) -> str:
    """A sentence about the largest contribution of a head and its source, for the title."""
    target = " minus ".join(f"“{html.token_text(t)}”" for t in found.target_tokens)
    logit = f"the logit {html.signed(found.logit)} of {target}"
    if not found.pairs:
        return f"What wrote {logit}"
    layer, head, source = found.pairs[0]
    value = _signed(float(found.heads[layer, head, source]))
    text = html.token_text(texts_of(found)[source])
    return f"L{layer}H{head} wrote {value} of {logit}, from “{text}” at {source}"
