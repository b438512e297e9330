"""Scores by features of a dictionary of the stream: ``x = sum_f a_f d_f + b_dec + error`` at the
input of a block (a sparse autoencoder of it), exactly, with the share of the error first.

A head's scores are bilinear in these parts like in any others, so that shares on the query and the
key side are those of :mod:`tl_geometry.scores.writers`, feature by feature. For pairs of features,
``X_fg[i, j] = scale a_f[i] a_g[j] <q(d_f), k(d_g)>`` is formed for the active ones of each cell
alone, and the largest of each cell are summed over a corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import Head, describe
from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError, require
from tl_geometry.base.results import Result
from tl_geometry.base.rows import row_center
from tl_geometry.corpus.sources import token_rows
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.models.describing import as_view
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.states import other_states
from tl_geometry.scores.requests import BIAS
from tl_geometry.scores.writers import WEIGHTS, Reader, pulled

ERROR, OFFSET = "error", "b_dec"
"""Parts beside the features: what the dictionary does not explain, and its own bias."""
NORMALIZATIONS = ("none", "constant_norm_rescale", "layer_norm")
"""What an autoencoder may do to its input (SAELens's ``normalize_activations``)."""
ROWS = 16
"""Query rows of pairs at a time."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Directions of the stream at the input of one block, and how much of each a state holds.

    ``encode`` gives the activations ``[batch position feature]`` of states;
    ``normalization`` is what was done to a state before, and is undone on decoder and bias.
    """

    layer: int
    decoder: Float[Tensor, "feature d_model"]
    bias: Float[Tensor, " d_model"]
    encode: Callable[[Tensor], Tensor]
    normalization: str = "none"
    source: Any = None

    def scale(self, h: Float[Tensor, "*batch d_model"]) -> tuple[Tensor, Tensor]:
        """What decoder and bias are multiplied by for each state, and what is added."""
        if self.normalization == "constant_norm_rescale":
            return h.norm(dim=-1, keepdim=True) / h.shape[-1] ** 0.5, torch.zeros_like(h[..., :1])
        if self.normalization == "layer_norm":
            return h.std(-1, keepdim=True), h.mean(-1, keepdim=True)
        return torch.ones_like(h[..., :1]), torch.zeros_like(h[..., :1])

    def explained(self, h: Tensor, activations: Tensor) -> Float[Tensor, "*batch d_model"]:
        """``scale (sum_f a_f d_f + b_dec) + shift``."""
        scale, shift = self.scale(h)
        return scale * (activations @ self.decoder.to(h) + self.bias.to(h)) + shift


def dictionary(source: Any, layer: int, model: ModelLike | None = None) -> Dictionary:
    """A dictionary of the input of block ``layer``: a sparse autoencoder as SAELens has it (an
    object with ``encode``, ``W_dec`` and ``b_dec``), or a tuple (activations
    ``[batch position feature]`` of the prompts to be split, decoder ``[feature d_model]``, bias).

    With ``model``, an autoencoder's own account of where it was trained is compared with it.

    Raises ``UnsupportedModelError`` for an autoencoder of another hook point or of a stream that
    was centred otherwise, for a transcoder, and for normalisations other than
    ``"none"``, ``"constant_norm_rescale"`` and ``"layer_norm"``.

    >>> import tl_geometry as tlg
    >>> found = tlg.scores.dictionary((torch.ones(1, 2, 3), torch.eye(3), torch.zeros(3)), 0)
    >>> found.decoder.shape, found.normalization
    (torch.Size([3, 3]), 'none')
    """
    if isinstance(source, tuple):
        ok = len(source) == 3 and all(isinstance(x, Tensor) for x in source)
        expected = "(activations, decoder, bias)"
        require(ok, "dictionary", expected=expected, got=[describe(x) for x in source])
        activations, decoder, bias = source
        fits = activations.dim() == 3 and decoder.dim() == 2 and bias.shape == decoder.shape[1:]
        fits = fits and activations.shape[-1] == len(decoder)
        got = f"{describe(activations)}, {describe(decoder)} and {describe(bias)}"
        expected = "[batch position feature], [feature d_model], [d_model]"
        require(fits, "dictionary", expected=expected, got=got)
        return Dictionary(layer, decoder.detach(), bias.detach(), lambda h: activations.to(h))
    missing = [name for name in ("encode", "W_dec", "b_dec") if not hasattr(source, name)]
    expected, instead = "an object with encode, W_dec, b_dec", "(activations, decoder, bias)"
    got = f"{type(source).__name__} without {', '.join(missing)}"
    require(not missing, "dictionary", expected=expected, got=got, instead=instead)
    normalization = _account(source, layer, None if model is None else as_view(model))

    def encode(h: Tensor) -> Tensor:
        with torch.no_grad():
            return source.encode(h.to(source.W_dec.dtype)).to(h)

    return Dictionary(
        layer, source.W_dec.detach(), source.b_dec.detach(), encode, normalization, source
    )


def _account(source: Any, layer: int, view: ModelView | None) -> str:
    """What an autoencoder says of itself, compared with the model; its normalisation."""
    cfg = getattr(source, "cfg", None)
    about = getattr(cfg, "metadata", None)

    def setting(name: str) -> Any:
        values = (getattr(owner, name, None) for owner in (about, cfg))
        return next((value for value in values if value is not None), None)

    what = f"dictionary {type(source).__name__}"
    others, expected = other_states(setting, layer), f"the stream before block {layer}"
    require(not others, what, expected=expected, got=others, error=UnsupportedModelError)
    kwargs = setting("model_from_pretrained_kwargs") or {}
    if view is not None:
        centred = bool(kwargs.get("center_writing_weights", False))
        same = view.norm != "LN" or centred == view.processed
        got = f"a model whose writing weights are {'not ' if centred else ''}centred"
        expected = f"model_from_pretrained_kwargs={kwargs}, as it was trained"
        require(same, what, expected=expected, got=got, error=UnsupportedModelError)
    found = str(setting("normalize_activations") or "none")
    expected = f"normalize_activations of {NORMALIZATIONS}"
    known = found in NORMALIZATIONS
    require(known, what, expected=expected, got=found, error=UnsupportedModelError)
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureShares(Result):
    """Shares of a dictionary's features in the scores of some heads of one block.

    ``parts`` are ``"bias"`` (the reader's constants), ``"error"``, ``"b_dec"`` and the features
    (``feature_ids`` in order) that were active; ``cs`` and ``gs`` sum to one on each side.
    ``pairs[head]`` are the (query feature, key feature) with the largest summed gain, of the
    largest of each cell, ``pair_cs`` and ``pair_gs`` their shares. ``unexplained`` is the error's
    part of the stream's squared size.
    """

    heads: tuple[tuple[int, int], ...]
    feature_ids: Int[Tensor, " feature"]
    cs: Float[Tensor, "head side part"]
    gs: Float[Tensor, "head side part"]
    pairs: Int[Tensor, "head kept 2"]
    pair_cs: Float[Tensor, "head pair"]
    pair_gs: Float[Tensor, "head pair"]
    unexplained: float
    drop: int
    version: ClassVar[int] = 1

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts."""
        return (BIAS, ERROR, OFFSET, *(f"f{i}" for i in self.feature_ids.tolist()))

    def columns(self) -> Sequence[str]:
        return ("layer", "head", "side", "part", "cs", "gs")

    def rows(self, most: int = 20) -> Sequence[Sequence[object]]:
        """The error's share first, then the ``most`` largest parts of each head and side, then its
        pairs."""
        found: list[Sequence[object]] = []
        names = self.parts
        for h, head in enumerate(self.heads):
            for s, side in enumerate(("query", "key")):
                order = self.gs[h, s].abs().nan_to_num().argsort(descending=True).tolist()
                shown = [1, *[p for p in order if p != 1][:most]]
                found += [
                    (*head, side, names[p], float(self.cs[h, s, p]), float(self.gs[h, s, p]))
                    for p in shown
                ]
            for (a, b), cs, gs in zip(
                self.pairs[h].tolist(), self.pair_cs[h], self.pair_gs[h], strict=True
            ):
                found.append((*head, "pair", f"f{a}-f{b}", float(cs), float(gs)))
        return found


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
    >>> known = tlg.scores.dictionary((h @ Q.T, Q, torch.zeros(128)), 1)
    >>> found = tlg.scores.feature_shares(model, windows, known, heads="L1H0")
    >>> round(found.unexplained, 6), found.cs.sum(-1).round(decimals=3).tolist()
    (0.0, [[1.0, 1.0]])
    """
    view = as_view(model)
    rows = token_rows(view, tokens, prepend_bos=prepend_bos)
    width, got = features.decoder.shape[1], f"d_model {view.d_model}"
    require(width == view.d_model, "dictionary", expected=f"a stream of {width}", got=got)
    chosen = checks.heads(heads, view.n_layers, view.n_heads, features.layer)
    start = int(rows.has_bos) if drop is None else drop
    sums = _FeatureSums(features, [h for _, h in chosen], start, per_cell)
    at = 0
    for batch in rows.tokens.split(max(1, batch_size)):
        sums.rows = slice(at, at + len(batch))
        view.run_layers(batch, [features.layer], sums.add, verify=at == 0)
        at += len(batch)
    return FeatureShares(
        provenance=view.provenance(rows, window=(start, rows.tokens.shape[1])),
        heads=chosen,
        drop=start,
        **sums.finished(pairs),
    )


class _FeatureSums:
    """Sums in progress."""

    def __init__(self, features: Dictionary, heads: list[int], drop: int, per_cell: int) -> None:
        self.features, self.heads, self.drop, self.per_cell = features, heads, drop, per_cell
        self.rows = slice(None)
        count, wide = len(features.decoder), torch.float64
        self.shares = torch.zeros(len(WEIGHTS), len(heads), 2, 3 + count, dtype=wide)
        self.total = torch.zeros(len(WEIGHTS), len(heads), dtype=wide)
        self.floor = torch.zeros(len(heads), dtype=wide)
        self.seen = torch.zeros(count, dtype=torch.bool)
        self.found: list[dict[int, Tensor]] = [{} for _ in heads]
        self.energy = torch.zeros(2, dtype=wide)

    def add(self, layer: LayerView) -> None:
        """Take in one batch."""
        h, known = layer.h, self.features
        whole = known.encode(h)
        acts = whole if len(whole) == len(h) else whole[self.rows]
        fits, got = acts.shape[:2] == h.shape[:2], describe(whole)
        require(fits, "activations", expected=f"those of {tuple(h.shape[:2])} tokens", got=got)
        if hasattr(known.source, "decode"):
            _check_decoder(known, h, acts)
        scale, shift = known.scale(h)
        error = h - known.explained(h, acts)
        offset = scale * known.bias.to(h) + shift
        most = max(1, int((acts != 0).sum(-1).max()))
        index = acts.abs().topk(most, -1).indices
        some = acts.gather(-1, index)
        vectors = known.decoder.to(h)[index] * (some * scale).unsqueeze(-1)
        self.seen[index[some != 0].unique().cpu()] = True
        kept = slice(self.drop, None)
        self.energy += torch.stack([error[:, kept].square().sum(), h[:, kept].square().sum()]).cpu()
        made = pulled(layer, self.drop, self.heads)
        for s, (which, weight) in enumerate((("q", made.query), ("k", made.key))):
            reader = Reader.of(layer, which, weight, self.heads)
            back = einsum(reader.pulled, reader.matrix, "n b i h e, d h e -> n h b i d")
            dense = torch.stack([error, offset])
            both = einsum(dense, back, "p b i d, n h b i d -> n h p").double().cpu()
            self.shares[:, :, s, 0] += reader.constant.cpu()
            self.shares[:, :, s, 1:3] += both
            each = einsum(vectors, back, "b i f d, n h b i d -> n h b i f")
            flat = index.flatten().expand(*each.shape[:2], -1)
            own = each.new_zeros(*each.shape[:2], len(known.decoder))
            own.scatter_add_(-1, flat, each.flatten(2))
            self.shares[:, :, s, 3:] += own.double().cpu()
        self.total += made.total.cpu()
        self.floor += made.floor.cpu()
        if self.per_cell:
            self._pairs(layer, index, vectors)

    def _pairs(self, layer: LayerView, index: Tensor, vectors: Tensor) -> None:
        """The largest pairs of each cell."""
        parts = rearrange(vectors, "b i f d -> f b i d")
        q, k = layer.project_q(parts)[..., self.heads, :] * layer.scale, layer.project_k(parts)
        k, start = k[..., self.heads, :], self.drop
        score = einsum(layer.q, layer.k, "b i h e, b j h e -> b h i j")[:, self.heads] * layer.scale
        score = score if layer.bias is None else score + layer.bias[self.heads]
        allowed = layer.allowed[start:, start:]
        score = score[..., start:, start:]
        centred = row_center(score, allowed)
        cap = layer.softcap
        entered = score if cap is None else cap * torch.tanh(score / cap)
        p = torch.where(allowed, entered, torch.finfo(score.dtype).min).softmax(-1) * allowed
        moved = p - allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
        count = len(self.features.decoder)
        for b in range(len(score)):
            ids = index[b, start:]
            for h in range(len(self.heads)):
                for rows in torch.arange(len(ids)).split(ROWS):
                    x = einsum(
                        q[:, b, start:, h][:, rows], k[:, b, start:, h], "f i e, g j e -> i j f g"
                    ).flatten(2)
                    weight = torch.stack([centred[b, h, rows], moved[b, h, rows]])
                    best = (x * weight[1].unsqueeze(-1)).abs()
                    best = best.topk(min(self.per_cell, x.shape[-1]), -1).indices
                    first, second = best // ids.shape[1], best % ids.shape[1]
                    code = ids[rows][:, None].expand(-1, len(ids), -1).gather(-1, first) * count
                    code = code + ids[None].expand(len(rows), -1, -1).gather(-1, second)
                    values = x.gather(-1, best) * weight.unsqueeze(-1)
                    self._keep(h, code.flatten(), values.flatten(1).double())

    def _keep(self, head: int, code: Tensor, values: Tensor) -> None:
        unique, place = code.unique(return_inverse=True)
        summed = values.new_zeros(2, len(unique)).index_add_(1, place, values).cpu()
        kept = self.found[head]
        for pair, value in zip(unique.tolist(), summed.T, strict=True):
            kept[pair] = kept[pair] + value if pair in kept else value

    def finished(self, pairs: int) -> dict[str, Any]:
        """Fields of the result."""
        ids = self.seen.nonzero()[:, 0]
        total = torch.where(self.total[0] <= self.floor, torch.nan, self.total)
        pick = torch.cat([torch.arange(3), 3 + ids])
        shares = self.shares[..., pick] / total[..., None, None]
        count = len(self.features.decoder)
        size = min([pairs, *(len(of) for of in self.found)])
        code, values = [], []
        for of in self.found:
            best = sorted(of, key=lambda pair: -abs(float(of[pair][1])))[:size]
            code.append([[pair // count, pair % count] for pair in best])
            values.append([of[pair].tolist() for pair in best])
        table = torch.tensor(values, dtype=torch.float64).reshape(len(self.found), size, 2)
        return {
            "feature_ids": ids,
            "cs": shares[0],
            "gs": shares[1],
            "pairs": torch.tensor(code, dtype=torch.int64).reshape(len(self.found), size, 2),
            "pair_cs": table[..., 0] / total[0].unsqueeze(-1),
            "pair_gs": table[..., 1] / total[1].unsqueeze(-1),
            "unexplained": float(self.energy[0] / self.energy[1]),
        }


def _check_decoder(features: Dictionary, h: Tensor, activations: Tensor) -> None:
    """Compare what decoder and bias give with the autoencoder's own ``decode``, which may undo a
    normalisation that nobody told of."""
    source = features.source
    with torch.no_grad():
        own = source.decode(activations.to(source.W_dec.dtype)).to(h)
    error = float((features.explained(h, activations) - own).abs().max())
    limit = 1e-3 * float(own.abs().max() + 1)
    require(
        error <= limit,
        f"dictionary {type(source).__name__}",
        expected="decoder and bias that give what its decode gives",
        got=f"a difference of {error:.2g}",
        instead="(activations, decoder, bias)",
        error=ReconstructionError,
    )
