"""The familiar circuitsvis views, hardened: attention heads, one pattern, coloured tokens; and what
an induction head reads and writes, which is drawn without circuitsvis.

circuitsvis draws; everything around it is made here, because its own pages run script that token
text holds, drop tokens that look like tags, ask the network on every display, and delete what
follows a figure (tried with 1.43.3). A figure is one page of its own:

1. Token texts and values are JSON, compressed and base64-coded, so that no token is ever markup in
   the page's source; circuitsvis receives token texts as HTML-escaped text.
2. Its script is read from the installed package (it is not shipped here), compressed into the page
   and decoded by the browser.
3. A content policy allows that script only, by a nonce, and no request; in a notebook the page
   lives in a sandboxed frame.
4. Colours run symmetrically from ``-limit`` (blue) to ``limit`` (red), the same for all heads and
   terms of a figure; the caption says what lies beyond.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.checks import Head, describe, head_name
from tl_geometry.base.errors import require
from tl_geometry.base.rows import row_center
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.render import circuitsvis_images
from tl_geometry.render.cells import compressed
from tl_geometry.render.figure import NEGATIVE, POSITIVE, check_limit
from tl_geometry.render.logit_view import explanations, followers, logit_page
from tl_geometry.render.page import PageView
from tl_geometry.scores.split import ScoreSplit

CELLS, TOKENS = 50_000, 2_000
"""Most cells over all heads of a heat map (12 heads of 64 tokens take a browser some 8 s), and
coloured tokens."""
WIDTH = 800
"""Pixels of a figure across."""


def attention_heads(
    attention: Float[Tensor, "head query key"] | ScoreSplit,
    tokens: Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
    term: str | tuple[str, str] = "pattern",
    context: int = 0,
    limit: float | None = None,
    title: str = "Attention heads",
) -> PageView:
    """Heat maps of several heads, one of them enlarged: hover to see another, click to hold it
    (circuitsvis ``attention_heads``).

    Args:
        attention: any values per head, query and key, or a split, whose heads are all shown.
        tokens: their texts (a split knows those of its first prompt).
        names: what the heads are called; a split knows it.
        term: of a split: ``"pattern"``, ``"total"``, or a term as ``"pos-cvec"``; scores are
            row-centred, as softmax sees them.
        context: of a split: which prompt.
        limit: value of the full colour, by default 1 for a pattern, else the largest absolute
            value; colours are shared by all heads.

    Raises ``GeometryError`` over 50,000 cells, for which circuitsvis takes many seconds, and for
    values that are not finite.

    >>> pattern = torch.eye(3).expand(2, 3, 3)
    >>> attention_heads(pattern, ["a", "<b>", " c"], names=["L0H0", "L0H1"]).title
    'Attention heads'
    """
    values, texts, labels, what = _values(attention, tokens, names, term, context)
    rows = math.ceil(len(values) / 6)
    return _heat(
        "AttentionHeads", values, texts, labels, limit, title, what, height=220 + 98 * rows + 500
    )


def attention_patterns(
    tokens: Sequence[str],
    attention: Float[Tensor, "head query key"],
    *,
    names: Sequence[str] | None = None,
    limit: float | None = None,
    title: str = "Attention patterns",
) -> PageView:
    """:func:`attention_heads` under the name and with the order of arguments that notebooks use,
    ``circuitsvis.attention.attention_patterns(tokens=str_tokens, attention=pattern)``.

    >>> attention_patterns(tokens=["a", "<b>"], attention=torch.eye(2).expand(2, 2, 2)).title
    'Attention patterns'
    """
    return attention_heads(attention, tokens, names=names, limit=limit, title=title)


def attention_pattern(
    attention: Float[Tensor, "query key"] | ScoreSplit,
    tokens: Sequence[str] | None = None,
    *,
    head: Head | None = None,
    term: str | tuple[str, str] = "pattern",
    context: int = 0,
    limit: float | None = None,
    title: str = "Attention pattern",
) -> PageView:
    """Heat map of one head (circuitsvis ``attention_pattern``); of a split, ``head`` says which.
    Arguments as :func:`attention_heads`.

    >>> attention_pattern(torch.eye(3), ["a", "<b>", " c"]).title
    'Attention pattern'
    """
    source = attention if isinstance(attention, ScoreSplit) else attention[None]
    values, texts, labels, what = _values(source, tokens, None, term, context)
    row = _row(attention, head) if isinstance(attention, ScoreSplit) else 0
    name = f"{title} of {labels[row]}" if isinstance(attention, ScoreSplit) else title
    return _heat(
        "AttentionPattern",
        values[row : row + 1],
        texts,
        labels[row : row + 1],
        limit,
        name,
        what,
        height=690,
    )


def colored_tokens(
    tokens: Sequence[str],
    values: Float[Tensor, " position"] | Sequence[float],
    *,
    limit: float | None = None,
    title: str = "Coloured tokens",
) -> PageView:
    """Text with a value behind each token (circuitsvis ``colored_tokens``), symmetric about 0;
    hover to read it.

    Args:
        tokens: texts, at most 2,000.
        values: a number for each.
        limit: value of the full colour, by default the largest absolute value.

    >>> colored_tokens(["a", "<b>"], [0.5, -1.0]).title
    'Coloured tokens'
    """
    given = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    texts = [_running(str(t)) for t in tokens]
    require(
        given.shape == (len(texts),),
        "values",
        expected=f"one for each of {len(texts)} tokens",
        got=describe(given),
    )
    _within(len(texts), TOKENS, "tokens", "values of a part of the text")
    top = _limit(checks.finite(given, "values"), limit)
    props = {
        "values": _short(given),
        "minValue": -top,
        "maxValue": top,
        "positiveColor": POSITIVE,
        "negativeColor": NEGATIVE,
        "paddingBottom": 0,
    }
    best = ", ".join(
        f"{html.token_text(str(tokens[i]))} {float(given[i]):.3g}"
        for i in given.abs().argsort(descending=True)[:5].tolist()
    )
    caption = f"{len(texts)} tokens, largest: {best}{_beyond(given, top)}."
    page = _page(
        title,
        caption,
        {"view": "ColoredTokens", "tokens": texts, "props": props, **_scale(given, top)},
    )
    return PageView(page, title=title, caption=caption, width=WIDTH, height=140 + _lines(texts))


def induction(
    found: LogitExplanation | Sequence[LogitExplanation],
    *,
    head: Head | None = None,
    query: int | None = None,
) -> PageView:
    """:func:`tl_geometry.render.logit_page` opened where a head copies: at the position where it
    wrote most towards the target from the tokens that followed an earlier copy of the token there
    (dashed), which is what an induction head reads.

    Args:
        found: of :func:`tl_geometry.explain_logit`, best one for every position of a prompt.
        head: the head that is meant and shown alone, by default the one that copies most, among the
            others.
        query: the position, by default where it does.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> ids = model.to_tokens("width, height = width, height", prepend_bos=True)
    >>> places = range(6, ids.shape[1] - 1)
    >>> each = [tlg.explain_logit(model, ids, i, int(ids[0, i + 1]), top=4) for i in places]
    >>> induction(each).title[:4]
    'L1H3'
    """
    each = [e for e in explanations(found) if query in (None, e.position)]
    wanted = None if head is None else checks.heads(head, 10**6, 10**6)[0]
    copied = [
        (float(e.heads[h][followers(e)].sum()), e.position, h)
        for e in each
        for h in dict.fromkeys(pair[:2] for pair in e.pairs)
        if wanted in (None, h)
    ]
    if copied:
        query = max(copied)[1]
    return logit_page(found, query=query, head=head)


def _row(split: ScoreSplit, head: Head | None) -> int:
    """Row of a head in a split."""
    if head is None:
        require(
            len(split.heads) == 1,
            "head",
            expected="one of the split's heads",
            got="none",
            instead=f"head={split.heads[0]}",
        )
        return 0
    return checks.head_rows(head, split.heads, "split_scores(..., heads=...)")[0]


def _texts(source: ScoreSplit | None, tokens: Sequence[str] | None, context: int) -> list[str]:
    if tokens is None:
        known = source is not None and context == 0 and len(source.str_tokens) > 0
        require(
            known,
            "tokens",
            expected="texts of the tokens",
            got="none",
            instead="tokens=model.to_str_tokens(...)",
        )
        tokens = source.str_tokens if source is not None else ()
    return [str(t) for t in tokens]


def _of_split(
    split: ScoreSplit, term: str | tuple[str, str], context: int
) -> Float[Tensor, "head query key"]:
    """Pattern, total or a term of one context; scores row-centred over the allowed keys."""
    name = "-".join(term) if isinstance(term, tuple) else term
    checks.index(context, split.q.shape[1], "context")
    checks.choice(name, ["pattern", "total", *("-".join(t) for t in split.terms)], "term")
    if name == "pattern":
        return split.pattern()[context].double()
    found = split.total() if name == "total" else split.terms[tuple(name.split("-"))]  # pyright: ignore[reportArgumentType]
    return row_center(found[context].double(), split.allowed)


def _values(
    attention: Tensor | ScoreSplit,
    tokens: Sequence[str] | None,
    names: Sequence[str] | None,
    term: str | tuple[str, str],
    context: int,
) -> tuple[Float[Tensor, "head query key"], list[str], list[str], str]:
    """Values of each head, texts of the tokens, names of the heads, and what the values are."""
    if isinstance(attention, ScoreSplit):
        values = _of_split(attention, term, context)
        what = "-".join(term) if isinstance(term, tuple) else term
        labels = [head_name(h) for h in attention.heads]
        texts = _texts(attention, tokens, context)
    else:
        require(
            attention.dim() == 3,
            "attention",
            expected="[head query key]",
            got=describe(attention),
            instead="attention[batch]",
        )
        values, what = attention.detach().cpu().double(), "values"
        labels, texts = [f"Head {i}" for i in range(len(values))], _texts(None, tokens, context)
    labels = labels if names is None else list(names)
    require(
        len(labels) == len(values) > 0,
        "names",
        expected=f"{len(values)} names, one per head",
        got=len(labels),
    )
    square = values.shape[1:] == (len(texts), len(texts))
    require(
        square,
        "tokens",
        expected=f"texts for {tuple(values.shape[1:])} queries and keys",
        got=f"{len(texts)} tokens",
    )
    return values, texts, labels, what


def _heat(
    view: str,
    values: Tensor,
    tokens: Sequence[str],
    names: Sequence[str],
    limit: float | None,
    title: str,
    what: str,
    *,
    height: int,
) -> PageView:
    """A heat map view. Keys after the query are hidden where all of them are 0 or -inf."""
    _within(
        values.numel(),
        CELLS,
        f"cells of {len(values)} heads x {len(tokens)} x {len(tokens)} tokens",
        "fewer heads= or tokens, or render.split",
    )
    later = values[:, torch.ones(values.shape[1:], dtype=torch.bool).triu(1)]
    causal = bool(((later == 0) | (later == -torch.inf)).all())
    shown = values.tril() if causal else values
    top = _limit(
        checks.finite(shown, "attention"), limit if limit is not None or what != "pattern" else 1.0
    )
    texts = [html.token_text(t) for t in tokens]
    many = {"attentionHeadNames": list(names)} if view == "AttentionHeads" else {}
    matrix = [[_short(row) for row in head] for head in shown]
    props = {
        "attention": matrix if many else matrix[0],
        "tokens": texts,
        "minValue": -top,
        "maxValue": top,
        "positiveColor": POSITIVE,
        "negativeColor": NEGATIVE,
        "maskUpperTri": causal,
        **many,
    }
    scale = "one scale for all heads" if many else "symmetric scale"
    caption = (
        f"{what} by query (row) and key (column), {len(tokens)} tokens; full colour at {top:.3g}, "
        f"{scale}{_beyond(shown, top)}"
    )
    caption = f"{caption[0].upper()}{caption[1:]}."
    page = _page(title, caption, {"view": view, "props": props, **_scale(shown, top)}, width=560)
    image = functools.partial(
        circuitsvis_images.maps, shown, names, texts, top, causal, title, caption
    )
    return PageView(page, title=title, caption=caption, width=WIDTH, height=height, image=image)


def _within(size: int, most: int, what: str, instead: str) -> None:
    require(size <= most, what, expected=f"at most {most}", got=size, instead=instead)


def _limit(values: Tensor, limit: float | None) -> float:
    """Value of the full colour."""
    check_limit(limit)
    if limit is not None:
        return float(limit)
    return (float(values.abs().max()) if values.numel() else 1.0) or 1.0


def _scale(values: Tensor, top: float) -> dict[str, Any]:
    """Ends of the colour bar."""
    return {"limit": top, "signed": bool((values < 0).any())}


def _beyond(values: Tensor, top: float) -> str:
    n = int((values.abs() > top * (1 + 1e-9)).sum())
    return f", {n} values beyond it" if n else ""


def _short(values: Tensor) -> list[float]:
    """Values as numbers of four significant digits."""
    return [float(f"{v:.4g}") for v in values.tolist()]


def _running(token: str) -> str:
    """A token in running text: spaces stay spaces."""
    return "".join(c if c == " " else html.token_text(c) for c in token) or "∅"


def _lines(texts: Sequence[str]) -> int:
    """Height in pixels of wrapped tokens, at most 260 (the frame scrolls)."""
    width, lines = 0, 1
    for text in texts:
        width += 7 * len(text) + 3
        if width > WIDTH - 60 or "⏎" in text:
            width, lines = 0, lines + 1
    return min(27 * lines, 260)


@functools.cache
def bundle() -> str:
    """The script of circuitsvis itself, from the installed package."""
    spec = importlib.util.find_spec("circuitsvis")
    folder = Path(spec.origin if spec and spec.origin else "circuitsvis").parent
    path = folder / "dist" / "cdn" / "iife.js"
    require(
        path.is_file(),
        "circuitsvis",
        expected="an installed package with its script",
        got=str(path),
        instead="pip install circuitsvis",
    )
    return compressed(path.read_bytes())


def _page(title: str, caption: str, data: dict[str, Any], *, width: int = WIDTH - 40) -> str:
    """The page: ``assets/circuitsvis.html`` with its fields filled in. The nonce is a digest of the
    data, which no token can know."""
    raw = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
    fields = {
        "NONCE": hashlib.sha256(raw).hexdigest()[:24],
        "TITLE": html.escape(title),
        "CAPTION": html.escape(caption),
        "POSITIVE": POSITIVE,
        "NEGATIVE": NEGATIVE,
        "WIDTH": str(width),
        "DATA": compressed(raw),
        "BUNDLE": bundle(),
    }
    template = Path(__file__).parent / "assets" / "circuitsvis.html"
    parts = template.read_text(encoding="utf-8").split("@")
    return "".join(fields[part] if i % 2 else part for i, part in enumerate(parts))
