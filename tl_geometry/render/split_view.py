"""The page of a split: what the attention scores of some heads are made of, cell by cell. README,
the guide, notebooks and the report show it.

The terms of a :class:`~tl_geometry.scores.ScoreSplit` are summed to panels: the groups position,
content, token and mixed, with the constants apart from position, or the terms themselves. Each
panel is a map of queries and keys; the bars of a cell say which group it is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from jaxtyping import Float

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, head_name
from tl_geometry.base.errors import require
from tl_geometry.base.html import token_text
from tl_geometry.base.rows import row_center
from tl_geometry.render import figure as draw
from tl_geometry.render import parts
from tl_geometry.render.page import LARGEST, Page
from tl_geometry.scores.score_split import ScoreSplit
from tl_geometry.scores.terms import CONSTANT_PARTS, GROUPS, group_of, key_of

Term = tuple[str, str]
CONSTANTS = "constants"
"""The panel of what depends on no token and no position: mean and biases on both sides."""


def split(
    split: ScoreSplit,
    heads: Sequence[Head] | Head | None = None,
    *,
    context: int = 0,
    panels: str | Sequence[str] | None = None,
    tokens: Sequence[str] | None = None,
    centered: bool = False,
    title: str | None = None,
) -> Page:
    """What the attention scores of one or several heads are made of, as linked maps of queries and
    keys on one symmetric scale.

    Move over a cell to read its head, query and key, the value of every panel there, and the share
    of each group; click to keep it. Below, the text has the colours of a panel at the chosen query.

    Args:
        split: from :func:`tl_geometry.split_scores`.
        heads: some of its heads, ``(layer, head)`` or ``"L5H1"``; all by default.
        context: which prompt.
        tokens: texts of its tokens; a split brings those of its first prompt.
        panels: ``"groups"``: ``position``, ``content``, ``token`` (content beside a constant),
            ``mixed`` (content beside position) and the constants, which sum to the total;
            ``"terms"``: each term; or names of groups and terms. Groups by default, terms if the
            parts are your own.
        centered: subtract from each row of each panel its mean over the allowed keys, which does
            not change the softmax.
        title: title of the page, by default with the names of the heads.

    Full colour is the largest value of all panels, or twice their 99th percentile if that is less;
    the pattern has a scale of its own, from 0 to 1. Values are float16 (three digits). Raises
    ``GeometryError`` for heads, contexts and panels that the split does not have, and for a page
    above 5 MB.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> basis = tlg.decompose(model, tlg.zoo.default_windows(model, 16, n=8), progress=False)
    >>> text = "for i in range(3):"
    >>> scores = tlg.split_scores(model, text, basis, heads="L1H0", prepend_bos=True)
    >>> split(scores).title  # shown in a notebook; .save("split.html") writes a page
    'What are the attention scores of L1H0 made of?'
    """
    draw.require_result(split, ScoreSplit, "split", "split_scores(model, tokens, basis)")
    rows = checks.head_rows(heads, split.heads, "split_scores(..., heads=...)")
    at, length = checks.index(context, split.q.shape[1], "context"), split.q.shape[2]
    chosen = panels_of(split, panels)
    if tokens is None:
        known = split.str_tokens if context == 0 else ()
        tokens = known or [str(i) for i in range(length)]
    expected, instead = f"{length} texts", "tokens=model.to_str_tokens(...)"
    require(len(tokens) == length, "tokens", expected=expected, got=len(tokens), instead=instead)
    # two bytes a cell, of which half are masked, in base64
    small = 1.4 * len(rows) * (len(chosen) + 2) * length**2 < LARGEST
    got, instead = f"{len(rows)} heads x {len(chosen) + 2} panels", "fewer heads= (or tokens)"
    require(small, "split", expected="a page of at most 5 MB", got=got, instead=instead)
    values = panel_values(split, chosen, at, rows, centered=centered)
    names = [*(split.label(name) for name in chosen), "total", "pattern"]
    if CONSTANTS in chosen:  # in a rotary model they depend on position: the label says so
        names[list(chosen).index(CONSTANTS)] += f" ({split.label('bias-bias')})"
    sizes = np.sort(abs(values[:, :-1][np.isfinite(values[:, :-1])]))
    # a few large cells would make all others pale
    limit = float(min(sizes[-1], 2 * sizes[int(0.99 * (len(sizes) - 1))] or sizes[-1])) or 1.0
    labels = [head_name(split.heads[i]) for i in rows]
    grid = parts.maps(
        values,
        names=names,
        rows=labels,
        axes=("query", "key"),
        labels=[[f"{i} “{token_text(t)}”" for i, t in enumerate(map(str, tokens))]] * 2,
        limits=[*[limit] * (len(names) - 1), 1.0],
        colours=[draw.PARTS.get(_group(name), "") for name in (*chosen, "total", "pattern")],
        together=True,
    )
    named = ", ".join(labels) if len(rows) <= 4 else f"{len(rows)} heads"
    # shares are those of the whole score, not of some of its terms
    covers = sorted(term for some in chosen.values() for term in some) == sorted(split.terms)
    known = covers and groups_of([*split.terms])
    groups = [(_group(name), i) for i, name in enumerate(chosen) if known]
    query, key, pattern = length - 1, int(np.nan_to_num(values[0, -1, -1]).argmax()), len(names) - 1
    return Page(
        title=title or f"What are the attention scores of {named} made of?",
        caption=_caption(split, chosen, limit, centered=centered, covers=covers),
        parts=[
            grid,
            parts.bars("What it is made of", range(pattern), groups=groups, numbers=[pattern]),
            parts.tokens("Where the chosen query looks, and why", [*map(str, tokens)]),
        ],
        begin={"i": query, "j": key, "kept": [query, key], "query": query, "source": len(chosen)},
        height=1460 if len(chosen) > 4 else 1180,  # at 784 pixels of width nothing is cut
        source=split.provenance.line(),
        null="Terms are exact: they have no null.",
    )


def panels_of(split: ScoreSplit, panels: str | Sequence[str] | None) -> dict[str, list[Term]]:
    """The terms of each panel, by name."""
    terms = {f"{a}-{b}": [(a, b)] for a, b in split.terms}
    groups = groups_of(list(split.terms))
    if panels is None or panels == "groups":
        grouped, instead = panels is None or bool(groups), "panels='terms'"
        require(grouped, "panels", expected="parts with groups", got="your own", instead=instead)
        return groups or terms
    if panels == "terms":
        return terms
    members = {**groups, **terms}
    wanted = [key_of(p) for p in ([panels] if isinstance(panels, str) else panels)]
    unknown = [p for p in wanted if p not in members]
    expected = f"'groups', 'terms' or some of {', '.join(members)}"
    require(wanted and not unknown, "panels", expected=expected, got=unknown or "none")
    return {p: members[p] for p in wanted}


def groups_of(terms: Sequence[Term]) -> dict[str, list[Term]]:
    """The terms of each group, the constants apart; nothing if the parts are the user's own.

    >>> groups_of([("pos", "pos"), ("bias", "bias"), ("pos", "cvec"), ("alibi", "alibi")])
    {'position': [('pos', 'pos'), ('alibi', 'alibi')], 'mixed': [('pos', 'cvec')], \
'constants': [('bias', 'bias')]}
    >>> groups_of([("mlp0", "embed")])
    {}
    """
    names = [_group(f"{a}-{b}") for a, b in terms]
    known = [g for g in (*GROUPS, CONSTANTS) if g in names] if all(names) else []
    return {g: [term for term, n in zip(terms, names, strict=True) if n == g] for g in known}


def _group(panel: str) -> str:
    """The group of a panel: itself, or that of its term, the constants apart."""
    if panel in (*GROUPS, CONSTANTS):
        return panel
    sides = panel.split("-")
    return CONSTANTS if set(sides) <= set(CONSTANT_PARTS) else group_of(panel) or ""


def panel_values(
    split: ScoreSplit,
    panels: dict[str, list[Term]],
    context: int,
    rows: Sequence[int],
    *,
    centered: bool,
) -> Float[np.ndarray, "head panel query key"]:
    """The panels of one context, the total and the pattern; NaN where no key is allowed."""
    allowed = split.allowed[rows]
    zero = torch.zeros(()).to(split.q)
    sums = [sum((split.terms[pair] for pair in some), zero) for some in panels.values()]
    scores = [x[context, rows] for x in (*sums, split.total())]
    if centered:
        scores = [row_center(x, allowed) for x in scores]
    values = torch.stack([*scores, split.pattern()[context, rows]], 1)
    return values.masked_fill(~allowed[:, None], torch.nan).double().cpu().numpy()


def _caption(
    split: ScoreSplit, panels: Collection[str], limit: float, *, centered: bool, covers: bool
) -> str:
    what = "Scores without the mean of their row" if centered else "Scores"
    said = f"{what}: red raises attention, blue lowers it; full colour is {limit:.3g}, and 1 in "
    said += "the pattern."
    if covers:
        said += " The panels add up to the total."
    if CONSTANTS in panels:
        said += " Tables count the constants as position."
    what, error, bound = split.reconstruction.nearest or ("", None, None)
    if error is not None:
        said += f" Reconstruction error {error:.1e} ({what}; allowed {bound:.1e})."
    return said
