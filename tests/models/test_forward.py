"""How a pass runs: which hooks end it, what is refused before it, how a cache is handed on, and
where the hooks of an edit stand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tests.tiny import tiny, tokens
from tl_geometry.base.errors import GeometryError
from tl_geometry.models import view
from tl_geometry.models.forward import Runner, keep, put_on, take_away
from tl_geometry.models.hook_points import (
    PassArguments,
    PassTokens,
    PlacedHook,
    attached,
    claimed,
    edited_heads,
    hooked_points,
    require_free,
)
from tl_geometry.models.model_view import ModelView

Space = SimpleNamespace
CPU = torch.device("cpu")


class Model(nn.Module):
    """A model with named hook points that notes how it was called."""

    def __init__(self, *points: str, **more: Any) -> None:
        super().__init__()
        self.hook_dict = dict.fromkeys(points)
        self.calls: list[dict[str, Any]] = []
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, ids: Tensor, **named: Any) -> Tensor:
        self.calls.append({"ids": ids, **named})
        return ids.float()


STATES = ("blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre", "blocks.1.hook_resid_post")


def runner(model: Any, class_name: str = "HookedTransformer", n_ctx: int = 4) -> Runner:
    return Runner(model, class_name, "m", STATES, n_ctx, 9, CPU)


IDS = torch.tensor([[0, 8]])


# ---- what a pass is given


def test_the_first_activation_is_kept() -> None:
    """A hook that fires twice keeps the first value, detached."""
    held: dict[str, Tensor] = {}
    hook = keep(held, "x")
    first = torch.ones(2, requires_grad=True)
    assert hook(first * 1) is None
    hook(first * 5)
    assert held["x"].tolist() == [1.0, 1.0]
    assert not held["x"].requires_grad


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(1, 2), "tokens: expected integer ids [batch position], got "),
        (torch.zeros(2, dtype=torch.int64), "tokens: expected integer ids [batch position], got "),
        (torch.zeros(0, 2).long(), "tokens: expected integer ids [batch position], got "),
        (torch.zeros(1, 5).long(), "tokens: expected at most 4 positions (n_ctx of m), got 5. "),
        (
            torch.tensor([[0, 9]]),
            "tokens: expected ids from 0 to 8 (the vocabulary of m), got ids from 0 to 9. "
            "Use this model's tokenizer.",
        ),
        (
            torch.tensor([[-1, 8]]),
            "tokens: expected ids from 0 to 8 (the vocabulary of m), got ids from -1 to 8. "
            "Use this model's tokenizer.",
        ),
    ],
)
def test_tokens_that_a_model_cannot_take_are_refused(tokens: Tensor, message: str) -> None:
    """No ids, too many of them, and ids outside of the vocabulary have a message each."""
    with pytest.raises(GeometryError) as error:
        runner(Model()).checked(tokens)
    assert str(error.value).startswith(message)


def test_tokens_at_both_ends_of_vocabulary_and_length_are_taken() -> None:
    """The first and last id, as many as the model takes; other integers become int64."""
    ids = torch.tensor([[0, 8, 8, 0]], dtype=torch.int16)
    found = runner(Model()).checked(ids)
    assert (found.dtype, found.tolist()) == (torch.int64, ids.tolist())


@pytest.mark.parametrize(
    ("training", "p", "found"), [(True, 0.1, "dropout in drop"), (True, 0.0, ""), (False, 0.1, "")]
)
def test_dropout_that_acts_is_named(training: bool, p: float, found: str) -> None:
    """Dropout in training mode acts unless its probability is zero."""
    model = Model(drop=nn.Dropout(p)).train(training)
    assert runner(model).is_training() == found


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_a_bridge_is_in_training_where_either_model_is(outer: bool, inner: bool) -> None:
    """The bridge and the model inside it each have a mode; either is refused."""
    original = nn.Linear(1, 1)
    model = Model()
    object.__setattr__(model, "original_model", original)
    model.train(outer)
    original.train(inner)
    run = runner(model, "TransformerBridge")
    assert run.is_training() == ("Linear" if outer or inner else "")
    if outer or inner:
        with pytest.raises(GeometryError) as error:
            run.checked(IDS)
        assert str(error.value) == (
            "m: expected evaluation mode, got training mode (Linear). Use model.eval()."
        )


@pytest.mark.parametrize(
    ("class_name", "side", "mask"),
    [
        ("HookedTransformer", "left", True),
        ("HookedTransformer", "right", False),
        ("HookedTransformer", None, False),
        ("HookedEncoder", "left", False),
    ],
)
def test_only_a_model_that_pads_left_gets_a_mask(
    class_name: str, side: str | None, mask: bool
) -> None:
    """HookedTransformer would mask ids equal to the pad token: it gets a mask of ones."""
    model = Model(tokenizer=None if side is None else Space(padding_side=side)).eval()
    logits = runner(model, class_name)(IDS, {}, logits=True)
    assert logits is not None
    assert torch.equal(logits, IDS.float())
    (call,) = model.calls
    assert call["return_type"] == "logits"
    assert ("attention_mask" in call) == mask
    assert not mask or call["attention_mask"].tolist() == [[1, 1]]


@pytest.mark.parametrize("accepts", [True, False])
def test_a_bridge_keeps_no_keys_where_it_can_be_told(accepts: bool) -> None:
    """use_cache=False is given to those models alone whose forward takes it."""

    def with_cache(input_ids: Tensor, use_cache: bool = True) -> None: ...

    def without_cache(input_ids: Tensor) -> None: ...

    forward = with_cache if accepts else without_cache
    model = Model(original_model=Space(forward=forward))
    expected = {"use_cache": False} if accepts else {}
    assert runner(model, "TransformerBridge").kwargs == expected


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_is_handed_on_under_the_name_that_a_model_knows(name: str) -> None:
    """A bridge's model calls it past_key_values or cache."""

    def of_old(past_key_values: Any = None) -> None: ...

    def of_new(cache: Any = None) -> None: ...

    forward = {"past_key_values": of_old, "cache": of_new}[name]
    run = runner(Model(original_model=Space(forward=forward)), "TransformerBridge")
    before, cache = run.kwargs, object()
    assert run.behind(cache, IDS).kwargs == {"use_cache": True, name: cache}
    assert run.kwargs is before
    hooked = runner(Model()).behind(cache, IDS).kwargs
    assert hooked.pop("past_kv_cache") is cache
    assert {k: v.tolist() for k, v in hooked.items()} == {"attention_mask": [[1, 1]]}


