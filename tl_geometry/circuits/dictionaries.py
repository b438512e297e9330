"""How is a dictionary of features of a block's input read? An autoencoder of SAELens as it is, or
activations with their decoder, becomes ``x = sum_f a_f d_f + offset + error`` for
``feature_shares``.

What an autoencoder does to a state before it encodes it, its own ``decode`` undoes: a scale and a
shift of each state. ``decode`` of no features is the offset, and what features add to that beside
``sum_f a_f W_dec[f]`` is the scale. What is not of this form is refused.
"""

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
from tl_geometry.models.reader import as_view
from tl_geometry.models.states import other_states

FOREIGN = ("transcoder", "temporal")
"""Architectures of SAELens whose decoder does not explain the states that it encodes: transcoders
explain another hook point, a temporal one also predicts a state from its context by attention."""
OUTSIDE = ("expected_average_only_in", "covariance_whitening")
"""What SAELens does to states outside of an autoencoder until it is folded into the weights, so
that neither ``encode`` nor ``decode`` knows it (``normalize_activations``)."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Directions of the stream at the input of one block, and how much of each a state holds.

    ``read`` gives, of states ``[batch position d_model]``, the activations
    ``[batch position feature]`` and the offset, so that
    ``states = activations @ decoder + offset + error``. ``given`` says that the activations were
    given, and are those of all prompts whatever the states.
    """

    layer: int
    decoder: Float[Tensor, "feature d_model"]
    read: Callable[[Tensor], tuple[Tensor, Tensor]]
    given: bool = False


def dictionary(source: Any, layer: int, model: ModelLike | None = None) -> Dictionary:
    """A dictionary of the input of block ``layer``: a sparse autoencoder (SAE) as SAELens has it
    (an object with ``encode``, ``W_dec`` and ``b_dec``, and a ``decode`` unless that is all it
    does), or a tuple (activations ``[batch position feature]`` of the prompts to be split, decoder
    ``[feature d_model]``, bias).

    With ``model``, an autoencoder's own account of where it was trained is compared with it.

    Where activations are rescaled by the decoder's norms (``rescale_acts_by_decoder_norm`` of TopK
    and BatchTopK), features are directions of norm one. A BatchTopK or Matryoshka autoencoder as it
    was trained is read as SAELens saves it, by its threshold, so that the activations of a token do
    not depend on the others.

    Raises ``UnsupportedModelError`` for an autoencoder of another hook point or of a stream that
    was centred otherwise, for a transcoder or a temporal autoencoder, and for a normalisation that
    is still to be folded in.

    >>> import tl_geometry as tlg
    >>> known = tlg.circuits.dictionary((torch.ones(1, 2, 3), torch.eye(3), torch.zeros(3)), 0)
    >>> known.decoder.shape, known.given
    (torch.Size([3, 3]), True)
    """
    if isinstance(source, tuple):
        ok = len(source) == 3 and all(isinstance(x, Tensor) for x in source)
        ok = ok and [x.dim() for x in source] == [3, 2, 1]
        ok = ok and source[0].shape[-1] == len(source[1]) and source[2].shape == source[1].shape[1:]
        expected = "([batch position feature], [feature d_model], [d_model])"
        require(ok, "dictionary", expected=expected, got=[describe(x) for x in source])
        # a caller may go on writing into the tensors that it gave
        activations, decoder, bias = (x.detach().clone() for x in source)
        return Dictionary(layer, decoder, lambda h: (activations.to(h), bias.to(h)), given=True)
    missing = [name for name in ("encode", "W_dec", "b_dec") if not hasattr(source, name)]
    expected, instead = "an object with encode, W_dec, b_dec", "(activations, decoder, bias)"
    got = f"{type(source).__name__} without {', '.join(missing)}"
    require(not missing, "dictionary", expected=expected, got=got, instead=instead)
    _check_account(source, layer, model)
    decoder = source.W_dec.detach()
    if getattr(getattr(source, "cfg", None), "rescale_acts_by_decoder_norm", False):
        decoder = torch.nn.functional.normalize(decoder, dim=-1)  # a dead row stays zero
    return Dictionary(layer, decoder, lambda h: _read(source, decoder, h))


@torch.no_grad()
def _read(source: Any, decoder: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Activations of states, with the scale of each state in them, and the offset."""
    states, threshold = h.to(decoder), getattr(source, "topk_threshold", None)
    if threshold is None:
        encoded = source.encode(states)
        activations = encoded.to_dense() if encoded.is_sparse else encoded
    else:  # a BatchTopK in training chooses over a batch: read as SAELens saves it
        before = source.encode_with_hidden_pre(states)[1]
        activations = torch.where(before > threshold, before, 0)
    # decode forgets the scale of the states after one call: with all features, and with none
    both = torch.stack([activations, torch.zeros_like(activations)])
    decode = getattr(source, "decode", lambda both: both @ source.W_dec + source.b_dec)
    explained, offset = decode(both).to(h)
    activations, decoder = activations.to(h), decoder.to(h)
    features = activations @ decoder
    size = features.square().sum(-1, keepdim=True)
    scale = ((explained - offset) * features).sum(-1, keepdim=True) / size
    scale = torch.where(size > 0, scale, 1.0)
    error = float((scale * features + offset - explained).abs().max())
    # a decoder in half precision rounds more than float32 does
    fits = error <= 1e-3 * float(explained.abs().max() + 1)
    what, expected = type(source).__name__, "a decode that scales and shifts activations @ W_dec"
    got, instead = f"a difference of {error:.2g}", "(activations, decoder, bias)"
    kind = ReconstructionError
    require(fits, f"dictionary {what}", expected=expected, got=got, instead=instead, error=kind)
    return scale * activations, offset


def _check_account(source: Any, layer: int, model: ModelLike | None) -> None:
    """Compare what an autoencoder says of itself with the block and the model."""
    cfg = getattr(source, "cfg", None)
    about = getattr(cfg, "metadata", None)

    def setting(name: str) -> Any:
        values = (getattr(owner, name, None) for owner in (about, cfg))
        return next((value for value in values if value is not None), None)

    named, view = setting("architecture"), None if model is None else as_view(model)
    architecture = str(named() if callable(named) else named)
    kwargs = setting("model_from_pretrained_kwargs") or {}
    centred = bool(kwargs.get("center_writing_weights", False))
    other_model = view is not None and view.norm == "LN" and centred != view.processed
    foreign = any(word in architecture for word in FOREIGN)
    others, norm = other_states(setting, layer), str(setting("normalize_activations"))
    trained = f"weights by model_from_pretrained_kwargs={kwargs}, as it was trained"
    facts = (
        (foreign, "a decoder of the states that are encoded", architecture),
        (others, f"the stream before block {layer}", others),
        (other_model, trained, f"writing weights that are {'not ' * centred}centred"),
        (norm in OUTSIDE, "normalize_activations folded into the weights", norm),
    )
    what, instead = f"dictionary {type(source).__name__}", "(activations, decoder, bias)"
    error = UnsupportedModelError
    for wrong, expected, got in facts:
        require(not wrong, what, expected=expected, got=got, instead=instead, error=error)
