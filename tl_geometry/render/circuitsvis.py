"""The familiar circuitsvis views, hardened: attention heads, one pattern, coloured tokens, and
which sources an induction head reads.

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
from tl_geometry.render import circuitsvis_images
from tl_geometry.render.cells import compressed
from tl_geometry.render.figure import NEGATIVE, POSITIVE, check_limit
from tl_geometry.render.page import PageView
from tl_geometry.scores.split import ScoreSplit

CELLS, TOKENS, SOURCES = 50_000, 2_000, 128
"""Most cells over all heads of a heat map (12 heads of 64 tokens take a browser some 8 s), coloured
tokens, tokens of an attribution."""
WIDTH, ROWS = 800, 12
"""Pixels of a figure across, and terms (with pattern and total) that an attribution lists."""


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
    caption = f"{len(texts)} tokens, largest: {best}{_beyond(given, top)}"
    page = _page(
        title,
        caption,
        {"view": "ColoredTokens", "tokens": texts, "props": props, **_scale(given, top)},
    )
    return PageView(page, title=title, caption=caption, width=WIDTH, height=140 + _lines(texts))


def induction(
    split: ScoreSplit,
    *,
    head: Head | None = None,
    query: int | None = None,
    tokens: Sequence[str] | None = None,
    context: int = 0,
    limit: float | None = None,
) -> PageView:
    """Over the text itself: which source tokens a head reads for a query token, and through which
    terms of the split.

    Click a query token, then a term: sources are coloured by the pattern (0 to 1) or by the term's
    score, row-centred over the keys that the query may attend to, on one scale for all terms and
    queries, so that colours of terms add up to those of ``total``. The table below lists the five
    most attended sources with every term. The first query shown is the one that pays most attention
    to tokens which follow an earlier copy of it: what an induction head does.

    Args:
        split: from :func:`tl_geometry.split_scores`; ``head`` says which of its heads (its only one
            by default).
        query: position to begin with.
        tokens: texts; a split knows those of its first prompt.
        context: which prompt.
        limit: score of the full colour, by default the largest absolute value.

    Raises ``GeometryError`` over 128 tokens: split a shorter prompt, or use ``render.split``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> scores = tlg.split_scores(model, "a b a b", basis, heads="L1H0", prepend_bos=True)
    >>> induction(scores).title
    'What L1H0 reads'
    """
    row = _row(split, head)
    texts = _texts(split, tokens, context)
    size = len(texts)
    _within(
        size,
        SOURCES,
        "tokens of an attribution",
        "a shorter prompt, or render.split(split, heads=...)",
    )
    allowed = split.allowed[row]
    names = ["pattern", "total", *("-".join(t) for t in split.terms)]
    values = torch.stack([_of_split(split, name, context)[row] for name in names])
    copies = [
        [j for j in range(1, i + 1) if texts[j - 1] == texts[i] and bool(allowed[i, j])]
        for i in range(size)
    ]
    paid = torch.stack([values[0, i, copies[i]].sum() for i in range(size)])
    first = (
        (int(paid.argmax()) if float(paid.max()) > 0 else size - 1)
        if query is None
        else checks.index(query, size, "query")
    )
    top = _limit(values[1:], limit)
    label = head_name(split.heads[row])
    data = {
        "view": "induction",
        "tokens": [_running(t) for t in texts],
        "values": [[_short(r) for r in v] for v in values],
        "terms": names,
        "query": first,
        "rows": ROWS,
        "copies": copies,
        "allowed": [a.nonzero()[:, 0].tolist() for a in allowed],
        **_scale(values[1:], top),
        "props": {"positiveColor": POSITIVE, "negativeColor": NEGATIVE},
    }
    caption = (
        f"terms are row-centred scores, full colour at {top:.3g} (pattern: "
        f"1){_beyond(values[1:], top)}; "
        f"{_reconstruction(split)}; {split.provenance.line()}"
    )
    title = f"What {label} reads"
    page = _page(title, caption, data)
    shown = [html.token_text(t) for t in texts]
    image = functools.partial(
        circuitsvis_images.strip,
        values[:, first],
        names,
        shown,
        top,
        f"{title} for {first} {shown[first]}",
        caption,
    )
    height = (
        210
        + 21 * min(len(names), ROWS)
        + sum(_lines(t, m) for t, m in ((data["tokens"], 18), (data["tokens"], 0), (names, 18)))
    )
    return PageView(page, title=title, caption=caption, width=WIDTH, height=height, image=image)


def _reconstruction(split: ScoreSplit) -> str:
    """How far the sum of the terms is from the model's scores."""
    if split.provenance.preset != "exact":
        return "these terms do not sum to the model's scores"
    found = split.reconstruction.nearest
    if found is None:
        return "sum of terms not compared with the model"
    return f"sum of terms within {found[1]:.1e} of the model (allowed {found[2]:.1e})"


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


def _lines(texts: Sequence[str], margin: int = 0) -> int:
    """Height in pixels of wrapped tokens (of buttons, with a margin), at most 260 (the frame
    scrolls)."""
    width, lines = 0, 1
    for text in texts:
        width += 7 * len(text) + 3 + margin
        if width > WIDTH - 60 or ("⏎" in text and not margin):
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
