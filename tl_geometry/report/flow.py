"""Token trajectories as a stochastic flow: bundles, spectra, maps between states with yardsticks, noise laws, skipped layers."""

from __future__ import annotations

import torch

from tl_geometry.records import TokenWindows
from tl_geometry.render import flow as views
from tl_geometry.report import Analysis, Figure, Section
from tl_geometry.results import Result
from tl_geometry.verbs.ensemble import gibberish, trajectories
from tl_geometry.verbs.flows import compare_ensembles, flow_report
from tl_geometry.verbs.nulls import reinitialized
from tl_geometry.verbs.skipping import skip_map
from tl_geometry.verbs.truncation import truncation_kl

CHUNK, CHUNKS, SKIPPED = 50, 384, 96
"""Tokens of a chunk, chunks followed, and chunks that the output-based measures use."""


def section(analysis: Analysis) -> Section | None:
    """Follow the last token of consecutive chunks (the first token of an encoder) through the layers."""
    windows, view = analysis.windows, analysis.view
    length = min(CHUNK, windows.tokens.shape[1])
    if view.n_layers < 2 or len(windows) < 32:
        return None
    few = windows[torch.linspace(0, len(windows) - 1, min(CHUNKS, len(windows))).long()]
    chunks = TokenWindows(tokens=few.tokens[:, :length], has_bos=few.has_bos, labels=few.labels, names=few.names, corpus=few.corpus)
    ensemble = trajectories(analysis.model, chunks, progress=analysis.progress, post_norm=view.causal)
    report = flow_report(ensemble, seed=analysis.seed)
    figures: list[Figure] = [
        views.bundle_figure(ensemble),
        views.spectra_figure(ensemble),
        views.yardstick_figure(report),
        views.residual_figure(report),
    ]
    figures += [views.noise_figure(report)] if report.laws else []
    tables: dict[str, Result] = {"flow": report}
    noise = gibberish(analysis.model, len(chunks), length, prepend_bos=bool(chunks.has_bos) and view.bos_id is not None, seed=analysis.seed)
    ensembles = {
        "text": ensemble,
        "gibberish": trajectories(analysis.model, noise, progress=False),
    }
    text = [
        f"One token of each of {len(chunks)} chunks of {length} tokens is followed through the blocks ({'the last' if ensemble.column == -1 else 'the first'}). Rotation and stretch "
        "(Sarfati et al. 2025, Eq. 1) carries one state's second moments onto the next exactly, by construction; what counts is the error on chunks it was not "
        "fitted on, beside the identity and the best linear map.",
    ]
    with reinitialized(analysis.model, seed=analysis.seed) as null:
        ensembles["untrained"] = trajectories(null, chunks, progress=False)
    tables["flow_nulls"] = compare_ensembles(ensembles)
    if view.causal and view.head_trained:
        some = chunks[torch.linspace(0, len(chunks) - 1, min(SKIPPED, len(chunks))).long()]
        kinds, places = ("flow", "ridge", "identity", "mean"), ("pilot",)
        skips = skip_map(analysis.model, some, kinds=kinds, places=places, progress=analysis.progress, seed=analysis.seed)
        half = len(some) // 2
        curve = truncation_kl(
            analysis.model, some[slice(half, None)], trajectories(analysis.model, some[slice(0, half)], progress=False), progress=False
        )
        figures += [views.truncation_figure(curve), views.skip_figure(skips)]
        tables |= {"skipped_layers": skips, "truncation": curve}
        text.append(
            "How many layers can be skipped for how much loss? Each cell replaces the blocks between two states by a fitted map, on held-out chunks; "
            "'mean' forgets the state altogether: what a map must beat."
        )
    return Section(title="Trajectories as a flow", text=text, figures=figures, tables=tables)
