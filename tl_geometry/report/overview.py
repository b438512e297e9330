"""Section: what was analysed, and what do the numbers not say? Called by
:mod:`tl_geometry.report.analysis`."""

from __future__ import annotations

from tl_geometry.base.tables import Table
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.section import Draft

LIMITS = (
    "What these numbers do not say: a share of variance is not a share of computation; large means "
    "and outlier coordinates can carry little information. The positional basis is an average over "
    "this corpus and these positions, and its noise falls only as one over the number of contexts. "
    "A large context share alone is no evidence for topics: any slowly varying text has one (see "
    "the spliced-window null). Shares, spectra and maps show no cause; edits of the live model do, "
    "where a section has them."
)


def section(draft: Draft, analysis: Analysis) -> None:
    """Add the cautions, and a table of model, corpus and window."""
    view, basis, p = analysis.view, analysis.basis, analysis.basis.provenance
    (start, end), names = basis.window, analysis.windows.label_names
    used_positions = "all positions in the statistics"
    if start:
        positions = f"positions 0 to {start - 1}"
        used_positions = f"{positions} left out of the statistics (attention sink), their sums kept"
    processed = ", processed weights" if view.processed else ""
    size = f"{view.n_layers} layers, {view.n_heads} heads, d_model {view.d_model}"
    windows = f"{basis.contexts} windows of {basis.length} tokens"
    listed_names = f"{', '.join(names[:12])}{' ...' if len(names) > 12 else ''}"
    facts = {
        "model": f"{view.name} ({view.class_name}, {view.library}{processed})",
        "size": f"{size}, vocabulary {view.d_vocab}",
        "weights": f"fingerprint {view.fingerprint}, computed in {p.dtype}",
        "corpus": f"{p.corpus}: {windows}, hash {p.token_hash}",
        "documents": f"{len(names)}: {listed_names}",
        "first token": "BOS" if p.has_bos else "text (no BOS)",
        "window": f"positions {start} to {end - 1}; {used_positions}",
        "kept": basis.kept,
        "made smaller": "; ".join(analysis.smaller) or "nothing",
        "remarks": "; ".join([*p.flags, *view.notes, *analysis.notes]) or "none",
    }
    draft.say(LIMITS)
    table = Table(names=("property", "value"), cells=tuple(facts.items()), provenance=p)
    draft.table("overview", table, "The run")
