"""How weights are read off a model of any class: names, grouped heads, absent biases, readings of
norms, and gradients. The models are plain objects, so that each case is written out."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_geometry import models
from tl_geometry.base.errors import GeometryError, UnsupportedModelError
from tl_geometry.models.attention_spec import QKNorm
from tl_geometry.models.norms import NormWeights
from tl_geometry.models.parameters import Parameters, inner, part, qk_norm_module, upcast

Space = SimpleNamespace


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def read(block: Any = None, class_name: str = "TransformerBridge", **model: Any) -> Parameters:
    settings = Space(eps=0.25, normalization_type="LN")
    given = {"cfg": settings, "blocks": [block]} | model
    return Parameters(Space(**given), class_name, "m")


def attention(dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """Four heads of three coordinates that share two heads of keys and values."""
    shapes = {"W_Q": (4, 5, 3), "W_K": (2, 5, 3), "W_V": (2, 5, 3), "W_O": (4, 3, 5)}
    matrices = {n: draw(*s, seed=i, dtype=dtype) for i, (n, s) in enumerate(shapes.items())}
    return Space(**(matrices | more))


# ---- attributes


class Awkward:
    """A model part whose properties raise, one error each."""

    def __init__(self, error: type[Exception]) -> None:
        self.error, self.empty, self.zero = error, None, 0

    @property
    def raising(self) -> Tensor:
        raise self.error("nothing here")


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, ValueError, KeyError])
def test_a_part_is_the_first_attribute_that_gives_something(error: type[Exception]) -> None:
    """Names that are absent, None or raise are passed over; zero counts as something."""
    owner = Awkward(error)
    assert part(owner, "absent", "empty", "raising", "zero", "error") == 0
    assert part(owner, "raising") is None
    assert part(owner, "empty", "absent") is None
    assert part(None, "weight") is None


def test_an_error_that_no_property_should_raise_is_not_hidden() -> None:
    """Any other exception of a property reaches the caller."""
    with pytest.raises(ZeroDivisionError):
        part(Awkward(ZeroDivisionError), "raising", "zero")


def test_the_module_inside_a_bridge_is_the_one_that_is_read() -> None:
    """A component gives the module that it wraps, and a module itself."""
    wrapped = object()
    assert inner(Space(original_component=wrapped)) is wrapped
    plain = Space(original_component=None)
    assert inner(plain) is plain


@pytest.mark.parametrize("which", ["q", "k"])
def test_norms_of_queries_and_keys_go_by_three_places(which: str) -> None:
    """The component's own norm comes first, then the module's, under either of its names."""
    mine, inside, older = object(), object(), object()
    norm, layernorm = f"{which}_norm", f"{which}_layernorm"
    module = Space(**{norm: inside, layernorm: older})
    assert qk_norm_module(Space(original_component=module, **{norm: mine}), which) is mine
    assert qk_norm_module(Space(original_component=module), which) is inside
    assert qk_norm_module(Space(original_component=Space(**{layernorm: older})), which) is older
    other = {"q": "k", "k": "q"}[which]
    assert qk_norm_module(Space(**{f"{other}_norm": mine}), which) is None


@pytest.mark.parametrize(
    ("dtype", "lifted"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_numbers_are_lifted_to_float32_at_least(dtype: torch.dtype, lifted: torch.dtype) -> None:
    """Float64 stays what it is; without detach the gradient passes."""
    value = nn.Parameter(draw(3, dtype=dtype))
    assert (upcast(value).dtype, upcast(value).requires_grad) == (lifted, False)
    kept = upcast(value, detach=False)
    assert (kept.dtype, kept.requires_grad) == (lifted, True)


# ---- heads


def test_heads_in_groups_get_the_keys_and_values_of_their_group() -> None:
    """Query heads 0 and 1 read keys 0, heads 2 and 3 keys 1; biases that are absent are zeros."""
    attn = attention(b_K=draw(2, 3, seed=9), b_V=None)
    weights = read(Space(attn=attn)).weights(0)
    for head in range(4):
        assert torch.equal(weights.W_K[head], attn.W_K[head // 2])
        assert torch.equal(weights.W_V[head], attn.W_V[head // 2])
        assert torch.equal(weights.b_K[head], attn.b_K[head // 2])
    assert torch.equal(weights.W_Q, attn.W_Q)
    assert torch.equal(weights.W_O, attn.W_O)
    zeros = {"b_Q": (4, 3), "b_V": (4, 3), "b_O": (5,)}
    for name, shape in zeros.items():
        assert getattr(weights, name).tolist() == torch.zeros(shape).tolist()


def test_biases_that_are_there_are_read() -> None:
    """All four biases are the module's own, in float32 where it is in half precision."""
    biases = {"b_Q": (4, 3), "b_K": (4, 3), "b_V": (4, 3), "b_O": (5,)}
    own = {n: draw(*s, seed=i + 4, dtype=torch.float16) for i, (n, s) in enumerate(biases.items())}
    weights = read(Space(attn=attention(torch.float16, **own))).weights(0)
    assert {n: getattr(weights, n).tolist() for n in own} == {
        n: b.float().tolist() for n, b in own.items()
    }
    assert {v.dtype for v in vars(weights).values()} == {torch.float32}


