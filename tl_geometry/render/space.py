"""Do tokens travel through the layers as a bundle? A self-contained page on which plotly draws
their paths in three dimensions; the mouse turns them. A notebook shows it.

The page fetches nothing: it holds plotly's script deflated, and allows it to run by its hash. It
needs the extra ``plotly``: ``pip install "tl-geometry[plotly]"``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base.errors import GeometryError
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.render.figure import whole_ticks
from tl_geometry.render.flow import bundle_figure, coordinates
from tl_geometry.render.page import PageView, caption_height

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCALE = "Viridis"
"""Colours of states, dark first and bright last."""
BUTTONS = ["zoom3d", "pan3d", "orbitRotation", "tableRotation", "resetCameraDefault3d"]
CONFIG = {"displaylogo": False, "modeBarButtons": [BUTTONS]}
"""The tools that plotly shows: none that would send the figure to a server."""


class SpaceView(PageView):
    """A plotly figure with its page. ``figure`` is the plotly figure itself; changes to it are
    shown and saved.

    A notebook gets plotly's own type of output, which JupyterLab, Notebook 7 and VS Code display,
    and an image. ``save`` writes a page that opens offline, or the image.
    """

    @property
    def figure(self) -> Figure:
        """The figure of plotly."""
        return self.data["figure"]

    def payload(self) -> dict[str, Any]:
        return {"figure": {**json.loads(str(self.figure.to_json())), "config": CONFIG}}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(include, exclude)
        del bundle["text/html"]  # it would add 2 MB of script to every output
        return {"application/vnd.plotly.v1+json": self.payload()["figure"], **bundle}


def bundle_3d(ensemble: Trajectories) -> SpaceView:
    """Paths of at most 100 trajectories through the states, turned by dragging, zoomed by scrolling
    (Sarfati et al. 2025, Fig. 1).

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.

    Raises ``GeometryError`` without plotly.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> bundle_3d(paths).title
    'Do tokens travel through the layers as a bundle?'
    """
    if importlib.util.find_spec("plotly") is None:
        message = 'views in three dimensions need plotly: pip install "tl-geometry[plotly]"'
        raise GeometryError(message)
    image = bundle_figure(ensemble)
    points, names = coordinates(ensemble)
    return SpaceView(
        "space",
        {"figure": paths_figure(points, ensemble.states, names)},
        title=image.title,
        caption=image.caption,
        width=784,
        height=540 + caption_height(image.caption),
        image=functools.partial(bundle_figure, ensemble),
        source=image.source,
        null=image.null,
        library=_plotly_script(),
    )


@functools.cache
def _plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def paths_figure(
    points: Float[Tensor, "trajectory state 3"], states: Sequence[int], names: Sequence[str]
) -> Figure:
    """The plotly figure of paths, with two traces for each state: the lines that lead to its
    points, and the points. A slider chooses the state at which paths end. ``names`` label the
    axes."""
    import plotly.graph_objects as go
    from plotly.colors import sample_colorscale

    states, last = list(states), len(states) - 1
    colours = sample_colorscale(SCALE, [t / max(1, last) for t in range(len(states))])
    gap = points.new_full((len(points), 1, 3), torch.nan)  # breaks the line between two paths
    traces = []
    for t, state in enumerate(states):
        steps = torch.cat((points[:, max(0, t - 1) : t + 1], gap), 1).flatten(0, 1)
        line = {"color": colours[t], "width": 2}
        traces.append(_trace(go, steps, mode="lines", line=line, hoverinfo="skip"))
        marker = {"color": [state] * len(points), "coloraxis": "coloraxis", "size": 2.5}
        hovers = [f"trajectory {i}, state {state}" for i in range(len(points))]
        look = {"mode": "markers", "marker": marker, "hoverinfo": "text", "hovertext": hovers}
        traces.append(_trace(go, points[:, t], **look))
    titles = {f"{side}axis": {"title": {"text": name}} for side, name in zip("xyz", names)}
    # a centre below the middle lifts the paths in the frame, away from the slider below
    camera = {"eye": {"x": 1.4, "y": 1.4, "z": 0.9}, "center": {"x": 0, "y": 0, "z": -0.12}}
    bar = {"title": {"text": "state"}, "thickness": 12, "len": 0.6, "tickvals": whole_ticks(states)}
    # a single state still needs a scale of some length
    ends = {"cmin": states[0], "cmax": max(states[-1], states[0] + 1)}
    steps = []
    for t, state in enumerate(states):
        visible = [i <= t for i in range(len(states)) for _ in ("lines", "points")]
        steps.append({"method": "restyle", "label": str(state), "args": [{"visible": visible}]})
    slider = {"active": last, "steps": steps, "currentvalue": {"prefix": "to state "}}
    return go.Figure(traces).update_layout(
        template="none",
        scene={**titles, "aspectmode": "auto", "camera": camera},
        coloraxis={"colorscale": SCALE, "colorbar": bar, **ends},
        sliders=[{**slider, "pad": {"t": 8, "b": 16}}],
        showlegend=False,
        margin=dict.fromkeys("lrtb", 0),
    )


def _trace(go: Any, points: Tensor, **look: Any) -> Any:
    x, y, z = points.T.numpy()
    return go.Scatter3d(x=x, y=y, z=z, **look)
