"""Which additive parts is a layer's input split into? A family names and computes them: position
and context, writers, or tensors of the caller. ``split_scores``, ``split_values`` and
``explain_logit`` take any of these three, and a subclass of :class:`Family` of your own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import fail, require
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.writers import GRAINS, Written, writer_names
from tl_geometry.scores.terms import ALIBI

BIAS = "bias"
"""Name of the part that holds the constants of norm and projection, and the mean unless that is a
part of its own."""
STREAM_PARTS = (
    ("pos", "cvec"),
    ("pos", "ctx", "resid"),
    ("mean", "pos", "cvec"),
    ("mean", "pos", "ctx", "resid"),
)
"""Named splits of the stream; without ``mean`` the mean belongs to ``bias``."""
UserParts = Mapping[
    str, Float[Tensor, "batch position d_model"] | Float[Tensor, "layer batch position d_model"]
]


class Family:
    """Additive parts of a layer's input.

    ``names`` are those of the parts, in order; the splitter puts the constants of norm and
    projection before them as ``"bias"``. A subclass gives ``names`` and :meth:`parts`.
    """

    names: tuple[str, ...]
    normalized: bool = False
    """Whether the parts sum to the normed input (without gain and bias) instead of the input."""
    positional: bool = False
    """Whether the first two parts are the mean and the positional vectors of a basis. The splitter
    then adds the mean to ``"bias"`` unless ``"mean"`` is among ``names``."""

    def parts(self, layer: LayerView) -> dict[str, Float[Tensor, "batch position d_model"]]:
        """Tensors that sum to the layer's input."""
        raise NotImplementedError


class PositionAndContext(Family):
    """Mean, positional vectors and context of a basis. :meth:`parts` always gives the mean first;
    ``names`` has it only where the caller wants it apart from the constants."""

    positional = True

    def __init__(
        self, basis: PositionContext, names: tuple[str, ...], layers: Sequence[int]
    ) -> None:
        basis.require_identifiable("split")
        for layer in layers:
            basis.index(layer)
        self.basis, self.names, self.normalized = basis, names, basis.provenance.normalized

    def parts(self, layer: LayerView) -> dict[str, Float[Tensor, "batch position d_model"]]:
        basis, h = self.basis, layer.h.double()
        row, length = basis.index(layer.layer), h.shape[1]
        mean, pos = basis.mean[row].to(h.device), basis.pos_seen[row, :length].to(h.device)
        cvec = h - mean - pos
        parts = {"mean": mean.expand_as(h), "pos": pos.expand_as(h)}
        if "ctx" in self.names:
            start, stop = basis.window
            # a prompt that ends before the window still averages over one position
            window = slice(min(start, length - 1), max(min(stop, length), 1))
            ctx = cvec[:, window].mean(1, keepdim=True).expand_as(h)
            parts |= {"ctx": ctx, "resid": cvec - ctx}
        else:
            parts["cvec"] = cvec
        return {name: value.to(layer.h) for name, value in parts.items()}


class Writers(Family):
    """What each embedding, head and MLP wrote (``grain="writers"``), or attention and MLP of each
    block (``"blocks"``). The names are those of the last of ``layers``, so that all layers have
    the same parts; what has not written yet is zero."""

    def __init__(self, view: ModelView, grain: str, layers: Sequence[int]) -> None:
        self.grain = grain
        self.names = tuple(writer.name for writer in writer_names(view, max(layers), grain))
        self.written: Written | None = None

    def take(self, written: Written) -> None:
        """Receive what was written into the next layer's input; :meth:`parts` reads it."""
        self.written = written

    def parts(self, layer: LayerView) -> dict[str, Float[Tensor, "batch position d_model"]]:
        assert self.written is not None
        written, nothing = self.written.parts(self.grain), torch.zeros_like(layer.h)
        return {name: written.get(name, nothing) for name in self.names}


