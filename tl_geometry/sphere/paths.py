"""Where does each token travel on the sphere of the norm, layer by layer, and how near does it come
to the token that follows? :func:`token_paths` measures the paths of Molina 2023: angles, updates,
ranks, coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tl_geometry.base import html
from tl_geometry.base.errors import UnsupportedModelError, fail
from tl_geometry.base.linalg import unit_roundoff
from tl_geometry.base.results import Result
from tl_geometry.corpus.sources import as_tokens
from tl_geometry.corpus.token_windows import TokensLike
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.batches import batch_of
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.norms import remove_mean
from tl_geometry.models.reader import as_view
from tl_geometry.models.reconstruction import reconstruction_bound
from tl_geometry.sphere import projection
from tl_geometry.weights.vocabulary import VOCABULARY_CHUNK, embeddings, output_rows

UPDATES = ("attention", "mlp")
"""The two updates of a block, in the order of the axis ``update``."""
SPLIT = ("radial", "tangential", "turn")
"""Fields ``[update layer batch position]``; all other tensors have the contexts first."""
NO_UPDATES = "attention and MLP outputs do not add up to the states: no updates"
NO_HEAD = "output head not trained: next tokens are sought in the embedding"
HELD, MOST = 16, 2**31
"""Tensors of the size of all states that exist at once in float64 (states, outputs of attention and
MLP, and what is computed from them), and the bytes that they may take."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenPaths(Result):
    """Paths of every token of a prompt set through the residual stream states, as angles in radians
    seen from the centre of the sphere.

    ``steps[..., l]`` is the angle between states l and l + 1; ``length`` their sum, ``net`` the
    angle from first to last state, ``tortuosity`` the ratio of the two. ``radial``, ``tangential``
    (lengths in units of the stream) and ``turn`` (an angle) split the updates of attention and MLP,
    each relative to the stream it is added to; NaN where the model's updates do not add up to its
    states, as in post-norm models. ``angle`` is the angle between each state and the next token's
    unembedding row (by chance near pi/2), ``rank`` that token's rank among all tokens by angle (1:
    the nearest; by chance half the vocabulary). The last token has no next: its angle is NaN, its
    rank 0. ``coordinates`` are on three principal axes that were fitted on ``fitted_on`` and hold
    the share ``shown`` of its variance.
    """

    tokens: Int[Tensor, "batch position"]
    str_tokens: tuple[tuple[str, ...], ...]
    steps: Float[Tensor, "batch position layer"]
    length: Float[Tensor, "batch position"]
    net: Float[Tensor, "batch position"]
    tortuosity: Float[Tensor, "batch position"]
    radial: Float[Tensor, "2 layer batch position"]
    tangential: Float[Tensor, "2 layer batch position"]
    turn: Float[Tensor, "2 layer batch position"]
    angle: Float[Tensor, "batch position state"]
    rank: Int[Tensor, "batch position state"]
    coordinates: Float[Tensor, "batch position state 3"]
    shown: float
    fitted_on: str

    def columns(self) -> Sequence[str]:
        updates = [f"{name}_{update}" for update in UPDATES for name in SPLIT]
        of_state = ("next_angle", "next_rank", "step", *updates)
        return ["context", "position", "token", "state", *of_state, "length", "net", "tortuosity"]

    def rows(self) -> Sequence[Sequence[object]]:
        pattern = "layer batch position -> batch position layer"
        splits = [rearrange(getattr(self, name)[u], pattern) for u in (0, 1) for name in SPLIT]
        # the last state has no step and no update
        steps = [torch.nn.functional.pad(x, (0, 1), value=torch.nan) for x in (self.steps, *splits)]
        of_token = [
            x[..., None].expand_as(self.angle) for x in (self.length, self.net, self.tortuosity)
        ]
        columns = (x.flatten().tolist() for x in (self.angle, self.rank, *steps, *of_token))
        places = product(*(range(size) for size in self.angle.shape))
        return [
            [b, t, self.str_tokens[b][t], state, *row]
            for (b, t, state), *row in zip(places, *columns, strict=True)
        ]


