"""Edits of a live model beside other people's hooks: always those of the stream that was read, or
refused by their cause."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interventions.bases import basis_of, rows_of
from tests.lib.models import HAS_HOOKED, hf_model, tiny, tiny_hooked, tokens
from tests.modified import modified
from tl_geometry import decompose
from tl_geometry.base.errors import GeometryError, ReconstructionError, UnsupportedModelError
from tl_geometry.interventions.causal import necessity_sufficiency
from tl_geometry.interventions.stream import project_stream
from tl_geometry.interventions.terms import keep_term, mean_term, remove_term
from tl_geometry.models import from_hf, view
from tl_geometry.scores.split import split_scores

MODEL_CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]
BY_HAND = [
    (model_class, architecture)
    for model_class in MODEL_CLASSES
    for architecture in ("gpt2", "llama", "bloom")
]
CLEAN, CORRUPTED = tokens(2, 5, seed=8), tokens(2, 5, seed=9)
TERMS = [("cvec", "cvec"), ("pos", "cvec")]
NAMES = ["cvec-cvec", "pos-cvec"]
LONG = tokens(3, 14, seed=4)


def logits(model: Any, ids: Tensor = CORRUPTED, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, return_type="logits", **options).clone()


def by_hand(
    model_class: str, architecture: str, heads: dict[int, tuple[int, ...]]
) -> AbstractContextManager[Any]:
    """The model without TERMS at heads by layer, edited in its own code."""
    model, basis, stack = (
        tiny(model_class, architecture),
        basis_of(model_class, architecture),
        ExitStack(),
    )
    for layer, some in heads.items():
        stack.enter_context(
            modified(model, layer, basis, some, TERMS, rotary=architecture == "llama")
        )
    return stack


EDITED = {0: (1,), 1: (0, 2)}
PAIRS = [(layer, head) for layer, heads in EDITED.items() for head in heads]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-4 * float(b.abs().max()), rtol=0)


# -------------------------------------------------------------------------------------------
# activation patching inside an edit


def patches(name: str, source: Tensor) -> Callable[..., Tensor]:
    """A hook that puts a clean activation in at one position, as a new tensor."""

    def hook(value: Tensor, hook: Any) -> Tensor:
        out = value.clone()
        out[:, 2] = source[:, 2]
        return out

    return hook


PATCHED = [
    "hook_resid_pre",
    "hook_attn_out",
    "hook_mlp_out",
    "attn.hook_v",
    "attn.hook_z",
    "attn.hook_pattern",
    "attn.hook_attn_scores",
]


@pytest.mark.parametrize(("case", "point"), rows_of(BY_HAND, PATCHED))
def test_a_patched_activation_is_what_the_edit_sees(case: tuple[str, str], point: str) -> None:
    """Hooks of a user before our context, in it, and by run_with_hooks, against the model edited by
    hand."""
    model_class, architecture = case
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    seen = view(model)
    with by_hand(model_class, architecture, EDITED):
        _, cached = model.run_with_cache(CLEAN)
    for layer in (0, 1):
        name = f"blocks.{layer}.{point}"
        hooks = [(name, patches(name, cached[name]))]
        with by_hand(model_class, architecture, EDITED), torch.no_grad():
            right = model.run_with_hooks(CORRUPTED, fwd_hooks=hooks)
            unpatched = logits(model)
        with torch.no_grad():
            assert not close(model.run_with_hooks(CORRUPTED, fwd_hooks=hooks), right), (
                "the edit matters under this patch"
            )
            with remove_term(model, basis, NAMES, PAIRS):
                found = [model.run_with_hooks(CORRUPTED, fwd_hooks=hooks)]
                with model.hooks(fwd_hooks=hooks):
                    found.append(logits(model))
            with model.hooks(fwd_hooks=hooks), remove_term(seen, basis, NAMES, PAIRS):
                found.append(logits(model))
        assert not close(unpatched, right), "the patch matters"
        for value in found:
            assert close(value, right), (name, float((value - right).abs().max()))


def metric(out: Tensor) -> Tensor:
    return out[0, -1, 5] - out[0, -1, 7] + 0.3 * out[1, 2, 9]


PATCHING = [
    "resid_pre",
    "resid_mid",
    "attn_out",
    "mlp_out",
    "attn_head_out_all_pos",
    "attn_head_out_by_pos",
    "attn_head_v_all_pos",
]
PATCHING += [
    "attn_head_v_by_pos",
    "attn_head_pattern_all_pos",
    "attn_head_pattern_by_pos",
    "attn_head_pattern_dest_src_pos",
]


@pytest.mark.slow
@pytest.mark.parametrize(("model_class", "name"), rows_of(MODEL_CLASSES, PATCHING, times=1))
def test_patching_of_transformer_lens_inside_an_edit(model_class: str, name: str) -> None:
    from transformer_lens import patching

    model, basis = tiny(model_class, "gpt2"), basis_of(model_class, "gpt2")
    length = 5 if name.endswith("all_pos") else 3  # a forward pass for each cell of each pattern
    corrupted, clean = CORRUPTED[:, :length], CLEAN[:, :length]
    run = partial(
        getattr(patching, f"get_act_patch_{name}"), model, corrupted, patching_metric=metric
    )
    _, cached = model.run_with_cache(clean)
    with torch.no_grad():
        plain = run(clean_cache=cached)
        with by_hand(model_class, "gpt2", EDITED):
            right = run(clean_cache=cached)
        with remove_term(model, basis, NAMES, PAIRS):
            found = run(clean_cache=cached)
    span = float(right.max() - right.min())
    assert span > 0.1
    assert (found - right).abs().max() < 1e-3 * span
    assert (plain - right).abs().max() > 0.1 * span


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_the_sweep_of_blocks_inside_an_edit(model_class: str) -> None:
    from transformer_lens import patching

    model, basis = tiny(model_class, "gpt2"), basis_of(model_class, "gpt2")
    _, cached = model.run_with_cache(CLEAN)
    with torch.no_grad():
        with by_hand(model_class, "gpt2", EDITED):
            right = patching.get_act_patch_block_every(model, CORRUPTED, cached, metric)
        with remove_term(model, basis, NAMES, PAIRS):
            found = patching.get_act_patch_block_every(model, CORRUPTED, cached, metric)
    assert right.shape == (3, 2, 5)
    assert (found - right).abs().max() < 1e-3 * float(right.max() - right.min())


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize(("model_class", "architecture"), BY_HAND)
def test_patched_queries_and_keys(model_class: str, architecture: str, side: str) -> None:
    """Of heads that are not edited they are taken; of an edited head no split is known, and the
    message names the hook."""
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    _, cached = model.run_with_cache(CLEAN)
    name, head = f"blocks.1.attn.hook_{side}", 1

    def other_head(value: Tensor, hook: Any) -> Tensor:
        out = value.clone()
        out[:, :, head] = cached[name][:, :, head].view_as(out[:, :, head])
        return out

    group = 4 // cached[name].shape[2]
    mine = {1: tuple(h for h in range(4) if h // group != head)[:2]}
    with torch.no_grad():
        with by_hand(model_class, architecture, mine):
            right = model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, other_head)])
        with remove_term(model, basis, NAMES, [(1, h) for h in mine[1]]):
            assert close(model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, other_head)]), right)
        word = {"q": "queries", "k": "keys"}[side]
        text = rf"{word} of layer 1 of tiny-{architecture}: expected what the layer makes of .* "
        text += "with hooks at"
        with (
            pytest.raises(ReconstructionError, match=text),
            remove_term(model, basis, NAMES, "L1H1" if group == 1 else "L1H3"),
        ):
            model.run_with_hooks(CORRUPTED, fwd_hooks=[(name, other_head)])


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_keys_of_large_products_that_cancel(model_class: str) -> None:
    """Coordinates of the stream that dwarf the others round by their own size; keys that are off by
    more than that are refused, be it a hundred-thousandth of it."""
    hf = copy.deepcopy(hf_model("llama", torch.float32))
    block = hf.model.layers[0]
    with torch.no_grad():
        hf.model.embed_tokens.weight[:, :2] = 30.0
        block.input_layernorm.weight[:2] = 1.0
        width = hf.config.hidden_size // hf.config.num_attention_heads
        q, k = (
            p.weight.unflatten(0, (-1, width))
            for p in (block.self_attn.q_proj, block.self_attn.k_proj)
        )
        k[:, :: width // 2, 0], k[:, :: width // 2, 1] = 500.0, -500.0
        q[:, :: width // 2] *= 1e-4  # so that scores are as exact as ever
    model = from_hf(hf, None, model_class=model_class, name="cancelling")
    basis = decompose(model, tokens(batch=16, length=18, seed=2), progress=False)
    layer = view(model).layer(0, model.run_with_cache(CORRUPTED)[1])
    size = float(layer.sizes("k").max())
    assert float(layer.k.abs().max()) < size / 30

    def moved(value: Tensor, hook: Any) -> Tensor:
        return value + 1e-5 * size

    with torch.no_grad(), remove_term(model, basis, NAMES, "L0H1"):
        assert bool(torch.isfinite(model(CORRUPTED, return_type="logits")).all())
        with pytest.raises(ReconstructionError, match="keys of layer 0"):
            model.run_with_hooks(CORRUPTED, fwd_hooks=[("blocks.0.attn.hook_k", moved)])


@pytest.mark.parametrize("architecture", ["gemma2", "gpt-oss", "opt", "gptj", "gpt-neo", "bert"])
def test_a_patched_stream_in_every_kind_of_attention(architecture: str) -> None:
    """z of the edited layer against the split of the patched, unedited pass: soft caps, sinks, and
    attention that only z reaches."""
    model, basis = tiny("bridge", architecture), basis_of("bridge", architecture)
    seen = view(model)
    _, clean = model.run_with_cache(tokens(3, 14, seed=5))
    hooks = [("blocks.1.hook_resid_pre", patches("", clean["blocks.1.hook_resid_pre"]))]
    names = seen.layer_hooks(1)
    found: dict[str, Tensor] = {}
    keep = [(n, lambda v, hook, n=n: found.__setitem__(n, v.detach().clone())) for n in names]
    with torch.no_grad():
        model.run_with_hooks(LONG, fwd_hooks=[*hooks, *keep])
        split = split_scores(seen, LONG, basis, layers=[1], cache=Patched(seen, found, LONG))
        scores = split.total() - split.terms["cvec", "cvec"] - split.terms["pos", "cvec"]
        v = found["blocks.1.attn.hook_v"]
        v = v.unflatten(-1, (-1, 8)) if v.dim() == 3 else v
        v = v.repeat_interleave(4 // v.shape[2], 2)
        right = torch.einsum("bhij,bjhe->bihe", pattern_of(split, scores), v)
        plain = torch.einsum("bhij,bjhe->bihe", split.pattern(), v)
        with remove_term(model, basis, NAMES, [(1, h) for h in range(4)]):
            model.run_with_hooks(LONG, fwd_hooks=[*hooks, *keep])
    z = found["blocks.1.attn.hook_z"].reshape(right.shape)
    assert close(z, right)
    assert not torch.allclose(plain, right, atol=0.05 * float(right.abs().max()))


class Patched(dict[str, Tensor]):
    """A cache of one layer of a patched pass, with the embeddings of the tokens that it says it is
    of."""

    def __init__(self, seen: Any, found: dict[str, Tensor], ids: Tensor) -> None:
        super().__init__(found)
        seen.run(ids, {seen.state_hooks[0]: lambda h: self.__setitem__(seen.state_hooks[0], h)})


def pattern_of(split: Any, scores: Tensor) -> Tensor:
    cap, sinks = (
        split.softcap[:, None, None],
        split.sinks[:, None, None].expand(*scores.shape[:-1], 1),
    )
    capped = scores if torch.isinf(cap).all() else cap * torch.tanh(scores / cap)
    return torch.cat([capped.masked_fill(~split.allowed, -torch.inf), sinks], -1).softmax(-1)[
        ..., :-1
    ]


# -------------------------------------------------------------------------------------------------
# contexts and their order


@pytest.mark.parametrize(
    ("model_class", "architecture"), [*BY_HAND, ("bridge", "opt"), ("bridge", "bert")]
)
def test_contexts_nest_in_any_order_and_leave_the_model_as_it_was(
    model_class: str, architecture: str
) -> None:
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    before = logits(model)
    carried = hooks_of(model)
    with remove_term(model, basis, NAMES, ["L0H0", "L1H1", "L1H3"]):
        together = logits(model)
    for order in ((0, 1, 2), (2, 0, 1)):
        opened = [remove_term(view(model), basis, NAMES, h) for h in ("L1H3", "L0H0", "L1H1")]
        for edit in opened:
            edit.__enter__()
        assert close(logits(model), together)
        for i in order:  # not the reverse of the order in which they were opened
            opened[i].__exit__(None, None, None)
        assert hooks_of(model) == carried
        assert torch.equal(logits(model), before)


def hooks_of(model: Any) -> int:
    modules = list(model.modules())
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules) + sum(
        len(p.fwd_hooks) for p in model.hook_dict.values()
    )


def test_a_projection_is_what_the_edit_sees_in_either_order() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge", "gpt2")
    seen = view(model)
    with project_stream(model, basis, 1, "pos"), by_hand("bridge", "gpt2", {1: (0, 2)}):
        right = logits(model)
    with remove_term(model, basis, NAMES, ["L1H0", "L1H2"]), project_stream(seen, basis, 1, "pos"):
        assert close(logits(model), right)
    with project_stream(model, basis, 1, "pos"), remove_term(seen, basis, NAMES, ["L1H0", "L1H2"]):
        assert close(logits(model), right)


def test_a_head_is_free_again_after_its_edit() -> None:
    model, basis = tiny("bridge", "gpt2"), basis_of("bridge", "gpt2")
    for _ in range(2):
        with remove_term(model, basis, NAMES, "L0H0"):
            logits(model)
    with (
        remove_term(model, basis, NAMES, "L0H0"),
        remove_term(model, basis, NAMES, "L0H1"),
        keep_term(model, basis, NAMES, "L1H0"),
    ):
        logits(model)
        with (
            pytest.raises(GeometryError, match="got L0H1, edited already"),
            mean_term(model, basis, NAMES, ["L0H3", "L0H1"]),
        ):
            pass
        with remove_term(model, basis, NAMES, "L0H3"):
            logits(model)


# -------------------------------------------------------------------------------------------------
# what later hooks see


# -------------------------------------------------------------------------------------------------
# gradients


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
@pytest.mark.parametrize("change", [remove_term, keep_term, mean_term])
def test_gradients_are_those_of_finite_differences(model_class: str, change: Any) -> None:
    """Through every path: the stream, the norm's scale, queries and keys, in two edited layers."""
    model, basis = (
        tiny(model_class, "gpt2", dtype=torch.float64),
        basis_of(model_class, "gpt2", dtype=torch.float64),
    )
    generator = torch.Generator().manual_seed(3)
    at = torch.randn(2, 5, 32, generator=generator, dtype=torch.float64)
    direction = torch.randn(2, 5, 32, generator=generator, dtype=torch.float64)

    def loss(step: Tensor) -> Tensor:
        hooks = [("blocks.0.hook_resid_pre", lambda h, hook: h + 0.3 * at + step * direction)]
        return metric(model.run_with_hooks(CORRUPTED, fwd_hooks=hooks))

    def slope() -> tuple[float, float]:
        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(step), step)
        with torch.no_grad():
            eps = torch.tensor(1e-5, dtype=torch.float64)
            return float(gradient), float((loss(eps) - loss(-eps)) / (2 * eps))

    plain, _ = slope()
    with change(model, basis, NAMES):
        gradient, finite = slope()
    assert gradient == pytest.approx(finite, rel=1e-6, abs=1e-8)
    assert abs(gradient - plain) > 1e-3, "the edit matters for the gradient"


