"""Section: do trajectories of tokens behave like a stochastic flow? The bundle of paths, maps
between states with baselines, laws of noise, truncated states, skipped layers. Called by
:mod:`tl_geometry.report.analysis`."""

from __future__ import annotations

import dataclasses

from tl_geometry.corpus.nulls import gibberish
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.flow.ensemble import Trajectories, trajectories
from tl_geometry.flow.reports import compare_ensembles, flow_report
from tl_geometry.flow.skipping import skip_map
from tl_geometry.flow.truncation import truncation_kl
from tl_geometry.models.untrained import reinitialized
from tl_geometry.render import flow as views
from tl_geometry.report import findings
from tl_geometry.report.analysis import Analysis, at_even_distances
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft

CHUNK, CHUNKS, FEWEST, SKIPPED = 50, 384, 32, 96
"""Tokens of a chunk; most and fewest chunks whose tokens are followed; most chunks for truncated
states and skipped layers."""
NOISE = (
    "Each point is the mean log variance of what the map from t to t + τ leaves, coloured by t; "
    "lines are two laws of noise fitted to them. Their rates are in the table of nulls."
)
"""How to read the figure of noise, in place of its own caption, which quotes fitted numbers."""
SHALLOW = 12
"""Most blocks of a model in which every pair of states is tried. Deeper models have skips of 1, 2
and 4 blocks."""
MAP_TYPES = ("flow", "ridge", "identity", "mean")
"""Maps that replace the skipped blocks."""


def section(draft: Draft, analysis: Analysis) -> None:
    """Follow the last token of consecutive chunks (the first token of an encoder) through the
    layers."""
    windows, view, what = analysis.windows, analysis.view, "trajectories"
    if view.n_layers < 2:
        draft.leave_out(what, f"a model of {view.n_layers} block has no path to follow")
        return
    if len(windows) < FEWEST:
        draft.leave_out(what, f"{len(windows)} windows are fewer than {FEWEST}")
        return
    length, max_chunks = min(CHUNK, windows.tokens.shape[1]), min(CHUNKS, len(windows))
    count = draft.fit(analysis.budget, what, length, max_chunks, FEWEST)
    if not count:
        return
    chosen_windows = analysis.pick(count)
    chunks = dataclasses.replace(
        chosen_windows, tokens=chosen_windows.tokens[:, :length], str_tokens=()
    )
    if count < max_chunks:
        draft.say(f"{count} chunks in place of {max_chunks}, to keep the budget.")
    # maps are fitted on one half of the chunks, and tried on the other
    if count // 2 < view.d_model:
        draft.say(
            f"Half of {count} chunks are fewer than the {view.d_model} dimensions of a state. So "
            "few always lie in a subspace: it says nothing about the model if few directions are "
            "enough for them."
        )
    ensemble = None
    with draft.part(what):
        ensemble = _followed(draft, analysis, chunks)
    if ensemble is not None:
        with draft.part("maps between states"):
            _maps(draft, analysis, ensemble)
        with draft.part("nulls of the trajectories"):
            _nulls(draft, analysis, chunks, ensemble)
        _outputs(draft, analysis, chunks)


def _followed(draft: Draft, analysis: Analysis, chunks: TokenWindows) -> Trajectories:
    """Follow the tokens, and draw their paths. Returns the ensemble."""
    ensemble = trajectories(analysis.model, chunks, progress=False, post_norm=analysis.view.causal)
    where = "the last" if ensemble.position == -1 else "the first"
    draft.say(
        f"One token of each of {len(chunks)} chunks of {chunks.tokens.shape[1]} tokens is followed "
        f"through the blocks ({where}). Rotation and stretch (Sarfati et al. 2025, Eq. 1) carries "
        "one state's second moments onto the next exactly, by construction; what counts is the "
        "error on chunks it was not fitted on, beside the identity and the best linear map."
    )
    draft.draw(views.bundle_figure(ensemble), "bundle")
    return ensemble


