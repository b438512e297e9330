"""Two views of attention heads, for notebooks and the gallery: heat maps as circuitsvis draws them,
safe with any token text (:func:`attention_heads`), and the page of a logit opened where an
induction head copies (:func:`induction`).

circuitsvis draws the maps alone. Its own pages run scripts that token text holds, drop tokens that
look like tags, use the network on every display, and delete what follows a figure (tried with
1.43.3). So a figure here is one self-contained page, as all views are
(:mod:`tl_geometry.render.page`). The script of circuitsvis is not shipped with this library: it is
read from the installed package, stored deflated in the page, and allowed to run by its hash. One
symmetric scale serves all heads of a figure, from blue (negative) to red (positive).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.checks import describe, head_name
from tl_geometry.base.errors import require
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.render.figure import (
    NEGATIVE,
    POSITIVE,
    View,
    draw_matrix,
    drawable,
    panels,
)
from tl_geometry.render.logit_view import checked_explanations, followers, logit_page
from tl_geometry.render.page import PageView, rounded
from tl_geometry.scores.score_split import ScoreSplit

TITLE = "Attention heads"
CELLS = 50_000
"""Most cells of all heads together: 12 heads of 64 tokens take a browser some 8 s."""
NAMED = 24
"""Most tokens that the image of a single head names on its axes."""


def attention_heads(
    attention: Float[Tensor, "head query key"] | ScoreSplit,
    tokens: Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> PageView:
    """Heat maps of several heads, one of them enlarged: hover to enlarge another, click to keep it
    (circuitsvis ``attention_heads``). Keys after the query are hidden if all of their values are 0
    or -inf.

    Args:
        attention: any values per head, query and key, such as a term ``split.terms["pos",
            "cvec"][0]``; or a split, whose first prompt's patterns are shown.
        tokens: texts of the tokens; a split brings its own.
        names: names of the heads; a split brings its own.

    Full colour stands for 1 in a pattern, and for the largest absolute value of all heads
    otherwise. Raises ``GeometryError`` over 50,000 cells, for which circuitsvis takes many seconds,
    and for values that are not finite.

    >>> pattern = torch.eye(3).expand(2, 3, 3)
    >>> attention_heads(pattern, ["a", "<b>", " c"], names=["L0H0", "L0H1"]).title
    'Attention heads'
    """
    if isinstance(attention, ScoreSplit):
        what, values = "pattern", attention.pattern()[0].double()
        names = names or [head_name(h) for h in attention.heads]
        tokens = tokens or attention.str_tokens
    else:
        got, instead = describe(attention), "attention[batch]"
        three_axes = attention.dim() == 3
        require(three_axes, "attention", expected="[head query key]", got=got, instead=instead)
        what, values = "values", attention.detach().cpu().double()
        names = names or [f"Head {i}" for i in range(len(values))]
    require(len(values) > 0, "attention", expected="at least one head", got="none")
    expected = f"{len(values)} names, one per head"
    require(len(names) == len(values), "names", expected=expected, got=len(names))
    texts = [html.token_text(str(token)) for token in tokens or ()]
    _check_tokens(values, texts)

    later = torch.ones(values.shape[1:], dtype=torch.bool).triu(1)
    causal = bool(((values[:, later] == 0) | (values[:, later] == -torch.inf)).all())
    visible = checks.finite(values.tril() if causal else values, "attention")
    # a pattern has the same colours on every page: 1 is all of the attention that a query pays
    top = 1.0 if what == "pattern" else float(visible.abs().max()) or 1.0
    caption = (
        f"{what[0].upper()}{what[1:]} by query (row) and key (column), {len(texts)} tokens; full "
        f"colour at {top:.3g}, one scale for all heads."
    )
    props = {
        "attention": [[[rounded(v, 4) for v in row] for row in head] for head in visible.tolist()],
        "attentionHeadNames": list(names),
        "tokens": texts,
        "minValue": -top,
        "maxValue": top,
        "positiveColor": POSITIVE,
        "negativeColor": NEGATIVE,
        "maskUpperTri": causal,
    }
    hidden = later if causal else torch.zeros_like(later)
    return PageView(
        "circuitsvis",
        {"props": props, "limit": top, "signed": bool((visible < 0).any())},
        title=TITLE,
        caption=caption,
        width=800,
        # the large map with title and caption, then rows of six small maps
        height=720 + 98 * math.ceil(len(values) / 6),
        image=functools.partial(_image, visible, hidden, names, texts, top, caption),
        library=library(),
    )


def _check_tokens(values: Tensor, texts: Sequence[str]) -> None:
    """Refuse texts that do not match the queries and keys, and more cells than a browser draws in
    reasonable time."""
    instead = "tokens=model.to_str_tokens(...)"
    expected = f"texts of the tokens, for {tuple(values.shape[1:])} queries and keys"
    matches, got = values.shape[1:] == (len(texts), len(texts)), f"{len(texts)} tokens"
    require(matches, "tokens", expected=expected, got=got, instead=instead)
    what = f"cells of {len(values)} heads x {len(texts)} x {len(texts)} tokens"
    size, instead = values.numel(), "fewer heads= or tokens, or render.split"
    require(size <= CELLS, what, expected=f"at most {CELLS}", got=size, instead=instead)


def _image(
    values: Float[Tensor, "head query key"],
    hidden: Bool[Tensor, "query key"],
    names: Sequence[str],
    texts: Sequence[str],
    top: float,
    caption: str,
) -> View:
    """The heads as a static figure, for paper and for places where no script runs."""
    single = len(values) == 1
    side = 4.4 if single else 2.3
    columns = min(4, len(values))
    figure, axes = panels(None, len(values), "head", columns=columns, size=(side, side))
    named = [drawable(text) for text in texts] if single and len(texts) <= NAMED else []
    for axis, head, name in zip(axes, values, names, strict=True):
        draw_matrix(axis, head.masked_fill(hidden, torch.nan), -top, top)
        axis.set_facecolor("#ddd")
        axis.set_title(drawable(name), fontsize=8)
        axis.set_xticks(range(len(named)), named, rotation=90, fontsize=6)
        axis.set_yticks(range(len(named)), named, fontsize=6)
    bar = figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.6)
    # as on the page: without negative values, white is the lower end
    bar.ax.set_ylim(-top if bool((values < 0).any()) else 0.0, top)
    return View(figure, title=TITLE, caption=caption)


@functools.cache
def library() -> str:
    """The script of circuitsvis, from the installed package. The statement added to it makes its
    object a property of ``window``, where ``assets/circuitsvis.js`` finds it."""
    spec = importlib.util.find_spec("circuitsvis")
    folder = Path(spec.origin if spec and spec.origin else "circuitsvis").parent
    path = folder / "dist" / "cdn" / "iife.js"
    expected, instead = "an installed package with its script", "pip install circuitsvis"
    require(path.is_file(), "circuitsvis", expected=expected, got=str(path), instead=instead)
    return path.read_text(encoding="utf-8") + ";window.CircuitsVis = CircuitsVis"


def induction(
    explanations: LogitExplanation | Sequence[LogitExplanation],
) -> PageView:
    """:func:`tl_geometry.render.logit_page`, opened at the position where a head copies most.

    An induction head reads the tokens that followed earlier copies of the current token (dashed on
    the page). The page opens where one head wrote most towards the target from these tokens.

    Args:
        explanations: from :func:`tl_geometry.explain_logit`, best one for every position of a
            prompt.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> ids = model.to_tokens("width, height = width, height", prepend_bos=True)
    >>> places = range(6, ids.shape[1] - 1)
    >>> each = [tlg.explain_logit(model, ids, i, int(ids[0, i + 1]), top=4) for i in places]
    >>> induction(each).title[:4]
    'L1H3'
    """
    copied = [
        (float(e.heads[head][followers(e)].sum()), e.position)
        for e in checked_explanations(explanations)
        for head in dict.fromkeys(pair[:2] for pair in e.pairs)
    ]
    return logit_page(explanations, query=max(copied)[1] if copied else None)
