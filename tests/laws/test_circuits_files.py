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
from tests.lib.models import tiny, tokens
from tl_geometry import trace_logit
from tl_geometry.cli import app
from tl_geometry.decomposition import decompose

SPEC = importlib.util.find_spec("circuit_tracer")
pytestmark = [
    pytest.mark.skipif(
        SPEC is None, reason="the package circuit-tracer is not installed (README, second block)"
    ),
    pytest.mark.once,
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
PAGE = f"""<!doctype html><meta charset="utf-8"><script>{D3}</script>
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


def drawn(browser: Browser, folder: Path) -> Any:
    """What the front end makes of the graphs of a folder."""
    with served(folder) as address, browser.open("") as page:
        page.tab.route("**/read", lambda route: route.fulfill(body=PAGE, content_type="text/html"))
        page.tab.goto(f"{address}/read")
        return page.evaluate(READ)


def folder_of(file: File, folder: Path) -> Path:
    """The graph where circuit-tracer's server looks for it."""
    (folder / "graph-metadata.json").write_text(json.dumps({"graphs": [file["metadata"]]}))
    (folder / f"{file['metadata']['slug']}.json").write_text(json.dumps(file))
    return folder


def graph(length: int = 14, architecture: str = "llama", **options: Any) -> File:
    prompt = tokens(batch=1, length=length, seed=7)
    return trace_logit(tiny("bridge", architecture), prompt, 5, **options).to_json()


def of_a_basis() -> File:
    """Leaves mean, pos and cvec."""
    basis = decompose(tiny("bridge", "llama"), tokens(batch=8, length=14, seed=3))
    return graph(basis=basis)


MADE: dict[str, Callable[[], File]] = {
    "graph": graph,
    "one token": functools.partial(graph, 1),
    "positions": functools.partial(graph, architecture="gpt2", keep=1.0),
    "basis": of_a_basis,
    "two prompts": functools.partial(graph, counterfactual=tokens(batch=1, length=14, seed=8)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_no_node_and_no_link_is_hidden(
    make: Callable[[], File], browser: Browser, tmp_path: Path
) -> None:
    file = make()
    here = [len(file["nodes"]), len(file["links"])]
    assert min(here) > 10
    assert drawn(browser, folder_of(file, tmp_path)) == [[here, here]]


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_the_folder_of_the_command_opens_as_it_is(browser: Browser, tmp_path: Path) -> None:
    words = ["trace", "def f(width, height):\n    return", "--answer", " w", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    ((before, after),) = drawn(browser, tmp_path)
    assert before == after
    assert before[0] > 10
