"""Names of the experiments and of the published works, for the command line. Imports nothing
heavy."""

from __future__ import annotations

EXPERIMENTS = ("randomisation", "addition", "nanogpt")
"""Names of the experiments: each is a function of :mod:`tl_geometry.papers`."""
SCALES = ("smoke", "cpu", "paper")
"""Scales of an experiment: seconds, minutes, the published settings."""
WORKS = ("song-zhong", "lines-of-thought", "traveling-words")
"""Published works that :func:`tl_geometry.papers.reproduce` knows."""
EXPERIMENT_FILES = ("report.html", "findings.csv", "findings.safetensors", "curves.safetensors")
"""Files that every experiment writes."""
