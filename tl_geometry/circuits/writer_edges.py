"""Which writers does each head read on its query, key and value side?
:func:`tl_geometry.composition` gives exact shares on data, what the weights alone suggest, two
nulls, and intervals over prompts.

Shares are those of :mod:`tl_geometry.scores.head_readers`. Nulls, each a share beside the
writer's own:

- *other*: what the writer wrote in another context at the same position. What depends on position
  alone is the same in both contexts, and so its own null: the cosine between the two shows it.
- *random*: the writer turned by a random orthogonal map R, the same at all tokens. The map keeps
  norms and angles of what it wrote and forgets the direction. With ``M = sum_i w_a[i] G[i]^T``, G
  what the head reads of the stream, the numerator is ``tr(R M)``. Its square has the mean
  ``|M|^2 / d_model`` over all R, and ``(u^T M v)^2 / d_model`` has the same mean over standard
  normal u and v. The null is the root of the mean over ``draws`` pairs (u, v): nothing is turned.

An interval is a delete-group jackknife over the prompts: the share without each of the groups in
turn. Nothing else is estimated from them, as a share has no basis: one set of sums by group gives
all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, seeded
from tl_geometry.base.errors import check_seed, choice, require
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS, LeftOut, jackknife_interval
from tl_geometry.corpus.passes import batches, cuts
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.decomposition.groups import group_borders, jackknife_blocks
from tl_geometry.models.batches import batch_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.parameters import upcast
from tl_geometry.models.reader import as_view
from tl_geometry.models.writers import GRAINS, Written, run_written, writer_names
from tl_geometry.scores.head_readers import (
    GROUPS,
    HEAD_SIDES,
    SHARES,
    Reads,
    WriterSums,
    context_products,
    first_kept,
)
from tl_geometry.scores.terms import BIAS
from tl_geometry.scores.writer_sweep import WriterShares


@dataclass(frozen=True, eq=False, kw_only=True)
class Composition(WriterShares):
    """Edges from writers to heads: one row for each reader, side and writer, the strongest writers
    of a side first.

    On the query and key side ``cs`` and ``gs`` are covariance and gain share of the writer in the
    head's scores; on the value side ``cs`` is its share in the head's output, without the reader's
    own constants, and less its mean over d_model where the norm takes that away. They sum to one
    over the parts of a side (with ALiBi to one less its share); ``"bias"`` is the reader's own
    constants. ``other_cs`` and ``other_gs`` are the shares of what the writer wrote in another
    context at the same position, ``cosine`` is the cosine of the two over all kept positions.
    ``random_cs`` and ``random_gs`` are the root mean square share of the randomly turned writer.
    ``cs_low`` to ``cs_high``, and those of ``gs``, are 95% intervals over prompts (NaN for fewer
    than 10). ``weights`` is the composition score of the weights alone for pairs of heads,
    ``|W_OV W_QK| / (|W_OV| |W_QK|)`` and the like (Elhage et al. 2021; canonical weights, norms and
    rotation left out). NaN where there is no such number, as for ``gs`` on the value side; zero for
    writers that come after the reader. ``wrote`` and ``writer_heads`` are block and head of each
    part, -1 for none. ``queries`` are the positions chosen as queries; it is empty where all count.
    """

    writer_heads: tuple[int, ...]
    weights: Float[Tensor, "head side part"]
    other_cs: Float[Tensor, "head side part"]
    other_gs: Float[Tensor, "head side part"]
    random_cs: Float[Tensor, "head side part"]
    random_gs: Float[Tensor, "head side part"]
    cs_low: Float[Tensor, "head side part"]
    cs_high: Float[Tensor, "head side part"]
    gs_low: Float[Tensor, "head side part"]
    gs_high: Float[Tensor, "head side part"]
    cosine: Float[Tensor, " part"]
    draws: int
    queries: tuple[int, ...] = ()
    sides: ClassVar = HEAD_SIDES
    table_values = (
        *("cs", "cs_low", "cs_high", "gs", "gs_low", "gs_high", "weights"),
        *("other_cs", "other_gs", "random_cs", "random_gs", "cosine"),
    )


def composition(
    model: ModelLike,
    tokens: TokensLike,
    *,
    heads: Sequence[Head] | Head | None = None,
    layers: Sequence[int] | int | None = None,
    parts: str = "writers",
    draws: int = 32,
    drop: int | None = None,
    queries: Sequence[int | str] | int | str | None = None,
    batch_size: int | None = None,
    prepend_bos: bool | None = None,
    progress: bool = True,
    seed: int = 0,
) -> Composition:
    """Q-, K- and V-composition on data: which writers each of ``heads`` reads on its query, key and
    value side, with exact shares, the composition score of the weights alone (Elhage et al. 2021),
    and two nulls.

    Shares have no unit; formulas in :mod:`tl_geometry.scores.head_readers`.

    Args:
        tokens: as :func:`tl_geometry.sweep_heads` takes them, at least two prompts.
        heads, layers: readers, all by default.
        parts: ``"writers"`` or ``"blocks"``.
        draws: pairs of random directions of the random null.
        drop: positions left out, as queries on all sides and as keys of scores (values of all
            positions count); by default a BOS token.
        queries: positions to count as queries, in place of all: numbers (-1 is the last) or names
            of :func:`tl_geometry.corpus.prompts`.
        batch_size: contexts of one batch, at least two.

    Intervals are over prompts: a jackknife leaves eight groups of neighbouring prompts out in turn
    (blocks of at least 8 prompts where there are four, as neighbours in a text resemble each
    other).

    Raises ``ReconstructionError`` where the writers do not sum to the stream, ``GeometryError``
    where no batch has two prompts: each is the null of the other.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> edges = tlg.composition(model, windows, heads="L1H0", progress=False)
    >>> edges.cs.sum(-1).round(decimals=3).tolist()
    [[1.0, 1.0, 1.0]]
    """
    draws, seed, view = checks.count(draws, "draws"), check_seed(seed, "seed"), as_view(model)
    choice(parts, GRAINS, "parts")
    chosen = checks.heads(heads, view.n_layers, view.n_heads, layers)
    order = sorted(chosen)
    source = as_tokens(view, tokens, prepend_bos=prepend_bos)
    rows = batch_of(batch_size, source.length, view.device)
    expected, got = "batches of at least 2 prompts", f"{len(source)} in batches of {rows}"
    require(min(rows, len(source)) > 1, "tokens", expected=expected, got=got)
    start = first_kept(source, drop)
    at = None if queries is None else _positions(queries, source, start)
    readers = {l: [head for layer, head in order if layer == l] for l, _ in order}
    edges = _Edges(view, readers, parts, start, at, len(source), draws, seed)
    for batch in batches(view, source, cuts(len(source), rows), progress=progress, seed=seed):
        add = partial(edges.add, batch.at.start)
        run_written(view, batch.tokens, list(readers), add, sample=batch.row)
    names = writer_names(view, max(readers), parts)
    pick = torch.tensor([order.index(head) for head in chosen])
    return Composition(
        provenance=view.provenance(source, window=(start, source.length), seed=seed),
        heads=chosen,
        parts=(BIAS, *(w.name for w in names)),
        wrote=(-1, *(w.layer for w in names)),
        writer_heads=(-1, *(w.head for w in names)),
        cosine=pad(edges.products[0] / edges.products[1], (1, 0), value=torch.nan),
        drop=start,
        draws=draws,
        queries=at or (),
        **{name: x[pick] for name, x in edges.finished(1 + len(names)).items()},
    )


class _Edges:
    """Sums in progress of all readers, by layer, and what the weights alone suggest."""

    def __init__(
        self,
        view: ModelView,
        readers: dict[int, list[int]],
        parts: str,
        start: int,
        queries: tuple[int, ...] | None,
        prompts: int,
        draws: int,
        seed: int,
    ) -> None:
        self.readers, self.parts, self.start, self.queries = readers, parts, start, queries
        directions = torch.randn(2, draws, view.d_model, generator=seeded(seed))
        self.write, self.read = directions.to(view.device)
        self.borders, self.d_model = torch.tensor(group_borders(prompts, GROUPS)[0]), view.d_model
        self.factor_of = cache(partial(_value_factor, view))  # each writer has many readers
        self.sums: dict[int, WriterSums] = {}
        self.weights: dict[int, Tensor] = {}
        self.products = torch.zeros(2, 1).double()

    def add(self, first: int, layer: LayerView, written: Written) -> None:
        """Take in one layer of the prompts from number ``first`` on."""
        l, readers = layer.layer, self.readers[layer.layer]
        reads = Reads.of(layer, self.start, readers, self.queries, values=True)
        places = first + torch.arange(len(layer.h))
        group = torch.bucketize(places, self.borders, right=True).to(layer.h.device)
        new = WriterSums.of(reads, written, self.parts, group, (self.write, self.read)).to("cpu")
        self.sums[l] = self.sums[l] + new if l in self.sums else new
        if l not in self.weights:
            own = weights_alone(reads, readers, layer, written, self.parts, self.factor_of)
            self.weights[l] = own
        if l == max(self.readers) and len(group) > 1:  # the last layer has all writers
            more = context_products(written, self.start, self.parts)
            self.products = self.products + more.cpu()

    def finished(self, width: int) -> dict[str, Float[Tensor, "head side part"]]:
        """Shares, nulls and bounds by the names of the result's fields, as wide as the last layer:
        zero for writers that come later."""
        fields: dict[str, list[Tensor]] = defaultdict(list)
        for l in self.readers:
            of_layer = {"weights": self.weights[l], **_shares(self.sums[l], self.d_model)}
            for name, x in of_layer.items():
                fields[name].append(pad(x, (0, width - x.shape[-1])).transpose(0, 1))
        return {name: torch.cat(layers) for name, layers in fields.items()}


def _positions(queries: Any, source: TokenWindows, start: int) -> tuple[int, ...]:
    """Chosen queries as positions."""
    given = (queries,) if isinstance(queries, str) else checks.several(queries)
    at = checks.indices([source.position(q) for q in given], source.length, "queries")
    expected = f"queries from {start} on"
    require(min(at) >= start, "queries", expected=expected, got=at, instead="drop=0")
    return at


# ---- intervals


def _intervals(sums: WriterSums) -> dict[str, Float[Tensor, "weight side head part"]]:
    """95% bounds of the shares: a jackknife over blocks of at least 8 prompts, or over single
    groups where there are not four such blocks, NaN for fewer than 10 prompts."""
    shares, blocks = sums.shares, jackknife_blocks(sums.counts)
    if int(sums.counts.sum()) < FEWEST or len(blocks) < FEWEST_GROUPS:
        return dict.fromkeys(("low", "high"), torch.full_like(shares, torch.nan))
    kept, sizes = (~blocks).double(), blocks.double() @ sums.counts.double()
    own = einsum(kept, sums.own, "b g, n s g h p -> b n s h p")
    total = einsum(kept, sums.total, "b g, n s g h -> b n s h")
    interval = jackknife_interval(shares, [LeftOut(sums.divided(own, total), sizes)])
    return {"low": interval.low, "high": interval.high}


def _shares(sums: WriterSums, d_model: int) -> dict[str, Float[Tensor, "side head part"]]:
    """Shares on data, of both nulls, and their bounds."""
    assert sums.random is not None  # composition takes nulls
    assert sums.other is not None
    assert sums.other_total is not None
    random = (sums.random.square().mean(2) / d_model).sqrt()
    found = {"{}": sums.shares, "random_{}": sums.divided(random, sums.total.sum(2))}
    found["other_{}"] = sums.divided(sums.other, sums.other_total)
    for null in ("random_{}", "other_{}"):
        found[null][..., 0] = torch.nan  # the reader's constants have no writer
    found |= {f"{{}}_{end}": bound for end, bound in _intervals(sums).items()}
    return {
        name.format(share): value
        for name, values in found.items()
        for share, value in zip(SHARES, values, strict=True)
    }


# ---- weights alone


def weights_alone(
    reads: Reads,
    heads: Sequence[int],
    layer: LayerView,
    written: Written,
    grain: str,
    factor_of: Callable[[int], Float[Tensor, "head d_head d_head"]],
) -> Float[Tensor, "side head part"]:
    """Composition scores of the weights alone (Elhage et al. 2021): the Frobenius norm of the
    product of two heads' matrices over the product of their norms; NaN for other writers.

    No matrix ``[d_model d_model]`` is formed. Where a product begins with W_V, any R with
    ``|R X| = |W_V X|`` for all X can stand for it; with ``P = (R W_O^writer) M`` of a reader's side
    M, and N what the head has on M's other side, ``|P N^T|^2 = <P^T P, N^T N>``.
    """
    q, k, v = reads.matrix
    norm_type, names = layer.norm.norm_type, [w.name for w in written.names(grain)]
    W_O = remove_mean(layer.weights.W_O[heads], norm_type)
    scores = q.new_full((len(HEAD_SIDES), len(heads), 1 + len(names)), torch.nan)
    for write in written.heads if grain == "writers" else ():
        W = factor_of(write.layer).to(q) @ remove_mean(write.W.to(q), norm_type)
        first = 1 + names.index(f"L{write.layer}H0")
        for side, (own, far) in enumerate(((q, k), (k, q), (v, rearrange(W_O, "h e d -> d h e")))):
            gram = einsum(far, far, "d h e, d h f -> h e f")
            P = einsum(W, own, "w f d, d h e -> h w f e")
            # rounding may leave less than 0
            squared = einsum(P @ gram.unsqueeze(1), P, "h w f e, h w f e -> h w").clamp(min=0)
            reader = einsum(own, gram, own, "d h e, h e f, d h f -> h").sqrt()
            sizes = reader.unsqueeze(1) * torch.linalg.vector_norm(W, dim=(1, 2))
            scores[side, :, first : first + len(W)] = squared.sqrt() / sizes
    return scores.cpu().double()


def _value_factor(view: ModelView, layer: int) -> Float[Tensor, "head d_head d_head"]:
    """R of a QR factorisation of W_V ``[d_model d_head]`` of each head, the gain and the centring
    of the norm in it: ``|R X| = |W_V X|`` for every X, and W_V need not have full rank."""
    norm, W_V = view.attention_norm(layer), view.weights(layer).W_V
    on_stream = norm.centre(W_V.mT * norm.gain.to(W_V))
    return torch.linalg.qr(upcast(on_stream).mT, mode="r")[1]
