"""Remove, keep or replace a measured term of attention scores in a live model.

A term is named as in a split: ``"pos-cvec"`` (query part first), ``("pos", "cvec")``,
``"alibi-alibi"``, a group (``"position"``, ``"content"``, ``"mixed"``), or several of these. Terms
are those of the running forward pass, so that an edit in an early layer changes what a later one
takes away. With S the scores of a head and X the term:

    remove      S - X
    keep        X + the terms with bias on either side
    mean        S - X + (mean of X over the batch at each cell)
    swap        S - X + X', X' the term of another prompt at the same positions
    shrink      (1 - a) S, a the covariance share of X over the kept cells of the prompt, so that as
                much covariance with S goes

What is kept is compared with the bias terms alone, ``keep_term(model, basis, (), heads)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import fail, require
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.batches import SAMPLED
from tl_geometry.models.edit_lists import LiveEdit, live_edit
from tl_geometry.models.hook_points import PassTokens
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit, ScoreEdit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.verify import some_queries
from tl_geometry.scores.projection import PARTS, ProjectedParts, project_basis, split_heads
from tl_geometry.scores.splitter import rounding_flags
from tl_geometry.scores.terms import ALIBI, GROUPS, group_of, term_names

Term = str | tuple[str, str] | Sequence[str | tuple[str, str]]
"""One term, one group, or several."""
HeadsLike = Iterable[Head] | Head | None
BIAS = 0
"""Index of the bias part in :data:`tl_geometry.scores.projection.PARTS`."""


def terms_of(term: Term) -> tuple[str, ...]:
    """Names of the terms that ``term`` stands for, each once.

    >>> terms_of("content"), terms_of([("pos", "pos"), "cvec-pos"])
    (('cvec-cvec',), ('pos-pos', 'cvec-pos'))
    """
    names = term_names(PARTS, alibi=True)
    pair = (
        isinstance(term, tuple)
        and len(term) == 2
        and all(isinstance(t, str) and t in (*PARTS, ALIBI) for t in term)
    )
    items: Sequence[Any] = [term] if isinstance(term, str) or pair else list(term)
    found: list[str] = []
    for item in items:
        name = "-".join(item) if isinstance(item, tuple) else item
        if name in GROUPS:
            found += [n for n in names if group_of(n) == name]
        else:
            found.append(checks.choice(name, [*names, *GROUPS], "term"))
    return tuple(dict.fromkeys(found))


def weights_of(names: Sequence[str]) -> tuple[Float[Tensor, "part part"], float]:
    """One where a term is meant, zero elsewhere; and the same for ALiBi."""
    chosen = [float(n in names) for n in term_names(PARTS)]
    return torch.tensor(chosen).view(len(PARTS), len(PARTS)), float(f"{ALIBI}-{ALIBI}" in names)


def bias_terms() -> Float[Tensor, "part part"]:
    """One for terms with bias on either side."""
    weight = torch.zeros(len(PARTS), len(PARTS))
    weight[BIAS], weight[:, BIAS] = 1, 1
    return weight


def weighted_score(
    parts: ProjectedParts,
    weight: Float[Tensor, "head part part"],
    bias: Float[Tensor, "head query key"] | None,
    alibi: Float[Tensor, " head"],
) -> Float[Tensor, "batch head query key"]:
    """``sum_ab w_ab q_a . k_b`` (plus ``w B``) for each head in one product: weights are moved to
    the key side."""
    keys = einsum(weight.to(parts.k), parts.k, "h a c, c b j h e -> b h j a e")
    query = rearrange(parts.q, "a b i h e -> b h i (a e)")
    scores = query @ rearrange(keys, "b h j a e -> b h (a e) j")
    return scores if bias is None else scores + alibi.to(scores)[:, None, None] * bias


def running_parts(layer: LayerView, basis: PositionContext, heads: Sequence[int]) -> ProjectedParts:
    """Parts of the running forward pass for some heads, with gradients, from the weights as they
    are now."""
    length = layer.h.shape[1]
    require(
        length <= basis.length,
        "tokens",
        expected=f"at most {basis.length} positions, as the basis has seen",
        got=length,
        instead="decompose(...) on windows of this length",
    )
    return split_heads(layer, project_basis(layer, basis, length), list(heads))


Change = Callable[[LayerView, Tensor, ProjectedParts, tuple[int, ...]], Tensor]
"""(layer, scores, parts, heads) -> new scores."""


def edits_for(
    view: ModelView,
    basis: PositionContext,
    heads: HeadsLike,
    change: Change,
    *,
    layers: Iterable[int] | int | None = None,
) -> list[Edit]:
    """One edit for each layer that has chosen heads."""
    require_basis(basis)
    basis.check_model(view)
    basis.require_identifiable("interventions")
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)

    def check_tokens(tokens: PassTokens) -> str | None:
        if view.bos_id is None:
            return None
        bos = tokens.are(torch.full(tokens.shape, view.bos_id))[:, :2]
        basis.check_model(view, bool(bos[:, 0].all()))
        twice = bos.shape[1] == 2 and bool(bos.all(-1).any())
        return "prompts that begin with two BOS tokens" if twice else None

    out: list[Edit] = []
    for at in sorted({layer for layer, _ in chosen}):
        basis.index(at)
        mine = tuple(sorted(head for layer, head in chosen if layer == at))

        flags: list[str] = []
        scores = _scores(basis, change, mine, flags)
        out.append(Edit(at, mine, scores, check_tokens, flags=flags))
    return out


def _scores(
    basis: PositionContext, change: Change, heads: tuple[int, ...], flags: list[str]
) -> ScoreEdit:
    """Scores of a running pass after a change of their terms; where rounding of the parts is large,
    it says so in ``flags``, or refuses."""

    def scores(layer: LayerView, whole: Tensor) -> Tensor:
        parts = running_parts(layer, basis, heads)
        with torch.no_grad():
            at = some_queries(layer.h.shape[1], SAMPLED)
            flags.extend(rounding_flags(layer, parts.q, parts.k, at, heads))
        return change(layer, whole, parts, heads)

    return scores


def _term_score(
    parts: ProjectedParts, layer: LayerView, heads: Sequence[int], weight: Tensor, alibi: float
) -> Tensor:
    n = len(heads)
    bias = None if layer.bias is None else layer.bias[list(heads)]
    return weighted_score(parts, weight.expand(n, -1, -1), bias, torch.full((n,), alibi))


def removing(names: Sequence[str]) -> Change:
    """``S - X``."""
    weight, alibi = weights_of(names)
    return lambda layer, whole, parts, heads: (
        whole - _term_score(parts, layer, heads, weight, alibi)
    )


def keeping(names: Sequence[str]) -> Change:
    """``X`` and every term with bias on either side."""
    weight, alibi = weights_of(names)
    weight = torch.maximum(weight, bias_terms())
    return lambda layer, whole, parts, heads: _term_score(parts, layer, heads, weight, alibi)


def averaging(names: Sequence[str]) -> Change:
    """``S - X + mean of X over the batch``."""
    weight, alibi = weights_of(names)

    def change(
        layer: LayerView, whole: Tensor, parts: ProjectedParts, heads: tuple[int, ...]
    ) -> Tensor:
        require_several(whole, "mean_term")
        term = _term_score(parts, layer, heads, weight, alibi)
        return whole - term + term.mean(0, keepdim=True)

    return change


Note = Callable[[Tensor], None]
"""Receives a number per prompt and head of a pass ``[batch head]``."""


def swapping(names: Sequence[str], seed: int, note: Note | None = None) -> Change:
    """``S - X + X'``, X' the same term of another prompt of the batch at the same positions.

    ``note`` receives the cosines of term and replacement, row-centred: near one (pos-pos without
    rotation hardly differs between prompts) the swap changes nothing.
    """
    weight, alibi = weights_of(names)

    def change(
        layer: LayerView, whole: Tensor, parts: ProjectedParts, heads: tuple[int, ...]
    ) -> Tensor:
        require_several(whole, "swap")
        term = _term_score(parts, layer, heads, weight, alibi)
        other = term[derangement(len(term), seed).to(term.device)]
        if note is not None:
            own, swapped = (row_center(x, layer.allowed.to(x.device)) for x in (term, other))
            size = torch.linalg.vector_norm(own, dim=(-2, -1)) * torch.linalg.vector_norm(
                swapped, dim=(-2, -1)
            )
            note((own * swapped).sum((-2, -1)) / torch.where(size > 0, size, torch.inf))
        return whole - term + other

    return change


def shrinking(names: Sequence[str], drop: int, note: Note | None = None) -> Change:
    """``(1 - a) S``, a the covariance share ``sum X~ . S~ / sum S~^2`` of the term in each prompt
    and head, over the keys and queries from ``drop`` on; ``note`` receives it."""
    weight, alibi = weights_of(names)

    def change(
        layer: LayerView, whole: Tensor, parts: ProjectedParts, heads: tuple[int, ...]
    ) -> Tensor:
        allowed = layer.allowed.to(whole.device)[drop:, drop:]
        term, score = (
            row_center(x[..., drop:, drop:].double(), allowed)
            for x in (_term_score(parts, layer, heads, weight, alibi), whole)
        )
        size = score.square().sum((-2, -1))
        share = (term * score).sum((-2, -1)) / torch.where(size > 0, size, torch.inf)
        if note is not None:
            note(share)
        return whole * (1 - share.to(whole))[..., None, None]

    return change


def derangement(n: int, seed: int) -> Int[Tensor, " batch"]:
    """A permutation without fixed point: a seeded order of the prompts, each replaced by the next
    one in it.

    >>> order = derangement(5, 0)
    >>> sorted(order.tolist()), bool((order == torch.arange(5)).any())
    ([0, 1, 2, 3, 4], False)
    """
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    out = torch.empty_like(order)
    out[order] = order.roll(1)
    return out


def require_several(scores: Tensor, what: str) -> None:
    """Refuse a batch of one prompt, in which there is no other."""
    if len(scores) < 2:
        fail(
            what,
            expected="a batch of at least 2 prompts",
            got=len(scores),
            instead="more prompts of the same length",
        )


def _edit(model: ModelLike, basis: PositionContext, heads: HeadsLike, change: Change) -> LiveEdit:
    view = as_view(model)
    chosen = checks.heads(heads, view.n_layers, view.n_heads)

    def prepare() -> tuple[ModelView, list[Edit]]:
        now = as_view(model)
        return now, edits_for(now, basis, chosen, change)

    return live_edit(prepare)


def remove_term(
    model: ModelLike, basis: PositionContext, term: Term, heads: HeadsLike = None
) -> LiveEdit:
    """Context manager: run the live model with a term taken out of the scores of ``heads`` (all for
    ``None``), ``S - X``.

    ``with remove_term(model, basis, "cvec-cvec", "L5H1"): model(tokens)``. Inside, the model is one
    whose heads attend by S - X: X is the term of the stream as it leaves everybody's hooks (a
    patched stream gives the patched term), hooks and caches at scores, pattern and z see the edited
    ones, and gradients pass. ``with ... as edit`` gives an
    :class:`~tl_geometry.models.live_edits.OpenEdit`, whose ``unedited`` names the points that
    cannot show the edit. The model is as before on exit. The same for one pass, among other hooks:
    ``model.run_with_hooks(tokens, fwd_hooks=edit.hooks())``
    (:meth:`~tl_geometry.interventions.LiveEdit.hooks`).

    Raises ``GeometryError`` for a head that an open edit has already, for padding, a key-value
    cache, autocast, prompts with another BOS setting than the basis or longer than it has seen, and
    where ``reset_hooks(including_permanent=True)`` took the edit away; ``ReconstructionError``
    where queries, keys, scores or patterns do not follow from the stream (a hook on ``hook_q`` of
    an edited head).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> edit = tlg.interventions.remove_term(model, basis, "cvec-cvec", "L1H0")
    >>> with edit:
    ...     inside = model(windows.tokens)
    >>> bool((model.run_with_hooks(windows.tokens, fwd_hooks=edit.hooks()) == inside).all())
    True
    """
    return _edit(model, basis, heads, removing(terms_of(term)))


def keep_term(
    model: ModelLike, basis: PositionContext, term: Term, heads: HeadsLike = None
) -> LiveEdit:
    """Context manager: keep only a term, with every term that has bias on either side; ``()`` for
    those alone.

    Bias terms stay because mean and constants belong to any input; compare with them alone to see
    what the term adds.
    """
    return _edit(model, basis, heads, keeping(terms_of(term)))


def mean_term(
    model: ModelLike, basis: PositionContext, term: Term, heads: HeadsLike = None
) -> LiveEdit:
    """Context manager: replace a term by its mean over the batch at each cell, ``S - X + mean X``
    (at least two prompts)."""
    return _edit(model, basis, heads, averaging(terms_of(term)))


def per_head(choice: Mapping[tuple[int, int], Sequence[str]]) -> Change:
    """Each head keeps its own terms, with every term that has bias on either side."""

    def change(
        layer: LayerView, whole: Tensor, parts: ProjectedParts, heads: tuple[int, ...]
    ) -> Tensor:
        found = [weights_of(choice[layer.layer, head]) for head in heads]
        weight = torch.stack([torch.maximum(w, bias_terms()) for w, _ in found])
        bias = None if layer.bias is None else layer.bias[list(heads)]
        return weighted_score(parts, weight, bias, torch.tensor([a for _, a in found]))

    return change


def uniform() -> Change:
    """All scores zero: attention spread evenly over the allowed keys (and any sink)."""
    return lambda layer, whole, parts, heads: torch.zeros_like(whole)
