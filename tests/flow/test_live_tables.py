"""Tables of the flow on a live model, number by number, and what they were made from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.flow.test_trajectories import deep, ensemble
from tests.lib.models import tiny, tokens
from tl_geometry import GeometryError
from tl_geometry.base.results import hash_tokens
from tl_geometry.flow.alignment import fit_aligned_bases
from tl_geometry.flow.ensemble import trajectories
from tl_geometry.flow.residuals import flow_map
from tl_geometry.flow.skipping import skip_map
from tl_geometry.flow.truncation import truncation_kl
from tl_geometry.models.reader import as_view

POINTS = ["blocks.0.hook_resid_pre", *(f"blocks.{l}.hook_resid_post" for l in range(4))]


def log_p(ids: Tensor, hooks: Any = ()) -> Tensor:
    """Of the next token after each chunk, float64."""
    with torch.no_grad():
        found = deep().run_with_hooks(ids, fwd_hooks=list(hooks))
    return found[:, -1].double().log_softmax(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


def shared(p: Tensor, q: Tensor, k: int) -> Tensor:
    """How many of the k most likely tokens are the same."""
    best = zip(p.topk(k).indices.tolist(), q.topk(k).indices.tolist(), strict=True)
    return torch.tensor([float(len(set(a) & set(b))) for a, b in best]).double()


# ---- trajectories


def test_an_ensemble_says_what_it_was_made_from() -> None:
    ids, labels = tokens(6, 9), torch.tensor([0, 0, 1, 1, 2, 2])
    view = as_view(deep())
    found = trajectories(deep(), ids, labels=labels, position=3, states=(0, 2), progress=False)
    whole = view.activations(ids, [view.state_hooks[0], view.state_hooks[2]])
    assert torch.allclose(found.X, torch.stack([h[:, 3] for h in whole.values()], 1), atol=1e-5)
    assert (found.position, found.states) == (3, (0, 2))
    assert found.labels is not None
    assert found.labels.tolist() == labels.tolist()
    assert torch.equal(found.tokens, ids)  # type: ignore[arg-type]
    parts = found.split(0.4, seed=1)
    assert [part.provenance.contexts for part in parts] == [2, 4]
    assert [len(part.labels.unique()) for part in parts if part.labels is not None] == [1, 2]
    made = found.provenance
    assert (made.model, made.fingerprint) == (view.name, view.fingerprint)
    assert (made.window, made.contexts, made.sources) == ((0, 9), 6, ("sarfati2025",))
    assert (made.token_hash, made.has_bos) == (hash_tokens(ids), False)
    named = tlg.TokenWindows(tokens=ids, has_bos=False, corpus="a novel")
    assert trajectories(deep(), named, progress=False).provenance.corpus == "a novel"
    first = trajectories(deep(), ids, position="cls", progress=False)
    assert (first.position, first.provenance.flags) == (0, ("first token followed",))
    assert trajectories(deep(), ids, position=-1, progress=False).position == -1


def test_states_that_are_not_finite_are_refused() -> None:
    model = deep()

    def spoil(h: Tensor, hook: Any) -> Tensor:
        h = h.clone()
        h[1, -1, 3] = torch.inf
        return h

    with (
        model.hooks(fwd_hooks=[("blocks.2.hook_resid_post", spoil)]),
        pytest.raises(GeometryError, match="states of the followed token"),
    ):
        trajectories(model, tokens(3, 5), progress=False)


# ---- truncation


def test_a_curve_is_what_editing_every_chunk_by_hand_gives() -> None:
    """About the mean of the ensemble; all columns, by default at the published K below the rank,
    and the rank."""
    train, ids = ensemble(), tokens(7, 10, 7)
    bases, own = fit_aligned_bases(train.X, align="none", centered=True), log_p(ids)
    frame = truncation_kl(deep(), ids, train, centered=True, progress=False).to_dataframe()
    assert frame["K"].tolist() == [2, 4, 8, 16]
    for k in (2, 8):

        def project(h: Tensor, hook: Any, k: int = k) -> Tensor:
            at = int(hook.name.split(".")[1]) + 1
            U, mean = bases.U[at][:, :k].to(h), bases.center[at].to(h)
            return torch.cat([h[:, :-1], (h[:, -1:] - mean) @ U @ U.mT + mean], 1)

        cut = log_p(ids, [(name, project) for name in POINTS[1:]])
        row = frame.set_index("K").loc[k]
        each = kl(cut, own)
        assert row["kl"] == pytest.approx(float(each.mean()), rel=1e-4)
        assert row["kl_se"] == pytest.approx(float(each.std()) / math.sqrt(7), rel=1e-4)
        assert row["kl_reverse"] == pytest.approx(float(kl(own, cut).mean()), rel=1e-4)
        assert row["top1"] == pytest.approx(float(shared(own, cut, 1).mean()))
        assert row["top5"] == pytest.approx(float(shared(own, cut, 5).mean()))
        assert (row["where"], row["positions"]) == ("every", "pilot")
        assert (bool(row["held_out"]), row["fitted"], bool(row["claimed"])) == (True, 60, True)
        pairs = kl(own[1:], own[:-1])
        assert row["baseline_mean"] == pytest.approx(float(pairs.mean()), rel=1e-4)
        assert row["baseline_median"] == pytest.approx(float(pairs.median()), rel=1e-4)


@pytest.mark.parametrize("positions", ["pilot", "all"])
def test_passes_of_any_size_give_the_same_curve(positions: str) -> None:
    train, ids = ensemble(), tokens(5, 10, 7)
    options: dict[str, Any] = {"K": (9, 1, 3, 3), "positions": positions, "progress": False}
    whole = truncation_kl(deep(), ids, train, **options)
    assert whole.K == (1, 3, 9)
    for size in (1, 2, 4):
        parts = truncation_kl(deep(), ids, train, batch_size=size, **options)
        for name in ("kl", "kl_se", "kl_reverse", "top1", "top5"):
            torch.testing.assert_close(
                getattr(parts, name), getattr(whole, name), rtol=1e-4, atol=1e-6
            )


def test_a_curve_says_what_it_was_made_from_and_refuses_what_is_none() -> None:
    ids, train = tokens(5, 10, 7), ensemble()
    named = tlg.TokenWindows(tokens=ids, has_bos=False, corpus="a novel")
    made = truncation_kl(deep(), named, train, K=(16,), progress=False).provenance
    assert (made.corpus, made.contexts, made.token_hash) == ("a novel", 5, hash_tokens(ids))
    assert (made.sources, made.fingerprint) == (("sarfati2025",), as_view(deep()).fingerprint)
    assert len(truncation_kl(deep(), ids[:2], train, K=(1,), progress=False).kl) == 1
    refused: list[tuple[Tensor, dict[str, Any], str]] = [
        (ids[:1], {}, "tokens: expected at least two chunks, got 1"),
        (ids, {"K": (0, 3)}, r"K: expected 1 to 16 directions, got \(0, 3\)"),
        (ids, {"where": "first"}, "where: expected one of 'every', 'final'"),
        (ids, {"positions": "last"}, "positions: expected one of 'pilot', 'all'"),
    ]
    for wrong, options, text in refused:
        with pytest.raises(GeometryError, match=text):
            truncation_kl(deep(), wrong, train, progress=False, **options)


# ---- skipped blocks


def test_flows_in_the_place_of_blocks_by_hand() -> None:
    """Both signs and another alignment, chunk by chunk, through the whole table."""
    train, test = tokens(60, 8, 1), tokens(6, 8, 2)
    found = skip_map(
        deep(),
        train,
        test=test,
        pairs=[(0, 2), (1, 4)],
        map_types=("flow", "flow-signed"),
        align="hungarian",
        progress=False,
    )
    states = (0, 1, 2, 4)
    view, ids, target = as_view(deep()), test[:, :-1], test[:, -1:]
    kept = [POINTS[s] for s in states]
    X, clean = (
        torch.stack([h[:, -1] for h in view.activations(rows, kept).values()], 1)
        for rows in (train[:, :-1], ids)
    )
    bases, own = fit_aligned_bases(X, align="hungarian"), log_p(ids)
    frame = found.to_dataframe()
    assert frame[["from_layer", "to_layer", "skipped"]].values.tolist() == (
        [[0, 2, 2], [1, 4, 3]] * 4
    )
    assert frame["map_type"].tolist() == (
        [t for t in ("flow", "flow-signed", "ridge", "identity") for _ in range(2)]
    )
    loss = -own.gather(1, target).mean()
    assert frame["own_loss"].tolist() == pytest.approx([float(loss)] * 8, rel=1e-5)
    for at, signs in enumerate("UV"):
        for pair, (a, b) in enumerate(((0, 2), (1, 4))):
            i, j = states.index(a), states.index(b)
            moved = flow_map(bases, i, j, signs=signs)(clean[:, i])

            def put(h: Tensor, hook: Any, moved: Tensor = moved) -> Tensor:
                return torch.cat([h[:, :-1], moved[:, None].to(h)], 1)

            new = log_p(ids, [(POINTS[b], put)])
            each = kl(own, new)
            want = {
                "kl": each.mean(),
                "kl_se": each.std() / 6**0.5,
                "top1": shared(own, new, 1).mean(),
                "top5": shared(own, new, 5).mean() / 5,
                "loss_increase": (own - new).gather(1, target).mean(),
            }
            row = frame.loc[2 * at + pair]
            for name, value in want.items():
                assert row[name] == pytest.approx(float(value), rel=1e-3, abs=1e-5), (name, a, b)
    assert not torch.allclose(
        found.table("flow").nan_to_num(), found.table("flow-signed").nan_to_num(), rtol=1e-2
    )


def test_skips_halve_the_chunks_with_seed_zero_and_say_what_they_were_made_from() -> None:
    ids = tokens(70, 8, 1)
    named = tlg.TokenWindows(tokens=ids, has_bos=False, corpus="a novel")
    options: dict[str, Any] = {"pairs": [(1, 3)], "map_types": "shift", "progress": False}
    found = skip_map(deep(), named, **options)
    again = skip_map(deep(), ids, train_share=0.5, seed=0, **options)
    assert (found.train, found.test) == (35, 35)
    assert found.rows() == again.rows()
    assert found.rows() != skip_map(deep(), ids, seed=1, **options).rows()
    assert skip_map(deep(), ids, train_share=0.1, **options).train == 7
    made = found.provenance
    assert (made.corpus, made.contexts, made.window, made.seed) == ("a novel", 35, (0, 8), 0)
    assert (made.sources, made.token_hash) == (("sarfati2025",), again.provenance.token_hash)


def test_skips_refuse_what_is_no_skip() -> None:
    ids = tokens(8, 3, 1)
    options: dict[str, Any] = {"map_types": "identity", "progress": False}
    assert skip_map(deep(), ids, pairs=[(0, 4)], **options).pairs() == [(0, 4)]
    for model, some in ((tiny("bridge", "gpt2"), False), (deep(3), True)):
        flags = skip_map(model, ids, **options).provenance.flags
        assert any("blocks only" in flag for flag in flags) == some, "of three blocks not all"
    for pairs in ([(-1, 2)], [(3, 5)], [(2, 2)], []):
        with pytest.raises(GeometryError, match="pairs: expected states 0 <= a < b <= 4"):
            skip_map(deep(), ids, pairs=pairs, **options)
    with pytest.raises(GeometryError, match="at least 3 tokens"):
        skip_map(deep(), ids[:, :2], **options)
    with pytest.raises(GeometryError, match="map_types: expected some of flow"):
        skip_map(deep(), ids, map_types=(), progress=False)


# ---- bars
