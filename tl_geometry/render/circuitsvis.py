"""Heat maps of attention heads, and a text in the colours of what an induction head wrote from each
token, as circuitsvis draws them, safe with any token text. Notebooks and the gallery show them.

circuitsvis draws the maps alone. Its own pages run scripts that token text holds, drop tokens that
look like tags, use the network on every display, and delete what follows a figure (tried with
1.43.3). So a figure here is one self-contained page, as all views are
(:mod:`tl_geometry.render.page`). The script of circuitsvis is not shipped with this library: it is
read from the installed package, stored deflated in the page, and allowed to run by its hash.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.checks import Head, describe, head_name
from tl_geometry.base.errors import require
from tl_geometry.circuits.logit_graph import LogitGraph
from tl_geometry.render import figure as draw
from tl_geometry.render.page import Page
from tl_geometry.scores.score_split import ScoreSplit

CELLS = 50_000
"""Most cells of all heads together: 12 heads of 64 tokens take a browser some 8 s."""


def attention_heads(
    attention: Float[Tensor, "head query key"] | ScoreSplit,
    tokens: Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> Page:
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
    'Values of L0H0, L0H1'
    """
    if isinstance(attention, ScoreSplit):
        what, values = "Attention", attention.pattern()[0].double().cpu()
        names = names or [head_name(h) for h in attention.heads]
        tokens = tokens or attention.str_tokens
    else:
        got, instead = describe(attention), "attention[batch]"
        three_axes = isinstance(attention, Tensor) and attention.dim() == 3
        require(three_axes, "attention", expected="[head query key]", got=got, instead=instead)
        what, values = "Values", attention.detach().cpu().double()
        names = names or [f"Head {i}" for i in range(len(values))]
    texts = [html.token_text(str(token)) for token in tokens or ()]
    shape, expected = tuple(values.shape), "a head for each name, a query and a key for each token"
    known, got = (len(names), len(texts), len(texts)), f"{len(names)} names, {len(texts)} tokens"
    instead = f"values {shape}: names=, tokens=model.to_str_tokens(...)"
    fits = len(names) > 0 and shape == known
    require(fits, "tokens", expected=expected, got=got, instead=instead)
    size, instead = values.numel(), "fewer heads= or tokens, or render.split"
    require(size <= CELLS, "cells", expected=f"at most {CELLS}", got=size, instead=instead)
    later = torch.ones(values.shape[1:], dtype=torch.bool).triu(1)
    causal = bool(((values[:, later] == 0) | (values[:, later] == -torch.inf)).all())
    visible = checks.finite(values.tril() if causal else values, "attention")
    # a pattern has the same colours on every page: 1 is all of the attention that a query pays
    top = 1.0 if what == "Attention" else float(visible.abs().max()) or 1.0
    signed = bool((visible < 0).any())
    props = {"attention": visible.tolist(), "tokens": texts, "maskUpperTri": causal}
    some = ", ".join(names[:4]) + (" ..." if len(names) > 4 else "")
    return Page(
        title=f"Where do {some} attend?" if what == "Attention" else f"Values of {some}",
        caption=f"{what} by query (row) and key (column); full colour is {top:.3g} for all heads.",
        parts=[_part("AttentionHeads", top, signed, attentionHeadNames=[*names], **props)],
        begin={},
        height=760 + 100 * (len(values) // 6),
        source=draw.source_of(attention),
        null="The values are as given: they have no null.",
        library=library(),
    )


def induction(graph: LogitGraph, head: Head | None = None) -> Page:
    """The attribution of an induction head inline: the text of the prompt, each token in the colour
    of what one head wrote from it towards the logit (circuitsvis ``colored_tokens``). An induction
    head writes from the tokens that followed earlier copies of the current one.

    Args:
        graph: from :func:`tl_geometry.trace_logit`.
        head: which head, by default the one that wrote most.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> prompt = "width, height = width, he"
    >>> induction(tlg.trace_logit(model, prompt, "ight", prepend_bos=True)).title[:10]
    'L1H3 wrote'
    """
    draw.require_result(graph, LogitGraph, "graph", "trace_logit(model, prompt, answer)")
    direct: Any = graph.direct().df
    direct = direct[direct["head"] >= 0].sort_values("position")
    heads = direct.groupby(["layer", "head"])["value"].sum()
    known = [(int(layer), int(number)) for layer, number in heads.index]
    pair = known[int(heads.argmax())] if head is None else checks.heads(head, 10**6, 10**6)[0]
    require(pair in known, "head", expected="a head of the graph", got=head_name(pair))
    mine = direct[(direct["layer"] == pair[0]) & (direct["head"] == pair[1])]
    values, texts = mine["value"].tolist(), mine["token"].astype(str).tolist()
    top, best = max(map(abs, values)) or 1.0, mine.loc[mine["value"].abs().idxmax()]
    # ColoredTokens puts texts into the page as markup (1.43.3): a token that looks like a tag would
    # be one
    written = [html.escape(html.token_text(text)) for text in texts]
    name, token = head_name(pair), html.token_text(str(best["token"]))
    return Page(
        title=f"{name} wrote {html.signed(best['value'], '+.2f')} of T from “{token}” at "
        f"{int(best['position'])}",
        caption=f"Each token has the colour of what {name} wrote from it towards T, the target: "
        f"{html.signed(sum(values), '+.3g')} in all. Hover for the number.",
        parts=[_part("ColoredTokens", top, True, tokens=written, values=values)],
        begin={},
        height=300,
        source=graph.provenance.line(),
        null="What was written adds up exactly: it has no null.",
        library=library(),
    )


def _part(component: str, limit: float, signed: bool, **props: Any) -> dict[str, Any]:
    """A component of circuitsvis, on one symmetric scale from blue to red."""
    colours = {"positiveColor": draw.POSITIVE, "negativeColor": draw.NEGATIVE}
    drawn = {**props, "minValue": -limit, "maxValue": limit, **colours}
    part = {"kind": "circuitsvis", "component": component, "props": drawn}
    return {**part, "limit": limit, "signed": signed}


@functools.cache
def library() -> str:
    """The script of circuitsvis, from the installed package. The statement added to it makes its
    object a property of ``window``, where ``assets/library.js`` finds it."""
    spec = importlib.util.find_spec("circuitsvis")
    folder = Path(spec.origin if spec and spec.origin else "circuitsvis").parent
    path = folder / "dist" / "cdn" / "iife.js"
    expected, instead = "an installed package with its script", "pip install circuitsvis"
    require(path.is_file(), "circuitsvis", expected=expected, got=str(path), instead=instead)
    return path.read_text(encoding="utf-8") + ";window.CircuitsVis = CircuitsVis"