def test_gradients_reach_weights_only_where_they_are_asked_for() -> None:
    """With detach=False every weight and bias of a layer has a gradient."""
    attn = attention(b_O=draw(5), b_Q=draw(4, 3))
    for value in vars(attn).values():
        value.requires_grad_()
    reader = read(Space(attn=attn))
    assert not any(x.requires_grad for x in vars(reader.weights(0)).values())
    live = reader.weights(0, detach=False)
    found = {name for name, x in vars(live).items() if x.requires_grad}
    assert found == {"W_Q", "W_K", "W_V", "W_O", "b_Q", "b_O"}


@pytest.mark.parametrize("block", [Space(), Space(attn=None), Space(attn=Space(W_Q=None))])
def test_a_block_without_attention_is_refused_by_name(block: Any) -> None:
    """The message names the block, what was expected and what is not supported."""
    with pytest.raises(UnsupportedModelError) as error:
        read(block).attention(0)
    assert str(error.value) == (
        "block 0 of m: expected attention with W_Q and W_K, got none. "
        "Use another model (state-space and latent attention are not supported)."
    )


@pytest.mark.parametrize("name", ["W_Q", "W_O"])
def test_weights_without_a_head_axis_are_refused(name: str) -> None:
    """Queries and outputs must both have three axes; the message shows what W_Q has."""
    wrong: dict[str, Any] = {name: draw(5, 12)}
    attn = attention(**wrong)
    with pytest.raises(UnsupportedModelError) as error:
        read(Space(attn=attn)).weights(0)
    assert str(error.value).startswith("block 0 of m: expected W_Q [head d_model d_head], got ")
    assert ("[5, 12]" in str(error.value) or "(5, 12)" in str(error.value)) == (name == "W_Q")


def test_blocks_are_counted_from_zero() -> None:
    """A layer beyond the last block is refused."""
    with pytest.raises(GeometryError, match="layer: expected an index from 0 to 0, got 1"):
        read(Space(attn=attention())).weights(1)


# ---- norms


class Plain(nn.Module):
    """A norm with the given attributes, called neither LayerNorm nor RMSNorm."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        for name, value in values.items():
            setattr(self, name, value)


class TinyRMSNorm(Plain):
    """The same, with a telling name."""


LIKE = torch.zeros(2, 3, dtype=torch.float64)
GAIN, BIAS = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])


def readings(norm: Any, kind: str = "LN") -> list[tuple[Any, ...]]:
    reader = read(cfg=Space(eps=0.25, normalization_type=kind))
    found = list(reader.norm_candidates(norm, LIKE))
    assert {(n.gain.dtype, n.bias.dtype) for n in found} == {(torch.float64, torch.float64)}
    return [(n.norm_type, n.gain.tolist(), n.bias.tolist(), n.eps) for n in found]


NONE = (None, [1.0] * 3, [0.0] * 3, 0.0)


@pytest.mark.parametrize(
    ("kind", "module", "order"),
    [
        ("LN", Plain, ("LN", "RMS")),
        ("RMS", Plain, ("RMS", "LN")),
        ("RMSPre", Plain, ("RMS", "LN")),
        ("LN", TinyRMSNorm, ("RMS", "LN")),
    ],
)
def test_readings_of_a_norm_begin_with_the_likeliest(
    kind: str, module: type[Plain], order: tuple[str, str]
) -> None:
    """By the module's name or the settings first, then the other."""
    shifted = (GAIN.tolist(), (GAIN + 1).tolist())
    expected = [(t, g, BIAS.tolist(), 0.5) for t in order for g in shifted]
    assert readings(module(weight=GAIN, bias=BIAS, eps=0.5), kind) == [*expected, NONE]


def test_a_norm_that_says_less_gets_ones_zeros_and_the_models_eps() -> None:
    """Without weight, bias and eps a norm has gain one, bias zero and the settings' eps."""
    expected = [(t, [g] * 3, [0.0] * 3, 0.25) for t in ("LN", "RMS") for g in (1.0, 2.0)]
    assert readings(Plain()) == [*expected, NONE]
    assert readings(None) == [NONE]


@pytest.mark.parametrize("name", ["eps", "variance_epsilon", "layer_norm_epsilon"])
def test_eps_goes_by_three_names(name: str) -> None:
    """The module's own eps comes before that of the settings."""
    assert {row[3] for row in readings(Plain(**{name: 0.125}))[:-1]} == {0.125}


def test_a_hooked_norm_calls_its_gain_and_bias_w_and_b() -> None:
    """HookedTransformer's names are read as transformers' are."""
    assert readings(Plain(w=GAIN, b=BIAS))[0] == ("LN", GAIN.tolist(), BIAS.tolist(), 0.25)


def gradients(out: Tensor, source: Any) -> list[float]:
    weights = torch.arange(1.0, out.numel() + 1, dtype=out.dtype).reshape(out.shape)
    source.grad = None
    (out * weights).sum().backward()
    assert source.grad is not None
    return source.grad.tolist()


