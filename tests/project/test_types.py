"""What a type checker knows of the public names: pyright reads this file, which states types and,
as a twin, errors.

A name that were ``Any`` would make every ``assert_type`` here wrong and every ignored error
unnecessary.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

from torch import Tensor

import tl_geometry as tlg

if TYPE_CHECKING:
    assert_type(tlg.corpus.repeated_random_tokens(), Tensor)
    assert_type(tlg.interventions.term.__name__, str)
    assert_type(tlg.render.split.__doc__, str | None)
    _ = tlg.decompse  # pyright: ignore[reportAttributeAccessIssue]
    _ = tlg.render.splitt  # pyright: ignore[reportAttributeAccessIssue]
    _ = tlg.interventions.turm  # pyright: ignore[reportAttributeAccessIssue]
    _ = tlg.zoo.embeded  # pyright: ignore[reportAttributeAccessIssue]
