"""The verbs of trajectories on live models: extraction, truncation, skipping, nulls, separability,
figures."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tl_geometry
from tests.lib.models import HAS_HOOKED, VOCAB, hf_model, randomize, tiny, tokens
from tl_geometry import GeometryError, UnsupportedModelError
from tl_geometry.base.results import Provenance
from tl_geometry.corpus.nulls import gibberish
from tl_geometry.flow.alignment import fit_aligned_bases
from tl_geometry.flow.ensemble import FOLDED, Trajectories, split_rows, trajectories
from tl_geometry.flow.noise import fit_noise_law, isotropy_tests, layer_anomalies
from tl_geometry.flow.reports import FlowReport, compare_ensembles, flow_report
from tl_geometry.flow.residuals import fit_map, flow_map, residual_statistics, score_map
from tl_geometry.flow.separation import (
    ensembles_apart,
    resampled_t_reach,
    separability,
    true_against_extrapolated,
)
from tl_geometry.flow.skipping import SkipMap, skip_map
from tl_geometry.flow.truncation import TruncationCurve, truncation_kl
from tl_geometry.models.next_token import log_probabilities
from tl_geometry.models.output_head import distances
from tl_geometry.models.reader import as_view
from tl_geometry.models.untrained import reinitialized

ROOT = Path(tl_geometry.__file__).parent.parent
MODEL_CLASSES = [
    "bridge",
    pytest.param(
        "hooked",
        marks=pytest.mark.skipif(
            not HAS_HOOKED, reason="HookedTransformer is not in TransformerLens 4"
        ),
    ),
]


@cache
def deep(layers: int = 4) -> Any:
    """A tiny GPT-2 with more blocks than the shared ones."""
    import transformers

    from tl_geometry.models.loading import from_hf

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=16,
        n_layer=layers,
        n_head=2,
        n_positions=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config).eval()
    randomize(model, 1)
    return from_hf(model, None, name="tiny-deep")


@cache
def ensemble(n: int = 60, seed: int = 1) -> Trajectories:
    return trajectories(
        deep(), tokens(n, 10, seed), states=(0, 1, 2, 3, 4), post_norm=True, progress=False
    )


def states_one_by_one(model: Any, ids: Tensor) -> Tensor:
    """The published way: a cache for every chunk."""
    view = as_view(model)
    names = [f"blocks.{l}.hook_resid_post" for l in range(view.n_layers)]
    found = []
    for row in ids:
        _, cache_ = model.run_with_cache(row[None], names_filter=lambda name: name in names)
        found.append(torch.stack([cache_[n][0, -1] for n in names]))
    return torch.stack(found)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_ensemble_is_what_one_cache_per_chunk_gives(model_class, architecture):
    model = tiny(model_class, architecture)
    ids = tokens(7, 9)
    found = trajectories(model, ids, batch_size=3, progress=False)
    assert found.states == (1, 2)
    assert found.X.shape == (7, 2, 32)
    assert torch.allclose(found.X, states_one_by_one(model, ids), atol=1e-5)
    assert torch.equal(found.X, trajectories(model, ids, batch_size=3, progress=False).X)
    assert torch.allclose(
        found.X, trajectories(model, ids, batch_size=7, progress=False).X, atol=1e-5
    )
    assert found.provenance.token_hash is not None
    assert found.provenance.contexts == 7


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_the_post_norm_state_is_what_the_head_reads(model_class):
    model = tiny(model_class, "gpt2")
    ids = tokens(5, 8)
    found = trajectories(model, ids, post_norm=True, progress=False)
    hf = hf_model("gpt2")
    with torch.no_grad():
        hidden = hf(ids, output_hidden_states=True).hidden_states
    assert torch.allclose(
        found.after_norm().X[:, -1], hidden[-1][:, -1], atol=1e-4
    )  # the library's last hidden state is post-norm
    assert not torch.allclose(found.X[:, -1], hidden[-1][:, -1], atol=1e-1)
    assert torch.allclose(found.X[:, 0], hidden[1][:, -1], atol=1e-4)
    assert "last state after the final norm" in found.after_norm().provenance.flags
    with pytest.raises(
        GeometryError, match=r"post_norm: expected the last state after the norm, got none"
    ):
        trajectories(model, ids, progress=False).after_norm()
    with pytest.raises(GeometryError, match="post_norm: expected states that include the last"):
        trajectories(model, ids, states=[0, 1], post_norm=True, progress=False)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_post_norm_states_of_a_processed_model_say_that_they_lack_the_gain(architecture):
    ids = tokens(5, 8)
    processed = trajectories(
        tiny("bridge", architecture, True), ids, post_norm=True, progress=False
    )
    plain = trajectories(tiny("bridge", architecture), ids, post_norm=True, progress=False)
    assert not torch.allclose(
        processed.after_norm().X[:, -1], plain.after_norm().X[:, -1], atol=0.1
    )
    assert FOLDED in processed.provenance.flags
    assert plain.provenance.flags == ()


def test_batches_change_nothing_and_results_survive_a_file(tmp_path):
    ids = tokens(6, 9)
    memory = trajectories(deep(), ids, progress=False)
    small = trajectories(deep(), ids, batch_size=2, progress=False)
    assert torch.allclose(memory.X, small.X, atol=1e-6)
    again = Trajectories.load(memory.save(tmp_path / "t.safetensors"))
    assert torch.equal(again.X, memory.X)
    assert again.states == memory.states
    batches = trajectories(deep(), iter([ids[:4], ids[4:]]), progress=False)
    assert torch.allclose(batches.X, memory.X, atol=1e-5)


def test_an_encoder_is_followed_at_its_first_token_and_its_outputs_are_refused():
    model = tiny("bridge", "bert")
    ids = tokens(6, 9)
    found = trajectories(model, ids, progress=False)
    assert found.position == 0
    assert "first token followed" in found.provenance.flags
    last = trajectories(model, ids, position="pilot", progress=False)
    assert "not a pilot" in last.provenance.flags[0]
    assert not torch.allclose(found.X, last.X, atol=1e-2)
    with pytest.raises(
        UnsupportedModelError, match="truncation_kl: expected a causal language model"
    ):
        truncation_kl(model, ids, found)
    untrained = dataclasses.replace(as_view(tiny("bridge", "gpt2")), head_trained=False)
    with pytest.raises(
        UnsupportedModelError,
        match=r"whose head was newly initialised\. Use the measures of states",
    ):
        skip_map(untrained, ids)


def test_errors_of_extraction():
    with pytest.raises(GeometryError, match="states: expected an index from 0 to 4, got 9"):
        trajectories(deep(), tokens(3, 5), states=(1, 9))
    assert trajectories(deep(), tokens(3, 5), states=3, progress=False).states == (3,)
    with pytest.raises(GeometryError, match="states: expected increasing states"):
        trajectories(deep(), tokens(3, 5), states=(3, 1))
    with pytest.raises(
        GeometryError, match='position: expected "pilot", "cls" or a position, got \'last\''
    ):
        trajectories(deep(), tokens(3, 5), position="last")


def test_splits_are_disjoint_and_keep_documents_whole():
    a, b = split_rows(10, None, 0.5, 0)
    assert sorted([*a.tolist(), *b.tolist()]) == list(range(10))
    labels = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])
    for seed in range(8):
        a, b = split_rows(10, labels, 0.5, seed)
        assert not set(labels[a].tolist()) & set(labels[b].tolist())
        assert len(a) > 0
        assert len(b) > 0


def test_gibberish_is_uniform():
    found = gibberish(deep(), 400, 10, seed=3)
    counts = found.tokens.reshape(-1).bincount(minlength=VOCAB)
    assert float(counts.float().std()) < 3 * math.sqrt(4000 / VOCAB)
    assert bool((counts > 0).all()), "the first and the last id too"
    assert torch.equal(found.tokens, gibberish(deep(), 400, 10, seed=3).tokens)


# truncation


def test_truncation_to_all_directions_changes_nothing_and_to_few_changes_much():
    train, ids = ensemble(), tokens(12, 10, 7)
    curve = truncation_kl(deep(), ids, train, K=(1, 4, 16), progress=False)
    assert curve.held_out
    assert float(curve.kl[-1]) < 1e-9
    assert float(curve.top5[-1]) == 5
    assert float(curve.top1[-1]) == 1
    assert float(curve.kl[0]) > 0.05
    assert float(curve.kl.min()) >= 0
    assert float(curve.top5[0]) < 5
    assert curve.needed(1e-6) == 16
    assert curve.needed(1e9) == 1
    assert truncation_kl(deep(), ids, train, K=(1,), progress=False).needed(1e-9) is None
    assert TruncationCurve.load  # results of verbs can be read back
    assert len(curve.to_dataframe()) == 3


@torch.no_grad()
def test_truncation_is_what_editing_the_stream_by_hand_gives():
    model, train, ids = deep(), ensemble(), tokens(4, 10, 7)
    U = fit_aligned_bases(train.X, align="none").U[:, :, :3].float()
    own = model(ids)[:, -1].double().log_softmax(-1)
    for where, positions in (("every", "pilot"), ("final", "pilot"), ("every", "all")):
        used = range(1, 5) if where == "every" else [4]

        def project(s: int, positions: str = positions) -> Any:
            def edit(h: Tensor, hook: Any) -> Tensor:
                h = h.clone()
                rows = slice(None) if positions == "all" else slice(-1, None)
                h[:, rows] = h[:, rows] @ U[s] @ U[s].mT
                return h

            return (f"blocks.{s - 1}.hook_resid_post", edit)

        changed = (
            model.run_with_hooks(ids, fwd_hooks=[project(s) for s in used])[:, -1]
            .double()
            .log_softmax(-1)
        )
        curve = truncation_kl(
            model, ids, train, K=(3,), where=where, positions=positions, progress=False
        )
        expected = (changed.exp() * (changed - own)).sum(-1).mean()
        assert math.isclose(float(curve.kl[0]), float(expected), rel_tol=1e-4)
        reverse = (own.exp() * (own - changed)).sum(-1).mean()
        assert math.isclose(float(curve.kl_reverse[0]), float(reverse), rel_tol=1e-4)


def test_in_sample_chunks_lie_in_the_span_of_their_own_directions():
    ids = tokens(6, 10, 5)
    own = trajectories(deep(), ids, states=(0, 1, 2, 3, 4), progress=False)
    inside = truncation_kl(deep(), ids, own, K=(6,), progress=False)
    outside = truncation_kl(deep(), tokens(6, 10, 6), own, K=(6,), progress=False)
    assert float(inside.kl[0]) < 1e-8
    assert not inside.held_out
    few = "directions fitted on 6 trajectories, fewer than the 16 dimensions: no K is claimed"
    assert inside.provenance.flags == ("directions fitted on the same chunks", few)
    assert (inside.fitted, inside.claimed, inside.needed()) == (6, False, None)
    assert float(outside.kl[0]) > 1e-3
    with pytest.raises(
        GeometryError, match=r"K: expected 1 to 6 directions, got \(7,\)\. Use more trajectories"
    ):
        truncation_kl(deep(), ids, own, K=(7,))
    with pytest.raises(
        GeometryError, match="ensemble: expected trajectories of tiny-gpt2, got of tiny-deep"
    ):
        truncation_kl(tiny("bridge", "gpt2"), ids, own)


def test_held_out_means_that_no_chunk_is_shared():
    train, test = ensemble().split()
    assert train.tokens is not None
    assert test.tokens is not None
    assert not truncation_kl(deep(), train.tokens, train, K=(16,), progress=False).held_out
    assert truncation_kl(deep(), test.tokens, train, K=(16,), progress=False).held_out
    mixed = torch.cat([test.tokens[:3], train.tokens[:1]])
    assert not truncation_kl(deep(), mixed, train, K=(16,), progress=False).held_out
    unknown = truncation_kl(
        deep(), test.tokens, dataclasses.replace(train, tokens=None), K=(16,), progress=False
    )
    assert not unknown.held_out
    assert unknown.provenance.flags == ("chunks of the directions not known",)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_truncation_takes_the_last_state_before_the_final_norm(architecture):
    model, ids = tiny("bridge", architecture), tokens(6, 9)
    own = trajectories(model, ids, post_norm=True, progress=False)
    assert float(truncation_kl(model, ids, own, K=(6,), progress=False).kl[0]) < 1e-6
    with pytest.raises(
        GeometryError,
        match=r"ensemble: expected states before the final norm.*"
        r"Use the ensemble that \.after_norm\(\) was",
    ):
        truncation_kl(model, ids, own.after_norm(), K=(6,))


def test_truncation_refuses_directions_of_other_states_tokens_or_records():
    model, ids = deep(), tokens(6, 10, 5)
    with pytest.raises(GeometryError, match=r"ensemble: expected states 1 to 4, got \(2, 4\)"):
        truncation_kl(model, ids, trajectories(model, ids, states=(2, 4), progress=False))
    last = trajectories(model, ids, states=4, progress=False)
    assert truncation_kl(model, ids, last, K=(2,), where="final", progress=False).where == "final"
    with pytest.raises(
        GeometryError, match="ensemble: expected trajectories of the last token, got of position 3"
    ):
        truncation_kl(model, ids, trajectories(model, ids, position=3, progress=False))
    assert truncation_kl(
        model, ids, trajectories(model, ids, position=9, progress=False), K=(2,), progress=False
    ).K == (2,)


@torch.no_grad()
def test_the_baseline_is_the_distance_of_consecutive_chunks():
    ids = tokens(6, 10, 5)
    curve = truncation_kl(deep(), ids, ensemble(), K=(16,), progress=False, batch_size=2)
    own = deep()(ids)[:, -1].double().log_softmax(-1)
    expected = [float((own[i + 1].exp() * (own[i + 1] - own[i])).sum()) for i in range(5)]
    assert math.isclose(curve.baseline_mean, float(np.mean(expected)), rel_tol=1e-5)
    assert math.isclose(curve.baseline_median, float(np.median(expected)), rel_tol=1e-5)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bloom", "gpt-neo"])
@torch.no_grad()
def test_unembedding_one_column_gives_the_models_own_logits(model_class, architecture):
    model = tiny(model_class, architecture)
    ids = tokens(3, 8)
    full = model(ids).float().log_softmax(-1)
    assert torch.allclose(
        log_probabilities(as_view(model), ids, {}).float(), full[:, -1], atol=1e-5
    )
    assert torch.allclose(
        log_probabilities(as_view(model), ids, {}, position=None), full, atol=1e-5
    )


def test_distances_by_hand():
    p, q = torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([[0.1, 0.2, 0.7]]).log()
    found = distances(p, q)
    assert math.isclose(float(found.kl), 0.6 * math.log(7), rel_tol=1e-6)
    assert float(found.top1) == 0
    assert float(found.top5) == 3


# skipping


@torch.no_grad()
def test_skipping_is_what_replacing_the_state_by_hand_gives():
    model, train, test = deep(), tokens(80, 8, 1), tokens(5, 8, 2)
    found = skip_map(
        model,
        train,
        test=test,
        pairs=[(1, 3), (2, 4)],
        map_types=("identity", "shift", "linear"),
        progress=False,
    )
    ids, target = test[:, :-1], test[:, 1:]
    _, clean = model.run_with_cache(ids)
    _, fitted = model.run_with_cache(train[:, :-1])
    points = {
        1: "blocks.1.hook_resid_pre",
        2: "blocks.2.hook_resid_pre",
        3: "blocks.3.hook_resid_pre",
        4: "blocks.3.hook_resid_post",
    }
    own = model(ids).log_softmax(-1)
    for a, b in ((1, 3), (2, 4)):
        for map_type in ("identity", "shift", "linear"):
            found_map = fit_map(fitted[points[a]][:, -1], fitted[points[b]][:, -1], map_type)

            def put(h: Tensor, hook: Any, a: int = a, m: Any = found_map) -> Tensor:
                return torch.cat([h[:, :-1], m(clean[points[a]][:, -1:])], dim=1)

            changed = model.run_with_hooks(ids, fwd_hooks=[(points[b], put)]).log_softmax(-1)[:, -1]
            kl = (own[:, -1].exp() * (own[:, -1] - changed)).sum(-1).mean()
            assert math.isclose(
                float(found.table(map_type)[a, b]), float(kl), rel_tol=1e-3, abs_tol=1e-5
            )
            more = (own[:, -1] - changed).gather(-1, target[:, -1:]).mean()
            assert math.isclose(
                float(found.table(map_type, "loss_increase")[a, b]),
                float(more),
                rel_tol=1e-3,
                abs_tol=1e-4,
            )
            top1 = (own[:, -1].argmax(-1) == changed.argmax(-1)).double().mean()
            assert math.isclose(
                float(found.table(map_type, "top1")[a, b]), float(top1), abs_tol=1e-6
            )


def test_the_skip_map_covers_every_pair(tmp_path):
    found = skip_map(deep(), tokens(40, 8, 1), pairs="all", progress=False)
    assert found.pairs() == [(a, b) for a in range(4) for b in range(a + 1, 5)]
    assert len(found.rows()) == 7 * 10
    assert found.train + found.test == 40
    mean = found.table("mean")
    assert float(mean[0, 3]) == float(mean[2, 3])  # the constant map does not depend on its start
    again = SkipMap.load(found.save(tmp_path / "skip.safetensors"))
    assert torch.equal(again.table("flow").nan_to_num(), found.table("flow").nan_to_num())
    with pytest.raises(
        GeometryError, match=r"pairs: expected states 0 <= a < b <= 4, got \[\(3, 3\)\]"
    ):
        skip_map(deep(), tokens(8, 8), pairs=[(3, 3)])
    assert any(
        "is near chance" in flag for flag in found.provenance.flags
    )  # random weights know no text
    one = skip_map(
        deep(), tokens(40, 8, 1), pairs=[(1, 3)], map_types="flow", progress=False
    )  # one name, not its letters
    assert one.pairs() == [(1, 3)]
    assert one.map_types == ("flow", "ridge", "identity")
    with pytest.raises(GeometryError, match="tokens: expected chunks of tokens, got Trajectories"):
        skip_map(deep(), ensemble())  # type: ignore[arg-type]


def test_a_block_that_does_nothing_can_be_skipped_for_nothing():
    block = deep().blocks[2].original_component
    kept = [
        (p, p.detach().clone())
        for n, p in block.named_parameters()
        if "c_proj" in n or "attn.o." in n
    ]
    try:
        with torch.no_grad():
            for p, _ in kept:
                p.zero_()
        kinds = ("identity", "mean", "linear")
        found = skip_map(deep(), tokens(40, 8, 1), pairs=[(2, 3)], map_types=kinds, progress=False)
    finally:
        with torch.no_grad():
            for p, old in kept:
                p.copy_(old)
    assert len(kept) == 4
    assert float(found.table("identity")[2, 3]) < 1e-6
    assert float(found.table("linear")[2, 3]) < 1e-6
    assert float(found.table("mean")[2, 3]) > 1e-2


# flow report, nulls, separability


def test_the_flow_report_has_a_row_for_every_pair(tmp_path):
    found = flow_report(ensemble())
    assert len(found.rows()) == 10
    assert len(found.columns()) == len(found.rows()[0])
    assert found.train + found.test == 60
    assert bool(
        (found.held_out["relative_error"] >= found.in_sample["relative_error"] - 0.05)[0, 1:].all()
    )
    inside = fit_map(ensemble().split()[0].X[:, 0], ensemble().split()[0].X[:, 1], "linear")
    assert inside.map_type == "linear"
    assert found.law().law == "asymptotic"
    normed = ensemble().split()[0].after_norm().residuals()
    for name in ("log_variance", "mean_over_sd", "relative_error"):
        want = layer_anomalies(getattr(normed, name), times=ensemble().times)
        torch.testing.assert_close(
            found.anomalies[f"{name}_post_norm"],
            torch.stack([want.excess, want.z]),
            equal_nan=True,
        )
    again = FlowReport.load(found.save(tmp_path / "flow.safetensors"))
    assert again.law("increment").rate == found.law("increment").rate


def test_held_out_residuals_have_no_p_value_of_sphericity() -> None:
    """The error of a fitted map joins the noise and is not isotropic: of exactly isotropic noise
    about a rotation, the test calls every held-out residual anisotropic."""
    g = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(12, 12, generator=g)).Q
    x = torch.randn(200, 12, generator=g)
    noise = torch.randn(200, 12, generator=g)
    X = torch.stack([x, x @ turn + noise], 1)
    given = Trajectories(X=X, states=(1, 2), position=-1, provenance=Provenance())
    train, test = given.split(0.5, seed=0)
    left = test.X[:, 1].double() - flow_map(train.aligned_bases(), 0, 1)(test.X[:, 0].double())
    assert isotropy_tests(left).sphericity_p < 1e-3
    assert isotropy_tests(noise).sphericity_p > 0.05, "the twin: the noise itself is isotropic"
    assert not [n for n in flow_report(given).isotropy if n.startswith("sphericity")]


def test_the_flow_report_counts_dropped_directions_and_takes_one_kind():
    X = ensemble().X.double().clone()
    X[:, 1, -2:] = 0
    found = flow_report(dataclasses.replace(ensemble(), X=X, post_norm=None), map_types="linear")
    assert "directions of 16 dropped: 2 from state 1" in found.provenance.flags
    assert tuple(found.baselines) == ("linear", "ridge", "identity")  # the last two always
    assert not any("dropped" in flag for flag in report().provenance.flags)


def test_methods_of_an_ensemble_agree_with_their_functions():
    found = ensemble()
    model = found.langevin(noise="increment")
    assert model.alpha * model.rate >= 0
    assert torch.allclose(model.times, torch.arange(5).double())
    assert found.aligned_bases() is found.aligned_bases()
    assert len(found.pick(torch.tensor([3, 1]))) == 2
    with pytest.raises(GeometryError, match=r"state: expected one of \(0, 1, 2, 3, 4\), got 7"):
        found.row(7)


def test_reinitialised_blocks_change_their_own_outputs_and_are_restored():
    model, ids = deep(), tokens(5, 8)
    before = trajectories(model, ids, progress=False)
    with reinitialized(model, [2, 3], seed=1) as view:
        inside = trajectories(view, ids, progress=False)
        assert view.name == "tiny-deep, blocks 2, 3 untrained (init)"
    assert torch.equal(inside.X[:, :2], before.X[:, :2])
    assert not torch.allclose(inside.X[:, 2:], before.X[:, 2:], atol=0.1)
    assert inside.provenance.fingerprint != before.provenance.fingerprint
    assert torch.equal(trajectories(model, ids, progress=False).X, before.X)

    def fail_inside() -> None:
        with reinitialized(model, how="shuffle"):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert torch.equal(trajectories(model, ids, progress=False).X, before.X)
    with (
        reinitialized(model) as view,
        pytest.raises(UnsupportedModelError, match="newly initialised"),
    ):
        skip_map(view, ids)


def test_an_untrained_model_and_gibberish_stand_apart_in_the_comparison():
    ids = tokens(40, 8, 1)
    with reinitialized(deep()) as view:
        null = trajectories(view, ids, progress=False)
    found = compare_ensembles(
        {"model": trajectories(deep(), ids, progress=False), "untrained": null}
    )
    frame = found.to_dataframe().set_index("ensemble")
    assert (
        frame.loc["untrained", "neighbours"] > frame.loc["model", "neighbours"] + 0.1
    )  # weights of 0.02 move the stream little
    assert frame.loc["untrained", "relative_error"] < frame.loc["model", "relative_error"]
    assert len(found.names) == 2


def test_classifiers_separate_what_is_separable_and_only_that():
    pytest.importorskip("sklearn", reason="needs the ml extra")
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(150, 5, generator=g), torch.randn(150, 5, generator=g)
    for classifier in ("svm", "perceptron"):
        same, apart = (
            separability(a, b, classifier=classifier),
            separability(a, b + 3, classifier=classifier),
        )
        assert abs(same.accuracy - 0.5) < 0.1
        assert apart.accuracy > 0.95
        assert abs(apart.shuffled - 0.5) < 0.1
        assert same.low < 0.5 < same.high or abs(same.accuracy - 0.5) < 0.06
        assert same.low <= same.accuracy <= same.high
    # Identical copies: whoever saw the twin of a test row in training with the other label does
    # worse than chance.
    wide = torch.randn(60, 200, generator=g)
    assert abs(separability(wide, wide.clone(), paired=True).accuracy - 0.5) < 0.1
    assert separability(wide, wide.clone(), paired=False).accuracy < 0.4
    with pytest.raises(
        GeometryError, match="classifier: expected one of 'svm', 'perceptron', got 'tree'"
    ):
        separability(a, b, classifier="tree")


def test_the_interval_of_accuracy_is_nadeau_and_bengios_and_no_wider():
    """The half-width from the splits' accuracies by numpy and scipy; without variance there is no
    interval (it was never below what counting test rows gives: 5 to 10 times too wide)."""
    pytest.importorskip("sklearn", reason="needs the ml extra")
    from scipy import stats

    values = torch.tensor([0.52, 0.6, 0.55, 0.49, 0.58]).double()
    spread = math.sqrt(np.var(values.numpy(), ddof=1) * (1 / 5 + 3 / 7))
    assert resampled_t_reach(values, 0.3) == pytest.approx(stats.t.ppf(0.975, 4) * spread)
    assert math.isnan(resampled_t_reach(torch.ones(5), 0.3))
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(60, 3, generator=g), torch.randn(60, 3, generator=g) + 0.7
    found = separability(a, b)
    assert 0.05 < found.high - found.low < 0.3
    assert (found.low + found.high) / 2 == pytest.approx(found.accuracy)
    apart = separability(a, b + 50)
    assert apart.accuracy == 1
    assert math.isnan(apart.low)


def test_separation_tables_have_a_row_per_state():
    pytest.importorskip("sklearn", reason="needs the ml extra")
    table = true_against_extrapolated(ensemble(), start=1, repeats=3)
    assert [r[0] for r in table.rows()] == ["1->2", "1->3", "1->4"]
    frame = table.to_dataframe()
    assert frame.comparison.tolist() == ["1->2", "1->3", "1->4"]
    assert frame.accuracy.tolist() == table.accuracy[:, 0].tolist()
    other = trajectories(
        deep(),
        torch.full((40, 10), 5) + torch.arange(40)[:, None] % 3,
        states=(0, 1, 2, 3, 4),
        progress=False,
    )
    apart = ensembles_apart(ensemble(), other, repeats=3)
    assert len(apart.rows()) == 5
    assert float(apart.accuracy[1, 0]) > 0.8
    assert abs(float(apart.accuracy[1, 3]) - 0.5) < 0.2  # shuffled labels


@pytest.mark.slow
def test_the_import_of_verbs_is_light_and_a_missing_extra_says_what_to_install():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "from tl_geometry.flow.separation import separability\n"
        "import torch\n"
        "assert 'matplotlib' not in sys.modules\n"
        "try:\n    separability(torch.zeros(20, 2), torch.zeros(20, 2))\n"
        "except Exception as e:\n    print(e)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    assert 'expected scikit-learn, got not installed. Use pip install "tl-geometry[ml]"' in out


@pytest.mark.slow
def test_a_record_of_another_kind_is_refused_by_name():
    code = (  # without the type checker of the tests, as users call it
        "import tl_geometry as tlg\nfrom tests.lib.models import tiny, tokens\n"
        "model, ids = tiny('bridge', 'gpt2'), tokens(6, 10)\n"
        "basis = tlg.decompose(model, ids, progress=False)\n"
        "calls = (lambda: tlg.truncation_kl(model, ids, basis), lambda: tlg.flow_report(basis))\n"
        "for call in calls:\n"
        "    try:\n        call()\n    except tlg.GeometryError as e:\n        print(e)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    rest = (
        "expected Trajectories, got PositionContext. Use tl_geometry.trajectories(model, tokens)."
    )
    assert out.splitlines() == [f"ensemble: {rest}"] * 2


# figures and published numbers


@cache
def report() -> FlowReport:
    return flow_report(ensemble())


@pytest.mark.slow
def test_every_figure_draws_saves_and_says_what_it_shows(tmp_path):
    from matplotlib.figure import Figure

    from tl_geometry.render import flow

    e = ensemble()
    train, _ = e.split()
    curve = truncation_kl(deep(), tokens(6, 10, 9), train, K=(1, 4), progress=False)
    skips = skip_map(deep(), tokens(24, 8), map_types=("flow", "mean"), progress=False)
    views = [
        flow.bundle_figure(e),
        flow.truncation_figure(curve),
        flow.residual_figure(report()),
        flow.baseline_figure(report()),
        flow.noise_figure(report()),
        flow.skip_figure(skips),
    ]
    for i, view in enumerate(views):
        assert view.caption
        assert view.save(tmp_path / f"{i}.png").stat().st_size > 2000
    axis = Figure().subplots()
    assert flow.noise_figure(report(), ax=axis).figure is axis.figure
    assert axis.lines
    shown: Any = flow.skip_figure(skips).figure.axes[0].images[0].get_array()
    assert np.allclose(np.asarray(shown)[0, 3], float(skips.table("flow", "loss_increase")[0, 4]))


def test_held_out_numbers_are_those_of_the_map_of_one_part_on_the_other():
    train, test = ensemble().split()
    flow = flow_map(train.aligned_bases(), 1, 3)
    for maps, part in ((report().in_sample, train), (report().held_out, test)):
        moved, true = flow(part.X[:, 1].double()), part.X[:, 3].double()
        expected = {
            **score_map(moved, true)._asdict(),
            "log_variance": residual_statistics(true - moved).log_variance,
        }
        assert {k: float(maps[k][1, 3]) for k in expected} == pytest.approx(expected)
    assert (
        float(report().held_out["relative_error"][1, 3])
        > float(report().in_sample["relative_error"][1, 3]) + 1e-3
    )
    assert float(report().isotropy["variance_cv"][1, 3]) == pytest.approx(
        isotropy_tests(test.X[:, 3].double() - flow(test.X[:, 1].double())).variance_cv
    )
    for map_type, table in report().baselines.items():
        moved = [
            fit_map(train.X[:, 1], train.X[:, 3], map_type)(part.X[:, 1].double())
            for part in (train, test)
        ]
        inside, outside = (
            score_map(m, part.X[:, 3]).relative_error for m, part in zip(moved, (train, test))
        )
        assert float(table[1, 3]) == pytest.approx(outside), map_type
        assert abs(inside - outside) > 1e-3, map_type


@pytest.mark.parametrize("rate", [1.0, -1.0])
def test_the_noise_of_the_flow_is_that_of_the_law_and_none_where_it_falls(rate):
    e = ensemble()
    e = dataclasses.replace(e, X=e.X.double() * torch.exp(rate * e.times.double())[:, None])
    model, law = e.langevin(), fit_noise_law(e.residuals().log_variance, times=e.times)
    assert law.rate * rate > 0
    if rate > 0:
        assert (model.alpha, model.rate) == (law.alpha, law.rate)
        assert not any("no noise" in flag for flag in model.provenance.flags)
    else:
        assert model.alpha == 0
        assert any("no noise" in flag for flag in model.provenance.flags)
        # increments that grow smaller with the layers are noise all the same
        model = e.langevin(noise="increment")
        law = fit_noise_law(e.residuals().log_variance, times=e.times, law="increment")
        assert law.rate < 0
        assert (model.alpha, model.rate) == (-law.alpha, law.rate)
        assert float(model.noise_integral(0.0, 1.0).min()) > 0
        assert not any("no noise" in flag for flag in model.provenance.flags)
