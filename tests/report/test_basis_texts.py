"""What the sections on position and context and on the run say, word for word and in order; numbers
are the names of their cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.modules import copy_of
from tests.report.test_section_texts import Told, module_of
from tests.report.test_sizes import stub
from tl_geometry.corpus.token_windows import TokenWindows
from tl_geometry.report import basis as basis_section
from tl_geometry.report import overview as overview_section


@pytest.mark.parametrize("full", [True, False])
def test_the_analysis_of_variance_in_words(full: bool) -> None:
    """With and without intervals, the null of spliced windows, and the untrained control."""
    module, draft = module_of(basis_section), Told()
    table = SimpleNamespace(states=(0, 3, 7), intervals={"pos": 1} if full else {})
    table.ctx_null = "a null" if full else None
    asked: list[Any] = []
    basis = SimpleNamespace(anova=lambda null: asked.append(null) or table, index=lambda state: 1)
    control = SimpleNamespace(anova=lambda: "control") if full else None
    cells = module._variance(draft, basis, 3, "null", control)
    assert asked == ["null"]
    assert cells(0, "pos") == "<anovar 0 pos>"
    column = "pos_corrected" if full else "pos_debiased"
    of_control = "control" if full else None
    title = (
        "Shares of variance from the first to the last state: position <anovar 0 pos%> to "
        "<anovar 2 pos%>, context <anovar 0 ctx%> to <anovar 2 ctx%>"
    )
    spliced = (
        "Windows spliced from random places of the same corpus have a context share of "
        "<anova 1 ctx_null%> at this state. What real windows have beyond that is context that "
        "lasts longer than one spliced piece. The two ends of a window have contexts with a "
        "correlation of <anova 1 ctx_agreement>."
    )
    about = "The same of the untrained control"
    assert draft.told == [
        f"At state 3: <anova 1 pos%> position (<anova 1 {column}%> after the correction for "
        "sampling noise, reliability <anova 1 pos_reliability> between halves of the corpus), "
        "<anova 1 ctx%> context, <anova 1 resid%> residual (interaction of position and context).",
        *[spliced] * full,
        (
            *("draw", ("variance_shares", table, ("control", of_control)), "variance"),
            {"title": title},
        ),
        ("table", "anova", table, "Analysis of variance of each state", None),
        *[("table", "anova_untrained", "control", about, None)] * full,
        ("find", ("position_share", table, ("control", of_control))),
        ("find", ("context_share", table)),
    ]


def test_the_parts_of_position_and_context() -> None:
    """The middle state is the example; massive tokens have the cells of the analysis."""
    module, draft, of = module_of(basis_section), Told(), stub()
    of.basis.states = (0, 3, 7, 9)
    module._beside = lambda draft, analysis: ("null", "control")
    module._variance = lambda draft, *given: draft.say(f"{given[1:]}") or "cells"
    module.massive = SimpleNamespace(add=lambda draft, analysis, cells: draft.say(cells))
    module.section(draft, of)
    assert draft.told == [
        "Every state is split into mean + pos + ctx + resid (Song & Zhong 2023, Eq. 2): what all "
        "positions and contexts share, what depends on the position alone, on the context alone, "
        "and on both. The squared norms of the last three add up to the variance.",
        ("part", "the analysis of variance"),
        "(7, 'null', 'control')",
        ("part", "massive tokens"),
        "cells",
        ("part", "the positional basis of each state"),
        "What position alone does to a state is one vector for each position. Drawn on the two "
        "directions that hold most of it, a smooth curve is a code for position in which "
        "neighbours are alike.",
        ("draw", ("spirals", of.basis, ("control", "control")), "", {}),
        ("part", "the normalised Gram matrix"),
        ("draw", ("gram", of.basis, 7), "", {}),
    ]


def test_the_null_of_the_context_share() -> None:
    """Windows of the report, spliced with its seed, in a basis without kept states."""
    module, of = module_of(basis_section, "splice", "decompose"), stub()
    of.pick = lambda count: f"{count} windows"
    small = (("second_moments", False), ("keep", 0), ("progress", False))
    windows = ("splice", "7 windows", ("seed", 5))
    options = (("keep_ctx", False), ("seed", 5), *small)
    assert module.spliced(of, 7) == ("decompose", of.view, windows, *options)


# --- what was analysed


@pytest.mark.parametrize("rich", [False, True])
def test_the_facts_of_a_run(rich: bool) -> None:
    """Model, weights, corpus, window and remarks; the names of twelve documents at most."""
    draft, of = Told(), stub(n_layers=3, n_heads=4, d_model=8, d_vocab=61, name="m")
    for name, value in {
        "class_name": "Bridge",
        "library": "TransformerLens 4",
        "processed": rich,
        "fingerprint": "f1",
        "notes": ("of the view",) * rich,
    }.items():
        setattr(of.view, name, value)
    flags = ("a flag",) * rich
    provenance = SimpleNamespace(corpus="texts", token_hash="t1", has_bos=rich, flags=flags)
    provenance.dtype = "float32"
    of.basis = SimpleNamespace(
        provenance=provenance, window=(2 * rich, 16), contexts=40, length=16, kept="states"
    )
    of.windows = TokenWindows(
        tokens=of.windows.tokens,
        has_bos=False,
        names=tuple(f"d{i}" for i in range(12 + rich)),
    )
    of.smaller, of.notes = ("a", "b") if rich else (), ("of the texts",) * rich
    module: Any = copy_of(overview_section)
    module.Table = lambda **given: given
    module.section(draft, of)
    left_out = "positions 0 to 1 left out of the statistics (attention sink), their sums kept"
    names = ", ".join(f"d{i}" for i in range(12))
    facts = {
        "model": f"m (Bridge, TransformerLens 4{', processed weights' * rich})",
        "size": "3 layers, 4 heads, d_model 8, vocabulary 61",
        "weights": "fingerprint f1, computed in float32",
        "corpus": "texts: 40 windows of 16 tokens, hash t1",
        "documents": f"13: {names} ..." if rich else f"12: {names}",
        "first token": "BOS" if rich else "text (no BOS)",
        "window": f"positions 2 to 15; {left_out}"
        if rich
        else "positions 0 to 15; all positions in the statistics",
        "kept": "states",
        "made smaller": "a; b" if rich else "nothing",
        "remarks": "a flag; of the view; of the texts" if rich else "none",
    }
    limits, (_, name, table, about, _) = draft.told
    assert limits.startswith("What these numbers do not say: a share of variance is not a share of")
    assert limits.endswith("edits of the live model do, where a section has them.")
    assert (name, about) == ("overview", "The run")
    assert dict(table["cells"]) == facts
    assert (table["names"], table["provenance"]) == (("property", "value"), provenance)
