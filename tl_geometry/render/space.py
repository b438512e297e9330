"""Interactive figures in three dimensions: paths of states and of tokens, turned with the mouse,
drawn by plotly on self-contained pages. A notebook and the report show them.

Texts of tokens are escaped for plotly, which reads a little markup; plotly's script is stored
deflated in the page and is allowed to run by its hash, so that nothing is fetched. Needs the extra
``plotly``: ``pip install "tl-geometry[plotly]"``.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tl_geometry.base import checks, html
from tl_geometry.base.errors import GeometryError
from tl_geometry.flow.ensemble import Trajectories
from tl_geometry.render.cells import compressed
from tl_geometry.render.figure import View, whole_ticks
from tl_geometry.render.flow import (
    BUNDLE,
    BUNDLE_NULL,
    MOST_PATHS,
    bundle_caption,
    bundle_figure,
    coordinates,
)
from tl_geometry.render.page import PageView, caption_height
from tl_geometry.render.weights import SPHERE, SPHERE_NULL, sphere_caption, sphere_paths
from tl_geometry.sphere.paths import TokenPaths

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SCALE = "Viridis"
"""Colours of states, dark first and bright last."""
BUTTONS = ["zoom3d", "pan3d", "orbitRotation", "tableRotation", "resetCameraDefault3d"]
CONFIG = {"displaylogo": False, "modeBarButtons": [BUTTONS]}
"""plotly's tools, without those that would send the figure somewhere."""


class SpaceView(PageView):
    """A plotly figure with its page: ``figure`` is plotly's own, and what is changed in it is shown
    and saved.

    A notebook gets plotly's own kind of output (JupyterLab, Notebook 7 and VS Code turn it) and an
    image; ``save`` writes a page that opens offline, or the image.
    """

    def __init__(
        self,
        figure: Figure,
        *,
        title: str,
        caption: str,
        image: Callable[[], View],
        source: str = "",
        null: str = "",
    ) -> None:
        self.figure = figure
        super().__init__(
            "space",
            {},
            title=title,
            caption=caption,
            width=784,
            height=540 + caption_height(caption),
            image=image,
            source=source,
            null=null,
            starts=library()[0],
        )

    @property
    def library(self) -> str:
        """plotly, deflated."""
        return library()[1]

    def payload(self, *, shared: bool) -> dict[str, Any]:
        return {"figure": self._plotly_json(), "library": "" if shared else self.library}

    def _plotly_json(self) -> dict[str, Any]:
        return {**json.loads(str(self.figure.to_json())), "config": CONFIG}

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle = super()._repr_mimebundle_(include, exclude)
        del bundle["text/html"]  # 2 MB of script with every output
        return {"application/vnd.plotly.v1+json": self._plotly_json(), **bundle}


def installed() -> bool:
    """Whether plotly is installed."""
    return importlib.util.find_spec("plotly") is not None


def bundle_3d(ensemble: Trajectories, *, limit: int = MOST_PATHS) -> SpaceView:
    """Paths of trajectories through the states, turned by dragging, zoomed by scrolling (Sarfati et
    al. 2025, Fig. 1).

    Args:
        ensemble: from :func:`tl_geometry.trajectories`.
        limit: the most trajectories shown, taken at random with a fixed seed.

    Raises ``GeometryError`` without plotly.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> windows = tlg.zoo.default_windows(model, 16, n=8)
    >>> paths = tlg.trajectories(model, windows, progress=False)
    >>> bundle_3d(paths, limit=5).title
    'Do tokens travel through the layers as a bundle?'
    """
    points, names = coordinates(ensemble, limit)
    labels = [f"trajectory {i}" for i in range(len(points))]
    return SpaceView(
        paths_figure(points, ensemble.states, names, labels),
        title=BUNDLE,
        caption=bundle_caption(len(points), len(ensemble)),
        null=BUNDLE_NULL,
        source=ensemble.provenance.line(),
        image=functools.partial(bundle_figure, ensemble, limit=limit),
    )


