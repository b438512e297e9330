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

import importlib
from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.checks import describe
from tl_geometry.base.errors import choice, fail, require
from tl_geometry.models.norms import remove_mean
from tl_geometry.weights.readout import VOCABULARY_CHUNK

NORMS = ("LN", "RMS")


class NormGeometry(NamedTuple):
    """Where a norm puts its inputs: see :func:`norm_geometry`. Residuals are relative;
    ``degenerate`` inputs, without a direction once centred, have ``z = 0``.

    ``radius`` is ``|z|``, ``deficit`` is ``sqrt(d) - radius`` without cancellation.
    ``hyperplane_residual`` is ``|sum z| / (sqrt(d) |z|)`` (NaN for RMSNorm). ``ellipsoid_residual``
    is ``|sum ((y - bias) / gain)^2 - radius^2| / d``. Both recover z from y, except at coordinates
    whose gain is zero, which take z itself.
    """

    z: Float[Tensor, "*batch d_model"]
    y: Float[Tensor, "*batch d_model"]
    radius: Float[Tensor, "*batch"]
    deficit: Float[Tensor, "*batch"]
    hyperplane_residual: Float[Tensor, "*batch"]
    ellipsoid_residual: Float[Tensor, "*batch"]
    degenerate: Bool[Tensor, "*batch"]


