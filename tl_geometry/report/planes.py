"""Which frequencies carry the scores of a rotary model? :mod:`tl_geometry.report.heads` adds this
part to its section."""

from __future__ import annotations

from tl_geometry.render.rotary import bands_page, head_planes
from tl_geometry.report.analysis import Analysis
from tl_geometry.report.origin import Cells
from tl_geometry.report.section import Draft
from tl_geometry.scores.labels import UNCLEAR
from tl_geometry.scores.plane_tables import BandTable, HeadBands
from tl_geometry.scores.relative import offset_profile
from tl_geometry.scores.split import split_scores
from tl_geometry.scores.sweep_table import SweepTable

PROMPTS = 16
"""Most windows for the offset profile."""


def add(draft: Draft, analysis: Analysis, table: SweepTable) -> None:
    """Add the shares of bands of wavelengths in sentences, figures and tables. With ``--planes`` a
    table has the shares of every plane too."""
    planes = table.planes()
    bands = planes.by_band()
    by_head = bands.by_head()
    draft.say(
        "A rotary embedding turns pairs of coordinates, planes, by an angle that grows with the "
        "position, each at its own frequency: a plane of wavelength L sees the offset of two "
        f"tokens modulo L. Of {len(table.heads)} heads, {_counts_in_words(bands)}. Near planes "
        f"have wavelengths of up to 16 tokens. Far ones are longer than the {planes.length} tokens "
        "of a window, and hardly see the offset at all."
    )
    heads: list[tuple[int, int]] = []
    for name, words in (("previous", "previous-token"), ("induction", "induction")):
        if name in table.types:
            layer, head = table.top(name, 1).heads[0]
            heads.append((layer, head))
            shares = _shares(by_head, table.heads.index((layer, head)))
            draft.say(f"The strongest {words} head, L{layer}H{head}: {shares}.")
    profile = None
    if heads:
        heads = list(dict.fromkeys(heads))
        length, max_windows = analysis.windows.tokens.shape[1], min(PROMPTS, len(analysis.windows))
        count = analysis.budget.windows("rotary planes", length, max_windows, 2)
        if count:
            windows = analysis.pick(count)
            split = split_scores(analysis.model, windows, analysis.basis, heads=heads)
            profile = offset_profile(split)
        draft.draw(head_planes(planes, profile, heads=heads), "planes")
    draft.draw(bands_page(planes, profile), "bands")
    draft.table("head_bands", by_head, "Shares of bands of wavelengths in every head")
    draft.table("bands", bands, "The same by term")
    if analysis.planes:
        draft.table("planes", planes, "Shares of every rotary plane in every head")


def _counts_in_words(bands: BandTable) -> str:
    """How many heads each band dominates."""
    words = {band: f"{band} planes lead" for band in bands.bands}
    words[UNCLEAR] = "no band leads clearly by covariance and by gain"
    counts = {band: bands.dominant.count(band) for band in words}
    return ", ".join(f"{words[band]} in {count}" for band, count in counts.items() if count)


def _shares(bands: HeadBands, head: int) -> str:
    """The shares of the bands in one head."""
    cell, values = Cells("head_bands", bands, rounded=True), bands.cs[head].nan_to_num().tolist()
    # "pass" is shown only for partial rotation, which leaves some coordinates unrotated
    listed = [b for b, v in zip(bands.bands, values, strict=True) if b != "pass" or v]
    return ", ".join(f"{band} {cell(head, f'cs_{band}')}" for band in listed)
