"""How is a dictionary of features of a block's input read? SAELens autoencoders, and activations
with their decoder, become one form for ``feature_shares``. What an autoencoder does to a state
before it encodes it is undone on decoder and bias, and the outcome is compared with its own
``decode``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.checks import describe
from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError, require
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.states import other_states

FOREIGN = ("transcoder", "temporal")
"""Architectures of SAELens whose decoder does not explain the states that it encodes: transcoders
explain another hook point, a temporal one also predicts a state from its context by attention."""
NORMALIZATIONS = ("none", "constant_norm_rescale", "layer_norm")
"""What an autoencoder may do to its input (SAELens's ``normalize_activations``)."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Directions of the stream at the input of one block, and how much of each a state holds.

    ``encode`` gives the activations ``[batch position feature]`` of states; ``normalization`` is
    what is done to a state before that, and is undone on decoder and bias. ``source`` is the
    autoencoder. ``over_batch`` says that the activations of a state depend on the other states of
    its batch, ``stored`` that they were given, and that ``encode`` returns those of all prompts.
    """

    layer: int
    decoder: Float[Tensor, "feature d_model"]
    bias: Float[Tensor, " d_model"]
    encode: Callable[[Tensor], Tensor]
    normalization: str = "none"
    source: Any = None
    over_batch: bool = False
    stored: bool = False

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

    Where activations are rescaled by the decoder's norms (``rescale_acts_by_decoder_norm`` of TopK
    and BatchTopK), features are directions of norm one. A BatchTopK or Matryoshka autoencoder as it
    was trained is read as SAELens saves it, by its threshold, so that the activations of a token do
    not depend on the others; before it has a threshold, all tokens must be one batch.

    Raises ``UnsupportedModelError`` for an autoencoder of another hook point or of a stream that
    was centred otherwise, for a transcoder or a temporal autoencoder, and for normalisations other
    than ``"none"``, ``"constant_norm_rescale"`` and ``"layer_norm"``.

    >>> import tl_geometry as tlg
    >>> known = tlg.circuits.dictionary((torch.ones(1, 2, 3), torch.eye(3), torch.zeros(3)), 0)
    >>> known.decoder.shape, known.normalization
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
        # a caller may go on writing into the tensors that it gave
        activations, decoder, bias = (x.detach().clone() for x in source)
        return Dictionary(layer, decoder, bias, lambda h: activations.to(h), stored=True)
    missing = [name for name in ("encode", "W_dec", "b_dec") if not hasattr(source, name)]
    expected, instead = "an object with encode, W_dec, b_dec", "(activations, decoder, bias)"
    got = f"{type(source).__name__} without {', '.join(missing)}"
    require(not missing, "dictionary", expected=expected, got=got, instead=instead)
    normalization = _account(source, layer, None if model is None else as_view(model))
    decoder, threshold = source.W_dec.detach(), getattr(source, "topk_threshold", None)
    if getattr(getattr(source, "cfg", None), "rescale_acts_by_decoder_norm", False):
        decoder = torch.nn.functional.normalize(decoder, dim=-1)  # a dead row stays zero
    # a BatchTopK without a threshold chooses its features over the whole batch
    over_batch = threshold is not None and float(threshold) <= 0

    def encode(h: Tensor) -> Tensor:
        with torch.no_grad():
            h_source = h.to(source.W_dec.dtype)
            if threshold is not None and not over_batch:
                before = source.encode_with_hidden_pre(h_source)[1]
                return torch.where(before > threshold, before, 0).to(h)
            encoded = source.encode(h_source)
            return (encoded.to_dense() if encoded.is_sparse else encoded).to(h)

    bias = source.b_dec.detach()
    return Dictionary(layer, decoder, bias, encode, normalization, source, over_batch)


def _account(source: Any, layer: int, view: ModelView | None) -> str:
    """Compare what an autoencoder says of itself with the model; returns its normalisation."""
    cfg = getattr(source, "cfg", None)
    about = getattr(cfg, "metadata", None)

    def setting(name: str) -> Any:
        values = (getattr(owner, name, None) for owner in (about, cfg))
        return next((value for value in values if value is not None), None)

    what = f"dictionary {type(source).__name__}"
    named = getattr(cfg, "architecture", None)
    architecture = str(named()) if callable(named) else ""
    require(
        not any(word in architecture for word in FOREIGN),
        what,
        expected="an autoencoder whose decoder explains the states that it encodes",
        got=repr(architecture),
        instead="(activations, decoder, bias) of states at a block's input",
        error=UnsupportedModelError,
    )
    others, expected = other_states(setting, layer), f"the stream before block {layer}"
    require(not others, what, expected=expected, got=others, error=UnsupportedModelError)
    kwargs = setting("model_from_pretrained_kwargs") or {}
    if view is not None:
        centred = bool(kwargs.get("center_writing_weights", False))
        same = view.norm != "LN" or centred == view.processed
        got = f"a model whose writing weights are {'not ' if centred else ''}centred"
        expected = f"model_from_pretrained_kwargs={kwargs}, as it was trained"
        require(same, what, expected=expected, got=got, error=UnsupportedModelError)
    normalization = str(setting("normalize_activations") or "none")
    expected = f"normalize_activations of {NORMALIZATIONS}"
    known = normalization in NORMALIZATIONS
    require(known, what, expected=expected, got=normalization, error=UnsupportedModelError)
    return normalization


def check_decoder(features: Dictionary, h: Tensor) -> None:
    """Compare what decoder and bias give with the autoencoder's own ``decode``, which may undo a
    normalisation that its settings do not name (by a scale that ``encode`` left it)."""
    source, activations = features.source, features.encode(h)
    with torch.no_grad():
        decoded = source.decode(activations.to(source.W_dec.dtype)).to(h)
    error = float((features.explained(h, activations) - decoded).abs().max())
    limit = 1e-3 * float(decoded.abs().max() + 1)
    require(
        error <= limit,
        f"dictionary {type(source).__name__}",
        expected="decoder and bias that give what its decode gives",
        got=f"a difference of {error:.2g}",
        instead="(activations, decoder, bias)",
        error=ReconstructionError,
    )
