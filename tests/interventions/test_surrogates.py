"""Surrogates of W_QK in a live model: the whole changes nothing, every part acts, hooks go away,
planted structure carries the loss."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import HAS_HOOKED, tiny, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.interventions import effects
from tl_geometry.interventions.offsets import OffsetReplacement, offset_diagonals
from tl_geometry.interventions.surrogates import (
    PARTS,
    Replacement,
    offset_parts,
    part_of,
    replaced_scores,
    replacements,
    surrogate,
    surrogate_effect,
)
from tl_geometry.models.live_edits import score_of
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.output_head import next_token_losses
from tl_geometry.weights import bilinear
from tl_geometry.weights.bilinear import Factors

MODELS = [("bridge", a) for a in ("gpt2", "opt", "bert", "bloom", "gpt-neo")] + (
    [("hooked", "gpt2"), ("hooked", "bert")] if HAS_HOOKED else []
)


def test_no_batch_holds_a_single_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A swap takes its term from another prompt of the batch."""
    plain, prompts = effects.log_probabilities, []

    def counted(seen: ModelView, ids: Tensor, *given: Any, **options: Any) -> Tensor:
        prompts.append(len(ids))
        return plain(seen, ids, *given, **options)

    monkeypatch.setattr(effects, "log_probabilities", counted)
    monkeypatch.setattr(effects, "output_batch", lambda *_, **__: 1)
    model, ids = tiny("bridge", "gpt2"), tokens(batch=5, length=8)
    every = torch.ones_like(ids, dtype=torch.bool)
    losses, _ = effects.measure_effects(tlg.view(model), ids, [nullcontext], counted=every)
    assert prompts == [3, 2]
    close(losses[0].float(), next_token_losses(model(ids).detach(), ids).mean(1), 1e-5)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@cache
def basis_of(model: Any) -> tlg.PositionContext:
    return tlg.decompose(model, tokens(24, 16), progress=False)


@pytest.mark.parametrize(("model_class", "architecture"), MODELS)
def test_the_whole_changes_nothing_and_every_part_changes_the_logits(
    model_class: str, architecture: str
) -> None:
    model = tiny(model_class, architecture)
    view, basis = tlg.view(model), basis_of(model)
    clean = view.run(tokens(), {}, logits=True)
    assert clean is not None
    for part in PARTS:
        with surrogate(model, basis, part=part):
            edited = view.run(tokens(), {}, logits=True)
        assert edited is not None
        change = float((edited - clean).abs().max())
        assert (change < 1e-4) == (part == "whole"), (part, change)
    again = view.run(tokens(), {}, logits=True)
    assert again is not None
    assert torch.equal(again, clean)


def test_only_the_chosen_heads_change_and_hooks_are_removed_on_errors() -> None:
    model = tiny("bridge", "gpt2")
    view, basis, found = tlg.view(model), basis_of(model), {}
    name = "blocks.1.attn.hook_z"
    before = sum(len(p.fwd_hooks) for p in model.hook_dict.values())
    view.run(tokens(), {name: lambda v: found.__setitem__("clean", v)})
    with surrogate(model, basis, ["L1H2"], part="none"):
        view.run(tokens(), {name: lambda v: found.__setitem__("edited", v)})
    changed = (found["clean"] - found["edited"]).abs().amax((0, 1, 3)) > 1e-6
    assert changed.tolist() == [False, False, True, False]
    with surrogate(
        model, basis, ["L1H2"], part="none"
    ):  # hooks survive TransformerLens's own clean-up
        _, cache = model.run_with_cache(tokens())
        again = model(tokens(), return_type="logits")
    close(cache[name], found["edited"])
    assert not torch.allclose(again, model(tokens(), return_type="logits"), atol=1e-3)
    with pytest.raises(RuntimeError, match="stop here"), surrogate(model, basis, "L0H0"):
        raise RuntimeError("stop here")
    assert sum(len(p.fwd_hooks) for p in model.hook_dict.values()) == before