def token_paths(
    model: ModelLike,
    tokens: TokensLike,
    basis: PositionContext | None = None,
    *,
    prepend_bos: bool | None = None,
    batch_size: int | None = None,
) -> TokenPaths:
    """Where each token travels on the sphere of the norm, layer by layer, and how near it comes to
    the token that follows it.

    States are compared by their angles, after centring where the model's norm centres, so that the
    norm's scale drops out. The next token's direction is its unembedding row (final gain folded
    in); for models without a trained output head it is the embedding row.

    Args:
        model: a TransformerLens model.
        tokens: a string, strings of equal token length (then ``prepend_bos`` is needed), ids or
            :class:`TokenWindows`.
        basis: fit the three principal axes on the sampled states of this basis instead of the token
            embeddings.
        batch_size: contexts of one forward pass; at most as many as 2 GiB hold.

    Raises ``GeometryError`` for a basis of another model, of normalised states or without samples.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> tlg.token_paths(model, [[0, 5, 9, 7]]).coordinates.shape  # context, position, state, axis
    torch.Size([1, 4, 5, 3])
    """
    view = as_view(model)
    if basis is not None:
        require_basis(basis)
        basis.check_model(view)
        basis.require_raw("token_paths")
    fitted_on = "token embeddings" if basis is None else "sampled states"
    rows = embeddings(view) if basis is None else basis.sample_states
    if rows is None:
        instead = "decompose(..., keep=32)"
        fail("basis", expected="sampled states", got="a basis without", instead=instead)
    mean, axes, shown = projection.principal_axes(_on_sphere(view, rows.flatten(0, -2)))
    windows = as_tokens(view, tokens, prepend_bos=prepend_bos)
    length = windows.tokens.shape[1]
    per_state = 8 * (HELD * view.d_model + min(view.d_vocab, VOCABULARY_CHUNK))
    most = max(1, MOST // (per_state * (view.n_layers + 1) * length))
    size, vocabulary = min(batch_of(batch_size, length, view.device), most), output_rows(view)
    parts: list[dict[str, Tensor]] = []
    for ids in windows.tokens.split(size):
        found = _measured(view, ids, vocabulary)
        points = _on_sphere(view, found.pop("h"))
        found["coordinates"] = (points - mean.to(points)) @ axes.to(points)
        parts.append({name: value.cpu() for name, value in found.items()})
    joined = {n: torch.cat([p[n] for p in parts], 2 if n in SPLIT else 0) for n in parts[0]}
    flags = [] if view.head_trained else [NO_HEAD]
    flags += [NO_UPDATES] if bool(joined["radial"].isnan().all()) else []
    texts = (view.decode(row.tolist()) for row in windows.tokens)
    return TokenPaths(
        provenance=view.provenance(windows, sources=("molina2023",), flags=tuple(flags)),
        tokens=windows.tokens.cpu(),
        str_tokens=tuple(tuple(html.token_text(text) for text in row) for row in texts),
        shown=shown,
        fitted_on=fitted_on,
        **joined,
    )


def _on_sphere(view: ModelView, states: Float[Tensor, "*batch d_model"]) -> Tensor:
    """States at unit length: axes describe directions, whatever the norm of a state."""
    return torch.nn.functional.normalize(remove_mean(states.double(), view.norm), dim=-1)


def _measured(view: ModelView, tokens: Tensor, vocabulary: Tensor) -> dict[str, Tensor]:
    """The tensors of :class:`TokenPaths` but the coordinates, and the states ``h [batch position
    state d_model]`` in float64."""
    # one pass for all hooks: states and updates of different runs may not add up
    hooks = (*view.state_hooks, *view.attention_hooks)
    try:
        seen = view.activations(tokens, (*hooks, *view.mlp_hooks))
    except UnsupportedModelError:  # attention-only blocks have no MLP output
        seen = view.activations(tokens, hooks)
    named = (view.state_hooks, view.attention_hooks, [x for x in view.mlp_hooks if x in seen])
    of = [[seen[name].double() for name in names] for names in named]
    h, attention = torch.stack(of[0], 2), torch.stack(of[1], 2)
    mlp = torch.stack(of[2], 2) if of[2] else torch.zeros_like(attention)
    before = h[:, :, :-1]
    error = (before + attention + mlp - h[:, :, 1:]).abs().max()
    # a norm after the block gives an error as large as a state, far above the rounding of a sum
    if float(error) > reconstruction_bound(unit_roundoff(view.dtype), float(h.abs().max())):
        attention = mlp = torch.full_like(attention, torch.nan)
    # each update relative to the stream that it is added to: the MLP's after attention's
    streams, updates = torch.stack([before, before + attention]), torch.stack([attention, mlp])
    pattern = "update batch position layer -> update layer batch position"
    split = [rearrange(x, pattern) for x in projection.update_split(streams, updates, view.norm)]
    # the last token has no next: token 0 is a placeholder, whose numbers are masked
    target = torch.nn.functional.pad(tokens[:, 1:], (0, 1)).to(h.device)
    target = target.unsqueeze(-1).expand(h.shape[:-1])
    angle, rank = projection.token_approach(h, vocabulary, target, view.norm)
    angle[:, -1], rank[:, -1] = torch.nan, 0
    path = projection.path_geometry(h, view.norm)._asdict()
    return {"h": h, "angle": angle, "rank": rank, **dict(zip(SPLIT, split, strict=True)), **path}
