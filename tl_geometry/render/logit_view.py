"""The page of a logit: what wrote it, shown on the text itself. Arcs run from the chosen token to
the sources that heads read there. Cards below give, for each head, what it wrote towards the target
and which terms of the score made it look there. Notebooks and the gallery show the page.

1. The input is one or several :class:`~tl_geometry.circuits.logits.LogitExplanation` of one prompt,
   one for each position.
2. Each head has a card with its (head, source) pairs. The terms of a score are summed to the groups
   of ``render.split``, or by the writer of the key where the parts are writers, and also listed one
   by one.
3. The last card holds the rest, so that the page adds up to the model's logit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tl_geometry.base import html
from tl_geometry.base.checks import head_name
from tl_geometry.base.errors import fail, require
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.render.page import PageView, rounded, text_data, text_lines
from tl_geometry.render.split_view import groups_of
from tl_geometry.render.writers import (
    EXACT,
    finding,
    logit_figure,
    texts_of,
)
from tl_geometry.scores.terms import ALIBI, label, term_pairs

HEADS, FEW, MANY = 5, 4, 9
"""How many heads have a card; how many writers a short list names, and how many a long one (and how
many heads without a card are listed unfolded)."""
SAID = {
    "bias": "constants (bias)",
    "pos": "position (pos)",
    "cvec": "content (cvec)",
    "ctx": "context (ctx)",
    "resid": "residual (resid)",
}
"""Part of a source -> its name on the page."""
WIDTH, TALLEST = 1080, 1100
"""Width of the page in pixels, and its largest height."""
LARGEST = 2_000_000
"""Most bytes of the page."""

Bars = list[tuple[str, float | None]]


def logit_page(
    explanations: LogitExplanation | Sequence[LogitExplanation],
    *,
    query: int | None = None,
) -> PageView:
    """What wrote a logit, shown on the text. Arcs run from the chosen token to the sources that
    heads read there. An arc is as wide as what was written from its source towards the target, red
    where that raised the logit and blue where it lowered it.

    A card for each head lists what it wrote from each source, the attention that it paid, the terms
    of the score that made it look there (relative to the mean of the row), and the parts of the
    source that were written. Terms are grouped as in ``render.split``, or by the writer of the key
    where the parts are writers. A click on a head shows it alone; a click on an underlined token
    shows the logit there. Every list sums to its number, and the page to the model's logit. A line
    of code gives what a head wrote from a source, from ``explanation`` (or ``explanations[i]``).

    Args:
        explanations: from :func:`tl_geometry.explain_logit`, for one or several positions of one
            prompt.
        query: the position shown first, by default that of the first explanation.

    Raises ``GeometryError`` for explanations of several prompts or parts, or two of one position,
    for a ``query`` that is not explained, and for pages of more than 2 MB.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=1)
    >>> ids = windows.tokens[0].tolist()
    >>> found = [tlg.explain_logit(model, windows, i, ids[i + 1], top=4) for i in (9, 14)]
    >>> logit_page(found, query=14).title  # .save("logit.html") writes the page
    'L1H0 wrote +0.30 of the logit 3.99 of “␣t”, from “<|endoftext|>” at 0'
    """
    each = checked_explanations(explanations)
    positions = [e.position for e in each]
    if query is not None and query not in positions:
        fail("query", expected=f"one of the explained positions {positions}", got=query)
    first = 0 if query is None else positions.index(query)
    queries = [_query(e) for e in each]
    text = text_data(texts_of(each[0]))
    sizes = [v for q in queries for shown in (q, *q["heads"]) for v in shown["marks"]]
    data = {
        **text,
        "limit": max(map(abs, sizes)) or 1.0,
        "longest": [_longest(queries, "score"), _longest(queries, "value")],
        "details": _details(each[0]),
        "queries": queries,
        "first": first,
    }
    view = PageView(
        "logit",
        data,
        title=queries[first]["title"],
        caption=_caption(each[first]),
        width=WIDTH,
        height=_height(text, queries[first]),
        image=functools.partial(logit_figure, each[first]),
        source=each[first].provenance.line(),
        null=EXACT,
    )
    size, instead = len(view.page), "fewer explanations"
    require(size <= LARGEST, "explanations", expected="a page of 2 MB", got=size, instead=instead)
    return view


def checked_explanations(
    explanations: LogitExplanation | Sequence[LogitExplanation],
) -> tuple[LogitExplanation, ...]:
    """Explanations of one prompt with the same parts, at different positions."""
    each = tuple(explanations) if isinstance(explanations, Sequence) else (explanations,)
    instead = "explain_logit(model, tokens, position, target)"
    if not each or not all(isinstance(e, LogitExplanation) for e in each):
        got = "none" if not each else type(each[0]).__name__
        fail("explanations", expected="explanations of logits", got=got, instead=instead)
    prompts = [(e.str_tokens, e.heads.shape, e.parts, e.provenance.token_hash) for e in each]
    expected, got = "explanations of one prompt, by the same parts", f"{len(set(prompts))} kinds"
    require(len(set(prompts)) == 1, "explanations", expected=expected, got=got)
    positions = [e.position for e in each]
    require(
        len(set(positions)) == len(positions),
        "explanations",
        expected="one explanation a position",
        got=positions,
    )
    return each


def followers(found: LogitExplanation) -> list[int]:
    """Positions right after earlier copies of the explained token, which an induction head
    reads."""
    texts, at = texts_of(found), found.position
    return [j for j in range(1, at + 1) if texts[j - 1] == texts[at]]


def _query(found: LogitExplanation) -> dict[str, Any]:
    """The data of one explanation: cards for the heads of the largest pairs, and the rest."""
    at, texts = found.position, texts_of(found)
    heads = list(dict.fromkeys(pair[:2] for pair in found.pairs))[:HEADS]
    shown = [p for p, pair in enumerate(found.pairs) if pair[:2] in heads]
    written = found.heads[:, :, : at + 1]
    cards = []
    for h in heads:
        pairs = [_pair(found, p) for p in shown if found.pairs[p][:2] == h]
        total, marks = rounded(float(written[h].sum())), [rounded(v) for v in written[h].tolist()]
        cards.append({"name": head_name(h), "sum": total, "marks": marks, "pairs": pairs})
    # what the cards list; whatever else heads wrote is one entry of the rest
    inside = sum(float(found.heads[found.pairs[p]]) for p in shown)
    rest = _listed(zip(found.other_names, found.others.tolist(), strict=True), MANY, "writers")
    rest.insert(0, ("other heads and sources", rounded(float(found.heads.sum()) - inside)))
    return {
        "position": at,
        "title": finding(found),
        "target": " − ".join(html.token_text(t) for t in found.target_tokens),
        "logit": rounded(found.logit),
        "total": rounded(found.total),
        "marks": [rounded(v) for v in written.sum((0, 1)).tolist()],
        "copies": followers(found),
        "token": html.token_text(texts[at]),
        "heads": cards,
        "rest": rest,
    }


def _pair(found: LogitExplanation, p: int) -> dict[str, Any]:
    """One (head, source): what was written, and the score behind it, each as a short and a long
    list."""
    terms: dict[tuple[str, str], float] = dict(
        zip(term_pairs(found.parts), found.pair_terms[p].flatten().tolist(), strict=True)
    )
    biased = bool(found.pair_alibi.any())
    terms |= {(ALIBI, ALIBI): float(found.pair_alibi[p])} if biased else {}
    groups = groups_of(list(terms))
    by_term = [(label(f"{a}-{b}", found.bias_label), v) for (a, b), v in terms.items()]
    values = list(zip(found.parts, found.pair_values[p].tolist(), strict=True))
    if groups:
        by_group = [
            (name, rounded(sum(terms[t] for t in members))) for name, members in groups.items()
        ]
        score = [by_group, _listed(by_term, len(by_term), "")]
        # such parts are few: both lists are the same
        value = [[(SAID.get(part, part), rounded(v)) for part, v in values]] * 2
    else:
        # of writers, the short list has one sum for each writer of the key
        keys = [(b, sum(v for (_, k), v in terms.items() if k == b)) for b in found.parts]
        keys += [(ALIBI, terms[ALIBI, ALIBI])] if biased else []
        score = [_listed(keys, FEW, "writers"), _listed(by_term, MANY, "terms")]
        value = [_listed(values, most, "writers") for most in (FEW, MANY)]
    return {
        "source": found.pairs[p][2],
        "code": f"heads[{', '.join(map(str, found.pairs[p]))}]",
        "written": rounded(float(found.heads[found.pairs[p]])),
        "attention": rounded(float(found.pair_patterns[p])),
        "total": rounded(float(found.pair_scores[p])),
        "score": score,
        "value": value,
    }


def _details(found: LogitExplanation) -> list[str]:
    """Names of the short and of the long list, for the buttons that switch between them."""
    if groups_of(term_pairs(found.parts)):
        return ["groups", f"all {len(found.parts) ** 2} terms"]
    return ["writers of the key", "writers of query and key"]


def _listed(bars: Iterable[tuple[str, float]], most: int, what: str) -> Bars:
    """The ``most`` bars of largest absolute value, and as the last the sum of the others."""
    order = sorted(bars, key=lambda bar: -abs(bar[1]))
    shown, others = order[:most], order[most:]
    if len(others) == 1:  # a single one takes no more room under its own name
        shown, others = order, []
    listed = [(name, rounded(value)) for name, value in shown]
    if others:
        listed.append((f"{len(others)} smaller {what}", rounded(sum(v for _, v in others))))
    return listed


def _caption(found: LogitExplanation) -> str:
    total, logit = (html.signed(value, ".4f") for value in (found.total, found.logit))
    return (
        f"Contributions to the logit before any soft cap, every later norm frozen at its scale: "
        f"they sum to {total}, the model's logit is {logit} (difference "
        f"{found.error:.0e} of the sum of sizes); scores are relative to the mean over the allowed "
        f"keys, terms have the query part first."
    )


def _longest(queries: Sequence[dict[str, Any]], what: str) -> float:
    """The largest absolute value in all lists of one kind (``"score"`` or ``"value"``): bars of
    the page share one scale."""
    pairs = [pair for q in queries for h in q["heads"] for pair in h["pairs"]]
    return max((abs(v) for pair in pairs for bars in pair[what] for _, v in bars), default=1.0) or 1


def _height(text: dict[str, Any], query: dict[str, Any]) -> int:
    """Pixels that the page is likely to need; a taller page scrolls."""
    # heights as logit.css sets them: 17 for a bar, 24 for a line of a pair, 36 for a disagreeing
    # head, 53 for a line of text (the text scrolls above 420); the other numbers are frames, titles
    lines = text_lines(text, WIDTH - 40, padding=7, font=14)  # logit.css
    tall = [100 + 17 * len(query["rest"])]
    for head in query["heads"]:
        first = head["pairs"][0]
        bars = len(first["score"][0]) + len(first["value"][0])
        tall.append(126 + 24 * len(head["pairs"]) + 17 * bars)
    # cards stand three in a row: the rows are about as tall as the tallest third of the cards
    rows = sorted(tall)[-math.ceil(len(tall) / 3) :]
    return min(TALLEST, 180 + min(53 * lines, 420) + sum(rows))
