"""Shared settings: offline, seeded, and every skip carries its reason."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings

from tests.browser import browser  # noqa: F401 (a fixture)

settings.register_profile("project", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
