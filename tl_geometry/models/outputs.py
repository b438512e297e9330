"""Next-token distributions with hooks in place, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, require
from tl_geometry.models.batches import default_batch
from tl_geometry.models.continuing import Behind, behind
from tl_geometry.models.model_view import Hook, ModelView

ELEMENTS = 2**27
"""Logits of one forward pass, at most (0.5 GiB in float32)."""
KEPT_BYTES, PILOTS = 2**28, 512
"""Keys and values of the earlier tokens, and rows, of one pass over last tokens alone, at most."""


def require_output(view: ModelView, what: str) -> None:
    """Refuse output-based measures where they would mean nothing: no causal language model, or a
    newly initialised head."""
    require(
        view.head_trained,
        what,
        expected="a model with a trained output head",
        got=f"{view.name}, whose head was newly initialised",
        instead="the measures of states",
        error=UnsupportedModelError,
    )
    require(
        view.causal,
        what,
        expected="a causal language model",
        got=f"{view.name}, an encoder",
        instead="the measures of states",
        error=UnsupportedModelError,
    )


def output_batch(view: ModelView, columns: int, *, all_columns: bool) -> int:
    """Rows of one forward pass whose logits are wanted."""
    return max(
        1,
        min(
            default_batch(columns, view.device),
            ELEMENTS // (view.d_vocab * (columns if all_columns else 1)),
        ),
    )


def log_probabilities(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    hooks: Mapping[str, Hook],
    *,
    column: int | None = -1,
) -> Float[Tensor, "*batch d_vocab"]:
    """Log-probabilities of the next token after ``column`` (after every column for ``None``),
    float64 for one column.

    Where the model has a hook in front of its unembedding, only the wanted column is unembedded.
    """
    hooks = dict(hooks)
    point = next(
        (p for p in ("unembed.hook_in", "ln_final.hook_normalized") if p in view.model.hook_dict),
        None,
    )
    narrow = column is not None and view.causal and point is not None
    if narrow and point is not None and column is not None:
        at = column

        def cut(h: Tensor) -> Tensor:
            return h[:, [at]]

        hooks[point] = cut
    logits = view.run(tokens, hooks, logits=True)
    if logits is None:
        raise RuntimeError("a forward pass with logits returned none")
    if column is None:
        return logits.float().log_softmax(-1)
    return logits[:, 0 if narrow else column].double().log_softmax(-1)


class PilotRuns(NamedTuple):
    """Forward passes of some chunks that differ at the last token only: the tokens before it are
    run once.

    From :func:`pilot_runs`, which verified that the output is the model's own; without ``kept``
    every pass runs all tokens.
    """

    view: ModelView
    tokens: Int[Tensor, "batch position"]
    kept: Behind | None
    copies: int
    """Edited copies of the chunks that one pass can take."""

    @property
    def columns(self) -> int:
        """Positions that hooks see."""
        return self.tokens.shape[1] if self.kept is None else 1

    def log_probabilities(
        self, copies: int, hooks: Mapping[str, Hook]
    ) -> Float[Tensor, "*batch d_vocab"]:
        """The next token after ``copies`` copies of the chunks, one after the other; hooks see the
        last token last."""
        view = self.view if self.kept is None else self.kept.times(copies)
        return log_probabilities(view, self.tokens[:, -self.columns :].repeat(copies, 1), hooks)


def pilot_runs(
    view: ModelView,
    tokens: Int[Tensor, "batch position"],
    own: Float[Tensor, "batch d_vocab"],
    limit: int,
) -> PilotRuns:
    """Passes over ``tokens`` with an edited last token, ``own`` their log-probabilities without an
    edit.

    Where the model's class keeps keys and values rightly (its clean output behind them is ``own``,
    to a relative 1e-4, 0.05 in half precision) only the last token is run; with other people's
    hooks in place, or anywhere else, all tokens are. ``limit`` is the number of whole chunks of one
    pass.
    """
    whole = PilotRuns(view, tokens, None, max(1, limit // len(tokens)))
    kept = None if view.hooked() else behind(view, tokens)
    if kept is None:
        return whole
    copies = max(1, min(PILOTS // len(tokens), int(KEPT_BYTES / max(1, kept.size))))
    runs = PilotRuns(view, tokens, kept, copies)
    error = float((runs.log_probabilities(1, {}) - own).abs().max())
    half = torch.finfo(view.dtype).bits < 32
    return runs if error <= (0.05 if half else 1e-4) * max(1.0, float(own.abs().max())) else whole


class Distances(NamedTuple):
    """Two next-token distributions per row, compared."""

    kl: Float[Tensor, "*batch"]
    """``KL(changed | own)``, nats."""
    kl_reverse: Float[Tensor, "*batch"]
    """``KL(own | changed)``, nats."""
    top1: Float[Tensor, "*batch"]
    """1 where the most likely tokens agree."""
    top5: Float[Tensor, "*batch"]
    """Tokens among the five most likely of both (0 to 5)."""


def distances(
    changed: Float[Tensor, "*batch d_vocab"], own: Float[Tensor, "*batch d_vocab"]
) -> Distances:
    """Compare log-probabilities.

    >>> p = Tensor([[0.5, 0.25, 0.25]]).log()
    >>> float(distances(p, p).kl), float(distances(p, p).top1)
    (0.0, 1.0)
    """
    gap = changed - own
    kl = (changed.exp() * gap).sum(-1).clamp(min=0)
    reverse = -(own.exp() * gap).sum(-1).clamp(max=0)
    k = min(5, own.shape[-1])
    first, second = changed.topk(k, dim=-1).indices, own.topk(k, dim=-1).indices
    shared = (first[..., :, None] == second[..., None, :]).any(-1).sum(-1)
    return Distances(kl, reverse, (first[..., 0] == second[..., 0]).to(kl), shared.to(kl))


def norm_after_attention(view: ModelView, layer: int) -> bool:
    """Whether a norm stands between what the heads of a layer give and the stream (Gemma 2 and 3,
    OLMo 2)."""
    after_only = (
        view.causal
        and view.norm is not None
        and view.layer_facts(layer)["norm before attention"] == "none"
    )
    return after_only or hasattr(view.model.blocks[layer], "ln1_post")
