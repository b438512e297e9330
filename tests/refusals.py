"""What the library says when it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tl_geometry.base.errors import GeometryError


def refused(call: Callable[[], object]) -> str:
    """The message of the ``GeometryError`` that a call raises."""
    with pytest.raises(GeometryError) as error:
        call()
    return str(error.value)