# ---- where a pass ends


@pytest.mark.parametrize(
    ("hooks", "last"),
    [
        ([], 0),
        (["hook_embed"], 0),
        (["blocks.0.hook_resid_pre"], 0),
        (["blocks.0.attn.hook_q"], 1),
        (["blocks.1.hook_resid_pre"], 1),
        (["blocks.1.mlp.hook_post"], 2),
        (["hook_embed", "blocks.1.hook_resid_post", "blocks.0.attn.hook_q"], 2),
        (["ln_final.hook_normalized"], None),
        (["unembed.hook_in"], None),
        (["hook_unembed"], None),
        (["mlm_head.hook_x", "hook_embed"], None),
    ],
)
def test_a_pass_ends_at_the_first_state_that_is_complete(
    hooks: list[str], last: int | None
) -> None:
    """The state behind the deepest hook ends it; hooks of the output head, and logits, need all."""
    run = runner(Model())
    assert run._last_state(dict.fromkeys(hooks, print), False) == last
    assert run._last_state(dict.fromkeys(hooks, print), True) is None


def test_hooks_that_a_model_lacks_are_all_named() -> None:
    """The message has every missing name, the model and its class."""
    run = runner(Model("a"))
    assert [run.has("a"), run.has("b")] == [True, False]
    run.model.hook_dict["b"] = None
    assert run.has("b")
    with pytest.raises(GeometryError) as error:
        run(IDS, dict.fromkeys(["b", "c", "d"], print))
    assert str(error.value) == (
        "hooks of m: expected hooks of this HookedTransformer, got no c, d. "
        "Use check_model(model) to see what is supported."
    )


# ---- hooks of an edit


@pytest.fixture
def seen() -> ModelView:
    """A small model that no test leaves changed."""
    return view(tiny("bridge", "gpt2"))


