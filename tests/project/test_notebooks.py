"""The notebooks: stored with the outputs of their code, run at reduced size, with public names
only; what they show is self-contained, has fallbacks, and is small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.project.test_docs import module

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REDUCED = {
    "01_ten_minutes": {"contexts = 256": "contexts = 24"},
    "02_hidden_geometry": {"contexts = 256": "contexts = 24"},
    "03_traveling_words": {"contexts = 64": "contexts = 12"},
    "04_lines_of_thought": {
        "chunks = 384": "chunks = 96",
        "read[:336]": "read[:84]",
        "texts[336:]": "texts[84:]",
    },
    "05_induction_heads": {"contexts = 256": "contexts = 24"},
    "06_your_own_split": {"batch = 16": "batch = 4"},
    "07_who_wrote_the_keys": {
        "prompts = 12": "prompts = 2",
        "before[:4]": "before[:2]",
        "layers=layers, ": "layers=layers, draws=2, ",
        "heads=copying, ": "heads=copying, draws=2, ",
    },
    "08_from_a_logit_to_its_circuit": {
        "names = 8": "names = 2",
        "interventions.each(model)": "interventions.each(model, list(first[:6]))",
        "curve = tlg.faithfulness(model, prompts.tokens, scores, ": (
            "curve = tlg.faithfulness("
            "model, prompts.tokens, scores, fractions=(0.01, 0.1), draws=1, "
        ),
        "plain, **pair, draws=1": "plain, **pair, draws=1, fractions=(0.01, 0.1)",
        "draws=8": "draws=1",
        "scores.edges(0.01), ": "scores.edges(0.01), draws=1, ",
    },
}
"""What stands in place of what, once each: the first in the cell tagged ``parameters``."""
REAL: dict[str, tuple[str, str]] = {
    "07_who_wrote_the_keys": ("zoo.smollm2()", "google/gemma-3-270m"),
    "08_from_a_logit_to_its_circuit": ("zoo.smollm2()", "google/gemma-3-270m"),
}
"""Notebooks of a real model: how it is loaded, and what is offered in its place; the others show
the embedded model, and offer GPT-2."""
EACH = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.smollm2] if path.stem in REAL else [])
    for path in NOTEBOOKS
]
ADDRESS = re.compile(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE)
execute = module("execute")
code, run = execute.code, execute.executed
NAMESPACES = ("www.w3.org", "purl.org", "creativecommons.org", "matplotlib.org")
"""Hosts that stand in SVG files as names and are never asked."""


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def reduced(notebook: Any, changes: dict[str, str]) -> Any:
    """The notebook at a smaller size."""
    cells = code(notebook)
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert next(iter(changes)) in tagged[0].source
    assert len(re.findall(r"^\w+ =", tagged[0].source, re.M)) == 1, "nothing is left at full size"
    for old, new in changes.items():
        holding = [cell for cell in cells if old in cell.source]
        assert len(holding) == 1, old
        assert holding[0].source.count(old) == 1, old
        holding[0].source = holding[0].source.replace(old, new)
    return notebook


def shown(outputs: list[Any]) -> int:
    """How many are a figure or a page."""
    found = [output.get("data", {}) for output in outputs]
    return sum("image/png" in data or "<iframe" in data.get("text/html", "") for data in found)


def check_outputs(outputs: list[Any]) -> None:
    """No error and no warning; rich outputs with fallbacks, self-contained and small."""
    for output in outputs:
        assert output.output_type != "error", output
        assert output.get("name") != "stderr", output.text
        data = output.get("data", {})
        sizes = {
            kind: len(value if isinstance(value, str) else "".join(value))
            for kind, value in data.items()
        }
        assert all(size < 1_500_000 for size in sizes.values()), sizes
        assert not data or "text/plain" in data, sizes
        if "<iframe" in data.get("text/html", ""):
            assert "trusted notebook" in data["text/html"], sizes
        hosts = {
            found
            for found in ADDRESS.findall(data.get("text/html", ""))
            if not found.split("//")[1].endswith(NAMESPACES)
        }
        assert not hosts, hosts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_the_code_and_its_names_are_public(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert path.stem in REDUCED
    first, cells = notebook.cells[0], code(notebook)
    assert "**What you will see.**" in first.source
    assert notebook.metadata[execute.MARK] == execute.digest(notebook), "run docs/execute.py"
    assert sum(bool(cell.outputs) for cell in cells) >= 5
    outputs = [output for cell in cells for output in cell.outputs]
    check_outputs(outputs)
    assert shown(outputs) >= 2
    assert path.stat().st_size < 1_500_000
    made, offer = REAL.get(path.stem, ("zoo.embedded()", "gpt2"))
    lines = [line for cell in cells for line in cell.source.splitlines()]
    assert [line for line in lines if line.endswith("# the one line to change")] == [
        f"model = {made}  # the one line to change"
    ]
    assert f'model = TransformerBridge.boot_transformers("{offer}")' in first.source
    inner = re.compile(r"from tl_geometry\.\w+\.\w|from tl_geometry[.\w]* import _")
    assert not [line for line in lines if inner.search(line) or ADDRESS.search(line)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own libraries
@pytest.mark.parametrize("path", EACH)
def test_runs_offline(path: Path, tmp_path: Path) -> None:
    notebook = run(reduced(read(path), REDUCED[path.stem]), tmp_path)
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    check_outputs(outputs)
    assert shown(outputs) >= 2
    assert len(nbformat.writes(notebook)) < 8_000_000


def test_the_checks_detect() -> None:
    """Twins: an output that warns, asks the network, is too large or has no fallback is caught."""
    made = nbformat.v4.new_output
    good = made("display_data", {"text/html": "<p>a</p>", "text/plain": "a"})
    check_outputs([good])
    bad = [
        made("stream", name="stderr", text="UserWarning"),
        made("error", ename="E", evalue="", traceback=[]),
        made("display_data", {"text/html": "<p>a</p>"}),
        made(
            "display_data",
            {
                "text/html": "<script src='https://cdn.example.com/x.js'></script>",
                "text/plain": "a",
            },
        ),
        made("display_data", {"text/html": "x" * 1_500_001, "text/plain": "a"}),
    ]
    for output in bad:
        with pytest.raises(AssertionError):
            check_outputs([output])
