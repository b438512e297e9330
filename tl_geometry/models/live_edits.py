"""How do the attention scores (or the stream) of a live model change exactly, beside user hooks and
in every TransformerLens class? :func:`edited_scores` does it; the edits of
:mod:`tl_geometry.interventions` are built from it.

Inside the context the model is one whose edited heads attend by other scores S'; user hooks act on
that model. So the edit

1. reads a layer's input, queries, keys and values as they leave all user hooks (a patched stream is
   split as it was patched);
2. checks that queries and keys are those of that input (``constant + mean + pos + cvec``,
   projected): where a hook changed them in between, no split of them is known, and the pass is
   refused with the name of the hooks;
3. writes S' before user hooks into the first of ``hook_attn_scores``, ``hook_pattern`` and
   ``hook_z`` that the class obeys, so that later hooks and caches see edited scores, pattern and z,
   and may change them further. At pattern and z the edit looks whether the value is nearer to what
   follows from the point before it, or to the model's own. In the first case the class has obeyed,
   and nothing is written; in the second the edit is written here.

Attention that Hugging Face computes (BERT, OPT, GPT-J, GPT-Neo in a bridge) obeys only ``hook_z``:
there scores and pattern keep showing what the model made of its own scores;
:attr:`OpenEdit.unedited` names those points.

The removed term is a function of the running stream, norm scale included, so that gradients pass
through it. Hooks survive ``run_with_hooks`` and ``run_with_cache`` inside the context and are
removed by their own handles on exit, also on exceptions. Passes in several threads are edited each
by itself.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import ReconstructionError, UnsupportedModelError, fail, require
from tl_geometry.models.attention_spec import ignore_of, scores_of, unmasked
from tl_geometry.models.forward import Hook
from tl_geometry.models.hook_points import (
    HookedArguments,
    PassArguments,
    PassTokens,
    PlacedHook,
    attached,
    claimed,
    hooked_points,
)
from tl_geometry.models.layer_view import LayerView
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import pattern_roundoff, reconstruction_bound
from tl_geometry.models.softmax import soft_cap
from tl_geometry.models.user_hooks import brief
from tl_geometry.models.write_spec import by_head

ScoreEdit = Callable[[LayerView, Float[Tensor, "batch head query key"]], Tensor]
"""Receives a layer and the scores of the edited heads (before any soft cap) and returns the scores
to use."""
ValueEdit = Callable[[LayerView, Float[Tensor, "batch key head d_head"]], Tensor]
"""Receives a layer and the values of the edited heads and returns the values to use."""
OutputEdit = Callable[[Float[Tensor, "batch position head d_head"]], Tensor]
"""Receives the mixed values of the edited heads and returns those to use."""
POINTS_IN_LIST = ("hook_resid_pre", "attn.hook_v")
POINTS_IN_BLOCK = (*POINTS_IN_LIST, "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z")
"""Points of an edited layer at which user hooks may act: beside an edit that is a list of hooks,
and beside one in a ``with`` block. The edit reads what hooks before it made; hooks after it act on
its result."""
ADVICE_IN_LIST = (
    "hooks on the stream and v, or hooks on scores, pattern and z that come after those of the edit"
)
ADVICE_IN_BLOCK = (
    "hooks on the stream, v, scores, pattern or z, or an edit of heads that they leave alone"
)
UNCHANGED = "model.eval(), no mask, and weights that stay the same while the edit is open"
"""What a message advises where a layer's numbers do not follow from its input: one of the first two
where user hooks act at other points of the layer, ``UNCHANGED`` where none do."""


@dataclass(frozen=True, eq=False)
class Edit:
    """New scores for some heads of one layer, and new values where ``values`` is given.

    ``on_tokens`` is called with the tokens of a pass, or with ``None`` where it began with
    embeddings and shows none; it refuses them, or returns a flag or ``None``. ``flags`` is what
    ``scores`` has noticed in the passes so far.
    """

    layer: int
    heads: tuple[int, ...]
    scores: ScoreEdit
    on_tokens: Callable[[PassTokens | None], str | None] | None = None
    values: ValueEdit | None = None
    flags: list[str] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class StreamEdit:
    """Another stream at a hook, ``change(stream)``; user hooks there act on the changed stream."""

    name: str
    change: Hook

    def hook(self, record: OpenEdit, counts: bool) -> PlacedHook:
        """The hook of the edit; the first of several edits ``counts`` the passes."""

        def hook(h: Tensor) -> Tensor | None:
            changed = self.change(h)
            if counts:
                record.count()
            return changed

        return PlacedHook(self.name, hook, "first")


def edit_of_outputs(
    view: ModelView, layer: int, heads: Sequence[int], new: OutputEdit
) -> StreamEdit:
    """Other mixed values for some heads of a layer, whatever they attend to."""

    def change(value: Tensor) -> Tensor:
        z = by_head(value, view.n_heads).clone()
        z[:, :, list(heads)] = new(z[:, :, list(heads)])
        return z.reshape(value.shape)

    return StreamEdit(f"blocks.{layer}.attn.hook_z", change)


@dataclass(eq=False)
class OpenEdit:
    """What ``with remove_term(...) as edit`` gives.

    ``passes`` counts the forward passes that the edit has changed, in all threads; ``reached`` says
    that a pass came to it, also one that was refused.

    ``unedited`` names the hook points of edited layers that show the model's own scores or pattern,
    not the edited ones, because the class computes attention where no hook reaches it; ``hook_z``
    and everything after it are edited in every class. ``flags`` grows with what was noticed in the
    passes that were run.
    """

    heads: tuple[tuple[int, int], ...]
    unedited: tuple[str, ...] = ()
    flags: list[str] = field(default_factory=list)
    passes: int = 0
    reached: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self) -> None:
        """One more pass."""
        with self._lock:
            self.passes += 1

    def require_passes(self, name: str) -> None:
        """Refuse an edit that no pass came to while it was open."""
        ran = self.passes > 0 or self.reached
        expected = "a forward pass inside the with block that it changes"
        instead = "model(tokens) inside the block, as far as the edited layer (a torch.compile "
        instead += "wrapper that ran before it and edit.hooks() do not count)"
        require(ran, f"an edit of {name}", expected=expected, got="none", instead=instead)


@contextmanager
def edited_scores(view: ModelView, edits: Sequence[Edit | StreamEdit]) -> Iterator[OpenEdit]:
    """Run a live model with the scores of some heads, or the stream at some hooks, replaced inside
    ``with``.

    ``edits`` hold at most one :class:`Edit` for each layer, and none beside a :class:`StreamEdit`:
    a pass would be counted twice.

    Raises ``GeometryError`` for a head that an open edit changes already, and during a forward pass
    for a padding mask, a key-value cache, autocast, and tokens that ``on_tokens`` refuses, and on
    exit where no pass was edited; ``ReconstructionError`` where queries, keys, scores or patterns
    are not those that follow from the layer's input.
    """
    arguments, record, scored = PassArguments(view), OpenEdit(edited(edits)), score_edits(edits)
    layers = [LiveLayer(view, edit, arguments, record) for edit in scored]
    record.unedited = tuple(name for layer in layers for name in layer.unedited())
    hooks = [hook for layer in layers for hook in layer.hooks()]
    hooks += stream_hooks(edits, record)
    with ExitStack() as stack:
        stack.enter_context(claimed(view, record.heads))
        if scored:
            stack.enter_context(arguments.watched(sorted({edit.layer for edit in scored})))
        stack.enter_context(attached(view, hooks))
        yield record
    if edits:
        record.require_passes(view.name)


def score_edits(edits: Sequence[Edit | StreamEdit]) -> list[Edit]:
    """The edits among these that change scores."""
    return [edit for edit in edits if isinstance(edit, Edit)]


def stream_hooks(edits: Sequence[Edit | StreamEdit], record: OpenEdit) -> list[PlacedHook]:
    """The hooks of the edits of the stream."""
    changes = [edit for edit in edits if isinstance(edit, StreamEdit)]
    return [edit.hook(record, counts=edit is changes[0]) for edit in changes]


def edited(edits: Sequence[Edit | StreamEdit]) -> tuple[tuple[int, int], ...]:
    """All heads that these edits change."""
    return tuple((edit.layer, head) for edit in score_edits(edits) for head in edit.heads)


def score_of(layer: LayerView, heads: Sequence[int]) -> Float[Tensor, "batch head query key"]:
    """Scores of some heads before any soft cap."""
    scores = scores_of(layer.q[:, :, heads], layer.k[:, :, heads], layer.scale)
    return scores if layer.bias is None else scores + layer.bias[list(heads)]


@torch.no_grad()
def _distance(a: Tensor, b: Tensor) -> Tensor:
    """Squared distance."""
    return (a - b).square().sum()


def _mixed(pattern: Tensor, v: Tensor) -> Float[Tensor, "batch query head d_head"]:
    """Mixed values ``pattern @ v``."""
    return einsum(pattern, v, "b h i j, b j h e -> b i h e")


class _Step(NamedTuple):
    """A layer of the running pass, and the scores of its edited heads: the model's own, and those
    to use."""

    layer: LayerView
    own: Float[Tensor, "batch head query key"]
    new: Float[Tensor, "batch head query key"]


class _Running(threading.local):
    """What the running pass of this thread has shown of a layer: the values that the edit reads
    (``seen``), scores and pattern as they left all user hooks (``left``), and the edit itself
    (``step``)."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A new pass."""
        self.seen: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}
        self.step: _Step | None = None