def test_hooks_take_their_place_anew_at_each_pass(seen: ModelView) -> None:
    """First and last hold also against hooks that were added later, and all are gone at the end."""
    order: list[str] = []
    name = "blocks.1.hook_mlp_out"
    point = seen._model.hook_dict[name]

    def user(label: str) -> Any:
        return put_on(point, lambda value, hook: order.append(label))

    before = len(point.fwd_hooks)
    hooks = [PlacedHook(name, lambda v, p=p: order.append(p), p) for p in ("last", "first")]
    early = user("early")
    with attached(seen, hooks):
        late = user("late")
        seen._model(tokens())
        seen._model(tokens())
    assert order == ["first", "early", "late", "last"] * 2
    for handle in (early, late):
        take_away(point, handle)
    order.clear()
    seen._model(tokens())
    assert (order, len(point.fwd_hooks)) == ([], before)


def test_hooks_of_an_edit_that_were_taken_away_are_missed(seen: ModelView) -> None:
    """At the end of the block, and at the next pass, the message names the hook point."""
    name = "blocks.0.hook_mlp_out"
    hooks = [PlacedHook(name, lambda v: None, "first")]
    text = (
        f"an open edit of {seen.name}: expected its hooks to stay until the end of the with block, "
        f"got none at {name} any more. Use reset_hooks() without including_permanent, or after the "
        "with block."
    )
    for runs in (False, True):
        with pytest.raises(GeometryError) as error, attached(seen, hooks):
            seen._model.hook_dict[name].remove_hooks(including_permanent=True)
            if runs:
                seen._model(tokens())
        assert str(error.value) == text


def test_a_head_has_one_open_edit_at_a_time(seen: ModelView) -> None:
    """The second is refused by name, and its heads are free again afterwards."""
    assert edited_heads(seen) == []
    with claimed(seen, [(0, 1), (1, 2)]):
        assert edited_heads(seen) == [(0, 1), (1, 2)]
        with pytest.raises(GeometryError) as error, claimed(seen, [(1, 2), (0, 1), (0, 3)]):
            pass
        assert str(error.value) == (
            "heads: expected heads that no open edit changes, got L0H1, L1H2, edited already. Use "
            "one edit with all the terms, remove_term(model, basis, [first, second], heads)."
        )
        with claimed(seen, [(0, 3)]):
            assert edited_heads(seen)[-1] == (0, 3)
        assert edited_heads(seen) == [(0, 1), (1, 2)]
    assert edited_heads(seen) == []


def test_eight_heads_are_named_at_most() -> None:
    """The first eight of the heads that are taken."""
    heads = [(0, head) for head in range(9)]
    with pytest.raises(GeometryError, match="L0H7, edited already"):
        require_free(heads, heads)
    require_free(heads, [(1, 0)])


def test_tokens_are_compared_by_ids_or_by_embeddings() -> None:
    """Embeddings are those of a token where all of their coordinates are."""
    ids = torch.tensor([[1, 2, 3]])
    shown = PassTokens(ids)
    assert shown.shape == (1, 3)
    assert shown.are(torch.tensor([[1, 0, 3]])).tolist() == [[True, False, True]]
    table = torch.tensor([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    embedded = PassTokens(table[ids], lambda other: table[other])
    assert embedded.shape == (1, 3)
    assert embedded.are(torch.tensor([[1, 3, 0]])).tolist() == [[True, False, False]]


def arguments_of(seen: ModelView, **named: Any) -> PassArguments:
    arguments = PassArguments(seen)
    module = Space(forward=lambda x, mask=None, **kwargs: None)
    arguments._take(module, (1,), named)
    return arguments


H = torch.zeros(2, 3, 32)
ONES = torch.ones(2, 3)
PADDED = pad(torch.ones(2, 2), (1, 0))
WITHOUT = "prompts of one length, with attention_mask=torch.ones_like(tokens) where ids equal the "
NO_PADDING = "no padding: the basis knows positions by their index"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "keys of earlier passes": (
        {"past_key_values": Space(get_seq_length=lambda: 5)},
        "whole prompts, got tokens after 5 others in a key-value cache. "
        "Use generate(..., use_past_kv_cache=False).",
    ),
    "keys under the new name": (
        {"cache": Space(get_seq_length=lambda: 1)},
        "whole prompts, got tokens after 1 others in a key-value cache. "
        "Use generate(..., use_past_kv_cache=False).",
    ),
    "keys of HookedTransformer": (
        {"past_kv_cache_entry": Space(past_keys=torch.zeros(2, 7, 4, 8))},
        "whole prompts, got tokens after 7 others in a key-value cache. "
        "Use generate(..., use_past_kv_cache=False).",
    ),
    "a mask": (
        {"attention_mask": PADDED},
        f"{NO_PADDING}, got zeros in attention_mask. Use {WITHOUT}pad token.",
    ),
    "an encoder's mask": (
        {"one_zero_attention_mask": PADDED},
        f"{NO_PADDING}, got zeros in one_zero_attention_mask. Use {WITHOUT}pad token.",
    ),
    "an encoder's additive mask": (
        {"additive_attention_mask": -PADDED},
        f"{NO_PADDING}, got zeros in one_zero_attention_mask. Use {WITHOUT}pad token.",
    ),
    "positions": (
        {"position_ids": torch.tensor([[0, 1, 3]])},
        "positions 0 to 2, got other position_ids. Use the model's own positions.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_edited_exactly_is_refused_by_name(seen: ModelView, name: str) -> None:
    """Keys of earlier passes, padding in each of its forms, and other positions."""
    named, text = REFUSED[name]
    with pytest.raises(GeometryError) as error:
        arguments_of(seen, **named).check(H)
    assert str(error.value) == f"a forward pass of {seen.name} inside an edit: expected {text}"


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"attention_mask": ONES},
        {"attention_mask": torch.zeros(1, 1, 3, 3)},
        {"additive_attention_mask": torch.zeros(2, 1, 1, 3)},
        {"position_ids": torch.arange(3).expand(2, 3)},
        {"past_key_values": Space(get_seq_length=lambda: 0)},
        {"past_key_values": None},
    ],
)
def test_whole_prompts_without_padding_are_taken(seen: ModelView, named: dict[str, Any]) -> None:
    """Masks of ones, masks of cells, the usual positions and empty caches change nothing."""
    assert arguments_of(seen, **named).check(H) is None


