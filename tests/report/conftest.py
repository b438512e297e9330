"""One report of the embedded model, for all tests that read a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tl_geometry.report import build


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small report of the embedded model."""
    out = tmp_path_factory.mktemp("article") / "made"
    build.build(build.Request(contexts=64, length=64, budget="quick"), out, progress=False)
    return out
