"""Which features of a dictionary does a head read? ``feature_shares`` splits its scores exactly by
the features of a sparse autoencoder of the block's input, ``x = sum_f a_f d_f + b_dec + error``,
with the share of the error first.

A head's scores are bilinear in these parts like in any others, so that shares on the query and the
key side are those of :mod:`tl_geometry.circuits.head_readers`, feature by feature. For pairs of
features, ``X_fg[i, j] = scale a_f[i] a_g[j] <q(d_f), k(d_g)>`` is formed for the active ones of
each cell alone, and the largest of each cell are summed over a corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, describe
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.circuits.dictionaries import Dictionary
from tl_geometry.circuits.head_readers import HEAD_SIDES, SHARES, Cells, Reads, first_kept
from tl_geometry.circuits.prompt_pairs import counted
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.batches import batch_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.scores.corpus_pass import CorpusPass
from tl_geometry.scores.terms import BIAS, Guarded

ERROR, OFFSET = "error", "b_dec"
"""Parts beside the features: what the dictionary does not explain, and its own bias."""
PRODUCTS = 2**21
"""Products of features at a time: 8 MB in float32, which stay in a processor's last cache."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureShares(Guarded, Result):
    """Shares of a dictionary's features in the scores of some heads of one block.

    ``parts`` are ``"bias"`` (the reader's constants), ``"error"``, ``"b_dec"`` and the features
    (``feature_ids`` in order) that were active; ``cs`` and ``gs`` sum to one on each side.
    ``pairs[head]`` are the (query feature, key feature) with the largest summed gain, of the
    largest of each cell, ``pair_cs`` and ``pair_gs`` their shares (-1 and NaN where a head has
    fewer). ``unexplained`` is the error's share of the squared norm of the stream.
    """

    heads: tuple[tuple[int, int], ...]
    feature_ids: Int[Tensor, " feature"]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
    pairs: Int[Tensor, "head pair 2"]
    pair_cs: Float[Tensor, "head pair"]
    pair_gs: Float[Tensor, "head pair"]
    unexplained: float
    drop: int
    sides: ClassVar = HEAD_SIDES[:2]
    table_axes, table_values = ("head", "side", "part"), ("cs", "gs")

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""
        return (BIAS, ERROR, OFFSET, *(f"f{i}" for i in self.feature_ids.tolist()))

    def rows(self) -> Sequence[Sequence[object]]:
        """The error's share first on each side, then the parts by gain, the largest first."""
        sides: Any = groupby(super().rows(), lambda row: row[:3])
        order = lambda row: (row[3] != ERROR, -abs(row[5]))  # noqa: E731
        return [row for _, side in sides for row in sorted(side, key=order)]


def feature_shares(
    model: ModelLike,
    tokens: TokensLike,
    features: Dictionary,
    *,
    heads: Sequence[Head] | Head | None = None,
    pairs: int = 20,
    per_cell: int = 4,
    drop: int | None = None,
    batch_size: int = 4,
    prepend_bos: bool | None = None,
) -> FeatureShares:
    """Shares of every active feature of an SAE in the scores of heads of the dictionary's block,
    the error's beside them, and the largest pairs of features (QK attribution by features).

    ``pairs`` are kept for each head, of the ``per_cell`` largest of each cell; ``drop`` positions
    are left out (by default a BOS token). Shares have no unit.

    Raises ``ReconstructionError`` where an object's own ``decode`` gives something else than its
    decoder does, ``GeometryError`` for another width.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 12, n=2)
    >>> h = model.run_with_cache(windows.tokens)[1]["blocks.1.hook_resid_pre"]
    >>> Q = torch.linalg.qr(torch.randn(128, 128))[0]
    >>> known = tlg.circuits.dictionary((h @ Q.T, Q, torch.zeros(128)), 1)
    >>> shares = tlg.circuits.feature_shares(model, windows, known, heads="L1H0")
    >>> round(shares.unexplained, 6), shares.cs.sum(-1).round(decimals=3).tolist()
    (0.0, [[1.0, 1.0]])
    """
    view = as_view(model)
    source = as_tokens(view, tokens, prepend_bos=prepend_bos)
    width, d_model = features.decoder.shape[1], view.d_model
    require(width == d_model, "dictionary", expected=f"a model with d_model {width}", got=d_model)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, features.layer)
    start, rows = first_kept(source, drop), batch_of(batch_size, source.length, view.device)
    most, each = counted(pairs, "pairs", 0), counted(per_cell, "per_cell", 0)
    sums = _FeatureSums(features, [h for _, h in chosen], start, each, len(source))
    stream = CorpusPass(view, source, rows)
    for batch in stream:
        view.run_layers(batch, [features.layer], sums.add, verify=stream.first, **stream.sample())
    return FeatureShares(
        provenance=view.provenance(source, window=(start, source.length)),
        heads=chosen,
        drop=start,
        **sums.finished(most),
    )


