"""What is supported, verified and refused for a model? :func:`check_model` says it in one table;
users and the command line run it first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.tables import Cell, Table
from tl_geometry.models.attention import scores_of
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.runner import brief

Row = tuple[str, str, str]


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelReport(Table):
    """Rows (property, value, verdict). A verdict begins with supported, verified, reported, or
    refused (and why)."""

    def __repr__(self) -> str:
        return self.text()

    @property
    def refused(self) -> tuple[tuple[Cell, ...], ...]:
        """What this model does not get."""
        return tuple(row for row in self.cells if str(row[2]).startswith("refused"))


def check_model(model: ModelLike) -> ModelReport:
    """Run a model on a few random tokens and report what the package supports, has verified, and
    refuses for it.

    The first row is the largest reconstruction error of all layers beside what is allowed (or
    which layer does not add up): recomputed queries, keys, scores and patterns against the model's
    own. Scores of the last layer are computed once more in float64 on the CPU, so that a device
    that multiplies wrongly is seen.

    Raises ``UnsupportedModelError`` for models that are refused altogether.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> report = tlg.check_model(model)
    >>> report.cells[0][0], report.refused
    ('largest reconstruction error', ())
    """
    view = as_view(model)
    weights = "processed" if view.processed else "as trained"
    size = f"{view.n_layers} layers, {view.n_heads} heads, d_model {view.d_model}"
    states = f"{view.n_layers + 1}, last {view.state_hooks[-1]}"
    verified = "verified, state l+1 is the output of block l"
    facts = {
        "model": f"{view.name} ({view.fingerprint})",
        "class": f"{view.class_name}, {view.library}",
        "weights": f"{weights}, {view.dtype_name}, {view.device}",
        "size": f"{size}, n_ctx {view.n_ctx}, d_vocab {view.d_vocab}",
        "position": f"{view.position}, {'causal' if view.causal else 'bidirectional'}",
        "text": "tokenizer" if view.has_tokenizer else "token ids only",
    }
    rows: list[Row] = [(name, value, "supported") for name, value in facts.items()]
    rows.insert(-1, ("states", states, verified))
    rows.append(_head(view))
    generator, shape = torch.Generator().manual_seed(0), (2, min(16, view.n_ctx))
    tokens = torch.randint(0, view.d_vocab, shape, generator=generator)
    try:
        first, *scores = _scores(view, tokens)
        rows = [first, *rows, *_facts(view), *scores]
    except GeometryError as error:
        rows.append(("scores", "not split", f"refused: {error}"))
    if hooked := view.hooked():
        rows.append(("hooks of the user", brief(hooked), "reported, they act in every number"))
    names = ("property", "value", "verdict")
    return ModelReport(provenance=view.provenance(), names=names, cells=tuple(rows))


def _head(view: ModelView) -> Row:
    """The row of the output head."""
    norm, refused = None, "refused for effects on logits"
    if view.head_trained:
        norm = view.final_norm()
    if norm is None:
        found = "not one norm and one linear map" if view.head_trained else "newly initialised"
        return "output head", found, refused
    value = f"{norm.norm_type or 'no'} norm, then linear"
    return "output head", value, "verified against the model's logits"


@torch.no_grad()
def _scores(view: ModelView, tokens: Tensor) -> list[Row]:
    """The largest reconstruction error, beside that of the last layer computed in float64 on the
    CPU; then each layer."""
    layers: list[LayerView] = []
    rows: list[Row] = []
    for layer in range(view.n_layers):
        value, verdict = "do not add up", "verified"
        try:
            view.run_layers(tokens, [layer], layers.append)
            value = f"sizes up to {layers[-1].reconstruction.scale:.3g}"
        except GeometryError as error:
            verdict = f"refused: {error}"
        rows.append((f"scores of layer {layer}", value, verdict))
    if not layers:
        return rows
    worst, last = max(layers, key=lambda layer: layer.reconstruction.worst), layers[-1]
    what, error, bound = worst.reconstruction.nearest or ("nothing", 0.0, 0.0)
    h, turn = last.h.cpu().double(), last.turn
    turn = turn and turn._replace(cos=turn.cos.to(h), sin=turn.sin.to(h))
    exact = replace(view._attention(last.layer, h), turn=turn)
    q, k = (exact.entering(exact.raw(h, which), which) for which in "qk")
    gap = scores_of(last.q, last.k, last.scale).cpu() - scores_of(q, k, last.scale)
    # two kinds of arithmetic, each within its bound
    limit = 2 * reconstruction_bound(view.roundoff, last.reconstruction.scale)
    if (off := float(gap.abs().max())) > limit:
        rows.append(("this device", f"off by {off:.1e}", "refused: its products are wrong"))
    value = f"{error:.1e} of {bound:.1e} allowed, {what} of layer {worst.layer}"
    verdict = f"reported; {off:.1e} of {limit:.1e} from float64 on the CPU, in layer {last.layer}"
    return [("largest reconstruction error", value, verdict), *rows]


def _facts(view: ModelView) -> list[Row]:
    """Facts of the layers, those that agree in one row."""
    facts = [view.describe_layer(layer) for layer in range(view.n_layers)]
    rows: list[Row] = []
    for name in facts[0]:
        values = [fact[name] for fact in facts]
        of = {v: ", ".join(str(l) for l, own in enumerate(values) if own == v) for v in values}
        shown = "; ".join(f"{value} in layers {which}" for value, which in of.items())
        rows.append((name, shown if len(of) > 1 else values[0], "supported"))
    return rows
