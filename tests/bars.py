"""Stand-ins for tqdm's bars, which remember what they were told."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


class Bar:
    """A bar over ``items``, or one that is moved by :meth:`update`."""

    def __init__(self, items: Any = (), *, total: int = 0, disable: bool, **_: Any) -> None:
        self.items, self.total, self.disable = items, total, disable
        self.steps: list[int] = []

    def __iter__(self) -> Any:
        return iter(self.items)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def set_postfix_str(self, text: str) -> None:
        pass

    def update(self, n: int) -> None:
        self.steps.append(n)

    @property
    def seen(self) -> int:
        """How far it was moved."""
        return sum(self.steps)


def bars(patch: pytest.MonkeyPatch, *modules: ModuleType) -> list[Bar]:
    """The bars that these modules make from now on."""
    made: list[Bar] = []

    def tqdm(*given: Any, **options: Any) -> Bar:
        made.append(Bar(*given, **options))
        return made[-1]

    for module in modules:
        patch.setattr(module, "tqdm", tqdm)
    return made
