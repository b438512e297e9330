"""Where on the sphere of the norm does each token travel, layer by layer, and how near does it come
to the token that follows? :func:`token_paths` measures the paths of Molina 2023 (angles, updates,
ranks, coordinates) by the formulas that stand before it.

LayerNorm without its affine part is ``z = sqrt(d) x A / sqrt(|x A|^2 + d eps)``, A the centring
over d_model: a point of the sphere of radius sqrt(d) inside the hyperplane ``sum z = 0``, up to a
deficit from eps. RMSNorm is the same without the centring and without the hyperplane. The gain
makes an ellipsoid of the sphere and the bias moves it. Angles are radians; an arc on the sphere is
sqrt(d) times its angle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import html, linalg
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import UnsupportedModelError, choice, fail, require
from tl_geometry.base.guarded import Guarded
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
from tl_geometry.weights.vocabulary import VOCABULARY_CHUNK, embeddings, output_rows


class NormGeometry(NamedTuple):
    """Where a norm puts its inputs: see :func:`norm_geometry`. ``radius`` is ``|z|``, ``deficit``
    is ``sqrt(d) - radius`` without cancellation; ``degenerate`` inputs, without a direction once
    centred, have ``z = 0``."""

    z: Float[Tensor, "*batch d_model"]
    y: Float[Tensor, "*batch d_model"]
    radius: Float[Tensor, "*batch"]
    deficit: Float[Tensor, "*batch"]
    degenerate: Bool[Tensor, "*batch"]


def norm_geometry(
    x: Float[Tensor, "*batch d_model"],
    gain: Float[Tensor, " d_model"] | None = None,
    bias: Float[Tensor, " d_model"] | None = None,
    eps: float = 1e-5,
    norm_type: str = "LN",
) -> NormGeometry:
    """The point ``z`` on the sphere and ``y = gain z + bias`` on the ellipsoid
    ``sum ((y - bias) / gain)^2 = |z|^2``, and how far z is from the radius sqrt(d), in float64.

    >>> g = norm_geometry(torch.tensor([[1.0, 2.0, 3.0, 6.0], [5.0, 5.0, 5.0, 5.0]]), eps=0.0)
    >>> [round(r, 6) for r in g.radius.tolist()], g.degenerate.tolist()
    ([2.0, 0.0], [False, True])
    """
    choice(norm_type, ("LN", "RMS"), "norm_type")
    require(eps >= 0, "eps", expected="a number of at least 0", got=eps)
    size = x.shape[-1]
    centred = remove_mean(x.double(), norm_type)
    length = torch.linalg.vector_norm(centred, dim=-1)
    # a centred constant vector is a few rounding errors (8 allowed), which are no direction
    rounding = torch.finfo(torch.float64).eps * torch.linalg.vector_norm(x.double(), dim=-1)
    degenerate = length <= 8 * rounding
    length = torch.where(degenerate, 0.0, length)
    scale = (length.square() + size * eps).sqrt()
    z = torch.where(degenerate[..., None], 0.0, size**0.5 * centred / scale[..., None])
    y = z * (1 if gain is None else gain.double()) + (0 if bias is None else bias.double())
    # sqrt(d) - radius with the difference of square roots multiplied out
    deficit = size**0.5 * torch.where(scale > 0, size * eps / (scale * (scale + length)), 1.0)
    return NormGeometry(z, y, torch.linalg.vector_norm(z, dim=-1), deficit, degenerate)


class PathGeometry(NamedTuple):
    """Angles of a path of states seen from the centre of the sphere (radians); ``tortuosity`` is
    ``length / net`` (NaN if net is 0)."""

    steps: Float[Tensor, "*batch layer"]
    length: Float[Tensor, "*batch"]
    net: Float[Tensor, "*batch"]
    tortuosity: Float[Tensor, "*batch"]


def path_geometry(
    points: Float[Tensor, "*batch state d_model"], norm_type: str | None = "LN"
) -> PathGeometry:
    """Step angles between consecutive states, their sum, the angle between the first and the last,
    and the ratio of the two.

    The ratio is at least 1 (triangle inequality on the sphere). NaN where a state is zero after
    centring.

    >>> quarter = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> p = path_geometry(quarter, norm_type="RMS")
    >>> round(float(p.length / p.net), 3)
    2.0
    """
    known = norm_type in ("LN", "RMS", None)
    require(known, "norm_type", expected="'LN', 'RMS' or None", got=repr(norm_type))
    require(points.shape[-2] >= 2, "points", expected="at least two states", got=describe(points))
    centred = remove_mean(points.double(), norm_type)
    steps = linalg.angle(centred[..., :-1, :], centred[..., 1:, :])
    net = linalg.angle(centred[..., 0, :], centred[..., -1, :])
    length = steps.sum(-1)
    return PathGeometry(steps, length, net, linalg.ratio(length, net))


def update_split(
    state: Float[Tensor, "*batch d_model"],
    update: Float[Tensor, "*batch d_model"],
    norm_type: str | None = "LN",
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """An update u of a state h (both centred for ``"LN"``) as seen from the centre: the radial part
    ``<u, h>/|h|``, the length of the tangential part, and the angle in radians by which u turns h.
    NaN where h is zero.

    Only the tangential part moves the point on the sphere.

    >>> state, update = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])
    >>> [round(float(v), 3) for v in update_split(state, update, norm_type="RMS")]
    [1.0, 3.0, 0.785]
    """
    h, u = remove_mean(state.double(), norm_type), remove_mean(update.double(), norm_type)
    direction, zero = linalg.normalize_rows(h)
    radial = (u * direction).sum(-1)
    across = torch.linalg.vector_norm(u - radial.unsqueeze(-1) * direction, dim=-1)
    radial, across = (torch.where(zero, torch.nan, x) for x in (radial, across))
    return radial, across, linalg.angle(h, h + u)


def token_approach(
    points: Float[Tensor, "*batch d_model"],
    vocabulary: Float[Tensor, "d_vocab d_model"],
    target: Int[Tensor, "*batch"],
    norm_type: str | None = "LN",
) -> tuple[Float[Tensor, "*batch"], Int[Tensor, "*batch"]]:
    """Angle (radians) between each state and the direction of its target token, and the target's
    rank among all tokens by angle (1 is the nearest).

    ``vocabulary`` holds one direction per token (embedding or unembedding rows); both sides are
    centred for ``"LN"``. By chance the angle is near pi/2 and the rank near ``(d_vocab + 1) / 2``.
    A zero state gives NaN and rank 0; the vocabulary is read in chunks.

    >>> state, vocabulary = torch.tensor([1.0, 0.2]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> angle, rank = token_approach(state, vocabulary, torch.tensor(1), norm_type="RMS")
    >>> round(float(angle), 3), int(rank)
    (0.197, 1)
    """
    unit, zero = linalg.normalize_rows(remove_mean(points.double(), norm_type))
    targets = remove_mean(vocabulary[target].double(), norm_type)
    target_cosine = (unit * linalg.normalize_rows(targets)[0]).sum(-1, keepdim=True)
    nearer, start = torch.zeros_like(target), 0
    for rows in vocabulary.split(VOCABULARY_CHUNK):
        tokens = linalg.normalize_rows(remove_mean(rows.double(), norm_type))[0]
        ids = torch.arange(start, start + len(rows), device=target.device)
        # the target is left out: its two cosines, computed in two ways, may round differently
        is_other = ids != target.unsqueeze(-1)
        nearer += ((unit @ tokens.mT > target_cosine) & is_other).sum(-1)
        start += len(rows)
    return linalg.angle(unit, targets), torch.where(zero, 0, nearer + 1)


def principal_axes(
    rows: Float[Tensor, "row d_model"], k: int = 3
) -> tuple[Float[Tensor, " d_model"], Float[Tensor, "d_model rank"], float]:
    """The mean of rows, their ``k`` principal axes as columns, each with its largest-magnitude
    coordinate positive, and the share of the variance that the axes hold (NaN without variance).

    >>> mean, axes, share = principal_axes(torch.tensor([[0.0, 0.0], [2.0, 2.0]]), 1)
    >>> [round(v, 4) for v in axes[:, 0].tolist()], round(share, 6)
    ([0.7071, 0.7071], 1.0)
    """
    mean = rows.mean(0, dtype=torch.float64)
    centred = (some.double() - mean for some in rows.split(VOCABULARY_CHUNK))
    # the squared condition number of the covariance does not harm the leading axes
    variance, vectors = torch.linalg.eigh(torch.stack([x.mT @ x for x in centred]).sum(0))
    axes = linalg.fix_signs(vectors, vectors)[1].flip(-1)[:, :k]
    total = float(variance.clamp(min=0).sum())
    return mean, axes, float(variance[-k:].sum()) / total if total > 0 else math.nan


UPDATES = ("attention", "mlp")
"""The two updates of a block, in the order of the axis ``update``."""
SPLIT = ("radial", "tangential", "turn")
"""How an update is split."""
NO_UPDATES = "attention and MLP outputs do not add up to the states: no updates"
NO_HEAD = "output head not trained: next tokens are sought in the embedding"
HELD, MOST = 16, 2**31
"""Tensors of the size of all states that exist at once in float64 (states, outputs of attention and
MLP, and what is computed from them), and the bytes that they may take."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenPaths(Guarded, Result):
    """Paths of every token of a prompt set through the residual stream states, as angles in radians
    seen from the centre of the sphere.

    ``steps[..., l]`` is the angle between states l and l + 1; ``length`` their sum, ``net`` the
    angle from first to last state, ``tortuosity`` the ratio of the two. ``radial``, ``tangential``
    (lengths in units of the stream) and ``turn`` (an angle) split the updates of attention (0 on
    the last axis) and MLP (1), each relative to the stream it is added to; NaN where the model's
    updates do not add up to its states, as in post-norm models. ``angle`` is the angle between each
    state and the next token's unembedding row (by chance near pi/2), ``rank`` that token's rank
    among all tokens by angle (1: the nearest; by chance half the vocabulary). The last token has no
    next: its angle is NaN, its rank 0. ``coordinates`` are on three principal axes that were fitted
    on ``fitted_on`` and hold the share ``shown`` of its variance.
    """

    tokens: Int[Tensor, "batch position"]
    str_tokens: tuple[tuple[str, ...], ...]
    steps: Float[Tensor, "batch position layer"]
    length: Float[Tensor, "batch position"]
    net: Float[Tensor, "batch position"]
    tortuosity: Float[Tensor, "batch position"]
    radial: Float[Tensor, "batch position layer 2"]
    tangential: Float[Tensor, "batch position layer 2"]
    turn: Float[Tensor, "batch position layer 2"]
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
        splits = [getattr(self, name)[..., u] for u in (0, 1) for name in SPLIT]
        # the last state has no step and no update
        steps = [torch.nn.functional.pad(x, (0, 1), value=torch.nan) for x in (self.steps, *splits)]
        whole = (self.length, self.net, self.tortuosity)
        of_token = [x[..., None].expand_as(self.angle) for x in whole]
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
    the token that follows it: the rank of its angle among all tokens.

    States are compared by their angles, after centring where the model's norm centres, so that the
    norm's scale drops out. The next token's direction is its unembedding row (final gain folded
    in, less the mean row of the vocabulary, which moves all logits alike); for models without a
    trained output head it is the embedding row.

    Args:
        model: a TransformerLens model.
        tokens: a string, strings of equal token length, ids or :class:`TokenWindows`.
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
    # float32 is enough for axes, and a whole vocabulary in float64 is large
    chunks = rows.flatten(0, -2).split(VOCABULARY_CHUNK)
    units = torch.cat([_on_sphere(view, some).float() for some in chunks])
    mean, axes, shown = principal_axes(units)
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
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    flags = [] if basis is None else [*basis.remarks(view)]
    flags += [] if view.head_trained else [NO_HEAD]
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
    return linalg.normalize_rows(remove_mean(states.double(), view.norm))[0]


def _measured(view: ModelView, tokens: Tensor, vocabulary: Tensor) -> dict[str, Tensor]:
    """The tensors of :class:`TokenPaths` but the coordinates, and the states ``h [batch position
    state d_model]`` in float64."""
    # one pass for all hooks: states and updates of different runs may not add up
    hooks = (*view.state_hooks, *view.attention_hooks)
    try:
        seen = view.activations(tokens, (*hooks, *view.mlp_hooks))
    except UnsupportedModelError:  # attention-only blocks have no MLP output
        seen = view.activations(tokens, hooks)

    def stacked(names: Sequence[str]) -> Tensor:
        return torch.stack([seen[name].double() for name in names], 2)

    h, attention = stacked(view.state_hooks), stacked(view.attention_hooks)
    has_mlp = view.mlp_hooks[0] in seen
    mlp = stacked(view.mlp_hooks) if has_mlp else torch.zeros_like(attention)
    before = h[:, :, :-1]
    error = (before + attention + mlp - h[:, :, 1:]).abs().max()
    # a norm after the block gives an error as large as a state, far above the rounding of a sum
    if float(error) > reconstruction_bound(linalg.unit_roundoff(view.dtype), float(h.abs().max())):
        attention = mlp = torch.full_like(attention, torch.nan)
    # each update relative to the stream that it is added to: the MLP's after attention's
    streams = torch.stack([before, before + attention], -2)
    split = update_split(streams, torch.stack([attention, mlp], -2), view.norm)
    # the last token has no next: token 0 is a placeholder, whose numbers are masked
    target = torch.nn.functional.pad(tokens[:, 1:], (0, 1)).to(h.device)
    target = target.unsqueeze(-1).expand(h.shape[:-1])
    angle, rank = token_approach(h, vocabulary, target, view.norm)
    angle[:, -1], rank[:, -1] = torch.nan, 0
    path = path_geometry(h, view.norm)._asdict()
    return {"h": h, "angle": angle, "rank": rank, **dict(zip(SPLIT, split, strict=True)), **path}
