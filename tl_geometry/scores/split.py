"""Which pairs of parts of the residual stream make up a head's attention scores? ``split_scores``
answers with a :class:`ScoreSplit`, which views draw; the report calls it too.

1. One forward pass gives each layer's input h and its frozen scales. With a normalised basis what
   is split is ``x = norm(h)`` without gain and bias: no norm scale is frozen.
2. h is split into additive parts: the mean and the constants of norm and projection (``bias``),
   ``pos``, ``cvec``, or the caller's own.
3. Each part is projected by itself to queries and keys, linearly because the scales are frozen. No
   part is computed as the remainder of the others, so that the sum in step 4 is a real check.
4. ``X_ab[i, j] = scale q_a[i] . k_b[j]`` are the terms. With ALiBi they sum to the model's scores
   before any soft cap, which is checked against the model's own: what does not add up is refused.

This is Song & Zhong 2023, Eq. 7, made exact; presets give what is printed and the published code.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.checks import Head
from tl_geometry.base.errors import fail, listed, require, within_budget
from tl_geometry.base.rows import KeyRanges, row_center
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import Check, ReconstructionReport
from tl_geometry.models.row_pass import no_rows, query_slices
from tl_geometry.models.writers import CONSTANTS
from tl_geometry.scores.blockwise import PlaneIndex
from tl_geometry.scores.families import Family, UserParts, Writers, family_of
from tl_geometry.scores.planes import HeadPlanes, PlanesLike, describe_planes
from tl_geometry.scores.share_table import COLUMNS, ShareTable
from tl_geometry.scores.split_request import check_basis, check_heads, each_layer, provenance_of
from tl_geometry.scores.splitter import PRESETS, HeadTerms, Splitter, masks_of
from tl_geometry.scores.sums import ShareSums, share_sums
from tl_geometry.scores.terms import ALIBI, TermResult, bias_label, term_names, term_pairs
from tl_geometry.scores.top_cells import TopCells, top_cells

ALL = slice(None)


class Terms(Mapping[tuple[str, str], Tensor]):
    """Terms ``[batch head query key]`` by (query part, key part) or ``"pos-cvec"``, each computed
    when it is asked for."""

    def __init__(self, split: ScoreSplit) -> None:
        self._split, alibi = split, split.bias is not None
        names = term_names(split.parts, alibi=alibi)
        self._pairs = dict(zip(names, term_pairs(split.parts, alibi=alibi), strict=True))

    def __getitem__(self, term: tuple[str, str] | str) -> Float[Tensor, "batch head query key"]:
        self._split.require_dense("terms")
        return self.rows(term, ALL)

    def pair(self, term: tuple[str, str] | str) -> tuple[str, str]:
        """A term as (query part, key part)."""
        pair = self._pairs.get(term) if isinstance(term, str) else term
        if pair is None or pair not in self._pairs.values():
            names = listed(list(self._pairs), "-".join(term) if isinstance(term, tuple) else term)
            expected, got = f'one of {names}, or a pair ("query part", "key part")', repr(term)
            fail("terms", expected=expected, got=got, instead="list(split.terms)")
        return pair

    def rows(
        self, term: tuple[str, str] | str, queries: slice
    ) -> Float[Tensor, "batch head query key"]:
        """One term at some query rows: ``key`` is all keys, ``query`` the rows of ``queries``."""
        split, pair = self._split, self.pair(term)
        if split.bias is not None and pair == (ALIBI, ALIBI):
            # a copy, as all other terms are: writing to one leaves the split as it is
            return split.bias[:, queries].expand(split.q.shape[1], -1, -1, -1).clone()
        query_part, key_part = (split.parts.index(part) for part in pair)
        return _products(split.q[query_part], split.k[key_part], queries)

    def __contains__(self, term: object) -> bool:
        return term in self._pairs or term in self._pairs.values()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._pairs.values())

    def __len__(self) -> int:
        return len(self._pairs)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreSplit(TermResult):
    """Attention scores of some heads as a sum of terms.

    ``q`` (with the score scale) and ``k`` are the projected parts, ``parts`` names them; ``heads``
    labels the head axis with (layer, head). ``bias`` is ALiBi, ``None`` without it. ``allowed`` is
    the mask as cells; ``mask`` holds the same, for a long prompt as ranges of keys. ``softcap`` is
    infinite and ``sinks`` (logits) minus infinite for heads without one. ``planes`` are the rotary
    planes of the heads: which coordinates turn together, and how fast (without a rotation all
    coordinates are one plane of frequency zero). ``scores`` are the model's own before any soft
    cap, held with ``preset="reference"`` only.

    ``checks`` are the reconstruction errors, ``reconstruction`` their summary. ``scale`` is A of
    the bounds, the largest product of the parts' absolute values
    (:func:`tl_geometry.models.reconstruction.reconstruction_bound`). Its table is that of
    :meth:`shares`, which the preset ``"reference"`` lacks (its terms do not sum to the scores).
    """

    heads: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    q: Float[Tensor, "part batch query head d_head"]
    k: Float[Tensor, "part batch key head d_head"]
    bias: Float[Tensor, "head query key"] | None
    mask: Bool[Tensor, "head query key"] | KeyRanges
    softcap: Float[Tensor, " head"]
    sinks: Float[Tensor, " head"]
    planes: HeadPlanes
    scores: Float[Tensor, "batch head query key"] | None = None
    checks: tuple[Check, ...] = ()
    scale: float = 0.0
    str_tokens: tuple[str, ...] = ()
    memory_budget: int = 2**31

    @property
    def allowed(self) -> Bool[Tensor, "head query key"]:
        """The keys that each query may attend to."""
        return self.mask[ALL].to(self.q.device)

    @property
    def terms(self) -> Terms:
        """The terms, lazily: ``split.terms["pos", "cvec"]`` is ``[batch head query key]``, query
        part first."""
        return Terms(self)

    def __getitem__(self, term: tuple[str, str] | str) -> Float[Tensor, "batch head query key"]:
        """One term: ``split["pos-cvec"]`` is ``split.terms["pos", "cvec"]``."""
        return self.terms[term]

    def on_planes(self, planes: PlanesLike) -> ScoreSplit:
        """The split restricted to some rotary planes: ``split.on_planes("near")``, ``"middle"``,
        ``"far"``, ``"pass"``, a number, a :class:`tl_geometry.scores.planes.Band` of wavelengths in
        tokens, or several of these. Every term becomes the part of it that these planes carry; over
        disjoint choices that cover all planes these parts add up to the term. ALiBi is in no plane.
        Total, pattern and shares are those of this part; ``checks`` stay those of the whole.
        """
        exact, got = self.provenance.preset == "exact", f"preset={self.provenance.preset!r}"
        require(exact, "on_planes", expected="preset='exact'", got=got)
        # to restrict q is enough: a product is zero where one factor is
        inside = self.planes.coordinates(self.planes.chosen(planes)).to(self.q)
        flag = f"rotary planes {describe_planes(planes)} alone"
        provenance = self.provenance.flagged(flag)
        return dataclasses.replace(self, q=self.q * inside, bias=None, provenance=provenance)

    @property
    def reconstruction(self) -> ReconstructionReport:
        """The worst reconstruction error of each kind over the layers, with its bound."""
        return ReconstructionReport.of(self.checks, self.scale)

    def total(self) -> Float[Tensor, "batch head query key"]:
        """Sum of all terms: the model's scores before any soft cap, -inf outside ``allowed``.

        With the presets ``"paper"`` and ``"reference"`` the terms do not sum to the scores:
        ``"paper"`` gives their sum, ``"reference"`` the model's own scores, as published.
        """
        self.require_dense("total")
        return self.total_rows(ALL)

    def centered(
        self, scores: Float[Tensor, "batch head query key"]
    ) -> Float[Tensor, "batch head query key"]:
        """Scores without the mean of their row over the allowed keys, which softmax ignores."""
        return row_center(scores, self.allowed)

    def summed(self) -> Float[Tensor, "batch head query key"]:
        """:meth:`total` at every cell, allowed or not."""
        return self.sum_of_terms() if self.scores is None else self.scores

    def sum_of_terms(self) -> Float[Tensor, "batch head query key"]:
        """Sum of all terms at every cell, allowed or not, whatever the preset."""
        self.require_dense("sum_of_terms")
        return self._sum_of_rows(ALL)

    def _sum_of_rows(self, queries: slice) -> Float[Tensor, "batch head query key"]:
        total = _products(self.q.sum(0), self.k.sum(0), queries)
        return total if self.bias is None else total + self.bias[:, queries]

    def total_rows(self, queries: slice) -> Float[Tensor, "batch head query key"]:
        """:meth:`total` of some query rows."""
        rows = self._sum_of_rows(queries) if self.scores is None else self.scores[:, :, queries]
        return torch.where(self.mask[:, queries].to(rows.device), rows, -torch.inf)

    def require_dense(self, what: str) -> None:
        """Raise ``BudgetError`` where one term as a matrix exceeds ``memory_budget``."""
        batch, length, heads = self.q.shape[1:4]
        size = batch * heads * length**2 * self.q.element_size()
        instead = "top_cells, shares, or fewer heads="
        within_budget(size, self.memory_budget, what, of="one term", instead=instead)

    def model_scores(self, queries: slice = ALL) -> Float[Tensor, "batch head query key"]:
        """Scores (of some query rows) as they enter the softmax: ``c tanh(total / c)`` where there
        is a soft cap c."""
        if queries == ALL:
            self.require_dense("model_scores")
        return self._capped(self.total_rows(queries))

    def _capped(self, total: Tensor) -> Float[Tensor, "batch head query key"]:
        cap = self.softcap[:, None, None]
        if bool(torch.isinf(cap).all()):
            return total
        # inf tanh(total / inf) is NaN, and c tanh(-inf / c) = -c would admit a forbidden key
        outside = torch.isinf(cap) | torch.isneginf(total)
        return torch.where(outside, total, cap * torch.tanh(total / cap))

    def pattern(self) -> Float[Tensor, "batch head query key"]:
        """Attention pattern: softmax over the allowed keys. Where a head has a sink, the sink takes
        part in the softmax and its share is left out, so that rows sum to less than one.

        With ``preset="reference"`` the first token is deleted from the keys, as in the published
        figure, although the model does attend to it.
        """
        self.require_dense("pattern")
        return self.pattern_rows(ALL)

    def pattern_rows(self, queries: slice) -> Float[Tensor, "batch head query key"]:
        """:meth:`pattern` of some query rows."""
        scores = self._capped(self.total_rows(queries))
        if self.provenance.preset == "reference":
            scores = scores.clone()
            scores[..., 0] = -torch.inf
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        pattern = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        nothing = torch.isneginf(scores).all(-1, keepdim=True)  # a row without an allowed key
        return pattern.masked_fill(nothing, 0.0)

    def shares(self, drop: int | None = None) -> ShareTable:
        """Covariance, gain and energy shares of terms and groups for each head; see
        :func:`tl_geometry.scores.sums.share_sums`.

        The first ``drop`` queries and keys are left out (by default those before the window of the
        basis); the attention paid to them stands beside the shares as ``dropped_mass``.
        """
        expected, got = "terms that sum to the scores", "preset='reference'"
        require(self._additive, "shares", expected=expected, got=got, instead="preset='exact'")
        start = (self.provenance.window or (0, 0))[0] if drop is None else drop
        layers = torch.tensor([layer for layer, _ in self.heads])
        indices_of = [torch.where(layers == layer)[0] for layer in layers.unique()]
        sums = ShareSums.beside(
            [self._layer_sums(indices, start).to("cpu") for indices in indices_of]
        )
        return ShareTable(
            provenance=self.provenance,
            heads=self.heads,
            parts=self.parts,
            # the sums are in the order of layers; `heads` may have another
            sums=sums.select(torch.cat(indices_of).argsort(), "head"),
            drop=start,
            dropped_mass=self._dropped_mass(start) if start else None,
            head_planes=self.planes,
            bias_label=self.bias_label,
        )

    def top_cells(self, k: int, term: tuple[str, str] | str | None = None) -> TopCells:
        """The ``k`` cells of each head and query row with the largest ``|X|`` of a term, or (by
        default) with the highest total score, which get the most attention.

        The result is exact. Rows are computed a few at a time, so that no term is held as a matrix;
        equal cells come in the order of their keys.

        >>> import tl_geometry as tlg
        >>> model = tlg.zoo.embedded()
        >>> windows = tlg.zoo.default_windows(model, 16, n=8)
        >>> basis = tlg.decompose(model, windows, progress=False)
        >>> split = tlg.split_scores(model, windows[:1], basis, heads="L1H0")
        >>> bool((split.top_cells(1).keys[0, 0, :, 0] == split.total()[0, 0].argmax(-1)).all())
        True
        """
        return top_cells(self, k, None if term is None else self.terms.pair(term))

    def _dropped_mass(self, drop: int) -> Float[Tensor, " head"]:
        """Attention that the kept queries pay to the first ``drop`` keys, mean over queries and
        prompts."""
        paid = [self.pattern_rows(rows)[..., :drop].sum(-1) for rows in query_slices(self.q[0])]
        return torch.cat(paid, 2)[:, :, drop:].mean((0, 2)).double().cpu()

    def _layer_sums(self, indices: Int[Tensor, " head"], drop: int) -> ShareSums:
        """Sums of some heads of one layer, which share mask, soft cap and rotation."""
        first, cap = indices[0], float(self.softcap[indices[0]])
        sums = share_sums(
            self.q[..., indices, :],
            self.k[..., indices, :],
            self._mask_of(int(first)),
            bias=None if self.bias is None else self.bias[indices],
            drop=drop,
            softcap=cap if math.isfinite(cap) else None,
            # only splits by writers have this part, and their pairs are too many for energies
            energy=CONSTANTS not in self.parts,
            planes=PlaneIndex(self.planes.plane[first], self.planes.theta.shape[1]),
        )
        return sums.pooled()

    def _mask_of(self, head: int) -> Bool[Tensor, "query key"] | KeyRanges:
        """The mask of one head."""
        if isinstance(self.mask, KeyRanges):
            return KeyRanges(self.mask.first[head], self.mask.stop[head], self.mask.keys)
        return self.mask[head]

    @property
    def _additive(self) -> bool:
        return self.provenance.preset != "reference"

    def columns(self) -> Sequence[str]:
        return COLUMNS

    def rows(self) -> Sequence[Sequence[object]]:
        return self.shares().rows()

    def __repr__(self) -> str:
        heads = ", ".join(f"L{layer}H{head}" for layer, head in self.heads[:8])
        more = f" and {len(self.heads) - 8} more" if len(self.heads) > 8 else ""
        checks = ", ".join(
            f"{name} off by {error:.2g} of {bound:.2g} allowed"
            for name, (error, bound) in self.reconstruction.checks.items()
        )
        shown = [self.provenance.line(), f"heads {heads}{more}", f"parts {', '.join(self.parts)}"]
        return f"ScoreSplit({'; '.join([*shown, checks])})"

    def _repr_html_(self) -> str:
        if self._additive:
            return super()._repr_html_()
        return html.table(("layer", "check", "error", "bound"), self.checks, caption=repr(self))


def split_scores(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext | None = None,
    *,
    layers: Sequence[int] | int | None = None,
    heads: Sequence[Head] | Head | None = None,
    parts: Sequence[str] | UserParts | Family = ("pos", "cvec"),
    preset: str = "exact",
    memory_budget: int = 2**31,
    prepend_bos: bool | None = None,
    cache: Any = None,
    device: torch.device | str = "cpu",
) -> ScoreSplit:
    """Split attention scores exactly into terms of position and context, or of any additive parts
    of the stream.

    ``q_a = ((p_a A / s) gain) W_Q`` for each part ``p_a`` of a layer's input, then rotated. A is
    the centring of LayerNorm (the identity for RMSNorm); the norm's scale s (and QK-norm's) is
    frozen at its value for the whole input. ``X_ab = scale q_a . k_b``; the constant
    ``(norm bias) W_Q + b_Q`` joins ``bias``.

    Args:
        tokens: prompts of equal length: a string or strings (with ``prepend_bos``), ids
            ``[position]`` or ``[batch position]``.
        basis: from :func:`tl_geometry.decompose` of the same model; not needed with the
            caller's own ``parts`` and with writers (shares then leave out a BOS token).
        layers, heads: which heads, ``(layer, head)`` or ``"L5H1"``; all of ``layers`` by default.
        parts: what the stream is split into, one of

            - ``("pos", "cvec")``, with ``bias`` holding mean and constants, or
              ``("pos", "ctx", "resid")``; either with ``"mean"`` first to keep the mean apart from
              the constants;
            - a mapping from names to tensors ``[batch position d_model]`` (or
              ``[layer batch position d_model]``, one for each block or each of ``layers``) that sum
              to the stream;
            - ``"writers"`` (each embedding, head and MLP that wrote the input) or ``"blocks"``
              (attention and MLP of a block as wholes), with ``"constants"`` for what is written
              whatever the tokens (:mod:`tl_geometry.models.writers`) and without energy shares;
            - a :class:`tl_geometry.scores.families.Family` of your own.
        preset: ``"exact"``; ``"paper"``: the equation as printed,
            ``p_a W_Q W_K^T p_b / sqrt(d_head)`` without LayerNorm, biases and rotation;
            ``"reference"``: the published code, each of ``pos`` and ``h - pos`` through the whole
            LayerNorm and biases by itself. The last two do not sum to the scores.
        memory_budget: bytes, 2 GiB by default.
        cache: a TransformerLens ``ActivationCache`` of these tokens, in place of running the model.

    Frozen scales make terms attributions, not interventions: pos-pos of a token still depends on
    its norm here. With a basis of ``decompose(..., normalize=True)`` the parts are those
    of the normed input, ``q_a = (p_a gain) W_Q``, and nothing of the norm is frozen (a QK-norm's
    scale still is): the same scores, other terms. Then (bias, bias) of a rotary model without
    QK-norm is exactly a function of the offset i - j, and is shown as "relative position"; on a raw
    basis it is the "mean-mean" term.

    Prompts of thousands of tokens run in blocks of query rows, and only their queries and keys are
    kept, so that memory grows with the length, not with its square. ``.shares()`` and
    ``.top_cells(k)`` work; a term as a matrix may raise ``BudgetError``.

    Raises ``ReconstructionError`` where the terms do not sum to the model's scores; ``BudgetError``
    where the terms as matrices (of long prompts and of writers: queries and keys) would exceed
    ``memory_budget``; ``GeometryError`` for a basis of another model, positions beyond the basis,
    parts that do not sum, and a normalised basis with another preset than ``"exact"``.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> split = tlg.split_scores(model, windows[:2], basis, heads="L1H0")
    >>> split.reconstruction.adds_up, split.terms["pos", "cvec"].shape
    (True, torch.Size([2, 1, 16, 16]))
    """
    view = as_view(model)
    checks.choice(preset, PRESETS, "preset")
    prompts = token_rows(view, tokens, prepend_bos=prepend_bos)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    layers_of = tuple(dict.fromkeys(l for l, _ in chosen))
    family = family_of(view, parts, basis, layers_of)
    splitter = Splitter(view, family, layers_of, preset)
    by_writers = isinstance(family, Writers)
    # a cache holds whole prompts, and "reference" keeps the model's scores as a matrix
    on_rows = no_rows if preset == "exact" and cache is None else None
    as_factors = by_writers or (on_rows is not None and view.in_rows(prompts.tokens.shape[1]))
    size = _size(view, prompts, len(chosen), len(splitter.names), as_factors)
    check_basis(view, prompts, basis)
    check_heads(size, memory_budget, len(chosen))
    layer_terms: list[HeadTerms] = []

    def on_layer(layer: LayerView) -> None:
        heads_here = [h for l, h in chosen if l == layer.layer]
        layer_terms.append(splitter.terms_of(layer, heads_here, device))

    each_layer(view, prompts, cache, splitter.layers, on_layer, family, on_rows)
    order = [(terms.layer, h) for terms in layer_terms for h in terms.heads]
    # layers come in the order of the forward pass, the result in the order asked for
    pick = torch.tensor([order.index(head) for head in chosen], device=device)

    def joined(field: str, axis: int) -> Tensor:
        """A field of all layers, its heads in the order asked for."""
        values = [getattr(terms, field) for terms in layer_terms]
        return torch.cat(values, dim=axis).index_select(axis, pick)

    def optional(field: str, axis: int) -> Tensor | None:
        missing = any(getattr(terms, field) is None for terms in layer_terms)
        return None if missing else joined(field, axis)

    flags, normalized = splitter.flags, family.normalized
    rotary, relative = (all(getattr(t, x) for t in layer_terms) for x in ("rotary", "relative"))
    return ScoreSplit(
        provenance=provenance_of(
            view, prompts, basis, preset, flags, normalized, after_bos=by_writers
        ),
        heads=chosen,
        parts=splitter.names,
        q=joined("q", 3),
        k=joined("k", 3),
        bias=None if preset == "paper" else optional("bias", 0),
        mask=masks_of(layer_terms, pick),
        softcap=joined("softcap", 0),
        sinks=joined("sinks", 0),
        planes=_planes_of(layer_terms, pick),
        scores=optional("scores", 1),
        checks=tuple(check for terms in layer_terms for check in terms.checks),
        scale=max(terms.scale for terms in layer_terms),
        str_tokens=prompts.str_tokens,
        memory_budget=memory_budget,
        bias_label=bias_label(rotary=rotary, relative=relative),
    )


def _products(q: Tensor, k: Tensor, queries: slice) -> Float[Tensor, "batch head query key"]:
    """Products of some queries with all keys."""
    pattern = "batch query head e, batch key head e -> batch head query key"
    return einsum(q[:, queries], k, pattern)


def _size(view: ModelView, prompts: TokenWindows, heads: int, parts: int, factors: bool) -> int:
    """Bytes that a split may come to hold: all terms as matrices, or with ``factors`` queries and
    keys alone (for long prompts, and for writers, whose terms are never formed all at once)."""
    queries = len(prompts) * heads * prompts.tokens.shape[1]
    numbers_per_query = parts**2 * prompts.tokens.shape[1]
    if factors:
        # of few heads the parts before projection, [part batch position d_model], are larger
        numbers_per_query = 2 * parts * max(view.d_head, view.d_model // heads)
    # half precision is computed in float32
    return numbers_per_query * queries * max(4, view.dtype.itemsize)


def _planes_of(layers: Sequence[HeadTerms], pick: Int[Tensor, " head"]) -> HeadPlanes:
    """The rotary planes of the chosen heads."""
    planes = [terms.planes for terms in layers for _ in terms.heads]
    return HeadPlanes.of([planes[i] for i in pick.tolist()], layers[0].q.shape[2])
