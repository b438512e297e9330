"""Which errors does tl_geometry raise, and in what words? All are :class:`GeometryError`. Their
text has one form, which every package uses: what was expected, what came, and what to call instead.
Nothing here imports torch: the command line checks its arguments before it does."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn


class GeometryError(ValueError):
    """Input from which no correct answer can be computed. Nothing is lost when it is raised: files
    and models are as before.

    ``what`` names the argument or thing at fault, ``expected`` and ``got`` say what was wrong with
    it, ``instead`` what to call, where there is such a call. The text is made of them.

    >>> error = GeometryError("window", expected="0 <= start < end <= 8", got="(3, 12)")
    >>> str(error), error.what, error.instead
    ('window: expected 0 <= start < end <= 8, got (3, 12).', 'window', None)
    """

    def __init__(
        self, what: str, *, expected: object = None, got: object = None, instead: str | None = None
    ) -> None:
        self.what, self.expected, self.got, self.instead = what, expected, got, instead
        tail = f" Use {instead.rstrip('.')}." if instead else ""
        # one sentence alone: of the report, and what unpickling passes
        plain = expected is None and got is None and instead is None
        super().__init__(what if plain else f"{what}: expected {expected}, got {got}.{tail}")


class UnsupportedModelError(GeometryError):
    """A model, or a feature of one, that is refused by name because its numbers would be wrong."""


class ReconstructionError(GeometryError):
    """Parts that do not add up to what the model itself computed, within the reconstruction
    error."""


class BudgetError(GeometryError):
    """A request that would not fit the memory budget; the text names the cheaper request."""


def fail(
    what: str,
    *,
    expected: object,
    got: object,
    instead: str | None = None,
    error: type[GeometryError] = GeometryError,
) -> NoReturn:
    """Raise ``error``."""
    raise error(what, expected=expected, got=got, instead=instead)


def require(
    condition: object,
    what: str,
    *,
    expected: object,
    got: object,
    instead: str | None = None,
    error: type[GeometryError] = GeometryError,
) -> None:
    """Raise ``error`` unless ``condition`` holds."""
    if not condition:
        fail(what, expected=expected, got=got, instead=instead, error=error)


MOST_NAMES = 20
"""Names that a refusal lists: a sentence, not a page."""


def choice(value: str, options: Sequence[str], what: str) -> str:
    """``value`` if it is one of ``options``, else an error that lists them."""
    more = ", ..." if len(options) > MOST_NAMES else ""
    names = ", ".join(map(repr, options[:MOST_NAMES])) + more
    require(value in options, what, expected=f"one of {names}", got=repr(value))
    return value


def whole(value: Any) -> int | None:
    """An integer of any type as an int, ``None`` for anything else (truth values too).

    >>> import torch
    >>> whole(torch.tensor(3)), whole(3.0), whole(True)
    (3, None, None)
    """
    # by the name of the dtype, because torch is not imported here
    if str(getattr(value, "dtype", type(value).__name__)).endswith("bool"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def count(
    value: Any, what: str, least: int = 1, most: int | None = None, instead: str | None = None
) -> int:
    """``value`` as an int, if it is an integer of any type from ``least`` to ``most``."""
    number = whole(value)
    if number is None or number < least or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        fail(what, expected=f"a whole number, {bounds}", got=repr(value), instead=instead)
    return number


def check_seed(value: Any, what: str = "--seed") -> int:
    """A seed as an int, if every generator takes it (numpy's legacy one has 32 bits)."""
    return count(value, what, 0, 2**32 - 1)
