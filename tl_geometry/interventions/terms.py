"""Edits of scores by their parts: :func:`term` (mean, position and context of the stream) and
:func:`planes` (rotary planes) remove a part X of a head's scores S, keep it alone, or replace it.

    remove      S - X
    keep        X + the terms with bias on either side (of planes: X + ALiBi)
    mean        S - X + (mean of X over the batch at each cell)
    swap        S - X + X', X' the part of another prompt at the same positions
    shrink      (1 - a) S, with a the covariance share of X in the prompt: it takes as much
                covariance with S away as removing X does, but from all terms evenly

Terms are those of the running pass: after an edit in an early layer, a later one has other terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, product
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import check_seed, require
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.interventions.prompts import (
    Edit,
    Known,
    flag_of_another,
    from_another,
    require_several,
)
from tl_geometry.models.attention import scores_of
from tl_geometry.models.edits import NamedHook, NewScores, RunningHeads, edited_attention
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import head_spreads, judge_rounding
from tl_geometry.scores.planes import HeadPlanes, PlanesLike, describe_planes
from tl_geometry.scores.projection import PARTS, project_basis, split_heads
from tl_geometry.scores.splitter import require_positions
from tl_geometry.scores.terms import ALIBI, BIAS, BIAS_LABELS, GROUPS, group_of

PAIRS = tuple(product(PARTS, PARTS))
"""(query part, key part) of the terms of mean and constants, position, and the rest."""
ALIBI_TERM = (ALIBI, ALIBI)
"""The term that is added to the scores by position."""
NAMES = {"-".join(p): (p,) for p in (*PAIRS, ALIBI_TERM)}
NAMES |= {g: tuple(p[0] for n, p in NAMES.items() if group_of(n) == g) for g in GROUPS}
NAMES |= dict.fromkeys(BIAS_LABELS, ((BIAS, BIAS),))
"""What may be named: terms, groups, and the labels under which (bias, bias) is shown."""
Pair = tuple[str, str]
Terms = str | Pair | Sequence[str | Pair]
"""One term (``"pos-cvec"`` or ``("pos", "cvec")``, query part first), one group, or several."""
HeadsLike = Any
"""One head, several, or all (``None``), as ``(layer, head)`` or ``"L5H1"``."""
HOW = ("remove", "keep", "mean", "swap", "shrink")
PLANES_HOW = ("remove", "keep", "swap")


def pairs_of(names: Terms | Any) -> tuple[Pair, ...]:
    """The terms that ``names`` stands for, each once.

    >>> pairs_of("token"), pairs_of([("pos", "pos"), "cvec-pos"])
    ((('bias', 'cvec'), ('cvec', 'bias')), (('pos', 'pos'), ('cvec', 'pos')))
    """
    one = isinstance(names, str) or (isinstance(names, tuple) and names in (*PAIRS, ALIBI_TERM))
    fits = one or isinstance(names, Sequence)
    require(fits, "term", expected="names of terms", got=repr(names), instead='"content"')
    pairs: list[Pair] = []
    for name in [names] if one else names:
        fits = isinstance(name, str) or name in (*PAIRS, ALIBI_TERM)
        require(fits, "term", expected=f"one of {', '.join(NAMES)}", got=repr(name))
        pairs += (
            NAMES[checks.choice(name, list(NAMES), "term")] if isinstance(name, str) else [name]
        )  # type: ignore[list-item]
    return tuple(dict.fromkeys(pairs))


def heads_by_layer(heads: Sequence[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    """The chosen heads of each layer, both in ascending order.

    >>> heads_by_layer([(1, 2), (0, 1), (1, 0)])
    {0: (1,), 1: (0, 2)}
    """
    layers = sorted({layer for layer, _ in heads})
    return {at: tuple(sorted(head for layer, head in heads if layer == at)) for at in layers}


def edit_of_scores(
    view: ModelView,
    heads: HeadsLike,
    scores: NewScores,
    first: Sequence[NamedHook] = (),
    basis: PositionContext | None = None,
    **options: Any,
) -> Edit:
    """An edit of the scores of ``heads``; ``first`` are hooks before it. Others that could stand in
    their place are those of all layers, or of the layers that the ``basis`` has."""
    chosen = checks.heads(heads, view.n_layers, view.n_heads)

    def make(known: Known | None) -> list[NamedHook]:
        of_layers = heads_by_layer(chosen).items()
        edited = [edited_attention(view, layer, some, scores) for layer, some in of_layers]
        return [*first, *chain.from_iterable(edited)]

    layers = None if basis is None else [at for at in basis.states if at < view.n_layers]
    pool = checks.heads(None, view.n_layers, view.n_heads, layers)
    return Edit(view, make, heads=chosen, pool=pool, **options)


# ---- what becomes of the part X


def changed(how: str, run: RunningHeads, X: Tensor, *, seed: int = 0, drop: int = 0) -> Tensor:
    """New scores (the table of the module); ``drop`` first positions do not count in the share that
    ``"shrink"`` takes. ``"keep"`` is X itself."""
    S = run.total
    if how == "remove":
        return S - X
    if how == "mean":
        require_several(len(X))
        return S - X + X.mean(0, keepdim=True)
    if how == "swap":
        return S - X + from_another(X, seed)
    if how == "shrink":
        return S * (1 - covariance_share(run, X, drop)).to(S)[..., None, None]
    return X


def covariance_share(run: RunningHeads, X: Tensor, drop: int) -> Float[Tensor, "batch head"]:
    """``sum X~ . S~ / sum S~^2`` of a part in each prompt and head, rows centred, keys and queries
    from ``drop`` on; zero where the scores do not vary."""
    allowed = run.layer.allowed.to(X.device)[drop:, drop:]
    part, scores = (row_center(s[..., drop:, drop:].double(), allowed) for s in (X, run.total))
    whole = scores.square().sum((-2, -1))
    return (part * scores).sum((-2, -1)) / torch.where(whole > 0, whole, torch.inf)


# ---- terms


def term(
    model: ModelLike,
    basis: PositionContext,
    names: Terms | Any,
    heads: HeadsLike = None,
    *,
    how: str = "remove",
    seed: int = 0,
) -> Edit:
    """Ablate a term of attention scores: the heads attend by ``S - X``, with X the sum of the named
    terms of the mean decomposition (SPEC C; ``how``: see the module).

    Args:
        names: ``"pos-cvec"`` or ``("pos", "cvec")`` (query part first), ``"alibi-alibi"`` (nothing
            without ALiBi), a group (``"position"``, ``"content"``, ``"token"``, ``"mixed"``), or
            several. With ``how="keep"`` the terms with bias stay too, as mean and constants belong
            to any input.
        heads: ``(layer, head)`` or ``"L5H1"``, one, several, or all (``None``).
        seed: which other prompt each gets, for ``how="swap"``.

    Raises ``GeometryError`` during a pass over prompts with another BOS setting than the basis, or
    longer than it has seen; ``ReconstructionError`` where the heads' own z is not what their scores
    and values make (:mod:`tl_geometry.models.edits`).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> with tlg.interventions.term(model, basis, "content", "L1H0") as edit:
    ...     logits = model(windows.tokens)
    >>> edit.passes
    1
    """
    view, pairs = as_view(model), pairs_of(names)
    checks.choice(how, HOW, "how")
    # with "keep" the terms of mean and constants stay
    require(pairs or how == "keep", "term", expected="at least one", got="none")
    require_basis(basis)
    basis.check_model(view)
    basis.require_identifiable("interventions")
    kept = [p for p in PAIRS if BIAS in p] if how == "keep" else []
    weights = torch.tensor([[float((a, b) in (*pairs, *kept)) for b in PARTS] for a in PARTS])
    flags = flag_of_another(seed) if how == "swap" else {}

    def new(run: RunningHeads) -> Tensor:
        layer, length = run.layer, run.layer.h.shape[1]
        require_positions(basis, length)
        q, k = split_heads(layer, project_basis(layer, basis, length), list(run.heads))
        flags.update(dict.fromkeys(rounding(run, q, k)))
        X = weighted(weights, q, k)
        X = X if run.bias is None or ALIBI_TERM not in pairs else X + run.bias
        return changed(how, run, X, seed=seed, drop=basis.window[0])

    chosen = checks.heads(heads, view.n_layers, view.n_heads)
    for layer, _ in chosen:
        basis.index(layer)
    first = [bos_check(view, basis)] if view.bos_id is not None else []
    again = partial(term, model=view, basis=basis, names=pairs, heads=chosen, how=how, seed=seed)
    options = {"again": again, "together": how in ("mean", "swap"), "flags": flags}
    return edit_of_scores(view, chosen, new, first, basis, **options)


@torch.no_grad()
def rounding(run: RunningHeads, q: Tensor, k: Tensor) -> tuple[str, ...]:
    """A remark where rounding of the parts may exceed 1% of what scores of a row spread over;
    ``ReconstructionError`` where it may exceed all of it."""
    sizes = (q.sum(0).abs(), k.sum(0).abs()), (q.abs().sum(0), k.abs().sum(0))
    own, parts = (float(einsum(a, b, "b i h e, b j h e -> b h i j").max()) for a, b in sizes)
    spreads = head_spreads(run.total, run.layer.allowed.to(q.device))
    return judge_rounding(run.layer.roundoff, (own, parts), spreads, f"layer {run.layer.layer}")


def weighted(weights: Float[Tensor, "a c"], q: Tensor, k: Tensor) -> Tensor:
    """``sum_ac w_ac q_a . k_c`` per head; the weights are applied to the keys, so that one matrix
    product gives the sum over all terms."""
    keys = einsum(weights.to(k), k, "a c, c b j h e -> b h j a e")
    queries = rearrange(q, "a b i h e -> b h i (a e)")
    return queries @ rearrange(keys, "b h j a e -> b h (a e) j")


def bos_check(view: ModelView, basis: PositionContext) -> NamedHook:
    """A hook that refuses prompts with another BOS setting than the basis, by the first state of a
    BOS token at position 0."""
    name, bos = view.state_hooks[0], torch.tensor([[view.bos_id]])
    known = view.activations(bos, [name])[name][0, 0]

    def check(value: Tensor, hook: Any) -> None:
        with torch.no_grad():
            gap = (value[:, 0] - known.to(value)).abs().amax(-1)
            begins = gap <= 1e-3 * known.abs().max()
        # every row must be as the basis is
        basis.check_model(view, bool(begins.all() if basis.provenance.has_bos else begins.any()))

    return name, check


# ---- planes


def planes(
    model: ModelLike,
    names: PlanesLike | tuple[float, float],
    heads: HeadsLike = None,
    *,
    how: str = "remove",
    draw: int | None = None,
    seed: int = 0,
) -> Edit:
    """Ablate rotary planes of attention scores: ``S - sum_{m in planes} X^(m)`` (SPEC L).

    Args:
        names: numbers of planes, pairs of floats ``(over, up to)``, wavelengths in tokens, or
            names: ``"near"``, ``"middle"`` and ``"far"`` for the length of the running prompts,
            ``"pass"`` for coordinates that are not rotated.
        how: ``"remove"``, ``"keep"`` (with ALiBi), or ``"swap"`` by another prompt's.
        draw: a seed: as many other planes in their place, drawn at random for each head; where
            these are half of the planes or more, drawn from all, but never exactly these.

    Raises ``GeometryError`` during a pass where no head of a layer has the planes; else as
    :func:`term`.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> with tlg.interventions.planes(model, "pass", "L0H0") as edit:
    ...     logits = model(tlg.zoo.default_windows(model, 16, n=2).tokens)
    """
    view = as_view(model)
    checks.choice(how, PLANES_HOW, "how")
    draw = None if draw is None else check_seed(draw, "draw")
    wanted: Any = tuple(names) if isinstance(names, list) else names  # a pair of floats is a band

    def new(run: RunningHeads) -> Tensor:
        inside = plane_coordinates(run, wanted, draw).to(run.total)
        X = scores_of(run.own("q") * inside, run.own("k"), run.layer.scale)
        new = changed(how, run, X, seed=seed)
        return new if how != "keep" or run.bias is None else new + run.bias

    options = {"names": names, "heads": heads, "how": how, "draw": draw, "seed": seed}
    again = partial(planes, model=view, **options)
    return edit_of_scores(view, heads, new, again=again, together=how == "swap")


def plane_coordinates(
    run: RunningHeads, names: PlanesLike, draw: int | None
) -> Bool[Tensor, "head d_head"]:
    """The coordinates of the chosen planes of the running heads, or of as many random others."""
    layer, rotary = run.layer, run.layer.planes()
    of_heads = HeadPlanes.of([rotary] * len(run.heads), layer.h.shape[1])
    chosen = of_heads.chosen(names)
    got = f"none of {describe_planes(names)} in layer {layer.layer}"
    expected, instead = "planes that the heads have", "others, or longer prompts"
    require(bool(chosen.any()), "planes", expected=expected, got=got, instead=instead)
    if draw is not None:
        theta, at = of_heads.theta[0], layer.layer
        drawn = (random_planes(row, theta, draw, at, h) for row, h in zip(chosen, run.heads))
        chosen = torch.stack(list(drawn))
    return of_heads.coordinates(chosen).to(layer.h.device)


def random_planes(
    chosen: Bool[Tensor, " plane"],
    theta: Float[Tensor, " plane"],
    seed: int,
    layer: int = 0,
    head: int = 0,
) -> Bool[Tensor, " plane"]:
    """As many planes as are chosen, drawn from the others that are rotated: one that holds a chosen
    plane repeats the edit. Where the others are too few to draw from, from all, but never exactly
    the chosen ones.

    >>> chosen = torch.tensor([True, True, False, False, False, False])
    >>> theta = torch.tensor([1.0, 0.1, 0.01, 0.001, 1e-4, 0.0])
    >>> drawn = random_planes(chosen, theta, seed=3)
    >>> int(drawn.sum()), bool((drawn & chosen).any()), bool(drawn[-1])
    (2, False, False)
    """
    is_rotated, count = theta.abs() > 0, int(chosen.sum())
    rotated = is_rotated.nonzero().flatten()
    fits = 0 < count < len(rotated) and not bool((chosen & ~is_rotated).any())
    expected = f"fewer than all {len(rotated)} rotated planes, and no other, for a control"
    require(fits, "planes", expected=expected, got=f"{count} planes")
    # another seed for each layer and head: 1009 is more than a model has of either
    generator = torch.Generator().manual_seed((seed * 1009 + layer) * 1009 + head)
    others = rotated[~chosen[rotated]]
    pool, drawn = (others if len(others) > count else rotated), chosen
    while torch.equal(drawn, chosen):
        drawn = torch.zeros_like(chosen)
        drawn[pool[torch.randperm(len(pool), generator=generator)[:count]]] = True
    return drawn
