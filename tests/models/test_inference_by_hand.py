"""What is inferred of an attention layer, piece by piece on plain objects: windows, caps, sinks,
candidates in their order, misfits; and rotary tables in each layout that a class keeps them in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tl_geometry.models.attention_spec import (
    AttentionSpec,
    QKNorm,
    rotary_tables,
    rotate,
    scores_of,
    turn_of,
)
from tl_geometry.models.infer import SpecInference, alibi_slopes
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import Parameters

Space = SimpleNamespace
EXACT, SINGLE, HALF = 2**-53, 2**-24, 2**-11
NORM = NormWeights(norm_type=None, gain=torch.ones(3), bias=torch.zeros(3), eps=0.0)
SPEC = AttentionSpec(norm=NORM)


def inference(attn: Any = None, *, bridge: bool = True, **more: Any) -> SpecInference:
    """An inference without a pass: four heads of two coordinates in layer 1."""
    made = SpecInference.__new__(SpecInference)
    cfg, config = more.pop("cfg", Space(eps=0.25)), more.pop("config", None)
    model = Space(cfg=cfg, **({} if config is None else {"original_model": Space(config=config)}))
    class_name = "TransformerBridge" if bridge else "HookedTransformer"
    made.parameters, made.layer = Parameters(model, class_name, "m"), 1
    made.attn, made.heads, made.d_head = attn or Space(), 4, 2
    made.h, made.length, made.scheme, made.roundoff = torch.zeros(1, 1, 3), 3, "", SINGLE
    vars(made).update(more)
    return made


# ---- settings

KINDS = ["full_attention", "sliding_attention"]
WINDOWS: dict[str, tuple[dict[str, Any], int | None]] = {
    "a hooked layer that is local": (
        {"attn": Space(attn_type="local"), "cfg": Space(window_size=7)},
        7,
    ),
    "a hooked layer that is global": (
        {"attn": Space(attn_type="global"), "cfg": Space(window_size=7)},
        None,
    ),
    "a layer of the kind that slides": (
        {"config": Space(layer_types=KINDS, sliding_window=7)},
        7,
    ),
    "a layer of the other kind": (
        {"config": Space(layer_types=KINDS[::-1], sliding_window=7)},
        None,
    ),
    "a window of the module": (
        {"attn": Space(sliding_window=5), "config": Space(sliding_window=7)},
        5,
    ),
    "a window of the settings": ({"config": Space(sliding_window=7)}, 7),
    "a window that is switched off": (
        {"config": Space(sliding_window=7, use_sliding_window=False)},
        None,
    ),
    "a window that is switched on": (
        {"config": Space(sliding_window=7, use_sliding_window=True)},
        7,
    ),
    "GPT-Neo's local layers": (
        {"attn": Space(attention_type="local"), "config": Space(window_size=7)},
        7,
    ),
    "GPT-Neo's global layers": (
        {"attn": Space(attention_type="global"), "config": Space(window_size=7)},
        None,
    ),
    "no window": ({"config": Space()}, None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_the_window_is_read_where_each_family_keeps_it(name: str) -> None:
    """By the layer's own kind where there are kinds, of the module before the settings."""
    given, expected = WINDOWS[name]
    assert inference(**given).window() == expected


@pytest.mark.parametrize(
    ("cap", "expected"), [(50.0, 50.0), (1e-3, 1e-3), (0.0, None), (-1.0, None), (None, None)]
)
def test_a_cap_is_a_positive_number(cap: float | None, expected: float | None) -> None:
    """A bridge's module or HookedTransformer's settings have it, each not the other's."""
    module, settings = Space(attn_logit_softcapping=cap), Space(attn_scores_soft_cap=cap)
    other = Space(attn_logit_softcapping=9.0), Space(attn_scores_soft_cap=9.0)
    assert inference(module, cfg=other[1]).softcap() == expected
    assert inference(other[0], cfg=settings, bridge=False).softcap() == expected


