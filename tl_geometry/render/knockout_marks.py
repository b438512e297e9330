"""Do heads do what they write? Marks for heads whose direct contribution and knockout disagree, and
a sentence about each head that was knocked out. :func:`tl_geometry.render.logit_page` and its image
show them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from tl_geometry.base import html
from tl_geometry.base.errors import fail
from tl_geometry.base.intervals import FEWEST
from tl_geometry.circuits.logits import LogitExplanation
from tl_geometry.interventions.attribution_tables import require_same_model
from tl_geometry.interventions.knockouts import HeadKnockouts

MARK = "≠"
"""Marks heads whose direct contribution and knockout disagree."""
REPLACED = {"mean": "its mean over prompts", "zero": "zero", "prompt": "that of another prompt"}
"""``by`` of a knockout -> what replaces the output of the head, in words."""


class KnockoutMarks(NamedTuple):
    """A sentence for each head that was knocked out, the heads whose knockout disagrees with what
    they write (largest effect first), and how to read the marks."""

    sentences: dict[tuple[int, int], str]
    disagreeing: tuple[tuple[int, int], ...]
    legend: str


def knockout_marks(explained: LogitExplanation, knockouts: HeadKnockouts | None) -> KnockoutMarks:
    """The marks that knockouts put on an explanation of a logit; none without knockouts."""
    if knockouts is None:
        return KnockoutMarks({}, (), "")
    instead = "head_knockouts(model, prompts, targets=targets, attributions=True)"
    # "without": knockouts, but made without attributions=True, and so without direct contributions
    got = "without" if isinstance(knockouts, HeadKnockouts) else type(knockouts).__name__
    disagrees = knockouts.disagrees if got == "without" else None
    if disagrees is None or knockouts.direct is None:
        expected = "knockouts with direct contributions"
        fail("knockouts", expected=expected, got=got, instead=instead)
    require_same_model(explained, knockouts)
    value, _, high, _ = knockouts.effect
    direct = knockouts.direct.mean(1)
    sentences = {
        head: knockout_sentence(float(direct[i]), float(value[i]), float(high[i] - value[i]))
        for head, i in knockouts.by_head.items()
    }
    order = sorted(knockouts.by_head.items(), key=lambda pair: -abs(float(value[pair[1]])))
    prompts = knockouts.effects.shape[1]
    legend = (
        f"{MARK} marks heads whose knockout is not what they write (difference of logits, "
        f"mean of {prompts} prompts, ± 95% interval; a head removed is replaced by "
        f"{REPLACED[knockouts.by]})."
    )
    few = f" Below {FEWEST} prompts there is no interval, and no mark."
    legend += few if prompts < FEWEST else ""
    disagreeing = tuple(head for head, i in order if bool(disagrees[i]))
    return KnockoutMarks(sentences, disagreeing, legend)


def knockout_sentence(direct: float, effect: float, reach: float) -> str:
    """What a head writes, and what removing it does.

    >>> knockout_sentence(0.89, -0.07, 0.1), knockout_sentence(-0.95, 1.01, float("nan"))
    ('writes 0.89, removing it costs 0.07 ± 0.10', 'writes −0.95, removing it adds 1.01')
    """
    change = "adds" if effect > 0 else "costs"
    around = f" ± {reach:.2f}" if math.isfinite(reach) else ""
    written = html.signed(round(direct, 2) + 0.0)  # + 0.0: no minus zero
    return f"writes {written}, removing it {change} {abs(effect):.2f}{around}"
