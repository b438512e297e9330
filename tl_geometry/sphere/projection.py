"""Where on the sphere does a norm layer put a state? The formulas of
:func:`tl_geometry.token_paths` (Molina 2023): the point itself, angles along a path, the effect of
an update, coordinates.

LayerNorm without its affine part is ``z = sqrt(d) x A / sqrt(|x A|^2 + d eps)``, A the centring
over d_model: a point of the sphere of radius sqrt(d) inside the hyperplane ``sum z = 0``, up to a
deficit from eps. RMSNorm is the same without the centring and without the hyperplane. The gain
makes an ellipsoid of the sphere and the bias moves it. Angles are radians; an arc on the sphere is
sqrt(d) times its angle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from einops import reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import choice, require
from tl_geometry.models.norms import remove_mean
from tl_geometry.weights.vocabulary import VOCABULARY_CHUNK

NORMS = ("LN", "RMS")


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
    choice(norm_type, NORMS, "norm_type")
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
    require(points.shape[-2] >= 2, "points", expected="at least two states", got=describe(points))
    centred = remove_mean(points.double(), norm_type)
    steps = linalg.angle(centred[..., :-1, :], centred[..., 1:, :])
    net = linalg.angle(centred[..., 0, :], centred[..., -1, :])
    length = steps.sum(-1)
    return PathGeometry(steps, length, net, torch.where(net > 0, length / net, torch.nan))


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
    unknown = torch.full_like(radial, torch.nan)
    radial, across = (torch.where(zero, unknown, x) for x in (radial, across))
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
    mean = reduce(rows.double(), "row d_model -> d_model", "mean")
    centred = rows.double() - mean
    # the squared condition number of the covariance does not harm the leading axes
    variance, vectors = torch.linalg.eigh(centred.mT @ centred)
    axes = linalg.fix_signs(vectors, vectors)[1].flip(-1)[:, :k]
    total = float(variance.clamp(min=0).sum())
    return mean, axes, float(variance[-k:].sum()) / total if total > 0 else math.nan
