"""The curve of pruned runs: what it draws, that it saves, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.circuits.edges_by_hand import PAIRS
from tests.tiny import tiny
from tl_geometry.base.errors import GeometryError
from tl_geometry.circuits import edge_scores, faithfulness
from tl_geometry.render import faithfulness_curve


def test_curves_intervals_and_the_null(tmp_path: Any) -> None:
    model = tiny("bridge", "llama")
    scores = edge_scores(model, **PAIRS)
    edges = faithfulness(model, scores, **PAIRS, fractions=(0.1, 0.5, 1.0), draws=2)
    view = faithfulness_curve({"integrated": edges, "again": edges})
    axis = view.figure.axes[0]
    lines = {str(line.get_label()): line for line in axis.get_lines()}
    chosen = next(line for label, line in lines.items() if label.startswith("integrated"))
    assert np.allclose(chosen.get_xdata(), 100 * edges.fractions.numpy())
    assert np.allclose(chosen.get_ydata(), edges.f.value.numpy())
    null = lines["2 random circuits"]
    assert np.allclose(null.get_ydata(), edges.random_f.mean(0).numpy())
    assert not np.allclose(null.get_ydata(), chosen.get_ydata())
    assert "those of integrated" in view.null
    assert axis.get_xlabel() == "edges kept (%)"
    assert view.save(tmp_path / "curve.html").stat().st_size > 1000
    inside = faithfulness_curve(edges, ax=axis)
    assert inside.figure is view.figure
    nodes = faithfulness(model, scores, **PAIRS, fractions=(0.5,), nodes=True, draws=1)
    assert "nodes" in faithfulness_curve(nodes).title
    with pytest.raises(GeometryError, match="curves of edges, or of nodes"):
        faithfulness_curve({"a": edges, "b": nodes})
    with pytest.raises(GeometryError, match="curves of edges, or of nodes"):
        faithfulness_curve(faithfulness(model, ["L0H0"], **PAIRS, draws=1))
    with pytest.raises(GeometryError, match="1 to 4 curves"):
        faithfulness_curve({})