@pytest.mark.parametrize(
    ("model_class", "architecture"),
    [*BY_HAND, ("bridge", "gemma2"), ("bridge", "qwen3"), ("bridge", "opt"), ("bridge", "gptj")],
)
def test_gradients_in_every_kind_of_attention(model_class: str, architecture: str) -> None:
    """Attribution patching: the gradient at a stream and at an activation before it, against
    differences in the running model."""
    model, basis = (
        tiny(model_class, architecture, dtype=torch.float64),
        basis_of(model_class, architecture, dtype=torch.float64),
    )
    direction = torch.randn(
        2, 5, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )

    def loss(step: Tensor) -> Tensor:
        return metric(
            model.run_with_hooks(
                CORRUPTED,
                fwd_hooks=[("blocks.1.hook_resid_pre", lambda h, hook: h + step * direction)],
            )
        )

    def slope() -> tuple[float, float]:
        step = torch.zeros((), dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss(step), step)
        with torch.no_grad():
            eps = torch.tensor(1e-2 if architecture != "gpt2" else 1e-5, dtype=torch.float64)
            five = [
                loss(i * eps) for i in (-2, -1, 1, 2)
            ]  # a wide stencil: some layers compute in float32
            return float(gradient), float(
                (five[0] - 8 * five[1] + 8 * five[2] - five[3]) / (12 * eps)
            )

    plain, _ = slope()
    with remove_term(model, basis, NAMES, [(1, h) for h in range(4)]):
        gradient, finite = slope()
    assert gradient == pytest.approx(finite, rel=2e-3, abs=1e-5)
    assert abs(gradient - plain) > 20 * abs(gradient - finite) + 1e-4