def test_new_patterns_by_hand() -> None:
    """Scores with W replaced: bias terms of the queries stay, as does the mask."""
    model = tiny("bridge", "gpt2")
    view, basis, seen = tlg.view(model), basis_of(model), {}
    view.run_layers(tokens(), [1], lambda s: seen.__setitem__(1, s))
    s = seen[1]
    new = replacements(view, basis, [(1, 3)], "structured")[1]
    assert isinstance(new, Replacement)
    own = score_of(s, [3])
    close(s.pattern_of(own, [3]), s.pattern[:, 3:4], 1e-5)
    edited = s.pattern_of(replaced_scores(s, own, new), [3])
    z = (s.h - s.h.mean(-1, keepdim=True)) / s.norm_scale[..., None]
    w, norm = view.weights(1), view.attention_norm(1)
    b_Q = w.b_Q[3] + norm.bias @ w.W_Q[3]
    W = new.left[0] @ new.right[0].mT + torch.diag(new.diagonal[0])
    scores = (
        z.double() @ W @ z.double().mT
        + ((z * norm.gain) @ (w.W_K[3] @ b_Q) / 8**0.5)[:, None].double()
    )
    expected = scores.masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf).softmax(
        -1
    )
    close(edited[:, 0].double(), expected, 1e-4)


def test_parts_of_a_planted_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    V = torch.linalg.qr(torch.randn(30, 5, generator=generator, dtype=torch.float64)).Q
    L, d = (
        torch.randn(3, 3, generator=generator, dtype=torch.float64),
        torch.randn(30, generator=generator, dtype=torch.float64),
    )
    W = V[:, :3] @ L @ V[:, :3].mT + torch.diag(d)
    f = Factors(W[None], torch.eye(30, dtype=torch.float64)[None])

    def product(part: str) -> Tensor:
        found, _ = part_of(f, V, part, k=3)
        return found.left[0] @ found.right[0].mT

    close(product("structured"), W - torch.diag(d), 1e-8)
    assert not product("diagonal").any()
    assert not product("none").any()
    close(product("whole"), W)
    P = V[:, :3] @ V[:, :3].mT
    close(product("low_rank"), P @ W @ P)
    threshold = float(bilinear.structure(f, V, k=3).threshold)
    Q = bilinear.complete(V, torch.eye(30, dtype=torch.float64))
    rotated = Q.mT @ (W - torch.diag(W.diagonal())) @ Q
    close(product("thresholded"), Q @ torch.where(rotated.abs() > threshold, rotated, 0.0) @ Q.mT)
    assert int((rotated.abs() > threshold).sum()) > 0
    random = product("random")
    assert int(torch.linalg.matrix_rank(random)) == 3
    assert not torch.allclose(random, product("structured"), atol=0.1)
    close(random, product("random"))


def test_effect_is_a_table_and_the_random_control_costs_more_on_the_embedded_model(
    tmp_path: Any,
) -> None:
    from tl_geometry import zoo

    model = zoo.embedded()
    rows = zoo.default_windows(model, 64, n=16)
    basis = tlg.decompose(model, rows, progress=False)
    effect = surrogate_effect(
        model, rows[:8], basis, layers=0, parts=("structured", "random", "whole")
    )
    table = effect.to_dataframe()
    assert list(table["part"]) == ["model", "structured", "random", "whole"]
    change = dict(zip(table["part"], table["change"], strict=True))
    assert abs(change["whole"]) < 1e-4
    assert change["structured"] < change["random"]
    assert effect.moved.shape == (3, 4)
    assert float(effect.moved[2].max()) < 1e-4
    assert 0 < float(effect.moved[0].mean()) < float(effect.moved[1].mean())
    assert len(replacements(tlg.view(model), basis, [(0, 1)], "low_rank", rank=60)) == 1
    with pytest.raises(GeometryError, match="rank: expected 1 to 60 directions, got 61"):
        replacements(tlg.view(model), basis, [(0, 1)], "low_rank", rank=61)
    again = type(effect).load(effect.save(tmp_path / "e.safetensors"))
    close(again.loss, effect.loss)


