"""``python -m tests.support``: the table of what is supported, measured, not declared.

1. Every architecture of :mod:`tests.lib.models` with all parameters random, in every class that the
   installed TransformerLens has, as trained and processed: does it load and compute what Hugging
   Face computes, what does ``check_model`` refuse, and how far are the terms of a split from the
   model's own scores, as a fraction of the error allowed?
2. The cells of the installed TransformerLens are written to ``docs/support.json``, those of another
   stay; ``docs/support_table.md``, which the site includes, is written from them. Run it in both
   environments.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.lib.models import ARCHITECTURES, HAS_HOOKED, bridge_of, hf_model, hooked_of, tokens
from tl_geometry import GeometryError, check_model, view

DOCS = Path(__file__).resolve().parent.parent / "docs"
STORED, TABLE = DOCS / "support.json", DOCS / "support_table.md"
CLASSES = (*(("hooked",) if HAS_HOOKED else ()), "bridge")
"""Classes that the installed TransformerLens has."""
NAMES = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}
ROUNDING = 1e-2
"""Difference of log probabilities beyond which a model is another; float32 gives some 1e-5."""
Cell = dict[str, Any]
"""``verdict`` ("exact" or "refused"), ``worst`` (largest error over its bound, where exact),
``why`` (where refused), ``without`` (parts that are refused)."""


def measure(architecture: str, model_class: str, processed: bool) -> Cell:
    """One model: exact, or refused and why."""
    try:
        with torch.no_grad():
            hf, make = hf_model(architecture), bridge_of if model_class == "bridge" else hooked_of
            wanted = hf(tokens()).logits.log_softmax(-1)
            model = make(hf, processed, name=f"tiny-{architecture}")
            off = float((model(tokens()).log_softmax(-1) - wanted).abs().max())
        if off > ROUNDING:
            why = f"its log probabilities are off by {off:.2g} from Hugging Face's"
            return {"verdict": "refused", "why": why}
        refused: Any = check_model(model).refused
    except GeometryError as error:
        return {"verdict": "refused", "why": _short(str(error))}
    except Exception as error:  # whatever TransformerLens raises for what it cannot hold
        return {"verdict": "refused", "why": f"TransformerLens cannot hold it ({_short(error)})"}
    scores = [verdict for what, _, verdict in refused if what.startswith("scores")]
    if scores:
        return {"verdict": "refused", "why": _short(scores[0].removeprefix("refused: "))}
    errors: list[float] = []

    def look(layer: Any) -> None:
        errors.append(layer.reconstruction.worst)

    seen = view(model)
    seen.run_layers(tokens(), range(seen.n_layers), look)
    return {
        "verdict": "exact",
        "worst": round(max(errors), 2),
        "without": [what for what, _, _ in refused],
    }


def measure_all(architectures: Any = tuple(ARCHITECTURES)) -> dict[str, dict[str, Cell]]:
    """``class -> architecture -> cell``, the worse of as trained and processed."""
    found: dict[str, dict[str, Cell]] = {NAMES[c]: {} for c in CLASSES}
    for model_class in CLASSES:
        for architecture in architectures:
            plain, processed = (measure(architecture, model_class, p) for p in (False, True))
            found[NAMES[model_class]][architecture] = _worse(plain, processed)
    return found


def _worse(plain: Cell, processed: Cell) -> Cell:
    if plain["verdict"] == "refused":
        return plain
    if processed["verdict"] == "refused":
        return {**plain, "without": [*plain["without"], f"processing: {processed['why']}"]}
    return {**plain, "worst": max(plain["worst"], processed["worst"])}


def _short(error: object) -> str:
    """The first sentence of a message, without the model's name and the advice."""
    text = " ".join(str(error).split()).split(". Use ")[0]
    text = re.sub(r"^tiny-[\w-]+: ", "", text)
    return text if len(text) <= 160 else f"{text[:159]}…"


def table(stored: dict[str, dict[str, dict[str, Cell]]]) -> str:
    """The table in Markdown, an architecture a row, with its notes below."""
    columns = [(lens, name) for lens in sorted(stored) for name in stored[lens]]
    notes: dict[str, int] = {}
    lines = [
        "| architecture | " + " | ".join(f"{name}, {lens}" for lens, name in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for architecture in next(iter(next(iter(stored.values())).values())):
        cells = [_cell(stored[lens][name][architecture], notes) for lens, name in columns]
        lines.append(f"| {architecture} | " + " | ".join(cells) + " |")
    said = [f"{number}. {_escaped(note)}" for note, number in notes.items()]
    return "\n".join([*lines, "", *said, ""])


def _cell(cell: Cell, notes: dict[str, int]) -> str:
    said = [cell["why"]] if cell["verdict"] == "refused" else [_without(w) for w in cell["without"]]
    marks = ", ".join(str(notes.setdefault(note, len(notes) + 1)) for note in said)
    shown = "refused" if cell["verdict"] == "refused" else f"exact, {cell['worst']:.2f}"
    return f"{shown} ({marks})" if marks else shown


def _without(what: str) -> str:
    if what == "output head":
        return (
            "without direct effects on logits: its output head is not one norm and one linear map"
        )
    return f"as trained; refused after {what}"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("_", "\\_").replace("*", "\\*")


def main() -> int:
    """Measure, and write both files."""
    stored = json.loads(STORED.read_text("utf-8")) if STORED.exists() else {}
    lens = version("transformer-lens")
    stored = {k: v for k, v in stored.items() if k.split(".")[0] != lens.split(".")[0]}
    stored[lens] = measure_all()
    STORED.write_text(json.dumps(stored, indent=1, sort_keys=False) + "\n", "utf-8")
    TABLE.write_text(table(stored), "utf-8")
    sys.stdout.write(table(stored))
    return 0


if __name__ == "__main__":
    sys.exit(main())
