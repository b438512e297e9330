"""What the library says when it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tl_geometry.base.errors import GeometryError


def refused(call: Callable[[], object], kind: type[GeometryError] | None = None) -> str:
    """The message of the ``GeometryError`` that a call raises, of this very ``kind`` if given."""
    with pytest.raises(GeometryError) as error:
        call()
    assert kind in (None, type(error.value))
    return str(error.value)
