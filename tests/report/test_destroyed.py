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
    windows = tlg.zoo.default_windows(model, 48, n=96)

    def driver() -> Finding | None:
        basis = tlg.decompose(model, windows[:-32], progress=False)
        table = tlg.sweep_heads(model, windows[-32:], basis, intervals=True, progress=False)
        return findings.driver(table, groups=8)

    assert claimed(driver())
    with positions_in_an_order_of_each_window(model):
        assert not claimed(driver())


@pytest.mark.slow
def test_no_content_drives_a_head_whose_scores_are_of_both(model: Any) -> None:
    """The numbers of the content term and of a mixed one exchanged."""
    windows = tlg.zoo.default_windows(model, 48, n=64)
    # without documents, whose groups would be too small
    fitted = dataclasses.replace(windows[:-32], labels=None, label_names=())
    basis = tlg.decompose(model, fitted, progress=False)
    table = tlg.sweep_heads(model, windows[-32:], basis, layers=1, intervals=True, progress=False)
    content = table.groups.index("content")
    real = findings.driver(table, groups=8, rotary=True)
    assert "Content drives" in said(real)
    index = torch.tensor([table.terms.index(t) for t in ("cvec-cvec", "pos-cvec")])

    def swapped(values: torch.Tensor) -> torch.Tensor:
        return values.index_copy(-1, index, values.index_select(-1, index.flip(0)))

    samples = {share: swapped(values) for share, values in table.samples.items()}
    gone = dataclasses.replace(table, cs=swapped(table.cs), gs=swapped(table.gs), samples=samples)
    assert float(gone.group_cs[:, content].max()) < 0.5
    assert "No evidence" in said(findings.driver(gone, groups=8, rotary=True))


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
        report = tlg.contextual_report(tlg.decompose_activations(h, keep=64), rank=3)
        return findings.incoherence(report)

    assert claimed(incoherence(spread + 6 * contexts * along))
    assert not claimed(incoherence(spread))
