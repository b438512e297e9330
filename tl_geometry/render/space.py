"""The bundle in three dimensions, to be turned with the mouse: one self-contained page, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tl_geometry import _html
from tl_geometry._check import fail
from tl_geometry.render.flow import coordinates
from tl_geometry.verbs.ensemble import Trajectories

PAGE = """<!doctype html><meta charset="utf-8"><title>%(title)s</title>
<style>:root{color-scheme:light dark}body{margin:0;font:12px system-ui,sans-serif}canvas{width:100%%;height:420px;touch-action:none}
p{margin:4px 8px}</style>
<canvas></canvas><p><label>to state <input type="range" min="1" max="%(last)d" value="%(last)d"></label>
<output></output></p><p>%(caption)s</p>
<script>
const D=%(data)s, c=document.querySelector('canvas'), g=c.getContext('2d'), r=document.querySelector('input');
const o=document.querySelector('output');
let a=0.6, b=0.4, z=1, down=null;
const dark=matchMedia('(prefers-color-scheme: dark)');
const colour=(i,n)=>{const u=n>1?i/(n-1):0; return `hsl(${240-240*u},75%%,${dark.matches?60:45}%%)`};
function put(p){const [x,y,w]=p, X=x*Math.cos(a)-y*Math.sin(a), Y=x*Math.sin(a)+y*Math.cos(a), s=0.42*z*Math.min(c.width,c.height);
  return [c.width/2+X*s, c.height/2-(w*Math.cos(b)-Y*Math.sin(b))*s]}
function draw(){const f=devicePixelRatio||1; c.width=c.clientWidth*f; c.height=c.clientHeight*f; g.lineWidth=f;
  const n=+r.value, ink=dark.matches?'#ddd':'#222'; o.textContent=D.states[n-1];
  g.font=11*f+'px system-ui'; g.fillStyle=ink; g.strokeStyle=dark.matches?'#555':'#bbb';
  [[1,0,0],[0,1,0],[0,0,1]].forEach((e,i)=>{const u=put([0,0,0]),v=put(e); g.beginPath(); g.moveTo(...u); g.lineTo(...v); g.stroke();
    g.fillText(D.names[i],...v)});
  for(const path of D.paths){for(let t=1;t<n;t++){g.strokeStyle=colour(t,D.states.length); g.globalAlpha=0.55; g.beginPath();
    g.moveTo(...put(path[t-1])); g.lineTo(...put(path[t])); g.stroke()} g.globalAlpha=1; g.fillStyle=colour(n-1,D.states.length);
    const [x,y]=put(path[n-1]); g.fillRect(x-1.5*f,y-1.5*f,3*f,3*f)}}
c.onpointerdown=e=>{down=[e.clientX,e.clientY,a,b]; c.setPointerCapture(e.pointerId)};
c.onpointermove=e=>{if(down){a=down[2]+(e.clientX-down[0])/150; b=down[3]+(e.clientY-down[1])/150; draw()}};
c.onpointerup=()=>{down=null}; c.onwheel=e=>{e.preventDefault(); z*=Math.exp(-e.deltaY/600); draw()};
r.oninput=draw; addEventListener('resize',draw); dark.onchange=draw; draw();
</script>"""


class SpaceView:
    """A page that turns a bundle of paths: shows itself in a notebook, ``save("x.html")`` writes a file that opens offline."""

    def __init__(self, page: str, *, title: str, caption: str) -> None:
        self.page, self.title, self.caption = page, title, caption

    def html(self) -> str:
        """The page in a frame of its own, so that several live side by side."""
        return f'<iframe srcdoc="{_html.escape(self.page)}" style="width:100%;height:500px;border:0" sandbox="allow-scripts"></iframe>'

    def save(self, path: str | Path) -> Path:
        """Write the page and return the path."""
        path = Path(path)
        if path.suffix.lower() != ".html":
            fail("path", expected="a name ending in .html", got=str(path), instead="render.flow.bundle_figure for an image")
        path.write_text(self.page, encoding="utf-8")
        return path

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/html": self.html(), "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"{self.title}: {self.caption}"


def bundle_3d(
    ensemble: Trajectories,
    *,
    reference: int | None = None,
    axes: Sequence[int] | None = None,
    limit: int = 100,
    hide_last: bool = False,
    seed: int = 0,
) -> SpaceView:
    """Paths of at most ``limit`` trajectories over (u1, u2, u3) of a reference state, turned by dragging, zoomed by scrolling.

    ``axes`` takes three Cartesian coordinates in place of singular directions; ``hide_last`` leaves out the last state, which often
    dwarfs the others. Coordinates are scaled by the largest and rounded to four digits.
    """
    points, names = coordinates(ensemble, reference=reference, axes=axes, limit=limit, seed=seed)
    states = list(ensemble.states)
    if hide_last and len(states) > 1:
        points, states = points[:, :-1], states[:-1]
    scale = float(points.abs().max()) or 1.0
    paths = (points / scale * 1e4).round().to(torch.int64).tolist()
    data = json.dumps({"paths": [[[v / 1e4 for v in p] for p in path] for path in paths], "states": states, "names": names})
    caption = f"{len(points)} of {len(ensemble)} trajectories, 1 = {scale:.4g}; {ensemble.provenance.line()}"
    title = "Bundle of trajectories"
    page = PAGE % {"title": title, "caption": _html.escape(caption), "last": len(states), "data": data.replace("<", "\\u003c")}
    return SpaceView(page, title=title, caption=caption)
