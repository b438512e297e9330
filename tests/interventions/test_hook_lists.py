"""An edit as a list of hooks for ``run_with_hooks`` is the edit inside ``with``: in every class,
beside other people's hooks, and refused where the numbers do not follow from what it reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interventions.bases import basis_of, rows_of
from tests.lib.models import HAS_HOOKED, tiny, tokens
from tl_geometry import decompose, trajectories
from tl_geometry.base.errors import GeometryError, ReconstructionError
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.interventions import (
    keep_planes,
    keep_term,
    mean_term,
    project_stream,
    remove_edge,
    remove_planes,
    remove_term,
    surrogate,
    swap_edge,
    swap_planes,
)
from tl_geometry.models import view

HOOKED = ("gpt2", "llama", "bloom") if HAS_HOOKED else ()
BRIDGES = ("gpt2", "llama", "bloom", "opt", "bert", "gemma2", "gpt-oss", "gptj", "falcon-alibi")
CASES = [*(("bridge", a) for a in BRIDGES), *(("hooked", a) for a in HOOKED)]
CLASSES = ["bridge", *(["hooked"] if HAS_HOOKED else [])]
IDS = tokens(3, 9, seed=8)
OTHER_IDS = tokens(2, 6, seed=9)
HEADS = ["L0H1", "L1H0", "L1H2"]
NAMES = ["cvec-cvec", "pos-cvec"]
EDITS: dict[str, Callable[[Any, PositionContext], Any]] = {
    "remove_term": lambda m, basis: remove_term(m, basis, NAMES, HEADS),
    "keep_term": lambda m, basis: keep_term(m, basis, "position", HEADS),
    "mean_term": lambda m, basis: mean_term(m, basis, NAMES, HEADS),
    "project_stream": lambda m, basis: project_stream(m, basis, 1, "pos"),
    "surrogate": lambda m, basis: surrogate(m, basis, HEADS, "diagonal"),
    "remove_planes": lambda m, basis: remove_planes(m, [0, 1], HEADS),
    "keep_planes": lambda m, basis: keep_planes(m, [0, 1], HEADS),
    "swap_planes": lambda m, basis: swap_planes(m, [0, 1], HEADS),
}
OF_TOKENS: dict[str, Callable[[Any], Any]] = {
    "remove_edge": lambda m: remove_edge(m, IDS, "L0H0", ["L1H0", "L1H2"]),
    "remove_value_edge": lambda m: remove_edge(m, IDS, "mlp0", "L1H2", side="value"),
    "swap_edge": lambda m: swap_edge(m, IDS, "embed", HEADS, side=["query", "key", "value"]),
}
EVERYWHERE = ("remove_term", "swap_edge")
PAIRS = [(*case, name) for case, name in rows_of(CASES, EVERYWHERE, times=1)]
PAIRS += [
    (model_class, "llama", name)
    for name, model_class in rows_of([*EDITS, *OF_TOKENS], CLASSES, times=1)
    if name not in EVERYWHERE
]
PAIRS += [("bridge", "opt", name) for name in ("surrogate", "project_stream", "remove_value_edge")]


def opened(name: str, model_class: str, architecture: str, processed: bool = False) -> Any:
    model = tiny(model_class, architecture, processed)
    if name in OF_TOKENS:
        return OF_TOKENS[name](model)
    return EDITS[name](model, basis_of(model_class, architecture, processed))


def logits(model: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, return_type="logits", **options).clone()


def listed(model: Any, hooks: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    with torch.no_grad():
        out = model.run_with_hooks(ids, fwd_hooks=hooks, return_type="logits", **options)
    return out.clone()


def hooks_of(model: Any) -> int:
    modules = list(model.modules())
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules) + sum(
        len(p.fwd_hooks) for p in model.hook_dict.values()
    )


def differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-3 * b.abs().max())


# -------------------------------------------------------------------------------------------------
# the same edit


@pytest.mark.parametrize(("model_class", "architecture", "name"), PAIRS)
def test_a_list_does_what_the_context_does(model_class: str, architecture: str, name: str) -> None:
    model, edit = tiny(model_class, architecture), opened(name, model_class, architecture)
    plain = logits(model)
    carried = hooks_of(model)
    with edit:
        inside = logits(model)
        others = None if name in OF_TOKENS else logits(model, OTHER_IDS)
    hooks = edit.hooks()
    assert hooks_of(model) == carried, "making a list leaves nothing on the model"
    for _ in range(2):
        assert torch.equal(listed(model, hooks), inside)
        if others is not None:
            assert torch.equal(listed(model, hooks, OTHER_IDS), others)
    with model.hooks(fwd_hooks=hooks):
        assert torch.equal(logits(model), inside)
    assert hooks_of(model) == carried
    assert torch.equal(logits(model), plain)
    assert differ(inside, plain)


@pytest.mark.parametrize(
    ("model_class", "architecture", "name"),
    rows_of(CLASSES, ["gpt2", "llama"], ["remove_term", "remove_edge", "project_stream"]),
)
def test_processed_models_take_lists(model_class: str, architecture: str, name: str) -> None:
    """A bridge in compatibility mode may call a hook once for each name of its point."""
    model = tiny(model_class, architecture, processed=True)
    plain, edit = logits(model), opened(name, model_class, architecture, processed=True)
    with edit:
        inside = logits(model)
    assert torch.equal(listed(model, edit.hooks()), inside)
    assert torch.equal(logits(model), plain)
    assert differ(inside, plain)


@pytest.mark.parametrize(
    ("model_class", "architecture", "name"),
    rows_of(CLASSES, ["gpt2", "opt"], ["remove_term", "project_stream", "swap_edge"]),
)
def test_a_cache_shows_what_it_shows_inside_the_context(
    model_class: str, architecture: str, name: str
) -> None:
    model, edit = tiny(model_class, architecture), opened(name, model_class, architecture)
    _, plain = model.run_with_cache(IDS)
    with edit:
        _, inside = model.run_with_cache(IDS)
    with model.hooks(fwd_hooks=edit.hooks()):
        _, found = model.run_with_cache(IDS)
    assert set(inside) <= set(found)
    assert all(torch.equal(found[key], inside[key]) for key in inside)
    z = "blocks.1.attn.hook_z"
    assert differ(found[z], plain[z])


@pytest.mark.parametrize(
    ("model_class", "name"),
    rows_of(CLASSES, ["remove_term", "keep_planes", "project_stream", "swap_edge"]),
)
def test_gradients_pass(model_class: str, name: str) -> None:
    model, edit = tiny(model_class, "llama"), opened(name, model_class, "llama")
    chosen = [p for p in model.parameters() if p.requires_grad]

    def gradients(out: Tensor) -> list[Tensor | None]:
        return list(torch.autograd.grad(out[0, -1, 5], chosen, allow_unused=True))

    with edit:
        inside = gradients(model(IDS))
    found = gradients(model.run_with_hooks(IDS, fwd_hooks=edit.hooks()))
    plain = gradients(model(IDS))
    pairs = [(a, b, c) for a, b, c in zip(found, inside, plain, strict=True) if b is not None]
    assert len(pairs) > 10
    assert all(a is not None and torch.equal(a, b) for a, b, _ in pairs)
    assert any(c is not None and differ(a, c) for a, _, c in pairs if a is not None)


# -------------------------------------------------------------------------------------------------
# beside other people's hooks


def patch(factor: float = 0.5) -> Callable[[Tensor, Any], Tensor]:
    """A hook that changes an activation at one position (one query of scores and patterns)."""

    def hook(value: Tensor, hook: Any) -> Tensor:
        out = value.clone()
        at = (slice(None),) * (1 + (value.shape[1:2] == (4,))) + (2,)
        out[at] = factor * out[at]
        return out

    return hook


STREAM = ["hook_resid_pre", "attn.hook_v"]
AFTER = ["attn.hook_z", "attn.hook_pattern", "attn.hook_attn_scores"]
ELSEWHERE = ["hook_attn_out", "hook_mlp_out"]


@pytest.mark.parametrize(
    ("model_class", "architecture", "point"),
    rows_of(CLASSES, ["gpt2", "llama", "bloom"], [*STREAM, *AFTER, *ELSEWHERE]),
)
def test_hooks_in_the_same_list(model_class: str, architecture: str, point: str) -> None:
    """The stream and values are read wherever they are patched in the list; scores, pattern and z
    are patched after the edit, and before it the patch is refused by its name."""
    model, edit = tiny(model_class, architecture), opened("remove_term", model_class, architecture)
    for layer in (0, 1):
        theirs = [(f"blocks.{layer}.{point}", patch())]
        with edit:
            right, unpatched = listed(model, theirs), logits(model)
        assert differ(right, unpatched), "the patch matters"
        assert differ(right, listed(model, theirs)), "the edit matters"
        assert torch.equal(listed(model, [*edit.hooks(), *theirs]), right)
        with model.hooks(fwd_hooks=edit.hooks()):
            assert torch.equal(listed(model, theirs), right)
        if point in AFTER:
            text = f"with hooks at blocks.{layer}.{point}.*after those of the edit"
            with pytest.raises(ReconstructionError, match=text):
                listed(model, [*theirs, *edit.hooks()])
        else:
            assert torch.equal(listed(model, [*theirs, *edit.hooks()]), right)


@pytest.mark.parametrize("model_class", CLASSES)
def test_hooks_before_the_edit_see_what_the_model_made(model_class: str) -> None:
    model, edit = tiny(model_class, "gpt2"), opened("remove_term", model_class, "gpt2")
    name, seen = "blocks.0.attn.hook_attn_scores", list[Tensor]()
    look = [(name, lambda value, hook: seen.append(value.clone()))]
    _, plain = model.run_with_cache(IDS)
    with model.hooks(fwd_hooks=edit.hooks()):
        _, edited = model.run_with_cache(IDS)
    listed(model, [*look, *edit.hooks(), *look])
    assert torch.equal(seen[0], plain[name])
    assert torch.equal(seen[1], edited[name])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("model_class", CLASSES)
def test_patched_queries_are_refused(model_class: str) -> None:
    model, edit = tiny(model_class, "gpt2"), opened("remove_term", model_class, "gpt2")
    theirs = [("blocks.1.attn.hook_q", patch())]
    for hooks in ([*theirs, *edit.hooks()], [*edit.hooks(), *theirs]):
        with pytest.raises(ReconstructionError, match=r"queries of layer 1 .* with hooks at"):
            listed(model, hooks)
    one = remove_term(model, basis_of(model_class, "gpt2"), NAMES, "L0H1")
    listed(model, [*theirs, *one.hooks()])


@pytest.mark.parametrize("model_class", CLASSES)
def test_lists_of_other_heads_add_up(model_class: str) -> None:
    """In one list, nested, and beside an edit that is open; of the same head they are refused."""
    model, basis = tiny(model_class, "gpt2"), basis_of(model_class, "gpt2")
    with remove_term(model, basis, NAMES, HEADS):
        together = logits(model)
    one, two = (remove_term(model, basis, NAMES, h) for h in (HEADS[:2], HEADS[2:]))
    again = keep_term(model, basis, "position", HEADS[1])
    found = [listed(model, [*one.hooks(), *two.hooks()])]
    with model.hooks(fwd_hooks=one.hooks()):
        found.append(listed(model, two.hooks()))
        with pytest.raises(GeometryError, match="got L1H0, edited already"):
            listed(model, again.hooks())
    with one:
        found.append(listed(model, two.hooks()))
        with pytest.raises(GeometryError, match="got L1H0, edited already"):
            listed(model, again.hooks())
    for value in found:
        assert torch.allclose(value, together, atol=1e-5 * float(together.abs().max()))
    hooks = one.hooks()
    for twice in ([*hooks, *hooks], [*one.hooks(), *one.hooks()], [*one.hooks(), *again.hooks()]):
        with pytest.raises(GeometryError, match="edited already"):
            listed(model, twice)
    assert torch.equal(listed(model, hooks), listed(model, one.hooks()))


@pytest.mark.parametrize("model_class", CLASSES)
def test_a_pass_that_breaks_leaves_nothing(model_class: str) -> None:
    model, edit = tiny(model_class, "gpt2"), opened("remove_term", model_class, "gpt2")
    with edit:
        right = logits(model)
    hooks, carried = edit.hooks(), hooks_of(model)

    def fails(value: Tensor, hook: Any) -> None:
        raise RuntimeError("mine")

    for name in ("blocks.0.attn.hook_q", "blocks.1.attn.hook_attn_scores"):
        with pytest.raises(RuntimeError, match="mine"):
            listed(model, [*hooks, (name, fails)])
        assert hooks_of(model) == carried
        assert torch.equal(listed(model, hooks), right)
    with torch.no_grad():
        model.run_with_hooks(IDS, fwd_hooks=hooks, stop_at_layer=1)
    assert torch.equal(listed(model, hooks), right)


# -------------------------------------------------------------------------------------------------
# refusals: what a pass was given is not seen, but what it makes is


@pytest.mark.parametrize(
    ("case", "side", "rows"), rows_of(CASES, ["left", "right"], [1, 3], times=1)
)
def test_padding_is_refused(case: tuple[str, str], side: str, rows: int) -> None:
    model_class, architecture = case
    model = tiny(model_class, architecture)
    basis = basis_of(model_class, architecture)
    hooks = remove_term(model, basis, "cvec-cvec", "L0H1").hooks()
    mask, ids = torch.ones(rows, 9, dtype=torch.int64), IDS[:rows]
    whole = listed(model, hooks, ids, attention_mask=mask)
    assert torch.allclose(whole, listed(model, hooks, ids), atol=1e-5 * float(whole.abs().max()))
    mask[:, :2] = mask[:, :2] if side == "right" else 0
    mask[:, -2:] = mask[:, -2:] if side == "left" else 0
    with pytest.raises(GeometryError, match=r"layer 0|positions"):
        listed(model, hooks, ids, attention_mask=mask)


@pytest.mark.parametrize(
    ("model_class", "architecture"),
    rows_of(CLASSES, ["gpt2", "llama", "bloom", "opt", "gptj"], times=1),
)
def test_tokens_after_others_are_refused(model_class: str, architecture: str) -> None:
    model, edit = tiny(model_class, architecture), opened("remove_term", model_class, architecture)
    options: dict[str, Any] = {
        "max_new_tokens": 3,
        "do_sample": False,
        "stop_at_eos": False,
        "verbose": False,
        "return_type": "tokens",
    }
    with edit:
        right = model.generate(IDS, use_past_kv_cache=False, **options)
    with model.hooks(fwd_hooks=edit.hooks()):
        assert torch.equal(model.generate(IDS, use_past_kv_cache=False, **options), right)
        with pytest.raises(GeometryError, match=r"layer 0|positions|whole prompts"):
            model.generate(IDS, use_past_kv_cache=True, **options)


@pytest.mark.parametrize("model_class", CLASSES)
def test_autocast_is_refused(model_class: str) -> None:
    model, edit = tiny(model_class, "gpt2"), opened("remove_term", model_class, "gpt2")
    hooks = edit.hooks()
    with (
        pytest.raises(GeometryError, match=r"got torch\.autocast"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        listed(model, hooks)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        listed(model, hooks)


@pytest.mark.parametrize("architecture", ["gpt2", "gpt-neo", "bert"])
def test_other_positions_are_refused(architecture: str) -> None:
    model = tiny("bridge", architecture)
    edit = opened("remove_term", "bridge", architecture)
    positions = torch.arange(9).expand(3, -1)
    right = listed(model, edit.hooks())
    assert torch.equal(listed(model, edit.hooks(), position_ids=positions), right)
    for other in (positions + 3, positions.flip(0, 1)):
        with pytest.raises(GeometryError, match="expected positions 0 to 8"):
            listed(model, edit.hooks(), position_ids=other)


@pytest.mark.parametrize(("model_class", "architecture"), CASES)
def test_tokens_of_another_clean_run_are_refused(model_class: str, architecture: str) -> None:
    model = tiny(model_class, architecture)
    hooks = opened("swap_edge", model_class, architecture).hooks()
    other = IDS.clone()
    other[1, 4] = 3 + (other[1, 4] - 2) % 50
    for ids in (other, IDS[:, :6], IDS[:2]):
        with pytest.raises(GeometryError, match="expected the tokens of the clean run"):
            listed(model, hooks, ids)
    listed(model, hooks)


@pytest.mark.parametrize("architecture", ["gpt2", "bloom"])
@pytest.mark.parametrize("model_class", CLASSES)
def test_prompts_without_the_bos_of_the_basis_are_refused(
    model_class: str, architecture: str
) -> None:
    model = tiny(model_class, architecture)
    seen = dataclasses.replace(view(model), bos_id=0)
    rows = tokens(batch=16, length=18, seed=2)
    rows[:, 0] = 0
    basis = decompose(seen, rows, progress=False)
    hooks = remove_term(seen, basis, NAMES, HEADS).hooks()
    with pytest.raises(GeometryError, match="expected has_bos=True, as in the basis"):
        listed(model, hooks)
    listed(model, hooks, rows[:3, :9])
    if model_class == "hooked":  # a pass that begins in the middle embeds no tokens
        _, cached = model.run_with_cache(rows[:2, :6])
        model.run_with_hooks(cached["blocks.1.hook_resid_pre"], fwd_hooks=hooks, start_at_layer=1)
    without = dataclasses.replace(
        basis, provenance=dataclasses.replace(basis.provenance, has_bos=False)
    )
    hooks = remove_term(seen, without, NAMES, HEADS).hooks()
    with pytest.raises(GeometryError, match="got has_bos=True"):
        listed(model, hooks, rows[:3, :9])
    listed(model, hooks)


# -------------------------------------------------------------------------------------------------
# names


@pytest.mark.parametrize("model_class", CLASSES)
def test_states_may_be_named_as_transformer_lens_names_them(model_class: str) -> None:
    from transformer_lens.utilities.components_utils import get_act_name

    model, basis = tiny(model_class, "gpt2"), basis_of(model_class, "gpt2")
    for name, state in ((get_act_name("resid_pre", 1), 1), (get_act_name("resid_post", 1), 2)):
        with project_stream(model, basis, state):
            right = logits(model)
        with project_stream(model, basis, name):
            assert torch.equal(logits(model), right)
        assert torch.equal(listed(model, project_stream(model, basis, name).hooks()), right)
        one = decompose(model, IDS, states=[name], progress=False)
        assert one.states == (state,)
        found = trajectories(model, IDS, states=name, progress=False)
        assert found.states == (state,)
    for other in (get_act_name("z", 1), get_act_name("resid_mid", 1)):
        with pytest.raises(GeometryError, match="states: expected a number from 0 to 2 or a hook"):
            project_stream(model, basis, other).hooks()
        with pytest.raises(GeometryError, match="states: expected a number from 0 to 2 or a hook"):
            trajectories(model, IDS, states=[other], progress=False)
