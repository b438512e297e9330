"""Path patching: :func:`path` lets only chosen readers of the stream see what heads would write
with other mixed values; every other reader reads the running stream."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks
from tl_geometry.base.errors import require
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.interventions.head_edits import (
    BY,
    Replacement,
    given_positions,
    known_prompts,
    one_hot,
)
from tl_geometry.interventions.prompts import Edit, Known
from tl_geometry.interventions.terms import heads_by_layer
from tl_geometry.models.edits import (
    NamedHook,
    RunningHeads,
    edited_attention,
    reread,
    whole_prompts,
)
from tl_geometry.models.mlp import live_mlp
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import known_view
from tl_geometry.models.write_spec import attention_output, by_head, require_decoder, writing_of

Stream = Callable[
    [Float[Tensor, "batch position d_model"]], Float[Tensor, "batch position d_model"]
]
"""What a receiver reads in place of the running stream."""


@dataclass(frozen=True, eq=False)
class Receivers:
    """Readers of the stream: for each layer and side (``"q"``, ``"k"``, ``"v"``) the heads that
    receive, the blocks whose MLP does, and whether the output does."""

    heads: Mapping[int, Mapping[str, tuple[int, ...]]]
    mlps: tuple[int, ...]
    output: bool

    @classmethod
    def of(cls, view: ModelView, names: str | Sequence[str]) -> Receivers:
        """From names: ``"L5H1<q>"``, ``"L5H1<k>"`` or ``"L5H0-2<k>"`` (all heads that share the
        key), ``"L5H1<v>"``, ``"mlp5"``, ``"output"``."""
        given = [names] if isinstance(names, str) else list(names)
        require(len(given) > 0, "receivers", expected="at least one input", got="none")
        heads: dict[int, dict[str, tuple[int, ...]]] = {}
        mlps: set[int] = set()
        for name in given:
            pattern = r"L(\d+)H(\d+)(?:-(\d+))?<([qkv])>|mlp(\d+)|output"
            match = re.fullmatch(pattern, str(name))
            found: Any = match.groups() if match else (view.n_layers, 0, None, None, None)
            layer, head, end, which, mlp = found
            fits = int(layer or mlp or 0) < view.n_layers and int(head or 0) < view.n_heads
            fits = fits and (mlp is None or live_mlp(view, int(mlp)) is not None)
            size = view.n_heads // view.key_heads(int(layer)) if fits and which in ("k", "v") else 1
            first = int(head or 0) // size * size
            # a range is that of all heads that share the input
            fits = fits and (end is None or (int(head), int(end)) == (first, first + size - 1))
            expected = 'inputs of this model, as "L1H0<q>", "L1H0<k>", "L1H0<v>", "mlp1", "output"'
            require(fits, "receivers", expected=expected, got=repr(name))
            if mlp is not None:
                mlps.add(int(mlp))
            elif which is not None:
                sides = heads.setdefault(int(layer), {})
                sides[which] = (*sides.get(which, ()), *range(first, first + size))
        return cls(heads, tuple(sorted(mlps)), "output" in given)

    def last_sender(self, view: ModelView) -> int:
        """The last block whose heads all receivers read."""
        before = [layer - 1 for layer in self.heads] + [view.n_layers - 1] * self.output
        before += [mlp - bool(live_mlp(view, mlp).parallel) for mlp in self.mlps]  # type: ignore[union-attr]
        return min(before)


def path(
    model: ModelLike,
    senders: Any,
    receivers: str | Sequence[str],
    *,
    by: str = "mean",
    reference: TokensLike | Known | None = None,
    counterfactual: TokensLike | None = None,
    positions: Any = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> Edit:
    """Path patching: only ``receivers`` read what other values of the heads ``senders`` write.

    Every other reader reads the running stream x; a receiver reads ``x + write(z') - write(z)``,
    the direct edge from the senders alone. ``write`` is what the senders' block adds, after the
    norm behind attention where there is one. Everything behind a receiver is live, norms included.
    Where every reader of a sender is a receiver, this is the knockout.

    Args:
        receivers: ``"L5H1<q>"``, ``"L5H1<k>"`` and ``"L5H1<v>"`` (of all heads that share them),
            ``"mlp5"``, ``"output"``, one or several.
        by, reference, counterfactual, seed: as in :func:`~tl_geometry.interventions.heads`.
        positions: where the receivers read it, as in ``heads``.

    Raises ``GeometryError`` for a sender that does not come before every receiver, and for unknown
    inputs; ``UnsupportedModelError`` for encoders.

    Sources: Wang et al. 2022, arXiv:2211.00593; Goldowsky-Dill et al. 2023, arXiv:2304.05969.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> with tlg.interventions.path(model, "L0H3", ["L1H2<q>", "mlp1"], by="zero") as edit:
    ...     logits = model(tlg.zoo.default_windows(model, 16, n=2).tokens)
    """
    view = known_view(model)
    require_decoder(view, f"paths of {view.name}")
    checks.choice(by, BY, "by")
    chosen = checks.heads(senders, view.n_layers, view.n_heads)
    to, positions = Receivers.of(view, receivers), given_positions(positions)
    known = known_prompts(view, by, reference, counterfactual, prepend_bos)
    last = to.last_sender(view)
    late = [checks.head_name(head) for head in chosen if head[0] > last]
    require(not late, "senders", expected="heads that write before every receiver reads", got=late)

    def make(known: Known | None) -> list[NamedHook]:
        new, written_more = Replacement(by, known, {}, seed, positions), dict[int, Tensor]()

        def stream(x: Float[Tensor, "batch position d_model"]) -> Tensor:
            other = x + torch.stack(list(written_more.values())).sum(0).to(x)
            return torch.where(new.where(x), other, x)

        senders = heads_by_layer(chosen)
        hooks = [*new.hooks(view.z_hooks[at] for at in senders), whole_prompts(view, min(senders))]
        hooks += [_sender(view, at, some, new, written_more) for at, some in senders.items()]
        return [*hooks, *_receiving(view, to, stream)]

    options: dict[str, Any] = {"senders": chosen, "receivers": receivers, "by": by, "seed": seed}
    options |= {"reference": known, "positions": positions}
    pool = [head for head in checks.heads(None, view.n_layers, view.n_heads) if head[0] <= last]
    together, again = by == "prompt", partial(path, model=view, **options)
    return Edit(view, make, known=known, heads=chosen, pool=pool, together=together, again=again)


def _sender(
    view: ModelView,
    layer: int,
    some: Sequence[int],
    new: Replacement,
    written_more: dict[int, Tensor],
) -> NamedHook:
    """Notes ``write(z') - write(z)`` of the senders of a block."""
    name = view.z_hooks[layer]

    def read(value: Tensor, hook: Any) -> None:
        z, other = (by_head(x, view.n_heads) for x in (value, new.of(name, value)))
        other = torch.where(one_hot(some, view.n_heads, value)[:, None], other, z)
        written_more[layer] = written(view, layer, other) - written(view, layer, z)

    return name, read


def written(
    view: ModelView, layer: int, z: Float[Tensor, "batch position head d_head"]
) -> Float[Tensor, "batch position d_model"]:
    """What attention adds to the stream with some mixed values."""
    out = attention_output(view, layer, {view.z_hooks[layer]: z})
    after = writing_of(view).blocks[layer].after_attention
    return out if after is None else after.apply(out)


def _receiving(view: ModelView, to: Receivers, stream: Stream) -> list[NamedHook]:
    """Hooks under which the receivers read another stream."""

    def side(run: RunningHeads, which: str) -> Tensor:
        receivers = to.heads[run.layer.layer].get(which)
        if receivers is None:
            return run.own(which)
        there = getattr(reread(run.layer, stream(run.layer.h)), which)
        receives = one_hot(receivers, view.n_heads, there)[list(run.heads), None]
        return torch.where(receives, there[:, :, list(run.heads)], run.own(which))

    def scores(run: RunningHeads) -> Tensor:
        return run.scores(side(run, "q"), side(run, "k"))

    hooks: list[NamedHook] = []
    for layer, sides in sorted(to.heads.items()):
        some = sorted({head for of in sides.values() for head in of})
        hooks += edited_attention(view, layer, some, scores, partial(side, which="v"))
    for at in to.mlps:
        hooks += _mlp_hooks(view, at, stream)
    if to.output:
        hooks.append((view.state_hooks[-1], lambda value, hook: stream(value)))
    return hooks


def _mlp_hooks(view: ModelView, at: int, stream: Stream) -> list[NamedHook]:
    """Hooks under which an MLP reads another stream: readers of its input, and a writer of its
    output."""
    seen: dict[str, Tensor] = {}
    mlp, name = live_mlp(view, at), writing_of(view).blocks[at].mlp_hook
    assert mlp is not None
    assert name is not None

    def write(value: Tensor, hook: Any) -> Tensor:
        x = seen["pre"]
        if not mlp.parallel:
            x = x + written(view, at, by_head(seen["z"], view.n_heads)).to(x)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        seen.clear()
        return value + (mlp.apply(stream(x)) - mlp.apply(x)).to(value)

    readers: list[NamedHook] = [
        (view.state_hooks[at], lambda value, hook: seen.__setitem__("pre", value)),
        (view.z_hooks[at], lambda value, hook: seen.__setitem__("z", value)),
    ]
    return [*readers, (name, write)]
