"""circuit-tracer's own front end, served by its own server, reads our graphs and hides no node.

Its page draws with d3, which its package does not bring: what its reader calls is written below.
"""

from __future__ import annotations

import functools
import http.server
import importlib
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.browser import Browser
from tests.tiny import tiny, tokens
from tl_geometry.circuits.trace import trace_logit
from tl_geometry.circuits.writer_edges import composition
from tl_geometry.cli import app

SPEC = importlib.util.find_spec("circuit_tracer")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        SPEC is None, reason="the package circuit-tracer is not installed (README, second block)"
    ),
]
D3 = """
const value = (x, f) => x.map(f ?? (d => d)).filter(d => !Number.isNaN(d));
window.d3 = {
  max: (x, f) => value(x, f).reduce((a, b) => b > a ? b : a, -Infinity),
  sum: (x, f) => value(x, f).reduce((a, b) => a + b, 0),
  sort: (x, f) => [...x].sort((a, b) => f(a) - f(b)),
  nestBy: (x, f) => Object.values(Object.groupBy(x, f)),
};
"""
"""What the front end's reader calls of d3 and of d3-jetpack."""
PAGE = f"""<!doctype html><script>{D3}</script>
<script src="/util.js"></script><script src="/attribution_graph/util-cg.js"></script>"""
READ = """(async () => {
  window.isLocalServing = true;
  const {graphs} = await util.getFile("./data/graph-metadata.json", false);
  const counts = data => [data.nodes.length, data.links.length];
  return Promise.all(graphs.map(async graph => {
    const data = await util.getFile(`./graph_data/${graph.slug}.json`);
    const state = {...data.qParams, pruningThreshold: graph.node_threshold};
    return [counts(data), counts(await utilCg.formatData(data, state))];
  }));
})()"""
"""As ``index.html`` and ``init-cg.js`` read: for every graph of the folder the numbers of nodes and
links in its file, and of those that the page draws."""
File = dict[str, Any]


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Address of the front end over a folder of graphs."""
    assert SPEC is not None
    (package,) = SPEC.submodule_search_locations or []
    server: Any = importlib.import_module("circuit_tracer.frontend.local_server")
    assets = Path(package) / "frontend" / "assets"
    handler = functools.partial(
        server.CircuitGraphHandler, frontend_dir=assets, data_dir=str(folder)
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


def drawn(browser: Browser, folder: Path) -> list[list[list[int]]]:
    """What the front end makes of every graph of a folder."""
    with served(folder) as address, browser.open("") as page:
        page.tab.route("**/read", lambda route: route.fulfill(body=PAGE, content_type="text/html"))
        page.tab.goto(f"{address}/read")
        return page.evaluate(READ)


def folder_of(file: File, folder: Path) -> Path:
    """The graph where circuit-tracer's server looks for it."""
    (folder / "graph-metadata.json").write_text(json.dumps({"graphs": [file["metadata"]]}))
    (folder / f"{file['metadata']['slug']}.json").write_text(json.dumps(file))
    return folder


def graph(length: int = 14) -> File:
    return trace_logit(tiny("bridge", "llama"), tokens(batch=1, length=length, seed=7), 5).to_json()


def writers() -> File:
    found = composition(tiny("bridge", "llama"), tokens(batch=4, length=12, seed=7), progress=False)
    return found.to_json(n=60)


@pytest.mark.parametrize(
    "make", [graph, functools.partial(graph, 1), writers], ids=["graph", "one token", "writers"]
)
def test_no_node_and_no_link_is_hidden(
    make: Callable[[], File], browser: Browser, tmp_path: Path
) -> None:
    file = make()
    here = [len(file["nodes"]), len(file["links"])]
    assert min(here) > 10
    assert drawn(browser, folder_of(file, tmp_path)) == [[here, here]]


def test_what_would_be_hidden_is_seen(browser: Browser, tmp_path: Path) -> None:
    """A threshold below 1, two nodes of one number, one column."""
    file = graph(1)
    heads = [n for n in file["nodes"] if n["feature_type"] == "cross layer transcoder"]
    low = file["metadata"] | {"node_threshold": 0.8}
    one = [n | {"feature": 1, "layer": "1"} if n in heads[:2] else n for n in file["nodes"]]
    column = file["metadata"] | {"prompt_tokens": file["metadata"]["prompt_tokens"][:1]}
    for fault in ({"metadata": low}, {"nodes": one}, {"metadata": column}):
        ((before, after),) = drawn(browser, folder_of(file | fault, tmp_path))
        assert after[0] < before[0]
        assert after[1] < before[1]


def test_the_folder_of_the_command_opens_as_it_is(browser: Browser, tmp_path: Path) -> None:
    words = ["trace", "def f(width, height):\n    return", "--target", " w", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    ((before, after),) = drawn(browser, tmp_path)
    assert before == after
    assert before[0] > 10
