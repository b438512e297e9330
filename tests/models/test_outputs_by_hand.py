"""What is made of the output: softmax, heads, losses, distances and pilots; half precision that is
widened for a while; and the table of what a model gets."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny, tokens
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.models import check_model, view
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.next_token import (
    log_probabilities,
    next_token_loss,
    pilot_runs,
    require_output,
)
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.output_head import OutputHead, distances, next_token_losses
from tl_geometry.models.precision import can_widen, in_single, is_half, widened
from tl_geometry.models.softmax import masked_softmax, soft_cap
from tl_geometry.models.support import ModelReport


@pytest.fixture
def seen() -> ModelView:
    """A small model that no test leaves changed."""
    return view(tiny("bridge", "gpt2"))


# ---- softmax, output head


def test_a_softmax_over_the_keys_that_are_seen() -> None:
    """Rows sum to one over allowed keys, in half precision too; a row without keys is zero."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        found = masked_softmax(
            torch.tensor([[0.0, 9.0], [2.0, 2.0], [1.0, 1.0]], dtype=dtype),
            torch.tensor([[True, False], [True, True], [False, False]]),
        )
        assert found.tolist() == [[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]]
    assert soft_cap(torch.tensor([2.0]), 2.0).tolist() == [pytest.approx(2 * math.tanh(1))]
    assert soft_cap(torch.tensor([2.0]), None).tolist() == [2.0]


def test_logits_and_directions_of_an_output_head() -> None:
    """Norm, matrix, bias and cap in this order."""
    draw = torch.Generator().manual_seed(0)
    gain, bias, h = (torch.randn(3, generator=draw).double() for _ in range(3))
    W_U, b_U = torch.randn(3, 4, generator=draw).double(), torch.arange(4.0).double()
    head = OutputHead(NormWeights(norm_type="LN", gain=gain, bias=bias, eps=0.5), W_U, b_U, 2.0)
    centred = h - h.mean()
    normed = centred / (centred.square().mean() + 0.5).sqrt() * gain + bias
    expected = 2 * ((normed @ W_U + b_U) / 2).tanh()
    assert torch.allclose(head.logits(h), expected)
    rows = head.directions([3, 1])
    for row, token in zip(rows, (3, 1), strict=True):
        assert torch.allclose(row @ h, (centred * gain) @ W_U[:, token])
    assert torch.equal(head.directions()[[3, 1]], rows)


def test_distances_of_two_distributions_by_hand() -> None:
    """Both divergences, whether the first tokens agree, and how many of five are shared."""
    changed = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.08, 0.05, 0.02]).double()
    own = torch.tensor([0.2, 0.4, 0.02, 0.1, 0.08, 0.15, 0.05]).double()
    found = distances(changed.log(), own.log())
    kl = sum(float(p) * math.log(p / q) for p, q in zip(changed, own, strict=True))
    reverse = sum(float(q) * math.log(q / p) for p, q in zip(changed, own, strict=True))
    assert float(found.kl) == pytest.approx(kl)
    assert float(found.kl_reverse) == pytest.approx(reverse)
    assert (float(found.top1), float(found.top5)) == (0.0, 4.0)
    few = distances(changed[:3].log_softmax(-1), own[:3].log_softmax(-1))
    assert float(few.top5) == 3.0


def test_the_loss_of_a_token_is_that_of_the_position_before() -> None:
    """Two tokens after the first, in float32 whatever the logits are."""
    logits = torch.tensor([[[0.0, math.log(3)], [math.log(7), 0.0], [5.0, 5.0]]]).double()
    losses = next_token_losses(logits, torch.tensor([[0, 1, 0]]))
    assert losses.dtype == torch.float32
    assert losses.exp().tolist() == [[pytest.approx(4 / 3), pytest.approx(8 / 7)]]


# ---- half precision for a while