@pytest.mark.parametrize(
    ("model_class", "architecture"), [(k, a) for k in MODEL_CLASSES for a in ("gpt2", "llama")]
)
def test_gradients_reach_weights(model_class: str, architecture: str) -> None:
    """Also through the projections of the removed term: against the gradient of the model edited by
    hand."""
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    chosen = [p for n, p in model.named_parameters() if p.requires_grad]

    def gradients() -> list[Tensor | None]:
        return list(torch.autograd.grad(metric(model(CORRUPTED)), chosen, allow_unused=True))

    with by_hand(model_class, architecture, EDITED):
        right = gradients()
    with remove_term(model, basis, NAMES, PAIRS):
        found = gradients()
    size = max(float(g.abs().max()) for g in right if g is not None)
    compared = [(a, b) for a, b in zip(found, right, strict=True) if b is not None]
    assert len(compared) > 10
    for a, b in compared:
        assert a is not None
        assert (a - b).abs().max() < 1e-3 * size


# -------------------------------------------------------------------------------------------------
# refusals, each by its cause


@contextmanager
def refused(
    cause: str,
    error: type[GeometryError] = GeometryError,
    model_class: str = "bridge",
    architecture: str = "gpt2",
) -> Iterator[Any]:
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    before, carried = logits(model), hooks_of(model)
    with pytest.raises(error, match=cause), remove_term(model, basis, NAMES, PAIRS):
        yield model
    assert hooks_of(model) == carried
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("model_class", "architecture"), [*BY_HAND, ("bridge", "opt")])
def test_padding_is_refused(model_class: str, architecture: str, rows: int) -> None:
    """Left padding of every row too, and of a batch of one: there all rows have one mask, and
    positions are shifted."""
    mask = torch.ones(rows, 5, dtype=torch.int64)
    with refused(
        "expected no padding: .* got zeros in attention_mask",
        model_class=model_class,
        architecture=architecture,
    ) as model:
        logits(model, CORRUPTED[:rows], attention_mask=mask.index_fill(1, torch.tensor([0, 1]), 0))
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    with remove_term(model, basis, NAMES, PAIRS):
        assert close(
            logits(model, CORRUPTED[:rows], attention_mask=mask), logits(model, CORRUPTED[:rows])
        )


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
def test_the_mask_that_hooked_transformer_makes_itself_is_refused() -> None:
    from tests.models.test_adapter import small_tokenizer

    model = from_hf(hf_model("gpt2"), small_tokenizer(), model_class="hooked", name="padding")
    basis = decompose(model, tokens(batch=16, length=18, seed=2), progress=False)
    model.tokenizer.padding_side, pad = "left", model.tokenizer.pad_token_id
    ids = CORRUPTED[:1].clone()
    ids[:, :2] = pad
    with (
        pytest.raises(GeometryError, match="expected no padding"),
        remove_term(model, basis, NAMES, PAIRS),
    ):
        logits(model, ids)
    with remove_term(model, basis, NAMES, PAIRS):
        logits(model, ids, attention_mask=torch.ones_like(ids))


