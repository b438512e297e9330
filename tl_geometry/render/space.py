"""Do tokens travel through the layers as a bundle? Their paths in three dimensions: a figure, or a
page on which plotly draws them and the mouse turns them (it needs the extra ``plotly``)."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tl_geometry.base.errors import require
from tl_geometry.flow import Trajectories
from tl_geometry.flow.bases import top_directions
from tl_geometry.render import figure as draw
from tl_geometry.render.page import Page

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["toImage", "sendDataToCloud"]}
"""The tools that plotly shows: none that would send the figure to a server."""
MOST = 100
"""Most trajectories that are drawn, chosen with a fixed seed; more would hide each other."""


class SpacePage(Page):
    """A page on which plotly draws. A notebook gets plotly's own type of output, which JupyterLab,
    Notebook 7 and VS Code display: the script would add 2 MB to every output."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        figure = self.parts[0]["figure"]
        return {"application/vnd.plotly.v1+json": figure, "text/plain": repr(self)}


def bundle_3d(ensemble: Trajectories, *, interactive: bool = True) -> Page | draw.View:
    """Paths of at most 100 trajectories through the states, on the first three directions of the
    last state, coloured by state (Sarfati et al. 2025, Fig. 1); turned by dragging, zoomed by
    scrolling.

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.
        interactive: a page of plotly's, or a figure.

    Raises ``GeometryError`` for a page without plotly.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> bundle_3d(paths, interactive=False).title
    'Do tokens travel through the layers as a bundle?'
    """
    points, names = coordinates(ensemble)
    said = {
        "title": "Do tokens travel through the layers as a bundle?",
        "caption": f"Each line is the path of one token through the states, {len(points)} of "
        f"{len(ensemble)} trajectories; colour is the state.",
        "null": "No null is drawn: gibberish and the untrained model are rows of a table.",
        "source": ensemble.provenance.line(),
    }
    if interactive:
        expected, instead = "the extra plotly", 'pip install "tl-geometry[plotly]"'
        found = importlib.util.find_spec("plotly") is not None
        require(found, "plotly", expected=expected, got="none installed", instead=instead)
        figure = json.loads(paths_figure(points, ensemble.states, names).to_json())
        part = {"kind": "plotly", "figure": {**figure, "config": CONFIG}}
        return SpacePage(parts=[part], begin={}, height=660, library=_plotly_script(), **said)
    figure, (axis,) = draw.panels(None, size=(4.6, 4.2), subplot_kw={"projection": "3d"})
    draw.paths_3d(axis, points, ensemble.states, names, size=5.0)
    return draw.View(figure, **said)


def coordinates(ensemble: Trajectories) -> tuple[Tensor, list[str]]:
    """Paths ``[trajectory state 3]`` of at most :data:`MOST` trajectories, on the first three
    directions of the last state; and the names of these axes."""
    rows = torch.arange(len(ensemble))
    if len(rows) > MOST:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(rows), generator=generator)[:MOST].sort().values
    state = ensemble.states[-1]
    U = top_directions(ensemble.aligned_bases(), ensemble.row(state), 3)
    return ensemble.X[rows].double() @ U, [f"u{i} of state {state}" for i in (1, 2, 3)]


@functools.cache
def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def paths_figure(points: Tensor, states: Sequence[int], names: Sequence[str]) -> Figure:
    """The plotly figure of paths ``[trajectory state 3]``: a line for each, its points coloured by
    state."""
    import plotly.graph_objects as go

    colours = {"color": list(states), "colorscale": draw.ORDERED, "size": 2.5}
    traces = []
    for i, (x, y, z) in enumerate(points.transpose(1, 2).tolist()):
        marker = {**colours, "showscale": i == 0, "colorbar": {"title": {"text": "state"}}}
        look = {"mode": "lines+markers", "line": {"color": "#8888", "width": 1.5}, "marker": marker}
        hovers = [f"trajectory {i}, state {state}" for state in states]
        traces.append(go.Scatter3d(x=x, y=y, z=z, hoverinfo="text", hovertext=hovers, **look))
    titles = {f"{side}axis": {"title": {"text": name}} for side, name in zip("xyz", names)}
    layout = {"template": "none", "showlegend": False, "margin": dict.fromkeys("lrtb", 0)}
    return go.Figure(traces).update_layout(scene=titles, height=520, **layout)
