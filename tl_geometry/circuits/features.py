"""Which features of a dictionary does a head read? ``feature_shares`` splits its scores exactly by
the features of a sparse autoencoder of the block's input, ``x = sum_f a_f d_f + b_dec + error``,
with the share of the error first.

A head's scores are bilinear in these parts like in any others, so that shares on the query and the
key side are those of :mod:`tl_geometry.circuits.writer_sweep`, feature by feature. For pairs of
features, ``X_fg[i, j] = scale a_f[i] a_g[j] <q(d_f), k(d_g)>`` is formed for the active ones of
each cell alone, and the largest of each cell are summed over a corpus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, describe
from tl_geometry.base.errors import require
from tl_geometry.base.results import Result
from tl_geometry.base.rows import row_center
from tl_geometry.circuits.dictionaries import Dictionary, check_decoder
from tl_geometry.circuits.head_readers import Reader
from tl_geometry.circuits.writer_sweep import SHARES, score_cotangents
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike, TokenWindows
from tl_geometry.models.attention import scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.models.softmax import masked_softmax, soft_cap
from tl_geometry.scores.corpus_pass import CorpusPass
from tl_geometry.scores.terms import BIAS

ERROR, OFFSET = "error", "b_dec"
"""Parts beside the features: what the dictionary does not explain, and its own bias."""
PRODUCTS = 2**21
"""Products of features at a time: 8 MB in float32, which stay in a processor's last cache."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureShares(Result):
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

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""
        return (BIAS, ERROR, OFFSET, *(f"f{i}" for i in self.feature_ids.tolist()))

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "side", "part", "cs", "gs")

    def rows(self, most: int = 20) -> Sequence[Sequence[object]]:
        """The error's share first, then the ``most`` largest parts of each head and side, then its
        pairs."""
        table: list[Sequence[object]] = []
        names = self.parts
        for h, head in enumerate(self.heads):
            for s, side in enumerate(("query", "key")):
                sizes = self.gs[h, s].abs().nan_to_num()
                order = sizes.argsort(descending=True, stable=True).tolist()
                # part 1 is the error
                shown = [1, *[p for p in order if p != 1][:most]]
                table += [
                    (*head, side, names[p], float(self.cs[h, s, p]), float(self.gs[h, s, p]))
                    for p in shown
                ]
            for (a, b), cs, gs in zip(
                self.pairs[h].tolist(), self.pair_cs[h], self.pair_gs[h], strict=True
            ):
                if a < 0:
                    break
                table.append((*head, "pair", f"f{a}-f{b}", float(cs), float(gs)))
        return table


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
    """Shares of every active feature in the scores of heads of the dictionary's block, the error's
    beside them, and the largest pairs of features.

    ``pairs`` are kept for each head, of the ``per_cell`` largest of each cell; ``drop`` positions
    are left out (by default a BOS token).

    Raises ``ReconstructionError`` where an object's own ``decode`` gives something else than its
    decoder and bias do (an unknown normalisation), ``GeometryError`` for another width.

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
    rows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    width, d_model = features.decoder.shape[1], view.d_model
    require(width == d_model, "dictionary", expected=f"a model with d_model {width}", got=d_model)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, features.layer)
    start = int(rows.has_bos) if drop is None else drop
    _check_request(features, rows, start, batch_size=batch_size, pairs=pairs, per_cell=per_cell)
    sums = _FeatureSums(features, [h for _, h in chosen], start, per_cell)
    stream = CorpusPass(view, as_tokens(view, rows), batch_size)
    for batch in stream:
        contexts = slice(stream.contexts, stream.contexts + len(batch))
        take, sample = partial(sums.add, contexts=contexts), stream.sample()
        view.run_layers(batch, [features.layer], take, verify=stream.first, **sample)
    return FeatureShares(
        provenance=view.provenance(rows, window=(start, rows.tokens.shape[1])),
        heads=chosen,
        drop=start,
        **sums.finished(pairs),
    )


def _check_request(features: Dictionary, rows: TokenWindows, start: int, **sizes: int) -> None:
    """Refuse sizes that leave nothing, and batches of a dictionary that chooses over a batch."""
    for name, value in sizes.items():
        least = int(name == "batch_size")
        require(value >= least, name, expected=f"at least {least}", got=value)
    # what is stored does not depend on the states that are given
    stored = len(features.encode(features.bias)) if features.stored else len(rows)
    expected, got = f"those of {len(rows)} prompts", f"those of {stored}"
    require(stored == len(rows), "activations", expected=expected, got=got)
    most, size = rows.tokens.shape[1] - 2, sizes["batch_size"]
    require(0 <= start <= most, "drop", expected=f"0 to {most}, to leave two positions", got=start)
    require(
        size >= len(rows) or not features.over_batch,
        "batch_size",
        expected="one batch: this dictionary chooses features over a batch, without a threshold",
        got=f"{len(rows)} contexts with batch_size={size}",
        instead=f"batch_size={len(rows)}, or the autoencoder as SAELens saves it",
    )


class _FeatureSums:
    """Sums in progress."""

    def __init__(self, features: Dictionary, heads: list[int], drop: int, per_cell: int) -> None:
        self.features, self.heads, self.drop, self.per_cell = features, heads, drop, per_cell
        count, double = len(features.decoder), torch.float64
        # last axis: bias, error, b_dec, then the features
        self.shares = torch.zeros(len(SHARES), len(heads), 2, 3 + count, dtype=double)
        self.total = torch.zeros(len(SHARES), len(heads), dtype=double)
        self.floor = torch.zeros(len(heads), dtype=double)
        self.seen = torch.zeros(count, dtype=torch.bool)
        self.pairs = [_PairSums() for _ in heads]
        self.energy = torch.zeros(2, dtype=double)  # of the error, and of the stream

    def add(self, layer: LayerView, contexts: slice) -> None:
        """Take in one batch: these ``contexts`` of all."""
        h, positions = layer.h, slice(self.drop, None)
        if hasattr(self.features.source, "decode"):
            check_decoder(self.features, h[:1])
        activations = self._activations(h, contexts)
        scale, shift = self.features.scale(h)
        error = h - self.features.explained(h, activations)
        self.energy += torch.stack(
            [error[:, positions].square().sum(), h[:, positions].square().sum()]
        ).cpu()
        dense = torch.stack([error, scale * self.features.bias.to(h) + shift])
        active = _Active.of(activations, scale)
        self.seen |= (activations != 0).any(0).any(0).cpu()
        cotangents = score_cotangents(layer, self.drop, self.heads)
        sides = []
        for s, (which, side_cotangents) in enumerate(
            (("q", cotangents.query), ("k", cotangents.key))
        ):
            reader = Reader.of(layer, which, side_cotangents, self.heads)
            projected = einsum(dense, reader.matrix, "p b i d, d h e -> p b i h e")
            of_dense = einsum(projected, reader.cotangents, "p b i h e, n b i h e -> n h p")
            self.shares[:, :, s, 0] += reader.constant.sum(1).cpu()
            self.shares[:, :, s, 1:3] += of_dense.double().cpu()
            directions = self.features.decoder.to(h)[active.ids]
            directions = einsum(directions, reader.matrix, "f d, d h e -> f h e")
            sides.append(_Side(layer, which, self.heads, directions, reader.cotangents))
            by_feature = sides[-1].numerators(active)
            self.shares[:, :, s, 3:].index_add_(-1, active.ids.cpu(), by_feature.cpu())
        self.total += cotangents.total.sum(1).cpu()
        self.floor += cotangents.floor.cpu()
        if self.per_cell:
            self._pairs(layer, active, *sides)

    def _activations(self, h: Tensor, contexts: slice) -> Float[Tensor, "batch position feature"]:
        """Activations of a batch, 0 at the positions that are left out (a BOS token may have more
        features than all others, and every token is padded to the most that one has)."""
        encoded = self.features.encode(h)
        batch = encoded[contexts] if self.features.stored else encoded
        fits, got = batch.shape[:2] == h.shape[:2], describe(encoded)
        require(fits, "activations", expected=f"those of {tuple(h.shape[:2])} tokens", got=got)
        batch = checks.finite(batch, "activations").clone()
        batch[:, : self.drop] = 0
        return batch

    def _pairs(self, layer: LayerView, active: _Active, query: _Side, key: _Side) -> None:
        """The largest pairs of each cell."""
        start, count = self.drop, len(self.features.decoder)
        score = scores_of(layer.q[:, :, self.heads], layer.k[:, :, self.heads], layer.scale)
        score = score if layer.bias is None else score + layer.bias[self.heads]
        allowed = layer.allowed[start:, start:]
        score = score[..., start:, start:]
        centred = row_center(score, allowed)
        p = masked_softmax(soft_cap(score, layer.softcap), allowed)
        above_uniform = p - allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
        weight = torch.stack([centred, above_uniform])  # as SHARES
        length, most = active.place[:, start:].shape[1:]
        step = max(1, PRODUCTS // (length * most**2))
        blocks = []
        for at in range(0, length, step):
            rows = slice(at, at + step)
            seen = allowed[rows].any(0).nonzero()[:, 0]
            keys = slice(int(seen[0]), int(seen[-1]) + 1)
            blocks.append((rows, keys, allowed[rows, keys]))
        for b in range(len(score)):
            ids = active.ids[active.place[b, start:]]
            q, k = (side.turned(active, b)[..., start:, :] for side in (query, key))
            for h, pairs in enumerate(self.pairs):
                for rows, keys, cells in blocks:
                    first, second, x = _largest(q[h, :, rows], k[h, :, keys], self.per_cell)
                    code = ids[rows, None].expand(-1, cells.shape[1], -1).gather(-1, first) * count
                    code = code + ids[None, keys].expand(len(cells), -1, -1).gather(-1, second)
                    values = x * weight[:, b, h, rows, keys].unsqueeze(-1)
                    # products are 0 where a token has fewer than ``most`` features
                    there = cells.unsqueeze(-1) & (x != 0)
                    pairs.add(code[there], values[:, there])
        for pairs in self.pairs:
            pairs.sum_up()

    def finished(self, most: int) -> dict[str, Any]:
        """Fields of the result."""
        ids = self.seen.nonzero()[:, 0]
        total = torch.where(self.total[0] <= self.floor, torch.nan, self.total)
        pick = torch.cat([torch.arange(3), 3 + ids])
        shares = self.shares[..., pick] / total[..., None, None]
        size = min(most, max(len(pairs.code) for pairs in self.pairs))
        largest = [pairs.largest(size) for pairs in self.pairs]
        code, values = (torch.stack(each) for each in zip(*largest, strict=True))
        count = len(self.features.decoder)
        return {
            "feature_ids": ids,
            "cs": shares[0],
            "gs": shares[1],
            "pairs": torch.stack([code // count, torch.where(code < 0, -1, code % count)], -1),
            "pair_cs": values[:, 0] / total[0].unsqueeze(-1),
            "pair_gs": values[:, 1] / total[1].unsqueeze(-1),
            "unexplained": float(self.energy[0] / self.energy[1]),
        }


class _Active(NamedTuple):
    """The active features of a batch: ``ids`` of those that are active somewhere; for each token,
    where its own stand among them (``place``), and what their directions are multiplied by
    (``weight``; 0 where a token has fewer)."""

    ids: Int[Tensor, " feature"]
    place: Int[Tensor, "batch position active"]
    weight: Float[Tensor, "batch position active"]

    @classmethod
    def of(cls, activations: Tensor, scale: Tensor) -> _Active:
        """``scale`` is what decoder and bias are multiplied by for each state."""
        most = max(1, int((activations != 0).sum(-1).max()))
        index = activations.abs().topk(most, -1).indices
        weight = activations.gather(-1, index)
        ids = index[weight != 0].unique()
        ids = ids if len(ids) else index.flatten()[:1]
        place = torch.searchsorted(ids, index).clamp(max=len(ids) - 1)
        return cls(ids, place, weight * scale)


@dataclass(frozen=True, eq=False)
class _Side:
    """Queries or keys of features: the decoder's ``directions`` through centring, gain and the
    projection of the heads, and the ``cotangents`` that they are multiplied by."""

    layer: LayerView
    which: str
    heads: list[int]
    directions: Float[Tensor, "feature head d_head"]
    cotangents: Float[Tensor, "weight batch position head d_head"]

    def numerators(self, active: _Active) -> Float[Tensor, "weight head feature"]:
        """Numerators of the shares of each feature."""
        n, _, _, heads, _ = self.cotangents.shape
        sums = self.cotangents.new_zeros(n, heads, len(active.ids), dtype=torch.float64)
        for b, place in enumerate(active.place):
            cotangents = self.cotangents[:, b]
            products = einsum(self.directions[place], cotangents, "i f h e, n i h e -> n h i f")
            products = (products * active.weight[b]).double().flatten(2)
            sums.index_add_(-1, place.flatten(), products)
        return sums

    def turned(self, active: _Active, b: int) -> Float[Tensor, "head active position d_head"]:
        """Queries (with the score scale) or keys of the features of one context, QK-norm, rotation
        and frozen scale applied."""
        layer, place = self.layer, active.place[b]
        weighted = self.directions[place] * active.weight[b][..., None, None]
        all_heads = weighted.new_zeros(
            place.shape[1], 1, len(place), layer.q.shape[2], weighted.shape[-1]
        )
        all_heads[:, 0, :, self.heads] = rearrange(weighted, "i f h e -> f i h e")
        frozen = layer.q_scale * layer.scale if self.which == "q" else layer.k_scale
        rotated = layer.turned(all_heads, self.which)[:, 0, :, self.heads]
        rotated = rotated * frozen[b][:, self.heads].unsqueeze(-1)
        return rearrange(rotated, "f i h e -> h f i e").contiguous()


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


class _PairSums:
    """Sums over cells for each pair of features; ``code`` is the query feature times the number of
    features, plus the key feature."""

    def __init__(self) -> None:
        self.code = torch.zeros(0, dtype=torch.int64)
        self.values = torch.zeros(2, 0, dtype=torch.float64)
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def add(self, code: Tensor, values: Tensor) -> None:
        """Take in the pairs of some cells."""
        self.waiting.append((code, values))

    def sum_up(self) -> None:
        """Add what waits: once in a batch, because finding equal pairs is a sort."""
        code = torch.cat([self.code, *(code.cpu() for code, _ in self.waiting)])
        each = torch.cat([self.values, *(v.cpu().double() for _, v in self.waiting)], -1)
        self.waiting = []
        self.code, place = code.unique(return_inverse=True)
        self.values = each.new_zeros(2, len(self.code)).index_add_(1, place, each)

    def largest(self, n: int) -> tuple[Int[Tensor, " pair"], Float[Tensor, "2 pair"]]:
        """The ``n`` pairs with the largest summed gain; -1 and NaN for those that there are not."""
        best = self.values[1].abs().argsort(descending=True, stable=True)[:n]
        missing = (0, n - len(best))
        code = torch.nn.functional.pad(self.code[best], missing, value=-1)
        return code, torch.nn.functional.pad(self.values[:, best], missing, value=torch.nan)
