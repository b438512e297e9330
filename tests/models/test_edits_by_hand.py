"""Edits of a live model, against patterns and mixed values that are worked out here; what they
count, what they say, and what they refuse, in a block and as a list of hooks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tiny import hf_model, tiny, tokens
from tl_geometry.base.errors import GeometryError, ReconstructionError
from tl_geometry.models import from_hf, view
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.forward import put_on, take_away
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.live_edits import (
    Edit,
    StreamEdit,
    edit_of_outputs,
    edited_scores,
    score_of,
)
from tl_geometry.models.model_view import ModelView

HEADS = (1, 3)
Z = "blocks.1.attn.hook_z"


def halved(layer: LayerView, scores: Tensor) -> Tensor:
    return scores / 2


def same(layer: LayerView, scores: Tensor) -> Tensor:
    return scores


def layer_of(seen: ModelView, layer: int) -> LayerView:
    found: list[LayerView] = []
    seen.run_layers(tokens(), [layer], found.append)
    return found[0]


def mixed_by_hand(layer: LayerView, head: int, factor: float, values: float) -> Tensor:
    """Mixed values ``[batch position d_head]`` of one head whose scores are multiplied by a factor
    and whose values by another, in float64 and row by row."""
    assert layer.v is not None
    q, k, v = (x[:, :, head].double() for x in (layer.q, layer.k, layer.v))
    scores = q @ k.mT * layer.scale
    if layer.bias is not None:
        scores = scores + layer.bias[head].double()
    scores = scores * factor
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    out = torch.zeros_like(v)
    for i in range(q.shape[1]):
        keys = layer.allowed[i].nonzero()[:, 0]
        weights = scores[:, i, keys].exp()
        total = weights.sum(1) + (0 if layer.sinks is None else layer.sinks[head].double().exp())
        out[:, i] = ((weights / total[:, None])[:, :, None] * v[:, keys]).sum(1) * values
    return out


UNEDITED = ("blocks.1.attn.hook_attn_scores", "blocks.1.attn.hook_pattern")


@pytest.mark.parametrize("values", [1.0, 3.0])
@pytest.mark.parametrize(
    ("architecture", "unedited"),
    [
        *((name, ()) for name in ("gpt2", "gemma2", "bloom", "gpt-oss", "llama")),
        *((name, UNEDITED) for name in ("gptj", "bert")),
    ],
)
def test_edited_heads_attend_by_the_new_scores_and_values(
    architecture: str, unedited: tuple[str, ...], values: float
) -> None:
    """Half of the scores gives the pattern worked out by loops; the other heads stay."""
    seen = view(tiny("bridge", architecture))
    layer, own = layer_of(seen, 1), seen.activations(tokens(), [Z])[Z]
    change = None if values == 1 else (lambda layer, v: values * v)
    with edited_scores(seen, [Edit(1, HEADS, halved, values=change)]) as record:
        found = seen.activations(tokens(), [Z])[Z]
        assert record.passes == 1
        seen.activations(tokens(), [Z])
    assert (record.passes, record.unedited) == (2, unedited)
    assert record.heads == ((1, 1), (1, 3))
    assert record.flags == []
    found, own = (x.reshape(2, 16, 4, -1) for x in (found, own))
    for head in range(4):
        expected = mixed_by_hand(layer, head, 0.5, values) if head in HEADS else own[:, :, head]
        assert torch.allclose(found[:, :, head].double(), expected.double(), atol=1e-5), head


def test_scores_of_heads_are_products_and_bias() -> None:
    """Scaled products of the queries and keys of some heads, with the ALiBi bias of those heads."""
    layer = layer_of(view(tiny("bridge", "bloom")), 0)
    assert layer.bias is not None
    scores = score_of(layer, [2, 0])
    for at, head in enumerate([2, 0]):
        product = layer.q[0, 5, head] @ layer.k[0, 3, head] * layer.scale
        assert torch.allclose(scores[0, at, 5, 3], product + layer.bias[head, 5, 3], atol=1e-5)


@pytest.fixture
def seen() -> ModelView:
    """A small model that no test leaves changed."""
    return view(tiny("bridge", "gpt2"))


def test_what_was_noticed_is_told_once(seen: ModelView) -> None:
    """Flags of tokens and of scores are added in the order in which they came, each once."""
    edit_flags: list[str] = []

    def scores(layer: LayerView, own: Tensor) -> Tensor:
        edit_flags.extend(["of scores", "of scores", ""])
        return own

    edit = Edit(1, (0,), scores, lambda shown: "of tokens", flags=edit_flags)
    with edited_scores(seen, [edit]) as record:
        seen.run(tokens())
        assert record.flags == []  # the pass ended before layer 1
        seen._model(tokens())
        assert record.flags == ["of tokens", "of scores"]
        edit_flags.append("later")
        seen._model(tokens())
    assert record.flags == ["of tokens", "of scores", "later"]


def test_tokens_are_looked_at_once_in_a_pass(seen: ModelView) -> None:
    """The first edited layer is given the tokens; a refused pass has come to the edit."""
    given: list[tuple[int, Any]] = []
    edits = [Edit(at, (0,), same, lambda shown, at=at: given.append((at, shown))) for at in (1, 0)]
    with edited_scores(seen, edits) as record:
        seen._model(tokens())
    assert record.passes == 1
    ((layer, shown),) = given
    assert layer == 0
    assert shown.shown.tolist() == tokens().tolist()

    def refuse(shown: Any) -> None:
        raise GeometryError("no")

    with edited_scores(seen, [Edit(0, (0,), same, refuse)]) as record:
        with pytest.raises(GeometryError, match=r"^no$"):
            seen._model(tokens())
        assert (record.passes, record.reached) == (0, True)


def test_a_block_without_a_pass_is_refused(seen: ModelView) -> None:
    """The message says what to run; without edits nothing is missed."""
    with pytest.raises(GeometryError) as error, edited_scores(seen, [Edit(0, (0,), same)]):
        pass
    assert str(error.value) == (
        f"an edit of {seen.name}: expected a forward pass inside the with block that it changes, "
        "got none. Use model(tokens) inside the block, as far as the edited layer (a "
        "torch.compile wrapper that ran before it and edit.hooks() do not count)."
    )
    with edited_scores(seen, []):
        pass


# ---- hooks of the user in between


@pytest.fixture
def hooked(seen: ModelView, request: pytest.FixtureRequest) -> Iterator[str]:
    """A hook of the user that doubles what is at one point of layer 1."""
    name = f"blocks.1.{request.param}"
    point = seen._model.hook_dict[name]
    handle = put_on(point, lambda value, hook: 2 * value)
    yield name
    take_away(point, handle)


BLOCK = "hooks on the stream, v, scores, pattern or z, or an edit of heads that they leave alone"
LIST = (
    "hooks on the stream and v, or hooks on scores, pattern and z that come after those of the edit"
)
INPUT = "what the layer makes of blocks.1.hook_resid_pre (constant + mean + pos + cvec) within "


@pytest.mark.parametrize(
    ("hooked", "what"),
    [("attn.hook_q", "queries"), ("attn.hook_k", "keys")],
    indirect=["hooked"],
)
def test_hooks_between_the_input_and_the_scores_are_named(
    seen: ModelView, hooked: str, what: str
) -> None:
    """The message names the value, the layer, the hook, and where hooks may be."""
    with (
        pytest.raises(ReconstructionError) as error,
        edited_scores(seen, [Edit(1, HEADS, halved)]),
    ):
        seen._model(tokens())
    assert str(error.value).startswith(f"{what} of layer 1 of {seen.name}: expected {INPUT}")
    assert str(error.value).endswith(f" off, with hooks at {hooked}. Use {BLOCK}.")
    edit = LiveEdit(lambda: (seen, [Edit(1, HEADS, halved)]))
    with pytest.raises(ReconstructionError) as error:
        seen._model.run_with_hooks(tokens(), fwd_hooks=edit.hooks())
    assert str(error.value).endswith(f" off, with hooks at {hooked}. Use {LIST}.")


@pytest.mark.parametrize(
    "hooked",
    ["attn.hook_v", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z", "hook_resid_pre"],
    indirect=True,
)
def test_hooks_at_other_points_act_beside_an_edit(seen: ModelView, hooked: str) -> None:
    """An edit that changes nothing leaves what the hooked model computes."""
    own = seen._model(tokens())
    with edited_scores(seen, [Edit(1, HEADS, same)]):
        assert torch.allclose(seen._model(tokens()), own, atol=1e-5)


def test_weights_that_change_meanwhile_are_noticed() -> None:
    """Without hooks the advice is about the model itself."""
    hf = hf_model("gpt2")
    gain = hf.transformer.h[1].ln_1.weight
    model = from_hf(hf, None, name="changing")
    with (
        pytest.raises(ReconstructionError) as error,
        edited_scores(view(model), [Edit(1, HEADS, halved)]),
    ):
        with torch.no_grad():
            gain.mul_(1.5)
        model(tokens())
    assert str(error.value).startswith(f"queries of layer 1 of changing: expected {INPUT}")
    assert str(error.value).endswith(
        " off. Use model.eval(), no mask, and weights that stay the same while the edit is open."
    )


# ---- the stream


def test_edits_of_the_stream_count_each_pass_once(seen: ModelView) -> None:
    """Two edits of one pass are one pass; user hooks act on the changed stream."""
    name, other = "blocks.1.hook_resid_pre", "blocks.0.hook_resid_pre"
    own = seen.activations(tokens(), [other])[other]
    edits = [StreamEdit(other, lambda h: h + 1), StreamEdit(name, lambda h: 0 * h)]
    with edited_scores(seen, edits) as record:
        found = seen.activations(tokens(), [other, name])
    assert record.passes == 1
    assert torch.allclose(found[other], own + 1)
    assert float(found[name].abs().max()) == 0


@pytest.mark.parametrize("architecture", ["gpt2", "gptj", "bert"])
def test_mixed_values_of_some_heads_are_replaced(architecture: str) -> None:
    """Only those heads change, whether the hook has a head axis or not."""
    seen = view(tiny("bridge", architecture))
    own = seen.activations(tokens(), [Z])[Z]
    with edited_scores(seen, [edit_of_outputs(seen, 1, [2, 0], lambda z: z * 3)]) as record:
        found = seen.activations(tokens(), [Z])[Z]
    assert record.passes == 1
    assert found.shape == own.shape
    found, own = (x.reshape(2, 16, 4, -1) for x in (found, own))
    factors = torch.tensor([3.0, 1.0, 3.0, 1.0])[:, None]
    assert torch.allclose(found, own * factors)


# ---- as a list of hooks


def noting() -> Edit:
    flags: list[str] = []
    return Edit(1, HEADS, lambda layer, s: flags.append("noticed") or s / 2, flags=flags)


def test_a_list_of_hooks_edits_as_the_block_does(seen: ModelView) -> None:
    """The same logits; passes and flags of both ways are counted together and shown."""
    edit = LiveEdit(lambda: (seen, [noting()]))
    assert repr(edit) == "LiveEdit(0 passes edited)"
    own = seen._model(tokens())
    with edit as record:
        inside = seen._model(tokens())
    assert record.passes == 1
    hooks = edit.hooks()
    for _ in range(2):
        assert torch.equal(seen._model.run_with_hooks(tokens(), fwd_hooks=hooks), inside)
    assert not torch.allclose(inside, own, atol=1e-3)
    assert torch.equal(seen._model(tokens()), own)
    assert (edit.passes, edit.flags) == (3, ("noticed",))
    assert repr(edit) == "LiveEdit(3 passes edited, noticed)"


def test_a_list_of_stream_edits_counts_each_pass_once(seen: ModelView) -> None:
    """The first of two edits counts."""
    names = ("blocks.0.hook_resid_pre", "blocks.1.hook_resid_pre")
    edit = LiveEdit(lambda: (seen, [StreamEdit(n, lambda h: h + 1) for n in names]))
    seen._model.run_with_hooks(tokens(), fwd_hooks=edit.hooks())
    assert edit.passes == 1


@pytest.mark.parametrize("how", ["twice", "another list", "an open block"])
def test_heads_of_another_edit_are_refused_in_a_list(seen: ModelView, how: str) -> None:
    """A list that was added twice, another list of the same heads, and an open block."""
    edit, other = (LiveEdit(lambda: (seen, [Edit(1, HEADS, same)])) for _ in range(2))
    text = "heads: expected heads that no open edit changes, got L1H1, L1H3, edited already"
    hooks = edit.hooks()
    if how == "an open block":
        with other, pytest.raises(GeometryError, match=text):
            seen._model(tokens())
            seen._model.run_with_hooks(tokens(), fwd_hooks=hooks)
        return
    more = hooks if how == "twice" else other.hooks()
    with pytest.raises(GeometryError, match=text):
        seen._model.run_with_hooks(tokens(), fwd_hooks=[*hooks, *more])


def test_lists_of_other_heads_go_together(seen: ModelView) -> None:
    """Two lists of different heads give what one edit of both gives."""
    one, other = (LiveEdit(lambda h=h: (seen, [Edit(1, (h,), halved)])) for h in HEADS)
    both = LiveEdit(lambda: (seen, [Edit(1, HEADS, halved)]))
    found = seen._model.run_with_hooks(tokens(), fwd_hooks=[*one.hooks(), *other.hooks()])
    expected = seen._model.run_with_hooks(tokens(), fwd_hooks=both.hooks())
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_list_belongs_to_one_thread(seen: ModelView) -> None:
    """A thread that goes through a list of another is refused before its pass."""
    hooks = LiveEdit(lambda: (seen, [Edit(1, HEADS, same)])).hooks()
    assert len(list(hooks)) == len(hooks)
    said: list[str] = []

    def other() -> None:
        try:
            list(hooks)
        except GeometryError as error:
            said.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert said == [
        f"hooks of an edit of {seen.name}: expected passes of one thread, got a pass of another, "
        "which has these hooks too. Use with edit: ... around all threads."
    ]


@pytest.mark.parametrize(
    "change", [Edit(1, HEADS, same), StreamEdit("blocks.1.hook_resid_pre", lambda h: h)]
)
@pytest.mark.parametrize("listed", [False, True])
def test_an_edit_of_other_weights_is_refused(listed: bool, change: Edit | StreamEdit) -> None:
    """A list sees changed weights in its pass, a block at its end."""
    hf = hf_model("gpt2")
    last = hf.transformer.ln_f.weight
    model = from_hf(hf, None, name="later")
    seen = view(model)
    edit = LiveEdit(lambda: (seen, [change]))
    text = "a result or an edit of later: expected the weights that it was made for "
    if listed:
        hooks = edit.hooks()
        with torch.no_grad():
            last.mul_(2)
        with pytest.raises(GeometryError) as error:
            model.run_with_hooks(tokens(), fwd_hooks=hooks)
    else:
        with pytest.raises(GeometryError) as error, edit:
            model(tokens())
            with torch.no_grad():
                last.mul_(2)
    assert str(error.value).startswith(f"{text}({seen.fingerprint}), got others (")
    assert str(error.value).endswith(
        "): they changed during the pass, or since the edit was made. "
        "Use a copy of the model (copy.deepcopy) while it is trained or processed."
    )
