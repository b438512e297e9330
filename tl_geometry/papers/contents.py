"""Names of the experiments and of the published works. Imports nothing heavy."""

from __future__ import annotations

EXPERIMENTS = ("randomisation", "addition", "nanogpt")
SCALES = ("smoke", "cpu", "paper")
"""Names and scales of the experiments; each is a function of :mod:`tl_geometry.papers`."""
WORKS = ("song-zhong", "lines-of-thought", "traveling-words")
"""Published works that :func:`tl_geometry.papers.reproduce` knows."""
EXPERIMENT_FILES = ("report.html", "findings.csv", "findings.safetensors", "curves.safetensors")
"""Files that every experiment writes."""
