"""Edits of a live model: lists of hooks that write the mixed values ``attn.hook_z``
(:class:`LiveEdit`, :func:`edited_attention`). The edits of :mod:`tl_geometry.interventions` are
made of them.

``hook_z`` is live in every TransformerLens class. A head that attends by scores S' and values v' in
place of its own S and v gets

    z' = z + softmax(S') @ v' - softmax(S) @ v

S and v are those of the running pass, as hooks before the edit leave them, so that gradients pass
and terms are those of the stream as it was patched. First ``z = softmax(S) @ v`` is compared with
the model's own z, and its queries and keys with what its input makes of them, within
:func:`~tl_geometry.models.reconstruction.reconstruction_bound`. A padding mask, keys of earlier
tokens, autocast, and hooks on the edited heads do not stand this comparison, and are refused.
Caches inside an edit show the model's own scores and pattern, and the edited z.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import ReconstructionError, require
from tl_geometry.models.attention import Heads, scores_of
from tl_geometry.models.layer_view import LayerView, Scores
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.models.runner import put_on, require_points, take_away
from tl_geometry.models.write_spec import by_head

HookFunction = Callable[[Tensor, Any], Tensor | None]
"""A hook as TransformerLens calls it, with an activation and its hook point."""
NamedHook = tuple[str, HookFunction]
WHOLE = "whole prompts without padding or cached keys"
"""What an edit needs of a pass, as its messages say it."""


class LiveEdit(list[NamedHook]):
    """An edit of a live model: ``with edit: model(tokens)``, or
    ``model.run_with_hooks(tokens, fwd_hooks=edit)``, with the same logits.

    The block adds the hooks of the list, and removes them by their own handles, also on exceptions.
    ``heads`` are the (layer, head) pairs that are edited; ``passes`` counts the forward passes that
    went through all hooks.

    A block raises ``GeometryError`` where the model's weights have changed since the edit was made,
    and at its end where no pass reached the edit.
    """

    def __init__(
        self, view: ModelView, hooks: Iterable[NamedHook], heads: Iterable[tuple[int, int]] = ()
    ) -> None:
        self.view, self.heads = view, tuple(heads)
        self._counts: list[int] = []
        self._opened: list[AbstractContextManager[None]] = []
        super().__init__((name, self._counted(hook)) for name, hook in hooks)
        require_points(view._model.hook_dict, dict(self), view)

    def _counted(self, call: HookFunction) -> HookFunction:
        at = len(self._counts)
        self._counts.append(0)

        def hook(value: Tensor, hook: Any) -> Tensor | None:
            new = call(value, hook)
            self._counts[at] += 1
            return new

        return hook

    @property
    def passes(self) -> int:
        """Forward passes that were edited."""
        return min(self._counts, default=0)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.view.name}, {self.passes} passes edited)"

    def __enter__(self) -> LiveEdit:
        self.view.require_unchanged()
        self._opened.append(block := self.attached())
        block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.pop().__exit__(*error)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The block without a look at the weights, for many edits of one model in a row."""
        points, before = self.view._model.hook_dict, self.passes
        with ExitStack() as stack:
            for name, hook in self:
                # permanent: reset_hooks() of a user takes away those of the user alone
                handle = put_on(points[name], hook, is_permanent=True)
                stack.callback(take_away, points[name], handle)
            yield
        what, expected = f"an edit of {self.view.name}", "a forward pass inside that it changes"
        instead = "model(tokens) inside the block, as far as the edited layer"
        require(self.passes > before, what, expected=expected, got="none", instead=instead)


@dataclass(frozen=True, eq=False)
class RunningHeads:
    """Some heads of a layer in the running pass, as the pass went through it."""

    layer: LayerView
    heads: tuple[int, ...]

    @cached_property
    def total(self) -> Scores:
        """Their own scores, before any soft cap."""
        return self.scores(self.own("q"), self.own("k"))

    def scores(self, q: Heads, k: Heads) -> Scores:
        """Scores of other queries and keys of these heads, ALiBi included."""
        products = scores_of(q, k, self.layer.scale)
        return products if self.bias is None else products + self.bias

    @property
    def bias(self) -> Float[Tensor, "head query key"] | None:
        """What is added to the scores by position (ALiBi)."""
        return None if self.layer.bias is None else self.layer.bias[list(self.heads)]

    def own(self, which: str) -> Heads:
        """Their queries (``"q"``), keys or values."""
        return getattr(self.layer, which)[:, :, list(self.heads)]

    def mixed(self, scores: Scores, v: Heads) -> Heads:
        """``softmax(scores) @ v``."""
        return einsum(self.layer.pattern_of(scores, self.heads), v, "b h i j, b j h e -> b i h e")


NewScores = Callable[[RunningHeads], Scores]
NewValues = Callable[[RunningHeads], Heads]


