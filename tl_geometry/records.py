"""Frozen records that rooms hand to each other: windows of tokens, a view of a model, and a view of one of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry._check import describe, require
from tl_geometry.results import hash_tokens

Hook = Callable[[Tensor], Tensor | None]
"""Called with an activation; a tensor returned takes its place, ``None`` leaves it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenWindows:
    """Windows of one length: ``tokens [context position]``, a document label per context (or ``None``), whether column 0 is BOS.

    ``names[labels[c]]`` is the document that context ``c`` was cut from; ``str_tokens`` are the readable tokens of the first window.
    """

    tokens: Int[Tensor, "context position"]
    has_bos: bool
    labels: Int[Tensor, "context"] | None = None
    names: tuple[str, ...] = ()
    corpus: str = ""
    str_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ok = self.tokens.dim() == 2 and not self.tokens.is_floating_point() and self.tokens.numel() > 0
        require(ok, "TokenWindows", expected="integer tokens [context position], at least one", got=describe(self.tokens))
        if self.labels is not None:
            ok = self.labels.shape == self.tokens.shape[:1]
            require(ok, "labels", expected=f"one label for each of {len(self.tokens)} contexts", got=describe(self.labels))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, contexts: slice | Int[Tensor, "batch"]) -> TokenWindows:
        """Some of the contexts, in the given order."""
        labels = None if self.labels is None else self.labels[contexts]
        return TokenWindows(tokens=self.tokens[contexts], has_bos=self.has_bos, labels=labels, names=self.names, corpus=self.corpus)

    @property
    def token_hash(self) -> str:
        """Hash of the tokens in their order."""
        return hash_tokens(self.tokens)


@runtime_checkable
class Run(Protocol):
    """Run the model once over ``tokens`` in evaluation mode without gradients.

    ``hooks`` maps TransformerLens hook names (HookedTransformer spelling) to functions of the activation. With ``logits``
    the logits are returned, otherwise ``None`` and they are never computed where the class allows it; ``stop_at`` stops
    before that block (only where nothing later is hooked). Hooks are removed afterwards, also on exceptions; a hook that
    did not fire is an error.
    """

    def __call__(
        self, tokens: Int[Tensor, "batch position"], hooks: Mapping[str, Hook], *, logits: bool = False, stop_at: int | None = None
    ) -> Tensor | None: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadWeights:
    """Weights of one attention layer in TransformerLens order, grouped keys expanded to ``n_heads``; absent biases are zeros."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_Q: Float[Tensor, "head d_head"]
    b_K: Float[Tensor, "head d_head"]
    b_V: Float[Tensor, "head d_head"]
    b_O: Float[Tensor, " d_model"]


@dataclass(frozen=True, eq=False, kw_only=True)
class NormWeights:
    """The norm in front of a projection: ``x = ((h A) / s) * gain + bias``, A centring over d_model for ``"LN"``, identity for ``"RMS"``.

    ``kind`` ``None`` is no norm (``x = h``); ``s = sqrt(mean((hA)^2) + eps)``.
    """

    kind: str | None
    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    eps: float


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelView:
    """What the package knows about a model, read from the model object and verified against its own activations.

    ``state_hooks[s]`` is the hook that holds state ``s``; ``head_trained`` is false where the output head was newly
    initialised, so that no output-based measure is given. ``layer(l, cache)`` builds the verified view of attention layer
    ``l`` from a cache that holds ``layer_hooks(l)``.
    """

    model: Any
    name: str
    kind: str
    library: str
    processed: bool
    fingerprint: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    n_ctx: int
    causal: bool
    position: str
    norm: str | None
    dtype: torch.dtype
    device: torch.device
    head_trained: bool
    bos_id: int | None
    state_hooks: tuple[str, ...]
    run: Run
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], list[str]]
    weights: Callable[[int], HeadWeights]
    attention_norm: Callable[[int], NormWeights]
    notes: tuple[str, ...] = ()

    @property
    def states(self) -> range:
        """All residual stream states, 0 (embedding output) to n_layers (before the final norm)."""
        return range(self.n_layers + 1)


Mask = Bool[Tensor, "*batch query key"]
