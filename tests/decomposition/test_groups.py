"""Groups of contexts follow documents: where their borders lie, and that intervals cover then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.decomposition.groups import APART, CUT, group_borders


def _documents(sizes: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20), groups=st.integers(1, 9))
def test_no_group_cuts_through_a_document_unless_it_is_said(sizes: list[int], groups: int) -> None:
    documents = _documents(sizes)
    contexts = len(documents)
    borders, remarks = group_borders(contexts, groups, documents)
    plain = tuple(
        min(c for c in range(contexts + 1) if c * groups >= g * contexts) for g in range(1, groups)
    )
    starts = {0, *documents.diff().nonzero().flatten().add(1).tolist()}
    if remarks or len(sizes) == 1:
        assert borders == plain
        assert remarks in ((), (CUT,))
    else:
        assert set(borders) <= starts
        assert list(borders) == sorted(set(borders))
        assert min(groups, 4) <= len(borders) + 1 <= groups


def test_documents_of_one_window_are_groups_as_without_documents() -> None:
    for contexts in (8, 20, 37):
        alone = group_borders(contexts, 8, torch.arange(contexts))
        assert alone == group_borders(contexts, 8)


def test_a_basis_of_several_texts_has_the_groups_of_its_texts() -> None:
    model = tlg.zoo.embedded()
    text = "def f(x):\n    return x + 1\n" * 40
    texts = [text[: 120 * k] for k in (3, 1, 2, 4, 2)]
    windows = tlg.windows(model, texts, 12, prepend_bos=True)
    assert windows.labels is not None
    basis = tlg.decompose(model, windows, progress=False)
    for document in range(5):  # whole inside one group
        assert len(basis.group_of[windows.labels == document].unique()) == 1
    assert CUT not in basis.provenance.flags
    # the twin: the same windows without their documents are cut anywhere
    bare = tlg.decompose(model, windows.tokens, progress=False)
    assert any(len(bare.group_of[windows.labels == d].unique()) > 1 for d in range(5))
    for field in ("mean", "pos", "ctx"):
        assert torch.allclose(getattr(basis, field), getattr(bare, field), atol=1e-10)


def test_too_few_documents_are_said(tmp_path: Path) -> None:
    h = torch.randn(16, 4, 3, dtype=torch.float64)
    two = tlg.decompose_activations(h, labels=[0] * 8 + [1] * 8)
    assert CUT in two.provenance.flags
    assert CUT in tlg.PositionContext.load(two.save(tmp_path / "two")).provenance.flags
    assert len(two.group_counts) == 8
    for labels in ([0] * 16, None):
        assert CUT not in tlg.decompose_activations(h, labels=labels).provenance.flags


@pytest.mark.slow
def test_documents_that_are_not_in_order_are_said() -> None:
    model = tlg.zoo.embedded()
    windows = tlg.zoo.default_windows(model, 16, n=64)
    assert windows.labels is not None
    for rows, flagged in ((windows, False), (windows[torch.arange(64) * 37 % 64], True)):
        basis = tlg.decompose(model, rows, progress=False)
        table = tlg.sweep_heads(model, rows, basis, detail="intervals", progress=False)
        plain = tlg.sweep_heads(model, rows, basis, progress=False)
        assert (APART in basis.provenance.flags) == flagged
        assert (APART in table.provenance.flags) == flagged
        assert APART not in plain.provenance.flags


CONTEXTS, BLOCK, POSITIONS, WIDTH = 64, 16, 12, 8
"""Windows, windows of one topic in a row, positions, coordinates."""


def _topics(generator: torch.Generator, pos: Tensor) -> Tensor:
    """Activations with unit variance of topics and of noise, and a quarter each of windows and
    position."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    topics = normal(CONTEXTS // BLOCK, 1, WIDTH).repeat_interleave(BLOCK, 0)
    windows = 0.5 * normal(CONTEXTS, 1, WIDTH)
    return pos + topics + windows + normal(CONTEXTS, POSITIONS, WIDTH)


@pytest.mark.nightly
def test_intervals_cover_where_windows_come_in_topics() -> None:
    repeats, generator = 600, torch.Generator().manual_seed(1)
    pos = torch.randn(POSITIONS, WIDTH, generator=generator, dtype=torch.float64)
    pos = pos - pos.mean(0)
    pos *= 0.5 / pos.square().mean().sqrt()
    ctx = 1 + 0.25 + 1 / POSITIONS  # of infinitely many topics
    parts = torch.tensor([0.25, ctx, 1 - 1 / POSITIONS])
    shares = (parts / parts.sum()).tolist()
    truth: dict[str, float] = {"pos": shares[0], "ctx": shares[1], "resid": shares[2]}
    labels = torch.arange(CONTEXTS) // BLOCK
    covered: dict[Any, int] = {}
    for _ in range(repeats):
        h = _topics(generator, pos)
        for known in (True, False):
            basis = tlg.decompose_activations(
                h, labels=labels if known else None, second_moments=False, keep=0
            )
            for name, bounds in basis.anova().intervals.items():
                low, high = bounds[0, 1:].tolist()
                at = (known, name)
                covered[at] = covered.get(at, 0) + (low <= truth[name] <= high)
    # 95% within three standard errors of 600 repeats (2.7%)
    assert all(covered[True, name] / repeats > 0.92 for name in truth), covered
    # the twin: groups that cut through topics do not cover
    assert covered[False, "ctx"] / repeats < 0.85, covered
