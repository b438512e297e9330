"""One report of the embedded model, for all tests that read a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tl_geometry.render.figure import View
from tl_geometry.render.page import PageView
from tl_geometry.report import build
from tl_geometry.report.section import Draft


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A small report of the embedded model, and the figures that were drawn for it."""
    out = tmp_path_factory.mktemp("article") / "made"
    figures: list[Any] = []
    original = Draft.draw

    def draw(self: Draft, figure: View | PageView, key: str = "", **said: str) -> None:
        figures.append(figure)
        original(self, figure, key, **said)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft, "draw", draw)
        build.build(build.Request(contexts=64, length=64, budget="quick"), out, progress=False)
    return out, figures


@pytest.fixture
def folder(made: tuple[Path, list[Any]]) -> Path:
    """The folder of that report."""
    return made[0]