def _maps(draft: Draft, analysis: Analysis, ensemble: Trajectories) -> None:
    """Maps between states beside their baselines, and what the maps leave."""
    report = flow_report(ensemble, seed=analysis.seed)
    draft.draw(views.baseline_figure(report), "maps")
    draft.draw(views.residual_figure(report), "residuals")
    if report.laws:
        draft.draw(views.noise_figure(report), "noise", how=NOISE)
    else:
        draft.leave_out("the law of the residual variance", "there are too few states for it")
    draft.table("flow", report, "Maps between every two states")


def _nulls(draft: Draft, analysis: Analysis, chunks: TokenWindows, ensemble: Trajectories) -> None:
    """The same numbers of gibberish and of the model with untrained weights."""
    view, model = analysis.view, analysis.model
    with_bos = bool(chunks.has_bos) and view.bos_id is not None
    random_chunks = gibberish(
        model, len(chunks), chunks.tokens.shape[1], prepend_bos=with_bos, seed=analysis.seed
    )
    ensembles = {"text": ensemble, "gibberish": trajectories(model, random_chunks, progress=False)}
    with reinitialized(model, seed=analysis.seed) as null:
        ensembles["untrained"] = trajectories(null, chunks, progress=False)
    nulls = compare_ensembles(ensembles)
    about = "Trajectories of text, of gibberish, of an untrained model, and their laws of noise"
    draft.table("flow_nulls", nulls, about)


def _outputs(draft: Draft, analysis: Analysis, chunks: TokenWindows) -> None:
    """Which directions of the states, and which layers, the output needs."""
    if not (analysis.view.causal and analysis.view.head_trained):
        what = "truncated states and skipped layers"
        draft.leave_out(what, "they take a decoder with a trained output head")
        return
    chunks = at_even_distances(chunks, SKIPPED)
    with draft.part("truncated states"):
        _truncated(draft, analysis, chunks)
    with draft.part("skipped layers"):
        _skips(draft, analysis, chunks)


def _truncated(draft: Draft, analysis: Analysis, chunks: TokenWindows) -> None:
    """The output of states that keep few directions. These are fitted on the first half of the
    chunks; the second half is measured."""
    what, half = "truncated states", len(chunks) // 2
    count = draft.fit(analysis.budget, what, chunks.tokens.shape[1], len(chunks) - half, 8)
    if not count:
        return
    # directions of other chunks than those measured, for which the KL would be 0 at full rank
    fitted = trajectories(analysis.model, chunks[slice(0, half)], progress=False)
    tested = chunks[slice(half, half + count)]
    curve = truncation_kl(analysis.model, tested, fitted, progress=False)
    draft.say(
        "How many directions does the output need? Every state of the last token is projected on "
        "K directions of other chunks, after every block."
    )
    draft.draw(views.truncation_figure(curve), "truncation")
    draft.table("truncation", curve, "Output of states with K directions")
    draft.find(findings.truncated(curve))


def _skips(draft: Draft, analysis: Analysis, chunks: TokenWindows) -> None:
    """The cost of replacing blocks by maps."""
    view, max_chunks, length = analysis.view, len(chunks), chunks.tokens.shape[1]
    min_chunks = min(FEWEST, max_chunks)
    count = draft.fit(analysis.budget, "skipped layers", length, max_chunks, min_chunks)
    if not count:
        return
    shallow = view.n_layers <= SHALLOW
    skips = skip_map(
        analysis.model,
        at_even_distances(chunks, count),
        pairs="all" if shallow else None,
        map_types=MAP_TYPES,
        progress=False,
        seed=analysis.seed,
    )
    lengths = ", ".join(map(str, sorted({b - a for a, b in skips.pairs()})))
    skips_shown = (
        "all pairs of states" if shallow else f"skips of {lengths} of {view.n_layers} blocks"
    )
    draft.say(
        f"How many layers can be skipped for how much loss ({skips_shown})? The blocks between two "
        f"states are replaced by a fitted map at the last token of {skips.test} held-out chunks, "
        f"where the model's own loss is {Cells('skipped_layers', skips)(0, 'own_loss')} nats; "
        "'mean' forgets the state altogether: what a map must beat."
    )
    draft.draw(views.skip_figure(skips), "skips")
    draft.table("skipped_layers", skips, "What it costs to skip blocks")
    draft.find(findings.skipped(skips))