class LiveLayer:
    """The hooks of one edit of scores. In a pass they fire in the order input, queries, keys,
    values, scores, pattern, z: the first that writes makes the step (:meth:`_begin`), the one at z
    ends it."""

    def __init__(
        self, view: ModelView, edit: Edit, arguments: PassArguments, record: OpenEdit
    ) -> None:
        self.view, self.edit, self.arguments, self.record = view, edit, arguments, record
        # a pass counts once, at the first edited layer
        self.counts = edit.layer == min(layer for layer, _ in record.heads)
        self.listed = isinstance(arguments, HookedArguments)  # a list of hooks, not a with block
        self.heads = list(edit.heads)
        self.prefix = f"blocks.{edit.layer}."
        self.names = view.layer_hooks(edit.layer)
        self.scores, self.pattern, self.z = (
            f"{self.prefix}attn.hook_{n}" for n in ("attn_scores", "pattern", "z")
        )
        self.running = _Running()

    def unedited(self) -> tuple[str, ...]:
        """Hook points that show the model's own values."""
        if self.scores in self.names:
            return ()
        attention = self.view._model.blocks[self.edit.layer].attn
        source = getattr(attention, "original_component", None)
        # a bridge whose wrapped attention has this attribute puts its hooks inside it
        inside = getattr(source, "accepts_pattern_fn", False)
        return () if inside else (self.scores, self.pattern)

    def hooks(self) -> list[PlacedHook]:
        """All hooks of the edit: readers after user hooks, writers before them."""
        names = [name for name in self.names if name not in self.unedited()]
        acts = {self.scores: self._scores, self.pattern: self._pattern, self.z: self._z}
        readers = [PlacedHook(n, self._read(n), "last") for n in names if n != self.z]
        return readers + [PlacedHook(n, a, "first") for n, a in acts.items() if n in names]

    def _read(self, name: str) -> Hook:
        def read(value: Tensor) -> None:
            running = self.running
            if name == self.names[0]:  # the layer's input: a new pass
                running.begin()
            (running.left if name in (self.scores, self.pattern) else running.seen)[name] = value

        return read

    def _begin(self, scores: Tensor | None = None) -> _Step:
        """The layer of the running pass, once everything that the edit reads is there."""
        running, self.record.reached = self.running, True
        if running.step is not None:
            return running.step
        what = f"a forward pass of {self.view.name} inside an edit"
        expected = f"one that reads {self.names[0]} inside it"
        got = "one that began before, or outside of the block"
        instead = "model(tokens) after the edit is open"
        require(self.names[0] in running.seen, what, expected=expected, got=got, instead=instead)
        h = running.seen[self.names[0]]
        tokens = self.arguments.check(h)
        # only the first check of a pass gives its tokens
        if self.edit.on_tokens is not None and (tokens is not None or self.counts):
            self._flag(self.edit.on_tokens(tokens))
        activations = running.seen if scores is None else running.seen | {self.scores: scores}
        keys = h.shape[1] if scores is None else scores.shape[-1]
        what, got = self._what("scores"), f"{keys} keys for {h.shape[1]} tokens"
        instead = "generate(..., use_past_kv_cache=False)"
        require(keys == h.shape[1], what, expected="whole prompts", got=got, instead=instead)
        layer = self.view.layer(self.edit.layer, activations, verify=False)
        self._check_inputs(layer)
        own = score_of(layer, self.heads)
        running.step = _Step(layer, own, self.edit.scores(layer, own))
        self._flag(*self.edit.flags)
        return running.step

    def _flag(self, *flags: str | None) -> None:
        """Tell the reader what was noticed, once."""
        noted = self.record.flags
        noted.extend(flag for flag in dict.fromkeys(flags) if flag and flag not in noted)

    def _scores(self, value: Tensor) -> Tensor:
        """Edited scores after the soft cap, where the model attends by what leaves this point."""
        layer, own, new = self._begin(value)
        scores, allowed = value[:, self.heads], layer.allowed
        # read anew: the score of masked keys is a buffer that no fingerprint counts
        ignore = ignore_of(self.view._layers.parameters.attention(self.edit.layer))
        same_mask = bool((unmasked(scores, ignore) == allowed).all())
        fits, what = same_mask and bool(allowed.diagonal().all()), self._what("mask")
        expected = "one mask for all prompts and heads, under which each token sees itself"
        got, instead = "another, as padding makes it", "prompts of one length without padding mask"
        require(fits, what, expected=expected, got=got, instead=instead, error=ReconstructionError)
        own, new = (soft_cap(s, layer.softcap) for s in (own, new))
        error = torch.where(allowed, scores.detach() - own.detach(), 0.0).abs().max()
        self._close(
            "scores",
            error,
            reconstruction_bound(layer.roundoff, self._size(layer)),
            "the products of hook_q and hook_k",
        )
        return self._moved(value, torch.where(allowed, new - own, 0.0), 1)

    def _pattern(self, value: Tensor) -> Tensor | None:
        """Edited pattern, ``None`` where it follows from edited scores already."""
        layer, own, new = self._begin()
        uncapped = dataclasses.replace(layer, softcap=None)  # the hook holds capped scores
        left = self.running.left.get(self.scores)
        after = (
            None if left is None else uncapped.pattern_of(left[:, self.heads].to(own), self.heads)
        )
        own, new = (layer.pattern_of(s, self.heads) for s in (own, new))
        bound = self._pattern_bound(layer, value)
        return self._settled(
            "pattern",
            value,
            (after, own, new),
            bound,
            1,
            "the softmax of the scores under the model's mask",
        )

    def _z(self, value: Tensor) -> Tensor | None:
        """Edited mixed values, ``None`` where they follow from an edited pattern already; ends the
        step."""
        layer, own, new = self._begin()
        if layer.v is None:
            what = f"layer {layer.layer} of {self.view.name}"
            fail(what, expected="values", got="none", error=UnsupportedModelError)
        v, left = layer.v[:, :, self.heads], self.running.left.get(self.pattern)
        own, new = (_mixed(layer.pattern_of(s, self.heads), v) for s in (own, new))
        after = None if left is None else _mixed(left[:, self.heads].to(v), v)
        z = by_head(value, layer.v.shape[2])
        bound = self._pattern_bound(layer, None) * float(v.detach().abs().max())
        out = self._settled("z", z, (after, own, new), bound, 2, "pattern @ v")
        if self.edit.values is not None:
            out = self._revalued(layer, v, z if out is None else out, out is None)
        self.running.begin()
        if self.counts:
            self.record.count()
        return None if out is None else out.reshape(value.shape)

    def _revalued(self, layer: LayerView, v: Tensor, z: Tensor, obeyed: bool) -> Tensor:
        """Mixed values of edited values, under the pattern that the model attends by; ``obeyed``
        says that the class obeyed the edit at an earlier point."""
        assert self.edit.values is not None
        left = self.running.left.get(self.pattern)
        if obeyed and left is not None:
            pattern = left[:, self.heads].to(v)
        else:
            pattern = layer.pattern_of(self._begin().new, self.heads)
        change = self.edit.values(layer, v) - v
        return self._moved(z, _mixed(pattern, change), 2)

    def _settled(
        self,
        name: str,
        value: Tensor,
        known: tuple[Tensor | None, Tensor, Tensor],
        bound: float,
        axis: int,
        of: str,
    ) -> Tensor | None:
        """``None`` where the class obeyed an earlier point, else the value with the edit in it.
        ``known`` holds the value that follows from the point before (``None`` without one), the
        model's own, and the edited one; ``of`` names what the value is made of."""
        after, own, new = known
        shown = value.detach().index_select(axis, torch.tensor(self.heads, device=value.device))
        obeyed = after is not None and bool(_distance(shown, after) <= _distance(shown, own))
        nearer = after if obeyed and after is not None else own
        self._close(name, (shown - nearer.detach()).abs().max(), bound, of)
        return None if obeyed else self._moved(value, new - own, axis)

    def _moved(self, value: Tensor, change: Tensor, axis: int) -> Tensor:
        """A copy of ``value`` with ``change`` added at the edited heads, which lie on ``axis``."""
        out = value.clone()
        at = (slice(None),) * axis + (self.heads,)
        out[at] = out[at] + change.to(value.dtype)
        return out

    def _check_inputs(self, layer: LayerView) -> None:
        """Compare queries and keys with what the layer makes of its input."""
        for name, project, constant, used in (
            ("queries", layer.project_q, layer.q_constant, layer.q),
            ("keys", layer.project_k, layer.k_constant, layer.k),
        ):
            with torch.no_grad():
                own, rest = project(layer.h)[:, :, self.heads], constant[:, :, self.heads]
                error = (own + rest - used[:, :, self.heads]).abs().max()
                bound = reconstruction_bound(layer.roundoff, float((own.abs() + rest.abs()).max()))
                if float(error) > bound:  # large products that cancel round by their own size
                    size = layer.sizes(name[0])[:, :, self.heads].max()
                    bound = max(bound, reconstruction_bound(layer.roundoff, float(size)))
            self._close(
                name,
                error,
                bound,
                f"what the layer makes of {self.names[0]} (constant + mean + pos + cvec)",
            )

    @torch.no_grad()
    def _size(self, layer: LayerView) -> float:
        """The largest that a score of the edited heads can be (Cauchy-Schwarz), at least 1."""
        size = layer.scale * (
            layer.q[:, :, self.heads].norm(dim=-1).max()
            * layer.k[:, :, self.heads].norm(dim=-1).max()
        )
        return max(float(size if layer.bias is None else size + layer.bias.abs().amax()), 1.0)

    def _pattern_bound(self, layer: LayerView, pattern: Tensor | None) -> float:
        """Largest error allowed of a pattern: scores that are off by e change a probability by at
        most 2 e (its own score, and the sum that it is divided by), in the model's pattern and in
        the recomputed one; and softmax itself rounds numbers up to one, which 32 u covers."""
        roundoff = pattern_roundoff(None if pattern is None else pattern.detach(), layer.roundoff)
        return 4 * reconstruction_bound(roundoff, self._size(layer)) + 32 * roundoff

    def _what(self, name: str) -> str:
        """A value of the edited layer, as a message names it."""
        return f"{name} of layer {self.edit.layer} of {self.view.name}"

    def _close(self, name: str, error: Tensor, bound: float, of: str) -> None:
        """Refuse a value that is not what the edit would split, with the hooks that may have
        changed it."""
        if float(error) <= bound:
            return
        allowed = POINTS_IN_LIST if self.listed else POINTS_IN_BLOCK
        between = hooked_points(self.view, self.prefix, [self.prefix + hook for hook in allowed])
        acting = f", with hooks at {brief(between)}" if between else ""
        what = self._what(name)
        expected, got = f"{of} within {bound:.2g}", f"{float(error):.2g} off{acting}"
        advice = ADVICE_IN_LIST if self.listed else ADVICE_IN_BLOCK
        instead = advice if between else UNCHANGED
        fail(what, expected=expected, got=got, instead=instead, error=ReconstructionError)
