"""What is supported, verified and refused for a model? :func:`check_model` says it in one table;
users and the command line run it first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.base.results import Result
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.states import AFTER

Row = tuple[str, str, str]


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelReport(Result):
    """Rows (property, value, verdict). A verdict begins with supported, verified (with the error),
    reported, or refused (and why)."""

    findings: tuple[Row, ...]

    def columns(self) -> Sequence[str]:
        return ("property", "value", "verdict")

    def rows(self) -> Sequence[Sequence[object]]:
        return self.findings

    def __repr__(self) -> str:
        return self.text()

    @property
    def refused(self) -> tuple[Row, ...]:
        """What this model does not get."""
        return tuple(row for row in self.findings if row[2].startswith("refused"))


def check_model(model: ModelLike) -> ModelReport:
    """Run a model on a few random tokens and report what the package supports, has verified, and
    refuses for it.

    Verified are the residual stream (state l+1 is the output of block l) and, layer by layer, the
    exact split of attention scores: recomputed queries, keys, scores and patterns against the
    model's own, as a fraction of the reconstruction error allowed. The additive identity
    ``resid_pre + attn_out + mlp_out = resid_post`` is reported (BERT and others break it) and never
    a reason to refuse.

    Raises ``UnsupportedModelError`` for models that are refused altogether.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.check_model(model).refused
    ()
    """
    view = as_view(model)
    weights = "processed" if view.processed else "as trained"
    size = f"{view.n_layers} layers, {view.n_heads} heads, d_model {view.d_model}"
    facts = {
        "model": f"{view.name} ({view.fingerprint})",
        "class": f"{view.class_name}, {view.library}",
        "weights": f"{weights}, {view.dtype_name}, {view.device}",
        "size": f"{size}, n_ctx {view.n_ctx}, d_vocab {view.d_vocab}",
        "position": f"{view.position}, {'causal' if view.causal else 'bidirectional'}",
        "text": "tokenizer" if view.has_tokenizer else "token ids only",
    }
    rows: list[Row] = [(name, value, "supported") for name, value in facts.items()]
    states = f"{view.n_layers + 1}, last {view.state_hooks[-1]}"
    rows.insert(-1, ("states", states, "verified, state l+1 is the output of block l"))
    rows.append(_head(view))
    tokens = torch.randint(
        0, view.d_vocab, (2, min(16, view.n_ctx)), generator=torch.Generator().manual_seed(0)
    )
    try:
        rows += _layers(view, tokens)
        rows.append(("additive identity", _additive(view, tokens), "reported"))
    except GeometryError as error:
        rows.append(("scores", "not split", f"refused: {error}"))
    rows += [("note", note, "reported") for note in view.notes]
    return ModelReport(provenance=view.provenance(), findings=tuple(rows))


def _head(view: ModelView) -> Row:
    """The row of the output head."""
    norm = view.final_norm() if view.head_trained else None
    if not view.head_trained:
        value, verdict = "newly initialised", "refused for every output-based measure: load a "
        verdict += "checkpoint that has its output head"
    elif norm is None:
        value, verdict = "not one norm and one linear map", "refused for direct effects on logits; "
        verdict += "losses and logits are supported"
    else:
        value = f"{norm.norm_type or 'no'} norm, then linear"
        verdict = "verified against the model's logits"
    return ("output head", value, verdict)


def _layers(view: ModelView, tokens: Tensor) -> list[Row]:
    """Facts of the layers, those that agree in one row, and the reconstruction error of each."""
    facts = [view.describe_layer(layer) for layer in range(view.n_layers)]
    rows: list[Row] = []
    notes = {
        "soft cap": "supported: scores are split before the cap",
        "sinks": "supported: scores exact, patterns with the sink's share",
    }
    for name in facts[0]:
        layers_of: dict[str, list[str]] = {}
        for layer, fact in enumerate(facts):
            layers_of.setdefault(str(fact[name]), []).append(str(layer))
        shown = [f"{value} in layers {', '.join(which)}" for value, which in layers_of.items()]
        value = "; ".join(shown) if len(shown) > 1 else next(iter(layers_of))
        rows.append((name, value, "supported" if value == "none" else notes.get(name, "supported")))
    for layer in range(view.n_layers):
        views: list[LayerView] = []
        try:
            view.run_layers(tokens, [layer], views.append)
        except GeometryError as error:
            rows.append((f"scores of layer {layer}", "do not add up", f"refused: {error}"))
            continue
        worst, error, bound = views[0].reconstruction.nearest or ("nothing", 0.0, 0.0)
        sizes = f"sizes up to {views[0].reconstruction.scale:.3g}"
        verdict = f"verified, {worst} within {error:.1e} (allowed {bound:.1e})"
        rows.append((f"scores of layer {layer}", sizes, verdict))
    return rows


def _additive(view: ModelView, tokens: Tensor) -> str:
    """Largest ``|resid_pre + attn_out + mlp_out - resid_post|`` over layers, where the class has
    those hooks, beside the stream's size.

    Judged as every number of a model is
    (:func:`tl_geometry.models.reconstruction.reconstruction_bound`), A being the stream's largest
    state.
    """
    worst, size = 0.0, 0.0
    for layer in range(view.n_layers):
        names = [
            view.state_hooks[layer],
            view.attention_hooks[layer],
            view.mlp_hooks[layer],
            f"blocks.{layer}.{AFTER}",
        ]
        try:
            activations = view.activations(tokens, names)
        except GeometryError:
            return f"hooks missing in layer {layer}"
        pre, attn, mlp, post = (activations[name].double() for name in names)
        worst = max(worst, float((pre + attn + mlp - post).abs().max()))
        size = max(size, float(post.abs().max()), float(pre.abs().max()))
    holds = worst <= reconstruction_bound(view._layers.roundoff, size)
    verdict = "holds within" if holds else "does not hold, off by up to"
    return f"{verdict} {worst:.2g} in a stream of up to {size:.3g}"