class GivenParts(Family):
    """Tensors of the caller's own: ``[batch position d_model]``, the same for every layer, or
    ``[layer batch position d_model]``, with one for each layer of the model (the final state may
    follow) or one for each of ``layers``."""

    def __init__(self, parts: UserParts, layers: Sequence[int], n_layers: int) -> None:
        reserved = [n for n in parts if n in (BIAS, ALIBI) or "-" in n]
        expected = "names other than bias and alibi, without '-'"
        require(len(parts) > 0 and not reserved, "parts", expected=expected, got=reserved or "none")
        self.given, self.layers, self.n_layers = parts, sorted(layers), n_layers
        self.names = tuple(parts)

    def parts(self, layer: LayerView) -> dict[str, Float[Tensor, "batch position d_model"]]:
        """The parts for one layer, if they sum to its input."""
        parts = {name: self._of_layer(name, value, layer) for name, value in self.given.items()}
        total = torch.stack([v.double() for v in parts.values()]).sum(0)
        size = float(torch.stack([v.double().abs() for v in parts.values()]).sum(0).max())
        coarsest = max([layer.roundoff, *(unit_roundoff(v.dtype) for v in parts.values())])
        difference = total - layer.h.double()
        error = float(difference.abs().max())
        # this mistake has a remedy of its own, so its error comes before the general one
        _refuse_added(layer, difference)
        fits = error <= reconstruction_bound(coarsest, size)
        expected = f"parts that sum to the input of layer {layer.layer}"
        got = f"a sum that is off by {error:.3g}"
        require(fits, "parts", expected=expected, got=got, instead="one more part for the rest")
        return {name: value.to(layer.h) for name, value in parts.items()}

    def _of_layer(self, name: str, value: Tensor, layer: LayerView) -> Tensor:
        """One part, checked, for one layer."""
        what, n_chosen = f"part {name!r}", len(self.layers)
        if value.dim() == 4:
            fits = len(value) in (self.n_layers, self.n_layers + 1, n_chosen)
            expected = f"a first axis of {self.n_layers} layers or of the {n_chosen} chosen"
            require(fits, what, expected=expected, got=describe(value))
            # with all layers (and the final state) on the first axis the layer is the index
            of_chosen = len(value) == n_chosen < self.n_layers
            value = value[self.layers.index(layer.layer) if of_chosen else layer.layer]
        expected = f"shape {tuple(layer.h.shape)}"
        require(value.shape == layer.h.shape, what, expected=expected, got=describe(value))
        return checks.finite(value, what).to(layer.h.device)


def _refuse_added(layer: LayerView, difference: Tensor) -> None:
    """Refuse parts that contain the positional embedding where the model does not add it to the
    stream but, after the norm, to the inputs of queries and keys (Shortformer)."""
    if layer.added is None:
        return
    embedding = layer.added.embedding.double().expand_as(difference)
    # 0.1%: far above rounding, and no other mistake differs by exactly this embedding
    far = float((difference - embedding).abs().max()) > 1e-3 * float(embedding.abs().max())
    expected = f"parts that sum to the input of layer {layer.layer}"
    got = "the positional embedding among them"
    instead = "the parts without it (added to queries and keys after the norm, it is in 'bias')"
    require(far, "parts", expected=expected, got=got, instead=instead)


def family_of(
    view: ModelView,
    parts: Sequence[str] | UserParts | Family,
    basis: PositionContext | None,
    layers: Sequence[int],
) -> Family:
    """The family that the argument ``parts`` stands for, or an error that lists what is possible;
    ``layers`` are the blocks to be split."""
    if basis is not None:
        require_basis(basis)
    if isinstance(parts, Family):
        return parts
    if isinstance(parts, Mapping):
        return GivenParts(parts, layers, view.n_layers)
    # before tuple(parts), which would take a string letter by letter
    if isinstance(parts, str):
        require(parts in GRAINS, "parts", expected=f"one of {STREAM_PARTS + GRAINS}", got=parts)
        return Writers(view, parts, layers)
    names = tuple(parts)
    expected = f"one of {STREAM_PARTS + GRAINS}, or a mapping from names to tensors"
    require(names in STREAM_PARTS, "parts", expected=expected, got=repr(names))
    if basis is None:
        expected = f"a PositionContext for parts={parts!r}"
        instead = 'decompose(model, tokens), or parts="writers", which needs no basis'
        fail("basis", expected=expected, got=None, instead=instead)
    return PositionAndContext(basis, names, layers)