def test_custom_masks_and_positions_are_refused() -> None:
    with refused("position_ids") as model:
        model(CORRUPTED, position_ids=torch.arange(3, 8).expand(2, -1))
    ragged = torch.full((2, 1, 5, 5), 0.0).masked_fill(
        ~torch.ones(5, 5).tril().bool(), torch.finfo(torch.float32).min
    )
    ragged[0, 0, 3, 1] = torch.finfo(torch.float32).min
    with refused(
        "mask of layer 0 of tiny-gpt2: expected one mask for all prompts", ReconstructionError
    ) as model:
        model(CORRUPTED, attention_mask=ragged)


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_autocast_is_refused(model_class: str) -> None:
    with (
        refused(
            "expected the model's own dtype, got torch.autocast", model_class=model_class
        ) as model,
        torch.autocast("cpu", torch.bfloat16),
    ):
        logits(model)


@pytest.mark.parametrize(
    ("model_class", "architecture"),
    [*((k, "gpt2") for k in MODEL_CLASSES), ("bridge", "llama"), ("bridge", "gptj")],
)
def test_bfloat16_models_are_edited(model_class: str, architecture: str) -> None:
    model = tiny(model_class, architecture, dtype=torch.bfloat16)
    basis = basis_of(model_class, architecture, dtype=torch.bfloat16)
    with remove_term(model, basis, NAMES, PAIRS):
        found = logits(model).float()
    with remove_term(
        tiny(model_class, architecture), basis_of(model_class, architecture), NAMES, PAIRS
    ):
        right = logits(tiny(model_class, architecture))
    plain = logits(tiny(model_class, architecture))
    assert (found - right).norm() < 0.35 * (plain - right).norm()