class _FeatureSums:
    """Sums in progress."""

    def __init__(
        self, features: Dictionary, heads: list[int], drop: int, per_cell: int, contexts: int
    ) -> None:
        self.features, self.heads, self.drop, self.per_cell = features, heads, drop, per_cell
        self.contexts, self.read = contexts, 0  # of all, and until now
        self.count = count = len(features.decoder)
        # last axis: bias, error, b_dec, then the features
        self.shares = torch.zeros(len(SHARES), 2, len(heads), 3 + count).double()
        self.total = torch.zeros(len(SHARES), len(heads)).double()
        self.floor = torch.zeros(len(heads)).double()
        self.seen = torch.zeros(count, dtype=torch.bool)
        self.energy = torch.zeros(2).double()  # of the error, and of the stream
        # of each pair of features of a head: (head F + query feature) F + key feature, and its sums
        self.codes, self.sums = torch.zeros(0, dtype=torch.int64), torch.zeros(len(SHARES), 0)

    def add(self, layer: LayerView) -> None:
        """Take in one batch."""
        h, kept = layer.h, slice(self.drop, None)
        activations, offset = self._activations(h)
        decoder = self.features.decoder.to(h)
        error = h - activations @ decoder - offset
        self.energy += torch.stack([x[:, kept].square().sum() for x in (error, h)]).cpu()
        active = (activations != 0).flatten(0, 1).any(0)
        ids, dense = active.nonzero()[:, 0], torch.stack([error, offset.expand_as(h)])
        reads = Reads.of(layer, self.drop, self.heads)
        gradients, matrix = reads.cotangents, reads.matrix
        projected = einsum(dense, matrix, "p b i d, s d h e -> p s b i h e")
        of_dense = einsum(projected, gradients, "p s b i h e, n s b i h e -> n s h p")
        read = einsum(activations[..., ids], gradients, "b i f, n s b i h e -> n s f h e")
        directions = einsum(decoder[ids], matrix, "f d, s d h e -> s f h e")
        of_features = einsum(read, directions, "n s f h e, s f h e -> n s h f")
        self.shares[..., 0] += reads.constant.sum(2).cpu()
        self.shares[..., 1:3] += of_dense.cpu()
        self.shares[..., 3:].index_add_(-1, ids.cpu(), of_features.double().cpu())
        self.total += reads.total[:, 0].sum(1).cpu()
        self.floor += reads.floor[0].cpu()
        self.seen |= active.cpu()
        if self.per_cell and len(ids):
            self._add_pairs(layer, activations[..., ids], ids, decoder[ids])

    def _activations(self, h: Tensor) -> tuple[Float[Tensor, "batch position feature"], Tensor]:
        """Activations of a batch and the offset. Activations are 0 at the positions that are left
        out (a BOS token may have more features than all others, and every token is padded to the
        most that one has)."""
        activations, offset = self.features.read(h)
        given = self.features.given
        expected, got = (self.contexts if given else len(h), h.shape[1]), describe(activations)
        fits = activations.shape[:2] == expected
        require(fits, "activations", expected=f"those of {expected} tokens", got=got)
        if given:
            activations = activations[self.read : self.read + len(h)]
        self.read += len(h)
        activations = checks.finite(activations, "activations").clone()
        activations[:, : self.drop] = 0
        return activations, offset

    def _add_pairs(
        self,
        layer: LayerView,
        activations: Float[Tensor, "batch position feature"],
        ids: Int[Tensor, " feature"],
        decoder: Float[Tensor, "feature d_model"],
    ) -> None:
        """The largest pairs of each cell. ``place`` says where the features of each token stand
        among ``ids``; a token with fewer than the most has products of 0."""
        allowed, heads, start = layer.allowed[self.drop :, self.drop :], self.heads, self.drop
        weights = Cells.of(layer, start, slice(start, None)).weights[:, :, heads]
        most = int((activations != 0).sum(-1).max())
        places = activations.abs().topk(most, -1).indices
        factors = activations.gather(-1, places)
        q, k = (layer.projected(decoder, which) for which in "qk")
        step, blocks = max(1, PRODUCTS // (len(allowed) * most**2)), []
        for at in range(0, len(allowed), step):
            seen = allowed[at : at + step].any(0).nonzero()[:, 0]
            blocks.append((slice(at, at + step), slice(int(seen[0]), int(seen[-1]) + 1)))
        codes, values = [self.codes.to(ids.device)], [self.sums.to(ids.device)]
        for b, (place, factor) in enumerate(zip(places, factors, strict=True)):
            found = ids[place[start:]]
            sides = [
                _turned(layer, w, directions[place] * factor[..., None, None], b)[heads, :, start:]
                for w, directions in (("q", q), ("k", k))
            ]
            for h, (query, key) in enumerate(zip(*sides, strict=True)):
                for rows, keys in blocks:
                    first, second, x = _largest(query[:, rows], key[:, keys], self.per_cell)
                    code = found[rows, None].expand(-1, x.shape[1], -1).gather(-1, first)
                    other = found[None, keys].expand(len(x), -1, -1).gather(-1, second)
                    there = allowed[rows, keys].unsqueeze(-1) & (x != 0)
                    codes.append(((h * self.count + code) * self.count + other)[there])
                    cells = weights[:, b, h, rows, keys].unsqueeze(-1)
                    values.append((x * cells)[:, there].double())
        # once in a batch, because finding equal pairs is a sort
        self.codes, place = torch.cat(codes).unique(return_inverse=True)
        each = torch.cat(values, -1)
        self.sums = each.new_zeros(len(SHARES), len(self.codes)).index_add_(1, place, each).cpu()
        self.codes = self.codes.cpu()

    def finished(self, most: int) -> dict[str, Any]:
        """Fields of the result."""
        ids = self.seen.nonzero()[:, 0]
        total = torch.where(self.total[0] <= self.floor, torch.nan, self.total)
        pick = torch.cat([torch.arange(3), 3 + ids])
        cs, gs = rearrange(self.shares[..., pick], "n s h p -> n h s p") / total[..., None, None]
        head, code = self.codes // self.count**2, self.codes % self.count**2
        size = min(most, int(head.bincount().max()) if len(head) else 0)
        pairs = torch.full((len(self.heads), size, 2), -1)
        shares = torch.full((len(SHARES), len(self.heads), size), torch.nan).double()
        for h in range(len(self.heads)):
            own = (head == h).nonzero()[:, 0]
            best = own[self.sums[1, own].abs().argsort(descending=True, stable=True)[:size]]
            named = torch.stack([code[best] // self.count, code[best] % self.count], -1)
            pairs[h, : len(best)], shares[:, h, : len(best)] = named, self.sums[:, best]
        pair_cs, pair_gs = shares / total.unsqueeze(-1)
        found = {"feature_ids": ids, "cs": cs, "gs": gs, "pairs": pairs}
        found |= {"pair_cs": pair_cs, "pair_gs": pair_gs}
        return found | {"unexplained": float(self.energy[0] / self.energy[1])}


def _turned(
    layer: LayerView, which: str, x: Float[Tensor, "position active head d_head"], b: int
) -> Float[Tensor, "head active position d_head"]:
    """Queries (with the score scale) or keys of the features of one context, QK-norm, rotation and
    frozen scale applied."""
    scale = layer.q_scale * layer.scale if which == "q" else layer.k_scale
    turned = layer.turned(rearrange(x, "i f h e -> f i h e"), which) * scale[b].unsqueeze(-1)
    return rearrange(turned, "f i h e -> h f i e").contiguous()


def _largest(
    q: Float[Tensor, "active query d_head"], k: Float[Tensor, "active key d_head"], n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The ``n`` largest products of features in each cell: their places among the query's and the
    key's features, and their values, each ``[query key n]``.

    They belong to the ``n`` query features whose largest product is largest, so that only the
    products of these are sorted. The products have the axes query feature, query, key feature, key.
    The maximum is taken over the third axis, so that it runs along rows of keys; with the key
    features last it took 40 times as long.
    """
    x = (q.flatten(0, 1) @ k.flatten(0, 1).mT).view(*q.shape[:2], *k.shape[:2])
    peak = rearrange(torch.maximum(x.amax(2), -x.amin(2)), "f i j -> i j f")
    first = peak.topk(min(n, peak.shape[-1]), -1).indices
    i, j = (torch.arange(size, device=x.device) for size in first.shape[:2])
    few = x[first, i[:, None, None], :, j[None, :, None]].flatten(2)
    best = few.abs().topk(min(n, few.shape[-1]), -1).indices
    return first.gather(-1, best // len(k)), best % len(k), few.gather(-1, best)
