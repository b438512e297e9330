"""Which text does every user already have? Python modules of the standard library.

:func:`held_out_documents` reads those that the embedded model was not trained on; they are the
default corpus of every command. No text is shipped. ``assets/held_out.json`` holds each module's
path inside the standard library and the sha256 of its bytes when the model was trained (CPython
3.11), so that a result can say which modules are missing or have changed in this Python.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT: dict[str, str] = json.loads(
    (Path(__file__).parent / "assets" / "held_out.json").read_text(encoding="utf-8")
)
"""Module path inside the standard library -> sha256 of its bytes when the model was trained."""


@dataclass(frozen=True)
class HeldOut:
    """The held-out documents found on this machine, and what differs from the list.

    ``texts`` and ``names`` run in parallel; ``missing`` are listed modules that this Python does
    not have, ``changed`` those whose bytes differ from the listed ones (they are used all the
    same).
    """

    names: tuple[str, ...]
    texts: tuple[str, ...]
    missing: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def note(self) -> str:
        """One line that says what differs from the list, empty when nothing does."""
        differing = {"missing": self.missing, "changed": self.changed}
        parts = [f"{len(v)} {k} ({', '.join(v)})" for k, v in differing.items() if v]
        return f"held-out modules: {'; '.join(parts)}" if parts else ""


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
    raw = {name: path.read_bytes() for name, path in found.items()}
    digests = {name: hashlib.sha256(text).hexdigest() for name, text in raw.items()}
    return HeldOut(
        names=tuple(raw),
        texts=tuple(text.decode("utf-8", errors="replace") for text in raw.values()),
        missing=tuple(name for name in HELD_OUT if name not in raw),
        changed=tuple(name for name in raw if digests[name] != HELD_OUT[name]),
    )
