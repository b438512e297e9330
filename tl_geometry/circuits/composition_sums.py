"""Which sums does :func:`tl_geometry.composition` keep while prompts go by? For the heads of one
layer, by group of prompts: numerators and totals of the shares of every writer, and of two nulls.

Nulls, each as a share beside the writer's own:

- *other*: what the writer wrote in another context at the same position. What depends on position
  alone is the same in both contexts, and so its own null: the cosine between the two shows it.
- *random*: the writer turned by a random orthogonal map R, the same at all tokens. The map keeps
  norms and angles of what it wrote and forgets the direction. With ``M = sum_i w_a[i] g[i]^T``, g
  what the head reads of the stream, the numerator is ``tr(R M)``. Its square has the mean
  ``|M|^2 / d_model`` over all R, and ``(u^T M v)^2 / d_model`` has the same mean over standard
  normal u and v. The null is the root of the mean over ``draws`` pairs (u, v): nothing is turned.

An interval is a delete-group jackknife over the prompts: the share without each of the groups in
turn. Nothing else is estimated from them, as a share has no basis: one set of sums by group gives
all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.base.intervals import FEWEST, FEWEST_GROUPS, LeftOut, jackknife_interval
from tl_geometry.base.transfer import on_cpu
from tl_geometry.circuits.head_readers import Reader, numerators, random_numerators
from tl_geometry.circuits.writer_sweep import SHARES, score_cotangents
from tl_geometry.decomposition.groups import jackknife_blocks
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.parameters import upcast
from tl_geometry.models.writers import Written, writer_names

HEAD_SIDES = ("query", "key", "value")
"""Sides of a head that read writers."""
NULLS = ("other", "random")
"""Null shares, as described above."""
GROUPS = 8
"""Groups of prompts that are left out in turn, as many as a basis has by default."""


class CompositionSums:
    """Sums in progress of the readers of one layer: numerators of the shares on data (``by_data``)
    and what divides them, by group of prompts; numerators of both nulls; products of what a writer
    wrote in two contexts.

    ``borders`` are the first prompts of all groups but the first.
    """

    def __init__(
        self,
        view: ModelView,
        layer: int,
        heads: Sequence[int],
        grain: str,
        directions: tuple[Float[Tensor, "sample d_model"], Float[Tensor, "sample d_model"]],
        queries: Sequence[int] | None,
        value_factor: Callable[[int], Float[Tensor, "head d_head d_head"]],
        keep: int,
        last: bool,
        borders: Sequence[int],
    ) -> None:
        self.view, self.layer, self.heads, self.grain = view, layer, list(heads), grain
        self.directions, self.queries = directions, queries
        self.value_factor, self.keep, self.last = value_factor, keep, last
        self.borders = tuple(borders)
        self.null_batches = 0  # of at least two contexts, so that one can stand in for another
        self.width = 1 + len(writer_names(view, layer, grain))
        shape = len(SHARES), len(HEAD_SIDES), len(heads), self.width
        groups, double = 1 + len(self.borders), torch.float64
        self.counts = torch.zeros(groups, dtype=torch.int64)
        self.by_data = torch.zeros(groups, *shape, dtype=double)
        self.total = torch.zeros(groups, *shape[:-1], dtype=double)
        self.other, self.other_total = (torch.zeros(s, dtype=double) for s in (shape, shape[:-1]))
        self.random = torch.zeros(len(directions[0]), *shape, dtype=double)
        self.products = torch.zeros(2, self.width, dtype=double)
        self.weight_scores: Tensor | None = None

    def add(self, layer: LayerView, written: Written, drop: int) -> None:
        """Take in one batch."""
        queries = self.queries
        early, expected = [q for q in queries or () if q < drop], f"queries from {drop} on"
        require(not early, "queries", expected=expected, got=early, instead="drop=0")
        cotangents = score_cotangents(layer, drop, self.heads, queries)
        value, energy = _value_cotangents(layer, self.view, drop, self.heads, queries)
        several, pieces = len(layer.h) > 1, list(self._pieces(len(layer.h)))
        sides = (("q", cotangents.query), ("k", cotangents.key), ("v", value))
        readers = [
            Reader.of(layer, which, side_cotangents, self.heads, queries if which == "q" else None)
            for which, side_cotangents in sides
        ]
        contexts = [piece for _, piece in pieces]
        options = {"others": several, "keep": self.keep, "contexts": contexts}
        by_side = numerators(readers, written, self.grain, **options)
        by_chance = random_numerators(readers, written, self.grain, self.directions)
        totals = [cotangents.total, cotangents.total, energy.unsqueeze(0)]
        constants = [reader.constant for reader in readers]
        # the share in a head's output leaves its constant write out
        constants[-1] = torch.zeros_like(constants[-1])
        moved = on_cpu([*by_side, *by_chance, *constants, *totals])
        by_kind = [moved[i : i + len(readers)] for i in range(0, len(moved), len(readers))]
        for s, (samples, random, constant, total) in enumerate(zip(*by_kind, strict=True)):
            n = slice(samples.shape[2])  # the value side has no gain
            for (group, rows), (by_writer, *_) in zip(pieces, samples, strict=True):
                own = constant[:, rows].sum(1).unsqueeze(-1)
                self.by_data[group, n, s] += torch.cat([own, by_writer], -1)
                self.total[group, n, s] += total[:, rows].sum(1)
            # part 0 is the reader's constants, of which there is no null
            self.random[:, n, s, :, 1:] += random
            if several:
                self.other[n, s, :, 1:] += samples[:, -1].sum(0)
                self.other_total[n, s] += total.sum(1)
        for group, rows in pieces:
            self.counts[group] += rows.stop - rows.start
        self.null_batches += several
        if several and self.last:  # the last layer has the cosines of all writers
            self.products[:, 1:] += _products(written, drop, self.grain).cpu()
        if self.weight_scores is None and self.grain == "writers":
            self.weight_scores = self._weights_alone(layer, written, readers)

    def _pieces(self, size: int) -> Iterator[tuple[int, slice]]:
        """The groups in the next ``size`` prompts, and which of these are in each."""
        start = int(self.counts.sum())
        edges = [0, *(b - start for b in self.borders), size]
        for group, (first, last) in enumerate(pairwise(min(max(e, 0), size) for e in edges)):
            if first < last:
                yield group, slice(first, last)

    def _weights_alone(
        self, layer: LayerView, written: Written, readers: Sequence[Reader]
    ) -> Float[Tensor, "head side part"]:
        """Composition scores of the weights alone (Elhage et al. 2021): the Frobenius norm of the
        product of two heads' matrices over the product of their norms.

        Where a product begins or ends with a matrix A, any R with ``|R X| = |A X|`` for all X can
        stand for it: no matrix ``[d_model d_model]`` is formed. With R of :func:`value_factor_of` a
        writer and a reader's side make ``P = (R W_O^writer) M^reader``, and what the reader has on
        its other side gives the norm ``|P R_other^T| = sqrt(<P^T P, G>)``,
        ``G = R_other^T R_other``."""
        shape = len(self.heads), len(HEAD_SIDES), self.width
        out = torch.full(shape, torch.nan, dtype=torch.float64)
        # in the model's dtype: norms are sums of squares, which hardly cancel
        q, k, v = (reader.matrix for reader in readers)
        W_O = self.view.weights(layer.layer).W_O[self.heads].to(q)
        W_O = remove_mean(W_O, layer.norm.norm_type)
        gram_q = einsum(q, q, "d h e, d h f -> h e f")
        gram_o = einsum(W_O, W_O, "h e d, h f d -> h e f")
        # no heads share queries, so that R of the keys can be multiplied into them beforehand
        R_k = torch.linalg.qr(rearrange(k, "d h e -> h d e"), mode="r")[1]
        query_key = einsum(q, R_k, "d h e, h f e -> d h f")
        # heads that share keys and values share P
        group_size = self.view.n_heads // self.view._layers.key_heads(layer.layer)
        shared = torch.tensor([head // group_size for head in self.heads])
        groups = shared.unique(return_inverse=True)[1].tolist()
        firsts = [groups.index(group) for group in range(max(groups) + 1)]
        query_key_norm = torch.linalg.vector_norm(query_key, dim=(0, 2))
        value_norm = einsum(v, gram_o, v, "d h e, h e f, d h f -> h").sqrt()
        reads = torch.stack([query_key_norm, query_key_norm, value_norm])
        names = [w.name for w in written.names()]
        for writers in written.heads:
            W = self.value_factor(writers.layer).to(q) @ remove_mean(
                writers.W.to(q), layer.norm.norm_type
            )
            size = torch.linalg.vector_norm(W, dim=(1, 2))
            rows = W.flatten(0, 1)
            on_query = (rows @ query_key.flatten(1)).view(*W.shape[:2], *query_key.shape[1:])
            norms = [torch.linalg.vector_norm(on_query, dim=(1, 3))]
            for side, gram in ((k, gram_q), (v, gram_o)):
                P = rearrange(
                    rows @ side[:, firsts].flatten(1),
                    "(w f) (r e) -> w r f e",
                    w=len(W),
                    f=W.shape[1],
                    r=len(firsts),
                )
                squared = ((P.mT @ P)[:, groups] * gram).sum((-2, -1))
                norms.append(squared.clamp(min=0).sqrt())  # rounding may leave less than 0
            sizes = einsum(reads, size, "s r, w -> r s w")
            scores = rearrange(norms, "s w r -> r s w") / torch.where(sizes > 0, sizes, torch.nan)
            first = names.index(f"L{writers.layer}H0") + 1
            out[:, :, first : first + len(W)] = scores.cpu()
        return out

    def weights(self) -> Float[Tensor, "head side part"]:
        """Composition scores of the weights alone; NaN where blocks are the parts."""
        none = torch.full_like(self.other[0].transpose(0, 1), torch.nan)
        return none if self.weight_scores is None else self.weight_scores

    def share(self, share: str, null: str = "") -> Float[Tensor, "head side part"]:
        """A share on data, or that of one of :data:`NULLS`."""
        n = SHARES.index(share)
        total = self.other_total if null == "other" else self.total.sum(0)
        total = _divisor(total[n])
        if null == "random":
            mean_square = self.random[:, n].square().mean(0) / self.view.d_model
            values = mean_square.sqrt() / total
        else:
            values = (self.other if null == "other" else self.by_data.sum(0))[n] / total
        if null:
            values[..., 0] = torch.nan  # the reader's constants have no writer
        return values.transpose(0, 1)

    def bounds(self, share: str) -> tuple[Tensor, Tensor]:
        """Lower and upper 95% bound ``[head side part]`` of a share: a jackknife over blocks of at
        least 8 prompts, or over single groups where there are not four such blocks. NaN for fewer
        than 10 prompts, and for a corpus whose length was not known."""
        n = SHARES.index(share)
        blocks = jackknife_blocks(self.counts)
        if int(self.counts.sum()) < FEWEST or len(blocks) < FEWEST_GROUPS:
            unknown = torch.full_like(self.other[n].transpose(0, 1), torch.nan)
            return unknown, unknown
        kept = (~blocks).double()
        values, totals = self.by_data[:, n], self.total[:, n]
        left_out = einsum(kept, values, "b g, g s h p -> b s h p")
        left_out = left_out / _divisor(einsum(kept, totals, "b g, g s h -> b s h"))
        whole = values.sum(0) / _divisor(totals.sum(0))
        sizes = blocks.double() @ self.counts.double()
        interval = jackknife_interval(whole, [LeftOut(left_out, sizes)])
        return interval.low.transpose(0, 1), interval.high.transpose(0, 1)

    def cosine(self) -> Float[Tensor, " part"]:
        """Cosine of what each writer wrote in two contexts at the same positions."""
        size = torch.where(self.products[1] > 0, self.products[1], torch.nan)
        return self.products[0] / size


def _divisor(total: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch 1"]:
    """Totals as what divides the shares of all parts: NaN where there is nothing to explain."""
    return torch.where(total > 0, total, torch.nan).unsqueeze(-1)


def _value_cotangents(
    layer: LayerView,
    view: ModelView,
    drop: int,
    heads: Sequence[int],
    queries: Sequence[int] | None,
) -> tuple[Float[Tensor, "1 batch key head d_head"], Float[Tensor, "batch head"]]:
    """Cotangents of the values (times a part of them they give ``sum o_a . o``), and
    ``sum o . o`` of each context."""
    weights, norm = view.weights(layer.layer), layer.norm
    require(layer.pattern is not None and layer.z is not None, "layer", expected="z", got="none")
    assert layer.pattern is not None
    assert layer.z is not None
    rows = slice(drop, None) if queries is None else list(queries)
    pattern = layer.pattern[:, heads][:, :, rows].to(layer.h)
    W_O = remove_mean(weights.W_O[heads].to(layer.h), norm.norm_type)
    # attention to all keys together: below 1 with a sink
    constant_z = layer.v_constant[:, rows][:, :, heads] * pattern.sum(-1).mT.unsqueeze(-1)
    z = layer.z[:, rows][:, :, heads] - constant_z
    out = einsum(z, W_O, W_O, "b i h e, h e d, h f d -> b i h f")
    energy = (z.double() * out.double()).sum((1, 3))
    return einsum(pattern, out, "b h i j, b i h e -> b j h e").unsqueeze(0), energy


def _products(written: Written, drop: int, grain: str) -> Float[Tensor, "2 part"]:
    """``sum w . w'`` and ``sum w . w`` of each writer, w' of the context before in the batch."""
    products: dict[str, Tensor] = {}
    positions = slice(drop, None)
    for name, x in {**written.dense, "constants": written.constants}.items():
        x = x[:, positions].double()
        products[name] = torch.stack([(x * x.roll(1, 0)).sum(), x.square().sum()])
    for heads in written.heads:
        z = (heads.z * heads.scale[..., None, None])[:, positions]
        if grain == "blocks":
            x = einsum(z, heads.W, "b i h e, h e d -> b i d").double()
            products[f"attn{heads.layer}"] = torch.stack([(x * x.roll(1, 0)).sum(), (x * x).sum()])
            continue
        gram = einsum(heads.W, heads.W, "h e d, h f d -> h e f")
        through = einsum(z, gram, "b i h e, h e f -> b i h f").double()
        pair = torch.stack([(through * y).sum((0, 1, 3)) for y in (z.roll(1, 0), z)])
        products |= {f"L{heads.layer}H{h}": x for h, x in enumerate(pair.unbind(-1))}
    return torch.stack([products[w.name] for w in written.names(grain)], -1)


def value_factor_of(view: ModelView, layer: int) -> Float[Tensor, "head d_head d_head"]:
    """R of a QR factorisation of W_V ``[d_model d_head]`` of each head, the gain and the centring
    of the norm in it: ``|R X| = |W_V X|`` for every X, and W_V need not have full rank."""
    norm, W_V = view.attention_norm(layer), view.weights(layer).W_V
    on_stream = norm.centre(W_V.mT * norm.gain.to(W_V))
    return torch.linalg.qr(upcast(on_stream).mT, mode="r")[1]