def test_sinks_are_one_number_for_each_head() -> None:
    """Read off the module inside, in float64 and flat; none where there are none."""
    module = Space(original_component=Space(sinks=torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    found = inference(module).sinks()
    assert found is not None
    assert (found.dtype, found.tolist()) == (torch.float64, [1.0, 2.0, 3.0, 4.0])
    assert inference(Space()).sinks() is None


@pytest.mark.parametrize(
    ("scheme", "adjacent", "styles"),
    [
        ("rotary", None, ["half", "adjacent", None]),
        ("rotary", False, ["half", "adjacent", None]),
        ("rotary", True, ["adjacent", "half", None]),
        ("standard", True, [None]),
        ("alibi", None, [None]),
    ],
)
def test_rotations_are_tried_as_the_settings_say(
    scheme: str, adjacent: bool | None, styles: list[str | None]
) -> None:
    """The declared pairing first, the other next, none last; models without rotation try none."""
    cfg = Space(eps=0.25) if adjacent is None else Space(eps=0.25, rotary_adjacent_pairs=adjacent)
    found = inference(cfg=cfg, scheme=scheme).options(SPEC)
    assert [(option.rotation, option.qk_norm) for option in found] == [(s, None) for s in styles]


@pytest.mark.parametrize(
    ("gain", "flat"),
    [
        (torch.tensor([1.0, 2.0]), False),
        (torch.arange(1.0, 5.0), True),
        (torch.arange(1.0, 9.0).reshape(4, 2), False),
    ],
)
def test_readings_of_a_norm_of_queries(gain: Tensor, flat: bool) -> None:
    """Without and with centring, each with the gain and one more."""
    attn = Space(q_norm=Space(weight=gain), k_norm=Space(weight=2 * gain, eps=9.0))
    *found, last = inference(attn).qk_norms()
    assert last is None
    kinds = [("RMS", 0.0), ("RMS", 1.0), ("LN", 0.0), ("LN", 1.0)]
    assert len(found) == len(kinds)
    rows = gain.reshape(-1, 2)
    for norm, (kind, shift) in zip(found, kinds, strict=True):
        assert norm is not None
        assert (norm.norm_type, norm.flat, norm.eps) == (kind, flat, 0.25)
        expected = torch.stack([rows[head * len(rows) // 4] for head in range(4)])
        assert norm.gain("q").tolist() == (expected + shift).tolist()
        assert norm.gain("k").tolist() == (2 * expected + shift).tolist()


def test_norms_of_queries_without_gains_have_ones() -> None:
    """The eps is that of the norm of queries; a norm of queries alone is no candidate."""
    norm = next(inference(Space(q_norm=Space(eps=0.5), k_norm=Space(eps=9.0))).qk_norms())
    assert norm is not None
    assert (norm.eps, norm.gain_q.tolist(), norm.flat) == (0.5, [[1.0, 1.0]] * 4, False)
    assert list(inference(Space(q_norm=Space(eps=0.5))).qk_norms()) == [None]


# ---- scales

CONTENT = torch.tensor([[[[1.0, 0.0, 0.0], [1.0, 3.0, 0.0], [2.0, 0.0, 7.0]]]]).double()
ALLOWED = torch.ones(3, 3).tril().bool()


def pattern_of(scores: Tensor) -> Tensor:
    return torch.where(ALLOWED, scores, -torch.inf).softmax(-1)


def scales(made: SpecInference, spec: AttentionSpec = SPEC, factor: float = 0.3) -> list[float]:
    found = made.scaled(spec, CONTENT, pattern_of(factor * CONTENT), ALLOWED)
    return [round(option.scale, 9) for option in found]


USUAL = round(2**-0.5, 9)


@pytest.mark.parametrize("name", ["scaling", "inv_norm_factor", "softmax_scale"])
def test_scales_that_multiply_come_first(name: str) -> None:
    """The module's factor, the usual one, one, and the fit to the pattern."""
    module = Space(original_component=Space(**{name: 0.7}))
    assert scales(inference(module)) == [0.7, USUAL, 1.0, 0.3]


@pytest.mark.parametrize(
    "attn",
    [
        Space(attn_scale=4.0),
        Space(original_component=Space(scale_attn=torch.tensor(4.0))),
        Space(original_component=Space(scale=4)),
    ],
)
def test_scales_that_divide_come_as_their_inverse(attn: Any) -> None:
    """A divisor of four is a factor of a quarter."""
    assert scales(inference(attn)) == [0.25, USUAL, 1.0, 0.3]


def test_scales_that_are_no_numbers_are_left_out() -> None:
    """Functions, zero and negative numbers are no scales; equal ones are tried once."""
    attn = Space(attn_scale=0.0, original_component=Space(scaling=-1.0, scale=print))
    assert scales(inference(attn)) == [USUAL, 1.0, 0.3]
    assert scales(inference(Space(attn_scale=1.0))) == [1.0, USUAL, 0.3]


def test_a_cap_or_a_bias_bends_the_fit_so_that_there_is_none() -> None:
    """Under a soft cap and ALiBi only the scales of the module are tried."""
    capped = AttentionSpec(norm=NORM, softcap=5.0)
    assert scales(inference(), capped) == [USUAL, 1.0]
    assert scales(inference(scheme="alibi")) == [USUAL, 1.0]


# ---- misfits


def misfit(spec: AttentionSpec, scores: Tensor | None, pattern: Tensor) -> float:
    return inference().misfit(spec, CONTENT, scores, pattern, ALLOWED)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_scores_are_compared_cell_by_cell(softcap: float | None) -> None:
    """The largest difference on allowed cells, after scale and cap; other cells do not count."""
    spec = AttentionSpec(norm=NORM, scale=0.5, softcap=softcap)
    scores = 0.5 * CONTENT if softcap is None else softcap * (0.5 * CONTENT / softcap).tanh()
    assert misfit(spec, scores, pattern_of(scores)) == pytest.approx(0, abs=1e-12)
    scores[..., 0, 2] = 99.0
    assert misfit(spec, scores, pattern_of(scores)) == pytest.approx(0, abs=1e-12)
    scores[..., 2, 0] -= 0.25
    assert misfit(spec, scores, pattern_of(scores)) == pytest.approx(0.25)


def test_patterns_are_compared_by_their_centred_logarithms() -> None:
    """Without scores a constant of a row makes no difference, a changed score its part of it."""
    spec, scores = AttentionSpec(norm=NORM, scale=0.5), 0.5 * CONTENT
    assert misfit(spec, None, pattern_of(scores + 5)) == pytest.approx(0, abs=1e-12)
    scores[..., 2, 0] += 0.3
    assert misfit(spec, None, pattern_of(scores)) == pytest.approx(0.2)


def test_a_measured_bias_must_be_one_for_all_sequences() -> None:
    """What two sequences disagree by is the misfit, whatever the bias is."""
    content = CONTENT.repeat(2, 1, 1, 1)
    spec = AttentionSpec(norm=NORM, scale=0.5, bias_form="measured")
    scores = 0.5 * content + torch.arange(9.0).reshape(3, 3)
    call = inference().misfit
    assert call(spec, content, scores, pattern_of(scores), ALLOWED) == pytest.approx(0, abs=1e-12)
    scores[1, 0, 2, 1] += 0.5
    scores[1, 0, 0, 2] += 9.0
    assert call(spec, content, scores, pattern_of(scores), ALLOWED) == pytest.approx(0.25)


def test_an_analytic_bias_is_part_of_the_scores() -> None:
    """With slopes the scores are products and bias."""
    slopes = torch.tensor([0.5], dtype=torch.float64)
    spec = AttentionSpec(norm=NORM, scale=0.5, bias_form="k-q", slopes=slopes)
    places = torch.arange(3.0)
    scores = 0.5 * CONTENT + 0.5 * (places - places[:, None])
    assert misfit(spec, scores, pattern_of(scores)) == pytest.approx(0, abs=1e-6)
    assert misfit(spec, 0.5 * CONTENT, pattern_of(scores)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("roundoff", "error", "single"),
    [
        (EXACT, 0.5e-12, False),
        (EXACT, 2e-12, True),
        (EXACT, 31 * SINGLE, True),
        (EXACT, 33 * SINGLE, False),
        (SINGLE, 31 * SINGLE, False),
        (HALF, 31 * SINGLE, False),
    ],
)
def test_float32_inside_float64_is_told_by_the_size_of_the_error(
    roundoff: float, error: float, single: bool
) -> None:
    """Above the bound of float64 and within that of float32, in a float64 model alone."""
    assert inference(roundoff=roundoff).is_single(error, 1.0) is single
    assert inference(roundoff=roundoff).is_single(2 * error, 2.0) is single


@pytest.mark.parametrize(
    ("heads", "powers"),
    [(1, [8]), (2, [4, 8]), (4, [2, 4, 6, 8]), (6, [2, 4, 6, 8, 1, 3]), (3, [4, 8, 2])],
)
def test_slopes_of_any_number_of_heads(heads: int, powers: list[int]) -> None:
    """Powers of two as Press et al. (2022) give them."""
    assert alibi_slopes(heads).tolist() == [2.0**-p for p in powers]


@pytest.mark.parametrize("form", ["k", "k-q", "k-last"])
def test_a_bias_is_found_by_its_form(form: str) -> None:
    """The usual slopes in each form are recognised; a bias that is no line is measured."""
    made = inference(heads=2, roundoff=SINGLE)
    allowed = torch.ones(3, 3).tril().bool()
    content = torch.zeros(2, 2, 3, 3).double()
    spec = AttentionSpec(norm=NORM, slopes=alibi_slopes(2), bias_form=form)
    bias = spec.bias(3)
    assert bias is not None
    found = made.with_bias(SPEC, content, 1.0, bias.expand(2, -1, -1, -1), allowed)
    assert found.bias_form == form
    assert found.slopes is not None
    assert torch.allclose(found.slopes, alibi_slopes(2))
    steep = made.with_bias(SPEC, content, 1.0, 3 * bias.expand(2, -1, -1, -1), allowed)
    assert steep.bias_form == form
    assert steep.slopes is not None
    assert torch.allclose(steep.slopes, 3 * alibi_slopes(2))
    bent = bias.square().expand(2, -1, -1, -1) + torch.tensor([[0.0, 1, 0], [2, 0, 1], [0, 5, 1]])
    assert made.with_bias(SPEC, content, 1.0, bent, allowed).bias_form == "measured"


# ---- rotary tables

ANGLES = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
COS, SIN = ANGLES.cos(), ANGLES.sin()


def twice(table: Tensor) -> Tensor:
    return table.repeat_interleave(2, -1)


def test_tables_are_read_in_each_layout() -> None:
    """HookedTransformer's, GPT-J's (sines first) and boot_native's, cut to the prompt."""
    places = {
        "hooked": (Space(rotary_cos=COS, rotary_sin=SIN), COS, SIN),
        "gptj": (Space(embed_positions=torch.cat([SIN, COS], 1)), twice(COS), twice(SIN)),
        "native": (Space(rotary=Space(cos_cached=COS, sin_cached=SIN)), COS, SIN),
    }
    for name, (module, cos, sin) in places.items():
        attn = module if name == "hooked" else Space(original_component=module)
        found = rotary_tables(attn, 3)
        assert found[0] is not None
        assert found[1] is not None
        assert (found[0].tolist(), found[1].tolist()) == (cos[:3].tolist(), sin[:3].tolist())
    assert rotary_tables(Space(), 3) == (None, None)


def turned(style: str | None, memo: dict[Any, Any], cos: Tensor, sin: Tensor) -> Any:
    block = Space(attn=Space(W_Q=1))
    reader = Parameters(Space(blocks=[block, block]), "TransformerBridge", "m")
    cached = {"blocks.1.attn.hook_cos": cos, "blocks.1.attn.hook_sin": sin}
    return turn_of(reader, 1, cached, cos.shape[-2], style, memo)


@pytest.mark.parametrize(
    ("style", "wide"),
    [("half", lambda t: torch.cat([t, t], -1)), ("adjacent", twice)],
)
def test_tables_of_a_pass_have_a_column_for_each_coordinate(style: str, wide: Any) -> None:
    """Angles that come once are repeated as the pairing has them."""
    for cos, sin in (
        (COS, SIN),
        (wide(COS), wide(SIN)),
        (COS.expand(2, 5, 2), SIN.expand(2, 5, 2)),
    ):
        memo: dict[Any, Any] = {}
        found = turned(style, memo, cos, sin)
        assert torch.equal(found[0], wide(COS))
        assert torch.equal(found[1], wide(SIN))
        assert memo == {("twice", 1): cos.shape[-1] == 4}
    single: dict[Any, Any] = {}
    assert turned(style, single, COS[:1], SIN[:1]) is not None
    assert single == {}
    late = turned(style, {("twice", 1): True}, COS[3:4], SIN[3:4])
    assert torch.equal(late[0], wide(COS[3:4]))
    assert turned(None, {}, COS, SIN) is None


@pytest.mark.parametrize(
    ("style", "pairs"), [("half", [(0, 2), (1, 3)]), ("adjacent", [(0, 1), (2, 3)])]
)
def test_a_rotation_turns_each_pair_by_its_angle(style: str, pairs: list[tuple[int, int]]) -> None:
    """(a, b) becomes (a cos - b sin, b cos + a sin); what lies beyond the tables stays."""
    x = torch.randn(5, 1, 6, generator=torch.Generator().manual_seed(0)).double()
    wide = (lambda t: torch.cat([t, t], -1)) if style == "half" else twice
    found = rotate(x, wide(COS).double(), wide(SIN).double(), style)
    assert torch.equal(found[..., 4:], x[..., 4:])
    for i in range(5):
        for m, (a, b) in enumerate(pairs):
            c, s = float(COS[i, m]), float(SIN[i, m])
            first, second = float(x[i, 0, a]), float(x[i, 0, b])
            assert float(found[i, 0, a]) == pytest.approx(first * c - second * s)
            assert float(found[i, 0, b]) == pytest.approx(second * c + first * s)


def test_scores_are_scaled_products_of_each_head() -> None:
    """Query i of head h with key j of the same head."""
    q, k = (torch.randn(1, n, 2, 3, generator=torch.Generator().manual_seed(n)) for n in (2, 4))
    scores = scores_of(q, k, 0.5)
    assert scores.shape == (1, 2, 2, 4)
    assert float(scores[0, 1, 0, 3]) == pytest.approx(0.5 * float(q[0, 0, 1] @ k[0, 3, 1]))


def test_the_scale_of_a_norm_of_queries_is_for_each_head_or_for_all() -> None:
    """sqrt(mean(x^2) + eps) over a head, or over all heads of a token."""
    x = torch.tensor([[[3.0, 4.0], [0.0, 0.0]]])
    ones = torch.ones(2, 2)
    each = QKNorm("RMS", False, ones, ones, 0.5).scale(x)
    assert each.tolist() == [[pytest.approx(13**0.5), pytest.approx(0.5**0.5)]]
    every = QKNorm("RMS", True, ones, ones, 0.5).scale(x)
    assert every.tolist() == [[pytest.approx(6.75**0.5)] * 2]
    assert QKNorm("LN", False, ones, ones, 0.0).centre(x)[0, 0].tolist() == [-0.5, 0.5]
    assert QKNorm("LN", True, ones, ones, 0.0).centre(x)[0, 0].tolist() == [1.25, 2.25]