def norm_geometry(
    x: Float[Tensor, "*batch d_model"],
    gain: Float[Tensor, " d_model"] | None = None,
    bias: Float[Tensor, " d_model"] | None = None,
    eps: float = 1e-5,
    norm_type: str = "LN",
) -> NormGeometry:
    """The point ``z`` on the sphere, ``y = gain z + bias`` on the ellipsoid, and how far each is
    from its ideal surface, in float64.

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
    centred = torch.where(degenerate.unsqueeze(-1), 0.0, centred)
    length = torch.where(degenerate, 0.0, length)
    scale = (length.square() + size * eps).sqrt()
    z = size**0.5 * centred / torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
    gain = torch.ones_like(z) if gain is None else gain.double().expand_as(z)
    bias = torch.zeros_like(z) if bias is None else bias.double().expand_as(z)
    y = gain * z + bias
    radius = torch.linalg.vector_norm(z, dim=-1)
    # sqrt(d) - radius with the difference of square roots multiplied out
    deficit = size**0.5 * torch.where(scale > 0, size * eps / (scale * (scale + length)), 1.0)
    # a zero gain loses the coordinate: z itself stands in, to avoid a division by zero
    recovered = torch.where(gain == 0, z, (y - bias) / torch.where(gain == 0, 1.0, gain))
    ellipsoid = (recovered.square().sum(-1) - radius.square()).abs() / size
    plane = recovered.sum(-1).abs() / (size**0.5 * torch.where(radius > 0, radius, 1.0))
    return NormGeometry(
        z=z,
        y=y,
        radius=radius,
        deficit=deficit,
        hyperplane_residual=plane if norm_type == "LN" else torch.full_like(plane, torch.nan),
        ellipsoid_residual=ellipsoid,
        degenerate=degenerate,
    )


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


class UpdateSplit(NamedTuple):
    """An update seen from the centre: signed length along the state, length across it, and the
    angle in radians by which it turns the state."""

    radial: Float[Tensor, "*batch"]
    tangential: Float[Tensor, "*batch"]
    turn: Float[Tensor, "*batch"]


def update_split(
    state: Float[Tensor, "*batch d_model"],
    update: Float[Tensor, "*batch d_model"],
    norm_type: str | None = "LN",
) -> UpdateSplit:
    """Radial part ``<u, h>/|h|`` and tangential part of an update u of a state h (both centred for
    ``"LN"``). NaN where h is zero.

    Only the tangential part moves the point on the sphere.

    >>> state, update = torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0])
    >>> [round(float(v), 3) for v in update_split(state, update, norm_type="RMS")]
    [1.0, 3.0, 0.785]
    """
    h, u = remove_mean(state.double(), norm_type), remove_mean(update.double(), norm_type)
    direction, zero = linalg.normalize_rows(h)
    radial = (u * direction).sum(-1)
    across = torch.linalg.vector_norm(u - radial.unsqueeze(-1) * direction, dim=-1)
    return UpdateSplit(
        torch.where(zero, torch.nan, radial),
        torch.where(zero, torch.nan, across),
        linalg.angle(h, h + u),
    )


class Approach(NamedTuple):
    """The angle (radians) between a state and a token's direction, and the token's rank among all
    tokens by angle (1 is the nearest)."""

    angle: Float[Tensor, "*batch"]
    rank: Int[Tensor, "*batch"]


def token_approach(
    points: Float[Tensor, "*batch d_model"],
    vocabulary: Float[Tensor, "d_vocab d_model"],
    target: Int[Tensor, "*batch"],
    norm_type: str | None = "LN",
) -> Approach:
    """Angle between each state and the direction of its target token, and the target's rank among
    all tokens by angle.

    ``vocabulary`` holds one direction per token (embedding or unembedding rows); both sides are
    centred for ``"LN"``. By chance the angle is near pi/2 and the rank near ``(d_vocab + 1) / 2``.
    A zero state gives NaN and rank 0; the vocabulary is read in chunks.

    >>> state, vocabulary = torch.tensor([1.0, 0.2]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> a = token_approach(state, vocabulary, torch.tensor(1), norm_type="RMS")
    >>> round(float(a.angle), 3), int(a.rank)
    (0.197, 1)
    """
    low, high = int(target.min()), int(target.max())
    expected = f"token ids from 0 to {len(vocabulary) - 1}"
    in_range = low >= 0 and high < len(vocabulary)
    require(in_range, "target", expected=expected, got=f"{low} to {high}")
    unit, zero = linalg.normalize_rows(remove_mean(points.double(), norm_type))
    targets = remove_mean(vocabulary[target].double(), norm_type)
    angle = linalg.angle(unit, targets)
    target_cosine = (unit * linalg.normalize_rows(targets)[0]).sum(-1)
    nearer = torch.zeros_like(target)
    for start in range(0, len(vocabulary), VOCABULARY_CHUNK):
        vocabulary_chunk = vocabulary[start : start + VOCABULARY_CHUNK].double()
        unit_tokens = linalg.normalize_rows(remove_mean(vocabulary_chunk, norm_type))[0]
        ids = torch.arange(start, start + len(unit_tokens), device=target.device)
        # the target is left out: its two cosines, computed in two ways, may round differently
        is_nearer = (unit @ unit_tokens.mT > target_cosine.unsqueeze(-1)) & (
            ids != target.unsqueeze(-1)
        )
        nearer += is_nearer.sum(-1)
    return Approach(angle, torch.where(zero, 0, nearer + 1))


class Projection(NamedTuple):
    """Principal axes: their centre, the axes as orthonormal columns, and the share of the variance
    along each."""

    mean: Float[Tensor, " d_model"]
    axes: Float[Tensor, "d_model rank"]
    share: Float[Tensor, " rank"]

    def __call__(self, points: Float[Tensor, "*batch d_model"]) -> Tensor:
        """Coordinates ``(x - mean) @ axes``."""
        return (points.double() - self.mean) @ self.axes


def principal_projection(rows: Float[Tensor, "row d_model"], k: int = 3) -> Projection:
    """Principal axes of ``rows`` (PCA), with deterministic signs: each axis has its
    largest-magnitude coordinate positive.

    >>> p = principal_projection(torch.tensor([[0.0, 0.0], [2.0, 2.0], [4.0, 4.0]]), k=1)
    >>> [round(v, 4) for v in p.axes[:, 0].tolist()], p.share.tolist()
    ([0.7071, 0.7071], [1.0])
    """
    require(1 <= k <= min(rows.shape), "k", expected=f"1 to {min(rows.shape)} axes", got=k)
    mean = reduce(rows.double(), "row d_model -> d_model", "mean")
    centred = rows.double() - mean
    if len(rows) > 2 * rows.shape[1]:
        # tall: eigenvectors of the covariance are cheaper, and its squared condition number does
        # not harm the leading axes
        values, vectors = torch.linalg.eigh(centred.mT @ centred)
        variance = values.flip(-1).clamp(min=0)
        # fix_signs takes pairs of vectors: here both sides are the same
        axes = linalg.fix_signs(vectors, vectors)[1].flip(-1)
    else:
        _, values, axes = linalg.svd(centred)
        variance = values.square()
    total = variance.sum()
    return Projection(mean, axes[:, :k], torch.where(total > 0, variance[:k] / total, torch.nan))


def umap_coordinates(
    fit: Float[Tensor, "row d_model"],
    points: Float[Tensor, "*batch d_model"],
    *,
    k: int = 3,
    seed: int = 0,
) -> Tensor:
    """Coordinates of ``points`` in a UMAP fitted on the first 10,000 rows of ``fit``, with the
    published settings (15 neighbours, minimum distance 0.1).

    UMAP distorts distances and depends on its version: :func:`principal_projection` is the
    deterministic choice. Needs the optional package umap-learn.
    """
    try:
        umap: Any = importlib.import_module("umap")
    except ImportError:
        got, instead = "not installed", 'pip install "tl-geometry[umap]" or method="pca"'
        fail("umap", expected="the optional package umap-learn", got=got, instead=instead)
    reducer = umap.UMAP(n_neighbors=15, min_dist=0.1, n_components=k, random_state=seed)
    reducer.fit(fit[:10_000].double().cpu().numpy())
    flat_points = rearrange(points, "... d_model -> (...) d_model")
    coordinates = torch.as_tensor(reducer.transform(flat_points.double().cpu().numpy()))
    return coordinates.reshape(*points.shape[:-1], k)
