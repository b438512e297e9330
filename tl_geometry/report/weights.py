"""Section: W_QK and W_OV in the geometry of the activations, what heads read and write in tokens,
and token paths on the norm's sphere."""

from __future__ import annotations

from tl_geometry.base import intervals
from tl_geometry.render import space
from tl_geometry.render import weights as views
from tl_geometry.render.head_view import heads
from tl_geometry.report import findings
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.measures import FEWEST
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft
from tl_geometry.sphere.paths import token_paths
from tl_geometry.weights.heads import token_readout, weight_geometry

SURROGATES, TOKENS = 16, 24
"""Most windows for the surrogates of W_QK, and tokens whose paths are followed."""
COLUMNS = (
    *("layer", "head", "k", "rank", "concentration", "null", "lift", "noise_null"),
    *("noise_high", "excess", "p", "reliability", "r2_low_rank", "r2_diagonal", "null_r2"),
    "symmetric",
)
"""Columns of the tables of weights that stand on the page."""
DEEP = 12
"""Layers above which only every third path is drawn, because they would hide each other."""
PASSES = 30.0
"""What the surrogates of one window cost, all parts and controls together, in forward passes with
output (measured)."""
OFFSETS, LENGTHS = 12_000, (128, 64, 32, 16)
"""What a rotary model's parts cost at each offset, for each head and coordinate (in units of
``Costs.svd``, measured), and the lengths that windows are cut to for it."""


def _geometry_cost(analysis: Analysis) -> float:
    """Seconds of the singular value decompositions and readouts of all heads."""
    view, d = analysis.view, analysis.view.d_model
    # terms in d^2 are decompositions of QK and OV and of their nulls, those in d_vocab readouts
    return analysis.costs.svd * view.n_layers * view.n_heads * d * (70 * d + 1.4 * view.d_vocab)


def _offset_cost(analysis: Analysis, length: int) -> float:
    """Seconds that the parts of W_QK cost once, whatever the number of windows: a rotary model has
    one W_QK at every offset."""
    view = analysis.view
    if view.position != "rotary":
        return 0.0
    # 6 s do not depend on the length
    return 6 + OFFSETS * analysis.costs.svd * view.n_layers * view.n_heads * view.d_model * length


def _surrogate_length(analysis: Analysis) -> int:
    """Tokens of a window for surrogates: all, or in a rotary model as many as the budget allows, 16
    at least."""
    full_length, allowed = analysis.windows.tokens.shape[1], 0.8 * analysis.work.left
    if analysis.view.position != "rotary":
        return full_length
    fitting = (n for n in LENGTHS if n <= full_length and _offset_cost(analysis, n) <= allowed)
    return next(fitting, min(full_length, LENGTHS[-1]))


def section(draft: Draft, analysis: Analysis) -> None:
    """Concentration of the weights in the positional directions with its null, surrogates of W_QK,
    readouts, paths."""
    basis, view = analysis.basis, analysis.view
    width, what = basis.window[1] - basis.window[0], "weights in the geometry of the basis"
    if width < FEWEST:
        draft.leave_out(what, f"{width} positions are fewer than {FEWEST}")
    elif basis.states != tuple(view.states):
        draft.leave_out(what, "the basis does not hold every state")
    else:
        analysis.work.spend(_geometry_cost(analysis))
        with draft.part(what):
            _geometry(draft, analysis)
    with draft.part("what heads write, in tokens"):
        readout = token_readout(analysis.model, matrix="OV")
        draft.say(
            "A head writes along the singular directions of its W_OV. The fewer of them hold most "
            "of it, the simpler is what it writes; the table says which tokens each direction "
            "reads and writes."
        )
        draft.draw(views.coverage_curves(readout), "coverage")
        draft.table("readout_ov", readout, "What heads read and write, in tokens")
    with draft.part("paths on the sphere"):
        paths = token_paths(analysis.model, analysis.windows.tokens[:1, :TOKENS])
        positions = range(0, paths.tokens.shape[1], 3) if view.n_layers > DEEP else None
        draw = space.sphere_3d if space.installed() else views.sphere_paths
        draft.say(
            "A norm layer puts every state on a sphere. From layer to layer each token of this "
            "text moves along a path on it, towards what it will be read as."
        )
        draft.draw(draw(paths, positions=positions), "sphere")
        draft.table("paths", paths, "Steps of each token on the sphere")
    with draft.part("surrogates of W_QK in the live model"):
        _surrogates(draft, analysis)


def _geometry(draft: Draft, analysis: Analysis) -> None:
    model, view, basis = analysis.model, analysis.view, analysis.basis
    qk = weight_geometry(model, basis, "QK", seed=analysis.seed)
    ov = weight_geometry(model, basis, "OV", seed=analysis.seed)
    layer, _ = qk.heads[int(qk.excess.nan_to_num(nan=-1.0).argmax())]
    draft.say(
        "How much of each head's W_QK (canonical: norm gain folded in, centred for LayerNorm) lies "
        "in the leading positional directions? The concentration is divided by its exact "
        "expectation for a random subspace (lift), and by its mean in the leading directions of "
        "the difference of random halves of the corpus (excess): position cancels in it, and the "
        "leading directions of averages are those in which states vary most, with or without an "
        "effect of position."
    )
    title = "W_QK of each head against the positional directions"
    value = "excess" if bool(qk.excess.isfinite().any()) else "lift"
    draft.draw(heads(qk, value, title=title), "lift")
    draft.draw(views.weight_blocks(qk, [(layer, h) for h in range(min(view.n_heads, 8))]), "blocks")
    draft.table("weights_qk", qk, "W_QK of each head in the positional directions", COLUMNS)
    draft.table("weights_ov", ov, "W_OV of each head in the positional directions", COLUMNS)
    draft.find(findings.lift(qk))


def _surrogates(draft: Draft, analysis: Analysis) -> None:
    what, work = "surrogates of W_QK in the live model", analysis.work
    if not (analysis.view.head_trained and analysis.view.causal):
        draft.leave_out(what, "it takes a decoder with a trained output head")
        return
    from tl_geometry.interventions.surrogates import surrogate_effect

    full_length, length = analysis.windows.tokens.shape[1], _surrogate_length(analysis)
    max_windows = min(SURROGATES, len(analysis.windows))
    min_windows = min(max_windows, intervals.FEWEST)
    window_seconds = PASSES * analysis.costs.output * length
    fixed_seconds = _offset_cost(analysis, length)
    min_seconds = fixed_seconds + min_windows * window_seconds
    if not work.room(min_seconds, 1):
        draft.too_long(what, min_seconds)
        return
    work.spend(fixed_seconds)
    count = max(min_windows, work.take(window_seconds, max_windows))
    windows = analysis.pick(count).tokens[:, :length]  # as for the other edits of the model
    effect = surrogate_effect(analysis.model, windows, analysis.basis)
    smaller = ", to keep the budget" if (count, length) != (max_windows, full_length) else ""
    draft.say(
        "Does that structure carry the computation? W_QK of all heads is replaced by a part of it "
        "in the live model; grey bars are controls of the same rank. Losses are those of "
        f"{count} windows of {length} tokens of this corpus{smaller}."
    )
    loss = Cells("surrogates", effect)(0, "loss")
    how = (
        f"Each bar is what the loss of {loss} nats rises by when W_QK of {len(effect.heads)} heads "
        "is replaced by one part of it."
    )
    draft.draw(views.surrogate_bars(effect), "surrogates", how=how)
    draft.table("surrogates", effect, "Loss with W_QK replaced by its parts")
