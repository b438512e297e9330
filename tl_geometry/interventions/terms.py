"""Does a head use a term of its scores that was measured? Remove, keep or replace the term in a
live model (:func:`remove_term`, :func:`keep_term`, :func:`mean_term`);
:mod:`~tl_geometry.interventions.causal` measures under the same edits.

A term is named as in a split: ``"pos-cvec"`` (query part first), ``("pos", "cvec")``,
``"alibi-alibi"``, a group (``"position"``, ``"content"``, ``"mixed"``), or several of these. Terms
are those of the running forward pass: after an edit in an early layer, a later one has other terms.
With S the scores of a head and X the term:

    remove      S - X
    keep        X + the terms with bias on either side
    mean        S - X + (mean of X over the batch at each cell)
    swap        S - X + X', X' the term of another prompt at the same positions
    shrink      (1 - a) S, with a the covariance share of X in the prompt: it takes as much
                covariance with S away as removing X does, but from all terms evenly

What a kept term adds shows in comparison with the bias terms alone,
``keep_term(model, basis, (), heads)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.base.rows import row_center
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.interventions.head_edits import (
    Heads,
    HeadsLike,
    bias_of,
    by_layer,
    edit_of_heads,
    from_another_prompt,
    require_several,
)
from tl_geometry.models.batches import SAMPLED
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.hook_points import PassTokens
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import Edit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.verify import some_queries
from tl_geometry.scores.projection import PARTS, ProjectedParts, project_basis, split_heads
from tl_geometry.scores.splitter import rounding_flags
from tl_geometry.scores.terms import ALIBI, GROUPS, group_of, term_names

Term = str | tuple[str, str] | Sequence[str | tuple[str, str]]
"""One term, one group, or several."""
BIAS_TERMS = tuple(name for name in term_names(PARTS) if "bias" in name.split("-"))
"""Terms with mean and constants on either side. They stay where a term is kept: they belong to any
input."""


def terms_of(term: Term) -> tuple[str, ...]:
    """Names of the terms that ``term`` stands for, each once.

    >>> terms_of("content"), terms_of([("pos", "pos"), "cvec-pos"])
    (('cvec-cvec',), ('pos-pos', 'cvec-pos'))
    """
    all_names = term_names(PARTS, alibi=True)
    # ("pos", "cvec") is one term, ("position", "content") are two groups
    is_pair = (
        isinstance(term, tuple)
        and len(term) == 2
        and all(isinstance(t, str) and t in (*PARTS, ALIBI) for t in term)
    )
    items: Sequence[Any] = [term] if isinstance(term, str) or is_pair else list(term)
    names: list[str] = []
    for item in items:
        name = "-".join(item) if isinstance(item, tuple) else item
        if name in GROUPS:
            names += [member for member in all_names if group_of(member) == name]
        else:
            names.append(checks.choice(name, [*all_names, *GROUPS], "term"))
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, eq=False)
class RunningScores:
    """Scores of some heads of a layer in the running forward pass, with the parts of their queries
    and keys."""

    layer: LayerView
    heads: tuple[int, ...]
    total: Float[Tensor, "batch head query key"]
    parts: ProjectedParts

    def term(self, names: Sequence[str]) -> Float[Tensor, "batch head query key"]:
        """The sum of some terms, the same ones for every head."""
        return self.terms([names] * len(self.heads))

    def terms(self, names: Sequence[Sequence[str]]) -> Float[Tensor, "batch head query key"]:
        """The sum of the terms named for each head, and of ALiBi where it is named.

        It is ``sum_ab w_ab q_a . k_b`` with w = 1 for a named term and 0 for others. The weights
        are applied to the keys, so that one matrix product gives the sum over a and b.
        """
        named = [[float(name in chosen) for name in term_names(PARTS)] for chosen in names]
        weight = torch.tensor(named).view(-1, len(PARTS), len(PARTS))  # [head query_part key_part]
        q, k = self.parts
        keys = einsum(weight.to(k), k, "h a c, c b j h e -> b h j a e")
        queries = rearrange(q, "a b i h e -> b h i (a e)")
        scores = queries @ rearrange(keys, "b h j a e -> b h (a e) j")
        bias = bias_of(self.layer, self.heads)
        if bias is None:
            return scores
        alibi = torch.tensor([float(f"{ALIBI}-{ALIBI}" in chosen) for chosen in names])
        return scores + alibi.to(scores)[:, None, None] * bias


Change = Callable[[RunningScores], Float[Tensor, "batch head query key"]]
"""New scores from those of the running pass."""
Note = Callable[[Float[Tensor, "batch head"]], None]
"""Receives a number per prompt and head of a pass."""


def removing(names: Sequence[str]) -> Change:
    """``S - X``."""
    return lambda run: run.total - run.term(names)


def keeping(names: Sequence[str]) -> Change:
    """``X`` and every term with bias on either side."""
    return lambda run: run.term([*names, *BIAS_TERMS])


def per_head(choice: Mapping[tuple[int, int], Sequence[str]]) -> Change:
    """Each head keeps its own terms, with every term that has bias on either side."""
    return lambda run: run.terms(
        [[*choice[run.layer.layer, head], *BIAS_TERMS] for head in run.heads]
    )


def uniform() -> Change:
    """All scores zero: attention spread evenly over the allowed keys (and any sink)."""
    return lambda run: torch.zeros_like(run.total)


def averaging(names: Sequence[str]) -> Change:
    """``S - X + mean of X over the batch``."""

    def change(run: RunningScores) -> Tensor:
        require_several(len(run.total), "mean_term")
        term = run.term(names)
        return run.total - term + term.mean(0, keepdim=True)

    return change


def swapping(names: Sequence[str], seed: int, note: Note | None = None) -> Change:
    """``S - X + X'``, X' the same term of another prompt of the batch at the same positions.

    ``note`` receives the cosines of term and replacement. Near one the swap changes nothing
    (pos-pos without rotation hardly differs between prompts). Rows are centred first, because the
    softmax does not see a constant added to a row.
    """

    def change(run: RunningScores) -> Tensor:
        term = run.term(names)
        other = from_another_prompt(term, seed, "swap")
        if note is not None:
            allowed = run.layer.allowed.to(term.device)
            here, there = row_center(term, allowed), row_center(other, allowed)
            norms = [torch.linalg.vector_norm(cells, dim=(-2, -1)) for cells in (here, there)]
            note(_ratio((here * there).sum((-2, -1)), norms[0] * norms[1]))
        return run.total - term + other

    return change


def shrinking(names: Sequence[str], drop: int, note: Note | None = None) -> Change:
    """``(1 - a) S``, with a the covariance share ``sum X~ . S~ / sum S~^2`` of the term in each
    prompt and head (rows centred, keys and queries from ``drop`` on); ``note`` receives a."""

    def change(run: RunningScores) -> Tensor:
        allowed = run.layer.allowed.to(run.total.device)[drop:, drop:]
        term, score = (
            row_center(cells[..., drop:, drop:].double(), allowed)
            for cells in (run.term(names), run.total)
        )
        share = _ratio((term * score).sum((-2, -1)), score.square().sum((-2, -1)))
        if note is not None:
            note(share)
        return run.total * (1 - share.to(run.total))[..., None, None]

    return change


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """A ratio that is zero where its denominator (a size) is."""
    return numerator / torch.where(denominator > 0, denominator, torch.inf)


def edits_for(view: ModelView, basis: PositionContext, heads: Heads, change: Change) -> list[Edit]:
    """One edit of scores for each layer that has chosen heads. In every pass the BOS token of the
    prompts must be as in the basis; prompts that begin with two are flagged."""
    require_basis(basis)
    basis.check_model(view)
    basis.require_identifiable("interventions")

    def check_tokens(tokens: PassTokens | None) -> str | None:
        if tokens is None or view.bos_id is None:
            return None
        is_bos = tokens.are(torch.full(tokens.shape, view.bos_id))[:, :2]
        basis.check_model(view, bool(is_bos[:, 0].all()))
        twice = is_bos.shape[1] == 2 and bool(is_bos.all(-1).any())
        return "prompts that begin with two BOS tokens" if twice else None

    return [
        _layer_edit(basis, at, chosen, change, check_tokens)
        for at, chosen in by_layer(heads).items()
    ]


def _layer_edit(
    basis: PositionContext,
    at: int,
    heads: tuple[int, ...],
    change: Change,
    check_tokens: Callable[[PassTokens | None], str | None],
) -> Edit:
    """The edit of one layer; where rounding of the parts is large, it is flagged or refused.
    Rounding is judged on a sample of queries: all would cost too much in every pass."""
    basis.index(at)  # refuses a layer that the basis does not have
    flags: list[str] = []

    def scores(layer: LayerView, total: Tensor) -> Tensor:
        parts = running_parts(layer, basis, heads)
        with torch.no_grad():
            queries = some_queries(layer.h.shape[1], SAMPLED)
            flags.extend(rounding_flags(layer, parts.q, parts.k, queries, heads))
        return change(RunningScores(layer, heads, total, parts))

    return Edit(at, heads, scores, check_tokens, flags=flags)


def running_parts(layer: LayerView, basis: PositionContext, heads: Sequence[int]) -> ProjectedParts:
    """Parts of queries and keys of some heads in the running forward pass, from the weights as they
    are now; gradients pass."""
    length = layer.h.shape[1]
    expected = f"at most {basis.length} positions, as the basis has seen"
    instead = "decompose(...) on windows of this length"
    require(length <= basis.length, "tokens", expected=expected, got=length, instead=instead)
    return split_heads(layer, project_basis(layer, basis, length), list(heads))


def _edit(model: ModelLike, basis: PositionContext, heads: HeadsLike, change: Change) -> LiveEdit:
    return edit_of_heads(model, heads, lambda view, chosen: edits_for(view, basis, chosen, change))


def remove_term(
    model: ModelLike, basis: PositionContext, term: Term, heads: HeadsLike = None
) -> LiveEdit:
    """Context manager: run the live model with a term taken out of the scores of ``heads`` (all for
    ``None``), ``S - X``.

    ``with remove_term(model, basis, "cvec-cvec", "L5H1"): model(tokens)``. Inside, the model is one
    whose heads attend by S - X. X is the term of the stream as the user's hooks leave it: a patched
    stream gives the patched term. Hooks and caches at scores, pattern and z see the edited ones,
    and gradients pass. The model is as before on exit.

    ``with ... as edit`` gives an :class:`~tl_geometry.models.live_edits.OpenEdit`, whose
    ``unedited`` names the points that cannot show the edit. The same edit for one pass, among other
    hooks: ``model.run_with_hooks(tokens, fwd_hooks=edit.hooks())``
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
