"""``python docs/growth.py``: the curves of cost and memory on the page of evidence, from the rows
that ``python -m benchmarks --only scaling --json > docs/scaling.json`` measured."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
ROWS, PICTURE = DOCS / "scaling.json", DOCS / "_static" / "scaling.png"
AXES = {
    "length": "positions T",
    "layers": "layers",
    "heads": "heads per layer",
    "width": "d_model",
    "contexts": "contexts",
}
ROUTES = {
    "transformers, SDPA": ("#777777", "SDPA"),
    "decompose, sums alone": ("#0072b2", "decompose, sums"),
    "decompose, second moments": ("#6a51a3", "with second moments"),
    "sweep of all heads": ("#d55e00", "sweep of all heads"),
}


def digest(rows: str) -> str:
    """Of the measured rows, kept inside the picture."""
    return hashlib.sha256(rows.encode()).hexdigest()[:16]


def curves(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[tuple[int, float, float]]]:
    """(size, ratio, MiB) of each axis and route, in order."""
    found: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for row in rows:
        kind, _, where = row["benchmark"].partition(", ")
        if kind == "scaling":
            axis, value = where.split()
            key = (axis, row["route"])
            found.setdefault(key, []).append((int(value), row["ratio"], row["mib"]))
    return {key: sorted(points) for key, points in found.items()}


def short(size: int) -> str:
    """A power of two in few characters."""
    return f"{size // 1024}k" if size >= 1024 else str(size)


def figure(rows: list[dict[str, Any]]) -> Figure:
    """One column for each axis: time above, peak memory below."""
    found = curves(rows)
    axes = [axis for axis in AXES if any(key[0] == axis for key in found)]
    made, panels = plt.subplots(
        2, len(axes), figsize=(1.9 * len(axes), 4.4), sharex="col", sharey="row", squeeze=False
    )
    for column, axis in enumerate(axes):
        for route, (colour, shown) in ROUTES.items():
            sizes, ratios, memory = zip(*found[axis, route], strict=True)
            for panel, values in zip(panels[:, column], (ratios, memory), strict=True):
                panel.plot(sizes, values, "o-", color=colour, label=shown, markersize=3.5)
                panel.set_xscale("log", base=2)
                panel.set_xticks(sizes, [short(size) for size in sizes], fontsize=7)
                panel.minorticks_off()
                panel.spines[["top", "right"]].set_visible(False)
                panel.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        panels[0, column].axhline(1, color="#222222", linewidth=0.8)
        panels[1, column].set_xlabel(AXES[axis])
    panels[1, 0].set_yscale("log", base=2)
    ticks = [64, 128, 256, 512, 1024, 2048, 4096]
    panels[1, 0].set_yticks(ticks, [short(t) for t in ticks])
    panels[0, 0].set_ylabel("time, of eager\nattention's pass")
    panels[1, 0].set_ylabel("peak memory above\nthe start (MiB)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    made.legend(handles, labels, ncols=4, loc="lower center", frameon=False)
    made.tight_layout(rect=(0, 0.06, 1, 1))
    return made


if __name__ == "__main__":
    text = ROWS.read_text("utf-8")
    figure(json.loads(text)["rows"]).savefig(PICTURE, dpi=160, metadata={"rows": digest(text)})
