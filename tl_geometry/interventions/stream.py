"""Does a model need the positional (or the context) subspace of its residual stream?
:func:`project_stream` takes the subspace out of the stream h of a live model, or keeps it alone.

    remove      h - V V^T (h - mean)
    keep        mean + V V^T (h - mean)
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import linalg
from tl_geometry.base.errors import choice, fail, require
from tl_geometry.corpus.sources import state_indices
from tl_geometry.decomposition.position_context import PositionContext, require_basis
from tl_geometry.models.edit_lists import LiveEdit
from tl_geometry.models.live_edits import StreamEdit
from tl_geometry.models.model_like import ModelLike
from tl_geometry.models.model_view import ModelView
from tl_geometry.models.reader import as_view

ENERGY = 0.99
"""Share of the squared norm of the basis that a subspace of default rank holds."""
ROUNDING = 1e-12
"""Singular values below this share of the largest are rounding: float64's 2.2e-16 times some
thousand dimensions."""


def subspace_of(
    basis: PositionContext, state: int, subspace: str, rank: int | None = None
) -> Float[Tensor, "d_model rank"]:
    """Orthonormal leading directions of ``pos`` (over the window) or ``ctx`` (over contexts) at a
    state, strongest first.

    ``rank`` defaults to the fewest directions that hold 99% of the squared norm.
    """
    row = basis.index(state)
    choice(subspace, ("pos", "ctx"), "subspace")
    vectors = basis.pos if subspace == "pos" else basis.ctx
    if vectors is None:
        what, expected = "subspace='ctx'", "a basis with context vectors"
        fail(what, expected=expected, got="one without", instead="decompose(..., keep_ctx=True)")
    _, S, V = linalg.svd(vectors[row])
    # vectors that are all zero have rank 0, not 0 / 0
    numerical_rank = int((S / S[0].clamp(min=1e-300) > ROUNDING).sum())
    what, instead = f"{subspace} at state {state}", "a longer window, more contexts"
    require(numerical_rank > 0, what, expected="vectors that differ", got="zeros", instead=instead)
    if rank is None:
        energy = S.square()
        rank = 1 + int((energy.cumsum(0) < ENERGY * energy.sum()).sum())
    expected = f"1 to {numerical_rank}, the rank of {subspace} at state {state}"
    require(1 <= rank <= numerical_rank, "rank", expected=expected, got=rank)
    return V[:, :rank]


def project_stream(
    model: ModelLike,
    basis: PositionContext,
    state: int | str,
    subspace: str = "pos",
    *,
    keep: bool = False,
    rank: int | None = None,
) -> LiveEdit:
    """Context manager: take a subspace out of the stream at a state, or with ``keep`` keep only it.

    The stream h becomes ``h - V V^T (h - mean)``, or ``mean + V V^T (h - mean)``, with V the
    leading directions of ``pos`` or ``ctx`` at that state (see :func:`subspace_of`) and ``mean``
    that of the basis. State l is what block l reads, so that the edit reaches everything from there
    on; a state may also be named by its hook (``"blocks.1.hook_resid_pre"``). The model is as
    before on exit.

    :meth:`~tl_geometry.interventions.LiveEdit.hooks` gives it as one hook of a list: it projects
    what hooks before it leave, and hooks after it act on what it leaves.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> basis = tlg.decompose(model, windows, progress=False)
    >>> edit = tlg.interventions.project_stream(model, basis, "blocks.1.hook_resid_pre")
    >>> with edit:
    ...     inside = model(windows.tokens)
    >>> bool((model.run_with_hooks(windows.tokens, fwd_hooks=edit.hooks()) == inside).all())
    True
    """

    def prepare() -> tuple[ModelView, list[StreamEdit]]:
        view = as_view(model)
        return view, [_projection(view, basis, state, subspace, keep, rank)]

    return LiveEdit(prepare)


def _projection(
    view: ModelView,
    basis: PositionContext,
    state: int | str,
    subspace: str,
    keep: bool,
    rank: int | None,
) -> StreamEdit:
    require_basis(basis)
    basis.check_model(view)
    basis.require_identifiable("interventions")
    basis.require_raw("interventions on the stream")
    (at,) = state_indices([state], view.n_layers + 1, view.state_hooks)
    directions, mean = subspace_of(basis, at, subspace, rank), basis.mean[basis.index(at)]

    def hook(h: Tensor) -> Tensor:
        V, center = directions.to(h.device), mean.to(h.device)
        inside = ((h.double() - center) @ V) @ V.mT
        return (center + inside if keep else h.double() - inside).to(h.dtype)

    return StreamEdit(view.state_hooks[at], hook)