def test_gradients_reach_the_gain_and_bias_of_a_norm() -> None:
    """The numbers stay (a gain of one more too), and each element has its own gradient."""
    module = Plain(weight=nn.Parameter(GAIN.clone()), bias=nn.Parameter(BIAS.clone()))
    reader = read(Space(attn=attention(), ln1=module))
    norm = NormWeights(norm_type="RMS", gain=GAIN + 1, bias=BIAS, eps=0.5)
    live, qk = reader.with_gradients(0, norm, None)
    assert qk is None
    assert (live.gain.tolist(), live.bias.tolist()) == ((GAIN + 1).tolist(), BIAS.tolist())
    assert (live.norm_type, live.eps) == ("RMS", 0.5)
    assert gradients(live.gain, module.weight) == [1.0, 2.0, 3.0]
    assert gradients(live.bias, module.bias) == [1.0, 2.0, 3.0]
    none = NormWeights(norm_type=None, gain=GAIN, bias=BIAS, eps=0.0)
    assert reader.with_gradients(0, none, None)[0] is none


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_gradients_reach_gains_of_queries_and_keys(rows: int) -> None:
    """A gain's gradient is the sum over the heads that it is used in."""
    sources = {w: nn.Parameter(draw(rows * 3, seed=i)) for i, w in enumerate("qk")}
    attn = attention(q_norm=Plain(weight=sources["q"]), k_norm=Plain(weight=sources["k"]))
    gain = {
        w: torch.stack([s.detach().reshape(rows, 3)[h * rows // 4] for h in range(4)])
        for w, s in sources.items()
    }
    norm = QKNorm("RMS", rows > 1, gain["q"], gain["k"], 1e-5)
    no_norm = NormWeights(norm_type=None, gain=GAIN, bias=BIAS, eps=0.0)
    _, live = read(Space(attn=attn, ln1=None)).with_gradients(0, no_norm, norm)
    for w, out in (("q", live.gain_q), ("k", live.gain_k)):
        assert torch.equal(out, gain[w])
        expected = [0.0] * (rows * 3)
        for head in range(4):
            for e in range(3):
                expected[(head * rows // 4) * 3 + e] += head * 3 + e + 1
        assert gradients(out, sources[w]) == expected


def test_a_parameter_without_gradient_leaves_a_norm_as_it_is() -> None:
    """A frozen gain gives the very tensor that was there."""
    frozen = nn.Parameter(GAIN.clone(), requires_grad=False)
    norm = NormWeights(norm_type="LN", gain=GAIN, bias=BIAS, eps=0.5)
    reader = read(Space(attn=attention(), ln1=Plain(weight=frozen)))
    live, _ = reader.with_gradients(0, norm, None)
    assert live.gain is GAIN
    assert live.bias is BIAS


# ---- the unembedding


def test_the_bias_of_logits_is_read_where_each_class_keeps_it() -> None:
    """A bridge has it itself, the other classes in their unembedding; zeros where there is none."""
    W_U, mine, theirs = draw(3, 4).half(), draw(4, seed=1).half(), draw(4, seed=2).half()
    place = {"W_U": W_U, "b_U": mine, "unembed": Space(b_U=theirs)}
    bridge = read(**place)
    assert (bridge.bridge, bridge.unembed_bias().tolist()) == (True, mine.float().tolist())
    hooked = read(class_name="HookedTransformer", **place)
    assert (hooked.bridge, hooked.unembed_bias().tolist()) == (False, theirs.float().tolist())
    assert torch.equal(bridge.unembed(), W_U.float())
    for without in (read(W_U=W_U), read(class_name="HookedTransformer", W_U=W_U)):
        assert without.unembed_bias().tolist() == [0.0] * 4


# ---- records


def dataclasses_here() -> dict[str, type]:
    modules = [
        importlib.import_module(f"{models.__name__}.{entry.name}")
        for entry in pkgutil.iter_modules(models.__path__)
    ]
    return {
        f"{m.__name__.rsplit('.', 1)[1]}.{name}": kind
        for m in modules
        for name, kind in vars(m).items()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == m.__name__
    }


def test_records_that_hold_tensors_are_compared_by_identity() -> None:
    """A record of tensors equals itself alone and may be a key."""
    kinds = dataclasses_here()
    equal = {name for name, kind in kinds.items() if kind.__eq__ is not object.__eq__}
    assert equal == {"row_pass.Rows"}
    one, other = (read(Space(attn=attention())) for _ in range(2))
    other.model = one.model
    assert len({one, other, one}) == 2


FILLED_IN = {
    "forward.Runner",
    "layers.Layers",
    "live_edits.OpenEdit",
    "parameters.Parameters",
    "writers.HeadWrites",
}
"""Records that the library itself changes after they were made."""


def test_finished_records_are_frozen() -> None:
    """Nothing can be written into a record, but into those that are filled in during a pass."""

    def changeable(kind: type) -> bool:
        record = object.__new__(kind)
        try:
            record.anything = 1  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError:
            return False
        return True

    check: Callable[[type], bool] = changeable
    assert {name for name, kind in dataclasses_here().items() if check(kind)} == FILLED_IN
