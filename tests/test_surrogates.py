"""Surrogates of W_QK in a live model: the whole changes nothing, every part acts, hooks go away, planted structure carries the loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tl_geometry as tlg
from tests.tiny import HAS_HOOKED, tiny, tokens
from tl_geometry import weights
from tl_geometry.errors import GeometryError, UnsupportedModelError
from tl_geometry.interventions.live import score_of
from tl_geometry.interventions.surrogates import PARTS, replaced_scores, replacements, structured_part, surrogate, surrogate_effect
from tl_geometry.verbs.details import model_pattern
from tl_geometry.weights import Factors

MODELS = [("bridge", a) for a in ("gpt2", "opt", "bert", "bloom", "gpt-neo")] + (
    [("hooked", "gpt2"), ("hooked", "bert")] if HAS_HOOKED else []
)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def basis_of(model: Any) -> tlg.PositionContext:
    return tlg.decompose(model, tokens(24, 16), progress=False)


@pytest.mark.parametrize(("kind", "architecture"), MODELS)
def test_the_whole_changes_nothing_and_every_part_changes_the_logits(kind: str, architecture: str) -> None:
    model = tiny(kind, architecture)
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
    with surrogate(model, basis, ["L1H2"], part="none"):  # hooks survive TransformerLens's own clean-up
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
    own = score_of(s, [3])
    close(model_pattern(own, s, [3]), s.pattern[:, 3:4], 1e-5)
    edited = model_pattern(replaced_scores(s, own, new), s, [3])
    z = (s.h - s.h.mean(-1, keepdim=True)) / s.norm_scale[..., None]
    w, norm = view.weights(1), view.attention_norm(1)
    b_Q = w.b_Q[3] + norm.bias @ w.W_Q[3]
    W = new.left[0] @ new.right[0].mT + torch.diag(new.diagonal[0])
    scores = z.double() @ W @ z.double().mT + ((z * norm.gain) @ (w.W_K[3] @ b_Q) / 8**0.5)[:, None].double()
    expected = scores.masked_fill(~torch.ones(16, 16, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    close(edited[:, 0].double(), expected, 1e-4)


def test_parts_of_a_planted_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    V = torch.linalg.qr(torch.randn(30, 5, generator=generator, dtype=torch.float64)).Q
    L, d = torch.randn(3, 3, generator=generator, dtype=torch.float64), torch.randn(30, generator=generator, dtype=torch.float64)
    W = V[:, :3] @ L @ V[:, :3].mT + torch.diag(d)
    f = Factors(W[None], torch.eye(30, dtype=torch.float64)[None])

    def product(part: str) -> Tensor:
        found = structured_part(f, V, part, k=3)
        assert found is not None
        return found.left[0] @ found.right[0].mT

    close(product("structured"), W - torch.diag(d), 1e-8)
    assert structured_part(f, V, "diagonal", k=3) is None
    assert structured_part(f, V, "none", k=3) is None
    close(product("whole"), W)
    P = V[:, :3] @ V[:, :3].mT
    close(product("low_rank"), P @ W @ P)
    threshold = float(weights.structure(f, V, k=3).threshold)
    Q = weights.complete(V, torch.eye(30, dtype=torch.float64))
    rotated = Q.mT @ (W - torch.diag(W.diagonal())) @ Q
    close(product("thresholded"), Q @ torch.where(rotated.abs() > threshold, rotated, 0.0) @ Q.mT)
    assert int((rotated.abs() > threshold).sum()) > 0
    random = product("random")
    assert int(torch.linalg.matrix_rank(random)) == 3
    assert not torch.allclose(random, product("structured"), atol=0.1)
    close(random, product("random"))


def test_effect_is_a_table_and_the_random_control_costs_more_on_the_embedded_model(tmp_path: Any) -> None:
    from tl_geometry import zoo

    model = zoo.embedded()
    rows = zoo.default_windows(model, 64, n=16)
    basis = tlg.decompose(model, rows, progress=False)
    effect = surrogate_effect(model, rows[:8], basis, layers=0, parts=("structured", "random", "whole"))
    table = effect.to_dataframe()
    assert list(table["part"]) == ["model", "structured", "random", "whole"]
    change = dict(zip(table["part"], table["change"], strict=True))
    assert abs(change["whole"]) < 1e-4
    assert change["structured"] < change["random"]
    assert effect.moved.shape == (3, 4)
    assert float(effect.moved[2].max()) < 1e-4
    assert 0 < float(effect.moved[0].mean()) < float(effect.moved[1].mean())
    again = type(effect).load(effect.save(tmp_path / "e.safetensors"))
    close(again.loss, effect.loss)


def test_refusals() -> None:
    import dataclasses

    llama, bert, gpt2 = (tiny("bridge", a) for a in ("llama", "bert", "gpt2"))
    with (
        pytest.raises(UnsupportedModelError, match="surrogate: expected a model whose W_QK does not depend on the offset"),
        surrogate(llama, basis_of(llama)),
    ):
        pass
    with pytest.raises(UnsupportedModelError, match="surrogate_effect: expected a causal model"):
        surrogate_effect(bert, tokens(), basis_of(bert))
    untrained = dataclasses.replace(tlg.view(gpt2), head_trained=False)
    with pytest.raises(UnsupportedModelError, match="expected a model with a trained output head"):
        surrogate_effect(untrained, tokens(), basis_of(gpt2))
    with pytest.raises(GeometryError, match="part: expected one of 'structured'"), surrogate(gpt2, basis_of(gpt2), part="half"):
        pass


def test_moved_patterns_are_the_mean_over_all_prompts() -> None:
    model, rows = tiny("bridge", "gpt2"), tokens(11)
    basis = basis_of(model)
    whole, first, rest = (surrogate_effect(model, part, basis, parts="structured") for part in (rows, rows[:8], rows[8:]))
    assert whole.parts == ("structured",)
    close(whole.moved, (8 * first.moved + 3 * rest.moved) / 11, 1e-5)
    assert not torch.allclose(first.moved, rest.moved, atol=1e-3)
