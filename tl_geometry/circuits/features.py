"""Which features of a dictionary does a head read? ``feature_shares`` splits its scores exactly by
the features of a sparse autoencoder of the block's input, ``x = sum_f a_f d_f + b_dec + error``,
with the share of the error first.

A head's scores are bilinear in these parts like in any others, so that shares on the query and the
key side are those of :mod:`tl_geometry.scores.head_readers`, feature by feature. The terms of
pairs of features are those of ``split_scores(..., parts={"f7": a_7 d_7, ..., "rest": ...})``.
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
from tl_geometry.base.guarded import Guarded
from tl_geometry.base.results import Result
from tl_geometry.circuits.dictionaries import Dictionary
from tl_geometry.corpus.passes import batches, cuts
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.batches import batch_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.reader import as_view
from tl_geometry.scores.head_readers import HEAD_SIDES, SHARES, Reads, first_kept
from tl_geometry.scores.terms import BIAS

ERROR, OFFSET = "error", "b_dec"
"""Parts beside the features: what the dictionary does not explain, and its own bias."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureShares(Guarded, Result):
    """Shares of a dictionary's features in the scores of some heads of one block.

    ``parts`` are ``"bias"`` (the reader's constants), ``"error"``, ``"b_dec"`` and the features
    (``feature_ids`` in order) that were active; ``cs`` and ``gs`` sum to one on each side (with
    ALiBi to one less its share). ``unexplained`` is the error's share of the squared norm of the
    stream.
    """

    heads: tuple[tuple[int, int], ...]
    feature_ids: Int[Tensor, " feature"]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
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
    drop: int | None = None,
    batch_size: int = 4,
    prepend_bos: bool | None = None,
) -> FeatureShares:
    """Shares of every active feature of an SAE in the scores of heads of the dictionary's block (QK
    attribution by features), the error's beside them.

    ``drop`` positions are left out (by default a BOS token). Shares have no unit.

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
    sums = _FeatureSums(features, [h for _, h in chosen], start, len(source))
    for batch in batches(view, source, cuts(len(source), rows)):
        view.run_layers(batch.tokens, [features.layer], sums.add, **batch.sample())
    return FeatureShares(
        provenance=view.provenance(source, window=(start, source.length)),
        heads=chosen,
        drop=start,
        **sums.finished(),
    )


class _FeatureSums:
    """Sums in progress."""

    def __init__(self, features: Dictionary, heads: list[int], drop: int, contexts: int) -> None:
        self.features, self.heads, self.drop = features, heads, drop
        self.contexts, self.read = contexts, 0  # of all, and until now
        count = len(features.decoder)
        # last axis: bias, error, b_dec, then the features
        self.shares = torch.zeros(len(SHARES), 2, len(heads), 3 + count).double()
        self.total = torch.zeros(len(SHARES), len(heads)).double()
        self.floor = torch.zeros(len(heads)).double()
        self.seen = torch.zeros(count, dtype=torch.bool)
        self.energy = torch.zeros(2).double()  # of the error, and of the stream

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

    def _activations(self, h: Tensor) -> tuple[Float[Tensor, "batch position feature"], Tensor]:
        """Activations of a batch and the offset. Activations are 0 at the positions that are left
        out."""
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

    def finished(self) -> dict[str, Any]:
        """Fields of the result."""
        ids = self.seen.nonzero()[:, 0]
        total = torch.where(self.total[0] <= self.floor, torch.nan, self.total)
        pick = torch.cat([torch.arange(3), 3 + ids])
        cs, gs = rearrange(self.shares[..., pick], "n s h p -> n h s p") / total[..., None, None]
        unexplained = float(self.energy[0] / self.energy[1])
        return {"feature_ids": ids, "cs": cs, "gs": gs, "unexplained": unexplained}