def sphere_3d(
    paths: TokenPaths, context: int = 0, positions: Sequence[int] | None = None
) -> SpaceView:
    """Paths of tokens through the layers on the norm's sphere, turned by dragging; the last state
    is labelled by its token.

    Args:
        paths: from :func:`tl_geometry.sphere.token_paths`.
        context: which prompt.
        positions: some of its tokens; all by default.

    Raises ``GeometryError`` without plotly, and for contexts and positions that are not there.

    >>> import tl_geometry as tlg
    >>> model = tlg.zoo.embedded()
    >>> view = sphere_3d(tlg.sphere.token_paths(model, "for i in range(3):", prepend_bos=True))
    >>> view.title
    'Where do tokens travel on the sphere of the norm?'
    """
    batch, length = paths.tokens.shape
    checks.index(context, batch, "context")
    chosen = checks.indices(positions, length, "positions")
    points = paths.coordinates[context, list(chosen)].double()
    labels = [html.token_text(paths.str_tokens[context][t]) for t in chosen]
    names = [f"{paths.method} {i + 1}" for i in range(3)]
    return SpaceView(
        paths_figure(points, range(points.shape[1]), names, labels, marked=True),
        title=SPHERE,
        caption=sphere_caption(paths),
        null=SPHERE_NULL,
        source=paths.provenance.line(),
        image=functools.partial(sphere_paths, paths, context, positions),
    )


def paths_figure(
    points: Float[Tensor, "trajectory state 3"],
    states: Sequence[int],
    names: Sequence[str],
    labels: Sequence[str],
    *,
    marked: bool = False,
) -> Figure:
    """The plotly figure of paths: for each state the points and, behind them, the lines that lead
    to them; a slider ends the paths at a state.

    ``names`` are those of the axes, ``labels`` those of the paths, which stand at the last state
    shown where ``marked``.
    """
    go = _graph_objects()
    from plotly.colors import sample_colorscale

    states, last = list(states), len(states) - 1
    colours = sample_colorscale(SCALE, [t / max(1, last) for t in range(len(states))])
    texts, hovers = [_drawn(label) for label in labels], [_escaped(label) for label in labels]
    gap = points.new_full((len(points), 1, 3), torch.nan)  # between the lines of two paths
    traces = []
    for t, state in enumerate(states):
        steps = torch.cat((points[:, max(0, t - 1) : t + 1], gap), 1).flatten(0, 1)
        line = {"color": colours[t], "width": 2}
        traces.append(_trace(go, steps, mode="lines", line=line, hoverinfo="skip"))
        look = {
            "mode": "markers+text" if marked and t == last else "markers",
            "marker": {"color": [state] * len(points), "coloraxis": "coloraxis", "size": 2.5},
            "hovertext": [f"{text}, state {state}" for text in hovers],
        }
        small = {"text": texts, "textfont": {"size": 11}}
        traces.append(_trace(go, points[:, t], hoverinfo="text", **look, **small))
    sides = [f"{side}axis" for side in "xyz"]
    titles = {
        side: {"title": {"text": _drawn(name)}} for side, name in zip(sides, names, strict=True)
    }
    camera = {"eye": {"x": 1.4, "y": 1.4, "z": 0.9}, "center": {"x": 0, "y": 0, "z": -0.12}}
    bar = {"title": {"text": "state"}, "thickness": 12, "len": 0.6, "tickvals": whole_ticks(states)}
    ends = {"cmin": states[0], "cmax": max(states[-1], states[0] + 1)}
    steps = [_until(t, len(states), str(state), marked) for t, state in enumerate(states)]
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


def _until(t: int, count: int, label: str, marked: bool) -> dict[str, Any]:
    """The step of the slider that ends the paths at state ``t``: lines and points up to it, and the
    labels there."""
    visible = [i <= t for i in range(count) for _ in range(2)]
    modes = ["markers+text" if marked and i == t else "markers" for i in range(count)]
    both = [mode for m in modes for mode in ("lines", m)]
    return {"method": "restyle", "label": label, "args": [{"visible": visible, "mode": both}]}


def _escaped(text: str) -> str:
    """Text for the label under the mouse, where plotly would read tags, and formulas in dollars.

    >>> _escaped("<b>$")
    '&#60;b&#62;&#36;'
    """
    return "".join(f"&#{ord(c)};" if c in "&<>$" else c for c in html.visible(text))


def _drawn(text: str) -> str:
    r"""Text for inside the scene, where plotly would read tags but knows no entities: a hair space
    follows each character that would begin one.

    >>> _drawn("<b>") == "<\u200ab>"
    True
    """
    return html.visible(text).replace("<", "<\u200a").replace("&", "&\u200a")


def _graph_objects() -> Any:
    if not installed():
        message = 'views in three dimensions need plotly: pip install "tl-geometry[plotly]"'
        raise GeometryError(message)
    import plotly.graph_objects as go

    return go


@functools.cache
def library() -> tuple[str, str]:
    """The script of plotly, and the same deflated, as base64."""
    from plotly.offline import get_plotlyjs

    script = get_plotlyjs()
    return script, compressed(script.encode())