def test_training_mode_is_named() -> None:
    model = from_hf(hf_model("llama"), None, name="dropout")
    basis = decompose(model, tokens(batch=16, length=18, seed=2), progress=False)
    seen = view(model)
    model.train()
    for block in model.blocks:
        block.attn.original_component.attention_dropout = 0.5
    with (
        pytest.raises(
            ReconstructionError, match=r"pattern of layer 0 of dropout: .*Use model.eval\(\)"
        ),
        remove_term(seen, basis, NAMES),
    ):
        logits(model)


def test_weights_that_change_inside_an_edit_are_noticed() -> None:
    model = from_hf(hf_model("gpt2"), None, name="trained")
    basis = decompose(model, tokens(batch=16, length=18, seed=2), progress=False)
    with (
        pytest.raises(GeometryError, match="weights that it was made for"),
        torch.no_grad(),
        remove_term(model, basis, NAMES, PAIRS),
    ):
        model.blocks[0].ln1.original_component.weight.mul_(1.5)
        with pytest.raises(
            ReconstructionError, match="weights that stay the same while the edit is open"
        ):
            logits(model)


# -------------------------------------------------------------------------------------------------
# BOS


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_prompts_without_the_bos_of_the_basis_are_refused(model_class: str) -> None:
    model = tiny(model_class, "gpt2")
    seen = dataclasses.replace(view(model), bos_id=0)
    rows = tokens(batch=16, length=18, seed=2)
    rows[:, 0] = 0
    basis = decompose(seen, rows, progress=False)
    assert basis.provenance.has_bos
    text = "tokens: expected has_bos=True, as in the basis, got has_bos=False"
    with pytest.raises(GeometryError, match=text), remove_term(seen, basis, NAMES):
        logits(model)
    with remove_term(seen, basis, NAMES) as edit:
        logits(model, rows[:2, :6])
        assert edit.flags == []
        logits(model, rows[:2, :6].index_fill(1, torch.tensor([1]), 0))
        assert edit.flags == ["prompts that begin with two BOS tokens"]
        if model_class == "hooked":  # a pass that begins in the middle embeds no tokens
            _, cached = model.run_with_cache(rows[:2, :6])
            model(cached["blocks.1.hook_resid_pre"], start_at_layer=1)
    without = dataclasses.replace(
        basis, provenance=dataclasses.replace(basis.provenance, has_bos=False)
    )
    with pytest.raises(GeometryError, match="got has_bos=True"), remove_term(seen, without, NAMES):
        logits(model, rows[:2, :6])


