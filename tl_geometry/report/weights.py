"""Section: what do W_QK and W_OV read and write? Their share in the positional directions, what
heads read and write in tokens, paths of tokens on the sphere of the norm, and surrogates of W_QK in
the live model. Called by :mod:`tl_geometry.report.analysis`."""

from __future__ import annotations

from typing import Any

from tl_geometry.base import intervals
from tl_geometry.render import weights as views
from tl_geometry.render.head_view import heads
from tl_geometry.report import findings
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.measures import FEWEST
from tl_geometry.report.section import Draft
from tl_geometry.sphere import token_paths
from tl_geometry.weights import token_readout, weight_geometry

SURROGATES, TOKENS = 16, 24
"""Most windows for the surrogates of W_QK; most tokens whose paths are drawn."""
COLUMNS = (
    *("layer", "head", "k", "rank", "concentration", "null", "lift", "noise_null"),
    *("noise_high", "excess", "p", "reliability", "r2_low_rank", "r2_diagonal", "null_r2"),
    "symmetric",
)
"""Columns of the tables of weights that are shown on the page."""
DEEP = 12
"""Above this many layers only every third path is drawn, because more would hide each other."""


def section(draft: Draft, analysis: Analysis) -> None:
    """Add the concentration of the weights in the positional directions, readouts, paths, and
    surrogates of W_QK."""
    basis, view = analysis.basis, analysis.view
    width, what = basis.window[1] - basis.window[0], "weights in the geometry of the basis"
    if width < FEWEST:
        draft.leave_out(what, f"{width} positions are fewer than {FEWEST}")
    elif basis.states != tuple(view.states):
        draft.leave_out(what, "the basis does not hold every state")
    else:
        with draft.part(what):
            _geometry(draft, analysis)
    with draft.part("what heads write, in tokens"):
        readout = token_readout(analysis.model, matrix="OV")
        draft.say(
            "A head writes along the singular directions of its W_OV. If few directions hold most "
            "of it, what the head writes is simple. The table says which tokens each direction "
            "reads and writes."
        )
        draft.draw(views.coverage_curves(readout), "coverage")
        draft.table("readout_ov", readout, "What heads read and write, in tokens")
    with draft.part("paths on the sphere"):
        paths = token_paths(analysis.model, analysis.windows.tokens[:1, :TOKENS])
        positions = range(0, paths.tokens.shape[1], 3) if view.n_layers > DEEP else None
        draft.say(
            "A norm layer puts every state on a sphere. From layer to layer each token of this "
            "text moves along a path on it, towards the unembedding of the token that follows."
        )
        draft.draw(views.sphere_paths(paths, positions=positions), "sphere")
        draft.table("paths", paths, "Steps of each token on the sphere")
    with draft.part("surrogates of W_QK in the live model"):
        _surrogates(draft, analysis)


def _geometry(draft: Draft, analysis: Analysis) -> None:
    model, view, basis = analysis.model, analysis.view, analysis.basis
    qk = weight_geometry(model, basis, "QK", seed=analysis.seed)
    ov = weight_geometry(model, basis, "OV", seed=analysis.seed)
    layer, _ = qk.heads[int(qk["excess"].nan_to_num(nan=-1.0).argmax())]
    draft.say(
        "How much of each head's W_QK (canonical: norm gain folded in, centred for LayerNorm) lies "
        "in the leading positional directions? Lift compares that share with its exact "
        "expectation for a random subspace. Excess compares it with its mean in the leading "
        "directions of differences between random halves of the corpus: there position cancels, "
        "and what is left are directions in which averages of states vary most anyway."
    )
    title = "W_QK of each head against the positional directions"
    value = "excess" if bool(qk["excess"].isfinite().any()) else "lift"
    draft.draw(heads(qk, value, title=title), "lift")
    draft.draw(views.weight_blocks(qk, [(layer, h) for h in range(min(view.n_heads, 8))]), "blocks")
    draft.table("weights_qk", qk, "W_QK of each head in the positional directions", COLUMNS)
    draft.table("weights_ov", ov, "W_OV of each head in the positional directions", COLUMNS)
    draft.find(findings.lift(qk))


def _surrogates(draft: Draft, analysis: Analysis) -> None:
    what = "surrogates of W_QK in the live model"
    if not (analysis.view.head_trained and analysis.view.causal):
        draft.leave_out(what, "it takes a decoder with a trained output head")
        return
    from tl_geometry.interventions.effect_tables import effects

    full_length = length = analysis.windows.tokens.shape[1]
    max_windows = min(SURROGATES, len(analysis.windows))
    min_windows = min(max_windows, intervals.FEWEST)
    count = draft.fit(analysis.budget, what, length, max_windows, min_windows)
    if not count:
        return
    # windows at even distances, as for the other edits of the model
    windows, edits = analysis.pick(count), surrogate_edits(analysis)
    effect = effects(analysis.model, windows, edits, seed=analysis.seed)
    smaller = ", to keep the budget" if (count, length) != (max_windows, full_length) else ""
    draft.say(
        "Does that structure carry the computation? W_QK of all heads is replaced by a part of it "
        "in the live model, beside random directions of the same number. Losses are those of "
        f"{count} windows of {length} tokens of this corpus{smaller}."
    )
    how = (
        f"Each bar shows how far the loss of {float(effect.clean.mean()):.3g} nats rises when W_QK "
        "of all heads is replaced by one part of it."
    )
    draft.draw(views.effect_bars(effect), "surrogates", how=how)
    draft.table("surrogates", effect, "Loss with W_QK replaced by its parts")


def surrogate_edits(analysis: Analysis) -> dict[str, Any]:
    """Replacements of W_QK of all heads by the parts that the model's W_QK has, and by random
    directions."""
    from tl_geometry.interventions.surrogates import OF_ROTARY, PARTS, surrogate

    rotary, model, basis = analysis.view.position == "rotary", analysis.model, analysis.basis
    parts = OF_ROTARY if rotary else PARTS
    edits = {part: surrogate(model, basis, part=part) for part in parts}
    edits["random directions"] = surrogate(
        model, basis, part=parts[0], random=True, seed=analysis.seed
    )
    return edits
