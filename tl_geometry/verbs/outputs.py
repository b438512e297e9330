"""Next-token distributions with hooks in place, and how far two of them are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry._check import require
from tl_geometry.capture import default_batch
from tl_geometry.errors import UnsupportedModelError
from tl_geometry.records import Hook, ModelView

ELEMENTS = 2**27
"""Logits of one forward pass, at most (0.5 GiB in float32)."""


def require_output(view: ModelView, what: str) -> None:
    """Refuse output-based measures where they would mean nothing: no causal language model, or a newly initialised head."""
    require(
        view.head_trained, what, expected="a model with a trained output head", got=f"{view.name}, whose head was newly initialised",
        instead="the measures of states", error=UnsupportedModelError,
    )  # fmt: skip
    require(
        view.causal, what, expected="a causal language model", got=f"{view.name}, an encoder", instead="the measures of states",
        error=UnsupportedModelError,
    )  # fmt: skip


def output_batch(view: ModelView, columns: int, *, all_columns: bool) -> int:
    """Rows of one forward pass whose logits are wanted."""
    return max(1, min(default_batch(columns, view.device), ELEMENTS // (view.d_vocab * (columns if all_columns else 1))))


def log_probabilities(
    view: ModelView, tokens: Int[Tensor, "batch position"], hooks: Mapping[str, Hook], *, column: int | None = -1
) -> Float[Tensor, "*batch d_vocab"]:
    """Log-probabilities of the next token after ``column`` (after every column for ``None``), float64 for one column.

    Where the model has a hook in front of its unembedding, only the wanted column is unembedded.
    """
    hooks = dict(hooks)
    point = next((p for p in ("unembed.hook_in", "ln_final.hook_normalized") if p in view.model.hook_dict), None)
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


def distances(changed: Float[Tensor, "*batch d_vocab"], own: Float[Tensor, "*batch d_vocab"]) -> Distances:
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
    """Whether a norm stands between what the heads of a layer give and the stream (Gemma 2 and 3, OLMo 2)."""
    after_only = view.causal and view.norm is not None and view.layer_facts(layer)["norm before attention"] == "none"
    return after_only or hasattr(view.model.blocks[layer], "ln1_post")
