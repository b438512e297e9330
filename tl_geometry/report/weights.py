"""W_QK and W_OV in the geometry of the activations, what heads read and write in tokens, and token paths on the norm's sphere."""

from __future__ import annotations

from tl_geometry.render import weights as views
from tl_geometry.render.head_view import heads
from tl_geometry.report import Analysis, Figure, Section
from tl_geometry.results import Result
from tl_geometry.verbs.paths import token_paths
from tl_geometry.verbs.weights import token_readout, weight_geometry


def section(analysis: Analysis) -> Section | None:
    """Concentration of the weights in the positional directions with its null, surrogates of W_QK, readouts, paths."""
    basis, model, view = analysis.basis, analysis.model, analysis.view
    if basis.states != tuple(view.states) or basis.window[1] - basis.window[0] < 8:
        return None
    qk, ov = weight_geometry(model, basis, "QK", seed=analysis.seed), weight_geometry(model, basis, "OV", seed=analysis.seed)
    read = token_readout(model, kind="OV")
    layer = max(range(view.n_layers), key=lambda l: max(float(v) for (a, _), v in zip(qk.heads, qk.lift, strict=True) if a == l))
    figures: list[Figure] = [
        heads(qk, "lift", title="W_QK of each head against the positional directions"),
        views.weight_blocks(qk, [(layer, h) for h in range(min(view.n_heads, 8))]),
        views.coverage_curves(read),
    ]
    tables: dict[str, Result] = {"weights_qk": qk, "weights_ov": ov, "readout_ov": read}
    best = max(range(len(qk.heads)), key=lambda i: float(qk.lift[i]))
    text = [
        "How much of each head's W_QK (canonical: norm gain folded in, centred for LayerNorm) lies in the leading positional directions? The concentration is divided by its exact "
        "expectation for a random subspace (lift); weights and activations share outlier directions, so a second null takes random subspaces of the activations: see the table.",
        f"Largest lift: L{qk.heads[best][0]}H{qk.heads[best][1]} with {float(qk.lift[best]):.1f} times chance (concentration {float(qk.concentration[best]):.2f}, activation null "
        f"{float(qk.activation_null[best]):.2f}).",
    ]
    paths = token_paths(model, analysis.windows.tokens[:1, : min(24, analysis.windows.tokens.shape[1])])
    figures.append(views.sphere_paths(paths))
    tables["paths"] = paths
    if view.head_trained and view.causal:
        from tl_geometry.interventions import surrogate_effect

        effect = surrogate_effect(model, analysis.windows.tokens[:16], basis)
        figures.append(views.surrogate_bars(effect))
        tables["surrogates"] = effect
        text.append(
            "Does that structure carry the computation? W_QK of all heads is replaced by a part of it in the live model; grey bars are controls of the same rank."
        )
    return Section(title="Weights and the sphere", text=text, figures=figures, tables=tables)