def test_refusals() -> None:
    import dataclasses

    llama, bert, gpt2 = (tiny("bridge", a) for a in ("llama", "bert", "gpt2"))
    asked = "part 'thresholded': expected a part of a W_QK that is one matrix for all offsets, "
    asked += "got rotary .*Use one of 'structured'"
    with (
        pytest.raises(UnsupportedModelError, match=asked),
        surrogate(llama, basis_of(llama), part="thresholded"),
    ):
        pass
    with pytest.raises(UnsupportedModelError, match="part 'thresholded'"):
        surrogate_effect(llama, tokens(), basis_of(llama), parts=("none", "thresholded"))
    with pytest.raises(GeometryError, match="part: expected one of 'structured'"):
        surrogate_effect(llama, tokens(), basis_of(llama), parts=("half",))
    with pytest.raises(GeometryError, match=r"parts: expected some of structured.*got none"):
        surrogate_effect(llama, tokens(), basis_of(llama), parts=())
    for rank in (0, -1, 33):
        with pytest.raises(GeometryError, match=f"rank: expected 1 to 32 directions, got {rank}"):
            surrogate_effect(gpt2, tokens(), basis_of(gpt2), rank=rank)
    with pytest.raises(
        UnsupportedModelError, match="surrogate_effect: expected a causal language model"
    ):
        surrogate_effect(bert, tokens(), basis_of(bert))
    untrained = dataclasses.replace(tlg.view(gpt2), head_trained=False)
    with pytest.raises(UnsupportedModelError, match="expected a model with a trained output head"):
        surrogate_effect(untrained, tokens(), basis_of(gpt2))
    with (
        pytest.raises(GeometryError, match="part: expected one of 'structured'"),
        surrogate(gpt2, basis_of(gpt2), part="half"),
    ):
        pass


def test_moved_patterns_are_the_mean_over_all_prompts() -> None:
    model, rows = tiny("bridge", "gpt2"), tokens(11)
    basis = basis_of(model)
    whole, first, rest = (
        surrogate_effect(model, part, basis, parts="structured")
        for part in (rows, rows[:8], rows[8:])
    )
    assert whole.parts == ("structured",)
    close(whole.moved, (8 * first.moved + 3 * rest.moved) / 11, 1e-5)
    assert not torch.allclose(first.moved, rest.moved, atol=1e-3)


# rotary models: another W_QK at every offset

ROTARY = [
    ("bridge", a)
    for a in ("llama", "neox", "gptj", "qwen3", "gemma3", "phi", "olmo2", "llama3-rope")
]
ROTARY += [("hooked", "llama"), ("hooked", "gptj")] if HAS_HOOKED else []


@pytest.mark.parametrize(("model_class", "architecture"), ROTARY)
def test_in_rotary_models_the_whole_changes_nothing_and_every_part_does(
    model_class: str, architecture: str
) -> None:
    model = tiny(model_class, architecture)
    view, basis = tlg.view(model), basis_of(model)
    clean = view.run(tokens(), {}, logits=True)
    assert clean is not None
    assert offset_parts(view) == ("structured", "low_rank", "diagonal", "random", "none")
    for part in (*offset_parts(view), "whole"):
        with surrogate(model, basis, part=part, rank=4):
            edited = view.run(tokens(), {}, logits=True)
        assert edited is not None
        change = float((edited - clean).abs().max())
        assert (change < 1e-4) == (part == "whole"), (part, change)
    again = view.run(tokens(), {}, logits=True)
    assert again is not None
    assert torch.equal(again, clean)


def turned(angle: Tensor, x: Tensor) -> Tensor:
    """Rotation of the pairs (e, e + half) of every row by an angle of its own, as complex
    numbers."""
    a, b = x.chunk(2, dim=-1)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], dim=-1)


