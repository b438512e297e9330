"""``explain_logit``: which head wrote a logit from which source token, what that source consists
of, and which terms of the score made the head look there.

With every later norm frozen at its scale, the logit of a target at position i is a sum over writers
of the last state,

    logit = sum_w w[i] . u / s + constants,      u = A diag(gain) W_U[target],

with A the centring and s the scale of the final norm, and each head's part is a sum over sources,
``sum_j p_ij (v[j] - v_0) W_O . u / s``, v_0 being what b_V and the norm's bias put into every value
(its constant write, part of the constants). A source's value is the sum of its parts (writers, or
position and content), and so is the score that made the head attend to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.checks import head_name, index
from tl_geometry.base.errors import (
    ReconstructionError,
    UnsupportedModelError,
    fail,
    require,
    within_budget,
)
from tl_geometry.base.results import Result
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import OutputHead
from tl_geometry.models.parameters import upcast
from tl_geometry.models.reader import as_view
from tl_geometry.models.softmax import soft_cap
from tl_geometry.models.writers import CONSTANTS, Written, run_written
from tl_geometry.scores.families import Family, UserParts, family_of
from tl_geometry.scores.split import split_layer
from tl_geometry.scores.splitter import check_basis, part_names, project, provenance_of, reading
from tl_geometry.scores.terms import BIAS_BIAS, common_label
from tl_geometry.scores.values import target_ids, trained_head

TOLERANCE, HALF_TOLERANCE = 1e-6, 1e-2
"""Largest difference from the model's logit, relative to the sum of absolute contributions, in
float32 (which rounds the model's own sum as much) and in half precision."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LogitExplanation(Result):
    """A logit (or the difference of two) at one position as a sum of direct contributions.

    ``heads[layer, head, source]`` is what each head wrote from each source, ``others`` what the
    rest wrote (``other_names``: embeddings, MLPs, constants with the final norm's bias). ``logit``
    is the model's, before any soft cap; ``total`` the sum of all contributions.

    For the ``pairs`` (layer, head, source) with the largest contributions, ``pair_values`` splits
    the contribution by the ``parts`` of the source, and ``pair_terms[pair, query part, key part]``
    the score of that cell minus the mean of its row, which made the head look there; ``pair_alibi``
    is ALiBi's share of it, ``pair_scores`` the sum, ``pair_patterns`` the attention paid.
    ``bias_label`` is how (bias, bias) is shown (:func:`tl_geometry.scores.terms.bias_label`).
    """

    position: int
    target: tuple[int, ...]
    target_tokens: tuple[str, ...]
    str_tokens: tuple[str, ...]
    logit: float
    heads: Float[Tensor, "layer head source"]
    other_names: tuple[str, ...]
    others: Float[Tensor, " writer"]
    parts: tuple[str, ...]
    pairs: tuple[tuple[int, int, int], ...]
    pair_values: Float[Tensor, "pair part"]
    pair_terms: Float[Tensor, "pair part part"]
    pair_alibi: Float[Tensor, " pair"]
    pair_scores: Float[Tensor, " pair"]
    pair_patterns: Float[Tensor, " pair"]
    bias_label: str = BIAS_BIAS

    @property
    def total(self) -> float:
        """Sum of all contributions."""
        return float(self.heads.sum() + self.others.sum())

    @property
    def size(self) -> float:
        """Sum of their absolute values."""
        return float(self.heads.abs().sum() + self.others.abs().sum())

    @property
    def error(self) -> float:
        """Distance from the model's logit, relative to :attr:`size`."""
        return abs(self.total - self.logit) / self.size

    def columns(self) -> Sequence[str]:
        return ("writer", "layer", "head", "source", "token", "contribution", "attention", "score")

    def rows(self) -> Sequence[Sequence[object]]:
        """Embeddings, MLPs and constants, and the largest (head, source) pairs, largest first."""
        table: list[tuple[object, ...]] = [
            (name, None, None, None, None, float(value), None, None)
            for name, value in zip(self.other_names, self.others, strict=True)
        ]
        for p, (layer, head, source) in enumerate(self.pairs):
            value = float(self.heads[layer, head, source])
            token = self.str_tokens[source] if self.str_tokens else None
            attention, score = float(self.pair_patterns[p]), float(self.pair_scores[p])
            name = head_name((layer, head))
            table.append((name, layer, head, source, token, value, attention, score))
        return sorted(table, key=lambda row: -abs(row[5]))  # pyright: ignore[reportArgumentType]

    def terms(self, pair: int) -> list[tuple[str, str, float]]:
        """(query part, key part, value) of one pair's score, the largest first."""
        table = self.pair_terms[index(pair, len(self.pairs), "pair")]
        order = table.abs().flatten().argsort(descending=True, stable=True).tolist()
        n = len(self.parts)
        flat = table.flatten().tolist()
        return [(self.parts[c // n], self.parts[c % n], flat[c]) for c in order]


def explain_logit(
    model: ModelLike,
    tokens: TokensLike,
    position: int | str,
    target: int | str | Sequence[int | str],
    basis: PositionContext | None = None,
    *,
    parts: Sequence[str] | UserParts | None = None,
    top: int = 16,
    prepend_bos: bool | None = None,
    memory_budget: int = 2**31,
) -> LogitExplanation:
    """One logit of one prompt as a sum over (layer, head, source) and the rest, with the score
    behind the largest of them.

    Args:
        tokens: one prompt.
        position: where the logit is read: a number (-1 is the last), or a name of
            :func:`tl_geometry.corpus.prompts`.
        target: a token (id or text), or two for their difference (first minus second).
        basis: of :func:`tl_geometry.decompose`, for ``parts`` of position and content.
        parts: parts of the sources' values and of the scores; by default ``("pos", "cvec")`` with
            a basis, else ``"writers"``.
        top: (head, source) pairs that are split further.

    Raises ``ReconstructionError`` where the contributions do not sum to the model's logit within
    1e-6 of the sum of their absolute values (1e-2 in half precision), ``UnsupportedModelError`` for
    a newly initialised output head and for one that is not a norm and a linear map (BERT).

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=2)
    >>> explanation = tlg.explain_logit(model, windows[:1], 14, int(windows.tokens[0, 15]))
    >>> explanation.error < 1e-6, len(explanation.pairs)
    (True, 16)
    """
    view = as_view(model)
    rows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    got, instead = f"{len(rows)} prompts", "tokens[:1], or explain_logits(model, tokens, targets)"
    require(len(rows) == 1, "tokens", expected="one prompt", got=got, instead=instead)
    length, position = rows.tokens.shape[1], rows.position(position)
    ids = target_ids(view, target)
    require(len(ids) <= 2, "target", expected="a token, or two for their difference", got=len(ids))
    head = trained_head(view, instead="composition(model, prompts), which needs no logits")
    require(top >= 1, "top", expected="at least 1", got=top)
    parts = parts if parts is not None else "writers" if basis is None else ("pos", "cvec")
    family = family_of(view, parts, basis, range(view.n_layers))
    # what every head takes from every source, in float64, and what every MLP wrote
    size = 8 * view.n_layers * length * (view.n_heads * view.d_head + view.d_model)
    check_basis(view, rows, basis)
    instead = "a shorter prompt, or a larger memory_budget="
    within_budget(size, memory_budget, "logit", of="all heads and MLPs", instead=instead)
    direct = Direct(view, head, torch.tensor([ids]), position, length)
    direct.run(rows.tokens)
    pairs = direct.largest(top)
    details = _Pairs(family, direct, pairs)
    layers = sorted({l for l, _, _ in pairs})
    run_written(view, rows.tokens, layers, details.on_layer)
    provenance = provenance_of(view, rows, basis, details.flags, normalized=family.normalized)
    explanation = LogitExplanation(
        provenance=provenance,
        position=position,
        target=ids,
        target_tokens=tuple(view.decode(ids)),
        str_tokens=rows.str_tokens,
        logit=float(direct.logit(rows.tokens)),
        heads=direct.contributions()[0].cpu(),
        other_names=tuple(direct.others),
        others=torch.cat(list(direct.others.values())).cpu(),
        parts=part_names(family),
        pairs=pairs,
        pair_values=details.values.cpu(),
        pair_terms=details.terms.cpu(),
        pair_alibi=details.alibi.cpu(),
        pair_scores=details.terms.sum((1, 2)).cpu() + details.alibi.cpu(),
        pair_patterns=details.patterns.cpu(),
        bias_label=common_label(details.labels),
    )
    require_sum(view, explanation.error)
    return explanation


def require_sum(view: ModelView, error: float) -> None:
    """Raise where contributions do not sum to the model's logit; ``error`` is relative to their
    absolute values."""
    bound = TOLERANCE if view.dtype.itemsize >= 4 else HALF_TOLERANCE
    require(
        error <= bound,
        f"logit of {view.name}",
        expected=f"contributions that sum to it within {bound:.0e} of their absolute values",
        got=f"{error:.2e}",
        instead="check_model(model)",
        error=ReconstructionError,
    )


class Direct:
    """Direct contributions to a logit of each prompt of a batch, or to the difference of two, from
    one forward pass. ``ids`` are the tokens of each prompt, ``others`` what embeddings, MLPs and
    constants wrote."""

    def __init__(
        self,
        view: ModelView,
        head: OutputHead,
        ids: Int[Tensor, "batch side"],
        position: int,
        length: int,
    ) -> None:
        self.view, self.head, self.position, self.length = view, head, position, length
        self.ids = ids.to(view.device)
        signs = [1.0, -1.0][: ids.shape[1]]
        self.sign = torch.tensor(signs, dtype=torch.float64, device=view.device)
        self.paid: list[Float[Tensor, "batch head source"]] = []
        self.paid_values: list[Float[Tensor, "batch head source d_head"]] = []
        self.head_readouts: list[Float[Tensor, "batch head d_head"]] = []
        self.others: dict[str, Float[Tensor, " batch"]] = {}
        self.readouts = torch.zeros(ids.shape, dtype=torch.float64)

    def run(self, tokens: Int[Tensor, "batch position"]) -> None:
        """The forward pass."""
        layers = range(self.view.n_layers)
        run_written(self.view, tokens, layers, self.on_layer, on_end=self.on_end)

    def on_layer(self, layer: LayerView, written: Written) -> None:
        """Keep what each head takes from each source: its value, times the attention paid."""
        if layer.v is None or layer.pattern is None:
            what, got = f"layer {layer.layer} of {self.view.name}", "no values"
            fail(what, expected="hooks of values", got=got, error=UnsupportedModelError)
        paid = upcast(layer.pattern[:, :, self.position]).double()
        self.paid.append(paid)
        value = (layer.v - layer.v_constant).double()
        self.paid_values.append(einsum(paid, value, "b h j, b j h e -> b h j e"))

    def on_end(self, h: Tensor, written: Written) -> None:
        """What the logit reads each head's mixed values by, and what everything else wrote."""
        i, norm, sign = self.position, self.head.norm, self.sign
        scale = norm.scale(h)[:, i].double()
        rows = self.head.directions(self.ids.flatten().tolist()).double()
        rows = rows.unflatten(0, self.ids.shape) / scale[:, None, None]
        u = einsum(rows, sign, "b s d, s -> b d")
        self.others = {n: (x[:, i].double() * u).sum(-1) for n, x in written.dense.items()}
        W_U, b_U = self.head.W_U[:, self.ids].double(), self.head.b_U[self.ids].double()
        offsets = einsum(W_U, norm.bias.double(), "d b s, d -> b s") + b_U
        self.others[CONSTANTS] = (written.constants[:, i].double() * u).sum(-1) + offsets @ sign
        for heads in written.heads:
            out = einsum(heads.W.double(), u, "h e d, b d -> b h e")
            self.head_readouts.append(out * heads.scale[:, i].double()[:, None, None])
        self.readouts = einsum(rows, h[:, i].double(), "b s d, b d -> b s") + offsets

    def logit(self, tokens: Tensor) -> Float[Tensor, " batch"]:
        """The model's own logits; where it has a soft cap, those before it.

        What the cap takes off is computed from the readout, and added to the logit that the model
        gives. To invert the cap would blow up the rounding of a logit near it.
        """
        logits = self.view.logits(tokens, position=self.position)[:, 0].gather(1, self.ids).double()
        readouts = self.readouts.to(logits)
        return (logits + readouts - soft_cap(readouts, self.head.softcap)) @ self.sign

    def contributions(self) -> Float[Tensor, "batch layer head source"]:
        """What each head wrote towards the target from each source."""
        layers = zip(self.paid_values, self.head_readouts, strict=True)
        return torch.stack([einsum(v, u, "b h j e, b h e -> b h j") for v, u in layers], 1)

    def largest(self, n: int) -> tuple[tuple[int, int, int], ...]:
        """(layer, head, source) of the largest contributions in the first prompt."""
        values = self.contributions()[0]
        best = values.abs().flatten().topk(min(n, values.numel())).indices
        each = torch.unravel_index(best, values.shape)
        return tuple(zip(*(x.tolist() for x in each), strict=True))


class _Pairs:
    """Values and scores of chosen (layer, head, source) by parts."""

    def __init__(
        self, family: Family, direct: Direct, pairs: Sequence[tuple[int, int, int]]
    ) -> None:
        self.family, self.direct, self.pairs = family, direct, pairs
        options = {"dtype": torch.float64, "device": direct.view.device}
        parts = len(part_names(family))
        self.values = torch.zeros(len(pairs), parts, **options)
        self.terms = torch.zeros(len(pairs), parts, parts, **options)
        self.alibi, self.patterns = (torch.zeros(len(pairs), **options) for _ in range(2))
        self.labels: list[str] = []
        self.flags: list[str] = []

    def on_layer(self, layer: LayerView, written: Written) -> None:
        """Split the pairs of one layer."""
        pairs_here = [p for p, (of_layer, _, _) in enumerate(self.pairs) if of_layer == layer.layer]
        heads = sorted({self.pairs[p][1] for p in pairs_here})
        terms = split_layer(self.family, layer, heads, written, device=layer.h.device)
        self.labels.append(terms.bias_label)
        self.flags += terms.provenance.flags
        layer = reading(self.family, layer)
        values = project(self.family, layer, "v", written).double()
        # what is written whatever the source is stands among the constants of the logit
        values[0] -= layer.v_constant.double()
        position = self.direct.position
        seen = layer.seen_by(position)
        for p in pairs_here:
            _, head, source = self.pairs[p]
            at = heads.index(head)
            paid = self.direct.paid[layer.layer][0, head, source]
            readout = self.direct.head_readouts[layer.layer][0, head]
            self.values[p] = values[:, 0, source, head] @ readout * paid
            q, k = terms.q[:, 0, position, at].double(), terms.k[:, 0, :, at].double()
            self.terms[p] = q @ (k[:, source] - k[:, seen].mean(1)).mT
            self.patterns[p] = paid
            if terms.bias is not None:
                row = terms.bias[at, position].double()
                self.alibi[p] = row[source] - row[seen].mean()
