"""Every condition of necessity and of dominance is that of its edit alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.induction import corpus, induction_model, prompts
from tests.interventions.bases import basis_of
from tests.lib.models import HEADS, tiny, tokens
from tl_geometry import decompose
from tl_geometry.base.errors import GeometryError
from tl_geometry.interventions.causal import dominant_only, necessity_sufficiency
from tl_geometry.interventions.terms import (
    Change,
    edits_for,
    keeping,
    per_head,
    removing,
    shrinking,
    swapping,
    terms_of,
    uniform,
)
from tl_geometry.models import view
from tl_geometry.models.live_edits import edited_scores
from tl_geometry.models.output_head import next_token_losses
from tl_geometry.scores.sweep import sweep_heads

PROMPTS, FIVE = tokens(batch=4, length=14, seed=4), tokens(batch=5, length=14, seed=4)
QUIET: dict[str, Any] = {"progress": False}


def losses_of(
    architecture: str, heads: list[tuple[int, int]], change: Change, ids: Tensor = FIVE
) -> Tensor:
    """Loss of each prompt under one edit."""
    model, basis = tiny("bridge", architecture), basis_of("bridge", architecture)
    seen = view(model)
    with torch.no_grad(), edited_scores(seen, edits_for(seen, basis, heads, change)):
        return next_token_losses(model(ids), ids).mean(1)


@pytest.mark.parametrize(("architecture", "alibi"), [("gpt2", False), ("bloom", True)])
def test_conditions_of_necessity_are_those_of_each_edit(architecture: str, alibi: bool) -> None:
    """Three swaps with other prompts by default; every other term is a control."""
    model, basis = tiny("bridge", architecture), basis_of("bridge", architecture)
    heads, names = [(0, 1), (1, 2)], terms_of(["mixed", "pos-cvec"])
    found = necessity_sufficiency(
        model, FIVE, basis, ["L1H2", "L0H1"], ["mixed", "pos-cvec"], **QUIET
    )
    swaps = [losses_of(architecture, heads, swapping(names, i)) for i in range(3)]
    others = [a for a in terms_of(["position", "content", "mixed"]) if a not in names]
    others = [name for name in others if alibi or name != "alibi-alibi"]
    expected = {
        "bias terms only": losses_of(architecture, heads, keeping(())),
        "keep": losses_of(architecture, heads, keeping(names)),
        "remove": losses_of(architecture, heads, removing(names)),
        "swap": torch.stack(swaps).mean(0),
        "shrink": losses_of(architecture, heads, shrinking(names, basis.window[0])),
    }
    for other in others:
        expected[f"remove {other}"] = losses_of(architecture, heads, removing((other,)))
    assert set(found.conditions) == {"clean", *expected}
    for condition, losses in expected.items():
        row = found.losses[found.row(condition)].float()
        assert torch.allclose(row, losses, atol=1e-4), condition
    assert float((swaps[0] - swaps[1]).abs().max()) > 1e-3
    assert set(found.heads) == set(heads)
    assert found.term == names
    made = found.provenance
    assert (made.seed, made.window, made.contexts) == (0, basis.window, 5)


def test_remarks_say_what_a_table_cannot_show() -> None:
    """Ten prompts are enough for intervals; a head that spreads its attention evenly anyway has
    nothing to lose."""
    model = induction_model("bridge")
    basis = decompose(model, corpus(), progress=False)
    even = necessity_sufficiency(model, prompts(10), basis, "L0H1", "content", draws=1, **QUIET)
    assert even.provenance.flags == ("no sufficiency: nothing is lost without it",)
    assert bool(even.change("remove").low.isfinite())
    for few, draws, said in ((1, 1, "tokens: .* got 1"), (3, 0, "draws: .* got 0")):
        with pytest.raises(GeometryError, match=said):
            necessity_sufficiency(model, prompts(few), basis, "L0H1", "content", draws=draws)


def test_conditions_of_dominance_are_those_of_each_edit() -> None:
    """Every head keeps the term, or the group, of its largest share; five random ones by default,
    whose mean is a condition."""
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge")
    found = dominant_only(model, PROMPTS, basis, **QUIET)
    table = sweep_heads(model, PROMPTS, basis, progress=False)
    every = [(layer, head) for layer in (0, 1) for head in range(HEADS)]
    largest = [
        {head: terms_of(names[int(row.argmax())]) for head, row in zip(table.heads, shares)}
        for shares, names in ((table.cs, table.terms), (table.group_cs, table.groups))
    ]
    expected = {
        "dominant term": per_head(largest[0]),
        "dominant group": per_head(largest[1]),
        "bias terms only": keeping(()),
        "uniform attention": uniform(),
    }
    for condition, change in expected.items():
        row = found.losses[found.row(condition)].float()
        expected_losses = losses_of("gpt2", every, change, PROMPTS)
        assert torch.allclose(row, expected_losses, atol=1e-4), condition
    assert found.drawn.shape == (5,)
    assert float(found.drawn.mean()) == pytest.approx(float(found.loss[found.row("random term")]))
    assert len(set(found.drawn.tolist())) == 5
    made = found.provenance
    assert (made.seed, made.window, made.contexts) == (0, basis.window, 4)
    some = sweep_heads(model, PROMPTS, basis, layers=[1], progress=False)
    with pytest.raises(GeometryError, match=r"a row for every head, got none for \[\(0, 0\)"):
        dominant_only(model, PROMPTS, basis, table=some, **QUIET)
    with pytest.raises(GeometryError, match="draws: expected at least 1, got 0"):
        dominant_only(model, PROMPTS, basis, table=table, draws=0, **QUIET)