def dense_rotary(model: Any, layer: int, head: int, offset: int) -> Tensor:
    """W_D of a head of the tiny Llama or Gemma from its Hugging Face weights, 10000^(-e / half)
    radians per position. Gemma's gain is one more than its weight, its score scale its own."""
    block, config = model.original_model.model.layers[layer], model.original_model.config
    gain = block.input_layernorm.weight.detach().double() + (config.model_type == "gemma2")
    q, k = (getattr(block.self_attn, f"{n}_proj").weight.detach().double() * gain for n in "qk")
    q, k = q[8 * head : 8 * head + 8].mT, k[8 * (head // 2) : 8 * (head // 2) + 8].mT
    angle = offset * 10000.0 ** (-torch.arange(4).double() / 4)
    return turned(angle, q) @ k.mT / getattr(config, "query_pre_attn_scalar", 8) ** 0.5


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_every_offset_gets_its_own_least_squares_fit(architecture: str) -> None:
    """Brute force: for each cell the dense W_D, its best V L V^T + diag by a general solver,
    applied to the normalised stream."""
    model = tiny("bridge", architecture)
    view, basis, kept = tlg.view(model), basis_of(model), {}
    ids = tokens(2, 7)
    view.run_layers(ids, [1], lambda s: kept.__setitem__(1, s))
    seen, heads, k = kept[1], [(1, 1), (1, 2)], 3
    own = score_of(seen, [1, 2])
    x = (seen.h / seen.norm_scale[..., None]).double()
    V = bilinear.leading_directions(basis.pos[basis.index(1)], 60)[0][:, :k]
    design = [torch.outer(V[:, a], V[:, b]).flatten() for a in range(k) for b in range(k)]
    design += [torch.diag(torch.eye(32, dtype=torch.float64)[e]).flatten() for e in range(32)]
    made = {
        p: replaced_scores(seen, own, replacements(view, basis, heads, p, rank=k)[1])
        for p in ("structured", "low_rank", "diagonal")
    }
    for n, (_, head) in enumerate(heads):
        for i, j in ((0, 0), (3, 3), (4, 1), (6, 5), (6, 0)):
            W = dense_rotary(model, 1, head, i - j)
            close(torch.einsum("bd,de,be->b", x[:, i], W, x[:, j]), own[:, n, i, j].double(), 1e-3)
            best = torch.linalg.lstsq(torch.stack(design, 1), W.flatten()[:, None]).solution[:, 0]
            fitted = V @ best[: k * k].view(k, k) @ V.mT + torch.diag(best[k * k :])
            P = V @ V.mT
            for part, dense in (
                ("structured", fitted),
                ("low_rank", P @ W @ P),
                ("diagonal", torch.diag(W.diagonal())),
            ):
                expected = torch.einsum("bd,de,be->b", x[:, i], dense, x[:, j])
                close(made[part][:, n, i, j].double(), expected, 1e-4)
    other = dense_rotary(model, 1, 1, 0)  # the twin: one matrix for all offsets is another thing
    assert not torch.allclose(
        torch.einsum("bd,de,be->b", x[:, 6], other, x[:, 0]), own[:, 0, 6, 0].double(), atol=1e-2
    )


def test_diagonals_of_keys_ahead_are_those_of_the_transposed_matrix() -> None:
    """W_D at D < 0: exchanging the roles of query and key at D and -D gives the same diagonal."""
    model, kept = tiny("bridge", "llama"), {}
    tlg.view(model).run_layers(tokens(1, 6), [0], lambda s: kept.__setitem__(0, s))
    ahead = offset_diagonals(kept[0], [0, 3], None, ahead=True)
    behind = offset_diagonals(kept[0], [0, 3], None)
    for n, head in enumerate((0, 3)):
        for offset in (0, 2, 5):
            close(behind[offset, n], dense_rotary(model, 0, head, offset).diagonal(), 1e-5)
            close(ahead[offset, n], dense_rotary(model, 0, head, -offset).diagonal(), 1e-5)
    assert not torch.allclose(ahead[2], behind[2], atol=1e-3)


def test_offset_fits_are_kept_for_a_length_and_the_effect_leaves_out_what_has_no_meaning() -> None:
    model = tiny("bridge", "llama")
    basis = basis_of(model)
    effect = surrogate_effect(model, tokens(11), basis, ["L0H1", "L1H3"], rank=4)
    assert effect.parts == ("structured", "low_rank", "diagonal", "random", "none")
    assert effect.moved.shape == (5, 2)
    assert bool((effect.moved > 1e-3).all())
    whole = surrogate_effect(model, tokens(11), basis, parts="whole")
    assert float(whole.moved.max()) < 1e-4
    new = replacements(tlg.view(model), basis, [(0, 1)], "structured", rank=4)[0]
    assert isinstance(new, OffsetReplacement)
    kept: dict[int, Any] = {}
    for length in (5, 8, 5):
        tlg.view(model).run_layers(tokens(1, length), [0], lambda s: kept.__setitem__(0, s))
        new.product(kept[0])
    assert sorted(new.diagonals) == [(5, False), (8, False)]