def edited_attention(
    view: ModelView,
    layer: int,
    heads: Sequence[int],
    scores: NewScores | None = None,
    values: NewValues | None = None,
) -> list[NamedHook]:
    """Hooks under which some heads of a layer attend by other scores, other values, or both (the
    module's formula)."""
    seen: dict[str, Tensor] = {}
    unread = ("hook_pattern", "hook_attn_scores", "hook_z")
    # asked now, which reads the layer: a model cannot run inside its own hooks
    names = [name for name in view.layer_hooks(layer) if not name.endswith(unread)]

    def write(value: Tensor, hook: Any) -> Tensor:
        run = _running(view, layer, tuple(heads), dict(seen))
        seen.clear()
        z, v = by_head(value, view.n_heads).clone(), run.own("v")
        before = run.mixed(run.total, v)
        _require_close(run, view, "mixed values", before, z[:, :, heads])
        new = run.mixed(scores(run) if scores else run.total, values(run) if values else v)
        z[:, :, heads] = z[:, :, heads] + (new - before).to(z.dtype)
        return z.reshape(value.shape)

    # a name is bound now: a loop variable would be the last one in every reader
    readers = [(n, lambda value, hook, n=n: seen.update({n: value})) for n in names]
    return [*readers, (view.z_hooks[layer], write)]


def _running(
    view: ModelView, at: int, heads: tuple[int, ...], seen: dict[str, Tensor]
) -> RunningHeads:
    """The heads of the running pass, whose queries and keys are those of their input."""
    what = f"a forward pass of {view.name} inside an edit"
    lengths = {name.rpartition("_")[2]: value.shape[1] for name, value in seen.items()}
    fits = len({lengths.get(name) for name in ("pre", "q", "k", "v")}) == 1 and "pre" in lengths
    require(fits, what, expected=WHOLE, got=f"positions {lengths}", instead="model(tokens)")
    layer = view.layer(at, seen, verify=False)
    run = RunningHeads(layer, heads)
    for which in "qk":
        with torch.no_grad():
            own = layer.project(layer.h, which) + getattr(layer, f"{which}_constant")
        _require_close(run, view, which, own[:, :, list(heads)], run.own(which))
    return run


@torch.no_grad()
def _require_close(
    run: RunningHeads, view: ModelView, name: str, own: Tensor, model: Tensor
) -> None:
    """Refuse numbers of the edited heads that are not the model's own. Scores that are off by e
    change a probability by at most 2 e (its own score, and the sum that it is divided by), in the
    model's pattern and in the recomputed one; softmax itself rounds numbers up to one, which 32 u
    covers."""
    layer, roundoff, heads = run.layer, run.layer.roundoff, list(run.heads)
    error = float((own - model).abs().max())
    if name in "qk":
        sizes = layer.magnitudes(layer.h, name)
        sizes = layer.sizes_entering(sizes, layer.raw(layer.h, name), name)
        size = float(sizes[:, :, heads].max())
        bound = reconstruction_bound(roundoff, max(size, float(own.abs().max())))
    else:
        # the largest that a score can be (Cauchy-Schwarz), at least 1
        q, k = (run.own(side).norm(dim=-1).max() for side in "qk")
        size = float(layer.scale * q * k + (0.0 if layer.bias is None else layer.bias.abs().max()))
        bound = 4 * reconstruction_bound(roundoff, max(size, 1.0)) + 32 * roundoff
        bound *= float(run.own("v").abs().max())
    what = f"{name} of layer {layer.layer} of {view.name} inside an edit"
    expected, got = f"what its input or scores make, within {bound:.2g}", f"{error:.2g} off"
    instead, kind = f"{WHOLE}, and no other hook on these heads", ReconstructionError
    require(error <= bound, what, expected=expected, got=got, instead=instead, error=kind)


def reread(layer: LayerView, h: Float[Tensor, "..."]) -> LayerView:
    """A layer of the running pass as it would read another stream ``h [batch position d_model]``,
    with everything live: norm, QK-norm, queries, keys and values."""
    raw = {which: layer.raw(h, which) for which in "qkv"}
    return replace(layer, h=h, v=raw["v"], **layer.frozen(h, raw))


def whole_prompts(view: ModelView, layer: int) -> NamedHook:
    """A hook at the pattern of a layer that refuses a pass in which a column is not a position:
    one that goes on after cached keys, or is padded on the left."""

    def check(pattern: Tensor, hook: Any) -> None:
        first, what = pattern[:, :, 0], f"a forward pass of {view.name} inside an edit"
        square = pattern.shape[-1] == pattern.shape[-2]
        # without padding the first token attends to itself alone (an encoder's, to all)
        seen = first[..., 0] > 0 if view.causal else (pattern[..., 0] > 0).any(-1)
        alone = (first[..., 1:] == 0).all(-1) if view.causal else seen
        fits = square and bool((seen & alone).all())
        got = f"a pattern {tuple(pattern.shape)}" + " with masked first tokens" * square
        require(fits, what, expected=WHOLE, got=got, instead="model(tokens)")

    return f"blocks.{layer}.attn.hook_pattern", check