# -------------------------------------------------------------------------------------------------
# generation


@pytest.mark.parametrize(
    ("model_class", "architecture"), [(k, a) for k in MODEL_CLASSES for a in ("gpt2", "llama")]
)
def test_generation(model_class: str, architecture: str) -> None:
    model, basis = tiny(model_class, architecture), basis_of(model_class, architecture)
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": False,
        "stop_at_eos": False,
        "verbose": False,
        "return_type": "tokens",
    }
    prompts = tokens(6, 5, seed=9)
    with by_hand(model_class, architecture, EDITED):
        right = model.generate(prompts, use_past_kv_cache=False, **options)
    plain = model.generate(prompts, use_past_kv_cache=False, **options)
    assert not torch.equal(plain, right)
    text = "expected whole prompts, got tokens after 5 others .* "
    text += r"Use generate\(\.\.\., use_past_kv_cache=False\)"
    with remove_term(model, basis, NAMES, PAIRS):
        assert torch.equal(model.generate(prompts, use_past_kv_cache=False, **options), right)
        with pytest.raises(GeometryError, match=text):
            model.generate(prompts, use_past_kv_cache=True, **options)


# -------------------------------------------------------------------------------------------------
# Shortformer


# -------------------------------------------------------------------------------------------------
# output heads


@pytest.mark.skipif(not HAS_HOOKED, reason="TransformerLens 4 has no HookedTransformer")
@pytest.mark.parametrize("outputs", [7, 90])
def test_another_output_vocabulary_is_refused(outputs: int) -> None:
    model = tiny_hooked(normalization_type="LN", d_vocab_out=outputs)
    basis = decompose(model, tokens(batch=16, length=18, seed=2), progress=False)
    with pytest.raises(
        UnsupportedModelError, match=rf"expected one output for each of 61 tokens, got {outputs}"
    ):
        necessity_sufficiency(model, LONG, basis, "L0H0", "content", progress=False)
