"""Files of results whose fields had other names are refused, and say that they are of before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tl_geometry import GeometryError
from tl_geometry.base.results import Result, write_atomically
from tl_geometry.flow import FlowReport, LangevinModel, SkipMap, Trajectories
from tl_geometry.measures import ContextualReport, PositionalReport
from tl_geometry.weights import TokenReadout, WeightGeometry

RENAMED = (
    FlowReport,
    LangevinModel,
    SkipMap,
    Trajectories,
    ContextualReport,
    PositionalReport,
    TokenReadout,
    WeightGeometry,
)


@pytest.mark.parametrize("result", RENAMED)
def test_a_file_of_the_version_before_is_refused(result: type[Result], tmp_path: Path) -> None:
    before = result.schema().replace("/2", "/1")
    path = tmp_path / "before.safetensors"
    write_atomically(path, {"mean": torch.zeros(1)}, {"schema": json.dumps(before)})
    text = f"expected schema {result.schema()}, got '{before}'. Use a new file: this one is of an"
    with pytest.raises(GeometryError, match=text):
        result.load(path)
