"""What the package knows about a model, and what it can ask of one: :class:`ModelView` answers for
every TransformerLens class, so that other packages need not touch the model object."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import UnsupportedModelError, fail, require
from tl_geometry.base.html import of_bytes
from tl_geometry.base.results import Provenance
from tl_geometry.models.fingerprint import fingerprint
from tl_geometry.models.layers import Layers
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.output_head import OutputHead, infer_head, read_head, unembedding
from tl_geometry.models.parameters import part, upcast
from tl_geometry.models.runner import NOTHING, Hook, brief, hooked_points, keep, without_hooks

BEFORE_UNEMBEDDING = ("unembed.hook_in", "ln_final.hook_normalized")


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelView(Layers):
    """What the package knows about a model, read from the model object and verified against its own
    activations; made by :func:`tl_geometry.view`.

    ``state_hooks[s]`` is the hook that holds state ``s``; ``processed`` says whether
    TransformerLens folded or centred the weights; ``n_ctx`` is the longest prompt. ``head_trained``
    is false where the output head was newly initialised, so that no output-based measure is given.
    ``position`` is the position scheme (``"standard"``, ``"rotary"``, ``"alibi"``, ...), ``norm``
    the type of the model's norms (``"LN"``, ``"RMS"`` or ``None``), ``class_name`` that of
    TransformerLens, ``library`` the installed version of it. ``bos_id`` is the token that begins a
    text (BERT's CLS), ``prepends_bos`` says whether TransformerLens puts it there by itself.
    ``pad_id`` is the tokenizer's padding token, often that which ends a text too.
    """

    library: str
    processed: bool
    fingerprint: str
    n_layers: int
    n_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    n_ctx: int
    position: str
    norm: str | None
    dtype: torch.dtype
    device: torch.device
    head_trained: bool
    bos_id: int | None
    prepends_bos: bool = False
    pad_id: int | None = None

    def __repr__(self) -> str:
        size = f"{self.n_layers} layers, {self.n_heads} heads, d_model {self.d_model}"
        about = f"{self.class_name}, {self.library}, {size}, {self.dtype_name}, on {self.device}"
        return f"ModelView({self.name} ({self.fingerprint}), {about})"

    def is_of_model(self, other: ModelView) -> bool:
        """Whether two views are of one model object, with the same weights."""
        return self._model is other._model and self.fingerprint == other.fingerprint

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights, as ``"float32"``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def states(self) -> range:
        """All residual stream states, 0 (embedding output) to n_layers (before the final norm)."""
        return range(self.n_layers + 1)

    # ---- hooks by what they hold

    @property
    def pattern_hooks(self) -> tuple[str, ...]:
        """The hook of each layer that holds the attention pattern ``[batch head query key]``."""
        return tuple(f"blocks.{layer}.attn.hook_pattern" for layer in range(self.n_layers))

    @property
    def z_hooks(self) -> tuple[str, ...]:
        """The hook of each layer that holds the mixed values of its heads."""
        return tuple(f"blocks.{layer}.attn.hook_z" for layer in range(self.n_layers))

    @property
    def attention_hooks(self) -> tuple[str, ...]:
        """The hook of each layer that holds what attention adds to the stream."""
        return tuple(f"blocks.{layer}.hook_attn_out" for layer in range(self.n_layers))

    @property
    def mlp_hooks(self) -> tuple[str, ...]:
        """The hook of each layer that holds what the MLP adds to the stream; attention-only models
        have none, and a pass that asks for them raises ``UnsupportedModelError``."""
        return tuple(f"blocks.{layer}.hook_mlp_out" for layer in range(self.n_layers))

    # ---- forward passes

    def logits(
        self,
        tokens: Tensor,
        hooks: Mapping[str, Hook] = NOTHING,
        position: int | None = None,
        *,
        forward: Mapping[str, Any] = NOTHING,
    ) -> Float[Tensor, "*batch d_vocab"]:
        """Logits of one forward pass ``[batch position d_vocab]``, at one ``position`` if it is
        given: no other is unembedded, where the model has a hook in front of its unembedding."""
        points = [n for n in BEFORE_UNEMBEDDING if n in self._points]
        early = position is not None and self.causal and points != []
        if early:
            hooks = {**hooks, points[0]: lambda h: h[:, [position]]}
        logits = self.run(tokens, hooks, logits=True, forward=forward)
        assert logits is not None
        return logits if position is None or early else logits[:, [position]]

    def hooked(self) -> tuple[str, ...]:
        """Where user hooks act now."""
        return hooked_points(self._model)

    # ---- weights and facts

    @torch.no_grad()
    def embed(self) -> Float[Tensor, "d_vocab d_model"]:
        """The embedding matrix, at least float32."""
        return upcast(self._model.W_E)

    @torch.no_grad()
    def unembed(self) -> Float[Tensor, "d_model d_vocab"]:
        """The unembedding matrix, at least float32."""
        return unembedding(self._model)[0]

    @torch.no_grad()
    def unembed_bias(self) -> Float[Tensor, " d_vocab"]:
        """Bias of the logits, zeros where there is none."""
        return unembedding(self._model)[1]

    @torch.no_grad()
    def output_head(self) -> OutputHead | None:
        """Final norm, unembedding, bias and soft cap, verified against the model's logits of four
        random tokens; ``None`` where the output is not a linear readout of a norm of the last
        state."""
        reading = self.once("head", self._infer_head)
        like = next(iter(self._model.parameters())).new_empty(self.d_model)
        return None if reading is None else read_head(self._model, reading, like)

    def _infer_head(self) -> Any:
        generator, states = torch.Generator().manual_seed(1), {}
        last, size = "last", (1, min(4, self.n_ctx))
        ids = torch.randint(0, self.d_vocab, size, generator=generator)
        with without_hooks(self._model):
            logits = self.logits(ids, {self.state_hooks[-1]: keep(states, last)})
        return infer_head(self._model, logits, states[last])

    def final_norm(self) -> NormWeights | None:
        """The norm of :meth:`output_head`."""
        head = self.output_head()
        return None if head is None else head.norm

    # ---- text

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model reads text."""
        return part(self._model, "tokenizer") is not None

    @property
    def vocabulary_size(self) -> int:
        """Ids below this have a text: those of the tokenizer. An embedding often has more rows."""
        tokenizer = part(self._model, "tokenizer")
        return self.d_vocab if tokenizer is None else min(self.d_vocab, len(tokenizer))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        if not self.has_tokenizer:
            fail(self.name, expected="a tokenizer to read text", got="none", instead="token ids")
        ids = self._model.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> list[str]:
        """Text of each token id; ``"<7>"`` where it has none, ``"<0xF0>"`` of a byte that is no
        whole character."""
        if not self.has_tokenizer:
            return [f"<{i}>" for i in ids]
        single, tokenizer = [[int(i)] for i in ids], self._model.tokenizer
        texts = tokenizer.batch_decode(single, clean_up_tokenization_spaces=False)
        for at, text in enumerate(texts):
            if "\ufffd" in text:  # a piece of a character, or several
                texts[at] = of_bytes(tokenizer.convert_ids_to_tokens(int(ids[at])))
        return [text or f"<{i}>" for text, i in zip(texts, ids, strict=True)]

    # ---- results

    def require_output(self, what: str) -> None:
        """Refuse output-based measures where they would mean nothing: no causal language model, or
        a newly initialised head."""
        expected, got = "a causal language model", f"{self.name}, an encoder"
        if not self.head_trained:
            expected = "a model with a trained output head"
            got = f"{self.name}, whose head was newly initialised"
        fits, kind = self.head_trained and self.causal, UnsupportedModelError
        instead = "the measures of states"
        require(fits, what, expected=expected, got=got, instead=instead, error=kind)

    def require_unchanged(self) -> None:
        """Raise unless the weights and settings are still those of this view: sums over a pass in
        which they changed belong to no model. Edits by this library change neither."""
        now, what = fingerprint(self._model), f"a result or an edit of {self.name}"
        expected = f"the weights that it was made for ({self.fingerprint})"
        got = f"others ({now}): they changed during the pass, or since the edit was made"
        instead = "a second model (tl_geometry.load) while it is trained or processed"
        require(now == self.fingerprint, what, expected=expected, got=got, instead=instead)

    def provenance(self, rows: Any = None, *, streamed: bool = True, **fields: Any) -> Provenance:
        """Provenance of a result of this model (on ``rows``, a
        :class:`~tl_geometry.TokenWindows`), with the user hooks that act on it now; ``fields`` are
        its other fields.

        Call it when the passes have ended: it raises where the weights have changed since this
        view was made (:meth:`require_unchanged`). That takes as long as a third of a pass over one
        prompt, so that what is not ``streamed`` does not ask: its view has just been made.
        """
        if streamed:
            self.require_unchanged()
        about: dict[str, Any] = {"model": self.name, "fingerprint": self.fingerprint}
        about |= {"library": f"{self.class_name}, {self.library}", "processed": self.processed}
        about |= {"dtype": self.dtype_name, "hooks": self.hooked()}
        if rows is not None:
            about |= {"corpus": rows.corpus, "token_hash": rows.token_hash}
            about |= {"has_bos": rows.has_bos, "contexts": len(rows)}
            fields["flags"] = (*rows.flags, *fields.get("flags", ()))
        provenance = Provenance(**(about | fields))
        hooks = [f"under hooks at {brief(provenance.hooks)}"] if provenance.hooks else []
        return provenance.flagged(*hooks)