class Tiny(nn.Module):
    """A model with one half-precision weight, one wider, and settings that name a dtype."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2, dtype=dtype))
        self.b = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("c", torch.ones(2, dtype=torch.float16))
        self.register_buffer("n", torch.ones(2, dtype=torch.int64))
        self.cfg = SimpleNamespace(dtype=dtype)

    def dtypes(self) -> list[Any]:
        return [self.a.dtype, self.b.dtype, self.c.dtype, self.n.dtype, self.cfg.dtype]


def test_half_precision_is_widened_inside_the_block_alone() -> None:
    """Afterwards, also on an error, the very tensors are back."""
    model = Tiny()
    before, weight = model.dtypes(), model.a
    wide, whole = torch.float32, torch.int64
    with pytest.raises(KeyError), widened(model):
        assert model.dtypes() == [wide, torch.float64, wide, whole, wide]
        raise KeyError
    assert model.dtypes() == before
    assert model.a is weight


def test_a_model_that_cannot_run_in_float32_runs_in_its_own_precision() -> None:
    """What is said of the precision is what it ran in; other errors are not hidden."""
    model = Tiny()
    assert (is_half(model), is_half(Tiny(torch.float32))) == (True, False)
    assert in_single(model, lambda: model.a.dtype) == (torch.float32, torch.float32)

    def only_half() -> torch.dtype:
        if model.a.dtype == torch.float32:
            raise RuntimeError
        return model.a.dtype

    assert in_single(model, only_half) == (torch.bfloat16, torch.bfloat16)
    with pytest.raises(KeyError):
        in_single(model, lambda: {}["nothing"])
    wide = Tiny(torch.float32)
    assert in_single(wide, lambda: wide.a.dtype) == (torch.float32, torch.float32)
    assert can_widen(model)


# ---- the table of a model


def test_what_a_model_does_not_get_is_listed_apart() -> None:
    """Rows whose verdict begins with refused."""
    seen = view(tiny("bridge", "gpt2"))
    rows = (("a", "1", "refused: so"), ("b", "2", "supported"), ("c", "3", "not refused"))
    report = ModelReport(provenance=seen.provenance(), findings=rows)
    assert report.refused == (rows[0],)
    assert tuple(report.columns()) == ("property", "value", "verdict")
    assert tuple(report.rows()) == rows


def test_a_model_with_a_new_head_is_told_what_to_load() -> None:
    """The row of the output head, and the two rows about text and notes."""
    seen = dataclasses.replace(
        view(tiny("bridge", "gpt2")), head_trained=False, notes=("first", "second")
    )
    object.__setattr__(seen, "_refresh", lambda view: view)
    rows = {name: (value, verdict) for name, value, verdict in check_model(seen).findings}
    assert rows["output head"] == (
        "newly initialised",
        "refused for every output-based measure: load a checkpoint that has its output head",
    )
    assert [row for row in check_model(seen).findings if row[0] == "note"] == [
        ("note", "first", "reported"),
        ("note", "second", "reported"),
    ]


@pytest.mark.parametrize(
    ("sized", "text"), [(False, "holds within "), (True, "does not hold, off by up to 0.5 in")]
)
def test_the_additive_identity_is_judged_by_its_largest_gap(
    sized: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MLP whose hook shows half more than it adds breaks it, and the size of the gap is said."""
    seen = view(tiny("bridge", "gpt2"))
    real = type(seen).activations

    def shifted(self: Any, ids: Tensor, names: Any) -> dict[str, Tensor]:
        found = real(self, ids, names)
        return {n: x + 0.5 if sized and n.endswith("mlp_out") else x for n, x in found.items()}

    monkeypatch.setattr(type(seen), "activations", shifted)
    rows = {name: (value, verdict) for name, value, verdict in check_model(seen).findings}
    value, verdict = rows["additive identity"]
    assert (value.startswith(text), verdict) == (True, "reported")


def test_models_that_have_no_final_norm_say_so() -> None:
    """An encoder has no state behind a final norm, in words of both calls."""
    seen = view(tiny("bridge", "bert"))
    with pytest.raises(UnsupportedModelError) as error:
        seen.with_final_norm()
    assert str(error.value) == (
        f"{seen.name}: expected a decoder loaded as TransformerBridge for final_norm=True, "
        "got TransformerBridge. Use final_norm=False."
    )
    with pytest.raises(GeometryError) as refused:
        seen.after_final_norm(torch.zeros(1, 32))
    assert str(refused.value) == (
        f"post_norm: expected a decoder with a final norm, got TransformerBridge {seen.name}. "
        "Use post_norm=False."
    )


# ---- the output


def test_logits_of_one_position_are_those_of_all(seen: ModelView) -> None:
    """From either end; an encoder's too; the loss is the mean over prompts and tokens."""
    for other in (seen, view(tiny("bridge", "bert"))):
        logits = other.logits(tokens())
        for position in (-1, 0, 7):
            one = other.logits(tokens(), position=position)
            assert one.shape == (2, 1, 61)
            assert torch.allclose(one[:, 0], logits[:, position], atol=1e-5)
    ids, logits = tokens(3, 5), seen.logits(tokens(3, 5)).double().log_softmax(-1)
    losses = [-float(logits[b, i, ids[b, i + 1]]) for b in range(3) for i in range(4)]
    for rows in (1, 2, 8):
        assert next_token_loss(seen, ids, rows=rows) == pytest.approx(sum(losses) / 12, abs=1e-5)
    every, one = log_probabilities(seen, ids, {}, position=None), log_probabilities(seen, ids, {})
    assert (every.dtype, one.dtype) == (torch.float32, torch.float64)
    assert torch.allclose(every.double(), logits, atol=1e-5)
    assert torch.allclose(one, logits[:, -1], atol=1e-5)
    assert torch.allclose(log_probabilities(seen, ids, {}, position=1), logits[:, 1], atol=1e-5)


