"""Which experiments, scales and published works are there? The command line checks its arguments
against these names before it imports torch, so this file imports nothing."""

from __future__ import annotations

EXPERIMENTS = ("randomisation", "addition", "nanogpt")
"""Names of the experiments: each is a function of :mod:`tl_geometry.papers`."""
SCALES = ("smoke", "cpu", "paper")
"""Scales of an experiment: it runs in seconds, in minutes, or with the published settings."""
WORKS = ("song-zhong", "lines-of-thought", "traveling-words")
"""Published works that :func:`tl_geometry.papers.reproduce` knows."""
EXPERIMENT_FILES = ("report.html", "findings.csv", "findings.safetensors", "curves.safetensors")
"""Files that every experiment writes, beside ``run.json`` and its own figures and tables."""
