"""Tiny models of every shape with a tokenizer and a text, as directories, and reports of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.lib.models import VOCAB, hf_model, tokenizer
from tl_geometry.report.build import Request, build


def model_directory(path: Path, architecture: str, *, words: int = 1100) -> Path:
    """A randomised model as a Hugging Face directory, with ``text.txt`` in its words."""
    hf_model(architecture).save_pretrained(path)
    tokenizer().save_pretrained(path)
    ids = torch.randint(4, VOCAB, (words,), generator=torch.Generator().manual_seed(0)).tolist()
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in ids))
    return path


def request(path: Path, **options: Any) -> Request:
    """What a report of such a directory is asked for: 40 windows of 16 tokens."""
    given: dict[str, Any] = {
        "model": str(path),
        "corpus": (path / "text.txt",),
        "contexts": 40,
        "length": 16,
        **options,
    }
    return Request(**given)


def report(
    path: Path, out: Path, *, resume: bool = False, force: bool = False, **options: Any
) -> dict[str, Any]:
    """The report of such a directory."""
    asked = request(path, **options)
    return build(asked, out, resume=resume, force=force, progress=False)