def test_measures_of_the_output_need_a_trained_decoder(seen: ModelView) -> None:
    """A new head and an encoder have a message each."""
    require_output(seen, "this")
    with pytest.raises(UnsupportedModelError) as error:
        require_output(dataclasses.replace(seen, head_trained=False), "this")
    assert str(error.value) == (
        "this: expected a model with a trained output head, got tiny-gpt2, whose head was newly "
        "initialised. Use the measures of states."
    )
    with pytest.raises(UnsupportedModelError) as error:
        require_output(dataclasses.replace(seen, causal=False), "this")
    assert str(error.value) == (
        "this: expected a causal language model, got tiny-gpt2, an encoder. "
        "Use the measures of states."
    )


def test_edited_copies_of_the_last_token_run_alone(seen: ModelView) -> None:
    """Each copy sees its own edit of the last position, in every run."""
    ids, name = tokens(2, 6), "blocks.0.hook_resid_pre"
    shift = torch.linspace(0, 3, 6)[:, None].expand(6, 32)

    def edit(h: Tensor) -> Tensor:
        h = h.clone()
        h[:, -1] += shift * torch.arange(32).sub(16).sign()
        return h

    runs = pilot_runs(seen, ids, log_probabilities(seen, ids, {}), 8)
    assert (runs.kept is not None, runs.positions) == (True, 1)
    expected = log_probabilities(seen, ids.repeat(3, 1), {name: edit})
    for _ in range(2):
        assert torch.allclose(runs.log_probabilities(3, {name: edit}), expected, atol=1e-4)
    point = seen._model.hook_dict["blocks.0.hook_mlp_out"]
    point.add_hook(lambda value, hook: None)
    try:
        hooked = pilot_runs(seen, ids, log_probabilities(seen, ids, {}), 8)
        assert (hooked.kept, hooked.positions, hooked.copies) == (None, 6, 4)
    finally:
        point.remove_hooks()


@pytest.mark.parametrize(
    ("architecture", "kind", "cap"),
    [("gpt2", "LN", None), ("llama", "RMS", None), ("gemma2", "RMS", 30.0), ("bert", None, None)],
)
def test_the_output_head_makes_the_models_logits(
    architecture: str, kind: str | None, cap: float | None
) -> None:
    """Norm, cap and matrix give the logits of the last state; an encoder has no such head."""
    seen = view(tiny("bridge", architecture))
    head = seen.output_head()
    if kind is None:
        assert head is None
        assert seen.final_norm() is None
        return
    assert head is not None
    assert (head.norm.norm_type, head.softcap) == (kind, cap)
    assert head.norm.gain.dtype == torch.float32
    last = seen.state_hooks[-1]
    state = seen.activations(tokens(), [last])[last]
    assert torch.allclose(head.logits(state), seen.logits(tokens()), atol=1e-4)


def test_hooks_act_where_one_position_is_asked_for(seen: ModelView) -> None:
    """The logits of one position of an edited pass are those of all its positions."""
    hooks = {"blocks.0.hook_resid_pre": lambda h: 2 * h}
    logits = seen.logits(tokens(), hooks)
    assert not torch.allclose(logits, seen.logits(tokens()), atol=1e-2)
    assert torch.allclose(seen.logits(tokens(), hooks, 7)[:, 0], logits[:, 7], atol=1e-5)


def test_a_view_behind_a_cache_runs_as_often_as_one_likes(seen: ModelView) -> None:
    """A pass leaves the kept keys and values as they were."""
    ids = tokens(2, 6)
    runs = pilot_runs(seen, ids, log_probabilities(seen, ids, {}), 8)
    assert runs.kept is not None
    twice, last = runs.kept.times(2), ids[:, -1:].repeat(2, 1)
    expected = seen.logits(ids.repeat(2, 1))[:, -1]
    for _ in range(3):
        assert torch.allclose(twice.logits(last)[:, -1], expected, atol=1e-4)
