"""Which text does every user already have? Python modules of the standard library.

:func:`held_out_documents` reads those that the embedded model was not trained on; they are the
default corpus of every command. No text is shipped. ``assets/held_out.json`` holds each module's
path inside the standard library and the sha256 of its bytes when the model was trained (CPython
3.11). Another Python may have changed some or lack them.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import NamedTuple

from tl_geometry.corpus.text_files import read_text

HELD_OUT: dict[str, str] = json.loads(
    (Path(__file__).parent / "assets" / "held_out.json").read_bytes()
)
"""Module path inside the standard library -> sha256 of its bytes when the model was trained."""


class HeldOut(NamedTuple):
    """The held-out documents found on this machine: ``texts`` and ``names`` run in parallel."""

    names: tuple[str, ...]
    texts: tuple[str, ...]


def stdlib() -> Path:
    """Directory of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_documents() -> HeldOut:
    """Read the held-out modules of :data:`HELD_OUT` from this Python's standard library.

    >>> docs = held_out_documents()
    >>> len(docs.texts) == len(docs.names) > 10
    True
    """
    found = {name: stdlib() / name for name in HELD_OUT if (stdlib() / name).is_file()}
    return HeldOut(tuple(found), tuple(map(read_text, found.values())))
