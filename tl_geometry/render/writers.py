"""Views of who wrote what heads read: the strongest edges between writers and heads, and one logit
with the sources and scores behind it."""

from __future__ import annotations

from tl_geometry.base.errors import choice
from tl_geometry.render.figure import View, canvas, drawable
from tl_geometry.scores.composing import SIDES, Composition
from tl_geometry.scores.logits import LogitExplanation

POSITIVE, NEGATIVE = "#b2182b", "#2166ac"
"""Red is positive and blue negative, as everywhere."""
COLOURS = {"query": "#0072b2", "key": "#d55e00", "value": "#009e73"}
"""One colour for each side that a writer is read on."""
SHARES = {"cs": "covariance share", "gs": "gain share"}


def composition_figure(found: Composition, *, share: str = "cs", n: int = 30) -> View:
    """The ``n`` strongest edges from writers to heads, layers down, width by absolute share; dashed
    where the share is negative.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> found = tlg.composition(model, windows, layers=1, progress=False)
    >>> composition_figure(found).title
    'Who wrote what the heads read'
    """
    said = SHARES[choice(share, tuple(SHARES), "share")]
    edges = found.edges(share=share, n=n)
    wrote = dict(zip(found.parts, zip(found.wrote, found.writer_heads, strict=True), strict=True))
    wrote |= {f"L{layer}H{head}": (layer, head) for layer, head in found.heads}
    width = 1 + max(head for _, head in wrote.values())
    beside = [name for name, (layer, head) in wrote.items() if layer < 0 and name != "bias"]
    figure, (axis,) = canvas(size=(max(4.5, 0.6 * width + 2), 5.0))

    def place(name: str) -> tuple[float, float]:
        layer, head = wrote[name]
        if layer < 0:
            return float(beside.index(name)), -1.0
        return (float(width), layer + 0.5) if head < 0 else (float(head), float(layer))

    for writer, reader, side, value in reversed(edges):
        (x0, y0), (x1, y1) = place(writer), place(reader)
        shift = 0.08 * (SIDES.index(side) - 1)
        style = "-" if value > 0 else "--"
        line = {"linewidth": 0.3 + 5 * min(1.0, abs(value)), "linestyle": style}
        axis.plot([x0 + shift, x1 + shift], [y0, y1], color=COLOURS[side], alpha=0.7, **line)
    for name in dict.fromkeys(name for edge in edges for name in edge[:2]):
        x, y = place(name)
        box = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "#999999"}
        axis.text(x, y, drawable(name), ha="center", va="center", fontsize=7, bbox=box)
    for side, colour in COLOURS.items():
        axis.plot([], [], color=colour, label=side)
    axis.legend(loc="lower right", frameon=False, title="read on the side")
    axis.invert_yaxis()
    axis.set_ylabel("block (embeddings at -1)")
    axis.set_xlabel("head (MLPs to the right)")
    null = float(found.random_cs[..., 1:].nan_to_num().mean())
    caption = (
        f"The {len(edges)} strongest edges by {said}, width by its size, dashed where negative; "
        f"randomly turned writers have a mean covariance share of {null:.3f}; "
        f"{found.provenance.line()}"
    )
    return View(figure, title="Who wrote what the heads read", caption=caption)


def logit_figure(found: LogitExplanation, *, terms: int = 2) -> View:
    """One logit: the text with its sources marked by what was written from them, and the largest
    (head, source) pairs with the terms of the score that made the head look there.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=1)
    >>> logit_figure(tlg.explain_logit(model, windows, 14, 5)).title[:12]
    'What wrote t'
    """
    texts = found.str_tokens or tuple(str(i) for i in range(found.heads.shape[-1]))
    figure, axes = canvas(1, 2, size=(7.5, 2.6), gridspec_kw={"height_ratios": [1, 3]})
    strip, bars = axes
    seen = found.heads.sum((0, 1))[: found.position + 1]
    strip.bar(range(len(seen)), seen, color=[POSITIVE if v > 0 else NEGATIVE for v in seen])
    strip.set_xticks(range(len(seen)), [drawable(t) for t in texts[: len(seen)]], fontsize=6)
    strip.tick_params(axis="x", rotation=90)
    strip.axhline(0, color="#999999", linewidth=0.5)
    strip.set_ylabel("all heads (logits)")
    labels: list[str] = []
    for row, (layer, head, source) in enumerate(found.pairs):
        value = float(found.heads[layer, head, source])
        bars.barh(row, value, color=POSITIVE if value > 0 else NEGATIVE)
        labels.append(f"L{layer}H{head} from {source} {drawable(texts[source])!r}")
        why = ", ".join(f"{a}-{b} {x:+.1f}" for a, b, x in found.terms(row)[:terms])
        paid, score = float(found.pair_patterns[row]), float(found.pair_scores[row])
        said = f" attention {paid:.2f}, score {score:+.1f}: {why}"
        bars.text(max(value, 0.0), row, drawable(said), va="center", fontsize=6)
    bars.set_yticks(range(len(labels)), labels, fontsize=6)
    bars.invert_yaxis()
    bars.set_xlabel("written towards the target (logits)")
    target = " minus ".join(repr(drawable(t)) for t in found.target_tokens)
    caption = (
        f"Logit {found.logit:.2f} at position {found.position}; bars sum with MLPs, embeddings and "
        f"constants to {found.total:.2f}. Scores are relative to the mean of their row, with their "
        f"largest terms (query part first); {found.provenance.line()}"
    )
    return View(figure, title=f"What wrote the logit of {target}", caption=caption)
