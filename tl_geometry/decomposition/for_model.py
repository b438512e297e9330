"""Does a basis fit a model, its tokens and a question? :func:`require_basis` asks all of it at the
door of a function that takes a basis."""

from __future__ import annotations

from collections.abc import Iterable

from tl_geometry.base.errors import fail
from tl_geometry.decomposition import position_context
from tl_geometry.decomposition.position_context import PositionContext
from tl_geometry.models.model_view import ModelView


def require_basis(
    view: ModelView | None,
    basis: object,
    *,
    has_bos: bool | None = None,
    states: Iterable[int] = (),
    raw: bool = False,
    contexts: int = 1,
) -> tuple[str, ...]:
    """Refuse anything but a basis that fits, and return the flags of a result made with it.

    It must be of the model of ``view`` (its weights and width) and of the BOS setting ``has_bos``,
    where these are known, hold ``states``, be of ``raw`` states where that is asked for, and of so
    many ``contexts`` at least.

    >>> import torch
    >>> from tl_geometry import decompose_activations
    >>> require_basis(None, decompose_activations(torch.ones(1, 2, 3)))
    ('one context: position and content cannot be told apart',)
    """
    position_context.require_basis(basis)
    assert isinstance(basis, PositionContext)
    if view is not None:
        basis.check_model(view, has_bos)
    for state in states:
        basis.index(state)
    if raw:
        basis.require_raw("basis")
    if basis.contexts < contexts:
        expected, instead = f"one of at least {contexts} contexts", "decompose with more windows"
        fail("basis", expected=expected, got=basis.contexts, instead=instead)
    return basis.flags() if view is None else basis.remarks(view)
