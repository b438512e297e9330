"""Attention heads as circuitsvis draws them, for notebooks that know these maps, but safe with any
token text; and the page of a logit opened where an induction head copies.

circuitsvis draws the maps; everything around them is made here, because its own pages run script
that token text holds, drop tokens that look like tags, ask the network on every display, and delete
what follows a figure (tried with 1.43.3). A figure is one page of its own, as all views are
(:mod:`tl_geometry.render.page`); the script of circuitsvis is read from the installed package (it
is not shipped here), stored deflated in the page and allowed to run by its hash. Colours run
symmetrically from blue (negative) to red (positive), the same for all heads of a figure.
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
from tl_geometry.scores.split import ScoreSplit

TITLE = "Attention heads"
CELLS = 50_000
"""Most cells over all heads: 12 heads of 64 tokens take a browser some 8 s."""
NAMED = 24
"""Tokens up to which the image of a single head names them."""


def attention_heads(
    attention: Float[Tensor, "head query key"] | ScoreSplit,
    tokens: Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> PageView:
    """Heat maps of several heads, one of them enlarged: hover to enlarge another, click to keep it
    (circuitsvis ``attention_heads``). Keys after the query are hidden where all of them are 0 or
    -inf.

    Args:
        attention: any values per head, query and key, such as a term ``split.terms["pos",
            "cvec"][0]``; or a split, whose first prompt's patterns are shown.
        tokens: their texts (a split knows them).
        names: names of the heads (a split knows them).

    The full colour is 1 for a pattern, else the largest absolute value; colours are shared by all
    heads. Raises ``GeometryError`` over 50,000 cells, for which circuitsvis takes many seconds, and
    for values that are not finite.

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
    expected = f"{len(values)} names, one per head"
    require(len(names) == len(values) > 0, "names", expected=expected, got=len(names))
    texts = [html.token_text(str(token)) for token in tokens or ()]
    _check_tokens(values, texts)

    later = torch.ones(values.shape[1:], dtype=torch.bool).triu(1)
    causal = bool(((values[:, later] == 0) | (values[:, later] == -torch.inf)).all())
    visible = checks.finite(values.tril() if causal else values, "attention")
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
        # below the large map, six small ones in a row
        height=720 + 98 * math.ceil(len(values) / 6),
        image=functools.partial(_image, visible, hidden, names, texts, top, caption),
        library=library(),
    )


def _check_tokens(values: Tensor, texts: Sequence[str]) -> None:
    """Refuse texts that are not those of the queries and keys, and more cells than a browser
    draws."""
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
    """The heads as images, for paper and where no script runs."""
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
    figure.colorbar(axes[-1].images[0], ax=axes, shrink=0.6)
    return View(figure, title=TITLE, caption=caption)


@functools.cache
def library() -> str:
    """The script of circuitsvis, from the installed package."""
    spec = importlib.util.find_spec("circuitsvis")
    folder = Path(spec.origin if spec and spec.origin else "circuitsvis").parent
    path = folder / "dist" / "cdn" / "iife.js"
    expected, instead = "an installed package with its script", "pip install circuitsvis"
    require(path.is_file(), "circuitsvis", expected=expected, got=str(path), instead=instead)
    return path.read_text(encoding="utf-8") + ";window.CircuitsVis = CircuitsVis"


def induction(
    explanations: LogitExplanation | Sequence[LogitExplanation],
) -> PageView:
    """:func:`tl_geometry.render.logit_page` opened where a head copies: at the position where it
    wrote most towards the target from the tokens that followed an earlier copy of the token there
    (dashed), which is what an induction head reads.

    Args:
        explanations: of :func:`tl_geometry.explain_logit`, best one for every position of a prompt.

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
