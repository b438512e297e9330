"""What the package knows about a model: shapes, weights, and ways to run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base.results import Provenance
from tl_geometry.models.layer_view import HeadWeights, LayerView
from tl_geometry.models.norms import NormWeights

Hook = Callable[[Tensor], Tensor | None]
"""Called with an activation; a tensor returned takes its place, ``None`` leaves it."""


@runtime_checkable
class Run(Protocol):
    """Run the model once over ``tokens`` in evaluation mode without gradients.

    ``hooks`` maps TransformerLens hook names (HookedTransformer spelling) to functions of the
    activation. With ``logits`` the logits are returned, otherwise ``None`` and they are never
    computed where the class allows it; ``stop_at`` stops before that block (only where nothing
    later is hooked). Hooks are removed afterwards, also on exceptions; a hook that did not fire is
    an error.
    """

    def __call__(
        self,
        tokens: Int[Tensor, "batch position"],
        hooks: Mapping[str, Hook],
        *,
        logits: bool = False,
        stop_at: int | None = None,
    ) -> Tensor | None: ...


LayerHook = Callable[[LayerView], None]
"""Receives the view of a layer as soon as the forward pass has finished that layer."""


@runtime_checkable
class RunLayers(Protocol):
    """Run the model once over ``tokens`` and call ``on_layer`` for each of ``layers`` in order,
    holding one layer at a time.

    With ``verify`` each layer's scores, patterns, queries and keys are recomputed and compared, and
    a layer that does not add up raises ``ReconstructionError``; without it queries and keys are the
    model's own, from its hooks, and nothing is recomputed.
    """

    def __call__(
        self,
        tokens: Int[Tensor, "batch position"],
        layers: Sequence[int],
        on_layer: LayerHook,
        *,
        verify: bool = True,
    ) -> None: ...


@runtime_checkable
class BuildLayer(Protocol):
    """View of a layer from a mapping that holds its ``layer_hooks``; without ``verify`` pattern,
    scores and z may be missing."""

    def __call__(
        self, layer: int, cache: Mapping[str, Tensor], *, verify: bool = True
    ) -> LayerView: ...


@runtime_checkable
class Rows(Protocol):
    """Windows of tokens, as :class:`tl_geometry.TokenWindows` has them: what a provenance says
    about them."""

    @property
    def corpus(self) -> str:
        """Label of the texts."""
        ...

    @property
    def token_hash(self) -> str:
        """Hash of all ids in their order."""
        ...

    @property
    def has_bos(self) -> bool:
        """Whether windows begin with the BOS token."""
        ...

    @property
    def flags(self) -> tuple[str, ...]:
        """What a reader must know about the tokens."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelView:
    """What the package knows about a model, read from the model object and verified against its own
    activations.

    ``state_hooks[s]`` is the hook that holds state ``s``; ``head_trained`` is false where the
    output head was newly initialised, so that no output-based measure is given. ``layer(l, cache)``
    builds the verified view of attention layer ``l`` from a mapping that holds ``layer_hooks(l)``
    (a TransformerLens ``ActivationCache`` will do); ``run_layers`` streams them through one forward
    pass; ``layer_facts(l)`` says in words how a layer makes its scores. ``final_norm`` is the norm
    before the unembedding ``unembed [d_model d_vocab]``, ``None`` where there is none or the output
    is not a linear readout of the last state. ``hooked()`` names the hook points at which somebody
    else's hook acts now. ``pad_id`` is the tokenizer's padding token where it is no other special
    token too, so that it means padding and nothing else. ``refresh(view)`` is the view as the model
    is now (the same one, if its weights and settings are the same), which every public function
    takes in place of the one that it was given.
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
    layer: BuildLayer
    layer_hooks: Callable[[int], tuple[str, ...]]
    run_layers: RunLayers
    layer_facts: Callable[[int], Mapping[str, object]]
    final_norm: Callable[[], NormWeights | None]
    unembed: Callable[[], Float[Tensor, "d_model d_vocab"]]
    hooked: Callable[[], tuple[str, ...]]
    refresh: Callable[[ModelView], ModelView] | None = None
    notes: tuple[str, ...] = ()
    pad_id: int | None = None

    def __repr__(self) -> str:
        size = f"{self.n_layers} layers, {self.n_heads} heads, d_model {self.d_model}, {str(self.dtype).removeprefix('torch.')}"
        return f"ModelView({self.name} ({self.fingerprint}), {self.kind}, {self.library}, {size}, on {self.device})"

    @property
    def states(self) -> range:
        """All residual stream states, 0 (embedding output) to n_layers (before the final norm)."""
        return range(self.n_layers + 1)

    def provenance(self, rows: Rows | None = None, **fields: Any) -> Provenance:
        """Provenance of a result of this model (on ``rows``), with the hooks that act on it now;
        ``fields`` are the rest."""
        about = {
            "model": self.name,
            "fingerprint": self.fingerprint,
            "library": f"{self.kind}, {self.library}",
            "processed": self.processed,
        }
        about |= {
            "library": f"{self.kind}, {self.library}",
            "dtype": str(self.dtype).removeprefix("torch."),
            "hooks": self.hooked(),
        }
        if rows is not None:
            about |= {
                "corpus": rows.corpus,
                "token_hash": rows.token_hash,
                "has_bos": rows.has_bos,
                "contexts": len(rows),
            }
            fields = {
                **fields,
                "flags": tuple(dict.fromkeys([*rows.flags, *fields.get("flags", ())])),
            }
        return Provenance(**(about | fields))