def test_positions_may_begin_where_the_model_begins(seen: ModelView) -> None:
    """OPT counts from two."""
    arguments = arguments_of(seen, position_ids=torch.tensor([[2, 3, 4]]))
    arguments.first = 2
    arguments.check(H)
    arguments = arguments_of(seen, position_ids=torch.tensor([[0, 1, 2]]))
    arguments.first = 2
    with pytest.raises(GeometryError, match="expected positions 2 to 4, got other position_ids"):
        arguments.check(H)


def test_the_first_look_at_a_pass_gives_its_tokens(seen: ModelView) -> None:
    """Token ids of the right shape come once; embeddings and ids of another shape never."""
    arguments, ids = arguments_of(seen), torch.zeros(2, 3, dtype=torch.int64)
    arguments._ids(ids)
    found = arguments.check(H)
    assert found is not None
    assert found.shown is ids
    assert arguments.check(H) is None
    for other in (ids[:1], ids[:, :2], ids.float(), ids[0], None):
        arguments._ids(other)
        assert arguments.check(H) is None


def test_arguments_are_known_by_name_however_they_were_given(seen: ModelView) -> None:
    """Positional arguments, named ones, and those of a ``**kwargs``."""
    arguments = PassArguments(seen)
    module = Space(forward=lambda x, position_ids=None, **kwargs: None)
    arguments._take(module, (1, 2), {"attention_mask": 3})
    assert arguments.running.named == {"x": 1, "position_ids": 2, "attention_mask": 3}
    arguments._take(Space(forward=lambda: None), (1,), {"attention_mask": 3})
    assert arguments.running.named == {"attention_mask": 3}


def test_points_with_hooks_are_listed_but_those_that_are_excepted(seen: ModelView) -> None:
    """Each point once, under its prefix, whatever name excepts it."""
    points = seen._model.hook_dict
    names = ("blocks.0.attn.hook_z", "blocks.0.hook_mlp_out", "blocks.1.attn.hook_z")
    handles = [(points[n], put_on(points[n], lambda value, hook: None)) for n in names]
    try:
        with attached(seen, [PlacedHook("blocks.0.attn.hook_q", lambda v: None, "first")]):
            assert set(hooked_points(seen, "blocks.0.")) == set(names[:2])
            assert hooked_points(seen, "blocks.0.", [names[0]]) == [names[1]]
            assert hooked_points(seen, "blocks.0.", [names[0], "nothing"]) == [names[1]]
            assert hooked_points(seen, "blocks.1.") == [names[2]]
    finally:
        for point, handle in handles:
            take_away(point, handle)
