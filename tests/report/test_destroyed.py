"""Findings on a real model, and on the same with what they claim destroyed: the claim is made, and
it is gone. Those from states alone are in ``test_findings``, that of the weights in
``tests/weights/test_subspaces``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tl_geometry.flow import replacing
from tl_geometry.interventions import dominant_only
from tl_geometry.report import findings
from tl_geometry.report.findings import Finding
from tl_geometry.report.origin import plain


@pytest.fixture(scope="module")
def model() -> Any:
    return tlg.zoo.embedded()


def said(finding: Finding | None) -> str:
    assert finding is not None
    assert plain(finding.said).startswith("No evidence") != finding.clear
    return plain(f"{finding.said} {finding.beside}")


def claimed(finding: Finding | None) -> bool:
    assert finding is not None, "a finding"
    assert said(finding)
    return finding.clear


@contextmanager
def positions_in_an_order_of_each_window(model: Any) -> Iterator[None]:
    """Each window adds its positional embeddings in a random order, that of its tokens."""
    running: list[Tensor] = []
    noted = model.register_forward_pre_hook(lambda module, args: running.append(args[0]))

    def shuffled(embedded: Tensor, hook: Any) -> Tensor:
        rows = []
        for ids in running[-1]:
            generator = torch.Generator().manual_seed(int(ids.sum()))
            order = 1 + torch.randperm(len(ids) - 1, generator=generator)
            rows.append(torch.cat([torch.tensor([0]), order]))
        return embedded.expand(len(rows), -1, -1).gather(
            1, torch.stack(rows)[..., None].expand(-1, -1, embedded.shape[-1])
        )

    try:
        with model.hooks(fwd_hooks=[("pos_embed.hook_out", shuffled)]):
            yield
    finally:
        noted.remove()


@pytest.mark.slow
def test_no_position_drives_a_head_where_windows_do_not_agree_on_it(model: Any) -> None:
    windows = tlg.zoo.default_windows(model, 48, n=64)

    def driver() -> Finding | None:
        basis = tlg.decompose(model, windows, progress=False)
        detail = ("intervals", "nulls")
        table = tlg.sweep_heads(model, windows, basis, detail=detail, progress=False)
        return findings.driver(table, groups=8)

    assert claimed(driver())
    with positions_in_an_order_of_each_window(model):
        assert not claimed(driver())


@pytest.mark.slow
def test_no_content_drives_a_head_whose_scores_are_of_both(model: Any) -> None:
    """The numbers of the content term and of a mixed one exchanged."""
    windows = tlg.zoo.default_windows(model, 48, n=64)
    basis = tlg.decompose(model, windows, progress=False)
    detail = ("intervals", "nulls")
    table = tlg.sweep_heads(model, windows, basis, layers=1, detail=detail, progress=False)
    content = table.groups.index("content")
    real = findings.driver(table, groups=8, rotary=True)
    assert "Content drives" in said(real)
    index = torch.tensor([table.terms.index(t) for t in ("cvec-cvec", "pos-cvec")])

    def swapped(record: Any, axis: int, *names: str) -> Any:
        fields = {}
        for name in names:
            values = getattr(record, name)
            fields[name] = values.index_copy(axis, index, values.index_select(axis, index.flip(0)))
        return dataclasses.replace(record, **fields)

    sums = swapped(table.sums, 1, "numerators", "gains")
    resampled = swapped(table.resampled, 2, "cs", "gs")
    gone = dataclasses.replace(table, sums=sums, resampled=resampled)
    assert float(gone.group_cs[:, content].max()) < 0.5
    assert "No evidence" in said(findings.driver(gone, groups=8, rotary=True))


@pytest.mark.nightly
def test_dominant_terms_of_other_names_are_not_better_than_random_ones(model: Any) -> None:
    windows = tlg.zoo.default_windows(model, 32, n=12)
    basis = tlg.decompose(model, tlg.zoo.default_windows(model, 32, n=64), progress=False)
    table = tlg.sweep_heads(model, windows, basis, progress=False)
    options: dict[str, Any] = {"draws": 9, "progress": False}
    real = dominant_only(model, windows, basis, table=table, **options)
    assert claimed(findings.dominance(real))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        numerators = table.sums.numerators
        order = torch.rand(numerators.shape, generator=generator).argsort(1)
        sums = dataclasses.replace(table.sums, numerators=numerators.gather(1, order))
        renamed = dataclasses.replace(table, sums=sums)
        gone = dominant_only(model, windows, basis, table=renamed, **options)
        assert not claimed(findings.dominance(gone))
        by_prompt = gone.change("random term", against="dominant term")
        # over prompts alone one of these names is "better" than the mean of the draws
        assert seed != BY_CHANCE or bool(by_prompt.low > 0)


BY_CHANCE = 0
"""A seed of names that happen to cost less than random terms do on average."""


@pytest.mark.slow
def test_no_map_stands_for_a_block_where_it_is_given_another_chunks_state(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = tlg.zoo.default_windows(model, 24, n=64)
    options: dict[str, Any] = {"map_types": ("ridge", "identity", "mean"), "progress": False}
    assert claimed(findings.skipped(tlg.skip_map(model, chunks, pairs="all", **options)))
    run = replacing.SkipCosts._run

    def of_others(self: Any, group: Any, n_chunks: int, maps: Any, clean: Any, runs: Any) -> Any:
        rolled = {state: h.roll(1, 0) for state, h in clean.items()}
        return run(self, group, n_chunks, maps, rolled, runs)

    monkeypatch.setattr(replacing.SkipCosts, "_run", of_others)
    assert not claimed(findings.skipped(tlg.skip_map(model, chunks, pairs="all", **options)))


def test_random_directions_do_not_carry_the_output(model: Any) -> None:
    """Those of the states do to a seventh of the distance; all of them would in any case."""
    chunks, K = tlg.zoo.default_windows(model, 24, n=160), (64, 120, 128)
    fitted = tlg.trajectories(model, chunks[:144], progress=False)
    real = tlg.truncation_kl(model, chunks[144:], fitted, K=K, progress=False)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(fitted.X.shape, generator=generator).to(fitted.X)
    noise = dataclasses.replace(fitted, X=X)
    gone = tlg.truncation_kl(model, chunks[144:], noise, K=K, progress=False)
    assert real.claimed
    for curve, shown in ((real, "0.96"), (gone, "4.")):
        assert not claimed(findings.truncated(curve))
        assert f"with 64 of 128 it still moves by {shown}" in said(findings.truncated(curve))
    assert gone.needed() == 120, "nearly all directions, however drawn"
    # with a distance of which a seventh is a tenth, half of the states' own directions would do
    far = [dataclasses.replace(curve, baseline_mean=20.0) for curve in (real, gone)]
    assert claimed(findings.truncated(far[0]))
    assert not claimed(findings.truncated(far[1]))


def test_vectors_of_windows_without_a_context_are_not_aligned_with_position() -> None:
    """States vary most where position lies; whether windows have a context of their own along it is
    another question."""
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(1, 64, 24, 48, generator=generator).double()
    along = torch.linalg.qr(torch.randn(48, 48, generator=generator).double()).Q[0]
    curve = torch.cos(torch.linspace(0, 3, 24)).double()[:, None] * along
    spread = noise + 3 * (noise @ along)[..., None] * along + 3 * curve
    contexts = torch.randn(1, 64, 1, 1, generator=generator).double()

    def incoherence(h: Tensor) -> Finding | None:
        report = tlg.contextual_report(tlg.decompose_activations(h), rank=3)
        return findings.incoherence(report)

    assert claimed(incoherence(spread + 6 * contexts * along))
    assert not claimed(incoherence(spread))
